//! Several rewards with weights.
//!
//! All rewards of a sum run at the same time, so that the slowest one decides how long a score takes.

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use sinew_env::{Reward, RewardSample, Score, Unscored};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// One reward of a sum.
#[derive(Clone)]
pub struct Term {
    /// Name in metrics, traces and reports.
    pub name: String,
    /// The reward. Its value is measured also if `weight` is 0.
    pub reward: Arc<dyn Reward>,
    /// Factor, finite. 0: a measurement that is not part of the sum.
    pub weight: f64,
    /// Limits of the value before it is multiplied, lower and upper.
    pub clip: Option<[f64; 2]>,
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term")
            .field("name", &self.name)
            .field("weight", &self.weight)
            .field("clip", &self.clip)
            .finish_non_exhaustive()
    }
}

/// The sum of weighted rewards. Its parts are `reward/NAME`, the value of each before clipping and weight,
/// and `reward/NAME/PART`. A measurement that failed is `unscored/NAME` = 1.
///
/// A sample counts as solved if every reward with a weight above 0 says so.
#[derive(Debug)]
pub struct RewardSum {
    terms: Vec<Term>,
}

impl RewardSum {
    /// Creates a sum of one or more terms.
    pub fn new(terms: Vec<Term>) -> Self {
        Self { terms }
    }

    /// The terms, in order.
    pub fn terms(&self) -> &[Term] {
        &self.terms
    }

    /// The sum of scores in the order of the terms.
    fn add(&self, scores: Vec<Result<Score, Unscored>>) -> Result<Score, Unscored> {
        let (mut value, mut solved) = (0.0, true);
        let mut parts = BTreeMap::new();
        for (term, score) in self.terms.iter().zip(scores) {
            let score = match score {
                Ok(score) => score,
                Err(e) if term.weight != 0.0 => {
                    return Err(Unscored::new(format!("{}: {e}", term.name)));
                }
                Err(_) => {
                    parts.insert(format!("unscored/{}", term.name), 1.0);
                    continue;
                }
            };
            solved &= term.weight <= 0.0 || score.is_success();
            let [low, high] = term.clip.unwrap_or([f64::NEG_INFINITY, f64::INFINITY]);
            value += term.weight * score.value.clamp(low, high);
            for (part, v) in score.parts.into_iter().filter(|(p, _)| p != "success") {
                parts.insert(format!("reward/{}/{part}", term.name), v);
            }
            parts.insert(format!("reward/{}", term.name), score.value);
        }
        parts.insert("success".into(), f64::from(u8::from(solved)));
        Score::with_parts(value, parts)
    }
}

impl Reward for RewardSum {
    fn name(&self) -> &str {
        "reward"
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        let all = self.terms.iter().map(|t| t.reward.score(sample));
        join_all(all).map(|scores| self.add(scores)).boxed()
    }
}
