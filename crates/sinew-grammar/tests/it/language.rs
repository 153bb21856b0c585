//! Masks allow exactly the format's language, in the tokens of the model's tokenizer.

use crate::golden::{formats, tools};
use crate::{END, GUIDED, PERSON, TOKENIZER, guided, schema, text, walk};
use serde_json::Value;
use sinew_grammar::{GrammarError, Grammars};
use sinew_types::{Format, Grammar, ToolNeed, Whitespace};
use std::sync::Arc;

fn tokens_of(format: &Arc<Format>, seed: u64, limit: usize) -> Vec<u32> {
    let steps = walk(guided(format).as_mut(), seed, limit);
    steps.iter().map(|s| s.token).collect()
}

#[test]
fn finished_json_is_valid_and_in_the_order_of_the_schema() {
    let mut finished = 0;
    for seed in 0..40 {
        let tokens = tokens_of(&schema(PERSON), seed, 200);
        assert_eq!(tokens.last(), Some(&END), "it is short enough to end");
        let value: Value = serde_json::from_str(&text(&tokens)).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["name", "age", "kind"]);
        assert!(value["age"].as_u64().unwrap() <= 150);
        assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        assert!(["cat", "dog"].contains(&value["kind"].as_str().unwrap()));
        finished += 1;
    }
    assert_eq!(finished, 40);
}

#[test]
fn forced_text_has_canonical_tokens() {
    let format = schema(r#"{"const":{"temperature":[12,"degrees"]}}"#);
    let steps = walk(guided(&format).as_mut(), 1, 100);
    let tokens: Vec<u32> = steps.iter().map(|s| s.token).collect();
    let output = r#"{"temperature": [12, "degrees"]}"#;
    let mut usual = TOKENIZER.encode(output).unwrap();
    usual.push(END);
    assert_eq!(text(&tokens), output);
    // The tokenization of the last token may differ, because more text could have followed.
    let same = tokens
        .iter()
        .zip(&usual)
        .take_while(|(a, b)| a == b)
        .count();
    assert!(same + 3 >= usual.len(), "{tokens:?} and {usual:?}");
    let forced = steps.iter().filter(|s| s.mask.allowed() == 1).count();
    assert!(forced + 2 >= steps.len(), "{forced} of {}", steps.len());
}

#[test]
fn end_is_the_only_control_token_that_masks_allow() {
    for (name, format) in formats() {
        for step in walk(guided(&format).as_mut(), 3, 40) {
            let special = step
                .mask
                .tokens()
                .find(|&t| t != END && TOKENIZER.is_special(t));
            assert_eq!(special, None, "{name}");
            assert!(step.mask.allows(step.token), "{name}");
        }
    }
}

#[test]
fn characters_may_span_several_tokens() {
    let pattern = "[\u{1F600}-\u{1F64F}]{2}".to_owned();
    let format = Arc::new(Format::new(Grammar::Regex { pattern }));
    for seed in 0..8 {
        let steps = walk(guided(&format).as_mut(), seed, 40);
        let tokens: Vec<u32> = steps.iter().map(|s| s.token).collect();
        let output = text(&tokens);
        assert_eq!(output.chars().count(), 2, "{output:?}");
        assert!(
            output
                .chars()
                .all(|c| ('\u{1F600}'..='\u{1F64F}').contains(&c))
        );
        assert!(
            tokens.len() > 3,
            "no token is a whole character: {tokens:?}"
        );
    }
}

#[test]
fn tool_calls_match_their_schemas_and_text_is_free() {
    let format = tools(ToolNeed::Auto, true);
    let accepted = |output: &str| GUIDED.check_text(&format, output);
    let call =
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": -2}}\n</tool_call>";
    accepted("Just words, and <b>marks</b>.").unwrap();
    accepted("").unwrap();
    accepted(call).unwrap();
    accepted(&format!("I add them.\n{call}\n{call} done")).unwrap();
    for wrong in [
        "<tool_call>",
        "<tool_call>\n{\"name\": \"sub\", ",
        "x <tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 1",
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2, \"c\": 3}}\n</tool_call>",
    ] {
        assert!(accepted(wrong).is_err(), "{wrong:?}");
    }
    let required = tools(ToolNeed::Required, false);
    let accepted = |output: &str| GUIDED.check_text(&required, output);
    accepted(call).unwrap();
    assert!(accepted("words").is_err());
    assert!(accepted(&format!("{call}\n{call}")).is_err());
    let many = tools(ToolNeed::Required, true);
    GUIDED
        .check_text(&many, &format!("{call}\n{call}"))
        .unwrap();
}

#[test]
fn whitespace_matches_the_setting() {
    let texts = [
        (Whitespace::Spaced, r#"{"a": 1, "b": 2}"#),
        (Whitespace::Compact, r#"{"a":1,"b":2}"#),
        (Whitespace::Free, "{\n  \"a\": 1,\n  \"b\": 2\n}"),
    ];
    let two = concat!(
        r#"{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"#,
        r#""required":["a","b"],"additionalProperties":false}"#
    );
    for (whitespace, _) in texts {
        let format = Format {
            grammar: Grammar::JsonSchema { schema: two.into() },
            whitespace,
        };
        for (other, output) in texts {
            let fits = whitespace == other || whitespace == Whitespace::Free;
            let checked = GUIDED.check_text(&format, output);
            assert_eq!(
                checked.is_ok(),
                fits,
                "{whitespace:?}: {output:?}: {checked:?}"
            );
        }
    }
}

#[test]
fn unenforceable_formats_are_refused() {
    let schemas = [
        ("not JSON", "{"),
        ("a schema is", "[]"),
        ("uniqueItems", r#"{"type":"array","uniqueItems":true}"#),
        ("not", r#"{"not":{"type":"string"}}"#),
        ("if", r#"{"if":{"type":"string"},"then":{"minLength":3}}"#),
        ("format", r#"{"type":"string","format":"no-such-format"}"#),
        (
            "Unsatisfiable",
            r#"{"type":"integer","minimum":5,"maximum":4}"#,
        ),
        (
            "$dynamicRef",
            r##"{"properties":{"a":{"$dynamicRef":"#x"}}}"##,
        ),
        (
            "x-guidance",
            r#"{"x-guidance":{"lenient":true},"uniqueItems":true}"#,
        ),
        ("$ref", r#"{"$ref":"https://example.com/schema.json"}"#),
    ];
    for (word, text) in schemas {
        let error = GUIDED.start(&schema(text)).unwrap_err();
        assert!(matches!(error, GrammarError::Compile { .. }), "{error}");
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    for grammar in [
        Grammar::Regex {
            pattern: "(?=a)b".into(),
        },
        Grammar::Regex {
            pattern: "(".into(),
        },
        Grammar::Lark {
            grammar: "start: missing".into(),
        },
        Grammar::Lark {
            grammar: String::new(),
        },
    ] {
        let format = Arc::new(Format::new(grammar));
        let error = GUIDED.start(&format).unwrap_err();
        assert!(matches!(error, GrammarError::Compile { .. }), "{error}");
    }
    let deep = "{\"items\":".repeat(100) + "{}" + &"}".repeat(100);
    let error = GUIDED.start(&schema(&deep)).unwrap_err().to_string();
    assert!(error.contains("levels"), "{error}");
}

#[test]
fn forbidden_tokens_and_tokens_after_the_end_are_refused() {
    let mut matcher = guided(&schema(PERSON));
    // `{` continues the text, but the tokenizer does not produce it here.
    let brace = TOKENIZER.encode("{").unwrap()[0];
    let error = matcher.advance(brace).unwrap_err();
    assert!(
        matches!(error, GrammarError::Barred { position: 0, .. }),
        "{error}"
    );
    let mut matcher = guided(&schema(r#"{"const":1}"#));
    walk(matcher.as_mut(), 0, 10);
    assert!(matcher.ended());
    assert!(matches!(matcher.mask(), Err(GrammarError::Ended { .. })));
}

#[test]
fn forks_are_independent() {
    for (name, format) in formats() {
        let mut one = guided(&format);
        walk(one.as_mut(), 5, 6);
        if one.ended() {
            continue;
        }
        let mut two = one.fork();
        walk(two.as_mut(), 11, 6);
        let (a, b) = (walk(one.as_mut(), 13, 12), {
            let mut again = guided(&format);
            walk(again.as_mut(), 5, 6);
            walk(again.as_mut(), 13, 12)
        });
        let hashes =
            |steps: &[crate::Step]| steps.iter().map(|s| s.mask.hash()).collect::<Vec<_>>();
        assert_eq!(hashes(&a), hashes(&b), "{name}");
    }
}

#[test]
fn answer_schema_is_an_alternative_to_calls() {
    let Grammar::Tools(mut grammar) = tools(ToolNeed::Required, false).grammar.clone() else {
        unreachable!("tools are tools");
    };
    grammar.answer = Some(PERSON.to_owned());
    let format = Format::new(Grammar::Tools(grammar.clone()));
    let call =
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}\n</tool_call>";
    let person = "{\"name\": \"Ann\", \"age\": 7, \"kind\": \"cat\"}";
    for output in [call, person] {
        GUIDED.check_text(&format, output).unwrap();
    }
    for output in ["", "Ann", "{\"name\": \"Ann\"}", &format!("{call}{person}")] {
        assert!(GUIDED.check_text(&format, output).is_err(), "{output}");
    }
    // Only calls are allowed if there is no answer schema. An answer schema has no effect with `auto`:
    // refused.
    assert!(
        GUIDED
            .check_text(&tools(ToolNeed::Required, false), person)
            .is_err()
    );
    grammar.need = ToolNeed::Auto;
    let refused = Format::new(Grammar::Tools(grammar)).validate().unwrap_err();
    assert!(refused.to_string().contains("answer"), "{refused}");
}
