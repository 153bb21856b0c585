//! Programs as an agent can start them.

use sinew_sandbox::{Program, SandboxError};

/// Largest program: one argument of execve may have 128 KiB.
const MAX_PROGRAM_BYTES: usize = 96 << 10;

/// Whether it is Python, and its arguments or its code.
///
/// # Errors
/// [`SandboxError::Request`] if no agent can start it.
pub fn checked(program: &Program) -> Result<(bool, Vec<String>), SandboxError> {
    let bad = |value: String, allowed: &str| SandboxError::Request {
        field: "program",
        value,
        allowed: allowed.into(),
    };
    let (python, args) = match program {
        Program::Argv(argv) => (false, argv.clone()),
        Program::Python(code) => (true, vec![code.clone()]),
        Program::Shell(script) => (false, vec!["/bin/sh".into(), "-c".into(), script.clone()]),
    };
    let bytes: usize = args.iter().map(String::len).sum();
    if !python && args.first().is_none_or(String::is_empty) {
        return Err(bad("empty".into(), "at least the name of a program"));
    }
    if bytes > MAX_PROGRAM_BYTES {
        let allowed = "at most 98304 bytes; write longer ones to a file in the sandbox";
        return Err(bad(format!("{bytes} bytes"), allowed));
    }
    if args.iter().any(|a| a.contains('\0')) {
        return Err(bad(
            "text with a zero byte".into(),
            "text without zero bytes",
        ));
    }
    Ok((python, args))
}
