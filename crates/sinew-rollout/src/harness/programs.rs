//! Runs one program in sandboxes: each run in a new sandbox, or as a fork of one interpreter.

use super::command::ProgramCommand;
use super::error::{ProgramError, invalid, missing};
use super::fork_server::ForkServer;
use super::model_server::ModelAccess;
use super::sandboxed::{ProgramEnd, Sandboxes, tail};
use serde_json::{Map, Value};
use sinew_agents::Agent;
use sinew_env::McpServer;
use sinew_sandbox::{Ending, Limits, SandboxProvider};
use sinew_types::Task;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Maximum time until a program calls the model, in [`Programs::asks_model`].
const ASKS_WITHIN: Duration = Duration::from_secs(120);
/// Maximum bytes of a program's output that are kept.
const OUTPUT_BYTES: u64 = 1 << 20;
/// Maximum bytes of files that a program may write.
const WORK_BYTES: u64 = 64 << 20;
/// Number of forks that the process limit of their common sandbox allows for.
const FORKS: u64 = 64;

/// A program and the limits of one run of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramConfig {
    /// Command with its paths inside a sandbox.
    pub command: ProgramCommand,
    /// Environment variables; they replace variables of the episode with the same name.
    pub env: BTreeMap<String, String>,
    /// Wall time of one run; an episode's own limit may be shorter.
    pub timeout: Duration,
    /// CPU time of one run, in seconds.
    pub cpu_s: f64,
    /// Memory limit of a sandbox in bytes; with `preload`, all forks share it.
    pub memory_bytes: u64,
    /// Processes and threads of one run.
    pub processes: u64,
    /// Whether a Python script's packages are imported once and each run is a fork. Forks share a sandbox.
    pub preload: bool,
    /// Whether a run is refused if a protection of the sandbox cannot be enforced.
    pub strict: bool,
    /// Whether the program is trusted with its own score.
    pub agent_scores: bool,
    /// The coding agent that the command starts, whose output has a known form.
    pub agent: Option<&'static Agent>,
}

impl ProgramConfig {
    /// Resource limits of one run, or of `forks` runs in one sandbox.
    fn limits(&self, forks: Option<u64>) -> Limits {
        Limits {
            // The fork server limits each of its forks; itself it lives long.
            cpu_s: if self.preload { 1e8 } else { self.cpu_s },
            memory_bytes: self.memory_bytes,
            processes: self.processes * forks.unwrap_or(1),
            output_bytes: OUTPUT_BYTES,
            work_bytes: WORK_BYTES,
            open_files: 4096,
        }
    }
}

/// Runs a program in sandboxes that reach only one address. All episodes of a run may share it.
pub struct Programs {
    config: ProgramConfig,
    sandboxes: Sandboxes,
    /// Settings of the sandboxes that forks share.
    shared: Sandboxes,
    fork_server: Mutex<ServerSlot>,
    /// Whether the program runs code of the model: each fork then has a separate server and sandbox.
    alone: AtomicBool,
}

/// The fork server, and its last failed start.
#[derive(Default)]
struct ServerSlot {
    /// Started by the first run, and again after it ended.
    server: Option<Arc<ForkServer>>,
    /// Time and error of the last failed start. Runs that waited for it share the error.
    failed: Option<(Instant, String)>,
}

sinew_types::debug_fields!(Programs, config);

impl Programs {
    /// Creates programs in sandboxes of `provider`, which must mount the folders of the command. `model` is
    /// the address of the model server on the host; the server has the same address inside.
    ///
    /// # Errors
    /// If `preload` is set for something that is not a Python script.
    pub fn new(
        config: ProgramConfig,
        provider: Arc<dyn SandboxProvider>,
        model: SocketAddr,
    ) -> Result<Self, ProgramError> {
        if config.preload && !config.command.is_python_script() {
            let allowed = "true is for a command that is a Python interpreter and a script";
            return Err(invalid("preload", allowed));
        }
        let sandboxes = Sandboxes {
            provider,
            limits: config.limits(None),
            strict: config.strict,
            model,
        };
        let shared = Sandboxes {
            limits: config.limits(Some(FORKS)),
            ..sandboxes.clone()
        };
        Ok(Self {
            config,
            sandboxes,
            shared,
            fork_server: Mutex::default(),
            alone: AtomicBool::new(false),
        })
    }

    /// Whether the program is trusted with its own score.
    pub(super) fn agent_scores(&self) -> bool {
        self.config.agent_scores
    }

    /// The coding agent that the command starts.
    pub(super) fn agent(&self) -> Option<&'static Agent> {
        self.config.agent
    }

    /// Wall time of one run.
    pub(super) fn timeout(&self) -> Duration {
        self.config.timeout
    }

    /// Address of the model server, inside and outside.
    pub(super) fn model(&self) -> SocketAddr {
        self.sandboxes.model
    }

    /// Command and variables of a run in the world of an episode. A coding agent is a script for the shell
    /// of that world, and gets the MCP servers of the task in its own form.
    pub(super) fn hosted(
        &self,
        access: &ModelAccess,
        task: &Task,
        servers: &BTreeMap<String, McpServer>,
    ) -> (Vec<String>, Vec<(String, String)>) {
        let mut argv = self.config.command.argv.clone();
        if let (Some(_), Some(shell)) = (self.config.agent, argv.first_mut()) {
            *shell = "/bin/sh".into();
        }
        let mut env = variables(&access.base_url, &access.api_key, task);
        env.extend(mcp_variable(self.config.agent, servers));
        env.extend(self.config.env.clone());
        (argv, env)
    }

    /// Checks that a sandbox can be created, by creating and destroying one.
    ///
    /// # Errors
    /// If it cannot be made, or lacks a protection that is required.
    pub async fn check_sandbox(&self) -> Result<(), ProgramError> {
        let (sandbox, _forward) = self.sandboxes.acquire(Vec::new()).await?;
        Ok(sandbox.destroy().await?)
    }

    /// Starts the program with a task and its rollout at a model server, and waits for its first call.
    /// `answered` resolves with the server's result of this call. If the call is accepted, the program has
    /// found its packages and its task, and uses an API that the server supports.
    ///
    /// # Errors
    /// If the server refuses that call, or the program ends or 120 seconds pass before it.
    pub async fn asks_model(
        &self,
        access: &ModelAccess,
        task: &Task,
        answered: impl Future<Output = Result<(), impl Display>>,
    ) -> Result<(), ProgramError> {
        let limit = self.config.timeout.min(ASKS_WITHIN);
        let run = self.run(&access.base_url, &access.api_key, task, limit);
        let mut answered = std::pin::pin!(answered);
        let ended = tokio::select! {
            biased;
            answer = &mut answered => return answer.map_err(refused),
            ended = run => ended,
        };
        // Both may have come at the same time.
        tokio::select! {
            biased;
            answer = answered => answer.map_err(refused),
            () = std::future::ready(()) => Err(not_asked(ended, limit)),
        }
    }

    /// Runs the program once for a task, to its end or `limit`. A run past `limit` is killed, and its
    /// ending is [`Ending::Timeout`].
    pub(super) async fn run(
        &self,
        base_url: &str,
        api_key: &str,
        task: &Task,
        limit: Duration,
    ) -> Result<ProgramEnd, ProgramError> {
        let mut env = variables(base_url, api_key, task);
        if self.config.agent_scores {
            env.push(("SINEW_REWARD_URL".into(), format!("{base_url}/reward")));
            // A program that is trusted with the score may see the data that it is scored by.
            env.push(("SINEW_TASK_DATA".into(), task.data.to_string()));
        }
        env.extend(self.config.env.clone());
        let command = &self.config.command;
        if !self.config.preload {
            return self.sandboxes.run(command, env, limit).await;
        }
        if !self.alone.load(Ordering::Relaxed) {
            let server = self.server().await?;
            let Some(place) = server.code() else {
                let ended = server.run(env, (self.config.cpu_s, false), limit).await?;
                if ended.refused {
                    self.separate("a process or a text that runs as code");
                }
                return Ok(ended);
            };
            self.separate(place);
            self.fork_server.lock().await.server = None;
        }
        let server = ForkServer::start(&self.sandboxes, command).await?;
        server.run(env, (self.config.cpu_s, true), limit).await
    }

    /// Makes each later episode use a separate sandbox.
    fn separate(&self, place: &str) {
        if !self.alone.swap(true, Ordering::Relaxed) {
            tracing::info!(
                place,
                "code of the model runs here: each episode has a sandbox of its own, and imports what it needs"
            );
        }
    }

    /// Returns the fork server, after starting one if none is running.
    async fn server(&self) -> Result<Arc<ForkServer>, ProgramError> {
        let asked = Instant::now();
        let mut slot = self.fork_server.lock().await;
        if let Some(server) = slot.server.as_ref().filter(|s| s.is_alive()) {
            return Ok(Arc::clone(server));
        }
        // Each of many runs must not wait for a separate start that fails as well.
        if let Some((_, why)) = slot.failed.as_ref().filter(|(at, _)| *at > asked) {
            return Err(ProgramError::Failed(why.clone()));
        }
        slot.server = None;
        match ForkServer::start(&self.shared, &self.config.command).await {
            Ok(server) => {
                let server = Arc::new(server);
                slot.server = Some(Arc::clone(&server));
                Ok(server)
            }
            Err(e) => {
                slot.failed = Some((Instant::now(), e.to_string()));
                Err(e)
            }
        }
    }
}

/// Returns the environment variables of the program. The solution of the task is not among them.
fn variables(base_url: &str, api_key: &str, task: &Task) -> Vec<(String, String)> {
    let origin = base_url.strip_suffix("/v1").unwrap_or(base_url);
    [
        ("OPENAI_BASE_URL", base_url),
        ("OPENAI_API_KEY", api_key),
        ("ANTHROPIC_BASE_URL", origin),
        ("ANTHROPIC_API_KEY", api_key),
        ("GOOGLE_GEMINI_BASE_URL", origin),
        ("GEMINI_API_KEY", api_key),
        ("SINEW_TASK", &task.prompt),
        ("SINEW_TASK_ID", task.id.as_str()),
        ("SINEW_TASK_KIND", &task.kind),
        ("PYTHONDONTWRITEBYTECODE", "1"),
        ("PYTHONUNBUFFERED", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

/// Returns the variable with the MCP servers of a task, in the form of a coding agent, or else as most
/// clients write them. `None`: there are no servers.
fn mcp_variable(
    agent: Option<&Agent>,
    servers: &BTreeMap<String, McpServer>,
) -> Option<(String, String)> {
    let all = servers.iter();
    let all = all.map(|(name, server)| (name.clone(), server.to_json()));
    let all: Map<String, Value> = all.collect();
    if all.is_empty() {
        return None;
    }
    let text = match agent {
        Some(agent) => agent.mcp_servers(&all),
        None => Value::Object(all).to_string(),
    };
    Some(("SINEW_MCP_SERVERS".to_owned(), text))
}

/// Returns the error for a program whose first model call was refused.
fn refused(why: impl Display) -> ProgramError {
    missing(
        "command",
        format!("the model server refused the program's first call: {why}"),
    )
}

/// Returns the error for a program that ended before it called the model.
fn not_asked(ended: Result<ProgramEnd, ProgramError>, limit: Duration) -> ProgramError {
    let hint = "hint: start it by hand with OPENAI_BASE_URL and SINEW_TASK set; what it imports must be \
                installed where its sandbox sees it";
    let how = match ended {
        Err(ProgramError::Failed(why)) => why,
        Err(other) => return other,
        Ok(ProgramEnd {
            ending: Ending::Timeout,
            ..
        }) => format!("{} s passed", limit.as_secs_f64()),
        Ok(ended) => format!("it ended ({:?}): {}", ended.ending, tail(&ended.stderr)),
    };
    missing(
        "command",
        format!("the program did not ask the model: {how}\n  {hint}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_find_their_rollout_and_not_the_solution() {
        let task = Task {
            id: sinew_types::TaskId::new("t"),
            kind: "k".into(),
            prompt: "p".into(),
            data: serde_json::json!({ "answer": 42 }),
            ..Task::default()
        };
        let env = variables("http://127.0.0.1:5/r/e/v1", "key", &task);
        let get = |name: &str| {
            let found = env.iter().find(|(n, _)| n == name);
            found.map(|(_, v)| v.as_str()).unwrap()
        };
        assert_eq!(get("OPENAI_BASE_URL"), "http://127.0.0.1:5/r/e/v1");
        assert_eq!(get("ANTHROPIC_BASE_URL"), "http://127.0.0.1:5/r/e");
        assert_eq!(get("GOOGLE_GEMINI_BASE_URL"), "http://127.0.0.1:5/r/e");
        assert_eq!(get("GEMINI_API_KEY"), "key");
        assert_eq!(
            (get("OPENAI_API_KEY"), get("ANTHROPIC_API_KEY")),
            ("key", "key")
        );
        assert_eq!(get("SINEW_TASK"), "p");
        assert!(env.iter().all(|(_, value)| !value.contains("42")));
    }

    #[test]
    fn programs_find_the_mcp_servers_of_their_task() {
        let server = McpServer::Stdio {
            command: "files".into(),
            args: vec!["-v".into()],
        };
        let mut servers = BTreeMap::new();
        assert_eq!(mcp_variable(None, &servers), None);
        servers.insert("a".to_owned(), server);
        let (name, text) = mcp_variable(None, &servers).unwrap();
        assert_eq!(name, "SINEW_MCP_SERVERS");
        let read: Value = serde_json::from_str(&text).unwrap();
        let own = serde_json::json!({ "type": "stdio", "command": "files", "args": ["-v"] });
        assert_eq!(read["a"], own);
        let (_, table) = mcp_variable(Some(&sinew_agents::CODEX), &servers).unwrap();
        assert!(table.contains("[mcp_servers.a]"), "{table}");
    }

    /// Functions of agents that run code which leaves a process behind: it writes to whatever it can reach.
    const AGENT: &str = r#"
import os, sys
DAEMON = """
import glob, os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    while True:
        for path in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/mem'):
            try:
                with open(path, 'wb') as file:
                    file.write(b'{"reward": 1.0}')
            except OSError:
                pass
        time.sleep(0.01)
"""

def read(name):
    try:
        with open("/proc/%d/%s" % (os.getppid(), name), "rb") as file:
            return len(file.read(1))
    except OSError:
        return 0

def solve(task):
    fresh = os.getpid() < 10 and not os.listdir("/tmp")
    open("/tmp/left", "w").close()
    start([sys.executable, "-c", DAEMON])
    print('{"reward": 1.0}')
    return {"reward": 0.0, "metrics": {"fresh": float(fresh), "read": read("mem") + read("environ")}}
"#;

    fn programs(dir: &std::path::Path, source: &str) -> Programs {
        use sinew_sandbox::{ProcessConfig, ProcessProvider};
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        let file = dir.join("agent.py");
        std::fs::write(&file, source).unwrap();
        let words = ["python3", file.to_str().unwrap(), "--sinew-call", "solve"];
        let words = words.map(str::to_owned);
        let command = ProgramCommand::resolve(&words, &BTreeMap::new(), false).unwrap();
        let mut config = ProcessConfig::new(&std::env::var("PATH").unwrap());
        config.shows = command.shows.clone();
        config.zygote = false;
        let provider = Arc::new(ProcessProvider::start(config).unwrap());
        let config = ProgramConfig {
            command,
            env: BTreeMap::new(),
            timeout: Duration::from_secs(60),
            cpu_s: 30.0,
            memory_bytes: 512 << 20,
            processes: 64,
            preload: true,
            strict: false,
            agent_scores: true,
            agent: None,
        };
        Programs::new(config, provider, ([127, 0, 0, 1], 9).into()).unwrap()
    }

    async fn solved(programs: &Programs) -> ProgramEnd {
        let task = Task {
            id: sinew_types::TaskId::new("t"),
            kind: "k".into(),
            prompt: "p".into(),
            data: serde_json::json!({}),
            ..Task::default()
        };
        let limit = Duration::from_secs(60);
        programs
            .run("http://127.0.0.1:9/v1", "key", &task, limit)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn code_of_an_agent_ends_with_its_episode_and_says_no_value() {
        let dir = tempfile::tempdir().unwrap();
        let source = format!("import subprocess\nstart = subprocess.run\n{AGENT}");
        let programs = programs(dir.path(), &source);
        for _ in 0..3 {
            let ended = solved(&programs).await;
            let value = serde_json::json!({"reward": 0.0, "metrics": {"fresh": 1.0, "read": 0}});
            assert_eq!(ended.value, Some(value), "{ended:?}");
        }
    }

    #[tokio::test]
    async fn code_does_not_start_where_episodes_share_a_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let source = format!("start = __import__('sub' + 'process').run\n{AGENT}");
        let programs = programs(dir.path(), &source);
        let ended = solved(&programs).await;
        assert!(
            ended.refused && ended.value.is_none() && ended.stderr.contains("subprocess.Popen"),
            "{ended:?}"
        );
        let ended = solved(&programs).await;
        assert_eq!(ended.value.unwrap()["reward"], 0.0);
    }

    #[tokio::test]
    async fn agents_without_code_share_a_server() {
        let dir = tempfile::tempdir().unwrap();
        let source = "import os\ndef solve(task):\n    print('{}')\n    return {'reward': 0.5, 'metrics': {'server': os.getppid()}}";
        let programs = programs(dir.path(), source);
        let (first, second) = (solved(&programs).await, solved(&programs).await);
        assert!(first.value.is_some() && first.value == second.value);
        assert_eq!(
            (first.ending, first.stdout.as_str()),
            (Ending::Exited { code: 0 }, "{}\n")
        );
    }
}
