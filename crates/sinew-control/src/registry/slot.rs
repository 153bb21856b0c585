//! A place of the registry with the role in it, and the limits of all.

use crate::error::ControlError;
use crate::role::{Heartbeat, MAX_NAME_BYTES, Registration, RoleKind, RoleState};

/// Limits of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlLimits {
    /// Time after the last call at which a lease ends.
    pub lease_ms: u64,
    /// Interval of heartbeats.
    pub renew_ms: u64,
    /// Time that a role has to end its work, after which it is stopped.
    pub drain_ms: u64,
    /// Time from the launcher's start to the registration.
    pub start_ms: u64,
    /// Roles of one kind.
    pub roles: u32,
    /// Events that are kept.
    pub events: usize,
}

impl Default for ControlLimits {
    fn default() -> Self {
        Self {
            lease_ms: 30_000,
            renew_ms: 5_000,
            drain_ms: 600_000,
            start_ms: 900_000,
            roles: 1024,
            events: 256,
        }
    }
}

/// Index of a place, below [`ControlLimits::roles`], with its kind.
pub(crate) type Place = (RoleKind, u32);

/// Origin of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A launcher starts it.
    Launched,
    /// A person or another system started it; it sends heartbeats.
    Joined,
    /// A server that sends no heartbeats: the owner asks it.
    Outside,
}

/// A place and the role in it.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) incarnation: u32,
    pub(crate) origin: Origin,
    pub(crate) state: RoleState,
    pub(crate) registration: Registration,
    pub(crate) heartbeat: Heartbeat,
    /// Its last call; before the registration the change of its state.
    pub(crate) seen_ms: u64,
    /// The last change of its state.
    pub(crate) since_ms: u64,
    pub(crate) cause: Option<String>,
    /// Time since which its weights are not those that they claim to be.
    pub(crate) quarantined_ms: Option<u64>,
}

impl Slot {
    pub(crate) fn is_there(&self) -> bool {
        self.state != RoleState::Removed
    }

    /// Whether it holds a lease.
    pub(super) fn is_registered(&self) -> bool {
        use RoleState::{HealthChecking, Ready, WeightSyncing};
        let live = matches!(self.state, HealthChecking | WeightSyncing | Ready);
        live || (self.state == RoleState::Draining && !self.registration.host.is_empty())
    }
}

/// Refuses a registration with fields that are not allowed.
pub(super) fn checked(registration: &Registration) -> Result<(), ControlError> {
    let texts = [
        ("name", registration.name.as_str()),
        ("host", registration.host.as_str()),
        ("address", registration.address.as_deref().unwrap_or("")),
        ("build", registration.build.as_str()),
    ];
    for (field, text) in texts {
        if text.len() > MAX_NAME_BYTES || text.chars().any(char::is_control) {
            let allowed = format!("up to {MAX_NAME_BYTES} bytes without control characters");
            return Err(ControlError::field(field, text, allowed));
        }
    }
    if registration.host.is_empty() {
        return Err(ControlError::field(
            "host",
            "",
            "the name of the role's host",
        ));
    }
    if registration.capacity == 0 {
        return Err(ControlError::field("capacity", 0, "at least 1"));
    }
    Ok(())
}
