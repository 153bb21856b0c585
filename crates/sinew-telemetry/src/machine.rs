//! Disk and memory of this machine, of which a run takes its share.

use crate::alerts::MachineReading;
use std::path::Path;

/// A look at the disk of a folder and at the memory.
pub(crate) fn look(folder: &Path) -> MachineReading {
    MachineReading {
        disk_free: disk_free(folder).ok(),
        memory_used: Memory::look().ok().map(|memory| memory.used()),
    }
}

/// Seconds of CPU time that the calling thread took.
pub(crate) fn thread_cpu_s() -> f64 {
    let took = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    took.tv_sec as f64 + took.tv_nsec as f64 / 1e9
}

/// Free bytes on the file system of a folder.
///
/// # Errors
/// If the folder cannot be examined.
pub fn disk_free(folder: &Path) -> std::io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Memory that this process may use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Memory of the machine.
    pub installed: u64,
    /// Memory of the machine that is not in use.
    pub available: u64,
    /// The lowest limit of the control groups of this process, and how much of it is in use.
    pub group: Option<(u64, u64)>,
}

impl Memory {
    /// Looks at `/proc/meminfo` and at the control groups of this process, of version 1 or 2.
    ///
    /// # Errors
    /// If the machine does not report its memory.
    pub fn look() -> std::io::Result<Self> {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let of = |key: &str| {
            let kib = text.lines().find_map(|l| l.strip_prefix(key))?;
            let kib = kib.trim().trim_end_matches("kB").trim();
            kib.parse::<u64>().ok().map(|kib| kib << 10)
        };
        let missing = |key: &str| std::io::Error::other(format!("/proc/meminfo has no {key}"));
        let installed = of("MemTotal:").ok_or_else(|| missing("MemTotal"))?;
        let group = of_groups().filter(|(limit, _)| *limit < installed);
        Ok(Self {
            installed,
            available: of("MemAvailable:").ok_or_else(|| missing("MemAvailable"))?,
            group,
        })
    }

    /// Bytes that are neither in use nor beyond a limit.
    pub fn free(&self) -> u64 {
        let group = self.group.map(|(limit, used)| limit.saturating_sub(used));
        group.map_or(self.available, |free| free.min(self.available))
    }

    /// Share of the memory in use: of the control group where it has a limit, else of the machine.
    fn used(&self) -> f64 {
        match self.group {
            Some((limit, used)) => used as f64 / limit.max(1) as f64,
            None => 1.0 - self.available as f64 / self.installed.max(1) as f64,
        }
    }
}

/// Returns the lowest memory limit of the control groups of this process, and the used part of it.
fn of_groups() -> Option<(u64, u64)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let (mut found, root) = (Vec::new(), Path::new("/sys/fs/cgroup"));
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let path = Path::new(path.trim_start_matches('/'));
        // In a container the path may be that of the host: then only the root of the hierarchy is there.
        for folder in path.ancestors() {
            found.extend(match controllers {
                "" => limit(&root.join(folder), ["max", "current"], "inactive_file "),
                "memory" => {
                    let folder = root.join("memory").join(folder);
                    let files = ["limit_in_bytes", "usage_in_bytes"];
                    limit(&folder, files, "total_inactive_file ")
                }
                _ => None,
            });
        }
    }
    found.into_iter().min()
}

/// Limit and use of one control group. Pages of files, which the kernel frees when it is asked, are not
/// counted.
fn limit(folder: &Path, [limit, used]: [&str; 2], files: &str) -> Option<(u64, u64)> {
    let read = |name: &str| std::fs::read_to_string(folder.join(format!("memory.{name}"))).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("stat").unwrap_or_default();
    let files = stat.lines().find_map(|l| l.strip_prefix(files));
    let files = files.and_then(|n| n.parse().ok()).unwrap_or(0);
    Some((number(limit)?, number(used)?.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_this_machine_is_known() {
        let memory = Memory::look().unwrap();
        assert!((0.0..=1.5).contains(&memory.used()), "{memory:?}");
        assert!(memory.free() <= memory.available && memory.available <= memory.installed);
    }

    #[test]
    fn a_control_group_has_a_limit_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let found = || limit(dir.path(), ["max", "current"], "inactive_file ");
        write("memory.current", "700\n");
        write("memory.stat", "anon 1\ninactive_file 200\n");
        assert_eq!(found(), None);
        write("memory.max", "max\n");
        assert_eq!(found(), None);
        write("memory.max", "1000\n");
        assert_eq!(found(), Some((1000, 500)));
    }
}
