//! Ends of Python programs: reported exactly, with their whole output, and no process survives.

use crate::{
    OK, SOON_MS, children, exec, groups, provider, python, small, spawner_pid, text, with,
};
use sinew_sandbox::{Ending, Limits, Program, SandboxProvider, SandboxSpec};
use std::time::Duration;

const fn exited(code: i32) -> Ending {
    Ending::Exited { code }
}

/// Goes on for ever, and shows that it does.
const GO_ON: &str = "
import os, time
def go_on():
    while True:
        with open('alive', 'w') as f: f.write(str(time.monotonic()))
";

#[tokio::test]
async fn exit_codes_are_exact_whatever_way_a_program_takes_out() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let atexit = "import atexit, os, sys\natexit.register(lambda: print('late'))\n";
    let thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n";
    let own = "import os\nos.closerange(3, 30)\nfd = os.open('own', os.O_CREAT | os.O_RDWR)\nassert fd == 3\n";
    let cases = [
        ("print('a')".to_owned(), 0, "a\n"),
        ("import sys; print('a'); sys.exit(3)".into(), 3, "a\n"),
        ("import sys; sys.exit(300)".into(), 44, ""),
        (
            "import os; print('a', flush=True); os._exit(4)".into(),
            4,
            "a\n",
        ),
        ("print('a'); raise ValueError".into(), 1, "a\n"),
        (format!("{atexit}print('a')"), 0, "a\nlate\n"),
        (
            format!("{atexit}atexit.register(sys.exit, 5)\nprint('a')"),
            0,
            "a\nlate\n",
        ),
        (format!("{atexit}atexit.register(os._exit, 6)"), 6, ""),
        (format!("{thread}print('a')"), 0, "a\n"),
        ("import os; os.close(1); os.close(2)".into(), 0, ""),
        (
            "import os; print('a', flush=True); os.closerange(0, 30); os._exit(8)".into(),
            8,
            "a\n",
        ),
        (format!("{own}print('a')"), 0, "a\n"),
        (
            "import os\nif os.fork() == 0: os._exit(1)\nos.wait(); raise SystemExit(9)".into(),
            9,
            "",
        ),
    ];
    for (code, expected, printed) in cases {
        let result = python(sandbox.as_mut(), &code).await;
        assert_eq!(
            result.ending,
            exited(expected),
            "{code}: {}",
            text(&result.stderr)
        );
        assert_eq!(text(&result.stdout), printed, "{code}");
    }
    assert_eq!(
        sandbox.read_file("own", 100).await.unwrap(),
        b"",
        "nothing strays into it"
    );
}

#[tokio::test]
async fn objects_in_cycles_end_with_the_program_whether_or_not_they_outlived_a_collection() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let cycle = "import gc
class A:
    def __del__(self): print('ended')
a = A()
a.itself = a
";
    for more in ["", "gc.collect(0)", "gc.collect(1)", "gc.collect()"] {
        let result = python(sandbox.as_mut(), &format!("{cycle}{more}")).await;
        assert_eq!(result.ending, exited(0), "{more}");
        assert_eq!(text(&result.stdout), "ended\n", "{more}");
    }
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn all_that_was_written_right_before_the_end_arrives() {
    let provider = provider();
    let spec = SandboxSpec {
        limits: Limits {
            output_bytes: 1 << 20,
            ..small().limits
        },
        ..small()
    };
    let mut sandbox = provider.acquire(&spec).await.unwrap();
    for size in [0, 1, 4096, 65_536, 65_537, 300_000] {
        let code =
            format!("import sys\nsys.stderr.write('e' * {size})\nsys.stdout.write('o' * {size})");
        let result = python(sandbox.as_mut(), &code).await;
        assert_eq!(result.ending, exited(0));
        assert_eq!((result.stdout.len(), result.stderr.len()), (size, size));
        assert_eq!(result.usage.output_bytes, 2 * size as u64);
    }
    let flood = format!("print('x' * {})", 2 << 20);
    assert_eq!(
        python(sandbox.as_mut(), &flood).await.ending,
        Ending::OutputLimit
    );
}

#[tokio::test]
async fn a_program_is_over_for_whatever_is_asked_next() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    for i in 0..20 {
        let code = format!("open('n', 'w').write('{i}')");
        assert_eq!(python(sandbox.as_mut(), &code).await.ending, exited(0));
        assert_eq!(
            sandbox.read_file("n", 10).await.unwrap(),
            i.to_string().as_bytes()
        );
        let processes = sandbox.stats().await.unwrap().processes;
        assert!(processes <= 3, "{processes} processes in an idle sandbox");
    }
    let snapshot = sandbox.snapshot().await.unwrap();
    python(sandbox.as_mut(), "open('n', 'w').write('later')").await;
    sandbox.reset().await.unwrap();
    let mut fork = provider.fork(&small(), &snapshot).await.unwrap();
    assert_eq!(
        text(
            &python(fork.as_mut(), "print(open('n').read())")
                .await
                .stdout
        ),
        "19\n"
    );
    let shell = exec(
        sandbox.as_mut(),
        Program::Shell("ls; kill -9 $$".into()),
        SOON_MS,
    )
    .await;
    assert_eq!(shell.ending, Ending::Signalled { signal: 9 });
    assert_eq!(text(&shell.stdout), "");
}

#[tokio::test]
async fn a_program_has_its_standard_streams_and_no_other_file() {
    for warm in [true, false] {
        let provider = with(|config| config.warm_python = warm);
        let mut sandbox = provider.acquire(&small()).await.unwrap();
        let code = "import os
for fd in range(256):
    try: os.fstat(fd)
    except OSError: continue
    print(fd)";
        let result = python(sandbox.as_mut(), code).await;
        assert_eq!(
            text(&result.stdout),
            "0\n1\n2\n",
            "{}",
            text(&result.stderr)
        );
    }
}

#[tokio::test]
async fn the_end_of_the_main_process_hides_no_child_and_no_limit() {
    let provider = provider();
    let mut sandbox = provider.acquire(&small()).await.unwrap();
    let child = format!(
        "{GO_ON}open('alive', 'w')\nif os.fork() == 0:\n    os.setsid(); go_on()\ntime.sleep(0.05)\nos._exit(3)"
    );
    assert_eq!(python(sandbox.as_mut(), &child).await.ending, exited(3));
    let alive = sandbox.read_file("alive", 100).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(sandbox.read_file("alive", 100).await.unwrap(), alive);

    // Children that were waited for count.
    let burnt = format!(
        "{GO_ON}if os.fork() == 0:\n    until = time.process_time() + 0.2\n    while time.process_time() < until: pass\n    os._exit(0)\nos.wait(); os._exit(4)"
    );
    let result = python(sandbox.as_mut(), &burnt).await;
    assert_eq!(result.ending, exited(4));
    assert!(result.usage.cpu_s >= 0.2, "{}", result.usage.cpu_s);
    let own =
        "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass";
    let result = python(sandbox.as_mut(), own).await;
    assert!(result.usage.cpu_s >= 0.2, "{}", result.usage.cpu_s);

    let held = "x = b'x' * (20 << 20)";
    let result = python(sandbox.as_mut(), held).await;
    assert!(
        result.usage.peak_memory_bytes >= 20 << 20,
        "{}",
        result.usage.peak_memory_bytes
    );
    let bomb = "x = [b'x' * (8 << 20) for i in range(99)]";
    assert_eq!(
        python(sandbox.as_mut(), bomb).await.ending,
        Ending::OutOfMemory
    );
    let late = exec(
        sandbox.as_mut(),
        Program::Python("import time; time.sleep(60)".into()),
        100,
    )
    .await;
    assert_eq!(late.ending, Ending::Timeout);
}

#[tokio::test]
async fn the_next_sandbox_has_its_own_control_group_and_counters() {
    let provider = provider();
    for _ in 0..3 {
        let mut sandbox = provider.acquire(&small()).await.unwrap();
        let result = python(sandbox.as_mut(), "bytearray(500 << 20)").await;
        assert_eq!(result.ending, Ending::OutOfMemory);
        sandbox.destroy().await.unwrap();
        assert_eq!(groups(&format!("sinew-{}-", spawner_pid())), 0);
        let mut sandbox = provider.acquire(&small()).await.unwrap();
        // A failure for which its counters are read.
        let result = python(sandbox.as_mut(), "raise SystemExit(3)").await;
        assert_eq!(result.ending, exited(3));
        let peak = result.usage.peak_memory_bytes;
        assert!(peak < 16 << 20, "{peak} bytes");
        sandbox.destroy().await.unwrap();
    }
}

#[test]
fn endings_are_written_by_the_names_that_they_have_in_json() {
    let endings = [
        exited(3),
        Ending::Signalled { signal: 9 },
        Ending::Timeout,
        Ending::OutOfMemory,
        Ending::TooManyProcesses,
        Ending::OutputLimit,
        Ending::Denied,
        Ending::SandboxDied,
    ];
    for ending in endings {
        let json = serde_json::to_value(ending).unwrap();
        let number = [&json["code"], &json["signal"]].map(serde_json::Value::as_i64);
        let number = number.into_iter().flatten().map(|n| format!(" {n}"));
        let name = json["type"].as_str().unwrap();
        assert_eq!(
            ending.to_string(),
            name.to_owned() + &number.collect::<String>()
        );
    }
}

/// A fork of the interpreter costs as much as a small program, which shell tools need not pay.
#[tokio::test]
async fn an_interpreter_waits_where_the_last_program_was_python() {
    let provider = provider();
    let mut one = provider.acquire(&small()).await.unwrap();
    let spawner = children(spawner_pid())[0];
    let interpreters = async |expected: usize| {
        let mut seen = 0;
        // One that is made ready comes some milliseconds after the end of a program.
        tokio::time::sleep(Duration::from_millis(200)).await;
        for _ in 0..6000 {
            let mut open = vec![spawner];
            seen = 0;
            while let Some(pid) = open.pop() {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
                seen += usize::from(name.is_ok_and(|n| n.starts_with("python")));
                open.extend(children(pid));
            }
            if seen == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{seen} interpreters, expected {expected}");
    };
    let program = || Program::Argv(vec!["/bin/true".into()]);
    // The one that forks, and the one that waits.
    interpreters(2).await;
    assert_eq!(exec(one.as_mut(), program(), SOON_MS).await.ending, OK);
    interpreters(1).await;
    let mut two = provider.acquire(&small()).await.unwrap();
    assert_eq!(exec(two.as_mut(), program(), SOON_MS).await.ending, OK);
    interpreters(1).await;
    assert_eq!(python(one.as_mut(), "print(1)").await.ending, OK);
    interpreters(2).await;
}
