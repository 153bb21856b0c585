//! Limits of a monitor through cgroups, and their removal when a server was killed.
//!
//! Version 1 controllers where they are mounted, else version 2. Groups are called
//! `sinew-vm-PID-START-NUMBER` after the server that made them; a server that starts removes
//! those of servers that are gone, with what still runs in them.

use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};

const PREFIX: &str = "sinew-vm-";
/// Threads of a monitor.
const THREADS: u64 = 64;

/// Where groups can be made.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hierarchy {
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    v2: bool,
}

/// The groups of one monitor; removed by [`Group::remove`].
#[derive(Debug)]
pub(crate) struct Group {
    folders: Vec<PathBuf>,
    memory: Option<PathBuf>,
    v2: bool,
}

/// Clock ticks between the boot and the start of a process (`/proc/PID/stat`, field 22).
pub(crate) fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after = stat.rsplit(')').next()?;
    after.split_whitespace().nth(19)?.parse().ok()
}

/// Tag of everything that this server makes on the host.
pub(crate) fn run_tag() -> String {
    let pid = std::process::id();
    format!("{pid}-{}", started(pid).unwrap_or(0))
}

/// Whether the server with this tag (and whatever follows it) is gone.
pub(crate) fn is_orphan(tag: &str) -> bool {
    let mut parts = tag.split('-').map(str::parse::<u64>);
    match (parts.next(), parts.next()) {
        (Some(Ok(pid)), Some(Ok(start))) => {
            u32::try_from(pid).ok().and_then(started) != Some(start)
        }
        _ => false,
    }
}

fn usable(mount: &Path) -> Option<PathBuf> {
    let probe = mount.join(format!("{PREFIX}{}-probe", run_tag()));
    // Made by another provider of this process at this moment: it can be made.
    match fs::create_dir(&probe) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return None,
        _ => {}
    }
    let _ = fs::remove_dir(&probe);
    sweep(mount);
    Some(mount.into())
}

/// Kills what orphaned groups hold and removes them.
fn sweep(mount: &Path) {
    for entry in fs::read_dir(mount).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let tag = name.to_str().and_then(|n| n.strip_prefix(PREFIX));
        if tag.is_some_and(is_orphan) {
            for _ in 0..50 {
                kill_all(&entry.path());
                if fs::remove_dir(entry.path()).is_ok() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    }
}

fn kill_all(group: &Path) {
    let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for pid in pids.lines().filter_map(|l| l.parse().ok()) {
        let pid = nix::unistd::Pid::from_raw(pid);
        // It may be gone already.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
}

impl Hierarchy {
    /// Finds writable hierarchies and removes what dead servers left.
    pub(crate) fn probe() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mut found = Self::default();
        let mut unified = None;
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [_, path, kind, options, ..] = fields[..] else {
                continue;
            };
            let has = |name: &str| options.split(',').any(|o| o == name);
            match kind {
                "cgroup" if has("memory") => found.memory = usable(Path::new(path)),
                "cgroup" if has("pids") => found.pids = usable(Path::new(path)),
                "cgroup2" => unified = Some(PathBuf::from(path)),
                _ => {}
            }
        }
        if let Some(path) = unified.filter(|_| found.memory.is_none()) {
            let control = fs::read_to_string(path.join("cgroup.subtree_control"));
            let control = control.unwrap_or_default();
            if control.contains("memory") && control.contains("pids") {
                found.memory = usable(&path);
                found.v2 = found.memory.is_some();
            }
        }
        found
    }

    /// How memory is limited, or why not.
    pub(crate) fn how(&self) -> std::result::Result<&'static str, &'static str> {
        match (&self.memory, self.v2) {
            (Some(_), true) => Ok("cgroup v2 memory and pids controllers"),
            (Some(_), false) => Ok("cgroup v1 memory controller"),
            (None, _) => Err("no writable cgroup with the memory controller"),
        }
    }

    /// Makes the groups of a monitor that may take so much memory.
    pub(crate) fn create(&self, number: u64, memory_bytes: u64) -> Result<Group> {
        let name = format!("{PREFIX}{}-{number}", run_tag());
        let mut group = Group {
            folders: Vec::new(),
            memory: self.memory.as_ref().map(|m| m.join(&name)),
            v2: self.v2,
        };
        for mount in [&self.memory, &self.pids].into_iter().flatten() {
            let folder = mount.join(&name);
            fs::create_dir(&folder)?;
            group.folders.push(folder);
        }
        if let Some(memory) = &group.memory {
            let file = if self.v2 {
                "memory.max"
            } else {
                "memory.limit_in_bytes"
            };
            fs::write(memory.join(file), memory_bytes.to_string())?;
        }
        let pids = if self.v2 { &self.memory } else { &self.pids };
        if let Some(pids) = pids {
            fs::write(pids.join(&name).join("pids.max"), THREADS.to_string())?;
        }
        Ok(group)
    }
}

impl Group {
    /// Files that take the number of a process that joins.
    pub(crate) fn doors(&self) -> Vec<PathBuf> {
        let doors = self.folders.iter().map(|f| f.join("cgroup.procs"));
        doors.collect()
    }

    /// Memory that the monitor takes of its own now; shared memory of templates is not in it.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        let file = if self.v2 {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        let text = fs::read_to_string(self.memory.as_ref()?.join(file)).ok()?;
        text.trim().parse().ok()
    }

    /// Removes the groups; false if something still runs in them.
    pub(crate) fn remove(&self) -> bool {
        self.folders.iter().all(|f| match fs::remove_dir(f) {
            Ok(()) => true,
            Err(e) => e.kind() == std::io::ErrorKind::NotFound,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_of_the_living_and_the_dead() {
        assert!(!is_orphan(&run_tag()));
        assert!(!is_orphan(&format!("{}-7", run_tag())));
        let (pid, start) = (std::process::id(), started(std::process::id()).unwrap_or(0));
        assert!(is_orphan(&format!("{pid}-{}", start + 1)));
        assert!(is_orphan("4194304-1"));
        // Not a tag of ours: left alone.
        assert!(!is_orphan("else"));
    }
}
