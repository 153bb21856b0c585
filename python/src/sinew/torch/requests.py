"""Validation of requests on rank 0, before any rank begins: each error names field, value and what is
allowed."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from .errors import Refused, wrong
from .lanes import Lane, column, parse
from .models import Settings, check_folder
from .optimizer import Update
from .policy import Opening, Policy


def choice(body: dict[str, Any], name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    """A field that is one of some words."""
    value = body.get(name, default)
    if value not in allowed:
        raise wrong(name, value, " or ".join(repr(one) for one in allowed))
    return str(value)


def whole(body: dict[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    """A field that is a whole number."""
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, value, f"a whole number from {low} to {high}")
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    """A field that is true or false; absent is false."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def real(body: dict[str, Any], name: str, low: float, high: float, default: float | None = None) -> float:
    """A finite number within limits."""
    value = body.get(name, default)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high:  # type: ignore[operator]
        raise wrong(name, value, f"a number from {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def text(body: dict[str, Any], name: str) -> str:
    """A field that is text, not empty."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(name, value, "text")
    return value


def opening(body: dict[str, Any], cuda: bool) -> Opening:
    """The request `open`."""
    attention = choice(body, "attention", ("auto", "flex", "sdpa", "eager"), "auto")
    if attention == "flex" and not cuda:
        raise wrong(
            "attention", "flex", "auto, sdpa or eager on a CPU: FlexAttention has no backward pass there"
        )
    settings = Settings(
        choice(body, "dtype", ("f32", "bf16"), "f32"),
        attention,
        choice(body, "checkpointing", ("none", "full", "offload"), "none"),
        lora(body.get("lora"), body.get("base_name")),
    )
    chunk = whole(body, "head_chunk", 1, 1 << 24) if body.get("head_chunk") is not None else None
    frozen = body.get("frozen") or {}
    if not isinstance(frozen, dict) or not all(
        isinstance(part, str) for pair in frozen.items() for part in pair
    ):
        raise wrong("frozen", frozen, "a map of names to folders")
    for name, folder in {
        "model": text(body, "model"),
        **{f"frozen.{n}": f for n, f in frozen.items()},
    }.items():
        if name in ("frozen.policy", "frozen.base"):
            raise wrong("frozen", name[7:], "another name than policy and base")
        check_folder(folder, name)
    made = Opening(
        body["model"],
        settings,
        choice(body, "sharing", ("auto", "flat"), "auto"),
        whole(body, "max_tokens", 1, 1 << 30),
        chunk,
        flag(body, "deterministic"),
        whole(body, "seed", 0, (1 << 64) - 1, 0),
        frozen=frozen,
        router_loss=flag(body, "router_loss"),
    )
    critic = body.get("critic")
    if critic is not None:
        if not isinstance(critic, dict):
            raise wrong("critic", critic, "a map with head and lr_scale")
        made.critic = finite(column(critic, "head", "f4", "critic"), "critic.head")
        made.critic_scale = real(critic, "lr_scale", 0.0, 1e9, 1.0)
    return made


def lora(given: Any, base: Any) -> dict[str, Any] | None:
    """The adapters of `open`."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise wrong("lora", given, "a map with rank, alpha, targets and seed")
    targets = given.get("targets") or []
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise wrong("lora.targets", targets, "a list of names of linear layers")
    if base is not None and not isinstance(base, str):
        raise wrong("base_name", base, "text")
    return {
        "rank": whole(given, "rank", 1, 1 << 16),
        "alpha": real(given, "alpha", 1e-9, 1e9),
        "targets": targets,
        "seed": whole(given, "seed", 0, (1 << 64) - 1, 0),
        "base_name": base,
    }


def finite(values: np.ndarray, field: str) -> np.ndarray:
    """Values that must be finite."""
    if not np.isfinite(values).all():
        at = int(np.argmin(np.isfinite(values)))
        raise wrong(f"{field}[{at}]", float(values[at]), "a finite number")
    return values.astype(np.float32)


def computing(policy: Policy) -> None:
    """Refuses to compute while the tensors are in host memory."""
    if policy.on_host:
        raise wrong("reside", "host", "device: weights are in host memory, send reside {where: device} first")


def scorer(policy: Policy, body: dict[str, Any]) -> str:
    """The model that computes."""
    allowed = (
        ["policy"]
        + (["base"] if policy.main.loaded.adapters is not None else [])
        + list(policy.opening.frozen)
    )
    return choice(body, "of", tuple(allowed), "policy")


def wave(policy: Policy, body: dict[str, Any], of: str) -> list[Lane]:
    """The lanes of a request."""
    lanes = body.get("wave")
    if not isinstance(lanes, list) or not 1 <= len(lanes) <= policy.world:
        shown = f"{len(lanes)} lanes" if isinstance(lanes, list) else lanes
        raise wrong("wave", shown, f"1 to {policy.world} lanes")
    size, limit = policy.member(of).vocabulary, policy.opening.max_tokens
    # A reference and a teacher choose their own experts.
    routers = policy.main.routers if of == "policy" else None
    return [parse(lane, f"wave[{i}]", size, limit, routers) for i, lane in enumerate(lanes)]


def slopes(body: dict[str, Any], kept: list[int], wanted: dict[str, bool]) -> list[dict[str, np.ndarray]]:
    """The derivatives of `backward`, one map a lane; `kept` has the number of items of each."""
    grads = body.get("grads")
    if not isinstance(grads, list) or len(grads) != len(kept):
        shown = f"{len(grads)} lanes" if isinstance(grads, list) else grads
        raise wrong("grads", shown, f"{len(kept)} lanes, as many as the last forward had")
    made = []
    for index, (given, items) in enumerate(zip(grads, kept, strict=True)):
        if not isinstance(given, dict):
            raise wrong(f"grads[{index}]", given, "a map of columns")
        columns = {}
        for name, asked in wanted.items():
            values = column(given, name, "f4", f"grads[{index}]")
            if len(values) and not asked:
                raise wrong(
                    f"grads[{index}].{name}",
                    f"{len(values)} values",
                    "none: the forward did not ask for them",
                )
            if len(values) not in (0, items):
                raise wrong(
                    f"grads[{index}].{name}", f"{len(values)} values", f"none, or {items}, one for each item"
                )
            columns[name] = values.astype(np.float32)
        columns["router"] = np.array([real(given, "router", -1e30, 1e30, 0.0)], np.float32)
        made.append(columns)
    return made


def update(body: dict[str, Any], last: int, skipped: bool) -> Update:
    """The request `apply`."""
    number = whole(body, "number", 0, (1 << 64) - 1)
    if number != last + 1 and not (skipped and number == last and number > 0):
        allowed = f"{last} (skipped) or {last + 1}" if skipped else f"{last + 1}"
        raise wrong("number", number, allowed)
    limit = body.get("max_grad_norm")
    return Update(
        number,
        real(body, "lr", 0.0, 1e6),
        real(body, "beta1", 0.0, 1 - 1e-9),
        real(body, "beta2", 0.0, 1 - 1e-9),
        real(body, "eps", 0.0, 1e6),
        real(body, "decay", 0.0, 1e6),
        None if limit is None else real(body, "max_grad_norm", 0.0, 1e30),
    )


def folder(body: dict[str, Any], empty: bool = False) -> str:
    """A folder that exists."""
    path = text(body, "folder")
    if not os.path.isdir(path):
        raise wrong("folder", path, "an existing folder")
    if empty and os.listdir(path):
        raise wrong("folder", path, "an empty folder")
    return path


def publishing(policy: Policy, body: dict[str, Any]) -> tuple[str, str, str, bool]:
    """The request `publish`."""
    form = choice(body, "form", ("full", "adapter"))
    if form == "adapter" and policy.main.loaded.adapters is None:
        raise Refused("form is 'adapter', allowed is 'full': the model has no adapters")
    return folder(body, True), form, choice(body, "dtype", ("f32", "bf16")), flag(body, "untied")
