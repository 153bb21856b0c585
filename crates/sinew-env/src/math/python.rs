//! The Python tool: code in, one short text out.

use crate::port::{EnvError, Observation};
use sinew_sandbox::{Ending, ExecRequest, ExecResult, Program, Sandbox};
use std::time::Duration;

/// Changes when equal code may be run or shown in another way.
pub(super) const VERSION: &str = "1";
/// Most bytes of code in one call.
pub(super) const MAX_CODE_BYTES: usize = 4096;
/// Most characters of output that the model is shown.
const MAX_OUTPUT_CHARS: usize = 200;

/// What a call came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolOutput {
    pub(super) text: String,
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

/// Runs code as an interactive interpreter would: values of bare expressions are printed.
/// What the code does wrong is output; an error is the sandbox's.
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

/// A program that runs `code` statement by statement as the prompt of an interpreter does.
/// 1024 is `ast.PyCF_ONLY_AST`; `_ast` is built in, where importing `ast` would take time.
fn interactive(code: &str) -> Result<String, EnvError> {
    // JSON's escapes are a subset of Python's.
    let literal = serde_json::to_string(code).map_err(|e| EnvError::Sandbox(e.to_string()))?;
    Ok(format!(
        "import _ast\n\
         tree = compile({literal}, '<tool>', 'exec', 1024)\n\
         exec(compile(_ast.Interactive(tree.body), '<tool>', 'single'), {{'__name__': '__main__'}})\n"
    ))
}

fn failure(message: impl std::fmt::Display) -> ToolOutput {
    ToolOutput {
        text: format!("Error: {message}"),
        is_error: true,
    }
}

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

fn bounded(text: &str) -> String {
    match text.char_indices().nth(MAX_OUTPUT_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
