//! `[reward]`: rewards of a user's own, with weights.

use crate::Level;
use crate::RunPlan;
use crate::judge::JUDGE;
use crate::late::{self, LATE, LateSection};
use crate::rule::Rules;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One reward by name, `FILE.py:FUNCTION`, or several with weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "reward: a reward such as \"exact(answer)\", or a table of rewards with weights such as \
                 { \"exact(answer)\" = 1.0 }"
)]
pub enum RewardSection {
    /// One reward of weight 1, such as `exact(answer)`.
    One(String),
    /// Rewards and their weights.
    Several(BTreeMap<String, RewardTerm>),
}

/// Weight of a reward in the sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a weight such as 1.0, { weight = 1.0, clip = [0.0, 1.0] }, or for `late` a table with names"
)]
pub enum RewardTerm {
    /// Factor. 0: a measurement that is not part of the sum.
    Weight(f64),
    /// Factor, and limits of the value before it is multiplied.
    Limited(LimitedTerm),
    /// Of the key `late` alone: rewards that come from outside.
    Late(LateSection),
}

/// A weighted reward with limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitedTerm {
    /// Factor. 0: a measurement that is not part of the sum.
    pub weight: f64,
    /// Lower and upper limit of the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip: Option<[f64; 2]>,
}

impl RewardSection {
    /// Every reward as typed, with its weight and limits.
    pub fn terms(&self) -> Vec<(&str, f64, Option<[f64; 2]>)> {
        match self {
            Self::One(name) => vec![(name, 1.0, None)],
            Self::Several(terms) => terms
                .iter()
                .filter_map(|(name, term)| match term {
                    RewardTerm::Weight(weight) => Some((name.as_str(), *weight, None)),
                    RewardTerm::Limited(limited) => {
                        Some((name.as_str(), limited.weight, limited.clip))
                    }
                    RewardTerm::Late(_) => None,
                })
                .collect(),
        }
    }

    /// Rewards that come from outside, after an episode has ended.
    pub fn late(&self) -> Option<&LateSection> {
        match self {
            Self::One(_) => None,
            Self::Several(terms) => terms.values().find_map(|term| match term {
                RewardTerm::Late(late) => Some(late),
                _ => None,
            }),
        }
    }

    /// Whether one of the rewards is a Python function, which runs in sandboxes.
    pub fn has_python(&self) -> bool {
        self.terms().iter().any(|(name, ..)| Self::is_python(name))
    }

    /// Names of the judges among the rewards, without `judge.`.
    pub fn judges(&self) -> impl Iterator<Item = &str> {
        let names = self.terms().into_iter();
        names.filter_map(|(name, ..)| name.strip_prefix(JUDGE))
    }

    /// Whether a reward is a Python function, `FILE.py:FUNCTION`.
    pub fn is_python(name: &str) -> bool {
        name.split_once(".py:")
            .is_some_and(|(_, f)| !f.contains(['(', '"', ' ']))
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let Some(reward) = &plan.reward else {
        let env = plan.env.name();
        rules.allowed(
            "reward",
            "missing",
            &format!(
                "a reward such as reward = \"exact(answer)\": env.type = \"{env}\" has no score of its own"
            ),
            !plan.env.needs().reward || !plan.harness.is_graded(),
        );
        return;
    };
    if let RewardSection::Several(terms) = reward {
        let stray = |(name, term): (&String, &RewardTerm)| {
            (name == LATE) != matches!(term, RewardTerm::Late(_))
        };
        rules.allowed(
            "reward.late",
            "of another kind",
            "a table with names, which no other key of [reward] has",
            !terms.iter().any(stray),
        );
    }
    if let Some(late) = reward.late() {
        late::rules(plan, late, rules);
    }
    let terms = reward.terms();
    let level = plan.sandbox.level;
    rules.custom(
        "sandbox.level",
        level.name(),
        "functions of [reward] run at level \"process\"".into(),
        level == Level::Process || !reward.has_python(),
    );
    for (name, weight, clip) in &terms {
        rules.allowed("reward", weight, "a finite weight", weight.is_finite());
        if let Some([low, high]) = clip {
            let shown = format!("clip = [{low}, {high}] of {name:?}");
            rules.allowed(
                "reward",
                shown,
                "a lower limit below an upper one",
                low < high,
            );
        }
        if RewardSection::is_python(name) || name.starts_with(JUDGE) {
            continue;
        }
        if let Err(e) = sinew_reward::named(name) {
            rules.custom("reward", format!("{name:?}"), e.reason, false);
        }
    }
    rules.allowed(
        "reward",
        format!("{} rewards, all of weight 0", terms.len()),
        "at least one weight that is not 0",
        terms.iter().any(|(_, weight, _)| *weight != 0.0)
            || (terms.is_empty() && reward.late().is_some()),
    );
}
