//! Rollouts on other hosts: the owner of a run issues tickets, workers run their episodes with weights that
//! follow the owner's.
//!
//! | file | side | what |
//! |---|---|---|
//! | `ticket` | both | [`Ticket`]: an episode as plain data in a row of the queue |
//! | `terms` | both | facts of the run, reports and orders as plain data |
//! | `core` | owner | [`TicketCore`]: which tickets wait, are out, or were taken back; pure |
//! | `rollouts` | owner | [`RemoteRollouts`]: the port of rollouts over the queue |
//! | `desk`, `loads` | owner | [`Desk`]: facts, orders and weights over HTTP; counters of all workers |
//! | `listener` | owner | [`OwnerListener`]: one address for tickets, desk and the registry of roles |
//! | `live`, `owner_traces` | both | rollouts of agents at the gateways of workers |
//! | `weights` | owner | publishes versions and names them at the desk |
//! | `client` | worker | [`DeskClient`] |
//! | `engine_routes` | engine | an engine of the run behind two routes, for the workers of the run |
//! | `finder` | worker | engines of the registry, and the weights that they may sample with |
//! | `mirror`, `follow` | worker | weights of a host: fetched once, verified, loaded between two tokens |
//! | `worker`, `control` | worker | [`work`]: leases, episodes and acks; a thread for reports and renewals |
//! | `presence` | worker | port to the registry of roles |
//!
//! # Invariants
//!
//! - A started episode is given to the loop once, after it is durable in the owner's store. A trace that
//!   comes twice, late, or from an older owner changes nothing.
//! - No token is sampled for a ticket with weights older than it allows, or of another lineage.
//! - Weights are loaded once the checksum of each tensor is right; no worker is waited for when they are
//!   published.
//! - Tickets that are out, traces that wait, parts of files and reports have limits; waits have deadlines.
//!
//! Nothing here decides which episodes run, how old they may be, or what is trained.

mod client;
mod control;
mod core;
mod desk;
mod engine_routes;
mod finder;
mod follow;
mod listener;
mod live;
mod loads;
mod mirror;
mod owner_traces;
mod presence;
mod rollouts;
#[cfg(test)]
mod samples;
mod terms;
mod ticket;
mod weights;
mod worker;
mod worker_weights;

pub use client::{DeskClient, DeskError, FilePart};
pub use core::{MAX_REFUSALS, TicketCore};
pub use desk::Desk;
pub use engine_routes::EngineRoutes;
pub use finder::{DirectoryError, EngineDirectory, EngineFinder, FinderParts};
pub use follow::{
    FirstWeights, FollowParts, Following, Loaded, ServiceWeights, WeightsOrigin, at_service,
    first_mark, first_weights,
};
pub use listener::{ListenerParts, OwnerListener};
pub use live::{LiveAgents, LiveInbox};
pub use mirror::{MirrorError, WeightsMirror};
pub use owner_traces::OwnerTraces;
pub use presence::{Presence, PresenceOrder, WorkerStatus};
pub use rollouts::{RemoteParts, RemoteRollouts};
pub use terms::{OtherPart, PublishedMark, RunTerms, TicketOrders, WorkerReading, WorkerReport};
pub use ticket::{OWNER, ROLLOUT, Ticket, TicketFault, owner_consumer, rollout_consumer};
pub use weights::{AnnouncedWeights, ServedWeights};
pub use worker::{WorkerCounts, WorkerEnd, WorkerError, WorkerParts, work};
pub use worker_weights::WorkerWeights;
