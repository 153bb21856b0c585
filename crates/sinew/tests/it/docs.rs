//! The `sh` blocks of the README and of the pages in `docs/` are run, a page as one script.
//!
//! The blocks run in an empty folder that has what a checkout has. There, `recipes/quickstart.toml`
//! is a short run of the tiny recipe, and `runs/quickstart` its result: the commands are the same,
//! the hour of arithmetic is not. `make` is left out: CI is one of its two targets. So are `console`
//! blocks: measurements that take long, or install what other systems need.

use super::{root, sinew};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

fn pages() -> Vec<PathBuf> {
    let mut pages = vec![root().join("README.md")];
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    pages
}

/// Commands that a page asks to type, in order.
fn script(page: &Path) -> String {
    let text = fs::read_to_string(page).unwrap();
    let (mut script, mut fence) = (String::new(), None);
    for (index, line) in text.lines().enumerate() {
        match (fence, line.strip_prefix("```")) {
            (None, Some(language)) => {
                let place = format!("{}:{}", page.display(), index + 1);
                assert!(
                    !language.is_empty(),
                    "{place}: say what this is: sh, if it is to be run"
                );
                fence = Some(language);
            }
            (Some(_), Some(_)) => fence = None,
            (Some("sh"), None) if !line.starts_with("make ") => {
                script.push_str(line);
                script.push('\n');
            }
            _ => {}
        }
    }
    script
}

/// A folder as after `make demo`, in seconds.
fn checkout(folder: &Path) {
    let bin = folder.join("target/debug");
    fs::create_dir_all(&bin).unwrap();
    symlink(env!("CARGO_BIN_EXE_sinew"), bin.join("sinew")).unwrap();
    for shared in ["data", "docs", "examples", "python", ".cache"] {
        if root().join(shared).exists() {
            symlink(root().join(shared), folder.join(shared)).unwrap();
        }
    }
    let recipes = folder.join("recipes");
    fs::create_dir_all(&recipes).unwrap();
    for entry in fs::read_dir(root().join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        let to = recipes.join(path.file_name().unwrap());
        if path.is_dir() {
            symlink(&path, to).unwrap();
        } else {
            fs::copy(&path, to).unwrap();
        }
    }
    let tiny = fs::read_to_string(recipes.join("tiny.toml")).unwrap();
    let short = tiny
        .replace("name = \"tiny\"", "name = \"quickstart\"")
        .replace("steps = 60", "steps = 2");
    assert_ne!(tiny, short);
    fs::write(recipes.join("quickstart.toml"), short).unwrap();
    let trained = sinew()
        .current_dir(folder)
        .args(["train", "recipes/quickstart.toml", "--run-dir"])
        .arg("runs/quickstart")
        .output()
        .unwrap();
    assert!(trained.status.success(), "{trained:?}");
}

/// Tests that share the pages, and run at once.
const TESTS: usize = 4;

/// Seconds after which the commands of a page hang. Pages that check browsers and agents take two
/// minutes on a machine with other work.
const PAGE_S: &str = "330";

/// Runs the pages from the one at `first` that belong to one test.
fn run_pages(first: usize) {
    let folder = tempfile::tempdir().unwrap();
    checkout(folder.path());
    let bin = folder.path().join("target/debug");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut ran = 0;
    for page in pages().into_iter().skip(first).step_by(TESTS) {
        let script = script(&page);
        if script.is_empty() {
            continue;
        }
        ran += 1;
        // Background processes of a page end with it.
        let whole = format!("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}");
        let run = Command::new("timeout")
            .args([PAGE_S, "bash", "-euo", "pipefail", "-c", &whole])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env(
                "SINEW_TORCH_PYTHON",
                root().join(".cache/venv-torch/bin/python"),
            )
            .output()
            .unwrap();
        assert!(
            run.status.success(),
            "{}: {}\n{script}\n{}\n{}",
            page.display(),
            run.status,
            String::from_utf8_lossy(&run.stdout),
            String::from_utf8_lossy(&run.stderr)
        );
    }
    assert!(ran >= 3, "{ran} pages with commands");
}

#[test]
fn every_command_of_the_docs_runs_on_first_pages() {
    run_pages(0);
}

#[test]
fn every_command_of_the_docs_runs_on_second_pages() {
    run_pages(1);
}

#[test]
fn every_command_of_the_docs_runs_on_third_pages() {
    run_pages(2);
}

#[test]
fn every_command_of_the_docs_runs_on_fourth_pages() {
    run_pages(3);
}
