//! The service's routes over a real desk, with a tiny decoder as trainer and as engine.

use crate::served::{ANN, BOB, CONTEXT, MODEL, Served};
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;

/// A datum of three tokens, in JSON.
fn datum() -> Value {
    json!({
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [6, 7, 8], "dtype": "int64"},
            "weights": {"data": [1.0, 0.0, -0.5], "dtype": "float32"},
        },
    })
}

/// A `forward_backward` request in JSON.
fn train(model: &str, seq: u64) -> Value {
    let batch = json!({"data": [datum()], "loss_fn": "cross_entropy"});
    json!({"model_id": model, "seq_id": seq, "forward_backward_input": batch})
}

#[tokio::test]
async fn a_key_is_needed_and_paths_are_named() {
    let served = Served::new().await;
    let path = "/api/v1/get_server_capabilities";
    for key in ["", "tml-wrong-0123456789abcdef"] {
        let (status, body) = served.get(key, path).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        assert!(body["detail"].as_str().unwrap().contains("X-API-Key"));
    }
    let (status, body) = served.get(ANN, path).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(body["supported_models"][0]["model_name"], MODEL);
    assert_eq!(body["supported_models"][0]["max_context_length"], CONTEXT);
    let (status, body) = served.get("", "/api/v1/healthz").await;
    assert_eq!((status, body), (StatusCode::OK, json!({"status": "ok"})));
    let (status, body) = served.get(ANN, "/api/v1/nothing").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(body["detail"].as_str().unwrap().contains("/api/v1/asample"));
    let (status, _) = served.get(ANN, "/api/v1/asample").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    served.end().await;
}

#[tokio::test]
async fn clients_get_their_settings_and_their_telemetry_is_dropped() {
    let served = Served::new().await;
    let sdk = json!({"sdk_version": "0.38.0", "later": 1});
    let config = served.ok(ANN, "/api/v1/client/config", &sdk).await;
    assert_eq!(config["proto_compress_fwdbwd"], true);
    assert_eq!(config["pjwt_auth_enabled"], false);
    assert_eq!(config["custom_loss_server_side"], false);
    let dynamic = served.ok(ANN, "/api/v1/client/dynamic_config", &sdk).await;
    assert_eq!(dynamic["sample_cancel_enabled"], true);
    let events = json!({"events": [{"event": "GENERIC_EVENT"}], "platform": "x"});
    let dropped = served.ok(ANN, "/api/v1/telemetry", &events).await;
    assert_eq!(dropped, json!({"status": "accepted"}));
    served.end().await;
}

#[tokio::test]
async fn a_model_is_made_trained_and_described() {
    let served = Served::new().await;
    let session = served.session(ANN).await;
    let model = served.model(ANN, &session, 0).await;
    assert_eq!(model, format!("{session}:train:0"));
    let info = json!({"model_id": model});
    let info = served.ok(ANN, "/api/v1/get_info", &info).await;
    assert_eq!(info["model_data"]["model_name"], MODEL);
    assert_eq!(
        (&info["is_lora"], &info["lora_rank"]),
        (&json!(true), &json!(2))
    );

    let path = "/api/v1/forward_backward";
    let made = served.ok(ANN, path, &train(&model, 1)).await;
    let again = served.ok(ANN, path, &train(&model, 1)).await;
    assert_eq!(made["request_id"], again["request_id"]);
    let result = served.result(ANN, &made).await;
    let logprobs = &result["loss_fn_outputs"][0]["logprobs"]["data"];
    assert_eq!(logprobs.as_array().unwrap().len(), 3);
    assert!(result["metrics"]["loss:sum"].is_number());
    let mut other = train(&model, 1);
    other["forward_only"] = json!(true);
    let (status, body) = served.post(ANN, path, &other).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");

    let adam = json!({"learning_rate": 0.01});
    let step = json!({"model_id": model, "seq_id": 2, "adam_params": adam});
    let step = served.ok(ANN, "/api/v1/optim_step", &step).await;
    assert_eq!(served.result(ANN, &step).await["type"], "optim_step");

    let saved = json!({"model_id": model, "seq_id": 3, "path": "a"});
    let saved = served.ok(ANN, "/api/v1/save_weights", &saved).await;
    let path = served.result(ANN, &saved).await["path"].clone();
    assert_eq!(path, format!("tinker://{model}/weights/a"));
    let weights = json!({"tinker_path": path});
    let weights = served.ok(ANN, "/api/v1/weights_info", &weights).await;
    assert_eq!(weights["lora_rank"], 2);
    let run = format!("/api/v1/training_runs/{model}");
    let (status, run) = served.get(ANN, &run).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(run["last_checkpoint"]["checkpoint_id"], "weights/a");
    assert_eq!(run["model_owner"], "ann");
    served.end().await;
}

#[tokio::test]
async fn results_are_announced_waited_for_and_given_in_protobuf() {
    let served = Served::new().await;
    let session = served.session(ANN).await;
    let model = served.model(ANN, &session, 0).await;
    // The second command waits for the first.
    let path = "/api/v1/forward_backward";
    let second = served.ok(ANN, path, &train(&model, 2)).await;
    let ask = json!({"request_id": second["request_id"], "allow_metadata_only": true});
    let retrieve = "/api/v1/retrieve_future";
    let (status, body) = served.post(ANN, retrieve, &ask).await;
    assert_eq!(status, StatusCode::REQUEST_TIMEOUT);
    assert_eq!(
        (&body["type"], &body["queue_state"]),
        (&json!("try_again"), &json!("active"))
    );
    let first = served.ok(ANN, path, &train(&model, 1)).await;
    served.result(ANN, &first).await;
    served.result(ANN, &second).await;
    // This server announces results of more than one byte.
    let (kind, bytes) = served.protobuf(ANN, &ask).await;
    assert_eq!(kind, "application/json");
    let announced: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(announced["status"], "complete_metadata");
    let whole = json!({"request_id": second["request_id"]});
    let (kind, bytes) = served.protobuf(ANN, &whole).await;
    assert_eq!(kind, "application/x-protobuf");
    assert_eq!(announced["response_payload_size"], bytes.len());
    // Only the tenant that asked sees it.
    let (status, _) = served.post(BOB, retrieve, &whole).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    served.end().await;
}

#[tokio::test]
async fn a_wrong_command_fails_at_its_turn_and_those_after_it_run() {
    let served = Served::new().await;
    let session = served.session(ANN).await;
    let model = served.model(ANN, &session, 0).await;
    let mut image = train(&model, 1);
    let chunks = json!([{"type": "image", "data": "", "format": "png"}]);
    image["forward_backward_input"]["data"][0]["model_input"]["chunks"] = chunks;
    let path = "/api/v1/forward_backward";
    let wrong = served.ok(ANN, path, &image).await;
    let muon = json!({"type": "dimuon", "learning_rate": 1.0});
    let muon = json!({"model_id": model, "seq_id": 2, "optimizer_params": muon});
    let step = served.ok(ANN, "/api/v1/optim_step", &muon).await;
    let right = served.ok(ANN, path, &train(&model, 3)).await;
    served.result(ANN, &right).await;
    for (made, named) in [(wrong, "image"), (step, "dimuon")] {
        let ask = json!({"request_id": made["request_id"]});
        let failed = served.ok(ANN, "/api/v1/retrieve_future", &ask).await;
        assert_eq!(failed["category"], "user");
        assert!(
            failed["error"].as_str().unwrap().contains(named),
            "{failed}"
        );
    }
    // Without a place, there is nothing that could wait.
    let (status, _) = served.post(ANN, path, &json!({"model_id": model})).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    served.end().await;
}

#[tokio::test]
async fn samples_are_named_repeated_and_listed() {
    let served = Served::new().await;
    let session = served.session(ANN).await;
    let sampler = json!({
        "session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL,
    });
    let create = "/api/v1/create_sampling_session";
    let sampler = served.ok(ANN, create, &sampler).await["sampling_session_id"].clone();
    assert_eq!(sampler, format!("{session}:sample:0"));
    let ask = json!({
        "sampling_session_id": sampler, "seq_id": 0, "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 3, "stop": []}, "prompt_logprobs": true,
    });
    let made = served.ok(ANN, "/api/v1/asample", &ask).await;
    assert_eq!(made["sample_sequence_ids"].as_array().unwrap().len(), 2);
    assert_eq!(served.ok(ANN, "/api/v1/asample", &ask).await, made);
    let result = served.result(ANN, &made).await;
    assert_eq!(result["sequences"].as_array().unwrap().len(), 2);
    assert_eq!(
        result["sequences"][0]["tokens"].as_array().unwrap().len(),
        3
    );
    assert_eq!(result["prompt_logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(result["prompt_logprobs"][0], Value::Null);
    let target = json!({"type": "sampling_session", "sampling_session_id": sampler});
    let listed = json!({"target": target});
    let listed = served.ok(ANN, "/api/v1/retrieve_futures", &listed).await;
    assert_eq!(listed["completions"][0]["request_id"], made["request_id"]);
    assert_eq!(listed["completions"][0]["state"], "finished");
    let join = json!({"sampling_session_id": sampler});
    let joined = served.ok(ANN, "/api/v1/join_sampling_session", &join).await;
    assert_eq!(joined["client_counter"], 1);
    served.end().await;
}

#[tokio::test]
async fn an_export_is_fetched_without_a_key_by_its_signed_address_only() {
    let served = Served::new().await;
    let session = served.session(ANN).await;
    let model = served.model(ANN, &session, 0).await;
    let ask = json!({"model_id": model, "seq_id": 1, "path": "out"});
    let made = served.ok(ANN, "/api/v1/save_weights_external", &ask).await;
    let path = served.result(ANN, &made).await["path"].clone();
    assert_eq!(path, format!("tinker://{model}/external_weights/out"));
    let of_run = format!("/api/v1/training_runs/{model}/checkpoints/external_weights/out");
    let (status, urls) = served
        .get(ANN, &format!("{of_run}/external_weights_urls"))
        .await;
    assert_eq!(status, StatusCode::OK, "{urls}");
    let url = urls["urls"]["adapter_config.json"].as_str().unwrap();
    let place = url.strip_prefix("http://train.example").unwrap();
    let (status, config) = served.get("", place).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(config["r"], 2);
    let other = place.replace("adapter_config.json", "adapter_model.safetensors");
    let (status, _) = served.get("", &other).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let (status, _) = served
        .get(BOB, &format!("{of_run}/external_weights_urls"))
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (status, _) = served.send(ANN, "DELETE", &of_run, None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let (status, _) = served.get("", place).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    served.end().await;
}

#[tokio::test]
async fn what_is_not_served_says_why() {
    let served = Served::new().await;
    let session = served.session(ANN).await;
    let empty = json!({});
    let project = format!("/api/v1/sessions/{session}/project");
    for (path, named) in [
        ("/api/v1/create_custom_loss", "custom losses"),
        ("/api/v1/auth/token", "keys"),
        (project.as_str(), "project"),
    ] {
        let (status, body) = served.post(ANN, path, &empty).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{path}");
        assert!(body["detail"].as_str().unwrap().contains(named), "{body}");
    }
    let new = json!({"tags": [], "sdk_version": "x", "project_id": "p"});
    let (status, body) = served.post(ANN, "/api/v1/create_session", &new).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(body["detail"].as_str().unwrap().contains("project_id"));
    let muon = json!({"type": "dimuon"});
    let ask = json!({
        "session_id": session, "model_seq_id": 0, "base_model": MODEL, "optimizer_config": muon,
    });
    let (status, body) = served.post(ANN, "/api/v1/create_model", &ask).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        body["detail"].as_str().unwrap().contains("dimuon"),
        "{body}"
    );
    served.end().await;
}

#[tokio::test]
async fn a_session_is_found_finished_and_closed_to_more() {
    let served = Served::new().await;
    let about = json!({
        "tags": [], "sdk_version": "x", "display_name": "Blue Whale",
        "user_metadata": {"k": "v", "n": 1},
    });
    let made = served.ok(ANN, "/api/v1/create_session", &about).await;
    let session = made["session_id"].as_str().unwrap().to_owned();
    served.session(ANN).await;
    let ask = json!({"display_name": "whale"});
    let found = served.ok(ANN, "/api/v1/sessions/search", &ask).await;
    assert_eq!(found["sessions"].as_array().unwrap().len(), 1);
    assert_eq!(found["sessions"][0]["session_id"], session);
    assert_eq!(found["sessions"][0]["user_metadata"]["n"], "1");
    let page = json!({"limit": 1});
    let first = served.ok(ANN, "/api/v1/sessions/search", &page).await;
    let next = json!({"limit": 1, "cursor": first["next_cursor"]});
    let second = served.ok(ANN, "/api/v1/sessions/search", &next).await;
    assert_eq!(second["sessions"][0]["session_id"], session);
    assert_eq!(second["next_cursor"], Value::Null);
    let beat = json!({"session_id": session});
    served.ok(ANN, "/api/v1/session_heartbeat", &beat).await;
    let finish = format!("/api/v1/sessions/{session}/finish");
    let end = json!({"reason": {"type": "success"}, "detail": null});
    let (status, _) = served.post(ANN, &finish, &end).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let (status, _) = served.post(ANN, "/api/v1/session_heartbeat", &beat).await;
    assert_eq!(status, StatusCode::GONE);
    let (status, page) = served.get(ANN, "/api/v1/sessions?limit=1").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(page["sessions"].as_array().unwrap().len(), 1);
    for query in ["limit=0", "limit=x", "project_id=p"] {
        let path = format!("/api/v1/sessions?{query}");
        let (status, _) = served.get(ANN, &path).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{query}");
    }
    served.end().await;
}

#[tokio::test]
async fn a_wait_ends_when_the_server_does() {
    let served = Served::waiting(Duration::from_secs(600)).await;
    let session = served.session(ANN).await;
    let model = served.model(ANN, &session, 0).await;
    let second = served
        .ok(ANN, "/api/v1/forward_backward", &train(&model, 2))
        .await;
    let ask = json!({"request_id": second["request_id"]});
    let waits = served.post(ANN, "/api/v1/retrieve_future", &ask);
    let ends = async {
        tokio::task::yield_now().await;
        served.stop();
    };
    let ((status, _), ()) = tokio::join!(waits, ends);
    assert_eq!(status, StatusCode::REQUEST_TIMEOUT);
    served.end().await;
}
