//! Seconds and memory of the server.

use std::collections::BTreeMap;

/// Calls of one verb.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VerbUsage {
    /// Answered calls.
    pub calls: u64,
    /// Seconds that the ranks computed.
    pub server_seconds: f64,
    /// Seconds from the first byte sent to the last byte of the answer.
    pub wall_seconds: f64,
}

/// Seconds and memory since the last look. The difference of the two times is the cost of the protocol.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TorchUsage {
    /// Seconds that the ranks computed, in all calls.
    pub server_seconds: f64,
    /// Seconds that all calls took.
    pub wall_seconds: f64,
    /// Most bytes that each rank had in use: of its device, or of its process on a CPU.
    pub peak_bytes: Vec<u64>,
    /// Calls by verb.
    pub verbs: BTreeMap<&'static str, VerbUsage>,
}

impl TorchUsage {
    /// Adds an answered call. `wall_seconds` include repetitions.
    pub(crate) fn add(
        &mut self,
        verb: &'static str,
        server_seconds: f64,
        wall_seconds: f64,
        peak_bytes: &[u64],
    ) {
        let own = self.verbs.entry(verb).or_default();
        own.calls += 1;
        own.server_seconds += server_seconds;
        own.wall_seconds += wall_seconds;
        self.server_seconds += server_seconds;
        self.wall_seconds += wall_seconds;
        let ranks = self.peak_bytes.len().max(peak_bytes.len());
        self.peak_bytes.resize(ranks, 0);
        for (peak, bytes) in self.peak_bytes.iter_mut().zip(peak_bytes) {
            *peak = (*peak).max(*bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_summed_and_peaks_are_the_largest() {
        let mut usage = TorchUsage::default();
        usage.add("forward", 1.0, 1.5, &[10, 20]);
        usage.add("forward", 2.0, 2.5, &[30, 5]);
        usage.add("apply", 1.0, 1.0, &[]);
        assert_eq!((usage.server_seconds, usage.wall_seconds), (4.0, 5.0));
        assert_eq!(usage.peak_bytes, [30, 20]);
        assert_eq!(usage.verbs["forward"].calls, 2);
    }
}
