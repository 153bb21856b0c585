//! Stores and queues in servers that many processes use: PostgreSQL, Redis, and payloads in S3 or a folder.
//!
//! | file | purpose |
//! |---|---|
//! | `address` | [`Address`]: a server's address, with its password apart |
//! | `runtime` | async work for callers that block |
//! | `tls` | encrypted connections to PostgreSQL |
//! | `connection`, `schema` | [`DatabaseOptions`], calls that are repeated after a lost connection; tables |
//! | `postgres_store`, `about`, `episodes`, `listing`, `scores` | [`PostgresStore`]: traces in PostgreSQL |
//! | `payloads`, `media` | [`Payloads`]: the bytes of traces in S3 or a folder |
//! | `sweep` | deletes objects that no episode refers to |
//! | `postgres_log`, `redis_log` | logs of shared queues |
//! | `queue` | [`open_queue`]: a queue by its address |
//!
//! # Invariants
//!
//! - A call that returns is stored: PostgreSQL by its write-ahead log, Redis as its `appendfsync` says, S3 by
//!   an answered put.
//! - A call whose answer was lost is repeated, and takes effect once: the transaction of a call notes it.
//! - Writers of a store wait for one row of the database, so that the order of episodes is the order of
//!   commits, and the number of the newest owner is checked in the transaction that it allows.
//! - Leases follow the server's clock.
//! - A payload is stored before the row that refers to it, under a name made from its contents and an epoch.
//!   A crash between the two leaves bytes that nothing refers to, which a sweep deletes.
//! - Addresses in messages have no password. Connections beyond this host are encrypted, unless the address
//!   says `sslmode=disable`.

mod about;
mod address;
mod connection;
mod episodes;
mod listing;
mod media;
mod payloads;
mod postgres_log;
mod postgres_store;
mod queue;
mod redis_log;
mod runtime;
mod schema;
mod scores;
mod sweep;
mod tls;

pub use address::{Address, ServerKind};
pub use connection::DatabaseOptions;
pub use payloads::Payloads;
pub use postgres_store::PostgresStore;
pub use queue::open_queue;
