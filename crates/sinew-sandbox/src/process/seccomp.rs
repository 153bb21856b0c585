//! The system calls that jailed code may make. Everything else answers EPERM, foreign ABIs kill.

use std::collections::BTreeMap;

/// Flags of `clone` that make namespaces: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const CLONE_NEW: u32 = 0x7E02_0000;

/// Allowed whatever the arguments. Chosen from what CPython, shells and the usual tools use on
/// glibc; nothing that mounts, traces, loads, configures or opens networks.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_ftruncate,
    libc::SYS_truncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_umask,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_copy_file_range,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_brk,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigsuspend,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_setpgid,
    libc::SYS_setsid,
    libc::SYS_getpriority,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_times,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_gettimeofday,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_getitimer,
    libc::SYS_setitimer,
    libc::SYS_getrandom,
    libc::SYS_capget,
    libc::SYS_getcpu,
    libc::SYS_socketpair,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

#[cfg(target_arch = "x86_64")]
const ALLOWED_LEGACY: &[i64] = &[
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_readlink,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_getdents,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_arch_prctl,
    libc::SYS_time,
    libc::SYS_alarm,
    libc::SYS_pause,
    libc::SYS_getpgrp,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_LEGACY: &[i64] = &[];

/// A compiled filter as the kernel takes it.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    /// `struct sock_filter`s.
    pub(crate) bytes: Vec<u8>,
    /// How many.
    pub(crate) instructions: u16,
}

/// `struct sock_filter`: code, jumps if true and if not, operand.
type Instruction = (u16, u8, u8, u32);

// Classic BPF (linux/bpf_common.h) on `struct seccomp_data`.
const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;
const AT_NUMBER: u32 = 0;
const AT_ARCH: u32 = 4;
const AT_ARGUMENTS: u32 = 16;

const ALLOW: u32 = 0x7fff_0000;
const KILL: u32 = 0x8000_0000;
const REFUSE: u32 = 0x0005_0000 | libc::EPERM as u32;
const MISSING: u32 = 0x0005_0000 | libc::ENOSYS as u32;

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(not(target_arch = "x86_64"))]
const AUDIT_ARCH: u32 = 0xC000_00B7;

/// What must hold of the low 32 bits of an argument: of these, this value, or not it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Condition {
    argument: u8,
    mask: u32,
    value: u32,
    equal: bool,
}

fn is(argument: u8, value: i32) -> Condition {
    masked(argument, u32::MAX, value as u32)
}

fn is_not(argument: u8, value: u32) -> Condition {
    Condition {
        equal: false,
        ..masked(argument, u32::MAX, value)
    }
}

fn masked(argument: u8, mask: u32, value: u32) -> Condition {
    Condition {
        argument,
        mask,
        value,
        equal: true,
    }
}

/// What is answered to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Answer {
    Return(u32),
    /// Allowed if all conditions of one of the lists hold.
    Check(Vec<Vec<Condition>>),
}

type Answers = BTreeMap<u32, Answer>;

/// The filter of sandboxes; with `tcp`, TCP sockets over IP can be made.
pub(crate) fn filter(tcp: bool) -> Result<Filter, String> {
    compile(&allow_list(tcp))
}

/// The filter of a room's first process, which tells that it is ready and then waits.
pub(crate) fn init_filter() -> Result<Filter, String> {
    let calls = [
        libc::SYS_write,
        libc::SYS_close_range,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigreturn,
        libc::SYS_restart_syscall,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_pause,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_ppoll,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ];
    compile(&calls.map(|c| (c as u32, Answer::Return(ALLOW))).into())
}

/// SIGSYS and SIGXCPU tell of a forbidden call and of spent CPU time: only the kernel sends them.
const RESERVED_SIGNALS: [i32; 2] = [libc::SIGSYS, libc::SIGXCPU];

fn honest_signal(argument: u8) -> Vec<Vec<Condition>> {
    vec![
        RESERVED_SIGNALS
            .map(|s| is_not(argument, s as u32))
            .to_vec(),
    ]
}

fn allow_list(tcp: bool) -> Answers {
    let free = ALLOWED.iter().chain(ALLOWED_LEGACY);
    let mut answers: Answers = free.map(|&c| (c as u32, Answer::Return(ALLOW))).collect();
    // `clone3` hides its flags behind a pointer: ENOSYS makes glibc use `clone`, which is checked.
    answers.insert(libc::SYS_clone3 as u32, Answer::Return(MISSING));
    let mut check = |call: i64, lists| answers.insert(call as u32, Answer::Check(lists));
    // No namespaces, and a child's end sends SIGCHLD or nothing.
    let clone = [0, libc::SIGCHLD as u32].map(|s| vec![masked(0, CLONE_NEW | 0xff, s)]);
    check(libc::SYS_clone, clone.to_vec());
    let mut socket = vec![vec![is(0, libc::AF_UNIX)]];
    if tcp {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let stream = masked(1, 0xf, libc::SOCK_STREAM as u32);
            socket.push(vec![is(0, family), stream]);
        }
    }
    check(libc::SYS_socket, socket);
    for (call, signal_at) in [
        (libc::SYS_kill, 1),
        (libc::SYS_tkill, 1),
        (libc::SYS_tgkill, 2),
    ] {
        check(call, honest_signal(signal_at));
    }
    // F_SETSIG (10) lets the kernel send any signal.
    check(libc::SYS_fcntl, vec![vec![is_not(1, 10)]]);
    // Its own limits only: those of the sandbox's init belong to the same user.
    check(libc::SYS_prlimit64, vec![vec![is(0, 0)]]);
    // Typing into a terminal that somebody else reads.
    let typing = [libc::TIOCSTI, libc::TIOCLINUX].map(|r| is_not(1, r as u32));
    check(libc::SYS_ioctl, vec![typing.to_vec()]);
    let options = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_GET_DUMPABLE];
    check(libc::SYS_prctl, options.map(|o| vec![is(0, o)]).to_vec());
    if tcp {
        for call in [
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept,
            libc::SYS_accept4,
        ] {
            answers.insert(call as u32, Answer::Return(ALLOW));
        }
    }
    answers
}

/// A search tree over the numbers. The kernel walks a filter once for each call number when it
/// is set, and translates it anew for each process: a list of all calls takes 0.5 ms, this 0.05.
fn compile(answers: &Answers) -> Result<Filter, String> {
    let refused = Answer::Return(REFUSE);
    // Where the answer changes: from this number on, that one.
    let mut steps: Vec<(u32, &Answer)> = vec![(0, &refused)];
    let mut step = |number: u32, answer| match steps.last_mut() {
        Some(last) if last.0 == number => last.1 = answer,
        Some(last) if last.1 == answer => {}
        _ => steps.push((number, answer)),
    };
    let mut next = 0;
    for (&number, answer) in answers {
        if number > next {
            step(next, &refused);
        }
        step(number, answer);
        next = number + 1;
    }
    step(next, &refused);
    let mut program = vec![
        (LOAD, 0, 0, AT_ARCH),
        (IF_EQUAL, 1, 0, AUDIT_ARCH),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, AT_NUMBER),
    ];
    program.extend(search(&steps));
    let instructions = u16::try_from(program.len()).map_err(|e| format!("filter: {e}"))?;
    let bytes = program.iter().flat_map(|&(code, jt, jf, k)| {
        let ([a, b], [k0, k1, k2, k3]) = (code.to_ne_bytes(), k.to_ne_bytes());
        [a, b, jt, jf, k0, k1, k2, k3]
    });
    Ok(Filter {
        bytes: bytes.collect(),
        instructions,
    })
}

fn search(steps: &[(u32, &Answer)]) -> Vec<Instruction> {
    match steps {
        [] => Vec::new(),
        [(_, Answer::Return(value))] => vec![(RETURN, 0, 0, *value)],
        [(_, Answer::Check(lists))] => checks(lists),
        _ => {
            let (low, high) = steps.split_at(steps.len() / 2);
            let (below, above) = (search(low), search(high));
            let mut code = match u8::try_from(below.len()) {
                Ok(skip) => vec![(IF_AT_LEAST, skip, 0, high[0].0)],
                Err(_) => vec![
                    (IF_AT_LEAST, 0, 1, high[0].0),
                    (JUMP, 0, 0, below.len() as u32),
                ],
            };
            code.extend(below);
            code.extend(above);
            code
        }
    }
}

fn checks(lists: &[Vec<Condition>]) -> Vec<Instruction> {
    let mut code = Vec::new();
    for list in lists {
        let sizes = list.iter().map(|c| 2 + u8::from(c.mask != u32::MAX));
        // Of what is left of the list, its answer included.
        let mut left = sizes.sum::<u8>() + 1;
        for c in list {
            code.push((LOAD, 0, 0, AT_ARGUMENTS + 8 * u32::from(c.argument)));
            left -= 2;
            if c.mask != u32::MAX {
                code.push((AND, 0, 0, c.mask));
                left -= 1;
            }
            let (jt, jf) = if c.equal { (0, left) } else { (left, 0) };
            code.push((IF_EQUAL, jt, jf, c.value));
        }
        code.push((RETURN, 0, 0, ALLOW));
    }
    code.push((RETURN, 0, 0, REFUSE));
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a filter answers, by its instructions.
    fn answer(filter: &Filter, arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let code: Vec<Instruction> = filter
            .bytes
            .chunks_exact(8)
            .map(|i| {
                let k = u32::from_ne_bytes([i[4], i[5], i[6], i[7]]);
                (u16::from_ne_bytes([i[0], i[1]]), i[2], i[3], k)
            })
            .collect();
        let (mut at, mut value) = (0, 0);
        loop {
            let (op, jt, jf, k) = code[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { jt } else { jf });
            match (op, k) {
                (LOAD, AT_NUMBER) => value = number,
                (LOAD, AT_ARCH) => value = arch,
                (LOAD, k) => value = arguments[((k - AT_ARGUMENTS) / 8) as usize] as u32,
                (AND, k) => value &= k,
                (JUMP, k) => at += k as usize,
                (IF_EQUAL, k) => at += jump(value == k),
                (IF_AT_LEAST, k) => at += jump(value >= k),
                (RETURN, k) => return k,
                other => panic!("instruction {other:?}"),
            }
        }
    }

    fn expected(answers: &Answers, number: u32, arguments: [u64; 6]) -> u32 {
        let holds = |c: &Condition| {
            let value = arguments[usize::from(c.argument)] as u32 & c.mask;
            (value == c.value) == c.equal
        };
        match answers.get(&number) {
            None => REFUSE,
            Some(Answer::Return(value)) => *value,
            Some(Answer::Check(lists)) => match lists.iter().any(|l| l.iter().all(holds)) {
                true => ALLOW,
                false => REFUSE,
            },
        }
    }

    #[test]
    fn the_tree_answers_as_the_list_says() {
        let values = [0, 1, 2, 10, 11, 16, 17, 24, 31, 38, 0x11, 0x5412, 0x541c];
        let large = [0x1000_0000, 0x7E02_0000, u64::MAX, 1 << 32];
        for tcp in [false, true] {
            let (filter, answers) = (filter(tcp).unwrap(), allow_list(tcp));
            assert!(filter.instructions < 400, "{}", filter.instructions);
            for number in (0..600).chain([1 << 30, (1 << 30) + 59, u32::MAX]) {
                for a in values.into_iter().chain(large) {
                    for b in values.into_iter().chain(large) {
                        let arguments = [a, b, a ^ b, 0, 0, 0];
                        let got = answer(&filter, AUDIT_ARCH, number, arguments);
                        assert_eq!(got, expected(&answers, number, arguments), "{number}");
                        assert_eq!(answer(&filter, 0x4000_0003, number, arguments), KILL);
                    }
                }
            }
        }
    }

    #[test]
    fn namespaces_networks_and_told_signals_are_refused() {
        let filter = filter(false).unwrap();
        let ask = |call: i64, a: u64, b: u64| {
            answer(&filter, AUDIT_ARCH, call as u32, [a, b, 0, 0, 0, 0])
        };
        assert_eq!(ask(libc::SYS_clone, 0x11, 0), ALLOW);
        assert_eq!(ask(libc::SYS_clone, 0x1000_0011, 0), REFUSE);
        assert_eq!(ask(libc::SYS_clone3, 0, 0), MISSING);
        assert_eq!(ask(libc::SYS_socket, 1, 1), ALLOW);
        assert_eq!(ask(libc::SYS_socket, 2, 1), REFUSE);
        assert_eq!(ask(libc::SYS_kill, 5, 9), ALLOW);
        assert_eq!(ask(libc::SYS_kill, 5, libc::SIGSYS as u64), REFUSE);
        assert_eq!(ask(libc::SYS_mount, 0, 0), REFUSE);
        assert_eq!(ask(libc::SYS_bpf, 0, 0), REFUSE);
        let init = init_filter().unwrap();
        let ask = |call: i64| answer(&init, AUDIT_ARCH, call as u32, [0; 6]);
        assert_eq!(ask(libc::SYS_write), ALLOW);
        assert_eq!(ask(libc::SYS_openat), REFUSE);
        assert_eq!(ask(libc::SYS_execve), REFUSE);
    }
}
