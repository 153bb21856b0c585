//! The spawner: a process with one thread that builds sandboxes. Forking it is cheap and safe,
//! which forking the host, with its gigabytes and threads, is not.
//!
//! It lives in a PID and a mount namespace of its own: when it dies, for whatever reason, the
//! kernel kills every sandbox and frees every mount. What it does for each sandbox is in
//! `live.rs`.

mod archiver;
mod children;
mod cpu;
mod ends;
mod files;
mod init;
mod launch;
mod live;
mod protections;
mod root;
mod tree;
mod users;
mod zygote;

pub use init::loopback_up;
pub use protections::TCP_MEMORY;
pub use root::ETC_FILES;

use self::archiver::Archiver;
use self::children::{Children, Role};
use self::files::{Layer, Mounting, Users};
use self::live::Live;
use self::zygote::{START as ZYGOTE_START, Zygote};
use crate::cgroup::{Hierarchy, run_tag};
use crate::protocol::{
    Config, MAX_PACKET, Notice, Numbered, Reply, Request, SpawnerStats, receive, send,
};
use crate::seccomp::{Filter, filter, init_filter};
use crate::walls::{bound, step_name};
use crate::{landlock, mounts};
use nix::fcntl::{OFlag, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::Mode;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Sandboxes that have namespaces and an interpreter waiting, at most; they take about 2.2 MiB each, the
/// kernel's part included. The others get theirs when a program comes.
const MAX_WAITING: usize = 2048;
/// Files of this process that such a sandbox takes, with room for those that have none waiting.
const FILES_WAITING: usize = 12;
/// Requests that wait for one sandbox; a host has one or two under way. More are told that it
/// is busy.
const MAX_DEFERRED: usize = 16;

struct Spawner {
    socket: OwnedFd,
    hierarchy: Hierarchy,
    /// Without and with TCP.
    filters: [Filter; 2],
    init_filter: Filter,
    landlock: Option<landlock::Common>,
    /// Whether every sandbox can have a user of its own, else why not.
    own_users: Result<(), String>,
    /// File systems are mounted nowhere; then this process stands in the root of programs.
    detached: bool,
    mounting: Mounting,
    /// Whether a `/proc` is mounted in the root of programs, as user namespaces need it.
    proc_below: bool,
    tag: String,
    users: Users,
    /// Namespaces of the spawner itself: PID, network.
    own_pid_ns: OwnedFd,
    own_net_ns: OwnedFd,
    /// `/proc` of the host.
    proc: OwnedFd,
    notices: std::io::PipeReader,
    notices_in: OwnedFd,
    /// `/proc` of this process's own PID namespace, where there is one.
    own_proc: Option<OwnedFd>,
    python: Option<String>,
    zygote: Option<Zygote>,
    zygote_starts: u32,
    /// What starts more slowly than it could, and why.
    degradations: Vec<String>,
    live: HashMap<u64, Live>,
    children: Children,
    /// When the CPU time of what runs is looked at.
    cpu_looks: BTreeSet<(Instant, u64)>,
    processors: u64,
    /// Sandboxes that may have namespaces and an interpreter waiting.
    max_waiting: usize,
    /// The highest capability that the kernel has.
    last_capability: i32,
    /// Whether a program gets a user namespace of its own, so that its processes are counted.
    nested_users: bool,
    snapshots: HashMap<u64, Vec<Layer>>,
    /// Forks that read and write archives, by the descriptor of each.
    archivers: HashMap<RawFd, Archiver>,
    /// Sandboxes that are to get new namespaces and a new interpreter, and from when on.
    to_warm: VecDeque<(Instant, u64)>,
    /// Numbers file systems.
    stores: u64,
}

/// Runs as a spawner with this [`Config`] in JSON; the socket to the host is standard input. The exit
/// code.
#[must_use]
pub fn main(config: &str) -> i32 {
    let Ok(config) = serde_json::from_str(config) else {
        return 2;
    };
    // SAFETY: descriptor 0 is the socket that the host gave us; it is duplicated, not owned.
    let stdin = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
    let Ok(socket) = stdin.try_clone_to_owned() else {
        return 2;
    };
    match enter(&config, socket) {
        Ok(code) => code,
        Err((socket, reason)) => {
            let _ = send(socket.as_fd(), &Reply::Unavailable { reason }, &[]);
            1
        }
    }
}

/// The timeout that ends first.
fn sooner(a: PollTimeout, b: PollTimeout) -> PollTimeout {
    if a == PollTimeout::NONE || (b != PollTimeout::NONE && b < a) {
        b
    } else {
        a
    }
}

type Refusal = (OwnedFd, String);

/// New mount and PID namespaces, in a user namespace where this is not root; the spawner proper is the
/// first process of the last.
fn enter(config: &Config, socket: OwnedFd) -> Result<i32, Refusal> {
    let tag = run_tag(std::process::id());
    if !nix::unistd::geteuid().is_root()
        && let Err(reason) = become_root_of_namespace()
    {
        return Err((socket, reason));
    }
    let who = Privilege::of_this_process();
    let hierarchy = Hierarchy::probe("sinew-");
    if let Err(reason) = isolate() {
        return Err((socket, reason));
    }
    // SAFETY: this process has one thread.
    match unsafe { nix::unistd::fork() } {
        Err(e) => Err((socket, format!("fork: {e}"))),
        Ok(nix::unistd::ForkResult::Parent { child }) => {
            drop(socket);
            let status = nix::sys::wait::waitpid(child, None);
            Ok(i32::from(!matches!(
                status,
                Ok(nix::sys::wait::WaitStatus::Exited(_, 0))
            )))
        }
        Ok(nix::unistd::ForkResult::Child) => {
            // SAFETY: option with one integer argument.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            let spare = socket.try_clone().map_err(|e| e.to_string());
            let prepared =
                spare.and_then(|spare| Spawner::prepare(config, spare, hierarchy, (who, tag)));
            Ok(match prepared {
                Ok(spawner) => spawner.serve(),
                Err(reason) => {
                    let _ = send(socket.as_fd(), &Reply::Unavailable { reason }, &[]);
                    1
                }
            })
        }
    }
}

/// What this process may do on the host.
#[derive(Clone, Debug)]
struct Privilege {
    in_user_namespace: bool,
    /// Whether the users of sandboxes can be given to files and processes, else why not.
    own_users: Result<(), String>,
}

impl Privilege {
    fn of_this_process() -> Self {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/gid_map").unwrap_or_default();
        let (first, last) = files::uid_range();
        Self {
            in_user_namespace: !maps(&map, 0, u32::MAX - 1),
            own_users: match maps(&map, first, last) && maps(&groups, first, last) {
                true => Ok(()),
                false => Err(format!(
                    "all sandboxes share one user: the user namespace that Sinew runs in does not \
                     map the ids {first} to {last}; run as root of the host for a user each, or \
                     map them (newuidmap, newgidmap)"
                )),
            },
        }
    }
}

/// Whether one line of a map (`/proc/PID/uid_map`: inside, outside, count) holds these ids.
fn maps(map: &str, first: u32, last: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        let [inside, _, count] = numbers[..] else {
            return false;
        };
        inside <= u64::from(first) && u64::from(last) < inside + count
    })
}

/// Becomes root of a user namespace with one user, and this program again: what a process maps
/// of its program belongs to the namespace in which it was started.
fn become_root_of_namespace() -> Result<(), String> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|e| {
        format!(
            "unshare: {e}; user namespaces are off: run as root, or set \
             kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0"
        )
    })?;
    let write =
        |file: &str, text: String| fs::write(file, text).map_err(|e| format!("{file}: {e}"));
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    let error = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .exec();
    Err(format!("start itself in a user namespace: {error}"))
}

fn isolate() -> Result<(), String> {
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWUTS;
    unshare(flags).map_err(|e| {
        format!(
            "unshare: {e}; namespaces are not permitted here, even to root: a container needs \
             CAP_SYS_ADMIN"
        )
    })?;
    // New UTS namespaces copy the name.
    nix::unistd::sethostname("sandbox").map_err(|e| format!("sethostname: {e}"))
}

fn path_fd(path: &str) -> Result<OwnedFd, String> {
    fs::File::open(path)
        .map(OwnedFd::from)
        .map_err(|e| format!("{path}: {e}"))
}

/// Makes this process fit for many children, and allows it as many files as may be: each live sandbox
/// holds a few. How many sandboxes may have an interpreter waiting.
fn settle_in() -> usize {
    // An ignored signal would let the kernel reap children before anybody looked at them.
    // SAFETY: the default action, no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return MAX_WAITING;
    };
    let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    let hard = usize::try_from(hard).unwrap_or(usize::MAX);
    MAX_WAITING.min(hard / FILES_WAITING)
}

/// Whether a user namespace can be made in this one.
fn can_nest_users() -> bool {
    // SAFETY: one thread; the child makes system calls and ends without destructors.
    match unsafe { nix::unistd::fork() } {
        Ok(nix::unistd::ForkResult::Child) => {
            let made = unshare(CloneFlags::CLONE_NEWUSER).is_ok();
            // SAFETY: see above.
            unsafe { libc::_exit(i32::from(!made)) }
        }
        Ok(nix::unistd::ForkResult::Parent { child }) => matches!(
            nix::sys::wait::waitpid(child, None),
            Ok(nix::sys::wait::WaitStatus::Exited(_, 0))
        ),
        Err(_) => false,
    }
}

/// The root of programs, at its place or as that of this process, with what landlock names in it, and
/// the folder for files that must be mounted.
fn build_root(
    config: &Config,
    who: &Privilege,
) -> Result<(Option<landlock::Common>, Mounting), String> {
    root::build(
        who.in_user_namespace,
        &config.binds,
        &config.shows,
        config.image.as_deref(),
    )?;
    fs::create_dir_all(files::ATTACHED).map_err(|e| format!("{}: {e}", files::ATTACHED))?;
    let landlock = landlock::Common::open(Path::new(init::ROOT))?;
    let mounting = Mounting::probe(config.attached);
    if mounting.detached {
        init::enter_root().map_err(|e| format!("pivot_root: {e}"))?;
    }
    Ok((landlock, mounting))
}

impl Spawner {
    fn prepare(
        config: &Config,
        socket: OwnedFd,
        hierarchy: Hierarchy,
        (who, tag): (Privilege, String),
    ) -> Result<Self, String> {
        let max_waiting = settle_in();
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let (notices, notices_in) = std::io::pipe().map_err(|e| format!("pipe: {e}"))?;
        let (own_pid_ns, own_net_ns) =
            (path_fd("/proc/self/ns/pid")?, path_fd("/proc/self/ns/net")?);
        let proc = path_fd("/proc")?;
        let last_capability = bound()?;
        let (landlock, mounting) = build_root(config, &who)?;
        let detached = mounting.detached;
        let shared_user = who.own_users.is_err() && hierarchy.limits_processes().is_none();
        let mut spawner = Self {
            socket,
            hierarchy,
            filters: [filter(false)?, filter(true)?],
            init_filter: init_filter()?,
            landlock,
            own_users: who.own_users,
            detached,
            mounting,
            proc_below: who.in_user_namespace,
            tag,
            users: Users::default(),
            own_pid_ns,
            own_net_ns,
            proc,
            notices,
            notices_in: notices_in.into(),
            own_proc: mounts::new_proc().ok(),
            python: config.python.clone(),
            zygote: None,
            zygote_starts: 0,
            degradations: Vec::new(),
            live: HashMap::new(),
            children: Children::new()?,
            cpu_looks: BTreeSet::new(),
            processors,
            max_waiting,
            last_capability,
            nested_users: shared_user && can_nest_users(),
            snapshots: HashMap::new(),
            archivers: HashMap::new(),
            to_warm: VecDeque::new(),
            stores: 0,
        };
        let zygote = match config.zygote {
            _ if config.python.is_none() => Ok(()),
            true => spawner.await_zygote(),
            false => Err("the zygote is turned off".into()),
        };
        if let Err(why) = zygote {
            let degradation = format!("each Python program starts an interpreter: {why}");
            spawner.degradations.push(degradation);
        }
        Ok(spawner)
    }

    /// Starts a zygote and waits until it is ready.
    fn await_zygote(&mut self) -> Result<(), String> {
        self.start_zygote()?;
        let timeout = PollTimeout::try_from(ZYGOTE_START).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.notices.as_fd(), PollFlags::POLLIN)];
        let failed = match poll(&mut fds, timeout) {
            Ok(0) => Some("the zygote did not get ready in 10 s".into()),
            Err(e) => Some(format!("poll: {e}")),
            Ok(_) => match self.notice() {
                Some(notice) if notice.kind == Notice::ZYGOTE => None,
                Some(n) => Some(format!(
                    "the zygote cannot {}: {}",
                    step_name(n.value as u32),
                    std::io::Error::from_raw_os_error(n.errno)
                )),
                None => Some("the zygote said nothing".into()),
            },
        };
        match failed {
            None => {
                if let Some(zygote) = &mut self.zygote {
                    zygote.set_ready();
                }
                Ok(())
            }
            Some(why) => {
                self.stop_zygote();
                Err(why)
            }
        }
    }

    fn start_zygote(&mut self) -> Result<(), String> {
        let python = self.python.as_deref().ok_or("the image has no python3")?;
        let notices = self.notices_in.as_raw_fd();
        let zygote = Zygote::start(python, notices, self.detached)?;
        self.zygote_starts += 1;
        self.children.watch(&zygote.child, Role::Zygote)?;
        self.zygote = Some(zygote);
        Ok(())
    }

    fn stop_zygote(&mut self) {
        if let Some(zygote) = self.zygote.take() {
            zygote.child.kill();
        }
    }

    /// Ends a zygote that does not answer; the time until the next answer is due.
    fn zygote_due(&mut self) -> PollTimeout {
        let Some(due) = self.zygote.as_ref().and_then(Zygote::due) else {
            return PollTimeout::NONE;
        };
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // What it said counts, however late.
            self.read_notices();
            if self.zygote.as_ref().and_then(Zygote::due) == Some(due)
                && let Some(zygote) = &self.zygote
            {
                zygote.child.kill();
            }
            return PollTimeout::from(100u8);
        }
        PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
    }

    fn notice(&mut self) -> Option<Notice> {
        let mut bytes = [0; Notice::BYTES];
        self.notices.read_exact(&mut bytes).ok()?;
        Some(Notice::decode(&bytes))
    }

    /// Takes what children have said already.
    fn read_notices(&mut self) {
        loop {
            let mut fds = [PollFd::new(self.notices.as_fd(), PollFlags::POLLIN)];
            if !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1)) {
                return;
            }
            match self.notice() {
                Some(notice) => self.noticed(notice),
                None => return,
            }
        }
    }

    fn serve(mut self) -> i32 {
        let hello = Reply::Hello {
            protections: self.protections(),
            degradations: self.degradations.clone(),
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
                    // The host is gone: leaving ends the PID namespace and all in it.
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

    fn done(&self, seq: u64, result: Result<(), String>) {
        let done = Reply::Done {
            seq,
            error: result.err(),
            stats: None,
            held: Vec::new(),
        };
        self.reply(&done, &[]);
    }

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
                    self.refuse(seq, why);
                }
                return;
            }
            Request::Kill { id } => {
                self.kill(id);
                Ok(())
            }
            Request::Reset { id } => self.reset(id),
            Request::WriteFile { id, path } => self.idle(id).and_then(|live| {
                let content = files.into_iter().next().ok_or("no content")?;
                let files = live.files.as_ref().ok_or("no such sandbox")?;
                files.write_file(&path, content)
            }),
            Request::ReadFile {
                id,
                path,
                max_bytes,
            } => self
                .idle(id)
                .and_then(|live| {
                    let files = live.files.as_ref().ok_or("no such sandbox")?;
                    files.read_file(&path, max_bytes)
                })
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
            error: result.err(),
            stats,
            held: Vec::new(),
        };
        self.reply(&done, &raw);
    }

    /// A user id that no other sandbox has, where there are such.
    fn new_user(&self) -> Result<Option<Rc<files::User>>, String> {
        let own = self.own_users.is_ok();
        own.then(|| self.users.take()).transpose()
    }

    /// A sandbox in which nothing runs.
    fn idle(&mut self, id: u64) -> Result<&mut Live, String> {
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        match live.busy() {
            true => Err("something runs in it".into()),
            false => Ok(live),
        }
    }

    fn stats(&self, id: u64) -> Result<SpawnerStats, String> {
        let live = self.live.get(&id).ok_or("no such sandbox")?;
        let files = live.files.as_ref().ok_or("no such sandbox")?;
        let (file_bytes, file_count) = files.usage();
        Ok(SpawnerStats {
            memory_bytes: live.group.memory_bytes().unwrap_or(0),
            processes: live.group.processes().unwrap_or(0),
            file_bytes,
            file_count,
            layers: files.layer_count(),
        })
    }

    /// The network namespace of this process now.
    fn net_ns(&self) -> Result<OwnedFd, String> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        openat(self.proc.as_fd(), "self/ns/net", flags, Mode::empty())
            .map_err(|e| format!("/proc/self/ns/net: {e}"))
    }
}
