//! Starts programs in a child that shares the spawner's memory until it calls `execve`. So no memory is
//! copied: not for the child, and not for the spawner when it writes. The spawner stands still meanwhile.
//!
//! The child shares nothing else: descriptors, signals, credentials and namespaces are its own. It runs only
//! this code and allocates nothing that it keeps. No process may look into it (`PR_SET_DUMPABLE`) from the
//! moment that it has another user until it is the program. None is there, either: its namespaces hold only
//! the sandbox init, which waits.

use crate::cgroup::Group;
use crate::error::{Error, Result};
use crate::exec::{execve, place, pointers};
use crate::walls::{self, Failure, Plan};
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Stack of the child; its calls take a few of these bytes.
const STACK_BYTES: usize = 64 << 10;

/// A program that is to start in the PID namespace that this process gives its children.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) group: &'a Group,
    pub(super) plan: Plan,
    /// The sandbox init.
    pub(super) init: RawFd,
    /// Ruleset of landlock, or -1.
    pub(super) ruleset: RawFd,
    /// Standard streams of the program.
    pub(super) files: &'a [OwnedFd],
    /// Whether the first of them is a terminal, which becomes that of the session that the plan begins.
    pub(super) terminal: bool,
    pub(super) argv: &'a [CString],
    pub(super) env: &'a [CString],
}

/// Inputs and result of the child.
struct Shared<'a> {
    launch: Launch<'a>,
    files: [RawFd; 3],
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    failure: Option<Failure>,
}

impl Launch<'_> {
    /// The process id, and why hostile code did not come to run in it, if it did not; then it is
    /// about to end.
    pub(super) fn start(self) -> Result<(i32, Option<Failure>)> {
        let [input, output, error] = self.files else {
            return Err(Error::Files {
                got: self.files.len(),
                expected: 3,
            });
        };
        let mut shared = Shared {
            files: [input, output, error].map(AsRawFd::as_raw_fd),
            argv: pointers(self.argv),
            env: pointers(self.env),
            launch: self,
            failure: None,
        };
        let mut stack = Vec::<u128>::with_capacity(STACK_BYTES / 16);
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the child runs on a separate stack, of which the other end is given, on what outlives it
        // here: this process continues when the child has another memory, or none.
        let pid = unsafe {
            let open = libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0);
            let top = stack.as_mut_ptr().add(stack.capacity());
            let pid = libc::clone(child, top.cast(), flags, (&raw mut shared).cast());
            if open == 1 {
                libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
            }
            pid
        };
        match pid {
            -1 => Err(Error::last("clone")),
            pid => Ok((pid, shared.failure)),
        }
    }
}

/// The child must not allocate or lock anything before `execve`: the memory is the spawner's.
extern "C" fn child(shared: *mut libc::c_void) -> libc::c_int {
    // SAFETY: what `start` gave, which stands still.
    let shared = unsafe { &mut *shared.cast::<Shared<'_>>() };
    let launch = &mut shared.launch;
    let joined = launch.group.join(0);
    let joined = joined.map_err(|e| (walls::JOIN, e.raw_os_error().unwrap_or(0)));
    let done = joined.and_then(|()| launch.plan.run([launch.init, launch.ruleset]));
    let placed = |()| place(&shared.files).map_err(|errno| (walls::EXECVE, errno));
    let terminal = launch.terminal;
    let taken = |()| {
        if terminal {
            take_terminal().map_err(|errno| (walls::TERMINAL, errno))
        } else {
            Ok(())
        }
    };
    let failure = match done.and_then(placed).and_then(taken) {
        Err(failure) => failure,
        Ok(()) => (walls::EXECVE, execve(&shared.argv, &shared.env)),
    };
    shared.failure = Some(failure);
    // SAFETY: ends without destructors, which are the parent's to run.
    unsafe { libc::_exit(127) }
}

/// Makes standard input the terminal of this session, which has none yet: what is typed there can
/// interrupt programs, and shells can move them to the background. Never one that is another session's.
fn take_terminal() -> std::result::Result<(), i32> {
    // SAFETY: the request takes a number, and errno is this thread's.
    match unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } {
        0 => Ok(()),
        // SAFETY: as above.
        _ => Err(unsafe { *libc::__errno_location() }),
    }
}
