//! How executions and sandboxes end: what the kernel tells of dead children, and what is freed.

use super::cgroup::Counters;
use super::live::{Entrant, Live, Role, Way, kill};
use super::messages::{CgroupEvents, End, Exit, Reply};
use super::spawner::Spawner;
use super::zygote::MAX_STARTS;
use std::time::{Duration, Instant};

/// Pause after an execution before the next interpreter is made ready: a sandbox that is used
/// once is destroyed meanwhile.
pub(super) const WARM_PAUSE: Duration = Duration::from_millis(3);
/// Sandboxes that have a room and an interpreter waiting, at most; they take about 2.2 MiB each, the
/// kernel's part included. The others get theirs when a program comes.
pub(super) const MAX_WAITING: usize = 2048;
/// Network namespaces that are kept for the next rooms.
const MAX_NETWORKS: usize = 64;

impl Spawner {
    pub(super) fn reap(&mut self) {
        loop {
            // SAFETY: waits into locals.
            let (pid, status, usage) = unsafe {
                let (mut status, mut usage) = (0, std::mem::zeroed::<libc::rusage>());
                let pid = libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage);
                (pid, status, usage)
            };
            if pid <= 0 {
                return;
            }
            self.reaped(pid, status, &usage);
        }
    }

    pub(super) fn reaped(&mut self, pid: i32, status: i32, usage: &libc::rusage) {
        match self.roles.remove(&pid) {
            None => {
                self.early.insert(pid, (status, *usage));
            }
            Some(Role::Stray) => {}
            Some(Role::Zygote) => self.zygote_died(),
            Some(Role::Mother) => {
                self.mother = None;
                // Without one, this process forks rooms.
                let _ = self.start_mother();
            }
            Some(Role::Room { id, serial }) => {
                self.networks.extend(self.leaving.remove(&pid));
                self.networks.truncate(MAX_NETWORKS);
                self.room_died(id, serial);
            }
            Some(Role::Program { id }) => self.program_died(id, pid, status, usage),
            Some(Role::Clerk) => self.clerk_ended(pid, status),
        }
    }

    fn zygote_died(&mut self) {
        self.zygote = None;
        // Without one, programs start by execve.
        if self.zygote_starts > 0 && self.zygote_starts < MAX_STARTS {
            let _ = self.start_zygote();
        }
        let unanswered = |e: &Option<Entrant>| {
            let python = |e: &Entrant| e.pid.is_none() && matches!(e.way, Way::Python { .. });
            e.as_ref().is_some_and(python)
        };
        let lost: Vec<u64> = self.live.keys().copied().collect();
        for id in lost {
            if let Some(live) = self.live.get_mut(&id) {
                if unanswered(&live.warm) {
                    live.warm = None;
                }
                if unanswered(&live.running) {
                    self.lost(id, "the zygote died".into());
                }
            }
        }
    }

    fn room_died(&mut self, id: u64, serial: u32) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.children -= 1;
        if live.room.as_ref().is_some_and(|r| r.serial == serial) {
            live.room = None;
            live.warm = None;
            live.evict = false;
        }
        let waits = |e: &Entrant| e.pid.is_none() && e.serial == serial;
        if live.running.as_ref().is_some_and(waits) {
            self.read_notices();
            self.lost(id, "its room died".into());
            return;
        }
        self.settle(id);
    }

    fn program_died(&mut self, id: u64, pid: i32, status: i32, usage: &libc::rusage) {
        self.read_notices();
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.children -= 1;
        if live.warm.as_ref().is_some_and(|w| w.pid == Some(pid)) {
            live.warm = None;
            live.evict = false;
            live.failed = None;
            self.advance(id);
            self.settle(id);
            return;
        }
        if live.running.as_ref().is_some_and(|r| r.pid == Some(pid)) {
            live.running = None;
            let us = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
            let exit = match live.failed.take() {
                Some((step, errno)) => Exit::SetUp(step, errno),
                None if libc::WIFSIGNALED(status) => Exit::Signal(libc::WTERMSIG(status)),
                None => Exit::Code(libc::WEXITSTATUS(status)),
            };
            let failed = exit != Exit::Code(0);
            live.ended = Some(End {
                exit,
                cpu_us: us(usage.ru_utime) + us(usage.ru_stime),
                max_rss_kib: usage.ru_maxrss as u64,
                events: live.group.events(failed, &Counters::default()),
                file_bytes: live.file_bytes(),
            });
            // Only the first process is left: nothing of the program's goes on.
            if live.room.is_some() && live.group.processes() == Some(1) {
                self.tell_end(id);
            }
            self.close_room(id);
        }
        self.settle(id);
    }

    pub(super) fn tell_end(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let (seq, warm, leaving) = (live.run, live.creation.warm, live.leaving);
        if let Some(end) = live.ended.take() {
            self.reply(&Reply::Ended { seq, end }, &[]);
            // What is leaving gets a new room when it is gone.
            if warm && !leaving {
                self.to_warm.push_back((Instant::now() + WARM_PAUSE, id));
            }
        }
    }

    /// Does what waited for the processes of a sandbox to be gone.
    fn left(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id).filter(|l| l.leaving) else {
            return;
        };
        live.leaving = false;
        // That of one that goes is set back when it is kept.
        if live.destroyed_by.is_none() {
            live.group.rest();
        }
        if live.creation.warm {
            self.to_warm.push_back((Instant::now() + WARM_PAUSE, id));
        }
        for (message, files) in std::mem::take(&mut live.deferred) {
            self.handle(message, files);
        }
    }

    /// Tells that an execution was not begun.
    pub(super) fn refuse(&self, seq: u64, why: String) {
        let end = End {
            exit: Exit::Refused(why),
            cpu_us: 0,
            max_rss_kib: 0,
            events: CgroupEvents::default(),
            file_bytes: 0,
        };
        self.reply(&Reply::Ended { seq, end }, &[]);
    }

    /// Tells the end of an execution and frees the sandbox once no child of it is left.
    pub(super) fn settle(&mut self, id: u64) {
        if self.live.get(&id).is_none_or(|l| l.children != 0) {
            return;
        }
        self.tell_end(id);
        self.left(id);
        let gone = |live: &Live| live.destroyed_by.filter(|_| live.children == 0);
        let Some(seq) = self.live.get(&id).and_then(gone) else {
            return;
        };
        if let Some(live) = self.live.remove(&id) {
            let keeps = live.group.is_empty() && self.more_spare_groups();
            let gone = match keeps || live.group.remove() {
                true => Ok(()),
                false => Err("its cgroup cannot be removed".into()),
            };
            self.done(seq, gone);
            // Freeing its files takes longer than the answer.
            let Live { group, files, .. } = live;
            drop(files);
            if keeps {
                self.keep_group(group);
            }
        }
    }

    /// Kills everything and removes what would outlive this process.
    pub(super) fn remove_groups(&mut self) {
        let ids: Vec<u64> = self.live.keys().copied().collect();
        for id in &ids {
            self.close_room(*id);
        }
        self.clerks.keys().for_each(|pid| kill(*pid));
        if let Some(zygote) = self.zygote.take() {
            kill(zygote.pid);
        }
        if let Some(mother) = self.mother.take() {
            mother.end();
        }
        // SAFETY: waits for children of ours until there is none.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) } > 0 {}
        for live in self.live.values() {
            live.group.remove();
        }
        self.drop_spare_groups();
    }
}
