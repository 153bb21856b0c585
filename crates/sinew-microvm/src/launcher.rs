//! The thread that starts monitors and reaps them.
//!
//! A monitor dies with the thread that started it (`PR_SET_PDEATHSIG`), so that thread lives as
//! long as its provider: when the provider goes, or the process is killed, so do all machines.

use sinew_jail::cgroup::Group;
use sinew_sandbox::SandboxError;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;
use tokio::sync::oneshot;

/// Maximum waiting requests. Further senders wait.
const QUEUE: usize = 256;
/// Interval of checks of killed monitors.
const LOOK: Duration = Duration::from_millis(3);

/// Request to the thread.
enum Job {
    /// Start a monitor and return the process.
    Start(Box<Command>, oneshot::Sender<std::io::Result<Child>>),
    /// Kill a monitor.
    End(Box<Ending>),
}

/// A killed monitor.
struct Ending {
    /// The process, until it has ended.
    child: Child,
    /// Control group of the machine, until it is removed.
    group: Option<Group>,
    /// Receives the end. `None` after that.
    told: Option<oneshot::Sender<()>>,
}

/// Handle of the thread. When the last one is dropped, the thread ends, and with it every monitor.
#[derive(Clone, Debug)]
pub(crate) struct Launcher(SyncSender<Job>);

/// Error for requests after the end of the thread.
fn gone() -> SandboxError {
    SandboxError::Died("the thread that starts machines is gone".into())
}

impl Launcher {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let (sender, jobs) = sync_channel(QUEUE);
        std::thread::Builder::new()
            .name("sinew-microvm".into())
            .spawn(move || serve(&jobs))?;
        Ok(Self(sender))
    }

    /// Starts a monitor.
    pub(crate) async fn run(&self, command: Command) -> Result<Child, SandboxError> {
        let (told, child) = oneshot::channel();
        self.0
            .send(Job::Start(Box::new(command), told))
            .map_err(|_| gone())?;
        let child = child.await.map_err(|_| gone())?;
        child.map_err(|e| SandboxError::io("start a monitor", e))
    }

    /// Kills a monitor and removes its groups. The receiver returns when nothing is left.
    pub(crate) fn end(&self, child: Child, group: Option<Group>) -> oneshot::Receiver<()> {
        let (told, done) = oneshot::channel();
        let ending = Ending {
            child,
            group,
            told: Some(told),
        };
        // The thread's children are dead if the thread is gone; then no receiver is left.
        let _ = self.0.send(Job::End(Box::new(ending)));
        done
    }
}

/// Body of the thread. It starts monitors at once and checks the killed ones between requests.
fn serve(jobs: &Receiver<Job>) {
    let mut dying: Vec<Ending> = Vec::new();
    loop {
        let job = if dying.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            jobs.recv_timeout(LOOK)
        };
        match job {
            Ok(Job::Start(mut command, told)) => {
                if let Err(Ok(mut child)) = told.send(command.spawn()) {
                    // Whoever wanted it has gone.
                    let _ = child.kill();
                    dying.push(Ending {
                        child,
                        group: None,
                        told: None,
                    });
                }
            }
            Ok(Job::End(mut ending)) => {
                // It may have ended by itself.
                let _ = ending.child.kill();
                dying.push(*ending);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                while !dying.is_empty() {
                    dying.retain_mut(|e| !over(e));
                    std::thread::sleep(LOOK);
                }
                return;
            }
        }
        dying.retain_mut(|e| !over(e));
    }
}

/// True if nothing of a monitor is left.
fn over(ending: &mut Ending) -> bool {
    if matches!(ending.child.try_wait(), Ok(None)) {
        return false;
    }
    if ending.group.as_ref().is_some_and(|g| !g.removed()) {
        return false;
    }
    if let Some(told) = ending.told.take() {
        // Nobody need wait for it.
        let _ = told.send(());
    }
    true
}
