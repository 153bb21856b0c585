//! The desk: takes commands of tenants, makes them durable, and carries them out in order.

mod handle;
pub mod types;

pub use handle::Desk;
