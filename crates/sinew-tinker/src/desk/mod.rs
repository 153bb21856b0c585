//! The desk: takes commands of tenants, makes them durable, and carries them out in order.
//!
//! ```text
//! Desk (any task) --job--> clerk (owns the journal) --order--> trainer  (one command at a time)
//!                            ^                     '--order--> flights  (requests at the engine)
//!                            '------------- results ------------'
//! ```
//!
//! | part | purpose |
//! |---|---|
//! | [`types`] | commands, results, refusals, and records that clients read |
//! | [`Desk`] | the handle for the HTTP side |
//! | `clerk`, `journal` | the thread with the SQLite file; calls share its commits |
//! | `schedule`, `share`, `quota` | what runs next, and what a tenant may: pure state machines |
//! | `trainer`, [`Residents`] | the thread that trains; several models on one base, or one place in turns |
//! | `flights` | the thread that samples, with adapters loaded on use |
//! | `folders` | checkpoints on disk |
//!
//! Invariants:
//! - The id of a command is returned once it is on the storage device, and so is its result.
//! - A command runs once, in the order of its model; the same command again has the same future.
//! - After a kill at any instant, each model is made again: its live checkpoint, then the commands after it.
//!   Results that were given stay as they were.
//! - What is kept is bounded: by limits of tenants, by age, and by bytes.

mod clerk;
mod codec;
mod config;
mod flight_orders;
mod flights;
mod folders;
mod handle;
mod journal;
mod mailbox;
mod orders;
mod paths;
mod prepared;
mod quota;
mod residents;
mod rules;
mod running;
mod sample_check;
mod schedule;
mod schema;
mod share;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod trainer;
pub mod types;

pub use clerk::WallClock;
pub use config::{DeskLimits, LimitError, TenantConfig, TenantLimits};
pub use flights::MakeEngine;
pub use handle::Desk;
pub use journal::OpenError;
pub use residents::{
    Embedded, EmbeddedConfig, Exported, LoraSupport, Residents, Switched, SwitchedConfig,
    TrainerSupport,
};
pub(crate) use running::now_ms;
pub use running::{DeskConfig, DeskParts, RunningDesk, wall_clock};
pub use trainer::MakeResidents;
