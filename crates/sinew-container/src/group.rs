//! What the kernel counts for a container: its control groups, version 1 or 2.

use crate::state::alive;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often, and after how long, a group is tried again whose processes are still ending.
const REMOVALS: u32 = 100;
const REMOVAL_PAUSE: Duration = Duration::from_millis(10);

/// What was counted in one execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Events {
    pub(crate) oom_kills: u64,
    pub(crate) refusals: u64,
    pub(crate) peak_memory_bytes: u64,
}

/// The groups that a process is in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Group {
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<PathBuf>,
    v2: bool,
    before: Events,
}

/// Where a hierarchy is mounted: version 1 with one controller, or version 2.
fn mount(mounts: &str, controller: Option<&str>) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let here = match controller {
            Some(name) => kind == "cgroup" && options.split(',').any(|o| o == name),
            None => kind == "cgroup2",
        };
        here.then(|| path.into())
    })
}

/// Places where control groups are mounted.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut found: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (path, kind) = (fields.next()?, fields.next()?);
            matches!(kind, "cgroup" | "cgroup2").then(|| path.into())
        })
        .collect();
    found.dedup();
    found
}

/// Kills what is in a group and below it, and removes it; whether it is gone.
fn try_remove(folder: &Path) -> bool {
    if !folder.is_dir() {
        return true;
    }
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    let pids = text.lines().filter_map(|line| line.parse().ok());
    for pid in pids.filter_map(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            try_remove(&entry.path());
        }
    }
    fs::remove_dir(folder).is_ok()
}

/// Removes the groups of a container that is gone or is to go, in every hierarchy: a runtime that is
/// itself interrupted leaves them.
pub(crate) fn remove(name: &str) {
    let places: Vec<PathBuf> = hierarchies().iter().map(|h| h.join(name)).collect();
    for _ in 0..REMOVALS {
        if places.iter().filter(|place| !try_remove(place)).count() == 0 {
            return;
        }
        std::thread::sleep(REMOVAL_PAUSE);
    }
}

/// The run that made a container, by the name of its group.
fn run_of(group: &str) -> Option<&str> {
    let rest = group.strip_prefix("sinew-")?;
    let (run, container) = rest.rsplit_once("-c")?;
    let (run, provider) = run.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let fine = [container, provider]
        .into_iter()
        .chain(run.split('-'))
        .all(digits);
    (fine && run.split('-').count() == 2).then_some(run)
}

/// Removes what runs left that are gone.
pub(crate) fn sweep() {
    let mut left = std::collections::BTreeSet::new();
    for hierarchy in hierarchies() {
        for entry in fs::read_dir(hierarchy).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if run_of(&name).is_some_and(|run| !alive(run)) {
                left.insert(name);
            }
        }
    }
    left.iter().for_each(|name| remove(name));
}

impl Group {
    /// The groups of a process, as the host sees them.
    pub(crate) fn of(pid: i32) -> Self {
        let read = |path: String| fs::read_to_string(path).unwrap_or_default();
        let groups = read(format!("/proc/{pid}/cgroup"));
        let mounts = read("/proc/self/mounts".into());
        Self::parse(&groups, &mounts)
    }

    fn parse(groups: &str, mounts: &str) -> Self {
        let mut found = Self::default();
        let mut unified = None;
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            // Of the root itself nothing is told: that would be everybody's.
            let path = path.trim_start_matches('/');
            if path.is_empty() {
                continue;
            }
            let at = |controller| mount(mounts, controller).map(|m| m.join(path));
            if controllers.is_empty() {
                unified = at(None);
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
        if let Some(path) = unified.filter(|_| found.memory.is_none()) {
            found.memory = Some(path.clone());
            found.pids = Some(path.clone());
            found.cpu = Some(path);
            found.v2 = true;
        }
        found
    }

    fn text(path: Option<&PathBuf>, file: &str) -> Option<String> {
        fs::read_to_string(path?.join(file)).ok()
    }

    fn number(path: Option<&PathBuf>, file: &str) -> Option<u64> {
        Self::text(path, file)?.trim().parse().ok()
    }

    fn after(path: Option<&PathBuf>, file: &str, key: &str) -> u64 {
        let text = Self::text(path, file).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix(key));
        line.and_then(|l| l.trim().parse().ok()).unwrap_or(0)
    }

    /// The limit of memory, if one is in force.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        let file = if self.v2 {
            "memory.max"
        } else {
            "memory.limit_in_bytes"
        };
        // Version 1 tells of a huge number where there is none.
        Self::number(self.memory.as_ref(), file).filter(|&n| n < 1 << 60)
    }

    /// The limit of processes, if one is in force.
    pub(crate) fn process_limit(&self) -> Option<u64> {
        Self::number(self.pids.as_ref(), "pids.max")
    }

    /// Processors that it may use at most, if that is bounded.
    pub(crate) fn processors(&self) -> Option<f64> {
        let (quota, period) = if self.v2 {
            let text = Self::text(self.cpu.as_ref(), "cpu.max")?;
            let mut parts = text.split_whitespace().map(str::parse::<f64>);
            (parts.next()?.ok()?, parts.next()?.ok()?)
        } else {
            let number = |file| Self::number(self.cpu.as_ref(), file);
            // Version 1 tells of -1 where there is no bound.
            let (quota, period) = (number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?);
            (quota as f64, period as f64)
        };
        (period > 0.0).then(|| quota / period)
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        let file = if self.v2 {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        Self::number(self.memory.as_ref(), file).unwrap_or(0)
    }

    /// Processes and threads now.
    pub(crate) fn processes(&self) -> u64 {
        Self::number(self.pids.as_ref(), "pids.current").unwrap_or(0)
    }

    fn read(&self) -> Events {
        let (ooms, peak) = if self.v2 {
            ("memory.events", "memory.peak")
        } else {
            ("memory.oom_control", "memory.max_usage_in_bytes")
        };
        let memory = self.memory.as_ref();
        Events {
            oom_kills: Self::after(memory, ooms, "oom_kill "),
            refusals: Self::after(self.pids.as_ref(), "pids.events", "max "),
            peak_memory_bytes: Self::number(memory, peak).unwrap_or(0),
        }
    }

    /// Called before an execution: counters start from here.
    pub(crate) fn begin(&mut self) {
        if let Some(path) = self.memory.as_ref().filter(|_| !self.v2) {
            // Without it the peak is that of the container's life.
            let _ = fs::write(path.join("memory.max_usage_in_bytes"), "0");
        }
        self.before = self.read();
    }

    /// What happened since [`Group::begin`]; all zero once the groups are gone.
    pub(crate) fn events(&self) -> Events {
        let now = self.read();
        Events {
            oom_kills: now.oom_kills.saturating_sub(self.before.oom_kills),
            refusals: now.refusals.saturating_sub(self.before.refusals),
            peak_memory_bytes: now.peak_memory_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
        cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";

    #[test]
    fn both_versions_are_found() {
        let v1 = Group::parse("8:pids:/a\n4:memory:/b\n0::/c\n", MOUNTS);
        assert_eq!(v1.memory, Some("/sys/fs/cgroup/memory/b".into()));
        assert_eq!(v1.pids, Some("/sys/fs/cgroup/pids/a".into()));
        assert!(!v1.v2);
        let v2 = Group::parse("0::/c/d\n", MOUNTS);
        assert_eq!(v2.pids, Some("/sys/fs/cgroup/unified/c/d".into()));
        assert!(v2.v2);
    }

    #[test]
    fn groups_of_containers_name_their_run() {
        assert_eq!(run_of("sinew-12-345-0-c7"), Some("12-345"));
        for other in [
            "sinew-12-345",
            "sinew-12-345-0",
            "sinew-x-345-0-c7",
            "sinew--0-c7",
            "docker",
            "sinew-1-2-3-4-c5",
        ] {
            assert_eq!(run_of(other), None, "{other}");
        }
    }

    #[test]
    fn the_root_group_counts_nothing() {
        let root = Group::parse("4:memory:/\n0::/\n", MOUNTS);
        assert!(root.memory.is_none() && root.memory_limit().is_none());
    }
}
