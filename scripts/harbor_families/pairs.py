"""Families of two steps: each is a pair of simple ones, on files of their own."""

from .parts import FAMILIES, Made, family

#: Simple families that are paired. Their commands are short, and none names files by a pattern.
STEPS = (
    "append-line",
    "copy-file",
    "create-file",
    "delete-file",
    "delete-folder",
    "delete-line",
    "empty-file",
    "make-executable",
    "make-folder",
    "make-read-only",
    "move-into-folder",
    "rename-file",
    "replace-word",
    "sort-into",
)
#: Distances in `STEPS` between the first and the second step of a pair: those of training, and those held out. Each step has
#: each place in both, so that a held-out pair is new and its parts are not.
TRAINED, HELD_OUT_DISTANCES = (1, 3, 5), (2,)
#: Attempts to draw two steps without a common file.
ATTEMPTS = 100


def paths(made):
    """Names that a task uses, without folders above them."""
    used = {*made.files, *made.free, *made.folders, *(check["path"] for check in made.checks)}
    return {part for path in used for part in path.split("/")}


def maker(first, second):
    """A function that makes both steps with names of their own."""

    def make(r):
        for _ in range(ATTEMPTS):
            one, two = FAMILIES[first].make(r), FAMILIES[second].make(r)
            if not paths(one) & paths(two):
                break
        else:
            raise ValueError(f"{first} and {second} always share a file")
        return Made(
            f"{one.instruction} Then do this: {two.instruction}",
            {**one.files, **two.files},
            [*one.solution, *two.solution],
            [*one.checks, *two.checks],
            one.free | two.free,
            one.executable | two.executable,
            (*one.folders, *two.folders),
        )

    return make


def named(distances):
    """Names of the pairs with these distances."""
    pairs = [(one, STEPS[(at + distance) % len(STEPS)]) for distance in distances for at, one in enumerate(STEPS)]
    return {f"{one}-then-{two}": (one, two) for one, two in pairs}


HELD_OUT = tuple(named(HELD_OUT_DISTANCES))
for name, (one, two) in named((*TRAINED, *HELD_OUT_DISTANCES)).items():
    family(name, "two-steps", "medium")(maker(one, two))
#: The steps and their pairs.
TWO_STEPS = (*STEPS, *named((*TRAINED, *HELD_OUT_DISTANCES)))
