//! `[reward.late]`: rewards that come from outside, after an episode has ended.
//!
//! `[reward.late]` waits for these scores, which are records in the store, and adds them to the reward. Times
//! are in seconds.

use crate::rule::Rules;
use crate::store::needs_durable;
use crate::{RunPlan, TIME, is_time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Key of [`LateSection`] among the rewards.
pub(crate) const LATE: &str = "late";

/// Names of rewards, or names with weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "names such as [\"thumbs\"], or with weights such as { thumbs = 1.0 }"
)]
pub enum LateNames {
    /// Each with weight 1.
    Names(Vec<String>),
    /// Names with weights. 0: a measurement that is not waited for.
    Weighted(BTreeMap<String, f64>),
}

/// Fate of a group whose rewards come when the policy has moved on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LateAfter {
    /// It is left out, and counted with the reason.
    #[default]
    Drop,
    /// It is trained, corrected by the algorithm's importance ratio, at most one such group for each other
    /// group of a step.
    Offline,
}

/// Rewards that come from outside, by `sinew reward import` or over HTTP. A group waits for them on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LateSection {
    /// Rewards that every episode must get from outside: names, or names with weights. An episode without
    /// one of them is unscored.
    pub names: LateNames,
    /// Seconds that a group waits after its last episode.
    #[serde(default = "two_days")]
    #[schemars(range(min = 0.0, max = 31_536_000.0))]
    pub wait_s: f64,
    /// Fate of a group that is more than `max_staleness` updates behind the policy: `drop` leaves it
    /// out, `offline` trains it, at most one such group for each other group of a step.
    #[serde(default)]
    pub after: LateAfter,
    /// When the time is up, train on the episodes of a group that have their rewards.
    #[serde(default)]
    pub partial: bool,
    /// Updates that a group may be behind the policy.
    #[serde(default = "default_staleness")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_staleness: u64,
    /// Groups that may wait; above it no others are begun, and with `harness.type = "live"` the oldest are
    /// left out.
    #[serde(default = "default_waiting")]
    #[schemars(range(min = 1, max = 65_536))]
    pub max_waiting: usize,
}

fn two_days() -> f64 {
    172_800.0
}

fn default_staleness() -> u64 {
    16
}

fn default_waiting() -> usize {
    256
}

impl LateSection {
    /// Returns names and weights.
    pub fn terms(&self) -> Vec<(&str, f64)> {
        match &self.names {
            LateNames::Names(names) => names.iter().map(|n| (n.as_str(), 1.0)).collect(),
            LateNames::Weighted(names) => names.iter().map(|(n, w)| (n.as_str(), *w)).collect(),
        }
    }
}

pub(crate) fn rules(plan: &RunPlan, late: &LateSection, rules: &mut Rules) {
    let terms = late.terms();
    rules.allowed(
        "reward.late.names",
        format!("{} names", terms.len()),
        "at least one with a weight that is not 0",
        terms.iter().any(|(_, weight)| *weight != 0.0),
    );
    for (n, (name, weight)) in terms.iter().enumerate() {
        let plain = (1..=128).contains(&name.len()) && !name.chars().any(char::is_control);
        let once = terms.iter().skip(n + 1).all(|(other, _)| other != name);
        rules.allowed(
            "reward.late.names",
            format!("{name:?}"),
            "names of 1 to 128 bytes, each once",
            plain && once,
        );
        rules.allowed(
            "reward.late.names",
            weight,
            "a finite weight",
            weight.is_finite(),
        );
    }
    rules.allowed(
        "reward.late.wait_s",
        late.wait_s,
        TIME,
        is_time(late.wait_s),
    );
    rules.range(
        "reward.late.max_staleness",
        late.max_staleness,
        1..=1_000_000,
    );
    rules.range("reward.late.max_waiting", late.max_waiting, 1..=65_536);
    needs_durable(plan, "groups wait for [reward.late] in the store", rules);
    rules.custom(
        "data.type",
        "...",
        "[reward.late] waits for the rewards of episodes that the run samples: remove [data] or [reward.late]",
        plan.data.is_none(),
    );
    rules.custom(
        "tasks.order",
        "\"adaptive\"",
        "learns from the rewards of a step when it ends, and those of [reward.late] come later: use \"uniform\"",
        plan.tasks.adaptive().is_none(),
    );
    rules.custom(
        "algorithm.refill",
        plan.algorithm.refill.unwrap_or_default(),
        "compares the rewards of a step when it ends, and those of [reward.late] come later: remove it",
        plan.algorithm.refill.is_none(),
    );
}
