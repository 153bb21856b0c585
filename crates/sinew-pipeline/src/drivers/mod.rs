//! What carries the core's commands out.

mod groups;
mod held_out;
mod late;
mod measurements;
mod shelf;
mod sync;
#[cfg(test)]
mod tests;

pub use sync::{Ended, Pipeline, run};
