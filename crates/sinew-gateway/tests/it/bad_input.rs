//! Wrong requests, and their error messages.

use crate::support::{Opened, World, answer, world, world_with};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

fn yes(_: &str) -> Option<String> {
    Some("yes".into())
}

/// A good request with one field changed; `null` takes it away.
fn changed(field: &str, value: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    body[field] = value;
    body
}

type Wrong = (&'static str, Value, &'static str);

fn wrong_messages() -> Vec<Wrong> {
    let call = |arguments: &str| {
        json!([{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}},
        ]}])
    };
    vec![
        ("model", json!(null), "model"),
        ("model", json!(7), "model"),
        ("messages", json!(null), "messages"),
        ("messages", json!("hi"), "messages"),
        ("messages", json!([]), "messages"),
        (
            "messages",
            json!([{"role": "wizard", "content": "x"}]),
            "messages[0].role",
        ),
        ("messages", json!([{"content": "x"}]), "messages[0].role"),
        (
            "messages",
            json!([{"role": "user", "content": 7}]),
            "messages[0].content",
        ),
        (
            "messages",
            json!([{"role": "tool", "content": "x"}]),
            "messages[0].tool_call_id",
        ),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].image_url.url",
        ),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "file", "file": {}}]}]),
            "messages[0].content[0].type",
        ),
        (
            "messages",
            call("{"),
            "messages[0].tool_calls[0].function.arguments",
        ),
    ]
}

fn wrong_settings() -> Vec<Wrong> {
    vec![
        ("temperature", json!(3), "temperature"),
        ("temperature", json!("hot"), "temperature"),
        ("top_p", json!(-1), "top_p"),
        ("top_p", json!(0), "top_p"),
        ("max_tokens", json!(0), "max_tokens"),
        ("max_completion_tokens", json!(1.5), "max_completion_tokens"),
        ("max_tokens", json!(1e300), "max_tokens"),
        ("n", json!(0), "n"),
        ("n", json!(17), "n"),
        ("seed", json!("x"), "seed"),
        ("stop", json!([""]), "stop"),
        ("stop", json!(7), "stop"),
        ("top_logprobs", json!(2), "top_logprobs"),
        ("logit_bias", json!({"x": 1}), "logit_bias"),
        ("logit_bias", json!({"9999": 1}), "logit_bias"),
        ("stream", json!("yes"), "stream"),
        ("tools", json!([{"type": "function"}]), "tools[0].function"),
        ("tools", json!([{"type": "custom"}]), "tools[0].custom"),
        ("tool_choice", json!("sometimes"), "tool_choice"),
        ("tool_choice", json!("required"), "tool_choice"),
        (
            "tool_choice",
            json!({"type": "function", "function": {"name": "f"}}),
            "tool_choice",
        ),
        (
            "response_format",
            json!({"type": "yaml"}),
            "response_format.type",
        ),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "x"}}),
            "response_format.json_schema.schema",
        ),
        ("guided_choice", json!([]), "guided_choice"),
        ("guided_regex", json!(7), "guided_regex"),
        (
            "structured_outputs",
            json!({"json_object": true, "regex": "a"}),
            "structured_outputs.json_object",
        ),
        ("presence_penalty", json!(0.5), "presence_penalty"),
        ("repetition_penalty", json!(1.1), "repetition_penalty"),
        ("min_tokens", json!(5), "min_tokens"),
        ("ignore_eos", json!(true), "ignore_eos"),
        ("bad_words", json!(["x"]), "bad_words"),
        ("stop_token_ids", json!([3]), "stop_token_ids"),
        (
            "chat_template_kwargs",
            json!({"enable_thinking": false}),
            "chat_template_kwargs",
        ),
        ("functions", json!([{"name": "f"}]), "functions"),
        ("function_call", json!({"name": "f"}), "function_call"),
        ("modalities", json!(["audio"]), "modalities"),
    ]
}

#[test]
fn every_wrong_field_is_refused_by_name() {
    let world = world(yes);
    let rollout = world.open();
    let cases = wrong_messages().into_iter().chain(wrong_settings());
    for (field, value, param) in cases {
        let body = changed(field, value);
        let told = rollout.post("/chat/completions", &body);
        assert_eq!(told.status, 400, "{body}: {told:?}");
        assert_eq!(told.error("param"), param, "{body}: {told:?}");
        assert_eq!(told.error("type"), "invalid_request_error");
        assert!(!told.error("message").is_empty());
    }
    // Nothing of all that is a turn or a token.
    let finished = world.finish(&rollout.id);
    assert_eq!(finished["sampled_tokens"], 0);
}

#[test]
fn harmless_fields_are_taken() {
    let world = world(yes);
    let rollout = world.open();
    for (field, value) in [
        ("user", json!("me")),
        ("metadata", json!({"a": "b"})),
        ("store", json!(false)),
        ("service_tier", json!("auto")),
        ("response_format", json!({"type": "text"})),
        ("frequency_penalty", json!(0)),
        ("tools", json!([])),
        ("tool_choice", json!("none")),
        ("stop", json!(null)),
        ("top_k", json!(-1)),
        ("logit_bias", json!({"65": -1.5})),
    ] {
        let told = rollout.post("/chat/completions", &changed(field, value));
        assert_eq!(told.status, 200, "{field}: {told:?}");
    }
}

#[test]
fn wrong_completions_are_refused() {
    let world = world(yes);
    let rollout = world.open();
    for (body, param) in [
        (json!({"model": "m"}), "prompt"),
        (json!({"model": "m", "prompt": ""}), "prompt"),
        (json!({"model": "m", "prompt": []}), "prompt"),
        (json!({"model": "m", "prompt": ["a", "b"]}), "prompt"),
        (json!({"model": "m", "prompt": [1, 99999]}), "prompt"),
        (json!({"model": "m", "prompt": [[1], [2]]}), "prompt"),
        (json!({"model": "m", "prompt": [[["x"]]]}), "prompt"),
        (
            json!({"model": "m", "prompt": "x", "max_tokens": 0}),
            "max_tokens",
        ),
        (
            json!({"model": "m", "prompt": "x", "echo": true, "stream": true}),
            "echo",
        ),
        (
            json!({"model": "m", "prompt": "x", "best_of": 2}),
            "best_of",
        ),
        (
            json!({"model": "m", "prompt": "x", "suffix": "y"}),
            "suffix",
        ),
    ] {
        let told = rollout.post("/completions", &body);
        assert_eq!(
            (told.status, told.error("param").as_str()),
            (400, param),
            "{body}"
        );
    }
}

/// Posts to the control API, which has to answer with a status and a part of the message.
fn refuser(world: &World) -> impl Fn(&str, Value, u16, &str) + '_ {
    |path, body, status, part| {
        let told = world.control("POST", path, &body);
        assert_eq!(told.status, status, "{path} {body}: {told:?}");
        assert!(told.error("message").contains(part), "{told:?}");
    }
}

#[test]
fn the_control_api_is_as_strict() {
    let world = world(yes);
    let refused = refuser(&world);
    refused("/rollouts", json!({"idd": "x"}), 400, "idd");
    refused("/rollouts", json!({"id": "a/b"}), 400, "letters");
    for id in ["", ".", "..", "..."] {
        refused("/rollouts", json!({"id": id}), 400, "not dots alone");
    }
    refused("/rollouts", json!({"id": "x".repeat(129)}), 400, "128");
    refused(
        "/rollouts",
        json!({"sampling": {"temprature": 1}}),
        400,
        "temprature",
    );
    for (spec, field) in [
        (json!({"max_turns": 0}), "max_turns = 0"),
        (json!({"max_context_tokens": 0}), "max_context_tokens = 0"),
        (json!({"sampling": {"temperature": -1}}), "temperature = -1"),
        (json!({"sampling": {"top_p": 1.5}}), "top_p = 1.5"),
        (json!({"sampling": {"max_tokens": 0}}), "max_tokens = 0"),
    ] {
        refused("/rollouts", spec, 400, field);
    }
    for (spec, told) in [
        (json!({"id": 5}), "id: integer `5`, expected a string"),
        (
            json!({"sampling": 5}),
            "sampling: integer `5`, expected an object",
        ),
        (
            json!({"sampling": {"temperature": "hot"}}),
            "sampling.temperature: string \"hot\", expected a number",
        ),
        (
            json!({"max_turns": 1.5}),
            "max_turns: floating point `1.5`, expected a whole number from 0 to 4294967295",
        ),
    ] {
        refused("/rollouts", spec, 400, told);
    }
}

#[test]
fn rewards_and_ends_are_checked_by_field() {
    let world = world(yes);
    let refused = refuser(&world);
    refused("/rollouts/none/reward", json!({"reward": 1}), 404, "none");
    refused("/rollouts/none/finish", json!({}), 404, "none");
    refused("/nothing", json!({}), 404, "/nothing");
    let rollout = world.open();
    let reward = format!("/rollouts/{}/reward", rollout.id);
    refused(&reward, json!({}), 400, "reward");
    refused(
        &reward,
        json!({"reward": "good"}),
        400,
        "reward: string \"good\", expected a number",
    );
    let metrics = json!({"reward": 1, "metrics": {"a": "b"}});
    refused(
        &reward,
        metrics,
        400,
        "metrics.a: string \"b\", expected a number",
    );
    let finish = format!("/rollouts/{}/finish", rollout.id);
    for (end, told) in [
        (
            json!("x"),
            "an object whose type is terminated, truncated or failed",
        ),
        (
            json!({"type": "x"}),
            "end.type: unknown value `x`, expected one of `terminated`, `truncated`, `failed`",
        ),
        (json!({"type": "truncated"}), "missing field `limit`"),
    ] {
        refused(&finish, json!({"end": end}), 400, told);
    }
    refused(&reward, json!({"reward": 1, "turn": 1}), 400, "turn 1");
    let wrong_method = world.control("GET", &reward, &json!({}));
    assert_eq!(wrong_method.status, 405);
    assert_eq!(
        world.control("GET", "/rollouts/none", &json!({})).status,
        404
    );
}

#[test]
fn sizes_are_bounded() {
    let world = world_with(yes, |config, _| config.server.max_body_bytes = 4096);
    let rollout = world.open();
    let big = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(5000)}]});
    let told = rollout.post("/chat/completions", &big);
    assert_eq!(
        (told.status, told.error("code").as_str()),
        (413, "body_too_large")
    );
    for garbage in [b"".as_slice(), b"{", b"[]", b"\xff\xfe", b"nope"] {
        let url = format!("{}/chat/completions", rollout.base_url);
        let told = answer("POST", &url, &[("authorization", &rollout.key)], garbage);
        assert_eq!(
            (told.status, told.error("code").as_str()),
            (400, "invalid_json")
        );
    }
    // It still serves.
    let small = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    rollout.post("/chat/completions", &small).ok();
}

#[test]
fn times_are_bounded() {
    let world = world_with(yes, |config, _| {
        config.server.read_timeout = Duration::from_secs(1);
    });
    let rollout = world.open();
    // A body that never comes.
    let told = raw(
        &world,
        &format!(
            "POST {}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: {}\r\ncontent-length: 10\r\n\r\n{{",
            path_of(&rollout),
            rollout.key
        ),
    );
    assert!(told.starts_with("HTTP/1.1 408"), "{told}");
    // A head that never ends, and one that is too long.
    assert!(!raw(&world, "POST / HTTP/1.1\r\nhost").contains(" 200 "));
    let long = format!("GET /health HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(200_000));
    assert!(!raw(&world, &long).contains(" 200 "));
    // It still serves.
    answer("GET", &format!("{}/health", world.url), &[], b"").ok();
}

fn path_of(rollout: &Opened) -> String {
    let at = rollout.base_url.find("/r/").unwrap();
    rollout.base_url[at..].to_owned()
}

/// Sends bytes as they are and reads what comes until the connection is closed.
fn raw(world: &World, request: &str) -> String {
    let address = world.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    // The server may close before all of it was written.
    let _ = stream.write_all(request.as_bytes());
    let mut told = Vec::new();
    let mut buffer = [0u8; 4096];
    while let Ok(n) = stream.read(&mut buffer) {
        told.extend_from_slice(&buffer[..n]);
        if n == 0 || told.starts_with(b"HTTP/1.1 408") {
            break;
        }
    }
    String::from_utf8_lossy(&told).into_owned()
}

#[test]
fn who_takes_no_answers_gives_its_place_up() {
    let world = world_with(yes, |config, _| {
        config.server.max_connections = 1;
        config.server.write_timeout = Duration::from_secs(1);
    });
    let address = world.url.strip_prefix("http://").unwrap().to_owned();
    let mut greedy = TcpStream::connect(&address).unwrap();
    let patience = Some(Duration::from_secs(60));
    greedy.set_write_timeout(patience).unwrap();
    // Requests without any key are pipelined until neither side has room for more; nobody reads the answers.
    let asked = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1000);
    while greedy.write_all(&asked).is_ok() {}
    let mut next = TcpStream::connect(&address).unwrap();
    next.set_read_timeout(patience).unwrap();
    next.write_all(&asked[..asked.len() / 1000]).unwrap();
    let mut told = [0; 15];
    next.read_exact(&mut told).expect("there is a place again");
    assert_eq!(&told, b"HTTP/1.1 200 OK");
    drop(greedy);
}

#[test]
fn a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() {
    let world = world_with(yes, |config, _| config.session.max_context_tokens = 1000);
    let rollout = world.open();
    let messages = json!([{"role": "user", "content": "x"}]);
    let of = |content: &str, count: usize| {
        let message = json!({"role": "user", "content": content});
        json!({"model": "m", "messages": vec![message; count]})
    };
    let spaced = "some words of it\n".repeat(1 << 16);
    let bodies = [
        of(&"x".repeat(1 << 20), 1),
        of("", 8000),
        of(&"x".repeat(1 << 17), 1),
        of(&spaced, 1),
    ];
    for body in bodies {
        let told = rollout.post("/chat/completions", &body);
        assert_eq!(told.error("code"), "context_length_exceeded", "{told:?}");
        // The reported number is a lower bound: a token for each byte, and more for each message, would be
        // counted.
        let least = told.text.split("at least ").nth(1).unwrap();
        let least: u32 = least.split(' ').next().unwrap().parse().unwrap();
        assert!((1000..80_000).contains(&least), "{least}");
        assert!(least <= 8000 / 4 || body["messages"].as_array().unwrap().len() == 1);
    }
    // Prompts that may fit are counted.
    let told = rollout.post("/chat/completions", &of(&"x".repeat(2000), 1));
    assert!(told.text.contains("at least 2"), "{told:?}");
    let body = json!({"model": "m", "messages": messages, "max_tokens": 2});
    rollout.post("/chat/completions", &body).ok();
}
