//! Arbitrary requests cause no panic, and admitted items keep every promise.

use crate::{call, lease, pool, push_of, trajectory};
use proptest::prelude::*;
use serde_json::{Value, json};
use sinew_pool::{Entry, Pool};
use sinew_types::{TokenKind, TraceError};
use std::sync::Arc;

/// An answer of the pool.
struct Told {
    status: u16,
    content_type: String,
    body: Vec<u8>,
}

fn send(pool: &Arc<Pool>, path: &str, content_type: &str, body: Vec<u8>) -> Told {
    let (status, content_type, body) = crate::send(pool, 10.0, ("POST", path), content_type, body);
    Told {
        status,
        content_type,
        body,
    }
}

fn value(told: &Told) -> Value {
    assert_eq!(told.content_type, "application/json");
    serde_json::from_slice(&told.body).unwrap()
}

#[test]
fn a_bad_row_is_quarantined_and_the_others_are_admitted() {
    let pool = pool();
    let changed = |id: &str, change: &dyn Fn(&mut Value)| {
        let mut row = trajectory(id);
        change(&mut row);
        row
    };
    let rows = [
        trajectory("good"),
        changed("turn", &|r| r["nodes"][1]["process_reward"] = json!(1e308)),
        changed("outcome", &|r| r["reward"] = json!(-2e30)),
        changed("metric", &|r| r["metrics"] = json!({"m": 1e31})),
        changed("version", &|r| {
            r["nodes"][1]["version"] = json!(1_u64 << 63)
        }),
        changed("sum", &|r| {
            r["reward"] = json!(1e30);
            r["nodes"][1]["process_reward"] = json!(1e30);
        }),
        trajectory("too"),
    ];
    let (status, told) = push_of(&pool, 10.0, &rows);
    assert_eq!(status, 200, "{told}");
    assert_eq!(
        (&told["admitted"], &told["quarantined"]),
        (&json!(2), &json!(5)),
        "{told}"
    );
    let codes: Vec<_> = (1..6)
        .map(|i| told["items"][i]["reason"]["code"].clone())
        .collect();
    assert_eq!(
        codes,
        [
            "not_finite",
            "not_finite",
            "not_finite",
            "versions",
            "not_finite"
        ]
    );
}

/// Changes one place of a JSON value: the `n`-th leaf or container, counted from the root.
fn mutate(value: &mut Value, n: &mut usize, to: &Value) {
    if *n == 0 {
        *value = to.clone();
        *n = usize::MAX;
        return;
    }
    *n -= 1;
    match value {
        Value::Array(items) => {
            for item in items {
                if *n == usize::MAX {
                    return;
                }
                mutate(item, n, to);
            }
        }
        Value::Object(fields) => {
            for (_, item) in fields.iter_mut() {
                if *n == usize::MAX {
                    return;
                }
                mutate(item, n, to);
            }
        }
        _ => {}
    }
}

fn wild() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-20i64..20).prop_map(Value::from),
        any::<f64>().prop_map(|f| json!(f)),
        ".{0,12}".prop_map(Value::from),
        prop::collection::vec(-3i64..14, 0..5).prop_map(|v| json!(v)),
        prop::collection::vec(-3.0f64..1.0, 0..5).prop_map(|v| json!(v)),
        Just(json!({})),
        Just(json!([{"start": 0, "len": 2, "version": 1}])),
        Just(json!([{"role": "user", "content": "A>"}, {"role": "assistant", "content": "r"}])),
    ]
}

fn keeps_its_promises(entry: &Entry, vocab: u32) -> Result<(), TraceError> {
    let trace = &entry.trace;
    trace.validate()?;
    for node in &trace.nodes {
        let sampled = node.kind == TokenKind::Sampled;
        assert!(!node.tokens.is_empty() && node.tokens.iter().all(|t| *t < vocab));
        assert_eq!(
            node.logprobs.len(),
            if sampled { node.tokens.len() } else { 0 }
        );
        assert!(node.logprobs.iter().all(|l| l.is_finite() && *l <= 1e-3));
        let versions: u32 = node.versions.iter().map(|s| s.len).sum();
        assert_eq!(versions as usize, node.logprobs.len());
    }
    assert!(trace.sampled_tokens() > 0 && trace.total_reward().is_finite());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_is_admitted_is_sound_whatever_was_changed(
        changes in prop::collection::vec((0usize..40, wild()), 1..4),
    ) {
        let pool = pool();
        let mut wrong = trajectory("a");
        for (at, to) in &changes {
            mutate(&mut wrong, &mut at.clone(), to);
        }
        let (status, told) = push_of(&pool, 10.0, &[wrong.clone()]);
        prop_assert_eq!(status, 200, "{} {}", wrong, told);
        let item = &told["items"][0];
        if item["status"] == "admitted" {
            for kind in ["rl", "sft", "dpo"] {
                let loan = lease(&pool, 10.0, json!({"kind": kind}));
                for entry in loan["groups"].as_array().unwrap().iter().flat_map(|g| g.as_array().unwrap()) {
                    let entry: Entry = serde_json::from_value(entry.clone()).unwrap();
                    keeps_its_promises(&entry, 11).unwrap();
                }
            }
        } else {
            // Held back and shown, with a reason that can be read.
            prop_assert!(item["reason"]["code"].is_string(), "{}", told);
            let (_, page) = call(&pool, 10.0, "GET", "/pool/quarantine", &Value::Null);
            prop_assert_eq!(page["rows"].as_array().unwrap().len(), 1);
        }
    }

    #[test]
    fn bytes_that_are_no_request_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let pool = pool();
        for (path, kind) in [
            ("/pool/trajectories", "application/json"),
            ("/v1/traces", "application/json"),
            ("/v1/traces", "application/x-protobuf"),
            ("/pool/lease", "application/json"),
            ("/pool/ack", "application/json"),
        ] {
            let told = send(&pool, path, kind, bytes.clone());
            // Protobuf skips unknown fields, so that some bytes are an empty request.
            prop_assert!(told.status == 400 || (told.status == 200 && kind.contains("protobuf")));
        }
        for path in ["/pool/trajectories", "/v1/traces"] {
            prop_assert_eq!(send(&pool, path, "text/plain", bytes.clone()).status, 415);
        }
    }
}

#[test]
fn a_resource_is_not_copied_into_thousands_of_spans() {
    let pool = pool();
    let spans: Vec<Value> = (0..2000)
        .map(
            |n| json!({"traceId": format!("{n:032x}"), "spanId": format!("{n:016x}"), "name": "x"}),
        )
        .collect();
    let of = |bytes: usize| {
        let attributes = json!([{"key": "k", "value": {"stringValue": "x".repeat(bytes)}}]);
        let scope = json!([{"spans": spans}]);
        let resource = json!([{"resource": {"attributes": attributes}, "scopeSpans": scope}]);
        json!({"resourceSpans": resource}).to_string().into_bytes()
    };
    let told = send(&pool, "/v1/traces", "application/json", of(100_000));
    assert_eq!(told.status, 400, "{}", value(&told));
    assert!(
        value(&told).to_string().contains("resource"),
        "{}",
        value(&told)
    );
    assert_eq!(
        send(&pool, "/v1/traces", "application/json", of(100)).status,
        200
    );
}
