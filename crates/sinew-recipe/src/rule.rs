//! A rule of a recipe: a key, whether its value is allowed, and the reason to report if it is not.

use crate::{TIME, is_time};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// A rule about one key, evaluated: rules are made for one plan, and hold or not.
#[derive(Debug)]
pub(crate) struct Rule {
    /// Path of the key, which finds its line.
    pub(crate) key: String,
    /// The value, as shown in messages; `None`: as it was typed.
    pub(crate) value: Option<String>,
    /// Allowed values and a way out; follows the value in the message.
    pub(crate) reason: String,
    pub(crate) holds: bool,
    /// If true, the key has no effect while the rule does not hold.
    pub(crate) inert: bool,
}

impl Rule {
    /// Whether the key has no effect in this plan: typed, it is refused.
    pub(crate) fn is_unused(&self) -> bool {
        self.value.is_none() && !self.holds
    }

    /// Whether the key has no effect in this plan, typed or not: a default of a chain is left out then.
    pub(crate) fn is_inert(&self) -> bool {
        self.inert && !self.holds
    }
}

/// The rules of a plan, in the order in which they are reported.
#[derive(Debug, Default)]
pub(crate) struct Rules(pub(crate) Vec<Rule>);

impl Rules {
    /// Any condition; `reason` names the allowed values and why.
    pub(crate) fn custom(&mut self, key: &str, value: impl Display, reason: String, holds: bool) {
        self.0.push(Rule {
            key: key.to_owned(),
            value: Some(value.to_string()),
            reason,
            holds,
            inert: false,
        });
    }

    /// A key whose value has no effect unless the condition holds.
    pub(crate) fn inert(&mut self, key: &str, value: impl Display, reason: String, holds: bool) {
        self.custom(key, value, reason, holds);
        if let Some(rule) = self.0.last_mut() {
            rule.inert = true;
        }
    }

    /// Adds a key that may be typed only if it has an effect. A key without an effect is left out of the
    /// effective recipe, too.
    pub(crate) fn unused(&mut self, key: &str, reason: String, has_effect: bool) {
        self.0.push(Rule {
            key: key.to_owned(),
            value: None,
            reason,
            holds: has_effect,
            inert: true,
        });
    }

    /// Any condition, with the allowed values in words.
    pub(crate) fn allowed(&mut self, key: &str, value: impl Display, allowed: &str, holds: bool) {
        self.custom(key, value, format!("allowed: {allowed}"), holds);
    }

    /// A number within bounds, both allowed.
    pub(crate) fn range<T>(&mut self, key: &str, value: T, bounds: RangeInclusive<T>)
    where
        T: Display + PartialOrd,
    {
        let allowed = format!("{} to {}", bounds.start(), bounds.end());
        let holds = bounds.contains(&value);
        self.allowed(key, value, &allowed, holds);
    }

    /// A whole number from 1 on.
    pub(crate) fn one_or_more(&mut self, key: &str, value: u64) {
        self.allowed(key, value, "1 or more", value >= 1);
    }

    /// A finite number above 0.
    pub(crate) fn positive(&mut self, key: &str, value: f32) {
        self.allowed(
            key,
            value,
            "a number above 0",
            value.is_finite() && value > 0.0,
        );
    }

    /// A duration: above 0, at most a year.
    pub(crate) fn seconds(&mut self, key: &str, value: f64) {
        self.allowed(key, value, TIME, is_time(value));
    }
}
