//! Environment `coq`: theorems of a generator, proved by scripts that Coq checks in a sandbox.
//!
//! | part | what it is |
//! |---|---|
//! | `statements` | theorems with gold proofs, by level |
//! | `tasks` | the taskset |
//! | `script` | what a script may say: sentences that are tactics |
//! | `check` | two runs of `coqc` in a sandbox, and what they prove |
//! | `config` | keys |
//! | `env` | one episode |
//!
//! A script cannot end its proof, state another theorem or print: it stands between the statement and `Qed`.
//! What counts is not what its own file says: a second file of ours states the theorem again, uses the
//! compiled proof for it, and asks for its assumptions, of which there must be none.
//!
//! Invariants:
//! - Every theorem has a gold proof that is right by construction.
//! - A theorem is in one split, whatever the seed of a run.
//! - A script that is not taken costs an attempt and never reaches Coq.

mod check;
mod config;
mod env;
mod script;
mod statements;
mod tasks;

pub use config::KIND;
pub use env::ProofFactory;
pub use tasks::ProofTasks;
