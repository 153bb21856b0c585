//! `sinew sim`: a plan or a recipe in virtual time, seeded searches for broken invariants, set-ups of papers,
//! and errors of predictions for recorded runs.

mod recipe;

use crate::output;
use clap::Args;
use recipe::{Planned, RecipeArgs};
use serde_json::{Value, json};
use sinew_assembly::Failure;
use sinew_runs::write_atomic;
use sinew_sim::{
    Calibration, ObservedRun, PRESETS, Plan, PlanError, Prediction, Report, SizedRun, Violation,
    advise, bottleneck, calibrate, claims, compare_sizes, find, median, random_plan, replay,
    simulate, svg, table, text,
};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `sinew sim`.
#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    /// Plan file or recipe (TOML), or the name of a preset
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
    /// Write the times of the one run of --calibrate to this file, for --calibration
    #[arg(long, value_name = "FILE", requires = "calibrate")]
    write: Option<PathBuf>,
    /// Measured times in the place of the plan's: a file that --calibrate RUN --write FILE made
    #[arg(long, value_name = "FILE", requires = "plan")]
    calibration: Option<PathBuf>,
    /// Hold the prediction against this recorded run
    #[arg(long, value_name = "RUN", requires = "plan")]
    against: Option<PathBuf>,
    /// Counts of roles follow their work; a plan without min and max gets them for its first kind. The
    /// result is held against fixed counts
    #[arg(long, requires = "plan")]
    autoscale: bool,
    #[command(flatten)]
    recipe: RecipeArgs,
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
        return calibration(&args.calibrate, args.write.as_deref(), args.json);
    }
    let Planned { mut plan, assumed } = match (&args.plan, args.seed) {
        (None, Some(seed)) => return again(seed, args),
        (path, _) => load(path.as_deref().unwrap_or(Path::new("")), args)?,
    };
    plan.seed = args.seed.unwrap_or(plan.seed);
    if args.autoscale {
        plan = plan.autoscaled().map_err(|e| wrong(&e))?;
    }
    if args.check {
        return check(&plan, args);
    }
    if args.events {
        let why = "--events: needs --check, or --seed without a plan";
        return Err(Failure::input(why));
    }
    predict(&plan, &assumed, args)
}

/// Simulates a plan, and prints what it comes to.
fn predict(plan: &Plan, assumed: &[String], args: &SimArgs) -> Result<(), Failure> {
    let started = Instant::now();
    let mut report = simulate(plan, false).map_err(|e| broken(&e))?;
    let wall_s = started.elapsed().as_secs_f64();
    let sizes = if plan.autoscale.is_some() {
        compare_sizes(plan, &report).map_err(|e| broken(&e))?
    } else {
        Vec::new()
    };
    // Advice is about counts, which follow the work then.
    if !args.no_advice && sizes.is_empty() {
        advise(plan, &mut report).map_err(|e| broken(&e))?;
    }
    let against = match &args.against {
        Some(run) => Some(held_against(run, &report)?),
        None => None,
    };
    if let Some(file) = &args.svg {
        let drawn = svg(&report).map_err(Failure::system)?;
        write_atomic(file, drawn.as_bytes())
            .map_err(|e| Failure::system(format!("{}: {e}", file.display())))?;
    }
    if args.json {
        let mut line = json!(report);
        line["wall_s"] = json!(wall_s);
        line["events_per_s"] = json!(report.events as f64 / wall_s.max(1e-9));
        line["bottleneck"] = json!(bottleneck(&report));
        line["assumed"] = json!(assumed);
        line["plan"] = recipe::described(plan);
        if !sizes.is_empty() {
            line["sizes"] = json!(sizes);
        }
        if let Some(rows) = against {
            line["against"] = rows;
        }
        output::print_json(&line);
        return Ok(());
    }
    output::print(&text(&report));
    output::print(&format!("\n{}", table(&report)));
    assumed
        .iter()
        .for_each(|what| output::print(&format!("assumed     {what}\n")));
    output::print(&sizes_text(&sizes));
    if let Some(rows) = &against {
        output::print(&against_text(rows));
    }
    Ok(())
}

/// The prediction next to a recorded run: rows of `what`, `measured`, `predicted`, `error`.
fn held_against(run: &Path, report: &Report) -> Result<Value, Failure> {
    let observed = ObservedRun::read(run).map_err(|e| wrong(&e))?;
    let row = |what: &str, measured: f64, predicted: f64| {
        let error = predicted / measured.max(1e-12) - 1.0;
        json!({ "what": what, "measured": measured, "predicted": predicted, "error": error })
    };
    let (measured_s, step_s) = (observed.step_s, report.tail.step_s.mean);
    let parts: serde_json::Map<String, Value> = observed
        .parts_s()
        .into_iter()
        .map(|(name, s)| (name.to_owned(), json!(s)))
        .collect();
    let training = observed.parts_s()[1].1 / measured_s.max(1e-12);
    Ok(json!({
        "run": observed.name,
        "rows": [
            row("seconds of a step", measured_s, step_s),
            row("updates an hour", 3600.0 / measured_s.max(1e-12), 3600.0 / step_s.max(1e-12)),
            row("share of training", training, report.utilization.trainer),
        ],
        "measured_parts_s": parts,
    }))
}

fn against_text(rows: &Value) -> String {
    let mut out = format!(
        "{:22} {:>12} {:>12} {:>9}\n",
        "", "measured", "predicted", "error"
    );
    for row in rows["rows"].as_array().into_iter().flatten() {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        out.push_str(&format!(
            "{:22} {:>12.3} {:>12.3} {:>+8.1} %\n",
            row["what"].as_str().unwrap_or_default(),
            number("measured"),
            number("predicted"),
            100.0 * number("error")
        ));
    }
    out
}

fn sizes_text(sizes: &[SizedRun]) -> String {
    if sizes.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "{:28} {:>6} {:>14} {:>11} {:>9} {:>12} {:>8} {:>5}\n",
        "counts",
        "units",
        "sampled tok/s",
        "of capacity",
        "an hour",
        "tokens for 1",
        "changes",
        "back"
    );
    for row in sizes {
        out.push_str(&format!(
            "{:28} {:>6.1} {:>14.0} {:>11.3} {:>9.2} {:>12.0} {:>8} {:>5}\n",
            row.sizes,
            row.units,
            row.sampled_tokens_per_s,
            row.of_capacity,
            row.per_hour,
            row.trained_tokens_per_unit,
            row.changes,
            row.reversals
        ));
    }
    out
}

/// A plan, the plan of a recipe, or the preset of a name that no file has; with measured times.
fn load(path: &Path, args: &SimArgs) -> Result<Planned, Failure> {
    let measured = args.calibration.as_deref().map(Calibration::load);
    let measured = measured.transpose().map_err(|e| wrong(&e))?;
    let name = path.to_string_lossy();
    let mut plan = if !path.exists() && PRESETS.iter().any(|(preset, _)| *preset == name) {
        let text = format!("name = \"{name}\"\npreset = \"{name}\"\n");
        Plan::parse(path, &text).map_err(|e| wrong(&e))?
    } else {
        // A file that cannot be read is refused as a plan.
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if recipe::is_recipe(&text) {
            return recipe::planned(path, &args.recipe, measured.as_ref());
        }
        Plan::load(path).map_err(|e| wrong(&e))?
    };
    args.recipe.refuse_for_plans()?;
    plan.run.updates = args.recipe.updates.unwrap_or(plan.run.updates);
    if let Some(measured) = measured {
        measured.lay_over(&mut plan).map_err(|e| wrong(&e))?;
    }
    Ok(Planned {
        plan: plan.checked().map_err(|e| wrong(&e))?,
        assumed: Vec::new(),
    })
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
fn calibration(runs: &[PathBuf], write: Option<&Path>, json: bool) -> Result<(), Failure> {
    let observed = runs.iter().map(|run| ObservedRun::read(run));
    let observed: Vec<ObservedRun> = observed
        .collect::<Result<_, _>>()
        .map_err(|e: PlanError| wrong(&e))?;
    let predictions = calibrate(&observed).map_err(|e| broken(&e))?;
    if let Some(file) = write {
        let ([run], [fitted]) = (&observed[..], &predictions[..]) else {
            let why = "--write: has the times of one run; give --calibrate one run";
            return Err(Failure::input(why));
        };
        let text = Calibration::of_run(run, fitted).text();
        let text = text.map_err(|e| wrong(&e))?;
        write_atomic(file, text.as_bytes())
            .map_err(|e| Failure::system(format!("{}: {e}", file.display())))?;
    }
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
