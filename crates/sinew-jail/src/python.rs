//! Python programs and the interpreters that wait for them.
//!
//! Both kinds of waiting interpreters share one text, `python/program.py`, which runs a program from its
//! start to its end as `python3 -c` does. A second part gets the program: `zygote.py` forks an interpreter
//! into the namespaces of a sandbox of the process level, `guest.py` waits in a container or a machine.

use std::ffi::{CString, NulError};

/// An interpreter that waits in a guest for its program, which comes on descriptor 3.
pub(crate) const GUEST: &str = concat!(
    include_str!("python/program.py"),
    include_str!("python/guest.py")
);

/// Environment that programs of the process level start from and that the zygote has.
pub(crate) const BASE_ENV: [(&str, &str); 4] = [
    ("PATH", "/usr/bin:/bin"),
    ("HOME", "/work"),
    ("TMPDIR", "/tmp"),
    ("LANG", "C.UTF-8"),
];

/// The program of the zygote, with the numbers of system calls on this architecture.
pub(crate) fn zygote() -> String {
    concat!(
        include_str!("python/program.py"),
        include_str!("python/zygote.py")
    )
    .replace("CALL_CLONE", &libc::SYS_clone.to_string())
    .replace("CALL_SETNS", &libc::SYS_setns.to_string())
    .replace("STEP_OPTIONAL", &crate::walls::OPTIONAL.to_string())
}

/// Arguments by which `python` runs `code`: isolated from the environment and from the folder that it
/// stands in, without `site` and without writing bytecode.
///
/// # Errors
/// If one has a zero byte.
pub(crate) fn command(python: &[u8], code: &[u8]) -> Result<Vec<CString>, NulError> {
    [python, b"-I", b"-S", b"-B", b"-c", code]
        .into_iter()
        .map(CString::new)
        .collect()
}

/// Arguments by which `python` becomes an interpreter that waits: `source` runs under this name next to
/// `__main__`, which stays empty for programs.
pub(crate) fn waiting(python: &[u8], name: &str, source: &str) -> Result<Vec<CString>, NulError> {
    let code = format!(
        "import sys; exec(compile(sys.argv[1], '<{name}>', 'exec'), \
         {{'__name__': '{name}', '__builtins__': __builtins__}})"
    );
    let mut argv = command(python, code.as_bytes())?;
    argv.push(CString::new(source)?);
    Ok(argv)
}
