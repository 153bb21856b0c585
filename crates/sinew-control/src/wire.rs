//! Bodies of calls and answers that are no words of their own.

use crate::role::{RoleId, RoleKind, RoleState, RoleView};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Header with the generation of the owner that a call belongs to.
pub(crate) const FENCE: &str = "sinew-fence";

/// The body of `PUT /roles/{kind}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScaleBody {
    /// Wanted count, absolute.
    pub(crate) count: u32,
    /// Only the plan is asked for.
    #[serde(default)]
    pub(crate) dry_run: bool,
}

/// The answer to `POST /roles?outside=true`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Added {
    pub(crate) id: RoleId,
}

/// A change of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleEvent {
    /// Number of the event, from 1.
    pub seq: u64,
    /// The owner's clock, since its start.
    pub at_ms: u64,
    /// The role.
    pub id: RoleId,
    /// Its new state.
    pub state: RoleState,
    /// Reason, where there is one: the first error of the role, a quarantine, an end.
    pub cause: Option<String>,
}

/// The answer to `GET /roles`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolesPage {
    /// Name of the run.
    pub run: String,
    /// Generation of the owner.
    pub fence: u64,
    /// Version of the weights that engines shall serve.
    pub wanted_version: Option<u64>,
    /// Wanted counts.
    pub wanted: BTreeMap<RoleKind, u32>,
    /// The run was asked to end.
    pub stopping: bool,
    /// All roles that are there, and for each place the last one that failed.
    pub roles: Vec<RoleView>,
    /// The last events, oldest first.
    pub events: Vec<RoleEvent>,
}
