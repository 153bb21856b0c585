//! Reward against compute over a set of runs, with a fit and its uncertainty. Pure.
//!
//! The fit is a saturating curve in the logarithm of compute, the form that studies of reinforcement learning
//! at scale use: `y = low + (high - low) / (1 + (middle / x)^slope)`. It is linear in `low` and `high` if
//! `middle` and `slope` are given. A grid over the latter two and least squares for the former thus find it
//! without a starting point. Both ends of a share lie in [0, 1], and so does every value of its curve. The
//! uncertainty is a bootstrap: over runs if there are several, else over blocks of neighbouring points, as
//! the points of one run depend on each other.
//!
//! Runs are fitted together only where they repeat each other: one recipe with several seeds. Points of other
//! worlds or settings lie on separate curves.

use serde::{Deserialize, Serialize};
use sinew_orchestrator::{EvalRecord, StepRecord};
use sinew_types::SplitMix64;
use std::collections::BTreeSet;

/// Measure of a run's compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Compute {
    /// Seconds in which the engine or the trainer computed.
    #[default]
    BusySeconds,
    /// Sampled tokens, and tokens computed by the trainer.
    Tokens,
    /// Training episodes.
    Episodes,
    /// Seconds of the run.
    WallSeconds,
}

/// Measure of a run's gain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Gain {
    /// Success of training episodes.
    #[default]
    Success,
    /// Reward of training episodes.
    Reward,
    /// Success on held-out tasks.
    HeldOut,
}

impl Gain {
    /// Least and greatest value that it can have.
    fn bounds(self) -> (f64, f64) {
        match self {
            Self::Success | Self::HeldOut => (0.0, 1.0),
            Self::Reward => (f64::NEG_INFINITY, f64::INFINITY),
        }
    }
}

/// Points of a curve that a fit gets at most: more than these are averaged.
const MAX_POINTS: usize = 60;
/// Fits of a bootstrap.
const RESAMPLES: usize = 100;
/// Points below which a curve of four numbers is meaningless.
const LEAST_POINTS: usize = 6;
/// Points of a drawn curve.
const DRAWN: usize = 60;
/// Values of `slope` and steps of `middle` in the grid.
const SLOPES: [f64; 7] = [0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0];
const MIDDLES: usize = 24;

/// A run as points.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Input {
    /// Name of the run.
    pub(crate) run: String,
    /// Equal for runs whose tasks and rewards are the same; empty if the recipe cannot be read.
    #[serde(skip)]
    pub(crate) world: String,
    /// Equal for runs that repeat each other with another seed; `None` if the recipe cannot be read.
    #[serde(skip)]
    pub(crate) repeats: Option<String>,
    /// Compute, gain; in the order of compute.
    pub(crate) points: Vec<(f64, f64)>,
}

/// The points, a fit for each run, and one for each set of runs that repeat each other.
#[derive(Debug, Serialize)]
pub(crate) struct Study<'a> {
    /// Each with its own fit.
    runs: Vec<RunFit<'a>>,
    /// Their order is that of their first runs.
    together: Vec<RepeatedRuns<'a>>,
    /// Number of worlds: gains of different ones are not of the same tasks.
    worlds: usize,
}

/// Runs that repeat each other, and the fit over all of their points.
#[derive(Debug, Serialize)]
struct RepeatedRuns<'a> {
    runs: Vec<&'a str>,
    fit: Fit,
}

/// The points of a run with their fit; `None` where they determine none.
#[derive(Debug, Serialize)]
struct RunFit<'a> {
    #[serde(flatten)]
    input: &'a Input,
    fit: Option<Fit>,
}

/// A fitted curve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Fit {
    /// Value with no compute, and the value that it comes near to.
    low: f64,
    high: f64,
    /// Compute at which half of the way is done.
    middle: f64,
    /// Half of the way lies within the points: what is beyond them does not decide where the curve ends.
    reached: bool,
    /// Steepness of the rise, over the logarithm of compute.
    slope: f64,
    /// Interval that holds 90 % of the bootstrap's asymptotes.
    high_between: (f64, f64),
    /// Share of the variance that it explains.
    r2: f64,
    /// Units that the bootstrap drew.
    over: &'static str,
    /// Compute, value, and between which 90 % of the bootstrap lie; to twice the compute that was spent.
    curve: Vec<(f64, f64, f64, f64)>,
}

/// The points of a run.
pub(crate) fn points(
    run: &str,
    steps: &[StepRecord],
    evals: &[EvalRecord],
    x: Compute,
    y: Gain,
) -> Input {
    let mut spent = 0.0;
    let mut at_step = vec![(0, 0.0)];
    let mut own = Vec::new();
    for r in steps {
        spent = match x {
            Compute::BusySeconds => spent + r.engine_busy_s.max(0.0) + r.train_s.max(0.0),
            Compute::Tokens => spent + r.tokens.sampled as f64 + r.computed_tokens as f64,
            Compute::Episodes => spent + (r.rollout.episodes + r.retried) as f64,
            Compute::WallSeconds => r.wall_s,
        };
        at_step.push((r.step, spent));
        let scored = r.rollout.episodes > r.rollout.failed + r.rollout.unscored;
        match y {
            Gain::Success if scored => own.push((spent, r.rollout.success)),
            Gain::Reward if scored => own.push((spent, r.rollout.reward)),
            _ => {}
        }
    }
    if y == Gain::HeldOut {
        let spent_at = |step: u64| {
            let before = at_step.partition_point(|(s, _)| *s <= step);
            at_step.get(before.saturating_sub(1)).map_or(0.0, |p| p.1)
        };
        own = evals
            .iter()
            .map(|e| (spent_at(e.step), e.stats.success))
            .collect();
    }
    own.retain(|(x, y)| *x > 0.0 && x.is_finite() && y.is_finite());
    let stride = own.len().div_ceil(MAX_POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let n = part.len() as f64;
        let sum = part.iter().fold((0.0, 0.0), |s, p| (s.0 + p.0, s.1 + p.1));
        (sum.0 / n, sum.1 / n)
    };
    Input {
        run: run.to_owned(),
        points: own.chunks(stride).map(mean).collect(),
        ..Input::default()
    }
}

/// Fits each run, and those that repeat each other together.
pub(crate) fn study(inputs: &[Input], gain: Gain) -> Study<'_> {
    let bounds = gain.bounds();
    let runs: Vec<RunFit<'_>> = inputs
        .iter()
        .map(|input| RunFit {
            input,
            fit: fit(&[&input.points], bounds),
        })
        .collect();
    let mut sets: Vec<Vec<&Input>> = Vec::new();
    for input in inputs.iter().filter(|i| !i.points.is_empty()) {
        let same =
            |set: &&mut Vec<&Input>| input.repeats.is_some() && set[0].repeats == input.repeats;
        match sets.iter_mut().find(same) {
            Some(set) => set.push(input),
            None => sets.push(vec![input]),
        }
    }
    let together = sets.iter().filter(|set| set.len() > 1).filter_map(|set| {
        let points: Vec<&Vec<(f64, f64)>> = set.iter().map(|i| &i.points).collect();
        Some(RepeatedRuns {
            runs: set.iter().map(|i| i.run.as_str()).collect(),
            fit: fit(&points, bounds)?,
        })
    });
    let drawn = inputs.iter().filter(|i| !i.points.is_empty());
    let worlds: BTreeSet<&str> = drawn.map(|i| i.world.as_str()).collect();
    Study {
        runs,
        together: together.collect(),
        worlds: worlds.len(),
    }
}

/// Coefficients of a curve.
#[derive(Clone, Copy, Debug)]
struct Curve {
    low: f64,
    high: f64,
    middle: f64,
    slope: f64,
    /// Sum of squared residuals.
    error: f64,
}

impl Curve {
    /// The value for some compute.
    fn at(&self, x: f64) -> f64 {
        self.low + (self.high - self.low) * share(x, self.middle, self.slope)
    }
}

/// Share of the way that is done, 0 to 1.
fn share(x: f64, middle: f64, slope: f64) -> f64 {
    1.0 / (1.0 + (middle / x).powf(slope))
}

/// The best curve of the grid; `None` if the points do not determine one.
fn best(points: &[(f64, f64)], bounds: (f64, f64)) -> Option<Curve> {
    let least = points.iter().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let most = points.iter().map(|p| p.0).fold(0.0, f64::max);
    if points.len() < LEAST_POINTS || most <= least * 1.5 {
        return None;
    }
    let middles = (0..MIDDLES).map(|i| {
        // Middles range from below the first point to beyond the last: an asymptote that was not reached is
        // far.
        let t = i as f64 / (MIDDLES - 1) as f64;
        (least * 0.5) * (most * 4.0 / (least * 0.5)).powf(t)
    });
    let grid = middles.flat_map(|middle| SLOPES.map(|slope| (middle, slope)));
    let curves = grid.filter_map(|(middle, slope)| linear(points, middle, slope, bounds));
    curves.min_by(|a, b| a.error.total_cmp(&b.error))
}

/// Least squares for `low` and `high` within the bounds, with the others given. The error is convex in both,
/// so that its least value within the bounds is the free one, or lies where one of them is at a bound.
fn linear(
    points: &[(f64, f64)],
    middle: f64,
    slope: f64,
    (least, most): (f64, f64),
) -> Option<Curve> {
    let n = points.len() as f64;
    // Sums over the points, whose value is `low * (1 - g) + high * g`.
    let (mut s, mut ss, mut y, mut sy) = (0.0, 0.0, 0.0, 0.0);
    for p in points {
        let g = share(p.0, middle, slope);
        (s, ss, y, sy) = (s + g, ss + g * g, y + p.1, sy + g * p.1);
    }
    let det = n * ss - s * s;
    if det <= 1e-9 * n * ss.max(1e-12) {
        return None;
    }
    let gain = (n * sy - s * y) / det;
    let low = (y - gain * s) / n;
    let within = |v: f64| v.clamp(least, most);
    let mut ends = vec![(low, low + gain)];
    if within(low) != low || within(low + gain) != low + gain {
        let (rest, both) = (n - 2.0 * s + ss, s - ss);
        // The other end, where one is given.
        let high_of = |low: f64| within((sy - low * both) / ss.max(1e-12));
        let low_of = |high: f64| within((y - sy - high * both) / rest.max(1e-12));
        let low_given = [least, most].map(|low| (low, high_of(low)));
        let high_given = [least, most].map(|high| (low_of(high), high));
        ends = low_given.into_iter().chain(high_given).collect();
    }
    let curves = ends.into_iter().map(|(low, high)| {
        let mut curve = Curve {
            low,
            high,
            middle,
            slope,
            error: 0.0,
        };
        curve.error = points.iter().map(|p| (p.1 - curve.at(p.0)).powi(2)).sum();
        curve
    });
    curves.min_by(|a, b| a.error.total_cmp(&b.error))
}

/// Fits the points of runs, and draws the bootstrap.
fn fit(runs: &[&Vec<(f64, f64)>], bounds: (f64, f64)) -> Option<Fit> {
    let points: Vec<(f64, f64)> = runs.iter().flat_map(|r| r.iter().copied()).collect();
    let curve = best(&points, bounds)?;
    let over = if runs.len() >= 3 {
        "runs"
    } else {
        "blocks of points"
    };
    // Fixed, so that the same points give the same picture.
    let mut random = SplitMix64::new(0x5eed);
    let again: Vec<Curve> = (0..RESAMPLES)
        .filter_map(|_| match over {
            "runs" => best(&resampled(runs, &mut random), bounds),
            _ => best(&blocks(&points, &curve, &mut random), bounds),
        })
        .collect();
    let between = |of: &dyn Fn(&Curve) -> f64| {
        let mut values: Vec<f64> = again.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let at = |q: f64| {
            values
                .get(((values.len().max(1) - 1) as f64 * q).round() as usize)
                .copied()
        };
        (at(0.05).unwrap_or(f64::NAN), at(0.95).unwrap_or(f64::NAN))
    };
    let (least, most) = points.iter().fold((f64::INFINITY, 0.0_f64), |b, p| {
        (b.0.min(p.0), b.1.max(p.0))
    });
    let drawn = (0..DRAWN).map(|i| {
        let x = least * (2.0 * most / least).powf(i as f64 / (DRAWN - 1) as f64);
        let (low, high) = between(&|c| c.at(x));
        (x, curve.at(x), low, high)
    });
    let mean = points.iter().map(|p| p.1).sum::<f64>() / points.len() as f64;
    let variance: f64 = points.iter().map(|p| (p.1 - mean).powi(2)).sum();
    Some(Fit {
        low: curve.low,
        high: curve.high,
        middle: curve.middle,
        slope: curve.slope,
        reached: curve.middle <= most,
        high_between: between(&|c| c.high),
        r2: 1.0 - curve.error / variance.max(1e-12),
        over,
        curve: drawn.collect(),
    })
}

/// Points of as many runs, drawn with replacement.
fn resampled(runs: &[&Vec<(f64, f64)>], random: &mut SplitMix64) -> Vec<(f64, f64)> {
    let drawn = (0..runs.len()).map(|_| runs[below(random, runs.len())]);
    drawn.flat_map(|r| r.iter().copied()).collect()
}

/// The curve's values with residuals of blocks of neighbours, drawn with replacement.
fn blocks(points: &[(f64, f64)], curve: &Curve, random: &mut SplitMix64) -> Vec<(f64, f64)> {
    let residuals: Vec<f64> = points.iter().map(|p| p.1 - curve.at(p.0)).collect();
    let length = (points.len() as f64).cbrt().round().max(1.0) as usize;
    let mut drawn = Vec::with_capacity(points.len() + length);
    while drawn.len() < points.len() {
        let start = below(random, residuals.len() + 1 - length);
        drawn.extend_from_slice(&residuals[start..start + length]);
    }
    let values = points.iter().zip(drawn);
    values.map(|(p, r)| (p.0, curve.at(p.0) + r)).collect()
}

/// A number below `n`, which is not 0.
fn below(random: &mut SplitMix64, n: usize) -> usize {
    (random.next_u64() % n as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FREE: (f64, f64) = (f64::NEG_INFINITY, f64::INFINITY);

    /// Points of a known curve, with noise that repeats.
    fn known(high: f64, noise: f64, shift: usize) -> Vec<(f64, f64)> {
        let mut random = SplitMix64::new(shift as u64);
        let point = |i: usize| {
            let x = 10.0 * 1.15_f64.powi(i as i32);
            let noise = noise * (below(&mut random, 2001) as f64 / 1000.0 - 1.0);
            (x, 0.1 + (high - 0.1) * share(x, 200.0, 1.5) + noise)
        };
        (0..50).map(point).collect()
    }

    #[test]
    fn a_known_asymptote_is_found_and_its_interval_holds_it() {
        let runs: Vec<Vec<(f64, f64)>> = (0..5).map(|i| known(0.8, 0.03, i)).collect();
        let fit = fit(&runs.iter().collect::<Vec<_>>(), FREE).unwrap();
        assert!((fit.high - 0.8).abs() < 0.05, "{fit:?}");
        assert!(fit.high_between.0 <= fit.high_between.1);
        assert!(fit.r2 > 0.9 && fit.over == "runs");
        let wide = super::fit(&[&known(0.8, 0.2, 1)], FREE).unwrap();
        let narrow = super::fit(&[&known(0.8, 0.01, 1)], FREE).unwrap();
        let width = |f: &Fit| f.high_between.1 - f.high_between.0;
        assert!(width(&wide) > width(&narrow), "{wide:?} {narrow:?}");
    }

    #[test]
    fn too_few_points_have_no_fit() {
        assert_eq!(fit(&[&known(0.8, 0.0, 1)[..3].to_vec()], FREE), None);
        assert_eq!(fit(&[&vec![(5.0, 0.1); 40]], FREE), None);
        let study = study(&[], Gain::Success);
        assert!(study.runs.is_empty() && study.together.is_empty());
    }

    /// A rise whose end was not reached has no bound: without those of a share, least squares puts it far
    /// above 1.
    #[test]
    fn a_share_stays_within_0_and_1_in_the_fit_and_in_all_of_its_bootstrap() {
        let rise = |i: usize| {
            (
                10.0 * 1.3_f64.powi(i as i32),
                0.02 * 1.35_f64.powi(i as i32),
            )
        };
        let points: Vec<(f64, f64)> = (0..13).map(rise).collect();
        let free = fit(&[&points], FREE).unwrap();
        assert!(free.high > 1.0 && !free.reached, "{free:?}");
        let share = fit(&[&points], Gain::Success.bounds()).unwrap();
        let within = |v: f64| (0.0..=1.0).contains(&v);
        assert!(within(share.low) && within(share.high), "{share:?}");
        assert!(within(share.high_between.0) && within(share.high_between.1));
        let inside = |p: &(f64, f64, f64, f64)| within(p.1) && within(p.2) && within(p.3);
        assert!(share.curve.iter().all(inside), "{share:?}");
        // A curve that lies within them is the same with and without.
        let known = known(0.8, 0.03, 1);
        assert_eq!(fit(&[&known], FREE), fit(&[&known], Gain::HeldOut.bounds()));
    }

    #[test]
    fn only_runs_that_repeat_each_other_are_fitted_together() {
        let input = |run: &str, world: &str, repeats: Option<&str>| Input {
            run: run.into(),
            world: world.into(),
            repeats: repeats.map(Into::into),
            points: known(0.8, 0.03, run.len()),
        };
        let inputs = [
            input("a", "math", Some("r1")),
            input("other", "chess", Some("r2")),
            input("bb", "math", Some("r1")),
            input("tuned", "math", Some("r3")),
            input("unread", "", None),
            input("unread-2", "", None),
        ];
        let study = study(&inputs, Gain::Success);
        let together: Vec<_> = study.together.iter().map(|t| t.runs.clone()).collect();
        assert_eq!(together, [["a", "bb"]]);
        assert_eq!(study.worlds, 3);
    }

    #[test]
    fn compute_adds_up_over_steps() {
        let step = |step| {
            let mut r = StepRecord {
                step,
                engine_busy_s: 2.0,
                train_s: 1.0,
                ..StepRecord::default()
            };
            r.rollout.episodes = 4;
            r.rollout.success = 0.5;
            r
        };
        let eval = EvalRecord {
            when: "after".into(),
            step: 2,
            wall_s: 9.0,
            stats: sinew_orchestrator::EpisodeStats::default(),
            gain: None,
        };
        let steps = [step(1), step(2)];
        let of = |y| {
            points(
                "r",
                &steps,
                std::slice::from_ref(&eval),
                Compute::BusySeconds,
                y,
            )
            .points
        };
        assert_eq!(of(Gain::Success), [(3.0, 0.5), (6.0, 0.5)]);
        assert_eq!(of(Gain::HeldOut), [(6.0, 0.0)]);
    }

    proptest! {
        // A case fits two curves with a bootstrap each: 0.2 s.
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn any_points_give_finite_numbers_or_no_fit(
            points in proptest::collection::vec((1e-3..1e9f64, -1e3..1e3f64), 0..40)
        ) {
            if let Some(fit) = fit(&[&points], FREE) {
                prop_assert!(fit.low.is_finite() && fit.high.is_finite());
                prop_assert!(fit.curve.iter().all(|p| p.1.is_finite() && p.0.is_finite()));
            }
            if let Some(fit) = fit(&[&points], (0.0, 1.0)) {
                let within = |v: f64| (0.0..=1.0).contains(&v);
                prop_assert!(within(fit.low) && within(fit.high), "{fit:?}");
                prop_assert!(fit.curve.iter().all(|p| within(p.1)));
            }
        }
    }
}
