//! The gateway over HTTP, with a fake engine behind it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod adapters;
mod agent_tools;
mod agents;
mod bad_input;
mod call_ends;
mod clients;
mod dialects;
mod echo;
mod fields;
mod frameworks;
mod http;
mod items;
mod outcomes;
mod paths;
mod schemas;
mod scores;
mod sdk;
mod structured;
mod support;
mod thinking;
