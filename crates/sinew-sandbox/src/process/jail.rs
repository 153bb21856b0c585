//! Inside the new namespaces: from a forked spawner to jailed code. Runs single-threaded, ends
//! in `execve` or exit; every step that fails is reported by number and errno.

use super::messages::Status;
use crate::port::Limits;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Gid, Pid, Uid, chdir, pivot_root, setgroups, sethostname, setresgid, setresuid};
use seccompiler::BpfProgram;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// Folder, in the spawner's mount namespace, under which everything is built.
pub(crate) const BASE: &str = "/tmp";
/// The read-only root that all sandboxes of a spawner start from.
pub(crate) const ROOT: &str = "/tmp/root";

/// Steps that can fail, in order; the number travels in [`Status::detail`].
pub(crate) const STEPS: [&str; 14] = [
    "join the cgroup",
    "make mounts private",
    "mount the work folder",
    "mount /proc",
    "pivot_root",
    "set the host name",
    "set resource limits",
    "drop capabilities",
    "become an unprivileged user",
    "set no_new_privs",
    "apply landlock",
    "apply seccomp",
    "fork",
    "execve",
];

/// All that a jailed execution needs, prepared before the fork.
pub(crate) struct Jail {
    pub(crate) files: PathBuf,
    pub(crate) join_files: Vec<PathBuf>,
    pub(crate) limits: Limits,
    pub(crate) argv: Vec<CString>,
    pub(crate) env: Vec<CString>,
    /// Standard input, output, error.
    pub(crate) stdio: [OwnedFd; 3],
    pub(crate) status: OwnedFd,
    /// `None` in a user namespace with one user.
    pub(crate) uid: Option<u32>,
    pub(crate) seccomp: [BpfProgram; 2],
    pub(crate) landlock: bool,
    /// Where no cgroup limits processes.
    pub(crate) limit_user_processes: bool,
    /// Address space of a process, where no cgroup limits memory.
    pub(crate) limit_address_space: bool,
}

type Step<T> = Result<T, (u32, i32)>;

fn at(step: u32) -> impl Fn(nix::errno::Errno) -> (u32, i32) {
    move |e| (step, e as i32)
}

fn at_io(step: u32) -> impl Fn(std::io::Error) -> (u32, i32) {
    move |e| (step, e.raw_os_error().unwrap_or(0))
}

impl Jail {
    /// Called in the child; never returns.
    pub(crate) fn run(self) -> ! {
        let status = match self.enter() {
            Ok(status) => status,
            Err((step, errno)) => Status {
                kind: 2,
                value: errno,
                detail: step,
                max_rss_kib: 0,
                cpu_us: 0,
            },
        };
        let mut pipe = File::from(self.status);
        let _ = pipe.write_all(&status.encode());
        drop(pipe);
        // SAFETY: plain exit without destructors of the copied parent.
        unsafe { libc::_exit(0) }
    }

    fn enter(&self) -> Step<Status> {
        for file in &self.join_files {
            std::fs::write(file, "0").map_err(at_io(0))?;
        }
        self.mounts()?;
        sethostname("sandbox").map_err(at(5))?;
        self.resource_limits()?;
        self.drop_privileges()?;
        if self.landlock {
            super::landlock::restrict().map_err(at_io(10))?;
        }
        for program in &self.seccomp {
            seccompiler::apply_filter(program).map_err(|_| (11, 0))?;
        }
        self.spawn_and_wait()
    }

    fn mounts(&self) -> Step<()> {
        let none = None::<&str>;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(none, "/", none, private, none).map_err(at(1))?;
        for name in ["work", "tmp"] {
            let target = format!("{ROOT}/{name}");
            mount(
                Some(&self.files.join(name)),
                target.as_str(),
                none,
                MsFlags::MS_BIND,
                none,
            )
            .map_err(at(2))?;
        }
        let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let proc = format!("{ROOT}/proc");
        let hide = Some("hidepid=invisible");
        mount(Some("proc"), proc.as_str(), Some("proc"), safe, hide)
            .or_else(|_| mount(Some("proc"), proc.as_str(), Some("proc"), safe, none))
            .map_err(at(3))?;
        chdir(ROOT).map_err(at(4))?;
        pivot_root(".", ".").map_err(at(4))?;
        umount2(".", MntFlags::MNT_DETACH).map_err(at(4))?;
        chdir("/work").map_err(at(4))
    }

    fn resource_limits(&self) -> Step<()> {
        let limits = &self.limits;
        let cpu = limits.cpu_s.ceil().max(1.0) as u64;
        let mut all = vec![
            (Resource::RLIMIT_CPU, cpu, cpu + 1),
            (Resource::RLIMIT_CORE, 0, 0),
            (Resource::RLIMIT_FSIZE, limits.work_bytes, limits.work_bytes),
            (
                Resource::RLIMIT_NOFILE,
                limits.open_files,
                limits.open_files,
            ),
            (Resource::RLIMIT_MEMLOCK, 0, 0),
            (Resource::RLIMIT_MSGQUEUE, 0, 0),
            (Resource::RLIMIT_SIGPENDING, 256, 256),
        ];
        if self.uid.is_some() && self.limit_user_processes {
            // Counted for each user, and each sandbox has a user of its own.
            let processes = limits.processes + 1;
            all.push((Resource::RLIMIT_NPROC, processes, processes));
        }
        if self.limit_address_space {
            all.push((
                Resource::RLIMIT_AS,
                limits.memory_bytes,
                limits.memory_bytes,
            ));
        }
        for (resource, soft, hard) in all {
            setrlimit(resource, soft, hard).map_err(at(6))?;
        }
        Ok(())
    }

    fn drop_privileges(&self) -> Step<()> {
        drop_bounding_set().map_err(at_io(7))?;
        // NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off, NO_CAP_AMBIENT_RAISE, all locked.
        prctl(libc::PR_SET_SECUREBITS, 0b1110_1111).map_err(at_io(7))?;
        if let Some(uid) = self.uid {
            setgroups(&[]).map_err(at(8))?;
            let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
            setresgid(group, group, group).map_err(at(8))?;
            setresuid(user, user, user).map_err(at(8))?;
        }
        clear_capabilities().map_err(at_io(7))?;
        prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(at_io(9))?;
        // Changing the user cleared it. The init's own files stay closed to the jailed code.
        prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64).map_err(at_io(9))?;
        prctl(libc::PR_SET_DUMPABLE, 0).map_err(at_io(9))
    }

    /// The init of the PID namespace: starts the program, reaps, reports; when it ends, the
    /// kernel kills whatever is left.
    fn spawn_and_wait(&self) -> Step<Status> {
        // SAFETY: single-threaded; the child only calls async-signal-safe functions and exec.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        match child {
            -1 => Err((
                12,
                std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
            )),
            0 => {
                let errno = self.exec();
                let status = Status {
                    kind: 2,
                    value: errno,
                    detail: 13,
                    max_rss_kib: 0,
                    cpu_us: 0,
                };
                let bytes = status.encode();
                // SAFETY: writes a local array to an open descriptor, then exits.
                unsafe {
                    libc::write(self.status.as_raw_fd(), bytes.as_ptr().cast(), bytes.len());
                    libc::_exit(127)
                }
            }
            pid => self.reap(Pid::from_raw(pid as i32)),
        }
    }

    fn exec(&self) -> i32 {
        let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
            let ends = std::iter::once(std::ptr::null());
            list.iter().map(|s| s.as_ptr()).chain(ends).collect()
        };
        let (argv, env) = (pointers(&self.argv), pointers(&self.env));
        // SAFETY: the arrays end in null and live until execve replaces this process;
        // descriptors are moved below 3 and all others close on exec.
        unsafe {
            libc::setsid();
            for (target, fd) in self.stdio.iter().enumerate() {
                if libc::dup2(fd.as_raw_fd(), target as RawFd) < 0 {
                    return *libc::__errno_location();
                }
            }
            libc::syscall(
                libc::SYS_close_range,
                3,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            for signal in 1..32 {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut empty = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut empty);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const empty, std::ptr::null_mut());
            libc::execve(self.argv[0].as_ptr(), argv.as_ptr(), env.as_ptr());
            *libc::__errno_location()
        }
    }

    fn reap(&self, main: Pid) -> Step<Status> {
        loop {
            let mut status = 0;
            // SAFETY: plain wait into a local.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
            if pid < 0 {
                let errno = nix::errno::Errno::last();
                if errno == nix::errno::Errno::EINTR {
                    continue;
                }
                return Err((13, errno as i32));
            }
            if pid == main.as_raw() {
                return Ok(ended(status));
            }
        }
    }
}

fn ended(status: i32) -> Status {
    // SAFETY: getrusage fills a local struct.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let us = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
    let (kind, value) = if libc::WIFSIGNALED(status) {
        (1, libc::WTERMSIG(status))
    } else {
        (0, libc::WEXITSTATUS(status))
    };
    Status {
        kind,
        value,
        detail: 0,
        max_rss_kib: usage.ru_maxrss as u32,
        cpu_us: us(usage.ru_utime) + us(usage.ru_stime),
    }
}

fn prctl(option: libc::c_int, value: u64) -> std::io::Result<()> {
    // SAFETY: options with one integer argument; nothing is read through pointers.
    match unsafe { libc::prctl(option, value, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn drop_bounding_set() -> std::io::Result<()> {
    let last = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap")
        .ok()
        .and_then(|s| s.trim().parse().ok())
        .unwrap_or(63u64);
    for capability in 0..=last {
        prctl(libc::PR_CAPBSET_DROP, capability)?;
    }
    Ok(())
}

/// Clears the permitted, effective, inheritable and ambient sets (capset(2), version 3).
fn clear_capabilities() -> std::io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let data = [0u32; 6];
    // SAFETY: header and data have the layout of capset(2), version 3.
    match unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Arguments without inner zero bytes.
pub(crate) fn c_strings(list: impl IntoIterator<Item = String>) -> Result<Vec<CString>, String> {
    list.into_iter()
        .map(|s| CString::new(s).map_err(|e| format!("argument with a zero byte: {e}")))
        .collect()
}

/// The name of a failed step.
pub(crate) fn step_name(step: u32) -> &'static str {
    STEPS.get(step as usize).copied().unwrap_or("set-up")
}

/// Path of the shell inside.
pub(crate) const SHELL: &CStr = c"/bin/sh";
