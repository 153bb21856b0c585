//! One notation for numbers and letters: digits of all scripts, signs, blanks and TeX become plain ones.

use crate::pattern;

/// A blank that may stand between groups of digits.
pub(crate) const GROUP: char = '\u{a0}';
/// Stands for an expression that is not a number, such as a root.
pub(crate) const EXPRESSION: char = '\u{fffc}';

/// Zeros of the scripts that write numbers with ten digits in a row.
const ZEROS: [u32; 48] = [
    0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66,
    0xDE6, 0xE50, 0xED0, 0xF20, 0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90,
    0x1B50, 0x1BB0, 0x1C40, 0x1C50, 0xA620, 0xA8D0, 0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0xFF10,
    0x104A0, 0x11066, 0x11136, 0x111D0, 0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6, 0x1E950,
    0x1FBF0,
];

/// A digit of any script as 0 to 9.
fn digit(c: char) -> Option<char> {
    let c = c as u32;
    let zero = ZEROS
        .iter()
        .find(|zero| (**zero..**zero + 10).contains(&c))?;
    char::from_digit(c - zero, 10)
}

/// Fractions that are one character, as numerator and denominator.
const FRACTIONS: [(char, &str); 19] = [
    ('¼', "1/4"),
    ('½', "1/2"),
    ('¾', "3/4"),
    ('⅐', "1/7"),
    ('⅑', "1/9"),
    ('⅒', "1/10"),
    ('⅓', "1/3"),
    ('⅔', "2/3"),
    ('⅕', "1/5"),
    ('⅖', "2/5"),
    ('⅗', "3/5"),
    ('⅘', "4/5"),
    ('⅙', "1/6"),
    ('⅚', "5/6"),
    ('⅛', "1/8"),
    ('⅜', "3/8"),
    ('⅝', "5/8"),
    ('⅞', "7/8"),
    ('↉', "0/3"),
];
const SUPERSCRIPTS: [char; 11] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹', '⁻'];

/// A letter of the forms for full width as a plain one.
fn narrow(c: char) -> char {
    match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        _ => c,
    }
}

/// A text whose digits, signs, letters and blanks are plain, and whose fractions are `n/d`.
pub(crate) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut raised = false;
    for c in text.chars() {
        let power = SUPERSCRIPTS.iter().position(|s| *s == c);
        if raised && power.is_none() {
            out.push('}');
            raised = false;
        }
        if let Some(power) = power {
            // Also the end of a unit, such as m², which is not a power of a number.
            out.push_str(if raised { "" } else { "^{" });
            raised = true;
            out.push(char::from_digit(power as u32, 10).unwrap_or('-'));
            continue;
        }
        if let Some((_, fraction)) = FRACTIONS.iter().find(|(f, _)| *f == c) {
            out.push_str(if out.ends_with(|c: char| c.is_ascii_digit()) {
                " "
            } else {
                ""
            });
            out.push_str(fraction);
            continue;
        }
        match c {
            '\u{2212}' | '\u{fe63}' | '\u{ff0d}' | '\u{2010}' | '\u{2011}' | '\u{207b}' => {
                out.push('-')
            }
            '\u{66b}' => out.push('.'),
            '\u{66c}' => out.push(GROUP),
            '\u{66a}' | '\u{fe6a}' => out.push('%'),
            '\u{2044}' | '\u{2215}' => out.push('/'),
            '\u{2009}' | '\u{202f}' | '\u{2007}' | '\u{2008}' | '\u{205f}' | '\u{a0}' => {
                out.push(GROUP)
            }
            '\u{3000}' => out.push(' '),
            '\u{2019}' | '\u{2018}' | '\u{ff07}' => out.push('\''),
            // Marks of direction and joiners have no width.
            '\u{200b}'..='\u{200f}'
            | '\u{2060}'..='\u{2069}'
            | '\u{feff}'
            | '\u{61c}'
            | '\u{ad}' => {}
            c => out.push(digit(c).unwrap_or_else(|| narrow(c))),
        }
    }
    out.push_str(if raised { "}" } else { "" });
    if out.contains('\\') || out.contains('{') || out.contains('~') {
        tex(&out)
    } else {
        out
    }
}

pattern!(COMMA, r"\{\s*([,.])\s*\}");
pattern!(
    SPACE,
    r"(\d)\s*(?:\\[,;:\x20]|~|\\thinspace\b|\\enspace\b)\s*(\d{3})"
);
pattern!(
    NOTHING,
    r"\\(?:left|right|displaystyle|textstyle|bigl?|bigr?|!|,|;|:|quad|qquad)(?:\b|)"
);
pattern!(
    SHAPE,
    r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|mathsf|operatorname|mbox|textrm|bf|rm)\s*\{([^{}]*)\}"
);
pattern!(TIMES, r"\\(?:times|cdot)\b");
pattern!(DEGREE, r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree\b");
pattern!(ESCAPED, r"\\([%$#&_])");

/// TeX as plain notation, as far as numbers need it.
fn tex(text: &str) -> String {
    let mut text = text.to_owned();
    let mut put = |pattern: &crate::Pattern, with: &str| {
        if let Some(pattern) = pattern.get() {
            text = pattern.replace_all(&text, with).into_owned();
        }
    };
    put(&COMMA, "$1");
    // Groups share their digits: the second pass joins those that the first one passed over.
    put(&SPACE, "${1}\u{a0}${2}");
    put(&SPACE, "${1}\u{a0}${2}");
    put(&SHAPE, "$1");
    put(&TIMES, "×");
    put(&DEGREE, "°");
    put(&ESCAPED, "$1");
    put(&NOTHING, "");
    fractions(&text)
}

/// `\frac{a}{b}` as `a/b`, and as [`EXPRESSION`] where these are not whole numbers; roots are expressions.
fn fractions(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let command = &rest[at + 1..];
        let end = command
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(command.len());
        let after = &command[end..];
        match &command[..end] {
            "frac" | "dfrac" | "tfrac" | "cfrac" => {
                let Some((above, below, left)) = pair(after) else {
                    out.push(EXPRESSION);
                    rest = after;
                    continue;
                };
                let whole = |t: &str| {
                    let digits = t
                        .trim()
                        .trim_start_matches(['-', '+'])
                        .replace([',', GROUP], "");
                    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
                };
                if whole(above) && whole(below) {
                    let mixed = out.trim_end().ends_with(|c: char| c.is_ascii_digit());
                    out.push_str(if mixed { " " } else { "" });
                    let plain = |t: &str| t.trim().replace([',', GROUP], "");
                    out.push_str(&format!("{}/{}", plain(above), plain(below)));
                } else {
                    out.push(EXPRESSION);
                }
                rest = left;
            }
            "sqrt" | "pi" | "log" | "ln" | "sin" | "cos" | "tan" | "infty" => {
                out.push(EXPRESSION);
                let after = match after.strip_prefix('[').and_then(|a| a.split_once(']')) {
                    Some((_, after)) => after,
                    None => after,
                };
                rest = argument(after).map_or(after, |(_, left)| left);
            }
            _ => {
                out.push('\\');
                rest = command;
            }
        }
    }
    out.push_str(rest);
    out
}

/// Two arguments, and what follows.
fn pair(text: &str) -> Option<(&str, &str, &str)> {
    let (first, rest) = argument(text)?;
    let (second, rest) = argument(rest)?;
    Some((first, second, rest))
}

/// An argument of TeX: a group in braces, or one character.
fn argument(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    if !text.starts_with('{') {
        let end = text
            .chars()
            .next()
            .filter(|c| c.is_ascii_alphanumeric())?
            .len_utf8();
        return Some(text.split_at(end));
    }
    let end = braces(text)?;
    Some((&text[1..end], &text[end + 1..]))
}

/// Place of the brace that closes the one at the start.
pub(crate) fn braces(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some(at),
            '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
    }
    None
}

pattern!(
    MIXED,
    r"(\d+)(?:[ \x{a0}]|\\[ ,;])?\s?\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)[ \x{a0}](\d+)/(\d+)"
);

/// A text whose digits and signs are plain and whose mixed numbers, such as `2 2/3`, are fractions, for
/// packages that read `2 2/3` as 2.
pub fn improper(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{2212}' | '\u{fe63}' | '\u{ff0d}' => out.push('-'),
            '\u{2009}' | '\u{202f}' | '\u{a0}' => out.push(GROUP),
            c => match (digit(c), FRACTIONS.iter().find(|(f, _)| *f == c)) {
                (Some(digit), _) => out.push(digit),
                (None, Some((_, fraction))) => {
                    out.push_str(if out.ends_with(|c: char| c.is_ascii_digit()) {
                        " "
                    } else {
                        ""
                    });
                    out.push_str(fraction);
                }
                (None, None) => out.push(c),
            },
        }
    }
    let Some(pattern) = MIXED.get() else {
        return out;
    };
    let replaced = pattern.replace_all(&out, |found: &regex::Captures<'_>| {
        let digits = |i: usize| found.get(i).and_then(|m| m.as_str().parse::<u64>().ok());
        let (tex, parts) = match found.get(1) {
            Some(_) => (true, [1, 2, 3]),
            None => (false, [4, 5, 6]),
        };
        let before = found.get(0).map_or("", |m| &out[..m.start()]);
        let after = found.get(0).map_or("", |m| &out[m.end()..]);
        let apart = !before.ends_with(|c: char| c.is_alphanumeric() || ".,^_/{".contains(c))
            || before.ends_with("boxed{");
        let ends = !after.starts_with(|c: char| c.is_ascii_digit() || "/.^".contains(c))
            || after.starts_with(". ")
            || after == ".";
        let above = match parts.map(digits) {
            [Some(whole), Some(above), Some(below)] if above < below => whole
                .checked_mul(below)
                .and_then(|w| w.checked_add(above))
                .map(|above| (above, below)),
            _ => None,
        };
        match above.filter(|_| apart && ends) {
            Some((above, below)) if tex => format!("\\frac{{{above}}}{{{below}}}"),
            Some((above, below)) => format!("{above}/{below}"),
            None => found[0].to_owned(),
        }
    });
    // Blanks between groups of digits are not part of a number for packages.
    if replaced.contains(GROUP) {
        GROUPS.get().map_or_else(
            || replaced.to_string(),
            |p| p.replace_all(&replaced, "$1$2").into_owned(),
        )
    } else {
        replaced.into_owned()
    }
}

pattern!(GROUPS, r"(\d)\x{a0}(\d{3}\b)");

/// Whether a character is a letter of a script that separates words by blanks, so that a sign next to it is a
/// part of its word.
pub(crate) fn joins(c: char) -> bool {
    c.is_alphabetic() && !is_unspaced(c)
}

/// Whether a character belongs to a script that writes words without blanks, or with endings at foreign
/// words.
pub(crate) fn is_unspaced(c: char) -> bool {
    matches!(c as u32,
        // Thai, Lao, Tibetan, Burmese, Khmer.
        0xE00..=0xFFF | 0x1000..=0x109F | 0x1780..=0x17FF | 0x19E0..=0x19FF
        // Hangul.
        | 0x1100..=0x11FF | 0x3130..=0x318F | 0xAC00..=0xD7AF
        // Kana, ideographs.
        | 0x2E80..=0x2FDF | 0x3005..=0x3007 | 0x3021..=0x312F | 0x31A0..=0x9FFF | 0xF900..=0xFAFF
        | 0xFF66..=0xFF9F | 0x1B000..=0x1B16F | 0x20000..=0x3FFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notations_become_plain() {
        for (text, expected) in [
            ("４２．５％", "42.5%"),
            ("٤٢٫٥", "42.5"),
            ("−7", "-7"),
            ("1{,}234", "1,234"),
            (r"1\,234\,567", "1\u{a0}234\u{a0}567"),
            (r"2\frac{2}{3}", "2 2/3"),
            (r"-\dfrac34", "-3/4"),
            (r"\frac{\sqrt{3}}{2}", "\u{fffc}"),
            ("2½", "2 1/2"),
            ("10⁻⁵", "10^{-5}"),
            (r"\text{42 apples}", "42 apples"),
            (r"90^\circ", "90°"),
        ] {
            assert_eq!(plain(text), expected, "{text}");
        }
    }

    #[test]
    fn mixed_numbers_become_fractions() {
        for (text, expected) in [
            ("2 2/3", "8/3"),
            ("It is −2 2/3.", "It is -8/3."),
            (r"$2\frac{2}{3}$", r"$\frac{8}{3}$"),
            (r"\boxed{2 \frac{2}{3}}", r"\boxed{\frac{8}{3}}"),
            ("2½", "5/2"),
            ("４２", "42"),
            ("1\u{2009}234", "1234"),
            ("x2 2/3", "x2 2/3"),
            ("2 3/2", "2 3/2"),
            ("1.2 2/3", "1.2 2/3"),
            (r"x^2 \frac{1}{2}", r"x^2 \frac{1}{2}"),
        ] {
            assert_eq!(improper(text), expected, "{text}");
        }
    }
}
