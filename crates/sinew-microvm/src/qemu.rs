//! QEMU's `microvm` machine: boot, save, restore.
//!
//! A machine's memory is a file: the template's is shared while it boots and sealed afterwards,
//! clones map it privately. The state of its devices (8 kB) is saved apart from memory, so that
//! a restore reads nothing but that, and clones share every page that they did not change.

use crate::group::{Group, Hierarchy};
use crate::image::Image;
use crate::jail::{self, Opened, Plan};
use crate::launcher::Launcher;
use crate::qmp::Qmp;
use crate::ram::{self, Delta, Ram};
use nix::unistd::Uid;
use serde_json::json;
use sinew_guest::{Guest, Hello};
use sinew_sandbox::SandboxError;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::net::UnixStream;

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The processor, through KVM.
    Kvm,
    /// QEMU itself.
    Tcg,
}

/// The port that the agent opens.
pub(crate) const PORT: &str = "/dev/vport0p1";
/// QEMU's filter of system calls, as tight as it goes.
pub(crate) const SECCOMP: &str =
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// What a monitor takes beside the guest's memory: its own, and translated code.
const OVERHEAD_BYTES: u64 = 192 << 20;
/// How long a boot may take; emulated, on a busy machine.
const BOOT_TCG: Duration = Duration::from_secs(60);
/// A kernel that runs on the processor needs a second, one that hangs shows nothing.
const BOOT_KVM: Duration = Duration::from_secs(6);
/// Bytes of a monitor's log that are shown.
const LOG_BYTES: u64 = 4 << 10;
/// Users of monitors: one each, above those of the host and of other levels.
const FIRST_USER: u32 = 0x5000_0000;

/// How machines are run on this host.
#[derive(Debug)]
pub(crate) struct Qemu {
    pub(crate) program: PathBuf,
    pub(crate) helper: PathBuf,
    pub(crate) image: Image,
    pub(crate) accel: Accel,
    /// Frequency of the processor's clock: emulated, a guest cannot find it out reliably.
    pub(crate) tsc_khz: u64,
    pub(crate) walls: bool,
    pub(crate) launcher: Launcher,
    pub(crate) hierarchy: Hierarchy,
    /// Folder of this run; `root` in it is where jails have their root.
    pub(crate) run: PathBuf,
    pub(crate) next: AtomicU64,
}

/// Memory and devices that clones start from.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) ram: Ram,
    pub(crate) devices: Vec<u8>,
    pub(crate) hello: Hello,
}

/// What a machine changed since it was started from its base.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) memory: Delta,
    pub(crate) devices: Vec<u8>,
}

impl Base {
    /// A base that starts from what a machine has changed.
    pub(crate) fn with(&self, change: &Change) -> std::io::Result<Self> {
        Ok(Self {
            ram: self.ram.with(&change.memory)?,
            devices: change.devices.clone(),
            hello: self.hello,
        })
    }
}

/// A machine that runs.
#[derive(Debug)]
pub(crate) struct Machine {
    launcher: Launcher,
    child: Option<Child>,
    group: Option<Group>,
    pub(crate) guest: Guest,
    qmp: Qmp,
    /// Takes the state of its devices.
    out: File,
    log: File,
}

fn io(operation: &str, e: impl std::fmt::Display) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

/// A user that no other machine of this process has, and that other processes are unlikely to.
fn own_user() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let slot = NEXT.fetch_add(1, Ordering::Relaxed) % 1024;
    FIRST_USER + (std::process::id() % (1 << 18)) * 1024 + slot
}

fn opened(name: &str, path: PathBuf, write: bool) -> Opened {
    Opened {
        name: name.into(),
        path,
        write,
    }
}

/// A monitor that was started, before its guest said anything.
struct Started {
    child: Child,
    group: Option<Group>,
    agent: UnixStream,
    qmp: Qmp,
    out: File,
    log: File,
}

impl Qemu {
    /// The command line, but for what differs between a boot and a restore.
    fn args(&self, bytes: u64, share: bool) -> Vec<String> {
        let accel = match self.accel {
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // Translated code is what clones have most of for themselves.
            Accel::Tcg => ["-accel", "tcg,tb-size=32", "-cpu", "max"],
        };
        let share = if share { "on" } else { "off" };
        let memory = format!(
            "memory-backend-file,id=m0,size={bytes},mem-path=/proc/self/fd/{{ram}},share={share}"
        );
        let size = format!("{}M", bytes >> 20);
        let mut args = vec![
            "-M",
            "microvm,x-option-roms=off,isa-serial=on,acpi=on,pit=on,pic=on,rtc=on,suppress-vmdesc=on,memory-backend=m0",
            // The description of the machine would stand before the devices' state, which is saved alone.
            "-global",
            "migration.send-configuration=off",
            "-name",
            "out{out}",
            "-m",
            &size,
            "-smp",
            "1",
            "-object",
            &memory,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-sandbox",
            SECCOMP,
            "-device",
            "virtio-serial-device,max_ports=2",
            "-chardev",
            "socket,id=agent,fd=0",
            "-device",
            "virtserialport,chardev=agent,name=agent,nr=1",
            "-chardev",
            "socket,id=control,fd=1",
            "-mon",
            "chardev=control,mode=control",
            // What the guest's kernel prints, the last of it: it may print without end.
            "-chardev",
            "ringbuf,id=console,size=16K",
            "-serial",
            "chardev:console",
        ];
        args.extend(accel);
        args.into_iter().map(String::from).collect()
    }

    /// The kernel's command line. `reboot=t` and `panic=-1`: a guest that fails ends its monitor.
    fn kernel_args(&self) -> String {
        let clock = match self.accel {
            Accel::Kvm => String::new(),
            Accel::Tcg => format!(
                " tsc_early_khz={} lpj={} tsc=reliable no_timer_check",
                self.tsc_khz,
                self.tsc_khz * 4
            ),
        };
        format!("console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on mitigations=off{clock}")
    }

    /// Names what a template depends on beside its image.
    pub(crate) fn key(&self, bytes: u64) -> String {
        let qemu = self.program.metadata();
        let qemu = qemu.map(|m| (m.len(), m.mtime())).unwrap_or_default();
        let text = format!(
            "{:?} {} {qemu:?}",
            self.args(bytes, true),
            self.kernel_args()
        );
        crate::image::key_of(&[self.image.key.as_bytes(), text.as_bytes()])
    }

    pub(crate) fn plan(
        &self,
        opens: Vec<Opened>,
        args: Vec<String>,
        group: Option<&Group>,
    ) -> Plan {
        let kvm = Path::new("/dev/kvm");
        let gid = match self.accel {
            Accel::Kvm => kvm.metadata().map(|m| m.gid()).ok(),
            Accel::Tcg => None,
        };
        let user = Uid::effective().is_root().then(own_user);
        let shown = ["/usr", "/lib", "/lib64"].map(PathBuf::from);
        let shown = shown.into_iter().filter(|p| p.exists());
        let mut devices = vec![PathBuf::from("/dev/null")];
        if self.accel == Accel::Kvm {
            devices.push(kvm.into());
        }
        Plan {
            parent: std::process::id() as i32,
            opens,
            groups: group.map(Group::doors).unwrap_or_default(),
            root: self.run.join("root"),
            shows: shown.map(|p| (p.clone(), p)).collect(),
            run: None,
            devices,
            user: user.map(|u| (u, gid.unwrap_or(u))),
            walls: self.walls,
            program: self.program.to_string_lossy().into_owned(),
            args,
        }
    }

    async fn start(
        &self,
        ram: &Ram,
        mut opens: Vec<Opened>,
        args: Vec<String>,
    ) -> Result<Started, SandboxError> {
        let scratch = |name| ram::scratch(name).map_err(|e| io("memory", e));
        let (out, log) = (scratch("sinew-vm-devices")?, scratch("sinew-vm-log")?);
        opens.push(opened("ram", ram.path(), true));
        opens.push(opened("out", ram::path_of(&out), true));
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let group = match self.hierarchy.how() {
            Ok(_) => Some(self.hierarchy.create(number, ram.bytes + OVERHEAD_BYTES)),
            Err(_) => None,
        };
        let group = group.transpose().map_err(|e| io("make a cgroup", e))?;
        let plan = self.plan(opens, args, group.as_ref());
        let plan = serde_json::to_string(&plan).map_err(|e| io("jail", e))?;
        let pair = || UnixStream::pair().map_err(|e| io("socketpair", e));
        let ((agent, theirs), (control, their_control)) = (pair()?, pair()?);
        let end = |s: UnixStream| -> Result<OwnedFd, SandboxError> {
            let s = s.into_std().map_err(|e| io("socketpair", e))?;
            s.set_nonblocking(false).map_err(|e| io("socketpair", e))?;
            Ok(s.into())
        };
        let mut command = Command::new(&self.helper);
        command
            .args([jail::FLAG, &plan])
            .env_clear()
            .stdin(Stdio::from(end(theirs)?))
            .stdout(Stdio::from(end(their_control)?))
            .stderr(log.try_clone().map_err(|e| io("log", e))?);
        Ok(Started {
            child: self.launcher.run(command).await?,
            group,
            agent,
            qmp: Qmp::new(control),
            out,
            log,
        })
    }

    /// Boots a machine with so much memory, which `ram` becomes.
    pub(crate) async fn boot(&self, ram: &Ram) -> Result<Machine, SandboxError> {
        let image = |e: crate::ImageError| SandboxError::Unavailable {
            level: "microvm".into(),
            reason: e.to_string(),
        };
        let root = self.image.root(PORT).map_err(image)?;
        let initrd = ram::scratch("sinew-vm-root").map_err(|e| io("memory", e))?;
        std::os::unix::fs::FileExt::write_all_at(&initrd, &root, 0).map_err(|e| io("memory", e))?;
        let mut args = self.args(ram.bytes, true);
        let append = self.kernel_args();
        let kernel = [
            "-kernel",
            "/proc/self/fd/{kernel}",
            "-initrd",
            "/proc/self/fd/{initrd}",
        ];
        args.extend(kernel.map(String::from));
        args.extend(["-append".into(), append]);
        let opens = vec![
            opened("kernel", self.image.folder.join("vmlinuz"), false),
            opened("initrd", ram::path_of(&initrd), false),
        ];
        let within = match self.accel {
            Accel::Kvm => BOOT_KVM,
            Accel::Tcg => BOOT_TCG,
        };
        let started = self.start(ram, opens, args).await?;
        let Started {
            child,
            group,
            agent,
            qmp,
            out,
            log,
        } = started;
        let greeted = Guest::greet(Box::new(agent), "microvm", within).await;
        let launcher = self.launcher.clone();
        match greeted {
            Ok(guest) => Ok(Machine {
                launcher,
                child: Some(child),
                group,
                guest,
                qmp,
                out,
                log,
            }),
            Err(e) => {
                let console = console(qmp).await;
                let _ = launcher.end(child, group).await;
                Err(told(e, &log, &console))
            }
        }
    }

    /// Starts a machine from a base. It has its own time, random numbers and name.
    pub(crate) async fn restore(&self, base: &Base) -> Result<Machine, SandboxError> {
        let devices = ram::scratch("sinew-vm-devices").map_err(|e| io("memory", e))?;
        let written = std::os::unix::fs::FileExt::write_all_at(&devices, &base.devices, 0);
        written.map_err(|e| io("memory", e))?;
        let mut args = self.args(base.ram.bytes, false);
        args.extend(["-incoming".into(), "fd:{devices}".into()]);
        let opens = vec![opened("devices", ram::path_of(&devices), false)];
        let started = self.start(&base.ram, opens, args).await?;
        let Started {
            child,
            group,
            agent,
            qmp,
            out,
            log,
        } = started;
        let mut machine = Machine {
            launcher: self.launcher.clone(),
            child: Some(child),
            group,
            guest: Guest::restored(Box::new(agent), "microvm", base.hello),
            qmp,
            out,
            log,
        };
        let mut entropy = [0; 64];
        getrandom::fill(&mut entropy).map_err(|e| io("random numbers", e))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_nanos() as u64);
        let name = format!("vm-{:016x}", ram::unique().map_err(|e| io("name", e))?);
        match machine.guest.resume(now, &entropy, &name).await {
            Ok(()) => Ok(machine),
            Err(e) => Err(told(e, &machine.log, "")),
        }
    }
}

/// The end of what the guest's kernel printed.
async fn console(mut qmp: Qmp) -> String {
    let asked = json!({ "device": "console", "size": LOG_BYTES });
    let printed = qmp.command("ringbuf-read", asked).await;
    printed.map_or_else(|e| e, |v| v.as_str().unwrap_or_default().to_owned())
}

/// Why a machine failed, with what its monitor and its kernel printed.
fn told(e: SandboxError, log: &File, console: &str) -> SandboxError {
    let log = ram::content(log, LOG_BYTES).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    SandboxError::Died(format!("{e}; {} {}", log.trim(), console.trim()))
}

impl Machine {
    /// Number of the monitor's process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Memory that it takes for itself.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        self.group.as_ref().and_then(Group::memory_bytes)
    }

    /// What it changed since it was started. It stands still meanwhile.
    pub(crate) async fn save(&mut self, folder: &Path) -> Result<Change, SandboxError> {
        let failed = |e: String| SandboxError::Died(e);
        self.qmp.command("stop", json!({})).await.map_err(failed)?;
        let saved = self.save_stopped(folder).await;
        self.qmp.command("cont", json!({})).await.map_err(failed)?;
        saved
    }

    async fn save_stopped(&mut self, folder: &Path) -> Result<Change, SandboxError> {
        let devices = self.devices().await?;
        let (pid, folder) = (self.pid(), folder.to_path_buf());
        let taken = tokio::task::spawn_blocking(move || Delta::take(pid, &folder)).await;
        let memory = taken.map_err(|e| io("save memory", e))?;
        let memory = memory.map_err(|e| io("save memory", e))?;
        Ok(Change { memory, devices })
    }

    /// Stops a machine that was booted; its memory is all there then.
    pub(crate) async fn finish(mut self) -> Result<Vec<u8>, SandboxError> {
        let stopped = self.qmp.command("stop", json!({})).await;
        stopped.map_err(SandboxError::Died)?;
        let devices = self.devices().await?;
        self.end().await;
        Ok(devices)
    }

    /// State of everything but memory.
    async fn devices(&mut self) -> Result<Vec<u8>, SandboxError> {
        let name = self.qmp.command("query-name", json!({})).await;
        let name = name.map_err(SandboxError::Died)?;
        let number = name["name"].as_str().and_then(|n| n.strip_prefix("out"));
        let number: u32 = number.and_then(|n| n.parse().ok()).unwrap_or_default();
        let path = format!("/proc/self/fd/{number}");
        let asked = json!({ "filename": path, "live": false });
        let saved = self.qmp.command("xen-save-devices-state", asked).await;
        saved.map_err(SandboxError::Died)?;
        ram::content(&self.out, jail::FILE_BYTES).map_err(|e| io("save devices", e))
    }

    /// Ends it; when this returns, nothing of it is left.
    pub(crate) async fn end(mut self) {
        if let Some(child) = self.child.take() {
            // The thread ends only after everything it started.
            let _ = self.launcher.end(child, self.group.take()).await;
        }
    }
}

/// Waits until a monitor's guest has nothing to do; at most `most`.
pub(crate) async fn idle(pid: u32, most: Duration) {
    let began = Instant::now();
    let mut last = None;
    while began.elapsed() < most {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = ticks(pid);
        // One tick of 10 ms in 100.
        if last.zip(now).is_some_and(|(a, b)| b - a <= 1) {
            return;
        }
        last = now;
    }
}

/// Time on processors, in ticks (`/proc/PID/stat`, fields 14 and 15).
fn ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let number = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok());
    Some(number(11)? + number(12)?)
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            drop(self.launcher.end(child, self.group.take()));
        }
    }
}

/// A base that machines share.
pub(crate) type Shared = Arc<Base>;
