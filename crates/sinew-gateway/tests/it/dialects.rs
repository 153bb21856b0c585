//! Responses, messages and generateContent: their own clients, unmodified, and their streams.

use crate::support::{Opened, World, run_client, world};
use serde_json::{Value, json};

/// Calls `add` twice where it has tools and no result yet, thinking first; else an echo.
fn script(prompt: &str) -> Option<String> {
    let asked = prompt.rsplit("<|im_start|>user\n").next()?;
    let words = asked.split("<|im_end|>").next()?;
    if prompt.contains("<tools>") && !prompt.contains("<|im_start|>tool\n") {
        let call =
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 40, \"b\": 2}}\n</tool_call>";
        return Some(format!("<think>\nA sum.\n</think>\n\n{call}\n{call}"));
    }
    Some(format!("you said: {words}"))
}

/// Histories that clients send back as they came are joined to what was captured.
fn joined(world: &World, rollout: &Opened) {
    let joins = world.view(&rollout.id)["stats"]["joins"].clone();
    for wrong in ["fork", "realign", "rollback"] {
        assert_eq!(joins[wrong].as_u64().unwrap_or(0), 0, "{joins}");
    }
    assert!(joins["extend"].as_u64().unwrap_or(0) > 0, "{joins}");
}

#[test]
fn the_openai_client_works_with_responses() {
    let world = world(script);
    let rollout = world.open();
    run_client("responses_client.py", &rollout);
    joined(&world, &rollout);
}

#[test]
fn the_anthropic_client_works_unmodified() {
    let world = world(script);
    let rollout = world.open();
    run_client("anthropic_client.py", &rollout);
    joined(&world, &rollout);
}

#[test]
fn the_google_client_works_unmodified() {
    let world = world(script);
    let rollout = world.open();
    run_client("google_client.py", &rollout);
    joined(&world, &rollout);
}

/// Name and JSON of each event of a stream.
fn events(text: &str) -> Vec<(String, Value)> {
    text.split("\n\n")
        .filter(|event| !event.is_empty() && !event.starts_with(':'))
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let name = name.strip_prefix("event: ").unwrap().to_owned();
            let data = data.strip_prefix("data: ").unwrap();
            (name, serde_json::from_str(data).unwrap())
        })
        .collect()
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    json!({
        "openai": [{"type": "function", "name": "add", "parameters": parameters}],
        "anthropic": [{"name": "add", "input_schema": parameters}],
        "google": [{"functionDeclarations": [{"name": "add", "parametersJsonSchema": parameters}]}],
    })
}

#[test]
fn events_of_responses_have_the_names_and_numbers_of_the_api() {
    let world = world(script);
    let rollout = world.open();
    let body = json!({"model": "m", "input": "x", "stream": true, "tools": tools()["openai"]});
    let answer = rollout.post("/responses", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    let events = events(&answer.text);
    for (i, (name, data)) in events.iter().enumerate() {
        assert_eq!(data["type"], **name);
        assert_eq!(data["sequence_number"], i);
    }
    let item = |index: usize| {
        let of = |(name, data): &(String, Value)| {
            let place = data["output_index"] == index;
            place.then(|| name.trim_start_matches("response.").to_owned())
        };
        let mut names: Vec<_> = events.iter().filter_map(of).collect();
        names.dedup();
        names
    };
    assert_eq!(
        item(0),
        [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done"
        ]
    );
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    assert_eq!(item(1), call);
    assert_eq!(item(2), call);
    // The stream and the whole answer are the same.
    let whole = &events.last().unwrap().1["response"];
    let body = json!({"model": "m", "input": "x", "tools": tools()["openai"]});
    let told = rollout.post("/responses", &body).ok();
    let bare = |value: &Value| -> Vec<Value> {
        let mut items = value["output"].as_array().unwrap().clone();
        for item in &mut items {
            item["id"] = Value::Null;
            item["call_id"] = Value::Null;
        }
        items
    };
    assert_eq!(bare(whole), bare(&told));
    assert_eq!(
        whole["usage"]["output_tokens"],
        told["usage"]["output_tokens"]
    );
}

#[test]
fn events_of_messages_have_the_order_of_the_api() {
    let world = world(script);
    let rollout = world.open();
    let body = json!({
        "model": "m", "max_tokens": 200, "stream": true, "tools": tools()["anthropic"],
        "messages": [{"role": "user", "content": "x"}],
    });
    // The request has Anthropic's header and `/v1` twice, as its clients append it to our base URL.
    let key = rollout.key.trim_start_matches("Bearer ");
    let url = format!("{}/v1/messages", rollout.base_url);
    let sent = body.to_string();
    let answer = crate::support::answer("POST", &url, &[("x-api-key", key)], sent.as_bytes());
    assert_eq!(answer.status, 200, "{answer:?}");
    let events = events(&answer.text);
    let mut names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let block = [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ];
    let expected: Vec<&str> = ["message_start"]
        .into_iter()
        .chain(block)
        .chain(block)
        .chain(block)
        .chain(["message_delta", "message_stop"])
        .collect();
    assert_eq!(names, expected);
    for (name, data) in &events {
        assert_eq!(data["type"], **name);
    }
    let last = &events[events.len() - 2].1;
    assert_eq!(last["delta"]["stop_reason"], "tool_use");
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 10);
}

#[test]
fn each_api_refuses_in_its_own_shape() {
    let world = world(script);
    let rollout = world.open();
    let answer = rollout.post("/messages", &json!({"model": "m", "messages": []}));
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["type"], "error");
    assert_eq!(answer.error("type"), "invalid_request_error");
    assert!(answer.error("message").contains("max_tokens"), "{answer:?}");
    let answer = rollout.post(
        "/messages/count_tokens",
        &json!({"model": "m", "max_tokens": 1}),
    );
    assert_eq!(answer.json()["type"], "error", "{answer:?}");
    let answer = rollout.post("/responses", &json!({"model": "m"}));
    assert_eq!(answer.error("param"), "input");
    assert_eq!(answer.error("code"), "missing_field");
    let url = format!("{}/messages", rollout.base_url);
    let answer = crate::support::answer("POST", &url, &[("x-api-key", "no")], b"{}");
    assert_eq!(answer.status, 401);
    assert_eq!(answer.error("type"), "authentication_error");
}

/// The body of a request of Google's API.
fn google_body(contents: &[Value]) -> Value {
    json!({
        "contents": contents, "tools": tools()["google"],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": {"maxOutputTokens": 200},
    })
}

#[test]
fn chunks_of_generate_content_come_while_the_model_speaks() {
    let world = world(|_| Some("one two three".into()));
    let rollout = world.open();
    let body = json!({"contents": [{"parts": [{"text": "x"}]}]});
    let origin = rollout.base_url.trim_end_matches("/v1");
    let key = rollout.key.trim_start_matches("Bearer ");
    let post = |method: &str, headers: &[(&str, &str)]| {
        let url = format!("{origin}/v1beta/models/policy:{method}");
        crate::support::answer("POST", &url, headers, body.to_string().as_bytes())
    };
    // Google's header, and its key in the query.
    let events = post("streamGenerateContent?alt=sse", &[("x-goog-api-key", key)]);
    let array = post(&format!("streamGenerateContent?key={key}"), &[]);
    let whole = post(&format!("generateContent?key={key}"), &[]).ok();
    let events: Vec<Value> = events
        .text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let array: Vec<Value> = serde_json::from_str(&array.text).unwrap();
    let text = |chunks: &[Value]| -> String {
        let part = |c: &Value| c["candidates"][0]["content"]["parts"][0]["text"].clone();
        let parts = chunks.iter().map(part);
        parts
            .filter_map(|p| p.as_str().map(str::to_owned))
            .collect()
    };
    for chunks in [&events, &array] {
        assert_eq!(text(chunks), "one two three");
        assert!(chunks.len() > 2, "{chunks:?}");
        let last = chunks.last().unwrap();
        assert_eq!(last["candidates"][0]["finishReason"], "STOP");
        for count in ["promptTokenCount", "candidatesTokenCount"] {
            assert_eq!(last["usageMetadata"][count], whole["usageMetadata"][count]);
        }
        let ended = |c: &Value| c["candidates"][0].get("finishReason").is_some();
        assert_eq!(chunks.iter().filter(|c| ended(c)).count(), 1);
    }
    assert_eq!(text(&[whole]), "one two three");
}

#[test]
fn googles_paths_refuse_in_their_own_shape() {
    let world = world(script);
    let rollout = world.open();
    let post = |path: &str, body: &Value| rollout.post(&format!("/v1beta/models/{path}"), body);
    let told = post("m:generateContent", &json!({}));
    assert_eq!(told.status, 400, "{told:?}");
    assert_eq!(told.json()["error"]["code"], 400);
    assert_eq!(told.error("status"), "INVALID_ARGUMENT");
    let told = post("m:embedContent", &json!({}));
    assert_eq!(
        (told.status, told.error("status").as_str()),
        (404, "NOT_FOUND")
    );
    let told = post("m:countTokens", &json!({}));
    assert_eq!(
        (told.status, told.error("status").as_str()),
        (400, "INVALID_ARGUMENT")
    );
    let url = format!("{}/v1beta/models/m:generateContent", world.url);
    for (url, status) in [
        (format!("{url}?key=wrong"), "UNAUTHENTICATED"),
        (url, "UNAUTHENTICATED"),
    ] {
        let told = crate::support::answer("POST", &url, &[], b"{}");
        assert_eq!((told.status, told.error("status").as_str()), (401, status));
    }
    // A key in the query opens nothing but Google's paths.
    let key = rollout.key.trim_start_matches("Bearer ");
    let url = format!("{}/chat/completions?key={key}", rollout.base_url);
    assert_eq!(crate::support::answer("POST", &url, &[], b"{}").status, 401);
}

/// Nobody else's answers can be continued from.
#[test]
fn answers_are_kept_for_their_rollout_alone() {
    let world = world(script);
    let (one, other) = (world.open(), world.open());
    let first = one
        .post("/responses", &json!({"model": "m", "input": "x"}))
        .ok();
    let next = json!({"model": "m", "input": "y", "previous_response_id": first["id"]});
    let refused = other.post("/responses", &next);
    assert_eq!(refused.status, 400);
    assert_eq!(refused.error("code"), "previous_response_not_found");
    let answer = one.post("/responses", &next).ok();
    assert_eq!(answer["output"][0]["content"][0]["text"], "you said: y");
    assert_eq!(world.view(&one.id)["stats"]["joins"]["extend"], 1);
}

/// The gateway's counters.
fn counters(world: &World) -> Value {
    let health = world.control("GET", "/health", &json!({})).ok();
    health["gateway"].clone()
}

/// A request with these items, and the items that its answer is sent back as.
type Speak = fn(&Opened, &[Value]) -> Vec<Value>;

fn chat(rollout: &Opened, messages: &[Value]) -> Vec<Value> {
    let mut all = vec![json!({"role": "system", "content": "Be brief."})];
    all.extend_from_slice(messages);
    let body = json!({"model": "m", "messages": all});
    let told = rollout.post("/chat/completions", &body).ok();
    vec![told["choices"][0]["message"].clone()]
}

fn responses(rollout: &Opened, input: &[Value]) -> Vec<Value> {
    let body = json!({
        "model": "m", "instructions": "Be brief.", "input": input, "tools": tools()["openai"],
    });
    let told = rollout.post("/responses", &body).ok();
    told["output"].as_array().unwrap().clone()
}

fn anthropic(rollout: &Opened, messages: &[Value]) -> Vec<Value> {
    let body = json!({
        "model": "m", "max_tokens": 200, "system": "Be brief.", "messages": messages,
        "tools": tools()["anthropic"],
    });
    let told = rollout.post("/messages", &body).ok();
    vec![json!({"role": "assistant", "content": told["content"]})]
}

fn google(rollout: &Opened, contents: &[Value]) -> Vec<Value> {
    let path = "/v1beta/models/m:generateContent";
    let told = rollout.post(path, &google_body(contents)).ok();
    vec![told["candidates"][0]["content"].clone()]
}

/// The next content for Google's API.
fn next_content(said: &[Value], turn: usize) -> Value {
    let parts = said.iter().filter_map(|s| s["parts"].as_array()).flatten();
    let calls = parts.filter_map(|part| part.get("functionCall"));
    let result = |call: &Value| {
        json!({"functionResponse": {
            "id": call["id"], "name": call["name"], "response": {"output": "42"},
        }})
    };
    let results: Vec<Value> = calls.map(result).collect();
    let text = json!({"text": format!("Turn {turn}.")});
    let parts = if results.is_empty() {
        vec![text]
    } else {
        results
    };
    json!({"role": "user", "parts": parts})
}

/// The agent's next message: results of the calls, or something new.
fn next(said: &[Value], turn: usize) -> Vec<Value> {
    let of = |kind: &str| {
        let blocks = said.iter().chain(
            said.iter()
                .flat_map(|s| s["content"].as_array().into_iter().flatten()),
        );
        let found: Vec<Value> = blocks.filter(|b| b["type"] == kind).cloned().collect();
        found
    };
    let calls = of("function_call");
    if !calls.is_empty() {
        let result = |call: &Value| json!({"type": "function_call_output", "call_id": call["call_id"], "output": "42"});
        return calls.iter().map(result).collect();
    }
    let uses = of("tool_use");
    if !uses.is_empty() {
        let result = |call: &Value| json!({"type": "tool_result", "tool_use_id": call["id"], "content": "42"});
        let results: Vec<Value> = uses.iter().map(result).collect();
        return vec![json!({"role": "user", "content": results})];
    }
    vec![json!({"role": "user", "content": format!("Turn {turn}.")})]
}

/// Whole histories are sent each turn; only what is new in them is read, and tokens and joins
/// are those of a history that is read whole.
#[test]
fn histories_are_read_once_in_every_dialect() {
    for (speak, is_google) in [
        (chat as Speak, false),
        (responses, false),
        (anthropic, false),
        (google, true),
    ] {
        let world = world(script);
        let rollout = world.open();
        let mut history = if is_google {
            vec![next_content(&[], 0)]
        } else {
            vec![json!({"role": "user", "content": "Turn 0."})]
        };
        for turn in 1..6 {
            let said = speak(&rollout, &history);
            let more = if is_google {
                vec![next_content(&said, turn)]
            } else {
                next(&said, turn)
            };
            history.extend(said);
            history.extend(more);
        }
        let counted = counters(&world);
        assert_eq!(counted["recognized"], 4, "{counted}");
        assert_eq!(counted["joins"]["extend"], 4, "{counted}");
        // A gateway that has never seen it reads it whole; its renderer gives as many tokens.
        let view = world.view(&rollout.id);
        let calls = view["calls"].as_array().unwrap();
        assert_eq!(calls.len(), 5);
        let trace = world.finish(&rollout.id);
        assert_eq!(trace["branches"], 1, "{trace}");
        let after = counters(&world);
        assert_eq!(after["sampled_tokens"], after["stored_tokens"], "{after}");
        assert_eq!(after["open_tokens"], 0);
        assert_eq!(after["unproven"], 0);
    }
}

#[test]
fn another_head_is_another_conversation() {
    let world = world(script);
    let rollout = world.open();
    let user = |text: &str| json!({"role": "user", "content": text});
    let first = json!({"model": "m", "instructions": "A", "input": [user("x")]});
    let said = rollout.post("/responses", &first).ok()["output"].clone();
    let grown = json!([user("x"), said[0], user("y")]);
    for (instructions, recognized) in [("B", 0), ("A", 1)] {
        let body = json!({"model": "m", "instructions": instructions, "input": grown});
        let told = rollout.post("/responses", &body).ok();
        assert_eq!(told["output"][0]["content"][0]["text"], "you said: y");
        assert_eq!(counters(&world)["recognized"], recognized);
    }
    let joins = world.view(&rollout.id)["stats"]["joins"].clone();
    assert_eq!(joins["extend"], 1, "{joins}");
    world.finish(&rollout.id);
}

/// An answer to a history that was read in parts can be continued from, with all of it.
#[test]
fn what_was_not_read_again_is_kept_for_later() {
    let world = world(|prompt| Some(format!("{} words", prompt.matches("<|im_start|>").count())));
    let rollout = world.open();
    let mut input = vec![json!({"role": "user", "content": "one"})];
    let mut last = Value::Null;
    for text in ["two", "three", "four"] {
        let told = rollout
            .post("/responses", &json!({"model": "m", "input": input}))
            .ok();
        input.push(told["output"][0].clone());
        input.push(json!({"role": "user", "content": text}));
        last = told;
    }
    assert_eq!(counters(&world)["recognized"], 2);
    let body = json!({"model": "m", "input": "four", "previous_response_id": last["id"]});
    let told = rollout.post("/responses", &body).ok();
    // Seven messages and the one that the model speaks.
    assert_eq!(told["output"][0]["content"][0]["text"], "8 words");
    assert_eq!(world.view(&rollout.id)["stats"]["joins"]["extend"], 3);
    // Sent whole, it is the same prompt.
    let whole = rollout
        .post("/responses", &json!({"model": "m", "input": input}))
        .ok();
    assert_eq!(whole["output"][0]["content"][0]["text"], "8 words");
    assert_eq!(world.view(&rollout.id)["stats"]["joins"]["resample"], 1);
}

#[test]
fn metrics_count_tokens_and_retries() {
    let world = world(|_| Some("four".into()));
    let metric = |name: &str| {
        let text = world.control("GET", "/metrics", &json!({})).text;
        let line = text.lines().find(|l| l.split(' ').next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("no {name}:\n{text}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let url = format!("{}/metrics", world.url);
    assert_eq!(crate::support::answer("GET", &url, &[], b"").status, 401);
    let rollout = world.open();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    rollout.post("/chat/completions", &body).ok();
    let again = [("x-stainless-retry-count", "1")];
    rollout.post_with("/chat/completions", &body, &again).ok();
    assert_eq!(metric("sinew_retries_coalesced_total"), 1.0);
    assert_eq!(metric("sinew_calls_total"), 1.0);
    // "four" and the end of the turn.
    assert_eq!(metric("sinew_sampled_tokens_total"), 5.0);
    assert_eq!(metric("sinew_open_tokens"), 5.0);
    assert_eq!(metric("sinew_joins_total{join=\"start\"}"), 1.0);
    world.finish(&rollout.id);
    assert_eq!(metric("sinew_stored_tokens_total"), 5.0);
    assert_eq!(metric("sinew_engine_sampled_tokens_total"), 5.0);
    assert_eq!(metric("sinew_open_tokens"), 0.0);
}
