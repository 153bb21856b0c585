//! Calls in the notations of newer families, as their templates write them: whole, in pieces, and written anew.

use serde_json::{Value, json};
use sinew_render::{
    ChatRenderer, ParsedCall, ParsedTurn, Renderer, ToolCallFormat, TurnFormat, TurnParser,
    parse_tokens, parse_turn, write_calls,
};
use sinew_types::ToolSpec;

/// Notation, turn as the template of its family writes it.
const TURNS: [(&str, &str); 9] = [
    (
        "harmony",
        " to=functions.run<|channel|>commentary json<|message|>{\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}<|call|>",
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.run <|constrain|>json<|message|>{\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>\
         {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "minimax",
        "\n<minimax:tool_call>\n<invoke name=\"run\">\n<parameter name=\"code\">1 < 2\n\"x\"</parameter>\n\
         <parameter name=\"limit\">5</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "minicpm",
        "<function name=\"run\"><param name=\"code\"><![CDATA[1 < 2\n\"x\"]]></param><param name=\"limit\">5</param>\
         </function>",
    ),
    (
        "seed",
        "<seed:tool_call>\n<function=run>\n<parameter=code>1 < 2\n\"x\"</parameter>\n<parameter=limit>5</parameter>\n\
         </function>\n</seed:tool_call>",
    ),
    (
        "gemma",
        "<|tool_call>call:run{code:<|\"|>1 < 2\n\"x\"<|\"|>,limit:5}<tool_call|>",
    ),
    (
        "lfm",
        "<|tool_call_start|>[run(code='1 < 2\n\"x\"', limit=5)]<|tool_call_end|>",
    ),
    (
        "cohere",
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"run\", \"parameters\": \
         {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}}\n]<|END_ACTION|>",
    ),
];

fn tools() -> Vec<ToolSpec> {
    vec![ToolSpec {
        name: "run".into(),
        description: String::new(),
        parameters: json!({"type": "object", "properties": {
            "code": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"type": "object"},
        }}),
    }]
}

fn format(name: &str) -> TurnFormat {
    TurnFormat::of_calls(name.parse().unwrap())
}

/// Names and arguments of the calls of a turn.
fn calls(turn: &ParsedTurn) -> Vec<(String, Value)> {
    let calls = turn.calls.iter();
    calls
        .map(|c| (c.name.clone(), c.arguments.clone().into()))
        .collect()
}

fn in_two(text: &str, cut: usize, format: &TurnFormat) -> ParsedTurn {
    let mut parser = TurnParser::new(format, &tools());
    let mut turn = ParsedTurn::default();
    turn.apply(parser.push(&text[..cut]));
    turn.apply(parser.push(&text[cut..]));
    turn.apply(parser.finish());
    turn
}

#[test]
fn calls_of_newer_families_are_read_however_they_arrive() {
    let expected = vec![(
        "run".to_owned(),
        json!({"code": "1 < 2\n\"x\"", "limit": 5}),
    )];
    for (name, text) in TURNS {
        let format = format(name);
        let turn = parse_turn(text, &format, &tools());
        assert_eq!(turn.broken, [], "{name}");
        assert_eq!(calls(&turn), expected, "{name}: {text}");
        assert_eq!(turn.content, "", "{name}");
        for cut in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
            assert_eq!(in_two(text, cut, &format), turn, "{name} at {cut}");
        }
        let said = format!("So.{text}");
        let turn = parse_turn(&said, &format, &tools());
        assert_eq!(
            (calls(&turn), &*turn.content),
            (expected.clone(), "So."),
            "{name}"
        );
    }
}

#[test]
fn written_calls_of_newer_families_are_read_as_themselves() {
    let arguments = json!({
        "code": "a 'b' \"c\"\n  <d> & é",
        "limit": -3,
        "deep": {"x": [1, true, null, "y"], "z": {}},
    });
    let call = ParsedCall::new("run", arguments.as_object().unwrap().clone());
    let empty = ParsedCall::new("run", Default::default());
    for name in [
        "harmony", "kimi", "minimax", "minicpm", "seed", "gemma", "lfm", "cohere",
    ] {
        let kind: ToolCallFormat = name.parse().unwrap();
        for list in [vec![call.clone()], vec![call.clone(), empty.clone()]] {
            let text = write_calls(&list, &kind);
            let turn = parse_turn(&text, &format(name), &tools());
            assert_eq!(turn.broken, [], "{name}: {text}");
            let written = ParsedTurn {
                calls: list,
                ..ParsedTurn::default()
            };
            assert_eq!(calls(&turn), calls(&written), "{name}: {text}");
        }
    }
}

#[test]
fn broken_calls_of_newer_families_stay_text() {
    for (name, text) in [
        (
            "harmony",
            " to=functions.run<|channel|>commentary json<|message|>{nope<|call|>",
        ),
        (
            "kimi",
            "<|tool_call_begin|>functions.run:0{}<|tool_call_end|>",
        ),
        ("minimax", "<invoke name=\"run\">stray</invoke>"),
        ("gemma", "<|tool_call>run{code:5}<tool_call|>"),
        ("gemma", "<|tool_call>call:run{code:5"),
        ("lfm", "<|tool_call_start|>[run(5)]<|tool_call_end|>"),
        (
            "cohere",
            "<|START_ACTION|>[{\"parameters\": {}}]<|END_ACTION|>",
        ),
    ] {
        let turn = parse_turn(text, &format(name), &tools());
        assert_eq!(
            (turn.calls.len(), turn.broken.len()),
            (0, 1),
            "{name}: {turn:?}"
        );
        assert_eq!(turn.content, text, "{name}");
    }
}

/// A turn of gpt-oss is several messages: thinking, a call or an answer. Their headers are not content.
#[test]
fn channels_of_gpt_oss_are_thinking_text_and_calls() {
    let source = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>\
                  {% endfor %}{# <|channel|>analysis<|message|> <|return|> <|call|> <|constrain|> #}\
                  {% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let renderer = ChatRenderer::of_template(source, Default::default()).unwrap();
    let format = renderer.turn_format();
    assert_eq!(format.calls, Some(ToolCallFormat::Harmony));
    let read = |text: &str| {
        let ids = renderer.tokenizer().encode(text).unwrap();
        parse_tokens(&renderer, &ids, &format, &tools())
    };
    let turn = read(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>391<|return|>",
    );
    assert_eq!(turn.reasoning.as_deref(), Some("Hm."));
    assert_eq!(turn.content, "391");
    let turn = read(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.run \
         <|constrain|>json<|message|>{\"limit\": 5}<|call|>",
    );
    assert_eq!(turn.reasoning.as_deref(), Some("Hm."));
    assert_eq!(calls(&turn), [("run".to_owned(), json!({"limit": 5}))]);
    assert_eq!((turn.content.as_str(), turn.broken.len()), ("", 0));
    // `<|end|>` closes messages and ends no generation.
    let stops = renderer.decode_with_special(renderer.stop_ids());
    assert!(
        stops.contains("<|return|>") && !stops.contains("<|end|>"),
        "{stops}"
    );
    let closing = renderer.decode_with_special(renderer.closing_ids());
    assert_eq!(closing, "<|end|>");
}
