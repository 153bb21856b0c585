//! The words between an owner and its roles, as plain data.

use crate::error::ControlError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum bytes of a name, a host or an address.
pub const MAX_NAME_BYTES: usize = 253;

/// Maximum bytes of a cause; longer ones are cut.
pub const MAX_CAUSE_BYTES: usize = 4096;

/// Kind of work that a role does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoleKind {
    /// Runs episodes.
    Rollout,
    /// Generates tokens.
    Engine,
    /// Trains.
    Trainer,
    /// Hosts sandboxes.
    Sandbox,
    /// Scores episodes.
    Scorer,
}

impl RoleKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Rollout,
        Self::Engine,
        Self::Trainer,
        Self::Sandbox,
        Self::Scorer,
    ];

    /// The name in JSON, in recipes and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Engine => "engine",
            Self::Trainer => "trainer",
            Self::Sandbox => "sandbox",
            Self::Scorer => "scorer",
        }
    }

    /// Whether a role of this kind must have the wanted weights before it is ready.
    pub const fn has_weights(self) -> bool {
        matches!(self, Self::Engine)
    }
}

impl fmt::Display for RoleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RoleKind {
    type Err = ControlError;

    fn from_str(text: &str) -> Result<Self, ControlError> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| ControlError::Kind(text.chars().take(64).collect()))
    }
}

/// Name of a role: `RUN-ROLE-INDEX-INCARNATION`. The run may have hyphens, the other parts have none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RoleId(String);

impl RoleId {
    /// The name of an incarnation of a role.
    pub fn new(run: &str, kind: RoleKind, index: u32, incarnation: u32) -> Self {
        Self(format!("{run}-{kind}-{index}-{incarnation}"))
    }

    /// Reads a name: run, kind, index and incarnation. `None` for every other text.
    pub fn parse(text: &str) -> Option<(&str, RoleKind, u32, u32)> {
        let mut parts = text.rsplitn(4, '-');
        let incarnation = number(parts.next()?)?;
        let index = number(parts.next()?)?;
        let kind = parts.next()?.parse().ok()?;
        let run = parts.next().filter(|run| !run.is_empty())?;
        Some((run, kind, index, incarnation))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RoleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A number as [`RoleId::new`] writes it, so that a name has one form only.
fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// State of a role in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RoleState {
    /// Wanted, not asked of the launcher yet.
    Pending,
    /// Asked of the launcher; nothing of it was heard yet.
    Creating,
    /// Registered; no heartbeat yet.
    HealthChecking,
    /// It lives, and its weights are not the wanted ones.
    WeightSyncing,
    /// It may get work.
    Ready,
    /// It ends its work and takes no more.
    Draining,
    /// It left, ended, or its lease ended.
    Removed,
}

impl RoleState {
    /// Whether a role may change from this state to `next`.
    pub const fn may_become(self, next: Self) -> bool {
        use RoleState::{
            Creating, Draining, HealthChecking, Pending, Ready, Removed, WeightSyncing,
        };
        matches!(
            (self, next),
            (Pending, Creating | HealthChecking | Removed)
                | (Creating, HealthChecking | Draining | Removed)
                | (HealthChecking, WeightSyncing | Ready | Draining | Removed)
                | (WeightSyncing, Ready | HealthChecking | Draining | Removed)
                | (Ready, WeightSyncing | HealthChecking | Draining | Removed)
                | (Draining, Removed)
                // It registers again before a newer incarnation has its place.
                | (Removed, HealthChecking)
        )
    }

    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "PENDING",
            Self::Creating => "CREATING",
            Self::HealthChecking => "HEALTH_CHECKING",
            Self::WeightSyncing => "WEIGHT_SYNCING",
            Self::Ready => "READY",
            Self::Draining => "DRAINING",
            Self::Removed => "REMOVED",
        }
    }
}

impl fmt::Display for RoleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A role's own description, as it registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registration {
    /// Kind of its work.
    pub kind: RoleKind,
    /// The name that its launcher gave it, which becomes its id. Empty: the owner names it.
    pub name: String,
    /// Name of its host.
    pub host: String,
    /// Address at which other roles reach it, such as `http://10.0.0.7:8000`; `None`: at none.
    pub address: Option<String>,
    /// Version of its program.
    pub build: String,
    /// Work that it does at a time: episodes, requests, sandboxes; at least 1.
    pub capacity: u32,
    /// Its host may be taken away at short notice.
    pub preemptible: bool,
}

/// Permission to act as a role, until it is not renewed in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Id of the role.
    pub id: RoleId,
    /// Generation of the owner.
    pub fence: u64,
    /// Time after the last heartbeat at which the lease ends, by the owner's clock.
    pub lease_ms: u64,
    /// Interval of heartbeats.
    pub renew_ms: u64,
}

/// State that a role reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heartbeat {
    /// Version of the weights that it serves.
    pub version: Option<u64>,
    /// Checksum of these weights.
    pub checksum: Option<String>,
    /// Work in progress, out of its capacity.
    pub busy: u32,
    /// Work that waits.
    pub queued: u32,
    /// Seconds since it last had work.
    pub idle_s: f64,
    /// First error of the role.
    pub cause: Option<String>,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// Generation of the owner.
    pub fence: u64,
    /// It shall end its work, take no more, and leave.
    pub drain: bool,
    /// Version of the weights that it shall serve.
    pub wanted_version: Option<u64>,
}

/// A role as the owner sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleView {
    /// Id of the role.
    pub id: RoleId,
    /// Its own description; of a role that did not register yet only kind and name.
    pub registration: Registration,
    /// Its state.
    pub state: RoleState,
    /// Its last heartbeat.
    pub heartbeat: Heartbeat,
    /// Milliseconds since its last call, by the owner's clock.
    pub last_seen_ms: u64,
    /// First cause why it failed, is quarantined or was replaced.
    pub cause: Option<String>,
    /// The engine's reason why it waits for a place; `None`: it does not wait.
    pub waits: Option<String>,
    /// Its weights are not those that they claim to be: it gets no work.
    pub quarantined: bool,
}

/// The steps from the roles that are there to a wanted count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalePlan {
    /// Kind of the roles.
    pub kind: RoleKind,
    /// Wanted count until now.
    pub before: u32,
    /// Wanted count.
    pub count: u32,
    /// Roles that start.
    pub start: Vec<RoleId>,
    /// Roles that drain.
    pub drain: Vec<RoleId>,
    /// Nothing was changed, because only the plan was asked for.
    pub dry_run: bool,
}

impl ScalePlan {
    /// Whether nothing starts and nothing drains.
    pub fn is_met(&self) -> bool {
        self.start.is_empty() && self.drain.is_empty()
    }
}

/// Cuts a text at `limit` bytes, at the border of a character.
pub(crate) fn cut(text: &mut String, limit: usize) {
    if text.len() > limit {
        text.truncate(text.floor_char_boundary(limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_was_written() {
        let id = RoleId::new("my-run", RoleKind::Engine, 3, 12);
        assert_eq!(id.as_str(), "my-run-engine-3-12");
        let read = RoleId::parse(id.as_str());
        assert_eq!(read, Some(("my-run", RoleKind::Engine, 3, 12)));
        for wrong in [
            "",
            "engine-3-1",
            "-engine-3-1",
            "r-engine-03-1",
            "r-engine-3-+1",
            "r-x-3-1",
        ] {
            assert_eq!(RoleId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn words_are_the_documented_ones() {
        for kind in RoleKind::ALL {
            assert_eq!(kind.name().parse::<RoleKind>().unwrap(), kind);
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        let error = "engines".parse::<RoleKind>().unwrap_err().to_string();
        assert!(
            error.contains("engines") && error.contains("rollout"),
            "{error}"
        );
        let state = RoleState::WeightSyncing;
        assert_eq!(serde_json::to_value(state).unwrap(), state.name());
    }

    #[test]
    fn nothing_returns_from_its_end() {
        use RoleState::{Draining, Ready, Removed};
        assert!(!Removed.may_become(Ready) && !Draining.may_become(Ready));
        assert!(Draining.may_become(Removed) && Ready.may_become(Draining));
    }
}
