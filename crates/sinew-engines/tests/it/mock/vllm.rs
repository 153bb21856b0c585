//! Endpoints of vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1` and `--enable-scale-out`.

use super::generate::{Piece, logprob, sampling_of, score, stream_of, told_id};
use super::serve::{Answer, Call, error, json_answer, unknown_field, whole};
use super::{AsksFor, CONTEXT, Fault, Keeping, State, VOCAB, load_folder};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::Method;
use serde_json::{Map, Value, json};
use sinew_types::{AdapterName, Engine, FinishReason, PromptLogprobs, SampledToken};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const COMPLETION_FIELDS: &[&str] = &[
    "model",
    "prompt",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "cache_salt",
    "prompt_logprobs",
];
const GENERATE_FIELDS: &[&str] = &[
    "request_id",
    "token_ids",
    "sampling_params",
    "model",
    "stream",
    "stream_options",
    "cache_salt",
    "priority",
    "return_token_ids",
];

pub(super) fn answer(state: &Arc<State>, call: Call) -> Answer {
    let post = call.method == Method::POST;
    match (post, call.path.as_str()) {
        (false, "/health") => whole(200, "text/plain", String::new()),
        (false, "/v1/models") => models(state),
        (false, "/metrics") => whole(200, "text/plain", metrics(state)),
        (true, "/v1/completions") => completions(state, call.body),
        (true, "/inference/v1/generate") => generate(state, call.body),
        (true, "/v1/load_lora_adapter" | "/v1/unload_lora_adapter")
            if !state.lora.load(Ordering::SeqCst) =>
        {
            error(404, "Not Found")
        }
        (true, "/v1/load_lora_adapter") => match state.load_adapter(&call.body) {
            Ok(()) => whole(200, "text/plain", "Success".to_owned()),
            Err(why) => error(400, &why),
        },
        (true, "/v1/unload_lora_adapter") if state.unload_adapter(&call.body) => {
            whole(200, "text/plain", "Success".to_owned())
        }
        (true, "/v1/unload_lora_adapter") => error(404, "cannot be found"),
        _ if state.bare.load(Ordering::SeqCst) => error(404, "Not Found"),
        _ => development(state, &call),
    }
}

/// The model and its adapters.
fn models(state: &State) -> Answer {
    let mut list = vec![
        json!({ "id": "tiny", "object": "model", "created": 1, "owned_by": "vllm",
        "root": "/models/tiny", "parent": null, "max_model_len": CONTEXT }),
    ];
    for (name, path) in &*state.adapters.lock().unwrap() {
        list.push(json!({ "id": name, "object": "model", "root": path, "parent": "tiny" }));
    }
    json_answer(&json!({ "object": "list", "data": list }))
}

/// Whether a request names the model or one of its adapters.
fn has_model(state: &State, body: &Value) -> bool {
    let name = body["model"].as_str().unwrap_or_default();
    name == "tiny" || state.adapters.lock().unwrap().contains_key(name)
}

/// The adapter that a request names as its model.
fn adapter(body: &Value) -> Option<AdapterName> {
    let name = body["model"].as_str().filter(|name| *name != "tiny");
    name.map(|name| AdapterName::new(name).unwrap())
}

/// Log-probabilities of a prompt: at each place its own token and the most likely ones.
fn prompt_logprobs(state: &State, prompt: &[u32], body: &Value) -> Answer {
    if body["stream"] == true {
        return error(
            400,
            "`prompt_logprobs` are not available when `stream=True`.",
        );
    }
    state.scored.lock().unwrap().push(body.clone());
    let asked = PromptLogprobs {
        top: body["prompt_logprobs"].as_u64().unwrap() as u8,
        ..PromptLogprobs::default()
    };
    let entry = |logprob: f32| json!({ "logprob": logprob, "rank": 1, "decoded_token": "x" });
    let scored = score(state, prompt, asked, adapter(body));
    let places = scored.iter().map(|place| {
        let own = prompt[place.position as usize].to_string();
        let mut map = Map::from_iter([(own, entry(place.logprob))]);
        map.extend(
            place
                .top
                .iter()
                .map(|t| (t.id.to_string(), entry(t.logprob))),
        );
        Value::Object(map)
    });
    let places: Vec<_> = [Value::Null].into_iter().chain(places).collect();
    json_answer(
        &json!({ "id": "cmpl-1", "object": "text_completion", "model": "tiny",
        "choices": [{ "index": 0, "text": "", "logprobs": null, "finish_reason": "length",
            "stop_reason": null, "token_ids": [1], "prompt_logprobs": places,
            "prompt_token_ids": prompt }],
        "usage": { "prompt_tokens": prompt.len() } }),
    )
}

/// The endpoints of the development mode.
fn development(state: &Arc<State>, call: &Call) -> Answer {
    let set = |label: &str| *state.label.lock().unwrap() = label.to_owned();
    if call.method == Method::POST {
        let label = call.body["new_version"].as_str();
        let query = (!call.query.is_empty()).then(|| format!("?{}", call.query));
        let more = label.map(|l| format!(" {l}")).or(query).unwrap_or_default();
        state.note(format!("{}{more}", call.path));
    }
    match call.path.as_str() {
        "/weight_info" => json_answer(&json!({ "weight_version": *state.label.lock().unwrap() })),
        "/update_weight_version" => match call.body["new_version"].as_str() {
            Some(label) => {
                set(label);
                json_answer(&json!({ "success": true, "new_version": label }))
            }
            None => error(422, "field required: new_version"),
        },
        "/pause" => pause(state, &call.query),
        "/resume" => {
            state.paused.store(false, Ordering::SeqCst);
            state.frozen.store(false, Ordering::SeqCst);
            json_answer(&json!({ "status": "resumed" }))
        }
        "/reset_prefix_cache" => json_answer(&json!({ "success": true })),
        "/weight_checker" if state.no_sums.load(Ordering::SeqCst) => error(404, "Not Found"),
        "/weight_checker" if call.body["action"] == "checksum" => {
            json_answer(&json!({ "checksums": { "dp0:pp0:pcp0:tp0:number": state.sum() } }))
        }
        "/collective_rpc" if call.body["method"] == "reload_weights" => {
            let path = call.body["kwargs"]["weights_path"]
                .as_str()
                .unwrap_or_default();
            match load_folder(state, path) {
                Ok(()) => json_answer(&json!({ "results": [null] })),
                Err(why) => error(500, &why),
            }
        }
        "/sleep" if call.query.starts_with("level=") => {
            state.give_up(&["weights", "kv_cache"]);
            whole(200, "text/plain", String::new())
        }
        "/wake_up" => {
            match call.query.strip_prefix("tags=") {
                Some(part) => state.take_back(part),
                None => ["weights", "kv_cache"]
                    .iter()
                    .for_each(|p| state.take_back(p)),
            }
            whole(200, "text/plain", String::new())
        }
        "/is_sleeping" => {
            json_answer(&json!({ "is_sleeping": state.sleeping.load(Ordering::SeqCst) }))
        }
        _ => error(404, "Not Found"),
    }
}

/// Freezes or ends all requests.
fn pause(state: &State, query: &str) -> Answer {
    let keeping = *state.keeping.lock().unwrap();
    match (query, keeping) {
        ("mode=keep", Keeping::Refuses) => return error(422, "mode: Input should be 'abort'"),
        ("mode=keep", Keeping::Keeps) => state.frozen.store(true, Ordering::SeqCst),
        _ => {
            state.paused.store(true, Ordering::SeqCst);
            state.aborts.fetch_add(1, Ordering::SeqCst);
        }
    }
    json_answer(&json!({ "status": "paused" }))
}

fn metrics(state: &State) -> String {
    let status = state.engine.status();
    // The real one is awake in its metrics after any wake-up, too.
    let awake = u8::from(!state.has_no_weights());
    let own = 1.0 - status.kv_tokens_free as f64 / status.kv_tokens_total as f64;
    let used = own.max(*state.kv_used.lock().unwrap());
    let l = "{engine=\"0\",model_name=\"tiny\"}";
    format!(
        "# HELP process_start_time_seconds Start time.\n# TYPE process_start_time_seconds gauge\n\
         process_start_time_seconds {}\n\
         vllm:num_requests_running{l} {}.0\nvllm:num_requests_waiting{l} {}.0\n\
         vllm:engine_sleep_state{{engine=\"0\",model_name=\"tiny\",sleep_state=\"awake\"}} {awake}.0\n\
         vllm:kv_cache_usage_perc{l} {used}\n\
         vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"{}\"}} 1.0\n\
         vllm:generation_tokens_total{l} {}.0\nvllm:prompt_tokens_total{l} {}.0\n\
         vllm:num_preemptions_total{l} 0.0\n",
        *state.started_s.lock().unwrap(),
        status.running,
        status.waiting,
        status.kv_tokens_total / 16,
        status.sampled_tokens,
        status.prefill_tokens,
    )
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    let list = value.as_array()?;
    list.iter().map(|v| v.as_u64().map(|n| n as u32)).collect()
}

/// Requests that both endpoints refuse.
fn refused(state: &State, prompt: &[u32], max_tokens: u64) -> Option<Answer> {
    if state.sleeping.load(Ordering::SeqCst) || state.paused.load(Ordering::SeqCst) {
        return Some(error(503, "the engine is paused"));
    }
    if let Some(id) = prompt.iter().find(|id| **id as usize >= VOCAB) {
        return Some(error(400, &format!("Token id {id} is out of vocabulary")));
    }
    let asked = prompt.len() as u64 + max_tokens;
    (asked > CONTEXT as u64).then(|| {
        error(400, &format!("This model's maximum context length is {CONTEXT} tokens. However, you requested {asked}"))
    })
}

fn completions(state: &Arc<State>, body: Value) -> Answer {
    if let Some(field) = unknown_field(&body, COMPLETION_FIELDS) {
        return error(400, &format!("unknown field {field}"));
    }
    if !has_model(state, &body) {
        return error(404, "The model does not exist.");
    }
    let Some(prompt) = ids(&body["prompt"]) else {
        return error(400, "this mock takes ids");
    };
    if let Some(answer) = refused(state, &prompt, body["max_tokens"].as_u64().unwrap_or(16)) {
        return answer;
    }
    if body.get("prompt_logprobs").is_some() {
        return prompt_logprobs(state, &prompt, &body);
    }
    state.seen.lock().unwrap().push(body.clone());
    let mut sampling = sampling_of(&body, "max_tokens");
    sampling.top_logprobs = body["logprobs"].as_u64().unwrap_or(0) as u8;
    let logprobs = body.get("logprobs").is_some();
    let last = json!({ "id": "cmpl-1", "object": "text_completion", "model": "tiny",
        "choices": [], "usage": { "prompt_tokens": prompt.len(),
            "prompt_tokens_details": { "cached_tokens": 3 } } });
    let asks = AsksFor::new(state, body["model"].as_str().unwrap());
    let write = move |_: &State, piece: &Piece| {
        let _ = &asks;
        let name = |id: u32| format!("token_id:{id}");
        let top = |t: &SampledToken| {
            // The sampled token comes first, whether it is among the best or not.
            let mut map = Map::from_iter([(name(t.id), json!(t.logprob))]);
            map.extend(t.top.iter().map(|c| (name(c.id), json!(c.logprob))));
            Value::Object(map)
        };
        let told = piece.new.iter();
        let logprobs = (logprobs && piece.fault != Some(Fault::NoLogprobs)).then(|| {
            json!({
                "text_offset": told.clone().map(|_| 0).collect::<Vec<_>>(),
                "token_logprobs": told.clone().map(|t| logprob(piece, t)).collect::<Vec<_>>(),
                "tokens": told.clone().map(|t| name(told_id(piece, t))).collect::<Vec<_>>(),
                "top_logprobs": told.clone().map(top).collect::<Vec<_>>(),
            })
        });
        let (finish, stop) = finish(piece.end.as_ref());
        json!({ "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny",
            "choices": [{ "index": 0, "text": "", "logprobs": logprobs,
                "finish_reason": finish, "stop_reason": stop,
                "prompt_token_ids": piece.first.then(|| piece.prompt.clone()),
                "token_ids": told.map(|t| t.id).collect::<Vec<_>>() }] })
    };
    let prompt = (prompt, adapter(&body));
    stream_of(state, prompt, sampling, Box::new(write), vec![last])
}

fn generate(state: &Arc<State>, body: Value) -> Answer {
    if let Some(field) = unknown_field(&body, GENERATE_FIELDS) {
        return error(400, &format!("unknown field {field}"));
    }
    if !has_model(state, &body) {
        return error(404, "The model does not exist.");
    }
    let Some(prompt) = ids(&body["token_ids"]) else {
        return error(422, "field required: token_ids");
    };
    let params = body["sampling_params"].clone();
    if let Some(answer) = refused(state, &prompt, params["max_tokens"].as_u64().unwrap_or(16)) {
        return answer;
    }
    state.seen.lock().unwrap().push(body.clone());
    let mut sampling = sampling_of(&params, "max_tokens");
    sampling.top_logprobs = params["logprobs"].as_u64().unwrap_or(0) as u8;
    let last = json!({ "request_id": "generate-tokens-r1", "output_mode": "tokens",
        "choices": [], "usage": { "prompt_tokens": prompt.len(),
            "prompt_tokens_details": { "cached_tokens": 3 } } });
    let asks = AsksFor::new(state, body["model"].as_str().unwrap());
    let first = params["routed_experts_prompt_start"].as_u64();
    let write = move |_: &State, piece: &Piece| {
        let _ = &asks;
        let experts = first.filter(|_| piece.end.is_some());
        let experts = experts.map(|first| routed_experts(piece, first as usize));
        let content = |t: &SampledToken| {
            let entry =
                |id: u32, logprob: f32| json!({ "token_id": id, "logprob": logprob, "rank": 1 });
            let top: Vec<_> = t.top.iter().map(|c| entry(c.id, c.logprob)).collect();
            json!({ "token_id": told_id(piece, t), "logprob": logprob(piece, t), "rank": 1,
                "top_logprobs": top })
        };
        let content: Vec<_> = piece.new.iter().map(content).collect();
        let logprobs =
            (piece.fault != Some(Fault::NoLogprobs)).then(|| json!({ "content": content }));
        let (finish, stop) = finish(piece.end.as_ref());
        let versions = piece.end.as_ref().map(|_| piece.versions());
        let mut value = json!({ "request_id": "generate-tokens-r1", "usage": null,
            "output_mode": "tokens", "choices": [{ "index": 0, "finish_reason": finish,
                "stop_reason": stop, "routed_experts": experts, "sampling_mask": null,
                "token_ids": piece.new.iter().map(|t| t.id).collect::<Vec<_>>(),
                "weight_versions": versions, "logprobs": logprobs }] });
        if piece.first {
            value["prompt_token_ids"] = json!(piece.prompt);
        }
        value
    };
    let prompt = (prompt, adapter(&body));
    stream_of(state, prompt, sampling, Box::new(write), vec![last])
}

/// Two layers of one expert for the tokens from `first` on: the first expert is the token's position.
fn routed_experts(piece: &Piece, first: usize) -> String {
    let positions = first..piece.prompt.len() + piece.all.len() - 1;
    let shape = format!("({}, 2, 1)", positions.len());
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut array = b"\x93NUMPY\x01\x00".to_vec();
    array.extend((header.len() as u16).to_le_bytes());
    array.extend(header.bytes());
    array.extend(positions.flat_map(|position| [position as u8, 0]));
    STANDARD.encode(array)
}

fn finish(end: Option<&FinishReason>) -> (Value, Value) {
    match end {
        None => (Value::Null, Value::Null),
        Some(FinishReason::StopId { id }) => (json!("stop"), json!(id)),
        Some(FinishReason::StopString { text }) => (json!("stop"), json!(text)),
        Some(FinishReason::Length | FinishReason::ContextFull) => (json!("length"), Value::Null),
        Some(FinishReason::Aborted) => (json!("abort"), Value::Null),
    }
}
