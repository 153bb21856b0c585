//! Landlock: a second wall around files, signals and abstract sockets, whatever mounts do.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const ACCESS_EXECUTE: u64 = 1;
const ACCESS_READ_FILE: u64 = 1 << 2;
const ACCESS_READ_DIR: u64 = 1 << 3;
const ACCESS_WRITE_FILE: u64 = 1 << 1;
const READ: u64 = ACCESS_EXECUTE | ACCESS_READ_FILE | ACCESS_READ_DIR;
/// Making device nodes (MAKE_CHAR, MAKE_BLOCK) is allowed nowhere.
const MAKE_DEVICES: u64 = 1 << 6 | 1 << 11;
/// SCOPE_ABSTRACT_UNIX_SOCKET and SCOPE_SIGNAL (ABI 6).
const SCOPES: u64 = 0b11;

#[repr(C)]
struct Ruleset {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: i32,
}

/// Version of the kernel's interface; 0 where it is missing.
pub(crate) fn abi() -> i64 {
    // SAFETY: a null ruleset with flag 1 asks for the version (landlock_create_ruleset(2)).
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) }.max(0)
}

/// File rights that an ABI version knows.
fn all_rights(abi: i64) -> u64 {
    match abi {
        ..=0 => 0,
        1 => (1 << 13) - 1,
        2 => (1 << 14) - 1,
        3 | 4 => (1 << 15) - 1,
        _ => (1 << 16) - 1,
    }
}

/// Restricts this thread: read and execute everywhere, write below `/work` and `/tmp` and to
/// the devices that are there, no signals or abstract sockets to the outside.
pub(crate) fn restrict() -> io::Result<()> {
    let abi = abi();
    let all = all_rights(abi);
    let ruleset = Ruleset {
        handled_access_fs: all,
        // BIND_TCP and CONNECT_TCP (ABI 4): none is allowed.
        handled_access_net: if abi >= 4 { 0b11 } else { 0 },
        scoped: if abi >= 6 { SCOPES } else { 0 },
    };
    let size = match abi {
        ..=3 => 8,
        4 | 5 => 16,
        _ => 24,
    };
    // SAFETY: the struct is at least `size` bytes.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const ruleset,
            size,
            0,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let writable = all & !MAKE_DEVICES;
    let device = (ACCESS_READ_FILE | ACCESS_WRITE_FILE | 1 << 14 | 1 << 15) & all;
    for (path, access) in [
        (c"/", READ & all),
        (c"/work", writable),
        (c"/tmp", writable),
        (c"/dev/null", device),
        (c"/dev/zero", device),
        (c"/dev/full", device),
    ] {
        add(&fd, path, access)?;
    }
    // SAFETY: no pointers.
    match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, fd.as_raw_fd(), 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn add(ruleset: &OwnedFd, path: &CStr, access: u64) -> io::Result<()> {
    // SAFETY: the path ends in zero; the result is checked.
    let parent = unsafe { libc::open(path.as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
    if parent < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened above.
    let parent = unsafe { OwnedFd::from_raw_fd(parent) };
    let rule = PathBeneath {
        allowed_access: access,
        parent_fd: parent.as_raw_fd(),
    };
    // SAFETY: rule type 1 takes a `PathBeneath`.
    let added = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            1,
            &raw const rule,
            0,
        )
    };
    match added {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
