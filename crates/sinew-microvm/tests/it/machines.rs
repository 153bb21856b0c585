//! The sandbox port at the level of machines.

use sinew_microvm::{Accel, MicrovmConfig, MicrovmProvider};
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, OutputStream, Program, Sandbox,
    SandboxError, SandboxProvider, SandboxSpec,
};
use std::path::Path;
use std::time::Duration;

fn config() -> MicrovmConfig {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/microvm");
    let mut config = MicrovmConfig::new(folder);
    config.accel = Some(Accel::Tcg);
    config
}

fn provider() -> MicrovmProvider {
    MicrovmProvider::start(config()).expect("run scripts/setup.sh: it installs QEMU and an image")
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        limits: Limits {
            // A guest that is emulated counts what other programs of the host take as its own.
            cpu_s: 60.0,
            memory_bytes: 64 << 20,
            processes: 16,
            output_bytes: 64 << 10,
            work_bytes: 4 << 20,
            open_files: 32,
        },
        ..SandboxSpec::default()
    }
}

fn request(program: Program, seconds: u64) -> ExecRequest {
    ExecRequest::new(program, Duration::from_secs(seconds))
}

async fn python(sandbox: &mut dyn Sandbox, code: &str) -> ExecResult {
    let request = request(Program::Python(code.into()), 120);
    sandbox.exec(request).await.expect("an execution")
}

fn printed(result: &ExecResult) -> String {
    assert_eq!(
        result.ending,
        Ending::Exited { code: 0 },
        "{}",
        String::from_utf8_lossy(&result.stderr)
    );
    String::from_utf8_lossy(&result.stdout).trim().to_owned()
}

#[tokio::test]
async fn programs_files_and_endings() {
    let provider = provider();
    let spec = spec();
    let mut sandbox = provider.acquire(&spec).await.expect("a machine");
    assert_eq!(
        printed(&python(sandbox.as_mut(), "print(6 * 7)").await),
        "42"
    );
    let shell = request(Program::Shell("echo out; echo err >&2; exit 3".into()), 120);
    let result = sandbox.exec(shell).await.expect("a script");
    assert_eq!(result.ending, Ending::Exited { code: 3 });
    assert_eq!(
        (result.stdout.as_slice(), result.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
}

#[tokio::test]
async fn interpreters_wait_again_and_know_nothing_of_earlier_programs() {
    let provider = provider();
    let mut sandbox = provider.acquire(&spec()).await.expect("a machine");
    let place = sandbox.as_mut();
    let code = "import builtins, json, os, sys\njson.x = builtins.y = sys.argv = 1\nos.environ['Z'] = '1'\nos.umask(0)\nprint(1)";
    assert_eq!(printed(&python(place, code).await), "1");
    // An interpreter that waited has loaded modules in advance; a new one has not loaded this one.
    let code = "import sys\nwaited = 'statistics' in sys.modules\nimport builtins, json, os\nprint(waited, hasattr(json, 'x'), hasattr(builtins, 'y'), 'Z' in os.environ, sys.argv, oct(os.umask(0)), os.getppid(), len(os.listdir('/proc/self/fd')))";
    let mut said = String::new();
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        said = printed(&python(place, code).await);
        if said.starts_with("True") {
            break;
        }
    }
    assert_eq!(said, "True False False False ['-c'] 0o77 1 4");
    // Its user can end it, and nothing else: the next program starts without it.
    for signal in ["SIGKILL", "SIGSTOP"] {
        let code = format!("import os, signal\nprint(2)\nos.kill(-1, signal.{signal})");
        assert_eq!(printed(&python(place, &code).await), "2");
        assert_eq!(printed(&python(place, "print(3)").await), "3");
    }
    sandbox.destroy().await.expect("an end");
}

#[tokio::test]
async fn stdin_environment_streams_and_files() {
    let provider = provider();
    let spec = spec();
    let mut sandbox = provider.acquire(&spec).await.expect("a machine");
    sandbox
        .write_file("a/b.txt", b"first")
        .await
        .expect("write");
    let (sender, mut pieces) = tokio::sync::mpsc::channel(64);
    let code = "import os, sys\nprint(open('a/b.txt').read(), os.environ['X'], len(sys.stdin.read()), flush=True)\nprint('e', file=sys.stderr)\nopen('out', 'w').write('made')";
    let mut request = request(Program::Python(code.into()), 120);
    request.stdin = vec![b'x'; 100_000];
    let options = ExecOptions {
        env: vec![("X".into(), "y".into())],
        output: Some(sender),
        ..ExecOptions::default()
    };
    let result = sandbox.exec_with(request, options).await.expect("an end");
    assert_eq!(printed(&result), "first y 100000");
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(piece) = pieces.recv().await {
        match piece.stream {
            OutputStream::Stdout => stdout.extend(piece.bytes),
            OutputStream::Stderr => stderr.extend(piece.bytes),
        }
    }
    assert_eq!((stdout, stderr), (result.stdout.clone(), b"e\n".to_vec()));
    let made = sandbox.read_file("out", 100).await.expect("read");
    assert_eq!(made, b"made");
    for path in ["../etc/passwd", "/etc/passwd", "missing"] {
        assert!(sandbox.read_file(path, 100).await.is_err(), "{path}");
    }
    let stats = sandbox.stats().await.expect("stats");
    assert_eq!(stats.executions, 1);
    assert!(stats.file_bytes > 0 && stats.memory_bytes > 0 && result.usage.cpu_s > 0.0);
}

#[tokio::test]
async fn limits_end_programs_precisely() {
    let provider = provider();
    let spec = spec();
    let mut sandbox = provider.acquire(&spec).await.expect("a machine");
    let cases = [
        (
            "x = []\nwhile True: x.append(bytearray(b'x') * (1 << 20))",
            Ending::OutOfMemory,
        ),
        ("while True: print('x' * 1000)", Ending::OutputLimit),
        (
            "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(9)",
            Ending::TooManyProcesses,
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            Ending::Signalled { signal: 11 },
        ),
        ("import sys; sys.exit(7)", Ending::Exited { code: 7 }),
    ];
    for (code, ending) in cases {
        let result = python(sandbox.as_mut(), code).await;
        let errors = String::from_utf8_lossy(&result.stderr);
        assert_eq!(result.ending, ending, "{code}: {errors}");
    }
    // CPU time of the interpreter before the program came is not the program's.
    let works = "import time\nbegan = time.process_time()\nwhile time.process_time() - began < 0.5: pass\nprint(time.process_time())";
    let result = python(sandbox.as_mut(), works).await;
    let counted: f64 = printed(&result).parse().expect("seconds");
    let cpu_s = result.usage.cpu_s;
    assert!(
        (counted - 0.1..counted + 2.5).contains(&cpu_s),
        "{cpu_s} s, {counted} s"
    );
    let mut spin = request(Program::Python("while True: pass".into()), 0);
    spin.deadline = Duration::from_millis(400);
    let result = sandbox.exec(spin).await.expect("an end");
    assert_eq!(result.ending, Ending::Timeout);
    assert_eq!(printed(&python(sandbox.as_mut(), "print(1)").await), "1");
}

#[tokio::test]
async fn snapshots_and_forks_carry_memory_and_files() {
    let provider = provider();
    let spec = spec();
    let mut first = provider.acquire(&spec).await.expect("a machine");
    first.write_file("f", b"before").await.expect("write");
    // A file in only the guest's memory, and one that only the first user sees.
    let snapshot = first.snapshot().await.expect("a snapshot");
    first.write_file("f", b"after").await.expect("write");
    let mut fork = provider.fork(&spec, &snapshot).await.expect("a fork");
    assert_eq!(fork.read_file("f", 100).await.expect("read"), b"before");
    assert_eq!(first.read_file("f", 100).await.expect("read"), b"after");
    fork.write_file("g", b"fork").await.expect("write");
    let deeper = fork.snapshot().await.expect("a snapshot of a fork");
    fork.reset().await.expect("reset");
    assert_eq!(fork.read_file("f", 100).await.expect("read"), b"before");
    assert!(fork.read_file("g", 100).await.is_err());
    let mut last = provider
        .fork(&spec, &deeper)
        .await
        .expect("a fork of a fork");
    assert_eq!(last.read_file("g", 100).await.expect("read"), b"fork");
    assert_eq!(
        printed(&python(last.as_mut(), "print(open('f').read())").await),
        "before"
    );
    // The snapshot becomes an archive that any level takes.
    let archive = provider.export(&snapshot).await.expect("an archive");
    let again = provider
        .import(&archive, 1 << 20)
        .await
        .expect("a snapshot");
    let wide = SandboxSpec::default();
    let mut placed = provider.fork(&wide, &again).await.expect("a fork");
    assert_eq!(placed.read_file("f", 100).await.expect("read"), b"before");
    assert_eq!(archive, provider.export(&again).await.expect("an archive"));
    first.reset().await.expect("reset");
    assert!(first.read_file("f", 100).await.is_err());
}

#[tokio::test]
async fn what_cannot_be_had_is_refused() {
    let mut config = config();
    config.max_live = 1;
    config.acquire_timeout = Duration::from_millis(50);
    let provider = MicrovmProvider::start(config.clone()).expect("a provider");
    let mut spec = spec();
    let one = provider.acquire(&spec).await.expect("a machine");
    assert!(matches!(
        provider.acquire(&spec).await.err(),
        Some(SandboxError::Busy { limit: 1, .. })
    ));
    one.destroy().await.expect("destroyed");
    spec.limits.memory_bytes = 8 << 30;
    assert!(matches!(
        provider.acquire(&spec).await.err(),
        Some(SandboxError::Request {
            field: "limits.memory_bytes",
            ..
        })
    ));
    for protection in provider.protections().iter() {
        assert!(!protection.how.is_empty(), "{}", protection.name);
    }
    let rows = provider.protections();
    let inside = rows
        .iter()
        .find(|p| p.name == "guest_walls")
        .expect("a row");
    assert!(
        inside.enforced && inside.how.contains("seen inside"),
        "{inside:?}"
    );
    config.qemu = "/nonexistent/qemu".into();
    let missing = MicrovmProvider::start(config.clone()).expect_err("no QEMU");
    assert!(missing.to_string().contains("install qemu-system-x86"));
    config.qemu = "/bin/true".into();
    let broken = MicrovmProvider::start(config).expect_err("not QEMU");
    assert!(matches!(broken, SandboxError::Unavailable { .. }));
}

/// Started by the next test, which kills it.
#[tokio::test]
async fn server_that_is_killed() {
    if std::env::var_os("SINEW_MICROVM_KILLED").is_none() {
        return;
    }
    let provider = provider();
    let mut kept = Vec::new();
    for _ in 0..2 {
        kept.push(provider.acquire(&spec()).await.expect("a machine"));
    }
    std::fs::write(std::env::var("SINEW_MICROVM_KILLED").expect("a path"), "up").expect("write");
    tokio::time::sleep(Duration::from_secs(60)).await;
}

fn children_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|p| {
        let stat = std::fs::read_to_string(format!("/proc/{p}/stat")).unwrap_or_default();
        let after = stat.rsplit(')').next().unwrap_or_default();
        after.split_whitespace().nth(1) == Some(&pid.to_string())
    })
    .collect()
}

#[tokio::test]
async fn a_killed_server_leaves_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let up = folder.path().join("up");
    let mut server = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "machines::server_that_is_killed"])
        .env("SINEW_MICROVM_KILLED", &up)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("a server");
    for _ in 0..2400 {
        if up.exists() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(up.exists(), "the machines of the server are not up");
    let pid = server.id();
    let monitors = children_of(pid);
    assert_eq!(monitors.len(), 2, "each machine has a monitor");
    server.kill().expect("kill");
    server.wait().expect("wait");
    for _ in 0..3000 {
        if monitors
            .iter()
            .all(|p| !Path::new(&format!("/proc/{p}")).exists())
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for monitor in &monitors {
        assert!(!Path::new(&format!("/proc/{monitor}")).exists());
    }
    // Folders and groups of the dead are removed by the next server.
    let _next = provider();
    let tag = format!("sinew-vm-{pid}-");
    for place in [
        "/tmp",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/pids",
        "/sys/fs/cgroup",
    ] {
        let left = std::fs::read_dir(place).into_iter().flatten().flatten();
        let mut left = left.filter_map(|e| e.file_name().into_string().ok());
        assert!(!left.any(|name| name.starts_with(&tag)), "{place}");
    }
}
