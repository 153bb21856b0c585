//! The system calls that jailed code may make. Everything else answers EPERM, foreign ABIs kill.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;

/// Flags of `clone` that make namespaces: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const CLONE_NEW: u64 = 0x7E02_0000;

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

fn condition(index: u8, op: SeccompCmpOp, value: u64) -> Result<SeccompCondition, String> {
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, value).map_err(|e| e.to_string())
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, String> {
    SeccompRule::new(conditions).map_err(|e| e.to_string())
}

/// A compiled filter as the kernel takes it.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    /// `struct sock_filter`s.
    pub(crate) bytes: Vec<u8>,
    /// How many.
    pub(crate) instructions: u16,
}

/// The filter of sandboxes; with `tcp`, TCP sockets over IP can be made.
pub(crate) fn filter(tcp: bool) -> Result<Filter, String> {
    let mut program = clone3_is_missing();
    program.extend(allow_list(tcp)?);
    let instructions = u16::try_from(program.len()).map_err(|e| format!("filter: {e}"))?;
    let bytes = program
        .iter()
        .flat_map(|i| {
            let [a, b] = i.code.to_ne_bytes();
            let [k0, k1, k2, k3] = i.k.to_ne_bytes();
            [a, b, i.jt, i.jf, k0, k1, k2, k3]
        })
        .collect();
    Ok(Filter {
        bytes,
        instructions,
    })
}

/// `clone3` hides its flags behind a pointer: ENOSYS makes glibc use `clone`, which is checked.
/// Numbers of foreign ABIs that look like it get no further: the list behind kills them.
fn clone3_is_missing() -> BpfProgram {
    let instruction = |code, jt, jf, k| seccompiler::sock_filter { code, jt, jf, k };
    // BPF_LD|BPF_W|BPF_ABS of seccomp_data.nr; BPF_JMP|BPF_JEQ|BPF_K; BPF_RET|BPF_K ERRNO.
    vec![
        instruction(0x20, 0, 0, 0),
        instruction(0x15, 0, 3, libc::SYS_clone3 as u32),
        instruction(0x20, 0, 0, 4),
        instruction(0x15, 0, 1, AUDIT_ARCH),
        instruction(0x06, 0, 0, 0x0005_0000 | libc::ENOSYS as u32),
    ]
}

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(not(target_arch = "x86_64"))]
const AUDIT_ARCH: u32 = 0xC000_00B7;

/// SIGSYS and SIGXCPU tell of a forbidden call and of spent CPU time: only the kernel sends them.
const RESERVED_SIGNALS: [i32; 2] = [libc::SIGSYS, libc::SIGXCPU];

fn honest_signal(index: u8) -> Result<Vec<SeccompRule>, String> {
    let conditions: Result<Vec<_>, _> = RESERVED_SIGNALS
        .iter()
        .map(|&s| condition(index, SeccompCmpOp::Ne, s as u64))
        .collect();
    Ok(vec![rule(conditions?)?])
}

fn allow_list(tcp: bool) -> Result<BpfProgram, String> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED
        .iter()
        .chain(ALLOWED_LEGACY)
        .map(|&call| (call, Vec::new()))
        .collect();
    // No namespaces, and a child's end sends SIGCHLD or nothing.
    let mut clone = Vec::new();
    for signal in [0, libc::SIGCHLD as u64] {
        let flags = condition(0, SeccompCmpOp::MaskedEq(CLONE_NEW | 0xff), signal)?;
        clone.push(rule(vec![flags])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let mut socket = vec![rule(vec![condition(
        0,
        SeccompCmpOp::Eq,
        libc::AF_UNIX as u64,
    )?])?];
    if tcp {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let family = condition(0, SeccompCmpOp::Eq, family as u64)?;
            let stream = condition(1, SeccompCmpOp::MaskedEq(0xf), libc::SOCK_STREAM as u64)?;
            socket.push(rule(vec![family, stream])?);
        }
        for call in [
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept,
            libc::SYS_accept4,
        ] {
            rules.insert(call, Vec::new());
        }
    }
    rules.insert(libc::SYS_socket, socket);
    for (call, signal_at) in [
        (libc::SYS_kill, 1),
        (libc::SYS_tkill, 1),
        (libc::SYS_tgkill, 2),
    ] {
        rules.insert(call, honest_signal(signal_at)?);
    }
    // F_SETSIG lets the kernel send any signal.
    let no_setsig = condition(1, SeccompCmpOp::Ne, 10)?;
    rules.insert(libc::SYS_fcntl, vec![rule(vec![no_setsig])?]);
    // Its own limits only: those of the sandbox's init belong to the same user.
    let own = condition(0, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![rule(vec![own])?]);
    // Typing into a terminal that somebody else reads.
    let no_sti = condition(1, SeccompCmpOp::Ne, libc::TIOCSTI)?;
    let no_linux = condition(1, SeccompCmpOp::Ne, libc::TIOCLINUX)?;
    rules.insert(libc::SYS_ioctl, vec![rule(vec![no_sti, no_linux])?]);
    let mut prctl = Vec::new();
    for option in [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_GET_DUMPABLE] {
        prctl.push(rule(vec![condition(0, SeccompCmpOp::Eq, option as u64)?])?);
    }
    rules.insert(libc::SYS_prctl, prctl);
    compile(rules)
}

fn compile(rules: BTreeMap<i64, Vec<SeccompRule>>) -> Result<BpfProgram, String> {
    let arch = std::env::consts::ARCH
        .try_into()
        .map_err(|_| format!("no filter for {}", std::env::consts::ARCH))?;
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, refuse, SeccompAction::Allow, arch)
        .and_then(TryInto::try_into)
        .map_err(|e| e.to_string())
}
