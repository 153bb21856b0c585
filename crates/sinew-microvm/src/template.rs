//! Bases that clones start from: made once, kept on disk, shared in memory.
//!
//! A booted machine becomes the first base of a memory size. A clone of it that was set up for a
//! specification, with a waiting interpreter, becomes the base of that specification. Their names contain all
//! that they depend on.

use crate::image::key_of;
use crate::monitor::{Base, Change, Machine, Shared, idle, restore};
use crate::provider::{apart, io};
use crate::qemu::Qemu;
use crate::ram::Ram;
use serde::{Deserialize, Serialize};
use sinew_sandbox::guest::{Hello, Setup};
use sinew_sandbox::{ExecRequest, Program, SandboxError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Maximum bases on disk. The ones that were not used for the longest time are removed.
const MAX_KEPT: usize = 8;
/// Maximum unused bases in memory.
const MAX_HELD: usize = 4;
/// Maximum time of the interpreter to get ready.
const READY: Duration = Duration::from_secs(60);
/// Maximum time of the machine to become idle after that.
const IDLE: Duration = Duration::from_secs(10);

/// `about.json` next to the memory on disk.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    /// Memory of the machine in bytes.
    bytes: u64,
    /// Version of landlock in the guest. 0: none.
    landlock_abi: u64,
}

/// The bases of a provider.
#[derive(Debug)]
pub(crate) struct Templates {
    /// Folder of the bases on disk.
    folder: PathBuf,
    /// Bases in memory by their key. Held while a base is made, so that each is made once.
    held: tokio::sync::Mutex<HashMap<String, Shared>>,
}

/// Waits until no other process makes a base. One at a time makes it, until the file is dropped; the others
/// find it then.
async fn lock(folder: &Path) -> Result<std::fs::File, SandboxError> {
    let path = folder.join("lock");
    let lock = move || -> std::io::Result<std::fs::File> {
        let file = std::fs::File::create(path)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
        Ok(file)
    };
    apart("lock the templates", lock).await
}

/// Reads a base and marks it as used now.
fn load(folder: &Path) -> std::io::Result<Base> {
    let about: About = serde_json::from_slice(&std::fs::read(folder.join("about.json"))?)?;
    // The most recently used base stays longest.
    let _ = std::fs::File::open(folder.join("about.json"))
        .and_then(|f| f.set_modified(SystemTime::now()));
    Ok(Base {
        ram: Ram::load(&folder.join("ram"), about.bytes)?,
        devices: std::fs::read(folder.join("devices"))?,
        hello: Hello {
            landlock_abi: about.landlock_abi,
        },
    })
}

/// Writes a base under another name and renames it when it is complete.
fn store(base: &Base, folder: &Path) -> std::io::Result<()> {
    let making = folder.with_extension("new");
    let _ = std::fs::remove_dir_all(&making);
    std::fs::create_dir(&making)?;
    base.ram.save(&making.join("ram"))?;
    std::fs::write(making.join("devices"), &base.devices)?;
    let about = About {
        bytes: base.ram.bytes,
        landlock_abi: base.hello.landlock_abi,
    };
    std::fs::write(making.join("about.json"), serde_json::to_vec(&about)?)?;
    std::fs::rename(&making, folder)?;
    prune(folder.parent().unwrap_or(folder));
    Ok(())
}

/// Removes the oldest bases above the limit. Processes that have opened one keep it.
fn prune(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut kept: Vec<(SystemTime, PathBuf)> = entries
        .filter_map(|e| {
            let path = e.path();
            let at = path.join("about.json").metadata().ok()?.modified().ok()?;
            Some((at, path))
        })
        .collect();
    kept.sort();
    let many = kept.len().saturating_sub(MAX_KEPT);
    for (_, path) in kept.into_iter().take(many) {
        let _ = std::fs::remove_dir_all(path);
    }
}

impl Templates {
    /// Makes the folder.
    pub(crate) fn new(folder: PathBuf) -> Result<Self, SandboxError> {
        std::fs::create_dir_all(&folder).map_err(|e| io("make the templates' folder", e))?;
        Ok(Self {
            folder,
            held: tokio::sync::Mutex::default(),
        })
    }

    /// The base for a specification: from memory, from disk, or made now.
    pub(crate) async fn base(
        &self,
        qemu: &Qemu,
        bytes: u64,
        setup: &Setup,
    ) -> Result<Shared, SandboxError> {
        let first = qemu.key(bytes);
        let text = format!("{setup:?}");
        let key = key_of(&[first.as_bytes(), text.as_bytes()]);
        let mut held = self.held.lock().await;
        if let Some(base) = held.get(&key) {
            return Ok(Arc::clone(base));
        }
        let found = self.find(&key).await;
        let base = match found {
            Some(base) => base,
            None => {
                let _lock = lock(&self.folder).await?;
                match self.find(&key).await {
                    Some(base) => base,
                    None => self.make(qemu, bytes, setup, &first, &key).await?,
                }
            }
        };
        if held.len() >= MAX_HELD {
            held.retain(|_, base| Arc::strong_count(base) > 1);
        }
        held.insert(key, Arc::clone(&base));
        Ok(base)
    }

    /// Reads a base from disk. One that cannot be read is made again.
    async fn find(&self, key: &str) -> Option<Shared> {
        let folder = self.folder.join(key);
        let found = tokio::task::spawn_blocking(move || load(&folder)).await;
        found.ok()?.ok().map(Arc::new)
    }

    /// Writes a base to disk.
    async fn keep(&self, base: Base, key: &str) -> Result<Shared, SandboxError> {
        let (base, folder) = (Arc::new(base), self.folder.join(key));
        let kept = Arc::clone(&base);
        apart("keep a template", move || store(&kept, &folder)).await?;
        Ok(base)
    }

    /// Makes a base from a booted machine, which is made and kept too if it is missing.
    async fn make(
        &self,
        qemu: &Qemu,
        bytes: u64,
        setup: &Setup,
        first: &str,
        key: &str,
    ) -> Result<Shared, SandboxError> {
        let booted = match self.find(first).await {
            Some(base) => base,
            None => {
                let base = qemu.boot(bytes).await?.finish().await?;
                self.keep(base, first).await?
            }
        };
        let mut machine = restore(qemu, &booted).await?;
        let prepared = prepare(&mut machine, setup).await;
        machine.end().await;
        let change = prepared?;
        let made = apart("make a template", move || booted.with(&change)).await?;
        self.keep(made, key).await
    }
}

/// Sets a machine up, waits until its interpreter is ready and the machine is idle, and takes its changes.
async fn prepare(machine: &mut Machine, setup: &Setup) -> Result<Change, SandboxError> {
    machine.guest.set_up(setup).await?;
    if setup.python.is_some() {
        let request = ExecRequest::new(Program::Python("print(1)".into()), READY);
        let outcome = machine.guest.exec(&request, &[], 1024, None).await?;
        if outcome.stdout != b"1\n" {
            let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
            return Err(SandboxError::Unavailable {
                level: "microvm".into(),
                reason: format!("its Python ended with {:?}: {said}", outcome.ended.exit),
            });
        }
    }
    idle(machine.pid(), IDLE).await;
    machine.save().await
}
