//! The port of rollouts over a queue in memory, with workers that are a few lines of the test.

use sinew_env::tiny::TinyTaskset;
use sinew_env::{Action, Env, EnvError, EnvFactory, Split};
use sinew_orchestrator::Draw;
use sinew_pipeline::{ChangedParts, Rollouts, StoredEpisodes, StoredParts};
use sinew_queue::system_clock;
use sinew_rollout::{EpisodeLimits, EpisodeOptions, RunInfo};
use sinew_store::queue::{
    AckedRow, Field, MemoryQueue, Queue, QueueLimits, RowRequest, RowSelection, Sample, pack,
};
use sinew_store::{MemoryStore, TraceStore};
use sinew_types::{
    EpisodeEnd, EpisodeId, GroupId, Lineage, NO_PARENT, Node, PolicyVersion, SamplingParams, Task,
    Thinking, TokenKind, Trace, VersionSpan, WeightsId,
};
use sinew_workers::{Desk, ROLLOUT, RemoteParts, RemoteRollouts, RunTerms, Ticket};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Environments that this process never makes: workers have them.
struct Elsewhere;

impl EnvFactory for Elsewhere {
    fn name(&self) -> &str {
        "elsewhere"
    }

    fn version(&self) -> &str {
        "1"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Err(EnvError::Task {
            task: task.id.to_string(),
            message: "none is made here".into(),
        })
    }

    fn gold(&self, _: &Task, _: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

fn options() -> EpisodeOptions {
    EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: 2,
            max_turn_tokens: 3,
            max_context_tokens: 64,
        },
        sampling: SamplingParams::default(),
        chunk_tokens: None,
        replay_always: false,
        thinking: Thinking::Kept,
        boot_timeout: Duration::from_secs(1),
        timeout: Duration::from_secs(1),
        score_timeout: Duration::from_secs(1),
    }
}

/// An owner with its queue and store.
struct Owner {
    rollouts: RemoteRollouts,
    queue: Arc<MemoryQueue>,
    store: Arc<MemoryStore>,
    desk: Arc<Desk>,
    cancel: watch::Sender<bool>,
    _runtime: Runtime,
}

fn owner(attempts: u32) -> Owner {
    let runtime = Runtime::new().unwrap();
    let queue = Arc::new(MemoryQueue::in_memory(QueueLimits {
        max_attempts: attempts,
        ..QueueLimits::default()
    }));
    let store = Arc::new(MemoryStore::new(1 << 20));
    let terms = RunTerms {
        run: "r".into(),
        id: "r-1".into(),
        fence: 1,
        recipe: String::new(),
        build: "1".into(),
        parts: std::collections::BTreeMap::new(),
        weights: false,
        lease_ms: 1000,
    };
    let desk = Arc::new(Desk::new(terms, None));
    desk.publish(WeightsId::new(PolicyVersion(3), Lineage(0)), None);
    let run = Arc::new(RunInfo::default());
    let traces: Arc<dyn TraceStore> = Arc::<MemoryStore>::clone(&store);
    let stored = StoredEpisodes::new(StoredParts {
        store: traces,
        envs: Arc::new(Elsewhere),
        renderer: Arc::new(sinew_render::TinyRenderer::new("ab")),
        run: Arc::clone(&run),
        score_timeout: Duration::from_secs(1),
        changed: ChangedParts::Keep,
    });
    let parts = RemoteParts {
        queue: Arc::<MemoryQueue>::clone(&queue),
        clock: system_clock(),
        desk: Arc::clone(&desk),
        stored,
        taskset: Arc::new(TinyTaskset::new(0)),
        options: options(),
        turns: None,
        run,
        max_out: 64,
        waiting: Box::new(|_| {}),
    };
    let (cancel, cancelled) = watch::channel(false);
    let handle = runtime.handle().clone();
    Owner {
        rollouts: RemoteRollouts::new(parts, handle, cancelled).unwrap(),
        queue,
        store,
        desk,
        cancel,
        _runtime: runtime,
    }
}

fn draw(number: u64) -> Draw {
    Draw {
        episode: EpisodeId::new(format!("d{number:08}-e0")),
        group: GroupId::new(format!("d{number:08}")),
        split: Split::Train,
        task: 0,
        draw: number,
        purpose: "train".into(),
        seed: number,
    }
}

/// The trace of a ticket, sampled by a version.
fn trace(ticket: &Ticket, version: u64) -> Trace {
    let mut trace = ticket
        .spec()
        .empty_trace(&RunInfo::default(), &SamplingParams::default());
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], Vec::new());
    let mut turn = Node::given(0, 1, TokenKind::Sampled, vec![3, 4], Vec::new());
    turn.logprobs = vec![-0.5, -0.5];
    turn.versions = VersionSpan::whole(2, PolicyVersion(version));
    trace.nodes = vec![prompt, turn];
    trace
}

impl Owner {
    /// A worker runs up to so many tickets with weights of a version. Returns their episodes.
    fn works(&self, rows: usize, version: u64) -> Vec<EpisodeId> {
        let ask = RowRequest {
            consumer: ROLLOUT.into(),
            holder: "w".into(),
            ttl_ms: 60_000,
            take: RowSelection::Sample(Sample::rows(rows)),
        };
        let batch = self.queue.lease(&ask, system_clock()()).unwrap();
        let mut episodes = Vec::new();
        for row in batch.rows {
            let ticket = Ticket::of_row(&row).unwrap();
            let value = pack(&row.key, &trace(&ticket, version)).unwrap();
            let acked = AckedRow {
                key: row.key,
                fields: vec![Field::new("trace", value)],
            };
            self.queue
                .ack(ROLLOUT, batch.lease.unwrap(), &[acked])
                .unwrap();
            episodes.push(ticket.episode);
        }
        episodes
    }

    /// Workers lease all tickets and die.
    fn dies(&self) {
        let ask = RowRequest {
            consumer: ROLLOUT.into(),
            holder: "dead".into(),
            ttl_ms: 1,
            take: RowSelection::Sample(Sample::rows(64)),
        };
        let batch = self.queue.lease(&ask, 0).unwrap();
        assert!(!batch.rows.is_empty());
        self.queue.sweep(0, system_clock()()).unwrap();
    }

    /// Looks once, and does not wait.
    fn look(&mut self) -> Vec<Trace> {
        (self.rollouts.waker())();
        self.ended()
    }

    fn ended(&mut self) -> Vec<Trace> {
        let ended = self.rollouts.ended(&mut |_| {}).unwrap();
        ended.into_iter().map(|e| e.trace).collect()
    }
}

#[test]
fn traces_are_stored_before_they_are_given_and_known_ones_are_not_run() {
    let mut owner = owner(4);
    owner.rollouts.start(&[draw(0), draw(1)], None).unwrap();
    assert_eq!(owner.works(8, 3).len(), 2);
    let ended = owner.ended();
    assert_eq!(ended.len(), 2);
    assert!(!owner.rollouts.is_running());
    for trace in &ended {
        assert!(owner.store.get(&trace.episode).unwrap().is_some());
    }
    owner.rollouts.start(&[draw(0)], None).unwrap();
    assert!(owner.works(8, 3).is_empty(), "the store has it");
    assert_eq!(owner.ended().len(), 1);
    let stats = owner.queue.stats().unwrap();
    assert_eq!((stats.rows, stats.done), (0, 2));
}

#[test]
fn a_stopped_ticket_leaves_the_queue_and_its_late_trace_is_not_given() {
    let mut owner = owner(4);
    owner.rollouts.start(&[draw(0), draw(1)], None).unwrap();
    owner.rollouts.stop(&[draw(0).episode]);
    assert_eq!(owner.works(8, 3), [draw(1).episode]);
    let ended = owner.ended();
    assert_eq!(ended[0].episode, draw(1).episode);
    assert!(!owner.rollouts.is_running());
    assert!(owner.store.get(&draw(0).episode).unwrap().is_none());
}

#[test]
fn weights_that_are_not_allowed_are_refused_until_the_episode_fails() {
    let mut owner = owner(4);
    owner.rollouts.start(&[draw(0)], None).unwrap();
    let mut given = Vec::new();
    // A version that was never published, then one that is too old.
    for version in [9, 2, 9] {
        assert_eq!(owner.works(1, version).len(), 1);
        // The first look refuses the trace, the next one issues the ticket again.
        given.extend(owner.look());
        given.extend(owner.look());
    }
    let EpisodeEnd::Failed { message, .. } = &given[0].end else {
        panic!("{given:?}");
    };
    assert!(message.contains("refused"), "{message}");
}

#[test]
fn a_ticket_whose_workers_all_die_becomes_a_failed_episode() {
    let mut owner = owner(2);
    owner.rollouts.start(&[draw(0)], None).unwrap();
    owner.dies();
    owner.dies();
    let ended = owner.ended();
    let EpisodeEnd::Failed { message, .. } = &ended[0].end else {
        panic!("{ended:?}");
    };
    assert!(message.contains("no worker"), "{message}");
    assert!(owner.store.get(&draw(0).episode).unwrap().is_some());
}

#[test]
fn a_run_that_is_asked_to_stop_pauses_its_workers() {
    let mut owner = owner(4);
    owner.rollouts.start(&[draw(0)], None).unwrap();
    owner.cancel.send_replace(true);
    let error = owner.rollouts.ended(&mut |_| {}).unwrap_err();
    assert!(error.is_interrupt());
    assert_eq!(owner.desk.load().1, 0);
}
