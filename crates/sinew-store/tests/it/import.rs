//! Scores from rows of files, into a store of this process and into one that another process writes.

use crate::support::{id, on_each, score, trace};
use proptest::prelude::*;
use sinew_store::{
    DiskStore, IMPORT_SOURCE, ImportReport, Inbox, Score, StoreError, StoreOptions, TraceStore,
    import_file, import_scores,
};
use std::io::Write;

fn import(store: &dyn TraceStore, text: &str, now_us: u64) -> ImportReport {
    import_scores(&mut text.as_bytes(), store, IMPORT_SOURCE, now_us).unwrap()
}

/// Episodes 0 to 3, of which 1 is ticket 7, and 2 and 3 share a name.
fn filled(store: &dyn TraceStore) {
    let named = |n: u64, name: Option<&str>| {
        let mut t = trace(n, 5);
        t.origin.external = name.map(str::to_owned);
        t
    };
    let names = [None, Some("ticket 7"), Some("twice"), Some("twice")];
    let traces: Vec<_> = (0..).zip(names).map(|(n, name)| named(n, name)).collect();
    store.commit_batch(&traces).unwrap();
}

#[test]
fn rows_are_taken_once_by_id_and_by_name() {
    on_each(|store| {
        filled(store);
        let text = concat!(
            "{\"episode\": \"e0\", \"name\": \"thumbs\", \"value\": 1}\n",
            "\n",
            "{\"external_id\": \"ticket 7\", \"name\": \"thumbs\", \"value\": null, \"reason\": \"closed\", ",
            "\"at\": 12.5, \"source\": \"desk\"}\n",
            "{\"episode\": \"e2\", \"name\": \"thumbs\", \"value\": -0.5, \"at\": 3}",
        );
        let first = import(store, text, 77);
        assert_eq!(
            (first.rows, first.new, first.known, first.refused),
            (3, 3, 0, 0)
        );
        assert_eq!(store.scores(&id(0)).unwrap(), [score(0, "thumbs", 77, 1.0)]);
        let closed = &store.scores(&id(1)).unwrap()[0];
        assert_eq!((closed.at_us, closed.source.as_str()), (12_500_000, "desk"));
        assert_eq!(closed.score, Score::Unscored("closed".into()));
        // Later, and all of it is known.
        let again = import(store, text, 99);
        assert_eq!((again.new, again.known, again.refused), (0, 3, 0));
        assert_eq!(store.scores(&id(0)).unwrap().len(), 1);
    });
}

#[test]
fn bad_rows_are_named_with_their_lines_and_hold_nothing_back() {
    on_each(|store| {
        filled(store);
        let long = "x".repeat(70_000);
        let rows = [
            "{\"episode\": \"e9\", \"name\": \"a\", \"value\": 1}",
            "{\"external_id\": \"twice\", \"name\": \"a\", \"value\": 1}",
            "{\"external_id\": \"nobody\", \"name\": \"a\", \"value\": 1}",
            "{\"episode\": \"e0\", \"external_id\": \"ticket 7\", \"name\": \"a\", \"value\": 1}",
            "{\"episode\": \"e0\", \"value\": 1}",
            "{\"episode\": \"e0\", \"name\": \"a\"}",
            "{\"episode\": \"e0\", \"name\": \"a\", \"value\": \"1\"}",
            "{\"episode\": \"e0\", \"name\": \"a\", \"value\": 1, \"at\": -1}",
            "{\"episode\": \"e0\", \"name\": \"a\", \"value\": 1, \"weight\": 1}",
            "[1]",
            &long,
            "{\"episode\": \"e0\", \"name\": \"\\u0007\", \"value\": 1}",
            "{\"episode\": \"e0\", \"name\": \"a\", \"value\": 1}",
        ];
        let report = import(store, &rows.join("\n"), 5);
        assert_eq!((report.rows, report.new, report.refused), (13, 1, 12));
        let lines: Vec<usize> = report.bad.iter().map(|b| b.line).collect();
        assert_eq!(lines, (1..=12).collect::<Vec<_>>());
        for (bad, part) in report.bad.iter().zip([
            "episode e9 is not in the store",
            "several episodes",
            "no episode has",
            "one of episode and external_id",
            "name is missing",
            "value is missing",
            "value is \"1\"",
            "at is -1",
            "unknown field \"weight\"",
            "not a JSON object",
            "longer than 65536 bytes",
            "name is",
        ]) {
            assert!(bad.why.contains(part), "line {}: {}", bad.line, bad.why);
        }
        assert_eq!(store.scores(&id(0)).unwrap().len(), 1);
    });
}

#[test]
fn a_store_that_another_process_writes_takes_scores_from_its_inbox() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rows.jsonl");
    let rows = "{\"episode\": \"e0\", \"name\": \"a\", \"value\": 1}\n{\"episode\": \"e9\", \
                \"name\": \"a\", \"value\": 1}\n";
    std::fs::write(&file, rows).unwrap();
    let folder = directory.path().join("store");
    let missing = import_file(&folder, &file, IMPORT_SOURCE, 1, false);
    assert!(matches!(missing, Err(StoreError::Missing { .. })));
    assert!(!folder.exists());
    let store = DiskStore::open(&folder, StoreOptions::default()).unwrap();
    filled(&store);
    let report = import_file(&folder, &file, IMPORT_SOURCE, 1, false).unwrap();
    assert_eq!((report.new, report.refused, report.queued), (1, 1, true));
    assert_eq!(store.scores(&id(0)).unwrap(), []);
    let inbox = Inbox::of_store(&folder);
    assert_eq!(inbox.take(&store).unwrap(), (1, Vec::new()));
    assert_eq!(store.scores(&id(0)).unwrap(), [score(0, "a", 1, 1.0)]);
    assert_eq!(inbox.take(&store).unwrap(), (0, Vec::new()));
    drop(store);
    // Nobody writes it: at once, and it is known.
    let report = import_file(&folder, &file, IMPORT_SOURCE, 9, false).unwrap();
    assert_eq!((report.known, report.queued), (1, false));
}

#[test]
fn a_file_of_the_inbox_that_cannot_be_read_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let store = DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
    filled(&store);
    let inbox = Inbox::of_store(directory.path());
    inbox
        .put(&[score(0, "a", 1, 1.0), score(1, "a", 1, 1.0)])
        .unwrap();
    let folder = directory.path().join("inbox");
    let path = std::fs::read_dir(&folder)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let mut file = std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap();
    file.write_all(b"{\"episode\": 3}\n").unwrap();
    let (new, bad) = inbox.take(&store).unwrap();
    assert_eq!((new, bad.len()), (2, 1));
    assert!(bad[0].ends_with("line 3"), "{bad:?}");
    assert!(path.with_extension("bad").exists());
    assert_eq!(inbox.take(&store).unwrap(), (0, Vec::new()));
}

#[test]
fn an_importer_knows_what_the_store_of_another_process_has() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("store");
    let store = DiskStore::open(&folder, StoreOptions::default()).unwrap();
    filled(&store);
    let file = directory.path().join("rows.jsonl");
    let row = |n: u64| {
        format!("{{\"episode\": \"e{n}\", \"name\": \"a\", \"value\": 1, \"at\": 1e-6}}\n")
    };
    std::fs::write(&file, row(0) + &row(9)).unwrap();
    let counts = || {
        let report = import_file(&folder, &file, IMPORT_SOURCE, 1, true).unwrap();
        (report.new, report.known, report.refused)
    };
    assert_eq!(counts(), (1, 0, 1));
    store.put_scores(&[score(0, "a", 1, 1.0)]).unwrap();
    assert_eq!(counts(), (0, 1, 1));
}

proptest! {
    /// Whatever the bytes are: each row is counted once, as new, known or refused.
    #[test]
    fn any_bytes_are_rows_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let store = sinew_store::MemoryStore::new(1 << 20);
        filled(&store);
        let report = import_scores(&mut bytes.as_slice(), &store, "s", 1).unwrap();
        prop_assert_eq!(report.new + report.known + report.refused, report.rows);
    }
}
