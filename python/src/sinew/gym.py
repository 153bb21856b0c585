"""Environments of Sinew as environments of Gymnasium, whose texts are observations and actions.

    import sinew.gym

    env = sinew.gym.make("sinew.worlds.household:Household")
    seen, info = env.reset(seed=3)
    seen, reward, terminated, truncated, info = env.step('{"tool": "look", "arguments": {}}')

An action is a call as JSON, or any other text as a turn of text. A call that was cut is neither: it is answered with an error, and
`info["truncated"]` is true. `info["tools"]` of `reset` has the tools. The seed of `reset` chooses the
task; `options={"split": "held-out", "index": 0}` names one. Needs the package `gymnasium`.
"""

from __future__ import annotations

import json
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv

from .served import Played, Served


class AnyText(gymnasium.Space):  # type: ignore[misc,type-arg]
    """All texts. Gymnasium's own space of texts lists its characters."""

    def __init__(self) -> None:
        super().__init__(shape=(), dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return ""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)


class SinewEnv(gymnasium.Env):  # type: ignore[misc,type-arg]
    """Episodes of a target, one after another."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, target: str | Served, **arguments: Any) -> None:
        self._owned = isinstance(target, str)
        self._served = Served(target, **arguments) if isinstance(target, str) else target
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._episode: Played | None = None
        self._next = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        split = options.get("split", "train")
        number = options.get("index", seed)
        if number is None:
            number, self._next = self._next, self._next + 1
        count = self._served.count(split)
        if count == 0:
            raise ValueError(f"{self._served.url} has no tasks of the split {split!r}")
        self._end()
        task = self._served.task(split, int(number) % count)
        self._episode = self._served.episode(task)
        return self._episode.prompt, {"task": task["id"], "tools": self._episode.tools}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._episode is None:
            raise RuntimeError("step before reset")
        if cut(action):
            error = "Error: the call ends before its JSON does: say the whole call again, shorter"
            return error, 0.0, False, False, {"error": True, "truncated": True}
        call = parsed(action)
        answer = self._episode.say(action) if call is None else self._episode.call(call[0], **call[1])
        reward, info = answer.reward, {"error": answer.error}
        if answer.done:
            score = self._episode.score()
            info.update(score)
            reward += score["reward"] or 0.0
        return answer.text, reward, answer.done, False, info

    def close(self) -> None:
        self._end()
        if self._owned:
            self._served.close()

    def _end(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None


def cut(action: str) -> bool:
    """Whether an action begins as a call, and ends before its JSON does."""
    text = "".join(action.split())
    if not (text.startswith('{"tool"') or text and '{"tool"'.startswith(text)):
        return False
    try:
        json.loads(action)
    except ValueError as error:
        # What follows a whole call is no cut.
        return "Extra data" not in str(error)
    return False


def parsed(action: str) -> tuple[str, dict[str, Any]] | None:
    """The call that an action is; `None`: it is text."""
    if not action.lstrip().startswith("{"):
        return None
    try:
        call = json.loads(action)
    except ValueError:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(call.get("tool"), str) or not isinstance(arguments, dict):
        return None
    return call["tool"], arguments


def make(target: str | Served, **arguments: Any) -> SinewEnv:
    """An environment of Gymnasium. Arguments are those of `Served`."""
    return SinewEnv(target, **arguments)


def make_vec(target: str, num_envs: int, **arguments: Any) -> SyncVectorEnv:
    """A vector of environments that share one server, which ends with this process or with `close` of the first."""
    served = Served(target, **arguments)
    first = SinewEnv(served)
    first._owned = True
    others = [SinewEnv(served) for _ in range(num_envs - 1)]
    # The first is closed last.
    return SyncVectorEnv([lambda e=e: e for e in [*others, first]])


gymnasium.register(id="sinew/Env-v0", entry_point=SinewEnv)
