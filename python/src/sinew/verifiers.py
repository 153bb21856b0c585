"""Environments of Sinew as a taskset of `verifiers` (0.4), with the id `sinew-taskset`.

    import verifiers.v1 as vf

    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "sinew-taskset", "target": "sinew.worlds.phone:Phone"}, ...))

Tasks are those of the target. Its tools are served to the agent, each rollout with an episode of its own; the last reply of the agent is its last turn
of text, and the reward is the environment's score. Needs the package `verifiers`.
"""

from __future__ import annotations

import atexit
import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from .served import Played, Served, text_of

#: Types of JSON Schema as Python's.
TYPES: dict[Any, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_SERVED: dict[str, Served] = {}
_LOCK = threading.Lock()


def served(target: str, options: dict[str, Any], python: str | None) -> Served:
    """The server of a target: one for each target and its options."""
    key = repr((target, sorted(options.items()), python))
    with _LOCK:
        if key not in _SERVED:
            _SERVED[key] = Served(target, options=options, python=python)
            atexit.register(_SERVED[key].close)
        return _SERVED[key]


class SinewState(vf.State):
    """What the tools tell the score: the episode of a rollout."""

    episode: str = ""


class SinewData(vf.TaskData):
    """A task, where its episodes are, and the key of that server, which ends with this process."""

    url: str = ""
    token: str | None = None
    row: dict[str, Any] = {}


class SinewToolsConfig(vf.ToolsetConfig):
    """No keys of its own: the task says where its episodes are."""


class SinewTools(vf.Toolset[SinewToolsConfig, SinewState]):
    """The tools of one episode. Its server is a process that ends with its rollout."""

    TOOL_PREFIX = None

    async def setup_task(self, task: SinewData) -> None:
        self.episode = Served(task.url, token=task.token).episode(task.row)

    def register(self, mcp: Any) -> None:
        for tool in self.episode.tools:
            function = self._with_state(self.function(tool))
            mcp.add_tool(function, name=tool["name"], description=tool["description"] or None)

    def function(self, tool: dict[str, Any]) -> Any:
        """A tool as a function whose signature is its schema."""
        schema = tool["schema"]
        needed = set(schema.get("required", ()))
        empty = inspect.Parameter.empty
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=empty if name in needed else None,
                annotation=TYPES.get(kind.get("type"), Any) if name in needed else TYPES.get(kind.get("type"), Any) | None,
            )
            for name, kind in schema.get("properties", {}).items()
        ]

        def call(**arguments: Any) -> str:
            self.state.episode = self.episode.name
            given = {name: value for name, value in arguments.items() if value is not None}
            if self.episode.done:
                return "The episode is over."
            answer = self.episode.call(tool["name"], **given)
            return answer.text or ("The episode is over." if answer.done else "ok")

        call.__name__ = tool["name"]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call


class SinewTaskConfig(vf.TaskConfig):
    """How the tools of a task are served."""

    tools: SinewToolsConfig = SinewToolsConfig()


class SinewTask(vf.Task[SinewData, SinewState, SinewTaskConfig]):
    """A task of the target."""

    @classmethod
    def toolsets(cls, config: SinewTaskConfig) -> list[vf.Toolset[Any, Any]]:
        return [SinewTools(config.tools)]

    @vf.reward
    async def environment(self, trace: vf.Trace[Any, Any, Any]) -> float:
        """The environment's score, after the last reply as a turn of text."""
        worlds = Served(self.data.url, token=self.data.token)
        # An episode of that name is open, if a tool was called; else it begins here.
        name = trace.state.episode or None
        with worlds, worlds.episode(self.data.row, name) as episode:
            if trace.last_reply and not ended(episode):
                episode.say(trace.last_reply)
            value = episode.score()["reward"]
        if value is None:
            raise vf.TaskError("the environment gave no score")
        return float(value)


def ended(episode: Played) -> bool:
    """Whether an episode that was found open has ended: a server refuses what follows an end."""
    return episode.done


class SinewConfig(vf.TasksetConfig):
    """What is served."""

    task: SinewTaskConfig = SinewTaskConfig()
    #: A class, a built-in environment, a recipe, or the address of a server.
    target: str = ""
    #: Attributes of a class.
    options: dict[str, Any] = {}
    #: Interpreter of a class.
    python: str | None = None
    #: `train` or `held-out`, and the most tasks.
    split: str = "train"
    most: int = 1000


class SinewTaskset(vf.Taskset[SinewTask, SinewConfig]):
    """Tasks of a target."""

    def load(self) -> Iterator[SinewTask]:
        config = self.config
        if not config.target:
            raise ValueError("target is empty: name a class, a built-in environment, a recipe or an address")
        worlds = served(config.target, config.options, config.python)
        for index in range(min(worlds.count(config.split), config.most)):
            row = worlds.task(config.split, index)
            with worlds.episode(row) as episode:
                system = [text_of(m["content"]) for m in episode.messages if m["role"] == "system"]
                prompt = [text_of(m["content"]) for m in episode.messages if m["role"] != "system"]
            data = SinewData(
                name=row["id"],
                prompt="\n\n".join(prompt),
                system_prompt="\n\n".join(system) or None,
                url=worlds.url,
                token=worlds.token,
                row=row,
            )
            yield SinewTask(data, config.task)


__all__ = ["SinewTaskset"]

if __name__ == "__main__":
    SinewTools.run()
