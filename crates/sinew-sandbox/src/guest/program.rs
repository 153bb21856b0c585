//! Programs as an agent or a spawner can start them.

use crate::{Program, SandboxError};

/// Largest program: one argument of execve may have 128 KiB.
const MAX_PROGRAM_BYTES: usize = 96 << 10;

/// Whether it is Python, and its arguments or its code.
///
/// # Errors
/// [`SandboxError::Request`] for a program that is empty, too long, or has a zero byte.
pub(crate) fn checked(program: &Program) -> Result<(bool, Vec<String>), SandboxError> {
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

/// Reason why a program could not be put in place of the agent's child, and what to do.
pub(crate) fn not_there(program: &Program, errno: i32, why: &str) -> SandboxError {
    const ENOENT: i32 = 2;
    const EACCES: i32 = 13;
    let (name, missing) = match program {
        Program::Argv(argv) => {
            let name = argv.first().map_or("", String::as_str);
            let missing = "the sandbox's root has no such program, or not the interpreter or the loader that it needs";
            (format!("{name:?}"), missing)
        }
        Program::Python(_) => (
            "Python code".into(),
            "the sandbox's root has no Python (/usr/bin/python3 or /usr/local/bin/python3)",
        ),
        Program::Shell(_) => (
            "a script".into(),
            "the sandbox's root has no shell (/bin/sh)",
        ),
    };
    let allowed = match errno {
        ENOENT => {
            format!("{missing}; add it to the image of `sandbox.image`, or use one that has it")
        }
        EACCES => "it must be an executable file that everybody may read and run".into(),
        _ => "a program for this system and processor".into(),
    };
    SandboxError::Request {
        field: "program",
        value: format!("{name} ({why})"),
        allowed,
    }
}
