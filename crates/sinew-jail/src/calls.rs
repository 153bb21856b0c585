//! System calls that are allowed with some arguments only: which, and why not the others.
//!
//! If flags, options or commands can be named, the list has those that programs need. All others are refused,
//! and so are those that a later kernel adds. The errno is one that a program expects, if there is one
//! (ENOSYS, EINVAL, ENOTTY, ENOMEM), so that libraries fall back instead of failing.

/// Numbers of `libc` by their names, in a list.
macro_rules! numbers {
    ($($name:ident)*) => { [$(libc::$name),*] };
}
pub(super) use numbers;

/// Condition on the low 32 bits of an argument: the bits of `mask` equal `value`, or differ from it. No
/// allowed call has a meaning for the upper bits of such an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    /// Number of the argument, 0 to 5.
    pub(super) argument: u8,
    /// Bits that are examined.
    pub(super) mask: u32,
    /// Value that these bits are compared with.
    pub(super) value: u32,
    /// Whether they must be equal or must differ.
    pub(super) equal: bool,
}

fn is(argument: u8, value: i32) -> Condition {
    masked(argument, u32::MAX, value as u32)
}

fn is_not(argument: u8, value: i32) -> Condition {
    Condition {
        equal: false,
        ..is(argument, value)
    }
}

/// Allows only these bits to be set.
fn within(argument: u8, bits: u32) -> Condition {
    masked(argument, !bits, 0)
}

fn masked(argument: u8, mask: u32, value: u32) -> Condition {
    Condition {
        argument,
        mask,
        value,
        equal: true,
    }
}

/// A call whose arguments are examined.
pub(super) struct CallRule {
    pub(super) call: i64,
    /// Allowed if all conditions of one of these lists hold.
    pub(super) lists: Vec<Vec<Condition>>,
    /// The errno that it fails with else.
    pub(super) otherwise: i32,
}

/// Flags that forks and threads of glibc, musl and Go ask for: VM, FS, FILES, SIGHAND, VFORK, THREAD,
/// SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED (which musl sets and the kernel ignores),
/// CHILD_SETTID. The others include namespaces, PARENT (the child would belong to the process that started
/// the program), PTRACE, UNTRACED, PIDFD and IO.
const CLONE: u32 = 0x017d_4f00;

/// Signals that only the kernel may send: SIGSYS means a forbidden call, and SIGXCPU means that the CPU time
/// is spent.
const RESERVED_SIGNALS: [i32; 2] = [libc::SIGSYS, libc::SIGXCPU];

/// Commands of `fcntl`. The others include SETSIG (the kernel sends any signal), leases and delegations
/// (which hold up others that open a file of the host), NOTIFY (which reports what happens in folders of the
/// host).
const FCNTL: [i32; 20] = [
    libc::F_DUPFD,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_SETOWN,
    libc::F_GETOWN,
    // F_GETSIG
    11,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_GETLEASE,
    libc::F_DUPFD_CLOEXEC,
    libc::F_SETPIPE_SZ,
    libc::F_GETPIPE_SZ,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// FIONREAD, FIONBIO, FIOASYNC, FIOCLEX, FIONCLEX, SIOCOUTQ, SIOCATMARK. The others are answered as
/// by a file that does not know them: where files lie on the host's disks (FIEMAP), labels and
/// keys of its file systems, namespaces of pidfds.
const IOCTL: [i32; 7] = [0x541b, 0x5421, 0x5452, 0x5451, 0x5450, 0x5411, 0x8905];
/// Requests to terminals, for levels with a separate `/dev/pts`: attributes (TCGETS to TCSETSF, TCGETS2 to
/// TCSETSF2), TCSBRK, TCXONC, TCFLSH, TCSBRKP, TIOCEXCL, TIOCNXCL, sessions and groups (TIOCSCTTY, TIOCGPGRP,
/// TIOCSPGRP, TIOCNOTTY, TIOCGSID), sizes (TIOCGWINSZ, TIOCSWINSZ), ends of a pair (TIOCGPTN, TIOCSPTLCK,
/// TIOCGPTPEER). TIOCSTI and TIOCLINUX, which type into terminals, are left out.
const IOCTL_TERMINAL: [u32; 24] = [
    0x5401,
    0x5402,
    0x5403,
    0x5404,
    0x802c_542a,
    0x402c_542b,
    0x402c_542c,
    0x402c_542d,
    0x5409,
    0x540a,
    0x540b,
    0x5425,
    0x540c,
    0x540d,
    0x540e,
    0x540f,
    0x5410,
    0x5422,
    0x5429,
    0x5413,
    0x5414,
    0x8004_5430,
    0x4004_5431,
    0x5441,
];
/// SIOCGIFNAME, SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFINDEX: of the sandbox's own network.
const IOCTL_TCP: [i32; 4] = [0x8910, 0x8912, 0x8913, 0x8933];

/// SO_PASSPIDFD and SO_PEERPIDFD: handles of processes at the other end, which may be outside.
const SO_PEERPIDFD: i32 = 77;
/// Maps what a connection receives.
const TCP_ZEROCOPY_RECEIVE: i32 = 35;

/// Options of sockets that can be set. The others include filters, which are programs for the kernel.
const SOCKET_OPTIONS: [i32; 16] = [
    libc::SO_REUSEADDR,
    libc::SO_DONTROUTE,
    libc::SO_BROADCAST,
    libc::SO_SNDBUF,
    libc::SO_RCVBUF,
    libc::SO_KEEPALIVE,
    libc::SO_OOBINLINE,
    libc::SO_LINGER,
    libc::SO_REUSEPORT,
    libc::SO_PASSCRED,
    libc::SO_RCVLOWAT,
    libc::SO_RCVTIMEO,
    libc::SO_SNDTIMEO,
    libc::SO_TIMESTAMP,
    // SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW
    66,
    67,
];

/// Options of connections that can be set: no other protocol on top (ULP), no repair, no keys.
const TCP_OPTIONS: [i32; 14] = numbers! {
    TCP_NODELAY TCP_MAXSEG TCP_FASTOPEN TCP_FASTOPEN_CONNECT TCP_NOTSENT_LOWAT TCP_CORK TCP_KEEPIDLE
    TCP_KEEPINTVL TCP_KEEPCNT TCP_SYNCNT TCP_LINGER2 TCP_DEFER_ACCEPT TCP_QUICKACK TCP_USER_TIMEOUT
};
const IP_OPTIONS: [i32; 4] = [
    libc::IP_TOS,
    libc::IP_TTL,
    libc::IP_MTU_DISCOVER,
    libc::IP_BIND_ADDRESS_NO_PORT,
];
const IPV6_OPTIONS: [i32; 3] = [
    libc::IPV6_V6ONLY,
    libc::IPV6_UNICAST_HOPS,
    libc::IPV6_TCLASS,
];

/// Flags of sending and receiving. The others include OOB: bytes out of line are a part of the kernel that
/// few programs need.
const MESSAGE: u32 = (libc::MSG_PEEK
    | libc::MSG_DONTROUTE
    | libc::MSG_CTRUNC
    | libc::MSG_TRUNC
    | libc::MSG_DONTWAIT
    | libc::MSG_EOR
    | libc::MSG_WAITALL
    | libc::MSG_CONFIRM
    | libc::MSG_NOSIGNAL
    | libc::MSG_MORE
    | libc::MSG_CMSG_CLOEXEC) as u32;

/// WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET. Priority inheritance, which
/// programs use only where they ask for it, is missing.
const FUTEX: [u32; 7] = [0, 1, 3, 4, 5, 9, 10];
/// FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
const FUTEX_FLAGS: u32 = 128 | 256;

/// Pages that the kernel merges with equal ones of other tenants (MERGEABLE) reveal the content of those by
/// the time that a write takes; HWPOISON and SOFT_OFFLINE take pages of the host away.
const ADVICE: [i32; 3] = [libc::MADV_MERGEABLE, libc::MADV_HWPOISON, 101];

/// SET_GS, SET_FS, GET_FS, GET_GS; the calls that request AMX (GET_XCOMP_SUPP, GET_XCOMP_PERM,
/// REQ_XCOMP_PERM).
#[cfg(target_arch = "x86_64")]
const ARCH_PRCTL: [i32; 7] = [0x1001, 0x1002, 0x1003, 0x1004, 0x1021, 0x1022, 0x1023];

/// Allowed if the argument is one of these.
fn one_of(argument: u8, values: &[i32]) -> Vec<Vec<Condition>> {
    values.iter().map(|&v| vec![is(argument, v)]).collect()
}

/// Allowed if the argument is none of these.
fn none_of(argument: u8, values: &[i32]) -> Vec<Vec<Condition>> {
    vec![values.iter().map(|&v| is_not(argument, v)).collect()]
}

/// The calls and what they may be asked for; with `tcp`, TCP sockets over IP can be made.
pub(super) fn checked(tcp: bool) -> Vec<CallRule> {
    let mut all = processes();
    all.extend(memory());
    all.extend(files(tcp));
    all.extend(sockets(tcp));
    all
}

/// EPERM unless one of the lists holds.
fn refused(call: i64, lists: Vec<Vec<Condition>>) -> CallRule {
    answered(call, lists, libc::EPERM)
}

fn answered(call: i64, lists: Vec<Vec<Condition>>, errno: i32) -> CallRule {
    CallRule {
        call,
        lists,
        otherwise: errno,
    }
}

/// Forks, signals, limits and threads: nothing that reaches a process outside of the sandbox.
fn processes() -> Vec<CallRule> {
    // A child's end sends SIGCHLD or nothing.
    let clone = [0, libc::SIGCHLD as u32].map(|signal| vec![masked(0, !CLONE, signal)]);
    let options = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_GET_DUMPABLE];
    let mut options = one_of(0, &options);
    // A process may hide from others of its user; it cannot show itself again.
    options.push(vec![is(0, libc::PR_SET_DUMPABLE), is(1, 0)]);
    // A program ends with the one that started it; the kernel sends it that signal, and no other process.
    let reserved = RESERVED_SIGNALS.map(|signal| is_not(1, signal));
    options.push([&[is(0, libc::PR_SET_PDEATHSIG)], &reserved[..]].concat());
    // Waiting for a child, or its end in a poll. Descriptors, signals and namespaces by such a handle are
    // other calls, which are refused.
    let handle = vec![vec![within(1, libc::O_NONBLOCK as u32)]];
    let futex = FUTEX.map(|operation| vec![masked(1, !FUTEX_FLAGS, operation)]);
    vec![
        refused(libc::SYS_clone, clone.to_vec()),
        refused(libc::SYS_kill, none_of(1, &RESERVED_SIGNALS)),
        refused(libc::SYS_tkill, none_of(1, &RESERVED_SIGNALS)),
        refused(libc::SYS_tgkill, none_of(2, &RESERVED_SIGNALS)),
        // Its own limits only: those of the sandbox's init belong to the same user.
        refused(libc::SYS_prlimit64, vec![vec![is(0, 0)]]),
        refused(libc::SYS_prctl, options),
        refused(libc::SYS_pidfd_open, handle),
        answered(libc::SYS_futex, futex.to_vec(), libc::ENOSYS),
        #[cfg(target_arch = "x86_64")]
        answered(libc::SYS_arch_prctl, one_of(0, &ARCH_PRCTL), libc::EINVAL),
    ]
}

/// Pages of the host's pool of huge ones (HUGETLB) count for no memory limit.
fn memory() -> Vec<CallRule> {
    let plain = vec![vec![masked(3, libc::MAP_HUGETLB as u32, 0)]];
    // CLOEXEC, ALLOW_SEALING, NOEXEC_SEAL, EXEC.
    let files = vec![vec![within(1, 1 | 2 | 8 | 16)]];
    vec![
        answered(libc::SYS_mmap, plain, libc::ENOMEM),
        refused(libc::SYS_memfd_create, files),
        answered(libc::SYS_madvise, none_of(2, &ADVICE), libc::EINVAL),
    ]
}

/// Open files: no leases, notices, chosen signals or places on disks.
fn files(tcp: bool) -> Vec<CallRule> {
    let more: &[i32] = if tcp { &IOCTL_TCP } else { &[] };
    let terminal = IOCTL_TERMINAL.map(u32::cast_signed);
    let requests = [&IOCTL[..], &terminal, more].concat();
    // NOREPLACE, EXCHANGE; not WHITEOUT, which makes what overlayfs takes for a removed file.
    let rename = vec![vec![within(4, 1 | 2)]];
    // O_EXCL is left out: it makes a pipe of the kernel's notices.
    let pipe = (libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_DIRECT) as u32;
    vec![
        refused(libc::SYS_fcntl, one_of(1, &FCNTL)),
        answered(libc::SYS_ioctl, one_of(1, &requests), libc::ENOTTY),
        refused(libc::SYS_renameat2, rename),
        refused(libc::SYS_pipe2, vec![vec![within(1, pipe)]]),
    ]
}

/// Unix sockets, and with `tcp` plain TCP.
fn sockets(tcp: bool) -> Vec<CallRule> {
    let unix = vec![is(0, libc::AF_UNIX)];
    let mut socket = vec![unix.clone()];
    let mut get = vec![vec![is(1, libc::SOL_SOCKET), is_not(2, SO_PEERPIDFD)]];
    let options = |level: i32, names: &[i32]| -> Vec<Vec<Condition>> {
        let pair = |&name: &i32| vec![is(1, level), is(2, name)];
        names.iter().map(pair).collect()
    };
    let mut set = options(libc::SOL_SOCKET, &SOCKET_OPTIONS);
    if tcp {
        for family in [libc::AF_INET, libc::AF_INET6] {
            // Streams have other protocols, too: SCTP, MPTCP, SMC.
            for protocol in [0, libc::IPPROTO_TCP] {
                let stream = masked(1, 0xf, libc::SOCK_STREAM as u32);
                socket.push(vec![is(0, family), stream, is(2, protocol)]);
            }
        }
        get.push(vec![
            is(1, libc::IPPROTO_TCP),
            is_not(2, TCP_ZEROCOPY_RECEIVE),
        ]);
        get.extend([libc::IPPROTO_IP, libc::IPPROTO_IPV6].map(|level| vec![is(1, level)]));
        set.extend(options(libc::IPPROTO_TCP, &TCP_OPTIONS));
        set.extend(options(libc::IPPROTO_IP, &IP_OPTIONS));
        set.extend(options(libc::IPPROTO_IPV6, &IPV6_OPTIONS));
    }
    let flags = |at: u8| vec![vec![within(at, MESSAGE)]];
    vec![
        refused(libc::SYS_socket, socket),
        refused(libc::SYS_socketpair, vec![unix]),
        refused(libc::SYS_getsockopt, get),
        refused(libc::SYS_setsockopt, set),
        refused(libc::SYS_sendto, flags(3)),
        refused(libc::SYS_recvfrom, flags(3)),
        refused(libc::SYS_sendmsg, flags(2)),
        refused(libc::SYS_recvmsg, flags(2)),
    ]
}
