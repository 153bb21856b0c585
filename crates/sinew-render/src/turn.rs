//! A model's turn, taken apart while it arrives: reasoning, what it says, calls.
//!
//! Invariants: what the deltas add up to is the same however the text is cut into pieces; no
//! part of a mark is ever given out as text; a call is given out when it is whole and well-formed, and not
//! before, so that nobody acts on half a call. A broken call is given out as the text that it
//! is, with the reason beside it: nothing a model says is lost.

use crate::calls::{Marks, Region, Scan, Schemas, marks, read};
use crate::renderer::Renderer;
use crate::tokenizer::StreamDecoder;
use crate::tool_call::{MAX_CALLS, ParsedCall, ToolCallError, ToolCallFormat};
use serde_json::Value;
use sinew_types::{TokenId, ToolSpec};

/// How a model marks what it thinks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasoning {
    pub open: String,
    pub close: String,
    /// The generation prompt ends with the opening mark: the turn starts inside of it.
    pub opened_by_prompt: bool,
}

/// How a family of models writes its turns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnFormat {
    /// `None`: whatever the model writes is text.
    pub calls: Option<ToolCallFormat>,
    pub reasoning: Option<Reasoning>,
}

impl TurnFormat {
    /// Calls of a format, no reasoning.
    pub fn of_calls(format: ToolCallFormat) -> Self {
        Self {
            calls: Some(format),
            reasoning: None,
        }
    }

    /// What a chat template and its generation prompt tell about the turns to come.
    pub fn of_template(source: &str, generation_prompt: &str) -> Self {
        let pair = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
            .into_iter()
            .find(|(_, close)| source.contains(close));
        let reasoning = pair.map(|(open, close)| Reasoning {
            open: open.into(),
            close: close.into(),
            opened_by_prompt: generation_prompt
                .rfind(open)
                .is_some_and(|at| !generation_prompt[at..].contains(close)),
        });
        Self {
            calls: ToolCallFormat::of_template(source),
            reasoning,
        }
    }

    /// Whether a control token is part of how calls or thoughts are written, as `[TOOL_CALLS]`
    /// is, and must reach the parser.
    pub fn is_mark(&self, token: &str) -> bool {
        let reasoning = self
            .reasoning
            .as_ref()
            .is_some_and(|r| token == r.open || token == r.close);
        let inner = [
            "<｜tool▁sep｜>",
            "[ARGS]",
            "[CALL_ID]",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ];
        let calls = self.calls.as_ref().is_some_and(|format| {
            let marks = marks(format);
            inner.contains(&token)
                || marks.open.iter().any(|m| m == token)
                || marks.wrapper.iter().any(|m| m == token)
                || marks.stray.iter().any(|(_, close)| close == token)
        });
        reasoning || calls
    }
}

/// A piece of a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnDelta {
    Reasoning(String),
    Text(String),
    /// Calls are numbered from 0 in their order.
    Call {
        index: usize,
        call: ParsedCall,
    },
    /// What is wrong with a call whose text follows as [`TurnDelta::Text`].
    Broken(ToolCallError),
}

/// A turn, taken apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedTurn {
    /// What the model thought; `None` if it did not open a thought.
    pub reasoning: Option<String>,
    /// What stands outside of calls and reasoning. Whitespace beside those is dropped, a turn
    /// that is nothing but text is left as it is.
    pub content: String,
    pub calls: Vec<ParsedCall>,
    /// What is wrong with the calls that could not be read; their text is in `content`.
    pub broken: Vec<ToolCallError>,
}

impl ParsedTurn {
    /// Adds deltas in their order.
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

/// Takes a whole turn apart. `tools` give the types of arguments that are written without
/// quotes.
pub fn parse_turn(text: &str, format: &TurnFormat, tools: &[ToolSpec]) -> ParsedTurn {
    let mut parser = TurnParser::new(format, tools);
    let mut turn = ParsedTurn::default();
    turn.apply(parser.push(text));
    turn.apply(parser.finish());
    turn
}

#[derive(Debug)]
enum Mode {
    Text,
    Reasoning,
    Region(Scan),
}

/// What a mark in running text means.
enum Found {
    Open,
    Wrapper,
    Stray { open: String },
    Think,
}

/// Takes a turn apart piece by piece.
#[derive(Debug)]
pub struct TurnParser {
    format: TurnFormat,
    marks: Marks,
    schemas: Vec<(String, Value)>,
    mode: Mode,
    /// Text not yet decided on.
    buffer: String,
    /// Whitespace not yet given out: it is dropped if a call or the end follows it.
    held: String,
    /// Something else than whitespace was said.
    said: bool,
    /// A call or a thought was seen.
    structured: bool,
    /// Reasoning that was given out.
    thought: bool,
    calls: usize,
}

impl TurnParser {
    /// A parser for one turn.
    pub fn new(format: &TurnFormat, tools: &[ToolSpec]) -> Self {
        let inside = format
            .reasoning
            .as_ref()
            .is_some_and(|r| r.opened_by_prompt);
        Self {
            marks: format.calls.as_ref().map(marks).unwrap_or_default(),
            schemas: tools
                .iter()
                .map(|tool| (tool.name.clone(), tool.parameters.clone()))
                .collect(),
            format: format.clone(),
            mode: if inside { Mode::Reasoning } else { Mode::Text },
            buffer: String::new(),
            held: String::new(),
            said: false,
            structured: inside,
            thought: false,
            calls: 0,
        }
    }

    /// The next piece of the turn, control tokens that are marks spelled out.
    pub fn push(&mut self, text: &str) -> Vec<TurnDelta> {
        self.buffer.push_str(text);
        self.advance(false)
    }

    /// The turn has ended.
    pub fn finish(&mut self) -> Vec<TurnDelta> {
        let mut out = self.advance(true);
        if !self.structured && !self.held.is_empty() {
            out.push(TurnDelta::Text(std::mem::take(&mut self.held)));
        }
        self.held.clear();
        out
    }

    fn advance(&mut self, last: bool) -> Vec<TurnDelta> {
        let mut out = Vec::new();
        while match &self.mode {
            Mode::Reasoning => self.reasoning(last, &mut out),
            Mode::Text => self.text(last, &mut out),
            Mode::Region(_) => self.region(last, &mut out),
        } {}
        out
    }

    fn reasoning(&mut self, last: bool, out: &mut Vec<TurnDelta>) -> bool {
        let Some(marks) = &self.format.reasoning else {
            self.mode = Mode::Text;
            return true;
        };
        let close = marks.close.clone();
        let found = self.buffer.find(&close);
        let end = found.unwrap_or_else(|| match last {
            true => self.buffer.len(),
            false => self.buffer.len() - half_mark(&self.buffer, [close.as_str()].into_iter()),
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
            // A thought that says nothing is a thought all the same.
            out.push(TurnDelta::Reasoning(String::new()));
            self.thought = true;
        }
        self.held.clear();
        self.buffer.drain(..close.len());
        self.mode = Mode::Text;
        true
    }

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
            let keep = match last {
                true => 0,
                false => half_mark(&self.buffer, self.all_marks()),
            };
            self.say_upto(self.buffer.len() - keep, out);
            return false;
        };
        self.say_upto(at, out);
        match found {
            Found::Open => self.mode = Mode::Region(Scan::default()),
            Found::Wrapper => {
                self.structured = true;
                self.buffer.drain(..len);
            }
            Found::Think if self.said => self.say_upto(len, out),
            Found::Think => {
                self.structured = true;
                self.held.clear();
                self.buffer.drain(..len);
                self.mode = Mode::Reasoning;
            }
            Found::Stray { open } => {
                let close = self.buffer[..len].to_owned();
                out.push(TurnDelta::Broken(ToolCallError::Unopened { open, close }));
                self.say_upto(len, out);
            }
        }
        true
    }

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
            Region::Broken { used, error } => {
                out.push(TurnDelta::Broken(error));
                self.say_upto(used, out);
            }
        }
        self.mode = Mode::Text;
        true
    }

    /// Gives out the buffer's beginning as text; whitespace at its end is held back.
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

    fn all_marks(&self) -> impl Iterator<Item = &str> {
        let think = self.format.reasoning.iter().map(|r| r.open.as_str());
        let stray = self.marks.stray.iter().map(|(_, close)| close);
        let calls = self
            .marks
            .open
            .iter()
            .chain(&self.marks.wrapper)
            .chain(stray);
        calls.map(String::as_str).chain(think)
    }

    /// Position, length and meaning of the first mark in the buffer; of two at one place the
    /// longer.
    fn first_mark(&self) -> Option<(usize, usize, Found)> {
        let mut best: Option<(usize, usize, Found)> = None;
        let mut consider = |mark: &str, found: Found| {
            if let Some(at) = self.buffer.find(mark)
                && best.as_ref().is_none_or(|(b, len, _)| {
                    (at, std::cmp::Reverse(mark.len())) < (*b, std::cmp::Reverse(*len))
                })
            {
                best = Some((at, mark.len(), found));
            }
        };
        for mark in &self.marks.open {
            consider(mark, Found::Open);
        }
        for mark in &self.marks.wrapper {
            consider(mark, Found::Wrapper);
        }
        for (open, close) in &self.marks.stray {
            consider(close, Found::Stray { open: open.clone() });
        }
        if let Some(reasoning) = &self.format.reasoning {
            consider(&reasoning.open, Found::Think);
        }
        best
    }
}

/// Bytes at the end of a text that may be the beginning of a mark.
fn half_mark<'m>(text: &str, marks: impl Iterator<Item = &'m str>) -> usize {
    let half = |mark: &str| {
        (1..mark.len())
            .rev()
            .find(|&n| mark.is_char_boundary(n) && text.ends_with(&mark[..n]))
            .unwrap_or(0)
    };
    marks.map(half).max().unwrap_or(0)
}

/// Takes a turn apart from its tokens. Control tokens are left out unless they are marks.
#[derive(Debug)]
pub struct TurnStream {
    parser: TurnParser,
    decoder: StreamDecoder,
    format: TurnFormat,
}

impl TurnStream {
    /// A stream for one turn.
    pub fn new(format: &TurnFormat, tools: &[ToolSpec]) -> Self {
        Self {
            parser: TurnParser::new(format, tools),
            decoder: StreamDecoder::default(),
            format: format.clone(),
        }
    }

    /// The next sampled tokens.
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

    /// The turn has ended.
    pub fn finish(&mut self) -> Vec<TurnDelta> {
        let rest = self.decoder.finish();
        let mut out = self.parser.push(&rest);
        out.extend(self.parser.finish());
        out
    }
}

/// Takes the tokens of a whole turn apart.
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
