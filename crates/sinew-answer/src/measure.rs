//! Measures of a text: tags, repetition, citations.

use crate::notation::is_unspaced;
use std::collections::HashSet;

/// Characters of a word without blanks from which on its characters count in the place of words.
const LONG_WORD: usize = 64;

/// Whether a text is these tags in this order, each once, with nothing but spaces between them.
pub fn is_tags(text: &str, tags: &[String]) -> bool {
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

/// Words of a text. Characters of scripts without blanks between words, and of very long words, are words.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for chunk in text.split_whitespace() {
        let long = chunk.chars().nth(LONG_WORD).is_some();
        let mut begin = 0;
        for (at, c) in chunk.char_indices() {
            if long || is_unspaced(c) {
                words.extend((begin < at).then(|| &chunk[begin..at]));
                begin = at + c.len_utf8();
                words.push(&chunk[at..begin]);
            }
        }
        words.extend((begin < chunk.len()).then(|| &chunk[begin..]));
    }
    words
}

/// Share of n-grams of words that stood in the text before, 0 to 1. 0 for fewer than `n` words.
pub fn repeated(text: &str, n: usize) -> f64 {
    let words = words(text);
    let mut seen = HashSet::new();
    let grams = words.windows(n.max(1));
    let all = grams.len();
    let again = grams.filter(|gram| !seen.insert(*gram)).count();
    match all {
        0 => 0.0,
        all => again as f64 / all as f64,
    }
}

/// Ids in square brackets, such as `[3]`, `[1, 2]` and `【3】`, in order.
pub fn citations(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in text.split(['[', '【', '［']).skip(1) {
        let Some((inside, _)) = part.split_once([']', '】', '］']) else {
            continue;
        };
        let ids: Vec<&str> = inside
            .split([',', '，', '、', ';'])
            .map(str::trim)
            .collect();
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
    fn repetition_is_a_share_in_every_script() {
        assert_eq!(repeated("a b c d", 2), 0.0);
        assert_eq!(repeated("a b a b a b", 2), 3.0 / 5.0);
        assert_eq!(repeated("a", 4), 0.0);
        for text in [
            "我很高兴我很高兴我很高兴我很高兴",
            "ดีมากดีมากดีมากดีมาก",
            "좋아요좋아요좋아요좋아요",
        ] {
            assert!(repeated(text, 4) > 0.5, "{text}");
        }
        assert!(repeated(&"ha".repeat(100), 4) > 0.9);
        assert_eq!(repeated("春眠不覺曉處處聞啼鳥夜來風雨聲", 4), 0.0);
    }

    #[test]
    fn citations_are_read() {
        assert_eq!(citations("x [1] y [2, 3] z [see this] [4"), ["1", "2", "3"]);
        assert_eq!(citations("根据【1】和［2、3］"), ["1", "2", "3"]);
    }
}
