//! Operations of the port in addition to plain executions: streams, snapshots, loopback, pools.

use crate::{
    OK, SOON_MS, children, exec, no_groups_soon, provider, python, small, spawner_pid, steady,
    text, with,
};
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, Network, NullProvider, OutputStream, Pool, PoolConfig,
    ProcessProvider, Program, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider,
    SandboxSpec,
};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[tokio::test]
async fn forks_of_the_zygote_end_as_interpreters_do() {
    let provider = provider();
    assert_eq!(provider.degradations(), [""; 0]);
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    for (code, ending, out, err) in [
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('bye')", 1, "", "bye\n"),
        ("raise SystemExit", 0, "", ""),
        ("import os; os._exit(7)", 7, "", ""),
        (
            "1 / 0",
            1,
            "",
            "Traceback (most recent call last):\n  File \"<string>\", line 1, in <module>\nZeroDivisionError: division by zero\n",
        ),
        (
            "x =",
            1,
            "",
            "  File \"<string>\", line 1\n    x =\n       ^\nSyntaxError: invalid syntax\n",
        ),
        (
            "import atexit; atexit.register(print, 'late'); print('early')",
            0,
            "early\nlate\n",
            "",
        ),
        (
            "import threading, time\ndef f():\n    time.sleep(0.05); print('thread')\nthreading.Thread(target=f).start()\nprint('main')",
            0,
            "main\nthread\n",
            "",
        ),
        (
            "print(sorted(n for n in globals() if n[0] != '_'), __name__, __import__('sys').argv)",
            0,
            "[] __main__ ['-c']\n",
            "",
        ),
        (
            "import sys; print(sys.flags.isolated, sys.flags.no_site, sys.stdin.read() == '')",
            0,
            "1 1 True\n",
            "",
        ),
        ("f = open('kept', 'w'); f.write('not closed')", 0, "", ""),
        ("print(open('kept').read())", 0, "not closed\n", ""),
    ] {
        let result = python(sandbox.as_mut(), code).await;
        let seen = (text(&result.stdout), text(&result.stderr));
        assert_eq!(
            result.ending,
            Ending::Exited { code: ending },
            "{code}: {seen:?}"
        );
        assert_eq!(seen, (out.to_owned(), err.to_owned()), "{code}");
    }
}

#[tokio::test]
async fn output_streams_and_each_execution_has_an_environment() {
    // A folder of the host, in which a program sees that its first output has arrived.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let arrived = folder.path().join("arrived");
    let shown = (folder.path().to_owned(), "/volumes/host".into());
    let provider = with(|config| config.shows.push(shown));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    for program in [
        Program::Python("import os, sys, time\nprint(os.environ['COLOUR'], flush=True)\nwhile not os.path.exists('/volumes/host/arrived'): time.sleep(0.01)\nprint('end', file=sys.stderr)".into()),
        Program::Shell("echo $COLOUR; while [ ! -e /volumes/host/arrived ]; do sleep 0.05; done; echo end >&2".into()),
    ] {
        let (sender, mut receiver) = tokio::sync::mpsc::channel(4);
        let request = ExecRequest::new(program, Duration::from_millis(SOON_MS));
        let options = ExecOptions {
            env: vec![("COLOUR".into(), "green".into())],
            output: Some(sender),
            ..ExecOptions::default()
        };
        let gather = async {
            let mut chunks = Vec::new();
            while let Some(chunk) = receiver.recv().await {
                chunks.push((chunk.stream, text(&chunk.bytes)));
                std::fs::write(&arrived, "").unwrap();
            }
            chunks
        };
        let (result, chunks) = tokio::join!(sandbox.exec_with(request, options), gather);
        let result = result.unwrap();
        assert_eq!(result.ending, OK, "{}", text(&result.stderr));
        assert_eq!(chunks[0], (OutputStream::Stdout, "green\n".into()));
        assert_eq!(chunks[1], (OutputStream::Stderr, "end\n".into()));
        assert_eq!(result.usage.output_bytes, 10);
        std::fs::remove_file(&arrived).unwrap();
    }
    let after = python(sandbox.as_mut(), "import os; print('COLOUR' in os.environ)").await;
    assert_eq!(text(&after.stdout), "False\n");
}

async fn snapshots_work(provider: &dyn SandboxProvider) {
    let spec = small();
    let mut first = provider.acquire(&spec).await.unwrap();
    first.write_file("a/b.txt", b"one").await.unwrap();
    let one = first.snapshot().await.unwrap();
    python(
        first.as_mut(),
        "open('a/b.txt', 'a').write('+two'); open('new', 'w').close()",
    )
    .await;
    let two = first.snapshot().await.unwrap();
    assert_eq!(first.stats().await.unwrap().layers, 2);
    let look = "import os; print(open('a/b.txt').read(), sorted(os.listdir('.')))";
    for (snapshot, expected) in [(&one, "one ['a']\n"), (&two, "one+two ['a', 'new']\n")] {
        let mut fork = provider.fork(&spec, snapshot).await.unwrap();
        let seen = python(fork.as_mut(), look).await;
        assert_eq!(text(&seen.stdout), expected, "{}", text(&seen.stderr));
        python(
            fork.as_mut(),
            "import shutil; shutil.rmtree('a'); open('mine', 'w').close()",
        )
        .await;
        let mine = python(
            fork.as_mut(),
            "import os; print(os.listdir('.').count('mine'), os.path.exists('a'))",
        )
        .await;
        assert_eq!(text(&mine.stdout), "1 False\n");
        fork.reset().await.unwrap();
        let again = python(fork.as_mut(), look).await;
        assert_eq!(text(&again.stdout), expected);
        fork.destroy().await.unwrap();
    }
    let archive = provider.export(&two).await.unwrap();
    assert_eq!(archive, provider.export(&two).await.unwrap());
    assert_ne!(archive, provider.export(&one).await.unwrap());
    first.destroy().await.unwrap();
    drop((one, two));
    let back = provider.import(&archive, 1 << 20).await.unwrap();
    assert_eq!(archive, provider.export(&back).await.unwrap());
    let mut fork = provider.fork(&spec, &back).await.unwrap();
    let seen = python(fork.as_mut(), look).await;
    assert_eq!(
        text(&seen.stdout),
        "one+two ['a', 'new']\n",
        "{}",
        text(&seen.stderr)
    );
    fork.destroy().await.unwrap();
}

#[tokio::test]
async fn snapshots_fork_reset_and_travel() {
    snapshots_work(&provider()).await;
    // Older kernels need this setting.
    snapshots_work(&with(|config| config.attached_mounts = true)).await;
}

#[tokio::test]
async fn a_snapshot_of_another_provider_is_refused() {
    let (a, b) = (provider(), provider());
    let mut sandbox = a.acquire(&small()).await.unwrap();
    let snapshot = sandbox.snapshot().await.unwrap();
    let spec = small();
    let refused = b.fork(&spec, &snapshot).await.err().unwrap();
    assert!(
        matches!(
            refused,
            SandboxError::Request {
                field: "snapshot",
                ..
            }
        ),
        "{refused}"
    );
}

#[tokio::test]
async fn a_host_can_listen_inside() {
    let provider = provider();
    let spec = SandboxSpec {
        network: Network::Loopback,
        ..small()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let listener = sandbox.listen_inside(3128).await.unwrap();
    listener.set_nonblocking(false).unwrap();
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4];
            stream.read_exact(&mut asked).unwrap();
            stream.write_all(b"pong").unwrap();
        }
    });
    let ask = "import socket\ns = socket.create_connection(('127.0.0.1', 3128)); s.sendall(b'ping'); print(s.recv(4))\ntry: socket.create_connection(('1.1.1.1', 80), 1)\nexcept OSError as e: print(e.errno)";
    for _ in 0..2 {
        let result = python(sandbox.as_mut(), ask).await;
        assert_eq!(
            text(&result.stdout),
            "b'pong'\n101\n",
            "{}",
            text(&result.stderr)
        );
    }
    server.join().unwrap();
    let mut plain = provider.acquire(&small()).await.unwrap();
    assert!(plain.listen_inside(3128).await.is_err());
}

#[tokio::test]
async fn a_thousand_sandboxes_leave_nothing() {
    let provider = provider();
    let spec = small();
    let spawner = children(spawner_pid())[0];
    let count = |what: &str| {
        std::fs::read_dir(format!("/proc/{spawner}/{what}"))
            .unwrap()
            .count()
    };
    let mounts = || std::fs::read_to_string(format!("/proc/{spawner}/mounts")).unwrap();
    let spaces = || {
        // Only processes of this server count, because other tests have their sandboxes. Orphans fall to the
        // spawner, which is first in its namespace.
        let mut found = std::collections::BTreeSet::new();
        let mut open = vec![spawner];
        while let Some(pid) = open.pop() {
            for kind in ["mnt", "pid", "net", "ipc"] {
                found.extend(std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok());
            }
            open.extend(children(pid));
        }
        found.len()
    };
    let one = async || {
        let mut sandbox = provider.acquire(&spec).await.unwrap();
        let result = python(sandbox.as_mut(), "print(1)").await;
        assert_eq!(text(&result.stdout), "1\n");
        sandbox.destroy().await.unwrap();
    };
    one().await;
    let (fds, before) = (count("fd"), (mounts(), children(spawner).len()));
    let spaces_before = spaces();
    for _ in 0..1000 {
        one().await;
    }
    assert_eq!(before, (mounts(), children(spawner).len()));
    assert!(
        count("fd") <= fds + 8,
        "{} files are left",
        count("fd") - fds
    );
    assert!(spaces() <= spaces_before + 4, "namespaces are left");
    no_groups_soon().await;
}

#[tokio::test]
async fn a_dead_zygote_is_replaced() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let spawner = children(spawner_pid())[0];
    let zygote = children(spawner).into_iter().find(|pid| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        line.contains("<zygote>") && !status.contains("CapPrm:\t0000000000000000\n")
    });
    let zygote = zygote.unwrap().to_string();
    std::process::Command::new("kill")
        .args(["-9", &zygote])
        .status()
        .unwrap();
    // Requests to the zygote while it dies are lost and reported.
    let proc = std::path::PathBuf::from(format!("/proc/{zygote}"));
    while proc.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    for i in 0..3 {
        let result = python(sandbox.as_mut(), &format!("print({i})")).await;
        assert_eq!(text(&result.stdout), format!("{i}\n"));
    }
}

#[tokio::test]
async fn a_pool_hands_out_clean_sandboxes_within_its_bounds() {
    let config = PoolConfig {
        floor: 1,
        ceiling: 6,
        starts_at_once: 2,
        ..PoolConfig::default()
    };
    let pool = Pool::new(Arc::new(provider()), config).unwrap();
    let mut tasks = Vec::new();
    for i in 0..200 {
        let pool = pool.clone();
        tasks.push(tokio::spawn(async move {
            let mut sandbox = pool.acquire(&small()).await.unwrap();
            let code = format!("import os\nprint(os.listdir('/work') + os.listdir('/tmp'), {i})\nopen('/work/x', 'w').close(); open('/tmp/y', 'w').close()");
            let result = exec(sandbox.as_mut(), Program::Python(code), 60_000).await;
            sandbox.destroy().await.unwrap();
            text(&result.stdout)
        }));
    }
    for (i, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.unwrap(), format!("[] {i}\n"));
    }
    let stats = pool.stats();
    assert!(stats.most_starts <= 2 && stats.ready <= 6, "{stats:?}");
    assert_eq!(stats.hits + stats.misses, 200);
    while pool.stats().ready < pool.stats().target {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut ready = pool.acquire(&small()).await.unwrap();
    assert_eq!(
        text(&python(ready.as_mut(), "print(1)").await.stdout),
        "1\n"
    );
    assert!(pool.stats().hits > 0, "{:?}", pool.stats());
    // Another specification: what was ready is thrown away.
    let other = SandboxSpec {
        env: vec![("A".into(), "b".into())],
        ..small()
    };
    let mut sandbox = pool.acquire(&other).await.unwrap();
    let result = python(sandbox.as_mut(), "import os; print(os.environ['A'])").await;
    assert_eq!(text(&result.stdout), "b\n");
    assert!(pool.stats().discarded > 0);
    pool.drain().await.unwrap();
}

#[tokio::test]
async fn a_pool_serves_more_than_can_live_at_once() {
    let below = with(|config| config.max_live = 3);
    let pool = Pool::new(Arc::new(below), steady(3)).unwrap();
    let mut tasks = Vec::new();
    for i in 0..40 {
        let pool = pool.clone();
        tasks.push(tokio::spawn(async move {
            let mut sandbox = pool.acquire(&small()).await.unwrap();
            let result = python(sandbox.as_mut(), &format!("print({i})")).await;
            sandbox.destroy().await.unwrap();
            text(&result.stdout)
        }));
    }
    for (i, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.unwrap(), format!("{i}\n"));
    }
}

/// Makes sandboxes without environment variables only as it is allowed to.
struct Slow {
    null: NullProvider,
    allowed: tokio::sync::Semaphore,
    asked: AtomicUsize,
}

impl SandboxProvider for Slow {
    fn level(&self) -> &'static str {
        self.null.level()
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            if spec.env.is_empty() {
                self.asked.fetch_add(1, Ordering::Relaxed);
                self.allowed.acquire().await.unwrap().forget();
            }
            self.null.acquire(spec).await
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        self.null.protections()
    }
}

#[tokio::test]
async fn a_sandbox_of_the_last_specification_takes_nobodys_place() {
    let slow = Arc::new(Slow {
        null: NullProvider::default(),
        allowed: tokio::sync::Semaphore::new(1),
        asked: AtomicUsize::new(0),
    });
    let config = PoolConfig {
        floor: 1,
        ceiling: 2,
        starts_at_once: 1,
        ..PoolConfig::default()
    };
    let pool = Pool::new(Arc::clone(&slow) as Arc<dyn SandboxProvider>, config).unwrap();
    pool.acquire(&small()).await.unwrap();
    // The one for the shelf is being made.
    while slow.asked.load(Ordering::Relaxed) < 2 {
        tokio::task::yield_now().await;
    }
    let other = SandboxSpec {
        env: vec![("A".into(), "b".into())],
        ..small()
    };
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move { pool.acquire(&other).await.map(|_| ()) }
    });
    while pool.stats().misses < 2 {
        tokio::task::yield_now().await;
    }
    slow.allowed.add_permits(1);
    waiting.await.unwrap().unwrap();
    assert_eq!(pool.stats().discarded, 1, "{:?}", pool.stats());
}

#[test]
fn pools_with_impossible_sizes_are_refused() {
    let wrong = [
        PoolConfig {
            floor: 3,
            ceiling: 2,
            ..PoolConfig::default()
        },
        PoolConfig {
            starts_at_once: 0,
            ..PoolConfig::default()
        },
    ];
    for config in wrong {
        let null = Arc::new(NullProvider::default());
        assert!(matches!(
            Pool::new(null, config),
            Err(SandboxError::Request { .. })
        ));
    }
}

/// A separate root: a shell, its loader and its library, and nothing else.
#[tokio::test]
async fn an_image_is_the_root() {
    let image = std::env::temp_dir().join(format!("sinew-image-{}", std::process::id()));
    for (from, to) in [
        ("/bin/sh", "usr/bin/sh"),
        (
            "/lib64/ld-linux-x86-64.so.2",
            "usr/lib64/ld-linux-x86-64.so.2",
        ),
        (
            "/lib/x86_64-linux-gnu/libc.so.6",
            "usr/lib/x86_64-linux-gnu/libc.so.6",
        ),
    ] {
        let to = image.join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    }
    for link in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{link}"), image.join(link)).unwrap();
    }
    let provider = with(|config| config.image = Some(image.clone()));
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let look = Program::Shell("cd /; echo *; echo usr/bin/*; echo x > /usr/x".into());
    let result = exec(sandbox.as_mut(), look, SOON_MS).await;
    let out = text(&result.stdout);
    assert_eq!(
        out,
        "bin dev lib lib64 proc tmp usr work\nusr/bin/sh\n",
        "{}",
        text(&result.stderr)
    );
    let request = ExecRequest::new(Program::Python("print(1)".into()), Duration::from_secs(5));
    let refused = sandbox.exec(request).await.unwrap_err();
    assert!(refused.to_string().contains("no python3"), "{refused}");
    drop(sandbox);
    std::fs::remove_dir_all(&image).unwrap();
}

async fn said(sandbox: &mut dyn Sandbox, code: String) -> String {
    text(&python(sandbox, &code).await.stdout)
}

#[tokio::test]
async fn overlays_are_bounded_as_plain_folders_are() {
    let provider = provider();
    let mut first = provider.acquire(&small()).await.unwrap();
    let write = |name: &str, kib: usize| {
        format!(
            "try:\n    open('{name}', 'wb').write(b'x' * ({kib} << 10))\n    print('written')\n\
             except OSError as e:\n    print(e.errno)"
        )
    };
    // 2 MiB are allowed, and what a snapshot holds of a sandbox counts.
    assert_eq!(said(first.as_mut(), write("a", 1500)).await, "written\n");
    let snapshot = first.snapshot().await.unwrap();
    assert_eq!(said(first.as_mut(), write("b", 1500)).await, "28\n");
    assert_eq!(
        said(first.as_mut(), "import os; os.remove('b'); print(1)".into()).await,
        "1\n"
    );
    assert_eq!(said(first.as_mut(), write("b", 300)).await, "written\n");
    // A fork has its own bytes above what it shares; a copy up counts, too.
    let mut fork = provider.fork(&small(), &snapshot).await.unwrap();
    assert_eq!(said(fork.as_mut(), write("b", 1500)).await, "written\n");
    assert_eq!(said(fork.as_mut(), write("c", 1500)).await, "28\n");
    let remove = "import os; os.remove('b'); os.remove('c'); print(1)";
    assert_eq!(said(fork.as_mut(), remove.into()).await, "1\n");
    let append = "open('a', 'ab').write(b'y'); print(1)";
    assert_eq!(said(fork.as_mut(), append.into()).await, "1\n");
    assert_eq!(said(fork.as_mut(), write("b", 1000)).await, "28\n");
    assert!(fork.stats().await.unwrap().file_bytes <= 2 << 20);
    let look = "import os; print(os.path.getsize('a'))";
    assert_eq!(said(first.as_mut(), look.into()).await, "1536000\n");
    fork.destroy().await.unwrap();
    first.destroy().await.unwrap();
}

/// The test `sandboxes_run_for_users_who_are_not_root` starts this one as another user, too.
#[tokio::test]
async fn a_sandbox_isolates_for_whoever_runs_it() {
    let provider = provider();
    assert_eq!(provider.degradations(), [""; 0]);
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let code = "import os\nopen('kept', 'w').write('x')\nprint(open('/proc/self/status').read())\n\
                print('shadow', os.path.exists('/etc/shadow'), 'root', os.path.exists('/root'))\n\
                print('pids', sorted(p for p in os.listdir('/proc') if p.isdigit()))";
    let result = python(sandbox.as_mut(), code).await;
    let said = text(&result.stdout);
    assert_eq!(result.ending, OK, "{}", text(&result.stderr));
    for none in [
        "CapPrm:\t",
        "CapEff:\t",
        "CapBnd:\t",
        "CapInh:\t",
        "CapAmb:\t",
    ] {
        assert!(
            said.contains(&format!("{none}0000000000000000\n")),
            "{said}"
        );
    }
    for sure in ["NoNewPrivs:\t1", "Seccomp:\t2", "shadow False root False"] {
        assert!(said.contains(sure), "{sure}: {said}");
    }
    assert!(!said.contains("'3'"), "{said}");
    let shell = exec(sandbox.as_mut(), Program::Shell("cat kept".into()), SOON_MS).await;
    assert_eq!(text(&shell.stdout), "x");
    let snapshot = sandbox.snapshot().await.unwrap();
    let mut fork = provider.fork(&small(), &snapshot).await.unwrap();
    let kept = python(fork.as_mut(), "print(open('kept').read())").await;
    assert_eq!(text(&kept.stdout), "x\n");
    fork.destroy().await.unwrap();
    a_fork_bomb_takes_its_own_processes(&provider).await;
    sandbox.destroy().await.unwrap();
    let own = provider
        .protections()
        .iter()
        .any(|p| p.name == "own user" && p.enforced);
    let strict = SandboxSpec {
        strict: true,
        ..small()
    };
    match provider.acquire(&strict).await {
        Ok(_) => assert!(own),
        Err(e) => assert!(
            !own && e.to_string().contains("does not map the ids"),
            "{e}"
        ),
    }
}

async fn a_fork_bomb_takes_its_own_processes(provider: &ProcessProvider) {
    let processes = provider
        .protections()
        .iter()
        .any(|p| p.name == "processes" && p.enforced);
    assert!(processes, "{:?}", provider.protections());
    let bomb = "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0: time.sleep(300); os._exit(0)\n        n += 1\nexcept OSError as e: print(n, flush=True)\ntime.sleep(300)";
    for program in [
        Program::Python(bomb.into()),
        Program::Argv(vec!["/usr/bin/python3".into(), "-c".into(), bomb.into()]),
    ] {
        let mut other = provider.acquire(&small()).await.unwrap();
        let (sender, mut output) = tokio::sync::mpsc::channel(4);
        let request = ExecRequest::new(program, Duration::from_secs(300));
        let options = ExecOptions {
            output: Some(sender),
            ..ExecOptions::default()
        };
        let beside = async {
            // It says how many it has when it gets no more.
            let forked = output.recv().await.unwrap();
            let mut made = provider.acquire(&small()).await.unwrap();
            let result = python(
                made.as_mut(),
                "import subprocess; print(subprocess.run(['true']).returncode)",
            );
            let result = result.await;
            made.destroy().await.unwrap();
            (forked, result)
        };
        let (forked, beside) = tokio::select! {
            ended = other.exec_with(request, options) => panic!("the bomb ended: {ended:?}"),
            seen = beside => seen,
        };
        let forked: u32 = text(&forked.bytes).trim().parse().unwrap();
        assert!((1..8).contains(&forked), "{forked} processes");
        assert_eq!(text(&beside.stdout), "0\n", "{}", text(&beside.stderr));
        other.destroy().await.unwrap();
    }
}

#[test]
fn sandboxes_run_for_users_who_are_not_root() {
    // The program must lie in a folder that other users can read.
    let folder = std::env::temp_dir().join(format!("sinew-as-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(std::env::current_exe().unwrap(), folder.join("test")).unwrap();
    let nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    for launcher in [nobody, "unshare --user --map-root-user"] {
        let command = |program: &str| {
            let mut words = launcher.split(' ').chain(program.split(' '));
            let mut command = std::process::Command::new(words.next().unwrap());
            command.args(words).current_dir("/");
            command.output().unwrap()
        };
        let allowed = command("unshare --user true").status.success();
        let test = folder.join("test");
        for name in [
            "port::a_sandbox_isolates_for_whoever_runs_it",
            "files::an_archive_holds_nothing_that_was_deleted",
        ] {
            let output = command(&format!("{} --exact {name}", test.display()));
            let said = text(&output.stdout) + &text(&output.stderr);
            if allowed {
                assert!(said.contains("1 passed"), "{launcher}: {said}");
            } else {
                assert!(
                    said.contains("user namespaces are off"),
                    "{launcher}: {said}"
                );
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
