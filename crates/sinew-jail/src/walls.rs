//! Privileges that a process gives up before hostile code may run in it, as a table of system calls.
//!
//! One table serves all ways in: children of the spawner and of the agent carry it out in Rust, forks of the
//! Python zygote through `ctypes`. So no way in has weaker walls.
//!
//! | step | what is given up |
//! |---|---|
//! | namespaces | those of the spawner or the zygote, for those of the sandbox init |
//! | resource limits | CPU time, size of files, core dumps, locked memory, queues, signals; processes and address space where no group counts them |
//! | bounding set | capabilities that a program could get by `execve`; securebits are locked |
//! | user | groups, group and user; files that are not readable for all are out of reach |
//! | capabilities | permitted, effective, inheritable and ambient |
//! | no_new_privs | set-user-id programs and file capabilities have no effect |
//! | landlock | writes but below `/work` and `/tmp` and to devices without state; signals and abstract sockets outside |
//! | open files | last: a fork of the spawner holds more |
//! | seccomp | last of all: most of the calls above are not in the allow-list |
//!
//! The order matters: each step needs rights that a later one takes away.
//!
//! A root user of a sandbox with a user namespace keeps the capabilities over files that belong to that
//! namespace, and no others.

use crate::error::{Error, Result};
use crate::seccomp::Filter;
use crate::spec::Limits;
use std::os::fd::RawFd;

/// Steps that can fail; the number travels in a notice.
pub(crate) const STEPS: [&str; 19] = [
    "join the cgroup",
    "make namespaces",
    "mount the work folder",
    "mount /proc",
    "pivot_root",
    "use the network",
    "set resource limits",
    "drop capabilities",
    "become an unprivileged user",
    "set no_new_privs",
    "apply landlock",
    "apply seccomp",
    "fork",
    "execve",
    "enter the namespaces",
    "get the program",
    "take the terminal",
    "find the user",
    "enter the folder",
];
pub(crate) const JOIN: u32 = 0;
pub(crate) const NAMESPACES: u32 = 1;
pub(crate) const MOUNT_WORK: u32 = 2;
pub(crate) const MOUNT_PROC: u32 = 3;
pub(crate) const PIVOT: u32 = 4;
const LIMITS: u32 = 6;
const CAPABILITIES: u32 = 7;
const USER: u32 = 8;
const NO_NEW_PRIVS: u32 = 9;
const LANDLOCK: u32 = 10;
const SECCOMP: u32 = 11;
pub(crate) const FORK: u32 = 12;
pub const EXECVE: u32 = 13;
/// A step that may fail: what comes after it is carried out all the same.
pub(crate) const OPTIONAL: u32 = 255;
const ENTER: u32 = 14;
pub(crate) const PROGRAM: u32 = 15;
pub(crate) const TERMINAL: u32 = 16;
pub const WHO: u32 = 17;
pub const FOLDER: u32 = 18;

/// Capabilities that the zygote needs so that its forks can enter namespaces. The spawner's bounding set
/// holds only these: SETGID, SETUID, SETPCAP, SYS_CHROOT, SYS_PTRACE, SYS_ADMIN (capability.h).
const KEPT: [u32; 6] = [6, 7, 8, 18, 19, 21];

/// Capability to change capabilities and securebits (SETPCAP).
const SETPCAP: u32 = 8;

/// NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off, NO_CAP_AMBIENT_RAISE, all locked.
const SECUREBITS: i64 = 0b1110_1111;

/// The name of a failed step.
pub fn step_name(step: u32) -> &'static str {
    STEPS.get(step as usize).copied().unwrap_or("set-up")
}

/// The step and the errno of a call that failed.
pub(crate) type Failure = (u32, i32);

/// Call number, six arguments, their kinds (two bits each), step.
type Row = [i64; 9];

/// Row that stores the address of a place in the blob (64 bits) in the blob: offset, place.
const POKE_ADDRESS: i64 = -1;

/// Descriptors that are given: of the sandbox init, of a ruleset of landlock.
const INIT: i64 = 0;
const RULESET: i64 = 1;

#[derive(Clone, Copy)]
/// An argument of a call.
enum Arg {
    Is(i64),
    /// Offset in the blob.
    At(usize),
    /// One of the descriptors that are given.
    Given(i64),
}

/// The table and the bytes that its pointers mean.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    rows: Vec<Row>,
    blob: Vec<u8>,
}

/// A program of a guest, as its agent starts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestProgram<'a> {
    pub(crate) user: u32,
    pub(crate) group: u32,
    /// Further groups.
    pub(crate) groups: &'a [u32],
    /// Folder in which it starts.
    pub(crate) workdir: &'a [u8],
    /// Capabilities that it keeps, in a user namespace only.
    pub(crate) kept: &'a [u32],
    /// Resource, soft and hard limit.
    pub(crate) limits: &'a [[u64; 3]],
    pub(crate) landlock: bool,
    pub(crate) filter: Option<&'a Filter>,
}

/// Inputs of a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confinement<'a> {
    pub(crate) limits: &'a Limits,
    /// `None` in a user namespace with one user.
    pub(crate) uid: Option<u32>,
    pub(crate) filter: &'a Filter,
    pub(crate) landlock: bool,
    /// Limits the user's processes, if no cgroup limits them.
    pub(crate) limit_user_processes: bool,
    /// Limits the address space of a process, if no cgroup limits memory.
    pub(crate) limit_address_space: bool,
    /// Whether a cgroup counts the CPU time of an execution.
    pub(crate) cpu_counted: bool,
    /// Highest capability of the kernel, if all sandboxes share a user and no cgroup limits processes: a
    /// program then gets a user namespace, in which its processes are counted.
    pub(crate) own_namespace: Option<i32>,
}

/// Process that carries out a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// The sandbox init; it is in the namespaces already, and no process may look into it.
    Init,
    /// A child of the spawner that shares its memory until it calls `execve`.
    Program,
    /// A fork of the zygote, which has dropped its bounding set already.
    Python,
}

impl Plan {
    /// Everything between a fork and hostile code.
    pub(crate) fn confine(who: Who, c: &Confinement<'_>) -> Self {
        let mut plan = Self::default();
        plan.confinement(who, c);
        plan
    }

    /// Adds the steps by which a process gives up its privileges.
    fn confinement(&mut self, who: Who, c: &Confinement<'_>) {
        let plan = self;
        let first = who == Who::Init;
        if !first {
            plan.enter();
        }
        plan.resource_limits(c);
        match c.own_namespace.filter(|_| !first) {
            Some(last) => plan.own_namespace(c, last),
            None if who != Who::Python => plan.drop_bounding_set(&KEPT),
            None => {}
        }
        plan.become_user(c.uid);
        if !first {
            // Only its user may go there. A program can take that right from itself: the
            // next one starts at the root then.
            let work = plan.bytes(b"/work\0");
            plan.call(OPTIONAL, libc::SYS_chdir, &[Arg::At(work)]);
        }
        // Changing the user closed /proc/self to it; execve opens it again, and so does a fork of
        // the zygote. The first process stays closed, and what shares the spawner's memory is.
        plan.no_privileges(who == Who::Python, c.landlock);
        // This limit comes this late because a fork of the spawner holds more files than a program may open.
        let files = c.limits.open_files;
        plan.limit(libc::RLIMIT_NOFILE, files, files);
        plan.seccomp(c.filter);
    }

    /// Everything between a fork of an agent and hostile code.
    pub(crate) fn guest(program: &GuestProgram<'_>) -> Self {
        let mut plan = Self::default();
        let files = u64::from(libc::RLIMIT_NOFILE);
        let (late, early): (Vec<_>, Vec<_>) = program.limits.iter().partition(|l| l[0] == files);
        for &&[resource, soft, hard] in &early {
            plan.limit(resource as libc::__rlimit_resource_t, soft, hard);
        }
        let others = (0..=last_capability()).filter(|c| !program.kept.contains(c));
        plan.drop_from_bounding_set(&others.collect::<Vec<_>>());
        let keeps = !program.kept.is_empty();
        if !keeps {
            // Before the change of the user, after which the right to do so would be gone.
            plan.lock_securebits();
        }
        plan.become_ids(program.user, program.group, program.groups);
        if keeps {
            plan.keep_capabilities(program.kept);
        } else {
            plan.set_capabilities(0, 0);
        }
        plan.wall_in(true, program.landlock);
        let folder = plan.bytes(&[program.workdir, b"\0"].concat());
        plan.call(FOLDER, libc::SYS_chdir, &[Arg::At(folder)]);
        for &&[_, soft, hard] in &late {
            plan.limit(libc::RLIMIT_NOFILE, soft, hard);
        }
        if let Some(filter) = program.filter {
            plan.seccomp(filter);
        }
        plan
    }

    /// Limits and user of a monitor, which may not gain privileges; `None` keeps the user.
    pub(crate) fn monitor(limits: &[[u64; 3]], user: Option<(u32, u32)>) -> Self {
        let mut plan = Self::default();
        for &[resource, soft, hard] in limits {
            plan.limit(resource as libc::__rlimit_resource_t, soft, hard);
        }
        if let Some((user, group)) = user {
            plan.become_ids(user, group, &[]);
        }
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_NO_NEW_PRIVS, 1);
        plan
    }

    /// Takes away all capabilities and every way to get any, and applies landlock.
    fn no_privileges(&mut self, dumpable: bool, landlock: bool) {
        self.set_capabilities(0, 0);
        self.wall_in(dumpable, landlock);
    }

    /// Takes away every way to get capabilities, and applies landlock.
    fn wall_in(&mut self, dumpable: bool, landlock: bool) {
        self.prctl(NO_NEW_PRIVS, libc::PR_SET_NO_NEW_PRIVS, 1);
        self.prctl(NO_NEW_PRIVS, libc::PR_SET_DUMPABLE, i64::from(dumpable));
        if landlock {
            let ruleset = Arg::Given(RULESET);
            let restrict = [ruleset, Arg::Is(0)];
            self.call(LANDLOCK, libc::SYS_landlock_restrict_self, &restrict);
            self.call(LANDLOCK, libc::SYS_close, &[ruleset]);
        }
    }

    /// Plan of the zygote at its own start: it keeps only what its forks need to enter namespaces.
    pub(crate) fn zygote() -> Self {
        let mut plan = Self::default();
        plan.drop_bounding_set(&KEPT);
        plan.set_capabilities(set_of(&KEPT), 0);
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_NO_NEW_PRIVS, 1);
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_DUMPABLE, 0);
        plan
    }

    fn bytes(&mut self, bytes: &[u8]) -> usize {
        self.blob.resize(self.blob.len().next_multiple_of(8), 0);
        let at = self.blob.len();
        self.blob.extend_from_slice(bytes);
        at
    }

    fn call(&mut self, step: u32, nr: i64, args: &[Arg]) {
        let mut row: Row = [0; 9];
        row[0] = nr;
        for (i, arg) in args.iter().enumerate() {
            let (kind, value) = match *arg {
                Arg::Is(value) => (0, value),
                Arg::At(offset) => (1, offset as i64),
                Arg::Given(which) => (2, which),
            };
            row[1 + i] = value;
            row[7] |= kind << (2 * i);
        }
        row[8] = i64::from(step);
        self.rows.push(row);
    }

    fn prctl(&mut self, step: u32, option: i32, value: i64) {
        self.call(
            step,
            libc::SYS_prctl,
            &[Arg::Is(i64::from(option)), Arg::Is(value)],
        );
    }

    /// Joins the namespaces of the sandbox init; its PID namespace was chosen before the fork.
    fn enter(&mut self) {
        let flags = libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        let init = Arg::Given(INIT);
        self.call(ENTER, libc::SYS_setns, &[init, Arg::Is(i64::from(flags))]);
        self.call(ENTER, libc::SYS_close, &[init]);
        self.call(ENTER, libc::SYS_setsid, &[]);
        self.call(ENTER, libc::SYS_umask, &[Arg::Is(0o077)]);
    }

    fn resource_limits(&mut self, c: &Confinement<'_>) {
        let limits = c.limits;
        // The sum of all processes comes first where it is counted.
        let cpu = limits.cpu_s.ceil().max(1.0) as u64 + u64::from(c.cpu_counted);
        let mut all = vec![
            (libc::RLIMIT_CPU, cpu, cpu + 1),
            (libc::RLIMIT_CORE, 0, 0),
            (libc::RLIMIT_FSIZE, limits.work_bytes, limits.work_bytes),
            (libc::RLIMIT_MEMLOCK, 0, 0),
            (libc::RLIMIT_MSGQUEUE, 0, 0),
            (libc::RLIMIT_SIGPENDING, 256, 256),
        ];
        if c.uid.is_some() && c.limit_user_processes {
            // Counted for each user, and each sandbox has a separate user.
            let processes = limits.processes + 1;
            all.push((libc::RLIMIT_NPROC, processes, processes));
        }
        if c.limit_address_space {
            let bytes = limits.memory_bytes;
            all.push((libc::RLIMIT_AS, bytes, bytes));
        }
        for (resource, soft, hard) in all {
            self.limit(resource, soft, hard);
        }
    }

    fn limit(&mut self, resource: libc::__rlimit_resource_t, soft: u64, hard: u64) {
        let pair: Vec<u8> = [soft, hard].iter().flat_map(|v| v.to_ne_bytes()).collect();
        let at = self.bytes(&pair);
        let args = [Arg::Is(0), Arg::Is(i64::from(resource)), Arg::At(at)];
        self.call(LIMITS, libc::SYS_prlimit64, &args);
    }

    /// A user namespace without mapped users, in which processes are counted from zero. The capabilities that
    /// it brings are dropped at once.
    fn own_namespace(&mut self, c: &Confinement<'_>, last: i32) {
        let flags = [Arg::Is(i64::from(libc::CLONE_NEWUSER))];
        self.call(ENTER, libc::SYS_unshare, &flags);
        // The limit comes after the call: the limit of the process that makes a namespace holds for all
        // processes of this user.
        let processes = c.limits.processes;
        self.limit(libc::RLIMIT_NPROC, processes, processes);
        let all: Vec<u32> = (0..=last.unsigned_abs()).collect();
        self.drop_bounding_set(&all);
    }

    /// Drops these capabilities from the bounding set. For the spawner's own set see [`bound`].
    fn drop_bounding_set(&mut self, left: &[u32]) {
        self.drop_from_bounding_set(left);
        self.lock_securebits();
    }

    fn drop_from_bounding_set(&mut self, left: &[u32]) {
        for capability in left {
            let capability = i64::from(*capability);
            self.prctl(CAPABILITIES, libc::PR_CAPBSET_DROP, capability);
        }
    }

    fn lock_securebits(&mut self) {
        self.prctl(CAPABILITIES, libc::PR_SET_SECUREBITS, SECUREBITS);
    }

    /// Keeps only these capabilities, also through `execve`: as ambient ones, which no file can add to.
    fn keep_capabilities(&mut self, kept: &[u32]) {
        let set = set_of(kept);
        self.set_capabilities(set | 1 << SETPCAP, set);
        for capability in kept {
            let raise = [
                i64::from(libc::PR_CAP_AMBIENT),
                i64::from(libc::PR_CAP_AMBIENT_RAISE),
                i64::from(*capability),
            ];
            self.call(CAPABILITIES, libc::SYS_prctl, &raise.map(Arg::Is));
        }
        self.lock_securebits();
        self.set_capabilities(set, set);
    }

    fn become_user(&mut self, uid: Option<u32>) {
        if let Some(uid) = uid {
            self.become_ids(uid, uid, &[]);
        }
    }

    fn become_ids(&mut self, user: u32, group: u32, groups: &[u32]) {
        let list: Vec<u8> = groups.iter().flat_map(|g| g.to_ne_bytes()).collect();
        let list = match groups {
            [] => Arg::Is(0),
            _ => Arg::At(self.bytes(&list)),
        };
        let count = Arg::Is(groups.len() as i64);
        self.call(USER, libc::SYS_setgroups, &[count, list]);
        let (user, group) = (i64::from(user), i64::from(group));
        self.call(USER, libc::SYS_setresgid, &[Arg::Is(group); 3]);
        self.call(USER, libc::SYS_setresuid, &[Arg::Is(user); 3]);
    }

    /// Effective and permitted set, and the inheritable one, outside of which nothing stays ambient.
    fn set_capabilities(&mut self, set: u32, inheritable: u32) {
        // capset(2), version 3: header (version, pid), then two triples.
        let header = self.bytes(&[0x2008_0522u32.to_ne_bytes(), [0; 4]].concat());
        let words = [set, set, inheritable, 0, 0, 0];
        let data: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let data = self.bytes(&data);
        let args = [Arg::At(header), Arg::At(data)];
        self.call(CAPABILITIES, libc::SYS_capset, &args);
    }

    fn seccomp(&mut self, filter: &Filter) {
        let code = self.bytes(&filter.bytes);
        // struct sock_fprog: length, padding, address.
        let mut program = [0u8; 16];
        program[..2].copy_from_slice(&filter.instructions.to_ne_bytes());
        let program = self.bytes(&program);
        let at = program as i64 + 8;
        let poke = [POKE_ADDRESS, at, code as i64, 0, 0, 0, 0, 0, 0];
        self.rows.push(poke);
        // SECCOMP_SET_MODE_FILTER is 1.
        let args = [Arg::Is(1), Arg::Is(0), Arg::At(program)];
        self.call(SECCOMP, libc::SYS_seccomp, &args);
    }

    /// Rows and blob in one packet: number of rows, then both.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.rows.len() * size_of::<Row>() + self.blob.len());
        out.extend((self.rows.len() as i64).to_ne_bytes());
        for row in &self.rows {
            out.extend(row.iter().flat_map(|value| value.to_ne_bytes()));
        }
        out.extend(&self.blob);
        out
    }

    /// Carries the plan out in this process, which has these descriptors. Allocates nothing.
    ///
    /// # Errors
    /// The first call that failed.
    pub(crate) fn run(&mut self, given: [RawFd; 2]) -> std::result::Result<(), Failure> {
        let base = self.blob.as_mut_ptr();
        for row in &self.rows {
            let [nr, a, b, ..] = *row;
            if nr == POKE_ADDRESS {
                let value = base as i64 + b;
                self.blob[a as usize..a as usize + 8].copy_from_slice(&value.to_ne_bytes());
                continue;
            }
            let arg = |i: usize| match (row[7] >> (2 * i)) & 3 {
                0 => row[1 + i],
                1 => base as i64 + row[1 + i],
                _ => i64::from(given[row[1 + i] as usize]),
            };
            // SAFETY: pointers of the table lie in the blob, which outlives the call and holds
            // what each call expects there; descriptors are those of this process.
            let result =
                unsafe { libc::syscall(nr, arg(0), arg(1), arg(2), arg(3), arg(4), arg(5)) };
            if result == -1 && row[8] != i64::from(OPTIONAL) {
                let errno = std::io::Error::last_os_error().raw_os_error();
                return Err((row[8] as u32, errno.unwrap_or(0)));
            }
        }
        Ok(())
    }
}

/// Takes everything that no child may have out of the bounding set of this process: once, where each
/// child would do it. The highest capability that the kernel has.
pub(crate) fn bound() -> Result<i32> {
    let last = last_capability();
    for capability in (0..=last).filter(|c| !KEPT.contains(c)) {
        // SAFETY: an option with an integer.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            return Err(Error::last("drop a capability from the bounding set"));
        }
    }
    Ok(last as i32)
}

/// Capabilities as bits.
fn set_of(capabilities: &[u32]) -> u32 {
    capabilities.iter().map(|capability| 1 << capability).sum()
}

/// The highest capability that the kernel has.
fn last_capability() -> u32 {
    // SAFETY: an option with an integer; the kernel refuses a capability that it does not have.
    let known = |c: &u32| unsafe { libc::prctl(libc::PR_CAPBSET_READ, *c, 0, 0, 0) } >= 0;
    (0..64).take_while(known).last().unwrap_or(0)
}
