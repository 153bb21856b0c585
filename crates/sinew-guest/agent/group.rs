//! The group that holds what programs of a machine use. The machine's first program mounts it.

use std::fs;
use std::io::Result;

const FOLDER: &str = "/agent/group/programs";

/// What was counted since the machine started.
#[derive(Clone, Copy, Default)]
pub struct Counters {
    /// Processes killed for want of memory.
    pub ooms: u64,
    /// Processes that were refused.
    pub refusals: u64,
    /// Most memory at once.
    pub peak_bytes: u64,
}

fn write(file: &str, text: &str) -> Result<()> {
    fs::write(format!("{FOLDER}/{file}"), text)
}

/// Bounds of all programs together.
pub fn limit(memory_bytes: u64, processes: u64) -> Result<()> {
    write("memory.max", &memory_bytes.to_string())?;
    write("memory.oom.group", "0")?;
    write("pids.max", &processes.to_string())
}

/// Puts this process into it.
pub fn join() -> Result<()> {
    write("cgroup.procs", "0")
}

/// The peak is that of all programs so far.
pub fn counters() -> Counters {
    let read = |file: &str| fs::read_to_string(format!("{FOLDER}/{file}")).unwrap_or_default();
    let after = |text: &str, key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key));
        line.and_then(|l| l.trim().parse().ok()).unwrap_or(0)
    };
    Counters {
        ooms: after(&read("memory.events"), "oom_kill "),
        refusals: after(&read("pids.events"), "max "),
        peak_bytes: after(&read("memory.peak"), ""),
    }
}
