"""What can go wrong. Each error says what was asked, what was answered and what to do."""

from __future__ import annotations


class SinewError(Exception):
    """Base of everything that this package raises."""


class ConnectionFailed(SinewError):
    """The server could not be reached, or the connection broke."""

    def __init__(self, method: str, url: str, reason: str) -> None:
        super().__init__(f"{method} {url}: {reason}; is `sinew serve` running there?")
        self.method = method
        self.url = url
        self.reason = reason


class ApiError(SinewError):
    """The server answered with an error."""

    def __init__(self, method: str, url: str, status: int, message: str) -> None:
        super().__init__(f"{method} {url}: {status}: {message}")
        self.method = method
        self.url = url
        self.status = status
        self.message = message


class NoReward(SinewError):
    """An agent ended without a reward: it returned none and never called `reward()`."""


class RolloutError(SinewError):
    """Used out of place, for example `reward()` outside of a rollout."""
