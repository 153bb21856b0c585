//! Times of programs at the wasm level, compared with a plain `python3 -c`.

use super::{BenchRow, against_python, exec, ms, python_alone, row, timing_after};
use sinew_sandbox::{Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec, Snapshot};
use std::time::{Duration, Instant};

/// Runs of each row.
pub const RUNS: usize = 30;
/// Runs of each kind that are not counted.
const WARM_UP: usize = 3;
/// Pause between runs that take a waiting interpreter: the worker forks the next one.
const REFILL: Duration = Duration::from_millis(20);

/// Place in which the programs of a row run.
#[derive(Clone, Copy)]
enum Where<'a> {
    /// Each in a separate sandbox.
    Fresh,
    /// Each in a fork of a snapshot, a separate sandbox.
    Fork(&'a Snapshot),
    /// One after the other in the same.
    Same,
}

/// A measurement: name, program, place, whether there is a pause between runs, target.
struct Row<'a>(&'static str, &'a Program, Where<'a>, bool, Option<f64>);

/// Milliseconds of each run.
async fn measure(
    provider: &dyn SandboxProvider,
    (place, live): (&mut dyn Sandbox, &SandboxSpec),
    row: &Row<'_>,
    runs: usize,
) -> Result<Vec<f64>, SandboxError> {
    let (mut times, spec) = (Vec::new(), SandboxSpec::default());
    let program = || row.1.clone();
    for _ in 0..runs + WARM_UP {
        if row.3 {
            tokio::time::sleep(REFILL).await;
        }
        let began = Instant::now();
        match row.2 {
            Where::Fresh => exec(provider.acquire(&spec).await?.as_mut(), program()).await?,
            Where::Fork(from) => {
                exec(provider.fork(live, from).await?.as_mut(), program()).await?;
            }
            Where::Same => exec(place, program()).await?,
        }
        times.push(ms(began));
    }
    Ok(times)
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
    exec(place.as_mut(), set_up).await?;
    let snapshot = place.snapshot().await?;
    let rows = rows([&python, &fresh, &micropython, &javascript], &snapshot);
    let alone = python_alone(runs);
    for wanted in rows {
        let times = measure(provider, (place.as_mut(), &live), &wanted, runs).await?;
        let row = row(wanted.0, timing_after(WARM_UP, times));
        on_row(against_python(row, alone, wanted.4));
    }
    Ok(())
}
