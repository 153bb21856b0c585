//! The environment `http` of the registry: its checks and constructors.

use super::client::HttpEnvFactory;
use super::keys::Http;
use super::remote::address;
use crate::kind::{check_timeouts, refuse_key};
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, Needs, Sandboxes, Taskset, TasksetError,
};
use sinew_types::Gives;
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

/// Checks the key `url` of a server; `example` is an address for the message.
///
/// # Errors
/// If it is no address of a server.
pub fn check_address(url: &str, example: &str) -> Result<(), KeyError> {
    let Err(why) = address(url) else {
        return Ok(());
    };
    let reason = format!("{why}; allowed: an address such as {example:?}");
    refuse_key("url", format!("{url:?}"), &reason)
}

impl EnvConfig for Http {
    fn check(&self) -> Result<(), KeyError> {
        check_address(&self.url, "http://127.0.0.1:9100")?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if !self.key_env.chars().all(plain) {
            let reason = "allowed: the name of an environment variable, not the key itself";
            return refuse_key("key_env", format!("{:?}", self.key_env), reason);
        }
        check_timeouts(&[("timeout_s", self.timeout_s), ("wait_s", self.wait_s)])
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

    /// The server decides, and describes itself when it is asked.
    fn gives(&self) -> Gives {
        Gives::MAYBE
    }
}
