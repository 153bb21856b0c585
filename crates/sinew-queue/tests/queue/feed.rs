//! Producers: groups of episodes become rows once, whichever process is killed.

use super::support::LIMITS;
use sinew_queue::{Feed, FeedOutcome};
use sinew_store::queue::{
    MemoryQueue, Queue, QueueLimits, RowRequest, RowSelection, Sample, episode, scorer_consumer,
    trainer_consumer,
};
use sinew_store::{MemoryStore, TraceStore};
use sinew_types::{
    EpisodeEnd, EpisodeId, FailureKind, GroupId, NO_PARENT, Node, Outcome, PolicyVersion,
    TRACE_FORMAT_VERSION, TaskId, TokenKind, Trace, VersionSpan,
};
use std::sync::Arc;

/// An episode with `tokens` sampled tokens of version 3, and a reward if there is one.
pub(crate) fn trace(name: &str, group: &str, tokens: usize, reward: Option<f64>) -> Trace {
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], Vec::new());
    let ids = (0..tokens as u32).collect();
    let mut said = Node::given(0, 1, TokenKind::Sampled, ids, Vec::new());
    said.logprobs = vec![-0.5; tokens];
    said.versions = vec![VersionSpan {
        start: 0,
        len: tokens as u32,
        version: PolicyVersion(3),
    }];
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new(name),
        group: GroupId::new(group),
        task: TaskId::new("t"),
        task_kind: "kind".into(),
        origin: sinew_types::Origin::default(),
        provenance: sinew_types::Provenance::default(),
        nodes: vec![prompt, said],
        outcome: Outcome {
            reward: reward.unwrap_or_default(),
            unscored: reward.is_none(),
            ..Outcome::default()
        },
        end: EpisodeEnd::Terminated,
        timing: sinew_types::Timing::default(),
        ignored: std::collections::BTreeMap::new(),
    }
}

fn queue() -> Arc<dyn Queue> {
    Arc::new(MemoryQueue::in_memory(QueueLimits::default()))
}

const GO_ON: &dyn Fn() -> bool = &|| false;

#[test]
fn a_group_is_put_whole_and_once() {
    let queue = queue();
    let mut feed = Feed::new(Arc::clone(&queue), "run", true).unwrap();
    let mut failed = trace("c", "g", 5, None);
    failed.end = EpisodeEnd::Failed {
        kind: FailureKind::Engine,
        message: "gone".into(),
    };
    let group = [
        trace("a", "g", 3, None),
        trace("b", "g", 4, Some(1.0)),
        failed,
    ];
    assert_eq!(feed.put(&group, GO_ON).unwrap(), FeedOutcome::New(2));
    assert_eq!(feed.put(&group, GO_ON).unwrap(), FeedOutcome::Known);
    assert_eq!(feed.put(&group[2..], GO_ON).unwrap(), FeedOutcome::Known);
    // Another session of the producer finds them.
    let mut again = Feed::new(Arc::clone(&queue), "run", true).unwrap();
    assert_eq!(
        (again.known(), again.put(&group, GO_ON).unwrap()),
        (2, FeedOutcome::Known)
    );
    // Another producer has separate keys.
    let mut other = Feed::new(Arc::clone(&queue), "other", false).unwrap();
    assert_eq!(other.put(&group[..1], GO_ON).unwrap(), FeedOutcome::New(1));
    queue.join(&scorer_consumer()).unwrap();
    queue.join(&trainer_consumer("trainer")).unwrap();
    let stats = queue.stats().unwrap();
    // An episode that has its reward is not left to a scorer.
    assert_eq!(
        (stats.of("scorer").ready, stats.of("trainer").ready),
        (1, 2)
    );
    let ask = RowRequest {
        consumer: "trainer".into(),
        holder: "tests".into(),
        ttl_ms: 1000,
        take: RowSelection::Sample(Sample {
            whole_groups: true,
            ..Sample::rows(9)
        }),
    };
    let loan = queue.lease(&ask, 0).unwrap();
    assert_eq!(loan.rows.len(), 1, "the group of `run` lacks a reward");
    let row = &loan.rows[0];
    assert_eq!(
        (row.key.as_str(), row.tokens, row.version),
        ("other:a", 3, 3)
    );
    let read = episode(row).unwrap();
    assert_eq!(read, group[0]);
}

#[test]
fn what_the_store_has_and_the_queue_lacks_is_put() {
    let (queue, store) = (queue(), MemoryStore::new(1 << 20));
    for n in 0..4 {
        store
            .commit(&trace(&format!("e{n}"), "g", 2, Some(0.5)))
            .unwrap();
    }
    let mut feed = Feed::new(Arc::clone(&queue), "gateway", true).unwrap();
    assert_eq!(feed.restore(&store, 1, GO_ON).unwrap(), 4);
    queue
        .remove(&["gateway:e0".into(), "gateway:e2".into()])
        .unwrap();
    let mut feed = Feed::new(Arc::clone(&queue), "gateway", true).unwrap();
    // Episodes older than every known row were done and forgotten.
    assert_eq!(feed.restore(&store, 1, GO_ON).unwrap(), 1);
    let keys: Vec<_> = queue
        .rows(None, 9)
        .unwrap()
        .into_iter()
        .map(|r| r.key)
        .collect();
    assert_eq!(keys, ["gateway:e1", "gateway:e3", "gateway:e2"]);
}

#[test]
fn a_producer_that_is_to_stop_does_not_wait_for_room() {
    let queue: Arc<dyn Queue> = Arc::new(MemoryQueue::in_memory(QueueLimits {
        max_rows: 1,
        max_bytes: 1 << 20,
        ..LIMITS
    }));
    let mut feed = Feed::new(Arc::clone(&queue), "run", false).unwrap();
    assert_eq!(
        feed.put(&[trace("a", "g", 1, Some(1.0))], GO_ON).unwrap(),
        FeedOutcome::New(1)
    );
    let put = feed
        .put(&[trace("b", "g", 1, Some(1.0))], &|| true)
        .unwrap();
    assert_eq!(put, FeedOutcome::Stopped);
    let large = [trace("c", "h", 1, Some(1.0)), trace("d", "h", 1, Some(1.0))];
    assert!(feed.put(&large, GO_ON).is_err(), "it would never fit");
}
