//! The proxy between raw clients and servers, plain and TLS, on loopback.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod attacks;
mod basics;
mod leaks;
mod recordings;
mod world;
