"""Runs from Python: `train`, `eval`, `check`. A recipe is a file, or a dict with the same keys."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import weakref
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from ._objects import plain
from ._program import Program, command
from ._toml import dumps
from ._view import View, run_html
from .errors import OutsideMissing, RecipeError, RunFailed, RunStopped, SinewError
from .records import Check, Measurement, Measures, Result, TrainStep

if TYPE_CHECKING:
    from typing_extensions import Self

#: A recipe: the path of a TOML file, or its keys and values, which may be rows, functions and classes: `tasks` a
#: list of dicts or a data frame, `reward` a function, `env` a class.
Recipe = Union[str, "os.PathLike[str]", Mapping[str, Any]]


def train(
    recipe: Recipe,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int | None = None,
    serve: str | None = None,
    progress: bool | None = None,
    track: str | None = None,
) -> Run:
    """Starts `sinew train` and gives its steps as they come::

        for step in sinew.train("recipe.toml"):
            print(step.number, step.reward)

    `run_dir` is the folder of the run; without it, `runs/NAME`. `resume` goes on with the run that is there.
    `seed` replaces that of the recipe. `serve` is the address of the gateway for agents that run already, such as
    `127.0.0.1:8080`. `progress` shows progress: curves in a notebook, a line on a terminal;
    `None` does so where there is one. `track` names trackers that get the numbers, such as `wandb,mlflow`: their
    clients are those of this interpreter. Paths in a recipe are relative to the current folder.

    What is wrong is raised by the iteration and by `Run.result`: `RecipeError`, `OutsideMissing`, `RunFailed`.
    """
    more = [] if serve is None else ["--serve", serve]
    more += [] if track is None else ["--track", track]
    return Run("train", recipe, run_dir, resume, seed, progress, more)


def eval(
    recipe: Recipe,
    *,
    model: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int | None = None,
) -> Measures:
    """Runs the held-out tasks of a recipe once and trains nothing. `model` replaces that of the recipe: a
    source as in a recipe, or a folder such as `Result.model`.

    The episodes are in `run_dir`; without it, in `runs/NAME-eval`, of a second call in `runs/NAME-eval-2`.
    """
    more = [] if model is None else ["--model", os.fspath(model)]
    with Run("eval", recipe, run_dir, resume, seed, False, more) as run:
        return Measures.of(run._finish()["eval"])


def check(recipe: Recipe) -> list[Check]:
    """What would fail later, now: the rows of `sinew check`, each of which is `ok`.

    Raises `RecipeError` for a recipe that would fail and `OutsideMissing` where something is needed first; both
    have all rows in `checks`.
    """
    rows: list[Check] = []
    with _file(recipe) as path:
        program = Program(["check", path, "--json"])
        try:
            for line in iter(program.take, None):
                if "check" in line:
                    rows.append(Check(str(line["check"]), bool(line["ok"]), str(line["detail"])))
            program.check()
        except SinewError as e:
            raise _refused(_named(e, path, recipe), rows) from None
        finally:
            program.stop()
    return rows


def _refused(error: SinewError, rows: list[Check]) -> SinewError:
    """The error of a check, with its rows. One that came to its end counts as a refusal, not as a failed run."""
    if isinstance(error, RunFailed) and not all(row.ok for row in rows):
        failed = "\n".join(f"{row.name}: {row.detail}" for row in rows if not row.ok)
        error = RecipeError(failed)
    error.checks = rows
    return error


def export(
    run: str | os.PathLike[str], folder: str | os.PathLike[str], *, dtype: str = "f32"
) -> Path:
    """Writes the weights of a run's newest checkpoint as a model folder; its path. `dtype` is `f32` or `bf16`."""
    command("export", run, folder, "--dtype", dtype)
    return Path(folder)


class Run:
    """A run that trains: an iterator of its steps, also for `async for`, and a context manager that stops it.

    A run that is closed or garbage stops as by Ctrl-C: the work at hand ends and a checkpoint is made, so that
    `resume=True` loses nothing. So does a run whose Python process is gone. Leaving a loop early closes only a run
    that has no name; `with sinew.train(...) as run:` closes it in every case. For one reader at a time.
    """

    def __init__(
        self,
        command: str,
        recipe: Recipe,
        run_dir: str | os.PathLike[str] | None,
        resume: bool,
        seed: int | None,
        progress: bool | None,
        more: list[str] | None = None,
    ) -> None:
        #: Steps so far, of this session.
        self.steps: list[TrainStep] = []
        #: Held-out measurements so far.
        self.measurements: list[Measurement] = []
        #: What the run warned of.
        self.warnings: list[str] = []
        #: Folder of the run; `None` until it has begun.
        self.folder: Path | None = None
        #: Name of the recipe.
        self.name: str = ""
        #: Steps that the recipe asks for; `None` until the run has begun.
        self.total: int | None = None
        #: `running`, `ended`, `stopped` or `failed`.
        self.state: str = "running"
        # Name of the stage of a chain that runs now.
        self._stage: str | None = None
        self._recipe = recipe
        self._files = contextlib.ExitStack()
        self._last: dict[str, Any] | None = None
        self._error: SinewError | None = None
        self._path = self._files.enter_context(_file(recipe))
        words = [command, os.fspath(self._path), "--json", "--stop-on-eof", *(more or [])]
        words += [] if run_dir is None else ["--run-dir", os.fspath(run_dir)]
        words += ["--resume"] if resume else []
        words += [] if seed is None else ["--seed", str(seed)]
        try:
            self._program = Program(words)
        except BaseException:
            self._files.close()
            raise
        self._view = View(progress)
        self._finalizer = weakref.finalize(self, _end, self._program, self._files)

    def __iter__(self) -> Iterator[TrainStep]:
        return self

    def __next__(self) -> TrainStep:
        try:
            while (line := self._program.take()) is not None:
                step = self._line(line)
                if step is not None:
                    return step
        except KeyboardInterrupt:
            self.close()
            raise
        self._ended()
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[TrainStep]:
        return self

    async def __anext__(self) -> TrainStep:
        while (line := await self._program.take_async()) is not None:
            step = self._line(line)
            if step is not None:
                return step
        self._ended()
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Result]:
        async def whole() -> Result:
            async for _ in self:
                pass
            return self.result()

        return whole().__await__()

    def result(self) -> Result:
        """Waits for the end: the trained model's folder, held-out success before and after, and the summary.

        Raises `RunStopped` if the run was stopped, and what went wrong otherwise.
        """
        last = self._finish()
        return Result.of(last, self._folder(), self.steps)

    def stop(self) -> None:
        """Asks the run to stop, as Ctrl-C does, and does not wait. A second call ends it at once."""
        self._program.ask_to_stop()

    def close(self) -> None:
        """Stops the run if it is running, and waits for its checkpoint."""
        running = self.state == "running"
        self._finalizer()
        if running:
            # Steps that the program ended meanwhile are steps of the run as well.
            while (line := self._program.take()) is not None:
                self._line(line)
            with contextlib.suppress(SinewError):
                self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"Run({self.name or self._path.stem!r}, {self.state}, {len(self.steps)} steps)"

    def _repr_html_(self) -> str:
        return run_html(self)

    def _folder(self) -> Path:
        if self.folder is None:
            raise RunFailed("the run ended before it had a folder")
        return self.folder

    def _line(self, line: dict[str, Any]) -> TrainStep | None:
        """Takes in an object that the run printed; its step if it is one."""
        if "step" in line:
            step = TrainStep.of(line["step"])
            self.steps.append(step)
            self._view.show(self)
            return step
        if "run" in line:
            self._began(line["run"])
        elif "stage" in line:
            self._stage = str(line["stage"]["name"])
        elif "measured" in line:
            self.measurements.append(Measurement.of(line["measured"]))
        elif "warning" in line:
            self.warnings.append(str(line["warning"]))
        elif "eval" in line:
            self._last = line
        self._view.show(self)
        return None

    def _began(self, about: dict[str, Any]) -> None:
        """A run begins: this one, or one of its stages, whose folder is in that of the chain."""
        name, folder, steps = str(about["name"]), Path(about["folder"]), int(about["steps"])
        if self._stage is not None:
            name, folder = name.removesuffix(f"-{self._stage}"), folder.parent
            steps += self.total or 0
        self.name, self.folder, self.total = name, folder, steps

    def _finish(self) -> dict[str, Any]:
        """The last object, after the end."""
        for _ in self:
            pass
        if self._last is None:
            raise RunFailed("the run ended without a result")
        return self._last

    def _ended(self) -> None:
        """After the last line: why, if it did not end well. The same each time."""
        if self.state == "running":
            try:
                self._program.check()
                self.state = "ended"
            except RunStopped as e:
                self.state, self._error = "stopped", self._stopped(e)
            except SinewError as e:
                self.state, self._error = "failed", _named(e, self._path, self._recipe)
            if isinstance(self._error, RunFailed) and self._last is not None:
                self._error.result = Result.of(self._last, self._folder(), self.steps)
            self._view.end(self)
            self._finalizer()
        if self._error is not None:
            raise self._error

    def _stopped(self, error: SinewError) -> RunStopped:
        if self.folder is None:
            return RunStopped("stopped before it began")
        recipe = "recipe" if isinstance(self._recipe, Mapping) else repr(os.fspath(self._recipe))
        return RunStopped(
            f"stopped after {len(self.steps)} steps; nothing is lost\n"
            f"  hint: go on with sinew.train({recipe}, run_dir={str(self.folder)!r}, resume=True)"
        )


def _end(program: Program, files: contextlib.ExitStack) -> None:
    program.stop()
    files.close()


@contextlib.contextmanager
def _file(recipe: Recipe) -> Iterator[Path]:
    """The path of a recipe; of a dict, that of a temporary file with its TOML."""
    if not isinstance(recipe, Mapping):
        yield Path(recipe)
        return
    text = dumps(plain(recipe))
    with tempfile.TemporaryDirectory(prefix="sinew-") as folder:
        # The name of the file is that of a run without one.
        path = Path(folder) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        yield path


#: Options of the program, as they are named here.
_OPTIONS = {"--resume": "resume=True", "--run-dir": "run_dir", "--model": "model", "--seed": "seed", "--serve": "serve", "--track": "track"}


def _named(error: SinewError, path: Path, recipe: Recipe) -> SinewError:
    """The same error in the words of Python, and with the dict in the place of its temporary file."""
    text = str(error)
    for option, keyword in _OPTIONS.items():
        text = re.sub(rf"{option}(?![\w-])", keyword, text)
    text = text.replace("the same command and resume=True", "the same call and resume=True")
    if isinstance(recipe, Mapping):
        text = text.replace(f"recipe {path}", "recipe").replace(str(path), "the recipe")
    elif path.parent.resolve() != Path.cwd() and isinstance(error, (RecipeError, OutsideMissing)):
        text += f"\n  hint: paths in a recipe are relative to the current folder, {Path.cwd()}"
    error.args = (text,)
    if isinstance(error, RecipeError):
        error.message = text
    return error


__all__ = ["Recipe", "Run", "check", "eval", "export", "train"]
