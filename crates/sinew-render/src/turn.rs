//! Streaming parser for a turn of the model: reasoning, text and calls.
//!
//! ```text
//! "<think>2 + 2</think>I compute. <tool_call>{...}</tool_call>"
//!    Reasoning("2 + 2")   Text("I compute. ")   Call { index: 0, .. }
//! ```
//!
//! Invariants:
//! - The sum of all deltas does not depend on how the text is split.
//! - No part of a marker is returned as text.
//! - A call is returned when it is complete and valid, so that it can be executed at once.
//! - A broken call is returned as text, with the reason. No text of the model is lost.

use crate::calls::{marks, read};
use crate::format::TurnFormat;
use crate::marked::Schemas;
use crate::region::{Marks, Region, Scan};
use crate::renderer::Renderer;
use crate::tokenizer::StreamDecoder;
use crate::tool_call::{MAX_CALLS, ParsedCall, ToolCallError};
use serde_json::Value;
use sinew_types::{TokenId, ToolSpec};

/// A part of a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnDelta {
    /// Reasoning text.
    Reasoning(String),
    /// Text outside of reasoning and calls.
    Text(String),
    /// A complete call. Calls are numbered from 0.
    Call { index: usize, call: ParsedCall },
    /// Error of a call. Its text follows as [`TurnDelta::Text`].
    Broken(ToolCallError),
}

/// A parsed turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedTurn {
    /// Reasoning. `None` if the turn has none.
    pub reasoning: Option<String>,
    /// Text outside of calls and reasoning. Whitespace next to them is removed. A turn of only text is
    /// unchanged.
    pub content: String,
    /// Valid calls in order.
    pub calls: Vec<ParsedCall>,
    /// Errors of invalid calls. Their text is in `content`.
    pub broken: Vec<ToolCallError>,
}

impl ParsedTurn {
    /// Appends deltas in order.
    pub fn apply(&mut self, deltas: impl IntoIterator<Item = TurnDelta>) {
        for delta in deltas {
            match delta {
                TurnDelta::Reasoning(text) => {
                    self.reasoning.get_or_insert_default().push_str(&text);
                }
                TurnDelta::Text(text) => self.content.push_str(&text),
                TurnDelta::Call { call, .. } => self.calls.push(call),
                TurnDelta::Broken(error) => self.broken.push(error),
            }
        }
    }
}

/// Parses a complete turn. `tools` define the types of unquoted arguments.
pub fn parse_turn(text: &str, format: &TurnFormat, tools: &[ToolSpec]) -> ParsedTurn {
    let mut parser = TurnParser::new(format, tools);
    let mut turn = ParsedTurn::default();
    turn.apply(parser.push(text));
    turn.apply(parser.finish());
    turn
}

/// State of the parser.
#[derive(Debug)]
enum Mode {
    /// The text is outside of reasoning and calls.
    Text,
    /// The text is inside of reasoning.
    Reasoning,
    /// The text is at the start of a marker of calls.
    Region(Scan),
}

/// Kind of a marker in running text.
enum MarkerKind {
    /// Start of a call.
    Open,
    /// Text around a list of calls.
    Wrapper,
    Stray {
        open: String,
    },
    /// Start of reasoning.
    Think,
    /// End of reasoning that the turn has not started.
    Thought,
}

/// Streaming parser of a turn.
#[derive(Debug)]
pub struct TurnParser {
    /// Notation of the turn.
    format: TurnFormat,
    /// Markers of the call format.
    marks: Marks,
    /// Parameter schemas by tool name.
    schemas: Vec<(String, Value)>,
    /// Current state.
    mode: Mode,
    /// Text that was not classified yet.
    buffer: String,
    /// Whitespace that is dropped if a call or the end of the turn follows.
    held: String,
    /// True after text other than whitespace.
    said: bool,
    /// True after a call or reasoning.
    structured: bool,
    /// True after reasoning text.
    thought: bool,
    /// Number of calls so far.
    calls: usize,
}

impl TurnParser {
    /// Creates a parser for one turn.
    pub fn new(format: &TurnFormat, tools: &[ToolSpec]) -> Self {
        let inside = format
            .reasoning
            .as_ref()
            .is_some_and(|r| r.opened_by_prompt);
        let marks = format.calls.as_ref().map(marks).unwrap_or_default();
        let mode = if inside {
            Mode::Reasoning
        } else if marks.addressed {
            Mode::Region(Scan::default())
        } else {
            Mode::Text
        };
        Self {
            marks,
            mode,
            schemas: tools
                .iter()
                .map(|tool| (tool.name.clone(), tool.parameters.clone()))
                .collect(),
            format: format.clone(),
            buffer: String::new(),
            held: String::new(),
            said: false,
            structured: inside,
            thought: false,
            calls: 0,
        }
    }

    /// Parses the next text. Control tokens that are markers must be included as text.
    pub fn push(&mut self, text: &str) -> Vec<TurnDelta> {
        self.buffer.push_str(text);
        self.advance(false)
    }

    /// Ends the turn and returns the rest.
    pub fn finish(&mut self) -> Vec<TurnDelta> {
        let mut out = self.advance(true);
        if !self.structured && !self.held.is_empty() {
            out.push(TurnDelta::Text(std::mem::take(&mut self.held)));
        }
        self.held.clear();
        out
    }

    /// Parses the buffer as far as possible.
    fn advance(&mut self, last: bool) -> Vec<TurnDelta> {
        let mut out = Vec::new();
        while match &self.mode {
            Mode::Reasoning => self.reasoning(last, &mut out),
            Mode::Text => self.text(last, &mut out),
            Mode::Region(_) => self.region(last, &mut out),
        } {}
        out
    }

    /// Parses reasoning. Returns true if the state has changed.
    fn reasoning(&mut self, last: bool, out: &mut Vec<TurnDelta>) -> bool {
        let Some(marks) = &self.format.reasoning else {
            self.mode = Mode::Text;
            return true;
        };
        let close = marks.close.clone();
        let found = self.buffer.find(&close);
        let end = found.unwrap_or_else(|| {
            if last {
                self.buffer.len()
            } else {
                self.buffer.len() - half_mark(&self.buffer, [close.as_str()].into_iter())
            }
        });
        let text: String = self.buffer.drain(..end).collect();
        self.held.push_str(&text);
        let said = self.held.trim_end().len();
        if said > 0 {
            let whitespace = self.held.split_off(said);
            let text = std::mem::replace(&mut self.held, whitespace);
            let text = if self.thought {
                &text
            } else {
                text.trim_start()
            };
            out.push(TurnDelta::Reasoning(text.to_owned()));
            self.thought = true;
        }
        if found.is_none() {
            if last {
                self.held.clear();
            }
            return false;
        }
        if !self.thought {
            // Empty reasoning is also reported.
            out.push(TurnDelta::Reasoning(String::new()));
            self.thought = true;
        }
        self.held.clear();
        self.buffer.drain(..close.len());
        self.mode = Mode::Text;
        true
    }

    /// Parses text up to the next marker. Returns true if the state has changed.
    fn text(&mut self, last: bool, out: &mut Vec<TurnDelta>) -> bool {
        if self.marks.json_start && !self.said {
            if self.calls > 0 {
                let rest = self
                    .buffer
                    .trim_start_matches([';', ',', ' ', '\n', '\t', '\r']);
                self.buffer = rest.to_owned();
            }
            let rest = self.buffer.trim_start();
            if rest.starts_with(['{', '[']) {
                let at = self.buffer.len() - rest.len();
                self.say_upto(at, out);
                self.mode = Mode::Region(Scan::default());
                return true;
            }
        }
        let Some((at, len, found)) = self.first_mark() else {
            let keep = if last {
                0
            } else {
                half_mark(&self.buffer, self.all_marks())
            };
            self.say_upto(self.buffer.len() - keep, out);
            return false;
        };
        self.say_upto(at, out);
        match found {
            MarkerKind::Open => self.mode = Mode::Region(Scan::default()),
            MarkerKind::Wrapper => {
                self.structured = true;
                self.buffer.drain(..len);
            }
            MarkerKind::Think => self.think(len, out),
            MarkerKind::Thought if self.said => self.say_upto(len, out),
            MarkerKind::Thought => {
                self.structured = true;
                self.held.clear();
                self.buffer.drain(..len);
            }
            MarkerKind::Stray { open } => {
                let close = self.buffer[..len].to_owned();
                out.push(TurnDelta::Broken(ToolCallError::Unopened { open, close }));
                self.say_upto(len, out);
            }
        }
        true
    }

    /// Starts reasoning by a mark of this length. Behind text, the mark is text.
    fn think(&mut self, len: usize, out: &mut Vec<TurnDelta>) {
        if self.said {
            self.say_upto(len, out);
            return;
        }
        self.structured = true;
        self.held.clear();
        self.buffer.drain(..len);
        self.mode = Mode::Reasoning;
    }

    /// Parses a call. Returns true if the state has changed.
    fn region(&mut self, last: bool, out: &mut Vec<TurnDelta>) -> bool {
        let (Mode::Region(scan), Some(format)) = (&mut self.mode, &self.format.calls) else {
            self.mode = Mode::Text;
            return true;
        };
        let schemas: &Schemas = &self.schemas;
        match read(format, &self.buffer, scan, last, schemas) {
            Region::More => return false,
            Region::Calls { used, calls } if self.calls + calls.len() <= MAX_CALLS => {
                self.buffer.drain(..used);
                self.structured = true;
                for call in calls {
                    let index = self.calls;
                    out.push(TurnDelta::Call { index, call });
                    self.calls += 1;
                }
            }
            Region::Calls { used, .. } => {
                out.push(TurnDelta::Broken(ToolCallError::TooMany));
                self.say_upto(used, out);
            }
            Region::Text { used } => self.say_upto(used, out),
            Region::Thought { used } => {
                self.mode = Mode::Text;
                self.think(used, out);
                return true;
            }
            Region::Broken { used, error } => {
                out.push(TurnDelta::Broken(error));
                self.say_upto(used, out);
            }
        }
        self.mode = Mode::Text;
        true
    }

    /// Returns the start of the buffer as text. Holds back whitespace at its end.
    fn say_upto(&mut self, end: usize, out: &mut Vec<TurnDelta>) {
        self.held.extend(self.buffer.drain(..end));
        let said = self.held.trim_end().len();
        if said == 0 {
            return;
        }
        let whitespace = self.held.split_off(said);
        let mut text = std::mem::replace(&mut self.held, whitespace);
        if !self.said && self.structured {
            text = text.trim_start().to_owned();
        }
        self.said = true;
        out.push(TurnDelta::Text(text));
    }

    /// All markers of calls and reasoning.
    fn all_marks(&self) -> impl Iterator<Item = &str> {
        let reasoning = self.format.reasoning.iter();
        let think = reasoning.flat_map(|r| [r.open.as_str(), r.close.as_str()]);
        let stray = self.marks.stray.iter().map(|(_, close)| close);
        let calls = self
            .marks
            .open
            .iter()
            .chain(&self.marks.wrapper)
            .chain(stray);
        calls.map(String::as_str).chain(think)
    }

    /// Position, length and kind of the first marker in the buffer. The longer of two markers at one position
    /// counts.
    fn first_mark(&self) -> Option<(usize, usize, MarkerKind)> {
        let mut best: Option<(usize, usize, MarkerKind)> = None;
        let mut consider = |mark: &str, found: MarkerKind| {
            if let Some(at) = self.buffer.find(mark)
                && best.as_ref().is_none_or(|(b, len, _)| {
                    (at, std::cmp::Reverse(mark.len())) < (*b, std::cmp::Reverse(*len))
                })
            {
                best = Some((at, mark.len(), found));
            }
        };
        for mark in &self.marks.open {
            consider(mark, MarkerKind::Open);
        }
        for mark in &self.marks.wrapper {
            consider(mark, MarkerKind::Wrapper);
        }
        for (open, close) in &self.marks.stray {
            consider(close, MarkerKind::Stray { open: open.clone() });
        }
        if let Some(reasoning) = &self.format.reasoning {
            consider(&reasoning.open, MarkerKind::Think);
            if !self.said && !self.structured {
                consider(&reasoning.close, MarkerKind::Thought);
            }
        }
        best
    }
}

/// Number of bytes at the end of `text` that may be the start of a marker.
fn half_mark<'m>(text: &str, marks: impl Iterator<Item = &'m str>) -> usize {
    let half = |mark: &str| {
        (1..mark.len())
            .rev()
            .find(|&n| mark.is_char_boundary(n) && text.ends_with(&mark[..n]))
            .unwrap_or(0)
    };
    marks.map(half).max().unwrap_or(0)
}

/// Streaming parser of a turn's tokens. Control tokens that are not markers are ignored.
#[derive(Debug)]
pub struct TurnStream {
    /// Parser of the text.
    parser: TurnParser,
    /// Decoder of the tokens.
    decoder: StreamDecoder,
    /// Notation of the turn.
    format: TurnFormat,
}

impl TurnStream {
    /// Creates a stream for one turn.
    pub fn new(format: &TurnFormat, tools: &[ToolSpec]) -> Self {
        Self {
            parser: TurnParser::new(format, tools),
            decoder: StreamDecoder::default(),
            format: format.clone(),
        }
    }

    /// Parses the next sampled tokens.
    pub fn push(&mut self, renderer: &dyn Renderer, tokens: &[TokenId]) -> Vec<TurnDelta> {
        let mut text = String::new();
        for &id in tokens {
            let bytes = renderer.token_bytes(id).unwrap_or_default();
            let mark = || std::str::from_utf8(&bytes).is_ok_and(|t| self.format.is_mark(t));
            if !renderer.is_special(id) || mark() {
                text.push_str(&self.decoder.push(&bytes));
            }
        }
        self.parser.push(&text)
    }

    /// Ends the turn and returns the rest.
    pub fn finish(&mut self) -> Vec<TurnDelta> {
        let rest = self.decoder.finish();
        let mut out = self.parser.push(&rest);
        out.extend(self.parser.finish());
        out
    }
}

/// Parses the tokens of a complete turn.
pub fn parse_tokens(
    renderer: &dyn Renderer,
    tokens: &[TokenId],
    format: &TurnFormat,
    tools: &[ToolSpec],
) -> ParsedTurn {
    let mut stream = TurnStream::new(format, tools);
    let mut turn = ParsedTurn::default();
    turn.apply(stream.push(renderer, tokens));
    turn.apply(stream.finish());
    turn
}
