//! Queues of episodes, and scorers of their rows that work apart from the run that made them.

use crate::env::{OwnReward, Tasks, own_rewards};
use crate::failure::Failure;
use crate::model::renderer;
use crate::token::{first_line, refuse_password, token_of};
use sinew_gateway::{ApiError, RolloutHooks, RolloutSpec, refuse_adapter};
use sinew_queue::{Feed, Place, Score, ScoreError, open};
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_rollout::{outcomes, tasks_of};
use sinew_store::queue::{Queue, QueueLimits};
use sinew_store::{StoreError, TraceStore};
use sinew_types::{Outcome, Task, TaskId, Trace};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Maximum wait for a server that does not answer: a restart takes seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// A queue by an address with the file of its token or password, or by a folder.
///
/// # Errors
/// If the file cannot be read, is missing for an address, or the address contains a password.
pub fn place(queue: &str, name: &str, token_file: Option<&Path>) -> Result<Place, Failure> {
    let mut place = Place {
        queue: queue.to_owned(),
        name: name.to_owned(),
        token: None,
        patience: PATIENCE,
        limits: QueueLimits::default(),
    };
    if place.is_database() {
        refuse_password("the queue's address", queue)?;
        place.token = token_file
            .map(|path| first_line("token file", path))
            .transpose()?;
        return Ok(place);
    }
    place.token = token_file
        .map(|path| token_of("token file", path))
        .transpose()?;
    match (place.is_remote(), &place.token) {
        (true, None) => Err(Failure::input(format!(
            "queue {queue:?}: a server needs its token\n  hint: the file that `sinew queue serve` got as --token-file"
        ))),
        (false, Some(_)) => Err(Failure::input(format!(
            "queue {queue:?}: a folder has no token: leave the file out\n  hint: addresses begin with http://"
        ))),
        _ => Ok(place),
    }
}

/// Opens a queue.
///
/// # Errors
/// Fails with the code of the fault: a server that is not there, a folder that is in use, a damaged file.
pub fn open_queue(place: &Place) -> Result<Arc<dyn Queue>, Failure> {
    open(place).map_err(|e| match e {
        StoreError::Locked { .. } => Failure::input(format!(
            "{e}\n  hint: one process uses the folder of a queue; with several, start `sinew queue serve` and name its \
             address"
        )),
        StoreError::Remote { .. } | StoreError::Server { .. } => Failure::outside(e),
        other => Failure::input(other),
    })
}

/// A queue that episodes are put into.
#[derive(Clone, Debug)]
pub struct FeedPlan {
    pub place: Place,
    /// Name of the producer, in which its keys are unique.
    pub source: String,
    /// The rewards of the recipe are left to a scorer.
    pub apart: bool,
}

impl FeedPlan {
    /// The producer. `name` is taken where the command line has no source.
    ///
    /// # Errors
    /// If the queue cannot be opened or read.
    pub fn feed(&self) -> Result<Feed, Failure> {
        let queue = open_queue(&self.place)?;
        Feed::new(queue, &self.source, self.apart)
            .map_err(|e| Failure::outside(format!("--queue: {e}")))
    }
}

/// Finished rollouts of a gateway as rows of a queue.
pub struct QueuedRollouts {
    feed: Mutex<Feed>,
    /// Rollouts that make a group whole.
    group_size: u32,
}

impl QueuedRollouts {
    /// Puts the stored rollouts that the queue lacks, then rollouts as they finish. Also returns how many
    /// were missing.
    ///
    /// # Errors
    /// If the queue or the store cannot be read.
    pub fn new(
        plan: &FeedPlan,
        group_size: u32,
        store: &dyn TraceStore,
    ) -> Result<(Self, usize), Failure> {
        let mut feed = plan.feed()?;
        let missing = feed.restore(store, group_size, &|| false);
        let missing = missing.map_err(|e| Failure::system(format!("--queue: {e}")))?;
        let feed = Mutex::new(feed);
        Ok((Self { feed, group_size }, missing))
    }
}

sinew_types::debug_fields!(QueuedRollouts, group_size);

impl RolloutHooks for QueuedRollouts {
    fn opening(&self, spec: &mut RolloutSpec) -> Result<(), ApiError> {
        refuse_adapter(spec)
    }

    /// Finishing is answered once the queue has it. One that it does not take stays in the store, and is put
    /// when the server starts again.
    fn finished(&self, trace: &Trace) {
        let put = tokio::task::block_in_place(|| {
            let mut feed = self.feed.lock().unwrap_or_else(|e| e.into_inner());
            feed.put_one(trace, self.group_size, &|| false)
        });
        if let Err(error) = put {
            tracing::error!(rollout = %trace.episode, %error, "the queue did not take a finished rollout");
        }
    }
}

/// Scores episodes by the rewards of a recipe.
pub struct RecipeScore {
    runtime: Runtime,
    renderer: Arc<dyn Renderer>,
    members: Vec<OwnReward>,
    /// Tasks that were met, with the place of their reward; `None`: the recipe has no such task.
    tasks: Mutex<HashMap<TaskId, Option<(usize, Task)>>>,
}

sinew_types::debug_fields!(RecipeScore, members);

/// Rewards that score episodes of a recipe in a separate process.
///
/// # Errors
/// If the recipe has no reward that works apart from its environment, or one cannot be made.
pub fn recipe_score(recipe: &RunPlan, tasks: &Tasks) -> Result<RecipeScore, Failure> {
    let members = own_rewards(recipe, tasks, None)?;
    if members.iter().all(|m| m.reward.is_none()) {
        return Err(Failure::input(
            "the recipe has no reward of its own: only its environment can score an episode\n  hint: add [reward]",
        ));
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    Ok(RecipeScore {
        runtime,
        renderer: renderer(&recipe.model, &recipe.env)?,
        members,
        tasks: Mutex::default(),
    })
}

impl RecipeScore {
    /// The tasks of some episodes, each with the place of its reward.
    fn find(&self, wanted: &BTreeSet<TaskId>) -> HashMap<TaskId, Option<(usize, Task)>> {
        let mut known = self.tasks.lock().unwrap_or_else(|e| e.into_inner());
        let mut missing: Vec<BTreeSet<TaskId>> = vec![BTreeSet::new(); self.members.len()];
        for task in wanted.iter().filter(|task| !known.contains_key(*task)) {
            for (place, member) in self.members.iter().enumerate() {
                missing[place].extend(member.own_id(task).filter(|_| member.reward.is_some()));
            }
        }
        for (place, (member, ids)) in self.members.iter().zip(missing).enumerate() {
            // A task that cannot be made is one that the recipe does not have.
            let found = tasks_of(member.tasks.as_ref(), &ids).unwrap_or_default();
            for task in wanted {
                let made = member.own_id(task).and_then(|id| found.get(&id));
                if let Some(made) = made {
                    known.insert(task.clone(), Some((place, made.clone())));
                }
            }
        }
        let of = |task: &TaskId| (task.clone(), known.entry(task.clone()).or_default().clone());
        wanted.iter().map(of).collect()
    }
}

impl Score for RecipeScore {
    fn score(&self, episodes: Vec<Trace>) -> Vec<Result<Outcome, ScoreError>> {
        let wanted = episodes.iter().map(|t| t.task.clone()).collect();
        let tasks = self.find(&wanted);
        let mut results: Vec<Result<Outcome, ScoreError>> = Vec::with_capacity(episodes.len());
        let (mut known, mut places) = (Vec::new(), Vec::new());
        for trace in episodes {
            let found = tasks.get(&trace.task).cloned().flatten();
            let reward = found.and_then(|(place, task)| {
                let reward = self.members[place].reward.as_deref()?;
                Some((task, reward))
            });
            match reward {
                Some((task, reward)) => {
                    places.push(results.len());
                    known.push((trace, task, reward));
                    results.push(Err(ScoreError::Unscored(String::new())));
                }
                None => results.push(Err(ScoreError::OtherTask(trace.task))),
            }
        }
        let scored = outcomes(self.renderer.as_ref(), known);
        for (place, outcome) in places.into_iter().zip(self.runtime.block_on(scored)) {
            results[place] = outcome.map_err(|e| ScoreError::Unscored(e.reason));
        }
        results
    }
}
