//! Pools of tasks by difficulty, each with its share of the draws.
//!
//! A task belongs to a pool by the success rate of its last group: `easy` from `easy_at` on, `hard` up to
//! `hard_at`, `normal` between them and before its first group. Easy and hard tasks teach little and are
//! drawn rarely, so that a task which a changed policy finds harder or easier is noticed. Pools of this kind
//! are the online difficulty buffer of prime-rl (PRIME Intellect 2025, INTELLECT-2, arXiv 2505.07291).

use crate::AdaptiveConfig;

/// A pool of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// The last group of the task had a success rate of at most `hard_at`.
    Hard,
    /// The success rate was between `hard_at` and `easy_at`, or the task has no group with a score.
    Normal,
    /// The last group of the task had a success rate of at least `easy_at`.
    Easy,
}

impl Pool {
    /// All pools, in the order of shares.
    pub const ALL: [Self; 3] = [Self::Hard, Self::Normal, Self::Easy];

    /// Returns the pool of a task whose last group had `trials` scored episodes and `successes`.
    pub fn of(config: &AdaptiveConfig, successes: u32, trials: u32) -> Self {
        if trials == 0 {
            return Self::Normal;
        }
        let rate = f64::from(successes) / f64::from(trials);
        match rate {
            r if r >= config.easy_at => Self::Easy,
            r if r <= config.hard_at => Self::Hard,
            _ => Self::Normal,
        }
    }

    /// Name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hard => "hard",
            Self::Normal => "normal",
            Self::Easy => "easy",
        }
    }

    /// Probabilities of the pools, in the order of [`Pool::ALL`]. `sizes` has the number of tasks of each.
    /// The share of an empty pool is distributed among the others.
    pub fn shares(config: &AdaptiveConfig, sizes: [usize; 3]) -> [f64; 3] {
        let normal = 1.0 - config.hard_share - config.easy_share;
        let mut shares = [config.hard_share, normal, config.easy_share];
        for (share, size) in shares.iter_mut().zip(sizes) {
            if size == 0 {
                *share = 0.0;
            }
        }
        let total: f64 = shares.iter().sum();
        if total > 0.0 {
            shares.map(|s| s / total)
        } else {
            // The pools that have tasks have no shares: tasks are drawn uniformly.

            let all = sizes.iter().sum::<usize>().max(1) as f64;
            sizes.map(|n| n as f64 / all)
        }
    }
}
