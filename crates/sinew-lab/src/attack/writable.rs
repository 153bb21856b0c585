//! Attacks on sandboxes with a writable root, in which programs are root of the sandbox.
//!
//! All cases of the other files run in this mode, too, with root as the user, except those of [`REPLACED`]:
//! they try what a writable root allows within the sandbox. The cases here try the same at the border.
//!
//! | cases | attack | what holds it |
//! |---|---|---|
//! | 85 | devices, mounts, modules, settings of the kernel | seccomp, no capabilities but over own files, a user namespace |
//! | 86 | the host's files and system folders | read-only mounts, users that mean nobody outside |
//! | 87 | set-user-id files of the layer | no-new-privileges, a layer mounted without them |
//! | 88 | capabilities of root, inside and as the host sees them | an ambient set of three, a bounding set of the same |
//! | 89 | files for the next sandbox | one layer for each sandbox |
//! | 90 | processes that stay | the agent ends everything in its PID namespace |
//! | 91 | links where the host puts and takes files | paths without links, within one file system |

use crate::attack::host::Witness;
use crate::attack::special::{Special, held, printed, python, seen_user, special};
use crate::attack::{Case, Expect, Verdict, escaped, spec};
use sinew_sandbox::{
    Ending, Entry, EntryKind, ExecOptions, ExecRequest, Program, Protection, Sandbox, SandboxError,
    SandboxFuture, SandboxProvider, SandboxSpec, Snapshot, UploadOptions, WritableRoot,
};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

/// Makes sandboxes of another provider, each with a writable root as large as its work folder would be.
pub(super) struct WritableRoots<'a>(pub(super) &'a dyn SandboxProvider);

/// A specification with a writable root. Programs start in the work folder, as the other cases expect.
fn above(spec: &SandboxSpec) -> SandboxSpec {
    SandboxSpec {
        writable_root: Some(WritableRoot {
            bytes: spec.limits.work_bytes,
            workdir: "/work".into(),
            ..WritableRoot::default()
        }),
        ..spec.clone()
    }
}

impl SandboxProvider for WritableRoots<'_> {
    fn level(&self) -> &'static str {
        self.0.level()
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.0.acquire(&above(spec)).await })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        self.0.protections()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.0.fork(&above(spec), snapshot).await })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        self.0.export_file(snapshot, max_bytes)
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        self.0.import_file(archive, max_bytes)
    }
}

/// Cases that do not apply with a writable root, by name, and the reason.
pub(super) const REPLACED: &[(&str, &str)] = &[
    (
        "hard link to a system file",
        "files of the root are the sandbox's own; see 86",
    ),
    (
        "writes to the system",
        "the root is the sandbox's own; see 86",
    ),
    (
        "keeps a capability over exec",
        "root keeps those over its own files; see 88",
    ),
    (
        "capabilities as the host sees them",
        "root keeps those over its own files; see 88",
    ),
];

/// The cases that a program carries out.
pub(super) const CASES: &[Case] = &[
    Case::new(85, "root makes devices, mounts and modules", Expect::Done, 5000, "
import stat
if os.getuid() != 0: print('ESCAPED the program is not root:', os.getuid())
for kind in (stat.S_IFBLK, stat.S_IFCHR, stat.S_IFIFO):
    for p in ('/node', '/dev/node', '/tmp/node'):
        tries('mknod', lambda: os.mknod(p, kind | 0o666, os.makedev(8, 0)))
os.makedirs('/target', exist_ok=True)
refused('mount', sc(165, b'tmpfs', b'/target', b'tmpfs', 0, 0))
refused('bind', sc(165, b'/', b'/target', 0, 4096, 0))
refused('remount', sc(165, b'/usr', b'/usr', 0, 4096 | 32, 0))
refused('umount', sc(166, b'/proc', 2))
refused('chroot', sc(161, b'/target'))
for name, nr in (('init_module', 175), ('finit_module', 313), ('delete_module', 176), ('kexec_load', 246), ('reboot', 169), ('swapon', 167), ('sethostname', 170), ('iopl', 172), ('settimeofday', 164), ('bpf', 321)):
    refused(name, sc(nr, 0, 0, 0, 0, 0, 0))
for p in ('/proc/sys/kernel/hostname', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/self/uid_map'):
    def write():
        with open(p, 'w') as f: f.write('0')
    tries(p, write)
print('DONE')
"),
    Case::new(86, "root changes the host's folders", Expect::Done, 5000, "
tries('secret', lambda: open(SECRET).read())
for p in ('/usr/planted', '/usr/bin/planted', '/.host/planted'):
    tries(p, lambda: open(p, 'w'))
for p in ('/usr/bin/env', '/.agent'):
    tries('write', lambda: open(p, 'r+b'))
    tries('chmod', lambda: os.chmod(p, 0o4755))
    tries('chown', lambda: os.chown(p, 0, 0))
    tries('unlink', lambda: os.unlink(p))
for p in ('/proc/1/root', '/proc/1/cwd', '/proc/1/exe', '/proc/1/environ', '/proc/kcore', '/proc/kmsg'):
    tries(p, lambda: os.listdir(p) if p.endswith(('root', 'cwd')) else open(p, 'rb').read(1))
print('DONE')
"),
    Case::new(87, "root leaves set-user-id programs", Expect::Done, 5000, "
import shutil, subprocess
for user in (1, 1000, 65534):
    shutil.copy('/usr/bin/id', '/id')
    os.chown('/id', user, user)
    os.chmod('/id', 0o6755)
    out = subprocess.run(['/id', '-u'], capture_output=True, text=True).stdout.strip()
    if out != str(os.getuid()): print('ESCAPED', user, out)
    os.unlink('/id')
tries('an unknown user', lambda: os.chown('/tmp', 70000, 70000))
print('DONE')
"),
    Case::new(88, "root takes more capabilities", Expect::Done, 5000, "
import subprocess
# CHOWN, DAC_OVERRIDE, FOWNER.
for text in (open('/proc/self/status').read(), subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout):
    lines = dict(l.split(':', 1) for l in text.splitlines())
    for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'):
        if int(lines[name], 16) & ~0xb: print('ESCAPED', name, lines[name])
    if lines['NoNewPrivs'].strip() != '1' or lines['Seccomp'].strip() != '2': print('ESCAPED', text)
for name, nr, args in (('setuid', 105, (1,)), ('setgroups', 116, (0, 0)), ('capset', 126, (bytes(8), bytes(24))), ('unshare', 272, (0x10000000,))):
    refused(name, sc(nr, *args))
print('DONE')
"),
];

/// The cases with a part on the host.
pub(super) const SPECIALS: &[Special] = &[
    special!(
        87,
        "set-user-id programs of root for another user",
        set_user_id
    ),
    special!(
        88,
        "capabilities of root as the host sees them",
        seen_capabilities
    ),
    special!(89, "files of the layer for the next sandbox", next_sandbox),
    special!(90, "processes that outlive their program", daemons),
    special!(91, "links where files are put and taken", links),
];

/// Runs a shell script as a user, and returns what it printed.
async fn as_user(
    sandbox: &mut dyn Sandbox,
    user: &str,
    script: &str,
) -> Result<(Ending, String), SandboxError> {
    let request = ExecRequest::new(Program::Shell(script.into()), Duration::from_secs(60));
    let options = ExecOptions {
        user: Some(user.into()),
        ..ExecOptions::default()
    };
    let result = sandbox.exec_with(request, options).await?;
    Ok((result.ending, printed(&result)))
}

/// A program of root with the set-user-id bit must run as the user that starts it, who cannot write where
/// root can.
async fn set_user_id(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let plant = "cp /usr/bin/id /id && chmod 6755 /id && mkdir /kept && chmod 700 /kept && echo ok";
    let planted = as_user(sandbox.as_mut(), "root", plant).await?;
    let script = "/id -u; id -u; touch /kept/x 2>/dev/null && echo wrote; touch /x 2>/dev/null && echo wrote";
    let seen = as_user(sandbox.as_mut(), "1000:1000", script).await?;
    sandbox.destroy().await?;
    Ok(match (planted.1.as_str(), seen.1.as_str()) {
        ("ok", "1000\n1000") => held("the bit has no effect"),
        _ => escaped(format!("{planted:?}, then {seen:?}")),
    })
}

/// The host reads the sets of capabilities and the user of a program.
async fn seen_capabilities(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    // CHOWN, DAC_OVERRIDE, FOWNER.
    let seen = seen_user(provider, 3, 0xb).await?;
    let root = |uid| held(format!("root inside is user {uid} outside"));
    Ok(seen.map_or_else(|escape| escape, root))
}

/// One sandbox writes everywhere; the next, and the image below both, must have nothing of it.
async fn next_sandbox(
    provider: &dyn SandboxProvider,
    witness: &Witness,
) -> Result<Verdict, SandboxError> {
    let places =
        "('/planted', '/etc/planted', '/tmp/planted', '/work/planted', '/opt/deep/planted')";
    let mark = &witness.secret;
    let plant = format!(
        "import os\nfor p in {places}:\n    os.makedirs(os.path.dirname(p), exist_ok=True)\n    \
         open(p, 'w').write('{mark}')\nopen('/etc/passwd', 'a').write('planted:x:0:0::/:/bin/sh\\n')\n\
         for p in {places}: assert os.path.exists(p)\nprint('ok')"
    );
    let mut first = provider.acquire(&spec()).await?;
    let planted = python(first.as_mut(), &plant).await?;
    let mut beside = provider.acquire(&spec()).await?;
    let look = format!(
        "import os\nprint([p for p in {places} if os.path.lexists(p)], os.path.exists('/etc/passwd') and \
         'planted' in open('/etc/passwd').read())"
    );
    let seen_beside = printed(&python(beside.as_mut(), &look).await?);
    first.destroy().await?;
    let mut next = provider.acquire(&spec()).await?;
    let seen_next = printed(&python(next.as_mut(), &look).await?);
    beside.destroy().await?;
    next.destroy().await?;
    let clean = "[] False";
    if printed(&planted) != "ok" {
        let why = String::from_utf8_lossy(&planted.stderr).into_owned();
        return Ok(escaped(format!("nothing could be written: {why}")));
    }
    if (seen_beside.as_str(), seen_next.as_str()) != (clean, clean) {
        return Ok(escaped(format!("{seen_beside}, then {seen_next}")));
    }
    Ok(held("a layer ends with its sandbox"))
}

/// Processes that left their session and their parent end with the program, and are not seen by the next.
async fn daemons(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let fork = "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        os.setsid()\n        \
                if os.fork() == 0: time.sleep(600)\n        os._exit(0)\nprint('ok')";
    let forked = printed(&python(sandbox.as_mut(), fork).await?);
    let count = "import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))";
    let left = printed(&python(sandbox.as_mut(), count).await?);
    let stats = sandbox.stats().await?;
    sandbox.destroy().await?;
    // The program that counts, and the agent where it is visible.
    if forked != "ok" || !matches!(left.as_str(), "1" | "2") || stats.processes > 0 {
        let why = format!("{forked}, {left} processes, {} outside", stats.processes);
        return Ok(escaped(why));
    }
    Ok(held("nothing is left"))
}

fn entry(path: &str, kind: EntryKind) -> Entry {
    Entry {
        path: path.into(),
        mode: 0o644,
        kind,
    }
}

/// The host puts and takes files where root has left links to the host's secret, to its own process and to
/// each other. Nothing may be written or read through one.
async fn links(provider: &dyn SandboxProvider, witness: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let code = format!(
        "{}import os\nos.symlink('/', '/up')\nos.symlink(SECRET, '/secret')\nos.symlink('/proc/self/fd', '/fds')\n\
         os.mkdir('/out')\nos.symlink(SECRET, '/out/secret')\nos.symlink('/proc/1/environ', '/out/environ')\n\
         open('/out/plain', 'w').write('plain')\nos.link('/out/plain', '/out/name')\nprint('ok')",
        witness.python()
    );
    let made = printed(&python(sandbox.as_mut(), &code).await?);
    let options = UploadOptions::default();
    let file = [entry("x", EntryKind::File(b"put".to_vec()))];
    let mut wrong = Vec::new();
    for path in [
        "/up",
        "/secret",
        "/fds",
        "/up/etc",
        "/proc/self",
        "/dev/shm",
        "/usr/put",
    ] {
        if sandbox.upload(path, &file, &options).await.is_ok() {
            wrong.push(format!("put at {path}"));
        }
        if let Ok(Some(taken)) = sandbox.download(path, 1 << 20).await {
            let secret = |e: &Entry| match &e.kind {
                EntryKind::File(content) => content == witness.secret.as_bytes(),
                _ => false,
            };
            if taken.iter().any(secret) || path != "/usr/put" {
                wrong.push(format!("taken from {path}"));
            }
        }
    }
    // A name in a folder is replaced, not written through: the other name keeps its content.
    let replace = [
        entry("name", EntryKind::File(b"new".to_vec())),
        entry("secret", EntryKind::File(b"new".to_vec())),
    ];
    sandbox.upload("/out", &replace, &options).await?;
    let taken = sandbox.download("/out", 1 << 20).await?.unwrap_or_default();
    sandbox.destroy().await?;
    let of = |name: &str| {
        taken
            .iter()
            .find(|e| e.path.as_os_str() == name)
            .map(|e| &e.kind)
    };
    let file = |text: &str| EntryKind::File(text.as_bytes().to_vec());
    let right = of("plain") == Some(&file("plain"))
        && of("name") == Some(&file("new"))
        && of("secret") == Some(&file("new"))
        && of("environ") == Some(&EntryKind::Link("/proc/1/environ".into()));
    if made != "ok" || !right || !wrong.is_empty() {
        return Ok(escaped(format!("{made}, {wrong:?}, {taken:?}")));
    }
    Ok(held("no link is followed"))
}
