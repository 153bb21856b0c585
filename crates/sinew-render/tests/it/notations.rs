//! Calls in the notations of newer families, as their templates write them: whole, in pieces, and written
//! anew.

use proptest::prelude::*;
use serde_json::{Value, json};
use sinew_render::{
    ChatRenderer, ParsedCall, ParsedTurn, Reasoning, Renderer, ToolCallFormat, TurnFormat,
    TurnParser, parse_tokens, parse_turn, write_calls,
};
use sinew_types::ToolSpec;

/// Notation, turn as the template of its family writes it.
const TURNS: [(&str, &str); 20] = [
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
    (
        "apertus",
        "<|tools_prefix|>[{\"run\": {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}}]<|tools_suffix|>",
    ),
    (
        "list:tool_calls",
        "\n<tool_calls>[{\"name\": \"run\", \"arguments\": {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}, \
         \"id\": \"call_1\"}]</tool_calls>",
    ),
    (
        "list:tool_calls",
        "<tool_calls>\n{\"name\": \"run\", \"arguments\": {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}}\n</tool_calls>",
    ),
    (
        "list:TOOLCALL",
        "<TOOLCALL>[{\"name\": \"run\", \"arguments\": {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}}]</TOOLCALL>",
    ),
    (
        "functionary",
        ">>>run\n{\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}",
    ),
    (
        "gigachat",
        "<|function_call|>{\"name\": \"run\", \"arguments\": {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}}",
    ),
    (
        "gigachat",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"run\", \"arguments\": \
         {\"code\": \"1 < 2\\n\\\"x\\\"\", \"limit\": 5}}<|message_sep|>\n\n",
    ),
    (
        "hy3",
        "<tool_calls:opensource>\n<tool_call:opensource>run<tool_sep:opensource>\n\
         <arg_key:opensource>code</arg_key:opensource>\n\
         <arg_value:opensource>1 < 2\n\"x\"</arg_value:opensource>\n\
         <arg_key:opensource>limit</arg_key:opensource>\n<arg_value:opensource>5</arg_value:opensource>\n\
         </tool_call:opensource>\n</tool_calls:opensource>",
    ),
    (
        "kimi-k3",
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>\
         <|open|>call tool=\"run\" index=\"1\"<|sep|>\
         <|open|>argument key=\"code\" type=\"string\"<|sep|>1 < 2\n\"x\"<|close|>argument<|sep|>\
         <|open|>argument key=\"limit\" type=\"number\"<|sep|>5<|close|>argument<|sep|>\
         <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    (
        "minimax-m3",
        "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"run\">]<]minimax[>[<code>1 < 2\n\"x\"\
         ]<]minimax[>[</code>]<]minimax[>[<limit>5]<]minimax[>[</limit>]<]minimax[>[</invoke>\n\
         ]<]minimax[>[</tool_call>",
    ),
    (
        "muse",
        " to=run<|message|><atem:function_calls>\n<atem:invoke name=\"run\">\n\
         <atem:parameter name=\"code\">1 < 2\n\"x\"</atem:parameter>\n\
         <atem:parameter name=\"limit\">5</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    ),
];

/// Every notation of this file.
const NAMES: [&str; 16] = [
    "harmony",
    "kimi",
    "minimax",
    "minicpm",
    "seed",
    "gemma",
    "lfm",
    "cohere",
    "apertus",
    "list:tool_calls",
    "functionary",
    "gigachat",
    "hy3",
    "kimi-k3",
    "minimax-m3",
    "muse",
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
    for name in NAMES {
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

/// Notation, turn with one broken call.
const BROKEN: [(&str, &str); 20] = [
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
    (
        "apertus",
        "<|tools_prefix|>[{\"name\": \"run\", \"arguments\": {}}]<|tools_suffix|>",
    ),
    (
        "list:tool_calls",
        "<tool_calls>[{\"name\": \"run\"}]</tool_calls>",
    ),
    (
        "list:tool_calls",
        "<tool_calls>{\"name\": \"run\", \"arguments\": {}} {</tool_calls>",
    ),
    ("functionary", ">>>run\nnot JSON"),
    ("functionary", ">>>run\n{\"limit\": 5"),
    ("functionary", ">>>run"),
    ("gigachat", "<|function_call|>{nope}"),
    ("gigachat", "function call<|role_sep|>\n{\"name\": \"run\""),
    (
        "hy3",
        "<tool_call:opensource>run<tool_sep:opensource>\n<arg_key:opensource>code\
         </arg_key:opensource>\n</tool_call:opensource>",
    ),
    (
        "kimi-k3",
        "<|open|>call index=\"1\"<|sep|><|close|>call<|sep|>",
    ),
    (
        "minimax-m3",
        "]<]minimax[>[<invoke name=\"run\">]<]minimax[>[<code>1]<]minimax[>[</limit>]<]minimax[>[</invoke>",
    ),
    (
        "minimax-m3",
        "]<]minimax[>[<invoke name=\"run\">stray]<]minimax[>[</invoke>",
    ),
    ("muse", "<atem:invoke name=\"run\">stray</atem:invoke>"),
];

#[test]
fn broken_calls_of_newer_families_stay_text() {
    for (name, text) in BROKEN {
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

/// A turn with thinking between these marks, at every cut.
fn thinks(name: &str, marks: [&str; 2], opened_by_prompt: bool, text: &str) -> ParsedTurn {
    let [open, close] = marks.map(str::to_owned);
    let format = TurnFormat {
        reasoning: Some(Reasoning {
            open,
            close,
            opened_by_prompt,
        }),
        ..format(name)
    };
    let turn = parse_turn(text, &format, &tools());
    for cut in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
        assert_eq!(in_two(text, cut, &format), turn, "{name} at {cut}");
    }
    assert_eq!(turn.broken, [], "{name}: {text}");
    turn
}

#[test]
fn thinking_and_answers_of_newer_families_are_separated() {
    let muse = [" to=self<|message|>", "<|eom|><|start|>assistant"];
    let kimi = ["<|open|>think<|sep|>", "<|close|>think<|sep|>"];
    let minimax = ["<mm:think>", "</mm:think>"];
    for (name, marks, opened, text, thought) in [
        (
            "muse",
            muse,
            false,
            " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>391",
            Some("Hm."),
        ),
        ("muse", muse, false, " to=user<|message|>391", None),
        (
            "kimi-k3",
            kimi,
            true,
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>391<|close|>response<|sep|>\
             <|close|>message<|sep|>",
            Some("Hm."),
        ),
        // A model that does not think closes what it has not opened.
        ("minimax-m3", minimax, false, "</mm:think>391", None),
        (
            "minimax-m3",
            minimax,
            false,
            "<mm:think>Hm.</mm:think>391",
            Some("Hm."),
        ),
    ] {
        let turn = thinks(name, marks, opened, text);
        assert_eq!(turn.reasoning.as_deref(), thought, "{text}");
        assert_eq!(
            (turn.content.as_str(), turn.calls.len()),
            ("391", 0),
            "{text}"
        );
    }
    // A turn without calls has headers, too.
    let bare = |name: &str| format(name).without_calls();
    assert_eq!(bare("muse"), format("muse"));
    assert_eq!(bare("gigachat"), TurnFormat::default());
    // Behind text, both marks are text.
    for text in ["So </mm:think>391", "So <mm:think>391"] {
        assert_eq!(thinks("minimax-m3", minimax, false, text).content, text);
    }
}

/// The prompt of Functionary ends with the mark of the first recipient.
#[test]
fn a_turn_of_functionary_starts_with_its_recipient() {
    let format = format("functionary");
    let read = |text: &str| {
        let turn = parse_turn(text, &format, &tools());
        for cut in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
            assert_eq!(in_two(text, cut, &format), turn, "{text:?} at {cut}");
        }
        assert_eq!(turn.broken, [], "{text}");
        turn
    };
    let run = ("run".to_owned(), json!({"limit": 5}));
    let turn = read("run\n{\"limit\": 5}");
    assert_eq!((calls(&turn), &*turn.content), (vec![run.clone()], ""));
    let turn = read("all\nI compute.>>>run\n{\"limit\": 5}>>>run\n{\"limit\": 5}");
    let both = vec![run.clone(), run];
    assert_eq!((calls(&turn), &*turn.content), (both, "I compute."));
    let turn = read("python\nprint(1)\n");
    let code = vec![("python".to_owned(), json!({"code": "print(1)"}))];
    assert_eq!((calls(&turn), &*turn.content), (code, ""));
    for text in ["all\nType >>> 1 + 1 or >>>f(x)", "all\n391"] {
        let turn = read(text);
        assert_eq!((turn.calls.len(), &*turn.content), (0, &text[4..]));
    }
    for text in ["391", "", "It is 391.\n{}", "It\nis 391", "é"] {
        assert_eq!(read(text).content, text);
    }
}

/// Functionary 3.1 writes only the arguments of the tool `python`.
#[test]
fn arguments_of_a_declared_python_are_a_call() {
    let text = "<|python_tag|>{\"code\": \"1\"}<|python_tag|>{\"code\": \"2\"}";
    let mut tools = tools();
    let turn = parse_turn(text, &format("llama3"), &tools);
    assert_eq!((turn.calls.len(), turn.broken.len()), (0, 2), "{turn:?}");
    tools[0].name = "python".into();
    let turn = parse_turn(text, &format("llama3"), &tools);
    let call = |code: &str| ("python".to_owned(), json!({"code": code}));
    assert_eq!(calls(&turn), [call("1"), call("2")]);
    assert_eq!((&*turn.content, turn.broken.len()), ("", 0));
}

#[test]
fn several_calls_of_a_list_are_read() {
    let one = "{\"name\": \"run\", \"arguments\": {\"code\": \"} </tool_calls> {\"}}";
    let two = "{\"name\": \"run\", \"arguments\": {}}";
    let expected = [
        ("run".to_owned(), json!({"code": "} </tool_calls> {"})),
        ("run".to_owned(), json!({})),
    ];
    for body in [
        format!("[{one}, {two}]"),
        format!("\n{one}\n{two}\n"),
        format!("{one}, {two}"),
    ] {
        let text = format!("<tool_calls>{body}</tool_calls>");
        let turn = parse_turn(&text, &format("list:tool_calls"), &tools());
        assert_eq!(
            (calls(&turn), turn.broken.len()),
            (expected.to_vec(), 0),
            "{text}"
        );
    }
    let apertus = "<|tools_prefix|>[{\"run\": {}}, {\"run\": {}}]<|tools_suffix|>";
    let turn = parse_turn(apertus, &format("apertus"), &tools());
    assert_eq!(turn.calls.len(), 2, "{turn:?}");
}

/// Objects and lists of MiniMax M3 are elements, whose texts have the types of the schema.
#[test]
fn elements_inside_of_elements_have_the_types_of_the_schema() {
    let ns = "]<]minimax[>[";
    let item = |text: &str| format!("{ns}<item>{text}{ns}</item>");
    let parameters = json!({"type": "object", "properties": {
        "names": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "string"},
            "item": {"$ref": "#/$defs/Flag"}}},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "none": {"type": "array"},
        "empty": {"type": "object"},
    }, "$defs": {"Flag": {"type": "boolean"}}});
    let tool = ToolSpec {
        name: "run".into(),
        description: String::new(),
        parameters,
    };
    let row = format!("{}{}", item("1"), item("2"));
    let text = format!(
        "{ns}<invoke name=\"run\">{ns}<names>{}{}{ns}</names>\
         {ns}<at>{ns}<x>1.5{ns}</x>{ns}<y>2{ns}</y>{}{ns}</at>\
         {ns}<rows>{}{ns}</rows>{ns}<none>{ns}</none>{ns}<empty>{ns}</empty>{ns}<free>7{ns}</free>{ns}</invoke>",
        item("5"),
        item("b < c"),
        item("true"),
        item(&row),
    );
    let turn = parse_turn(&text, &format("minimax-m3"), &[tool]);
    assert_eq!(turn.broken, [], "{text}");
    let expected = json!({
        "names": ["5", "b < c"],
        "at": {"x": 1.5, "y": "2", "item": true},
        "rows": [[1, 2]],
        "none": [],
        "empty": {},
        "free": 7,
    });
    assert_eq!(calls(&turn), [("run".to_owned(), expected)]);
    let deep = format!("{ns}<a>").repeat(100) + &format!("{ns}</a>").repeat(100);
    let text = format!("{ns}<invoke name=\"run\">{deep}{ns}</invoke>");
    let turn = parse_turn(&text, &format("minimax-m3"), &[]);
    assert_eq!((turn.calls.len(), turn.broken.len()), (0, 1));
}

proptest! {
    /// The turn does not depend on how its text is split, for marks in any order.
    #[test]
    fn pieces_of_marks_in_any_order_are_read_alike(
        parts in prop::collection::vec(prop::sample::select(vec![
            " to=", "self", "user", "run", "<|message|>", "<|eom|>", "<|start|>assistant", "all", "\n",
            "<atem:function_calls>", "<atem:invoke name=\"run\">", "</atem:invoke>", ">>>", "{}", "{", "}",
            "<|function_call|>", "function call<|role_sep|>", "<|message_sep|>", "<|tools_prefix|>",
            "<|tools_suffix|>", "<tool_calls>", "</tool_calls>", "{\"name\": \"run\", \"arguments\": {}}",
            "<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>",
            "]<]minimax[>[", "<invoke name=\"run\">", "</invoke>", "<a>", "</a>",
            "<|open|>", "<|close|>", "<|sep|>", "call ", "call", "tool=\"run\"", "response",
            "<think>", "</think>", "é", " ", "[", "]", "python",
        ]), 0..16),
        cuts in prop::collection::vec(0usize..160, 0..10),
        which in 0usize..16,
        reasoning in any::<bool>(),
        opened_by_prompt in any::<bool>(),
    ) {
        let text = parts.concat();
        let mut format = format(NAMES[which]);
        let marks = match NAMES[which] {
            "muse" => (" to=self<|message|>", "<|eom|><|start|>assistant"),
            _ => ("<think>", "</think>"),
        };
        format.reasoning = reasoning.then(|| Reasoning {
            open: marks.0.into(),
            close: marks.1.into(),
            opened_by_prompt,
        });
        let whole = parse_turn(&text, &format, &tools());
        let mut parser = TurnParser::new(&format, &tools());
        let mut turn = ParsedTurn::default();
        let mut at = 0;
        let mut cuts = cuts;
        cuts.sort_unstable();
        for cut in cuts {
            if cut >= at && text.is_char_boundary(cut) && cut <= text.len() {
                turn.apply(parser.push(&text[at..cut]));
                at = cut;
            }
        }
        turn.apply(parser.push(&text[at..]));
        turn.apply(parser.finish());
        prop_assert_eq!(&turn, &whole, "{:?} {:?}", format, text);
        let size = whole.content.len() + whole.reasoning.as_ref().map_or(0, String::len);
        prop_assert!(size <= text.len());
    }
}
