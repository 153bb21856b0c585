//! The keys of `http` in a recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Keys of `[env] type = "http"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// Address of the server, such as `http://127.0.0.1:9100`.
    pub url: String,
    /// Name of the environment variable that holds the server's key, which is sent as
    /// `Authorization: Bearer`. Empty: no key.
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

/// Seconds for one request with its repeats.
fn default_timeout() -> f64 {
    60.0
}

/// Seconds: ten minutes, as episodes of others may take long.
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
}
