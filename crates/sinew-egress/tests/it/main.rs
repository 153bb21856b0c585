//! The proxy between raw clients and real servers, plain and TLS, on loopback.

mod attacks;
mod basics;
mod recordings;
mod world;
