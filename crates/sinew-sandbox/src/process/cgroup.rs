//! Limits of a whole sandbox through cgroups: version 1 controllers where they are mounted,
//! else version 2, else none (resource limits of each process remain).

use super::messages::CgroupEvents;
use crate::port::Limits;
use std::fs;
use std::path::{Path, PathBuf};

/// Where limits can be set on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    /// Version 1 folder of the memory controller, below which groups can be made.
    memory_v1: Option<PathBuf>,
    pids_v1: Option<PathBuf>,
    /// Version 2 folder with both controllers delegated.
    v2: Option<PathBuf>,
    /// Why something is missing.
    pub(crate) why: String,
}

/// The groups of one sandbox. Removed by [`Group::remove`].
#[derive(Debug)]
pub(crate) struct Group {
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    v2: bool,
    before: CgroupEvents,
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
                "cgroup" if has("memory") => found.memory_v1 = usable(Path::new(path)),
                "cgroup" if has("pids") => found.pids_v1 = usable(Path::new(path)),
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
        for dir in [&found.memory_v1, &found.pids_v1, &found.v2]
            .into_iter()
            .flatten()
        {
            sweep(dir);
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

    /// Makes the groups of a sandbox.
    pub(crate) fn create(&self, name: &str, limits: &Limits) -> Result<Group, String> {
        let group = Group {
            memory: self
                .memory_v1
                .as_ref()
                .or(self.v2.as_ref())
                .map(|p| p.join(name)),
            pids: self
                .pids_v1
                .as_ref()
                .or(self.v2.as_ref())
                .map(|p| p.join(name)),
            v2: self.v2.is_some(),
            before: CgroupEvents::default(),
        };
        for dir in group.dirs() {
            if let Err(e) = fs::create_dir(dir)
                && e.kind() != std::io::ErrorKind::AlreadyExists
            {
                return Err(format!("{}: {e}", dir.display()));
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
                let written = fs::write(dir.join(file), &value);
                // Swap accounting can be off; the first file is the limit.
                if i == 0 {
                    written.map_err(|e| format!("{}/{file}: {e}", dir.display()))?;
                }
            }
            if group.v2 {
                let _ = fs::write(dir.join("memory.swap.max"), "0");
            }
        }
        if let Some(dir) = &group.pids {
            // One more for the sandbox's own init.
            let value = (limits.processes + 1).to_string();
            fs::write(dir.join("pids.max"), value)
                .map_err(|e| format!("{}: {e}", dir.display()))?;
        }
        Ok(group)
    }
}

/// The folder of this process's own group, if a group can be made below it.
fn usable(mount: &Path) -> Option<PathBuf> {
    let probe = mount.join(format!("sinew-{}-probe", std::process::id()));
    fs::create_dir(&probe).ok()?;
    fs::remove_dir(&probe).ok()?;
    Some(mount.into())
}

/// Removes groups named `sinew-PID-...` whose process is gone.
fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|n| n.strip_prefix("sinew-"))
            .and_then(|n| n.split('-').next())
            .and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
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
    fn dirs(&self) -> impl Iterator<Item = &PathBuf> {
        let pids = self
            .pids
            .as_ref()
            .filter(|p| Some(*p) != self.memory.as_ref());
        self.memory.iter().chain(pids)
    }

    /// Files through which a process joins: write `0` to each.
    pub(crate) fn join_files(&self) -> Vec<PathBuf> {
        self.dirs().map(|d| d.join("cgroup.procs")).collect()
    }

    fn read(&self) -> CgroupEvents {
        let text = |dir: &Option<PathBuf>, file: &str| {
            let dir = dir.as_ref();
            dir.and_then(|d| fs::read_to_string(d.join(file)).ok())
                .unwrap_or_default()
        };
        let (ooms, peak) = if self.v2 {
            ("memory.events", "memory.peak")
        } else {
            ("memory.oom_control", "memory.max_usage_in_bytes")
        };
        CgroupEvents {
            oom_kills: number_after(&text(&self.memory, ooms), "oom_kill "),
            process_refusals: number_after(&text(&self.pids, "pids.events"), "max "),
            peak_memory_bytes: text(&self.memory, peak).trim().parse().unwrap_or(0),
        }
    }

    /// Called before an execution: counters start from here.
    pub(crate) fn begin(&mut self) {
        if let Some(dir) = self.memory.as_ref().filter(|_| !self.v2) {
            let _ = fs::write(dir.join("memory.max_usage_in_bytes"), "0");
        }
        self.before = self.read();
    }

    /// What happened since [`Group::begin`].
    pub(crate) fn events(&self) -> CgroupEvents {
        let now = self.read();
        CgroupEvents {
            oom_kills: now.oom_kills.saturating_sub(self.before.oom_kills),
            process_refusals: now
                .process_refusals
                .saturating_sub(self.before.process_refusals),
            peak_memory_bytes: now.peak_memory_bytes,
        }
    }

    /// Removes the groups; nothing may run in them any more.
    pub(crate) fn remove(&self) {
        for dir in self.dirs() {
            let _ = fs::remove_dir(dir);
        }
    }
}
