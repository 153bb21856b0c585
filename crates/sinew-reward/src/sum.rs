//! Several rewards with weights.
//!
//! All rewards of a sum run at the same time, so that the slowest one decides how long a score takes.
//!
//! Rewards of one sample are added by [`RewardSum`] when its episode ends, rewards of a whole group by
//! [`GroupSum`] when all members have ended. Both sums together are the reward.

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use sinew_env::{GroupReward, Reward, RewardSample, Score, Unscored};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// One reward of a sum: of one sample ([`Reward`]), or of a group ([`GroupReward`]).
pub struct Term<R: ?Sized = dyn Reward> {
    /// Name in metrics, traces and reports.
    pub name: String,
    /// The reward. Its value is measured also if `weight` is 0.
    pub reward: Arc<R>,
    /// Factor, finite. 0: a measurement that is not part of the sum.
    pub weight: f64,
    /// Limits of the value before it is multiplied, lower and upper.
    pub clip: Option<[f64; 2]>,
}

impl<R: ?Sized> Clone for Term<R> {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            reward: Arc::clone(&self.reward),
            weight: self.weight,
            clip: self.clip,
        }
    }
}

impl<R: ?Sized> fmt::Debug for Term<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term")
            .field("name", &self.name)
            .field("weight", &self.weight)
            .field("clip", &self.clip)
            .finish_non_exhaustive()
    }
}

/// Scores of one sample as they are added.
#[derive(Default)]
struct Sum {
    value: f64,
    /// Scores that judge success, and those that count the task as solved.
    judged: usize,
    solved: usize,
    parts: BTreeMap<String, f64>,
}

impl Sum {
    /// Adds the score of one term.
    fn add<R: ?Sized>(
        &mut self,
        term: &Term<R>,
        judges: bool,
        score: Result<Score, Unscored>,
    ) -> Result<(), Unscored> {
        let score = match score {
            Ok(score) => score,
            Err(e) if term.weight != 0.0 => {
                return Err(Unscored::new(format!("{}: {e}", term.name)));
            }
            Err(_) => {
                self.parts.insert(format!("unscored/{}", term.name), 1.0);
                return Ok(());
            }
        };
        if judges && term.weight > 0.0 {
            self.judged += 1;
            self.solved += usize::from(score.is_success());
        }
        let [low, high] = term.clip.unwrap_or([f64::NEG_INFINITY, f64::INFINITY]);
        self.value += term.weight * score.value.clamp(low, high);
        for (part, v) in score.parts.into_iter().filter(|(p, _)| p != "success") {
            self.parts.insert(format!("reward/{}/{part}", term.name), v);
        }
        self.parts
            .insert(format!("reward/{}", term.name), score.value);
        Ok(())
    }

    /// The sum as one score. `unjudged`: success if no term judges it.
    fn score(mut self, unjudged: bool) -> Result<Score, Unscored> {
        let solved = match self.judged {
            0 => unjudged,
            judged => self.solved == judged,
        };
        let solved = f64::from(u8::from(solved));
        self.parts.insert("success".into(), solved);
        Score::with_parts(self.value, self.parts)
    }
}

/// The sum of weighted rewards. Its parts are `reward/NAME`, the value of each before clipping and weight,
/// and `reward/NAME/PART`. A measurement that failed is `unscored/NAME` = 1.
///
/// A sample counts as solved if every reward with a weight above 0 counts it as solved. Penalties do not
/// judge success: if there are only penalties, the environment's own success counts, and without that the
/// sample is not solved.
#[derive(Debug)]
pub struct RewardSum {
    terms: Vec<Term>,
    waits_for_group: bool,
}

impl RewardSum {
    /// Creates a sum of one or more terms.
    pub fn new(terms: Vec<Term>) -> Self {
        Self {
            terms,
            waits_for_group: false,
        }
    }

    /// Returns the sum as the first part of a reward, to which a [`GroupSum`] adds the rest.
    pub fn before_group(self) -> Self {
        Self {
            waits_for_group: true,
            ..self
        }
    }

    /// The terms, in order.
    pub fn terms(&self) -> &[Term] {
        &self.terms
    }

    /// The sum of scores in the order of the terms.
    fn add(
        &self,
        sample: &RewardSample,
        scores: Vec<Result<Score, Unscored>>,
    ) -> Result<Score, Unscored> {
        let mut sum = Sum::default();
        for (term, score) in self.terms.iter().zip(scores) {
            sum.add(term, !term.reward.is_penalty(), score)?;
        }
        let own = sample.metrics.get("env/success").is_some_and(|s| *s > 0.0);
        let unjudged = self.waits_for_group || own;
        Ok(Score {
            waits_for_group: self.waits_for_group,
            ..sum.score(unjudged)?
        })
    }
}

impl Reward for RewardSum {
    fn name(&self) -> &str {
        "reward"
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        let all = self.terms.iter().map(|t| t.reward.score(sample));
        join_all(all).map(|scores| self.add(sample, scores)).boxed()
    }
}

/// The sum of weighted rewards of a group, with the parts of a [`RewardSum`].
///
/// A reward that answers with another number of scores than the group has members leaves all of them
/// unscored.
#[derive(Debug)]
pub struct GroupSum {
    terms: Vec<Term<dyn GroupReward>>,
}

impl GroupSum {
    /// Creates a sum of one or more terms.
    pub fn new(terms: Vec<Term<dyn GroupReward>>) -> Self {
        Self { terms }
    }

    /// Scores of one term, as many as there are samples.
    async fn term(
        term: &Term<dyn GroupReward>,
        samples: &[RewardSample],
    ) -> Vec<Result<Score, Unscored>> {
        let scores = term.reward.score_group(samples).await;
        if scores.len() == samples.len() {
            return scores;
        }
        let (got, wanted) = (scores.len(), samples.len());
        let wrong = Unscored::new(format!("{got} scores for a group of {wanted}"));
        vec![Err(wrong); wanted]
    }
}

impl GroupReward for GroupSum {
    fn name(&self) -> &str {
        "reward"
    }

    fn score_group<'a>(
        &'a self,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Vec<Result<Score, Unscored>>> {
        let all = self.terms.iter().map(|t| Self::term(t, samples));
        let added = join_all(all).map(|scores| {
            let mut rows: Vec<_> = scores.into_iter().map(Vec::into_iter).collect();
            let one = |_| {
                let mut sum = Sum::default();
                for (term, row) in self.terms.iter().zip(&mut rows) {
                    let missing = || Err(Unscored::new("no score"));
                    sum.add(term, true, row.next().unwrap_or_else(missing))?;
                }
                sum.score(true)
            };
            samples.iter().map(one).collect()
        });
        added.boxed()
    }
}
