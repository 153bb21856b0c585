"""Generated tasks in the format of Harbor: their families, and the verifier that each task carries."""

from . import edits, folders, queries
from .parts import FAMILIES, Family, Made

#: Families that are not trained on. Every command of theirs is put together from parts that trained families show.
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
)

__all__ = ["FAMILIES", "HELD_OUT", "Family", "Made", "edits", "folders", "queries"]
