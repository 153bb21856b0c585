//! What is going on right now, for whoever shows it.

use sinew_types::{EpisodeEnd, Trace};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Where an episode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Boot,
    Generate,
    Tool,
    Score,
}

/// Counters that the driver moves and a view reads. All relaxed: they are for people.
#[derive(Debug, Default)]
pub struct Gauges {
    in_phase: [AtomicUsize; 4],
    in_flight: AtomicUsize,
    finished: AtomicU64,
    succeeded: AtomicU64,
    failed: AtomicU64,
    tool_calls_us: AtomicU64,
}

/// Leaves the phase when dropped.
#[derive(Debug)]
pub struct PhaseGuard<'a>(&'a AtomicUsize);

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A reading of [`Gauges`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GaugesReading {
    pub in_flight: usize,
    pub booting: usize,
    pub generating: usize,
    pub in_tool: usize,
    /// Since the start of the program.
    pub finished: u64,
    pub succeeded: u64,
    pub failed: u64,
    /// Microseconds that episodes spent in their environments, summed over episodes.
    pub tool_us: u64,
}

impl Gauges {
    /// Counts an episode as being in `phase` until the guard is dropped.
    pub fn enter(&self, phase: Phase) -> PhaseGuard<'_> {
        let gauge = &self.in_phase[phase as usize];
        gauge.fetch_add(1, Ordering::Relaxed);
        PhaseGuard(gauge)
    }

    /// Counts an episode as in flight until the guard is dropped.
    pub fn begin(&self) -> PhaseGuard<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        PhaseGuard(&self.in_flight)
    }

    /// Counts a finished episode.
    pub fn finish(&self, trace: &Trace) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        if trace.outcome.success {
            self.succeeded.fetch_add(1, Ordering::Relaxed);
        }
        if matches!(trace.end, EpisodeEnd::Failed { .. }) {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        let us = (trace.timing.tool_s * 1e6) as u64;
        self.tool_calls_us.fetch_add(us, Ordering::Relaxed);
    }

    /// The current values.
    pub fn read(&self) -> GaugesReading {
        let phase = |p: Phase| self.in_phase[p as usize].load(Ordering::Relaxed);
        GaugesReading {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            booting: phase(Phase::Boot),
            generating: phase(Phase::Generate),
            in_tool: phase(Phase::Tool) + phase(Phase::Score),
            finished: self.finished.load(Ordering::Relaxed),
            succeeded: self.succeeded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            tool_us: self.tool_calls_us.load(Ordering::Relaxed),
        }
    }
}
