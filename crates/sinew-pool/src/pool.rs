//! The pool: admit, quarantine, lease, acknowledge. Every answer is durable before it is given.
//!
//! ```text
//! pushed --checks pass--> waiting --group complete--> ready --lease--> leased --ack--> deleted
//!    |                       |                        |  ^               |
//!    |                       |                        |  +--release, or the lease's time is over
//!    v                       v                        v
//!    a check fails           not complete in time     too stale, leased too often, rejected
//!    +-----------------------+------------------------+--> quarantine
//! ```
//!
//! The id of a deleted row stays known, so that a repeated push is recognized. A lease gives
//! complete groups to one consumer for a time. A row of the quarantine keeps its reason until it is
//! released, which checks it again, or deleted.
//!
//! Rows, quarantine and collected spans are three queues of one store. The index in memory holds the data for
//! choosing groups, and is built again from the rows when the pool is opened.

use crate::check::{Checker, Entry, tokenizer_hash};
use crate::config::{PoolConfig, Sampling};
use crate::genai;
use crate::index::{self, Group, Index, Row};
use crate::quarantine_row::{QuarantineRow, held_row};
use crate::reason::Reason;
use crate::schema::{Kind, Pushed};
use crate::span::Span;
use crate::spot_check;
use crate::typed_queue::{self, TRAINER, TypedQueue, is_full, reward_field};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinew_render::Renderer;
use sinew_store::queue::{
    AckedRow, LeaseId, MemoryQueue, NewRow, Queue, QueueError, QueueLimits, RowRequest,
    RowSelection, RowState, field, fields, unpack,
};
use sinew_store::{DiskStore, StoreError, StoreOptions};
use sinew_types::Engine;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};

/// Maximum bytes of traces that one lease gives out, 16 MiB; a single larger group is given separately.
const MAX_LEASE_BYTES: u64 = 16 << 20;

/// The result for one item of a push.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Answer {
    /// It was stored, under this id.
    Admitted { id: String },
    /// An item with this id and the same contents is or was stored; nothing changed.
    Duplicate { id: String },
    /// It is in quarantine under this id, with the reason as an object and as text.
    Quarantined {
        quarantine: String,
        reason: Reason,
        message: String,
    },
}

/// A lease on groups. Its rows belong only to this consumer until they are acknowledged, released or
/// rejected, or the time is over.
#[derive(Clone, Debug, Serialize)]
pub struct Loan {
    /// Number of the lease, for `ack`, `release` and `reject`; `None`: nothing was ready.
    pub lease: Option<u64>,
    /// Complete groups, in the order of their names.
    pub groups: Vec<Vec<Entry>>,
    /// Groups that were ready, but not given out.
    pub passed_over: PassedOver,
}

/// Groups that are ready, but do not fit the consumer's request: they wait for another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedOver {
    /// Groups with fewer trajectories than `min_group`.
    pub too_small: usize,
    /// Groups with a path above `max_path_tokens`.
    pub too_long: usize,
}

/// A trainer's request for groups.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// Name of the trainer, 1 to 256 bytes, for reports.
    pub consumer: String,
    /// Kind of trajectories.
    pub kind: Kind,
    /// Maximum groups, 1 to 65,536.
    pub groups: usize,
    /// Seconds until unacknowledged rows are ready again, 1 to 86,400.
    pub ttl_s: f64,
    /// Version of the trainer's weights; older groups are stale by the difference.
    pub version: u64,
    /// Seed of adaptive draws.
    pub seed: u64,
    /// Maximum path in tokens that the trainer accepts.
    #[serde(default)]
    pub max_path_tokens: Option<usize>,
    /// Minimum trajectories of a group that the trainer accepts: 2 if it compares them.
    #[serde(default)]
    pub min_group: usize,
}

/// The engine from which log-probabilities are requested.
#[derive(Clone)]
pub struct Scorer {
    /// An engine that honours a logit bias.
    pub engine: Arc<dyn Engine>,
    /// Counter of request ids, shared with all users of the engine.
    pub requests: Arc<AtomicU64>,
}

sinew_types::debug_fields!(Scorer);

/// The place of a pool on disk.
#[derive(Clone, Copy, Debug)]
pub struct Folder<'a> {
    /// Directory of the pool; only one process may open it at a time.
    pub path: &'a Path,
    /// Open it although stored rows cannot be read, and continue without them.
    pub accept_loss: bool,
}

/// The pool. Thread-safe: calls block on disk and locks and can be made from any thread, but not
/// from async tasks.
pub struct Pool {
    pub(crate) config: PoolConfig,
    renderer: Arc<dyn Renderer>,
    pub(crate) tokenizer: String,
    scorer: Option<Scorer>,
    pub(crate) rows: TypedQueue,
    pub(crate) quarantine: TypedQueue,
    spans: TypedQueue,
    index: Mutex<Index>,
    /// Keeps the folder's lock; none in memory.
    _store: Option<DiskStore>,
}

sinew_types::debug_fields!(Pool, tokenizer);

/// Reasons for which a call failed as a whole; nothing of it happened, and it can be repeated.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A value outside its range.
    #[error("{field} is {value}, allowed: {allowed}")]
    Argument {
        field: &'static str,
        value: String,
        allowed: String,
    },
    /// No such row in quarantine.
    #[error("no row {id:?} in quarantine")]
    Unknown { id: String },
    /// An earlier call panicked in the middle of a change.
    #[error("an earlier call panicked inside the pool; start the server again")]
    Poisoned,
}

impl Pool {
    /// Opens the pool in `folder`, or creates one; without a folder it is in memory and ends with
    /// the process. Reads every row once to build the index.
    ///
    /// # Errors
    /// If the folder is in use, cannot be written, or holds something else.
    pub fn open(
        folder: Option<Folder<'_>>,
        config: PoolConfig,
        renderer: Arc<dyn Renderer>,
        scorer: Option<Scorer>,
    ) -> Result<Self, PoolError> {
        let store = folder.map(|f| {
            let options = StoreOptions {
                accept_loss: f.accept_loss,
                ..StoreOptions::default()
            };
            DiskStore::open(f.path, options)
        });
        let store = store.transpose()?;
        let limits = |max_rows| QueueLimits {
            max_rows,
            max_bytes: config.max_bytes,
            max_attempts: config.max_attempts,
        };
        let queue = |name: &str, rows| -> Result<TypedQueue, StoreError> {
            let queue: Arc<dyn Queue> = match &store {
                Some(store) => Arc::new(store.queue(name, limits(rows))?),
                None => Arc::new(MemoryQueue::in_memory(limits(rows))),
            };
            Ok(TypedQueue(queue))
        };
        let pool = Self {
            tokenizer: tokenizer_hash(renderer.as_ref()),
            rows: queue("pool", config.max_rows)?.for_trainers()?,
            quarantine: queue("quarantine", config.max_quarantine)?,
            spans: queue("spans", config.max_quarantine)?,
            index: Mutex::default(),
            config,
            renderer,
            scorer,
            _store: store,
        };
        pool.reindex()?;
        Ok(pool)
    }

    /// Returns the configuration.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Hash of the pool's tokenizer, which batches of token ids must name.
    pub fn tokenizer(&self) -> &str {
        &self.tokenizer
    }

    /// Locks the index. A panic inside a change makes every later call fail: the index and the rows could
    /// differ.
    pub(crate) fn guard(&self) -> Result<MutexGuard<'_, Index>, PoolError> {
        self.index.lock().map_err(|_| PoolError::Poisoned)
    }

    /// Builds the index from the stored rows.
    fn reindex(&self) -> Result<(), PoolError> {
        let mut fresh = Index::default();
        for view in self.rows.rows()? {
            let (hash, id) = index::parts(&view.key);
            fresh.ids.insert(id.to_owned(), hash.to_owned());
            if view.done {
                continue;
            }
            let Some(entry) = self.rows.read::<Entry>(&view.key)? else {
                continue;
            };
            fresh.add(&entry, size_of(&entry));
        }
        *self.guard()? = fresh;
        Ok(())
    }

    /// Checks each item and admits or quarantines it; one answer for each, in order. Pushing again
    /// changes nothing.
    ///
    /// # Errors
    /// If there are too many items, or pool or quarantine are full; then nothing was stored.
    pub fn push(&self, items: Vec<Pushed>, now_s: f64) -> Result<Vec<Answer>, PoolError> {
        if items.len() > self.config.max_batch {
            return Err(PoolError::Argument {
                field: "trajectories",
                value: items.len().to_string(),
                allowed: format!("up to {} in one request", self.config.max_batch),
            });
        }
        // Checked before the lock is taken, because checking is the larger part of the work.
        let checked = items.into_iter().map(|item| {
            let entry = self.check(&item, now_s);
            (item, entry)
        });
        let checked: Vec<_> = checked.collect();
        self.admit(checked, now_s)
    }

    /// Checks an item, and compares some of its log-probabilities with the engine's if the
    /// configuration asks for it.
    pub(crate) fn check(&self, item: &Pushed, now_s: f64) -> Result<Entry, Reason> {
        let checker = Checker {
            config: &self.config,
            renderer: self.renderer.as_ref(),
            tokenizer: &self.tokenizer,
            now_s,
        };
        let mut entry = checker.check(item)?;
        if self.config.spot_check.tokens > 0
            && let Some(scorer) = &self.scorer
        {
            let engine = scorer.engine.as_ref();
            let spot = self.config.spot_check;
            entry.engine_gap = spot_check::check(engine, spot, &scorer.requests, &entry)?;
        }
        Ok(entry)
    }

    /// Stores checked items: rows to the pool, refused items to quarantine. The quarantine is
    /// written first, so that after a crash in between a repeated push gives the same answers.
    pub(crate) fn admit(
        &self,
        checked: Vec<(Pushed, Result<Entry, Reason>)>,
        now_s: f64,
    ) -> Result<Vec<Answer>, PoolError> {
        let mut index = self.guard()?;
        let mut answers = Vec::with_capacity(checked.len());
        let (mut rows, mut entries, mut held) = (Vec::new(), Vec::new(), Vec::new());
        let mut new: HashMap<String, String> = HashMap::new();
        for (item, result) in checked {
            let result = result.and_then(|entry| {
                let id = entry.trace.episode.as_str();
                match index.ids.get(id).or_else(|| new.get(id)) {
                    None => Ok((entry, true)),
                    Some(hash) if *hash == entry.hash => Ok((entry, false)),
                    Some(_) => Err(Reason::IdConflict { id: id.to_owned() }),
                }
            });
            answers.push(match result {
                Ok((entry, false)) => Answer::Duplicate {
                    id: entry.trace.episode.0,
                },
                Ok((entry, true)) => {
                    let id = entry.trace.episode.0.clone();
                    new.insert(id.clone(), entry.hash.clone());
                    rows.push(queue_row(index::key(&entry.hash, &id), &entry)?);
                    entries.push(entry);
                    Answer::Admitted { id }
                }
                Err(reason) => {
                    let (quarantine, row) = held_row(item, &reason, now_s)?;
                    held.push(row);
                    let message = reason.to_string();
                    Answer::Quarantined {
                        quarantine,
                        reason,
                        message,
                    }
                }
            });
        }
        self.quarantine.0.put(&held)?;
        self.rows.0.put(&rows)?;
        for (entry, row) in entries.iter().zip(&rows) {
            index.add(entry, row.bytes());
        }
        Ok(answers)
    }

    /// Stores spans; traces whose root has arrived become trajectories. Returns one answer for each
    /// trace that became complete, and reasons for spans that were refused.
    ///
    /// # Errors
    /// If the store is full or fails.
    pub fn push_spans(
        &self,
        spans: Vec<Span>,
        now_s: f64,
    ) -> Result<(Vec<Answer>, Vec<Reason>), PoolError> {
        let mut refused = Vec::new();
        let (mut rows, mut roots) = (Vec::new(), BTreeSet::new());
        for span in spans {
            if let Err(reason) = span.check() {
                refused.push(reason);
                continue;
            }
            if span.parent_id.is_empty() {
                roots.insert(span.trace_id.clone());
            }
            let key = format!("{}/{}", span.trace_id, span.span_id);
            rows.push(typed_queue::row(key, &(now_s, span))?);
        }
        self.spans.0.put(&rows)?;
        let mut answers = Vec::new();
        for keys in self.spans_of(&roots)?.into_values() {
            answers.extend(self.finish_trace(&keys, now_s, None)?);
        }
        Ok((answers, refused))
    }

    /// The keys of all spans of some traces, in one pass over the queue.
    fn spans_of(
        &self,
        traces: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Vec<String>>, PoolError> {
        let mut keys: BTreeMap<String, Vec<String>> = BTreeMap::new();
        if traces.is_empty() {
            return Ok(keys);
        }
        for row in self.spans.rows()? {
            let trace = row.key.split('/').next().unwrap_or_default();
            if traces.contains(trace) {
                keys.entry(trace.to_owned()).or_default().push(row.key);
            }
        }
        Ok(keys)
    }

    /// Makes one item of the spans of a trace, and deletes the spans.
    fn finish_trace(
        &self,
        keys: &[String],
        now_s: f64,
        broken: Option<Reason>,
    ) -> Result<Option<Answer>, PoolError> {
        let mut spans = Vec::new();
        for key in keys {
            if let Some((_, span)) = self.spans.read::<(f64, Span)>(key)? {
                spans.push(span);
            }
        }
        if spans.is_empty() {
            return Ok(None);
        }
        let item = genai::item(spans);
        let result = match broken {
            None => self.check(&item, now_s),
            Some(reason) => Err(reason),
        };
        let answer = self.admit(vec![(item, result)], now_s)?.pop();
        // The trajectory is durable; a crash before this would only find it again as a duplicate.
        self.spans.0.remove(keys)?;
        Ok(answer)
    }

    /// Leases complete groups of a kind. Groups that are too stale go to quarantine instead.
    ///
    /// # Errors
    /// If a value of the request is out of range, or the store fails.
    pub fn lease(&self, asked: &LeaseRequest, now_s: f64) -> Result<Loan, PoolError> {
        check_lease(asked)?;
        self.sweep(now_s)?;
        let mut index = self.guard()?;
        let stale = self.retire_stale(&mut index, asked, now_s)?;
        let ready = |group: &Group| -> Result<bool, PoolError> {
            let mut all = group.whole;
            for row in &group.rows {
                all &= self.rows.state(&row.key)? == Some(RowState::Ready);
            }
            Ok(all)
        };
        let mut candidates = Vec::new();
        let mut passed_over = PassedOver::default();
        let longest = asked.max_path_tokens.unwrap_or(usize::MAX);
        for (seq, ((kind, _), group)) in &index.groups {
            if *kind != asked.kind || stale.contains(seq) || !ready(group)? {
                continue;
            }
            if group.rows.len() < asked.min_group {
                passed_over.too_small += 1;
            } else if group.rows.iter().any(|r| r.path_tokens > longest) {
                passed_over.too_long += 1;
            } else {
                candidates.push((*seq, group));
            }
        }
        let adaptive = match &self.config.sampling {
            Sampling::Fifo {} => None,
            Sampling::Adaptive(config) => Some(config),
        };
        let drawn = index::draw(adaptive, &candidates, asked.seed, asked.groups);
        let (mut keys, mut bytes) = (Vec::new(), 0);
        for seq in drawn {
            let Some((_, group)) = index.groups.get(&seq) else {
                continue;
            };
            bytes += group.rows.iter().map(|r| r.bytes).sum::<u64>();
            if bytes > MAX_LEASE_BYTES && !keys.is_empty() {
                break;
            }
            keys.extend(group.rows.iter().map(|r| r.key.clone()));
        }
        let mut loan = Loan {
            lease: None,
            groups: Vec::new(),
            passed_over,
        };
        if keys.is_empty() {
            return Ok(loan);
        }
        let (ttl, now) = (millis(asked.ttl_s), millis(now_s));
        let mut groups: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
        let ask = RowRequest {
            consumer: TRAINER.into(),
            holder: asked.consumer.clone(),
            ttl_ms: ttl,
            take: RowSelection::Keys(keys),
        };
        let given = self.rows.0.lease(&ask, now)?;
        loan.lease = given.lease.map(|l| l.0);
        for row in given.rows {
            let trace = field(&row.fields, fields::TRACE).cloned();
            let entry: Entry = unpack(&row.key, &trace.unwrap_or_default())?;
            let group = groups.entry(entry.trace.group.0.clone()).or_default();
            group.push(entry);
        }
        loan.groups = groups.into_values().collect();
        Ok(loan)
    }

    /// Moves groups that are too old for the consumer to quarantine; returns those for which it has
    /// no space.
    fn retire_stale(
        &self,
        index: &mut Index,
        asked: &LeaseRequest,
        now_s: f64,
    ) -> Result<BTreeSet<u64>, PoolError> {
        let mut retired = Vec::new();
        for (seq, ((kind, _), group)) in &index.groups {
            let filter = self.config.filter_of(&group.task_kind);
            let Some(allowed) = filter.max_staleness.filter(|_| *kind == Kind::Rl) else {
                continue;
            };
            let oldest = group.rows.iter().map(|r| r.oldest.0).min().unwrap_or(0);
            let behind = asked.version.saturating_sub(oldest);
            if *kind == asked.kind && behind > allowed {
                let version = oldest;
                retired.push((
                    *seq,
                    Reason::Stale {
                        version,
                        behind,
                        allowed,
                    },
                ));
            }
        }
        let mut left = BTreeSet::new();
        for (seq, reason) in retired {
            if !self.retire(index, seq, &reason, now_s)? {
                left.insert(seq);
            }
        }
        Ok(left)
    }

    /// Moves the rows of a group that are not leased to quarantine. `false` if that is full, so all
    /// stays where it is; a client that fills quarantine must not stop the trainers.
    fn retire(
        &self,
        index: &mut Index,
        seq: u64,
        reason: &Reason,
        now_s: f64,
    ) -> Result<bool, PoolError> {
        let Some((_, group)) = index.groups.get(&seq) else {
            return Ok(true);
        };
        let (mut held, mut keys) = (Vec::new(), Vec::new());
        for Row { key, .. } in &group.rows {
            let idle = matches!(
                self.rows.state(key)?,
                Some(RowState::Ready | RowState::Dead { .. })
            );
            if idle && let Some(entry) = self.rows.read::<Entry>(key)? {
                held.push(held_row(self.unchecked(&entry)?, reason, now_s)?.1);
                keys.push(key.clone());
            }
        }
        let put = self.quarantine.0.put(&held);
        if is_full(&put) {
            tracing::warn!(%reason, "quarantine is full: release or delete some of its rows");
            return Ok(false);
        }
        put?;
        self.rows.0.remove(&keys)?;
        for key in &keys {
            index.ids.remove(index::parts(key).1);
            index.drop_row(key);
        }
        Ok(true)
    }

    /// Deletes rows: the consumer has stored them. Returns the ids that its lease does not hold any
    /// more; they must not be trained. A lease whose time is over still counts as long as no other
    /// consumer was given the row.
    ///
    /// # Errors
    /// If the store fails; nothing is acknowledged then.
    pub fn ack(&self, lease: u64, ids: &[String]) -> Result<Vec<String>, PoolError> {
        let mut index = self.guard()?;
        let (mut lost, keys) = index.keys(ids);
        let done: Vec<AckedRow> = keys.iter().map(AckedRow::of).collect();
        let settled = self.rows.0.ack(TRAINER, LeaseId(lease), &done)?;
        let ids_of = settled.lost.iter();
        lost.extend(ids_of.map(|key| index::parts(key).1.to_owned()));
        for key in keys.iter().filter(|key| !settled.lost.contains(key)) {
            index.drop_row(key);
        }
        let lost: BTreeSet<String> = lost.into_iter().collect();
        Ok(ids
            .iter()
            .filter(|id| lost.contains(*id))
            .cloned()
            .collect())
    }

    /// Returns rows unused, and how many; rows that the lease does not hold any more stay unchanged.
    pub fn release(&self, lease: u64, ids: &[String]) -> Result<usize, PoolError> {
        let (_, keys) = self.guard()?.keys(ids);
        let settled = self.rows.0.release(TRAINER, LeaseId(lease), &keys)?;
        Ok(settled.changed)
    }

    /// Ends everything whose time is over: leases, groups that stay incomplete, traces without a
    /// root, rows without an acknowledgement. Forgets the oldest trained ids beyond
    /// [`PoolConfig::remember`]. Called before every lease.
    pub fn sweep(&self, now_s: f64) -> Result<(), PoolError> {
        let forgotten = self.rows.0.sweep(self.config.remember, millis(now_s))?;
        let mut overdue = BTreeSet::new();
        for row in self.spans.rows()? {
            let since = self.spans.read::<(f64, Span)>(&row.key)?.map(|(at, _)| at);
            if since.is_some_and(|at| now_s - at > self.config.span_ttl_s) {
                overdue.extend(row.key.split('/').next().map(str::to_owned));
            }
        }
        for (trace, keys) in self.spans_of(&overdue)? {
            let detail = "the root span did not come in time".to_owned();
            match self.finish_trace(&keys, now_s, Some(Reason::Spans { detail })) {
                Err(PoolError::Store(StoreError::Queue(QueueError::Full { .. }))) => {
                    tracing::warn!(trace, "quarantine is full: its spans wait");
                }
                finished => drop(finished?),
            }
        }
        let mut index = self.guard()?;
        let mut retired = Vec::new();
        for (seq, ((_, name), group)) in &index.groups {
            let mut dead = false;
            for row in &group.rows {
                dead |= matches!(self.rows.state(&row.key)?, Some(RowState::Dead { .. }));
            }
            if dead {
                let attempts = self.config.max_attempts;
                retired.push((*seq, Reason::Undeliverable { attempts }));
            } else if !group.whole && now_s - group.since_s > self.config.group_ttl_s {
                let reason = Reason::GroupIncomplete {
                    group: name.clone(),
                    have: group.rows.len() as u32,
                    group_size: group.size,
                };
                retired.push((*seq, reason));
            }
        }
        for (seq, reason) in retired {
            self.retire(&mut index, seq, &reason, now_s)?;
        }
        drop(index);
        if forgotten > 0 {
            self.reindex()?;
        }
        Ok(())
    }

    /// Counts for users and dashboards: rows by state, groups, task types, reasons of the quarantine, and the
    /// tokenizer's hash. Reads the whole quarantine.
    pub fn status(&self) -> Result<Value, PoolError> {
        let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
        for row in self.quarantine.rows()? {
            if let Some(held) = self.quarantine.read::<QuarantineRow>(&row.key)? {
                *reasons.entry(held.reason.code()).or_default() += 1;
            }
        }
        let stats = self.rows.0.stats()?;
        let rows = stats.of(TRAINER);
        let index = self.guard()?;
        let mut kinds: BTreeMap<String, Value> = BTreeMap::new();
        let (mut whole, mut waiting) = (0, 0);
        for (_, group) in index.groups.values() {
            if group.whole {
                whole += 1
            } else {
                waiting += 1
            }
            let kind = kinds.entry(group.task_kind.clone());
            let kind = kind.or_insert_with(|| json!({"trajectories": 0, "successes": 0}));
            let successes = group.rows.iter().filter(|r| r.success).count();
            kind["trajectories"] =
                json!(kind["trajectories"].as_u64().unwrap_or(0) + group.rows.len() as u64);
            kind["successes"] = json!(kind["successes"].as_u64().unwrap_or(0) + successes as u64);
        }
        Ok(json!({
            "schema_version": crate::schema::SCHEMA_VERSION,
            "tokenizer": self.tokenizer,
            "vocabulary": self.renderer.vocab_size(),
            "model": self.config.model,
            "trajectories": {
                "ready": rows.ready, "leased": rows.leased, "acked": rows.acked, "dead": rows.dead,
                "bytes": stats.bytes,
            },
            "groups": {"whole": whole, "incomplete": waiting},
            "task_kinds": kinds,
            "spans": self.spans.len()?,
            "quarantine": {"rows": self.quarantine.len()?, "reasons": reasons},
        }))
    }
}

/// Refuses a request with a value out of range.
fn check_lease(asked: &LeaseRequest) -> Result<(), PoolError> {
    let wrong = |field, value: String, allowed: &str| {
        Err(PoolError::Argument {
            field,
            value,
            allowed: allowed.into(),
        })
    };
    if !(asked.ttl_s.is_finite() && (1.0..=86_400.0).contains(&asked.ttl_s)) {
        return wrong("ttl_s", asked.ttl_s.to_string(), "1 to 86400");
    }
    if !(1..=65_536).contains(&asked.groups) {
        return wrong("groups", asked.groups.to_string(), "1 to 65536");
    }
    if asked.consumer.is_empty() || asked.consumer.len() > 256 {
        return wrong("consumer", asked.consumer.clone(), "1 to 256 bytes");
    }
    Ok(())
}

/// A row of the queue, with its group and its reward.
fn queue_row(key: String, entry: &Entry) -> Result<NewRow, StoreError> {
    let mut row = typed_queue::row(key, entry)?;
    row.fields.push(reward_field(entry.trace.outcome.reward));
    row.group = format!("{:?}/{}", entry.kind, entry.trace.group);
    row.group_size = entry.group_size;
    row.tokens = entry
        .trace
        .nodes
        .iter()
        .map(|n| n.tokens.len() as u64)
        .sum();
    row.version = entry.trace.oldest_version().unwrap_or_default().0;
    Ok(row)
}

/// Approximate size of a row that was read, in bytes: 8 for each token.
fn size_of(entry: &Entry) -> u64 {
    entry
        .trace
        .nodes
        .iter()
        .map(|n| 8 * n.tokens.len() as u64)
        .sum()
}

/// Seconds as the queue's milliseconds, at least 0.
fn millis(seconds: f64) -> u64 {
    (seconds * 1e3).max(0.0) as u64
}
