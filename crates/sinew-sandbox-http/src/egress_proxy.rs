//! The egress proxy of a run, and a session of it for each sandbox.
//!
//! ```text
//! program in a sandbox -> 127.0.0.1:3128 inside -> session -> rules, quotas, log -> server
//! ```
//!
//! A program finds the proxy by `HTTP_PROXY` and its like, and trusts its certificates by a bundle in a
//! folder that the sandbox shows. A program that ignores both reaches nothing.
//!
//! [`WithEgress`] gives the sandboxes of a run their sessions; the HTTP service asks [`EgressProxy`] for
//! them by the port [`Egress`]. Either way the order is: the sandbox is made with a loopback interface,
//! the listener is made inside of it, and the session serves that listener until the sandbox is
//! destroyed.
//!
//! Invariants:
//! - A sandbox whose session cannot be opened is not handed out.
//! - Quotas and the audit log are those of one sandbox.
//! - Credentials stay in the proxy: a sandbox never sees their values.

use crate::error::EgressError;
use crate::registry::Egress;
use sinew_egress::{
    EgressConfig, Mode, Policy, Proxy, ProxyOptions, SessionListener, SystemResolver, begin_empty,
    environment,
};
use sinew_sandbox::{
    Entry, ExecOptions, ExecRequest, ExecResult, Network, Protection, Sandbox, SandboxError,
    SandboxFuture, SandboxProvider, SandboxSpec, SandboxStats, Snapshot, Terminal, UploadOptions,
    next_of_owner,
};
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Port of the proxy on a sandbox's loopback address.
const PORT: u16 = 3128;
/// Folder in sandboxes that holds the certificates to trust.
const FOLDER_INSIDE: &str = "/opt/sinew-egress";
/// The host's own certificates, where tunnels pass without being looked into.
const HOST_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Reason why a proxy cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EgressStartError {
    /// The rules need something that is not there, such as the variable of a credential.
    #[error("{0}")]
    Rules(String),
    /// The host refuses a folder, a file or the proxy's keys.
    #[error("the egress proxy cannot start: {0}")]
    Host(String),
}

fn host(e: impl std::fmt::Display) -> EgressStartError {
    EgressStartError::Host(e.to_string())
}

/// A proxy with its rules, shared by the sandboxes of a run. The last sandbox ends it.
#[derive(Debug)]
pub struct EgressProxy {
    /// Sockets, and the authority whose certificates sandboxes trust.
    proxy: Proxy,
    /// Rules with the values of their credentials.
    policy: Policy,
    /// Rules as read, with the quotas of one session.
    config: EgressConfig,
    /// Folder of audit logs.
    audit: Option<PathBuf>,
    /// Folder on the host with `bundle.pem`.
    trust: tempfile::TempDir,
}

impl EgressProxy {
    /// Starts the proxy. `audit` is the folder of the logs, made when the first session opens; `None`:
    /// no logs. The certificates to trust are written into a temporary folder that ends with the proxy.
    /// Credentials come from this process's environment; sandboxes never see them.
    ///
    /// # Errors
    /// If a variable of a credential is not set, or the folder of certificates cannot be written.
    pub fn start(config: EgressConfig, audit: Option<PathBuf>) -> Result<Self, EgressStartError> {
        let policy = config
            .policy(&|name| std::env::var(name).ok())
            .map_err(|e| EgressStartError::Rules(e.to_string()))?;
        let proxy = Proxy::new(ProxyOptions {
            resolver: Arc::new(SystemResolver),
            extra_roots_pem: String::new(),
        })
        .map_err(host)?;
        let trust = tempfile::Builder::new()
            .prefix("sinew-egress-")
            .tempdir()
            .map_err(host)?;
        let mut bundle = std::fs::read_to_string(HOST_BUNDLE).unwrap_or_default();
        bundle.push('\n');
        bundle.push_str(proxy.authority_pem());
        let path = trust.path().join("bundle.pem");
        std::fs::write(&path, bundle).map_err(host)?;
        // Sandboxes have separate users, who must be able to read it.
        for (path, mode) in [(trust.path(), 0o755), (path.as_path(), 0o644)] {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, mode).map_err(host)?;
        }
        Ok(Self {
            proxy,
            policy,
            config,
            audit,
            trust,
        })
    }

    /// The folder that sandboxes must be shown, on the host and inside: certificates to trust.
    pub fn shows(&self) -> (PathBuf, PathBuf) {
        (self.trust.path().into(), FOLDER_INSIDE.into())
    }

    /// Environment variables by which programs find the proxy and the certificates.
    fn variables() -> Vec<(String, String)> {
        environment(PORT, Some(&format!("{FOLDER_INSIDE}/bundle.pem")))
    }

    /// A session of the proxy for one sandbox of an episode: its own log, quotas and connections.
    fn open(
        &self,
        episode: &str,
        log: &str,
        listener: TcpListener,
    ) -> Result<SessionListener, EgressError> {
        let log = self.audit.as_ref().map(|dir| unused(dir, log));
        let log = log.transpose()?;
        let session = self
            .proxy
            .session(episode, self.policy.clone(), &self.config, log.as_deref())
            .map_err(|e| EgressError::Proxy(e.into()))?;
        let served = session.serve(listener);
        served.map_err(|e| EgressError::Proxy(e.into()))
    }

    /// In replay, an episode without recordings gets no answer, and each request is logged.
    fn begins_empty(&self, episode: &str) -> Result<(), EgressError> {
        match (self.config.mode, &self.config.folder) {
            (Mode::Replay, Some(folder)) => {
                begin_empty(folder, episode).map_err(|error| EgressError::Recordings {
                    episode: episode.to_owned(),
                    error,
                })
            }
            _ => Ok(()),
        }
    }
}

/// Maximum number of logs of one name.
const MAX_LOGS: usize = 10_000;

/// A log that is not there yet: `NAME.jsonl`, else `NAME.2.jsonl`, ... Names come from clients, which must
/// not be able to overwrite what was logged under them.
fn unused(folder: &Path, name: &str) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(folder)?;
    for number in 1..=MAX_LOGS {
        let path = folder.join(match number {
            1 => format!("{name}.jsonl"),
            n => format!("{name}.{n}.jsonl"),
        });
        match File::create_new(&path) {
            Ok(_) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
    }
    let why = format!("there are {MAX_LOGS} of {name} already");
    Err(std::io::Error::other(why))
}

impl Egress for EgressProxy {
    fn port(&self) -> u16 {
        PORT
    }

    fn environment(&self) -> Vec<(String, String)> {
        Self::variables()
    }

    fn serve(
        &self,
        owner: &str,
        name: &str,
        listener: TcpListener,
    ) -> Result<Box<dyn Send + Sync>, EgressError> {
        // The name becomes the name of a file.
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if name.is_empty() || name.len() > 128 || name.starts_with('.') || !name.bytes().all(plain)
        {
            return Err(EgressError::Name(name.to_owned()));
        }
        // No owner's name has a dot.
        let name = format!("{owner}.{name}");
        Ok(Box::new(self.open(&name, &name, listener)?))
    }
}

/// Adds a session of the proxy to every sandbox of a provider. Sandboxes have a loopback interface only; the
/// proxy listens there. Recordings have the name of the sandbox's owner ([`owned`](sinew_sandbox::owned)), so
/// that the episode can be replayed; logs are numbered.
#[expect(missing_debug_implementations, reason = "a provider has none")]
pub struct WithEgress {
    inner: Arc<dyn SandboxProvider>,
    proxy: EgressProxy,
    /// Number of the next session, which names its log.
    next: AtomicU64,
}

impl WithEgress {
    /// Wraps a provider. The proxy ends with the last sandbox.
    pub fn wrap(inner: Arc<dyn SandboxProvider>, proxy: EgressProxy) -> Arc<dyn SandboxProvider> {
        Arc::new(Self {
            inner,
            proxy,
            next: AtomicU64::new(0),
        })
    }

    /// The specification with a loopback interface and the proxy's variables.
    fn with_network(spec: &SandboxSpec) -> SandboxSpec {
        let mut spec = spec.clone();
        spec.network = Network::Loopback;
        spec.env.extend(EgressProxy::variables());
        spec
    }

    /// A sandbox with its session. If the session fails, the sandbox is dropped, which destroys it.
    async fn open(&self, mut inner: Box<dyn Sandbox>) -> Result<Box<dyn Sandbox>, SandboxError> {
        let listener = inner.listen_inside(PORT).await?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let log = format!("sandbox-{number:06}");
        let episode = next_of_owner().unwrap_or_else(|| log.clone());
        let served = self
            .proxy
            .begins_empty(&episode)
            .and_then(|()| self.proxy.open(&episode, &log, listener));
        let served = served.map_err(|e| SandboxError::io("open the egress proxy", e))?;
        Ok(Box::new(Guarded { inner, served }))
    }
}

impl SandboxProvider for WithEgress {
    fn level(&self) -> &'static str {
        self.inner.level()
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let spec = Self::with_network(spec);
            let inner = self.inner.acquire(&spec).await?;
            self.open(inner).await
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        self.inner.protections()
    }

    fn degradations(&self) -> Vec<String> {
        self.inner.degradations()
    }

    fn health(&self) -> Result<(), SandboxError> {
        self.inner.health()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let spec = Self::with_network(spec);
            let inner = self.inner.fork(&spec, snapshot).await?;
            self.open(inner).await
        })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        self.inner.export_file(snapshot, max_bytes)
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        self.inner.import_file(archive, max_bytes)
    }
}

/// A sandbox whose session of the proxy ends with it.
struct Guarded {
    inner: Box<dyn Sandbox>,
    served: SessionListener,
}

impl Sandbox for Guarded {
    fn exec(&mut self, request: ExecRequest) -> SandboxFuture<'_, ExecResult> {
        self.inner.exec(request)
    }

    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        self.inner.exec_with(request, options)
    }

    fn exec_on_terminal(
        &mut self,
        request: ExecRequest,
        terminal: Terminal,
    ) -> SandboxFuture<'_, ExecResult> {
        self.inner.exec_on_terminal(request, terminal)
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        self.inner.write_file(path, content)
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        self.inner.read_file(path, max_bytes)
    }

    fn upload<'a>(
        &'a mut self,
        to: &'a str,
        entries: &'a [Entry],
        options: &'a UploadOptions,
    ) -> SandboxFuture<'a, ()> {
        self.inner.upload(to, entries, options)
    }

    fn download<'a>(
        &'a mut self,
        path: &'a str,
        max_bytes: u64,
    ) -> SandboxFuture<'a, Option<Vec<Entry>>> {
        self.inner.download(path, max_bytes)
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        self.inner.snapshot()
    }

    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        self.inner.reset()
    }

    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        self.inner.stats()
    }

    fn is_dead(&self) -> bool {
        self.inner.is_dead()
    }

    fn listen_inside(&mut self, port: u16) -> SandboxFuture<'_, TcpListener> {
        self.inner.listen_inside(port)
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        let Self { inner, served } = *self;
        drop(served);
        inner.destroy()
    }
}
