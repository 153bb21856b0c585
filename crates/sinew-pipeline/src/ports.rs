//! Ports of the loop, as traits: each has an embedded implementation here, and others elsewhere.
//!
//! | port | embedded | another one |
//! |---|---|---|
//! | [`Rollouts`] | an engine and environments of this process | episodes that end at once, in the driver's
//! tests |
//! | [`SampleSource`] | data sets, the data pool | a queue of groups, in the tests |
//! | [`Learner`] | the embedded trainer | a counter, in the tests |
//! | [`GroupScores`] | the group rewards of environments ([`GroupRewards`](crate::GroupRewards)) | ranks by
//! place, in the driver's tests |
//! | [`WeightsTransport`] | any [`Engine`] | a list of versions, in the tests |
//!
//! Calls of one port come one after the other; those of the learner come from a separate thread if training
//! overlaps with generation. A port may block; it is asked to stop by its own cancellation, and reports that
//! as [`PipelineError::Interrupted`].

use serde_json::Value;
use sinew_algo::{Algorithm, Columns, Prepared};
use sinew_orchestrator::{Draw, PipelineError, RolloutProgress, Rows, StepRecord};
use sinew_rollout::{AdmissionReading, Hops, ResumedCounts};
use sinew_store::TraceStore;
use sinew_types::{
    Engine, EpisodeId, GroupId, LossSpec, Outcome, PolicyVersion, TensorSource, Trace,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Trains a policy.
pub trait Learner: Send {
    /// Version of the weights.
    fn version(&self) -> PolicyVersion;

    /// The weights as engines use them.
    ///
    /// # Errors
    /// If adapters cannot be merged, or the weights cannot be written.
    fn weights(&mut self) -> Result<Arc<dyn TensorSource>, PipelineError>;

    /// Columns that the algorithm reads in addition to the traces, added to the known ones.
    ///
    /// # Errors
    /// Fails if a model or the algorithm does.
    fn columns(
        &mut self,
        algorithm: &Algorithm,
        batch: &Prepared<'_>,
        known: Columns,
    ) -> Result<Columns, PipelineError>;

    /// Computes the log-probabilities of the trained tokens of `data` under the current weights and stores
    /// them there; `known` has the masks of output formats.
    ///
    /// # Errors
    /// Fails if the model or the algorithm does.
    fn score_data(
        &mut self,
        algorithm: &Algorithm,
        groups: &mut [Vec<Trace>],
        known: &Columns,
    ) -> Result<(), PipelineError>;

    /// Trains on one batch and fills in the training part of the step's record.
    ///
    /// # Errors
    /// Fails if the trainer does, or if the run is to stop.
    fn update(
        &mut self,
        batch: &mut Rows,
        spec: &LossSpec,
        record: &mut StepRecord,
    ) -> Result<(), PipelineError>;

    /// Whether the weights are those of a step.
    fn is_whole(&self) -> bool;

    /// Makes a checkpoint of `step`, with a state that is restored with it.
    ///
    /// # Errors
    /// Fails if the disk does.
    fn save(&mut self, step: u64, state: Value) -> Result<(), PipelineError>;
}

/// Brings new weights to where tokens are sampled.
pub trait WeightsTransport {
    /// Returns once every later token is sampled with them.
    ///
    /// # Errors
    /// If they were not taken.
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError>;
}

/// An engine of this process, or one that speaks for servers.
impl WeightsTransport for Arc<dyn Engine> {
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        self.load_weights(version, weights)
            .map_err(|e| PipelineError::system(format!("engine: {e}")))
    }
}

/// Counters of rollouts.
#[derive(Clone, Copy, Debug, Default)]
pub struct RolloutReading {
    /// Seconds of computing since the engine's start.
    pub engine_busy_s: f64,
    /// Seconds for which episodes waited for sandboxes, all of them added up.
    pub sandbox_s: f64,
    /// Number since the engine's start.
    pub preemptions: u64,
    pub admission: AdmissionReading,
    /// Counts of the episodes that earlier sessions left in flight.
    pub resumed: ResumedCounts,
    /// Calls between owner and workers since the start.
    pub hops: Hops,
}

/// An episode that ended and is in the store.
#[derive(Clone, Debug)]
pub struct StoredEpisode {
    /// Trace as stored.
    pub trace: Trace,
    /// Whether the store already contained it, so that it was not run now.
    pub known: bool,
    /// Part whose version differs from that of its run, so that it must not be trained.
    pub changed: Option<String>,
    /// Whether its outcome was computed by the present reward, and is not the one in the store.
    pub rescored: bool,
}

/// Condition for resuming episodes that earlier sessions left in flight.
#[derive(Debug)]
pub struct ResumeCondition<'a> {
    /// The newest version of the weights that is known to have been in use: what later ones sampled was lost
    /// with them.
    pub known: u64,
    /// Draws that a commit names.
    pub settled: &'a BTreeSet<u64>,
}

/// Ends a wait for episodes from another thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Runs episodes.
pub trait Rollouts {
    /// Begins episodes; those that the store has are not run, and are given before others. Held-out ones have
    /// a separate temperature.
    ///
    /// # Errors
    /// If the store or the taskset refuses one.
    fn start(&mut self, draws: &[Draw], temperature: Option<f32>) -> Result<(), PipelineError>;

    /// Stops started episodes: none of them is returned or stored afterwards. The default does nothing: they
    /// end as others do, and the loop does not need them.
    fn stop(&mut self, episodes: &[EpisodeId]) {
        let _ = episodes;
    }

    /// Resumes episodes that earlier sessions left in flight; returns a warning for the user, if there is
    /// one. The default resumes none.
    ///
    /// # Errors
    /// If they cannot be read.
    fn resume(&mut self, earlier: &ResumeCondition<'_>) -> Result<Option<String>, PipelineError> {
        let _ = earlier;
        Ok(None)
    }

    /// Saves the progress of episodes in flight, for a resumed session. The default saves nothing: they start
    /// again.
    ///
    /// # Errors
    /// If that cannot be written.
    fn save(&mut self) -> Result<(), PipelineError> {
        Ok(())
    }

    /// Waits until some episodes have ended and are stored, and calls `tick` from time to time meanwhile.
    /// Returns none if none is running, or if a [`Waker`] was called.
    ///
    /// # Errors
    /// If they cannot be stored, or the run is to stop.
    fn ended(
        &mut self,
        tick: &mut dyn FnMut(RolloutProgress),
    ) -> Result<Vec<StoredEpisode>, PipelineError>;

    /// Whether some have not been given yet.
    fn is_running(&self) -> bool;

    /// Counters so far; the driver reports differences.
    fn reading(&self) -> RolloutReading;

    /// Ends the wait at work, or the next one. The default does nothing: a wait ends with the next episode.
    fn waker(&self) -> Waker {
        Arc::new(|| {})
    }
}

/// Scores whole groups, while other episodes run.
pub trait GroupScores {
    /// Begins to score a group: its members with their traces, all of them ended. Returns at once.
    ///
    /// # Errors
    /// If the taskset has no such task.
    fn start(&mut self, members: Vec<(Draw, Trace)>) -> Result<(), PipelineError>;

    /// Returns the groups that were scored since the last call. Their scores are in the store: a session that
    /// resumes from here reads the same outcomes. If `wait` is set, it returns at least one of those that
    /// were started.
    ///
    /// # Errors
    /// If scores cannot be stored, or the run is to stop.
    fn scored(&mut self, wait: bool) -> Result<Vec<ScoredGroup>, PipelineError>;
}

/// A group with its rewards.
#[derive(Clone, Debug)]
pub struct ScoredGroup {
    pub group: GroupId,
    /// Outcomes of members that changed.
    pub outcomes: BTreeMap<EpisodeId, Outcome>,
}

/// Request of a step to a source.
pub struct GroupRequest<'a> {
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of groups that the step is to have; fewer are allowed.
    pub groups: usize,
    /// Seed of the run; the draws of a source are a function of it and of the step.
    pub seed: u64,
    /// A path that is longer cannot be trained.
    pub max_path_tokens: usize,
    pub algorithm: &'a Algorithm,
    /// Store to which given episodes are committed before they are handed out.
    pub store: &'a dyn TraceStore,
    /// Scores data that has no log-probabilities.
    pub learner: &'a mut dyn Learner,
    /// Callback from time to time while a source waits, with the number of available episodes and the number
    /// of those it waits for.
    pub tick: &'a mut dyn FnMut(usize, usize),
}

impl std::fmt::Debug for GroupRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupRequest")
            .field("step", &self.step)
            .field("groups", &self.groups)
            .finish_non_exhaustive()
    }
}

/// Groups that a source gave; they are in the store.
#[derive(Clone, Debug, Default)]
pub struct SourceGroups {
    pub groups: Vec<Vec<Trace>>,
    /// Stored for the step, not to be trained, with the reason.
    pub dropped: BTreeMap<EpisodeId, String>,
    /// Episodes of `dropped` that the step counts as unscored or too old.
    pub left_out: BTreeMap<EpisodeId, String>,
    /// Outcomes of episodes of `groups` that follow from scores in the store: newer scores do not change
    /// what was trained.
    pub outcomes: BTreeMap<EpisodeId, Outcome>,
}

/// Source of episodes that this run does not sample itself.
pub trait SampleSource {
    /// The groups of a step, stored; neither groups nor dropped episodes: nothing more will come.
    ///
    /// # Errors
    /// If the source or the store fails, or the run is to stop.
    fn groups(&mut self, wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError>;

    /// Returns the rows that the commit of a step is to name as consumed. It is asked when the step is
    /// trained, just before the commit. The default returns nothing.
    ///
    /// # Errors
    /// If something of it is not the run's any more: then the step is not committed.
    fn consumes(&mut self, step: u64) -> Result<Option<Value>, PipelineError> {
        let _ = step;
        Ok(None)
    }

    /// Reports that a commit that names `consumed` is durable. It is called after the commit, and again for
    /// the last commit when a session resumes, since a crash may have happened in between. The default does
    /// nothing.
    ///
    /// # Errors
    /// If the source cannot be reached.
    fn committed(&mut self, consumed: &Value) -> Result<(), PipelineError> {
        let _ = consumed;
        Ok(())
    }

    /// Groups that wait for rewards from outside.
    fn waiting_groups(&self) -> usize {
        0
    }

    /// The episodes of these groups; another session resumes with them.
    fn waiting_episodes(&self) -> Vec<EpisodeId> {
        Vec::new()
    }

    /// Reason why nothing came, as far as that is known.
    fn why_dry(&self) -> String {
        String::new()
    }
}
