//! `[reward]`: rewards of a user's own, with weights.

use crate::Level;
use crate::RunPlan;
use crate::judge::{JUDGE, JudgeMode};
use crate::late::{self, LATE, LateSection};
use crate::rule::Rules;
use crate::urls::is_http;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_reward::{
    PAIRS, TermSpec, WORKERS, has_deadline, is_function, needs_sandbox, needs_workers,
};
use std::collections::BTreeMap;
use std::time::Duration;

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
    Several(RewardTable),
}

/// A table of rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RewardTable {
    /// Worker processes of functions in Python. Left out: 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub workers: Option<usize>,
    /// Python interpreter of functions and of `math`, whose packages they import: a path, or a name in
    /// `PATH`. Left out: `python3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// Rewards and their weights.
    #[serde(flatten)]
    pub terms: BTreeMap<String, RewardTerm>,
}

/// Weight of a reward in the sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a weight such as 1.0, { weight = 1.0, clip = [0.0, 1.0], timeout_s = 5.0, pairs = 64 }, or for \
                 `late` a table with names"
)]
pub enum RewardTerm {
    /// Factor. 0: a measurement that is not part of the sum.
    Weight(f64),
    /// Factor, and limits of the value before it is multiplied.
    Limited(LimitedTerm),
    /// Rewards that come from outside; only under the key `late`.
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
    /// Environment variable with the key of a reward server. Left out: no key is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_env: Option<String>,
    /// Deadline of one call of a function, of `math`, `tests` and `program`, 0.01 s to a day; of one sample
    /// at most `rollout.score_timeout_s`. Of a reward server: limit of one request. Left out: 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// Maximum number of pairs of a group that a judge with `mode = "compare"`, or a function with the
    /// parameters `a` and `b`, compares; at least `rollout.group_size`. Left out: 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<usize>,
    /// Maximum samples of one request to a reward server, 1 to 1024. Left out: 32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
}

impl LimitedTerm {
    /// Creates a term with only a weight.
    fn of(weight: f64) -> Self {
        Self {
            weight,
            clip: None,
            key_env: None,
            timeout_s: None,
            pairs: None,
            batch: None,
        }
    }
}

/// A reward server of a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RewardServerPlan<'a> {
    /// Address of the server.
    pub url: &'a str,
    /// Environment variable that contains its key.
    pub key_env: Option<&'a str>,
    /// Limit of one request, in seconds.
    pub timeout_s: f64,
    /// Maximum number of samples in one request.
    pub batch: usize,
}

/// Default Python interpreter of reward functions.
const PYTHON: &str = "python3";
/// Prefix of the name of a reward model in `[reward]`.
const MODEL: &str = "model:";

impl RewardSection {
    /// Returns every reward as written, with its limits.
    pub(crate) fn all(&self) -> Vec<(&str, LimitedTerm)> {
        match self {
            Self::One(name) => vec![(name, LimitedTerm::of(1.0))],
            Self::Several(table) => table
                .terms
                .iter()
                .filter_map(|(name, term)| match term {
                    RewardTerm::Weight(weight) => Some((name.as_str(), LimitedTerm::of(*weight))),
                    RewardTerm::Limited(limited) => Some((name.as_str(), limited.clone())),
                    RewardTerm::Late(_) => None,
                })
                .collect(),
        }
    }

    /// Returns the rewards that come from outside, after an episode has ended.
    pub fn late(&self) -> Option<&LateSection> {
        match self {
            Self::One(_) => None,
            Self::Several(table) => table.terms.values().find_map(|term| match term {
                RewardTerm::Late(late) => Some(late),
                _ => None,
            }),
        }
    }

    /// Returns every reward in the form for building it.
    pub fn terms(&self) -> Vec<TermSpec<'_>> {
        let spec = |(name, term): (_, LimitedTerm)| TermSpec {
            name,
            weight: term.weight,
            clip: term.clip,
            timeout: term
                .timeout_s
                .and_then(|s| Duration::try_from_secs_f64(s).ok()),
            pairs: term.pairs,
        };
        self.all().into_iter().map(spec).collect()
    }

    /// Returns the server of a reward, if the reward is a server.
    pub fn server<'a>(&'a self, name: &'a str) -> Option<RewardServerPlan<'a>> {
        if !is_http(name) {
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

    /// Returns the reward servers, in order.
    pub fn servers(&self) -> Vec<RewardServerPlan<'_>> {
        let names = self.terms().into_iter();
        names.filter_map(|t| self.server(t.name)).collect()
    }

    /// Returns the table of a reward, if it has one.
    fn limited(&self, name: &str) -> Option<&LimitedTerm> {
        match self {
            Self::Several(table) => match table.terms.get(name)? {
                RewardTerm::Limited(limited) => Some(limited),
                RewardTerm::Weight(_) | RewardTerm::Late(_) => None,
            },
            Self::One(_) => None,
        }
    }

    /// Returns the source of a reward model, without `model:`.
    pub fn model(name: &str) -> Option<&str> {
        name.strip_prefix(MODEL)
    }

    /// Whether a reward is a built-in one, selected by name: not a function, a server, a reward model or a
    /// judge.
    fn is_named(name: &str) -> bool {
        let others = ["http://", "https://", MODEL, JUDGE];
        !is_function(name) && !others.iter().any(|start| name.starts_with(start))
    }

    /// Whether any reward comes from a model or a server.
    pub fn is_outside(&self) -> bool {
        let outside = |name: &str| !is_function(name) && !Self::is_named(name);
        self.all().iter().any(|(name, _)| outside(name))
    }

    /// Returns the names of the judges among the rewards, without `judge.`.
    pub fn judges(&self) -> impl Iterator<Item = &str> {
        let names = self.all().into_iter();
        names.filter_map(|(name, _)| name.strip_prefix(JUDGE))
    }

    /// Worker processes of functions.
    pub fn workers(&self) -> usize {
        match self {
            Self::One(_) => WORKERS,
            Self::Several(table) => table.workers.unwrap_or(WORKERS),
        }
    }

    /// Python interpreter for functions.
    pub fn python(&self) -> &str {
        match self {
            Self::One(_) => PYTHON,
            Self::Several(table) => table.python.as_deref().unwrap_or(PYTHON),
        }
    }

    /// Whether any reward runs in Python workers: a function, or `math`.
    pub fn has_python(&self) -> bool {
        self.all().iter().any(|(name, _)| needs_workers(name))
    }

    /// Whether any reward runs code of the model in sandboxes.
    pub fn has_code(&self) -> bool {
        self.all().iter().any(|(name, _)| needs_sandbox(name))
    }
}

impl RunPlan {
    /// Whether a reward is a judge that compares the answers of a group.
    fn compares(&self, name: &str) -> bool {
        let judge = name.strip_prefix(JUDGE).and_then(|j| self.judges.get(j));
        judge.is_some_and(|j| j.mode == JudgeMode::Compare)
    }

    /// Maximum number of pairs of a group that a comparing reward compares; `None` for other rewards.
    pub fn compared_pairs(&self, term: &TermSpec<'_>) -> Option<usize> {
        let pairs = term.pairs.unwrap_or(PAIRS);
        self.compares(term.name).then_some(pairs)
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let mixture = plan.env.is_mixture();
    rules.custom(
        "reward",
        "{ ... }",
        "has no effect with [[env]]: each environment has a reward of its own; put it into them",
        !(mixture && plan.reward.is_some()),
    );
    if let Some(late) = plan.reward.as_ref().and_then(RewardSection::late) {
        late::rules(plan, late, rules);
    }
    for (i, world) in plan.worlds().into_iter().enumerate() {
        rules.custom(
            &format!("{}.reward", plan.env.key(i)),
            "{ late = ... }",
            "rewards from outside need a single [env]; remove `late`",
            !(mixture && world.reward.is_some_and(|r| r.late().is_some())),
        );
        let key = if mixture {
            format!("{}.reward", plan.env.key(i))
        } else {
            "reward".to_owned()
        };
        match world.reward {
            Some(reward) => terms(reward, &key, plan, rules),
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

/// Adds the rules for the rewards of one environment.
fn terms(reward: &RewardSection, key: &str, plan: &RunPlan, rules: &mut Rules) {
    if let RewardSection::Several(table) = reward {
        let stray = |(name, term): (&String, &RewardTerm)| {
            (name == LATE) != matches!(term, RewardTerm::Late(_))
        };
        rules.allowed(
            &format!("{key}.late"),
            "of another kind",
            "a table with names, which no other key of [reward] has",
            !table.terms.iter().any(stray),
        );
    }
    let terms = reward.all();
    let level = plan.sandbox.level;
    rules.custom(
        "sandbox.level",
        level.name(),
        "functions of [reward], and math, run at level \"process\"",
        level == Level::Process || !reward.has_python(),
    );
    rules.custom(
        "sandbox.level",
        level.name(),
        "tests and program of [reward] start processes: allowed are process, container, microvm",
        level != Level::Wasm || !reward.has_code(),
    );
    if let RewardSection::Several(RewardTable {
        workers: Some(n), ..
    }) = reward
    {
        rules.range(key, *n, 1..=256);
        let reason = "workers has no effect without a function in Python; remove it";
        rules.custom(key, n, reason, reward.has_python());
    }
    if let RewardSection::Several(RewardTable {
        python: Some(python),
        ..
    }) = reward
    {
        let key = format!("{key}.python");
        let shown = format!("{python:?}");
        let reason = "has no effect without a function in Python; remove it";
        rules.custom(&key, &shown, reason, reward.has_python());
        let allowed = "the path of a Python interpreter, or its name in PATH";
        rules.allowed(&key, shown, allowed, !python.is_empty());
    }
    for (name, term) in &terms {
        server_rules(reward, name, rules);
        limits(name, term, plan, rules);
    }
    rules.allowed(
        key,
        format!("{} rewards, all of weight 0", terms.len()),
        "at least one weight that is not 0",
        terms.iter().any(|(_, term)| term.weight != 0.0)
            || (terms.is_empty() && reward.late().is_some()),
    );
}

/// Refuses keys of reward servers for other rewards.
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
                ("batch", limited.batch.is_some()),
            ];
            for (key, typed) in typed {
                let reason = "is a key of reward servers (\"http://...\"); remove it";
                rules.custom("reward", format!("{key} of {name:?}"), reason, !typed);
            }
        }
        (None, None) => {}
    }
}

/// Adds the rules for the limits of one term.
fn limits(name: &str, term: &LimitedTerm, plan: &RunPlan, rules: &mut Rules) {
    let weight = term.weight;
    rules.allowed("reward", weight, "a finite weight", weight.is_finite());
    let of = |key: &str, value: String| format!("{key} = {value} of {name:?}");
    if let Some([low, high]) = term.clip {
        let shown = of("clip", format!("[{low}, {high}]"));
        let allowed = "a lower limit below an upper one";
        rules.allowed("reward", shown, allowed, low < high);
    }
    if let Some(seconds) = term.timeout_s.filter(|_| !is_http(name)) {
        let shown = of("timeout_s", seconds.to_string());
        let in_range = (0.01..=86_400.0).contains(&seconds);
        rules.allowed("reward", &shown, "0.01 to 86400 seconds", in_range);
        let reason = "has no effect: the reward is computed at once; remove it";
        rules.custom("reward", &shown, reason, has_deadline(name));
    }
    let compares = plan.compares(name);
    if let Some(pairs) = term.pairs {
        let shown = of("pairs", pairs.to_string());
        let group = plan.rollout.group_size;
        let allowed = format!("{group} (rollout.group_size) to 65536: each member needs one");
        let in_range = (group..=65_536).contains(&pairs);
        rules.allowed("reward", &shown, &allowed, in_range);
        let reason = "has no effect: the reward compares no samples; remove it";
        rules.custom("reward", &shown, reason, is_function(name) || compares);
    } else if compares {
        let group = plan.rollout.group_size;
        rules.custom(
            "reward",
            format!("{name:?}"),
            format!(
                "compares up to {PAIRS} pairs, and each of the {group} members of a group (rollout.group_size) needs \
                 one: write {{ weight = {weight:?}, pairs = {group} }}"
            ),
            group <= PAIRS,
        );
    }
    let source = RewardSection::model(name);
    rules.allowed(
        "reward",
        format!("{name:?}"),
        "the source of a reward model after `model:`, such as \"model:hf:ORG/NAME\"",
        source.is_none_or(|s| !s.is_empty()),
    );
    if !RewardSection::is_named(name) {
        return;
    }
    if let Err(e) = sinew_reward::check(name) {
        rules.custom("reward", format!("{name:?}"), e.reason, false);
    }
}
