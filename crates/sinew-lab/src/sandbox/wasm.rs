//! Times of programs at the wasm level, compared with a plain `python3 -c`.

use super::{BenchRow, against_python, exec, ms, python_alone, row, timing_after};
use sinew_sandbox::{Program, SandboxError, SandboxProvider, SandboxSpec};
use std::time::{Duration, Instant};

/// Runs of each row.
pub const RUNS: usize = 30;
/// Runs of each kind that are not counted.
const WARM_UP: usize = 3;
/// Pause between runs that take a waiting interpreter: the worker forks the next one.
const REFILL: Duration = Duration::from_millis(20);

/// A measurement: name, program, whether there is a pause between runs, target.
struct Row<'a>(&'static str, &'a Program, bool, Option<f64>);

/// Milliseconds of each run, in a sandbox of its own.
async fn measure(
    provider: &dyn SandboxProvider,
    row: &Row<'_>,
    runs: usize,
) -> Result<Vec<f64>, SandboxError> {
    let (mut times, spec) = (Vec::new(), SandboxSpec::default());
    for _ in 0..runs + WARM_UP {
        if row.2 {
            tokio::time::sleep(REFILL).await;
        }
        let began = Instant::now();
        exec(provider.acquire(&spec).await?.as_mut(), row.1.clone()).await?;
        times.push(ms(began));
    }
    Ok(times)
}

/// Measures every row, each `runs` times: Python in turns and from the beginning, MicroPython, JavaScript.
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
    let rows = [
        Row(
            "wasm python, first turn of a fresh sandbox, after a pause",
            &python,
            true,
            Some(2.0),
        ),
        Row(
            "wasm python, first turn of a fresh sandbox, no pause",
            &python,
            false,
            Some(2.0),
        ),
        Row(
            "wasm python, interpreter started from the beginning",
            &fresh,
            false,
            None,
        ),
        Row(
            "wasm micropython, fresh interpreter",
            &micropython,
            false,
            Some(2.0),
        ),
        Row(
            "wasm javascript, fresh interpreter",
            &javascript,
            false,
            None,
        ),
    ];
    let alone = python_alone(runs);
    for wanted in rows {
        let times = measure(provider, &wanted, runs).await?;
        let row = row(wanted.0, timing_after(WARM_UP, times));
        on_row(against_python(row, alone, wanted.3));
    }
    Ok(())
}
