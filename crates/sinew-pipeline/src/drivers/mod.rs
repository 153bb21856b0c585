//! Drivers that carry out the core's commands.

mod consumed;
mod disk;
mod end;
mod episodes;
mod groups;
mod held_out;
mod late;
mod learner_thread;
mod measurements;
mod overlap;
mod resumed;
mod sums;
mod sync;
#[cfg(test)]
mod tests;
mod waiting_groups;
mod waits;

pub use learner_thread::SharedLearner;
pub use sync::{Pipeline, run};
