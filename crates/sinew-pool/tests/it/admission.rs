//! Admission, quarantine, leases, restarts.

use crate::{call, config, items, lease, leased_ids, open, pool, push_of, trajectory};
use serde_json::{Value, json};
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_pool::{Pool, PoolConfig, Scorer};
use sinew_render::TinyRenderer;
use sinew_types::{Engine, EngineEvent, GenerateRequest, RequestId, SampledToken, SamplingParams};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};

fn with(id: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut t = trajectory(id);
    change(&mut t);
    t
}

#[test]
fn pushing_again_is_nothing_new_and_another_content_is_told_apart() {
    let pool = pool();
    let anonymous = with("x", |t| {
        t.as_object_mut().unwrap().remove("id");
    });
    let told = items(
        &pool,
        &[trajectory("a"), anonymous.clone(), trajectory("a")],
    );
    let statuses: Vec<_> = told.iter().map(|i| i["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["admitted", "admitted", "duplicate"]);
    let id = told[1]["id"].as_str().unwrap();
    assert!(id.starts_with("c-"), "{id}");
    let again = items(&pool, &[anonymous, with("a", |t| t["reward"] = json!(0.5))]);
    assert_eq!(
        (&again[0]["status"], &again[0]["id"]),
        (&json!("duplicate"), &json!(id))
    );
    assert_eq!(again[1]["reason"]["code"], "id_conflict");
    let (_, status) = call(&pool, 10.0, "GET", "/pool", &Value::Null);
    assert_eq!(status["trajectories"]["ready"], 2);
    assert_eq!(
        status["quarantine"],
        json!({"rows": 1, "reasons": {"id_conflict": 1}})
    );
}

/// A node of `trajectory` with another value.
fn node(n: usize, key: &str, value: Value) -> Value {
    with("a", |t| t["nodes"][n][key] = value)
}

fn field(key: &str, value: Value) -> Value {
    with("a", |t| t[key] = value)
}

#[test]
fn every_wrong_token_is_named() {
    let pool = open(None, config(json!({"max_tokens": 12})));
    let long: Vec<u32> = vec![2; 11];
    let spans = with("a", |t| {
        t["nodes"][1]["version"] = Value::Null;
        t["nodes"][1]["versions"] = json!([{"start": 0, "len": 1, "version": 3}]);
    });
    let prompt_only = with("a", |t| drop(t["nodes"].as_array_mut().unwrap().pop()));
    for (code, wrong) in [
        ("unknown_token", node(1, "tokens", json!([11, 0]))),
        ("empty_node", node(1, "tokens", json!([]))),
        ("too_large", node(0, "tokens", json!(long))),
        ("logprob_count", node(1, "logprobs", json!([-0.5]))),
        ("logprob_value", node(1, "logprobs", json!([-0.5, 0.1]))),
        ("logprob_value", node(1, "logprobs", json!([-0.5, null]))),
        ("logprob_value", node(1, "logprobs", json!([-0.5, -1e300]))),
        ("logprobs_missing", node(1, "logprobs", Value::Null)),
        ("temperature", node(1, "temperature", json!(0.0))),
        ("temperature", node(1, "temperature", json!(-0.7))),
        ("temperature", node(1, "temperature", json!(1e30))),
        ("schema", node(1, "temperature", json!("warm"))),
        ("not_sampled", node(0, "temperature", json!(1.0))),
        ("versions", node(1, "version", Value::Null)),
        ("versions", spans),
        ("parent", node(1, "parent", json!(1))),
        ("root", node(1, "parent", Value::Null)),
        ("not_sampled", node(0, "version", json!(3))),
        ("nothing_sampled", prompt_only),
        (
            "messages_differ",
            node(
                1,
                "messages",
                json!([{"role": "assistant", "content": "l"}]),
            ),
        ),
        (
            "messages_differ",
            node(0, "messages", json!([{"role": "user", "content": "A<"}])),
        ),
    ] {
        let told = items(&pool, std::slice::from_ref(&wrong));
        assert_eq!(told[0]["reason"]["code"], code, "{wrong} {told:?}");
        assert!(told[0]["message"].as_str().unwrap().len() > 10);
    }
    assert!(leased_ids(&lease(&pool, 11.0, json!({}))).is_empty());
}

#[test]
fn every_wrong_field_is_named() {
    let pool = open(None, config(json!({"filter": {"reward": [-1.0, 1.0]}})));
    let text = json!({"task": "t", "reward": 1, "messages": [{"role": "user", "content": "A>"}]});
    let failed = json!({"type": "failed", "kind": "engine", "message": "x"});
    for (code, wrong) in [
        ("schema", field("rewrad", json!(1))),
        ("schema", field("messages", json!([]))),
        ("schema", json!(7)),
        ("schema", field("group_size", json!(2))),
        ("schema", field("task", json!("a\nb"))),
        ("schema", field("end", failed)),
        ("too_large", field("task", json!("x".repeat(300)))),
        ("reward_missing", field("reward", Value::Null)),
        ("filtered", field("reward", json!(2.0))),
        ("text_only", text),
    ] {
        let told = items(&pool, std::slice::from_ref(&wrong));
        assert_eq!(told[0]["reason"]["code"], code, "{wrong} {told:?}");
    }
    let body = json!({"version": 1, "tokenizer": "another", "trajectories": [trajectory("a")]});
    let (_, told) = call(&pool, 10.0, "POST", "/pool/trajectories", &body);
    assert_eq!(told["items"][0]["reason"]["code"], "tokenizer");
    // A batch of another schema, or with a field that is unknown, is refused as a whole.
    for (body, code) in [
        (json!({"version": 2, "trajectories": []}), "schema_version"),
        (
            json!({"version": 1, "trajectories": [], "x": 1}),
            "invalid_body",
        ),
    ] {
        let (status, told) = call(&pool, 10.0, "POST", "/pool/trajectories", &body);
        assert_eq!((status, &told["error"]["code"]), (400, &json!(code)));
    }
}

#[test]
fn groups_are_given_out_whole_once_and_again_if_nobody_acknowledges() {
    let pool = pool();
    let member = |id: &str| {
        with(id, |t| {
            t["group"] = json!("g");
            t["group_size"] = json!(2);
        })
    };
    items(&pool, &[member("a")]);
    assert_eq!(
        leased_ids(&lease(&pool, 10.0, json!({}))).len(),
        0,
        "not whole"
    );
    items(&pool, &[member("b"), trajectory("c")]);
    let first = lease(&pool, 10.0, json!({"groups": 1}));
    assert_eq!(leased_ids(&first), ["a", "b"]);
    assert_eq!(
        leased_ids(&lease(&pool, 10.0, json!({"max_path_tokens": 6}))).len(),
        0
    );
    let second = lease(&pool, 10.0, json!({"consumer": "other"}));
    assert_eq!(leased_ids(&second), ["c"]);
    let ack = |loan: &Value, ids: &[&str]| {
        let body = json!({"lease": loan["lease"], "ids": ids});
        call(&pool, 20.0, "POST", "/pool/ack", &body).1["lost"].clone()
    };
    assert_eq!(ack(&first, &["a", "c", "nobody"]), json!(["c", "nobody"]));
    // Its lease ran out: `b` is another's now, and the first may not train it.
    let late = lease(&pool, 80.0, json!({"consumer": "other"}));
    assert_eq!(leased_ids(&late), ["b", "c"]);
    assert_eq!(ack(&first, &["a", "b"]), json!(["b"]));
    let body = json!({"lease": late["lease"], "ids": ["c"]});
    assert_eq!(
        call(&pool, 81.0, "POST", "/pool/release", &body).1["released"],
        1
    );
    assert_eq!(leased_ids(&lease(&pool, 81.0, json!({}))), ["c"]);
    assert_eq!(
        items(&pool, &[member("a")])[0]["status"],
        "duplicate",
        "trained ids stay known"
    );
}

#[test]
fn a_trainer_gets_groups_that_it_can_use_and_hands_the_others_back_with_the_reason() {
    let pool = pool();
    let member = |id: &str| {
        with(id, |t| {
            t["group"] = json!("g");
            t["group_size"] = json!(2);
        })
    };
    items(&pool, &[trajectory("alone"), member("a"), member("b")]);
    let none = json!({"too_small": 0, "too_long": 0});
    let loan = lease(&pool, 10.0, json!({"min_group": 2}));
    assert_eq!(leased_ids(&loan), ["a", "b"]);
    assert_eq!(loan["passed_over"], json!({"too_small": 1, "too_long": 0}));
    let dry = lease(&pool, 10.0, json!({"min_group": 2, "max_path_tokens": 1}));
    assert_eq!(dry["lease"], Value::Null);
    assert_eq!(dry["passed_over"]["too_small"], 1);
    // It waits for a trainer that compares nothing.
    let other = lease(&pool, 10.0, json!({"consumer": "other"}));
    assert_eq!(leased_ids(&other), ["alone"]);
    assert_eq!(other["passed_over"], none);
    let reject = |loan: &Value, ids: &[&str]| {
        let body = json!({"lease": loan["lease"], "ids": ids, "reason": "no state_hash"});
        call(&pool, 20.0, "POST", "/pool/reject", &body).1["rejected"].clone()
    };
    assert_eq!(reject(&other, &["a", "b", "nobody"]), 0, "it holds others");
    assert_eq!(reject(&loan, &["a", "b"]), 2);
    let (_, page) = call(&pool, 21.0, "GET", "/pool/quarantine", &Value::Null);
    assert_eq!(
        page["rows"][0]["reason"],
        json!({"code": "unusable", "detail": "no state_hash"})
    );
    assert_eq!(page["rows"][1]["item"]["id"], "b");
    // Nobody is given them again, until somebody releases or pushes them.
    assert!(leased_ids(&lease(&pool, 80.0, json!({"min_group": 2}))).is_empty());
    assert_eq!(items(&pool, &[member("a")])[0]["status"], "admitted");
}

#[test]
fn what_a_full_quarantine_has_no_room_for_stays_leased() {
    let pool = open(None, config(json!({"max_quarantine": 1})));
    items(&pool, &[trajectory("a"), trajectory("b")]);
    let loan = lease(&pool, 10.0, json!({}));
    let body = json!({"lease": loan["lease"], "ids": ["a", "b"], "reason": "x"});
    let (status, told) = call(&pool, 11.0, "POST", "/pool/reject", &body);
    assert_eq!((status, &told["rejected"]), (200, &json!(1)));
    assert!(leased_ids(&lease(&pool, 12.0, json!({}))).is_empty());
    assert_eq!(leased_ids(&lease(&pool, 100.0, json!({}))), ["b"]);
}

#[test]
fn what_is_too_old_or_stays_incomplete_is_held_with_the_reason_and_can_come_back() {
    let rules = json!({"filters": {"corridor-1": {"max_staleness": 2}}, "group_ttl_s": 100.0});
    let dir = tempfile::tempdir().unwrap();
    let first = open(Some(dir.path()), config(rules));
    let lone = with("lone", |t| {
        t["group"] = json!("g");
        t["group_size"] = json!(2);
        t["nodes"][1]["version"] = json!(6);
    });
    items(&first, &[trajectory("old"), lone]);
    assert_eq!(
        leased_ids(&lease(&first, 11.0, json!({"version": 6}))).len(),
        0
    );
    let (_, page) = call(&first, 111.0, "GET", "/pool/quarantine", &Value::Null);
    assert_eq!(page["rows"][0]["reason"]["code"], "stale");
    assert_eq!(page["rows"][0]["reason"]["behind"], 3);
    call(&first, 111.0, "GET", "/pool", &Value::Null);
    let (_, page) = call(
        &first,
        111.0,
        "GET",
        "/pool/quarantine?limit=1",
        &Value::Null,
    );
    let after = page["next"].as_str().unwrap();
    let (_, page) = call(
        &first,
        111.0,
        "GET",
        &format!("/pool/quarantine?limit=5&after={after}"),
        &Value::Null,
    );
    assert_eq!(page["rows"][0]["reason"]["code"], "group_incomplete");
    assert_eq!(page["next"], Value::Null);
    drop(first);
    let pool = open(Some(dir.path()), PoolConfig::default());
    let release = format!("/pool/quarantine/{after}/release");
    let (_, told) = call(&pool, 112.0, "POST", &release, &Value::Null);
    assert_eq!(
        (&told["status"], &told["id"]),
        (&json!("admitted"), &json!("old"))
    );
    assert_eq!(
        leased_ids(&lease(&pool, 112.0, json!({"version": 9}))),
        ["old"]
    );
    let (status, _) = call(&pool, 112.0, "POST", &release, &Value::Null);
    assert_eq!(status, 404);
    let other = page["rows"][0]["quarantine"].as_str().unwrap();
    let delete = format!("/pool/quarantine/{other}");
    assert_eq!(call(&pool, 113.0, "DELETE", &delete, &Value::Null).0, 200);
    assert_eq!(call(&pool, 113.0, "DELETE", &delete, &Value::Null).0, 404);
}

#[test]
fn text_is_admitted_to_be_imitated_and_says_so() {
    let pool = pool();
    let text = json!({"id": "s", "task": "t", "kind": "sft", "messages": [
        {"role": "user", "content": "A.>"}, {"role": "assistant", "content": "r"},
        {"role": "tool", "content": ".A>"}, {"role": "assistant", "content": "r"}]});
    assert_eq!(items(&pool, &[text])[0]["status"], "admitted");
    assert!(
        leased_ids(&lease(&pool, 10.0, json!({}))).is_empty(),
        "not for rl"
    );
    let loan = lease(&pool, 10.0, json!({"kind": "sft"}));
    let entry = &loan["groups"][0][0];
    assert_eq!(
        (&entry["kind"], &entry["trace"]["outcome"]["reward"]),
        (&json!("sft"), &json!(1.0))
    );
    let kinds: Vec<_> = entry["trace"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n["kind"].clone())
        .collect();
    assert_eq!(kinds, ["prompt", "sampled", "observation", "sampled"]);
}

#[test]
fn a_restart_keeps_rows_leases_and_known_ids() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(Some(dir.path()), PoolConfig::default());
    items(
        &first,
        &[trajectory("a"), trajectory("b"), trajectory("c"), json!(1)],
    );
    let loan = lease(&first, 10.0, json!({"groups": 2}));
    assert_eq!(leased_ids(&loan), ["a", "b"]);
    let ack = |pool: &Arc<Pool>, ids: &[&str]| {
        let body = json!({"lease": loan["lease"], "ids": ids});
        call(pool, 12.0, "POST", "/pool/ack", &body).1["lost"].clone()
    };
    assert_eq!(ack(&first, &["a"]), json!([]));
    drop(first);
    let second = open(Some(dir.path()), PoolConfig::default());
    // A repeated ack counts once; leased items go to nobody else.
    assert_eq!(ack(&second, &["a"]), json!([]));
    assert_eq!(leased_ids(&lease(&second, 13.0, json!({}))), ["c"]);
    assert_eq!(
        leased_ids(&lease(&second, 100.0, json!({"groups": 1}))),
        ["b"]
    );
    assert_eq!(ack(&second, &["b"]), json!(["b"]));
    let told = items(&second, &[trajectory("a"), trajectory("b")]);
    assert!(told.iter().all(|i| i["status"] == "duplicate"), "{told:?}");
    let (_, status) = call(&second, 100.0, "GET", "/pool", &Value::Null);
    assert_eq!(status["quarantine"]["rows"], 1);
    assert_eq!(status["trajectories"]["acked"], 1);
}

#[test]
fn a_full_pool_says_so_and_keeps_nothing_of_the_batch() {
    let pool = open(None, config(json!({"max_rows": 2, "max_batch": 3})));
    items(&pool, &[trajectory("a")]);
    let (status, told) = push_of(&pool, 10.0, &[trajectory("b"), trajectory("c")]);
    assert_eq!((status, &told["error"]["code"]), (429, &json!("pool_full")));
    assert_eq!(items(&pool, &[trajectory("b")])[0]["status"], "admitted");
    let many: Vec<_> = (0..4).map(|i| trajectory(&i.to_string())).collect();
    assert_eq!(push_of(&pool, 10.0, &many).0, 400);
}

#[test]
fn rows_that_nobody_acknowledges_do_not_come_back_for_ever() {
    let pool = open(None, config(json!({"max_attempts": 2})));
    items(&pool, &[trajectory("a")]);
    for now in [10.0, 100.0] {
        assert_eq!(leased_ids(&lease(&pool, now, json!({}))), ["a"]);
    }
    assert!(leased_ids(&lease(&pool, 200.0, json!({}))).is_empty());
    let (_, page) = call(&pool, 200.0, "GET", "/pool/quarantine", &Value::Null);
    assert_eq!(page["rows"][0]["reason"]["code"], "undeliverable");
}

/// Two tokens that the engine samples after a prompt.
fn sample(engine: &dyn Engine, temperature: f32) -> Vec<SampledToken> {
    let (sender, events) = mpsc::sync_channel(64);
    let sampling = SamplingParams {
        max_tokens: 2,
        temperature,
        ..SamplingParams::default()
    };
    let request = GenerateRequest::new(RequestId(0), vec![2, 6, 8, 0, 3], sampling);
    engine
        .submit(request, Box::new(move |e| drop(sender.send(e))))
        .unwrap();
    let mut sampled = Vec::new();
    for event in events {
        match event {
            EngineEvent::Tokens { tokens, .. } => sampled.extend(tokens),
            other => {
                assert!(matches!(other, EngineEvent::Finished { .. }), "{other:?}");
                break;
            }
        }
    }
    sampled
}

fn with_temperature(mut trajectory: Value) -> Value {
    trajectory["nodes"][1]["temperature"] = json!(0.5);
    trajectory
}

/// It is in the trace that a trainer leases, survives a restart, and is 1 if nobody sets it.
#[test]
fn temperatures_come_through() {
    let folder = tempfile::tempdir().unwrap();
    let pool = open(Some(folder.path()), PoolConfig::default());
    let told = items(
        &pool,
        &[with_temperature(trajectory("warm")), trajectory("plain")],
    );
    assert!(told.iter().all(|i| i["status"] == "admitted"), "{told:?}");
    drop(pool);
    let pool = open(Some(folder.path()), PoolConfig::default());
    let loan = lease(&pool, 10.0, json!({}));
    let groups = loan["groups"].as_array().unwrap();
    let mut found: Vec<(String, f32)> = Vec::new();
    for entry in groups.iter().flat_map(|g| g.as_array().unwrap()) {
        let entry: sinew_pool::Entry = serde_json::from_value(entry.clone()).unwrap();
        let temperature = entry.trace.nodes[1].temperature;
        found.push((entry.trace.episode.as_str().to_owned(), temperature));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, [("plain".to_owned(), 1.0), ("warm".to_owned(), 0.5)]);
}

#[test]
fn log_probabilities_are_compared_with_the_engines() {
    let vocab = 11;
    let fake = FakeEngine::threaded(
        FakeConfig {
            model: FakeModel {
                vocab,
                seed: 5,
                end: None,
            },
            context: 64,
            ..FakeConfig::default()
        },
        Box::new(|| 0.0),
    );
    let engine: Arc<dyn Engine> = Arc::new(fake.unwrap());
    let requests = Arc::new(AtomicU64::new(1));
    let (plain, warm) = (sample(engine.as_ref(), 1.0), sample(engine.as_ref(), 0.5));
    let version = engine.status().version.0;
    let scorer = Some(Scorer { engine, requests });
    let rules = config(json!({"spot_check": {"tokens": 2, "gap": 0.01}, "check_messages": false}));
    let pool = Pool::open(
        None,
        rules,
        Arc::new(TinyRenderer::new(crate::ALPHABET)),
        scorer,
    );
    let pool = Arc::new(pool.unwrap());
    let of = |id: &str, by: f32, version: u64, sampled: &[SampledToken]| {
        with(id, |t| {
            let node = &mut t["nodes"][1];
            node["tokens"] = sampled.iter().map(|s| s.id).collect();
            node["logprobs"] = sampled.iter().map(|s| s.logprob - by).collect();
            node["version"] = json!(version);
        })
    };
    let told = items(
        &pool,
        &[
            of("true", 0.0, version, &plain),
            of("false", 0.3, version, &plain),
            of("older", 0.3, version + 1, &plain),
            // The entry is right only with the other temperature.
            with_temperature(of("warm", 0.0, version, &warm)),
            of("untold", 0.0, version, &warm),
        ],
    );
    assert_eq!(told[3]["status"], "admitted", "{told:?}");
    assert_eq!(told[4]["reason"]["code"], "logprob_gap", "{told:?}");
    assert_eq!(told[0]["status"], "admitted", "{told:?}");
    assert_eq!(told[1]["reason"]["code"], "logprob_gap", "{told:?}");
    // Other weights cannot be compared with these.
    assert_eq!(told[2]["status"], "admitted");
    let loan = lease(&pool, 10.0, json!({}));
    let gaps: Vec<_> = loan["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| g[0]["engine_gap"].clone())
        .collect();
    assert!(
        gaps.iter().any(|g| g.as_f64().is_some_and(|g| g < 1e-4)) && gaps.contains(&Value::Null),
        "{gaps:?}"
    );
}

#[test]
fn a_full_quarantine_does_not_keep_trainers_from_what_is_sound() {
    let rules = json!({
        "max_quarantine": 1, "group_ttl_s": 5.0, "filters": {"corridor-1": {"max_staleness": 2}},
    });
    let pool = open(None, config(rules));
    let young = |id: &str, change: fn(&mut Value)| {
        with(id, |t| {
            t["nodes"][1]["version"] = json!(6);
            change(t);
        })
    };
    let lone = young("lone", |t| {
        t["group"] = json!("g");
        t["group_size"] = json!(2);
    });
    items(&pool, &[trajectory("old"), lone, young("good", |_| {})]);
    // Whoever may push can fill it with nonsense.
    assert_eq!(items(&pool, &[json!(7)])[0]["status"], "quarantined");
    let (status, told) = push_of(&pool, 10.0, &[json!(8)]);
    assert_eq!((status, &told["error"]["code"]), (429, &json!("pool_full")));
    let loan = lease(&pool, 20.0, json!({"version": 6}));
    assert_eq!(leased_ids(&loan), ["good"]);
    // Once there is room, what had to wait is held with its reason.
    let (_, page) = call(&pool, 20.0, "GET", "/pool/quarantine", &Value::Null);
    let junk = page["rows"][0]["quarantine"].as_str().unwrap();
    call(
        &pool,
        20.0,
        "DELETE",
        &format!("/pool/quarantine/{junk}"),
        &Value::Null,
    );
    assert!(leased_ids(&lease(&pool, 21.0, json!({"version": 6}))).is_empty());
    let (_, status) = call(&pool, 21.0, "GET", "/pool", &Value::Null);
    assert_eq!(status["quarantine"]["rows"], 1, "{status}");
}
