"""The ranks as a group: control messages, signs of life, the first error of any rank.

Commands travel on a gloo group without a deadline (ranks wait for hours), data and agreement on one with
it. Each rank reports an error to the store before anything else, since others may hang in a collective, and
counts a beat there twice a second, so that rank 0 can name a rank that was killed or stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import json
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .errors import Refused, is_memory, is_symptom

BEAT_S = 0.5
SILENT_S = 2.0
"""A rank whose beats stopped for this long is the cause of a failed collective."""
ATTRIBUTION_S = 3.0
"""Wait for the cause after a failed collective."""


class Prefixed(io.TextIOBase):
    """A stream for people that puts the rank before each line."""

    def __init__(self, stream: Any, rank: int) -> None:
        self.stream, self.prefix, self.fresh = stream, f"rank {rank}: ", True

    def write(self, text: str) -> int:
        """Writes text, complete lines or parts of them."""
        for line in text.splitlines(keepends=True):
            self.stream.write((self.prefix if self.fresh else "") + line)
            self.fresh = line.endswith("\n")
        self.stream.flush()
        return len(text)

    def flush(self) -> None:
        """Does nothing: every write is flushed."""

    def fileno(self) -> int:
        """The file below."""
        return int(self.stream.fileno())


class Ranks:
    """This rank among all."""

    def __init__(self) -> None:
        env = os.environ
        self.rank, self.world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        self.host, self.timeout_s = socket.gethostname(), float(env.get("SINEW_TORCH_TIMEOUT_S", "600"))
        # cuBLAS reads this when it starts; deterministic algorithms need it.
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if "OMP_NUM_THREADS" not in env:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // int(env.get("LOCAL_WORLD_SIZE", "1"))))
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(env.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        self.phase: tuple[str, float] = ("start", time.monotonic())
        self.failed = False
        deadline = datetime.timedelta(seconds=self.timeout_s)
        self.store = self._connect(deadline)
        self.idle = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
        self.control = dist.new_group(backend="gloo", timeout=deadline)
        self.group: Any = dist.group.WORLD
        threading.Thread(target=self._beat, daemon=True, name="beat").start()

    def _connect(self, deadline: datetime.timedelta) -> Any:
        """Joins the default group; returns a connection to the store for threads."""
        env = os.environ
        address, port = env.get("MASTER_ADDR"), int(env.get("MASTER_PORT") or 0)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        loopback = address in ("127.0.0.1", "localhost", None)
        if loopback:
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        join = functools.partial(dist.init_process_group, backend, timeout=deadline)
        if self.world == 1 and not (address and port):
            store = dist.HashStore()
            join(store=store, rank=0, world_size=1)
            return store
        connect = functools.partial(dist.TCPStore, address, port, timeout=deadline, wait_for_workers=False)
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            join(init_method="env://")
        elif self.rank == 0 and loopback:
            # The store has no password, and torch binds it to all addresses unless it gets a socket.
            listener = socket.create_server(("127.0.0.1", port), backlog=512)
            join(
                store=connect(is_master=True, master_listen_fd=listener.detach()),
                rank=0,
                world_size=self.world,
            )
        else:
            join(store=connect(is_master=self.rank == 0), rank=self.rank, world_size=self.world)
        # The agent of `torchrun` keeps its store over restarts of the ranks.
        return dist.PrefixStore(
            "sinew-" + env.get("TORCHELASTIC_RESTART_COUNT", "0"), connect(is_master=False)
        )

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            phase, since = self.phase
            beat = {
                "count": count,
                "phase": phase,
                "since_s": time.monotonic() - since,
                "host": self.host,
                "device": device_name(self.device),
                "bytes": used_bytes(self.device),
            }
            try:
                self.store.set(f"beat/{self.rank}", json.dumps(beat))
            except Exception:  # the store is gone with rank 0: the main thread sees that too
                return
            time.sleep(BEAT_S)

    def enter(self, phase: str) -> None:
        """Names what this rank does."""
        self.phase = (phase, time.monotonic())

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Names what this rank does until the end of the block."""
        self.enter(phase)
        yield
        self.enter("idle")

    def report(self, error: BaseException) -> None:
        """Reports an error of this rank to rank 0 out of band."""
        kind = "memory" if is_memory(error) else getattr(error, "kind", "rank")
        text = f"{type(error).__name__}: {error}"
        if kind == "memory":
            text += f" (peak of rank {self.rank}: {peak_bytes(self.device)} bytes)"
        entry = {
            "kind": kind,
            "text": text,
            "rank": self.rank,
            "phase": self.phase[0],
            "host": self.host,
            "symptom": kind != "memory" and is_symptom(error),
        }
        number = self.store.add("errors", 1)
        self.store.set(f"error/{number}", json.dumps(entry))

    def send(self, command: Any) -> None:
        """Rank 0 sends a command to all."""
        if self.world > 1:
            dist.broadcast_object_list([command], 0, group=self.idle)

    def receive(self) -> Any:
        """The next command of rank 0."""
        box = [None]
        dist.broadcast_object_list(box, 0, group=self.idle)
        return box[0]

    def scatter(self, parts: list[Any] | None) -> Any:
        """This rank's part of what rank 0 has for each."""
        if self.world == 1:
            assert parts is not None
            return parts[0]
        box = [None]
        dist.scatter_object_list(box, parts, 0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        """All ranks' values on rank 0."""
        if self.world == 1:
            return [value]
        box = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, box, 0, group=self.control)
        return box

    def share(self, value: Any) -> Any:
        """Rank 0's value on all ranks."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.control)
        return box[0]

    def agree(self, step: Callable[[], Any]) -> Any:
        """Runs a step without collectives; if any rank refuses, all ranks refuse with the first of them."""
        refused, value = None, None
        try:
            value = step()
        except Refused as error:
            refused = error
        if self.world > 1:
            found: list[Any] = [None] * self.world
            mine = refused.report() | {"rank": self.rank} if refused else None
            dist.all_gather_object(found, mine, group=self.control)
            first = next((one for one in found if one is not None), None)
            if first is not None:
                raise Refused(first["text"], first["kind"], first["rank"], self.phase[0])
        elif refused is not None:
            raise refused
        return value

    def wait_for_end(self) -> None:
        """Keeps a failed rank's connections open until the owner ends it, so that rank 0 can answer."""
        self.failed = True
        while True:
            time.sleep(0.5)
            try:
                if self.store.add("close", 0):
                    os._exit(0)
            except Exception:
                os._exit(1)


class Watch(threading.Thread):
    """Rank 0's thread: reads errors and beats, and decides which error is the first."""

    def __init__(self, ranks: Ranks, broken: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(daemon=True, name="watch")
        self.ranks, self.broken = ranks, broken
        self.beats: list[dict[str, Any]] = [{} for _ in range(ranks.world)]
        self.changed = [time.monotonic()] * ranks.world
        self.errors: list[dict[str, Any]] = []
        self.since: float | None = None
        self.seen = 0

    def run(self) -> None:
        """Looks every 0.1 s until the server is broken; beats are read until the end."""
        done, turn = False, 0
        while True:
            try:
                if not done:
                    done = self._look()
                if turn % 5 == 0:
                    self._read_beats()
            except Exception as error:
                self.broken(
                    {"kind": "rank", "text": f"the store is gone: {error}", "rank": None, "phase": None}
                )
                return
            turn += 1
            time.sleep(0.1)

    def _read_beats(self) -> None:
        store, now = self.ranks.store, time.monotonic()
        for rank in range(self.ranks.world):
            if store.check([f"beat/{rank}"]):
                beat = json.loads(store.get(f"beat/{rank}"))
                if beat.get("count") != self.beats[rank].get("count"):
                    self.changed[rank] = now
                self.beats[rank] = beat

    def silent(self, longer_than: float) -> int | None:
        """The rank that has been silent for the longest time, if longer than the limit."""
        now = time.monotonic()
        ages = [now - at for at in self.changed]
        worst = max(range(len(ages)), key=ages.__getitem__)
        return worst if ages[worst] > longer_than and worst != 0 else None

    def _gone(self, rank: int) -> dict[str, Any]:
        beat, first = self.beats[rank], self.errors[0] if self.errors else None
        text = (
            f"rank {rank} on host {beat.get('host')} was killed or does not run: no sign of life for "
            f"{time.monotonic() - self.changed[rank]:.1f} s"
        )
        if first is not None:
            text += f"; rank {first['rank']} saw: {first['text'].split('. This is typically')[0]}"
        return {"kind": "rank", "text": text, "rank": rank, "phase": (first or beat).get("phase")}

    def _look(self) -> bool:
        store = self.ranks.store
        while self.seen < store.add("errors", 0):
            if not store.check([f"error/{self.seen + 1}"]):
                break
            self.errors.append(json.loads(store.get(f"error/{self.seen + 1}")))
            self.seen += 1
        now = time.monotonic()
        if self.errors and self.since is None:
            self.since = now
        cause = next((one for one in self.errors if not one["symptom"]), None)
        if cause is None and self.since is not None:
            # If this process stood still, the beats that it missed are read before a rank is blamed.
            self._read_beats()
            rank = self.silent(SILENT_S)
            if rank is not None:
                cause = self._gone(rank)
            elif now - self.since > ATTRIBUTION_S:
                cause = self.errors[0]
        if cause is None:
            rank = self.silent(self.ranks.timeout_s)
            cause = self._gone(rank) if rank is not None else None
        if cause is None:
            return False
        host = f" (host {cause['host']})" if cause.get("host") else ""
        self.broken(
            {
                "kind": cause["kind"],
                "text": cause["text"] + host,
                "rank": cause["rank"],
                "phase": cause["phase"],
            }
        )
        return True


def device_name(device: torch.device) -> str:
    """The device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def used_bytes(device: torch.device) -> int:
    """Memory in use: of the device's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device) -> int:
    """Most memory since the last call (device), or since the start (process)."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def watch_stdin() -> None:
    """Ends the process when standard input ends, if it is a pipe or the environment asks for it."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.environ.get("SINEW_TORCH_WATCH_STDIN") == "1"):
        return

    def wait() -> None:
        while True:
            try:
                if not os.read(0, 4096):
                    break
            except OSError:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="stdin").start()
