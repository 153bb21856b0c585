//! Landlock: a second wall around files, signals and abstract sockets, whatever mounts do.

use std::ffi::CStr;

const ACCESS_EXECUTE: u64 = 1;
const ACCESS_WRITE_FILE: u64 = 1 << 1;
const ACCESS_READ_FILE: u64 = 1 << 2;
const ACCESS_READ_DIR: u64 = 1 << 3;
const READ: u64 = ACCESS_EXECUTE | ACCESS_READ_FILE | ACCESS_READ_DIR;
/// Making device nodes (MAKE_CHAR, MAKE_BLOCK) is allowed nowhere.
const MAKE_DEVICES: u64 = 1 << 6 | 1 << 11;
/// SCOPE_ABSTRACT_UNIX_SOCKET and SCOPE_SIGNAL (ABI 6).
const SCOPES: u64 = 0b11;
/// BIND_TCP and CONNECT_TCP (ABI 4).
const TCP: u64 = 0b11;

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

/// A ruleset as the kernel takes it.
#[derive(Debug)]
pub(crate) struct Rules {
    /// `struct landlock_ruleset_attr`, as long as the ABI version knows it.
    pub(crate) ruleset: Vec<u8>,
    /// Paths and the rights below them.
    pub(crate) paths: Vec<(&'static CStr, u64)>,
}

/// Read and execute everywhere, write below `/work` and `/tmp` and to the devices that are
/// there, no signals or abstract sockets to the outside, no TCP unless `tcp`.
pub(crate) fn rules(abi: i64, tcp: bool) -> Rules {
    let all = all_rights(abi);
    let net = if abi >= 4 && !tcp { TCP } else { 0 };
    let scoped = if abi >= 6 { SCOPES } else { 0 };
    let words = match abi {
        ..=3 => 1,
        4 | 5 => 2,
        _ => 3,
    };
    let writable = all & !MAKE_DEVICES;
    let device = (ACCESS_READ_FILE | ACCESS_WRITE_FILE | 1 << 14 | 1 << 15) & all;
    let fields = [all, net, scoped];
    Rules {
        ruleset: fields[..words]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect(),
        paths: vec![
            (c"/", READ & all),
            (c"/work", writable),
            (c"/tmp", writable),
            (c"/dev/null", device),
            (c"/dev/zero", device),
            (c"/dev/full", device),
        ],
    }
}
