"""A policy of one rank in the process of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import serving
import torch
from sinew.torch.lanes import Lane, parse
from sinew.torch.models import Settings
from sinew.torch.policy import Opening, Policy, mesh_of


def policy(
    folder: Path,
    sharing: str = "auto",
    dtype: str = "f32",
    checkpointing: str = "none",
    chunk: int | None = 8,
    lora: dict[str, Any] | None = None,
    max_tokens: int = 256,
    attention: str = "auto",
    **more: Any,
) -> Policy:
    """Opens a model without a server."""
    settings = Settings(dtype, attention, checkpointing, lora and {"base_name": None, **lora})
    opening = Opening(str(folder), settings, sharing, max_tokens, chunk, True, 1, **more)
    device = torch.device("cpu")
    return Policy(opening, mesh_of(1, device), device, lambda step: step(), lambda value: value)


def lane(world: dict[str, Any], vocabulary: int = 97) -> Lane:
    """A lane of `worlds.tree`."""
    return parse(serving.lane(**world), "lane", vocabulary, 4096)


def forward(
    policy: Policy,
    one: Lane,
    entropies: bool = True,
    values: bool = False,
    backward: bool = True,
    of: str = "policy",
) -> dict[str, Any]:
    """Scores as arrays."""
    found = policy.forward(one, of, policy.member(of).passes(one), entropies, values, backward)
    return {name: serving.f32(data) for name, data in found.items()}
