//! Unsafe code states why it is sound, and no Rust hides from the compiler's lints.

use super::source::{self, Kind, Line};
use super::{crates, fail_if_any, manifest, name, rust_files, shown};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Whether the comment right above a line, or on it, explains why it is sound.
fn explained(lines: &[Line], at: usize) -> bool {
    let says = |l: &Line| l.text.contains("SAFETY") || l.text.contains("# Safety");
    // The statement may have begun a few lines above, and attributes may stand between.
    let comment = |l: &&Line| l.kind != Kind::Blank;
    says(&lines[at])
        || lines[..at]
            .iter()
            .rev()
            .take_while(comment)
            .take(12)
            .any(says)
}

#[test]
fn unsafe_code_says_why_it_is_sound() {
    let mut problems = Vec::new();
    for path in rust_files() {
        let lines = source::lines(&path);
        for (i, line) in lines.iter().enumerate() {
            let code = &line.code;
            let block = code.contains("unsafe {") || code.contains("unsafe impl");
            if block && !explained(&lines, i) {
                problems.push(format!("{}:{}", shown(&path), i + 1));
            }
        }
    }
    fail_if_any(&problems, "`unsafe` without SAFETY");
}

/// The files that Cargo starts from in a crate.
fn roots(dir: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["src/lib.rs", "src/main.rs", "build.rs"]
        .iter()
        .map(|p| dir.join(p))
        .collect();
    for folder in ["src/bin", "tests", "benches", "examples"] {
        for entry in std::fs::read_dir(dir.join(folder)).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                roots.push(path.join("main.rs"))
            } else {
                roots.push(path)
            }
        }
    }
    let table = manifest(dir);
    for kind in ["bin", "lib", "test", "bench", "example"] {
        let targets = table.get(kind).into_iter();
        let targets =
            targets.flat_map(|t| t.as_array().cloned().unwrap_or_else(|| vec![t.clone()]));
        for target in targets {
            if let Some(path) = target.get("path").and_then(|p| p.as_str()) {
                roots.push(dir.join(path));
            }
        }
    }
    roots.retain(|p| p.is_file() && p.extension().is_some_and(|e| e == "rs"));
    roots
}

/// Adds a file and the modules that it declares.
fn reach(path: &Path, is_root: bool, seen: &mut BTreeSet<PathBuf>) {
    let Ok(real) = path.canonicalize() else {
        return;
    };
    if !seen.insert(real) {
        return;
    }
    let parent = path.parent().unwrap();
    let own = path.file_stem().unwrap();
    let folder = if is_root || own == "mod" {
        parent.to_path_buf()
    } else {
        parent.join(own)
    };
    let mut place = None;
    for line in source::lines(path) {
        let text = line.text.trim();
        if let Some(named) = text.strip_prefix("#[path = \"") {
            place = named.strip_suffix("\"]").map(str::to_owned);
        }
        let code = line.code.trim();
        let declared = code
            .strip_suffix(';')
            .and_then(|c| c.rsplit("mod ").next().filter(|_| c.contains("mod ")));
        if let Some(module) =
            declared.filter(|m| m.chars().all(|c| c.is_alphanumeric() || c == '_'))
        {
            match place.take() {
                Some(file) => reach(&parent.join(file), false, seen),
                None => {
                    reach(&folder.join(format!("{module}.rs")), false, seen);
                    reach(&folder.join(module).join("mod.rs"), false, seen);
                }
            }
        }
    }
}

#[test]
fn every_rust_file_is_compiled_and_linted() {
    let mut seen = BTreeSet::new();
    let mut problems = Vec::new();
    for dir in crates() {
        roots(&dir)
            .iter()
            .for_each(|root| reach(root, true, &mut seen));
        let linted = manifest(&dir).contains_key("lints");
        if !linted {
            problems.push(format!("{} has no [lints]", name(&dir)));
        }
    }
    for path in rust_files() {
        if !seen.contains(&path.canonicalize().unwrap()) {
            problems.push(format!("{}: part of no crate", shown(&path)));
        }
    }
    fail_if_any(&problems, "not linted");
}
