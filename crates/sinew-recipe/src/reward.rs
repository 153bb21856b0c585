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
    /// Of a reward server: environment variable that has its key. Left out: no key is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_env: Option<String>,
    /// Of a reward server: limit of one request. Left out: 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// Of a reward server: maximum samples of one request, 1 to 1024. Left out: 32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
}

/// A reward server of a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RewardServerPlan<'a> {
    /// Its address.
    pub url: &'a str,
    /// Environment variable that has its key.
    pub key_env: Option<&'a str>,
    /// Limit of one request, in seconds.
    pub timeout_s: f64,
    /// Maximum samples of one request.
    pub batch: usize,
}

/// Start of the name of a reward model in `[reward]`.
const MODEL: &str = "model:";

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

    /// The server that a reward is, if it is one.
    pub fn server<'a>(&'a self, name: &'a str) -> Option<RewardServerPlan<'a>> {
        if !(name.starts_with("http://") || name.starts_with("https://")) {
            return None;
        }
        let limited = self.limited(name);
        Some(RewardServerPlan {
            url: name,
            key_env: limited.and_then(|l| l.key_env.as_deref()),
            timeout_s: limited.and_then(|l| l.timeout_s).unwrap_or(30.0),
            batch: limited.and_then(|l| l.batch).unwrap_or(32),
        })
    }

    /// The reward servers, in order.
    pub fn servers(&self) -> Vec<RewardServerPlan<'_>> {
        let names = self.terms().into_iter();
        names.filter_map(|(name, ..)| self.server(name)).collect()
    }

    /// The table of a reward, if it has one.
    fn limited(&self, name: &str) -> Option<&LimitedTerm> {
        match self {
            Self::Several(terms) => match terms.get(name)? {
                RewardTerm::Limited(limited) => Some(limited),
                RewardTerm::Weight(_) | RewardTerm::Late(_) => None,
            },
            Self::One(_) => None,
        }
    }

    /// Source of the reward model that a reward is, without `model:`.
    pub fn model(name: &str) -> Option<&str> {
        name.strip_prefix(MODEL)
    }

    /// Whether a reward has no place outside of the recipe's process and files: rewards by name alone.
    fn is_named(name: &str) -> bool {
        let others = ["http://", "https://", MODEL, JUDGE];
        !Self::is_python(name) && !others.iter().any(|start| name.starts_with(start))
    }

    /// Whether a reward comes from a model or a server.
    pub fn is_outside(&self) -> bool {
        let outside = |name: &str| !Self::is_python(name) && !Self::is_named(name);
        self.terms().iter().any(|(name, ..)| outside(name))
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
    let mixture = plan.env.is_mixture();
    rules.custom(
        "reward",
        "{ ... }",
        "has no effect with [[env]]: each environment has a reward of its own; put it into them"
            .into(),
        !(mixture && plan.reward.is_some()),
    );
    if let Some(late) = plan.reward.as_ref().and_then(RewardSection::late) {
        late::rules(plan, late, rules);
    }
    for (i, world) in plan.worlds().into_iter().enumerate() {
        rules.custom(
            &format!("{}.reward", plan.env.key(i)),
            "{ late = ... }",
            "rewards from outside need a single [env]; remove `late`".into(),
            !(mixture && world.reward.is_some_and(|r| r.late().is_some())),
        );
        let key = match mixture {
            true => format!("{}.reward", plan.env.key(i)),
            false => "reward".to_owned(),
        };
        match world.reward {
            Some(reward) => terms(reward, &key, plan.sandbox.level, rules),
            None => rules.allowed(
                &key,
                "missing",
                &format!(
                    "a reward such as reward = \"exact(answer)\": env.type = \"{}\" has no score of its own",
                    world.env.kind_name()
                ),
                !world.env.needs().reward || !plan.harness.is_graded(),
            ),
        }
    }
}

/// The rewards of one environment.
fn terms(reward: &RewardSection, key: &str, level: Level, rules: &mut Rules) {
    if let RewardSection::Several(terms) = reward {
        let stray = |(name, term): (&String, &RewardTerm)| {
            (name == LATE) != matches!(term, RewardTerm::Late(_))
        };
        rules.allowed(
            &format!("{key}.late"),
            "of another kind",
            "a table with names, which no other key of [reward] has",
            !terms.iter().any(stray),
        );
    }
    let terms = reward.terms();
    rules.custom(
        "sandbox.level",
        level.name(),
        "functions of [reward] run at level \"process\"".into(),
        level == Level::Process || !reward.has_python(),
    );
    for (name, weight, clip) in &terms {
        rules.allowed(key, weight, "a finite weight", weight.is_finite());
        if let Some([low, high]) = clip {
            let shown = format!("clip = [{low}, {high}] of {name:?}");
            rules.allowed(key, shown, "a lower limit below an upper one", low < high);
        }
        server_rules(reward, name, rules);
        let source = RewardSection::model(name);
        rules.allowed(
            "reward",
            format!("{name:?}"),
            "the source of a reward model after `model:`, such as \"model:hf:ORG/NAME\"",
            source.is_none_or(|s| !s.is_empty()),
        );
        if !RewardSection::is_named(name) {
            continue;
        }
        if let Err(e) = sinew_reward::named(name) {
            rules.custom(key, format!("{name:?}"), e.reason, false);
        }
    }
    rules.allowed(
        key,
        format!("{} rewards, all of weight 0", terms.len()),
        "at least one weight that is not 0",
        terms.iter().any(|(_, weight, _)| *weight != 0.0)
            || (terms.is_empty() && reward.late().is_some()),
    );
}

/// Keys of reward servers, which other rewards do not have.
fn server_rules(reward: &RewardSection, name: &str, rules: &mut Rules) {
    match (reward.server(name), reward.limited(name)) {
        (Some(server), _) => {
            rules.seconds("reward", server.timeout_s);
            let allowed = "a batch of 1 to 1024 samples";
            rules.allowed(
                "reward",
                server.batch,
                allowed,
                (1..=1024).contains(&server.batch),
            );
        }
        (None, Some(limited)) => {
            let typed = [
                ("key_env", limited.key_env.is_some()),
                ("timeout_s", limited.timeout_s.is_some()),
                ("batch", limited.batch.is_some()),
            ];
            for (key, typed) in typed {
                let reason = "is a key of reward servers (\"http://...\"); remove it".to_owned();
                rules.custom("reward", format!("{key} of {name:?}"), reason, !typed);
            }
        }
        (None, None) => {}
    }
}
