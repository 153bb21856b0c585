//! Rules about the tree itself: crate graph, sizes, openings, forbidden words.

use crate::root;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const MAX_FILE_LINES: usize = 800;
const MAX_FUNCTION_LINES: usize = 70;
const MAX_BLOB_BYTES: u64 = 200 * 1024;

/// Files that are data, larger than a source file may be.
const LARGE: [&str; 1] = ["Cargo.lock"];

fn crates() -> Vec<PathBuf> {
    let dir = std::fs::read_dir(root().join("crates")).unwrap();
    let mut paths: Vec<_> = dir.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn files(dir: &Path, extension: &str, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
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

fn manifest_graph() -> BTreeMap<String, BTreeSet<String>> {
    crates()
        .iter()
        .map(|dir| {
            let text = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
            let manifest: toml::Table = text.parse().unwrap();
            let uses = manifest
                .get("dependencies")
                .and_then(|d| d.as_table())
                .into_iter()
                .flat_map(|d| d.keys())
                .filter(|k| k.starts_with("sinew"))
                .cloned()
                .collect();
            (name(dir), uses)
        })
        .collect()
}

/// The table of ARCHITECTURE.md: rows `| layer | `crate` | one line | uses |`.
fn documented_graph() -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut graph = BTreeMap::new();
    for line in text.lines().filter(|l| l.starts_with('|')) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(krate) = cells.get(2).and_then(|c| c.strip_prefix('`')) else {
            continue;
        };
        let Some(krate) = krate.strip_suffix('`').filter(|k| k.starts_with("sinew")) else {
            continue;
        };
        let uses = cells[4]
            .split(',')
            .map(str::trim)
            .filter(|u| !u.is_empty() && *u != "-")
            .map(|u| format!("sinew-{u}"))
            .collect();
        graph.insert(krate.to_string(), uses);
    }
    graph
}

#[test]
fn the_crate_graph_is_the_one_in_architecture_md() {
    let (real, documented) = (manifest_graph(), documented_graph());
    let names = |g: &BTreeMap<String, BTreeSet<String>>| g.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&real), names(&documented), "crates and table rows");
    for (krate, uses) in &real {
        let allowed = &documented[krate];
        let extra: Vec<_> = uses.difference(allowed).collect();
        if krate != "sinew" {
            assert!(
                extra.is_empty(),
                "{krate} uses {extra:?}, the table allows {allowed:?}"
            );
        }
    }
}

#[test]
fn pure_crates_use_no_runtime_clock_environment_or_network() {
    let pure = [
        "types", "render", "grammar", "algo", "tensor", "model", "infer", "train",
    ];
    for krate in pure {
        let dir = root().join(format!("crates/sinew-{krate}"));
        let manifest = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        assert!(
            !manifest.contains("tokio"),
            "sinew-{krate} uses an async runtime"
        );
        let mut sources = Vec::new();
        files(&dir.join("src"), "rs", &mut sources);
        for path in sources {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            for banned in ["Instant::now", "SystemTime::now", "env::var", "TcpStream"] {
                let at = code.lines().position(|l| {
                    let l = l.trim_start();
                    !l.starts_with("//") && l.contains(banned)
                });
                assert!(at.is_none(), "{} line {:?}: {banned}", path.display(), at);
            }
        }
    }
}

#[test]
fn files_and_functions_stay_short() {
    let mut long = Vec::new();
    for path in rust_files() {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > MAX_FILE_LINES {
            long.push(format!("{}: {} lines", path.display(), lines.len()));
        }
        for (start, len) in functions(&lines) {
            if len > MAX_FUNCTION_LINES {
                long.push(format!(
                    "{}:{}: function of {len} lines",
                    path.display(),
                    start + 1
                ));
            }
        }
    }
    assert!(long.is_empty(), "too long:\n{}", long.join("\n"));
}

/// First line and length of each function, by the indentation that rustfmt gives.
fn functions(lines: &[&str]) -> Vec<(usize, usize)> {
    let mut out = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let is_fn = [
            "fn ",
            "pub fn ",
            "async fn ",
            "pub async fn ",
            "unsafe fn ",
            "pub(crate) fn ",
        ]
        .iter()
        .any(|p| code.starts_with(p));
        // A declaration ends before a body begins.
        let head = lines[start..].iter().find(|l| l.ends_with([';', '{', '}']));
        if !is_fn || head.is_some_and(|l| l.ends_with(';')) {
            continue;
        }
        let indent = " ".repeat(line.len() - code.len());
        let end = format!("{indent}}}");
        if let Some(len) = lines[start..].iter().position(|l| **l == end) {
            out.push((start, len + 1));
        }
    }
    out
}

#[test]
fn every_library_opens_with_its_purpose_and_invariants() {
    for dir in crates() {
        let lib = dir.join("src/lib.rs");
        if !lib.exists() || name(&dir) == "sinew-sim" {
            continue;
        }
        let text = std::fs::read_to_string(&lib).unwrap();
        let doc: String = text.lines().take_while(|l| l.starts_with("//!")).collect();
        assert!(
            doc.contains("nvariant"),
            "{} names no invariant",
            lib.display()
        );
    }
}

#[test]
fn nothing_is_left_undone_or_too_big() {
    for path in rust_files() {
        let text = std::fs::read_to_string(&path).unwrap();
        for word in [
            concat!("FIX", "ME"),
            concat!("TO", "DO"),
            concat!("#[ign", "ore"),
        ] {
            assert!(!text.contains(word), "{} contains {word}", path.display());
        }
    }
    let listed = std::process::Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(listed.status.success());
    for file in String::from_utf8(listed.stdout).unwrap().split('\0') {
        let path = root().join(file);
        let Ok(meta) = std::fs::metadata(&path) else {
            continue;
        };
        let fits = !meta.is_file() || meta.len() <= MAX_BLOB_BYTES || LARGE.contains(&file);
        assert!(
            fits,
            "{file} has {} bytes, at most {MAX_BLOB_BYTES}",
            meta.len()
        );
    }
}
