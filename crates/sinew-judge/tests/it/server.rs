//! Reward servers: requests, answers, outages, and the check of a server.

use crate::support::{sample, serve};
use futures::future::join_all;
use serde_json::{Value, json};
use sinew_env::Reward;
use sinew_judge::{RewardServer, ServerConfig, check_server};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn config(url: &str, batch: usize) -> ServerConfig {
    ServerConfig {
        name: "server".into(),
        url: format!("{url}/score"),
        key: Some("secret".into()),
        batch,
        timeout: Duration::from_secs(20),
    }
}

/// Lengths of the outputs of a request.
fn lengths(body: &Value) -> Vec<Value> {
    let samples = body["samples"].as_array().unwrap().iter();
    samples
        .map(|s| json!(s["output"].as_str().unwrap().len()))
        .collect()
}

#[tokio::test]
async fn samples_travel_together_and_each_gets_its_own_score() {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen_sizes = Arc::clone(&sizes);
    let url = serve(move |_, seen| {
        assert_eq!(
            (seen.path.as_str(), seen.authorization.as_str()),
            ("/score", "Bearer secret")
        );
        assert_eq!(seen.body["protocol"], 1);
        assert_eq!(seen.body["samples"][0]["task"]["data"]["answer"], "it");
        let scores = lengths(&seen.body);
        seen_sizes.lock().unwrap().push(scores.len());
        (200, json!({"scores": scores}).to_string())
    });
    let server = RewardServer::new(config(&url, 4)).unwrap();
    let samples: Vec<_> = (0..10).map(|n| sample(&"x".repeat(n))).collect();
    let scores = join_all(samples.iter().map(|s| server.score(s))).await;
    let values: Vec<f64> = scores.into_iter().map(|s| s.unwrap().value).collect();
    assert_eq!(values, (0..10).map(f64::from).collect::<Vec<_>>());
    let mut sizes = sizes.lock().unwrap().clone();
    sizes.sort_unstable();
    assert_eq!(sizes, [2, 4, 4]);
}

#[tokio::test]
async fn an_outage_is_waited_for_and_a_lasting_one_leaves_samples_unscored() {
    let url = serve(|call, seen| match call {
        0 => (503, "loading".into()),
        _ => (200, json!({"scores": lengths(&seen.body)}).to_string()),
    });
    let server = RewardServer::new(config(&url, 8)).unwrap();
    assert_eq!(server.score(&sample("xx")).await.unwrap().value, 2.0);
    let wrong = |status: u16, body: Value| {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let url = serve(move |_, _| {
            counted.fetch_add(1, Ordering::SeqCst);
            (status, body.to_string())
        });
        (RewardServer::new(config(&url, 8)).unwrap(), calls)
    };
    for (status, body, expected) in [
        (400, json!("what?"), "status 400"),
        (200, json!({"scores": [1, 2]}), "2 scores for 1 samples"),
        (200, json!({"scores": [null]}), "abstained"),
        (200, json!({"scores": ["1"]}), "neither"),
        (200, json!(7), "no list"),
    ] {
        let (server, calls) = wrong(status, body);
        let why = server.score(&sample("x")).await.unwrap_err().reason;
        assert!(why.contains(expected), "{why}");
        // Nothing but an outage is asked for again.
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
    let long = server
        .score(&sample(&"x".repeat(5 << 20)))
        .await
        .unwrap_err();
    assert!(long.reason.contains("are sent"), "{long}");
}

/// A server with faults that can be switched on.
fn faulty(fault: &'static str) -> String {
    let calls = AtomicUsize::new(0);
    serve(move |_, seen| {
        let call = calls.fetch_add(1, Ordering::SeqCst);
        let samples = seen.body["samples"].as_array();
        let whole = samples.is_some_and(|all| all.iter().all(|s| s["output"].is_string()));
        let right = whole && seen.body["protocol"] == 1;
        if fault != "takes all keys" && seen.authorization != "Bearer secret" {
            return (401, "key".into());
        }
        if !right && fault != "takes everything" {
            return (400, "wrong".into());
        }
        let mut scores = if whole {
            lengths(&seen.body)
        } else {
            Vec::new()
        };
        match fault {
            "random" => scores.iter_mut().for_each(|s| *s = json!(call)),
            "one for all" => scores.truncate(1),
            _ => {}
        }
        (200, json!({"scores": scores}).to_string())
    })
}

#[tokio::test]
async fn the_check_finds_each_fault_and_passes_a_good_server() {
    let samples: Vec<_> = ["a", "bb", "ccc"].iter().map(|o| sample(o)).collect();
    for (fault, expected) in [
        ("none", vec![]),
        ("random", vec!["order", "at once"]),
        ("one for all", vec!["order"]),
        ("takes everything", vec!["wrong input"]),
        ("takes all keys", vec!["key"]),
    ] {
        let findings = check_server(&config(&faulty(fault), 4), &samples)
            .await
            .unwrap();
        let failed: Vec<&str> = findings.iter().filter(|f| !f.ok).map(|f| f.check).collect();
        assert_eq!(failed, expected, "{fault}: {findings:?}");
    }
    assert!(
        check_server(&config("http://127.0.0.1:1", 1), &[])
            .await
            .is_err()
    );
}
