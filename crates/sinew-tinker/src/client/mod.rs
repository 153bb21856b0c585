//! The client of a Tinker service: training and sampling of recipes on somebody else's machines.
//!
//! | part | purpose |
//! |---|---|
//! | [`TinkerPolicy`] | a [`Policy`](sinew_train::Policy) whose weights and moments are at the service |
//! | [`TinkerScorer`] | frozen models of the service: the reference of a KL term, teachers |
//! | [`TinkerBackend`] | samplers of the service as a server behind the router of `sinew-engines` |
//! | [`ServiceWeights`] | weights that have an address and no tensors, from the policy to the backend |
//! | [`ServiceState`] | the file of a checkpoint that names the state at the service |
//!
//! Tokens go to the service, log-probabilities come back, derivatives go there as weights of a
//! `cross_entropy`: every loss is computed here.
//!
//! Invariants:
//! - A command has a number in its model. A command whose answer is lost is sent again under its number, and
//!   the service carries it out once.
//! - Gradients are at the service only between the `forward_backward` and the `optim_step` of one update. If
//!   a part of an update may be there, no later command is sent.
//! - Every wait has a deadline. Its error has the last known state of the request.
//! - The key is in a header, never in a message or an address.
//!
//! Tests run against a scripted service in this process.

mod api;
mod backend;
mod error;
#[cfg(test)]
mod fake;
mod flat;
mod future;
mod http;
mod model;
mod options;
mod outputs;
mod policy;
mod scorer;
mod service;
mod session;
mod state;
#[cfg(test)]
mod testing;
mod trial;
mod tries;
mod weights;

pub use api::BaseModel;
pub use backend::{SamplerOptions, TinkerBackend};
pub use error::ClientError;
pub use options::{AdapterOptions, ServiceOptions, TinkerSetup};
pub use policy::TinkerPolicy;
pub use scorer::TinkerScorer;
pub use service::base_models;
pub use state::{STATE_FILE, ServiceState};
pub use trial::{Trial, try_service};
pub use weights::ServiceWeights;
