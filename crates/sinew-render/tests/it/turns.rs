//! Parsing of turns: all formats, complete and streamed, valid and invalid.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use sinew_render::{
    MAX_CALLS, ParsedCall, ParsedTurn, Reasoning, ToolCallError, ToolCallFormat, TurnDelta,
    TurnFormat, TurnParser, parse_turn, write_calls,
};
use sinew_types::ToolSpec;

fn formats() -> Vec<ToolCallFormat> {
    let names = [
        "hermes", "smollm", "llama3", "mistral", "deepseek", "glm", "xml", "json",
    ];
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn thinking(format: &ToolCallFormat, opened_by_prompt: bool) -> TurnFormat {
    TurnFormat {
        calls: Some(format.clone()),
        reasoning: Some(Reasoning {
            open: "<think>".into(),
            close: "</think>".into(),
            opened_by_prompt,
        }),
    }
}

fn call(name: &str, arguments: Value) -> ParsedCall {
    ParsedCall::new(name, arguments.as_object().unwrap().clone())
}

fn calls(format: &str, text: &str) -> Vec<ParsedCall> {
    let turn = parse_turn(
        text,
        &TurnFormat::of_calls(format.parse().unwrap()),
        &tools(),
    );
    assert_eq!(turn.broken, [], "{format}: {text}");
    turn.calls
}

fn tools() -> Vec<ToolSpec> {
    vec![ToolSpec {
        name: "f".into(),
        description: String::new(),
        parameters: json!({"type": "object", "properties": {
            "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"},
            "l": {"type": "array"}, "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "m": {"type": ["string", "null"]},
        }}),
    }]
}

#[test]
fn all_formats_are_parsed() {
    let f = || call("f", json!({"s": "1 < 2", "n": 3}));
    let json = r#"{"name": "f", "arguments": {"s": "1 < 2", "n": 3}}"#;
    let args = r#"{"s": "1 < 2", "n": 3}"#;
    let cases = [
        ("hermes", format!("<tool_call>\n{json}\n</tool_call>")),
        ("smollm", format!("<tool_call>[{json}]</tool_call>")),
        ("smollm", format!("<tool_call>\n{json}\n</tool_call>")),
        ("llama3", format!("{{\"name\": \"f\", \"parameters\": {args}}}")),
        ("llama3", format!("<|python_tag|>{json}")),
        ("llama3", format!("<function=f>{args}</function>")),
        ("mistral", format!("[TOOL_CALLS][{json}]")),
        ("mistral", format!("[TOOL_CALLS] {json}")),
        ("mistral", format!("[TOOL_CALLS]f[ARGS]{args}")),
        ("mistral", format!("[TOOL_CALLS]f{args}")),
        (
            "deepseek",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{args}\n\
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            "deepseek",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{args}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            "deepseek",
            "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
             <｜DSML｜parameter name=\"s\" string=\"true\">1 < 2</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"n\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
             </｜DSML｜function_calls>".into(),
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1 < 2</arg_value>\n<arg_key>n</arg_key>\n\
             <arg_value>3</arg_value>\n</tool_call>".into(),
        ),
        (
            "xml",
            "<tool_call>\n<function=f>\n<parameter=s>\n1 < 2\n</parameter>\n<parameter=n>\n3\n\
             </parameter>\n</function>\n</tool_call>".into(),
        ),
        (
            "xml",
            "<function=f>\n<parameter=s>\n1 < 2\n</parameter>\n<parameter=n>\n3\n</parameter>\n\
             </function>\n</tool_call>".into(),
        ),
        ("json", json.to_owned()),
        ("json", format!("\n```json\n[{json}]\n```")),
    ];
    for (format, text) in cases {
        assert_eq!(calls(format, &text), [f()], "{format}: {text}");
    }
    // An id is kept, arguments may be a text, and OpenAI's nesting is supported.
    let id = calls("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}");
    assert_eq!(id[0].id.as_deref(), Some("abcdefghi"));
    let nested = r#"{"type": "function", "function": {"name": "f", "arguments": "{\"n\": 1}"}}"#;
    assert_eq!(calls("json", nested), [call("f", json!({"n": 1}))]);
}

#[test]
fn built_in_tools_of_llama_are_parsed() {
    let search = calls(
        "llama3",
        "<|python_tag|>brave_search.call(query=\"a, b\", n=2)",
    );
    assert_eq!(
        search,
        [call("brave_search", json!({"query": "a, b", "n": 2}))]
    );
    let code = calls("llama3", "<|python_tag|>import math\nprint(math.pi)");
    let expected = json!({"code": "import math\nprint(math.pi)"});
    assert_eq!(code, [call("code_interpreter", expected)]);
    let two = calls(
        "llama3",
        "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
    );
    assert_eq!(two.len(), 2);
}

#[test]
fn unquoted_values_have_the_types_of_the_schema() {
    let glm = |key: &str, value: &str| {
        let text = format!(
            "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        );
        let format = TurnFormat::of_calls(ToolCallFormat::Glm);
        let mut turn = parse_turn(&text, &format, &tools());
        match turn.broken.pop() {
            Some(error) => Err(error),
            None => Ok(turn.calls[0].arguments[key].clone()),
        }
    };
    for (key, value, expected) in [
        ("s", "12", json!("12")),
        ("s", "[1]", json!("[1]")),
        ("n", "12", json!(12)),
        ("b", "True", json!(true)),
        ("l", "[1, \"a\"]", json!([1, "a"])),
        ("o", "None", json!(null)),
        ("o", "{\"a\": 1}", json!({"a": 1})),
        ("m", "12", json!("12")),
        ("m", "null", json!(null)),
        ("unknown", "12", json!(12)),
        ("unknown", "\"quoted\"", json!("\"quoted\"")),
        ("unknown", "a b", json!("a b")),
        ("n", "5.0", json!(5)),
        ("n", "18446744073709551617", json!("18446744073709551617")),
        ("l", "('a', 1)", json!(["a", 1])),
        // The validation of the agent answers.
        ("n", "twelve", json!("twelve")),
        ("n", "5.5", json!("5.5")),
    ] {
        assert_eq!(glm(key, value), Ok(expected), "{key} {value}");
    }
}

#[test]
fn literals_of_python_are_read_in_json() {
    for (format, text) in [
        (
            "hermes",
            "<tool_call>{'name': 'f', 'arguments': {'s': 'it\\'s', 'b': True}}</tool_call>",
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"it's\", \"b\": True,}}</tool_call>",
        ),
        (
            "llama3",
            "{\"name\": \"f\", \"parameters\": {\"s\": \"it's\", \"b\": True}}",
        ),
        (
            "mistral",
            "[TOOL_CALLS]f[ARGS]{\"s\": \"it's\", \"b\": True}",
        ),
    ] {
        let arguments = &calls(format, text)[0].arguments;
        let expected = json!({"s": "it's", "b": true});
        assert_eq!(Value::Object(arguments.clone()), expected, "{format}");
    }
    let built_in = calls("llama3", "<|python_tag|>search.call(query='a', count=2)");
    let arguments = Value::Object(built_in[0].arguments.clone());
    assert_eq!(arguments, json!({"query": "a", "count": 2}));
}

#[test]
fn integers_keep_their_digits_in_every_notation() {
    let big = "18446744073709551617";
    for (format, text) in [
        (
            "hermes",
            format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"n\": {big}}}}}</tool_call>"),
        ),
        (
            "hermes",
            format!(
                "<tool_call>{{\"name\": \"f\", \"arguments\": \"{{\\\"n\\\": {big}}}\"}}</tool_call>"
            ),
        ),
        ("mistral", format!("[TOOL_CALLS]f[ARGS]{{\"n\": {big}}}")),
        ("llama3", format!("<|python_tag|>f.call(n={big})")),
        (
            "xml",
            format!(
                "<tool_call>\n<function=f>\n<parameter=n>\n{big}\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
    ] {
        assert_eq!(calls(format, &text)[0].arguments["n"], big, "{format}");
    }
}

/// Code about calls has their marks in it.
#[test]
fn end_marks_inside_of_values_belong_to_them() {
    let values = [
        "a </parameter> b",
        "x = '</function>' + '</tool_call>'",
        "</tool_call> first",
        "<parameter=y>\n</parameter> in the middle",
        "<arg_value>1</arg_value> and </tool_call> b",
    ];
    for value in values {
        let xml = format!(
            "<function=f>\n<parameter=s>\n{value}\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>"
        );
        let glm = format!(
            "<arg_key>s</arg_key>\n<arg_value>{value}</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>"
        );
        for (format, text) in [
            ("xml", format!("<tool_call>\n{xml}\n</tool_call>")),
            ("xml", format!("{xml} ")),
            ("glm", format!("<tool_call>f\n{glm}\n</tool_call>")),
        ] {
            let twice = format!("{text}\n{text}");
            let read = calls(format, &twice);
            assert_eq!(read.len(), 2, "{format} {value}");
            for call in read {
                assert_eq!(call.arguments["s"], value, "{format}");
                assert_eq!(call.arguments["n"], 1, "{format}");
            }
        }
    }
    // A call without its end does not swallow the next one.
    let text = "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n</tool_call>\n\
                <tool_call>\n<function=f>\n</function>\n</tool_call>";
    let turn = parse_turn(text, &TurnFormat::of_calls(ToolCallFormat::Xml), &tools());
    assert_eq!((turn.calls.len(), turn.broken.len()), (1, 1));
}

/// A format, a turn with one broken call, and a part of the error message.
type Broken = (&'static str, &'static str, &'static str);

const BROKEN_JSON: &[Broken] = &[
    (
        "hermes",
        "<tool_call>{\"name\": \"f\"",
        "</tool_call> is missing",
    ),
    ("hermes", "so</tool_call>", "without <tool_call> before it"),
    ("hermes", "<tool_call>\n</tool_call>", "empty"),
    (
        "hermes",
        "<tool_call>{'name': x}</tool_call>",
        "not valid JSON",
    ),
    ("hermes", "<tool_call>{}</tool_call>", "no \"name\""),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
        "no \"arguments\"",
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f}</tool_call>",
        "not valid JSON",
    ),
    ("smollm", "<tool_call>[]</tool_call>", "empty"),
    (
        "llama3",
        "{\"name\": \"f\", \"parameters\": {",
        "does not end",
    ),
    (
        "llama3",
        "{\"name\": \"f\", parameters: {}}",
        "not valid JSON",
    ),
    ("llama3", "<|python_tag|>", "empty"),
    ("llama3", "<|python_tag|>s.call(1)", "an argument key"),
    ("mistral", "[TOOL_CALLS]", "empty"),
    ("mistral", "[TOOL_CALLS]f[ARGS]", "a JSON object"),
    ("mistral", "[TOOL_CALLS]a b[ARGS]{}", "the name of a tool"),
    ("mistral", "[TOOL_CALLS][{\"name\": \"f\"", "does not end"),
];

const BROKEN_MARKS: &[Broken] = &[
    (
        "deepseek",
        "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>",
        "not valid JSON",
    ),
    ("deepseek", "<｜tool▁call▁end｜>", "without"),
    (
        "glm",
        "<tool_call>f\n<arg_key>s</arg_key>\n</tool_call>",
        "<arg_value>",
    ),
    (
        "glm",
        "<tool_call>{\"name\": \"f\"}</tool_call>",
        "the name of a tool",
    ),
    ("xml", "<tool_call>\nf\n</tool_call>", "<function="),
    (
        "xml",
        "<tool_call><function=f><parameter=s>1</function></tool_call>",
        "</parameter>",
    ),
    (
        "json",
        "{\"name\": \"f\", \"arguments\": {}",
        "does not end",
    ),
    ("tag:run:python", "<run> </run>", "empty"),
    ("fence:python:python", "```python\nx", "``` is missing"),
];

#[test]
fn broken_calls_have_an_error_and_stay_text() {
    for &(format, text, needle) in BROKEN_JSON.iter().chain(BROKEN_MARKS) {
        let turn_format = TurnFormat::of_calls(format.parse().unwrap());
        let turn = parse_turn(text, &turn_format, &tools());
        assert!(turn.calls.is_empty(), "{text}");
        assert_eq!(turn.content.trim(), text.trim(), "the text is lost");
        assert_eq!(turn.broken.len(), 1, "{text}: {:?}", turn.broken);
        let error = turn.broken[0].to_string();
        assert!(error.contains(needle), "{format} {text}: {error}");
    }
}

#[test]
fn other_text_is_no_call() {
    for (format, text) in [
        ("json", "{\"answer\": 42}"),
        ("json", "[1, 2]"),
        ("llama3", "{\"answer\": 42} is it"),
        (
            "json",
            "The call {\"name\": \"f\", \"arguments\": {}} comes late",
        ),
        ("json", "{not json"),
        ("hermes", "a < b and <tool_x>"),
        ("glm", "  plain\n"),
        ("fence:python:python", "```rust\nfn main() {}\n```"),
    ] {
        let turn = parse_turn(text, &TurnFormat::of_calls(format.parse().unwrap()), &[]);
        assert_eq!(turn.content, text, "{format}");
        assert!(turn.calls.is_empty() && turn.broken.is_empty(), "{text}");
    }
    // The whole turn is text if there is no call format.
    let text = "<tool_call>{}</tool_call>";
    let turn = parse_turn(text, &TurnFormat::default(), &[]);
    assert_eq!(turn.content, text);
}

#[test]
fn markers_inside_of_strings_are_ignored() {
    let turn = calls(
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call>\"}}</tool_call>",
    );
    assert_eq!(turn[0].arguments["s"], "</tool_call>");
}

#[test]
fn too_many_calls_are_refused() {
    let one = "<run>1</run>";
    let format = TurnFormat::of_calls("tag:run:python".parse().unwrap());
    let turn = parse_turn(&one.repeat(MAX_CALLS + 1), &format, &[]);
    assert_eq!(turn.calls.len(), MAX_CALLS);
    assert_eq!(turn.broken, [ToolCallError::TooMany]);
    assert_eq!(turn.content, one);
}

#[test]
fn reasoning_is_separated() {
    let format = thinking(&ToolCallFormat::Hermes, false);
    let text = "<think>\n a <tool_call> b\n</think>\n\nso\n\
     <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n";
    let turn = parse_turn(text, &format, &[]);
    assert_eq!(turn.reasoning.as_deref(), Some("a <tool_call> b"));
    assert_eq!((turn.content.as_str(), turn.calls.len()), ("so", 1));
    // The prompt contains the start marker.
    let opened = thinking(&ToolCallFormat::Hermes, true);
    let turn = parse_turn("hm\n</think>\n\nyes", &opened, &[]);
    assert_eq!(turn.reasoning.as_deref(), Some("hm"));
    assert_eq!(turn.content, "yes");
    // Truncated reasoning.
    let turn = parse_turn("hm, w", &opened, &[]);
    assert_eq!(turn.reasoning.as_deref(), Some("hm, w"));
    assert_eq!(turn.content, "");
    // Markers of reasoning after text are text.
    let turn = parse_turn("use <think> tags", &format, &[]);
    assert_eq!(turn.content, "use <think> tags");
    assert_eq!(turn.reasoning, None);
}

fn in_pieces(text: &str, cuts: &[usize], format: &TurnFormat) -> (ParsedTurn, Vec<TurnDelta>) {
    let mut parser = TurnParser::new(format, &tools());
    let mut all = Vec::new();
    let mut at = 0;
    for &cut in cuts.iter().chain([&text.len()]) {
        let mut cut = cut.min(text.len());
        while !text.is_char_boundary(cut) {
            cut += 1;
        }
        if cut > at {
            all.extend(parser.push(&text[at..cut]));
            at = cut;
        }
    }
    all.extend(parser.finish());
    let mut turn = ParsedTurn::default();
    turn.apply(all.clone());
    (turn, all)
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        "[ -~\n\"\\\\é]{0,12}".prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        prop::collection::vec(any::<u8>(), 0..3).prop_map(|v| json!({ "list": v })),
    ]
}

fn arguments() -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::vec(("[a-z]{1,6}", values()), 0..4).prop_map(|v| v.into_iter().collect())
}

proptest! {
    /// Written calls parse to themselves for all arguments and chunkings.
    #[test]
    fn calls_survive_writing_and_reading(
        // The name differs from `f`, whose arguments have a schema.
        list in prop::collection::vec(("[a-z_]{2,8}", arguments()), 1..4),
        said in "[A-Za-z .]{0,12}",
        cuts in prop::collection::vec(0usize..300, 0..12),
        which in 0usize..8,
    ) {
        let format = &formats()[which];
        let mut list: Vec<_> = list.into_iter().map(|(n, a)| ParsedCall::new(n, a)).collect();
        let untyped = matches!(format, ToolCallFormat::Glm | ToolCallFormat::Xml);
        for call in &mut list {
            if untyped {
                // Numbers and markers in unquoted text are recognized if there is no schema.
                call.arguments.retain(|_, v| match v {
                    Value::String(s) => {
                        serde_json::from_str::<Value>(s.trim()).is_err()
                            && !s.contains('<')
                            && !["True", "False", "None"].contains(&s.trim())
                    }
                    _ => true,
                });
            }
        }
        let whole_turn = matches!(format, ToolCallFormat::Json | ToolCallFormat::Llama3);
        let said = if whole_turn { "" } else { said.trim() };
        let text = format!("{said}{}", write_calls(&list, format));
        let mut cuts = cuts;
        cuts.sort_unstable();
        let (turn, _) = in_pieces(&text, &cuts, &TurnFormat::of_calls(format.clone()));
        prop_assert_eq!(&turn.broken, &[]);
        prop_assert_eq!(&turn.calls, &list, "{}: {}", format.name(), text);
        prop_assert_eq!(&turn.content, said);
    }

    /// The parsed turn does not depend on the chunking, and no text delta is a part of a marker.
    #[test]
    fn chunking_does_not_matter(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>",
            "</parameter>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "f", "[", "]",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>", "<|python_tag|>", "```json", "```", "{\"name\": \"f\", ",
            "\"arguments\": {}}", "{", "}", "\"", " ", "\n", "é", "<", "text", ";",
            "<arg_key>s</arg_key>", "<arg_value>1</arg_value>",
        ]), 0..16),
        cuts in prop::collection::vec(0usize..120, 0..10),
        which in 0usize..8,
        opened in any::<bool>(),
    ) {
        let text = parts.concat();
        let format = thinking(&formats()[which], opened);
        let mut cuts = cuts;
        cuts.sort_unstable();
        let whole = parse_turn(&text, &format, &tools());
        let (turn, deltas) = in_pieces(&text, &cuts, &format);
        prop_assert_eq!(&turn, &whole, "{:?} {}", format, text);
        let empty = TurnDelta::Text(String::new());
        prop_assert!(!deltas.contains(&empty));
        // Every character is in a call, reasoning, the content or a marker.
        if whole.calls.is_empty() && whole.reasoning.is_none() {
            prop_assert!(text.len() >= whole.content.len());
        }
    }
}

#[test]
fn a_call_without_a_name_that_ends_is_broken_wherever_its_text_is_split() {
    let format = TurnFormat::of_calls(ToolCallFormat::Mistral);
    let text = format!(
        "a[TOOL_CALLS]{}g[ARGS]{{}}[TOOL_CALLS]f[ARGS]{{}}",
        "é".repeat(200)
    );
    let whole = parse_turn(&text, &format, &[]);
    assert_eq!((whole.calls.len(), whole.broken.len()), (1, 1), "{whole:?}");
    for cut in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
        assert_eq!(in_pieces(&text, &[cut], &format).0, whole, "at {cut}");
    }
    let each: Vec<usize> = (0..text.len())
        .filter(|&at| text.is_char_boundary(at))
        .collect();
    assert_eq!(in_pieces(&text, &each, &format).0, whole);
}
