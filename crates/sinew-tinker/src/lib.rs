//! The protocol of the Tinker SDK, both ways: a service that the unchanged SDK trains and samples with, and a
//! client by which recipes train and sample on such a service.
//!
//! | part | purpose |
//! |---|---|
//! | [`types`] | datums, tensors and loss requests, independent of the wire |
//! | [`desk`] | takes commands of tenants, makes them durable, and carries them out in order |
//! | [`loss`] | the losses of the protocol, with their formulas and defaults |
//! | [`batch`] | datums and a loss to log-probabilities, metrics and gradients of a policy |
//! | [`wire`] | bodies of requests and answers, in protobuf and JSON |
//! | [`server`] | the service over HTTP, at the SDK's paths |
//! | [`client`] | training and sampling of recipes on such a service |
//! | [`TinkerError`] | reasons for refusals, each the caller's or the server's |
//!
//! Invariants: handles tokens, never text; does not depend on an algorithm's name; nothing that a caller asks
//! for is dropped silently; every refusal names the field, its value and what is allowed.

#![warn(missing_docs)]

pub mod batch;
pub mod client;
pub mod desk;
mod error;
pub mod loss;
mod random;
pub mod server;
pub mod types;
pub mod wire;

pub use batch::{BatchLimits, forward_backward};
pub use error::{Category, TinkerError};
pub use loss::Loss;
pub use types::{Datum, FbOutput, LossRequest, LossValue, Tensor, TensorValues};
