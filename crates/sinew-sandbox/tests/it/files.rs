//! Files of sandboxes: snapshots, forks and archives have the same content, cost no more than it, and keep
//! nobody else waiting.

use crate::{OK, SOON_MS, exec, provider, python, small, text, with};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sinew_sandbox::{
    Limits, ProcessProvider, Program, Sandbox, SandboxProvider, SandboxSpec, Snapshot,
};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

/// Provider for any user: `sandboxes_run_for_users_who_are_not_root` runs these tests as an ordinary user,
/// too.
fn for_anybody(attached: bool) -> ProcessProvider {
    with(|config| config.attached_mounts = attached)
}

fn names(archive: &[u8]) -> Vec<String> {
    let mut archive = tar::Archive::new(archive);
    let entries = archive.entries().unwrap().map(Result::unwrap);
    entries
        .map(|e| String::from_utf8(e.path_bytes().into_owned()).unwrap())
        .collect()
}

#[tokio::test]
async fn an_archive_holds_nothing_that_was_deleted() {
    for attached in [false, true] {
        let provider = for_anybody(attached);
        let mut sandbox = provider.acquire(&small()).await.unwrap();
        let mut saved = Vec::new();
        for script in [
            "mkdir d e; echo x > d/secret; echo y > e/gone; echo z > kept",
            "rm -rf d; mkdir d; rm -r e; mkdir e; echo new > e/new",
        ] {
            let ran = exec(sandbox.as_mut(), Program::Shell(script.into()), SOON_MS).await;
            assert_eq!(ran.ending, OK, "{}", text(&ran.stderr));
            saved.push(sandbox.snapshot().await.unwrap());
        }
        let archive = provider.export(&saved[1]).await.unwrap();
        assert_eq!(names(&archive), ["d", "e", "e/new", "kept"], "{attached}");
        let mut fork = provider.fork(&small(), &saved[1]).await.unwrap();
        let look = Program::Shell("find . | sort | tr '\\n' ' '".into());
        let seen = exec(fork.as_mut(), look, SOON_MS).await;
        assert_eq!(text(&seen.stdout), ". ./d ./e ./e/new ./kept ");
    }
}

/// One thing that a program does to its files; what fails is left out.
fn operations() -> impl Strategy<Value = Vec<String>> {
    let name = "[abc](/[abc]){0,2}";
    let one = prop_oneof![
        4 => (name, any::<u16>()).prop_map(|(p, n)| format!("os.makedirs(os.path.dirname({p:?}) or '.', exist_ok=True); open({p:?}, 'w').write('{n}')")),
        3 => name.prop_map(|p| format!("os.makedirs({p:?})")),
        3 => name.prop_map(|p| format!("shutil.rmtree({p:?})")),
        2 => name.prop_map(|p| format!("os.remove({p:?})")),
        2 => (name, name).prop_map(|(p, q)| format!("os.rename({p:?}, {q:?})")),
        1 => (name, name).prop_map(|(p, q)| format!("shutil.move({p:?}, {q:?})")),
        1 => (name, name).prop_map(|(p, q)| format!("os.symlink({p:?}, {q:?})")),
        2 => (name, name).prop_map(|(p, q)| format!("os.link({p:?}, {q:?})")),
        1 => (name, 0..300_000u32).prop_map(|(p, n)| format!("f = open({p:?}, 'ab'); f.truncate({n}); f.write(b'end'); f.close()")),
        1 => (name, prop::sample::select(vec![0o700, 0o500, 0o640, 0o755, 0])).prop_map(|(p, m)| format!("os.chmod({p:?}, {m})")),
        1 => name.prop_map(|p| format!("os.mkfifo({p:?})")),
    ];
    proptest::collection::vec(one, 1..12)
}

fn program(operations: &[String]) -> String {
    let mut code = "import os, shutil\n".to_owned();
    for operation in operations {
        code.push_str(&format!("try:\n    {operation}\nexcept OSError: pass\n"));
    }
    code
}

/// Every file as a program sees it, but for what is in no archive.
const LOOK: &str = r"
import os, stat, zlib
def look(folder):
    try: names = sorted(os.listdir(folder))
    except OSError: print(folder, 'closed'); return
    for name in names:
        path = folder + '/' + name
        try: s = os.lstat(path)
        except OSError: print(path, 'closed'); continue
        kind = stat.S_IFMT(s.st_mode)
        if kind == stat.S_IFDIR:
            print(path, oct(s.st_mode)); look(path)
        elif kind == stat.S_IFLNK: print(path, '->', os.readlink(path))
        elif kind == stat.S_IFREG:
            try: content = zlib.crc32(open(path, 'rb').read())
            except OSError: content = 'closed'
            print(path, oct(s.st_mode), s.st_size, content)
look('.')
";

async fn look(sandbox: &mut dyn Sandbox) -> String {
    let seen = python(sandbox, LOOK).await;
    assert_eq!(seen.ending, OK, "{}", text(&seen.stderr));
    text(&seen.stdout)
}

async fn look_at_fork(provider: &dyn SandboxProvider, spec: &SandboxSpec, of: &Snapshot) -> String {
    let mut fork = provider.fork(spec, of).await.unwrap();
    let seen = look(fork.as_mut()).await;
    fork.destroy().await.unwrap();
    seen
}

/// Checks that after each turn a sandbox, its fork and the import of its archive show the same files.
async fn chained(provider: &dyn SandboxProvider, turns: Vec<Vec<String>>) {
    let mut spec = small();
    spec.limits.output_bytes = 64 << 10;
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    for (n, operations) in turns.iter().enumerate() {
        let ran = python(sandbox.as_mut(), &program(operations)).await;
        assert_eq!(ran.ending, OK, "{}", text(&ran.stderr));
        let snapshot = sandbox.snapshot().await.unwrap();
        let seen = look(sandbox.as_mut()).await;
        assert_eq!(look_at_fork(provider, &spec, &snapshot).await, seen);
        let archive = provider.export(&snapshot).await.unwrap();
        let back = provider.import(&archive, 2 << 20).await.unwrap();
        assert_eq!(look_at_fork(provider, &spec, &back).await, seen);
        assert_eq!(provider.export(&back).await.unwrap(), archive);
        if n % 2 == 1 {
            // The chain continues in a fork.
            let fork = provider.fork(&spec, &snapshot).await.unwrap();
            std::mem::replace(&mut sandbox, fork)
                .destroy()
                .await
                .unwrap();
        }
    }
    sandbox.destroy().await.unwrap();
}

#[test]
fn a_sandbox_its_fork_and_its_imported_archive_hold_the_same() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let provider = runtime.block_on(async { provider() });
    let mut runner = TestRunner::new(Config {
        cases: 12,
        failure_persistence: None,
        ..Config::default()
    });
    let turns = proptest::collection::vec(operations(), 1..6);
    let checked = runner.run(&turns, |turns| {
        runtime.block_on(chained(&provider, turns));
        Ok(())
    });
    checked.unwrap();
}

#[tokio::test]
async fn holes_and_names_of_one_file_cost_nothing_in_an_archive() {
    let provider = provider();
    let spec = SandboxSpec {
        limits: Limits {
            work_bytes: 16 << 20,
            ..Limits::default()
        },
        ..SandboxSpec::default()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    let code = "import os\nfor i in range(120): os.truncate(os.open(f's{i}', os.O_CREAT | os.O_WRONLY), 16 << 20) if i < 40 else open(f's{i}', 'wb').truncate(16 << 20)\nopen('one', 'wb').write(os.urandom(1 << 20))\nos.mkdir('d')\nfor i in range(50): os.link('one', f'd/l{i}')";
    let ran = python(sandbox.as_mut(), code).await;
    assert_eq!(ran.ending, OK, "{}", text(&ran.stderr));
    let snapshot = sandbox.snapshot().await.unwrap();
    let archive = provider.export(&snapshot).await.unwrap();
    assert!(archive.len() < 3 << 20, "{}", archive.len());
    let refused = provider.export_file(&snapshot, 1 << 20).await.unwrap_err();
    assert!(
        refused.to_string().contains("larger than 1048576 bytes"),
        "{refused}"
    );
    let back = provider.import(&archive, 16 << 20).await.unwrap();
    let mut fork = provider.fork(&spec, &back).await.unwrap();
    let look =
        "import os\ns = os.stat('s7'); print(s.st_size, s.st_blocks, os.stat('d/l49').st_nlink)";
    let seen = python(fork.as_mut(), look).await;
    assert_eq!(
        text(&seen.stdout),
        "16777216 0 51\n",
        "{}",
        text(&seen.stderr)
    );
    assert_eq!(provider.export(&back).await.unwrap(), archive);
}

fn archive_of(paths: impl Iterator<Item = String>) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for path in paths {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o700);
        header.set_size(0);
        builder.append_data(&mut header, path, &[][..]).unwrap();
    }
    builder.into_inner().unwrap()
}

#[tokio::test]
async fn an_import_under_way_keeps_nobody_waiting() {
    let provider = provider();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let archive = archive_of((0..3).map(|i| format!("f{i}")));
    // It cannot continue before the rest comes.
    writer.write_all(&archive[..700]).unwrap();
    let importing = provider.import_file(File::from(OwnedFd::from(reader)), 1 << 20);
    let others = async {
        for _ in 0..3 {
            let mut other = provider.acquire(&small()).await.unwrap();
            let ran = python(other.as_mut(), "print(1)").await;
            assert_eq!(text(&ran.stdout), "1\n");
            other.destroy().await.unwrap();
        }
        writer.write_all(&archive[700..]).unwrap();
        drop(writer);
    };
    let (snapshot, ()) = tokio::join!(importing, others);
    assert_eq!(provider.export(&snapshot.unwrap()).await.unwrap(), archive);
    // One whose caller is gone ends.
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut importing = provider.import_file(File::from(OwnedFd::from(reader)), 1 << 20);
    assert!(futures::poll!(&mut importing).is_pending());
    tokio::task::yield_now().await;
    drop(importing);
    let mut other = provider.acquire(&small()).await.unwrap();
    let ran = python(other.as_mut(), "print(2)").await;
    assert_eq!(text(&ran.stdout), "2\n");
}

#[tokio::test]
async fn entries_of_deep_folders_are_bounded_together() {
    let provider = provider();
    let deep = |top: usize| vec![format!("{top}"); 65].join("/");
    let same = archive_of((0..65_500).map(|_| deep(0)));
    provider.import(&same, 1 << 20).await.unwrap();
    let jumps =
        archive_of((0..65_500).map(|i| format!("{}/x", vec![format!("{}", i % 2); 64].join("/"))));
    let refused = provider.import(&jumps, 1 << 20).await.unwrap_err();
    assert!(
        refused.to_string().contains("jump between folders"),
        "{refused}"
    );
    let mut hard = tar::Header::new_gnu();
    hard.set_entry_type(tar::EntryType::Link);
    hard.set_size(0);
    for target in ["nothing", "/etc/passwd", "../x", "d"] {
        let mut builder =
            tar::Builder::new(archive_of(std::iter::once("d".to_owned()))[..512].to_vec());
        hard.set_link_name_literal(target).unwrap();
        let mut header = hard.clone();
        builder.append_data(&mut header, "l", &[][..]).unwrap();
        let archive = builder.into_inner().unwrap();
        assert!(provider.import(&archive, 100).await.is_err(), "{target}");
    }
}

#[tokio::test]
async fn many_snapshots_of_one_sandbox_keep_all_its_files() {
    for attached in [false, true] {
        let provider = for_anybody(attached);
        let mut sandbox = provider.acquire(&small()).await.unwrap();
        let begin = "open('/tmp/t', 'w').write('temporary'); import os; os.mkdir('d'); os.chmod('d', 0o500)";
        assert_eq!(python(sandbox.as_mut(), begin).await.ending, OK);
        let mut snapshots = Vec::new();
        for i in 0..40 {
            let content = format!("{i}");
            sandbox
                .write_file("count", content.as_bytes())
                .await
                .unwrap();
            sandbox.write_file(&format!("f{i}"), b"x").await.unwrap();
            snapshots.push(sandbox.snapshot().await.unwrap());
        }
        assert!(sandbox.stats().await.unwrap().layers < 32);
        let look = "import os; print(open('count').read(), len(os.listdir('.')), os.path.exists('/tmp/t'), oct(os.stat('d').st_mode))";
        let seen = python(sandbox.as_mut(), look).await;
        assert_eq!(
            text(&seen.stdout),
            "39 42 True 0o40500\n",
            "{}",
            text(&seen.stderr)
        );
        sandbox.destroy().await.unwrap();
        for (i, snapshot) in snapshots.iter().enumerate().step_by(13) {
            let mut fork = provider.fork(&small(), snapshot).await.unwrap();
            let seen = python(fork.as_mut(), look).await;
            let expected = format!("{i} {} False 0o40500\n", i + 3);
            assert_eq!(text(&seen.stdout), expected, "{}", text(&seen.stderr));
            fork.destroy().await.unwrap();
        }
    }
}

#[tokio::test]
async fn snapshots_say_which_stores_they_keep() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    sandbox.write_file("a", &[1; 100_000]).await.unwrap();
    let one = sandbox.snapshot().await.unwrap();
    sandbox.write_file("b", &[1; 300_000]).await.unwrap();
    let two = sandbox.snapshot().await.unwrap();
    assert_eq!((one.stores.len(), two.stores.len()), (1, 1));
    assert_eq!(one.stores[0].0, two.stores[0].0);
    assert!((100_000..300_000).contains(&one.stores[0].1));
    assert!((400_000..600_000).contains(&two.stores[0].1));
    let mut fork = provider.fork(&small(), &one).await.unwrap();
    let three = fork.snapshot().await.unwrap();
    assert_eq!(three.stores.len(), 2);
    assert!(three.stores.contains(&one.stores[0]));
    let archive = provider.export(&two).await.unwrap();
    let back = provider.import(&archive, 1 << 20).await.unwrap();
    assert!((400_000..600_000).contains(&back.stores[0].1));
}
