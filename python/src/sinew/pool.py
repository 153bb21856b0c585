"""The data pool: push finished trajectories of other systems into `sinew serve --pool`."""

from __future__ import annotations

import hashlib
import urllib.parse
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Mapping, Sequence

from ._http import HttpClient
from .client import Trace
from .errors import SinewError

#: Version of the schema that this client writes.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Pushed:
    """What became of one trajectory."""

    #: `admitted`, `duplicate` or `quarantined`.
    status: str
    #: Its id, unless it is in quarantine.
    id: str | None
    #: Its row in the quarantine, the code of the reason, and the reason in words.
    quarantine: str | None = None
    code: str | None = None
    message: str | None = None

    @staticmethod
    def _of(raw: Mapping[str, Any]) -> Pushed:
        code = raw.get("reason", {}).get("code")
        return Pushed(raw["status"], raw.get("id"), raw.get("quarantine"), code, raw.get("message"))


@dataclass(frozen=True)
class Held:
    """A row of the quarantine."""

    id: str
    code: str
    message: str
    source: str
    #: What was pushed.
    item: Any


def tokenizer_hash(tokens: Iterable[bytes]) -> str:
    """What a tokenizer is recognized by, from the bytes of each id in order."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


def prompt(tokens: Sequence[int], parent: int | None = None) -> dict[str, Any]:
    """A node of tokens that the model was given first."""
    return {"parent": parent, "kind": "prompt", "tokens": list(tokens)}


def sampled(
    parent: int,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """A node of tokens that weights of `version` drew at `temperature`, each with its log-probability.

    The log-probabilities are at that temperature too, 1 for greedy sampling. Those of an engine
    that reports them at 1 whatever it sampled at fit temperature 1 alone.
    """
    return {
        "parent": parent,
        "kind": "sampled",
        "tokens": list(tokens),
        "logprobs": [float(p) for p in logprobs],
        "temperature": temperature,
        "version": version,
    }


def observation(parent: int, tokens: Sequence[int]) -> dict[str, Any]:
    """A node of tokens that the world answered, joins of the template included."""
    return {"parent": parent, "kind": "observation", "tokens": list(tokens)}


def from_trace(trace: Trace, **more: Any) -> dict[str, Any]:
    """A trace of a gateway as a trajectory; `more` adds or replaces fields."""
    raw = trace.raw
    nodes = []
    for node in raw["nodes"]:
        node = {name: value for name, value in node.items() if value is not None}
        if node["kind"] != "sampled":
            node = {k: v for k, v in node.items() if k not in ("logprobs", "versions")}
        nodes.append(node)
    return {
        "id": raw["episode"],
        "task": raw["task"],
        "task_kind": raw["task_kind"],
        "group": raw["group"],
        "reward": raw["outcome"]["reward"],
        "success": raw["outcome"]["success"],
        "metrics": raw["outcome"]["metrics"],
        "end": raw["end"],
        "nodes": nodes,
        **more,
    }


class Pool(HttpClient):
    """The pool of a `sinew serve --pool`. `token` is its control token; safe to use from threads."""

    def status(self) -> dict[str, Any]:
        """Counts by task type and by reason, and the tokenizer that trajectories must name."""
        answer: dict[str, Any] = self._http.json("GET", "/pool", repeatable=True)
        return answer

    def push(
        self,
        trajectories: Iterable[Mapping[str, Any]],
        *,
        tokenizer: str | None = None,
        model: str | None = None,
        source: str = "",
        batch: int = 256,
    ) -> list[Pushed]:
        """Pushes trajectories, `batch` of them in a request, and says what became of each.

        `tokenizer` is the hash of the tokenizer that made the ids; see `tokenizer_hash`. Pushing
        again is harmless: what is known is told to be a duplicate.
        """
        if batch < 1:
            raise SinewError(f"batch is {batch}: expected 1 or more")
        out: list[Pushed] = []
        waiting: list[dict[str, Any]] = []

        def send() -> None:
            body: dict[str, Any] = {
                "version": SCHEMA_VERSION,
                "source": source,
                "trajectories": waiting,
            }
            if tokenizer is not None:
                body["tokenizer"] = tokenizer
            if model is not None:
                body["model"] = model
            told = self._http.json("POST", "/pool/trajectories", body, repeatable=True)
            out.extend(Pushed._of(item) for item in told["items"])
            waiting.clear()

        for trajectory in trajectories:
            waiting.append(dict(trajectory))
            if len(waiting) == batch:
                send()
        if waiting:
            send()
        return out

    def quarantined(self, page: int = 100) -> Iterator[Held]:
        """Rows of the quarantine, oldest first."""
        after = ""
        while True:
            told = self._http.json("GET", f"/pool/quarantine?limit={page}{after}", repeatable=True)
            for row in told["rows"]:
                reason = row["reason"]["code"]
                yield Held(row["quarantine"], reason, row["message"], row["source"], row["item"])
            if told["next"] is None:
                return
            after = "&after=" + urllib.parse.quote(told["next"], safe="")

    def release(self, quarantine: str, *, kind: str | None = None) -> Pushed:
        """Checks a row of the quarantine again; with `kind`, as `sft` or `dpo`."""
        path = "/pool/quarantine/" + urllib.parse.quote(quarantine, safe="") + "/release"
        body = {} if kind is None else {"kind": kind}
        return Pushed._of(self._http.json("POST", path, body, repeatable=False))

    def delete(self, quarantine: str) -> None:
        """Deletes a row of the quarantine."""
        path = "/pool/quarantine/" + urllib.parse.quote(quarantine, safe="")
        self._http.json("DELETE", path)
