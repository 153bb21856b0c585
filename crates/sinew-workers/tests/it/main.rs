//! Owner and workers in one process: the port of rollouts over a queue, weights and engines over a
//! socket.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod engines;
mod mirror;
mod rollouts;
