//! `sinew rescore`: scores the stored episodes of a run by the present rewards.

use crate::output::{print, print_json};
use clap::Args;
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::{Failure, OwnReward};
use sinew_recipe::{RewardSection, RewardTable, RewardTerm, RunPlan};
use sinew_rollout::{ScoreChanges, rescore, tasks_of};
use sinew_store::{Filter, MAX_PAGE, ScoreRecord, StoreReader, TraceStore};
use sinew_types::{EpisodeId, Task, TaskId};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
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

/// Traces that are in memory at a time.
const PAGE: usize = 64;

/// Scores every stored episode of a purpose by the reward of its environment, prints old and new means, and
/// adds the scores to the store. Trained episodes do not change.
///
/// # Errors
/// If there is no reward, a task is not in the recipe's taskset any more, or a process holds the store.
pub(crate) fn run(args: &RescoreArgs) -> Result<(), Failure> {
    let run = sinew_assembly::recipe_of(&args.run_dir)?;
    let recipe = match &args.recipe {
        Some(path) => RunPlan::load(path, ENVIRONMENTS).map_err(Failure::input)?,
        None => run.clone(),
    };
    let named = args.reward.iter();
    let named = named.map(|r| (r.clone(), RewardTerm::Weight(1.0)));
    let instead = (!args.reward.is_empty()).then(|| {
        RewardSection::Several(RewardTable {
            workers: None,
            python: None,
            terms: named.collect(),
        })
    });
    let members =
        sinew_assembly::own_rewards(&recipe, &sinew_assembly::tasks(&recipe)?, instead.as_ref())?;
    if members.iter().all(|m| m.reward.is_none()) {
        let hint = "the recipe has no reward of its own\n  hint: --reward \"exact(answer)\"";
        return Err(Failure::input(hint));
    }
    let reader = sinew_assembly::run_reader(&args.run_dir)?;
    let tasks = tasks(&reader, &args.purpose, &members)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    let renderer = sinew_assembly::renderer_of(&args.run_dir, &run)?;
    let store = if args.dry_run {
        None
    } else {
        Some(sinew_assembly::run_store(&args.run_dir, false)?)
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_us = now.map_or(0, |d| d.as_micros() as u64);
    let (mut changes, mut new, mut own) = (ScoreChanges::default(), 0, 0);
    pages(&reader, &args.purpose, PAGE, |page| {
        let mut episodes = Vec::new();
        for (episode, task) in page {
            let Some((member, task)) = tasks.get(&task) else {
                own += 1;
                continue;
            };
            let trace = reader.get(&episode).map_err(Failure::system)?;
            let reward = members[*member].reward.as_deref();
            episodes.extend(trace.zip(reward).map(|(t, r)| (t, task.clone(), r)));
        }
        let rescored = runtime.block_on(rescore(renderer.as_ref(), episodes));
        rescored.iter().for_each(|r| changes.add(r));
        let records = rescored
            .iter()
            .flat_map(|r| r.records(&args.source, now_us));
        if let Some(store) = &store {
            new += write(store.as_ref(), &records.collect::<Vec<_>>())?;
        }
        Ok(())
    })?;
    show(&changes, own, new, args.json);
    Ok(())
}

/// The tasks of the stored episodes of a purpose with the place of their environment in `members`, without
/// those of environments that have no reward.
///
/// # Errors
/// If the store cannot be read, or a task is not in the recipe's tasks.
fn tasks(
    reader: &StoreReader,
    purpose: &str,
    members: &[OwnReward],
) -> Result<HashMap<TaskId, (usize, Task)>, Failure> {
    let unknown = |task| Failure::input(format!("task {task} is not in the recipe's tasks"));
    let mut wanted: Vec<BTreeMap<TaskId, TaskId>> = vec![BTreeMap::new(); members.len()];
    pages(reader, purpose, MAX_PAGE, |page| {
        for (_, task) in page {
            let mut ids = members.iter().map(|m| m.own_id(&task)).enumerate();
            let found = ids.find_map(|(at, id)| Some((at, id?)));
            let (at, id) = found.ok_or_else(|| unknown(task.clone()))?;
            wanted[at].insert(id, task);
        }
        Ok(())
    })?;
    let mut all = HashMap::new();
    for (at, (member, wanted)) in members.iter().zip(wanted).enumerate() {
        if member.reward.is_none() {
            continue;
        }
        let ids = wanted.keys().cloned().collect();
        let mut found = tasks_of(member.tasks.as_ref(), &ids).map_err(Failure::input)?;
        for (id, task) in wanted {
            let own = found.remove(&id);
            let own = own.ok_or_else(|| unknown(task.clone()))?;
            all.insert(task, (at, own));
        }
    }
    Ok(all)
}

/// Gives `to` the stored episodes of a purpose with their tasks, at most `limit` at a time.
///
/// # Errors
/// If the store cannot be read, or those of `to`.
fn pages(
    reader: &StoreReader,
    purpose: &str,
    limit: usize,
    mut to: impl FnMut(Vec<(EpisodeId, TaskId)>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut filter = Filter {
        purpose: Some(purpose.to_owned()),
        limit,
        ..Filter::default()
    };
    loop {
        let page = reader.list(&filter).map_err(Failure::system)?;
        let episodes = page.episodes.into_iter();
        to(episodes.map(|e| (e.episode, e.task)).collect())?;
        match page.next {
            Some(next) => filter.after = Some(next),
            None => return Ok(()),
        }
    }
}

/// Adds scores to the store; how many it took. Those that it refuses are not counted.
///
/// # Errors
/// If the store cannot be written.
fn write(store: &dyn TraceStore, records: &[ScoreRecord]) -> Result<usize, Failure> {
    let mut new = 0;
    for chunk in records.chunks(10_000) {
        let put = store.put_scores(chunk).map_err(Failure::system)?;
        new += put.iter().filter(|p| p.is_ok()).count();
    }
    Ok(new)
}

/// Prints the change of each component, then the whole: with episodes that only their environment can score,
/// and scores that were written.
fn show(changes: &ScoreChanges, own: usize, new: usize, json: bool) {
    let shown = |mean: Option<f64>| mean.map_or_else(|| "-".into(), |m| format!("{m:.4}"));
    for c in changes.components() {
        if json {
            print_json(&json!(c))
        } else {
            print(&format!(
                "{:<24} old {:>9} of {:>5}   new {:>9} of {:>5}   changed {}\n",
                c.component,
                shown(c.old_mean),
                c.old_episodes,
                shown(c.new_mean),
                c.new_episodes,
                c.changed
            ))
        }
    }
    let (episodes, count, first) = (changes.episodes, changes.unscored, &changes.first);
    if json {
        print_json(&json!({
            "episodes": episodes, "unscored": count, "first": first, "scores": new, "without_reward": own,
        }))
    } else {
        print(&format!(
            "{episodes} episodes, {count} unscored{}, {new} scores written{}\n",
            first
                .as_ref()
                .map_or_else(String::new, |why| format!(" ({why})")),
            match own {
                0 => String::new(),
                own => format!(
                    "; {own} of environments without a reward in the recipe left as they are"
                ),
            }
        ))
    }
}
