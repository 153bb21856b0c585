//! Engines against healthy servers and faulty ones.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::type_complexity,
    reason = "a test that cannot go on fails; what a test sends is bounded by the test"
)]

mod adapters;
mod chat;
mod conformance;
mod evaluation;
mod experts;
mod failover;
mod faults;
mod follow;
mod llama_cpp;
mod mock;
mod named;
mod prompts;
mod sleep;
mod support;
mod swaps;
mod weights;
