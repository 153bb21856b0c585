//! The group that holds what programs of a machine use, and that of interpreters that wait for
//! them. The machine's first program mounts both.

use std::fs;
use std::io::{Result, Write};

const FOLDER: &str = "/agent/group/programs";
const WAITING: &str = "/agent/group/waiting";

/// What was counted since the machine started.
#[derive(Clone, Copy, Default)]
pub(super) struct Counters {
    /// Processes killed for want of memory.
    pub(super) ooms: u64,
    /// Processes that were refused.
    pub(super) refusals: u64,
    /// Most memory at once.
    pub(super) peak_bytes: u64,
}

fn write(file: &str, text: &str) -> Result<()> {
    fs::write(format!("{FOLDER}/{file}"), text)
}

/// Bounds of all programs together.
pub(super) fn limit(memory_bytes: u64, processes: u64) -> Result<()> {
    write("memory.max", &memory_bytes.to_string())?;
    write("memory.oom.group", "0")?;
    write("pids.max", &processes.to_string())
}

/// Puts this process into it.
pub(super) fn join() -> Result<()> {
    write("cgroup.procs", "0")
}

/// Puts this process among those that wait.
pub(super) fn wait() -> Result<()> {
    fs::write(format!("{WAITING}/cgroup.procs"), "0")
}

/// Puts another into it.
pub(super) fn add(pid: i32) -> Result<()> {
    write("cgroup.procs", &pid.to_string())
}

/// Whether it can be killed apart from those that wait.
pub(super) fn divides() -> bool {
    fs::exists(format!("{FOLDER}/cgroup.kill")).is_ok_and(|yes| yes)
        && fs::exists(WAITING).is_ok_and(|yes| yes)
}

/// Kills all programs; whoever they start meanwhile, too.
pub(super) fn kill() -> Result<()> {
    // It is there or it is not: nothing is made.
    let mut file = fs::File::options()
        .write(true)
        .open(format!("{FOLDER}/cgroup.kill"))?;
    file.write_all(b"1")
}

/// Whether no program is left but such as nobody has waited for yet.
pub(super) fn is_empty() -> bool {
    let events = fs::read_to_string(format!("{FOLDER}/cgroup.events"));
    events.is_ok_and(|e| e.contains("populated 0"))
}

/// The peak is that of all programs so far.
pub(super) fn counters() -> Counters {
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
