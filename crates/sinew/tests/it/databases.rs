//! Runs whose store and queue are in servers: killed with them, copied to a folder and back.

#[expect(dead_code, reason = "the suites of the stores use the rest")]
#[path = "../../../sinew-database/tests/servers/mod.rs"]
mod servers;

use crate::input::refused;
use crate::late::TIS;
use crate::queue::until;
use crate::resume::{done, end, recipe, same, train};
use crate::view::{get, view};
use crate::{json_lines, last_line, root, run_ok, sinew};
use serde_json::{Value, json};
use servers::{PostgresServer, RedisServer};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

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

/// The output of a command, a JSON object a line.
fn rows(args: &[&str]) -> Vec<Value> {
    let said = run_ok(sinew().args(args).arg("--json"));
    json_lines(&said)
}

/// Keys of a store in a database, with payloads in a folder.
fn keys<'a>(url: (&'static str, &'a str), objects: &'a str) -> [(&'static str, &'a str); 3] {
    [
        ("store.type", "\"postgres\""),
        url,
        ("store.payloads", objects),
    ]
}

#[test]
fn commands_use_the_episodes_of_a_run_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let server = PostgresServer::start();
    let (typed, objects) = (
        format!("{:?}", server.url()),
        format!("\"file://{}\"", dir.path().join("objects").display()),
    );
    let keys = keys(("store.url", typed.as_str()), &objects);
    let six = recipe_in(dir.path(), "a", &keys);
    let folder = dir.path().join("run");
    done(&six, &folder, &[]);
    assert!(!folder.join("store").exists());
    let run = folder.to_str().unwrap();
    let trained = rows(&["episodes", run, "--purpose", "train", "--limit", "10000"]);
    assert_eq!(trained.len(), 6 * 32);
    let id = trained[0]["episode"].as_str().unwrap();
    let shown = run_ok(sinew().args(["show", id, "--run-dir", run, "--json"]));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["episode"], id);
    let again = rows(&["replay", id, "--run-dir", run]);
    assert_eq!(again[0]["equal"], true, "{again:?}");
    // The step is done again in a copy; the run's own store stays as it is.
    let again = rows(&["replay", "--step", "6", "--run-dir", run]);
    assert_eq!(again[0]["equal"], true, "{again:?}");
    assert!(again[0]["weights"].is_object(), "{again:?}");
    run_ok(sinew().args(["eval", "--compare", run, run]));
    let scored = rows(&["rescore", run, "--reward", "length(max = 1)"]);
    let scores = scored.last().unwrap()["scores"].as_u64().unwrap();
    assert_eq!(scores, 3 * 6 * 32, "{scored:?}");
    let verdicts = dir.path().join("verdicts.jsonl");
    let verdict = json!({"episode": id, "name": "thumbs", "value": 1});
    std::fs::write(&verdicts, verdict.to_string()).unwrap();
    let verdicts = verdicts.to_str().unwrap();
    let told = rows(&["reward", "import", verdicts, "--run", run]);
    assert_eq!(
        (&told[0]["new"], &told[0]["queued"]),
        (&json!(1), &json!(false))
    );
    let (mut viewing, url) = view(&folder);
    let page = get(&url, "/api/runs/run/episodes?purpose=train&limit=3");
    assert_eq!(page["episodes"].as_array().unwrap().len(), 3);
    let step = get(&url, "/api/runs/run/steps/2");
    assert!(step["trained"].as_u64().unwrap() > 0, "{step}");
    let listed = get(&url, "/api/runs");
    assert_eq!(listed["runs"][0]["stored"], true, "{listed}");
    viewing.kill();
    let dry = rows(&["gc", run, "--objects-older-than", "0s", "--dry-run"]);
    let gone = rows(&["gc", run, "--objects-older-than", "0s"]);
    assert!(gone[0]["episodes"].as_u64().unwrap() > 0, "{gone:?}");
    assert_eq!(dry[0]["episodes"], gone[0]["episodes"], "{dry:?}");
    let left = rows(&["episodes", run, "--limit", "10000", "--purpose", "train"]);
    let gone = gone[0]["episodes"].as_u64().unwrap() as usize;
    assert_eq!(left.len() + gone, 6 * 32);
    let seven = recipe(&dir.path().join("a"), 7, &keys);
    let last = done(&seven, &folder, &["--resume"]);
    assert_eq!(last["samples"]["lost"], 0, "{last}");
}

#[test]
fn a_run_in_a_database_is_refused_where_it_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let server = PostgresServer::start();
    let (typed, objects) = (
        format!("{:?}", server.url()),
        format!("\"file://{}\"", dir.path().join("objects").display()),
    );
    let keys = keys(("store.url", typed.as_str()), &objects);
    let recipe = recipe_in(dir.path(), "a", &keys);
    let folder = dir.path().join("run");
    done(&recipe, &folder, &[]);
    let run = folder.to_str().unwrap();
    let sim = refused(sinew().args(["sim", "--calibrate", run]));
    assert!(sim.contains("sinew runs copy"), "{sim}");
    // The name of a store follows that of the folder, so that a renamed folder has none.
    let moved = dir.path().join("moved");
    std::fs::rename(&folder, &moved).unwrap();
    let mut list = sinew();
    let output = list.arg("episodes").arg(&moved).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("no schema sinew_store_moved"), "{said}");
    std::fs::rename(&moved, &folder).unwrap();
    std::fs::write(folder.join("store.id"), "0123456789abcdef\n").unwrap();
    let other = refused(sinew().arg("episodes").arg(&folder));
    assert!(other.contains("another store"), "{other}");
    // A database that is gone is named.
    drop(server);
    let output = sinew().arg("episodes").arg(&folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("is PostgreSQL running there"), "{said}");
}

/// Imports a verdict of each training episode that waits for one.
fn give(run: &Path) {
    let mut list = sinew();
    list.arg("episodes").arg(run).args(["--purpose", "train"]);
    let listed = list.args(["--json", "--limit", "10000"]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let rows = json_lines(&listed).into_iter();
    let waiting = rows.filter(|row| row["waits"] == true).enumerate();
    let verdict = |(n, row): (usize, Value)| {
        json!({"episode": row["episode"], "name": "thumbs", "value": n % 3, "at": 1.0}).to_string()
    };
    let verdicts: Vec<String> = waiting.map(verdict).collect();
    if verdicts.is_empty() {
        return;
    }
    let file = run.with_extension("jsonl");
    std::fs::write(&file, verdicts.join("\n")).unwrap();
    let mut import = sinew();
    import
        .args(["reward", "import"])
        .arg(&file)
        .arg("--run")
        .arg(run);
    run_ok(import.arg("--json"));
}

#[test]
fn rewards_that_come_late_reach_a_run_in_a_database() {
    let dir = tempfile::tempdir().unwrap();
    let server = PostgresServer::start();
    let typed = format!("{:?}", server.url());
    let late = "{ names = [\"thumbs\"], wait_s = 600.0, max_waiting = 8, max_staleness = 50 }";
    let keys = [
        ("store.type", "\"postgres\""),
        ("store.url", typed.as_str()),
        ("reward.late", late),
        ("algorithm.correction", TIS),
        ("train.mode", "\"sync\""),
    ];
    let recipe = recipe(dir.path(), 3, &keys);
    let run = dir.path().join("run");
    let mut command = train(&recipe, &run, &[]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(240));
        give(&run);
    }
    let last = last_line(&child.wait_with_output().unwrap());
    let samples = &last["samples"];
    let count = |what: &str| samples[what].as_u64().unwrap();
    assert_eq!((count("trained_twice"), count("lost")), (0, 0), "{last}");
    assert!(count("trained") > 0, "{last}");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(metrics.contains("reward/thumbs"), "{metrics}");
}

/// All files below a folder that contain a text.
fn containing(folder: &Path, text: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            containing(&path, text, found);
        } else if std::fs::read(&path)
            .unwrap()
            .windows(text.len())
            .any(|w| w == text.as_bytes())
        {
            found.push(path);
        }
    }
}

#[test]
fn secrets_are_in_no_file_of_a_run_and_in_no_message() {
    const SECRET: &str = "h1dden-s3cret";
    let dir = tempfile::tempdir().unwrap();
    let server = PostgresServer::start();
    let file = dir.path().join("address");
    let url = server.url().replace("sinew@", &format!("sinew:{SECRET}@"));
    std::fs::write(&file, url).unwrap();
    let (typed, objects) = (
        format!("{file:?}"),
        format!("\"file://{}\"", dir.path().join("objects").display()),
    );
    let keys = keys(("store.url_file", typed.as_str()), &objects);
    let recipe = recipe_in(dir.path(), "a", &keys);
    let run = dir.path().join("run");
    let secretly = |command: &mut std::process::Command| {
        command
            .env("SINEW_LOG", "debug")
            .env("AWS_SECRET_ACCESS_KEY", SECRET);
        let output = command.env("REDISCLI_AUTH", SECRET).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(!said.contains(SECRET), "{said}");
        (output.status.success(), said)
    };
    let (done, said) = secretly(&mut train(&recipe, &run, &[]));
    assert!(done, "{said}");
    assert!(secretly(sinew().arg("episodes").arg(&run)).0);
    secretly(sinew().arg("check").arg(&recipe));
    let (mut viewing, url) = view(&run);
    for page in ["recipe", "errors", "live"] {
        let page = get(&url, &format!("/api/runs/run/{page}")).to_string();
        assert!(!page.contains(SECRET), "{page}");
    }
    viewing.kill();
    // A server that is gone is named without its password, too.
    drop(server);
    let (done, said) = secretly(sinew().arg("episodes").arg(&run));
    assert!(!done && said.contains("sinew@127.0.0.1"), "{said}");
    let mut found = Vec::new();
    containing(&run, SECRET, &mut found);
    containing(&dir.path().join("objects"), SECRET, &mut found);
    assert!(found.is_empty(), "{found:?}");
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
        (
            vec![
                ("store.type", "\"postgres\""),
                ("store.url", "\"postgres://h/db\""),
                ("store.payloads", "\"s3://key:hidden@b/p\""),
            ],
            "AWS_SECRET_ACCESS_KEY",
        ),
        (
            vec![
                ("store.type", "\"postgres\""),
                ("store.url", "\"mysql://u:hidden@h/db\""),
            ],
            "PGPASSWORD",
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
}

#[test]
fn passwords_that_are_typed_are_refused_and_not_repeated() {
    for (typed, said) in [
        (
            &["runs", "copy", "runs/x", "postgres://u:hidden@h/db"][..],
            "PGPASSWORD",
        ),
        (
            &[
                "runs",
                "copy",
                "runs/x",
                "postgres://h/db",
                "--payloads",
                "s3://k:hidden@b",
            ],
            "AWS_SECRET_ACCESS_KEY",
        ),
        (&["queue", "stats", "redis://:hidden@h"], "REDISCLI_AUTH"),
        (
            &["queue", "stats", "postgres://h/db?password=hidden"],
            "PGPASSWORD",
        ),
    ] {
        let refused = refused(sinew().args(typed));
        assert!(
            refused.contains(said) && !refused.contains("hidden"),
            "{refused}"
        );
    }
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
