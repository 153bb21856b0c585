//! Sources of training samples that a run does not sample by itself.
//!
//! Each one is a [`SampleSource`](sinew_pipeline::SampleSource): the loop asks it for the groups of a step,
//! stores their episodes, trains on them, and reports their commit to it.
//!
//! | source | gives |
//! |---|---|
//! | [`DatasetSource`] | rows of files, and episodes of another run's store |
//! | [`GoldSource`] | runs of the environment's own solutions |
//! | [`PoolSource`] | trajectories of outside systems, leased from a pool over HTTP |
//! | [`QueueSource`] | episodes that other processes put into a queue, leased by rows |
//! | [`LiveSource`] | rollouts that agents which run already finish at a gateway of the run |
//!
//! # Invariants
//!
//! - A step that is done again gets the same samples in the same order: leases of a step are noted before
//!   they are used.
//! - Rows of a queue are acked after the update that trained them was committed, never before. Entries of
//!   a pool are acknowledged once the run has stored them.
//! - A sample that the algorithm cannot use is left out with its reason.
//!
//! # Files
//!
//! | file | holds |
//! |---|---|
//! | `dataset` | demonstrations, pairs, and episodes of another run, all read at the start |
//! | `gold` | runs of the gold policy, played step by step |
//! | `pool_client`, `pool_source` | requests to a pool, and what a step leases of it |
//! | `queue_source`, `lease_renewal` | the same of a queue, and its rows until their update is committed |
//! | `intake` | rollouts of agents put together to groups, pure |
//! | `live_feed`, `live_source`, `live_late` | from the gateway to a step, with rewards that come later |
//! | `ledger` | what a step leased, written before it is used |

mod dataset;
mod gold;
mod intake;
mod lease_renewal;
mod ledger;
mod live_feed;
mod live_late;
mod live_source;
mod pool_client;
mod pool_source;
mod queue_source;

pub use dataset::{Dataset, DatasetConfig, DatasetSource, StoredEpisodes};
pub use gold::{GoldRuns, GoldSource, unused as unused_gold};
pub use intake::{FinishedRollout, Intake, IntakeBatch, IntakeConfig, MAX_WAITING};
pub use live_feed::{LIVE, LiveRollouts};
pub use live_source::LiveSource;
pub use pool_client::PoolClient;
pub use pool_source::{PoolSource, PoolSourceConfig};
pub use queue_source::{QueueSource, QueueSourceConfig};
