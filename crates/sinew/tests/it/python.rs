//! The Python package against the program: runs, episodes, refusals; its types; its reference page.

use crate::{root, run_ok};
use std::path::Path;
use std::process::Command;

/// An interpreter that finds the package of this checkout and the program that is tested, in `folder`.
fn python(folder: &Path) -> Command {
    interpreter("python3", folder)
}

fn interpreter(name: &str, folder: &Path) -> Command {
    let mut command = Command::new(name);
    command
        .current_dir(folder)
        .env(
            "PYTHONPATH",
            root().join("python/src").canonicalize().unwrap(),
        )
        .env("SINEW_BIN", env!("CARGO_BIN_EXE_sinew"));
    command
}

#[test]
fn runs_are_trained_stopped_resumed_and_refused_from_python() {
    let dir = tempfile::tempdir().unwrap();
    let tests = root()
        .join("python/tests/trains.py")
        .canonicalize()
        .unwrap();
    run_ok(python(dir.path()).arg(tests));
}

/// Failing, hanging, cancelled and mute agents, under the oldest Python that is supported too where the host
/// has it.
#[test]
fn agents_that_fail_end_their_own_rollouts_alone() {
    let dir = tempfile::tempdir().unwrap();
    let tests = root().join("python/tests/agents_that_fail.py");
    let tests = tests.canonicalize().unwrap();
    for name in ["python3", "python3.10"] {
        let version = Command::new(name).arg("--version").output();
        let there = version.is_ok_and(|o| o.status.success());
        if there || name == "python3" {
            let told = run_ok(interpreter(name, dir.path()).arg(&tests));
            assert_eq!(told.lines().last(), Some("ok"), "{name}: {told}");
        }
    }
}

#[test]
fn the_types_of_the_package_pass_mypy_and_pyright() {
    let cache = root().join(".cache").canonicalize().unwrap();
    let tools = cache.join("tools/bin");
    // pyright runs on Node.js.
    let path = std::env::var("PATH").unwrap();
    let path = format!("{path}:{}", cache.join("venv-litellm/bin").display());
    let run = |program: &str, args: &[&str]| {
        let mut command = Command::new(tools.join(program));
        command
            .current_dir(root().join("python"))
            .args(args)
            .env("PATH", &path);
        run_ok(&mut command)
    };
    let (package, used) = ("src", "tests/typed_use.py");
    let cache = tempfile::tempdir().unwrap();
    let told = run(
        "mypy",
        &["--cache-dir", cache.path().to_str().unwrap(), package, used],
    );
    assert!(told.contains("no issues found"), "{told}");
    let told = run("pyright", &["--project", "."]);
    assert!(told.contains("0 errors"), "{told}");
}

#[test]
fn the_reference_of_the_package_is_that_of_its_docstrings() {
    let page = std::fs::read_to_string(root().join("docs/python-reference.md")).unwrap();
    let made = run_ok(
        Command::new("python3")
            .arg("python/reference.py")
            .current_dir(root()),
    );
    assert!(
        made == page,
        "run: python3 python/reference.py > docs/python-reference.md"
    );
}

#[test]
fn the_notebook_of_the_examples_trains_and_draws() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| root().join(path).canonicalize().unwrap();
    let args = [
        at("python/tests/notebook.py"),
        at("examples/notebook.ipynb"),
    ];
    run_ok(python(dir.path()).args(args));
}
