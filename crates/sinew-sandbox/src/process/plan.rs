//! What a process does before hostile code may run in it, as a table of system calls.
//!
//! One table serves all ways in: the spawner's own children carry it out in Rust, forks of the
//! mother of rooms in machine code, and forks of the Python zygote in that code or through
//! `ctypes`. So none can be weaker.

use super::seccomp::Filter;
use crate::port::Limits;
use std::os::fd::RawFd;

/// Steps that can fail; the number travels in a notice.
pub(crate) const STEPS: [&str; 16] = [
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
pub(crate) const EXECVE: u32 = 13;
/// A step that may fail: what comes after it is carried out all the same.
pub(super) const OPTIONAL: u32 = 255;
const ENTER: u32 = 14;

/// What the zygote needs for its forks to enter rooms, and all that is left in the spawner's bounding
/// set: SETGID, SETUID, SETPCAP, SYS_CHROOT, SYS_PTRACE, SYS_ADMIN (capability.h).
const KEPT: [u32; 6] = [6, 7, 8, 18, 19, 21];
/// What making a room takes: SETGID, SETUID, SYS_ADMIN.
const MOTHERS: [u32; 3] = [6, 7, 21];

/// The name of a failed step.
pub(crate) fn step_name(step: u32) -> &'static str {
    STEPS.get(step as usize).copied().unwrap_or("set-up")
}

/// Call number, six arguments, their kinds (two bits each), slot for the result or -1, step.
pub(crate) type Row = [i64; 10];

/// Row that stores a slot's value (32 bits) in the blob: offset, slot.
const POKE_SLOT: i64 = -1;
/// Row that stores the address of a place in the blob (64 bits) in the blob: offset, place.
pub(crate) const POKE_ADDRESS: i64 = -2;

/// Row that leaves out the next one unless a slot's value is greater: slot, value.
pub(crate) const UNLESS_MORE: i64 = -3;

/// Slots that hold descriptors at the start: of the room's first process (in that itself, of the
/// sandbox's files), of a ruleset of landlock if there is one already.
pub(super) const ROOM: u8 = 0;
pub(super) const FILES: u8 = 0;
const RULESET: u8 = 1;
const PATH: u8 = 2;
/// Descriptors that can be given at the start; the slots behind them are for results.
pub(super) const GIVEN: usize = 8;
pub(super) const SLOTS: usize = 12;

#[derive(Clone, Copy)]
pub(super) enum Arg {
    Is(i64),
    /// Offset in the blob.
    At(usize),
    Slot(u8),
}

/// The table and the bytes that its pointers mean.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    rows: Vec<Row>,
    blob: Vec<u8>,
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confinement<'a> {
    pub(crate) limits: &'a Limits,
    /// `None` in a user namespace with one user.
    pub(crate) uid: Option<u32>,
    pub(crate) filter: &'a Filter,
    pub(crate) landlock_abi: i64,
    /// Whether a ruleset is made already; else the table makes one.
    pub(crate) has_ruleset: bool,
    /// Where no cgroup limits processes.
    pub(crate) limit_user_processes: bool,
    /// Address space of a process, where no cgroup limits memory.
    pub(crate) limit_address_space: bool,
    /// Whether a cgroup counts the CPU time of an execution.
    pub(crate) cpu_counted: bool,
    /// Where all sandboxes share a user and no cgroup limits processes: a program gets a user
    /// namespace, for which they are counted. The highest capability that the kernel has.
    pub(crate) own_namespace: Option<i32>,
    /// A loopback interface of its own: TCP may be used.
    pub(crate) tcp: bool,
}

/// Who carries a plan out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// The first process of a room; it is in the namespaces already, nobody may look into it.
    Init,
    /// The same as a fork of the mother, which has dropped its bounding set already.
    MothersInit,
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

    /// What a process gives up.
    pub(super) fn confinement(&mut self, who: Who, c: &Confinement<'_>) {
        let plan = self;
        let first = matches!(who, Who::Init | Who::MothersInit);
        if !first {
            plan.enter();
        }
        plan.resource_limits(c);
        match c.own_namespace.filter(|_| !first) {
            Some(last) => plan.own_namespace(c, last),
            None if matches!(who, Who::Init | Who::Program) => plan.drop_bounding_set(&KEPT),
            None => {}
        }
        plan.become_user(c.uid);
        if !first {
            // Nobody but its user may go there. A program can take that right from itself: the
            // next one starts at the root then.
            let work = plan.bytes(b"/work\0");
            plan.call(OPTIONAL, libc::SYS_chdir, &[Arg::At(work)]);
        }
        plan.set_capabilities(0);
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_NO_NEW_PRIVS, 1);
        // Changing the user closed /proc/self to it; execve opens it again, and so does a fork of
        // the zygote. The first process stays closed, and what shares the spawner's memory is.
        let dumpable = i64::from(who == Who::Python);
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_DUMPABLE, dumpable);
        if c.landlock_abi > 0 {
            if !c.has_ruleset {
                plan.landlock_ruleset(c.landlock_abi, c.tcp);
            }
            let ruleset = Arg::Slot(RULESET);
            let restrict = [ruleset, Arg::Is(0)];
            plan.call(LANDLOCK, libc::SYS_landlock_restrict_self, &restrict);
            plan.call(LANDLOCK, libc::SYS_close, &[ruleset]);
        }
        // Only now: a fork of the spawner holds more files than a program may open.
        let files = c.limits.open_files;
        plan.limit(libc::RLIMIT_NOFILE, files, files);
        plan.seccomp(c.filter);
    }

    /// What the zygote gives up at its own start: all but what its forks need to enter rooms.
    pub(crate) fn zygote() -> Self {
        Self::keep(&KEPT)
    }

    /// What the mother of rooms gives up: all but what her forks need to make them.
    pub(crate) fn mother() -> Self {
        Self::keep(&MOTHERS)
    }

    fn keep(capabilities: &[u32]) -> Self {
        let mut plan = Self::default();
        plan.drop_bounding_set(&KEPT);
        plan.set_capabilities(capabilities.iter().map(|capability| 1 << capability).sum());
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_NO_NEW_PRIVS, 1);
        plan.prctl(NO_NEW_PRIVS, libc::PR_SET_DUMPABLE, 0);
        plan
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> usize {
        self.blob.resize(self.blob.len().next_multiple_of(8), 0);
        let at = self.blob.len();
        self.blob.extend_from_slice(bytes);
        at
    }

    pub(super) fn call(&mut self, step: u32, nr: i64, args: &[Arg]) {
        self.call_into(step, nr, args, None);
    }

    /// The next row is for values of this slot above `most` only.
    pub(super) fn unless_more(&mut self, slot: u8, most: usize) {
        let row = [
            UNLESS_MORE,
            i64::from(slot),
            most as i64,
            0,
            0,
            0,
            0,
            0,
            -1,
            0,
        ];
        self.rows.push(row);
    }

    pub(super) fn call_into(&mut self, step: u32, nr: i64, args: &[Arg], slot: Option<u8>) {
        let mut row: Row = [0; 10];
        row[0] = nr;
        for (i, arg) in args.iter().enumerate() {
            let (kind, value) = match *arg {
                Arg::Is(value) => (0, value),
                Arg::At(offset) => (1, offset as i64),
                Arg::Slot(slot) => (2, i64::from(slot)),
            };
            row[1 + i] = value;
            row[7] |= kind << (2 * i);
        }
        row[8] = slot.map_or(-1, i64::from);
        row[9] = i64::from(step);
        self.rows.push(row);
    }

    fn prctl(&mut self, step: u32, option: i32, value: i64) {
        self.call(
            step,
            libc::SYS_prctl,
            &[Arg::Is(i64::from(option)), Arg::Is(value)],
        );
    }

    /// Joins the namespaces of a room; its PID namespace was chosen before the fork.
    fn enter(&mut self) {
        let flags = libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        let room = Arg::Slot(ROOM);
        self.call(ENTER, libc::SYS_setns, &[room, Arg::Is(i64::from(flags))]);
        self.call(ENTER, libc::SYS_close, &[room]);
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
            // Counted for each user, and each sandbox has a user of its own.
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

    /// A user namespace in which nobody is anybody, and in which processes are counted from zero.
    /// What it gives of capabilities goes at once.
    fn own_namespace(&mut self, c: &Confinement<'_>, last: i32) {
        let flags = [Arg::Is(i64::from(libc::CLONE_NEWUSER))];
        self.call(ENTER, libc::SYS_unshare, &flags);
        // After it: the limit of who makes a namespace holds for all that this user runs.
        let processes = c.limits.processes;
        self.limit(libc::RLIMIT_NPROC, processes, processes);
        let all: Vec<u32> = (0..=last.unsigned_abs()).collect();
        self.drop_bounding_set(&all);
    }

    /// What is left in it, of the spawner's see [`bound`].
    fn drop_bounding_set(&mut self, left: &[u32]) {
        for capability in left {
            let capability = i64::from(*capability);
            self.prctl(CAPABILITIES, libc::PR_CAPBSET_DROP, capability);
        }
        // NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off, NO_CAP_AMBIENT_RAISE, all locked.
        self.prctl(CAPABILITIES, libc::PR_SET_SECUREBITS, 0b1110_1111);
    }

    fn become_user(&mut self, uid: Option<u32>) {
        let Some(uid) = uid.map(i64::from) else {
            return;
        };
        self.call(USER, libc::SYS_setgroups, &[Arg::Is(0), Arg::Is(0)]);
        let same = [Arg::Is(uid); 3];
        self.call(USER, libc::SYS_setresgid, &same);
        self.call(USER, libc::SYS_setresuid, &same);
    }

    /// Effective and permitted set; the inheritable and with it the ambient set become empty.
    fn set_capabilities(&mut self, set: u32) {
        // capset(2), version 3: header (version, pid), then two triples.
        let header = self.bytes(&[0x2008_0522u32.to_ne_bytes(), [0; 4]].concat());
        let words = [set, set, 0, 0, 0, 0];
        let data: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let data = self.bytes(&data);
        let args = [Arg::At(header), Arg::At(data)];
        self.call(CAPABILITIES, libc::SYS_capset, &args);
    }

    fn landlock_ruleset(&mut self, abi: i64, tcp: bool) {
        let rules = super::landlock::rules(abi, tcp);
        let ruleset = self.bytes(&rules.ruleset);
        let size = Arg::Is(rules.ruleset.len() as i64);
        self.call_into(
            LANDLOCK,
            libc::SYS_landlock_create_ruleset,
            &[Arg::At(ruleset), size, Arg::Is(0)],
            Some(RULESET),
        );
        let flags = Arg::Is(i64::from(libc::O_PATH | libc::O_CLOEXEC));
        for (path, access) in rules.paths {
            let path = self.bytes(path.to_bytes_with_nul());
            let here = Arg::Is(i64::from(libc::AT_FDCWD));
            let open = [here, Arg::At(path), flags, Arg::Is(0)];
            self.call_into(LANDLOCK, libc::SYS_openat, &open, Some(PATH));
            // struct landlock_path_beneath_attr, packed: rights, descriptor.
            let rule = self.bytes(&[&access.to_ne_bytes()[..], &[0; 4]].concat());
            self.rows.push(poke(POKE_SLOT, rule + 8, i64::from(PATH)));
            let add = [Arg::Slot(RULESET), Arg::Is(1), Arg::At(rule), Arg::Is(0)];
            self.call(LANDLOCK, libc::SYS_landlock_add_rule, &add);
            self.call(LANDLOCK, libc::SYS_close, &[Arg::Slot(PATH)]);
        }
    }

    fn seccomp(&mut self, filter: &Filter) {
        let code = self.bytes(&filter.bytes);
        // struct sock_fprog: length, padding, address.
        let mut program = [0u8; 16];
        program[..2].copy_from_slice(&filter.instructions.to_ne_bytes());
        let program = self.bytes(&program);
        self.rows.push(poke(POKE_ADDRESS, program + 8, code as i64));
        // SECCOMP_SET_MODE_FILTER is 1.
        let args = [Arg::Is(1), Arg::Is(0), Arg::At(program)];
        self.call(SECCOMP, libc::SYS_seccomp, &args);
    }

    /// Rows and blob in one packet: number of rows, then both.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.rows.len() * 80 + self.blob.len());
        self.encode_into(&mut out);
        out
    }

    /// Appends what [`Plan::encode`] gives.
    pub(super) fn encode_into(&self, out: &mut Vec<u8>) {
        out.extend((self.rows.len() as i64).to_ne_bytes());
        for row in &self.rows {
            out.extend(row.iter().flat_map(|value| value.to_ne_bytes()));
        }
        out.extend(&self.blob);
    }

    /// Carries the plan out in this process; `given` descriptors are in the first slots.
    ///
    /// # Errors
    /// The step and the errno of the first call that failed.
    pub(crate) fn run(&mut self, given: &[RawFd]) -> Result<(), (u32, i32)> {
        let mut slots = [-1; SLOTS];
        for (slot, fd) in slots.iter_mut().zip(given) {
            *slot = i64::from(*fd);
        }
        let base = self.blob.as_mut_ptr();
        let mut rows = self.rows.iter();
        while let Some(row) = rows.next() {
            let [nr, a, b, ..] = *row;
            if nr == UNLESS_MORE {
                if slots[a as usize] <= b {
                    rows.next();
                }
                continue;
            }
            if nr == POKE_SLOT {
                let value = slots[b as usize] as i32;
                self.blob[a as usize..a as usize + 4].copy_from_slice(&value.to_ne_bytes());
                continue;
            }
            if nr == POKE_ADDRESS {
                let value = base as i64 + b;
                self.blob[a as usize..a as usize + 8].copy_from_slice(&value.to_ne_bytes());
                continue;
            }
            let arg = |i: usize| match (row[7] >> (2 * i)) & 3 {
                0 => row[1 + i],
                1 => base as i64 + row[1 + i],
                _ => slots[row[1 + i] as usize],
            };
            // SAFETY: pointers of the table lie in the blob, which outlives the call and holds
            // what each call expects there; descriptors are those of this process.
            let result =
                unsafe { libc::syscall(nr, arg(0), arg(1), arg(2), arg(3), arg(4), arg(5)) };
            if result == -1 && row[9] == i64::from(OPTIONAL) {
                continue;
            }
            if result == -1 {
                let errno = std::io::Error::last_os_error().raw_os_error();
                return Err((row[9] as u32, errno.unwrap_or(0)));
            }
            if row[8] >= 0 {
                slots[row[8] as usize] = result;
            }
        }
        Ok(())
    }
}

fn poke(kind: i64, at: usize, what: i64) -> Row {
    [kind, at as i64, what, 0, 0, 0, 0, 0, -1, 0]
}

/// Takes everything that no child may have out of the bounding set of this process: once, where each
/// child would do it. The highest capability that the kernel has.
pub(crate) fn bound() -> Result<i32, String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap");
    let last: u32 = text.ok().and_then(|s| s.trim().parse().ok()).unwrap_or(40);
    for capability in (0..=last).filter(|c| !KEPT.contains(c)) {
        // SAFETY: an option with an integer.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            let error = std::io::Error::last_os_error();
            return Err(format!("drop capability {capability}: {error}"));
        }
    }
    Ok(last as i32)
}
