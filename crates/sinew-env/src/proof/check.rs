//! Checks a proof: compiles it, then uses it for the statement in a file of ours.
//!
//! | file | what it has | who wrote it |
//! |---|---|---|
//! | `Given.v` | definitions, if the theorem is about some | the generator |
//! | `Submission.v` | the theorem with the script | the generator; the model writes between `Proof` and `Qed` |
//! | `Certificate.v` | the theorem again, proved by that of `Submission`, and its assumptions | the generator |
//!
//! The output of the last one alone says whether the theorem is proved.

use super::statements::Statement;
use crate::port::EnvError;
use sinew_sandbox::{Ending, ExecRequest, ExecResult, Program, Sandbox};
use std::time::Duration;

/// Characters of Coq's message that the model sees.
const MAX_MESSAGE: usize = 600;
/// What `Print Assumptions` says of a theorem without any.
const CLOSED: &str = "Closed under the global context";

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Proved,
    /// Coq's message, or the limit.
    Refused(String),
    /// It compiles, and is no proof of the statement or rests on assumptions.
    Forged(String),
}

/// Lines before a statement, in the file of the script and in ours.
fn head(statement: &Statement) -> String {
    let given = if statement.given.is_empty() {
        ""
    } else {
        "Require Import Given.\n"
    };
    format!("{}\n{given}", statement.imports)
}

/// The file with the script.
pub(super) fn submission(statement: &Statement, script: &str) -> String {
    let (head, theorem) = (head(statement), &statement.theorem);
    format!("{head}Theorem goal : {theorem}.\nProof.\n{script}\nQed.\n")
}

/// The file that uses the theorem of the first one. Nothing of that one but the theorem is seen here.
fn certificate(statement: &Statement) -> String {
    let (head, theorem) = (head(statement), &statement.theorem);
    format!(
        "{head}Require Submission.\nDefinition checked : {theorem} := Submission.goal.\nPrint Assumptions checked.\n"
    )
}

/// Checks a file that should prove a statement as `goal`. `deadline` is for each of the two runs.
///
/// # Errors
/// If the sandbox fails, or has no Coq.
pub(super) async fn check(
    sandbox: &mut dyn Sandbox,
    statement: &Statement,
    submission: &str,
    deadline: Duration,
) -> Result<Verdict, EnvError> {
    // The definitions are compiled from a file of ours, so that a script cannot change them.
    if !statement.given.is_empty() {
        let definitions = compile(sandbox, "Given", &statement.given, deadline).await?;
        if let Some(why) = message(&definitions, deadline)? {
            return Err(EnvError::Sandbox(format!(
                "coqc refuses the definitions of the task: {why}"
            )));
        }
    }
    let compiled = compile(sandbox, "Submission", submission, deadline).await?;
    if let Some(why) = message(&compiled, deadline)? {
        return Ok(Verdict::Refused(why));
    }
    let used = compile(sandbox, "Certificate", &certificate(statement), deadline).await?;
    if let Some(why) = message(&used, deadline)? {
        return Ok(Verdict::Forged(why));
    }
    let said = String::from_utf8_lossy(&used.stdout);
    match said.trim() {
        CLOSED => Ok(Verdict::Proved),
        other => Ok(Verdict::Forged(bounded(other))),
    }
}

/// Where coqc finds its plugins. The sandbox shows no `/etc`, where findlib looks for this file.
const FINDLIB: &str = "findlib.conf";
/// The folders of Debian's packages.
const FINDLIB_PATHS: &[u8] =
    b"destdir=\"/usr/lib/ocaml\"\npath=\"/usr/lib/ocaml:/usr/lib/ocaml/METAS\"\n";

/// Writes a file and compiles it.
async fn compile(
    sandbox: &mut dyn Sandbox,
    name: &str,
    content: &str,
    deadline: Duration,
) -> Result<ExecResult, EnvError> {
    let failed = |e: sinew_sandbox::SandboxError| EnvError::Sandbox(e.to_string());
    let file = format!("{name}.v");
    sandbox
        .write_file(&file, content.as_bytes())
        .await
        .map_err(failed)?;
    sandbox
        .write_file(FINDLIB, FINDLIB_PATHS)
        .await
        .map_err(failed)?;
    let conf = format!("OCAMLFIND_CONF={FINDLIB}");
    let argv = [
        "/usr/bin/env",
        &conf,
        "/usr/bin/coqc",
        "-q",
        "-Q",
        ".",
        "",
        "-w",
        "none",
        &file,
    ];
    let request = ExecRequest {
        program: Program::Argv(argv.map(str::to_owned).into()),
        stdin: Vec::new(),
        deadline,
    };
    sandbox.exec(request).await.map_err(failed)
}

/// Why a run did not end well, if so.
fn message(result: &ExecResult, deadline: Duration) -> Result<Option<String>, EnvError> {
    Ok(Some(match result.ending {
        Ending::Exited { code: 0 } => return Ok(None),
        Ending::Exited { code: 126 | 127 } => {
            let why = "no /usr/bin/coqc in the sandbox; Debian: apt-get install --no-install-recommends coq";
            return Err(EnvError::Sandbox(why.into()));
        }
        Ending::Exited { .. } => {
            let all = [&result.stderr[..], &result.stdout[..]].concat();
            let text = String::from_utf8_lossy(&all);
            // The place in the file says nothing to those who wrote a part of it.
            let lines = text.lines().filter(|l| !l.starts_with("File \""));
            bounded(lines.collect::<Vec<_>>().join("\n").trim())
        }
        Ending::Timeout => format!("Coq took more than {} s", deadline.as_secs_f64()),
        Ending::OutOfMemory => "Coq used too much memory".into(),
        Ending::OutputLimit => "Coq printed too much".into(),
        Ending::SandboxDied => {
            return Err(EnvError::Sandbox(
                "the sandbox died while Coq ran in it".into(),
            ));
        }
        Ending::Signalled { .. } | Ending::TooManyProcesses | Ending::Denied => {
            "Coq was stopped: it did what is not allowed, or took more time than it has".into()
        }
    }))
}

/// The first characters of a message.
fn bounded(text: &str) -> String {
    match text.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
