//! Times of machines, compared with a plain `python3 -c`.
//!
//! A restore is counted from the request to the first byte of a program's output. QEMU executes the guest's
//! code itself if there is no KVM; figures of both are not comparable.

use super::{BenchRow, against_python, ms, python_alone, row, timing_after};
use sinew_microvm::MicrovmProvider;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::time::{Duration, Instant};

/// Runs of each row, and boots.
pub const RUNS: (usize, usize) = (15, 3);

/// Runs a program that prints to its end; how long after `began` its first output was there.
async fn first_output(
    place: &mut dyn Sandbox,
    program: &Program,
    began: Instant,
) -> Result<f64, SandboxError> {
    let request = ExecRequest::new(program.clone(), Duration::from_secs(60));
    let (sender, mut pieces) = tokio::sync::mpsc::channel(16);
    let options = ExecOptions {
        output: Some(sender),
        ..ExecOptions::default()
    };
    let seen = async { pieces.recv().await.map(|_| ms(began)) };
    let (result, seen) = tokio::join!(place.exec_with(request, options), seen);
    let ending = result?.ending;
    match seen {
        Some(seen) if ending == (Ending::Exited { code: 0 }) => Ok(seen),
        _ => Err(SandboxError::Died(format!(
            "a program of the bench ended with {ending:?}"
        ))),
    }
}

/// A program that prints, to its end.
async fn exec(place: &mut dyn Sandbox, program: &Program) -> Result<(), SandboxError> {
    first_output(place, program, Instant::now()).await?;
    Ok(())
}

/// Milliseconds of each row's runs.
#[derive(Default)]
struct Times {
    /// Times until the machine is restored.
    restored: Vec<f64>,
    /// Time until the first output of Python.
    python: Vec<f64>,
    /// Time until the end of Python is reported.
    python_end: Vec<f64>,
    shell: Vec<f64>,
    shell_end: Vec<f64>,
    warm_shell: Vec<f64>,
    /// Time with an interpreter that waits.
    warm_python: Vec<f64>,
    /// Time of a snapshot with memory.
    snapshot: Vec<f64>,
    /// Reads the snapshot from disk.
    first_fork: Vec<f64>,
    /// Finds it in memory.
    fork: Vec<f64>,
    /// Time of a boot without a snapshot.
    boot: Vec<f64>,
    /// Memory of one clone.
    mib: Vec<f64>,
}

/// One machine of each kind.
async fn once(
    provider: &MicrovmProvider,
    spec: &SandboxSpec,
    times: &mut Times,
) -> Result<(), SandboxError> {
    let python = Program::Python("print(1)".into());
    let echo = Program::Argv(vec!["/bin/echo".into(), "1".into()]);
    let began = Instant::now();
    let mut place = provider.acquire(spec).await?;
    times.restored.push(ms(began));
    let seen = first_output(place.as_mut(), &python, began).await?;
    times.python.push(seen);
    times.python_end.push(ms(began));
    times
        .mib
        .push(place.stats().await?.memory_bytes as f64 / f64::from(1 << 20));
    for warm_up in [true, false] {
        // The next interpreter gets ready, and its translation is kept.
        tokio::time::sleep(Duration::from_millis(900)).await;
        let began = Instant::now();
        exec(place.as_mut(), &python).await?;
        if !warm_up {
            times.warm_python.push(ms(began));
        }
    }
    exec(place.as_mut(), &echo).await?;
    let began = Instant::now();
    exec(place.as_mut(), &echo).await?;
    times.warm_shell.push(ms(began));
    let began = Instant::now();
    let snapshot = place.snapshot().await?;
    times.snapshot.push(ms(began));
    place.destroy().await?;
    let began = Instant::now();
    let first = provider.fork(spec, &snapshot).await?;
    times.first_fork.push(ms(began));
    let began = Instant::now();
    let second = provider.fork(spec, &snapshot).await?;
    times.fork.push(ms(began));
    first.destroy().await?;
    second.destroy().await?;
    let began = Instant::now();
    let mut place = provider.acquire(spec).await?;
    let seen = first_output(place.as_mut(), &echo, began).await?;
    times.shell.push(seen);
    times.shell_end.push(ms(began));
    place.destroy().await
}

/// Name, values, unit and target.
type Row = (&'static str, Vec<f64>, &'static str, Option<f64>);

/// All rows with their targets.
fn rows(times: Times) -> [Row; 12] {
    [
        (
            "microvm restore to first output of Python",
            times.python,
            "ms",
            Some(250.0),
        ),
        (
            "microvm restore to first output of a program",
            times.shell,
            "ms",
            Some(250.0),
        ),
        (
            "microvm restore to the end of the first Python program",
            times.python_end,
            "ms",
            None,
        ),
        (
            "microvm restore to the end of the first program",
            times.shell_end,
            "ms",
            None,
        ),
        ("microvm restore alone", times.restored, "ms", None),
        (
            "microvm python, next program, an interpreter waits",
            times.warm_python,
            "ms",
            None,
        ),
        ("microvm program, next one", times.warm_shell, "ms", None),
        ("microvm snapshot with memory", times.snapshot, "ms", None),
        (
            "microvm first fork of a snapshot",
            times.first_fork,
            "ms",
            None,
        ),
        ("microvm next fork of a snapshot", times.fork, "ms", None),
        ("microvm cold boot", times.boot, "ms", None),
        ("microvm memory of one clone", times.mib, "MiB", None),
    ]
}

/// Measures every row, each `runs` times, and boots `boots` machines.
///
/// # Errors
/// If a sandbox cannot be made or a program fails.
pub async fn run(
    provider: &MicrovmProvider,
    runs: usize,
    boots: usize,
    on_row: &mut (dyn FnMut(BenchRow) + Send),
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    // The template is made, and read into memory.
    provider.acquire(&spec).await?.destroy().await?;
    let mut times = Times::default();
    for _ in 0..runs {
        once(provider, &spec, &mut times).await?;
    }
    for _ in 0..boots {
        let began = Instant::now();
        provider.cold_boot().await?;
        times.boot.push(ms(began));
    }
    let alone = python_alone(runs.max(5));
    for (name, values, unit, target) in rows(times) {
        let row = BenchRow {
            unit: unit.into(),
            ..row(name, timing_after(0, values))
        };
        on_row(against_python(row, alone, target));
    }
    Ok(())
}
