//! The progress of an episode through the steps of its task. Pure: results in, the next stage out.

use crate::manifest::{MinReward, StepStrategy};
use crate::rewards::{self, Rewards};
use sinew_env::{Score, Unscored};

/// The step that follows a verifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The agent gets the step with this index.
    Step(usize),
    /// The episode is over.
    Over,
}

/// Steps and rewards so far.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    steps: usize,
    at: usize,
    strategy: StepStrategy,
    verified: Vec<Rewards>,
    unscored: Option<Unscored>,
    over: bool,
}

impl Progress {
    /// The beginning of a task with so many steps.
    pub(crate) fn new(steps: usize, strategy: StepStrategy) -> Self {
        Self {
            steps,
            at: 0,
            strategy,
            verified: Vec::new(),
            unscored: None,
            over: false,
        }
    }

    /// Index of the present step.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Whether no step follows.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// Number of steps that have rewards.
    pub(crate) fn done(&self) -> usize {
        self.verified.len()
    }

    /// Takes the result of the present step's verifier. A step without rewards, or with smaller ones than
    /// the next step needs, ends the episode. `cut`: a limit ended the agent, and no step follows; those
    /// that were left count as 0 in the mean.
    pub(crate) fn verified(
        &mut self,
        result: Result<Rewards, Unscored>,
        least: Option<&MinReward>,
        cut: bool,
    ) -> Next {
        let passes = match result {
            Ok(rewards) => {
                let passes = rewards::passes(&rewards, least);
                self.verified.push(rewards);
                passes
            }
            Err(why) => {
                self.unscored = Some(why);
                false
            }
        };
        if passes && !cut && self.at + 1 < self.steps {
            self.at += 1;
            return Next::Step(self.at);
        }
        if passes && cut {
            self.verified.resize(self.steps, Rewards::new());
        }
        self.over = true;
        Next::Over
    }

    /// The score of the episode.
    ///
    /// # Errors
    /// The reason why there is none: a step without a readable reward is not 0.
    pub(crate) fn score(&self) -> Result<Score, Unscored> {
        match &self.unscored {
            Some(why) => Err(why.clone()),
            None => rewards::score(&self.verified, self.strategy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reward(value: f64) -> Result<Rewards, Unscored> {
        Ok(Rewards::from([(rewards::MAIN.to_owned(), value)]))
    }

    #[test]
    fn steps_follow_each_other_until_one_is_too_low() {
        let mut all = Progress::new(3, StepStrategy::Mean);
        let least = MinReward::Main(0.5);
        assert_eq!(
            all.verified(reward(1.0), Some(&least), false),
            Next::Step(1)
        );
        assert_eq!(all.verified(reward(0.2), Some(&least), false), Next::Over);
        assert!(all.is_over());
        assert_eq!(all.score().unwrap().value, 0.6);
        let mut last = Progress::new(2, StepStrategy::Final);
        last.verified(reward(1.0), None, false);
        assert_eq!(last.verified(reward(0.25), None, false), Next::Over);
        assert_eq!(last.score().unwrap().value, 0.25);
    }

    #[test]
    fn a_step_without_a_reward_leaves_the_episode_unscored() {
        let mut all = Progress::new(2, StepStrategy::Mean);
        all.verified(reward(1.0), None, false);
        let next = all.verified(Err(Unscored::new("no file")), None, false);
        assert_eq!((next, all.done()), (Next::Over, 1));
        assert_eq!(all.score().unwrap_err().reason, "no file");
    }

    #[test]
    fn steps_that_a_limit_left_out_count_as_nothing() {
        let mut all = Progress::new(4, StepStrategy::Mean);
        assert_eq!(all.verified(reward(1.0), None, true), Next::Over);
        assert_eq!(all.score().unwrap().value, 0.25);
    }

    proptest! {
        /// Every order of results ends after at most as many verifiers as there are steps.
        #[test]
        fn every_episode_ends(steps in 1usize..6, results in prop::collection::vec(any::<Option<u8>>(), 6)) {
            let mut all = Progress::new(steps, StepStrategy::Mean);
            let mut verified = 0;
            for result in results {
                let result = match result {
                    Some(value) => reward(f64::from(value)),
                    None => Err(Unscored::new("none")),
                };
                verified += 1;
                if all.verified(result, None, false) == Next::Over {
                    break;
                }
                prop_assert!(all.at() < steps);
            }
            prop_assert!(all.is_over() && verified <= steps);
        }
    }
}
