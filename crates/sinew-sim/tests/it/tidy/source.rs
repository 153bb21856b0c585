//! Rust text, split into code, comments and literals without a parser.

use std::path::Path;

/// Kind of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Blank,
    Code,
    Comment,
    /// `///` or `//!`.
    Doc,
}

/// A line of a file.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) kind: Kind,
    /// Whether it belongs to an item that only tests have.
    pub(super) test: bool,
    /// Its code, with comments left out and literals empty.
    pub(super) code: String,
    /// All of it.
    pub(super) text: String,
    /// Whether a literal is on it, or runs through it.
    pub(super) literal: bool,
}

#[derive(Clone, Copy)]
enum State {
    Code,
    Block(usize),
    Text,
    Raw(usize),
}

/// Reads a file into lines.
pub(super) fn lines(path: &Path) -> Vec<Line> {
    split(&std::fs::read_to_string(path).unwrap())
}

pub(super) fn split(text: &str) -> Vec<Line> {
    let mut state = State::Code;
    let mut lines: Vec<Line> = text.lines().map(|l| line(l, &mut state)).collect();
    mark_tests(&mut lines);
    lines
}

fn line(text: &str, state: &mut State) -> Line {
    let started = !matches!(state, State::Code | State::Block(_));
    let (code, comment, ended) = scan(text, state);
    let trimmed = text.trim_start();
    let kind = match () {
        () if !code.trim().is_empty() || started => Kind::Code,
        () if trimmed.starts_with("///") || trimmed.starts_with("//!") => Kind::Doc,
        () if comment => Kind::Comment,
        () => Kind::Blank,
    };
    Line {
        kind,
        test: false,
        literal: started || ended,
        code,
        text: text.to_owned(),
    }
}

/// The code of a line, whether it has a comment, and whether it has a literal.
fn scan(text: &str, state: &mut State) -> (String, bool, bool) {
    let chars: Vec<char> = text.chars().collect();
    let (mut code, mut comment, mut literal, mut i) = (String::new(), false, false, 0);
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    while i < chars.len() {
        match *state {
            State::Block(depth) => {
                comment = true;
                match (at(i), at(i + 1)) {
                    ('*', '/') if depth == 1 => *state = State::Code,
                    ('*', '/') => *state = State::Block(depth - 1),
                    ('/', '*') => *state = State::Block(depth + 1),
                    _ => i = i.wrapping_sub(1),
                }
                i = i.wrapping_add(2);
            }
            State::Text => {
                match at(i) {
                    '\\' => i += 1,
                    '"' => *state = State::Code,
                    _ => {}
                }
                i += 1;
            }
            State::Raw(hashes) => {
                let closes = at(i) == '"' && (1..=hashes).all(|n| at(i + n) == '#');
                if closes {
                    *state = State::Code;
                    i += hashes;
                }
                i += 1;
            }
            State::Code => match (at(i), at(i + 1)) {
                ('/', '/') => return (code, true, literal),
                ('/', '*') => {
                    *state = State::Block(1);
                    i += 2;
                }
                ('"', _) => {
                    (*state, literal) = (State::Text, true);
                    code.push_str("\"\"");
                    i += 1;
                }
                ('r', '"' | '#') if !code.ends_with(|c: char| c.is_alphanumeric() && c != 'b') => {
                    let hashes = (i + 1..chars.len()).take_while(|&n| at(n) == '#').count();
                    if at(i + 1 + hashes) == '"' {
                        (*state, literal) = (State::Raw(hashes), true);
                        i += hashes + 1;
                    }
                    code.push('r');
                    i += 1;
                }
                // A character, and not a lifetime.
                ('\'', '\\') => {
                    let end = (i + 3..chars.len()).find(|&n| at(n) == '\'');
                    i = end.map_or(chars.len(), |n| n + 1);
                }
                ('\'', _) if at(i + 2) == '\'' => i += 3,
                (c, _) => {
                    code.push(c);
                    i += 1;
                }
            },
        }
    }
    (code, comment, literal)
}

/// Marks what follows `#[cfg(test)]`: a block to its brace, or one statement.
fn mark_tests(lines: &mut [Line]) {
    let mut i = 0;
    while i < lines.len() {
        let code = lines[i].code.trim();
        if !(code.starts_with("#[cfg(test)]") || code.starts_with("#[cfg(all(test")) {
            i += 1;
            continue;
        }
        let (mut depth, mut opened) = (0_i64, false);
        while i < lines.len() {
            lines[i].test = true;
            let code = lines[i].code.clone();
            let attribute = code.trim_start().starts_with("#[");
            depth += code.matches(['{', '(', '[']).count() as i64;
            depth -= code.matches(['}', ')', ']']).count() as i64;
            opened |= code.contains('{');
            i += 1;
            let ends = code.trim_end().ends_with([';', ',']) || (opened && !attribute);
            if depth == 0 && ends {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_comments_and_tests_are_told_apart() {
        let text = "//! Doc\nlet a = \"// no { comment\"; // one\nlet r = r#\"un\nsafe \"#;\n'{'; 'x: loop {}\n\
                    #[cfg(test)]\nmod tests {\n    fn f() {}\n}\nfn after() {}\n/* a\n b */\n";
        let lines = split(text);
        let kinds: Vec<_> = lines.iter().map(|l| l.kind).collect();
        use Kind::{Code, Comment, Doc};
        assert_eq!(kinds[..5], [Doc, Code, Code, Code, Code]);
        assert_eq!(kinds[9..], [Code, Comment, Comment]);
        assert_eq!(lines[1].code, "let a = \"\"; ");
        assert_eq!(lines[4].code, "; 'x: loop {}");
        let tests: Vec<_> = (0..lines.len()).filter(|&i| lines[i].test).collect();
        assert_eq!(tests, [5, 6, 7, 8]);
    }
}
