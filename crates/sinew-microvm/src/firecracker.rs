//! Firecracker, through its API: HTTP on a Unix socket, one JSON object a request
//! (`src/firecracker/swagger/firecracker.yaml` of that project, version 1.7 and later).
//!
//! The guest's agent is reached over vsock: the monitor gives a Unix socket, and who connects says
//! `CONNECT PORT` and is answered `OK NUMBER` (`docs/vsock.md` there). After a restore such
//! connections are gone and made anew.

use crate::image::Image;
use serde_json::{Value, json};
use sinew_guest::{Guest, Hello};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The port that the agent listens on.
pub const AGENT_PORT: u32 = 52;
/// Longest answer that is read, head and body each.
const MAX_ANSWER: usize = 64 << 10;
/// How long an answer may take: a snapshot writes all memory.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a monitor, and a guest, may take to be there.
const START: Duration = Duration::from_secs(10);
/// Between attempts to reach what is not there yet.
const AGAIN: Duration = Duration::from_millis(2);

/// Why a monitor did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum FirecrackerError {
    /// It refused.
    #[error("{method} {path}: {status}: {fault}")]
    Refused {
        /// HTTP method.
        method: &'static str,
        /// What was asked for.
        path: String,
        /// HTTP status.
        status: u16,
        /// `fault_message` of the answer.
        fault: String,
    },
    /// What came is not what its API describes.
    #[error("{doing}: {problem}")]
    Broken {
        /// What was being done.
        doing: String,
        /// What was seen.
        problem: String,
    },
}

type Done<T> = Result<T, FirecrackerError>;

fn broken(doing: impl Into<String>, problem: impl std::fmt::Display) -> FirecrackerError {
    FirecrackerError::Broken {
        doing: doing.into(),
        problem: problem.to_string(),
    }
}

/// The API of one monitor.
#[derive(Clone, Debug)]
pub struct Api {
    socket: PathBuf,
}

impl Api {
    /// The API behind `socket`.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Asks for `path`; what it answers, [`Value::Null`] for nothing.
    ///
    /// # Errors
    /// [`FirecrackerError`].
    pub async fn ask(&self, method: &'static str, path: &str, body: Value) -> Done<Value> {
        let doing = format!("{method} {path}");
        let asked = tokio::time::timeout(ANSWER, self.exchange(method, path, &body));
        let answered = asked
            .await
            .map_err(|_| broken(&doing, format!("no answer in {ANSWER:?}")))?;
        let (status, bytes) = answered.map_err(|e| broken(&doing, e))?;
        let value = match bytes.as_slice() {
            [] => Value::Null,
            bytes => serde_json::from_slice(bytes).map_err(|e| broken(&doing, e))?,
        };
        match status {
            200..=299 => Ok(value),
            status => Err(FirecrackerError::Refused {
                method,
                path: path.into(),
                status,
                fault: value["fault_message"]
                    .as_str()
                    .unwrap_or("no reason")
                    .into(),
            }),
        }
    }

    async fn exchange(
        &self,
        method: &str,
        path: &str,
        body: &Value,
    ) -> std::io::Result<(u16, Vec<u8>)> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await?;
        let mut had = Vec::new();
        let head = loop {
            if let Some(at) = had.windows(4).position(|w| w == b"\r\n\r\n") {
                break at;
            }
            more(&mut stream, &mut had).await?;
        };
        let (status, length) = parse(&had[..head]).ok_or_else(|| odd("no status, or no length"))?;
        if length > MAX_ANSWER {
            return Err(odd("a longer answer than is read"));
        }
        while had.len() < head + 4 + length {
            more(&mut stream, &mut had).await?;
        }
        Ok((status, had[head + 4..head + 4 + length].to_vec()))
    }
}

fn odd(what: &str) -> std::io::Error {
    std::io::Error::other(what.to_owned())
}

async fn more(stream: &mut UnixStream, had: &mut Vec<u8>) -> std::io::Result<()> {
    let mut chunk = [0; 4096];
    let read = stream.read(&mut chunk).await?;
    if read == 0 {
        return Err(odd("the connection ended half-way"));
    }
    had.extend_from_slice(&chunk[..read]);
    if had.len() > 2 * MAX_ANSWER {
        return Err(odd("a longer answer than is read"));
    }
    Ok(())
}

/// Status and length of the body.
fn parse(head: &[u8]) -> Option<(u16, usize)> {
    let text = std::str::from_utf8(head).ok()?;
    let mut lines = text.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.")?;
    let status = status.split(' ').nth(1)?.parse().ok()?;
    let mut length = 0;
    for line in lines {
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    Some((status, length))
}

/// Connects to a port of the guest through the monitor's socket.
///
/// # Errors
/// [`FirecrackerError::Broken`] if nobody listens there within the time.
pub async fn connect(socket: &Path, port: u32, within: Duration) -> Done<UnixStream> {
    let began = Instant::now();
    loop {
        let tried = tokio::time::timeout(within, knock(socket, port)).await;
        let tried = tried.unwrap_or_else(|_| Err(odd("no answer")));
        match tried {
            Ok(stream) => return Ok(stream),
            Err(e) if began.elapsed() > within => {
                return Err(broken(format!("connect to vsock port {port}"), e));
            }
            // The guest does not listen yet: the monitor closes the connection.
            Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}

async fn knock(socket: &Path, port: u32) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).await?;
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .await?;
    // One byte at a time: what follows the line is the agent's.
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        if stream.read(&mut byte).await? == 0 || line.len() > 32 {
            return Err(odd("nobody listens"));
        }
        line.push(byte[0]);
    }
    match line.strip_prefix(b"OK ") {
        Some(_) => Ok(stream),
        None => Err(odd("an answer that is not OK")),
    }
}

/// What a machine boots from.
#[derive(Clone, Debug)]
pub struct Boot {
    /// The kernel, not compressed.
    pub kernel: PathBuf,
    /// The root with the agent.
    pub initrd: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u64,
}

/// A machine that was saved: all its memory, and the rest.
#[derive(Clone, Debug)]
pub struct SavedMachine {
    memory: PathBuf,
    state: PathBuf,
    hello: Hello,
}

/// A machine under Firecracker. Dropping it ends its monitor.
#[derive(Debug)]
pub struct FirecrackerMachine {
    api: Api,
    child: Child,
    folder: PathBuf,
    /// The agent inside.
    pub guest: Guest,
}

/// Ends a monitor unless it became a machine.
struct Starting(Option<Child>);

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

async fn monitor(program: &Path, folder: &Path) -> Done<(Starting, Api)> {
    std::fs::create_dir_all(folder).map_err(|e| broken("make a folder", e))?;
    let socket = folder.join("api.sock");
    let _ = std::fs::remove_file(&socket);
    let _ = std::fs::remove_file(folder.join("agent.sock"));
    let child = Command::new(program)
        .args(["--api-sock", "api.sock"])
        .current_dir(folder)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let child = child.map_err(|e| broken(format!("start {}", program.display()), e))?;
    let starting = Starting(Some(child));
    let began = Instant::now();
    while UnixStream::connect(&socket).await.is_err() {
        if began.elapsed() > START {
            return Err(broken("start a monitor", "its API does not answer"));
        }
        tokio::time::sleep(AGAIN).await;
    }
    Ok((starting, Api::new(socket)))
}

impl FirecrackerMachine {
    fn of(mut starting: Starting, api: Api, folder: &Path, guest: Guest) -> Done<Self> {
        let child = starting.0.take();
        Ok(Self {
            api,
            child: child.ok_or_else(|| broken("start a monitor", "it is gone"))?,
            folder: folder.into(),
            guest,
        })
    }

    /// Boots a machine; `folder` is its own and takes its sockets.
    ///
    /// # Errors
    /// [`FirecrackerError`].
    pub async fn boot(program: &Path, folder: &Path, boot: &Boot) -> Done<Self> {
        let (starting, api) = monitor(program, folder).await?;
        let put = |path, body| api.ask("PUT", path, body);
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": boot.memory_mib });
        put("/machine-config", machine).await?;
        let source = json!({
            "kernel_image_path": boot.kernel,
            "initrd_path": boot.initrd,
            "boot_args": "console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on pci=off",
        });
        put("/boot-source", source).await?;
        // Relative: clones of a snapshot each have their own folder.
        put(
            "/vsock",
            json!({ "guest_cid": 3, "uds_path": "agent.sock" }),
        )
        .await?;
        put("/actions", json!({ "action_type": "InstanceStart" })).await?;
        let stream = connect(&folder.join("agent.sock"), AGENT_PORT, START).await?;
        let guest = Guest::greet(Box::new(stream), "microvm", START).await;
        let guest = guest.map_err(|e| broken("greet the agent", e))?;
        Self::of(starting, api, folder, guest)
    }

    /// Saves it whole. Its connection ends with that; the machine itself goes on.
    ///
    /// # Errors
    /// [`FirecrackerError`].
    pub async fn save(&mut self) -> Done<SavedMachine> {
        let state = |name: &str| json!({ "state": name });
        self.api.ask("PATCH", "/vm", state("Paused")).await?;
        let (memory, saved) = (self.folder.join("memory"), self.folder.join("state"));
        let create = json!({
            "snapshot_type": "Full", "snapshot_path": saved, "mem_file_path": memory,
        });
        let created = self.api.ask("PUT", "/snapshot/create", create).await;
        self.api.ask("PATCH", "/vm", state("Resumed")).await?;
        created?;
        let hello = self.guest.hello();
        let stream = connect(&self.folder.join("agent.sock"), AGENT_PORT, START).await?;
        self.guest = Guest::restored(Box::new(stream), "microvm", hello);
        Ok(SavedMachine {
            memory,
            state: saved,
            hello,
        })
    }

    /// A machine that goes on from a saved one, with its own time, random numbers and name. Its
    /// memory is mapped privately: clones share what they do not change.
    ///
    /// # Errors
    /// [`FirecrackerError`].
    pub async fn restore(program: &Path, folder: &Path, saved: &SavedMachine) -> Done<Self> {
        let (starting, api) = monitor(program, folder).await?;
        let load = json!({
            "snapshot_path": saved.state,
            "mem_backend": { "backend_type": "File", "backend_path": saved.memory },
            "resume_vm": true,
        });
        api.ask("PUT", "/snapshot/load", load).await?;
        let stream = connect(&folder.join("agent.sock"), AGENT_PORT, START).await?;
        let mut guest = Guest::restored(Box::new(stream), "microvm", saved.hello);
        let mut entropy = [0; 64];
        getrandom::fill(&mut entropy).map_err(|e| broken("random numbers", e))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_nanos() as u64);
        let name = crate::ram::unique().map_err(|e| broken("random numbers", e))?;
        let resumed = guest
            .resume(now, &entropy, &format!("vm-{name:016x}"))
            .await;
        resumed.map_err(|e| broken("resume", e))?;
        Self::of(starting, api, folder, guest)
    }
}

impl Drop for FirecrackerMachine {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Boots a machine with `program`, saves it and restores a clone: whether this host can.
///
/// # Errors
/// What did not work.
pub async fn probe(program: &Path, image: &Image, folder: &Path) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    std::fs::create_dir_all(folder).map_err(|e| text(&e))?;
    let (kernel, initrd) = (folder.join("vmlinux"), folder.join("root.cpio"));
    let packed = image.read("vmlinuz").map_err(|e| text(&e))?;
    std::fs::write(&kernel, crate::vmlinux::unpack(&packed)?).map_err(|e| text(&e))?;
    let root = image.root(&format!("vsock:{AGENT_PORT}"));
    std::fs::write(&initrd, root.map_err(|e| text(&e))?).map_err(|e| text(&e))?;
    let boot = Boot {
        kernel,
        initrd,
        memory_mib: 256,
    };
    let (first, clone) = (folder.join("first"), folder.join("clone"));
    let machine = FirecrackerMachine::boot(program, &first, &boot).await;
    let saved = machine.map_err(|e| text(&e))?.save().await;
    let saved = saved.map_err(|e| text(&e))?;
    let clone = FirecrackerMachine::restore(program, &clone, &saved).await;
    clone.map(|_| ()).map_err(|e| text(&e))
}
