//! Protections of a container, from its own view and the kernel's.
//!
//! Nothing is reported as enforced because it was requested: every row compares a value that the probe
//! container or the kernel shows with the expected one.

use sinew_jail::spawner::TCP_MEMORY;
use sinew_sandbox::{Protection, SandboxSpec};

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
}

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
        let mut rows = self.walls(engine);
        rows.extend(self.limits(engine, spec, cpus));
        rows
    }

    /// Rows of what separates programs from the host.
    fn walls(&self, engine: &str) -> Vec<Protection> {
        let zero = |name| {
            let value = self.field(name);
            !value.is_empty() && value.trim_matches('0').is_empty()
        };
        let caps = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"];
        // Two lines of headings.
        let names = self.interfaces.lines().skip(2);
        let names: Vec<_> = names
            .filter_map(|l| l.split(':').next())
            .map(str::trim)
            .collect();
        let alone = names.iter().all(|n| *n == "lo") && !self.interfaces.is_empty();
        let user = self.field("Uid:").split_whitespace().next().unwrap_or("0");
        let landlock = match self.landlock {
            0 => format!("the kernel has none, or {engine} forbids it"),
            abi => format!("version {abi}"),
        };
        let namespaces = format!("{engine}: {}", self.namespaces.join(", "));
        let filter = "the allow-list of the process level, in every program";
        vec![
            row("namespaces", self.namespaces.len() == 6, namespaces),
            row("root", self.mounted("/", "ro"), "mounted read-only"),
            row(
                "network",
                alone,
                format!("interfaces: {}", names.join(", ")),
            ),
            row(
                "capabilities",
                caps.into_iter().all(zero),
                "all sets of programs are empty",
            ),
            row("user", user != "0", format!("programs run as {user}")),
            row(
                "own user",
                self.own_users,
                if self.own_users {
                    "each container has a user id of its own"
                } else {
                    "the engine takes no other user than 65534: all containers share it"
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
        let works = ["/work", "/tmp"].iter().all(|p| self.mounted(p, "nosuid"));
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
            row(
                "files",
                works,
                "work and temporary folder in memory, bounded each",
            ),
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
