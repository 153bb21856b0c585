//! Attacks that need the host to act too.
//!
//! Here the host does something an ordinary case cannot: it writes files into the sandbox, reads files that
//! the program prepared, looks at `/proc` of the jailed process, kills the server, makes hundreds of
//! sandboxes.

use crate::attack::host::{Witness, descendants};
use crate::attack::{AttackOutcome, Verdict, escaped, spec};
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, Program, Sandbox, SandboxError, SandboxFuture, SandboxProvider,
};
use std::collections::HashSet;
use std::time::Duration;

/// An attack with a part on the host.
pub(crate) struct Special {
    /// Number in the list of `docs/sandbox.md`.
    pub(crate) number: u32,
    /// Shown in the table, and matched by `--filter`.
    pub(crate) name: &'static str,
    /// Function that returns the verdict; an error of the sandbox counts as an escape.
    pub(crate) run: for<'a> fn(&'a dyn SandboxProvider, &'a Witness) -> SandboxFuture<'a, Verdict>,
}

/// Builds a `Special` from number, name and function. The function's future is boxed, since one table
/// contains functions of different types.
macro_rules! special {
    ($number:literal, $name:literal, $run:ident) => {
        $crate::attack::special::Special {
            number: $number,
            name: $name,
            run: |provider, witness| Box::pin($run(provider, witness)),
        }
    };
}

pub(crate) use special;

/// The cases in the order of their numbers.
pub(crate) const ALL: &[Special] = &[
    special!(18, "program of 100 MB", huge_program),
    special!(22, "paths that leave the work folder", outside_paths),
    special!(23, "links where the host reads and writes", links),
    special!(26, "FIFO and socket where the host reads", fifos),
    special!(34, "hostile file names", hostile_names),
    special!(48, "capabilities as the host sees them", seen_capabilities),
    special!(51, "ends of other programs", others_ends),
    special!(64, "state left for the next sandbox", left_state),
    special!(64, "state left for the next exec", left_interpreter),
    special!(66, "the same random numbers in two sandboxes", same_random),
    special!(68, "leaks after 200 sandboxes", many_creates),
    special!(69, "the server is killed", server_killed),
    special!(70, "memory pressure on a sibling", sibling_pressure),
    special!(71, "modules planted for the next exec", planted_modules),
];

/// A verdict with what was seen.
pub(crate) fn held(why: impl Into<String>) -> Verdict {
    (AttackOutcome::Held, why.into())
}

/// Runs a Python program in a sandbox.
///
/// Deadline 60 s, no standard input.
pub(crate) async fn python(
    sandbox: &mut dyn Sandbox,
    code: &str,
) -> Result<ExecResult, SandboxError> {
    let request = ExecRequest::new(Program::Python(code.into()), Duration::from_secs(60));
    sandbox.exec(request).await
}

/// Standard output as text.
pub(crate) fn printed(result: &ExecResult) -> String {
    String::from_utf8_lossy(&result.stdout).trim().to_owned()
}

/// A program of 100 MB must be refused, and not fill the memory of the server.
///
/// The request itself is refused, and the error names the limit.
async fn huge_program(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let verdict = match python(sandbox.as_mut(), &"#".repeat(100 << 20)).await {
        Err(SandboxError::Request { allowed, .. }) => held(format!("refused: {allowed}")),
        other => escaped(format!("{:?}", other.map(|r| r.ending))),
    };
    sandbox.destroy().await?;
    Ok(verdict)
}

/// Paths that the caller reads or writes must stay in the work folder.
///
/// Parent folders, absolute paths, the empty path, the folder itself, a zero byte, and 8,001 bytes of nested
/// folders. Each must fail for reads and for writes.
async fn outside_paths(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let long = "a/".repeat(4000) + "b";
    for path in ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", &long] {
        if sandbox.read_file(path, 1000).await.is_ok()
            || sandbox.write_file(path, b"x").await.is_ok()
        {
            return Ok(escaped(format!("{path:?} was taken")));
        }
    }
    sandbox.destroy().await?;
    Ok(held("every path was refused"))
}

/// Links that the program makes must not lead the host's reads and writes outside.
///
/// A link to the secret, one to the root, one through `/proc/self/root`, which the kernel resolves for the
/// reader and not for the maker, and one to the parent folder.
async fn links(provider: &dyn SandboxProvider, witness: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let code = format!(
        "{}import os\nos.symlink(SECRET, 'file')\nos.symlink('/', 'root')\nos.symlink('/proc/self/root' + SECRET, 'magic')\nos.symlink('..', 'up')",
        witness.python()
    );
    python(sandbox.as_mut(), &code).await?;
    for path in ["file", "magic", "root/etc/passwd", "up/etc/passwd"] {
        if sandbox.read_file(path, 1000).await.is_ok() {
            return Ok(escaped(format!("{path} was read")));
        }
        if sandbox.write_file(path, b"x").await.is_ok() {
            return Ok(escaped(format!("{path} was written")));
        }
    }
    sandbox.destroy().await?;
    Ok(held("links are never followed"))
}

/// The host must not wait for ever for a FIFO or a socket in place of a file.
///
/// Opening a FIFO without a writer waits for ever. Each read gets a minute; a read that is not over then
/// counts as an escape, as the program could stop the host's thread.
async fn fifos(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let code = "import os, socket\nsocket.socket(socket.AF_UNIX).bind('sock')\nfor f in (lambda: os.mkfifo('fifo'), lambda: os.mkdir('dir')):\n    try: f()\n    except OSError: pass";
    python(sandbox.as_mut(), code).await?;
    for path in ["fifo", "sock", "dir"] {
        let read = tokio::time::timeout(Duration::from_secs(60), sandbox.read_file(path, 100));
        match read.await {
            Ok(Err(_)) => {}
            Ok(Ok(_)) => return Ok(escaped(format!("{path} was read"))),
            Err(_) => return Ok(escaped(format!("reading {path} hangs"))),
        }
    }
    sandbox.destroy().await?;
    Ok(held("only regular files are read"))
}

/// Names with newlines, control characters and bytes that are not text.
///
/// Files with such names must be readable by the host under exactly these names: no shell, and no list that
/// newlines separate, is between. `b'\xff\xfe'` is written, too, and must not break the rest.
async fn hostile_names(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let code = "for n in (b'a\\nb', b'-rf', b'\\xff\\xfe', b'x' * 255, b'$(id)', b'; rm -rf'):\n    open(n, 'wb').write(b'ok')\nprint('made')";
    let made = python(sandbox.as_mut(), code).await?;
    for name in ["a\nb", "-rf", &"x".repeat(255), "$(id)", "; rm -rf"] {
        if sandbox.read_file(name, 100).await.ok().as_deref() != Some(b"ok") {
            return Ok(escaped(format!("{name:?} cannot be read")));
        }
    }
    sandbox.destroy().await?;
    Ok(held(printed(&made)))
}

/// Reads `/proc/PID/status` of the jailed program from outside while it sleeps.
///
/// The program is found among all processes of the host by its exact command line, `/bin/sleep 302.PID`,
/// within a minute, and ended then. Each `Cap` line has to be zero, the user must not be 0, and the filter
/// and no-new-privileges must be on. A view from inside could be faked for the program; the host's `/proc`
/// cannot be changed by it.
async fn seen_capabilities(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let seen = seen_user(provider, 2, 0).await?;
    Ok(seen.map_or_else(
        |escape| escape,
        |uid| held(format!("all sets empty, user {uid}")),
    ))
}

/// The user of a jailed program as the host sees it, which sleeps for `seconds` + 300 seconds and has
/// no other capabilities than these bits. The inner error says that a wall is missing.
pub(super) async fn seen_user(
    provider: &dyn SandboxProvider,
    seconds: u8,
    capabilities: u64,
) -> Result<Result<String, Verdict>, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    // Nobody else's words; daemons of containers keep their programs elsewhere than below us.
    let argv = [
        "/bin/sleep".into(),
        format!("{}.{}", 300 + u16::from(seconds), std::process::id()),
    ];
    let words = argv.join("\0") + "\0";
    let look = async {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            for pid in descendants(0) {
                let said = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
                if said.is_ok_and(|said| said == words) {
                    return std::fs::read_to_string(format!("/proc/{pid}/status")).ok();
                }
            }
        }
    };
    let request = ExecRequest::new(Program::Argv(argv.to_vec()), Duration::from_secs(60));
    let status = tokio::select! {
        ended = sandbox.exec(request) => ended.map(|_| None)?,
        status = look => status,
    };
    sandbox.destroy().await?;
    let Some(status) = status else {
        return Ok(Err(escaped("the program was not found on the host")));
    };
    for line in status.lines().filter(|l| l.starts_with("Cap")) {
        let set = line.rsplit('\t').next().unwrap_or_default();
        if u64::from_str_radix(set, 16).map_or(true, |set| set & !capabilities != 0) {
            return Ok(Err(escaped(line)));
        }
    }
    let uid = status.lines().find_map(|l| l.strip_prefix("Uid:\t"));
    let uid = uid.and_then(|l| l.split('\t').next()).unwrap_or("0");
    let filtered = status.contains("Seccomp:\t2\n") && status.contains("NoNewPrivs:\t1\n");
    if !filtered || uid == "0" {
        return Ok(Err(escaped(format!("user {uid}, filtered: {filtered}"))));
    }
    Ok(Ok(uid.to_owned()))
}

/// A process's end goes to its parent, so one program makes as many children as it can for other parents,
/// while others run.
///
/// `clone` with `CLONE_PARENT` makes a child of the caller's parent, which would be the supervisor: it could
/// take the end of such a child for the end of another program. The attacker tries 1,000 times, with and
/// without a signal, while ten programs of another sandbox have to end as they did, with their own output.
async fn others_ends(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let (spec_a, spec_b) = (spec(), spec());
    let mut attacker = provider.acquire(&spec_a).await?;
    let mut other = provider.acquire(&spec_b).await?;
    // clone, for the parent, of x86-64: elsewhere the number is another's and fails.
    let code = "import ctypes, os
libc = ctypes.CDLL(None)
made = 0
for _ in range(500):
    for flags in (0x8011, 0x8000):
        child = libc.syscall(56, ctypes.c_long(flags), 0, 0, 0, 0)
        if child == 0: os._exit(5)
        made += child > 0
print(made)";
    let attack = ExecRequest::new(Program::Python(code.into()), Duration::from_secs(60));
    let programs = async {
        for i in 0..10 {
            let program = Program::Argv(vec!["/bin/sh".into(), "-c".into(), format!("echo {i}")]);
            let request = ExecRequest::new(program, Duration::from_secs(60));
            let result = other.exec(request).await?;
            let ending = result.ending;
            if ending != (Ending::Exited { code: 0 }) || printed(&result) != i.to_string() {
                return Ok(Some(format!("{ending}, printed {:?}", printed(&result))));
            }
        }
        Ok::<_, SandboxError>(None)
    };
    let (attacked, wrong) = tokio::join!(attacker.exec(attack), programs);
    let (attacked, wrong) = (attacked?, wrong?);
    attacker.destroy().await?;
    other.destroy().await?;
    Ok(match (wrong, printed(&attacked).as_str()) {
        (Some(wrong), _) => escaped(format!("another program {wrong}")),
        (None, "0") => held("no child was made for others; their programs ended as they did"),
        (None, made) => escaped(format!("{made} children for others")),
    })
}

/// Checks that no state of a sandbox is visible in the next one.
///
/// The first sandbox leaves a file in `/work`, `/tmp` and `/dev/shm`. The next one must have empty folders,
/// also where the level uses a folder, a mount or a machine again.
async fn left_state(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    let mut first = provider.acquire(&spec()).await?;
    let leave = "for p in ('/work/x', '/tmp/x', '/dev/shm/x'):\n    try: open(p, 'w').write('left')\n    except OSError: pass";
    python(first.as_mut(), leave).await?;
    first.destroy().await?;
    let mut second = provider.acquire(&spec()).await?;
    let look = "import os; print([os.listdir(d) for d in ('/work', '/tmp')], os.path.exists('/dev/shm/x'))";
    let seen = printed(&python(second.as_mut(), look).await?);
    second.destroy().await?;
    match seen.as_str() {
        "[[], []] False" => Ok(held("nothing is left")),
        other => Ok(escaped(other)),
    }
}

/// Checks that no state of a program is visible in the interpreter of the next one.
///
/// Both programs run in one sandbox, as in the turns of an episode: files stay by design, while patched
/// functions, variables, threads and children of the first program must be gone.
async fn left_interpreter(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let patch = "import builtins, os, threading, time\nbuiltins.len = lambda x: 42\nos.environ['LEFT'] = '1'\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nif os.fork() == 0: time.sleep(99)\nos._exit(0)";
    python(sandbox.as_mut(), patch).await?;
    let look = "import os; print(len('ab'), 'LEFT' in os.environ, len([p for p in os.listdir('/proc') if p.isdigit()]) <= 2)";
    let seen = printed(&python(sandbox.as_mut(), look).await?);
    sandbox.destroy().await?;
    match seen.as_str() {
        "2 False True" => Ok(held("new interpreter, no other process")),
        other => Ok(escaped(other)),
    }
}

/// Sandboxes that were forked from one place must draw different random numbers.
///
/// Three sandboxes print a number of `random`, the hash of a string, eight bytes of the kernel and a UUID.
/// Each value may come once, except for the hash.
async fn same_random(provider: &dyn SandboxProvider, _: &Witness) -> Result<Verdict, SandboxError> {
    /// Place of the seed of `hash`, which forks may share.
    const HASH: usize = 1;
    let code = "import random, os, uuid; print(random.random(), hash('x'), os.urandom(8).hex(), uuid.uuid4())";
    let mut seen: HashSet<String> = HashSet::new();
    for _ in 0..3 {
        let mut sandbox = provider.acquire(&spec()).await?;
        let line = printed(&python(sandbox.as_mut(), code).await?);
        sandbox.destroy().await?;
        for (i, value) in line.split(' ').enumerate() {
            // Forks of one zygote share the seed of `hash`: nobody else's tables depend on it.
            if !seen.insert(value.into()) && i != HASH {
                return Ok(escaped(format!("{value} came twice")));
            }
        }
    }
    Ok(held(
        "generator, kernel and UUID all differ; forks of a zygote share its hash seed",
    ))
}

/// Two hundred sandboxes leave no process, group or mount behind.
///
/// Every tenth one runs `/bin/true`; the others are destroyed unused, which is a separate path. The counts
/// are made by the suite afterwards.
async fn many_creates(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    for i in 0..200 {
        let mut sandbox = provider.acquire(&spec()).await?;
        if i % 10 == 0 {
            let request = ExecRequest::new(
                Program::Argv(vec!["/bin/true".into()]),
                Duration::from_secs(60),
            );
            let result = sandbox.exec(request).await?;
            if result.ending != (Ending::Exited { code: 0 }) {
                return Ok(escaped(format!("sandbox {i}: {}", result.ending)));
            }
        }
        sandbox.destroy().await?;
    }
    Ok(held("200 made and destroyed"))
}

/// A server that is killed takes its sandboxes with it.
///
/// Always `Skipped`, so that the table has the number, with the place where it is tested.
async fn server_killed(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let why = format!(
        "the suite cannot kill the process that it runs in; the tests of level {} do",
        provider.level()
    );
    Ok((AttackOutcome::Skipped, why))
}

/// A sandbox at its memory limit must not slow a sibling down or end it.
///
/// One sandbox takes memory until it is ended, while another one holds 20 MiB and sleeps 0.3 s. The first
/// must end as `OutOfMemory` and the second with the right sum over its pages: 20 MiB / 4096 pages times `x`
/// (120), 614,400.
async fn sibling_pressure(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let (spec_a, spec_b) = (spec(), spec());
    let (mut bomb, mut calm) = (
        provider.acquire(&spec_a).await?,
        provider.acquire(&spec_b).await?,
    );
    let (bombed, calmed) = tokio::join!(
        python(
            bomb.as_mut(),
            "x = []\nwhile True: x.append(b'x' * (1 << 20))"
        ),
        python(
            calm.as_mut(),
            "import time\nx = bytearray(b'x' * (20 << 20)); time.sleep(0.3); print(sum(x[::4096]))"
        ),
    );
    let (bombed, calmed) = (bombed?, calmed?);
    bomb.destroy().await?;
    calm.destroy().await?;
    if bombed.ending != Ending::OutOfMemory || printed(&calmed) != "614400" {
        let why = format!("{} beside {}", bombed.ending, calmed.ending);
        return Ok(escaped(why));
    }
    Ok(held(
        "only the one over its limit was killed; shares of the processor are not bounded",
    ))
}

/// Files in the work folder that Python would import must not run in the next program's name.
///
/// Files named as modules of the library, a `PYTHONPATH` and a program `python3` in the work folder: the way
/// in which an agent would make a scoring program print what it likes.
async fn planted_modules(
    provider: &dyn SandboxProvider,
    _: &Witness,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire(&spec()).await?;
    let plant = "for m in ('sitecustomize', 'usercustomize', 'json', 'random', 'math', 'conftest'):\n    open(m + '.py', 'w').write('print(\"PLANTED\")')\nimport os\nos.environ['PYTHONPATH'] = '/work'\nopen('python3', 'w').write('#!/bin/sh\\necho PLANTED')\nos.chmod('python3', 0o755)\nos._exit(0)";
    python(sandbox.as_mut(), plant).await?;
    let score = "import json, random, math; print(json.dumps([math.sqrt(4)]))";
    let seen = printed(&python(sandbox.as_mut(), score).await?);
    sandbox.destroy().await?;
    match seen.as_str() {
        "[2.0]" => Ok(held("an exec imports nothing from the work folder")),
        other => Ok(escaped(other)),
    }
}
