//! `sinew bench sim`: speed of the simulation, on one core.
//!
//! | part | measures |
//! |---|---|
//! | `events` | happenings a second of a plan of middle size, and calls into the real cores |
//! | `large` | seconds for ten minutes of 1,000 engines and 100,000 sandboxes |
//! | `schedules` | seconds for seeded small systems with failures, every invariant held at every event |
//!
//! Everything runs in one thread. The large plan runs once: it is the longest.

use crate::machine::{CpuTime, peak_memory};
use crate::row::{Better, Printer, Row, Summary};
use crate::{BenchError, clock};
use clap::Args;
use sinew_sim::{Plan, Report, find, simulate};
use std::path::Path;

/// Names that `--only` takes.
const PARTS: [&str; 3] = ["events", "large", "schedules"];
/// Happenings a second that are hoped for.
const EVENTS: f64 = 500_000.0;
/// Most seconds of the large plan, and of the schedules.
const SECONDS: f64 = 120.0;
/// Schedules that [`SECONDS`] are stated for.
const SCHEDULES: u64 = 10_000;

/// Arguments of `sinew bench sim`.
#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    /// One JSON object a row
    #[arg(long)]
    json: bool,
    /// Only these parts: events, large, schedules
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds of the part events
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seeds of the part schedules; the target is for 10000
    #[arg(long, default_value_t = SCHEDULES, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    seeds: u64,
    /// Virtual seconds of the part large; the target is for 600
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    virtual_s: u32,
}

/// Runs the parts that are asked for.
pub(crate) fn run(args: &SimArgs) -> Result<(), BenchError> {
    let wanted = super::selected(&args.only, &PARTS)?;
    let printer = Printer::new(args.json);
    if wanted("events") {
        events(args.rounds, printer)?;
    }
    if wanted("large") {
        large(args.virtual_s, printer)?;
    }
    if wanted("schedules") {
        schedules(args.seeds, printer)?;
    }
    Ok(())
}

/// The plan of a preset, with some other keys.
fn plan(preset: &str, keys: &str) -> Result<Plan, BenchError> {
    let text = format!("name = \"{preset}\"\npreset = \"{preset}\"\n{keys}");
    Plan::parse(Path::new(preset), &text).map_err(BenchError::system)
}

/// Simulates a plan: what it came to, and the seconds that it took.
fn timed(plan: &Plan) -> Result<(Report, f64), BenchError> {
    let time = clock();
    let report = simulate(plan, false).map_err(BenchError::system)?;
    Ok((report, time()))
}

/// Happenings a second.
fn events(rounds: u32, printer: Printer) -> Result<(), BenchError> {
    let plan = plan("search-agents", "[run]\nupdates = 60\n")?;
    let cpu = CpuTime::now();
    let (mut events, mut inputs) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (report, wall_s) = timed(&plan)?;
        // The first warms caches and allocators.
        if round > 0 {
            events.push(report.events as f64 / wall_s);
            inputs.push(report.inputs as f64 / wall_s);
        }
    }
    let others = CpuTime::others_since(cpu);
    let summary = |rates| Summary::of(rates, Better::More).unwrap_or_default();
    let name = "sim: events, search-agents, 60 updates";
    printer.row(
        &Row::new(name, "events/s", summary(events))
            .at_least(EVENTS)
            .others(others),
    );
    let name = "sim: calls into the real cores, the same plan";
    printer.row(&Row::new(name, "calls/s", summary(inputs)).others(others));
    Ok(())
}

/// The largest plan.
fn large(virtual_s: u32, printer: Printer) -> Result<(), BenchError> {
    let plan = plan("large", &format!("[run]\nmax_s = {virtual_s}\n"))?;
    let cpu = CpuTime::now();
    let (report, wall_s) = timed(&plan)?;
    let others = CpuTime::others_since(cpu);
    let one = |value: f64| Summary::of(vec![value], Better::Less).unwrap_or_default();
    let engines = plan.engines.count;
    let sandboxes = plan.tools.sandboxes;
    let name =
        format!("sim: {engines} engines, {sandboxes} sandboxes, {virtual_s} virtual seconds");
    let row = Row::new(name.clone(), "s", one(wall_s)).at_most(SECONDS);
    printer.row(&row.others(others));
    let rate = one(report.events as f64 / wall_s);
    printer.row(&Row::new(format!("{name}: events"), "events/s", rate));
    if let Some(bytes) = peak_memory() {
        let row = Row::new(format!("{name}: memory"), "GB", one(bytes / 1e9));
        printer.row(&row);
    }
    Ok(())
}

/// Small systems with failures.
fn schedules(seeds: u64, printer: Printer) -> Result<(), BenchError> {
    let cpu = CpuTime::now();
    let time = clock();
    if let Some(failure) = find(0..seeds, None) {
        let (seed, violation) = (failure.seed, failure.violation);
        return Err(BenchError::system(format!(
            "seed {seed} breaks invariant {violation}; `sinew sim --seed {seed}` shows the plan"
        )));
    }
    let wall_s = time();
    let others = CpuTime::others_since(cpu);
    let name = format!("sim: {seeds} seeded schedules with failures, every invariant held");
    let one = Summary::of(vec![wall_s], Better::Less).unwrap_or_default();
    let row = Row::new(name, "s", one).at_most(SECONDS * seeds as f64 / SCHEDULES as f64);
    printer.row(&row.others(others));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_small() {
        let args = SimArgs {
            json: true,
            only: vec!["schedules".into(), "large".into()],
            rounds: 1,
            seeds: 3,
            virtual_s: 1,
        };
        run(&args).unwrap();
        let wrong = SimArgs {
            only: vec!["x".into()],
            ..args
        };
        assert_eq!(run(&wrong).unwrap_err().code(), 2);
    }
}
