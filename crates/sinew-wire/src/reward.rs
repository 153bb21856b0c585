//! The rewards of a recipe.

use crate::failure::Failure;
use crate::judge;
use sinew_env::{Reward, Sandboxes, Split, Taskset};
use sinew_judge::Bench;
use sinew_levels::{sandbox_spec, sandboxes};
use sinew_recipe::{RewardSection, RunPlan, SandboxPlan};
use sinew_reward::{BuildConfig, Made, Rewards};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The rewards of a recipe, of samples and of groups.
///
/// # Errors
/// If a reward cannot be made: its name, its columns and its code are the user's.
pub(crate) fn rewards(
    recipe: &RunPlan,
    section: &RewardSection,
    tasks: &dyn Taskset,
    bench: &Bench,
) -> Result<Rewards, Failure> {
    let mut made = BTreeMap::new();
    for term in section.terms() {
        let outside: Arc<dyn Reward> = if let Some(judge) = term.name.strip_prefix("judge.") {
            judge::judge(recipe, judge, tasks, bench)?
        } else if let Some(server) = section.server(term.name) {
            judge::server(&server)?
        } else if let Some(source) = RewardSection::model(term.name) {
            judge::reward_model(source)?
        } else {
            continue;
        };
        made.insert(term.name.to_owned(), Made::Single(outside));
    }
    let splits = [Split::Train, Split::HeldOut].map(|split| judge::columns(tasks, split));
    let config = BuildConfig {
        columns: splits.into_iter().collect::<Result<_, _>>()?,
        made,
        sandboxes: match section.has_code() {
            true => Some(sandboxed(&recipe.sandbox)?),
            false => None,
        },
        spec: sandbox_spec(&recipe.sandbox)?,
        workers: section.workers(),
        score_timeout: Duration::from_secs_f64(recipe.rollout.score_timeout_s),
        folder: Path::new("."),
        search_path: &std::env::var("PATH").unwrap_or_default(),
    };
    sinew_reward::build(&section.terms(), &config).map_err(Failure::input)
}

/// Started sandboxes with the limits of a recipe.
pub(crate) fn sandboxed(section: &SandboxPlan) -> Result<Sandboxes, Failure> {
    Ok(Sandboxes {
        provider: sandboxes(section)?,
        spec: sandbox_spec(section)?,
    })
}
