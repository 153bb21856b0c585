//! The keys of `http` in a recipe.

use super::client::HttpEnvFactory;
use super::remote::address;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, Needs, Sandboxes, Taskset, TasksetError,
};
use std::sync::Arc;

/// The environment of the registry.
pub static HTTP_KIND: EnvKind = EnvKind::new::<Http>(
    "http",
    "a server of yours that speaks the protocol of environments",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: true,
        tasks: true,
        reward: false,
    },
);

/// Keys of `[env] type = "http"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// Address of the server, such as `http://127.0.0.1:9100`.
    pub url: String,
    /// Name of the environment variable that holds the server's key, which is sent as `Authorization: Bearer`.
    /// Empty: no key.
    #[serde(default)]
    pub key_env: String,
    /// Deadline of one request with its repeats, in seconds.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub timeout_s: f64,
    /// Longest wait of an episode for a free place of the server, in seconds.
    #[serde(default = "default_wait")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub wait_s: f64,
}

fn default_timeout() -> f64 {
    60.0
}

fn default_wait() -> f64 {
    600.0
}

impl Http {
    /// The keys of a server with their defaults.
    pub fn new(url: &str) -> Self {
        Self {
            url: url.into(),
            key_env: String::new(),
            timeout_s: default_timeout(),
            wait_s: default_wait(),
        }
    }

    /// The key of the server.
    ///
    /// # Errors
    /// If the variable is not set.
    pub(crate) fn key(&self) -> Result<Option<String>, String> {
        if self.key_env.is_empty() {
            return Ok(None);
        }
        let key = std::env::var(&self.key_env).ok().filter(|k| !k.is_empty());
        key.map(Some).ok_or_else(|| {
            format!(
                "the environment variable is not set: export {}=...",
                self.key_env
            )
        })
    }
}

impl EnvConfig for Http {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: &str| {
            let reason = reason.into();
            Err(KeyError { key, value, reason })
        };
        if let Err(why) = address(&self.url) {
            let reason = format!("{why}; allowed: an address such as \"http://127.0.0.1:9100\"");
            return wrong("url", format!("{:?}", self.url), &reason);
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if !self.key_env.chars().all(plain) {
            let reason = "allowed: the name of an environment variable, not the key itself";
            return wrong("key_env", format!("{:?}", self.key_env), reason);
        }
        for (key, seconds) in [("timeout_s", self.timeout_s), ("wait_s", self.wait_s)] {
            if !(0.01..=86_400.0).contains(&seconds) {
                return wrong(key, seconds.to_string(), "allowed: 0.01 to 86400 seconds");
            }
        }
        Ok(())
    }

    fn taskset(&self, _seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Err(TasksetError::Config {
            taskset: "http".into(),
            field: "tasks",
            value: "missing".into(),
            allowed: "a source of rows, such as tasks = \"tasks.jsonl\" or tasks = \"gen.py:rows\""
                .into(),
        })
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(HttpEnvFactory::connect(self)?))
    }

    /// Any call can have a reward: the server decides.
    fn process_reward(&self) -> f64 {
        f64::MAX
    }
}
