"""Twelve families against plain `transformers`: rows one by one, log_softmax, autograd.

Run: `PYTHONPATH=python/src pytest python/tests/torch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
import torch
import transformers
import worlds
from sinew.torch import checkpoint

FLAT = {"qwen3_5"}
"""Families whose layers carry a state from token to token."""


def relative(own: torch.Tensor, other: torch.Tensor) -> float:
    """Difference over the norm of the second."""
    return float((own - other).norm() / other.norm().clamp(min=1e-12))


def slopes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random derivatives."""
    random = np.random.default_rng(5)
    return random.normal(size=count).astype("f4"), random.normal(size=count).astype("f4")


def compare(policy: Any, model: Any, world: dict[str, Any], names: Any = None) -> tuple[float, float]:
    """Largest gap of log-probabilities and entropies, and relative gap of all gradients."""
    one = inside.lane(world)
    scores = inside.forward(policy, one)
    logprobs, entropies, _ = worlds.plain(model, world)
    gap = max(
        abs(scores["logprobs"] - logprobs.detach().numpy()).max(),
        abs(scores["entropies"] - entropies.detach().numpy()).max(),
    )
    first, second = slopes(one.items)
    policy.backward({"logprobs": first, "entropies": second})
    ((logprobs * torch.from_numpy(first)).sum() + (entropies * torch.from_numpy(second)).sum()).backward()
    own, other = [], []
    theirs = dict(model.named_parameters())
    for trained in policy.optimizer.trained:
        name = names(trained.name) if names else trained.name
        if theirs[name].grad is None and float(trained.tensor.grad.abs().max()) == 0:
            continue
        own.append(trained.tensor.grad.flatten())
        other.append(theirs[name].grad.flatten())
    return float(gap), relative(torch.cat(own), torch.cat(other))


def plain_model(folder: Path) -> Any:
    """The model as anybody loads it."""
    kwargs = {"dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_scores_gradients_and_export(family: str, models: Any, tmp_path: Path) -> None:
    """Log-probabilities to 1e-5, gradients to 1e-5, and an export that loads with equal logits."""
    policy = inside.policy(models(family))
    model = plain_model(models(family))
    gap, slope = compare(policy, model, worlds.tree(11))
    form = policy.main.form
    print(f"\n{family}: logprobs {gap:.1e} gradients {slope:.1e}", form)
    assert gap <= 1e-5 and slope <= 1e-5
    assert form.flat == (family in FLAT), form.why_flat
    files, tensors = checkpoint.publish(policy, str(tmp_path), "full", "f32", False)
    saved = {one["name"]: one["shape"] for one in tensors}
    from safetensors import safe_open

    with safe_open(models(family) / "model.safetensors", "pt") as original:
        assert saved == {key: original.get_slice(key).get_shape() for key in original.keys()}  # noqa: SIM118
    (tmp_path / "config.json").write_bytes((models(family) / "config.json").read_bytes())
    again = plain_model(tmp_path)
    ids = torch.arange(1, 20)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_adapters(family: str, models: Any, tmp_path: Path) -> None:
    """LoRA's scores and gradients are those of `peft` on plain rows; both exports load."""
    from peft import PeftModel

    lora = {"rank": 3, "alpha": 5.0, "targets": [], "seed": 2, "base_name": "somewhere"}
    policy = inside.policy(models(family), lora=lora)
    base = inside.forward(policy, inside.lane(worlds.tree(12)), of="policy", backward=False)
    torch.manual_seed(4)
    for one in policy.optimizer.trained:
        assert ".lora_" in one.name
        one.tensor.data.add_(0.05 * torch.randn_like(one.tensor))
    (tmp_path / "adapter").mkdir()
    checkpoint.publish(policy, str(tmp_path / "adapter"), "adapter", "f32", False)
    peft = PeftModel.from_pretrained(plain_model(models(family)), tmp_path / "adapter", is_trainable=True)
    gap, slope = compare(policy, peft, worlds.tree(12), lambda name: f"base_model.model.{name}")
    assert gap <= 1e-5 and slope <= 1e-5
    off = inside.forward(policy, inside.lane(worlds.tree(12)), of="base", backward=False)
    assert np.array_equal(off["logprobs"], base["logprobs"])
    (tmp_path / "merged").mkdir()
    checkpoint.publish(policy, str(tmp_path / "merged"), "full", "f32", False)
    (tmp_path / "merged" / "config.json").write_bytes((models(family) / "config.json").read_bytes())
    ids = torch.arange(1, 20)[None]
    merged, own = plain_model(tmp_path / "merged")(input_ids=ids).logits, peft(input_ids=ids).logits
    apart = float((merged - own).abs().max().detach())
    print(f"\n{family}: lora logprobs {gap:.1e} gradients {slope:.1e} merged {apart:.1e}")
    assert (merged - own).abs().max() <= 2e-4 * own.abs().max()


def composites() -> dict[str, tuple[Any, Any]]:
    """Configurations of models with a vision tower."""
    text = worlds.SMALL | {"query_pre_attn_scalar": 8}
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    qwen = transformers.Qwen3_5Config(
        text_config=worlds.SMALL | worlds.LINEAR,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "patch_size": 4,
        },
    )
    gemma = transformers.Gemma3Config(
        text_config=text | {"layer_types": worlds.SLIDING, "sliding_window": 8},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        vision_config=tower | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
    )
    return {
        "qwen3_5": (qwen, transformers.Qwen3_5ForConditionalGeneration),
        "gemma3": (gemma, transformers.Gemma3ForConditionalGeneration),
    }


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_vision_towers_stay(family: str, tmp_path: Path) -> None:
    """The text part of a model with a vision tower trains, and an export has the tower's tensors as they
    were."""
    from safetensors.torch import load_file

    config, kind = composites()[family]
    torch.manual_seed(1)
    kind(config).save_pretrained(tmp_path / "model")
    policy = inside.policy(tmp_path / "model")
    inside.forward(policy, inside.lane(worlds.tree(3)))
    policy.backward({"logprobs": np.ones(30, "f4")})
    assert all(one.tensor.grad is not None for one in policy.optimizer.trained)
    (tmp_path / "out").mkdir()
    checkpoint.publish(policy, str(tmp_path / "out"), "full", "f32", False)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
