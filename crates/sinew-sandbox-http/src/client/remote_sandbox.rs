//! One sandbox on another host.

use crate::client::api::{Api, ExecLine, LEASE, too_long};
use serde_json::json;
use sinew_http::{Method, Response};
use sinew_sandbox::{
    ExecOptions, ExecRequest, ExecResult, OutputChunk, Sandbox, SandboxError, SandboxFuture,
    SandboxStats, Snapshot, Terminal,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Sender;

/// Maximum bytes of a line of a streamed execution.
const MAX_LINE: usize = 64 << 20;

/// Numbers of snapshots within this process.
static NEXT_SNAPSHOT: AtomicU64 = AtomicU64::new(1);

/// A sandbox or a snapshot on the server. Dropping it destroys it there.
#[derive(Debug)]
pub(crate) struct RemoteHandle {
    /// The server.
    api: Api,
    /// `sandboxes/ID` or `snapshots/ID`.
    path: String,
    /// Whether its destruction was requested.
    destroyed: AtomicBool,
}

impl RemoteHandle {
    /// Handle for the object of the server at this path.
    fn new(api: &Api, path: String) -> Self {
        Self {
            api: api.clone(),
            path,
            destroyed: AtomicBool::new(false),
        }
    }

    /// The server.
    pub(crate) fn api(&self) -> &Api {
        &self.api
    }

    /// The id on the server.
    pub(crate) fn id(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Destroys it, once.
    async fn destroy(&self) -> Result<(), SandboxError> {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let request = self.api.request(Method::DELETE, &self.path);
        self.api.send(request).await.map(drop)
    }
}

impl Drop for RemoteHandle {
    fn drop(&mut self) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        // If there is no runtime, or the request is lost, the end of the lease destroys it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let request = self.api.request(Method::DELETE, &self.path);
            runtime.spawn(async move { drop(request.send().await) });
        }
    }
}

/// Receiver of output as it comes. A closed channel is ignored.
enum Output {
    /// Chunks of a program with pipes.
    Pieces(Sender<OutputChunk>),
    /// Output of a program with a terminal.
    Terminal(Sender<Vec<u8>>),
}

impl Output {
    /// Waits while the channel is full.
    async fn send(&self, chunk: OutputChunk) {
        match self {
            Self::Pieces(output) => drop(output.send(chunk).await),
            Self::Terminal(output) => drop(output.send(chunk.bytes).await),
        }
    }
}

/// A sandbox on the server.
#[derive(Debug)]
pub(crate) struct RemoteSandbox {
    /// The server.
    api: Api,
    /// Name of its level.
    level: &'static str,
    /// It on the server.
    held: RemoteHandle,
    /// Place among the sandboxes of this process.
    _place: OwnedSemaphorePermit,
    /// Renews the lease.
    renewal: tokio::task::JoinHandle<()>,
    /// The server or the sandbox is gone.
    dead: bool,
}

impl RemoteSandbox {
    /// The sandbox `id` of the server. Its lease is renewed from now on.
    pub(crate) fn new(
        api: &Api,
        level: &'static str,
        id: &str,
        place: OwnedSemaphorePermit,
    ) -> Self {
        let path = format!("sandboxes/{id}");
        Self {
            api: api.clone(),
            level,
            renewal: tokio::spawn(renew(api.clone(), path.clone())),
            held: RemoteHandle::new(api, path),
            _place: place,
            dead: false,
        }
    }

    /// A path below that of the sandbox.
    fn path(&self, below: &str) -> String {
        format!("{}/{below}", self.held.path)
    }

    /// Records whether the sandbox no longer exists.
    fn seen<T>(&mut self, answer: Result<T, SandboxError>) -> Result<T, SandboxError> {
        let gone =
            |e: &SandboxError| matches!(e, SandboxError::Died(_) | SandboxError::HostLost { .. });
        self.dead |= answer.as_ref().is_err_and(gone);
        answer
    }

    /// Runs a program. A caller that stops waiting closes the connection, which kills the program.
    async fn run(
        &self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> Result<ExecResult, SandboxError> {
        options.refuse_user_and_workdir()?;
        let stream = options.output.is_some();
        let asked = self
            .api
            .exec(self.held.id(), &request, options.env, stream, None);
        match options.output {
            None => self.api.ran(self.api.value(asked).await?),
            Some(output) => {
                let answer = self.api.send(asked).await?;
                self.streamed(answer, Output::Pieces(output)).await
            }
        }
    }

    /// Runs a program on a terminal. Whoever stops waiting, or closes the input, closes the connection, which
    /// kills the program.
    async fn run_on_terminal(
        &self,
        request: ExecRequest,
        terminal: Terminal,
    ) -> Result<ExecResult, SandboxError> {
        let Terminal {
            size,
            env,
            mut input,
            output,
        } = terminal;
        let id = self.held.id();
        let asked = self.api.exec(id, &request, env, true, Some(size));
        let answer = self.api.send(asked).await?;
        let show = Output::Terminal(output.clone());
        let typed = async {
            while let Some(event) = input.recv().await {
                if self.api.send(self.api.typed(id, event)).await.is_err() {
                    // A program that has ended takes nothing more; its end is on its way.
                    std::future::pending::<()>().await;
                }
            }
        };
        let hung_up = || Err(self.api.lost("the terminal hung up"));
        tokio::select! {
            result = self.streamed(answer, show) => result,
            () = typed => hung_up(),
            () = output.closed() => hung_up(),
        }
    }

    /// Forwards output as it arrives.
    async fn streamed(
        &self,
        mut answer: Response,
        output: Output,
    ) -> Result<ExecResult, SandboxError> {
        let mut rest = Vec::new();
        loop {
            let chunk = self.api.unless_lost(answer.chunk()).await?;
            let Some(chunk) = chunk.map_err(|e| self.api.broken(e.into()))? else {
                return Err(self.api.lost("the execution has no end"));
            };
            rest.extend_from_slice(&chunk);
            while let Some(end) = rest.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                match self.api.line(&line)? {
                    ExecLine::Output(chunk) => output.send(chunk).await,
                    ExecLine::Ended(result) => return result,
                }
            }
            if rest.len() > MAX_LINE {
                return Err(too_long(MAX_LINE as u64));
            }
        }
    }
}

/// Uses a sandbox often enough that its lease does not end, also where one request is lost. It ends with the
/// sandbox.
async fn renew(api: Api, path: String) {
    loop {
        tokio::time::sleep(LEASE / 3).await;
        drop(api.send(api.request(Method::GET, &path)).await);
    }
}

impl Drop for RemoteSandbox {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

impl Sandbox for RemoteSandbox {
    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(async move {
            let result = self.run(request, options).await;
            self.seen(result)
        })
    }

    fn exec_on_terminal(
        &mut self,
        request: ExecRequest,
        terminal: Terminal,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(async move {
            let result = self.run_on_terminal(request, terminal).await;
            self.seen(result)
        })
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(async move {
            let path = self.path(&format!("files/{}", escaped(path)));
            let request = self.api.request(Method::PUT, &path);
            let written = self.api.send(request.body(content.to_vec())).await;
            self.seen(written.map(drop))
        })
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let path = self.path(&format!("files/{}", escaped(path)));
            let answer = self.api.send(self.api.request(Method::GET, &path)).await;
            let answer = self.seen(answer)?;
            let read = self.api.body(answer, max_bytes).await;
            self.seen(read)
        })
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let request = self.api.request(Method::POST, &self.path("snapshot"));
            let answer = self.api.value(request).await;
            let answer = self.seen(answer)?;
            let id = self.api.text(&answer, "snapshot")?;
            Ok(snapshot_of(&self.api, self.level, &id))
        })
    }

    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        Box::pin(async move {
            let request = self.api.request(Method::POST, &self.path("reset"));
            let answer = self.api.send(request).await;
            self.seen(answer.map(drop))
        })
    }

    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        Box::pin(async move {
            let request = self.api.request(Method::GET, &self.path("stats"));
            let answer = self.api.value(request).await;
            serde_json::from_value(self.seen(answer)?)
                .map_err(|e| self.api.lost(&format!("its numbers: {e}")))
        })
    }

    fn is_dead(&self) -> bool {
        self.dead
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async move { self.held.destroy().await })
    }
}

/// A snapshot on the server; its last clone destroys it. The server counts its bytes.
pub(crate) fn snapshot_of(api: &Api, level: &'static str, id: &str) -> Snapshot {
    Snapshot {
        level,
        id: NEXT_SNAPSHOT.fetch_add(1, Ordering::Relaxed),
        handle: Arc::new(RemoteHandle::new(api, format!("snapshots/{id}"))),
        stores: Arc::new([]),
    }
}

/// A snapshot on its server.
pub(crate) fn held(snapshot: &Snapshot) -> Result<&RemoteHandle, SandboxError> {
    let held = snapshot.handle.downcast_ref::<RemoteHandle>();
    held.ok_or_else(|| SandboxError::Request {
        field: "snapshot",
        value: json!(snapshot.id).to_string(),
        allowed: "a snapshot of the same sandbox server".into(),
    })
}

/// A path with its special characters escaped; slashes stay.
fn escaped(path: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    path.bytes().fold(String::new(), |mut out, byte| {
        if plain(byte) {
            out.push(char::from(byte))
        } else {
            out.push_str(&format!("%{byte:02X}"))
        }
        out
    })
}
