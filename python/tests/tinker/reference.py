"""Losses, log-probabilities and gradients in plain PyTorch, in float64: nothing of the server's code, and no batch.

An adapter is read from the files that the server exports. Formulas are those that Thinking Machines documents for
its losses (https://tinker-docs.thinkingmachines.ai/tinker/losses/).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from tinker import types

Inputs = dict[str, torch.Tensor]


class Adapter:
    """Adapters of an export, as tensors that take gradients."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
        self.scale = self.config["lora_alpha"] / self.config["r"]
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        self.tensors = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}

    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The two matrices of each module, by the module's name."""
        out = {}
        for name, tensor in self.tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").split(".lora_A.")[0]
                out[module] = (tensor, self.tensors[name.replace(".lora_A.", ".lora_B.")])
        return out


class Reference:
    """The base model in float64, with or without an adapter."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        self.model.requires_grad_(False)

    def logprobs(self, tokens: list[int], adapter: Adapter | None = None) -> torch.Tensor:
        """Log-probabilities of all tokens after each token, `[tokens, vocabulary]`."""
        hooks = []
        modules = dict(self.model.named_modules())
        for name, (a, b) in (adapter.pairs() if adapter else {}).items():
            scale = adapter.scale if adapter else 1.0

            def add(_: Any, given: Any, output: torch.Tensor, a=a, b=b, scale=scale) -> torch.Tensor:
                return output + scale * (given[0] @ a.T) @ b.T

            hooks.append(modules[name].register_forward_hook(add))
        try:
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return torch.log_softmax(logits.double(), dim=-1)

    def targets(self, datum: types.Datum, adapter: Adapter | None) -> torch.Tensor:
        """Log-probabilities of a datum's targets, in their shape."""
        targets = inputs(datum)["target_tokens"].long()
        all_of_them = self.logprobs(datum.model_input.to_ints(), adapter)
        flat = targets.reshape(targets.shape[0], -1)
        return all_of_them.gather(1, flat).reshape(targets.shape)

    def loss(
        self, data: list[types.Datum], name: str, config: dict[str, float], adapter: Adapter | None
    ) -> torch.Tensor:
        """The sum of a loss over all datums."""
        formula = LOSSES[name]
        terms = [formula(self.targets(datum, adapter), inputs(datum), config) for datum in data]
        return torch.stack(terms).sum()

    def gradient(
        self, data: list[types.Datum], name: str, config: dict[str, float], adapter: Adapter
    ) -> dict[str, np.ndarray]:
        """Derivatives of a loss by the adapter's tensors."""
        for tensor in adapter.tensors.values():
            tensor.grad = None
        self.loss(data, name, config, adapter).backward()
        return {
            name: (torch.zeros_like(t) if t.grad is None else t.grad).numpy().copy()
            for name, t in adapter.tensors.items()
        }


def inputs(datum: types.Datum) -> Inputs:
    """The dense inputs of a datum's loss."""
    return {
        name: torch.from_numpy(np.array(tensor.to_numpy())).to(
            torch.float64 if tensor.dtype == "float32" else torch.int64
        )
        for name, tensor in datum.loss_fn_inputs.items()
    }


def cross_entropy(lp: torch.Tensor, given: Inputs, _: dict[str, float]) -> torch.Tensor:
    """Weighted log-likelihood."""
    return -(given.get("weights", torch.ones_like(lp)) * lp).sum()


def ratio(lp: torch.Tensor, given: Inputs) -> torch.Tensor:
    """Probability of each target over that of the sampler."""
    return torch.exp(lp - given["logprobs"])


def importance_sampling(lp: torch.Tensor, given: Inputs, _: dict[str, float]) -> torch.Tensor:
    """The policy gradient with a correction for the sampler."""
    return -(ratio(lp, given) * given["advantages"]).sum()


def ppo(lp: torch.Tensor, given: Inputs, config: dict[str, float]) -> torch.Tensor:
    """PPO's clipped surrogate."""
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    r, advantages = ratio(lp, given), given["advantages"]
    return -torch.minimum(r * advantages, r.clamp(low, high) * advantages).sum()


def cispo(lp: torch.Tensor, given: Inputs, config: dict[str, float]) -> torch.Tensor:
    """Clipped ratios as constant weights of the log-likelihood."""
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
    weights = ratio(lp, given).clamp(low, high).detach()
    return -(weights * lp * given["advantages"]).sum()


def dro(lp: torch.Tensor, given: Inputs, config: dict[str, float]) -> torch.Tensor:
    """The likelihood with a quadratic penalty of the distance from the sampler."""
    distance = lp - given["logprobs"]
    return -(lp * given["advantages"] - 0.5 * config["beta"] * distance**2).sum()


def gspo(lp: torch.Tensor, given: Inputs, config: dict[str, float]) -> torch.Tensor:
    """PPO's surrogate with the ratio of the whole sequence, whose gradient goes to each token."""
    mask = given.get("sequence_ratio_mask", torch.ones_like(lp))
    mean = ((lp - given["logprobs"]) * mask).sum() / mask.sum()
    s = torch.exp(mean).detach() * torch.exp(lp - lp.detach())
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    advantages = given["advantages"]
    return -torch.minimum(s * advantages, s.clamp(low, high) * advantages).sum()


LOSSES: dict[str, Callable[[torch.Tensor, Inputs, dict[str, float]], torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
