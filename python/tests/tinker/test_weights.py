"""States and samplers that are saved, loaded, listed, exported and deleted, through the SDK."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import serving
import tinker
import torch
from test_training import datum, weights
from tinker import types

Export = Callable[..., reference.Adapter]
STEP = types.AdamParams(learning_rate=1e-2)


def step(training: tinker.TrainingClient, seed: int = 50) -> None:
    """One ordinary step."""
    training.forward_backward([datum(seed, weights=weights)], "cross_entropy").result()
    training.optim_step(STEP).result()


def same(first: reference.Adapter, second: reference.Adapter) -> bool:
    """Whether all tensors are equal to the bit."""
    return all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def test_a_loaded_state_continues_to_the_bit(
    service: tinker.ServiceClient, training: tinker.TrainingClient, export: Export
) -> None:
    step(training)
    saved = training.save_state("000001", user_metadata={"note": "x"}).result().path
    assert saved == f"tinker://{training.model_id}/weights/000001"
    step(training, 51)
    ahead = export(training)
    with_moments = service.create_training_client_from_state_with_optimizer(saved).result()
    step(with_moments, 51)
    assert same(ahead, export(with_moments))
    fresh = service.create_training_client_from_state(saved, user_metadata={"renderer_name": "r"}).result()
    assert fresh.get_info().lora_rank == 4 and fresh.get_info().model_data.model_name == serving.MODEL
    step(fresh, 51)
    # Without its moments the optimizer takes another step.
    assert not same(ahead, export(fresh))
    # The same weights under another name of the same model.
    other = service.create_training_client_from_state_with_optimizer(saved, base_model=serving.ALIAS).result()
    step(other, 51)
    assert same(ahead, export(other))
    # Onto the model that wrote it.
    training._load_state_impl(saved, optimizer=True, weights_access_token=None).result()
    step(training, 51)
    assert same(ahead, export(training))


def test_names_are_kept_apart_and_replaced_only_if_asked(
    training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    step(training)
    state = training.save_state("final").result().path
    sampler = training.save_weights_for_sampler("final", ttl_seconds=7200).result().path
    assert state != sampler
    with pytest.raises(tinker.TinkerError, match="final"):
        training.save_state("final").result()
    again = training.save_state("final", overwrite=True, user_metadata={"k": "2"}).result().path
    assert again == state
    found = {c.tinker_path: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
    assert set(found) == {state, sampler}
    assert found[state].checkpoint_type == "training" and found[state].user_metadata == {"k": "2"}
    assert found[sampler].checkpoint_type == "sampler" and found[sampler].expires_at is not None
    assert found[state].expires_at is None and (found[state].size_bytes or 0) > 0
    rest.set_checkpoint_ttl_from_tinker_path(sampler, None).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    found = {c.tinker_path: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
    assert found[sampler].expires_at is None and found[state].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(state).result()
    left = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [c.tinker_path for c in left] == [sampler]
    everything = rest.list_user_checkpoints(limit=500).result()
    assert sampler in {c.tinker_path for c in everything.checkpoints}
    assert everything.cursor is not None and everything.cursor.total_count >= 1


def test_records_of_runs_and_weights(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    made = service.create_lora_training_client(
        serving.ALIAS, rank=3, train_attn=False, user_metadata={"renderer_name": "qwen3"}
    ).result()
    info = made.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (serving.ALIAS, 3, True)
    path = made.save_state("x").result().path
    weights_info = rest.get_weights_info_by_tinker_path(path).result()
    assert (weights_info.base_model, weights_info.lora_rank) == (serving.ALIAS, 3)
    assert (weights_info.train_attn, weights_info.train_mlp) == (False, True)
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.training_run_id == made.model_id and run.base_model == serving.ALIAS
    assert run.user_metadata == {"renderer_name": "qwen3"} and run.model_owner == "ann"
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == path
    listed = rest.list_training_runs(limit=1).result()
    assert len(listed.training_runs) == 1 and listed.cursor.total_count > 1
    used = tinker.AdminClient(base_url=service.holder._base_url, api_key=serving.ANN)
    storage = used.get_current_checkpoint_storage_usage().result()
    assert storage.data[0].checkpoint_count >= 1 and storage.data[0].size_bytes > 0


def test_an_export_is_read_by_peft(
    training: tinker.TrainingClient,
    rest: tinker.RestClient,
    model: Path,
    plain: reference.Reference,
    tmp_path: Path,
) -> None:
    import peft
    import transformers

    step(training)
    saved = training.save_weights_external("export", ttl_seconds=3600).result().path
    assert saved == f"tinker://{training.model_id}/external_weights/export"
    urls = rest.get_external_weights_urls(saved).result()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls.urls)
    for name, url in urls.urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    # PEFT loads the head's adapter on a model whose head is not tied.
    adapted = peft.PeftModel.from_pretrained(loaded, tmp_path, autocast_adapter_dtype=False).double()
    tokens = [7, 30, 12, 55]
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor([tokens])).logits[0]
        found = torch.log_softmax(logits, dim=-1)
        wanted = plain.logprobs(tokens, reference.Adapter(tmp_path))
    assert float((found - wanted).abs().max()) <= 1e-6
    # The address holds for one file, and only as it was signed.
    url = urls.urls["adapter_config.json"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.replace("adapter_config.json", "adapter_model.safetensors"))
    rest.delete_checkpoint_from_tinker_path(saved).result()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url)


def test_a_copy_is_a_checkpoint_of_its_own(
    service: tinker.ServiceClient, training: tinker.TrainingClient, rest: tinker.RestClient, export: Export
) -> None:
    step(training)
    source = training.save_state("source").result().path
    request = types.CopyWeightsRequest(
        session_id=service.holder.get_session_id(),
        model_seq_id=service.holder.get_training_client_id(),
        source_path=source,
    )
    copied = rest._copy_weights_submit(request, None).result()
    assert copied != source
    rest.delete_checkpoint_from_tinker_path(source).result()
    loaded = service.create_training_client_from_state(copied).result()
    assert same(export(training), export(loaded))


def test_checkpoints_outlive_the_session_that_wrote_them(server: serving.Server, export: Export) -> None:
    paths: dict[str, str] = {}
    first = tinker.ServiceClient(base_url=server.url, api_key=serving.ANN)
    trained = first.create_lora_training_client(serving.MODEL, rank=2, seed=1).result()
    step(trained)
    before = export(trained)
    paths["state"] = trained.save_state("final").result().path
    paths["sampler"] = trained.save_weights_for_sampler("final").result().path
    first.close("success").result()
    second = tinker.ServiceClient(base_url=server.url, api_key=serving.ANN)
    loaded = second.create_training_client_from_state(paths["state"]).result()
    assert same(before, export(loaded))
    sampler = second.create_sampling_client(model_path=paths["sampler"]).result()
    assert sampler.get_base_model() == serving.MODEL
    assert sampler.compute_logprobs(types.ModelInput.from_ints([5, 6])).result()[0] is None
    second.close("success").result()
