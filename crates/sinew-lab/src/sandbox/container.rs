//! Times of containers, compared with those of other tools for the same work.
//!
//! Each row is compared with another way in the same run: `crun run`, `docker run`, `docker exec`. A target
//! is 1.0 for the ratio, or 2 ms for an execution in a ready container.
//!
//! Rows are in milliseconds, named `container_ENGINE_WHAT`: `true_fresh` (a container, a program, to the
//! program's end), `true_warm` and `python_warm` (a program in a ready container), `python_exec` (an
//! interpreter that is started for it), `snapshot_1mb` and `fork_1mb`.

use super::{
    BenchRow, PYTHON, PYTHON_PATH, TRUE, Timing, bounded, exec, fresh, ms, peers, program,
    timing_after,
};
use sinew_container::ContainerProvider;
use sinew_sandbox::{Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec};
use std::time::{Duration, Instant};

/// Runs of each row.
pub const RUNS: usize = 50;
/// Runs that are not counted.
const WARM_UP: usize = 2;
/// Time that a container gets to make its interpreter ready.
const SETTLE: Duration = Duration::from_millis(40);

/// A row of these runs. `target` bounds the median.
fn row(name: String, times: Vec<f64>, target: Option<f64>) -> BenchRow {
    let row = super::row(&name, timing_after(WARM_UP, times));
    match target {
        Some(most) => bounded(row, most),
        None => row,
    }
}

/// A row compared with the same by another way, or with the reason why that was not measured.
fn beside(ours: &BenchRow, peer: &str, theirs: Result<Timing, SandboxError>) -> BenchRow {
    let name = format!("{}_beside_{}", ours.name, peer.replace(' ', "_"));
    let (peer_value, why) = match theirs {
        Ok(times) => (Some(times.median), None),
        Err(e) => (None, Some(e.to_string())),
    };
    let ratio = peer_value.map(|p| ours.value / p);
    BenchRow {
        name,
        value: ours.value,
        unit: "ms".into(),
        spread: ours.spread,
        peer: Some(peer.into()),
        peer_value,
        ratio,
        target: Some(1.0),
        met: Some(ratio.is_some_and(|r| r <= 1.0)),
        why,
    }
}

/// Measures every row, each `runs` times.
///
/// # Errors
/// If a container of ours cannot be made; a peer that cannot is a row with the reason.
pub async fn run(
    provider: &ContainerProvider,
    runs: usize,
    on_row: &mut (dyn FnMut(BenchRow) + Send),
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    let engine = provider.engine();
    let nothing = program(TRUE);
    let cold = fresh(provider, &spec, &nothing, runs + WARM_UP).await?;
    let cold = row(format!("container_{engine}_true_fresh"), cold, None);
    let mut sandbox = provider.acquire(&spec).await?;
    let warm = kept(sandbox.as_mut(), &nothing, Duration::ZERO, runs).await?;
    let warm = row(format!("container_{engine}_true_warm"), warm, Some(2.0));
    let python = Program::Python(PYTHON.into());
    let waits = kept(sandbox.as_mut(), &python, SETTLE, runs).await?;
    let waits = row(format!("container_{engine}_python_warm"), waits, Some(2.0));
    let starts = program(&[PYTHON_PATH, "-I", "-S", "-c", PYTHON]);
    let starts = kept(sandbox.as_mut(), &starts, Duration::ZERO, runs).await?;
    sandbox.destroy().await?;
    on_row(cold.clone());
    on_row(beside(&cold, "crun run", peers::crun()));
    on_row(beside(&cold, "docker run", peers::docker_run()));
    on_row(warm.clone());
    on_row(beside(&warm, "docker exec", peers::docker_exec()));
    on_row(waits);
    on_row(row(format!("container_{engine}_python_exec"), starts, None));
    for (name, times) in snapshots(provider, &spec, runs).await? {
        on_row(row(format!("container_{engine}_{name}"), times, None));
    }
    Ok(())
}

/// Times in a container that stays, with a pause between programs.
async fn kept(
    sandbox: &mut dyn Sandbox,
    program: &Program,
    pause: Duration,
    runs: usize,
) -> Result<Vec<f64>, SandboxError> {
    let mut times = Vec::new();
    for _ in 0..runs + WARM_UP {
        tokio::time::sleep(pause).await;
        let began = Instant::now();
        exec(sandbox, program.clone()).await?;
        times.push(ms(began));
    }
    Ok(times)
}

/// A snapshot of 1 MiB in 16 files, and a start from it.
async fn snapshots(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    runs: usize,
) -> Result<[(&'static str, Vec<f64>); 2], SandboxError> {
    let (mut take, mut fork) = (Vec::new(), Vec::new());
    let mut sandbox = provider.acquire(spec).await?;
    for n in 0..16 {
        sandbox
            .write_file(&format!("file{n}"), &[b'x'; 64 << 10])
            .await?;
    }
    for _ in 0..runs.min(20) + WARM_UP {
        let began = Instant::now();
        let snapshot = sandbox.snapshot().await?;
        take.push(ms(began));
        let began = Instant::now();
        let forked = provider.fork(spec, &snapshot).await?;
        fork.push(ms(began));
        forked.destroy().await?;
    }
    sandbox.destroy().await?;
    Ok([("snapshot_1mb", take), ("fork_1mb", fork)])
}
