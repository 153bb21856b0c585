"""Generated tasks in the format of Harbor: their families, and the verifier that each task carries."""

from . import edits, folders, queries
# Pairs are made of the families that were registered before.
from . import pairs
from .parts import FAMILIES, Family, Made

#: Families that are not trained on. Their commands have options and forms that trained families show in other commands. A held-out
#: pair is easier: only the order of its steps is new.
HELD_OUT = (
    "append-two-lines",
    "back-up-file",
    "copy-into-new-folder",
    "csv-two-columns",
    "json-rename",
    "make-not-executable",
    "overwrite-file",
    "rename-option",
    "repair-operator",
    "replace-in-two-files",
    "sort-numbers-into",
    "sort-reverse-into",
    "sort-two-files",
    "suffix-lines",
    "swap-case-down",
    *pairs.HELD_OUT,
)

#: Families by the name of their set.
SETS = {"two-steps": pairs.TWO_STEPS}

__all__ = ["FAMILIES", "HELD_OUT", "SETS", "Family", "Made", "edits", "folders", "pairs", "queries"]
