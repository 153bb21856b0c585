//! Statistics of a set of episodes: confidence intervals, spreads, percentiles, pass@k.
//!
//! Intervals of this file treat episodes as independent. Those of one task are similar, so the true interval
//! is wider if there are few tasks and many episodes of each: `clusters` has intervals by task.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Quantile of the normal distribution for a two-sided interval of 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// A confidence interval of a share; the bounds are in [0, 1] and in order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower bound of the 95 % interval.
    pub low: f64,
    /// Upper bound of the 95 % interval.
    pub high: f64,
}

impl Interval {
    /// Computes the Wilson score interval of `successes` in `n` (Wilson 1927); `None` without observations.
    /// Unlike the normal approximation, it stays in [0, 1], and its width is above 0 even for shares of 0 and
    /// 1.
    pub fn wilson(successes: f64, n: f64) -> Option<Self> {
        if n.is_nan() || n <= 0.0 {
            return None;
        }
        let (share, z2) = ((successes / n).clamp(0.0, 1.0), Z * Z);
        let scale = 1.0 / (1.0 + z2 / n);
        let middle = scale * (share + z2 / (2.0 * n));
        let half = scale * Z * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
        // The bound is exact at 0 and 1; rounding must not move it.
        Some(Self {
            low: if share > 0.0 {
                (middle - half).max(0.0)
            } else {
                0.0
            },
            high: if share < 1.0 {
                (middle + half).min(1.0)
            } else {
                1.0
            },
        })
    }

    /// Formats the interval as `12.3 to 45.6 %`.
    pub fn percent(&self) -> String {
        format!("{:.1} to {:.1} %", 100.0 * self.low, 100.0 * self.high)
    }
}

/// Interval of the difference `after - before` of two shares, each as successes and their number, by
/// Newcombe's score method (1998, method 10).
pub fn difference(before: (f64, f64), after: (f64, f64)) -> Option<(f64, f64)> {
    let (b, a) = (
        Interval::wilson(before.0, before.1)?,
        Interval::wilson(after.0, after.1)?,
    );
    let (pb, pa) = (before.0 / before.1, after.0 / after.1);
    let low = (pa - pb) - ((pa - a.low).powi(2) + (b.high - pb).powi(2)).sqrt();
    let high = (pa - pb) + ((a.high - pa).powi(2) + (pb - b.low).powi(2)).sqrt();
    Some((low, high))
}

/// Spread of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Population standard deviation.
    pub std: f64,
    /// Smallest number.
    pub min: f64,
    /// Largest number.
    pub max: f64,
}

impl Spread {
    /// Returns the spread of these numbers; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
        (n > 0.0).then(|| Self {
            std: (squares / n).sqrt(),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

/// Percentiles of counts by the nearest-rank method, so that each is one of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median.
    pub p50: usize,
    /// At least 90 % of the counts are at most this one.
    pub p90: usize,
    /// At least 99 % of the counts are at most this one.
    pub p99: usize,
    /// Largest count.
    pub max: usize,
}

impl Percentiles {
    /// Percentiles of these counts; `None` if there are none.
    pub fn of(mut counts: Vec<usize>) -> Option<Self> {
        counts.sort_unstable();
        let at = |percent: usize| {
            let rank = (percent * counts.len()).div_ceil(100).max(1);
            counts.get(rank - 1).copied()
        };
        Some(Self {
            p50: at(50)?,
            p90: at(90)?,
            p99: at(99)?,
            max: at(100)?,
        })
    }
}

/// Probability that at least one of `k` episodes succeeds, drawn without replacement from `n` with
/// `successes`: `1 - C(n - successes, k) / C(n, k)`, the unbiased estimator of Chen et al. 2021 (arXiv
/// 2107.03374). `k` and `successes` are at most `n`.
pub fn pass_at(k: usize, n: usize, successes: usize) -> f64 {
    let failures = n.saturating_sub(successes);
    let none: f64 = (0..k)
        .map(|i| failures.saturating_sub(i) as f64 / (n - i) as f64)
        .product();
    1.0 - none
}

/// Computes pass@k over tasks, each given as its number of scored episodes and of successes.
pub fn passes(tasks: &[(usize, usize)]) -> BTreeMap<usize, f64> {
    let most = tasks.iter().map(|(n, _)| *n).max().unwrap_or(0);
    let ks = (1..).map(|i| 1usize << i).take_while(|k| *k <= most);
    ks.map(|k| {
        let enough = tasks.iter().filter(|(n, _)| *n >= k);
        let each: Vec<f64> = enough.map(|(n, s)| pass_at(k, *n, *s)).collect();
        (k, each.iter().sum::<f64>() / each.len() as f64)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of Wilson's interval in Brown, Cai & DasGupta (2001) and Newcombe (1998), computed from the
    /// formula with more digits than they print.
    #[test]
    fn bounds_are_those_of_the_formula_and_stay_within_0_and_1() {
        for (successes, n, low, high) in [
            (0.0, 10.0, 0.0, 0.277_532_8),
            (10.0, 10.0, 0.722_467_2, 1.0),
            (81.0, 263.0, 0.255_288_5, 0.366_209_6),
        ] {
            let i = Interval::wilson(successes, n).unwrap();
            assert!((i.low - low).abs() < 1e-6, "{i:?}");
            assert!((i.high - high).abs() < 1e-6, "{i:?}");
        }
        assert_eq!(Interval::wilson(0.0, 0.0), None);
    }

    /// Newcombe 1998, part 2, table II, row (a): 56/70 and 48/80.
    #[test]
    fn a_difference_has_newcombes_interval() {
        let (low, high) = difference((48.0, 80.0), (56.0, 70.0)).unwrap();
        assert!((low - 0.052_4).abs() < 1e-4, "{low}");
        assert!((high - 0.333_9).abs() < 1e-4, "{high}");
    }

    #[test]
    fn pass_at_k_is_the_unbiased_estimate() {
        // 1 of 4: of two drawn without putting back, one is the success in half of the cases.
        assert_eq!(passes(&[(4, 1)]), [(2, 0.5), (4, 1.0)].into());
        // Tasks with too few episodes do not count, and what cannot be known is left out.
        assert_eq!(passes(&[(2, 0), (1, 1)]), [(2, 0.0)].into());
        assert!(passes(&[(1, 1)]).is_empty() && passes(&[]).is_empty());
        let exact = 1.0 - 5.0 * 4.0 / (8.0 * 7.0);
        assert!((passes(&[(8, 3)])[&2] - exact).abs() < 1e-12);
        assert_eq!(passes(&[(8, 3)])[&8], 1.0);
    }

    #[test]
    fn spreads_and_percentiles_are_those_of_the_numbers() {
        let spread = Spread::of(&[1.0, 3.0]).unwrap();
        assert_eq!((spread.std, spread.min, spread.max), (1.0, 1.0, 3.0));
        assert_eq!(Spread::of(&[]), None);
        let p = Percentiles::of((1..=200).rev().collect()).unwrap();
        assert_eq!((p.p50, p.p90, p.p99, p.max), (100, 180, 198, 200));
        let one = Percentiles::of(vec![7]).unwrap();
        assert_eq!((one.p50, one.p99, one.max), (7, 7, 7));
        assert_eq!(Percentiles::of(Vec::new()), None);
    }
}
