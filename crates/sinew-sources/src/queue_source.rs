//! A queue of episodes as a source: groups are leased, stored here, trained, and acked once their update is
//! committed.
//!
//! The queue lies in another file, or on another machine, than the commits of the run. So the commit decides:
//! it names the leases with their rows, with the step and the version of the weights, and the ack follows it.
//! If a crash comes between the two, the run acks when it resumes: until then the rows stay leased
//! ([`IN_DOUBT`]). After a crash before the commit, the queue gets the rows back once their lease ends. A run
//! that resumes in time still holds them; one that resumes too late leaves out the rows that another trainer
//! has taken. An episode that the store has is not trained a second time, whatever the queue reports.

use crate::lease_renewal::{Lease, LeaseRenewal, now_ms};
use crate::ledger::{Ledger, StepLeases};
use crate::pool_source::{stored_step, unusable, usable_groups};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_orchestrator::PipelineError;
use sinew_pipeline::{GroupRequest, SampleSource, SourceGroups};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, LeaseId, LeasedRow, MAX_CALL_ROWS, Queue, RowRequest, RowSelection, Sample, episode,
    trainer_consumer,
};
use sinew_types::{EpisodeId, GroupId, Origin, Trace};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Longest wait for rows before it is looked whether the run is to stop.
const LOOK: Duration = Duration::from_secs(1);

/// Lease time of rows that an update consumes, from just before its commit. They are acked at once after it.
/// A run that is killed between the two acks them when it resumes, and nothing else trains them until then.
const IN_DOUBT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Settings for a run that draws from a queue.
#[derive(Clone, Debug)]
pub struct QueueSourceConfig {
    /// Folder of the run, which notes what each step leased.
    pub run_dir: PathBuf,
    /// Name under which each row is trained once.
    pub consumer: String,
    /// Maximum wait of a step for its groups.
    pub wait: Duration,
    /// Time for which the queue holds them for this run.
    pub lease: Duration,
    /// Minimum episodes of a group that the algorithm can use.
    pub min_group: usize,
}

/// Queue from which a run draws its episodes.
#[derive(Debug)]
pub struct QueueSource {
    /// Queue in this process, in a folder, or on a server.
    queue: Arc<dyn Queue>,
    /// Rules by which rows are leased.
    config: QueueSourceConfig,
    /// Names this session in leases.
    holder: String,
    /// Keeps what is leased until it is committed.
    holds: LeaseRenewal,
    /// Rows that each step took; a file in the run's folder.
    ledger: Ledger,
    /// The steps in which each row went to another trainer.
    gone: BTreeMap<String, BTreeSet<u64>>,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
}

/// Rows that an update consumes, as its commit records them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ConsumedRows {
    consumer: String,
    leases: Vec<Lease>,
}

/// Tokens of the longest path.
fn longest(trace: &Trace) -> usize {
    let paths = trace
        .leaves()
        .into_iter()
        .map(|l| trace.path_tokens(l).len());
    paths.max().unwrap_or_default()
}

impl QueueSource {
    /// A queue for the run in a folder. `cancel` ends a wait.
    ///
    /// # Errors
    /// If the queue cannot be reached, or its consumer of this name needs something else.
    pub fn new(
        queue: Arc<dyn Queue>,
        config: QueueSourceConfig,
        cancel: watch::Receiver<bool>,
    ) -> Result<Self, PipelineError> {
        queue
            .join(&trainer_consumer(&config.consumer))
            .map_err(refused)?;
        let name = config.run_dir.file_name().unwrap_or_default();
        let holder = format!("{:.64}", name.to_string_lossy());
        let (renewed, consumer) = (Arc::clone(&queue), config.consumer.clone());
        let holds = LeaseRenewal::new(renewed, consumer, holder.clone(), config.lease);
        let ledger = Ledger::new(config.run_dir.join("queue.jsonl"));
        Ok(Self {
            holder,
            holds: holds.map_err(PipelineError::system)?,
            gone: ledger.lost()?,
            ledger,
            queue,
            config,
            cancel,
        })
    }

    /// Returns the groups for a step that arrive in time, up to the wanted number; none if the queue stays
    /// empty. Unusable groups are returned to the queue with the reason, and are dead after a few attempts.
    fn draw(&self, wanted: &mut GroupRequest<'_>) -> Result<Vec<Trace>, PipelineError> {
        let step = wanted.step;
        if let Some(before) = self.ledger.taken(step)? {
            // Rows that were given out but never stored go back to the queue before anything is drawn.
            self.give_back(&before)?;
        }
        let mut taken = StepLeases {
            step,
            ..StepLeases::default()
        };
        let (mut traces, begun) = (Vec::new(), Instant::now());
        while taken.leases.len() < wanted.groups {
            if *self.cancel.borrow() {
                self.give_back(&taken)?;
                return Err(PipelineError::Interrupted);
            }
            let seen = self.queue.wait(0, Duration::ZERO).map_err(lost)?;
            let Some((lease, rows)) = self.lease()? else {
                let left = self.config.wait.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    break;
                }
                (wanted.tick)(taken.leases.len(), wanted.groups);
                self.queue.wait(seen, left.min(LOOK)).map_err(lost)?;
                continue;
            };
            let keys: Vec<String> = rows.iter().map(|row| row.key.clone()).collect();
            let place = (step - 1) * wanted.groups as u64 + taken.leases.len() as u64;
            if let Some(group) = self.group(wanted, lease, rows, place)? {
                traces.extend(group);
                self.holds.add(lease, &keys);
                taken.leases.push((lease.0, keys));
            }
        }
        if !traces.is_empty() {
            self.ledger.note(&taken)?;
        }
        Ok(traces)
    }

    /// A lease on one whole group; `None` if none is ready.
    fn lease(&self) -> Result<Option<(LeaseId, Vec<LeasedRow>)>, PipelineError> {
        let ask = RowRequest {
            consumer: self.config.consumer.clone(),
            holder: self.holder.clone(),
            ttl_ms: self.config.lease.as_millis() as u64,
            // One group is given although it is larger than a byte, and no second one.
            take: RowSelection::Sample(Sample {
                bytes: 1,
                whole_groups: true,
                ..Sample::rows(MAX_CALL_ROWS)
            }),
        };
        let loan = self.queue.lease(&ask, now_ms()).map_err(lost)?;
        Ok(loan.lease.map(|lease| (lease, loan.rows)))
    }

    /// The episodes of a lease as the run's own, of the draw `place`; `None` if they cannot be used, or the
    /// run has them already.
    fn group(
        &self,
        wanted: &GroupRequest<'_>,
        lease: LeaseId,
        rows: Vec<LeasedRow>,
        place: u64,
    ) -> Result<Option<Vec<Trace>>, PipelineError> {
        let consumer = &self.config.consumer;
        let keys: Vec<String> = rows.iter().map(|row| row.key.clone()).collect();
        let step = wanted.step;
        let known = keys.iter().any(|key| {
            let stored = wanted.store.get(&self.own_id(key, step));
            stored.is_ok_and(|trace| trace.is_some())
        });
        if known {
            let done: Vec<AckedRow> = keys.iter().map(AckedRow::of).collect();
            self.queue.ack(consumer, lease, &done).map_err(lost)?;
            return Ok(None);
        }
        let own = |row: &LeasedRow| own(row, self.own_id(&row.key, step), place);
        let made: Result<Vec<Trace>, StoreError> = rows.iter().map(own).collect();
        let reason = match &made {
            Err(error) => Some(error.to_string()),
            Ok(group) => self.unusable(wanted, group),
        };
        match (made, reason) {
            (Ok(group), None) => Ok(Some(group)),
            (_, reason) => {
                let reason = reason.unwrap_or_default();
                tracing::error!(
                    first = %keys[0], rows = keys.len(), reason,
                    "a group of the queue cannot be used: it is given back"
                );
                let failed = self.queue.fail(consumer, lease, &keys, &reason);
                failed.map_err(lost)?;
                Ok(None)
            }
        }
    }

    /// Reason why a group cannot be trained, whatever else is in the batch.
    fn unusable(&self, wanted: &GroupRequest<'_>, group: &Vec<Trace>) -> Option<String> {
        let least = self.config.min_group;
        if group.len() < least {
            let has = group.len();
            return Some(format!(
                "a group of {has}, but the algorithm compares {least} episodes or more"
            ));
        }
        let most = wanted.max_path_tokens;
        if let Some(long) = group.iter().map(longest).find(|tokens| *tokens > most) {
            return Some(format!(
                "a path of {long} tokens, allowed: {most} (rollout.max_context_tokens)"
            ));
        }
        unusable(wanted.algorithm, group)
    }

    /// The name of a row's episode in the run's own store. A row that was stored for a step, then went to
    /// another trainer, and came back comes under another name: the store has the first one, which nothing
    /// trained.
    fn own_id(&self, key: &str, step: u64) -> EpisodeId {
        let times = self.gone.get(key).map_or(0, |s| s.range(..step).count());
        EpisodeId::new(match times {
            0 => format!("queue-{key}"),
            times => format!("queue-{key}-again{times}"),
        })
    }

    /// Releases the leases of a step that is drawn again.
    fn give_back(&self, taken: &StepLeases) -> Result<(), PipelineError> {
        self.holds.set(Vec::new());
        for (lease, keys) in &taken.leases {
            let lease = LeaseId(*lease);
            let back = self.queue.release(&self.config.consumer, lease, keys);
            back.map_err(lost)?;
        }
        Ok(())
    }

    /// Renews the leases of a step's rows for `ttl`, and writes down the changes. Returns the leases that the
    /// step holds, with all its rows that went to another trainer of this name, and the number of rows that
    /// this call found lost.
    fn hold(&mut self, step: u64, ttl: Duration) -> Result<(StepLeases, usize), PipelineError> {
        self.holds.set(Vec::new());
        let before = self.ledger.taken(step)?.unwrap_or_default();
        let kept = self.holds.keep(&before.leases, ttl).map_err(lost)?;
        let now = kept.lost.len();
        let taken = StepLeases {
            step,
            leases: kept.leases,
            lost: [before.lost.clone(), kept.lost].concat(),
        };
        if taken.leases != before.leases || taken.lost != before.lost {
            self.ledger.note(&taken)?;
        }
        for key in &taken.lost {
            self.gone.entry(key.clone()).or_default().insert(step);
        }
        Ok((taken, now))
    }
}

/// The episode of a row under the name that it has in the run's own store.
fn own(row: &LeasedRow, id: EpisodeId, draw: u64) -> Result<Trace, StoreError> {
    let trace = episode(row)?;
    let group = match row.group.as_str() {
        "" => &row.key,
        group => group,
    };
    Ok(Trace {
        episode: id,
        group: GroupId::new(format!("queue-{group}")),
        origin: Origin {
            draw,
            purpose: "train".into(),
            ..trace.origin
        },
        ..trace
    })
}

/// A queue that is not there, or not any more.
fn lost(error: StoreError) -> PipelineError {
    PipelineError::system(format!("data.queue: {error}"))
}

/// A queue that refuses the recipe's consumer.
fn refused(error: StoreError) -> PipelineError {
    match error {
        StoreError::Queue(error) => {
            PipelineError::input(format!("data.consumer: {error}; choose another name"))
        }
        other => lost(other),
    }
}

impl SampleSource for QueueSource {
    fn groups(&mut self, mut wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let mut traces = stored_step(wanted.store, wanted.step, wanted.groups as u64)?;
        if traces.is_empty() {
            traces = self.draw(&mut wanted)?;
            let stored = wanted.store.commit_batch(&traces);
            stored.map_err(PipelineError::system)?;
        }
        let (taken, _) = self.hold(wanted.step, self.config.lease)?;
        self.holds.set(taken.leases);
        let own = |key: &String| self.own_id(key, wanted.step);
        let lost: BTreeSet<EpisodeId> = taken.lost.iter().map(own).collect();
        Ok(usable_groups(wanted.algorithm, traces, &lost))
    }

    fn consumes(&mut self, step: u64) -> Result<Option<Value>, PipelineError> {
        let (taken, now) = self.hold(step, IN_DOUBT)?;
        if now > 0 {
            return Err(PipelineError::system(format!(
                "data.queue: {now} rows of step {step} went to another trainer while they were trained, {last} the last \
                 of them: the step is not committed\n  hint: --resume trains it without them; with a longer \
                 data.lease_s rows stay leased while the queue cannot be reached",
                last = taken.lost.last().map_or("", String::as_str)
            )));
        }
        if taken.leases.is_empty() {
            return Ok(None);
        }
        let consumed = ConsumedRows {
            consumer: self.config.consumer.clone(),
            leases: taken.leases,
        };
        let consumed = serde_json::to_value(consumed);
        consumed.map(Some).map_err(PipelineError::system)
    }

    fn committed(&mut self, consumed: &Value) -> Result<(), PipelineError> {
        let consumed: ConsumedRows =
            ConsumedRows::deserialize(consumed).map_err(PipelineError::system)?;
        for (lease, keys) in consumed.leases {
            let done: Vec<AckedRow> = keys.iter().map(AckedRow::of).collect();
            let acked = self.queue.ack(&consumed.consumer, LeaseId(lease), &done);
            let acked = acked.map_err(lost)?;
            if let Some(first) = acked.lost.first() {
                tracing::warn!(
                    %first, rows = acked.lost.len(),
                    "rows that are trained had left this run's lease before they were acked"
                );
            }
        }
        Ok(())
    }

    /// Reason why there is nothing more to train on, for users.
    fn why_dry(&self) -> String {
        let stats = self.queue.stats().map(|s| s.of(&self.config.consumer));
        let mut why = "the queue had no whole group for this run in data.wait_s".to_owned();
        if let Ok(of) = stats {
            why += &format!(
                "; of its rows {} lack a reward or belong to others, {} are ready in groups that are not whole, {} are \
                 leased, {} are dead",
                of.waiting, of.ready, of.leased, of.dead
            );
        }
        why + "\n  hint: `sinew queue stats` counts the rows, `sinew queue rows --dead` names those that failed"
    }
}

#[cfg(test)]
mod tests;
