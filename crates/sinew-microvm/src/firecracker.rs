//! Firecracker, through its API (`src/firecracker/swagger/firecracker.yaml` of that project,
//! version 1.7 and later).
//!
//! A machine is saved whole: the monitor writes all memory and the state of its devices to two
//! files in memory that it was given. What a clone changed is found by comparing with its base; a
//! clone's memory is a private mapping of that base. The guest's agent is reached over vsock: the
//! monitor makes a Unix socket, and who connects says `CONNECT PORT` and is answered `OK NUMBER`
//! (`docs/vsock.md` there). With each snapshot such connections end and are made anew.

mod api;
mod probe;

pub use api::{Api, FirecrackerError, Socket, connect};
pub(crate) use probe::probe;

use crate::monitor::{
    Base, Change, Control, Host, Launch, Machine, Monitor, Process, Running, filled, opened,
};
use crate::provider::{io, unavailable};
use crate::ram::{self, Delta, Ram};
use serde_json::{Value, json};
use sinew_guest::Guest;
use sinew_jail::monitor::{self as jail, Opened};
use sinew_sandbox::{SandboxError, SandboxFuture};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Port of vsock on which the agent listens.
pub const AGENT_PORT: u32 = 52;
/// Maximum time until a monitor's API, or the guest's agent, answers.
const START: Duration = Duration::from_secs(10);
/// Memory of a monitor in addition to the guest's, and to a copy of it while that is written.
const OVERHEAD_BYTES: u64 = 64 << 20;
/// Socket of the API, relative to the monitor's own folder.
const API_SOCKET: &str = "api.sock";
/// Socket of the guest's ports, relative to the monitor's folder. The path is part of a snapshot, and each
/// clone has a folder of its own.
const AGENT_SOCKET: &str = "agent.sock";
/// The kernel's command line. `reboot=k` and `panic=-1`: a guest that fails ends its monitor.
const KERNEL_ARGS: &str = "console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on pci=off";

/// Files of every monitor by their number: the program itself,
const PROGRAM: usize = 0;
/// memory that a snapshot writes,
const MEMORY: usize = 1;
/// and state of the devices that a snapshot writes.
const STATE: usize = 2;
/// Then the kernel of a boot, or the memory of a restore,
const FIRST: usize = 3;
/// and the root of a boot, or the state of the devices of a restore.
const SECOND: usize = 4;

/// Firecracker on this host.
#[derive(Debug)]
pub(crate) struct Firecracker {
    /// Environment of monitors.
    pub(crate) host: Arc<Host>,
    /// Path of Firecracker.
    pub(crate) program: PathBuf,
    /// False if monitors cannot leave the host's namespaces and root here.
    pub(crate) walls: bool,
}

/// API of one monitor, and the files to which it saves.
#[derive(Debug)]
pub(crate) struct FirecrackerControl {
    /// The API.
    api: Api,
    /// Socket of the guest's ports.
    agent: Socket,
    bytes: u64,
    /// File in memory for the machine's memory. Empty between snapshots.
    memory: File,
    /// File in memory for the state of the devices.
    state: File,
}

/// Path by which a monitor opens one of its files.
fn at(index: usize) -> String {
    format!("/proc/self/fd/{}", jail::number(index))
}

impl Firecracker {
    /// A monitor without a machine, whose API answers.
    pub(crate) async fn started(
        &self,
        bytes: u64,
        more: Vec<Opened>,
    ) -> Result<(Process, FirecrackerControl), SandboxError> {
        let scratch = |name| ram::scratch(name).map_err(|e| io("memory", e));
        let (memory, state) = (scratch("sinew-vm-memory")?, scratch("sinew-vm-devices")?);
        let mut opens = vec![
            opened("program", self.program.clone(), false),
            opened("memory", ram::path_of(&memory), true),
            opened("state", ram::path_of(&state), true),
        ];
        opens.extend(more);
        let launch = Launch {
            program: at(PROGRAM),
            args: ["--api-sock", API_SOCKET].map(String::from).to_vec(),
            opens,
            walls: self.walls,
            kvm: true,
            works: true,
            // Memory that it writes is its own until it is copied.
            memory_bytes: 2 * bytes + OVERHEAD_BYTES,
            file_bytes: bytes + jail::FILE_BYTES,
            stdin: Stdio::null(),
            stdout: Stdio::null(),
        };
        let mut process = self.host.launch(launch).await?;
        let folder = PathBuf::from(format!("/proc/{}/cwd", process.pid()));
        let socket = |name| Socket::new(folder.join(name), process.user);
        let (api, agent) = (socket(API_SOCKET), socket(AGENT_SOCKET));
        let began = Instant::now();
        while let Err(e) = api.connect().await {
            if let Some(ended) = process.ended() {
                return Err(unavailable(format!("the monitor ended: {ended}")));
            }
            if began.elapsed() > START {
                return Err(process.died(format!("its API does not answer: {e}")));
            }
            tokio::time::sleep(api::AGAIN).await;
        }
        let control = FirecrackerControl {
            api: Api::new(api),
            agent,
            bytes,
            memory,
            state,
        };
        Ok((process, control))
    }

    /// Boots from the unpacked kernel and the root of the image.
    async fn boots(&self, bytes: u64) -> Result<Machine, SandboxError> {
        let image = &self.host.image;
        let packed = image.read("vmlinuz");
        let packed = packed.map_err(|e| unavailable(e.to_string()))?;
        let kernel = crate::vmlinux::unpack(&packed).map_err(unavailable)?;
        let root = image.root(&format!("vsock:{AGENT_PORT}"));
        let root = root.map_err(|e| unavailable(e.to_string()))?;
        let kernel = filled("sinew-vm-kernel", &kernel)?;
        let root = filled("sinew-vm-root", &root)?;
        let more = vec![
            opened("kernel", ram::path_of(&kernel), false),
            opened("initrd", ram::path_of(&root), false),
        ];
        let (process, control) = self.started(bytes, more).await?;
        let agent = control.boot().await.map_err(|e| process.died(e))?;
        Machine::booted(
            process,
            Box::new(control),
            Box::new(agent),
            &self.host,
            START,
        )
        .await
    }

    /// Restores a base, which the monitor maps privately.
    async fn starts_from(&self, base: &Base) -> Result<Machine, SandboxError> {
        let devices = filled("sinew-vm-devices", &base.devices)?;
        let more = vec![
            opened("ram", base.ram.path(), false),
            opened("devices", ram::path_of(&devices), false),
        ];
        let (process, control) = self.started(base.ram.bytes, more).await?;
        let load = json!({
            "snapshot_path": at(SECOND),
            "mem_backend": { "backend_type": "File", "backend_path": at(FIRST) },
            "resume_vm": true,
        });
        let loaded = control.api.ask("PUT", "/snapshot/load", load).await;
        loaded.map_err(|e| process.died(e))?;
        let agent = connect(&control.agent, AGENT_PORT, START).await;
        let agent = agent.map_err(|e| process.died(e))?;
        let guest = Guest::restored(Box::new(agent), "microvm", base.hello);
        Ok(Machine::of(process, Box::new(control), guest, &self.host))
    }
}

impl Monitor for Firecracker {
    /// A snapshot is bound to the program, the processor and the host's kernel, too.
    fn key(&self, bytes: u64) -> String {
        let program = self.program.metadata();
        let program = program.map(|m| (m.len(), m.mtime())).unwrap_or_default();
        let version = std::fs::read_to_string("/proc/version").unwrap_or_default();
        let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = processor.lines().find(|l| l.starts_with("model name"));
        let text = format!("firecracker {bytes} {KERNEL_ARGS} {program:?} {version} {model:?}");
        crate::image::key_of(&[self.host.image.key.as_bytes(), text.as_bytes()])
    }

    fn boot(&self, bytes: u64) -> SandboxFuture<'_, Machine> {
        Box::pin(self.boots(bytes))
    }

    fn start_from<'a>(&'a self, base: &'a Base) -> SandboxFuture<'a, Machine> {
        Box::pin(self.starts_from(base))
    }
}

impl FirecrackerControl {
    /// Configures the machine, starts it and reaches its agent.
    async fn boot(&self) -> Result<tokio::net::UnixStream, FirecrackerError> {
        let put = |path, body| self.api.ask("PUT", path, body);
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": self.bytes >> 20 });
        put("/machine-config", machine).await?;
        let source = json!({
            "kernel_image_path": at(FIRST),
            "initrd_path": at(SECOND),
            "boot_args": KERNEL_ARGS,
        });
        put("/boot-source", source).await?;
        let vsock = json!({ "guest_cid": 3, "uds_path": AGENT_SOCKET });
        put("/vsock", vsock).await?;
        put("/actions", json!({ "action_type": "InstanceStart" })).await?;
        connect(&self.agent, AGENT_PORT, START).await
    }

    /// Pauses or resumes the machine.
    async fn state(&self, state: &str) -> Result<Value, SandboxError> {
        let set = self.api.ask("PATCH", "/vm", json!({ "state": state }));
        set.await.map_err(|e| SandboxError::Died(e.to_string()))
    }

    /// Writes all memory and the state of the devices; the machine is paused.
    async fn write(&self) -> Result<Vec<u8>, SandboxError> {
        // What an earlier snapshot left: the monitor may not cut it.
        for file in [&self.memory, &self.state] {
            file.set_len(0).map_err(|e| io("save a machine", e))?;
        }
        let create = json!({
            "snapshot_type": "Full", "snapshot_path": at(STATE), "mem_file_path": at(MEMORY),
        });
        let created = self.api.ask("PUT", "/snapshot/create", create).await;
        created.map_err(|e| io("save a machine", e))?;
        ram::content(&self.state, jail::FILE_BYTES).map_err(|e| io("save devices", e))
    }

    /// Pages of the written memory that differ from `base`.
    async fn differing(&self, base: &Ram, folder: PathBuf) -> Result<Delta, SandboxError> {
        let failed = |e: &dyn std::fmt::Display| io("save memory", e);
        let whole = self.memory.try_clone().map_err(|e| failed(&e))?;
        let whole = Ram::written(whole, self.bytes).map_err(|e| failed(&e))?;
        let base = base.again().map_err(|e| failed(&e))?;
        let compared = tokio::task::spawn_blocking(move || Delta::between(&base, &whole, &folder));
        let delta = compared.await.map_err(|e| failed(&e))?;
        self.memory.set_len(0).map_err(|e| failed(&e))?;
        delta.map_err(|e| failed(&e))
    }
}

impl Control for FirecrackerControl {
    fn change<'a>(&'a mut self, running: Running<'a>, base: &'a Base) -> SandboxFuture<'a, Change> {
        Box::pin(async move {
            self.state("Paused").await?;
            let written = self.write().await;
            self.state("Resumed").await?;
            let agent = connect(&self.agent, AGENT_PORT, START).await;
            let agent = agent.map_err(|e| SandboxError::Died(e.to_string()))?;
            let hello = running.guest.hello();
            *running.guest = Guest::restored(Box::new(agent), "microvm", hello);
            let devices = written?;
            let memory = self.differing(&base.ram, running.folder.into()).await?;
            Ok(Change { memory, devices })
        })
    }

    fn finish<'a>(&'a mut self, running: Running<'a>) -> SandboxFuture<'a, (Ram, Vec<u8>)> {
        Box::pin(async move {
            self.state("Paused").await?;
            let devices = self.write().await?;
            // Without the zeroes that it wrote.
            let empty = Ram::new(self.bytes).map_err(|e| io("memory", e))?;
            let delta = self.differing(&empty, running.folder.into()).await?;
            let ram = empty.changed(&delta).map_err(|e| io("save memory", e))?;
            Ok((ram, devices))
        })
    }

    fn console(&mut self) -> SandboxFuture<'_, String> {
        Box::pin(async { Ok(String::new()) })
    }
}
