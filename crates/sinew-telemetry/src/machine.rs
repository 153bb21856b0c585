//! Free disk and memory of a run's machine.

use crate::alerts::MachineReading;
use std::path::Path;

/// A look at the disk of a folder and at the memory.
pub(crate) fn look(folder: &Path) -> MachineReading {
    MachineReading {
        disk_free: rustix::fs::statvfs(folder)
            .ok()
            .map(|s| s.f_bavail.saturating_mul(s.f_frsize)),
        memory_used: memory_used(),
    }
}

/// Seconds of CPU time that the calling thread took.
pub(crate) fn thread_cpu_s() -> f64 {
    let took = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    took.tv_sec as f64 + took.tv_nsec as f64 / 1e9
}

/// Share of the memory in use: of the control group where it has a limit, else of the machine.
fn memory_used() -> Option<f64> {
    let number = |path: &str| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<f64>()
            .ok()
    };
    let group = |used: &str, limit: &str| {
        let (used, limit) = (number(used)?, number(limit)?);
        // A limit beyond any machine stands for none.
        (limit > 0.0 && limit < 1e15).then(|| used / limit)
    };
    // Control groups of version 2, without the pages of files, which the kernel frees on demand.
    let stat = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let files = stat
        .lines()
        .find_map(|l| l.strip_prefix("inactive_file ")?.parse::<f64>().ok());
    let two = group("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max");
    let limit = number("/sys/fs/cgroup/memory.max").unwrap_or(f64::INFINITY);
    two.map(|used| used - files.unwrap_or(0.0) / limit)
        .or_else(|| {
            let text = std::fs::read_to_string("/proc/meminfo").ok()?;
            let of = |key: &str| {
                let line = text.lines().find(|l| l.starts_with(key))?;
                line.split_whitespace().nth(1)?.parse::<f64>().ok()
            };
            Some(1.0 - of("MemAvailable:")? / of("MemTotal:")?)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_this_machine_is_known() {
        assert!(memory_used().is_some_and(|used| (0.0..=1.5).contains(&used)));
    }
}
