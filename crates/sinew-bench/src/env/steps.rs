//! Steps a second of environments through the whole loop of rollouts, and the memory of a session.
//!
//! The real parts are the machine of episodes, admission, the chat template, calls that are read from tokens,
//! the environment, its score, and a store in memory. There is no model: turns of the gold policy are given
//! as tokens at once.
//!
//! The rows of an environment are: the memory that a session adds, of this process and its workers together;
//! the environment's steps without the loop, if it is native; its steps through the loop at each number of
//! episodes.
//!
//! Every episode must be solved: one that fails or goes another way is an error, so that a fast wrong loop
//! has no figure. A step is a turn that the environment answered.

use super::script::{Script, ScriptedEngine};
use crate::BenchError;
use crate::machine::CpuTime;
use crate::peers::Peers;
use crate::row::{Better, Printer, Row, Summary};
use sinew_bridge::Python;
use sinew_env::{
    BUILT_IN, EnvConfig, EnvFactory, EnvKind, Needs, Sandboxes, Split, Taskset,
    registry::ReadConfig,
};
use sinew_render::{Renderer, TinyRenderer, byte_renderer};
use sinew_rollout::{
    AdmissionConfig, EpisodeLimits, EpisodeOptions, EpisodeParts, EpisodeSpec, Runner,
};
use sinew_sandbox::SandboxSpec;
use sinew_store::MemoryStore;
use sinew_types::{EpisodeId, GroupId, SamplingParams, Task, TokenKind};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Most sessions at once.
const MOST: usize = 1024;
/// Native environments. The last one runs code in sandboxes.
const NATIVE: [&str; 2] = ["tiny", "tool_math"];
/// Most sessions at once of an environment with a sandbox in each.
const SANDBOXES: usize = 64;
/// Worlds in Python. The last one runs code in separate processes: one session a worker.
const WORLDS: [&str; 17] = [
    "bargain:Bargain",
    "bargain:ConnectThree",
    "duo:Propose",
    "duo:Verify",
    "household:Household",
    "memory:Graph",
    "memory:Memory",
    "phone:Phone",
    "physics:Tabletop",
    "probes:Sources",
    "probes:Sycophancy",
    "reflect:Order",
    "research:Research",
    "retail:Retail",
    "search:Search",
    "survival:Survival",
    "repo:Repo",
];
/// The world that runs each session in a separate worker.
const ISOLATED: &str = "repo:Repo";
/// Different tasks that are played, again and again.
const TASKS: usize = 64;
/// Measured waves of episodes at each level.
const WAVES: usize = 3;
/// Episodes of a wave with one at once.
const ALONE: usize = 16;
/// Steps a second that the tiny environment is to reach with many at once.
const TINY: f64 = 10_000.0;
/// Times faster than the same environment in Python, under Gymnasium's vector API or the loop of `verifiers`.
const TIMES: f64 = 20.0;
/// Environments of the peers at once.
const PEER: usize = 64;
/// Longest time of an episode, far above any.
const PATIENCE: Duration = Duration::from_secs(600);
/// Bound of the store of a wave.
const STORE_BYTES: u64 = 4 << 30;

/// Names that `--env` takes.
pub(super) fn names() -> Vec<&'static str> {
    [&NATIVE[..], &WORLDS[..]].concat()
}

/// An environment with the tasks that are played.
struct World {
    name: &'static str,
    envs: Arc<dyn EnvFactory>,
    renderer: Arc<dyn Renderer>,
    /// Actions to play.
    script: Script,
    /// Most sessions at once.
    most: usize,
}

/// Measures the environments that `wanted` names, with each number of episodes of `at_once`.
///
/// # Errors
/// If one does not start, has no gold policy, or is not solved by it.
pub(super) fn run(
    wanted: &dyn Fn(&str) -> bool,
    at_once: &[u16],
    peers: &Peers,
    printer: Printer,
) -> Result<(), BenchError> {
    let runtime = Runtime::new().map_err(BenchError::system)?;
    let names = names().into_iter().filter(|n| wanted(n));
    let worlds = names.map(|name| World::open(name, &runtime));
    let worlds = worlds.collect::<Result<Vec<_>, _>>()?;
    // Memory is measured before anything has run: memory that a wave freed would be counted for a session.
    for world in &worlds {
        printer.row(&runtime.block_on(world.memory())?);
    }
    for world in &worlds {
        if NATIVE.contains(&world.name) {
            printer.row(&world.alone(&runtime, peers)?);
        }
        let levels = at_once.iter().map(|n| usize::from(*n));
        for at_once in levels.filter(|n| *n <= world.most) {
            printer.row(&runtime.block_on(world.steps(at_once))?);
        }
        if world.name == "tiny" {
            printer.row(&world.compared_with_verifiers(&runtime, peers)?);
        }
    }
    Ok(())
}

/// Keys of a native environment, all at their defaults.
fn native(name: &str) -> Result<(&'static EnvKind, ReadConfig), BenchError> {
    let kind = BUILT_IN.iter().find(|kind| kind.name == name);
    let kind = kind.ok_or_else(|| BenchError::system(format!("no environment {name}")))?;
    let keys = toml::de::ValueDeserializer::parse("{}").map_err(BenchError::system)?;
    Ok((kind, kind.read(keys).map_err(BenchError::system)?))
}

/// The row compared with what a peer's program makes of as many environments, or why it makes nothing.
fn compared(row: Row, peers: &Peers, peer: &str, program: &str) -> Row {
    match peers.run(program, &[&PEER.to_string()]) {
        Ok(made) => row
            .against(&made.version, made.summary.median, Better::More)
            .target(TIMES),
        Err(why) => row.without_peer(peer, why),
    }
}

impl World {
    /// The environment with its gold policy on the first tasks.
    fn open(name: &'static str, runtime: &Runtime) -> Result<Self, BenchError> {
        let bytes = || byte_renderer().map_err(BenchError::system);
        let mut sandboxes = None;
        let (config, renderer, most): (Arc<dyn EnvConfig>, Arc<dyn Renderer>, usize) =
            if NATIVE.contains(&name) {
                let (kind, (config, _)) = native(name)?;
                let Needs {
                    alphabet, sandbox, ..
                } = kind.needs;
                sandboxes = sandbox.then(self::sandboxes).transpose()?;
                let most = if sandbox { SANDBOXES } else { MOST };
                match alphabet {
                    Some(letters) => (config, Arc::new(TinyRenderer::new(letters)), most),
                    None => (config, Arc::new(bytes()?), most),
                }
            } else {
                let (keys, most) = python(name);
                (Arc::new(keys), Arc::new(bytes()?), most)
            };
        let tasks = config.taskset(0).map_err(BenchError::system)?;
        let envs = config.factory(sandboxes).map_err(BenchError::system)?;
        let tasks = first(tasks.as_ref())?;
        let script = Script::of(envs.as_ref(), renderer.as_ref(), tasks, runtime)?;
        Ok(Self {
            name,
            envs,
            renderer,
            script,
            most,
        })
    }

    /// Resident memory of this process and its workers that a session adds.
    async fn memory(&self) -> Result<Row, BenchError> {
        let open = async |count: usize| -> Result<Vec<_>, BenchError> {
            let mut sessions = Vec::new();
            for task in self.script.tasks().cycle().take(count) {
                let mut env = self.envs.create(task).map_err(BenchError::system)?;
                env.reset().await.map_err(BenchError::system)?;
                sessions.push(env);
            }
            Ok(sessions)
        };
        // Imports and caches of the first sessions are not a session's own.
        let mut sessions = open(1).await?;
        let before = super::memory::resident()?;
        let count = self.most - 1;
        sessions.extend(open(count).await?);
        let each = (super::memory::resident()? - before).max(0.0) / count as f64;
        for env in &mut sessions {
            env.close().await.map_err(BenchError::system)?;
        }
        let summary = Summary::of(vec![each / 1024.0], Better::Less).unwrap_or_default();
        let name = format!("{}: memory of a session, {count} open", self.name);
        Ok(Row::new(name, "KiB", summary))
    }

    /// Only the environment, on one thread: the cost of its steps without tokens, admission and store.
    fn alone(&self, runtime: &Runtime, peers: &Peers) -> Result<Row, BenchError> {
        const ROUNDS: usize = 5;
        let cpu = CpuTime::now();
        let mut rates = Vec::new();
        for _ in 0..ROUNDS {
            let (start, mut steps) = (Instant::now(), 0);
            while start.elapsed() < Duration::from_millis(200) {
                steps += runtime.block_on(self.script.play(self.envs.as_ref()))?;
            }
            rates.push(steps as f64 / start.elapsed().as_secs_f64());
        }
        let summary = Summary::of(rates, Better::More).unwrap_or_default();
        let name = format!("{}: steps alone, without the loop", self.name);
        let row = Row::new(name, "steps/s", summary).others(CpuTime::others_since(cpu));
        if self.name != "tiny" {
            return Ok(row);
        }
        Ok(compared(row, peers, "Gymnasium", "gymnasium_corridor.py"))
    }

    /// Waves of episodes through the whole loop, compared with the loop of `verifiers` around the same
    /// environment, whose model takes no time either.
    fn compared_with_verifiers(&self, runtime: &Runtime, peers: &Peers) -> Result<Row, BenchError> {
        let cpu = CpuTime::now();
        let rates = runtime.block_on(self.rates(PEER))?;
        let name = format!("{}: loop of {PEER} at once, whole episodes", self.name);
        let row = Row::new(name, "steps/s", rates).others(CpuTime::others_since(cpu));
        Ok(compared(row, peers, "verifiers", "verifiers_corridor.py"))
    }

    /// Waves of episodes through the whole loop.
    async fn steps(&self, at_once: usize) -> Result<Row, BenchError> {
        let cpu = CpuTime::now();
        let rates = self.rates(at_once).await?;
        let name = format!("{}: steps through the loop, {at_once} at once", self.name);
        let row = Row::new(name, "steps/s", rates).others(CpuTime::others_since(cpu));
        Ok(if self.name == "tiny" && at_once > 1 {
            row.at_least(TINY)
        } else {
            row
        })
    }

    /// Steps a second of each wave of episodes.
    async fn rates(&self, at_once: usize) -> Result<Summary, BenchError> {
        let episodes = at_once.max(ALONE);
        let mut rates = Vec::new();
        for wave in 0..=WAVES {
            let (start, steps) = (Instant::now(), self.wave(at_once, episodes).await?);
            // The first wave starts what starts by need.
            if wave > 0 {
                rates.push(steps as f64 / start.elapsed().as_secs_f64());
            }
        }
        Ok(Summary::of(rates, Better::More).unwrap_or_default())
    }

    /// Runs episodes to their end, as many at once as `at_once`; gives their steps.
    ///
    /// # Errors
    /// If an episode does not solve its task, or the store is full.
    async fn wave(&self, at_once: usize, episodes: usize) -> Result<usize, BenchError> {
        let store = Arc::new(MemoryStore::new(STORE_BYTES));
        let mut runner = Runner::new(self.parts(at_once), store, at_once);
        let specs = (0..episodes).map(|n| self.spec(n)).collect();
        let options = Arc::new(self.options());
        runner.start(specs, &options).map_err(BenchError::system)?;
        let (_stop, mut cancel) = watch::channel(false);
        let mut steps = 0;
        while runner.is_running() {
            for ended in runner
                .ended(&mut cancel)
                .await
                .map_err(BenchError::system)?
            {
                let trace = ended.trace;
                if !trace.outcome.success {
                    let (name, task, end) = (self.name, &trace.task, &trace.end);
                    let text = format!("{name}: the gold run of {task} did not solve it: {end:?}");
                    return Err(BenchError::system(text));
                }
                let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
                steps += sampled.count();
            }
        }
        Ok(steps)
    }

    /// An episode; its seed decides the engine's tokens.
    fn spec(&self, number: usize) -> EpisodeSpec {
        let (task, seed): (Task, u64) = self.script.task(number);
        EpisodeSpec {
            episode: EpisodeId::new(format!("d{number:08}-e0")),
            group: GroupId::new(format!("d{number:08}")),
            task,
            draw: number as u64,
            purpose: "train".into(),
            seed,
        }
    }

    /// Shared parts of the episodes. A wave has a separate engine and admission.
    fn parts(&self, at_once: usize) -> EpisodeParts {
        let engine: Arc<dyn sinew_types::Engine> =
            Arc::new(ScriptedEngine::new(&self.script, self.renderer.as_ref()));
        let bounds = AdmissionConfig {
            max_starting: at_once,
            ..AdmissionConfig::new(at_once, self.script.longest())
        };
        let (renderer, envs) = (Arc::clone(&self.renderer), Arc::clone(&self.envs));
        EpisodeParts::new(engine, renderer, envs, bounds)
    }

    /// Limits that no gold run reaches.
    fn options(&self) -> EpisodeOptions {
        EpisodeOptions {
            limits: EpisodeLimits {
                max_turns: 1000,
                max_turn_tokens: self.script.longest() as u32,
                max_context_tokens: 1 << 20,
            },
            sampling: SamplingParams::default(),
            chunk_tokens: None,
            replay_always: false,
            thinking: sinew_types::Thinking::Kept,
            boot_timeout: PATIENCE,
            timeout: PATIENCE,
            score_timeout: PATIENCE,
        }
    }
}

/// Sandboxes of the process level.
fn sandboxes() -> Result<Sandboxes, BenchError> {
    Ok(Sandboxes {
        provider: crate::programs::sandboxes(SANDBOXES)?,
        spec: SandboxSpec::default(),
        images: BTreeMap::new(),
        machines: None,
        user: None,
    })
}

/// Keys of a world in Python, and its most sessions at once.
fn python(name: &str) -> (Python, usize) {
    let mut keys = Python::new(&format!("sinew.worlds.{name}"));
    let isolated = name == ISOLATED;
    keys.workers = if isolated { 16 } else { super::WORKERS };
    keys.sessions_per_worker = if isolated { 1 } else { MOST };
    (keys, if isolated { 16 } else { MOST })
}

/// The first training tasks.
fn first(tasks: &dyn Taskset) -> Result<Vec<Task>, BenchError> {
    let count = tasks.len(Split::Train).min(TASKS);
    let tasks = (0..count).map(|i| tasks.get(Split::Train, i));
    tasks.collect::<Result<_, _>>().map_err(BenchError::system)
}
