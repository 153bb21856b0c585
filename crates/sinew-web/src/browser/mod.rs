//! Chromium: its process, the DevTools protocol over its pipe, pages, and a pool of them.
//!
//! | part | what it is |
//! |---|---|
//! | `slots` | who gets which browser, when one is started, retired and replaced: a pure state machine |
//! | `pool` | carries that out; a page for one episode |
//! | `page` | a page in a context of its own: loads, looks, acts |
//! | `process` | one Chromium in namespaces of its own |
//! | `protocol` | requests, answers and events over the pipe |

mod page;
mod pool;
mod process;
mod protocol;
mod slots;

pub(crate) use page::{Page, PageFault, SharedSite};
pub(crate) use pool::{Lease, Pool, PoolConfig};

#[cfg(test)]
mod tests;
