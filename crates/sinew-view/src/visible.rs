//! Text that a program or a model wrote, made fit for a terminal.
//!
//! C0 and C1 control characters, DEL and the marks of direction are written as `\u{...}`; all other
//! characters stay, whatever their script. The result is safe on a terminal and not meant to be parsed.

use std::fmt::Write;

/// The text with control characters written out: a terminal would obey them (move the cursor over
/// what was printed before, set its title, answer as if somebody typed), and with marks of
/// direction that show text in another order than it has. Lines and tabs stay.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if commands(c) && !matches!(c, '\n' | '\t') {
            let _ = write!(out, "{}", c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// Whether a character controls a terminal, or changes the order in which others are shown.
fn commands(c: char) -> bool {
    let mark = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}');
    c.is_control() || mark || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A value as one line of JSON that is fit for a terminal, too: JSON itself escapes only some of the
/// characters that a terminal obeys.
pub fn json_line(value: &serde_json::Value) -> String {
    let text = value.to_string();
    if !text.contains(commands) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if commands(c) {
            _ = write!(out, "\\u{:04x}", u32::from(c))
        } else {
            out.push(c)
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing() {
        let text = "a\x1b[2J\x07\u{9b}31m\r\x08\x7f\u{202e}b\n\tcafé 日本 🦀";
        let shown = visible(text);
        assert_eq!(
            shown,
            "a\\u{1b}[2J\\u{7}\\u{9b}31m\\u{d}\\u{8}\\u{7f}\\u{202e}b\n\tcafé 日本 🦀"
        );
        assert!(!shown.chars().any(|c| c.is_control() && !"\n\t".contains(c)));
        let value = serde_json::json!({"k": format!("{text}\u{61c}")});
        let line = json_line(&value);
        assert!(!line.contains(commands), "{line:?}");
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&line).unwrap(),
            value
        );
    }
}
