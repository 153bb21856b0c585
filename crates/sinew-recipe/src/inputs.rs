//! Compares the inputs that an algorithm reads with those that the episodes of a run have.
//!
//! An algorithm declares its needs ([`Needs`](sinew_algo::Needs)); environments and agents declare the inputs
//! that they provide ([`Gives`]). Most inputs follow from the recipe. A Python class or a server declares its
//! inputs only when it starts, and they are compared again then.

use crate::rule::Rules;
use crate::{EnvMember, HarnessSection, RunPlan};
use sinew_types::{EpisodeInput, Gives, InputPresence};
use std::fmt;

/// An input that the algorithm reads, but that the episodes of an environment lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingInput {
    /// Recipe key that needs the input.
    pub key: &'static str,
    /// Value of the key, as shown in messages.
    pub value: String,
    /// The input, the part that does not provide it, and a remedy.
    pub reason: String,
}

impl fmt::Display for MissingInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: {}", self.key, self.value, self.reason)
    }
}

impl std::error::Error for MissingInput {}

impl HarnessSection {
    /// Returns the inputs that episodes provide, for an environment that provides `env`.
    pub fn gives(&self, env: Gives) -> Gives {
        if self.is_built_in() {
            return env;
        }
        let states = InputPresence::No("an agent outside has no states; use the built-in loop");
        if !self.is_graded() {
            return Gives {
                states,
                // Its report may have `rewards` and `metrics`.
                ..Gives::MAYBE
            };
        }
        let fix = "the environment sees the answer of an agent outside alone; let the agent report them with \
             harness.scored_by = \"agent\", or use the built-in loop";
        Gives {
            states,
            ..Gives::all(InputPresence::No(fix))
        }
    }
}

impl RunPlan {
    /// Lists the inputs that the algorithm reads but that the episodes of one environment lack; the
    /// environment provides `gives`. Stored data is not checked here: each of its groups is checked when it
    /// is drawn.
    pub fn missing_inputs(&self, env: &EnvMember, gives: Gives) -> Vec<MissingInput> {
        if self.data.is_some() {
            return Vec::new();
        }
        let given = self.harness.gives(gives);
        let read = self.needs();
        let missing = read
            .of_episodes()
            .filter_map(|input| match given.of(input) {
                InputPresence::No(fix) => Some(self.missing(env, input, fix)),
                InputPresence::Yes | InputPresence::Maybe => None,
            });
        missing.collect()
    }

    fn missing(&self, env: &EnvMember, input: EpisodeInput, fix: &str) -> MissingInput {
        let kind = self.algorithm.kind;
        let own = kind.preset().needs().of_episodes().any(|i| i == input);
        let (part, other) = match input {
            EpisodeInput::States => (
                "algorithm.advantage",
                "take another algorithm, such as `grpo`",
            ),
            EpisodeInput::TurnRewards => {
                ("algorithm.process", "set algorithm.process to another type")
            }
            EpisodeInput::ToolCounts | EpisodeInput::FormatPenalty => (
                "algorithm.resample",
                "take an algorithm that keeps all episodes, such as `dapo`",
            ),
        };
        let (key, value) = if own {
            ("algorithm.type", format!("\"{kind}\""))
        } else {
            (part, "{ ... }".to_owned())
        };
        let (name, of) = (&env.name, env.kind_name());
        let source = match (self.harness.is_built_in(), name.is_empty()) {
            (false, _) => format!("harness.type = \"{}\"", self.harness.name()),
            (true, true) => format!("env.type = \"{of}\""),
            (true, false) => format!("[[env]] name = \"{name}\" of type \"{of}\""),
        };
        let what = input.name();
        MissingInput {
            key,
            value,
            reason: format!(
                "it reads {what}, and episodes of {source} have none: {fix}, or {other}"
            ),
        }
    }

    /// Lists in one line the inputs of the algorithm other than tokens and outcomes; `None`: there are none.
    pub fn inputs_read(&self) -> Option<String> {
        let needs = self.needs();
        let mut read: Vec<&str> = needs.of_episodes().map(EpisodeInput::name).collect();
        let of_run = [
            (needs.values, "a critic"),
            (needs.reference(), "a reference model"),
            (needs.teacher(), "a teacher"),
        ];
        read.extend(
            of_run
                .into_iter()
                .filter(|(reads, _)| *reads)
                .map(|(_, name)| name),
        );
        (!read.is_empty()).then(|| format!("`{}` reads {}", self.algorithm.kind, read.join(", ")))
    }
}

/// Adds rules for the missing inputs that are known from the recipe, for each environment.
pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    for env in plan.env.members() {
        for missing in plan.missing_inputs(env, env.config().gives()) {
            rules.custom(missing.key, missing.value, missing.reason, false);
        }
    }
}
