//! The port to the registry of roles: a worker is there while it is renewed.

use std::time::Duration;

/// State that a worker reports as a role.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerStatus {
    /// Version of the weights that its engine samples with.
    pub version: Option<u64>,
    /// Hash of the manifest of these weights, where the worker has them itself.
    pub checksum: Option<String>,
    /// Running episodes.
    pub busy: u32,
    /// Leased tickets whose episodes have not started.
    pub queued: u32,
    /// Seconds since it last had an episode.
    pub idle_s: f64,
    /// First error of the worker.
    pub cause: Option<String>,
}

/// Wishes of the registry to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PresenceOrder {
    /// It works on.
    Work,
    /// It ends its episodes, takes no more, and leaves.
    Drain,
}

/// Registration of a worker. Calls may block for seconds.
pub trait Presence: Send {
    /// Interval of renewals.
    fn every(&self) -> Duration;

    /// Renews the registration; one that ended is made anew. An owner that does not answer changes nothing:
    /// the tickets of a worker have their own leases.
    fn beat(&mut self, status: &WorkerStatus) -> PresenceOrder;

    /// Reports that the worker takes no more work.
    fn drain(&mut self);

    /// Ends the registration.
    fn leave(&mut self);
}
