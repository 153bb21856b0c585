//! The spawner: a process with one thread that builds sandboxes. Forking it is cheap and safe,
//! which forking the program that uses it, with its gigabytes and threads, is not.
//!
//! It lives in a separate PID namespace and mount namespace: when it dies, for whatever reason, the kernel
//! kills every sandbox and frees every mount.
//!
//! | part | what it has |
//! |---|---|
//! | `host` | facts of the host that do not change: control groups, filters, root of programs |
//! | `live`, `create`, `exec`, `exit` | a sandbox, how it is made, what runs in it, how that ends |
//! | `init`, `launch`, `zygote`, `forks` | processes of sandboxes, and the interpreter that is forked |
//! | `children`, `notices`, `cpu`, `warming` | what is waited for: ends, reports, CPU time, pauses |
//! | `files`, `stores`, `openat2`, `tree`, `archiver` | files, snapshots and archives |
//!
//! Invariants: no call here waits for a program, a reader or a disk; a long task is a child (`archiver`);
//! every request is answered once, by [`Reply::Done`] or [`Reply::Ended`].

mod archiver;
mod children;
mod cpu;
mod create;
mod exec;
mod exit;
mod files;
mod forks;
mod host;
mod init;
mod launch;
mod live;
mod network;
mod notices;
mod openat2;
mod pending_exec;
mod protections;
mod root;
mod stores;
mod tree;
mod users;
mod warming;
mod zygote;

pub use network::loopback_up;
pub use protections::TCP_MEMORY;
pub use root::ETC_FILES;

use self::archiver::Archiver;
use self::children::Children;
use self::host::{Host, Privilege, become_root_of_namespace, isolate};
use self::live::{Live, MAX_DEFERRED, NO_SANDBOX};
use self::notices::Notices;
use self::stores::Stores;
use self::warming::Warming;
use self::zygote::Zygote;
use crate::cgroup::{Hierarchy, run_tag};
use crate::error::{Error, Result, call};
use crate::protocol::{Config, MAX_PACKET, Numbered, Reply, Request, SpawnerStats, receive, send};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

/// All that a spawner has.
struct Spawner {
    host: Host,
    /// Socket to the program that started it.
    socket: OwnedFd,
    notices: Notices,
    /// `None` where Python programs start by `execve`.
    zygote: Option<Zygote>,
    zygote_starts: u32,
    /// Sandboxes by the numbers that requests give them.
    live: HashMap<u64, Live>,
    children: Children,
    /// Times at which the CPU time of executions is read.
    cpu_looks: BTreeSet<(Instant, u64)>,
    stores: Stores,
    /// Forks that read and write archives, by the descriptor of each.
    archivers: HashMap<RawFd, Archiver>,
    warming: Warming,
    /// The last program that was started in any sandbox is of Python. A fork of the interpreter that no
    /// program uses takes as long as a small program.
    python_last: bool,
}

/// Runs as a spawner with this [`Config`] in JSON; the socket to the program that started it is standard
/// input. The exit code.
#[must_use]
pub fn main(config: &str) -> i32 {
    let Ok(config) = serde_json::from_str(config) else {
        return 2;
    };
    // SAFETY: descriptor 0 is the socket that this process was given; it is duplicated, not owned.
    let stdin = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
    enter(&config, stdin).unwrap_or_else(|why| {
        let reason = why.to_string();
        let _ = send(stdin, &Reply::Unavailable { reason }, &[]);
        1
    })
}

/// The timeout that ends first.
fn sooner(a: PollTimeout, b: PollTimeout) -> PollTimeout {
    if a == PollTimeout::NONE || (b != PollTimeout::NONE && b < a) {
        b
    } else {
        a
    }
}

/// New mount and PID namespaces, in a user namespace where this is not root; the spawner proper is the
/// first process of the last, and this one waits for it.
fn enter(config: &Config, socket: std::os::fd::BorrowedFd<'_>) -> Result<i32> {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork, geteuid};
    let tag = run_tag(std::process::id());
    if !geteuid().is_root() {
        become_root_of_namespace()?;
    }
    let may = Privilege::of_this_process();
    let hierarchy = Hierarchy::probe("sinew-");
    isolate()?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }.map_err(call("fork"))? {
        ForkResult::Parent { child } => {
            let status = waitpid(child, None);
            Ok(i32::from(!matches!(status, Ok(WaitStatus::Exited(_, 0)))))
        }
        ForkResult::Child => {
            // SAFETY: option with one integer argument.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            let socket = socket.try_clone_to_owned().map_err(call("dup"))?;
            let host = Host::probe(config, hierarchy, may, tag)?;
            let (spawner, degradations) = Spawner::prepare(config, host, socket)?;
            Ok(spawner.serve(degradations))
        }
    }
}

impl Spawner {
    /// Builds the spawner, with a zygote if one is wanted. Also returns the parts that start more slowly than
    /// they could, with the reasons.
    fn prepare(config: &Config, host: Host, socket: OwnedFd) -> Result<(Self, Vec<String>)> {
        let stores = Stores::new(host.own_users.is_ok());
        let mut spawner = Self {
            host,
            socket,
            notices: Notices::new()?,
            zygote: None,
            zygote_starts: 0,
            live: HashMap::new(),
            children: Children::new()?,
            cpu_looks: BTreeSet::new(),
            stores,
            archivers: HashMap::new(),
            warming: Warming::default(),
            python_last: true,
        };
        let zygote = match config.zygote {
            _ if config.python.is_none() => Ok(()),
            true => spawner.await_zygote(),
            false => Err(Error::Unavailable("the zygote is turned off".into())),
        };
        let slow = |why| format!("each Python program starts an interpreter: {why}");
        Ok((spawner, zygote.err().map(slow).into_iter().collect()))
    }

    /// Serves requests until the program that started it is gone. The exit code.
    fn serve(mut self, degradations: Vec<String>) -> i32 {
        let hello = Reply::Hello {
            protections: self.host.protections(),
            degradations,
        };
        self.reply(&hello, &[]);
        let mut buffer = vec![0; MAX_PACKET + 1];
        loop {
            let timeout = sooner(self.warm_due(), sooner(self.cpu_due(), self.zygote_due()));
            let mut fds = [
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.children.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.notices.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, timeout) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return 1,
                Ok(_) => {}
            }
            let ready = fds.map(|f| f.any().unwrap_or(true));
            if ready[2] {
                self.read_notices();
            }
            if ready[1] {
                self.reap();
            }
            if ready[0] {
                match receive::<Numbered>(self.socket.as_fd(), &mut buffer) {
                    Ok(Some((message, files))) => self.handle(message, files),
                    // It is gone: leaving ends the PID namespace and all in it.
                    Ok(None) => {
                        self.remove_groups();
                        return 0;
                    }
                    Err(_) => {}
                }
            }
        }
    }

    fn reply(&self, reply: &Reply, fds: &[RawFd]) {
        let _ = send(self.socket.as_fd(), reply, fds);
    }

    /// Answers a request that brings nothing back.
    fn done(&self, seq: u64, result: Result<()>) {
        let done = Reply::Done {
            seq,
            error: result.err().map(|why| why.to_string()),
            stats: None,
            held: Vec::new(),
        };
        self.reply(&done, &[]);
    }

    /// Carries a request out, or keeps it while the files of its sandbox are being copied.
    fn handle(&mut self, message: Numbered, files: Vec<OwnedFd>) {
        let seq = message.seq;
        let waits = message.request.waits_for();
        let copying = waits.and_then(|id| self.live.get_mut(&id));
        let copying = copying.filter(|l| l.copying && l.deferred.len() < MAX_DEFERRED);
        if let Some(live) = copying {
            live.deferred.push((message, files));
            return;
        }
        let mut answer = None;
        let mut stats = None;
        let result = match message.request {
            Request::Create { id, creation } => self.create(id, creation),
            // Answered when all of it is gone.
            Request::Destroy { id } => return self.destroy(id, seq),
            // Answered by its end.
            Request::Exec { id, start, env } => {
                if let Err(why) = self.exec(id, (seq, start), env, files) {
                    self.refuse(seq, why.to_string());
                }
                return;
            }
            Request::Kill { id } => {
                self.kill(id);
                Ok(())
            }
            Request::Reset { id } => self.reset(id),
            Request::WriteFile { id, path } => self.idle(id).and_then(|live| {
                let content = files.into_iter().next();
                let content = content.ok_or(Error::Files {
                    got: 0,
                    expected: 1,
                })?;
                live.files()?.write_file(&path, content)
            }),
            Request::ReadFile {
                id,
                path,
                max_bytes,
            } => self
                .idle(id)
                .and_then(|live| live.files()?.read_file(&path, max_bytes))
                .map(|fd| answer = Some(fd)),
            Request::Listen { id, port } => self.listen(id, port).map(|fd| answer = Some(fd)),
            Request::Stats { id } => self.stats(id).map(|s| stats = Some(s)),
            archives @ (Request::Snapshot { .. }
            | Request::DropSnapshot { .. }
            | Request::Export { .. }
            | Request::Import { .. }) => return self.archives(seq, archives, files),
        };
        let raw: Vec<RawFd> = answer.iter().map(AsRawFd::as_raw_fd).collect();
        let done = Reply::Done {
            seq,
            error: result.err().map(|why| why.to_string()),
            stats,
            held: Vec::new(),
        };
        self.reply(&done, &raw);
    }

    /// A sandbox in which nothing runs.
    fn idle(&mut self, id: u64) -> Result<&mut Live> {
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        if live.busy() {
            Err(Error::Busy)
        } else {
            Ok(live)
        }
    }

    fn stats(&self, id: u64) -> Result<SpawnerStats> {
        let live = self.live.get(&id).ok_or(NO_SANDBOX)?;
        let files = live.files()?;
        let (file_bytes, file_count) = files.usage();
        Ok(SpawnerStats {
            memory_bytes: live.group.memory_bytes().unwrap_or(0),
            processes: live.group.processes().unwrap_or(0),
            file_bytes,
            file_count,
            layers: files.layer_count(),
        })
    }
}
