//! The attack suite: hostile programs run inside, judged from outside.
//!
//! Each case runs in a separate sandbox. It is `held` only if its effect did not happen, its ending is the
//! precise one, a sibling sandbox is unharmed, and no process, group or mount is left. Cases that cannot
//! apply at this level are listed with the reason. The numbers are those of the list in `docs/sandbox.md`.
//!
//! A case is judged in this order, and the first problem is the verdict: a line `ESCAPED`, the host's secret
//! in the output, memory above the limit, another ending than the expected one, a sprung trap, something left
//! on the host, a sibling that does not answer. A case that a level cannot run is `not_applicable`, with the
//! reason.

mod exit_reports;
mod files;
pub(crate) mod host;
mod kernel;
pub mod microvm;
mod resource;
mod special;
mod state;
pub(crate) mod table;
pub mod wasm;
mod writable;

use host::{LOOKS, Residue, Witness};
use serde::{Deserialize, Serialize};
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, Limits, Program, Sandbox, SandboxError, SandboxProvider,
    SandboxSpec,
};
use std::time::Duration;

/// Outcome of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttackOutcome {
    /// The attack had no effect, and its end was reported precisely.
    Held,
    /// The attack had an effect, was misreported, or left something behind.
    Escaped,
    /// The level has nothing that it could attack.
    NotApplicable,
    /// The attack was not run on this host.
    Skipped,
}

impl AttackOutcome {
    /// Name in rows and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Escaped => "escaped",
            Self::NotApplicable => "not_applicable",
            Self::Skipped => "skipped",
        }
    }
}

/// One row of the attack table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttackRow {
    /// Level attacked.
    pub level: String,
    /// Two-digit number in the list and a name.
    pub case: String,
    pub outcome: AttackOutcome,
    /// Observed facts, or the reason why it was not run.
    pub why: String,
}

/// Expected end of an attack that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Exits with 0 after printing `DONE`: everything it tried was refused.
    Done,
    /// Exits with this code.
    Exited(i32),
    /// Ended by this signal.
    Signalled(i32),
    /// Cut at its deadline.
    Timeout,
    /// Ended by its memory limit.
    OutOfMemory,
    /// The limit refuses each attempt, or ends the program.
    OutOfMemoryOrDone,
    /// Ended by its limit of processes and threads.
    TooManyProcesses,
    /// The output was cut, which is reported.
    OutputLimit,
    /// Ended by a system call that no program makes by mistake.
    Denied,
    /// Either of both, depending on the kernel.
    DoneOrDenied,
    /// Any ending but success that the sandbox survives.
    Refused,
    /// Any ending that the sandbox survives.
    Bounded,
}

impl Expect {
    /// Whether the result is the expected one.
    fn met(self, result: &ExecResult) -> bool {
        let ending = result.ending;
        let clean = ending == Ending::Exited { code: 0 };
        let done = clean && result.stdout.ends_with(b"DONE\n");
        match self {
            Self::Done => done,
            Self::Exited(code) => ending == Ending::Exited { code },
            Self::Signalled(signal) => ending == Ending::Signalled { signal },
            Self::Timeout => ending == Ending::Timeout,
            Self::OutOfMemory => ending == Ending::OutOfMemory,
            Self::OutOfMemoryOrDone => done || ending == Ending::OutOfMemory,
            Self::TooManyProcesses => ending == Ending::TooManyProcesses,
            Self::OutputLimit => ending == Ending::OutputLimit && result.truncated,
            Self::Denied => ending == Ending::Denied,
            Self::DoneOrDenied => done || ending == Ending::Denied,
            Self::Refused => !clean && ending != Ending::SandboxDied,
            Self::Bounded => ending != Ending::SandboxDied,
        }
    }
}

/// A hostile Python program. A line of its output that starts with `ESCAPED` gives it away.
#[derive(Debug)]
pub(crate) struct Case {
    /// Number in the list of `docs/sandbox.md`; variants share one.
    number: u32,
    /// Shown in the table, and matched by `--filter`.
    name: &'static str,
    /// The precise ending.
    expect: Expect,
    /// Deadline on an idle host; see [`Case::time`].
    deadline: Duration,
    /// Python, behind a prelude with `sc`, `refused` and `tries`.
    code: &'static str,
    /// Names system calls by their x86-64 numbers.
    raw_calls: bool,
}

impl Case {
    pub(crate) const fn new(
        number: u32,
        name: &'static str,
        expect: Expect,
        deadline_ms: u64,
        code: &'static str,
    ) -> Self {
        let bytes = code.as_bytes();
        let (mut raw_calls, mut at) = (false, 0);
        while at + 3 <= bytes.len() {
            raw_calls |= bytes[at] == b's' && bytes[at + 1] == b'c' && bytes[at + 2] == b'(';
            at += 1;
        }
        Self {
            number,
            name,
            expect,
            deadline: Duration::from_millis(deadline_ms),
            code,
            raw_calls,
        }
    }

    /// Deadline of the case. It stays exact for a case that must be cut by it; others get the additional time
    /// of a busy host or a slow level.
    fn time(&self) -> Duration {
        let cut = matches!(self.expect, Expect::Timeout | Expect::Bounded);
        self.deadline * if cut { 1 } else { BUSY }
    }
}

/// Factor of a program's time on a busy host, or if QEMU executes it without KVM. A late program is not an
/// escape.
const BUSY: u32 = 20;

/// Prelude of every program of the suite.
const PRELUDE: &str = "
import os, sys
def sc(nr, *args):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return libc.syscall(ctypes.c_long(nr), *args), ctypes.get_errno()
def refused(name, result):
    if result[0] != -1: print('ESCAPED', name, result)
def tries(name, f):
    try: value = f()
    except Exception as e: print('refused', name, e)
    else: print('ESCAPED', name, repr(value)[:80])
import ctypes
";

/// Limits of each attacked sandbox.
#[must_use]
pub fn spec() -> SandboxSpec {
    SandboxSpec {
        limits: Limits {
            cpu_s: 20.0,
            memory_bytes: 64 << 20,
            processes: 16,
            output_bytes: 64 << 10,
            work_bytes: 4 << 20,
            open_files: 32,
        },
        ..SandboxSpec::default()
    }
}

/// One run over all cases of a level.
struct Suite<'a> {
    /// Provider of the level.
    provider: &'a dyn SandboxProvider,
    /// The sandbox that no attack may touch; gone only after it could not be replaced.
    sibling: Option<Box<dyn Sandbox>>,
    /// Counts on the host without any sandbox.
    alone: Residue,
    /// The traps.
    witness: Witness,
    /// Called with each row at once: the suite takes minutes.
    on_row: &'a mut (dyn FnMut(AttackRow) + Send),
    /// Cases that do not apply, by name, and the reason.
    left_out: &'static [(&'static str, &'static str)],
}

/// Whether a case is meant: `filter` is a part of its number and name, or a range of numbers
/// (`31-45`).
pub fn chosen(case: &str, filter: &str) -> bool {
    let number = |text: &str| text.parse::<u32>().ok();
    let range = filter.split_once('-');
    match range.and_then(|(from, to)| Some((number(from)?, number(to)?))) {
        Some((from, to)) => {
            let own = case.split(' ').next().and_then(number);
            own.is_some_and(|n| (from..=to).contains(&n))
        }
        None => case.contains(filter),
    }
}

/// Runs the cases that `filter` chooses ([`chosen`]), and passes each row to `on_row` as soon as it is known.
///
/// # Errors
/// Only if no sandbox can be had at all; what an attack does is a row.
pub async fn run(
    provider: &dyn SandboxProvider,
    filter: &str,
    on_row: &mut (dyn FnMut(AttackRow) + Send),
) -> Result<(), SandboxError> {
    run_all(provider, filter, false, on_row).await
}

/// Same as [`run`], in sandboxes with a writable root whose programs are root inside, with further cases.
///
/// # Errors
/// Fails as [`run`] does, also at a level without writable roots.
pub async fn run_writable(
    provider: &dyn SandboxProvider,
    filter: &str,
    on_row: &mut (dyn FnMut(AttackRow) + Send),
) -> Result<(), SandboxError> {
    let provider = writable::WritableRoots(provider);
    run_all(&provider, filter, true, on_row).await
}

/// Cases that programs carry out, and those with a part on the host, in their order.
fn cases(is_writable: bool) -> (Vec<&'static Case>, Vec<&'static special::Special>) {
    let (programs, specials): (&[Case], &[special::Special]) = if is_writable {
        (writable::CASES, writable::SPECIALS)
    } else {
        (&[], &[])
    };
    let all = [resource::CASES, files::CASES, kernel::CASES, programs];
    let special = [special::ALL, state::ALL, exit_reports::ALL, specials];
    (
        all.into_iter().flatten().collect(),
        special.into_iter().flatten().collect(),
    )
}

/// Runs the cases of one mode.
async fn run_all(
    provider: &dyn SandboxProvider,
    filter: &str,
    is_writable: bool,
    on_row: &mut (dyn FnMut(AttackRow) + Send),
) -> Result<(), SandboxError> {
    let witness = Witness::new().map_err(|e| SandboxError::io("set traps on the host", e))?;
    sibling(provider, &witness).await?.destroy().await?;
    // All cases are compared with this count: it is not one of a pool that still fills, also on a busy host.
    let alone = Residue::settled(20).await;
    let mut suite = Suite {
        provider,
        sibling: Some(sibling(provider, &witness).await?),
        alone,
        witness,
        on_row,
        left_out: if is_writable { writable::REPLACED } else { &[] },
    };
    let (programs, specials) = cases(is_writable);
    for case in programs {
        let name = title(case.number, case.name);
        if chosen(&name, filter) {
            let outcome = match suite.left_out(case.name) {
                Some(outcome) => outcome,
                None => suite.attack(case).await,
            };
            suite.row(name, outcome);
        }
    }
    for special in specials {
        let name = title(special.number, special.name);
        if chosen(&name, filter) {
            let outcome = match suite.left_out(special.name) {
                Some(outcome) => outcome,
                None => suite.special(special).await,
            };
            suite.row(name, outcome);
        }
    }
    for &(number, name, why) in kernel::ABSENT {
        let name = title(number, name);
        if chosen(&name, filter) {
            suite.row(name, (AttackOutcome::NotApplicable, why.into()));
        }
    }
    match suite.sibling {
        Some(sibling) => sibling.destroy().await,
        None => Ok(()),
    }
}

/// A sandbox that holds the secret as a file, so that its answer shows that it is unharmed.
async fn sibling(
    provider: &dyn SandboxProvider,
    witness: &Witness,
) -> Result<Box<dyn Sandbox>, SandboxError> {
    let mut sibling = provider.acquire(&spec()).await?;
    let canary = witness.secret.as_bytes();
    sibling.write_file("canary", canary).await?;
    Ok(sibling)
}

/// Number with two digits, and the name.
fn title(number: u32, name: &str) -> String {
    format!("{number:02} {name}")
}

/// Outcome, and what was seen or why it was not run.
pub(crate) type Verdict = (AttackOutcome, String);

/// The verdict of a problem.
pub(crate) fn escaped(why: impl Into<String>) -> Verdict {
    (AttackOutcome::Escaped, why.into())
}

impl Suite<'_> {
    fn row(&mut self, case: String, (outcome, why): Verdict) {
        (self.on_row)(AttackRow {
            level: self.provider.level().into(),
            case,
            outcome,
            why,
        });
    }

    /// The verdict of a case that is left out.
    fn left_out(&self, name: &str) -> Option<Verdict> {
        let found = self.left_out.iter().find(|(left_out, _)| *left_out == name);
        found.map(|(_, why)| (AttackOutcome::NotApplicable, (*why).into()))
    }

    /// Runs one case in a separate sandbox, and looks at what it left.
    async fn attack(&mut self, case: &Case) -> Verdict {
        if case.raw_calls && !cfg!(target_arch = "x86_64") {
            let why = "the program knows only the system calls of x86-64";
            return (AttackOutcome::Skipped, why.into());
        }
        let before = Residue::settled(2).await;
        let result = self.exec_alone(case).await;
        let verdict = match result {
            Ok(result) => self.judge(case, &result),
            Err(e) => escaped(format!("the sandbox failed: {e}")),
        };
        self.aftermath(before, verdict).await
    }

    /// Runs a case that has a part on the host.
    async fn special(&mut self, special: &special::Special) -> Verdict {
        let before = Residue::settled(2).await;
        let verdict = match (special.run)(self.provider, &self.witness).await {
            Ok(verdict) => verdict,
            // Snapshots, where the root is writable.
            Err(SandboxError::Unsupported { operation }) if !self.left_out.is_empty() => {
                let why = format!("these sandboxes cannot {operation}");
                (AttackOutcome::NotApplicable, why)
            }
            Err(e) => escaped(format!("the sandbox failed: {e}")),
        };
        self.aftermath(before, verdict).await
    }

    /// Makes a sandbox, runs the case, destroys the sandbox.
    async fn exec_alone(&self, case: &Case) -> Result<ExecResult, SandboxError> {
        let mut sandbox = self.provider.acquire(&spec()).await?;
        let code = format!("{PRELUDE}{}{}", self.witness.python(), case.code);
        let request = ExecRequest::new(Program::Python(code), case.time());
        let result = sandbox.exec(request).await;
        sandbox.destroy().await?;
        result
    }

    /// Judges only the result.
    fn judge(&self, case: &Case, result: &ExecResult) -> Verdict {
        let printed = String::from_utf8_lossy(&result.stdout);
        if let Some(line) = printed.lines().find(|l| l.starts_with("ESCAPED")) {
            return escaped(line);
        }
        if printed.contains(&self.witness.secret) {
            return escaped("it printed a secret of the host");
        }
        if result.usage.peak_memory_bytes > spec().limits.memory_bytes + (1 << 20) {
            let peak = result.usage.peak_memory_bytes;
            return escaped(format!("it used {peak} bytes of memory"));
        }
        if !case.expect.met(result) {
            let errors = String::from_utf8_lossy(&result.stderr);
            let last = errors.lines().last().unwrap_or_default().to_owned();
            return escaped(format!(
                "{}, expected {:?}; {last}",
                result.ending, case.expect
            ));
        }
        (AttackOutcome::Held, result.ending.to_string())
    }

    /// A held attack must also have left the host and the sibling as they were.
    async fn aftermath(&mut self, before: Residue, verdict: Verdict) -> Verdict {
        if verdict.0 != AttackOutcome::Held {
            return verdict;
        }
        if let Some(trap) = self.witness.sprung() {
            return escaped(trap);
        }
        let left = before.left_since(LOOKS).await;
        if let Err(why) = self.sibling_answers().await {
            return escaped(why);
        }
        if left.is_none() {
            return verdict;
        }
        match self.left_without_sibling().await {
            Ok(None) => verdict,
            Ok(Some(left)) => escaped(left),
            Err(e) => escaped(format!("the sibling could not be replaced: {e}")),
        }
    }

    /// Whether the sibling still has its file, and can run a program.
    async fn sibling_answers(&mut self) -> Result<(), String> {
        let request = ExecRequest::new(
            Program::Python("print(open('canary').read(), end='')".into()),
            Duration::from_secs(60),
        );
        let Some(sibling) = &mut self.sibling else {
            return Err("there is no sibling any more".into());
        };
        match sibling.exec(request).await {
            Ok(r) if r.stdout == self.witness.secret.as_bytes() => Ok(()),
            Ok(r) => Err(format!(
                "the sibling answered {:?} {:?}",
                r.ending, r.stdout
            )),
            Err(e) => Err(format!("the sibling died: {e}")),
        }
    }

    /// Checks for remains without the sibling: on a busy host the sibling's next interpreter may come late
    /// and be counted as new. The remains of an attack are still there without the sibling.
    async fn left_without_sibling(&mut self) -> Result<Option<String>, SandboxError> {
        if let Some(sibling) = self.sibling.take() {
            sibling.destroy().await?;
        }
        let left = self.alone.left_since(30 * LOOKS).await;
        self.sibling = Some(sibling(self.provider, &self.witness).await?);
        Ok(left)
    }
}
