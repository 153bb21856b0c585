//! Attacks through kept state: the zygote, snapshots, archives.
//!
//! Snapshots and forks are how a tree search shares work, and how one tenant's state could reach another's. A
//! fork must see the snapshot as it was, and no later changes of the first sandbox or of other forks.

use crate::attack::host::{Witness, descendants};
use crate::attack::special::{Special, held, printed, python, special};
use crate::attack::{AttackOutcome, Verdict, escaped, spec};
use sinew_sandbox::{Ending, SandboxError, SandboxProvider};

/// The cases in the order of their numbers.
///
/// Case 20 runs first here and not among the resources, as the host imports the archive: no program is
/// needed.
pub(crate) const ALL: &[Special] = &[
    special!(20, "archive bombs", archive_bombs),
    special!(35, "writes during and after a snapshot", late_writes),
    special!(65, "zygote poisoning", poisoning),
    special!(65, "what the zygote holds", zygote_seen),
    special!(67, "restored attacker state", restored),
];

/// The verdict where a level has no snapshots.
///
/// Only `SandboxError::Unsupported` counts; any other error of a snapshot is the caller's to report.
fn unsupported(why: &SandboxError) -> Option<Verdict> {
    let none = matches!(why, SandboxError::Unsupported { .. });
    none.then(|| (AttackOutcome::NotApplicable, why.to_string()))
}

/// One header of a tar file (POSIX.1-1988, `ustar`).
///
/// `kind` is the type flag: `b'0'` a file, `b'1'` a hard link, `b'2'` a symbolic link, `b'3'` a character
/// device. `size` may be larger than what follows. The checksum is the sum of all bytes with its own eight
/// as spaces, so that only the attack itself can be a reason to refuse the block.
///
/// `name` and `link` have to be shorter than 100 bytes.
fn header(name: &str, kind: u8, size: u64, link: &str) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..107].copy_from_slice(b"0000777");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000000");
    block[148..156].fill(b' ');
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

/// Archives that grow, link outside or name absolute paths must be refused whole.
///
/// Each archive may grow to 1 MiB. Six have one fault: a size of 4 GiB without content, `..` in a path, an
/// absolute path, a device node, a hard link to the host's secret, and a file below a symbolic link that
/// leads to `/tmp`. The seventh is 70,000 empty files, which have no bytes that a limit of bytes would
/// count.
///
/// A level without snapshots has nothing to import, and the case does not apply.
async fn archive_bombs(
    provider: &dyn SandboxProvider,
    witness: &Witness,
) -> Result<Verdict, SandboxError> {
    let end = vec![0u8; 1024];
    let secret = witness.path();
    let cases: [(&str, Vec<u8>); 6] = [
        ("a size of 4 GiB", header("big", b'0', 4 << 30, "")),
        ("a path that leaves", header("../../escaped", b'0', 0, "")),
        ("an absolute path", header("/escaped", b'0', 0, "")),
        ("a device", header("device", b'3', 0, "")),
        ("a hard link", header("hard", b'1', 0, &secret)),
        (
            "a file behind a link",
            [
                header("link", b'2', 0, "/tmp"),
                header("link/escaped", b'0', 0, ""),
            ]
            .concat(),
        ),
    ];
    for (name, archive) in cases {
        let archive = [archive, end.clone()].concat();
        match provider.import(&archive, 1 << 20).await {
            Ok(_) => return Ok(escaped(format!("{name} was taken"))),
            Err(e) => {
                if let Some(none) = unsupported(&e) {
                    return Ok(none);
                }
            }
        }
    }
    let many: Vec<u8> = (0..70_000)
        .flat_map(|i| header(&format!("f{i}"), b'0', 0, ""))
        .chain(end)
        .collect();
    if provider.import(&many, 1 << 20).await.is_ok() {
        return Ok(escaped("70000 files were taken"));
    }
    Ok(held("each was refused"))
}

/// Checks that data written after a snapshot are not in it.
///
/// The snapshot is taken with one file, which the program changes afterwards. The fork must see the old
/// content and no new file; the first sandbox must not see what the fork writes. That holds only if both have
/// separate copies, by value or by pages.
async fn late_writes(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let spec = spec();
    let mut sandbox = provider.acquire(&spec).await?;
    sandbox.write_file("state", b"before").await?;
    let snapshot = match sandbox.snapshot().await {
        Ok(snapshot) => snapshot,
        Err(e) => return unsupported(&e).ok_or(e),
    };
    let late = "import os\nopen('state', 'w').write('after')\nopen('new', 'w').write('x')\nfor p in os.listdir('/'): pass";
    python(sandbox.as_mut(), late).await?;
    let mut fork = provider.fork(&spec, &snapshot).await?;
    let look = "import os; print(open('state').read(), os.listdir('.'))";
    let seen = printed(&python(fork.as_mut(), look).await?);
    // And what the fork writes is not seen by the first.
    python(fork.as_mut(), "open('state', 'w').write('fork')").await?;
    let own = printed(&python(sandbox.as_mut(), "print(open('state').read())").await?);
    fork.destroy().await?;
    sandbox.destroy().await?;
    match (seen.as_str(), own.as_str()) {
        ("before ['state']", "after") => Ok(held("a snapshot is what it was when it was taken")),
        other => Ok(escaped(format!("{other:?}"))),
    }
}

/// One fork changes everything that it can reach; the next fork must not see any change.
///
/// The first program patches built-in functions, modules, the import path, the environment, the object
/// `True` in memory, the globals of the lowest frame, writes to each descriptor and kills its parent. The
/// second one, in a new sandbox, prints ten facts that must all be as in a new interpreter.
async fn poisoning(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let poison = "
import builtins, ctypes, gc, json, math, os, random, re, sys
builtins.len = lambda x: 42
json.dumps = lambda *a: 'POISON'
math.pi = 3
random.random = lambda: 0.5
sys.path.insert(0, '/work'); sys.modules['statistics'] = None
os.environ['POISON'] = '1'
for o in gc.get_objects():
    if isinstance(o, dict) and o.get('__name__') in ('re', 'string', 'zygote'): o['POISON'] = 1
ctypes.memset(id(True) + 24, 0, 4)
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
frame.f_globals['poison'] = 1
for fd in range(64):
    try: os.write(fd, b'x' * 24)
    except OSError: pass
for pid in (os.getppid(), 0, -1):
    if pid not in (0, -1): os.kill(pid, 9)
";
    let mut first = provider.acquire(&spec()).await?;
    python(first.as_mut(), poison).await?;
    first.destroy().await?;
    let look = "
import builtins, gc, json, math, os, random, re, statistics, string, sys
print(len('ab'), json.dumps([1]), math.pi > 3.14, random.random() != 0.5, '/work' in sys.path, 'POISON' in os.environ, hasattr(re, 'POISON'), hasattr(string, 'POISON'), int(True), any('poison' in f for f in [sys._getframe().f_globals]))
";
    let mut second = provider.acquire(&spec()).await?;
    let seen = printed(&python(second.as_mut(), look).await?);
    second.destroy().await?;
    match seen.as_str() {
        "2 [1] True True False False False False 1 False" => Ok(held("the next one is untouched")),
        other => Ok(escaped(other)),
    }
}

/// Number of PID namespaces that a process is in (`/proc/PID/status`).
fn depth(status: &str) -> usize {
    let ids = status.lines().find_map(|l| l.strip_prefix("NSpid:"));
    ids.map_or(0, |ids| ids.split_whitespace().count())
}

/// A descriptor of a process that is neither a pipe nor a socket and stays open.
///
/// The zygote holds a pidfd of a sandbox's init while it makes a fork there, so a pool that refills itself
/// shows one for a moment. A pidfd counts if it is open in each of 100 looks within a second.
async fn kept_file(pid: u32) -> Option<String> {
    for _ in 0..100 {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd"));
        let targets = files.into_iter().flatten().flatten().map(|file| {
            let target = std::fs::read_link(file.path()).unwrap_or_default();
            target.to_string_lossy().into_owned()
        });
        let strange = targets.into_iter().find(|target| {
            let known = ["pipe:", "socket:"]
                .iter()
                .any(|kind| target.starts_with(kind));
            // A file that was closed since it was listed has no target.
            !known && !target.is_empty()
        })?;
        if strange != "anon_inode:[pidfd]" {
            return Some(strange);
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    Some("a pidfd for a second".into())
}

/// The interpreter that is forked has one thread, no file but its sockets, no environment.
///
/// The process is found on the host by its command line and by its depth of PID namespaces: one more than
/// this process. A level without a zygote has nothing to look at, and the case does not apply. Descriptors
/// must be pipes or sockets, except a pidfd during a fork; the environment has at most the five variables
/// that each sandbox has.
async fn zygote_seen(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let result = python(sandbox.as_mut(), "print(1)").await?;
    sandbox.destroy().await?;
    if result.ending != (Ending::Exited { code: 0 }) {
        return Ok(escaped(result.ending.to_string()));
    }
    let own_depth = depth(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    let mut found = 0;
    for pid in descendants(std::process::id()) {
        let read = |file: &str| {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let (line, status) = (read("cmdline"), read("status"));
        let boot = line.contains("<zygote>") && status.contains("NoNewPrivs:\t1\n");
        // Its forks are in rooms, one PID namespace deeper, or on their way there.
        if !boot || depth(&status) != own_depth + 1 {
            continue;
        }
        found += 1;
        if !status.contains("Threads:\t1\n") || !status.contains("CapBnd:\t0000000000000000\n") {
            return Ok(escaped("the zygote has threads, or a bounding set"));
        }
        for variable in read("environ").split('\0').filter(|v| !v.is_empty()) {
            let name = variable.split('=').next().unwrap_or_default();
            if !["PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE"].contains(&name) {
                return Ok(escaped(format!("its environment has {name}")));
            }
        }
        if let Some(target) = kept_file(pid).await {
            return Ok(escaped(format!("it holds {target}")));
        }
    }
    Ok(match found {
        0 => (
            AttackOutcome::NotApplicable,
            "each execution starts a new interpreter: there is no zygote".into(),
        ),
        _ => held("one thread, pipes and sockets only, no environment, no bounding set"),
    })
}

/// State of one tenant comes back only where its snapshot is requested.
///
/// The first sandbox plants modules that Python would import, a set-user-id bit, a link to `/etc/shadow` and
/// a file outside of the work folder. The snapshot goes through an archive and back. Two exports must be the
/// same bytes, so that a hash names a state. The restored sandbox has the files as data and without the bit;
/// the file in `/tmp` is not part of it; a sandbox without the snapshot is empty.
async fn restored(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let spec = spec();
    let mut attacker = provider.acquire(&spec).await?;
    let plant = "import os\nopen('sitecustomize.py', 'w').write('print(\"PLANTED\")')\nopen('json.py', 'w').write('print(\"PLANTED\")')\nos.symlink('/etc/shadow', 'link')\nopen('/tmp/left', 'w').write('x')\nos.chmod('json.py', 0o6777)";
    python(attacker.as_mut(), plant).await?;
    let snapshot = match attacker.snapshot().await {
        Ok(snapshot) => snapshot,
        Err(e) => return unsupported(&e).ok_or(e),
    };
    attacker.destroy().await?;
    let archive = provider.export(&snapshot).await?;
    if provider.export(&snapshot).await? != archive {
        return Ok(escaped("two archives of one snapshot differ"));
    }
    let again = provider.import(&archive, 1 << 20).await?;
    let mut fork = provider.fork(&spec, &again).await?;
    let look = "import json, os\nm = os.stat('json.py').st_mode & 0o7777\nprint(json.dumps(sorted(os.listdir('.'))), oct(m), os.path.exists('/tmp/left'), os.access('link', os.R_OK))";
    let seen = printed(&python(fork.as_mut(), look).await?);
    let followed = fork.read_file("link", 100).await.is_ok();
    fork.destroy().await?;
    let mut other = provider.acquire(&spec).await?;
    let clean = printed(&python(other.as_mut(), "import os; print(os.listdir('.'))").await?);
    other.destroy().await?;
    let expected = "[\"json.py\", \"link\", \"sitecustomize.py\"] 0o777 False False";
    if seen != expected || followed || clean != "[]" {
        return Ok(escaped(format!("{seen} {followed} {clean}")));
    }
    Ok(held(
        "files come back as data: no set-user-id bit, no module is imported, links lead nowhere",
    ))
}
