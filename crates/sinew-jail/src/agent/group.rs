//! The group that accounts for the programs of a machine, and that of interpreters that wait for them. The
//! machine's first program mounts both.
//!
//! The groups are of version 2, at `/agent/group`, and exist only in machines: the groups of a container
//! belong to its engine. Programs share one group, which bounds memory and processes of all of them and can
//! be killed as one.

use crate::cgroup::{Bounds, CgroupEvents, Group};
use std::fs;
use std::io::{Error, Result};

const FOLDER: &str = "/agent/group/programs";
const WAITING: &str = "/agent/group/waiting";

fn programs() -> Group {
    Group::unified(FOLDER.into())
}

/// Bounds of all programs together.
pub(super) fn limit(memory_bytes: u64, processes: u64) -> Result<()> {
    let bounds = Bounds {
        memory_bytes,
        processes,
        tcp: false,
    };
    programs().limit(&bounds, false).map_err(Error::other)?;
    fs::write(format!("{FOLDER}/memory.oom.group"), "0")
}

/// Puts this process (0) or another into it.
pub(super) fn join(pid: i32) -> Result<()> {
    programs().join(pid)
}

/// Puts this process among those that wait.
pub(super) fn wait() -> Result<()> {
    Group::unified(WAITING.into()).join(0)
}

/// Whether it can be killed apart from those that wait.
pub(super) fn divides() -> bool {
    let exists = |path: &str| fs::exists(path).is_ok_and(|yes| yes);
    exists(&format!("{FOLDER}/cgroup.kill")) && exists(WAITING)
}

/// Kills all programs; those that they start meanwhile, too.
pub(super) fn kill() -> Result<()> {
    programs().kill()
}

/// Whether no program is left but such as wait to be reaped.
pub(super) fn is_empty() -> bool {
    programs().is_empty()
}

/// Reads the counts since the machine started; the peak is that of all programs so far.
pub(super) fn counters() -> CgroupEvents {
    programs().events(true)
}
