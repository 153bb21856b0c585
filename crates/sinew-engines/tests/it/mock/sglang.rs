//! Endpoints of SGLang 0.5.

use super::generate::{Piece, logprob, sampling_of, score, stream_of, told_id};
use super::serve::{Answer, Call, error, json_answer, unknown_field, whole};
use super::{AsksFor, CONTEXT, Fault, Keeping, Kind, State, VOCAB, load_folder};
use serde_json::{Value, json};
use sinew_types::{
    AdapterName, Engine, FinishReason, PromptLogprobs, SampledToken, TokenId, TokenLogprob,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FIELDS: &[&str] = &[
    "rid",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "stream",
    "priority",
    "return_prompt_token_ids",
    "lora_path",
    "token_ids_logprob",
];
const SAMPLING_FIELDS: &[&str] = &[
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop_token_ids",
    "stop",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "sampling_seed",
];

pub(super) fn answer(state: &Arc<State>, call: Call) -> Answer {
    let label = state.label.lock().unwrap().clone();
    let noisy = call.method == hyper::Method::POST && call.path != "/generate";
    if noisy && !call.path.contains("lora") {
        let label = call.body["new_version"].as_str();
        let tags = call.body["tags"].as_array();
        let tags = tags.map(|tags| format!(" {}", json!(tags)));
        let more = label.map(|l| format!(" {l}")).or(tags).unwrap_or_default();
        state.note(format!("{}{more}", call.path));
    }
    match call.path.as_str() {
        "/health" if state.sleeping.load(Ordering::SeqCst) => error(503, "asleep"),
        "/health" => whole(200, "text/plain", String::new()),
        "/model_info" => json_answer(&json!({ "model_path": "/models/tiny",
            "is_generation": true, "weight_version": label })),
        "/server_info" => json_answer(&json!({ "context_length": CONTEXT,
            "max_total_num_tokens": state.engine.status().kv_tokens_total,
            "max_req_input_len": CONTEXT - 1, "version": "0.5.23" })),
        "/metrics" => whole(200, "text/plain", metrics(state)),
        "/generate" => generate(state, call.body),
        "/flush_cache" => whole(200, "text/plain", "Cache flushed.\n".to_owned()),
        "/abort_request" => {
            if call.body["rid"].is_string() {
                state.aborted_by_name.fetch_add(1, Ordering::SeqCst);
            }
            whole(200, "text/plain", String::new())
        }
        "/update_weight_version" => {
            let new = call.body["new_version"].as_str().unwrap_or_default();
            *state.label.lock().unwrap() = new.to_owned();
            json_answer(&json!({ "success": true, "new_version": new }))
        }
        "/update_weights_from_disk" => update_weights(state, &call.body),
        "/v1/models" => models(state),
        path if path.contains("lora_adapter") => adapters(state, &call),
        path if path.contains("memory_occupation") => memory(state, &call),
        _ => control(state, &call),
    }
}

/// Pauses and sums of weights.
fn control(state: &State, call: &Call) -> Answer {
    match call.path.as_str() {
        "/pause_generation" => {
            let keeping = *state.keeping.lock().unwrap();
            match (call.body["mode"].as_str(), keeping) {
                (_, Keeping::Refuses) => return error(404, "Not Found"),
                (Some("retract"), Keeping::Keeps) => state.frozen.store(true, Ordering::SeqCst),
                _ => {
                    state.aborts.fetch_add(1, Ordering::SeqCst);
                }
            }
            json_answer(&json!({ "status": "ok", "message": "Generation paused successfully." }))
        }
        "/continue_generation" => {
            state.frozen.store(false, Ordering::SeqCst);
            json_answer(&json!({ "status": "ok", "message": "Generation continued successfully." }))
        }
        "/weights_checker" if state.no_sums.load(Ordering::SeqCst) => {
            let body = json!({ "success": false, "message": "unknown action" });
            whole(400, "application/json", body.to_string())
        }
        "/weights_checker" if call.body["action"] == "checksum" => {
            let own = json!({ "checksums": { "number": state.sum() }, "per_gpu_checksum": "0" });
            json_answer(&json!({ "success": true, "message": "", "ranks": [own] }))
        }
        _ => error(404, "Not Found"),
    }
}

/// The model and, in newer servers, its adapters.
fn models(state: &State) -> Answer {
    let mut list = vec![json!({ "id": "tiny", "object": "model", "owned_by": "sglang" })];
    if !state.hides_adapters.load(Ordering::SeqCst) {
        let adapters = state.adapters.lock().unwrap();
        let card = |name: &String| json!({ "id": name, "parent": "tiny" });
        list.extend(adapters.keys().map(card));
    }
    json_answer(&json!({ "object": "list", "data": list }))
}

/// Loads and removes adapters.
fn adapters(state: &State, call: &Call) -> Answer {
    if !state.lora.load(Ordering::SeqCst) {
        let why = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.";
        return outcome(Err(why.to_owned()));
    }
    if call.path == "/load_lora_adapter" {
        return outcome(state.load_adapter(&call.body));
    }
    let removed = state.unload_adapter(&call.body).then_some(());
    outcome(removed.ok_or_else(|| "it is not loaded".to_owned()))
}

/// Gives memory up, or takes it back.
fn memory(state: &State, call: &Call) -> Answer {
    let tags = call.body["tags"].as_array().cloned().unwrap_or_default();
    let tags: Vec<&str> = tags.iter().filter_map(Value::as_str).collect();
    if call.path == "/release_memory_occupation" {
        state.give_up(&tags);
    } else {
        tags.iter().for_each(|tag| state.take_back(tag));
    }
    whole(200, "application/json", "null".to_owned())
}

/// The answer to a command on adapters.
fn outcome(result: Result<(), String>) -> Answer {
    let status = if result.is_ok() { 200 } else { 400 };
    let body = json!({ "success": result.is_ok(), "error_message": result.err() });
    whole(status, "application/json", body.to_string())
}

fn update_weights(state: &Arc<State>, body: &Value) -> Answer {
    let path = body["model_path"].as_str().unwrap_or_default();
    if body["abort_all_requests"] != false {
        state.aborts.fetch_add(1, Ordering::SeqCst);
    }
    match load_folder(state, path) {
        Ok(()) => {
            let label = body["weight_version"].as_str().unwrap_or("default");
            *state.label.lock().unwrap() = label.to_owned();
            json_answer(
                &json!({ "success": true, "message": "Succeeded", "num_paused_requests": 0 }),
            )
        }
        Err(why) => {
            let body = json!({ "success": false, "message": why, "num_paused_requests": 0 });
            whole(400, "application/json", body.to_string())
        }
    }
}

fn metrics(state: &State) -> String {
    let status = state.engine.status();
    let own = (status.kv_tokens_total - status.kv_tokens_free) as f64;
    let told = *state.kv_used.lock().unwrap() * status.kv_tokens_total as f64;
    let l = "{model_name=\"tiny\",engine_type=\"unified\",tp_rank=\"0\"}";
    format!(
        "sglang:num_running_reqs{l} {}.0\nsglang:num_queue_reqs{l} {}.0\n\
         sglang:num_used_tokens{l} {}\nsglang:generation_tokens_total{l} {}.0\n",
        status.running,
        status.waiting,
        own.max(told),
        status.sampled_tokens,
    )
}

fn generate(state: &Arc<State>, body: Value) -> Answer {
    let params = body["sampling_params"].clone();
    let unknown = unknown_field(&body, FIELDS).or(unknown_field(&params, SAMPLING_FIELDS));
    if let Some(field) = unknown {
        return error(400, &format!("unknown field {field}"));
    }
    if state.sleeping.load(Ordering::SeqCst) {
        return error(503, "asleep");
    }
    let list = body["input_ids"].as_array().cloned().unwrap_or_default();
    let prompt: Vec<u32> = list.iter().map(|v| v.as_u64().unwrap() as u32).collect();
    let asked = prompt.len() as u64 + params["max_new_tokens"].as_u64().unwrap_or(128);
    if asked > CONTEXT as u64 || prompt.iter().any(|id| *id as usize >= VOCAB) {
        return error(400, "exceeds the context length or the vocabulary");
    }
    let adapter = body["lora_path"].as_str();
    if let Some(name) = adapter
        && !state.adapters.lock().unwrap().contains_key(name)
    {
        let why = format!("The following requested LoRA adapters are not loaded: {name}");
        return error(400, &why);
    }
    if body["stream"] == false {
        return prompt_logprobs(state, &prompt, &body);
    }
    let asks = AsksFor::new(state, adapter.unwrap_or("tiny"));
    let adapter = adapter_of(&body);
    state.seen.lock().unwrap().push(body.clone());
    let mut sampling = sampling_of(&params, "max_new_tokens");
    sampling.seed = params["sampling_seed"].as_u64().unwrap_or(0);
    sampling.top_logprobs = body["top_logprobs_num"].as_u64().unwrap_or(0) as u8;
    let incremental = state.kind == Kind::SglangIncremental;
    let rid = body["rid"].clone();
    let write = move |state: &State, piece: &Piece| {
        let _ = &asks;
        let told = if incremental { &piece.new } else { &piece.all };
        let entry = |t: &SampledToken| json!([logprob(piece, t), told_id(piece, t), null]);
        let tops = |t: &SampledToken| {
            let top = t.top.iter().map(|c| json!([c.logprob, c.id, null]));
            top.collect::<Vec<_>>()
        };
        let mut logprobs: Vec<_> = told.iter().map(entry).collect();
        if piece.fault == Some(Fault::NoLogprobs) {
            logprobs.pop();
        }
        let finish = piece.end.as_ref().map(finish);
        let spans = state.spans.load(Ordering::SeqCst).then(|| piece.versions());
        json!({ "text": null, "output_ids": told.iter().map(|t| t.id).collect::<Vec<_>>(),
            "prompt_token_ids": piece.prompt,
            "meta_info": { "id": rid, "finish_reason": finish,
                "prompt_tokens": piece.prompt.len(), "completion_tokens": piece.all.len(),
                "cached_tokens": piece.cached, "num_retractions": 0,
                "weight_version": *state.label.lock().unwrap(),
                "weight_versions": spans.unwrap_or_else(|| json!([])),
                "output_token_logprobs": logprobs,
                "output_token_logprobs_length": piece.all.len(),
                "output_top_logprobs": told.iter().map(tops).collect::<Vec<_>>() } })
    };
    stream_of(
        state,
        (prompt, adapter),
        sampling,
        Box::new(write),
        Vec::new(),
    )
}

/// The adapter that a request names.
fn adapter_of(body: &Value) -> Option<AdapterName> {
    let name = body["lora_path"].as_str();
    name.map(|name| AdapterName::new(name).unwrap())
}

/// Log-probabilities of a prompt from `logprob_start_len` on; the first place is empty.
fn prompt_logprobs(state: &State, prompt: &[u32], body: &Value) -> Answer {
    state.scored.lock().unwrap().push(body.clone());
    let start = body["logprob_start_len"].as_u64().unwrap() as usize;
    let targets: Vec<TokenId> = body["token_ids_logprob"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|id| id.as_u64().unwrap() as TokenId)
        .collect();
    let asked = PromptLogprobs {
        last: Some((prompt.len() - 1 - start) as u32),
        top: body["top_logprobs_num"].as_u64().unwrap() as u8,
        targets: vec![targets.clone(); prompt.len() - 1],
    };
    let scored = score(state, prompt, asked, adapter_of(body));
    let entry = |logprob: f32, id: TokenId| json!([logprob, id, null]);
    let entries =
        |all: &[TokenLogprob]| -> Value { all.iter().map(|t| entry(t.logprob, t.id)).collect() };
    let own = scored
        .iter()
        .map(|p| entry(p.logprob, prompt[p.position as usize]));
    let own: Vec<_> = [json!([null, prompt[start], null])]
        .into_iter()
        .chain(own)
        .collect();
    let top = scored.iter().map(|p| entries(&p.top));
    let top: Vec<_> = [Value::Null].into_iter().chain(top).collect();
    let others = scored.iter().map(|p| -> Value {
        let pairs = p.targets.iter().zip(&targets);
        pairs.map(|(logprob, id)| entry(*logprob, *id)).collect()
    });
    let others: Vec<_> = [Value::Null].into_iter().chain(others).collect();
    json_answer(
        &json!({ "text": null, "output_ids": [1], "prompt_token_ids": prompt,
        "meta_info": { "id": body["rid"], "finish_reason": { "type": "length", "length": 1 },
            "prompt_tokens": prompt.len(), "completion_tokens": 1, "cached_tokens": 0,
            "weight_version": *state.label.lock().unwrap(),
            "input_token_logprobs": own, "input_top_logprobs": top,
            "input_token_ids_logprobs": others } }),
    )
}

fn finish(end: &FinishReason) -> Value {
    match end {
        FinishReason::StopId { id } => json!({ "type": "stop", "matched": id }),
        FinishReason::StopString { text } => json!({ "type": "stop", "matched": text }),
        FinishReason::Length | FinishReason::ContextFull => {
            json!({ "type": "length", "length": 1 })
        }
        FinishReason::Aborted => json!({ "type": "abort", "message": "Aborted",
            "status_code": null, "err_type": null }),
    }
}
