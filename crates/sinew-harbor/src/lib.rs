//! Task folders in the format of Harbor: read, run, and verified after the agent.
//!
//! | part | files |
//! |---|---|
//! | the format | `manifest`, `keys`, `dockerfile`, `compose`, `template`, `trajectory`, `folder` |
//! | sets of tasks | `set`: trees, registries, kinds, splits, tasks that are left out |
//! | the place | `place`: a machine with a writable root, or a sandbox that stands in for one; `servers`: MCP |
//! | an episode | `progress` decides (pure); `stages`, `artifacts`, `verify` use the place; `env`, `shell` face the model |
//! | rewards | `rewards`: files, thresholds, steps |
//! | a check | `check`: the solution passes, doing nothing does not |
//!
//! Invariants:
//! - Tests and solution are in no place before the verifier, and no process of the agent runs beside it.
//! - A verifier without a readable reward leaves the episode unscored, with the reason, and never gives 0.
//! - A task that cannot run is left out with a typed reason and counted; a broken one is an error that names
//!   file and key.
//! - A variable of the host reaches a task only if the recipe names it.
//! - Every command has a deadline, and everything that is read from a place a bound.

#![warn(missing_docs)]

mod artifacts;
mod check;
mod compose;
mod config;
mod dockerfile;
mod env;
mod error;
mod folder;
mod keys;
mod manifest;
mod place;
mod progress;
mod rewards;
mod servers;
mod set;
mod shell;
mod stages;
mod template;
mod trajectory;
mod verify;

pub use check::{CheckRun, TaskCheck};
pub use compose::Service;
pub use config::{Harbor, KIND};
pub use dockerfile::{NotPlain, PlainCopy, PlainImage};
pub use env::HarborFactory;
pub use error::{HarborError, SkipReason, Skipped};
pub use folder::{Base, SeparateVerifier, Step, TASK_FILE, TaskFolder, Verifier};
pub use manifest::{
    AgentKeys, Artifact, Collect, EnvironmentKeys, HealthCheck, Manifest, McpKeys, Metadata,
    MinReward, NetworkPolicy, StepKeys, StepStrategy, VerifierKeys,
};
pub use set::{HarborTasks, HeldOutTasks, PlaceFacts, TaskKind, TasksConfig};
pub use template::PassedEnv;
