//! Weights from an owner's folder to that of a worker's host, over a real listener.

use axum::Router;
use sinew_engines::{FolderDtype, WeightsFolder, WeightsFollower};
use sinew_pipeline::WeightsTransport;
use sinew_queue::{QueueRoutes, system_clock};
use sinew_store::queue::{MemoryQueue, QueueLimits};
use sinew_types::{Lineage, PolicyVersion, TensorSource, TensorView};
use sinew_workers::{
    Desk, DeskClient, ListenerParts, OwnerListener, RunTerms, ServedWeights, WeightsMirror,
};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

const TOKEN: &str = "token-of-the-worker-tests";

/// One tensor of many equal numbers, so that differences are small.
struct Flat(Vec<f32>);

impl TensorSource for Flat {
    fn names(&self) -> Vec<String> {
        vec!["a".to_owned()]
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let view = TensorView::f32(&[4096], &self.0).ok();
        view.filter(|_| name == "a")
    }
}

fn weights(first: f32) -> Arc<dyn TensorSource> {
    let mut values = vec![1.0; 4096];
    values[0] = first;
    Arc::new(Flat(values))
}

/// A listening owner that publishes weights.
struct Owner {
    served: ServedWeights,
    client: DeskClient,
    desk: Arc<Desk>,
    // Dropped last: the listener stops on it.
    _listener: OwnerListener,
    _runtime: Runtime,
}

fn terms() -> RunTerms {
    RunTerms {
        run: "r".into(),
        id: "r-1".into(),
        fence: 1,
        recipe: String::new(),
        build: "1".into(),
        parts: std::collections::BTreeMap::new(),
        weights: true,
        lease_ms: 1000,
    }
}

fn owner(root: &Path) -> Owner {
    let runtime = Runtime::new().unwrap();
    let desk = Arc::new(Desk::new(terms(), Some(root.to_owned())));
    let queue = Arc::new(MemoryQueue::in_memory(QueueLimits::default()));
    let queue = QueueRoutes::start(queue, TOKEN, system_clock(), None).unwrap();
    let parts = ListenerParts {
        endpoint: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into(),
        token: TOKEN.into(),
        roles: Router::new(),
        tickets: Some((Arc::clone(&desk), queue)),
    };
    let listener = OwnerListener::start(runtime.handle(), parts).unwrap();
    let url = format!("{}://{}", listener.scheme(), listener.address());
    let folder = WeightsFolder::new(root, None, FolderDtype::F32);
    let (root, lineage) = (root.to_owned(), Lineage(7));
    Owner {
        served: ServedWeights::new(folder, root, lineage, true, Arc::clone(&desk)),
        client: DeskClient::new(&url, TOKEN).unwrap(),
        desk,
        _listener: listener,
        _runtime: runtime,
    }
}

impl Owner {
    fn publish(&mut self, version: u64, first: f32) {
        let published = self.served.publish(PolicyVersion(version), weights(first));
        published.unwrap();
    }

    /// Brings the newest weights to a mirror.
    fn sync(&self, mirror: &WeightsMirror) {
        let mark = self.client.weights("", Duration::ZERO).unwrap().unwrap();
        mirror.sync(&self.client, &mark).unwrap();
    }
}

/// The newest version of a follower, and its first number.
fn newest(follower: &mut WeightsFollower) -> Option<(u64, f32)> {
    let found = follower.look().unwrap()?;
    let first = found.tensor("a").unwrap().into_f32()[0];
    Some((found.version().0, first))
}

#[test]
fn a_host_gets_whole_weights_then_differences_and_a_late_one_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = owner(&dir.path().join("published"));
    let here = dir.path().join("here");
    let mirror = WeightsMirror::open(&here).unwrap();
    let mut follower = mirror.follower();
    assert_eq!(owner.client.weights("", Duration::ZERO).unwrap(), None);
    for (version, first) in [(0, 1.5), (1, 2.5), (2, 3.5)] {
        owner.publish(version, first);
        owner.sync(&mirror);
        assert_eq!(newest(&mut follower), Some((version, first)));
    }
    let published = owner.desk.published().unwrap();
    assert!(
        here.join(published.folder_name())
            .join("deltas.zst")
            .exists()
    );
    // A second worker of the host fetches nothing.
    let second = WeightsMirror::open(&here).unwrap();
    owner.sync(&second);
    assert_eq!(newest(&mut second.follower()), Some((2, 3.5)));
    // A host that comes late needs the anchor and the newest version.
    let late = WeightsMirror::open(&dir.path().join("late")).unwrap();
    owner.sync(&late);
    assert_eq!(newest(&mut late.follower()), Some((2, 3.5)));
    drop(mirror);
    assert!(here.exists(), "the second worker uses it");
    drop(second);
    assert!(!here.exists(), "nobody uses it");
}

#[test]
fn weights_with_a_changed_byte_are_not_named() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("published");
    let mut owner = owner(&root);
    owner.publish(0, 1.5);
    let mirror = WeightsMirror::open(&dir.path().join("here")).unwrap();
    owner.sync(&mirror);
    owner.publish(1, 2.5);
    let id = owner.desk.published().unwrap();
    let file = root.join(id.folder_name()).join("deltas.zst");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 64;
    std::fs::write(&file, bytes).unwrap();
    let mark = owner.client.weights("", Duration::ZERO).unwrap().unwrap();
    mirror.sync(&owner.client, &mark).unwrap_err();
    assert_eq!(newest(&mut mirror.follower()), Some((0, 1.5)));
}

#[test]
fn a_stranger_learns_nothing_and_a_file_elsewhere_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = owner(&dir.path().join("published"));
    owner.publish(0, 1.5);
    let stranger = DeskClient::new(owner.client.url(), "another-token-of-the-tests").unwrap();
    let refused = stranger.terms(Duration::ZERO, &|| false).unwrap_err();
    assert!(refused.to_string().contains("401"), "{refused}");
    assert_eq!(
        owner.client.terms(Duration::ZERO, &|| false).unwrap(),
        terms()
    );
    let gone = owner.client.part("v00000009-00000007", "manifest.json", 0);
    assert!(gone.unwrap_err().is_gone());
    let other = owner.client.part("v00000000-00000007", "secret", 0);
    assert!(other.unwrap_err().is_gone());
}
