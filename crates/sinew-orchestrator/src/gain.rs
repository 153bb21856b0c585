//! The gain of a run on its held-out tasks, paired by task: what the last weights solve more than the first.

use serde::{Deserialize, Serialize};
use sinew_algo::Paired;
use sinew_types::{EpisodeEnd, Trace};
use std::collections::BTreeMap;

/// Successes of one task, and the environment of a mixture that it belongs to.
#[derive(Clone, Debug, Default, PartialEq)]
struct Task {
    member: Option<String>,
    successes: Vec<f64>,
}

/// Successes of a set of held-out episodes by task. Episodes that the system failed and those without a score
/// are left out.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tasks(BTreeMap<String, Task>);

impl Tasks {
    fn of(traces: &[Trace]) -> Self {
        let mut tasks = BTreeMap::<String, Task>::new();
        for trace in traces {
            let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
            if failed || trace.outcome.unscored {
                continue;
            }
            let task = tasks.entry(trace.task.as_str().to_owned()).or_default();
            task.member = trace.member().map(str::to_owned);
            task.successes.push(f64::from(trace.outcome.success));
        }
        Self(tasks)
    }

    /// The difference to a later measurement over the tasks that `fits`.
    fn paired(&self, after: &Self, fits: impl Fn(&Task) -> bool) -> Option<Paired> {
        let both = self.0.iter().filter_map(|(id, before)| {
            let after = after.0.get(id)?;
            let successes = (before.successes.as_slice(), after.successes.as_slice());
            fits(before).then_some(successes)
        });
        Paired::of(both)
    }
}

/// Successes of one measurement by task: of sampled episodes, and of greedy ones if there are any.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeldOutScores {
    sampled: Tasks,
    greedy: Tasks,
}

impl HeldOutScores {
    /// Reads the episodes of a measurement.
    pub fn of(sampled: &[Trace], greedy: &[Trace]) -> Self {
        Self {
            sampled: Tasks::of(sampled),
            greedy: Tasks::of(greedy),
        }
    }
}

/// Gain of held-out success since the first measurement, paired by task, with 95 % intervals clustered by
/// task.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOutGain {
    /// Gain of sampled episodes; `None` if no task was scored in both measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled: Option<Paired>,
    /// Gain of greedy decoding (temperature 0), if both measurements have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy: Option<Paired>,
    /// Gain of sampled episodes of each environment of a mixture, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_env: BTreeMap<String, Paired>,
}

impl HeldOutGain {
    /// The gain from one measurement to a later one; `None` if they share no scored task.
    pub fn between(before: &HeldOutScores, after: &HeldOutScores) -> Option<Self> {
        let members = before.sampled.0.values().filter_map(|t| t.member.clone());
        let members: std::collections::BTreeSet<String> = members.collect();
        let by_env = members.into_iter().filter_map(|name| {
            let own = |task: &Task| task.member.as_ref() == Some(&name);
            let paired = before.sampled.paired(&after.sampled, own)?;
            Some((name, paired))
        });
        let gain = Self {
            by_env: by_env.collect(),
            sampled: before.sampled.paired(&after.sampled, |_| true),
            greedy: before.greedy.paired(&after.greedy, |_| true),
        };
        (gain != Self::default()).then_some(gain)
    }

    /// Lines for a person: the name of each gain, and its points with the interval.
    pub fn rows(&self) -> Vec<(String, String)> {
        let named = [
            ("gain of success", &self.sampled),
            ("gain, greedy", &self.greedy),
        ];
        let whole = named
            .into_iter()
            .filter_map(|(name, gain)| Some((name.to_owned(), gain.as_ref()?.points())));
        let by_env = self.by_env.iter();
        let by_env = by_env.map(|(name, gain)| (format!("gain: {name}"), gain.points()));
        whole.chain(by_env).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{Component, EpisodeId, FailureKind, GroupId, SamplingParams, TaskId};

    fn trace(task: &str, success: bool) -> Trace {
        let spec = sinew_rollout::EpisodeSpec {
            episode: EpisodeId::new("e"),
            group: GroupId::new("g"),
            task: sinew_types::Task {
                id: TaskId::new(task),
                kind: "k".into(),
                ..sinew_types::Task::default()
            },
            draw: 1,
            purpose: "eval".into(),
            seed: 7,
        };
        let run = sinew_rollout::RunInfo::default();
        let mut trace = spec.empty_trace(&run, &SamplingParams::default());
        trace.end = EpisodeEnd::Terminated;
        trace.outcome.success = success;
        let name = task.split(':').next().unwrap_or_default().to_owned();
        trace.provenance.environment = Some(Component {
            name,
            version: String::new(),
        });
        trace
    }

    #[test]
    fn a_gain_is_paired_by_task_and_leaves_out_what_has_no_score() {
        let mut lost = trace("a:2", false);
        lost.end = EpisodeEnd::Failed {
            kind: FailureKind::Engine,
            message: "gone".into(),
        };
        let mut unscored = trace("a:2", false);
        unscored.outcome.unscored = true;
        let before = [trace("a:0", false), trace("a:1", false), trace("a:2", true)];
        let after = [trace("a:0", true), trace("a:1", false), lost, unscored];
        let scores = |traces: &[Trace]| HeldOutScores::of(traces, &traces[..1]);
        let gain = HeldOutGain::between(&scores(&before), &scores(&after)).unwrap();
        let sampled = gain.sampled.unwrap();
        // Task 2 has no score after: it is out of both sides.
        assert_eq!((sampled.tasks, sampled.difference), (2, 0.5));
        assert_eq!((sampled.better, sampled.worse), (1, 0));
        assert_eq!(gain.greedy.unwrap().difference, 1.0);
        assert_eq!(gain.by_env["a"], sampled);
        let rows = gain.rows();
        assert_eq!(rows.len(), 3);
        assert!(
            rows[0].1.starts_with("+50.0 points (95 % interval"),
            "{rows:?}"
        );
        assert!(rows[1].1.contains("no interval"), "{rows:?}");
        assert_eq!(
            HeldOutGain::between(&scores(&before), &HeldOutScores::default()),
            None
        );
    }
}
