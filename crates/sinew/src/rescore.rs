//! `sinew rescore`: rewards of now for the stored episodes of a run.

use crate::output::{print, print_json};
use clap::Args;
use serde_json::json;
use sinew_recipe::{RewardSection, RewardTable, RewardTerm, RunPlan};
use sinew_rollout::{Rescored, changes, rescore, tasks_of};
use sinew_store::{Filter, MAX_PAGE, StoreReader, TraceStore};
use sinew_wire::Failure;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Arguments of `sinew rescore`.
#[derive(Debug, Args)]
pub(crate) struct RescoreArgs {
    /// Folder of the run
    run_dir: PathBuf,
    /// Reward in place of the recipe's, such as "exact(answer)" or "my_rewards.py:score"; may be repeated
    #[arg(long)]
    reward: Vec<String>,
    /// Recipe whose `[reward]` is used, in place of the run's
    #[arg(long)]
    recipe: Option<PathBuf>,
    /// Purpose of the episodes
    #[arg(long, default_value = "train")]
    purpose: String,
    /// Source of the new scores
    #[arg(long, default_value = "rescore")]
    source: String,
    /// Write no scores
    #[arg(long)]
    dry_run: bool,
    /// One JSON object a component, then one of the whole
    #[arg(long)]
    json: bool,
}

/// Scores every stored episode of a purpose, prints old and new means, and adds the scores to the store.
/// What was trained does not change.
///
/// # Errors
/// If there is no reward, a task is not in the recipe's taskset any more, or a process holds the store.
pub(crate) fn run(args: &RescoreArgs) -> Result<(), Failure> {
    let mut recipe = match &args.recipe {
        Some(path) => RunPlan::load(path).map_err(Failure::input)?,
        None => sinew_project::recipe(&args.run_dir)?,
    };
    if !args.reward.is_empty() {
        let terms = args
            .reward
            .iter()
            .map(|r| (r.clone(), RewardTerm::Weight(1.0)));
        recipe.reward = Some(RewardSection::Several(RewardTable {
            workers: None,
            terms: terms.collect(),
        }));
    }
    let taskset = sinew_wire::tasks(&recipe)?.all;
    let Some(reward) = sinew_wire::own_reward(&recipe, taskset.as_ref())? else {
        let hint = "the recipe has no reward of its own\n  hint: --reward \"exact(answer)\"";
        return Err(Failure::input(hint));
    };
    let folder = sinew_project::store_path(&args.run_dir);
    let traces = stored(
        &StoreReader::open(&folder).map_err(Failure::input)?,
        &args.purpose,
    )?;
    let wanted: BTreeSet<_> = traces.iter().map(|t| t.task.clone()).collect();
    let tasks = tasks_of(taskset.as_ref(), &wanted).map_err(Failure::input)?;
    let mut episodes = Vec::new();
    for trace in traces {
        let unknown =
            || Failure::input(format!("task {} is not in the recipe's tasks", trace.task));
        let task = tasks.get(&trace.task).ok_or_else(unknown)?.clone();
        episodes.push((trace, task));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(Failure::system)?;
    let run = sinew_project::recipe(&args.run_dir)?;
    let renderer = sinew_wire::renderer(&run.model, &run.env)?;
    let rescored = runtime.block_on(rescore(reward.as_ref(), renderer.as_ref(), episodes));
    let new = match args.dry_run {
        true => 0,
        false => write(&folder, &rescored, &args.source)?,
    };
    show(&rescored, new, args.json);
    Ok(())
}

/// Adds the scores to the store; how many it took.
///
/// Scores that the store refuses are not counted.
///
/// # Errors
/// If a process holds the store, or it cannot be written.
fn write(folder: &Path, rescored: &[Rescored], source: &str) -> Result<usize, Failure> {
    let store = sinew_wire::disk_store(folder, false).map_err(Failure::input)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_us = now.map_or(0, |d| d.as_micros() as u64);
    let records = rescored.iter().flat_map(|r| r.records(source, now_us));
    let records: Vec<_> = records.collect();
    let mut new = 0;
    for chunk in records.chunks(10_000) {
        let put = store.put_scores(chunk).map_err(Failure::system)?;
        new += put.iter().filter(|p| p.is_ok()).count();
    }
    Ok(new)
}

/// Prints the change of each component, then the whole.
fn show(rescored: &[Rescored], new: usize, json: bool) {
    let shown = |mean: Option<f64>| mean.map_or_else(|| "-".into(), |m| format!("{m:.4}"));
    for c in changes(rescored) {
        match json {
            true => print_json(&json!(c)),
            false => print(&format!(
                "{:<24} old {:>9} of {:>5}   new {:>9} of {:>5}   changed {}\n",
                c.component,
                shown(c.old_mean),
                c.old_episodes,
                shown(c.new_mean),
                c.new_episodes,
                c.changed
            )),
        }
    }
    let unscored: Vec<&str> = rescored
        .iter()
        .filter_map(|r| r.unscored.as_deref())
        .collect();
    let (episodes, count, first) = (rescored.len(), unscored.len(), unscored.first());
    match json {
        true => print_json(&json!({
            "episodes": episodes, "unscored": count, "first": first, "scores": new,
        })),
        false => print(&format!(
            "{episodes} episodes, {count} unscored{}, {new} scores written\n",
            first.map_or_else(String::new, |why| format!(" ({why})"))
        )),
    }
}

/// The stored episodes of a purpose.
///
/// All of them are read, page by page, since rewards are compared over the whole purpose.
///
/// # Errors
/// If the store cannot be read.
fn stored(reader: &StoreReader, purpose: &str) -> Result<Vec<sinew_types::Trace>, Failure> {
    let mut filter = Filter {
        purpose: Some(purpose.to_owned()),
        limit: MAX_PAGE,
        ..Filter::default()
    };
    let mut traces = Vec::new();
    loop {
        let page = reader.list(&filter).map_err(Failure::system)?;
        for episode in &page.episodes {
            traces.extend(reader.get(&episode.episode).map_err(Failure::system)?);
        }
        match page.next {
            Some(next) => filter.after = Some(next),
            None => return Ok(traces),
        }
    }
}
