//! Sandboxes in large numbers: rates, costs of idle ones, calls in flight, remains.
//!
//! | row | unit | target |
//! |---|---|---|
//! | `python_fresh_rate` | sandboxes a second, eight at once | at least 200 |
//! | `left_after_N_creates` | 1 if anything is left, else 0 | 0 |
//! | `N_calls_lost` | calls without their own answer | 0 |
//! | `N_calls_mean`, `_p99`, `_rate` | ms from the start of all calls, calls a second | none |
//! | `N_idle_memory` | MiB that the system has less than before | 8 GiB for 5,000 |
//! | `N_idle_answering` | sandboxes that still run a program | all |

use crate::attack::host::{LOOKS, Residue};
use crate::sandbox::{BenchRow, OnRow, Parts, Subjects, exec};
use futures::StreamExt;
use sinew_sandbox::{
    Ending, ExecRequest, Pool, PoolConfig, Program, Sandbox, SandboxError, SandboxProvider,
    SandboxSpec,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Numbers of the measurements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Sandboxes that live at once.
    pub idle: usize,
    /// Calls that are in flight at once.
    pub calls: usize,
    /// Sandboxes that are made and destroyed before leaks are counted.
    pub creates: usize,
}

impl Scale {
    /// Sizes of the targets. They take minutes.
    pub const FULL: Self = Self {
        idle: 5000,
        calls: 45_000,
        creates: 10_000,
    };
    /// Small counts, which take seconds.
    pub const QUICK: Self = Self {
        idle: 100,
        calls: 300,
        creates: 300,
    };

    /// Creates a scale with the same number everywhere.
    pub const fn of(count: u32) -> Self {
        let count = count as usize;
        Self {
            idle: count,
            calls: count,
            creates: count,
        }
    }
}

/// Least rate of fresh sandboxes hoped for: what a training run can feel.
const CREATES_PER_S: f64 = 200.0;
/// Sandboxes that are made at once while a rate is measured.
const LANES: usize = 8;
/// Memory that the idle sandboxes of [`Scale::FULL`] may take.
const IDLE_MIB: f64 = 8192.0;
/// Longest that a call may wait for its turn and run.
const PATIENCE: Duration = Duration::from_secs(400);

/// The parts `creates`, `calls` and `idle`, one after the other.
pub(crate) async fn run(
    subjects: &Subjects,
    scale: &Scale,
    parts: &Parts,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    if parts.has("creates") {
        let before = Residue::settled(20).await;
        on_row(creates(&subjects.warm, scale).await?);
        on_row(leaks(&subjects.warm, before, scale).await);
    }
    if parts.has("calls") {
        calls(&subjects.warm, scale, on_row).await?;
    }
    if parts.has("idle") {
        idle(&subjects.warm, scale, on_row).await?;
    }
    Ok(())
}

/// The level's name before that of a row.
fn named(provider: &Arc<dyn SandboxProvider>, name: &str) -> String {
    format!("{}_{name}", provider.level())
}

/// Fresh Python sandboxes a second, each made, used once and destroyed.
///
/// `LANES` are made at once. The time of the whole loop counts, destruction included.
async fn creates(
    provider: &Arc<dyn SandboxProvider>,
    scale: &Scale,
) -> Result<BenchRow, SandboxError> {
    let spec = SandboxSpec::default();
    let begun = Instant::now();
    let one = |_| async {
        let mut sandbox = provider.acquire(&spec).await?;
        exec(sandbox.as_mut(), Program::Python("print(1)".into())).await?;
        sandbox.destroy().await
    };
    let all = futures::stream::iter(0..scale.creates).map(one);
    let results: Vec<Result<(), SandboxError>> = all.buffer_unordered(LANES).collect().await;
    results.into_iter().collect::<Result<(), _>>()?;
    let value = scale.creates as f64 / begun.elapsed().as_secs_f64();
    Ok(BenchRow {
        name: named(provider, "python_fresh_rate"),
        value,
        unit: "1/s".into(),
        target: Some(CREATES_PER_S),
        met: Some(value >= CREATES_PER_S),
        ..BenchRow::default()
    })
}

/// Counts what is left on the host after the sandboxes of `creates`.
///
/// Processes, groups and mounts are counted by `Residue`, which waits up to two seconds for the kernel to
/// free them.
async fn leaks(provider: &Arc<dyn SandboxProvider>, before: Residue, scale: &Scale) -> BenchRow {
    let left = before.left_since(LOOKS).await;
    BenchRow {
        name: named(provider, &format!("left_after_{}_creates", scale.creates)),
        value: f64::from(u8::from(left.is_some())),
        unit: "leaks".into(),
        target: Some(0.0),
        met: Some(left.is_none()),
        why: left,
        ..BenchRow::default()
    }
}

/// Calls that are all in flight at once, through a pool, each in a separate sandbox.
///
/// Every call is a task from the start; `LANES` of them use the pool at a time, the others wait for their
/// turn. The times are from the common start to the call's own end, so that the mean grows with their
/// number. A call is lost if it failed, or printed another call's answer.
async fn calls(
    provider: &Arc<dyn SandboxProvider>,
    scale: &Scale,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    let config = PoolConfig {
        starts_at_once: 4,
        ..PoolConfig::for_live(64)
    };
    let pool = Pool::new(Arc::clone(provider), config)?;
    let begun = Instant::now();
    let slots = Arc::new(tokio::sync::Semaphore::new(LANES));
    let mut tasks = Vec::with_capacity(scale.calls);
    for i in 0..scale.calls {
        let (pool, slots) = (pool.clone(), Arc::clone(&slots));
        tasks.push(tokio::spawn(async move {
            let _slot = slots.acquire().await;
            let good = call(&pool, i).await;
            (good, begun.elapsed().as_secs_f64() * 1e3)
        }));
    }
    let (mut ms, mut lost) = (Vec::with_capacity(scale.calls), 0usize);
    for task in tasks {
        match task.await {
            Ok((true, after)) => ms.push(after),
            Ok((false, _)) | Err(_) => lost += 1,
        }
    }
    pool.drain().await?;
    ms.sort_by(f64::total_cmp);
    let at = |q: f64| ms.get((ms.len().saturating_sub(1) as f64 * q) as usize);
    let mean = ms.iter().sum::<f64>() / ms.len().max(1) as f64;
    let name = |what: &str| named(provider, &format!("{}_calls_{what}", scale.calls));
    let plain = |what: &str, value: f64, unit: &str| BenchRow {
        name: name(what),
        value,
        unit: unit.into(),
        ..BenchRow::default()
    };
    on_row(BenchRow {
        target: Some(0.0),
        met: Some(lost == 0),
        ..plain("lost", lost as f64, "calls")
    });
    on_row(plain("mean", mean, "ms"));
    on_row(plain("p99", at(0.99).copied().unwrap_or(0.0), "ms"));
    let rate = ms.len() as f64 / begun.elapsed().as_secs_f64();
    on_row(plain("rate", rate, "1/s"));
    Ok(())
}

/// Whether a call came back with its own answer.
async fn call(pool: &Pool, i: usize) -> bool {
    let spec = SandboxSpec::default();
    let Ok(mut sandbox) = pool.acquire(&spec).await else {
        return false;
    };
    let request = ExecRequest::new(Program::Python(format!("print({i} * 2)")), PATIENCE);
    let result = sandbox.exec(request).await;
    let expected = format!("{}\n", i * 2);
    let good = result
        .is_ok_and(|r| r.ending == (Ending::Exited { code: 0 }) && r.stdout == expected.as_bytes());
    sandbox.destroy().await.is_ok() && good
}

/// Memory that the system still has to give, in MiB (`MemAvailable`).
fn available_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse::<f64>().ok())
        .map_or(0.0, |kib| kib / 1024.0)
}

/// Sandboxes that live and wait, and whether each still answers.
///
/// Memory is what `MemAvailable` lost one second after the last one was made, and so counts the kernel's
/// part, too. Other work on the machine makes the row inexact unless that work is steady. Each sandbox then
/// runs one program, one after the other.
async fn idle(
    provider: &Arc<dyn SandboxProvider>,
    scale: &Scale,
    on_row: OnRow<'_>,
) -> Result<(), SandboxError> {
    let spec = SandboxSpec::default();
    let before = available_mib();
    let make = |_| provider.acquire(&spec);
    let made = futures::stream::iter(0..scale.idle).map(make);
    let made: Vec<Result<Box<dyn Sandbox>, SandboxError>> =
        made.buffer_unordered(LANES).collect().await;
    let mut sandboxes = made.into_iter().collect::<Result<Vec<_>, _>>()?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = before - available_mib();
    let most = IDLE_MIB * scale.idle as f64 / Scale::FULL.idle as f64;
    on_row(BenchRow {
        name: named(provider, &format!("{}_idle_memory", scale.idle)),
        value: used,
        unit: "MiB".into(),
        target: Some(most),
        met: Some(used <= most),
        ..BenchRow::default()
    });
    let mut answered = 0usize;
    for (i, sandbox) in sandboxes.iter_mut().enumerate() {
        let code = format!("print({i})");
        let answer = exec(sandbox.as_mut(), Program::Python(code)).await;
        answered += usize::from(answer.is_ok());
    }
    on_row(BenchRow {
        name: named(provider, &format!("{}_idle_answering", scale.idle)),
        value: answered as f64,
        unit: "sandboxes".into(),
        target: Some(scale.idle as f64),
        met: Some(answered == scale.idle),
        ..BenchRow::default()
    });
    let ends = futures::stream::iter(sandboxes).map(|s| s.destroy());
    let ends: Vec<Result<(), SandboxError>> = ends.buffer_unordered(64).collect().await;
    ends.into_iter().collect()
}
