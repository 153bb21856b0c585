//! The `Env` trait, tasksets and the built-in environments.
//!
//! An environment simulates the world of one episode. It reads the model's output as text and responds with
//! messages. It does not depend on tokens, engines or rollouts.
//!
//! Invariants:
//! - An environment is used once, for one task, and is always closed at the end.
//! - All randomness of an environment comes from the task's seed.
//! - The train and held-out splits of a taskset share no problem.
//! - An error of the model is an observation. An error of the system is an [`EnvError`].

#![warn(missing_docs)]

pub mod chat;
pub mod counts;
mod machine;
pub mod math;
mod mixture;
mod port;
pub mod registry;
mod reward;
mod rewarded;
mod rng;
mod simulated_user;
mod taskset;
pub mod tiny;
pub mod turn;
mod user_message;

pub use machine::{ImageSource, MachineImage, MachineNetwork, MachineSpec, Machines};
pub use mixture::{MixtureFactory, MixtureTasks, member_of};
pub use port::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture,
    HostedProgram, McpServer, Observation, ProgramHost, ResetResult, StepResult, gold_run,
    validate,
};
pub use registry::{
    BUILT_IN, EnvConfig, EnvKind, IMAGE_COLUMN, KeyError, McpFacts, Needs, Registry, SandboxFacts,
    Sandboxes, TaskImage,
};
pub use reward::{
    GROUP_PENDING, GroupReward, Preference, Reward, RewardSample, Score, Unscored, waits_for_group,
    with_group,
};
pub use rewarded::{Rewarded, trial};
pub use rng::{Rng, hash64};
pub use simulated_user::{SimulatedUser, UserError};
pub use taskset::{NoTasks, Split, Taskset, TasksetError};
pub use user_message::UserMessageEnvs;
