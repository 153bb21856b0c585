//! The gateway over HTTP, with a fake engine behind it.

mod agents;
mod bad_input;
mod dialects;
mod http;
mod sdk;
mod support;
