//! Attacks on machines: the suite of every level, and cases 80 to 84 of the list.
//!
//! The latter assume a conquered guest kernel: programs run as its first user, without walls inside, and use
//! the agent's own channel. Only the machine has to hold.
//!
//! | cases | attack | what must hold |
//! |---|---|---|
//! | 48 | the monitor itself | it has no capability, no new privileges, seccomp, and a root without the host's files |
//! | 80 | panic, reboot, power off, halt | one machine ends, with a precise end; the next one starts |
//! | 81 | flood of the serial line | it is bounded and does not stop the monitor |
//! | 82 | memory beyond the guest's, devices | the monitor's own limit; no device but the console |
//! | 84 | clock and random numbers | clones of one snapshot differ, and their clocks are right |

use crate::attack::special::{held, printed};
use crate::attack::{self, AttackOutcome, AttackRow, Verdict, escaped, spec};
use sinew_microvm::MicrovmProvider;
use sinew_sandbox::{
    Ending, ExecRequest, Program, Sandbox, SandboxError, SandboxFuture, SandboxProvider,
};
use std::collections::HashSet;
use std::time::Duration;

/// Memory limit of a monitor: the guest's memory, translated code, its own.
const MONITOR_BYTES: u64 = 512 << 20;
/// Allowed error of a guest's clock, in seconds.
const CLOCK_S: f64 = 5.0;

/// One attack on a machine.
struct Case {
    /// Number in the list of `docs/sandbox.md`.
    number: u32,
    name: &'static str,
    run: for<'a> fn(&'a MicrovmProvider) -> SandboxFuture<'a, Verdict>,
}

/// A `Case` whose function is boxed: closures over `dies` and `forges` are listed with plain functions.
macro_rules! case {
    ($number:literal, $name:literal, $run:expr) => {
        Case {
            number: $number,
            name: $name,
            run: |provider| Box::pin($run(provider)),
        }
    };
}

/// The cases in the order of their numbers.
///
/// Programs run behind no walls of the guest, except for 48 and 84: as the guest's first user, with all
/// devices.
///
/// - 48 reads the rights of the monitor on the host: no capability, a user other than 0, a filter, no
///   network.
/// - 80 ends the guest's kernel by a panic, a reboot, a power off and a halt. A halted machine does not end
///   by itself, so that its deadline is 1 s.
/// - 81 writes to the serial line for 2 s. The monitor keeps a bounded tail, and its memory is checked.
/// - 82 takes more memory than the machine has, and lists devices: one console and the loopback interface.
/// - 83 takes the channel of the guest's agent and sends a length of 4 GiB, a frame that never ends, output
///   without end and an unknown kind. The host gives the connection up.
/// - 84 compares random numbers, UUIDs, host names and clocks of machines from one snapshot.
const CASES: &[Case] = &[
    case!(
        48,
        "rights of the monitor as the host sees them",
        monitor_rights
    ),
    case!(80, "panic of the guest's kernel", |p| dies(
        p,
        "echo c > /proc/sysrq-trigger",
        10
    )),
    case!(80, "panics in a loop", panic_loop),
    case!(80, "reboot", |p| dies(p, "reboot -f", 10)),
    case!(80, "power off", |p| dies(p, "poweroff -f", 10)),
    case!(80, "halt", |p| dies(p, "halt -f", 1)),
    case!(81, "flood of the serial line", serial_flood),
    case!(82, "takes all memory and more", over_commit),
    case!(82, "devices that reach the host", devices),
    case!(83, "frame of four gigabytes", |p| forges(
        p,
        "os.write(fd, b'\\x02\\xff\\xff\\xff\\xff' + bytes(4096))",
        10
    )),
    case!(83, "frame that never ends", |p| forges(
        p,
        "os.write(fd, b'\\x02\\x00\\x80\\x00\\x00')\ntime.sleep(99)",
        5
    )),
    case!(83, "output without end", |p| forges(
        p,
        "while True: os.write(fd, b'\\x02\\x00\\x80\\x00\\x00' + bytes(32768))",
        10
    )),
    case!(83, "frames of unknown kinds", |p| forges(
        p,
        "os.write(fd, b'\\xee\\x00\\x00\\x00\\x00')",
        10
    )),
    case!(
        84,
        "clock, entropy and name of restored machines",
        restored_alike
    ),
];

/// Cases of the suite of every level that have another form here.
///
/// The generic suite lists 80 to 84 as not applicable, and its case 48 looks for a program among the host's
/// processes, where a guest's programs are not.
fn replaced(case: &str) -> bool {
    let number = case.split(' ').next().and_then(|n| n.parse::<u32>().ok());
    matches!(number, Some(80..=84)) || case == "48 capabilities as the host sees them"
}

/// Runs every case that `filter` chooses ([`attack::chosen`]).
///
/// # Errors
/// Only if no machine can be had at all.
pub async fn run(
    provider: &MicrovmProvider,
    filter: &str,
    on_row: &mut (dyn FnMut(AttackRow) + Send),
) -> Result<(), SandboxError> {
    let mut pass = |row: AttackRow| {
        if !replaced(&row.case) {
            on_row(row);
        }
    };
    attack::run(provider, filter, &mut pass).await?;
    run_own(provider, filter, on_row).await
}

/// Runs the cases that only machines have.
///
/// # Errors
/// Same as [`run`].
pub async fn run_own(
    provider: &MicrovmProvider,
    filter: &str,
    on_row: &mut (dyn FnMut(AttackRow) + Send),
) -> Result<(), SandboxError> {
    let mut sibling = provider.acquire(&spec()).await?;
    for case in CASES {
        let name = format!("{:02} {}", case.number, case.name);
        if !attack::chosen(&name, filter) {
            continue;
        }
        let before = monitors().len();
        let ran = (case.run)(provider).await;
        let verdict = ran.unwrap_or_else(|e| escaped(format!("the sandbox failed: {e}")));
        let (outcome, why) = aftermath(before, sibling.as_mut(), verdict).await;
        on_row(AttackRow {
            level: "microvm".into(),
            case: name,
            outcome,
            why,
        });
    }
    sibling.destroy().await
}

/// Checks after an attack that was held: no monitor is left, and the sibling answers.
///
/// Monitors get a minute to end. A verdict other than `Held` is passed on as it is.
async fn aftermath(before: usize, sibling: &mut dyn Sandbox, verdict: Verdict) -> Verdict {
    if verdict.0 != AttackOutcome::Held {
        return verdict;
    }
    // Those that were dropped are seen off by a separate thread.
    for _ in 0..6000 {
        if monitors().len() <= before {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let left = monitors().len();
    if left > before {
        return escaped(format!("{} monitors are left", left - before));
    }
    match sibling.exec(shell("echo well", 60)).await {
        Ok(r) if r.stdout == b"well\n" => verdict,
        Ok(r) => escaped(format!("the sibling answered {}", r.ending)),
        Err(e) => escaped(format!("the sibling died: {e}")),
    }
}

/// Numbers of monitors that this process started.
///
/// Children of this process whose name begins with `qemu`, read from `/proc/PID/stat`: those that run, sleep
/// or wait for a device. Ended ones that are not yet waited for do not count.
fn monitors() -> Vec<u32> {
    let parent = format!(") S {} ", std::process::id());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let running = stat.replace(") R ", ") S ").replace(") D ", ") S ");
        running.contains(&parent) && stat.contains("(qemu")
    })
    .collect()
}

/// A script for the guest's shell, with a deadline in seconds.
fn shell(script: &str, seconds: u64) -> ExecRequest {
    request(Program::Shell(script.into()), seconds)
}

/// A Python program, with a deadline in seconds.
fn python(code: &str, seconds: u64) -> ExecRequest {
    request(Program::Python(code.into()), seconds)
}

/// A request with nothing on standard input.
fn request(program: Program, seconds: u64) -> ExecRequest {
    ExecRequest::new(program, Duration::from_secs(seconds))
}

/// Reads `/proc/PID/status` of every monitor.
///
/// The effective, permitted and inheritable sets are compared with zero; the bounding set is not, as it
/// gives nothing under no-new-privileges. A monitor that is not found is an escape: nothing was proven.
async fn monitor_rights(provider: &MicrovmProvider) -> Result<Verdict, SandboxError> {
    let before: HashSet<u32> = monitors().into_iter().collect();
    let sandbox = provider.acquire(&spec()).await?;
    let own = std::fs::read_link("/proc/self/ns/net").ok();
    let mut seen = 0;
    for pid in monitors().into_iter().filter(|p| !before.contains(p)) {
        seen += 1;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let caps = |l: &&str| {
            (l.starts_with("CapEff") || l.starts_with("CapPrm") || l.starts_with("CapInh"))
                && !l.ends_with("\t0000000000000000")
        };
        if let Some(line) = status.lines().find(caps) {
            return Ok(escaped(line));
        }
        if !status.contains("Seccomp:\t2\n") || !status.contains("NoNewPrivs:\t1\n") {
            return Ok(escaped("the monitor's system calls are not filtered"));
        }
        if status.contains("Uid:\t0\t") {
            return Ok(escaped("the monitor is the host's first user"));
        }
        if std::fs::read_link(format!("/proc/{pid}/ns/net")).ok() == own {
            return Ok(escaped("the monitor has the host's network"));
        }
    }
    sandbox.destroy().await?;
    match seen {
        0 => Ok(escaped("the monitor was not found on the host")),
        _ => Ok(held(
            "no capabilities, a user of its own, filtered, no network",
        )),
    }
}

/// The machine must die of it, and the result must report that.
///
/// `script` runs in the guest's shell with `seconds` until the deadline. Its ending has to be `SandboxDied`,
/// a further program has to fail with `Died`, and `reset` has to give a machine that works.
async fn dies(
    provider: &MicrovmProvider,
    script: &str,
    seconds: u64,
) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire_unwalled(&spec()).await?;
    let result = sandbox.exec(shell(script, seconds)).await?;
    if result.ending != Ending::SandboxDied {
        let errors = String::from_utf8_lossy(&result.stderr).into_owned();
        return Ok(escaped(format!("{}; {errors}", result.ending)));
    }
    let again = sandbox.exec(shell("true", 5)).await;
    if !matches!(again, Err(SandboxError::Died(_))) {
        return Ok(escaped("a dead machine still answers"));
    }
    sandbox.reset().await?;
    let again = sandbox.exec(shell("echo up", 20)).await?;
    sandbox.destroy().await?;
    match printed(&again).as_str() {
        "up" => Ok(held("SandboxDied; a reset gives a new machine")),
        other => Ok(escaped(format!("after a reset: {other:?}"))),
    }
}

/// Machines that panic one after the other must not wear the provider out.
///
/// The first of four turns panics the kernel; in the others a shell sends itself a segmentation fault, which
/// must end only that program. A reset follows each.
async fn panic_loop(provider: &MicrovmProvider) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire_unwalled(&spec()).await?;
    for turn in 0..4 {
        let code = "open('/proc/sysrq-trigger', 'w').write('c')";
        let request = if turn == 0 {
            python(code, 10)
        } else {
            shell("kill -SEGV $$", 10)
        };
        let ending = sandbox.exec(request).await?.ending;
        let wanted = if turn == 0 {
            Ending::SandboxDied
        } else {
            Ending::Signalled { signal: 11 }
        };
        if ending != wanted {
            return Ok(escaped(format!("turn {turn} ended with {ending:?}")));
        }
        sandbox.reset().await?;
    }
    sandbox.destroy().await?;
    Ok(held("each reset gives a new machine"))
}

/// Writes to the console without end.
///
/// The character device 4:64 is the first serial line. The program is cut at 2 s; the monitor may take 512
/// MiB (`MONITOR_BYTES`).
async fn serial_flood(provider: &MicrovmProvider) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire_unwalled(&spec()).await?;
    let script = "mknod /dev/line c 4 64 && yes floodfloodflood > /dev/line";
    let result = sandbox.exec(shell(script, 2)).await?;
    let stats = sandbox.stats().await?;
    sandbox.destroy().await?;
    if result.ending != Ending::Timeout {
        let errors = String::from_utf8_lossy(&result.stderr).into_owned();
        return Ok(escaped(format!("{}; {errors}", result.ending)));
    }
    if stats.memory_bytes > MONITOR_BYTES {
        return Ok(escaped(format!(
            "the monitor takes {} bytes",
            stats.memory_bytes
        )));
    }
    let mib = stats.memory_bytes >> 20;
    Ok(held(format!(
        "its monitor keeps the last 16 kB; {mib} MiB in all"
    )))
}

/// Takes more memory than the machine has.
///
/// The guest's kernel may end the program or fall itself; both are held. The monitor's memory on the host,
/// as its group counts it, decides.
async fn over_commit(provider: &MicrovmProvider) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire_unwalled(&spec()).await?;
    let code = "x = []\nwhile True: x.append(bytearray(b'x') * (1 << 20))";
    let result = sandbox.exec(python(code, 20)).await?;
    let taken = match sandbox.stats().await {
        Ok(stats) => stats.memory_bytes,
        // The kernel may have chosen to fall.
        Err(SandboxError::Died(_)) => 0,
        Err(e) => return Err(e),
    };
    sandbox.destroy().await?;
    if taken > MONITOR_BYTES {
        return Ok(escaped(format!("the monitor takes {taken} bytes")));
    }
    let ended = result.ending;
    match ended {
        Ending::Exited { code: 0 } => Ok(escaped("it found memory without end")),
        _ => Ok(held(format!("{ended:?}; {} MiB on the host", taken >> 20))),
    }
}

/// Looks for devices other than the console.
///
/// Mounts `sysfs` and compares the whole list of virtio devices, network interfaces and disks with the
/// expected one, so that a device that is added later shows.
async fn devices(provider: &MicrovmProvider) -> Result<Verdict, SandboxError> {
    let mut sandbox = provider.acquire_unwalled(&spec()).await?;
    let script = "mkdir -p /dev/s && mount -t sysfs none /dev/s && ls /dev/s/bus/virtio/devices /dev/s/class/net /dev/s/block | tr '\\n' ' '";
    let seen = printed(&sandbox.exec(shell(script, 20)).await?);
    sandbox.destroy().await?;
    let expected = "/dev/s/block:  /dev/s/bus/virtio/devices: virtio0  /dev/s/class/net: lo";
    if seen != expected {
        return Ok(escaped(format!("it sees {seen:?}")));
    }
    Ok(held(
        "one device, the console: no disk, no network, no balloon",
    ))
}

/// Takes the agent's channel and writes what no agent would.
///
/// The program takes a copy of the descriptor from the guest's first process by `pidfd_getfd` and then runs
/// `code` with it as `fd`. The host must give the machine up: what comes over the channel cannot be trusted
/// any more, and a frame is never read beyond its bound.
async fn forges(
    provider: &MicrovmProvider,
    code: &str,
    seconds: u64,
) -> Result<Verdict, SandboxError> {
    /// Takes the agent's channel from the first process of the guest.
    const TAKE: &str = "
import ctypes, os, time
libc = ctypes.CDLL(None)
port = next(int(n) for n in os.listdir('/proc/1/fd') if 'vport' in os.readlink('/proc/1/fd/' + n))
fd = libc.syscall(438, libc.syscall(434, 1, 0), port, 0)
if fd < 0: print('no channel')
os.set_blocking(fd, True)
";
    let mut sandbox = provider.acquire_unwalled(&spec()).await?;
    let result = sandbox
        .exec(python(&format!("{TAKE}{code}"), seconds))
        .await?;
    let again = sandbox.exec(shell("true", 5)).await;
    sandbox.destroy().await?;
    let errors = String::from_utf8_lossy(&result.stderr).into_owned();
    match (result.ending, again) {
        (Ending::SandboxDied, Err(SandboxError::Died(_))) => {
            Ok(held("the connection is given up: SandboxDied"))
        }
        (ending, _) => Ok(escaped(format!("ended with {ending:?}; {errors}"))),
    }
}

/// Two clones of one snapshot must not draw the same random numbers.
///
/// Five machines: the original, and twice a fork of its snapshot and a machine of the template. No value of
/// the random generator, the kernel, a UUID or the host name may come twice. A clock may be `CLOCK_S` ahead
/// of the host's, and 120 s behind, as the case itself takes time after the line was printed.
async fn restored_alike(provider: &MicrovmProvider) -> Result<Verdict, SandboxError> {
    let code = "import os, random, socket, time, uuid\nprint(random.random(), os.urandom(8).hex(), uuid.uuid4(), socket.gethostname(), time.time())";
    let spec = spec();
    let mut first = provider.acquire(&spec).await?;
    let snapshot = first.snapshot().await?;
    let mut lines = vec![printed(&first.exec(python(code, 20)).await?)];
    first.destroy().await?;
    for _ in 0..2 {
        let mut fork = provider.fork(&spec, &snapshot).await?;
        lines.push(printed(&fork.exec(python(code, 20)).await?));
        fork.destroy().await?;
        let mut other = provider.acquire(&spec).await?;
        lines.push(printed(&other.exec(python(code, 20)).await?));
        other.destroy().await?;
    }
    let mut seen = HashSet::new();
    for line in &lines {
        let values: Vec<&str> = line.split(' ').collect();
        let &[random, kernel, uuid, name, time] = values.as_slice() else {
            return Ok(escaped(format!("{line:?} was printed")));
        };
        for value in [random, kernel, uuid, name] {
            if !seen.insert(value) {
                return Ok(escaped(format!("{value} came twice")));
            }
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.map_or(0.0, |d| d.as_secs_f64());
        let off = now - time.parse::<f64>().unwrap_or(0.0);
        // All were printed within this case.
        if !(-CLOCK_S..120.0).contains(&off) {
            return Ok(escaped(format!("its clock is {off} s off")));
        }
    }
    Ok(held(format!(
        "{} machines, all different; their clocks are right",
        lines.len()
    )))
}
