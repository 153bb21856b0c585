"""A policy server of one rank, started and called as Sinew does it; for `gpu_check.py`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
HINT = 'lower train.micro_batch_tokens, or set trainer.checkpointing = "full" or "offload"'
ALL = 0xFFFFFFFF
"""Mask of an item whose tokens are all allowed."""


class Cut(Exception):
    """A part that is over its time."""


class Failed(Exception):
    """An error answer of the server."""

    def __init__(self, error: dict[str, Any]) -> None:
        self.kind = error["kind"]
        hint = f"; {HINT}" if self.kind == "memory" else ""
        super().__init__(f"{self.kind}: {error['text']}{hint}")


class Server:
    """One rank. It ends with this process, which holds its standard input."""

    def __init__(self, cpu: bool, until: float) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-check-server-")
        folder = Path(self.folder.name)
        self.token = secrets.token_hex(16)
        with open(os.open(folder / "token", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(self.token)
        path = str(ROOT / "python/src") + ":" + os.environ.get("PYTHONPATH", "")
        env = os.environ | {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": path.rstrip(":"),
            "SINEW_TORCH_TOKEN_FILE": str(folder / "token"), "SINEW_TORCH_READY": str(folder / "ready"),
        }
        if cpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sinew.torch"], env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self.seq, self.peak = 0, 0
        self.connection = self._connect(folder / "ready", until)

    def _connect(self, ready: Path, until: float) -> http.client.HTTPConnection:
        while not ready.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.tail()}")
            if time.monotonic() > until:
                self.close()
                raise Cut("the server does not listen yet")
            time.sleep(0.05)
        address = json.loads(ready.read_text())["url"].removeprefix("http://")
        return http.client.HTTPConnection(address)

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-600:]

    def warns(self, word: str) -> bool:
        """Whether a word is in what it wrote."""
        return word in self.log.read_text(errors="replace")

    def call(self, verb: str, until: float, **body: Any) -> dict[str, Any]:
        """A command. Its largest memory is kept in `peak`. A server that is over its time is killed."""
        left = until - time.monotonic()
        if left <= 0:
            raise Cut(f"no time left for {verb}")
        self.seq += 1
        data = msgspec.msgpack.encode({"fence": 1, "seq": self.seq} | body)
        if self.connection.sock is not None:
            self.connection.sock.settimeout(left)
        self.connection.timeout = left
        try:
            self.connection.request("POST", "/" + verb, data, {"Authorization": f"Bearer {self.token}"})
            answer = self.connection.getresponse()
            status, data = answer.status, answer.read()
        except TimeoutError:
            self.close()
            raise Cut(f"{verb} takes longer than the part's time") from None
        except OSError as error:
            tail = self.tail()
            self.close()
            raise RuntimeError(f"the server ended in {verb}: {error}: {tail}") from error
        found = msgspec.msgpack.decode(data)
        if status != 200:
            failed = Failed(found["error"])
            if failed.kind != "input":
                self.close()
            raise failed
        self.peak = max(self.peak, *found.get("peak_bytes", [0]))
        return found

    def close(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self.process.poll() is None


def u32(values: Any) -> bytes:
    """A column of numbers."""
    return np.asarray(values).astype("<u4").tobytes()


def f32(data: bytes) -> np.ndarray:
    """A column that came back."""
    return np.frombuffer(data, "<f4")


def lane(tokens: Any, segments: Any, rows: Any, targets: Any, temperatures: Any = None, masks: Any = None,
         table: Any = None) -> dict[str, Any]:
    """A lane as it travels."""
    count = len(rows)
    heat = np.ones(count) if temperatures is None else np.asarray(temperatures)
    words = np.zeros((0, 0)) if table is None else np.asarray(table)
    return {"tokens": u32(tokens), "segments": u32(segments), "rows": u32(rows), "targets": u32(targets),
            "temperatures": heat.astype("<f4").tobytes(), "masks": u32(np.full(count, ALL) if masks is None else masks),
            "mask_words": int(words.shape[1]) if words.size else 0, "mask_table": u32(words)}


def tasks_lane(whole: np.ndarray, samples: int, shared: int) -> dict[str, Any]:
    """The rows `[tasks * samples, tokens]` of some tasks as a forest: each prompt once, each answer without its last
    token, which predicts nothing. All tokens of answers are items."""
    tokens, segments, rows, targets = [], [], [], []
    at = 0
    for first in range(0, len(whole), samples):
        segments.append((at, shared, 0, 0))
        tokens.append(whole[first, :shared])
        root, at = len(segments), at + shared
        prompt_end = at - 1
        for answer in whole[first : first + samples, shared:]:
            inner = answer[:-1]
            rows.append(np.concatenate([[prompt_end], np.arange(at, at + len(inner))]))
            targets.append(answer)
            if len(inner):
                segments.append((at, len(inner), shared, root))
                tokens.append(inner)
                at += len(inner)
    return lane(np.concatenate(tokens), segments, np.concatenate(rows), np.concatenate(targets))


def waves(whole: np.ndarray, samples: int, shared: int, tasks: int) -> Iterator[dict[str, Any]]:
    """Lanes of `tasks` tasks each."""
    step = samples * tasks
    for first in range(0, len(whole), step):
        yield tasks_lane(whole[first : first + step], samples, shared)
