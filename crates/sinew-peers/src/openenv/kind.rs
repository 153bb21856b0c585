//! The environment `openenv` of the registry: its checks and constructors.

use super::env::OpenEnvFactory;
use super::keys::{GIVES, OpenEnv};
use crate::seeds::SeedTasks;
use sinew_bridge::remote::{address, check_timeouts};
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, Needs, Sandboxes, Taskset, TasksetError,
};
use sinew_types::Gives;
use std::sync::Arc;

/// The environment of the registry.
pub static OPENENV_KIND: EnvKind = EnvKind::new::<OpenEnv>(
    "openenv",
    "a server of OpenEnv, over WebSocket",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: true,
        tasks: false,
        reward: false,
    },
);

impl EnvConfig for OpenEnv {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: &str| {
            let reason = reason.into();
            Err(KeyError { key, value, reason })
        };
        if let Err(why) = address(&self.url) {
            let reason = format!("{why}; allowed: an address such as \"http://127.0.0.1:8000\"");
            return wrong("url", format!("{:?}", self.url), &reason);
        }
        if !(1..=4096).contains(&self.sessions) {
            return wrong("sessions", self.sessions.to_string(), "allowed: 1 to 4096");
        }
        if self.train == 0 || self.held_out == 0 {
            let key = if self.train == 0 { "train" } else { "held_out" };
            return wrong(key, "0".into(), "allowed: 1 or more");
        }
        if !self.solved_at.is_finite() {
            return wrong("solved_at", self.solved_at.to_string(), "allowed: a number");
        }
        check_timeouts(&[("timeout_s", self.timeout_s), ("wait_s", self.wait_s)])
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Ok(Arc::new(SeedTasks::new(
            "openenv",
            &self.prompt,
            self.train,
            self.held_out,
            seed,
        )))
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(OpenEnvFactory::connect(self)?))
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}
