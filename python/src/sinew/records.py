"""What runs say of themselves: steps, measurements, results. Fields that this version does not name are in `raw`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._program import command

_MEASURED = ("success", "reward", "turns", "sampled_tokens", "greedy_success")


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {str(k): float(v) for k, v in values.items() if isinstance(v, (int, float))}


def _counts(values: Any) -> dict[str, int]:
    return {name: int(value) for name, value in _numbers(values).items()}


@dataclass(frozen=True)
class TrainStep:
    """One training step: its episodes and the update of the weights."""

    #: From 1.
    number: int
    #: Mean over the scored episodes; `None` if none has a score.
    reward: float | None
    #: Share of the scored episodes that succeeded, 0 to 1; `None` if none has a score.
    success: float | None
    #: As the trainer reports it.
    loss: float
    #: All episodes of the step.
    episodes: int
    #: Those with a score. The others count in no average, no baseline and no loss.
    scored: int
    #: Ended, but without a score.
    unscored: int
    #: Failed by the system.
    failed: int
    #: Ended by a limit.
    truncated: int
    #: Episodes that were not trained, by reason.
    dropped: dict[str, int]
    #: Tokens with weight in the loss.
    trained_tokens: int
    #: Norm of the gradient before clipping; 0 if nothing was trained.
    grad_norm: float
    learning_rate: float
    #: Mean entropy of the trained tokens, in nats; `None` if nothing was trained.
    entropy: float | None
    #: Means of what the environment and the rewards measured, such as `reward/NAME`.
    metrics: dict[str, float]
    #: Seconds of the episodes, and of the update.
    rollout_s: float
    train_s: float
    #: Seconds since the run began, over all of its sessions.
    wall_s: float
    #: The whole record, with what has no field here.
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def of(raw: dict[str, Any]) -> TrainStep:
        """From a line of `sinew train --json` or of a run's `metrics.jsonl`."""
        rollout: dict[str, Any] = raw["rollout"]
        unscored, failed = int(rollout.get("unscored", 0)), int(rollout["failed"])
        scored = int(rollout["episodes"]) - unscored - failed
        entropy = _numbers(raw.get("metrics")).get("entropy")
        return TrainStep(
            number=int(raw["step"]),
            reward=float(rollout["reward"]) if scored else None,
            success=float(rollout["success"]) if scored else None,
            loss=float(raw["loss"]),
            episodes=int(rollout["episodes"]),
            scored=scored,
            unscored=unscored,
            failed=failed,
            truncated=int(rollout["truncated"]),
            dropped=_counts(raw.get("dropped")),
            trained_tokens=int(raw["trained_tokens"]),
            grad_norm=float(raw["grad_norm"]),
            learning_rate=float(raw["learning_rate"]),
            entropy=entropy,
            metrics=_numbers(rollout.get("metrics")),
            rollout_s=float(raw["rollout_s"]),
            train_s=float(raw["train_s"]),
            wall_s=float(raw["wall_s"]),
            raw=raw,
        )


@dataclass(frozen=True)
class Measures:
    """Averages over held-out episodes."""

    #: Share of the episodes, 0 to 1.
    success: float
    reward: float
    #: Sampled turns of an episode.
    turns: float
    #: Sampled tokens of an episode.
    sampled_tokens: float
    #: Success at temperature 0, where it was measured as well.
    greedy_success: float | None
    #: Means of what the environment and the rewards measured.
    metrics: dict[str, float]
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def of(raw: dict[str, Any] | None) -> Measures:
        """From `eval.before`, `eval.after` or `eval` of a command's last line. Where there are no
        held-out tasks (`None`), nothing is known: the numbers are NaN."""
        numbers = _numbers(raw)
        known = {name: math.nan for name in _MEASURED[:4]} | numbers
        return Measures(
            success=known["success"],
            reward=known["reward"],
            turns=known["turns"],
            sampled_tokens=known["sampled_tokens"],
            greedy_success=numbers.get("greedy_success"),
            metrics={k: v for k, v in numbers.items() if k not in _MEASURED},
            raw=raw or {},
        )


@dataclass(frozen=True)
class Measurement:
    """Held-out episodes at one point of a run."""

    #: `before`, `during` or `after`.
    when: str
    #: Training steps that were done.
    step: int
    success: float
    reward: float
    #: Seconds since the run began.
    wall_s: float
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def of(raw: dict[str, Any]) -> Measurement:
        """From a `measured` line or a line of a run's `evals.jsonl`."""
        stats: dict[str, Any] = raw["stats"]
        return Measurement(
            when=str(raw["when"]),
            step=int(raw["step"]),
            success=float(stats["success"]),
            reward=float(stats["reward"]),
            wall_s=float(raw["wall_s"]),
            raw=raw,
        )


@dataclass(frozen=True)
class Check:
    """One row of `sinew check`."""

    #: What was checked, such as `recipe`, `model` or `tasks`.
    name: str
    ok: bool
    #: What was found, or what is wrong.
    detail: str


@dataclass(frozen=True)
class Result:
    """A run that came to its end."""

    #: Folder of the run: recipe, records, report, episodes, checkpoints.
    folder: Path
    #: Held-out tasks with the model as it was at first, and as it is now.
    before: Measures
    after: Measures
    #: Steps of this session, in order.
    steps: list[TrainStep] = field(repr=False)
    #: Seconds over all sessions of the run.
    wall_s: float
    #: Episodes by what became of them: `trained`, `dropped`, `trained_twice`, `lost`.
    samples: dict[str, int]
    #: Sampled tokens by what became of them.
    tokens: dict[str, int]
    #: Reasons for a bad end; empty if there are none.
    trouble: list[str]
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def of(raw: dict[str, Any], folder: Path, steps: list[TrainStep]) -> Result:
        """From the last line of `sinew train --json`."""
        return Result(
            folder=folder,
            before=Measures.of(raw["eval"]["before"]),
            after=Measures.of(raw["eval"]["after"]),
            steps=steps,
            wall_s=float(raw["wall_s"]),
            samples=_counts(raw.get("samples")),
            tokens=_counts(raw.get("tokens")),
            trouble=[str(reason) for reason in raw.get("trouble", [])],
            raw=raw,
        )

    @property
    def gain(self) -> float:
        """Held-out success after the run minus before it, -1 to 1."""
        return self.after.success - self.before.success

    @property
    def report(self) -> Path:
        """The report, an HTML page."""
        return self.folder / "report.html"

    @property
    def model(self) -> Path:
        """Folder of the trained model, in the form of Hugging Face: transformers, vLLM and a recipe load it.

        The first call writes it into the run's folder; adapters are merged.
        """
        # Another checkpoint has another folder: a run that goes on does not change a model that is in use.
        latest = self.folder / "checkpoints" / "LATEST"
        name = latest.read_text().strip() if latest.is_file() else "none"
        chain = self.folder / "chain.json"
        if chain.is_file():
            end = json.loads(chain.read_text())["ended"][-1]
            name = f"{end['name']}-{end['checkpoint']}"
        folder = self.folder / "model" / name
        if not (folder / "config.json").is_file():
            command("export", self.folder, folder)
        return folder

    def _repr_html_(self) -> str:
        from ._view import result_html

        return result_html(self)
