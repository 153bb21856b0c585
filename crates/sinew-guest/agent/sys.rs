//! System calls. The agent has no dependencies: what it needs of the C library stands here.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

unsafe extern "C" {
    pub fn fork() -> c_int;
    pub fn _exit(code: c_int) -> !;
    pub fn getpid() -> c_int;
    pub fn setsid() -> c_int;
    pub fn umask(mode: c_uint) -> c_uint;
    pub fn syscall(number: c_long, ...) -> c_long;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    fn pipe2(fds: *mut c_int, flags: c_int) -> c_int;
    fn poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn bind(fd: c_int, address: *const [u32; 4], len: c_uint) -> c_int;
    fn listen(fd: c_int, waiting: c_int) -> c_int;
    fn accept4(fd: c_int, address: *const c_void, len: *const c_void, flags: c_int) -> c_int;
    fn wait4(pid: c_int, status: *mut c_int, options: c_int, usage: *mut Rusage) -> c_int;
    fn signal(signal: c_int, handler: usize) -> usize;
    fn sigprocmask(how: c_int, set: *const [u64; 16], old: *mut [u64; 16]) -> c_int;
    fn signalfd(fd: c_int, mask: *const [u64; 16], flags: c_int) -> c_int;
    fn execve(path: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int;
    fn setfsuid(id: c_uint) -> c_int;
    fn setfsgid(id: c_uint) -> c_int;
    fn mkdirat(dir: c_int, path: *const c_char, mode: c_uint) -> c_int;
    fn unlinkat(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
    fn symlinkat(target: *const c_char, dir: c_int, path: *const c_char) -> c_int;
    fn readlinkat(dir: c_int, path: *const c_char, buffer: *mut u8, size: usize) -> isize;
    fn fchmodat(dir: c_int, path: *const c_char, mode: c_uint, flags: c_int) -> c_int;
    fn statfs(path: *const c_char, buffer: *mut [u64; 16]) -> c_int;
    fn mount(
        from: *const c_char,
        to: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_char,
    ) -> c_int;
    fn sethostname(name: *const u8, len: usize) -> c_int;
    fn clock_settime(clock: c_int, time: *const [i64; 2]) -> c_int;
    fn clock_gettime(clock: c_int, time: *mut [i64; 2]) -> c_int;
    fn setgroups(count: usize, groups: *const c_uint) -> c_int;
    fn setresgid(real: c_uint, effective: c_uint, saved: c_uint) -> c_int;
    fn setresuid(real: c_uint, effective: c_uint, saved: c_uint) -> c_int;
    #[link_name = "chdir"]
    fn change_folder(path: *const c_char) -> c_int;
    #[link_name = "prctl"]
    fn process_control(option: c_int, ...) -> c_int;
    fn setrlimit(resource: c_int, limit: *const [u64; 2]) -> c_int;
    fn capset(header: *const [u32; 2], data: *const [u32; 6]) -> c_int;
    fn unshare(flags: c_int) -> c_int;
    fn umount2(path: *const c_char, flags: c_int) -> c_int;
    fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int;
    fn mknod(path: *const c_char, mode: c_uint, device: c_ulong) -> c_int;
    fn chmod(path: *const c_char, mode: c_uint) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
}

/// `struct pollfd`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PollFd {
    pub fd: c_int,
    pub events: i16,
    pub revents: i16,
}

pub const POLLIN: i16 = 1;
pub const POLLOUT: i16 = 4;
pub const POLLHUP: i16 = 16;

/// `struct rusage` where words have 64 bits.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Rusage {
    user: [i64; 2],
    system: [i64; 2],
    max_rss_kib: i64,
    rest: [i64; 13],
}

/// A child that is gone.
pub struct Gone {
    pub pid: c_int,
    pub status: c_int,
    pub cpu_us: u64,
    pub max_rss_kib: u64,
}

const O_CLOEXEC: c_int = 0o2_000_000;
const O_NONBLOCK: c_int = 0o4000;
pub const O_RDONLY: u64 = 0;
pub const O_WRONLY: u64 = 1;
pub const O_CREAT: u64 = 0o100;
pub const O_TRUNC: u64 = 0o1000;
pub const O_PATH: u64 = 0o10_000_000;
/// Values that differ between architectures.
#[cfg(target_arch = "x86_64")]
pub const O_DIRECTORY: u64 = 0o200_000;
#[cfg(not(target_arch = "x86_64"))]
pub const O_DIRECTORY: u64 = 0o40_000;
#[cfg(target_arch = "x86_64")]
pub const O_NOFOLLOW: u64 = 0o400_000;
#[cfg(not(target_arch = "x86_64"))]
pub const O_NOFOLLOW: u64 = 0o100_000;
const SYS_OPENAT2: c_long = 437;
const SYS_CLOSE_RANGE: c_long = 436;
const SYS_LANDLOCK_CREATE_RULESET: c_long = 444;

fn checked(result: c_int) -> Result<c_int> {
    if result < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Error::from_raw_os_error(22))
}

/// Listens on a port of the machine's own (AF_VSOCK, any context).
pub fn listen_vsock(port: u32) -> Result<OwnedFd> {
    const AF_VSOCK: c_int = 40;
    const SOCK_STREAM: c_int = 1;
    // struct sockaddr_vm: family, port, context, nothing.
    let address = [AF_VSOCK as u32, port, u32::MAX, 0];
    unsafe {
        let fd = checked(socket(AF_VSOCK, SOCK_STREAM | O_CLOEXEC, 0))?;
        let fd = OwnedFd::from_raw_fd(fd);
        checked(bind(fd.as_raw_fd(), &address, 16))?;
        checked(listen(fd.as_raw_fd(), 1))?;
        Ok(fd)
    }
}

/// The next connection.
pub fn accept(listener: &OwnedFd) -> Result<std::fs::File> {
    let none = std::ptr::null();
    let fd = unsafe { checked(accept4(listener.as_raw_fd(), none, none, O_CLOEXEC))? };
    Ok(unsafe { std::fs::File::from_raw_fd(fd) })
}

/// Reading and writing end; neither is inherited.
pub fn pipe(nonblocking: bool) -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let flags = if nonblocking {
        O_CLOEXEC | O_NONBLOCK
    } else {
        O_CLOEXEC
    };
    unsafe {
        checked(pipe2(fds.as_mut_ptr(), flags))?;
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

pub fn set_nonblocking(fd: RawFd, on: bool) -> Result<()> {
    unsafe {
        let flags = checked(fcntl(fd, 3))?;
        let flags = if on {
            flags | O_NONBLOCK
        } else {
            flags & !O_NONBLOCK
        };
        checked(fcntl(fd, 4, flags)).map(|_| ())
    }
}

pub fn wait_for(fds: &mut [PollFd], timeout_ms: c_int) -> Result<()> {
    match checked(unsafe { poll(fds.as_mut_ptr(), fds.len() as c_ulong, timeout_ms) }) {
        Err(e) if e.kind() == std::io::ErrorKind::Interrupted => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Blocks SIGCHLD and returns a descriptor that tells of it.
pub fn children() -> Result<OwnedFd> {
    let mut mask = [0u64; 16];
    mask[0] = 1 << (17 - 1);
    unsafe {
        checked(sigprocmask(0, &mask, std::ptr::null_mut()))?;
        let fd = checked(signalfd(-1, &mask, O_CLOEXEC | O_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// A child that is gone, if there is one; `block` waits for one as long as there are children.
pub fn reap(block: bool) -> Option<Gone> {
    let (mut status, mut usage) = (0, Rusage::default());
    loop {
        let pid = unsafe { wait4(-1, &mut status, i32::from(!block), &mut usage) };
        if pid > 0 {
            let us = |t: [i64; 2]| (t[0] * 1_000_000 + t[1]) as u64;
            let cpu_us = us(usage.user) + us(usage.system);
            return Some(Gone {
                pid,
                status,
                cpu_us,
                max_rss_kib: usage.max_rss_kib as u64,
            });
        }
        if pid == 0 || Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Time on processors that a process has taken so far.
pub fn cpu_us(pid: c_int) -> u64 {
    let mut time = [0; 2];
    // The clock of a process (clock_getcpuclockid(3)): its number inverted, and CPUCLOCK_SCHED.
    let clock = (!pid << 3) | 2;
    match unsafe { clock_gettime(clock, &mut time) } {
        0 => (time[0] * 1_000_000 + time[1] / 1000) as u64,
        _ => 0,
    }
}

/// Lets a process that was stopped go on.
pub fn go_on(pid: c_int) {
    unsafe { kill(pid, 18) };
}

/// Ends one child.
pub fn end(pid: c_int) {
    unsafe {
        kill(pid, 9);
        wait4(pid, &mut 0, 0, &mut Rusage::default());
    }
}

/// Kills every process of this PID namespace but this one, which is its first.
pub fn kill_all() {
    // Beyond a namespace this would kill the machine: `main` refuses to run as any but PID 1.
    unsafe { kill(-1, 9) };
}

/// Signals as a new program finds them.
pub fn default_signals() {
    unsafe {
        for number in 1..32 {
            signal(number, 0);
        }
        sigprocmask(2, &[0; 16], std::ptr::null_mut());
    }
}

/// Writes to closed pipes give an error, not a signal.
pub fn ignore_broken_pipes() {
    unsafe { signal(13, 1) };
}

/// Moves `fds` to descriptors 0, 1, ...; the rest is closed by an execve.
pub fn place(fds: &[RawFd]) -> Result<()> {
    let count = fds.len() as RawFd;
    let mut high = Vec::new();
    for &fd in fds {
        // F_DUPFD_CLOEXEC.
        high.push(unsafe { checked(fcntl(fd, 1030, count + 1)) }?);
    }
    for (target, fd) in high.iter().enumerate() {
        unsafe { checked(dup2(*fd, target as RawFd)) }?;
    }
    unsafe {
        syscall(
            SYS_CLOSE_RANGE,
            c_long::from(count),
            c_long::from(c_uint::MAX),
            4 as c_long,
        )
    };
    Ok(())
}

/// Becomes a program; returns why it could not.
pub fn exec(argv: &[CString], env: &[CString]) -> Error {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter()
            .map(|s| s.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (args, envs) = (pointers(argv), pointers(env));
    unsafe { execve(args[0], args.as_ptr(), envs.as_ptr()) };
    Error::last_os_error()
}

/// Whose files are opened and made from now on. Leaving user 0 gives up its rights over files.
pub fn act_as(user: u32) {
    unsafe {
        setfsgid(user);
        setfsuid(user);
    }
}

/// `openat2` that neither leaves `dir` nor follows any link (RESOLVE_BENEATH,
/// RESOLVE_NO_SYMLINKS, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_XDEV).
pub fn open_beneath(dir: RawFd, path: &CStr, flags: u64, mode: u64) -> Result<OwnedFd> {
    let how: [u64; 3] = [flags | O_CLOEXEC as u64, mode, 0x08 | 0x04 | 0x02 | 0x01];
    let size: c_long = 24;
    let fd = unsafe {
        syscall(
            SYS_OPENAT2,
            c_long::from(dir),
            path.as_ptr(),
            how.as_ptr(),
            size,
        )
    };
    match fd {
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }),
        _ => Err(Error::last_os_error()),
    }
}

/// The folder above `dir`, for who came down from it.
pub fn parent(dir: &OwnedFd) -> Result<OwnedFd> {
    let how: [u64; 3] = [O_DIRECTORY | O_CLOEXEC as u64, 0, 0];
    let size: c_long = 24;
    let dir = c_long::from(dir.as_raw_fd());
    let fd = unsafe { syscall(SYS_OPENAT2, dir, c"..".as_ptr(), how.as_ptr(), size) };
    match fd {
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }),
        _ => Err(Error::last_os_error()),
    }
}

pub fn make_folder(dir: RawFd, name: &CStr, mode: u32) -> Result<()> {
    checked(unsafe { mkdirat(dir, name.as_ptr(), mode) }).map(|_| ())
}

pub fn make_link(target: &CStr, dir: RawFd, name: &CStr) -> Result<()> {
    checked(unsafe { symlinkat(target.as_ptr(), dir, name.as_ptr()) }).map(|_| ())
}

pub fn read_link(dir: RawFd, name: &CStr) -> Result<Vec<u8>> {
    let mut buffer = vec![0; 4096];
    let len = unsafe { readlinkat(dir, name.as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
    if len < 0 {
        return Err(Error::last_os_error());
    }
    buffer.truncate(len as usize);
    Ok(buffer)
}

pub fn remove(dir: RawFd, name: &CStr, folder: bool) -> Result<()> {
    let flags = if folder { 0x200 } else { 0 };
    checked(unsafe { unlinkat(dir, name.as_ptr(), flags) }).map(|_| ())
}

pub fn set_mode(dir: RawFd, name: &CStr, mode: u32) -> Result<()> {
    checked(unsafe { fchmodat(dir, name.as_ptr(), mode, 0) }).map(|_| ())
}

/// Bytes and files in use on the file system at `path`.
pub fn in_use(path: &CStr) -> (u64, u64) {
    let mut words = [0u64; 16];
    if unsafe { statfs(path.as_ptr(), &mut words) } != 0 {
        return (0, 0);
    }
    // struct statfs: type, block size, blocks, free, available, files, free files.
    let [_, size, blocks, free, _, files, free_files, ..] = words;
    let files = files.saturating_sub(free_files);
    // Its own folder is not counted.
    (blocks.saturating_sub(free) * size, files.saturating_sub(1))
}

/// Version of landlock in this kernel; 0 without.
pub fn landlock() -> u64 {
    let zero: c_long = 0;
    unsafe { syscall(SYS_LANDLOCK_CREATE_RULESET, zero, zero, 1 as c_long) }.max(0) as u64
}

fn long(result: c_long) -> Result<i64> {
    if result < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A ruleset; its descriptor is not inherited by programs.
pub fn landlock_create(fields: &[u64]) -> Result<OwnedFd> {
    let (at, size, zero) = (fields.as_ptr(), size_of_val(fields), 0 as c_long);
    let fd = long(unsafe { syscall(SYS_LANDLOCK_CREATE_RULESET, at, size, zero) })?;
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

pub fn landlock_allow(ruleset: RawFd, beneath: RawFd, rights: u64) -> Result<i64> {
    // struct landlock_path_beneath_attr, packed: rights, descriptor.
    let mut rule = [0u8; 12];
    rule[..8].copy_from_slice(&rights.to_ne_bytes());
    rule[8..].copy_from_slice(&beneath.to_ne_bytes());
    let (ruleset, one, zero) = (c_long::from(ruleset), 1 as c_long, 0 as c_long);
    long(unsafe {
        syscall(
            SYS_LANDLOCK_CREATE_RULESET + 1,
            ruleset,
            one,
            rule.as_ptr(),
            zero,
        )
    })
}

pub fn landlock_restrict(ruleset: RawFd) -> Result<i64> {
    let zero: c_long = 0;
    long(unsafe { syscall(SYS_LANDLOCK_CREATE_RULESET + 2, c_long::from(ruleset), zero) })
}

pub fn open_path(path: &CStr) -> Result<OwnedFd> {
    let how: [u64; 3] = [O_PATH | O_CLOEXEC as u64, 0, 0];
    let (here, size) = (-100 as c_long, 24 as c_long);
    let fd = long(unsafe { syscall(SYS_OPENAT2, here, path.as_ptr(), how.as_ptr(), size) })?;
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Resource, soft and hard limit.
pub fn set_limit(limit: &[u64; 3]) -> Result<i64> {
    let pair = [limit[1], limit[2]];
    checked(unsafe { setrlimit(limit[0] as c_int, &pair) }).map(i64::from)
}

pub fn prctl(option: c_int, value: c_ulong) -> Result<i64> {
    let zero: c_ulong = 0;
    checked(unsafe { process_control(option, value, zero, zero, zero) }).map(i64::from)
}

pub fn become_user(user: u32) -> Result<i64> {
    unsafe {
        checked(setgroups(0, std::ptr::null()))?;
        checked(setresgid(user, user, user))?;
        checked(setresuid(user, user, user)).map(i64::from)
    }
}

pub fn chdir(path: &CStr) -> Result<i64> {
    checked(unsafe { change_folder(path.as_ptr()) }).map(i64::from)
}

/// All sets empty; the ambient set empties with the inheritable one.
pub fn drop_capabilities() -> Result<i64> {
    // _LINUX_CAPABILITY_VERSION_3.
    checked(unsafe { capset(&[0x2008_0522, 0], &[0; 6]) }).map(i64::from)
}

/// A filter of system calls for this process and all that it becomes.
pub fn set_filter(filter: &[u8]) -> Result<i64> {
    // struct sock_fprog; PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
    #[repr(C)]
    struct Program {
        count: u16,
        filter: *const u8,
    }
    let program = Program {
        count: (filter.len() / 8) as u16,
        filter: filter.as_ptr(),
    };
    checked(unsafe { process_control(22, 2 as c_ulong, &program) }).map(i64::from)
}

/// Nosuid, nodev, noexec.
pub const SAFE: u64 = 2 | 4 | 8;

pub fn mount_new(kind: &CStr, path: &CStr, flags: u64, options: &CStr) -> Result<()> {
    let (kind, path, options) = (kind.as_ptr(), path.as_ptr(), options.as_ptr());
    checked(unsafe { mount(kind, path, kind, flags as c_ulong, options) }).map(|_| ())
}

/// Clock (CLOCK_REALTIME) and name of a machine.
pub fn set_clock_and_name(ns: u64, name: &[u8]) -> Result<()> {
    let time = [(ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64];
    unsafe {
        checked(clock_settime(0, &time))?;
        checked(sethostname(name.as_ptr(), name.len())).map(|_| ())
    }
}

/// Mixes bytes into the kernel's random source, counts them as entropy and reseeds from them.
pub fn reseed(random: RawFd, bytes: &[u8]) -> Result<()> {
    // struct rand_pool_info: entropy in bits, bytes, the bytes. RNDADDENTROPY, RNDRESEEDCRNG.
    let mut info = Vec::new();
    info.extend_from_slice(&(bytes.len() as u32 * 8).to_ne_bytes());
    info.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
    info.extend_from_slice(bytes);
    unsafe {
        checked(ioctl(random, 0x4008_5203, info.as_ptr().cast::<c_void>()))?;
        checked(ioctl(random, 0x5207)).map(|_| ())
    }
}

/// The devices that programs may have, and the usual links.
pub fn make_devices() -> Result<()> {
    let devices = [
        (c"/dev/null", 3),
        (c"/dev/zero", 5),
        (c"/dev/full", 7),
        (c"/dev/random", 8),
        (c"/dev/urandom", 9),
    ];
    for (path, minor) in devices {
        // A character device (S_IFCHR) with major number 1.
        unsafe {
            checked(mknod(path.as_ptr(), 0o020_666, 1 << 8 | minor))?;
            checked(chmod(path.as_ptr(), 0o666))?;
        }
    }
    for (name, target) in [
        ("fd", ""),
        ("stdin", "/0"),
        ("stdout", "/1"),
        ("stderr", "/2"),
    ] {
        std::os::unix::fs::symlink(format!("/proc/self/fd{target}"), format!("/dev/{name}"))?;
    }
    Ok(())
}

/// Becomes a program in a mount namespace of its own, in which nothing is mounted at `path`;
/// returns why it could not.
pub fn without_mount(path: &[u8], program: &[std::ffi::OsString]) -> Error {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = text(path) else {
        return Error::from_raw_os_error(22);
    };
    let args: Vec<CString> = program
        .iter()
        .filter_map(|a| text(a.as_bytes()).ok())
        .collect();
    let pointers: Vec<_> = args
        .iter()
        .map(|a| a.as_ptr())
        .chain([std::ptr::null()])
        .collect();
    let null = std::ptr::null();
    unsafe {
        // CLONE_NEWNS; MS_REC and MS_PRIVATE; MNT_DETACH.
        if unshare(0x2_0000) == 0
            && mount(null, c"/".as_ptr(), null, 0x4000 | 0x4_0000, null) == 0
            && umount2(path.as_ptr(), 2) == 0
        {
            execvp(pointers[0], pointers.as_ptr());
        }
    }
    Error::last_os_error()
}
