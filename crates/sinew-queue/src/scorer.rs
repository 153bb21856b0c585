//! Rows without a reward get one: a consumer that can run in any number of processes.
//!
//! A scorer that is killed loses nothing: its rows go to another one when its lease ends. Its scores count
//! once, as only the lease that holds a row can ack it.

use crate::server::system_clock;
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, LeaseId, LeasedRow, Order, Queue, RowRequest, RowSelection, Sample, episode, scored,
    scorer_consumer,
};
use sinew_types::{Outcome, TaskId, Trace};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Longest wait for rows before it is looked whether to stop.
const LOOK: Duration = Duration::from_secs(1);

/// Reasons for which an episode has no outcome now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScoreError {
    /// The reason of the reward.
    #[error("{0}")]
    Unscored(String),
    #[error("task {0} is not among those of the scorer's recipe")]
    OtherTask(TaskId),
}

/// Scores episodes; blocks.
pub trait Score: Sync {
    /// The outcome of each, or the reason why it has none now.
    fn score(&self, episodes: Vec<Trace>) -> Vec<Result<Outcome, ScoreError>>;
}

/// Settings of a scorer.
#[derive(Clone, Debug)]
pub struct ScorerConfig {
    /// Name of the scorer, for reports.
    pub holder: String,
    /// Rows of one lease.
    pub rows: usize,
    /// Sampled tokens of one lease.
    pub tokens: u64,
    pub order: Order,
    /// Time until its rows go to another scorer; the lease is renewed while they are scored.
    pub lease: Duration,
    /// Deliveries of a row, after which it is left without a reward, for the last reason; before, it is
    /// returned to be tried again.
    pub attempts: u32,
    /// Ends once no row waits for a reward, in place of waiting for more.
    pub until_empty: bool,
}

/// Counts of a scorer's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ScoredCounts {
    /// Rows that got a reward.
    pub scored: usize,
    /// Rows that were left without one for good.
    pub unscored: usize,
    /// Number of deliveries without a result; their rows were returned.
    pub failed: usize,
    /// Rows whose lease had gone to another meanwhile.
    pub lost: usize,
}

/// Scores rows until there are none, or `stop` is true, which gives unfinished ones back. `report` gets the
/// counts after each lease.
///
/// # Errors
/// If the queue cannot be reached, or another consumer writes rewards.
pub fn score_rows(
    queue: &dyn Queue,
    score: &dyn Score,
    config: &ScorerConfig,
    stop: &dyn Fn() -> bool,
    report: &mut dyn FnMut(ScoredCounts),
) -> Result<ScoredCounts, StoreError> {
    let consumer = scorer_consumer();
    queue.join(&consumer)?;
    let clock = system_clock();
    let ttl_ms = (config.lease.as_millis() as u64).max(1);
    let ask = RowRequest {
        consumer: consumer.name.clone(),
        holder: config.holder.clone(),
        ttl_ms,
        take: RowSelection::Sample(Sample {
            tokens: config.tokens,
            order: config.order,
            ..Sample::rows(config.rows)
        }),
    };
    let work = Work {
        queue,
        score,
        config,
        consumer: &consumer.name,
        clock: clock.as_ref(),
        ttl_ms,
    };
    let mut done = ScoredCounts::default();
    loop {
        let seen = queue.wait(0, Duration::ZERO)?;
        if stop() {
            return Ok(done);
        }
        let loan = queue.lease(&ask, clock())?;
        let Some(lease) = loan.lease else {
            let of = queue.stats()?.of(&consumer.name);
            if config.until_empty && of.ready + of.leased == 0 {
                return Ok(done);
            }
            queue.wait(seen, LOOK)?;
            continue;
        };
        work.rows(lease, loan.rows, &mut done, stop)?;
        report(done);
    }
}

/// Context for the rows of a lease.
struct Work<'a> {
    queue: &'a dyn Queue,
    score: &'a dyn Score,
    config: &'a ScorerConfig,
    consumer: &'a str,
    clock: &'a (dyn Fn() -> u64 + Send + Sync),
    ttl_ms: u64,
}

impl Work<'_> {
    /// Scores the rows of a lease and acks them, in one call for those that have an outcome.
    fn rows(
        &self,
        lease: LeaseId,
        rows: Vec<LeasedRow>,
        done: &mut ScoredCounts,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), StoreError> {
        let (mut traces, mut whole, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            match episode(&row) {
                Ok(trace) => {
                    traces.push(trace);
                    whole.push((row.key, row.attempt));
                }
                Err(error) => failed.push((row.key, error.to_string())),
            }
        }
        let keys: Vec<String> = whole.iter().map(|(key, _)| key.clone()).collect();
        let Some(outcomes) = self.scored(lease, &keys, traces, stop)? else {
            self.queue.release(self.consumer, lease, &keys)?;
            return Ok(());
        };
        let (mut acks, mut unscored): (Vec<AckedRow>, usize) = (Vec::new(), 0);
        for ((key, attempt), outcome) in whole.into_iter().zip(outcomes) {
            match outcome {
                Ok(outcome) => acks.push(scored(&key, &outcome)?),
                Err(why) if attempt < self.config.attempts => failed.push((key, why.to_string())),
                Err(why) => {
                    unscored += 1;
                    acks.push(scored(&key, &without(&why.to_string()))?);
                }
            }
        }
        let settled = self.queue.ack(self.consumer, lease, &acks)?;
        done.unscored += unscored;
        done.scored += (acks.len() - unscored).saturating_sub(settled.lost.len());
        done.lost += settled.lost.len();
        for (key, why) in failed {
            tracing::warn!(row = %key, why, "a row was not scored");
            self.queue.fail(self.consumer, lease, &[key], &why)?;
            done.failed += 1;
        }
        Ok(())
    }

    /// The outcomes of episodes, while the lease on them is renewed; `None` if it is to stop.
    fn scored(
        &self,
        lease: LeaseId,
        keys: &[String],
        traces: Vec<Trace>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Result<Outcome, ScoreError>>>, StoreError> {
        if traces.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let every = Duration::from_millis((self.ttl_ms / 3).max(1));
        std::thread::scope(|scope| {
            let (sender, outcomes) = sync_channel(1);
            scope.spawn(move || {
                // Nothing waits for it any more if the queue could not be reached.
                let _ = sender.send(self.score.score(traces));
            });
            loop {
                match outcomes.recv_timeout(every.min(LOOK)) {
                    Ok(scored) => return Ok((!stop()).then_some(scored)),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(None),
                }
                let now = (self.clock)();
                self.queue
                    .renew(self.consumer, lease, keys, self.ttl_ms, now)?;
            }
        })
    }
}

/// The outcome of an episode that has no reward.
fn without(why: &str) -> Outcome {
    Outcome {
        unscored: true,
        unscored_reason: why.lines().next().map(str::to_owned),
        ..Outcome::default()
    }
}
