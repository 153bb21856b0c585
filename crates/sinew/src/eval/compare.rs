//! `sinew eval --compare A B`: the paired test of two measurements.
//!
//! A measurement is the folder of an evaluation (`--bench`), that of one of its benchmarks, or of a run whose
//! held-out tasks were measured: `sinew eval RECIPE`, or the measurement after `sinew train`.

use super::plan::settings;
use crate::output;
use crate::train::CommandEnd;
use serde_json::json;
use sinew_assembly::{Failure, recipe_of, run_reader};
use sinew_evaluation::{BenchResult, Facts, Overlap, Sample, compare, comparison_text, summarize};
use sinew_runs::holds_run;
use sinew_store::{Filter, MAX_PAGE, StoreReader};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Result in the folder of a benchmark.
pub(super) const RESULT: &str = "result.json";

/// Purposes of episodes in runs, the last measurement first: sampled, and greedy.
const PURPOSES: [(&str, &str); 2] = [("eval-after", "greedy-after"), ("eval", "greedy")];

/// Compares the measurements in two folders, benchmark by benchmark: the second minus the first.
///
/// # Errors
/// If a folder holds none, or they are of different benchmarks, tasks or settings.
pub(super) fn compared(first: &Path, second: &Path, json: bool) -> Result<CommandEnd, Failure> {
    let sides = [all_of(first)?, all_of(second)?];
    let [ours, theirs] = &sides;
    let names = |side: &[BenchResult]| -> BTreeSet<String> {
        side.iter().map(|r| r.facts.bench.clone()).collect()
    };
    if names(ours) != names(theirs) {
        let shown = |side: &[BenchResult]| names(side).into_iter().collect::<Vec<_>>().join(", ");
        return Err(Failure::input(format!(
            "--compare: {} has {}, and {} has {}\n  hint: name the folders of one benchmark, such as {}",
            first.display(),
            shown(ours),
            second.display(),
            shown(theirs),
            first
                .join(ours.first().map_or("NAME", |r| r.facts.bench.as_str()))
                .display()
        )));
    }
    let mut found = Vec::new();
    for result in ours {
        let same = theirs
            .iter()
            .filter(|r| r.facts.bench == result.facts.bench);
        for other in same {
            found.push(compare(result, other).map_err(Failure::input)?);
        }
    }
    if !json {
        output::print(&comparison_text(&found));
    }
    Ok(CommandEnd {
        last: json!({ "comparisons": found }),
        trouble: None,
    })
}

/// The results of a folder, or the measured tasks of a run.
fn all_of(folder: &Path) -> Result<Vec<BenchResult>, Failure> {
    let found = results(folder)?;
    if !found.is_empty() {
        return Ok(found);
    }
    if holds_run(folder) {
        return Ok(vec![of_run(folder)?]);
    }
    Err(Failure::input(format!(
        "--compare: {} holds no measurement\n  hint: `sinew eval --bench NAME --model MODEL --run-dir DIR` makes one",
        folder.display()
    )))
}

/// The results in a folder: its own one, or those of its benchmarks by name.
///
/// # Errors
/// If a file is not a result.
pub(super) fn results(folder: &Path) -> Result<Vec<BenchResult>, Failure> {
    let own = folder.join(RESULT);
    if own.is_file() {
        return Ok(vec![read(&own)?]);
    }
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path().join(RESULT)))
        .filter(|path| path.is_file())
        .collect();
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Result<BenchResult, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{}: {e}", path.display()));
    let text = fs::read(path).map_err(|e| failed(&e))?;
    serde_json::from_slice(&text).map_err(|e| failed(&e))
}

/// The last measurement of a run, as it is in its store.
fn of_run(folder: &Path) -> Result<BenchResult, Failure> {
    let recipe = recipe_of(folder)?;
    let store = run_reader(folder).map_err(|e| e.of("--compare"))?;
    let mut samples = Vec::new();
    for (sampled, greedy) in PURPOSES {
        samples.extend(stored(&store, sampled, Some(recipe.seed))?);
        samples.extend(stored(&store, greedy, None)?);
        if !samples.is_empty() {
            break;
        }
    }
    if samples.is_empty() {
        return Err(Failure::input(format!(
            "--compare: {} has no episode of held-out tasks at its end\n  hint: `sinew eval {}/recipe.toml --model {}` \
             measures them",
            folder.display(),
            folder.display(),
            folder.display()
        )));
    }
    // A measurement at temperature 0 is the greedy one.
    if recipe.eval.temperature == 0.0 {
        samples.iter_mut().for_each(|sample| sample.seed = None);
    }
    let sampled = samples.iter().any(|sample| sample.seed.is_some());
    let facts = Facts {
        bench: format!("held-out tasks of {}", recipe.env.name()),
        model: folder.display().to_string(),
        settings: settings(&recipe, sampled.then_some(recipe.eval.temperature))?,
        tasks_hash: None,
        contamination: Overlap::NotChecked {
            why: "held-out tasks of a run".into(),
        },
        wall_s: 0.0,
        price: None,
        is_text_only: false,
        served: None,
        user: None,
    };
    Ok(summarize(facts, &samples))
}

/// The samples of one purpose. The last of several attempts at an episode counts.
fn stored(store: &StoreReader, purpose: &str, seed: Option<u64>) -> Result<Vec<Sample>, Failure> {
    let mut filter = Filter {
        purpose: Some(purpose.to_owned()),
        limit: MAX_PAGE,
        ..Filter::default()
    };
    let mut samples = BTreeMap::new();
    loop {
        let page = store.list(&filter).map_err(Failure::system)?;
        for summary in &page.episodes {
            let trace = store.get(&summary.episode).map_err(Failure::system)?;
            if let Some(trace) = trace {
                samples.insert(summary.draw, Sample::of(&trace, seed));
            }
        }
        match page.next {
            Some(next) => filter.after = Some(next),
            None => return Ok(samples.into_values().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(folder: &Path, name: &str, success: bool) {
        let end = sinew_evaluation::SampleEnd::Scored;
        let sample = |task: &str| Sample {
            task: task.into(),
            kind: "k".into(),
            seed: Some(0),
            success,
            reward: f64::from(success),
            end: end.clone(),
            prompt_tokens: 3,
            sampled_tokens: 2,
            seconds: 1.0,
        };
        let facts = Facts {
            bench: name.into(),
            model: folder.display().to_string(),
            settings: BTreeMap::from([(
                "rollout.max_turns".to_owned(),
                serde_json::Value::from(1),
            )]),
            tasks_hash: Some("h".into()),
            contamination: Overlap::NotChecked { why: "w".into() },
            wall_s: 1.0,
            price: Some([1.0, 2.0]),
            is_text_only: false,
            served: None,
            user: None,
        };
        let result = summarize(facts, &[sample("a"), sample("b")]);
        let place = folder.join(name);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join(RESULT), json!(result).to_string()).unwrap();
        assert_eq!(read(&place.join(RESULT)).unwrap(), result);
    }

    #[test]
    fn folders_are_compared_by_benchmark_and_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        for name in ["gsm8k", "math"] {
            result(&a, name, false);
            result(&b, name, true);
        }
        let end = compared(&a, &b, true).unwrap();
        let found = &end.last["comparisons"];
        assert_eq!(found[1]["bench"], "math");
        assert_eq!(found[1]["sampled"]["difference"], 1.0, "{found}");
        // One benchmark of each.
        let end = compared(&a.join("math"), &b.join("math"), true).unwrap();
        assert_eq!(end.last["comparisons"].as_array().map(Vec::len), Some(1));
        result(&b, "ifeval", true);
        let refused = compared(&a, &b, true).unwrap_err();
        let text = refused.text();
        assert!(text.contains("has gsm8k, math, and"), "{text}");
        assert!(text.contains("has gsm8k, ifeval, math"), "{text}");
        let nothing = compared(dir.path(), &b, true).unwrap_err();
        assert!(nothing.text().contains("holds no measurement"));
    }
}
