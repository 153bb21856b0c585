//! A rule of a recipe: a key, whether its value is allowed, and the reason that is reported if it is not.

use crate::urls::is_http;
use crate::{TIME, is_time};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// An evaluated rule about one key of a plan.
#[derive(Debug)]
pub(crate) struct Rule {
    /// Path of the key, which finds its line.
    pub(crate) key: String,
    /// The value as shown in messages; `None`: as written in the text.
    pub(crate) value: Option<String>,
    /// Allowed values and a remedy; follows the value in the message.
    pub(crate) reason: String,
    pub(crate) holds: bool,
    /// Whether the key has no effect while the rule is violated.
    pub(crate) inert: bool,
}

impl Rule {
    /// Whether the key has no effect in this plan, so that writing it is an error.
    pub(crate) fn is_unused(&self) -> bool {
        self.value.is_none() && !self.holds
    }

    /// Whether the key has no effect in this plan, written or not. A default of a chain is then left out.
    pub(crate) fn is_inert(&self) -> bool {
        self.inert && !self.holds
    }
}

/// The rules of a plan, in the order in which they are reported.
#[derive(Debug, Default)]
pub(crate) struct Rules(pub(crate) Vec<Rule>);

impl Rules {
    /// Adds any condition; `reason` states the allowed values and the reason.
    pub(crate) fn custom(
        &mut self,
        key: &str,
        value: impl Display,
        reason: impl Into<String>,
        holds: bool,
    ) {
        self.0.push(Rule {
            key: key.to_owned(),
            value: Some(value.to_string()),
            reason: reason.into(),
            holds,
            inert: false,
        });
    }

    /// Adds a key whose value has no effect unless the condition holds.
    pub(crate) fn inert(
        &mut self,
        key: &str,
        value: impl Display,
        reason: impl Into<String>,
        holds: bool,
    ) {
        self.custom(key, value, reason, holds);
        if let Some(rule) = self.0.last_mut() {
            rule.inert = true;
        }
    }

    /// Adds a key that may only be written if it has an effect. A key without effect is also omitted from the
    /// effective recipe.
    pub(crate) fn unused(&mut self, key: &str, reason: impl Into<String>, has_effect: bool) {
        self.0.push(Rule {
            key: key.to_owned(),
            value: None,
            reason: reason.into(),
            holds: has_effect,
            inert: true,
        });
    }

    /// Adds any condition, with a description of the allowed values.
    pub(crate) fn allowed(&mut self, key: &str, value: impl Display, allowed: &str, holds: bool) {
        self.custom(key, value, format!("allowed: {allowed}"), holds);
    }

    /// Adds an inclusive range of a number.
    pub(crate) fn range<T>(&mut self, key: &str, value: T, bounds: RangeInclusive<T>)
    where
        T: Display + PartialOrd,
    {
        let allowed = format!("{} to {}", bounds.start(), bounds.end());
        let holds = bounds.contains(&value);
        self.allowed(key, value, &allowed, holds);
    }

    /// Requires a whole number of at least 1.
    pub(crate) fn one_or_more(&mut self, key: &str, value: u64) {
        self.allowed(key, value, "1 or more", value >= 1);
    }

    /// Requires a finite number above 0.
    pub(crate) fn positive(&mut self, key: &str, value: f32) {
        self.allowed(
            key,
            value,
            "a number above 0",
            value.is_finite() && value > 0.0,
        );
    }

    /// Requires an address of HTTP or HTTPS.
    pub(crate) fn address(&mut self, key: &str, url: &str) {
        let allowed = "an address that begins with http:// or https://";
        self.allowed(key, format!("{url:?}"), allowed, is_http(url));
    }

    /// Requires a duration: above 0, at most a year.
    pub(crate) fn seconds(&mut self, key: &str, value: f64) {
        self.allowed(key, value, TIME, is_time(value));
    }
}
