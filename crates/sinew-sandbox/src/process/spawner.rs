//! The spawner: a process with one thread that builds sandboxes. Forking it is cheap and safe,
//! which forking the host, with its gigabytes and threads, is not.
//!
//! It lives in a PID and a mount namespace of its own: when it dies, for whatever reason, the
//! kernel kills every sandbox and frees every mount.

use super::cgroup::{Group, Hierarchy};
use super::jail::{BASE, Jail, ROOT, c_strings};
use super::messages::{MAX_PACKET, Numbered, Reply, Request, receive, send};
use super::{landlock, root, seccomp};
use crate::port::{Limits, Protection};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use seccompiler::BpfProgram;
use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// Hidden first argument of a process that is to be a spawner; the second is a [`Config`].
pub(crate) const FLAG: &str = "--sinew-sandbox-spawner";

/// First user id of sandboxes; each live one has its own, so that none can touch another.
const FIRST_UID: u32 = 200_000;
const UIDS: u64 = 60_000;
/// Files that one sandbox may make.
const MAX_INODES: u64 = 4096;

/// What the host tells the spawner at start.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Config {
    /// Folders to show inside at the same path, beside `/usr` and its like.
    pub(crate) binds: Vec<PathBuf>,
}

struct Live {
    limits: Limits,
    group: Group,
    uid: Option<u32>,
    running: Option<i32>,
    dying: bool,
}

struct Spawner {
    socket: OwnedFd,
    hierarchy: Hierarchy,
    seccomp: [BpfProgram; 2],
    landlock: bool,
    /// Whether every sandbox can have a user of its own.
    own_users: bool,
    host_pid: u32,
    live: HashMap<u64, Live>,
}

/// Runs as a spawner if the arguments say so; the socket is standard input.
pub(crate) fn main_if_requested() -> Option<i32> {
    let mut args = std::env::args().skip(1);
    if args.next()? != FLAG {
        return None;
    }
    let config = serde_json::from_str(&args.next()?).ok()?;
    // SAFETY: descriptor 0 is the socket that the host gave us; it is duplicated, not owned.
    let stdin = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
    let socket = stdin.try_clone_to_owned().ok()?;
    Some(match enter(&config, socket) {
        Ok(code) => code,
        Err((socket, reason)) => {
            let _ = send(socket.as_fd(), &Reply::Unavailable { reason }, &[]);
            1
        }
    })
}

type Refusal = (OwnedFd, String);

/// New user (if needed), mount and PID namespaces; the spawner proper is the PID 1 of the last.
fn enter(config: &Config, socket: OwnedFd) -> Result<i32, Refusal> {
    let host_pid = std::process::id();
    let root_user = nix::unistd::geteuid().is_root();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let hierarchy = Hierarchy::probe(&mounts);
    if let Err(reason) = isolate(root_user) {
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
            let code = match prepare(config, root_user, hierarchy, host_pid) {
                Err(reason) => {
                    let _ = send(socket.as_fd(), &Reply::Unavailable { reason }, &[]);
                    1
                }
                Ok(parts) => Spawner { socket, ..parts }.serve(),
            };
            Ok(code)
        }
    }
}

fn isolate(root_user: bool) -> Result<(), String> {
    let mut flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID;
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    if !root_user {
        flags |= CloneFlags::CLONE_NEWUSER;
    }
    unshare(flags).map_err(|e| {
        let hint = if root_user {
            "namespaces are not permitted here, even to root: a container needs CAP_SYS_ADMIN"
        } else {
            "user namespaces are off: run as root, or set kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0"
        };
        format!("unshare: {e}; {hint}")
    })?;
    if !root_user {
        let write =
            |file: &str, text: String| fs::write(file, text).map_err(|e| format!("{file}: {e}"));
        write("/proc/self/setgroups", "deny".into())?;
        write("/proc/self/uid_map", format!("0 {uid} 1"))?;
        write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    }
    Ok(())
}

fn prepare(
    config: &Config,
    root_user: bool,
    hierarchy: Hierarchy,
    host_pid: u32,
) -> Result<Spawner, String> {
    root::build(&config.binds)?;
    fs::create_dir_all(format!("{BASE}/sb")).map_err(|e| format!("{BASE}/sb: {e}"))?;
    let null = fs::File::open("/dev/null").map_err(|e| format!("/dev/null: {e}"))?;
    Ok(Spawner {
        socket: null.into(),
        hierarchy,
        seccomp: seccomp::programs()?,
        landlock: landlock::abi() > 0,
        own_users: root_user,
        host_pid,
        live: HashMap::new(),
    })
}

impl Spawner {
    fn protections(&self) -> Vec<Protection> {
        let row = |name: &str, enforced, how: String| Protection {
            name: name.into(),
            enforced,
            how,
        };
        let always = |name, how: &str| row(name, true, how.into());
        let memory = self.hierarchy.limits_memory();
        let pids = self.hierarchy.limits_processes();
        vec![
            always("namespaces", "pid, mount, net, ipc, uts, cgroup"),
            always(
                "network",
                "empty network namespace, no interface is up; only Unix sockets",
            ),
            always(
                "root",
                "read-only, pivot_root; /work and /tmp are private and bounded",
            ),
            always(
                "capabilities",
                "all sets empty, securebits locked, no_new_privs",
            ),
            always(
                "seccomp",
                "allow-list; clone3 answers ENOSYS, foreign ABIs kill",
            ),
            always(
                "resource limits",
                "cpu, file size, open files, core, locked memory",
            ),
            row(
                "landlock",
                self.landlock,
                match landlock::abi() {
                    0 => "the kernel has no landlock".into(),
                    abi => format!("ABI {abi}"),
                },
            ),
            row(
                "own user",
                self.own_users,
                if self.own_users {
                    "each sandbox has a user id of its own".into()
                } else {
                    "not root: all sandboxes share this user inside a user namespace".into()
                },
            ),
            row(
                "memory",
                memory.is_some(),
                memory.map_or(
                    format!(
                        "{}; address space of each process is limited",
                        self.hierarchy.why
                    ),
                    Into::into,
                ),
            ),
            row(
                "processes",
                pids.is_some() || self.own_users,
                pids.unwrap_or("limit of the sandbox's own user").into(),
            ),
        ]
    }

    fn serve(mut self) -> i32 {
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGCHLD);
        let Ok(()) = signals.thread_block() else {
            return 1;
        };
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let Ok(signal_fd) = SignalFd::with_flags(&signals, flags) else {
            return 1;
        };
        let hello = Reply::Hello {
            protections: self.protections(),
        };
        self.reply(&hello, &[]);
        let mut buffer = vec![0; MAX_PACKET + 1];
        loop {
            let mut fds = [
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(signal_fd.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return 1,
                Ok(_) => {}
            }
            let readable = fds[0].any().unwrap_or(true);
            if fds[1].any().unwrap_or(true) {
                let _ = signal_fd.read_signal();
                self.reap();
            }
            if readable {
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

    fn handle(&mut self, message: Numbered, files: Vec<OwnedFd>) {
        let mut answer = None;
        let result = match message.request {
            Request::Create { id, limits } => self.create(id, limits),
            Request::Destroy { id } => {
                self.destroy(id);
                Ok(())
            }
            Request::Exec { id, argv, env } => self.exec(id, argv, env, files),
            Request::Kill { id } => {
                self.kill(id);
                Ok(())
            }
            Request::WriteFile { id, path } => self.write_file(id, &path, files),
            Request::ReadFile {
                id,
                path,
                max_bytes,
            } => root::read_file(&work(id), &path, max_bytes).map(|fd| answer = Some(fd)),
        };
        let raw: Vec<RawFd> = answer.iter().map(AsRawFd::as_raw_fd).collect();
        let done = Reply::Done {
            seq: message.seq,
            error: result.err(),
        };
        self.reply(&done, &raw);
    }

    fn create(&mut self, id: u64, limits: Limits) -> Result<(), String> {
        let uid = self.own_users.then(|| FIRST_UID + (id % UIDS) as u32);
        let dir = files(id);
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let options = format!(
            "size={},nr_inodes={MAX_INODES},mode=0755",
            limits.work_bytes
        );
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(
            Some("tmpfs"),
            &dir,
            Some("tmpfs"),
            flags,
            Some(options.as_str()),
        )
        .map_err(|e| format!("mount tmpfs: {e}"))?;
        let name = format!("sinew-{}-{id}", self.host_pid);
        let made = ["work", "tmp"]
            .iter()
            .try_for_each(|folder| root::own_folder(&dir.join(folder), uid))
            .and_then(|()| self.hierarchy.create(&name, &limits));
        match made {
            Ok(group) => {
                let live = Live {
                    limits,
                    group,
                    uid,
                    running: None,
                    dying: false,
                };
                self.live.insert(id, live);
                Ok(())
            }
            Err(e) => {
                let _ = umount2(&dir, MntFlags::MNT_DETACH);
                let _ = fs::remove_dir(&dir);
                Err(e)
            }
        }
    }

    fn exec(
        &mut self,
        id: u64,
        argv: Vec<String>,
        env: Vec<(String, String)>,
        files_given: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let live = self.live.get_mut(&id).ok_or("no such sandbox")?;
        if live.running.is_some() {
            return Err("something runs in it already".into());
        }
        let [stdin, stdout, stderr, status]: [OwnedFd; 4] = files_given
            .try_into()
            .map_err(|f: Vec<_>| format!("{} files, expected 4", f.len()))?;
        live.group.begin();
        let jail = Jail {
            files: files(id),
            join_files: live.group.join_files(),
            limits: live.limits.clone(),
            argv: c_strings(argv)?,
            env: c_strings(env.into_iter().map(|(k, v)| format!("{k}={v}")))?,
            stdio: [stdin, stdout, stderr],
            status,
            uid: live.uid,
            seccomp: self.seccomp.clone(),
            landlock: self.landlock,
            limit_user_processes: self.hierarchy.limits_processes().is_none(),
            limit_address_space: self.hierarchy.limits_memory().is_none(),
        };
        if jail.argv.is_empty() {
            return Err("no program".into());
        }
        let flags = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWPID
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP;
        let flags = i64::from(flags.bits()) | i64::from(libc::SIGCHLD);
        // SAFETY: this process has one thread, so the copy is consistent; the child runs
        // `Jail::run`, which never returns.
        match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
            0 => jail.run(),
            pid if pid > 0 => {
                live.running = Some(pid as i32);
                Ok(())
            }
            _ => Err(format!("clone: {}", std::io::Error::last_os_error())),
        }
    }

    /// Killing the init of a PID namespace kills all of it, whatever sessions or groups it made.
    fn kill(&self, id: u64) {
        if let Some(pid) = self.live.get(&id).and_then(|l| l.running) {
            // SAFETY: a child of ours that was not reaped yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }

    fn destroy(&mut self, id: u64) {
        self.kill(id);
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        live.dying = true;
        if live.running.is_none() {
            self.free(id);
        }
    }

    fn free(&mut self, id: u64) {
        if let Some(live) = self.live.remove(&id) {
            let _ = umount2(&files(id), MntFlags::MNT_DETACH);
            let _ = fs::remove_dir(files(id));
            live.group.remove();
        }
    }

    fn remove_groups(&self) {
        for (id, live) in &self.live {
            self.kill(*id);
            if let Some(pid) = live.running {
                // SAFETY: waits for a child of ours.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
            }
            live.group.remove();
        }
    }

    fn reap(&mut self) {
        loop {
            let mut status = 0;
            // SAFETY: plain wait into a local.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            let found = self.live.iter_mut().find(|(_, l)| l.running == Some(pid));
            let Some((&id, live)) = found else { continue };
            live.running = None;
            let (events, dying) = (live.group.events(), live.dying);
            if dying {
                self.free(id);
            }
            self.reply(&Reply::Ended { id, events }, &[]);
        }
    }

    fn write_file(&self, id: u64, path: &str, given: Vec<OwnedFd>) -> Result<(), String> {
        let live = self.live.get(&id).ok_or("no such sandbox")?;
        let content = given.into_iter().next().ok_or("no content")?;
        root::write_file(&work(id), path, content, live.limits.work_bytes, live.uid)
    }
}

fn files(id: u64) -> PathBuf {
    Path::new(BASE).join("sb").join(id.to_string())
}

fn work(id: u64) -> PathBuf {
    files(id).join("work")
}

/// The read-only root is a mount point.
pub(crate) fn root_path() -> &'static Path {
    Path::new(ROOT)
}
