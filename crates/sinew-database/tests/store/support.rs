//! The stores under test.

use crate::servers::PostgresServer;
pub(crate) use crate::traces::{id, score, trace};
use sinew_database::{Address, DatabaseOptions, Payloads, PostgresStore};
use sinew_store::TraceStore;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

thread_local! {
    /// The server of this test: it dies with its thread.
    static SERVER: PostgresServer = PostgresServer::start();
}

/// Long enough for any machine.
pub(crate) fn patient() -> DatabaseOptions {
    DatabaseOptions {
        patience: Duration::from_secs(300),
        first_patience: Duration::from_secs(300),
        ..DatabaseOptions::default()
    }
}

/// Address of this test's server.
pub(crate) fn url() -> String {
    SERVER.with(PostgresServer::url)
}

/// A store of a server.
pub(crate) fn open_at(url: &str, name: &str, payloads: Option<&str>) -> PostgresStore {
    let payloads = payloads.map(|url| Payloads::open(url).unwrap());
    PostgresStore::open(&Address::new(url, None).unwrap(), name, payloads, patient()).unwrap()
}

/// A name that no other store of this process has.
pub(crate) fn new_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("store-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Runs a check on each implementation.
pub(crate) fn on_each(check: impl Fn(&dyn TraceStore)) {
    check(&open_at(&url(), &new_name(), None));
    let folder = tempfile::tempdir().unwrap();
    let objects = format!("file://{}", folder.path().display());
    check(&open_at(&url(), &new_name(), Some(&objects)));
}
