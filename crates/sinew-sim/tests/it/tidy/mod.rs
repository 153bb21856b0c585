//! Rules about the tree itself. Exceptions stand in tables with their reason; an exception that is not needed
//! any more fails, too.

mod circles;
mod graph;
mod safety;
mod sizes;
mod source;
mod text;

use crate::root;
use std::path::{Path, PathBuf};

/// Folders of all crates, sorted.
fn crates() -> Vec<PathBuf> {
    let dir = std::fs::read_dir(root().join("crates")).unwrap();
    let paths = dir.map(|e| e.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|p| p.join("Cargo.toml").is_file()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// A path below the root, for messages and tables.
fn shown(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}

fn files(dir: &Path, extension: &str, out: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            files(&path, extension, out);
        } else if path.extension().is_some_and(|e| e == extension) {
            out.push(path);
        }
    }
}

fn rust_files() -> Vec<PathBuf> {
    let mut out = Vec::new();
    for krate in crates() {
        files(&krate, "rs", &mut out);
    }
    out
}

/// Files below `src` that are compiled without tests, too.
fn production_files(krate: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    files(&krate.join("src"), "rs", &mut all);
    let mut only_tests = Vec::new();
    for path in &all {
        let own = path.file_stem().unwrap();
        let is_root = ["lib", "main", "mod"].iter().any(|root| own == *root);
        let parent = path.parent().unwrap();
        let below = if is_root {
            parent.to_owned()
        } else {
            parent.join(own)
        };
        for line in source::lines(path).iter().filter(|l| l.test) {
            if let Some((_, module)) = line
                .code
                .trim_end()
                .trim_end_matches(';')
                .split_once("mod ")
            {
                only_tests.push(below.join(module));
                // Named by `#[path]`, next to the file.
                only_tests.push(parent.join(format!("{}_{module}", own.to_string_lossy())));
            }
        }
    }
    all.retain(|p| {
        !only_tests
            .iter()
            .any(|t| p.with_extension("") == *t || p.starts_with(t))
    });
    all
}

fn manifest(krate: &Path) -> toml::Table {
    let text = std::fs::read_to_string(krate.join("Cargo.toml")).unwrap();
    text.parse().unwrap()
}

fn fail_if_any(problems: &[String], rule: &str) {
    assert!(problems.is_empty(), "{rule}:\n{}", problems.join("\n"));
}
