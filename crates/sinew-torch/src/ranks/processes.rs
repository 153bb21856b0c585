//! A process group with a thread that looks at it.

use super::EndedRank;
use crate::error::TorchError;
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of the looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time for the other ranks to report the end of one.
const GRACE: Duration = Duration::from_secs(2);
/// Lines of standard error in a message, and the bytes that are read for them.
const TAIL_LINES: usize = 40;
const TAIL_BYTES: u64 = 16 << 10;

/// A rank.
#[derive(Debug)]
pub(super) struct RankProcess {
    child: Child,
    /// Kept open: the rank ends when it closes.
    _input: Option<ChildStdin>,
    log: PathBuf,
    status: Option<ExitStatus>,
}

impl RankProcess {
    pub(super) fn new(mut child: Child, log: PathBuf) -> Self {
        Self {
            _input: child.stdin.take(),
            child,
            log,
            status: None,
        }
    }
}

/// All ranks.
#[derive(Debug, Default)]
struct Group {
    ranks: Vec<RankProcess>,
    /// The first that ended unexpectedly, and the time when that was seen.
    ended: Option<(EndedRank, Instant)>,
    /// Whether the ends of ranks are as they should be.
    is_ending: bool,
}

impl Group {
    fn alive(&self) -> bool {
        self.ranks.iter().any(|rank| rank.status.is_none())
    }

    /// Looks for ranks that ended.
    fn look(&mut self) {
        let mut new = Vec::new();
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            if rank.status.is_none()
                && let Ok(Some(status)) = rank.child.try_wait()
            {
                rank.status = Some(status);
                new.push((number, status));
            }
        }
        if self.is_ending || self.ended.is_some() {
            return;
        }
        // The others follow one that was killed.
        let killed = new.iter().find(|(_, status)| status.signal().is_some());
        let failed = new.iter().find(|(_, status)| !status.success());
        if let Some(&(rank, status)) = killed.or(failed).or(new.first()) {
            let ended = EndedRank {
                rank,
                status: status.to_string(),
                tail: tail(&self.ranks[rank].log),
            };
            self.ended = Some((ended, Instant::now()));
        }
    }

    fn kill(&mut self) {
        self.is_ending = true;
        if !self.alive() {
            return;
        }
        // A rank that lives keeps the number of the group from being used again.
        if let Some(leader) = self.ranks.first() {
            let _ = kill_process_group(Pid::from_child(&leader.child), Signal::KILL);
        }
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.child.kill();
            rank.status = rank.child.wait().ok();
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    group: Mutex<Group>,
    stop: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the ranks until the group is dropped.
    fn watch(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let mut group = self.lock();
            group.look();
            let ended = group.ended.as_ref();
            if ended.is_some_and(|(_, since)| since.elapsed() >= GRACE) {
                group.kill();
                return;
            }
            drop(group);
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
}

/// The ranks of a group. Dropping it kills them.
#[derive(Debug, Default)]
pub(super) struct Processes {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

impl Processes {
    /// Process id of the first rank, which is that of the process group.
    pub(super) fn leader(&self) -> Option<i32> {
        let pid = *self.pids().first()?;
        i32::try_from(pid).ok()
    }

    pub(super) fn add(&mut self, rank: RankProcess) {
        self.shared.lock().ranks.push(rank);
    }

    /// Starts the thread that looks at the ranks.
    ///
    /// # Errors
    /// If the system has no thread.
    pub(super) fn watch(&mut self) -> Result<(), TorchError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name("torch-ranks".to_owned())
            .spawn(move || shared.watch());
        let thread = thread.map_err(|e| TorchError::Setup(format!("no thread: {e}")))?;
        self.watcher = Some(thread);
        Ok(())
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        let group = self.shared.lock();
        group.ranks.iter().map(|rank| rank.child.id()).collect()
    }

    /// The first rank that ended unexpectedly.
    pub(super) fn check(&self) -> Option<EndedRank> {
        let mut group = self.shared.lock();
        group.look();
        group.ended.as_ref().map(|(ended, _)| ended.clone())
    }

    pub(super) fn expect_end(&self) {
        self.shared.lock().is_ending = true;
    }

    pub(super) fn kill(&self) {
        self.shared.lock().kill();
    }

    /// The end of a rank's standard error.
    pub(super) fn tail(&self, rank: usize) -> String {
        let group = self.shared.lock();
        let log = group.ranks.get(rank).map(|rank| rank.log.clone());
        log.map(|log| tail(&log)).unwrap_or_default()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.kill();
        if let Some(watcher) = self.watcher.take() {
            watcher.thread().unpark();
            let _ = watcher.join();
        }
    }
}

/// The last lines of a file, indented; empty if it cannot be read.
fn tail(path: &Path) -> String {
    let read = |path: &Path| -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let shown = |c: &char| !c.is_control() || *c == '\t';
    let lines: Vec<String> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| format!("    {}", line.chars().filter(shown).collect::<String>()))
        .collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_last_lines_of_standard_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-0.log");
        assert_eq!(tail(&path), "");
        let lines: Vec<String> = (0..5000).map(|n| format!("line \u{1b}{n}\n\n")).collect();
        std::fs::write(&path, lines.concat()).unwrap();
        let end = tail(&path);
        assert_eq!(end.lines().count(), TAIL_LINES);
        assert!(end.ends_with("    line 4999"), "{end}");
    }
}
