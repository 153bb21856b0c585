//! `sinew sandbox shell`: a shell with a terminal in a fresh sandbox, here or on a sandbox server.
//!
//! The terminal of the user is never the one of the sandbox: bytes are carried between the two, and the
//! output passes a [`filter`]. While a session runs the user's terminal is raw, so that keys like Ctrl-C go
//! to the program; it is put back at every end but `kill -9`.

mod filter;
mod user;

use crate::output;
use crate::runtime;
use crate::signals::StopSignals;
use crate::snapshot_args::SnapshotArgs;
use filter::Filter;
use sinew_assembly::Failure;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::{Ending, ExecRequest, ExecResult, Program, Sandbox, Terminal, TerminalInput};
use std::io::Write;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use user::UserTerminal;

/// Pieces that wait between the two terminals, each way. A full queue holds the sender back.
const QUEUE: usize = 16;

/// Program that runs if none is named.
const SHELL: &str = "/bin/sh";

/// End of a session.
enum End {
    /// The program ended.
    Ran(Result<ExecResult, Failure>),
    /// A signal asked this process to end.
    Stopped,
}

/// Runs `argv`, or a shell, on a terminal in a sandbox of `section`. Returns its end. Files of `kept` are
/// also kept after a signal and when the time is over.
///
/// # Errors
/// If standard input or output is not a terminal, no sandbox starts, or the files cannot be kept;
/// [`Failure::Interrupt`] after a signal.
pub(crate) fn run(
    section: &SandboxPlan,
    argv: &[String],
    deadline: Duration,
    kept: &SnapshotArgs,
) -> Result<ExecResult, Failure> {
    UserTerminal::check()?;
    kept.check()?;
    let provider = sinew_assembly::levels::sandboxes(section)?;
    let spec = sinew_assembly::levels::sandbox_spec(section)?;
    let argv = if argv.is_empty() {
        vec![SHELL.to_owned()]
    } else {
        argv.to_vec()
    };
    let request = ExecRequest {
        program: Program::Argv(argv),
        stdin: Vec::new(),
        deadline,
    };
    let runtime = runtime::with_threads(1)?;
    let end = runtime.block_on(async {
        let mut signals = StopSignals::new()?;
        let mut sandbox = kept.begin(provider.as_ref(), &spec).await?;
        let end = tokio::select! {
            ran = session(sandbox.as_mut(), request) => End::Ran(ran),
            () = signals.next() => End::Stopped,
        };
        let digest = kept.leave(provider.as_ref(), sandbox.as_mut()).await;
        sandbox.destroy().await.map_err(Failure::system)?;
        Ok::<_, Failure>((end, digest))
    });
    // A thread may wait for a key that is never pressed.
    runtime.shutdown_background();
    let (end, digest) = end?;
    if let Some(digest) = digest? {
        output::say_error(&format!("snapshot {digest}\n"));
    }
    match end {
        End::Ran(ran) => ran,
        End::Stopped => Err(Failure::Interrupt(
            "interrupted; the sandbox is gone".into(),
        )),
    }
}

/// One program on a terminal, with the user's terminal at its side. The latter is put back when this is
/// dropped.
async fn session(sandbox: &mut dyn Sandbox, request: ExecRequest) -> Result<ExecResult, Failure> {
    let user = UserTerminal::raw()?;
    let mut resized = signal(SignalKind::window_change()).map_err(Failure::system)?;
    let (typing, input) = mpsc::channel(QUEUE);
    let (output, mut shown) = mpsc::channel::<Vec<u8>>(QUEUE);
    let terminal = Terminal {
        size: user.size(),
        env: vec![("TERM".into(), user::kind())],
        input,
        output,
    };
    // The end of standard input hangs up: nothing else holds the other side.
    let resizing = typing.downgrade();
    user::read_keys(typing);
    let sizes = async {
        while resized.recv().await.is_some() {
            let Some(typing) = resizing.upgrade() else {
                break;
            };
            // A program that has ended has no size.
            let _ = typing.send(TerminalInput::Resized(user.size())).await;
        }
        std::future::pending::<()>().await
    };
    let showing = async {
        let mut filter = Filter::default();
        while let Some(bytes) = shown.recv().await {
            let bytes = filter.pass(&bytes);
            // A terminal that takes nothing holds the program back, until its deadline.
            let written = tokio::task::spawn_blocking(move || {
                let mut out = std::io::stdout().lock();
                out.write_all(&bytes).and_then(|()| out.flush())
            });
            if !matches!(written.await, Ok(Ok(()))) {
                break;
            }
        }
    };
    let run = sandbox.exec_on_terminal(request, terminal);
    tokio::select! {
        (ran, ()) = async { tokio::join!(run, showing) } => ran.map_err(Failure::system),
        () = sizes => Err(Failure::system("the terminal has no sizes any more")),
    }
}

/// Prints how a session ended, if the program did not end by itself.
pub(crate) fn tell(result: &ExecResult) {
    match result.ending {
        Ending::Exited { .. } => {}
        ending => output::say_error(&format!("session ended: {ending}\n")),
    }
}
