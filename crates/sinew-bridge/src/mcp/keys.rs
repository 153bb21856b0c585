//! The keys of `mcp` in a recipe.

use crate::http::address;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{Gives, InputPresence};
use std::collections::BTreeMap;
use std::path::Path;

/// Data of an episode that algorithms can read: the protocol has neither states nor rewards.
pub(super) const GIVES: Gives = Gives {
    states: InputPresence::No(OF_A_CLASS),
    turn_rewards: InputPresence::No(OF_A_CLASS),
    tool_counts: InputPresence::Yes,
    format_penalty: InputPresence::Yes,
};

/// Way out where an algorithm reads what the protocol does not have.
const OF_A_CLASS: &str =
    "MCP has no such thing; take a class of yours with these tools, with env.type = \"python\"";

/// Keys of `[env] type = "mcp"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mcp {
    /// Servers whose tools the model has, 1 to 16.
    pub servers: Vec<McpServer>,
    /// Episodes at once, each with a session of its own at every server.
    #[serde(default = "default_sessions")]
    #[schemars(range(min = 1, max = 4096))]
    pub sessions: usize,
    /// Deadline of one call, in seconds. Later, the call is cancelled, and the model sees that it took too
    /// long.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub timeout_s: f64,
    /// Deadline of the start of a session, and of waiting for a free one, in seconds.
    #[serde(default = "default_startup")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub startup_timeout_s: f64,
}

/// An MCP server: a command that speaks MCP over standard input and output, or an address.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct McpServer {
    /// Program and arguments, started in a sandbox for each episode. Arguments that name a file show its
    /// folder; of a package of Node.js, the folder with all that it depends on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Environment variables of the command, such as `{ MEMORY_FILE_PATH = "/tmp/memory.jsonl" }`. A sandbox
    /// has none of the host's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Address of a server that speaks streamable HTTP, such as `http://127.0.0.1:8000/mcp`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// Name of the environment variable with the key of `url`, sent as `Authorization: Bearer`. Empty: no
    /// key.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub key_env: String,
}

/// Episodes at once.
fn default_sessions() -> usize {
    64
}

/// Seconds for one call.
fn default_timeout() -> f64 {
    30.0
}

/// Seconds for a start, and for a free place.
fn default_startup() -> f64 {
    60.0
}

impl Mcp {
    /// The keys of servers with their defaults.
    pub fn new(servers: Vec<McpServer>) -> Self {
        Self {
            servers,
            sessions: default_sessions(),
            timeout_s: default_timeout(),
            startup_timeout_s: default_startup(),
        }
    }
}

impl McpServer {
    /// The fault of the entry, if there is one.
    pub(crate) fn wrong(&self) -> Option<String> {
        let variable = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match (self.command.first(), self.url.as_str()) {
            (None, "") => Some("needed: a command or a url".into()),
            (Some(_), url) if !url.is_empty() => {
                Some("allowed: a command or a url, not both".into())
            }
            (Some(program), _) if program.is_empty() => Some("the program has no name".into()),
            (Some(_), _) if !self.key_env.is_empty() => {
                Some("key_env has no effect with a command; remove it".into())
            }
            (Some(_), _) => {
                let wrong = |name: &&String| name.is_empty() || !name.chars().all(variable);
                let name = self.env.keys().find(wrong)?;
                Some(format!("env: {name:?} is no name of a variable"))
            }
            (None, _) if !self.env.is_empty() => {
                Some("env has no effect with a url; remove it".into())
            }
            (None, _) if !self.key_env.chars().all(variable) => Some(
                "key_env: allowed: the name of an environment variable, not the key itself".into(),
            ),
            (None, url) => address(url).err().map(|e| e.to_string()),
        }
    }
}

/// The folder that a file needs. An installed package of Node.js needs the outermost `node_modules`, where
/// the packages are that it depends on; a script of a package at work needs that package's root; others need
/// their own folder.
pub(super) fn shown_folder(file: &Path) -> &Path {
    let own = file.parent().unwrap_or(file);
    let installed = own.ancestors().filter(|a| a.ends_with("node_modules"));
    if let Some(modules) = installed.last() {
        return modules;
    }
    let ending = file.extension().and_then(|e| e.to_str());
    let mut roots = own.ancestors().filter(|a| a.join("package.json").is_file());
    match ending {
        Some("js" | "mjs" | "cjs" | "ts" | "mts") => roots.next().unwrap_or(own),
        _ => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_node_are_shown_with_what_they_depend_on() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for folder in ["p/dist", "p/node_modules/a/node_modules/b"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        std::fs::write(at("p/package.json"), "{}").unwrap();
        for (file, folder) in [
            ("p/dist/index.js", "p"),
            ("p/dist/server.py", "p/dist"),
            ("p/node_modules/a/index.js", "p/node_modules"),
            ("p/node_modules/a/node_modules/b/i.js", "p/node_modules"),
            ("index.js", ""),
        ] {
            assert_eq!(shown_folder(&at(file)), at(folder).components().as_path());
        }
    }
}
