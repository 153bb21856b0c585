//! The agent: the first process of a container or of a virtual machine.
//!
//! It takes requests from the host over one connection, runs programs inside the walls that the host
//! describes, reads and writes files below `/work` (with a writable root, anywhere), and ends when the
//! connection ends. It must be the first process of its PID namespace: it ends executions by killing
//! everything else in there.
//!
//! Outside of any sandbox, the command `without-mount PATH PROGRAM ARGS` makes it a program that does not see
//! the mount at PATH, and `with-layer PLAN PROGRAM ARGS` one that sees a writable root (`crate::layer`).
//!
//! Requests are answered one at a time, in the order in which they come. A frame that is too long, or
//! that does not belong, is a defect of the host, which is trusted: the agent ends, and the kernel ends
//! everything in its PID namespace. The host treats the agent as hostile in turn, since a program could
//! have taken it over.
//!
//! | part | what it does |
//! |---|---|
//! | `link` | frames in and out |
//! | `program`, `waiting` | starts programs inside walls; keeps an interpreter ready |
//! | `run` | one execution: input, output, deadline, end |
//! | `files` | content of `/work` in and out, as the programs' user; of any path with a writable root |
//! | `setup`, `who` | the first request; users of a writable root |
//! | `group`, `sys` | control groups of a machine; system calls |

mod files;
mod group;
mod link;
mod program;
mod run;
mod setup;
mod sys;
mod waiting;
mod who;

use crate::landlock::{self, Writable};
use crate::layer::{self, LayerPlan};
use crate::seccomp::Filter;
use crate::wire::{Put, Take, VERSION, ask, tell};
use link::Link;
use nix::fcntl::OFlag;
use nix::mount::MsFlags;
use nix::sys::signalfd::SignalFd;
use nix::sys::stat::Mode;
use program::{Root, Setup, Walls};
use setup::SetupRequest;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use sys::{POLLIN, PollFd};
use waiting::Waiting;

/// Ends the agent, and with it everything in its PID namespace.
fn leave(code: i32) -> ! {
    // SAFETY: ends this process; nothing is left to be written.
    unsafe { libc::_exit(code) }
}

/// Runs as an agent with these arguments; the exit code.
#[must_use]
pub fn main(args: &[OsString]) -> i32 {
    if let [mode, path, program @ ..] = args
        && mode == "without-mount"
    {
        let path = path.to_string_lossy();
        eprintln!("agent: {}", sys::without_mount(&path, program));
        return 126;
    }
    if let [mode, plan, program @ ..] = args
        && mode == "with-layer"
    {
        eprintln!("agent: {}", with_layer(plan, program));
        return 126;
    }
    if std::process::id() != 1 {
        eprintln!("the agent must be the first process of a PID namespace");
        return 64;
    }
    let connected = match args.iter().map(|a| a.as_bytes()).collect::<Vec<_>>()[..] {
        [b"connect", _] => {
            UnixStream::connect(&args[1]).map(|s| (File::from(OwnedFd::from(s)), false))
        }
        [b"machine", _] => machine(&args[1]).map(|file| (file, true)),
        _ => Err(Error::other(
            "usage: agent connect SOCKET | agent machine PORT",
        )),
    };
    let served = connected.and_then(|(file, machine)| {
        sys::ignore_broken_pipes()?;
        Agent::new(Link::new(file, machine), machine)?.serve()
    });
    if let Err(e) = served {
        eprintln!("agent: {e}");
    }
    1
}

/// Becomes a program in a mount namespace with a writable layer; returns the reason if it could not.
fn with_layer(plan: &std::ffi::OsStr, program: &[OsString]) -> String {
    let made = serde_json::from_slice::<LayerPlan>(plan.as_bytes())
        .map_err(crate::Error::from)
        .and_then(|plan| layer::enter(&plan));
    match made {
        Ok(()) => sys::run_instead(program).to_string(),
        Err(e) => e.to_string(),
    }
}

/// Makes a bare kernel a place for programs, and opens the port to the host.
fn machine(port: &std::ffi::OsStr) -> Result<File> {
    let device = sys::SAFE.difference(MsFlags::MS_NODEV);
    sys::mount_new("proc", c"/proc", sys::SAFE, "hidepid=invisible")?;
    // The kernel may have done so.
    let _ = sys::mount_new("devtmpfs", c"/dev", device, "");
    let opened = loop {
        match File::options().read(true).write(true).open(port) {
            Err(e) if matches!(e.raw_os_error(), Some(2 | 6 | 16 | 19)) => {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            other => break other?,
        }
    };
    sys::mount_new("tmpfs", c"/dev", device, "size=64k,mode=0755")?;
    sys::make_devices()?;
    Ok(opened)
}

/// The state between two requests.
struct Agent {
    link: Link,
    /// Readable when a child has ended; SIGCHLD itself is blocked.
    children: SignalFd,
    setup: Setup,
    waiting: Waiting,
    /// Whether the folders of a machine are mounted.
    mounted: bool,
    /// First failure of PUT since the last SYNC.
    put: Result<()>,
    /// Folder that PLACE opened since the last SYNC; `None`: the work folder.
    base: Option<files::Base>,
}

impl Agent {
    fn new(mut link: Link, machine: bool) -> Result<Self> {
        let hello = Put::of(tell::HELLO)
            .number(VERSION.into())
            .number(landlock::abi() as u64);
        link.send(&hello.frame())?;
        Ok(Self {
            link,
            children: sys::children()?,
            setup: Setup {
                machine,
                ..Setup::default()
            },
            waiting: Waiting::default(),
            mounted: false,
            put: Ok(()),
            base: None,
        })
    }

    /// Answers requests until the connection fails, which is an error, or ends, which ends the process.
    fn serve(mut self) -> Result<()> {
        loop {
            let frame = match self.link.ready() {
                Some(frame) => frame,
                None => {
                    self.rest()?;
                    continue;
                }
            };
            self.answer(frame)?;
        }
    }

    /// Waits for the host; when it asks for nothing, makes an interpreter ready first.
    fn rest(&mut self) -> Result<()> {
        let wants = self.waiting.wants(&self.setup);
        let poll = |fd: i32| PollFd {
            fd,
            events: POLLIN,
            revents: 0,
        };
        let mut fds = [
            poll(self.link.fd()),
            poll(self.children.as_fd().as_raw_fd()),
            poll(self.waiting.fd()),
        ];
        sys::wait_for(&mut fds, if wants { 0 } else { -1 })?;
        let said = fds.map(|fd| fd.revents != 0);
        if said[0] {
            return self.link.fill();
        }
        if said[1] {
            while matches!(self.children.read_signal(), Ok(Some(_))) {}
            while let Some(gone) = sys::reap(false) {
                self.waiting.lost(gone.pid);
            }
            if self.waiting.settle() {
                // Nobody killed it: programs start cold.
                self.setup.warm = false;
            }
        } else if said[2] {
            self.setup.warm = self.waiting.hear();
        } else if wants {
            self.setup.warm = self.waiting.make(&self.setup);
        }
        Ok(())
    }

    /// Answers one request with DONE or FAILED; EXEC answers for itself, PUT is answered by the next SYNC.
    fn answer(&mut self, (kind, bytes): link::Frame) -> Result<()> {
        let done: Result<Vec<u64>> = match kind {
            ask::SETUP => self.set_up(&bytes).map(|()| Vec::new()),
            ask::EXEC => {
                let (link, waiting) = (&mut self.link, &mut self.waiting);
                return run::exec(link, &self.setup, waiting, &self.children, &bytes);
            }
            ask::PUT => {
                let base = self.base.take();
                let put = self.as_user(|link| files::put(link, base.as_ref(), &bytes));
                self.base = base;
                self.keep_first(put);
                return Ok(());
            }
            ask::PLACE => {
                // Without a folder to go to, nothing of what follows is made.
                self.base = match self.open_place(&bytes) {
                    Ok(base) => Some(base),
                    Err(e) => {
                        self.keep_first(Err(e));
                        Some(files::Base::nowhere())
                    }
                };
                return Ok(());
            }
            ask::SYNC => {
                self.base = None;
                std::mem::replace(&mut self.put, Ok(())).map(|()| Vec::new())
            }
            ask::FETCH => self.fetch(&bytes),
            ask::READ => self
                .as_user(|link| files::read(link, &bytes))
                .map(|()| Vec::new()),
            ask::ARCHIVE => self
                .as_user(|link| files::archive(link, &bytes))
                .map(|()| Vec::new()),
            ask::RESET => {
                self.waiting.clear();
                self.as_user(|_| files::reset()).map(|()| Vec::new())
            }
            ask::STATS => {
                let (bytes, count) = files::count(self.setup.root.is_some());
                Ok(vec![bytes, count, processes()])
            }
            ask::RESUME => self.resume(&bytes).map(|()| Vec::new()),
            // Left over from an execution that was called off.
            ask::KILL | ask::DATA | ask::END => return Ok(()),
            _ => Err(Error::from_raw_os_error(71)),
        };
        let frame = match done {
            Ok(numbers) => numbers.into_iter().fold(Put::of(tell::DONE), Put::number),
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(0);
                let text = e.to_string();
                Put::of(tell::FAILED)
                    .number(u64::MAX)
                    .number(errno as u64)
                    .bytes(text.as_bytes())
            }
        };
        self.link.send(&frame.frame())
    }

    /// Remembers the first failure for SYNC.
    fn keep_first(&mut self, put: Result<()>) {
        if self.put.is_ok() {
            self.put = put;
        }
    }

    /// Acts with the file rights of the programs' user: a file that the user may not open is not read for
    /// the host either, and what is made belongs to the user. Links planted in `/work` gain nothing.
    fn as_user(&mut self, act: impl FnOnce(&mut Link) -> Result<()>) -> Result<()> {
        sys::act_as(self.setup.walls.user);
        let done = act(&mut self.link);
        sys::act_as(0);
        done
    }

    /// SETUP: user, interpreter, filter, environment and limits of all programs after it. An interpreter
    /// that waits has the walls of the last SETUP, so it is ended first.
    fn set_up(&mut self, bytes: &[u8]) -> Result<()> {
        let asked = SetupRequest::parse(bytes).ok_or_else(|| Error::from_raw_os_error(71))?;
        self.waiting.clear();
        let (machine, writable) = (self.setup.machine, asked.root.is_some());
        if machine {
            self.mount_folders(&asked)?;
        }
        if writable {
            files::make_folders()?;
        }
        let common = landlock::Common::open(Path::new("/")).map_err(Error::other)?;
        // The folders are opened without reading: they belong to the user, and root has no right to pass
        // modes here.
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = |path| nix::fcntl::open(path, flags, Mode::empty());
        let folders = (folder(files::WORK)?, folder(files::TMP)?);
        let write = if writable {
            Writable::Everything
        } else {
            Writable::Folders
        };
        let ruleset =
            |common: landlock::Common| common.ruleset(&folders.0, &folders.1, asked.tcp, write);
        let landlock = common.map(ruleset).transpose().map_err(Error::other)?;
        let user = if writable { 0 } else { asked.user };
        let walls = Walls {
            user,
            limits: asked.limits,
            filter: Filter {
                instructions: (asked.filter.len() / 8) as u16,
                bytes: asked.filter,
            },
            landlock,
            group: machine,
            open: machine && user == 0,
        };
        self.setup = Setup {
            walls,
            env: asked.env,
            python: asked.python,
            warm: asked.warm,
            machine,
            root: asked.root.map(|(user, workdir)| Root::new(user, workdir)),
        };
        Ok(())
    }

    /// Mounts the folders of a machine, or mounts them again with other sizes, and bounds its programs.
    fn mount_folders(&mut self, asked: &SetupRequest) -> Result<()> {
        if let Some([_, memory_bytes, processes]) = asked.together {
            group::limit(memory_bytes, processes)?;
        }
        let (size, inodes, user) = (asked.work_bytes, asked.inodes, asked.user);
        let options = format!("size={size},nr_inodes={inodes},mode=0700,uid={user},gid={user}");
        let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        flags.set(MsFlags::MS_REMOUNT, self.mounted);
        for path in [files::WORK, files::TMP] {
            sys::mount_new("tmpfs", path, flags, &options)?;
        }
        self.mounted = true;
        Ok(())
    }

    /// PLACE: the folder below which the next files go, as root of the sandbox.
    fn open_place(&mut self, bytes: &[u8]) -> Result<files::Base> {
        let wrong = || Error::from_raw_os_error(71);
        let mut take = Take(bytes);
        let path = take.bytes().ok_or_else(wrong)?;
        let replace = take.byte().ok_or_else(wrong)? == 1;
        let user = take.bytes().ok_or_else(wrong)?;
        if self.setup.root.is_none() {
            return Err(Error::from_raw_os_error(libc::EPERM));
        }
        let owner = match user {
            b"" => (0, 0),
            user => {
                let found = who::user(user)?;
                (found.user, found.group)
            }
        };
        files::place(path, owner, replace)
    }

    /// FETCH: sends what is at a path of a writable root; whether there is something.
    fn fetch(&mut self, bytes: &[u8]) -> Result<Vec<u64>> {
        if self.setup.root.is_none() {
            return Err(Error::from_raw_os_error(libc::EPERM));
        }
        let there = files::fetch(&mut self.link, bytes)?;
        Ok(vec![u64::from(there)])
    }

    /// Sets clock, random numbers and name after the machine was restored from a snapshot: two copies of one
    /// memory must not share them.
    fn resume(&mut self, bytes: &[u8]) -> Result<()> {
        let wrong = || Error::from_raw_os_error(71);
        let mut take = Take(bytes);
        let ns = take.number().ok_or_else(wrong)?;
        let entropy = take.bytes().ok_or_else(wrong)?;
        let name = take.bytes().ok_or_else(wrong)?;
        // An interpreter that waits may stay: it takes new random numbers with its program.
        sys::set_clock_and_name(ns, name)?;
        let random = File::open("/dev/random")?;
        sys::reseed(random.as_raw_fd(), entropy)
    }
}

/// Processes in this PID namespace, as `/proc` lists them.
fn processes() -> u64 {
    let number = |name: std::ffi::OsString| name.as_bytes().iter().all(u8::is_ascii_digit);
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    // The agent itself does not count.
    (entries.filter(|e| number(e.file_name())).count() as u64).saturating_sub(1)
}
