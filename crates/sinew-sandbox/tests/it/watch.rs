//! Supervision of running programs: the spawner and the zygote, CPU time of all processes together, readers
//! of output. It also covers effects of a program on the place of the next one.

use crate::{
    OK, SOON_MS, children, exec, groups, provider, python, small, spawner_pid, steady, text, with,
};
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, Limits, Network, Pool, Program, SandboxError,
    SandboxProvider, SandboxSpec,
};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

fn signal(signal: &str, pid: u32) {
    let mut command = std::process::Command::new("kill");
    command.args([&format!("-{signal}"), &pid.to_string()]);
    assert!(command.status().unwrap().success());
}

/// The spawner proper: the first process of its PID namespace.
fn inner() -> u32 {
    children(spawner_pid())[0]
}

fn command_line(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// The interpreter that the forks come from: only it has its program as an argument and no thread of a
/// sandbox.
fn zygote() -> u32 {
    let all = children(inner());
    let zygote = |pid: &u32| command_line(*pid).contains("'<zygote>'") && !in_a_sandbox(*pid);
    all.into_iter().find(zygote).unwrap()
}

/// Whether it is in another PID namespace than the spawner.
fn in_a_sandbox(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|l| l.strip_prefix("NSpid:"));
    ids.unwrap_or_default().split_whitespace().count() > 2
}

fn zombies(parent: u32) -> usize {
    let dead = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains(") Z ")
    };
    children(parent).iter().filter(|pid| dead(pid)).count()
}

#[tokio::test]
async fn a_dead_spawner_is_started_again_and_health_says_so() {
    let provider = Arc::new(provider());
    let pool = Pool::new(
        Arc::<sinew_sandbox::ProcessProvider>::clone(&provider),
        steady(2),
    )
    .unwrap();
    assert_eq!(pool.health(), Ok(()));
    let mut kept = provider.acquire(&small()).await.unwrap();
    let snapshot = kept.snapshot().await.unwrap();
    let mut pooled = pool.acquire(&small()).await.unwrap();
    python(pooled.as_mut(), "print(1)").await;
    while pool.stats().ready < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..2 {
        let tag = spawner_pid();
        signal("KILL", inner());
        let mut fresh = provider.acquire(&small()).await;
        // One request may have been under way when it died.
        if matches!(fresh, Err(SandboxError::Died(_))) {
            fresh = provider.acquire(&small()).await;
        }
        let mut fresh = fresh.unwrap();
        assert_eq!(
            text(&python(fresh.as_mut(), "print(42)").await.stdout),
            "42\n"
        );
        assert_eq!((provider.health(), pool.health()), (Ok(()), Ok(())));
        assert_eq!(
            groups(&format!("sinew-{tag}-")),
            0,
            "groups of the dead one"
        );
        assert!(kept.is_dead() && !fresh.is_dead());
    }
    for _ in 0..3 {
        let mut sandbox = pool.acquire(&small()).await.unwrap();
        assert_eq!(
            text(&python(sandbox.as_mut(), "print(7)").await.stdout),
            "7\n"
        );
    }
    let died = |e: &SandboxError| matches!(e, SandboxError::Died(_));
    let error = provider.fork(&small(), &snapshot).await.err().unwrap();
    assert!(died(&error), "{error}");
    let request = ExecRequest::new(Program::Python("print(1)".into()), Duration::from_secs(5));
    let error = kept.exec(request).await.unwrap_err();
    assert!(died(&error), "{error}");
}

#[tokio::test]
async fn a_spawner_that_cannot_be_started_again_is_reported_and_tried_again() {
    let folder = std::env::temp_dir().join(format!("sinew-watch-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (script, broken) = (folder.join("spawner"), folder.join("broken"));
    let real = folder.join("jail");
    std::fs::write(&real, sinew_sandbox::JAIL).unwrap();
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o755)).unwrap();
    let lines = format!(
        "#!/bin/sh\n[ -e {} ] && exit 3\nexec {} \"$@\"\n",
        broken.display(),
        real.display()
    );
    std::fs::write(&script, lines).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let provider = with(|config| config.spawner = Some(script));
    std::fs::write(&broken, "").unwrap();
    signal("KILL", inner());
    let why = loop {
        match provider.health() {
            Err(why) if why.to_string().contains("could not be started again") => break why,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let refused = provider.acquire(&small()).await.err().unwrap();
    let SandboxError::Unavailable { reason, .. } = &refused else {
        panic!("{refused}");
    };
    assert!(
        reason.contains("could not be started again"),
        "{reason}; {why}"
    );
    std::fs::remove_file(&broken).unwrap();
    while provider.health().is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    assert_eq!(python(sandbox.as_mut(), "print(1)").await.ending, OK);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn a_stopped_or_killed_zygote_is_replaced_and_its_program_runs() {
    // Every program asks the zygote if no interpreters wait.
    let provider = with(|config| config.warm_python = false);
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let run = |n: u32| Program::Python(format!("print({n})"));
    assert_eq!(exec(sandbox.as_mut(), run(0), SOON_MS).await.ending, OK);
    let pid = inner();
    for (n, with) in [(1, "STOP"), (2, "KILL")] {
        let before = zygote();
        signal(with, before);
        let result = exec(sandbox.as_mut(), run(n), 60_000).await;
        assert_eq!(
            (result.ending, text(&result.stdout)),
            (OK, format!("{n}\n"))
        );
        assert_ne!(zygote(), before);
    }
    for _ in 0..6000 {
        if zombies(pid) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{} children were not reaped", zombies(pid));
}

#[tokio::test]
async fn cpu_time_is_that_of_all_processes_and_bounded_for_them_together() {
    if groups_count_cpu() {
        let provider = provider();
        let spec = SandboxSpec {
            limits: Limits {
                cpu_s: 1.0,
                ..small().limits
            },
            ..small()
        };
        let mut sandbox = provider.acquire(&spec).await.unwrap();
        // Six processes, none of which takes a second.
        let burn = "import os, time
for _ in range(5):
    if os.fork() == 0: break
while time.process_time() < 0.8: pass
while True: time.sleep(1)";
        for program in [
            Program::Python(burn.into()),
            Program::Argv(vec!["/usr/bin/python3".into(), "-c".into(), burn.into()]),
        ] {
            let result = exec(sandbox.as_mut(), program, 60_000).await;
            assert_eq!(result.ending, Ending::Timeout);
            // All of them would take 4.8 s; the look at what they took can be late.
            let spent = result.usage.cpu_s;
            assert!((1.0..4.0).contains(&spent), "{spent} s");
        }
        // Children that nobody waits for, which the kernel reaps or an orphan's parent.
        for (orphan, least) in [
            (
                "import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = os.fork()
if child == 0:
    while time.process_time() < 0.4: pass
    os._exit(0)
try: os.waitpid(child, 0)
except OSError: pass",
                0.4,
            ),
            (
                "import os, time
r, w = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        while time.process_time() < 0.4: pass
        os.write(w, b'x')
    os._exit(0)
os.wait()
os.read(r, 1)",
                0.4,
            ),
        ] {
            let result = python(sandbox.as_mut(), orphan).await;
            assert_eq!(result.ending, OK, "{}", text(&result.stderr));
            let spent = result.usage.cpu_s;
            assert!((least..1.0).contains(&spent), "{spent} s");
        }
        let idle = python(sandbox.as_mut(), "print(1)").await;
        assert!(idle.usage.cpu_s < 0.4, "each counts from zero");
    }
    let own = provider();
    let row = own.protections();
    let row = row.iter().find(|p| p.name == "cpu time").unwrap();
    assert_eq!(row.enforced, groups_count_cpu(), "{row:?}");
}

fn groups_count_cpu() -> bool {
    let v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers");
    std::path::Path::new("/sys/fs/cgroup/cpuacct/cpuacct.usage").exists() || v2.exists()
}

#[tokio::test]
async fn what_a_program_does_to_its_work_folder_is_no_failure_of_the_host() {
    for warm in [true, false] {
        for zygote in [true, false] {
            let provider = with(|config| (config.warm_python, config.zygote) = (warm, zygote));
            let mut sandbox = provider.acquire(&small()).await.unwrap();
            sandbox.write_file("kept", b"text").await.unwrap();
            for rights in ["0o000", "0o100", "0o444"] {
                let close = format!("import os; os.chmod('/work', {rights})");
                assert_eq!(python(sandbox.as_mut(), &close).await.ending, OK);
                let next = python(sandbox.as_mut(), "import os; print(os.getcwd())").await;
                assert_eq!(next.ending, OK, "{}", text(&next.stderr));
                let shell = Program::Shell("echo here".into());
                let shell = exec(sandbox.as_mut(), shell, SOON_MS).await;
                assert_eq!((shell.ending, text(&shell.stdout)), (OK, "here\n".into()));
                assert_eq!(sandbox.read_file("kept", 100).await.unwrap(), b"text");
                let open = "import os; os.chmod('/work', 0o700)";
                assert_eq!(python(sandbox.as_mut(), open).await.ending, OK);
            }
            let again = "import os; print(os.getcwd(), open('kept').read())";
            let again = python(sandbox.as_mut(), again).await;
            assert_eq!(text(&again.stdout), "/work text\n");
        }
    }
}

#[tokio::test]
async fn a_sandbox_full_of_files_is_no_failure_of_the_host() {
    for warm in [true, false] {
        let provider = with(|config| config.warm_python = warm);
        let spec = SandboxSpec {
            limits: Limits {
                memory_bytes: 24 << 20,
                work_bytes: 200 << 20,
                ..small().limits
            },
            ..small()
        };
        let mut sandbox = provider.acquire(&spec).await.unwrap();
        let fill =
            "dd if=/dev/zero of=big bs=64k 2>/dev/null; i=0; while :; do i=$((i+1)); : > f$i; done";
        let filled = exec(sandbox.as_mut(), Program::Shell(fill.into()), 20_000).await;
        assert_ne!(filled.ending, OK);
        for program in [
            Program::Python("print(1)".into()),
            Program::Shell("echo 1".into()),
        ] {
            let request = ExecRequest::new(program, Duration::from_millis(SOON_MS));
            // It may have room, or run out of memory; the host is not at fault.
            let result = sandbox.exec(request).await.unwrap();
            assert_ne!(result.ending, Ending::SandboxDied);
        }
        sandbox.destroy().await.unwrap();
    }
}

#[tokio::test]
async fn a_slow_reader_of_output_changes_no_ending() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    for (code, expected, seconds) in [
        (
            "while True: print('x' * 100_000, flush=True)",
            Ending::OutputLimit,
            60,
        ),
        (
            "import time\nfor _ in range(3): print('x' * 1000, flush=True); time.sleep(0.01)\nwhile True: time.sleep(1)",
            Ending::Timeout,
            3,
        ),
        (
            "import sys, time\nfor _ in range(3): print('x' * 1000, flush=True); time.sleep(0.01)\nsys.exit(3)",
            Ending::Exited { code: 3 },
            3,
        ),
    ] {
        // One piece fits and nobody takes it.
        let (output, reader) = tokio::sync::mpsc::channel(1);
        let request = ExecRequest::new(Program::Python(code.into()), Duration::from_secs(seconds));
        let options = ExecOptions {
            output: Some(output),
            ..ExecOptions::default()
        };
        let result = sandbox.exec_with(request, options).await.unwrap();
        let held_back = matches!(expected, Ending::Exited { .. });
        // A program that is held back by its reader runs into its deadline.
        let ending = match (result.ending, held_back) {
            (Ending::Timeout, true) => expected,
            (ending, _) => ending,
        };
        assert_eq!(ending, expected);
        assert!(!result.stdout.is_empty());
        drop(reader);
    }
}

#[tokio::test]
async fn streamed_text_comes_in_whole_characters() {
    let provider = provider();
    let spec = SandboxSpec {
        limits: Limits {
            output_bytes: 1 << 20,
            ..small().limits
        },
        ..small()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let (output, mut reader) = tokio::sync::mpsc::channel(64);
    let code = "import os, time\ntext = ('a' + chr(0x20ac) * 9000 + chr(0x1f600) * 50).encode()\nfor at in range(0, len(text), 1000):\n    os.write(1, text[at:at + 1000]); time.sleep(0.001)";
    let request = ExecRequest::new(Program::Python(code.into()), Duration::from_millis(SOON_MS));
    let options = ExecOptions {
        output: Some(output),
        ..ExecOptions::default()
    };
    let read = async {
        let mut all = Vec::new();
        while let Some(chunk) = reader.recv().await {
            let piece = String::from_utf8(chunk.bytes.clone());
            assert!(piece.is_ok(), "cut: {:?}", chunk.bytes.last_chunk::<4>());
            all.extend(chunk.bytes);
        }
        all
    };
    let (result, all) = tokio::join!(sandbox.exec_with(request, options), read);
    let result = result.unwrap();
    assert_eq!(result.ending, OK);
    assert_eq!(result.stdout.len(), 1 + 3 * 9000 + 4 * 50);
    assert_eq!(result.stdout, all);
}

#[tokio::test]
async fn programs_that_are_long_when_they_are_quoted_run() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let head = "import sys; print(len(";
    for (letter, each) in [('"', 1), ('\\', 2), ('\u{1}', 1)] {
        let quote = "'''";
        let length = (96 << 10) - head.len() - 20;
        let letters = letter.to_string().repeat(length / each * each);
        let code = format!("{head}{quote}{letters}{quote}))");
        let result = python(sandbox.as_mut(), &code).await;
        assert_eq!(result.ending, OK, "{}", text(&result.stderr));
        assert_eq!(text(&result.stdout), format!("{}\n", letters.len() / each));
    }
    let options = ExecOptions {
        env: vec![("LONG".into(), "x".repeat(64 << 10))],
        ..ExecOptions::default()
    };
    let request = ExecRequest::new(Program::Python("print(1)".into()), Duration::from_secs(5));
    let error = sandbox.exec_with(request, options).await.unwrap_err();
    assert!(
        matches!(error, SandboxError::Request { field: "env", .. }),
        "{error}"
    );
}

#[tokio::test]
async fn devices_and_standard_input_are_nobody_elses() {
    let provider = provider();
    let (mut a, mut b) = (
        provider.acquire(&small()).await.unwrap(),
        provider.acquire(&small()).await.unwrap(),
    );
    let host = std::fs::metadata("/dev/null").unwrap().modified().unwrap();
    let mark = "import fcntl, os
for name in ('null', 'zero', 'full', 'random', 'urandom'):
    for change in (lambda p: os.utime(p), lambda p: os.utime(p, (1, 1)), lambda p: os.chmod(p, 0o600)):
        try: change('/dev/' + name); print('CHANGED', name)
        except OSError: pass
open('/dev/null', 'w').write('x')
assert open('/dev/zero', 'rb').read(2) == bytes(2) and len(os.urandom(3)) == 3
try: os.utime(0)
except OSError: pass
fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
print('done', flush=True)
import time; time.sleep(1)";
    let look = "import fcntl, os, time; time.sleep(0.3); print(fcntl.fcntl(0, fcntl.F_GETFL), os.read(0, 1))";
    let (marked, seen) = tokio::join!(python(a.as_mut(), mark), python(b.as_mut(), look));
    assert_eq!(text(&marked.stdout), "done\n", "{}", text(&marked.stderr));
    assert_eq!(text(&seen.stdout), "0 b''\n", "{}", text(&seen.stderr));
    let after = std::fs::metadata("/dev/null").unwrap().modified().unwrap();
    assert_eq!(host, after, "the host's /dev/null");
}

#[tokio::test]
async fn buffers_of_connections_count() {
    let provider = provider();
    let protections = provider.protections();
    let row = protections.iter().find(|p| p.name == "tcp memory").unwrap();
    if !row.enforced {
        return;
    }
    let spec = SandboxSpec {
        network: Network::Loopback,
        limits: Limits {
            memory_bytes: 64 << 20,
            open_files: 512,
            cpu_s: 20.0,
            ..small().limits
        },
        ..small()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    // Fills both directions of as many connections as it can have.
    let fill = "import socket
server = socket.socket(); server.bind(('127.0.0.1', 0)); server.listen(200)
kept, total = [], 0
block = b'x' * (1 << 20)
for _ in range(150):
    a = socket.socket()
    for s in (a,):
        try: s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        except OSError: pass
    a.settimeout(0.05)
    try:
        a.connect(server.getsockname()); b, _ = server.accept()
    except OSError: break
    b.settimeout(0.05)
    kept += [a, b]
    for s in (a, b):
        try:
            while True: total += s.send(block)
        except OSError: pass
print(total)";
    let result = exec(sandbox.as_mut(), Program::Python(fill.into()), 30_000).await;
    let total: u64 = text(&result.stdout).trim().parse().unwrap_or(0);
    assert!(
        total < 48 << 20,
        "{total} bytes in buffers, {:?}",
        result.ending
    );
}
