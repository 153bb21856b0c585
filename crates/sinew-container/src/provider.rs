//! The provider: one container for each sandbox.

use crate::config::ContainerConfig;
use crate::containers::Containers;
use crate::sandbox::ContainerSandbox;
use crate::snapshot::{keep, own};
use crate::spec::unavailable;
use crate::state::io;
use sinew_sandbox::guest::Entry;
use sinew_sandbox::{
    Places, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec,
    Snapshot,
};
use std::fs::File;
use std::sync::Arc;

/// Provider of sandboxes, each of them a container. It holds the limit of live ones.
#[derive(Debug)]
pub struct ContainerProvider {
    /// Containers, shared with the sandboxes.
    inner: Arc<Containers>,
    /// One permit for each sandbox that may still be made.
    live: Places,
}

type SandboxResult<T> = Result<T, SandboxError>;

impl ContainerProvider {
    /// Removes leftovers of dead runs, finds an engine and starts a probe container to see which protections
    /// are in force. Blocks until it is done; it can be called inside of a runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with what is missing and what to do.
    pub fn start(config: ContainerConfig) -> SandboxResult<Self> {
        // Callers may be inside a runtime already.
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|e| io("start a runtime", e))?
                .block_on(Containers::new(config))
        });
        let inner = thread
            .join()
            .map_err(|_| unavailable("its start panicked".into()))??;
        Ok(Self {
            live: Places::new(inner.config.max_live, inner.config.acquire_timeout),
            inner: Arc::new(inner),
        })
    }

    /// Name of the engine that starts containers.
    pub fn engine(&self) -> &'static str {
        self.inner.engine.kind()
    }

    /// Starts a container with the files of `base`.
    ///
    /// # Errors
    /// [`SandboxError::NotEnforced`] if `spec` is strict and a protection is missing.
    async fn make(
        &self,
        spec: &SandboxSpec,
        base: Arc<Vec<Entry>>,
    ) -> SandboxResult<Box<dyn Sandbox>> {
        check_root(spec)?;
        let protections = self.inner.protections_of(spec).await?;
        spec.refuse_missing(protections.iter())?;
        let permit = self.live.take().await?;
        let mut started = self.inner.start(spec).await?;
        if !base.is_empty()
            && let Err(e) = started.guest.restore(&base).await
        {
            self.inner.end(started).await?;
            return Err(e);
        }
        let inner = Arc::clone(&self.inner);
        let spec = spec.clone();
        let sandbox = ContainerSandbox::new(inner, spec, started, base, protections, permit);
        Ok(Box::new(sandbox))
    }
}

/// Smallest layer of a writable root.
const MIN_ROOT: u64 = 1 << 20;

/// Refuses writable roots that make no sense.
fn check_root(spec: &SandboxSpec) -> SandboxResult<()> {
    let Some(root) = &spec.writable_root else {
        return Ok(());
    };
    let bad = |field, value: String, allowed: &str| {
        Err(SandboxError::Request {
            field,
            value,
            allowed: allowed.into(),
        })
    };
    if root.bytes < MIN_ROOT {
        let allowed = "at least 1048576";
        return bad("writable_root.bytes", root.bytes.to_string(), allowed);
    }
    if root.user.is_empty() || root.user.len() > 256 {
        let allowed = "a user of the image, at most 256 characters, such as root or 1000:1000";
        return bad("writable_root.user", format!("{:?}", root.user), allowed);
    }
    if !root.workdir.starts_with('/') || root.workdir.contains('\0') {
        let allowed = "an absolute path";
        return bad(
            "writable_root.workdir",
            format!("{:?}", root.workdir),
            allowed,
        );
    }
    Ok(())
}

impl SandboxProvider for ContainerProvider {
    fn level(&self) -> &'static str {
        "container"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.make(spec, Arc::default()))
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.inner.protections)
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            if spec.writable_root.is_some() {
                return Err(SandboxError::Unsupported {
                    operation: "start from a snapshot with a writable root",
                });
            }
            self.make(spec, own(snapshot)?).await
        })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move { sinew_sandbox::guest::export(own(snapshot)?, max_bytes).await })
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            sinew_sandbox::guest::import(archive, max_bytes)
                .await
                .map(keep)
        })
    }
}
