//! Persistent state of a run: its commits in the store, and a state of fixed size in each checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_orchestrator::{
    CoreState, Curriculum, EvalRecord, OpenDraws, PipelineError, SampleCounts, StepRecord,
    UpdateCommit, attempt_id, completed, draw_of,
};
use sinew_store::{Filter, StoreError, TraceStore, TrainedBatch, summaries};
use sinew_types::{EpisodeId, Fence, Outcome, PolicyVersion, Trace};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Content of a checkpoint other than weights and optimizer. Nothing of it grows with the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedState {
    pub step: u64,
    pub wall_s: f64,
    pub curriculum: Curriculum,
    /// The recipe that trained it, as TOML.
    pub recipe: String,
    /// Counts over the steps so far. Episodes that were found to be lost are counted once.
    pub samples: SampleCounts,
    /// Trained episodes whose commits the store was found to have lost.
    missing: usize,
}

/// Content of a commit other than the episodes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct CommitDetail {
    version: PolicyVersion,
    curriculum: Curriculum,
    record: StepRecord,
    /// Measurements since the commit before.
    evals: Vec<EvalRecord>,
    /// Episodes that rows were made of, in their order: what an update is done again from.
    order: Vec<EpisodeId>,
    /// Outcomes of episodes that follow from later scores: newer scores do not change what was trained.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    outcomes: BTreeMap<EpisodeId, Outcome>,
    /// Rows that the update consumes, in the words of the source of the episodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    consumed: Option<Value>,
}

/// Inputs of an update other than those that the core names.
#[derive(Clone, Debug, Default)]
pub(crate) struct UpdateInputs {
    /// Episodes in the order of the groups.
    pub(crate) order: Vec<EpisodeId>,
    pub(crate) outcomes: BTreeMap<EpisodeId, Outcome>,
    pub(crate) record: StepRecord,
    /// Value of [`SampleSource::consumes`](crate::SampleSource::consumes).
    pub(crate) consumed: Option<Value>,
}

/// Store of a run's episodes and commits.
#[derive(Clone, Debug)]
pub struct RunStore {
    pub traces: Arc<dyn TraceStore>,
    /// Fence of this process, from [`sinew_store::own`]; the default where nothing is trained.
    pub fence: Fence,
    /// Trained episodes that were lost before it was opened: known, and not to be read.
    pub torn: BTreeSet<EpisodeId>,
    /// True if its content ends with the session.
    pub forgets: bool,
    /// Draws that belong to one training step.
    pub draws_per_step: u64,
}

/// Results of earlier sessions, from store and checkpoint.
#[derive(Debug, Default)]
pub struct EarlierSessions {
    pub records: Vec<StepRecord>,
    pub evals: Vec<EvalRecord>,
    /// Episodes of updates that no checkpoint holds, in their order.
    pub(crate) committed: BTreeMap<u64, TrainedBatch>,
    /// Number of trained episodes that this session found missing, and one of them.
    pub lost: usize,
    pub first_lost: Option<EpisodeId>,
}

fn batch_name(step: u64) -> String {
    format!("s{step:05}")
}

/// Unsettled draws of a run whose generation and training overlap.
struct UnsettledDraws {
    /// Stored training episodes of draws that no commit names.
    episodes: BTreeSet<EpisodeId>,
    /// Draws that a commit names.
    settled: BTreeSet<u64>,
    /// Number larger than all of them.
    next: u64,
}

fn detail_of(batch: &TrainedBatch) -> Option<CommitDetail> {
    serde_json::from_value(batch.detail.clone()).ok()
}

impl SavedState {
    /// Builds the content of a checkpoint taken now.
    pub(crate) fn now(
        &self,
        step: u64,
        wall_s: f64,
        curriculum: Curriculum,
        recipe: String,
        samples: SampleCounts,
    ) -> Self {
        Self {
            step,
            wall_s,
            curriculum,
            recipe,
            samples,
            ..self.clone()
        }
    }

    /// Reads the content of a checkpoint.
    ///
    /// # Errors
    /// If it is none.
    pub fn read(state: Value) -> Result<Self, serde_json::Error> {
        serde_json::from_value(state)
    }
}

impl RunStore {
    /// Reads what earlier sessions committed, and counts into `saved` what is gone.
    ///
    /// # Errors
    /// Fails if the store does.
    pub fn earlier(&self, saved: &mut SavedState) -> Result<EarlierSessions, PipelineError> {
        let mut earlier = EarlierSessions::default();
        let mut known = 0;
        for batch in self.commits()? {
            let detail = detail_of(&batch);
            if batch.step > saved.step {
                if detail.is_some() {
                    earlier.committed.insert(batch.step, batch);
                }
                continue;
            }
            known += batch.episodes.len();
            let torn = batch.episodes.iter().filter(|e| self.torn.contains(*e));
            earlier.lost += torn.clone().count();
            earlier.first_lost = earlier.first_lost.or(torn.clone().next().cloned());
            let Some(detail) = detail else { continue };
            earlier.records.push(detail.record);
            earlier.evals.extend(detail.evals);
        }
        let missing = saved.samples.trained.saturating_sub(known);
        if !self.forgets {
            earlier.lost += missing.saturating_sub(saved.missing);
        }
        saved.missing = missing;
        saved.samples.lost += earlier.lost;
        Ok(earlier)
    }

    /// All updates, in the order of their steps.
    fn commits(&self) -> Result<Vec<TrainedBatch>, PipelineError> {
        let batches = self.traces.trained_batches();
        let mut batches = batches.map_err(PipelineError::system)?;
        batches.sort_by_key(|b| b.step);
        Ok(batches)
    }

    /// Training episodes that can be read, with their draws.
    fn stored(&self) -> Result<Vec<(EpisodeId, u64)>, PipelineError> {
        let filter = Filter {
            purpose: Some("train".into()),
            limit: 1000,
            ..Filter::default()
        };
        let listed = summaries(self.traces.as_ref(), filter);
        let drawn = listed.map(|e| e.map(|e| (e.episode, e.draw)));
        drawn
            .collect::<Result<_, _>>()
            .map_err(PipelineError::system)
    }

    /// Returns the rows that the last commit names as consumed.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn last_consumed(&self) -> Result<Option<Value>, PipelineError> {
        let last = self.commits()?.pop();
        Ok(last.and_then(|batch| detail_of(&batch)?.consumed))
    }

    /// Commits an update: its episodes, what was left out and why, the curriculum, the version of the
    /// weights, what it was `made` of and consumed, and the measurements before it, in one transaction.
    ///
    /// # Errors
    /// Fails if the store does, or if a newer owner of the run exists.
    pub(crate) fn commit(
        &self,
        commit: UpdateCommit,
        made: UpdateInputs,
        version: PolicyVersion,
        evals: Vec<EvalRecord>,
    ) -> Result<(), PipelineError> {
        let detail = CommitDetail {
            version,
            curriculum: Arc::unwrap_or_clone(commit.curriculum),
            record: made.record,
            evals,
            order: made.order,
            outcomes: made.outcomes,
            consumed: made.consumed,
        };
        let batch = TrainedBatch {
            batch: batch_name(commit.step),
            step: commit.step,
            episodes: commit.trained,
            dropped: commit.dropped,
            fence: self.fence.number(),
            detail: serde_json::to_value(detail).map_err(PipelineError::system)?,
        };
        match self.traces.commit_update(&batch, commit.again) {
            Ok(_) => Ok(()),
            Err(StoreError::Fenced { newest, .. }) => {
                Err(PipelineError::system(self.fence.fenced(newest)))
            }
            Err(other) => Err(PipelineError::system(other)),
        }
    }

    /// Whether this process may still act for the run.
    ///
    /// # Errors
    /// If a newer owner exists, or the store fails.
    pub(crate) fn check_fence(&self) -> Result<(), PipelineError> {
        self.fence.check().map_err(PipelineError::system)
    }

    /// The episodes that commits name, and the steps that were committed.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn settled(&self) -> Result<(BTreeSet<EpisodeId>, u64), PipelineError> {
        let (mut named, mut steps) = (BTreeSet::new(), 0);
        for batch in self.commits()? {
            steps = steps.max(batch.step);
            named.extend(batch.episodes);
            named.extend(batch.dropped.into_keys());
        }
        Ok((named, steps))
    }

    /// The step behind `steps` committed ones, and the rounds of `tasks` groups that it began in addition to
    /// the first.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn begun(&self, steps: u64, tasks: usize) -> Result<(u64, u32), PipelineError> {
        let first = steps * self.draws_per_step;
        let filter = Filter {
            purpose: Some("train".into()),
            draws: Some(first..=first + self.draws_per_step.saturating_sub(1)),
            limit: 1000,
            ..Filter::default()
        };
        let mut last = first;
        for e in summaries(self.traces.as_ref(), filter) {
            last = last.max(e.map_err(PipelineError::system)?.draw);
        }
        Ok((steps + 1, ((last - first) / tasks.max(1) as u64) as u32))
    }

    /// Sorts draws into those that commits name and those that they do not.
    fn unsettled(&self) -> Result<UnsettledDraws, PipelineError> {
        let (named, _) = self.settled()?;
        let settled: BTreeSet<u64> = named.iter().filter_map(draw_of).collect();
        let mut stored = self.stored()?;
        let draws = stored
            .iter()
            .map(|(_, draw)| *draw)
            .chain(settled.iter().copied());
        let next = draws.max().map_or(0, |last| last + 1);
        stored.retain(|(_, draw)| !settled.contains(draw));
        Ok(UnsettledDraws {
            episodes: stored.into_iter().map(|(episode, _)| episode).collect(),
            settled,
            next,
        })
    }

    /// Returns the draws that earlier sessions began and no commit names: all below the last one. If the
    /// version of the restored weights is given, draws that were sampled by later weights than any commit
    /// names are left out. Those weights were lost before their commit, and others get their number.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn open_draws(&self, restored: Option<u64>) -> Result<OpenDraws, PipelineError> {
        let unsettled = self.unsettled()?;
        let mut reasons = BTreeMap::new();
        if let Some(restored) = restored {
            let known = self.known_version(restored)?;
            for episode in &unsettled.episodes {
                let trace = self.traces.get(episode).map_err(PipelineError::system)?;
                let newest = trace.and_then(|t| t.newest_version()).map(|v| v.0);
                if let (Some(newest), Some(draw)) = (newest, draw_of(episode))
                    && newest > known
                {
                    let reason = format!(
                        "sampled by weights that were lost before their commit: version {newest}, the run \
                         goes on from {known}"
                    );
                    reasons.insert(draw, reason);
                }
            }
        }
        let reason = |e: &EpisodeId| Some((e.clone(), reasons.get(&draw_of(e)?)?.clone()));
        let open = |d: &u64| !unsettled.settled.contains(d) && !reasons.contains_key(d);
        Ok(OpenDraws {
            open: (0..unsettled.next).filter(open).collect(),
            next: unsettled.next,
            dropped: unsettled.episodes.iter().filter_map(reason).collect(),
        })
    }

    /// The newest version of the weights that a commit names, or the restored one.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn known_version(&self, restored: u64) -> Result<u64, PipelineError> {
        let commits = self.commits()?;
        let versions = commits.iter().filter_map(|b| Some(detail_of(b)?.version.0));
        Ok(versions.fold(restored, u64::max))
    }

    /// Returns those of these episodes and their further attempts that are in the store.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn attempts(
        &self,
        episodes: Vec<EpisodeId>,
    ) -> Result<Vec<EpisodeId>, PipelineError> {
        let mut stored = Vec::new();
        for first in episodes {
            let mut next = first.clone();
            for attempt in 1.. {
                let found = self.traces.get(&next).map_err(PipelineError::system)?;
                if found.is_none() {
                    break;
                }
                stored.push(next);
                next = attempt_id(&first, attempt);
            }
        }
        Ok(stored)
    }

    /// Stored training episodes of these draws.
    ///
    /// # Errors
    /// Fails if the store does.
    pub(crate) fn open_episodes(&self) -> Result<BTreeSet<EpisodeId>, PipelineError> {
        Ok(self.unsettled()?.episodes)
    }

    /// The groups that an update was made of, in their order; `None` if an episode is gone.
    pub(crate) fn recall(
        &self,
        batch: &TrainedBatch,
    ) -> Result<Option<Vec<Vec<Trace>>>, PipelineError> {
        let CommitDetail {
            order, outcomes, ..
        } = detail_of(batch).unwrap_or_default();
        let mut groups: Vec<Vec<Trace>> = Vec::new();
        for episode in order {
            let trace = self.traces.get(&episode).map_err(PipelineError::system)?;
            let Some(trace) = trace else {
                return Ok(None);
            };
            let mut trace = completed(self.traces.as_ref(), trace)?;
            if let Some(outcome) = outcomes.get(&episode) {
                trace.outcome = outcome.clone();
            }
            match groups.last_mut().filter(|g| g[0].group == trace.group) {
                Some(group) => group.push(trace),
                None => groups.push(vec![trace]),
            }
        }
        Ok((!groups.is_empty()).then_some(groups))
    }

    /// Counts the samples of a run that ends: `counted` are the steps so far, `waiting` the episodes that
    /// another session resumes with. A stored episode that no commit names is lost if its step was committed,
    /// or `by_draw` if another episode of its draw was.
    pub(crate) fn samples(
        &self,
        counted: SampleCounts,
        (since, by_draw): (u64, bool),
        waiting: &BTreeSet<EpisodeId>,
    ) -> Result<(SampleCounts, usize), PipelineError> {
        let (mut seen, mut steps) = (BTreeSet::new(), BTreeSet::new());
        let mut samples = counted;
        let mut torn = 0;
        for batch in self.commits()? {
            steps.insert(batch.step);
            for episode in batch.episodes {
                torn += usize::from(batch.step > since && self.torn.contains(&episode));
                samples.trained_twice += usize::from(!seen.insert(episode));
            }
            seen.extend(batch.dropped.into_keys());
        }
        let stored = self.stored()?;
        let settled: BTreeSet<u64> = seen.iter().filter_map(draw_of).collect();
        let step_of = |draw: u64| draw / self.draws_per_step.max(1) + 1;
        let is_settled = |draw: u64| {
            if by_draw {
                settled.contains(&draw)
            } else {
                steps.contains(&step_of(draw))
            }
        };
        let stray = stored
            .iter()
            .filter(|(episode, draw)| is_settled(*draw) && !seen.contains(episode));
        let stray = stray.filter(|(episode, _)| !waiting.contains(episode));
        samples.waiting = waiting.len();
        samples.lost += torn + stray.count();
        Ok((samples, torn))
    }
}

impl EarlierSessions {
    /// Builds the state from which the core resumes.
    pub(crate) fn core_state(
        &self,
        saved: &SavedState,
        steps: &[StepRecord],
        evals: &[EvalRecord],
    ) -> CoreState {
        let during = evals.iter().filter(|r| r.when == "during");
        let committed = self.committed.values();
        let committed =
            committed.filter_map(|b| Some((b.step, Arc::new(detail_of(b)?.curriculum))));
        CoreState {
            step: saved.step,
            curriculum: Arc::new(saved.curriculum.clone()),
            measured_at: during.map(|r| r.step).max().unwrap_or(0),
            health: sinew_orchestrator::Health::after(steps),
            committed: committed.collect(),
            begun: (0, 0),
            ..CoreState::default()
        }
    }

    /// The record of an update that is done again.
    pub(crate) fn record(&self, step: u64) -> Option<StepRecord> {
        Some(detail_of(self.committed.get(&step)?)?.record)
    }
}
