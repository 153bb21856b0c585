//! Recorded masks of 21 formats, compared bit by bit. Later versions must recompute the masks of today's
//! traces.

use crate::{END, guided, schema, text, walk};
use serde_json::{Value, json};
use sinew_grammar::format_hash;
use sinew_types::{Format, Grammar, ToolGrammar, ToolNeed, ToolTag, Whitespace};
use std::sync::Arc;

const TOKENS: usize = 96;
const ARITHMETIC: &str = "start: sum\nsum: product (/[+-]/ product)*\n\
                          product: atom (/[*\\/]/ atom)*\natom: /[0-9]{1,4}/ | \"(\" sum \")\"\n";

fn of(grammar: Grammar) -> Arc<Format> {
    Arc::new(Format::new(grammar))
}

fn spaced(schema: &str, whitespace: Whitespace) -> Arc<Format> {
    let schema = schema.to_owned();
    let grammar = Grammar::JsonSchema { schema };
    Arc::new(Format {
        grammar,
        whitespace,
    })
}

fn regex(pattern: &str) -> Arc<Format> {
    let pattern = pattern.to_owned();
    of(Grammar::Regex { pattern })
}

pub(crate) fn tools(need: ToolNeed, parallel: bool) -> Arc<Format> {
    let call = |name: &str, schema: &str| ToolTag {
        begin: format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": "),
        schema: schema.to_owned(),
        end: "}\n</tool_call>".to_owned(),
    };
    let city = concat!(
        r#"{"type":"object","properties":{"city":{"type":"string","maxLength":8}},"#,
        r#""required":["city"],"additionalProperties":false}"#
    );
    let sum = concat!(
        r#"{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"#,
        r#""required":["a","b"],"additionalProperties":false}"#
    );
    of(Grammar::Tools(ToolGrammar {
        trigger: "<tool_call>".to_owned(),
        calls: vec![call("weather", city), call("add", sum)],
        need,
        parallel,
        answer: None,
    }))
}

pub(crate) fn formats() -> Vec<(&'static str, Arc<Format>)> {
    let person = crate::PERSON;
    let list = r#"{"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":4}"#;
    let recursive = concat!(
        r##"{"$defs":{"node":{"type":"object","properties":{"value":{"type":"integer"},"##,
        r##""next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"##,
        r##""required":["value","next"],"additionalProperties":false}},"$ref":"#/$defs/node"}"##
    );
    let choice = ["yes", "no", "not sure"].map(str::to_owned).to_vec();
    let lark = |grammar: &str| {
        of(Grammar::Lark {
            grammar: grammar.to_owned(),
        })
    };
    vec![
        ("person", schema(person)),
        ("person, compact", spaced(person, Whitespace::Compact)),
        ("person, free", spaced(person, Whitespace::Free)),
        ("array", schema(list)),
        ("recursive", schema(recursive)),
        (
            "pattern",
            schema(r#"{"type":"string","pattern":"^[a-z]{2,5}-[0-9]{2}$"}"#),
        ),
        ("date", schema(r#"{"type":"string","format":"date"}"#)),
        ("enum", schema(r#"{"enum":[1,"two",null,{"three":3}]}"#)),
        ("const", schema(r#"{"const":{"a":[1,2,"<|im_end|>"]}}"#)),
        (
            "number",
            schema(r#"{"type":"number","minimum":-1.5,"maximum":22}"#),
        ),
        (
            "any of",
            schema(r#"{"anyOf":[{"type":"boolean"},{"type":"integer","minimum":7}]}"#),
        ),
        ("anything", schema("true")),
        ("object", of(Grammar::JsonObject)),
        (
            "regex, date and word",
            regex("[0-9]{4}-[01][0-9]-[0-3][0-9] [a-z]{1,12}"),
        ),
        ("regex, emoji", regex("[\u{1F600}-\u{1F64F}]{3}é")),
        ("lark, arithmetic", lark(ARITHMETIC)),
        (
            "lark, two words",
            lark("start: \"hello\" \" \" /[a-z]+/ \"!\"\n"),
        ),
        ("choice", of(Grammar::Choice { texts: choice })),
        ("tools, auto", tools(ToolNeed::Auto, true)),
        ("tools, required", tools(ToolNeed::Required, false)),
        ("tools, parallel", tools(ToolNeed::Required, true)),
    ]
}

/// Summary of one random walk: a hash of all masks, counts and the start of the text.
fn record(format: &Arc<Format>) -> Value {
    let steps = walk(guided(format).as_mut(), 7, TOKENS);
    let fold =
        |sum: u64, hash: u64| (sum.rotate_left(7) ^ hash).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let masks = steps.iter().fold(0, |sum, s| fold(sum, s.mask.hash()));
    let tokens: Vec<u32> = steps.iter().map(|s| s.token).collect();
    json!({
        "format": &format_hash(format)[..16],
        "masks": format!("{masks:016x}"),
        "forced": steps.iter().filter(|s| s.mask.allowed() == 1).count(),
        "tokens": tokens.len(),
        "ended": tokens.last() == Some(&END),
        "text": text(&tokens).chars().take(60).collect::<String>(),
    })
}

#[test]
fn masks_equal_the_recorded_ones() {
    let records = formats()
        .into_iter()
        .map(|(name, f)| (name.to_owned(), record(&f)));
    let actual = Value::Object(records.collect());
    let golden: Value = serde_json::from_str(include_str!("../golden/masks.json")).unwrap();
    if actual != golden {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("masks.json");
        std::fs::write(&path, serde_json::to_string_pretty(&actual).unwrap()).unwrap();
        for (name, record) in actual.as_object().unwrap() {
            assert_eq!(
                Some(record),
                golden.get(name),
                "{name}; all: {}",
                path.display()
            );
        }
        panic!("formats were removed; all: {}", path.display());
    }
}
