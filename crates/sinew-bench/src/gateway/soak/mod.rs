//! `sinew bench soak`: a day of agents in minutes, hour by hour, and nothing may grow.
//!
//! A gateway with a journal serves agents that talk, stream, repeat requests, hang up, go back, rewrite their
//! histories, run into deadlines, leave and come back. The gateway is stopped after every hour, and a new one
//! continues with its journal. Time is compressed: agents do not think, and the limits that are times are
//! shorter by about as much.
//!
//! A day of 64 agents, compressed: times are divided, faults are not. Memory, open files, tasks of the
//! runtime and files of the journal are measured while nobody calls; they may vary within a slack and must
//! not grow. Gateways are stopped and started in between, with the journal and the store of before.

mod agent;
mod proof;

use super::process::raise_files;
use crate::clock;
use crate::row::{Printer, Row, Summary};
use crate::{BenchError, machine};
use agent::{Agents, Left, Tally};
use clap::Args;
use proof::Proven;
use sinew_gateway::{
    Gateway, GatewayConfig, GatewayParts, GatewayStats, Join, Journal, JournalOptions, Secret,
    Server, ServerLimits, SessionLimits,
};
use sinew_infer::{FakeConfig, FakeEngine, FakeModel, Fault, TokenBytes};
use sinew_render::{ChatRenderer, Renderer};
use sinew_types::{Engine, TokenId};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Agents at the same time, and how often each would call: every so many seconds.
const AGENTS: usize = 64;
/// Seconds between two calls of one agent.
const CALLS_EVERY_S: f64 = 15.0;
/// Time that the default number of turns stands for.
const HOURS: u64 = 24;
/// Turns of a day of such agents.
const DAY: u64 = (AGENTS as f64 * HOURS as f64 * 3600.0 / CALLS_EVERY_S) as u64;
/// One request of so many hangs.
const HANGS: u64 = 997;
/// Time of a pass of the engine; it makes answers long enough to hang up in.
const PASS: Duration = Duration::from_micros(100);
/// The times of an hour, compressed.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which an abandoned rollout is ended.
const ROLLOUT_TTL: Duration = Duration::from_secs(3);
/// Longest that calls may run on, or rollouts stay open, when nobody calls any more.
const QUIET_LIMIT: Duration = Duration::from_secs(60);
/// Allowed variation between two measurements, in MiB.
const SLACK_MIB: f64 = 8.0;
/// Open files.
const SLACK_FILES: f64 = 8.0;
/// Tasks of the runtime.
const SLACK_TASKS: f64 = 8.0;

/// Arguments of `sinew bench soak`.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Calls of all agents together; the default is a day of 64 agents that call every 15 seconds
    #[arg(long, default_value_t = DAY)]
    turns: u64,
    /// Seed of the agents' actions
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// A gateway that listens.
struct Serving {
    /// The gateway under test.
    gateway: Gateway,
    server: Server,
    /// Token of the control API.
    control: String,
    /// Reopened by the next gateway.
    journal: Arc<Journal>,
}

/// State that outlives a gateway.
struct World {
    /// Hangs at one request of [`HANGS`].
    engine: Arc<FakeEngine>,
    renderer: Arc<ChatRenderer>,
    /// Validates and counts each trace.
    store: Arc<Proven>,
    folder: tempfile::TempDir,
}

/// Levels of resources that may not grow.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// Resident memory of this process.
    resident_mib: f64,
    /// Open descriptors.
    files: f64,
    /// Tasks of the runtime.
    tasks: f64,
    /// Files of the journal.
    journal_files: f64,
}

/// Counts of all gateways.
#[derive(Debug, Default)]
struct Day {
    /// One after each gateway.
    levels: Vec<Level>,
    /// Counters of each gateway at its end.
    stats: Vec<GatewayStats>,
    /// Counts of the agents.
    tally: Tally,
    /// Sampled tokens of open rollouts that the next gateway did not find.
    forgotten: u64,
}

/// `sinew bench soak`.
pub(crate) fn run(args: &SoakArgs) -> Result<(), BenchError> {
    if !(HOURS..=100 * DAY).contains(&args.turns) {
        let most = 100 * DAY;
        return Err(BenchError::input(format!(
            "--turns {}: allowed: {HOURS} to {most}",
            args.turns
        )));
    }
    raise_files();
    let runtime = tokio::runtime::Runtime::new().map_err(BenchError::system)?;
    let world = World::new(args.turns)?;
    let start = Instant::now();
    let day = runtime.block_on(world.day(args))?;
    let printer = Printer::new(args.json);
    world.report(&day, start.elapsed(), printer);
    Ok(())
}

impl Serving {
    /// Stops it, and waits until nothing of it writes to the journal any more.
    async fn end(self) -> Result<GatewayStats, BenchError> {
        self.server.stop().await;
        // Nobody sweeps from here on.
        let stats = self.gateway.stats();
        drop(self.gateway);
        let start = Instant::now();
        while Arc::strong_count(&self.journal) > 1 {
            if start.elapsed() > QUIET_LIMIT {
                return Err(BenchError::system(
                    "something holds on to a stopped gateway",
                ));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(stats)
    }
}

impl World {
    fn new(turns: u64) -> Result<Self, BenchError> {
        let renderer = Arc::new(sinew_render::byte_renderer().map_err(BenchError::system)?);
        let ids = 0..renderer.vocab_size() as TokenId;
        let bytes = ids.map(|id| renderer.token_bytes(id).unwrap_or_default());
        let stop = renderer.stop_ids().first().copied();
        // Turns that are repeated or sampled twice are more requests than turns.
        let hang = |i: u64| (i * HANGS, Fault::HangAfter { tokens: 2 });
        let engine = FakeEngine::threaded(
            FakeConfig {
                model: FakeModel {
                    vocab: renderer.vocab_size(),
                    seed: 0,
                    end: None,
                },
                token_bytes: Some(TokenBytes::new(bytes)),
                script: Some(Arc::new(move |request| agent::script(request, stop))),
                faults: (1..=2 * turns / HANGS).map(hang).collect(),
                latency: PASS,
                ..FakeConfig::default()
            },
            clock(),
        );
        Ok(Self {
            engine: Arc::new(engine.map_err(BenchError::system)?),
            renderer,
            store: Arc::default(),
            folder: tempfile::tempdir().map_err(BenchError::system)?,
        })
    }

    /// A gateway that continues where the last one ended.
    async fn serve(&self) -> Result<Serving, BenchError> {
        let options = JournalOptions {
            file_bytes: 1 << 20,
            ..JournalOptions::default()
        };
        let journal = Journal::open(self.folder.path(), options).map_err(BenchError::system)?;
        let journal = Arc::new(journal);
        let config = GatewayConfig {
            session: SessionLimits {
                max_turns: 64,
                max_context_tokens: 4096,
                ..SessionLimits::default()
            },
            server: ServerLimits {
                call_timeout: CALL_TIMEOUT,
                rollout_ttl: ROLLOUT_TTL,
                // Its agents that leave do not come back.
                client_grace: Duration::ZERO,
                ..ServerLimits::default()
            },
            journal: Some(Arc::clone(&journal)),
            ..GatewayConfig::default()
        };
        let parts = GatewayParts {
            engine: Arc::clone(&self.engine) as Arc<dyn Engine>,
            renderer: Arc::clone(&self.renderer) as Arc<dyn Renderer>,
            store: Some(Arc::clone(&self.store) as Arc<_>),
            requests: self.store.requests(),
            capacity: None,
            hooks: None,
        };
        let gateway = Gateway::new(config, parts);
        gateway.recover().map_err(BenchError::system)?;
        let control = Secret::random_hex(24).map_err(BenchError::system)?;
        let address = "127.0.0.1:0".parse().map_err(BenchError::system)?;
        let server = Server::start(gateway.clone(), address, &control, None).await;
        Ok(Serving {
            gateway,
            server: server.map_err(BenchError::system)?,
            control,
            journal,
        })
    }

    /// Gateways one after the other until all turns are done.
    async fn day(&self, args: &SoakArgs) -> Result<Day, BenchError> {
        let mut day = Day::default();
        let mut left: Vec<Left> = Vec::new();
        let mut open_tokens = 0;
        for hour in 0..HOURS {
            let serving = self.serve().await?;
            day.forgotten += serving.gateway.stats().sampled_tokens.abs_diff(open_tokens);
            let agents = Agents {
                address: serving.server.address(),
                control: serving.control.clone(),
                // The remainder of the integer division is done in the last hour.
                turns: args.turns * (hour + 1) / HOURS - args.turns * hour / HOURS,
                seed: args.seed.wrapping_mul(HOURS).wrapping_add(hour),
                last: hour + 1 == HOURS,
            };
            let (tally, kept) = agents.run(std::mem::take(&mut left), AGENTS).await?;
            left = kept;
            day.tally.add(&tally);
            quiet(&serving.gateway, hour + 1 == HOURS).await?;
            let stats = serving.end().await?;
            open_tokens = stats.open_tokens;
            day.stats.push(stats);
            day.levels.push(level(self.folder.path())?);
        }
        Ok(day)
    }

    /// The rows; each has a target that must hold.
    fn report(&self, day: &Day, took: Duration, printer: Printer) {
        let row = |name: &str, unit: &str, value: f64| {
            let value = Summary {
                median: value,
                spread: 0.0,
                best: value,
            };
            Row::new(format!("soak.{name}"), unit, value)
        };
        let count = |name: &str, value: u64| printer.row(&row(name, "", value as f64));
        let none = |name: &str, value: u64| printer.row(&row(name, "", value as f64).at_most(0.0));
        let sum = |of: fn(&GatewayStats) -> u64| day.stats.iter().map(of).sum::<u64>();
        let joined = |join: Join| {
            let of = |s: &GatewayStats| s.joins.get(&join).copied().unwrap_or(0);
            day.stats.iter().map(of).sum::<u64>()
        };
        printer.row(&row("wall", "s", took.as_secs_f64()));
        count("turns", day.tally.turns);
        count("rollouts", sum(|s| s.opened));
        count("gateways", day.stats.len() as u64);
        for join in Join::ALL {
            count(&format!("join_{join:?}").to_lowercase(), joined(join));
        }
        count("recognized", sum(|s| s.recognized));
        count("retries_coalesced", sum(|s| s.coalesced));
        count("clients_gone", sum(|s| s.clients_gone));
        count("too_late", day.tally.too_late);
        count("left_to_expire", day.tally.abandoned);
        let engine = self.engine.status().sampled_tokens;
        let stored = self.store.sampled_tokens();
        count("sampled_tokens", engine);
        count("stored_tokens", stored);
        none("lost_or_doubled_tokens", engine.abs_diff(stored));
        none("forgotten_tokens", day.forgotten);
        none("unproven_traces", sum(|s| s.unproven));
        let left = day.stats.last().map_or(0, |s| s.rollouts as u64);
        none("rollouts_left", left);
        none("wrong_answers", day.tally.wrong);
        let grown = |of: fn(&Level) -> f64| growth(&day.levels, of);
        let memory = row("memory_growth", "MiB", grown(|l| l.resident_mib));
        printer.row(&memory.at_most(SLACK_MIB));
        let files = row("open_files_growth", "", grown(|l| l.files));
        printer.row(&files.at_most(SLACK_FILES));
        let tasks = row("tasks_growth", "", grown(|l| l.tasks));
        printer.row(&tasks.at_most(SLACK_TASKS));
        let journal = day.levels.last().map_or(0.0, |l| l.journal_files);
        // The one that is written to, and one that was full.
        printer.row(&row("journal_files_at_the_end", "", journal).at_most(2.0));
    }
}

/// The last quarter of the day against the second one: the first warms up.
fn growth(levels: &[Level], of: fn(&Level) -> f64) -> f64 {
    let quarter = levels.len() / 4;
    let middle = |levels: &[Level]| {
        let mut values: Vec<f64> = levels.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    };
    middle(&levels[levels.len() - quarter..]) - middle(&levels[quarter..2 * quarter])
}

/// Waits until no call runs. `all` also waits until every abandoned rollout has expired.
async fn quiet(gateway: &Gateway, all: bool) -> Result<(), BenchError> {
    let start = Instant::now();
    loop {
        let stats = gateway.stats();
        if stats.in_flight == 0 && (!all || stats.rollouts == 0) {
            return Ok(());
        }
        if start.elapsed() > QUIET_LIMIT {
            let why = format!("after {QUIET_LIMIT:?} without a call: {stats:?}");
            return Err(BenchError::system(why));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Measures now.
fn level(journal: &Path) -> Result<Level, BenchError> {
    let resident = machine::resident_memory("self");
    let resident = resident.ok_or_else(|| BenchError::system("/proc/self/status: no VmRSS"))?;
    let entries = |path: &Path| {
        let found = std::fs::read_dir(path).map_err(BenchError::system)?;
        Ok::<_, BenchError>(found.count() as f64)
    };
    let tasks = tokio::runtime::Handle::current().metrics();
    Ok(Level {
        resident_mib: resident / f64::from(1 << 20),
        files: entries(Path::new("/proc/self/fd"))?,
        tasks: tasks.num_alive_tasks() as f64,
        journal_files: entries(journal)?,
    })
}
