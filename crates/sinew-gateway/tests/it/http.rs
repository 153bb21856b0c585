//! Requests of agents and harnesses, over real connections.

use crate::support::{answer, events, request, send, world, world_in, world_with};
use serde_json::{Value, json};
use sinew_gateway::{Journal, JournalOptions};
use sinew_infer::Fault;
use sinew_render::Renderer;
use sinew_store::TraceStore;
use sinew_types::{Engine, EpisodeId, TokenKind, Trace};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

/// Repeats the last user's words; calls a tool if there are tools and no answer of one.
fn echo(prompt: &str) -> Option<String> {
    let asked = prompt.rsplit("<|im_start|>user\n").next()?;
    let words = asked.split("<|im_end|>").next()?;
    if prompt.contains("<tools>") && !prompt.contains("<|im_start|>tool\n") {
        let call =
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}\n</tool_call>";
        return Some(format!("Let me see.\n{call}\n{call}"));
    }
    Some(format!("you said: {words}"))
}

fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }}])
}

fn trace(view: &Value) -> Trace {
    serde_json::from_value(view["trace"].clone()).unwrap()
}

#[test]
fn an_episode_from_opening_to_store() {
    let world = world(echo);
    let rollout = world.open();
    let first = rollout.chat(&json!([{"role": "user", "content": "hi"}]));
    let message = &first["choices"][0]["message"];
    assert_eq!(message["content"], "you said: hi");
    assert_eq!(first["choices"][0]["finish_reason"], "stop");
    let usage = &first["usage"];
    assert_eq!(usage["completion_tokens"], "you said: hi".len() + 1);
    let second = rollout.chat(&json!([
        {"role": "user", "content": "hi"},
        message,
        {"role": "user", "content": [{"type": "text", "text": "ho"}]},
    ]));
    assert_eq!(second["choices"][0]["message"]["content"], "you said: ho");
    let view = world.view(&rollout.id);
    assert_eq!(view["live"], true);
    assert_eq!(view["stats"]["joins"], json!({"start": 1, "extend": 1}));
    let reward = json!({"reward": 1.5, "success": true, "metrics": {"len": 2.0}});
    let path = format!("/rollouts/{}/reward", rollout.id);
    world.control("POST", &path, &reward).ok();
    let finished = world.finish(&rollout.id);
    assert_eq!(finished["reward"], 1.5);
    assert_eq!(finished["end"], json!({"type": "terminated"}));
    // Twice is once.
    assert_eq!(world.finish(&rollout.id), finished);
    let stored = world
        .store
        .get(&EpisodeId::new(rollout.id.as_str()))
        .unwrap()
        .unwrap();
    assert_eq!(stored.nodes.len(), 4);
    assert_eq!(stored.outcome.metrics["join_extend"], 1.0);
    let view = world.view(&rollout.id);
    assert_eq!(view["live"], false);
    assert_eq!(trace(&view).nodes, stored.nodes);
    let late = rollout.post("/chat/completions", &json!({"model": "m", "messages": []}));
    assert_eq!(late.status, 401);
}

#[test]
fn tools_are_called_in_parallel_and_answered() {
    let world = world(echo);
    let rollout = world.open();
    let user = json!({"role": "user", "content": "1 + 2?"});
    let body = json!({"model": "m", "messages": [user], "tools": tools()});
    let called = rollout.post("/chat/completions", &body).ok();
    let choice = &called["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], "Let me see.");
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert_eq!(calls[0]["function"]["arguments"], "{\"a\":1,\"b\":2}");
    let result = |call: &Value| json!({"role": "tool", "tool_call_id": call["id"], "content": "3"});
    let messages = json!([user, message, result(&calls[0]), result(&calls[1])]);
    let body = json!({"model": "m", "messages": messages, "tools": tools()});
    rollout.post("/chat/completions", &body).ok();
    let view = world.view(&rollout.id);
    assert_eq!(view["stats"]["joins"], json!({"start": 1, "extend": 1}));
    assert_eq!(trace(&view).leaves().len(), 1);
    // One call only, and one that is forced.
    let one =
        json!({"model": "m", "messages": [user], "tools": tools(), "parallel_tool_calls": false});
    let single = rollout.post("/chat/completions", &one).ok();
    let calls = single["choices"][0]["message"]["tool_calls"]
        .as_array()
        .unwrap();
    assert_eq!(calls.len(), 1);
}

/// A whole call that a cut follows is not a whole turn: more calls may have been on their way.
#[test]
fn a_cut_behind_a_whole_call_is_a_cut() {
    let world = world(echo);
    let user = json!({"role": "user", "content": "1 + 2?"});
    let ask = |more: Value| {
        let mut body = json!({"model": "m", "messages": [user], "tools": tools()});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let rollout = world.open();
        let said = rollout.post("/chat/completions", &body).ok();
        (said, world.finish(&rollout.id)["end"].clone())
    };
    let (whole, end) = ask(json!({}));
    assert_eq!(end, json!({"type": "terminated"}));
    let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
    // The second of the two calls lacks its end.
    let (cut, end) = ask(json!({"max_tokens": tokens - 4}));
    let choice = &cut["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(
        (calls.len(), &choice["finish_reason"]),
        (1, &json!("length"))
    );
    assert_eq!(end, json!({"type": "truncated", "limit": "turn_tokens"}));
}

#[test]
fn streams_say_what_whole_answers_say() {
    let world = world(echo);
    let rollout = world.open();
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": "héllo"}],
        "tools": tools(),
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let streamed = rollout.post("/chat/completions", &body);
    let events = events(&streamed.text);
    let deltas: Vec<&Value> = events
        .iter()
        .filter(|e| !e["choices"].as_array().unwrap().is_empty())
        .map(|e| &e["choices"][0]["delta"])
        .collect();
    assert_eq!(deltas[0]["role"], "assistant");
    let text: String = deltas
        .iter()
        .filter_map(|d| d["content"].as_str())
        .collect();
    assert_eq!(text, "Let me see.");
    let calls: Vec<&Value> = deltas
        .iter()
        .filter(|d| d["tool_calls"].is_array())
        .copied()
        .collect();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[1]["tool_calls"][0]["index"], 1);
    let last = &events[events.len() - 2];
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    assert!(
        events.last().unwrap()["usage"]["completion_tokens"]
            .as_u64()
            .unwrap()
            > 20
    );
}

#[test]
fn tokens_are_streamed_while_they_are_sampled() {
    // The engine hangs after ten tokens: what came before must be readable.
    let world = world_with(echo, |_, fake| {
        fake.faults.insert(0, Fault::HangAfter { tokens: 10 });
    });
    let rollout = world.open();
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": true,
    });
    let url = format!("{}/chat/completions", rollout.base_url);
    let headers = [("authorization", rollout.key.as_str())];
    let (status, _, mut reader) =
        send("POST", &url, &headers, body.to_string().as_bytes()).unwrap();
    assert_eq!(status, 200);
    let mut text = String::new();
    let mut buffer = [0u8; 512];
    while !text.contains("\"content\":\":\"") {
        let n = reader.read(&mut buffer).unwrap();
        assert!(n > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    assert_eq!(world.engine.status().running, 1);
    world.until("it hangs", || world.engine.status().sampled_tokens == 10);
    // The client goes away: the generation is aborted, what was sampled is kept.
    drop(reader);
    world.until("the generation ends", || world.engine.status().running == 0);
    world.until("it is captured", || {
        let stats = &world.view(&rollout.id)["stats"];
        stats["aborted"] == 1 && stats["running"] == 0
    });
    let trace = trace(&world.view(&rollout.id));
    let sampled = &trace.nodes[1];
    assert_eq!(
        (sampled.kind, sampled.tokens.len()),
        (TokenKind::Sampled, 10)
    );
    assert_eq!(sampled.finish, Some(sinew_types::FinishReason::Aborted));
}

#[test]
fn a_whole_answer_is_aborted_when_its_client_goes() {
    let world = world_with(echo, |_, fake| {
        fake.faults.insert(0, Fault::HangAfter { tokens: 1 });
    });
    let rollout = world.open();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let client = rollout.ask(&body);
    world.until("it has a token", || {
        world.engine.status().sampled_tokens == 1
    });
    drop(client);
    world.until("the generation ends", || world.engine.status().running == 0);
    assert_eq!(world.finish(&rollout.id)["sampled_tokens"], 1);
    let stats = world.gateway.stats();
    assert_eq!((stats.clients_gone, stats.failed), (1, 1));
}

#[test]
fn choices_seeds_and_log_probabilities() {
    let world = world(|_| None);
    let rollout = world.open();
    let body = |seed: u64| {
        json!({
            "model": "m", "messages": [{"role": "user", "content": "draw"}],
            "n": 2, "seed": seed, "max_tokens": 6, "logprobs": true, "top_logprobs": 2,
            "temperature": 0.5, "top_p": 0.9, "return_token_ids": true,
        })
    };
    let one = rollout.post("/chat/completions", &body(1)).ok();
    let choices = one["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_ne!(choices[0]["token_ids"], choices[1]["token_ids"]);
    for choice in choices {
        assert_eq!(choice["finish_reason"], "length");
        let content = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(content.len(), 6);
        let top = content[0]["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert!(top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
    }
    let same = rollout.post("/chat/completions", &body(1)).ok();
    assert_eq!(same["choices"][0]["token_ids"], choices[0]["token_ids"]);
    let other = rollout.post("/chat/completions", &body(2)).ok();
    assert_ne!(other["choices"][0]["token_ids"], choices[0]["token_ids"]);
    let view = world.view(&rollout.id);
    assert_eq!(view["stats"]["joins"], json!({"start": 1, "resample": 2}));
    let trace = trace(&view);
    assert_eq!(trace.leaves().len(), 6);
    // Each output has the temperature at which it was sampled.
    let sampled = trace.nodes.iter().filter(|n| !n.logprobs.is_empty());
    assert!(sampled.into_iter().all(|n| n.temperature == 0.5));
    // The reported ids are those that the engine got.
    let ids: Vec<u64> = trace.nodes[0].tokens.iter().map(|&t| t.into()).collect();
    assert_eq!(one["prompt_token_ids"], json!(ids));
}

#[test]
fn rollouts_without_a_seed_sample_apart() {
    let world = world(|_| None);
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": "draw"}],
        "max_tokens": 12, "temperature": 1.0, "return_token_ids": true,
    });
    let sampled = || {
        let answer = world.open().post("/chat/completions", &body).ok();
        answer["choices"][0]["token_ids"].clone()
    };
    assert_ne!(sampled(), sampled());
}

#[test]
fn stop_strings_end_the_text() {
    let world = world(|_| Some("one two three".into()));
    let rollout = world.open();
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["three", " two"],
    });
    let answer = rollout.post("/chat/completions", &body).ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "one");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    // The model saw its stop string, so it is in the trace.
    let trace = trace(&world.view(&rollout.id));
    assert_eq!(world.renderer.decode(&trace.nodes[1].tokens), "one two");
}

#[test]
fn text_completions_extend_and_stream() {
    let world = world(|prompt| {
        Some(if prompt == "ab" {
            "cd".into()
        } else {
            "gh".into()
        })
    });
    let rollout = world.open();
    let body = json!({"model": "m", "prompt": "ab", "logprobs": 1});
    let first = rollout.post("/completions", &body).ok();
    assert_eq!(first["choices"][0]["text"], "cd");
    assert_eq!(first["choices"][0]["logprobs"]["tokens"], json!(["c", "d"]));
    assert_eq!(
        first["choices"][0]["logprobs"]["text_offset"],
        json!([0, 1])
    );
    let body = json!({"model": "m", "prompt": "abcdef", "stream": true});
    let second = rollout.post("/completions", &body);
    let text: String = events(&second.text)
        .iter()
        .map(|e| e["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, "gh");
    let joins = &world.view(&rollout.id)["stats"]["joins"];
    assert_eq!(*joins, json!({"start": 1, "extend": 1}));
}

#[test]
fn retries_are_told_the_same_and_sampled_once() {
    let world = world(echo);
    let rollout = world.open();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let retry = [("x-stainless-retry-count", "1")];
    let first = rollout.post("/chat/completions", &body).ok();
    let again = rollout.post_with("/chat/completions", &body, &retry).ok();
    assert_eq!(first, again);
    // Not a retry: one more sample.
    let new = [("x-stainless-retry-count", "0")];
    let other = rollout.post_with("/chat/completions", &body, &new).ok();
    assert_ne!(first["id"], other["id"]);
    let keyed = [("idempotency-key", "k1")];
    let one = rollout.post_with("/chat/completions", &body, &keyed).ok();
    let two = rollout.post_with("/chat/completions", &body, &keyed).ok();
    assert_eq!(one, two);
    assert_eq!(world.view(&rollout.id)["stats"]["calls"], 3);
    assert_eq!(world.gateway.stats().coalesced, 2);
}

#[test]
fn a_retry_joins_the_call_that_runs() {
    let world = world_with(echo, |_, fake| fake.latency = Duration::from_millis(15));
    let rollout = world.open();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let retry = [("x-stainless-retry-count", "2")];
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let first = scope.spawn(|| rollout.post("/chat/completions", &body).ok());
        world.until("it runs", || world.engine.status().running == 1);
        let second = scope.spawn(|| rollout.post_with("/chat/completions", &body, &retry).ok());
        [first, second].map(|t| t.join().unwrap()).into()
    });
    assert_eq!(answers[0], answers[1]);
    assert_eq!(world.view(&rollout.id)["stats"]["calls"], 1);
}

#[test]
fn secrets_open_what_they_are_for() {
    let world = world(echo);
    let (one, two) = (world.open(), world.open());
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let body = body.to_string();
    let chat = |base: &str| format!("{base}/chat/completions");
    let control = format!("Bearer {}", crate::support::CONTROL);
    let status = |method: &str, url: &str, key: &str| {
        answer(method, url, &[("authorization", key)], body.as_bytes()).status
    };
    assert_eq!(status("POST", &chat(&one.base_url), &one.key), 200);
    assert_eq!(status("POST", &chat(&two.base_url), &one.key), 401);
    assert_eq!(status("POST", &chat(&one.base_url), &control), 401);
    let rollouts = format!("{}/rollouts", world.url);
    assert_eq!(status("POST", &rollouts, &one.key), 401);
    assert_eq!(
        status("GET", &format!("{rollouts}/{}", one.id), &one.key),
        401
    );
    assert_eq!(
        status("POST", &format!("{rollouts}/{}/reward", one.id), &one.key),
        401
    );
    assert_eq!(
        status("POST", &format!("{rollouts}/{}/finish", one.id), &one.key),
        401
    );
    // Anthropic's clients send the key in a separate header.
    let bare = one.key.trim_start_matches("Bearer ");
    let by_header = answer(
        "GET",
        &format!("{}/models", one.base_url),
        &[("x-api-key", bare)],
        b"",
    );
    assert_eq!(by_header.ok()["data"][0]["id"], "policy");
    let health = answer("GET", &format!("{}/health", world.url), &[], b"").ok();
    assert_eq!(health, json!({"status": "ok"}));
    let health = world.control("GET", "/health", &json!({})).ok();
    assert_eq!(health["gateway"]["rollouts"], 2);
    assert_eq!(health["gateway"]["joins"]["start"], 1);
}

#[test]
fn failures_and_limits_have_their_status() {
    let world = world_with(echo, |config, fake| {
        config.server.max_rollouts = 1;
        let refuse = |error| Fault::Refuse(error);
        let full = sinew_types::EngineError::QueueFull {
            waiting: 1,
            limit: 1,
        };
        fake.faults.insert(0, refuse(full));
        let failed = sinew_types::EngineError::Failed("out of memory".into());
        fake.faults.insert(
            1,
            Fault::FailAfter {
                tokens: 2,
                error: failed,
            },
        );
    });
    let rollout = world.open();
    let full = world.control("POST", "/rollouts", &json!({}));
    assert_eq!((full.status, full.retry_after.as_deref()), (503, Some("1")));
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let busy = rollout.post("/chat/completions", &body);
    assert_eq!((busy.status, busy.retry_after.as_deref()), (429, Some("1")));
    assert_eq!(busy.error("code"), "engine_queue_full");
    let failed = rollout.post("/chat/completions", &body);
    assert_eq!(
        (failed.status, failed.error("type").as_str()),
        (500, "server_error")
    );
    assert!(failed.error("message").contains("out of memory"));
    // Neither of them is a turn, and neither leaves more than what was really sampled.
    rollout.post("/chat/completions", &body).ok();
    let view = world.view(&rollout.id);
    assert_eq!(view["stats"]["running"], 0);
    assert_eq!(view["stats"]["failed"], 2);
    assert_eq!(world.finish(&rollout.id)["branches"], 1);
}

#[test]
fn a_late_call_keeps_what_was_sampled_until_its_deadline() {
    let world = world_with(echo, |config, fake| {
        config.server.call_timeout = Duration::from_secs(1);
        fake.faults.insert(0, Fault::HangAfter { tokens: 2 });
    });
    let rollout = world.open();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let late = rollout.post("/chat/completions", &body);
    assert_eq!(
        (late.status, late.error("code").as_str()),
        (504, "deadline")
    );
    let view = world.view(&rollout.id);
    assert_eq!(view["stats"]["running"], 0);
    assert_eq!(view["stats"]["aborted"], 1);
    let finished = world.finish(&rollout.id);
    assert_eq!(
        (&finished["branches"], &finished["sampled_tokens"]),
        (&json!(1), &json!(2))
    );
}

#[test]
fn limits_of_a_rollout_cut_its_episode() {
    let world = world(echo);
    let raw = world
        .control("POST", "/rollouts", &json!({"id": "mine", "max_turns": 1}))
        .ok();
    assert_eq!(raw["id"], "mine");
    let taken = world.control("POST", "/rollouts", &json!({"id": "mine"}));
    assert_eq!(taken.status, 409);
    let key = format!("Bearer {}", raw["api_key"].as_str().unwrap());
    let url = format!("{}/chat/completions", raw["base_url"].as_str().unwrap());
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}).to_string();
    let post = || {
        answer(
            "POST",
            &url,
            &[("authorization", key.as_str())],
            body.as_bytes(),
        )
    };
    post().ok();
    let over = post();
    // Not one of those that clients try again.
    assert_eq!(
        (over.status, over.error("code").as_str()),
        (400, "turn_limit_exceeded")
    );
    let finished = world.finish("mine");
    assert_eq!(
        finished["end"],
        json!({"type": "truncated", "limit": "turns"})
    );
}

#[test]
fn forgotten_rollouts_end_by_themselves() {
    let world = world_with(echo, |config, _| {
        config.server.rollout_ttl = Duration::from_secs(1);
    });
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    // A rollout whose first call comes too late has ended already: another one is opened.
    let rollout = std::iter::repeat_with(|| world.open())
        .take(60)
        .find(|rollout| rollout.post("/chat/completions", &body).status == 200)
        .unwrap();
    let id = EpisodeId::new(rollout.id.as_str());
    world.until("it is stored", || world.store.get(&id).unwrap().is_some());
    let trace = world.store.get(&id).unwrap().unwrap();
    let limit = sinew_types::Limit::WallTime;
    assert_eq!(trace.end, sinew_types::EpisodeEnd::Truncated { limit });
    assert_eq!(trace.nodes.len(), 2);
}

#[test]
fn stopping_keeps_what_was_captured() {
    let mut world = world_with(echo, |_, fake| {
        fake.faults.insert(1, Fault::HangAfter { tokens: 3 });
    });
    let rollout = world.open();
    rollout.chat(&json!([{"role": "user", "content": "x"}]));
    let id = EpisodeId::new(rollout.id.as_str());
    std::thread::scope(|scope| {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "y"}]});
        let rollout = &rollout;
        let cut = scope.spawn(move || rollout.post("/chat/completions", &body).status);
        world.until("it runs", || world.engine.status().running == 1);
        world.block_on(world.gateway.close());
        assert_eq!(cut.join().unwrap(), 409);
    });
    world.stop();
    let trace = world.store.get(&id).unwrap().unwrap();
    assert_eq!(trace.leaves().len(), 2);
    assert!(matches!(trace.end, sinew_types::EpisodeEnd::Failed { .. }));
    assert!(
        request(Duration::from_secs(30), "GET", &world.url)
            .send()
            .is_err()
    );
}

#[test]
fn a_harness_needs_no_http_for_control() {
    let world = world(echo);
    let spec = sinew_gateway::RolloutSpec {
        purpose: "train".into(),
        draw: 3,
        ..Default::default()
    };
    let opened = world.gateway.open_rollout(spec).unwrap();
    let url = format!("{}/chat/completions", opened.base_url);
    let key = format!("Bearer {}", opened.api_key);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}).to_string();
    answer("POST", &url, &[("authorization", &key)], body.as_bytes()).ok();
    let reward = sinew_gateway::Reward {
        reward: 1.0,
        ..Default::default()
    };
    world.gateway.reward(&opened.id, &reward).unwrap();
    let trace = world
        .block_on(world.gateway.finish(&opened.id, None))
        .unwrap();
    assert_eq!(
        (trace.origin.draw, trace.origin.purpose.as_str()),
        (3, "train")
    );
    assert_eq!((trace.outcome.reward, trace.sampled_tokens()), (1.0, 12));
}

#[test]
fn agents_go_on_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let user = |text: &str| json!({"role": "user", "content": text});
    let before = world_in(echo, |_, _| {}, Some(folder.path()));
    let (rollout, done) = (before.open(), before.open());
    let warm = json!({"model": "m", "messages": [user("hi")], "temperature": 0.7});
    let first = rollout.post("/chat/completions", &warm).ok();
    done.chat(&json!([user("hi")]));
    before.finish(&done.id);
    let reward = json!({"reward": 0.5});
    let path = format!("/rollouts/{}/reward", rollout.id);
    before.control("POST", &path, &reward).ok();
    // Nothing is closed, finished or stored: all that is left is the journal.
    drop(before);
    let after = world_in(echo, |_, _| {}, Some(folder.path()));
    assert_eq!(after.gateway.stats().rollouts, 1);
    let url = format!("{}/r/{}/v1/chat/completions", after.url, rollout.id);
    let messages = json!([user("hi"), first["choices"][0]["message"], user("ho")]);
    let body = json!({"model": "m", "messages": messages, "temperature": 0.0}).to_string();
    answer(
        "POST",
        &url,
        &[("authorization", &rollout.key)],
        body.as_bytes(),
    )
    .ok();
    let view = after.view(&rollout.id);
    assert_eq!(view["stats"]["joins"], json!({"start": 1, "extend": 1}));
    // The temperatures are those of the call before the crash and of a greedy one, whose log-probabilities
    // are at 1.
    let trace = trace(&view);
    let sampled = trace.nodes.iter().filter(|n| !n.logprobs.is_empty());
    let temperatures: Vec<f32> = sampled.map(|n| n.temperature).collect();
    assert_eq!(temperatures, [0.7, 1.0]);
    let finished = after.finish(&rollout.id);
    assert_eq!(
        (&finished["reward"], &finished["branches"]),
        (&json!(0.5), &json!(1))
    );
    drop(after);
    let last = world_in(echo, |_, _| {}, Some(folder.path()));
    assert_eq!(last.gateway.stats().rollouts, 0);
}

#[test]
fn a_rollout_that_the_journal_could_not_take_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let small = JournalOptions {
        max_bytes: 2000,
        ..JournalOptions::default()
    };
    let journal = Arc::new(Journal::open(folder.path(), small).unwrap());
    let world = world_with(echo, |config, _| config.journal = Some(journal));
    let mut opened = 0;
    let refused = loop {
        let answer = world.control("POST", "/rollouts", &json!({}));
        match answer.status {
            201 => opened += 1,
            _ => break answer,
        }
    };
    assert_eq!(refused.error("code"), "journal_failed", "{refused:?}");
    assert!(refused.error("message").contains("finish rollouts"));
    assert!(opened > 0);
    let health = world.control("GET", "/health", &json!(null)).ok();
    assert_eq!(health["gateway"]["rollouts"], opened);
    drop(world);
    let after = world_in(echo, |_, _| {}, Some(folder.path()));
    assert_eq!(after.gateway.stats().rollouts, opened);
}
