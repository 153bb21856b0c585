//! The stores under test. Stores of other crates bring their own `support`.

pub(crate) use crate::traces::{id, score, trace};
use sinew_store::{DiskStore, MemoryStore, StoreOptions, TraceStore};

/// Runs a check on each implementation.
pub(crate) fn on_each(check: impl Fn(&dyn TraceStore)) {
    check(&MemoryStore::new(1 << 30));
    let directory = tempfile::tempdir().unwrap();
    for (name, options) in [
        ("packed", StoreOptions::default()),
        (
            "plain",
            StoreOptions {
                compress: false,
                segment_bytes: 2_000,
                ..StoreOptions::default()
            },
        ),
    ] {
        check(&DiskStore::open(&directory.path().join(name), options).unwrap());
    }
}
