//! Finds the stored episodes that a run no longer needs: no resume and no repeated update will read them.
//!
//! A resumed run starts from a checkpoint and repeats the later updates from their commits and the stored
//! episodes. An episode is therefore no longer needed once every kept checkpoint includes a commit that
//! trained it, left it out, or decided its draw. Held-out episodes are always needed: later measurements are
//! compared with them.

use crate::error::PipelineError;
use crate::schedule::draw_of;
use sinew_store::{EpisodeSummary, TraceStore};
use sinew_types::EpisodeId;
use std::collections::HashSet;

/// Purpose of episodes that may be trained.
const TRAIN: &str = "train";

/// Episodes and draws that the commits up to an update decided.
#[derive(Clone, Debug, Default)]
pub struct CommittedEpisodes {
    through: u64,
    /// Episodes that were trained or left out.
    named: HashSet<EpisodeId>,
    /// Draws of these episodes.
    draws: HashSet<u64>,
}

impl CommittedEpisodes {
    /// Reads the decisions of the updates up to `through`, the last one of the oldest kept checkpoint.
    ///
    /// # Errors
    /// Fails if the store does.
    pub fn through(store: &dyn TraceStore, through: u64) -> Result<Self, PipelineError> {
        let mut decided = Self {
            through,
            ..Self::default()
        };
        let batches = store.trained_batches().map_err(PipelineError::system)?;
        for batch in batches.into_iter().filter(|b| b.step <= through) {
            let named = batch.episodes.into_iter().chain(batch.dropped.into_keys());
            for episode in named {
                decided.draws.extend(draw_of(&episode));
                decided.named.insert(episode);
            }
        }
        Ok(decided)
    }

    /// Whether a run no longer needs an episode. A failed attempt that was run again follows its draw.
    pub fn is_done_with(&self, e: &EpisodeSummary) -> bool {
        let later = e.update.is_some_and(|update| update > self.through);
        let draw = || draw_of(&e.episode).is_some_and(|draw| self.draws.contains(&draw));
        !later && (self.named.contains(&e.episode) || (e.purpose == TRAIN && draw()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_rollout::{EpisodeSpec, RunInfo};
    use sinew_store::{Filter, MemoryStore, TrainedBatch};
    use sinew_types::{GroupId, SamplingParams, Task, TaskId, Trace};

    fn trace(episode: &str, purpose: &str) -> Trace {
        let spec = EpisodeSpec {
            episode: EpisodeId::new(episode),
            group: GroupId::new("g"),
            task: Task {
                id: TaskId::new("t"),
                ..Task::default()
            },
            draw: 0,
            purpose: purpose.into(),
            seed: 0,
        };
        spec.empty_trace(&RunInfo::default(), &SamplingParams::default())
    }

    #[test]
    fn a_run_is_done_with_what_every_checkpoint_decided() {
        let store = MemoryStore::new(1 << 20);
        let id = EpisodeId::new;
        let all = [
            ("d00000000-e0", "train"),
            ("d00000000-e1", "train"),
            ("d00000000-e2", "train"),
            ("d00000000-e2-r1", "train"),
            ("d00000001-e0", "train"),
            ("d00000002-e0", "train"),
            ("h0-d00000000-e0", "eval-before"),
            ("ticket-7", "train"),
        ];
        for (episode, purpose) in all {
            store.commit(&trace(episode, purpose)).unwrap();
        }
        let mut first = TrainedBatch::new("s1", 1, &[id("d00000000-e0")]);
        first.dropped.insert(id("d00000000-e1"), "equal".into());
        store.commit_update(&first, false).unwrap();
        let second = TrainedBatch::new("s2", 2, &[id("d00000001-e0")]);
        store.commit_update(&second, false).unwrap();
        let done = |through| -> Vec<String> {
            let decided = CommittedEpisodes::through(&store, through).unwrap();
            let page = store.list(&Filter::default()).unwrap().episodes;
            let done = page.iter().filter(|e| decided.is_done_with(e));
            done.map(|e| e.episode.0.clone()).collect()
        };
        assert!(done(0).is_empty());
        let draw_0 = [
            "d00000000-e0",
            "d00000000-e1",
            "d00000000-e2",
            "d00000000-e2-r1",
        ];
        assert_eq!(done(1), draw_0);
        assert_eq!(done(2), [&draw_0[..], &["d00000001-e0"]].concat());
    }
}
