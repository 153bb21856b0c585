//! What this host can do, found out by doing it.

use crate::jail::{self, Plan};
use crate::provider::{io, unavailable};
use crate::qemu::{Accel, Qemu, SECCOMP};
use crate::ram;
use sinew_sandbox::{Protection, SandboxError};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a monitor without a machine may take to get behind its walls.
const START: Duration = Duration::from_secs(10);
/// Over so long the processor's clock is compared with the system's.
const COMPARE: Duration = Duration::from_millis(20);
/// Memory of the machine that shows whether KVM works.
const PROBE_BYTES: u64 = 256 << 20;

/// What was found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    /// What executes guests, and why.
    pub(crate) accel: String,
    /// Why monitors have no namespaces and no root of their own.
    no_walls: Option<String>,
    /// `/proc/PID/status` of a monitor behind its walls.
    status: String,
    /// Whether its network is not the host's.
    own_network: bool,
}

fn protection(name: &str, enforced: bool, how: impl Into<String>) -> Protection {
    Protection {
        name: name.into(),
        enforced,
        how: how.into(),
    }
}

impl Found {
    fn field(&self, name: &str) -> &str {
        let line = self.status.lines().find_map(|l| l.strip_prefix(name));
        line.unwrap_or_default().trim()
    }

    /// As the result of each execution tells them.
    pub(crate) fn protections(&self, qemu: &Qemu) -> Vec<Protection> {
        let none = self.field("CapEff:").chars().all(|c| c == '0')
            && self.field("CapPrm:").chars().all(|c| c == '0');
        let user = self.field("Uid:").split_whitespace().next();
        let user = user.and_then(|u| u.parse::<u32>().ok()).unwrap_or(0);
        let walls = self.no_walls.as_deref();
        let memory = qemu.hierarchy.how();
        vec![
            protection(
                "machine",
                true,
                format!("a kernel of its own; {}", self.accel),
            ),
            protection("network", true, "the machine has no network device"),
            protection(
                "monitor_network",
                self.own_network,
                walls.unwrap_or("an empty network namespace"),
            ),
            protection(
                "monitor_files",
                walls.is_none(),
                walls.unwrap_or("a root of its own: system folders read-only, nothing to write"),
            ),
            protection(
                "monitor_user",
                user != 0,
                if user == 0 {
                    "the server's own user"
                } else {
                    "a user for each machine"
                },
            ),
            protection("monitor_capabilities", none, "all sets empty"),
            protection(
                "monitor_seccomp",
                self.field("Seccomp:") == "2",
                "QEMU's own filter: no programs, no other users, no scheduling",
            ),
            protection("no_new_privs", self.field("NoNewPrivs:") == "1", "prctl"),
            protection(
                "memory",
                memory.is_ok(),
                match memory {
                    Ok(how) => format!("the machine's size; its monitor: {how}"),
                    Err(why) => format!("the machine's size; its monitor is not limited: {why}"),
                },
            ),
            protection(
                "guest_walls",
                true,
                "inside, programs have the walls of the process level: user, seccomp, landlock, limits, a cgroup",
            ),
        ]
    }
}

/// Ends a child when it goes.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a monitor without a machine and looks at it from outside.
fn behind_walls(qemu: &Qemu) -> Result<Found, String> {
    let log = ram::scratch("sinew-vm-log").map_err(|e| e.to_string())?;
    let args = [
        "-M",
        "none",
        "-nodefaults",
        "-display",
        "none",
        "-sandbox",
        SECCOMP,
    ];
    let plan = Plan {
        args: args.map(String::from).to_vec(),
        ..qemu.plan(Vec::new(), Vec::new(), None)
    };
    let plan = serde_json::to_string(&plan).map_err(|e| e.to_string())?;
    let mut command = Command::new(&qemu.helper);
    command
        .args([jail::FLAG, &plan])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log.try_clone().map_err(|e| e.to_string())?);
    let child = command
        .spawn()
        .map_err(|e| format!("{}: {e}", qemu.helper.display()))?;
    let mut child = Ends(child);
    let proc = PathBuf::from(format!("/proc/{}", child.0.id()));
    let began = Instant::now();
    while began.elapsed() < START {
        let status = fs::read_to_string(proc.join("status")).unwrap_or_default();
        if status.contains("Seccomp:\t2\n") {
            let network = |p: &Path| fs::read_link(p.join("ns/net")).ok();
            return Ok(Found {
                own_network: network(&proc) != network(Path::new("/proc/self")),
                status,
                ..Found::default()
            });
        }
        if let Ok(Some(ended)) = child.0.try_wait() {
            let said = ram::content(&log, 4096).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).trim().to_owned();
            return Err(format!("{ended}: {said}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(format!(
        "its filter of system calls is not in force after {START:?}"
    ))
}

/// Finds out what walls monitors get and what executes guests.
pub(crate) fn host(
    qemu: &mut Qemu,
    wanted: Option<Accel>,
    folder: &Path,
) -> Result<Found, SandboxError> {
    let mut found = match behind_walls(qemu) {
        Ok(found) => found,
        Err(why) => {
            qemu.walls = false;
            let without = behind_walls(qemu).map_err(|e| {
                let program = qemu.program.display();
                unavailable(format!(
                    "{program} cannot be started: {e} (with walls: {why})"
                ))
            })?;
            Found {
                no_walls: Some(why),
                ..without
            }
        }
    };
    found.accel = match wanted {
        Some(Accel::Kvm) => "KVM, as asked for".into(),
        Some(Accel::Tcg) => "emulated by QEMU, as asked for".into(),
        None => match kvm(qemu, folder)? {
            Ok(()) => {
                qemu.accel = Accel::Kvm;
                "KVM: a machine boots with it".into()
            }
            Err(why) => {
                qemu.accel = Accel::Tcg;
                format!("emulated by QEMU; KVM: {why}")
            }
        },
    };
    Ok(found)
}

/// Runs to its end on a thread of its own: who calls may be on a runtime already.
fn aside(work: impl Future<Output = Result<(), String>> + Send) -> Result<(), String> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|e| e.to_string())?;
            runtime.block_on(work)
        });
        thread
            .join()
            .unwrap_or_else(|_| Err("the probe failed".into()))
    })
}

/// Adds what a Firecracker that is named can do here, found out by booting, saving and restoring.
pub(crate) fn firecracker(mut found: Found, qemu: &Qemu, program: Option<&Path>) -> Found {
    let Some(program) = program else {
        return found;
    };
    let told = match qemu.accel {
        Accel::Tcg => Err("not tried: it needs KVM, and machines are emulated".into()),
        Accel::Kvm => {
            let folder = qemu.run.join("firecracker");
            let told = aside(crate::firecracker::probe(program, &qemu.image, &folder));
            // Gone with the folder of this run at the latest.
            let _ = fs::remove_dir_all(&folder);
            told
        }
    };
    let told = told.map_or_else(|e| e, |()| "boots, saves and restores machines".into());
    let note = format!("; {}: {told}", program.display());
    found.accel.push_str(&note);
    found
}

/// A monitor never runs as root, and joins the group of the device.
fn closed_to_monitors() -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata("/dev/kvm").ok()?.permissions().mode() & 0o777;
    let closed = nix::unistd::Uid::effective().is_root() && mode & 0o066 == 0;
    closed.then(|| {
        format!("/dev/kvm is for root alone (mode {mode:o}), and monitors are not root: chgrp kvm /dev/kvm, chmod 660 /dev/kvm")
    })
}

/// Boots a machine with KVM: that `/dev/kvm` can be opened says little. What came of it is
/// remembered for this kernel and this image.
fn kvm(qemu: &mut Qemu, folder: &Path) -> Result<Result<(), String>, SandboxError> {
    let device = fs::File::options().read(true).write(true).open("/dev/kvm");
    if let Err(e) = device {
        return Ok(Err(format!("/dev/kvm: {e}")));
    }
    if let Some(why) = closed_to_monitors() {
        return Ok(Err(why));
    }
    qemu.accel = Accel::Kvm;
    let version = fs::read("/proc/version").map_err(|e| io("/proc/version", e))?;
    let key = crate::image::key_of(&[&version, qemu.key(PROBE_BYTES).as_bytes()]);
    let path = folder.join(format!("kvm-{key}.json"));
    let remembered = fs::read(&path).ok();
    if let Some(told) = remembered.and_then(|b| serde_json::from_slice(&b).ok()) {
        return Ok(told);
    }
    let tried = aside(async {
        let ram = ram::Ram::new(PROBE_BYTES).map_err(|e| e.to_string())?;
        let machine = qemu.boot(&ram).await.map_err(|e| e.to_string())?;
        machine.end().await;
        Ok(())
    });
    let told = tried.map_err(|e| {
        let short: String = e.chars().take(300).collect();
        format!("/dev/kvm is there, but no machine boots with it: {short}")
    });
    let bytes = serde_json::to_vec(&told).map_err(|e| io("remember the probe", e))?;
    // Not remembered: it is tried again.
    let _ = fs::write(&path, bytes);
    Ok(told)
}

/// Frequency of the processor's time stamp counter, rounded to MHz so that it names a template.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "reads the processor's clock")]
pub(crate) fn tsc_khz() -> u64 {
    let now = || {
        // SAFETY: the instruction reads a counter; every x86-64 processor has it.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        (ticks, Instant::now())
    };
    let measure = || {
        let (from, began) = now();
        std::thread::sleep(COMPARE);
        let (to, ended) = now();
        let us = (ended - began).as_nanos() as f64 / 1e3;
        (to.wrapping_sub(from) as f64 / us).round() as u64
    };
    let mut mhz = [measure(), measure(), measure()];
    mhz.sort_unstable();
    mhz[1] * 1000
}

/// Other processors' guests find out their clock.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn tsc_khz() -> u64 {
    1_000_000
}
