"""A server that is killed: the clients continue, no step is lost, and none is done twice."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import reference
import serving
import tinker
import torch
from test_training import datum, weights
from tinker import types

# Kills of the server, and as many steps as they take.
KILLS = int(os.environ.get("SINEW_KILLS", "3"))
STEPS = 2 * KILLS


def run(training: tinker.TrainingClient, pause: float) -> list[float]:
    """Trains for some steps, and returns the losses and the log-probs of samples."""
    values = []
    for number in range(STEPS):
        # Two steps are in flight at a time.
        backward = training.forward_backward([datum(number, weights=weights)], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        values.append(backward.result().metrics["loss:sum"])
        step.result()
        sampler = training.save_weights_and_get_sampling_client().result()
        sample = sampler.sample(
            types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=3, seed=number, stop=[])
        ).result()
        values += [value for sequence in sample.sequences for value in sequence.logprobs or []]
        time.sleep(pause)
    return values


@pytest.mark.parametrize("kills", [KILLS])
def test_kills_change_nothing(model: Path, tmp_path: Path, kills: int) -> None:
    results = []
    for name, times in (("calm", 0), ("killed", kills)):
        server = serving.Server(tmp_path / name, model).start()
        service = tinker.ServiceClient(base_url=server.url, api_key=serving.ANN)
        rest = tinker.RestClient(base_url=server.url, api_key=serving.ANN)
        ended = threading.Event()

        def killer(server: serving.Server = server, times: int = times, ended: threading.Event = ended) -> None:
            for _ in range(times):
                if ended.wait(0.7):
                    return
                server.kill()
                server.start()

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            training = service.create_lora_training_client(serving.MODEL, rank=4, seed=2).result()
            values = run(training, 0.3)
        finally:
            ended.set()
            thread.join()
        # Nothing repeats the download of a file, so the server is not killed any more.
        saved = training.save_weights_external("end").result().path
        (folder := tmp_path / f"{name}-adapter").mkdir()
        for file, url in rest.get_external_weights_urls(saved).result().urls.items():
            urllib.request.urlretrieve(url, folder / file)
        service.close("success").result()
        server.stop()
        results.append((values, reference.Adapter(folder)))
    (calm, calm_adapter), (killed, killed_adapter) = results
    assert calm == killed
    for name, tensor in calm_adapter.tensors.items():
        assert torch.equal(tensor, killed_adapter.tensors[name]), name


def test_results_and_records_outlive_a_kill(model: Path, tmp_path: Path) -> None:
    server = serving.Server(tmp_path / "server", model).start()
    service = tinker.ServiceClient(base_url=server.url, api_key=serving.ANN)
    training = service.create_lora_training_client(serving.MODEL, rank=2, user_metadata={"k": "v"}).result()
    path = training.save_state("kept").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=2, seed=1, stop=[])
    before = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    server.kill()
    server.start()
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == before
    rest = tinker.RestClient(base_url=server.url, api_key=serving.ANN)
    assert rest.get_training_run(training.model_id).result().user_metadata == {"k": "v"}
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [path]
    assert training.forward_backward([datum(1)], "cross_entropy").result().metrics["loss:sum"] != 0.0
    service.close("success").result()
    server.stop()
