//! Times of the calls between the owner of a run and workers of other processes.

use super::PlanError;
use super::check::number;
use serde::{Deserialize, Serialize};

/// `[hops]`: seconds that a run on workers takes longer than one of a single process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HopTimes {
    /// Seconds in which the owner puts the tickets of the episodes that begin together.
    pub put_s: f64,
    /// Seconds in which a worker gets tickets.
    pub lease_s: f64,
    /// Seconds in which a worker brings a trace.
    pub ack_s: f64,
    /// Seconds in which the owner checks and stores a trace; one comes after the other.
    pub take_s: f64,
    /// Seconds from the name of new weights until a worker samples with them.
    pub weights_s: f64,
}

impl HopTimes {
    /// Seconds until the world of an episode starts on its worker.
    pub(crate) fn until_worker_s(&self) -> f64 {
        self.put_s + self.lease_s
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        for (key, value) in [
            ("hops.put_s", self.put_s),
            ("hops.lease_s", self.lease_s),
            ("hops.ack_s", self.ack_s),
            ("hops.take_s", self.take_s),
            ("hops.weights_s", self.weights_s),
        ] {
            number(key, value, false)?;
        }
        Ok(())
    }
}
