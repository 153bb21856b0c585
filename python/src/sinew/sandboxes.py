"""Isolated places to run code in: a `sinew serve --sandbox-only`, over HTTP."""

from __future__ import annotations

import base64
import urllib.parse
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Mapping, Sequence

from ._http import Http, HttpClient
from .errors import SinewError


@dataclass(frozen=True)
class ExecResult:
    """How an execution ended and what it wrote."""

    #: `exited`, `signalled`, `timeout`, `out_of_memory`, `too_many_processes`, `output_limit`,
    #: `denied` or `sandbox_died`.
    ending: str
    #: Exit code, if it ended by itself.
    code: int | None
    stdout: bytes
    stderr: bytes
    #: Output beyond the sandbox's limit was cut off.
    truncated: bool
    #: `cpu_s`, `peak_memory_bytes`, `wall_s` and so on.
    usage: dict[str, Any]
    raw: dict[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        """It ended by itself, with code 0."""
        return self.ending == "exited" and self.code == 0

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.stdout.decode(errors="replace")


class Sandbox:
    """One isolated place. Files stay from one execution to the next, processes do not. As a
    context manager it destroys itself."""

    def __init__(self, http: Http, raw: Mapping[str, Any]) -> None:
        self.id: str = raw["id"]
        self.level: str = raw["level"]
        self._http = http

    def __repr__(self) -> str:
        return f"Sandbox(id={self.id!r}, level={self.level!r})"

    @property
    def _path(self) -> str:
        return "/v1/sandboxes/" + urllib.parse.quote(self.id, safe="")

    def python(self, code: str, **options: Any) -> ExecResult:
        """Runs Python code as a program in a fresh interpreter. Options as in `run`."""
        return self._exec({"python": code}, **options)

    def shell(self, script: str, **options: Any) -> ExecResult:
        """Runs a shell script. Options as in `run`."""
        return self._exec({"shell": script}, **options)

    def run(self, argv: Sequence[str], **options: Any) -> ExecResult:
        """Runs a program. Options: `stdin` (bytes), `env`, and `timeout_s`, after which
        everything that runs in the sandbox is killed."""
        return self._exec({"argv": list(argv)}, **options)

    def _exec(
        self,
        program: dict[str, Any],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        body = {**program, "binary": True}
        if stdin is not None:
            body["stdin_base64"] = base64.b64encode(stdin).decode()
        if env is not None:
            body["env"] = dict(env)
        if timeout_s is not None:
            body["timeout_s"] = timeout_s
        raw = self._http.json("POST", f"{self._path}/exec", body, wait_s=timeout_s)
        ending = raw["ending"]
        return ExecResult(
            ending["type"],
            ending.get("code"),
            base64.b64decode(raw["stdout"]),
            base64.b64decode(raw["stderr"]),
            raw["truncated"],
            raw["usage"],
            raw,
        )

    def write(self, path: str, content: bytes | str) -> None:
        """Writes a file below the work folder, with the folders on the way."""
        data = content.encode() if isinstance(content, str) else content
        self._http.send("PUT", self._file(path), data, "application/octet-stream", repeatable=True)

    def read(self, path: str) -> bytes:
        """A file below the work folder."""
        return self._http.send("GET", self._file(path), None, "", repeatable=True)

    def _file(self, path: str) -> str:
        if not path or path.startswith("/"):
            raise SinewError(f"path is {path!r}: expected one relative to the work folder")
        return f"{self._path}/files/{urllib.parse.quote(path)}"

    def stats(self) -> dict[str, Any]:
        """What it holds now: memory, processes, files."""
        stats: dict[str, Any] = self._http.json("GET", f"{self._path}/stats", repeatable=True)
        return stats

    def reset(self) -> None:
        """Back to what it was at first: all files are gone."""
        self._http.json("POST", f"{self._path}/reset")

    def snapshot(self) -> str:
        """Freezes the work folder; gives the snapshot's id, for `Sandboxes.create`."""
        snapshot: str = self._http.json("POST", f"{self._path}/snapshot")["snapshot"]
        return snapshot

    def fork(self, count: int = 1) -> list[Sandbox]:
        """New sandboxes that start with this one's files; all of them or none."""
        raw = self._http.json("POST", f"{self._path}/fork", {"count": count})
        return [Sandbox(self._http, each) for each in raw["sandboxes"]]

    def destroy(self) -> None:
        """Ends it, and kills what runs in it."""
        self._http.send("DELETE", self._path, None, "")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()


class Sandboxes(HttpClient):
    """A server of sandboxes. Safe to use from threads::

    with Sandboxes("http://127.0.0.1:8081", token) as sandboxes:
        with sandboxes.create() as sandbox:
            print(sandbox.python("print(6 * 7)").text)
    """

    def create(
        self,
        *,
        level: str | None = None,
        image: str | None = None,
        limits: Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
        strict: bool | None = None,
        lease_s: float | None = None,
        egress: bool | None = None,
        snapshot: str | None = None,
    ) -> Sandbox:
        """A fresh sandbox, or one that starts with a snapshot's files.

        `image` is the name of one of the server's images (`--named-image`). `limits` may hold `cpu_s`, `memory_bytes`, `processes`, `output_bytes`, `work_bytes` and
        `open_files`. After `lease_s` without use the server destroys it. `strict` refuses a
        host that lacks a protection.
        """
        asked = {
            "level": level,
            "image": image,
            "limits": None if limits is None else dict(limits),
            "env": None if env is None else dict(env),
            "strict": strict,
            "lease_s": lease_s,
            "egress": egress,
            "snapshot": snapshot,
        }
        body = {name: value for name, value in asked.items() if value is not None}
        return Sandbox(self._http, self._http.json("POST", "/v1/sandboxes", body))

    def levels(self) -> list[dict[str, Any]]:
        """Levels of isolation and what each enforces on this host, the default first."""
        levels: list[dict[str, Any]] = self._http.json("GET", "/v1/levels", repeatable=True)["levels"]
        return levels

    def images(self) -> list[str]:
        """Names of images that sandboxes can be made of."""
        images: list[str] = self._http.json("GET", "/v1/levels", repeatable=True)["images"]
        return images

    def list(self) -> Sequence[Sandbox]:
        """The sandboxes of this token's owner."""
        raw = self._http.json("GET", "/v1/sandboxes", repeatable=True)
        return [Sandbox(self._http, each) for each in raw["sandboxes"]]
