//! The gateway over HTTP, with a fake engine behind it.

mod bad_input;
mod http;
mod sdk;
mod support;
