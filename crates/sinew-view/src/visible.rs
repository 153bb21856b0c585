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
        let mark = matches!(c, '\u{200e}' | '\u{200f}');
        let direction = mark || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if (c.is_control() && !matches!(c, '\n' | '\t')) || direction {
            let _ = write!(out, "{}", c.escape_unicode());
        } else {
            out.push(c);
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
    }
}
