//! Sizes of files, functions, crates and blobs.

use super::source::{self, Kind};
use super::{crates, fail_if_any, name, production_files, rust_files, shown};
use crate::root;

const MAX_FILE_LINES: usize = 800;
const MAX_FUNCTION_LINES: usize = 70;
const MAX_CRATE_LINES: usize = 8000;
const MAX_BLOB_BYTES: u64 = 200 * 1024;

/// Functions that are still longer: they may only become shorter.
const LONG: &[(&str, usize)] = &[("crates/sinew-image/tests/it.rs", 72)];

/// Whether the table knows something of this length in a file.
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

#[test]
fn crates_stay_below_the_limit() {
    let mut problems = Vec::new();
    for dir in crates() {
        let code: usize = production_files(&dir)
            .iter()
            .map(|path| {
                let lines = source::lines(path);
                lines
                    .iter()
                    .filter(|l| !l.test && l.kind == Kind::Code)
                    .count()
            })
            .sum();
        if code > MAX_CRATE_LINES {
            problems.push(format!("{}: {code} lines of code", name(&dir)));
        }
    }
    fail_if_any(&problems, "crates above 8,000 lines of production code");
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
