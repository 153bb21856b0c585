//! What carries the core's commands out.

mod held_out;
mod sync;

pub use sync::{Ended, Pipeline, run};
