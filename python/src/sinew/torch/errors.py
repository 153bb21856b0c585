"""Errors of the policy server and how they are reported.

`Refused` is raised by every rank alike, or by rank 0 before any rank begins, and leaves the server usable.
Any other exception of a command is fatal, since other ranks may hang in a collective.
"""

from __future__ import annotations

from typing import Any

import torch

STATUS = {"input": 400, "memory": 500, "rank": 500, "broken": 500, "fence": 409, "gap": 412}


class Refused(Exception):
    """A command that ends without a change; `kind` is one of the keys of `STATUS`."""

    def __init__(
        self, text: str, kind: str = "input", rank: int | None = None, phase: str | None = None
    ) -> None:
        super().__init__(text)
        self.kind, self.text, self.rank, self.phase = kind, text, rank, phase

    def report(self) -> dict[str, Any]:
        """The error as a map of the protocol."""
        return {"kind": self.kind, "text": self.text, "rank": self.rank, "phase": self.phase}


def wrong(field: str, value: object, allowed: str) -> Refused:
    """An input error that names the field, its value and what is allowed."""
    shown = repr(value)
    if len(shown) > 100:
        shown = shown[:100] + "..."
    return Refused(f"{field} is {shown}, allowed is {allowed}")


def is_memory(error: BaseException) -> bool:
    """Whether the error means that the device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "not enough memory" in text or "can't allocate memory" in text
    )


COLLECTIVE = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "timed out",
    "socket",
    "broken pipe",
    "store",
)


def is_symptom(error: BaseException) -> bool:
    """Whether the error may only follow from a fault of another rank (a collective that failed)."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in COLLECTIVE)
