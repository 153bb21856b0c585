"""The `sinew` program: where it is, and a run of it whose JSON lines are read as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .errors import BinaryNotFound, OutsideMissing, RecipeError, RunFailed, RunStopped, SinewError

#: Longest line that is read, in bytes.
_MAX_LINE = 64 << 20
#: Lines that wait for a reader; then the program waits with its next one.
_MAX_WAITING = 10_000
#: What is kept of the end of standard error, in characters.
_ERRORS_KEPT = 64 << 10
#: Status of a command that Ctrl-C ended.
INTERRUPTED = 130


def find() -> str:
    """Path of the program: `SINEW_BIN`, else the one of the installed wheel, else the first on `PATH`."""
    named = os.environ.get("SINEW_BIN")
    if named:
        if not (os.path.isfile(named) and os.access(named, os.X_OK)):
            raise BinaryNotFound(f"SINEW_BIN is {named!r}: expected an executable file")
        return os.path.abspath(named)
    scripts = shutil.which("sinew", path=sysconfig.get_path("scripts"))
    found = scripts or shutil.which("sinew")
    if found is None:
        raise BinaryNotFound(
            "the `sinew` program was not found: install the wheel, which carries it, put it on PATH, "
            "or name it in SINEW_BIN"
        )
    return found


def command(*arguments: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Runs a command to its end; the objects that it printed. A bad end is an exception."""
    program = Program(arguments)
    try:
        lines = list(iter(program.take, None))
        program.check()
        return lines
    finally:
        program.stop()


def error(status: int, stderr: str, said: dict[str, Any] | None) -> SinewError:
    """The exception for an exit status: from the `error` object if the command printed one."""
    said = said or {}
    message = str(said.get("message") or _last_message(stderr) or f"`sinew` ended with status {status}")
    if status == 2 or "line" in said:
        return RecipeError(message, said.get("field"), said.get("line"), said.get("column"))
    if status == 3:
        return OutsideMissing(message)
    if status in (INTERRUPTED, -signal.SIGINT):
        return RunStopped(message)
    if status < 0:
        message = f"`sinew` was ended by signal {-status}: {message}"
    return RunFailed(message)


def _last_message(stderr: str) -> str:
    """What follows the last `sinew: ` that begins a line."""
    before, found, last = f"\n{stderr}".rpartition("\nsinew: ")
    return (last if found else before).strip()


def environment() -> dict[str, str]:
    """The environment of the program: `python3` is this interpreter there, also where no virtual environment is
    activated, as in a notebook, so that environments, rewards and agents import what this process imports."""
    found = dict(os.environ)
    if sys.executable:
        here = os.path.dirname(sys.executable)
        found["PATH"] = os.pathsep.join(filter(None, (here, found.get("PATH"))))
    return found


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class Program:
    """A command that runs. Threads read what it prints, so that it never waits for a slow reader of errors.

    Standard input is a pipe that nobody writes to: `--stop-on-eof` ends a run when this process is gone,
    however it went. Safe to use from threads.
    """

    def __init__(self, arguments: Sequence[str | os.PathLike[str]]) -> None:
        words = [find(), *(os.fspath(a) for a in arguments)]
        # A session of its own: Ctrl-C of the terminal reaches this process, which asks the program to stop once.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment(),
        )
        self._lines: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._over = False
        self._watchers: list[Callable[[], None]] = []
        self._stderr = ""
        #: The `error` object, if the program printed one.
        self.said: dict[str, Any] | None = None
        self._asked_to_stop = False
        readers = (self._read_lines, self._read_errors)
        self._threads = [threading.Thread(target=r, name="sinew reader", daemon=True) for r in readers]
        for thread in self._threads:
            thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._asked_to_stop

    def take(self) -> dict[str, Any] | None:
        """The next object that the program prints; `None` at its end. Waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._over)
            return self._pop()

    async def take_async(self) -> dict[str, Any] | None:
        """As `take`, for asyncio. A task that is cancelled while it waits takes nothing."""
        loop = asyncio.get_running_loop()
        while True:
            ready: asyncio.Future[None] = loop.create_future()

            def wake(ready: asyncio.Future[None] = ready) -> None:
                # A loop that is closed has nobody who waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_set, ready)

            with self._changed:
                if self._lines or self._over:
                    return self._pop()
                self._watchers.append(wake)
            try:
                await ready
            finally:
                with self._changed:
                    if wake in self._watchers:
                        self._watchers.remove(wake)

    def _pop(self) -> dict[str, Any] | None:
        if not self._lines:
            return None
        line = self._lines.popleft()
        self._changed.notify_all()
        return line

    def wait(self) -> int:
        """Waits for the end; the exit status. What was printed may still be taken."""
        with self._changed:
            # A reader that is full would hold up the end.
            self._changed.wait_for(lambda: self._over or len(self._lines) >= _MAX_WAITING)
            while not self._over:
                self._pop()
                self._changed.wait_for(lambda: self._over or len(self._lines) >= _MAX_WAITING)
        return self._process.wait()

    def check(self) -> None:
        """Raises what went wrong, after the end."""
        status = self._process.wait()
        for thread in self._threads:
            thread.join()
        if status != 0:
            raise error(status, self._stderr, self.said)

    def ask_to_stop(self) -> None:
        """As Ctrl-C: the work at hand ends, then a checkpoint is made. A second time: at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._asked_to_stop = True

    def stop(self) -> None:
        """Stops the program if it runs, and waits for its end. Ctrl-C meanwhile ends it at once."""
        if self._process.poll() is None and not self._asked_to_stop:
            self.ask_to_stop()
        try:
            self.wait()
        except KeyboardInterrupt:
            self.ask_to_stop()
            self.wait()
            raise
        finally:
            if self._process.stdin:
                self._process.stdin.close()

    def _read_lines(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        try:
            while line := stream.readline(_MAX_LINE):
                self._add(line)
        finally:
            stream.close()
            self._process.wait()
            with self._changed:
                self._over = True
                self._notify()

    def _add(self, line: bytes) -> None:
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not isinstance(value, dict):
            return
        if isinstance(value.get("error"), dict) and len(value) == 1:
            self.said = value["error"]
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) < _MAX_WAITING)
            self._lines.append(value)
            self._notify()

    def _notify(self) -> None:
        """With the lock held."""
        self._changed.notify_all()
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def _read_errors(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                text = self._stderr + chunk.decode(errors="replace")
                self._stderr = text[-_ERRORS_KEPT:]
