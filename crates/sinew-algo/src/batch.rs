//! A batch in preparation: usable episodes by group.

use crate::composition::{Advantage, Composition, Needs, ProcessRewards, Truncated};
use crate::earlier::EarlierRewards;
use crate::episode::{Columns, Episode, EpisodeColumns};
use crate::error::AlgoError;
use crate::report::{AlgoReport, Moments, Quarantined};
use sinew_types::{
    EpisodeEnd, EpisodeId, FailureKind, GroupId, MAX_REWARD, TokenKind, TokenLogprob, Trace,
};
use std::collections::{BTreeSet, HashSet};

/// Episodes of one [`GroupId`] as indices of [`Batch::episodes`].
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) id: GroupId,
    pub(crate) members: Vec<usize>,
    /// Failed episodes that may count in the baseline. Then they move to `members`.
    pub(crate) failed: Vec<usize>,
    /// Repeated members that fill the group up.
    pub(crate) copies: Vec<usize>,
    /// Number of episodes to compare, including failed ones.
    pub(crate) size: usize,
    /// True if all rewards are equal. The advantage is then exactly 0, without rounding errors.
    pub(crate) equal: bool,
}

/// Usable episodes and their groups. A filter removes episodes from `members`. An episode in no group is not
/// in the batch.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    pub(crate) episodes: Vec<Episode<'a>>,
    pub(crate) groups: Vec<Group>,
}

/// Returns the earlier rewards that the only member of a group is compared with, if they are known.
pub(crate) fn lone(episodes: &[Episode<'_>], members: &[usize]) -> Option<EarlierRewards> {
    let [only] = members else { return None };
    let earlier = episodes[*only].columns?.earlier?;
    (!earlier.is_empty()).then_some(earlier)
}

impl<'a> Batch<'a> {
    /// Checks the batch, and quarantines unusable episodes. Without `paths`, only the rewards of episodes are
    /// read. The episodes of `left_out` are removed from their groups.
    ///
    /// # Errors
    /// [`AlgoError`] if the caller's groups are wrong.
    pub(crate) fn admit(
        c: &Composition,
        group_size: usize,
        groups: &'a [Vec<Trace>],
        paths: bool,
        left_out: &BTreeSet<&EpisodeId>,
        report: &mut AlgoReport,
    ) -> Result<Self, AlgoError> {
        let mut batch = Self {
            episodes: Vec::new(),
            groups: Vec::new(),
        };
        let mut group_ids = HashSet::new();
        let mut episode_ids = HashSet::new();
        report.groups = groups.len();
        for (index, traces) in groups.iter().enumerate() {
            let first = traces.first().ok_or(AlgoError::EmptyGroup { index })?;
            let id = &first.group;
            if !group_ids.insert(id) {
                return Err(AlgoError::SplitGroup { group: id.clone() });
            }
            // One that bears its own name was run without others on purpose: earlier ones are its comparison.
            let alone = id.as_str() == first.episode.as_str();
            if traces.len() == 1 && c.advantage.compares() && !alone {
                return Err(AlgoError::GroupOfOne {
                    group: id.clone(),
                    expected: group_size,
                });
            }
            let (mut members, mut failed) = (Vec::new(), Vec::new());
            let mut size = traces.len();
            for trace in traces {
                check_membership(trace, id, &mut episode_ids)?;
                report.episodes += 1;
                if left_out.contains(&trace.episode) {
                    size -= 1;
                    continue;
                }
                match admit_episode(c, trace, paths, report) {
                    EpisodeRole::Usable(episode) => {
                        members.push(batch.episodes.len());
                        batch.episodes.push(episode);
                    }
                    EpisodeRole::Failed(episode) => {
                        failed.push(batch.episodes.len());
                        batch.episodes.push(episode);
                    }
                    EpisodeRole::Broken => {}
                    EpisodeRole::Excluded => size -= 1,
                }
            }
            batch.groups.push(Group {
                id: id.clone(),
                members,
                failed,
                copies: Vec::new(),
                size,
                equal: false,
            });
        }
        Ok(batch)
    }

    /// Assigns columns to usable episodes.
    ///
    /// # Errors
    /// [`AlgoError`] if a column is wrong, or a required one is missing.
    pub(crate) fn set_columns(
        &mut self,
        c: &Composition,
        needs: Needs,
        columns: &'a Columns,
    ) -> Result<(), AlgoError> {
        for group in &self.groups {
            for &i in &group.members {
                let episode = &mut self.episodes[i];
                episode.columns = columns.get(&episode.trace.episode);
                check_columns(c, needs, episode.trace, episode.columns)?;
            }
        }
        Ok(())
    }

    /// Computes the compared rewards from the recorded ones.
    pub(crate) fn shape_rewards(&mut self, c: &Composition) -> Result<(), AlgoError> {
        let rewards = &c.rewards;
        for episode in &mut self.episodes {
            let mut outcome = episode.trace.outcome.reward;
            if let Some(o) = rewards.overlong {
                let length = episode.trace.sampled_tokens() as f64;
                let buffer = f64::from(o.buffer_tokens);
                let over = length - (f64::from(o.max_tokens) - buffer);
                outcome -= (over / buffer).clamp(0.0, 1.0) * o.factor;
            }
            outcome = (outcome + rewards.bias) * rewards.scale;
            if let Some(clip) = rewards.clip {
                outcome = outcome.clamp(-clip, clip);
            }
            episode.outcome = outcome;
            episode.reward = outcome;
            if rewards.process == ProcessRewards::Sum {
                let nodes = episode.trace.nodes.iter();
                episode.reward += nodes.map(|n| n.process_reward).sum::<f64>();
            }
            // Recursions use the KL penalty of each token. Comparisons of episodes use its sum.
            let summed = matches!(c.advantage, Advantage::Group { .. });
            if rewards.kl != 0.0 && summed {
                let penalty = |path| -> Result<f64, AlgoError> {
                    let kl = crate::path_signals::kl_rewards(c, episode, path)?;
                    let own = kl.iter().zip(&path.trains).filter(|(_, t)| **t);
                    Ok(own.map(|(k, _)| k).sum())
                };
                let penalties: Result<Vec<f64>, _> = episode.paths.iter().map(penalty).collect();
                episode.reward += penalties?.iter().sum::<f64>();
            }
        }
        Ok(())
    }

    /// Indices of all episodes in the batch, group by group.
    pub(crate) fn members(&self) -> impl Iterator<Item = usize> + '_ {
        self.groups.iter().flat_map(|g| g.members.iter().copied())
    }

    /// Compared rewards of a group: members in order, then copies.
    pub(crate) fn rewards(&self, group: &Group) -> Vec<f64> {
        let reward = |&i: &usize| self.episodes[i].reward;
        let all = group.members.iter().chain(&group.copies);
        all.map(reward).collect()
    }

    /// Number of times that an episode counts in the loss.
    pub(crate) fn times(&self, group: &Group, episode: usize) -> usize {
        1 + group.copies.iter().filter(|&&i| i == episode).count()
    }

    /// Sets the advantage of every sampled token of an episode.
    pub(crate) fn broadcast(&mut self, episode: usize, advantage: f64) {
        for path in &mut self.episodes[episode].paths {
            let sampled = path.sampled.iter();
            path.advantages = sampled.map(|&s| if s { advantage } else { 0.0 }).collect();
        }
    }

    /// Writes reward statistics and the success rate to the report.
    pub(crate) fn summarize(&self, report: &mut AlgoReport) {
        let failed = |e: &&Episode<'_>| matches!(e.trace.end, EpisodeEnd::Failed { .. });
        let usable: Vec<_> = self.episodes.iter().filter(|e| !failed(e)).collect();
        let rewards: Vec<f64> = usable.iter().map(|e| e.reward).collect();
        report.reward = Moments::of(&rewards);
        let solved = usable.iter().filter(|e| e.trace.outcome.success);
        report.success_rate = solved.count() as f64 / usable.len().max(1) as f64;
    }
}

/// Checks that a trace belongs to its group and occurs once.
fn check_membership<'a>(
    trace: &'a Trace,
    group: &GroupId,
    seen: &mut HashSet<&'a sinew_types::EpisodeId>,
) -> Result<(), AlgoError> {
    if &trace.group != group {
        return Err(AlgoError::MixedGroup {
            episode: trace.episode.clone(),
            actual: trace.group.clone(),
            expected: group.clone(),
        });
    }
    if !seen.insert(&trace.episode) {
        return Err(AlgoError::DuplicateEpisode {
            episode: trace.episode.clone(),
        });
    }
    Ok(())
}

/// Role of an episode in a batch. The report counts all but usable ones.
enum EpisodeRole<'a> {
    Usable(Episode<'a>),
    /// The system failed. The episode is not trained on.
    Failed(Episode<'a>),
    /// The trace is invalid, or it has no reward.
    Broken,
    /// The group ignores the episode.
    Excluded,
}

/// Classifies an episode.
fn admit_episode<'a>(
    c: &Composition,
    trace: &'a Trace,
    paths: bool,
    report: &mut AlgoReport,
) -> EpisodeRole<'a> {
    if let EpisodeEnd::Failed { kind, .. } = &trace.end {
        *report.failed.entry(failure_name(*kind).into()).or_default() += 1;
        let mut episode = Episode::new(c, trace, false);
        episode.trains = false;
        let credible = episode.reward.abs() <= MAX_REWARD;
        return if credible && trace.validate().is_ok() {
            EpisodeRole::Failed(episode)
        } else {
            EpisodeRole::Broken
        };
    }
    let mut reason = trace.validate().err().map(|e| e.to_string());
    let total = trace.total_reward();
    if reason.is_none() && !(-MAX_REWARD..=MAX_REWARD).contains(&total) {
        reason = Some(format!(
            "total reward is {total}, allowed: magnitudes up to {MAX_REWARD:e}"
        ));
    }
    if let Some(reason) = reason {
        report.quarantined.push(Quarantined {
            episode: trace.episode.clone(),
            reason,
        });
        return EpisodeRole::Broken;
    }
    // A missing reward is not 0: that would raise the advantages of the other episodes.
    if trace.outcome.unscored && c.advantage.reads_rewards() {
        report.unscored += 1;
        return EpisodeRole::Broken;
    }
    let mut trains = true;
    if matches!(trace.end, EpisodeEnd::Truncated { .. }) {
        report.truncated += 1;
        if matches!(c.filters.truncated, Truncated::Mask | Truncated::Exclude) {
            report.truncated_untrained += 1;
            trains = false;
        }
        if c.filters.truncated == Truncated::Exclude {
            return EpisodeRole::Excluded;
        }
    }
    let mut episode = Episode::new(c, trace, paths);
    episode.trains = trains;
    EpisodeRole::Usable(episode)
}

fn failure_name(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Engine => "engine",
        FailureKind::Environment => "environment",
        FailureKind::Harness => "harness",
        FailureKind::Sandbox => "sandbox",
        FailureKind::Render => "render",
        FailureKind::Store => "store",
        FailureKind::Cancelled => "cancelled",
    }
}

/// Checks the columns of an episode, and that the required ones exist.
fn check_columns(
    c: &Composition,
    needs: Needs,
    trace: &Trace,
    given: Option<&EpisodeColumns>,
) -> Result<(), AlgoError> {
    let values = given.and_then(|g| g.values.as_ref());
    let reference = given.and_then(|g| g.ref_logprobs.as_ref());
    let prox = given.and_then(|g| g.prox_logprobs.as_ref());
    let teacher = given.and_then(|g| g.teacher_logprobs.as_ref());
    let missing = |column| AlgoError::MissingColumn {
        algorithm: c.kind.name(),
        column,
        episode: trace.episode.clone(),
    };
    let columns = [
        ("values", values, needs.values),
        ("ref_logprobs", reference, needs.ref_logprobs),
        ("prox_logprobs", prox, needs.prox_logprobs),
        ("teacher_logprobs", teacher, needs.teacher_logprobs),
    ];
    for (column, given, needed) in columns {
        match given {
            Some(by_node) => check_column(column, trace, by_node)?,
            None if needed => return Err(missing(column)),
            None => {}
        }
    }
    for (&leaf, &value) in given.iter().flat_map(|g| &g.values_after) {
        if !value.is_finite() {
            return Err(AlgoError::ColumnValue {
                episode: trace.episode.clone(),
                column: "values_after",
                node: leaf as usize,
                index: 0,
                value,
            });
        }
    }
    match given.and_then(|g| g.teacher_top.as_ref()) {
        Some(by_node) => check_top(trace, by_node),
        None if needs.teacher_top > 0 => Err(missing("teacher_top")),
        None => Ok(()),
    }
}

/// Checks the teacher's most likely tokens.
fn check_top(trace: &Trace, by_node: &[Vec<Vec<TokenLogprob>>]) -> Result<(), AlgoError> {
    let flat = |tops: &Vec<Vec<TokenLogprob>>| {
        // The sum is not finite if an entry is not finite.
        let sum = |top: &Vec<TokenLogprob>| top.iter().map(|t| t.logprob).sum::<f32>();
        tops.iter().map(sum).collect::<Vec<f32>>()
    };
    let sums: Vec<Vec<f32>> = by_node.iter().map(flat).collect();
    check_column("teacher_top", trace, &sums)
}

/// Checks lengths and values of a column at sampled nodes.
fn check_column(
    column: &'static str,
    trace: &Trace,
    by_node: &[Vec<f32>],
) -> Result<(), AlgoError> {
    for (node, n) in trace.nodes.iter().enumerate() {
        if n.kind != TokenKind::Sampled {
            continue;
        }
        let entries = by_node.get(node).map_or(&[][..], Vec::as_slice);
        if entries.len() != n.tokens.len() {
            return Err(AlgoError::ColumnLength {
                column,
                episode: trace.episode.clone(),
                node,
                actual: entries.len(),
                expected: n.tokens.len(),
            });
        }
        // The first token of a root has no prediction, so its entry is not read.
        let unpredictable = usize::from(n.parent == sinew_types::NO_PARENT);
        let bad = |&i: &usize| !entries[i].is_finite();
        if let Some(index) = (unpredictable..entries.len()).find(bad) {
            return Err(AlgoError::ColumnValue {
                column,
                episode: trace.episode.clone(),
                node,
                index,
                value: entries[index],
            });
        }
    }
    Ok(())
}
