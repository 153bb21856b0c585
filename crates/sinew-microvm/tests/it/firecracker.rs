//! Firecracker as a backend, against a stand-in that has its states and answers, over the real
//! agent and behind the real walls; and the real one where there is one.

use crate::machines::{
    carries_input_and_files, config, keeps_snapshots, printed, python, request, runs_programs, spec,
};
use serde_json::json;
use sinew_microvm::firecracker::{Api, FirecrackerError, Socket, connect};
use sinew_microvm::{Backend, MicrovmConfig, MicrovmProvider};
use sinew_sandbox::{Ending, Program, Sandbox, SandboxError, SandboxProvider};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

/// A host where Firecracker works, as far as it is concerned.
struct Stand {
    folder: tempfile::TempDir,
    machines: Child,
}

impl Drop for Stand {
    fn drop(&mut self) {
        // Its machines end with it.
        let _ = self.machines.kill();
        let _ = self.machines.wait();
    }
}

fn mock() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/firecracker_mock.py")
}

fn stand() -> Stand {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join("agent"), sinew_guest::AGENT).expect("agent");
    // The image and what was found out about QEMU; templates are its own.
    let images = config()
        .folder
        .canonicalize()
        .expect("run scripts/setup.sh");
    let inside = folder.path().join("images");
    std::fs::create_dir(&inside).expect("folder");
    for entry in std::fs::read_dir(images).expect("images").flatten() {
        let name = entry.file_name();
        let kept = name.to_string_lossy();
        if kept != "templates" && !kept.starts_with("firecracker-") {
            std::os::unix::fs::symlink(entry.path(), inside.join(&name)).expect("link");
        }
    }
    let socket = folder.path().join("kvm");
    let machines = Command::new(mock())
        .arg("--machines")
        .args([&socket, folder.path()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let stand = Stand {
        machines: machines.expect("run scripts/setup.sh: it installs python3"),
        folder,
    };
    for _ in 0..500 {
        if socket.exists() {
            return stand;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the stand-in did not start");
}

impl Stand {
    fn config(&self, backend: Backend) -> MicrovmConfig {
        let mut config = config();
        config.folder = self.folder.path().join("images");
        config.backend = backend;
        config.firecracker = Some(mock());
        config.kvm = self.folder.path().join("kvm");
        config
    }

    fn provider(&self) -> MicrovmProvider {
        let config = self.config(Backend::Auto);
        MicrovmProvider::start(config).expect("the stand-in boots, saves and restores")
    }

    /// What it refuses from now on; `die` kills the monitor.
    fn refuses(&self, faults: &serde_json::Value) {
        let path = self.folder.path().join("faults.json");
        std::fs::write(path, faults.to_string()).expect("faults");
    }

    fn calls(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("calls.log")).expect("calls")
    }

    fn live_machines(&self) -> usize {
        let entries = std::fs::read_dir(self.folder.path()).expect("folder");
        let names = entries.flatten().map(|e| e.file_name());
        names
            .filter(|n| n.to_string_lossy().starts_with("machine-"))
            .count()
    }
}

/// Monitors that this process started.
fn monitors() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let read = |name| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
        let stat = read("stat").unwrap_or_default();
        let after = stat.rsplit(')').next().unwrap_or_default();
        let parent = after.split_whitespace().nth(1).map(str::to_owned);
        parent == Some(std::process::id().to_string())
            && read("cmdline").is_ok_and(|c| c.contains("api.sock"))
    })
    .collect()
}

async fn answers(sandbox: &mut dyn Sandbox) {
    assert_eq!(printed(&python(sandbox, "print(6 * 7)").await), "42");
}

#[tokio::test]
async fn the_port() {
    let stand = stand();
    let provider = stand.provider();
    let (backend, how) = provider.backend();
    assert_eq!(backend, "firecracker", "{how}");
    let calls = stand.calls();
    let boot = "PUT /machine-config\nPUT /boot-source\nPUT /vsock\nPUT /actions\n\
                PATCH /vm\nPUT /snapshot/create\nPUT /snapshot/load\n";
    assert!(calls.starts_with(boot), "{calls}");
    runs_programs(&provider).await;
    carries_input_and_files(&provider).await;
    keeps_snapshots(&provider).await;
    let mut sandbox = provider.acquire(&spec()).await.expect("a machine");
    for (code, ending) in [
        ("while True: print('x' * 1000)", Ending::OutputLimit),
        (
            "import os; os.kill(os.getpid(), 11)",
            Ending::Signalled { signal: 11 },
        ),
        ("import sys; sys.exit(7)", Ending::Exited { code: 7 }),
    ] {
        assert_eq!(
            python(sandbox.as_mut(), code).await.ending,
            ending,
            "{code}"
        );
    }
    let mut spin = request(Program::Python("while True: pass".into()), 1);
    spin.deadline = Duration::from_millis(400);
    let result = sandbox.exec(spin).await.expect("an end");
    assert_eq!(result.ending, Ending::Timeout);
    answers(sandbox.as_mut()).await;
    // Boots once for each memory size, however many start.
    assert_eq!(stand.calls().matches("PUT /actions").count(), 2 + 1);
}

#[tokio::test]
async fn walls_around_the_monitor() {
    let stand = stand();
    let provider = stand.provider();
    let _sandbox = provider.acquire(&spec()).await.expect("a machine");
    let [pid] = monitors()[..] else {
        panic!("one monitor for one machine, not {:?}", monitors());
    };
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        line.expect("a field").trim().to_owned()
    };
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!(field("NoNewPrivs:"), "1");
    let user = field("Uid:");
    assert!(!user.starts_with("0\t"), "{user}");
    for kind in ["net", "ipc", "uts", "mnt"] {
        let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/{kind}")).expect("ns");
        assert_ne!(of(&pid.to_string()), of("self"), "{kind}");
    }
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    for hidden in ["etc", "home", "tmp", "root"] {
        assert!(!root.join(hidden).exists(), "/{hidden}");
    }
    assert!(std::fs::write(root.join("x"), "x").is_err());
    let full = std::fs::write(root.join("run/x"), vec![0; 1 << 20]);
    assert!(full.is_err(), "its folder is small");
    let group = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("groups");
    assert!(group.contains("sinew-vm-"), "{group}");
    // The stand-in has no filter of system calls: said, and refused by who is strict.
    let protections = provider.protections();
    let row = |name: &str| protections.iter().find(|p| p.name == name).expect("a row");
    for name in ["monitor_network", "monitor_files", "monitor_user", "memory"] {
        assert!(row(name).enforced, "{:?}", row(name));
    }
    assert!(!row("monitor_seccomp").enforced);
    assert!(row("machine").how.contains("boots, saves and restores"));
    let mut strict = spec();
    strict.strict = true;
    let refused = provider.acquire(&strict).await.err();
    let named = matches!(&refused, Some(SandboxError::NotEnforced { missing }) if missing.contains("monitor_seccomp"));
    assert!(named, "{refused:?}");
}

#[tokio::test]
async fn what_fails_is_told_and_the_rest_goes_on() {
    let stand = stand();
    let provider = stand.provider();
    let spec = spec();
    let mut sandbox = provider.acquire(&spec).await.expect("a machine");
    sandbox.write_file("f", b"kept").await.expect("write");
    let snapshot = sandbox.snapshot().await.expect("a snapshot");

    stand.refuses(&json!({ "PUT /snapshot/create": "no space" }));
    let told = sandbox.snapshot().await.expect_err("refused");
    assert!(told.to_string().contains("no space"), "{told}");
    // It went on.
    let kept = sandbox.read_file("f", 100).await.expect("read");
    assert_eq!(kept, b"kept");
    answers(sandbox.as_mut()).await;

    stand.refuses(&json!({ "PUT /snapshot/load": "damaged" }));
    let told = provider.fork(&spec, &snapshot).await.err();
    let told = told.expect("refused").to_string();
    assert!(told.contains("damaged"), "{told}");
    let told = sandbox.reset().await.expect_err("refused");
    assert!(told.to_string().contains("damaged"), "{told}");
    let gone = sandbox
        .exec(request(Program::Shell("true".into()), 5))
        .await;
    assert!(matches!(gone, Err(SandboxError::Died(_))), "{gone:?}");

    stand.refuses(&json!({ "PUT /snapshot/create": "die" }));
    let mut other = provider.acquire(&spec).await.expect("a machine");
    assert!(other.snapshot().await.is_err());
    let gone = other.exec(request(Program::Shell("true".into()), 5)).await;
    assert!(matches!(gone, Err(SandboxError::Died(_))), "{gone:?}");

    stand.refuses(&json!({ "PUT /snapshot/load": "die" }));
    assert!(provider.acquire(&spec).await.is_err());
    stand.refuses(&json!({}));
    let mut again = provider.fork(&spec, &snapshot).await.expect("a fork");
    let kept = again.read_file("f", 100).await.expect("read");
    assert_eq!(kept, b"kept");
}

#[tokio::test]
async fn a_monitor_that_dies_ends_its_sandbox() {
    let stand = stand();
    let provider = stand.provider();
    let mut sandbox = provider.acquire(&spec()).await.expect("a machine");
    let mut sibling = provider.acquire(&spec()).await.expect("another");
    let killed = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let pid = nix::unistd::Pid::from_raw(monitors()[0]);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("kill");
    };
    let code = "import time\nprint('begun', flush=True)\ntime.sleep(20)";
    let both = request(Program::Python(code.into()), 20);
    let (first, second) = (sandbox.exec(both.clone()), async {
        killed.await;
        sibling.stats().await
    });
    let (result, stats) = tokio::join!(first, second);
    let dead = result.expect("an end").ending == Ending::SandboxDied;
    // Which of the two monitors came first is not known.
    assert_ne!(dead, stats.is_err());
    drop((sandbox, sibling));
    for _ in 0..200 {
        if stand.live_machines() == 0 && monitors().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!(
        "{} machines, monitors {:?}",
        stand.live_machines(),
        monitors()
    );
}

#[tokio::test]
async fn nothing_is_left_of_many_under_firecracker() {
    let stand = stand();
    let provider = stand.provider();
    for _ in 0..5 {
        let mut sandbox = provider.acquire(&spec()).await.expect("a machine");
        assert_eq!(printed(&python(sandbox.as_mut(), "print(7)").await), "7");
        sandbox.destroy().await.expect("an end");
    }
    for _ in 0..200 {
        if stand.live_machines() == 0 && monitors().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} machines, {:?}", stand.live_machines(), monitors());
}

#[tokio::test]
async fn a_host_where_it_does_not_work_has_qemu() {
    let stand = stand();
    stand.refuses(&json!({ "PUT /actions": "Cannot create vm: Operation not permitted" }));
    let told = MicrovmProvider::start(stand.config(Backend::Firecracker));
    let told = told.expect_err("it does not boot").to_string();
    assert!(told.contains("Operation not permitted"), "{told}");
    let provider = MicrovmProvider::start(stand.config(Backend::Auto)).expect("QEMU");
    let (backend, how) = provider.backend();
    assert_eq!(backend, "qemu");
    // Remembered, with how to try again.
    assert!(
        how.contains("Operation not permitted") && how.contains("to try again"),
        "{how}"
    );
    let mut missing = stand.config(Backend::Firecracker);
    missing.kvm = "/nonexistent/kvm".into();
    let told = MicrovmProvider::start(missing.clone()).expect_err("no device");
    assert!(told.to_string().contains("/nonexistent/kvm"), "{told}");
    missing.firecracker = None;
    let told = MicrovmProvider::start(missing).expect_err("no program");
    assert!(told.to_string().contains("FIRECRACKER_BIN"), "{told}");
    let asked = MicrovmProvider::start(stand.config(Backend::Qemu)).expect("QEMU");
    assert!(!asked.backend().1.contains("Firecracker"));
}

#[tokio::test]
async fn answers_that_are_none() {
    let folder = tempfile::tempdir().expect("folder");
    for (i, answer) in [
        "",
        "nonsense\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxyz",
    ]
    .into_iter()
    .enumerate()
    {
        let socket = folder.path().join(i.to_string());
        let listener = UnixListener::bind(&socket).expect("listen");
        let serve = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("accept");
            let mut asked = [0; 4096];
            let _ = stream.read(&mut asked).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        });
        let told = Api::new(Socket::new(socket, None))
            .ask("GET", "/", json!({}))
            .await;
        assert!(
            matches!(told, Err(FirecrackerError::Broken { .. })),
            "{answer:?}: {told:?}"
        );
        serve.await.expect("served");
    }
}

/// A monitor that was taken over must not choose what the server connects to.
#[tokio::test]
async fn sockets_of_others_are_not_connected_to() {
    let folder = tempfile::tempdir().expect("folder");
    let (real, link) = (folder.path().join("real"), folder.path().join("link"));
    let _listener = UnixListener::bind(&real).expect("listen");
    std::os::unix::fs::symlink(&real, &link).expect("link");
    std::fs::write(folder.path().join("file"), "").expect("file");
    let mine = nix::unistd::Uid::current().as_raw();
    assert!(
        Socket::new(real.clone(), Some(mine))
            .connect()
            .await
            .is_ok()
    );
    for (path, owner) in [
        (link, Some(mine)),
        (real, Some(mine + 1)),
        (folder.path().join("file"), None),
    ] {
        assert!(Socket::new(path, owner).connect().await.is_err());
    }
    let missing = Socket::new(folder.path().join("none"), None);
    let told = connect(&missing, 99, Duration::from_millis(50)).await;
    assert!(told.is_err_and(|e| e.to_string().contains("port 99")));
}

/// The real one is tried where it is named; what this host can do is printed, not assumed.
#[tokio::test]
async fn the_real_one_where_it_is_named() {
    let named = std::env::var_os("FIRECRACKER_BIN").map(PathBuf::from);
    let mut config = config();
    config.backend = Backend::Firecracker;
    config.firecracker = Some(named.clone().unwrap_or_else(|| "/nonexistent".into()));
    match (named, MicrovmProvider::start(config)) {
        (None, started) => {
            assert!(started.is_err_and(|e| e.to_string().contains("/nonexistent")));
        }
        (Some(_), Ok(provider)) => {
            let mut sandbox = provider.acquire(&spec()).await.expect("a machine");
            answers(sandbox.as_mut()).await;
        }
        (Some(program), Err(why)) => eprintln!("skipped: {}: {why}", program.display()),
    }
}
