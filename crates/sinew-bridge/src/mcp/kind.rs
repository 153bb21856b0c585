//! The environment `mcp` of the registry: its checks and constructors.

#[cfg(feature = "mcp")]
use super::env::McpEnvFactory;
use super::keys::{GIVES, Mcp, shown_folder};
use crate::kind::{check_timeouts, refuse_key};
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, Needs, Sandboxes, Taskset, TasksetError,
};
use sinew_types::Gives;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The environment of the registry.
pub static MCP_KIND: EnvKind = EnvKind::new::<Mcp>(
    "mcp",
    "tools of MCP servers, with tasks and rewards of the recipe",
    Needs {
        sandbox: true,
        alphabet: None,
        rows: true,
        tasks: true,
        reward: true,
    },
);

impl EnvConfig for Mcp {
    fn check(&self) -> Result<(), KeyError> {
        if !(1..=16).contains(&self.servers.len()) {
            let reason = "allowed: 1 to 16, such as [{ command = [\"python3\", \"server.py\"] }]";
            return refuse_key("servers", format!("{} servers", self.servers.len()), reason);
        }
        for (at, server) in self.servers.iter().enumerate() {
            if let Some(why) = server.wrong() {
                return refuse_key("servers", format!("server {}", at + 1), &why);
            }
        }
        if !(1..=4096).contains(&self.sessions) {
            return refuse_key("sessions", self.sessions.to_string(), "allowed: 1 to 4096");
        }
        check_timeouts(&[
            ("timeout_s", self.timeout_s),
            ("startup_timeout_s", self.startup_timeout_s),
        ])
    }

    fn taskset(&self, _seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Err(TasksetError::Config {
            taskset: "mcp".into(),
            field: "tasks",
            value: "missing".into(),
            allowed: "a source of rows, such as tasks = \"tasks.jsonl\"".into(),
        })
    }

    #[cfg(feature = "mcp")]
    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(McpEnvFactory::start(self, sandboxes)?))
    }

    #[cfg(not(feature = "mcp"))]
    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Err(EnvError::Config {
            field: "type",
            value: "\"mcp\"".into(),
            allowed: "this program was built without the feature `mcp`".into(),
        })
    }

    fn gives(&self) -> Gives {
        GIVES
    }

    /// The folders of files that commands name.
    fn shows(&self) -> Vec<PathBuf> {
        let arguments = self.servers.iter().flat_map(|s| &s.command);
        let files = arguments.filter(|a| Path::new(a).is_file());
        let whole = files.filter_map(|f| Path::new(f).canonicalize().ok());
        whole.map(|f| shown_folder(&f).to_path_buf()).collect()
    }
}
