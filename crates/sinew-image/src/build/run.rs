//! Programs with a deadline and bounded output.

use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Result, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Output on disk at which a program is ended.
const MAX_OUTPUT: u64 = 256 << 20;
/// Time that a program has to end by itself when it is asked to.
const GRACE: Duration = Duration::from_secs(5);
/// Time between two looks at a program.
const PAUSE: Duration = Duration::from_millis(20);

/// End of a program.
#[derive(Debug)]
pub(super) enum End {
    /// It ended by itself.
    Exited(ExitStatus),
    /// It was ended at its deadline.
    Late,
    /// It was ended for its output.
    Loud,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "ended with {status}"),
            Self::Late => f.write_str("was ended at its deadline"),
            Self::Loud => write!(f, "was ended after {MAX_OUTPUT} bytes of output"),
        }
    }
}

/// A program that has ended.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) end: End,
    /// Last bytes of standard output, and of standard error after it.
    pub(super) log: String,
    /// Last bytes of standard output.
    pub(super) stdout: String,
}

impl Ran {
    /// Whether it succeeded.
    pub(super) fn is_ok(&self) -> bool {
        matches!(self.end, End::Exited(status) if status.success())
    }
}

/// Runs a program to its end, in a process group that is ended as one.
///
/// # Errors
/// If it cannot be started, or its output cannot be kept.
pub(super) fn run(
    program: &str,
    args: &[OsString],
    timeout: Duration,
    log_bytes: usize,
) -> Result<Ran> {
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .process_group(0)
        .spawn()?;
    let end = match wait(&mut child, timeout, [&stdout, &stderr]) {
        Ok(end) => end,
        Err(e) => {
            stop(&mut child);
            return Err(e);
        }
    };
    let (out, err) = (tail(&mut stdout, log_bytes)?, tail(&mut stderr, log_bytes)?);
    let mut log = format!("{out}{err}");
    let mut cut = log.len().saturating_sub(log_bytes);
    while !log.is_char_boundary(cut) {
        cut += 1;
    }
    log.drain(..cut);
    Ok(Ran {
        end,
        log,
        stdout: out,
    })
}

/// Waits for the end of a program, and ends it for its time or its output.
fn wait(child: &mut Child, timeout: Duration, output: [&File; 2]) -> Result<End> {
    let until = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(End::Exited(status));
        }
        let mut bytes = 0;
        for file in output {
            bytes += file.metadata()?.len();
        }
        if bytes > MAX_OUTPUT {
            stop(child);
            return Ok(End::Loud);
        }
        if Instant::now() >= until {
            stop(child);
            return Ok(End::Late);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Asks a program to end, and ends it and all of its group after a grace.
fn stop(child: &mut Child) {
    let group = Pid::from_child(child);
    let _ = kill_process_group(group, Signal::TERM);
    let until = Instant::now() + GRACE;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
        std::thread::sleep(PAUSE);
    }
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
}

/// The last bytes of a file, as text.
fn tail(file: &mut File, bytes: usize) -> Result<String> {
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(bytes as u64)))?;
    let mut last = Vec::new();
    file.take(bytes as u64).read_to_end(&mut last)?;
    Ok(String::from_utf8_lossy(&last).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration, log_bytes: usize) -> Ran {
        let args = ["-c", script].map(OsString::from);
        run("/bin/sh", &args, timeout, log_bytes).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn the_end_of_the_output_is_kept() {
        let ran = shell("echo out; echo last >&2; exit 3", LONG, 100);
        assert!(!ran.is_ok() && ran.end.to_string().contains('3'));
        assert_eq!(
            (ran.log.as_str(), ran.stdout.as_str()),
            ("out\nlast\n", "out\n")
        );
        let ran = shell("echo 0123456789; echo last >&2", LONG, 6);
        assert!(ran.is_ok());
        assert_eq!(ran.log, "\nlast\n");
    }

    #[test]
    fn a_late_program_is_ended_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 600 & echo $! > {}; wait", file.display());
        let ran = shell(&script, Duration::from_secs(3), 10);
        assert!(matches!(ran.end, End::Late), "{:?}", ran.end);
        let child = std::fs::read_to_string(&file).unwrap();
        let status = format!("/proc/{}/status", child.trim());
        let gone = || std::fs::read_to_string(&status).map_or(true, |s| s.contains("zombie"));
        // It was sent its signal, and ends a moment later.
        let until = Instant::now() + LONG;
        while !gone() {
            assert!(Instant::now() < until, "{child}");
            std::thread::sleep(PAUSE);
        }
    }

    #[test]
    fn a_missing_program_is_an_error() {
        assert!(run("/no/such/program", &[], LONG, 10).is_err());
    }
}
