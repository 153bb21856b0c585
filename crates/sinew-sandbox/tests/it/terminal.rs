//! Programs with a terminal.

use crate::{OK, provider, small};
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, Program, Sandbox, SandboxError, Terminal, TerminalInput,
    TerminalSize,
};
use std::time::Duration;
use tokio::sync::mpsc;

/// The user's side of a session.
struct User {
    typing: Option<mpsc::Sender<TerminalInput>>,
    shown: mpsc::Receiver<Vec<u8>>,
    seen: String,
}

fn terminal() -> (Terminal, User) {
    let (typing, input) = mpsc::channel(4);
    let (output, shown) = mpsc::channel(4);
    let size = TerminalSize {
        rows: 30,
        columns: 100,
    };
    let env = vec![("TERM".into(), "dumb".into())];
    let user = User {
        typing: Some(typing),
        shown,
        seen: String::new(),
    };
    (
        Terminal {
            size,
            env,
            input,
            output,
        },
        user,
    )
}

impl User {
    async fn type_in(&self, text: &str) {
        let typed = TerminalInput::Typed(text.as_bytes().to_vec());
        self.typing.as_ref().unwrap().send(typed).await.unwrap();
    }

    /// Reads until the terminal shows `text`, which is then behind.
    async fn sees(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let bytes = tokio::time::timeout(Duration::from_secs(120), self.shown.recv()).await;
            let bytes = bytes.unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.seen));
            let bytes =
                bytes.unwrap_or_else(|| panic!("no {text:?} before the end: {:?}", self.seen));
            self.seen += &String::from_utf8_lossy(&bytes);
        }
        let at = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..at);
    }

    /// Reads to the end.
    async fn rest(&mut self) -> usize {
        let mut bytes = 0;
        while let Some(more) = self.shown.recv().await {
            bytes += more.len();
        }
        bytes
    }
}

fn python(code: &str) -> ExecRequest {
    argv(&["/usr/bin/python3", "-u", "-c", code], 60_000)
}

fn argv(argv: &[&str], millis: u64) -> ExecRequest {
    ExecRequest::new(
        Program::Argv(argv.iter().map(ToString::to_string).collect()),
        Duration::from_millis(millis),
    )
}

async fn with_user<F: Future<Output = ()>>(
    sandbox: &mut dyn Sandbox,
    request: ExecRequest,
    user: impl FnOnce(User) -> F,
) -> Result<ExecResult, SandboxError> {
    let (terminal, own) = terminal();
    tokio::join!(sandbox.exec_on_terminal(request, terminal), user(own)).0
}

#[tokio::test]
async fn a_program_reads_keys_sizes_and_interrupts() {
    let provider = provider();
    let mut sandbox = sinew_sandbox::SandboxProvider::acquire(&provider, &small())
        .await
        .unwrap();
    let code = "import os, signal, sys, time\n\
        print([os.isatty(fd) for fd in (0, 1, 2)], os.get_terminal_size(), os.environ['TERM'])\n\
        print('front', os.tcgetpgrp(0) == os.getpgrp())\n\
        print('read', input())\n\
        signal.signal(signal.SIGWINCH, lambda *_: print('now', os.get_terminal_size()))\n\
        try:\n    print('ready')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('stopped')\n\
        sys.exit(9)";
    let result = with_user(sandbox.as_mut(), python(code), async |mut user| {
        user.sees("[True, True, True] os.terminal_size(columns=100, lines=30) dumb")
            .await;
        user.sees("front True").await;
        user.type_in("h\u{e9}x\u{7f}llo\r").await;
        user.sees("read h\u{e9}llo").await;
        user.sees("ready").await;
        let size = TerminalSize {
            rows: 5,
            columns: 7,
        };
        user.typing
            .as_ref()
            .unwrap()
            .send(TerminalInput::Resized(size))
            .await
            .unwrap();
        user.sees("now os.terminal_size(columns=7, lines=5)").await;
        user.type_in("\u{3}").await;
        user.sees("stopped").await;
        user.rest().await;
    });
    let result = result.await.unwrap();
    assert_eq!(
        (result.ending, result.stdout.len()),
        (Ending::Exited { code: 9 }, 0)
    );
    // The next program is started without a terminal and has none.
    let next = sandbox
        .exec(python("import os\nprint(os.isatty(0), os.isatty(1))"))
        .await
        .unwrap();
    assert_eq!(
        (next.ending, next.stdout.as_slice()),
        (OK, &b"False False\n"[..])
    );
}

#[tokio::test]
async fn a_terminal_gives_no_way_out() {
    let provider = provider();
    let mut sandbox = sinew_sandbox::SandboxProvider::acquire(&provider, &small())
        .await
        .unwrap();
    // Types into a terminal, into a console, changes what it is, makes it the console.
    let code = "import fcntl, os\n\
        for name, number in [('STI', 0x5412), ('LINUX', 0x541c), ('SETD', 0x5423), ('CONS', 0x541d)]:\n\
        \x20   for fd in (0, 1, 2):\n\
        \x20       try:\n            fcntl.ioctl(fd, number, b'x' * 8); print(name, 'done')\n\
        \x20       except OSError as e: print(name, e.errno)\n\
        for path in ['/dev/tty', '/dev/ptmx', '/dev/pts/0', '/dev/console', '/dev/tty1', os.readlink('/proc/self/fd/0')]:\n\
        \x20   try:\n        fd = os.open(path, os.O_RDWR); print('opened', path, os.fstat(fd).st_rdev == os.fstat(0).st_rdev)\n\
        \x20   except OSError: pass\n\
        print('end')";
    let result = with_user(sandbox.as_mut(), python(code), async |mut user| {
        for name in ["STI", "LINUX", "SETD", "CONS"] {
            for _ in 0..3 {
                // ENOTTY.
                user.sees(&format!("{name} 25")).await;
            }
        }
        user.sees("end").await;
        assert!(
            !user.seen.contains("done") && !user.seen.contains("False"),
            "{}",
            user.seen
        );
        user.rest().await;
    });
    assert_eq!(result.await.unwrap().ending, OK);
}

#[tokio::test]
async fn a_session_ends_with_its_time_and_with_its_user() {
    let provider = provider();
    let mut sandbox = sinew_sandbox::SandboxProvider::acquire(&provider, &small())
        .await
        .unwrap();
    let sleep = |millis| {
        argv(
            &["/bin/sh", "-c", "trap '' HUP; echo begun; sleep 60"],
            millis,
        )
    };
    let result = with_user(sandbox.as_mut(), sleep(300), async |mut user| {
        user.rest().await;
    });
    assert_eq!(result.await.unwrap().ending, Ending::Timeout);
    let hung_up = with_user(sandbox.as_mut(), sleep(60_000), async |mut user| {
        user.sees("begun").await;
        user.typing = None;
        user.rest().await;
    });
    assert_eq!(
        hung_up.await.unwrap().ending,
        Ending::Signalled { signal: 1 }
    );
    // A user who takes nothing holds the program back, and does not keep it from its end.
    let much = argv(
        &["/bin/sh", "-c", "while :; do echo 0123456789; done"],
        2000,
    );
    let result = with_user(sandbox.as_mut(), much, async |mut user| {
        tokio::time::sleep(Duration::from_millis(2500)).await;
        let bytes = user.rest().await;
        assert!((1000..4 << 20).contains(&bytes), "{bytes}");
    });
    assert_eq!(result.await.unwrap().ending, Ending::Timeout);
    // The last output arrives, too, and impossible requests are refused.
    let last = argv(&["/bin/sh", "-c", "seq 1 2000; echo last"], 60_000);
    let result = with_user(sandbox.as_mut(), last, async |mut user| {
        user.sees("last").await;
        user.rest().await;
    });
    assert_eq!(result.await.unwrap().ending, OK);
    for program in [
        Program::Python("1".into()),
        Program::Argv(vec!["/missing".into()]),
    ] {
        let request = ExecRequest {
            program,
            ..argv(&["x"], 1000)
        };
        let refused = with_user(sandbox.as_mut(), request, async |mut user| {
            user.rest().await;
        });
        let error = refused.await.unwrap_err();
        assert!(
            matches!(
                error,
                SandboxError::Request {
                    field: "program",
                    ..
                }
            ),
            "{error}"
        );
    }
}
