//! How long sandboxes take, beside what the same program takes without one.
//!
//! Every row is measured in the same run as its peer, one after the other, so that ratios hold
//! even on a busy machine.

use serde::{Deserialize, Serialize};
use sinew_sandbox::{
    Ending, ExecRequest, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::future::Future;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// One measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BenchRow {
    /// What was measured.
    pub name: String,
    /// Median, or the rate.
    pub value: f64,
    /// Unit of `value`, `spread` and `peer_value`.
    pub unit: String,
    /// 90th minus 10th percentile; 0 for rates.
    pub spread: f64,
    /// What it is compared with.
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
    /// Why a row has no value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Runs of each kind; the first few are not counted.
const RUNS: usize = 60;
const WARM_UP: usize = 5;
/// Sandboxes of the rate, and how many at once.
const MANY: usize = 200;
const AT_ONCE: usize = 8;

#[derive(Clone, Copy)]
struct Timing {
    median: f64,
    spread: f64,
}

fn timing(mut ms: Vec<f64>) -> Timing {
    ms.drain(..WARM_UP.min(ms.len().saturating_sub(1)));
    ms.sort_by(f64::total_cmp);
    let at = |q: f64| ms[((ms.len() - 1) as f64 * q) as usize];
    Timing {
        median: at(0.5),
        spread: at(0.9) - at(0.1),
    }
}

async fn repeat<F>(mut run: impl FnMut() -> F) -> Result<Timing, SandboxError>
where
    F: Future<Output = Result<(), SandboxError>>,
{
    let mut ms = Vec::new();
    for _ in 0..RUNS + WARM_UP {
        let begun = Instant::now();
        run().await?;
        ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(timing(ms))
}

fn plain(argv: &[&str]) -> Result<(), SandboxError> {
    let failed = |message: String| SandboxError::Io {
        operation: format!("run {}", argv.join(" ")),
        message,
    };
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

fn program(argv: &[&str]) -> Program {
    Program::Argv(argv.iter().map(|&a| a.into()).collect())
}

async fn exec(sandbox: &mut dyn Sandbox, program: Program) -> Result<(), SandboxError> {
    let request = ExecRequest {
        program,
        stdin: Vec::new(),
        deadline: Duration::from_secs(20),
    };
    let result = sandbox.exec(request).await?;
    if result.ending == (Ending::Exited { code: 0 }) {
        return Ok(());
    }
    Err(SandboxError::Died(format!(
        "ended with {:?}",
        result.ending
    )))
}

async fn fresh(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    program: Program,
) -> Result<(), SandboxError> {
    let mut sandbox = provider.acquire(spec).await?;
    exec(sandbox.as_mut(), program).await?;
    sandbox.destroy().await
}

fn row(name: &str, t: Timing) -> BenchRow {
    BenchRow {
        name: name.into(),
        value: t.median,
        unit: "ms".into(),
        spread: t.spread,
        ..BenchRow::default()
    }
}

fn compared(mut row: BenchRow, peer: &str, peer_value: f64, most: Option<f64>) -> BenchRow {
    let ratio = row.value / peer_value;
    row.peer = Some(peer.into());
    row.peer_value = Some(peer_value);
    row.ratio = Some(ratio);
    row.target = most;
    row.met = most.map(|most| ratio <= most);
    row
}

fn bounded(mut row: BenchRow, most: f64) -> BenchRow {
    row.target = Some(most);
    row.met = Some(row.value <= most);
    row
}

const TRUE: &[&str] = &["/bin/true"];
const PYTHON: &str = "print(1)";

/// Measures and hands each row to `on_row` as soon as it is known.
///
/// # Errors
/// Only if the level itself cannot run; a peer that cannot is a row that says why.
pub async fn run(
    provider: &dyn SandboxProvider,
    on_row: &mut (dyn FnMut(BenchRow) + Send),
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    let floor = repeat(|| async { plain(TRUE) }).await?;
    on_row(row("fork_exec_true", floor));
    let cold = repeat(|| fresh(provider, &spec, program(TRUE))).await?;
    let level = provider.level();
    let name = format!("{level}_true_fresh");
    on_row(compared(
        row(&name, cold),
        "fork_exec_true",
        floor.median,
        Some(2.5),
    ));
    on_row(bubblewrap(cold).await);

    let python_path = "/usr/bin/python3";
    let bare = repeat(|| async { plain(&[python_path, "-I", "-S", "-c", PYTHON]) }).await?;
    on_row(row("python_bare", bare));
    let python = repeat(|| fresh(provider, &spec, Program::Python(PYTHON.into()))).await?;
    let name = format!("{level}_python_fresh");
    on_row(bounded(row(&name, python), 2.0));
    let name = format!("{level}_python_fresh_beside_bare");
    on_row(compared(
        row(&name, python),
        "python_bare",
        bare.median,
        None,
    ));
    on_row(bounded(kept(provider, &spec).await?, 0.5));
    on_row(rate(provider, &spec).await?);
    Ok(())
}

/// Python in a sandbox that stays, as in the turns of an episode.
async fn kept(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
) -> Result<BenchRow, SandboxError> {
    let mut sandbox = provider.acquire(spec).await?;
    let mut ms = Vec::new();
    for _ in 0..RUNS + WARM_UP {
        let begun = Instant::now();
        exec(sandbox.as_mut(), Program::Python(PYTHON.into())).await?;
        ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    sandbox.destroy().await?;
    let name = format!("{}_python_next_exec", provider.level());
    Ok(row(&name, timing(ms)))
}

async fn bubblewrap(ours: Timing) -> BenchRow {
    let argv = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/lib",
        "/lib",
        "--symlink",
        "usr/lib64",
        "/lib64",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "/usr/bin/true",
    ];
    match repeat(|| async { plain(&argv) }).await {
        Ok(theirs) => {
            let ours = row("bubblewrap_true", ours);
            let mut row = compared(ours, "bubblewrap", theirs.median, Some(1.0));
            row.name = "true_fresh_beside_bubblewrap".into();
            row
        }
        Err(e) => BenchRow {
            name: "true_fresh_beside_bubblewrap".into(),
            unit: "ms".into(),
            peer: Some("bubblewrap".into()),
            met: Some(false),
            why: Some(e.to_string()),
            ..BenchRow::default()
        },
    }
}

/// Fresh Python sandboxes a second, some at once.
async fn rate(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
) -> Result<BenchRow, SandboxError> {
    let begun = Instant::now();
    let lane = || async {
        for _ in 0..MANY / AT_ONCE {
            fresh(provider, spec, Program::Python(PYTHON.into())).await?;
        }
        Ok::<(), SandboxError>(())
    };
    let lanes: Vec<_> = (0..AT_ONCE).map(|_| lane()).collect();
    futures::future::try_join_all(lanes).await?;
    let value = MANY as f64 / begun.elapsed().as_secs_f64();
    let target = 600.0;
    Ok(BenchRow {
        name: format!("{}_python_fresh_rate", provider.level()),
        value,
        unit: "1/s".into(),
        target: Some(target),
        met: Some(value >= target),
        ..BenchRow::default()
    })
}
