//! Ends of executions and sandboxes: the kernel's reports of dead children, and the freeing of their
//! resources.
//!
//! The end of an execution is the end of its main process, as the kernel reports it. It is answered as soon
//! as nothing of the program can continue: either the control group holds only the sandbox init, or the init
//! is reaped, which the kernel allows only when every other process of its PID namespace is gone. The output
//! of a program has no influence.

use super::Spawner;
use super::archiver::Archiver;
use super::children::{Child, ChildEnd, Fate, Role};
use super::live::Live;
use super::pending_exec::PendingExec;
use crate::cgroup::CgroupEvents;
use crate::error::Error;
use crate::protocol::{End, Exit, Reply};
use std::rc::Rc;

impl Spawner {
    /// Reaps all ended children. Handling one end can cause further ones, which are handled too.
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

    fn reaped(&mut self, child: &Rc<Child>, role: Role, end: ChildEnd) {
        match role {
            Role::Stray => {}
            Role::Zygote => self.zygote_died(),
            Role::Init { id, serial } => self.init_died(id, serial),
            Role::Program { id } => self.program_died(id, child, end),
            Role::Archiver => self.archiver_ended(child, end.fate),
        }
    }

    /// Namespaces are gone, and every process in them: what waited for them did not run.
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
        let waits = |e: &PendingExec| e.child.is_none() && e.serial == serial;
        if live.running.as_ref().is_some_and(waits) {
            self.read_notices();
            self.lost(id, "its namespaces died".into());
            return;
        }
        self.settle(id);
    }

    /// A main process or an interpreter that waited. The init is killed, and with it what the program left.
    fn program_died(&mut self, id: u64, child: &Rc<Child>, ended: ChildEnd) {
        self.read_notices();
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.children -= 1;
        let is = |e: &Option<PendingExec>| {
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
            // Only the init is left: nothing of the program continues.
            if live.init.is_some() && live.group.processes() == Some(1) {
                self.tell_end(id);
            }
            self.stop_init(id);
        }
        self.settle(id);
    }

    /// Answers a finished execution once. From then on the sandbox accepts the next one.
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
                self.warming.later(id);
            }
        }
    }

    /// Reports that an execution was not started.
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

    /// Reports the end of an execution, and frees the sandbox when no child of it is left.
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
            let gone = if live.group.removed() {
                Ok(())
            } else {
                Err(Error::Unavailable("its cgroup cannot be removed".into()))
            };
            self.done(seq, gone);
            // Freeing its files takes longer than the answer.
            drop(live);
        }
    }

    /// Ends an execution whose program never started.
    pub(super) fn lost(&mut self, id: u64, why: String) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        if live.running.take().is_none() {
            return;
        }
        let exit = match live.failed.take() {
            Some((step, errno)) => Exit::SetUp(step, errno),
            None => Exit::Lost(why),
        };
        live.ended = Some(End {
            exit,
            cpu_us: 0,
            cpu_spent: false,
            max_rss_kib: 0,
            events: live.group.events(true),
            file_bytes: live.file_bytes(),
        });
        self.stop_init(id);
        self.settle(id);
    }

    /// Killing the first process of a PID namespace kills all of it, whatever sessions or
    /// groups it made.
    pub(super) fn stop_init(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.warm = None;
        live.evict = false;
        if let Some(init) = live.init.take() {
            init.child.kill();
        }
    }

    /// Ends what runs: its end is reported as that of any other.
    pub(super) fn kill(&mut self, id: u64) {
        if let Some(init) = self.live.get(&id).and_then(|l| l.init.as_ref()) {
            init.child.kill();
        }
    }

    /// Ends everything in a sandbox; the request is answered when all of it is gone.
    pub(super) fn destroy(&mut self, id: u64, seq: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            self.done(seq, Ok(()));
            return;
        };
        live.destroyed_by = Some(seq);
        self.stop_init(id);
        self.end_copy(id);
        // The kernel waits for a grace period when it takes a mount apart; the processes end meanwhile. The
        // files of a running execution are counted once more at its end.
        if let Some(live) = self.live.get_mut(&id).filter(|l| l.running.is_none()) {
            (live.files, live.ruleset) = (None, None);
        }
        self.settle(id);
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
