"""Environments of other projects: one module each, with the package of that project installed by the user.

A recipe names the class, the interpreter that has the package, and the options of the class::

    [env]
    type = "python"
    module = "sinew.bridges.gym:Gym"
    python = ".venv/bin/python3"
    options = { id = "CartPole-v1" }
"""

import importlib
import random
import re
import threading


class Missing(ImportError):
    """A package that the interpreter of the worker does not have."""


def package(name, install):
    """A module of another project; without it, an error that says what to install, and where."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(
            f"{name} cannot be imported ({error}): pip install {install}, and name its interpreter with env.python"
        ) from error


def draw(*parts):
    """A source of random numbers that depends on its parts alone."""
    return random.Random(" ".join(map(str, parts)))


def seeds(split, seed, count, held_out):
    """Seeds of the tasks of a split. Those of the splits lie apart."""
    start = (2 * int(seed) + (split == "held-out")) * 1_000_003
    return range(start, start + (held_out if split == "held-out" else count))


def belongs(index, split, whole=False, at=4):
    """Whether the entry at `index` of a list is in a split. Every fifth is held out, with `whole` all: for measuring only."""
    return (whole or index % 5 == at) == (split == "held-out")


def chosen(text, allowed):
    """The action that a text names: what stands alone, in brackets, or last in it. None: it names none."""
    text = text.strip()
    lines = text.splitlines() or [""]
    marked = re.findall(r"[<\[({]\s*([^<>\[\](){}]+?)\s*[>\])}]", text)
    last = lines[-1].rpartition("ction:")[2].strip().rstrip(".")
    folded = {str(name).lower(): name for name in allowed}
    for said in (text, last, *reversed(marked)):
        if said.lower() in folded:
            return folded[said.lower()]
    return None


class Spares:
    """Objects that are slow to make, kept between episodes. A caller resets what it takes."""

    def __init__(self, most=64):
        self.most, self.kept, self.lock = most, [], threading.Lock()

    def take(self, make):
        with self.lock:
            if self.kept:
                return self.kept.pop()
        return make()

    def give(self, thing):
        """Keeps an object. False: there are enough, and the caller closes it."""
        with self.lock:
            if len(self.kept) < self.most:
                self.kept.append(thing)
                return True
        return False
