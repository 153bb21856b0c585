//! Separate scorers: over a server, several at once, killed, with rows that nothing can score.

use super::feed::trace;
use super::{RUNTIME, client, serve};
use sinew_queue::{Feed, Score, ScoreError, ScoredCounts, ScorerConfig, bury, listed, score_rows};
use sinew_store::StoreError;
use sinew_store::queue::{
    Field, MemoryQueue, NewRow, Order, Queue, QueueError, QueueLimits, RowRequest, RowSelection,
    RowState, Sample, episode, fields, scorer_consumer, trainer_consumer,
};
use sinew_types::{Outcome, Trace};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The reward is the number of sampled tokens; of names that begin with `bad` there is none.
#[derive(Default)]
struct Tokens {
    scored: Mutex<Vec<String>>,
}

impl Score for Tokens {
    fn score(&self, episodes: Vec<Trace>) -> Vec<Result<Outcome, ScoreError>> {
        let one = |trace: Trace| {
            let name = trace.episode.as_str().to_owned();
            if name.starts_with("bad") {
                return Err(ScoreError::Unscored("the judge\nhas no idea".to_owned()));
            }
            self.scored.lock().unwrap().push(name);
            Ok(Outcome {
                reward: trace.sampled_tokens() as f64,
                ..Outcome::default()
            })
        };
        episodes.into_iter().map(one).collect()
    }
}

fn config(lease: Duration) -> ScorerConfig {
    ScorerConfig {
        holder: "tests".into(),
        rows: 3,
        tokens: u64::MAX,
        order: Order::Oldest,
        lease,
        attempts: 2,
        until_empty: true,
    }
}

fn score(queue: &dyn Queue, by: &dyn Score, lease: Duration) -> ScoredCounts {
    score_rows(queue, by, &config(lease), &|| false, &mut |_| {}).unwrap()
}

/// Rewards of the rows that a trainer is given, by key.
fn trained(queue: &dyn Queue) -> Vec<(String, f64, bool)> {
    queue.join(&trainer_consumer("trainer")).unwrap();
    let ask = RowRequest {
        consumer: "trainer".into(),
        holder: "tests".into(),
        // Longer than any clock of a test.
        ttl_ms: 1 << 50,
        take: RowSelection::Sample(Sample::rows(100)),
    };
    let rows = queue.lease(&ask, 0).unwrap().rows;
    let one = |row| {
        let trace = episode(row).unwrap();
        let outcome = trace.outcome;
        (row.key.clone(), outcome.reward, outcome.unscored)
    };
    rows.iter().map(one).collect()
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn several_scorers_over_a_server_score_each_row_once() {
    let directory = tempfile::tempdir().unwrap();
    let now = Arc::new(AtomicU64::new(0));
    let path = directory.path().join("q.sqlite");
    let server = serve(&path, QueueLimits::default(), 0, &now);
    let queue: Arc<dyn Queue> = Arc::new(client(&server));
    let mut feed = Feed::new(Arc::clone(&queue), "run", true).unwrap();
    for group in 0..10 {
        let name = format!("g{group}");
        let episodes: Vec<Trace> = (0..4)
            .map(|n| trace(&format!("{name}-{n}"), &name, n + 1, None))
            .collect();
        feed.put(&episodes, &|| false).unwrap();
    }
    // One died with rows in its hands.
    queue.join(&scorer_consumer()).unwrap();
    let ask = RowRequest {
        consumer: "scorer".into(),
        holder: "one that is killed".into(),
        ttl_ms: 50,
        take: RowSelection::Sample(Sample::rows(5)),
    };
    let dead = queue.lease(&ask, 0).unwrap();
    now.store(50, Ordering::SeqCst);
    let by = Tokens::default();
    let done: Vec<ScoredCounts> = std::thread::scope(|scope| {
        let run = || score(&client(&server), &by, HOUR);
        let running: Vec<_> = (0..3).map(|_| scope.spawn(run)).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_eq!(done.iter().map(|d| d.scored).sum::<usize>(), 40);
    let names = by.scored.lock().unwrap();
    assert_eq!(
        (names.len(), names.iter().collect::<BTreeSet<_>>().len()),
        (40, 40)
    );
    // A late ack changes nothing.
    let late = sinew_store::queue::scored(&dead.rows[0].key, &Outcome::default()).unwrap();
    let settled = queue.ack("scorer", dead.lease.unwrap(), &[late]).unwrap();
    assert_eq!(settled.lost.len(), 1);
    let given = trained(queue.as_ref());
    assert_eq!(given.len(), 40);
    for (key, reward, unscored) in given {
        let n: f64 = key.rsplit('-').next().unwrap().parse().unwrap();
        assert_eq!((reward, unscored), (n + 1.0, false), "{key}");
    }
    RUNTIME.block_on(server.stop());
}

#[test]
fn a_row_that_cannot_be_scored_goes_on_without_a_reward_after_some_attempts() {
    let queue: Arc<dyn Queue> = Arc::new(MemoryQueue::in_memory(QueueLimits::default()));
    let mut feed = Feed::new(Arc::clone(&queue), "run", true).unwrap();
    let group = [trace("bad", "g", 1, None), trace("good", "g", 2, None)];
    feed.put(&group, &|| false).unwrap();
    // A row that is not an episode dies, with the reason, and comes back when it is revived.
    queue
        .put(&[NewRow::new("junk", Field::new(fields::TRACE, "junk"))])
        .unwrap();
    let done = score(queue.as_ref(), &Tokens::default(), HOUR);
    assert_eq!((done.scored, done.unscored, done.lost), (1, 1, 0));
    assert_eq!(
        done.failed,
        1 + QueueLimits::default().max_attempts as usize
    );
    let given = trained(queue.as_ref());
    assert_eq!(
        given,
        [
            ("run:bad".into(), 0.0, true),
            ("run:good".into(), 2.0, false)
        ]
    );
    let dead = |row: &sinew_store::queue::RowView| matches!(row.state("scorer"), Some(RowState::Dead { reason }) if reason.contains("junk"));
    assert_eq!(listed(queue.as_ref(), None, 9, &dead).unwrap().len(), 1);
    assert_eq!(queue.revive("scorer", &["junk".into()]).unwrap(), 1);
    // A person puts it out of the way.
    let junk = ["junk".to_owned()];
    assert_eq!(
        bury(queue.as_ref(), "scorer", &junk, "not an episode").unwrap(),
        1
    );
    assert_eq!(
        bury(queue.as_ref(), "scorer", &junk, "not an episode").unwrap(),
        0
    );
    let leased = bury(queue.as_ref(), "trainer", &["run:good".into()], "no");
    let refused = leased.unwrap_err();
    assert!(
        matches!(refused, StoreError::Queue(QueueError::NotReady { .. })),
        "{refused}"
    );
}

/// Says that it should stop while the first rows are scored.
struct Slow<'a>(&'a AtomicU64);

impl Score for Slow<'_> {
    fn score(&self, episodes: Vec<Trace>) -> Vec<Result<Outcome, ScoreError>> {
        self.0.store(1, Ordering::SeqCst);
        episodes.iter().map(|_| Ok(Outcome::default())).collect()
    }
}

#[test]
fn a_scorer_that_is_to_stop_gives_its_rows_back() {
    let queue: Arc<dyn Queue> = Arc::new(MemoryQueue::in_memory(QueueLimits::default()));
    let mut feed = Feed::new(Arc::clone(&queue), "run", true).unwrap();
    feed.put(&[trace("a", "g", 1, None)], &|| false).unwrap();
    let stops = AtomicU64::new(0);
    let stop = || stops.load(Ordering::SeqCst) == 1;
    let by = Slow(&stops);
    let done = score_rows(queue.as_ref(), &by, &config(HOUR), &stop, &mut |_| {}).unwrap();
    assert_eq!(done, ScoredCounts::default());
    let state = queue.state("scorer", "run:a").unwrap();
    assert_eq!(state, Some(RowState::Ready));
}
