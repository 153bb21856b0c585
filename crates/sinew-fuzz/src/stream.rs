//! Parsers of streams: tool calls in the text of a model, and server-sent events.
//!
//! Both get their input in pieces whose ends mean nothing: tokens of a model, packets of a server. A parser
//! that forgets a part of its state at the end of a piece gives other results for other pieces.

use crate::choices;
use sinew_engines::SseParser;
use sinew_render::{
    MAX_CALLS, ParsedTurn, Reasoning, ToolCallFormat, TurnFormat, TurnParser, parse_turn,
    write_calls,
};
use sinew_types::ToolSpec;

/// Markers of the formats.
pub(crate) const CALL_WORDS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    "<arg_key>",
    "</arg_value>",
    "```json",
    "```python",
    "<think>",
    "</think>",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
    " to=functions.f",
    "<|channel|>commentary to=functions.f",
    "<|message|>",
    "<|call|>",
    "<|tool_call_begin|>functions.f:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<invoke name=\"f\">",
    "<parameter name=\"a\">",
    "</invoke>",
    "<function name=\"f\">",
    "<param name=\"a\">",
    "</param>",
    "<seed:tool_call>",
    "<|tool_call>call:f{a:<|\"|>",
    "<tool_call|>",
    "<|tool_call_start|>[f(a=1)]",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|tools_prefix|>[{\"f\": {\"a\": 1}}]",
    "<|tools_suffix|>",
    ">>>f\n",
    ">>>all\n",
    "<|function_call|>",
    "function call<|role_sep|>\n",
    "<tool_call:opensource>f<tool_sep:opensource>",
    "<arg_key:opensource>a</arg_key:opensource>",
    "<arg_value:opensource>",
    "</tool_call:opensource>",
    "<|open|>call tool=\"f\"<|sep|>",
    "<|open|>argument key=\"a\" type=\"number\"<|sep|>",
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    "]<]minimax[>[<invoke name=\"f\">",
    "]<]minimax[>[<a>",
    "]<]minimax[>[</a>",
    "]<]minimax[>[</invoke>",
    " to=f<|message|>",
    "<atem:invoke name=\"f\">",
    "<atem:parameter name=\"a\">",
    "</atem:invoke>",
    "<tool_calls>",
    "</tool_calls>",
];

/// Format of calls for a byte. Every format has one.
fn format(choice: u8) -> ToolCallFormat {
    let text = [
        "hermes",
        "smollm",
        "llama3",
        "mistral",
        "deepseek",
        "glm",
        "xml",
        "json",
        "harmony",
        "kimi",
        "kimi-k3",
        "minimax",
        "minimax-m3",
        "minicpm",
        "seed",
        "gemma",
        "lfm",
        "cohere",
        "apertus",
        "functionary",
        "gigachat",
        "hy3",
        "muse",
        "list:tool_calls",
        "fence:python:run",
        "tag:code:run",
    ];
    let named = text[usize::from(choice) % text.len()].parse();
    named.expect("the name of a format")
}

/// Lengths of the pieces of a stream, from 1 to 16, in a cycle.
fn lengths(choice: [u8; 2]) -> impl Iterator<Item = usize> {
    let [a, b] = choice.map(|c| (usize::from(c & 15) + 1, usize::from(c >> 4) + 1));
    [a.0, a.1, b.0, b.1].into_iter().cycle()
}

/// Tool calls in the text of a turn. The first two bytes choose format and reasoning, the next two how the
/// text is split.
///
/// - The turn does not depend on how its text is split.
/// - It has no more calls than the limit, and no text that the model has not written.
/// - A format without markers leaves text unchanged.
/// - Calls of the JSON formats are written and read again as the same calls.
pub(crate) fn tool_calls(data: &[u8]) {
    let ([kind, reasoning, a, b], rest) = choices::<4>(data);
    let text = String::from_utf8_lossy(rest);
    let calls = format(kind);
    let tools = [ToolSpec {
        name: "f".into(),
        description: "a tool".into(),
        parameters: serde_json::json!({"type": "object", "properties": {"a": {"type": "integer"}}}),
    }];
    let format = TurnFormat {
        reasoning: (reasoning & 1 != 0).then(|| Reasoning {
            open: "<think>".into(),
            close: "</think>".into(),
            opened_by_prompt: reasoning & 2 != 0,
        }),
        calls: Some(calls.clone()),
    };
    let whole = parse_turn(&text, &format, &tools);
    let mut parser = TurnParser::new(&format, &tools);
    let mut pieces = ParsedTurn::default();
    let (mut rest, mut lengths) = (&*text, lengths([a, b]));
    while !rest.is_empty() {
        let end = rest.char_indices().nth(lengths.next().unwrap_or(1));
        let (piece, more) = rest.split_at(end.map_or(rest.len(), |(at, _)| at));
        pieces.apply(parser.push(piece));
        rest = more;
    }
    pieces.apply(parser.finish());
    assert_eq!(pieces, whole, "the turn depends on how its text is split");
    assert!(
        whole.calls.len() <= MAX_CALLS,
        "{} calls",
        whole.calls.len()
    );
    let size = whole.content.len() + whole.reasoning.as_ref().map_or(0, String::len);
    assert!(size <= text.len(), "text that the model has not written");
    let plain = TurnFormat::default();
    let turn = parse_turn(&text, &plain, &tools);
    assert_eq!(turn.content, text, "a format without markers changes text");
    let code = matches!(
        calls,
        ToolCallFormat::Fence { .. } | ToolCallFormat::Tag { .. }
    );
    let json = matches!(
        calls,
        ToolCallFormat::Hermes
            | ToolCallFormat::SmolLm
            | ToolCallFormat::Mistral
            | ToolCallFormat::List { .. }
    );
    if json && !code && !whole.calls.is_empty() {
        let written = write_calls(&whole.calls, &calls);
        let again = parse_turn(&written, &TurnFormat::of_calls(calls), &tools);
        let call = |turn: &ParsedTurn| {
            let calls = turn.calls.iter();
            calls
                .map(|c| (c.name.clone(), c.arguments.clone()))
                .collect::<Vec<_>>()
        };
        assert_eq!(call(&again), call(&whole), "{written}");
    }
}

/// Server-sent events. The first two bytes choose how the stream is split.
///
/// - Events do not depend on how the stream is split, nor does its state at the end.
/// - They have no more bytes than the stream.
/// - They are written and read again as the same events.
pub(crate) fn sse(data: &[u8]) {
    let (choice, stream) = choices::<2>(data);
    let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut parser, mut events) = (SseParser::default(), Vec::new());
        for piece in pieces {
            let pushed = parser.push(piece, &mut events);
            pushed.expect("events below the limit");
        }
        (events, parser.is_cut())
    };
    let whole = read(&mut std::iter::once(stream));
    let (mut rest, mut lengths) = (stream, lengths(choice));
    let mut pieces = std::iter::from_fn(|| {
        let len = lengths.next()?.min(rest.len());
        let (piece, more) = rest.split_at(len);
        rest = more;
        (!piece.is_empty()).then_some(piece)
    });
    assert_eq!(
        read(&mut pieces),
        whole,
        "events depend on how the stream is split"
    );
    let bytes: usize = whole.0.iter().map(Vec::len).sum();
    assert!(bytes <= stream.len(), "bytes that the server has not sent");
    let mut written = Vec::new();
    for event in &whole.0 {
        for line in event.split(|byte| *byte == b'\n') {
            written.extend_from_slice(b"data: ");
            written.extend_from_slice(line);
            written.push(b'\n');
        }
        written.push(b'\n');
    }
    assert_eq!(
        read(&mut std::iter::once(written.as_slice())),
        (whole.0, false)
    );
}
