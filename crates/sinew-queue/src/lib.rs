//! The queue of episodes between processes: over HTTP, with separate producers and scorers.
//!
//! [`sinew_store::queue`] has the queue itself. Here it gets a server and a client that is such a queue, too,
//! so that everything that works on one in this process works on one elsewhere.
//!
//! | file | what |
//! |---|---|
//! | `server` | [`QueueServer`]: bounded calls with a token, waits that take no thread; [`QueueRoutes`]: its routes |
//! | `client` | [`HttpQueue`]: the queue behind an address; lost answers are asked for again |
//! | `wire`, `replies` | calls as bytes; answers that may be asked for twice |
//! | `place` | [`open`]: a queue by the address of a server or a database, or its folder |
//! | `feed` | [`Feed`]: ended episodes as rows, a group at a time |
//! | `dead_letters` | rows that a person gives up on: [`bury`], [`listed`] |
//! | `scorer` | [`score_rows`]: rows without a reward get one |
//!
//! # Invariants
//!
//! - A call that a client repeats after a lost answer changes nothing twice, as long as the server runs.
//!   After a restart a put is a duplicate, an ack changes nothing, a lease comes back when it ends.
//! - Bodies, answers, waits, calls at a time and answers that are kept have limits.
//! - Leases follow only the server's clock.
//! - A row is scored once: a scorer whose lease ended cannot overwrite another one's score.

mod client;
mod dead_letters;
mod feed;
mod place;
mod replies;
mod scorer;
mod server;
mod wire;

pub use client::HttpQueue;
pub use dead_letters::{bury, listed};
pub use feed::{Feed, FeedOutcome};
pub use place::{Place, QUEUE_NAME, open};
pub use scorer::{Score, ScoreError, ScoredCounts, ScorerConfig, score_rows};
pub use server::{Clock, QueueRoutes, QueueServer, QueueServerConfig, system_clock};
pub use wire::{MAX_LEASE, MAX_PAGE, MAX_REQUEST};
