//! System calls of the agent.
//!
//! Errors keep the errno of the call: the host reads it from the reply. Calls of the standard library, nix or
//! rustix are used if there is one. The rest is here: `poll` with descriptors that may be missing (-1),
//! `wait4` for the usage of a child, and two requests to the random device.

use crate::mounts::{DEVICES, STREAMS};
use crate::process;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigHandler;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, Pid, Uid, execvp, setfsgid, setfsuid};
use rustix::fs::{OFlags, ResolveFlags};
use std::ffi::{CStr, CString, OsString};
use std::io::{Error, Result};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub(super) use libc::{POLLHUP, POLLIN, POLLOUT, pollfd as PollFd};

/// A child that is gone.
#[derive(Debug)]
pub(super) struct ReapedChild {
    pub(super) pid: i32,
    /// Status in the form of `wait4`: signal in the low seven bits, else the code above eight.
    pub(super) status: i32,
    pub(super) cpu_us: u64,
    /// Resident memory of the process at its largest.
    pub(super) max_rss_kib: u64,
}

/// A C string; EINVAL for a zero byte.
pub(super) fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Error::from_raw_os_error(libc::EINVAL))
}

/// Reading and writing end; neither is inherited.
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Sets the mode of the open file, which other descriptors of it share.
pub(super) fn set_nonblocking(fd: impl AsFd, on: bool) -> Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, on)?)
}

/// Waits for events, at most `timeout_ms` milliseconds, -1 without end. A signal ends it early.
pub(super) fn wait_for(fds: &mut [PollFd], timeout_ms: i32) -> Result<()> {
    // SAFETY: as many entries as the length says; entries without a descriptor have -1.
    match unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) } {
        -1 => match Error::last_os_error() {
            e if e.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            e => Err(e),
        },
        _ => Ok(()),
    }
}

/// Blocks SIGCHLD and returns a descriptor on which it is read.
pub(super) fn children() -> Result<SignalFd> {
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&mask), None)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    Ok(SignalFd::with_flags(&mask, flags)?)
}

/// A child that is gone, if there is one; `block` waits for one as long as there are children.
pub(super) fn reap(block: bool) -> Option<ReapedChild> {
    let flags = if block { 0 } else { libc::WNOHANG };
    loop {
        let mut status = 0;
        // SAFETY: plain data, for which zero is a value.
        let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
        // SAFETY: writes to two local values.
        let pid = unsafe { libc::wait4(-1, &raw mut status, flags, &raw mut usage) };
        if pid > 0 {
            return Some(ReapedChild {
                pid,
                status,
                cpu_us: process::ended_us(&usage),
                max_rss_kib: usage.ru_maxrss as u64,
            });
        }
        if pid == 0 || Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Lets a process that was stopped continue.
pub(super) fn go_on(pid: i32) {
    let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
}

/// Ends one child.
pub(super) fn end(pid: i32) {
    let pid = Pid::from_raw(pid);
    let _ = kill(pid, Signal::SIGKILL);
    let _ = nix::sys::wait::waitpid(pid, None);
}

/// Kills every process of this PID namespace but this one, which is its first: `main` refuses to run
/// as any other, for which this would kill the machine.
pub(super) fn kill_all() {
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
}

/// Writes to closed pipes give an error, not a signal.
pub(super) fn ignore_broken_pipes() -> Result<()> {
    // SAFETY: no handler.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) }?;
    Ok(())
}

/// Sets the user for opening and creating files from now on. Leaving user 0 drops its rights over files.
pub(super) fn act_as(user: u32) {
    setfsgid(Gid::from_raw(user));
    setfsuid(Uid::from_raw(user));
}

/// Opens what neither leaves `dir` nor its file system, following no link.
pub(super) fn open_beneath(
    dir: impl AsFd,
    path: &CStr,
    flags: OFlags,
    mode: u32,
) -> Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let mode = rustix::fs::Mode::from_raw_mode(mode);
    let opened = rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, mode, resolve)?;
    Ok(opened)
}

/// The folder above `dir`, for a caller that came down from it.
pub(super) fn parent(dir: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(
        dir,
        c"..",
        flags,
        rustix::fs::Mode::empty(),
    )?)
}

/// Errors as of `mkdirat`: EEXIST for whatever has the name already.
pub(super) fn make_folder(dir: impl AsFd, name: &CStr, mode: u32) -> Result<()> {
    Ok(rustix::fs::mkdirat(
        dir,
        name,
        rustix::fs::Mode::from_raw_mode(mode),
    )?)
}

/// Follows a link of that name: only for names that were just seen to be none.
pub(super) fn set_mode(dir: impl AsFd, name: &CStr, mode: u32) -> Result<()> {
    let (mode, flags) = (
        rustix::fs::Mode::from_raw_mode(mode),
        rustix::fs::AtFlags::empty(),
    );
    Ok(rustix::fs::chmodat(dir, name, mode, flags)?)
}

pub(super) fn remove(dir: impl AsFd, name: &CStr, folder: bool) -> Result<()> {
    let flags = if folder {
        rustix::fs::AtFlags::REMOVEDIR
    } else {
        rustix::fs::AtFlags::empty()
    };
    Ok(rustix::fs::unlinkat(dir, name, flags)?)
}

/// Bytes and files in use on the file system at `path`.
pub(super) fn in_use(path: &CStr) -> (u64, u64) {
    let Ok(stat) = rustix::fs::statfs(path) else {
        return (0, 0);
    };
    let files = stat.f_files.saturating_sub(stat.f_ffree);
    // Its own folder is not counted.
    let blocks = stat.f_blocks.saturating_sub(stat.f_bfree);
    (blocks * stat.f_bsize as u64, files.saturating_sub(1))
}

/// Nosuid, nodev, noexec.
pub(super) const SAFE: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// Mounts a new file system of this kind.
pub(super) fn mount_new(kind: &str, path: &CStr, flags: MsFlags, options: &str) -> Result<()> {
    Ok(mount(Some(kind), path, Some(kind), flags, Some(options))?)
}

/// Sets the clock (CLOCK_REALTIME) and the host name of a machine.
pub(super) fn set_clock_and_name(ns: u64, name: &[u8]) -> Result<()> {
    let time = libc::timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as i64,
    };
    // SAFETY: reads a local value.
    if unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) } != 0 {
        return Err(Error::last_os_error());
    }
    Ok(nix::unistd::sethostname(std::ffi::OsStr::from_bytes(name))?)
}

/// Mixes bytes into the kernel's random source, counts them as entropy and reseeds from them.
pub(super) fn reseed(random: RawFd, bytes: &[u8]) -> Result<()> {
    // _IOW('R', 3, int[2]) and _IO('R', 7) (linux/random.h).
    const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
    // struct rand_pool_info: entropy in bits, bytes, the bytes.
    let mut info = Vec::new();
    info.extend_from_slice(&(bytes.len() as u32 * 8).to_ne_bytes());
    info.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
    info.extend_from_slice(bytes);
    // SAFETY: the first reads a structure as long as it says; the second takes nothing.
    let done = unsafe {
        libc::ioctl(random, RNDADDENTROPY, info.as_ptr()) == 0
            && libc::ioctl(random, RNDRESEEDCRNG) == 0
    };
    if done {
        Ok(())
    } else {
        Err(Error::last_os_error())
    }
}

/// The devices that programs may have, and the usual links.
pub(super) fn make_devices() -> Result<()> {
    for (name, minor) in DEVICES {
        let path = Path::new("/dev").join(name);
        let mode = Mode::from_bits_truncate(0o666);
        mknod(&path, SFlag::S_IFCHR, mode, makedev(1, minor))?;
        // The mode must not depend on the mask.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
    }
    for (name, target) in STREAMS {
        std::os::unix::fs::symlink(target, Path::new("/dev").join(name))?;
    }
    Ok(())
}

/// Becomes a program in a separate mount namespace, in which nothing is mounted at `path`; returns the reason
/// if it could not.
pub(super) fn without_mount(path: &str, program: &[OsString]) -> Error {
    const NONE: Option<&str> = None;
    let unmount = || -> Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
        Ok(umount2(path, MntFlags::MNT_DETACH)?)
    };
    match unmount() {
        Ok(()) => run_instead(program),
        Err(e) => e,
    }
}

/// Becomes a program, which is looked up in `PATH`; returns the reason if it could not.
pub(super) fn run_instead(program: &[OsString]) -> Error {
    let become_it = || -> Result<()> {
        let args: Result<Vec<CString>> = program.iter().map(|a| text(a.as_bytes())).collect();
        let args = args?;
        let name = args.first().ok_or(Error::from_raw_os_error(libc::EINVAL))?;
        execvp(name, &args)?;
        Ok(())
    };
    become_it()
        .err()
        .unwrap_or_else(|| Error::from_raw_os_error(libc::EINVAL))
}
