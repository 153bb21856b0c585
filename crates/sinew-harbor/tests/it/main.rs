//! Task folders: what is read, what is left out, and how an episode uses its place.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod episode;
mod fake;
mod folders;
mod manifest;
