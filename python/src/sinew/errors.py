"""What can go wrong. Each error says what was asked, what was answered and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SinewError(Exception):
    """Base of everything that this package raises."""

    #: The rows of `sinew.check`, if it raised this: `Check`s.
    checks: Sequence[Any] = ()


class ConnectionFailed(SinewError):
    """The server could not be reached, or the connection broke."""

    def __init__(self, method: str, url: str, reason: str) -> None:
        super().__init__(f"{method} {url}: {reason}; is `sinew serve` running there?")
        self.method = method
        self.url = url
        self.reason = reason


class ApiError(SinewError):
    """The server answered with an error."""

    def __init__(self, method: str, url: str, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"{method} {url}: {status}: {message}")
        self.method = method
        self.url = url
        self.status = status
        self.message = message
        #: Short name of the error, such as `no_model_call`; `None` if the answer has none.
        self.code = code


class NoReward(SinewError):
    """An agent ended without a reward: it returned none and never called `reward()`."""


class RolloutError(SinewError):
    """Used out of place, for example `reward()` outside of a rollout."""


class BinaryNotFound(SinewError):
    """The `sinew` program is not there. The text says where it was searched."""


class RecipeError(SinewError):
    """A recipe, an argument or a file is refused."""

    def __init__(
        self, message: str, field: str | None = None, line: int | None = None, column: int | None = None
    ) -> None:
        super().__init__(message)
        #: What is wrong, what is allowed, and what to do.
        self.message = message
        #: Path of the key, such as `rollout.group_size`; `None` if it is no key that is wrong.
        self.field = field
        #: Line of the recipe, from 1. Of a recipe that was given as a dict: of its TOML text.
        self.line = line
        #: Character of the line, from 1.
        self.column = column


class OutsideMissing(SinewError):
    """The recipe is right, but something that it needs is not there yet: a model, a server, a program."""


class RunFailed(SinewError):
    """The system failed, or a run collapsed, learned nothing or lost data."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        #: The `Result` of a run that came to its end all the same; `None` if it did not.
        self.result = result


class RunStopped(SinewError):
    """A run was stopped before its end. Nothing is lost: `sinew.train(..., resume=True)` goes on with it."""
