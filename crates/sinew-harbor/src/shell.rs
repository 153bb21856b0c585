//! The shell that the built-in loop offers to the model: its notation, its prompt, its output.

use crate::place::Command;
use serde_json::{Value, json};
use sinew_env::math::Calls;
use sinew_env::{Action, CallError, CallNotation, EnvError};
use sinew_sandbox::{Ending, ExecResult};
use sinew_types::{Message, Role, ToolCall, ToolSpec};
use std::time::Duration;

/// Name of the tool.
pub(crate) const TOOL: &str = "shell";

/// Tag of calls in a prompt that teaches them.
const TAG: &str = "tool";

/// Maximum bytes of one command, which is one argument of a program.
const MAX_COMMAND_BYTES: usize = 64 << 10;

/// Bash runs a command where the place has it. Both streams are one text, in the order of the writes.
const WRAPPER: &str =
    "exec 2>&1; if [ -x /bin/bash ]; then exec /bin/bash -c \"$0\"; fi; exec /bin/sh -c \"$0\"";

/// Settings of the shell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shell {
    /// Notation of calls.
    pub(crate) calls: Calls,
    /// System prompt in place of the usual one.
    pub(crate) system: Option<String>,
    /// Time of one command.
    pub(crate) timeout: Duration,
    /// Characters of output that the model reads.
    pub(crate) output_chars: usize,
}

impl Shell {
    /// Notation for the parser of calls.
    pub(crate) fn notation(&self) -> CallNotation {
        match self.calls {
            Calls::Template => CallNotation::Template,
            Calls::Tag => CallNotation::Tag {
                tag: TAG.into(),
                tool: TOOL.into(),
            },
        }
    }

    /// Tools for the chat template; none where the prompt teaches the notation.
    pub(crate) fn tools(&self) -> Vec<ToolSpec> {
        match self.calls {
            Calls::Tag => Vec::new(),
            Calls::Template => vec![ToolSpec {
                name: TOOL.into(),
                description: "Runs a command in a new shell and returns its output.".into(),
                parameters: json!({
                    "type": "object",
                    "properties": { "command": { "type": "string", "description": "The command" } },
                    "required": ["command"],
                }),
            }],
        }
    }

    /// Messages before the instruction.
    pub(crate) fn messages(&self, workdir: &str, skills: Option<&str>) -> Vec<Message> {
        let usual = match self.calls {
            Calls::Tag => {
                "Run shell commands: <tool>COMMAND</tool>. When you are done, say so.".to_owned()
            }
            Calls::Template => format!(
                "You work in a Linux system by the tool {TOOL}. Each command starts in {workdir}, in a shell of \
                 its own. When the task is done, answer without a call."
            ),
        };
        let mut text = self.system.clone().unwrap_or(usual);
        if let Some(folder) = skills {
            text += &format!(" {folder} has instructions that may help.");
        }
        if text.is_empty() {
            return Vec::new();
        }
        vec![Message::new(Role::System, text)]
    }

    /// A conversation before the instruction, with its calls in the notation of the prompt.
    pub(crate) fn prior(&self, messages: &[Message]) -> Vec<Message> {
        let mut all = messages.to_vec();
        if self.calls != Calls::Tag {
            return all;
        }
        for message in &mut all {
            let calls = std::mem::take(&mut message.tool_calls);
            let mut text = message.content.text().into_owned();
            for call in &calls {
                let mut named = ["command", "code", "cmd"].iter();
                let script = named.find_map(|key| call.arguments.get(*key)?.as_str());
                let script = script.map_or_else(|| call.arguments.to_string(), str::to_owned);
                text += &format!("<{TAG}>{script}</{TAG}>");
            }
            if !calls.is_empty() {
                message.content = text.into();
            }
        }
        all
    }

    /// A turn with a call.
    pub(crate) fn call(&self, script: &str) -> Action {
        let (text, key) = match self.calls {
            Calls::Tag => (format!("<{TAG}>{script}</{TAG}>"), "code"),
            Calls::Template => (String::new(), "command"),
        };
        let call = ToolCall {
            id: "call-0".into(),
            name: TOOL.into(),
            arguments: json!({ key: script }),
        };
        Action {
            tool_calls: vec![call],
            ..Action::say(text)
        }
    }

    /// The command of a call.
    pub(crate) fn script(&self, arguments: &Value) -> Result<String, CallError> {
        let text = ["command", "code"]
            .into_iter()
            .find_map(|key| arguments.get(key));
        let text = text
            .and_then(Value::as_str)
            .map(str::trim)
            .unwrap_or_default();
        if text.is_empty() {
            return Err(CallError::Failed("the call has no command".into()));
        }
        if text.len() > MAX_COMMAND_BYTES || text.contains('\0') {
            let why = format!("a command has at most {MAX_COMMAND_BYTES} bytes, and no zero byte");
            return Err(CallError::Failed(why));
        }
        Ok(text.to_owned())
    }

    /// Runs a script.
    pub(crate) fn command(&self, script: &str) -> Command {
        Command {
            argv: ["/bin/sh", "-c", WRAPPER, script].map(str::to_owned).into(),
            deadline: self.timeout,
            ..Command::default()
        }
    }
}

/// The result of a command as the model reads it. A bad exit code is a result.
///
/// # Errors
/// If the sandbox died.
pub(crate) fn text_of(
    done: &ExecResult,
    timeout: Duration,
    max_chars: usize,
) -> Result<Result<String, CallError>, EnvError> {
    let wrong = match done.ending {
        Ending::Exited { code } => {
            let mut text = bounded(&done.stdout, max_chars);
            if code != 0 {
                text += &format!("\n[exit code {code}]");
            } else if text.is_empty() {
                text = "[no output]".into();
            }
            return Ok(Ok(text.trim_start_matches('\n').to_owned()));
        }
        Ending::SandboxDied => {
            return Err(EnvError::Sandbox("it died while a command ran".into()));
        }
        Ending::Signalled { signal } => format!("killed by signal {signal}"),
        Ending::Timeout => format!(
            "it took longer than {} s and was killed",
            timeout.as_secs_f64()
        ),
        Ending::OutOfMemory => "it used too much memory".into(),
        Ending::TooManyProcesses => "it started too many processes".into(),
        Ending::OutputLimit => "it printed too much; write to a file".into(),
        Ending::Denied => "it did something that is not allowed".into(),
    };
    let text = bounded(&done.stdout, max_chars);
    Ok(Err(CallError::Failed(
        format!("{wrong}\n{text}").trim().to_owned(),
    )))
}

/// The beginning and the end of an output, at most so many characters.
fn bounded(bytes: &[u8], max_chars: usize) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end();
    let count = text.chars().count();
    if count <= max_chars {
        return text.to_owned();
    }
    let half = max_chars / 2;
    let head: String = text.chars().take(half).collect();
    let tail: String = text.chars().skip(count - half).collect();
    format!("{head}\n[{} characters left out]\n{tail}", count - 2 * half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_output_keeps_its_ends() {
        assert_eq!(bounded(b"abc\n", 3), "abc");
        let cut = bounded("ä".repeat(10).as_bytes(), 4);
        assert_eq!(cut, "ää\n[6 characters left out]\nää");
    }

    fn shell(calls: Calls) -> Shell {
        Shell {
            calls,
            system: None,
            timeout: Duration::from_secs(1),
            output_chars: 100,
        }
    }

    #[test]
    fn calls_of_an_earlier_conversation_have_the_notation_of_the_prompt() {
        let mut said = Message::new(Role::Assistant, "I look.");
        said.tool_calls = shell(Calls::Template).call("ls").tool_calls;
        let other = ToolCall {
            id: "2".into(),
            name: "edit".into(),
            arguments: json!({ "file": "a" }),
        };
        said.tool_calls.push(other);
        let prior = [said];
        assert_eq!(shell(Calls::Template).prior(&prior), prior);
        let tagged = shell(Calls::Tag).prior(&prior);
        assert!(tagged[0].tool_calls.is_empty());
        let text = "I look.<tool>ls</tool><tool>{\"file\":\"a\"}</tool>";
        assert_eq!(tagged[0].content.text(), text);
    }

    #[test]
    fn calls_of_both_notations_have_a_command() {
        for calls in [Calls::Tag, Calls::Template] {
            let shell = shell(calls);
            let action = shell.call("ls -l");
            let script = shell.script(&action.tool_calls[0].arguments).unwrap();
            assert_eq!(script, "ls -l");
            assert!(shell.script(&json!({ "command": " " })).is_err());
            assert_eq!(shell.tools().is_empty(), calls == Calls::Tag);
        }
    }
}
