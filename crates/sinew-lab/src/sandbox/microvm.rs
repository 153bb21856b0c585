//! How long machines take, beside a plain `python3 -c`.

use crate::sandbox::BenchRow;
use sinew_microvm::MicrovmProvider;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs of each row, and boots.
pub const RUNS: (usize, usize) = (15, 3);

fn median_and_spread(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let at = |q: f64| {
        values
            .get((last as f64 * q) as usize)
            .copied()
            .unwrap_or(f64::NAN)
    };
    (at(0.5), at(0.9) - at(0.1))
}

fn ms(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

fn plain_python(runs: usize) -> f64 {
    let once = || {
        let began = Instant::now();
        let ended = Command::new("/usr/bin/python3")
            .args(["-I", "-S", "-c", "print(1)"])
            .stdout(Stdio::null())
            .status();
        ended.map_or(f64::NAN, |_| ms(began))
    };
    median_and_spread((0..runs).map(|_| once()).collect()).0
}

/// Runs a program that prints to its end; how long after `began` its first output was there.
async fn first_output(
    place: &mut dyn Sandbox,
    program: &Program,
    began: Instant,
) -> Result<f64, SandboxError> {
    let request = ExecRequest {
        program: program.clone(),
        stdin: Vec::new(),
        deadline: Duration::from_secs(60),
    };
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

async fn exec(place: &mut dyn Sandbox, program: &Program) -> Result<(), SandboxError> {
    first_output(place, program, Instant::now()).await?;
    Ok(())
}

/// Milliseconds of each row's runs.
#[derive(Default)]
struct Times {
    restored: Vec<f64>,
    python: Vec<f64>,
    python_end: Vec<f64>,
    shell: Vec<f64>,
    shell_end: Vec<f64>,
    warm_shell: Vec<f64>,
    warm_python: Vec<f64>,
    snapshot: Vec<f64>,
    first_fork: Vec<f64>,
    fork: Vec<f64>,
    boot: Vec<f64>,
    mib: Vec<f64>,
}

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
    (runs, boots): (usize, usize),
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
    let peer_value = plain_python(runs.max(5));
    for (name, values, unit, target) in rows(times) {
        let (value, spread) = median_and_spread(values);
        on_row(BenchRow {
            name: name.into(),
            value,
            unit: unit.into(),
            spread,
            peer: Some("python3 -I -S -c print(1)".into()),
            peer_value: Some(peer_value),
            ratio: Some(value / peer_value),
            target,
            met: target.map(|t| value <= t),
            why: None,
        });
    }
    Ok(())
}
