"""The gateway's control interface: rollouts, rewards, traces."""

from __future__ import annotations

import functools
import os
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Mapping

from ._http import HttpClient
from ._threads import in_thread, open_rollout
from .errors import SinewError
from .keys import using


def _checked(value: float, name: str) -> float:
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise SinewError(f"{name} is {value!r}: expected a finite number")
    return number


@dataclass(frozen=True)
class TraceNode:
    """The tokens that one step of a rollout added."""

    #: Index of the node before it, or `None` for a root.
    parent: int | None
    #: `prompt`, `sampled`, `forced` or `observation`.
    kind: str
    turn: int
    tokens: list[int]
    #: One for each token of a sampled node, otherwise empty.
    logprobs: list[float]
    #: At which its tokens were drawn and their log-probabilities are; 1 where sampling was greedy.
    temperature: float
    #: The messages that the tokens say, as the gateway writes them.
    messages: list[dict[str, Any]]
    #: The tokens as text, of episodes that `sinew.episode` reads; `None` from a gateway.
    text: str | None
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def _of(raw: dict[str, Any]) -> TraceNode:
        parent = raw["parent"]
        return TraceNode(
            None if parent == 0xFFFF_FFFF else parent,
            raw["kind"],
            raw["turn"],
            raw["tokens"],
            raw["logprobs"],
            raw.get("temperature", 1.0),
            raw.get("messages", []),
            raw.get("text"),
            raw,
        )


@dataclass(frozen=True)
class Trace:
    """What a rollout did: a tree of nodes. A path from a root to a leaf is what the model saw."""

    nodes: list[TraceNode]
    #: `type`: `terminated`, `truncated` or `failed`.
    end: dict[str, Any]
    #: Of the whole episode, without rewards of turns; `None` if nobody scored it.
    reward: float | None
    success: bool
    metrics: dict[str, float]
    #: Fields of requests that were accepted without effect, and how often each came.
    ignored: dict[str, int]
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def of(raw: dict[str, Any]) -> Trace:
        """From the gateway's JSON."""
        raw = raw.get("trace", raw)
        outcome = raw["outcome"]
        return Trace(
            [TraceNode._of(node) for node in raw["nodes"]],
            raw["end"],
            None if outcome.get("unscored") else outcome["reward"],
            outcome["success"],
            outcome["metrics"],
            raw.get("ignored", {}),
            raw,
        )

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the model drew, over all branches, each counted once."""
        return sum(len(node.tokens) for node in self.nodes if node.kind == "sampled")

    def leaves(self) -> list[int]:
        """Indexes of nodes that nothing follows."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def path(self, leaf: int) -> list[TraceNode]:
        """Nodes from the root to `leaf`."""
        path: list[TraceNode] = []
        at: int | None = leaf
        while at is not None:
            path.append(self.nodes[at])
            at = self.nodes[at].parent
        return path[::-1]


class Rollout:
    """One run of one task. As a context manager it finishes itself; an exception inside ends it
    as failed, and inside it `sinew.key` is its key."""

    def __init__(self, client: Client, raw: Mapping[str, Any]) -> None:
        self.raw = dict(raw)
        #: Names the rollout in every other call.
        self.id: str = raw["id"]
        #: What an agent's SDK gets as base URL; ends in `/v1`.
        self.base_url: str = raw["base_url"]
        #: What an agent's SDK gets as key. It opens this rollout and nothing else.
        self.api_key: str = raw["api_key"]
        #: Base URL that is the same for all rollouts: the key says which one is meant.
        self.shared_url: str = raw.get("shared_url", self.base_url)
        #: W3C trace context that stands for the key, for clients that cannot change theirs.
        self.traceparent: str = raw.get("traceparent", "")
        self._client = client
        self._finished = False

    def __repr__(self) -> str:
        return f"Rollout(id={self.id!r}, base_url={self.base_url!r})"

    def env(self) -> dict[str, str]:
        """Environment variables by which SDKs find this rollout."""
        origin = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": origin,
            "ANTHROPIC_API_KEY": self.api_key,
            "GOOGLE_GEMINI_BASE_URL": origin,
            "GEMINI_API_KEY": self.api_key,
        }

    def reward(
        self,
        value: float,
        *,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        turn: int | None = None,
    ) -> None:
        """Scores the rollout, or with `turn` one model call (from 1). A later score replaces
        an earlier one."""
        body: dict[str, Any] = {"reward": _checked(value, "reward")}
        if success is not None:
            body["success"] = success
        if metrics:
            body["metrics"] = {name: _checked(v, f"metric {name}") for name, v in metrics.items()}
        if turn is not None:
            body["turn"] = turn
        self._client._http.json("POST", f"{self._path}/reward", body, repeatable=True)

    def finish(self, *, failed: str | None = None, timed_out: bool = False) -> None:
        """Ends it: no model call is answered any more and the trace is final. With `failed`,
        as an episode that the system failed, which trains nothing; with `timed_out`, as one
        that its time limit cut."""
        if self._finished:
            return
        body: dict[str, Any] = {}
        if failed is not None:
            message = failed[:2000]
            body["end"] = {"type": "failed", "kind": "environment", "message": message}
        elif timed_out:
            body["end"] = {"type": "truncated", "limit": "wall_time"}
        self._client._http.json("POST", f"{self._path}/finish", body, repeatable=True)
        self._finished = True

    def trace(self) -> Trace:
        """What was captured so far."""
        return self._client.trace(self.id)

    @property
    def _path(self) -> str:
        return "/rollouts/" + urllib.parse.quote(self.id, safe="")

    def __enter__(self) -> Rollout:
        self._using = using(self.api_key)
        self._using.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._using.__exit__(None, None, None)
        self.finish(failed=None if error is None else f"{type(error).__name__}: {error}")


class AsyncRollout(Rollout):
    """A rollout inside `async with client.arollout(...)`: rewards are noted, and sent when it is
    left, so that nothing holds the event loop up."""

    def __init__(self, client: Client, raw: Mapping[str, Any]) -> None:
        super().__init__(client, raw)
        self._noted: list[tuple[float, dict[str, Any]]] = []

    def reward(
        self,
        value: float,
        *,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        turn: int | None = None,
    ) -> None:
        more = {"success": success, "metrics": metrics, "turn": turn}
        self._noted.append((_checked(value, "reward"), more))

    def _end(self, failed: str | None) -> None:
        try:
            for value, more in self._noted:
                super().reward(value, **more)
        except SinewError as e:
            # A reward that is refused must not leave the rollout open.
            self.finish(failed=failed or f"{type(e).__name__}: {e}")
            raise
        self.finish(failed=failed)


class Client(HttpClient):
    """A gateway (`sinew serve`, `sinew train --serve`). `token` is its control token. Safe to use
    from threads."""

    @classmethod
    def from_env(cls, **options: Any) -> Client:
        """The gateway at `SINEW_URL` with the token of `SINEW_TOKEN`, or of the file
        `SINEW_TOKEN_FILE`. `options` are those of `Client`."""
        url, token = os.environ.get("SINEW_URL"), os.environ.get("SINEW_TOKEN")
        file = os.environ.get("SINEW_TOKEN_FILE")
        if url is None:
            raise SinewError("SINEW_URL is not set: the address of `sinew train --serve`")
        if token is None and file is not None:
            token = Path(file).read_text()
        return cls(url, token, **options)

    @property
    def url(self) -> str:
        """Where the gateway is."""
        return self._http.url

    def health(self) -> dict[str, Any]:
        """What the gateway says of itself. Needs no token."""
        answer: dict[str, Any] = self._http.json("GET", "/health", repeatable=True)
        return answer

    def rollout(
        self,
        *,
        id: str | None = None,
        task: str | None = None,
        group: str | None = None,
        kind: str | None = None,
        purpose: str | None = None,
        run: str | None = None,
        draw: int | None = None,
        step: int | None = None,
        seed: int | None = None,
        max_turns: int | None = None,
        max_context_tokens: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Rollout:
        """Opens a rollout.

        `group` names the rollouts whose rewards are compared. `draw` is the number of the task that
        was drawn in `run`; `step` is its former name. `sampling` may hold
        `temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, and `pinned`: the agent cannot
        change them. `adapter` names the LoRA adapter of all calls, which the gateway must have
        loaded.
        """
        asked = {
            "id": id,
            "task": task,
            "group": group,
            "task_kind": kind,
            "purpose": purpose,
            "run": run,
            "draw": step if draw is None else draw,
            "seed": seed,
            "max_turns": max_turns,
            "max_context_tokens": max_context_tokens,
            "sampling": None if sampling is None else dict(sampling),
            "adapter": adapter,
        }
        body = {name: value for name, value in asked.items() if value is not None}
        return Rollout(self, self._http.json("POST", "/rollouts", body))

    @asynccontextmanager
    async def arollout(self, **spec: Any) -> AsyncIterator[AsyncRollout]:
        """`with client.rollout(...)` for asyncio, with the same arguments::

            async with client.arollout(task="t1") as rollout:
                rollout.reward(score(await agent(question)))     # agent uses sinew.key
        """
        opened = await open_rollout(None, functools.partial(self.rollout, **spec))
        rollout = AsyncRollout(self, opened.raw)
        failed: str | None = None
        try:
            with using(rollout.api_key):
                yield rollout
        except BaseException as e:
            failed = f"{type(e).__name__}: {e}"
            raise
        finally:
            await in_thread(None, rollout._end, failed)

    def trace(self, rollout_id: str) -> Trace:
        """What a rollout captured so far."""
        path = "/rollouts/" + urllib.parse.quote(rollout_id, safe="")
        return Trace.of(self._http.json("GET", path, repeatable=True))
