//! Runs whose trainer is PyTorch, in processes of their own.

use crate::resume::{done, end, if_begun, recipe, train};
use crate::{last_line, newest_checkpoint, root, run_ok, sinew, steps, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Python with PyTorch, which `make setup` installs.
fn python() -> PathBuf {
    let named = std::env::var_os("SINEW_TORCH_PYTHON").map(PathBuf::from);
    let python = named.unwrap_or_else(|| root().join(".cache/venv-torch/bin/python"));
    let hint = "make setup installs it";
    assert!(python.exists(), "{}: {hint}", python.display());
    python
}

/// A small recipe that two PyTorch processes train.
fn torch_recipe(dir: &Path, steps: u32, more: &[(&str, &str)]) -> PathBuf {
    let python = format!("{:?}", python().display().to_string());
    let trainer = [
        ("trainer.type", "\"torch\""),
        ("trainer.ranks", "2"),
        ("trainer.python", &python),
    ];
    recipe(dir, steps, &[&trainer[..], more].concat())
}

/// Processes whose parent is `parent` and whose command line names the trainer.
fn ranks(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_rank = |id: &u32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{id}/{file}"));
        let Ok(stat) = read("stat") else { return false };
        // The name of the program is in parentheses, and may hold spaces.
        let after = stat.rsplit(") ").next().unwrap_or_default();
        let own_parent = after.split(' ').nth(1).and_then(|p| p.parse().ok());
        let line = read("cmdline").unwrap_or_default();
        own_parent == Some(parent) && line.contains("sinew_torch")
    };
    ids.filter(is_rank).collect()
}

/// Processes of a run's trainer, whoever is their parent: their logs are in the run's folder.
fn left_over(run: &Path) -> Vec<u32> {
    let log = run.join("trainer/rank-0.log");
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|id: &u32| {
        let link = std::fs::read_link(format!("/proc/{id}/fd/2"));
        link.is_ok_and(|target| target == log || target == run.join("trainer/rank-1.log"))
    })
    .collect()
}

/// The files of the last checkpoint's moments.
fn optimizer(run: &Path) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(newest_checkpoint(run).join("optimizer"))
        .unwrap()
        .map(|e| e.unwrap().path());
    let mut files: Vec<(String, Vec<u8>)> = files
        .filter(|path| path.extension().is_some_and(|e| e == "distcp"))
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read(&path).unwrap())
        })
        .collect();
    assert_eq!(files.len(), 2, "each rank has its part");
    files.sort();
    files
}

fn signal(process: u32, name: &str) {
    let id = process.to_string();
    // It may have ended in this instant.
    let sent = Command::new("kill").args([name, &id]).output();
    sent.unwrap();
}

/// Kills processes of a run at instants that `seed` draws, `kills` times: a rank, all ranks or the owner.
fn killed_often(recipe: &Path, run: &Path, kills: u32, mut seed: u64) -> Value {
    let mut next = |bound: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % bound
    };
    let start = |run: &Path| -> Child {
        train(recipe, run, if_begun(&run.join("recipe.toml")))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut child = start(run);
    for _ in 0..kills {
        wait_until("ranks start", || {
            ranks(child.id()).len() == 2 || child.try_wait().unwrap().is_some()
        });
        // Loading takes seconds, and a run of such a model hardly more.
        std::thread::sleep(Duration::from_millis(next(9000)));
        let all = ranks(child.id());
        match (next(4), &all[..]) {
            (0, [first, ..]) => signal(*first, "-KILL"),
            (1, [.., last]) => signal(*last, "-KILL"),
            (2, all) => all.iter().for_each(|rank| signal(*rank, "-KILL")),
            _ => {
                child.kill().unwrap();
                child.wait().unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(300));
        if child.try_wait().unwrap().is_some() {
            child.wait().unwrap();
            wait_until("ranks end with their owner", || left_over(run).is_empty());
            child = start(run);
        }
    }
    last_line(&child.wait_with_output().unwrap())
}

#[test]
fn a_run_trains_with_pytorch_and_nothing_is_lost_however_often_it_is_killed() {
    let kills = std::env::var("SINEW_KILLS").map_or(5, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let restarts = ("trainer.restarts", "1000");
    let recipe = torch_recipe(dir.path(), 6, &[restarts]);
    let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
    let last = done(&recipe, &whole, &[]);
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    let trained = steps(&whole);
    assert_eq!(trained.len(), 6);
    for step in &trained {
        // The engine computes in f32 as well.
        let gap = step["logprob_gap_max"].as_f64().unwrap();
        assert!(gap < 1e-4, "{step}");
    }
    let killed_last = killed_often(&recipe, &killed, kills, 7);
    let (ended, expected) = (end(&killed, &killed_last), end(&whole, &last));
    assert_eq!(ended.1, expected.1, "{kills} kills");
    assert!(ended.0 == expected.0, "{kills} kills: other weights");
    assert!(
        optimizer(&killed) == optimizer(&whole),
        "{kills} kills: other moments"
    );
    assert!(left_over(&killed).is_empty() && left_over(&whole).is_empty());
    // A checkpoint is a model like any other.
    let model = dir.path().join("model");
    run_ok(sinew().arg("export").arg(&whole).arg(&model));
    assert!(model.join("model.safetensors").is_file());
}

#[test]
fn a_rank_that_hangs_is_named_and_the_run_continues() {
    let dir = tempfile::tempdir().unwrap();
    let more = [
        ("trainer.timeout_s", "20.0"),
        ("train.lora", "{ rank = 4 }"),
    ];
    let recipe = torch_recipe(dir.path(), 200, &more);
    let run = dir.path().join("run");
    let child = train(&recipe, &run, &[])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the first step", || {
        std::fs::read_to_string(run.join("metrics.jsonl"))
            .is_ok_and(|text| text.lines().count() > 1)
    });
    let before = ranks(child.id());
    signal(before[1], "-STOP");
    wait_until("other ranks", || {
        let now = ranks(child.id());
        now.len() == 2 && now.iter().all(|rank| !before.contains(rank))
    });
    let count = steps(&run).len();
    wait_until("a further step", || steps(&run).len() > count);
    signal(child.id(), "-INT");
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    assert!(
        said.contains("trainer lost") && said.contains("rank 1"),
        "{said}"
    );
    assert!(said.contains("--resume"), "{said}");
    assert!(left_over(&run).is_empty());
    assert!(run.join("checkpoints/LATEST").is_file());
}

#[test]
fn a_trainer_that_torchrun_started_is_attached_to() {
    let dir = tempfile::tempdir().unwrap();
    let (token, ready) = (dir.path().join("token"), dir.path().join("ready.json"));
    std::fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    let mut server = Command::new(python().with_file_name("torchrun"))
        .args(["--nproc-per-node", "2", "--master-addr", "127.0.0.1"])
        .args(["--master-port", "0", "--rdzv-backend", "c10d"])
        .args(["--rdzv-endpoint", "127.0.0.1:0", "-m", "sinew.torch"])
        .env("PYTHONPATH", root().join("python/src"))
        .env("SINEW_TORCH_TOKEN_FILE", &token)
        .env("SINEW_TORCH_READY", &ready)
        .env("GLOO_SOCKET_IFNAME", "lo")
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server", || ready.is_file());
    let written: Value = serde_json::from_slice(&std::fs::read(&ready).unwrap()).unwrap();
    let url = format!("{:?}", written["url"].as_str().unwrap());
    let file = format!("{:?}", token.display().to_string());
    let more = [
        ("trainer.type", "\"torch\""),
        ("trainer.url", &url),
        ("trainer.token_file", &file),
        ("algorithm.type", "\"ppo\""),
        ("algorithm.kl", "{ coefficient = 0.01 }"),
    ];
    let recipe = recipe(dir.path(), 2, &more);
    let run = dir.path().join("run");
    let last = done(&recipe, &run, &[]);
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    assert_eq!(steps(&run).len(), 2);
    signal(server.id(), "-TERM");
    server.wait().unwrap();
}

#[test]
fn a_trainer_that_cannot_start_is_refused_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |more: &[(&str, &str)], code: i32, expected: &[&str]| {
        let recipe = recipe(dir.path(), 2, more);
        let run = dir.path().join("run");
        let ended = train(&recipe, &run, &[]).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(code), "{said}");
        for part in expected {
            assert!(said.contains(part), "{part}: {said}");
        }
        let _ = std::fs::remove_dir_all(&run);
    };
    let torch = ("trainer.type", "\"torch\"");
    let none = ("trainer.python", "\"/nowhere/python\"");
    refused(&[torch, none], 3, &["/nowhere/python", "trainer.python"]);
    refused(
        &[torch, ("trainer.ranks", "0")],
        2,
        &["trainer.ranks", "1 to 1024"],
    );
    refused(
        &[torch, ("trainer.url", "\"http://127.0.0.1:1\"")],
        2,
        &["trainer.token_file"],
    );
    refused(
        &[("trainer.ranks", "2")],
        2,
        &["trainer.ranks", "type torch"],
    );
    refused(
        &[torch, ("train.data_parallel", "2")],
        2,
        &["train.data_parallel", "trainer.ranks"],
    );
    refused(
        &[torch, ("trainer.place", "\"turns\"")],
        2,
        &["trainer.place", "vllm or sglang"],
    );
    // A Python without PyTorch.
    let plain = [torch, ("trainer.python", "\"/usr/bin/python3\"")];
    refused(&plain, 1, &["trainer", "rank 0", "No module named"]);
}

/// Protocol, faults, head, tree and optimizer, and twelve families against plain `transformers`.
#[test]
fn the_server_passes_its_own_tests() {
    let run = Command::new(python())
        .args([
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "python/tests/torch",
        ])
        .current_dir(root())
        .env("PYTHONPATH", "python/src")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{said}");
}
