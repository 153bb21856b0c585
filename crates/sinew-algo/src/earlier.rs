//! Rewards of earlier episodes of a task, as a baseline for an episode without a group.

use serde::{Deserialize, Serialize};

/// Number of episodes that count. The weight of older ones decays, since the policy changes.
const WINDOW: u64 = 64;

/// Mean and squared deviations of the last rewards, by Welford's method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EarlierRewards {
    /// Number of rewards, at most 64.
    count: u64,
    mean: f64,
    /// Sum of squared deviations from the mean.
    squares: f64,
}

impl EarlierRewards {
    /// Adds a reward.
    pub fn add(&mut self, reward: f64) {
        if self.count >= WINDOW {
            self.squares *= (WINDOW - 1) as f64 / WINDOW as f64;
            self.count = WINDOW - 1;
        }
        self.count += 1;
        let off = reward - self.mean;
        self.mean += off / self.count as f64;
        self.squares += off * (reward - self.mean);
    }

    /// Whether there are no rewards.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Mean; 0 without any.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Returns the unbiased standard deviation of these rewards and one more. If the earlier rewards are
    /// equal, including the new one avoids dividing its difference by 0.
    pub(crate) fn std_with(&self, reward: f64) -> f64 {
        let mut all = *self;
        all.add(reward);
        match all.count {
            0 | 1 => 0.0,
            n => (all.squares / (n - 1) as f64).max(0.0).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats;
    use proptest::prelude::*;

    proptest! {
        /// The moments are those of all values while these fit the window.
        #[test]
        fn moments_are_those_of_the_values(
            values in prop::collection::vec(-5.0f64..5.0, 1..60),
            last in -5.0f64..5.0,
        ) {
            let mut earlier = EarlierRewards::default();
            values.iter().for_each(|v| earlier.add(*v));
            prop_assert!((earlier.mean() - stats::mean(&values)).abs() < 1e-9);
            let all: Vec<f64> = values.iter().copied().chain([last]).collect();
            prop_assert!((earlier.std_with(last) - stats::std_unbiased(&all)).abs() < 1e-9);
        }
    }

    #[test]
    fn old_rewards_fade() {
        let mut earlier = EarlierRewards::default();
        (0..64).for_each(|_| earlier.add(0.0));
        (0..640).for_each(|_| earlier.add(1.0));
        assert!(earlier.mean() > 0.99, "{earlier:?}");
    }
}
