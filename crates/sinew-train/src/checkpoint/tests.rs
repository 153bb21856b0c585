use super::*;
use sinew_types::{TensorList, TensorSource};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

fn parts(value: f32) -> (Vec<f32>, Vec<u8>) {
    (
        (0..2000).map(|i| value + i as f32).collect(),
        format!("{{\"step\":{value}}}").into_bytes(),
    )
}

fn save(store: &CheckpointStore, step: u64) -> Result<PathBuf, CheckpointError> {
    let (data, bytes) = parts(step as f32);
    let view = sinew_types::TensorView::f32(&[2, 1000], &data).unwrap();
    store.save(
        step,
        &[
            Part::Bytes {
                file: "state.json".into(),
                bytes,
            },
            Part::Tensors {
                file: "model.safetensors".into(),
                tensors: Box::new(TensorList(vec![("w".into(), view)])),
            },
        ],
    )
}

/// Loads and checks that all files are of one and the same step.
fn load_step(store: &CheckpointStore) -> Option<(u64, Vec<SkippedCheckpoint>)> {
    let loaded = store.load().unwrap()?;
    let tensors = loaded.tensors("model.safetensors").unwrap();
    let view = tensors.tensor("w").unwrap();
    assert_eq!(view.shape(), [2, 1000]);
    let data = view.into_f32();
    let step = data[0];
    assert_eq!(*data, parts(step).0);
    assert_eq!(loaded.bytes("state.json").unwrap(), parts(step).1);
    Some((step as u64, loaded.skipped))
}

#[test]
fn the_newest_is_loaded_and_the_oldest_go() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path().join("a/b"), 2).unwrap();
    assert_eq!(store.load().unwrap(), None);
    for step in [3, 6, 9, 100_000_000_000] {
        save(&store, step).unwrap();
    }
    assert_eq!(
        load_step(&store),
        Some((100_000_000_000u64 as f32 as u64, vec![]))
    );
    assert_eq!(store.names().unwrap().len(), 2);
}

#[test]
fn a_step_saved_again_replaces_only_once_committed() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    let first = save(&store, 3).unwrap();
    let second = save(&store, 3).unwrap();
    assert_ne!(first, second);
    assert!(!first.exists());
    assert_eq!(load_step(&store), Some((3, vec![])));
}

#[test]
fn damage_falls_back_to_the_previous_good_one_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 5).unwrap();
    let paths: Vec<PathBuf> = [1, 2, 3, 4]
        .iter()
        .map(|&s| save(&store, s).unwrap())
        .collect();
    // One flipped bit, a cut file, a missing file: newest first.
    let weights = paths[3].join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let (step, skipped) = load_step(&store).unwrap();
    assert_eq!(step, 3);
    assert_eq!(skipped[0].name, "step-00000004");
    assert!(skipped[0].reason.contains("BLAKE3"), "{skipped:?}");
    fs::write(paths[2].join("state.json"), "{").unwrap();
    fs::remove_file(paths[1].join("state.json")).unwrap();
    let (step, skipped) = load_step(&store).unwrap();
    assert_eq!((step, skipped.len()), (1, 3));
    fs::write(paths[0].join(CHECKSUMS), "no json").unwrap();
    let error = store.load().unwrap_err();
    assert!(matches!(&error, CheckpointError::NoneUsable { tried, .. } if tried.len() == 4));
    assert!(error.to_string().contains("step-00000001"), "{error}");
}

#[test]
fn an_old_owner_names_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let newest = Arc::new(AtomicU64::new(1));
    let owner = |number| {
        let newest = Arc::clone(&newest);
        let newest = move || Ok::<_, String>(newest.load(Ordering::SeqCst));
        let store = CheckpointStore::open(dir.path(), 5).unwrap();
        store.fenced(Fence::new(number, "runs/a", Arc::new(newest)))
    };
    let first = owner(1);
    save(&first, 1).unwrap();
    newest.store(2, Ordering::SeqCst);
    let error = save(&first, 2).unwrap_err();
    assert!(matches!(error, CheckpointError::Fence(_)), "{error}");
    assert!(error.to_string().contains("owner 2"), "{error}");
    let left = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 2, "`LATEST` and the first checkpoint");
    let second = owner(2);
    save(&second, 2).unwrap();
    // Nor does the first one go back to its own.
    let loaded = first.named("step-00000001").unwrap();
    assert!(matches!(
        first.commit(&loaded),
        Err(CheckpointError::Fence(_))
    ));
    assert_eq!(load_step(&second), Some((2, vec![])));
}

/// The run is taken over between the two renames: the folder is not committed, and the new owner takes its
/// name.
#[test]
fn an_owner_that_is_replaced_during_a_save_does_not_commit_it() {
    let dir = tempfile::tempdir().unwrap();
    let open = || CheckpointStore::open(dir.path(), 5).unwrap();
    save(&open(), 1).unwrap();
    let newest = AtomicU64::new(1);
    let newest = move || Ok::<_, String>(newest.fetch_add(1, Ordering::SeqCst));
    let first = open().fenced(Fence::new(1, "runs/a", Arc::new(newest)));
    let error = save(&first, 2).unwrap_err();
    assert!(matches!(error, CheckpointError::Fence(_)), "{error}");
    assert!(dir.path().join("step-00000002").exists());
    assert_eq!(load_step(&open()), Some((1, vec![])));
    let path = save(&open(), 2).unwrap();
    assert_eq!(path, dir.path().join("step-00000002"));
    assert_eq!(load_step(&open()), Some((2, vec![])));
}

#[test]
fn a_lost_pointer_is_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 5).unwrap();
    save(&store, 1).unwrap();
    save(&store, 2).unwrap();
    fs::write(dir.path().join(LATEST), "step-00000077\n").unwrap();
    let (step, skipped) = load_step(&store).unwrap();
    assert_eq!((step, skipped[0].name.as_str()), (2, LATEST));
    fs::remove_file(dir.path().join(LATEST)).unwrap();
    let (step, skipped) = load_step(&store).unwrap();
    assert_eq!((step, skipped[0].name.as_str()), (2, LATEST));
    assert!(
        skipped[0].reason.contains("newest checkpoint"),
        "{skipped:?}"
    );
    // A directory beyond the pointer is not committed.
    fs::write(dir.path().join(LATEST), "step-00000001\n").unwrap();
    assert_eq!(load_step(&store), Some((1, vec![])));
}

#[test]
fn parts_keep_to_their_directory_and_shape() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 1).unwrap();
    for file in ["../x", ".hidden", "", CHECKSUMS] {
        let part = Part::Bytes {
            file: file.into(),
            bytes: vec![],
        };
        assert!(
            matches!(store.save(1, &[part]), Err(CheckpointError::Part { .. })),
            "{file:?}"
        );
    }
    let view = sinew_types::TensorView::f32(&[2], &[1.0, 2.0]).unwrap();
    let twice = vec![("w".to_owned(), view.clone()), ("w".to_owned(), view)];
    let part = Part::Tensors {
        file: "m".into(),
        tensors: Box::new(TensorList(twice)),
    };
    assert!(
        store
            .save(1, &[part])
            .unwrap_err()
            .to_string()
            .contains("tensor w")
    );
    assert_eq!(store.load().unwrap(), None);
}

/// The disk, of which the operation number `fail_at` fails with `kind`, and all later ones too if
/// the process "died" there.
#[derive(Clone, Debug)]
struct Failing {
    operations: Arc<AtomicUsize>,
    fail_at: usize,
    dead: bool,
    kind: io::ErrorKind,
}

impl Failing {
    fn count(&self) -> io::Result<()> {
        let n = self.operations.fetch_add(1, Ordering::SeqCst);
        if n == self.fail_at || (self.dead && n > self.fail_at) {
            return Err(self.kind.into());
        }
        Ok(())
    }
}

struct FailingFile(Box<dyn StorageFile>, Failing);

impl Write for FailingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.1.count().is_err() {
            // Half of it arrives, as on a disk that fills up.
            self.0.write_all(&bytes[..bytes.len() / 2])?;
            return Err(self.1.kind.into());
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.1.count()?;
        self.0.sync()
    }
}

impl Storage for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        DiskStorage.create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.count()?;
        Ok(Box::new(FailingFile(
            DiskStorage.create_file(path)?,
            self.clone(),
        )))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        DiskStorage.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count()?;
        DiskStorage.rename(from, to)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        DiskStorage.remove_dir(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        DiskStorage.remove_file(path)
    }
}

/// Every operation of a save fails once, as an error and as a death of the process: afterwards
/// the old or the new checkpoint loads whole, a reported success is the new one, and the next
/// save works.
#[test]
fn no_failing_operation_costs_the_previous_checkpoint() {
    for (kind, dead) in [
        (io::ErrorKind::StorageFull, false),
        (io::ErrorKind::PermissionDenied, false),
        (io::ErrorKind::Other, true),
    ] {
        let mut failures = 0;
        for fail_at in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let good = CheckpointStore::open(dir.path(), 1).unwrap();
            save(&good, 1).unwrap();
            let failing = Failing {
                operations: Arc::default(),
                // The first operation creates the store's directory.
                fail_at: fail_at + 1,
                dead,
                kind,
            };
            let operations = failing.operations.clone();
            let store = CheckpointStore::with_storage(dir.path(), 1, Box::new(failing)).unwrap();
            let result = save(&store, 2);
            let (step, skipped) = load_step(&good).expect("a checkpoint remains");
            assert_eq!(skipped, []);
            match (&result, kind) {
                (Ok(_), _) => assert_eq!(step, 2),
                (Err(CheckpointError::DiskFull { .. }), io::ErrorKind::StorageFull)
                | (Err(CheckpointError::Permission { .. }), io::ErrorKind::PermissionDenied)
                | (Err(CheckpointError::Io { .. }), io::ErrorKind::Other) => failures += 1,
                (Err(error), _) => panic!("{kind:?} at operation {fail_at} gave {error}"),
            }
            save(&good, 3).unwrap();
            assert_eq!(load_step(&good), Some((3, vec![])));
            assert_eq!(good.names().unwrap(), ["step-00000003"]);
            if operations.load(Ordering::SeqCst) <= fail_at + 1 {
                break;
            }
        }
        assert!(failures > 15, "{failures} operations were made to fail");
    }
}

/// The process dies at every operation of a save, and again at every operation of the save that follows:
/// names are those of an undisturbed run, and a committed checkpoint is always there.
#[test]
fn a_save_that_was_cut_short_leaves_its_name_to_the_next_one() {
    let dies = |dir: &Path, fail_at: usize| {
        let failing = Failing {
            operations: Arc::default(),
            fail_at: fail_at + 1,
            dead: true,
            kind: io::ErrorKind::Other,
        };
        let store = CheckpointStore::with_storage(dir, 2, Box::new(failing)).unwrap();
        save(&store, 2).is_err()
    };
    // A directory that nothing names exists between the two renames.
    let between = |first: &usize| {
        let dir = tempfile::tempdir().unwrap();
        let good = CheckpointStore::open(dir.path(), 2).unwrap();
        save(&good, 1).unwrap();
        dies(dir.path(), *first);
        good.names().unwrap().len() == 2 && load_step(&good).unwrap().0 == 1
    };
    let first = (0..100).find(between).expect("a death between them");
    for second in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let good = CheckpointStore::open(dir.path(), 2).unwrap();
        save(&good, 1).unwrap();
        dies(dir.path(), first);
        let died = dies(dir.path(), second);
        let (step, skipped) = load_step(&good).unwrap();
        assert_eq!(skipped, [], "{second}");
        if step == 1 {
            let saved = save(&good, 2).unwrap();
            assert_eq!(saved, dir.path().join("step-00000002"), "{second}");
        }
        assert_eq!(load_step(&good), Some((2, vec![])));
        save(&good, 3).unwrap();
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 3, "{second}: two checkpoints and the pointer");
        if !died {
            break;
        }
    }
}

#[test]
fn a_run_that_goes_on_names_what_it_goes_on_from() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path(), 5).unwrap();
    let first = save(&store, 1).unwrap();
    save(&store, 2).unwrap();
    let latest = || fs::read_to_string(dir.path().join(LATEST)).unwrap();
    fs::remove_file(dir.path().join(LATEST)).unwrap();
    store.commit(&store.load().unwrap().unwrap()).unwrap();
    assert_eq!(latest(), "step-00000002\n");
    // The newest is damaged: what is loaded in its place is named, and the name is free again.
    fs::write(dir.path().join("step-00000002").join(CHECKSUMS), "{").unwrap();
    let loaded = store.load().unwrap().unwrap();
    assert_eq!(loaded.path, first);
    store.commit(&loaded).unwrap();
    assert_eq!(latest(), "step-00000001\n");
    save(&store, 2).unwrap();
    assert_eq!(load_step(&store), Some((2, vec![])));
    assert_eq!(store.names().unwrap(), ["step-00000001", "step-00000002"]);
}

/// Writes go to the kernel's device that is always full.
#[derive(Debug)]
struct FullDisk;

struct FullFile(fs::File);

impl Write for FullFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for FullFile {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Storage for FullDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DiskStorage.create_dir(path)
    }
    fn create_file(&self, _: &Path) -> io::Result<Box<dyn StorageFile>> {
        let file = fs::File::options().write(true).open("/dev/full")?;
        Ok(Box::new(FullFile(file)))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        DiskStorage.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        DiskStorage.rename(from, to)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        DiskStorage.remove_dir(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        DiskStorage.remove_file(path)
    }
}

#[test]
fn the_kernels_own_disk_full_error_is_recognized() {
    let dir = tempfile::tempdir().unwrap();
    save(&CheckpointStore::open(dir.path(), 1).unwrap(), 1).unwrap();
    let store = CheckpointStore::with_storage(dir.path(), 1, Box::new(FullDisk)).unwrap();
    let error = save(&store, 2).unwrap_err();
    assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error}");
    assert_eq!(load_step(&store), Some((1, vec![])));
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(
        left.len(),
        2,
        "the checkpoint and the pointer remain: {left:?}"
    );
}
