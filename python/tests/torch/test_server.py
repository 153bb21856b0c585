"""The protocol against one server of two ranks, and faults against servers of their own.

Run: `PYTHONPATH=python/src pytest python/tests/torch`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import blake3
import inside
import msgspec
import numpy as np
import pytest
import serving
import torch
import torch.distributed.checkpoint as dcp
import worlds
from safetensors.torch import load_file
from sinew.torch.optimizer import Update

STEP = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.1, "max_grad_norm": 1.0}
LORA = {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "v_proj"], "seed": 2}


def wave(*seeds: int) -> list[dict[str, Any]]:
    """Random lanes."""
    return [serving.lane(**worlds.tree(seed)) for seed in seeds]


def forward(group: serving.Group, lanes: Any, **more: Any) -> list[dict[str, np.ndarray]]:
    """Scores as arrays."""
    base = {"wave": lanes, "of": "policy", "entropies": True, "values": False, "backward": True}
    scores = group.call("forward", **(base | more))["scores"]
    return [{name: serving.f32(data) for name, data in one.items()} for one in scores]


def slopes(seed: int, values: bool = False) -> dict[str, bytes]:
    """Random derivatives of a lane."""
    random = np.random.default_rng(seed)
    names = ("logprobs", "entropies", "values")
    drawn = {name: random.normal(size=30).astype("<f4").tobytes() for name in names}
    return drawn if values else drawn | {"values": b""}


def train(group: serving.Group, steps: int, values: bool = False, first: int = 1) -> None:
    """Some updates of two waves each, the second with one lane only."""
    for number in range(first, first + steps):
        for seeds in ((number, number + 50), (number + 100,)):
            forward(group, wave(*seeds), values=values)
            group.call("backward", grads=[slopes(seed, values) for seed in seeds])
        answer = group.call("apply", number=number, **STEP)
        assert answer["grad_norm"] > 0
        group.call("zero")


def train_inside(policy: Any, steps: int, values: bool = False) -> None:
    """The same by one rank in this process."""
    for number in range(1, steps + 1):
        for seed in (number, number + 50, number + 100):
            inside.forward(policy, inside.lane(worlds.tree(seed)), values=values)
            policy.backward({name: serving.f32(data) for name, data in slopes(seed, values).items()})
        policy.apply(Update(number, **STEP))
        policy.zero()


def folder(base: Path, name: str) -> Path:
    """A new folder."""
    path = base / name
    path.mkdir()
    return path


def saved(group: serving.Group, base: Path, name: str) -> dict[str, torch.Tensor]:
    """Tensors of a new checkpoint whose files match the answer."""
    path = folder(base, name)
    check_files(path, group.call("save", folder=str(path))["files"])
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def check_files(path: Path, files: list[dict[str, Any]]) -> None:
    """The answer names every file with its length and sum."""
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {one["path"] for one in files}
    for one in files:
        data = (path / one["path"]).read_bytes()
        assert (len(data), blake3.blake3(data).hexdigest()) == (one["bytes"], one["blake3"])


def moments(path: Path, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moments of a checkpoint as plain tensors."""
    read = {f"{kind}.{name}": torch.zeros_like(tensor) for name, tensor in names.items() for kind in "mv"}
    dcp.load(read, storage_reader=dcp.FileSystemReader(path / "optimizer"))
    return read


def test_authorization(pair: serving.Group) -> None:
    """Only the token opens anything."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
        assert pair.raw("/status", b"", headers, fresh=True) == (401, b"")
    assert pair.raw("/status", msgspec.msgpack.encode({}))[0] == 200
    huge = {"Authorization": f"Bearer {serving.TOKEN}", "Content-Length": str((1 << 30) + 1)}
    assert pair.raw("/forward", b"", huge, fresh=True)[0] == 413


def test_order(pair: serving.Group, models: Any) -> None:
    """A repeated seq gets the kept answer, another one is a gap, a lower fence is refused."""
    pair.open(models("llama"))
    first = forward(pair, wave(1, 2))
    pair.call("backward", grads=[slopes(1), slopes(2)])
    done = pair.call("apply", number=1, **STEP)
    assert pair.call("apply", number=1, seq=pair.seq, **STEP) == done
    pair.seq -= 1
    for seq in (pair.seq + 2, pair.seq - 1):
        with pytest.raises(serving.Failed) as failed:
            pair.call("zero", seq=seq)
        assert (failed.value.status, failed.value.error["kind"]) == (412, "gap")
    with pytest.raises(serving.Failed) as failed:
        pair.call("zero", fence=0)
    assert (failed.value.status, failed.value.error["kind"]) == (409, "fence")
    old, pair.fence, pair.seq = pair.fence, 7, 40
    pair.open(models("llama"))
    with pytest.raises(serving.Failed) as failed:
        pair.call("zero", fence=old)
    assert failed.value.error["kind"] == "fence"
    again = forward(pair, wave(1, 2))
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(first, again, strict=True) for n in a)


BAD = [
    ("forward", {"wave": []}, "wave"),
    ("forward", {"wave": wave(1, 2, 3)}, "wave"),
    ("forward", {"wave": wave(1), "of": "base"}, "of"),
    ("forward", {"wave": wave(1), "values": True}, "values"),
    ("forward", {"wave": [wave(1)[0] | {"rows": b"\xff" * 120}]}, "wave[0].rows[0]"),
    ("forward", {"wave": [wave(1)[0] | {"targets": b"\xff" * 120}]}, "wave[0].targets[0]"),
    ("forward", {"wave": [wave(1)[0] | {"targets": b"\0" * 4}]}, "wave[0].targets"),
    ("forward", {"wave": [wave(1)[0] | {"tokens": b"\0" * 3}]}, "wave[0].tokens"),
    ("forward", {"wave": [wave(1)[0] | {"tokens": b"\0" * 4 * 300}]}, "wave[0].tokens"),
    ("forward", {"wave": [wave(1)[0] | {"tokens": b"\xff" * 136}]}, "wave[0].tokens[0]"),
    ("forward", {"wave": [wave(1)[0] | {"temperatures": b"\0" * 120}]}, "wave[0].temperatures[0]"),
    ("forward", {"wave": [wave(1)[0] | {"masks": b"\x05\0\0\0" * 30}]}, "wave[0].masks[0]"),
    (
        "forward",
        {"wave": [wave(1)[0] | {"mask_table": b"\0" * 32, "masks": b"\0" * 120}]},
        "wave[0].targets[0]",
    ),
    (
        "forward",
        {"wave": [wave(1)[0] | {"segments": np.array([0, 34, 0, 2], "<u4").tobytes()}]},
        "segments[0].parent",
    ),
    (
        "forward",
        {"wave": [wave(1)[0] | {"segments": np.array([1, 33, 0, 0], "<u4").tobytes()}]},
        "segments[0].start",
    ),
    ("backward", {"grads": []}, "backward"),
    ("top", {"wave": wave(1), "k": 0}, "k"),
    ("apply", {"number": 3, **STEP}, "number"),
    ("apply", {"number": 1, **STEP, "lr": float("nan")}, "lr"),
    ("save", {"folder": "/nowhere/at/all"}, "folder"),
    ("load", {"folder": "/nowhere", "number": 0}, "folder"),
    ("publish", {"folder": "/tmp", "form": "full", "dtype": "f32"}, "folder"),
    ("publish", {"folder": "/tmp", "form": "adapter", "dtype": "f32"}, "form"),
    ("reside", {"where": "moon"}, "where"),
    ("open", {"model": "/nowhere"}, "model"),
    ("open", {"model": ""}, "model"),
]


def test_bad_input(pair: serving.Group, models: Any) -> None:
    """Each error names the field; nothing is changed and the server stays usable."""
    pair.open(models("llama"))
    first = forward(pair, wave(1))[0]
    forward(pair, wave(1), backward=False)
    for verb, body, field in BAD:
        with pytest.raises(serving.Failed) as failed:
            pair.call(verb, **body)
        assert (failed.value.status, failed.value.error["kind"]) == (400, "input"), failed.value
        assert field in failed.value.error["text"], failed.value
        assert "allowed is" in failed.value.error["text"] or verb == "backward"
    # Rank 0 finds these errors before any rank begins, except for the folders of `open`.
    for body in (b"", b"\x00", b"\x81\xa1a\x01"):
        assert pair.raw("/zero", body)[0] == 400
    assert pair.raw("/nothing", b"")[0] == 400
    again = forward(pair, wave(1))[0]
    assert np.array_equal(first["logprobs"], again["logprobs"])
    with pytest.raises(serving.Failed):
        pair.call("backward", grads=[slopes(1) | {"logprobs": b"\0" * 4}])
    pair.call("backward", grads=[slopes(1)])


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"critic": True}),
    ("qwen3_moe", {"checkpointing": "offload"}),
    ("gpt_oss", {"checkpointing": "full"}),
    ("qwen3_5", {"max_tokens": 40, "checkpointing": "full"}),
    ("qwen3", {"lora": LORA, "critic": True}),
    ("gemma3", {"lora": LORA, "sharing": "flat", "max_tokens": 40}),
]


@pytest.mark.parametrize("family,options", CASES)
def test_ranks_and_packing(
    family: str, options: dict[str, Any], pair: serving.Group, models: Any, tmp_path: Path
) -> None:
    """Two ranks compute the same as one, to 1e-6; a missing lane takes part; `load` continues to the bit."""
    from sinew.torch import checkpoint

    critic = options.get("critic", False)
    head = np.random.default_rng(8).normal(size=33).astype("<f4")
    more = options | {"critic": {"head": head.tobytes(), "lr_scale": 3.0} if critic else None}
    pair.open(models(family), **more)
    train(pair, 3, critic)
    own = saved(pair, tmp_path, "pair")
    alone = options | {"critic": head if critic else None, "critic_scale": 3.0, "checkpointing": "none"}
    policy = inside.policy(models(family), **alone)
    train_inside(policy, 3, critic)
    other = {}
    checkpoint.save(policy, str(folder(tmp_path, "one")), None)
    for file in (tmp_path / "one").glob("*.safetensors"):
        other |= load_file(file)
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        gap = float((tensor - other[name]).norm() / other[name].norm().clamp(min=1e-12))
        assert gap <= 1e-6, (name, gap)
    train(pair, 1, critic, first=4)
    after = saved(pair, tmp_path, "after")
    pair.open(models(family), **more)
    pair.call("load", folder=str(tmp_path / "pair"), number=3)
    train(pair, 1, critic, first=4)
    again = saved(pair, tmp_path, "again")
    assert all(torch.equal(again[name], after[name]) for name in after)
    checkpoint.load(policy, str(tmp_path / "pair"), 3, None)
    assert policy.optimizer.moments.keys() == {one.name for one in policy.optimizer.trained}
    checkpoint.save(policy, str(folder(tmp_path, "back")), None)
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if (tmp_path / "back" / name).exists():
            assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "pair" / name).read_bytes()


def test_damaged_checkpoint(pair: serving.Group, models: Any, tmp_path: Path) -> None:
    """A missing, misshapen, left over or damaged tensor is refused and nothing is changed."""
    from safetensors.torch import save_file

    pair.open(models("llama"))
    train(pair, 1)
    tensors = saved(pair, tmp_path, "good")
    before = forward(pair, wave(1))[0]["logprobs"]
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "missing": {k: v for k, v in tensors.items() if k != name},
        "misshapen": tensors | {name: tensors[name][:-1].contiguous()},
        "over": tensors | {"model.other.weight": tensors[name].clone()},
    }
    for case, changed in cases.items():
        shutil.copytree(tmp_path / "good", tmp_path / case)
        save_file(changed, tmp_path / case / "model.safetensors")
    for case, file in (
        ("cut", "model.safetensors"),
        ("moment", "optimizer/__1_0.distcp"),
        ("meta", "optimizer/.metadata"),
    ):
        shutil.copytree(tmp_path / "good", tmp_path / case)
        path = tmp_path / case / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for case in (*cases, "cut", "moment", "meta"):
        with pytest.raises(serving.Failed) as failed:
            pair.call("load", folder=str(tmp_path / case), number=1)
        assert failed.value.error["kind"] == "input", (case, failed.value)
    assert np.array_equal(before, forward(pair, wave(1))[0]["logprobs"])
    pair.call("load", folder=str(tmp_path / "good"), number=1)


def test_publish(pair: serving.Group, models: Any, tmp_path: Path) -> None:
    """Sums of files and tensors hold, tied models get their output matrix, adapters are written."""
    pair.open(models("llama"))
    train(pair, 1)
    path = folder(tmp_path, "full")
    answer = pair.call("publish", folder=str(path), form="full", dtype="bf16", untied=True)
    check_files(path, answer["files"])
    tensors = load_file(path / "model.safetensors")
    for one in answer["tensors"]:
        tensor = tensors[one["name"]]
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert (one["dtype"], one["shape"], one["file"]) == ("BF16", list(tensor.shape), "model.safetensors")
        assert blake3.blake3(data).hexdigest() == one["blake3"]
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    own = saved(pair, tmp_path, "masters")
    assert all(torch.equal(own[name].to(torch.bfloat16), tensors[name]) for name in own)
    pair.open(models("llama"), lora=LORA)
    path = folder(tmp_path, "adapter")
    answer = pair.call("publish", folder=str(path), form="adapter", dtype="f32", untied=False)
    check_files(path, answer["files"])
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 3


def test_top_and_frozen(pair: serving.Group, models: Any) -> None:
    """The best tokens of two lanes, a frozen model's scores, and adapters switched off."""
    pair.open(models("llama"), lora=LORA, frozen={"teacher": str(models("qwen3"))})
    lanes = wave(1, 2)
    tops = pair.call("top", wave=lanes, of="policy", k=97)["tops"]
    scores = forward(pair, lanes, backward=False)
    for world, best, one in zip((worlds.tree(1), worlds.tree(2)), tops, scores, strict=True):
        ids = np.frombuffer(best["ids"], "<u4").reshape(30, 97)
        logprobs = serving.f32(best["logprobs"]).reshape(30, 97)
        assert (np.diff(logprobs, axis=1)[np.isfinite(logprobs[:, 1:])] <= 0).all()
        at = (ids == world["targets"][:, None]).argmax(axis=1)
        assert np.allclose(logprobs[np.arange(30), at], one["logprobs"], atol=1e-6)
    base = forward(pair, lanes, of="base", backward=False)
    assert np.array_equal(base[0]["logprobs"], scores[0]["logprobs"])
    teacher = forward(pair, lanes, of="teacher", backward=False)
    own = inside.forward(inside.policy(models("qwen3")), inside.lane(worlds.tree(1)), backward=False)
    assert np.allclose(teacher[0]["logprobs"], own["logprobs"], atol=1e-6)
    with pytest.raises(serving.Failed):
        forward(pair, lanes, of="teacher", backward=True)


def test_reside_and_status(pair: serving.Group, models: Any) -> None:
    """Nothing computes while tensors are in host memory; status answers at any time."""
    pair.open(models("llama"))
    train(pair, 1)
    before = forward(pair, wave(1))[0]["logprobs"]
    pair.call("reside", where="host")
    with pytest.raises(serving.Failed) as failed:
        forward(pair, wave(1))
    assert "reside" in failed.value.error["text"]
    pair.call("reside", where="device")
    assert np.array_equal(before, forward(pair, wave(1))[0]["logprobs"])
    status = pair.call("status")
    assert status["seq"] == pair.seq and status["broken"] is None
    assert [one["rank"] for one in status["ranks"]] == [0, 1] and status["ranks"][1]["bytes"] > 0


def test_bf16(pair: serving.Group, models: Any, tmp_path: Path) -> None:
    """Two ranks in bf16 are near one rank in bf16; masters are f32; adapters train on a base in bf16."""
    pair.open(models("qwen3"), dtype="bf16")
    train(pair, 2)
    own = saved(pair, tmp_path, "pair")
    policy = inside.policy(models("qwen3"), dtype="bf16")
    train_inside(policy, 2)
    for one in policy.optimizer.trained:
        whole = one.tensor.full_tensor()
        assert own[one.name].dtype == torch.float32
        assert float((own[one.name] - whole).norm() / whole.norm()) < 5e-3
    pair.open(models("qwen3"), dtype="bf16", lora=LORA)
    train(pair, 2)
    adapter = saved(pair, tmp_path, "adapter")
    pair.call("load", folder=str(tmp_path / "adapter"), number=2)
    again = saved(pair, tmp_path, "again")
    assert all(torch.equal(again[name], adapter[name]) for name in adapter)


def test_stopped_rank_and_end_of_owner(models: Any, tmp_path: Path) -> None:
    """A stopped rank is named at the deadline; ranks end when their standard input does."""
    with serving.group(tmp_path / "group", 2, timeout_s=15) as two:
        os.kill(two.processes[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(serving.Failed) as failed:
            two.open(models("llama"))
        assert time.monotonic() - began >= 10, "it is given its time"
        assert failed.value.error["rank"] == 1, failed.value
        os.kill(two.processes[1].pid, signal.SIGCONT)
        for process in two.processes:
            assert process.stdin
            process.stdin.close()
        for process in two.processes:
            process.wait(120)


SMALL_FILES = """
from sinew.torch import checkpoint
from sinew.torch.__main__ import main

checkpoint.ONE_FILE = 0
main()
"""


def test_three_ranks_and_a_killed_one(pair: serving.Group, models: Any, tmp_path: Path) -> None:
    """A checkpoint of two ranks is equal to the bit in three, which write a file each, and in two again."""
    import transformers

    names: dict[str, torch.Tensor] = {}
    for name in ("first", "second"):
        pair.open(models("gpt_oss"))
        train(pair, 2)
        names = saved(pair, tmp_path, name)
    first = tmp_path / "first"
    assert (first / "model.safetensors").read_bytes() == (tmp_path / "second/model.safetensors").read_bytes()
    with serving.group(tmp_path / "three", 3, 120, SMALL_FILES) as three:
        assert three.open(models("gpt_oss"))["lanes"] == 3
        three.call("load", folder=str(first), number=2)
        third = saved(three, tmp_path, "third")
        assert len(list((tmp_path / "third").glob("model-0000?-of-00003.safetensors"))) == 3
        assert third.keys() == names.keys() and all(torch.equal(third[name], names[name]) for name in third)
        pair.call("load", folder=str(tmp_path / "third"), number=2)
        saved(pair, tmp_path, "fourth")
        assert (first / "model.safetensors").read_bytes() == (
            tmp_path / "fourth/model.safetensors"
        ).read_bytes()
        assert forward(three, wave(1, 2, 3))
        with pytest.raises(serving.Failed) as failed:
            three.call("apply", number=2, **STEP)
        assert "allowed is 3" in failed.value.error["text"]
        lose(three, 2)
    before, after = (moments(tmp_path / name, names) for name in ("first", "third"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(float(tensor.abs().max()) > 0 for tensor in before.values())
    paths = (first, tmp_path / "third")
    ids = torch.arange(1, 20)[None]
    both = [transformers.AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits for path in paths]
    assert torch.equal(*both)


def lose(group: serving.Group, rank: int) -> None:
    """Kills a rank: it is named before the deadline, and the server is broken and still closes."""
    group.processes[rank].kill()
    began = time.monotonic()
    with pytest.raises(serving.Failed) as failed:
        forward(group, wave(1, 2, 3))
    assert time.monotonic() - began < 120
    error = failed.value.error
    assert (failed.value.status, error["kind"], error["rank"]) == (500, "rank", rank), error
    assert "killed" in error["text"]
    with pytest.raises(serving.Failed) as failed:
        group.call("zero")
    assert failed.value.error == error | {"kind": "broken"}
    assert group.call("status")["broken"]["rank"] == rank
    group.call("close")
    assert group.processes[0].wait(120) == 0
