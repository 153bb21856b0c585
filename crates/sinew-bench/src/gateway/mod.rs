//! Costs of the gateway: per request, per token, per idle rollout, per turn of a history. The proxies of
//! LiteLLM and Agent Lightning are measured on the same machine in the same run.
//!
//! The gateway runs as a separate process (`sinew serve --engine fake`), so that its CPU time is counted
//! separately, and gets real requests over real connections. The peers forward to a server in this process
//! that answers at once.
//!
//! | part | measures | compared with |
//! |---|---|---|
//! | `load` | latency and CPU time at 1 to 4,096 rollouts | the engine alone, LiteLLM, Agent Lightning |
//! | `stream` | the same with events | the engine alone |
//! | `idle` | memory and CPU time of rollouts that do nothing | none |
//! | `history` | cost of a turn at 8, 32 and 128 turns | the floor of reading the body |
//!
//! The engine is a fake one with a pass of 2 ms, so that only the gateway is measured.

mod client;
mod floor;
mod load;
mod peer;
mod process;
pub(super) mod soak;

use super::row::{Better, Printer, Row, Summary};
use crate::BenchError;
use crate::peers::PeerError;
use clap::Args;
use client::{Target, grow};
use load::{Load, drive, engine_only};
use peer::Peer;
use process::{Process, raise_files};
use std::path::PathBuf;
use std::time::Duration;

/// Requests a second that loads of more than one rollout add up to.
const RATE: f64 = 500.0;
/// Sampled tokens of an answer, and the pass that gives one.
pub(super) const TOKENS: u32 = 16;
/// Time of one pass of the fake engine.
pub(super) const PASS: Duration = Duration::from_millis(2);
/// Rollouts at the same time.
const ROLLOUTS: [usize; 4] = [1, 64, 512, 4096];
/// Calls that a peer gets at the same time, and how long it may take beyond the measurement.
const PEER_IN_FLIGHT: usize = 64;
/// Time after the measurement until a peer is given up.
const PEER_GRACE: Duration = Duration::from_secs(60);
/// Seconds that a peer is measured for; its times vary less than the gateway's.
const PEER_SECONDS: f64 = 5.0;
/// Lengths of histories, in turns.
const HISTORIES: [u32; 3] = [8, 32, 128];
/// Conversations that grow side by side while turns are measured.
const GROWING: usize = 16;
/// Turns before a length that are measured.
const WINDOW: u32 = 4;
/// Servers that it is measured on.
const SERVERS: usize = 5;
/// Rollouts that lie idle, and turns that each had.
const IDLE: usize = 4096;
/// Turns that each idle rollout had.
const IDLE_TURNS: u32 = 4;

/// Arguments of `sinew bench gateway`.
#[derive(Debug, Args)]
pub(crate) struct GatewayArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: load, stream, idle, history
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Python that has benches/peers/litellm.txt
    #[arg(long)]
    peer_python: Option<PathBuf>,
    /// Python that has benches/peers/agent_lightning.txt
    #[arg(long)]
    lightning_python: Option<PathBuf>,
    /// Folder of the peers' programs
    #[arg(long, default_value = "benches/peers")]
    peers: PathBuf,
    /// Seconds that each load is measured for
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
}

/// Names that `--only` takes.
const PARTS: [&str; 4] = ["load", "stream", "idle", "history"];

/// `sinew bench gateway`.
pub(super) fn run(args: &GatewayArgs) -> Result<(), BenchError> {
    let wanted = super::selected(&args.only, &PARTS)?;
    if !(args.seconds.is_finite() && (0.5..=120.0).contains(&args.seconds)) {
        return Err(BenchError::input(format!(
            "--seconds {}: allowed: 0.5 to 120",
            args.seconds
        )));
    }
    raise_files();
    let runtime = tokio::runtime::Runtime::new().map_err(BenchError::system)?;
    let printer = Printer::new(args.json);
    runtime.block_on(async {
        if wanted("load") {
            loads(args, printer).await?;
        }
        if wanted("stream") {
            stream(args, printer).await?;
        }
        if wanted("idle") {
            idle(printer).await?;
        }
        if wanted("history") {
            history(printer).await?;
        }
        Ok(())
    })
}

/// A load of about [`RATE`] requests a second.
fn load(rollouts: usize, seconds: f64) -> Load {
    let think = rollouts as f64 / RATE - TOKENS as f64 * PASS.as_secs_f64();
    Load {
        rollouts,
        // One rollout calls again at once.
        think: Duration::from_secs_f64(if rollouts == 1 { 0.0 } else { think.max(0.0) }),
        // Everybody calls at least once.
        measured: Duration::from_secs_f64(seconds.max(1.25 * rollouts as f64 / RATE)),
        tokens: TOKENS,
        stream: false,
        in_flight: usize::MAX >> 4,
    }
}

/// A proxy of another project, or why there is none.
struct Rival {
    name: &'static str,
    /// Mark of its rows.
    mark: &'static str,
    peer: Result<Peer, PeerError>,
}

impl Rival {
    /// Requests per second of its CPU under a load, bounded in calls and in time.
    async fn per_cpu_s(&self, load: &Load) -> Result<(&str, f64), String> {
        let peer = self.peer.as_ref().map_err(ToString::to_string)?;
        let load = Load {
            measured: Duration::from_secs_f64(PEER_SECONDS),
            in_flight: PEER_IN_FLIGHT,
            ..*load
        };
        let limit = load.measured + PEER_GRACE;
        let done = tokio::time::timeout(limit, drive(peer.target(), &load, peer.process())).await;
        let done = done.map_err(|_| format!("it did not get through within {limit:?}"))?;
        let done = done.map_err(|e| e.to_string())?;
        if done.latencies.is_empty() {
            return Err("it answered nothing".into());
        }
        Ok((&peer.version, done.latencies.len() as f64 / done.cpu_s))
    }
}

/// CPU and latency of requests at several numbers of rollouts.
async fn loads(args: &GatewayArgs, printer: Printer) -> Result<(), BenchError> {
    let rivals = [
        Rival {
            name: "LiteLLM proxy",
            mark: "",
            peer: Peer::litellm(args.peer_python.as_deref()).await,
        },
        Rival {
            name: "Agent Lightning proxy",
            mark: "_lightning",
            peer: Peer::lightning(args.lightning_python.as_deref(), &args.peers).await,
        },
    ];
    for rollouts in ROLLOUTS {
        let process = Process::serve(PASS).await?;
        let load = load(rollouts, args.seconds);
        let direct = engine_only(&load).await?;
        let done = drive(&Target::gateway(&process)?, &load, &process).await?;
        let cpu_us = done.cpu_s / done.latencies.len().max(1) as f64 * 1e6;
        let name = |what: &str| format!("gateway.{what}@{rollouts}");
        printer.row(&Row::new(name("cpu_per_request"), "us", single(cpu_us)));
        for rival in &rivals {
            let name = format!("gateway.requests_per_cpu_second{}@{rollouts}", rival.mark);
            let row = Row::new(name, "1/s", single(1e6 / cpu_us));
            let row = match rival.per_cpu_s(&load).await {
                Ok((version, theirs)) => row.against(version, theirs, Better::More),
                Err(why) => row.without_peer(rival.name, why),
            };
            printer.row(&row.target(10.0));
        }
        let quantile = |q| done.quantile_ms(q) - direct.quantile_ms(q);
        let p50 = single(quantile(0.5));
        printer.row(&Row::new(name("added_latency_p50"), "ms", p50));
        let p99 = Row::new(name("added_latency_p99"), "ms", single(quantile(0.99)));
        printer.row(&if rollouts == 512 {
            p99.at_most(5.0)
        } else {
            p99
        });
    }
    Ok(())
}

/// A value that was measured once.
fn single(value: f64) -> Summary {
    Summary {
        median: value,
        spread: 0.0,
        best: value,
    }
}

/// CPU of a streamed token: long answers against short ones.
async fn stream(args: &GatewayArgs, printer: Printer) -> Result<(), BenchError> {
    let process = Process::serve(PASS).await?;
    let mut per_request = Vec::new();
    let lengths = [TOKENS, 8 * TOKENS];
    for tokens in lengths {
        let load = Load {
            rollouts: 64,
            think: Duration::from_millis(50),
            measured: Duration::from_secs_f64(args.seconds),
            tokens,
            stream: true,
            in_flight: usize::MAX >> 4,
        };
        let done = drive(&Target::gateway(&process)?, &load, &process).await?;
        per_request.push(done.cpu_s / done.latencies.len().max(1) as f64 * 1e6);
    }
    let tokens = f64::from(lengths[1] - lengths[0]);
    let each = (per_request[1] - per_request[0]) / tokens;
    printer.row(&Row::new(
        "gateway.cpu_per_streamed_token",
        "us",
        single(each),
    ));
    Ok(())
}

/// Memory of rollouts that had a few turns and wait.
async fn idle(printer: Printer) -> Result<(), BenchError> {
    let process = Process::serve(Duration::ZERO).await?;
    let target = Target::gateway(&process)?;
    // The allocator's own warm-up is not the rollouts'.
    target.converse(64, 0..IDLE_TURNS, &process).await?;
    let before = process.resident_bytes()?;
    target.converse(IDLE, 0..IDLE_TURNS, &process).await?;
    let after = process.resident_bytes()?;
    let each = (after - before) / IDLE as f64 / 1024.0;
    let row = Row::new("gateway.memory_per_idle_rollout", "KiB", single(each));
    printer.row(&row.at_most(50.0));
    Ok(())
}

/// CPU of turns around each length of a history, and the floor of one, in microseconds.
type Grown = [(Vec<f64>, f64); HISTORIES.len()];

/// Lets conversations of a fresh server grow.
async fn grown() -> Result<Grown, BenchError> {
    let process = Process::serve(Duration::ZERO).await?;
    let target = Target::gateway(&process)?;
    // The server's own warm-up is not a turn's.
    target.converse(GROWING, 0..HISTORIES[0], &process).await?;
    let mut conversations = target.open(GROWING).await?;
    let mut grown = Grown::default();
    let mut at = 0;
    for (length, (cpu, floor)) in HISTORIES.into_iter().zip(&mut grown) {
        grow(&mut conversations, at..length - WINDOW, &process).await?;
        for turn in length - WINDOW..length {
            let used = grow(&mut conversations, turn..turn + 1, &process).await?;
            cpu.push(used / GROWING as f64 * 1e6);
        }
        at = length;
        let bodies = conversations.iter().map(|agent| agent.body(TOKENS, false));
        *floor = floor::body_us(bodies.collect()).await?
            + floor::engine_us(conversations[0].prompt_tokens)?;
    }
    Ok(grown)
}

/// CPU of a turn after histories of several lengths: in all, and above what its body and its
/// prompt cost any server. One more server each time, so that no start is lucky.
async fn history(printer: Printer) -> Result<(), BenchError> {
    let mut all: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); HISTORIES.len()];
    for _ in 0..SERVERS {
        for ((cpu, floor), (cpus, floors)) in grown().await?.into_iter().zip(&mut all) {
            cpus.extend(cpu);
            floors.push(floor);
        }
    }
    let mut first: Option<(f64, f64)> = None;
    for (length, (cpus, floors)) in HISTORIES.into_iter().zip(all) {
        let summary = Summary::of(cpus, Better::Less).unwrap_or_default();
        let floor = Summary::of(floors, Better::Less).unwrap_or_default();
        let over = Summary {
            median: summary.median - floor.median,
            best: summary.best - floor.best,
            ..summary
        };
        let shortest = *first.get_or_insert((summary.median, over.median));
        let row =
            |what: &str, value| Row::new(format!("gateway.{what}@history{length}"), "us", value);
        printer.row(&row("floor_per_turn", floor));
        let all = row("cpu_per_turn", summary);
        let above = row("cpu_per_turn_above_floor", over);
        if length == HISTORIES[0] {
            printer.row(&all);
            printer.row(&above);
            continue;
        }
        let peer = "the turn after 8";
        printer.row(&all.against(peer, shortest.0, Better::Less));
        // Flat: what it costs itself does not grow by more than a quarter.
        printer.row(&above.against(peer, shortest.1, Better::Less).target(0.8));
    }
    Ok(())
}
