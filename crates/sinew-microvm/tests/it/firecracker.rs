//! Firecracker's API against a stand-in that has its states and answers, over the real agent; and
//! the real one where there is one.

use serde_json::json;
use sinew_guest::Setup;
use sinew_microvm::Image;
use sinew_microvm::firecracker::{Api, Boot, FirecrackerError, FirecrackerMachine, connect, probe};
use sinew_sandbox::{ExecRequest, Limits, Program};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

struct Stand {
    folder: tempfile::TempDir,
    program: PathBuf,
}

fn stand() -> Stand {
    let folder = tempfile::tempdir().expect("folder");
    let inside = |name: &str| folder.path().join(name);
    std::fs::write(inside("agent"), sinew_guest::AGENT).expect("agent");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(inside("agent"), executable).expect("mode");
    let busybox = ["/bin/busybox", "/usr/bin/busybox"];
    let busybox = busybox.iter().find(|p| Path::new(p).exists());
    let busybox = busybox.expect("run scripts/setup.sh: it installs busybox-static");
    std::fs::copy(busybox, inside("busybox")).expect("busybox");
    std::fs::write(inside("vmlinux"), "kernel").expect("kernel");
    std::fs::write(inside("root.cpio"), "root").expect("root");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/firecracker_mock.py");
    Stand { folder, program }
}

impl Stand {
    fn boot(&self) -> Boot {
        Boot {
            kernel: self.folder.path().join("vmlinux"),
            initrd: self.folder.path().join("root.cpio"),
            memory_mib: 16,
        }
    }
}

async fn says(machine: &mut FirecrackerMachine, words: &str) {
    let setup = Setup {
        limits: Limits::default(),
        uid: 1000,
        own_user: false,
        tcp: false,
        inodes: 100,
        python: None,
        warm_python: false,
        env: Vec::new(),
    };
    machine.guest.set_up(&setup).await.expect("set up");
    let argv = ["/bin/busybox", "echo", words].map(String::from);
    let request = ExecRequest {
        program: Program::Argv(argv.to_vec()),
        stdin: Vec::new(),
        deadline: Duration::from_secs(10),
    };
    let outcome = machine.guest.exec(&request, &[], 1000, None).await;
    assert_eq!(
        outcome.expect("an end").stdout,
        format!("{words}\n").as_bytes()
    );
}

#[tokio::test]
async fn boots_saves_and_restores() {
    let stand = stand();
    let first = stand.folder.path().join("first");
    let machine = FirecrackerMachine::boot(&stand.program, &first, &stand.boot()).await;
    let mut machine = machine.expect("a machine");
    says(&mut machine, "booted").await;
    let saved = machine.save().await.expect("saved");
    says(&mut machine, "goes on").await;
    for clone in ["one", "two"] {
        let folder = stand.folder.path().join(clone);
        let restored = FirecrackerMachine::restore(&stand.program, &folder, &saved).await;
        says(&mut restored.expect("a clone"), clone).await;
    }
    let calls = std::fs::read_to_string(first.join("calls.log")).expect("calls");
    let expected = "PUT /machine-config\nPUT /boot-source\nPUT /vsock\nPUT /actions\n\
                    PATCH /vm\nPUT /snapshot/create\nPATCH /vm\n";
    assert_eq!(calls, expected);
    let calls = std::fs::read_to_string(stand.folder.path().join("two/calls.log"));
    assert_eq!(calls.expect("calls"), "PUT /snapshot/load\n");
}

#[tokio::test]
async fn refusals_are_told_as_they_are() {
    let stand = stand();
    let folder = stand.folder.path().join("machine");
    let mut boot = stand.boot();
    boot.kernel = "/nonexistent/vmlinux".into();
    let refused = FirecrackerMachine::boot(&stand.program, &folder, &boot).await;
    let Err(FirecrackerError::Refused {
        path,
        status,
        fault,
        ..
    }) = refused
    else {
        panic!("it booted nothing");
    };
    assert_eq!((path.as_str(), status), ("/boot-source", 400));
    assert!(fault.contains("/nonexistent/vmlinux"), "{fault}");

    let folder = stand.folder.path().join("other");
    let machine = FirecrackerMachine::boot(&stand.program, &folder, &stand.boot()).await;
    let _machine = machine.expect("a machine");
    let api = Api::new(folder.join("api.sock"));
    let create = json!({ "snapshot_path": "s", "mem_file_path": "m" });
    for (method, path, body, why) in [
        ("PUT", "/snapshot/create", create, "while running"),
        (
            "PUT",
            "/snapshot/load",
            json!({}),
            "not allowed after configuring",
        ),
        (
            "PUT",
            "/machine-config",
            json!({ "vcpu_count": 1 }),
            "after starting",
        ),
        ("PUT", "/nothing", json!({}), "Invalid request"),
    ] {
        let told = api.ask(method, path, body).await.expect_err("refused");
        assert!(told.to_string().contains(why), "{told}");
    }
    // Nobody listens on another port: told, not awaited for ever.
    let socket = folder.join("agent.sock");
    let missing = connect(&socket, 99, Duration::from_millis(200)).await;
    assert!(missing.is_err_and(|e| e.to_string().contains("port 99")));
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
        let told = Api::new(socket).ask("GET", "/", json!({})).await;
        assert!(
            matches!(told, Err(FirecrackerError::Broken { .. })),
            "{answer:?}: {told:?}"
        );
        serve.await.expect("served");
    }
}

/// The real one is tried where it is named; what this host can do is printed, not assumed.
#[tokio::test]
async fn the_real_one_where_it_is_named() {
    let folder = tempfile::tempdir().expect("folder");
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/microvm");
    let image = Image::find(&images).expect("run scripts/setup.sh");
    let named = std::env::var_os("FIRECRACKER_BIN").map(PathBuf::from);
    let program = named.clone().unwrap_or_else(|| "/nonexistent".into());
    let found = probe(&program, &image, folder.path()).await;
    match (named, found) {
        (None, found) => assert!(found.is_err_and(|e| e.contains("start /nonexistent"))),
        (Some(program), Ok(())) => eprintln!("{} boots, saves, restores", program.display()),
        (Some(program), Err(why)) => eprintln!("skipped: {}: {why}", program.display()),
    }
}
