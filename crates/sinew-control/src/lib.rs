//! Roles of a run on one host or several: who is there, what is wanted, how it is started and kept.
//!
//! | file | what |
//! |---|---|
//! | `role`, `wire` | the words between owner and roles |
//! | `registry` | [`Registry`]: pure; leases, states, wanted counts, quarantine |
//! | `server` | [`ControlDesk`]: the registry behind HTTP, with its clock |
//! | `client` | [`RoleClient`] of a role, [`OwnerClient`] of people and programs |
//! | `supervisor`, `autoscale` | [`SupervisorCore`], [`Autoscaler`]: pure; what is started, ended and wanted |
//! | `launch` | [`Launcher`]: child processes, Slurm, Ray, Kubernetes, servers that run already |
//! | `driver` | [`Supervisor`]: the thread that carries out the decisions |
//! | `place`, `token`, `wanted` | files: the way to the owner, its token, the counts that outlive it |
//!
//! # Invariants
//!
//! - The registry is soft state: after the owner's restart roles register again. Only wanted counts and
//!   fence outlive it.
//! - A call of another generation of owners is refused, in both directions.
//! - Leases follow the owner's clock only.
//! - A place has one incarnation at a time, and its number only grows; a name that was started is never
//!   started again.
//! - An engine whose weights are not the wanted ones is never `READY`.
//! - Restarts are the supervisor's, with a bound; launchers restart nothing but the owner.
//! - Roles, events, bodies, answers and waits have limits.

mod autoscale;
mod client;
mod driver;
mod error;
mod launch;
mod place;
mod registry;
mod role;
mod server;
mod supervisor;
mod token;
mod wanted;
mod wire;

pub use autoscale::{AutoscaleInputs, AutoscaleLimits, Autoscaler};
pub use client::{OwnerClient, RoleClient, client_options};
pub use driver::{SpecOf, Supervisor, SupervisorParts, end_this_process};
pub use error::ControlError;
pub use launch::hosts::HostsLauncher;
pub use launch::kubernetes::{
    KUBERNETES_NAME_FILE, KUBERNETES_RECIPE_FILE, KUBERNETES_TOKEN_FILE, KubernetesAccess,
    KubernetesLauncher, KubernetesOptions,
};
pub use launch::local::LocalLauncher;
pub use launch::ray::RayLauncher;
pub use launch::slurm::{SLURM_TEMPLATE, SlurmLauncher, SlurmOptions};
pub use launch::{LaunchError, Launched, LaunchedRole, Launcher, RoleSpec, run_name};
pub use place::{CONTROL_FILE, ControlPlace};
pub use registry::{ControlLimits, Registry};
pub use role::{
    Heartbeat, Lease, MAX_CAUSE_BYTES, MAX_NAME_BYTES, Orders, Registration, RoleId, RoleKind,
    RoleState, RoleView, ScalePlan,
};
pub use server::ControlDesk;
pub use supervisor::{Step, SupervisorCore, SupervisorLimits};
pub use token::{MIN_TOKEN_BYTES, Token, token_in};
pub use wire::{RoleEvent, RolesPage};
