//! The system calls that jailed code may make. Everything else fails, mostly with EPERM; foreign ABIs kill.
//!
//! The numbers are found in search trees, not in lists as compilers of filters make them: 0.05 ms instead of
//! 0.5 ms a process (docs/log.md, Sandboxes).
//!
//! For calls with flags, options or commands that reach beyond the sandbox or into rarely used parts of the
//! kernel, `calls` lists the allowed ones, not the refused ones.
//!
//! A filter is built once for each kind of sandbox and installed by every process that is confined, as a
//! row of its plan (`walls`). It is classic BPF: fewer than 900 instructions, of which a call passes
//! about ten to its number.

use crate::calls::{Condition, checked, numbers};
use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// Calls that are allowed whatever the arguments. They are chosen from those that CPython, shells, the usual
/// tools, Node.js and Bun use on glibc; none mounts, traces, loads, configures or opens networks. A timer
/// that is a file (`timerfd`) shows its own process the time; a call that wakes the host needs a capability.
/// Watching folders (`inotify`) stays refused: the folders that the host shows would reveal the host's work
/// in them.
const ALLOWED: &[i64] = &numbers! {
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
    SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_fstat SYS_newfstatat SYS_statx SYS_statfs
    SYS_fstatfs SYS_lseek SYS_ftruncate SYS_truncate SYS_fallocate SYS_fsync SYS_fdatasync SYS_flock
    SYS_getdents64 SYS_getcwd SYS_chdir SYS_fchdir SYS_mkdirat SYS_unlinkat SYS_renameat SYS_linkat
    SYS_symlinkat SYS_readlinkat SYS_faccessat SYS_faccessat2 SYS_fchmod SYS_fchmodat SYS_fchown
    SYS_fchownat SYS_utimensat SYS_umask SYS_dup SYS_dup3 SYS_ppoll SYS_pselect6 SYS_epoll_create1
    SYS_epoll_ctl SYS_epoll_pwait SYS_eventfd2 SYS_sendfile SYS_splice SYS_tee SYS_copy_file_range
    SYS_munmap SYS_mremap SYS_mprotect SYS_msync SYS_mincore SYS_brk SYS_execve SYS_execveat
    SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_rt_sigaction SYS_rt_sigprocmask
    SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigtimedwait SYS_rt_sigsuspend SYS_sigaltstack
    SYS_restart_syscall SYS_set_robust_list SYS_get_robust_list SYS_set_tid_address SYS_rseq
    SYS_membarrier SYS_sched_yield SYS_sched_getaffinity SYS_sched_getparam SYS_sched_getscheduler
    SYS_getpid SYS_getppid SYS_gettid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid
    SYS_getresgid SYS_getgroups SYS_getpgid SYS_getsid SYS_setpgid SYS_setsid SYS_getpriority
    SYS_getrlimit SYS_getrusage SYS_times SYS_sysinfo SYS_uname SYS_gettimeofday SYS_clock_gettime
    SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_getitimer SYS_setitimer SYS_getrandom
    SYS_capget SYS_getcpu SYS_shutdown SYS_getsockname SYS_getpeername SYS_timerfd_create
    SYS_timerfd_settime SYS_timerfd_gettime
};

#[cfg(target_arch = "x86_64")]
const ALLOWED_LEGACY: &[i64] = &numbers! {
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_pipe SYS_dup2 SYS_poll SYS_select
    SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_mkdir SYS_rmdir SYS_unlink SYS_rename SYS_link
    SYS_symlink SYS_readlink SYS_chmod SYS_chown SYS_lchown SYS_getdents SYS_utime SYS_utimes
    SYS_fork SYS_vfork SYS_time SYS_alarm SYS_pause SYS_getpgrp
};
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_LEGACY: &[i64] = &[];

/// A compiled filter as the kernel takes it.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// `struct sock_filter`s.
    pub bytes: Vec<u8>,
    /// Number of these.
    pub instructions: u16,
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
const REFUSE: u32 = error(libc::EPERM);
const MISSING: u32 = error(libc::ENOSYS);

/// Calls for extended attributes of files.
const EXTENDED_ATTRIBUTES: [i64; 12] = [
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flistxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
];

/// The call fails with this number.
const fn error(errno: i32) -> u32 {
    0x0005_0000 | errno as u32
}

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(not(target_arch = "x86_64"))]
const AUDIT_ARCH: u32 = 0xC000_00B7;

/// Answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Answer {
    Return(u32),
    /// Allowed if all conditions of one of the lists hold, else this.
    Check(Vec<Vec<Condition>>, u32),
}

type Answers = BTreeMap<u32, Answer>;

/// The filter of sandboxes; with `tcp`, TCP sockets over IP can be made.
///
/// # Errors
/// If it has too many instructions.
pub fn filter(tcp: bool) -> Result<Filter> {
    compile(&allow_list(tcp))
}

/// The filter of the sandbox init, which reports that it is ready and then waits.
pub(crate) fn init_filter() -> Result<Filter> {
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

/// Answers to the calls, by their numbers; calls that are missing are refused.
fn allow_list(tcp: bool) -> Answers {
    let free = ALLOWED.iter().chain(ALLOWED_LEGACY);
    let mut answers: Answers = free.map(|&c| (c as u32, Answer::Return(ALLOW))).collect();
    // `clone3` hides its flags behind a pointer: ENOSYS makes glibc use `clone`, which is checked.
    answers.insert(libc::SYS_clone3 as u32, Answer::Return(MISSING));
    // As on a file system without extended attributes: `ls` and `cp` work without them, and report EPERM.
    for call in EXTENDED_ATTRIBUTES {
        answers.insert(call as u32, Answer::Return(error(libc::EOPNOTSUPP)));
    }
    for checked in checked(tcp) {
        let answer = Answer::Check(checked.lists, error(checked.otherwise));
        answers.insert(checked.call as u32, answer);
    }
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

/// Compiles the answers into a search tree over the call numbers. The kernel evaluates a filter once per call
/// number when it is set, and translates it again for each process: a list of all calls takes 0.5 ms, this
/// tree takes 0.05 ms.
fn compile(answers: &Answers) -> Result<Filter> {
    let refused = Answer::Return(REFUSE);
    // Each entry is a number from which the answer changes, and the new answer.
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
    let instructions = u16::try_from(program.len()).map_err(|_| Error::TooLong {
        what: "filter",
        bytes: 8 * program.len(),
        max: 8 * usize::from(u16::MAX),
    })?;
    let bytes = program.iter().flat_map(|&(code, jt, jf, k)| {
        let ([a, b], [k0, k1, k2, k3]) = (code.to_ne_bytes(), k.to_ne_bytes());
        [a, b, jt, jf, k0, k1, k2, k3]
    });
    Ok(Filter {
        bytes: bytes.collect(),
        instructions,
    })
}

/// The tree over a range of numbers: each comparison halves it.
fn search(steps: &[(u32, &Answer)]) -> Vec<Instruction> {
    match steps {
        [] => Vec::new(),
        [(_, Answer::Return(value))] => vec![(RETURN, 0, 0, *value)],
        [(_, Answer::Check(lists, otherwise))] => checks(lists, *otherwise),
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

/// Tries each list in turn; a condition that does not hold jumps to the next list.
fn checks(lists: &[Vec<Condition>], otherwise: u32) -> Vec<Instruction> {
    let mut code = Vec::new();
    for list in lists {
        let sizes = list.iter().map(|c| 2 + u8::from(c.mask != u32::MAX));
        // Instructions left of this list, its answer included.
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
    code.push((RETURN, 0, 0, otherwise));
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the instructions of a filter for one system call and returns its verdict.
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
            Some(Answer::Check(lists, otherwise)) => {
                if lists.iter().any(|l| l.iter().all(holds)) {
                    ALLOW
                } else {
                    *otherwise
                }
            }
        }
    }

    #[test]
    fn the_tree_answers_as_the_list_says() {
        let values = [0, 1, 2, 10, 11, 16, 17, 24, 31, 38, 0x11, 0x5412, 0x541c];
        let large = [0x1000_0000, 0x7E02_0000, u64::MAX, 1 << 32];
        for tcp in [false, true] {
            let (filter, answers) = (filter(tcp).unwrap(), allow_list(tcp));
            assert!(filter.instructions < 900, "{}", filter.instructions);
            for number in (0..600).chain([1 << 30, (1 << 30) + 59, u32::MAX]) {
                assert_eq!(answer(&filter, 0x4000_0003, number, [0; 6]), KILL);
                let checked = matches!(answers.get(&number), Some(Answer::Check(..)));
                for (i, a) in values.into_iter().chain(large).enumerate() {
                    // All pairs where the answer depends on arguments, each value once elsewhere.
                    let all = values.into_iter().chain(large).enumerate();
                    for (_, b) in all.filter(|(j, _)| checked || *j == i) {
                        let arguments = [a, b, a ^ b, 0, 0, 0];
                        let got = answer(&filter, AUDIT_ARCH, number, arguments);
                        assert_eq!(got, expected(&answers, number, arguments), "{number}");
                    }
                }
            }
        }
    }

    #[test]
    fn namespaces_networks_and_reported_signals_are_refused() {
        let filter = filter(false).unwrap();
        let ask = |call: i64, a: u64, b: u64| {
            answer(&filter, AUDIT_ARCH, call as u32, [a, b, 0, 0, 0, 0])
        };
        assert_eq!(ask(libc::SYS_clone, 0x11, 0), ALLOW);
        assert_eq!(ask(libc::SYS_clone, 0x1000_0011, 0), REFUSE);
        assert_eq!(ask(libc::SYS_clone3, 0, 0), MISSING);
        assert_eq!(ask(libc::SYS_pidfd_open, 5, 0), ALLOW);
        for call in [
            libc::SYS_pidfd_getfd,
            libc::SYS_pidfd_send_signal,
            libc::SYS_setns,
        ] {
            assert_eq!(ask(call, 5, 0), REFUSE);
        }
        let signal = |name: i32, signal: i32| ask(libc::SYS_prctl, name as u64, signal as u64);
        assert_eq!(signal(libc::PR_SET_PDEATHSIG, libc::SIGTERM), ALLOW);
        assert_eq!(signal(libc::PR_SET_PDEATHSIG, libc::SIGSYS), REFUSE);
        assert_eq!(signal(libc::PR_SET_PDEATHSIG, libc::SIGXCPU), REFUSE);
        assert_eq!(signal(libc::PR_SET_PTRACER, 1), REFUSE);
        assert_eq!(ask(libc::SYS_timerfd_create, 1, 0), ALLOW);
        assert_eq!(ask(libc::SYS_inotify_init1, 0, 0), REFUSE);
        assert_eq!(ask(libc::SYS_io_uring_setup, 8, 0), REFUSE);
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

    /// Returns the filter's answer to a call with six arguments.
    fn asked(tcp: bool, call: i64, arguments: [u64; 6]) -> u32 {
        let filter = filter(tcp).unwrap();
        answer(&filter, AUDIT_ARCH, call as u32, arguments)
    }

    #[test]
    fn clone_takes_the_flags_of_forks_and_threads_alone() {
        // fork, posix_spawn, pthread_create of glibc and of musl, threads of Go.
        for flags in [
            0x0120_0011,
            0x4111,
            0x003d_0f00,
            0x007d_0f00,
            0x0005_0f00,
            17,
        ] {
            assert_eq!(asked(false, libc::SYS_clone, [flags, 0, 0, 0, 0, 0]), ALLOW);
        }
        let known = 0x017d_4f00;
        for bit in 8..32 {
            for signal in [0, libc::SIGCHLD as u64] {
                let flags = 1 << bit | signal;
                let expected = if known >> bit & 1 == 1 { ALLOW } else { REFUSE };
                let got = asked(false, libc::SYS_clone, [flags, 0, 0, 0, 0, 0]);
                assert_eq!(got, expected, "{flags:#x}");
            }
        }
        for signal in (1..256).filter(|s| *s != libc::SIGCHLD as u64) {
            assert_eq!(
                asked(false, libc::SYS_clone, [signal, 0, 0, 0, 0, 0]),
                REFUSE
            );
        }
    }

    #[test]
    fn flags_that_reach_out_of_the_sandbox_are_refused() {
        let ioctl = |request: u64| asked(true, libc::SYS_ioctl, [0, request, 0, 0, 0, 0]);
        // FIONREAD; FIEMAP, FICLONE, GETUUID, GETFLAGS, TIOCSTI, namespaces of a pidfd.
        assert_eq!(ioctl(0x541b), ALLOW);
        // TCGETS, TIOCGPTN.
        assert_eq!((ioctl(0x5401), ioctl(0x8004_5430)), (ALLOW, ALLOW));
        for request in [
            0xc020_660b,
            0x4004_9409,
            0x8011_1500,
            0x8008_6601,
            0x5412,
            0xff04,
        ] {
            assert_eq!(ioctl(request), error(libc::ENOTTY), "{request:#x}");
        }
        let fcntl = |command: u64| asked(false, libc::SYS_fcntl, [0, command, 0, 0, 0, 0]);
        assert_eq!((fcntl(3), fcntl(1030), fcntl(1033)), (ALLOW, ALLOW, ALLOW));
        // SETSIG, SETLEASE, NOTIFY, SETDELEG.
        for command in [10, 1024, 1026, 1040] {
            assert_eq!(fcntl(command), REFUSE, "{command}");
        }
        let rename = |flags: u64| asked(false, libc::SYS_renameat2, [0, 0, 0, 0, flags, 0]);
        assert_eq!((rename(0), rename(3)), (ALLOW, ALLOW));
        assert_eq!((rename(4), rename(8)), (REFUSE, REFUSE));
        let mmap = |flags: u64| asked(false, libc::SYS_mmap, [0, 0, 3, flags, 0, 0]);
        assert_eq!((mmap(0x22), mmap(0x4_0022)), (ALLOW, error(libc::ENOMEM)));
        let memory_file = |flags: u64| asked(false, libc::SYS_memfd_create, [0, flags, 0, 0, 0, 0]);
        assert_eq!((memory_file(3), memory_file(4)), (ALLOW, REFUSE));
        let advice = |advice: u64| asked(false, libc::SYS_madvise, [0, 0, advice, 0, 0, 0]);
        assert_eq!((advice(4), advice(14)), (ALLOW, ALLOW));
        assert_eq!(advice(12), error(libc::EINVAL));
        let futex = |operation: u64| asked(false, libc::SYS_futex, [0, operation, 0, 0, 0, 0]);
        assert_eq!((futex(128), futex(128 | 256 | 9)), (ALLOW, ALLOW));
        assert_eq!(
            (futex(128 | 6), futex(11), futex(12)),
            (MISSING, MISSING, MISSING)
        );
    }

    #[test]
    fn sockets_take_the_options_of_ordinary_programs_alone() {
        let option = |tcp, call, level: i32, option: i32| {
            asked(tcp, call, [0, level as u64, option as u64, 0, 0, 0])
        };
        let (get, set, socket) = (libc::SYS_getsockopt, libc::SYS_setsockopt, libc::SOL_SOCKET);
        assert_eq!(option(false, get, socket, libc::SO_COOKIE), ALLOW);
        assert_eq!(option(false, get, socket, libc::SO_ERROR), ALLOW);
        // The process at the other end, filters, the handle of the sender.
        assert_eq!(option(false, get, socket, 77), REFUSE);
        for name in [26, 50, 51, 52, 76] {
            assert_eq!(option(true, set, socket, name), REFUSE, "{name}");
        }
        assert_eq!(option(false, set, socket, libc::SO_RCVTIMEO), ALLOW);
        assert_eq!(
            option(false, set, libc::IPPROTO_TCP, libc::TCP_NODELAY),
            REFUSE
        );
        assert_eq!(
            option(true, set, libc::IPPROTO_TCP, libc::TCP_NODELAY),
            ALLOW
        );
        assert_eq!(option(true, set, libc::IPPROTO_TCP, libc::TCP_ULP), REFUSE);
        let pair = |family: i32| asked(true, libc::SYS_socketpair, [family as u64, 1, 0, 0, 0, 0]);
        assert_eq!((pair(libc::AF_UNIX), pair(libc::AF_TIPC)), (ALLOW, REFUSE));
        let made = |protocol: i32| asked(true, libc::SYS_socket, [2, 1, protocol as u64, 0, 0, 0]);
        assert_eq!((made(0), made(libc::IPPROTO_TCP)), (ALLOW, ALLOW));
        assert_eq!(
            (made(libc::IPPROTO_MPTCP), made(libc::IPPROTO_SCTP)),
            (REFUSE, REFUSE)
        );
        for (call, at) in [
            (libc::SYS_sendto, 3),
            (libc::SYS_recvfrom, 3),
            (libc::SYS_sendmsg, 2),
            (libc::SYS_recvmsg, 2),
        ] {
            let flags = |flags: i32| {
                let mut arguments = [0; 6];
                arguments[at] = flags as u64;
                asked(true, call, arguments)
            };
            assert_eq!(flags(libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT), ALLOW);
            assert_eq!(flags(libc::MSG_OOB), REFUSE);
        }
    }
}
