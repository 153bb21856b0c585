//! Tool calls in the text that models write.

use serde_json::{Map, Value};

/// How a model writes a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do;
    /// several in a row are several calls.
    Hermes,
    /// Code in a fence that opens with three backticks and the language: one call of `tool`
    /// with `code`.
    Fence { language: String, tool: String },
    /// Code between `<tag>` and `</tag>`: one call of `tool` with `code`.
    Tag { tag: String, tool: String },
}

/// A call as the model wrote it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedCall {
    pub name: String,
    pub arguments: Map<String, Value>,
}

/// A turn, taken apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedTurn {
    /// What stands outside of the calls, trimmed.
    pub content: String,
    pub calls: Vec<ParsedCall>,
}

/// What is wrong with a call. The texts are written for the model to read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolCallError {
    #[error("the call opens with {open} but {close} is missing")]
    Unclosed { open: String, close: String },
    #[error("{close} without {open} before it")]
    Unopened { open: String, close: String },
    #[error("the call is empty")]
    Empty,
    #[error("the call is not valid JSON: {0}")]
    Json(String),
    #[error("the call has no {field:?}: {expected}")]
    Field {
        field: &'static str,
        expected: &'static str,
    },
    #[error("{count} calls in one turn, at most {MAX_CALLS} are allowed")]
    TooMany { count: usize },
}

/// Most calls in one turn.
pub const MAX_CALLS: usize = 16;

/// Takes a turn apart. No call at all is a turn with content only; a broken call is an error.
pub fn parse_turn(text: &str, format: &ToolCallFormat) -> Result<ParsedTurn, ToolCallError> {
    let (open, close) = match format {
        ToolCallFormat::Hermes => ("<tool_call>".to_owned(), "</tool_call>".to_owned()),
        ToolCallFormat::Fence { language, .. } => (format!("```{language}"), "```".to_owned()),
        ToolCallFormat::Tag { tag, .. } => (format!("<{tag}>"), format!("</{tag}>")),
    };
    let mut turn = ParsedTurn::default();
    let mut content = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(&open) {
        content.push_str(before);
        let Some((body, tail)) = after.split_once(&close) else {
            return Err(ToolCallError::Unclosed { open, close });
        };
        turn.calls.push(call(body, format)?);
        rest = tail;
    }
    let fence = matches!(format, ToolCallFormat::Fence { .. });
    if !fence && rest.contains(&close) {
        return Err(ToolCallError::Unopened { open, close });
    }
    content.push_str(rest);
    turn.content = content.trim().to_owned();
    match turn.calls.len() {
        0..=MAX_CALLS => Ok(turn),
        count => Err(ToolCallError::TooMany { count }),
    }
}

fn call(body: &str, format: &ToolCallFormat) -> Result<ParsedCall, ToolCallError> {
    if body.trim().is_empty() {
        return Err(ToolCallError::Empty);
    }
    match format {
        ToolCallFormat::Hermes => hermes(body),
        ToolCallFormat::Fence { tool, .. } | ToolCallFormat::Tag { tool, .. } => {
            let mut arguments = Map::new();
            let code = body.trim_matches(['\n', '\r']).trim_end();
            arguments.insert("code".into(), Value::String(code.to_owned()));
            Ok(ParsedCall {
                name: tool.clone(),
                arguments,
            })
        }
    }
}

fn hermes(body: &str) -> Result<ParsedCall, ToolCallError> {
    let value: Value =
        serde_json::from_str(body.trim()).map_err(|e| ToolCallError::Json(e.to_string()))?;
    let name = value["name"].as_str().ok_or(ToolCallError::Field {
        field: "name",
        expected: "the name of a tool",
    })?;
    let arguments = match &value["arguments"] {
        Value::Object(map) => map.clone(),
        // Some models write the object as a string of JSON.
        Value::String(text) => {
            serde_json::from_str(text).map_err(|e| ToolCallError::Json(e.to_string()))?
        }
        _ => {
            return Err(ToolCallError::Field {
                field: "arguments",
                expected: "a JSON object",
            });
        }
    };
    Ok(ParsedCall {
        name: name.to_owned(),
        arguments,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> ToolCallFormat {
        ToolCallFormat::Tag {
            tag: "tool".into(),
            tool: "python".into(),
        }
    }

    fn fence() -> ToolCallFormat {
        ToolCallFormat::Fence {
            language: "python".into(),
            tool: "python".into(),
        }
    }

    fn code(turn: &ParsedTurn) -> &str {
        turn.calls[0].arguments["code"].as_str().unwrap()
    }

    #[test]
    fn calls_and_content_are_told_apart() {
        let turn = parse_turn("so <tool>1 + 2</tool> ok", &tag()).unwrap();
        assert_eq!((code(&turn), turn.content.as_str()), ("1 + 2", "so  ok"));
        let turn = parse_turn("```python\nx = 1\nprint(x)\n```", &fence()).unwrap();
        assert_eq!(code(&turn), "x = 1\nprint(x)");
        let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": \"{}\"}</tool_call>";
        let turn = parse_turn(text, &ToolCallFormat::Hermes).unwrap();
        assert_eq!(turn.calls.len(), 2);
        assert_eq!(turn.calls[0].arguments["a"], 1);
        let turn = parse_turn("no call here", &tag()).unwrap();
        assert!(turn.calls.is_empty());
    }

    #[test]
    fn broken_calls_are_named() {
        let error = |text: &str, format: &ToolCallFormat| parse_turn(text, format).unwrap_err();
        assert!(matches!(
            error("<tool>1", &tag()),
            ToolCallError::Unclosed { .. }
        ));
        assert!(matches!(
            error("1</tool>", &tag()),
            ToolCallError::Unopened { .. }
        ));
        assert_eq!(error("<tool> </tool>", &tag()), ToolCallError::Empty);
        assert!(matches!(
            error("```python\nx", &fence()),
            ToolCallError::Unclosed { .. }
        ));
        let hermes = |body: &str| {
            error(
                &format!("<tool_call>{body}</tool_call>"),
                &ToolCallFormat::Hermes,
            )
        };
        assert!(matches!(hermes("{"), ToolCallError::Json(_)));
        assert!(matches!(
            hermes("{}"),
            ToolCallError::Field { field: "name", .. }
        ));
        assert!(matches!(
            hermes("{\"name\": \"f\", \"arguments\": 3}"),
            ToolCallError::Field {
                field: "arguments",
                ..
            }
        ));
        let many = "<tool>1</tool>".repeat(MAX_CALLS + 1);
        assert_eq!(
            error(&many, &tag()),
            ToolCallError::TooMany {
                count: MAX_CALLS + 1
            }
        );
    }
}
