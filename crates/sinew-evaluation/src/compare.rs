//! The paired comparison of two results over the same tasks.

use crate::result::{BenchResult, TaskSamples};
use serde::Serialize;
use sinew_algo::Paired;
use std::collections::{BTreeMap, BTreeSet};

/// Tasks or settings that a refusal names.
const SHOWN: usize = 5;

/// Reason why two results cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// They are of different benchmarks.
    #[error("--compare: {first} and {second} are different benchmarks")]
    Benches {
        /// Name of the first.
        first: String,
        /// Name of the second.
        second: String,
    },
    /// Something was set differently.
    #[error(
        "--compare: {bench} was measured with different settings:\n    {}\n  hint: measure both models with the same \
         options",
        differences.join("\n    ")
    )]
    Settings {
        /// Name of the benchmark.
        bench: String,
        /// Each key with both values.
        differences: Vec<String>,
    },
    /// The tasks are not the same.
    #[error("--compare: {bench} was measured on different tasks: {why}")]
    Tasks {
        /// Name of the benchmark.
        bench: String,
        /// The difference.
        why: String,
    },
    /// No task has a score in both.
    #[error("--compare: no task of {bench} has a score in both")]
    Nothing {
        /// Name of the benchmark.
        bench: String,
    },
}

/// The difference of two models on one benchmark: the second minus the first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the benchmark.
    pub bench: String,
    /// Both models as they were named.
    pub models: [String; 2],
    /// Greedy samples, where both have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub greedy: Option<Paired>,
    /// Samples, where both have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled: Option<Paired>,
    /// Sampled, else greedy, by type of task; empty with one type.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub by_kind: BTreeMap<String, Paired>,
}

/// Compares two results of the same tasks and settings.
///
/// # Errors
/// If they differ in more than the model, by name.
pub fn compare(first: &BenchResult, second: &BenchResult) -> Result<Comparison, CompareError> {
    let bench = first.facts.bench.clone();
    if bench != second.facts.bench {
        return Err(CompareError::Benches {
            first: bench,
            second: second.facts.bench.clone(),
        });
    }
    same_settings(first, second)?;
    same_tasks(first, second)?;
    let others: BTreeMap<&str, &TaskSamples> = second
        .per_task
        .iter()
        .map(|t| (t.task.as_str(), t))
        .collect();
    let both: Vec<(&TaskSamples, &TaskSamples)> = first
        .per_task
        .iter()
        .filter_map(|t| Some((t, *others.get(t.task.as_str())?)))
        .collect();
    let greedy = paired(&both, |t| &t.greedy, None);
    let sampled = paired(&both, |t| &t.sampled, None);
    if greedy.is_none() && sampled.is_none() {
        return Err(CompareError::Nothing { bench });
    }
    let kinds: BTreeSet<&str> = both.iter().map(|(t, _)| t.kind.as_str()).collect();
    let of_kind = |kind: &&str| {
        let found = match sampled {
            Some(_) => paired(&both, |t| &t.sampled, Some(*kind)),
            None => paired(&both, |t| &t.greedy, Some(*kind)),
        };
        Some(((*kind).to_owned(), found?))
    };
    let by_kind = if kinds.len() > 1 {
        kinds.iter().filter_map(of_kind).collect()
    } else {
        BTreeMap::new()
    };
    Ok(Comparison {
        bench,
        models: [first.facts.model.clone(), second.facts.model.clone()],
        greedy,
        sampled,
        by_kind,
    })
}

/// The difference over the tasks of one type, or of all.
fn paired(
    both: &[(&TaskSamples, &TaskSamples)],
    of: fn(&TaskSamples) -> &Vec<f64>,
    kind: Option<&str>,
) -> Option<Paired> {
    let fits = both
        .iter()
        .filter(|(t, _)| kind.is_none_or(|kind| t.kind == kind));
    Paired::of(fits.map(|(a, b)| (of(a).as_slice(), of(b).as_slice())))
}

/// Refuses results with another setting.
fn same_settings(first: &BenchResult, second: &BenchResult) -> Result<(), CompareError> {
    let (a, b) = (&first.facts.settings, &second.facts.settings);
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let shown =
        |value: Option<&serde_json::Value>| value.map_or("not set".to_owned(), |v| v.to_string());
    let differences: Vec<String> = keys
        .into_iter()
        .filter(|key| a.get(*key) != b.get(*key))
        .map(|key| format!("{key}: {} and {}", shown(a.get(key)), shown(b.get(key))))
        .collect();
    if differences.is_empty() {
        return Ok(());
    }
    Err(CompareError::Settings {
        bench: first.facts.bench.clone(),
        differences,
    })
}

/// Refuses results of other tasks: by their ids, and by the hash of their rows where both have one.
fn same_tasks(first: &BenchResult, second: &BenchResult) -> Result<(), CompareError> {
    let refused = |why: String| {
        Err(CompareError::Tasks {
            bench: first.facts.bench.clone(),
            why,
        })
    };
    let ids = |of: &BenchResult| -> BTreeSet<String> {
        of.per_task.iter().map(|t| t.task.clone()).collect()
    };
    let (a, b) = (ids(first), ids(second));
    let only = |some: &BTreeSet<String>, others: &BTreeSet<String>| {
        let gone: Vec<&String> = some.difference(others).collect();
        let names: Vec<&str> = gone.iter().take(SHOWN).map(|id| id.as_str()).collect();
        (gone.len(), names.join(", "))
    };
    let ((in_a, names_a), (in_b, names_b)) = (only(&a, &b), only(&b, &a));
    if in_a + in_b > 0 {
        return refused(format!(
            "{in_a} only in the first ({names_a}), {in_b} only in the second ({names_b})"
        ));
    }
    match (&first.facts.tasks_hash, &second.facts.tasks_hash) {
        (Some(a), Some(b)) if a != b => refused(format!(
            "their ids are equal, but their rows have the hashes {} and {}",
            &a[..a.len().min(12)],
            &b[..b.len().min(12)]
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::summarize;
    use crate::result::tests::{facts, sample};

    fn result(model: &str, successes: [bool; 4]) -> BenchResult {
        let mut facts = facts();
        facts.model = model.into();
        let tasks = ["a1", "a2", "b1", "b2"].into_iter().zip(successes);
        let samples: Vec<_> = tasks
            .flat_map(|(task, solved)| [sample(task, Some(0), solved), sample(task, None, solved)])
            .collect();
        summarize(facts, &samples)
    }

    #[test]
    fn the_second_is_compared_with_the_first_task_by_task() {
        let (first, second) = (
            result("old", [false, true, false, false]),
            result("new", [true, true, false, true]),
        );
        let found = compare(&first, &second).unwrap();
        assert_eq!(found.models, ["old", "new"]);
        let sampled = found.sampled.unwrap();
        assert_eq!(
            (sampled.difference, sampled.better, sampled.worse),
            (0.5, 2, 0)
        );
        assert_eq!(sampled.mcnemar_p, Some(0.5));
        assert_eq!(found.greedy, found.sampled);
        assert_eq!(found.by_kind["a"].difference, 0.5);
    }

    #[test]
    fn other_tasks_and_settings_are_refused_by_name() {
        let first = result("old", [true; 4]);
        let refused = |second: &BenchResult| compare(&first, second).unwrap_err().to_string();
        let mut second = first.clone();
        second
            .facts
            .settings
            .insert("rollout.max_turn_tokens".into(), 256.into());
        second
            .facts
            .settings
            .insert("rollout.top_p".into(), 0.5.into());
        let error = refused(&second);
        assert!(
            error.contains("rollout.max_turn_tokens: 512 and 256"),
            "{error}"
        );
        assert!(error.contains("rollout.top_p: not set and 0.5"), "{error}");
        let mut second = first.clone();
        second.per_task[3].task = "b3".into();
        let error = refused(&second);
        assert!(
            error.contains("1 only in the first (b2), 1 only in the second (b3)"),
            "{error}"
        );
        let mut second = first.clone();
        second.facts.tasks_hash = Some("other".into());
        assert!(
            refused(&second).contains("hashes abc and other"),
            "{}",
            refused(&second)
        );
        let mut second = first.clone();
        second.facts.bench = "math".into();
        assert!(
            refused(&second).contains("gsm8k and math are different"),
            "{}",
            refused(&second)
        );
        let mut second = first.clone();
        for task in &mut second.per_task {
            task.greedy.clear();
            task.sampled.clear();
        }
        assert!(refused(&second).contains("no task of gsm8k has a score in both"));
    }
}
