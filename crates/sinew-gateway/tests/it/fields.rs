//! Fields of requests without effect: accepted, counted and reported, or refused by a strict gateway.

use crate::support::{Answer, Opened, World, world, world_in, world_with};
use serde_json::{Value, json};

fn yes(_: &str) -> Option<String> {
    Some("yes".into())
}

const MESSAGE: &str = "messages[].";

/// Client fields beyond the API: path below the dialect, body, and the fields that are counted.
fn chat_cases() -> Vec<(Value, Vec<String>)> {
    let user = json!({"role": "user", "content": "x"});
    let with = |field: &str, value: Value| {
        let mut body = json!({"model": "m", "messages": [user]});
        body[field] = value;
        (body, vec![field.to_owned()])
    };
    let of_message = |field: &str, value: Value| {
        let mut said = json!({"role": "assistant", "content": "yes"});
        said[field] = value;
        let body = json!({"model": "m", "messages": [user, said, user]});
        (body, vec![format!("{MESSAGE}{field}")])
    };
    let text = |part: Value| json!({"role": "user", "content": [part]});
    let marked = json!({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}});
    let mut tool = json!({"role": "tool", "tool_call_id": "c", "content": "x", "is_error": true});
    tool["timestamp"] = json!(1.5);
    let call = json!({
        "id": "c", "type": "function", "provider_specific_fields": {"a": 1},
        "extra_content": {"google": {"thought_signature": "s"}},
        "function": {"name": "f", "arguments": "", "provider_specific_fields": {"a": 1}},
    });
    let called = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let of_call = |path: &str| format!("{MESSAGE}tool_calls[].{path}");
    vec![
        of_message("provider_specific_fields", json!({"refusal": null})),
        of_message("cache_breakpoint", json!(true)),
        of_message("parsed", json!({"a": 1})),
        of_message(
            "thinking_blocks",
            json!([{"type": "thinking", "thinking": "t"}]),
        ),
        of_message("reasoning_details", json!([{"text": "t"}])),
        of_message("id", json!("msg_1")),
        of_message("timestamp", json!("2026-01-01T00:00:00Z")),
        of_message("extra_content", json!({"google": {}})),
        of_message("annotations", json!([{"type": "url_citation"}])),
        (
            json!({"model": "m", "messages": [text(marked)]}),
            vec![format!("{MESSAGE}content[].cache_control")],
        ),
        (
            json!({"model": "m", "messages": [user, called, tool]}),
            vec![
                of_call("extra_content"),
                of_call("function.provider_specific_fields"),
                of_call("provider_specific_fields"),
                format!("{MESSAGE}is_error"),
                format!("{MESSAGE}timestamp"),
            ],
        ),
        with("reasoning_effort", json!("none")),
        with("reasoning_effort", json!("high")),
        with("verbosity", json!("low")),
        with("service_tier", json!("flex")),
        with("store", json!(true)),
        with("prediction", json!({"type": "content", "content": "x"})),
        with("stream_options", json!({"include_usage": true})),
        with("skip_special_tokens", json!(false)),
        with("mood", json!("good")),
    ]
}

/// Requests with fields that change nothing and of which nothing is counted, as they are empty,
/// a default, or bookkeeping by their definition.
fn silent_cases() -> Vec<Value> {
    let servers = json!({
        "repetition_penalty": 1.0, "length_penalty": 1, "min_tokens": 0, "ignore_eos": false,
        "use_beam_search": false, "stop_token_ids": [], "bad_words": [], "priority": 0,
        "skip_special_tokens": true, "spaces_between_special_tokens": true,
        "add_generation_prompt": true, "continue_final_message": false, "documents": [],
        "chat_template_kwargs": {}, "include_stop_str_in_output": false, "prompt_logprobs": null,
        "add_special_tokens": false, "truncate_prompt_tokens": null, "allowed_token_ids": null,
        "presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1, "min_p": 0.0,
    });
    let mut cases = vec![servers];
    cases.extend([
        json!({"functions": [], "web_search_options": null}),
        json!({"function_call": "auto"}),
        json!({"user": "me", "metadata": {"a": "b"}}),
        json!({"store": false, "service_tier": "auto"}),
        json!({"max_tokens": 16.0}),
        json!({"temperature": 1e-5}),
        json!({"nothing": null}),
    ]);
    cases
}

fn post(rollout: &Opened, path: &str, body: &Value) -> Answer {
    let answer = rollout.post(path, body);
    assert_eq!(answer.status, 200, "{body}: {answer:?}");
    answer
}

/// The fields that were counted, with the sum of their counts.
fn counted(ignored: &Value) -> (Vec<String>, u64) {
    let map = ignored.as_object().cloned().unwrap_or_default();
    let sum = map.values().filter_map(Value::as_u64).sum();
    let mut paths: Vec<String> = map.into_iter().map(|(path, _)| path).collect();
    paths.sort();
    (paths, sum)
}

fn ignored(world: &World, rollout: &Opened) -> Value {
    world.view(&rollout.id)["trace"]["ignored"].clone()
}

#[test]
fn fields_without_effect_are_taken_and_counted() {
    let world = world(yes);
    for (body, mut expected) in chat_cases() {
        expected.sort();
        let rollout = world.open();
        post(&rollout, "/chat/completions", &body);
        let seen = ignored(&world, &rollout);
        assert_eq!(
            counted(&seen),
            (expected.clone(), expected.len() as u64),
            "{body}"
        );
        let finished = world.finish(&rollout.id);
        assert_eq!(finished["ignored_fields"], seen, "{finished}");
        // The stored trace has the same counts.
        assert_eq!(ignored(&world, &rollout), seen);
    }
    let health = world.control("GET", "/health", &json!({})).ok();
    let all = &health["gateway"]["ignored_fields"];
    assert_eq!(all["mood"], 1, "{all}");
    assert_eq!(all["reasoning_effort"], 2, "{all}");
    let metrics = world.control("GET", "/metrics", &json!({})).text;
    let (_, sum) = counted(all);
    let line = format!("sinew_ignored_fields_total {sum}");
    assert!(metrics.lines().any(|l| l == line), "{metrics}");
}

#[test]
fn defaults_and_bookkeeping_are_not_counted() {
    let world = world(yes);
    for fields in silent_cases() {
        let rollout = world.open();
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        post(&rollout, "/chat/completions", &body);
        assert_eq!(ignored(&world, &rollout), Value::Null, "{body}");
        assert_eq!(world.finish(&rollout.id)["ignored_fields"], json!({}));
    }
}

fn google_case() -> (&'static str, Value, Vec<&'static str>) {
    let body = json!({
        "contents": [{"parts": [{"text": "x", "partMetadata": {"a": 1}}]}], "labels": {"a": "b"},
        "tools": [{"googleSearch": {}}, {"codeExecution": {}}],
        "safetySettings": [{"category": "c", "threshold": "t"}], "serviceTier": "flex",
        "generationConfig": {"thinkingConfig": {"thinkingBudget": 7, "thinkingLevel": "LOW"}},
        "mood": "good",
    });
    (
        "/v1beta/models/m:generateContent",
        body,
        vec![
            "contents[].parts[].partMetadata",
            "generationConfig.thinkingConfig.thinkingLevel",
            "mood",
            "safetySettings",
            "serviceTier",
            "tools[].type=codeExecution",
            "tools[].type=googleSearch",
        ],
    )
}

fn other_dialects() -> Vec<(&'static str, Value, Vec<&'static str>)> {
    let user = json!({"role": "user", "content": "x"});
    let call = json!({
        "type": "function_call", "call_id": "c", "name": "f", "arguments": "",
        "caller": {"type": "direct"}, "status": "completed", "id": "fc_1",
    });
    let result = json!({"type": "function_call_output", "call_id": "c", "output": "1"});
    let thought = json!({
        "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc",
    });
    let responses = json!({
        "model": "m", "input": [user, thought, call, result], "background": true,
        "truncation": "auto", "max_tool_calls": 3, "include": ["file_search_call.results"],
        "reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"},
    });
    let anthropic = json!({
        "model": "m", "max_tokens": 8, "messages": [user], "mcp_servers": [],
        "thread": {"type": "create"}, "output_config": {"effort": "high"}, "speed": "fast",
        "container": "c", "context_management": {"edits": [
            {"type": "clear_thinking_20251015", "keep": "all"},
        ]},
        "betas": ["x"],
    });
    vec![
        google_case(),
        (
            "/responses",
            responses,
            vec![
                "background",
                "include[]",
                "input[].encrypted_content",
                "max_tool_calls",
                "reasoning.effort",
                "text.verbosity",
                "truncation",
            ],
        ),
        (
            "/messages",
            anthropic,
            vec![
                "betas",
                "container",
                "output_config.effort",
                "speed",
                "thread",
            ],
        ),
        (
            "/completions",
            json!({"model": "m", "prompt": "x", "best_of": 1, "mood": 1}),
            vec!["mood"],
        ),
    ]
}

#[test]
fn every_dialect_takes_and_counts_them() {
    let world = world(yes);
    for (path, body, expected) in other_dialects() {
        let rollout = world.open();
        post(&rollout, path, &body);
        let (paths, _) = counted(&ignored(&world, &rollout));
        assert_eq!(paths, expected, "{body}");
    }
}

#[test]
fn a_strict_gateway_refuses_fields_without_effect() {
    let world = world_with(yes, |config, _| config.strict_fields = true);
    let rollout = world.open();
    let chat = chat_cases().into_iter();
    let chat = chat.map(|(body, paths)| ("/chat/completions", body, paths));
    let others = other_dialects().into_iter().map(|(path, body, paths)| {
        let paths: Vec<String> = paths.into_iter().map(str::to_owned).collect();
        (path, body, paths)
    });
    for (path, body, paths) in chat.chain(others) {
        let answer = rollout.post(path, &body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        let message = answer.error("message");
        // One of them is named, with the number of its item.
        let bare: String = message.chars().filter(|c| !c.is_ascii_digit()).collect();
        let named = |p: &String| bare.contains(p.trim_end_matches("[]"));
        assert!(
            paths.iter().any(named) || message.contains("mcp_servers"),
            "{message}"
        );
    }
    let plain = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    post(&rollout, "/chat/completions", &plain);
    assert_eq!(world.finish(&rollout.id)["ignored_fields"], json!({}));
}

#[test]
fn counts_are_bounded_and_outlive_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let before = world_in(yes, |_, _| {}, Some(folder.path()));
    let rollout = before.open();
    for call in 0..30 {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
        for field in 0..4 {
            body[format!("{}{call}-{field}", "f".repeat(9000))] = json!(1);
            body[format!("g{call}-{field}")] = json!(1);
        }
        post(&rollout, "/chat/completions", &body);
    }
    // A request that is refused counts nothing.
    let wrong = json!({"model": "m", "messages": [], "mood": 1});
    assert_eq!(rollout.post("/chat/completions", &wrong).status, 400);
    let seen = ignored(&before, &rollout);
    let (paths, sum) = counted(&seen);
    assert_eq!((paths.len(), sum), (65, 240), "{seen}");
    assert!(paths.iter().all(|p| p.len() < 200), "{paths:?}");
    drop(before);
    let after = world_in(yes, |_, _| {}, Some(folder.path()));
    assert_eq!(ignored(&after, &rollout), seen);
}

#[test]
fn a_history_that_is_sent_again_is_counted_once() {
    let world = world(yes);
    let rollout = world.open();
    let mut messages = vec![json!({"role": "user", "content": "x", "id": "1"})];
    for turn in 0..4 {
        let body = json!({"model": "m", "messages": messages});
        post(&rollout, "/chat/completions", &body);
        messages.push(json!({"role": "assistant", "content": "yes", "parsed": {}}));
        messages.push(json!({"role": "user", "content": format!("{turn}")}));
    }
    let seen = ignored(&world, &rollout);
    let expected = json!({"messages[].id": 1, "messages[].parsed": 3});
    assert_eq!(seen, expected);
    let joins = world.view(&rollout.id)["stats"]["joins"].clone();
    assert_eq!(joins, json!({"start": 1, "extend": 3}));
}

#[test]
fn a_thread_that_is_not_kept_is_told_in_the_words_of_the_api() {
    let world = world(yes);
    let rollout = world.open();
    let body = json!({
        "model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}],
        "thread": {"type": "continue", "previous_message_id": "msg_1"},
    });
    let answer = rollout.post("/messages", &body);
    assert_eq!(answer.status, 404, "{answer:?}");
    let details = &answer.json()["error"]["details"];
    assert_eq!(details["error_code"], "thread_not_found", "{answer:?}");
}
