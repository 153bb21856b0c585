//! `sinew sandbox bench` at the process level.

use crate::failure::Failure;
use crate::output;
use serde_json::json;
use sinew_attack::bench::{self, BenchRow, Parts, Subjects};
use sinew_attack::scale::Scale;
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use std::sync::Arc;

/// Sandboxes that the largest row keeps alive, and some.
const MAX_LIVE: usize = 6000;

/// The process level with nothing kept warm but, if asked for, the Python that forks.
pub(crate) fn unpooled(warm_python: bool) -> Result<Arc<dyn SandboxProvider>, Failure> {
    let program = std::env::current_exe().map_err(Failure::system)?;
    let search = std::env::var("PATH").unwrap_or_default();
    let mut config = ProcessConfig::new(program, &search);
    (config.warm_python, config.max_live) = (warm_python, MAX_LIVE);
    let provider = ProcessProvider::start(config).map_err(Failure::system)?;
    Ok(Arc::new(provider))
}

/// One spawner whose sandboxes have an interpreter waiting, one without.
fn subjects() -> Result<Subjects, Failure> {
    Ok(Subjects {
        cold: unpooled(false)?,
        warm: unpooled(true)?,
    })
}

/// How large numbers are that somebody asked for.
pub(crate) fn scale(full: bool, count: Option<u32>) -> Option<Scale> {
    let same = |count: u32| Scale {
        idle: count as usize,
        calls: count as usize,
        creates: count as usize,
    };
    count.map(same).or_else(|| full.then_some(Scale::FULL))
}

/// Rows as they come, of the named parts or of all.
pub(crate) fn run(scale: Option<Scale>, only: Option<&str>, as_json: bool) -> Result<(), Failure> {
    let parts = only.map_or(Ok(Parts::all()), Parts::parse);
    let parts = parts.map_err(|e| Failure::input(format!("--only: {e}")))?;
    let subjects = subjects()?;
    let scale = scale.unwrap_or(Scale::QUICK);
    let mut on_row = |row: BenchRow| print(&row, as_json);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::system)?;
    let all = bench::run_all(&subjects, &scale, &parts, &mut on_row);
    runtime.block_on(all).map_err(Failure::system)
}

/// A row, for a program or for a reader.
pub(crate) fn print(row: &BenchRow, as_json: bool) {
    match as_json {
        true => output::print_json(&json!(row)),
        false => output::print(&line(row)),
    }
}

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
