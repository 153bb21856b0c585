//! How the spawner opens rooms: through the mother of rooms, else by forks of its own.

use super::children::{Child, Role};
use super::live::RoomState;
use super::messages::Notice;
use super::mother::Barren;
use super::plan::{Confinement, Who};
use super::room::{self, NetNs, Room};
use super::spawner::Spawner;
use crate::port::Network;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

impl Spawner {
    /// Makes a room for a sandbox that has none.
    pub(super) fn open_room(&mut self, id: u64) -> Result<(), String> {
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        let tcp = live.creation.network == Network::Loopback;
        if let (None, Some(common)) = (&live.ruleset, &self.landlock) {
            let files = live.files.as_ref().ok_or("no such sandbox")?;
            let (work, tmp) = files.folders()?;
            live.ruleset = Some(common.ruleset(&work, &tmp, tcp)?);
        }
        let number = match self.born(id)? {
            Some(number) => number,
            None => self.forked_room(id)?,
        };
        let child = Child::of(number)?;
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        let serial = live.serial;
        self.children.watch(&child, Role::Room { id, serial })?;
        live.children += 1;
        live.failed = None;
        live.room = Some(RoomState {
            serial,
            child,
            ready: false,
        });
        Ok(())
    }

    /// A room of the mother; `None` if there is no mother, or none any more.
    fn born(&mut self, id: u64) -> Result<Option<i32>, String> {
        if self.mother.is_none() {
            return Ok(None);
        }
        self.number_room(id)?;
        let used = self.used_network(id);
        let room = self.room(id, used.as_ref())?;
        let (table, notice) = (room.table(Who::MothersInit), room.notice);
        let born = self.mother.as_ref().map(|m| m.room(&table, &notice));
        match born.transpose() {
            Ok(pid) => Ok(pid),
            Err(Barren::Refused(why)) => Err(why),
            Err(Barren::Gone(_)) => {
                if let Some(mother) = self.mother.take() {
                    self.children.forget(&mother.child);
                    mother.child.end();
                }
                self.end_strays(|ids| ids.last() == Some(&"1"));
                let _ = self.start_mother();
                Ok(None)
            }
        }
    }

    fn forked_room(&mut self, id: u64) -> Result<i32, String> {
        self.number_room(id)?;
        let used = self.used_network(id);
        let room = self.room(id, used.as_ref())?;
        let table = room.table(Who::Init);
        let flags = i64::from(libc::CLONE_NEWPID | libc::SIGCHLD);
        // SAFETY: one thread, so the copy is consistent; the child never returns.
        match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
            -1 => Err(format!("clone: {}", std::io::Error::last_os_error())),
            0 => room::run(table, room.notice, self.notices_in.as_raw_fd()),
            pid => Ok(pid as i32),
        }
    }

    /// What a room says counts only under the number of the last one.
    fn number_room(&mut self, id: u64) -> Result<(), String> {
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        live.serial += 1;
        Ok(())
    }

    /// The network namespace of a room that is gone, for a sandbox that has none of its own.
    fn used_network(&mut self, id: u64) -> Option<OwnedFd> {
        let shared = self.live.get(&id).is_some_and(|l| l.net_ns.is_some());
        match shared {
            false => self.networks.pop(),
            true => None,
        }
    }

    fn room<'a>(&'a self, id: u64, used: Option<&'a OwnedFd>) -> Result<Room<'a>, String> {
        let live = self.live.get(&id).ok_or("no such sandbox")?;
        Ok(Room {
            notice: Notice {
                id,
                room: live.serial,
                kind: Notice::READY,
                value: 0,
                errno: 0,
            },
            group: &live.group,
            files: live.files.as_ref().ok_or("no such sandbox")?,
            confinement: Confinement {
                filter: &self.init_filter,
                ..self.confinement(live)
            },
            ruleset: live.ruleset.as_ref(),
            net_ns: match (&live.net_ns, used, self.empty_list_bytes) {
                (Some(own), ..) => NetNs::Shared(own),
                (None, Some(used), Some(empty)) => NetNs::Used(used, empty),
                _ => NetNs::New,
            },
            at_root: self.detached,
            proc: self.room_proc,
        })
    }

    /// Kills children that somebody made for this process and did not live to report: those that
    /// nobody here knows and whose process ids, from the outermost namespace in, are such. Where the
    /// kernel lists no children, they stay until this process ends.
    pub(super) fn end_strays(&mut self, such: fn(&[&str]) -> bool) {
        let read = |path: &str| {
            let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
            let proc = self.own_proc.as_ref()?;
            let opened = openat(proc.as_fd(), path, flags, Mode::empty()).ok()?;
            let mut text = String::new();
            File::from(opened).read_to_string(&mut text).ok()?;
            Some(text)
        };
        let children = read("1/task/1/children").unwrap_or_default();
        let strays: Vec<i32> = children
            .split_whitespace()
            .filter_map(|number| number.parse().ok())
            .filter(|number| !self.children.knows(*number))
            .filter(|number| {
                let status = read(&format!("{number}/status")).unwrap_or_default();
                let ids = status.lines().find_map(|l| l.strip_prefix("NSpid:"));
                let ids: Vec<&str> = ids.unwrap_or_default().split_whitespace().collect();
                such(&ids)
            })
            .collect();
        for stray in strays.into_iter().flat_map(Child::of) {
            stray.kill();
            let _ = self.children.watch(&stray, Role::Stray);
        }
    }
}
