//! One run of the program in a separate sandbox.
//!
//! The sandbox has only a loopback interface. A listener on it, at the port of the model server, is the only
//! address that the program can connect to.

use super::command::ProgramCommand;
use super::error::ProgramError;
use super::forward::PortForward;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, Network, Program, Sandbox,
    SandboxProvider, SandboxSpec,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// End of a program, with the captured output. Invalid UTF-8 is replaced.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProgramEnd {
    pub(super) ending: Ending,
    pub(super) stdout: String,
    pub(super) stderr: String,
    /// The value that a function returned on a separate descriptor; `None` for other programs.
    pub(super) value: Option<serde_json::Value>,
    /// Whether the program was ended before it could run code in the same sandbox as other episodes.
    pub(super) refused: bool,
}

impl ProgramEnd {
    /// The end of a program that is no function.
    pub(super) fn of(result: ExecResult) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            ending: result.ending,
            stdout: text(&result.stdout),
            stderr: text(&result.stderr),
            value: None,
            refused: false,
        }
    }
}

/// Sandboxes whose only reachable address is the model server.
#[derive(Clone)]
pub(super) struct Sandboxes {
    pub(super) provider: Arc<dyn SandboxProvider>,
    pub(super) limits: Limits,
    pub(super) strict: bool,
    /// Address of the model server on the host, and also inside the sandbox.
    pub(super) model: SocketAddr,
}

impl Sandboxes {
    /// Creates a sandbox that reaches the model server through its loopback interface.
    pub(super) async fn acquire(
        &self,
        env: Vec<(String, String)>,
    ) -> Result<(Box<dyn Sandbox>, PortForward), ProgramError> {
        let spec = SandboxSpec {
            limits: self.limits.clone(),
            env,
            strict: self.strict,
            network: Network::Loopback,
            ..SandboxSpec::default()
        };
        let mut sandbox = self.provider.acquire(&spec).await?;
        let inside = sandbox.listen_inside(self.model.port()).await?;
        let forward = PortForward::start(inside, self.model)
            .map_err(|e| ProgramError::Failed(format!("the connection to the model: {e}")))?;
        Ok((sandbox, forward))
    }

    /// Runs the program once, in a separate sandbox, which is destroyed afterwards.
    ///
    /// # Errors
    /// If the sandbox fails; a program that fails is an [`ProgramEnd`].
    pub(super) async fn run(
        &self,
        command: &ProgramCommand,
        env: Vec<(String, String)>,
        deadline: Duration,
    ) -> Result<ProgramEnd, ProgramError> {
        let (mut sandbox, _forward) = self.acquire(env).await?;
        let request = ExecRequest {
            program: Program::Argv(command.argv.clone()),
            stdin: Vec::new(),
            deadline,
        };
        let result = sandbox.exec_with(request, ExecOptions::default()).await?;
        sandbox.destroy().await?;
        Ok(ProgramEnd::of(result))
    }
}

/// Returns the last four non-empty lines of a text, cut to 600 bytes, for messages.
pub(super) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(4)..].join(" | ");
    let cut = last.len().saturating_sub(600);
    let at = (cut..=last.len()).find(|&i| last.is_char_boundary(i));
    last[at.unwrap_or(0)..].to_owned()
}
