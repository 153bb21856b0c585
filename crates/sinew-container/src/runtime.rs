//! crun and runc, without a daemon: one process that waits for each container and, when its
//! first process ends, removes its groups and its state.
//!
//! The bundle is plain JSON, not oci-spec's types: their defaults grant capabilities and mounts, and here a
//! container gets only the written ones.

use crate::root::{AGENT, HOST};
use crate::spec::{
    AGENT_CAPABILITIES, Body, Common, END, FILE_CAPABILITIES, INODES, MASKED, READ_ONLY, StartSpec,
    Waiter, open_files, unavailable,
};
use crate::state::io;
use serde_json::{Value, json};
use sinew_jail::layer::{LayerPlan, USERS};
use sinew_sandbox::SandboxError;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// An installed runtime.
#[derive(Debug)]
pub(crate) struct Runtime {
    /// `crun` or `runc`.
    name: &'static str,
    /// Program and first arguments: the runtime itself, or the agent that starts it without a mount.
    command: Vec<String>,
    /// Folder for the runtime's state of containers, below the provider's folder.
    state: PathBuf,
}

impl Runtime {
    /// Checks that the runtime is installed and that this process may mount.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with the package to install, or the other levels that need no root.
    pub(crate) fn new(
        name: &'static str,
        common: &Common,
        state: &Path,
    ) -> Result<Self, SandboxError> {
        let version = std::process::Command::new(name).arg("--version").output();
        match version {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                return Err(unavailable(format!(
                    "`{name} --version` ended with {}",
                    output.status
                )));
            }
            Err(e) => {
                return Err(unavailable(format!(
                    "it cannot be started ({e}): install it (Debian: apt-get install {name})"
                )));
            }
        }
        if !may_mount() {
            return Err(unavailable(
                "it makes containers for root alone, and this process has no CAP_SYS_ADMIN: run as root, use Docker or Podman by a socket that you may use (sandbox.container_socket), or sandbox.level = \"process\", which needs no root".into(),
            ));
        }
        let mut command = Vec::new();
        if name == "crun"
            && let Some(unified) = hybrid()
        {
            // crun refuses hosts where version 2 of the groups has controllers in addition to version 1. It
            // does not look further if it does not see version 2.
            command.extend([
                common.agent.to_string_lossy().into_owned(),
                "without-mount".into(),
                unified,
            ]);
        }
        command.push(name.into());
        Ok(Self {
            name,
            command,
            state: state.into(),
        })
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// A command of the runtime on its state, without input and output.
    fn invoke(&self, args: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        self.finish(command, args)
    }

    /// Same as [`Self::invoke`], in a mount namespace with a writable layer. The agent makes it, and becomes
    /// the runtime.
    fn invoke_above(
        &self,
        common: &Common,
        layer: &LayerPlan,
        args: &[&str],
    ) -> Result<tokio::process::Command, SandboxError> {
        let plan = serde_json::to_string(layer).map_err(|e| io("describe a layer", e))?;
        let mut command = tokio::process::Command::new(&common.agent);
        command.arg("with-layer").arg(plan).args(&self.command);
        Ok(self.finish(command, args))
    }

    /// Adds the runtime's own arguments.
    fn finish(
        &self,
        mut command: tokio::process::Command,
        args: &[&str],
    ) -> tokio::process::Command {
        command
            .arg("--root")
            .arg(&self.state)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// The layer of a container with a writable root.
    fn layer(
        &self,
        common: &Common,
        start: &StartSpec<'_>,
    ) -> Result<Option<LayerPlan>, SandboxError> {
        let Some(root) = &start.spec.writable_root else {
            return Ok(None);
        };
        let used = start.folder.canonicalize();
        let used = used.map_err(|e| io("find a folder of a container", e))?;
        let stage = stage(&used).ok_or_else(|| {
            let all = STAGES.join(", ");
            unavailable(format!(
                "a writable root is made in a mount namespace, above one of the folders {all}; this host has \
                 none of them, or the state folder lies in the only one"
            ))
        })?;
        let binds = common.root.binds.iter().skip(common.root.above);
        let shows = binds.map(|(source, _)| source.clone());
        let own = [common.agent.clone(), start.host.clone()];
        Ok(Some(LayerPlan {
            image: common.root.lower.clone(),
            stage,
            bytes: root.bytes,
            inodes: INODES + root.bytes / BYTES_OF_FILE,
            first_user: start.uid,
            shows: shows.chain(own).collect(),
        }))
    }

    /// Writes the bundle and starts `run`, which stays until the container has ended. Standard error goes to
    /// `log` in the container's folder.
    pub(crate) fn start(
        &self,
        common: &Common,
        start: &StartSpec<'_>,
    ) -> Result<Body, SandboxError> {
        let layer = self.layer(common, start)?;
        let bundle = bundle(common, start, layer.as_ref()).to_string();
        let path = start.folder.join("config.json");
        std::fs::write(&path, bundle).map_err(|e| io("write a bundle", e))?;
        let log = std::fs::File::create(start.folder.join("log"));
        let log = log.map_err(|e| io("write a log", e))?;
        let folder = start.folder.to_string_lossy().into_owned();
        let args = ["run", "--bundle", &folder, &start.name];
        let mut command = match &layer {
            None => self.invoke(&args),
            Some(layer) => self.invoke_above(common, layer, &args)?,
        };
        let child = command
            .stderr(log)
            .spawn()
            .map_err(|e| io(format!("start {}", self.name), e))?;
        Ok(Body::Process(Box::new(Waiter {
            child,
            name: start.name.clone(),
            ended: false,
            reaper: common.reaper.clone(),
        })))
    }

    /// Waits until the container has ended and its groups are removed. It is deleted by force after [`END`].
    ///
    /// # Errors
    /// [`SandboxError::Died`] if it still runs after another [`END`].
    pub(crate) async fn end(&self, mut waiter: Box<Waiter>) -> Result<(), SandboxError> {
        if tokio::time::timeout(END, waiter.child.wait())
            .await
            .is_err()
        {
            self.delete(&waiter.name).await?;
            let waited = tokio::time::timeout(END, waiter.child.wait()).await;
            if waited.is_err() {
                let name = &waiter.name;
                return Err(SandboxError::Died(format!("container {name} does not end")));
            }
        }
        // Groups that the runtime could not remove.
        let name = waiter.name.clone();
        let removed =
            tokio::task::spawn_blocking(move || sinew_jail::cgroup::remove_everywhere(&name)).await;
        waiter.ended = removed.is_ok();
        Ok(())
    }

    /// Deletes a container by force.
    async fn delete(&self, name: &str) -> Result<(), SandboxError> {
        let mut command = self.invoke(&["delete", "--force", name]);
        let status = command.stderr(Stdio::null()).status().await;
        status
            .map(|_| ())
            .map_err(|e| io(format!("start {}", self.name), e))
    }

    /// Deletes containers whose state a dead run left in `state`.
    pub(crate) async fn sweep(&self, state: &Path) {
        let theirs = Self {
            name: self.name,
            command: self.command.clone(),
            state: state.into(),
        };
        for entry in std::fs::read_dir(state).into_iter().flatten().flatten() {
            if let Some(name) = entry.file_name().to_str() {
                // The next run tries again to remove a container that cannot be removed now.
                let _ = theirs.delete(name).await;
            }
        }
    }
}

/// True if this process has CAP_SYS_ADMIN, or if `/proc` does not show it.
fn may_mount() -> bool {
    const SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let sets = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let set = sets.and_then(|s| u64::from_str_radix(s.trim(), 16).ok());
    set.is_none_or(|set| set & 1 << SYS_ADMIN != 0)
}

/// Mount point of control groups version 2 where it has controllers while version 1 is in use.
fn hybrid() -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let of = |kind: &str| {
        let mut lines = mounts.lines().map(|l| l.split(' ').collect::<Vec<_>>());
        lines.find_map(|f| (f.get(2) == Some(&kind)).then(|| f[1].to_string()))
    };
    of("cgroup")?;
    let unified = of("cgroup2")?;
    let controllers = std::fs::read_to_string(format!("{unified}/cgroup.controllers")).ok()?;
    (!controllers.trim().is_empty()).then_some(unified)
}

/// A read-only mount of a file or folder of the host, without devices and set-user-ID programs.
fn bind(source: &Path, inside: &Path, more: &[&str]) -> Value {
    let options = ["rbind", "ro", "nosuid", "nodev"];
    let options: Vec<_> = options.iter().chain(more).collect();
    json!({ "destination": inside, "type": "bind", "source": source, "options": options })
}

/// A file system in memory, without devices and set-user-ID programs.
fn tmpfs(inside: &str, options: &[String]) -> Value {
    let options: Vec<_> = ["nosuid", "nodev"]
        .into_iter()
        .map(String::from)
        .chain(options.iter().cloned())
        .collect();
    json!({ "destination": inside, "type": "tmpfs", "source": "tmpfs", "options": options })
}

/// Folders that a stage may cover in the mount namespace of a container: the runtime needs nothing in them.
const STAGES: [&str; 5] = ["/mnt", "/srv", "/media", "/tmp", "/var/tmp"];
/// Bytes of a layer for each file and folder that it may have, beyond [`INODES`].
const BYTES_OF_FILE: u64 = 4096;

/// A folder that can be covered while `used` is in use.
fn stage(used: &Path) -> Option<PathBuf> {
    let real = |path: &&Path| path.symlink_metadata().is_ok_and(|m| m.is_dir());
    let mut all = STAGES.iter().map(Path::new).filter(real);
    all.find(|stage| !used.starts_with(stage))
        .map(PathBuf::from)
}

/// Mounts of a container. With a layer, its own folders are part of the layer.
fn mounts(common: &Common, start: &StartSpec<'_>, layer: Option<&LayerPlan>) -> Vec<Value> {
    let limits = &start.spec.limits;
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc",
            "options": ["nosuid", "noexec", "nodev", "hidepid=invisible"] }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
            "options": ["nosuid", "noexec", "mode=755", "size=64k"] }),
    ];
    let own = [
        (&common.agent, Path::new(AGENT), &[][..]),
        (&start.host, Path::new(HOST), &["noexec"][..]),
    ];
    if let Some(layer) = layer {
        let binds = common.root.binds.iter().skip(common.root.above);
        let binds = binds.map(|(_, inside)| (inside.as_path(), &[][..]));
        let all = binds.chain(own.map(|(_, inside, more)| (inside, more)));
        for (number, (inside, more)) in all.enumerate() {
            mounts.push(bind(&layer.shown(number), inside, more));
        }
        return mounts;
    }
    let user = [format!("uid={}", start.uid), format!("gid={}", start.uid)];
    for folder in ["/work", "/tmp"] {
        let size = format!("size={}", limits.work_bytes);
        let own = [size, format!("nr_inodes={INODES}"), "mode=700".into()];
        mounts.push(tmpfs(folder, &[&own[..], &user[..]].concat()));
    }
    for (source, inside) in &common.root.binds {
        mounts.push(bind(source, inside, &[]));
    }
    mounts.extend(own.map(|(source, inside, more)| bind(source, inside, more)));
    mounts
}

/// Adds a user namespace and a writable root to a configuration.
fn above_layer(bundle: &mut Value, layer: &LayerPlan) {
    bundle["root"] = json!({ "path": layer.root(), "readonly": false });
    let users = json!([{ "containerID": 0, "hostID": layer.first_user, "size": USERS }]);
    let linux = &mut bundle["linux"];
    linux["uidMappings"] = users.clone();
    linux["gidMappings"] = users;
    if let Some(namespaces) = linux["namespaces"].as_array_mut() {
        namespaces.push(json!({ "type": "user" }));
    }
}

/// Configuration of a container (OCI runtime specification 1.0, config.json).
///
/// It has all namespaces, only the agent's capabilities, memory without swap, and no network interface but
/// loopback. Files in `/work` and `/tmp` count as memory. Without a layer, it has no user namespace.
fn bundle(common: &Common, start: &StartSpec<'_>, layer: Option<&LayerPlan>) -> Value {
    let limits = &start.spec.limits;
    let files = open_files(limits);
    let files_of_all: &[&str] = match layer {
        Some(_) => &FILE_CAPABILITIES,
        None => &[],
    };
    let capabilities = AGENT_CAPABILITIES.iter().chain(files_of_all);
    let capabilities: Vec<_> = capabilities.map(|c| format!("CAP_{c}")).collect();
    let mut resources = json!({
        "memory": { "limit": limits.memory_bytes, "swap": limits.memory_bytes },
        // And the agent.
        "pids": { "limit": limits.processes + 1 },
    });
    if let Some(cpus) = common.cpus {
        resources["cpu"] = json!({ "period": 100_000, "quota": (cpus * 1e5) as u64 });
    }
    let namespaces = ["pid", "mount", "ipc", "uts", "network", "cgroup"];
    let namespaces = namespaces.map(|n| json!({ "type": n }));
    let mut bundle = json!({
        "ociVersion": "1.0.2",
        "root": { "path": common.root_folder, "readonly": true },
        "hostname": "sandbox",
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0 },
            "cwd": "/",
            "args": [AGENT, "connect", format!("{HOST}/s")],
            "env": [],
            "noNewPrivileges": true,
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
            "rlimits": [
                { "type": "RLIMIT_NOFILE", "hard": files, "soft": files },
                { "type": "RLIMIT_CORE", "hard": 0, "soft": 0 },
            ],
        },
        "mounts": mounts(common, start, layer),
        "linux": {
            "cgroupsPath": format!("/{}", start.name),
            "resources": resources,
            "namespaces": namespaces,
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
        },
    });
    if let Some(layer) = layer {
        above_layer(&mut bundle, layer);
    }
    bundle
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_covers_nothing_that_is_used() {
        let first = stage(Path::new("/run/sinew/1")).unwrap();
        let next = stage(&first.join("x"));
        assert!(next.is_none_or(|next| next != first));
    }
}
