//! How sure a measured share is: intervals of 95 %.
//!
//! Episodes count as independent. Those of one task are alike, so that with few tasks and many episodes of
//! each the true interval is wider.

use serde::{Deserialize, Serialize};

/// Quantile of the normal distribution for a two-sided interval of 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// A share with its interval, in order: the bounds are in [0, 1].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// The Wilson score interval of `successes` in `n` (Wilson 1927); none without observations. Unlike the
    /// normal one it stays in [0, 1] and has a width at 0 and 1.
    pub fn wilson(successes: f64, n: f64) -> Option<Self> {
        if n.is_nan() || n <= 0.0 {
            return None;
        }
        let (share, z2) = ((successes / n).clamp(0.0, 1.0), Z * Z);
        let scale = 1.0 / (1.0 + z2 / n);
        let middle = scale * (share + z2 / (2.0 * n));
        let half = scale * Z * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
        // At 0 and 1 the bound is exact; rounding must not move it.
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

    /// `12.3 to 45.6 %`.
    pub fn percent(&self) -> String {
        format!("{:.1} to {:.1} %", 100.0 * self.low, 100.0 * self.high)
    }
}

/// Interval of the difference `after - before` of two shares, each as successes and their number, by
/// Newcombe's score method (1998, method 10).
pub(crate) fn difference(before: (f64, f64), after: (f64, f64)) -> Option<(f64, f64)> {
    let (b, a) = (
        Interval::wilson(before.0, before.1)?,
        Interval::wilson(after.0, after.1)?,
    );
    let (pb, pa) = (before.0 / before.1, after.0 / after.1);
    let low = (pa - pb) - ((pa - a.low).powi(2) + (b.high - pb).powi(2)).sqrt();
    let high = (pa - pb) + ((a.high - pa).powi(2) + (pb - b.low).powi(2)).sqrt();
    Some((low, high))
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
}
