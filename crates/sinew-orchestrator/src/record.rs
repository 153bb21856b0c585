//! Records of a run: one line per step in `metrics.jsonl`, and one object at the end.

use crate::gain::HeldOutGain;
use crate::rows::FormatCounts;
use crate::status::{SampleStatus, share_text};
use serde::{Deserialize, Serialize};
use sinew_algo::{
    Interval, Percentiles, PreferenceReport, RepairReport, Spread, TokenCounts, passes,
};
use sinew_rollout::AdmissionReading;
use sinew_rollout::{Hops, ResumedCounts, WaitTimes};
use sinew_types::{BranchCause, EpisodeEnd, TokenKind, Trace};
use std::collections::BTreeMap;

/// Prefix of the names of rewards among the measurements.
const REWARD: &str = "reward/";

/// Averages over a set of episodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpisodeStats {
    /// Number of all episodes, including failed ones.
    pub episodes: usize,
    /// Episodes that the system failed; not part of the averages below.
    pub failed: usize,
    /// Episodes without a reward; not part of the averages below.
    #[serde(default)]
    pub unscored: usize,
    /// Number of episodes cut by a limit; they are part of the averages.
    pub truncated: usize,
    /// Number of cut episodes for each limit: `turn_tokens`, `turns`, `context`, `wall_time`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub truncated_by: BTreeMap<String, usize>,
    /// Share of the scored episodes that succeeded, 0 to 1.
    pub success: f64,
    /// Wilson interval of the success rate at 95 % confidence; `None` without scored episodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub success_interval: Option<Interval>,
    /// The pass@k rate, by `k`: probability that at least one of `k` episodes of a task succeeds. `k` is a
    /// power of two, from 2 up to the scored episodes of a task; each rate is the mean over the tasks with at
    /// least `k` of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pass_at: BTreeMap<usize, f64>,
    /// Success of greedy decoding (temperature 0), if it was measured too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy_success: Option<f64>,
    /// Mean total reward.
    pub reward: f64,
    /// Standard deviation, minimum and maximum of the total rewards; `None` without scored episodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_spread: Option<Spread>,
    /// Mean number of sampled turns.
    pub turns: f64,
    /// Mean number of sampled tokens of an episode.
    pub sampled_tokens: f64,
    /// Percentiles of the sampled tokens of an episode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled_tokens_at: Option<Percentiles>,
    /// Number of sampled tokens of the longest turn.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub longest_turn: usize,
    /// Mean of each measurement over the scored episodes. `reward/NAME` is averaged only over the episodes
    /// that have this score: a missing score is not 0.
    pub metrics: BTreeMap<String, f64>,
    /// Success by task type.
    pub success_by_kind: BTreeMap<String, f64>,
    /// Number of scored episodes by task type, the basis of `success_by_kind`.
    pub scored_by_kind: BTreeMap<String, usize>,
    /// The same statistics for each environment of a mixture, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_env: BTreeMap<String, EpisodeStats>,
    /// Seconds of generation, summed over episodes.
    pub generate_s: f64,
    /// Seconds in the environment (tools, resets, scores), summed over episodes.
    pub tool_s: f64,
}

impl EpisodeStats {
    /// Formats the success rate: `12.5 % (2 of 16, 3.5 to 36.0 %)`, or `-` if no episode was scored.
    pub fn success_text(&self) -> String {
        match self.success_interval {
            Some(interval) => format!(
                "{:.1} % ({:.0} of {}, {})",
                100.0 * self.success,
                self.successes(),
                self.scored(),
                interval.percent()
            ),
            None => "-".into(),
        }
    }

    /// Formats the success rate of a task type, such as `50.0 % (8 of 16)`; `-` without a scored episode.
    pub fn success_of_kind(&self, kind: &str) -> String {
        match (
            self.success_by_kind.get(kind),
            self.scored_by_kind.get(kind),
        ) {
            (Some(success), Some(n)) => {
                let solved = success * *n as f64;
                format!("{:.1} % ({solved:.0} of {n})", 100.0 * success)
            }
            _ => "-".into(),
        }
    }

    /// Formats the number of episodes without a reward and their share of all that the system did not fail,
    /// such as `4 (25.0 %)`; `0` if there are none.
    pub fn unscored_text(&self) -> String {
        match share_text(self.unscored, self.scored()) {
            share if share.is_empty() => "0".into(),
            share => format!("{} ({share})", self.unscored),
        }
    }

    /// Computes the statistics of `traces`, and for a mixture also those of each environment.
    pub fn of<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> Self {
        let traces: Vec<&Trace> = traces.into_iter().collect();
        let mut members: BTreeMap<&str, Vec<&Trace>> = BTreeMap::new();
        for trace in &traces {
            if let Some(member) = trace.member() {
                members.entry(member).or_default().push(trace);
            }
        }
        let own = |(name, traces): (&str, Vec<&Trace>)| (name.to_owned(), Self::of_all(&traces));
        Self {
            by_env: members.into_iter().map(own).collect(),
            ..Self::of_all(&traces)
        }
    }

    fn of_all(traces: &[&Trace]) -> Self {
        let mut stats = Self::default();
        let mut by_kind: BTreeMap<String, (f64, usize)> = BTreeMap::new();
        let mut by_task: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        let (mut rewards, mut lengths) = (Vec::new(), Vec::new());
        // Episodes that have a reward, by its name.
        let mut measured: BTreeMap<String, f64> = BTreeMap::new();
        for trace in traces {
            stats.episodes += 1;
            stats.generate_s += trace.timing.generate_s;
            stats.tool_s += trace.timing.tool_s;
            match &trace.end {
                EpisodeEnd::Failed { .. } => {
                    stats.failed += 1;
                    continue;
                }
                EpisodeEnd::Truncated { limit } => {
                    stats.truncated += 1;
                    *stats.truncated_by.entry(limit.name().into()).or_default() += 1;
                }
                EpisodeEnd::Terminated => {}
            }
            if trace.outcome.unscored {
                stats.unscored += 1;
                continue;
            }
            let success = f64::from(trace.outcome.success);
            stats.success += success;
            stats.reward += trace.total_reward();
            rewards.push(trace.total_reward());
            let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
            let longest = sampled.clone().map(|n| n.tokens.len()).max();
            stats.longest_turn = stats.longest_turn.max(longest.unwrap_or(0));
            stats.turns += sampled.count() as f64;
            stats.sampled_tokens += trace.sampled_tokens() as f64;
            lengths.push(trace.sampled_tokens());
            let task = by_task.entry(trace.task.as_str()).or_default();
            *task = (task.0 + 1, task.1 + usize::from(trace.outcome.success));
            for (name, value) in &trace.outcome.metrics {
                *stats.metrics.entry(name.clone()).or_default() += value;
                if name.starts_with(REWARD) {
                    *measured.entry(name.clone()).or_default() += 1.0;
                }
            }
            let kind = by_kind.entry(trace.task_kind.clone()).or_default();
            *kind = (kind.0 + success, kind.1 + 1);
        }
        let scored = rewards.len() as f64;
        stats.success_interval = Interval::wilson(stats.success, scored);
        stats.reward_spread = Spread::of(&rewards);
        stats.sampled_tokens_at = Percentiles::of(lengths);
        stats.pass_at = passes(&by_task.into_values().collect::<Vec<_>>());
        stats.divide(scored, &measured);
        let kinds = by_kind.iter();
        stats.scored_by_kind = kinds.clone().map(|(k, (_, n))| (k.clone(), *n)).collect();
        stats.success_by_kind = kinds
            .map(|(k, (s, n))| (k.clone(), s / *n as f64))
            .collect();
        stats
    }

    /// Number of scored episodes, the basis of the averages.
    pub fn scored(&self) -> usize {
        self.episodes.saturating_sub(self.failed + self.unscored)
    }

    /// Scored episodes that succeeded.
    pub(crate) fn successes(&self) -> f64 {
        self.success * self.scored() as f64
    }

    fn divide(&mut self, scored: f64, measured: &BTreeMap<String, f64>) {
        if scored == 0.0 {
            return;
        }
        for value in [
            &mut self.success,
            &mut self.reward,
            &mut self.turns,
            &mut self.sampled_tokens,
        ] {
            *value /= scored;
        }
        for (name, value) in &mut self.metrics {
            *value /= measured.get(name).copied().unwrap_or(scored);
        }
    }
}

/// Whether serialization omits a count because it is 0.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(crate) fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// One training step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    pub step: u64,
    /// Seconds since the start of the run, earlier sessions of a resumed run included.
    pub wall_s: f64,
    pub rollout: EpisodeStats,
    /// Counts of the step's samples.
    #[serde(default)]
    pub samples: SampleStatus,
    /// Reason why most of the failed episodes failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_cause: Option<String>,
    /// Share of the next step's tasks by type, with adaptive sampling.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub task_shares: BTreeMap<String, f64>,
    /// Number of training rows made from the step's episodes.
    pub rows: usize,
    /// Counts of the step's sampled tokens, by how its rows train them.
    #[serde(default)]
    pub tokens: TokenCounts,
    /// Number of calls of outside agents, by the way in which each call joined the captured tokens.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub joins: BTreeMap<String, u64>,
    /// Number of branches of the step's episodes, by cause. Each makes one more training sample.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub branches: BTreeMap<BranchCause, u64>,
    /// Number of ended further attempts. An episode is run again if the system failed it, or if a part of the
    /// system has changed since it ran.
    #[serde(default)]
    pub retried: usize,
    /// Number of these attempts that the system did not fail.
    #[serde(default)]
    pub recovered: usize,
    /// Number of groups that replaced others which left the batch.
    #[serde(default)]
    pub refilled: usize,
    /// Number of episodes that were never started, because the first ones had decided their group.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub not_begun: usize,
    /// Number of stored episodes that were scored again, because the reward has changed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rescored: usize,
    /// Counts of the groups with failed episodes, by their treatment.
    #[serde(default)]
    pub repair: RepairReport,
    /// Number of tokens sampled under an output format.
    #[serde(default, skip_serializing_if = "FormatCounts::is_empty")]
    pub formats: FormatCounts,
    /// Number of episodes without a row, by reason.
    pub dropped: BTreeMap<String, usize>,
    /// Distribution of the advantages of the trained tokens; `None` without rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advantages: Option<Spread>,
    /// Tokens with weight in the loss.
    pub trained_tokens: usize,
    /// Tokens that one pass of the trainer over the rows computes, with shared prefixes.
    pub computed_tokens: usize,
    /// Tokens that such a pass would compute without shared prefixes.
    pub unshared_tokens: usize,
    /// Training loss as reported by the trainer.
    pub loss: f64,
    /// Gradient norm before clipping; 0 if nothing was trained.
    pub grad_norm: f64,
    pub learning_rate: f64,
    /// Number of applied optimizer updates.
    #[serde(default)]
    pub updates_applied: u32,
    /// Number of updates that were skipped because of a gradient that is not finite.
    pub skipped_updates: usize,
    /// Metrics of the loss: ratios, clip fraction, KL divergence to the sampling policy, entropy.
    pub metrics: serde_json::Value,
    /// Metrics of preference pairs, before the update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceReport>,
    pub train_phases: serde_json::Value,
    /// Seconds and memory of the trainer's processes since the step before; `None` for the embedded trainer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainer_ranks: Option<serde_json::Value>,
    /// Share of the trainer's tokens that it computed by the experts that the engine had chosen for them, 0
    /// to 1; `None` if it replays none: its model has no experts, or the recipe does not ask for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing_replayed_share: Option<f64>,
    /// Mean load-balancing loss of the model's routers, without its coefficient; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_aux_loss: Option<f64>,
    /// Largest absolute difference between the log-probabilities of engine and trainer, before the update.
    pub logprob_gap_max: f64,
    /// Seconds from the start of the first episode until the rows were made.
    pub rollout_s: f64,
    /// Seconds of scoring, the update, and the work between them.
    pub train_s: f64,
    /// Seconds until the engine samples every later token with the new weights.
    pub publish_s: f64,
    pub checkpoint_s: f64,
    /// Seconds of `rollout_s` in which the engine computed.
    pub engine_busy_s: f64,
    /// Sampled tokens per second, averaged over the rollout.
    pub sampled_tokens_per_s: f64,
    /// Counts of admission while the step's episodes ran.
    #[serde(default)]
    pub admission: AdmissionRecord,
    /// Number of rows by staleness: updates that the oldest token of the episode was behind the weights.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub staleness: BTreeMap<u64, usize>,
    /// Waiting times of engine and trainer since the previous step.
    #[serde(default)]
    pub waits: WaitTimes,
    /// Counts of the episodes that earlier sessions left unfinished.
    #[serde(default, skip_serializing_if = "ResumedCounts::is_empty")]
    pub resumed: ResumedCounts,
    /// Calls between owner and workers since the previous step; none in a run of one process.
    #[serde(default, skip_serializing_if = "Hops::is_empty")]
    pub hops: Hops,
}

impl StepRecord {
    /// Mean entropy of the trained tokens, in nats; `None` if the step trained nothing.
    pub fn entropy(&self) -> Option<f64> {
        self.metrics["entropy"].as_f64()
    }

    /// Formats the mean entropy.
    pub fn entropy_text(&self) -> String {
        self.entropy()
            .map_or_else(|| "-".into(), |e| format!("{e:.2}"))
    }
}

/// Share of calls with a rewritten history above which the agent or its chat template is likely wrong.
pub const DIVERGENCE_ALARM: f64 = 0.05;

/// Share of calls that were realigned, rolled back or forked.
pub fn divergence(joins: &BTreeMap<String, u64>) -> Option<f64> {
    let all: u64 = joins.values().sum();
    let diverged = ["realign", "rollback", "fork"];
    let diverged: u64 = diverged.iter().filter_map(|j| joins.get(*j)).sum();
    (all > 0).then(|| diverged as f64 / all as f64)
}

/// Token counts and joins of a whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TokenSummary {
    /// Sums over the steps.
    #[serde(flatten)]
    pub counts: TokenCounts,
    /// Number of calls of outside agents by kind of join (`extend`, `fork`, ...).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub joins: BTreeMap<String, u64>,
    /// Number of branches by cause.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub branches: BTreeMap<BranchCause, u64>,
}

impl TokenSummary {
    /// Sums over all steps.
    pub fn of(history: &[StepRecord]) -> Self {
        let mut summary = Self::default();
        for record in history {
            summary.add(record);
        }
        summary
    }

    pub fn add(&mut self, record: &StepRecord) {
        self.counts.add(&record.tokens);
        for (join, count) in &record.joins {
            *self.joins.entry(join.clone()).or_default() += count;
        }
        for (cause, count) in &record.branches {
            *self.branches.entry(*cause).or_default() += count;
        }
    }

    /// Branches by cause as words, such as `compaction 2  sub_agent 1`; empty without branches.
    pub fn branches_text(&self) -> String {
        let told = self.branches.iter();
        let told = told.map(|(cause, n)| format!("{} {n}", cause.name()));
        told.collect::<Vec<_>>().join("  ")
    }
}

/// Sums over the steps of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Wait times of engine and trainer.
    pub waits: WaitTimes,
    /// Number of trained rows by staleness: updates that the oldest token of the episode was behind the
    /// weights.
    pub staleness: BTreeMap<u64, usize>,
    /// Number of episodes that were never started, because the first ones had decided their group.
    pub not_begun: usize,
    /// Counts of the episodes that sessions left unfinished.
    pub resumed: ResumedCounts,
}

impl Totals {
    /// Sums over all steps.
    pub fn of(steps: &[StepRecord]) -> Self {
        let mut totals = Self::default();
        steps.iter().for_each(|record| totals.add(record));
        totals
    }

    pub fn add(&mut self, record: &StepRecord) {
        self.waits.add(&record.waits);
        self.not_begun += record.not_begun;
        self.resumed.add(&record.resumed);
        for (behind, rows) in &record.staleness {
            *self.staleness.entry(*behind).or_default() += rows;
        }
    }
}

/// Counts the joins of the calls in `traces`, by kind.
pub fn joins<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> BTreeMap<String, u64> {
    let mut joins = BTreeMap::new();
    for (name, count) in traces.into_iter().flat_map(|t| &t.outcome.metrics) {
        if let Some(join) = name.strip_prefix("join_") {
            *joins.entry(join.to_owned()).or_default() += *count as u64;
        }
    }
    joins
}

/// Counts the branches of `traces`, by cause.
pub fn branches<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> BTreeMap<BranchCause, u64> {
    let mut branches = BTreeMap::new();
    for (cause, count) in traces.into_iter().flat_map(Trace::branches) {
        *branches.entry(cause).or_default() += u64::from(count);
    }
    branches
}

/// Counts of admission control in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdmissionRecord {
    /// Limit for episodes that hold KV capacity, at the end of the step.
    pub limit: usize,
    /// Number of pauses: an episode waited for a tool, and its KV capacity was given to others.
    pub pauses: u64,
    /// Number of turns that waited for KV capacity.
    pub waited_turns: u64,
    /// Number of these turns that continued without it.
    pub forced_turns: u64,
    /// Seconds for which turns waited, in total.
    pub waited_s: f64,
    /// Number of times that the limit was lowered.
    pub cuts: u64,
    /// Number of times that the limit was raised.
    pub growths: u64,
    /// Number of requests whose KV cache was taken for others while they ran.
    pub preemptions: u64,
}

impl AdmissionRecord {
    /// Builds the record from two readings and the engine's preemptions between them.
    pub fn between(before: &AdmissionReading, after: &AdmissionReading, preemptions: u64) -> Self {
        Self {
            limit: after.limit,
            pauses: after.pauses - before.pauses,
            waited_turns: after.waited_turns - before.waited_turns,
            forced_turns: after.forced_turns - before.forced_turns,
            waited_s: after.waited_s - before.waited_s,
            cuts: after.cuts - before.cuts,
            growths: after.growths - before.growths,
            preemptions,
        }
    }
}

impl AdmissionRecord {
    /// Adds a later step of the same run.
    pub fn add(&mut self, later: &Self) {
        self.limit = later.limit;
        self.pauses += later.pauses;
        self.waited_turns += later.waited_turns;
        self.forced_turns += later.forced_turns;
        self.waited_s += later.waited_s;
        self.cuts += later.cuts;
        self.growths += later.growths;
        self.preemptions += later.preemptions;
    }
}

/// Record of a held-out measurement, one line of `evals.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// `before`, `during` or `after`.
    pub when: String,
    /// Number of training steps done at the measurement.
    pub step: u64,
    pub wall_s: f64,
    pub stats: EpisodeStats,
    /// Gain since the measurement before training; `None` for that one, and if its episodes are gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain: Option<HeldOutGain>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_without_rows_has_no_entropy_rather_than_nan() {
        let nothing = StepRecord::default();
        assert_eq!(nothing.entropy(), None);
        assert_eq!(nothing.entropy_text(), "-");
        let metrics = serde_json::json!({ "entropy": 1.234 });
        let some = StepRecord { metrics, ..nothing };
        assert_eq!(some.entropy_text(), "1.23");
    }

    #[test]
    fn a_reward_that_some_episodes_lack_is_not_0_in_them() {
        let task = sinew_types::Task {
            id: sinew_types::TaskId::new("t"),
            kind: "k".into(),
            ..sinew_types::Task::default()
        };
        let spec = sinew_rollout::EpisodeSpec {
            episode: sinew_types::EpisodeId::new("e"),
            group: sinew_types::GroupId::new("g"),
            task,
            draw: 1,
            purpose: "train".into(),
            seed: 7,
        };
        let sampling = sinew_types::SamplingParams::default();
        let trace = |metrics: &[(&str, f64)]| {
            let mut trace = spec.empty_trace(&sinew_rollout::RunInfo::default(), &sampling);
            let metrics = metrics.iter().map(|(name, v)| ((*name).to_owned(), *v));
            trace.outcome.metrics = metrics.collect();
            trace.end = EpisodeEnd::Terminated;
            trace
        };
        let stats = EpisodeStats::of(&[
            trace(&[("reward/style", 3.0)]),
            trace(&[("unscored/style", 1.0)]),
        ]);
        assert_eq!(stats.metrics["reward/style"], 3.0);
        assert_eq!(stats.metrics["unscored/style"], 0.5);
    }

    #[test]
    fn numbers_of_a_record_survive_json_to_the_bit() {
        let mut state = 7u64;
        for _ in 0..20_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let value = f64::from_bits((state >> 12) | 0x3fd0_0000_0000_0000) - 0.2;
            let record = StepRecord {
                loss: value,
                ..StepRecord::default()
            };
            let text = serde_json::to_string(&record).unwrap();
            let back: StepRecord = serde_json::from_str(&text).unwrap();
            assert_eq!(back.loss.to_bits(), value.to_bits(), "{text}");
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value.to_string(), text);
        }
    }
}
