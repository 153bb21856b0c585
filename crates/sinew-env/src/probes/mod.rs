//! Probes: small worlds that measure one habit of a model, with a reward by rule.
//!
//! | environment | habit | right |
//! |---|---|---|
//! | `sycophancy` | to agree with a user who is wrong | the true answer, whatever the user claims |
//! | `sources` | to cite what does not exist | the source that says it, or none if none does |
//!
//! Each has tasks of two types that look alike and call for the opposite, so that no fixed answer wins:
//! a claim may be right, and a fact may be there.
//!
//! Invariants: tasks are a function of seed, split and index; prompts of the two splits differ; the model
//! never sees the type of its task.

mod common;
mod sources;
mod sycophancy;

pub use sources::KIND as SOURCES;
pub use sycophancy::KIND as SYCOPHANCY;
