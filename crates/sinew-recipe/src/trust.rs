//! `[trust]`: treatment of suspicious rewards.

use crate::RunPlan;
use crate::rule::Rules;
use crate::section::section;
use sinew_algo::trust::{Flag, TrustConfig};

/// Maximum number of path parts that a recipe may name.
const MAX_PROTECTED: usize = 100;
/// Maximum characters of a path part.
const MAX_PATH: usize = 200;
/// Minimum characters of a path part; a shorter one would be found in most calls.
const MIN_PATH: usize = 4;

section! {
    /// Treatment of suspicious rewards: signs that an episode got its reward without doing its task.
    /// `sinew episodes RUN --suspicious` lists them.
    TrustKeys => TrustPlan, "trust" {
        /// Episodes with one of these flags are left out of training, and counted: `solved_too_fast`,
        /// `grader_touched`, `output_forged`, `answer_in_prompt`, `one_answer`. Empty: none are left out.
        exclude: Vec<Flag> = Vec::new();
        /// Parts of paths that belong to the grader, in addition to usual ones such as `grader.py` and
        /// `hidden_test`: a call that names one has the flag `grader_touched`. 4 to 200 characters each, at
        /// most 100.
        protected: Vec<String> = Vec::new();
    }
}

impl RunPlan {
    /// Returns the run's treatment of suspicious rewards.
    pub fn trust(&self) -> TrustConfig {
        TrustConfig {
            exclude: self.trust.exclude.iter().copied().collect(),
            protected: self.trust.protected.clone(),
        }
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    plan.trust.ranges(rules);
    let trust = &plan.trust;
    let twice = (1..trust.exclude.len()).find(|i| trust.exclude[..*i].contains(&trust.exclude[*i]));
    let shown = twice.map_or_else(String::new, |i| trust.exclude[i].to_string());
    rules.allowed("trust.exclude", shown, "each flag once", twice.is_none());
    rules.allowed(
        "trust.protected",
        format!("{} parts of paths", trust.protected.len()),
        "at most 100",
        trust.protected.len() <= MAX_PROTECTED,
    );
    for path in &trust.protected {
        rules.allowed(
            "trust.protected",
            format!("{path:?}"),
            "4 to 200 characters: a shorter part of a path is found in too many calls",
            (MIN_PATH..=MAX_PATH).contains(&path.chars().count()),
        );
    }
}
