//! Protections of a container, from its own view and the kernel's.
//!
//! Nothing is reported as enforced because it was requested: every row compares a value that the probe
//! container or the kernel shows with the expected one.

use sinew_jail::spawner::TCP_MEMORY;
use sinew_sandbox::{Protection, SandboxSpec, WritableRoot};

/// A container's own view of its protections, and that of the kernel on the host.
#[derive(Debug)]
pub(crate) struct Observed {
    /// `/proc/self/status` of a program inside.
    pub(crate) status: String,
    /// `/proc/self/mounts` of a program inside.
    pub(crate) mounts: String,
    /// `/proc/net/dev` of a program inside.
    pub(crate) interfaces: String,
    /// Version of landlock that the agent uses. 0: none.
    pub(crate) landlock: u64,
    /// Limit of the control group in bytes.
    pub(crate) memory: Option<u64>,
    /// True if a control group bounds the buffers of TCP connections.
    pub(crate) tcp: bool,
    /// Limit of the control group, with the agent.
    pub(crate) processes: Option<u64>,
    /// Limit of the control group in processors.
    pub(crate) processors: Option<f64>,
    /// Kinds of namespaces that are not the host's.
    pub(crate) namespaces: Vec<&'static str>,
    /// True if each container has a separate user.
    pub(crate) own_users: bool,
    /// User outside that is root of the container's user namespace. 0: there is no such namespace.
    pub(crate) root_user: Option<u32>,
    /// Size of the file system that is the root.
    pub(crate) root_bytes: Option<u64>,
}

/// Capabilities that root inside may keep where it is another user outside: CHOWN, DAC_OVERRIDE, FOWNER.
const ROOT_KEEPS: u64 = 1 << 3 | 1 << 1 | 1;

impl Observed {
    /// Value of a line of `status`, such as `Seccomp:`. Empty if it is missing.
    fn field(&self, name: &str) -> &str {
        let line = self.status.lines().find_map(|l| l.strip_prefix(name));
        line.unwrap_or_default().trim()
    }

    /// True if something is mounted at exactly this path with an option.
    fn mounted(&self, path: &str, option: &str) -> bool {
        let of = |l: &str| {
            let fields: Vec<_> = l.split(' ').collect();
            let here = fields.get(1) == Some(&path);
            here && fields
                .get(3)
                .is_some_and(|o| o.split(',').any(|o| o == option))
        };
        self.mounts.lines().any(of)
    }

    /// All rows of the report for a container with the limits of `spec`.
    pub(crate) fn protections(
        &self,
        engine: &str,
        spec: &SandboxSpec,
        cpus: Option<f64>,
    ) -> Vec<Protection> {
        let mut rows = match &spec.writable_root {
            None => self.walls(),
            Some(root) => self.writable_walls(engine, root),
        };
        rows.extend(self.common_walls(engine));
        rows.extend(self.limits(engine, spec, cpus));
        rows
    }

    /// True if root inside is another user outside.
    fn is_mapped(&self) -> bool {
        self.root_user.is_some_and(|user| user > 0)
    }

    /// Rows of what separates programs from the host if they can write everywhere, as far as they differ.
    fn writable_walls(&self, engine: &str, root: &WritableRoot) -> Vec<Protection> {
        let keeps = if self.is_mapped() { ROOT_KEEPS } else { 0 };
        let within = |name| {
            let set = u64::from_str_radix(self.field(name), 16);
            set.is_ok_and(|set| set & !keeps == 0)
        };
        let caps = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"];
        let bounded = self.root_bytes.is_some_and(|n| n <= root.bytes);
        let how = match self.root_bytes {
            Some(n) if bounded => {
                format!("writable, a layer of {n} bytes that ends with the sandbox")
            }
            Some(n) => format!(
                "writable; the layer of {engine} has no size of its own, its disk has {n} bytes"
            ),
            None => format!("writable; the host cannot see the size of the layer of {engine}"),
        };
        let user = match self.root_user {
            Some(user) if user > 0 => {
                format!("root inside is user {user} outside, without rights there")
            }
            _ => {
                format!("{engine} maps no users: root inside is root outside, without capabilities")
            }
        };
        vec![
            row("root", bounded, how),
            row("user namespace", self.is_mapped(), user),
            row(
                "capabilities",
                caps.into_iter().all(within),
                if keeps == 0 {
                    "all sets of programs are empty"
                } else {
                    "only over files of the user namespace, for root inside; others have none"
                },
            ),
        ]
    }

    /// Rows of what separates programs from the host if only two folders can be written, as far as they
    /// differ.
    fn walls(&self) -> Vec<Protection> {
        let zero = |name| {
            let value = self.field(name);
            !value.is_empty() && value.trim_matches('0').is_empty()
        };
        let caps = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"];
        let user = self.field("Uid:").split_whitespace().next().unwrap_or("0");
        vec![
            row("root", self.mounted("/", "ro"), "mounted read-only"),
            row(
                "capabilities",
                caps.into_iter().all(zero),
                "all sets of programs are empty",
            ),
            row("user", user != "0", format!("programs run as {user}")),
        ]
    }

    /// Rows of what separates programs from the host, whatever they can write.
    fn common_walls(&self, engine: &str) -> Vec<Protection> {
        // Two lines of headings.
        let names = self.interfaces.lines().skip(2);
        let names: Vec<_> = names
            .filter_map(|l| l.split(':').next())
            .map(str::trim)
            .collect();
        let alone = names.iter().all(|n| *n == "lo") && !self.interfaces.is_empty();
        let landlock = match self.landlock {
            0 => format!("the kernel has none, or {engine} forbids it"),
            abi => format!("version {abi}"),
        };
        let namespaces = format!("{engine}: {}", self.namespaces.join(", "));
        let filter = "the allow-list of the process level, in every program";
        vec![
            row("namespaces", self.namespaces.len() == 6, namespaces),
            row(
                "network",
                alone,
                format!("interfaces: {}", names.join(", ")),
            ),
            row(
                "own user",
                self.own_users,
                if self.own_users {
                    "each container has user ids of its own"
                } else {
                    "the engine gives no user ids of its own: all containers share them"
                },
            ),
            row("no_new_privs", self.field("NoNewPrivs:") == "1", "set"),
            row("seccomp", self.field("Seccomp:") == "2", filter),
            row("landlock", self.landlock > 0, landlock),
        ]
    }

    /// Rows of resource limits.
    fn limits(&self, engine: &str, spec: &SandboxSpec, cpus: Option<f64>) -> Vec<Protection> {
        let limit = |what: Option<u64>, unit: &str| match what {
            Some(n) => format!("{n} {unit}, by control group"),
            None => format!("{engine} set no limit that the host can see"),
        };
        let (files, folders) = match &spec.writable_root {
            None => (
                ["/work", "/tmp"].iter().all(|p| self.mounted(p, "nosuid")),
                "work and temporary folder in memory, bounded each",
            ),
            Some(root) => (
                self.root_bytes.is_some_and(|n| n <= root.bytes),
                "work and temporary folder are part of the root's layer",
            ),
        };
        let memory = self.memory == Some(spec.limits.memory_bytes);
        let processes = self.processes == Some(spec.limits.processes + 1);
        let near = |n: f64| self.processors.is_some_and(|p| (p - n).abs() < 0.01);
        let (bounded, shares) = match (cpus, self.processors) {
            (None, _) => (
                true,
                "CPU seconds of each process; shares are not bounded".into(),
            ),
            (Some(n), _) if near(n) => (
                true,
                format!("{n} at most, by control group; CPU seconds of each process"),
            ),
            (Some(n), seen) => (
                false,
                format!("{engine} was asked for {n} and set {seen:?}"),
            ),
        };
        vec![
            row("memory", memory, limit(self.memory, "bytes")),
            row(
                TCP_MEMORY,
                self.tcp,
                "by control group; version 1 must count it: memory.kmem.tcp.limit_in_bytes",
            ),
            row(
                "processes",
                processes,
                limit(self.processes, "with the agent"),
            ),
            row("files", files, folders),
            row("processors", bounded, shares),
        ]
    }
}

/// One row of the report.
fn row(name: &str, enforced: bool, how: impl Into<String>) -> Protection {
    Protection {
        name: name.into(),
        enforced,
        how: how.into(),
    }
}
