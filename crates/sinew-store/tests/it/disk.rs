//! Limits, damage, recovery.

use crate::support::{id, trace};
use proptest::prelude::*;
use sinew_store::{
    CommitOutcome, DiskStore, Filter, GcPolicy, MemoryStore, StoreError, StoreOptions, StoreReader,
    TraceStore, TrainedBatch,
};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

fn options() -> StoreOptions {
    StoreOptions {
        segment_bytes: 3_000,
        compress: false,
        ..StoreOptions::default()
    }
}

fn open(directory: &Path) -> DiskStore {
    DiskStore::open(directory, options()).unwrap()
}

fn segments(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory.join("segments")).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

fn remove_index(directory: &Path) {
    for suffix in ["", "-wal", "-shm"] {
        let path = directory.join(format!("index.sqlite{suffix}"));
        if path.exists() {
            fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn what_was_committed_is_there_after_reopening() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..3u64 {
        let store = open(directory.path());
        assert_eq!(store.recovery(), &sinew_store::Recovery::default());
        for n in round * 5..round * 5 + 5 {
            assert_eq!(store.commit(&trace(n, 60)).unwrap(), CommitOutcome::New);
        }
        store
            .commit_update(
                &TrainedBatch::new(&format!("b{round}"), round, &[id(round * 5)]),
                false,
            )
            .unwrap();
    }
    let store = open(directory.path());
    assert_eq!(store.stats().unwrap().episodes, 15);
    assert_eq!(store.trained_batches().unwrap().len(), 3);
    assert!(segments(directory.path()).len() > 3, "files are bounded");
    for n in 0..15 {
        assert_eq!(store.get(&id(n)).unwrap(), Some(trace(n, 60)));
    }
}

#[test]
fn a_second_process_is_kept_out() {
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path());
    let second = DiskStore::open(directory.path(), options());
    assert!(matches!(second, Err(StoreError::Locked { .. })));
    drop(first);
    open(directory.path());
}

#[test]
fn a_torn_tail_is_cut_off() {
    let directory = tempfile::tempdir().unwrap();
    open(directory.path()).commit(&trace(0, 10)).unwrap();
    let path = segments(directory.path()).pop().unwrap();
    let whole = fs::read(&path).unwrap();
    // A frame begins again but is cut short at every possible length.
    let frame = &whole[16..];
    for cut in [1, 15, 16, 17, frame.len() / 2, frame.len() - 1] {
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&frame[..cut]).unwrap();
        drop(file);
        let store = open(directory.path());
        assert_eq!(store.recovery().cut_bytes, cut as u64);
        assert_eq!(store.get(&id(0)).unwrap(), Some(trace(0, 10)));
        assert_eq!(fs::metadata(&path).unwrap().len(), whole.len() as u64);
    }
    let store = open(directory.path());
    store.commit(&trace(1, 10)).unwrap();
    assert_eq!(store.get(&id(1)).unwrap(), Some(trace(1, 10)));
}

/// A power cut loses data that the medium had confirmed: the index lists more than the file holds.
#[test]
fn a_tail_that_the_index_knows_is_torn_off_and_its_episodes_come_again() {
    for marked in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let store = DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        let reopen = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        store.commit(&trace(0, 10)).unwrap();
        store.commit(&trace(1, 10)).unwrap();
        store
            .commit_update(&TrainedBatch::new("b0", 0, &[id(0)]), false)
            .unwrap();
        let path = segments(directory.path()).pop().unwrap();
        let kept = fs::metadata(&path).unwrap().len();
        store.commit_batch(&[trace(2, 10), trace(3, 10)]).unwrap();
        if marked {
            store
                .commit_update(&TrainedBatch::new("b1", 1, &[id(1), id(2)]), false)
                .unwrap();
        }
        drop(store);
        let full = fs::metadata(&path).unwrap().len();
        let whole = fs::read(&path).unwrap();
        let old = fs::read(directory.path().join("index.sqlite")).unwrap();
        for cut in [kept, kept + 3, kept + 40, full - 1] {
            if marked && cut == full - 1 {
                // Only the mark is torn.
                continue;
            }
            remove_index(directory.path());
            fs::write(directory.path().join("index.sqlite"), &old).unwrap();
            fs::write(&path, &whole[..cut as usize]).unwrap();
            let store = reopen();
            let recovery = store.recovery();
            assert!(recovery.damaged.is_empty(), "{recovery:?}");
            let (torn, trained) = if marked {
                (vec![id(3)], vec![id(2)])
            } else {
                (vec![id(2), id(3)], vec![])
            };
            assert_eq!(recovery.torn, torn, "{cut}");
            assert_eq!(recovery.torn_trained, trained, "{cut}");
            assert_eq!(recovery.cut_bytes, cut - kept);
            assert_eq!(store.get(&id(1)).unwrap(), Some(trace(1, 10)));
            assert_eq!(store.get(&id(2)).unwrap(), None);
            // Untrained episodes are committed again; trained ones stay so.
            let again = store.commit_batch(&[trace(2, 10), trace(3, 10)]).unwrap();
            let second = if marked {
                CommitOutcome::Duplicate
            } else {
                CommitOutcome::New
            };
            assert_eq!(again, [second, CommitOutcome::New]);
            assert_eq!(
                store.trained_batches().unwrap().len(),
                1 + usize::from(marked)
            );
            drop(store);
            // Segments and index have the same content, also if the index is made anew.
            assert_eq!(reopen().recovery(), &sinew_store::Recovery::default());
            remove_index(directory.path());
            let store = reopen();
            assert_eq!(
                store.trained_batches().unwrap().len(),
                1 + usize::from(marked)
            );
            let twice = store.commit_update(&TrainedBatch::new("c", 9, &[id(0)]), false);
            assert!(matches!(twice, Err(StoreError::TrainedTwice { .. })));
            assert_eq!(store.get(&id(3)).unwrap(), Some(trace(3, 10)));
        }
    }
}

#[test]
fn a_mark_that_was_torn_alone_is_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 10)).unwrap();
    store
        .commit_update(&TrainedBatch::new("b0", 0, &[id(0)]), false)
        .unwrap();
    drop(store);
    let path = segments(directory.path()).pop().unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(fs::metadata(&path).unwrap().len() - 1)
        .unwrap();
    let store = open(directory.path());
    assert!(store.recovery().torn.is_empty() && store.recovery().torn_trained.is_empty());
    drop(store);
    remove_index(directory.path());
    let store = open(directory.path());
    assert_eq!(store.trained_batches().unwrap()[0].episodes, [id(0)]);
}

#[test]
fn blocks_of_zeros_at_the_end_are_a_torn_tail_but_damage_before_it_is_not() {
    for damaged_too in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        let mut ends = Vec::new();
        for n in 0..4 {
            store.commit(&trace(n, 10)).unwrap();
            let path = segments(directory.path()).pop().unwrap();
            ends.push(fs::metadata(&path).unwrap().len());
        }
        drop(store);
        let [path] = &segments(directory.path())[..] else {
            panic!("one file")
        };
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let zeros = vec![0; (ends[3] - ends[2]) as usize];
        file.write_all_at(&zeros, ends[2]).unwrap();
        if damaged_too {
            file.write_all_at(&[0xff; 4], ends[0] + 40).unwrap();
        }
        let accept_loss = damaged_too;
        if damaged_too {
            let refused = DiskStore::open(directory.path(), options());
            let refused = refused.unwrap_err().to_string();
            let stretch = format!("bytes {} to {}", ends[0], ends[1]);
            for needle in [
                ".seg",
                &stretch,
                "1 known episodes lie there: e1",
                "--accept-loss",
            ] {
                assert!(refused.contains(needle), "{needle}: {refused}");
            }
        }
        let options = StoreOptions {
            accept_loss,
            ..options()
        };
        let store = DiskStore::open(directory.path(), options).unwrap();
        assert_eq!(store.recovery().torn, [id(3)]);
        assert_eq!(store.get(&id(3)).unwrap(), None);
        assert_eq!(store.commit(&trace(3, 10)).unwrap(), CommitOutcome::New);
        let lost: &[_] = if damaged_too { &[id(1)] } else { &[] };
        assert_eq!(store.recovery().lost, lost);
        assert_eq!(store.get(&id(2)).unwrap(), Some(trace(2, 10)));
    }
}

#[test]
fn a_file_that_barely_began_is_begun_again() {
    let directory = tempfile::tempdir().unwrap();
    open(directory.path()).commit(&trace(0, 10)).unwrap();
    let next = directory.path().join("segments/00000001.seg");
    fs::write(next, b"SINE").unwrap();
    let store = open(directory.path());
    store.commit(&trace(1, 10)).unwrap();
    drop(store);
    let store = open(directory.path());
    assert_eq!(store.stats().unwrap().episodes, 2);
    assert_eq!(store.get(&id(1)).unwrap(), Some(trace(1, 10)));
}

#[test]
fn a_flipped_bit_is_found_and_hurts_one_episode() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 10)).unwrap();
    store.commit(&trace(1, 10)).unwrap();
    let path = segments(directory.path()).pop().unwrap();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 100).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 100).unwrap();
    let error = store.get(&id(0)).unwrap_err();
    assert!(error.to_string().contains("checksum"), "{error}");
    assert_eq!(store.get(&id(1)).unwrap(), Some(trace(1, 10)));
    drop(store);
    let store = open(directory.path());
    assert!(matches!(store.get(&id(0)), Err(StoreError::Corrupt { .. })));
    assert_eq!(store.commit(&trace(2, 10)).unwrap(), CommitOutcome::New);
}

#[test]
fn a_lost_file_is_reported_and_the_rest_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    for n in 0..12 {
        store.commit(&trace(n, 60)).unwrap();
    }
    drop(store);
    let files = segments(directory.path());
    fs::remove_file(&files[0]).unwrap();
    let file = OpenOptions::new().write(true).open(&files[1]).unwrap();
    file.set_len(200).unwrap();
    let refused = DiskStore::open(directory.path(), options());
    assert!(matches!(refused, Err(StoreError::Damaged(_))));
    let accepting = StoreOptions {
        accept_loss: true,
        ..options()
    };
    let store = DiskStore::open(directory.path(), accepting).unwrap();
    let mut damaged = store.recovery().damaged.clone();
    damaged.sort();
    let damaged: Vec<_> = damaged.into_iter().map(|d| d.path).collect();
    assert_eq!(damaged, files[..2]);
    assert!(store.recovery().lost.contains(&id(0)));
    assert_eq!(store.get(&id(0)).unwrap(), None);
    assert_eq!(store.get(&id(11)).unwrap(), Some(trace(11, 60)));
    drop(store);
    let store = open(directory.path());
    assert_eq!(store.recovery(), &sinew_store::Recovery::default());
    assert_eq!(store.commit(&trace(0, 60)).unwrap(), CommitOutcome::New);
    store.commit(&trace(12, 60)).unwrap();
}

#[test]
fn the_index_is_rebuilt_from_the_segments() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    for n in 0..20 {
        store.commit(&trace(n, 30)).unwrap();
    }
    let ids: Vec<_> = (0..12).map(id).collect();
    store
        .commit_update(&TrainedBatch::new("b", 3, &ids), false)
        .unwrap();
    // Moves marks and traces about, so that the mark can come before what it marks.
    let policy = GcPolicy {
        before_update: 4,
        keep_untrained: true,
    };
    store.gc(policy).unwrap();
    let before = (
        store.list(&Filter::default()).unwrap(),
        store.stats().unwrap(),
    );
    drop(store);
    remove_index(directory.path());
    let store = open(directory.path());
    assert!(store.recovery().indexed > 0);
    let after = (
        store.list(&Filter::default()).unwrap(),
        store.stats().unwrap(),
    );
    let ids = |page: &sinew_store::Page| {
        let mut ids: Vec<_> = page
            .episodes
            .iter()
            .map(|e| (e.episode.clone(), e.trained_in.clone(), e.update, e.draw))
            .collect();
        ids.sort();
        ids
    };
    assert_eq!(ids(&after.0), ids(&before.0));
    assert_eq!(after.1, before.1);
    assert_eq!(
        store.commit(&trace(3, 30)).unwrap(),
        CommitOutcome::Duplicate
    );
    let again = store.commit_update(&TrainedBatch::new("c", 4, &[id(3)]), false);
    assert!(matches!(again, Err(StoreError::TrainedTwice { .. })));
}

#[test]
fn an_index_that_lags_catches_up() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 30)).unwrap();
    drop(store);
    let index = directory.path().join("index.sqlite");
    let old = fs::read(&index).unwrap();
    let store = open(directory.path());
    for n in 1..9 {
        store.commit(&trace(n, 30)).unwrap();
    }
    store
        .commit_update(&TrainedBatch::new("b", 1, &[id(0), id(5)]), false)
        .unwrap();
    drop(store);
    remove_index(directory.path());
    fs::write(&index, old).unwrap();
    let store = open(directory.path());
    assert_eq!(store.recovery().indexed, 9);
    assert_eq!(store.stats().unwrap().episodes, 9);
    assert_eq!(store.trained_batches().unwrap()[0].episodes, [id(0), id(5)]);
}

#[test]
fn limits_are_typed_and_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let tight = StoreOptions {
        max_bytes: 4_000,
        ..options()
    };
    let store = DiskStore::open(&directory.path().join("a"), tight).unwrap();
    let mut committed = 0;
    let error = loop {
        match store.commit(&trace(committed, 30)) {
            Ok(_) => committed += 1,
            Err(e) => break e,
        }
    };
    assert!(matches!(error, StoreError::Full { limit: 4_000, .. }));
    assert!(committed > 0);
    assert_eq!(store.stats().unwrap().episodes, committed);
    assert_eq!(store.get(&id(committed)).unwrap(), None);
    let everything = GcPolicy {
        before_update: u64::MAX,
        keep_untrained: false,
    };
    store.gc(everything).unwrap();
    store.commit(&trace(committed, 30)).unwrap();

    let small = StoreOptions {
        max_trace_bytes: 100,
        ..options()
    };
    let store = DiskStore::open(&directory.path().join("b"), small).unwrap();
    let refused = store.commit(&trace(0, 300));
    assert!(matches!(refused, Err(StoreError::TooLarge { .. })));

    let memory = MemoryStore::new(1_000);
    let refused = memory.commit(&trace(0, 300));
    assert!(matches!(refused, Err(StoreError::Full { .. })));
    assert_eq!(memory.stats().unwrap().episodes, 0);
}

#[test]
fn other_formats_are_refused_and_left_as_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 30)).unwrap();
    drop(store);
    let refused = |format: i64| {
        let refused = DiskStore::open(directory.path(), options());
        assert!(
            matches!(refused, Err(StoreError::Format { actual, .. }) if actual == format),
            "{refused:?}"
        );
    };
    let index = directory.path().join("index.sqlite");
    let set = |format: i64| {
        let connection = rusqlite::Connection::open(&index).unwrap();
        connection
            .pragma_update(None, "user_version", format)
            .unwrap();
    };
    let own: i64 = rusqlite::Connection::open(&index)
        .unwrap()
        .query_row("PRAGMA user_version", [], |r| r.get(0))
        .unwrap();
    for other in [0, own - 1, own + 1, 99] {
        set(other);
        refused(other);
        let read = StoreReader::open(directory.path());
        assert!(matches!(read, Err(StoreError::Format { .. })), "{read:?}");
    }
    set(own);
    let segment = segments(directory.path()).remove(0);
    let good = fs::read(&segment).unwrap();
    for other in [good[8] - 1, good[8] + 1] {
        let mut bytes = good.clone();
        bytes[8] = other;
        fs::write(&segment, bytes).unwrap();
        refused(other.into());
    }
    fs::write(&segment, good).unwrap();
    assert_eq!(
        open(directory.path()).get(&id(0)).unwrap(),
        Some(trace(0, 30))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Wherever the newest file is cut, each batch is there whole or not at all, what is gone can be
    /// committed again unless it was trained, and no mark is lost.
    #[test]
    fn a_file_cut_anywhere_opens_with_whole_batches(
        sizes in prop::collection::vec(1u64..4, 1..6),
        marks in prop::collection::vec(any::<bool>(), 6),
        cut in 0.0f64..1.0,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let reopen = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        let store = reopen();
        let (mut next, mut batches, mut marked) = (0, Vec::new(), Vec::new());
        for (&size, &mark) in sizes.iter().zip(&marks) {
            let traces: Vec<_> = (next..next + size).map(|n| trace(n, 5)).collect();
            store.commit_batch(&traces).unwrap();
            if mark {
                store.commit_update(&TrainedBatch::new(&format!("b{next}"), next, &[id(next)]), false).unwrap();
                marked.push(next);
            }
            batches.push(next..next + size);
            next += size;
        }
        drop(store);
        let path = segments(directory.path()).pop().unwrap();
        let length = fs::metadata(&path).unwrap().len();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len((length as f64 * cut) as u64).unwrap();
        let store = reopen();
        let known = store.recovery().clone();
        prop_assert!(known.damaged.is_empty());
        for batch in batches {
            let there: Vec<bool> = batch.clone().map(|n| store.get(&id(n)).unwrap().is_some()).collect();
            prop_assert!(there.iter().all(|&t| t == there[0]), "{there:?}");
            for n in batch {
                let lost = known.torn.contains(&id(n));
                let lost_trained = known.torn_trained.contains(&id(n));
                prop_assert_eq!(lost || lost_trained, !there[0]);
                prop_assert_eq!(lost_trained, !there[0] && marked.contains(&n));
                let again = store.commit(&trace(n, 5)).unwrap();
                prop_assert_eq!(again == CommitOutcome::New, lost);
            }
        }
        prop_assert_eq!(store.trained_batches().unwrap().len(), marked.len());
        drop(store);
        let again = reopen();
        prop_assert_eq!(again.recovery(), &sinew_store::Recovery::default());
    }
}

/// An index that recovery has not filled would mean that there are no episodes.
#[test]
fn a_refused_store_is_left_without_an_index() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    for n in 0..12 {
        store.commit(&trace(n, 60)).unwrap();
    }
    drop(store);
    let first = segments(directory.path()).remove(0);
    let file = OpenOptions::new().write(true).open(first).unwrap();
    file.write_all_at(&[0xff; 40], 200).unwrap();
    for begun in [false, true] {
        remove_index(directory.path());
        if begun {
            // A program that was killed before it had written anything left this.
            fs::write(directory.path().join("index.sqlite"), "").unwrap();
        }
        for _ in 0..2 {
            let refused = DiskStore::open(directory.path(), options());
            assert!(matches!(refused, Err(StoreError::Damaged(_))));
            let read = StoreReader::open(directory.path());
            assert!(matches!(read, Err(StoreError::Missing { .. })), "{read:?}");
        }
    }
    let accepting = StoreOptions {
        accept_loss: true,
        ..options()
    };
    let store = DiskStore::open(directory.path(), accepting).unwrap();
    let reason = store.recovery().index_remade.as_deref();
    assert_eq!(reason, Some("it was empty"));
    drop(store);
    let reader = StoreReader::open(directory.path()).unwrap();
    assert!(!reader.list(&Filter::default()).unwrap().episodes.is_empty());
    let left = fs::read_dir(directory.path()).unwrap().flatten();
    let parts = left.filter(|f| f.file_name().to_string_lossy().contains(".part"));
    assert_eq!(parts.count(), 0);
}

#[test]
fn a_queue_without_a_byte_is_lost_and_not_empty() {
    let directory = tempfile::tempdir().unwrap();
    let limits = sinew_store::queue::QueueLimits::default();
    let open = |accept| {
        sinew_store::queue::DiskQueue::in_store(directory.path(), "q", limits, accept).map(drop)
    };
    open(false).unwrap();
    open(false).unwrap();
    let path = directory.path().join("queue/q.sqlite");
    fs::write(&path, "").unwrap();
    for _ in 0..2 {
        let lost = open(false).unwrap_err();
        assert!(matches!(lost, StoreError::LostQueue { .. }), "{lost}");
    }
    open(true).unwrap();
    open(false).unwrap();
}

/// Many threads wait for the same lock: each gets its own answer, and acknowledged data is on disk.
#[test]
fn commits_that_share_a_frame_have_their_own_answers() {
    let directory = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        max_trace_bytes: 4_000,
        ..StoreOptions::default()
    };
    let store = DiskStore::open(directory.path(), options).unwrap();
    let commit = |thread: u64| {
        let mut new = 0;
        for i in 0..30 {
            // Each episode is brought by three threads; every tenth is too large.
            let n = (i + thread / 3 * 100) + 1;
            let tokens = if n.is_multiple_of(10) { 5_000 } else { 40 };
            match store.commit(&trace(n, tokens)) {
                Ok(CommitOutcome::New) => new += 1,
                Ok(CommitOutcome::Duplicate) => {}
                Err(StoreError::TooLarge { episode, .. }) => {
                    assert_eq!((episode, n % 10), (id(n), 0));
                }
                Err(other) => panic!("{other}"),
            }
            let found = store.get(&id(n)).unwrap();
            assert_eq!(found.is_some(), !n.is_multiple_of(10));
        }
        new
    };
    let new: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..9).map(|t| scope.spawn(move || commit(t))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(new, 81);
    drop(store);
    let store = DiskStore::open(directory.path(), options).unwrap();
    assert_eq!(store.recovery(), &sinew_store::Recovery::default());
    assert_eq!(store.stats().unwrap().episodes, 81);
}
