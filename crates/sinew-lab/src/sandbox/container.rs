//! How long containers take, beside what others take for the same.

use super::{BenchRow, Timing, peers};
use sinew_container::ContainerProvider;
use sinew_sandbox::{
    Ending, ExecRequest, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::time::{Duration, Instant};

/// Runs of each row.
pub const RUNS: usize = 50;
/// Runs that are not counted.
const WARM_UP: usize = 2;
/// How long a container gets to make its interpreter ready.
const SETTLE: Duration = Duration::from_millis(40);

/// Milliseconds of runs.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn add(&mut self, began: Instant) {
        self.0.push(began.elapsed().as_secs_f64() * 1e3);
    }

    /// Median, and 90th minus 10th percentile.
    fn summary(mut self) -> (f64, f64) {
        self.0.drain(..WARM_UP.min(self.0.len().saturating_sub(1)));
        self.0.sort_by(f64::total_cmp);
        let at = |q: f64| {
            let last = self.0.len().saturating_sub(1);
            self.0
                .get((last as f64 * q) as usize)
                .copied()
                .unwrap_or(f64::NAN)
        };
        (at(0.5), at(0.9) - at(0.1))
    }
}

fn argv(args: &[&str]) -> Program {
    Program::Argv(args.iter().map(|&a| a.into()).collect())
}

async fn exec(sandbox: &mut Box<dyn Sandbox>, program: &Program) -> Result<(), SandboxError> {
    let request = ExecRequest {
        program: program.clone(),
        stdin: Vec::new(),
        deadline: Duration::from_secs(60),
    };
    let result = sandbox.exec(request).await?;
    if result.ending == (Ending::Exited { code: 0 }) {
        return Ok(());
    }
    Err(SandboxError::Died(format!(
        "a program of the bench ended with {:?}",
        result.ending
    )))
}

fn row(name: String, times: Times, target: Option<f64>) -> BenchRow {
    let (value, spread) = times.summary();
    BenchRow {
        name,
        value,
        unit: "ms".into(),
        spread,
        target,
        met: target.map(|t| value <= t),
        ..BenchRow::default()
    }
}

/// A row beside the same by another way, or beside the reason why that was not measured.
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
/// If a container of ours cannot be made; a peer that cannot is a row that says why.
pub async fn run(
    provider: &ContainerProvider,
    runs: usize,
    on_row: &mut (dyn FnMut(BenchRow) + Send),
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    let engine = provider.engine();
    let program = argv(&["/bin/true"]);
    let cold = fresh(provider, &spec, &program, runs).await?;
    let cold = row(format!("container_{engine}_true_fresh"), cold, None);
    let mut sandbox = provider.acquire(&spec).await?;
    let warm = kept(&mut sandbox, &program, Duration::ZERO, runs).await?;
    let warm = row(format!("container_{engine}_true_warm"), warm, Some(2.0));
    let python = Program::Python("print(1)".into());
    let waits = kept(&mut sandbox, &python, SETTLE, runs).await?;
    let waits = row(format!("container_{engine}_python_warm"), waits, Some(2.0));
    let starts = argv(&["/usr/bin/python3", "-I", "-S", "-c", "print(1)"]);
    let starts = kept(&mut sandbox, &starts, Duration::ZERO, runs).await?;
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

/// From the request for a container to the end of what ran in it.
async fn fresh(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    program: &Program,
    runs: usize,
) -> Result<Times, SandboxError> {
    let mut times = Times::default();
    for _ in 0..runs + WARM_UP {
        let began = Instant::now();
        let mut sandbox = provider.acquire(spec).await?;
        exec(&mut sandbox, program).await?;
        times.add(began);
        sandbox.destroy().await?;
    }
    Ok(times)
}

/// In a container that stays, with a pause between programs.
async fn kept(
    sandbox: &mut Box<dyn Sandbox>,
    program: &Program,
    pause: Duration,
    runs: usize,
) -> Result<Times, SandboxError> {
    let mut times = Times::default();
    for _ in 0..runs + WARM_UP {
        tokio::time::sleep(pause).await;
        let began = Instant::now();
        exec(sandbox, program).await?;
        times.add(began);
    }
    Ok(times)
}

/// A snapshot of 1 MiB in 16 files, and a start from it.
async fn snapshots(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    runs: usize,
) -> Result<[(&'static str, Times); 2], SandboxError> {
    let (mut take, mut fork) = (Times::default(), Times::default());
    let mut sandbox = provider.acquire(spec).await?;
    for n in 0..16 {
        sandbox
            .write_file(&format!("file{n}"), &[b'x'; 64 << 10])
            .await?;
    }
    for _ in 0..runs.min(20) + WARM_UP {
        let began = Instant::now();
        let snapshot = sandbox.snapshot().await?;
        take.add(began);
        let began = Instant::now();
        let forked = provider.fork(spec, &snapshot).await?;
        fork.add(began);
        forked.destroy().await?;
    }
    sandbox.destroy().await?;
    Ok([("snapshot_1mb", take), ("fork_1mb", fork)])
}
