//! The host's end of a spawner: requests go out, and a thread hands replies to the waiting callers.
//! `supervisor.rs` starts the next spawner when one dies.
//!
//! Every request has a number, by which its answer is found: answers come in any order. When the socket
//! closes, all waiting callers get [`SandboxError::Died`], and every later request fails with it at once.

use crate::port::{Protection, SandboxError};
use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, shutdown, socketpair};
use sinew_jail::protocol::{
    Config, End, MAX_PACKET, Numbered, Reply, Request, SpawnerStats, receive, send,
};
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Maximum time until the spawner is ready.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Result of a request.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) file: Option<OwnedFd>,
    pub(super) stats: Option<SpawnerStats>,
    /// Stores that a new snapshot keeps.
    pub(super) held: Vec<(u64, u64)>,
}

type Waiter = oneshot::Sender<Result<Answer, String>>;

#[derive(Debug, Default)]
struct Waiting {
    /// Reason why nothing can be asked any more.
    dead: Option<String>,
    /// Waiting requests with one reply each, by their numbers.
    answers: HashMap<u64, Waiter>,
    /// Waiting executions, by their numbers.
    ends: HashMap<u64, oneshot::Sender<End>>,
}

/// A spawner that runs.
#[derive(Debug)]
pub(super) struct Client {
    /// Packets with files; sent by any thread, read by one.
    socket: OwnedFd,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
    /// Number of spawners that ran earlier.
    epoch: u64,
    pub(super) protections: Arc<Vec<Protection>>,
    pub(super) degradations: Vec<String>,
}

pub(super) fn unavailable(reason: impl Into<String>) -> SandboxError {
    SandboxError::Unavailable {
        level: "process".into(),
        reason: reason.into(),
    }
}

const GONE: &str = "the process that starts sandboxes is gone";

pub(super) fn gone() -> SandboxError {
    SandboxError::Died(GONE.into())
}

impl Client {
    /// Starts a spawner and asks it what this host enforces. [`Client::read_replies`] is to be called in a
    /// separate thread, with the process.
    pub(super) fn start(
        program: &Path,
        config: &Config,
        epoch: u64,
    ) -> Result<(Arc<Self>, Child), SandboxError> {
        let (socket, child) = launch(program, config)?;
        let (protections, degradations) = hello(&socket)?;
        let client = Self {
            socket,
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
            epoch,
            protections: Arc::new(protections),
            degradations,
        };
        Ok((Arc::new(client), child))
    }

    /// Whether the spawner is gone.
    pub(super) fn is_dead(&self) -> bool {
        self.lock().dead.is_some()
    }

    /// Ends the spawner and everything in it.
    pub(super) fn stop(&self) {
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }

    /// A number that no other request, sandbox or snapshot of this provider has.
    pub(super) fn number(&self) -> u64 {
        self.unique(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A number of this spawner as one that no other one of its provider has.
    pub(super) fn unique(&self, number: u64) -> u64 {
        number + (self.epoch << 40)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes replies to the requests that wait, until the spawner ends. Its process and all of its children
    /// have then ended, too.
    pub(super) fn read_replies(&self, mut child: Child) {
        let mut buffer = vec![0; MAX_PACKET + 1];
        while let Ok(Some((reply, fds))) = receive::<Reply>(self.socket.as_fd(), &mut buffer) {
            match reply {
                Reply::Done {
                    seq,
                    error,
                    stats,
                    held,
                } => {
                    let waiter = self.lock().answers.remove(&seq);
                    if let Some(waiter) = waiter {
                        let file = fds.into_iter().next();
                        let answer = Answer { file, stats, held };
                        let _ = waiter.send(error.map_or(Ok(answer), Err));
                    }
                }
                Reply::Ended { seq, end } => {
                    let waiter = self.lock().ends.remove(&seq);
                    if let Some(waiter) = waiter {
                        let _ = waiter.send(end);
                    }
                }
                Reply::Hello { .. } | Reply::Unavailable { .. } => {}
            }
        }
        *self.lock() = Waiting {
            dead: Some(GONE.into()),
            ..Waiting::default()
        };
        // An answer that cannot be read is the end of it, too.
        self.stop();
        let _ = child.wait();
    }

    /// Sends a request whose answer is not awaited.
    pub(super) fn tell(&self, request: Request) {
        let seq = self.number();
        let _ = send(self.socket.as_fd(), &Numbered { seq, request }, &[]);
    }

    /// Asks for an execution; its end comes by itself.
    pub(super) fn run(
        &self,
        request: Request,
        fds: &[RawFd],
    ) -> Result<oneshot::Receiver<End>, SandboxError> {
        self.send(request, fds, |waiting| &mut waiting.ends)
    }

    /// Sends a request with files and waits for its answer. A caller that stops waiting leaves the request
    /// to be carried out.
    pub(super) async fn ask(
        &self,
        request: Request,
        fds: &[RawFd],
    ) -> Result<Answer, SandboxError> {
        let receiver = self.send(request, fds, |waiting| &mut waiting.answers)?;
        match receiver.await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(message)) => Err(SandboxError::io("sandbox", message)),
            Err(_) => Err(gone()),
        }
    }

    /// Sends a request with files. Its result goes to the sender that is kept among `waiters`.
    fn send<T>(
        &self,
        request: Request,
        fds: &[RawFd],
        waiters: fn(&mut Waiting) -> &mut HashMap<u64, oneshot::Sender<T>>,
    ) -> Result<oneshot::Receiver<T>, SandboxError> {
        let seq = self.number();
        let (sender, receiver) = oneshot::channel();
        {
            let mut waiting = self.lock();
            if let Some(dead) = &waiting.dead {
                return Err(SandboxError::Died(dead.clone()));
            }
            waiters(&mut waiting).insert(seq, sender);
        }
        if let Err(e) = send(self.socket.as_fd(), &Numbered { seq, request }, fds) {
            let mut waiting = self.lock();
            waiters(&mut waiting).remove(&seq);
            return Err(unsent(&mut waiting, &e));
        }
        Ok(receiver)
    }
}

/// A spawner that dies closes its socket a moment before the thread that reads notices it. The first
/// caller that sees it notes it, so that the next caller waits for the next spawner.
fn unsent(waiting: &mut Waiting, why: &sinew_jail::Error) -> SandboxError {
    if matches!(why.errno(), Some(libc::EPIPE | libc::ECONNRESET)) {
        waiting.dead.get_or_insert_with(|| GONE.into());
    }
    if waiting.dead.is_some() {
        gone()
    } else {
        SandboxError::io("ask the spawner", why)
    }
}

/// Starts a spawner without environment, its end of the socket as standard input.
fn launch(program: &Path, config: &Config) -> Result<(OwnedFd, Child), SandboxError> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )
    .map_err(|e| SandboxError::io("socketpair", e))?;
    let config = serde_json::to_string(config).map_err(|e| SandboxError::io("encode", e))?;
    let child = Command::new(program)
        .arg("spawner")
        .arg(config)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .env_clear()
        .current_dir("/")
        .spawn()
        .map_err(|e| SandboxError::io(format!("start {}", program.display()), e))?;
    Ok((ours, child))
}

/// The first message: what the host enforces, or why nothing can be isolated.
fn hello(socket: &OwnedFd) -> Result<(Vec<Protection>, Vec<String>), SandboxError> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let timeout = PollTimeout::try_from(START_TIMEOUT).unwrap_or(PollTimeout::MAX);
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, timeout).map_err(|e| SandboxError::io("poll", e))?;
    if ready == 0 {
        let seconds = START_TIMEOUT.as_secs();
        return Err(unavailable(format!(
            "the spawner did not get ready in {seconds} s"
        )));
    }
    let mut buffer = vec![0; MAX_PACKET + 1];
    match receive(socket.as_fd(), &mut buffer) {
        Ok(Some((
            Reply::Hello {
                protections,
                degradations,
            },
            _,
        ))) => Ok((protections, degradations)),
        Ok(Some((Reply::Unavailable { reason }, _))) => Err(unavailable(reason)),
        Ok(other) => Err(unavailable(format!(
            "the spawner ended at once ({:?})",
            other.map(|o| o.0)
        ))),
        Err(e) => Err(unavailable(e.to_string())),
    }
}
