//! From groups of traces to training rows.

use crate::aggregate;
use crate::algorithms;
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, Needs, RunFacts};
use crate::config::{AlgorithmConfig, ConfigError};
use crate::episode::Columns;
use crate::filter;
use crate::repair::{self, Repair};
use crate::report::{AlgoReport, Moments};
use sinew_types::{EpisodeId, GroupId, LossSpec, NodeId, Trace, TrainRow, TrainRowError};

/// An algorithm ready to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Algorithm {
    composition: Composition,
    group_size: usize,
    repair: Repair,
}

/// Why a batch cannot be turned into rows. Episodes that are merely unfit are quarantined and
/// counted instead; these errors say that the caller's batch is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AlgoError {
    #[error("group {index} of the batch is empty")]
    EmptyGroup { index: usize },
    #[error(
        "group {group} holds one episode: it would be its own baseline; \
         give all {expected} episodes of the group, or use `reinforce` or `ppo`"
    )]
    GroupOfOne { group: GroupId, expected: usize },
    #[error("episode {episode} belongs to group {actual}, but was given in group {expected}")]
    MixedGroup {
        episode: EpisodeId,
        actual: GroupId,
        expected: GroupId,
    },
    #[error("group {group} was given twice; its episodes must be compared together")]
    SplitGroup { group: GroupId },
    #[error("episode {episode} is twice in the batch")]
    DuplicateEpisode { episode: EpisodeId },
    #[error("`{algorithm}` reads {column}, but none were given for episode {episode}")]
    MissingColumn {
        algorithm: &'static str,
        column: &'static str,
        episode: EpisodeId,
    },
    #[error(
        "{column} of episode {episode}: node {node} has {actual} entries for {expected} tokens"
    )]
    ColumnLength {
        column: &'static str,
        episode: EpisodeId,
        node: usize,
        actual: usize,
        expected: usize,
    },
    #[error("{column} of episode {episode}: node {node} token {index} is {value}")]
    ColumnValue {
        column: &'static str,
        episode: EpisodeId,
        node: usize,
        index: usize,
        value: f32,
    },
    #[error(
        "episode {episode}: token {index} of node {node} was drawn under a format, but its mask was not given: it \
         cannot be trained"
    )]
    MissingMask {
        episode: EpisodeId,
        node: NodeId,
        index: u32,
    },
    #[error("`{algorithm}` compares states, but no turn of the batch has a state_hash")]
    NoStates { algorithm: &'static str },
    #[error(
        "`{algorithm}` chooses among successes by failed tool calls, but no episode of the batch has the metric \
         `{metric}`: take an environment that counts them, or leave resampling out"
    )]
    NoMetric {
        algorithm: &'static str,
        metric: &'static str,
    },
    #[error("scores were given for {actual} {what}, expected {expected}")]
    Scores {
        what: &'static str,
        actual: usize,
        expected: usize,
    },
    #[error(transparent)]
    Row(#[from] TrainRowError),
}

impl Algorithm {
    /// What `config` asks for, or why it cannot run.
    pub fn new(config: &AlgorithmConfig, facts: &RunFacts) -> Result<Self, ConfigError> {
        config.resolve(facts)
    }

    pub(crate) fn from_checked(composition: Composition, group_size: usize) -> Self {
        Self {
            composition,
            group_size,
            repair: Repair::default(),
        }
    }

    /// The same with other repair of groups in which episodes failed.
    ///
    /// # Errors
    /// If a step of it does nothing with this algorithm.
    pub fn with_repair(self, repair: Repair) -> Result<Self, ConfigError> {
        repair.check(&self.composition)?;
        Ok(Self { repair, ..self })
    }

    /// How groups are repaired.
    pub fn repair(&self) -> &Repair {
        &self.repair
    }

    /// What runs, part by part.
    pub fn composition(&self) -> &Composition {
        &self.composition
    }

    /// What the trainer has to compute.
    pub fn loss(&self) -> &LossSpec {
        &self.composition.loss
    }

    /// What must be given beside the traces.
    pub fn needs(&self) -> Needs {
        self.composition.needs()
    }

    /// How many episodes of a task are run before they are compared.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Rounds in which [`Algorithm::spent`] groups are replaced.
    pub fn refill(&self) -> u32 {
        self.composition.filters.refill.unwrap_or(0)
    }

    /// Groups that will leave the batch, so that others may take their places: too many of their
    /// episodes failed, or their rewards are equal and the algorithm drops such groups. Nothing has to
    /// be scored for it; a KL term in the reward is taken to tell episodes apart, as it does.
    pub fn spent(&self, groups: &[Vec<Trace>]) -> Result<Vec<GroupId>, AlgoError> {
        let mut c = self.composition.clone();
        let compared = c.rewards.kl == 0.0;
        c.rewards.kl = 0.0;
        let (empty, mut report) = (Columns::new(), AlgoReport::default());
        let none = Needs::default();
        let mut batch = Batch::admit(&c, none, self.group_size, groups, &empty, &mut report)?;
        batch.shape_rewards(&c)?;
        repair::settle(&self.repair, &c, &mut batch, &mut report.repair);
        filter::resample(&c, &mut batch, &mut report)?;
        filter::small_groups(&c, &mut batch, &mut report);
        if compared {
            filter::equal_groups(&c, &mut batch, &mut report);
        }
        let gone = batch.groups.into_iter().filter(|g| g.members.is_empty());
        Ok(gone.map(|g| g.id).collect())
    }

    /// Rows for a batch of groups, for algorithms that read nothing but traces.
    pub fn rows(&self, groups: &[Vec<Trace>]) -> Result<(Vec<TrainRow>, AlgoReport), AlgoError> {
        self.rows_with(groups, &Columns::new())
    }

    /// Rows for a batch of groups. `columns` brings what [`Algorithm::needs`] names; reference
    /// and proximal log-probabilities are handed on in the rows wherever they are given.
    pub fn rows_with(
        &self,
        groups: &[Vec<Trace>],
        columns: &Columns,
    ) -> Result<(Vec<TrainRow>, AlgoReport), AlgoError> {
        let c = &self.composition;
        let mut report = AlgoReport::default();
        let needs = c.needs();
        let mut batch = Batch::admit(c, needs, self.group_size, groups, columns, &mut report)?;
        batch.shape_rewards(c)?;
        repair::settle(&self.repair, c, &mut batch, &mut report.repair);
        filter::resample(c, &mut batch, &mut report)?;
        filter::small_groups(c, &mut batch, &mut report);
        filter::equal_groups(c, &mut batch, &mut report);
        filter::top_std(c, &mut batch, &mut report);
        filter::only_success(c, &mut batch, &mut report);
        algorithms::advantages(c, &mut batch, &mut report)?;
        algorithms::normalize(c.normalize, &mut batch);
        algorithms::opd::distill(c, &mut batch)?;
        let rows = if matches!(c.advantage, Advantage::Preference { .. }) {
            aggregate::preference_rows(&batch, &mut report)?
        } else {
            aggregate::rows(c, &batch, &mut report)?
        };
        batch.summarize(&mut report);
        let trained = |r: &TrainRow| {
            let pairs = r.weights.iter().zip(&r.advantages);
            let trained = pairs.filter(|(w, _)| **w != 0.0);
            trained.map(|(_, a)| f64::from(*a)).collect::<Vec<_>>()
        };
        report.advantage = Moments::of(&rows.iter().flat_map(trained).collect::<Vec<_>>());
        Ok((rows, report))
    }
}
