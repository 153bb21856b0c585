//! Agent frameworks as they are on PyPI and npm: each runs one tool loop and gets one structured answer.
//!
//! The table in `docs/agents.md` has a row for each test.

use crate::support::{World, grammars, world_with};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const ANSWER: &str = "Answer: 391";
/// Separators are those of formats, as in all calls.
const STRUCTURED: &str = r#"{"answer": 391}"#;

/// One way to run a framework.
struct Row {
    program: &'static str,
    env: &'static [(&'static str, &'static str)],
    /// Calls of the model in its tool loop, and how they join the trace.
    tool_loop: (u64, &'static [(&'static str, u64)]),
    /// It has its own typed answers.
    structured: bool,
}

fn call(name: &str, arguments: &[(&str, Value)]) -> String {
    let field = |(name, value): &(&str, Value)| format!("{name:?}: {value}");
    let fields: Vec<String> = arguments.iter().map(field).collect();
    let fields = fields.join(", ");
    format!("<tool_call>\n{{\"name\": {name:?}, \"arguments\": {{{fields}}}}}\n</tool_call>")
}

/// The loops that frameworks write into prompts as text, without native tool calls.
fn written_loop(prompt: &str) -> Option<String> {
    let observed = prompt.contains("bservation: 391") || prompt.contains("## observation_0 ##");
    if prompt.contains("\nAction Input:") {
        // CrewAI, when LiteLLM does not know whether the model can call tools.
        return Some((if observed { "Thought: I know.\nFinal Answer: Answer: 391" } else { "Thought: I compute.\nAction: calculator\nAction Input: {\"expression\": \"17 * 23\"}" })
        .to_owned());
    }
    if prompt.contains("next_tool_name") {
        let (name, arguments) = if observed {
            ("finish", "{}")
        } else {
            ("calculator", r#"{"expression": "17 * 23"}"#)
        };
        return Some(format!(
            "[[ ## next_thought ## ]]\nI compute.\n\n[[ ## next_tool_name ## ]]\n{name}\n\n\
             [[ ## next_tool_args ## ]]\n{arguments}\n\n[[ ## completed ## ]]"
        ));
    }
    let extract = prompt.contains("[[ ## reasoning ## ]]");
    extract.then(|| {
        format!(
            "[[ ## reasoning ## ]]\nSeen.\n\n[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"
        )
    })
}

/// Name of the first tool that a prompt lists.
fn first_tool(prompt: &str) -> Option<&str> {
    let listed = prompt.split("<tools>").nth(1)?;
    listed.split("\"name\": \"").nth(1)?.split('"').next()
}

/// Says what each framework's prompt asks for.
fn model(prompt: &str) -> Option<String> {
    if let Some(text) = written_loop(prompt) {
        return Some(text);
    }
    let last = prompt.rsplit("<|im_start|>").nth(1)?;
    let shell = prompt.contains("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT");
    let said = match last.strip_prefix("tool\n") {
        Some(_) if shell => {
            let command = format!("printf 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n{ANSWER}\\n'");
            call("bash", &[("command", json!(command))])
        }
        Some(result) => format!("Answer: {}", result.split("<|im_end|>").next()?),
        None if shell => call("bash", &[("command", json!("echo $((17 * 23))"))]),
        None if prompt.contains("<tools>") => match first_tool(prompt)? {
            "calculator" => call("calculator", &[("expression", json!("17 * 23"))]),
            // The typed answer is asked for through a tool that the model must call.
            answer => call(answer, &[("answer", json!(391))]),
        },
        None if prompt.contains("`result`") => format!(r#"{{"result": {STRUCTURED}}}"#),
        None => STRUCTURED.to_owned(),
    };
    Some(said)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The interpreter of a program: its environment is installed by `scripts/setup.sh`.
fn interpreter(program: &str) -> PathBuf {
    let path = match program {
        "ai_sdk/agent.mjs" => ".cache/venv-litellm/bin/node",
        "pydantic_ai_agent.py" => ".cache/venv/bin/python3",
        _ => ".cache/venv-litellm/bin/python3",
    };
    let path = root().join(path);
    assert!(
        path.exists(),
        "{} is missing: run scripts/setup.sh",
        path.display()
    );
    path
}

fn world() -> World {
    world_with(model, |config, fake| {
        // Each byte is a token here, and frameworks have long prompts.
        config.session.max_context_tokens = 1 << 16;
        fake.context = 1 << 16;
        fake.grammars = Some(grammars());
    })
}

/// Runs a program against a separate rollout: what it printed last, and the rollout.
fn run(row: &Row, structured: bool) -> (String, Value) {
    let world = world();
    let rollout = world.open();
    let origin = rollout.base_url.trim_end_matches("/v1");
    let key = rollout.key.trim_start_matches("Bearer ");
    let folder = tempfile::tempdir().unwrap();
    let done = Command::new(interpreter(row.program))
        .arg(root().join("examples").join(row.program))
        .current_dir(folder.path())
        .env("HOME", folder.path())
        .env("OPENAI_BASE_URL", &rollout.base_url)
        .env("OPENAI_API_BASE", &rollout.base_url)
        .env("OPENAI_API_KEY", key)
        .env("ANTHROPIC_BASE_URL", origin)
        .env("ANTHROPIC_API_BASE", origin)
        .env("ANTHROPIC_API_KEY", key)
        .env("SINEW_TASK", "What is 17 * 23?")
        .env(
            "AGENT_ANSWER",
            if structured { "structured" } else { "text" },
        )
        .env("PYTHONDONTWRITEBYTECODE", "1")
        // LiteLLM would load its price list from the network at each start.
        .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        .envs(row.env.iter().copied())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = text(&done.stdout);
    let shown = format!(
        "{} {:?}: {printed}\n{}",
        row.program,
        row.env,
        text(&done.stderr)
    );
    assert!(done.status.success(), "{shown}");
    let view = world.view(&rollout.id);
    let finished = world.finish(&rollout.id);
    assert!(
        finished["sampled_tokens"].as_u64().unwrap() > 0,
        "{finished}"
    );
    let last = printed.lines().last().unwrap_or_default().to_owned();
    (last, view)
}

fn works(row: &Row) {
    let (answer, view) = run(row, false);
    let (program, env) = (row.program, row.env);
    assert_eq!(answer, ANSWER, "{program} {env:?}: {view}");
    let (calls, joins) = row.tool_loop;
    assert_eq!(view["stats"]["calls"], calls, "{program} {env:?}: {view}");
    for (join, times) in joins {
        assert_eq!(
            view["stats"]["joins"][join], *times,
            "{program} {env:?}: {view}"
        );
    }
    if row.structured {
        let (answer, view) = run(row, true);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer, json!({"answer": 391}), "{program} {env:?}: {view}");
        assert_eq!(view["stats"]["calls"], 1, "{program} {env:?}: {view}");
    }
}

/// A call and an answer that continues where the call ended.
const EXTENDS: (u64, &[(&str, u64)]) = (2, &[("start", 1), ("extend", 1)]);

const CHAT: &[(&str, &str)] = &[("AGENT_API", "chat_completions")];
const RESPONSES: &[(&str, &str)] = &[("AGENT_API", "responses")];
const ANTHROPIC: &[(&str, &str)] = &[("AGENT_API", "anthropic")];

/// A program with native tool calls and typed answers.
fn native(program: &'static str, env: &'static [(&'static str, &'static str)]) {
    works(&Row {
        program,
        env,
        tool_loop: EXTENDS,
        structured: true,
    });
}

#[test]
fn pydantic_ai_over_chat_completions() {
    native("pydantic_ai_agent.py", CHAT);
}

#[test]
fn pydantic_ai_over_responses() {
    native("pydantic_ai_agent.py", RESPONSES);
}

#[test]
fn pydantic_ai_over_messages() {
    native("pydantic_ai_agent.py", ANTHROPIC);
}

#[test]
fn litellm_over_chat_completions() {
    native("litellm_agent.py", &[]);
}

#[test]
fn litellm_over_messages() {
    native("litellm_agent.py", &[("AGENT_MODEL", "anthropic/policy")]);
}

#[test]
fn crewai_with_its_own_client() {
    native("crewai_agent.py", &[]);
}

/// It writes the tool call into the text, and asks for the typed answer through a tool.
#[test]
fn crewai_over_litellm() {
    works(&Row {
        program: "crewai_agent.py",
        env: &[("AGENT_LITELLM", "1")],
        tool_loop: (2, &[("start", 1)]),
        structured: true,
    });
}

/// Each turn of its loop is a new prompt with all that happened in it.
#[test]
fn dspy() {
    works(&Row {
        program: "dspy_agent.py",
        env: &[],
        tool_loop: (3, &[]),
        structured: true,
    });
}

/// A shell is all that it has: no typed answers.
#[test]
fn mini_swe_agent() {
    works(&Row {
        program: "mini_swe_agent.py",
        env: &[],
        tool_loop: EXTENDS,
        structured: false,
    });
}

#[test]
fn vercel_ai_sdk_over_chat_completions() {
    native("ai_sdk/agent.mjs", CHAT);
}

#[test]
fn vercel_ai_sdk_over_responses() {
    native("ai_sdk/agent.mjs", RESPONSES);
}

#[test]
fn vercel_ai_sdk_over_messages() {
    native("ai_sdk/agent.mjs", ANTHROPIC);
}

#[test]
fn vercel_ai_sdk_streamed() {
    native("ai_sdk/agent.mjs", &[("AGENT_STREAM", "1")]);
}

#[test]
fn vercel_ai_sdk_streamed_over_responses() {
    native(
        "ai_sdk/agent.mjs",
        &[("AGENT_API", "responses"), ("AGENT_STREAM", "1")],
    );
}

#[test]
fn vercel_ai_sdk_streamed_over_messages() {
    native(
        "ai_sdk/agent.mjs",
        &[("AGENT_API", "anthropic"), ("AGENT_STREAM", "1")],
    );
}
