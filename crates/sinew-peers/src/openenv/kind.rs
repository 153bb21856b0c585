//! The environment `openenv` of the registry: its checks and constructors.

use super::env::OpenEnvFactory;
use super::keys::{GIVES, OpenEnv};
use crate::keys::check_client;
use crate::seeds::SeedTasks;
use sinew_bridge::remote::{check_timeouts, refuse_key};
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
        check_client(&self.url, self.sessions)?;
        if self.train == 0 || self.held_out == 0 {
            let key = if self.train == 0 { "train" } else { "held_out" };
            return refuse_key(key, "0".into(), "allowed: 1 or more");
        }
        if !self.solved_at.is_finite() {
            return refuse_key("solved_at", self.solved_at.to_string(), "allowed: a number");
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
