//! Times of calls between the processes of a run: owner, workers, queue of tickets.

use serde::{Deserialize, Serialize};

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hop {
    /// Number of calls.
    pub calls: u64,
    /// Tickets, traces or versions that they carried.
    pub items: u64,
    /// Seconds until their answers, added up.
    pub total_s: f64,
}

impl Hop {
    /// Adds a call that carried `items`.
    pub fn call(&mut self, items: usize, seconds: f64) {
        self.calls += 1;
        self.items += items as u64;
        self.total_s += seconds;
    }

    /// Mean seconds of a call; `None` without one.
    pub fn mean_s(&self) -> Option<f64> {
        (self.calls > 0).then(|| self.total_s / self.calls as f64)
    }

    fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.items += other.items;
        self.total_s += other.total_s;
    }

    /// The difference to earlier counters of the same process, or all of them if it started again since.
    fn since(&self, before: &Self) -> Self {
        if self.calls < before.calls {
            return *self;
        }
        Self {
            calls: self.calls - before.calls,
            items: self.items.saturating_sub(before.items),
            total_s: (self.total_s - before.total_s).max(0.0),
        }
    }
}

/// Calls between the processes of a run, by kind; none in a run of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hops {
    /// The owner puts tickets into its queue.
    pub put: Hop,
    /// A worker asks the owner for tickets, and gets some.
    pub lease: Hop,
    /// A worker brings traces.
    pub ack: Hop,
    /// The owner checks traces that came, stores them, and removes their tickets.
    pub take: Hop,
    /// A worker reports, and hears orders.
    pub report: Hop,
    /// A worker has heard of new weights; it fetches, verifies and loads them.
    pub weights: Hop,
}

impl Hops {
    /// Whether there was no call.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The kinds with their names.
    pub fn rows(&self) -> [(&'static str, Hop); 6] {
        [
            ("put", self.put),
            ("lease", self.lease),
            ("ack", self.ack),
            ("take", self.take),
            ("report", self.report),
            ("weights", self.weights),
        ]
    }

    /// Adds other counters.
    pub fn add(&mut self, other: &Self) {
        self.put.add(&other.put);
        self.lease.add(&other.lease);
        self.ack.add(&other.ack);
        self.take.add(&other.take);
        self.report.add(&other.report);
        self.weights.add(&other.weights);
    }

    /// The difference to the counters `before`; a kind whose counters fell began at 0 again.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            put: self.put.since(&before.put),
            lease: self.lease.since(&before.lease),
            ack: self.ack.since(&before.ack),
            take: self.take.since(&before.take),
            report: self.report.since(&before.report),
            weights: self.weights.since(&before.weights),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_add_up_and_counters_may_begin_again() {
        let mut now = Hops::default();
        assert!(now.is_empty() && now.ack.mean_s().is_none());
        now.ack.call(3, 0.25);
        let before = now;
        now.ack.call(1, 0.75);
        now.lease.call(8, 0.5);
        let grew = now.since(&before);
        assert_eq!(
            (grew.ack.calls, grew.ack.items, grew.ack.total_s),
            (1, 1, 0.75)
        );
        assert_eq!(grew.lease.mean_s(), Some(0.5));
        let mut sum = before;
        sum.add(&grew);
        assert_eq!(sum, now);
        // The process started again.
        let mut again = Hops::default();
        again.ack.call(2, 0.1);
        assert_eq!(again.since(&now).ack, again.ack);
        assert_eq!(sum.rows().map(|(name, _)| name)[2], "ack");
    }
}
