//! Runs whose store and queue are in servers: killed with them, copied to a folder and back.

#[expect(dead_code, reason = "the suites of the stores use the rest")]
#[path = "../../../sinew-database/tests/servers/mod.rs"]
mod servers;

use crate::input::refused;
use crate::queue::until;
use crate::resume::{done, end, recipe, same, train};
use crate::{last_line, root, run_ok, sinew};
use serde_json::Value;
use servers::{PostgresServer, RedisServer};
use std::path::{Path, PathBuf};

/// Folder `name` below `dir` with a recipe of six steps, `more` typed over it.
fn recipe_in(dir: &Path, name: &str, more: &[(&str, &str)]) -> PathBuf {
    let folder = dir.join(name);
    std::fs::create_dir(&folder).unwrap();
    recipe(&folder, 6, more)
}

fn copied(from: &str, to: &str, more: &[&str]) -> Value {
    let mut copy = sinew();
    let said = run_ok(copy.args(["runs", "copy", from, to, "--json"]).args(more));
    let last = said.lines().last().unwrap();
    serde_json::from_str::<Value>(last).unwrap()["copy"].clone()
}

#[test]
fn a_run_in_postgres_ends_like_one_on_disk_whoever_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = PostgresServer::start();
    let disk = dir.path().join("disk");
    let on_disk = recipe_in(dir.path(), "a", &[]);
    let expected = end(&disk, &done(&on_disk, &disk, &[]));

    let url = server.url();
    let objects = format!("\"file://{}\"", dir.path().join("objects").display());
    let typed = format!("{url:?}");
    let store = [
        ("store.type", "\"postgres\""),
        ("store.url", typed.as_str()),
        ("store.payloads", objects.as_str()),
    ];
    let in_postgres = recipe_in(dir.path(), "b", &store);
    let run = dir.path().join("in-postgres");
    let stepped = |v: &Value| v["step"]["step"].as_u64().is_some_and(|n| n >= 3);
    let (mut trainer, _) = until(&mut train(&in_postgres, &run, &[]), stepped);
    trainer.kill();
    server.crash();
    let ended = end(&run, &done(&in_postgres, &run, &["--resume"]));
    same("in PostgreSQL", &ended, &expected);

    // Another run does not take its store over.
    let other = dir.path().join("other/in-postgres");
    let mut again = sinew();
    again
        .arg("train")
        .arg(&in_postgres)
        .arg("--run-dir")
        .arg(&other);
    let refused = refused(&mut again);
    assert!(refused.contains("store.name"), "{refused}");

    // A copy in a folder is read like any run; a second copy finds everything there.
    let database = format!("{url}#in-postgres");
    let folder = dir.path().join("copy/store");
    std::fs::create_dir(dir.path().join("copy")).unwrap();
    let folder = folder.display().to_string();
    let place = ["--payloads", objects.trim_matches('"')];
    let first = copied(&database, &folder, &place);
    assert!(
        first["episodes"].as_u64().unwrap() > 0 && first["updates"] == 6,
        "{first}"
    );
    let again = copied(&database, &folder, &place);
    assert_eq!(
        (&again["copied"], &again["checksum"]),
        (&0.into(), &first["checksum"])
    );
    let mut list = sinew();
    list.arg("episodes")
        .arg("--run-dir")
        .arg(dir.path().join("copy"));
    let listed = run_ok(list.args(["--json", "--limit", "5"]));
    assert_eq!(
        listed.lines().filter(|l| l.contains("\"episode\"")).count(),
        5,
        "{listed}"
    );
}

#[test]
fn a_run_goes_on_in_the_database_that_its_folder_was_copied_into() {
    let dir = tempfile::tempdir().unwrap();
    let server = PostgresServer::start();
    let on_disk = recipe_in(dir.path(), "a", &[]);
    let run = dir.path().join("moved");
    let stepped = |v: &Value| v["step"]["step"].as_u64().is_some_and(|n| n >= 3);
    let (mut trainer, _) = until(&mut train(&on_disk, &run, &[]), stepped);
    trainer.kill();
    let report = copied(&run.display().to_string(), &server.url(), &[]);
    assert!(report["updates"].as_u64().unwrap() >= 2, "{report}");
    let back = dir.path().join("back").display().to_string();
    let returned = copied(&format!("{}#moved", server.url()), &back, &[]);
    assert_eq!(returned["checksum"], report["checksum"]);
    let known = std::fs::read_to_string(run.join("store.id")).unwrap();
    assert_eq!(known.trim().len(), 16);
}

#[test]
fn passwords_in_addresses_and_keys_without_effect_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (n, (store, said)) in [
        (
            vec![
                ("store.type", "\"postgres\""),
                ("store.url", "\"postgres://u:hidden@h/db\""),
            ],
            "PGPASSWORD",
        ),
        (vec![("store.type", "\"postgres\"")], "store.url_file"),
        (vec![("store.name", "\"x\"")], "postgres"),
        (
            vec![
                ("store.type", "\"postgres\""),
                ("store.url", "\"postgres://h/db\""),
                ("store.payloads", "\"gs://b\""),
            ],
            "s3://BUCKET/PREFIX",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let recipe = recipe_in(dir.path(), &n.to_string(), &store);
        let mut wrong = sinew();
        wrong
            .arg("train")
            .arg(recipe)
            .arg("--run-dir")
            .arg(dir.path().join("run"));
        let refused = refused(&mut wrong);
        assert!(refused.contains(said), "{refused}");
        assert!(!refused.contains("hidden"), "{refused}");
    }
    let mut copy = sinew();
    copy.args(["runs", "copy", "runs/x", "postgres://u:hidden@h/db"]);
    let refused = refused(&mut copy);
    assert!(
        refused.contains("PGPASSWORD") && !refused.contains("hidden"),
        "{refused}"
    );
}

#[test]
fn a_queue_in_a_server_is_filled_scored_and_trained() {
    let dir = tempfile::tempdir().unwrap();
    let (postgres, redis) = (PostgresServer::start(), RedisServer::start());
    for (name, url) in [("pg", postgres.url()), ("redis", redis.url())] {
        let text = std::fs::read_to_string(root().join("recipes/queue.toml")).unwrap();
        let changed = text
            .replace("http://127.0.0.1:8091", &url)
            .replace("token_file = \"token\"\n", "")
            .replace("wait_s = 5", "wait_s = 1")
            .replace("steps = 24", "steps = 3")
            .replace("episodes_per_task = 16", "episodes_per_task = 2");
        let recipe = dir.path().join(format!("{name}.toml"));
        std::fs::write(&recipe, changed).unwrap();
        let mut collect = sinew();
        collect
            .arg("collect")
            .arg(&recipe)
            .args(["--json", "--score-apart"]);
        collect.args(["--episodes", "192", "--run-dir"]);
        last_line(
            &collect
                .arg(dir.path().join(format!("{name}-c")))
                .output()
                .unwrap(),
        );
        let mut score = sinew();
        run_ok(score.args(["queue", "score", "--until-empty"]).arg(&recipe));
        let run = dir.path().join(format!("{name}-run"));
        let result = done(&recipe, &run, &[]);
        let samples = &result["samples"];
        let of = |name: &str| samples[name].as_u64().unwrap();
        assert_eq!((of("trained_twice"), of("lost")), (0, 0), "{result}");
        assert!(of("trained") > 0, "{result}");
        let mut stats = sinew();
        let stats = run_ok(stats.args(["queue", "stats", &url, "--json"]));
        let stats: Value = serde_json::from_str(&stats).unwrap();
        assert_eq!(
            (&stats["rows"], &stats["done"]),
            (&0.into(), &192.into()),
            "{stats}"
        );
    }
}
