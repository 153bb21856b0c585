//! Sums over sets of episodes, and tests whether a later set is better or worse beyond chance.

use crate::measures::{Interval, difference};

/// Thresholds for a fall of the reward, in standard deviations: of an episode, and of the difference of
/// means.
const REWARD_FALL: f64 = 2.0;
const REWARD_SURE: f64 = 4.0;
/// Threshold for a gain of the reward, in standard deviations of the difference of means.
const REWARD_GAIN: f64 = 3.0;
/// Minimum number of scored episodes in each set for comparing rewards. With fewer, the standard deviation is
/// too uncertain.
const REWARD_LEAST: f64 = 8.0;

/// Sums over a set of episodes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EpisodeSums {
    /// Number of scored episodes.
    pub n: f64,
    /// Number of scored episodes that succeeded.
    pub successes: f64,
    /// Sum of the rewards of the scored episodes.
    pub reward: f64,
    /// Sum of the squared rewards.
    pub squares: f64,
    /// Number of all episodes, including those without a score.
    pub episodes: usize,
    /// Number of episodes that the system failed.
    pub failed: usize,
}

impl EpisodeSums {
    /// Returns the sum of all given sets.
    pub fn sum<'a>(pools: impl IntoIterator<Item = &'a Self>) -> Self {
        pools.into_iter().fold(Self::default(), |a, b| Self {
            n: a.n + b.n,
            successes: a.successes + b.successes,
            reward: a.reward + b.reward,
            squares: a.squares + b.squares,
            episodes: a.episodes + b.episodes,
            failed: a.failed + b.failed,
        })
    }

    /// Share of the scored episodes that succeeded; 0 without any.
    pub fn share(&self) -> f64 {
        self.successes / self.n.max(1.0)
    }

    /// Wilson interval of [`Self::share`]; [0, 1] without scored episodes.
    pub fn interval(&self) -> Interval {
        Interval::wilson(self.successes, self.n).unwrap_or(Interval {
            low: 0.0,
            high: 1.0,
        })
    }

    /// Mean reward of the scored episodes; 0 without any.
    pub fn mean(&self) -> f64 {
        self.reward / self.n.max(1.0)
    }

    fn variance(&self) -> f64 {
        (self.squares / self.n.max(1.0) - self.mean().powi(2)).max(0.0)
    }

    /// Whether there are scored episodes, all of them succeeded, and none failed.
    pub fn is_solved(&self) -> bool {
        self.n > 0.0 && self.failed == 0 && self.share() >= 1.0
    }

    /// Returns by how much the mean reward of `later` is higher: in standard deviations of an episode, and of
    /// the difference of the means. Both are 0 if there are too few episodes.
    fn reward_gain(&self, later: &Self) -> (f64, f64) {
        if self.n.min(later.n) < REWARD_LEAST {
            return (0.0, 0.0);
        }
        let gain = later.mean() - self.mean();
        // Equal rewards have no deviation; what is not rounding is a change then.
        let least = 1e-6 * self.mean().abs().max(later.mean().abs()).max(1e-9);
        let spread = ((self.variance() + later.variance()) / 2.0).sqrt();
        let error =
            (self.variance() / self.n.max(1.0) + later.variance() / later.n.max(1.0)).sqrt();
        (gain / spread.max(least), gain / error.max(least))
    }

    /// Whether the success in `later` has fallen to at most the share `to` of this one, beyond chance.
    /// Without any success, the reward is compared.
    pub fn fell(&self, later: &Self, to: f64) -> bool {
        if self.n == 0.0 || later.n == 0.0 {
            return false;
        }
        if self.successes > 0.0 {
            return later.interval().high < self.interval().low
                && later.share() <= to * self.share();
        }
        let (spread, error) = self.reward_gain(later);
        later.successes == 0.0 && spread < -REWARD_FALL && error < -REWARD_SURE
    }

    /// Whether `later` is better, beyond chance.
    pub fn gained(&self, later: &Self) -> bool {
        if self.n == 0.0 || later.n == 0.0 {
            return false;
        }
        if self.successes + later.successes > 0.0 {
            let gain = difference((self.successes, self.n), (later.successes, later.n));
            return gain.is_some_and(|(low, _)| low > 0.0);
        }
        self.reward_gain(later).1 > REWARD_GAIN
    }

    /// Formats the success as `12.5 % (2 of 16, 3.5 to 36.0 %)`, or the reward if nothing succeeded in either
    /// set.
    pub fn told(&self, by_success: bool) -> String {
        if !by_success {
            return format!("{:.3} (n = {})", self.mean(), self.n);
        }
        format!(
            "{:.1} % ({:.0} of {}, {})",
            100.0 * self.share(),
            self.successes,
            self.n,
            self.interval().percent()
        )
    }
}
