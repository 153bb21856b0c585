//! The result of a benchmark: means over tasks with intervals, pass@k, counts, tokens and cost.

use crate::overlap::Overlap;
use crate::sample::{Sample, SampleEnd};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_algo::{TaskMean, pass_at};
use std::collections::BTreeMap;

/// Facts of a measurement that its samples do not have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Name of the benchmark, or of the recipe.
    pub bench: String,
    /// Model as it was named.
    pub model: String,
    /// Everything that must be equal where two results are compared, by the keys of a recipe.
    pub settings: BTreeMap<String, Value>,
    /// BLAKE3 of the tasks, where their rows are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks_hash: Option<String>,
    /// Overlap with training tasks.
    pub contamination: Overlap,
    /// Seconds of the measurement.
    pub wall_s: f64,
    /// Price of a million tokens: of prompts, and sampled ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<[f64; 2]>,
    /// The model's servers report neither token ids nor log-probs.
    pub is_text_only: bool,
    /// Tokens that the model's servers counted; `None`: those of the samples count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<ServedTokens>,
    /// The model that played the user, with all that it spent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserTokens>,
}

/// Counts of servers over all sessions of a measurement. Requests of attempts that failed are in them, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedTokens {
    /// Requests that were answered.
    pub requests: u64,
    /// Requests of these whose tokens the server did not count: their bytes are in the sums.
    pub uncounted: u64,
    /// Tokens of messages and tools.
    pub prompt: u64,
    /// Tokens of answers.
    pub sampled: u64,
}

/// A simulated user and what it spent, over all sessions of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UserTokens {
    /// Model as it was named.
    pub model: String,
    /// Questions that it answered, or may have.
    pub calls: u64,
    /// Tokens of questions.
    pub prompt: u64,
    /// Tokens of answers.
    pub sampled: u64,
    /// Cost at its price, in its currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// Numbers of samples by their end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// All samples.
    pub samples: usize,
    /// Samples with a score, which the means are of.
    pub scored: usize,
    /// Samples of these that a limit cut, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub truncated: BTreeMap<String, usize>,
    /// Samples that the scorer could not judge; in no mean.
    pub unscored: usize,
    /// Samples that the system failed; in no mean.
    pub failed: usize,
    /// First reason of a sample without a score.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_missing: Option<String>,
}

/// Measures of a set of samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    /// Success over tasks; `None` without a scored sample.
    pub success: Option<TaskMean>,
    /// Success if samples without a score counted as failures.
    pub as_zero: f64,
    /// Total reward over tasks, where it is not the success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<TaskMean>,
    /// The pass@k rate by `k`, over tasks with at least `k` scored samples: powers of two, and the largest
    /// number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pass_at: BTreeMap<usize, TaskMean>,
    /// The pass^k rate by `k`, the probability that all of `k` samples succeed, for the same numbers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub all_at: BTreeMap<usize, TaskMean>,
    /// Numbers of samples.
    pub counts: Counts,
}

/// Samples of one task.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskSamples {
    /// Id.
    pub task: String,
    /// Type.
    pub kind: String,
    /// Greedy successes: one, or none.
    pub greedy: Vec<f64>,
    /// Sampled successes of all seeds, without samples that have no score.
    pub sampled: Vec<f64>,
    /// Sampled total rewards, in the order of the successes.
    pub rewards: Vec<f64>,
    /// Samples without a score.
    pub missing: usize,
    /// Samples that a limit cut.
    pub truncated: usize,
}

/// Tokens of all samples, or those that servers counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tokens {
    /// Tokens of the prompts of all calls, each counted whole: what a cache saves is not known.
    pub prompt: u64,
    /// Sampled tokens.
    pub sampled: u64,
    /// Cost at the price of the measurement, in its currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// Result of one benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchResult {
    /// Model, settings and contamination.
    #[serde(flatten)]
    pub facts: Facts,
    /// Number of tasks.
    pub tasks: usize,
    /// One greedy sample of each task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy: Option<Measures>,
    /// Sampled ones of all seeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled: Option<Measures>,
    /// Success by type of task: greedy, and sampled.
    pub by_kind: BTreeMap<String, [Option<TaskMean>; 2]>,
    /// Mean success over tasks of each seed.
    pub by_seed: BTreeMap<u64, f64>,
    /// Tokens and cost.
    pub tokens: Tokens,
    /// Mean seconds of an episode, from the start of its environment to its score.
    pub episode_s: f64,
    /// Every task.
    pub per_task: Vec<TaskSamples>,
}

/// The result of some samples.
pub fn summarize(facts: Facts, samples: &[Sample]) -> BenchResult {
    let per_task = per_task(samples);
    let greedy: Vec<&Sample> = samples.iter().filter(|s| s.seed.is_none()).collect();
    let sampled: Vec<&Sample> = samples.iter().filter(|s| s.seed.is_some()).collect();
    let measures = |of: &[&Sample]| (!of.is_empty()).then(|| measures(of));
    let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>();
    let (prompt, out) = match &facts.served {
        Some(served) => (served.prompt, served.sampled),
        None => (sum(|s| s.prompt_tokens), sum(|s| s.sampled_tokens)),
    };
    let seconds: f64 = samples.iter().map(|s| s.seconds).sum();
    let cost = facts
        .price
        .map(|[input, output]| (prompt as f64 * input + out as f64 * output) / 1e6);
    BenchResult {
        tasks: per_task.len(),
        greedy: measures(&greedy),
        by_seed: by_seed(&sampled),
        sampled: measures(&sampled),
        by_kind: by_kind(&per_task),
        tokens: Tokens {
            prompt,
            sampled: out,
            cost,
        },
        episode_s: seconds / samples.len().max(1) as f64,
        per_task,
        facts,
    }
}

/// Samples by task, in the order in which tasks first appear.
fn per_task(samples: &[Sample]) -> Vec<TaskSamples> {
    let mut places = BTreeMap::<&str, usize>::new();
    let mut tasks = Vec::<TaskSamples>::new();
    for sample in samples {
        let at = *places.entry(&sample.task).or_insert_with(|| {
            tasks.push(TaskSamples {
                task: sample.task.clone(),
                kind: sample.kind.clone(),
                ..TaskSamples::default()
            });
            tasks.len() - 1
        });
        let task = &mut tasks[at];
        task.truncated += usize::from(matches!(sample.end, SampleEnd::Truncated { .. }));
        if !sample.is_scored() {
            task.missing += 1;
            continue;
        }
        let success = f64::from(sample.success);
        if sample.seed.is_none() {
            task.greedy.push(success);
        } else {
            task.sampled.push(success);
            task.rewards.push(sample.reward);
        }
    }
    tasks
}

fn measures(samples: &[&Sample]) -> Measures {
    let (mut counts, mut as_zero) = (Counts::default(), Vec::new());
    let mut tasks = BTreeMap::<&str, (Vec<f64>, Vec<f64>, usize)>::new();
    for sample in samples {
        counts.samples += 1;
        let task = tasks.entry(&sample.task).or_default();
        match &sample.end {
            SampleEnd::Failed { why } | SampleEnd::Unscored { why } => {
                let failed = matches!(sample.end, SampleEnd::Failed { .. });
                counts.failed += usize::from(failed);
                counts.unscored += usize::from(!failed);
                counts.first_missing.get_or_insert_with(|| why.clone());
                task.2 += 1;
                continue;
            }
            SampleEnd::Truncated { limit } => {
                *counts.truncated.entry(limit.clone()).or_default() += 1;
            }
            SampleEnd::Scored => {}
        }
        counts.scored += 1;
        task.0.push(f64::from(sample.success));
        task.1.push(sample.reward);
    }
    for (successes, _, missing) in tasks.values() {
        let all = successes.len() + missing;
        as_zero.push(successes.iter().sum::<f64>() / all as f64);
    }
    let successes: Vec<Vec<f64>> = tasks.values().map(|t| t.0.clone()).collect();
    let rewards: Vec<Vec<f64>> = tasks.values().map(|t| t.1.clone()).collect();
    Measures {
        success: TaskMean::of_shares(&successes),
        as_zero: as_zero.iter().sum::<f64>() / as_zero.len() as f64,
        reward: TaskMean::of_numbers(&rewards).filter(|_| rewards != successes),
        pass_at: rates(&successes, pass_at),
        all_at: rates(&successes, all_at),
        counts,
    }
}

/// Probability that all of `k` samples succeed, drawn without replacement from `n` with `successes`:
/// `C(successes, k) / C(n, k)`, the estimator of Yao et al. 2024 (arXiv 2406.12045).
fn all_at(k: usize, n: usize, successes: usize) -> f64 {
    1.0 - pass_at(k, n, n - successes)
}

/// A rate of each task by the number of samples, as a mean over tasks; `of` gets the number, all samples of a
/// task, and its successes.
fn rates(tasks: &[Vec<f64>], of: fn(usize, usize, usize) -> f64) -> BTreeMap<usize, TaskMean> {
    let most = tasks.iter().map(Vec::len).max().unwrap_or(0);
    let powers = (1..usize::BITS).map(|i| 1usize << i);
    let ks = powers
        .take_while(|k| *k < most)
        .chain([most].into_iter().filter(|k| *k > 1));
    let mean = |k: usize| {
        let enough = tasks.iter().filter(|t| t.len() >= k);
        let each = enough.map(|t| {
            let successes = t.iter().filter(|s| **s > 0.0).count();
            vec![of(k, t.len(), successes)]
        });
        let each: Vec<Vec<f64>> = each.collect();
        Some((k, TaskMean::of_shares(&each)?))
    };
    ks.filter_map(mean).collect()
}

/// Mean success over tasks of each seed.
fn by_seed(samples: &[&Sample]) -> BTreeMap<u64, f64> {
    let mut seeds = BTreeMap::<u64, BTreeMap<&str, Vec<f64>>>::new();
    for sample in samples.iter().filter(|s| s.is_scored()) {
        if let Some(seed) = sample.seed {
            let tasks = seeds.entry(seed).or_default();
            let task = tasks.entry(&sample.task).or_default();
            task.push(f64::from(sample.success));
        }
    }
    let mean = |(seed, tasks): (u64, BTreeMap<&str, Vec<f64>>)| {
        let tasks: Vec<Vec<f64>> = tasks.into_values().collect();
        Some((seed, TaskMean::of_shares(&tasks)?.mean))
    };
    seeds.into_iter().filter_map(mean).collect()
}

/// Success by type: greedy, and sampled.
fn by_kind(tasks: &[TaskSamples]) -> BTreeMap<String, [Option<TaskMean>; 2]> {
    let mut kinds = BTreeMap::<&str, [Vec<Vec<f64>>; 2]>::new();
    for task in tasks {
        let [greedy, sampled] = kinds.entry(&task.kind).or_default();
        greedy.push(task.greedy.clone());
        sampled.push(task.sampled.clone());
    }
    let means = |(kind, sets): (&str, [Vec<Vec<f64>>; 2])| {
        (kind.to_owned(), sets.map(|set| TaskMean::of_shares(&set)))
    };
    kinds.into_iter().map(means).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn facts() -> Facts {
        Facts {
            bench: "gsm8k".into(),
            model: "m".into(),
            settings: [("rollout.max_turn_tokens".to_owned(), 512.into())].into(),
            tasks_hash: Some("abc".into()),
            contamination: Overlap::NotChecked {
                why: "the model is not of a run".into(),
            },
            wall_s: 12.0,
            price: Some([1.0, 10.0]),
            is_text_only: false,
            served: None,
            user: None,
        }
    }

    pub(crate) fn sample(task: &str, seed: Option<u64>, success: bool) -> Sample {
        Sample {
            task: task.into(),
            kind: task[..1].to_owned(),
            seed,
            success,
            reward: f64::from(success),
            end: SampleEnd::Scored,
            prompt_tokens: 1000,
            sampled_tokens: 100,
            seconds: 1.0,
        }
    }

    #[test]
    fn tasks_are_the_unit_and_missing_scores_are_counted_apart() {
        let failed = Sample {
            end: SampleEnd::Failed {
                why: "Engine: gone".into(),
            },
            ..sample("b1", Some(0), false)
        };
        let cut = Sample {
            end: SampleEnd::Truncated {
                limit: "turn_tokens".into(),
            },
            ..sample("a1", Some(1), false)
        };
        let samples = [
            sample("a1", Some(0), true),
            cut,
            sample("b1", Some(1), true),
            failed,
            sample("a1", None, true),
            sample("b1", None, false),
        ];
        let result = summarize(facts(), &samples);
        let sampled = result.sampled.as_ref().unwrap();
        // Task a has 1 of 2, task b 1 of 1: the failed sample is in no mean.
        assert_eq!(sampled.success.unwrap().mean, 0.75);
        assert_eq!(sampled.as_zero, 0.5);
        let counts = &sampled.counts;
        assert_eq!((counts.samples, counts.scored, counts.failed), (4, 3, 1));
        assert_eq!(counts.truncated["turn_tokens"], 1);
        assert_eq!(counts.first_missing.as_deref(), Some("Engine: gone"));
        // Only task a has two scored samples.
        assert_eq!(sampled.pass_at[&2].mean, 1.0);
        assert_eq!((sampled.pass_at.len(), sampled.pass_at[&2].tasks), (1, 1));
        assert!(sampled.reward.is_none());
        assert_eq!(result.greedy.unwrap().success.unwrap().mean, 0.5);
        assert_eq!(result.by_seed, [(0, 1.0), (1, 0.5)].into());
        assert_eq!(result.by_kind["b"][1].unwrap().mean, 1.0);
        assert_eq!((result.tokens.prompt, result.tokens.sampled), (6000, 600));
        assert_eq!(result.tokens.cost, Some(0.012));
        let first = &result.per_task[0];
        assert_eq!(
            (first.task.as_str(), first.truncated, first.missing),
            ("a1", 1, 0)
        );
        assert_eq!(result.per_task[1].missing, 1);
    }

    #[test]
    fn a_result_survives_its_file_and_nothing_scored_is_not_0() {
        let missing = Sample {
            end: SampleEnd::Unscored { why: "x".into() },
            ..sample("a1", Some(0), false)
        };
        let result = summarize(facts(), &[missing]);
        let sampled = result.sampled.as_ref().unwrap();
        assert_eq!((sampled.success, sampled.as_zero), (None, 0.0));
        assert!(result.by_seed.is_empty() && result.greedy.is_none());
        let text = serde_json::to_string(&result).unwrap();
        assert_eq!(serde_json::from_str::<BenchResult>(&text).unwrap(), result);
    }

    #[test]
    fn rates_are_given_for_powers_of_two_and_the_largest_number() {
        let task: Vec<f64> = vec![1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let passes = rates(&[task.clone(), task], pass_at);
        assert_eq!(passes.keys().copied().collect::<Vec<_>>(), [2, 4, 6]);
        assert!((passes[&2].mean - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(passes[&6].mean, 1.0);
        assert!(rates(&[vec![1.0]], pass_at).is_empty() && rates(&[], pass_at).is_empty());
        // 3 of 4 succeed: of 6 pairs, 3 are of successes only.
        let all = rates(&[vec![1.0, 1.0, 0.0, 1.0]], all_at);
        assert!((all[&2].mean - 0.5).abs() < 1e-12 && all[&4].mean == 0.0);
    }

    #[test]
    fn tokens_that_a_server_counted_are_those_of_the_result() {
        let served = ServedTokens {
            requests: 2,
            uncounted: 0,
            prompt: 70,
            sampled: 5,
        };
        let facts = Facts {
            served: Some(served),
            ..facts()
        };
        let result = summarize(facts, &[sample("a1", None, true)]);
        assert_eq!((result.tokens.prompt, result.tokens.sampled), (70, 5));
        assert_eq!(result.episode_s, 1.0);
    }
}
