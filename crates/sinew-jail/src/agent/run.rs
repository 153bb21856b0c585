//! Executions: input, output and end of a program. One runs at a time.
//!
//! The agent waits for the program, the host and the deadline at once; neither a full pipe nor a host that
//! takes nothing stops it. An execution is over when nothing of it is left.
//!
//! Input is taken from the host only while less than 64 KiB of it waits for the program, and output is
//! read from the program only while less than 256 KiB of it waits for the host: memory of the agent is
//! bounded on both sides. Output beyond the limit of the request is read and dropped, and the program is
//! killed.

use super::files;
use super::group;
use super::link::Link;
use super::program::{CPU, Child, Setup, at, texts};
use super::sys::{self, POLLHUP, POLLIN, POLLOUT, PollFd};
use super::waiting::Waiting;
use super::who;
use crate::cgroup::CgroupEvents;
use crate::python;
use crate::walls::{EXECVE, Failure, PROGRAM};
use crate::wire::{CHUNK, Put, Take, ask, content, cut, tell};
use nix::sys::signalfd::SignalFd;
use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Frames on their way to the host; with more, programs are held back.
const MAX_QUEUED: usize = 256 << 10;
/// Standard input that waits for the program.
const MAX_STDIN: usize = 64 << 10;

/// EXEC as it was asked.
struct Request {
    python: bool,
    args: Vec<Vec<u8>>,
    env: Vec<Vec<u8>>,
    deadline: Duration,
    output_bytes: u64,
    /// Empty: that of the sandbox.
    user: Vec<u8>,
    /// Empty: that of the sandbox.
    workdir: Vec<u8>,
}

/// Python or not, deadline in milliseconds, bytes of output, arguments (or code), environment, user, folder.
fn parse(bytes: &[u8]) -> Option<Request> {
    let mut take = Take(bytes);
    Some(Request {
        python: take.byte()? == 1,
        deadline: Duration::from_millis(take.number()?),
        output_bytes: take.number()?,
        args: take.list()?,
        env: take.list()?,
        user: take.bytes()?.to_vec(),
        workdir: take.bytes()?.to_vec(),
    })
}

/// One running execution: from the start of the program until nothing of it is left.
struct Running<'a> {
    link: &'a mut Link,
    waiting: &'a mut Waiting,
    child: Child,
    /// None once nothing reads it any more or all was written.
    stdin: Option<OwnedFd>,
    /// Input that came and is not written yet.
    stdin_waits: Vec<u8>,
    /// Whether END came: nothing more is to be fed.
    stdin_ended: bool,
    /// Whether standard output and error can still bring something.
    open: [bool; 2],
    /// Bytes that were read of each, those beyond the limit included.
    read: [u64; 2],
    /// Bytes of each that are passed on.
    most: u64,
    truncated: bool,
    /// Frames that are not sent yet.
    queued: Vec<u8>,
    /// Reason why the agent ended it, one of [`cut`].
    cut: u8,
    /// User and system time of everything that was reaped.
    cpu_us: u64,
    max_rss_kib: u64,
    /// Wait status of the program; `None` as long as it runs.
    status: Option<i32>,
    /// Whether programs can write everywhere.
    writable: bool,
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
    // Processes of an earlier program may have ended late.
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
        writable: setup.root.is_some(),
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

/// Passes Python code to the waiting interpreter, or otherwise starts the program.
fn start(
    setup: &Setup,
    waiting: &mut Waiting,
    request: &Request,
) -> std::result::Result<Child, Failure> {
    let failed = at(PROGRAM);
    let place = setup.place(&request.user, &request.workdir)?;
    let mut env = who::merged(&setup.env, &request.env);
    if let Some(home) = &place.home
        && !env.iter().any(|variable| variable.starts_with(b"HOME="))
    {
        env.push([b"HOME=", home.as_slice()].concat());
    }
    if request.python {
        let code = request.args.first().map(Vec::as_slice).unwrap_or_default();
        let cpu = setup.walls.limits.iter().find(|l| l[0] == CPU);
        if let Some(mut child) = waiting.take()
            && child.give(cpu.map_or(0, |l| l[1]), &env, code)
        {
            return Ok(child);
        }
        if setup.python.is_empty() {
            return Err((EXECVE, 2));
        }
        let argv = python::command(&setup.python, code).map_err(|e| failed(e.into()))?;
        return setup.start(&place, &argv, &texts(&env).map_err(&failed)?, false);
    }
    waiting.make_room();
    let argv = texts(&request.args).map_err(&failed)?;
    if argv.is_empty() {
        return Err((PROGRAM, 22));
    }
    setup.start(&place, &argv, &texts(&env).map_err(&failed)?, false)
}

/// Reads the counts of a machine's group; a container's is counted outside.
fn counters(machine: bool) -> CgroupEvents {
    if machine {
        group::counters()
    } else {
        CgroupEvents::default()
    }
}

impl Running<'_> {
    /// Waits until something happens and handles it. It never waits only for the host, or only for the
    /// program: a full pipe on one side never holds up the deadline or the other side.
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

    /// Kills everything that runs; its end comes as any other.
    fn end(&mut self, why: u8) {
        self.cut = why;
        self.waiting.kill_programs();
    }

    /// Counts a process that ended: all of them count for the time, the first one gives the status.
    fn reaped(&mut self, gone: sys::ReapedChild) {
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

    /// Takes requests that belong to an execution; others are dropped, as the host sends none meanwhile.
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

    /// Writes what input the pipe takes, and closes it after the last byte.
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

    /// Reads one piece of output; true if there may be more. Output beyond the bound is still read, so that a
    /// full pipe does not look like a program that hangs.
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

    /// The ENDED frame: how it ended, what cut it, and what was counted, in the order of `Ended` in
    /// sinew-sandbox.
    fn report(&self, counted: &CgroupEvents) -> Vec<u8> {
        let status = self.status.unwrap_or(0);
        let signal = status & 0x7f;
        let (how, value) = if signal == 0 {
            (0, status >> 8 & 0xff)
        } else {
            (1, signal)
        };
        let (bytes, files) = files::count(self.writable);
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
