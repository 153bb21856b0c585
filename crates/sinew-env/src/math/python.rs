//! Python tool: runs code in a sandbox and returns a short text.

use crate::port::{EnvError, Observation};
use sinew_sandbox::{Ending, ExecRequest, ExecResult, Program, Sandbox};
use std::time::Duration;

/// Version of the tool. It changes if equal code is executed or shown differently.
pub(super) const VERSION: &str = "1";
/// Maximum bytes of code per call.
pub(super) const MAX_CODE_BYTES: usize = 4096;
/// Maximum characters of output shown to the model.
const MAX_OUTPUT_CHARS: usize = 200;

/// Result of a tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolOutput {
    /// Text for the model.
    pub(super) text: String,
    /// The call failed.
    pub(super) is_error: bool,
}

impl From<ToolOutput> for Observation {
    fn from(output: ToolOutput) -> Self {
        Self {
            content: output.text.into(),
            is_error: output.is_error,
        }
    }
}

/// Runs code like an interactive interpreter, which prints the values of expressions. Errors of the code are
/// output. An `Err` is an error of the sandbox.
pub(super) async fn run(
    sandbox: &mut dyn Sandbox,
    code: &str,
    deadline: Duration,
) -> Result<ToolOutput, EnvError> {
    if code.len() > MAX_CODE_BYTES {
        return Ok(failure(format!(
            "{} bytes of code, at most {MAX_CODE_BYTES} are allowed",
            code.len()
        )));
    }
    let request = ExecRequest {
        program: Program::Python(interactive(code)?),
        stdin: Vec::new(),
        deadline,
    };
    let result = sandbox
        .exec(request)
        .await
        .map_err(|e| EnvError::Sandbox(e.to_string()))?;
    output(&result, deadline)
}

/// Wraps `code` in a program that runs it statement by statement in interactive mode. 1024 is
/// `ast.PyCF_ONLY_AST`. `_ast` is a built-in module, so its import is fast.
fn interactive(code: &str) -> Result<String, EnvError> {
    // JSON string literals are valid Python string literals.
    let literal = serde_json::to_string(code).map_err(|e| EnvError::Sandbox(e.to_string()))?;
    Ok(format!(
        "import _ast\n\
         tree = compile({literal}, '<tool>', 'exec', 1024)\n\
         exec(compile(_ast.Interactive(tree.body), '<tool>', 'single'), {{'__name__': '__main__'}})\n"
    ))
}

/// Output for a failed call.
fn failure(message: impl std::fmt::Display) -> ToolOutput {
    ToolOutput {
        text: format!("Error: {message}"),
        is_error: true,
    }
}

/// Converts the result of an execution to the text for the model.
fn output(result: &ExecResult, deadline: Duration) -> Result<ToolOutput, EnvError> {
    let wrong = match result.ending {
        Ending::Exited { code: 0 } => {
            let text = bounded(String::from_utf8_lossy(&result.stdout).trim());
            return Ok(if text.is_empty() {
                failure("no output: end with an expression or print")
            } else {
                ToolOutput {
                    text,
                    is_error: false,
                }
            });
        }
        Ending::Exited { code } => {
            let stderr = String::from_utf8_lossy(&result.stderr);
            match stderr.lines().rev().find(|line| !line.trim().is_empty()) {
                Some(line) => bounded(line.trim()),
                None => format!("exit code {code}"),
            }
        }
        Ending::Signalled { signal } => format!("killed by signal {signal}"),
        Ending::Timeout => format!("took longer than {} s", deadline.as_secs_f64()),
        Ending::OutOfMemory => "used too much memory".into(),
        Ending::TooManyProcesses => "started too many processes".into(),
        Ending::OutputLimit => "printed too much".into(),
        Ending::Denied => "did something that is not allowed".into(),
        Ending::SandboxDied => {
            return Err(EnvError::Sandbox(
                "the sandbox died while Python code ran in it".into(),
            ));
        }
    };
    Ok(failure(wrong))
}

/// Cuts a text to [`MAX_OUTPUT_CHARS`].
fn bounded(text: &str) -> String {
    match text.char_indices().nth(MAX_OUTPUT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
