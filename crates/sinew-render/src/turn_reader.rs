//! Streaming conversion of sampled tokens to text, reasoning and tool calls for a client.

use crate::format::TurnFormat;
use crate::renderer::Renderer;
use crate::tokenizer::StreamDecoder;
use crate::tool_call::ToolCallFormat;
use crate::turn::{TurnDelta, TurnParser};
use sinew_types::{Message, Role, SampledToken, ToolCall, ToolSpec};

/// A part of a turn, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    Text(String),
    Reasoning(String),
    Call(ToolCall),
}

/// Settings of a reader for one turn.
#[derive(Clone, Debug, Default)]
pub struct TurnOptions {
    /// Notation of calls and reasoning. Default: the whole turn is text.
    pub format: TurnFormat,
    /// Tools, whose schemas define the types of unquoted arguments.
    pub tools: Vec<ToolSpec>,
    /// Stop strings of the client. They end the text and are not part of it.
    pub stop: Vec<String>,
    /// Text that was forced at the start of the turn.
    pub opening: String,
    /// Prefix of call ids, followed by the number of the call.
    pub call_prefix: String,
}

/// Streaming reader of one output.
#[derive(Debug)]
pub struct TurnReader {
    options: TurnOptions,
    decoder: StreamDecoder,
    parser: TurnParser,
    /// Text that may still become a stop string.
    unchecked: String,
    /// The stop string that appeared.
    stopped: Option<String>,
    /// Complete text of the output without the stop string.
    raw: String,
    message: Message,
}

/// Text that forces a call of any tool, or of the named one. `None` if the format has no such text.
pub fn forced_opening(format: &ToolCallFormat, tool: Option<&str>) -> Option<String> {
    let name = tool.map(|name| serde_json::Value::from(name).to_string());
    Some(match (format, tool, name) {
        (ToolCallFormat::Hermes, _, None) => "<tool_call>\n{\"name\": \"".into(),
        (ToolCallFormat::Hermes, _, Some(name)) => {
            format!("<tool_call>\n{{\"name\": {name}, \"arguments\": ")
        }
        (ToolCallFormat::SmolLm, _, None) => "<tool_call>[{\"name\": \"".into(),
        (ToolCallFormat::SmolLm, _, Some(name)) => {
            format!("<tool_call>[{{\"name\": {name}, \"arguments\": ")
        }
        (ToolCallFormat::Llama3 | ToolCallFormat::Json, _, None) => "{\"name\": \"".into(),
        (ToolCallFormat::Llama3, _, Some(name)) => {
            format!("{{\"name\": {name}, \"parameters\": ")
        }
        (ToolCallFormat::Json, _, Some(name)) => {
            format!("{{\"name\": {name}, \"arguments\": ")
        }
        (ToolCallFormat::Glm, None, _) => "<tool_call>".into(),
        (ToolCallFormat::Glm, Some(name), _) => format!("<tool_call>{name}\n"),
        (ToolCallFormat::Xml, None, _) => "<tool_call>\n<function=".into(),
        (ToolCallFormat::Xml, Some(name), _) => format!("<tool_call>\n<function={name}>\n"),
        (ToolCallFormat::Fence { tool, .. } | ToolCallFormat::Tag { tool, .. }, Some(name), _)
            if tool != name =>
        {
            return None;
        }
        (ToolCallFormat::Fence { language, .. }, ..) => format!("```{language}\n"),
        (ToolCallFormat::Tag { tag, .. }, ..) => format!("<{tag}>"),
        (ToolCallFormat::List { tag }, _, None) => format!("<{tag}>[{{\"name\": \""),
        (ToolCallFormat::List { tag }, _, Some(name)) => {
            format!("<{tag}>[{{\"name\": {name}, \"arguments\": ")
        }
        // The prompt ends with the mark of the recipient.
        (ToolCallFormat::Functionary, Some(name), _) => format!("{name}\n"),
        // Their markers are control tokens, which text cannot contain.
        _ => return None,
    })
}

/// Text with which every call begins, and what follows the arguments of one; `None` if the arguments of a
/// call are not JSON between two texts.
pub fn call_marks(format: &ToolCallFormat) -> Option<(String, String)> {
    let marks = match format {
        ToolCallFormat::Hermes => ("<tool_call>".into(), "}\n</tool_call>".into()),
        ToolCallFormat::SmolLm => ("<tool_call>".into(), "}]</tool_call>".into()),
        ToolCallFormat::List { tag } => (format!("<{tag}>"), format!("}}]</{tag}>")),
        _ => return None,
    };
    Some(marks)
}

/// Text after which a model has made one call; `None` if calls of the format may continue there.
pub fn call_end(format: &ToolCallFormat) -> Option<String> {
    match format {
        ToolCallFormat::Hermes
        | ToolCallFormat::SmolLm
        | ToolCallFormat::Glm
        | ToolCallFormat::Xml => Some("</tool_call>".into()),
        ToolCallFormat::Tag { tag, .. } | ToolCallFormat::List { tag } => Some(format!("</{tag}>")),
        ToolCallFormat::Muse => Some("</atem:function_calls>".into()),
        ToolCallFormat::MiniCpm => Some("</function>".into()),
        ToolCallFormat::Seed => Some("</seed:tool_call>".into()),
        _ => None,
    }
}

impl TurnReader {
    /// Creates a reader that has read only `options.opening`.
    pub fn new(options: TurnOptions) -> (Self, Vec<Piece>) {
        let mut reader = Self {
            decoder: StreamDecoder::default(),
            parser: TurnParser::new(&options.format, &options.tools),
            unchecked: String::new(),
            stopped: None,
            raw: String::new(),
            message: Message::new(Role::Assistant, ""),
            options,
        };
        let opened = reader.parser.push(&reader.options.opening);
        let pieces = reader.told(opened);
        (reader, pieces)
    }

    /// Reads the next tokens.
    pub fn push(&mut self, tokens: &[SampledToken], renderer: &dyn Renderer) -> Vec<Piece> {
        let mut text = String::new();
        for token in tokens {
            let bytes = renderer.token_bytes(token.id).unwrap_or_default();
            let format = &self.options.format;
            let mark = || std::str::from_utf8(&bytes).is_ok_and(|t| format.is_mark(t));
            if !renderer.is_special(token.id) || mark() {
                text.push_str(&self.decoder.push(&bytes));
            }
        }
        self.text(&text)
    }

    /// Ends the output and returns the rest.
    pub fn finish(&mut self) -> Vec<Piece> {
        let rest = self.decoder.finish();
        let mut pieces = self.text(&rest);
        let unchecked = std::mem::take(&mut self.unchecked);
        self.raw.push_str(&unchecked);
        let mut last = self.parser.push(&unchecked);
        last.extend(self.parser.finish());
        pieces.extend(self.told(last));
        pieces
    }

    /// The turn so far, as sent to the client.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Complete text of the output without control tokens and stop string.
    pub fn raw(&self) -> &str {
        &self.raw
    }

    /// The stop string that ended the text.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// Cuts the text at a stop string, and parses the certain part.
    fn text(&mut self, text: &str) -> Vec<Piece> {
        if self.stopped.is_some() || text.is_empty() {
            return Vec::new();
        }
        self.unchecked.push_str(text);
        let stops = self.options.stop.iter();
        let hit = stops
            .filter_map(|stop| self.unchecked.find(stop.as_str()).map(|at| (at, stop)))
            .min_by_key(|(at, _)| *at)
            .map(|(at, stop)| (at, stop.clone()));
        let ready = match hit {
            Some((at, stop)) => {
                self.stopped = Some(stop);
                let ready = self.unchecked[..at].to_owned();
                self.unchecked.clear();
                ready
            }
            None => {
                let keep = half_stop(&self.unchecked, &self.options.stop);
                let rest = self.unchecked.split_off(self.unchecked.len() - keep);
                std::mem::replace(&mut self.unchecked, rest)
            }
        };
        self.raw.push_str(&ready);
        let deltas = self.parser.push(&ready);
        self.told(deltas)
    }

    /// Adds deltas to the message, and converts them for the client.
    fn told(&mut self, deltas: Vec<TurnDelta>) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(deltas.len());
        for delta in deltas {
            match delta {
                TurnDelta::Text(text) => {
                    self.message.content.push_text(&text);
                    pieces.push(Piece::Text(text));
                }
                TurnDelta::Reasoning(text) => {
                    let reasoning = self.message.reasoning.get_or_insert_default();
                    reasoning.push_str(&text);
                    pieces.push(Piece::Reasoning(text));
                }
                TurnDelta::Call { index, call } => {
                    let made_up = || format!("{}{index}", self.options.call_prefix);
                    let call = ToolCall {
                        id: call.id.clone().unwrap_or_else(made_up),
                        name: call.name,
                        arguments: call.arguments.into(),
                    };
                    self.message.tool_calls.push(call.clone());
                    pieces.push(Piece::Call(call));
                }
                // Its text follows, so that the agent sees it.
                TurnDelta::Broken(_) => {}
            }
        }
        pieces
    }
}

/// Number of bytes at the end of `text` that may be the start of a stop string.
fn half_stop(text: &str, stops: &[String]) -> usize {
    let half = |stop: &String| {
        (1..stop.len().min(text.len() + 1))
            .rev()
            .find(|&n| stop.is_char_boundary(n) && text.ends_with(&stop[..n]))
    };
    stops.iter().filter_map(half).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reasoning;
    use proptest::prelude::*;

    fn options(calls: Option<ToolCallFormat>) -> TurnOptions {
        TurnOptions {
            format: TurnFormat {
                calls,
                reasoning: Some(Reasoning {
                    open: "<think>".into(),
                    close: "</think>".into(),
                    opened_by_prompt: false,
                }),
            },
            call_prefix: "call_".into(),
            ..TurnOptions::default()
        }
    }

    /// Feeds `text` in pieces that end at `cuts`.
    fn read(text: &str, cuts: &[usize], options: TurnOptions) -> (TurnReader, Vec<Piece>) {
        let (mut reader, mut pieces) = TurnReader::new(options);
        let mut at = 0;
        for &cut in cuts.iter().chain([&text.len()]) {
            if (at..=text.len()).contains(&cut) && text.is_char_boundary(cut) {
                pieces.extend(reader.text(&text[at..cut]));
                at = cut;
            }
        }
        pieces.extend(reader.finish());
        (reader, pieces)
    }

    #[test]
    fn calls_have_ids_and_come_out_when_they_are_complete() {
        let text = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
        let (mut reader, _) = TurnReader::new(options(Some(ToolCallFormat::Hermes)));
        let first = text.find("</tool_call>").unwrap() + "</tool_call>".len();
        let pieces = reader.text(&text[..first]);
        assert!(matches!(pieces.last(), Some(Piece::Call(_))), "{pieces:?}");
        reader.text(&text[first..]);
        reader.finish();
        let names: Vec<_> = reader
            .message()
            .tool_calls
            .iter()
            .map(|c| &c.name)
            .collect();
        assert_eq!(names, ["f", "g"]);
        assert_eq!(reader.message().content, "Let me see.");
        assert_eq!(reader.message().tool_calls[1].id, "call_1");
    }

    #[test]
    fn broken_calls_are_told_as_text() {
        let format = Some(ToolCallFormat::Hermes);
        let text = "<tool_call>\n{nope}\n</tool_call>";
        let (reader, _) = read(text, &[3, 7], options(format));
        assert_eq!(reader.message().content, text);
        assert!(reader.message().tool_calls.is_empty());
    }

    #[test]
    fn stop_strings_are_cut_off() {
        let stopping = |stops: &[&str]| TurnOptions {
            stop: stops.iter().map(|s| (*s).to_owned()).collect(),
            ..TurnOptions::default()
        };
        let (reader, _) = read("one é STOP two", &[5, 7, 9], stopping(&["x", "STOP"]));
        assert_eq!(reader.raw(), "one é ");
        assert_eq!(reader.stopped(), Some("STOP"));
        let (reader, _) = read("one STO", &[5], stopping(&["STOP"]));
        assert_eq!(reader.message().content, "one STO");
        assert_eq!(reader.stopped(), None);
    }

    #[test]
    fn a_forced_opening_is_a_part_of_the_call() {
        let cases = [
            (ToolCallFormat::Hermes, "{\"a\": 2}}\n</tool_call>"),
            (ToolCallFormat::SmolLm, "{\"a\": 2}}]</tool_call>"),
            (ToolCallFormat::Json, "{\"a\": 2}}"),
            (
                ToolCallFormat::List {
                    tag: "tool_calls".into(),
                },
                "{\"a\": 2}}]</tool_calls>",
            ),
            (ToolCallFormat::Functionary, "{\"a\": 2}"),
            (ToolCallFormat::Llama3, "{\"a\": 2}}"),
            (
                ToolCallFormat::Xml,
                "<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
            ),
        ];
        for (format, rest) in cases {
            let opening = forced_opening(&format, Some("f")).unwrap();
            let forced = TurnOptions {
                opening,
                ..options(Some(format.clone()))
            };
            let (reader, _) = read(rest, &[], forced);
            let calls = &reader.message().tool_calls;
            assert_eq!(calls.len(), 1, "{format:?}: {:?}", reader.message());
            assert_eq!(calls[0].name, "f");
            let a = &calls[0].arguments["a"];
            assert!(*a == 2 || *a == "2", "{format:?}: {a}");
        }
        let tag = ToolCallFormat::Tag {
            tag: "tool".into(),
            tool: "python".into(),
        };
        assert_eq!(forced_opening(&tag, Some("ruby")), None);
        assert_eq!(forced_opening(&ToolCallFormat::Mistral, None), None);
    }

    proptest! {
        /// Whatever the text and however it arrives, the pieces add up to the message, and the
        /// message does not depend on the cuts.
        #[test]
        fn cuts_change_nothing(
            parts in prop::collection::vec(prop::sample::select(vec![
                "a", " ", "\n", "<", "tool", "<tool>", "</tool>", "1 + 1", "<think>", "</think>",
                "é", "```", "STOP", "ST",
            ]), 0..14),
            cuts in prop::collection::vec(0usize..60, 0..8),
        ) {
            let text = parts.concat();
            let format = Some(ToolCallFormat::Tag { tag: "tool".into(), tool: "python".into() });
            let with_stop = TurnOptions { stop: vec!["STOP".into()], ..options(format) };
            let mut cuts = cuts;
            cuts.sort_unstable();
            let (whole, _) = read(&text, &[], with_stop.clone());
            let (reader, pieces) = read(&text, &cuts, with_stop);
            prop_assert_eq!(reader.message(), whole.message());
            let mut content = String::new();
            let mut reasoning = String::new();
            let mut calls = Vec::new();
            for piece in pieces {
                match piece {
                    Piece::Text(t) => content.push_str(&t),
                    Piece::Reasoning(t) => reasoning.push_str(&t),
                    Piece::Call(c) => calls.push(c),
                }
            }
            prop_assert_eq!(content.as_str(), &*reader.message().content.text());
            prop_assert_eq!(&reasoning, reader.message().reasoning.as_deref().unwrap_or(""));
            prop_assert_eq!(&calls, &reader.message().tool_calls);
        }
    }
}
