//! `sinew replay` and `sinew fork`: repeats episodes and steps of a run, and continues episodes from their
//! middle.

use crate::episodes::stored_episode;
use crate::output::{print, print_as_it_is, print_json};
use crate::signals;
use clap::Args;
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::{Failure, Replayer, StepChange};
use sinew_orchestrator::StepRecord;
use sinew_recipe::RunPlan;
use sinew_rollout::{PartDrift, ReplayChange, ReplayedEpisode};
use sinew_types::{EpisodeEnd, Trace};
use sinew_view::{ShowOptions, visible};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Characters of a value that a line of a change shows.
const SHOWN: usize = 300;

/// Arguments of `sinew replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Episode that is run again; left out: --step says what is done again
    #[arg(required_unless_present = "step", conflicts_with = "step")]
    episode: Option<String>,
    /// Folder of the run
    #[arg(long)]
    run_dir: PathBuf,
    /// Training step that is done again, with the steps from the checkpoint before it on
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    step: Option<u64>,
    /// Recipe whose world the episode is run in, in place of the run's
    #[arg(long, value_name = "FILE", conflicts_with = "step")]
    recipe: Option<PathBuf>,
    /// Something that may differ from the run with --step: a key of the recipe, `data.rows`
    /// or `model.weights`; may be repeated. What only episodes need (environment, tasks, rewards) may differ
    /// in any case, as no episode is run
    #[arg(long, value_name = "NAME", requires = "step")]
    allow_change: Vec<String>,
    /// One JSON object: what was compared, and every change
    #[arg(long)]
    json: bool,
}

/// Arguments of `sinew fork`.
#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// Episode that is forked
    episode: String,
    /// Folder of the run
    #[arg(long)]
    run_dir: PathBuf,
    /// First turn that is sampled anew, from 1; the turns before it are played again
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    at_turn: u32,
    /// Message of the user that the model sees before that turn
    #[arg(long, value_name = "TEXT")]
    say: Option<String>,
    /// Number of forks, each sampled with another seed
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    count: u64,
    /// One JSON object a fork
    #[arg(long)]
    json: bool,
}

/// `sinew replay`.
///
/// # Errors
/// If something came out differently, or cannot be done again.
pub(crate) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    match (&args.episode, args.step) {
        (Some(episode), _) => episode_again(args, episode),
        (None, Some(step)) => step_again(args, step),
        (None, None) => Err(Failure::input("give an episode or --step")),
    }
}

/// Threads for episodes.
///
/// # Errors
/// If the system gives none.
fn runtime() -> Result<Runtime, Failure> {
    Runtime::new().map_err(|e| Failure::system(format!("async runtime: {e}")))
}

/// Runs one episode again and prints what differs.
fn episode_again(args: &ReplayArgs, episode: &str) -> Result<(), Failure> {
    let trace = stored_episode(&args.run_dir, episode)?;
    let recipe = match &args.recipe {
        Some(path) => RunPlan::load(path, ENVIRONMENTS).map_err(Failure::input)?,
        None => sinew_assembly::recipe_of(&args.run_dir)?,
    };
    let runtime = runtime()?;
    let _entered = runtime.enter();
    let replayer = Replayer::open(&args.run_dir, recipe)?;
    let again = runtime.block_on(replayer.replay(&trace))?;
    let first = again.changes.first();
    if args.json {
        print_json(&json!({
            "episode": trace.episode, "equal": first.is_none(), "compared": again.compared, "changes": again.changes,
            "drift": again.drift, "open_end": again.open_end,
        }));
    } else {
        print(&told(&trace, &again));
    }
    match first {
        None => Ok(()),
        Some(first) => Err(Failure::system(format!(
            "episode {} is not as recorded: first {}{}",
            trace.episode,
            place(first),
            drifted(&again.drift)
        ))),
    }
}

/// Position of a change, in words.
fn place(change: &ReplayChange) -> String {
    match change.turn {
        None => change.field.clone(),
        Some(0) => format!("{} of the prompt", change.field),
        Some(turn) => format!("{} after turn {turn}", change.field),
    }
}

/// Parts of other versions, as a hint.
fn drifted(drift: &[PartDrift]) -> String {
    let part = |d: &PartDrift| {
        if d.is.is_empty() {
            format!("{} {} is gone", d.part, d.was)
        } else {
            format!("{} was {}, is {}", d.part, d.was, d.is)
        }
    };
    match drift {
        [] => String::new(),
        all => format!(
            "\n  hint: changed since: {}",
            all.iter().map(part).collect::<Vec<_>>().join("; ")
        ),
    }
}

/// The beginning of a value, for a line.
fn shown(text: &str) -> String {
    let mut cut: String = text.chars().take(SHOWN).collect();
    if cut.len() < text.len() {
        cut.push_str("...");
    }
    visible(&cut).replace('\n', "\\n")
}

/// The findings of a replay, in words.
fn told(trace: &Trace, again: &ReplayedEpisode) -> String {
    let mut out = format!(
        "episode {}: {} nodes compared, {} changes{}\n",
        trace.episode,
        again.compared,
        again.changes.len(),
        again
            .open_end
            .map_or_else(String::new, |why| format!("; end not compared: {why}"))
    );
    for change in &again.changes {
        out += &format!(
            "  {}\n    was {}\n    is  {}\n",
            place(change),
            shown(&change.was),
            shown(&change.is)
        );
    }
    out
}

/// Does steps again in a copy of the run and prints what differs.
fn step_again(args: &ReplayArgs, step: u64) -> Result<(), Failure> {
    let run_dir = &args.run_dir;
    let recipe = sinew_assembly::recipe_of(run_dir)?;
    if sinew_runs::in_use(run_dir) {
        return Err(Failure::input(format!(
            "{}: a process holds the run, and its store cannot be copied now\n  hint: wait until it ends",
            run_dir.display()
        )));
    }
    if recipe.harness.is_served() {
        return Err(Failure::input(format!(
            "harness.type = \"{}\": steps of agents from outside are not done again",
            recipe.harness.name()
        )));
    }
    let recorded = recorded(run_dir, step)?;
    let above = run_dir.parent().filter(|p| !p.as_os_str().is_empty());
    let copy = tempfile::Builder::new()
        .prefix(".replay-")
        .tempdir_in(above.unwrap_or_else(|| Path::new(".")));
    let copy = copy.map_err(|e| Failure::system(format!("a copy of the run: {e}")))?;
    let runtime = runtime()?;
    let mut signals = signals::count(&runtime, false)?;
    let (stop, cancel) = watch::channel(false);
    runtime.spawn(async move {
        if signals.wait_for(|n| *n > 0).await.is_ok() {
            let _ = stop.send(true);
        }
    });
    let handle = runtime.handle().clone();
    let again = sinew_assembly::repeat_steps(
        run_dir,
        copy.path(),
        step,
        &args.allow_change,
        handle,
        cancel,
    )?;
    let mut changes = Vec::new();
    for record in &again.records {
        if let Some(was) = recorded.iter().find(|r| r.step == record.step) {
            changes.extend(sinew_assembly::step_changes(was, record)?);
        }
    }
    let weights = again.weights.as_ref();
    let same_weights = weights.map(|(was, is)| was == is);
    if args.json {
        print_json(&json!({
            "step": step, "from": again.from, "steps": again.records.len(), "changes": changes,
            "changed_since": again.changed,
            "equal": changes.is_empty() && same_weights != Some(false),
            "weights": weights.map(|(was, is)| json!({"was": was, "is": is, "equal": was == is})),
            "record": again.records.last(),
        }));
    } else {
        print(&steps_told(step, &again, &changes));
    }
    verdict(step, &again, &changes)
}

/// The records of a run's steps.
///
/// # Errors
/// If it has no such step.
fn recorded(run_dir: &Path, step: u64) -> Result<Vec<StepRecord>, Failure> {
    let metrics = run_dir.join("metrics.jsonl");
    let records: Vec<StepRecord> = sinew_view::lines(&metrics).map_err(Failure::system)?;
    if records.iter().any(|r| r.step == step) {
        Ok(records)
    } else {
        Err(Failure::input(format!(
            "--step {step}: the run has {}",
            match records.last() {
                Some(last) => format!("steps 1 to {}", last.step),
                None => "no step yet".into(),
            }
        )))
    }
}

/// The findings of steps that were done again, in words.
fn steps_told(step: u64, again: &sinew_assembly::RepeatReport, changes: &[StepChange]) -> String {
    let mut out = String::new();
    for what in &again.changed {
        out += &format!("{}\n", visible(what));
    }
    for r in &again.records {
        out += &format!(
            "step {}: {} rows, {} trained tokens, loss {:.6}, gradient norm {:.6}\n",
            r.step, r.rows, r.trained_tokens, r.loss, r.grad_norm
        );
    }
    for c in changes {
        out += &format!(
            "  step {} {}: was {}, is {}\n",
            c.step, c.field, c.was, c.is
        );
    }
    out += &match &again.weights {
        None => format!("weights after step {step}: no checkpoint of it is kept to compare with\n"),
        Some((was, is)) if was == is => {
            format!("weights after step {step}: equal, {}\n", &was[..16])
        }
        Some((was, is)) => {
            format!(
                "weights after step {step}: was {}, is {}\n",
                &was[..16],
                &is[..16]
            )
        }
    };
    out
}

/// # Errors
/// The first difference, if there is one.
fn verdict(
    step: u64,
    again: &sinew_assembly::RepeatReport,
    changes: &[StepChange],
) -> Result<(), Failure> {
    let done = again.records.last().map_or(again.from, |r| r.step);
    if done != step {
        return Err(Failure::system(format!(
            "step {step} was not done again: its episodes end with step {done}"
        )));
    }
    if let Some(first) = changes.first() {
        return Err(Failure::system(format!(
            "step {} is not as recorded: first {}\n  hint: was it another version, machine or number of threads?",
            first.step, first.field
        )));
    }
    match &again.weights {
        Some((was, is)) if was != is => Err(Failure::system(format!(
            "the weights after step {step} are others, though all measurements are equal"
        ))),
        _ => Ok(()),
    }
}

/// `sinew fork`: plays an episode up to a turn, and lets the newest weights of the run continue.
///
/// # Errors
/// If the world cannot be restored, or the episode or the run has nothing to continue with.
pub(crate) fn fork(args: &ForkArgs) -> Result<(), Failure> {
    let trace = stored_episode(&args.run_dir, &args.episode)?;
    let recipe = sinew_assembly::recipe_of(&args.run_dir)?;
    let runtime = runtime()?;
    let _entered = runtime.enter();
    let replayer = Replayer::open(&args.run_dir, recipe)?;
    let engine = replayer.engine()?;
    for number in 1..=args.count {
        let engine = std::sync::Arc::clone(&engine);
        let say = args.say.as_deref();
        let forked = replayer.fork(&trace, args.at_turn, number, say, engine);
        let forked = runtime.block_on(forked)?;
        if let Some(change) = &forked.change {
            return Err(Failure::system(format!(
                "the world cannot be restored: {} is not as recorded\n    was {}\n    is  {}\n  hint: `sinew replay {}` \
                 compares the whole episode",
                place(change),
                shown(&change.was),
                shown(&change.is),
                trace.episode
            )));
        }
        let stored = keep(&args.run_dir, &forked.trace)?;
        show(args, &replayer, &forked.trace, stored)?;
    }
    Ok(())
}

/// Adds a fork to the run's store, with the purpose `fork`. A run that trains holds it: then the fork is only
/// printed.
fn keep(run_dir: &Path, trace: &Trace) -> Result<bool, Failure> {
    if sinew_runs::in_use(run_dir) {
        return Ok(false);
    }
    let store = sinew_assembly::run_store(run_dir, false)?;
    store.commit(trace).map_err(Failure::system)?;
    Ok(true)
}

fn show(args: &ForkArgs, replayer: &Replayer, trace: &Trace, stored: bool) -> Result<(), Failure> {
    if args.json {
        let text = sinew_view::json(trace, replayer.renderer()).map_err(Failure::system)?;
        let trace: serde_json::Value = serde_json::from_str(&text).map_err(Failure::system)?;
        print_json(&json!({
            "episode": trace["episode"], "at_turn": args.at_turn, "stored": stored, "trace": trace,
        }));
        return Ok(());
    }
    let options = ShowOptions {
        color: std::io::stdout().is_terminal(),
        tokens: false,
    };
    print_as_it_is(sinew_view::text(trace, replayer.renderer(), options).as_bytes());
    let hint = match (stored, &trace.end) {
        (_, EpisodeEnd::Failed { message, .. }) => format!("failed: {}", visible(message)),
        (true, _) => format!(
            "`sinew show {} --run-dir {}` prints it again",
            trace.episode,
            args.run_dir.display()
        ),
        (false, _) => "not stored: a process holds the run".to_owned(),
    };
    print(&format!("forked before turn {}; {hint}\n", args.at_turn));
    Ok(())
}
