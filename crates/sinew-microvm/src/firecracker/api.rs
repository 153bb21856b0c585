//! HTTP on a Unix socket, one JSON object a request, and ports of a guest behind another socket.
//!
//! Both sockets lie in the monitor's own folder, and a monitor that was taken over may put there
//! what it likes: nothing but a socket of its own user is connected to. Answers are bounded.

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use serde_json::Value;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Maximum bytes of the head and of the body of a response.
const MAX_ANSWER: usize = 64 << 10;
/// Maximum time of a response. A snapshot writes all memory.
const ANSWER: Duration = Duration::from_secs(30);
/// Time between attempts to reach a socket that does not exist yet.
pub(crate) const AGAIN: Duration = Duration::from_millis(1);

/// Reason why a monitor did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum FirecrackerError {
    /// It refused.
    #[error("{method} {path}: {status}: {fault}")]
    Refused {
        /// HTTP method.
        method: &'static str,
        /// Path of the request.
        path: String,
        /// HTTP status.
        status: u16,
        /// `fault_message` of the answer.
        fault: String,
    },
    /// The response is not one that the API describes.
    #[error("{doing}: {problem}")]
    Broken {
        /// The failed operation.
        doing: String,
        /// The response, or the error of the system.
        problem: String,
    },
}

type Done<T> = Result<T, FirecrackerError>;

/// Error for a response that the API does not describe.
fn broken(doing: impl Into<String>, problem: impl std::fmt::Display) -> FirecrackerError {
    FirecrackerError::Broken {
        doing: doing.into(),
        problem: problem.to_string(),
    }
}

/// A socket that a monitor made.
#[derive(Clone, Debug)]
pub struct Socket {
    /// Path in the monitor's folder.
    path: PathBuf,
    /// Required owner. `None`: any.
    owner: Option<u32>,
}

impl Socket {
    /// The socket at `path`, of the user `owner` if that is known.
    pub fn new(path: PathBuf, owner: Option<u32>) -> Self {
        Self { path, owner }
    }

    /// Connects; links are not followed, and other users' sockets are refused.
    ///
    /// # Errors
    /// If it is no such socket, or nobody listens.
    pub async fn connect(&self) -> std::io::Result<UnixStream> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = open(&self.path, flags, Mode::empty())?;
        let seen = fstat(&found)?;
        let socket = FileType::from_raw_mode(seen.st_mode) == FileType::Socket;
        if !socket || self.owner.is_some_and(|o| o != seen.st_uid) {
            return Err(odd("not a socket of the monitor's own user"));
        }
        UnixStream::connect(format!("/proc/self/fd/{}", found.as_raw_fd())).await
    }
}

/// The API of one monitor.
#[derive(Clone, Debug)]
pub struct Api {
    /// Socket of the API.
    socket: Socket,
}

impl Api {
    /// The API behind `socket`.
    pub fn new(socket: Socket) -> Self {
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

    /// Sends one request on a connection of its own, and returns status and body.
    async fn exchange(
        &self,
        method: &str,
        path: &str,
        body: &Value,
    ) -> std::io::Result<(u16, Vec<u8>)> {
        let mut stream = self.socket.connect().await?;
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

/// Error for a response that is not read.
fn odd(what: &str) -> std::io::Error {
    std::io::Error::other(what.to_owned())
}

/// Reads the next bytes of a response, up to the limit.
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
pub async fn connect(socket: &Socket, port: u32, within: Duration) -> Done<UnixStream> {
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

/// Connects to a port of the guest once.
async fn knock(socket: &Socket, port: u32) -> std::io::Result<UnixStream> {
    let mut stream = socket.connect().await?;
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
