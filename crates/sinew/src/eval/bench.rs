//! `sinew eval --bench`: measures a model with benchmarks, one after the other.
//!
//! The folder of an evaluation:
//!
//! | path | content |
//! |---|---|
//! | `rows/NAME.jsonl` | the rows of a benchmark as they are asked |
//! | `NAME` | its run: recipe, episodes, and the result in `result.json` |
//! | `report.md`, `report.html` | all results of the folder |
//! | `evaluation.json` | the same without the tables of tasks, as the last line of `--json` |
//!
//! Everything that can be checked is checked for all benchmarks before the first episode. Results and
//! episodes that are stored are kept with `--resume`, and not made again.

use super::EvalArgs;
use super::compare::{RESULT, results};
use super::plan::{How, Planned};
use super::target::{TargetArgs, folder_name, price};
use crate::train::{self, CommandEnd, TrainOptions};
use crate::{output, signals};
use clap::Args;
use serde_json::{Value, json};
use sinew_assembly::{Failure, MeasureOptions, MeasuredServers};
use sinew_evaluation::{
    Bench, BenchResult, Facts, Measures, Sample, ServedTokens, Setup, UserTokens, summarize,
};
use sinew_orchestrator::{FAILING, Process, RunEvent};
use sinew_recipe::RunPlan;
use sinew_runs::{RunDir, holds_run, write_atomic};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// File of all results without their tasks.
const EVALUATION: &str = "evaluation.json";

/// Sandbox level of task folders, unless one is named.
const LEVEL: &str = if cfg!(feature = "container") {
    "container"
} else {
    "process"
};

/// Message to whoever stops it.
const GO_ON: &str =
    "episodes that ended are kept\n  hint: the same command with --resume continues";

/// Arguments for benchmarks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmarks")]
pub(super) struct BenchArgs {
    /// Measure --model with these benchmarks: NAME[,NAME...], or harbor:DIR for a folder of Harbor's tasks;
    /// docs/evaluation.md has their prompts and settings
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        requires = "model",
        conflicts_with_all = ["benches", "compare", "track", "allow_change", "adapter"]
    )]
    bench: Vec<String>,
    /// List the benchmarks
    #[arg(long, conflicts_with = "compare")]
    pub(super) benches: bool,
    /// Compare two measurements of the same tasks, task by task: B minus A
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with = "model")]
    pub(super) compare: Vec<PathBuf>,
    #[command(flatten)]
    target: TargetArgs,
    /// Sampled episodes of each task for each seed; 0: only greedy ones. Left out: 4
    #[arg(long, value_name = "N", requires = "bench", value_parser = clap::value_parser!(u16).range(0..=1000))]
    samples: Option<u16>,
    /// Temperature of sampled episodes, above 0. Left out: 1
    #[arg(long, value_name = "T", requires = "bench", value_parser = above_zero)]
    temperature: Option<f32>,
    /// Share of the probability from which tokens are sampled, above 0, at most 1. Left out: 1
    #[arg(long, value_name = "P", requires = "bench", value_parser = above_zero)]
    top_p: Option<f32>,
    /// Seeds of sampled episodes: SEED[,SEED...]. Left out: the one of --seed, else 0
    #[arg(long, value_name = "SEED", value_delimiter = ',', requires = "bench")]
    seeds: Vec<u64>,
    /// No greedy episode of each task
    #[arg(long, requires = "bench")]
    no_greedy: bool,
    /// Maximum number of tasks of a benchmark, spread evenly over all. Left out: all
    #[arg(long, value_name = "N", requires = "bench", value_parser = crate::at_least_one)]
    tasks: Option<usize>,
    /// Maximum number of tokens that a turn samples, in place of the benchmark's
    #[arg(long, value_name = "N", requires = "bench", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Maximum number of tokens of an episode with its prompts, in place of the benchmark's
    #[arg(long, value_name = "N", requires = "bench", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Rows in place of the hub's: a file or a folder of one benchmark, or a folder with a folder for each
    #[arg(long, value_name = "PATH", requires = "bench")]
    data: Option<PathBuf>,
    /// Python interpreter that has the packages of the benchmark: a path, or a name in PATH
    #[arg(long, value_name = "PYTHON", requires = "bench")]
    python: Option<String>,
    /// Sandbox level of the tasks of harbor:DIR. Left out: container where this program has it, else process
    #[arg(long, value_name = "LEVEL", requires = "bench", value_parser = ["process", "container", "microvm"])]
    level: Option<String>,
    /// Price of a million tokens of prompts, and of a million sampled ones: the report has the cost
    #[arg(long, value_name = "IN,OUT", requires = "bench", value_parser = price)]
    price: Option<[f64; 2]>,
}

/// A number above 0.
fn above_zero(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("allowed: a number above 0".into()),
    }
}

impl How {
    fn of(args: &EvalArgs, benches: usize) -> Result<Self, Failure> {
        let own = &args.bench;
        let target = own
            .target
            .target(args.model.as_deref().unwrap_or_default())?;
        let seed = args.run.seed.unwrap_or(0);
        let seeds = match &own.seeds[..] {
            [] => vec![seed],
            seeds => seeds.to_vec(),
        };
        let different: BTreeSet<&u64> = seeds.iter().collect();
        if different.len() < seeds.len() {
            return Err(Failure::input("--seeds: a seed is named twice"));
        }
        let samples = usize::from(own.samples.unwrap_or(4));
        if samples == 0 && own.no_greedy {
            return Err(Failure::input(
                "--no-greedy: with --samples 0 there is nothing left to measure; remove one of them",
            ));
        }
        Ok(Self {
            model: target.name,
            setup: Setup {
                model: target.source,
                user: own.target.user(),
                level: Some(own.level.as_deref().unwrap_or(LEVEL).to_owned()),
                seed,
                rows: None,
                python: own.python.clone(),
                max_tokens: own.max_tokens,
                context: own.context,
                top_p: own.top_p,
                samples,
                temperature: own.temperature.unwrap_or(1.0),
                greedy: !own.no_greedy,
            },
            servers: target.servers,
            tasks: own.tasks.unwrap_or(usize::MAX),
            resume: args.run.resume,
            seeds,
            price: own.price,
            user_price: own.target.user_price,
            data: own.data.clone(),
            single: benches == 1,
        })
    }

    /// Files of `--data` for a benchmark, if they were given.
    ///
    /// # Errors
    /// If they are of several benchmarks and there is no folder for this one.
    pub(super) fn local(&self, bench: &Bench) -> Result<Option<PathBuf>, Failure> {
        let Some(data) = &self.data else {
            return Ok(None);
        };
        let own = data.join(bench.folder());
        if own.is_dir() {
            return Ok(Some(own));
        }
        if self.single {
            return Ok(Some(data.clone()));
        }
        Err(Failure::input(format!(
            "--data {}: it has no folder `{}`, which the rows of --bench {} would be in",
            data.display(),
            bench.folder(),
            bench.name
        )))
    }
}

/// `sinew eval --benches`.
///
/// # Errors
/// If a definition is broken, which is a bug.
pub(super) fn list(json: bool) -> Result<(), Failure> {
    let mut all = Bench::all().map_err(Failure::system)?;
    all.push(Bench::harbor("DIR").map_err(Failure::system)?);
    for bench in all {
        if json {
            output::print_json(&json!({
                "bench": bench.name, "about": bench.about, "link": bench.link, "source": bench.source,
                "packages": bench.packages, "reference": bench.reference,
            }));
            continue;
        }
        let from = bench.source.as_deref().or(bench.packages.as_deref());
        let (name, about) = (&bench.name, &bench.about);
        output::print(&format!(
            "{name:16} {about}\n{:16} {}\n",
            "",
            from.unwrap_or_default()
        ));
    }
    Ok(())
}

/// The folder of the evaluation: that of `--run-dir`, else `runs/eval-MODEL`, or the first of
/// `runs/eval-MODEL-2`, `-3` ... that has none.
fn folder(args: &EvalArgs, model: &str) -> Result<PathBuf, Failure> {
    let taken = |path: &PathBuf| path.join(EVALUATION).exists() || path.join("rows").exists();
    if let Some(path) = &args.run.run_dir {
        if holds_run(path) {
            return Err(Failure::input(format!(
                "--run-dir {}: it holds a run; benchmarks need a separate folder",
                path.display()
            )));
        }
        return Ok(path.clone());
    }
    let name = folder_name(model, &args.bench.target);
    let first = PathBuf::from("runs").join(format!("eval-{name}"));
    if args.run.resume || !taken(&first) {
        return Ok(first);
    }
    let numbered = |n: u64| PathBuf::from(format!("{}-{n}", first.display()));
    let mut free = (2..).map(numbered).filter(|path| !taken(path));
    Ok(free.next().unwrap_or_else(|| first.clone()))
}

/// Measures the model with all benchmarks.
///
/// # Errors
/// If one is refused, or a measurement does not reach its end. Results until then are kept.
pub(super) fn measured(args: &EvalArgs) -> Result<CommandEnd, Failure> {
    let mut benches = Vec::new();
    for name in &args.bench.bench {
        benches.extend(Bench::named(name.trim()).map_err(Failure::input)?);
    }
    let names: BTreeSet<&str> = benches.iter().map(|b| b.name.as_str()).collect();
    if names.len() < benches.len() {
        return Err(Failure::input("--bench: a benchmark is named twice"));
    }
    let how = How::of(args, benches.len())?;
    if how.setup.user.is_some() && !benches.iter().any(|b| b.user) {
        return Err(Failure::input(
            "--user: has an effect with benchmarks that have a user only, such as tau2; remove it",
        ));
    }
    if args.bench.level.is_some() && !benches.iter().any(|b| b.has_level) {
        return Err(Failure::input(
            "--level: has an effect with --bench harbor:DIR only; remove it",
        ));
    }
    if how.data.is_some() && benches.iter().all(|b| b.source.is_none()) {
        return Err(Failure::input(
            "--data: has no effect with benchmarks whose package has the tasks; remove it",
        ));
    }
    let folder = folder(args, &how.model)?;
    let planned = benches.into_iter().map(|b| Planned::new(&how, &folder, b));
    let planned: Vec<Planned> = planned.collect::<Result<_, _>>()?;
    let trained = trained(&how);
    let runtime = Runtime::new().map_err(Failure::system)?;
    let signals = signals::count(&runtime, args.run.stop_on_eof)?;
    let mut troubles = Vec::new();
    for planned in planned {
        if *signals.borrow() > 0 {
            return Err(Failure::Interrupt(format!("interrupted; {GO_ON}")));
        }
        let result = match kept(&planned, &how) {
            Some(result) => result,
            None => measure(args, &how, &planned, &trained, &signals)?,
        };
        troubles.extend(trouble(&result, &planned.folder));
        write_reports(&folder, &results(&folder)?)?;
    }
    let results = results(&folder)?;
    if !args.run.json {
        output::print(&sinew_evaluation::text(&results));
        output::print(&format!(
            "\nreport: {}\n",
            folder.join("report.html").display()
        ));
    }
    Ok(CommandEnd {
        last: last_line(&folder, &results),
        trouble: (!troubles.is_empty()).then(|| Failure::system(troubles.join("\n"))),
    })
}

/// Prompts that the model was trained on, or the reason why they are not known.
fn trained(how: &How) -> Result<Vec<String>, String> {
    let source = match (&how.servers, &how.setup.model) {
        (None, Some(source)) => source,
        _ => return Err("the model is behind a server".into()),
    };
    match sinew_assembly::trained_prompts(source) {
        Ok(Some(prompts)) => Ok(prompts),
        Ok(None) => Err("the model is not of a run".into()),
        Err(failure) => Err(failure.text().to_owned()),
    }
}

/// The result of an earlier session, if it is what this one would measure.
fn kept(planned: &Planned, how: &How) -> Option<BenchResult> {
    let text = fs::read(planned.folder.join(RESULT)).ok()?;
    let result: BenchResult = serde_json::from_slice(&text).ok()?;
    let samples = |m: &Option<Measures>| m.as_ref().map_or(0, |m| m.counts.samples);
    let wanted = planned.count * how.setup.samples * how.seeds.len();
    let greedy = how.setup.greedy || how.setup.samples == 0;
    let same = result.facts.model == how.model
        && result.facts.settings == planned.settings
        && result.facts.tasks_hash.as_ref() == Some(&planned.tasks_hash)
        && result.facts.price == how.price
        && result.by_seed.keys().all(|seed| how.seeds.contains(seed))
        && samples(&result.sampled) == wanted
        && samples(&result.greedy) == usize::from(greedy) * planned.count;
    same.then_some(result)
}

/// Runs one benchmark, and writes its result.
fn measure(
    args: &EvalArgs,
    how: &How,
    planned: &Planned,
    trained: &Result<Vec<String>, String>,
    signals: &watch::Receiver<u32>,
) -> Result<BenchResult, Failure> {
    let mut options = args
        .run
        .options_in(&planned.folder, &planned.plan, "eval")?;
    options.signals = Some(signals.clone());
    options.tasks = Some(planned.tasks.clone());
    options.go_on = Some(GO_ON.to_owned());
    let measure = MeasureOptions {
        servers: how.servers.clone(),
        tasks: planned.count,
        samples: how.setup.samples,
        seeds: how.seeds.clone(),
        temperature: how.setup.temperature,
        greedy: how.setup.greedy || how.setup.samples == 0,
    };
    let mut found = None;
    let job = |recipe: &RunPlan, dir: &RunDir, options: &TrainOptions| {
        let measured = sampled(recipe, dir, options, &measure)?;
        let facts = Facts {
            bench: planned.bench.name.clone(),
            model: how.model.clone(),
            settings: planned.settings.clone(),
            tasks_hash: Some(planned.tasks_hash.clone()),
            contamination: planned.contamination(trained),
            wall_s: measured.wall_s,
            price: how.price,
            is_text_only: measured.is_text_only,
            served: served(how, &planned.folder)?,
            user: user(how, &planned.folder)?,
        };
        let result = summarize(facts, &measured.samples);
        let text = serde_json::to_vec(&result).map_err(Failure::system)?;
        write(&planned.folder.join(RESULT), &text)?;
        let trouble = trouble(&result, &planned.folder).map(Failure::system);
        found = Some(result);
        let last = Value::Null;
        Ok(CommandEnd { last, trouble })
    };
    let checked = |_: &Path, _: &RunPlan| Ok(planned.tasks.clone());
    crate::execute(&planned.folder, &planned.plan, checked, job, &options)?;
    found.ok_or_else(|| Failure::system("the measurement ended without a result"))
}

/// Counts of the servers that were sent messages; the others' tokens are those of the samples.
fn served(how: &How, folder: &Path) -> Result<Option<ServedTokens>, Failure> {
    let Some(MeasuredServers::Chat(_)) = &how.servers else {
        return Ok(None);
    };
    let usage = sinew_assembly::served_usage(folder)?;
    Ok(Some(ServedTokens {
        requests: usage.requests,
        uncounted: usage.uncounted,
        prompt: usage.prompt,
        sampled: usage.sampled,
    }))
}

/// The model that played a user, and what it spent.
fn user(how: &How, folder: &Path) -> Result<Option<UserTokens>, Failure> {
    let spent = sinew_judge::user_spent(folder).map_err(Failure::system)?;
    let (Some(user), Some(spent)) = (&how.setup.user, spent) else {
        return Ok(None);
    };
    Ok(Some(UserTokens {
        model: user.model.clone(),
        calls: spent.calls,
        prompt: spent.usage.input,
        sampled: spent.usage.output,
        cost: how.user_price.map(|price| spent.cost(price)),
    }))
}

/// The samples of a benchmark.
struct Sampled {
    samples: Vec<Sample>,
    /// Seconds that this session took.
    wall_s: f64,
    /// Servers reported neither token ids nor log-probs.
    is_text_only: bool,
}

/// Runs the episodes of a benchmark.
fn sampled(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &TrainOptions,
    how: &MeasureOptions,
) -> Result<Sampled, Failure> {
    train::in_session(recipe, dir, options, 0, |session| {
        let (bus, started) = (session.bus.clone(), session.started);
        let measurement = sinew_assembly::measurement(recipe, how, session)?;
        dir.write_recipe(recipe).map_err(Failure::input)?;
        let chats = matches!(how.servers, Some(MeasuredServers::Chat(_)));
        let (mut samples, mut is_text_only) = (Vec::new(), false);
        let mut take = |seed: Option<u64>, trace: &sinew_types::Trace| {
            is_text_only |= trace.provenance.logprobs_unknown;
            let sample = Sample::of(trace, seed);
            let sample = if chats {
                sample.cut_by_server()
            } else {
                sample
            };
            samples.push((seed, trace.origin.draw, sample));
        };
        let done = sinew_assembly::measure(measurement, &mut take);
        // They end in any order.
        samples.sort_by_key(|(seed, draw, _)| (*seed, *draw));
        let samples: Vec<Sample> = samples.into_iter().map(|(_, _, sample)| sample).collect();
        let done = done.map(|()| Sampled {
            samples,
            wall_s: started.elapsed().as_secs_f64(),
            is_text_only,
        });
        if done.is_ok() {
            let (process, why) = (Process::Ended, None);
            let sent = bus.emit(RunEvent::Ended { process, why });
            sent.map_err(Failure::system)?;
        }
        Ok(done)
    })
}

/// The reason why a result does not say much: too many of its samples have no score.
fn trouble(result: &BenchResult, folder: &Path) -> Option<String> {
    let sets = || [&result.greedy, &result.sampled].into_iter().flatten();
    let missing: usize = sets().map(|m| m.counts.failed + m.counts.unscored).sum();
    let all: usize = sets().map(|m| m.counts.samples).sum();
    if missing == 0 || (missing as f64) < FAILING * all as f64 {
        return None;
    }
    let first = sets().find_map(|m| m.counts.first_missing.as_deref());
    Some(format!(
        "{}: {missing} of {all} samples have no score, the first: {}\n  hint: `sinew episodes {} --failed` lists them",
        result.facts.bench,
        first.unwrap_or("reason not known"),
        folder.display()
    ))
}

/// The last line of `--json`: all results of the folder without their tasks.
fn last_line(folder: &Path, results: &[BenchResult]) -> Value {
    let brief = |result: &BenchResult| {
        let mut value = json!(result);
        if let Some(fields) = value.as_object_mut() {
            fields.remove("per_task");
        }
        value
    };
    let results: Vec<Value> = results.iter().map(brief).collect();
    json!({ "run_dir": folder.display().to_string(), "results": results })
}

/// Writes the reports of a folder.
fn write_reports(folder: &Path, results: &[BenchResult]) -> Result<(), Failure> {
    let last = format!("{:#}\n", last_line(folder, results));
    let files = [
        ("report.md", sinew_evaluation::markdown(results)),
        ("report.html", sinew_evaluation::html(results)),
        (EVALUATION, last),
    ];
    for (name, text) in files {
        write(&folder.join(name), text.as_bytes())?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let written = write_atomic(path, bytes);
    written.map_err(|e| Failure::system(format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperatures_are_numbers_in_their_range() {
        assert_eq!(above_zero("0.7"), Ok(0.7));
        for wrong in ["0", "-1", "NaN", "inf", "x"] {
            assert!(above_zero(wrong).is_err(), "{wrong}");
        }
    }
}
