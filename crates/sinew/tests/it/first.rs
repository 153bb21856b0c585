//! The smallest projects (`examples/first/`), whose lines docs/compare.md counts: each trains a tiny model.

use crate::resume::done;
use crate::{Running, last_line, root, run_ok, sinew};
use serde_json::Value;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The recipe of a case with a model from scratch in the place of SmolLM2, which learns in seconds.
pub(crate) fn tiny(dir: &Path, case: &str, steps: u32) -> PathBuf {
    let recipe = root().join("examples/first").join(case).join("recipe.toml");
    let text = std::fs::read_to_string(recipe).unwrap();
    let model = text.lines().find(|line| line.starts_with("model")).unwrap();
    let scratch = "model = { type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }";
    let rest = format!(
        "[rollout]\ntasks_per_step = 6\ngroup_size = 8\nmax_turn_tokens = 6\nmax_context_tokens = 1024\n\
         [train]\nsteps = {steps}\nlearning_rate = 3e-3\nmicro_batch_tokens = 8192\n[eval]\ntasks = 1\n"
    );
    let path = dir.join(format!("{case}.toml"));
    std::fs::write(&path, text.replacen(model, scratch, 1) + &rest).unwrap();
    path
}

fn trained(dir: &Path, case: &str, steps: u32, more: &[&str]) -> Value {
    done(&tiny(dir, case, steps), &dir.join(case), more)
}

/// The mean reward of the first and of the last five steps.
pub(crate) fn rises(dir: &Path, case: &str) {
    let steps = crate::steps(&dir.join(case)).into_iter();
    let rewards: Vec<f64> = steps
        .map(|s| s["rollout"]["reward"].as_f64().unwrap())
        .collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&rewards[..5]), mean(&rewards[rewards.len() - 5..]));
    assert!(last > first + 0.2, "{case}: {first} to {last}");
}

#[test]
fn rows_and_a_function_train() {
    let dir = tempfile::tempdir().unwrap();
    trained(dir.path(), "tasks", 30, &[]);
    rises(dir.path(), "tasks");
}

#[test]
fn a_graph_trains() {
    let dir = tempfile::tempdir().unwrap();
    trained(dir.path(), "langgraph", 20, &[]);
    rises(dir.path(), "langgraph");
}

/// A model of bytes calls no tool, so nothing can rise: the class is checked, and its own solution counts.
#[test]
fn the_environment_with_two_tools_passes_its_checks() {
    let mut check = sinew();
    check.args([
        "env",
        "check",
        "examples/first/env/shop.py:Shop",
        "--tasks",
        "4",
    ]);
    let told = run_ok(&mut check);
    assert!(told.contains("search") && told.contains("add"), "{told}");
}

/// A free port of this host, so that two programs can get each other's address before they listen. It is
/// below the ports that the system gives out by itself, so that nothing else gets it until then.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        // Tests that run at once are threads, or processes of different numbers.
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let place = std::process::id().wrapping_mul(16).wrapping_add(next);
        let port = 10_000 + u16::try_from(place % 22_000).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// An address with such a port, at which a program can be started again after its end.
pub(crate) fn free_address() -> String {
    format!("127.0.0.1:{}", free_port())
}

/// Starts `python SCRIPT` at a port, with the model at another; the recipe asks it there.
fn service(mut python: Command, recipe: &Path) -> (Running, u16) {
    let (port, model) = (free_port(), free_port());
    python
        .env("PORT", port.to_string())
        .env("OPENAI_BASE_URL", format!("http://127.0.0.1:{model}/v1"))
        .env("OPENAI_API_KEY", "none")
        .stderr(Stdio::inherit());
    let mut child = Running(python.spawn().unwrap());
    let text = std::fs::read_to_string(recipe).unwrap();
    std::fs::write(recipe, text.replace(":9000/", &format!(":{port}/"))).unwrap();
    // The imports of the SDK take a while where much else runs.
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        let ended = child.0.try_wait().unwrap();
        assert!(ended.is_none(), "the service ended: {ended:?}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    (child, model)
}

#[test]
fn a_service_of_the_openai_sdk_trains() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = tiny(dir.path(), "service", 20);
    let mut python = Command::new(root().join(".cache/venv/bin/python3"));
    python
        .current_dir(root())
        .env("PYTHONPATH", "python/src")
        .arg("examples/first/service/service.py");
    let (_running, model) = service(python, &recipe);
    let serve = ["--serve", &format!("127.0.0.1:{model}")];
    done(&recipe, &dir.path().join("service"), &serve);
    rises(dir.path(), "service");
}

#[test]
fn init_with_a_service_trains_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut init = sinew();
    run_ok(
        init.current_dir(dir.path())
            .args(["init", "mine", "--start", "service"]),
    );
    let mine = dir.path().join("mine");
    let mut python = Command::new("python3");
    python.current_dir(&mine).arg("service.py");
    let (_running, model) = service(python, &mine.join("recipe.toml"));
    let mut command = sinew();
    command
        .current_dir(&mine)
        .args(["train", "recipe.toml", "--json", "--run-dir", "run"]);
    command.args(["--serve", &format!("127.0.0.1:{model}")]);
    let last = last_line(&command.output().unwrap());
    let reward = |at: &str| last["eval"][at]["reward"].as_f64().unwrap();
    assert!(reward("after") > reward("before") + 0.3, "{last}");
}

#[test]
fn the_table_of_lines_is_that_of_the_files() {
    let counted = run_ok(
        Command::new("python3")
            .arg("scripts/count_lines.py")
            .current_dir(root()),
    );
    let page = std::fs::read_to_string(root().join("docs/compare.md")).unwrap();
    assert_eq!(counted.lines().count(), 4);
    for row in counted.lines() {
        assert!(page.contains(row), "docs/compare.md lacks: {row}");
    }
}
