//! Adaptive choice of task kinds: kinds of medium difficulty are drawn more often.
//!
//! The success rate of a kind has a Beta posterior over its discounted trials. Its learning signal is the
//! expected variance of the outcome, `E[p(1-p)] = ab / ((a+b)(a+b+1))`, which the gradient of a
//! group-relative objective grows with (Bae et al. 2025, arXiv 2504.03380, section 3). The alternative signal
//! is the variance of the rewards, shrunk towards that of the prior. A share of all draws is uniform, so that
//! every kind is drawn even with a wrong estimate.
//!
//! The signal `progress` weighs a kind by its absolute learning progress: how much its success rate changed
//! between the last two windows of trials, up or down (Oudeyer, Kaplan and Hafner 2007; as a curriculum of
//! tasks: Matiisen et al. 2017, arXiv 1707.00183, with windows as here). A kind without two full windows has
//! the largest weight, so that it is measured first. The other signals choose within an order of kinds
//! ([`Dial`](crate::Dial)) or among tasks ([`Pool`](crate::Pool)).
//!
//! The success rate of a kind does not show where its variance is: if half of its tasks are always solved and
//! half never, the rate is the same as if every task were solved half of the time, but these tasks give no
//! signal to an objective that compares the episodes of a task. The trials of the signal `mixed` are groups,
//! and one is a success if its rewards differ. The weight is the posterior mean, the expected share of groups
//! with a training signal (those that dynamic sampling keeps: Yu et al. 2025, arXiv 2503.14476, section 3.2).
//!
//! The code is pure: equal outcomes and seeds give equal draws.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Basis of a kind's weight.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Signal {
    /// Expected `p(1-p)` of the success rate.
    #[default]
    Success,
    /// Variance of the rewards.
    Reward,
    /// Share of groups whose rewards differ.
    Mixed,
    /// Absolute change of the success rate over two windows of episodes: what is being learned or forgotten.
    Progress,
    /// Types are levels, easiest first by the numbers in their names: those are drawn that the policy solves
    /// as often as `target` says.
    Aim,
    /// Tasks, not types: pools of easy, normal and hard ones by their last group, each with a share.
    Pools,
}

/// Settings of the adaptive choice.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdaptiveConfig {
    /// Basis of the weights.
    pub signal: Signal,
    /// Successes of the prior, above 0.
    pub prior_successes: f64,
    /// Failures of the prior, above 0.
    pub prior_failures: f64,
    /// Share of uniform draws, 0 to 1.
    pub floor: f64,
    /// Factor of older trials at each update, above 0 and at most 1. Below 1, estimates follow a changing
    /// policy.
    pub memory: f64,
    /// Episodes of a window of `progress`.
    pub window: usize,
    /// Success rate that `aim` looks for, above 0 and below 1.
    pub target: f64,
    /// Levels by which `aim` moves if all episodes of a step succeed and none should, above 0.
    pub gain: f64,
    /// Share of draws of hard tasks with `pools`, 0 to 1.
    pub hard_share: f64,
    /// Share of draws of easy tasks with `pools`, 0 to 1; with `hard_share` at most 1.
    pub easy_share: f64,
    /// Success rate up to which a task is hard, 0 to 1.
    pub hard_at: f64,
    /// Success rate from which on a task is easy, above `hard_at` and at most 1.
    pub easy_at: f64,
    /// Shares move between environments, too.
    pub across: bool,
}

impl Default for AdaptiveConfig {
    fn default() -> Self {
        Self {
            signal: Signal::Success,
            prior_successes: 1.0,
            prior_failures: 1.0,
            floor: 0.2,
            memory: 0.9,
            window: 32,
            target: 0.5,
            gain: 0.5,
            hard_share: 0.1,
            easy_share: 0.1,
            hard_at: 0.0,
            easy_at: 1.0,
            across: false,
        }
    }
}

impl AdaptiveConfig {
    /// Returns the first field that is out of range: name, value, allowed values.
    pub fn broken(&self) -> Option<(&'static str, f64, &'static str)> {
        let prior = "a finite number above 0";
        let positive = |v: f64| v.is_finite() && v > 0.0;
        [
            (
                "prior_successes",
                self.prior_successes,
                prior,
                positive(self.prior_successes),
            ),
            (
                "prior_failures",
                self.prior_failures,
                prior,
                positive(self.prior_failures),
            ),
            (
                "floor",
                self.floor,
                "0 to 1",
                (0.0..=1.0).contains(&self.floor),
            ),
            (
                "memory",
                self.memory,
                "above 0, at most 1",
                self.memory > 0.0 && self.memory <= 1.0,
            ),
        ]
        .into_iter()
        .chain(self.further())
        .find(|(.., holds)| !holds)
        .map(|(name, value, allowed, _)| (name, value, allowed))
    }

    /// Returns the fields that only single signals use, each with whether its value is allowed.
    fn further(&self) -> [(&'static str, f64, &'static str, bool); 7] {
        let share = |v: f64| (0.0..=1.0).contains(&v);
        let rest = self.hard_share + self.easy_share <= 1.0;
        let shares = "0 to 1, with `hard_share` and `easy_share` at most 1 together";
        [
            (
                "window",
                self.window as f64,
                "1 to 10000",
                (1..=MAX_WINDOW).contains(&self.window),
            ),
            (
                "target",
                self.target,
                "above 0, below 1",
                self.target > 0.0 && self.target < 1.0,
            ),
            (
                "gain",
                self.gain,
                "above 0, at most 10",
                self.gain > 0.0 && self.gain <= 10.0,
            ),
            (
                "hard_share",
                self.hard_share,
                shares,
                share(self.hard_share) && rest,
            ),
            (
                "easy_share",
                self.easy_share,
                shares,
                share(self.easy_share) && rest,
            ),
            ("hard_at", self.hard_at, "0 to 1", share(self.hard_at)),
            (
                "easy_at",
                self.easy_at,
                "above `hard_at`, at most 1",
                share(self.easy_at) && self.easy_at > self.hard_at,
            ),
        ]
    }
}

/// Longest window of [`Signal::Progress`].
const MAX_WINDOW: usize = 10_000;

/// Discounted sums over the trials of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trials {
    /// Number of trials.
    pub count: f64,
    /// Number of successful trials.
    pub successes: f64,
    /// Sum of rewards.
    pub reward: f64,
    /// Sum of squared rewards.
    pub reward_squared: f64,
}

impl Trials {
    /// Adds an outcome. A non-finite reward counts as 0.
    pub fn add(&mut self, success: bool, reward: f64) {
        let reward = if reward.is_finite() { reward } else { 0.0 };
        self.count += 1.0;
        self.successes += f64::from(u8::from(success));
        self.reward += reward;
        self.reward_squared += reward * reward;
    }

    /// Multiplies all sums by `memory`.
    pub fn forget(&mut self, memory: f64) {
        self.count *= memory;
        self.successes *= memory;
        self.reward *= memory;
        self.reward_squared *= memory;
    }

    /// Posterior mean of the success rate.
    pub fn success_rate(&self, config: &AdaptiveConfig) -> f64 {
        let (a, b) = self.posterior(config);
        a / (a + b)
    }

    /// Parameters of the Beta posterior.
    fn posterior(&self, config: &AdaptiveConfig) -> (f64, f64) {
        let failures = (self.count - self.successes).max(0.0);
        (
            config.prior_successes + self.successes,
            config.prior_failures + failures,
        )
    }

    /// Learning signal of the kind, 0 or above.
    pub fn weight(&self, config: &AdaptiveConfig) -> f64 {
        let product = |a: f64, b: f64| a * b / ((a + b) * (a + b + 1.0));
        match config.signal {
            Signal::Success | Signal::Progress | Signal::Aim | Signal::Pools => {
                let (a, b) = self.posterior(config);
                product(a, b)
            }
            Signal::Mixed => self.success_rate(config),
            Signal::Reward => {
                let (a, b) = (config.prior_successes, config.prior_failures);
                let mean = self.reward / self.count.max(f64::MIN_POSITIVE);
                let spread = (self.reward_squared - self.reward * mean).max(0.0);
                (product(a, b) * (a + b) + spread) / (a + b + self.count)
            }
        }
    }
}

/// Estimates by task kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimates {
    /// Kinds with at least one outcome.
    pub kinds: BTreeMap<String, Trials>,
    /// Success of the newest trials of each kind, at most twice [`AdaptiveConfig::window`], for
    /// [`Signal::Progress`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    recent: BTreeMap<String, VecDeque<bool>>,
}

impl Estimates {
    /// Adds the outcomes of one step: kind, success, reward; with [`Signal::Mixed`] an outcome is that of a
    /// group, and a success if its rewards differ. Earlier outcomes are discounted once per step,
    /// independently of the number of outcomes.
    pub fn update<'a>(
        &mut self,
        config: &AdaptiveConfig,
        outcomes: impl IntoIterator<Item = (&'a str, bool, f64)>,
    ) {
        for trials in self.kinds.values_mut() {
            trials.forget(config.memory);
        }
        for (kind, success, reward) in outcomes {
            let trials = self.kinds.entry(kind.to_owned()).or_default();
            trials.add(success, reward);
            if config.signal == Signal::Progress {
                let recent = self.recent.entry(kind.to_owned()).or_default();
                recent.push_back(success);
                while recent.len() > 2 * config.window {
                    recent.pop_front();
                }
            }
        }
    }

    /// Absolute learning progress of a kind, 0 to 1; 1 before two windows are full.
    pub fn progress(&self, window: usize, kind: &str) -> f64 {
        let recent = self.recent.get(kind).filter(|r| r.len() >= 2 * window);
        let Some(recent) = recent.filter(|_| window > 0) else {
            return 1.0;
        };
        let solved = |from: usize| {
            recent
                .iter()
                .skip(from)
                .take(window)
                .filter(|s| **s)
                .count()
        };
        let (before, after) = (solved(0), solved(window));
        after.abs_diff(before) as f64 / window as f64
    }

    /// Learning signal of a kind.
    fn weight(&self, config: &AdaptiveConfig, kind: &str) -> f64 {
        match config.signal {
            Signal::Progress => self.progress(config.window, kind),
            _ => self
                .kinds
                .get(kind)
                .copied()
                .unwrap_or_default()
                .weight(config),
        }
    }

    /// Probabilities of `kinds` in the same order. They sum to 1.
    pub fn probabilities(&self, config: &AdaptiveConfig, kinds: &[&str]) -> Vec<f64> {
        let weights: Vec<f64> = kinds.iter().map(|k| self.weight(config, k)).collect();
        let total: f64 = weights.iter().sum();
        let uniform = 1.0 / kinds.len() as f64;
        let share = |w: &f64| {
            if total > 0.0 && total.is_finite() {
                config.floor * uniform + (1.0 - config.floor) * w / total
            } else {
                uniform
            }
        };
        weights.iter().map(share).collect()
    }

    /// Draws an index of `kinds` with `uniform` in `[0, 1)`. `None` if `kinds` is empty.
    pub fn draw(&self, config: &AdaptiveConfig, kinds: &[&str], uniform: f64) -> Option<usize> {
        let probabilities = self.probabilities(config, kinds);
        let mut below = 0.0;
        for (i, p) in probabilities.iter().enumerate() {
            below += p;
            if uniform < below {
                return Some(i);
            }
        }
        // The sum may be slightly below 1 because of rounding.
        probabilities.iter().rposition(|p| *p > 0.0)
    }
}

/// Converts the upper 53 of 64 random bits to a number in `[0, 1)`.
pub fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trials(successes: u32, failures: u32) -> Trials {
        let mut t = Trials::default();
        (0..successes).for_each(|_| t.add(true, 1.0));
        (0..failures).for_each(|_| t.add(false, 0.0));
        t
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }

    #[test]
    fn weights_worked_by_hand() {
        let c = AdaptiveConfig::default();
        // Beta(1, 1): 1 / (2 * 3).
        close(Trials::default().weight(&c), 1.0 / 6.0);
        // Beta(3, 3): 9 / (6 * 7); Beta(5, 1): 5 / (6 * 7).
        close(trials(2, 2).weight(&c), 9.0 / 42.0);
        close(trials(4, 0).weight(&c), 5.0 / 42.0);
        close(trials(4, 0).success_rate(&c), 5.0 / 6.0);
        let by_reward = AdaptiveConfig {
            signal: Signal::Reward,
            ..c
        };
        let by_groups = AdaptiveConfig {
            signal: Signal::Mixed,
            ..c
        };
        // Beta(2, 4): one group of four is mixed.
        close(trials(1, 3).weight(&by_groups), 2.0 / 6.0);
        // Spread of (1, 1, 0, 0) about 1/2 is 1; prior: two of 1/6.
        close(trials(2, 2).weight(&by_reward), (2.0 / 6.0 + 1.0) / 6.0);
        close(trials(4, 0).weight(&by_reward), (2.0 / 6.0) / 6.0);
    }

    #[test]
    fn probabilities_worked_by_hand_and_drawn_in_order() {
        let c = AdaptiveConfig {
            floor: 0.5,
            memory: 0.5,
            ..AdaptiveConfig::default()
        };
        let mut e = Estimates::default();
        e.update(
            &c,
            [
                ("easy", true, 1.0),
                ("easy", true, 1.0),
                ("mid", true, 1.0),
                ("mid", false, 0.0),
            ],
        );
        // easy Beta(3, 1): 3/20; mid Beta(2, 2): 4/20; new Beta(1, 1): 1/6.
        let p = e.probabilities(&c, &["easy", "mid", "new"]);
        let total = 0.15 + 0.2 + 1.0 / 6.0;
        close(p[0], 0.5 / 3.0 + 0.5 * 0.15 / total);
        close(p[1], 0.5 / 3.0 + 0.5 * 0.2 / total);
        close(p.iter().sum(), 1.0);
        let draw = |u| e.draw(&c, &["easy", "mid", "new"], u);
        assert_eq!(
            (draw(0.0), draw(p[0]), draw(p[0] + p[1]), draw(1.0)),
            (Some(0), Some(1), Some(2), Some(2))
        );
        assert_eq!(e.draw(&c, &[], 0.3), None);
        // The next step discounts earlier outcomes by half: Beta(1 + 1, 1).
        e.update(&c, []);
        close(e.kinds["easy"].success_rate(&c), 2.0 / 3.0);
    }

    #[test]
    fn draws_prefer_kinds_of_medium_difficulty() {
        let c = AdaptiveConfig::default();
        let mut e = Estimates::default();
        for _ in 0..20 {
            let solved = (0..8).map(|_| ("solved", true, 1.0));
            let hopeless = (0..8).map(|_| ("hopeless", false, 0.0));
            let half = (0..8).map(|i| ("half", i % 2 == 0, f64::from(i % 2)));
            e.update(&c, solved.chain(hopeless).chain(half));
        }
        let kinds = ["half", "hopeless", "solved"];
        let p = e.probabilities(&c, &kinds);
        assert!(
            p[0] > 0.7 && p[1] >= 0.2 / 3.0 && p[2] >= 0.2 / 3.0,
            "{p:?}"
        );
        let mut seen = [0u32; 3];
        for n in 0..30_000u64 {
            let bits = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            seen[e.draw(&c, &kinds, unit(bits)).unwrap()] += 1;
        }
        for (n, p) in seen.iter().zip(&p) {
            assert!((f64::from(*n) / 30_000.0 - p).abs() < 0.01, "{seen:?} {p}");
        }
    }

    #[test]
    fn invalid_settings_are_named() {
        let d = AdaptiveConfig::default();
        assert_eq!(d.broken(), None);
        for (c, name) in [
            (AdaptiveConfig { floor: 1.5, ..d }, "floor"),
            (AdaptiveConfig { memory: 0.0, ..d }, "memory"),
            (
                AdaptiveConfig {
                    prior_failures: 0.0,
                    ..d
                },
                "prior_failures",
            ),
            (
                AdaptiveConfig {
                    prior_successes: f64::NAN,
                    ..d
                },
                "prior_successes",
            ),
        ] {
            assert_eq!(c.broken().unwrap().0, name);
        }
    }

    proptest! {
        #[test]
        fn probabilities_are_a_distribution_with_a_floor(
            outcomes in prop::collection::vec((0usize..5, any::<bool>(), -1e6f64..1e6), 0..200),
            floor in 0.0f64..=1.0,
            memory in 0.01f64..=1.0,
            prior in 0.01f64..50.0,
            by_reward in any::<bool>(),
            u in 0.0f64..1.0,
        ) {
            let signal = if by_reward { Signal::Reward } else { Signal::Success };
            let c = AdaptiveConfig {
                signal, prior_successes: prior, prior_failures: prior, floor, memory,
                ..AdaptiveConfig::default()
            };
            let names = ["a", "b", "c", "d", "e"];
            let mut e = Estimates::default();
            for step in outcomes.chunks(7) {
                e.update(&c, step.iter().map(|(k, s, r)| (names[*k], *s, *r)));
            }
            let p = e.probabilities(&c, &names);
            prop_assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{p:?}");
            prop_assert!(p.iter().all(|p| *p >= floor / 5.0 - 1e-12 && p.is_finite()), "{p:?}");
            let drawn = e.draw(&c, &names, u);
            prop_assert!(drawn.is_some_and(|i| p[i] > 0.0));
            prop_assert_eq!(drawn, e.clone().draw(&c, &names, u));
        }
    }
}
