"""Episodes of any environment of Sinew from Python: one that a server has, or one that is served here.

    from sinew.served import Served

    with Served("sinew.worlds.household:Household") as worlds:
        with worlds.episode(worlds.task("train", 0)) as episode:
            print(episode.prompt, [tool["name"] for tool in episode.tools])
            answer = episode.call("look")
            print(answer.text, answer.reward, episode.score())

The target is a class, a built-in environment, a recipe, or the address of a server of docs/environment-protocol.md. Standard library only.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import urllib.parse
import uuid
from dataclasses import dataclass
from typing import Any, Sequence

from . import _program
from ._http import Closing, Http, HttpClient
from .errors import SinewError

#: Variable with the key of a server that is started here.
_KEY = "SINEW_SERVED_KEY"


def _without_key(url: str, token: str | None) -> tuple[str, str | None]:
    """An address as `sinew env serve` prints it, `http://env:KEY@HOST`, and a token: the address without the key, and the key."""
    parts = urllib.parse.urlsplit(url)
    if parts.password is None:
        return url, token
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return plain.geturl(), token or urllib.parse.unquote(parts.password)


@dataclass(frozen=True)
class Answer:
    """What came back for an action."""

    #: The observation; empty at the end.
    text: str
    #: Reward of the action alone, without that of the episode.
    reward: float
    #: The episode has ended.
    done: bool
    #: The action was wrong: an unknown tool, or wrong arguments.
    error: bool


class Served(HttpClient):
    """Environments of a target with their tasks. Safe to use from threads."""

    def __init__(
        self,
        target: str,
        *,
        options: dict[str, Any] | None = None,
        python: str | None = None,
        seed: int = 0,
        arguments: Sequence[str] = (),
        token: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._process: subprocess.Popen[str] | None = None
        url = target
        if not target.startswith(("http://", "https://")):
            token = token or secrets.token_hex(24)
            url = self._start(target, options, python, seed, arguments, token)
        url, token = _without_key(url, token)
        super().__init__(url, token, timeout_s=timeout_s)
        self.url = url
        #: The key that the server wants.
        self.token: str | None = token
        try:
            #: What the server declares.
            self.about: dict[str, Any] = self._http.json("GET", "/sinew", repeatable=True)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        target: str,
        options: dict[str, Any] | None,
        python: str | None,
        seed: int,
        arguments: Sequence[str],
        token: str,
    ) -> str:
        words = [_program.find(), "env", "serve", target, "--listen", "127.0.0.1:0", "--seed", str(seed)]
        words += ["--options", json.dumps(options)] if options else []
        words += ["--python", python] if python else []
        # An argument would show the key to every user of the machine.
        words += ["--key-env", _KEY]
        variables = {**_program.environment(), _KEY: token}
        self._process = subprocess.Popen([*words, *arguments], stdout=subprocess.PIPE, text=True, env=variables)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "listens on " not in line:
            status = self._process.wait()
            raise SinewError(f"sinew env serve {target} ended with status {status}: its messages are on stderr")
        return line.rsplit(" ", 1)[-1].strip()

    def count(self, split: str = "train") -> int:
        """Number of tasks of a split: `train` or `held-out`."""
        return int((self.about.get("tasks") or {}).get(split, 0))

    def task(self, split: str = "train", index: int = 0) -> dict[str, Any]:
        """A task by its place."""
        path = f"/tasks/{urllib.parse.quote(split)}/{index}"
        task: dict[str, Any] = self._http.json("GET", path, repeatable=True)
        return task

    def episode(self, task: dict[str, Any], name: str | None = None) -> Played:
        """Begins an episode of a task. One with a name that is open already goes on."""
        return Played(self._http, task, name or uuid.uuid4().hex)

    def close(self) -> None:
        """Closes the connections, and ends what was started here."""
        super().close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


class Played(Closing):
    """An open episode."""

    def __init__(self, http: Http, task: dict[str, Any], name: str) -> None:
        self._http = http
        self._path = f"/episodes/{name}"
        #: Id of the episode at the server.
        self.name = name
        #: Its task.
        self.task = task
        #: It has ended.
        self.done = False
        opened = http.json("POST", "/episodes", {"episode": name, "task": task}, repeatable=True)
        #: Messages of the prompt.
        self.messages: list[dict[str, Any]] = opened.get("messages") or []
        #: Tools: name, description, and the JSON Schema of the arguments as `schema`.
        self.tools: list[dict[str, Any]] = opened.get("tools") or []

    @property
    def prompt(self) -> str:
        """All messages of the prompt as one text."""
        return "\n\n".join(text_of(message["content"]) for message in self.messages)

    def call(self, tool: str, **arguments: Any) -> Answer:
        """Calls a tool."""
        return self._act({"tool": tool, "args": arguments})

    def say(self, text: str) -> Answer:
        """A turn of text."""
        return self._act({"text": text})

    def _act(self, body: dict[str, Any]) -> Answer:
        # The name of a call makes it safe to repeat: of two processes in one episode, each has its own.
        path = f"{self._path}/calls/{uuid.uuid4().hex}"
        answer = self._http.json("POST", path, body, repeatable=True)
        fault = answer.get("error")
        if fault and fault.get("kind") == "infra":
            raise SinewError(f"the environment failed: {fault.get('text')}")
        self.done = bool(answer.get("done"))
        content = answer.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content)
        return Answer(text, float(answer.get("reward") or 0.0), self.done, fault is not None)

    def score(self, output: str = "") -> dict[str, Any]:
        """The score: `reward` (`None`: there is none, with its `reason`), `success` and the metrics."""
        scored = self._http.json("POST", f"{self._path}/score", {"messages": [], "output": output}, repeatable=True)
        return {"reason": scored.get("reason"), "reward": None, **scored.get("rewards", {})}

    def close(self) -> None:
        """Ends the episode."""
        try:
            self._http.json("DELETE", self._path, repeatable=True)
        except SinewError:
            # It has ended by itself, or its lease is over.
            pass


def text_of(content: Any) -> str:
    """Text of the content of a message, which may be in parts."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
