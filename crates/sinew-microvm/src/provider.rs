//! Host side of sandboxes that are virtual machines.

use crate::image::Image;
use crate::launcher::Launcher;
use crate::monitor::{Base, Change, Host, Shared, restore};
use crate::probe;
use crate::qemu::{Accel, Qemu};
use crate::sandbox::MicrovmSandbox;
use crate::template::Templates;
use sinew_jail::cgroup::{Hierarchy, is_orphan, run_tag};
use sinew_sandbox::guest::Setup;
use sinew_sandbox::{
    Network, Places, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider,
    SandboxSpec, Snapshot,
};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Memory of a guest in addition to that of programs: for its kernel, its files and the agent.
const GUEST_OVERHEAD: u64 = 128 << 20;
/// Sizes of guests are multiples of this, so that few templates serve all.
const SIZE_STEP: u64 = 128 << 20;
/// Maximum memory of a guest. A larger machine has a hole in its memory below 4 GiB, so that offsets in its
/// file are not addresses.
const MAX_GUEST: u64 = 3 << 30;
/// User of programs inside.
const USER: u32 = 1000;
/// Maximum files and folders, as at the levels `container` and `wasm`.
///
/// Landlock checks every folder above an opened one, so that access below folders with thousands of others
/// takes long.
const INODES: u64 = 4096;

/// Settings of a provider.
#[derive(Clone, Debug)]
pub struct MicrovmConfig {
    /// Folder of images and templates, which `scripts/microvm_image.py` fills.
    pub folder: PathBuf,
    /// QEMU for the host's architecture.
    pub qemu: PathBuf,
    /// Folder for short-lived files of a run.
    pub temporary: PathBuf,
    /// Executor of guests. `None`: KVM if a machine boots with it, else emulation.
    pub accel: Option<Accel>,
    /// Maximum live sandboxes. Further requests wait.
    pub max_live: usize,
    /// Maximum wait in [`SandboxProvider::acquire`].
    pub acquire_timeout: Duration,
}

impl MicrovmConfig {
    /// Images below `folder`, Debian's QEMU, 16 sandboxes.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            temporary: "/tmp".into(),
            accel: None,
            max_live: 16,
            acquire_timeout: Duration::from_secs(60),
        }
    }
}

/// State of a provider, shared with its sandboxes.
#[derive(Debug)]
pub(crate) struct Inner {
    /// QEMU, with what this host allows.
    pub(crate) qemu: Qemu,
    /// Protections, reported with every result.
    pub(crate) protections: Arc<Vec<Protection>>,
    /// Reason why machines are emulated, if they are and that was not asked for.
    no_kvm: Option<String>,
    /// Bases from which machines start.
    templates: Templates,
    /// One permit for each sandbox that may still be made.
    live: Places,
    /// Number of the next snapshot.
    snapshots: AtomicU64,
}

/// Virtual machines restored from templates. Dropping it and its sandboxes ends them all.
#[derive(Debug)]
pub struct MicrovmProvider {
    /// State shared with the sandboxes.
    inner: Arc<Inner>,
}

/// A machine at one moment: its changes since its base, and its own base while forks of it live.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Base from which the machine started.
    base: Shared,
    /// Changes of memory and devices since then.
    change: Change,
    /// Limits with which the machine was set up. A fork with others sets it up again.
    spec: SandboxSpec,
    /// Base with the changes. It exists while a fork uses it.
    made: Mutex<Weak<Base>>,
    /// Held while memory is copied, so that concurrent forks copy it once.
    making: tokio::sync::Mutex<()>,
}

impl Saved {
    /// The base with the changes, if a fork uses it.
    fn made(&self) -> Option<Shared> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.upgrade()
    }

    /// The base with the changes. Copies all memory of the machine if no fork uses it.
    async fn base(self: &Arc<Self>) -> Result<Shared, SandboxError> {
        let _one = self.making.lock().await;
        if let Some(made) = self.made() {
            return Ok(made);
        }
        let saved = Arc::clone(self);
        let copied = apart("copy memory", move || saved.base.with(&saved.change)).await;
        let base = Arc::new(copied?);
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&base);
        Ok(base)
    }
}

/// Runs work that waits for memory or a disk on another thread.
pub(crate) async fn apart<T: Send + 'static>(
    operation: &str,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, SandboxError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|e| io(operation, e))?;
    done.map_err(|e| io(operation, e))
}

/// Error of a file, a process or a request to a monitor.
pub(crate) fn io(operation: &str, e: impl std::fmt::Display) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

/// Error for a level that cannot be used on this host. `reason` names the missing part and the remedy.
pub(crate) fn unavailable(reason: impl Into<String>) -> SandboxError {
    SandboxError::Unavailable {
        level: "microvm".into(),
        reason: reason.into(),
    }
}

/// Removes folders of processes that are gone.
fn sweep(temporary: &Path) {
    for entry in std::fs::read_dir(temporary).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let tag = name.to_str().and_then(|n| n.strip_prefix("sinew-vm-"));
        if tag.is_some_and(is_orphan) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A new folder of this provider, which other users can enter but not list. `root` in it is the root of
/// jails.
fn run_folder(temporary: &Path) -> std::io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let run = temporary.join(format!("sinew-vm-{}-{number}", run_tag(std::process::id())));
    std::fs::DirBuilder::new().mode(0o711).create(&run)?;
    std::fs::create_dir(run.join("root"))?;
    Ok(run)
}

impl MicrovmProvider {
    /// Probes this host and boots machines if nothing is remembered of this image. Blocks until it is done;
    /// it can be called inside of a runtime.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with what is missing and what to do.
    pub fn start(config: MicrovmConfig) -> Result<Self, SandboxError> {
        let image = Image::find(&config.folder).map_err(|e| unavailable(e.to_string()))?;
        sweep(&config.temporary);
        let run = run_folder(&config.temporary).map_err(|e| io("make a folder", e))?;
        let host = Arc::new(Host {
            helper: sinew_sandbox::jail_program().map_err(|e| io("start monitors", e))?,
            image,
            launcher: Launcher::start().map_err(|e| io("start a thread", e))?,
            hierarchy: Hierarchy::probe(crate::monitor::GROUPS),
            run,
            next: AtomicU64::new(0),
        });
        let (qemu, found) = probe::qemu(&config, &host)?;
        let templates = Templates::new(config.folder.join("templates"))?;
        let found = probe::guest_walls(found, &qemu, &templates, &config.folder);
        let protections = Arc::new(found.protections(&host));
        Ok(Self {
            inner: Arc::new(Inner {
                qemu,
                protections,
                no_kvm: found.no_kvm,
                templates,
                live: Places::new(config.max_live, config.acquire_timeout),
                snapshots: AtomicU64::new(1),
            }),
        })
    }

    /// Boots a machine from its kernel and ends it, without a template.
    ///
    /// # Errors
    /// [`SandboxError::Died`] if it does not boot.
    pub async fn cold_boot(&self) -> Result<(), SandboxError> {
        let bytes = guest_bytes(&SandboxSpec::default())?;
        self.inner.qemu.boot(bytes).await?.end().await;
        Ok(())
    }

    /// A machine without walls inside: programs run as its first user and reach every device. Only the
    /// machine itself separates them from the host. It serves attacks on monitors.
    ///
    /// # Errors
    /// Those of [`SandboxProvider::acquire`].
    pub async fn acquire_unwalled(
        &self,
        spec: &SandboxSpec,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        let mut sandbox = self.inner.make(spec, None).await?;
        sandbox.open_walls().await?;
        Ok(Box::new(sandbox))
    }
}

/// Memory of a guest for the limits of `spec`: rounded up to 128 MiB, at least 256 MiB.
fn guest_bytes(spec: &SandboxSpec) -> Result<u64, SandboxError> {
    let wanted = spec.limits.memory_bytes.saturating_add(GUEST_OVERHEAD);
    let bytes = wanted.next_multiple_of(SIZE_STEP).max(2 * SIZE_STEP);
    if bytes > MAX_GUEST {
        return Err(SandboxError::Request {
            field: "limits.memory_bytes",
            value: spec.limits.memory_bytes.to_string(),
            allowed: format!("at most {}", MAX_GUEST - GUEST_OVERHEAD),
        });
    }
    Ok(bytes)
}

/// First request to the agent of a machine.
pub(crate) fn setup_of(spec: &SandboxSpec) -> Setup {
    Setup {
        limits: spec.limits.clone(),
        uid: USER,
        own_user: false,
        tcp: false,
        inodes: INODES,
        python: Some("/usr/bin/python3".into()),
        warm_python: true,
        env: spec.env.clone(),
        writable_root: None,
    }
}

impl Inner {
    /// Refuses a network, and missing protections if `spec` is strict.
    fn refuse(&self, spec: &SandboxSpec) -> Result<(), SandboxError> {
        if spec.network != Network::None {
            return Err(SandboxError::Unsupported {
                operation: "reach a network",
            });
        }
        spec.refuse_missing(self.protections.iter())
    }

    /// Starts a machine from a snapshot, or from the template for `spec`, which is made if it is missing.
    ///
    /// # Errors
    /// [`SandboxError::Request`] if the snapshot's machine has less memory than `spec` needs.
    pub(crate) async fn make(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        saved: Option<&Arc<Saved>>,
    ) -> Result<MicrovmSandbox, SandboxError> {
        spec.refuse_writable_root("microvm")?;
        self.refuse(spec)?;
        let bytes = guest_bytes(spec)?;
        let permit = self.live.take().await?;
        let base = match saved {
            None => {
                let setup = setup_of(spec);
                self.templates.base(&self.qemu, bytes, &setup).await?
            }
            Some(saved) => {
                if saved.base.ram.bytes < bytes {
                    return Err(SandboxError::Request {
                        field: "limits.memory_bytes",
                        value: spec.limits.memory_bytes.to_string(),
                        allowed: format!(
                            "what fits the snapshot's machine of {} bytes",
                            saved.base.ram.bytes
                        ),
                    });
                }
                saved.base().await?
            }
        };
        let machine = restore(&self.qemu, &base).await?;
        let inner = Arc::clone(self);
        let mut sandbox = MicrovmSandbox::new(inner, spec.clone(), machine, base, permit);
        if saved.is_some_and(|s| s.spec != *spec) {
            sandbox.set_up_again().await?;
        }
        Ok(sandbox)
    }

    /// A snapshot with the changes of a machine.
    pub(crate) fn keep(&self, base: &Shared, change: Change, spec: &SandboxSpec) -> Snapshot {
        let saved = Saved {
            base: Arc::clone(base),
            change,
            spec: spec.clone(),
            made: Mutex::default(),
            making: tokio::sync::Mutex::default(),
        };
        let id = self.snapshots.fetch_add(1, Ordering::Relaxed);
        Snapshot {
            level: "microvm",
            id,
            stores: [(id, saved.change.bytes())].into(),
            handle: Arc::new(saved),
        }
    }
}

/// State in a snapshot of this level, or the error for another level.
fn own(snapshot: &Snapshot) -> Result<Arc<Saved>, SandboxError> {
    let saved = Arc::clone(&snapshot.handle).downcast::<Saved>();
    saved.map_err(|_| SandboxError::Request {
        field: "snapshot",
        value: format!("of level {}", snapshot.level),
        allowed: "one of level microvm".into(),
    })
}

impl SandboxProvider for MicrovmProvider {
    fn level(&self) -> &'static str {
        "microvm"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let made = self.inner.make(spec, None).await?;
            Ok(Box::new(made) as Box<dyn Sandbox>)
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.inner.protections)
    }

    fn degradations(&self) -> Vec<String> {
        let why = self.inner.no_kvm.iter();
        why.map(|why| format!("machines are emulated, without KVM: {why}"))
            .collect()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let saved = own(snapshot)?;
            let made = self.inner.make(spec, Some(&saved)).await?;
            Ok(Box::new(made) as Box<dyn Sandbox>)
        })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move {
            let saved = own(snapshot)?;
            let most = saved.spec.limits.work_bytes;
            let mut fork = self.inner.make(&saved.spec, Some(&saved)).await?;
            let entries = fork.entries(most).await;
            fork.end().await;
            sinew_sandbox::guest::export(Arc::new(entries?), max_bytes).await
        })
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let entries = sinew_sandbox::guest::import(archive, max_bytes).await?;
            let mut spec = SandboxSpec::default();
            let bytes = spec.limits.work_bytes.max(max_bytes.min(64 << 20));
            spec.limits.work_bytes = bytes;
            let mut place = self.inner.make(&spec, None).await?;
            let saved = place.import(&entries).await;
            place.end().await;
            saved
        })
    }
}
