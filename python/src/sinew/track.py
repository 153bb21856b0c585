"""Sends the numbers of a run to trackers of experiments, by their own clients.

`sinew train RECIPE --track wandb,mlflow` starts this file as a process. By hand, for a run that works or has ended::

    python3 -m sinew.track RUN --to wandb,tensorboard

It follows `metrics.jsonl` and `evals.jsonl` from their beginning until the process of the run ends. It asks a tracker for
the newest step there, so that a session that resumes a run adds only new steps. The numbers have the names of
docs/metrics.md, with `/` between the levels; those of held-out tasks begin with `held_out/`. Each tracker has a process of
its own, so that one that hangs does not hold up the others. Standard library only, and the clients that are asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

#: Seconds between two looks at the files, and after a tracker refused something: at first, and at most.
EVERY, PAUSE, LONGEST = 0.5, 5.0, 300.0
#: Limits of MLflow: metrics and parameters of a request, characters of a name and of a value.
METRICS, PARAMS, NAME, VALUE = 1000, 100, 250, 6000
#: Means over scored episodes and numbers of an update: where there was none, they are left out, and are not 0.
OF_SCORED = {"success", "reward", "turns", "sampled_tokens"}
OF_UPDATE = {"loss", "grad_norm", "learning_rate", "logprob_gap_max"}


def flat(value: Any, by: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested dicts and of lists of dicts, each with the way to it as its name."""
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield name, value
        return
    left_out: set[str] = set()
    if {"episodes", "failed"} <= value.keys() and value["episodes"] <= value["failed"] + value.get("unscored", 0):
        left_out |= OF_SCORED
    if value.get("updates_applied") == 0:
        left_out |= OF_UPDATE
    for key, below in value.items():
        if key not in left_out:
            yield from flat(below, by, f"{name}{by}{key}" if name else str(key))


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by name."""
    found = ((n, v) for n, v in flat(record, "/") if isinstance(v, (int, float)) and not isinstance(v, bool))
    return {n: float(v) for n, v in found if math.isfinite(v)}


class Run:
    """The folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, {}
        if sys.version_info >= (3, 11):
            self.config = import_module("tomllib").loads((folder / "recipe.toml").read_text())
        self.name = str(self.config.get("name", folder.name))
        # Every session has it, and a copy of the folder is the same run. Of several processes the first one makes it.
        path, new = folder / "track.json", folder / f"track.{os.getpid()}"
        new.write_text(json.dumps({"id": uuid.uuid4().hex[:16]}))
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
        self.id = str(json.loads(path.read_text())["id"])

    def files(self) -> list[Path]:
        return [path for name in ("recipe.toml", "report.html") if (path := self.folder / name).is_file()]

    def end(self) -> tuple[str, str]:
        """How the process ended (`ended`, `interrupted`, `failed` or `killed`), and the same with the reason."""
        end = json.loads((self.folder / "end.json").read_text())
        state, why = str(end["state"]), str(end["why"] or end["state"])
        return state, (why if why.startswith(state) else f"{state}: {why}")[:VALUE]


def works(folder: Path) -> bool:
    """Whether a process holds the run."""
    with contextlib.suppress(FileNotFoundError), open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Lines:
    """Whole lines of a file that grows. A run that is resumed replaces the file, which is then read again."""

    def __init__(self, path: Path) -> None:
        self.path, self.rest, self.number = path, "", 0
        self.file: TextIO | None = None

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Lines that came since: the number, from 1, and the object."""
        if not self.path.exists():
            return
        if self.file is None or os.stat(self.path).st_ino != os.fstat(self.file.fileno()).st_ino:
            self.file, self.rest, self.number = open(self.path, encoding="utf-8"), "", 0
        *whole, self.rest = (self.rest + self.file.read()).split("\n")
        for line in whole:
            self.number += 1
            yield self.number, json.loads(line)


class Wandb:
    """Weights & Biases. The axis of all numbers is `step`."""

    def __init__(self, run: Run) -> None:
        wandb = import_module("wandb")
        known = {"id": run.id, "name": run.name, "config": run.config, "resume": "allow", "reinit": "finish_previous"}
        place = {"project": os.environ.get("WANDB_PROJECT", "sinew"), "dir": os.environ.get("WANDB_DIR", run.folder)}
        self.run = wandb.init(**known, **place, settings=wandb.Settings(console="off"))
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("trained_step", hidden=True)

    def last(self, name: str) -> float:
        return float(self.run.summary.get("trained_step" if name == "step" else name) or 0)

    def log(self, step: int, row: dict[str, float]) -> None:
        # Held-out rows have a step, too, and may come after rows of later steps.
        trained = {"trained_step": row["step"]} if "step" in row else {}
        self.run.log({**row, **trained, "step": step})

    def end(self, run: Run) -> None:
        state, self.run.summary["end"] = run.end()
        for file in run.files():
            self.run.save(str(file), base_path=str(run.folder), policy="now")
        self.run.finish(exit_code=0 if state == "ended" else 1)


class Mlflow:
    """MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self, run: Run) -> None:
        self.entities = import_module("mlflow.entities")
        self.client = client = import_module("mlflow.tracking").MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "sinew")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.`sinew.run` = '{run.id}'")
        tags = {"sinew.run": run.id, "mlflow.source.name": "sinew", "mlflow.source.type": "LOCAL"}
        self.run = found[0] if found else client.create_run(experiment, run_name=run.name, tags=tags)
        self.id = self.run.info.run_id
        client.update_run(self.id, status="RUNNING")
        params = [self.entities.Param(self.named(n), str(v)[:VALUE]) for n, v in flat(run.config, ".")]
        for at in range(0, len(params) if not found else 0, PARAMS):
            client.log_batch(self.id, params=params[at : at + PARAMS])

    @staticmethod
    def named(name: str) -> str:
        """A name that MLflow allows. Where metrics are files, no name can be the folder of others."""
        group, slash, rest = name.partition("/")
        return re.sub(r"[^\w\-. /]", "_", group + slash + rest.replace("/", "."))[:NAME]

    def last(self, name: str) -> float:
        return float(self.run.data.metrics.get(self.named(name), 0))

    def log(self, step: int, row: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.entities.Metric(self.named(n), v, now, step) for n, v in row.items()]
        for at in range(0, len(metrics), METRICS):
            self.client.log_batch(self.id, metrics=metrics[at : at + METRICS])

    def end(self, run: Run) -> None:
        state, text = run.end()
        self.client.set_tag(self.id, "sinew.end", text)
        for file in run.files():
            self.client.log_artifact(self.id, str(file))
        self.client.set_terminated(self.id, {"ended": "FINISHED", "interrupted": "KILLED"}.get(state, "FAILED"))


class Tensorboard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, run: Run) -> None:
        folder = str(run.folder / "tensorboard")
        os.makedirs(folder, exist_ok=True)
        events = import_module("tensorboard.backend.event_processing.event_accumulator")
        self.earlier = events.EventAccumulator(folder).Reload()
        self.writer = import_module("tensorboard.summary").Writer(folder)

    def last(self, name: str) -> float:
        known = name in self.earlier.Tags()["tensors"]
        return float(self.earlier.Tensors(name)[-1].tensor_proto.float_val[0]) if known else 0.0

    def log(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, run: Run) -> None:
        self.writer.close()


class Clearml:
    """ClearML. Each session is a task, with all numbers so far."""

    def __init__(self, run: Run) -> None:
        self.task = import_module("clearml").Task.init(
            os.environ.get("CLEARML_PROJECT", "sinew"),
            run.name,
            tags=[f"sinew:{run.id}"],
            reuse_last_task_id=False,
            auto_connect_frameworks={"detect_repository": False},
            auto_connect_arg_parser=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self.task.set_parameters({name.replace(".", "/", 1): str(v) for name, v in flat(run.config, ".")})
        self.task.connect_configuration(run.config, name="recipe")

    def last(self, name: str) -> float:
        return 0.0

    def log(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            title, _, series = name.partition("/")
            self.task.get_logger().report_scalar(title, series or title, value, step)

    def end(self, run: Run) -> None:
        for file in run.files():
            self.task.upload_artifact(file.name, str(file), wait_on_upload=True)
        state, text = run.end()
        mark = {"ended": self.task.mark_completed, "interrupted": self.task.mark_stopped}
        mark.get(state, self.task.mark_failed)(status_message=text)
        self.task.close()


#: Trackers by name, which is that of the package, too. `last` is the newest value of a number there, 0 without one.
TRACKERS: dict[str, Any] = {"clearml": Clearml, "mlflow": Mlflow, "tensorboard": Tensorboard, "wandb": Wandb}


def begin(folder: Path, name: str) -> tuple[Run, Any, tuple[Lines, Lines], dict[str, float]]:
    """A run, the same at its tracker, its files from their beginning, and how far the tracker is."""
    run = Run(folder)
    tracker = TRACKERS[name](run)
    sent = {number: tracker.last(number) for number in ("step", "held_out/number")}
    return run, tracker, (Lines(folder / "metrics.jsonl"), Lines(folder / "evals.jsonl")), sent


def rows(files: tuple[Lines, Lines], sent: dict[str, float]) -> Iterator[tuple[int, dict[str, float]]]:
    """New rows: the training step, and numbers by name. `sent` says how far the tracker is."""
    for _, record in files[0].new():
        if record["step"] > sent["step"]:
            yield record["step"], numbers(record)
    for number, record in files[1].new():
        if number > sent["held_out/number"]:
            row = {f"held_out/{name}": value for name, value in numbers(record["stats"]).items()}
            yield record["step"], row | {"held_out/number": float(number)}


def follow(folder: Path, name: str) -> bool:
    """Sends rows until the process of the run has ended; whether the tracker took all. What fails is sent again."""
    while not (folder / "recipe.toml").is_file():
        if not works(folder):
            return True
        time.sleep(EVERY)
    begun, pause = None, PAUSE
    while True:
        # This is asked first, so that the files are read once more after the end.
        over = not works(folder)
        try:
            begun = begun or begin(folder, name)
            run, tracker, files, sent = begun
            for step, row in rows(files, sent):
                tracker.log(step, row)
                sent |= {number: row[number] for number in sent if number in row}
            if over:
                tracker.end(run)
                return True
            time.sleep(EVERY)
        except Exception as error:
            # An address may hold a password.
            text = re.sub(r"//[^/@\s]*@", "//", f"{type(error).__name__}: {error}").splitlines()[0][:300]
            print(f"track: {name}: {text}", file=sys.stderr)
            if over:
                print(f"track: `{sys.executable} -m sinew.track {folder} --to {name}` sends the rest", file=sys.stderr)
                return False
            begun, until, pause = None, time.monotonic() + pause, min(2 * pause, LONGEST)
            while time.monotonic() < until and works(folder):
                time.sleep(EVERY)


class Said:
    """Standard error, also for what clients print. It may end before this process, with that of the run."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.__stderr__, flush=True)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.__stderr__, name)


def refused(names: list[str]) -> tuple[int, str] | None:
    """Why there is no such tracker or no client of it, with the exit status."""
    for name in names:
        if name not in TRACKERS:
            return 2, f"there is no tracker {name!r}: allowed: {', '.join(TRACKERS)}"
        spec = find_spec(name)
        # A mere folder of that name is no package.
        if spec is None or spec.origin is None:
            install = f"{sys.executable} -m pip install {name}"
            return 3, f"{sys.executable} has no package {name}\n  hint: {install} (the extra sinew[track] has all clients)"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m sinew.track", description="Sends a run to trackers of experiments.")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--to", required=True, metavar="NAMES", help=", ".join(TRACKERS))
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    args = parser.parse_args(arguments)
    names = list(dict.fromkeys(args.to.split(",")))
    refusal = refused(names)
    if refusal is None and not (args.check or works(args.run) or (args.run / "recipe.toml").is_file()):
        refusal = 2, f"{args.run} holds no run: it has no recipe.toml"
    if refusal is not None:
        print(refusal[1], file=sys.stderr)
    if refusal is not None or args.check:
        return refusal[0] if refusal else 0
    others: list[int] = []
    for name in names[1:]:
        others.append(os.fork())
        if others[-1] == 0:
            names, others = [name], []
            break
    sys.stdout = sys.stderr = cast(TextIO, Said())
    took = follow(args.run, names[0])
    return 0 if all([took, *(os.waitpid(pid, 0)[1] == 0 for pid in others)]) else 1


if __name__ == "__main__":
    sys.exit(main())
