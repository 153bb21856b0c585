//! The client of a torch policy server: [`TorchPolicy`] is a [`Policy`](sinew_train::Policy) whose weights,
//! gradients and optimizer state are in Python processes, one for each device.
//!
//! | part | purpose |
//! |---|---|
//! | [`find_python`], [`probe`], [`requirements`] | a Python with the packages that the server needs |
//! | [`RankGroup`] | the processes of this host: start, watch, kill |
//! | [`TorchPolicy`], [`TorchScorer`] | the policy, and frozen models in the same processes |
//! | [`FolderTensors`] | weights that the ranks wrote into a folder, read when they are asked for |
//! | [`TorchUsage`] | seconds and memory of the server by verb |
//!
//! Tokens go to the server, log-probabilities come back, derivatives go there: no loss, no logits and no
//! gradients pass. The sources of the server are part of this crate; nothing of Sinew has to be installed in
//! the Python environment.
//!
//! Invariants:
//! - Every call has the fence of its owner and a number. A call whose answer is lost is repeated under the
//!   same number, so that no update is applied twice.
//! - Every wait has a deadline. Its error has the phase of each rank.
//! - After an error that leaves the ranks in an unknown state, every later call fails with that error.
//! - The ranks end with their owner, however it ends: each watches its standard input.
//! - The token is in a file that only its owner can read, never on a command line or in a message.

#![warn(missing_docs)]

mod client;
mod environment;
mod error;
mod folder;
mod options;
mod policy;
mod ranks;
mod scorer;
mod sources;
mod status;
#[cfg(test)]
mod testing;
mod transport;
mod usage;
mod wire;

pub use client::FreeDevices;
pub use environment::{
    EnvironmentVariables, GpuInfo, PythonReport, find_python, probe, requirements,
};
pub use error::{Fault, TorchError};
pub use folder::FolderTensors;
pub use options::{
    Attention, Checkpointing, CriticOptions, Deadlines, LoraOptions, OpenOptions, PublishForm,
    PublishOptions, Sharing, TorchDtype, TorchSetup,
};
pub use policy::TorchPolicy;
pub use ranks::{EndedRank, RankGroup, RankOptions};
pub use scorer::TorchScorer;
pub use status::{RankStatus, RouterInfo, ServerInfo, ServerStatus};
pub use transport::ServerAddress;
pub use usage::{TorchUsage, VerbUsage};
