"""Samples, and log-probabilities of prompts, through the SDK, against plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

import httpx
import numpy as np
import pytest
import reference
import serving
import tinker
import torch
from test_training import datum, weights
from tinker import types

# Engine and reference compute in float32 and float64.
CLOSE = 1e-6
PROMPT = [5, 17, 40, 8, 23, 60]

Export = Callable[..., reference.Adapter]


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    """The base model itself."""
    return service.create_sampling_client(base_model=serving.MODEL).result()


def prompt(tokens: list[int] = PROMPT) -> types.ModelInput:
    """A prompt in two chunks, as renderers make them."""
    half = len(tokens) // 2
    chunks = [types.EncodedTextChunk(tokens=part) for part in (tokens[:half], tokens[half:]) if part]
    return types.ModelInput(chunks=chunks)


def params(**more: object) -> types.SamplingParams:
    """Parameters that end only by length, unless told otherwise."""
    return types.SamplingParams(**({"max_tokens": 8, "stop": [], "seed": 3} | more))


def check(tokens: list[int], start: int, found: list[float], wanted: torch.Tensor) -> None:
    """Compares log-probs of the tokens from `start` on."""
    assert len(found) == len(tokens) - start
    for place, value in enumerate(found, start):
        right = float(wanted[place - 1, tokens[place]])
        assert abs(value - right) <= CLOSE, place


def test_samples_carry_the_log_probs_of_the_model(
    base: tinker.SamplingClient, plain: reference.Reference
) -> None:
    result = base.sample(prompt(), 3, params()).result()
    assert len(result.sequences) == 3
    assert len({sequence.sequence_id for sequence in result.sequences}) == 3
    assert len({tuple(sequence.tokens) for sequence in result.sequences}) > 1
    for sequence in result.sequences:
        assert len(sequence.tokens) == 8 and sequence.stop_reason == "length"
        whole = PROMPT + sequence.tokens
        with torch.no_grad():
            wanted = plain.logprobs(whole)
        assert sequence.logprobs is not None
        check(whole, len(PROMPT), sequence.logprobs, wanted)


def test_equal_seeds_sample_equally(base: tinker.SamplingClient) -> None:
    first, again, other = (base.sample(prompt(), 2, params(seed=seed)).result() for seed in (7, 7, 8))
    tokens = [[sequence.tokens for sequence in result.sequences] for result in (first, again, other)]
    assert tokens[0] == tokens[1] and tokens[0] != tokens[2]


def test_temperature_0_takes_the_most_likely_token(
    base: tinker.SamplingClient, plain: reference.Reference
) -> None:
    result = base.sample(prompt(), 1, params(temperature=0.0, max_tokens=5)).result()
    whole = list(PROMPT)
    for token in result.sequences[0].tokens:
        with torch.no_grad():
            assert token == int(plain.logprobs(whole)[-1].argmax())
        whole.append(token)


def test_top_k_and_top_p_keep_the_likely_tokens(
    base: tinker.SamplingClient, plain: reference.Reference
) -> None:
    with torch.no_grad():
        likely = plain.logprobs(PROMPT)[-1].exp().sort(descending=True)
    results = base.sample(prompt(), 40, params(max_tokens=1, top_k=3, temperature=2.0)).result()
    seen = {sequence.tokens[0] for sequence in results.sequences}
    assert seen <= set(likely.indices[:3].tolist()) and len(seen) > 1
    mass = float(likely.values[0]) * 1.001
    results = base.sample(prompt(), 10, params(max_tokens=1, top_p=mass)).result()
    assert {sequence.tokens[0] for sequence in results.sequences} <= set(likely.indices[:2].tolist())


def test_sequences_end_where_they_are_asked_to(base: tinker.SamplingClient) -> None:
    free = base.sample(prompt(), 1, params(max_tokens=6, temperature=0.0)).result().sequences[0].tokens
    # The model's own end counts next to those of a list.
    free = free[: free.index(serving.END) + 1] if serving.END in free else free
    # The last token that occurs for the first time at its place.
    place = max(at for at, token in enumerate(free) if token not in free[:at])
    stopped = params(max_tokens=6, temperature=0.0, stop=[free[place]])
    sequence = base.sample(prompt(), 1, stopped).result().sequences[0]
    assert sequence.tokens == free[: place + 1] and sequence.stop_reason == "stop"
    assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.tokens)
    if free[place] >= 3:
        text = chr(free[place] + 30)
        by_text = base.sample(prompt(), 1, params(max_tokens=6, temperature=0.0, stop=[text])).result()
        assert by_text.sequences[0].tokens == free[: place + 1]
        assert by_text.sequences[0].stop_reason == "stop"
    # Without `stop`, the model's own end counts; with an empty list, nothing does.
    ends = base.sample(prompt(), 60, params(max_tokens=30, stop=None, temperature=1.5)).result().sequences
    assert any(sequence.stop_reason == "stop" for sequence in ends)
    for sequence in ends:
        assert serving.END not in sequence.tokens[:-1]
        assert (sequence.tokens[-1] == serving.END) == (sequence.stop_reason == "stop")
    never = base.sample(prompt(), 20, params(max_tokens=30, temperature=1.5)).result().sequences
    assert all(len(sequence.tokens) == 30 for sequence in never)


def test_prompts_are_scored(base: tinker.SamplingClient, plain: reference.Reference) -> None:
    with torch.no_grad():
        wanted = plain.logprobs(PROMPT)
    scored = base.compute_logprobs(prompt()).result()
    assert scored[0] is None and len(scored) == len(PROMPT)
    check(PROMPT, 1, scored[1:], wanted)
    last = base.compute_logprobs(prompt(), prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * (len(PROMPT) - 2)
    check(PROMPT, len(PROMPT) - 2, last[-2:], wanted)
    # The temperature of the samples does not change the scores.
    warm = base.sample(prompt(), 1, params(max_tokens=1, temperature=0.5), include_prompt_logprobs=True)
    check(PROMPT, 1, warm.result().prompt_logprobs[1:], wanted)


def test_the_most_likely_tokens_are_reported(
    base: tinker.SamplingClient, plain: reference.Reference
) -> None:
    result = base.sample(
        prompt(),
        1,
        params(max_tokens=4),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=5,
        topk_sample_logprobs=2,
    ).result()
    sequence = result.sequences[0]
    whole = PROMPT + sequence.tokens
    with torch.no_grad():
        wanted = plain.logprobs(whole)
    rows = result.topk_prompt_logprobs
    assert rows is not None and len(rows) == len(PROMPT) and rows[0] is None
    assert sequence.topk_logprobs is not None
    for place, row in [*enumerate(rows[1:], 1), *enumerate(sequence.topk_logprobs, len(PROMPT))]:
        count = 5 if place < len(PROMPT) else 2
        assert row is not None and len(row) == count
        best = wanted[place - 1].sort(descending=True)
        for (token, value), right, index in zip(row, best.values, best.indices, strict=False):
            assert abs(value - float(right)) <= CLOSE
            assert token == int(index)


@pytest.mark.parametrize("sparse", [False, True])
def test_chosen_tokens_are_scored_at_chosen_places(
    base: tinker.SamplingClient, plain: reference.Reference, sparse: bool
) -> None:
    ids = torch.full((len(PROMPT) - 1, 3), -1, dtype=torch.int64)
    ids[3] = torch.tensor([9, 50, 96])
    ids[4, 1] = 12
    if sparse:
        tensor = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    else:
        tensor = types.TensorData.from_torch(ids)
    assert (tensor.sparse_crow_indices is not None) == sparse
    result = base.sample(prompt(), 1, params(max_tokens=1), target_prompt_logprobs=tensor).result()
    found = result.target_prompt_logprobs
    assert found is not None and found.shape == [len(PROMPT) - 1, 3]
    assert found.sparse_crow_indices == tensor.sparse_crow_indices
    assert found.sparse_col_indices == tensor.sparse_col_indices
    with torch.no_grad():
        wanted = plain.logprobs(PROMPT)
    scores = found.to_torch()
    for row in range(ids.shape[0]):
        for column, token in enumerate(ids[row].tolist()):
            right = 0.0 if token < 0 else float(wanted[row, token])
            assert abs(float(scores[row, column]) - right) <= CLOSE


def test_alternatives_are_drawn_from_the_model(
    base: tinker.SamplingClient, plain: reference.Reference
) -> None:
    count = 64
    result = base.sample(prompt(), 1, params(max_tokens=1), prompt_alt_tokens_k=count).result()
    drawn = result.prompt_alt_tokens
    assert drawn is not None
    tokens, scores = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    assert tokens.shape == scores.shape == (len(PROMPT) - 1, count)
    with torch.no_grad():
        wanted = plain.logprobs(PROMPT).numpy()
    for row in range(len(PROMPT) - 1):
        right = wanted[row, tokens[row]]
        assert np.abs(scores[row] - right).max() <= CLOSE
        assert len(set(tokens[row].tolist())) > 1
    # Likely tokens are drawn more often.
    assert float(np.exp(scores).mean()) > 1.05 * float(np.exp(wanted[:-1]).mean())


def test_samplers_of_a_model_keep_or_follow_its_weights(
    service: tinker.ServiceClient, training: tinker.TrainingClient, plain: reference.Reference, export: Export
) -> None:
    def step() -> None:
        training.forward_backward([datum(30, weights=weights)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()

    def scores(sampler: tinker.SamplingClient) -> list[float]:
        return sampler.compute_logprobs(prompt()).result()[1:]

    step()
    first = export(training)
    saved = training.save_weights_for_sampler("first").result().path
    snapshot = training.save_weights_and_get_sampling_client().result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    named = service.create_sampling_client(model_path=saved, base_model=serving.MODEL).result()
    with torch.no_grad():
        early = plain.logprobs(PROMPT, first)
    for sampler in (snapshot, inflight, named):
        check(PROMPT, 1, scores(sampler), early)
    step()
    later = training.save_weights_and_get_sampling_client(kind="inflight").result()
    with torch.no_grad():
        late = plain.logprobs(PROMPT, export(training))
    assert float((late - early).abs().max()) > 1e-3
    for sampler in (snapshot, named):
        check(PROMPT, 1, scores(sampler), early)
    for sampler in (inflight, later):
        check(PROMPT, 1, scores(sampler), late)
    assert snapshot.get_base_model() == serving.MODEL


def test_samplers_of_several_models_are_mixed(
    service: tinker.ServiceClient, plain: reference.Reference, export: Export
) -> None:
    samplers = []
    for seed in range(3):
        trained = service.create_lora_training_client(serving.MODEL, rank=2 + seed, seed=seed).result()
        trained.forward_backward([datum(40 + seed, weights=weights)], "cross_entropy").result()
        trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        samplers.append((trained.save_weights_and_get_sampling_client().result(), export(trained)))
    samplers.append((service.create_sampling_client(base_model=serving.ALIAS).result(), None))
    futures = [
        (sampler.sample(prompt(), 2, params()), adapter) for sampler, adapter in samplers for _ in range(3)
    ]
    for future, adapter in futures:
        for sequence in future.result().sequences:
            whole = PROMPT + sequence.tokens
            with torch.no_grad():
                wanted = plain.logprobs(whole, adapter)
            check(whole, len(PROMPT), sequence.logprobs, wanted)


def test_a_repeated_request_samples_once(server: serving.Server, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=serving.MODEL).result()
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    }
    with httpx.Client(base_url=server.url, headers={"X-API-Key": serving.ANN}, timeout=60) as client:
        first = client.post("/api/v1/asample", json=body).raise_for_status().json()
        again = client.post("/api/v1/asample", json=body).raise_for_status().json()
        assert first == again and len(first["sample_sequence_ids"]) == 1
        other = client.post("/api/v1/asample", json=body | {"num_samples": 2})
        assert other.status_code == 422, other.text
        results = [
            client.post("/api/v1/retrieve_future", json={"request_id": first["request_id"]})
            .raise_for_status()
            .json()
            for _ in range(2)
        ]
        assert results[0] == results[1] and len(results[0]["sequences"][0]["tokens"]) == 4
        # Another tenant does not see it.
        foreign = client.post(
            "/api/v1/retrieve_future",
            json={"request_id": first["request_id"]},
            headers={"X-API-Key": serving.BOB},
        )
        assert foreign.status_code == 404


def test_completions_are_listed(server: serving.Server, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=serving.MODEL).result()
    session = sampler._sampling_session_id
    ids = set()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": serving.ANN}, timeout=60) as client:
        for seq in range(3):
            body = {
                "sampling_session_id": session,
                "seq_id": seq,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
                "sampling_params": {"max_tokens": 2},
            }
            ids.add(client.post("/api/v1/asample", json=body).raise_for_status().json()["request_id"])
        seen: set[str] = set()
        cursor = 0
        target = {"type": "sampling_session", "sampling_session_id": session}
        while seen != ids:
            body = {"target": target, "prev_cursor": cursor}
            page = client.post("/api/v1/retrieve_futures", json=body).raise_for_status().json()
            assert page["cursor"] > cursor
            cursor = page["cursor"]
            assert all(done["state"] == "finished" for done in page["completions"])
            seen |= {done["request_id"] for done in page["completions"]}
        body = {"target": target, "prev_cursor": cursor, "timeout": 0, "retrieved_request_ids": sorted(ids)}
        page = client.post("/api/v1/retrieve_futures", json=body).raise_for_status().json()
        assert page["completions"] == []


def test_a_client_in_another_process_has_numbers_of_its_own(base: tinker.SamplingClient) -> None:
    handle = base.get_sampler_handle()
    clones = [tinker.SamplingClient.from_sampler_handle(handle, api_key=serving.ANN) for _ in range(2)]
    results = [clone.sample(prompt(), 1, params(max_tokens=2, seed=5)).result() for clone in clones]
    assert results[0].sequences[0].tokens == results[1].sequences[0].tokens
    ids = {result.sequences[0].sequence_id for result in results}
    assert len(ids) == 2
    counters = [clone._cloned_sampler_id for clone in clones]
    assert None not in counters and 0 not in counters and counters[0] != counters[1]


def test_an_abandoned_sample_is_cancelled(base: tinker.SamplingClient) -> None:
    future = base.sample(prompt(), 200, params(max_tokens=serving.CONTEXT - len(PROMPT)))
    future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    # The engine is free for others.
    assert len(base.sample(prompt(), 1, params(max_tokens=2)).result().sequences[0].tokens) == 2
