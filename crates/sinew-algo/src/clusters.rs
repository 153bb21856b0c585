//! Means over tasks with intervals that hold for several samples of a task, and differences of two sets of
//! samples over the same tasks.
//!
//! Samples of one task are alike, so a task is a cluster (Miller 2024, "Adding error bars to evals",
//! arXiv 2411.00640). With `T` tasks of means `s_1 ... s_T`, each of the same weight, whatever its number of
//! samples:
//!
//! ```text
//! mean      p  = (1/T) sum_i s_i
//! error     SE = sqrt( sum_i (s_i - p)^2 / (T (T - 1)) )
//! interval  p ± t SE,  t: quantile 0.975 of Student's distribution with T - 1 degrees of freedom
//! ```
//!
//! This is Miller's cluster-robust error for tasks of equal weight, with the factor `T / (T - 1)` of small
//! samples. Differences use the same formula with `d_i = b_i - a_i`, so that what makes a task hard for both
//! sides cancels.

use crate::measures::Interval;
use serde::{Deserialize, Serialize};

/// Factor of the standard error of a difference that is found in 80 % of comparisons, at a two-sided level of
/// 5 %: the normal quantiles 0.975 and 0.8, added.
const DETECTABLE: f64 = 1.959_963_984_540_054 + 0.841_621_233_572_914_3;

/// Method of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IntervalMethod {
    /// Wilson's score interval over tasks: one yes or no for each task, or all tasks at 0 or at 1, where an
    /// error of 0 would claim certainty.
    Wilson,
    /// The cluster-robust error with Student's quantile.
    Clustered,
    /// There is no interval: a single task.
    None,
}

/// A mean over tasks with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskMean {
    /// Mean of the tasks' means.
    pub mean: f64,
    /// Cluster-robust standard error; `None` for a single task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub se: Option<f64>,
    /// Bounds of the 95 % interval; `None` for a single task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Method of the interval.
    pub method: IntervalMethod,
    /// Number of tasks.
    pub tasks: usize,
    /// Number of samples of all tasks.
    pub samples: usize,
}

impl TaskMean {
    /// The mean of shares in 0 to 1, such as successes; the interval stays in these bounds. Tasks without
    /// samples are left out; `None` if there are no others.
    pub fn of_shares(tasks: &[Vec<f64>]) -> Option<Self> {
        let mut of = Self::of_numbers(tasks)?;
        let single = of.samples == of.tasks;
        let plain = |s: &f64| *s == 0.0 || *s == 1.0;
        let binary = single && tasks.iter().flatten().all(plain);
        if binary || of.mean <= 0.0 || of.mean >= 1.0 {
            let tasks = of.tasks as f64;
            of.interval = Interval::wilson(of.mean * tasks, tasks);
            of.method = IntervalMethod::Wilson;
            return Some(of);
        }
        of.interval = of.interval.map(|i| Interval {
            low: i.low.max(0.0),
            high: i.high.min(1.0),
        });
        Some(of)
    }

    /// The mean of any numbers, such as rewards. Tasks without samples are left out; `None` if there are no
    /// others.
    pub fn of_numbers(tasks: &[Vec<f64>]) -> Option<Self> {
        let means: Vec<f64> = tasks.iter().filter_map(|t| mean(t)).collect();
        let middle = mean(&means)?;
        let se = error(&means, middle);
        let t = quantile(means.len().saturating_sub(1));
        Some(Self {
            mean: middle,
            se,
            interval: se.map(|se| Interval {
                low: middle - t * se,
                high: middle + t * se,
            }),
            method: match se {
                Some(_) => IntervalMethod::Clustered,
                None => IntervalMethod::None,
            },
            tasks: means.len(),
            samples: tasks.iter().map(Vec::len).sum(),
        })
    }
}

/// The difference of two sets of samples of the same tasks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Number of tasks with samples on both sides; others are left out.
    pub tasks: usize,
    /// Mean over these tasks of the first side.
    pub first: f64,
    /// Mean over these tasks of the second side.
    pub second: f64,
    /// Second minus first.
    pub difference: f64,
    /// Standard error of the difference, clustered by task; `None` for a single task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub se: Option<f64>,
    /// Lower bound of the 95 % interval; `None` if all tasks differ alike, which says nothing about others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// Upper bound of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
    /// Smallest difference that such a comparison finds with a power of 80 % at a level of 5 %: 2.80 standard
    /// errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detectable: Option<f64>,
    /// Tasks that are better on the second side.
    pub better: usize,
    /// Tasks that are worse on the second side.
    pub worse: usize,
    /// Two-sided p-value of McNemar's exact test; `None` unless each task has one yes or no on both sides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcnemar_p: Option<f64>,
}

impl Paired {
    /// The difference over tasks, each with its samples on both sides; `None` if no task has both.
    pub fn of<'a>(tasks: impl IntoIterator<Item = (&'a [f64], &'a [f64])>) -> Option<Self> {
        let (mut firsts, mut seconds, mut binary) = (Vec::new(), Vec::new(), true);
        for (a, b) in tasks {
            let (Some(first), Some(second)) = (mean(a), mean(b)) else {
                continue;
            };
            let plain = |s: f64| s == 0.0 || s == 1.0;
            binary &= a.len() == 1 && b.len() == 1 && plain(first) && plain(second);
            firsts.push(first);
            seconds.push(second);
        }
        let differences: Vec<f64> = firsts.iter().zip(&seconds).map(|(a, b)| b - a).collect();
        let difference = mean(&differences)?;
        let se = error(&differences, difference);
        let spread = se.filter(|se| *se > 0.0);
        let half = spread.map(|se| quantile(differences.len() - 1) * se);
        let better = differences.iter().filter(|d| **d > 0.0).count();
        let worse = differences.iter().filter(|d| **d < 0.0).count();
        Some(Self {
            tasks: differences.len(),
            first: mean(&firsts)?,
            second: mean(&seconds)?,
            difference,
            se,
            low: half.map(|h| difference - h),
            high: half.map(|h| difference + h),
            detectable: spread.map(|se| DETECTABLE * se),
            better,
            worse,
            mcnemar_p: binary.then(|| mcnemar(better, worse)),
        })
    }

    /// Formats the difference in points: `+12.5 points (95 % interval +3.1 to +21.9, 64 tasks)`.
    pub fn points(&self) -> String {
        let tasks = self.tasks;
        let interval = match (self.low, self.high) {
            (Some(low), Some(high)) => format!(
                "95 % interval {:+.1} to {:+.1}, {tasks} tasks",
                100.0 * low,
                100.0 * high
            ),
            _ => format!("no interval: all of {tasks} tasks changed alike"),
        };
        format!("{:+.1} points ({interval})", 100.0 * self.difference)
    }
}

/// The mean; `None` without numbers.
fn mean(numbers: &[f64]) -> Option<f64> {
    let n = numbers.len() as f64;
    (n > 0.0).then(|| numbers.iter().sum::<f64>() / n)
}

/// Standard error of a mean of independent numbers; `None` for fewer than two.
fn error(numbers: &[f64], mean: f64) -> Option<f64> {
    let n = numbers.len() as f64;
    let squares: f64 = numbers.iter().map(|v| (v - mean).powi(2)).sum();
    (n > 1.0).then(|| (squares / (n * (n - 1.0))).sqrt())
}

/// Quantile 0.975 of Student's distribution: exact for 1 and 2 degrees of freedom, else the expansion by
/// Fisher and Cornish (Abramowitz & Stegun 26.7.5), which is within 0.2 % from 3 on.
fn quantile(degrees: usize) -> f64 {
    const Z: f64 = 1.959_963_984_540_054;
    match degrees {
        0 => f64::INFINITY,
        1 => 12.706_204_736_174_7,
        2 => 4.302_652_729_696_142,
        _ => {
            let n = degrees as f64;
            let terms = [
                (Z.powi(3) + Z) / 4.0,
                (5.0 * Z.powi(5) + 16.0 * Z.powi(3) + 3.0 * Z) / 96.0,
                (3.0 * Z.powi(7) + 19.0 * Z.powi(5) + 17.0 * Z.powi(3) - 15.0 * Z) / 384.0,
                (79.0 * Z.powi(9) + 776.0 * Z.powi(7) + 1482.0 * Z.powi(5)
                    - 1920.0 * Z.powi(3)
                    - 945.0 * Z)
                    / 92_160.0,
            ];
            let parts = terms
                .iter()
                .zip(1..)
                .map(|(term, power)| term / n.powi(power));
            Z + parts.sum::<f64>()
        }
    }
}

/// Two-sided p-value of McNemar's exact test (1947): the probability of a split at least as uneven as this
/// one if both directions are as likely.
fn mcnemar(better: usize, worse: usize) -> f64 {
    let (n, fewer) = (better + worse, better.min(worse));
    // Logarithms: 0.5 to the power of n underflows from 1,075 on.
    let mut term = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = 0.0;
    for i in 0..=fewer {
        sum += term.exp();
        term += ((n - i) as f64).ln() - ((i + 1) as f64).ln();
    }
    (2.0 * sum).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-6, "{a} and {b}");
    }

    /// Values of Student's distribution in Abramowitz & Stegun, table 26.10.
    #[test]
    fn quantiles_are_those_of_students_distribution() {
        for (degrees, value) in [
            (1, 12.706),
            (2, 4.303),
            (3, 3.182),
            (4, 2.776),
            (9, 2.262),
            (30, 2.042),
            (120, 1.980),
        ] {
            let found = quantile(degrees);
            assert!((found / value - 1.0).abs() < 2e-3, "{degrees}: {found}");
        }
    }

    #[test]
    fn samples_of_a_task_are_one_cluster() {
        // Four samples of each of two tasks: the error is that of two numbers, not of eight.
        let tasks = [vec![1.0, 1.0, 1.0, 0.0], vec![0.0, 0.0, 0.0, 1.0]];
        let of = TaskMean::of_shares(&tasks).unwrap();
        near(of.mean, 0.5);
        near(of.se.unwrap(), 0.25);
        assert_eq!((of.tasks, of.samples), (2, 8));
        assert_eq!(of.method, IntervalMethod::Clustered);
        let interval = of.interval.unwrap();
        assert_eq!((interval.low, interval.high), (0.0, 1.0));
        // The formula of the paper, (1/n) sqrt(sum over clusters of the squared sum of deviations), without
        // the factor T / (T - 1).
        let sums = tasks.iter().map(|t| t.iter().map(|s| s - 0.5).sum::<f64>());
        let paper = sums.map(|s| s * s).sum::<f64>().sqrt() / 8.0;
        near(of.se.unwrap(), paper * 2f64.sqrt());
    }

    #[test]
    fn one_yes_or_no_a_task_has_wilsons_interval() {
        let tasks: Vec<Vec<f64>> = (0..10).map(|_| vec![1.0]).collect();
        let of = TaskMean::of_shares(&tasks).unwrap();
        assert_eq!(of.method, IntervalMethod::Wilson);
        assert_eq!(of.interval, Interval::wilson(10.0, 10.0));
        // All samples of all tasks failed: ten tasks are known, not forty.
        let none: Vec<Vec<f64>> = (0..10).map(|_| vec![0.0; 4]).collect();
        let of = TaskMean::of_shares(&none).unwrap();
        assert_eq!((of.method, of.se), (IntervalMethod::Wilson, Some(0.0)));
        assert_eq!(of.interval, Interval::wilson(0.0, 10.0));
    }

    #[test]
    fn tasks_weigh_alike_and_missing_ones_do_not_count() {
        let of = TaskMean::of_numbers(&[vec![4.0, 4.0, 4.0], vec![], vec![1.0]]).unwrap();
        near(of.mean, 2.5);
        assert_eq!((of.tasks, of.samples), (2, 4));
        let single = TaskMean::of_numbers(&[vec![1.0, 0.0]]).unwrap();
        assert_eq!(single.method, IntervalMethod::None);
        assert_eq!((single.se, single.interval), (None, None));
        assert_eq!(TaskMean::of_shares(&[vec![]]), None);
    }

    #[test]
    fn a_paired_difference_has_the_error_of_the_differences() {
        // Tasks that are hard for both sides: the difference is 0.5 or 0 in each.
        let first = [
            vec![0.0, 0.0],
            vec![0.5, 0.5],
            vec![1.0, 0.0],
            vec![0.0, 0.0],
        ];
        let second = [
            vec![1.0, 0.0],
            vec![1.0, 1.0],
            vec![0.0, 1.0],
            vec![0.0, 0.0],
        ];
        let pairs = first.iter().zip(&second);
        let of = Paired::of(pairs.map(|(a, b)| (a.as_slice(), b.as_slice()))).unwrap();
        near(of.difference, 0.25);
        near(of.first, 0.25);
        near(of.second, 0.5);
        let se = (4.0 * 0.0625 / 12.0f64).sqrt();
        near(of.se.unwrap(), se);
        near(of.low.unwrap(), 0.25 - quantile(3) * se);
        near(of.detectable.unwrap(), 2.801_585_218 * se);
        assert_eq!((of.better, of.worse, of.mcnemar_p), (2, 0, None));
        assert!(
            of.points().starts_with("+25.0 points (95 % interval -"),
            "{}",
            of.points()
        );
    }

    #[test]
    fn tasks_that_all_changed_alike_have_no_interval() {
        let one = [1.0];
        let of = Paired::of([(&one[..], &one[..]), (&one[..], &one[..])]).unwrap();
        assert_eq!((of.difference, of.low, of.high), (0.0, None, None));
        assert_eq!(of.mcnemar_p, Some(1.0));
        assert!(
            of.points().contains("no interval: all of 2 tasks"),
            "{}",
            of.points()
        );
        let none: [f64; 0] = [];
        assert_eq!(Paired::of([(&one[..], &none[..])]), None);
    }

    /// Binomial tails: 2 * P(X <= 1 | 10) = 22/1024, and a table of Fagerland et al. 2013 in exact form.
    #[test]
    fn mcnemars_test_is_the_exact_binomial_one() {
        near(mcnemar(9, 1), 22.0 / 1024.0);
        near(mcnemar(1, 9), 22.0 / 1024.0);
        near(mcnemar(5, 5), 1.0);
        near(mcnemar(0, 0), 1.0);
        near(mcnemar(3, 0), 0.25);
        assert!(mcnemar(3000, 0) == 0.0 && mcnemar(1500, 1500) == 1.0);
    }
}
