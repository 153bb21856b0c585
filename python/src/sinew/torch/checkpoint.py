"""Saving, loading and publishing. Each rank writes separate files; whole tensors are gathered one group
at a time.

All ranks walk through the groups in the same order, whoever writes: gathering is a collective. A failure to
write is kept until all gathering is done and then refused by all ranks together, so that the server stays
usable.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from . import models
from .errors import Refused, wrong
from .names import Group, Merge, from_file, groups, to_file, whole_tensors
from .policy import VALUE_HEAD, Policy
from .writer import TYPES, Writer, existing, write_text

ONE_FILE = 1 << 30
"""Models below this many bytes are written as one file."""


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor in host memory, f32. A collective."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", torch.float32)


class Plan:
    """Groups of the model and the rank that writes each."""

    def __init__(self, policy: Policy) -> None:
        self.causal = policy.main.causal
        self.tensors, self.merges = whole_tensors(self.causal)
        self.groups = groups(self.causal, self.tensors)
        self.rank, self.world = policy.rank, policy.world

    def writers(self, itemsize: int) -> list[int]:
        """The writing rank of each group: near-equal bytes, or rank 0 only for a small model."""
        sizes = [group.size() * itemsize for group in self.groups]
        files = self.world if sum(sizes) >= ONE_FILE else 1
        each = sum(sizes) / files
        chosen, done = [], 0
        for size in sizes:
            chosen.append(min(int((done + size / 2) / each), files - 1) if each else 0)
            done += size
        return chosen

    def values(self, group: Group, merged: bool) -> dict[str, torch.Tensor]:
        """The whole tensors of a group under the names of a file. A collective."""
        whole = {}
        for name in group.own:
            tensor = gather(self.tensors[name])
            merge: Merge | None = self.merges.get(name) if merged else None
            if merge is not None:
                tensor = tensor + (gather(merge.b) @ gather(merge.a)) * merge.scale
            whole[name] = tensor
        return to_file(self.causal, whole)

    def extra(self, untied: bool) -> list[tuple[str, list[int], Group]]:
        """The output matrix of a tied model under its own name, where asked for."""
        if not untied:
            return []
        embedding = self.causal.get_input_embeddings().weight
        if self.causal.get_output_embeddings().weight is not embedding:
            return []
        own = next(name for name, tensor in self.tensors.items() if tensor is embedding)
        group = next(group for group in self.groups if own in group.own)
        return [("lm_head.weight", list(embedding.shape), group)]


def carried(policy: Policy) -> list[tuple[str, list[int]]]:
    """Tensors of the model's folder that the causal model leaves out (a vision tower): servers that read
    the folder's configuration want them. None unless the folder has all tensors of the model under the
    names that are written."""
    if policy.rank == 0 and policy.carried is None:
        policy.carried = []
        plan, folder = Plan(policy), policy.main.loaded.folder
        own = {name for group in plan.groups for name, _ in group.files}
        try:
            reader = Reader(folder, model_files(folder))
        except Refused:  # weights in another format
            return []
        if own <= set(reader.where):
            tied = set(getattr(plan.causal, "all_tied_weights_keys", None) or {}) | {"lm_head.weight"}
            left = [name for name in sorted(set(reader.where) - own - tied) if not name.endswith("inv_freq")]
            policy.carried = [(name, reader.shape(name)) for name in left if reader.is_float(name)]
    return policy.carried or []


def add_carried(policy: Policy, writer: Writer) -> None:
    """Copies the tensors that `carried` lists."""
    folder = policy.main.loaded.folder
    reader = Reader(folder, model_files(folder))
    for name, _ in policy.carried or []:
        writer.add(name, reader.whole(name))


class Keeper:
    """Keeps the first failure of this rank while collectives go on."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def do(self, call: Callable[[], Any]) -> Any:
        """Calls unless something failed already."""
        if self.error is not None:
            return None
        try:
            return call()
        except (OSError, RuntimeError, ValueError, Refused) as error:
            self.error = error
            return None

    def check(self, policy: Policy) -> None:
        """Refuses on all ranks if any failed."""

        def raise_() -> None:
            if self.error is not None:
                raise Refused(f"files cannot be written: {self.error}", kind="rank")

        policy.agree(raise_)


def write_model(
    policy: Policy, folder: str, dtype: str, export: bool, untied: bool
) -> tuple[list[Any], list[Any]]:
    """Writes this rank's share of the model; entries of its files and tensors. An export has merged
    adapters, and all tensors of the model's folder."""
    plan, type_ = Plan(policy), TYPES[dtype]
    writers = plan.writers(type_.itemsize)
    count = max(writers) + 1
    names = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count > 1
        else ["model.safetensors"]
    )
    extra = plan.extra(untied)
    entries: list[list[tuple[str, list[int]]]] = [[] for _ in names]
    for group, owner in zip(plan.groups, writers, strict=True):
        entries[owner] += group.files
    entries[0] += [(name, shape) for name, shape, _ in extra]
    rest = carried(policy) if export else []
    entries[0] += rest
    keeper = Keeper()
    mine = plan.rank < count
    writer: Any = (
        keeper.do(lambda: Writer(folder, names[plan.rank], entries[plan.rank], type_)) if mine else None
    )
    for group, owner in zip(plan.groups, writers, strict=True):
        values = plan.values(group, export)
        if owner == plan.rank:
            for name, _ in group.files:
                keeper.do(lambda name=name, values=values: writer.add(name, values[name]))
    for name, _, group in extra:
        values = plan.values(group, export)
        if plan.rank == 0:
            keeper.do(lambda name=name, values=values: writer.add(name, next(iter(values.values()))))
    if rest:
        keeper.do(lambda: add_carried(policy, writer))
    files = [keeper.do(writer.close)] if writer is not None else []
    if plan.rank == 0 and count > 1:
        index = {name: names[i] for i, own in enumerate(entries) for name, _ in own}
        total = sum(group.size() for group in plan.groups) * type_.itemsize
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        files.append(keeper.do(lambda: write_text(folder, "model.safetensors.index.json", text)))
    keeper.check(policy)
    return files, writer.tensors if writer is not None else []


def adapter_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    """The adapters under the names of `peft`, whole, in host memory. A collective."""
    from peft import get_peft_model_state_dict

    whole = {n: gather(t) for n, t in policy.main.loaded.tensors.items() if ".lora_" in n}
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in whole.items()}
    return get_peft_model_state_dict(
        policy.main.loaded.adapters, prefixed, adapter_name=models.ADAPTER, save_embedding_layers=False
    )


def write_adapter(policy: Policy, folder: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """Writes the adapter and its configuration; rank 0 writes."""
    tensors = adapter_tensors(policy)
    keeper = Keeper()
    files: list[Any] = []
    made: list[Any] = []

    def write() -> None:
        entries = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
        writer = Writer(folder, "adapter_model.safetensors", entries, TYPES[dtype])
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        files.append(writer.close())
        made.extend(writer.tensors)
        config = policy.main.loaded.adapters.peft_config[models.ADAPTER].to_dict()
        config["inference_mode"] = True
        config["target_modules"] = sorted(config["target_modules"])
        text = json.dumps(config, indent=2, sort_keys=True, default=list_of)
        files.append(write_text(folder, "adapter_config.json", text))

    if policy.rank == 0:
        keeper.do(write)
    keeper.check(policy)
    return files, made


def list_of(value: Any) -> Any:
    """Sets and enumerations as JSON."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))


def write_configs(policy: Policy, folder: str) -> list[Any]:
    """Copies config.json (with the type of the written weights) and generation_config.json."""
    source = policy.main.loaded.folder
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    files = [write_text(folder, "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")]
    path = os.path.join(source, "generation_config.json")
    if os.path.exists(path):
        shutil.copyfile(path, os.path.join(folder, "generation_config.json"))
        files.append(existing(folder, "generation_config.json"))
    return files


def moments(policy: Policy) -> dict[str, torch.Tensor]:
    """Moments by the names of a checkpoint."""
    pairs = policy.optimizer.moments.items()
    return {f"{kind}.{name}": pair[i] for name, pair in pairs for i, kind in enumerate("mv")}


def save_moments(policy: Policy, folder: str, group: Any) -> list[Any]:
    """Writes the moments by torch.distributed.checkpoint; entries of this rank's files."""
    inner = os.path.join(folder, "optimizer")
    keeper = Keeper()
    if policy.rank == 0:
        keeper.do(lambda: os.makedirs(inner, exist_ok=True))
    keeper.check(policy)
    try:
        dcp.save(moments(policy), storage_writer=dcp.FileSystemWriter(inner), process_group=group)
    except dcp.api.CheckpointException as error:
        raise Refused(f"optimizer cannot be written: {first_failure(error)}", kind="rank") from error
    paths = glob.glob(os.path.join(glob.escape(inner), f"__{policy.rank}_*"))
    if policy.rank == 0:
        paths.append(os.path.join(inner, ".metadata"))
    return [existing(folder, os.path.relpath(path, folder)) for path in sorted(paths)]


def first_failure(error: Any) -> str:
    """The text of the first failure of any rank."""
    failures = getattr(error, "failures", None) or {}
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(failures.items())) or str(
        error
    )


def save(policy: Policy, folder: str, group: Any) -> list[Any]:
    """The verb `save`."""
    policy.drop()
    if policy.main.loaded.adapters is not None:
        files, _ = write_adapter(policy, folder, "f32")
    else:
        files, _ = write_model(policy, folder, "f32", False, False)
        keeper = Keeper()
        if policy.rank == 0:
            files += keeper.do(lambda: write_configs(policy, folder)) or []
        keeper.check(policy)
    if policy.critic is not None and policy.rank == 0:
        head = policy.critic.detach().cpu()
        writer = Writer(folder, "critic.safetensors", [(VALUE_HEAD, list(head.shape))], torch.float32)
        writer.add(VALUE_HEAD, head)
        files.append(writer.close())
    if policy.optimizer.moments:
        files += save_moments(policy, folder, group)
    return files


def publish(policy: Policy, folder: str, form: str, dtype: str, untied: bool) -> tuple[list[Any], list[Any]]:
    """The verb `publish`."""
    policy.drop()
    if form == "adapter":
        return write_adapter(policy, folder, dtype)
    return write_model(policy, folder, dtype, True, untied)


class Reader:
    """Tensors of a folder's safetensors files by name, read by slices."""

    def __init__(self, folder: str, files: list[str]) -> None:
        from safetensors import safe_open

        self.where: dict[str, Any] = {}
        for name in files:
            path = os.path.join(folder, name)
            try:
                opened = safe_open(path, framework="pt", device="cpu")
                self.where.update({key: opened for key in opened.keys()})  # noqa: SIM118
            except Exception as error:  # safetensors has its own exception for a damaged file
                raise Refused(f"folder is {folder!r}, whose {name} is missing or damaged: {error}") from error

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor; refuses a missing one."""
        if name not in self.where:
            raise Refused(f"tensor {name} is missing in the folder")
        return list(self.where[name].get_slice(name).get_shape())

    def is_float(self, name: str) -> bool:
        """Whether a tensor has a type that is written."""
        return self.where[name].get_slice(name).get_dtype() in ("F32", "BF16", "F16")

    def check(self, name: str, shape: list[int]) -> None:
        """Refuses a missing or misshapen tensor."""
        found = self.shape(name)
        if found != list(shape):
            raise Refused(f"tensor {name} has shape {found}, allowed is {list(shape)}")

    def rows(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor."""
        view = self.where[name].get_slice(name)
        if isinstance(like, DTensor):
            start, length = models.own_rows(like)
            return view[start : start + length].to(torch.float32)
        return self.whole(name)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self.where[name].get_tensor(name).to(torch.float32)


def model_files(folder: str) -> list[str]:
    """Weight files of a folder."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return ["model.safetensors"]
    with open(index, encoding="utf-8") as file:
        return sorted(set(json.load(file)["weight_map"].values()))


def read_model(policy: Policy, folder: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a tensor of the model and this rank's new part of it."""
    plan = Plan(policy)
    reader = Reader(folder, model_files(folder))
    known = {name for group in plan.groups for name, _ in group.files} | {"lm_head.weight"}
    for group in plan.groups:
        for name, shape in group.files:
            reader.check(name, shape)
    for name in reader.where:
        if name not in known:
            raise Refused(f"tensor {name} is not part of the model")
    for group in plan.groups:
        if group.plain:
            own = plan.tensors[group.own[0]]
            yield own, reader.rows(group.files[0][0], own)
            continue
        made = from_file(plan.causal, group, {name: reader.whole(name) for name, _ in group.files})
        for name in group.own:
            own = plan.tensors[name]
            if list(made[name].shape) != list(own.shape):
                raise Refused(
                    f"tensor {name} has shape {list(made[name].shape)}, allowed is {list(own.shape)}"
                )
            yield own, models.own_part(made[name], own).clone()


def read_adapter(policy: Policy, folder: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same for adapters."""
    reader = Reader(folder, ["adapter_model.safetensors"])
    own = {n: t for n, t in policy.main.loaded.tensors.items() if ".lora_" in n}
    names = {name: f"base_model.model.{name}".replace(f".{models.ADAPTER}.", ".") for name in own}
    for name, tensor in own.items():
        reader.check(names[name], list(tensor.shape))
    for name in reader.where:
        if name not in names.values():
            raise Refused(f"tensor {name} is not part of the adapter")
    for name, tensor in own.items():
        yield tensor, reader.rows(names[name], tensor)


def load(policy: Policy, folder: str, number: int, group: Any) -> None:
    """The verb `load`: everything is read and checked on every rank before anything changes."""
    policy.drop()

    def read() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Any]:
        if not os.path.isdir(folder):
            raise wrong("folder", folder, "an existing folder")
        lora = policy.main.loaded.adapters is not None
        pairs = list((read_adapter if lora else read_model)(policy, folder))
        if policy.critic is not None:
            reader = Reader(folder, ["critic.safetensors"])
            reader.check(VALUE_HEAD, list(policy.critic.shape))
            pairs.append((policy.critic, reader.whole(VALUE_HEAD)))
        if number and not os.path.exists(os.path.join(folder, "optimizer", ".metadata")):
            raise Refused(f"number is {number}, but the folder has no optimizer state; allowed is 0")
        return pairs, check_moments(policy, folder) if number else None

    pairs, fresh = policy.agree(read)
    if fresh is not None:
        load_moments(folder, fresh, group)
    with torch.no_grad():
        for tensor, part in pairs:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(part)
    names = [one.name for one in policy.optimizer.trained]
    policy.optimizer.moments = (
        {n: (fresh[f"m.{n}"], fresh[f"v.{n}"]) for n in names} if fresh is not None else {}
    )
    policy.optimizer.number, policy.optimizer.skipped = number, False
    policy.zero()


def check_moments(policy: Policy, folder: str) -> dict[str, torch.Tensor]:
    """Empty moments to load into; refuses a checkpoint with others."""
    try:
        metadata = dcp.FileSystemReader(os.path.join(folder, "optimizer")).read_metadata()
    except Exception as error:  # a damaged file may raise anything
        raise Refused(f"optimizer state is damaged: {error}") from error
    fresh = {
        f"{kind}.{n}": pair[i] for n, pair in policy.optimizer.zeros().items() for i, kind in enumerate("mv")
    }
    for name, tensor in fresh.items():
        found = metadata.state_dict_metadata.get(name)
        if found is None:
            raise Refused(f"tensor {name} is missing in the optimizer's state")
        if list(found.size) != list(tensor.shape):
            raise Refused(f"tensor {name} has shape {list(found.size)}, allowed is {list(tensor.shape)}")
    return fresh


def load_moments(folder: str, fresh: dict[str, torch.Tensor], group: Any) -> None:
    """Fills the moments; a failure of any rank is one of all."""
    reader = dcp.FileSystemReader(os.path.join(folder, "optimizer"))
    try:
        dcp.load(fresh, storage_reader=reader, process_group=group)
    except dcp.api.CheckpointException as error:
        raise Refused(f"optimizer state is damaged: {first_failure(error)}") from error
    if dist.get_world_size() > 1:
        dist.barrier(group)
