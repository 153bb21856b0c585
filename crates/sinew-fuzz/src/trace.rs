//! Traces and the store that keeps them.
//!
//! Traces come from other systems through the data pool. Segment files come from
//! disks that lost power.

use sinew_store::{DiskStore, Filter, StoreOptions, TraceStore};
use sinew_types::Trace;

/// Fields of traces.
pub(crate) const WORDS: &[&str] = &[
    "\"nodes\"",
    "\"tokens\"",
    "\"parent\"",
    "\"kind\"",
    "\"sampled\"",
    "\"logprobs\"",
    "\"format_version\"",
    "\"origin\"",
    "null",
    "[]",
    "-1",
    "1e999",
    "18446744073709551615",
];

/// A trace as JSON, or after an `M` as MessagePack.
///
/// - Reading and checking refuse with an error.
/// - Every leaf of a valid trace has a path to it, with no more sampled tokens than the trace.
/// - A valid trace is written and read again as the same trace, to the byte.
pub(crate) fn trace(data: &[u8]) {
    let read: Result<Trace, String> = match data.first() {
        Some(b'M') => rmp_serde::from_slice(&data[1..]).map_err(|e| e.to_string()),
        _ => serde_json::from_slice(data).map_err(|e| e.to_string()),
    };
    let Ok(trace) = read else { return };
    if trace.validate().is_err() {
        return;
    }
    for leaf in trace.leaves() {
        let path = trace.path(leaf);
        assert!(path.len() <= trace.nodes.len() && path.last() == Some(&leaf));
        let tokens = trace.path_tokens(leaf);
        let sampled = tokens.iter().filter(|t| t.logprob.is_some()).count();
        assert!(sampled <= trace.sampled_tokens());
    }
    let _ = (trace.total_reward(), trace.score(), trace.oldest_version());
    let packed = rmp_serde::to_vec_named(&trace).expect("a valid trace is written");
    let again: Trace = rmp_serde::from_slice(&packed).expect("and is read again");
    let once_more = rmp_serde::to_vec_named(&again).expect("a valid trace is written");
    assert_eq!(once_more, packed, "a trace changes when it is kept");
}

/// A segment file of a store, damaged in any way, opened with permission to forget what cannot be read.
///
/// - Opening keeps what is sound and reports the rest.
/// - Every trace of the index can be read.
/// - A store that was opened once is the same when it is opened again.
pub(crate) fn store(data: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let segments = folder.path().join("segments");
    std::fs::create_dir(&segments).expect("a folder");
    std::fs::write(segments.join("00000000.seg"), data).expect("a file");
    let options = StoreOptions {
        accept_loss: true,
        ..StoreOptions::default()
    };
    let read = || {
        let store = DiskStore::open(folder.path(), options).ok()?;
        let page = store.list(&Filter::default()).expect("a list");
        let ids = page.episodes.into_iter().map(|e| e.episode);
        let found: Vec<_> = ids
            .map(|id| store.get(&id).map(|t| (id, t.is_some())))
            .collect();
        Some(
            found
                .into_iter()
                .map(|r| r.expect("an indexed trace"))
                .collect::<Vec<_>>(),
        )
    };
    let first = read();
    assert_eq!(read(), first, "a store that was opened has changed");
}
