"""Routers of mixture-of-experts models: replay of recorded experts, and the load-balancing loss.

`transformers` names the routers of a model. Each chooses by one `torch.topk` over all experts and weighs the
chosen ones by its own scores, so that recorded experts replace the indices only: weights and gradients are the
router's. A start-up test finds out whether this holds for the loaded model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .errors import Refused

FREE = 0xFFFF
"""Entry of a lane's experts where the router chooses."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in modules and configurations."""
CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
"""Names of the number of experts of a token."""


@dataclass
class Current:
    """The pass that is computed. There is one for the process: a backward pass runs on threads of its own."""

    experts: torch.Tensor | None = None
    """Experts to use, `[places, layers, top_k]`, -1 where the router chooses; nothing: all choose."""
    logits: dict[int, list[torch.Tensor]] | None = None
    """Receives the logits of each layer's router, if they are wanted."""


current = Current()


@contextlib.contextmanager
def during(experts: torch.Tensor | None, logits: dict[int, list[torch.Tensor]] | None) -> Iterator[None]:
    """Computes a pass by these experts."""
    before = current.experts, current.logits
    current.experts, current.logits = experts, logits
    try:
        yield
    finally:
        current.experts, current.logits = before


def contexts() -> tuple[Any, Any]:
    """Contexts of a checkpointed layer, and of its repetition in the backward pass: by the same experts."""
    return contextlib.nullcontext(), during(current.experts, None)


class Replaced(TorchFunctionMode):
    """Replaces a router's choice among `count` experts where `experts` `[rows, top_k]` are not negative."""

    def __init__(self, experts: torch.Tensor, count: int) -> None:
        super().__init__()
        self.experts, self.count, self.times = experts, count, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or not self._is_choice(args[0], found):
            return found
        self.times += 1
        known = (self.experts >= 0).all(dim=1, keepdim=True)
        chosen = torch.where(known, self.experts, found.indices)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))

    def _is_choice(self, scores: torch.Tensor, found: Any) -> bool:
        """Whether a `topk` is over all experts; some routers choose groups of experts first."""
        rows, chosen = self.experts.shape
        return scores.shape == (rows, self.count) and found.indices.shape == (rows, chosen)


@dataclass
class Routers:
    """The routers of a model, by decoder layer."""

    layers: int
    count: int
    """Number of experts of a layer."""
    top_k: int
    modules: dict[int, nn.Module] = field(default_factory=dict)
    replays: bool = False
    """Whether recorded experts replace the choice."""
    why_not: str | None = None

    def install(self, output: int) -> None:
        """Lets the routers use recorded experts; `output` is the place of the logits in what they return."""
        for layer, module in self.modules.items():
            module.forward = self._wrapped(layer, module.forward, output)

    def _wrapped(self, layer: int, inner: Any, output: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if current.experts is None:
                found = inner(*args, **kwargs)
            else:
                with Replaced(current.experts[:, layer], self.count) as mode:
                    found = inner(*args, **kwargs)
                if mode.times != 1:
                    raise Refused(f"the router of layer {layer} does not choose by one topk of its experts")
            if current.logits is not None:
                logits = found[output] if isinstance(found, (tuple, list)) else found
                current.logits.setdefault(layer, []).append(logits)
            return found

        return forward

    def on_device(self, experts: np.ndarray, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        """The experts of a pass whose places hold these rows of a lane, -1 for padding."""
        padded = np.concatenate([experts, np.full_like(experts[:1], -1)])
        return torch.from_numpy(padded[rows].astype(np.int64)).to(device)

    def loss(self, causal: Any, logits: dict[int, list[torch.Tensor]], places: torch.Tensor) -> torch.Tensor:
        """The load-balancing loss of `transformers` over these places of the passes."""
        gates = tuple(torch.cat(logits[layer])[places] for layer in sorted(logits))
        return balance_of(causal)(gates, self.count, self.top_k).float().reshape(1)


def balance_of(causal: Any) -> Any:
    """The function of the model's load-balancing loss; nothing if it has none."""
    return getattr(sys.modules.get(type(causal).__module__), "load_balancing_loss_func", None)


def number(names: tuple[str, ...], *sources: Any) -> int:
    """The first whole number that a source has under one of these names."""
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def find(causal: Any, base: nn.Module, layers: nn.ModuleList) -> Routers | None:
    """The routers that `transformers` names in the decoder `base`, installed; nothing for a dense model."""
    named = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    recorder = named[0] if isinstance(named, (list, tuple)) else named
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type):
        return None
    modules: dict[int, nn.Module] = {}
    for index, layer in enumerate(layers):
        own = [module for module in layer.modules() if isinstance(module, kind)]
        if len(own) == 1:
            modules[index] = own[0]
    if not modules:
        return None
    config, first = causal.config.get_text_config(), next(iter(modules.values()))
    found = Routers(len(layers), number(COUNTS, first, config), number(CHOSEN, first, config), modules)
    if not 0 < found.top_k <= found.count < FREE:
        return None
    found.install(getattr(recorder, "index", 0))
    return found
