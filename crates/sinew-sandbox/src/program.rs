//! The program that this crate carries: spawner, agent of guests, jail of monitors.
//!
//! The bytes are built by `build.rs` with a nested Cargo, statically linked, so that they run in any root.

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{Result, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;

/// `sinew-jail`, for the architecture that this was compiled for; linked statically.
pub const JAIL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/sinew-jail"));

/// Path by which this process can start [`JAIL`]. It names a file in memory that no process can change,
/// however it reaches the file (`/proc/PID/exe`).
///
/// # Errors
/// If there is no such file: a host with `vm.memfd_noexec = 2` allows none to be started.
pub fn jail_program() -> Result<PathBuf> {
    static FILE: OnceLock<OwnedFd> = OnceLock::new();
    let file = match FILE.get() {
        Some(file) => file,
        None => {
            let made = sealed(JAIL)?;
            FILE.get_or_init(|| made)
        }
    };
    Ok(format!("/proc/self/fd/{}", file.as_raw_fd()).into())
}

fn sealed(bytes: &[u8]) -> Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let new = |more| memfd_create(c"sinew-jail", flags | more);
    // Kernels before 6.3 do not know the flag.
    let made =
        new(MFdFlags::from_bits_retain(libc::MFD_EXEC)).or_else(|_| new(MFdFlags::empty()))?;
    let mut file = File::from(made);
    file.write_all(bytes)?;
    let seals = SealFlag::F_SEAL_SEAL
        | SealFlag::F_SEAL_SHRINK
        | SealFlag::F_SEAL_GROW
        | SealFlag::F_SEAL_WRITE;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file.into())
}
