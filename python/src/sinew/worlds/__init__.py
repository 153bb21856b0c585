"""Environments that ship with Sinew, one file a domain: `[env] type = "python"`, `module = "sinew.worlds.NAME:Class"`.

They need nothing but Python's standard library, except those in a browser (`web`, `shop`, `miniwob`), which need Playwright. Each has tasks without end, made from a seed, a gold policy, and a state that can be
compared and, except in a browser, saved. Numbers in capitals or at the class set the difficulty: a subclass of your own changes them.
"""
