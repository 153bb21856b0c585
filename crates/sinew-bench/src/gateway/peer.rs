//! Proxies of other projects: the same requests, forwarded to a server that answers after the
//! same time.
//!
//! A peer is a gateway of the field in front of a server of ours that answers at once. It runs in the Python
//! that the command line names; one that is not installed is a row with that reason.

use super::client::Target;
use super::process::Process;
use super::{PASS, ROLLOUTS, TOKENS};
use crate::peers::PeerError;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinHandle;

/// Their imports take many seconds.
const START_LIMIT: Duration = Duration::from_secs(120);

/// Answer of the upstream to every call.
const ANSWER: &str = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":" yes the answer is"},"finish_reason":"stop"}],"usage":{"prompt_tokens":40,"completion_tokens":16,"total_tokens":56}}"#;

/// A running proxy.
#[derive(Debug)]
pub(super) struct Peer {
    /// Name and version, for the row.
    pub(super) version: String,
    /// The peer itself.
    process: Process,
    /// Server that gets the requests.
    target: Target,
    /// Ends with the peer.
    upstream: JoinHandle<()>,
    _folder: Option<tempfile::TempDir>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.upstream.abort();
    }
}

/// A server that answers at once, and an address for the proxy before it.
///
/// The address is that of a listener that is bound once, to find a free port, and returned for the peer to
/// take.
async fn between() -> std::io::Result<(JoinHandle<()>, SocketAddr, SocketAddr)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = listener.local_addr()?;
    let port = TcpListener::bind("127.0.0.1:0").await?;
    let address = port.local_addr()?;
    Ok((tokio::spawn(answer_all(listener)), upstream, address))
}

impl Peer {
    /// LiteLLM's proxy, with the Python that has it.
    pub(super) async fn litellm(python: Option<&Path>) -> Result<Self, PeerError> {
        let python = python.ok_or("give --peer-python: a Python with benches/peers/litellm.txt")?;
        let version = version(python).await?;
        let (task, upstream, address) = between().await?;
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("config.yaml");
        let text = format!(
            "model_list:\n  - model_name: fake\n    litellm_params:\n      model: openai/fake\n      \
             api_base: http://{upstream}/v1\n      api_key: sk-none\n"
        );
        std::fs::write(&config, text)?;
        let program = python.with_file_name("litellm");
        let mut command = Command::new(&program);
        command
            .arg("--config")
            .arg(&config)
            .args(["--host", "127.0.0.1", "--num_workers", "1", "--port"])
            .arg(address.port().to_string())
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            .env("LITELLM_LOG", "ERROR")
            // It listens on only this host, and for some seconds.
            .env(
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY",
                "true",
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = Process::other(&mut command).map_err(PeerError::start(&program))?;
        let peer = Self {
            version,
            process,
            target: Target::plain(address),
            upstream: task,
            _folder: Some(folder),
        };
        peer.answering().await
    }

    /// Agent Lightning's proxy, whose store counts and keeps what its rollouts do.
    pub(super) async fn lightning(python: Option<&Path>, peers: &Path) -> Result<Self, PeerError> {
        let python = python
            .ok_or("give --lightning-python: a Python with benches/peers/agent_lightning.txt")?;
        let (task, upstream, address) = between().await?;
        let most = ROLLOUTS.iter().max().copied().unwrap_or(1);
        let mut command = Command::new(python);
        command
            .arg(peers.join("agent_lightning.py"))
            .arg(format!("http://{upstream}/v1"))
            .args([address.port().to_string(), most.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = Process::other(&mut command).map_err(PeerError::start(python))?;
        let out = process.stdout().ok_or("it has no output")?;
        let mut lines = BufReader::new(out).lines();
        let told = tokio::time::timeout(START_LIMIT, lines.next_line()).await;
        let told = told.map_err(|_| late("listen"))?;
        let line =
            told?.ok_or("it ended while it started: does this Python have agentlightning?")?;
        let told = serde_json::from_str(&line);
        let told: Value = told.map_err(|e| PeerError::Failed(format!("{e}: {line}")))?;
        let paths = told["paths"].as_array().into_iter().flatten();
        let paths = paths.filter_map(|p| p.as_str().map(str::to_owned));
        let version = told["version"].as_str().unwrap_or_default();
        let peer = Self {
            version: format!("Agent Lightning proxy {version}"),
            process,
            target: Target::paths(address, Arc::new(paths.collect())),
            upstream: task,
            _folder: None,
        };
        peer.answering().await
    }

    /// Server that gets the requests.
    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// Process of the peer, for memory and CPU time.
    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    /// Once it answers a whole request.
    ///
    /// Asks four times a second, for at most `START_LIMIT`; a peer that ended meanwhile is not waited for.
    async fn answering(mut self) -> Result<Self, PeerError> {
        let start = Instant::now();
        while start.elapsed() < START_LIMIT {
            if !self.process.is_running() {
                return Err("it ended while it started".into());
            }
            if let Ok(mut agents) = self.target.open(1).await
                && agents[0].turn(TOKENS, false).await.is_ok()
            {
                return Ok(self);
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        Err(late("answer"))
    }
}

fn late(what: &str) -> PeerError {
    PeerError::Failed(format!("it did not {what} within {START_LIMIT:?}"))
}

/// Asks a Python for the version of the peer.
async fn version(python: &Path) -> Result<String, PeerError> {
    let code = "import importlib.metadata as m; print(m.version('litellm'))";
    let done = Command::new(python).args(["-c", code]).output().await;
    let done = done.map_err(PeerError::start(python))?;
    if !done.status.success() {
        return Err("this Python has no litellm: pip install -r benches/peers/litellm.txt".into());
    }
    let version = String::from_utf8_lossy(&done.stdout);
    Ok(format!("LiteLLM proxy {}", version.trim()))
}

/// Sends the same answer to every request, after the time that the fake engine takes.
async fn answer_all(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer(stream));
    }
}

/// Answers every request on a connection.
async fn answer(stream: TcpStream) {
    let service = service_fn(|request: Request<Incoming>| async move {
        // A request that breaks off is not answered anyway.
        let _ = request.into_body().collect().await;
        tokio::time::sleep(PASS * TOKENS).await;
        let mut response = Response::new(Full::new(Bytes::from_static(ANSWER.as_bytes())));
        let json = hyper::header::HeaderValue::from_static("application/json");
        response.headers_mut().insert("content-type", json);
        Ok::<_, Infallible>(response)
    });
    // The peer closes its connections when it likes.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}
