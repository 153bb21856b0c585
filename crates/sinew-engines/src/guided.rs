//! Output formats at outside engines: their own guided decoding, or as advice.
//!
//! Their masks are not known here, so tokens that they sample under a format cannot be trained. Tokens that
//! were sampled freely, with the format as advice, can be.
//!
//! | format | vLLM, in `structured_outputs` | SGLang, in `sampling_params` |
//! |---|---|---|
//! | JSON Schema | `json` | `json_schema` |
//! | JSON object | `json_object` | `json_schema` of an object |
//! | pattern | `regex` | `regex` |
//! | Lark grammar | `grammar` | refused: its grammars are EBNF |
//! | choice | `choice` | `regex` with the texts escaped |
//! | optional tool calls | `structural_tag`, as text | `structural_tag`, as text |
//! | required, single or constrained answers with calls | refused | refused |

use crate::error::ModeError;
use serde_json::{Map, Value, json};
use sinew_types::{
    Enforced, EngineError, Format, FormatLaw, Grammar, SamplingParams, ToolNeed, Whitespace,
};
use std::str::FromStr;
use std::sync::Arc;

/// Handling of a request's output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormatMode {
    /// The server enforces it by its own guided decoding; its tokens are not trained on.
    #[default]
    Guided,
    /// The server does not get it; the caller checks the answer afterwards. Its tokens can be
    /// trained on.
    Advice,
    /// The request is refused.
    Refuse,
}

impl FormatMode {
    /// The values of the recipe key and of the command line, in the order of the variants.
    pub const NAMES: [&'static str; 3] = ["guided", "advice", "refuse"];

    /// Takes the format out of `sampling` unless the server enforces it, and returns the record of
    /// it that goes with the tokens.
    pub(crate) fn apply(
        self,
        sampling: &mut SamplingParams,
        engine: &str,
    ) -> Result<Option<Arc<FormatLaw>>, EngineError> {
        let Some(format) = sampling.format.clone() else {
            return Ok(None);
        };
        let enforced = match self {
            Self::Guided => Enforced::Outside {
                engine: engine.to_owned(),
            },
            Self::Advice => {
                sampling.format = None;
                Enforced::Advice
            }
            Self::Refuse => {
                return Err(EngineError::Format(format!(
                    "{} is not held to: this engine was started without formats",
                    format.grammar.name()
                )));
            }
        };
        Ok(Some(Arc::new(FormatLaw { format, enforced })))
    }
}

impl FromStr for FormatMode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Self, ModeError> {
        match text {
            "guided" => Ok(Self::Guided),
            "advice" => Ok(Self::Advice),
            "refuse" => Ok(Self::Refuse),
            _ => Err(ModeError::Format(text.into(), Self::NAMES.join(", "))),
        }
    }
}

/// The error for a format that a server of `kind` has no field for.
fn unknown(kind: &str, format: &Format, why: &str) -> EngineError {
    EngineError::Format(format!(
        "{kind} cannot hold to {}: {why}; use the embedded engine, or formats as advice",
        format.grammar.name()
    ))
}

fn parsed(kind: &str, format: &Format, schema: &str) -> Result<Value, EngineError> {
    serde_json::from_str(schema).map_err(|e| unknown(kind, format, &format!("it is not JSON: {e}")))
}

/// Tool calls in the form of both servers' structural tags. Optional calls only: a tag can neither
/// require one nor limit their number.
fn structural_tag(kind: &str, format: &Format) -> Result<Value, EngineError> {
    let Grammar::Tools(tools) = &format.grammar else {
        return Err(unknown(kind, format, "it has no calls"));
    };
    if tools.need == ToolNeed::Required || !tools.parallel || tools.answer.is_some() {
        let why = "its tags neither require a call nor bound how many there are";
        return Err(unknown(kind, format, why));
    }
    let structure = |t: &sinew_types::ToolTag| {
        let schema = parsed(kind, format, &t.schema)?;
        Ok(json!({ "begin": t.begin, "schema": schema, "end": t.end }))
    };
    let structures: Result<Vec<Value>, EngineError> = tools.calls.iter().map(structure).collect();
    Ok(json!({
        "type": "structural_tag",
        "structures": structures?,
        "triggers": [tools.trigger],
    }))
}

/// vLLM's `structured_outputs` for a format.
pub(crate) fn vllm(format: &Format) -> Result<Value, EngineError> {
    const KIND: &str = "vLLM";
    let mut fields = Map::new();
    let (key, value) = match &format.grammar {
        Grammar::JsonSchema { schema } => ("json", parsed(KIND, format, schema)?),
        Grammar::JsonObject => ("json_object", json!(true)),
        Grammar::Regex { pattern } => ("regex", json!(pattern)),
        Grammar::Lark { grammar } => ("grammar", json!(grammar)),
        Grammar::Choice { texts } => ("choice", json!(texts)),
        // A text there, not an object.
        Grammar::Tools(_) => {
            let tag = structural_tag(KIND, format)?;
            ("structural_tag", json!(tag.to_string()))
        }
    };
    fields.insert(key.to_owned(), value);
    let json = matches!(key, "json" | "json_object");
    if json && format.whitespace != Whitespace::Free {
        fields.insert("disable_any_whitespace".to_owned(), json!(true));
    }
    Ok(Value::Object(fields))
}

/// SGLang's field of `sampling_params` for a format, and its value. A choice becomes a pattern.
pub(crate) fn sglang(format: &Format) -> Result<(&'static str, Value), EngineError> {
    const KIND: &str = "SGLang";
    Ok(match &format.grammar {
        Grammar::JsonSchema { schema } => {
            parsed(KIND, format, schema)?;
            ("json_schema", json!(schema))
        }
        Grammar::JsonObject => ("json_schema", json!("{\"type\":\"object\"}")),
        Grammar::Regex { pattern } => ("regex", json!(pattern)),
        Grammar::Choice { texts } => {
            let texts: Vec<String> = texts.iter().map(|t| escaped(t)).collect();
            ("regex", json!(format!("({})", texts.join("|"))))
        }
        Grammar::Tools(_) => {
            let tag = structural_tag(KIND, format)?;
            ("structural_tag", json!(tag.to_string()))
        }
        Grammar::Lark { .. } => {
            return Err(unknown(KIND, format, "its grammars are written in EBNF"));
        }
    })
}

/// A regular expression that matches only `text`.
fn escaped(text: &str) -> String {
    let special = |c: char| "\\.+*?()|[]{}^$/-".contains(c);
    let mut out = String::new();
    for c in text.chars() {
        if special(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{ToolGrammar, ToolTag};

    fn tools(need: ToolNeed) -> Format {
        Format::new(Grammar::Tools(ToolGrammar {
            trigger: "<tool".into(),
            calls: vec![ToolTag {
                begin: "<tool f>".into(),
                schema: "{\"type\":\"object\"}".into(),
                end: "</tool>".into(),
            }],
            need,
            parallel: true,
            answer: None,
        }))
    }

    #[test]
    fn each_server_gets_its_own_fields() {
        let schema = Format::new(Grammar::JsonSchema {
            schema: "{\"b\":{}, \"a\":{}}".into(),
        });
        let fields = vllm(&schema).unwrap();
        assert_eq!(
            fields.to_string(),
            "{\"json\":{\"b\":{},\"a\":{}},\"disable_any_whitespace\":true}"
        );
        let (key, value) = sglang(&schema).unwrap();
        assert_eq!((key, value), ("json_schema", json!("{\"b\":{}, \"a\":{}}")));
        let choice = Format::new(Grammar::Choice {
            texts: vec!["a.b".into(), "c".into()],
        });
        assert_eq!(vllm(&choice).unwrap(), json!({"choice": ["a.b", "c"]}));
        assert_eq!(sglang(&choice).unwrap(), ("regex", json!("(a\\.b|c)")));
        let (key, tag) = sglang(&tools(ToolNeed::Auto)).unwrap();
        assert_eq!(key, "structural_tag");
        let tag: Value = serde_json::from_str(tag.as_str().unwrap()).unwrap();
        assert_eq!(tag["triggers"], json!(["<tool"]));
        assert_eq!(tag["structures"][0]["begin"], "<tool f>");
    }

    #[test]
    fn what_a_server_cannot_hold_to_is_refused() {
        let lark = Format::new(Grammar::Lark {
            grammar: "start: \"a\"".into(),
        });
        let broken = Format::new(Grammar::JsonSchema { schema: "{".into() });
        assert!(vllm(&lark).is_ok());
        for refused in [
            sglang(&lark).unwrap_err(),
            vllm(&broken).unwrap_err(),
            sglang(&broken).unwrap_err(),
            vllm(&tools(ToolNeed::Required)).unwrap_err(),
            sglang(&tools(ToolNeed::Required)).unwrap_err(),
        ] {
            assert!(refused.to_string().contains("as advice"), "{refused}");
        }
    }

    #[test]
    fn advice_is_not_sent_and_refusal_names_the_format() {
        let asked = SamplingParams {
            format: Some(Arc::new(Format::new(Grammar::JsonObject))),
            ..SamplingParams::default()
        };
        let mut sampling = asked.clone();
        let law = FormatMode::Guided
            .apply(&mut sampling, "e")
            .unwrap()
            .unwrap();
        assert_eq!(law.enforced, Enforced::Outside { engine: "e".into() });
        assert_eq!(sampling, asked);
        let law = FormatMode::Advice
            .apply(&mut sampling, "e")
            .unwrap()
            .unwrap();
        assert_eq!(law.enforced, Enforced::Advice);
        assert_eq!(sampling, SamplingParams::default());
        assert_eq!(FormatMode::Advice.apply(&mut sampling, "e"), Ok(None));
        let refused = FormatMode::Refuse
            .apply(&mut asked.clone(), "e")
            .unwrap_err();
        assert!(refused.to_string().contains("json_object"), "{refused}");
    }
}
