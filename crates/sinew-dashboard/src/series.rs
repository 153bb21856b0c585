//! Records of steps as curves: columns of numbers, thinned where a run is long.
//!
//! It is pure. A value that was not measured is `None`, and not a point: a step that trained nothing has no
//! gradient, not one of 0.

use serde::Serialize;
use sinew_orchestrator::{EpisodeStats, EvalRecord, Interval, StepRecord};
use std::collections::{BTreeMap, BTreeSet};

/// Points of a curve that a page gets at most.
pub(crate) const MAX_POINTS: usize = 1200;
/// Curves of one chart, such as the environments of a mixture.
const MAX_CURVES: usize = 12;

/// All curves of a run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Curves {
    /// The step of each point.
    step: Vec<u64>,
    /// Seconds of the run at each point.
    wall_s: Vec<f64>,
    /// Charts in the order of the page.
    charts: Vec<Chart>,
}

/// Curves that share an axis.
#[derive(Debug, Serialize)]
pub(crate) struct Chart {
    /// Id for links.
    id: String,
    /// The heading that it stands under.
    section: &'static str,
    /// Title above the chart.
    title: String,
    /// Unit of the values; `share` begins at 0.
    unit: &'static str,
    /// Up to a dozen series.
    series: Vec<Series>,
}

/// A curve: a value for each step, or separate points.
#[derive(Debug, Serialize)]
pub(crate) struct Series {
    /// Name in the legend.
    name: String,
    /// Values, one for each step in [`Curves`]; empty if there are points.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    values: Vec<Option<f64>>,
    /// Spread of each value, for shares of episodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    spreads: Vec<Option<Spread>>,
    /// Step and value of measurements that not every step has, and how sure they are where they are shares.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    points: Vec<(u64, f64, Option<Spread>)>,
}

/// A share of scored episodes: its interval of 95 %, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) n: usize,
}

impl Spread {
    /// Spread of `share` in `n` episodes; none without episodes.
    pub(crate) fn of(share: f64, n: usize) -> Option<Self> {
        let Interval { low, high } = Interval::wilson(share * n as f64, n as f64)?;
        Some(Self { low, high, n })
    }
}

/// Success over several steps as one share with its spread; none without a scored episode.
pub(crate) fn pooled<'a>(
    steps: impl IntoIterator<Item = &'a EpisodeStats>,
) -> Option<(f64, Spread)> {
    pooled_shares(steps.into_iter().map(|s| (s.success, s.scored())))
}

/// Shares, each of its number of episodes, as one share with its spread.
fn pooled_shares(shares: impl IntoIterator<Item = (f64, usize)>) -> Option<(f64, Spread)> {
    let (mut n, mut successes) = (0, 0.0);
    for (share, of) in shares {
        n += of;
        successes += share * of as f64;
    }
    let share = successes / n.max(1) as f64;
    Some((share, Spread::of(share, n)?))
}

/// Makes the curves of a run.
pub(crate) fn curves(steps: &[StepRecord], evals: &[EvalRecord]) -> Curves {
    let maker = Maker {
        steps,
        stride: steps.len().div_ceil(MAX_POINTS).max(1),
    };
    let last = |part: &[StepRecord]| part.last().map(|r| (r.step, r.wall_s));
    let ends: Vec<(u64, f64)> = steps.chunks(maker.stride).filter_map(last).collect();
    let mut charts = Vec::new();
    maker.learning(evals, &mut charts);
    maker.policy(&mut charts);
    maker.episodes(&mut charts);
    maker.time(&mut charts);
    charts.retain(|c| !c.series.is_empty());
    Curves {
        step: ends.iter().map(|e| e.0).collect(),
        wall_s: ends.iter().map(|e| e.1).collect(),
        charts,
    }
}

/// Reads columns of the records.
struct Maker<'a> {
    /// Steps in order.
    steps: &'a [StepRecord],
    /// Records that one point averages.
    stride: usize,
}

/// Success with the number of episodes that it is of.
fn share(s: &EpisodeStats) -> (f64, usize) {
    (s.success, s.scored())
}

/// Whether a mean over scored episodes exists.
fn is_scored(s: &EpisodeStats) -> bool {
    s.scored() > 0
}

impl Maker<'_> {
    /// A curve; none if no step has the value.
    fn series(&self, name: &str, value: impl Fn(&StepRecord) -> Option<f64>) -> Option<Series> {
        let mean = |part: &[StepRecord]| {
            let known: Vec<f64> = part
                .iter()
                .filter_map(&value)
                .filter(|v| v.is_finite())
                .collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        };
        let values: Vec<Option<f64>> = self.steps.chunks(self.stride).map(mean).collect();
        values.iter().any(Option::is_some).then(|| Series {
            name: name.to_owned(),
            values,
            spreads: Vec::new(),
            points: Vec::new(),
        })
    }

    /// Success of the scored episodes of some statistics, with its spread. A point for several steps is the
    /// success over all of their episodes.
    fn success(
        &self,
        name: &str,
        of: impl Fn(&StepRecord) -> Option<(f64, usize)>,
    ) -> Option<Series> {
        let chunks = self.steps.chunks(self.stride);
        let all: Vec<Option<(f64, Spread)>> = chunks
            .map(|part| pooled_shares(part.iter().filter_map(&of)))
            .collect();
        all.iter().any(Option::is_some).then(|| Series {
            name: name.to_owned(),
            values: all.iter().map(|p| p.map(|p| p.0)).collect(),
            spreads: all.iter().map(|p| p.map(|p| p.1)).collect(),
            points: Vec::new(),
        })
    }

    /// A number that the loss measured, of steps that trained.
    fn metric(&self, name: &str, key: &str) -> Option<Series> {
        self.trained(name, |r| r.metrics[key].as_f64())
    }

    /// A value of steps that trained something.
    fn trained(&self, name: &str, value: impl Fn(&StepRecord) -> Option<f64>) -> Option<Series> {
        self.series(name, |r| {
            value(r).filter(|_| r.rows > 0 && r.updates_applied > 0)
        })
    }

    /// A mean over scored episodes; none for a step without any.
    fn means(&self, name: &str, value: impl Fn(&EpisodeStats) -> f64) -> Option<Series> {
        self.series(name, |r| is_scored(&r.rollout).then(|| value(&r.rollout)))
    }

    /// Success and reward, as a whole and by part.
    fn learning(&self, evals: &[EvalRecord], out: &mut Vec<Chart>) {
        let section = "Learning";
        let held_out = points("held out", evals, success_of);
        let success = self.success("training", |r| Some(share(&r.rollout)));
        out.push(chart(
            "success",
            section,
            "Success",
            "share",
            [success, held_out],
        ));
        let reward = self.means("reward", |s| s.reward);
        out.push(chart(
            "reward",
            section,
            "Reward of training episodes",
            "mean",
            [reward],
        ));
        let greedy = points("held out, greedy", evals, |s| {
            Some((s.greedy_success?, None))
        });
        let sampled = points("held out", evals, success_of);
        let envs = names(evals.iter().map(|e| &e.stats.by_env));
        let by_env = envs
            .iter()
            .map(|name| points(name, evals, |s| success_of(s.by_env.get(name)?)));
        let all = [sampled, greedy].into_iter().chain(by_env);
        out.push(chart("heldout", section, "Held-out success", "share", all));
        self.parts(section, out);
    }

    /// Reward by component, success by environment and by type of task. A single curve repeats that of the
    /// whole, and is left out for types of task.
    fn parts(&self, section: &'static str, out: &mut Vec<Chart>) {
        let parts = names(self.steps.iter().map(|r| &r.rollout.metrics));
        let is_reward = |n: &&String| n.starts_with("reward/");
        let parts = parts.iter().filter(is_reward).map(|name| {
            let short = name.trim_start_matches("reward/");
            self.series(short, |r| r.rollout.metrics.get(name).copied())
        });
        out.push(chart(
            "components",
            section,
            "Components of the reward",
            "mean",
            parts,
        ));
        let envs = names(self.steps.iter().map(|r| &r.rollout.by_env));
        let by_env = envs
            .iter()
            .map(|name| self.success(name, |r| r.rollout.by_env.get(name).map(share)));
        out.push(chart(
            "by-env",
            section,
            "Success by environment",
            "share",
            by_env,
        ));
        let kinds = names(self.steps.iter().map(|r| &r.rollout.success_by_kind));
        let by_kind = kinds.iter().filter(|_| kinds.len() > 1).map(|name| {
            self.success(name, |r| {
                let of = &r.rollout;
                Some((
                    *of.success_by_kind.get(name)?,
                    *of.scored_by_kind.get(name)?,
                ))
            })
        });
        out.push(chart(
            "by-type",
            section,
            "Success by type of task",
            "share",
            by_kind,
        ));
    }

    /// Effect of the update on the policy, and agreement of engine and trainer.
    fn policy(&self, out: &mut Vec<Chart>) {
        let section = "Policy";
        let entropy = self.trained("entropy", StepRecord::entropy);
        out.push(chart("entropy", section, "Entropy", "nats", [entropy]));
        let kl = [
            self.metric("to the sampling policy", "kl_behaviour_k3"),
            self.metric("to the reference", "kl_reference"),
            self.metric("to the teacher", "kl_teacher"),
        ];
        out.push(chart("kl", section, "KL divergence", "nats", kl));
        let clip = [
            self.metric("clipped", "clip_fraction"),
            self.metric("masked", "masked_fraction"),
            self.metric("correction truncated", "truncated_fraction"),
        ];
        out.push(chart(
            "clip",
            section,
            "Clip fraction",
            "share of tokens",
            clip,
        ));
        let ratio = [
            self.metric("mean", "ratio_mean"),
            self.metric("smallest", "ratio_min"),
            self.metric("largest", "ratio_max"),
        ];
        out.push(chart(
            "ratio",
            section,
            "Ratio to the old policy",
            "ratio",
            ratio,
        ));
        let norm = self.trained("norm", |r| Some(r.grad_norm));
        out.push(chart(
            "grad",
            section,
            "Gradient norm, before clipping",
            "norm",
            [norm],
        ));
        let loss = self.trained("loss", |r| Some(r.loss));
        out.push(chart("loss", section, "Loss", "", [loss]));
        let gap = [
            self.trained("largest", |r| Some(r.logprob_gap_max)),
            self.metric("mean", "gap_mean_abs"),
        ];
        out.push(chart(
            "gap",
            section,
            "Sampler and trainer: gap of log-probs",
            "nats",
            gap,
        ));
        let staleness = [
            self.series("mean", |r| mean_staleness(&r.staleness)),
            self.series("oldest", |r| r.staleness.keys().last().map(|n| *n as f64)),
        ];
        out.push(chart(
            "staleness",
            section,
            "Staleness of trained rows",
            "updates",
            staleness,
        ));
        let rate = self.trained("learning rate", |r| Some(r.learning_rate));
        out.push(chart("rate", section, "Learning rate", "", [rate]));
    }

    /// Lengths, and the signs of a collapse.
    fn episodes(&self, out: &mut Vec<Chart>) {
        let section = "Episodes";
        let tokens = self.means("tokens", |s| s.sampled_tokens);
        out.push(chart(
            "length",
            section,
            "Sampled tokens an episode",
            "tokens",
            [tokens],
        ));
        let turns = self.means("turns", |s| s.turns);
        out.push(chart(
            "turns",
            section,
            "Turns an episode",
            "turns",
            [turns],
        ));
        let share = |n: usize, r: &StepRecord| {
            let all = r.rollout.episodes + r.retried;
            (all > 0).then(|| n as f64 / all as f64)
        };
        let collapse = [
            self.series("in groups of equal reward", |r| {
                share(r.samples.equal.count, r)
            }),
            self.series("truncated", |r| share(r.rollout.truncated, r)),
            self.series("left out, all reasons", |r| {
                share(r.dropped.values().sum(), r)
            }),
            self.series("failed by the system", |r| share(r.rollout.failed, r)),
        ];
        out.push(chart(
            "signs",
            section,
            "Signs of a collapse",
            "share of episodes",
            collapse,
        ));
    }

    /// Seconds, speed, and what waited for the engine.
    fn time(&self, out: &mut Vec<Chart>) {
        let section = "Time";
        let seconds = [
            self.series("rollout", |r| Some(r.rollout_s)),
            self.trained("training", |r| Some(r.train_s)),
            self.series("engine busy", |r| Some(r.engine_busy_s)),
            self.series("weights and disk", |r| Some(r.publish_s + r.checkpoint_s)),
        ];
        out.push(chart("seconds", section, "Seconds a step", "s", seconds));
        let speed = self.series("tokens", |r| Some(r.sampled_tokens_per_s));
        out.push(chart(
            "speed",
            section,
            "Sampled tokens a second",
            "tokens/s",
            [speed],
        ));
        let waits = [
            self.series("turns that waited", |r| {
                Some(r.admission.waited_turns as f64)
            }),
            self.series("preemptions", |r| Some(r.admission.preemptions as f64)),
        ];
        out.push(chart(
            "admission",
            section,
            "Waiting for KV capacity",
            "a step",
            waits,
        ));
    }
}

/// Mean over rows; none without any.
fn mean_staleness(by_age: &BTreeMap<u64, usize>) -> Option<f64> {
    let rows: usize = by_age.values().sum();
    let sum: f64 = by_age.iter().map(|(age, n)| *age as f64 * *n as f64).sum();
    (rows > 0).then(|| sum / rows as f64)
}

/// The keys of many maps, at most [`MAX_CURVES`].
fn names<'a, V: 'a>(maps: impl Iterator<Item = &'a BTreeMap<String, V>>) -> Vec<String> {
    let all: BTreeSet<&String> = maps.flat_map(BTreeMap::keys).collect();
    all.into_iter().take(MAX_CURVES).cloned().collect()
}

/// A chart of the curves that exist.
fn chart(
    id: &str,
    section: &'static str,
    title: &str,
    unit: &'static str,
    series: impl IntoIterator<Item = Option<Series>>,
) -> Chart {
    Chart {
        id: id.to_owned(),
        section,
        title: title.to_owned(),
        unit,
        series: series.into_iter().flatten().collect(),
    }
}

/// A share of a measurement, and how sure it is.
type MeasuredShare = (f64, Option<Spread>);

/// Success of a measurement; none if none of its episodes has a score.
fn success_of(s: &EpisodeStats) -> Option<MeasuredShare> {
    is_scored(s).then(|| (s.success, Spread::of(s.success, s.scored())))
}

/// A curve of held-out measurements; none if none has the value.
fn points(
    name: &str,
    evals: &[EvalRecord],
    value: impl Fn(&EpisodeStats) -> Option<MeasuredShare>,
) -> Option<Series> {
    let point = |e: &EvalRecord| {
        let (value, spread) = value(&e.stats).filter(|v| v.0.is_finite())?;
        Some((e.step, value, spread))
    };
    let points: Vec<_> = evals.iter().filter_map(point).collect();
    (!points.is_empty()).then(|| Series {
        name: name.to_owned(),
        values: Vec::new(),
        spreads: Vec::new(),
        points,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> StepRecord {
        let mut r = StepRecord {
            step,
            rows: 4,
            updates_applied: 1,
            staleness: [(0, 3), (2, 1)].into(),
            metrics: serde_json::json!({"entropy": 0.5}),
            ..StepRecord::default()
        };
        r.rollout.episodes = 8;
        r.rollout.success = 0.25;
        r.rollout.metrics = [("reward/format".into(), 0.5), ("calls".into(), 2.0)].into();
        r
    }

    fn values(curves: &Curves, chart: &str, series: &str) -> Vec<Option<f64>> {
        let chart = curves.charts.iter().find(|c| c.id == chart).unwrap();
        let series = chart.series.iter().find(|s| s.name == series).unwrap();
        series.values.clone()
    }

    #[test]
    fn what_was_not_measured_is_no_point_and_no_curve() {
        let mut steps = vec![record(1), record(2)];
        steps[1].updates_applied = 0;
        steps[1].rollout.failed = 8;
        let curves = curves(&steps, &[]);
        assert_eq!(values(&curves, "entropy", "entropy"), [Some(0.5), None]);
        assert_eq!(values(&curves, "success", "training"), [Some(0.25), None]);
        assert_eq!(values(&curves, "staleness", "mean"), [Some(0.5), Some(0.5)]);
        assert_eq!(values(&curves, "components", "format"), [Some(0.5); 2]);
        assert!(
            curves
                .charts
                .iter()
                .all(|c| c.id != "by-env" && c.id != "kl")
        );
    }

    #[test]
    fn a_long_run_is_thinned_to_means() {
        let steps: Vec<StepRecord> = (1..=5000).map(record).collect();
        let curves = curves(&steps, &[]);
        assert!(curves.step.len() <= MAX_POINTS);
        assert_eq!(curves.step.last(), Some(&5000));
        assert_eq!(
            values(&curves, "success", "training").len(),
            curves.step.len()
        );
    }
}
