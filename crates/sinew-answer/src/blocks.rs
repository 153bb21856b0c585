//! Fenced and indented code of an answer, by the rules of CommonMark.
//!
//! Models write more than the rules allow. Their own tags, such as `<answer>`, do not hide a fence behind
//! them. A fence may be indented by any width. A block without a language, or in Markdown, that opens another
//! fence is Markdown itself.

use crate::stated::tag;
use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};
use serde_json::Value;

/// Maximum depth of Markdown in blocks of Markdown.
const MAX_DEPTH: u32 = 3;

/// A block of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Language of the opening fence: its first word in lower case, without a version or punctuation; empty
    /// if there is none.
    pub language: String,
    /// The code, without the indentation that all of it shares.
    pub text: String,
    /// Whether it stands between fences. Others are indented.
    pub fenced: bool,
}

/// The blocks of an answer in order, except for empty ones.
pub fn blocks(answer: &str) -> Vec<Block> {
    let mut found = Vec::new();
    collect(answer, MAX_DEPTH, &mut found);
    let is_fence = |line: &str| {
        let text = line.trim_start();
        (text.starts_with("```") || text.starts_with("~~~")) && line.len() - text.len() >= 4
    };
    if !found.iter().any(|b| b.fenced) && answer.lines().any(is_fence) {
        found.clear();
        let flat: Vec<&str> = answer
            .lines()
            .map(|l| if is_fence(l) { l.trim_start() } else { l })
            .collect();
        collect(&flat.join("\n"), MAX_DEPTH, &mut found);
    }
    found
}

fn collect(text: &str, depth: u32, out: &mut Vec<Block>) {
    // A tag at the start of a line would begin a block of HTML, which hides fences.
    let masked = masked(text);
    let mut open: Option<(CodeBlockKind<'_>, String)> = None;
    for (event, range) in Parser::new(&masked).into_offset_iter() {
        match (event, &mut open) {
            (Event::Start(Tag::CodeBlock(kind)), _) => open = Some((kind, String::new())),
            (Event::Text(piece), Some((_, code))) => {
                match text.get(range).filter(|own| own.len() == piece.len()) {
                    Some(own) => code.push_str(own),
                    None => code.push_str(&piece),
                }
            }
            (Event::End(TagEnd::CodeBlock), open) => {
                if let Some((kind, code)) = open.take() {
                    add(&kind, &code, depth, out);
                }
            }
            _ => {}
        }
    }
}

/// Adds a block, or those that are in it.
fn add(kind: &CodeBlockKind<'_>, code: &str, depth: u32, out: &mut Vec<Block>) {
    let (language, fenced) = match kind {
        CodeBlockKind::Fenced(info) => (language(info), true),
        CodeBlockKind::Indented => (String::new(), false),
    };
    let markdown =
        ["", "markdown", "md", "mdx", "text", "txt", "plaintext"].contains(&language.as_str());
    let opens = |line: &str| {
        let line = line.trim_start();
        let info = line.trim_start_matches(['`', '~']);
        line.len() - info.len() >= 3 && !info.trim().is_empty() && !info.contains('`')
    };
    if markdown && depth > 0 && code.lines().any(opens) {
        return collect(code, depth - 1, out);
    }
    // An unclosed first block contains a second fence of its language.
    let again = |line: &&str| {
        opens(line) && self::language(line.trim_start().trim_start_matches(['`', '~'])) == language
    };
    if fenced
        && depth > 0
        && let Some(line) = code.lines().find(again)
    {
        let at = line.as_ptr() as usize - code.as_ptr() as usize;
        add(kind, &code[..at], 0, out);
        return collect(&code[at..], depth - 1, out);
    }
    if !code.trim().is_empty() {
        out.push(Block {
            language,
            text: dedented(code),
            fenced,
        });
    }
}

/// A text of the same length in which no line begins with a tag.
fn masked(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let rest = line.trim_start_matches(|c: char| {
            c.is_whitespace() || "->*+.)".contains(c) || c.is_ascii_digit()
        });
        let at = line.len() - rest.len();
        match rest.strip_prefix('<') {
            Some(after) => {
                out.push_str(&line[..at]);
                out.push('x');
                out.push_str(after);
            }
            None => out.push_str(line),
        }
    }
    out
}

/// The language of an info string: `python3.12`, `{.python}`, `py title="a.py"` and `main.py` are all Python.
fn language(info: &str) -> String {
    let info = info.trim().trim_start_matches(['{', '.', ' ']);
    let end = info.find(|c: char| c.is_whitespace() || ",{}:;".contains(c));
    let word = info[..end.unwrap_or(info.len())].to_lowercase();
    if word.contains('=') {
        return String::new();
    }
    let word = match word.rsplit_once('.') {
        Some((name, "py")) if !name.is_empty() => "python",
        _ => word.as_str(),
    };
    let bare = word.trim_end_matches(|c: char| c.is_ascii_digit() || "._-".contains(c));
    let bare = if bare.is_empty() { word } else { bare };
    match bare {
        "py" | "python" | "ipython" | "cpython" | "sage" | "python-exec" | "pyi" => {
            "python".to_owned()
        }
        bare => bare.to_owned(),
    }
}

/// Code without the indentation that all of its lines share.
fn dedented(code: &str) -> String {
    let blank = |l: &&str| !l.trim().is_empty();
    let mut indents = code
        .lines()
        .filter(blank)
        .map(|l| &l[..l.len() - l.trim_start().len()]);
    let first = indents.next().unwrap_or_default();
    let shared = indents.fold(first, |shared, indent| {
        let same = shared
            .bytes()
            .zip(indent.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        shared.get(..same).unwrap_or_default()
    });
    if shared.is_empty() {
        return code.to_owned();
    }
    let mut out = String::with_capacity(code.len());
    for line in code.split_inclusive('\n') {
        out.push_str(
            line.strip_prefix(shared)
                .unwrap_or_else(|| line.trim_start_matches([' ', '\t'])),
        );
    }
    out
}

/// Returns the JSON of an answer: the whole text, the content of its tag `<answer>`, or the last fenced block
/// that is JSON.
pub fn json(answer: &str) -> Option<Value> {
    let whole = |text: &str| serde_json::from_str(text.trim().trim_start_matches('\u{feff}')).ok();
    let inside = tag(answer);
    whole(answer)
        .or_else(|| inside.and_then(whole))
        .or_else(|| {
            blocks(answer)
                .iter()
                .rev()
                .filter(|b| b.fenced)
                .find_map(|b| whole(&b.text))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(answer: &str) -> Vec<(String, String)> {
        blocks(answer)
            .into_iter()
            .map(|b| (b.language, b.text))
            .collect()
    }

    #[test]
    fn languages_are_read_from_info_strings() {
        for (info, expected) in [
            ("python", "python"),
            ("Python3.12", "python"),
            ("py title=\"a.py\"", "python"),
            ("title=\"a.py\"", ""),
            ("{.python .numberLines}", "python"),
            ("solution.py", "python"),
            ("python:main.py", "python"),
            ("bash", "bash"),
            ("", ""),
        ] {
            assert_eq!(language(info), expected, "{info}");
        }
    }

    #[test]
    fn fences_follow_commonmark() {
        let a = |language: &str, text: &str| (language.to_owned(), text.to_owned());
        for (answer, expected) in [
            (
                "```py\na\n```\nx\n~~~\nb\n~~~\n",
                vec![a("python", "a\n"), a("", "b\n")],
            ),
            ("````\n```\na\n```\n````", vec![a("", "```\na\n```\n")]),
            (
                "- x\n  ```py\n  a\n    b\n  ```\n",
                vec![a("python", "a\n  b\n")],
            ),
            ("> ```py\n> a\n> ```\n", vec![a("python", "a\n")]),
            ("```py\na\n", vec![a("python", "a\n")]),
            (
                "<answer>\n```py\n<a>\n```\n</answer>",
                vec![a("python", "<a>\n")],
            ),
            ("```\nSo:\n```py\na\n```\n", vec![a("python", "a\n")]),
            (
                "```py\na\n\n```py\nb\n```",
                vec![a("python", "a\n\n"), a("python", "b\n")],
            ),
            ("x:\n    ```py\n    a\n    ```", vec![a("python", "a\n")]),
            ("a `` ```b``` `` c", vec![]),
            ("```py\na\n```\n```\n", vec![a("python", "a\n")]),
        ] {
            assert_eq!(found(answer), expected, "{answer}");
        }
    }
}
