//! `sinew doctor`: rows of this host, and of one on which something is missing.

use crate::json_lines;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// The program in a folder that holds nothing else, so that it finds no models in folders above it. `PATH`
/// has Debian's Python if `python`, and no engine of containers; `HOME` has no models.
fn doctor(dir: &Path, python: bool) -> Command {
    let (own, bin) = (dir.join("sinew"), dir.join("bin"));
    if !own.exists() {
        std::fs::copy(env!("CARGO_BIN_EXE_sinew"), &own).unwrap();
    }
    let _ = std::fs::remove_dir_all(&bin);
    std::fs::create_dir(&bin).unwrap();
    if python {
        std::os::unix::fs::symlink("/usr/bin/python3", bin.join("python3")).unwrap();
    }
    let mut command = Command::new(own);
    command.arg("doctor").current_dir(dir);
    command.env_clear().env("PATH", bin).env("HOME", dir);
    command.env("HF_HUB_OFFLINE", "1");
    command
}

fn rows(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    json_lines(&text)
}

fn row<'a>(rows: &'a [Value], name: &str) -> &'a Value {
    rows.iter().find(|row| row["check"] == name).unwrap()
}

#[test]
fn a_host_without_engines_and_models_does_a_first_run_and_names_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let output = doctor(dir.path(), true).arg("--json").output().unwrap();
    let mut rows = rows(&output);
    let end = rows.pop().unwrap();
    assert_eq!(output.status.code(), Some(0), "{rows:#?}");
    assert_eq!((&end["first_run"], &end["fail"]), (&true.into(), &0.into()));
    assert_eq!(
        end["ok"].as_u64().unwrap() + end["warn"].as_u64().unwrap(),
        rows.len() as u64
    );
    for row in &rows {
        let named = row["hint"].as_str().is_some_and(|hint| !hint.is_empty());
        assert_eq!(named, row["state"] != "ok", "{row}");
        assert!(!row["detail"].as_str().unwrap().is_empty(), "{row}");
    }
    let groups = ["program", "machine", "sandboxes", "python", "models"];
    assert!(
        groups
            .iter()
            .all(|group| rows.iter().any(|row| row["group"] == *group))
    );
    let has = |name: &str, key: &str, text: &str| {
        let row = row(&rows, name);
        assert!(row[key].as_str().unwrap().contains(text), "{row}");
    };
    has("process", "detail", "a program took ");
    has("python3", "detail", "a worker started in ");
    has("package", "hint", "pip download");
    has("hub", "hint", "unset HF_HUB_OFFLINE");
    // Debian's Python may have packages, and an engine may listen at its socket.
    for (name, hint) in [
        ("browser", "playwright"),
        ("trackers", "pip install wandb"),
        ("container", "apt-get install crun"),
    ] {
        let row = row(&rows, name);
        let named = row["hint"]
            .as_str()
            .is_none_or(|named| named.contains(hint));
        assert!(
            named || row["detail"].as_str().unwrap().contains("a program took"),
            "{row}"
        );
    }
}

#[test]
fn what_a_first_run_needs_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = doctor(dir.path(), false);
    let output = command.env("SINEW_CPU", "quantum").output().unwrap();
    let errors = crate::failure(&output, 3);
    assert!(errors.contains("kernels: SINEW_CPU: "), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    let hint_of = |name: &str| {
        let mut lines = text
            .lines()
            .skip_while(|line| !line.starts_with(&format!("  FAIL  {name}")));
        lines
            .find(|line| line.contains("hint: "))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert!(hint_of("kernels").contains("unset SINEW_CPU"), "{text}");
    assert!(
        hint_of("python3").contains("apt-get install python3"),
        "{text}"
    );
    assert!(text.starts_with("program\n  ok    version "), "{text}");
    assert!(!text.contains("A first run works here"), "{text}");
}
