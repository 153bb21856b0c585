//! Web pages as environments: real Chromium over the DevTools protocol, its accessibility tree as
//! observation, actions by the numbers of elements.
//!
//! ```text
//! WebFactory, one episode: WebWorld        tools of the model, calls on a page       env
//!         |
//! Pool -> Browser -> Page                  processes, contexts, actions              browser/
//!         |  requests over the pipe
//! Site                                     what answers them, and scores             shop/, miniwob/
//! ```
//!
//! Invariants:
//! - A page reaches nothing but its site: requests come over the DevTools pipe, and the browser's network
//!   namespace has no interface that is up.
//! - An episode has a browser context of its own, which is new and is disposed of at its end.
//! - A site scores what it keeps; the model sees pages only. It cannot run scripts or change a page's clock.
//! - Browsers, pages, calls, requests that wait, bytes of messages and times are bounded.
//! - No process of a browser outlives its pool.

#![cfg_attr(
    not(feature = "browser"),
    expect(dead_code, reason = "only a browser asks a site")
)]

#[cfg(feature = "browser")]
mod browser;
#[cfg(feature = "browser")]
mod env;
mod keys;
mod kind;
mod miniwob;
mod plan;
#[cfg(feature = "browser")]
mod runtime;
mod shop;
mod site;
mod tree;

#[cfg(feature = "browser")]
pub use env::WebFactory;
pub use keys::{Web, WebTasks};
pub use kind::KIND;
pub use miniwob::FAMILIES;
