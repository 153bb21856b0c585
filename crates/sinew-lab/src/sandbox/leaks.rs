//! Makes, uses and destroys sandboxes in a loop, and counts their remains.
//!
//! Everything is counted on the host, by this process, before and after: processes below it, the
//! namespaces that they hold, control groups and files that carry its number, mounts at places of
//! sandboxes, and its own open files. A level passes if nothing grew.

use crate::attack::host::{descendants, of_sandboxes};
use serde::Serialize;
use sinew_sandbox::{Ending, ExecRequest, Program, SandboxError, SandboxProvider, SandboxSpec};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Loops before the first count: templates, interpreters that wait, folders of the run.
const WARM_UP: usize = 3;
/// Time that the kernel may take to free destroyed things.
const SETTLE: Duration = Duration::from_secs(60);
/// Deepest that folders of a run are walked.
const MAX_DEPTH: usize = 8;

/// Counts of things on the host that belong to sandboxes of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Footprint {
    /// Processes below this one.
    pub processes: usize,
    /// Namespaces that they and this one are in.
    pub namespaces: usize,
    /// Control groups that carry the number of this process or of one below it.
    pub groups: usize,
    /// Mounts at places of sandboxes.
    pub mounts: usize,
    /// Files and folders that carry the number of this process.
    pub files: usize,
    /// Open files of this process.
    pub open_files: usize,
}

/// Result of a loop.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeakReport {
    /// Level of the sandboxes.
    pub level: String,
    /// Number of sandboxes that were made, used and destroyed.
    pub loops: usize,
    /// Seconds of the loop.
    pub wall_s: f64,
    /// Counts before the loop.
    pub before: Footprint,
    /// Counts after the loop.
    pub after: Footprint,
    /// Counts that grew, in words; empty: nothing is left.
    pub left: Vec<String>,
}

/// Whether a name carries one of these process numbers as a separate part.
fn carries(name: &str, pids: &BTreeSet<String>) -> bool {
    name.starts_with("sinew") && name.split(['-', '.', '_']).any(|part| pids.contains(part))
}

/// Entries of a folder; none if it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let listed = std::fs::read_dir(folder).into_iter().flatten().flatten();
    listed.map(|e| e.path())
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Everything below a folder, itself included.
fn below(folder: &Path, depth: usize) -> usize {
    let real = folder.symlink_metadata().is_ok_and(|m| m.is_dir());
    if !real || depth >= MAX_DEPTH {
        return 1;
    }
    1 + entries(folder).map(|p| below(&p, depth + 1)).sum::<usize>()
}

/// Groups of runs: one or two levels below a hierarchy's root.
fn groups(pids: &BTreeSet<String>) -> usize {
    let mut found = 0;
    for hierarchy in entries(Path::new("/sys/fs/cgroup")).chain([PathBuf::from("/sys/fs/cgroup")]) {
        for group in entries(&hierarchy) {
            let here = usize::from(carries(&name(&group), pids));
            let inside = entries(&group).filter(|g| g.is_dir() && carries(&name(g), pids));
            found += here + inside.count();
        }
    }
    found
}

impl Footprint {
    /// Current counts.
    pub fn now() -> Self {
        let own = std::process::id();
        let below_us = descendants(own);
        let pids: BTreeSet<String> = below_us.iter().chain([&own]).map(u32::to_string).collect();
        let namespaces: BTreeSet<PathBuf> = pids
            .iter()
            .flat_map(|pid| entries(Path::new(&format!("/proc/{pid}/ns"))))
            .filter_map(|ns| std::fs::read_link(ns).ok())
            .collect();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mine = BTreeSet::from([own.to_string()]);
        // Folders of runs: by name in the temporary folder, by tag below `/run/sinew`.
        let tagged = entries(Path::new("/run/sinew")).filter(|p| {
            let name = name(p);
            name.split(['-', '.']).next() == Some(own.to_string().as_str())
        });
        let temporary = entries(&std::env::temp_dir()).filter(|p| carries(&name(p), &mine));
        Self {
            processes: below_us.len(),
            namespaces: namespaces.len(),
            groups: groups(&pids),
            mounts: mounts.lines().filter(|l| of_sandboxes(l)).count(),
            files: tagged.chain(temporary).map(|p| below(&p, 0)).sum(),
            open_files: entries(Path::new("/proc/self/fd")).count(),
        }
    }

    fn parts(self) -> [(&'static str, usize); 6] {
        [
            ("processes", self.processes),
            ("namespaces", self.namespaces),
            ("control groups", self.groups),
            ("mounts", self.mounts),
            ("files", self.files),
            ("open files", self.open_files),
        ]
    }

    /// Returns the counts that exceed those of `before`, in words.
    fn beyond(self, before: Self) -> Vec<String> {
        let pairs = self.parts().into_iter().zip(before.parts());
        let grown = pairs.filter(|((_, now), (_, then))| now > then);
        grown
            .map(|((what, now), (_, then))| format!("{} {what}", now - then))
            .collect()
    }
}

/// One sandbox from its request to its end.
async fn once(provider: &dyn SandboxProvider, spec: &SandboxSpec) -> Result<(), SandboxError> {
    let mut sandbox = provider.acquire(spec).await?;
    sandbox.write_file("folder/file", b"content").await?;
    let request = ExecRequest::new(
        Program::Python("print(len(open('folder/file').read()))".into()),
        Duration::from_secs(60),
    );
    let result = sandbox.exec(request).await;
    sandbox.destroy().await?;
    let result = result?;
    if result.ending == (Ending::Exited { code: 0 }) && result.stdout == b"7\n" {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&result.stderr).into_owned();
    Err(SandboxError::Died(format!(
        "the program of a loop ended with {:?}: {said}",
        result.ending
    )))
}

/// Makes, uses and destroys `loops` sandboxes one after the other, and looks what is left.
///
/// # Errors
/// If a sandbox cannot be made or used; what is left is in the report.
pub async fn run(provider: &dyn SandboxProvider, loops: usize) -> Result<LeakReport, SandboxError> {
    let spec = SandboxSpec::default();
    for _ in 0..WARM_UP {
        once(provider, &spec).await?;
    }
    // Counts that agree for a while: what was there before is being freed, and what comes next is being made
    // ready.
    let (mut before, mut still) = (Footprint::now(), 0);
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = Footprint::now();
        still = if now == before { still + 1 } else { 0 };
        before = now;
        if still == 5 {
            break;
        }
    }
    let begun = Instant::now();
    for _ in 0..loops {
        once(provider, &spec).await?;
    }
    let wall_s = begun.elapsed().as_secs_f64();
    let settled = Instant::now();
    let mut after = Footprint::now();
    while !after.beyond(before).is_empty() && settled.elapsed() < SETTLE {
        tokio::time::sleep(Duration::from_millis(100)).await;
        after = Footprint::now();
    }
    Ok(LeakReport {
        level: provider.level().into(),
        loops,
        wall_s,
        before,
        after,
        left: after.beyond(before),
    })
}

/// Remains after providers have ended, beyond the counts before they started: processes, control groups,
/// mounts and files. Namespaces and open files of this process are left out, as they change with its
/// runtimes.
pub fn after_end(before: Footprint) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let now = Footprint {
            namespaces: 0,
            open_files: 0,
            ..Footprint::now()
        };
        let left = now.beyond(before);
        if left.is_empty() || begun.elapsed() > SETTLE {
            return left
                .into_iter()
                .map(|what| format!("{what} after the end"))
                .collect();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grew_is_named() {
        let before = Footprint {
            processes: 2,
            files: 7,
            ..Footprint::default()
        };
        let after = Footprint {
            processes: 5,
            files: 6,
            mounts: 1,
            ..Footprint::default()
        };
        assert_eq!(after.beyond(before), ["3 processes", "1 mounts"]);
        assert!(before.beyond(before).is_empty());
    }

    #[test]
    fn folders_of_this_process_are_counted() {
        let folder = std::env::temp_dir().join(format!("sinew-leaks-{}-0", std::process::id()));
        let before = Footprint::now().files;
        std::fs::create_dir_all(folder.join("a/b")).unwrap();
        let with = Footprint::now().files;
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(with, before + 3);
        let pids = BTreeSet::from(["12".to_string()]);
        assert!(carries("sinew-12-0", &pids) && !carries("sinew-123-0", &pids));
    }
}
