//! Output formats: the form that a generated text must have, and the record of how it was enforced.

use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Maximum of bytes of all texts of a format. Larger formats are refused before compilation.
pub const MAX_FORMAT_BYTES: usize = 256 * 1024;
/// Maximum of texts of a [`Grammar::Choice`] and of calls of a [`Grammar::Tools`].
const MAX_FORMAT_ITEMS: usize = 256;

/// A format that the output must have, to the byte.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Format {
    /// The language of the output.
    pub grammar: Grammar,
    /// Layout of JSON inside the format.
    #[serde(default)]
    pub whitespace: Whitespace,
}

impl Format {
    /// A format with fixed separators.
    pub fn new(grammar: Grammar) -> Self {
        Self {
            grammar,
            whitespace: Whitespace::default(),
        }
    }
}

/// The layout of JSON inside a format.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Whitespace {
    /// `", "` and `": "` and no other whitespace, so that no tokens are spent on it.
    #[default]
    Spaced,
    /// `","` and `":"` and no space at all.
    Compact,
    /// Any blanks where JSON allows them.
    Free,
}

/// The language that an output must belong to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type", deny_unknown_fields)]
pub enum Grammar {
    /// JSON that this schema accepts. The schema's text is kept, and properties come in its order.
    JsonSchema {
        /// JSON Schema as text.
        schema: String,
    },
    /// Any JSON object.
    JsonObject,
    /// Text that this regular expression matches as a whole.
    Regex {
        /// Regular expression.
        pattern: String,
    },
    /// A grammar in Lark's notation.
    Lark {
        /// Text of the grammar.
        grammar: String,
    },
    /// One of these texts, to the byte.
    Choice {
        /// Texts to choose from, at least one and none empty.
        texts: Vec<String>,
    },
    /// Free text with tool calls whose arguments match their schemas.
    Tools(ToolGrammar),
}

/// Tool calls in a model's own notation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolGrammar {
    /// Text that ends free text and opens a call. Every [`ToolTag::begin`] starts with it.
    pub trigger: String,
    /// The tools that can be called.
    pub calls: Vec<ToolTag>,
    /// Whether the output can be text without a call.
    pub need: ToolNeed,
    /// Whether more calls can follow the first.
    pub parallel: bool,
    /// JSON Schema of an answer that is allowed instead of the calls, where calls are required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// One tool in the model's notation: `begin`, arguments that the schema accepts, `end`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolTag {
    /// Text before the arguments, with the name of the tool.
    pub begin: String,
    /// JSON Schema of the arguments, as it was given.
    pub schema: String,
    /// Text after the arguments.
    pub end: String,
}

/// Whether an output needs a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolNeed {
    /// Free text, and calls if the model opens one.
    Auto,
    /// Calls alone.
    Required,
}

/// Reason why a format is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A size is above its limit.
    #[error(
        "format.{field} has {actual}, at most {limit} are allowed: make it smaller or split it"
    )]
    TooLarge {
        /// Name of the size, as it follows `format.`.
        field: &'static str,
        /// Bytes of the grammar, or number of texts or calls.
        actual: usize,
        /// [`MAX_FORMAT_BYTES`], or 256 texts or calls.
        limit: usize,
    },
    /// A field has a value that it cannot have.
    #[error("format.{field} is {value}: {allowed}")]
    Invalid {
        /// Name of the field, as it follows `format.`.
        field: &'static str,
        /// Value in quotes.
        value: String,
        /// Allowed values in words.
        allowed: &'static str,
    },
}

impl Grammar {
    /// Name in messages and counters.
    pub fn name(&self) -> &'static str {
        match self {
            Self::JsonSchema { .. } => "json_schema",
            Self::JsonObject => "json_object",
            Self::Regex { .. } => "regex",
            Self::Lark { .. } => "lark",
            Self::Choice { .. } => "choice",
            Self::Tools(_) => "tools",
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema { schema } => schema.len(),
            Self::JsonObject => 0,
            Self::Regex { pattern } => pattern.len(),
            Self::Lark { grammar } => grammar.len(),
            Self::Choice { texts } => texts.iter().map(String::len).sum(),
            Self::Tools(tools) => {
                let tag = |t: &ToolTag| t.begin.len() + t.schema.len() + t.end.len();
                let answer = tools.answer.as_ref().map_or(0, String::len);
                tools.trigger.len() + answer + tools.calls.iter().map(tag).sum::<usize>()
            }
        }
    }
}

impl Format {
    /// Checks sizes and everything else that needs no compiler.
    ///
    /// # Errors
    /// The field, its value and the allowed ones.
    pub fn validate(&self) -> Result<(), FormatError> {
        let too_large = |field, actual, limit| FormatError::TooLarge {
            field,
            actual,
            limit,
        };
        let invalid = |field, value: &str, allowed| FormatError::Invalid {
            field,
            value: format!("{value:?}"),
            allowed,
        };
        let bytes = self.grammar.bytes();
        if bytes > MAX_FORMAT_BYTES {
            return Err(too_large("grammar bytes", bytes, MAX_FORMAT_BYTES));
        }
        match &self.grammar {
            Grammar::Choice { texts } if texts.len() > MAX_FORMAT_ITEMS => {
                Err(too_large("texts", texts.len(), MAX_FORMAT_ITEMS))
            }
            Grammar::Choice { texts } if texts.is_empty() => {
                Err(invalid("texts", "", "at least one text to choose"))
            }
            Grammar::Choice { texts } if texts.iter().any(String::is_empty) => {
                Err(invalid("texts", "", "texts of at least one byte"))
            }
            Grammar::Tools(tools) => {
                if tools.calls.len() > MAX_FORMAT_ITEMS {
                    return Err(too_large("calls", tools.calls.len(), MAX_FORMAT_ITEMS));
                }
                if tools.calls.is_empty() {
                    return Err(invalid("calls", "", "at least one tool"));
                }
                if tools.trigger.is_empty() {
                    return Err(invalid("trigger", "", "the text that opens a call"));
                }
                if tools.need == ToolNeed::Auto
                    && let Some(answer) = &tools.answer
                {
                    return Err(invalid("answer", answer, "none, where any text may come"));
                }
                let stray = |t: &&ToolTag| !t.begin.starts_with(&tools.trigger);
                match tools.calls.iter().find(stray) {
                    Some(tag) => Err(invalid(
                        "calls.begin",
                        &tag.begin,
                        "text that starts with the trigger",
                    )),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

/// A format and how it was enforced; recorded once per generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FormatLaw {
    /// The format that was requested.
    #[serde(with = "shared")]
    pub format: Arc<Format>,
    /// Way in which it was enforced.
    pub enforced: Enforced,
}

/// Way in which an output format was enforced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Enforced {
    /// Every token was sampled from the softmax over a mask that can be reproduced.
    Masks {
        /// The libraries that compute masks, with their versions.
        implementation: String,
        /// Hash of the table from ids to bytes, of the ends and of the settings.
        environment: String,
        /// Hash of the format.
        format: String,
    },
    /// An outside engine enforced it. Its masks are not known, so the output cannot be trained on.
    Outside {
        /// Name of the engine.
        engine: String,
    },
    /// The format was not enforced: tokens were sampled from the full softmax.
    Advice,
}

/// The set of tokens that one token was chosen from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The format and how it was enforced, shared by the tokens of a generation.
    #[serde(with = "shared")]
    pub law: Arc<FormatLaw>,
    /// Number of tokens that the mask allows; 1: no choice. 0 where no mask is known.
    pub allowed: u32,
    /// Hash of the mask; 0 where no mask is known.
    pub mask: u64,
    /// Natural logarithm of the model's total probability of the allowed tokens, at the sampling
    /// temperature. 0 where it is not known or was not computed.
    pub log_mass: f32,
}

/// The output format of a sampled node. The vectors have one entry for each token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeFormat {
    /// The format and how it was enforced.
    pub law: FormatLaw,
    /// Number of allowed tokens; 1: no choice. Empty where no masks are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed: Vec<u32>,
    /// Hashes of the masks. Empty where no masks are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masks: Vec<u64>,
    /// [`Choice::log_mass`] of each token. Empty where no masks are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_mass: Vec<f32>,
}

impl NodeFormat {
    /// A record without tokens.
    pub fn new(law: FormatLaw) -> Self {
        Self {
            law,
            allowed: Vec::new(),
            masks: Vec::new(),
            log_mass: Vec::new(),
        }
    }

    /// Whether each token has a mask that can be reproduced.
    pub fn masked(&self) -> bool {
        matches!(self.law.enforced, Enforced::Masks { .. })
    }

    /// Whether the mask allowed only one token at `index`.
    pub fn forced(&self, index: usize) -> bool {
        self.allowed.get(index) == Some(&1)
    }

    /// Keeps the first `tokens`.
    pub fn truncate(&mut self, tokens: usize) {
        self.allowed.truncate(tokens);
        self.masks.truncate(tokens);
        self.log_mass.truncate(tokens);
    }
}

/// Serializes an `Arc` as its content.
pub(crate) mod shared {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

/// Serialization of an optional `Arc`.
pub(crate) mod shared_option {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Option<Arc<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_deref().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Arc<T>>, D::Error> {
        Ok(Option::<T>::deserialize(deserializer)?.map(Arc::new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_schema_is_kept_to_the_byte() {
        let schema = "{ \"b\":1,\n\"a\" : 2}".to_owned();
        let format = Format::new(Grammar::JsonSchema { schema });
        let text = serde_json::to_string(&format).unwrap();
        assert_eq!(serde_json::from_str::<Format>(&text).unwrap(), format);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let tag = |begin: &str| ToolTag {
            begin: begin.into(),
            schema: "{}".into(),
            end: "]".into(),
        };
        let tools = |calls| ToolGrammar {
            trigger: "[call".into(),
            calls,
            need: ToolNeed::Auto,
            parallel: true,
            answer: None,
        };
        let many = vec!["a".to_owned(); MAX_FORMAT_ITEMS + 1];
        let large = "x".repeat(MAX_FORMAT_BYTES + 1);
        let cases = [
            ("texts", Grammar::Choice { texts: vec![] }),
            (
                "texts",
                Grammar::Choice {
                    texts: vec!["".into()],
                },
            ),
            ("texts", Grammar::Choice { texts: many }),
            ("bytes", Grammar::Regex { pattern: large }),
            ("calls", Grammar::Tools(tools(vec![]))),
            ("calls.begin", Grammar::Tools(tools(vec![tag("<x>")]))),
        ];
        for (field, grammar) in cases {
            let error = Format::new(grammar).validate().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        let fine = Grammar::Tools(tools(vec![tag("[call f ")]));
        Format::new(fine).validate().unwrap();
    }
}
