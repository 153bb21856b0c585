//! Programs of a guest and interpreters that wait for one: how they start, inside which walls.
//!
//! A program is a fork of the agent that takes the walls of [`Walls`] on itself and then calls `execve`.
//! The agent learns from a pipe that closes at `execve` whether it got that far, else at which step it
//! failed. An interpreter that waits is started the same way and confined before it is ready; only the
//! filter of system calls of one that forks others comes later, with the program (see
//! `python/guest.py`).

use super::group;
use super::sys;
use super::who;
use crate::exec;
use crate::process;
use crate::python;
use crate::seccomp::Filter;
use crate::walls::{EXECVE, FOLDER, FORK, Failure, GuestProgram, PROGRAM, Plan, WHO};
use crate::wire::Put;
use std::ffi::CString;
use std::fs::File;
use std::io::{Error, Read, Result, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Walls around programs, as SETUP describes them.
#[derive(Default)]
pub(super) struct Walls {
    /// User and group that programs become, and whose files they make; with a writable root, the user that
    /// handles files for the host.
    pub(super) user: u32,
    /// Resource, soft and hard limit (setrlimit(2)).
    pub(super) limits: Vec<[u64; 3]>,
    /// Filter of system calls.
    pub(super) filter: Filter,
    /// Ruleset for `/work` and `/tmp`; `None` where the kernel has no landlock.
    pub(super) landlock: Option<OwnedFd>,
    /// Programs share a group that counts what they use.
    pub(super) group: bool,
    /// There are no walls, for a machine whose own walls are under test.
    pub(super) open: bool,
}

/// Number of the CPU limit in `setrlimit(2)`.
pub(super) const CPU: u64 = libc::RLIMIT_CPU as u64;

/// Capabilities over files that root of a user namespace keeps: CHOWN, DAC_OVERRIDE, FOWNER.
const ROOT_KEEPS: [u32; 3] = [0, 1, 3];

/// A root that programs can change, as SETUP describes it.
pub(super) struct Root {
    /// User of programs that name none.
    user: Vec<u8>,
    /// Folder of programs that name none.
    workdir: Vec<u8>,
    /// Capabilities of programs of root.
    kept: &'static [u32],
}

impl Root {
    /// Root keeps capabilities only if they belong to a user namespace.
    pub(super) fn new(user: Vec<u8>, workdir: Vec<u8>) -> Self {
        let kept: &'static [u32] = if who::in_user_namespace() {
            &ROOT_KEEPS
        } else {
            &[]
        };
        Self {
            user,
            workdir,
            kept,
        }
    }
}

/// User, folder and rights of one program.
pub(super) struct Place {
    user: u32,
    group: u32,
    groups: Vec<u32>,
    workdir: Vec<u8>,
    kept: &'static [u32],
    /// Rights that new files do not get.
    mask: u32,
    /// Home of the user, with a writable root.
    pub(super) home: Option<Vec<u8>>,
}

/// Adds the step to an error.
pub(super) fn at(step: u32) -> impl Fn(Error) -> Failure {
    move |e| (step, e.raw_os_error().unwrap_or(0))
}

impl Walls {
    /// Confines this process. It may take `ready_s` seconds of processors more than its limit, and wait
    /// `apart`.
    fn confine(
        &self,
        place: &Place,
        ready_s: u64,
        apart: bool,
    ) -> std::result::Result<(), Failure> {
        if self.open {
            return std::env::set_current_dir("/work").map_err(at(PROGRAM));
        }
        if self.group {
            let joined = if apart { group::wait() } else { group::join(0) };
            joined.map_err(at(crate::walls::JOIN))?;
        }
        let mut limits = self.limits.clone();
        for [_, soft, hard] in limits.iter_mut().filter(|l| l[0] == CPU) {
            (*soft, *hard) = (*soft + ready_s, *hard + ready_s);
        }
        let program = GuestProgram {
            user: place.user,
            group: place.group,
            groups: &place.groups,
            workdir: &place.workdir,
            kept: place.kept,
            limits: &limits,
            landlock: self.landlock.is_some(),
            // The forks of one that waits apart set it before their programs.
            filter: (!apart).then_some(&self.filter),
        };
        let ruleset = self.landlock.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        Plan::guest(&program).run([-1, ruleset])
    }
}

/// Content of the SETUP request.
#[derive(Default)]
pub(super) struct Setup {
    /// Walls around every program.
    pub(super) walls: Walls,
    /// `NAME=value` of every program; those of a request come after them.
    pub(super) env: Vec<Vec<u8>>,
    /// The interpreter, empty without one.
    pub(super) python: Vec<u8>,
    /// Keep an interpreter waiting.
    pub(super) warm: bool,
    /// A whole machine is the sandbox: its kernel's counters are the sandbox's.
    pub(super) machine: bool,
    /// Set if programs can write everywhere.
    pub(super) root: Option<Root>,
}

/// A program that was started.
pub(super) struct Child {
    pub(super) pid: i32,
    /// Writing end of its standard input, until something feeds it.
    pub(super) stdin: Option<OwnedFd>,
    /// Reading ends of its standard output and error.
    pub(super) output: [OwnedFd; 2],
    /// Channel over which a waiting interpreter gets its program.
    control: Option<OwnedFd>,
    /// Time on processors before it got its program.
    pub(super) before_us: u64,
}

/// Seconds that an interpreter may take to get ready, emulated on a busy machine; it takes what is
/// left back when it gets its program.
const READY_S: u64 = 60;

impl Child {
    /// One that waits at the other ends of its streams, the last of which brings its program.
    pub(super) fn waiting(pid: i32, [stdin, out, err, control]: [OwnedFd; 4]) -> Result<Self> {
        for fd in [&stdin, &out, &err] {
            sys::set_nonblocking(fd, true)?;
        }
        Ok(Self {
            pid,
            stdin: Some(stdin),
            output: [out, err],
            control: Some(control),
            before_us: 0,
        })
    }

    /// Sends a waiting interpreter its program: CPU seconds, environment, code. Returns false if it is not an
    /// interpreter.
    pub(super) fn give(&mut self, cpu_s: u64, env: &[Vec<u8>], code: &[u8]) -> bool {
        let Some(control) = self.control.take() else {
            return false;
        };
        let program = Put::default().bytes(cpu_s.to_string().as_bytes()).list(env);
        let program = program.bytes(code).0;
        let size = (program.len() as u64).to_le_bytes();
        let program = [&size, program.as_slice()].concat();
        self.before_us = process::cpu_us(self.pid).unwrap_or(0);
        // It dies only if it was killed; then its end shows it.
        let _ = File::from(control).write_all(&program);
        true
    }
}

impl Setup {
    /// The place of a program with this user and folder; empty: those of the sandbox.
    ///
    /// # Errors
    /// The step that failed: there is no such user, the folder is not absolute, or there is no choice.
    pub(super) fn place(&self, user: &[u8], workdir: &[u8]) -> std::result::Result<Place, Failure> {
        let Some(root) = &self.root else {
            if !user.is_empty() || !workdir.is_empty() {
                return Err((WHO, libc::EINVAL));
            }
            return Ok(Place {
                user: self.walls.user,
                group: self.walls.user,
                groups: Vec::new(),
                workdir: b"/work".to_vec(),
                kept: &[],
                mask: 0o077,
                home: None,
            });
        };
        let or = |given: &[u8], own: &[u8]| {
            let chosen = if given.is_empty() { own } else { given };
            chosen.to_vec()
        };
        let (user, workdir) = (or(user, &root.user), or(workdir, &root.workdir));
        if !workdir.starts_with(b"/") || workdir.contains(&0) {
            return Err((FOLDER, libc::EINVAL));
        }
        let found = who::user(&user).map_err(at(WHO))?;
        Ok(Place {
            kept: if found.user == 0 { root.kept } else { &[] },
            user: found.user,
            group: found.group,
            groups: found.groups,
            workdir,
            mask: 0o022,
            home: Some(found.home),
        })
    }

    /// Starts a program with these descriptors; its number. It comes back when the program has taken the
    /// child's place, or with the step that failed.
    fn launch(
        &self,
        theirs: &[RawFd],
        place: &Place,
        argv: &[CString],
        env: &[CString],
        (waits, apart): (bool, bool),
    ) -> std::result::Result<i32, Failure> {
        let failed = at(FORK);
        let (said, say) = sys::pipe().map_err(&failed)?;
        // SAFETY: this process has one thread; the child ends here.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let ready_s = if waits { READY_S } else { 0 };
            let confine = || self.walls.confine(place, ready_s, apart);
            let (step, errno) = become_program(place.mask, confine, theirs, argv, env);
            let mut record = step.to_ne_bytes().to_vec();
            record.extend_from_slice(&errno.to_ne_bytes());
            let _ = File::from(say).write_all(&record);
            // SAFETY: ends without destructors, which are the parent's to run.
            unsafe { libc::_exit(127) }
        }
        if pid < 0 {
            return Err(failed(Error::last_os_error()));
        }
        drop(say);
        let mut record = Vec::new();
        // Ends when the program has taken the child's place.
        let _ = File::from(said).read_to_end(&mut record);
        if let Ok(record) = <[u8; 8]>::try_from(record.as_slice()) {
            let [a, b, c, d, e, f, g, h] = record;
            sys::end(pid);
            return Err((
                u32::from_ne_bytes([a, b, c, d]),
                i32::from_ne_bytes([e, f, g, h]),
            ));
        }
        Ok(pid)
    }

    pub(super) fn start(
        &self,
        place: &Place,
        argv: &[CString],
        env: &[CString],
        waits: bool,
    ) -> std::result::Result<Child, Failure> {
        let failed = at(FORK);
        let (in_r, stdin) = sys::pipe().map_err(&failed)?;
        let (out_r, out_w) = sys::pipe().map_err(&failed)?;
        let (err_r, err_w) = sys::pipe().map_err(&failed)?;
        let (control_r, control) = sys::pipe().map_err(&failed)?;
        let theirs = [&in_r, &out_w, &err_w, &control_r].map(AsRawFd::as_raw_fd);
        let theirs = if waits { &theirs[..] } else { &theirs[..3] };
        let pid = self.launch(theirs, place, argv, env, (waits, false))?;
        let child = Child::waiting(pid, [stdin, out_r, err_r, control]);
        let mut child = child.map_err(&failed)?;
        if !waits {
            child.control = None;
        }
        Ok(child)
    }

    /// Whether an interpreter can stand apart from programs, out of their reach.
    pub(super) fn divides(&self) -> bool {
        let walls = &self.walls;
        self.machine && !walls.open && walls.landlock.is_some() && group::divides()
    }

    /// Starts an interpreter that forks others; returns its process id and the stream for requests.
    pub(super) fn reserve(&self) -> Option<(i32, UnixStream)> {
        let mut argv = python::waiting(&self.python, "guest", python::GUEST).ok()?;
        // The filter that its forks set: it ensures itself that no process may look into it.
        let filter: String = self
            .walls
            .filter
            .bytes
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        argv.push(sys::text(filter.as_bytes()).ok()?);
        let env = texts(&self.env).ok()?;
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .ok()?;
        let (ours, theirs) = UnixStream::pair().ok()?;
        let null = null.as_raw_fd();
        let fds = [null, null, null, theirs.as_raw_fd()];
        let place = self.place(b"", b"").ok()?;
        let pid = self.launch(&fds, &place, &argv, &env, (true, true)).ok()?;
        Some((pid, ours))
    }

    /// An interpreter for the next program, if one is to wait.
    pub(super) fn spare(&self) -> Option<Child> {
        if !self.warm || self.python.is_empty() {
            return None;
        }
        let argv = python::waiting(&self.python, "guest", python::GUEST).ok()?;
        let env = texts(&self.env).ok()?;
        let place = self.place(b"", b"").ok()?;
        self.start(&place, &argv, &env, true).ok()
    }
}

pub(super) fn texts(list: &[Vec<u8>]) -> Result<Vec<CString>> {
    list.iter().map(|t| sys::text(t)).collect()
}

/// Turns the child process into the program. From then on it keeps only those resources of the agent that the
/// program receives.
fn become_program(
    mask: u32,
    confine: impl FnOnce() -> std::result::Result<(), Failure>,
    fds: &[RawFd],
    argv: &[CString],
    env: &[CString],
) -> Failure {
    let _ = nix::unistd::setsid();
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(mask));
    // If memory runs out, programs are killed first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    if let Err(errno) = exec::place(fds) {
        return (PROGRAM, errno);
    }
    if let Err(failure) = confine() {
        return failure;
    }
    let environment = exec::pointers(env);
    let name = argv
        .first()
        .map(|a| a.to_bytes().to_vec())
        .unwrap_or_default();
    if name.contains(&b'/') {
        return (EXECVE, exec::execve(&exec::pointers(argv), &environment));
    }
    let path = env
        .iter()
        .find_map(|e| e.to_bytes().strip_prefix(b"PATH="))
        .unwrap_or(b"/usr/bin:/bin");
    let mut failure = libc::ENOENT;
    for folder in path.split(|&b| b == b':') {
        let Ok(full) = sys::text(&[folder, b"/", &name].concat()) else {
            continue;
        };
        let mut argv = argv.to_vec();
        argv[0] = full;
        let tried = exec::execve(&exec::pointers(&argv), &environment);
        if tried != libc::ENOENT {
            failure = tried;
        }
    }
    (EXECVE, failure)
}
