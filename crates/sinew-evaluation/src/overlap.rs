//! Contamination: n-grams of words that the prompts of a benchmark share with the tasks that a model was
//! trained on.
//!
//! A prompt overlaps if it shares a run of [`NGRAM`] words with a training prompt, as in Brown et al. 2020
//! (arXiv 2005.14165, appendix C). Words are runs of letters and digits in small letters. Shorter prompts
//! overlap if they are equal. Runs that more than a tenth of the benchmark's prompts have are its own
//! instructions, and do not count.

use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Words of a run that two prompts share.
pub const NGRAM: usize = 13;

/// Prompts from which on runs that many of them have are left out.
const MANY: usize = 20;

/// Tasks that a note names.
const SHOWN: usize = 5;

/// Overlap of a benchmark with training tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Overlap {
    /// The training tasks are known.
    Checked {
        /// Training prompts.
        trained: usize,
        /// Tasks of the benchmark.
        tasks: usize,
        /// Tasks that share a run of words with a training prompt.
        overlapping: usize,
        /// Some of them.
        examples: Vec<String>,
    },
    /// The training tasks are not known.
    NotChecked {
        /// Reason.
        why: String,
    },
}

impl Overlap {
    /// One line for a person.
    pub fn line(&self) -> String {
        match self {
            Self::Checked {
                trained,
                tasks,
                overlapping,
                examples,
            } => {
                let named = if examples.is_empty() {
                    String::new()
                } else {
                    format!(": {}", examples.join(", "))
                };
                format!(
                    "{overlapping} of {tasks} prompts share {NGRAM} words in a row with one of {trained} training \
                     prompts{named}"
                )
            }
            Self::NotChecked { why } => format!("not checked: {why}"),
        }
    }
}

/// Hashes of the runs of words of a text; of a shorter one the hash of all its words.
fn runs(text: &str) -> HashSet<u64> {
    let text = text.to_lowercase();
    let words = text.split(|c: char| !c.is_alphanumeric());
    let words: Vec<&str> = words.filter(|w| !w.is_empty()).collect();
    let hash = |run: &[&str]| {
        let mut hasher = DefaultHasher::new();
        run.hash(&mut hasher);
        hasher.finish()
    };
    match words.len() {
        0 => HashSet::new(),
        n if n < NGRAM => [hash(&words)].into(),
        _ => words.windows(NGRAM).map(hash).collect(),
    }
}

/// Compares the prompts of a benchmark, each with the id of its task, with training prompts.
pub fn overlap<'a>(
    prompts: impl IntoIterator<Item = (&'a str, &'a str)>,
    trained: impl IntoIterator<Item = &'a str>,
) -> Overlap {
    let asked: Vec<(&str, HashSet<u64>)> = prompts
        .into_iter()
        .map(|(id, text)| (id, runs(text)))
        .collect();
    let mut prompts_with = HashMap::<u64, usize>::new();
    for run in asked.iter().flat_map(|(_, runs)| runs) {
        *prompts_with.entry(*run).or_default() += 1;
    }
    let most = if asked.len() < MANY {
        usize::MAX
    } else {
        asked.len() / 10
    };
    prompts_with.retain(|_, count| *count <= most);
    // Only runs of the benchmark are kept of the training prompts, which may be many.
    let (mut shared, mut count) = (HashSet::new(), 0);
    for text in trained {
        count += 1;
        shared.extend(
            runs(text)
                .into_iter()
                .filter(|run| prompts_with.contains_key(run)),
        );
    }
    let overlapping = asked.iter().filter(|(_, runs)| !runs.is_disjoint(&shared));
    let ids: Vec<&str> = overlapping.map(|(id, _)| *id).collect();
    Overlap::Checked {
        trained: count,
        tasks: asked.len(),
        overlapping: ids.len(),
        examples: ids.iter().take(SHOWN).map(|id| (*id).to_owned()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str =
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many.";

    fn found(prompts: &[(&str, &str)], trained: &[&str]) -> (usize, Vec<String>) {
        match overlap(prompts.iter().copied(), trained.iter().copied()) {
            Overlap::Checked {
                overlapping,
                examples,
                ..
            } => (overlapping, examples),
            Overlap::NotChecked { why } => panic!("{why}"),
        }
    }

    #[test]
    fn thirteen_words_in_a_row_are_an_overlap() {
        let inside = format!("Solve: {} Thanks!", LONG.to_uppercase());
        assert_eq!(found(&[("a", LONG)], &[&inside]), (1, vec!["a".into()]));
        let twelve: Vec<&str> = LONG.split(' ').take(12).collect();
        assert_eq!(found(&[("a", LONG)], &[&twelve.join(" ")]).0, 0);
        // A short prompt counts if it is the whole one.
        assert_eq!(found(&[("a", "2 + 2?")], &["2 + 2"]).0, 1);
        assert_eq!(found(&[("a", "2 + 2?")], &["2 + 2 = 4", ""]).0, 0);
    }

    #[test]
    fn instructions_that_all_prompts_share_do_not_count() {
        let prompts: Vec<String> = (0..30).map(|i| format!("{LONG} Number {i}?")).collect();
        let prompts: Vec<(&str, &str)> = prompts.iter().map(|p| ("t", p.as_str())).collect();
        assert_eq!(found(&prompts, &[&format!("{LONG} Letter x?")]).0, 0);
        // The whole of a prompt is more than the instructions.
        assert_eq!(found(&prompts, &[&format!("{LONG} Number 7?")]).0, 1);
        let few = &prompts[..3];
        assert_eq!(found(few, &[&format!("{LONG} Letter x?")]).0, 3);
    }

    #[test]
    fn lines_name_tasks_or_the_reason() {
        let checked = overlap([("gsm8k/3", LONG)], [LONG]);
        let line = checked.line();
        assert!(
            line.contains("1 of 1 prompts share 13 words") && line.ends_with("gsm8k/3"),
            "{line}"
        );
        let why = "the model is not of a run".to_owned();
        assert_eq!(
            Overlap::NotChecked { why }.line(),
            "not checked: the model is not of a run"
        );
    }
}
