//! A client of the benches: one connection a rollout, as agents have.
//!
//! An agent keeps its connection and repeats its whole conversation with each call, as SDKs do. It begins
//! again after [`MAX_TURNS`] turns, so that requests keep their size over the measurement.

use super::process::Process;
use crate::BenchError;
use bytes::Bytes;
use futures::future::try_join_all;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Number of turns after which a conversation starts again.
const MAX_TURNS: usize = 8;

/// Conversations that are opened and grown at the same time.
const SIDE_BY_SIDE: usize = 64;

/// A server to send requests to.
#[derive(Clone, Debug)]
pub(super) struct Target {
    address: SocketAddr,
    rollouts: Rollouts,
}

/// Addresses of a server's rollouts.
#[derive(Clone, Debug)]
enum Rollouts {
    /// One address for all.
    One,
    /// Opened with this token, each with its own address and key.
    Opened(String),
    /// Opened before, each at a separate path.
    Paths(Arc<Vec<String>>),
}

/// One agent: a connection and its conversation.
#[derive(Debug)]
pub(super) struct Agent {
    /// One connection, one call at a time.
    sender: SendRequest<Full<Bytes>>,
    /// Path of its rollout, with the dialect.
    path: String,
    /// Key of its rollout.
    key: String,
    /// Messages of the conversation so far.
    messages: Vec<Value>,
    /// Turns after which a conversation ends; `None`: it grows.
    max_turns: Option<usize>,
    said: u64,
    /// Prompt tokens of the last call.
    pub(super) prompt_tokens: usize,
}

/// A connection, and the task that reads it. The task ends with the connection, or when it is aborted.
pub(super) async fn connect(
    address: SocketAddr,
) -> Result<(SendRequest<Full<Bytes>>, JoinHandle<()>), BenchError> {
    let stream = TcpStream::connect(address)
        .await
        .map_err(BenchError::system)?;
    stream.set_nodelay(true).map_err(BenchError::system)?;
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(BenchError::system)?;
    let task = tokio::spawn(async move {
        // Its end is seen by the next request.
        let _ = connection.await;
    });
    Ok((sender, task))
}

impl Target {
    /// Our gateway, where each agent opens a separate rollout.
    ///
    /// # Errors
    /// If the process is another program.
    pub(super) fn gateway(process: &Process) -> Result<Self, BenchError> {
        let (address, control_token) = process.listens()?;
        Ok(Self {
            address,
            rollouts: Rollouts::Opened(control_token.to_owned()),
        })
    }

    /// A server with one address for all.
    pub(super) fn plain(address: SocketAddr) -> Self {
        Self {
            address,
            rollouts: Rollouts::One,
        }
    }

    /// A server with these paths of rollouts.
    pub(super) fn paths(address: SocketAddr, paths: Arc<Vec<String>>) -> Self {
        Self {
            address,
            rollouts: Rollouts::Paths(paths),
        }
    }

    /// A connection to the server; its end is seen by the next request.
    pub(super) async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, BenchError> {
        Ok(connect(self.address).await?.0)
    }

    /// A rollout with its agent; `index` distinguishes those of a server.
    async fn agent(&self, index: usize) -> Result<Agent, BenchError> {
        let mut sender = self.connect().await?;
        let none = || "sk-none".to_owned();
        let (path, key) = match &self.rollouts {
            Rollouts::One => ("/v1/chat/completions".to_owned(), none()),
            Rollouts::Paths(paths) => {
                let path = &paths[index % paths.len().max(1)];
                (format!("{path}/v1/chat/completions"), none())
            }
            Rollouts::Opened(control) => {
                let (told, _) = post(&mut sender, "/rollouts", control, b"{}".as_slice()).await?;
                let told: Value = serde_json::from_slice(&told).map_err(BenchError::system)?;
                let text = |field: &str| told[field].as_str().unwrap_or_default().to_owned();
                let base = text("base_url");
                let at = base.find("/r/").unwrap_or(base.len());
                let path = format!("{}/chat/completions", &base[at..]);
                (path, text("api_key"))
            }
        };
        Ok(Agent {
            sender,
            path,
            key,
            messages: Vec::new(),
            max_turns: Some(MAX_TURNS),
            said: 0,
            prompt_tokens: 0,
        })
    }

    /// Opens `count` rollouts.
    pub(super) async fn open(&self, count: usize) -> Result<Vec<Agent>, BenchError> {
        let mut agents = Vec::with_capacity(count);
        while agents.len() < count {
            let next = SIDE_BY_SIDE.min(count - agents.len());
            let from = agents.len();
            agents.extend(try_join_all((from..from + next).map(|i| self.agent(i))).await?);
        }
        Ok(agents)
    }

    /// Opens rollouts, lets each have some turns, and leaves them.
    pub(super) async fn converse(
        &self,
        count: usize,
        turns: Range<u32>,
        process: &Process,
    ) -> Result<(), BenchError> {
        let mut left = count;
        while left > 0 {
            let mut agents = self.open(SIDE_BY_SIDE.min(left)).await?;
            left -= agents.len();
            grow(&mut agents, turns.clone(), process).await?;
        }
        Ok(())
    }
}

/// Lets every conversation have these turns; seconds of CPU that the server used for them.
pub(super) async fn grow(
    agents: &mut [Agent],
    turns: Range<u32>,
    process: &Process,
) -> Result<f64, BenchError> {
    let before = process.cpu_s();
    for _ in turns {
        let next = agents.iter_mut().map(|agent| {
            agent.max_turns = None;
            agent.turn(super::TOKENS, false)
        });
        try_join_all(next).await?;
    }
    Ok(process.cpu_s() - before)
}

impl Agent {
    /// Sends a new message and receives the answer.
    pub(super) async fn turn(&mut self, tokens: u32, stream: bool) -> Result<(), BenchError> {
        if self
            .max_turns
            .is_some_and(|max| self.messages.len() >= 2 * max)
        {
            self.messages.clear();
        }
        self.said += 1;
        let said = format!(
            "Step {} of the task: look again, then say what you see.",
            self.said
        );
        self.messages.push(json!({"role": "user", "content": said}));
        let body = self.body(tokens, stream);
        let (told, status) = post(&mut self.sender, &self.path, &self.key, body).await?;
        if status != 200 {
            let text = String::from_utf8_lossy(&told);
            return Err(BenchError::system(format!(
                "{}: {status}: {text}",
                self.path
            )));
        }
        if stream {
            self.messages.clear();
            return Ok(());
        }
        let told: Value = serde_json::from_slice(&told).map_err(BenchError::system)?;
        let content = told["choices"][0]["message"]["content"].clone();
        self.messages
            .push(json!({"role": "assistant", "content": content}));
        self.prompt_tokens = told["usage"]["prompt_tokens"].as_u64().unwrap_or(0) as usize;
        Ok(())
    }

    /// A request with the whole conversation.
    pub(super) fn body(&self, tokens: u32, stream: bool) -> String {
        let body = json!({
            "model": "fake",
            "messages": self.messages,
            "max_tokens": tokens,
            "stream": stream,
        });
        body.to_string()
    }
}

/// A request with a bearer token. Gives body and status.
pub(super) async fn post(
    sender: &mut SendRequest<Full<Bytes>>,
    path: &str,
    key: &str,
    body: impl Into<Bytes>,
) -> Result<(Bytes, u16), BenchError> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header("host", "127.0.0.1")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {key}"))
        .body(Full::new(body.into()))
        .map_err(BenchError::system)?;
    sender.ready().await.map_err(BenchError::system)?;
    let response = sender
        .send_request(request)
        .await
        .map_err(BenchError::system)?;
    let status = response.status().as_u16();
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(BenchError::system)?;
    Ok((body.to_bytes(), status))
}
