//! Control groups of every level: limits of a whole sandbox, the kernel's counts in it, and the end of
//! everything in it. Version 1 controllers are used if they are mounted, else version 2, else none.
//!
//! Groups are named `PREFIX PID-START-...` after the process that made them. The next process removes the
//! groups of processes that are gone, and kills what still runs in them.
//!
//! | what | version 1 | version 2 |
//! |---|---|---|
//! | memory | `memory.limit_in_bytes`, swap included where it is counted | `memory.max`, `memory.swap.max` 0 |
//! | processes and threads | `pids.max` | `pids.max` |
//! | CPU time | `cpuacct.usage` (ns) | `cpu.stat`, `usage_usec` |
//! | killed for memory, refused processes | `memory.oom_control`, `pids.events` | `memory.events`, `pids.events` |
//!
//! A group belongs to one sandbox, is made with it and removed with it.

use crate::error::{Result, on};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const MEMBERS: &str = "cgroup.procs";
/// Version 1 counts buffers of TCP apart from other memory, and only where this is set.
const TCP_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";
/// Number of attempts to remove a group whose processes are still ending, and the pause between them.
const REMOVALS: u32 = 100;
const REMOVAL_PAUSE: Duration = Duration::from_millis(10);

/// Bytes that buffers of TCP may take on top of the memory limit, under version 1.
fn tcp_bytes(memory_bytes: u64) -> u64 {
    (memory_bytes / 8).clamp(1 << 20, 64 << 20)
}

/// Counts of the kernel for one execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupEvents {
    /// Processes killed for lack of memory.
    pub oom_kills: u64,
    /// Processes that were refused.
    pub process_refusals: u64,
    /// Largest memory of the whole group.
    pub peak_memory_bytes: u64,
}

/// Limits of a group.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Memory, the kernel's part included.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub processes: u64,
    /// Whether TCP connections can be made, whose buffers are bounded too.
    pub tcp: bool,
}

/// A mounted hierarchy in which groups can be made; open, as the spawner leaves the host's file
/// system behind.
#[derive(Clone, Debug)]
struct Mount {
    dir: Arc<OwnedFd>,
    path: PathBuf,
}

/// A group in one hierarchy.
#[derive(Clone, Debug)]
struct Place {
    /// The hierarchy and the group's name in it; else only its path is known.
    below: Option<(Arc<OwnedFd>, String)>,
    path: PathBuf,
}

impl Place {
    fn at(path: PathBuf) -> Self {
        Self { below: None, path }
    }

    fn open(&self, file: &str, flags: OFlag) -> std::io::Result<File> {
        let flags = flags | OFlag::O_CLOEXEC;
        Ok(match &self.below {
            Some((dir, name)) => openat(dir, &*format!("{name}/{file}"), flags, Mode::empty())?,
            None => nix::fcntl::open(&self.path.join(file), flags, Mode::empty())?,
        }
        .into())
    }

    fn write(&self, file: &str, text: &str) -> std::io::Result<()> {
        self.open(file, OFlag::O_WRONLY)?.write_all(text.as_bytes())
    }

    /// The first 4 KiB of a file, empty if it cannot be read.
    fn text(&self, file: &str) -> String {
        let mut bytes = [0; 4096];
        let read = self
            .open(file, OFlag::O_RDONLY)
            .and_then(|mut f| f.read(&mut bytes));
        String::from_utf8_lossy(&bytes[..read.unwrap_or(0)]).into_owned()
    }

    fn number(&self, file: &str) -> Option<u64> {
        self.text(file).trim().parse().ok()
    }

    /// The number behind a word of a file, 0 if there is none.
    fn count(&self, file: &str, key: &str) -> u64 {
        let text = self.text(file);
        let mut lines = text.lines().filter_map(|l| l.strip_prefix(key));
        lines.find_map(|l| l.trim().parse().ok()).unwrap_or(0)
    }

    /// Whether it is gone.
    fn remove(&self) -> bool {
        let removed = match &self.below {
            Some((dir, name)) => unlinkat(dir, name.as_str(), UnlinkatFlags::RemoveDir),
            None => unlinkat(nix::fcntl::AT_FDCWD, &self.path, UnlinkatFlags::RemoveDir),
        };
        matches!(removed, Ok(()) | Err(nix::errno::Errno::ENOENT))
    }
}

/// Places for control groups on this host.
#[derive(Clone, Debug, Default)]
pub struct Hierarchy {
    /// Mount of the memory controller, which also bounds files in memory.
    memory: Option<Mount>,
    pids: Option<Mount>,
    /// Mount of the cpuacct controller, under version 1.
    cpu: Option<Mount>,
    /// Whether the memory of connections can be limited under version 1.
    tcp_v1: bool,
    /// Whether all of them are one folder of version 2.
    v2: bool,
}

impl Hierarchy {
    /// Finds writable hierarchies and removes groups of this prefix that dead processes left.
    #[must_use]
    pub fn probe(prefix: &str) -> Self {
        let mut found = Self::default();
        let mut unified = None;
        for (path, kind, options) in mounts(&mounts_text()) {
            let has = |name: &str| options.split(',').any(|o| o == name);
            match kind {
                "cgroup" if has("memory") => {
                    found.memory = usable(path, prefix);
                    found.tcp_v1 = path.join(TCP_LIMIT).exists();
                }
                "cgroup" if has("pids") => found.pids = usable(path, prefix),
                "cgroup" if has("cpuacct") => found.cpu = usable(path, prefix),
                "cgroup2" => unified = Some(path.to_owned()),
                _ => {}
            }
        }
        if let Some(path) = unified.filter(|_| found.memory.is_none()) {
            let control = fs::read_to_string(path.join("cgroup.subtree_control"));
            let control = control.unwrap_or_default();
            let both = control.contains("memory") && control.contains("pids");
            if let Some(mount) = both.then(|| usable(&path, prefix)).flatten() {
                found.v2 = true;
                found.memory = Some(mount.clone());
                found.pids = Some(mount.clone());
                found.cpu = Some(mount);
            }
        }
        found
    }

    /// Returns the controller that limits memory.
    ///
    /// # Errors
    /// Fails with the reason why nothing limits it.
    pub fn limits_memory(&self) -> std::result::Result<&'static str, &'static str> {
        match (&self.memory, self.v2) {
            (Some(_), false) => Ok("cgroup v1 memory controller"),
            (Some(_), true) => Ok("cgroup v2 memory controller"),
            (None, _) => Err("no writable cgroup with the memory controller"),
        }
    }

    /// Returns the controller that limits processes.
    #[must_use]
    pub fn limits_processes(&self) -> Option<&'static str> {
        self.pids.as_ref().map(|_| {
            if self.v2 {
                "cgroup v2 pids controller"
            } else {
                "cgroup v1 pids controller"
            }
        })
    }

    /// Returns the controller that counts the CPU time of an execution.
    #[must_use]
    pub fn counts_cpu(&self) -> Option<&'static str> {
        self.cpu.as_ref().map(|_| {
            if self.v2 {
                "cgroup v2"
            } else {
                "cgroup v1 cpuacct controller"
            }
        })
    }

    /// Returns the setting that limits the memory of TCP connections.
    ///
    /// # Errors
    /// Fails with the reason why nothing limits it.
    pub fn limits_tcp(&self) -> std::result::Result<&'static str, &'static str> {
        match self.limits_memory() {
            Ok(_) if !self.v2 && self.tcp_v1 => Ok("cgroup v1 memory.kmem.tcp.limit_in_bytes"),
            Ok(_) if !self.v2 => {
                Err("the memory controller of cgroup v1 counts no buffers of TCP here")
            }
            memory => memory,
        }
    }

    /// Makes the groups of a sandbox.
    ///
    /// # Errors
    /// Fails if a group cannot be made or limited.
    pub fn create(&self, name: &str, bounds: &Bounds) -> Result<Group> {
        let place = |mount: &Option<Mount>| {
            mount.as_ref().map(|mount| Place {
                below: Some((Arc::clone(&mount.dir), name.to_owned())),
                path: mount.path.join(name),
            })
        };
        let group = Group {
            memory: place(&self.memory),
            pids: place(&self.pids),
            cpu: place(&self.cpu),
            v2: self.v2,
            before: (0, 0),
        };
        for (dir, name) in group.places().filter_map(|p| p.below.as_ref()) {
            match mkdirat(dir, name.as_str(), Mode::from_bits_truncate(0o755)) {
                Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
                Err(e) => return Err(on("make the cgroup", name)(e)),
            }
        }
        group.limit(bounds, self.tcp_v1).inspect_err(|_| {
            group.remove();
        })?;
        Ok(group)
    }
}

fn mounts_text() -> String {
    fs::read_to_string("/proc/self/mounts").unwrap_or_default()
}

/// Lists the mounts of control groups: path, type and options.
fn mounts(text: &str) -> impl Iterator<Item = (&Path, &str, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let kind = matches!(kind, "cgroup" | "cgroup2").then_some(kind)?;
        Some((Path::new(path), kind, options))
    })
}

/// A hierarchy, if a group can be made in it; groups that dead processes left there are removed.
fn usable(mount: &Path, prefix: &str) -> Option<Mount> {
    let probe = mount.join(format!("{prefix}{}-probe", run_tag(std::process::id())));
    // Made by another provider of this process at this moment: it can be made.
    match fs::create_dir(&probe) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return None,
        _ => {}
    }
    let _ = fs::remove_dir(&probe);
    sweep_in(mount, prefix);
    Some(Mount {
        dir: Arc::new(OwnedFd::from(File::open(mount).ok()?)),
        path: mount.into(),
    })
}

/// Ticks a second of all times in `/proc`: a part of the kernel's interface on x86 and ARM.
const USER_HZ: i64 = 100;

/// Tag of everything that a run makes on the host: process id and start time, so that a reused
/// process id is a different run.
#[must_use]
pub fn run_tag(pid: u32) -> String {
    format!("{pid}-{}", started(pid).unwrap_or(0))
}

/// Clock ticks between the boot and the start of a process (`/proc/PID/stat`, field 22), the same number in
/// every time namespace: the kernel adds the offset of the reader's (`time_namespaces(7)`).
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let offsets = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    start_ticks(&stat, &offsets)
}

/// The start of a process from its `stat`, without the offset of the boot time that a time namespace has.
fn start_ticks(stat: &str, offsets: &str) -> Option<u64> {
    let after = stat.rsplit(')').next()?;
    let seen: i64 = after.split_whitespace().nth(19)?.parse().ok()?;
    let boot = offsets.lines().find_map(|l| l.strip_prefix("boottime"));
    let offset = boot.and_then(|rest| {
        let mut numbers = rest.split_whitespace().map(str::parse::<i64>);
        let (seconds, nanoseconds) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some(seconds * USER_HZ + nanoseconds * USER_HZ / 1_000_000_000)
    });
    u64::try_from(seen - offset.unwrap_or(0)).ok()
}

/// Whether the process of this tag, and whatever follows it, is gone. Other names are not tags.
#[must_use]
pub fn is_orphan(tag: &str) -> bool {
    let mut parts = tag.split('-').map(str::parse::<u64>);
    match (parts.next(), parts.next()) {
        (Some(Ok(pid)), Some(Ok(start))) => {
            u32::try_from(pid).ok().and_then(started) != Some(start)
        }
        _ => false,
    }
}

/// Kills what is in a group and below it, and removes it; whether it is gone.
fn try_remove(folder: &Path) -> bool {
    if !folder.is_dir() {
        return true;
    }
    let text = fs::read_to_string(folder.join(MEMBERS)).unwrap_or_default();
    for pid in text.lines().filter_map(|line| line.parse().ok()) {
        // See `is_foreign`.
        if pid > 0 {
            let pid = nix::unistd::Pid::from_raw(pid);
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            try_remove(&entry.path());
        }
    }
    fs::remove_dir(folder).is_ok()
}

/// Whether it holds processes of a PID namespace that is not seen here (their number is 0): then its name has
/// no meaning here.
fn is_foreign(folder: &Path) -> bool {
    let text = fs::read_to_string(folder.join(MEMBERS)).unwrap_or_default();
    text.lines().any(|line| line == "0")
}

/// Removes the groups of a name in every hierarchy, with what runs in them: a runtime of containers
/// that is itself interrupted leaves them.
pub fn remove_everywhere(name: &str) {
    let text = mounts_text();
    let places: Vec<PathBuf> = mounts(&text).map(|(path, ..)| path.join(name)).collect();
    for _ in 0..REMOVALS {
        if places.iter().filter(|place| !try_remove(place)).count() == 0 {
            return;
        }
        std::thread::sleep(REMOVAL_PAUSE);
    }
}

/// Removes the groups of this prefix that dead processes left, in every hierarchy.
pub fn sweep(prefix: &str) {
    let text = mounts_text();
    mounts(&text).for_each(|(path, ..)| sweep_in(path, prefix));
}

fn sweep_in(mount: &Path, prefix: &str) {
    for entry in fs::read_dir(mount).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let tag = name.to_str().and_then(|n| n.strip_prefix(prefix));
        if tag.is_some_and(is_orphan) {
            for _ in 0..REMOVALS {
                if try_remove(&entry.path()) || is_foreign(&entry.path()) {
                    break;
                }
                std::thread::sleep(REMOVAL_PAUSE);
            }
        }
    }
}

/// The groups of one sandbox, one in each hierarchy.
#[derive(Clone, Debug, Default)]
pub struct Group {
    memory: Option<Place>,
    pids: Option<Place>,
    cpu: Option<Place>,
    v2: bool,
    /// Counts of [`Group::failures`] before this execution.
    before: (u64, u64),
}

impl Group {
    /// The groups of a process, as the host sees them.
    #[must_use]
    pub fn of(pid: i32) -> Self {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        Self::parse(&groups, &mounts_text())
    }

    fn parse(groups: &str, text: &str) -> Self {
        let mounted = |controller: Option<&str>| {
            let here = |kind: &str, options: &str| match controller {
                Some(name) => kind == "cgroup" && options.split(',').any(|o| o == name),
                None => kind == "cgroup2",
            };
            mounts(text).find_map(|(path, kind, options)| here(kind, options).then_some(path))
        };
        let mut found = Self::default();
        let mut unified = None;
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            // The root itself counts everything on the host.
            let path = path.trim_start_matches('/');
            if path.is_empty() {
                continue;
            }
            let at = |controller| mounted(controller).map(|m| Place::at(m.join(path)));
            if controllers.is_empty() {
                unified = mounted(None).map(|m| m.join(path));
            }
            for name in controllers.split(',') {
                match name {
                    "memory" => found.memory = at(Some("memory")),
                    "pids" => found.pids = at(Some("pids")),
                    "cpu" => found.cpu = at(Some("cpu")),
                    _ => {}
                }
            }
        }
        match unified.filter(|_| found.memory.is_none()) {
            Some(path) => Self::unified(path),
            None => found,
        }
    }

    /// A group of version 2 at this path.
    #[must_use]
    pub fn unified(path: PathBuf) -> Self {
        let place = Some(Place::at(path));
        Self {
            memory: place.clone(),
            pids: place.clone(),
            cpu: place,
            v2: true,
            before: (0, 0),
        }
    }

    /// The group in each hierarchy; version 2 has one for all controllers.
    fn places(&self) -> impl Iterator<Item = &Place> {
        let one = self.v2;
        self.memory
            .iter()
            .chain(self.pids.iter().filter(move |_| !one))
            .chain(self.cpu.iter().filter(move |_| !one))
    }

    /// Sets its limits.
    ///
    /// # Errors
    /// The limit that could not be set.
    pub fn limit(&self, bounds: &Bounds, tcp_v1: bool) -> Result<()> {
        let set = |place: &Place, file: &str, value: u64| {
            let written = place.write(file, &value.to_string());
            written.map_err(on("limit the cgroup by", file))
        };
        let bytes = bounds.memory_bytes;
        // Swap accounting can be off.
        match &self.memory {
            Some(place) if self.v2 => {
                set(place, "memory.max", bytes)?;
                let _ = set(place, "memory.swap.max", 0);
            }
            Some(place) => {
                set(place, "memory.limit_in_bytes", bytes)?;
                let _ = set(place, "memory.memsw.limit_in_bytes", bytes);
                if bounds.tcp && tcp_v1 {
                    set(place, TCP_LIMIT, tcp_bytes(bytes))?;
                }
            }
            None => {}
        }
        match &self.pids {
            Some(place) => set(place, "pids.max", bounds.processes),
            None => Ok(()),
        }
    }

    /// Bounds the buffers of TCP connections; under version 2 they count as memory. False if nothing
    /// bounds them.
    #[must_use]
    pub fn limit_tcp(&self, memory_bytes: u64) -> bool {
        let bytes = tcp_bytes(memory_bytes);
        let bounds = |place: &Place| {
            let _ = place.write(TCP_LIMIT, &bytes.to_string());
            place.number(TCP_LIMIT).is_some_and(|set| set <= bytes)
        };
        self.v2 || self.memory.as_ref().is_some_and(bounds)
    }

    /// Puts this process (0) or another into the groups.
    ///
    /// # Errors
    /// Fails if the kernel refuses it.
    pub fn join(&self, pid: i32) -> std::io::Result<()> {
        let pid = pid.to_string();
        self.places().try_for_each(|p| p.write(MEMBERS, &pid))
    }

    /// Open folders, and the files in them to which a process writes 0 to join.
    pub(crate) fn members(&self) -> impl Iterator<Item = (RawFd, String)> {
        let open = self.places().filter_map(|p| p.below.as_ref());
        open.map(|(dir, name)| (dir.as_raw_fd(), format!("{name}/{MEMBERS}")))
    }

    /// Returns the same files by their paths.
    #[must_use]
    pub fn member_files(&self) -> Vec<PathBuf> {
        self.places().map(|p| p.path.join(MEMBERS)).collect()
    }

    /// Kills everything in it (version 2), what is started meanwhile too.
    pub(crate) fn kill(&self) -> std::io::Result<()> {
        let none = || std::io::Error::from(std::io::ErrorKind::NotFound);
        self.pids
            .as_ref()
            .ok_or_else(none)?
            .write("cgroup.kill", "1")
    }

    /// Whether no process is left in it (version 2) but such as wait to be reaped.
    pub(crate) fn is_empty(&self) -> bool {
        let events = self.pids.as_ref().map(|p| p.text("cgroup.events"));
        events.is_some_and(|e| e.contains("populated 0"))
    }

    /// The limit of memory, if one is in force.
    #[must_use]
    pub fn memory_limit(&self) -> Option<u64> {
        let file = if self.v2 {
            "memory.max"
        } else {
            "memory.limit_in_bytes"
        };
        // Version 1 has a huge number where there is none.
        self.memory.as_ref()?.number(file).filter(|&n| n < 1 << 60)
    }

    /// The limit of processes, if one is in force.
    #[must_use]
    pub fn process_limit(&self) -> Option<u64> {
        self.pids.as_ref()?.number("pids.max")
    }

    /// Processors that it may use at most, if that is bounded.
    #[must_use]
    pub fn processors(&self) -> Option<f64> {
        let cpu = self.cpu.as_ref()?;
        let (quota, period) = if self.v2 {
            let text = cpu.text("cpu.max");
            let mut parts = text.split_whitespace().map(str::parse::<f64>);
            (parts.next()?.ok()?, parts.next()?.ok()?)
        } else {
            // Version 1 has -1 where there is no bound.
            (
                cpu.number("cpu.cfs_quota_us")? as f64,
                cpu.number("cpu.cfs_period_us")? as f64,
            )
        };
        (period > 0.0).then(|| quota / period)
    }

    /// Processes and threads in it now; `None` where nothing counts them.
    #[must_use]
    pub fn processes(&self) -> Option<u64> {
        self.pids.as_ref()?.number("pids.current")
    }

    /// CPU time of all that ever ran in it; `None` where nothing counts it.
    pub(crate) fn cpu_us(&self) -> Option<u64> {
        let cpu = self.cpu.as_ref()?;
        if self.v2 {
            Some(cpu.count("cpu.stat", "usage_usec "))
        } else {
            Some(cpu.number("cpuacct.usage")? / 1000)
        }
    }

    /// Memory of it now; `None` where nothing counts it.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        let file = if self.v2 {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        self.memory.as_ref()?.number(file)
    }

    /// Kills for lack of memory and refusals of processes, ever.
    fn failures(&self) -> (u64, u64) {
        let ooms = if self.v2 {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        let count = |place: &Option<Place>, file: &str, key: &str| {
            place.as_ref().map_or(0, |p| p.count(file, key))
        };
        (
            count(&self.memory, ooms, "oom_kill "),
            count(&self.pids, "pids.events", "max "),
        )
    }

    /// Called before an execution: its counters start from here.
    pub fn begin(&mut self) {
        if let Some(place) = self.memory.as_ref().filter(|_| !self.v2) {
            // The reset makes the peak that of this execution, not of the group's life.
            let _ = place.write("memory.max_usage_in_bytes", "0");
        }
        self.before = self.failures();
    }

    /// Returns the counts since [`Group::begin`]; zero once the groups are gone. The reasons are read only if
    /// `failed`: the program failed.
    #[must_use]
    pub fn events(&self, failed: bool) -> CgroupEvents {
        let peak = if self.v2 {
            "memory.peak"
        } else {
            "memory.max_usage_in_bytes"
        };
        let now = if failed { self.failures() } else { self.before };
        let peak = self.memory.as_ref().and_then(|p| p.number(peak));
        CgroupEvents {
            oom_kills: now.0.saturating_sub(self.before.0),
            process_refusals: now.1.saturating_sub(self.before.1),
            peak_memory_bytes: peak.unwrap_or(0),
        }
    }

    /// Removes the groups; false if something still runs in them.
    #[must_use]
    pub fn removed(&self) -> bool {
        self.places().filter(|place| !place.remove()).count() == 0
    }

    fn remove(&self) {
        let _ = self.removed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
        cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";

    #[test]
    fn the_groups_of_a_process_are_found_in_both_versions() {
        let path = |place: &Option<Place>| place.as_ref().map(|p| p.path.display().to_string());
        let v1 = Group::parse("8:pids:/a\n4:memory:/b\n0::/c\n", MOUNTS);
        assert_eq!(path(&v1.memory).as_deref(), Some("/sys/fs/cgroup/memory/b"));
        assert_eq!(path(&v1.pids).as_deref(), Some("/sys/fs/cgroup/pids/a"));
        assert!(!v1.v2);
        let v2 = Group::parse("0::/c/d\n", MOUNTS);
        assert_eq!(
            path(&v2.pids).as_deref(),
            Some("/sys/fs/cgroup/unified/c/d")
        );
        assert!(v2.v2);
        let root = Group::parse("4:memory:/\n0::/\n", MOUNTS);
        assert!(root.memory.is_none() && root.memory_limit().is_none());
    }

    #[test]
    fn tags_of_living_and_dead_processes() {
        let own = run_tag(std::process::id());
        assert!(!is_orphan(&own));
        assert!(!is_orphan(&format!("{own}-7")) && !is_orphan(&format!("{own}-0-c7")));
        let (pid, start) = (std::process::id(), started(std::process::id()).unwrap_or(0));
        assert!(is_orphan(&format!("{pid}-{}", start + 1)));
        assert!(is_orphan("4194304-1") && is_orphan("4194304-1-0-c7"));
        // A reader in another time namespace sees another start, and counts the same.
        let (stat, elsewhere) = (
            "7 (a) b) S 1 7 7 0 -1 4 9 0 0 0 0 0 0 0 20 0 1 0",
            "103295 1 2",
        );
        let offsets = "monotonic 5 0\nboottime      1000 500000000\n";
        let there = start_ticks(&format!("{stat} {elsewhere}"), offsets);
        assert_eq!(there, start_ticks(&format!("{stat} 3245"), ""));
        assert_eq!(there, Some(3245));
        // Names that are not tags are left as they are.
        assert!(!is_orphan("else") && !is_orphan("vm-4194304-1") && !is_orphan("x-345"));
    }
}
