"""Mixtures of experts: recorded experts in place of the routers' choice, and the load-balancing loss.

Run: `PYTHONPATH=python/src pytest python/tests/torch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
import serving
import torch
import transformers
import worlds
from sinew.torch.errors import Refused
from sinew.torch.lanes import Lane, parse
from sinew.torch.routing import Routers

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": worlds.FAMILIES["qwen3_moe"],
    "gpt_oss": worlds.FAMILIES["gpt_oss"],
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the tiny model of a family once."""
    folder, made = tmp_path_factory.mktemp("experts"), {}

    def get(family: str) -> Path:
        if family not in made:
            before = worlds.FAMILIES.get(family)
            worlds.FAMILIES[family] = FAMILIES[family]
            made[family] = worlds.make(family, folder)
            if before is None:
                del worlds.FAMILIES[family]
        return made[family]

    return get


def plain_model(folder: Path) -> Any:
    """The model as anybody loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_experts(lane: Lane, chosen: np.ndarray) -> Lane:
    """The lane with experts for each token."""
    columns = [getattr(lane, name) for name in list(Lane.__dataclass_fields__)[:7]]
    return Lane(*columns, chosen)


def own_choice(policy: Any, lane: Lane) -> np.ndarray:
    """The experts that the routers choose, `[tokens, layers, top_k]`."""
    routers = policy.main.routers
    places = policy.main.batch(lane, policy.main.passes(lane)).places
    chosen = np.zeros((len(lane.tokens), routers.layers, routers.top_k), np.int32)
    hooks = []
    for layer, module in routers.modules.items():

        def keep(_module: Any, _args: Any, found: Any, layer: int = layer) -> None:
            chosen[:, layer] = found[2].numpy()[places]

        hooks.append(module.register_forward_hook(keep))
    inside.forward(policy, lane, backward=False)
    for hook in hooks:
        hook.remove()
    return chosen


def random_choice(routers: Routers, tokens: int, seed: int) -> np.ndarray:
    """Random different experts; a fifth of the tokens has none."""
    random = np.random.default_rng(seed)
    drawn = random.random((tokens, routers.layers, routers.count)).argsort(axis=2)
    chosen = drawn[:, :, : routers.top_k].astype(np.int32)
    chosen[random.random(tokens) < 0.2] = -1
    return chosen


def gradient(policy: Any) -> torch.Tensor:
    """All gradients; none is zeros, since an expert may have had no token."""
    parts = [t.tensor.grad if t.tensor.grad is not None else 0 * t.tensor for t in policy.optimizer.trained]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("options", [{}, {"sharing": "flat", "checkpointing": "full", "max_tokens": 24}])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_experts_change_nothing(family: str, options: Any, experts: Any) -> None:
    """Experts that the routers would choose give the same bits; some others do not."""
    lane = inside.lane(worlds.tree(31))
    policy = inside.policy(experts(family), **options)
    routers = policy.main.routers
    assert routers.replays, routers.why_not
    assert policy.main.described() == {"layers": 3, "top_k": 2, "experts": routers.count}
    assert sorted(routers.modules) == ([1, 2] if family == "glm4_moe" else [0, 1, 2])
    slopes = {"logprobs": np.random.default_rng(3).normal(size=30).astype("f4")}
    free = inside.forward(policy, lane)
    policy.backward(slopes)
    first = gradient(policy)
    policy.zero()
    if policy.main.form.flat:
        chosen = own_choice(inside.policy(experts(family)), lane)
    else:
        chosen = own_choice(policy, lane)
    forced = inside.forward(policy, with_experts(lane, chosen))
    policy.backward(slopes)
    if policy.main.form.flat:
        # Experts of the shared pass: rounding can differ, the choice not.
        assert np.allclose(forced["logprobs"], free["logprobs"], atol=1e-5)
        assert (gradient(policy) - first).norm() <= 1e-5 * first.norm()
    else:
        assert np.array_equal(forced["logprobs"], free["logprobs"])
        assert torch.equal(gradient(policy), first)
    policy.zero()
    other = with_experts(lane, random_choice(routers, len(lane.tokens), 5))
    moved = inside.forward(policy, other, backward=False)
    assert abs(moved["logprobs"] - free["logprobs"]).max() > 1e-2


class Plain:
    """Qwen3-MoE's formula with given experts, written again: probabilities of the chosen ones, normalized."""

    def __init__(self, model: Any, chosen: np.ndarray) -> None:
        self.chosen, self.path = torch.from_numpy(chosen.astype(np.int64)), torch.zeros(0, dtype=torch.long)
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.forward = lambda states, layer=layer, gate=block.mlp.gate: self(states, gate, layer)

    def __call__(self, states: torch.Tensor, gate: Any, layer: int) -> tuple[torch.Tensor, ...]:
        logits = states.reshape(-1, states.shape[-1]) @ gate.weight.t()
        shares = torch.softmax(logits, dim=-1)
        given = self.chosen[self.path, layer]
        own = shares.topk(gate.top_k, dim=-1).indices
        chosen = torch.where((given < 0).any(dim=1, keepdim=True), own, given)
        weights = torch.stack([shares[row, chosen[row]] for row in range(len(chosen))])
        return logits, weights / weights.sum(dim=1, keepdim=True), chosen


def path_of(world: dict[str, Any], row: int) -> list[int]:
    """The rows of the trie from the root to a row."""
    segments = world["segments"]
    own = next(k for k, s in enumerate(segments) if s[0] <= row < s[0] + s[1])
    path, at = list(range(segments[own][0], row + 1)), segments[own][3]
    while at:
        start, length, _, parent = segments[at - 1]
        path, at = list(range(start, start + length)) + path, parent
    return path


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("sharing", ["auto", "flat"])
def test_other_experts(sharing: str, checkpointing: str, experts: Any) -> None:
    """Scores and gradients are those of a plain computation by the same experts, row by row."""
    folder, world = experts("qwen3_moe"), worlds.tree(32)
    world["masks"][:] = 0xFFFFFFFF
    policy = inside.policy(folder, sharing=sharing, checkpointing=checkpointing)
    chosen = random_choice(policy.main.routers, len(world["tokens"]), 6)
    lane = parse(serving.lane(**world, experts=chosen), "lane", 97, 4096, policy.main.routers)
    assert np.array_equal(lane.experts, chosen)
    scores = inside.forward(policy, lane)
    model = plain_model(folder)
    plain, logprobs = Plain(model, chosen), []
    for i, row in enumerate(world["rows"]):
        path = path_of(world, int(row))
        plain.path = torch.tensor(path)
        ids = torch.from_numpy(world["tokens"][path])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, -1] / float(world["temperatures"][i])
        logprobs.append(torch.log_softmax(logits, dim=-1)[int(world["targets"][i])])
    found = torch.stack(logprobs)
    assert np.allclose(scores["logprobs"], found.detach().numpy(), atol=1e-5)
    slope = np.random.default_rng(4).normal(size=30).astype("f4")
    policy.backward({"logprobs": slope})
    (found * torch.from_numpy(slope)).sum().backward()
    theirs = dict(model.named_parameters())
    for trained in policy.optimizer.trained:
        own, other = trained.tensor.grad, theirs[trained.name].grad
        assert (own - other).norm() <= 2e-5 * other.norm() + 1e-6, trained.name


@pytest.mark.parametrize("options", [{}, {"checkpointing": "full"}, {"sharing": "flat", "max_tokens": 40}])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_load_balancing(family: str, options: Any, experts: Any) -> None:
    """The loss and its gradient are those of `transformers` for the same tokens, each counted once."""
    world = worlds.tree(33)
    chain = world | {"segments": [(0, len(world["tokens"]), 0, 0)]}
    policy = inside.policy(experts(family), router_loss=True, **options)
    lane = inside.lane(chain)
    found = policy.forward(lane, "policy", policy.main.passes(lane), False, False, True)
    model = plain_model(experts(family))
    ids = torch.from_numpy(world["tokens"])[None]
    loss = model(input_ids=ids, output_router_logits=True, use_cache=False).aux_loss
    assert abs(found["router"] - float(loss.detach())) <= 1e-5
    policy.backward({"logprobs": np.zeros(30, "f4"), "router": np.array([0.7], "f4")})
    (0.7 * loss).backward()
    theirs = dict(model.named_parameters())
    for trained in policy.optimizer.trained:
        own, other = trained.tensor.grad, theirs[trained.name].grad
        own = torch.zeros_like(trained.tensor) if own is None else own
        other = torch.zeros_like(own) if other is None else other
        assert (own - other).norm() <= 1e-5 * other.norm() + 1e-7, trained.name
    # A tree counts a shared prefix once: padding and repeated rows of flat passes leave the loss alone.
    tree = inside.lane(world)
    values = [
        inside.policy(experts(family), router_loss=True, sharing=sharing, max_tokens=40)
        for sharing in ("auto", "flat")
    ]
    losses = [p.forward(tree, "policy", p.main.passes(tree), False, False, True)["router"] for p in values]
    assert abs(losses[0] - losses[1]) <= 1e-5
    assert "router" not in policy.forward(lane, "policy", policy.main.passes(lane), False, False, False)


def test_refusals(models: Any, experts: Any) -> None:
    """Experts of another model, and a load-balancing loss without one, are refused by name."""
    world = worlds.tree(34)
    routers = inside.policy(experts("qwen3_moe")).main.routers
    good = random_choice(routers, len(world["tokens"]), 7)

    def refused(chosen: np.ndarray, words: str, of: Routers = routers) -> None:
        with pytest.raises(Refused, match=words):
            parse(serving.lane(**world, experts=chosen), "lane", 97, 4096, of)

    refused(good[:, :2], "lane.routes is .*replay_routing")
    refused(good[:-1], "lane.routes")
    refused(np.where(good == 3, 4, good), "lane.routes is 4, allowed is the number of an expert, below 4")
    refused(np.zeros_like(good), "an expert twice")
    off = Routers(3, 4, 2, {}, why_not="no reason")
    refused(good, "allowed is none: no reason", off)
    # A model that chooses by itself, such as a reference, does not read them.
    assert parse(serving.lane(**world, experts=good), "lane", 97, 4096).experts is None
    dense = inside.policy(models("llama"))
    assert dense.main.routers is None and dense.main.described() is None
    for family, folder in (("Llama", models("llama")), ("Glm4Moe", experts("glm4_moe"))):
        with pytest.raises(Refused, match=f"{family}.*load-balancing"):
            inside.policy(folder, router_loss=True)


def test_ranks(pair: serving.Group, experts: Any) -> None:
    """Two ranks that shard the model compute what one computes."""
    folder = experts("qwen3_moe")
    one = inside.policy(folder, router_loss=True)
    answer = pair.open(folder, router_loss=True, checkpointing="full")
    assert answer["routers"] == {"layers": 3, "top_k": 2, "experts": 4}
    worlds_of = [worlds.tree(seed) for seed in (35, 36)]
    chosen = [random_choice(one.main.routers, len(world["tokens"]), 8) for world in worlds_of]
    lanes = [serving.lane(**world, experts=given) for world, given in zip(worlds_of, chosen, strict=True)]
    found = pair.call("forward", wave=lanes, of="policy", entropies=False, values=False, backward=True)
    slope = np.random.default_rng(6).normal(size=30).astype("<f4")
    grads = [{"logprobs": slope.tobytes(), "router": router} for router in (0.5, 0.25)]
    for world, given, scores, grad in zip(worlds_of, chosen, found["scores"], grads, strict=True):
        lane = with_experts(inside.lane(world), given)
        own = one.forward(lane, "policy", one.main.passes(lane), False, False, True)
        assert np.allclose(serving.f32(own["logprobs"]), serving.f32(scores["logprobs"]), atol=1e-5)
        assert abs(own["router"] - scores["router"]) <= 1e-5
        one.backward({"logprobs": slope, "router": np.array([grad["router"]], "f4")})
    pair.call("backward", grads=grads)
    norm = pair.call("apply", number=1, lr=0.0, beta1=0.9, beta2=0.9, eps=1e-8, decay=0.0)["grad_norm"]
    assert abs(norm - float(gradient(one).norm())) <= 1e-4 * norm
    base = pair.call("top", wave=lanes, of="policy", k=2)
    assert len(base["tops"]) == 2
