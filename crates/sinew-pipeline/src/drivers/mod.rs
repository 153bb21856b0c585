//! What carries the core's commands out.

mod held_out;
mod sync;
#[cfg(test)]
mod tests;

pub use sync::{Ended, Pipeline, run};
