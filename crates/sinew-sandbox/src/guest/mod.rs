//! The agent that is the first process of a container or a virtual machine, and its client.
//!
//! [`AGENT`] is one static program (`sinew-jail`). It runs programs inside the walls of the process level,
//! kills everything that they leave, and keeps files below `/work`; with a writable root, programs have users
//! of their image, and files are at any path. [`Guest`] drives it over any stream.
//! Invariants: the guest is hostile. Lengths are bounded, a frame that does not belong is refused, one that
//! never ends is cut by a deadline, and after either the connection is not used again. The end of a program
//! is the one that the agent got from the kernel, not one that the program wrote.

mod archive;
mod client;
mod frames;
mod program;

pub use archive::{ArchiveError, Entry, EntryKind, export, import, pack, unpack};
pub use client::{Count, Guest, Hello, Place, Setup};
pub use frames::{Ended, Outcome, Stream};
pub(crate) use program::checked;

/// The agent, for the architecture that this was compiled for; it is one under the name `agent`.
pub const AGENT: &[u8] = crate::JAIL;
