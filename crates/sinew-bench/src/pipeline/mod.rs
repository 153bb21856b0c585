//! `sinew bench pipeline`: how much of the time engine, tools and trainer work, compared with
//! the ideal.
//!
//! | part | measures |
//! |---|---|
//! | `interleave` | use of an engine with passes of a given time by hundreds of episodes with slow tools |
//! | `sandboxes` | the same with each call in a sandbox of the process level |
//! | `overlap` | `train.mode` async over sync, with real training of a tiny model |
//! | `durable` | the same run with its episodes on disk and in memory |
//! | `signals` | CPU time of everything that tells other systems of a run |
//! | `store` | inserts a second into a large store, and its size on disk |
//!
//! All but `signals` and `store` run the training loop itself. Ideal schedules are computed from the same
//! draws.

mod ideal;
mod insert;
mod session;
mod signals;
mod timeline;
mod world;

use super::machine::{CpuTime, cpu_s};
use super::row::{Better, Printer, Row, Summary};
use crate::{BenchError, programs};
use clap::Args;
use ideal::{Engine, Groups};
use session::{RunTimes, Sampler, Shape};
use std::path::PathBuf;
use std::time::Instant;
use world::{Calls, Tool, World};

/// Names that `--only` takes.
const PARTS: [&str; 6] = [
    "interleave",
    "sandboxes",
    "overlap",
    "durable",
    "signals",
    "store",
];
/// Groups of a step of the part `overlap`, and episodes of a group, turns of each, and tokens of a turn.
const OVERLAP: (usize, usize, usize, usize) = (8, 4, 3, 2);
/// Steps that samples may be behind in mode async.
const STALENESS: usize = 2;

/// Arguments of `sinew bench pipeline`.
#[derive(Debug, Args)]
pub(crate) struct PipelineArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: interleave, sandboxes, overlap, durable, signals, store
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds of each measurement, by turns where two are compared
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seed of how long calls take
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Episodes of the parts interleave and durable, 8 a group
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(8..=8192))]
    episodes: u64,
    /// Episodes of the part sandboxes, each with a sandbox of its own
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(8..=4096))]
    sandboxes: u64,
    /// Turns of an episode of these parts
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=100))]
    turns: u64,
    /// Milliseconds of a pass of the engine
    #[arg(long, default_value_t = 3.0, value_parser = positive)]
    pass_ms: f64,
    /// Requests that get a token in a pass; a row each
    #[arg(long, value_delimiter = ',', default_values_t = [512, 32],
        value_parser = clap::value_parser!(u64).range(1..=8192))]
    slots: Vec<u64>,
    /// Milliseconds of the shortest call
    #[arg(long, default_value_t = 50.0, value_parser = positive)]
    shortest_ms: f64,
    /// Milliseconds of the longest call
    #[arg(long, default_value_t = 2000.0, value_parser = positive)]
    longest_ms: f64,
    /// Steps of the part overlap in each mode
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(2..=1000))]
    steps: u64,
    /// Write a timeline of the part overlap to this SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Rows of the part store; a million take about 1.5 GB in the temporary folder, and are removed
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..=5_000_000))]
    rows: u64,
}

/// A number of milliseconds above 0.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok();
    let number = number.filter(|ms: &f64| *ms > 0.0 && *ms <= 3.6e6);
    number.ok_or_else(|| "allowed: above 0, up to 3600000".to_owned())
}

/// Episodes of a group of the parts that train nothing.
const GROUP: usize = 8;
/// Tokens of a turn of these parts.
const TURN_TOKENS: usize = 16;

/// Runs the parts that are asked for.
pub(crate) fn run(args: &PipelineArgs) -> Result<(), BenchError> {
    let wanted = super::selected(&args.only, &PARTS)?;
    if args.longest_ms < args.shortest_ms {
        let (longest, shortest) = (args.longest_ms, args.shortest_ms);
        return Err(BenchError::input(format!(
            "--longest-ms {longest}: allowed: from --shortest-ms, {shortest}"
        )));
    }
    if args.plot.is_some() && !wanted("overlap") {
        return Err(BenchError::input(
            "--plot: a plot of the part overlap, which --only leaves out",
        ));
    }
    let bench = Bench {
        args,
        printer: Printer::new(args.json),
    };
    if wanted("interleave") {
        bench.interleave()?;
    }
    if wanted("sandboxes") {
        bench.sandboxes()?;
    }
    if wanted("overlap") {
        bench.overlap()?;
    }
    if wanted("durable") {
        bench.durable()?;
    }
    if wanted("signals") {
        signals::run(args.rounds, bench.printer)?;
    }
    if wanted("store") {
        insert::run(args.rows as usize, bench.printer)?;
    }
    Ok(())
}

/// Context of the parts.
struct Bench<'a> {
    args: &'a PipelineArgs,
    printer: Printer,
}

/// A folder of a run, removed at its end.
fn folder() -> Result<tempfile::TempDir, BenchError> {
    tempfile::Builder::new()
        .prefix("sinew-bench-")
        .tempdir()
        .map_err(BenchError::system)
}

/// Runs a shape in a separate folder.
fn in_folder(shape: &Shape, world: &World) -> Result<RunTimes, BenchError> {
    shape.run(world, folder()?.path())
}

impl Bench<'_> {
    /// Calls of `turns` turns with the times of the arguments.
    fn calls(&self, turns: usize) -> Calls {
        Calls {
            turns,
            shortest_s: self.args.shortest_ms / 1e3,
            longest_s: self.args.longest_ms / 1e3,
            seed: self.args.seed,
        }
    }

    /// Rollouts of one step of so many episodes, with a fake engine.
    fn shape(&self, episodes: u64, slots: u64, steps: usize) -> (Shape, Engine) {
        let engine = Engine {
            slots: slots as usize,
            pass_s: self.args.pass_ms / 1e3,
            turn_tokens: TURN_TOKENS,
        };
        let shape = Shape {
            sampler: Sampler::Fake(engine),
            steps,
            groups: Groups {
                of_step: (episodes as usize / steps).div_ceil(GROUP).max(1),
                size: GROUP,
            },
            staleness: None,
            durable: true,
        };
        (shape, engine)
    }

    /// Use of a fake engine, once for each number of places.
    fn interleave(&self) -> Result<(), BenchError> {
        for slots in &self.args.slots {
            self.rollouts("interleave", self.args.episodes, *slots, &Tool::Sleep)?;
        }
        Ok(())
    }

    /// The same with a process in a sandbox for each call.
    fn sandboxes(&self) -> Result<(), BenchError> {
        let runtime = tokio::runtime::Runtime::new().map_err(BenchError::system)?;
        let provider = {
            let _inside = runtime.enter();
            programs::sandboxes(self.args.sandboxes as usize)
        };
        let tool = match provider {
            Ok(provider) => Tool::Sandbox(provider),
            Err(e) => {
                let row = Row::missing("sandboxes", "s", e.to_string());
                self.printer.row(&row);
                return Ok(());
            }
        };
        let slots = self.args.slots.first().copied().unwrap_or(512);
        self.rollouts("sandboxes", self.args.sandboxes, slots, &tool)
    }

    /// One step of rollouts: use of the engine compared with the ideal schedule, and time compared with
    /// episodes that run one after the other. Both are computed from the same draws.
    fn rollouts(
        &self,
        part: &str,
        episodes: u64,
        slots: u64,
        tool: &Tool,
    ) -> Result<(), BenchError> {
        let (shape, engine) = self.shape(episodes, slots, 1);
        let turns = self.args.turns as usize;
        let (mut seconds, mut busy, mut draws) = (Vec::new(), Vec::new(), Vec::new());
        let cpu = CpuTime::now();
        for _ in 0..self.args.rounds {
            let world = World::new(self.calls(turns), tool.clone());
            let ran = in_folder(&shape, &world)?;
            let step = &ran.steps[0];
            if step.rollout.failed > 0 {
                let (failed, cause) = (step.rollout.failed, &step.failed_cause);
                return Err(BenchError::system(format!(
                    "{failed} episodes failed: {cause:?}"
                )));
            }
            seconds.push(step.rollout_s);
            busy.push(step.engine_busy_s / step.rollout_s);
            draws = world.order();
        }
        let others = CpuTime::others_since(cpu);
        let calls = self.calls(turns);
        let members = |task: &usize| (0..GROUP).map(|m| calls.of(*task, m)).collect::<Vec<_>>();
        let draws: Vec<Vec<f64>> = draws.iter().flat_map(members).collect();
        let size = format!("{} episodes, {turns} turns, batch {slots}", draws.len());
        let tokens = (draws.len() * turns * TURN_TOKENS) as f64;
        let places = |wall_s: f64| tokens * engine.pass_s / (engine.slots as f64 * wall_s);
        let used = |all: &[f64]| all.iter().map(|s| places(*s)).collect();
        let used = Summary::of(used(&seconds), Better::More).unwrap_or_default();
        let ideal_s = engine.schedule_s(&draws);
        let row = Row::new(format!("{part}: places used ({size})"), "share", used);
        self.printer.row(
            &row.against(
                "ideal schedule of the same draws",
                places(ideal_s),
                Better::More,
            )
            .target(0.95)
            .others(others),
        );
        let busy = Summary::of(busy, Better::More).unwrap_or_default();
        let row = Row::new(format!("{part}: engine computes ({size})"), "share", busy);
        self.printer.row(&row.others(others));
        let alone_s: f64 = draws.iter().map(|calls| engine.alone_s(calls)).sum();
        let wall = Summary::of(seconds, Better::Less).unwrap_or_default();
        let row = Row::new(format!("{part}: rollouts ({size})"), "s", wall);
        let peer = "one episode after the other, computed from the same draws";
        let row = row.against(peer, alone_s, Better::Less).target(50.0);
        self.printer.row(&row.others(others));
        Ok(())
    }

    /// Training of a tiny model, in turns and at once.
    fn overlap(&self) -> Result<(), BenchError> {
        let (of_step, size, turns, turn_tokens) = OVERLAP;
        let groups = Groups { of_step, size };
        let shape = Shape {
            sampler: Sampler::Real { turn_tokens },
            steps: self.args.steps as usize,
            groups,
            staleness: None,
            durable: true,
        };
        let at_once = Shape {
            staleness: Some(STALENESS),
            ..shape
        };
        let calls = self.calls(turns);
        let (mut sync, mut ahead) = (Vec::new(), Vec::new());
        let cpu = CpuTime::now();
        let mut ideal = (0.0, 0.0);
        for _ in 0..self.args.rounds {
            let world = World::new(calls, Tool::Sleep);
            sync.push(in_folder(&shape, &world)?);
            ideal.0 = groups.sync_s(&calls, &world.order(), shape.steps);
            let world = World::new(calls, Tool::Sleep);
            ahead.push(in_folder(&at_once, &world)?);
            ideal.1 = groups.async_s(&calls, &world.order(), shape.steps, STALENESS);
        }
        let others = CpuTime::others_since(cpu);
        let name = |mode: &str| {
            let steps = shape.steps;
            format!("overlap: {mode} ({steps} steps of {of_step}x{size} episodes)")
        };
        let wall = |runs: &[RunTimes]| {
            let walls = runs.iter().map(|r| r.wall_s).collect();
            Summary::of(walls, Better::Less).unwrap_or_default()
        };
        let row = Row::new(name("wall time of mode sync"), "s", wall(&sync));
        let row = row.against("ideal of mode sync: calls alone", ideal.0, Better::Less);
        self.printer.row(&row.others(others));
        let row = Row::new(name("wall time of mode async"), "s", wall(&ahead));
        let row = row.against("ideal of mode async: calls alone", ideal.1, Better::Less);
        self.printer.row(&row.others(others));
        let gain = ideal.0 / ideal.1;
        let what = format!("mode async beside mode sync, {gain:.2} in the ideal");
        let row = Row::new(name(&what), "s", wall(&ahead));
        let row = row.against("mode sync", wall(&sync).median, Better::Less);
        self.printer.row(&row.target(2.0).others(others));
        self.showed(&name, &[("sync", &sync[..]), ("async", &ahead[..])]);
        self.plot(&sync, &ahead)
    }

    /// Prints the trained episodes and rewards of runs in several modes.
    fn showed(&self, name: &dyn Fn(&str) -> String, modes: &[(&str, &[RunTimes])]) {
        for (mode, runs) in modes {
            let row = |what: &str, unit: &str, of: &dyn Fn(&RunTimes) -> f64| {
                let values = runs.iter().map(of).collect();
                let values = Summary::of(values, Better::More).unwrap_or_default();
                let row = Row::new(name(&format!("{what}, {mode}")), unit, values);
                self.printer.row(&row);
            };
            row("held-out reward", "reward", &|r| r.reward);
            row("trained", "episodes", &|r| r.trained as f64);
            row("trainer computes", "share", &|r| r.timeline.trainer_share());
        }
    }

    /// Draws both runs on one axis, the medians of their wall times.
    fn plot(&self, sync: &[RunTimes], ahead: &[RunTimes]) -> Result<(), BenchError> {
        let (Some(path), Some(sync), Some(ahead)) = (&self.args.plot, sync.last(), ahead.last())
        else {
            return Ok(());
        };
        let runs = [("sync", &sync.timeline), ("async", &ahead.timeline)];
        let svg = timeline::draw(&runs).map_err(BenchError::system)?;
        std::fs::write(path, svg)
            .map_err(|e| BenchError::input(format!("--plot {}: {e}", path.display())))
    }

    /// The same training with its episodes on disk and in memory, by turns.
    fn durable(&self) -> Result<(), BenchError> {
        const STEPS: usize = 4;
        let slots = self.args.slots.first().copied().unwrap_or(512);
        let (disk, _) = self.shape(self.args.episodes, slots, STEPS);
        let memory = Shape {
            durable: false,
            ..disk
        };
        let calls = self.calls(self.args.turns as usize);
        let (mut walls, mut cpus) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let mut shares = Vec::new();
        let others = CpuTime::now();
        for round in 0..self.args.rounds as usize {
            // Each is first as often as the other: what a run leaves behind is not put down to one.
            for turn in 0..2 {
                let place = (round + turn) % 2;
                let shape = [disk, memory][place];
                let (start, cpu) = (Instant::now(), cpu_s());
                let ran = in_folder(&shape, &World::new(calls, Tool::Sleep))?;
                if shape.durable {
                    shares.push(ran.loop_disk_share());
                }
                walls[place].push(start.elapsed().as_secs_f64());
                cpus[place].extend(cpu_s().zip(cpu).map(|(now, then)| now - then));
            }
        }
        let others = CpuTime::others_since(others);
        let size = self.args.episodes;
        let share = Summary::of(shares, Better::Less).unwrap_or_default();
        let row = Row::new(
            format!("durable: the loop waits for commits and checkpoints ({size} episodes)"),
            "%",
            share,
        );
        self.printer.row(&row.at_most(2.0).others(others));
        for (what, [disk, memory]) in [("wall time", walls), ("CPU time", cpus)] {
            let more = disk.iter().zip(&memory).map(|(d, m)| (d / m - 1.0) * 100.0);
            let more = Summary::of(more.collect(), Better::Less).unwrap_or_default();
            let row = Row::new(format!("durable: more {what} ({size} episodes)"), "%", more);
            self.printer.row(&row.at_most(2.0).others(others));
            let disk = Summary::of(disk, Better::Less).unwrap_or_default();
            let memory = Summary::of(memory, Better::Less).unwrap_or_default();
            let row = Row::new(format!("durable: {what} ({size} episodes)"), "s", disk);
            let row = row.against("store in memory", memory.median, Better::Less);
            self.printer.row(&row.others(others));
        }
        Ok(())
    }
}
