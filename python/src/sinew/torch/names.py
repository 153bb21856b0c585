"""Maps tensors of a file to tensors of a model and back: `transformers` renames and fuses weights on loading.

A group is the smallest set of the model's tensors that converts together. Saving gathers one group at a time.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .models import ADAPTER


@dataclass
class Merge:
    """Adapters of a linear layer: the weight gets `scale * B @ A` added."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass
class Group:
    """Names in the model and names with shapes in the file. `plain`: one tensor, renamed at most."""

    own: list[str]
    files: list[tuple[str, list[int]]]
    plain: bool

    def size(self) -> int:
        """Number of values."""
        return sum(torch.Size(shape).numel() for _, shape in self.files)


def whole_tensors(causal: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Merge]]:
    """Tensors of the model as it is without adapters, tied ones once, and the adapters by weight."""
    tensors: dict[str, torch.Tensor] = {}
    merges: dict[str, Merge] = {}
    parameters = dict(causal.named_parameters())
    kept = set(causal.state_dict().keys())
    buffers = {name: b for name, b in causal.named_buffers() if name in kept}
    for name, tensor in {**parameters, **buffers}.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        tensors[plain] = tensor
        if plain != name:
            layer = causal.get_submodule(name.rsplit(".base_layer.", 1)[0])
            if plain.endswith(".weight") and ADAPTER in layer.lora_A:
                a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
                merges[plain] = Merge(a, b, float(layer.scaling[ADAPTER]))
    tied = dict(getattr(causal, "all_tied_weights_keys", None) or {})
    for target, source in tied.items():
        # `named_parameters` keeps the first name of a tied tensor, files keep the source's.
        if target in tensors and source not in tensors:
            tensors[source] = tensors.pop(target)
    return tensors, merges


def _transforms(causal: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    forward = list(getattr(causal, "_weight_conversions", None) or [])
    back = [one.reverse_transform() for one in forward[::-1]]

    def split(all_: list[Any]) -> tuple[list[Any], list[Any]]:
        converters = [one for one in all_ if isinstance(one, WeightConverter)]
        return [one for one in all_ if isinstance(one, WeightRenaming)], converters

    return (*split(forward), *split(back))


def groups(causal: Any, tensors: dict[str, torch.Tensor]) -> list[Group]:
    """The groups of the model, in a stable order."""
    from transformers.core_model_loading import apply_converters

    _, _, _, converters = _transforms(causal)
    members: dict[str, list[str]] = {}
    converted: set[str] = set()
    for name in tensors:
        key, pattern = apply_converters(name, converters)
        if pattern is None:
            key = "=" + name
        else:
            converted.add(key)
        members.setdefault(key, []).append(name)
    made = []
    for key, own in members.items():
        blank = {name: torch.empty(tensors[name].shape, device="meta") for name in own}
        files = [(name, list(tensor.shape)) for name, tensor in to_file(causal, blank).items()]
        made.append(Group(own, files, key not in converted))
    return made


def to_file(causal: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A group's tensors under the names and in the shapes of a file."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(causal, tensors)


def from_file(causal: Any, group: Group, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A group's tensors as the model holds them: the inverse of `to_file`."""
    from transformers.core_model_loading import rename_source_key

    if group.plain:
        return {group.own[0]: next(iter(tensors.values()))}
    renamings, converters, _, _ = _transforms(causal)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    pending: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key, pattern = rename_source_key(name, renamings, converters)
        assert pattern is not None
        pending.setdefault(key, deepcopy(by_pattern[pattern])).add_tensor(key, name, pattern, tensor)
    made: dict[str, torch.Tensor] = {}
    for key, converter in pending.items():
        for name, value in converter.convert(key, model=causal, config=causal.config).items():
            made[name] = value[0] if isinstance(value, list) else value
    return made
