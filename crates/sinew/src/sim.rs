//! `sinew sim`: a plan in virtual time, seeded searches for broken invariants, set-ups of papers, and errors
//! of predictions for recorded runs.

use crate::output;
use clap::Args;
use serde_json::json;
use sinew_assembly::Failure;
use sinew_runs::write_atomic;
use sinew_sim::{
    ObservedRun, PRESETS, Plan, PlanError, Prediction, Violation, advise, calibrate, claims, find,
    median, random_plan, replay, simulate, svg, text,
};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `sinew sim`.
#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    /// Plan file (TOML), or the name of a preset
    #[arg(required_unless_present_any = ["published", "search", "presets", "seed", "calibrate"])]
    plan: Option<PathBuf>,
    /// JSON on standard output, the last line with the result
    #[arg(long)]
    json: bool,
    /// Write what was going on over time to this SVG
    #[arg(long, value_name = "FILE", requires = "plan")]
    svg: Option<PathBuf>,
    /// Another seed than the plan's; with --search the first seed; alone, the small system of this
    /// seed with its failures, as --search runs it, is run again with every invariant held
    #[arg(long)]
    seed: Option<u64>,
    /// Hold every invariant at every event
    #[arg(long, requires = "plan")]
    check: bool,
    /// Prints a line for every event, with --check or --seed only
    #[arg(long)]
    events: bool,
    /// Leave out what to buy next, which takes a simulation for each thing
    #[arg(long)]
    no_advice: bool,
    /// Run the small systems of so many seeds with failures; the first that breaks an invariant
    /// is made smaller
    /// and printed as a plan
    #[arg(long, value_name = "SEEDS", conflicts_with_all = ["plan", "published"])]
    search: Option<u64>,
    /// Set-ups of papers: their figures and those of the simulation
    #[arg(long, conflicts_with = "plan")]
    published: bool,
    /// Names of the presets
    #[arg(long, conflicts_with_all = ["plan", "published"])]
    presets: bool,
    /// Compares predictions with these recorded runs: folders of `sinew train --run-dir` with the embedded
    /// engine
    #[arg(long, value_name = "RUN", num_args = 1..)]
    #[arg(conflicts_with_all = ["plan", "published", "search", "presets"])]
    calibrate: Vec<PathBuf>,
}

fn wrong(error: &PlanError) -> Failure {
    Failure::input(error.to_string())
}

fn broken(violation: &Violation) -> Failure {
    Failure::system(format!("invariant {violation}"))
}

/// Runs it.
///
/// # Errors
/// A plan that is refused, an invariant that does not hold, a file that cannot be written.
pub(crate) fn run(args: &SimArgs) -> Result<(), Failure> {
    if args.presets {
        let names = PRESETS.iter().map(|(name, _)| *name);
        if args.json {
            output::print_json(&json!(names.collect::<Vec<_>>()))
        } else {
            names.for_each(|name| output::print(&format!("{name}\n")))
        }
        return Ok(());
    }
    if args.published {
        return published(args.json);
    }
    if let Some(count) = args.search {
        return search(args.seed.unwrap_or(0), count, args.json);
    }
    if !args.calibrate.is_empty() {
        return calibration(&args.calibrate, args.json);
    }
    let mut plan = match (&args.plan, args.seed) {
        (None, Some(seed)) => return again(seed, args),
        (path, _) => load(path.as_deref().unwrap_or(Path::new("")))?,
    };
    plan.seed = args.seed.unwrap_or(plan.seed);
    if args.check {
        return check(&plan, args);
    }
    if args.events {
        let why = "--events: needs --check, or --seed without a plan";
        return Err(Failure::input(why));
    }
    let started = Instant::now();
    let mut report = simulate(&plan, false).map_err(|e| broken(&e))?;
    let wall_s = started.elapsed().as_secs_f64();
    if !args.no_advice {
        advise(&plan, &mut report).map_err(|e| broken(&e))?;
    }
    if let Some(file) = &args.svg {
        let drawn = svg(&report).map_err(Failure::system)?;
        write_atomic(file, drawn.as_bytes())
            .map_err(|e| Failure::system(format!("{}: {e}", file.display())))?;
    }
    if args.json {
        let mut line = json!(report);
        line["wall_s"] = json!(wall_s);
        line["events_per_s"] = json!(report.events as f64 / wall_s.max(1e-9));
        output::print_json(&line);
    } else {
        output::print(&text(&report))
    }
    Ok(())
}

/// A file, or the preset of a name that no file has.
fn load(path: &Path) -> Result<Plan, Failure> {
    let name = path.to_string_lossy();
    if !path.exists() && PRESETS.iter().any(|(preset, _)| *preset == name) {
        let text = format!("name = \"{name}\"\npreset = \"{name}\"\n");
        return Plan::parse(path, &text).map_err(|e| wrong(&e));
    }
    Plan::load(path).map_err(|e| wrong(&e))
}

/// Holds the invariants of a plan, with a line for every event if they are wanted.
fn check(plan: &Plan, args: &SimArgs) -> Result<(), Failure> {
    let mut lines = Vec::new();
    let found = replay(plan, None, args.events.then_some(&mut lines));
    lines.iter().for_each(|line| {
        if args.json {
            output::print_json(&json!({ "event": line }))
        } else {
            output::print(&format!("{line}\n"))
        }
    });
    match found {
        Some(violation) => Err(broken(&violation)),
        None if args.json => {
            output::print_json(&json!({ "plan": plan.name, "seed": plan.seed, "holds": true }));
            Ok(())
        }
        None => {
            output::print(&format!(
                "{}: every invariant holds, seed {}\n",
                plan.name, plan.seed
            ));
            Ok(())
        }
    }
}

/// The small system of a seed. One that breaks an invariant is made smaller, as in a search.
fn again(seed: u64, args: &SimArgs) -> Result<(), Failure> {
    match check(&random_plan(seed), args) {
        Ok(()) => Ok(()),
        Err(_) => search(seed, 1, args.json),
    }
}

/// Looks for a seed that breaks an invariant.
fn search(first: u64, count: u64, json: bool) -> Result<(), Failure> {
    let last = first.saturating_add(count);
    let Some(failure) = find(first..last, None) else {
        if json {
            output::print_json(&json!({ "seeds": count, "first": first, "holds": true }))
        } else {
            output::print(&format!("seeds {first} to {last}: every invariant holds\n"))
        }
        return Ok(());
    };
    let plan = toml::to_string(&failure.plan).map_err(Failure::system)?;
    if json {
        output::print_json(&json!({
            "seed": failure.seed, "holds": false, "violation": failure.violation, "plan": plan,
        }))
    } else {
        output::print(&plan)
    }
    Err(Failure::system(format!(
        "seed {} breaks invariant {}\n  hint: keep the plan above in a file and replay it with \
         `sinew sim FILE --check --events`; the whole schedule: `sinew sim --seed {} --events`",
        failure.seed, failure.violation, failure.seed
    )))
}

/// The table of recorded runs, and the middle error.
fn calibration(runs: &[PathBuf], json: bool) -> Result<(), Failure> {
    let observed = runs.iter().map(|run| ObservedRun::read(run));
    let observed: Vec<ObservedRun> = observed
        .collect::<Result<_, _>>()
        .map_err(|e: PlanError| wrong(&e))?;
    let predictions = calibrate(&observed).map_err(|e| broken(&e))?;
    let own = median(predictions.iter().map(|p| p.own_error));
    let others = median(predictions.iter().filter_map(|p| p.others_error));
    if json {
        predictions
            .iter()
            .for_each(|p| output::print_json(&json!(p)));
        output::print_json(&json!({
            "runs": predictions.len(), "median_error": own, "median_error_by_others": others,
        }));
        return Ok(());
    }
    output::print(&format!(
        "{:16} {:12} {:>10} {:>6} {:>10} {:>18} {:>18}\n",
        "run", "mode", "groups", "flight", "measured s", "own costs", "costs of others"
    ));
    predictions
        .iter()
        .for_each(|p| output::print(&predicted(p)));
    let share = |e: Option<f64>| e.map_or("-".into(), |e| format!("{:.1} %", 100.0 * e));
    output::print(&format!(
        "median error {} by own costs, {} by costs of other runs\n",
        share(own),
        share(others)
    ));
    Ok(())
}

/// A line of the table.
fn predicted(p: &Prediction) -> String {
    let by = |s: f64| format!("{s:.3} ({:+.1} %)", 100.0 * (s / p.measured_s - 1.0));
    let mode = json!(p.mode);
    format!(
        "{:16} {:12} {:>10} {:>6} {:>10.3} {:>18} {:>18}\n",
        p.run,
        mode.as_str().unwrap_or_default(),
        format!("{} x {}", p.groups, p.group_size),
        p.in_flight,
        p.measured_s,
        by(p.own_s),
        p.others_s.map_or("-".into(), by),
    )
}

/// The table of set-ups.
fn published(json: bool) -> Result<(), Failure> {
    for claim in claims() {
        let measured = claim.measure().map_err(|e| broken(&e))?;
        if json {
            output::print_json(&json!(measured));
            continue;
        }
        let (least, most) = claim.published;
        let said = if least == most {
            format!("{least:.2}x")
        } else {
            format!("{least:.2}x to {most:.2}x")
        };
        let steps = claim.step_s.map_or(String::new(), |(ours, theirs)| {
            format!(" (published {ours:.0} s and {theirs:.0} s)")
        });
        output::print(&format!(
            "{:12} {:58} published {said:14} simulated {:.2}x: steps of {:.0} s and {:.0} s{steps}\n",
            claim.system, claim.what, measured.gain, measured.step_s, measured.baseline_step_s
        ));
    }
    Ok(())
}
