//! The suite of every store on PostgreSQL, with payloads in the database and in a folder; crashes of the
//! server, lost connections, several processes, and payloads in S3.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../../../sinew-store/tests/it/calls.rs"]
mod calls;
#[path = "../../../sinew-store/tests/it/conformance.rs"]
mod conformance;
mod crash;
#[path = "../../../sinew-store/tests/it/expire.rs"]
mod expire;
mod model;
#[path = "../../../sinew-store/tests/it/owners.rs"]
mod owners;
mod payloads;
mod proxy;
#[path = "../../../sinew-store/tests/it/scores.rs"]
mod scores;
#[expect(dead_code, reason = "the other suite uses the rest")]
#[path = "../servers/mod.rs"]
mod servers;
mod several;
mod support;
#[path = "../../../sinew-store/tests/it/traces.rs"]
mod traces;
