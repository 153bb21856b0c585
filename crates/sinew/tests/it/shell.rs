//! `sinew sandbox shell` in a real terminal: Python's `pty` plays the user's.

use crate::egress::Api;
use crate::sinew;
use std::process::{Command, Output};

/// Runs a session: arguments are what happens, then the command. Prints what the checks need.
const USER: &str = r#"
import fcntl, os, pty, re, select, signal, struct, subprocess, sys, termios, time
steps, command = sys.argv[1], sys.argv[2:]
user, own = pty.openpty()
fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("4H", 33, 111, 0, 0))
before = termios.tcgetattr(own)
def take():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
child = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, preexec_fn=take)
seen = b""
def sees(pattern):
    global seen
    end = time.time() + 240
    while not (found := re.search(pattern, seen)):
        ready = select.select([user], [], [], max(0, end - time.time()))[0]
        if not ready:
            sys.exit(f"no {pattern!r} in {seen!r}")
        seen += os.read(user, 65536)
    seen = seen[found.end():]
def types(text):
    os.write(user, text)
# The time of a session can be over before its prompt is there.
if steps != "time":
    sees(rb"\$ ")
    assert termios.tcgetattr(own)[3] & termios.ICANON == 0, "the user's terminal is raw"
if steps == "exit":
    types(b"stty size; id -u; echo $((6 * 7))-$TERM\r")
    sees(rb"33 111\r\n[1-9]\d*\r\n42-dumb\r\n")
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("4H", 5, 7, 0, 0))
    os.kill(child.pid, signal.SIGWINCH)
    types(b"until case $(stty size) in 5*) ;; *) false;; esac; do sleep 0.1; done; stty size\r")
    sees(rb"5 7\r\n")
    # A program that says it runs: the shell loses Ctrl-C between fork and exec.
    types(b"sh -c 'echo be''gun; exec sleep 60'\r")
    sees(rb"begun\r\n")
    types(b"\x03")
    sees(rb"\$ ")
    types(b"printf '\\033]0;title\\007\\033[6n\\033[31mre''d\\033[0m\\n'\r")
    sees(rb"\x1b\[31mred\x1b\[0m\r\n")
    types(b"exit 7\r")
elif steps in ("leave", "leave and die"):
    types(b"echo $((6 * 7)) >> note; cat note\r")
    sees(rb"42\r\n")
    if steps == "leave":
        types(b"exit 0\r")
    else:
        types(b"sleep 60\r")
        sees(rb"sleep 60\r\n")
        os.kill(child.pid, signal.SIGTERM)
elif steps == "take":
    types(b"cat note; exit 0\r")
    sees(rb"42\r\n42\r\n")
elif steps == "kill":
    os.kill(child.pid, signal.SIGTERM)
elif steps == "time":
    pass
while child.poll() is None:
    if select.select([user], [], [], 0.1)[0]:
        seen += os.read(user, 65536)
after = termios.tcgetattr(own)
print("status", child.returncode, "restored", after[:4] == before[:4])
"#;

fn session(steps: &str, args: &[&str], token: Option<&str>) -> Output {
    let mut command = Command::new("/usr/bin/python3");
    command.args([
        "-c",
        USER,
        steps,
        env!("CARGO_BIN_EXE_sinew"),
        "sandbox",
        "shell",
    ]);
    command.args(args).env("TERM", "dumb");
    if let Some(token) = token {
        command.env("SINEW_SANDBOX_TOKEN", token);
    }
    command.output().unwrap()
}

fn ended(output: &Output, status: u8) {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text, format!("status {status} restored True\n"), "{errors}");
}

#[test]
fn a_shell_runs_in_a_terminal_that_is_put_back() {
    ended(&session("exit", &["--timeout", "120"], None), 7);
    ended(&session("kill", &[], None), 130);
    ended(&session("time", &["--timeout", "1"], None), 124);
    let refused = sinew().args(["sandbox", "shell"]).output().unwrap();
    assert!(crate::failure(&refused, 2).contains("sinew sandbox run"));
}

#[test]
fn a_shell_runs_on_a_server() {
    let api = Api::start(&[]);
    let url = format!("http://{}", api.address);
    ended(&session("exit", &["--server", &url], Some(&api.token)), 7);
}

#[test]
fn what_a_session_leaves_is_what_the_next_one_starts_with() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state.tar");
    let state = state.to_str().unwrap();
    ended(&session("leave", &["--save", state], None), 0);
    let again = ["--from", state, "--save", state];
    // The signal kills a program, and what it wrote is kept.
    ended(&session("leave and die", &again, None), 130);
    ended(&session("take", &["--from", state], None), 0);
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_place_that_cannot_be_written_is_refused_before_a_program_runs() {
    let folder = tempfile::tempdir().unwrap();
    for (path, why) in [
        ("missing/x.tar", "its folder is missing"),
        (".", "it exists"),
    ] {
        let mut run = sinew();
        run.current_dir(folder.path())
            .args(["sandbox", "run", "--shell", "echo ran", "--save", path]);
        let ran = run.output().unwrap();
        let error = crate::failure(&ran, 2);
        assert!(error.contains("--save") && error.contains(why), "{error}");
        assert!(ran.stdout.is_empty());
    }
}
