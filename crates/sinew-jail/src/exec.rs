//! Becoming a program: descriptors, signals, `execve`.
//!
//! `place` and `execve` run between a fork and a program, in a process that may share the memory of its
//! parent: they allocate nothing.

use std::ffi::CString;
use std::os::fd::RawFd;

/// A list as `execve` takes it.
pub(crate) fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    let ends = std::iter::once(std::ptr::null());
    list.iter().map(|s| s.as_ptr()).chain(ends).collect()
}

/// Moves `files`, five at most, to descriptors 0, 1, ...; everything else closes at an `execve`.
/// Signals are as a new program finds them. The errno if it cannot; allocates nothing.
pub(crate) fn place(files: &[RawFd]) -> Result<(), i32> {
    let targets = files.len() as RawFd;
    // SAFETY: descriptors that are targets themselves are first moved out of the way; nothing in
    // this process uses those that are replaced.
    unsafe {
        let away = |&fd: &RawFd| {
            if fd < targets {
                libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, targets)
            } else {
                fd
            }
        };
        let mut high = [-1; 5];
        for (high, fd) in high.iter_mut().zip(files) {
            *high = away(fd);
        }
        for (target, fd) in high.iter().take(files.len()).enumerate() {
            if libc::dup2(*fd, target as RawFd) < 0 {
                return Err(*libc::__errno_location());
            }
        }
        libc::syscall(
            libc::SYS_close_range,
            targets,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
    default_signals();
    Ok(())
}

/// Becomes the program `argv[0]`. Lists end in null. The errno if it cannot; allocates nothing.
pub(crate) fn execve(argv: &[*const libc::c_char], env: &[*const libc::c_char]) -> i32 {
    // SAFETY: the arrays end in null and live until this process is another program.
    unsafe {
        libc::execve(argv[0], argv.as_ptr(), env.as_ptr());
        *libc::__errno_location()
    }
}

/// Signals as a new program finds them.
fn default_signals() {
    // SAFETY: plain calls on local values.
    unsafe {
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut empty = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut empty);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const empty, std::ptr::null_mut());
    }
}
