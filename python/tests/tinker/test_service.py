"""Clients, sessions, keys, refusals and limits, through the SDK and below it."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import numpy as np
import pytest
import serving
import tinker
import zstandard
from test_training import datum, weights
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

PROTOBUF = "application/x-protobuf"


@pytest.fixture(scope="module")
def http(server: serving.Server) -> Any:
    """Requests of the tenant ann without the SDK."""
    with httpx.Client(base_url=server.url, headers={"X-API-Key": serving.ANN}, timeout=60) as client:
        yield client


def test_models_are_listed_under_all_their_names(rest: tinker.RestClient) -> None:
    models = {model.model_name: model for model in rest.get_server_capabilities().result().supported_models}
    assert set(models) == {serving.MODEL, serving.ALIAS}
    for model in models.values():
        assert model.max_context_length == serving.CONTEXT and model.trainable and model.sampleable


def test_a_key_is_needed_and_can_be_a_bearer(server: serving.Server) -> None:
    path = f"{server.url}/api/v1/get_server_capabilities"
    for headers in ({}, {"X-API-Key": "tml-wrong-0123456789abcdef"}, {"Authorization": f"Basic {serving.ANN}"}):
        answer = httpx.get(path, headers=headers)
        assert answer.status_code == 401 and "X-API-Key" in answer.json()["detail"]
    assert httpx.get(path, headers={"Authorization": f"Bearer {serving.BOB}"}).status_code == 200
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong-0123456789abcdef").holder  # noqa: B018
    key = httpx.get(f"{server.url}/api/v1/auth/apikey/me", headers={"X-API-Key": serving.BOB}).json()
    assert key["name"] == "bob"


def test_sessions_are_kept_and_found(server: serving.Server, rest: tinker.RestClient) -> None:
    client = tinker.ServiceClient(
        {"purpose": "find me"}, base_url=server.url, api_key=serving.ANN, display_name="Blue Whale"
    )
    session = client.holder.get_session_id()
    made = client.create_lora_training_client(serving.MODEL, rank=1).result()
    sampler = client.create_sampling_client(base_model=serving.MODEL).result()
    assert session in rest.list_sessions(limit=50).result().sessions
    found = rest.get_session(session).result()
    assert found.training_run_ids == [made.model_id]
    assert found.sampler_ids == [sampler._sampling_session_id]
    assert found.user_metadata == {"purpose": "find me"} and found.display_name == "Blue Whale"
    assert rest.get_sampler(sampler._sampling_session_id).result().base_model == serving.MODEL
    with _silent():
        page = rest.search_sessions(types.SessionSearchRequest(display_name="whale blue")).result()
    assert [summary.session_id for summary in page.sessions] == [session]
    assert page.sessions[0].status is not None and page.sessions[0].status.type == "active"
    client.close("success", detail="done").result()
    finished = types.session_status_query.ClientFinishedSessionStatusQuery(reasons=["success"])
    with _silent():
        page = rest.search_sessions(types.SessionSearchRequest(session_id=session, statuses=[finished])).result()
    assert [summary.session_id for summary in page.sessions] == [session]


def _silent() -> Any:
    """Hides that the SDK calls its search experimental."""
    import warnings

    return warnings.catch_warnings(action="ignore")


def test_a_finished_session_takes_nothing_more(server: serving.Server, http: httpx.Client) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key=serving.ANN)
    session = client.holder.get_session_id()
    beat = {"session_id": session, "type": "session_heartbeat"}
    assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 200
    client.close("errored").result()
    assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 410
    body = {"session_id": session, "model_seq_id": 0, "base_model": serving.MODEL, "lora_config": {"rank": 1}}
    assert http.post("/api/v1/create_model", json=body).status_code in (410, 422)


def test_tenants_see_only_their_own(service: tinker.ServiceClient, server: serving.Server, training: Any) -> None:
    path = training.save_state("mine").result().path
    bob = tinker.RestClient(base_url=server.url, api_key=serving.BOB)
    with pytest.raises(tinker.NotFoundError):
        bob.get_training_run(training.model_id).result()
    with pytest.raises(tinker.NotFoundError):
        bob.get_weights_info_by_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        bob.delete_checkpoint_from_tinker_path(path).result()
    assert path not in {c.tinker_path for c in bob.list_user_checkpoints().result().checkpoints}
    with pytest.raises(tinker.NotFoundError):
        bob.get_session(service.holder.get_session_id()).result()


def test_names_that_are_not_served_are_refused_with_those_that_are(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.APIStatusError) as refused:
        service.create_lora_training_client("other/model").result()
    assert 400 <= refused.value.status_code < 500 and serving.ALIAS in str(refused.value)
    with pytest.raises(tinker.APIStatusError) as refused:
        service.create_sampling_client(base_model="other/model").result()
    assert 400 <= refused.value.status_code < 500 and serving.ALIAS in str(refused.value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("stable_reinforce", {}, "stable_reinforce"),
    ("custom", {"loss_id": "x"}, "custom"),
    ("ppo", {"clip": 0.2}, "clip"),
    ("dro", {}, "beta"),
]


@pytest.mark.parametrize(("name", "config", "named"), REFUSED)
def test_losses_that_cannot_be_computed_are_refused_by_name(
    training: tinker.TrainingClient, name: Any, config: dict[str, Any], named: str
) -> None:
    given = {key: np.zeros(9, np.float32) for key in ("logprobs", "advantages")}
    with pytest.raises(tinker.TinkerError, match=named):
        training.forward_backward([datum(1, **given)], name, config or None).result()


def test_a_refused_request_changes_nothing(service: tinker.ServiceClient) -> None:
    made = service.create_lora_training_client(serving.MODEL, rank=2, seed=3).result()
    good = datum(60, weights=weights)
    short = types.Datum(
        model_input=good.model_input,
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray([5], np.int64))},
    )
    with pytest.raises(tinker.TinkerError, match="target_tokens"):
        made.forward_backward([good, short], "cross_entropy").result()
    beyond = types.Datum(
        model_input=types.ModelInput.from_ints([serving.VOCABULARY]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray([5], np.int64))},
    )
    with pytest.raises(tinker.TinkerError, match=str(serving.VOCABULARY)):
        made.forward([beyond], "cross_entropy").result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    seen = types.Datum(model_input=image, loss_fn_inputs=short.loss_fn_inputs)
    with pytest.raises(tinker.RequestFailedError, match="image") as failed:
        made.forward([seen], "cross_entropy").result()
    assert failed.value.category is types.RequestErrorCategory.User
    # Later requests are carried out all the same.
    assert made.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] != 0.0
    assert made.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics is not None


def test_images_and_long_prompts_are_refused(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=serving.MODEL).result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)])
    with pytest.raises(tinker.UnprocessableEntityError, match="image"):
        sampler.sample(image, 1, types.SamplingParams(max_tokens=1)).result()
    long = types.ModelInput.from_ints([5] * (serving.CONTEXT + 1))
    with pytest.raises(tinker.TinkerError, match=str(serving.CONTEXT)):
        sampler.sample(long, 1, types.SamplingParams(max_tokens=1)).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="record_stability_info"):
        stable = service.create_sampling_client(base_model=serving.MODEL, record_stability_info=True).result()
        stable.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1)).result()


def test_parts_that_are_not_served_say_why(rest: tinker.RestClient, training: tinker.TrainingClient) -> None:
    path = training.save_state("private").result().path
    with pytest.raises(tinker.UnprocessableEntityError, match="publish"):
        rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="project"):
        rest.copy_weights(path, "some-project").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="log"):
        rest.export_session_trace("any").result()
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        training.optim_step(types.DimuonParams(learning_rate=0.1)).result()


def body(training: tinker.TrainingClient, seq: int) -> bytes:
    """A `forward_backward` request in protobuf."""
    batch = types.ForwardBackwardInput(data=[datum(61, weights=weights)], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(
        forward_backward_input=batch, model_id=training.model_id, seq_id=seq
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def test_bodies_are_packed_in_several_ways_and_done_once(
    training: tinker.TrainingClient, http: httpx.Client
) -> None:
    plain = body(training, 1)
    packed = {
        None: plain,
        "zstd": zstandard.ZstdCompressor().compress(plain),
        "gzip": gzip.compress(plain),
    }
    ids = set()
    for encoding, data in packed.items():
        headers = {"Content-Type": PROTOBUF} | ({"Content-Encoding": encoding} if encoding else {})
        answer = http.post("/api/v1/forward_backward", content=data, headers=headers)
        ids.add(answer.raise_for_status().json()["request_id"])
    assert len(ids) == 1
    (request_id,) = ids
    headers = {"Accept": PROTOBUF}
    result = http.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers=headers)
    assert result.headers["content-type"] == PROTOBUF
    message = pb.ForwardBackwardOutput.FromString(result.raise_for_status().content)
    assert message.loss_fn_outputs[0].num_datums == 1
    # The same place with other content is refused, and not as something to try again.
    changed = pb.ForwardBackwardRequest.FromString(plain)
    changed.forward_only = True
    headers = {"Content-Type": PROTOBUF}
    refused = http.post("/api/v1/forward_backward", content=changed.SerializeToString(), headers=headers)
    assert refused.status_code == 422, refused.text
    for headers, data, status in [
        ({"Content-Type": "text/plain"}, plain, 415),
        ({"Content-Type": PROTOBUF, "Content-Encoding": "br"}, plain, 415),
        ({"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}, plain, 422),
        ({"Content-Type": PROTOBUF}, b"\xff" * 40, 422),
    ]:
        answer = http.post("/api/v1/forward_backward", content=data, headers=headers)
        assert answer.status_code == status and answer.json()["detail"], answer.text
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (128 << 20))
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    assert http.post("/api/v1/forward_backward", content=bomb, headers=headers).status_code == 413


def test_json_is_understood_in_place_of_protobuf(training: tinker.TrainingClient, http: httpx.Client) -> None:
    one = datum(62, 4)
    data = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": one.model_input.to_ints()}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": one.loss_fn_inputs["target_tokens"].tolist(), "dtype": "int64"}
        },
    }
    batch = {"data": [data], "loss_fn": "cross_entropy"}
    request = {"model_id": training.model_id, "seq_id": 1, "forward_input": batch}
    made = http.post("/api/v1/forward", json=request).raise_for_status().json()
    result = http.post("/api/v1/retrieve_future", json={"request_id": made["request_id"]}).json()
    assert len(result["loss_fn_outputs"][0]["logprobs"]["data"]) == 4
    total = -sum(result["loss_fn_outputs"][0]["logprobs"]["data"])
    assert result["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_commands_wait_for_those_before_them(training: tinker.TrainingClient, http: httpx.Client) -> None:
    headers = {"Content-Type": PROTOBUF}
    second = http.post("/api/v1/forward_backward", content=body(training, 2), headers=headers).json()
    ask = {"request_id": second["request_id"], "allow_metadata_only": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/api/v1/retrieve_future", json=ask, timeout=1.0)
    http.post("/api/v1/forward_backward", content=body(training, 1), headers=headers).raise_for_status()
    done = http.post("/api/v1/retrieve_future", json=ask).raise_for_status().json()
    assert done["metrics"]["loss:sum"] != 0.0


def test_paths_that_do_not_exist_name_those_that_do(http: httpx.Client) -> None:
    answer = http.get("/api/v1/nothing")
    assert answer.status_code == 404 and "/api/v1/forward_backward" in answer.json()["detail"]
    assert http.get("/api/v1/forward_backward").status_code == 405
    unknown = http.post("/api/v1/retrieve_future", json={"request_id": "nothing"})
    assert unknown.status_code == 404 and "nothing" in unknown.json()["detail"]
    wrong = http.post("/api/v1/get_info", json={"model_id": 5})
    assert wrong.status_code == 422 and "model_id" in wrong.json()["detail"]


def test_a_full_model_is_trained_too(service: tinker.ServiceClient, http: httpx.Client) -> None:
    session = service.holder.get_session_id()
    number = service.holder.get_training_client_id()
    request = {"session_id": session, "model_seq_id": number, "base_model": serving.MODEL}
    made = http.post("/api/v1/create_model", json=request).raise_for_status().json()
    model = http.post("/api/v1/retrieve_future", json={"request_id": made["request_id"]}).json()["model_id"]
    info = types.GetInfoResponse.model_validate(http.post("/api/v1/get_info", json={"model_id": model}).json())
    assert info.is_lora is False and info.lora_rank is None
    trained = tinker.TrainingClient(service.holder, model_seq_id=number, model_id=model, info=info)
    losses = []
    for _ in range(4):
        losses.append(trained.forward_backward([datum(63)], "cross_entropy").result().metrics["loss:sum"])
        trained.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    assert losses[-1] < losses[0]
    sampler = trained.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()
    wanted = trained.forward(
        [
            types.Datum(
                model_input=types.ModelInput.from_ints([5, 6]),
                loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray([6, 7], np.int64))},
            )
        ],
        "cross_entropy",
    ).result()
    np.testing.assert_allclose(scores[1:], wanted.loss_fn_outputs[0]["logprobs"].data, atol=1e-5)


def test_many_requests_at_once(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=serving.MODEL).result()

    async def all_of_them() -> list[types.SampleResponse]:
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=3, stop=[])
        return await asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(300)))

    results = asyncio.run(all_of_them())
    assert len(results) == 300 and all(len(r.sequences[0].tokens) == 3 for r in results)
