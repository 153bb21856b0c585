//! Tool calls in model output: formats, parsed calls and errors.
//!
//! | format | one call |
//! |---|---|
//! | `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
//! | `smollm` | `<tool_call>[{"name": ..., "arguments": {...}}, ...]</tool_call>` |
//! | `llama3` | `{"name": ..., "parameters": {...}}` as the whole turn, or after `<\|python_tag\|>` |
//! | `mistral` | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}` |
//! | `deepseek` | `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, its V3 and V3.2 spellings |
//! | `glm` | `<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ... </tool_call>` |
//! | `xml` | `<tool_call><function=name><parameter=k>v</parameter>...</function></tool_call>` |
//! | `harmony` | `<\|channel\|>commentary to=functions.name json<\|message\|>{...}<\|call\|>` |
//! | `kimi` | `<\|tool_call_begin\|>functions.name:0<\|tool_call_argument_begin\|>{...}<\|tool_call_end\|>` |
//! | `minimax` | `<invoke name="name"><parameter name="k">v</parameter></invoke>` in `<minimax:tool_call>` |
//! | `minicpm` | `<function name="name"><param name="k">v</param></function>` |
//! | `seed` | `<seed:tool_call><function=name><parameter=k>v</parameter></function></seed:tool_call>` |
//! | `gemma` | `<\|tool_call>call:name{k:<\|"\|>v<\|"\|>,n:5}<tool_call\|>` |
//! | `lfm` | `<\|tool_call_start\|>[name(k='v', n=5)]<\|tool_call_end\|>` |
//! | `cohere` | `<\|START_ACTION\|>[{"tool_name": ..., "parameters": {...}}]<\|END_ACTION\|>` |
//! | `apertus` | `<\|tools_prefix\|>[{"name": {...}}]<\|tools_suffix\|>` |
//! | `functionary` | `>>>name` and `{...}` on the next line |
//! | `gigachat` | `<\|function_call\|>{"name": ..., "arguments": {...}}`, or the same after `function call` |
//! | `hy3` | `glm` with the tags `<tool_call:opensource>`, `<arg_key:opensource>`, ... |
//! | `kimi-k3` | `<\|open\|>call tool="name"<\|sep\|>` with `argument` elements |
//! | `minimax-m3` | `NS<invoke name="name">NS<k>vNS</k>NS</invoke>`, `NS` being `]<]minimax[>[` |
//! | `muse` | `<atem:invoke name="name"><atem:parameter name="k">v</atem:parameter></atem:invoke>` |
//! | `list:TAG` | `<TAG>[{"name": ..., "arguments": {...}}]</TAG>`, or objects one after another |
//! | `json` | `{"name": ..., "arguments": {...}}` as the whole turn, bare or in a fence |
//! | `fence:LANG:TOOL` | code in a fence of a language: one call of a tool with `code` |
//! | `tag:TAG:TOOL` | code between `<TAG>` and `</TAG>`: likewise |
//!
//! Sources: the chat templates of the models (`tests/templates/README.md`).

use serde_json::{Map, Value};
use std::str::FromStr;

/// Notation of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// Hermes 2 and 3, Qwen 2.5 and 3. Several calls are written in sequence.
    Hermes,
    /// SmolLM2 and 3: a list, or one object like Hermes.
    SmolLm,
    /// Llama 3.1 to 3.3, including calls of built-in tools, and Functionary 3.1.
    Llama3,
    /// Mistral: a list (up to tekken v7) or a name and arguments (v11 on).
    Mistral,
    /// DeepSeek V3 and R1 (fenced JSON), V3.1 (bare JSON), V3.2 and V4 (DSML).
    DeepSeek,
    /// GLM 4.5 and later.
    Glm,
    /// Qwen3-Coder, Qwen 3.5 to 3.8, Nemotron 3, Step 3.5.
    Xml,
    /// gpt-oss: a message of its own on the channel `commentary`.
    Harmony,
    /// Kimi K2.
    Kimi,
    /// Kimi K3: elements with types.
    KimiK3,
    /// MiniMax M2.
    MiniMax,
    /// MiniMax M3: objects and lists are elements inside of elements.
    MiniMaxM3,
    /// MiniCPM 5.
    MiniCpm,
    /// Seed-OSS: the functions of `Xml` in other tags.
    Seed,
    /// Gemma 4.
    Gemma,
    /// LFM2 and 2.5: calls of Python in a list.
    Lfm,
    /// Command R7B, Command A and later.
    Cohere,
    /// Apertus: a list of objects with the name of a tool as their key.
    Apertus,
    /// Functionary 3.2: a message to the tool, `all` being the user.
    Functionary,
    /// GigaChat 3, which writes a call as a separate message, and 3.1.
    GigaChat,
    /// Hy3: the pairs of `Glm` in other tags.
    Hy3,
    /// Muse Glimmer: a message to the tool, with the elements of `MiniMax` in other tags.
    Muse,
    /// A JSON object or list of objects with `name` and `arguments` at the start of the turn.
    Json,
    /// Calls as JSON between `<tag>` and `</tag>`: a list (Apriel, Nemotron Nano 2), or objects one after
    /// another (MiniMax M1).
    List { tag: String },
    /// Code in a Markdown fence with the language: one call of `tool` with the argument `code`.
    Fence { language: String, tool: String },
    /// Code between `<tag>` and `</tag>`: one call of `tool` with the argument `code`.
    Tag { tag: String, tool: String },
}

impl ToolCallFormat {
    /// Name that [`ToolCallFormat::from_str`] parses.
    pub fn name(&self) -> String {
        match self {
            Self::Hermes => "hermes".into(),
            Self::SmolLm => "smollm".into(),
            Self::Llama3 => "llama3".into(),
            Self::Mistral => "mistral".into(),
            Self::DeepSeek => "deepseek".into(),
            Self::Glm => "glm".into(),
            Self::Xml => "xml".into(),
            Self::Harmony => "harmony".into(),
            Self::Kimi => "kimi".into(),
            Self::MiniMax => "minimax".into(),
            Self::MiniCpm => "minicpm".into(),
            Self::Seed => "seed".into(),
            Self::Gemma => "gemma".into(),
            Self::Lfm => "lfm".into(),
            Self::Cohere => "cohere".into(),
            Self::Apertus => "apertus".into(),
            Self::Functionary => "functionary".into(),
            Self::GigaChat => "gigachat".into(),
            Self::Hy3 => "hy3".into(),
            Self::KimiK3 => "kimi-k3".into(),
            Self::MiniMaxM3 => "minimax-m3".into(),
            Self::Muse => "muse".into(),
            Self::Json => "json".into(),
            Self::List { tag } => format!("list:{tag}"),
            Self::Fence { language, tool } => format!("fence:{language}:{tool}"),
            Self::Tag { tag, tool } => format!("tag:{tag}:{tool}"),
        }
    }

    /// Detects the format from the markers that a chat template prints. `None` if it prints none.
    ///
    /// A recipe can name another format: small models often write calls in the notation of the data
    /// that they were trained on, whatever their template prints.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |mark: &str| source.contains(mark);
        let list = |tag: &str| Self::List { tag: tag.into() };
        Some(if has("<|channel|>") && has("<|call|>") {
            Self::Harmony
        } else if has("<atem:invoke") {
            Self::Muse
        } else if has("<|open|>") && has("<|close|>") && has("'argument'") {
            Self::KimiK3
        } else if has("]<]minimax[>[") {
            Self::MiniMaxM3
        } else if has("<tool_sep{}>") && has(":opensource") {
            Self::Hy3
        } else if has("<|tools_prefix|>") {
            Self::Apertus
        } else if has("<|role_sep|>") && (has("<|function_call|>") || has("function call")) {
            Self::GigaChat
        } else if has(">>>all") {
            Self::Functionary
        } else if has("<TOOLCALL>") {
            list("TOOLCALL")
        } else if has("<tool_calls>") {
            list("tool_calls")
        } else if has("<|tool_call_argument_begin|>") {
            Self::Kimi
        } else if has("<minimax:tool_call>") {
            Self::MiniMax
        } else if has("<seed:tool_call>") {
            Self::Seed
        } else if has("<|tool_call>") && has("<tool_call|>") {
            Self::Gemma
        } else if has("<|tool_call_start|>") {
            Self::Lfm
        } else if has("<|START_ACTION|>") {
            Self::Cohere
        } else if has("<function name=") && has("<param name=") {
            Self::MiniCpm
        } else if has("<arg_key>") {
            Self::Glm
        } else if has("<function=") && has("<parameter=") {
            Self::Xml
        } else if has("[TOOL_CALLS]") {
            Self::Mistral
        } else if has("tool▁call▁begin") || has("｜DSML｜") {
            Self::DeepSeek
        } else if has("named SmolLM") {
            Self::SmolLm
        } else if has("<tool_call>") {
            Self::Hermes
        } else if has("<|python_tag|>") || (has("ipython") && has("\"parameters\": ")) {
            Self::Llama3
        } else {
            return None;
        })
    }
}

/// An unknown format name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no tool-call format {0:?}: known are hermes, smollm, llama3, mistral, deepseek, glm, xml, harmony, \
     kimi, kimi-k3, minimax, minimax-m3, minicpm, seed, gemma, lfm, cohere, apertus, functionary, gigachat, \
     hy3, muse, json, list:TAG, fence:LANGUAGE:TOOL and tag:TAG:TOOL"
)]
pub struct UnknownFormat(pub String);

impl FromStr for ToolCallFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let mut parts = name.split(':');
        let word = |part: Option<&str>| {
            part.filter(|p| {
                !p.is_empty()
                    && p.chars()
                        .all(|c| c.is_alphanumeric() || matches!(c, '_' | '-'))
            })
            .map(str::to_owned)
            .ok_or_else(|| UnknownFormat(name.to_owned()))
        };
        let format = match parts.next() {
            Some("hermes") => Self::Hermes,
            Some("smollm") => Self::SmolLm,
            Some("llama3") => Self::Llama3,
            Some("mistral") => Self::Mistral,
            Some("deepseek") => Self::DeepSeek,
            Some("glm") => Self::Glm,
            Some("xml") => Self::Xml,
            Some("harmony") => Self::Harmony,
            Some("kimi") => Self::Kimi,
            Some("minimax") => Self::MiniMax,
            Some("minicpm") => Self::MiniCpm,
            Some("seed") => Self::Seed,
            Some("gemma") => Self::Gemma,
            Some("lfm") => Self::Lfm,
            Some("cohere") => Self::Cohere,
            Some("apertus") => Self::Apertus,
            Some("functionary") => Self::Functionary,
            Some("gigachat") => Self::GigaChat,
            Some("hy3") => Self::Hy3,
            Some("kimi-k3") => Self::KimiK3,
            Some("minimax-m3") => Self::MiniMaxM3,
            Some("muse") => Self::Muse,
            Some("json") => Self::Json,
            Some("list") => Self::List {
                tag: word(parts.next())?,
            },
            Some("fence") => Self::Fence {
                language: word(parts.next())?,
                tool: word(parts.next())?,
            },
            Some("tag") => Self::Tag {
                tag: word(parts.next())?,
                tool: word(parts.next())?,
            },
            _ => return Err(UnknownFormat(name.to_owned())),
        };
        match parts.next() {
            None => Ok(format),
            Some(_) => Err(UnknownFormat(name.to_owned())),
        }
    }
}

/// A parsed call.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedCall {
    /// Id written by the model. Only some families write one.
    pub id: Option<String>,
    /// Name of the tool.
    pub name: String,
    /// Arguments by name.
    pub arguments: Map<String, Value>,
}

impl ParsedCall {
    /// Creates a call without an id.
    pub fn new(name: impl Into<String>, arguments: Map<String, Value>) -> Self {
        Self {
            id: None,
            name: name.into(),
            arguments,
        }
    }
}

/// Error of a call. The messages are addressed to the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolCallError {
    /// The end marker is missing.
    #[error("the call opens with {open} but {close} is missing")]
    Unclosed { open: String, close: String },
    /// The start marker is missing.
    #[error("{close} without {open} before it")]
    Unopened { open: String, close: String },
    /// The call has no content.
    #[error("the call is empty")]
    Empty,
    /// The content is invalid JSON.
    #[error("the call is not valid JSON: {0}")]
    Json(String),
    /// A field is missing or has the wrong type.
    #[error("the call has no {field:?}: {expected}")]
    Field {
        field: &'static str,
        expected: &'static str,
    },
    /// The notation is invalid.
    #[error("the call cannot be read: {found:?} where {expected} is expected")]
    Syntax {
        found: String,
        expected: &'static str,
    },
    /// The turn has more than [`MAX_CALLS`] calls.
    #[error("more than {MAX_CALLS} calls in one turn")]
    TooMany,
}

impl ToolCallError {
    /// Syntax error with the first 40 characters of the text.
    pub(crate) fn syntax(found: &str, expected: &'static str) -> Self {
        Self::Syntax {
            found: found.trim().chars().take(40).collect(),
            expected,
        }
    }
}

/// Maximum calls per turn.
pub const MAX_CALLS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_their_formats() {
        let all = [
            ToolCallFormat::Hermes,
            ToolCallFormat::SmolLm,
            ToolCallFormat::Llama3,
            ToolCallFormat::Mistral,
            ToolCallFormat::DeepSeek,
            ToolCallFormat::Glm,
            ToolCallFormat::Xml,
            ToolCallFormat::Harmony,
            ToolCallFormat::Kimi,
            ToolCallFormat::MiniMax,
            ToolCallFormat::MiniCpm,
            ToolCallFormat::Seed,
            ToolCallFormat::Gemma,
            ToolCallFormat::Lfm,
            ToolCallFormat::Cohere,
            ToolCallFormat::Apertus,
            ToolCallFormat::Functionary,
            ToolCallFormat::GigaChat,
            ToolCallFormat::Hy3,
            ToolCallFormat::KimiK3,
            ToolCallFormat::MiniMaxM3,
            ToolCallFormat::Muse,
            ToolCallFormat::Json,
            ToolCallFormat::List {
                tag: "tool_calls".into(),
            },
            ToolCallFormat::Fence {
                language: "python".into(),
                tool: "run".into(),
            },
            ToolCallFormat::Tag {
                tag: "tool".into(),
                tool: "python".into(),
            },
        ];
        for format in all {
            assert_eq!(format.name().parse(), Ok(format));
        }
        for wrong in [
            "",
            "herms",
            "fence",
            "fence:python",
            "tag::x",
            "tag:a b:c",
            "json:x",
            "list",
            "list:a:b",
        ] {
            let error = wrong.parse::<ToolCallFormat>().unwrap_err();
            assert_eq!(error, UnknownFormat(wrong.into()));
            assert!(error.to_string().contains("tag:TAG:TOOL"));
        }
    }
}
