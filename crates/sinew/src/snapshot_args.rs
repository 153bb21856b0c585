//! `--from` and `--save`: the files that a sandbox of the command line starts with, and those that it leaves.
//!
//! A folder of the host that sandboxes write to would have no quota, and would change under those that read
//! it. A snapshot is the content of the work folder at the end, within its limits, and replaces the last one
//! whole.

use clap::Args;
use sinew_assembly::Failure;
use sinew_sandbox::{Sandbox, SandboxError, SandboxProvider, SandboxSpec};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Largest snapshot that is read: what the largest work folder takes.
const MAX_SNAPSHOT_BYTES: u64 = 1 << 30;
/// Attempts to freeze a work folder whose program was just killed, and the time between two.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(100);

/// Snapshots that a sandbox starts from and leaves.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SnapshotArgs {
    /// Start with the files of this snapshot, of any level: an OCI layout (folder or tar file)
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
    /// Keep the files afterwards as a snapshot, named by its SHA-256: a tar file, which is replaced, if
    /// PATH ends in .tar, else a new folder
    #[arg(long, value_name = "PATH")]
    save: Option<PathBuf>,
}

impl SnapshotArgs {
    /// Refuses a path of `--save` that cannot be written, before anything runs.
    ///
    /// # Errors
    /// If its folder is missing, or it is a folder that exists.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let Some(path) = &self.save else {
            return Ok(());
        };
        let wrong = |why: &str| Err(Failure::input(format!("--save {}: {why}", path.display())));
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        if !folder.unwrap_or(Path::new(".")).is_dir() {
            return wrong("its folder is missing");
        }
        match path.extension().is_some_and(|e| e == "tar") {
            true if path.is_dir() => wrong("it is a folder; allowed: a tar file"),
            false if path.exists() => {
                wrong("it exists; allowed: a new folder, or a name that ends in .tar")
            }
            _ => Ok(()),
        }
    }

    /// A fresh sandbox, or one with the files of the snapshot, of whatever level that was taken at.
    ///
    /// # Errors
    /// If the snapshot cannot be read or is larger than a work folder, or no sandbox starts.
    pub(crate) async fn begin(
        &self,
        provider: &dyn SandboxProvider,
        spec: &SandboxSpec,
    ) -> Result<Box<dyn Sandbox>, Failure> {
        let Some(path) = &self.from else {
            return provider.acquire(spec).await.map_err(Failure::system);
        };
        let archive = sinew_image::read_snapshot(path, MAX_SNAPSHOT_BYTES);
        let archive = archive.map_err(Failure::input)?;
        let made = async {
            let snapshot = provider
                .import(&archive.tar, spec.limits.work_bytes)
                .await?;
            provider.fork(spec, &snapshot).await
        };
        made.await.map_err(Failure::system)
    }

    /// Writes the files of a sandbox in which nothing runs, or what runs is being killed, as a snapshot; its
    /// digest. `None` without `--save`.
    ///
    /// # Errors
    /// If the sandbox died, or the snapshot cannot be written.
    pub(crate) async fn leave(
        &self,
        provider: &dyn SandboxProvider,
        sandbox: &mut dyn Sandbox,
    ) -> Result<Option<String>, Failure> {
        let Some(path) = &self.save else {
            return Ok(None);
        };
        let mut attempts = 1;
        let snapshot = loop {
            match sandbox.snapshot().await {
                Ok(snapshot) => break snapshot,
                Err(e) if attempts == ATTEMPTS || is_final(&e) || sandbox.is_dead() => {
                    return Err(Failure::system(e));
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
            attempts += 1;
        };
        let archive = provider.export(&snapshot).await.map_err(Failure::system)?;
        let written = sinew_image::write_snapshot(&archive, path);
        written.map(Some).map_err(Failure::system)
    }
}

/// Whether an error stays however long the caller waits.
fn is_final(error: &SandboxError) -> bool {
    matches!(
        error,
        SandboxError::Unsupported { .. } | SandboxError::Died(_) | SandboxError::Request { .. }
    )
}
