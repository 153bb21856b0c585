//! Owner and workers in one process: the port of rollouts over a queue; weights, engines and rollouts of
//! agents over sockets.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod engines;
mod live;
mod mirror;
mod rollouts;
