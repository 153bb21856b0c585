"""Tasks: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from .errors import SinewError

#: Longest line of a file of tasks, in bytes.
MAX_LINE = 4 << 20


class DatasetError(SinewError):
    """A row that is not a task. Names file and line."""


@dataclass(frozen=True)
class Task:
    """A problem. `data` holds what the agent must not see, such as the answer."""

    id: str
    prompt: str
    data: dict[str, Any] = field(default_factory=dict)
    #: For metrics by type of task.
    kind: str = "task"

    @staticmethod
    def from_row(row: Any, index: int) -> Task:
        """From a JSON object: `prompt`, or `question`; `id` and `kind` if they are there; all
        other keys become `data`."""
        if not isinstance(row, dict):
            raise DatasetError(f"task {index}: expected an object, found {type(row).__name__}")
        rest = dict(row)
        prompt = rest.pop("prompt", None)
        if prompt is None:
            prompt = rest.pop("question", None)
        if not isinstance(prompt, str):
            raise DatasetError(f"task {index}: prompt is {prompt!r}, expected text")
        task_id = str(rest.pop("id", index))
        kind = str(rest.pop("kind", "task"))
        data = rest.pop("data", None)
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise DatasetError(f"task {index}: data is {data!r}, expected an object")
        return Task(task_id, prompt, {**rest, **data}, kind)


class Dataset:
    """Tasks with distinct ids, in order."""

    def __init__(self, tasks: Iterable[Task | str | dict[str, Any]]) -> None:
        self._tasks: list[Task] = []
        seen: set[str] = set()
        for index, row in enumerate(tasks):
            if isinstance(row, str):
                row = {"prompt": row}
            task = row if isinstance(row, Task) else Task.from_row(row, index)
            if task.id in seen:
                raise DatasetError(f"task {index}: id {task.id!r} is there twice")
            seen.add(task.id)
            self._tasks.append(task)

    @staticmethod
    def from_jsonl(path: str | Path) -> Dataset:
        """Reads a file with one JSON object a line; empty lines are skipped."""
        rows: list[Task] = []
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    raise DatasetError(f"{path}, line {number}: longer than {MAX_LINE} bytes")
                if not line.strip():
                    continue
                try:
                    rows.append(Task.from_row(json.loads(line), len(rows)))
                except (ValueError, DatasetError) as e:
                    raise DatasetError(f"{path}, line {number}: {e}") from e
        return Dataset(rows)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def filter(self, keep: Callable[[Task], bool]) -> Dataset:
        """The tasks for which `keep` is true."""
        return Dataset([task for task in self._tasks if keep(task)])

    def take(self, count: int) -> Dataset:
        """The first `count` tasks."""
        return Dataset(self._tasks[:count])
