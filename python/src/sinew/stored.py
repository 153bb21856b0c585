"""Stored episodes of a run: lists of dataclasses, and tables of pandas, polars or pyarrow where these are installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, overload

from ._program import command
from ._view import table
from .client import Trace
from .errors import RecipeError, SinewError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

#: Episodes of one call of the program.
_PAGE = 10_000
#: Rows that a notebook shows.
_SHOWN = 20


@dataclass(frozen=True)
class Episode:
    """One stored episode, without its tokens."""

    id: str
    #: Episodes of one group are compared with each other.
    group: str
    task: str
    #: Type of the task.
    kind: str
    #: `train`, `eval-before`, `eval-after` and so on.
    purpose: str
    #: Number of the draw within its purpose.
    draw: int
    #: Outcome and rewards of turns; `None` without a score.
    reward: float | None
    success: bool
    #: `terminated`, `truncated` or `failed`.
    end: str
    turns: int
    sampled_tokens: int
    #: Training step that trained it; `None` if none did.
    step: int | None
    #: Seconds since 1970.
    started_unix_s: float
    #: Wall time, in seconds.
    total_s: float
    raw: dict[str, Any] = field(repr=False, compare=False)

    @staticmethod
    def of(raw: dict[str, Any]) -> Episode:
        """From a line of `sinew episodes --json`."""
        missing = raw["end"] == "failed" or bool(raw.get("unscored"))
        return Episode(
            id=raw["episode"],
            group=raw["group"],
            task=raw["task"],
            kind=raw["task_kind"],
            purpose=raw["purpose"],
            draw=raw["draw"],
            reward=None if missing else raw["reward"],
            success=raw["success"],
            end=raw["end"],
            turns=raw["turns"],
            sampled_tokens=raw["sampled_tokens"],
            step=raw["update"],
            started_unix_s=float("nan") if raw["started_unix_s"] is None else raw["started_unix_s"],
            total_s=raw["total_s"],
            raw=raw,
        )


_COLUMNS = tuple(f.name for f in fields(Episode) if f.name != "raw")


class Episodes(Sequence[Episode]):
    """A list of episodes that knows how to become a table."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = list(episodes)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> Episodes: ...
    def __getitem__(self, index: int | slice) -> Episode | Episodes:
        if isinstance(index, slice):
            return Episodes(self._episodes[index])
        return self._episodes[index]

    def __len__(self) -> int:
        return len(self._episodes)

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)

    def __repr__(self) -> str:
        return f"Episodes({len(self)})"

    def columns(self) -> dict[str, list[Any]]:
        """A list for each field of `Episode`, but for `raw`."""
        return {name: [getattr(e, name) for e in self._episodes] for name in _COLUMNS}

    def pandas(self) -> pandas.DataFrame:
        """As a pandas data frame. A missing reward is NaN."""
        try:
            import pandas
        except ImportError as e:
            raise SinewError("pandas is not installed: `pip install pandas`, or use columns()") from e
        return pandas.DataFrame(self.columns(), columns=list(_COLUMNS))

    def polars(self) -> polars.DataFrame:
        """As a polars data frame. A missing reward is null."""
        try:
            import polars
        except ImportError as e:
            raise SinewError("polars is not installed: `pip install polars`, or use columns()") from e
        return polars.DataFrame(self.columns(), infer_schema_length=None)

    def arrow(self) -> pyarrow.Table:
        """As an Arrow table. A missing reward is null."""
        try:
            import pyarrow
        except ImportError as e:
            raise SinewError("pyarrow is not installed: `pip install pyarrow`, or use columns()") from e
        return pyarrow.table(self.columns())

    def _repr_html_(self) -> str:
        def cells(e: Episode) -> list[str]:
            reward = "-" if e.reward is None else f"{e.reward:.3f}"
            return [e.id, e.purpose, e.task, reward, str(e.success), e.end, str(e.turns), str(e.sampled_tokens)]

        head = ["episode", "purpose", "task", "reward", "success", "end", "turns", "tokens"]
        shown = table(head, map(cells, self._episodes[:_SHOWN]))
        more = len(self) - _SHOWN
        return shown + (f"<div>and {more} more</div>" if more > 0 else "")


def episodes(
    run: str | os.PathLike[str],
    *,
    purpose: str | None = None,
    step: int | None = None,
    success: bool | None = None,
    end: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    limit: int | None = None,
) -> Episodes:
    """The stored episodes of a run's folder that fit all filters, in the order in which they were stored. The run may
    be training. `step` is the one that trained them, `end` is `terminated`, `truncated` or `failed`.

    A filter that nothing fits is a `RecipeError`, so that a mistyped one is not taken for an empty run.
    """
    named = {"purpose": purpose, "step": step, "end": end, "min-reward": min_reward, "max-reward": max_reward}
    named["success"] = None if success is None else str(success).lower()
    filters = [f"--{name}={value}" for name, value in named.items() if value is not None]
    found: list[Episode] = []
    after: list[str] = []
    while limit is None or len(found) < limit:
        page = _PAGE if limit is None else min(_PAGE, limit - len(found))
        try:
            words = ["--run-dir", os.fspath(run), "--limit", str(page), *filters, *after]
            rows = command("episodes", "--json", *words)
        except RecipeError as e:
            # The page behind the last one is empty, which the program reports as an error.
            if found and "no episode of" in str(e):
                break
            raise
        found.extend(map(Episode.of, rows))
        if len(rows) < page:
            break
        after = ["--after", str(rows[-1]["cursor"])]
    return Episodes(found)


def episode(run: str | os.PathLike[str], id: str) -> Trace:
    """One stored episode with its tokens and their texts (`TraceNode.text`)."""
    (raw,) = command("show", id, "--json", "--run-dir", run)
    return Trace.of(raw)


__all__ = ["Episode", "Episodes", "episode", "episodes"]
