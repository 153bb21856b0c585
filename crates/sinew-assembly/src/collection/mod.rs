//! Episodes for their own sake: a teacher's runs, solutions of the environment, data to train on later.
//!
//! [`Collector`] decides only from events which episodes run; [`collect()`] carries that out with the ports
//! of the training loop. There are no steps: a group begins as soon as there is room for it, whatever the
//! others do.
//!
//! | file | what |
//! |---|---|
//! | `core` | the pure part: draws out, ends and scores of groups in |
//! | `driver` | the session: known episodes, ports, progress |
//! | `parts` | the parts of the training loop without its trainer |
//! | `gold` | the environment's gold policy behind the port of rollouts |
//! | `scored_groups` | which stored episodes it is done with |
//!
//! # Invariants
//!
//! - The set of episodes is a function of the recipe, its seed and their number. A resumed session runs those
//!   that the store lacks, and no other. A larger number begins with the same episodes.
//! - An episode counts once it is durable.
//! - The number of groups in memory is bounded by the room, whatever the number of episodes.

mod core;
mod driver;
mod gold;
mod parts;
mod scored_groups;

pub use core::{CollectConfig, Collector, KnownEpisode};
pub use driver::{Collection, CollectionEnd, collect};
pub use gold::GoldRollouts;
pub(crate) use parts::sampler;
pub use parts::{CollectOptions, check_collect, collection};
pub use scored_groups::ScoredGroups;
