//! Report of the protections that this host enforces.
//!
//! A row names a protection and what enforces it, or the reason why nothing does and a way out. `strict`
//! refuses a host with a row that is not in force.

use super::host::Host;
use crate::spec::Protection;

/// Row that matters only where connections can be made.
pub const TCP_MEMORY: &str = "tcp memory";

/// Name, whether it is in force, and how or why not.
fn row(name: &str, enforced: bool, how: String) -> Protection {
    Protection {
        name: name.into(),
        enforced,
        how,
    }
}

impl Host {
    /// Every protection of the level, in force or not.
    pub(super) fn protections(&self) -> Vec<Protection> {
        let always = |name, how: &str| row(name, true, how.into());
        let landlock = match &self.landlock {
            None => "the kernel has no landlock".into(),
            Some(common) => format!("ABI {}", common.abi),
        };
        let own_user = match &self.own_users {
            Ok(()) => "each sandbox has a user id of its own",
            Err(why) => why,
        };
        let limits = "file size, open files, core, locked memory";
        let mut rows = vec![
            always("namespaces", "pid, mount, net, ipc, uts, cgroup"),
            always(
                "network",
                "empty network namespace, no interface is up; only Unix sockets",
            ),
            always(
                "root",
                "read-only, pivot_root; /work and /tmp are private and bounded",
            ),
            always(
                "capabilities",
                "all sets empty, securebits locked, no_new_privs",
            ),
            always(
                "seccomp",
                "allow-list of calls and of their flags; clone3 answers ENOSYS, foreign ABIs kill",
            ),
            always("resource limits", limits),
            row("landlock", self.landlock.is_some(), landlock),
            row("own user", self.own_users.is_ok(), own_user.into()),
        ];
        rows.extend(self.limits());
        rows
    }

    /// Bounds on a sandbox as a whole.
    fn limits(&self) -> Vec<Protection> {
        let memory = self.hierarchy.limits_memory();
        let pids = self.hierarchy.limits_processes();
        let own_users = self.own_users.is_ok();
        let no_pids = match (own_users, self.nested_users) {
            (true, _) => "limit of the sandbox's own user",
            (_, true) => "limit of each execution's user namespace",
            _ => {
                "no writable cgroup with the pids controller, no user of its own to count for, and \
                 no user namespace in this one: a fork bomb takes processes away from all \
                 sandboxes; run as root, or give Sinew a cgroup"
            }
        };
        let cpu = self.hierarchy.counts_cpu();
        let (tcp, no_tcp) = match self.hierarchy.limits_tcp() {
            Ok(how) => (true, how),
            Err(why) => (false, why),
        };
        vec![
            row(
                "memory",
                memory.is_ok(),
                memory.map_or_else(
                    |why| format!("{why}; address space of each process is limited"),
                    Into::into,
                ),
            ),
            row(
                "processes",
                pids.is_some() || own_users || self.nested_users,
                pids.unwrap_or(no_pids).into(),
            ),
            row(
                "cpu time",
                cpu.is_some(),
                cpu.map_or_else(
                    || "no cgroup counts it: the limit holds for each process on its own".into(),
                    |how| format!("{how}: all processes of an execution together"),
                ),
            ),
            row(TCP_MEMORY, tcp, no_tcp.into()),
        ]
    }
}
