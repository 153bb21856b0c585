//! Environment `search`: questions over a local corpus, with tools to search, open and find, and an answer
//! whose citations are checked.
//!
//! | part | what it is |
//! |---|---|
//! | `index` | BM25 over pages in memory |
//! | `corpus` | pages: those of a file, or of a generator |
//! | `questions` | questions of one to three hops over generated pages |
//! | `config` | keys |
//! | `env` | one episode |
//!
//! Invariants:
//! - A page counts as opened once the model has seen a part of it; a search shows its beginning alone.
//! - Equal queries give equal results, in equal order.
//! - What is right is compared with the task; the model never sees it.

mod config;
mod corpus;
mod env;
mod index;
mod questions;

pub use config::KIND;
pub use corpus::{Corpus, CorpusPage};
pub use env::SearchFactory;
pub use questions::Questions;
