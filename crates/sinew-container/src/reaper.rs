//! Removal of containers that are dropped instead of destroyed.
//!
//! A removal waits until the kernel and the runtime have let go, and a drop can happen on a thread of an
//! async runtime, which must not wait. So each provider has one thread that waits. It ends with the provider
//! and its last container. A run whose process ends first is cleaned up by the next one, which looks for
//! leftovers.

use crate::state::{Folder, io};
use sinew_sandbox::SandboxError;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Maximum time for the last containers of a provider to clean up.
const LAST: Duration = Duration::from_secs(3);
/// Time between two looks at what is left of the last containers.
const PAUSE: Duration = Duration::from_millis(5);
/// Maximum waiting removals. Further ones are left for the next run.
const MAX_WAITING: usize = 1024;

/// A removal.
enum Job {
    /// Groups of a container by name, with the processes in them.
    Groups(String),
    /// Folder of a provider, after the last runtime has removed its state from it. The sender is dropped when
    /// the folder is removed.
    Folder(Arc<Folder>, SyncSender<()>),
}

/// Handle to the thread.
#[derive(Clone, Debug)]
pub(crate) struct Reaper(SyncSender<Job>);

impl Reaper {
    /// Starts the thread.
    pub(crate) fn start() -> Result<Self, SandboxError> {
        let (sender, jobs) = sync_channel(MAX_WAITING);
        std::thread::Builder::new()
            .name("container-reaper".into())
            .spawn(move || reap(&jobs))
            .map_err(|e| io("start a thread", e))?;
        Ok(Self(sender))
    }

    /// Removes the groups of a container. Returns at once.
    pub(crate) fn groups(&self, name: &str) {
        self.send(Job::Groups(name.into()));
    }

    /// Removes the folder of a provider once nothing is in `state` below it, or after 3 s. Waits for it only
    /// outside of an async runtime, such as at the end of a program.
    pub(crate) fn folder(&self, folder: &Arc<Folder>) {
        if !is_busy(folder) {
            return;
        }
        let (done, removed) = sync_channel(0);
        self.send(Job::Folder(Arc::clone(folder), done));
        if tokio::runtime::Handle::try_current().is_err() {
            // An error: the sender is gone, as it should be, or it is late.
            let _ = removed.recv_timeout(2 * LAST);
        }
    }

    /// Queues a removal for the thread without waiting. If the queue is full, the leftovers stay for the next
    /// run.
    fn send(&self, job: Job) {
        if let Err(TrySendError::Full(_)) = self.0.try_send(job) {
            tracing::warn!("a dropped container is left for the next run: too many are waiting");
        }
    }
}

/// True while a runtime keeps the state of a container.
fn is_busy(folder: &Folder) -> bool {
    let state = std::fs::read_dir(folder.path().join("state"));
    state.is_ok_and(|mut entries| entries.next().is_some())
}

/// Body of the thread: one removal after the other, until the last handle is dropped.
fn reap(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Groups(name) => sinew_jail::cgroup::remove_everywhere(&name),
            Job::Folder(folder, done) => {
                settle(&folder, jobs);
                drop(folder);
                drop(done);
            }
        }
    }
}

/// Waits until the state of all containers is gone, and removes groups meanwhile.
fn settle(folder: &Folder, jobs: &Receiver<Job>) {
    let until = Instant::now() + LAST;
    while is_busy(folder) && Instant::now() < until {
        match jobs.recv_timeout(PAUSE) {
            Ok(Job::Groups(name)) => sinew_jail::cgroup::remove_everywhere(&name),
            // A provider has one folder.
            Ok(Job::Folder(..)) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(PAUSE),
        }
    }
    // A runtime that was killed half way keeps its state, and can have made groups after their removal.
    let left = std::fs::read_dir(folder.path().join("state"));
    for entry in left.into_iter().flatten().flatten() {
        sinew_jail::cgroup::remove_everywhere(&entry.file_name().to_string_lossy());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_dropped_in_a_runtime_does_not_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let folder = Arc::new(Folder::new(path.clone()).unwrap());
        let container = path.join("state/c0");
        std::fs::create_dir_all(&container).unwrap();
        let reaper = Reaper::start().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async { reaper.folder(&folder) });
        drop(folder);
        // Still there: the call has not waited, and the container is not gone.
        assert!(container.exists());
        std::fs::remove_dir(&container).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while path.exists() {
            assert!(Instant::now() < until, "the folder stays");
            std::thread::sleep(PAUSE);
        }
    }

    #[test]
    fn the_end_of_a_program_waits_for_the_last_container() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let folder = Arc::new(Folder::new(path.clone()).unwrap());
        let container = path.join("state/c0");
        std::fs::create_dir_all(&container).unwrap();
        let reaper = Reaper::start().unwrap();
        let runtime = std::thread::spawn(move || {
            std::thread::sleep(10 * PAUSE);
            std::fs::remove_dir(container).unwrap();
        });
        reaper.folder(&folder);
        runtime.join().unwrap();
        assert!(!path.join("state/c0").exists());
    }
}
