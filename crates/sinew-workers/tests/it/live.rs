//! Finished rollouts of agents from the gateway of a worker to the owner, over a real listener.

use axum::Router;
use sinew_queue::{QueueRoutes, system_clock};
use sinew_rollout::{EpisodeSpec, RunInfo};
use sinew_store::queue::{MemoryQueue, QueueLimits};
use sinew_store::{CommitOutcome, StoreError, TraceStore};
use sinew_types::{
    EpisodeId, GroupId, Lineage, NO_PARENT, Node, PolicyVersion, SamplingParams, Task, TaskId,
    TokenKind, Trace, VersionSpan, WeightsId,
};
use sinew_workers::{
    Desk, DeskClient, ListenerParts, LiveInbox, OwnerListener, OwnerTraces, RunTerms,
    WorkerReading, WorkerReport,
};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::runtime::Runtime;

const TOKEN: &str = "token-of-the-worker-tests";

/// A store that may be full.
#[derive(Default)]
struct Inbox {
    stored: Mutex<BTreeMap<EpisodeId, Trace>>,
    opened: AtomicUsize,
    full: AtomicBool,
}

impl LiveInbox for Inbox {
    fn opened(&self) {
        self.opened.fetch_add(1, Ordering::SeqCst);
    }

    fn finished(&self, trace: &Trace) -> Result<(), StoreError> {
        if self.full.load(Ordering::SeqCst) {
            return Err(StoreError::Full {
                used: 1,
                needed: 1,
                limit: 1,
            });
        }
        let mut stored = self.stored.lock().unwrap();
        let kept = stored
            .entry(trace.episode.clone())
            .or_insert_with(|| trace.clone());
        if kept.nodes != trace.nodes {
            return Err(StoreError::Row {
                key: trace.episode.to_string(),
                reason: "another one".into(),
            });
        }
        Ok(())
    }
}

/// A listening owner that has published version 3.
struct Owner {
    client: Arc<DeskClient>,
    desk: Arc<Desk>,
    // Dropped last: the listener stops on it.
    _listener: OwnerListener,
    _runtime: Runtime,
}

fn owner() -> Owner {
    let runtime = Runtime::new().unwrap();
    let terms = RunTerms {
        run: "r".into(),
        id: "r-1".into(),
        fence: 1,
        recipe: String::new(),
        build: "1".into(),
        parts: BTreeMap::new(),
        weights: true,
        lease_ms: 1000,
    };
    let desk = Arc::new(Desk::new(terms, None));
    desk.publish(WeightsId::new(PolicyVersion(3), Lineage(0)), None);
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
    Owner {
        client: Arc::new(DeskClient::new(&url, TOKEN).unwrap()),
        desk,
        _listener: listener,
        _runtime: runtime,
    }
}

/// A rollout of a run, sampled by one version.
fn rollout(id: &str, run: &str, version: u64, ids: &[u32]) -> Trace {
    let spec = EpisodeSpec {
        episode: EpisodeId::new(id),
        group: GroupId::new("g"),
        task: Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            preamble: Vec::new(),
            prompt: "p".into(),
            data: serde_json::Value::Null,
            seed: 1,
        },
        draw: 0,
        purpose: "live".into(),
        seed: 5,
    };
    let info = RunInfo {
        name: run.into(),
        ..RunInfo::default()
    };
    let mut trace = spec.empty_trace(&info, &SamplingParams::default());
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], Vec::new());
    let mut turn = Node::given(0, 1, TokenKind::Sampled, ids.to_vec(), Vec::new());
    turn.logprobs = vec![-0.5; ids.len()];
    turn.temperature = 1.0;
    turn.versions = VersionSpan::whole(ids.len(), PolicyVersion(version));
    trace.nodes = vec![prompt, turn];
    trace
}

#[test]
fn a_finished_rollout_is_the_owners_before_its_agent_is_answered() {
    let owner = owner();
    let inbox = Arc::<Inbox>::default();
    owner.desk.receive(Arc::<Inbox>::clone(&inbox));
    let store = OwnerTraces::new(Arc::clone(&owner.client));
    let trace = rollout("r-1", "r", 3, &[3, 4]);
    inbox.full.store(true, Ordering::SeqCst);
    let full = store.commit(&trace).unwrap_err().to_string();
    assert!(full.contains("503"), "{full}");
    assert_eq!(store.get(&trace.episode).unwrap(), None);
    inbox.full.store(false, Ordering::SeqCst);
    assert_eq!(store.commit(&trace).unwrap(), CommitOutcome::New);
    assert_eq!(inbox.stored.lock().unwrap()[&trace.episode], trace);
    // Its agent may ask again, here or at another worker.
    assert_eq!(store.commit(&trace).unwrap(), CommitOutcome::Duplicate);
    assert_eq!(store.get(&trace.episode).unwrap().as_ref(), Some(&trace));
    let other = OwnerTraces::new(Arc::clone(&owner.client));
    assert_eq!(other.commit(&trace).unwrap(), CommitOutcome::New);
    let taken = other.commit(&rollout("r-2", "r", 3, &[5])).unwrap();
    assert_eq!(taken, CommitOutcome::New);
    let taken = store.commit(&rollout("r-2", "r", 3, &[6])).unwrap_err();
    assert!(taken.to_string().contains("409"), "{taken}");
    assert!(store.stats().is_err() && store.take_fence().is_err());
}

#[test]
fn rollouts_of_other_runs_or_unpublished_weights_are_refused() {
    let owner = owner();
    let store = OwnerTraces::new(Arc::clone(&owner.client));
    let refused = |trace: &Trace| store.commit(trace).unwrap_err().to_string();
    let none = refused(&rollout("r-1", "r", 3, &[3]));
    assert!(none.contains("404"), "{none}");
    let inbox = Arc::<Inbox>::default();
    owner.desk.receive(Arc::<Inbox>::clone(&inbox));
    for (trace, word) in [
        (rollout("r-1", "other", 3, &[3]), "of the run"),
        (rollout("r-1", "r", 4, &[3]), "not published"),
    ] {
        let why = refused(&trace);
        assert!(why.contains(word) && why.contains("400"), "{why}");
    }
    let mut torn = rollout("r-1", "r", 3, &[3]);
    torn.nodes[1].logprobs.clear();
    assert!(refused(&torn).contains("400"));
    assert!(inbox.stored.lock().unwrap().is_empty());
}

#[test]
fn the_owner_hears_that_agents_are_at_work() {
    let owner = owner();
    let inbox = Arc::<Inbox>::default();
    owner.desk.receive(Arc::<Inbox>::clone(&inbox));
    let report = |opened: u64| {
        let reading = WorkerReading {
            opened,
            ..WorkerReading::default()
        };
        let worker = "a".into();
        owner.client.report(&WorkerReport { worker, reading }).unwrap();
    };
    report(0);
    assert_eq!(inbox.opened.load(Ordering::SeqCst), 0);
    report(2);
    report(2);
    assert_eq!(inbox.opened.load(Ordering::SeqCst), 1);
}
