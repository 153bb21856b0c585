//! Engines against servers that are well and servers that are not.

mod conformance;
mod evaluation;
mod failover;
mod faults;
mod mock;
mod real;
mod support;
mod weights;
