//! OpenTelemetry's GenAI spans.

use crate::{call, config, lease, leased_ids, open, pool};
use serde_json::{Value, json};
use sinew_pool::{Pool, PoolConfig};
use std::sync::Arc;

const TRACE: &str = "0123456789abcdef0123456789abcdef";

fn attributes(of: &Value) -> Value {
    let one = |(key, value): (&String, &Value)| {
        let value = match value {
            Value::String(s) => json!({"stringValue": s}),
            Value::Bool(b) => json!({"boolValue": b}),
            Value::Number(n) if n.is_f64() => json!({"doubleValue": n}),
            Value::Number(n) => json!({"intValue": n.to_string()}),
            other => json!({"stringValue": other.to_string()}),
        };
        json!({"key": key, "value": value})
    };
    of.as_object().unwrap().iter().map(one).collect()
}

fn span(n: u32, parent: Option<u32>, of: &Value, events: Value) -> Value {
    let id = |n: u32| format!("{n:016x}");
    json!({
        "traceId": TRACE, "spanId": id(n), "parentSpanId": parent.map(id).unwrap_or_default(),
        "name": "x", "startTimeUnixNano": (1_000_000 * u64::from(n)).to_string(),
        "attributes": attributes(of), "events": events,
    })
}

fn send(pool: &Arc<Pool>, now_s: f64, spans: &[Value]) -> (u16, Value) {
    let resource = json!({"attributes": attributes(&json!({
        "service.name": "agent", "sinew.tokenizer": pool.tokenizer()}))});
    let body = json!({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]});
    call(pool, now_s, "POST", "/v1/traces", &body)
}

fn text(role: &str, content: &str) -> Value {
    json!({"role": role, "parts": [{"type": "text", "content": content}]})
}

/// Two turns, with the world's message between them.
fn conversation() -> Vec<Value> {
    let first = json!({"gen_ai.operation.name": "chat", "gen_ai.input.messages": [text("user", "A.>")],
        "gen_ai.output.messages": [text("assistant", "r")]});
    let second = json!({"gen_ai.operation.name": "chat",
        "gen_ai.input.messages": [text("user", "A.>"), text("assistant", "r"),
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": ".A>"}]}],
        "gen_ai.output.messages": [text("assistant", "r")]});
    let scored = json!([{"name": "gen_ai.evaluation.result",
        "attributes": attributes(&json!({"gen_ai.evaluation.name": "goal", "gen_ai.evaluation.score.value": 0.75}))}]);
    let root = json!({"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "walker",
        "gen_ai.conversation.id": "task-7"});
    vec![
        span(2, Some(1), &first, json!([])),
        span(3, Some(1), &second, json!([])),
        span(
            4,
            Some(3),
            &json!({"gen_ai.operation.name": "execute_tool"}),
            json!([]),
        ),
        span(1, None, &root, scored),
    ]
}

#[test]
fn text_alone_is_held_back_from_rl_and_released_as_something_to_imitate() {
    let pool = pool();
    assert_eq!(send(&pool, 10.0, &conversation()), (200, json!({})));
    let (_, page) = call(&pool, 10.0, "GET", "/pool/quarantine", &Value::Null);
    let row = &page["rows"][0];
    assert_eq!(
        (&row["reason"]["code"], &row["source"]),
        (&json!("text_only"), &json!("agent"))
    );
    let release = format!(
        "/pool/quarantine/{}/release",
        row["quarantine"].as_str().unwrap()
    );
    let (_, told) = call(&pool, 10.0, "POST", &release, &json!({"kind": "rl"}));
    assert_eq!(told["reason"]["code"], "text_only");
    let (_, told) = call(&pool, 10.0, "POST", &release, &json!({"kind": "sft"}));
    assert_eq!(told["status"], "admitted", "{told}");
    let loan = lease(&pool, 11.0, json!({"kind": "sft"}));
    let entry = &loan["groups"][0][0];
    assert_eq!(leased_ids(&loan), [format!("otel-{TRACE}")]);
    let trace = &entry["trace"];
    assert_eq!(
        (&trace["task"], &trace["task_kind"]),
        (&json!("task-7"), &json!("walker"))
    );
    assert_eq!(trace["outcome"]["reward"], 0.75);
    let tokens: Vec<_> = trace["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n["tokens"].clone())
        .collect();
    // <user> A . > <end> <model>, r <end>, <tool> . A > <end> <model>, r <end>
    let expected = json!([[2, 6, 5, 8, 0, 3], [10, 0], [4, 5, 6, 8, 0, 3], [10, 0]]);
    assert_eq!(json!(tokens), expected);
}

#[test]
fn a_configured_pool_takes_text_as_what_it_says_and_spans_may_come_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let rules = || config(json!({"text_spans": "dpo", "span_ttl_s": 60.0}));
    let first = open(Some(dir.path()), rules());
    let spans = conversation();
    send(&first, 10.0, &spans[..2]);
    let (_, status) = call(&first, 10.0, "GET", "/pool", &Value::Null);
    assert_eq!(
        (&status["spans"], &status["groups"]["whole"]),
        (&json!(2), &json!(0))
    );
    drop(first);
    let pool = open(Some(dir.path()), rules());
    send(&pool, 20.0, &spans[2..]);
    let loan = lease(&pool, 20.0, json!({"kind": "dpo"}));
    assert_eq!(leased_ids(&loan).len(), 1);
    // The whole trace again is the same trajectory.
    send(&pool, 21.0, &spans);
    let (_, status) = call(&pool, 21.0, "GET", "/pool", &Value::Null);
    assert_eq!(
        (&status["spans"], &status["quarantine"]["rows"]),
        (&json!(0), &json!(0))
    );
    // A trace whose root never comes is not forgotten.
    let mut lost = spans[0].clone();
    lost["traceId"] = json!("ff".repeat(16));
    send(&pool, 30.0, &[lost]);
    let (_, status) = call(&pool, 100.0, "GET", "/pool", &Value::Null);
    assert_eq!(status["quarantine"]["reasons"], json!({"spans": 1}));
}

#[test]
fn spans_with_token_ids_become_an_exact_tree() {
    let pool = pool();
    let said = |input: Value, output: Value, logprobs: Value| {
        json!({"gen_ai.operation.name": "chat", "sinew.input.token_ids": input,
            "sinew.output.token_ids": output, "sinew.output.logprobs": logprobs, "sinew.policy_version": 4})
    };
    let spans = [
        span(
            1,
            None,
            &json!({"sinew.task": "t", "sinew.group": "g", "sinew.reward": 1.0, "sinew.id": "mine"}),
            json!([]),
        ),
        span(
            2,
            Some(1),
            &said(json!([2, 6, 0, 3]), json!([10, 0]), json!([-0.5, -0.25])),
            json!([]),
        ),
        span(
            3,
            Some(1),
            &said(json!([2, 6, 0, 3]), json!([9, 0]), json!([-0.75, -0.25])),
            json!([]),
        ),
        span(
            4,
            Some(1),
            &{
                let mut said = said(
                    json!([2, 6, 0, 3, 10, 0, 4, 6, 0, 3]),
                    json!([10]),
                    json!([-1.5]),
                );
                said["gen_ai.request.temperature"] = json!(0.3);
                said["sinew.output.temperature"] = json!(0.5);
                said
            },
            json!([]),
        ),
    ];
    send(&pool, 10.0, &spans);
    let loan = lease(&pool, 10.0, json!({"version": 4}));
    assert_eq!(leased_ids(&loan), ["mine"]);
    let nodes = loan["groups"][0][0]["trace"]["nodes"]
        .as_array()
        .unwrap()
        .clone();
    let shape: Vec<_> = nodes
        .iter()
        .map(|n| (n["parent"].as_u64().unwrap(), n["kind"].as_str().unwrap()))
        .collect();
    let root = u64::from(u32::MAX);
    assert_eq!(
        shape,
        [
            (root, "prompt"),
            (0, "sampled"),
            (0, "sampled"),
            (1, "observation"),
            (3, "sampled")
        ]
    );
    assert_eq!(nodes[4]["logprobs"], json!([-1.5]));
    assert_eq!(
        (nodes[4].get("temperature"), nodes[1].get("temperature")),
        (Some(&json!(0.5)), None)
    );
}

#[test]
fn wrong_spans_are_told_as_a_partial_success() {
    let pool = open(None, PoolConfig::default());
    let mut wrong = conversation();
    wrong[1]["spanId"] = json!("xyz");
    let (status, told) = send(&pool, 10.0, &wrong);
    assert_eq!(
        (status, &told["partialSuccess"]["rejectedSpans"]),
        (200, &json!("1"))
    );
    let image = json!({"gen_ai.operation.name": "chat", "gen_ai.output.messages":
        [{"role": "assistant", "parts": [{"type": "blob", "content": "x"}]}]});
    let mut image = span(9, None, &image, json!([]));
    image["traceId"] = json!("ee".repeat(16));
    send(&pool, 10.0, &[image]);
    let (_, page) = call(&pool, 10.0, "GET", "/pool/quarantine", &Value::Null);
    assert!(page.to_string().contains("blob"), "{page}");
    assert_eq!(call(&pool, 10.0, "POST", "/v1/traces", &json!({})).0, 400);
}

#[test]
fn more_spans_than_the_pool_holds_are_the_clients_error() {
    let pool = open(None, config(json!({"max_quarantine": 4})));
    let own = json!({"gen_ai.operation.name": "chat"});
    let spans: Vec<_> = (0..5)
        .map(|n| span(n + 1, Some(n), &own, json!([])))
        .collect();
    let (status, told) = send(&pool, 10.0, &spans);
    assert_eq!(status, 413, "{told}");
    assert_eq!(told["error"]["code"], "too_many_rows");
}
