//! The command line: the sub-commands of `sinew` that this program carries out.

use crate::attack::{self, table::Table};
use crate::levels::{self, Level};
use crate::sandbox::{self, Parts, Scale, Subjects, leaks};
use crate::{LabError, output};
use clap::{Args, Parser, Subcommand};
use sinew_sandbox::SandboxProvider;
use std::sync::Arc;

/// Attacks on sandboxes and their measures; `sinew sandbox attack|bench|leaks` run it.
#[derive(Debug, Parser)]
#[command(name = "sinew", version, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done; 1 the system failed, an attack escaped, or something was left; 2 wrong input"
)]
/// The program behind `sinew sandbox attack|bench|leaks`.
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Attack and measure sandboxes
    Sandbox {
        #[command(subcommand)]
        command: SandboxCommand,
    },
}

/// The level, and its form.
#[derive(Debug, Args)]
struct AtLevel {
    /// Level: process, wasm, container (or an engine of it) or microvm (or its monitor)
    #[arg(long, default_value = "process", value_parser = Level::names())]
    level: String,
    /// One JSON object a row
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum SandboxCommand {
    /// Attack a sandbox from inside and report what held
    #[command(after_help = "Example: sinew sandbox attack --level process --filter 31-45")]
    Attack {
        /// Only cases whose number and name contain this, or a range of numbers (31-45)
        #[arg(long, default_value = "")]
        filter: String,
        /// Attack sandboxes with a writable root whose programs are root inside, with further cases;
        /// for the container levels
        #[arg(long)]
        writable_root: bool,
        #[command(flatten)]
        at: AtLevel,
    },
    /// Measure sandboxes against fork+exec and other launchers
    #[command(after_help = "Example: sinew sandbox bench --only true,fresh --json")]
    Bench {
        #[command(flatten)]
        at: AtLevel,
        /// The process level in full numbers: 10,000 sandboxes made, 45,000 calls in flight, 5,000
        /// idle sandboxes; minutes and gigabytes
        #[arg(long)]
        full: bool,
        /// Number of sandboxes in the parts creates, calls and idle
        #[arg(long, conflicts_with = "full", value_parser = clap::value_parser!(u32).range(1..=50_000))]
        count: Option<u32>,
        /// Parts of the process level's bench, with commas: true, peers, fresh, prewarmed, next,
        /// snapshots, creates, calls, idle
        #[arg(long)]
        only: Option<String>,
    },
    /// Make, use and destroy sandboxes in a loop, and report what of them is left on the host
    #[command(after_help = "Example: sinew sandbox leaks --level crun --loops 100")]
    Leaks {
        /// Number of sandboxes
        #[arg(long, default_value_t = 1000)]
        loops: usize,
        #[command(flatten)]
        at: AtLevel,
    },
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// Wrong input, a system under test that fails, an attack that escaped, something left behind.
    pub fn run(&self) -> Result<(), LabError> {
        match &self.command {
            Command::Sandbox { command } => command.run(),
        }
    }
}

impl SandboxCommand {
    fn run(&self) -> Result<(), LabError> {
        match self {
            Self::Attack {
                filter,
                writable_root,
                at,
            } => {
                let level = Level::parse(&at.level)?;
                if *writable_root {
                    attack_writable(level, filter, at)
                } else {
                    attack_all(level, filter, at)
                }
            }
            Self::Leaks { loops, at } => count_leaks(Level::parse(&at.level)?, *loops, at.json),
            Self::Bench {
                at,
                full,
                count,
                only,
            } => {
                let scale = count.map(Scale::of).or(full.then_some(Scale::FULL));
                measure(Level::parse(&at.level)?, scale, only.as_deref(), at)
            }
        }
    }
}

/// A runtime with all CPUs.
fn runtime() -> Result<tokio::runtime::Runtime, LabError> {
    tokio::runtime::Runtime::new().map_err(LabError::system)
}

/// One thread: answers are not handed from thread to thread while latencies are measured.
fn one_thread() -> Result<tokio::runtime::Runtime, LabError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LabError::system)
}

/// The suite of a level, as a table. Ends with an error if an attack escaped.
fn attack_all(level: Level, filter: &str, at: &AtLevel) -> Result<(), LabError> {
    let runtime = runtime()?;
    let mut table = Table::new(&at.level, at.json);
    let mut on_row = |row| table.row(&row);
    let attacked = match level {
        Level::Microvm => {
            let provider = levels::microvm()?;
            runtime.block_on(attack::microvm::run(&provider, filter, &mut on_row))
        }
        // These run without a pool: the cases count processes and folders, and a pool grows with demand.
        _ => {
            let provider = levels::unpooled(level)?;
            match level {
                Level::Wasm => {
                    let attacked = attack::wasm::run(provider.as_ref(), filter, &mut on_row);
                    runtime.block_on(attacked)
                }
                _ => runtime.block_on(attack::run(provider.as_ref(), filter, &mut on_row)),
            }
        }
    };
    attacked.map_err(LabError::system)?;
    table.finish()
}

/// The suite of a container level in the mode with a writable root.
fn attack_writable(level: Level, filter: &str, at: &AtLevel) -> Result<(), LabError> {
    if !matches!(level, Level::Container(_)) {
        return Err(LabError::input(format!(
            "--writable-root --level {}: allowed with container, crun, runc, docker and podman; other levels \
             have no writable roots",
            at.level
        )));
    }
    let provider = levels::unpooled(level)?;
    let mut table = Table::new(&at.level, at.json);
    let mut on_row = |row| table.row(&row);
    let attacked = attack::run_writable(provider.as_ref(), filter, &mut on_row);
    runtime()?.block_on(attacked).map_err(LabError::system)?;
    table.finish()
}

/// The bench of a level.
fn measure(
    level: Level,
    scale: Option<Scale>,
    only: Option<&str>,
    at: &AtLevel,
) -> Result<(), LabError> {
    if level != Level::Process && (scale.is_some() || only.is_some()) {
        return Err(LabError::input(format!(
            "--full, --count and --only belong to the process level; --level {} has none",
            at.level
        )));
    }
    let mut on_row = |row| sandbox::print(&row, at.json);
    let measured = match level {
        Level::Process => {
            let parts = only.map_or(Ok(Parts::all()), Parts::parse);
            let parts = parts.map_err(|e| LabError::input(format!("--only: {e}")))?;
            let subjects = Subjects {
                cold: levels::process(false)?,
                warm: levels::process(true)?,
            };
            let scale = scale.unwrap_or(Scale::QUICK);
            one_thread()?.block_on(sandbox::run_all(&subjects, &scale, &parts, &mut on_row))
        }
        Level::Wasm => {
            let provider = levels::unpooled(level)?;
            let benches = sandbox::wasm::run(provider.as_ref(), sandbox::wasm::RUNS, &mut on_row);
            one_thread()?.block_on(benches)
        }
        Level::Container(_) => {
            let provider = levels::container(level)?;
            let runs = sandbox::container::RUNS;
            runtime()?.block_on(sandbox::container::run(&provider, runs, &mut on_row))
        }
        Level::Microvm => {
            let provider = levels::microvm()?;
            let (runs, boots) = sandbox::microvm::RUNS;
            runtime()?.block_on(sandbox::microvm::run(&provider, runs, boots, &mut on_row))
        }
    };
    measured.map_err(LabError::system)
}

/// Makes sandboxes in a loop and counts what is left.
fn count_leaks(level: Level, loops: usize, as_json: bool) -> Result<(), LabError> {
    let before = leaks::Footprint::now();
    let run = |provider: Arc<dyn SandboxProvider>, loops| {
        let counted = leaks::run(provider.as_ref(), loops);
        runtime()?.block_on(counted).map_err(LabError::system)
    };
    let mut report = run(levels::unpooled(level)?, loops)?;
    // A pooled run, as in `sandbox run`: some sandboxes are idle, or are being made, when it ends.
    run(levels::pooled(level)?, 1)?;
    report.left.extend(leaks::after_end(before));
    if as_json {
        output::json(&report);
    } else {
        let (each, after) = (report.wall_s * 1e3 / loops.max(1) as f64, report.after);
        output::print(&format!(
            "{loops} sandboxes of level {} made, used and destroyed, {each:.2} ms each\nafterwards: {after:?}\n",
            report.level
        ));
    }
    if report.left.is_empty() {
        Ok(())
    } else {
        Err(LabError::system(format!(
            "left: {}",
            report.left.join(", ")
        )))
    }
}
