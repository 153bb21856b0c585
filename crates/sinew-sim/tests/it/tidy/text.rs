//! Rules for comments and documents: openings, length of lines, heads of files.

use super::source::{self, Kind};
use super::{crates, fail_if_any, name, production_files, rust_files, shown};

/// Maximum columns of a line of Rust, literals left out.
const MAX_COLUMNS: usize = 110;

#[test]
fn every_library_opens_with_its_purpose_and_invariants() {
    let mut problems = Vec::new();
    for dir in crates() {
        let lib = dir.join("src/lib.rs");
        if !lib.exists() || name(&dir) == "sinew-sim" {
            continue;
        }
        let text = std::fs::read_to_string(&lib).unwrap();
        let doc: String = text.lines().take_while(|l| l.starts_with("//!")).collect();
        if !doc.contains("nvariant") {
            problems.push(shown(&lib));
        }
    }
    fail_if_any(&problems, "names no invariant");
}

#[test]
fn nothing_is_left_undone() {
    let mut problems = Vec::new();
    for path in rust_files() {
        let text = std::fs::read_to_string(&path).unwrap();
        for word in [
            concat!("FIX", "ME"),
            concat!("TO", "DO"),
            concat!("#[ign", "ore"),
        ] {
            if text.contains(word) {
                problems.push(format!("{}: {word}", shown(&path)));
            }
        }
    }
    fail_if_any(&problems, "unfinished");
}

#[test]
fn lines_fit_the_screen() {
    let mut problems = Vec::new();
    for path in rust_files() {
        for (i, line) in source::lines(&path).iter().enumerate() {
            // A literal that is split cannot be searched for. A link or a row of a table cannot be split.
            let words = line.text.trim_start().trim_start_matches(['/', '!']);
            let row = line.kind == Kind::Doc && words.trim_start().starts_with('|');
            // So is the head of a macro.
            let macro_head = line.code.contains("$(");
            let whole = line.literal || row || macro_head || line.text.contains("://");
            if !whole && line.text.chars().count() > MAX_COLUMNS {
                let columns = line.text.chars().count();
                problems.push(format!("{}:{}: {columns} columns", shown(&path), i + 1));
            }
        }
    }
    fail_if_any(&problems, "lines above 110 columns");
}

/// Words that no comment opens with: the subject of the sentence would be left out.
const OPENINGS: [&str; 8] = ["What", "Of", "Who", "Whose", "Why", "Which", "Where", "How"];

#[test]
fn comments_open_with_their_subject() {
    let mut problems = Vec::new();
    for path in rust_files() {
        let mut before = String::new();
        for (i, line) in source::lines(&path).iter().enumerate() {
            let is_comment = matches!(line.kind, Kind::Doc | Kind::Comment);
            let text = line.text.trim_start().trim_start_matches(['/', '!']).trim();
            let text = if is_comment { text } else { "" };
            let first = text.split(|c: char| !c.is_alphanumeric()).next();
            if before.is_empty() && first.is_some_and(|word| OPENINGS.contains(&word)) {
                problems.push(format!("{}:{}: {text}", shown(&path), i + 1));
            }
            before = text.to_owned();
        }
    }
    fail_if_any(&problems, "comments without a subject");
}

#[test]
fn every_file_opens_with_its_purpose() {
    let mut problems = Vec::new();
    for path in crates().iter().flat_map(|dir| production_files(dir)) {
        let text = std::fs::read_to_string(&path).unwrap();
        if !text.starts_with("//!") && !text.starts_with("#![") {
            problems.push(shown(&path));
        }
    }
    fail_if_any(&problems, "no `//!` at the head");
}
