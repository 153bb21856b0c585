//! Keys of `coq`.

use super::env::{ProofFactory, ProofSettings};
use super::statements::LEVELS;
use super::tasks::ProofTasks;
use crate::port::{EnvError, EnvFactory};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
use crate::taskset::{Taskset, TasksetError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{Given, Gives};
use std::sync::Arc;
use std::time::Duration;

/// The environment of the registry.
pub const KIND: EnvKind = EnvKind::new::<Coq>(
    "coq",
    "theorems of a generator, proved by scripts that Coq checks in a sandbox",
    Needs {
        sandbox: true,
        alphabet: None,
        rows: false,
        tasks: false,
        reward: false,
    },
);

/// Keys of `[env] type = "coq"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Coq {
    /// Levels to draw from, 1 to 4: chains of implications; all connectives; equations of natural numbers;
    /// induction. Empty: all.
    #[schemars(inner(range(min = 1, max = 4)))]
    levels: Vec<u8>,
    /// Number of training tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    train: usize,
    /// Number of held-out tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    held_out: usize,
    /// Proofs that may be tried in an episode.
    #[schemars(range(min = 1, max = 100))]
    attempts: u32,
    /// Tactics that search for a proof by themselves, such as `tauto`, are allowed: one such word proves most
    /// theorems of levels 1 and 2.
    automation: bool,
    /// Deadline of one run of Coq, in seconds. A check has two or three.
    #[schemars(range(min = 0.1, max = 600.0))]
    timeout_s: f64,
}

impl Default for Coq {
    fn default() -> Self {
        Self {
            levels: Vec::new(),
            train: 10_000,
            held_out: 200,
            attempts: 3,
            automation: false,
            timeout_s: 20.0,
        }
    }
}

impl EnvConfig for Coq {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: &str| {
            let reason = reason.into();
            Err(KeyError { key, value, reason })
        };
        if self.levels.iter().any(|l| !LEVELS.contains(l)) {
            return wrong("levels", format!("{:?}", self.levels), "allowed: 1 to 4");
        }
        for (key, count) in [("train", self.train), ("held_out", self.held_out)] {
            if !(1..=1_000_000).contains(&count) {
                return wrong(key, count.to_string(), "allowed: 1 to 1000000");
            }
        }
        if !(1..=100).contains(&self.attempts) {
            return wrong("attempts", self.attempts.to_string(), "allowed: 1 to 100");
        }
        if !(0.1..=600.0).contains(&self.timeout_s) {
            return wrong(
                "timeout_s",
                self.timeout_s.to_string(),
                "allowed: 0.1 to 600 seconds",
            );
        }
        Ok(())
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        let levels = match self.levels.is_empty() {
            true => LEVELS.collect(),
            false => self.levels.clone(),
        };
        Ok(Arc::new(ProofTasks::new(
            seed,
            levels,
            self.train,
            self.held_out,
        )))
    }

    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        let Some(sandboxes) = sandboxes else {
            return Err(EnvError::Sandbox("coq was given no sandboxes".into()));
        };
        let settings = ProofSettings {
            attempts: self.attempts,
            automation: self.automation,
            deadline: Duration::from_secs_f64(self.timeout_s),
        };
        Ok(Arc::new(ProofFactory::new(sandboxes, settings)))
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}

/// What algorithms can read of an episode.
const GIVES: Gives = Gives {
    states: Given::Yes,
    turn_rewards: Given::No("a proof counts as a whole; take an algorithm without turn rewards"),
    tool_counts: Given::Yes,
    format_penalty: Given::Yes,
};
