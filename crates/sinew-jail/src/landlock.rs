//! Landlock: a second wall around files, signals and abstract sockets, whatever mounts do.
//!
//! It also protects against a misused mount: rights belong to files, whatever path leads to them. Kernels
//! support it in versions (ABI): rights and scopes of later ones are left out on earlier kernels, and `probe`
//! returns the version in force.

use crate::error::{Error, Result, on};
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

const ACCESS_EXECUTE: u64 = 1;
const ACCESS_WRITE_FILE: u64 = 1 << 1;
const ACCESS_READ_FILE: u64 = 1 << 2;
const ACCESS_READ_DIR: u64 = 1 << 3;
const READ: u64 = ACCESS_EXECUTE | ACCESS_READ_FILE | ACCESS_READ_DIR;
/// Making device nodes (MAKE_CHAR, MAKE_BLOCK) is allowed nowhere.
const MAKE_DEVICES: u64 = 1 << 6 | 1 << 11;
/// Requests to devices (IOCTL_DEV, ABI 5).
const IOCTL_DEVICES: u64 = 1 << 15;
/// SCOPE_ABSTRACT_UNIX_SOCKET and SCOPE_SIGNAL (ABI 6).
const SCOPES: u64 = 0b11;
/// BIND_TCP and CONNECT_TCP (ABI 4).
const TCP: u64 = 0b11;

/// Version of the kernel's interface; 0 where it is missing.
pub(crate) fn abi() -> i64 {
    // SAFETY: a null ruleset with flag 1 asks for the version (landlock_create_ruleset(2)).
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) }.max(0)
}

/// File rights that an ABI version supports.
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
    /// `struct landlock_ruleset_attr`, as long as the ABI version supports it.
    pub(crate) ruleset: Vec<u8>,
    /// Paths and the rights below them.
    pub(crate) paths: Vec<(&'static CStr, u64)>,
}

/// Places in which programs may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writable {
    /// The work folder and `/tmp`.
    Folders,
    /// Everything that can be written, for a root that is only this sandbox's.
    Everything,
}

/// Read and execute everywhere, write below `/work` and `/tmp` (or everywhere) and to the existing devices,
/// no signals or abstract sockets to the outside, no TCP unless `tcp`.
pub(crate) fn rules(abi: i64, tcp: bool, write: Writable) -> Rules {
    let all = all_rights(abi);
    let net = if abi >= 4 && !tcp { TCP } else { 0 };
    let scoped = if abi >= 6 { SCOPES } else { 0 };
    let words = match abi {
        ..=3 => 1,
        4 | 5 => 2,
        _ => 3,
    };
    let writable = all & !MAKE_DEVICES;
    let root = match write {
        Writable::Folders => READ & all,
        Writable::Everything => writable & !IOCTL_DEVICES,
    };
    let device = (ACCESS_READ_FILE | ACCESS_WRITE_FILE | 1 << 14 | 1 << 15) & all;
    let fields = [all, net, scoped];
    Rules {
        ruleset: fields[..words]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect(),
        paths: vec![
            (c"/", root),
            (c"/work", writable),
            (c"/tmp", writable),
            (c"/dev/null", device),
            (c"/dev/zero", device),
            (c"/dev/full", device),
        ],
    }
}

/// Files and folders that the rules of all sandboxes name, opened once.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) abi: i64,
    common: Vec<(&'static CStr, OwnedFd)>,
}

impl Common {
    /// Opens what lies in the root that sandboxes see; `None` where the kernel has no landlock.
    ///
    /// # Errors
    /// Fails if one of them cannot be opened.
    pub(crate) fn open(root: &Path) -> Result<Option<Self>> {
        let abi = abi();
        let mut common = Vec::new();
        for (path, _) in rules(abi, false, Writable::Folders).paths {
            if path != c"/work" && path != c"/tmp" {
                let name = path.to_string_lossy();
                let at = root.join(name.trim_start_matches('/'));
                let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
                let fd = nix::fcntl::open(&at, flags, Mode::empty()).map_err(on("open", &at))?;
                common.push((path, fd));
            }
        }
        Ok((abi > 0).then_some(Self { abi, common }))
    }

    /// The ruleset of a sandbox with these folders.
    pub(crate) fn ruleset(
        &self,
        work: &OwnedFd,
        tmp: &OwnedFd,
        tcp: bool,
        write: Writable,
    ) -> Result<OwnedFd> {
        let rules = rules(self.abi, tcp, write);
        // SAFETY: reads the bytes of a structure; the descriptor is new and ours.
        let ruleset = unsafe {
            let (at, size) = (rules.ruleset.as_ptr(), rules.ruleset.len());
            match libc::syscall(libc::SYS_landlock_create_ruleset, at, size, 0) {
                -1 => return Err(Error::last("landlock_create_ruleset")),
                fd => OwnedFd::from_raw_fd(fd as i32),
            }
        };
        for (path, access) in rules.paths {
            let beneath = match path.to_bytes() {
                b"/work" => work,
                b"/tmp" => tmp,
                path => {
                    let at = self.common.iter().find(|(p, _)| p.to_bytes() == path);
                    &at.ok_or(Error::NoSuch("folder of the rules"))?.1
                }
            };
            allow(&ruleset, beneath, access)?;
        }
        Ok(ruleset)
    }
}

/// LANDLOCK_RULE_PATH_BENEATH.
fn allow(ruleset: &OwnedFd, beneath: &OwnedFd, access: u64) -> Result<()> {
    // struct landlock_path_beneath_attr, packed: rights, descriptor.
    let mut rule = [0; 12];
    rule[..8].copy_from_slice(&access.to_ne_bytes());
    rule[8..].copy_from_slice(&beneath.as_raw_fd().to_ne_bytes());
    let (ruleset, rule) = (ruleset.as_raw_fd(), rule.as_ptr());
    // SAFETY: a packed structure of 12 bytes that names an open descriptor.
    match unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, 1, rule, 0) } {
        0 => Ok(()),
        _ => Err(Error::last("landlock_add_rule")),
    }
}
