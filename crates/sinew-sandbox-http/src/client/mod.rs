//! Sandboxes on other hosts: the [`sinew_sandbox::SandboxProvider`] port over the API of
//! `sinew serve --sandbox-only` (`docs/sandbox-http.md`), on one host or on many.
//!
//! Invariants:
//! - A sandbox that nothing holds any more is destroyed by its drop, or by the end of its lease where the
//!   request is lost: a client that is killed leaves nothing behind for longer than [`LEASE`].
//! - A request that changes something is sent once. Only the creation of a sandbox is repeated, while the
//!   server has no room or cannot be reached.
//! - A host that does not answer is put aside and asked again. Once it is lost, everything that waits for it
//!   ends with [`sinew_sandbox::SandboxError::HostLost`], a failure of the system.
//! - Protections are those that all servers report; the level never falls back to another one.

mod api;
mod choice;
mod hosts;
mod provider;
mod remote_sandbox;

pub use api::LEASE;
pub use hosts::Finder;
pub use provider::{RemoteConfig, RemoteProvider};
