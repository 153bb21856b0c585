//! Written answers in the styles of real models, each with the expected readings.
//!
//! `answers.jsonl` has one answer a line: `style`, `said`, `opened` if the prompt ended with the opening mark
//! of thoughts, and the parts: `reasoning` and `answer`, `number` with `also` and `maybe`, `choice` with
//! `open`, `json`, or `code` for the names of `tests`.

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use sinew_answer::{Turn, choice, citations, code, expected_number, json, number, repeated};
use std::collections::BTreeSet;

/// An answer with what is read. A key that is not there is not looked at; `null` is nothing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    style: String,
    said: String,
    #[serde(default)]
    opened: bool,
    #[serde(default, deserialize_with = "given")]
    reasoning: Option<Option<String>>,
    answer: Option<String>,
    #[serde(default = "yes")]
    finished: bool,
    #[serde(default, deserialize_with = "given")]
    number: Option<Option<String>>,
    also: Option<Vec<String>>,
    maybe: Option<Vec<String>>,
    at_end: Option<bool>,
    #[serde(default, deserialize_with = "given")]
    choice: Option<Option<String>>,
    open: Option<Vec<String>>,
    #[serde(default, deserialize_with = "given")]
    json: Option<Option<Value>>,
    tests: Option<String>,
    code: Option<String>,
}

fn yes() -> bool {
    true
}

/// A key that is there, also with the value `null`.
fn given<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    d: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(d).map(Some)
}

/// The differences between the reading of an answer and the expected one.
fn wrong(w: &Written) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut same = |what: &str, found: &dyn std::fmt::Debug, wanted: &dyn std::fmt::Debug| {
        let (found, wanted) = (format!("{found:?}"), format!("{wanted:?}"));
        if found != wanted {
            wrong.push(format!("{what} {found}, not {wanted}"));
        }
    };
    let turn = Turn::split(&w.said, w.opened);
    if let Some(reasoning) = &w.reasoning {
        same("reasoning", &turn.reasoning, reasoning);
        same("finished", &turn.finished, &w.finished);
    }
    if let Some(answer) = &w.answer {
        same("answer", &turn.answer, answer);
    }
    if let Some(wanted) = &w.number {
        let found = number(&turn.answer);
        same(
            "number",
            &found.as_ref().map(|n| n.value.to_string()),
            wanted,
        );
        let texts = |list: &[_]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        if let Some(found) = &found {
            same(
                "also",
                &texts(&found.also),
                &w.also.clone().unwrap_or_default(),
            );
            same(
                "maybe",
                &texts(&found.maybe),
                &w.maybe.clone().unwrap_or_default(),
            );
            same("at end", &found.at_end, &w.at_end.unwrap_or(found.at_end));
        }
    }
    if let Some(wanted) = &w.choice {
        let found = choice(&turn.answer);
        same("choice", &found.letter.map(String::from), wanted);
        let open: Vec<String> = found.maybe.iter().map(char::to_string).collect();
        same("open", &open, &w.open.clone().unwrap_or_default());
    }
    if let Some(wanted) = &w.json {
        same("json", &json(&turn.answer), wanted);
    }
    if let (Some(tests), Some(wanted)) = (&w.tests, &w.code) {
        let found = code(&turn.answer, tests).text.replace("\r\n", "\n");
        same("code", &found.trim(), &wanted.trim());
    }
    wrong
}

#[test]
fn written_answers_are_read_as_people_read_them() {
    let text = include_str!("answers.jsonl");
    let all: Vec<Written> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let distinct: BTreeSet<(&str, bool)> =
        all.iter().map(|w| (w.said.as_str(), w.opened)).collect();
    assert!(distinct.len() >= 300, "{} distinct answers", distinct.len());
    let looked_at = |w: &Written| {
        w.reasoning.is_some()
            || w.number.is_some()
            || w.choice.is_some()
            || w.json.is_some()
            || w.code.is_some()
    };
    assert!(all.iter().all(looked_at));
    let problems: Vec<String> = all
        .iter()
        .flat_map(|w| {
            wrong(w)
                .into_iter()
                .map(|problem| format!("{}: {:?}: {problem}", w.style, w.said))
        })
        .collect();
    assert!(
        problems.is_empty(),
        "{} wrong:\n{}",
        problems.len(),
        problems.join("\n")
    );
}

/// Pieces of turns that mean something to a reader.
const PIECES: [&str; 34] = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "```",
    "```python\n",
    "~~~",
    "\n",
    " ",
    "\\boxed{",
    "}",
    "{",
    "\\frac",
    "\\sqrt",
    "1",
    "2",
    "10",
    ",",
    ".",
    "-",
    "−",
    "/",
    "^",
    "%",
    "万",
    "四",
    "½",
    "A",
    "B",
    "**",
    "The answer is ",
    "答案是",
    "def f():\n    return 1\n",
    "####",
];

proptest! {
    /// No text makes a reader panic, and what is read is a part of the text.
    #[test]
    fn every_text_can_be_read(
        pieces in prop::collection::vec(prop::sample::select(PIECES.to_vec()), 0..24),
        opened: bool,
    ) {
        let text = pieces.concat();
        let turn = Turn::split(&text, opened);
        prop_assert!(turn.answer.len() <= text.len());
        prop_assert!(turn.finished || turn.answer.is_empty());
        let _ = (number(&text), choice(&text), json(&text), citations(&text));
        let _ = expected_number(&Value::from(text.as_str()));
        prop_assert!((0.0..=1.0).contains(&repeated(&text, 4)));
        prop_assert!(code(&text, "f()").text.len() <= 2 * text.len() + 64);
    }
}
