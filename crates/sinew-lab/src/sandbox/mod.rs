//! Times of sandboxes, compared with the same program without one.
//!
//! Every row is measured in the same run as its peer, one after the other, so that ratios hold
//! even on a busy machine.

pub mod container;
pub mod leaks;
pub mod microvm;
mod peers;
mod scale;
pub mod wasm;

use crate::output;
pub use scale::Scale;
use serde::{Deserialize, Serialize};
use sinew_sandbox::{
    Ending, ExecRequest, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::future::Future;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BenchRow {
    /// Name of the measurement.
    pub name: String,
    /// Median, or the rate.
    pub value: f64,
    /// Unit of `value`, `spread` and `peer_value`.
    pub unit: String,
    /// 90th minus 10th percentile; 0 for rates.
    pub spread: f64,
    /// Name of the peer that it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The peer's median in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_value: Option<f64>,
    /// `value` over `peer_value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Bound of `ratio` if there is one, else of `value`: from above, or from below for a rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
    /// Whether the target is met.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub met: Option<bool>,
    /// Reason why a row has no value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A row, for a program or for a reader.
pub(crate) fn print(row: &BenchRow, as_json: bool) {
    if as_json {
        output::json(row)
    } else {
        output::print(&line(row))
    }
}

/// A row for a person, one line.
fn line(row: &BenchRow) -> String {
    let peer = match (&row.peer, row.peer_value, row.ratio) {
        (Some(peer), Some(value), Some(ratio)) => format!("  {ratio:.2}x {peer} {value:.3}"),
        _ => String::new(),
    };
    let target = match (row.target, row.met) {
        (Some(target), Some(true)) => format!("  target {target} met"),
        (Some(target), _) => format!("  target {target} NOT met"),
        (None, _) => String::new(),
    };
    let why = row
        .why
        .as_ref()
        .map_or(String::new(), |why| format!("  {why}"));
    let (name, value, unit, spread) = (&row.name, row.value, &row.unit, row.spread);
    format!("{name:40} {value:>10.3} {unit:9} +- {spread:.3}{peer}{target}{why}\n")
}

/// Runs of each kind; the first few are not counted.
const RUNS: usize = 100;
/// Runs that are not counted.
const WARM_UP: usize = 5;

/// Milliseconds of repeated runs.
#[derive(Clone, Copy)]
pub(crate) struct Timing {
    pub(crate) median: f64,
    pub(crate) spread: f64,
}

pub(crate) fn timing(ms: Vec<f64>) -> Timing {
    timing_after(WARM_UP, ms)
}

/// Median, and 90th minus 10th percentile, without the first `warm_up` values. Not a number if there is none.
fn timing_after(warm_up: usize, mut values: Vec<f64>) -> Timing {
    values.drain(..warm_up.min(values.len().saturating_sub(1)));
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    let at = |q: f64| values.get((last * q) as usize).map_or(f64::NAN, |v| *v);
    Timing {
        median: at(0.5),
        spread: at(0.9) - at(0.1),
    }
}

/// Milliseconds since `began`.
fn ms(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

/// A row compared with the same Python program without a sandbox, which takes `alone` milliseconds. `target`
/// bounds the value.
fn against_python(row: BenchRow, alone: f64, target: Option<f64>) -> BenchRow {
    let row = compared(row, "python3 -I -S -c print(1)", alone, None);
    match target {
        Some(most) => bounded(row, most),
        None => row,
    }
}

/// Median milliseconds of the system's own Python; not a number if it does not run.
fn python_alone(runs: usize) -> f64 {
    let once = || {
        let began = Instant::now();
        let ended = plain(&[PYTHON_PATH, "-I", "-S", "-c", PYTHON]);
        ended.map_or(f64::NAN, |()| ms(began))
    };
    timing_after(0, (0..runs).map(|_| once()).collect()).median
}

/// Times a run [`RUNS`] times.
pub(crate) async fn repeat<F>(mut run: impl FnMut() -> F) -> Result<Timing, SandboxError>
where
    F: Future<Output = Result<(), SandboxError>>,
{
    let mut times = Vec::new();
    for _ in 0..RUNS + WARM_UP {
        let begun = Instant::now();
        run().await?;
        times.push(ms(begun));
    }
    Ok(timing(times))
}

/// A program without a sandbox, to its end; output is dropped.
pub(crate) fn plain(argv: &[&str]) -> Result<(), SandboxError> {
    let failed = |message: String| SandboxError::io(format!("run {}", argv.join(" ")), message);
    let status = Command::new(argv[0])
        .args(&argv[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|e| failed(e.to_string()))?;
    if status.success() {
        Ok(())
    } else {
        Err(failed(status.to_string()))
    }
}

/// A program by its arguments.
fn program(argv: &[&str]) -> Program {
    Program::Argv(argv.iter().map(|&a| a.into()).collect())
}

/// Runs a program within a minute.
///
/// # Errors
/// If it does not exit with 0.
pub(crate) async fn exec(sandbox: &mut dyn Sandbox, program: Program) -> Result<(), SandboxError> {
    let request = ExecRequest::new(program, Duration::from_secs(60));
    let result = sandbox.exec(request).await?;
    if result.ending == (Ending::Exited { code: 0 }) {
        return Ok(());
    }
    Err(SandboxError::Died(format!(
        "ended with {:?}",
        result.ending
    )))
}

/// A row in milliseconds.
pub(crate) fn row(name: &str, t: Timing) -> BenchRow {
    BenchRow {
        name: name.into(),
        value: t.median,
        unit: "ms".into(),
        spread: t.spread,
        ..BenchRow::default()
    }
}

/// Adds a peer, and a target for the ratio.
pub(crate) fn compared(
    mut row: BenchRow,
    peer: &str,
    peer_value: f64,
    most: Option<f64>,
) -> BenchRow {
    let ratio = row.value / peer_value;
    row.peer = Some(peer.into());
    row.peer_value = Some(peer_value);
    row.ratio = Some(ratio);
    row.target = most;
    row.met = most.map(|most| ratio <= most);
    row
}

/// Adds a target for the value.
pub(crate) fn bounded(mut row: BenchRow, most: f64) -> BenchRow {
    row.target = Some(most);
    row.met = Some(row.value <= most);
    row
}

/// The least program.
const TRUE: &[&str] = &["/bin/true"];
/// The least Python program.
const PYTHON: &str = "print(1)";
/// The system's own: another one on the search path may be a script.
const PYTHON_PATH: &str = "/usr/bin/python3";
/// Time that a sandbox gets to make its interpreter ready.
const SETTLE: Duration = Duration::from_millis(20);

/// Measured providers.
#[derive(Clone)]
pub struct Subjects {
    /// Makes sandboxes without an interpreter that waits.
    pub cold: Arc<dyn SandboxProvider>,
    /// Makes sandboxes with one.
    pub warm: Arc<dyn SandboxProvider>,
}

impl std::fmt::Debug for Subjects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subjects").finish_non_exhaustive()
    }
}

/// A name that is not a measurement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no part {0:?}; allowed: {names}", names = Parts::NAMES.join(", "))]
pub struct UnknownPart(String);

/// Selection of measurements, each of which can run separately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts(Vec<String>);

impl Parts {
    /// All measurements, in the order in which they run.
    pub const NAMES: [&str; 9] = [
        "true",
        "peers",
        "fresh",
        "prewarmed",
        "next",
        "snapshots",
        "creates",
        "calls",
        "idle",
    ];

    /// Selects all of them.
    pub const fn all() -> Self {
        Self(Vec::new())
    }

    /// Names with commas between them.
    ///
    /// # Errors
    /// Names what is not one of [`Parts::NAMES`].
    pub fn parse(names: &str) -> Result<Self, UnknownPart> {
        let parts: Vec<String> = names.split(',').map(|n| n.trim().to_owned()).collect();
        match parts.iter().find(|p| !Self::NAMES.contains(&p.as_str())) {
            None => Ok(Self(parts)),
            Some(other) => Err(UnknownPart(other.clone())),
        }
    }

    /// Whether a part is to run.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|part| part == name)
    }
}

/// Callback for each row as soon as it is known.
pub type OnRow<'a> = &'a mut (dyn FnMut(BenchRow) + Send);

/// Measures latencies compared with peers, then the level's behaviour in large numbers.
///
/// # Errors
/// Only if the level itself cannot run; a peer that cannot is a row with the reason.
pub async fn run_all(
    subjects: &Subjects,
    scale: &Scale,
    parts: &Parts,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    if parts.has("true") || parts.has("peers") {
        beside_peers(subjects.cold.as_ref(), parts, on_row).await?;
    }
    python(subjects.warm.as_ref(), parts, on_row).await?;
    if parts.has("snapshots") {
        snapshots(subjects.warm.as_ref(), &SandboxSpec::default(), on_row).await?;
    }
    scale::run(subjects, scale, parts, on_row).await
}

async fn beside_peers(
    cold: &dyn SandboxProvider,
    parts: &Parts,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    let level = cold.level();
    let floor = repeat(|| async { plain(TRUE) }).await?;
    on_row(row("fork_exec_true", floor));
    let fresh = timing(fresh(cold, &spec, &program(TRUE), RUNS + WARM_UP).await?);
    let name = format!("{level}_true_fresh");
    let against =
        |name: &str, peer: &str, median, most| compared(row(name, fresh), peer, median, most);
    on_row(against(&name, "fork_exec_true", floor.median, Some(4.0)));
    if parts.has("peers") {
        peers::beside(fresh, on_row).await;
    }
    Ok(())
}

/// Rows of Python: fresh, prepared, and the next execution.
async fn python(
    warm: &dyn SandboxProvider,
    parts: &Parts,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    let level = warm.level();
    let code = Program::Python(PYTHON.into());
    if parts.has("fresh") {
        python_fresh(warm, &spec, &code, on_row).await?;
    }
    if parts.has("prewarmed") {
        let ready = prewarmed(warm, &spec, &code).await?;
        let name = format!("{level}_python_prewarmed");
        on_row(bounded(row(&name, ready), 1.0));
    }
    if parts.has("next") {
        let next = kept(warm, &spec, &code).await?;
        on_row(row(&format!("{level}_python_next_exec"), next));
    }
    Ok(())
}

/// Times of a fresh sandbox, compared with Python without one.
async fn python_fresh(
    warm: &dyn SandboxProvider,
    spec: &SandboxSpec,
    code: &Program,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    let level = warm.level();
    let bare = repeat(|| async { plain(&[PYTHON_PATH, "-I", "-S", "-c", PYTHON]) }).await?;
    on_row(row("python_bare", bare));
    let python = timing(fresh(warm, spec, code, RUNS + WARM_UP).await?);
    let name = format!("{level}_python_fresh");
    on_row(bounded(row(&name, python), 5.0));
    let name = format!("{level}_python_fresh_beside_bare");
    on_row(compared(
        row(&name, python),
        "python_bare",
        bare.median,
        None,
    ));
    Ok(())
}

/// Times from the request for a sandbox to the end of its program; destroying it is not counted.
async fn fresh(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    program: &Program,
    turns: usize,
) -> Result<Vec<f64>, SandboxError> {
    let mut times = Vec::new();
    for _ in 0..turns {
        let begun = Instant::now();
        let mut sandbox = provider.acquire(spec).await?;
        exec(sandbox.as_mut(), program.clone()).await?;
        times.push(ms(begun));
        sandbox.destroy().await?;
    }
    Ok(times)
}

/// Milliseconds of one execution in a sandbox that is ready, after a pause.
async fn settled_ms(sandbox: &mut dyn Sandbox, program: &Program) -> Result<f64, SandboxError> {
    tokio::time::sleep(SETTLE).await;
    let begun = Instant::now();
    exec(sandbox, program.clone()).await?;
    Ok(ms(begun))
}

/// Times in a sandbox that was made before and not used.
async fn prewarmed(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    program: &Program,
) -> Result<Timing, SandboxError> {
    let mut times = Vec::new();
    for _ in 0..RUNS + WARM_UP {
        let mut sandbox = provider.acquire(spec).await?;
        times.push(settled_ms(sandbox.as_mut(), program).await?);
        sandbox.destroy().await?;
    }
    Ok(timing(times))
}

/// Times in a sandbox that stays, as in the turns of an episode, with a pause between them.
async fn kept(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    program: &Program,
) -> Result<Timing, SandboxError> {
    let mut sandbox = provider.acquire(spec).await?;
    let mut times = Vec::new();
    for _ in 0..RUNS + WARM_UP {
        times.push(settled_ms(sandbox.as_mut(), program).await?);
    }
    sandbox.destroy().await?;
    Ok(timing(times))
}

/// Taking a snapshot and starting from it, with few and with many bytes in it.
async fn snapshots(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    for (name, bytes) in [("small", 10usize), ("12mb", 12 << 20)] {
        let content = vec![b'x'; bytes];
        let (mut take, mut fork) = (Vec::new(), Vec::new());
        for _ in 0..RUNS / 2 + WARM_UP {
            let mut sandbox = provider.acquire(spec).await?;
            sandbox.write_file("file", &content).await?;
            tokio::time::sleep(SETTLE).await;
            let begun = Instant::now();
            let snapshot = match sandbox.snapshot().await {
                Err(SandboxError::Unsupported { .. }) => return sandbox.destroy().await,
                other => other?,
            };
            take.push(ms(begun));
            let begun = Instant::now();
            let forked = provider.fork(spec, &snapshot).await?;
            fork.push(ms(begun));
            forked.destroy().await?;
            sandbox.destroy().await?;
        }
        let level = provider.level();
        on_row(bounded(
            row(&format!("{level}_snapshot_{name}"), timing(take)),
            1.0,
        ));
        on_row(bounded(
            row(&format!("{level}_fork_{name}"), timing(fork)),
            1.0,
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Parts;

    #[test]
    fn parts_are_named_or_refused() {
        assert!(Parts::NAMES.iter().all(|name| Parts::all().has(name)));
        let some = Parts::parse("calls, idle").expect("both exist");
        assert!(some.has("calls") && some.has("idle") && !some.has("creates"));
        let refused = Parts::parse("calls,memory").expect_err("no such part");
        let refused = refused.to_string();
        assert!(refused.contains("\"memory\"") && refused.contains("prewarmed"));
    }
}
