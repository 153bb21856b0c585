//! Flipped bits and cut files, with the index and without it.

use crate::support::{id, trace};
use proptest::prelude::*;
use sinew_store::{
    CommitOutcome, DiskStore, EpisodeSummary, Filter, GcPolicy, StoreError, StoreOptions,
    TraceStore, TrainedBatch,
};
use std::fs;
use std::path::{Path, PathBuf};

fn options(accept_loss: bool) -> StoreOptions {
    StoreOptions {
        segment_bytes: 4_000,
        accept_loss,
        ..StoreOptions::default()
    }
}

fn open(directory: &Path) -> Result<DiskStore, StoreError> {
    DiskStore::open(directory, options(false))
}

fn accepting(directory: &Path) -> DiskStore {
    DiskStore::open(directory, options(true)).unwrap()
}

fn segments(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory.join("segments")).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

fn contents(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let read = |p: PathBuf| (p.clone(), fs::read(p).unwrap());
    segments(directory).into_iter().map(read).collect()
}

fn remove_index(directory: &Path) {
    for suffix in ["", "-wal", "-shm"] {
        // Only the first is always there.
        let _ = fs::remove_file(directory.join(format!("index.sqlite{suffix}")));
    }
}

fn flip(path: &Path, byte: usize, bit: u32) {
    let mut bytes = fs::read(path).unwrap();
    bytes[byte] ^= 1 << bit;
    fs::write(path, bytes).unwrap();
}

/// A frame: its file, where it begins and ends, and its episodes.
type Written = (PathBuf, usize, usize, Vec<u64>);

/// Commits batches of these sizes, of short and of long traces; where each lies.
fn write(directory: &Path, sizes: &[u64]) -> Vec<Written> {
    let store = open(directory).unwrap();
    let mut next = 0;
    let mut written = Vec::new();
    for &size in sizes {
        let ids: Vec<u64> = (next..next + size).collect();
        next += size;
        let before = contents(directory);
        let traces: Vec<_> = ids.iter().map(|&n| trace(n, 20 * n as usize)).collect();
        store.commit_batch(&traces).unwrap();
        let (path, bytes) = contents(directory).pop().unwrap();
        let begun = before.iter().find(|b| b.0 == path).map(|b| b.1.len());
        written.push((path, begun.unwrap_or(16), bytes.len(), ids));
    }
    written
}

fn assert_readable(store: &DiskStore, frames: &[&Written]) {
    for n in frames.iter().flat_map(|f| &f.3) {
        let expected = Some(trace(*n, 20 * *n as usize));
        assert_eq!(store.get(&id(*n)).unwrap(), expected, "{n}");
    }
}

#[test]
fn a_bad_frame_hides_nothing_behind_it_when_the_index_is_rebuilt() {
    let directory = tempfile::tempdir().unwrap();
    let frames = write(directory.path(), &[1, 2, 1, 3, 1, 1]);
    let (path, from, to, _) = &frames[1];
    remove_index(directory.path());
    for byte in [*from, *from + 5, *from + 9, *from + 13, *from + 20, *to - 1] {
        flip(path, byte, 3);
        let before = contents(directory.path());
        let refused = open(directory.path()).unwrap_err().to_string();
        let stretch = format!("bytes {from} to {to}");
        assert!(refused.contains(&stretch), "{byte}: {refused}");
        // Again, and nothing was touched.
        assert!(matches!(
            open(directory.path()),
            Err(StoreError::Damaged(_))
        ));
        assert_eq!(contents(directory.path()), before);
        let store = accepting(directory.path());
        assert_eq!(store.recovery().damaged.len(), 1);
        let others: Vec<&Written> = frames.iter().filter(|f| f.1 != *from).collect();
        assert_readable(&store, &others);
        // The whole records of the damaged frame stay readable, too.
        let own = [1, 2].map(|n| store.get(&id(n)).unwrap().is_some());
        assert!(own.iter().any(|there| *there), "{byte}: {own:?}");
        let missing = own.iter().position(|there| !there);
        if let Some(n) = missing {
            let n = n as u64 + 1;
            let again = store.commit(&trace(n, 20 * n as usize));
            assert_eq!(again.unwrap(), CommitOutcome::New);
        }
        drop(store);
        // Accepted once, it is not asked again, unless the index goes.
        let store = open(directory.path()).unwrap();
        assert_eq!(store.recovery(), &sinew_store::Recovery::default());
        drop(store);
        for (path, bytes) in &before {
            fs::write(path, bytes).unwrap();
        }
        flip(path, byte, 3);
        remove_index(directory.path());
    }
}

#[test]
fn a_flipped_bit_in_the_last_commit_is_no_torn_write() {
    for indexed in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let frames = write(directory.path(), &[1, 1, 2]);
        let (path, from, to, _) = frames.last().unwrap();
        flip(path, from + 30, 0);
        if !indexed {
            remove_index(directory.path());
        }
        // The index makes the last record decide: it is whole here.
        flip(path, to - 1, 0);
        let refused = open(directory.path());
        assert!(matches!(refused, Err(StoreError::Damaged(_))), "{indexed}");
        let store = accepting(directory.path());
        assert_eq!(
            fs::metadata(path).unwrap().len(),
            *to as u64,
            "nothing is cut off"
        );
        assert_eq!(store.recovery().cut_bytes, 0);
        let lost: &[_] = if indexed { &[id(2), id(3)] } else { &[] };
        assert_eq!(store.recovery().lost, lost);
        for n in 2..4 {
            assert_eq!(store.commit(&trace(n, 5)).unwrap(), CommitOutcome::New);
        }
        drop(store);
        let store = open(directory.path()).unwrap();
        assert_eq!(store.stats().unwrap().episodes, 4);
    }
}

#[test]
fn what_a_batch_trained_stays_trained_though_it_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    store.commit_batch(&[trace(0, 50), trace(1, 50)]).unwrap();
    let path = segments(directory.path()).pop().unwrap();
    let marked = fs::metadata(&path).unwrap().len() as usize;
    store
        .commit_update(&TrainedBatch::new("b0", 0, &[id(0)]), false)
        .unwrap();
    store.commit(&trace(2, 50)).unwrap();
    drop(store);
    flip(&path, 60, 1);
    flip(&path, marked + 34, 1);
    let store = accepting(directory.path());
    assert_eq!(store.recovery().lost_trained, [id(0)]);
    drop(store);
    // The mark was written again: it outlives the index.
    remove_index(directory.path());
    let store = accepting(directory.path());
    assert_eq!(store.trained_batches().unwrap()[0].episodes, [id(0)]);
    assert_eq!(
        store.commit(&trace(0, 50)).unwrap(),
        CommitOutcome::Duplicate
    );
    assert_eq!(store.get(&id(2)).unwrap(), Some(trace(2, 50)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever is flipped or cut, with the index or without it: frames that were not touched are read
    /// as they were written, and a store that is refused is left as it was.
    #[test]
    fn every_frame_that_was_not_touched_can_be_read(
        sizes in prop::collection::vec(1u64..4, 3..10),
        flips in prop::collection::vec((0.0f64..1.0, 0u32..8), 0..6),
        cut in prop::option::weighted(0.4, 0.0f64..1.0),
        with_index in any::<bool>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let frames = write(directory.path(), &sizes);
        let total: usize = contents(directory.path()).iter().map(|c| c.1.len()).sum();
        let place = |part: f64| {
            let mut at = (part * total as f64) as usize;
            for (path, bytes) in contents(directory.path()) {
                if at < bytes.len() {
                    return (path, at);
                }
                at -= bytes.len();
            }
            unreachable!("it lies in one of the files")
        };
        let mut touched: Vec<(PathBuf, usize, usize)> = Vec::new();
        for (part, bit) in flips {
            let (path, byte) = place(part);
            flip(&path, byte, bit);
            touched.push((path, byte, byte + 1));
        }
        if let Some(part) = cut {
            let (path, byte) = place(part);
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(byte as u64).unwrap();
            touched.push((path, byte, usize::MAX));
        }
        if !with_index {
            remove_index(directory.path());
        }
        let whole: Vec<&Written> = frames
            .iter()
            .filter(|(path, from, to, _)| {
                touched.iter().all(|(p, a, b)| p != path || a >= to || b <= from)
            })
            .collect();
        let before = contents(directory.path());
        match open(directory.path()) {
            Ok(store) => assert_readable(&store, &whole),
            Err(e) => {
                let refused = matches!(e, StoreError::Damaged(_) | StoreError::Format { .. });
                prop_assert!(refused, "{}", e);
                prop_assert_eq!(contents(directory.path()), before);
            }
        }
        let store = accepting(directory.path());
        assert_readable(&store, &whole);
        // Lost records can be committed again, and all of them are there then.
        for n in 0..sizes.iter().sum() {
            if store.get(&id(n)).unwrap().is_none() {
                let again = store.commit(&trace(n, 20 * n as usize)).unwrap();
                prop_assert_eq!(again, CommitOutcome::New);
            }
        }
        assert_readable(&store, &frames.iter().collect::<Vec<_>>());
        drop(store);
        let store = open(directory.path()).unwrap();
        assert_readable(&store, &frames.iter().collect::<Vec<_>>());
    }
}

#[test]
fn the_loss_of_a_file_that_ends_within_its_header_is_accepted_once() {
    for with_index in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let written = write(directory.path(), &[1; 12]);
        let files = contents(directory.path());
        assert!(files.len() > 1, "the cut file is not the newest");
        let path = &files[0].0;
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(9).unwrap();
        if !with_index {
            remove_index(directory.path());
        }
        open(directory.path()).unwrap_err();
        drop(accepting(directory.path()));
        let store = open(directory.path()).unwrap();
        let others: Vec<&Written> = written.iter().filter(|w| w.0 != *path).collect();
        assert_readable(&store, &others);
    }
}

#[test]
fn a_file_with_a_bad_header_that_is_cut_too_is_gone_on_with() {
    for bit in [0, 64, 65, 66] {
        for cut in [0.15, 0.5, 0.9074] {
            for sizes in [vec![1, 1, 1], vec![1; 12]] {
                let directory = tempfile::tempdir().unwrap();
                let written = write(directory.path(), &sizes);
                let (path, bytes) = contents(directory.path()).remove(0);
                flip(&path, bit / 8, (bit % 8) as u32);
                flip(&path, (bytes.len() as f64 * 0.371) as usize, 0);
                let length = (bytes.len() as f64 * cut) as u64;
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(length).unwrap();
                drop(accepting(directory.path()));
                let store = open(directory.path()).unwrap();
                let others: Vec<&Written> = written.iter().filter(|w| w.0 != path).collect();
                assert_readable(&store, &others);
            }
        }
    }
}

/// Content of an index, without the order of its rows.
fn view(store: &DiskStore) -> (Vec<EpisodeSummary>, Vec<TrainedBatch>) {
    let mut episodes = store.list(&Filter::default()).unwrap().episodes;
    for e in &mut episodes {
        e.cursor = Default::default();
    }
    episodes.sort_by(|a, b| a.episode.cmp(&b.episode));
    (episodes, store.trained_batches().unwrap())
}

#[test]
fn a_flipped_bit_in_the_index_is_noticed_and_the_index_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), &[3; 10]);
    let store = open(directory.path()).unwrap();
    store
        .commit_update(&TrainedBatch::new("b", 1, &[id(3), id(4), id(12)]), false)
        .unwrap();
    store
        .gc(GcPolicy {
            before_update: 2,
            keep_untrained: true,
        })
        .unwrap();
    let expected = view(&store);
    let gone = id(3);
    drop(store);
    let index = directory.path().join("index.sqlite");
    let good = fs::read(&index).unwrap();
    let (mut remade, mut refused) = (0, 0);
    // Every part of the file comes to be hit, the header of the first page more often.
    let strides = (0..100).step_by(3).chain((100..good.len()).step_by(211));
    for (n, byte) in strides.enumerate() {
        remove_index(directory.path());
        let mut bytes = good.clone();
        bytes[byte] ^= 1 << (n % 8);
        fs::write(&index, bytes).unwrap();
        match open(directory.path()) {
            Ok(store) => {
                assert_eq!(view(&store), expected, "byte {byte}");
                assert_eq!(
                    store.commit(&trace(3, 60)).unwrap(),
                    CommitOutcome::Duplicate
                );
                assert_eq!(store.get(&gone).unwrap(), None);
                remade += usize::from(store.recovery().index_remade.is_some());
            }
            // It may name another format.
            Err(_) => refused += 1,
        }
    }
    assert!(remade > 40, "{remade} made anew, {refused} refused");
    assert!(refused < 8, "{remade} made anew, {refused} refused");
}
