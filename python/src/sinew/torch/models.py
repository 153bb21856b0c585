"""Models of `transformers`: reading a folder, building without weights, LoRA, sharding.

Rank 0 reads the folder into host memory; every rank builds the model without weights, shards it and
receives its part of each tensor, so that no other rank ever holds a whole copy.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .errors import Refused, wrong
from .routing import contexts

ADAPTER = "default"


@dataclass
class Settings:
    """The part of `open` that decides how models are built."""

    dtype: str
    attention: str
    checkpointing: str
    lora: dict[str, Any] | None = None


@dataclass
class Loaded:
    """A model and what saving it needs."""

    causal: Any
    adapters: Any
    """The `peft` model around `causal`, or nothing."""
    folder: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters by name; sharded ones are `DTensor`."""


def implementations(wanted: str, device: torch.device) -> list[str]:
    """Attention implementations to try, best first."""
    if wanted != "auto":
        return ["flex_attention" if wanted == "flex" else wanted]
    return (["flex_attention"] if device.type == "cuda" else []) + ["sdpa", "eager"]


def check_folder(folder: str, name: str) -> dict[str, Any]:
    """The configuration of a model folder."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise wrong(name, folder, f"a folder with a readable config.json ({error})") from error
    if config.get("quantization_config"):
        raise wrong(
            name, folder, "a folder with weights in f32, bf16 or f16: write a dequantized copy of it first"
        )
    return config


def read(folder: str, settings: Settings, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a folder, in host memory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tried = []
    for attention in implementations(settings.attention, device):
        try:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
        except (ValueError, ImportError) as error:
            tried.append(f"{attention}: {error}")
        except Exception as error:  # a damaged folder may raise anything
            if is_fatal(error):
                raise
            raise Refused(f"model is {folder!r}, which transformers does not load: {error}") from error
    raise Refused(f"model is {folder!r}, which transformers does not load: " + "; ".join(tried))


def build(kind: type, config: Any, conversions: Any) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        causal = kind._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
    causal._weight_conversions = conversions
    return causal


def conversions_of(causal: Any) -> Any:
    """The renamings and fusions between file and model, as `save_pretrained` would revert them."""
    return getattr(causal, "_weight_conversions", None) or []


def prepare(causal: Any, lora: dict[str, Any] | None) -> Any:
    """Turns dropout off and adds adapters; returns the `peft` model."""
    causal.eval()
    causal.config.use_cache = False
    if lora is None:
        return None
    causal.requires_grad_(False)
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    targets = lora["targets"] or linear_names(causal)
    torch.manual_seed(lora["seed"])
    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=lora.get("base_name"),
    )
    try:
        adapters = get_peft_model(causal, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
    except (ValueError, NotImplementedError, TypeError) as error:
        raise wrong("lora.targets", targets, f"names of linear layers of the model ({error})") from error
    wrapped = [(name, module) for name, module in causal.named_modules() if isinstance(module, LoraLayer)]
    for name, module in wrapped:
        if not isinstance(module.get_base_layer(), nn.Linear):
            raise wrong(
                "lora.targets",
                lora["targets"],
                f"linear layers; {name} is not one: experts that are fused "
                "into one tensor take no adapter; name the attention's layers (q_proj, k_proj, ...)",
            )
        if name.endswith("lm_head"):
            raise wrong("lora.targets", lora["targets"], "linear layers without lm_head")
    for target in lora["targets"]:
        if not any(name == target or name.endswith("." + target) for name, _ in wrapped):
            linear = {
                name.rsplit(".", 1)[-1]
                for name, part in causal.named_modules()
                if isinstance(part, LoraLayer)
            }
            raise wrong(
                "lora.targets",
                target,
                f"the name of a linear layer that is not fused experts (found: "
                f"{', '.join(sorted(linear)) or 'none'})",
            )
    adapters.eval()
    return adapters


def linear_names(causal: Any) -> list[str]:
    """Names of all linear layers but the head.

    In a model with fused experts, names that `peft` would take for theirs are left out.
    """
    output = causal.get_output_embeddings()
    linear = [
        name for name, part in causal.named_modules() if isinstance(part, nn.Linear) and part is not output
    ]
    found = {name.rsplit(".", 1)[-1] for name in linear}
    if any(parameter.dim() == 3 and "expert" in name for name, parameter in causal.named_parameters()):
        found -= {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}
    if not found:
        raise wrong("lora.targets", [], "a model with linear layers")
    return sorted(found)


def decoder_layers(causal: nn.Module) -> nn.ModuleList:
    """The longest list of modules that lies in no other list."""
    best: nn.ModuleList | None = None
    stack: list[nn.Module] = [causal]
    while stack:
        for child in stack.pop().children():
            if not isinstance(child, nn.ModuleList):
                stack.append(child)
            elif best is None or len(child) > len(best):
                best = child
    if best is None:
        raise Refused(f"model is a {type(causal).__name__}, which has no list of decoder layers")
    return best


def freeze_unused(causal: Any) -> None:
    """Leaves parameters outside the text decoder and its head untrained (vision towers): they get no
    gradient."""
    used = {id(p) for p in base_of(causal).parameters()}
    output = causal.get_output_embeddings()
    used |= {id(p) for p in output.parameters()} if output is not None else set()
    for parameter in causal.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def base_of(causal: Any) -> Any:
    """The text decoder below the head."""
    for base in (causal.get_decoder(), causal.base_model, getattr(causal, "model", causal)):
        if base is not causal:
            return base
    raise Refused(f"model is a {type(causal).__name__}, which has no model below its head")


def checkpoint_layers(layers: nn.ModuleList, how: str) -> None:
    """Keeps only the input of each layer and computes the rest again; `offload` keeps inputs in host
    memory."""
    if how == "none":
        return
    from torch.utils.checkpoint import checkpoint

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    for layer in layers:
        run = functools.partial(checkpoint, layer.forward, **options)
        layer.forward = run if how == "full" else functools.partial(offloaded, run)


def offloaded(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `run` with what autograd saves in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return run(*args, **kwargs)


def shard(module: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, dtype: str) -> None:
    """Shards each layer and the rest over all ranks. Gradients are sums over ranks."""
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    else:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # gloo has no PREMUL_SUM, which a divide factor would otherwise use.
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
            part.set_reduce_scatter_unused_params(True, recurse=False)


def unlinked(causal: nn.Module) -> None:
    """Refuses a model that keeps tensors without weights outside its parameters and buffers."""
    for name, module in causal.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise Refused(f"model has tensor {name}.{key}, which no rank but 0 can fill: use one rank")


def own_part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    if not isinstance(like, DTensor):
        return full
    start, length = own_rows(like)
    return full.narrow(0, start, length)


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """First row and number of rows of this rank's part."""
    rows, ranks = tensor.shape[0] if tensor.dim() else 1, tensor.device_mesh.size()
    each = -(-rows // ranks)
    start = min(each * tensor.device_mesh.get_local_rank(), rows)
    return start, min(each, rows - start)


@torch.no_grad()
def receive(
    target: dict[str, torch.Tensor], source: dict[str, torch.Tensor] | None, device: torch.device
) -> None:
    """Fills `target` from rank 0's `source`, one whole tensor at a time."""
    for name, tensor in target.items():
        if source is None:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        else:
            full = source[name].detach().to(device=device, dtype=tensor.dtype).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(full, 0)
        part = own_part(full, tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(part)


def is_fatal(error: BaseException) -> bool:
    """Whether an error of a trial means more than that the model does not take the input."""
    from .errors import is_memory, is_symptom

    return is_memory(error) or is_symptom(error)
