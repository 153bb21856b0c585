"""Starts ranks of the policy server and calls them, for the tests of this folder."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

SOURCE = Path(__file__).parents[2] / "src"
TOKEN = "a-token-of-tests"


class Failed(Exception):
    """An error answer."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status, self.error = status, error


class Group:
    """Ranks of one server."""

    def __init__(self, folder: Path, world: int, timeout_s: float = 60.0, start: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(TOKEN)
        # Held until the end: rank 0 listens there only after its imports, and nobody else may get it meanwhile.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        port = self.held.getsockname()[1]
        self.ready, self.world = folder / "ready", world
        self.processes = []
        self.fence, self.seq = 1, 0
        self.connection: http.client.HTTPConnection | None = None
        for rank in range(world):
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(SOURCE),
                "SINEW_TORCH_TOKEN_FILE": str(folder / "token"),
                "SINEW_TORCH_READY": str(self.ready),
                "SINEW_TORCH_TIMEOUT_S": str(timeout_s),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            with open(folder / f"rank-{rank}.log", "wb") as log:
                command = [sys.executable, *(["-c", start] if start else ["-m", "sinew.torch"])]
                self.processes.append(
                    subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stderr=log, stdout=log)
                )
        self.folder = folder

    def wait(self) -> Group:
        """Waits until rank 0 listens."""
        end = time.monotonic() + 300
        while not self.ready.exists():
            if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                raise RuntimeError(self.logs())
            time.sleep(0.05)
        self.address = json.loads(self.ready.read_text())["url"].removeprefix("http://")
        return self

    def logs(self) -> str:
        """The output of the ranks."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def raw(
        self, path: str, body: bytes, headers: dict[str, str] | None = None, fresh: bool = False
    ) -> tuple[int, bytes]:
        """One HTTP call."""
        if self.connection is None or fresh:
            self.connection = http.client.HTTPConnection(self.address, timeout=120)
        given = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
        self.connection.request("POST", path, body, given)
        answer = self.connection.getresponse()
        found = answer.status, answer.read()
        if answer.will_close:
            self.connection = None
        return found

    def call(self, verb: str, **body: Any) -> dict[str, Any]:
        """The next command, or one with the given fence and seq."""
        if verb != "status":
            self.seq += 1
            body = {"fence": self.fence, "seq": self.seq} | body
        status, data = self.raw("/" + verb, msgspec.msgpack.encode(body))
        answer = msgspec.msgpack.decode(data)
        if status != 200:
            if answer["error"]["kind"] in ("gap", "fence"):
                self.seq -= 1
            raise Failed(status, answer["error"])
        return answer

    def open(self, model: Path, **more: Any) -> dict[str, Any]:
        """Opens a model with small limits."""
        base = {
            "model": str(model),
            "dtype": "f32",
            "attention": "auto",
            "sharing": "auto",
            "checkpointing": "none",
            "max_tokens": 256,
            "head_chunk": 8,
            "deterministic": True,
            "seed": 1,
            "lora": None,
            "critic": None,
            "frozen": {},
        }
        return self.call("open", **(base | more))

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            assert process.stdin
            process.stdin.close()
        self.held.close()


@contextlib.contextmanager
def group(folder: Path, world: int, timeout_s: float = 60.0, start: str | None = None) -> Iterator[Group]:
    """A started server; `start` is a program in place of the module."""
    found = Group(folder, world, timeout_s, start)
    try:
        yield found.wait()
    finally:
        found.end()


def lane(
    tokens: Any,
    segments: Any,
    rows: Any,
    targets: Any,
    temperatures: Any = None,
    masks: Any = None,
    table: Any = None,
    experts: Any = None,
) -> dict[str, Any]:
    """A lane as it travels."""
    count = len(rows)
    heat = np.ones(count) if temperatures is None else np.asarray(temperatures)
    marks = np.full(count, 0xFFFFFFFF) if masks is None else np.asarray(masks)
    words = np.zeros((0, 0)) if table is None else np.asarray(table)

    def u32(values: Any) -> bytes:
        return np.asarray(values).astype("<u4").tobytes()

    return {
        "tokens": u32(tokens),
        "segments": u32(segments),
        "rows": u32(rows),
        "targets": u32(targets),
        "temperatures": heat.astype("<f4").tobytes(),
        "masks": u32(marks),
        "mask_words": int(words.shape[1]) if words.size else 0,
        "mask_table": u32(words),
    } | routes(experts)


def routes(experts: Any) -> dict[str, Any]:
    """Experts `[tokens, layers, top_k]` as they travel, with -1 where the router chooses."""
    if experts is None:
        return {}
    given = np.asarray(experts)
    _, layers, top_k = given.shape
    return {"routes": given.astype("<u2").tobytes(), "route_layers": layers, "route_top_k": top_k}


def f32(data: bytes) -> np.ndarray:
    """A column that came back."""
    return np.frombuffer(data, "<f4")
