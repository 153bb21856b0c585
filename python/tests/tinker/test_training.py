"""Losses, gradients and optimizer steps through the SDK, against plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import serving
import tinker
import torch
from tinker import types

# The server computes in float32; the tiny model keeps its rounding below this.
CLOSE = 1e-6

Export = Callable[..., reference.Adapter]
Config = dict[str, float]


def datum(seed: int, length: int = 9, **more: Any) -> types.Datum:
    """A random sequence with its next tokens as targets, and random inputs of a loss."""
    random = np.random.default_rng(seed)
    tokens = random.integers(3, serving.VOCABULARY, length + 1)
    targets = {"target_tokens": tokens[1:].astype(np.int64)}
    arrays = {name: value(random, length) if callable(value) else value for name, value in more.items()}
    given = {name: types.TensorData.from_numpy(array) for name, array in (targets | arrays).items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=given)


def weights(random: np.random.Generator, length: int) -> np.ndarray:
    """Weights of both signs, and some 0."""
    return (random.normal(size=length) * (random.random(length) < 0.7)).astype(np.float32)


def near(datums: list[types.Datum], plain: reference.Reference, adapter: reference.Adapter) -> list[types.Datum]:
    """Adds log-probs of a sampler whose ratios lie on both sides of the clips, and advantages of both signs."""
    out = []
    for at, one in enumerate(datums):
        random = np.random.default_rng(100 + at)
        with torch.no_grad():
            lp = plain.targets(one, adapter).numpy()
        sampled = (lp + random.normal(scale=0.4, size=lp.shape)).astype(np.float32)
        advantages = random.normal(size=lp.shape).astype(np.float32)
        given = dict(one.loss_fn_inputs)
        given["logprobs"] = types.TensorData.from_numpy(sampled)
        given["advantages"] = types.TensorData.from_numpy(advantages)
        out.append(types.Datum(model_input=one.model_input, loss_fn_inputs=given))
    return out


def warm(training: tinker.TrainingClient) -> None:
    """One ordinary step, after which no tensor of the adapters is 0."""
    training.forward_backward([datum(1, weights=weights)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def probe(training: tinker.TrainingClient) -> types.OptimStepResponse:
    """A step that subtracts the gradient itself: with so large an `eps` Adam's denominator is a constant."""
    huge = 1e9
    step = types.AdamParams(learning_rate=huge, beta1=0.0, beta2=0.0, eps=huge, weight_decay=0.0)
    return training.optim_step(step).result()


def check_gradient(
    before: reference.Adapter, after: reference.Adapter, wanted: dict[str, np.ndarray]
) -> None:
    """Compares the change of each tensor with the negative derivative."""
    assert before.tensors.keys() == after.tensors.keys() == wanted.keys()
    largest = max(1.0, *(float(np.abs(g).max()) for g in wanted.values()))
    for name, gradient in wanted.items():
        change = (before.tensors[name] - after.tensors[name]).detach().numpy()
        assert np.abs(change - gradient).max() <= CLOSE * largest, name
    assert max(float(np.abs(g).max()) for g in wanted.values()) > 1e-3


RL: list[tuple[str, Config]] = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dro", {"beta": 0.3}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
]


@pytest.mark.parametrize(("name", "config"), RL, ids=[f"{name}-{len(config)}" for name, config in RL])
def test_losses_of_reinforcement_learning(
    training: tinker.TrainingClient, plain: reference.Reference, export: Export, name: str, config: Config
) -> None:
    warm(training)
    before = export(training)
    data = near([datum(5), datum(6, 4), datum(7, 1)], plain, before)
    if name == "gspo":
        # Tokens whose ratios the sequence's ratio is the mean of: all but the first.
        for one in data:
            mask = np.ones(one.model_input.length, np.float32)
            mask[0] = float(len(mask) == 1)
            one.loss_fn_inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(mask)
    result = training.forward_backward(data, name, config or None).result()
    wanted = float(plain.loss(data, name, config, before).detach())
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=CLOSE, abs=5e-6)
    check_logprobs(result, data, plain, before)
    gradient = plain.gradient(data, name, config, before)
    probe(training)
    check_gradient(before, export(training), gradient)


def check_logprobs(
    result: types.ForwardBackwardOutput,
    data: list[types.Datum],
    plain: reference.Reference,
    adapter: reference.Adapter,
) -> None:
    """Compares the log-probs of all targets, which have the shape of the targets."""
    assert len(result.loss_fn_outputs) == len(data)
    for output, one in zip(result.loss_fn_outputs, data, strict=True):
        with torch.no_grad():
            wanted = plain.targets(one, adapter).numpy()
        found = output["logprobs"].to_numpy()
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= CLOSE


def test_cross_entropy_with_weights_of_any_sign(
    training: tinker.TrainingClient, plain: reference.Reference, export: Export
) -> None:
    warm(training)
    before = export(training)
    data = [datum(8, weights=weights), datum(9, 30, weights=weights), datum(10, 3)]
    result = training.forward_backward(data, "cross_entropy").result()
    wanted = float(plain.loss(data, "cross_entropy", {}, before).detach())
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=CLOSE, abs=5e-6)
    check_logprobs(result, data, plain, before)
    gradient = plain.gradient(data, "cross_entropy", {}, before)
    probe(training)
    check_gradient(before, export(training), gradient)


@pytest.mark.parametrize("sparse", [False, True])
def test_cross_entropy_with_several_targets_at_a_place(
    training: tinker.TrainingClient, plain: reference.Reference, export: Export, sparse: bool
) -> None:
    warm(training)
    before = export(training)
    random = np.random.default_rng(12)
    tokens = random.integers(3, serving.VOCABULARY, 7).tolist()
    targets = torch.zeros((7, 5), dtype=torch.int64)
    masses = torch.zeros((7, 5), dtype=torch.float32)
    for place in (2, 6):
        targets[place] = torch.from_numpy(random.integers(3, serving.VOCABULARY, 5))
        masses[place] = torch.softmax(torch.from_numpy(random.normal(size=5)).float(), dim=0)
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    given = {"target_tokens": make(targets), "weights": make(masses)}
    assert (given["weights"].sparse_crow_indices is not None) == sparse
    data = [types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=given)]
    result = training.forward_backward(data, "cross_entropy").result()
    check_logprobs(result, data, plain, before)
    gradient = plain.gradient(data, "cross_entropy", {}, before)
    probe(training)
    check_gradient(before, export(training), gradient)


def test_forward_adds_no_gradient_and_two_backwards_add_theirs(
    training: tinker.TrainingClient, plain: reference.Reference, export: Export
) -> None:
    warm(training)
    before = export(training)
    first, second = datum(13, weights=weights), datum(14, weights=weights)
    # All are sent before the first result is there.
    results = [
        training.forward_backward([first], "cross_entropy"),
        training.forward([second], "cross_entropy"),
        training.forward_backward([second], "cross_entropy"),
    ]
    looked, added = results[1].result(), results[2].result()
    assert looked.metrics["loss:sum"] == pytest.approx(added.metrics["loss:sum"], rel=1e-7)
    np.testing.assert_array_equal(
        looked.loss_fn_outputs[0]["logprobs"].to_numpy(), added.loss_fn_outputs[0]["logprobs"].to_numpy()
    )
    gradient = plain.gradient([first, second], "cross_entropy", {}, before)
    probe(training)
    after = export(training)
    check_gradient(before, after, gradient)
    # A step leaves no gradient behind.
    probe(training)
    again = export(training)
    for name, tensor in after.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name


def test_custom_losses_run_in_the_client(
    training: tinker.TrainingClient, plain: reference.Reference, export: Export
) -> None:
    warm(training)
    before = export(training)
    data = [datum(15), datum(16, 4)]

    def squares(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum((lp**2).sum() for lp in logprobs)
        return loss, {"own": 7.0}

    result = training.forward_backward_custom(data, squares).result()
    assert result.metrics["own"] == 7.0
    for tensor in before.tensors.values():
        tensor.grad = None
    wanted = sum((plain.targets(one, before) ** 2).sum() for one in data)
    wanted.backward()
    assert result.metrics["loss:sum"] == pytest.approx(float(wanted.detach()), rel=CLOSE)
    gradient = {name: tensor.grad.numpy().copy() for name, tensor in before.tensors.items()}
    probe(training)
    after = export(training)
    largest = max(float(np.abs(g).max()) for g in gradient.values())
    for name, g in gradient.items():
        change = (before.tensors[name] - after.tensors[name]).detach().numpy()
        # The weights of the surrogate are rounded to float32 on their way.
        assert np.abs(change - g).max() <= 2 * CLOSE * largest, name


def test_steps_are_those_of_adamw(
    service: tinker.ServiceClient,
    training: tinker.TrainingClient,
    plain: reference.Reference,
    export: Export,
) -> None:
    warm(training)
    mine = export(training)
    # The warm step left moments behind: a model that is loaded without its optimizer begins with none.
    path = training.save_state("warm").result().path
    training = service.create_training_client_from_state(path).result()
    data = [datum(17, weights=weights), datum(18, 5, weights=weights)]
    parameters = list(mine.tensors.values())
    torch_adam = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    params = types.AdamParams(
        learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5
    )
    for _ in range(3):
        torch_adam.zero_grad()
        plain.loss(data, "cross_entropy", {}, mine).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        assert float(norm) > 0.5
        torch_adam.step()
        training.forward_backward(data, "cross_entropy").result()
        metrics = training.optim_step(params).result().metrics
        assert metrics
    found = export(training)
    for name, tensor in mine.tensors.items():
        difference = (tensor - found.tensors[name]).detach().abs().max()
        assert float(difference) <= 2e-6, name


def test_a_large_batch_is_divided_and_its_parts_are_added(training: tinker.TrainingClient) -> None:
    config = training.holder.get_client_config()
    assert config.parallel_fwdbwd_chunks and config.proto_compress_fwdbwd
    one = datum(19, 2, weights=weights)
    count = config.fwdbwd_max_chunk_len + 3
    result = training.forward_backward([one] * count, "cross_entropy").result()
    single = training.forward([one], "cross_entropy").result()
    assert len(result.loss_fn_outputs) == count
    assert result.metrics["loss:sum"] == pytest.approx(count * single.metrics["loss:sum"], rel=1e-5)


def test_loss_goes_down(training: tinker.TrainingClient) -> None:
    data = [datum(20), datum(21, 12)]
    losses = []
    for _ in range(12):
        result = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(result.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize(
    ("parts", "modules"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_adapters_are_where_they_were_asked_for(
    service: tinker.ServiceClient, export: Export, parts: dict[str, bool], modules: set[str]
) -> None:
    made = service.create_lora_training_client(serving.MODEL, rank=2, seed=1, **parts).result()
    adapter = export(made)
    assert {name.rsplit(".", 1)[-1] for name in adapter.pairs()} == modules
    assert adapter.config["r"] == 2
    # New adapters change nothing.
    assert all(float(b.abs().max()) == 0.0 for _, b in adapter.pairs().values())


def test_equal_seeds_make_equal_adapters(service: tinker.ServiceClient, export: Export) -> None:
    def made(seed: int) -> reference.Adapter:
        return export(service.create_lora_training_client(serving.MODEL, rank=2, seed=seed).result())

    first, again, other = made(4), made(4), made(5)
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert any(not torch.equal(first.tensors[name], other.tensors[name]) for name in first.tensors)
