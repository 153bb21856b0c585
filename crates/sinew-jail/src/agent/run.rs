//! Programs: how they start, what they write, how they end. One at a time.

use super::files;
use super::group;
use super::link::Link;
use super::sys::{self, POLLHUP, POLLIN, POLLOUT, PollFd};
use super::waiting::Waiting;
use crate::cgroup::CgroupEvents;
use crate::exec;
use crate::python;
use crate::seccomp::Filter;
use crate::walls::{EXECVE, FORK, Failure, GuestProgram, PROGRAM, Plan};
use crate::wire::{CHUNK, Put, Take, ask, content, cut, tell};
use nix::sys::signalfd::SignalFd;
use std::ffi::CString;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Frames on their way to the host; with more, programs are held back.
const MAX_QUEUED: usize = 256 << 10;
/// Standard input that waits for the program.
const MAX_STDIN: usize = 64 << 10;

/// What SETUP described.
#[derive(Default)]
pub(super) struct Walls {
    pub(super) user: u32,
    /// Resource, soft and hard limit (setrlimit(2)).
    pub(super) limits: Vec<[u64; 3]>,
    pub(super) filter: Filter,
    pub(super) landlock: Option<OwnedFd>,
    /// Programs share a group that counts what they use.
    pub(super) group: bool,
    /// None at all: for a machine whose own walls are under test.
    pub(super) open: bool,
}

/// RLIMIT_CPU.
const CPU: u64 = libc::RLIMIT_CPU as u64;

/// Adds the step to an error.
fn at(step: u32) -> impl Fn(Error) -> Failure {
    move |e| (step, e.raw_os_error().unwrap_or(0))
}

impl Walls {
    /// Confines this process. It may take `ready_s` seconds of processors more than its limit says,
    /// and wait `apart`.
    fn confine(&self, ready_s: u64, apart: bool) -> std::result::Result<(), Failure> {
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
            user: self.user,
            limits: &limits,
            landlock: self.landlock.is_some(),
            // The forks of one that waits apart set it before their programs.
            filter: (!apart).then_some(&self.filter),
        };
        let ruleset = self.landlock.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        Plan::guest(&program).run([-1, ruleset])
    }
}

/// What SETUP said.
#[derive(Default)]
pub(super) struct Setup {
    pub(super) walls: Walls,
    pub(super) env: Vec<Vec<u8>>,
    /// The interpreter, empty without one.
    pub(super) python: Vec<u8>,
    /// Keep an interpreter waiting.
    pub(super) warm: bool,
    /// A whole machine is the sandbox: its kernel's counters are the sandbox's.
    pub(super) machine: bool,
}

/// A program that was started.
pub(super) struct Child {
    pid: i32,
    stdin: Option<OwnedFd>,
    output: [OwnedFd; 2],
    /// Where an interpreter that waits gets its program.
    control: Option<OwnedFd>,
    /// Time on processors before it got its program.
    before_us: u64,
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

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }
}

impl Setup {
    /// Starts a program with these descriptors; its number.
    fn launch(
        &self,
        theirs: &[RawFd],
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
            let (step, errno) = become_program(&self.walls, (ready_s, apart), theirs, argv, env);
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

    fn start(
        &self,
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
        let pid = self.launch(theirs, argv, env, (waits, false))?;
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

    /// An interpreter that forks others; what it is asked by.
    pub(super) fn reserve(&self) -> Option<(i32, UnixStream)> {
        let mut argv = python::waiting(&self.python, "guest", python::GUEST).ok()?;
        // The filter, which its forks set: it says itself that no process may look into it.
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
        let pid = self.launch(&fds, &argv, &env, (true, true)).ok()?;
        Some((pid, ours))
    }

    /// An interpreter for the next program, if one is to wait.
    pub(super) fn spare(&self) -> Option<Child> {
        if !self.warm || self.python.is_empty() {
            return None;
        }
        let argv = python::waiting(&self.python, "guest", python::GUEST).ok()?;
        let env = texts(&self.env).ok()?;
        self.start(&argv, &env, true).ok()
    }
}

fn texts(list: &[Vec<u8>]) -> Result<Vec<CString>> {
    list.iter().map(|t| sys::text(t)).collect()
}

/// In the child: from here on nothing of the agent is left in it but what the program gets.
fn become_program(
    walls: &Walls,
    (ready_s, apart): (u64, bool),
    fds: &[RawFd],
    argv: &[CString],
    env: &[CString],
) -> Failure {
    let _ = nix::unistd::setsid();
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    // Where memory runs out, programs go first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    if let Err(errno) = exec::place(fds) {
        return (PROGRAM, errno);
    }
    if let Err(failure) = walls.confine(ready_s, apart) {
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

/// EXEC as it was asked.
struct Request {
    python: bool,
    args: Vec<Vec<u8>>,
    env: Vec<Vec<u8>>,
    deadline: Duration,
    output_bytes: u64,
}

fn parse(bytes: &[u8]) -> Option<Request> {
    let mut take = Take(bytes);
    Some(Request {
        python: take.byte()? == 1,
        deadline: Duration::from_millis(take.number()?),
        output_bytes: take.number()?,
        args: take.list()?,
        env: take.list()?,
    })
}

/// One execution as it goes on.
struct Running<'a> {
    link: &'a mut Link,
    waiting: &'a mut Waiting,
    child: Child,
    /// None once nothing reads it any more or all was written.
    stdin: Option<OwnedFd>,
    stdin_waits: Vec<u8>,
    stdin_ended: bool,
    open: [bool; 2],
    read: [u64; 2],
    most: u64,
    truncated: bool,
    queued: Vec<u8>,
    cut: u8,
    cpu_us: u64,
    max_rss_kib: u64,
    status: Option<i32>,
}

/// EXEC: runs a program to its end. `Err` is a connection that failed.
pub(super) fn exec(
    link: &mut Link,
    setup: &Setup,
    waiting: &mut Waiting,
    children: &SignalFd,
    bytes: &[u8],
) -> Result<()> {
    let began = Instant::now();
    // What an earlier program left may have ended late.
    while let Some(gone) = sys::reap(false) {
        waiting.lost(gone.pid);
    }
    waiting.settle();
    let before = counters(setup.machine);
    let started = match parse(bytes) {
        Some(request) => start(setup, waiting, &request).map(|child| (child, request)),
        None => Err((PROGRAM, 71)),
    };
    let (mut child, request) = match started {
        Ok(started) => started,
        Err((step, errno)) => {
            while link.next()?.0 != ask::END {}
            let frame = Put::of(tell::FAILED)
                .number(step.into())
                .number(errno as u64)
                .bytes(b"start");
            return link.send(&frame.frame());
        }
    };
    let stdin = child.stdin.take();
    let mut running = Running {
        link,
        waiting,
        child,
        stdin,
        stdin_waits: Vec::new(),
        stdin_ended: false,
        open: [true; 2],
        read: [0; 2],
        most: request.output_bytes,
        truncated: false,
        queued: Vec::new(),
        cut: cut::NONE,
        cpu_us: 0,
        max_rss_kib: 0,
        status: None,
    };
    sys::set_nonblocking(&running.link, true)?;
    let until = began + request.deadline;
    while running.status.is_none() {
        running.step(children, until)?;
    }
    running.finish()?;
    let mut counted = counters(setup.machine);
    counted.oom_kills -= before.oom_kills;
    counted.process_refusals -= before.process_refusals;
    let ended = running.report(&counted);
    running.link.send(&ended)?;
    running.waiting.settle();
    Ok(())
}

fn start(
    setup: &Setup,
    waiting: &mut Waiting,
    request: &Request,
) -> std::result::Result<Child, Failure> {
    let failed = at(PROGRAM);
    let env: Vec<Vec<u8>> = setup.env.iter().chain(&request.env).cloned().collect();
    if request.python {
        let code = request.args.first().map(Vec::as_slice).unwrap_or_default();
        if let Some(mut child) = waiting.take()
            && let Some(control) = child.control.take()
        {
            let cpu = setup.walls.limits.iter().find(|l| l[0] == CPU);
            let cpu_s = cpu.map_or(0, |l| l[1]).to_string();
            let program = Put::default().bytes(cpu_s.as_bytes()).list(&env);
            let program = program.bytes(code).0;
            let size = (program.len() as u64).to_le_bytes();
            let program = [&size, program.as_slice()].concat();
            child.before_us = sys::cpu_us(child.pid);
            // It dies only if it was killed; then it says so by its end.
            let _ = File::from(control).write_all(&program);
            return Ok(child);
        }
        if setup.python.is_empty() {
            return Err((EXECVE, 2));
        }
        let argv = python::command(&setup.python, code).map_err(|e| failed(e.into()))?;
        return setup.start(&argv, &texts(&env).map_err(&failed)?, false);
    }
    waiting.make_room();
    let argv = texts(&request.args).map_err(&failed)?;
    if argv.is_empty() {
        return Err((PROGRAM, 22));
    }
    setup.start(&argv, &texts(&env).map_err(&failed)?, false)
}

/// What a machine's group counts; a container's is counted outside.
fn counters(machine: bool) -> CgroupEvents {
    if machine {
        group::counters()
    } else {
        CgroupEvents::default()
    }
}

impl Running<'_> {
    fn step(&mut self, children: &SignalFd, until: Instant) -> Result<()> {
        let room = self.queued.len() < MAX_QUEUED;
        let read = |wanted: bool, fd: RawFd, events: i16| PollFd {
            fd: if wanted { fd } else { -1 },
            events,
            revents: 0,
        };
        let feed = self.stdin.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let link_in = if self.stdin_waits.len() < MAX_STDIN {
            POLLIN
        } else {
            0
        };
        let link_out = if self.queued.is_empty() { 0 } else { POLLOUT };
        let mut fds = [
            read(true, children.as_fd().as_raw_fd(), POLLIN),
            read(true, self.link.fd(), link_in | link_out),
            read(
                room && self.open[0],
                self.child.output[0].as_raw_fd(),
                POLLIN,
            ),
            read(
                room && self.open[1],
                self.child.output[1].as_raw_fd(),
                POLLIN,
            ),
            read(!self.stdin_waits.is_empty(), feed, POLLOUT),
        ];
        let left = until.saturating_duration_since(Instant::now());
        // Once cut, only the end is awaited.
        let timeout = if self.cut == cut::NONE {
            left.as_millis().min(60_000) as i32 + 1
        } else {
            1000
        };
        sys::wait_for(&mut fds, timeout)?;
        if Instant::now() >= until && self.cut == cut::NONE {
            self.end(cut::DEADLINE);
        }
        let said = |i: usize| fds[i].revents != 0;
        if fds[1].revents & (POLLIN | POLLHUP) != 0 && link_in != 0 {
            self.link.fill()?;
        }
        self.frames();
        if said(4) || self.stdin_ended {
            self.feed();
        }
        for i in 0..2 {
            if said(2 + i) {
                self.capture(i);
            }
        }
        if !self.queued.is_empty() {
            let sent = self.link.send_some(&self.queued)?;
            self.queued.drain(..sent);
        }
        if said(0) {
            while matches!(children.read_signal(), Ok(Some(_))) {}
            while let Some(gone) = sys::reap(false) {
                self.reaped(gone);
            }
        }
        Ok(())
    }

    fn end(&mut self, why: u8) {
        self.cut = why;
        self.waiting.kill_programs();
    }

    fn reaped(&mut self, gone: sys::Gone) {
        let mine = gone.pid == self.child.pid;
        if !mine && self.waiting.lost(gone.pid) {
            return;
        }
        let before_us = if mine { self.child.before_us } else { 0 };
        self.cpu_us += gone.cpu_us.saturating_sub(before_us);
        self.max_rss_kib = self.max_rss_kib.max(gone.max_rss_kib);
        if mine {
            self.status = Some(gone.status);
        }
    }

    fn frames(&mut self) {
        while let Some((kind, bytes)) = self.link.ready() {
            match kind {
                ask::DATA if self.stdin.is_some() => self.stdin_waits.extend_from_slice(&bytes),
                ask::END => self.stdin_ended = true,
                ask::KILL if self.cut == cut::NONE => self.end(cut::ASKED),
                _ => {}
            }
        }
    }

    fn feed(&mut self) {
        while let (Some(pipe), false) = (&self.stdin, self.stdin_waits.is_empty()) {
            let Ok(pipe) = pipe.try_clone() else { return };
            match File::from(pipe).write(&self.stdin_waits) {
                Ok(n) => drop(self.stdin_waits.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // Nobody reads it: a program need not read what it is given.
                Err(_) => {
                    self.stdin = None;
                    self.stdin_waits.clear();
                }
            }
        }
        if self.stdin_ended {
            self.stdin = None;
        }
    }

    /// One piece of output; true if there may be more. Beyond the bound it is still read, so
    /// that a full pipe does not look like a program that hangs.
    fn capture(&mut self, i: usize) -> bool {
        let mut chunk = [0; CHUNK];
        let Ok(pipe) = self.child.output[i].try_clone() else {
            return false;
        };
        let n = match File::from(pipe).read(&mut chunk) {
            Ok(n @ 1..) => n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return false;
            }
            _ => {
                self.open[i] = false;
                return false;
            }
        };
        let room = (self.most.saturating_sub(self.read[i]) as usize).min(n);
        self.read[i] += n as u64;
        if room > 0 {
            let kind = [tell::STDOUT, tell::STDERR][i];
            self.queued
                .extend_from_slice(&content(kind, &chunk[..room]));
        }
        if room < n {
            self.truncated = true;
            if self.cut == cut::NONE {
                self.end(cut::OUTPUT);
            }
        }
        true
    }

    /// The first process is gone: so is all that it left, and what it wrote is all there is.
    fn finish(&mut self) -> Result<()> {
        self.waiting.kill_programs();
        while let Some(gone) = self.waiting.next_end() {
            self.reaped(gone);
        }
        sys::set_nonblocking(&*self.link, false)?;
        for i in 0..2 {
            while self.open[i] && self.capture(i) {
                self.link.send(&self.queued)?;
                self.queued.clear();
            }
        }
        self.link.send(&self.queued)?;
        self.queued.clear();
        // The rest of standard input is still on its way.
        self.frames();
        while !self.stdin_ended {
            self.stdin = None;
            self.link.fill()?;
            self.frames();
        }
        Ok(())
    }

    fn report(&self, counted: &CgroupEvents) -> Vec<u8> {
        let status = self.status.unwrap_or(0);
        let signal = status & 0x7f;
        let (how, value) = if signal == 0 {
            (0, status >> 8 & 0xff)
        } else {
            (1, signal)
        };
        let (bytes, files) = files::count();
        let mut put = Put::of(tell::ENDED)
            .byte(how)
            .number(value as u64)
            .byte(self.cut)
            .byte(u8::from(self.truncated));
        for number in [
            self.cpu_us,
            self.max_rss_kib,
            self.read[0],
            self.read[1],
            bytes,
            files,
            counted.oom_kills,
            counted.process_refusals,
            counted.peak_memory_bytes,
        ] {
            put = put.number(number);
        }
        put.frame()
    }
}
