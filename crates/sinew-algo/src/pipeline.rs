//! Conversion of groups of traces to training rows.

use crate::aggregate;
use crate::algorithms;
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, EqualGroups, Needs, ProcessRewards};
use crate::episode::Columns;
use crate::error::{AlgoError, ConfigError};
use crate::filter;
use crate::repair::{self, Repair};
use crate::report::{AlgoReport, Moments};
use sinew_types::{EpisodeId, GroupId, LossSpec, Trace, TrainRow};
use std::collections::BTreeSet;

/// An algorithm that is ready to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Algorithm {
    composition: Composition,
    group_size: usize,
    repair: Repair,
}

impl Algorithm {
    /// Creates an algorithm from a checked composition.
    pub(crate) fn from_checked(composition: Composition, group_size: usize) -> Self {
        Self {
            composition,
            group_size,
            repair: Repair::default(),
        }
    }

    /// Replaces the repair of groups with failed episodes.
    ///
    /// # Errors
    /// [`ConfigError`] if a step has no effect on this algorithm.
    pub fn with_repair(self, repair: Repair) -> Result<Self, ConfigError> {
        repair.check(&self.composition)?;
        Ok(Self { repair, ..self })
    }

    /// Repair of groups with failed episodes.
    pub fn repair(&self) -> &Repair {
        &self.repair
    }

    /// The parts of the algorithm.
    pub fn composition(&self) -> &Composition {
        &self.composition
    }

    /// Loss for the trainer.
    pub fn loss(&self) -> &LossSpec {
        &self.composition.loss
    }

    /// Inputs in addition to tokens and outcomes.
    pub fn needs(&self) -> Needs {
        self.composition.needs()
    }

    /// Number of episodes per task.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Maximum rounds that replace [`Algorithm::spent`] groups.
    pub fn refill(&self) -> u32 {
        self.composition.filters.refill.unwrap_or(0)
    }

    /// Whether the rewards of a part of a group can already show that the group will leave the batch:
    /// episodes are compared with each other, groups with equal rewards are dropped, and no group is
    /// resampled.
    pub fn drops_equal(&self) -> bool {
        let c = &self.composition;
        let drops = c.filters.equal_groups == EqualGroups::Drop && c.filters.resample.is_none();
        drops && c.advantage.compares() && c.rewards.kl == 0.0
    }

    /// Groups that will leave the batch, so that others can replace them: too many episodes failed, or the
    /// rewards are equal and the algorithm drops such groups. Needs no scores. Rewards are assumed to differ
    /// if the reward has a KL term.
    ///
    /// # Errors
    /// [`AlgoError`] if the groups are wrong.
    pub fn spent(&self, groups: &[Vec<Trace>]) -> Result<Vec<GroupId>, AlgoError> {
        let mut c = self.composition.clone();
        let compared = c.rewards.kl == 0.0;
        c.rewards.kl = 0.0;
        let mut report = AlgoReport::default();
        let none = BTreeSet::new();
        // Rewards suffice, but where those of turns are compared.
        let paths = matches!(c.rewards.process, ProcessRewards::Separate { .. });
        let mut batch = Batch::admit(&c, self.group_size, groups, paths, &none, &mut report)?;
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

    /// Checks groups, quarantines unusable episodes and finds the paths of the others. Scoring and training
    /// share this one pass over the traces.
    ///
    /// # Errors
    /// [`AlgoError`] if the groups are wrong.
    pub fn prepare<'a>(&'a self, groups: &'a [Vec<Trace>]) -> Result<Prepared<'a>, AlgoError> {
        self.prepare_without(groups, &BTreeSet::new())
    }

    /// Works like [`Algorithm::prepare`], without some of the episodes: their groups are smaller, in
    /// baseline, repair and loss.
    ///
    /// # Errors
    /// [`AlgoError`] if the groups are wrong.
    pub fn prepare_without<'a>(
        &'a self,
        groups: &'a [Vec<Trace>],
        left_out: &BTreeSet<&EpisodeId>,
    ) -> Result<Prepared<'a>, AlgoError> {
        let mut report = AlgoReport::default();
        let c = &self.composition;
        let batch = Batch::admit(c, self.group_size, groups, true, left_out, &mut report)?;
        Ok(Prepared {
            algorithm: self,
            batch,
            report,
        })
    }
}

/// Groups that were checked once, by [`Algorithm::prepare`]. [`Prepared::draft`] gives rows to score, and
/// [`Prepared::rows`] rows to train.
#[derive(Debug)]
pub struct Prepared<'a> {
    algorithm: &'a Algorithm,
    pub(crate) batch: Batch<'a>,
    report: AlgoReport,
}

impl<'a> Prepared<'a> {
    /// Converts groups to rows. `columns` has the inputs of [`Algorithm::needs`] and the masks of tokens that
    /// were sampled under a format. Rows contain reference and proximal log-probabilities if they are
    /// available.
    ///
    /// # Errors
    /// [`AlgoError`] if the columns are wrong, a required one is missing, or a row is invalid.
    pub fn rows(self, columns: &'a Columns) -> Result<(Vec<TrainRow>, AlgoReport), AlgoError> {
        let Self {
            algorithm,
            mut batch,
            mut report,
        } = self;
        let c = &algorithm.composition;
        batch.set_columns(c, c.needs(), columns)?;
        batch.shape_rewards(c)?;
        repair::settle(&algorithm.repair, c, &mut batch, &mut report.repair);
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
