//! Sums over episodes that are looked at together, and whether a later set of them did better or worse than
//! chance explains.

use crate::measures::{Interval, difference};

/// Standard deviations of a reward's fall: of episodes, and of the difference of means.
const REWARD_FALL: f64 = 2.0;
const REWARD_SURE: f64 = 4.0;
/// Standard deviations of the difference of means for a gain.
const REWARD_GAIN: f64 = 3.0;
/// Least scored episodes of each set whose rewards are compared: the standard deviation of fewer is a guess.
const REWARD_LEAST: f64 = 8.0;

/// Scored episodes that are looked at together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EpisodeSums {
    /// Scored episodes.
    pub n: f64,
    /// Scored episodes that succeeded.
    pub successes: f64,
    /// Sum of the rewards of the scored episodes.
    pub reward: f64,
    /// Sum of their squares.
    pub squares: f64,
    /// All episodes, with those that have no score.
    pub episodes: usize,
    /// Episodes that the system failed.
    pub failed: usize,
}

impl EpisodeSums {
    /// The sum of all of them.
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

    /// Share of the scored that succeeded; 0 without any.
    pub fn share(&self) -> f64 {
        self.successes / self.n.max(1.0)
    }

    /// Wilson's interval of [`Self::share`]; all of [0, 1] without scored episodes.
    pub fn interval(&self) -> Interval {
        Interval::wilson(self.successes, self.n).unwrap_or(Interval {
            low: 0.0,
            high: 1.0,
        })
    }

    /// Mean reward of the scored; 0 without any.
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

    /// Distance of the mean reward of `later` above this one: in standard deviations of an episode, and of
    /// the difference of the means. It is 0 with too few episodes for a standard deviation.
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

    /// Whether success has fallen to `to` of this one or less in `later`, beyond chance; of runs without any
    /// success, the reward.
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

    /// `12.5 % (2 of 16, 3.5 to 36.0 %)`, or the reward where nothing succeeded in either.
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
