//! Attacks on the report that a Python program may give of its own end.
//!
//! A Python program of the process level may report its own end over a socket, so that the next one can start
//! earlier. An attacker can write the report: it may end the program's turn and nothing else. A program that
//! continues after its report, or a child of it, must be gone before the next program runs.

use crate::attack::host::Witness;
use crate::attack::special::{Special, held, printed, python, special};
use crate::attack::{Verdict, escaped, spec};
use sinew_sandbox::{Ending, ExecResult, Sandbox, SandboxError, SandboxProvider};
use std::time::Duration;

/// All are variants of case 44; levels without a report socket run them too, where they have to be exits
/// like others.
pub(crate) const ALL: &[Special] = &[
    special!(44, "forges the report of its end and goes on", goes_on),
    special!(44, "forges the report of its end with a child", with_child),
    special!(44, "forges reports that are none", nonsense),
];

/// Sends a report if there is a socket for it.
const REPORT: &str = "
import array, os, socket, time
def report(data, *more):
    try: socket.socket(fileno=os.dup(3)).sendmsg([data], *more)
    except OSError: pass
";
/// Writes to a file until it is killed, for three seconds at most.
const GOES_ON: &str = "
until = time.monotonic() + 3
while time.monotonic() < until:
    with open('alive', 'w') as f: f.write(str(time.monotonic()))
os._exit(9)
";

/// Runs a program with the helpers of this file.
async fn run(sandbox: &mut dyn Sandbox, code: &str) -> Result<ExecResult, SandboxError> {
    python(sandbox, &format!("{REPORT}{code}")).await
}

/// Whether anything of an earlier program lives.
async fn lives(sandbox: &mut dyn Sandbox) -> Result<Option<String>, SandboxError> {
    let before = sandbox.read_file("alive", 100).await?;
    tokio::time::sleep(Duration::from_millis(50)).await;
    if before != sandbox.read_file("alive", 100).await? {
        return Ok(Some("it writes on after its end".into()));
    }
    let look = "import os; print(sum(p.isdigit() and p not in ('1', str(os.getpid())) for p in os.listdir('/proc')))";
    let seen = printed(&python(sandbox, look).await?);
    Ok((seen != "0").then(|| format!("the next program sees {seen} processes")))
}

/// Reports an end and writes on: the rest of the program must not outlive its turn.
async fn goes_on(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let code = format!("print('said', flush=True)\nopen('alive', 'w')\nreport(b'E\\x05'){GOES_ON}");
    let result = run(sandbox.as_mut(), &code).await?;
    let alive = lives(sandbox.as_mut()).await?;
    sandbox.destroy().await?;
    Ok(match (result.ending, alive) {
        (_, Some(alive)) => escaped(alive),
        // Its own report where it has one, else its own exit.
        (Ending::Exited { code: 5 | 9 }, None) if printed(&result) == "said" => {
            held("worth an exit with that code")
        }
        (ending, None) => escaped(format!("{ending}, printed {:?}", printed(&result))),
    })
}

/// Reports an end from a child while the parent works on.
async fn with_child(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let code = format!(
        "open('alive', 'w')\ntry: child = os.fork()\nexcept (AttributeError, OSError): child = 1\n\
         if child == 0:\n    os.setsid()\n{}\nreport(b'E\\0')\ntime.sleep(0.1)\nos._exit(7)\n",
        GOES_ON.replace('\n', "\n    ")
    );
    let result = run(sandbox.as_mut(), &code).await?;
    let alive = lives(sandbox.as_mut()).await?;
    sandbox.destroy().await?;
    Ok(match (result.ending, alive) {
        (_, Some(alive)) => escaped(alive),
        (Ending::Exited { code: 7 }, None) => held("the report did not count; the child is gone"),
        (ending, None) => escaped(format!("{ending:?}")),
    })
}

/// Sends reports that cannot be read; the real end must be the one that is given.
async fn nonsense(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    for sent in [
        "b'E'",
        "b'E\\0\\0'",
        "b'X\\0'",
        "b'E' * 4096",
        "b'E\\0\\0', [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))]",
    ] {
        let code = format!("for i in range(20): report({sent})\ntime.sleep(0.02)\nos._exit(7)");
        let result = run(sandbox.as_mut(), &code).await?;
        if result.ending != (Ending::Exited { code: 7 }) {
            return Ok(escaped(format!("{sent}: {}", result.ending)));
        }
    }
    sandbox.destroy().await?;
    Ok(held("each was ignored"))
}
