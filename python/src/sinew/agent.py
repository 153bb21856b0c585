"""Functions as agents: `@rollout`, `reward()`, many tasks at once, in threads or in asyncio."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import queue
import random
import secrets
import threading
import time
import zlib
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Callable, Generic, Mapping, ParamSpec, TypeVar, overload

from ._threads import Line, own_thread, within
from .client import Client, Rollout, Trace, _checked
from .dataset import Task
from .errors import ApiError, ConnectionFailed, NoReward, RolloutError, SinewError
from .keys import using

_log = logging.getLogger("sinew")

#: Maximum kinds of errors that are counted apart.
_MAX_CAUSES = 32

P = ParamSpec("P")
R = TypeVar("R")


class _Run:
    """The rollout that the code here belongs to."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.value: float | None = None


_current: ContextVar[_Run | None] = ContextVar("sinew_rollout", default=None)


def _run() -> _Run:
    run = _current.get()
    if run is None:
        raise RolloutError(
            "called outside of a rollout: decorate the agent with @rollout and start it with "
            ".run() or .run_all(); threads that it starts need copy_context()"
        )
    return run


def current() -> Rollout:
    """The rollout that the calling code belongs to."""
    return _run().rollout


def reward(
    value: float,
    *,
    success: bool | None = None,
    metrics: Mapping[str, float] | None = None,
    turn: int | None = None,
) -> None:
    """Scores the rollout that the calling code belongs to, or with `turn` one model call."""
    run = _run()
    run.rollout.reward(value, success=success, metrics=metrics, turn=turn)
    if turn is None:
        run.value = float(value)


@dataclass(frozen=True)
class Model:
    """Where an agent finds its model."""

    base_url: str
    api_key: str
    #: Any name is taken; answers repeat it.
    name: str = "policy"

    @property
    def openai(self) -> dict[str, str]:
        """For clients of OpenAI's form: `AsyncOpenAI(**model.openai)`."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, str]:
        """The same for Anthropic's client, which adds `/v1` itself."""
        return {"base_url": self.base_url.removesuffix("/v1"), "api_key": self.api_key}


#: Parameters that an agent may ask for.
_PARAMETERS = ("task", "model", "base_url", "api_key", "rollout")


@dataclass(frozen=True)
class RolloutResult:
    """How one rollout of a function agent ended."""

    task: Task
    #: `None` if it could not be opened.
    rollout: Rollout | None
    reward: float | None
    #: What went wrong; `None` if nothing did.
    error: BaseException | None
    timed_out: bool
    wall_s: float

    @property
    def ok(self) -> bool:
        """It ended by itself, with a reward."""
        return self.error is None and not self.timed_out

    def trace(self) -> Trace:
        """What was captured."""
        if self.rollout is None:
            raise RolloutError(f"task {self.task.id}: no rollout was opened: {self.error}")
        return self.rollout.trace()


class RolloutFunction(Generic[P, R]):
    """An agent made by `@rollout`. Called directly it is the plain function."""

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        names = list(inspect.signature(function).parameters)
        if names[:1] != ["task"]:
            raise RolloutError(
                f"{function.__name__}: the first parameter must be `task`; `model`, `base_url`, "
                f"`api_key` and `rollout` may follow, found {names}"
            )
        unknown = set(names) - set(_PARAMETERS)
        if unknown:
            raise RolloutError(
                f"{function.__name__}: unknown parameters {sorted(unknown)}; allowed: "
                + ", ".join(_PARAMETERS)
            )
        self._names = names

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def run(self, client: Client, task: Task | str, **spec: Any) -> RolloutResult:
        """Runs one task to its end in this thread. `spec` goes to `Client.rollout`. What the
        agent raises is in the result; what the gateway refuses is raised."""
        if isinstance(task, str):
            task = Task("0", task)
        started = time.monotonic()
        spec.setdefault("task", task.id)
        spec.setdefault("kind", task.kind)
        rollout = client.rollout(**spec)
        try:
            value, error = self._score(rollout, task)
        except BaseException as e:  # Ctrl-C leaves no rollout open
            rollout.finish(failed=_failure(e))
            raise
        error = _finished(rollout, error)
        value = value if error is None else None
        return RolloutResult(task, rollout, value, error, False, time.monotonic() - started)

    def _score(self, rollout: Rollout, task: Task) -> tuple[float | None, BaseException | None]:
        run = _Run(rollout)
        token = _current.set(run)
        try:
            with using(rollout.api_key):
                returned = self._call(rollout, task)
                if inspect.iscoroutine(returned):
                    returned = asyncio.run(returned)
            return self._value(run, task, returned), None
        except Exception as e:
            return None, e
        finally:
            _current.reset(token)

    async def _ascore(
        self, rollout: Rollout, task: Task, timeout_s: float | None, line: Line
    ) -> tuple[float | None, BaseException | None, bool]:
        """Reward and error of the agent, and whether its time was up."""
        run = _Run(rollout)
        token = _current.set(run)
        try:
            with using(rollout.api_key):
                work = self._begun(rollout, task)
                if not await within(work, timeout_s):
                    return None, TimeoutError(f"task {task.id}: more than {timeout_s} s"), True
                if work.cancelled():
                    raise RolloutError(f"task {task.id}: the agent cancelled itself")
                return await line.call(self._value, run, task, work.result()), None, False
        except Exception as e:
            return None, e, False
        finally:
            _current.reset(token)

    def _begun(self, rollout: Rollout, task: Task) -> asyncio.Future[Any]:
        """The agent at work: in the event loop if it is a coroutine function, else in a thread."""
        if inspect.iscoroutinefunction(self._function):
            return asyncio.ensure_future(_contained(self._call(rollout, task)))
        call = functools.partial(self._call, rollout, task)
        return own_thread(f"rollout {task.id}", call)

    def _value(self, run: _Run, task: Task, returned: Any) -> float:
        """The reward of an agent that returned."""
        # Numbers of numpy and torch give Python's with `item`.
        item = getattr(returned, "item", None)
        returned = item() if callable(item) else returned
        if isinstance(returned, (bool, int, float)):
            success = returned if isinstance(returned, bool) else None
            reward(_checked(returned, "returned reward"), success=success)
        elif isinstance(returned, Mapping):
            _reported(task, returned)
        elif returned is not None:
            raise NoReward(
                f"task {task.id}: the agent returned {type(returned).__name__}; return a "
                'number, {"reward": 1.0, "success": True, "rewards": [], "metrics": {}}, or call reward() '
                "and return None"
            )
        if run.value is None:
            raise NoReward(f"task {task.id}: the agent gave no reward")
        return run.value

    def _call(self, rollout: Rollout, task: Task) -> Any:
        values = {
            "task": task,
            "model": Model(rollout.base_url, rollout.api_key),
            "base_url": rollout.base_url,
            "api_key": rollout.api_key,
            "rollout": rollout,
        }
        function: Callable[..., Any] = self._function
        return function(**{name: values[name] for name in self._names})

    async def arun(
        self, client: Client, task: Task | str, *, timeout_s: float | None = None, **spec: Any
    ) -> RolloutResult:
        """`run` for asyncio: any number of them may run at once in one loop. An agent that is no
        coroutine function runs in a thread of its own. Past `timeout_s` the rollout ends as cut.
        Cancelled, it ends the rollout as failed."""
        if isinstance(task, str):
            task = Task("0", task)
        spec.setdefault("task", task.id)
        spec.setdefault("kind", task.kind)
        line = Line()
        rollout = await line.open(functools.partial(client.rollout, **spec))
        return await self._driven(rollout, task, timeout_s, line)

    async def _driven(
        self, rollout: Rollout, task: Task, timeout_s: float | None, line: Line
    ) -> RolloutResult:
        """Runs an open rollout to its end."""
        started = time.monotonic()
        try:
            value, error, cut = await self._ascore(rollout, task, timeout_s, line)
        except BaseException as e:
            await line.call(rollout.finish, failed=_failure(e))
            raise
        error = await line.call(_finished, rollout, error, cut)
        value = value if error is None else None
        return RolloutResult(task, rollout, value, error, cut, time.monotonic() - started)

    async def train(
        self,
        client: Client,
        tasks: Iterable[Task | str],
        *,
        concurrency: int = 32,
        group_size: int = 8,
        timeout_s: float | None = None,
        reconnect_s: float = 60.0,
        seed: int = 0,
        **spec: Any,
    ) -> Worked:
        """Works for a run of `sinew train --serve` until that ends: goes through the tasks again and
        again, each `group_size` times, at most `concurrency` rollouts at once.

        A rollout that fails, or that calls no model, is counted, logged under the name `sinew`, and ends
        alone. If none of the first `2 * group_size` ends well, their first error is raised: a run learns
        nothing from that. The gateway says when the run has ended. One that does not answer is tried again for
        `reconnect_s` seconds, while a run is restarted for example; then the run counts as ended.
        """
        for name, value in (("concurrency", concurrency), ("group_size", group_size)):
            if value < 1:
                raise SinewError(f"{name} is {value}: expected 1 or more")
        if not reconnect_s >= 0:
            raise SinewError(f"reconnect_s is {reconnect_s}: expected a number of seconds, 0 or more")
        rows = [Task(str(i), t) if isinstance(t, str) else t for i, t in enumerate(tasks)]
        if not rows:
            raise SinewError("tasks is empty: expected one task or more")
        with ThreadPoolExecutor(concurrency, thread_name_prefix="sinew") as executor:
            work = _Work(self, client, timeout_s, 2 * group_size, Line(executor, reconnect_s))
            await work.through(_endless(rows, group_size, seed, spec), concurrency)
        return work.worked()

    def run_all(
        self,
        client: Client,
        tasks: Iterable[Task | str],
        *,
        concurrency: int = 8,
        group_size: int = 1,
        timeout_s: float | None = None,
        seed: int = 0,
        **spec: Any,
    ) -> Iterator[RolloutResult]:
        """Runs every task `group_size` times, at most `concurrency` at once, and gives results
        as they end. Tasks are taken from `tasks` as there is room for them.

        A rollout that takes longer than `timeout_s` is finished on the gateway, which answers
        none of its calls from then on; its thread ends when the agent notices. Leaving the
        iteration early ends the rollouts that run.
        """
        for name, value in (("concurrency", concurrency), ("group_size", group_size)):
            if value < 1:
                raise SinewError(f"{name} is {value}: expected 1 or more")
        pool = _Pool(self, client, timeout_s)
        try:
            for job in _jobs(tasks, group_size, seed, spec):
                while pool.running() >= concurrency:
                    yield pool.next()
                pool.start(*job)
            while pool.running():
                yield pool.next()
        finally:
            pool.abandon()


def _reported(task: Task, report: Mapping[str, Any]) -> None:
    """Scores the rollout with what an agent returned, as a recipe's function may return it."""
    success, metrics = report.get("success"), report.get("metrics") or {}
    rewards = report.get("rewards") or []
    run = _run()
    if success is not None and not isinstance(success, bool):
        raise NoReward(f"task {task.id}: success is {success!r}: expected True, False or None")
    if not isinstance(metrics, Mapping):
        raise NoReward(f"task {task.id}: metrics is {type(metrics).__name__}: expected a dict of numbers")
    if not isinstance(rewards, (list, tuple)):
        raise NoReward(
            f"task {task.id}: rewards is {type(rewards).__name__}: expected a list with a number or None "
            "for each call of the model"
        )
    if report.get("reward") is not None:
        value = _checked(report["reward"], "returned reward")
        reward(value, success=success, metrics=metrics)
    for turn, value in enumerate(rewards, 1):
        if value is not None:
            value = _checked(value, f"returned rewards[{turn - 1}]")
            reward(value, turn=turn)
            run.value = value + (run.value or 0.0) if report.get("reward") is None else run.value


def _jobs(
    tasks: Iterable[Task | str], group_size: int, seed: int, spec: Mapping[str, Any]
) -> Iterator[tuple[Task, dict[str, Any]]]:
    for index, row in enumerate(tasks):
        task = Task(str(index), row) if isinstance(row, str) else row
        for sample in range(group_size):
            # Equal for equal runs, different for each sample.
            drawn = zlib.crc32(f"{seed}/{task.id}/{sample}".encode())
            yield task, {
                "task": task.id,
                "kind": task.kind,
                "group": task.id,
                "seed": drawn,
                **spec,
            }


def _endless(
    rows: list[Task], group_size: int, seed: int, spec: Mapping[str, Any]
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """All rows, then all of them again in another order; groups of no two hosts have one name."""
    host, epoch = secrets.token_hex(4), 0
    while True:
        order = list(rows)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for task in order:
            group = f"{task.id}-{host}-{epoch}"
            for _ in range(group_size):
                yield task, {"group": group, **spec}
        epoch += 1


@dataclass(frozen=True)
class Worked:
    """What came of the rollouts that worked for a run."""

    #: Rollouts that ended by themselves with a reward.
    good: int
    #: Rollouts that failed, ran out of time, called no model or got no reward.
    failed: int
    #: How many failed for each kind of error, as `ValueError` or `no_model_call`.
    causes: dict[str, int]


class _Work:
    """The rollouts of one agent for a run."""

    def __init__(
        self,
        agent: RolloutFunction[Any, Any],
        client: Client,
        timeout_s: float | None,
        first: int,
        line: Line,
    ) -> None:
        self._agent = agent
        self._client = client
        self._timeout_s = timeout_s
        #: So many failures without a success are the agent's own fault.
        self._first = first
        self._line = line
        self._good = 0
        self._failed = 0
        self._causes: dict[str, int] = {}
        self._first_error: BaseException | None = None
        self._error: BaseException | None = None

    async def through(
        self, rollouts: Iterator[tuple[Task, dict[str, Any]]], concurrency: int
    ) -> None:
        """Runs them, at most `concurrency` at once, until the run ends. Cancelled, it ends those that
        run."""
        running: set[asyncio.Task[None]] = set()
        try:
            for task, spec in rollouts:
                while len(running) >= concurrency and not self._line.over:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if self._line.over:
                    break
                job = asyncio.create_task(self._one(task, spec))
                running.add(job)
                job.add_done_callback(running.discard)
                # Lets the others go on where nothing has to be waited for.
                await asyncio.sleep(0)
            await asyncio.gather(*running)
        except BaseException:
            self._line.over = True
            left = set(running)
            for job in left:
                job.cancel()
            if left:
                await asyncio.wait(left)
            raise
        if self._error is not None:
            raise self._error

    def worked(self) -> Worked:
        return Worked(self._good, self._failed, dict(self._causes))

    async def _one(self, task: Task, spec: dict[str, Any]) -> None:
        if self._line.over:
            return
        spec = {"task": task.id, "kind": task.kind, **spec}
        try:
            rollout = await self._line.open(functools.partial(self._client.rollout, **spec))
        except ConnectionFailed as e:
            # The run has ended, and its gateway with it; or it was never there.
            return self._stop(None if self._good else e)
        except ApiError as e:
            if e.code == "run_ended" or e.status == 503 and "stopping" in str(e):
                return self._stop(None)
            if e.status == 429 or e.status >= 500:
                return self._fail(task, e)
            return self._stop(e)  # so would be all others
        except Exception as e:
            return self._stop(e)
        try:
            result = await self._agent._driven(rollout, task, self._timeout_s, self._line)
        except ConnectionFailed as e:
            self._stop(None if self._good else e)
        except Exception as e:
            self._fail(task, e)
        else:
            if result.error is None:
                self._good += 1
            else:
                self._fail(task, result.error)

    def _fail(self, task: Task, error: BaseException) -> None:
        """Counts a rollout that failed, and says so: the first ones, then ever more rarely."""
        if self._line.over:
            return
        self._failed += 1
        kind = (error.code if isinstance(error, ApiError) else None) or type(error).__name__
        if kind not in self._causes and len(self._causes) >= _MAX_CAUSES:
            kind = "other"
        self._causes[kind] = self._causes.get(kind, 0) + 1
        self._first_error = self._first_error or error
        if self._failed <= 3 or self._failed & (self._failed - 1) == 0:
            text = "task %s: a rollout failed (%d failed, %d ended well): %s: %s"
            told = str(error)[:500]
            _log.warning(text, task.id, self._failed, self._good, kind, told)
        if self._good == 0 and self._failed >= self._first:
            self._stop(self._first_error)

    def _stop(self, error: BaseException | None) -> None:
        if not self._line.over:
            self._line.over, self._error = True, error


class _Job:
    def __init__(self, task: Task, deadline: float | None) -> None:
        self.task = task
        self.deadline = deadline
        self.started = time.monotonic()
        self.rollout: Rollout | None = None
        self.over = False

    def result(
        self, value: float | None, error: BaseException | None, timed_out: bool = False
    ) -> RolloutResult:
        wall_s = time.monotonic() - self.started
        return RolloutResult(self.task, self.rollout, value, error, timed_out, wall_s)


class _Pool:
    """Rollouts that run, each in a thread. Threads are daemons: an agent that hangs keeps
    neither the results of others nor the end of the program."""

    def __init__(
        self, agent: RolloutFunction[Any, Any], client: Client, timeout_s: float | None
    ) -> None:
        self._agent = agent
        self._client = client
        self._timeout_s = timeout_s
        self._ended: queue.SimpleQueue[tuple[_Job, RolloutResult]] = queue.SimpleQueue()
        self._live: list[_Job] = []

    def running(self) -> int:
        return len(self._live)

    def start(self, task: Task, spec: dict[str, Any]) -> None:
        now = time.monotonic()
        job = _Job(task, None if self._timeout_s is None else now + self._timeout_s)
        self._live.append(job)
        name = f"rollout {task.id}"
        threading.Thread(target=self._work, args=(job, spec), name=name, daemon=True).start()

    def _work(self, job: _Job, spec: dict[str, Any]) -> None:
        try:
            job.rollout = self._client.rollout(**spec)
            if job.over:
                job.rollout.finish(failed="its time was up while it was opened")
                return
            value, error = self._scored(job.rollout, job.task)
            if not job.over:
                error = _finished(job.rollout, error)
                value = value if error is None else None
        except Exception as e:
            value, error = None, e
        self._ended.put((job, job.result(value, error)))

    def _scored(
        self, rollout: Rollout, task: Task
    ) -> tuple[float | None, BaseException | None]:
        try:
            return self._agent._score(rollout, task)
        except BaseException as e:  # an agent may raise anything, SystemExit included
            return None, e

    def next(self) -> RolloutResult:
        """The next one that ends, or whose time is up."""
        while True:
            deadlines = [job.deadline for job in self._live if job.deadline is not None]
            wait_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            try:
                job, result = self._ended.get(timeout=wait_s)
            except queue.Empty:
                late = self._late()
                if late is not None:
                    return late
                continue
            if job.over:
                continue
            self._live.remove(job)
            return result

    def _late(self) -> RolloutResult | None:
        now = time.monotonic()
        for job in self._live:
            if job.deadline is not None and job.deadline <= now:
                self._live.remove(job)
                return job.result(None, _end(job, timed_out=True), timed_out=True)
        return None

    def abandon(self) -> None:
        for job in self._live:
            _end(job, failed="the program no longer waits for its end")
        self._live.clear()


def _end(job: _Job, **how: Any) -> SinewError | None:
    job.over = True
    if job.rollout is None:
        return None
    try:
        job.rollout.finish(**how)
    except SinewError as e:
        return e
    return None


def _failure(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _finished(
    rollout: Rollout, error: BaseException | None, cut: bool = False
) -> BaseException | None:
    """Ends a rollout, and gives its error: the agent's, or that it called no model. What the gateway
    refuses otherwise is raised."""
    failed = None if error is None or cut else _failure(error)
    try:
        rollout.finish(failed=failed, timed_out=cut)
    except ApiError as e:
        if e.code != "no_model_call":
            raise
        return error or e
    return error


async def _contained(agent: Coroutine[Any, Any, Any]) -> Any:
    """An agent in the event loop, which it must not end."""
    try:
        return await agent
    except SystemExit as e:
        raise RolloutError(f"the agent ended its program: SystemExit: {e}") from e


@overload
def rollout(function: Callable[P, R]) -> RolloutFunction[P, R]: ...
@overload
def rollout() -> Callable[[Callable[P, R]], RolloutFunction[P, R]]: ...
def rollout(function: Callable[P, R] | None = None) -> Any:
    """Makes an agent of a function of `task` and any of `model`, `base_url`, `api_key`, `rollout`.

    Its reward is the number it returns (`True` counts as 1 and as success), or what it gave to
    `reward()`. It may be a coroutine function.
    """
    if function is None:
        return RolloutFunction
    return RolloutFunction(function)
