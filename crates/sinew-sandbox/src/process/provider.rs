//! Sandboxes of the process level, as the host sees them.

use super::client::unavailable;
use super::sandbox::ProcessSandbox;
use super::snapshot::{SpawnerSnapshot, kept, own};
use super::supervisor::Supervisor;
use crate::places::Places;
use crate::port::{
    Network, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec,
    Snapshot,
};
use sinew_jail::protocol::{Config, Creation, Request};
use sinew_jail::spawner::TCP_MEMORY;
use std::fs::File;
use std::io::Seek;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Archives that are read and written at once, each by a separate process.
const MAX_TRANSFERS: usize = 16;

/// Settings of a provider.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    /// Program that becomes the spawner, instead of [`JAIL`](crate::JAIL).
    pub spawner: Option<PathBuf>,
    /// Maximum number of live sandboxes; a request for more waits.
    pub max_live: usize,
    /// Maximum wait in [`SandboxProvider::acquire`].
    pub acquire_timeout: Duration,
    /// The Python that runs [`Program::Python`](crate::Program::Python); its real path and prefix are shown
    /// inside. A sandbox with an image uses the Python of the image.
    pub python: PathBuf,
    /// Folders of the host to show inside, read-only: where they are, and where they stand
    /// inside (absolute, not below `/work` or `/tmp`).
    pub shows: Vec<(PathBuf, PathBuf)>,
    /// Folder with an unpacked image that is the root of sandboxes, instead of the system
    /// folders of the host. `sinew sandbox unpack` makes one.
    pub image: Option<PathBuf>,
    /// Start Python programs as forks of an interpreter that is ready (the zygote), not by
    /// `execve`. All of them share its hash seed and its layout of addresses.
    pub zygote: bool,
    /// Keep an interpreter waiting in each sandbox for its next Python program: quicker, at the
    /// price of its memory (about 1 MB). None waits where the last program was another one.
    pub warm_python: bool,
    /// Mount the files of each sandbox in the spawner, as kernels before 6.15 need it anyway.
    pub attached_mounts: bool,
}

impl ProcessConfig {
    /// The Python that Debian installs, else the first `python3` of `search_path` (folders separated
    /// by colons).
    pub fn new(search_path: &str) -> Self {
        let system = Path::new("/usr/bin/python3");
        let found = std::iter::once(PathBuf::from("/usr/bin"))
            .chain(search_path.split(':').map(PathBuf::from))
            .map(|dir| dir.join("python3"))
            .find(|p| p.is_file());
        Self {
            spawner: None,
            max_live: 64,
            acquire_timeout: Duration::from_secs(60),
            python: found.unwrap_or_else(|| system.into()),
            shows: Vec::new(),
            image: None,
            zygote: true,
            warm_python: true,
            attached_mounts: false,
        }
    }

    /// Returns the settings for the start of the spawner, with the path of the interpreter inside.
    fn spawner_config(&self) -> Result<Config, SandboxError> {
        let mut config = Config {
            binds: Vec::new(),
            shows: self.shows.clone(),
            image: self.image.clone(),
            python: None,
            zygote: self.zygote,
            attached: self.attached_mounts,
        };
        if let Some(image) = &self.image {
            let image = image
                .canonicalize()
                .map_err(|e| unavailable(format!("image {}: {e}", image.display())))?;
            config.python = ["usr/bin/python3", "usr/local/bin/python3", "bin/python3"]
                .into_iter()
                .find(|p| image.join(p).symlink_metadata().is_ok())
                .map(|p| format!("/{p}"));
            config.image = Some(image);
            return Ok(config);
        }
        let python = self.python.canonicalize().map_err(|e| {
            let path = self.python.display();
            unavailable(format!("no Python at {path}: {e}; install python3"))
        })?;
        let prefix = python
            .parent()
            .and_then(Path::parent)
            .map(Path::to_path_buf);
        if let Some(p) = prefix.filter(|p| !python.starts_with("/usr") && p != Path::new("/")) {
            config.binds.push(p);
        }
        config.python = Some(python.to_string_lossy().into_owned());
        Ok(config)
    }
}

/// Sandboxes of processes in namespaces. Dropping it ends the spawner and with it all sandboxes. A
/// spawner that dies takes its sandboxes and snapshots with it, and is started again.
#[derive(Debug)]
pub struct ProcessProvider {
    spawner: Supervisor,
    live: Places,
    /// Permits for archives that are read or written.
    turns: Semaphore,
    warm_python: bool,
}

impl ProcessProvider {
    /// Starts a spawner and asks it what this host enforces.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with what is missing and what to do.
    pub fn start(config: ProcessConfig) -> Result<Self, SandboxError> {
        let program = match &config.spawner {
            Some(program) => program.clone(),
            None => crate::jail_program().map_err(|e| unavailable(format!("the spawner: {e}")))?,
        };
        let spawner = Supervisor::start(program, config.spawner_config()?)?;
        Ok(Self {
            spawner,
            live: Places::new(config.max_live, config.acquire_timeout),
            turns: Semaphore::new(MAX_TRANSFERS),
            warm_python: config.warm_python,
        })
    }

    async fn make(
        &self,
        spec: &SandboxSpec,
        base: Option<&Snapshot>,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        spec.refuse_writable_root("process")?;
        let relevant = |p: &&Protection| p.name != TCP_MEMORY || spec.network != Network::None;
        spec.refuse_missing(self.protections().iter().filter(relevant))?;
        let permit = self.live.take().await?;
        let client = self.spawner.client().await?;
        let id = client.number();
        let creation = Creation {
            limits: spec.limits.clone(),
            network: spec.network,
            base: base.map(|b| own(b, &client)).transpose()?,
            warm: self.warm_python,
        };
        let sandbox = ProcessSandbox::new(&client, id, spec.clone(), permit, base.cloned());
        client.ask(Request::Create { id, creation }, &[]).await?;
        Ok(Box::new(sandbox))
    }
}

impl SandboxProvider for ProcessProvider {
    fn level(&self) -> &'static str {
        "process"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.make(spec, None))
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.spawner.last().protections)
    }

    fn degradations(&self) -> Vec<String> {
        self.spawner.last().degradations.clone()
    }

    fn health(&self) -> Result<(), SandboxError> {
        self.spawner.health()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.make(spec, Some(snapshot)))
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move {
            let client = self.spawner.client().await?;
            let snapshot = own(snapshot, &client)?;
            let failed = |e| SandboxError::io("export", e);
            let _turn = self.turns.acquire().await;
            let mut file = crate::archive::spool(&[]).map_err(failed)?;
            // Dropped, it ends the export.
            let kept = SpawnerSnapshot::new(&client);
            let request = Request::Export {
                snapshot,
                export: kept.id(),
                max_bytes,
            };
            client.ask(request, &[file.as_raw_fd()]).await?;
            file.rewind().map_err(failed)?;
            Ok(file)
        })
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let client = self.spawner.client().await?;
            let _turn = self.turns.acquire().await;
            let request = |snapshot| Request::Import {
                snapshot,
                max_bytes,
            };
            kept(&client, request, &[archive.as_raw_fd()]).await
        })
    }
}
