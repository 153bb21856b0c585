//! Answers of the server, and its refusals.

use crate::{ask, data, serve};
use serde_json::json;

#[test]
fn without_the_token_nothing_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    data::run(&dir.path().join("r"), 2, 1, 0.0);
    let served = serve(dir.path());
    for path in [
        "/",
        "/api/runs",
        "/assets/app.js",
        "/api/events",
        "/?token=0",
    ] {
        let (status, head, body) = ask(served.address, "GET", path, "");
        assert_eq!(status, 401, "{path}");
        assert!(
            head.contains("content-security-policy: default-src 'none'"),
            "{head}"
        );
        assert!(!body.contains("seed"), "{path}");
    }
    let opened = format!("/?token={}", served.token);
    let (status, head, _) = ask(served.address, "GET", &opened, "");
    assert_eq!(status, 303);
    let cookie = head
        .lines()
        .find_map(|l| l.strip_prefix("set-cookie: "))
        .unwrap();
    assert!(cookie.contains("httponly") && cookie.contains("samesite=lax"));
    assert!(head.contains("\nlocation: /"), "{head}");
    let pair = format!("cookie: {}\r\n", cookie.split(';').next().unwrap());
    let (status, _, page) = ask(served.address, "GET", "/", &pair);
    assert!(status == 200 && page.contains("/assets/app.js"));
    let (status, _, _) = ask(served.address, "POST", "/api/runs", &pair);
    assert_eq!(status, 405);
}

#[test]
fn the_api_shows_runs_episodes_and_errors() {
    let dir = tempfile::tempdir().unwrap();
    data::run(&dir.path().join("a"), 8, 3, 0.0);
    data::run(&dir.path().join("b"), 3, 1, 0.1);
    let served = serve(dir.path());
    let runs = served.get("/api/runs").1;
    assert_eq!(runs["runs"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&runs["runs"][0]["steps"], &runs["runs"][0]["state"]),
        (&json!(8), &json!("ended"))
    );

    let curves = served.get("/api/runs/a/curves").1;
    assert_eq!(curves["step"].as_array().unwrap().len(), 8);
    let ids: Vec<&str> = curves["charts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["id"].as_str().unwrap())
        .collect();
    for id in [
        "success",
        "heldout",
        "components",
        "entropy",
        "kl",
        "clip",
        "gap",
        "staleness",
        "signs",
    ] {
        assert!(ids.contains(&id), "{id} not in {ids:?}");
    }

    // Pages of a filtered listing are the listing.
    let all = served.get("/api/runs/a/episodes?success=true&limit=500").1;
    let (mut paged, mut after) = (Vec::new(), 0);
    loop {
        let page = served
            .get(&format!(
                "/api/runs/a/episodes?success=true&limit=7&after={after}"
            ))
            .1;
        paged.extend(page["episodes"].as_array().unwrap().clone());
        match page["next"].as_u64() {
            Some(next) => after = next,
            None => break,
        }
    }
    assert_eq!(json!(paged), all["episodes"]);
    assert!(paged.iter().all(|e| e["success"] == true) && !paged.is_empty());
    let (status, refused) = served.get("/api/runs/a/episodes?turns=5..2");
    assert!(
        status == 400 && refused["error"].as_str().unwrap().contains("turns"),
        "{refused}"
    );
    assert_eq!(served.get("/api/runs/a/episodes?purpos=x").0, 400);
}

#[test]
fn an_episode_has_its_tokens_and_a_run_its_errors_and_its_time() {
    let dir = tempfile::tempdir().unwrap();
    data::run(&dir.path().join("a"), 8, 3, 0.0);
    let served = serve(dir.path());
    let episode = served.get("/api/runs/a/episodes/d00000000-e0").1;
    let nodes = episode["nodes"].as_array().unwrap();
    assert!(episode["leaves"].as_array().unwrap().len() == 2 && nodes.len() == 7);
    assert_eq!(
        nodes[1]["pieces"].as_array().unwrap().len(),
        nodes[1]["logprobs"].as_array().unwrap().len()
    );
    assert_eq!(episode["siblings"].as_array().unwrap().len(), 4);
    // Only the first step has training signals of its tokens.
    let signals = episode["signals"][1].as_array().unwrap();
    assert_eq!(
        signals.len(),
        nodes[1]["logprobs"].as_array().unwrap().len()
    );
    assert!(signals[0]["ratio"].as_f64().unwrap() > 0.8, "{signals:?}");
    let later = served.get("/api/runs/a/episodes/d00000003-e0").1;
    assert!(later["signals"].is_null() && later["nodes"].is_array());
    assert_eq!(served.get("/api/runs/a/episodes/none").0, 404);
    assert_eq!(served.get("/api/runs/zzz/curves").0, 404);

    let errors = served.get("/api/runs/a/errors").1;
    assert!(
        errors["failures"][0]["why"]
            .as_str()
            .unwrap()
            .contains("environment failed")
    );
    assert_eq!(errors["causes"][0]["step"], 7);
    let live = served.get("/api/runs/a/live").1;
    assert_eq!(live["live"]["board"].as_array().unwrap().len(), 22);
    let timeline = served.get("/api/runs/a/timeline").1;
    assert_eq!(timeline["steps"].as_array().unwrap().len(), 8);
    assert!(timeline["samples"].as_array().unwrap().len() > 100);
    let scaling = served.get("/api/scaling?y=reward&x=tokens").1;
    assert!(scaling["runs"][0]["fit"]["high"].is_f64(), "{scaling}");
    assert_eq!(served.get("/api/scaling?x=money").0, 400);
    assert!(
        served.get("/api/runs/a/recipe").1["recipe"]
            .as_str()
            .unwrap()
            .contains("tool_math")
    );
}

#[test]
fn a_run_without_a_store_or_records_is_shown_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("new");
    std::fs::create_dir(&run).unwrap();
    std::fs::write(run.join("recipe.toml"), "not a recipe").unwrap();
    let served = serve(dir.path());
    let runs = served.get("/api/runs").1;
    assert_eq!(
        (&runs["runs"][0]["steps"], &runs["runs"][0]["stored"]),
        (&json!(0), &json!(false))
    );
    let (status, refused) = served.get("/api/runs/new/episodes");
    assert!(
        status == 404
            && refused["error"]
                .as_str()
                .unwrap()
                .contains("keeps no episodes")
    );
    for part in ["curves", "timeline", "live", "errors"] {
        assert_eq!(
            served.get(&format!("/api/runs/new/{part}")).0,
            200,
            "{part}"
        );
    }
}
