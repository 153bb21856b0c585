"""Environments that ship with Sinew, one file a domain: `[env] type = "python"`, `module = "sinew.worlds.NAME:Class"`.

They need nothing but Python's standard library. Each has tasks without end, made from a seed, a gold policy, and a state that can be
saved and compared. Numbers in capitals or at the class set the difficulty: a subclass of your own changes them.
"""
