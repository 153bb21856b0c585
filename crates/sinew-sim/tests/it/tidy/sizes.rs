//! Sizes of files, functions and blobs, and the width of crates.

use super::source::{self, Kind};
use super::{crates, fail_if_any, name, production_files, rust_files, shown};
use crate::root;

const MAX_FILE_LINES: usize = 800;
const MAX_FUNCTION_LINES: usize = 70;
/// Public items of a crate, and the project's crates that it depends on.
const MAX_PUBLIC_ITEMS: usize = 220;
const MAX_DEPENDENCIES: usize = 13;
const MAX_BLOB_BYTES: u64 = 200 * 1024;

/// Functions that are still longer: they may only become shorter.
const LONG: &[(&str, usize)] = &[("crates/sinew-image/tests/it.rs", 72)];

/// Whether the table lists something of this length in a file.
fn is_known(file: &str, len: usize, limit: usize) -> bool {
    let larger = LONG.iter().filter(|(_, max)| *max > limit);
    let mut here = larger.filter(|(known, max)| *known == file && *max < 2 * limit);
    here.any(|(_, max)| len <= *max)
}

/// Files that are data, larger than a source file may be.
const LARGE: [&str; 1] = ["Cargo.lock"];

#[test]
fn files_and_functions_stay_short() {
    let mut long = Vec::new();
    for path in rust_files() {
        let lines = source::lines(&path);
        let file = shown(&path);
        if lines.len() > MAX_FILE_LINES && !is_known(&file, lines.len(), MAX_FILE_LINES) {
            long.push(format!("{}: {} lines", shown(&path), lines.len()));
        }
        for (start, len) in functions(&lines) {
            if len > MAX_FUNCTION_LINES && !is_known(&file, len, MAX_FUNCTION_LINES) {
                let place = format!("{}:{}", shown(&path), start + 1);
                long.push(format!("{place}: function of {len} lines"));
            }
        }
    }
    fail_if_any(&long, "too long");
}

/// First line and length of each function with a body, by the indentation that rustfmt gives.
fn functions(lines: &[source::Line]) -> Vec<(usize, usize)> {
    let mut out = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.code.trim_start();
        let before = code.split("fn ").next().unwrap_or_default();
        let words = before.split_whitespace();
        let prefix = |w: &str| {
            matches!(w, "const" | "async" | "unsafe" | "extern" | "\"\"") || w.starts_with("pub")
        };
        let mut inside_pub = false;
        let is_fn = code.contains("fn ")
            && words.into_iter().all(|w| {
                // `pub(in crate::x)` has a space.
                let fits = prefix(w) || inside_pub;
                inside_pub = (inside_pub || w.starts_with("pub(in")) && !w.ends_with(')');
                fits
            });
        // A declaration ends before a body begins.
        let ends = |l: &&source::Line| l.code.trim_end().ends_with([';', '{', '}']);
        let head = lines[start..].iter().find(ends);
        if !is_fn || head.is_some_and(|l| l.code.trim_end().ends_with(';')) {
            continue;
        }
        let indent = " ".repeat(line.text.len() - line.text.trim_start().len());
        let end = format!("{indent}}}");
        if let Some(len) = lines[start..].iter().position(|l| l.text == end) {
            out.push((start, len + 1));
        }
    }
    out
}

#[test]
fn functions_of_every_form_are_measured() {
    let text = "pub(in crate::a) const unsafe extern \"C\" fn f() {\n    1\n}\nlet fn_ = 1;\n\
                trait T {\n    fn declared();\n}\n";
    assert_eq!(functions(&source::split(text)), [(0, 3)]);
}

/// Crates that put all others together.
const ASSEMBLIES: [&str; 3] = ["sinew", "sinew-assembly", "sinew-bench"];

/// Whether a line declares an item that other crates can name.
fn is_public_item(code: &str) -> bool {
    let kinds = [
        "fn", "struct", "enum", "trait", "const", "type", "static", "async", "unsafe", "extern",
    ];
    let declared = code.trim_start().strip_prefix("pub ");
    declared.is_some_and(|rest| {
        kinds
            .iter()
            .any(|kind| rest.starts_with(&format!("{kind} ")))
    })
}

#[test]
fn crates_have_few_public_items_and_dependencies() {
    let mut problems = Vec::new();
    for dir in crates() {
        let items: usize = production_files(&dir)
            .iter()
            .flat_map(|path| source::lines(path))
            .filter(|l| !l.test && l.kind == Kind::Code && is_public_item(&l.code))
            .count();
        if items > MAX_PUBLIC_ITEMS {
            problems.push(format!("{}: {items} public items", name(&dir)));
        }
        let manifest = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let used = manifest.split("[dev-dependencies]").next().unwrap();
        let own = used.lines().filter(|l| l.starts_with("sinew-")).count();
        if own > MAX_DEPENDENCIES && !ASSEMBLIES.contains(&name(&dir).as_str()) {
            problems.push(format!("{}: {own} crates of the project", name(&dir)));
        }
    }
    fail_if_any(&problems, "crates that are too wide");
}

#[test]
fn no_blob_is_too_big() {
    let listed = std::process::Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(listed.status.success());
    let mut problems = Vec::new();
    for file in String::from_utf8(listed.stdout).unwrap().split('\0') {
        let Ok(meta) = std::fs::metadata(root().join(file)) else {
            continue;
        };
        if meta.is_file() && meta.len() > MAX_BLOB_BYTES && !LARGE.contains(&file) {
            problems.push(format!("{file}: {} bytes", meta.len()));
        }
    }
    fail_if_any(&problems, "above 200 KiB");
}
