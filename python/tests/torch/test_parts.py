"""The head, the tree, the optimizer and forms of computing, in this process.

Run: `PYTHONPATH=python/src pytest python/tests/torch`.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
import serving
import torch
import worlds
from sinew.torch import models as loading
from sinew.torch import tree
from sinew.torch.errors import Refused
from sinew.torch.head import Output, Scores, items_of
from sinew.torch.lanes import Lane
from sinew.torch.optimizer import AdamW, Trained, Update
from sinew.torch.server import Desk


@pytest.mark.parametrize("output", [Output(), Output(0.7, 3.0)])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_head(output: Output, chunk: int) -> None:
    """Scores and all derivatives against autograd in f64."""
    world = worlds.tree(21)
    lane = inside.lane(world)
    torch.manual_seed(1)
    states = torch.randn(len(world["tokens"]), 16, requires_grad=True)
    weight, bias = torch.randn(97, 16, requires_grad=True), torch.randn(97, requires_grad=True)
    items = items_of(lane, np.arange(len(world["tokens"])), torch.device("cpu"))
    scores, spread = Scores.apply(states[items.places], weight, bias, items, output, chunk, True)
    scores, spread = scores[items.order], spread[items.owner[items.order]]
    wide = [t.detach().double().requires_grad_() for t in (states, weight, bias)]
    logits = (wide[0] @ wide[1].t() + wide[2]) * output.scale
    if output.softcap:
        logits = torch.tanh(logits / output.softcap) * output.softcap
    logits = logits[lane.rows] / torch.from_numpy(lane.temperatures).double()[:, None]
    bits = (lane.mask_table[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    allowed = torch.from_numpy(bits.reshape(len(bits), -1)[:, :97] == 1)
    marks = torch.from_numpy(lane.masks)
    logits = torch.where((marks[:, None] < 0) | allowed[marks.clamp(min=0)], logits, -math.inf)
    logprobs = torch.log_softmax(logits, 1)
    wanted = logprobs[torch.arange(30), torch.from_numpy(lane.targets)]
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(1)
    assert torch.allclose(scores.double(), wanted, atol=2e-6)
    assert torch.allclose(spread.double(), entropy, atol=2e-6)
    first, second = torch.randn(30), torch.randn(30)
    ((scores * first).sum() + (spread * second).sum()).backward()
    ((wanted * first).sum() + (entropy * second).sum()).backward()
    for own, other in zip((states, weight, bias), wide, strict=True):
        assert torch.isfinite(own.grad).all()
        assert (own.grad.double() - other.grad).norm() <= 2e-6 * other.grad.norm()


def test_ancestry() -> None:
    """Masks by depth-first numbers are those of a walk to the root; FlexAttention reads the same rule."""
    from torch.nn.attention.flex_attention import flex_attention

    world = worlds.tree(22)
    lane = inside.lane(world)
    count = len(lane.tokens)
    segments = lane.segments.tolist()
    owner, position = tree.owners(lane)
    expected = np.zeros((count, count), bool)
    for row in range(count):
        at = int(owner[row])
        expected[row, segments[at][0] : row + 1] = True
        while segments[at][3]:
            at = segments[at][3] - 1
            expected[row, segments[at][0] : segments[at][0] + segments[at][1]] = True
    near = position[:, None] - position[None, :] < 5
    device = torch.device("cpu")
    for window, mask in ((None, expected), (5, expected & near)):
        found = tree.Ancestry(lane, np.arange(count), count, device).mask("sdpa", window, torch.float32)
        assert np.array_equal(found[0, 0].numpy(), mask)
        padded = tree.Ancestry(lane, np.arange(count), 512, device)
        torch.manual_seed(1)
        query = torch.randn(1, 2, 512, 16)
        flex = flex_attention(
            query, query, query, block_mask=padded.mask("flex_attention", window, torch.float32)
        )
        short = query[:, :, :count]
        plain = torch.nn.functional.scaled_dot_product_attention(short, short, short, torch.from_numpy(mask))
        assert torch.allclose(flex[:, :, :count], plain, atol=1e-5)
        assert torch.isfinite(flex).all()


def forest(first: Lane, second: Lane) -> Lane:
    """Both trees in one lane, with the masks of the first one only."""
    rows, count = len(first.tokens), len(first.segments)
    below = second.segments[:, 3] > 0
    moved = second.segments + np.stack([np.full(len(below), rows), 0 * below, 0 * below, count * below], axis=1)
    return Lane(
        np.concatenate([first.tokens, second.tokens]),
        np.concatenate([first.segments, moved]),
        np.concatenate([first.rows, second.rows + rows]),
        np.concatenate([first.targets, second.targets]),
        np.concatenate([first.temperatures, second.temperatures]),
        np.concatenate([first.masks, np.full_like(second.masks, -1)]),
        first.mask_table,
    )


@pytest.mark.parametrize("first", [12, 200])
def test_trees_are_rows(first: int, models: Any) -> None:
    """Rows are as long as the longest tree, if that pads little; the scores are those of each tree."""
    one, other = inside.lane(worlds.tree(31)), inside.lane(worlds.tree(32, first=first))
    other.masks[:] = -1
    both = forest(one, other)
    assert [len(rows) for rows in tree.trees(both)] == [28, 6, first + 16, 6]
    rows = tree.shared_rows(both, flex=False)
    assert [len(row) for row in rows] == ([28, 28, 12] if first == 12 else [256])
    assert len(tree.shared_rows(both, flex=True)) == 1
    policy = inside.policy(models("gemma3"))
    found = inside.forward(policy, both, backward=False)["logprobs"]
    apart = [inside.forward(policy, lane, backward=False)["logprobs"] for lane in (one, other)]
    assert np.allclose(found, np.concatenate(apart), atol=1e-5)


def test_flat_rows() -> None:
    """Every trie row stands at one place, whatever the budget and the number of passes."""
    lane = inside.lane(worlds.tree(23))
    for budget in (1, 24, 60, 4096):
        for more in (0, 2):
            batch = tree.flat_batch(lane, budget, len(tree.chunks(lane, budget)) + more, torch.device("cpu"))
            ids = torch.cat([one.ids.flatten() for one in batch.passes]).numpy()
            positions = torch.cat([one.positions.flatten() for one in batch.passes]).numpy()
            assert np.array_equal(ids[batch.places], lane.tokens)
            assert np.array_equal(positions[batch.places], tree.owners(lane)[1])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_5"])
def test_forms_agree(family: str, models: Any) -> None:
    """Shared and flat, any chunk, split lanes, recomputed layers: the same scores and gradients."""
    lane = inside.lane(worlds.tree(31))
    random = np.random.default_rng(3)
    slopes = {name: random.normal(size=30).astype("f4") for name in ("logprobs", "entropies")}
    results = []
    more = [
        {},
        {"sharing": "flat"},
        {"sharing": "flat", "max_tokens": 24},
        {"chunk": None, "checkpointing": "full"},
        {"checkpointing": "offload"},
    ]
    for options in more:
        policy = inside.policy(models(family), **options)
        scores = inside.forward(policy, lane, backward=False)
        kept = inside.forward(policy, lane)
        assert all(np.array_equal(scores[name], kept[name]) for name in scores), "one numeric path"
        policy.backward(slopes)
        results.append((kept, torch.cat([t.tensor.grad.flatten() for t in policy.optimizer.trained])))
    policy = inside.policy(models(family))
    for half in (slice(0, 15), slice(15, 30)):
        part = Lane(
            lane.tokens,
            lane.segments,
            lane.rows[half],
            lane.targets[half],
            lane.temperatures[half],
            lane.masks[half],
            lane.mask_table,
        )
        inside.forward(policy, part)
        policy.backward({name: values[half] for name, values in slopes.items()})
    split = torch.cat([t.tensor.grad.flatten() for t in policy.optimizer.trained])
    first, gradient = results[0]
    for kept, other in [*results[1:], (first, split)]:
        assert np.allclose(kept["logprobs"], first["logprobs"], atol=1e-5)
        assert (gradient - other).norm() <= 5e-6 * gradient.norm()
    assert torch.equal(results[0][1], results[4][1])


def test_flex(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention takes the same trees; here without its compiler, which has no backward pass on a CPU."""
    from transformers.integrations import flex_attention as place

    lane = inside.lane(worlds.tree(32))
    expected = inside.forward(inside.policy(models("gemma3")), lane, backward=False)
    policy = inside.policy(models("gemma3"), attention="flex")
    assert policy.main.form.attention == "flex_attention" and not policy.main.form.flat
    assert np.allclose(
        inside.forward(policy, lane, backward=False)["logprobs"], expected["logprobs"], atol=1e-5
    )

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(place, "compile_friendly_flex_attention", broken)
    with pytest.raises(Refused, match="no compiler"):
        inside.policy(models("gemma3"), attention="flex")
    monkeypatch.setattr(loading, "implementations", lambda *_: ["flex_attention"])
    policy = inside.policy(models("gemma3"))
    assert policy.main.form.attention == "sdpa" and not policy.main.form.flat
    assert np.array_equal(inside.forward(policy, lane, backward=False)["logprobs"], expected["logprobs"])


def test_critic(models: Any) -> None:
    """Values and their gradients, into the head and into the model."""
    import transformers

    head = np.random.default_rng(8).normal(size=33).astype("f4")
    policy = inside.policy(models("llama"), critic=head, critic_scale=2.0)
    world = worlds.tree(41)
    scores = inside.forward(policy, inside.lane(world), values=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.float32).eval()
    _, _, states = worlds.plain(model, world)
    own = torch.from_numpy(head).requires_grad_()
    values = states @ own[:-1] + own[-1]
    assert np.allclose(scores["values"], values.detach().numpy(), atol=1e-5)
    slope = np.random.default_rng(9).normal(size=30).astype("f4")
    policy.backward({"values": slope})
    (values * torch.from_numpy(slope)).sum().backward()
    assert torch.allclose(policy.critic.grad, own.grad, rtol=1e-5, atol=1e-5)
    theirs = dict(model.named_parameters())
    for trained in policy.optimizer.trained[:-1]:
        assert (trained.tensor.grad - theirs[trained.name].grad).norm() <= 1e-5 * theirs[
            trained.name
        ].grad.norm() + 1e-6


def test_bf16(models: Any) -> None:
    """f32 masters and gradients, bf16 arithmetic: near f32, not equal."""
    lane = inside.lane(worlds.tree(51))
    exact, half = inside.policy(models("qwen3")), inside.policy(models("qwen3"), dtype="bf16")
    assert not half.main.form.flat, half.main.form.why_flat
    one, two = inside.forward(exact, lane), inside.forward(half, lane)
    assert 1e-4 < np.median(abs(one["logprobs"] - two["logprobs"])) < 0.2
    slopes = {"logprobs": np.ones(30, "f4")}
    exact.backward(slopes)
    half.backward(slopes)
    for own, other in zip(exact.optimizer.trained, half.optimizer.trained, strict=True):
        assert other.tensor.grad.dtype == other.tensor.dtype == torch.float32
        grad = other.tensor.grad.full_tensor()
        assert (own.tensor.grad - grad).norm() <= 0.1 * own.tensor.grad.norm()
    adapters = inside.policy(
        models("qwen3"), dtype="bf16", lora={"rank": 2, "alpha": 2.0, "targets": [], "seed": 1}
    )
    kinds = {t.dtype for t in adapters.main.loaded.tensors.values() if not t.requires_grad}
    assert kinds == {torch.bfloat16}
    inside.forward(adapters, lane)
    adapters.backward(slopes)
    assert adapters.apply(Update(1, 1e-3, 0.9, 0.99, 1e-8, 0.0, None))["grad_norm"] > 0


@pytest.mark.parametrize(
    "kind,more",
    [
        ("Gemma2", {"final_logit_softcapping": 3.0}),
        ("Cohere", {"logit_scale": 0.3}),
        ("Granite", {"logits_scaling": 4.0}),
    ],
)
def test_scaled_logits(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Models that scale or cap their logits."""
    import transformers

    config = getattr(transformers, kind + "Config")(**(worlds.SMALL | more))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    policy = inside.policy(tmp_path)
    world = worlds.tree(61)
    logprobs, _, _ = worlds.plain(model, world)
    scores = inside.forward(policy, inside.lane(world))["logprobs"]
    assert policy.main.output != Output()
    assert np.allclose(scores, logprobs.detach().numpy(), atol=1e-5)


def test_flat_is_a_finding(models: Any) -> None:
    """A window that the mask does not know is found out on the loaded model."""
    policy = inside.policy(models("mistral"))
    assert policy.main._differs(tree.Form(False, "sdpa", {"": 8})) is None
    assert "differ" in policy.main._differs(tree.Form(False, "sdpa", {"": None}))
    assert "differ" in policy.main._differs(tree.Form(False, "sdpa", {"": 9}))
    assert "no mask" in policy.main._differs(tree.Form(False, "sdpa", {"full_attention": None}))


@pytest.mark.parametrize(
    "family,targets",
    [
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("llama", ["nothing"]),
        ("llama", ["lm_head"]),
        ("gpt_oss", ["gate_up_proj"]),
    ],
)
def test_refused_adapters(family: str, targets: list[str], models: Any) -> None:
    """Adapters of fused experts, of the head and of unknown layers are refused by name."""
    with pytest.raises(Refused, match="lora.targets"):
        inside.policy(models(family), lora={"rank": 2, "alpha": 2.0, "targets": targets, "seed": 1})


def test_adamw() -> None:
    """The formula of the embedded trainer; clipping without epsilon; a bad gradient changes nothing."""
    torch.manual_seed(2)
    weight, gain = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3))
    trained = [Trained("a.weight", weight, True), Trained("a.norm.weight", gain, False, 3.0)]
    optimizer = AdamW(trained, 0)
    expected = {t.name: t.tensor.detach().double().numpy().copy() for t in trained}
    m = {name: 0 * value for name, value in expected.items()}
    v = {name: 0 * value for name, value in expected.items()}
    for number in range(1, 6):
        for one in trained:
            one.tensor.grad = torch.randn_like(one.tensor) * 3
        norm = math.sqrt(sum(float(t.tensor.grad.double().square().sum()) for t in trained))
        answer = optimizer.apply(Update(number, 0.01, 0.9, 0.95, 1e-3, 0.1, 2.0))
        assert abs(answer["grad_norm"] - norm) < 1e-9 * norm
        for one in trained:
            name, g = one.name, one.tensor.grad.double().numpy() * min(1.0, 2.0 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            step = m[name] / (1 - 0.9**number) / (np.sqrt(v[name] / (1 - 0.95**number)) + 1e-3)
            expected[name] -= 0.01 * one.lr_scale * (step + (0.1 * expected[name] if one.decay else 0))
            assert np.allclose(one.tensor.detach().numpy(), expected[name], rtol=1e-6, atol=1e-7)
    before = weight.detach().clone()
    gain.grad[1] = math.inf
    assert optimizer.apply(Update(6, 0.01, 0.9, 0.95, 1e-3, 0.1, None)) == {"skipped": "a.norm.weight"}
    assert torch.equal(before, weight)


def test_desk() -> None:
    """A repeated call waits for the one that computes; a broken server answers everybody."""
    desk = Desk({"open", "zero"})
    with pytest.raises(Refused) as refused:
        desk.submit("zero", {"fence": 1, "seq": 1})
    assert refused.value.kind == "gap"
    first = desk.submit("open", {"fence": 1, "seq": 5})
    assert desk.submit("open", {"fence": 1, "seq": 5}) is first
    second = desk.submit("zero", {"fence": 1, "seq": 6})
    assert desk.next() is first
    desk.fail({"kind": "memory", "text": "no memory", "rank": 1, "phase": "forward"})
    assert first.status == second.status == 500 and b"memory" in second.answer
    with pytest.raises(Refused) as refused:
        desk.submit("zero", {"fence": 1, "seq": 7})
    assert refused.value.kind == "broken" and refused.value.rank == 1


def test_torchrun_and_no_memory(models: Any, tmp_path: Path) -> None:
    """The same files run as a package `sinew_torch` under `torchrun`; a lack of memory is reported."""
    shutil.copytree(serving.SOURCE / "sinew" / "torch", tmp_path / "sinew_torch")
    (tmp_path / "token").write_text(serving.TOKEN)
    env = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "SINEW_TORCH_TOKEN_FILE": str(tmp_path / "token"),
        "SINEW_TORCH_READY": str(tmp_path / "ready"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone"]
    command += ["-m", "sinew_torch"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, cwd=tmp_path, stdin=quiet, stderr=quiet)
    try:
        group = serving.Group.__new__(serving.Group)
        group.ready, group.processes, group.folder = tmp_path / "ready", [process], tmp_path
        group.fence, group.seq, group.connection = 1, 0, None
        group.wait()
        assert group.open(models("llama"), max_tokens=1 << 20)["lanes"] == 1
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        used = int(Path(f"/proc/{children[-1]}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(int(children[-1]), resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        lane = serving.lane(np.arange(20000) % 97, [(0, 20000, 0, 0)], [5], [7])
        with pytest.raises(serving.Failed) as failed:
            group.call("forward", wave=[lane], of="policy", entropies=False, values=False, backward=True)
        error = failed.value.error
        assert (error["kind"], error["rank"], error["phase"]) == ("memory", 0, "forward"), error
        assert "peak of rank 0" in error["text"]
        group.call("close")
        assert process.wait(120) == 0
    finally:
        process.kill()
