//! Ends of calls that nobody answers, waiting or at a stop, and their display until then.

use crate::support::{
    Narrow, Opened, World, answer, send, world, world_behind, world_in, world_with,
};
use serde_json::{Value, json};
use sinew_infer::Fault;
use sinew_types::{Engine, TokenKind, Trace};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::Semaphore;

fn yes(_: &str) -> Option<String> {
    Some("yes".into())
}

fn body() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "x"}]})
}

/// The entry of a rollout in the list of live ones.
fn live(world: &World, rollout: &Opened) -> Value {
    let board = world.control("GET", "/rollouts?limit=9", &json!({})).ok();
    let rollouts = board["rollouts"].as_array().unwrap();
    assert_eq!(board["total"], rollouts.len());
    let found = rollouts.iter().find(|r| r["id"] == rollout.id.as_str());
    found.cloned().unwrap_or_default()
}

#[test]
fn a_call_that_waits_at_the_gate_can_be_left_and_ended() {
    let (room, waiting) = (Arc::new(Semaphore::new(1)), Arc::default());
    let gate = Narrow {
        room: Arc::clone(&room),
        waiting: Arc::clone(&waiting),
    };
    let world = world_behind(
        yes,
        |_, fake| {
            fake.faults.insert(0, Fault::HangAfter { tokens: 1 });
        },
        None,
        Some(Arc::new(gate)),
    );
    let waits = |n| world.until("so many wait", || waiting.load(Ordering::SeqCst) == n);
    let [hangs, leaves, ended, next] = [(); 4].map(|()| world.open());
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| hangs.post("/chat/completions", &body()).status);
        world.until("it runs", || world.engine.status().running == 1);
        assert_eq!(live(&world, &hangs)["phase"], "generate");
        // Its client goes: it leaves the queue, and nothing was sampled.
        let client = leaves.ask(&body());
        waits(1);
        let told = live(&world, &leaves);
        assert_eq!(told["phase"], "wait", "{told}");
        assert_eq!(
            (&told["waiting"], &told["generating"]),
            (&json!(1), &json!(0))
        );
        assert!(told["deadline_s"].as_f64().unwrap() > 500.0, "{told}");
        drop(client);
        waits(0);
        world.until("it has ended", || live(&world, &leaves)["phase"] == "agent");
        let stats = world.gateway.stats();
        assert_eq!(
            (stats.clients_gone, stats.failed, stats.in_flight),
            (1, 1, 1)
        );
        assert_eq!(world.view(&leaves.id)["stats"]["running"], 0);
        // Its rollout is finished: the same, and the caller gets an error.
        let cut = scope.spawn(|| ended.post("/chat/completions", &body()));
        waits(1);
        assert_eq!(world.finish(&ended.id)["sampled_tokens"], 0);
        waits(0);
        let cut = cut.join().unwrap();
        assert_eq!((cut.status, cut.error("code").as_str()), (409, "aborted"));
        // The room is there for the next one as soon as the first gives it back.
        let goes_on = scope.spawn(|| next.post("/chat/completions", &body()).ok());
        waits(1);
        assert_eq!(world.finish(&hangs.id)["sampled_tokens"], 1);
        assert_eq!(hung.join().unwrap(), 409);
        let said = goes_on.join().unwrap();
        assert_eq!(said["choices"][0]["message"]["content"], "yes");
    });
    world.until("nothing runs", || world.gateway.stats().in_flight == 0);
    assert_eq!(room.available_permits(), 1);
    // A client that left before its call was admitted can call again.
    leaves.post("/chat/completions", &body()).ok();
}

#[test]
fn live_rollouts_are_listed_longest_in_their_phase_first() {
    let world = world_with(yes, |_, _| {});
    let opened: Vec<Opened> = (0..3).map(|_| world.open()).collect();
    std::thread::sleep(Duration::from_millis(20));
    opened[0].post("/chat/completions", &body()).ok();
    let list = |query: &str| world.control("GET", &format!("/rollouts{query}"), &json!({}));
    let board = list("").ok();
    assert_eq!(board["total"], 3);
    let last = &board["rollouts"][2];
    assert_eq!(last["id"], opened[0].id.as_str());
    assert_eq!(
        (&last["calls"], &last["sampled_tokens"]),
        (&json!(1), &json!(4))
    );
    let left = last["deadline_s"].as_f64().unwrap() + last["phase_s"].as_f64().unwrap();
    assert!((left - 3600.0).abs() < 1e-6, "{last}");
    let one = list("?limit=1").ok();
    assert_eq!(one["total"], 3);
    assert_eq!(one["rollouts"].as_array().unwrap().len(), 1);
    for (query, part) in [
        (
            "?limit=0",
            "limit is \"0\", expected a whole number from 1 to 1000",
        ),
        ("?limit=many", "limit is \"many\""),
        ("?page=2", "page"),
    ] {
        let refused = list(query);
        assert_eq!(refused.status, 400, "{query}");
        assert!(refused.error("message").contains(part), "{refused:?}");
    }
    let wrong = [("authorization", opened[0].key.as_str())];
    let url = format!("{}/rollouts", world.url);
    assert_eq!(answer("GET", &url, &wrong, b"").status, 401);
    world.finish(&opened[1].id);
    assert_eq!(list("").ok()["total"], 2);
}

#[test]
fn at_the_end_of_a_run_agents_learn_that_nothing_is_trained_any_more() {
    let mut world = world(yes);
    let rollout = world.open();
    rollout.post("/chat/completions", &body()).ok();
    world.end();
    let open = || world.control("POST", "/rollouts", &json!({}));
    world.until("it refuses rollouts", || open().status != 200);
    for refused in [open(), rollout.post("/chat/completions", &body())] {
        assert_eq!(refused.status, 410, "{refused:?}");
        assert_eq!(refused.error("code"), "run_ended");
        assert_eq!(refused.retry_after, None);
    }
    // The agent's work until then can still be finished.
    let finish = format!("/rollouts/{}/finish", rollout.id);
    world.control("POST", &finish, &json!({})).ok();
}

#[test]
fn a_stop_refuses_new_calls_cuts_running_ones_and_keeps_what_they_sampled() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world_in(
        yes,
        |config, fake| {
            config.server.shutdown_grace = Duration::from_millis(200);
            for call in 0..2 {
                fake.faults.insert(call, Fault::HangAfter { tokens: 2 });
            }
        },
        Some(folder.path()),
    );
    let rollout = world.open();
    let mut stream = body();
    stream["stream"] = json!(true);
    let headers = [("authorization", rollout.key.as_str())];
    let url = format!("{}/chat/completions", rollout.base_url);
    let (status, _, mut reader) =
        send("POST", &url, &headers, stream.to_string().as_bytes()).unwrap();
    assert_eq!(status, 200);
    let waits = world.open();
    let whole = std::thread::spawn(move || waits.post("/chat/completions", &body()));
    world.until("both hang", || world.engine.status().sampled_tokens == 4);
    world.gateway.drain();
    for refused in [
        rollout.post("/chat/completions", &body()),
        world.control("POST", "/rollouts", &json!({})),
    ] {
        assert_eq!(refused.status, 503, "{refused:?}");
        assert_eq!(refused.retry_after.as_deref(), Some("5"));
        assert_eq!(refused.error("code"), "gateway_stopping");
    }
    let reward = format!("/rollouts/{}/reward", rollout.id);
    world.control("POST", &reward, &json!({"reward": 1.0})).ok();
    assert_eq!(world.stop(), 2);
    // Each client gets the error in the form of its dialect.
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"code\":\"gateway_stopping\""), "{text}");
    let whole = whole.join().unwrap();
    assert_eq!(whole.status, 503, "{whole:?}");
    assert_eq!(whole.error("code"), "gateway_stopping");
    drop(world);
    // The next gateway has what was sampled, once.
    let world = world_in(yes, |_, _| {}, Some(folder.path()));
    let view = world.view(&rollout.id);
    let trace: Trace = serde_json::from_value(view["trace"].clone()).unwrap();
    let kinds: Vec<_> = trace
        .nodes
        .iter()
        .map(|n| (n.kind, n.finish.clone()))
        .collect();
    let aborted = Some(sinew_types::FinishReason::Aborted);
    assert_eq!(
        kinds,
        [(TokenKind::Prompt, None), (TokenKind::Sampled, aborted)]
    );
    assert_eq!(trace.nodes[1].tokens.len(), 2);
    assert_eq!(view["calls"][0]["outputs"], json!([1]));
    assert_eq!(world.finish(&rollout.id)["reward"], 1.0);
    assert_eq!(world.gateway.stats().unproven, 0);
}
