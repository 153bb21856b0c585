//! Rewards by name, and weighted sums of rewards.
//!
//! A recipe names a reward as text, such as `exact(answer)`: [`RewardSpec`] parses it, [`named`] creates it.
//! Rewards of other kinds (functions, servers) implement the same port, [`Reward`](sinew_env::Reward).
//! [`RewardSum`] adds several with weights, and is a reward itself.
//!
//! Invariants:
//! - No score is never 0: a column that a task does not have, or an expected value of the wrong type, makes
//!   a sample [`Unscored`](sinew_env::Unscored). A wrong answer of the model is 0.
//! - Equal samples get equal scores. Rewards read no clock, no network and no randomness.
//! - A sum is unscored if one of its rewards with a weight is. A reward of weight 0 is a measurement, and
//!   its failure is counted but costs no score.

mod named;
mod spec;
mod sum;
mod text;

pub use named::{NAMES, named};
pub use spec::{Argument, RewardSpec, SpecError};
pub use sum::{RewardSum, Term};
