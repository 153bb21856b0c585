//! What a rule is, and the rules of a whole plan. The rules themselves stand with their tables.

use super::{RunPlan, TIME, is_time};
use sinew_algo::Algorithm;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// A rule about one key.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) key: String,
    /// The value, as shown in messages; `None`: as it was typed.
    pub(super) value: Option<String>,
    pub(super) reason: String,
    pub(super) holds: bool,
}

impl Rule {
    /// Whether the key has no effect in this plan: typed, it is refused.
    pub(super) fn is_unused(&self) -> bool {
        self.value.is_none() && !self.holds
    }
}

/// The rules of every table, in the order in which they are reported.
pub(super) fn all(plan: &RunPlan) -> Vec<Rule> {
    let mut rules = Rules(Vec::new());
    name(plan, &mut rules);
    super::model::rules(plan, &mut rules);
    super::env::rules(&plan.env, &mut rules);
    super::harness::rules(plan, &mut rules);
    super::sandbox::rules(plan, &mut rules);
    super::tasks::rules(plan, &mut rules);
    super::rollout::rules(plan, &mut rules);
    super::train::rules(plan, &mut rules);
    super::eval::rules(plan, &mut rules);
    super::engine::rules(plan, &mut rules);
    plan.store.ranges(&mut rules);
    super::data::rules(plan, &mut rules);
    rules.0
}

/// The rules of an algorithm that can run.
pub(super) fn of_algorithm(plan: &RunPlan, algorithm: &Algorithm) -> Vec<Rule> {
    let mut rules = Rules(Vec::new());
    super::algorithm::rules(plan, algorithm, &mut rules);
    rules.0
}

pub(crate) struct Rules(Vec<Rule>);

impl Rules {
    /// Any condition; `reason` says what is allowed and why.
    pub(super) fn custom(&mut self, key: &str, value: impl Display, reason: String, holds: bool) {
        self.0.push(Rule {
            key: key.to_owned(),
            value: Some(value.to_string()),
            reason,
            holds,
        });
    }

    /// A key that may be typed only where it has an effect.
    pub(super) fn unused(&mut self, key: &str, reason: String, has_effect: bool) {
        self.0.push(Rule {
            key: key.to_owned(),
            value: None,
            reason,
            holds: has_effect,
        });
    }

    pub(super) fn allowed(&mut self, key: &str, value: impl Display, allowed: &str, holds: bool) {
        self.custom(key, value, format!("allowed: {allowed}"), holds);
    }

    /// A number within bounds.
    pub(super) fn range<T>(&mut self, key: &str, value: T, bounds: RangeInclusive<T>)
    where
        T: Display + PartialOrd,
    {
        let allowed = format!("{} to {}", bounds.start(), bounds.end());
        let holds = bounds.contains(&value);
        self.allowed(key, value, &allowed, holds);
    }

    /// A whole number from 1 on.
    pub(super) fn one_or_more(&mut self, key: &str, value: u64) {
        self.allowed(key, value, "1 or more", value >= 1);
    }

    pub(super) fn positive(&mut self, key: &str, value: f32) {
        self.allowed(
            key,
            value,
            "a number above 0",
            value.is_finite() && value > 0.0,
        );
    }

    pub(super) fn seconds(&mut self, key: &str, value: f64) {
        self.allowed(key, value, TIME, is_time(value));
    }
}

fn name(plan: &RunPlan, rules: &mut Rules) {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | ' ');
    let name = &plan.name;
    rules.allowed(
        "name",
        format!("{name:?}"),
        "1 to 100 letters, digits, `.`, `_`, `-` and spaces, a letter or digit first: it names the run's \
         folder",
        name.starts_with(char::is_alphanumeric) && name.len() <= 100 && name.chars().all(plain),
    );
}
