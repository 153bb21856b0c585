//! Abilities of this host, found by trying them.

use crate::monitor::{Host, KVM, Launch, restore};
use crate::provider::{MicrovmConfig, io, unavailable};
use crate::qemu::{Accel, Qemu, SECCOMP};
use crate::template::Templates;
use serde::{Deserialize, Serialize};
use sinew_sandbox::{Ending, ExecRequest, Program, Protection, SandboxError, SandboxSpec};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time of a monitor without a machine to get behind its walls.
const START: Duration = Duration::from_secs(60);
/// Time over which the processor's clock is compared with the system's.
const COMPARE: Duration = Duration::from_millis(20);
/// Memory of the machine that shows whether KVM works.
const PROBE_BYTES: u64 = 256 << 20;

/// Maximum time of the program that inspects a guest, emulated on a busy machine.
const LOOK_TIME: Duration = Duration::from_secs(120);

/// Reason why a probe did not succeed.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ProbeError(String);

impl ProbeError {
    fn new(why: impl std::fmt::Display) -> Self {
        Self(why.to_string())
    }
}

/// Result of the probes.
#[derive(Clone, Debug)]
pub(crate) struct ProbeResult {
    /// Executor of guests, and the reason.
    pub(crate) how: String,
    /// Reason why machines are emulated though that was not asked for.
    pub(crate) no_kvm: Option<String>,
    /// Reason why monitors have no namespaces and no separate root. `None`: they have.
    pub(crate) no_walls: Option<String>,
    /// `/proc/PID/status` of a monitor behind its walls.
    pub(crate) status: String,
    /// True if its network namespace is not the host's.
    pub(crate) own_network: bool,
    /// Its filter of system calls, or the reason why it has none.
    pub(crate) filter: Result<String, ProbeError>,
    /// Walls around programs inside of an inspected machine, or the reason why they are not known.
    pub(crate) guest: Result<String, ProbeError>,
}

impl ProbeResult {
    /// The host's view of a monitor.
    fn look(pid: u32) -> Self {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let network = |p: &Path| fs::read_link(p.join("ns/net")).ok();
        Self {
            how: String::new(),
            no_kvm: None,
            no_walls: None,
            status: fs::read_to_string(proc.join("status")).unwrap_or_default(),
            own_network: network(&proc) != network(Path::new("/proc/self")),
            filter: Err(ProbeError::new("none is in force")),
            guest: Err(ProbeError::new("no machine was looked into")),
        }
    }
}

/// One row of the report.
fn protection(name: &str, enforced: bool, how: impl Into<String>) -> Protection {
    Protection {
        name: name.into(),
        enforced,
        how: how.into(),
    }
}

impl ProbeResult {
    /// Value of a line of `status`.
    fn field(&self, name: &str) -> &str {
        let line = self.status.lines().find_map(|l| l.strip_prefix(name));
        line.unwrap_or_default().trim()
    }

    /// Rows of the report.
    pub(crate) fn protections(&self, host: &Host) -> Vec<Protection> {
        let none = self.field("CapEff:").chars().all(|c| c == '0')
            && self.field("CapPrm:").chars().all(|c| c == '0');
        let user = self.field("Uid:").split_whitespace().next();
        let user = user.and_then(|u| u.parse::<u32>().ok()).unwrap_or(0);
        let walls = self.no_walls.as_deref();
        let memory = host.hierarchy.limits_memory();
        let filter = self.filter.as_ref();
        vec![
            protection(
                "machine",
                true,
                format!("a kernel of its own; {}", self.how),
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
                filter.is_ok(),
                filter.map_or_else(|e| e.0.as_str(), String::as_str),
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
            match &self.guest {
                Ok(how) => protection("guest_walls", true, how.as_str()),
                Err(why) => protection("guest_walls", false, why.to_string()),
            },
        ]
    }
}

/// Starts QEMU without a machine and looks at it from outside.
async fn qemu_alone(qemu: &Qemu) -> Result<ProbeResult, ProbeError> {
    let args = [
        "-M",
        "none",
        "-nodefaults",
        "-display",
        "none",
        "-sandbox",
        SECCOMP,
    ];
    let launch = Launch {
        kvm: false,
        ..qemu.launch(PROBE_BYTES, Vec::new(), args.map(String::from).to_vec())
    };
    let process = qemu.host.launch(launch).await;
    let mut process = process.map_err(ProbeError::new)?;
    let began = Instant::now();
    while began.elapsed() < START {
        let mut found = ProbeResult::look(process.pid());
        if found.field("Seccomp:") == "2" {
            let how = "QEMU's own filter: no programs, no other users, no scheduling";
            found.filter = Ok(how.into());
            return Ok(found);
        }
        if let Some(ended) = process.ended() {
            return Err(ProbeError(ended));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Err(ProbeError(format!(
        "its filter of system calls is not in force after {START:?}"
    )))
}

/// QEMU with walls, or without them if it cannot be started behind them.
pub(crate) fn qemu(
    config: &MicrovmConfig,
    host: &Arc<Host>,
) -> Result<(Qemu, ProbeResult), SandboxError> {
    if !config.qemu.is_file() {
        let path = config.qemu.display();
        return Err(unavailable(format!(
            "no QEMU at {path}: install qemu-system-x86"
        )));
    }
    let mut qemu = Qemu {
        host: Arc::clone(host),
        program: config.qemu.clone(),
        accel: config.accel.unwrap_or(Accel::Tcg),
        tsc_khz: tsc_khz(),
        walls: true,
    };
    let mut found = match aside(qemu_alone(&qemu)) {
        Ok(found) => found,
        Err(why) => {
            qemu.walls = false;
            let without = aside(qemu_alone(&qemu)).map_err(|e| {
                let program = qemu.program.display();
                unavailable(format!(
                    "{program} cannot be started: {e} (with walls: {why})"
                ))
            })?;
            ProbeResult {
                no_walls: Some(why.0),
                ..without
            }
        }
    };
    found.how = match config.accel {
        Some(Accel::Kvm) => "QEMU; KVM, as asked for".into(),
        Some(Accel::Tcg) => "QEMU, which emulates, as asked for".into(),
        None => match kvm(&mut qemu, &config.folder)? {
            Ok(()) => {
                qemu.accel = Accel::Kvm;
                "QEMU; KVM: a machine boots with it".into()
            }
            Err(why) => {
                qemu.accel = Accel::Tcg;
                let how = format!("QEMU, which emulates; KVM: {why}");
                found.no_kvm = Some(why.0);
                how
            }
        },
    };
    Ok((qemu, found))
}

/// Result of an earlier probe from a file, else that of `find`, which is written to the file.
fn remembered<T: Serialize + for<'a> Deserialize<'a>>(
    path: &Path,
    find: impl FnOnce() -> Result<T, ProbeError>,
) -> Result<T, ProbeError> {
    let kept = fs::read(path).ok();
    if let Some(told) = kept.and_then(|b| serde_json::from_slice::<Result<T, ProbeError>>(&b).ok())
    {
        let again = |e| {
            let path = path.display();
            ProbeError(format!("{e} (found before: remove {path} to try again)"))
        };
        return told.map_err(again);
    }
    let told = find();
    // Not remembered: it is tried again.
    let _ = serde_json::to_vec(&told).map(|bytes| fs::write(path, bytes));
    told
}

/// Runs a future on a separate thread, because the caller may be inside of a runtime.
fn aside<T: Send>(
    work: impl Future<Output = Result<T, ProbeError>> + Send,
) -> Result<T, ProbeError> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(ProbeError::new)?;
            runtime.block_on(work)
        });
        thread
            .join()
            .unwrap_or_else(|_| Err(ProbeError::new("the probe failed")))
    })
}

/// Prints the state of a program inside, and the files that it can open but must not.
const LOOK: &str = "
import os
for line in open('/proc/self/status'):
    if line.split(':')[0] in ('Uid', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp'): print(line.strip())
for path in ('/agent', '/proc/1/environ', '/dev/ttyS0', '/dev/vport0p1'):
    try: os.close(os.open(path, os.O_RDONLY)); print('reads', path)
    except OSError: pass
";
/// Takes more memory than its limit.
const TAKE: &str = "x = []\nwhile True: x.append(bytearray(b'x') * (1 << 20))";
/// Memory of the program that does.
const LOOK_BYTES: u64 = 64 << 20;

/// First weakness in the output of [`LOOK`].
fn weak(printed: &str, landlock_abi: u64) -> Option<String> {
    let field = |name: &str| {
        let line = printed.lines().find_map(|l| l.strip_prefix(name));
        line.map(|l| l.trim_start_matches(':').trim())
    };
    let zero = |name: &&str| field(name).is_none_or(|v| !v.trim_matches('0').is_empty());
    let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
    if let Some(set) = sets.iter().find(|s| zero(s)) {
        return Some(format!("its {set} is not empty"));
    }
    let user = field("Uid").and_then(|u| u.split_whitespace().next());
    if user.is_none_or(|u| u == "0") {
        return Some("programs are its first user".into());
    }
    if field("NoNewPrivs") != Some("1") || field("Seccomp") != Some("2") {
        return Some("programs have no filter of system calls".into());
    }
    if let Some(line) = printed.lines().find(|l| l.starts_with("reads ")) {
        return Some(format!("a program {line}"));
    }
    (landlock_abi == 0).then(|| "its kernel has no landlock".into())
}

/// Inspects the walls inside of a machine that is set up like a sandbox: user, capabilities, filters,
/// devices, and the memory limit.
async fn inside(guest: &mut sinew_sandbox::guest::Guest) -> Result<String, ProbeError> {
    let ran = async |guest: &mut sinew_sandbox::guest::Guest, code: &str| {
        let request = ExecRequest::new(Program::Python(code.into()), LOOK_TIME);
        let outcome = guest.exec(&request, &[], 1 << 16, None).await;
        outcome.map_err(ProbeError::new)
    };
    let looked = ran(guest, LOOK).await?;
    let printed = String::from_utf8_lossy(&looked.stdout).into_owned();
    let abi = guest.hello().landlock_abi;
    if let Some(why) = weak(&printed, abi) {
        return Err(ProbeError(format!("inside: {why}")));
    }
    let bomb = ran(guest, TAKE).await?.ended;
    if bomb.ending(bomb.oom_kills, bomb.refusals, f64::MAX) != Ending::OutOfMemory {
        return Err(ProbeError(format!(
            "inside: a program that takes memory without end ended with {:?}",
            bomb.exit
        )));
    }
    Ok(format!(
        "seen inside a machine: user, no capabilities, no_new_privs, seccomp, landlock {abi}; a memory limit killed"
    ))
}

/// Makes a machine as for a sandbox and inspects it. A good result is remembered for this image and
/// this QEMU.
pub(crate) fn guest_walls(
    mut found: ProbeResult,
    qemu: &Qemu,
    templates: &Templates,
    folder: &Path,
) -> ProbeResult {
    let mut spec = SandboxSpec::default();
    spec.limits.memory_bytes = LOOK_BYTES;
    let path = folder.join(format!("walls-{}.json", qemu.key(PROBE_BYTES)));
    let remembered = fs::read(&path).ok();
    if let Some(how) = remembered.and_then(|b| serde_json::from_slice::<String>(&b).ok()) {
        found.guest = Ok(how);
        return found;
    }
    let mut seen = Err(ProbeError::new("no machine was looked into"));
    let looked = aside(async {
        let setup = crate::provider::setup_of(&spec);
        let base = templates.base(qemu, PROBE_BYTES, &setup).await;
        let base = base.map_err(ProbeError::new)?;
        let machine = restore(qemu, &base).await;
        let mut machine = machine.map_err(ProbeError::new)?;
        seen = inside(&mut machine.guest).await;
        machine.end().await;
        Ok(())
    });
    found.guest = looked.and(seen);
    if let Ok(how) = &found.guest {
        // Not remembered: it is looked at again.
        let _ = serde_json::to_vec(how).map(|bytes| fs::write(&path, bytes));
    }
    found
}

/// Reason why monitors cannot open the device of KVM: only root can, and they run as other users.
fn closed_to_monitors(kvm: &Path) -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(kvm).ok()?.permissions().mode() & 0o777;
    let closed = nix::unistd::Uid::effective().is_root() && mode & 0o066 == 0;
    closed.then(|| {
        let kvm = kvm.display();
        format!("{kvm} is for root alone (mode {mode:o}), and monitors are not root: chgrp kvm {kvm}, chmod 660 {kvm}")
    })
}

/// Boots a machine with KVM, as opening `/dev/kvm` proves little. The result is remembered for this kernel
/// and this image.
fn kvm(qemu: &mut Qemu, folder: &Path) -> Result<Result<(), ProbeError>, SandboxError> {
    let device = Path::new(KVM);
    let opened = fs::File::options().read(true).write(true).open(device);
    if let Err(e) = opened {
        return Ok(Err(ProbeError(format!("{}: {e}", device.display()))));
    }
    if let Some(why) = closed_to_monitors(device) {
        return Ok(Err(ProbeError(why)));
    }
    qemu.accel = Accel::Kvm;
    let version = fs::read("/proc/version").map_err(|e| io("/proc/version", e))?;
    let key = crate::image::key_of(&[&version, qemu.key(PROBE_BYTES).as_bytes()]);
    let path = folder.join(format!("kvm-{key}.json"));
    let qemu = &*qemu;
    Ok(remembered(&path, || {
        let tried = aside(async {
            let machine = qemu.boot(PROBE_BYTES).await.map_err(ProbeError::new)?;
            machine.end().await;
            Ok(())
        });
        tried.map_err(|e| {
            let short: String = e.0.chars().take(300).collect();
            let device = device.display();
            ProbeError(format!(
                "{device} is there, but no machine boots with it: {short}"
            ))
        })
    }))
}

/// Frequency of the processor's time stamp counter, rounded to MHz so that it names a template.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "reads the processor's clock")]
fn tsc_khz() -> u64 {
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
fn tsc_khz() -> u64 {
    1_000_000
}

#[cfg(test)]
mod tests {
    use super::weak;

    const WELL: &str = "Uid:\t1000\t1000\t1000\t1000\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";

    #[test]
    fn walls_that_are_missing_are_seen() {
        assert_eq!(weak(WELL, 1), None);
        assert!(weak(WELL, 0).is_some_and(|w| w.contains("landlock")));
        for (from, to, named) in [
            ("Seccomp:\t2", "Seccomp:\t0", "filter"),
            ("Uid:\t1000", "Uid:\t0", "first user"),
            (
                "CapBnd:\t0000000000000000",
                "CapBnd:\t00000000000000c0",
                "CapBnd",
            ),
            ("CapEff:\t0000000000000000\n", "", "CapEff"),
            (
                "Seccomp:\t2\n",
                "Seccomp:\t2\nreads /agent\n",
                "reads /agent",
            ),
        ] {
            let why = weak(&WELL.replace(from, to), 1);
            assert!(why.as_ref().is_some_and(|w| w.contains(named)), "{why:?}");
        }
    }
}
