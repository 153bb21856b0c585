//! Publisher and follower, each separately and killed.

use super::*;
use crate::folder::{FolderDtype, WeightsFolder};
use sinew_types::{Fence, Lineage, PolicyVersion, TensorList, TensorSource, TensorView};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Two tensors, of which every fourth number differs a little from step to step.
struct Model(Vec<f32>, Vec<f32>);

impl Model {
    fn at(step: u32) -> Self {
        let moved = |i: u32| step as f32 * 1e-7 * (i as f32).cos() * f32::from(i.is_multiple_of(4));
        let value = |i: u32| (i as f32 * 0.731).sin() * 0.1 + moved(i);
        Self((0..6000).map(value).collect(), (0..40).map(value).collect())
    }

    /// Nothing in common with the others: every bit is noise, so that no difference is smaller.
    fn other() -> Self {
        Self::noise(7)
    }

    fn noise(seed: u64) -> Self {
        let noise = |i: u32| f32::from_bits(sinew_types::mix_seed(seed, u64::from(i)) as u32);
        Self((0..6000).map(noise).collect(), (0..40).map(noise).collect())
    }
}

impl TensorSource for Model {
    fn names(&self) -> Vec<String> {
        vec!["layer.weight".into(), "norm.weight".into()]
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        match name {
            "layer.weight" => TensorView::f32(&[60, 100], &self.0).ok(),
            "norm.weight" => TensorView::f32(&[40], &self.1).ok(),
            _ => None,
        }
    }
}

fn shared(root: &Path, deltas: bool) -> SharedWeights {
    of_lineage(root, Lineage(0xaa), deltas)
}

fn of_lineage(root: &Path, lineage: Lineage, deltas: bool) -> SharedWeights {
    let folder = WeightsFolder::new(root, None, FolderDtype::F32);
    SharedWeights::new(folder, lineage, deltas)
}

fn assert_equal(found: &FollowedWeights, version: u64, expected: &Model) {
    assert_eq!(found.version(), PolicyVersion(version));
    assert_eq!(found.names(), expected.names());
    for name in expected.names() {
        let (found, expected) = (found.tensor(&name), expected.tensor(&name));
        let (found, expected) = (found.unwrap(), expected.unwrap());
        assert_eq!(
            (found.shape(), found.bytes()),
            (expected.shape(), expected.bytes())
        );
    }
}

/// The run is taken over between the version's name and the name that engines look at.
#[test]
fn a_version_of_an_old_owner_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("weights");
    shared(&root, false)
        .publish(PolicyVersion(1), &Model::at(1))
        .unwrap();
    let mut follower = WeightsFollower::new(&root);
    assert_equal(&follower.look().unwrap().unwrap(), 1, &Model::at(1));
    let newest = AtomicU64::new(1);
    let newest = move || Ok::<_, String>(newest.fetch_add(1, Ordering::SeqCst));
    let folder = WeightsFolder::new(&root, None, FolderDtype::F32);
    let folder = folder.fenced(Fence::new(1, "runs/a", Arc::new(newest)));
    let refused =
        SharedWeights::new(folder, Lineage(0xaa), false).publish(PolicyVersion(2), &Model::at(2));
    assert!(refused.unwrap_err().to_string().contains("owner 2"));
    assert!(follower.look().unwrap().is_none());
}

#[test]
fn followers_get_every_bit_whole_or_as_a_difference() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("weights");
    let mut early = WeightsFollower::new(&root);
    assert!(early.look().unwrap().is_none());
    let mut publisher = shared(&root, true);
    let first = publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    assert_eq!(first.base, None);
    assert_equal(&early.look().unwrap().unwrap(), 1, &Model::at(1));
    assert!(early.look().unwrap().is_none());
    for step in 2..6 {
        let published = publisher.publish(PolicyVersion(step), &Model::at(step as u32));
        let published = published.unwrap();
        assert_eq!(published.base, Some(PolicyVersion(1)));
        assert!(
            published.bytes * 10 < first.bytes * 3,
            "{published:?} of {first:?}"
        );
    }
    // It missed three, and needs none of them; one that comes late needs no more.
    for follower in [&mut early, &mut WeightsFollower::new(&root)] {
        let found = follower.look().unwrap().unwrap();
        assert_eq!(found.base(), Some(PolicyVersion(1)));
        assert_equal(&found, 5, &Model::at(5));
    }
    let names = |root: &Path| {
        let names = fs::read_dir(root).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(
        names(&root),
        [
            "LATEST",
            "v00000001-000000aa",
            "v00000004-000000aa",
            "v00000005-000000aa"
        ]
    );
    // A difference as large as the whole is the next anchor, and so is the version after it.
    let far = publisher
        .publish(PolicyVersion(6), &Model::other())
        .unwrap();
    assert_eq!(far.base, None);
    assert_equal(&early.look().unwrap().unwrap(), 6, &Model::other());
    let mut bases = Vec::new();
    for version in 7..10 {
        let published = publisher.publish(PolicyVersion(version), &Model::other());
        bases.push(published.unwrap().base);
    }
    let anchor = Some(PolicyVersion(7));
    assert_eq!(bases, [None, anchor, anchor]);
    assert_eq!(
        names(&root),
        [
            "LATEST",
            "v00000007-000000aa",
            "v00000008-000000aa",
            "v00000009-000000aa"
        ]
    );
}

#[test]
fn differences_that_are_large_again_and_again_are_tried_less_often() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), true);
    let mut pauses = Vec::new();
    for version in 1..30 {
        let before = publisher.whole_left();
        let published = publisher.publish(PolicyVersion(version), &Model::noise(version));
        assert_eq!(published.unwrap().base, None);
        if before == 0 && publisher.whole_left() > 0 {
            pauses.push(publisher.whole_left());
        }
    }
    assert_eq!(pauses, [1, 2, 4, 8, 8]);
    // One that is small again ends the pauses.
    for version in 30..40 {
        publisher
            .publish(PolicyVersion(version), &Model::noise(30))
            .unwrap();
    }
    publisher
        .publish(PolicyVersion(40), &Model::noise(7))
        .unwrap();
    assert_eq!(publisher.whole_left(), 1);
}

#[test]
fn without_differences_each_version_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), false);
    for step in 1..4 {
        let published = publisher.publish(PolicyVersion(step), &Model::at(step as u32));
        assert_eq!(published.unwrap().base, None);
    }
    let found = WeightsFollower::new(dir.path()).look().unwrap().unwrap();
    assert_equal(&found, 3, &Model::at(3));
}

#[test]
fn what_a_killed_publisher_left_is_not_seen_and_the_next_one_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), true);
    publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    publisher.publish(PolicyVersion(2), &Model::at(2)).unwrap();
    let mut follower = WeightsFollower::new(dir.path());
    // Killed between any two steps of the next one: a folder under a hidden name; one with its name that
    // `LATEST` does not name; the next `LATEST` under a hidden name.
    fs::create_dir(dir.path().join(".v00000003-000000aa.part")).unwrap();
    fs::write(
        dir.path().join(".v00000003-000000aa.part/deltas.zst"),
        "half",
    )
    .unwrap();
    assert_equal(&follower.look().unwrap().unwrap(), 2, &Model::at(2));
    fs::create_dir(dir.path().join("v00000003-000000aa")).unwrap();
    fs::write(dir.path().join(".LATEST.part"), "v000").unwrap();
    assert!(follower.look().unwrap().is_none());
    // The run continues from a checkpoint before: the same number may have other weights now.
    let mut again = shared(dir.path(), true);
    let published = again.publish(PolicyVersion(2), &Model::other()).unwrap();
    assert_eq!(published.base, None);
    assert_equal(&follower.look().unwrap().unwrap(), 2, &Model::other());
    assert!(!dir.path().join("v00000003-000000aa").exists());
}

/// A trainer on a GPU that continues from a checkpoint makes a version of the same number with other bits.
#[test]
fn the_same_number_of_another_lineage_is_loaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), true);
    publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    publisher.publish(PolicyVersion(2), &Model::at(2)).unwrap();
    let mut follower = WeightsFollower::new(dir.path());
    let found = follower.look().unwrap().unwrap();
    assert_eq!(found.id().to_string(), "v2-000000aa");
    let mut resumed = of_lineage(dir.path(), Lineage(0xbb), true);
    resumed.publish(PolicyVersion(2), &Model::at(2)).unwrap();
    let found = follower.look().unwrap().unwrap();
    assert_eq!(found.id().to_string(), "v2-000000bb");
    assert_equal(&found, 2, &Model::at(2));
    assert!(!dir.path().join("v00000002-000000aa").exists());
    // Differences are of the anchor of their own session.
    let published = resumed.publish(PolicyVersion(3), &Model::at(3)).unwrap();
    assert_eq!(published.base, Some(PolicyVersion(2)));
    assert_equal(&follower.look().unwrap().unwrap(), 3, &Model::at(3));
    // A manifest in the folder of another lineage is not taken.
    let (own, other) = ("v00000003-000000bb", "v00000003-000000cc");
    fs::rename(dir.path().join(own), dir.path().join(other)).unwrap();
    fs::write(dir.path().join(LATEST), other).unwrap();
    let error = WeightsFollower::new(dir.path()).look().unwrap_err();
    assert!(error.to_string().contains("v3-000000bb"), "{error}");
}

/// Whatever byte of a version is damaged, what a follower gives is right or refused.
#[test]
fn no_damaged_byte_is_given_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), true);
    publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    publisher.publish(PolicyVersion(2), &Model::at(2)).unwrap();
    let files = [
        "LATEST",
        "v00000002-000000aa/manifest.json",
        "v00000002-000000aa/deltas.zst",
        "v00000001-000000aa/model.safetensors",
    ];
    let (mut refused, mut right) = (0, 0);
    for file in files {
        let path = dir.path().join(file);
        let sound = fs::read(&path).unwrap();
        for part in 0..40 {
            let at = part * sound.len() / 40;
            let mut bytes = sound.clone();
            bytes[at] ^= 1 << (part % 8);
            fs::write(&path, &bytes).unwrap();
            match WeightsFollower::new(dir.path()).look() {
                Ok(found) => {
                    right += 1;
                    for name in Model::at(2).names() {
                        let found = found.as_ref().and_then(|f| f.tensor(&name));
                        let Some(found) = found else { continue };
                        assert_eq!(found.bytes(), Model::at(2).tensor(&name).unwrap().bytes());
                    }
                }
                Err(_) => refused += 1,
            }
        }
        fs::write(&path, &sound[..sound.len() / 2]).unwrap();
        assert!(
            WeightsFollower::new(dir.path()).look().is_err(),
            "{file} cut"
        );
        fs::write(&path, sound).unwrap();
    }
    assert!(refused > right, "{refused} refused, {right} right");
}

#[test]
fn lengths_that_lie_are_refused_before_memory_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), true);
    publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    publisher.publish(PolicyVersion(2), &Model::at(2)).unwrap();
    let path = dir.path().join("v00000002-000000aa/manifest.json");
    let sound = fs::read_to_string(&path).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&sound).unwrap();
    for (pointer, value) in [
        ("/tensors/0/delta/bytes", serde_json::json!(u64::MAX)),
        ("/tensors/0/delta/offset", serde_json::json!(u64::MAX)),
        ("/tensors/0/shape/0", serde_json::json!(u64::MAX)),
        ("/tensors/0/delta", serde_json::Value::Null),
        ("/base", serde_json::json!(77)),
    ] {
        let before = manifest.pointer(pointer).cloned().unwrap();
        *manifest.pointer_mut(pointer).unwrap() = value;
        fs::write(&path, manifest.to_string()).unwrap();
        assert!(
            WeightsFollower::new(dir.path()).look().is_err(),
            "{pointer}"
        );
        *manifest.pointer_mut(pointer).unwrap() = before;
    }
}

#[test]
fn what_a_follower_reads_may_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), false);
    publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    let file = tensors::TensorFile::open(&dir.path().join("v00000001-000000aa/model.safetensors"));
    let file = file.unwrap();
    for version in 2..5 {
        publisher
            .publish(PolicyVersion(version), &Model::at(2))
            .unwrap();
    }
    assert!(!dir.path().join("v00000001-000000aa").exists());
    let bytes = file.read("norm.weight", 160).unwrap();
    assert_eq!(bytes, Model::at(1).tensor("norm.weight").unwrap().bytes());
}

#[test]
fn the_newest_version_is_published_and_the_last_one_always() {
    let dir = tempfile::tempdir().unwrap();
    let (sender, heard) = mpsc::sync_channel(64);
    let heard_by = Box::new(
        move |version: PolicyVersion, result: Result<PublishedVersion, _>| {
            sender.send((version.0, result.is_ok())).unwrap();
        },
    );
    let publisher = Publisher::start(shared(dir.path(), true), heard_by).unwrap();
    for step in 1..30 {
        publisher.offer(PolicyVersion(step), Arc::new(Model::at(step as u32)));
    }
    drop(publisher);
    let found = WeightsFollower::new(dir.path()).look().unwrap().unwrap();
    assert_equal(&found, 29, &Model::at(29));
    let heard: Vec<(u64, bool)> = heard.iter().collect();
    assert!(heard.is_sorted() && heard.iter().all(|(_, published)| *published));
    assert_eq!(heard.last(), Some(&(29, true)));
}

#[test]
fn a_source_without_a_tensor_leaves_the_version_before() {
    let dir = tempfile::tempdir().unwrap();
    let mut publisher = shared(dir.path(), true);
    publisher.publish(PolicyVersion(1), &Model::at(1)).unwrap();
    let model = Model::at(2);
    let view = model.tensor("norm.weight").unwrap();
    // Other tensors than the anchor's: whole.
    let one = TensorList(vec![("norm.weight".into(), view)]);
    assert_eq!(
        publisher.publish(PolicyVersion(2), &one).unwrap().base,
        None
    );
    struct Lies;
    impl TensorSource for Lies {
        fn names(&self) -> Vec<String> {
            vec!["norm.weight".into()]
        }

        fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
            None
        }
    }
    let refused = publisher.publish(PolicyVersion(3), &Lies);
    assert!(refused.unwrap_err().to_string().contains("norm.weight"));
    let found = WeightsFollower::new(dir.path()).look().unwrap().unwrap();
    assert_eq!(found.version(), PolicyVersion(2));
}
