//! Drivers that carry out the core's commands.

mod consumed;
mod disk;
mod end;
mod groups;
mod held_out;
mod kept;
mod late;
mod measurements;
mod overlap;
mod shelf;
mod sync;
#[cfg(test)]
mod tests;
mod work;

pub use sync::{Pipeline, run};
pub use work::SharedLearner;
