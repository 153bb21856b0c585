//! Peaks of this machine, and its load by other processes.
//!
//! Every row of the compute bench has the share of the machine that others used meanwhile (`others_cpu`). The
//! peaks of bandwidth and arithmetic are measured in the same run: no figure of a data sheet is used.

use super::row::{Better, Printer, Row, Summary};
use sinew_tensor::{Buffer, Cpu, KernelSet, Mat, MatMut, PackedWeights, probe};
use std::time::Instant;

/// Limits measured in this run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Floors {
    /// Floating-point operations a second in registers, all threads.
    pub(crate) peak: f64,
}

/// Bytes of the buffer that is read: far above any cache.
const READ_BYTES: usize = 512 << 20;
/// Rounds of a peak, of which the best counts: a peak is not a median.
const ROUNDS: usize = 9;

/// CPU time of this process and of the whole machine, in clock ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime {
    /// CPU time of this process and its ended children.
    own: f64,
    /// Busy time of the whole machine.
    busy: f64,
    /// Busy and idle time of the whole machine.
    all: f64,
}

impl CpuTime {
    /// `None` where `/proc` does not tell.
    pub(crate) fn now() -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        let total = std::fs::read_to_string("/proc/stat").ok()?;
        Self::parse(&own, &total)
    }

    /// `own`: user, system, and those of ended children (fields 14 to 17 of proc_pid_stat(5)).
    /// `total`: first line of proc_stat(5); idle and iowait are its fourth and fifth numbers.
    fn parse(own: &str, total: &str) -> Option<Self> {
        let own = Self::ticks(own)?;
        let line = total.lines().next()?.strip_prefix("cpu ")?;
        let numbers: Vec<f64> = line
            .split_whitespace()
            .map_while(|f| f.parse().ok())
            .collect();
        let all: f64 = numbers.get(..8)?.iter().sum();
        let idle = numbers[3] + numbers[4];
        Some(Self {
            own,
            busy: all - idle,
            all,
        })
    }

    /// CPU time of a process and its ended children.
    fn ticks(stat: &str) -> Option<f64> {
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let own = fields.get(11..15)?.iter().map(|f| f.parse::<f64>());
        own.sum::<Result<f64, _>>().ok()
    }

    /// Now, with running children counted as this process.
    pub(crate) fn with_children(children: &[u32]) -> Option<Self> {
        let mut time = Self::now()?;
        for child in children {
            let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).ok()?;
            time.own += Self::ticks(&stat)?;
        }
        Some(time)
    }

    /// As [`CpuTime::others_since`] for a start that was taken with the same children.
    pub(crate) fn others_beside(start: Option<Self>, children: &[u32]) -> Option<f64> {
        Self::share(start?, Self::with_children(children)?)
    }

    /// Share of the machine's CPU time since `start` that neither this process nor its ended
    /// children used, nor was idle.
    pub(crate) fn others_since(start: Option<Self>) -> Option<f64> {
        Self::share(start?, Self::now()?)
    }

    /// Share of others between two times.
    fn share(start: Self, end: Self) -> Option<f64> {
        let all = end.all - start.all;
        let others = (end.busy - start.busy) - (end.own - start.own);
        (all > 0.0).then(|| (others / all).clamp(0.0, 1.0))
    }
}

/// Seconds of CPU time of this process and its ended children.
pub(crate) fn cpu_s() -> Option<f64> {
    /// `USER_HZ`, which the kernel shows to programs of all common architectures (time(7)).
    const TICKS: f64 = 100.0;
    Some(CpuTime::now()?.own / TICKS)
}

/// Maximum memory that this process ever held, bytes.
pub(crate) fn peak_memory() -> Option<f64> {
    status_bytes("self", "VmHWM:")
}

/// Resident memory of a process (its number, or `self`), bytes; `None` if it has ended.
pub(crate) fn resident_memory(process: &str) -> Option<f64> {
    status_bytes(process, "VmRSS:")
}

/// Bytes of a line of a process's proc_pid_status(5).
fn status_bytes(process: &str, name: &str) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    line_bytes(&status, name)
}

/// Bytes of a line of proc_pid_status(5), which counts in KiB.
fn line_bytes(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024.0)
}

/// Seconds of each of `rounds` runs, after one that is not counted.
pub(crate) fn seconds(rounds: usize, body: &mut dyn FnMut()) -> Vec<f64> {
    body();
    seconds_now(rounds, body)
}

/// Seconds of each of `rounds` runs, the first one included.
pub(super) fn seconds_now(rounds: usize, body: &mut dyn FnMut()) -> Vec<f64> {
    let mut out = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        body();
        out.push(start.elapsed().as_secs_f64());
    }
    out
}

/// Bytes read and operations done a second at most, from a few short rounds.
pub(super) fn limits(dev: &Cpu) -> (f64, f64) {
    let memory = Buffer::from_slice(&vec![1.0; READ_BYTES / 4]);
    let read = seconds(3 * ROUNDS, &mut || {
        std::hint::black_box(probe::read(dev, &memory));
    });
    let mut peak = 0.0f64;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let operations = probe::multiply_add(dev, 1_000_000);
        peak = peak.max(operations / start.elapsed().as_secs_f64());
    }
    let best = read.into_iter().fold(f64::INFINITY, f64::min);
    (READ_BYTES as f64 / best, peak)
}

/// Measures the limits and prints them. The floors of later rows are the best rounds.
pub(crate) fn floors(dev: &Cpu, printer: Printer) -> Floors {
    let cpu = CpuTime::now();
    let memory = Buffer::from_slice(&vec![1.0; READ_BYTES / 4]);
    let read = seconds(ROUNDS, &mut || {
        std::hint::black_box(probe::read(dev, &memory));
    });
    drop(memory);
    let rates = read.iter().map(|s| READ_BYTES as f64 / s).collect();
    rate(printer, "memory read", "GB/s", rates, cpu);
    let cpu = CpuTime::now();
    let rates = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            let operations = probe::multiply_add(dev, 4_000_000);
            operations / start.elapsed().as_secs_f64()
        })
        .collect();
    let kind = match dev.kernels() {
        KernelSet::Amx => "bf16 tile multiply-add",
        _ => "f32 multiply-add",
    };
    let peak = rate(printer, kind, "GFLOP/s", rates, cpu);
    gemm(dev, printer, peak);
    Floors { peak }
}

/// Prints a row in billions; answers the best.
fn rate(printer: Printer, name: &str, unit: &str, rates: Vec<f64>, cpu: Option<CpuTime>) -> f64 {
    let scaled = rates.iter().map(|r| r / 1e9).collect();
    let summary = Summary::of(scaled, Better::More).unwrap_or_default();
    let row = Row::new(format!("floor: {name}"), unit, summary);
    printer.row(&row.others(CpuTime::others_since(cpu)));
    summary.best * 1e9
}

/// Products at the shapes of SmolLM2-135M against the peak of the same run.
fn gemm(dev: &Cpu, printer: Printer, peak: f64) {
    for (name, m, n, k) in [
        ("gate_up, 1024 rows", 1024, 3072, 576),
        ("down, 1024 rows", 1024, 576, 1536),
        ("head, 128 rows", 128, 49152, 576),
        ("gate_up, 32 rows", 32, 3072, 576),
    ] {
        let cpu = CpuTime::now();
        let w = PackedWeights::pack(dev, &vec![0.5; n * k], n, k);
        let x = Buffer::from_slice(&vec![0.5; m * k]);
        let mut y = Buffer::zeros(m * n);
        let turns = (1 << 33) / (2 * m * n * k) + 1;
        let times = seconds(5, &mut || {
            for _ in 0..turns {
                let y = MatMut::new(&mut y, m, n);
                dev.matmul_packed(Mat::new(&x, m, k), &w, y, false);
            }
        });
        let flop = (2 * m * n * k * turns) as f64;
        let rates = times.iter().map(|s| flop / s / 1e9).collect();
        let summary = Summary::of(rates, Better::More).unwrap_or_default();
        let row = Row::new(format!("matrix product: {name}"), "GFLOP/s", summary);
        let row = row.against("multiply-add of this machine", peak / 1e9, Better::More);
        printer.row(&row.others(CpuTime::others_since(cpu)));
    }
}

/// The kernels in use, for the first row.
pub(crate) fn describe(dev: &Cpu) -> String {
    let best = KernelSet::detect();
    format!("{} of {best}, {} threads", dev.kernels(), dev.threads())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_from_proc() {
        let own = "7 (a) b) c) R 1 7 7 0 -1 4194304 100 0 0 0 250 50 20 30 20 0 3 0 1 2";
        let total = "cpu  1000 0 500 8000 100 0 10 0 0 0\ncpu0 1 2 3\n";
        let t = CpuTime::parse(own, total).unwrap();
        assert_eq!((t.own, t.all, t.busy), (350.0, 9610.0, 1510.0));
        assert!(CpuTime::parse("nonsense", total).is_none());
        assert!(CpuTime::parse(own, "cpu 1 2").is_none());
    }

    #[test]
    fn memory_is_read_from_the_status_of_a_process() {
        let status = "Name:\tx\nVmRSS:\t    12 kB\n";
        assert_eq!(line_bytes(status, "VmRSS:"), Some(12.0 * 1024.0));
        assert_eq!(line_bytes(status, "VmHWM:"), None);
    }
}
