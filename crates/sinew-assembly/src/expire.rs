//! Decides which stored episodes of a folder may be removed: by rules of a person, and by the needs of runs
//! and collections.

use crate::collection::ScoredGroups;
use crate::env::{self, Tasks};
use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use crate::store::run_store;
use sinew_orchestrator::CommittedEpisodes;
use sinew_recipe::{Recipe, RunPlan};
use sinew_runs::{RunDirError, in_use};
use sinew_store::{
    EpisodeSummary, Filter, GcReport, MAX_PAGE, Sweep, SweepReport, TraceStore, summaries,
};
use sinew_types::EpisodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Rules for episodes that are of no use any more. An episode that any of them names is removed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expiry {
    /// Episodes that ended before this time, in seconds since 1970.
    pub ended_before: Option<f64>,
    /// Episodes that were sampled only by policy versions below this one.
    pub below_version: Option<u64>,
    /// Episodes of an environment that has another version now, by name; see [`versions`].
    pub env_changed: Option<BTreeMap<String, String>>,
}

impl Expiry {
    /// A filter for each rule.
    fn filters(&self) -> Vec<Filter> {
        let empty = Filter {
            limit: MAX_PAGE,
            ..Filter::default()
        };
        let mut filters = Vec::new();
        if self.ended_before.is_some() {
            filters.push(Filter {
                ended_before: self.ended_before,
                ..empty.clone()
            });
        }
        if self.below_version.is_some() {
            filters.push(Filter {
                below_version: self.below_version,
                ..empty.clone()
            });
        }
        if self.env_changed.is_some() {
            filters.push(Filter {
                env_changed: self.env_changed.clone(),
                ..empty
            });
        }
        filters
    }
}

/// Episodes that were removed, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovedEpisodes {
    /// The step of the run that the oldest checkpoint holds; `None` for a collection.
    pub through_step: Option<u64>,
    /// Traces and freed bytes; without bytes where nothing was removed yet.
    pub report: GcReport,
    /// Episodes that a rule names and that are still needed.
    pub needed: u64,
    /// Objects of a store in a database that no episode refers to.
    pub objects: SweepReport,
}

/// Removes episodes of a folder of `sinew train` or `sinew collect`: those that `expiry` names and that
/// nothing needs any more. If there is no rule, it removes those that a run trained. Then it deletes the
/// objects that no episode refers to and that were written before `objects_before`, in seconds since 1970.
/// With `dry_run` it only counts.
///
/// # Errors
/// If a process holds the run, the run has no checkpoint, or a collection was given no rule.
pub fn expire(
    run_dir: &Path,
    expiry: &Expiry,
    objects_before: f64,
    dry_run: bool,
    accept_loss: bool,
) -> Result<RemovedEpisodes, Failure> {
    let recipe = crate::environments::recipe_of(run_dir)?;
    if in_use(run_dir) {
        let path = run_dir.to_owned();
        return Err(RunDirError::Locked { path }.into());
    }
    let collected = sinew_runs::is_collection(run_dir, &recipe);
    if collected && *expiry == Expiry::default() {
        return Err(Failure::input(format!(
            "{} is a collection, of which no step trained anything\n  hint: say which episodes go: --older-than 7d, \
             --below-version N or --env-changed RECIPE",
            run_dir.display()
        )));
    }
    let through = if collected {
        None
    } else {
        Some(oldest_step(&run_dir.join("checkpoints"))?)
    };
    let store = run_store(run_dir, accept_loss)?;
    let store = store.as_ref();
    let (doomed, needed) = match through {
        Some(step) => {
            let decided = CommittedEpisodes::through(store, step)?;
            chosen(store, expiry, |e| decided.is_done_with(e), step)?
        }
        None => {
            let size = recipe.data.is_none().then_some(recipe.rollout.group_size);
            let whole = ScoredGroups::groups(store, size.unwrap_or(1))?;
            chosen(store, expiry, |e| whole.is_done_with(e), 0)?
        }
    };
    let report = if dry_run {
        GcReport {
            episodes: doomed.len() as u64,
            bytes: 0,
        }
    } else {
        store.remove(&doomed).map_err(Failure::system)?
    };
    let sweep = Sweep {
        before_unix_s: objects_before,
        gone: if dry_run { &doomed } else { &[] },
        dry_run,
    };
    Ok(RemovedEpisodes {
        through_step: through,
        report,
        needed,
        objects: store.sweep(&sweep).map_err(Failure::system)?,
    })
}

/// The episodes that may go, and how many are still needed of those that a rule names.
fn chosen(
    store: &dyn TraceStore,
    expiry: &Expiry,
    is_done_with: impl Fn(&EpisodeSummary) -> bool,
    step: u64,
) -> Result<(Vec<EpisodeId>, u64), Failure> {
    let mut filters = expiry.filters();
    if filters.is_empty() {
        filters.push(Filter {
            updates: Some(0..=step),
            limit: MAX_PAGE,
            ..Filter::default()
        });
    }
    let (mut doomed, mut needed) = (BTreeSet::new(), BTreeSet::new());
    for e in filters.into_iter().flat_map(|f| summaries(store, f)) {
        let e = e.map_err(Failure::system)?;
        if is_done_with(&e) {
            doomed.insert(e.episode)
        } else {
            needed.insert(e.episode)
        };
    }
    Ok((doomed.into_iter().collect(), needed.len() as u64))
}

/// The step of the run that the oldest checkpoint holds: no resume goes back further.
///
/// # Errors
/// If there is no checkpoint: every episode may still be needed.
fn oldest_step(checkpoints: &Path) -> Result<u64, Failure> {
    let named = |e: &dyn std::fmt::Display| {
        Failure::input(format!(
            "{}: {e}; every episode is still needed to resume",
            checkpoints.display()
        ))
    };
    let mut oldest: Option<u64> = None;
    for entry in checkpoints.read_dir().map_err(|e| named(&e))? {
        let state = entry.map_err(|e| named(&e))?.path().join("state.json");
        if !state.is_file() {
            continue;
        }
        let text = std::fs::read_to_string(&state).map_err(|e| named(&e))?;
        let saved: serde_json::Value = serde_json::from_str(&text).map_err(|e| named(&e))?;
        let step = saved["commit"]["cursor"]["step"].as_u64();
        let step = step.ok_or_else(|| named(&format!("{} has no step", state.display())))?;
        oldest = Some(oldest.map_or(step, |other| other.min(step)));
    }
    oldest.ok_or_else(|| named(&"there is no checkpoint"))
}

/// The versions that the environments of a recipe have now, by name.
///
/// # Errors
/// If the recipe is refused, or an environment cannot be loaded.
pub fn versions(recipe: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let recipe = Recipe::load(recipe, ENVIRONMENTS).map_err(Failure::input)?;
    let mut versions = BTreeMap::new();
    match recipe {
        Recipe::Run(plan) => add_versions(&plan, &mut versions)?,
        Recipe::Chain(chain) => {
            for stage in &chain.stages {
                add_versions(&stage.plan, &mut versions)?;
            }
        }
    }
    Ok(versions)
}

fn add_versions(plan: &RunPlan, to: &mut BTreeMap<String, String>) -> Result<(), Failure> {
    let tasks: Tasks = env::tasks(plan)?;
    let envs = env::world(plan, &tasks)?.envs;
    let members = envs.members();
    if members.is_empty() {
        to.insert(envs.name().to_owned(), envs.version().to_owned());
    }
    to.extend(members.into_iter().map(|(name, c)| (name, c.version)));
    Ok(())
}
