//! Payloads in S3 and in a folder: by reference, with media apart.

use crate::servers::{PostgresServer, S3Server};
use crate::support::{id, new_name, open_at, trace, url};
use sinew_store::{CommitOutcome, StoreError, Sweep, SweepReport, TraceStore};
use sinew_types::{EpisodeId, Media, MediaSource, Part, Trace};
use std::path::Path;
use std::process::Command;

/// Episode `n` with a picture in its first message.
fn with_picture(n: u64, picture: &str) -> Trace {
    let mut seen = trace(n, 20);
    let content = &mut seen.nodes[0].messages[0].content;
    content.push(Part::Image(Media {
        source: MediaSource::Url(picture.to_owned()),
        media_type: Some("image/png".into()),
    }));
    seen
}

fn picture(byte: char) -> String {
    format!("data:image/png;base64,{}", byte.to_string().repeat(50_000))
}

/// Files below a folder with their sizes.
fn files(folder: &Path) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let entry = entry.unwrap();
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else {
                let bytes = entry.metadata().unwrap().len();
                all.push((entry.path().display().to_string(), bytes));
            }
        }
    }
    all
}

/// Commits, reads and removes episodes with pictures.
fn use_store(store: &dyn TraceStore) {
    let traces: Vec<_> = (0..8)
        .map(|n| with_picture(n, &picture(['a', 'b'][n as usize % 2])))
        .collect();
    let committed = store.commit_batch(&traces).unwrap();
    assert_eq!(committed, [CommitOutcome::New; 8]);
    for (n, trace) in traces.iter().enumerate() {
        assert_eq!(store.get(&id(n as u64)).unwrap().as_ref(), Some(trace));
    }
    assert_eq!(store.commit(&traces[0]).unwrap(), CommitOutcome::Duplicate);
    // Small media and other addresses stay where they are.
    let small = with_picture(9, "https://example.org/cat.png");
    store.commit(&small).unwrap();
    assert_eq!(store.get(&id(9)).unwrap(), Some(small));
    assert_eq!(store.remove(&[id(1), id(3)]).unwrap().episodes, 2);
    assert_eq!(store.get(&id(1)).unwrap(), None);
    assert_eq!(store.get(&id(5)).unwrap().as_ref(), Some(&traces[5]));
}

/// Deletes what no episode refers to, or lists it, whatever its age.
fn swept(store: &dyn TraceStore, gone: &[EpisodeId], dry_run: bool) -> SweepReport {
    let sweep = Sweep {
        before_unix_s: f64::INFINITY,
        gone,
        dry_run,
    };
    store.sweep(&sweep).unwrap()
}

/// A picture that two episodes share goes with the last of them, and comes back with another.
fn sweep_store(store: &dyn TraceStore) {
    let none = SweepReport::default();
    let traces: Vec<_> = (0..4)
        .map(|n| with_picture(n, &picture(['a', 'b'][n as usize % 2])))
        .collect();
    store.commit_batch(&traces).unwrap();
    assert_eq!(swept(store, &[], false), none);
    store.remove(&[id(0)]).unwrap();
    assert_eq!(swept(store, &[], false), none);
    // A dry run lists what goes with an episode: its trace, and the picture that only it has now.
    let listed = swept(store, &[id(2)], true);
    assert_eq!(listed.objects, 2, "{listed:?}");
    assert_eq!(swept(store, &[id(2)], true), listed);
    store.remove(&[id(2)]).unwrap();
    let young = Sweep {
        before_unix_s: 0.0,
        gone: &[],
        dry_run: false,
    };
    assert_eq!(store.sweep(&young).unwrap(), none);
    let deleted = swept(store, &[], false);
    assert_eq!(
        (deleted.objects, deleted.names.len()),
        (1, 1),
        "{deleted:?}"
    );
    assert!(deleted.bytes > 50_000 && listed.names.contains(&deleted.names[0]));
    assert_eq!(swept(store, &[], false), none);
    for n in [1, 3] {
        assert_eq!(store.get(&id(n as u64)).unwrap().as_ref(), Some(&traces[n]));
    }
    let again = with_picture(9, &picture('a'));
    store.commit(&again).unwrap();
    assert_eq!(store.get(&id(9)).unwrap(), Some(again));
}

#[test]
fn objects_that_no_episode_refers_to_are_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let objects = format!("file://{}", folder.path().display());
    sweep_store(&open_at(&url(), &new_name(), Some(&objects)));
    // The file that a crash left is deleted, and objects of other stores in the same place stay.
    let (name, other) = (new_name(), folder.path().join("other/0/ab"));
    std::fs::create_dir_all(&other).unwrap();
    std::fs::write(other.join("x"), "of another store").unwrap();
    let store = open_at(&url(), &name, Some(&objects));
    store.commit(&trace(0, 20)).unwrap();
    let left = folder.path().join(store.identity()).join("0/ab/part-0-0");
    std::fs::create_dir_all(left.parent().unwrap()).unwrap();
    std::fs::write(&left, "half").unwrap();
    let deleted = swept(&store, &[], false);
    assert!(deleted.objects == 1 && !left.exists(), "{deleted:?}");
    assert!(other.join("x").exists());
    assert_eq!(store.get(&id(0)).unwrap(), Some(trace(0, 20)));
    // Payloads in the database have no objects.
    let inside = open_at(&url(), &new_name(), None);
    assert_eq!(swept(&inside, &[], false), SweepReport::default());
}

#[test]
fn a_commit_that_a_sweep_overtook_writes_its_objects_again() {
    let folder = tempfile::tempdir().unwrap();
    let (objects, name) = (format!("file://{}", folder.path().display()), new_name());
    let [writer, other] = [(); 2].map(|()| open_at(&url(), &name, Some(&objects)));
    writer.commit(&with_picture(0, &picture('a'))).unwrap();
    other.remove(&[id(0)]).unwrap();
    assert_eq!(swept(&other, &[], false).objects, 1);
    // The writer finds its picture neither there nor under the name that it knows.
    let seen = with_picture(1, &picture('a'));
    assert_eq!(writer.commit(&seen).unwrap(), CommitOutcome::New);
    assert_eq!(other.get(&id(1)).unwrap().as_ref(), Some(&seen));
    // Its first objects are left, and nothing else.
    assert_eq!(swept(&other, &[], false).objects, 2);
    assert_eq!(writer.get(&id(1)).unwrap(), Some(seen));
}

#[test]
fn a_folder_holds_each_picture_once() {
    let folder = tempfile::tempdir().unwrap();
    let objects = format!("file://{}", folder.path().display());
    let store = open_at(&url(), &new_name(), Some(&objects));
    use_store(&store);
    let all = files(folder.path());
    let pictures = all.iter().filter(|(_, bytes)| *bytes > 50_000).count();
    assert_eq!((pictures, all.len()), (2, 2 + 7), "{all:?}");
}

#[test]
fn a_missing_or_damaged_object_is_named_and_others_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let (objects, name) = (format!("file://{}", folder.path().display()), new_name());
    let store = open_at(&url(), &name, Some(&objects));
    for n in 0..3 {
        store.commit(&trace(n, 20)).unwrap();
    }
    let (first, second) = (
        files(folder.path())[0].0.clone(),
        files(folder.path())[1].0.clone(),
    );
    std::fs::remove_file(first).unwrap();
    let mut bytes = std::fs::read(&second).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&second, bytes).unwrap();
    let read: Vec<_> = (0..3).map(|n| store.get(&id(n))).collect();
    let failed = read
        .iter()
        .filter(|r| matches!(r, Err(StoreError::Payload { .. })));
    assert_eq!(failed.count(), 2);
    assert_eq!(read.iter().filter(|r| r.is_ok()).count(), 1);
    // Without its place of payloads, the store says so.
    let blind = open_at(&url(), &name, None)
        .get(&id(0))
        .unwrap_err()
        .to_string();
    assert!(blind.contains("store.payloads"), "{blind}");
}

const URL: &str = "SINEW_DATABASE_TEST_URL";

/// Uses a bucket. Does nothing unless it is started by the test below, with variables for S3.
#[test]
fn with_a_bucket() {
    let Ok(url) = std::env::var(URL) else {
        return;
    };
    use_store(&open_at(&url, "bucket", Some("s3://sinew/runs/a")));
    // Another process finds what this one stored.
    let again = open_at(&url, "bucket", Some("s3://sinew/runs/a"));
    assert_eq!(
        again.get(&id(0)).unwrap(),
        Some(with_picture(0, &picture('a')))
    );
    sweep_store(&open_at(&url, "swept", Some("s3://sinew/runs/a")));
    let wrong = open_at(&url, "bucket", Some("s3://none/runs/a"));
    assert!(wrong.commit(&trace(20, 5)).is_err());
    assert_eq!(wrong.get(&id(20)).unwrap(), None);
}

#[test]
fn a_bucket_of_s3_holds_payloads() {
    let (server, s3) = (PostgresServer::start(), S3Server::start());
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "payloads::with_a_bucket", "--nocapture"])
        .env(URL, server.url())
        .envs(s3.variables())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&done.stderr)
    );
    assert!(said.contains("1 passed"), "{said}");
}
