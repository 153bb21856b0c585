//! Costs of environments: steps through the whole loop, and a step, a session and a score of Python workers.
//!
//! | part | measures |
//! |---|---|
//! | `step` | what a worker adds to a call of a method in Python |
//! | `memory` | two workers with a thousand open sessions |
//! | `scores` | a reward in Python, many asked for at the same time |
//! | `steps` | environments with the gold policy in place of a model, at 1, 64 and 1,024 episodes at once |
//!
//! Everything runs on the host that is measured, in sandboxes where a run would have them. A development
//! build is not representative for native environments: it optimizes only kernels and the loops around them.

mod memory;
mod script;
mod steps;

use super::row::{Better, Printer, Row, Summary};
use crate::BenchError;
use crate::peers::Peers;
use clap::Args;
use futures::StreamExt;
use serde_json::{Value, json};
use sinew_bridge::{
    PythonCode, PythonEnvFactory, PythonReward, PythonWorkers, Target, TargetKind, WorkersConfig,
};
use sinew_env::{Action, Env, EnvFactory, Reward, RewardSample};
use sinew_types::{Task, TaskId, ToolCall};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The measured module.
const MODULE: &str = include_str!("env.py");
/// Workers: as many as the machine has cores that the targets are stated for.
const WORKERS: usize = 2;
/// Measured steps.
const STEPS: usize = 2000;
/// Steps that are not measured.
const WARM: usize = 200;
/// Sessions at once.
const SESSIONS: usize = 1000;
/// Measured scores of one batch.
const SCORES: usize = 4000;
/// Batches of [`SCORES`].
const BATCHES: usize = 5;
/// Scores that are asked for at the same time.
const AT_ONCE: usize = 64;
/// Maximum milliseconds that a worker adds to a step.
const STEP_MS: f64 = 0.5;
/// Maximum memory of all workers with their sessions, in GiB.
const MEMORY_GIB: f64 = 1.0;
/// Maximum milliseconds of a score: 2,000 scores a second.
const SCORE_MS: f64 = 0.5;

/// Arguments of `sinew bench env`.
#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: step, memory, scores, steps
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Environments of the part steps, such as tiny or household:Household; left out: all
    #[arg(long, value_delimiter = ',')]
    env: Vec<String>,
    /// Episodes at once in the part steps, each up to 1024
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,64,1024",
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    at_once: Vec<u16>,
    /// Python that has the peers of the part steps, Gymnasium and verifiers (benches/peers/environments.txt)
    #[arg(long)]
    peer_python: Option<PathBuf>,
    /// Folder of the peers' programs
    #[arg(long, default_value = "benches/peers")]
    peers: PathBuf,
}

/// Names that `--only` takes.
const PARTS: [&str; 4] = ["step", "memory", "scores", "steps"];
/// Longest time of the peer.
const PEER_LIMIT: Duration = Duration::from_secs(120);

/// `sinew bench env`.
pub(super) fn run(args: &EnvArgs) -> Result<(), BenchError> {
    let wanted = super::selected(&args.only, &PARTS)?;
    let names = steps::names();
    if let Some(unknown) = args.env.iter().find(|e| !names.contains(&e.as_str())) {
        let names = names.join(", ");
        return Err(BenchError::input(format!(
            "--env {unknown}: allowed: {names}"
        )));
    }
    let module = Module::write()?;
    let runtime = tokio::runtime::Runtime::new().map_err(BenchError::system)?;
    let printer = Printer::new(args.json);
    if wanted("step") || wanted("memory") {
        let workers = module.workers("Counter", TargetKind::Env)?;
        let factory = PythonEnvFactory::new(workers, 0, "Counter").map_err(BenchError::system)?;
        if wanted("step") {
            printer.row(&runtime.block_on(step(&factory))?);
        }
        if wanted("memory") {
            printer.row(&runtime.block_on(memory(&factory))?);
        }
    }
    if wanted("scores") {
        for function in ["exact", "exact_async"] {
            let workers = module.workers(function, TargetKind::Reward)?;
            let reward = PythonReward::new(workers, 0, function).map_err(BenchError::system)?;
            printer.row(&runtime.block_on(scores(&reward))?);
        }
    }
    if wanted("steps") {
        let peers = Peers {
            python: args.peer_python.clone(),
            scripts: args.peers.clone(),
            limit: PEER_LIMIT,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        };
        let named = |name: &str| args.env.is_empty() || args.env.iter().any(|e| e == name);
        steps::run(&named, &args.at_once, &peers, printer)?;
    }
    Ok(())
}

/// The measured module as a file.
struct Module(tempfile::TempDir);

impl Module {
    /// Writes the module where sandboxes can read it.
    fn write() -> Result<Self, BenchError> {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().map_err(BenchError::system)?;
        std::fs::write(dir.path().join("bench_env.py"), MODULE).map_err(BenchError::system)?;
        // Sandboxes have separate users, who must be able to read it.
        let readable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path(), readable).map_err(BenchError::system)?;
        Ok(Self(dir))
    }

    /// A pool of [`WORKERS`] processes with a class or function of the module.
    fn workers(&self, name: &str, kind: TargetKind) -> Result<PythonWorkers, BenchError> {
        let text = format!("bench_env.py:{name}");
        let target = Target::parse(&text, kind, self.0.path()).map_err(BenchError::system)?;
        let search = std::env::var("PATH").unwrap_or_default();
        let code = PythonCode::find(&[target], "python3", &search).map_err(BenchError::system)?;
        let provider = code
            .process_provider(WORKERS + 1)
            .map_err(BenchError::system)?;
        let mut config = WorkersConfig::new(provider);
        config.workers = WORKERS;
        config.sessions_per_worker = SESSIONS;
        PythonWorkers::start(config, code).map_err(BenchError::system)
    }
}

/// The task of every session.
fn task() -> Task {
    Task {
        id: TaskId::new("bench"),
        kind: "bench".into(),
        preamble: Vec::new(),
        prompt: "Count.".into(),
        data: json!({"answer": "42"}),
        seed: 1,
    }
}

/// An environment that was reset.
async fn open(factory: &PythonEnvFactory) -> Result<Box<dyn Env>, BenchError> {
    let mut env = factory.create(&task()).map_err(BenchError::system)?;
    env.reset().await.map_err(BenchError::system)?;
    Ok(env)
}

/// The result of one tool call.
async fn call(env: &mut dyn Env, tool: &str, arguments: Value) -> Result<Value, BenchError> {
    let action = Action {
        tool_calls: vec![ToolCall {
            id: "call-0".into(),
            name: tool.into(),
            arguments,
        }],
        ..Action::say("")
    };
    let step = env.step(action).await.map_err(BenchError::system)?;
    let content = step.observation.map(|o| o.content).unwrap_or_default();
    serde_json::from_str(&content.text()).map_err(BenchError::system)
}

/// Time that a worker adds to a step, beyond the call of the method within Python.
async fn step(factory: &PythonEnvFactory) -> Result<Row, BenchError> {
    let mut env = open(factory).await?;
    let mut times = Vec::with_capacity(STEPS);
    for i in 0..WARM + STEPS {
        let started = Instant::now();
        call(env.as_mut(), "add", json!({"amount": 1})).await?;
        if i >= WARM {
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    let direct = call(env.as_mut(), "direct", json!({"calls": 100_000})).await?;
    env.close().await.map_err(BenchError::system)?;
    let direct_ms = direct.as_f64().unwrap_or_default() * 1e3;
    let added = times.into_iter().map(|t| t - direct_ms).collect();
    let summary = Summary::of(added, Better::Less).unwrap_or_default();
    Ok(Row::new("python step over a direct call", "ms", summary).at_most(STEP_MS))
}

/// Resident memory of all workers with many open sessions.
async fn memory(factory: &PythonEnvFactory) -> Result<Row, BenchError> {
    let opened: Vec<Result<Box<dyn Env>, BenchError>> =
        futures::stream::iter((0..SESSIONS).map(|_| open(factory)))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
    let mut processes: BTreeMap<String, f64> = BTreeMap::new();
    let mut sessions = opened.into_iter().collect::<Result<Vec<_>, _>>()?;
    for env in &mut sessions {
        let answer = call(env.as_mut(), "memory", json!({})).await?;
        for (process, bytes) in answer.as_object().into_iter().flatten() {
            processes.insert(process.clone(), bytes.as_f64().unwrap_or_default());
        }
    }
    for env in &mut sessions {
        env.close().await.map_err(BenchError::system)?;
    }
    let gib = processes.values().sum::<f64>() / f64::from(1 << 30);
    let summary = Summary::of(vec![gib], Better::Less).unwrap_or_default();
    let name = format!("python workers with {SESSIONS} sessions");
    Ok(Row::new(name, "GiB", summary).at_most(MEMORY_GIB))
}

/// Time of one score when many are asked for.
async fn scores(reward: &PythonReward) -> Result<Row, BenchError> {
    let sample = RewardSample::new(task(), " 42");
    let mut times = Vec::new();
    for batch in 0..=BATCHES {
        let started = Instant::now();
        let all: Vec<_> = futures::stream::iter((0..SCORES).map(|_| reward.score(&sample)))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        if let Some(Err(unscored)) = all.iter().find(|s| s.is_err()) {
            return Err(BenchError::system(unscored));
        }
        // The first batch starts the workers.
        if batch > 0 {
            times.push(started.elapsed().as_secs_f64() * 1e3 / SCORES as f64);
        }
    }
    let summary = Summary::of(times, Better::Less).unwrap_or_default();
    let name = format!("python score, {} ({WORKERS} workers)", Reward::name(reward));
    Ok(Row::new(name, "ms", summary).at_most(SCORE_MS))
}
