//! How executions and sandboxes end: what the kernel reports of dead children, and what is freed.

use super::Spawner;
use super::archiver::Archiver;
use super::children::{Child, Ended, Fate, Role};
use super::live::{Entrant, Live, Way};
use super::zygote::MAX_STARTS;
use crate::cgroup::CgroupEvents;
use crate::protocol::{End, Exit, Reply};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use std::fs::File;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Pause after an execution before the next interpreter is made ready: a sandbox that is used
/// once is destroyed meanwhile.
pub(super) const WARM_PAUSE: Duration = Duration::from_millis(3);

impl Spawner {
    pub(super) fn reap(&mut self) {
        loop {
            let ended = self.children.ended();
            if ended.is_empty() {
                return;
            }
            for (child, role, end) in ended {
                self.reaped(&child, role, end);
            }
        }
    }

    fn reaped(&mut self, child: &Rc<Child>, role: Role, end: Ended) {
        match role {
            Role::Stray => {}
            Role::Zygote => self.zygote_died(),
            Role::Init { id, serial } => self.init_died(id, serial),
            Role::Program { id } => self.program_died(id, child, end),
            Role::Archiver => self.archiver_ended(child, end.fate),
        }
    }

    /// Has another one do what it was asked for; if there is none, programs start by execve.
    fn zygote_died(&mut self) {
        // What it said before it died.
        self.read_notices();
        self.zygote = None;
        self.end_strays();
        if self.zygote_starts > 0 && self.zygote_starts < MAX_STARTS {
            let _ = self.start_zygote();
        }
        let unanswered = |e: &Option<Entrant>| {
            let python = |e: &Entrant| e.child.is_none() && matches!(e.way, Way::Python { .. });
            e.as_ref().is_some_and(python)
        };
        let lost: Vec<u64> = self.live.keys().copied().collect();
        for id in lost {
            if let Some(live) = self.live.get_mut(&id) {
                if unanswered(&live.warm) {
                    live.warm = None;
                    self.to_warm.push_back((Instant::now() + WARM_PAUSE, id));
                }
                let runs = self.live.get(&id).map(|live| &live.running);
                if runs.is_some_and(unanswered)
                    && let Err(why) = self.ask_again(id)
                {
                    self.lost(id, format!("the zygote died: {why}"));
                }
            }
        }
    }

    /// Asks the next zygote for what the last one did not fork.
    fn ask_again(&mut self, id: u64) -> Result<(), String> {
        let mut again = self.fork_python(id)?;
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        let before = live.running.as_mut().map(|e| &mut e.way);
        if let (Some(Way::Python { program, .. }), Way::Python { program: next, .. }) =
            (before, &mut again.way)
        {
            *next = program.take();
        }
        live.running = Some(again);
        Ok(())
    }

    /// Kills children that the zygote made for this process and did not live to report. Where the
    /// kernel lists no children, they stay until this process ends.
    fn end_strays(&mut self) {
        let children = self.own_proc.as_ref().and_then(|proc| {
            let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
            let opened = openat(proc.as_fd(), "1/task/1/children", flags, Mode::empty()).ok()?;
            std::io::read_to_string(File::from(opened)).ok()
        });
        let numbers = children.unwrap_or_default();
        let numbers = numbers.split_whitespace().flat_map(str::parse);
        let strays: Vec<i32> = numbers.filter(|n| !self.children.knows(*n)).collect();
        for stray in strays.into_iter().flat_map(Child::of) {
            stray.kill();
            let _ = self.children.watch(&stray, Role::Stray);
        }
    }

    fn init_died(&mut self, id: u64, serial: u32) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.children -= 1;
        if live.init.as_ref().is_some_and(|init| init.serial == serial) {
            live.init = None;
            live.warm = None;
            live.evict = false;
        }
        let waits = |e: &Entrant| e.child.is_none() && e.serial == serial;
        if live.running.as_ref().is_some_and(waits) {
            self.read_notices();
            self.lost(id, "its namespaces died".into());
            return;
        }
        self.settle(id);
    }

    fn program_died(&mut self, id: u64, child: &Rc<Child>, ended: Ended) {
        self.read_notices();
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.children -= 1;
        let is = |e: &Option<Entrant>| {
            let own = e.as_ref().and_then(|e| e.child.as_ref());
            own.is_some_and(|own| Rc::ptr_eq(own, child))
        };
        if is(&live.warm) {
            live.warm = None;
            live.evict = false;
            live.failed = None;
            self.advance(id);
            self.settle(id);
            return;
        }
        if is(&live.running) {
            live.running = None;
            let exit = match live.failed.take() {
                Some((step, errno)) => Exit::SetUp(step, errno),
                None => match ended.fate {
                    Fate::Signal(signal) => Exit::Signal(signal),
                    Fate::Code(code) => Exit::Code(code),
                },
            };
            let failed = exit != Exit::Code(0);
            live.ended = Some(End {
                exit,
                cpu_us: ended.cpu_us.saturating_sub(live.spent.main_before_us),
                cpu_spent: live.spent.over,
                max_rss_kib: ended.max_rss_kib,
                events: live.group.events(failed),
                file_bytes: live.file_bytes(),
            });
            // Only the init is left: nothing of the program's goes on.
            if live.init.is_some() && live.group.processes() == Some(1) {
                self.tell_end(id);
            }
            self.stop_init(id);
        }
        self.settle(id);
    }

    pub(super) fn tell_end(&mut self, id: u64) {
        self.forget_cpu(id);
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let (seq, warm) = (live.run, live.creation.warm);
        if let Some(mut end) = live.ended.take() {
            // Nothing of it is left that could take more.
            end.cpu_us = end.cpu_us.max(live.spent.end(&live.group));
            self.reply(&Reply::Ended { seq, end }, &[]);
            // The counters of the next one start here, not when somebody waits for it.
            if let Some(live) = self.live.get_mut(&id) {
                live.group.begin();
            }
            if warm {
                self.to_warm.push_back((Instant::now() + WARM_PAUSE, id));
            }
        }
    }

    /// Tells that an execution was not begun.
    pub(super) fn refuse(&self, seq: u64, why: String) {
        let end = End {
            exit: Exit::Refused(why),
            cpu_us: 0,
            cpu_spent: false,
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
        let gone = |live: &Live| live.destroyed_by.filter(|_| live.children == 0);
        let Some(seq) = self.live.get(&id).and_then(gone) else {
            return;
        };
        if let Some(live) = self.live.remove(&id) {
            let gone = match live.group.removed() {
                true => Ok(()),
                false => Err("its cgroup cannot be removed".into()),
            };
            self.done(seq, gone);
            // Freeing its files takes longer than the answer.
            drop(live);
        }
    }

    /// Kills everything and removes what would outlive this process.
    pub(super) fn remove_groups(&mut self) {
        let ids: Vec<u64> = self.live.keys().copied().collect();
        for id in &ids {
            self.stop_init(*id);
        }
        self.archivers.values().for_each(Archiver::kill);
        if let Some(zygote) = self.zygote.take() {
            zygote.child.kill();
        }
        // SAFETY: waits for children of ours until there is none.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) } > 0 {}
        for live in self.live.values() {
            let _ = live.group.removed();
        }
    }
}
