//! LiteLLM's proxy: the same requests, forwarded to a server that answers after the same time.

use super::client::Target;
use super::process::Process;
use super::{PASS, TOKENS};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinHandle;

/// Importing it alone takes many seconds.
const START_LIMIT: Duration = Duration::from_secs(120);

const ANSWER: &str = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":" yes the answer is"},"finish_reason":"stop"}],"usage":{"prompt_tokens":40,"completion_tokens":16,"total_tokens":56}}"#;

/// A running proxy.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) version: String,
    process: Process,
    address: SocketAddr,
    upstream: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.upstream.abort();
    }
}

impl Peer {
    /// Starts it with the Python that has it; why that did not work, on `Err`.
    pub(super) async fn start(python: Option<&Path>) -> Result<Self, String> {
        let python = python.ok_or("give --peer-python: a Python with litellm[proxy]")?;
        let version = version(python).await?;
        let failed = |e: std::io::Error| e.to_string();
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
        let upstream = listener.local_addr().map_err(failed)?;
        let folder = tempfile::tempdir().map_err(failed)?;
        let config = folder.path().join("config.yaml");
        let text = format!(
            "model_list:\n  - model_name: fake\n    litellm_params:\n      model: openai/fake\n      \
             api_base: http://{upstream}/v1\n      api_key: sk-none\n"
        );
        std::fs::write(&config, text).map_err(failed)?;
        let port = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
        let address = port.local_addr().map_err(failed)?;
        drop(port);
        let program = python.with_file_name("litellm");
        let mut command = Command::new(&program);
        command
            .arg("--config")
            .arg(&config)
            .args(["--host", "127.0.0.1", "--num_workers", "1", "--port"])
            .arg(address.port().to_string())
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            .env("LITELLM_LOG", "ERROR")
            // It listens on this host alone, and for some seconds.
            .env(
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY",
                "true",
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process =
            Process::other(&mut command).map_err(|e| format!("{}: {e}", program.display()))?;
        let mut peer = Self {
            version,
            process,
            address,
            upstream: tokio::spawn(answer_all(listener)),
            _folder: folder,
        };
        peer.wait().await?;
        Ok(peer)
    }

    pub(super) fn target(&self) -> Target {
        Target::plain(self.address)
    }

    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    /// Until it answers a whole request.
    async fn wait(&mut self) -> Result<(), String> {
        let start = Instant::now();
        while start.elapsed() < START_LIMIT {
            if !self.process.is_running() {
                return Err("it ended while it started".into());
            }
            let target = self.target();
            if let Ok(mut agents) = target.open(1).await
                && agents[0].turn(TOKENS, false).await.is_ok()
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        Err(format!("it did not answer within {START_LIMIT:?}"))
    }
}

async fn version(python: &Path) -> Result<String, String> {
    let code = "import importlib.metadata as m; print(m.version('litellm'))";
    let done = Command::new(python).args(["-c", code]).output().await;
    let done = done.map_err(|e| format!("{}: {e}", python.display()))?;
    if !done.status.success() {
        return Err("this Python has no litellm: pip install 'litellm[proxy]'".into());
    }
    let version = String::from_utf8_lossy(&done.stdout);
    Ok(format!("LiteLLM proxy {}", version.trim()))
}

/// Answers every request alike, after the time that the fake engine takes.
async fn answer_all(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer(stream));
    }
}

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
