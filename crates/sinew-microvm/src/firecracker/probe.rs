//! Test whether Firecracker works on this host.

use super::Firecracker;
use crate::monitor::{Host, Monitor, restore};
use crate::probe::{Found, PROBE_BYTES, aside, closed_to_monitors, remembered};
use serde::{Deserialize, Serialize};
use sinew_sandbox::SandboxError;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Remembered result of a test.
#[derive(Debug, Serialize, Deserialize)]
struct Tried {
    /// True if all threads of a monitor with a machine had a filter of system calls.
    filtered: bool,
}

/// Firecracker, if it boots, saves and restores machines here. What came of it is remembered for
/// this program, this kernel and this image.
pub(crate) fn probe(
    host: &Arc<Host>,
    program: &Path,
    folder: &Path,
) -> Result<(Firecracker, Found), String> {
    fs::File::open(program).map_err(|e| format!("{}: {e}", program.display()))?;
    host.kvm
        .metadata()
        .map_err(|e| format!("it needs {}: {e}", host.kvm.display()))?;
    if let Some(why) = closed_to_monitors(&host.kvm) {
        return Err(why);
    }
    let mut monitor = Firecracker {
        host: Arc::clone(host),
        program: program.into(),
        walls: true,
    };
    let mut found = match aside(firecracker_alone(&monitor)) {
        Ok(found) => found,
        Err(why) => {
            monitor.walls = false;
            let without = aside(firecracker_alone(&monitor));
            Found {
                no_walls: Some(why.clone()),
                ..without.map_err(|e| format!("{e} (with walls: {why})"))?
            }
        }
    };
    let path = folder.join(format!("firecracker-{}.json", monitor.key(PROBE_BYTES)));
    let tried = remembered(&path, || aside(tried(&monitor)))?;
    if tried.filtered {
        found.filter = Ok("Firecracker's own filters, in every thread".into());
    }
    found.backend = "firecracker";
    found.how = format!("{}: boots, saves and restores machines", program.display());
    Ok((monitor, found))
}

async fn firecracker_alone(monitor: &Firecracker) -> Result<Found, String> {
    let started = monitor.started(PROBE_BYTES, Vec::new()).await;
    let (process, _control) = started.map_err(|e| e.to_string())?;
    Ok(Found::look(process.pid()))
}

/// Boots a machine, saves it and restores a clone.
async fn tried(monitor: &Firecracker) -> Result<Tried, String> {
    let text = |e: SandboxError| e.to_string().chars().take(300).collect::<String>();
    let machine = monitor.boot(PROBE_BYTES).await.map_err(text)?;
    let base = machine.finish().await.map_err(text)?;
    let clone = restore(monitor, &base).await.map_err(text)?;
    let filtered = filtered(clone.pid());
    clone.end().await;
    Ok(Tried { filtered })
}

/// True if every thread of a process has a filter of system calls.
fn filtered(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let mut threads = threads.into_iter().flatten().flatten().peekable();
    threads.peek().is_some()
        && threads.all(|t| {
            let status = fs::read_to_string(t.path().join("status"));
            status.is_ok_and(|s| s.contains("Seccomp:\t2\n"))
        })
}
