//! Hostile programs against the wasm level, judged from the host's side.
//!
//! A case is `held` only if it ended as it must, printed no line that begins with `ESCAPED`, left
//! no file above its bounds, and another sandbox of the same worker is unharmed afterwards. The
//! numbers are those of the list in `docs/sandbox.md`.
//!
//! A program of this level is a WebAssembly module with WASI: it can name nothing that was not handed to it.
//! The worker that runs it is jailed as well, so that an escape from the module is not yet one from the
//! sandbox.

use crate::attack::{AttackOutcome, AttackRow, Expect, Verdict, chosen, escaped, special};
use sinew_sandbox::{
    ExecRequest, ExecResult, Limits, Program, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use std::time::Duration;

/// Interpreter, number and name, expected ending, code.
struct Case(&'static str, &'static str, Expect, &'static str);

/// Interpreter, name, ending, program.
///
/// Programs of three interpreters: `python` (CPython), `qjs` (JavaScript) and `micropython`. Each case has
/// its own sandbox of 64 MiB and 4 MiB of files, except for the second half of 71. Cases that must end as
/// `Timeout` have 300 ms, the others 20 s.
///
/// - 01, 02, 23, 27, 46, 56: what the interface does not have cannot be called: processes, threads, links,
///   nodes, programs, sockets. A case is `Done` if the name is missing or the call fails.
/// - 03, 73: linear memory may not grow beyond the limit. CPython's ending names the limit; the small
///   interpreters turn the refused growth into a separate error, and `Refused` is enough.
/// - 04, 07 to 11: bytes, files, sizes, depth and descriptors are counted by the interface in the worker.
/// - 12, 14, 72, 77: loops, sleeps and waits are cut at the deadline, also a loop without any call.
/// - 13: output beyond the limit is cut, which the result reports.
/// - 21, 22, 34, 38, 75: no path and no open folder leads to the host's files, by whatever spelling.
/// - 71: modules planted in the work folder are not imported by the next program of the same sandbox.
/// - 74: recursion ends in an error of the interpreter or a trap of the module, never in the end of the
///   worker.
const CASES: [Case; 38] = [
    Case(
        "python",
        "01 fork bomb",
        Expect::Done,
        "import os\nprint('ESCAPED' if hasattr(os, 'fork') else 'DONE')",
    ),
    Case(
        "python",
        "02 thread bomb",
        Expect::Done,
        "import _thread\ntry:\n    _thread.start_new_thread(print, ()); print('ESCAPED')\nexcept RuntimeError: print('DONE')",
    ),
    Case(
        "python",
        "03 memory bomb",
        Expect::OutOfMemory,
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
    ),
    Case(
        "qjs",
        "03 memory bomb in JavaScript",
        Expect::Refused,
        "const x = []; for (;;) x.push(new Uint8Array(1 << 20).fill(1))",
    ),
    Case(
        "micropython",
        "03 memory bomb in MicroPython",
        Expect::Refused,
        "x = []\nwhile True: x.append(bytearray(1 << 16))",
    ),
    Case(
        "python",
        "04 memory by files",
        Expect::Refused,
        "f = open('/tmp/x', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    ),
    Case(
        "python",
        "07 file bomb",
        Expect::Refused,
        "for n in range(10**6): open(f'f{n}', 'w').close()",
    ),
    Case(
        "python",
        "08 disk fill",
        Expect::Refused,
        "f = open('x', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    ),
    Case(
        "python",
        "09 sparse file",
        Expect::Refused,
        "f = open('x', 'wb'); f.truncate(1 << 60)",
    ),
    Case(
        "python",
        "09 write far beyond the end",
        Expect::Refused,
        "import os\nf = os.open('x', os.O_RDWR | os.O_CREAT); os.lseek(f, (1 << 63) - 2, 0); os.write(f, b'xx')",
    ),
    Case(
        "python",
        "10 deep folders",
        Expect::Refused,
        "import os\np = 'd'\nwhile True: os.mkdir(p); p += '/d'",
    ),
    Case(
        "python",
        "11 descriptors",
        Expect::Refused,
        "fs = []\nwhile True: fs.append(open('y', 'w'))",
    ),
    Case("python", "12 spin", Expect::Timeout, "while True: pass"),
    Case(
        "python",
        "13 output flood",
        Expect::OutputLimit,
        "while True: print('x' * 1000)",
    ),
    Case(
        "python",
        "13 error flood without newline",
        Expect::OutputLimit,
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    ),
    Case(
        "python",
        "14 sleep for ever",
        Expect::Timeout,
        "import time; time.sleep(1e6)",
    ),
    Case(
        "python",
        "21 files of the host",
        Expect::Done,
        "import os\nfor p in ['/etc/passwd', '/etc/shadow', '/root', '/home', '/opt/sinew-wasm', '/opt/sinew-bin', '/dev/null']:\n    if os.path.exists(p): print('ESCAPED', p)\nprint('DONE')",
    ),
    Case(
        "python",
        "21 environment of the host",
        Expect::Done,
        "import os\nif set(os.environ) - {'HOME', 'LANG', 'PWD', 'TMPDIR'}: print('ESCAPED')\nprint('DONE')",
    ),
    Case(
        "python",
        "22 traversal",
        Expect::Done,
        "import os\nfor p in ['../etc/passwd', '/work/../../etc/passwd', 'a/../../../proc/self/environ', '/..']:\n    try:\n        if p != '/..': open(p); print('ESCAPED', p)\n    except OSError: pass\nprint('DONE')",
    ),
    Case(
        "python",
        "23 links",
        Expect::Done,
        "import os\nfor f in (os.symlink, os.link):\n    try:\n        f('/etc/passwd', 'l'); print('ESCAPED')\n    except OSError: pass\nprint('DONE')",
    ),
    Case(
        "python",
        "27 device nodes",
        Expect::Done,
        "import os\nprint('ESCAPED' if hasattr(os, 'mknod') or hasattr(os, 'mkfifo') else 'DONE')",
    ),
    Case(
        "python",
        "34 odd names",
        Expect::Done,
        "import os\nfor n in ['a\\nb', '-rf', 'x' * 255, '\u{e4}']: open(n, 'w').close(); os.remove(n)\nprint('DONE')",
    ),
    Case(
        "python",
        "38 /proc",
        Expect::Done,
        "import os\nfor p in ['/proc/1/environ', '/proc/self/exe', '/proc/self/fd', '/sys', '/dev/mem']:\n    if os.path.exists(p): print('ESCAPED', p)\nprint('DONE')",
    ),
    Case(
        "python",
        "46 programs of the host",
        Expect::Done,
        "import os\ntry:\n    os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])\nexcept (OSError, AttributeError): print('DONE')",
    ),
    Case(
        "python",
        "56 network",
        Expect::Done,
        "import socket\ntry:\n    socket.socket(); s = 1\nexcept Exception: s = 0\ntry:\n    socket.create_connection(('127.0.0.1', 4000), 1); print('ESCAPED')\nexcept Exception: pass\nprint('DONE')",
    ),
    Case(
        "micropython",
        "56 calls to the host",
        Expect::Bounded,
        "import host\nprint('ESCAPED' if host.call('x', '{}') else 'no')",
    ),
    Case(
        "python",
        "71 code in the work folder that Python starts with",
        Expect::Done,
        "open('sitecustomize.py', 'w').write('print(\"ESCAPED\")'); open('usercustomize.py', 'w').write('print(\"ESCAPED\")'); open('traceback.py', 'w').write('print(\"ESCAPED\")')\nprint('DONE')",
    ),
    Case(
        "python",
        "71 it is not run by the next",
        Expect::Done,
        "print('DONE')",
    ),
    Case(
        "python",
        "71 early exit",
        Expect::Refused,
        "import os; print('passed'); os._exit(1)",
    ),
    Case(
        "qjs",
        "72 endless loop without calls",
        Expect::Timeout,
        "for (;;) {}",
    ),
    Case(
        "micropython",
        "72 endless loop in MicroPython",
        Expect::Timeout,
        "while True: pass",
    ),
    Case(
        "python",
        "73 memory.grow at once",
        Expect::OutOfMemory,
        "b'x' * (1 << 30)",
    ),
    Case(
        "python",
        "74 recursion of Python",
        Expect::Refused,
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ),
    Case(
        "python",
        "74 recursion of C",
        Expect::Refused,
        "import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    ),
    Case(
        "qjs",
        "74 recursion in JavaScript",
        Expect::Refused,
        "const f = () => f(); f()",
    ),
    Case(
        "micropython",
        "74 recursion in MicroPython",
        Expect::Refused,
        "f = lambda: f()\nf()",
    ),
    Case(
        "python",
        "75 folders that are open from the start",
        Expect::Done,
        "import os\nfor fd in range(3, 64):\n    for p in ['/etc/passwd', '../etc/passwd', '..']:\n        try:\n            os.open(p, os.O_RDONLY, dir_fd=fd); print('ESCAPED')\n        except (OSError, NotImplementedError, TypeError): pass\nprint('DONE')",
    ),
    Case(
        "python",
        "77 waiting beyond the deadline",
        Expect::Timeout,
        "import select\nwhile True: select.select([], [], [], 1000)",
    ),
];

/// Cases that have nothing to attack here.
///
/// Their rows have the reason, so that a reader can distinguish them from forgotten cases.
const NOT_APPLICABLE: [(&str, &str); 8] = [
    (
        "05 page tables",
        "linear memory is contiguous and its growth is bounded",
    ),
    ("15 daemons and zombies", "there are no processes"),
    ("42 ptrace", "there are no processes and no system calls"),
    (
        "47 capabilities",
        "the interface has none; the worker's are empty (level process)",
    ),
    (
        "49 forbidden system calls",
        "a program makes none; the worker's are filtered (level process)",
    ),
    (
        "76 pointers out of range",
        "agents send programs for interpreters, not modules; the interface is tested with them",
    ),
    (
        "78 malformed modules",
        "nothing that an agent sends is loaded; a changed module is refused by its hash",
    ),
    ("79 compile bomb", "the worker has no compiler"),
];

/// A program for one of the interpreters.
///
/// CPython runs by its own kind of program, with the interpreter that waits; the others by arguments, with
/// `-e` or `-c` before the code.
fn program(interpreter: &str, code: &str) -> Program {
    if interpreter == "python" {
        return Program::Python(code.into());
    }
    let flag = if interpreter == "qjs" { "-e" } else { "-c" };
    Program::Argv(vec![interpreter.into(), flag.into(), code.into()])
}

/// Limits of an attacked sandbox.
///
/// 64 MiB of linear memory and 4 MiB of files; the other limits are the defaults.
fn spec() -> SandboxSpec {
    SandboxSpec {
        limits: Limits {
            memory_bytes: 64 << 20,
            work_bytes: 4 << 20,
            ..Limits::default()
        },
        ..SandboxSpec::default()
    }
}

/// Runs the cases that `filter` chooses ([`chosen`]).
///
/// All sandboxes share this provider's workers, so that an attack on a worker shows in `sibling`, which
/// lives through the whole run.
///
/// # Errors
/// If a sandbox cannot be made at all.
pub async fn run(
    provider: &dyn SandboxProvider,
    filter: &str,
    on_row: &mut (dyn FnMut(AttackRow) + Send),
) -> Result<(), SandboxError> {
    let mut sibling = provider.acquire(&spec()).await?;
    let mut place = provider.acquire(&spec()).await?;
    for Case(interpreter, name, expect, code) in CASES.iter().filter(|c| chosen(c.1, filter)) {
        // The second half of a pair runs where the first has left its files.
        if !name.contains("by the next") {
            place = provider.acquire(&spec()).await?;
        }
        let request = ExecRequest::new(
            program(interpreter, code),
            Duration::from_millis(if matches!(expect, Expect::Timeout) {
                300
            } else {
                60_000
            }),
        );
        let result = place.exec(request).await?;
        on_row(row(name, judge(*expect, &result, &mut sibling).await?));
    }
    for (name, why) in NOT_APPLICABLE.iter().filter(|(n, _)| chosen(n, filter)) {
        on_row(row(name, (AttackOutcome::NotApplicable, (*why).into())));
    }
    Ok(())
}

/// A row of this level.
fn row(case: &str, (outcome, why): Verdict) -> AttackRow {
    AttackRow {
        level: "wasm".into(),
        case: case.into(),
        outcome,
        why,
    }
}

/// Judges the end of a case, and looks at the other sandbox.
///
/// The order of the checks: a line `ESCAPED`, the ending, bytes of files that are left above the limit, and a
/// program of the sibling, which has to print `42`. The row has the ending and the wall time in seconds.
async fn judge(
    expect: Expect,
    result: &ExecResult,
    sibling: &mut Box<dyn Sandbox>,
) -> Result<Verdict, SandboxError> {
    let ended = format!("{} in {:.3} s", result.ending, result.usage.wall_s);
    let told = String::from_utf8_lossy(&result.stdout);
    if let Some(line) = told.lines().find(|l| l.starts_with("ESCAPED")) {
        return Ok(escaped(format!("{line}; {ended}")));
    }
    if !expect.met(result) {
        let stderr = String::from_utf8_lossy(&result.stderr);
        let last = stderr.lines().last().unwrap_or_default();
        return Ok(escaped(format!("expected {expect:?}, {ended}: {last}")));
    }
    if result.usage.file_bytes > spec().limits.work_bytes {
        let left = result.usage.file_bytes;
        return Ok(escaped(format!("{left} bytes of files are left")));
    }
    let check = ExecRequest::new(program("python", "print(6 * 7)"), Duration::from_secs(60));
    let healthy = sibling.exec(check).await?;
    Ok(if healthy.stdout == b"42\n" {
        special::held(ended)
    } else {
        escaped(format!("another sandbox answers no more; {ended}"))
    })
}
