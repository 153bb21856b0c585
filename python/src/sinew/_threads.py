"""Blocking work from asyncio: calls of a gateway, which are not left half done, and agents in threads of
their own."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import Any, Callable, ParamSpec, Protocol, TypeVar

from .errors import ConnectionFailed, RolloutError

P = ParamSpec("P")
T = TypeVar("T")

#: Time for an agent to end after it was cancelled, in seconds.
_GRACE_S = 5.0
#: Maximum threads of agents that run on after their time was up.
_MAX_LEFT = 1024
#: First and longest pause before a lost gateway is tried again, in seconds.
_PAUSE_S, _MAX_PAUSE_S = 0.25, 8.0


class Finishable(Protocol):
    """A rollout, as far as it is needed here."""

    def finish(self, *, failed: str | None = None, timed_out: bool = False) -> None:
        """Ends it."""


R = TypeVar("R", bound=Finishable)


def _start(executor: Executor | None, function: Callable[[], T]) -> asyncio.Future[T]:
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(executor, functools.partial(context.run, function))


async def in_thread(
    executor: Executor | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What a call gives that blocks. If the caller is cancelled meanwhile, the call ends first."""
    work = _start(executor, functools.partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


async def open_rollout(executor: Executor | None, opening: Callable[[], R]) -> R:
    """Opens a rollout. If the caller is cancelled meanwhile, the rollout is finished as failed."""
    work = _start(executor, opening)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled() and work.exception() is None:
            failed = "CancelledError: cancelled while it was opened"
            await in_thread(executor, work.result().finish, failed=failed)
        raise


class Line:
    """The way to a gateway: its calls run in threads of `executor`. One that does not reach it is made
    again, after pauses that grow, until `patience_s` seconds have gone by since the gateway was lost. A
    gateway that was never reached is not waited for."""

    def __init__(self, executor: Executor | None = None, patience_s: float = 0.0) -> None:
        self._executor = executor
        self._patience_s = patience_s
        self._reached = False
        #: When calls began to fail.
        self._lost_s: float | None = None
        #: Nothing is to be waited for any more.
        self.over = False

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call that may be repeated."""
        return await self._kept(lambda: in_thread(self._executor, function, *args, **kwargs))

    async def open(self, opening: Callable[[], R]) -> R:
        """Opens a rollout. One whose answer was lost stays behind, and the gateway ends it in time."""
        return await self._kept(lambda: open_rollout(self._executor, opening))

    async def _kept(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        pause_s = _PAUSE_S
        while True:
            try:
                result = await attempt()
            except ConnectionFailed:
                now_s = time.monotonic()
                if self._lost_s is None:
                    self._lost_s = now_s
                if self.over or not self._reached or now_s - self._lost_s >= self._patience_s:
                    raise
            else:
                self._reached, self._lost_s = True, None
                return result
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


class _Left:
    """Counts threads that nothing waits for any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count

    def check(self) -> None:
        if self._count >= _MAX_LEFT:
            raise RolloutError(
                f"{self._count} agents run on after their time was up, the maximum: a thread cannot be "
                "ended from outside, so give the agent's client a timeout"
            )


_left = _Left()


def own_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Runs an agent that blocks in a thread of its own: none waits for the thread of another, and one that
    hangs does not keep the program from its end."""
    _left.check()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()
    lock, ended, abandoned = threading.Lock(), False, False

    def deliver(value: T, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        nonlocal ended
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(function)
        except StopIteration as e:
            error = RuntimeError(f"StopIteration: {e}")  # which no future takes
        except Exception as e:
            error = e
        except BaseException as e:
            error = RolloutError(f"the agent ended its program: {type(e).__name__}: {e}")
        with lock:
            ended = True
            if abandoned:
                _left.add(-1)
        try:
            loop.call_soon_threadsafe(deliver, value, error)
        except RuntimeError:
            pass  # the loop was closed: nothing waits

    def leave(future: asyncio.Future[T]) -> None:
        nonlocal abandoned
        with lock:
            if future.cancelled() and not ended:
                abandoned = True
                _left.add(1)

    future.add_done_callback(leave)
    threading.Thread(target=work, name=name, daemon=True).start()
    return future


async def within(work: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Waits for `work`; whether it ended in time. If not, or if the caller is cancelled, `work` is
    cancelled and gets a moment to end. An error of `work` stays in it: its own timeouts are not those of
    `timeout_s`."""
    work.add_done_callback(lambda w: None if w.cancelled() else w.exception())
    try:
        done, _ = await asyncio.wait({work}, timeout=timeout_s)
        if done:
            return True
        work.cancel()
        await asyncio.wait({work}, timeout=_GRACE_S)
        return False
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work}, timeout=_GRACE_S)
        raise
