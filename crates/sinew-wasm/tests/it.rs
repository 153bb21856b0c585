//! Interpreters in workers: abilities and limits of programs.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "it/files.rs"]
mod files;

use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, Network, ProcessConfig, ProcessProvider,
    Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use sinew_wasm::{Manifest, WasmConfig, WasmProvider};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn modules() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/wasm");
    assert!(
        folder.is_dir(),
        "no interpreters in .cache/wasm: run scripts/setup.sh"
    );
    folder.canonicalize().unwrap()
}

fn provider() -> WasmProvider {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_sinew-wasm-worker"));
    let config = WasmConfig::new(modules(), program);
    let mut below = ProcessConfig::new("");
    below.shows = config.shows().unwrap();
    let below = ProcessProvider::start(below).unwrap();
    WasmProvider::new(Arc::new(below), config).unwrap()
}

async fn sandbox(provider: &WasmProvider) -> Box<dyn Sandbox> {
    provider.acquire(&SandboxSpec::default()).await.unwrap()
}

fn python(code: &str) -> Program {
    Program::Python(code.into())
}

fn argv(list: &[&str]) -> Program {
    Program::Argv(list.iter().map(ToString::to_string).collect())
}

fn request(program: Program, seconds: f64) -> ExecRequest {
    ExecRequest::new(program, Duration::from_secs_f64(seconds))
}

async fn run(sandbox: &mut Box<dyn Sandbox>, program: Program) -> ExecResult {
    sandbox.exec(request(program, 60.0)).await.unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

const OK: Ending = Ending::Exited { code: 0 };

#[tokio::test]
async fn three_interpreters_run_programs() {
    let provider = provider();
    let mut place = sandbox(&provider).await;
    let programs = [
        (
            python("import sys, json; print(json.dumps([6 * 7, sys.platform]))"),
            "[42, \"wasi\"]\n",
        ),
        (
            argv(&["python", "-c", "import sys; print(sys.argv)", "a", "b"]),
            "['-c', 'a', 'b']\n",
        ),
        (
            argv(&["qjs", "-e", "console.log([1, 2, 3].map(x => x * x).join())"]),
            "1,4,9\n",
        ),
        (argv(&["micropython", "-c", "print(6 * 7)"]), "42\n"),
    ];
    for (program, wanted) in programs {
        let result = run(&mut place, program.clone()).await;
        assert_eq!(
            (result.ending, text(&result.stdout)),
            (OK, wanted),
            "{program:?}: {}",
            text(&result.stderr)
        );
        assert!(result.usage.peak_memory_bytes > 100_000 && result.usage.cpu_s > 0.0);
    }
    assert!(
        provider
            .protections()
            .iter()
            .any(|p| p.name == "worker: seccomp" && p.enforced)
    );
}

#[tokio::test]
async fn programs_get_input_environment_and_codes() {
    let provider = provider();
    let spec = SandboxSpec {
        env: vec![("A".into(), "1 \"ü\" \\n'".into())],
        ..SandboxSpec::default()
    };
    let mut place = provider.acquire(&spec).await.unwrap();
    let code = "import os, sys; print(os.environ['A'] + os.environ['B'], sys.stdin.read(), os.environ.get('HOME'))\nsys.exit(3)";
    for program in [python(code), argv(&["python", "-c", code])] {
        let mut ask = request(program, 60.0);
        ask.stdin = b"input".to_vec();
        let options = ExecOptions {
            env: vec![("B".into(), "2".into())],
            ..ExecOptions::default()
        };
        let result = place.exec_with(ask, options).await.unwrap();
        assert_eq!(
            text(&result.stdout),
            "1 \"ü\" \\n'2 input /work\n",
            "{}",
            text(&result.stderr)
        );
        assert_eq!(result.ending, Ending::Exited { code: 3 });
    }
    let failed = run(&mut place, python("def f():\n    1/0\nf()")).await;
    assert_eq!(failed.ending, Ending::Exited { code: 1 });
    let trace = text(&failed.stderr);
    assert!(
        trace.contains("ZeroDivisionError")
            && trace.contains("line 2, in f")
            && !trace.contains("job"),
        "{trace}"
    );
    let wrong = run(&mut place, python("x = (")).await;
    assert!(
        text(&wrong.stderr).contains("SyntaxError") && wrong.ending == Ending::Exited { code: 1 }
    );
    for program in [Program::Shell("ls".into()), argv(&["/bin/sh"]), argv(&[])] {
        let refused = place.exec(request(program, 1.0)).await.unwrap_err();
        assert!(
            matches!(
                refused,
                SandboxError::Request {
                    field: "program",
                    ..
                }
            ),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn files_stay_and_can_be_frozen_forked_and_reset() {
    let provider = provider();
    let mut place = sandbox(&provider).await;
    place.write_file("data/in.txt", b"one").await.unwrap();
    let code = "import os\nos.makedirs('/work/out'); s = open('data/in.txt').read()\n\
     open('/work/out/x', 'w').write(s * 2)\n\
                open('/tmp/t', 'w').write('t'); os.rename('data/in.txt', 'data/was.txt'); print(sorted(os.listdir('/work')))";
    let result = run(&mut place, python(code)).await;
    assert_eq!(
        text(&result.stdout),
        "['data', 'out', 'tmp']\n",
        "{}",
        text(&result.stderr)
    );
    assert_eq!(place.read_file("out/x", 100).await.unwrap(), b"oneone");
    let snapshot = place.snapshot().await.unwrap();
    run(&mut place, python("open('out/x', 'a').write('!')")).await;
    let mut fork = provider
        .fork(&SandboxSpec::default(), &snapshot)
        .await
        .unwrap();
    let read = python(
        "import os; print(open('out/x').read(), os.path.exists('/tmp/t'), os.listdir('data'))",
    );
    assert_eq!(
        text(&run(&mut fork, read.clone()).await.stdout),
        "oneone False ['was.txt']\n"
    );
    assert_eq!(
        text(&run(&mut place, read).await.stdout),
        "oneone! False ['was.txt']\n"
    );
    fork.write_file("more", b"m").await.unwrap();
    fork.reset().await.unwrap();
    assert!(fork.read_file("more", 10).await.is_err() && fork.read_file("out/x", 10).await.is_ok());
    let stats = place.stats().await.unwrap();
    assert_eq!((stats.executions, stats.file_bytes), (3, 10));
    for path in [
        "../x",
        "/etc/passwd",
        "",
        "a/../b",
        "tmp/x",
        "out/x/y",
        "out",
    ] {
        assert!(place.write_file(path, b"x").await.is_err(), "{path}");
        assert!(place.read_file(path, 10).await.is_err(), "{path}");
    }
    assert!(place.write_file("big", &vec![0; 17 << 20]).await.is_err());
    assert!(place.read_file("out/x", 3).await.is_err());
}

#[tokio::test]
async fn all_endings_are_reported() {
    let provider = provider();
    let mut spec = SandboxSpec::default();
    spec.limits = Limits {
        memory_bytes: 64 << 20,
        output_bytes: 1000,
        cpu_s: 2.0,
        ..spec.limits
    };
    let mut place = provider.acquire(&spec).await.unwrap();
    let cases = [
        (python("while True: pass"), 0.5, Ending::Timeout),
        (argv(&["qjs", "-e", "for (;;) {}"]), 0.5, Ending::Timeout),
        (
            argv(&["micropython", "-c", "while True: pass"]),
            0.5,
            Ending::Timeout,
        ),
        (
            python("import time; time.sleep(1000)"),
            0.5,
            Ending::Timeout,
        ),
        (python("while True: pass"), 300.0, Ending::Timeout),
        (
            python("x = []\nwhile True: x.append(bytearray(1 << 20))"),
            60.0,
            Ending::OutOfMemory,
        ),
        (python("b'x' * (1 << 30)"), 60.0, Ending::OutOfMemory),
        (
            python("while True: print('x' * 100)"),
            60.0,
            Ending::OutputLimit,
        ),
        (
            python("import os; os._exit(7)"),
            60.0,
            Ending::Exited { code: 7 },
        ),
        (
            python("import os; os.abort()"),
            60.0,
            Ending::Signalled { signal: 6 },
        ),
    ];
    for (program, seconds, wanted) in cases {
        let began = Instant::now();
        let result = place.exec(request(program.clone(), seconds)).await.unwrap();
        assert_eq!(
            result.ending,
            wanted,
            "{program:?}: {}",
            text(&result.stderr)
        );
        assert!(result.stdout.len() <= 1000 && result.truncated == (wanted == Ending::OutputLimit));
        // Two seconds of CPU time end a program long before its deadline of 300 s.
        assert!(began.elapsed() < Duration::from_secs(200), "{program:?}");
    }
    // The same worker continues.
    assert_eq!(run(&mut place, python("print(1)")).await.ending, OK);
}

#[tokio::test]
async fn programs_cannot_access_the_host() {
    let provider = provider();
    let mut place = sandbox(&provider).await;
    let marker = std::env::temp_dir().join(format!("sinew-wasm-marker-{}", std::process::id()));
    std::fs::write(&marker, "host").unwrap();
    let code = format!(
        "import os\nfound = []\n\
         for p in ['/etc/passwd', '/proc/self/environ', '/opt/sinew-wasm', '/opt/sinew-bin', '/dev/job',\n\
         '../../../../etc/passwd', '/work/../../etc/hosts', '/root', '/home', '/sys', {marker:?}]:\n\
         \x20   try:\n        os.stat(p); found.append(p)\n    except OSError: pass\n\
         try:\n    os.symlink('/etc/passwd', 'link'); found.append('symlink')\nexcept OSError: pass\n\
         try:\n    open('link').read(); found.append('link')\nexcept OSError: pass\n\
         print(found, sorted(os.environ))"
    );
    let result = run(&mut place, python(&code)).await;
    std::fs::remove_file(&marker).unwrap();
    assert_eq!(
        text(&result.stdout),
        "[] ['HOME', 'LANG', 'PWD', 'TMPDIR']\n",
        "{}",
        text(&result.stderr)
    );
    let code = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 4000), 1); print('out')\nexcept Exception as e: print('no')";
    let result = run(&mut place, python(code)).await;
    assert!(
        !text(&result.stdout).contains("out"),
        "{}",
        text(&result.stdout)
    );
    let result = run(
        &mut place,
        argv(&[
            "micropython",
            "-c",
            "import host; print(host.call('x', 'y'))",
        ]),
    )
    .await;
    assert_ne!(result.ending, Ending::SandboxDied);
    let network = SandboxSpec {
        network: Network::Loopback,
        ..SandboxSpec::default()
    };
    assert!(matches!(
        provider.acquire(&network).await,
        Err(SandboxError::Unsupported { .. })
    ));
}

#[tokio::test]
async fn executions_leave_no_state() {
    let provider = provider();
    let mut first = sandbox(&provider).await;
    let stain = "import builtins, sys, os\n\
     builtins.print = None; sys.modules['json'] = None; os.environ['STAIN'] = '1'\n\
                 open('/tmp/stain', 'w').write('x'); open('/work/stain', 'w').write('x')";
    let mut seen = std::collections::BTreeSet::new();
    let look = "import os, json, random; print(os.path.exists('/tmp/stain'), os.path.exists('stain'), 'STAIN' in os.environ, random.getrandbits(64), hash('a'))";
    for _ in 0..6 {
        assert_eq!(run(&mut first, python(stain)).await.ending, OK);
        let mut second = sandbox(&provider).await;
        let result = run(&mut second, python(look)).await;
        let (clean, random) = text(&result.stdout)
            .trim()
            .split_at("False False False".len());
        assert_eq!(clean, "False False False", "{}", text(&result.stderr));
        assert!(
            seen.insert(random.to_string()),
            "clones draw the same numbers"
        );
    }
    let own = run(
        &mut first,
        python("import os; print(os.path.exists('/tmp/stain'), os.path.exists('stain'))"),
    )
    .await;
    assert_eq!(text(&own.stdout), "False True\n");
}

#[tokio::test]
async fn output_is_streamed() {
    let provider = provider();
    let streamed = || {
        let (sender, chunks) = tokio::sync::mpsc::channel(4);
        let options = ExecOptions {
            output: Some(sender),
            ..ExecOptions::default()
        };
        (options, chunks)
    };
    let mut endless = sandbox(&provider).await;
    let code = "import time\nprint('one', flush=True)\ntime.sleep(600)";
    let (options, mut chunks) = streamed();
    tokio::select! {
        ended = endless.exec_with(request(python(code), 600.0), options) => panic!("{ended:?}"),
        first = chunks.recv() => assert_eq!(first.unwrap().bytes, b"one\n"),
    }
    let mut place = sandbox(&provider).await;
    let code = "import sys\nprint('one', flush=True)\nprint('two', file=sys.stderr, flush=True)";
    let (options, mut chunks) = streamed();
    let ran = place.exec_with(request(python(code), 60.0), options);
    let result = ran.await.unwrap();
    for line in [b"one\n", b"two\n"] {
        assert_eq!(chunks.recv().await.unwrap().bytes, line);
    }
    assert_eq!(
        (text(&result.stdout), text(&result.stderr)),
        ("one\n", "two\n")
    );
}

/// True if a process is a descendant of this test.
fn ours(mut pid: i32) -> bool {
    let me = std::process::id() as i32;
    for _ in 0..16 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // State and parent follow the name in parentheses, which may contain any characters.
        let rest = stat.rsplit(") ").next().unwrap_or_default();
        match rest.split(' ').nth(1).and_then(|p| p.parse::<i32>().ok()) {
            Some(parent) if parent == me => return true,
            Some(parent) if parent > 1 => pid = parent,
            _ => return false,
        }
    }
    false
}

/// Worker processes of this test.
fn workers() -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.windows(19).any(|w| w == b"--sinew-wasm-worker") {
            let pid = entry.file_name().to_string_lossy().parse::<i32>();
            found.extend(pid.ok().filter(|&pid| ours(pid)));
        }
    }
    found
}

#[tokio::test]
async fn killed_workers_are_replaced_and_dropped_providers_leave_none() {
    let provider = provider();
    let mut place = sandbox(&provider).await;
    place.write_file("kept", b"x").await.unwrap();
    assert_eq!(run(&mut place, python("print(1)")).await.ending, OK);
    let mine = workers();
    assert!(!mine.is_empty());
    let running = tokio::spawn(async move {
        let result = place
            .exec(request(python("while True: pass"), 60.0))
            .await
            .unwrap();
        (place, result)
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    for pid in &mine {
        std::process::Command::new("kill")
            .args(["-9", &pid.to_string()])
            .status()
            .unwrap();
    }
    let (mut place, result) = running.await.unwrap();
    assert_eq!(result.ending, Ending::SandboxDied);
    assert_eq!(
        text(
            &run(&mut place, python("print(open('kept').read())"))
                .await
                .stdout
        ),
        "x\n"
    );
    drop((place, provider));
    for _ in 0..1200 {
        if workers().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("workers are left");
}

#[test]
fn changed_modules_are_not_loaded() {
    let (_, folder) = Manifest::load(&modules()).unwrap();
    let copy = std::env::temp_dir().join(format!("sinew-wasm-{}", std::process::id()));
    let set = copy.join("set");
    std::fs::create_dir_all(&set).unwrap();
    for entry in std::fs::read_dir(&folder).unwrap().flatten() {
        let bytes = std::fs::read(entry.path()).unwrap();
        std::fs::write(set.join(entry.file_name()), bytes).unwrap();
    }
    assert!(Manifest::load(&copy).is_ok());
    let mut bytes = std::fs::read(set.join("qjs.cwasm")).unwrap();
    let last = bytes.len() / 2;
    bytes[last] ^= 1;
    std::fs::write(set.join("qjs.cwasm"), bytes).unwrap();
    let changed = Manifest::load(&copy).unwrap_err().to_string();
    let none = Manifest::load(&std::env::temp_dir().join("none-here"))
        .unwrap_err()
        .to_string();
    std::fs::remove_dir_all(&copy).unwrap();
    assert!(
        changed.contains("qjs.cwasm") && none.contains("scripts/wasm_modules.py"),
        "{changed} {none}"
    );
}

#[tokio::test]
async fn forks_have_different_random_numbers() {
    let provider = provider();
    let code =
        python("import random, uuid, os\nprint(random.random(), uuid.uuid4(), os.urandom(4))");
    let mut seen = Vec::new();
    for _ in 0..4 {
        let mut place = sandbox(&provider).await;
        let result = run(&mut place, code.clone()).await;
        seen.push(text(&result.stdout).to_string());
    }
    for part in 0..3 {
        let numbers: std::collections::BTreeSet<_> =
            seen.iter().map(|s| s.split(' ').nth(part)).collect();
        assert_eq!(numbers.len(), seen.len(), "{seen:?}");
    }
}

#[tokio::test]
async fn programs_larger_than_a_worker_are_refused() {
    let provider = provider();
    let mut spec = SandboxSpec::default();
    spec.limits.memory_bytes = 2 << 30;
    let mut large = provider.acquire(&spec).await.unwrap();
    let refused = large
        .exec(request(python("x = 1"), 60.0))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("no memory"), "{refused}");
    spec.limits.memory_bytes = 1 << 30;
    let mut place = provider.acquire(&spec).await.unwrap();
    assert_eq!(run(&mut place, python("x = 1")).await.ending, OK);
}
