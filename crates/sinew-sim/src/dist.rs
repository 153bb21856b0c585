//! Distributions of lengths and times, and the one source of randomness.
//!
//! A draw is a function of a seed and of its purpose, never of the order of draws: two plans that differ in
//! one key draw the same lengths and times everywhere else, so that their difference is that of the key.

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use sinew_types::mix_seed;
use std::f64::consts::TAU;
use std::fmt;

/// Largest number of values of an empirical distribution.
pub const MAX_VALUES: usize = 100_000;

/// A number in [0, 1) that follows from `key`.
pub(crate) fn uniform(key: u64) -> f64 {
    (mix_seed(key, 0x75) >> 11) as f64 / (1u64 << 53) as f64
}

/// A normal number that follows from `key` (Box and Muller 1958).
pub(crate) fn normal(key: u64) -> f64 {
    let (a, b) = (uniform(mix_seed(key, 1)), uniform(mix_seed(key, 2)));
    (-2.0 * (1.0 - a).ln()).sqrt() * (TAU * b).cos()
}

/// Distribution of a length or a time. Numbers are 0 or more.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Dist {
    /// Always the same.
    Fixed(f64),
    /// A distribution of this form.
    Of(Form),
}

/// A form of distribution with its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Uniform between two numbers.
    Uniform([f64; 2]),
    /// Exponential, with this mean.
    Exponential(f64),
    /// Lognormal, with its median and its 95th percentile.
    Lognormal(Lognormal),
    /// Pareto's law with index 1 from the least number on, cut at the most.
    Pareto(Pareto),
    /// Values that were seen: each is as likely as the others.
    Values(Vec<f64>),
}

/// Parameters of [`Form::Lognormal`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lognormal {
    /// Half of all are below.
    pub median: f64,
    /// The 95th percentile: above 0, and at least the median.
    pub p95: f64,
    /// Larger numbers are cut to this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}

/// Parameters of [`Form::Pareto`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pareto {
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl From<f64> for Dist {
    fn from(value: f64) -> Self {
        Self::Fixed(value)
    }
}

impl Dist {
    /// The number of `key`. `common` decides the share `shared` of the variance of its logarithm, and `key`
    /// the rest: episodes of one task resemble each other.
    pub(crate) fn draw_shared(&self, key: u64, common: u64, shared: f64) -> f64 {
        let own = normal(key);
        let z = if shared > 0.0 {
            shared.sqrt() * normal(common) + (1.0 - shared).sqrt() * own
        } else {
            own
        };
        match self {
            Self::Fixed(value) => *value,
            Self::Of(Form::Lognormal(l)) => l.at(z),
            Self::Of(form) => form.quantile(share_below(z)),
        }
    }

    /// The number of `key`.
    pub(crate) fn draw(&self, key: u64) -> f64 {
        match self {
            Self::Fixed(value) => *value,
            Self::Of(Form::Lognormal(l)) => l.at(normal(key)),
            Self::Of(form) => form.quantile(uniform(key)),
        }
    }

    /// Returns the distribution with every number multiplied by `factor`.
    pub(crate) fn scaled(&self, factor: f64) -> Self {
        match self {
            Self::Fixed(value) => Self::Fixed(value * factor),
            Self::Of(form) => Self::Of(form.scaled(factor)),
        }
    }

    /// Mean, computed from a thousand quantiles.
    pub fn mean(&self) -> f64 {
        match self {
            Self::Fixed(value) => *value,
            Self::Of(form) => {
                let at = |n: u32| form.quantile((f64::from(n) + 0.5) / 1000.0);
                (0..1000).map(at).sum::<f64>() / 1000.0
            }
        }
    }

    /// The fault of the distribution, if there is one.
    pub(crate) fn fault(&self) -> Option<String> {
        let finite = |v: f64| v.is_finite() && v >= 0.0;
        let good = match self {
            Self::Fixed(value) => finite(*value),
            Self::Of(Form::Uniform([a, b])) => finite(*a) && finite(*b) && a <= b,
            Self::Of(Form::Exponential(mean)) => finite(*mean),
            Self::Of(Form::Lognormal(l)) => {
                let cut = l.max.is_none_or(|m| finite(m) && m >= l.median);
                finite(l.median) && finite(l.p95) && l.median > 0.0 && l.p95 >= l.median && cut
            }
            Self::Of(Form::Pareto(p)) => finite(p.least) && finite(p.most) && p.least <= p.most,
            Self::Of(Form::Values(values)) => {
                let count = (1..=MAX_VALUES).contains(&values.len());
                count && values.iter().all(|v| finite(*v))
            }
        };
        (!good).then(|| {
            "allowed: numbers from 0 on; in a lognormal 0 < median <= p95; 1 to 100000 values"
                .into()
        })
    }
}

impl Lognormal {
    fn at(self, z: f64) -> f64 {
        // 1.645 standard deviations are the 95th percentile.
        let sigma = (self.p95 / self.median).ln() / 1.644_853_6;
        let value = self.median * (sigma * z).exp();
        self.max.map_or(value, |max| value.min(max))
    }
}

impl Form {
    /// The number that a share `q` of all is below.
    fn quantile(&self, q: f64) -> f64 {
        match self {
            Self::Uniform([a, b]) => a + (b - a) * q,
            Self::Exponential(mean) => -mean * (1.0 - q).ln(),
            Self::Lognormal(l) => l.at(z_of(q)),
            Self::Pareto(p) => (p.least / (1.0 - q).max(1e-12)).min(p.most),
            Self::Values(values) => {
                let at = (q * values.len() as f64) as usize;
                values
                    .get(at.min(values.len().saturating_sub(1)))
                    .copied()
                    .unwrap_or(0.0)
            }
        }
    }

    fn scaled(&self, factor: f64) -> Self {
        match self {
            Self::Uniform([a, b]) => Self::Uniform([a * factor, b * factor]),
            Self::Exponential(mean) => Self::Exponential(mean * factor),
            Self::Lognormal(l) => Self::Lognormal(Lognormal {
                median: l.median * factor,
                p95: l.p95 * factor,
                max: l.max.map(|m| m * factor),
            }),
            Self::Pareto(p) => Self::Pareto(Pareto {
                least: p.least * factor,
                most: p.most * factor,
            }),
            Self::Values(values) => Self::Values(values.iter().map(|v| v * factor).collect()),
        }
    }
}

/// Share of a normal distribution below `z`: the logistic approximation of Bowling et al. 2009,
/// good to 0.00014.
fn share_below(z: f64) -> f64 {
    1.0 / (1.0 + (-(0.070_56 * z.powi(3) + 1.5976 * z)).exp())
}

/// The inverse of [`share_below`], by halving.
fn z_of(q: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if share_below(middle) < q {
            low = middle
        } else {
            high = middle
        }
    }
    0.5 * (low + high)
}

impl<'de> Deserialize<'de> for Dist {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reads)
    }
}

/// Reads a number, or a table of one key.
struct Reads;

impl<'de> Visitor<'de> for Reads {
    type Value = Dist;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or { uniform | exponential | lognormal | pareto | values = ... }")
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Dist, E> {
        Ok(Dist::Fixed(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Dist, E> {
        Ok(Dist::Fixed(value as f64))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Dist, E> {
        Ok(Dist::Fixed(value as f64))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Dist, A::Error> {
        let form = OneForm::deserialize(MapAccessDeserializer::new(map))?;
        let forms = [
            form.uniform.map(Form::Uniform),
            form.exponential.map(Form::Exponential),
            form.lognormal.map(Form::Lognormal),
            form.pareto.map(Form::Pareto),
            form.values.map(Form::Values),
        ];
        let mut given = forms.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some(form), None) => Ok(Dist::Of(form)),
            _ => Err(A::Error::custom(
                "exactly one form of distribution is needed",
            )),
        }
    }
}

/// The table of one key that a distribution is written as.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneForm {
    /// Two bounds.
    uniform: Option<[f64; 2]>,
    /// The mean.
    exponential: Option<f64>,
    /// Median and 95th percentile.
    lognormal: Option<Lognormal>,
    /// The smallest and the largest.
    pareto: Option<Pareto>,
    /// Values that were seen.
    values: Option<Vec<f64>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(dist: &Dist) -> f64 {
        (0..20_000).map(|n| dist.draw(mix_seed(7, n))).sum::<f64>() / 20_000.0
    }

    #[test]
    fn draws_have_the_mean_that_the_quantiles_say() {
        let lognormal = Form::Lognormal(Lognormal {
            median: 2.0,
            p95: 9.0,
            max: None,
        });
        let pareto = Form::Pareto(Pareto {
            least: 0.05,
            most: 2.0,
        });
        for form in [
            Form::Uniform([1.0, 3.0]),
            Form::Exponential(4.0),
            lognormal,
            pareto,
            Form::Values(vec![1.0, 5.0, 9.0]),
        ] {
            let dist = Dist::Of(form);
            let (seen, said) = (mean(&dist), dist.mean());
            assert!((seen / said - 1.0).abs() < 0.05, "{dist:?}: {seen} {said}");
            assert!((dist.scaled(3.0).mean() / said - 3.0).abs() < 1e-6);
        }
    }

    #[test]
    fn what_a_task_shares_makes_its_episodes_alike() {
        let dist = Dist::Of(Form::Exponential(1.0));
        let spread = |shared: f64| {
            let of = |common: u64| (0..8).map(move |n| (mix_seed(common, n), common));
            let mut within = 0.0;
            for common in 0..500 {
                let draws: Vec<f64> = of(common)
                    .map(|(key, common)| dist.draw_shared(key, common, shared))
                    .collect();
                let mean = draws.iter().sum::<f64>() / 8.0;
                within += draws.iter().map(|d| (d - mean).powi(2)).sum::<f64>();
            }
            within
        };
        assert!(spread(0.9) < 0.3 * spread(0.0));
    }

    #[test]
    fn a_table_has_one_known_form() {
        #[derive(Deserialize)]
        struct One {
            #[expect(dead_code, reason = "only whether it is read counts")]
            d: Dist,
        }
        for good in [
            "d = 3",
            "d = 0.5",
            "d = { values = [1, 2] }",
            "d = { lognormal = { median = 1, p95 = 2 } }",
        ] {
            assert!(toml::from_str::<One>(good).is_ok(), "{good}");
        }
        for bad in [
            "d = {}",
            "d = 'x'",
            "d = { normal = 1 }",
            "d = { exponential = 1, values = [1] }",
        ] {
            assert!(toml::from_str::<One>(bad).is_err(), "{bad}");
        }
        assert!(Dist::Of(Form::Values(Vec::new())).fault().is_some());
        assert!(Dist::Fixed(f64::NAN).fault().is_some());
    }
}
