//! Limits of a whole sandbox through cgroups: version 1 controllers where they are mounted,
//! else version 2, else none (resource limits of each process remain).
//!
//! Folders are held open: the spawner leaves the host's file system behind.

use crate::spec::Limits;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

const MEMBERS: &str = "cgroup.procs";
/// Version 1 counts buffers of TCP apart from other memory, and only where this is set.
const TCP_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";

/// What buffers of TCP may take on top of the memory limit, under version 1.
fn tcp_bytes(memory_bytes: u64) -> u64 {
    (memory_bytes / 8).clamp(1 << 20, 64 << 20)
}

/// What the kernel counted for one execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupEvents {
    pub oom_kills: u64,
    pub process_refusals: u64,
    pub peak_memory_bytes: u64,
}

/// Where limits can be set on this host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hierarchy {
    /// Version 1 folder of the memory controller, below which groups can be made.
    memory_v1: Option<Rc<OwnedFd>>,
    pids_v1: Option<Rc<OwnedFd>>,
    /// Of the cpuacct controller.
    cpu_v1: Option<Rc<OwnedFd>>,
    /// Whether the memory of connections can be limited under version 1.
    tcp_v1: bool,
    /// Version 2 folder with both controllers delegated.
    v2: Option<Rc<OwnedFd>>,
    /// Why something is missing.
    pub(crate) why: String,
}

/// The groups of one sandbox. Removed by [`Group::remove`].
#[derive(Debug)]
pub(crate) struct Group {
    name: String,
    memory: Option<Rc<OwnedFd>>,
    pids: Option<Rc<OwnedFd>>,
    cpu: Option<Rc<OwnedFd>>,
    v2: bool,
    /// What [`Group::failures`] counted before this execution.
    before: (u64, u64),
}

fn open(dir: &OwnedFd, path: &str, flags: OFlag) -> std::io::Result<File> {
    Ok(openat(dir, path, flags | OFlag::O_CLOEXEC, Mode::empty())?.into())
}

fn write(dir: &OwnedFd, path: &str, text: &str) -> std::io::Result<()> {
    open(dir, path, OFlag::O_WRONLY)?.write_all(text.as_bytes())
}

fn read(dir: &OwnedFd, path: &str) -> String {
    let mut bytes = [0; 4096];
    let read = open(dir, path, OFlag::O_RDONLY).and_then(|mut f| f.read(&mut bytes));
    String::from_utf8_lossy(&bytes[..read.unwrap_or(0)]).into_owned()
}

impl Hierarchy {
    /// Finds writable hierarchies and removes groups that dead processes left behind.
    pub(crate) fn probe(mounts: &str) -> Self {
        let mut found = Self::default();
        let mut unified = None;
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let (Some(&path), Some(&kind), Some(&options)) =
                (fields.get(1), fields.get(2), fields.get(3))
            else {
                continue;
            };
            let has = |name: &str| options.split(',').any(|o| o == name);
            match kind {
                "cgroup" if has("memory") => {
                    found.memory_v1 = usable(Path::new(path));
                    found.tcp_v1 = Path::new(path).join(TCP_LIMIT).exists();
                }
                "cgroup" if has("pids") => found.pids_v1 = usable(Path::new(path)),
                "cgroup" if has("cpuacct") => found.cpu_v1 = usable(Path::new(path)),
                "cgroup2" => unified = Some(PathBuf::from(path)),
                _ => {}
            }
        }
        if let Some(path) = unified.filter(|_| found.memory_v1.is_none()) {
            let control = fs::read_to_string(path.join("cgroup.subtree_control"));
            let control = control.unwrap_or_default();
            if control.contains("memory") && control.contains("pids") {
                found.v2 = usable(&path);
            }
        }
        if found.memory_v1.is_none() && found.v2.is_none() {
            found.why = "no writable cgroup with the memory controller".into();
        }
        found
    }

    pub(crate) fn limits_memory(&self) -> Option<&'static str> {
        match (&self.memory_v1, &self.v2) {
            (Some(_), _) => Some("cgroup v1 memory controller"),
            (_, Some(_)) => Some("cgroup v2 memory controller"),
            _ => None,
        }
    }

    pub(crate) fn limits_processes(&self) -> Option<&'static str> {
        match (&self.pids_v1, &self.v2) {
            (Some(_), _) => Some("cgroup v1 pids controller"),
            (_, Some(_)) => Some("cgroup v2 pids controller"),
            _ => None,
        }
    }

    /// What counts the CPU time of an execution.
    pub(crate) fn counts_cpu(&self) -> Option<&'static str> {
        match (&self.cpu_v1, &self.v2) {
            (_, Some(_)) => Some("cgroup v2"),
            (Some(_), _) => Some("cgroup v1 cpuacct controller"),
            _ => None,
        }
    }

    /// What limits the memory of TCP connections, else why nothing does.
    pub(crate) fn limits_tcp(&self) -> Result<&'static str, &'static str> {
        match (&self.memory_v1, &self.v2) {
            (Some(_), _) if self.tcp_v1 => Ok("cgroup v1 memory.kmem.tcp.limit_in_bytes"),
            (Some(_), _) => Err("the memory controller of cgroup v1 counts no buffers of TCP here"),
            (_, Some(_)) => Ok("cgroup v2 memory controller"),
            _ => Err("no writable cgroup with the memory controller"),
        }
    }

    /// Makes the groups of a sandbox; with `tcp`, connections can be made in it.
    pub(crate) fn create(&self, name: String, limits: &Limits, tcp: bool) -> Result<Group, String> {
        let group = Group {
            name,
            memory: self.memory_v1.clone().or_else(|| self.v2.clone()),
            pids: self.pids_v1.clone().or_else(|| self.v2.clone()),
            cpu: self.v2.clone().or_else(|| self.cpu_v1.clone()),
            v2: self.v2.is_some(),
            before: (0, 0),
        };
        let failed = |what: &str, e: &dyn std::fmt::Display| format!("cgroup {what}: {e}");
        for dir in group.dirs() {
            match mkdirat(
                dir.as_ref(),
                group.name.as_str(),
                Mode::from_bits_truncate(0o755),
            ) {
                Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
                Err(e) => return Err(failed("mkdir", &e)),
            }
        }
        if let Some(dir) = &group.memory {
            let value = limits.memory_bytes.to_string();
            let files: &[&str] = if group.v2 {
                &["memory.max"]
            } else {
                &["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
            };
            for (i, file) in files.iter().enumerate() {
                let written = write(dir, &group.path(file), &value);
                // Swap accounting can be off; the first file is the limit.
                if i == 0 {
                    written.map_err(|e| failed(file, &e))?;
                }
            }
            if group.v2 {
                let _ = write(dir, &group.path("memory.swap.max"), "0");
            }
            if tcp && self.memory_v1.is_some() && self.tcp_v1 {
                let value = tcp_bytes(limits.memory_bytes).to_string();
                write(dir, &group.path(TCP_LIMIT), &value).map_err(|e| failed(TCP_LIMIT, &e))?;
            }
        }
        if let Some(dir) = &group.pids {
            // One more for the sandbox init.
            let value = (limits.processes + 1).to_string();
            write(dir, &group.path("pids.max"), &value).map_err(|e| failed("pids.max", &e))?;
        }
        Ok(group)
    }
}

/// The folder of this process's own group, if a group can be made below it; groups that dead
/// processes left there are removed.
fn usable(mount: &Path) -> Option<Rc<OwnedFd>> {
    let probe = mount.join(format!("sinew-{}-probe", std::process::id()));
    fs::create_dir(&probe).ok()?;
    fs::remove_dir(&probe).ok()?;
    sweep(mount);
    Some(Rc::new(OwnedFd::from(File::open(mount).ok()?)))
}

/// Tag of everything that this run makes on the host: process id and when it started, so that
/// a number used again is told apart.
pub(crate) fn run_tag(pid: u32) -> String {
    format!("{pid}-{}", started(pid).unwrap_or(0))
}

/// Clock ticks between the boot and the start of a process (`/proc/PID/stat`, field 22).
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after = stat.rsplit(')').next()?;
    after.split_whitespace().nth(19)?.parse().ok()
}

/// Removes groups named `sinew-PID-START-...` whose process is gone.
fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(tag) = name.to_str().and_then(|n| n.strip_prefix("sinew-")) else {
            continue;
        };
        let mut parts = tag.split('-').map(str::parse::<u64>);
        let (Some(Ok(pid)), Some(Ok(start))) = (parts.next(), parts.next()) else {
            continue;
        };
        if started(pid as u32) != Some(start) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn number_after(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|l| l.strip_prefix(key))
        .find_map(|rest| rest.trim().parse().ok())
        .unwrap_or(0)
}

impl Group {
    fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.name)
    }

    fn dirs(&self) -> impl Iterator<Item = &Rc<OwnedFd>> {
        let same = self.v2;
        self.memory
            .iter()
            .chain(self.pids.iter().filter(move |_| !same))
            .chain(self.cpu.iter().filter(move |_| !same))
    }

    /// Puts this process (0) or a child of it into the groups.
    pub(crate) fn join(&self, pid: i32) -> std::io::Result<()> {
        let pid = pid.to_string();
        self.dirs()
            .try_for_each(|dir| write(dir, &self.path(MEMBERS), &pid))
    }

    /// Folders, and the files in them to which a process writes 0 to join.
    pub(crate) fn members(&self) -> impl Iterator<Item = (RawFd, String)> {
        self.dirs().map(|dir| (dir.as_raw_fd(), self.path(MEMBERS)))
    }

    fn text(&self, dir: Option<&Rc<OwnedFd>>, file: &str) -> String {
        dir.map_or(String::new(), |d| read(d, &self.path(file)))
    }

    fn number(&self, dir: Option<&Rc<OwnedFd>>, file: &str) -> Option<u64> {
        self.text(dir, file).trim().parse().ok()
    }

    /// Processes and threads in it now; `None` where nothing counts them.
    pub(crate) fn processes(&self) -> Option<u64> {
        self.number(self.pids.as_ref(), "pids.current")
    }

    /// CPU time of all that ever ran in it; `None` where nothing counts it.
    pub(crate) fn cpu_us(&self) -> Option<u64> {
        match self.v2 {
            true => Some(number_after(
                &self.text(self.cpu.as_ref(), "cpu.stat"),
                "usage_usec ",
            )),
            false => Some(self.number(self.cpu.as_ref(), "cpuacct.usage")? / 1000),
        }
    }

    /// Memory of it now.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let file = if self.v2 {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        self.number(self.memory.as_ref(), file).unwrap_or(0)
    }

    fn peak_file(&self) -> &'static str {
        match self.v2 {
            true => "memory.peak",
            false => "memory.max_usage_in_bytes",
        }
    }

    /// Kills for lack of memory and refusals of processes, ever.
    fn failures(&self) -> (u64, u64) {
        let ooms = match self.v2 {
            true => "memory.events",
            false => "memory.oom_control",
        };
        (
            number_after(&self.text(self.memory.as_ref(), ooms), "oom_kill "),
            number_after(&self.text(self.pids.as_ref(), "pids.events"), "max "),
        )
    }

    /// Called before an execution: its counters start from here.
    pub(crate) fn begin(&mut self) {
        if let Some(dir) = self.memory.as_ref().filter(|_| !self.v2) {
            let _ = write(dir, &self.path("memory.max_usage_in_bytes"), "0");
        }
        self.before = self.failures();
    }

    /// What happened since then; `failed` if the program did, else nothing that tells why is read.
    pub(crate) fn events(&self, failed: bool) -> CgroupEvents {
        let now = if failed { self.failures() } else { self.before };
        let peak = self.number(self.memory.as_ref(), self.peak_file());
        CgroupEvents {
            oom_kills: now.0.saturating_sub(self.before.0),
            process_refusals: now.1.saturating_sub(self.before.1),
            peak_memory_bytes: peak.unwrap_or(0),
        }
    }

    /// Removes the groups; false if something still runs in them.
    pub(crate) fn remove(&self) -> bool {
        self.dirs().all(|dir| {
            let removed = unlinkat(dir.as_ref(), self.name.as_str(), UnlinkatFlags::RemoveDir);
            matches!(removed, Ok(()) | Err(nix::errno::Errno::ENOENT))
        })
    }
}
