//! Reading answers out of a model's text.

use regex::Regex;
use serde_json::Value;
use std::sync::LazyLock;

/// A number with an optional sign, thousands separators, fraction and exponent.
static NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?").ok()
});

/// Content of a box of TeX without braces inside, or a letter in brackets, or a letter alone.
static OPTION: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"\\boxed\{\s*([A-Z])\s*\}|\(([A-Z])\)|\b([A-Z])\b").ok());

/// The last number of a text. Separators of thousands are dropped, a percent sign is ignored.
pub(crate) fn last_number(text: &str) -> Option<f64> {
    let numbers = NUMBER.as_ref()?.find_iter(text);
    let parsed = numbers.filter_map(|m| m.as_str().replace(',', "").parse::<f64>().ok());
    parsed.filter(|v| v.is_finite()).last()
}

/// The last option letter of a text, `A` to `Z`, in a box, in brackets, or alone. The article "A" and the
/// pronoun "I" are no options: both are followed by a word or an apostrophe.
pub(crate) fn last_option(text: &str) -> Option<char> {
    let found = OPTION.as_ref()?.captures_iter(text);
    let letters = found.filter_map(|c| {
        let marked = c.get(1).or_else(|| c.get(2));
        let word =
            |m: &regex::Match<'_>| ["A", "I"].contains(&m.as_str()) && is_word(text, m.end());
        let alone = c.get(3).filter(|m| !word(m));
        marked.or(alone)?.as_str().chars().next()
    });
    letters.last()
}

/// Whether an apostrophe, or a space and a word other than a verb of being, follows.
fn is_word(text: &str, end: usize) -> bool {
    let rest = &text[end..];
    let next = rest.trim_start_matches(' ');
    let verb = ["is ", "was ", "and ", "or ", "because "];
    rest.starts_with(['\'', '\u{2019}'])
        || (rest.starts_with(' ')
            && next.starts_with(char::is_lowercase)
            && !verb.iter().any(|v| next.starts_with(v)))
}

/// A value as text to compare: text itself, numbers and truth values as JSON writes them.
pub(crate) fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.trim().to_owned()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

/// JSON in a text: the whole text, or the last fenced block.
pub(crate) fn json(text: &str) -> Option<Value> {
    if let Ok(value) = serde_json::from_str(text.trim()) {
        return Some(value);
    }
    let (before, _) = text.rsplit_once("```")?;
    let (_, block) = before.rsplit_once("```")?;
    let body = block.strip_prefix("json").unwrap_or(block);
    serde_json::from_str(body.trim()).ok()
}

/// The last fenced block of a text without its language, or all of it.
pub(crate) fn code(text: &str) -> &str {
    let fenced = || {
        let (before, _) = text.rsplit_once("```")?;
        let (_, block) = before.rsplit_once("```")?;
        let (language, body) = block.split_once('\n')?;
        language
            .trim()
            .chars()
            .all(char::is_alphanumeric)
            .then_some(body)
    };
    fenced().unwrap_or(text)
}

/// Whether a text is these tags in this order, each once, with nothing but spaces between them.
pub(crate) fn is_tags(text: &str, tags: &[String]) -> bool {
    let marks = |tag: &String| (format!("<{tag}>"), format!("</{tag}>"));
    let all: Vec<(String, String)> = tags.iter().map(marks).collect();
    let mut rest = text.trim();
    for (open, close) in &all {
        let inner = rest.strip_prefix(open.as_str());
        let Some((inner, after)) = inner.and_then(|r| r.split_once(close.as_str())) else {
            return false;
        };
        let nested =
            |(o, c): &(String, String)| inner.contains(o.as_str()) || inner.contains(c.as_str());
        if all.iter().any(nested) {
            return false;
        }
        rest = after.trim_start();
    }
    rest.is_empty()
}

/// Share of n-grams of words that stood in the text before, 0 to 1. 0 for fewer than `n` words.
pub(crate) fn repeated(text: &str, n: usize) -> f64 {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut seen = std::collections::HashSet::new();
    let grams = words.windows(n.max(1));
    let all = grams.len();
    let again = grams.filter(|gram| !seen.insert(*gram)).count();
    if all == 0 {
        0.0
    } else {
        again as f64 / all as f64
    }
}

/// Ids in square brackets, such as `[3]` and `[1, 2]`, in order.
pub(crate) fn citations(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in text.split('[').skip(1) {
        let Some((inside, _)) = part.split_once(']') else {
            continue;
        };
        let ids: Vec<&str> = inside.split(',').map(str::trim).collect();
        let is_id = |id: &&str| !id.is_empty() && !id.contains(char::is_whitespace);
        if ids.iter().all(is_id) {
            found.extend(ids.into_iter().map(str::to_owned));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_counts() {
        let cases = [
            ("The answer is 42.", Some(42.0)),
            ("1 + 2 = 3", Some(3.0)),
            ("It costs $1,234.50", Some(1234.5)),
            ("-7", Some(-7.0)),
            ("about 1.5e3", Some(1500.0)),
            ("between 3-5", Some(-5.0)),
            ("none", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(last_number(text), expected, "{text}");
        }
    }

    #[test]
    fn the_last_option_counts() {
        let cases = [
            ("Answer: B", Some('B')),
            ("(C) is right", Some('C')),
            (r"\boxed{D}", Some('D')),
            ("I think A. Or B", Some('B')),
            ("A cat sat", None),
            ("The answer is B because it fits", Some('B')),
            ("A is correct", Some('A')),
            ("(B) is what I'd say", Some('B')),
            ("I think so", None),
            ("none", None),
        ];
        for (text, expected) in cases {
            assert_eq!(last_option(text), expected, "{text}");
        }
    }

    #[test]
    fn json_is_found_whole_or_fenced() {
        let expected = serde_json::json!({"a": 1});
        assert_eq!(json(" {\"a\": 1} "), Some(expected.clone()));
        assert_eq!(
            json("Here:\n```json\n{\"a\": 1}\n```\nDone."),
            Some(expected)
        );
        assert_eq!(json("no json"), None);
    }

    #[test]
    fn code_is_the_last_block_or_all() {
        assert_eq!(
            code("So:\n```python\na = 1\n```\nor\n```\nb = 2\n```\n."),
            "b = 2\n"
        );
        assert_eq!(code("a = 1"), "a = 1");
        assert_eq!(code("``` x"), "``` x");
    }

    #[test]
    fn tags_stand_alone_and_in_order() {
        let tags = ["think", "answer"].map(str::to_owned);
        let is = |text: &str| is_tags(text, &tags);
        assert!(is(" <think>a\n<b></think>\n<answer>4</answer>\n"));
        for wrong in [
            "<answer>4</answer><think>a</think>",
            "<think>a</think>",
            "<think>a</think><answer>4</answer> so",
            "<think>a<answer>4</answer></think><answer>4</answer>",
            "<think>a</think><answer>4</answer><answer>5</answer>",
            "<think>a</think><answer>4",
            "",
        ] {
            assert!(!is(wrong), "{wrong}");
        }
    }

    #[test]
    fn repetition_is_a_share() {
        assert_eq!(repeated("a b c d", 2), 0.0);
        assert_eq!(repeated("a b a b a b", 2), 3.0 / 5.0);
        assert_eq!(repeated("a", 4), 0.0);
    }

    #[test]
    fn citations_are_read() {
        assert_eq!(citations("x [1] y [2, 3] z [see this] [4"), ["1", "2", "3"]);
    }
}
