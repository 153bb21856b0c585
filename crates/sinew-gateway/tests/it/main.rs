//! The gateway over HTTP, with a fake engine behind it.
#![expect(
    clippy::unwrap_used,
    clippy::type_complexity,
    reason = "a test that cannot go on fails"
)]

mod agents;
mod bad_input;
mod dialects;
mod ends;
mod frameworks;
mod http;
mod outcomes;
mod sdk;
mod support;
