//! Win rates: a reward of a group that is made of comparisons of two members.
//!
//! Both orders of a pair are asked, because an answer may lean towards one place; their mean counts. A pair
//! of which one answer is missing does not count, and a member without a counted pair is unscored.
//!
//! In a large group only some pairs are asked. Each member is compared with the next one, with the second
//! next and so on (in a ring), as many whole rounds as the limit allows, so that all members have equally
//! many pairs.

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use sinew_env::{GroupReward, Preference, RewardSample, Score, Unscored};
use std::sync::Arc;

/// Pairs of a group, unless set.
pub const PAIRS: usize = 64;

/// Pairs of one group that are asked at once.
const AT_ONCE: usize = 16;

/// The share of comparisons that a member wins, 0 to 1. Ties count half.
pub struct WinRate {
    preference: Arc<dyn Preference>,
    /// Maximum number of pairs of a group.
    pairs: usize,
}

impl std::fmt::Debug for WinRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WinRate")
            .field("preference", &self.preference.name())
            .field("pairs", &self.pairs)
            .finish()
    }
}

/// Pairs of `members` places in a ring, at most `limit` of them, and whole rounds only.
fn ring(members: usize, limit: usize) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for distance in 1..=members / 2 {
        let half = 2 * distance == members;
        let round = if half { distance } else { members };
        if pairs.len() + round > limit {
            break;
        }
        pairs.extend((0..round).map(|i| (i, (i + distance) % members)));
    }
    pairs
}

impl WinRate {
    /// Compares members by `preference`, in at most `pairs` pairs of a group.
    pub fn new(preference: Arc<dyn Preference>, pairs: usize) -> Self {
        Self { preference, pairs }
    }

    /// Probability that `a` is better than `b`: the mean of both orders.
    async fn prefer(&self, a: &RewardSample, b: &RewardSample) -> Result<f64, Unscored> {
        let orders = (self.preference.prefer(a, b), self.preference.prefer(b, a));
        let (first, second) = futures::join!(orders.0, orders.1);
        let mean = (first? + 1.0 - second?) / 2.0;
        if (0.0..=1.0).contains(&mean) {
            Ok(mean)
        } else {
            Err(Unscored::new(format!(
                "a preference is {mean}; allowed: 0 to 1"
            )))
        }
    }

    async fn rates(&self, samples: &[RewardSample]) -> Vec<Result<Score, Unscored>> {
        let none = |why: String| vec![Err(Unscored::new(why)); samples.len()];
        if samples.len() < 2 {
            return none("a group of one has nothing to compare with".into());
        }
        let pairs = ring(samples.len(), self.pairs);
        if pairs.is_empty() {
            return none(format!(
                "{} members need {} pairs, the limit is {}",
                samples.len(),
                samples.len() - usize::from(samples.len() == 2),
                self.pairs
            ));
        }
        let asked = pairs.into_iter().map(|(i, j)| async move {
            let answer = self.prefer(&samples[i], &samples[j]).await;
            (i, j, answer)
        });
        // The order of the pairs is kept, so that sums do not depend on times.
        let answers: Vec<_> = stream::iter(asked).buffered(AT_ONCE).collect().await;
        let mut missing = None;
        let mut won = vec![(0.0, 0usize); samples.len()];
        for (i, j, answer) in answers {
            match answer {
                Err(e) => missing = missing.or(Some(e)),
                Ok(p) => {
                    won[i] = (won[i].0 + p, won[i].1 + 1);
                    won[j] = (won[j].0 + 1.0 - p, won[j].1 + 1);
                }
            }
        }
        let missing = missing.unwrap_or_else(|| Unscored::new("no comparison"));
        let rate = |(sum, count): (f64, usize)| match count {
            0 => Err(missing.clone()),
            _ => {
                let pairs = [("pairs".to_owned(), count as f64)];
                Score::with_parts(sum / count as f64, pairs.into())
            }
        };
        won.into_iter().map(rate).collect()
    }
}

impl GroupReward for WinRate {
    fn name(&self) -> &str {
        self.preference.name()
    }

    fn score_group<'a>(
        &'a self,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Vec<Result<Score, Unscored>>> {
        Box::pin(self.rates(samples))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use futures::executor::block_on;
    use proptest::prelude::*;
    use sinew_types::{Task, TaskId};

    fn sample(output: &str) -> RewardSample {
        let task = Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            ..Task::default()
        };
        RewardSample::new(task, output)
    }

    /// Prefers the longer output, with a lean towards the first place. It fails on `?`.
    struct Longer {
        lean: f64,
    }

    impl Preference for Longer {
        fn name(&self) -> &str {
            "longer"
        }

        fn prefer<'a>(
            &'a self,
            a: &'a RewardSample,
            b: &'a RewardSample,
        ) -> BoxFuture<'a, Result<f64, Unscored>> {
            let wins = match a.output.len().cmp(&b.output.len()) {
                std::cmp::Ordering::Less => 0.25,
                std::cmp::Ordering::Equal => 0.5,
                std::cmp::Ordering::Greater => 0.75,
            };
            let answer = if a.output == "?" {
                Err(Unscored::new("no answer"))
            } else {
                Ok(wins + self.lean)
            };
            futures::future::ready(answer).boxed()
        }
    }

    fn rates(outputs: &[&str], lean: f64, pairs: usize) -> Vec<Result<f64, String>> {
        let samples: Vec<_> = outputs.iter().map(|o| sample(o)).collect();
        let reward = WinRate::new(Arc::new(Longer { lean }), pairs);
        let scores = block_on(reward.score_group(&samples));
        let value = |s: Result<Score, Unscored>| s.map(|s| s.value).map_err(|e| e.reason);
        scores.into_iter().map(value).collect()
    }

    #[test]
    fn win_rates_do_not_depend_on_the_order_of_asking() {
        for lean in [0.0, 0.25] {
            let found = rates(&["aaa", "a", "aa"], lean, PAIRS);
            assert_eq!(found, [Ok(0.75), Ok(0.25), Ok(0.5)], "lean {lean}");
        }
    }

    #[test]
    fn a_missing_answer_is_no_loss() {
        let found = rates(&["aaa", "?", "a"], 0.0, PAIRS);
        assert_eq!(found[0], Ok(0.75));
        assert_eq!(found[2], Ok(0.25));
        assert_eq!(found[1], Err("no answer".into()));
        // A value outside 0 to 1 is not a probability.
        let wrong = rates(&["a", "b"], f64::NAN, PAIRS);
        assert!(wrong.iter().all(Result::is_err), "{wrong:?}");
    }

    #[test]
    fn a_single_member_and_a_limit_that_is_too_low_are_unscored() {
        let one = rates(&["a"], 0.0, PAIRS);
        assert!(one[0].as_ref().unwrap_err().contains("nothing to compare"));
        let low = rates(&["a", "b", "c"], 0.0, 2);
        assert!(
            low[0]
                .as_ref()
                .unwrap_err()
                .contains("3 members need 3 pairs")
        );
        assert!(rates(&[], 0.0, PAIRS).is_empty());
    }

    proptest! {
        #[test]
        fn pairs_are_unique_bounded_and_fair(members in 2usize..40, limit in 0usize..200) {
            let pairs = ring(members, limit);
            prop_assert!(pairs.len() <= limit);
            let mut count = vec![0; members];
            let mut seen = std::collections::BTreeSet::new();
            for (i, j) in pairs {
                prop_assert!(i != j && seen.insert((i.min(j), i.max(j))));
                count[i] += 1;
                count[j] += 1;
            }
            prop_assert!(count.iter().all(|c| *c == count[0]));
            if limit >= members * (members - 1) / 2 {
                prop_assert_eq!(seen.len(), members * (members - 1) / 2);
            }
        }
    }
}
