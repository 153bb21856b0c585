//! Everything between a fork and hostile code: limits, no capabilities, another user, landlock,
//! a filter of system calls. As the process level does it.

use crate::sys;
use std::ffi::CStr;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, OwnedFd};

/// Steps that can fail; the client names them.
pub const FORK: u32 = 0;
pub const EXECVE: u32 = 1;
pub const PROGRAM: u32 = 2;
const LIMITS: u32 = 3;
const CAPABILITIES: u32 = 4;
const USER: u32 = 5;
const NO_NEW_PRIVS: u32 = 6;
const LANDLOCK: u32 = 7;
const SECCOMP: u32 = 8;

/// What SETUP described.
#[derive(Default)]
pub struct Walls {
    pub user: u32,
    /// Resource, soft and hard limit (setrlimit(2)).
    pub limits: Vec<[u64; 3]>,
    /// `struct sock_filter`s.
    pub filter: Vec<u8>,
    pub landlock: Option<OwnedFd>,
    /// Programs share a group that counts what they use.
    pub group: bool,
    /// None at all: for a machine whose own walls are under test.
    pub open: bool,
}

/// RLIMIT_CPU.
pub const CPU: u64 = 0;
/// RLIMIT_NOFILE.
const FILES: u64 = 7;

type Step = std::result::Result<(), (u32, i32)>;

fn at(step: u32, done: Result<i64>) -> Step {
    done.map(|_| ())
        .map_err(|e| (step, e.raw_os_error().unwrap_or(0)))
}

impl Walls {
    /// Confines this process. The limit of open files comes late: it may have more than that. It
    /// may take `ready_s` seconds of processors more than its limit says, and wait `apart`.
    pub fn confine(&self, ready_s: u64, apart: bool) -> Step {
        if self.open {
            return at(USER, sys::chdir(crate::files::WORK).map(|_| 0));
        }
        if self.group {
            let joined = if apart {
                crate::group::wait()
            } else {
                crate::group::join()
            };
            at(LIMITS, joined.map(|()| 0))?;
        }
        let (files, others): (Vec<_>, Vec<_>) = self.limits.iter().partition(|l| l[0] == FILES);
        for &&[resource, soft, hard] in &others {
            let more = if resource == CPU { ready_s } else { 0 };
            at(
                LIMITS,
                sys::set_limit(&[resource, soft + more, hard + more]),
            )?;
        }
        for capability in 0..=63 {
            // The kernel knows fewer: the first that it does not know ends the set.
            if sys::prctl(24, capability).is_err() {
                break;
            }
        }
        // NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off, NO_CAP_AMBIENT_RAISE, all locked.
        at(CAPABILITIES, sys::prctl(28, 0b1110_1111))?;
        at(USER, sys::become_user(self.user))?;
        at(USER, sys::chdir(crate::files::WORK))?;
        at(CAPABILITIES, sys::drop_capabilities())?;
        // PR_SET_NO_NEW_PRIVS; PR_SET_DUMPABLE: the change of user closed /proc/self.
        at(NO_NEW_PRIVS, sys::prctl(38, 1))?;
        at(NO_NEW_PRIVS, sys::prctl(4, 1))?;
        if let Some(ruleset) = &self.landlock {
            at(LANDLOCK, sys::landlock_restrict(ruleset.as_raw_fd()))?;
        }
        for limit in files {
            at(LIMITS, sys::set_limit(limit))?;
        }
        if apart {
            // Its forks set the filter before their programs.
            return Ok(());
        }
        at(SECCOMP, sys::set_filter(&self.filter))
    }
}

const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
/// MAKE_CHAR and MAKE_BLOCK.
const MAKE_DEVICES: u64 = 1 << 6 | 1 << 11;

/// Read and execute everywhere, write below the work folders and to harmless devices; no signals
/// or abstract sockets to the outside, no TCP unless `tcp`. `None` where the kernel has none.
pub fn landlock(tcp: bool) -> Result<Option<OwnedFd>> {
    let abi = sys::landlock();
    let all: u64 = match abi {
        0 => return Ok(None),
        1 => (1 << 13) - 1,
        2 => (1 << 14) - 1,
        3 | 4 => (1 << 15) - 1,
        _ => (1 << 16) - 1,
    };
    let net = if tcp { 0 } else { 0b11 };
    // struct landlock_ruleset_attr: files, network (version 4), scopes (version 6).
    let fields = [all, net, 0b11];
    let words = match abi {
        ..=3 => 1,
        4 | 5 => 2,
        _ => 3,
    };
    let ruleset = sys::landlock_create(&fields[..words])?;
    let device = (READ_FILE | WRITE_FILE | 1 << 14 | 1 << 15) & all;
    let rules: [(&CStr, u64); 6] = [
        (c"/", (EXECUTE | READ_FILE | READ_DIR) & all),
        (crate::files::WORK, all & !MAKE_DEVICES),
        (crate::files::TMP, all & !MAKE_DEVICES),
        (c"/dev/null", device),
        (c"/dev/zero", device),
        (c"/dev/full", device),
    ];
    for (path, rights) in rules {
        let opened = sys::open_path(path)?;
        sys::landlock_allow(ruleset.as_raw_fd(), opened.as_raw_fd(), rights)?;
    }
    Ok(Some(ruleset))
}

/// Why a start failed, from an error that names a step of its own.
pub fn failure(step: u32) -> impl Fn(Error) -> (u32, i32) {
    move |e| (step, e.raw_os_error().unwrap_or(0))
}
