//! QEMU's process behind its walls, the machine in it, and the memory and devices from which clones start.

use crate::image::Image;
use crate::launcher::Launcher;
use crate::provider::io;
use crate::qemu::{Qemu, QemuControl};
use crate::ram::{self, Delta, Ram};
use nix::unistd::Uid;
use sinew_jail::cgroup::{Bounds, Group, Hierarchy, run_tag};
use sinew_jail::monitor::{Opened, Plan};
use sinew_sandbox::SandboxError;
use sinew_sandbox::guest::{Guest, Hello, Stream};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Maximum bytes of a monitor's log in an error.
const LOG_BYTES: u64 = 4 << 10;
/// First user of monitors, above the users of the host and of other levels. Each monitor has its own.
const FIRST_USER: u32 = 0x5000_0000;

/// Prefix of the names of monitors' groups.
pub(crate) const GROUPS: &str = "sinew-vm-";
/// Device of KVM.
pub(crate) const KVM: &str = "/dev/kvm";
/// Maximum threads of a monitor.
const THREADS: u64 = 64;

/// Starts a machine from a base. It has its own time, random numbers and name.
pub(crate) async fn restore(qemu: &Qemu, base: &Base) -> Result<Machine, SandboxError> {
    let mut machine = qemu.start_from(base).await?;
    machine.resume().await?;
    Ok(machine)
}

/// Memory and devices that clones start from.
#[derive(Debug)]
pub(crate) struct Base {
    /// Sealed memory, which clones map privately.
    pub(crate) ram: Ram,
    /// State of the devices in the monitor's format.
    pub(crate) devices: Vec<u8>,
    /// First message of the agent, which a restored agent does not repeat.
    pub(crate) hello: Hello,
}

/// A base that machines share.
pub(crate) type Shared = Arc<Base>;

/// Changes of a machine since it was started from its base.
#[derive(Debug)]
pub(crate) struct Change {
    /// Changed pages.
    pub(crate) memory: Delta,
    /// Whole state of the devices.
    pub(crate) devices: Vec<u8>,
}

impl Change {
    /// Bytes of changed pages and of the state.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes() + self.devices.len() as u64
    }
}

impl Base {
    /// A base with changes applied. Copies all memory.
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
    /// Connection to the agent.
    pub(crate) guest: Guest,
    /// The monitor.
    process: Process,
    /// Channel to the monitor.
    control: QemuControl,
    /// Folder of the run, for files without a name.
    folder: PathBuf,
}

/// A monitor's process, its groups and its log. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Process {
    /// Thread that started it and ends it.
    launcher: Launcher,
    /// The process. `None` after its end.
    child: Option<Child>,
    /// Control groups. `None` where memory cannot be limited.
    group: Option<Group>,
    /// Output of the process, in memory.
    log: File,
}

/// Start of a monitor.
#[derive(Debug)]
pub(crate) struct Launch {
    /// Path of the program, inside of its root.
    pub(crate) program: String,
    /// Arguments, with names of `opens` in braces for their descriptors.
    pub(crate) args: Vec<String>,
    /// Files to open for it.
    pub(crate) opens: Vec<Opened>,
    /// Leave the host's namespaces and root.
    pub(crate) walls: bool,
    /// Show the device of KVM.
    pub(crate) kvm: bool,
    /// Maximum memory of monitor and machine together.
    pub(crate) memory_bytes: u64,
    /// Standard input: the connection to the agent.
    pub(crate) stdin: Stdio,
    /// Standard output: the control channel.
    pub(crate) stdout: Stdio,
}

/// A file to open for a monitor. Arguments refer to it by its name.
pub(crate) fn opened(name: &str, path: PathBuf, write: bool) -> Opened {
    Opened {
        name: name.into(),
        path,
        write,
    }
}

/// A file in memory with a content.
pub(crate) fn filled(name: &str, bytes: &[u8]) -> Result<File, SandboxError> {
    let file = ram::scratch(name).map_err(|e| io("memory", e))?;
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).map_err(|e| io("memory", e))?;
    Ok(file)
}

/// A user that no other machine of this process has, and that other processes are unlikely to have.
fn own_user() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let slot = NEXT.fetch_add(1, Ordering::Relaxed) % 1024;
    FIRST_USER + (std::process::id() % (1 << 18)) * 1024 + slot
}

/// Environment of all monitors of a provider.
#[derive(Debug)]
pub(crate) struct Host {
    /// The jail, which confines itself and then executes the monitor.
    pub(crate) helper: PathBuf,
    /// Kernel and root file system of guests.
    pub(crate) image: Image,
    /// Thread that starts monitors.
    pub(crate) launcher: Launcher,
    /// Control groups of this host.
    pub(crate) hierarchy: Hierarchy,
    /// Folder of this run. `root` in it is the root of jails.
    pub(crate) run: PathBuf,
    /// Number of the next monitor.
    pub(crate) next: AtomicU64,
}

impl Drop for Host {
    fn drop(&mut self) {
        // Files that are left in it belong to machines that die with this provider.
        let _ = std::fs::remove_dir_all(&self.run);
    }
}

impl Host {
    /// Walls of a monitor: the system folders read-only, two devices at most, a separate user, and only the
    /// listed files.
    fn plan(&self, launch: &Launch, group: Option<&Group>) -> Plan {
        let kvm = Path::new(KVM).metadata().ok().filter(|_| launch.kvm);
        // Nobody needs to join the device's group if it is open to everybody.
        let gid = kvm.filter(|m| m.mode() & 0o006 != 0o006).map(|m| m.gid());
        let user = Uid::effective().is_root().then(own_user);
        let shown = ["/usr", "/lib", "/lib64"].map(PathBuf::from);
        let shown = shown.into_iter().filter(|p| p.exists());
        let null = PathBuf::from("/dev/null");
        let mut devices = vec![(null.clone(), null)];
        if launch.kvm {
            devices.push((KVM.into(), KVM.into()));
        }
        Plan {
            parent: std::process::id() as i32,
            opens: launch.opens.clone(),
            groups: group.map(Group::member_files).unwrap_or_default(),
            root: self.run.join("root"),
            shows: shown.map(|p| (p.clone(), p)).collect(),
            devices,
            user: user.map(|u| (u, gid.unwrap_or(u))),
            walls: launch.walls,
            program: launch.program.clone(),
            args: launch.args.clone(),
        }
    }

    /// Starts a monitor behind its walls and in its groups. Nothing is left after a failure.
    pub(crate) async fn launch(&self, launch: Launch) -> Result<Process, SandboxError> {
        let log = ram::scratch("sinew-vm-log").map_err(|e| io("memory", e))?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("{GROUPS}{}-{number}", run_tag(std::process::id()));
        let bounds = Bounds {
            memory_bytes: launch.memory_bytes,
            processes: THREADS,
            tcp: false,
        };
        let group = match self.hierarchy.limits_memory() {
            Ok(_) => Some(self.hierarchy.create(&name, &bounds)),
            Err(_) => None,
        };
        let group = group.transpose().map_err(|e| io("make a cgroup", e))?;
        let plan = self.plan(&launch, group.as_ref());
        let text = serde_json::to_string(&plan).map_err(|e| io("jail", e))?;
        let mut command = Command::new(&self.helper);
        command
            .args(["monitor", &text])
            .env_clear()
            .stdin(launch.stdin)
            .stdout(launch.stdout)
            .stderr(log.try_clone().map_err(|e| io("log", e))?);
        let child = match self.launcher.run(command).await {
            Ok(child) => child,
            Err(e) => {
                // Empty: nothing was started.
                let _ = group.as_ref().map(Group::removed);
                return Err(e);
            }
        };
        Ok(Process {
            child: Some(child),
            launcher: self.launcher.clone(),
            group,
            log,
        })
    }
}

impl Process {
    /// Process number. 0 after its end.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Last part of its output.
    pub(crate) fn printed(&self) -> String {
        let log = ram::content(&self.log, LOG_BYTES).unwrap_or_default();
        String::from_utf8_lossy(&log).trim().to_owned()
    }

    /// Error for the end of its machine, with its output.
    pub(crate) fn died(&self, e: impl std::fmt::Display) -> SandboxError {
        SandboxError::Died(format!("{e}; {}", self.printed()))
    }

    /// Status and output if it has ended.
    pub(crate) fn ended(&mut self) -> Option<String> {
        let ended = self.child.as_mut()?.try_wait().ok()??;
        Some(format!("{ended}: {}", self.printed()))
    }

    /// Ends it and waits until nothing of it is left.
    async fn end(&mut self) {
        if let Some(child) = self.child.take() {
            // The thread ends only after everything it started.
            let _ = self.launcher.end(child, self.group.take()).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            drop(self.launcher.end(child, self.group.take()));
        }
    }
}

impl Machine {
    /// A machine that boots. Its agent must answer `within` this time.
    pub(crate) async fn booted(
        process: Process,
        mut control: QemuControl,
        agent: Box<dyn Stream>,
        host: &Host,
        within: Duration,
    ) -> Result<Self, SandboxError> {
        match Guest::greet(agent, "microvm", within).await {
            Ok(guest) => Ok(Self::of(process, control, guest, host)),
            Err(e) => {
                let console = control.console().await;
                Err(process.died(format!("{e}; {}", console.trim())))
            }
        }
    }

    /// A machine with its agent.
    pub(crate) fn of(process: Process, control: QemuControl, guest: Guest, host: &Host) -> Self {
        Self {
            guest,
            process,
            control,
            folder: host.run.clone(),
        }
    }

    /// Number of the monitor's process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Memory of its group: the monitor and the pages that the machine has changed.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        self.process.group.as_ref().and_then(Group::memory_bytes)
    }

    /// Sends the agent the time, random numbers and a name, because clones start with equal ones.
    async fn resume(&mut self) -> Result<(), SandboxError> {
        let mut entropy = [0; 64];
        getrandom::fill(&mut entropy).map_err(|e| io("random numbers", e))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_nanos() as u64);
        let name = format!("vm-{:016x}", ram::unique().map_err(|e| io("name", e))?);
        let resumed = self.guest.resume(now, &entropy, &name).await;
        resumed.map_err(|e| self.process.died(e))
    }

    /// Changes since it was started from its base.
    pub(crate) async fn save(&mut self) -> Result<Change, SandboxError> {
        self.control.change(self.process.pid(), &self.folder).await
    }

    /// Ends a machine that was booted, and returns a base for clones.
    pub(crate) async fn finish(mut self) -> Result<Base, SandboxError> {
        let hello = self.guest.hello();
        let (ram, devices) = self.control.finish().await?;
        self.process.end().await;
        // The channel may hold the memory open.
        drop(self.control);
        ram.seal().map_err(|e| io("seal memory", e))?;
        Ok(Base {
            ram,
            devices,
            hello,
        })
    }

    /// Ends it; when this returns, nothing of it is left.
    pub(crate) async fn end(mut self) {
        self.process.end().await;
    }
}

/// Waits until a guest uses less than 10 % of a processor, at most `most`.
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

/// CPU time of a process in ticks of 10 ms (`/proc/PID/stat`, fields 14 and 15).
fn ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let number = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok());
    Some(number(11)? + number(12)?)
}
