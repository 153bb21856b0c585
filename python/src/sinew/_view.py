"""Progress of runs: curves in a notebook, a line on a terminal. IPython is used if it is there, never needed."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .records import Result, TrainStep
    from .runs import Run

#: Shortest time between two pictures, in seconds.
_EVERY_S = 0.25
#: Size of the plot in its own units, and its margins: left, right, top, bottom.
_WIDTH, _HEIGHT = 640, 200
_MARGINS = (44, 12, 10, 26)
#: Points of a curve that are drawn; longer ones are averaged.
_POINTS = 300
_COLORS = {"reward": "#0f7b8a", "success": "#c2571a"}
#: Text that models wrote may stand in warnings: longer ones are cut.
_TEXT = 400


class View:
    """Shows one run. Errors of a display never reach the run."""

    def __init__(self, wanted: bool | None) -> None:
        self._notebook = wanted is not False and _in_notebook()
        self._terminal = wanted is not False and not self._notebook and sys.stderr.isatty()
        self._lines = bool(wanted) and not self._notebook and not self._terminal
        self._handle: Any = None
        self._shown_at = 0.0
        self._steps = 0

    def show(self, run: Run) -> None:
        """After each line of the run; draws at most a few times a second."""
        if self._lines:
            for step in run.steps[self._steps :]:
                print(line(run, step), file=sys.stderr, flush=True)
            self._steps = len(run.steps)
        now = time.monotonic()
        if now - self._shown_at < _EVERY_S:
            return
        self._shown_at = now
        self._draw(run)

    def end(self, run: Run) -> None:
        """The last picture."""
        self._draw(run)
        if self._terminal and (run.steps or run.measurements):
            print(file=sys.stderr)

    def _draw(self, run: Run) -> None:
        if self._terminal:
            last = run.steps[-1] if run.steps else None
            print(f"\r{line(run, last)}\x1b[K", end="", file=sys.stderr, flush=True)
        elif self._notebook:
            self._update(_Html(run_html(run)))

    def _update(self, page: _Html) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


class _Html:
    """What IPython shows as HTML, and everything else as text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "progress of a run"


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def line(run: Run, step: TrainStep | None) -> str:
    """A run and its newest step on one line."""
    if step is None:
        return f"{run.name or 'sinew'}: {run.state}"
    whole = "" if run.total is None else f"/{run.total}"
    return (
        f"{run.name}  step {step.number}{whole}  reward {_number(step.reward)}  "
        f"success {_percent(step.success)}  {_time(run, step)}"
    )


def _time(run: Run, step: TrainStep) -> str:
    text = _duration(step.wall_s)
    left = (run.total or 0) - step.number
    if left <= 0 or len(run.steps) < 2:
        return text
    recent = run.steps[-20:]
    each = (recent[-1].wall_s - recent[0].wall_s) / (len(recent) - 1)
    return f"{text}, about {_duration(each * left)} left"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def run_html(run: Run) -> str:
    """A run as it is now: how far it is, its curves, its warnings."""
    step = run.steps[-1] if run.steps else None
    done = step.number / run.total if step and run.total else 0.0
    rows = [f"<div><b>{html.escape(run.name or 'sinew')}</b> {run.state}</div>", _bar(done)]
    if step is not None:
        rows.append(f"<div>{html.escape(line(run, step))}</div>")
        rows.append(_counts(step))
    rows.append(curves(run.steps))
    for m in run.measurements:
        rows.append(f"<div>held-out {html.escape(m.when)}: success {_percent(m.success)}, reward {m.reward:.3f}</div>")
    for warning in run.warnings[-3:]:
        rows.append(f"<div style='color:#b3261e'>warning: {html.escape(warning[:_TEXT])}</div>")
    return f"<div style='max-width:{_WIDTH}px;font:13px/1.5 sans-serif'>{''.join(rows)}</div>"


def _counts(step: TrainStep) -> str:
    counts = [("scored", step.scored), ("unscored", step.unscored), ("failed", step.failed)]
    counts.append(("truncated", step.truncated))
    text = " · ".join(f"{name} {count}" for name, count in counts)
    first = next(iter(step.dropped.items()), None)
    more = "" if first is None else html.escape(f" · not trained {sum(step.dropped.values())}: {first[0][:_TEXT]}")
    return f"<div style='opacity:.75'>{text}{more}</div>"


def _bar(share: float) -> str:
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
    return (
        "<div style='height:6px;background:rgba(128,128,128,.25);border-radius:3px;margin:4px 0'>"
        f"<div style='height:6px;width:{width};background:{_COLORS['reward']};border-radius:3px'></div></div>"
    )


def curves(steps: Sequence[TrainStep]) -> str:
    """Reward and success over steps, as SVG. Nothing for fewer than two steps."""
    rewards = [(s.number, s.reward) for s in steps if s.reward is not None]
    success = [(s.number, s.success) for s in steps if s.success is not None]
    if len(rewards) < 2:
        return ""
    first, last = rewards[0][0], rewards[-1][0]
    low = min(0.0, *(y for _, y in rewards))
    high = max(1.0, *(y for _, y in rewards))
    left, right, top, bottom = _MARGINS

    def x(number: float) -> float:
        return left + (number - first) / max(last - first, 1) * (_WIDTH - left - right)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (_HEIGHT - top - bottom)

    parts = [_grid(low, high, y), _axis(first, last, x)]
    for name, points in (("success", success), ("reward", rewards)):
        drawn = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in _averaged(points))
        parts.append(f"<polyline points='{drawn}' fill='none' stroke='{_COLORS[name]}' stroke-width='2'/>")
    for index, name in enumerate(_COLORS):
        at, below = _WIDTH / 2 - 70 + 80 * index, _HEIGHT - 17
        parts.append(f"<rect x='{at}' y='{below}' width='10' height='10' fill='{_COLORS[name]}'/>")
        parts.append(f"<text x='{at + 14}' y='{below + 9}' fill='currentColor' font-size='11'>{name}</text>")
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' style='width:100%' role='img'>{''.join(parts)}</svg>"


def _grid(low: float, high: float, y: Any) -> str:
    left, right, _, _ = _MARGINS
    lines = []
    for value in (low, (low + high) / 2, high):
        at = y(value)
        lines.append(
            f"<line x1='{left}' x2='{_WIDTH - right}' y1='{at:.1f}' y2='{at:.1f}' stroke='currentColor' "
            "stroke-opacity='.2'/>"
            f"<text x='{left - 6}' y='{at + 4:.1f}' text-anchor='end' fill='currentColor' font-size='11'>"
            f"{value:.2g}</text>"
        )
    return "".join(lines)


def _axis(first: int, last: int, x: Any) -> str:
    texts = []
    for number, anchor in ((first, "start"), (last, "end")):
        text = f"step {number}"
        texts.append(
            f"<text x='{x(number):.1f}' y='{_HEIGHT - 8}' text-anchor='{anchor}' fill='currentColor' "
            f"font-size='11'>{text}</text>"
        )
    return "".join(texts)


def _averaged(points: Sequence[tuple[int, float]]) -> Iterable[tuple[float, float]]:
    size = -(-len(points) // _POINTS)
    for at in range(0, len(points), size):
        some = points[at : at + size]
        yield sum(p[0] for p in some) / len(some), sum(p[1] for p in some) / len(some)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    cells = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def result_html(result: Result) -> str:
    """Held-out tasks before and after, and the curves of the run."""
    b, a = result.before, result.after
    rows = [
        ("success", _percent(b.success), _percent(a.success)),
        ("reward", _number(b.reward), _number(a.reward)),
        ("turns", f"{b.turns:.1f}", f"{a.turns:.1f}"),
        ("sampled tokens", f"{b.sampled_tokens:.1f}", f"{a.sampled_tokens:.1f}"),
    ]
    if b.greedy_success is not None and a.greedy_success is not None:
        rows.insert(1, ("greedy success", _percent(b.greedy_success), _percent(a.greedy_success)))
    names = html.escape(f"{result.folder}: {len(result.steps)} steps in {_duration(result.wall_s)}")
    shown = table(["held-out", "before", "after"], rows) + curves(result.steps)
    return f"<div style='max-width:{_WIDTH}px'><div>{names}</div>{shown}</div>"
