//! Programs that have a limited time to answer.

use rustix::process::{Pid, Signal, kill_process_group};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// The standard output of a program that ends with 0 in time; else what it wrote to standard error, or why it
/// could not be run. A program that is late is killed with its children.
pub(crate) fn output(command: &mut Command, within: Duration) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let child = command
        .env("PYTHONSAFEPATH", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|e| format!("{program}: {e}"))?;
    let group = Pid::from_child(&child);
    let (ended, end) = sync_channel(1);
    std::thread::spawn(move || ended.send(child.wait_with_output()));
    let Output {
        status,
        stdout,
        stderr,
    } = match end.recv_timeout(within) {
        Ok(output) => output.map_err(|e| format!("{program}: {e}"))?,
        Err(_) => {
            let _ = kill_process_group(group, Signal::KILL);
            let s = within.as_secs();
            return Err(format!("{program}: no answer within {s} s"));
        }
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match (status.success(), text(&stderr)) {
        (true, _) => Ok(text(&stdout)),
        (false, why) if why.is_empty() => Err(format!("{program}: {status}")),
        (false, why) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_answers_fails_or_is_late() {
        let run = |script: &str, ms: u64| {
            let mut command = Command::new("sh");
            output(command.args(["-c", script]), Duration::from_millis(ms))
        };
        assert_eq!(run("echo ' 42 '", 60_000), Ok("42".to_owned()));
        assert_eq!(run("echo why >&2; exit 3", 60_000), Err("why".to_owned()));
        let late = run("sleep 60", 100).unwrap_err();
        assert!(late.contains("no answer within 0 s"), "{late}");
        let mut absent = Command::new("/nonexistent/program");
        assert!(output(&mut absent, Duration::from_secs(1)).is_err());
    }
}
