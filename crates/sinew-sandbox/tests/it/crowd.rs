//! Many sandboxes at once while the spawner's own pipes and sockets hold next to nothing: it and
//! the zygote must never wait for each other.

use crate::{children, small, spawner_pid, text, with};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;
use sinew_sandbox::{Ending, ExecRequest, Program, Sandbox, SandboxProvider};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

/// A pipe of one page holds 170 notices, and each sandbox makes two.
const SANDBOXES: usize = 260;
const PROGRAMS: usize = 120;
/// Time after which a wait counts as endless.
const STUCK: Duration = Duration::from_secs(240);

/// A file of another process.
fn file_of(pid: i32, fd: i32) -> OwnedFd {
    // SAFETY: no pointers; both descriptors are new and ours.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
        assert!(process >= 0, "{}", std::io::Error::last_os_error());
        let process = OwnedFd::from_raw_fd(process);
        let fd = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) as i32;
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    }
}

/// Makes all pipes and sockets of the spawner as small as the kernel lets them be.
fn shrink(spawner: i32) {
    let (mut pipes, mut sockets) = (0, 0);
    for entry in std::fs::read_dir(format!("/proc/{spawner}/fd")).unwrap() {
        let entry = entry.unwrap();
        let kind = std::fs::read_link(entry.path()).unwrap();
        let fd: i32 = entry.file_name().to_string_lossy().parse().unwrap();
        if fd <= 2 {
            continue;
        }
        if kind.to_string_lossy().starts_with("pipe:") {
            let pipe = File::from(file_of(spawner, fd));
            assert_eq!(fcntl(&pipe, FcntlArg::F_SETPIPE_SZ(4096)).unwrap(), 4096);
            pipes += 1;
        }
        if kind.to_string_lossy().starts_with("socket:") {
            setsockopt(&file_of(spawner, fd), sockopt::SndBuf, &1).unwrap();
            sockets += 1;
        }
    }
    assert!(
        pipes >= 2 && sockets >= 2,
        "{pipes} pipes, {sockets} sockets"
    );
}

/// Kills the spawner unless the sender is dropped in time: a stuck one stops this process, too,
/// once no request fits in the socket, and would outlive the test.
fn watch(spawner: i32) -> mpsc::SyncSender<()> {
    let (alive, done) = mpsc::sync_channel::<()>(1);
    std::thread::spawn(move || {
        if done.recv_timeout(STUCK) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = kill(Pid::from_raw(spawner), Signal::SIGKILL);
        }
    });
    alive
}

async fn leave(sandbox: &mut Box<dyn Sandbox>) {
    // A plain exit: the kernel reports all of them to the spawner at once.
    let code = "import os, time; time.sleep(0.5); os.write(1, b'x'); os._exit(0)";
    let request = ExecRequest::new(Program::Python(code.into()), STUCK);
    let result = sandbox.exec(request).await.unwrap();
    assert_eq!(result.ending, Ending::Exited { code: 0 });
    assert_eq!(text(&result.stdout), "x");
}

#[tokio::test]
async fn spawner_and_zygote_never_wait_for_each_other() {
    let provider = with(|config| config.max_live = SANDBOXES);
    let spawner = children(spawner_pid())[0] as i32;
    shrink(spawner);
    let alive = watch(spawner);
    let spec = small();
    let made = futures::future::join_all((0..SANDBOXES).map(|_| provider.acquire(&spec)));
    let mut made: Vec<Box<dyn Sandbox>> = made.await.into_iter().map(Result::unwrap).collect();

    // Programs all end while it looks away: then all of their sandboxes are to be made ready.
    let stop = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        kill(Pid::from_raw(spawner), Signal::SIGSTOP).unwrap();
        tokio::time::sleep(Duration::from_millis(1000)).await;
        kill(Pid::from_raw(spawner), Signal::SIGCONT).unwrap();
    };
    let programs = futures::future::join_all(made[..PROGRAMS].iter_mut().map(leave));
    tokio::join!(programs, stop);
    futures::future::join_all(made[..PROGRAMS].iter_mut().map(leave)).await;
    drop(alive);
    drop(made);
    drop(provider);
    while std::fs::exists(format!("/proc/{spawner}/status")).unwrap() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
