//! Roles of a run on one host or several: who is there, what is wanted, how it is started and kept.
//!
//! | file | what |
//! |---|---|
//! | `role`, `wire` | the words between owner and roles |
//! | `registry` | [`Registry`]: pure; leases, states, wanted counts, quarantine |
//! | `server` | [`ControlDesk`]: the registry behind HTTP, with its clock |
//! | `client` | [`RoleClient`] of a role, [`OwnerClient`] of people and programs |
//!
//! # Invariants
//!
//! - The registry is soft state: after the owner's restart roles register again. Only wanted counts and fence
//!   outlive it.
//! - A call of another generation of owners is refused, in both directions.
//! - Leases follow the owner's clock only.
//! - A place has one incarnation at a time, and its number only grows.
//! - An engine whose weights are not the wanted ones is never `READY`.
//! - Roles, events, bodies, answers and waits have limits.

mod client;
mod error;
mod registry;
mod role;
mod server;
mod token;
mod wanted;
mod wire;

pub use client::{OwnerClient, RoleClient, client_options};
pub use error::ControlError;
pub use registry::{ControlLimits, Registry};
pub use role::{
    Heartbeat, Lease, MAX_CAUSE_BYTES, MAX_NAME_BYTES, Orders, Registration, RoleId, RoleKind,
    RoleState, RoleView, ScalePlan,
};
pub use server::ControlDesk;
pub use token::{MIN_TOKEN_BYTES, Token, token_in};
pub use wire::{RoleEvent, RolesPage};
