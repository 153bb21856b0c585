//! Writable roots: users, folders, files in and out, and what is left of them.

use super::*;
use sinew_sandbox::{Entry, EntryKind, UploadOptions, WritableRoot};
use std::os::unix::fs::MetadataExt;

fn above(bytes: u64) -> SandboxSpec {
    SandboxSpec {
        writable_root: Some(WritableRoot {
            bytes,
            ..WritableRoot::default()
        }),
        env: vec![("PATH".into(), "/own:/usr/bin:/bin".into())],
        ..small()
    }
}

/// Runs a script as a user in a folder.
async fn script(
    sandbox: &mut Box<dyn Sandbox>,
    user: &str,
    workdir: &str,
    text: &str,
) -> Result<String, SandboxError> {
    let options = ExecOptions {
        user: Some(user.into()),
        workdir: Some(workdir.into()),
        ..ExecOptions::default()
    };
    let asked = request(Program::Shell(format!("exec 2>&1\n{text}")));
    let result = sandbox.exec_with(asked, options).await?;
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}

fn file(path: &str, mode: u32, content: &str) -> Entry {
    Entry {
        path: path.into(),
        mode,
        kind: EntryKind::File(content.as_bytes().to_vec()),
    }
}

async fn users_and_folders(kind: EngineKind) {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(kind, dir.path()));
    let spec = SandboxSpec {
        strict: true,
        ..above(8 << 20)
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let plain = request(Program::Shell("id -u; pwd; echo $HOME $PATH; umask".into()));
    let result = sandbox.exec(plain).await.unwrap();
    let told = String::from_utf8_lossy(&result.stdout).into_owned();
    assert_eq!(told, "0\n/\n/ /own:/usr/bin:/bin\n0022\n");
    assert!(
        result
            .protections
            .iter()
            .any(|p| p.name == "user namespace" && p.enforced)
    );
    let made = "mkdir -p /app /own && chown 1000:1001 /app && chmod 700 /app && echo kept > /etc/new && ls -d /etc/new";
    assert_eq!(
        script(&mut sandbox, "root", "/", made).await.unwrap(),
        "/etc/new\n"
    );
    let seen =
        "id -u; id -g; pwd; echo mine > x; touch /etc/no 2>/dev/null || echo refused; cat /etc/new";
    assert_eq!(
        script(&mut sandbox, "1000:1001", "/app", seen)
            .await
            .unwrap(),
        "1000\n1001\n/app\nrefused\nkept\n"
    );
    // Root reads what a user has hidden, and adds one by name.
    let add = "cat /app/x; echo agent:x:1000:1001::/app:/bin/sh >> /etc/passwd";
    assert_eq!(
        script(&mut sandbox, "root", "/", add).await.unwrap(),
        "mine\n"
    );
    let named = script(&mut sandbox, "agent", "/app", "id -u; echo $HOME")
        .await
        .unwrap();
    assert_eq!(named, "1000\n/app\n");
    for (user, workdir, field) in [("nobody-here", "/", "user"), ("root", "/none", "workdir")] {
        let refused = script(&mut sandbox, user, workdir, "true")
            .await
            .unwrap_err();
        assert!(
            matches!(&refused, SandboxError::Request { field: f, .. } if *f == field),
            "{refused}"
        );
    }
    let denied = script(&mut sandbox, "2000", "/app", "true")
        .await
        .unwrap_err();
    assert!(denied.to_string().contains("workdir"), "{denied}");
    sandbox.destroy().await.unwrap();
    let mut next = provider.acquire(&spec).await.unwrap();
    let clean = "ls /app /own /etc/new 2>/dev/null | wc -l; tail -n 1 /etc/passwd | grep -c agent";
    assert_eq!(
        script(&mut next, "root", "/", clean).await.unwrap(),
        "0\n0\n"
    );
    next.destroy().await.unwrap();
    drop(provider);
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[tokio::test]
async fn programs_have_users_and_folders_of_the_root() {
    users_and_folders(EngineKind::Crun).await;
    users_and_folders(EngineKind::Runc).await;
}

#[tokio::test]
async fn files_are_put_and_taken_at_any_path() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&above(8 << 20)).await.unwrap();
    let tests = [
        file(
            "test.sh",
            0o755,
            "#!/bin/sh\nmkdir -p /logs/verifier\necho 0.5 > /logs/verifier/reward.txt\n",
        ),
        file("data/x", 0o644, "x"),
    ];
    let plain = UploadOptions::default();
    sandbox.upload("/opt/tests", &tests, &plain).await.unwrap();
    let ran = script(
        &mut sandbox,
        "root",
        "/opt/tests",
        "./test.sh; ls -ln test.sh | cut -d' ' -f1,3,4",
    )
    .await;
    assert_eq!(ran.unwrap(), "-rwxr-xr-x 0 0\n");
    let reward = sandbox
        .download("/logs/verifier/reward.txt", 100)
        .await
        .unwrap();
    assert_eq!(reward.unwrap(), [file("reward.txt", 0o644, "0.5\n")]);
    let all = sandbox.download("/logs", 100).await.unwrap().unwrap();
    let names: Vec<_> = all.iter().map(|e| e.path.to_str().unwrap()).collect();
    assert_eq!(names, ["verifier", "verifier/reward.txt"]);
    assert!(
        sandbox.download("/logs", 3).await.is_err(),
        "more than 3 bytes"
    );
    assert!(sandbox.download("/none/x", 3).await.unwrap().is_none());
    for path in ["logs", "/", "", "/logs/../etc", "/logs//x"] {
        assert!(sandbox.download(path, 3).await.is_err(), "{path}");
        assert!(
            sandbox.upload(path, &tests, &plain).await.is_err(),
            "{path}"
        );
    }
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn an_upload_can_replace_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&above(8 << 20)).await.unwrap();
    let tests = [file("test.sh", 0o755, "true\n"), file("data/x", 0o644, "x")];
    let plain = UploadOptions::default();
    sandbox.upload("/opt/tests", &tests, &plain).await.unwrap();
    // Everything that an agent left there is gone, and the owner is the one that is named.
    let replace = UploadOptions {
        user: Some("1000:1000".into()),
        replace: true,
    };
    script(
        &mut sandbox,
        "root",
        "/",
        "touch /opt/tests/conftest.py; mkdir -m 0 /opt/tests/shut",
    )
    .await
    .unwrap();
    sandbox
        .upload("/opt/tests", &tests, &replace)
        .await
        .unwrap();
    let left = script(
        &mut sandbox,
        "1000:1000",
        "/opt/tests",
        "ls; touch data/y && echo mine",
    )
    .await;
    assert_eq!(left.unwrap(), "data\ntest.sh\nmine\n");
    let large = [file("large", 0o644, &"x".repeat(9 << 20))];
    assert!(
        sandbox.upload("/opt", &large, &plain).await.is_err(),
        "no room"
    );
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn a_layer_is_bounded_and_has_no_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(config(EngineKind::Crun, dir.path()));
    let mut sandbox = provider.acquire(&above(2 << 20)).await.unwrap();
    let fill = "import errno\ntry:\n    with open('/big', 'wb') as f:\n        while True: f.write(bytes(1 << 16))\n\
                except OSError as e: print(errno.errorcode[e.errno])";
    let told = printed(&mut sandbox, fill).await;
    assert!(["ENOSPC\n", "EFBIG\n"].contains(&told.as_str()), "{told}");
    let many = "import errno\ntry:\n    for n in range(100000): open('/many%d' % n, 'w').close()\n\
                except OSError as e: print(errno.errorcode[e.errno])";
    assert_eq!(printed(&mut sandbox, many).await, "ENOSPC\n");
    assert!(matches!(
        sandbox.snapshot().await,
        Err(SandboxError::Unsupported { .. })
    ));
    assert!(matches!(
        sandbox.reset().await,
        Err(SandboxError::Unsupported { .. })
    ));
    sandbox.destroy().await.unwrap();
    let mut closed = provider.acquire(&small()).await.unwrap();
    let refused = script(&mut closed, "root", "/", "true").await.unwrap_err();
    assert!(refused.to_string().contains("writable root"), "{refused}");
    assert!(closed.download("/etc", 100).await.is_err());
    closed.destroy().await.unwrap();
    for (bytes, user, workdir) in [(1, "root", "/"), (1 << 20, "", "/"), (1 << 20, "root", "x")] {
        let wrong = SandboxSpec {
            writable_root: Some(WritableRoot {
                bytes,
                user: user.into(),
                workdir: workdir.into(),
            }),
            ..small()
        };
        let refused = provider.acquire(&wrong).await.err().unwrap();
        assert!(matches!(refused, SandboxError::Request { .. }), "{refused}");
    }
}

#[tokio::test]
async fn an_image_is_never_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let provider = start(ContainerConfig {
        image: Image::Archive(busybox(dir.path())),
        ..config(EngineKind::Crun, &dir.path().join("state"))
    });
    let mut sandbox = provider.acquire(&above(8 << 20)).await.unwrap();
    let change = "echo x > /bin/new; echo x > /top; [ -e /top ] && [ -e /bin/new ] && echo made; [ -e /usr ] || echo no usr";
    let asked = request(Program::Shell(change.into()));
    let result = sandbox.exec(asked).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&result.stdout), "made\nno usr\n");
    sandbox.destroy().await.unwrap();
    let mut next = provider.acquire(&above(8 << 20)).await.unwrap();
    let look = "[ -e /top ] || [ -e /bin/new ] || echo clean; [ -e /etc/hosts ] && echo hosts";
    let result = next
        .exec(request(Program::Shell(look.into())))
        .await
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&result.stdout), "clean\nhosts\n");
    next.destroy().await.unwrap();
    // Root of the host is still the owner of what was unpacked.
    let state = dir.path().join("state");
    let runs = std::fs::read_dir(&state).unwrap().flatten();
    let image = runs
        .map(|run| run.path().join("image/bin/busybox"))
        .next()
        .unwrap();
    assert_eq!(image.metadata().unwrap().uid(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_has_writable_roots_and_says_what_it_lacks() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    let provider = start(ContainerConfig {
        socket: Some(daemon.socket()),
        ..config(EngineKind::Docker, dir.path())
    });
    let spec = above(8 << 20);
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let made = "mkdir /app && echo x > /app/x && id -u && cat /app/x";
    assert_eq!(
        script(&mut sandbox, "root", "/", made).await.unwrap(),
        "0\nx\n"
    );
    let seen = "id -u; touch /app/y 2>/dev/null || echo refused";
    assert_eq!(
        script(&mut sandbox, "1000", "/app", seen).await.unwrap(),
        "1000\nrefused\n"
    );
    let taken = sandbox.download("/app", 100).await.unwrap().unwrap();
    assert_eq!(taken, [file("x", 0o644, "x\n")]);
    sandbox.destroy().await.unwrap();
    // Its daemon maps no users, which a strict sandbox needs.
    let strict = SandboxSpec {
        strict: true,
        ..spec.clone()
    };
    let refused = provider.acquire(&strict).await.err().unwrap();
    assert!(refused.to_string().contains("user namespace"), "{refused}");
    let mut next = provider.acquire(&spec).await.unwrap();
    let clean = script(&mut next, "root", "/", "[ -e /app ] || echo clean").await;
    assert_eq!(clean.unwrap(), "clean\n");
    next.destroy().await.unwrap();
}
