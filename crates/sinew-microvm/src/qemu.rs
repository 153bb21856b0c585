//! QEMU's `microvm` machine: boot, save, restore.
//!
//! A machine's memory is a file: the template's is shared while it boots and sealed afterwards, and clones
//! map it privately. The state of its devices (8 kB) is saved separately, so that a restore reads only that,
//! and clones share every page that they did not change.

use crate::monitor::{Base, Change, Host, Launch, Machine, Process, filled, opened};
use crate::provider::{apart, io, unavailable};
use crate::qmp::Qmp;
use crate::ram::{self, Delta, Ram};
use serde_json::json;
use sinew_jail::monitor::{self as jail, Opened};
use sinew_sandbox::SandboxError;
use sinew_sandbox::guest::Guest;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

/// Executor of the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The processor, through KVM.
    Kvm,
    /// QEMU, by translation.
    Tcg,
}

/// The port that the agent opens.
pub(crate) const PORT: &str = "/dev/vport0p1";
/// QEMU's filter of system calls, as tight as it goes.
pub(crate) const SECCOMP: &str =
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// Memory of a monitor in addition to the guest's: its own and translated code.
const OVERHEAD_BYTES: u64 = 192 << 20;
/// Maximum time of an emulated boot, on a busy machine.
const BOOT_TCG: Duration = Duration::from_secs(180);
/// Maximum time of a boot with KVM. It takes a second, and a guest that hangs shows nothing.
const BOOT_KVM: Duration = Duration::from_secs(6);
/// Maximum bytes of the guest's kernel output in an error.
const CONSOLE_BYTES: u64 = 4 << 10;

/// QEMU on this host.
#[derive(Debug)]
pub(crate) struct Qemu {
    /// Environment of monitors.
    pub(crate) host: Arc<Host>,
    /// Path of QEMU.
    pub(crate) program: PathBuf,
    /// Executor of guests.
    pub(crate) accel: Accel,
    /// Frequency of the processor's clock in kHz. An emulated guest cannot measure it reliably.
    pub(crate) tsc_khz: u64,
    /// False if monitors cannot leave the host's namespaces and root here.
    pub(crate) walls: bool,
}

/// A started monitor before the first message of its guest.
struct Started {
    /// The monitor.
    process: Process,
    /// Connection to the agent.
    agent: UnixStream,
    /// Control channel.
    control: QemuControl,
}

/// The control channel of one monitor.
#[derive(Debug)]
pub(crate) struct QemuControl {
    /// Connection for commands.
    qmp: Qmp,
    /// File in memory for the state of its devices.
    out: File,
    /// Memory of a machine that was booted.
    ram: Option<Ram>,
    /// State from which it starts. The monitor opens it by this process's descriptor.
    devices: Option<File>,
}

impl Qemu {
    /// Command line without the parts that differ between a boot and a restore. `share`: writes go to the
    /// file of the memory.
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
            // The description of the machine would stand before the devices' state, which is saved
            // separately.
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
            // The buffer keeps the last output of the guest's kernel, which may print without end.
            "-chardev",
            "ringbuf,id=console,size=16K",
            "-serial",
            "chardev:console",
        ];
        args.extend(accel);
        args.into_iter().map(String::from).collect()
    }

    /// Command line of the kernel. The options `reboot=t` and `panic=-1` make a guest that fails end its
    /// monitor.
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

    /// Start of a monitor with limits for this memory.
    pub(crate) fn launch(
        &self,
        memory_bytes: u64,
        opens: Vec<Opened>,
        args: Vec<String>,
    ) -> Launch {
        Launch {
            program: self.program.to_string_lossy().into_owned(),
            args,
            opens,
            walls: self.walls,
            kvm: self.accel == Accel::Kvm,
            memory_bytes: memory_bytes + OVERHEAD_BYTES,
            stdin: Stdio::null(),
            stdout: Stdio::null(),
        }
    }

    /// Starts a monitor with connections for agent and commands.
    async fn start(
        &self,
        ram: &Ram,
        mut opens: Vec<Opened>,
        args: Vec<String>,
    ) -> Result<Started, SandboxError> {
        let out = ram::scratch("sinew-vm-devices").map_err(|e| io("memory", e))?;
        opens.push(opened("ram", ram.path(), true));
        opens.push(opened("out", ram::path_of(&out), true));
        let pair = || UnixStream::pair().map_err(|e| io("socketpair", e));
        let ((agent, theirs), (control, their_control)) = (pair()?, pair()?);
        let end = |s: UnixStream| -> Result<OwnedFd, SandboxError> {
            let s = s.into_std().map_err(|e| io("socketpair", e))?;
            s.set_nonblocking(false).map_err(|e| io("socketpair", e))?;
            Ok(s.into())
        };
        let launch = Launch {
            stdin: Stdio::from(end(theirs)?),
            stdout: Stdio::from(end(their_control)?),
            ..self.launch(ram.bytes, opens, args)
        };
        Ok(Started {
            process: self.host.launch(launch).await?,
            agent,
            control: QemuControl {
                qmp: Qmp::new(control),
                out,
                ram: None,
                devices: None,
            },
        })
    }

    /// Boots from kernel and root of the image. Memory is a shared file, which becomes the template's.
    pub(crate) async fn boot(&self, bytes: u64) -> Result<Machine, SandboxError> {
        let ram = Ram::new(bytes).map_err(|e| io("memory", e))?;
        let root = self.host.image.root(PORT);
        let root = root.map_err(|e| unavailable(e.to_string()))?;
        let initrd = filled("sinew-vm-root", &root)?;
        let mut args = self.args(bytes, true);
        let kernel = [
            "-kernel",
            "/proc/self/fd/{kernel}",
            "-initrd",
            "/proc/self/fd/{initrd}",
        ];
        args.extend(kernel.map(String::from));
        args.extend(["-append".into(), self.kernel_args()]);
        let kernel = self.host.image.folder.join("vmlinuz");
        let opens = vec![
            opened("kernel", kernel, false),
            opened("initrd", ram::path_of(&initrd), false),
        ];
        let within = match self.accel {
            Accel::Kvm => BOOT_KVM,
            Accel::Tcg => BOOT_TCG,
        };
        let mut started = self.start(&ram, opens, args).await?;
        started.control.ram = Some(ram);
        let agent = Box::new(started.agent);
        Machine::booted(started.process, started.control, agent, &self.host, within).await
    }

    /// Restores the devices. Memory is a private mapping of the base.
    pub(crate) async fn start_from(&self, base: &Base) -> Result<Machine, SandboxError> {
        let devices = filled("sinew-vm-devices", &base.devices)?;
        let mut args = self.args(base.ram.bytes, false);
        args.extend(["-incoming".into(), "fd:{devices}".into()]);
        let opens = vec![opened("devices", ram::path_of(&devices), false)];
        let mut started = self.start(&base.ram, opens, args).await?;
        started.control.devices = Some(devices);
        let guest = Guest::restored(Box::new(started.agent), "microvm", base.hello);
        Ok(Machine::of(
            started.process,
            started.control,
            guest,
            &self.host,
        ))
    }

    /// Hash of everything that a template with this memory depends on.
    pub(crate) fn key(&self, bytes: u64) -> String {
        let qemu = self.program.metadata();
        let qemu = qemu.map(|m| (m.len(), m.mtime())).unwrap_or_default();
        let text = format!(
            "{:?} {} {qemu:?}",
            self.args(bytes, true),
            self.kernel_args()
        );
        crate::image::key_of(&[self.host.image.key.as_bytes(), text.as_bytes()])
    }
}

impl QemuControl {
    /// State of everything but memory.
    async fn devices(&mut self) -> Result<Vec<u8>, SandboxError> {
        let name = self.qmp.command("query-name", json!({})).await?;
        let number = name["name"].as_str().and_then(|n| n.strip_prefix("out"));
        let number: u32 = number.and_then(|n| n.parse().ok()).unwrap_or_default();
        let path = format!("/proc/self/fd/{number}");
        let asked = json!({ "filename": path, "live": false });
        self.qmp.command("xen-save-devices-state", asked).await?;
        ram::content(&self.out, jail::FILE_BYTES).map_err(|e| io("save devices", e))
    }

    /// Changes of the machine since it was started from its base. `pid` is the monitor's process; `folder`
    /// takes files without a name. The machine is stopped meanwhile, and continues also after a failure.
    pub(crate) async fn change(&mut self, pid: u32, folder: &Path) -> Result<Change, SandboxError> {
        self.qmp.command("stop", json!({})).await?;
        let changed = self.change_stopped(pid, folder.to_path_buf()).await;
        self.qmp.command("cont", json!({})).await?;
        changed
    }

    /// Changes of a machine that is stopped.
    async fn change_stopped(&mut self, pid: u32, folder: PathBuf) -> Result<Change, SandboxError> {
        let devices = self.devices().await?;
        let memory = apart("save memory", move || Delta::take(pid, &folder)).await?;
        Ok(Change { memory, devices })
    }

    /// Stops a machine that was booted, for good. Returns its memory and the state of its devices. Nothing
    /// writes to the memory once the monitor has ended.
    pub(crate) async fn finish(&mut self) -> Result<(Ram, Vec<u8>), SandboxError> {
        self.qmp.command("stop", json!({})).await?;
        let devices = self.devices().await?;
        let ram = self.ram.take();
        let ram = ram.ok_or_else(|| io("save memory", "the machine was not booted"))?;
        Ok((ram, devices))
    }

    /// Last part of the output of the guest's kernel.
    pub(crate) async fn console(&mut self) -> String {
        let asked = json!({ "device": "console", "size": CONSOLE_BYTES });
        let printed = self.qmp.command("ringbuf-read", asked).await;
        printed.map_or_else(
            |e| e.to_string(),
            |v| v.as_str().unwrap_or_default().to_owned(),
        )
    }
}
