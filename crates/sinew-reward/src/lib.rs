//! Rewards of a recipe: built-in rewards by name, Python functions, and weighted sums.
//!
//! A recipe names a reward as text, such as `exact(answer)`: [`RewardSpec`] parses it, [`named`] creates it.
//! Rewards of other kinds implement the same ports: [`Reward`](sinew_env::Reward) for one sample,
//! [`GroupReward`](sinew_env::GroupReward) for all samples of a task. [`WinRate`] makes a reward of a group
//! of comparisons of two. [`build`] makes all of a recipe's terms.
//!
//! [`RewardSum`] adds rewards of a sample with weights, and is a reward itself. [`GroupSum`] adds those of
//! groups; the two values together are the reward.
//!
//! Invariants:
//! - No score is never 0: a column that a task does not have, or an expected value of the wrong type, makes
//!   a sample [`Unscored`](sinew_env::Unscored). A wrong answer of the model is 0.
//! - Equal samples get equal scores. Rewards by name read no clock, no network and no randomness.
//! - A sum is unscored if one of its rewards with a weight is. A reward of weight 0 is a measurement, and
//!   its failure is counted but costs no score.

mod build;
mod equivalence;
mod kind;
mod named;
mod spec;
mod sum;
mod unit_tests;
mod win_rate;

pub use build::{
    BuildConfig, BuildError, BuiltReward, Rewards, TIMEOUT, TermSpec, WORKERS, build, has_deadline,
    is_function, needs_sandbox, needs_workers,
};
pub use named::{NAMES, check, named};
pub use spec::{Argument, RewardSpec, SpecError};
pub use sum::{GroupSum, RewardSum, Term};
pub use win_rate::{PAIRS, WinRate};
