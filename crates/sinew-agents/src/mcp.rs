//! MCP servers in the form in which each agent reads them from its settings.
//!
//! Servers come as most clients write them below `mcpServers`, by name: a `type` of `stdio` has a `command`
//! and `args`, one of `sse` or `http` has a `url`.

use serde_json::{Map, Value, json};

/// Seconds in which a server of Codex has to start. Its own limit of 10 s is short for many at once.
const STARTUP_S: u32 = 60;

/// Form of the servers in an agent's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum McpForm {
    /// The agent has no client.
    Missing,
    /// Claude Code: the form in which servers come.
    Shared,
    Cline,
    Codex,
    Gemini,
    Opencode,
    /// Pi: tools are declared from the first turn on, in place of a tool that runs scripts over them.
    Pi,
    Qwen,
}

impl McpForm {
    /// Transports that the agent speaks.
    pub(crate) fn transports(self) -> &'static [&'static str] {
        match self {
            Self::Missing => &[],
            Self::Codex | Self::Pi => &["stdio", "http"],
            _ => &["stdio", "sse", "http"],
        }
    }

    /// The text of the servers for the agent's script: a JSON object, or tables of TOML for Codex.
    pub(crate) fn text(self, servers: &Map<String, Value>) -> String {
        if self == Self::Codex {
            return servers.iter().map(table).collect();
        }
        let own = servers.iter();
        let own = own.map(|(name, server)| (name.clone(), self.entry(server)));
        Value::Object(own.collect()).to_string()
    }

    /// One server.
    fn entry(self, server: &Value) -> Value {
        let part = |key: &str| server.get(key).cloned().unwrap_or_default();
        let kind = server.get("type").and_then(Value::as_str);
        match (self, kind) {
            (Self::Cline, Some("http")) => json!({ "type": "streamableHttp", "url": part("url") }),
            (Self::Gemini | Self::Qwen, Some("stdio")) => {
                json!({ "command": part("command"), "args": part("args") })
            }
            (Self::Qwen, Some("http")) => json!({ "httpUrl": part("url") }),
            (Self::Qwen, _) => json!({ "url": part("url") }),
            (Self::Opencode, Some("stdio")) => {
                let mut words = vec![part("command")];
                words.extend(part("args").as_array().cloned().unwrap_or_default());
                json!({ "type": "local", "command": words })
            }
            (Self::Opencode, _) => json!({ "type": "remote", "url": part("url"), "oauth": false }),
            (Self::Pi, _) => {
                let mut own = server.as_object().cloned().unwrap_or_default();
                own.insert("exposure".into(), "direct".into());
                Value::Object(own)
            }
            _ => server.clone(),
        }
    }
}

/// A table of `config.toml`. Texts and lists of JSON are those of TOML but for one character.
fn table((name, server): (&String, &Value)) -> String {
    let keys = ["command", "args", "url"].into_iter();
    let keys = keys.filter_map(|key| Some(format!("{key} = {}\n", server.get(key)?)));
    let keys: String = keys.collect();
    let text = format!("[mcp_servers.{name}]\nstartup_timeout_sec = {STARTUP_S}\n{keys}");
    text.replace('\u{7f}', "\\u007f")
}
