//! Ended episodes as the loop gets them, whoever ran them: scores of their groups, marks of those that other
//! versions of the system's parts ran, and new scores by a changed reward.

use crate::ports::StoredEpisode;
use sinew_env::EnvFactory;
use sinew_orchestrator::{PipelineError, completed};
use sinew_render::Renderer;
use sinew_rollout::{EpisodeSpec, FinishedEpisode, REWARD, RunInfo, outcomes_of};
use sinew_store::TraceStore;
use sinew_types::{EpisodeEnd, EpisodeId, Task};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// Treatment of stored episodes that wait for training when an environment, a tool or a reward has another
/// version than when they ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangedParts {
    /// They are run again.
    RunAgain,
    /// A changed reward scores them again; otherwise they are run again.
    Rescore,
    /// They are trained as they are.
    Keep,
}

/// Parts that judge stored episodes.
#[derive(Clone)]
pub struct StoredParts {
    /// Has the scores of groups that an earlier session scored.
    pub store: Arc<dyn TraceStore>,
    /// Have the rewards of now.
    pub envs: Arc<dyn EnvFactory>,
    /// Tokenizer and chat template of the run.
    pub renderer: Arc<dyn Renderer>,
    /// Versions of the system's parts.
    pub run: Arc<RunInfo>,
    /// Time for a new score.
    pub score_timeout: Duration,
    /// Treatment of episodes that other versions ran.
    pub changed: ChangedParts,
}

sinew_types::debug_fields!(
    StoredParts as this,
    env = this.envs.name(),
    changed = this.changed
);

/// Makes what the loop gets of episodes that ended.
#[derive(Debug)]
pub struct StoredEpisodes {
    parts: StoredParts,
    /// Tasks of stored episodes, if these may be scored again.
    known: HashMap<EpisodeId, Task>,
}

impl StoredEpisodes {
    /// Starts without episodes.
    pub fn new(parts: StoredParts) -> Self {
        Self {
            parts,
            known: HashMap::new(),
        }
    }

    /// The store of the run.
    pub fn store(&self) -> &Arc<dyn TraceStore> {
        &self.parts.store
    }

    /// Keeps the tasks of training episodes that the store has, since a changed reward scores these again.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn begin(&mut self, specs: &[EpisodeSpec]) -> Result<(), PipelineError> {
        if self.parts.changed != ChangedParts::Rescore {
            return Ok(());
        }
        for spec in specs {
            let stored = self.parts.store.get(&spec.episode);
            if stored.map_err(PipelineError::system)?.is_some() {
                self.known.insert(spec.episode.clone(), spec.task.clone());
            }
        }
        Ok(())
    }

    /// Returns durable episodes as the loop gets them. New scores are made on `runtime`, while this thread
    /// waits.
    ///
    /// # Errors
    /// If scores cannot be read.
    pub fn ended(
        &mut self,
        runtime: &Handle,
        finished: Vec<FinishedEpisode>,
    ) -> Result<Vec<StoredEpisode>, PipelineError> {
        let parts = &self.parts;
        let stored = finished.into_iter().map(|f| {
            let judged =
                f.known && parts.changed != ChangedParts::Keep && f.trace.origin.purpose == "train";
            let changed = judged.then(|| parts.run.changed_since(&f.trace));
            Ok(StoredEpisode {
                trace: completed(parts.store.as_ref(), f.trace)?,
                known: f.known,
                changed: changed.flatten(),
                rescored: false,
            })
        });
        let mut stored: Vec<StoredEpisode> = stored.collect::<Result<_, PipelineError>>()?;
        self.rescore(runtime, &mut stored);
        Ok(stored)
    }

    /// Scores episodes again for which only a reward has changed, several at a time. Episodes whose score
    /// depends on a running environment or on their group stay marked as changed.
    fn rescore(&mut self, runtime: &Handle, episodes: &mut [StoredEpisode]) {
        let envs = &self.parts.envs;
        let (mut places, mut open) = (Vec::new(), Vec::new());
        for (place, episode) in episodes.iter().enumerate() {
            let Some(task) = self.known.remove(&episode.trace.episode) else {
                continue;
            };
            let of_reward = |what: &String| what.starts_with(REWARD);
            let whole = !matches!(episode.trace.end, EpisodeEnd::Failed { .. });
            let alone = whole && envs.group_reward(&task).is_none();
            if let (true, Some(reward)) = (alone, envs.reward(&task))
                && episode.changed.as_ref().is_some_and(of_reward)
            {
                places.push(place);
                open.push((&episode.trace, task, reward));
            }
        }
        let renderer = self.parts.renderer.as_ref();
        let scored = outcomes_of(open, renderer, self.parts.score_timeout);
        let outcomes = runtime.block_on(scored);
        for (place, outcome) in places.into_iter().zip(outcomes) {
            episodes[place].trace.outcome = outcome;
            episodes[place].changed = None;
            episodes[place].rescored = true;
        }
    }
}
