//! How long programs take at the wasm level, beside a plain `python3 -c`.

use crate::sandbox::BenchRow;
use sinew_sandbox::{
    Ending, ExecRequest, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec, Snapshot,
};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs of each row.
pub const RUNS: usize = 30;
/// Runs of each kind that are not counted.
const WARM_UP: usize = 3;
/// Between runs that take a waiting interpreter: the worker forks the next one.
const REFILL: Duration = Duration::from_millis(20);

fn median_and_spread(mut ms: Vec<f64>) -> (f64, f64) {
    ms.drain(..WARM_UP.min(ms.len().saturating_sub(1)));
    ms.sort_by(f64::total_cmp);
    let at = |q: f64| ms[((ms.len() - 1) as f64 * q) as usize];
    (at(0.5), at(0.9) - at(0.1))
}

fn request(program: &Program) -> ExecRequest {
    ExecRequest {
        program: program.clone(),
        stdin: Vec::new(),
        deadline: Duration::from_secs(60),
    }
}

async fn exec(place: &mut Box<dyn Sandbox>, program: &Program) -> Result<(), SandboxError> {
    let result = place.exec(request(program)).await?;
    if result.ending == (Ending::Exited { code: 0 }) {
        return Ok(());
    }
    Err(SandboxError::Died(format!(
        "a program of the bench ended with {:?}",
        result.ending
    )))
}

fn plain_python(runs: usize) -> f64 {
    // The system's own: what stands before it on the search path may be a script.
    let system = std::path::Path::new("/usr/bin/python3");
    let python = if system.exists() {
        system
    } else {
        "python3".as_ref()
    };
    let once = || {
        let began = Instant::now();
        let ended = Command::new(python)
            .args(["-I", "-S", "-c", "print(1)"])
            .stdout(Stdio::null())
            .status();
        ended.map_or(f64::NAN, |_| began.elapsed().as_secs_f64() * 1e3)
    };
    median_and_spread((0..runs + WARM_UP).map(|_| once()).collect()).0
}

/// Where the programs of a row run.
#[derive(Clone, Copy)]
enum Where<'a> {
    /// Each in a sandbox of its own.
    Fresh,
    /// Each in a fork of a snapshot, a sandbox of its own.
    Fork(&'a Snapshot),
    /// One after the other in the same.
    Same,
}

/// What is measured: name, program, place, whether there is a pause between runs, target.
struct Row<'a>(&'static str, &'a Program, Where<'a>, bool, Option<f64>);

/// Milliseconds of each run.
async fn measure(
    provider: &dyn SandboxProvider,
    (place, live): (&mut Box<dyn Sandbox>, &SandboxSpec),
    row: &Row<'_>,
    runs: usize,
) -> Result<Vec<f64>, SandboxError> {
    let (mut ms, spec) = (Vec::new(), SandboxSpec::default());
    for _ in 0..runs + WARM_UP {
        if row.3 {
            tokio::time::sleep(REFILL).await;
        }
        let began = Instant::now();
        match row.2 {
            Where::Fresh => exec(&mut provider.acquire(&spec).await?, row.1).await?,
            Where::Fork(from) => exec(&mut provider.fork(live, from).await?, row.1).await?,
            Where::Same => exec(place, row.1).await?,
        }
        ms.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(ms)
}

/// All that is measured. Programs: Python in turns and from the beginning, MicroPython, JavaScript.
fn rows<'a>(
    [python, fresh, micropython, javascript]: [&'a Program; 4],
    snapshot: &'a Snapshot,
) -> [Row<'a>; 7] {
    [
        Row(
            "wasm python, first turn of a fresh sandbox, after a pause",
            python,
            Where::Fresh,
            true,
            Some(2.0),
        ),
        Row(
            "wasm python, first turn of a fresh sandbox, no pause",
            python,
            Where::Fresh,
            false,
            Some(2.0),
        ),
        Row(
            "wasm python, next turn of a live sandbox",
            python,
            Where::Same,
            false,
            Some(0.2),
        ),
        Row(
            "wasm python, fork of a live sandbox and its first turn",
            python,
            Where::Fork(snapshot),
            false,
            Some(2.0),
        ),
        Row(
            "wasm python, interpreter started from the beginning",
            fresh,
            Where::Fresh,
            false,
            None,
        ),
        Row(
            "wasm micropython, fresh interpreter",
            micropython,
            Where::Fresh,
            false,
            Some(2.0),
        ),
        Row(
            "wasm javascript, fresh interpreter",
            javascript,
            Where::Fresh,
            false,
            None,
        ),
    ]
}

/// Measures every row, each `runs` times.
///
/// # Errors
/// If a sandbox cannot be made or a program fails.
pub async fn run(
    provider: &dyn SandboxProvider,
    runs: usize,
    on_row: &mut (dyn FnMut(BenchRow) + Send),
) -> Result<(), SandboxError> {
    let argv = |list: [&str; 3]| Program::Argv(list.map(String::from).to_vec());
    let python = Program::Python("print(1)".into());
    let fresh = argv(["python", "-c", "print(1)"]);
    let micropython = argv(["micropython", "-c", "print(1)"]);
    let javascript = argv(["qjs", "-e", "console.log(1)"]);
    let live = SandboxSpec {
        live: true,
        ..SandboxSpec::default()
    };
    let mut place = provider.acquire(&live).await?;
    let set_up = Program::Python("import json; x = list(range(100_000))".into());
    exec(&mut place, &set_up).await?;
    let snapshot = place.snapshot().await?;
    let rows = rows([&python, &fresh, &micropython, &javascript], &snapshot);
    let peer_value = plain_python(runs);
    for row in rows {
        let ms = measure(provider, (&mut place, &live), &row, runs).await?;
        let (value, spread) = median_and_spread(ms);
        on_row(BenchRow {
            name: row.0.into(),
            value,
            unit: "ms".into(),
            spread,
            peer: Some("python3 -I -S -c print(1)".into()),
            peer_value: Some(peer_value),
            ratio: Some(value / peer_value),
            target: row.4,
            met: row.4.map(|t| value <= t),
            why: None,
        });
    }
    Ok(())
}
