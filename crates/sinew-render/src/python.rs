//! Literals of Python as JSON: models that were trained on Python write `True`, `None` and `'text'`.
//!
//! The texts are those that `ast.literal_eval` reads, except bytes, complex numbers, and texts with a prefix
//! or in several pieces. Constants of JSON are read, too, so that a text may mix both notations. The depth is
//! bounded, as the text comes from a model.

use serde_json::{Map, Value};

/// Literals inside of literals that are read.
const MAX_DEPTH: usize = 64;

/// The value of a Python literal, if the whole text is one: numbers, texts, `True`, `False`, `None`, lists,
/// dicts, and tuples and sets as lists. An integer beyond 64 bits is the text of its digits.
pub(crate) fn literal(text: &str) -> Option<Value> {
    let (value, rest) = first(text)?;
    rest.trim().is_empty().then_some(value)
}

/// The literal at the start of a text, and the rest.
pub(crate) fn first(text: &str) -> Option<(Value, &str)> {
    read(text, false)
}

/// Reads like [`first`]. Texts in single quotes may have line breaks, as some templates write them.
pub(crate) fn first_of_lines(text: &str) -> Option<(Value, &str)> {
    read(text, true)
}

fn read(text: &str, lines: bool) -> Option<(Value, &str)> {
    let mut reader = Reader {
        rest: text,
        depth: 0,
        lines,
    };
    let value = reader.value()?;
    Some((value, reader.rest))
}

/// The rest of a text.
struct Reader<'t> {
    /// Text from the next character on.
    rest: &'t str,
    /// Literals around the one at hand.
    depth: usize,
    /// Whether texts in single quotes may have line breaks.
    lines: bool,
}

impl Reader<'_> {
    /// Takes a character behind white space.
    fn took(&mut self, wanted: char) -> bool {
        let rest = self.rest.trim_start();
        let after = rest.strip_prefix(wanted);
        self.rest = after.unwrap_or(rest);
        after.is_some()
    }

    /// A literal, behind white space.
    fn value(&mut self) -> Option<Value> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let value = if self.took('[') {
            self.items(']').map(|(items, _)| items.into())
        } else if self.took('(') {
            let (mut items, commas) = self.items(')')?;
            // Brackets around one value are none of a tuple.
            match (items.pop(), commas) {
                (Some(one), 0) => Some(one),
                (last, _) => Some(items.into_iter().chain(last).collect()),
            }
        } else if self.took('{') {
            self.braces()
        } else {
            self.text().map(Value::String).or_else(|| self.word())
        };
        self.depth -= 1;
        value
    }

    /// Values up to a closing bracket, and the number of their commas.
    fn items(&mut self, close: char) -> Option<(Vec<Value>, usize)> {
        let (mut items, mut commas) = (Vec::new(), 0);
        while !self.took(close) {
            items.push(self.value()?);
            if self.took(',') {
                commas += 1
            } else {
                return self.took(close).then_some((items, commas));
            }
        }
        Some((items, commas))
    }

    /// A dict, or a set, after its opening brace.
    fn braces(&mut self) -> Option<Value> {
        let mut map = Map::new();
        while !self.took('}') {
            let first = self.value()?;
            if map.is_empty() && !self.rest.trim_start().starts_with(':') {
                let more = self.took(',');
                let (mut items, _) = if more {
                    self.items('}')?
                } else {
                    self.took('}').then(|| (Vec::new(), 0))?
                };
                items.insert(0, first);
                return Some(items.into());
            }
            let key = match first {
                Value::String(key) => key,
                Value::Null | Value::Bool(_) | Value::Number(_) => first.to_string(),
                Value::Array(_) | Value::Object(_) => return None,
            };
            let value = self.took(':').then(|| self.value())??;
            map.insert(key, value);
            if !self.took(',') {
                return self.took('}').then_some(map.into());
            }
        }
        Some(map.into())
    }

    /// A text in single, double or triple quotes.
    fn text(&mut self) -> Option<String> {
        let quotes = ["'''", "\"\"\"", "'", "\""];
        let quote = quotes.into_iter().find(|q| self.rest.starts_with(*q))?;
        let mut out = String::new();
        let mut rest = &self.rest[quote.len()..];
        loop {
            if let Some(after) = rest.strip_prefix(quote) {
                self.rest = after;
                return Some(out);
            }
            let mut chars = rest.chars();
            match chars.next()? {
                '\\' => {
                    let code = chars.next()?;
                    rest = chars.as_str();
                    escaped(code, &mut rest, &mut out)?;
                }
                '\n' if quote.len() == 1 && !self.lines => return None,
                plain => {
                    out.push(plain);
                    rest = chars.as_str();
                }
            }
        }
    }

    /// A number or a constant.
    fn word(&mut self) -> Option<Value> {
        let rest = self.rest.trim_start();
        let end = rest.find(|c: char| c.is_whitespace() || ",:]})".contains(c));
        let (word, rest) = rest.split_at(end.unwrap_or(rest.len()));
        self.rest = rest;
        match word {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            number => {
                let plain = number.strip_prefix('+').unwrap_or(number).replace('_', "");
                let starts = plain.starts_with(|c: char| c.is_ascii_digit() || c == '-');
                starts.then(|| sinew_types::json::from_str(&plain).ok())?
            }
        }
    }
}

/// Appends the character that a backslash and `code` stand for; a number follows in `rest`.
fn escaped(code: char, rest: &mut &str, out: &mut String) -> Option<()> {
    let digits = match code {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => {
            match code {
                'n' => out.push('\n'),
                't' => out.push('\t'),
                'r' => out.push('\r'),
                '\\' | '\'' | '"' => out.push(code),
                '\n' => {}
                // Python keeps the backslash before a character without meaning.
                other => out.extend(['\\', other]),
            }
            return Some(());
        }
    };
    let (hex, after) = rest.split_at_checked(digits)?;
    out.push(char::from_u32(u32::from_str_radix(hex, 16).ok()?)?);
    *rest = after;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_are_read_whole() {
        for (text, expected) in [
            (
                "{'a': [1, -2.5, True], \"b\": None}",
                json!({"a": [1, -2.5, true], "b": null}),
            ),
            ("{1: 'x', False: 2,}", json!({"1": "x", "false": 2})),
            ("(1, 'a')", json!([1, "a"])),
            ("((1))", json!(1)),
            ("(1,)", json!([1])),
            ("()", json!([])),
            ("{}", json!({})),
            ("{1, 2}", json!([1, 2])),
            ("{'a'}", json!(["a"])),
            (r"'it\'s\n\x41\u00e9\d'", json!("it's\nAé\\d")),
            ("'''two\nlines'''", json!("two\nlines")),
            ("1_000", json!(1000)),
            ("18446744073709551617", json!("18446744073709551617")),
        ] {
            assert_eq!(literal(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_are_none() {
        let deep = "[".repeat(5000);
        for text in [
            "",
            "'",
            "'a' b",
            "[1",
            "{'a': }",
            "{[1]: 2}",
            "{'a': 1, 2}",
            "hello",
            "f(1)",
            "nan",
            "'\\x4'",
            "'a\nb'",
            "[1 2]",
            "(",
            &deep,
        ] {
            assert_eq!(literal(text), None, "{text}");
        }
    }
}
