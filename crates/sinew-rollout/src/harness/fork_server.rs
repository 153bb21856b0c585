//! Runs episodes as forks of one Python interpreter that has imported the program's packages. A fork takes
//! milliseconds, while an import takes seconds. Episodes share its sandbox only if the program does not run
//! code of the model, since such code could reach the other episodes. Otherwise each server runs one episode.

use super::command::ProgramCommand;
use super::error::ProgramError;
use super::forward::PortForward;
use super::sandboxed::{ProgramEnd, Sandboxes, tail};
use serde::Deserialize;
use serde_json::json;
use sinew_sandbox::{Ending, ExecOptions, ExecRequest, PYTHON_GUARD, Program};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Python source of the fork server, which imports and forks; it documents the protocol.
const SCRIPT: &str = include_str!("fork_server.py");
/// Port inside the sandbox at which the fork server connects to this process.
const CONTROL_PORT: u16 = 4100;
/// Maximum time for the imports.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum lifetime of one server.
const LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Capacity of the queue of messages to the server; senders wait when it is full.
const QUEUE: usize = 1024;

/// Maximum bytes of a line from the server. A line contains the captured stdout and stderr of an episode as
/// JSON.
const MAX_LINE: u64 = 16 << 20;

/// Running episodes, shared between tasks.
type Waiting = Arc<Mutex<Episodes>>;

#[derive(Debug, Default)]
struct Episodes {
    /// Whether the server has ended. No episode is added afterwards.
    dead: bool,
    /// Running episodes by number.
    running: HashMap<u64, oneshot::Sender<ProgramEnd>>,
}

fn lock(waiting: &Waiting) -> MutexGuard<'_, Episodes> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Marks the server as ended. Dropping the senders ends the waits of its episodes.
fn end(waiting: &Waiting) {
    let mut episodes = lock(waiting);
    episodes.dead = true;
    episodes.running.clear();
}

/// A running server. Dropping it ends the server and every fork of it.
#[derive(Debug)]
pub(super) struct ForkServer {
    queue: mpsc::Sender<String>,
    waiting: Waiting,
    next: AtomicU64,
    /// Location in the program that runs code, as `file:line: what`.
    code: Option<String>,
    _tasks: JoinSet<()>,
    _forward: PortForward,
}

/// The first line from the fork server.
#[derive(Deserialize)]
struct Ready {
    code: Option<String>,
}

/// A line from the fork server: an episode ended.
#[derive(Deserialize)]
struct Message {
    id: u64,
    code: Option<i32>,
    signal: Option<i32>,
    #[serde(default)]
    stdout: String,
    #[serde(default)]
    stderr: String,
    /// JSON value that the function returned; `!` and a reason if the fork was ended; empty without a value.
    #[serde(default)]
    value: String,
}

fn broken(what: impl std::fmt::Display) -> ProgramError {
    ProgramError::Failed(format!("the fork server {what}"))
}

impl ForkServer {
    /// Starts a server and waits until it has imported everything, at most 120 seconds.
    ///
    /// # Errors
    /// If the sandbox cannot be made, or the server ends or is not ready in time.
    pub(super) async fn start(
        sandboxes: &Sandboxes,
        command: &ProgramCommand,
    ) -> Result<Self, ProgramError> {
        let (mut sandbox, forward) = sandboxes.acquire(Vec::new()).await?;
        let inside = sandbox.listen_inside(CONTROL_PORT).await?;
        inside.set_nonblocking(true).map_err(broken)?;
        let listener = TcpListener::from_std(inside).map_err(broken)?;
        let python = command.argv[0].clone();
        let script = [PYTHON_GUARD, "\n\n", SCRIPT].concat();
        let mut argv = vec![python, "-c".into(), script, CONTROL_PORT.to_string()];
        argv.extend_from_slice(&command.argv[1..]);
        let request = ExecRequest {
            program: Program::Argv(argv),
            stdin: Vec::new(),
            deadline: LIFE,
        };
        let waiting = Waiting::default();
        let (died, mut death) = oneshot::channel();
        let mut tasks = JoinSet::new();
        let forgotten = Arc::clone(&waiting);
        tasks.spawn(async move {
            let result = sandbox.exec_with(request, ExecOptions::default()).await;
            let why = match result {
                Ok(r) => format!(
                    "ended: {}: {}",
                    r.ending,
                    tail(&String::from_utf8_lossy(&r.stderr))
                ),
                Err(e) => format!("ended: {e}"),
            };
            end(&forgotten);
            let _ = died.send(why);
        });
        let connected = tokio::select! {
            accepted = listener.accept() => accepted.map_err(broken)?.0,
            why = &mut death => return Err(broken(why.unwrap_or_default())),
            () = tokio::time::sleep(READY_TIMEOUT) => {
                return Err(broken(format!("did not get ready in {} s", READY_TIMEOUT.as_secs())));
            }
        };
        let (read, write) = connected.into_split();
        let (queue, messages) = mpsc::channel(QUEUE);
        tasks.spawn(write_all(write, messages));
        let (mut read, mut line) = (BufReader::new(read), Vec::new());
        let ready = if read_line(&mut read, &mut line).await {
            serde_json::from_slice::<Ready>(&line).map_err(broken)?
        } else {
            return Err(broken(death.await.unwrap_or_default()));
        };
        tasks.spawn(read_all(read, Arc::clone(&waiting)));
        Ok(Self {
            queue,
            waiting,
            next: AtomicU64::new(1),
            code: ready.code,
            _tasks: tasks,
            _forward: forward,
        })
    }

    /// Location in the program that runs code of the model, so that its episodes must not share a sandbox.
    pub(super) fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }

    /// Whether it can still start episodes.
    pub(super) fn is_alive(&self) -> bool {
        !self.queue.is_closed() && !self.lock().dead
    }

    /// Runs one episode to its end or its deadline. Dropping the future kills the episode. With `alone`, it
    /// is the only episode of this server and may run code; all its processes end with it.
    ///
    /// # Errors
    /// If the server ends, or does not end an episode 10 seconds after its deadline.
    pub(super) async fn run(
        &self,
        env: Vec<(String, String)>,
        (cpu_s, alone): (f64, bool),
        deadline: Duration,
    ) -> Result<ProgramEnd, ProgramError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, mut ended) = oneshot::channel();
        {
            let mut episodes = self.lock();
            if episodes.dead {
                return Err(broken("is gone"));
            }
            episodes.running.insert(id, sender);
        }
        let _kill = KillOnDrop { server: self, id };
        let env: BTreeMap<String, String> = env.into_iter().collect();
        let cpu_s = cpu_s.ceil().max(1.0) as u64;
        let start = json!({ "id": id, "env": env, "cpu_s": cpu_s, "alone": alone });
        self.send(start).await?;
        let gone = |_| broken("ended with the episode");
        match tokio::time::timeout(deadline, &mut ended).await {
            Ok(result) => result.map_err(gone),
            Err(_) => {
                self.send(json!({ "kill": id })).await?;
                let killed = tokio::time::timeout(Duration::from_secs(10), ended).await;
                let ended = killed.map_err(|_| broken("did not end an episode"))?;
                Ok(ProgramEnd {
                    ending: Ending::Timeout,
                    ..ended.map_err(gone)?
                })
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Episodes> {
        lock(&self.waiting)
    }

    async fn send(&self, message: serde_json::Value) -> Result<(), ProgramError> {
        let line = format!("{message}\n");
        self.queue.send(line).await.map_err(|_| broken("is gone"))
    }
}

/// Kills an episode when its future is dropped.
struct KillOnDrop<'a> {
    server: &'a ForkServer,
    id: u64,
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        if self.server.lock().running.remove(&self.id).is_some() {
            // A full queue: the sandbox's own limits end it.
            let _ = self
                .server
                .queue
                .try_send(format!("{}\n", json!({ "kill": self.id })));
        }
    }
}

/// Writes queued lines until the connection breaks; from then on the server counts as ended.
async fn write_all(mut to: OwnedWriteHalf, mut queue: mpsc::Receiver<String>) {
    while let Some(line) = queue.recv().await {
        if to.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads a line. Returns false at the end of the connection and for a line that is too long.
async fn read_line(from: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> bool {
    line.clear();
    let read = from.take(MAX_LINE).read_until(b'\n', line).await;
    read.is_ok() && line.ends_with(b"\n")
}

/// Delivers results to the episodes that wait for them. If the connection ends or a line is not a valid
/// message, all of them fail.
async fn read_all(mut from: impl AsyncBufRead + Unpin, waiting: Waiting) {
    let mut line = Vec::new();
    while read_line(&mut from, &mut line).await {
        let Ok(message) = serde_json::from_slice::<Message>(&line) else {
            break;
        };
        let waiter = lock(&waiting).running.remove(&message.id);
        if let Some(waiter) = waiter {
            // The future of an episode that was given up is gone.
            let _ = waiter.send(message.ended());
        }
    }
    end(&waiting);
}

impl Message {
    fn ended(self) -> ProgramEnd {
        let ending = match (self.code, self.signal) {
            (_, Some(SIGXCPU)) => Ending::Timeout,
            (_, Some(signal)) => Ending::Signalled { signal },
            (code, None) => Ending::Exited {
                code: code.unwrap_or(-1),
            },
        };
        let (stdout, mut stderr, mut refused) = (self.stdout, self.stderr, false);
        if let Some(what) = self.value.strip_prefix('!') {
            refused = true;
            stderr.push_str(&format!(
                "\nit would run code ({what}) in a sandbox that it shares with other episodes; from now on each \
                 episode of this program has a sandbox of its own"
            ));
        }
        ProgramEnd {
            ending,
            stdout,
            stderr,
            value: sinew_types::json::from_str(&self.value).ok(),
            refused,
        }
    }
}

/// Signal that Linux sends at the CPU limit (signal(7)).
const SIGXCPU: i32 = 24;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::io::{BufRead, Write};
    use std::process::Command;

    /// A program that takes all processes makes the next fork fail. That episode fails with the reason, and
    /// the server continues.
    #[test]
    fn a_fork_that_is_refused_ends_one_episode_only() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("agent.py");
        std::fs::write(&script, "print('done')").unwrap();
        let refusing = format!(
            "import os\nreal, tries = os.fork, []\n\
             def fork():\n    tries.append(1)\n    if len(tries) == 1:\n        \
             raise BlockingIOError(11, 'Resource temporarily unavailable')\n    return real()\n\
             os.fork = fork\n{PYTHON_GUARD}\n{SCRIPT}"
        );
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let mut server = Command::new("python3")
            .args(["-c", &refusing, &port, script.to_str().unwrap()])
            .spawn()
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = std::io::BufReader::new(stream.try_clone().unwrap()).lines();
        let mut next =
            || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
        assert_eq!(next()["ready"], true);
        for (id, code, said) in [(1, 71, "stderr"), (2, 0, "stdout")] {
            let start = json!({"id": id, "env": {}, "cpu_s": 5, "alone": false});
            writeln!(stream, "{start}").unwrap();
            let ended = next();
            assert_eq!((&ended["id"], &ended["code"]), (&json!(id), &json!(code)));
            assert!(!ended[said].as_str().unwrap().is_empty(), "{ended}");
        }
        drop(stream);
        server.kill().unwrap();
        server.wait().unwrap();
    }

    /// An episode that waits, and the server's side of its connection.
    async fn answered(bytes: Vec<u8>) -> Option<ProgramEnd> {
        let waiting = Waiting::default();
        let (sender, ended) = oneshot::channel();
        lock(&waiting).running.insert(1, sender);
        read_all(std::io::Cursor::new(bytes), Arc::clone(&waiting)).await;
        assert!(lock(&waiting).dead && lock(&waiting).running.is_empty());
        ended.await.ok()
    }

    #[tokio::test]
    async fn a_server_that_is_gone_or_talks_nonsense_keeps_no_episode_waiting() {
        let line = br#"{"id": 1, "code": 0, "stdout": "42"}"#;
        let whole = [&line[..], b"\n"].concat();
        assert_eq!(answered(whole).await.unwrap().stdout, "42");
        // A line without its end is none.
        assert_eq!(answered(line.to_vec()).await, None);
        assert_eq!(answered(Vec::new()).await, None);
        assert_eq!(answered(b"hello\n".to_vec()).await, None);
    }

    #[tokio::test]
    async fn a_line_without_end_is_not_read_for_ever() {
        let mut endless = tokio::io::BufReader::new(tokio::io::repeat(b' '));
        let mut line = Vec::new();
        assert!(!read_line(&mut endless, &mut line).await);
        assert_eq!(line.len() as u64, MAX_LINE);
    }
}
