//! Sandboxes put to the test: hostile programs that try to get out, and benches beside others.
//!
//! [`attack`] runs each case of a list inside and judges it from the host's side; [`mod@bench`]
//! measures a level beside what the same program takes without one, and beside other launchers;
//! [`leaks`] looks what is left of many.
//! Both drive any level through the port. Invariants: an attack is `held` only if its effect
//! did not happen, its ending is the precise one, a sibling is unharmed and nothing is left; a
//! bench row is measured in the same run as its peer, and a peer that could not run says why.

pub mod attack;
pub mod bench;
mod ends;
mod files;
mod host;
mod kernel;
pub mod leaks;
mod peers;
mod resource;
pub mod scale;
mod special;
mod state;
