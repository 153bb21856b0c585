use super::*;
use proptest::prelude::*;
use serde_json::json;
use sinew_env::tiny;
use sinew_render::{ChatConfig, ChatRenderer, TinyRenderer, Tokenizer, byte_renderer};
use sinew_store::{DiskStore, ExportFormat, StoreOptions, TraceStore, export};
use sinew_types::{TokenId, TokenKind, ToolCall};
use std::collections::BTreeSet;

fn read(kind: &str, lines: &str, renderer: &dyn Renderer) -> Result<Dataset, String> {
    let file = tempfile::Builder::new()
        .suffix(".jsonl")
        .tempfile()
        .unwrap();
    std::fs::write(file.path(), lines).unwrap();
    let path = file.path().display().to_string();
    let config = match kind {
        "pairs" => DatasetConfig::Pairs { path },
        _ => DatasetConfig::Demonstrations { path },
    };
    Dataset::load(&config, renderer, 4096).map_err(|e| e.to_string())
}

fn load(kind: &str, lines: &str) -> Result<Dataset, String> {
    read(kind, lines, &TinyRenderer::new(tiny::ALPHABET))
}

/// ChatML over bytes that writes tools, reasoning, calls and results.
fn whole_renderer() -> ChatRenderer {
    let bytes = byte_renderer().unwrap();
    let tokenizer = Tokenizer::from_json(&bytes.tokenizer().to_json().unwrap(), "bytes").unwrap();
    let template = "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}\
        {%- for m in messages %}<|im_start|>{{ m.role ~ '\n' }}\
        {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
        {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}\
        {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let config = ChatConfig {
        template: template.into(),
        eos_token: "<|im_end|>".into(),
        ..ChatConfig::default()
    };
    ChatRenderer::new(tokenizer, config).unwrap()
}

/// Kind and text of each node of the only episode of the only row.
fn told(data: &Dataset, renderer: &dyn Renderer) -> Vec<(TokenKind, String)> {
    let trace = &data.batch(0, 1, 1)[0][0];
    trace.validate().unwrap();
    let nodes = trace.nodes.iter();
    nodes
        .map(|n| (n.kind, renderer.decode_with_special(&n.tokens)))
        .collect()
}

#[test]
fn every_turn_of_the_assistant_trains_and_nothing_else() {
    let line = r#"{"messages":[{"role":"user","content":"A.>"},{"role":"assistant","content":"r"},{"role":"tool","content":".A>"},{"role":"assistant","content":"rl"}]}"#;
    let data = load("demonstrations", line).unwrap();
    let batch = data.batch(0, 3, 1);
    let trace = &batch[0][0];
    trace.validate().unwrap();
    assert_eq!(trace.episode.as_str(), "d00000002-e0");
    // A move and the stop token; two moves and the stop token.
    assert_eq!(trace.sampled_tokens(), 5);
    let kinds: Vec<TokenKind> = trace.nodes.iter().map(|n| n.kind).collect();
    let (p, s, o) = (
        TokenKind::Prompt,
        TokenKind::Sampled,
        TokenKind::Observation,
    );
    assert_eq!(kinds, [p, s, o, s]);
    assert!(trace.outcome.success);
}

#[test]
fn demonstrations_have_all_that_the_chat_protocol_has() {
    let renderer = whole_renderer();
    let row = json!({
        "id": 7,
        "messages": [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "Q"}], "mood": "good"},
            {"role": "assistant", "content": null, "reasoning_content": "think", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 18446744073709551617}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "R"},
            {"role": "assistant", "content": "no", "weight": 0},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "yes", "weight": 1},
            {"role": "user", "content": "thanks"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "dict"}}}],
    });
    let data = read("demonstrations", &row.to_string(), &renderer).unwrap();
    let told = told(&data, &renderer);
    let texts: Vec<(TokenKind, &str)> = told.iter().map(|(k, t)| (*k, t.as_str())).collect();
    let (s, f, o) = (
        TokenKind::Sampled,
        TokenKind::Forced,
        TokenKind::Observation,
    );
    assert_eq!(texts[0].0, TokenKind::Prompt);
    for part in ["tools\n[{", "\"dict\"", "system\nS<", "user\nQ<"] {
        assert!(texts[0].1.contains(part), "{part}: {}", texts[0].1);
    }
    assert_eq!(
        texts[1..],
        [
            (
                s,
                "<think>think</think><tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"18446744073709551617\"}}</tool_call><|im_end|>"
            ),
            (
                o,
                "\n<|im_start|>tool\nR<|im_end|>\n<|im_start|>assistant\n"
            ),
            (f, "no<|im_end|>"),
            (
                o,
                "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
            ),
            (s, "yes<|im_end|>"),
        ]
    );
    let unused: Vec<(&str, u64)> = data
        .unused()
        .iter()
        .map(|(k, n)| (k.as_str(), *n))
        .collect();
    assert_eq!(
        unused,
        [("column id", 1), (AFTER, 1), ("messages[].mood", 1)]
    );
}

#[test]
fn a_prompt_and_its_completion_train_the_completion() {
    let renderer = whole_renderer();
    let row = json!({"prompt": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "old"},
        {"role": "user", "content": "Q2"}], "completion": "new"});
    let data = read("demonstrations", &row.to_string(), &renderer).unwrap();
    let told = told(&data, &renderer);
    assert_eq!(told.len(), 2);
    assert!(told[0].1.contains("old<|im_end|>"), "{}", told[0].1);
    assert_eq!(told[1], (TokenKind::Sampled, "new<|im_end|>".into()));
}

#[test]
fn a_template_without_reasoning_refuses_turns_that_have_some() {
    let renderer = byte_renderer().unwrap();
    let row = json!({"messages": [{"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "because"}]});
    let error = read("demonstrations", &row.to_string(), &renderer).unwrap_err();
    assert!(error.contains("leaves out the reasoning"), "{error}");
}

#[test]
fn pairs_are_groups_of_two_and_epochs_visit_all_of_them() {
    let line = |a: &str| {
        format!(
            "{{\"prompt\":[{{\"role\":\"user\",\"content\":\"{a}\"}}],\"chosen\":\"r\",\"rejected\":\"l\"}}\n"
        )
    };
    let data = load("pairs", &["A>", "A.>", ".A>"].map(line).concat()).unwrap();
    let prompts = |step| -> Vec<Vec<TokenId>> {
        let groups = data.batch(7, step, 3);
        assert!(groups.iter().all(|g| g.len() == 2));
        assert!(
            groups
                .iter()
                .all(|g| g[0].outcome.reward > g[1].outcome.reward)
        );
        groups
            .iter()
            .map(|g| g[0].nodes[0].tokens.clone())
            .collect()
    };
    for step in 1..5 {
        let seen: BTreeSet<_> = prompts(step).into_iter().collect();
        assert_eq!(seen.len(), 3);
    }
    assert_eq!(prompts(2), prompts(2));
}

#[test]
fn bad_rows_are_refused_with_their_line() {
    let user = r#"{"role":"user","content":"A>"}"#;
    let said = r#"{"role":"assistant","content":"r"}"#;
    let unweighted = r#"{"role":"assistant","content":"r","weight":0}"#;
    for (line, needle) in [
        (format!("{{\"messages\":[{user}]}}"), "nothing to learn"),
        (
            format!("{{\"messages\":[{user},{unweighted}]}}"),
            "nothing to learn",
        ),
        (
            format!("{{\"messages\":[{user},{said},{said}]}}"),
            "follow each other",
        ),
        (
            format!("{{\"mesages\":[{user}]}}"),
            "no column `messages`; columns: mesages",
        ),
        ("{\"messages\":null}".to_owned(), "messages is empty"),
        ("{".to_owned(), "EOF"),
    ] {
        let good = format!("{{\"messages\":[{user},{said}]}}");
        let e = load("demonstrations", &format!("{good}\n{line}\n"))
            .err()
            .unwrap();
        assert!(e.contains("line 2") && e.contains(needle), "{line}: {e}");
    }
    let pair = |rejected: &str| {
        format!("{{\"prompt\":[{user}],\"chosen\":\"r\",\"rejected\":{rejected}}}\n")
    };
    for (rejected, needle) in [
        ("\"r\"", "the same"),
        (r#"[{"role":"assistant","content":"r"}]"#, "the same"),
        ("3", "a list of messages"),
    ] {
        let lines = format!("{}{}", pair("\"l\""), pair(rejected));
        let e = load("pairs", &lines).err().unwrap();
        assert!(e.contains("line 2") && e.contains(needle), "{e}");
    }
    assert!(
        load("demonstrations", "\n")
            .err()
            .unwrap()
            .contains("nothing is in it")
    );
}

fn text() -> impl Strategy<Value = String> {
    let pieces = [
        "a",
        " ",
        "\n",
        "é",
        "\"",
        "\\",
        "{",
        "<|im_end|>",
        "<think>",
        "7",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 1..6).prop_map(|p| p.concat())
}

/// Arguments with all kinds of values.
fn arguments() -> impl Strategy<Value = Value> {
    let value = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e6f64..1e6).prop_map(Value::from),
        text().prop_map(Value::from),
        prop::collection::vec(text(), 0..3).prop_map(|list| json!({"list": list})),
    ];
    prop::collection::btree_map("[a-z]{1,3}", value, 0..3)
        .prop_map(|map| Value::Object(map.into_iter().collect()))
}

/// A turn of the model, and what answers it: results of its calls, or a question.
fn exchange() -> impl Strategy<Value = (Message, Vec<Message>)> {
    let calls = prop::collection::vec(("[a-z]{1,4}", arguments()), 0..3);
    let reasoning = prop::option::of(text());
    (text(), reasoning, calls, text()).prop_map(|(content, reasoning, calls, answer)| {
        let mut turn = Message::new(Role::Assistant, content);
        turn.reasoning = reasoning;
        let mut answers = Vec::new();
        for (index, (name, arguments)) in calls.into_iter().enumerate() {
            let id = format!("call-{index}");
            let mut result = Message::new(Role::Tool, answer.clone());
            (result.tool_call_id, result.name) = (Some(id.clone()), Some(name.clone()));
            answers.push(result);
            turn.tool_calls.push(ToolCall {
                id,
                name,
                arguments,
            });
        }
        if answers.is_empty() {
            answers.push(Message::new(Role::User, answer));
        }
        (turn, answers)
    })
}

/// A conversation that ends with the model, and tools.
fn conversations() -> impl Strategy<Value = (Vec<Message>, Vec<ToolSpec>)> {
    let exchanges = prop::collection::vec(exchange(), 1..4);
    (prop::option::of(text()), text(), exchanges, arguments()).prop_map(
        |(system, question, exchanges, schema)| {
            let system = system.map(|text| Message::new(Role::System, text));
            let mut messages: Vec<Message> = system.into_iter().collect();
            messages.push(Message::new(Role::User, question));
            for (turn, answers) in exchanges {
                messages.push(turn);
                messages.extend(answers);
            }
            let last = messages.iter().rposition(|m| m.role == Role::Assistant);
            messages.truncate(last.unwrap() + 1);
            let tool = ToolSpec {
                name: "f".into(),
                description: "d".into(),
                parameters: schema,
            };
            (messages, vec![tool])
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Episodes that are exported and read as demonstrations are the same tokens, kinds, messages and tools.
    #[test]
    fn exported_episodes_are_demonstrations_of_the_same_tokens(
        all in prop::collection::vec(conversations(), 1..4),
    ) {
        let renderer = whole_renderer();
        let folder = tempfile::tempdir().unwrap();
        let traces: Vec<Trace> = all.iter().enumerate().map(|(n, (messages, tools))| {
            let trace = sinew_pool::conversation(messages, |_| true, tools, &renderer, 1 << 16).unwrap();
            Trace { episode: EpisodeId::new(format!("e{n}")), ..trace }
        }).collect();
        let store = folder.path().join("store");
        DiskStore::open(&store, StoreOptions::default()).unwrap().commit_batch(&traces).unwrap();
        let reader = StoreReader::open(&store).unwrap();
        for ending in ["jsonl", "parquet"] {
            let path = folder.path().join(format!("rows.{ending}"));
            let format = ExportFormat::of(&path).unwrap();
            if !format.is_built() {
                continue;
            }
            let done = export(&reader, &Filter::default(), None, &path, format, false).unwrap();
            prop_assert_eq!((done.episodes, done.without_messages), (traces.len() as u64, 0));
            let config = DatasetConfig::Demonstrations { path: path.display().to_string() };
            let data = Dataset::load(&config, &renderer, 1 << 16).unwrap();
            for (group, trace) in data.groups.iter().zip(&traces) {
                prop_assert_eq!(&group[0].nodes, &trace.nodes);
            }
        }
    }
}
