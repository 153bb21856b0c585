//! Reasons why a task folder cannot be read, and why a task that was read cannot run here.

use serde::Serialize;
use std::path::PathBuf;

/// Reason why a folder of tasks is refused.
#[derive(Debug, thiserror::Error)]
pub enum HarborError {
    /// A file or folder cannot be read.
    #[error("{}: {source}; paths are relative to the current folder", path.display())]
    Read {
        /// File or folder.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file has a wrong form.
    #[error("{}: {reason}", path.display())]
    Format {
        /// File or folder.
        path: PathBuf,
        /// The fault, with what is allowed.
        reason: String,
    },
    /// A key of a task has a wrong value.
    #[error("{}: {key} = {value}: allowed: {allowed}", path.display())]
    Key {
        /// File with the key.
        path: PathBuf,
        /// Path of the key, as in `environment.cpus`.
        key: String,
        /// The value.
        value: String,
        /// Allowed values.
        allowed: String,
    },
}

/// Reason why a task is left out. It is counted and reported; it is never an episode without a score.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum SkipReason {
    /// The task is for another system.
    #[error("environment.os = \"windows\": machines run Linux")]
    Windows,
    /// Machines have no accelerators.
    #[error("environment.{key} is set: machines have no accelerators")]
    Accelerator {
        /// The key.
        key: &'static str,
    },
    /// The compose file has several services.
    #[error("docker-compose.yaml has the services {}: one is supported", names.join(", "))]
    Services {
        /// Their names.
        names: Vec<String>,
    },
    /// The compose file has a key without support.
    #[error("docker-compose.yaml: {key} is not supported")]
    Compose {
        /// The key of the service.
        key: String,
    },
    /// A collected file or command belongs to another service.
    #[error("{key} names the service {service}: only main is supported")]
    OtherService {
        /// Key in `task.toml`.
        key: &'static str,
        /// Name of the service.
        service: String,
    },
    /// The player cannot use an MCP server.
    #[error("the MCP server {server}: {why}")]
    McpServer {
        /// Name of the server.
        server: String,
        /// Reason.
        why: String,
    },
    /// A prior conversation cannot be played.
    #[error("trajectory.json: a prior conversation: {why}")]
    Trajectory {
        /// The part that cannot.
        why: String,
    },
    /// A variable of the host is not passed.
    #[error("{key} needs the variable {name}: name it in env.pass_env, and set it")]
    Variable {
        /// Key in `task.toml`.
        key: String,
        /// Name of the variable.
        name: String,
    },
    /// A host list that the proxy cannot express.
    #[error("allowed_hosts has {host}: ranges of addresses are not supported")]
    HostRange {
        /// The entry.
        host: String,
    },
    /// A host list needs a proxy for the machine.
    #[error(
        "network_mode = \"allowlist\" needs sandbox.level = \"container\" and the feature egress"
    )]
    HostLists,
    /// The sandboxes of the recipe have a network, and the task forbids it.
    #[error("network_mode = \"no-network\", and [sandbox.egress] is set at this level")]
    NoNetwork,
    /// The verifier needs a wider network than the agent in the same container.
    #[error(
        "verifier.network_mode is wider than that of the agent in one container: use a separate verifier"
    )]
    VerifierNetwork,
    /// One container has one network.
    #[error("network_mode differs between the agents of the steps: one container has one network")]
    StepNetworks,
    /// The task needs a container, and the level is another one.
    #[error("{what} needs sandbox.level = \"container\"")]
    NeedsContainer {
        /// The part that needs it.
        what: String,
    },
    /// An agent program has no container to work in.
    #[error(
        "it has no environment: an agent program works in the container of its task; add environment/Dockerfile, \
         or remove [harness]"
    )]
    NoContainer,
    /// There is no script of a verifier.
    #[error("no {script}: the task has no verifier")]
    NoVerifier {
        /// Path of the script in the folder.
        script: String,
    },
    /// The registry names a task that is not in the folder.
    #[error("it is not in the folder: {place}")]
    NotHere {
        /// Address and path.
        place: String,
    },
}

impl SkipReason {
    /// Short name for counts and JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Windows => "windows",
            Self::Accelerator { .. } => "accelerator",
            Self::Services { .. } => "services",
            Self::Compose { .. } => "compose",
            Self::OtherService { .. } => "other_service",
            Self::McpServer { .. } => "mcp_server",
            Self::Trajectory { .. } => "trajectory",
            Self::Variable { .. } => "variable",
            Self::HostRange { .. } => "host_range",
            Self::HostLists => "host_lists",
            Self::NoNetwork => "no_network",
            Self::VerifierNetwork => "verifier_network",
            Self::StepNetworks => "step_networks",
            Self::NeedsContainer { .. } => "needs_container",
            Self::NoContainer => "no_container",
            Self::NoVerifier { .. } => "no_verifier",
            Self::NotHere { .. } => "not_here",
        }
    }
}

/// A task that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Name of the task.
    pub name: String,
    /// Reason.
    pub reason: SkipReason,
}

impl Serialize for Skipped {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::json!({
            "task": self.name,
            "skipped": self.reason.name(),
            "why": self.reason.to_string(),
        })
        .serialize(serializer)
    }
}
