//! One run of the program in a sandbox of its own.

use super::door::Door;
use super::program::Command;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, Limits, Network, Program, Sandbox, SandboxError,
    SandboxProvider, SandboxSpec,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// How a program ended, and what it wrote.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ended {
    pub(super) ending: Ending,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Why a program did not run; never its own doing.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("{0}")]
    Program(String),
}

/// Sandboxes whose only reachable address is the gateway.
pub(super) struct Sandboxes {
    pub(super) provider: Arc<dyn SandboxProvider>,
    pub(super) limits: Limits,
    pub(super) strict: bool,
    /// Where the gateway listens; the same address leads to it from inside.
    pub(super) gateway: SocketAddr,
}

impl Sandboxes {
    /// A fresh sandbox with the gateway behind its loopback interface.
    pub(super) async fn acquire(
        &self,
        env: Vec<(String, String)>,
    ) -> Result<(Box<dyn Sandbox>, Door), RunError> {
        let spec = SandboxSpec {
            limits: self.limits.clone(),
            env,
            strict: self.strict,
            network: Network::Loopback,
            live: false,
        };
        let mut sandbox = self.provider.acquire(&spec).await?;
        let inside = sandbox.listen_inside(self.gateway.port()).await?;
        let door = Door::open(inside, self.gateway)
            .map_err(|e| RunError::Program(format!("the door to the gateway: {e}")))?;
        Ok((sandbox, door))
    }

    /// Runs the program once, in a sandbox of its own.
    pub(super) async fn run(
        &self,
        command: &Command,
        env: Vec<(String, String)>,
        deadline: Duration,
    ) -> Result<Ended, RunError> {
        let (mut sandbox, _door) = self.acquire(env).await?;
        let request = ExecRequest {
            program: Program::Argv(command.argv.clone()),
            stdin: Vec::new(),
            deadline,
        };
        let result = sandbox.exec_with(request, ExecOptions::default()).await?;
        sandbox.destroy().await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Ended {
            ending: result.ending,
            stdout: text(&result.stdout),
            stderr: text(&result.stderr),
        })
    }
}
