//! Chat templates of published models: rendering equals that of transformers, the conformance check passes,
//! and calls parse to themselves. `UPDATE_DOCS=1 cargo nextest run -p sinew-render families` writes the
//! tables of `docs/rendering.md` and `docs/check-template.md`.
//!
//! Templates are files of `tests/templates`, or of packages that `scripts/templates.py` downloads.

use crate::{SMOLLM2_VOCAB, TOKENIZER_GOLDEN, golden, strings};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use sinew_render::{
    ChatRenderer, GgufVocab, MockTrajectory, RenderError, Renderer, Tokenizer, Verdict,
    check_template, conformance_check, control_tokens,
};
use sinew_types::{FinishReason, Message, Role, ToolCall, ToolSpec};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Families whose templates are in `tests/templates`: file, start token, end-of-turn token.
const FAMILIES: [(&str, &str, &str); 22] = [
    ("qwen2.5", "", "<|im_end|>"),
    ("qwen3", "", "<|im_end|>"),
    ("qwq", "", "<|im_end|>"),
    ("qwen3-coder", "", "<|im_end|>"),
    ("qwen3.5", "", "<|im_end|>"),
    ("hermes", "<|begin_of_text|>", "<|im_end|>"),
    ("llama-3.1", "<|begin_of_text|>", "<|eot_id|>"),
    ("llama-3.2", "<|begin_of_text|>", "<|eot_id|>"),
    ("mistral-nemo", "<s>", "</s>"),
    ("mistral-parallel", "<s>", "</s>"),
    ("mistral-small-3.2", "<s>", "</s>"),
    ("ministral-3-reasoning", "<s>", "</s>"),
    (
        "deepseek-v3",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    (
        "deepseek-r1-distill",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    (
        "deepseek-v3.1",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    (
        "deepseek-v3.2",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    ("glm-4.6", "", "<|endoftext|>"),
    ("glm-4.7", "", "<|endoftext|>"),
    ("granite-4.0", "", "<|end_of_text|>"),
    ("smollm2", "<|im_start|>", "<|im_end|>"),
    ("smollm3", "", "<|im_end|>"),
    ("phi-3.5", "<s>", "<|end|>"),
];

/// Tokens of families in addition to control tokens.
const ADDED: [&str; 10] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
];

fn path(relative: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(relative)
}

/// A family: its name, the file of its template, its start token and its end-of-turn token.
#[derive(Clone)]
struct Family {
    name: String,
    file: PathBuf,
    bos: String,
    eos: String,
}

/// All families, those of packages last, in the order of their names.
fn families() -> Vec<Family> {
    let ours = FAMILIES.map(|(name, bos, eos)| Family {
        name: name.into(),
        file: path(&format!("tests/templates/{name}.jinja")),
        bos: bos.into(),
        eos: eos.into(),
    });
    let shipped: BTreeMap<String, [String; 3]> =
        serde_json::from_str(include_str!("../golden/packages.json")).unwrap();
    let shipped = shipped.into_iter().map(|(name, [file, bos, eos])| Family {
        name,
        file: path("../../.cache/templates").join(file),
        bos,
        eos,
    });
    ours.into_iter().chain(shipped).collect()
}

impl Family {
    fn source(&self) -> String {
        let text = std::fs::read_to_string(&self.file);
        text.unwrap_or_else(|e| panic!("{}: {e}: run scripts/setup.sh", self.file.display()))
    }

    /// Variables that the template needs.
    fn needed(&self) -> Map<String, Value> {
        match self.name.as_str() {
            "mistral-small-3.2" | "gpt-oss" | "apertus" => dated(),
            _ => Map::new(),
        }
    }

    /// The renderer of a model folder with the variables that it needs, as the program reads it.
    fn renderer(&self) -> ChatRenderer {
        self.with(&self.bos, &self.eos, self.needed()).unwrap()
    }

    /// The same with other tokens and variables.
    fn with(
        &self,
        bos: &str,
        eos: &str,
        options: Map<String, Value>,
    ) -> Result<ChatRenderer, RenderError> {
        from_folder(&self.name, &self.source(), bos, eos, options)
    }
}

/// The day of the golden renders.
fn dated() -> Map<String, Value> {
    let date = ("date".to_owned(), json!("2026-01-31"));
    [date].into_iter().collect()
}

/// SmolLM2's tokens and merges, with the control tokens that the template needs.
fn from_folder(
    name: &str,
    source: &str,
    bos: &str,
    eos: &str,
    options: Map<String, Value>,
) -> Result<ChatRenderer, RenderError> {
    let all = &SMOLLM2_VOCAB.tokens;
    let kept = TOKENIZER_GOLDEN["tokens"].as_array().unwrap();
    let mut tokens: Vec<String> = kept
        .iter()
        .map(|entry| all[entry[0].as_u64().unwrap() as usize].clone())
        .collect();
    let mut token_types = vec![1; tokens.len()];
    let mut control = control_tokens(source);
    control.extend([bos, eos].map(str::to_owned));
    control.retain(|token| !token.is_empty());
    control.sort();
    control.dedup();
    for token in control {
        match tokens.iter().position(|t| *t == token) {
            Some(at) => token_types[at] = 3,
            None => {
                tokens.push(token);
                token_types.push(3);
            }
        }
    }
    for token in ADDED {
        tokens.push(token.to_owned());
        token_types.push(4);
    }
    let vocab = GgufVocab {
        model: "gpt2".into(),
        // Every family except SmolLM splits newlines off before merging, like Llama 3.
        pre: if name.starts_with("smollm") {
            "smollm"
        } else {
            "llama-bpe"
        }
        .into(),
        tokens,
        token_types,
        merges: strings(&TOKENIZER_GOLDEN["merges"]),
    };
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap().to_json().unwrap();
    let settings = json!({"bos_token": bos, "eos_token": eos, "chat_template": source});
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let file = folder.path().join("tokenizer_config.json");
    std::fs::write(file, settings.to_string()).unwrap();
    ChatRenderer::from_dir(folder.path(), options)
}

/// The error of a template that asks for today's date names the key that provides one.
#[test]
fn templates_that_need_a_date_say_so() {
    let mut refused = Vec::new();
    for family in families() {
        if let Err(error) = family.with(&family.bos, &family.eos, Map::new()) {
            assert!(error.to_string().contains("template = { date"), "{error}");
            refused.push(family.name);
        }
    }
    assert_eq!(refused, ["mistral-small-3.2", "apertus", "gpt-oss"]);
}

fn message(value: &Value) -> Message {
    let role = serde_json::from_value(value["role"].clone()).unwrap();
    let mut message = Message::new(role, value["content"].as_str().unwrap());
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    message.reasoning = text("reasoning");
    message.tool_call_id = text("tool_call_id");
    message.name = text("name");
    for call in value["tool_calls"].as_array().into_iter().flatten() {
        message.tool_calls.push(ToolCall {
            id: call["id"].as_str().unwrap().into(),
            name: call["name"].as_str().unwrap().into(),
            arguments: call["arguments"].clone(),
        });
    }
    message
}

#[test]
fn published_templates_render_like_transformers() {
    let golden = golden(include_str!("../golden/families.json"));
    let tool: ToolSpec = serde_json::from_value(golden["tool"].clone()).unwrap();
    let conversations = golden["conversations"].as_array().unwrap();
    let families = families();
    let renders = golden["renders"].as_array().unwrap();
    assert_eq!(families.len(), renders.len());
    let mut compared = 0;
    for row in renders {
        let name = row["template"].as_str().unwrap();
        let family = families.iter().find(|f| f.name == name);
        let family = family.unwrap_or_else(|| panic!("{name} is in no family"));
        // The golden texts use these.
        let options = if family.source().contains("strftime_now") {
            dated()
        } else {
            Map::new()
        };
        let renderer = family.with("<s>", "</s>", options).unwrap();
        assert_eq!(Value::from(renderer.shows().calls), row["calls"], "{name}");
        for (i, conversation) in conversations.iter().enumerate() {
            let messages: Vec<_> = conversation["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(message)
                .collect();
            let tools = if conversation["tools"] == true {
                vec![tool.clone()]
            } else {
                Vec::new()
            };
            let shows = renderer.shows();
            let calls = messages.iter().any(|m| !m.tool_calls.is_empty());
            if (calls && !shows.calls) || (!tools.is_empty() && !shows.tools) {
                continue;
            }
            // Jinja2 escapes the quotes of a text that is added to one marked as safe.
            if name == "functionary-3.1" && !tools.is_empty() {
                continue;
            }
            let expected = row["sha256"][i].as_str();
            let text = renderer
                .render_prompt(&messages, &tools)
                .map(|ids| renderer.decode_with_special(&ids));
            let hash = text.as_ref().ok().map(|text| {
                let digest = Sha256::digest(text.as_bytes());
                digest
                    .iter()
                    .map(|b| format!("{b:02x}"))
                    .collect::<String>()
            });
            assert_eq!(
                hash.as_deref(),
                expected,
                "{name}, conversation {i}: {text:?}"
            );
            compared += 1;
        }
    }
    assert!(compared > 350, "{compared}");
}

fn trajectories(system: Option<&str>) -> Vec<MockTrajectory> {
    let mut all = MockTrajectory::standard(system, "What is 318 * 27?");
    all.extend(MockTrajectory::agentic(system));
    all
}

/// Names, each once, or a dash.
fn list(mut names: Vec<String>) -> String {
    names.sort();
    names.dedup();
    if names.is_empty() {
        "-".into()
    } else {
        names.join(", ")
    }
}

/// Result of the conformance check.
fn joins(renderer: &ChatRenderer) -> String {
    let (mut exact, mut declared, mut calls) = (0, 0, 0);
    let (mut rewrites, mut refused, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for system in [None, Some("You are helpful.")] {
        for trajectory in trajectories(system) {
            let name = trajectory.name.clone();
            match conformance_check(renderer, &[trajectory]) {
                Ok(report) => {
                    exact += report.exact();
                    declared += report.steps.len() - report.exact();
                    calls += report.turns_with_calls;
                    let kinds = report.rewrites();
                    rewrites.extend(kinds.iter().map(|r| format!("{r:?}").to_lowercase()));
                }
                Err(RenderError::Join(why)) if why.contains("refuses every") => refused.push(name),
                Err(_) => failures.push(name),
            }
        }
    }
    format!(
        "{exact} | {declared} | {} | {calls} | {} | {}",
        list(rewrites),
        list(refused),
        list(failures)
    )
}

/// One row of the table in the documentation.
fn row(family: &Family) -> String {
    let (name, renderer) = (&family.name, family.renderer());
    let stops: Vec<_> = renderer
        .stop_ids()
        .iter()
        .map(|&id| {
            let text = renderer.decode_with_special(&[id]);
            format!("`{}`", text.replace('|', "\\|"))
        })
        .collect();
    let format = renderer.turn_format().calls.unwrap().name();
    let shows = renderer.shows();
    let by_us = [
        (shows.tools, "tools"),
        (shows.calls, "calls"),
        (shows.results, "results"),
    ];
    let by_us = by_us.iter().filter(|(shown, _)| !shown);
    let by_us: Vec<_> = by_us.map(|(_, what)| *what).collect();
    let by_us = match by_us.as_slice() {
        [] => "-".to_owned(),
        some => some.join(", "),
    };
    let stops = stops.join(" ");
    let joins = joins(&renderer);
    let needed = family.needed();
    let needed = list(needed.keys().map(|key| format!("`{key}`")).collect());
    format!("| {name} | {format} | {needed} | {stops} | {by_us} | {joins} |")
}

/// Compares the table of a page that begins with `head`, or writes it.
fn table_is(page: &str, head: &str, measured: &[String]) {
    let file = path("../../docs").join(page);
    let docs = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<_> = docs.lines().collect();
    let head = lines.iter().position(|l| l.starts_with(head)).unwrap();
    let table = lines[head + 2..].iter().take_while(|l| l.starts_with('|'));
    let end = head + 2 + table.count();
    if std::env::var("UPDATE_DOCS").is_ok() {
        let before = lines[..head + 2].iter().copied();
        let after = lines[end..].iter().copied();
        let rows = measured.iter().map(String::as_str);
        let all: Vec<_> = before.chain(rows).chain(after).collect();
        std::fs::write(&file, all.join("\n") + "\n").unwrap();
        return;
    }
    assert!(
        lines[head + 2..end] == *measured,
        "docs/{page} must say:\n{}\n",
        measured.join("\n")
    );
}

#[test]
fn documented_table_equals_the_measurement() {
    let families = families();
    assert!(families.len() >= 34, "{}", families.len());
    let measured: Vec<_> = families.iter().map(row).collect();
    table_is("rendering.md", "| family |", &measured);
    let calls = |row: &String| row.rsplit(" | ").nth(2).unwrap().parse::<usize>().unwrap();
    let read: usize = measured.iter().map(calls).sum();
    let played = [None, Some("You are helpful.")].map(trajectories).concat();
    let with_calls = played.iter().flat_map(|mock| &mock.messages);
    let with_calls = with_calls.filter(|m| !m.tool_calls.is_empty()).count();
    let said = format!(
        "{read} of the {} turns with calls",
        with_calls * families.len()
    );
    let page = std::fs::read_to_string(path("../../docs/rendering.md")).unwrap();
    assert!(page.contains(&said), "docs/rendering.md must say: {said}");
}

/// One row of the table of `sinew check-template`.
fn check_row(family: &Family) -> String {
    let reports = check_template(&family.renderer());
    let with = |verdict| reports.iter().filter(move |r| r.verdict == verdict);
    let names = |verdict| list(with(verdict).map(|r| r.name.to_owned()).collect());
    let rewrites = reports.iter().flat_map(|r| &r.rewrites);
    format!(
        "| {} | {} | {} | {} | {} | {} |",
        family.name,
        with(Verdict::Exact).count(),
        with(Verdict::Realigned).count(),
        list(rewrites.map(|r| r.name().to_owned()).collect()),
        names(Verdict::Refused),
        names(Verdict::Broken)
    )
}

#[test]
fn documented_checks_equal_the_measurement() {
    let measured: Vec<_> = families().iter().map(check_row).collect();
    table_is("check-template.md", "| family |", &measured);
}

/// Parts that a template does not print are written in other messages.
#[test]
fn tools_and_results_are_rendered_without_template_support() {
    let phi = families().into_iter().find(|f| f.name == "phi-3.5");
    let renderer = phi.unwrap().renderer();
    let [.., mock] = &MockTrajectory::agentic(Some("Be brief."))[..1] else {
        panic!("no trajectory")
    };
    let ids = renderer.render_prompt(&mock.messages, &mock.tools).unwrap();
    let text = renderer.decode_with_special(&ids);
    for needle in [
        "Be brief.\n\n# Tools",
        "Runs Python code.",
        "{\"out\": 391}",
        "if 1 < 2:",
    ] {
        assert!(text.contains(needle), "{needle} is not in {text}");
    }
    // A system message is inserted before the first question if there is none.
    let ids = renderer
        .render_prompt(&mock.messages[1..2], &mock.tools)
        .unwrap();
    let text = renderer.decode_with_special(&ids);
    assert!(text.starts_with("<|system|>\n# Tools"), "{text}");
}

/// A turn that the token limit truncated is closed by the stop token of the family.
#[test]
fn truncated_turns_are_closed_by_the_stop_token() {
    for family in families() {
        let (name, renderer) = (&family.name, family.renderer());
        println!("{name}");
        let new = [Message::new(Role::User, "go on")];
        let context = renderer.encode_text("half a").unwrap();
        let cut = renderer
            .extend(&context, &FinishReason::Length, &new, &[])
            .unwrap();
        let stop = *cut.forced.last().unwrap_or_else(|| panic!("{name}"));
        let ends = [renderer.stop_ids(), renderer.closing_ids()].concat();
        assert!(ends.contains(&stop), "{name}");
        let mut whole = context.clone();
        whole.push(stop);
        let stopped = renderer
            .extend(&whole, &FinishReason::StopId { id: stop }, &new, &[])
            .unwrap();
        assert!(stopped.forced.is_empty(), "{name}");
        assert_eq!(stopped.observation, cut.observation, "{name}");
    }
}
