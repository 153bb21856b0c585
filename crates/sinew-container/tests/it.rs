//! Containers of real engines: crun and runc without a daemon, and a Docker daemon of our own.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

#[path = "it/daemon.rs"]
mod daemon;
#[path = "it/writable.rs"]
mod writable;

use daemon::Daemon;
use sinew_container::{Choice, ContainerConfig, ContainerProvider, EngineKind, Image};
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, Network, Program, Sandbox, SandboxError,
    SandboxProvider, SandboxSpec,
};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn config(kind: EngineKind, state: &Path) -> ContainerConfig {
    ContainerConfig {
        engine: Choice::Only(kind),
        state: state.into(),
        ..ContainerConfig::default()
    }
}

fn start(config: ContainerConfig) -> ContainerProvider {
    ContainerProvider::start(config)
        .unwrap_or_else(|e| panic!("{e}; scripts/setup.sh installs what this needs"))
}

fn request(program: Program) -> ExecRequest {
    ExecRequest::new(program, Duration::from_secs(60))
}

async fn python(sandbox: &mut Box<dyn Sandbox>, code: &str) -> ExecResult {
    let program = Program::Python(code.into());
    sandbox.exec(request(program)).await.unwrap()
}

async fn printed(sandbox: &mut Box<dyn Sandbox>, code: &str) -> String {
    let result = python(sandbox, code).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(
        result.ending,
        Ending::Exited { code: 0 },
        "{}",
        text(&result.stderr)
    );
    text(&result.stdout)
}

fn small() -> SandboxSpec {
    SandboxSpec {
        limits: Limits {
            memory_bytes: 64 << 20,
            work_bytes: 4 << 20,
            ..Limits::default()
        },
        ..SandboxSpec::default()
    }
}

/// Control groups of a process's containers.
fn groups_of(pid: u32) -> usize {
    let prefix = format!("sinew-{pid}-");
    let folders = std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
    let within = folders.flat_map(|f| std::fs::read_dir(f.path()).into_iter().flatten().flatten());
    let named = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().starts_with(&prefix);
    within.filter(named).count()
}

/// Runs in the process that is killed: holds a container with a program that keeps running.
async fn hold(state: &Path) {
    let provider = start(config(EngineKind::Crun, state));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let code = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)";
    let mut asked = request(Program::Python(code.into()));
    asked.deadline = Duration::from_secs(600);
    std::fs::write(state.join("up"), "").unwrap();
    let _ = sandbox.exec(asked).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_process_that_was_killed() {
    const HOLD: &str = "SINEW_TEST_HOLD";
    if let Some(state) = std::env::var_os(HOLD) {
        return hold(Path::new(&state)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let name = "nothing_is_left_of_a_process_that_was_killed";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(HOLD, dir.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let until = |done: &dyn Fn() -> bool| {
        let deadline = std::time::Instant::now() + Duration::from_secs(120);
        while !done() {
            assert!(std::time::Instant::now() < deadline, "nothing changes");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    until(&|| dir.path().join("up").exists() && groups_of(child.id()) > 0);
    std::thread::sleep(Duration::from_millis(200));
    child.kill().unwrap();
    child.wait().unwrap();
    // The agent ends with its connection, and everything inside with the agent.
    until(&|| groups_of(child.id()) == 0);
    std::fs::remove_file(dir.path().join("up")).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    drop(start(config(EngineKind::Crun, dir.path())));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn programs_run_with_input_and_environment() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    assert_eq!(printed(&mut sandbox, "print(6 * 7)").await, "42\n");
    // Cold, and in an interpreter that waited.
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let told = printed(&mut sandbox, "import sys, os; print(__name__, sys.argv, os.getcwd(), sorted(os.environ), sorted(n for n in globals() if n[0] != '_'))").await;
        assert_eq!(
            told,
            "__main__ ['-c'] /work ['HOME', 'LANG', 'PATH', 'TMPDIR'] ['os', 'sys']\n"
        );
    }
    let mut asked = request(Program::Shell(
        "cat; echo $KEY; echo bad >&2; exit 3".into(),
    ));
    asked.stdin = vec![b'x'; 300_000];
    let options = ExecOptions {
        env: vec![("KEY".into(), "value".into())],
        ..ExecOptions::default()
    };
    let mut spec = small();
    spec.limits.output_bytes = 1 << 20;
    let mut wide = provider.acquire(&spec).await.unwrap();
    let result = wide.exec_with(asked, options).await.unwrap();
    assert_eq!(result.ending, Ending::Exited { code: 3 });
    assert_eq!(result.stdout.len(), 300_006);
    assert_eq!(result.stderr, b"bad\n");
    wide.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
    drop(provider);
    assert_eq!(groups_of(std::process::id()), 0);
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

/// Compares with an interpreter that ends by itself.
#[tokio::test]
async fn a_waiting_interpreter_ends_programs_as_a_new_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    for code in [
        "print('no newline', end='')",
        "import sys; sys.exit()",
        "import sys; sys.exit(300)",
        "import sys; sys.exit(True)",
        "import sys; sys.exit('why')",
        "def f(): return 1 / 0\nf()",
        "this is no Python",
        "raise KeyError('x') from ValueError('y')",
        "import atexit; atexit.register(print, 'at exit'); print('first')",
        "class A:\n    def __del__(self): print('gone')\na = A(); b = A(); b.me = b; print('here')",
        "import threading, time\ndef f():\n    time.sleep(0.05); print('late')\nthreading.Thread(target=f).start()",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start(); print('does not wait')",
        "import sys; sys.stdout.close()",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
        "import os; os._exit(5)",
        "del print",
    ] {
        let argv = ["/usr/bin/python3", "-I", "-S", "-B", "-c", code];
        let argv = argv.map(String::from).to_vec();
        let new = sandbox.exec(request(Program::Argv(argv))).await.unwrap();
        tokio::time::sleep(Duration::from_millis(60)).await;
        let waited = python(&mut sandbox, code).await;
        let seen = |r: &ExecResult| {
            let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
            (r.ending, text(&r.stdout), text(&r.stderr))
        };
        assert_eq!(seen(&waited), seen(&new), "{code}");
    }
}

#[tokio::test]
async fn ends_are_told_precisely() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let ends = [
        (
            "import os; os.kill(os.getpid(), 9)",
            Ending::Signalled { signal: 9 },
        ),
        ("while True: print('x' * 1000)", Ending::OutputLimit),
        (
            "x = []\nwhile True: x.append(bytearray(1 << 20))",
            Ending::OutOfMemory,
        ),
        (
            "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(9)",
            Ending::TooManyProcesses,
        ),
        ("import sys; sys.exit(7)", Ending::Exited { code: 7 }),
        ("raise ValueError('no')", Ending::Exited { code: 1 }),
    ];
    for (code, ending) in ends {
        let result = python(&mut sandbox, code).await;
        assert_eq!(
            result.ending,
            ending,
            "{code}: {}",
            String::from_utf8_lossy(&result.stderr)
        );
    }
    let mut late = request(Program::Python("while True: pass".into()));
    late.deadline = Duration::from_secs(2);
    let result = sandbox.exec(late).await.unwrap();
    assert_eq!(result.ending, Ending::Timeout);
    assert!(result.usage.cpu_s > 0.1, "{:?}", result.usage);
    let missing = sandbox
        .exec(request(Program::Argv(vec!["nothing".into()])))
        .await;
    let Err(SandboxError::Request {
        field: "program",
        value,
        allowed,
    }) = missing
    else {
        panic!("{missing:?}");
    };
    assert!(value.contains("\"nothing\" (No such file"), "{value}");
    assert!(
        allowed.contains("no such program") && allowed.contains("sandbox.image"),
        "{allowed}"
    );
    // Nothing of all that is left.
    assert_eq!(
        printed(
            &mut sandbox,
            "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
        )
        .await,
        "1\n"
    );
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn output_comes_while_the_program_runs() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    let options = ExecOptions {
        output: Some(sender),
        ..ExecOptions::default()
    };
    let code = "print('first', flush=True); import time; time.sleep(60)";
    let mut asked = request(Program::Python(code.into()));
    asked.deadline = Duration::from_secs(60);
    {
        let running = sandbox.exec_with(asked, options);
        tokio::pin!(running);
        let first = tokio::select! {
            chunk = receiver.recv() => chunk.unwrap(),
            ended = &mut running => panic!("{ended:?}"),
        };
        assert_eq!(first.bytes, b"first\n");
    }
    // The caller gave up: the program is ended by the next request.
    assert_eq!(printed(&mut sandbox, "print('next')").await, "next\n");
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn files_go_in_and_out_and_snapshots_fork() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let spec = small();
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let big = vec![7u8; 1 << 20];
    sandbox.write_file("a/b/c", &big).await.unwrap();
    assert_eq!(sandbox.read_file("a/b/c", 1 << 20).await.unwrap(), big);
    assert!(sandbox.read_file("a/b/c", 100).await.is_err());
    assert!(sandbox.write_file("huge", &vec![0; 5 << 20]).await.is_err());
    sandbox.write_file("huge", b"").await.unwrap();
    let prepare = "import os; os.symlink('/etc/passwd', 'l'); os.mkdir('f'); open('x', 'w').write('1'); os.chmod('x', 0); os.mkdir('closed', 0)";
    printed(&mut sandbox, prepare).await;
    for path in ["l", "f", "a", "../x", "/etc/passwd", ""] {
        assert!(sandbox.read_file(path, 1 << 20).await.is_err(), "{path}");
        assert!(sandbox.write_file(path, b"x").await.is_err(), "{path}");
    }
    let snapshot = sandbox.snapshot().await.unwrap();
    let archive = provider.export(&snapshot).await.unwrap();
    printed(&mut sandbox, "import os; os.remove('a/b/c')").await;
    let again = provider.import(&archive, 8 << 20).await.unwrap();
    assert_eq!(provider.export(&again).await.unwrap(), archive);
    let mut fork = provider.fork(&spec, &again).await.unwrap();
    let look = "import os; print(sorted(os.listdir('.')), os.path.getsize('a/b/c'), oct(os.stat('x').st_mode & 0o777), os.stat('x').st_uid == os.getuid())";
    assert_eq!(
        printed(&mut fork, look).await,
        "['a', 'closed', 'f', 'huge', 'l', 'x'] 1048576 0o0 True\n"
    );
    let deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('/tmp/t', 'w')";
    printed(&mut fork, deep).await;
    fork.reset().await.unwrap();
    assert_eq!(
        printed(&mut fork, look).await,
        "['a', 'closed', 'f', 'huge', 'l', 'x'] 1048576 0o0 True\n"
    );
    let stats = fork.stats().await.unwrap();
    assert!(
        stats.file_bytes >= 1 << 20 && stats.file_count >= 6,
        "{stats:?}"
    );
    assert!(stats.executions == 3 && stats.memory_bytes > 0, "{stats:?}");
    fork.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn the_host_listens_inside_and_nothing_else_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut closed = provider.acquire(&small()).await.unwrap();
    assert!(closed.listen_inside(3128).await.is_err());
    let spec = SandboxSpec {
        network: Network::Loopback,
        ..small()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let listener = sandbox.listen_inside(3128).await.unwrap();
    listener.set_nonblocking(false).unwrap();
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = [0; 2];
        stream.read_exact(&mut asked).unwrap();
        stream.write_all(b"answer").unwrap();
        asked
    });
    let code = "import socket\ns = socket.create_connection(('127.0.0.1', 3128), 5); s.sendall(b'hi'); print(s.recv(10))\ntry: socket.create_connection(('10.0.0.1', 80), 1)\nexcept OSError as e: print(e.errno)";
    assert_eq!(printed(&mut sandbox, code).await, "b'answer'\n101\n");
    assert_eq!(&answer.join().unwrap(), b"hi");
    sandbox.destroy().await.unwrap();
    closed.destroy().await.unwrap();
}

#[test]
fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |config| ContainerProvider::start(config).unwrap_err().to_string();
    let mut named = config(EngineKind::Crun, dir.path());
    named.image = Image::parse("some/image:1");
    assert!(refused(named).contains("keeps no images"));
    let mut nowhere = config(EngineKind::Docker, dir.path());
    nowhere.socket = Some("/no/such.sock".into());
    let why = refused(nowhere);
    assert!(
        why.contains("/no/such.sock") && why.contains("docker.io"),
        "{why}"
    );
    assert!(
        "lxc"
            .parse::<Choice>()
            .unwrap_err()
            .to_string()
            .contains("crun")
    );
    assert_eq!(Image::parse("host"), Image::Host);
    assert_eq!(Image::parse("/usr"), Image::Folder("/usr".into()));
}

/// Buffers of connections are bounded, too: without that they are memory which no limit counts.
#[tokio::test]
async fn buffers_of_connections_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let rows = provider.protections();
    let row = rows.iter().find(|p| p.name == "tcp memory").unwrap();
    assert!(row.enforced, "{row:?}");
    let mut spec = SandboxSpec {
        network: Network::Loopback,
        ..small()
    };
    spec.limits.open_files = 1024;
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let code = "import socket\nlistener = socket.socket()\nlistener.bind(('127.0.0.1', 0))\nlistener.listen(128)\n\
                kept, sent, piece = [], 0, bytes(1 << 16)\nfor _ in range(60):\n    \
                a = socket.create_connection(listener.getsockname())\n    b, _ = listener.accept()\n    \
                kept += [a, b]\n    a.setblocking(False)\n    try:\n        while True: sent += a.send(piece)\n    \
                except OSError: pass\nprint(sent >> 20)";
    let result = python(&mut sandbox, code).await;
    let mib: u64 = String::from_utf8_lossy(&result.stdout)
        .trim()
        .parse()
        .unwrap_or(0);
    // An eighth of 64 MiB, and what the kernel charges late.
    assert!(mib < 24, "{mib} MiB: {result:?}");
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn processors_are_shared_out() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(ContainerConfig {
        cpus: Some(0.25),
        ..config(EngineKind::Crun, dir.path())
    });
    let rows = provider.protections();
    let row = rows.iter().find(|p| p.name == "processors").unwrap();
    assert!(row.enforced && row.how.contains("0.25"), "{row:?}");
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let spin = "import time\nt = time.monotonic()\nwhile time.monotonic() - t < 1: pass";
    let result = python(&mut sandbox, spin).await;
    assert_eq!(result.ending, Ending::Exited { code: 0 });
    // A quarter of a second, and what its start took.
    assert!(result.usage.cpu_s < 0.7, "{:?}", result.usage);
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn containers_have_users_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut first = provider.acquire(&small()).await.unwrap();
    let uid = "import os; open('f', 'w').write('x'); print(os.getuid(), os.stat('f').st_uid)";
    let mut seen = vec![printed(&mut first, uid).await];
    let snapshot = first.snapshot().await.unwrap();
    for _ in 0..2 {
        let mut fork = provider.fork(&small(), &snapshot).await.unwrap();
        assert_eq!(printed(&mut fork, "print(open('f').read())").await, "x\n");
        seen.push(printed(&mut fork, uid).await);
        fork.destroy().await.unwrap();
    }
    for line in &seen {
        let (own, of_file) = line.trim().split_once(' ').unwrap();
        assert_eq!(own, of_file);
        assert!(own.parse::<u32>().unwrap() >= 2_000_000, "{own}");
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 3);
}

#[tokio::test]
async fn files_of_holes_that_are_too_large_for_a_snapshot_end_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let holes = "for i in range(3): open(f's{i}', 'wb').truncate(3 << 20)";
    printed(&mut sandbox, holes).await;
    let refused = sandbox.snapshot().await.unwrap_err();
    assert!(refused.to_string().contains("holes included"), "{refused}");
    let fewer = "import os; os.remove('s0'); os.remove('s1'); print('here')";
    assert_eq!(printed(&mut sandbox, fewer).await, "here\n");
    let snapshot = sandbox.snapshot().await.unwrap();
    let archive = provider.export(&snapshot).await.unwrap();
    assert!(archive.len() < 4096, "{}", archive.len());
    let back = provider.import(&archive, 4 << 20).await.unwrap();
    let mut fork = provider.fork(&small(), &back).await.unwrap();
    let look = "import os; print(os.path.getsize('s2'))";
    assert_eq!(printed(&mut fork, look).await, "3145728\n");
}

/// Control groups of containers that this process made.
fn own_groups() -> Vec<String> {
    let mine = format!("sinew-{}-", std::process::id());
    let listed = std::fs::read_dir("/sys/fs/cgroup")
        .into_iter()
        .flatten()
        .flatten();
    let below = listed.flat_map(|e| std::fs::read_dir(e.path()).into_iter().flatten().flatten());
    let names = below.map(|e| e.path().display().to_string());
    names.filter(|path| path.contains(&mine)).collect()
}

#[test]
fn containers_that_nobody_waits_for_leave_no_groups() {
    let dir = tempfile::tempdir().unwrap();
    // One of a run that is gone, with one below it.
    let folder = format!("/sys/fs/cgroup/pids/sinew-{}-1-0-c0", std::process::id());
    std::fs::create_dir_all(format!("{folder}/below")).unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    assert!(!Path::new(&folder).exists());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for pause_ms in [0, 5, 20, 50, 100, 300] {
        runtime.block_on(async {
            let spec = small();
            let pause = Duration::from_millis(pause_ms);
            // Given up on the way, or dropped where it is ready.
            let _ = tokio::time::timeout(pause, provider.acquire(&spec)).await;
        });
    }
    let held = runtime.block_on(provider.acquire(&small())).unwrap();
    assert!(!own_groups().is_empty());
    drop((held, provider));
    runtime.shutdown_timeout(Duration::from_secs(60));
    // A thread of the provider removes what runtimes that were given up have left.
    for _ in 0..600 {
        if own_groups().is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(own_groups(), [""; 0]);
}

/// A tar archive of a root with one static program.
fn busybox(folder: &Path) -> std::path::PathBuf {
    let root = folder.join("busybox");
    std::fs::create_dir_all(root.join("bin")).unwrap();
    std::fs::copy("/bin/busybox", root.join("bin/busybox"))
        .unwrap_or_else(|e| panic!("/bin/busybox: {e}; scripts/setup.sh installs busybox-static"));
    for name in ["sh", "cat", "echo", "true"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    let path = folder.join("busybox.tar");
    let mut builder = tar::Builder::new(std::fs::File::create(&path).unwrap());
    builder.follow_symlinks(false);
    builder.append_dir_all(".", &root).unwrap();
    builder.finish().unwrap();
    path
}

async fn shell(provider: &ContainerProvider) -> String {
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let asked = request(Program::Shell(
        "[ -e /usr ] || echo no system beside $(cat /proc/1/comm)".into(),
    ));
    let result = sandbox.exec(asked).await.unwrap();
    sandbox.destroy().await.unwrap();
    String::from_utf8_lossy(&result.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_runs_containers_behind_the_same_port() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    let of = |image| ContainerConfig {
        socket: Some(daemon.socket()),
        image,
        ..config(EngineKind::Docker, dir.path())
    };
    let missing = ContainerProvider::start(of(Image::Named("python:3".into()))).unwrap_err();
    assert!(
        missing.to_string().contains("none is ever pulled"),
        "{missing}"
    );
    // A root that the daemon imports, by its file and then by its name.
    let provider = start(of(Image::Archive(busybox(dir.path()))));
    assert_eq!(shell(&provider).await, "no system beside .agent\n");
    drop(provider);
    // The system folders of the host.
    let provider = start(of(Image::Host));
    let weak: Vec<_> = provider
        .protections()
        .iter()
        .filter(|p| !p.enforced)
        .cloned()
        .collect();
    assert!(weak.is_empty(), "{weak:?}");
    let spec = SandboxSpec {
        strict: true,
        ..small()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    assert_eq!(printed(&mut sandbox, "print(6 * 7)").await, "42\n");
    let bomb = "x = []\nwhile True: x.append(bytearray(1 << 20))";
    assert_eq!(python(&mut sandbox, bomb).await.ending, Ending::OutOfMemory);
    sandbox.write_file("x", b"kept").await.unwrap();
    let snapshot = sandbox.snapshot().await.unwrap();
    let mut fork = provider.fork(&spec, &snapshot).await.unwrap();
    assert_eq!(fork.read_file("x", 10).await.unwrap(), b"kept");
    fork.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn podman_runs_containers_behind_the_same_port() {
    let daemon = Daemon::podman();
    let dir = tempfile::tempdir().unwrap();
    let provider = start(ContainerConfig {
        socket: Some(daemon.socket()),
        ..config(EngineKind::Podman, dir.path())
    });
    let weak: Vec<_> = provider
        .protections()
        .iter()
        .filter(|p| !p.enforced)
        .map(|p| p.name.clone())
        .collect();
    // Hosts with version 1 of the groups have no namespace for them, which is reported.
    assert!(weak.iter().all(|name| name == "namespaces"), "{weak:?}");
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    assert_eq!(printed(&mut sandbox, "print(6 * 7)").await, "42\n");
    sandbox.write_file("x", b"kept").await.unwrap();
    let snapshot = sandbox.snapshot().await.unwrap();
    let mut fork = provider.fork(&small(), &snapshot).await.unwrap();
    assert_eq!(fork.read_file("x", 10).await.unwrap(), b"kept");
    let bomb = "x = []\nwhile True: x.append(bytearray(1 << 20))";
    assert_eq!(python(&mut fork, bomb).await.ending, Ending::OutOfMemory);
    fork.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
}
