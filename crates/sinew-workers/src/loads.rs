//! Counters of all workers, added up. Pure: callers pass the time.

use crate::terms::WorkerReading;
use std::collections::BTreeMap;

/// Time after its last report from which a worker counts as gone.
pub(crate) const GONE_S: f64 = 30.0;
/// Maximum number of workers that are known; the one that was heard of least recently is forgotten first.
const MAX_WORKERS: usize = 4096;

/// The last report of a worker.
#[derive(Clone, Copy, Debug)]
struct Seen {
    reading: WorkerReading,
    at_s: f64,
    /// Its silence was named.
    named: bool,
}

/// Reports of workers so far.
#[derive(Debug, Default)]
pub(crate) struct WorkerLoads {
    workers: BTreeMap<String, Seen>,
    /// Sums over all workers, also over those that are gone. Seconds of engines are means of the live ones.
    sums: WorkerReading,
    /// Time of the last report of any worker.
    last_s: Option<f64>,
}

impl WorkerLoads {
    /// Takes a report in.
    pub(crate) fn report(&mut self, worker: &str, reading: WorkerReading, now_s: f64) {
        let seen = Seen {
            reading,
            at_s: now_s,
            named: false,
        };
        // The counters of a worker that started again begin at 0.
        let before = self.workers.insert(worker.to_owned(), seen);
        let before = before.map(|seen| seen.reading).unwrap_or_default();
        let grown = |now: f64, before: f64| if now >= before { now - before } else { now };
        let grew = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let live = self.live(now_s).max(1) as f64;
        let busy_s = grown(reading.engine_busy_s, before.engine_busy_s);
        self.sums.engine_busy_s += busy_s / live;
        self.sums.sandbox_s += grown(reading.sandbox_s, before.sandbox_s);
        self.sums.sampled_tokens += grew(reading.sampled_tokens, before.sampled_tokens);
        self.sums.preemptions += grew(reading.preemptions, before.preemptions);
        self.sums.hops.add(&reading.hops.since(&before.hops));
        self.sums.opened += grew(reading.opened, before.opened);
        self.sums.interrupted += grew(reading.interrupted, before.interrupted);
        self.last_s = Some(now_s);
        if self.workers.len() > MAX_WORKERS {
            let oldest = self.workers.iter();
            let oldest = oldest.min_by(|(_, a), (_, b)| a.at_s.total_cmp(&b.at_s));
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                self.workers.remove(&name);
            }
        }
    }

    /// Number of workers that are not gone.
    pub(crate) fn live(&self, now_s: f64) -> usize {
        let live = |seen: &&Seen| now_s - seen.at_s < GONE_S;
        self.workers.values().filter(live).count()
    }

    /// Workers that held episodes in their last report and have been silent for longer than a time since.
    /// Each silence is named once.
    pub(crate) fn newly_silent(&mut self, longer_than_s: f64, now_s: f64) -> Vec<String> {
        let mut names = Vec::new();
        for (name, seen) in &mut self.workers {
            let silent = now_s - seen.at_s > longer_than_s;
            if silent && !seen.named && seen.reading.in_flight > 0 {
                seen.named = true;
                names.push(name.clone());
            }
        }
        names
    }

    /// Seconds since the last report of any worker.
    pub(crate) fn silent_s(&self, now_s: f64) -> Option<f64> {
        self.last_s.map(|at_s| now_s - at_s)
    }

    /// The sums, with the phases of the episodes of live workers.
    pub(crate) fn sum(&self, now_s: f64) -> WorkerReading {
        let mut sum = self.sums;
        let live = self.workers.values();
        for seen in live.filter(|seen| now_s - seen.at_s < GONE_S) {
            sum.in_flight += seen.reading.in_flight;
            sum.booting += seen.reading.booting;
            sum.generating += seen.reading.generating;
            sum.in_tool += seen.reading.in_tool;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(busy_s: f64, tokens: u64, in_flight: usize) -> WorkerReading {
        WorkerReading {
            engine_busy_s: busy_s,
            sampled_tokens: tokens,
            in_flight,
            ..WorkerReading::default()
        }
    }

    #[test]
    fn counters_never_fall_and_gone_workers_hold_no_episodes() {
        let mut loads = WorkerLoads::default();
        assert_eq!(loads.silent_s(1.0), None);
        loads.report("a", reading(2.0, 10, 3), 0.0);
        loads.report("b", reading(4.0, 5, 1), 1.0);
        let sum = loads.sum(1.0);
        assert_eq!(
            (sum.engine_busy_s, sum.sampled_tokens, sum.in_flight),
            (4.0, 15, 4)
        );
        // The second worker started again.
        loads.report("b", reading(1.0, 2, 2), 2.0);
        let sum = loads.sum(2.0);
        assert_eq!(
            (sum.engine_busy_s, sum.sampled_tokens, sum.in_flight),
            (4.5, 17, 5)
        );
        assert_eq!((loads.live(31.0), loads.sum(31.0).in_flight), (1, 2));
        assert_eq!(loads.sum(99.0).sampled_tokens, 17);
        assert_eq!(loads.silent_s(5.0), Some(3.0));
    }

    #[test]
    fn a_silence_with_episodes_is_named_once() {
        let mut loads = WorkerLoads::default();
        loads.report("busy", reading(0.0, 0, 2), 0.0);
        loads.report("idle", reading(0.0, 0, 0), 0.0);
        assert!(loads.newly_silent(2.0, 2.0).is_empty());
        assert_eq!(loads.newly_silent(2.0, 2.5), ["busy"]);
        assert!(loads.newly_silent(2.0, 9.0).is_empty());
        // It came back, and went again.
        loads.report("busy", reading(0.0, 0, 1), 10.0);
        assert_eq!(loads.newly_silent(2.0, 13.0), ["busy"]);
    }

    #[test]
    fn names_of_workers_are_bounded() {
        let mut loads = WorkerLoads::default();
        for n in 0..MAX_WORKERS + 10 {
            loads.report(&n.to_string(), WorkerReading::default(), n as f64 / 1e6);
        }
        assert_eq!(loads.workers.len(), MAX_WORKERS);
        assert!(!loads.workers.contains_key("0"));
    }
}
