//! Coding agents from npm and PyPI as data: how each is installed, pointed at the gateway, and read.
//!
//! An agent is a folder of `agents/`: a shell script that starts it on one task, and the lock of its
//! packages. [`AGENTS`] adds the facts that programs need: its API, its usual limits, the form of its output.
//!
//! | variable of a script | meaning |
//! |---|---|
//! | `SINEW_TASK` | the task |
//! | `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL`, `GOOGLE_GEMINI_BASE_URL` and their keys | the rollout |
//! | `SINEW_AGENTS` | the folder with the installed agents |
//! | `SINEW_AGENT_HOME` | the folder for settings and sessions; left out: the current folder |
//! | `SINEW_MCP_SERVERS` | the MCP servers of the task, in the agent's own form; left out: none |
//! | `SINEW_MODEL`, `SINEW_CONTEXT_TOKENS`, `SINEW_TURN_TOKENS` | what the agent is told of the model |
//!
//! ```
//! let agent = sinew_agents::find("codex").unwrap();
//! let printed = r#"{"type": "item.completed", "item": {"type": "agent_message", "text": "Done."}}"#;
//! assert_eq!(agent.end(printed).answer.as_deref(), Some("Done."));
//! ```
//!
//! Invariants:
//! - A script starts an agent without a terminal, without questions, updates and telemetry, and without calls
//!   of the model but for its task.
//! - Versions are exact, and package managers check the hash of every package.
//! - A script writes only below the agent's home.

mod agents;
mod mcp;
mod output;
mod package;

pub use agents::{
    AGENTS, Agent, CLAUDE_CODE, CLINE, CODEX, Dialect, GEMINI_CLI, MINI_SWE_AGENT, Needs, OPENCODE,
    PI, QWEN_CODE, find,
};
pub use output::AgentEnd;
pub use package::{Manager, Package};
