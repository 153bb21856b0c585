//! The process level for real: the abilities of code inside, and above all its limits.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[expect(unsafe_code, reason = "it takes a descriptor of another process")]
mod crowd;
mod files;
mod guest;
mod port;
mod program_ends;
mod terminal;
mod watch;

use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, Limits, PoolConfig, ProcessConfig, ProcessProvider, Program,
    Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::path::Path;
use std::time::Duration;

pub(crate) fn provider() -> ProcessProvider {
    with(|_| ())
}

pub(crate) fn with(change: impl FnOnce(&mut ProcessConfig)) -> ProcessProvider {
    let path = std::env::var("PATH").unwrap();
    let mut config = ProcessConfig::new(&path);
    change(&mut config);
    ProcessProvider::start(config).unwrap()
}

pub(crate) fn small() -> SandboxSpec {
    SandboxSpec {
        limits: Limits {
            cpu_s: 2.0,
            memory_bytes: 64 << 20,
            processes: 8,
            output_bytes: 4096,
            work_bytes: 2 << 20,
            open_files: 32,
        },
        ..SandboxSpec::default()
    }
}

pub(crate) async fn exec(sandbox: &mut dyn Sandbox, program: Program, ms: u64) -> ExecResult {
    let request = ExecRequest::new(program, Duration::from_millis(ms));
    sandbox.exec(request).await.unwrap()
}

pub(crate) async fn python(sandbox: &mut dyn Sandbox, code: &str) -> ExecResult {
    exec(sandbox, Program::Python(code.into()), SOON_MS).await
}

/// Time of programs that end by themselves; it only ends a hang.
pub(crate) const SOON_MS: u64 = 60_000;

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs code in a separate sandbox and returns how it ended and what it printed.
async fn once(code: &str) -> (Ending, String, String) {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let result = python(sandbox.as_mut(), code).await;
    (result.ending, text(&result.stdout), text(&result.stderr))
}

pub(crate) const OK: Ending = Ending::Exited { code: 0 };

#[tokio::test]
async fn python_and_shell_run_and_files_stay_between_executions() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let first = python(
        sandbox.as_mut(),
        "print(6 * 7); open('a.txt', 'w').write('kept')",
    )
    .await;
    assert_eq!(
        (first.ending, text(&first.stdout).as_str()),
        (OK, "42\n"),
        "{}",
        text(&first.stderr)
    );
    assert!(first.usage.cpu_s > 0.0 && first.usage.peak_memory_bytes > 0);
    let second = exec(
        sandbox.as_mut(),
        Program::Shell("cat a.txt; pwd; exit 3".into()),
        SOON_MS,
    )
    .await;
    assert_eq!(second.ending, Ending::Exited { code: 3 });
    assert_eq!(text(&second.stdout), "kept/work\n");
    sandbox
        .write_file("dir/b.txt", b"from outside")
        .await
        .unwrap();
    let third = python(sandbox.as_mut(), "print(open('dir/b.txt').read())").await;
    assert_eq!(text(&third.stdout), "from outside\n");
    assert_eq!(sandbox.read_file("a.txt", 100).await.unwrap(), b"kept");
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn standard_input_arrives_and_ends() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let request = ExecRequest {
        program: Program::Python("import sys; print(len(sys.stdin.read()))".into()),
        stdin: vec![b'x'; 200_000],
        deadline: Duration::from_millis(SOON_MS),
    };
    let result = sandbox.exec(request).await.unwrap();
    assert_eq!(text(&result.stdout), "200000\n");
}

#[tokio::test]
async fn two_sandboxes_share_nothing() {
    let provider = provider();
    let mut a = provider.acquire(&small()).await.unwrap();
    let mut b = provider.acquire(&small()).await.unwrap();
    python(
        a.as_mut(),
        "open('/work/x', 'w').write('a'); open('/tmp/y', 'w').write('a')",
    )
    .await;
    let seen = python(
        b.as_mut(),
        "import os; print(os.listdir('/work'), os.listdir('/tmp'), os.getuid())",
    )
    .await;
    assert!(
        text(&seen.stdout).starts_with("[] []"),
        "{}",
        text(&seen.stdout)
    );
    let mine = python(a.as_mut(), "import os; print(os.getuid())").await;
    assert!(
        !text(&seen.stdout).ends_with(&text(&mine.stdout)),
        "the same user"
    );
}

#[tokio::test]
async fn endless_loops_end_at_the_deadline_or_the_cpu_limit() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let spin = Program::Python("while True: pass".into());
    assert_eq!(
        exec(sandbox.as_mut(), spin.clone(), 300).await.ending,
        Ending::Timeout
    );
    assert_eq!(
        exec(sandbox.as_mut(), spin, 20_000).await.ending,
        Ending::Timeout
    );
    let sleep = "import signal, time\nfor s in (1, 2, 3, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(99)";
    assert_eq!(
        exec(sandbox.as_mut(), Program::Python(sleep.into()), 300)
            .await
            .ending,
        Ending::Timeout
    );
    let healthy = python(sandbox.as_mut(), "print(1)").await;
    assert_eq!(text(&healthy.stdout), "1\n");
}

#[tokio::test]
async fn daemons_and_sessions_do_not_outlive_their_execution() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.close(0); os.close(1); os.close(2)\n        time.sleep(99)\n    os._exit(0)\nprint('parent')";
    let result = python(sandbox.as_mut(), code).await;
    assert_eq!(
        (result.ending, text(&result.stdout).as_str()),
        (OK, "parent\n")
    );
    let left = python(
        sandbox.as_mut(),
        "import os; print([p for p in os.listdir('/proc') if p.isdigit()])",
    )
    .await;
    assert!(
        !text(&left.stdout).contains('3') || text(&left.stdout).len() < 20,
        "{}",
        text(&left.stdout)
    );
}

#[tokio::test]
async fn memory_bombs_are_told_apart_from_other_ends() {
    let (ending, ..) = once("x = bytearray(500 << 20); print(len(x))").await;
    assert_eq!(ending, Ending::OutOfMemory);
    let touch = "import mmap\nblocks = []\nwhile True:\n    m = mmap.mmap(-1, 1 << 20); m.write(b'x' * (1 << 20)); blocks.append(m)";
    assert_eq!(once(touch).await.0, Ending::OutOfMemory);
}

#[tokio::test]
async fn fork_bombs_stop_at_the_limit() {
    let code = "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(3); os._exit(0)\n        n += 1\nexcept OSError as e:\n    print(n, e.errno)\n    raise";
    let (ending, out, _) = once(code).await;
    assert_eq!(ending, Ending::TooManyProcesses);
    let n: u32 = out.split(' ').next().unwrap().parse().unwrap();
    assert!((1..=8).contains(&n), "{out}");
}

#[tokio::test]
async fn output_floods_are_cut() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let result = python(sandbox.as_mut(), "while True: print('x' * 1000)").await;
    assert_eq!(result.ending, Ending::OutputLimit);
    assert!(result.truncated && result.stdout.len() <= 4096);
}

#[tokio::test]
async fn disks_and_inodes_fill_up_inside_only() {
    let fill = "import os\ntry:\n    with open('/tmp/big', 'wb') as f:\n        for _ in range(64): f.write(b'x' * (1 << 18)); f.flush()\nexcept OSError as e:\n    print('full', e.errno)";
    let (ending, out, err) = once(fill).await;
    // ENOSPC, or the signal of the file size limit.
    assert!(
        out.contains("full") || matches!(ending, Ending::Signalled { .. }),
        "{ending:?} {out} {err}"
    );
    let inodes = "n = 0\ntry:\n    while n < 100000:\n        open(f'/work/{n}', 'w').close(); n += 1\nexcept OSError as e:\n    print(n, e.errno)";
    let (_, out, _) = once(inodes).await;
    assert!(out.ends_with(" 28\n"), "{out}");
}

#[tokio::test]
async fn the_host_s_files_and_secrets_are_not_there() {
    let code = "import os\nfor p in ['/root', '/home', '/etc/shadow', '/etc/ssh', '/var', '/sys', '/boot', '/mnt', '/run', '/dev/kvm', '/dev/mem', '/dev/sda', '/dev/vda', '/dev/fuse']:\n    print(p, os.path.exists(p))\nprint(sorted(os.environ))";
    let (ending, out, _) = once(code).await;
    assert_eq!(ending, OK);
    assert!(!out.contains("True"), "{out}");
    assert!(
        out.contains("['HOME', 'LANG', 'PATH', 'TMPDIR']") || out.contains("'LC_CTYPE'"),
        "{out}"
    );
}

#[tokio::test]
async fn the_system_is_read_only() {
    let code = "import os\nfor p in ['/x', '/usr/x', '/usr/bin/python3', '/etc/passwd', '/proc/sys/kernel/core_pattern', '/proc/self/oom_score_adj', '/proc/sysrq-trigger', '/dev/x']:\n    try:\n        f = open(p, 'w'); f.write('-1000'); f.close(); print(p, 'WRITTEN')\n    except OSError as e: print(p, e.errno)";
    let (ending, out, _) = once(code).await;
    assert_eq!(ending, OK);
    assert!(!out.contains("WRITTEN"), "{out}");
}

#[tokio::test]
async fn there_is_no_network() {
    let code = "import socket\nfor family, kind in [(2, 1), (2, 2), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1)]:\n    try:\n        s = socket.socket(family, kind); print(family, 'MADE')\n    except OSError as e: print(family, e.errno)\na, b = socket.socketpair(); a.send(b'x'); print('pair', b.recv(1))";
    let (ending, out, err) = once(code).await;
    assert_eq!(ending, OK, "{err}");
    assert!(!out.contains("MADE") && out.contains("pair b'x'"), "{out}");
}

#[tokio::test]
async fn no_capability_and_no_way_to_one() {
    let code = "for line in open('/proc/self/status'):\n    if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:', 'Groups')): print(line.split())";
    let (ending, out, _) = once(code).await;
    assert_eq!(ending, OK);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(
            out.contains(&format!("['{set}:', '0000000000000000']")),
            "{out}"
        );
    }
    assert!(
        out.contains("['NoNewPrivs:', '1']") && out.contains("['Seccomp:', '2']"),
        "{out}"
    );
    assert!(out.contains("['Groups:']"), "{out}");
}

#[tokio::test]
async fn forbidden_system_calls_are_refused() {
    // mount, umount2, pivot_root, chroot, unshare, setns, ptrace, process_vm_readv, bpf, keyctl,
    // add_key, perf_event_open, io_uring_setup, userfaultfd, kexec_load, init_module, reboot,
    // swapon, personality, open_by_handle_at, mknod, mknodat, setuid, setgid, capset, seccomp,
    // fsopen, move_mount, open_tree, pidfd_getfd, quotactl, acct, sethostname, iopl, syslog.
    let code = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\nbad = []\nfor nr in [165, 166, 155, 161, 272, 308, 101, 310, 321, 250, 248, 298, 425, 323, 246, 175, 169, 167, 135, 304, 133, 259, 105, 106, 126, 317, 430, 429, 428, 438, 179, 163, 170, 172, 103]:\n    ctypes.set_errno(0)\n    r = libc.syscall(nr, 0, 0, 0, 0, 0, 0)\n    if r != -1 or ctypes.get_errno() != errno.EPERM: bad.append((nr, r, ctypes.get_errno()))\nprint(bad)\nctypes.set_errno(0)\nprint(libc.syscall(435, 0, 0), ctypes.get_errno())\nprint(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())";
    let (ending, out, err) = once(code).await;
    assert_eq!(ending, OK, "{err}");
    assert_eq!(out, "[]\n-1 38\n-1 1\n", "{out}");
}

#[tokio::test]
async fn init_and_others_cannot_be_reached_through_proc() {
    let code = "import os\nprint(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))\nfor p in ['/proc/1/root', '/proc/1/environ', '/proc/1/mem', '/proc/1/fd', '/proc/1/cwd', '/proc/kcore', '/proc/kmsg']:\n    try:\n        (os.listdir if p.endswith('fd') else open if not p.endswith(('root', 'cwd')) else os.readlink)(p); print(p, 'REACHED')\n    except OSError as e: print(p, e.errno)\nfor fd in range(3, 32):\n    try:\n        os.fstat(fd); target = os.readlink(f'/proc/self/fd/{fd}')\n        if fd != 3 or not target.startswith('socket:'): print(fd, target, 'OPEN')\n    except OSError: pass\ntry:\n    os.kill(1, 9); print('signalled')\nexcept OSError as e: print('kill', e.errno)";
    let (ending, out, err) = once(code).await;
    assert_eq!(ending, OK, "{err}");
    assert!(!out.contains("REACHED"), "{out}");
    assert!(!out.contains("OPEN"), "{out}");
}

#[tokio::test]
async fn signals_are_named() {
    let (ending, ..) = once("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").await;
    assert_eq!(ending, Ending::Signalled { signal: 11 });
    let (ending, ..) = once("import os; os._exit(9)").await;
    assert_eq!(ending, Ending::Exited { code: 9 });
}

#[tokio::test]
async fn file_paths_cannot_leave_the_work_folder() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let code = "import os\nos.symlink('/etc/passwd', 'link')\nos.symlink('/', 'root')\nos.mkdir('d')\ntry: os.mkfifo('fifo')\nexcept OSError as e: print(e.errno)";
    let made = python(sandbox.as_mut(), code).await;
    assert_eq!(text(&made.stdout), "1\n", "a FIFO can be made");
    for path in [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "",
        "link",
        "root/etc/passwd",
        "d",
    ] {
        assert!(sandbox.read_file(path, 1000).await.is_err(), "read {path}");
        assert!(
            sandbox.write_file(path, b"x").await.is_err(),
            "write {path}"
        );
    }
    let big = vec![0; 3 << 20];
    assert!(sandbox.write_file("big", &big).await.is_err());
    python(sandbox.as_mut(), "open('long', 'w').write('x' * 2000)").await;
    assert!(sandbox.read_file("long", 1000).await.is_err());
}

#[tokio::test]
async fn bad_requests_are_named() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    for program in [
        Program::Argv(Vec::new()),
        Program::Argv(vec!["/no/such/program".into()]),
        Program::Python("x".repeat(200_000)),
        Program::Shell("a\0b".into()),
    ] {
        let request = ExecRequest::new(program, Duration::from_secs(5));
        let e = sandbox.exec(request).await.unwrap_err();
        assert!(
            matches!(
                e,
                SandboxError::Request {
                    field: "program",
                    ..
                }
            ),
            "{e}"
        );
    }
    assert_eq!(
        text(&python(sandbox.as_mut(), "print(1)").await.stdout),
        "1\n"
    );
}

#[tokio::test]
async fn many_at_once_all_answer_and_leave_nothing() {
    let provider = std::sync::Arc::new(provider());
    let mut tasks = Vec::new();
    for i in 0..100 {
        let provider = std::sync::Arc::clone(&provider);
        tasks.push(tokio::spawn(async move {
            let mut sandbox = provider.acquire(&small()).await.unwrap();
            let result = exec(
                sandbox.as_mut(),
                Program::Python(format!("print({i} * 2)")),
                60_000,
            )
            .await;
            sandbox.destroy().await.unwrap();
            text(&result.stdout)
        }));
    }
    for (i, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.unwrap(), format!("{}\n", i * 2));
    }
    no_groups_soon().await;
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains("/tmp/sb"), "mounts are left");
}

/// The one child of this test process that is a spawner.
pub(crate) fn spawner_pid() -> u32 {
    children(std::process::id())[0]
}

pub(crate) fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|n| n.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let after = stat.rsplit(')').next().unwrap_or_default();
        if after.split_whitespace().nth(1) == Some(&parent.to_string()) {
            found.push(pid);
        }
    }
    found
}

/// Groups go when the kernel is done with the processes in them.
pub(crate) async fn no_groups_soon() {
    let left = || groups(&format!("sinew-{}-", spawner_pid()));
    for _ in 0..3000 {
        if left() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} groups are left", left());
}

pub(crate) fn groups(prefix: &str) -> usize {
    ["memory", "pids", "cpuacct"]
        .iter()
        .filter_map(|c| std::fs::read_dir(Path::new("/sys/fs/cgroup").join(c)).ok())
        .flat_map(|dir| dir.flatten())
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .count()
}

#[tokio::test]
async fn killing_the_spawner_kills_all_and_is_told() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let pid = spawner_pid();
    let running = exec_soon(sandbox.as_mut(), "import time; time.sleep(90)");
    let kill = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let all: Vec<u32> = std::iter::once(pid).chain(children(pid)).collect();
        let inner: Vec<u32> = all.iter().flat_map(|&p| children(p)).collect();
        for p in &all {
            std::process::Command::new("kill")
                .args(["-9", &p.to_string()])
                .status()
                .unwrap();
        }
        inner
    };
    let (result, inner) = tokio::join!(running, kill);
    let gone = match &result {
        Err(SandboxError::Died(_)) => true,
        Ok(r) => r.ending == Ending::SandboxDied,
        Err(_) => false,
    };
    assert!(gone, "{result:?}");
    let mut left = inner.len();
    for _ in 0..3000 {
        left = inner.iter().filter(|pid| alive(**pid)).count();
        if left == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(left, 0, "processes of the dead spawner live");
    // Another one is started; what the dead one had is gone.
    assert!(sandbox.is_dead());
    let mut next = provider.acquire(&small()).await.unwrap();
    let result = python(next.as_mut(), "print(1)").await;
    assert_eq!((result.ending, text(&result.stdout)), (OK, "1\n".into()));
}

/// Whether a process runs: one that ended may wait for its parent.
fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z")
}

async fn exec_soon(sandbox: &mut dyn Sandbox, code: &str) -> Result<ExecResult, SandboxError> {
    let request = ExecRequest::new(Program::Python(code.into()), Duration::from_millis(SOON_MS));
    sandbox.exec(request).await
}

#[tokio::test]
async fn a_host_without_room_says_so() {
    let mut config = ProcessConfig::new("");
    config.max_live = 1;
    config.acquire_timeout = Duration::from_millis(100);
    let provider = ProcessProvider::start(config).unwrap();
    let spec = small();
    let first = provider.acquire(&spec).await.unwrap();
    assert!(matches!(
        provider.acquire(&spec).await,
        Err(SandboxError::Busy { limit: 1, .. })
    ));
    drop(first);
    assert!(provider.acquire(&spec).await.is_ok());
}

/// The test runs itself again as the server that is killed.
#[tokio::test]
async fn a_killed_server_leaves_no_orphan() {
    const ROLE: &str = "SINEW_SANDBOX_TEST_SERVER";
    if std::env::var_os(ROLE).is_some() {
        let provider = provider();
        let mut sandbox = provider.acquire(&small()).await.unwrap();
        let sleep = Program::Argv(vec!["/bin/sleep".into(), "60".into()]);
        exec(sandbox.as_mut(), sleep, 60_000).await;
        return;
    }
    let mut server = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_server_leaves_no_orphan"])
        .env(ROLE, "1")
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let sleeps = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|n| n == "sleep\n")
    };
    let mut tree = Vec::new();
    while !tree.iter().any(sleeps) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(server.try_wait().unwrap().is_none(), "the server ended");
        tree = vec![server.id()];
        let mut at = 0;
        while at < tree.len() {
            tree.extend(children(tree[at]));
            at += 1;
        }
    }
    server.kill().unwrap();
    server.wait().unwrap();
    let spawner = tree[1];
    let mut left = Vec::new();
    for _ in 0..1200 {
        left = tree.iter().filter(|pid| alive(**pid)).collect();
        if left.is_empty() && groups(&format!("sinew-{spawner}-")) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!(
        "left: {left:?}, groups {}",
        groups(&format!("sinew-{spawner}-"))
    );
}

/// A pool that keeps `n` ready whatever the demand.
pub(crate) fn steady(n: usize) -> PoolConfig {
    PoolConfig {
        floor: n,
        ceiling: n,
        ..PoolConfig::default()
    }
}
