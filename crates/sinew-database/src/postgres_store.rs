//! [`PostgresStore`]: traces in PostgreSQL, with their payloads in the database or in an object store.
//!
//! Every changing call is one transaction that first locks the single row of `about`: it holds the number of
//! the newest owner and the last numbers of episodes, batches and scores. The transaction also notes its
//! call, so that a call whose answer was lost finds out whether it was stored.

use crate::about::{About, locked};
use crate::address::Address;
use crate::connection::{DatabaseOptions, Fault, Postgres};
use crate::episodes::{self, Gone, MAX_BATCH_BYTES, MAX_TRACE_BYTES, TraceObjects};
use crate::listing;
use crate::media;
use crate::payloads::{Object, Payloads};
use crate::schema::{prepare, schema_of};
use crate::scores;
use crate::sweep;
use bytes::Bytes;
use sinew_store::backend::{self, PreparedTrace, check_fence, check_update};
use sinew_store::{
    CommitOutcome, Cursor, Filter, GcPolicy, GcReport, Page, ScorePage, ScoreRecord, ScoreRefused,
    StoreError, StoreStats, Sweep, SweepReport, TraceStore, TrainedBatch,
};
use sinew_types::{EpisodeId, Trace};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Instant;
use tokio_postgres::{Client, Row, Transaction};

/// Format of the tables. Any change of [`TABLES`] creates another one.
const FORMAT: i32 = 2;

/// Maximum bytes of the payloads of a store. Batch marks are accepted above it.
const MAX_BYTES: u64 = 1 << 40;

/// Attempts to write the objects of a commit, each under the epoch of that time.
const EPOCHS: usize = 8;

/// Tables of a store. `IDENTITY` is replaced by a random name.
const TABLES: &str = "
CREATE TABLE about (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    format integer NOT NULL,
    identity text NOT NULL,             -- of this store, in the names of its objects
    fence bigint NOT NULL,              -- number of the newest owner
    episodes bigint NOT NULL, batches bigint NOT NULL, scores bigint NOT NULL,  -- last numbers
    bytes bigint NOT NULL,              -- of all payloads
    epoch bigint NOT NULL               -- in the names of new objects
);
CREATE TABLE sessions (
    session text PRIMARY KEY,
    last bigint NOT NULL,               -- number of its last stored call
    seen timestamptz NOT NULL
);
CREATE TABLE episodes (
    seq bigint PRIMARY KEY, episode text NOT NULL UNIQUE,
    grp text NOT NULL, task text NOT NULL, task_kind text NOT NULL,
    draw bigint NOT NULL, purpose text NOT NULL,
    reward double precision NOT NULL, success boolean NOT NULL, unscored boolean NOT NULL,
    ended smallint NOT NULL, turns bigint NOT NULL, sampled_tokens bigint NOT NULL,
    started_unix_s double precision NOT NULL, total_s double precision NOT NULL,
    env text NOT NULL, env_version text, first_version bigint, last_version bigint,
    last_turn bigint NOT NULL, content bytea NOT NULL,
    batch text, object text,            -- name of the payload's object; null: table payloads
    bytes bigint NOT NULL, removed boolean NOT NULL DEFAULT false
);
CREATE INDEX ON episodes (draw, purpose);
CREATE INDEX ON episodes (grp);
CREATE INDEX ON episodes (task_kind);
CREATE INDEX ON episodes (batch);
CREATE INDEX ON episodes (env);
CREATE INDEX ON episodes (last_version);
CREATE INDEX ON episodes (object) WHERE object IS NOT NULL;
CREATE TABLE payloads (seq bigint PRIMARY KEY, payload bytea NOT NULL);
ALTER TABLE payloads ALTER payload SET STORAGE EXTERNAL;
CREATE TABLE media (                   -- objects that the traces of readable episodes refer to
    object text NOT NULL, seq bigint NOT NULL, PRIMARY KEY (object, seq)
);
CREATE INDEX ON media (seq);
CREATE TABLE batches (
    seq bigint PRIMARY KEY, batch text NOT NULL UNIQUE, step bigint NOT NULL, record text NOT NULL
);
CREATE TABLE scores (
    seq bigint PRIMARY KEY, episode text NOT NULL, name text NOT NULL, source text NOT NULL,
    at_us bigint NOT NULL, value double precision, reason text
);
CREATE INDEX ON scores (episode);
CREATE TABLE externals (
    external text NOT NULL, episode text NOT NULL, PRIMARY KEY (external, episode)
);
INSERT INTO about (format, identity, fence, episodes, batches, scores, bytes, epoch)
    VALUES (2, 'IDENTITY', 0, 0, 0, 0, 0, 0);
";

/// A store of traces in PostgreSQL. Any number of processes may use it at once.
#[derive(Debug)]
pub struct PostgresStore {
    postgres: Postgres,
    payloads: Option<Payloads>,
    identity: String,
    /// New objects have this number in their names. Another process may have raised it since.
    epoch: AtomicI64,
    /// Nanoseconds that callers have waited for durable writes.
    waited_ns: AtomicU64,
}

impl PostgresStore {
    /// Opens the store `name` of a database, or creates it. All processes must give the same place for
    /// payloads; `None`: the database.
    ///
    /// # Errors
    /// If the name has other characters than letters, digits, - and _, or the server cannot be reached.
    pub fn open(
        address: &Address,
        name: &str,
        payloads: Option<Payloads>,
        options: DatabaseOptions,
    ) -> Result<Self, StoreError> {
        let postgres = Postgres::new(address, &schema_of("sinew_store", name)?, options)?;
        let tables = TABLES.replace("IDENTITY", postgres.session());
        prepare(&postgres, FORMAT, Some(&tables))?;
        postgres.run(async |client: &mut Client| {
            // Sessions whose process is long gone.
            let old = "DELETE FROM sessions WHERE seen < now() - interval '30 days'";
            Ok(client.execute(old, &[]).await?)
        })?;
        Self::of(postgres, payloads)
    }

    /// Opens the store `name` of a database for reading: it must be there, and opening writes nothing.
    ///
    /// # Errors
    /// As [`PostgresStore::open`], or if there is no such store.
    pub fn existing(
        address: &Address,
        name: &str,
        payloads: Option<Payloads>,
        options: DatabaseOptions,
    ) -> Result<Self, StoreError> {
        let postgres = Postgres::new(address, &schema_of("sinew_store", name)?, options)?;
        prepare(&postgres, FORMAT, None)?;
        Self::of(postgres, payloads)
    }

    fn of(postgres: Postgres, payloads: Option<Payloads>) -> Result<Self, StoreError> {
        let (identity, epoch) = postgres.run(async |client: &mut Client| {
            let about = "SELECT identity, epoch FROM about";
            let row = client.query_one(about, &[]).await?;
            Ok((row.try_get::<_, String>(0)?, row.try_get::<_, i64>(1)?))
        })?;
        Ok(Self {
            postgres,
            payloads,
            identity,
            epoch: AtomicI64::new(epoch),
            waited_ns: AtomicU64::new(0),
        })
    }

    /// Random name of this store, which stays the same as long as it exists.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The server, without a password, and the name of the store's schema.
    pub fn shown(&self) -> String {
        format!(
            "{} schema {}",
            self.postgres.shown(),
            self.postgres.schema()
        )
    }

    /// Runs a changing job in a transaction that is stored once, however often it is tried.
    fn change<T: Clone + Send>(
        &self,
        job: impl AsyncFn(&Transaction<'_>, About) -> Result<T, Fault> + Sync,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let (session, done) = (self.postgres.session(), Mutex::new(None));
        let kept = || done.lock().unwrap_or_else(|e| e.into_inner());
        let changed = self
            .postgres
            .run_numbered(async |client: &mut Client, call: i64| {
                let tx = client.transaction().await?;
                let about = locked(&tx).await?;
                // An earlier attempt may have been stored although its answer was lost.
                let earlier: Option<T> = kept().clone();
                if let Some(earlier) = earlier {
                    let noted = "SELECT 1 FROM sessions WHERE session = $1 AND last = $2";
                    if tx.query_opt(noted, &[&session, &call]).await?.is_some() {
                        return Ok(earlier);
                    }
                }
                let value = job(&tx, about).await?;
                let note = "INSERT INTO sessions VALUES ($1, $2, now()) ON CONFLICT (session) \
                        DO UPDATE SET last = excluded.last, seen = excluded.seen";
                tx.execute(note, &[&session, &call]).await?;
                *kept() = Some(value.clone());
                tx.commit().await?;
                Ok(value)
            });
        let passed = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.fetch_add(passed, Ordering::Relaxed);
        changed
    }

    /// Writes the payloads and the media of traces as objects of an epoch, and returns their names; empty if
    /// the database has them.
    fn put_objects(
        &self,
        traces: &[Trace],
        prepared: &mut [PreparedTrace],
        epoch: i64,
    ) -> Result<Vec<TraceObjects>, StoreError> {
        let Some(payloads) = &self.payloads else {
            return Ok(Vec::new());
        };
        let mut objects: Vec<Object> = Vec::new();
        let mut names = Vec::with_capacity(traces.len());
        for (trace, prepared) in traces.iter().zip(prepared) {
            let mut media = Vec::new();
            if let Some((referring, found)) = media::taken_out(trace, &self.identity, epoch) {
                prepared.payload = backend::prepare(&referring, MAX_TRACE_BYTES)?.payload;
                media.extend(found.iter().map(|(name, _)| name.clone()));
                objects.extend(found);
            }
            let hash = blake3::hash(&prepared.payload).to_hex();
            let payload = media::object_name(&self.identity, epoch, &hash);
            objects.push((payload.clone(), Bytes::copy_from_slice(&prepared.payload)));
            names.push(TraceObjects { payload, media });
        }
        payloads.put(&objects)?;
        Ok(names)
    }

    /// Stores prepared traces in one transaction. Their objects are written again, under other names, if a
    /// sweep began another epoch meanwhile.
    fn commit_prepared(
        &self,
        traces: &[Trace],
        prepared: &mut [PreparedTrace],
    ) -> Result<Vec<CommitOutcome>, StoreError> {
        for _ in 0..EPOCHS {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let objects = self.put_objects(traces, prepared, epoch)?;
            let known: &[PreparedTrace] = prepared;
            let committed = self.change(async |tx: &Transaction<'_>, about: About| {
                if !objects.is_empty() && about.epoch != epoch {
                    return Ok(Err(about.epoch));
                }
                let committed = episodes::commit(tx, about, known, &objects, MAX_BYTES).await?;
                Ok(Ok(committed))
            })?;
            match committed {
                Ok(committed) => return Ok(committed),
                Err(newer) => self.epoch.store(newer, Ordering::SeqCst),
            }
        }
        let reason = format!("{EPOCHS} sweeps of objects began during one commit; try again");
        Err(self.postgres.refuse(reason))
    }

    /// Begins another epoch of the names of objects.
    fn next_epoch(&self) -> Result<i64, StoreError> {
        let epoch = self.change(async |tx: &Transaction<'_>, about: About| {
            let next = about.epoch + 1;
            tx.execute("UPDATE about SET epoch = $1", &[&next]).await?;
            Ok(next)
        })?;
        self.epoch.store(epoch, Ordering::SeqCst);
        Ok(epoch)
    }

    /// Removes what a condition names. The objects go last: without their rows nothing refers to them.
    fn remove_where(
        &self,
        job: impl AsyncFn(&Transaction<'_>) -> Result<Vec<Row>, Fault> + Sync,
    ) -> Result<GcReport, StoreError> {
        let (report, objects) = self.change(async |tx: &Transaction<'_>, _: About| {
            let gone = Gone::of(&job(tx).await?)?;
            episodes::forget(tx, &gone).await?;
            Ok((gone.report(), gone.objects))
        })?;
        if let Some(payloads) = &self.payloads
            && let Err(error) = payloads.delete(&objects)
        {
            let left = objects.len();
            tracing::warn!(%error, left, "payloads of removed episodes stay where they are");
        }
        Ok(report)
    }
}

/// Reads an update from the columns batch and record.
fn update(row: &Row) -> Result<TrainedBatch, StoreError> {
    backend::update_of(row.get(0), row.get(1))
}

impl TraceStore for PostgresStore {
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError> {
        let prepared = traces.iter().map(|t| backend::prepare(t, MAX_TRACE_BYTES));
        let mut prepared: Vec<PreparedTrace> = prepared.collect::<Result<_, _>>()?;
        if prepared.is_empty() {
            return Ok(Vec::new());
        }
        let bytes = prepared.iter().map(|p| p.payload.len() as u64).sum();
        if bytes > MAX_BATCH_BYTES {
            return Err(StoreError::Argument {
                field: "bytes of the batch",
                value: bytes,
                allowed: format!("up to {MAX_BATCH_BYTES}; commit fewer traces at a time"),
            });
        }
        self.commit_prepared(traces, &mut prepared)
    }

    fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError> {
        // The payload may be removed between the look-up and the read.
        for last in [false, true] {
            let found = self
                .postgres
                .run(async |client: &mut Client| episodes::find(client, episode.as_str()).await)?;
            let Some((object, payload)) = found else {
                return Ok(None);
            };
            let missing = || StoreError::Payload {
                episode: episode.clone(),
                reason: "it is missing".into(),
            };
            let payload = match (object, payload, &self.payloads) {
                (None, Some(payload), _) => Some(Bytes::from(payload)),
                (Some(name), _, Some(payloads)) => payloads.get(&name)?,
                (Some(_), _, None) => {
                    return Err(StoreError::Payload {
                        episode: episode.clone(),
                        reason: "it is in an object store\n  hint: name that as store.payloads"
                            .into(),
                    });
                }
                (None, None, _) => None,
            };
            let Some(payload) = payload else {
                if last {
                    return Err(missing());
                }
                continue;
            };
            let mut trace = backend::trace_of(episode, &payload)?;
            if let Some(payloads) = &self.payloads {
                media::put_back(&mut trace, payloads, &self.identity)?;
            }
            return Ok(Some(trace));
        }
        Ok(None)
    }

    fn list(&self, filter: &Filter) -> Result<Page, StoreError> {
        let limit = backend::page_limit(filter)?;
        self.postgres
            .run(async |client: &mut Client| listing::list(client, filter, limit).await)
    }

    fn commit_update(
        &self,
        update: &TrainedBatch,
        again: bool,
    ) -> Result<CommitOutcome, StoreError> {
        check_update(update)?;
        self.change(async |tx: &Transaction<'_>, about: About| {
            check_fence(update.fence, about.fence)?;
            episodes::mark(tx, about, update, again).await
        })
    }

    fn take_fence(&self) -> Result<u64, StoreError> {
        self.change(async |tx: &Transaction<'_>, about: About| {
            let next = about.fence.saturating_add(1);
            let number = backend::signed("fence", next)?;
            tx.execute("UPDATE about SET fence = $1", &[&number])
                .await?;
            Ok(next)
        })
    }

    fn newest_fence(&self) -> Result<u64, StoreError> {
        self.postgres.run(async |client: &mut Client| {
            let row = client.query_one("SELECT fence FROM about", &[]).await?;
            Ok(row.try_get::<_, i64>(0)?.max(0) as u64)
        })
    }

    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError> {
        let rows = self.postgres.run(async |client: &mut Client| {
            let sql = "SELECT batch, record FROM batches ORDER BY seq";
            Ok(client.query(sql, &[]).await?)
        })?;
        rows.iter().map(update).collect()
    }

    fn batches_of(&self, step: u64) -> Result<Vec<TrainedBatch>, StoreError> {
        let step = backend::signed("step", step)?;
        let rows = self.postgres.run(async |client: &mut Client| {
            let sql = "SELECT batch, record FROM batches WHERE step = $1 ORDER BY seq";
            Ok(client.query(sql, &[&step]).await?)
        })?;
        rows.iter().map(update).collect()
    }

    fn stats(&self) -> Result<StoreStats, StoreError> {
        self.postgres
            .run(async |client: &mut Client| episodes::stats(client).await)
    }

    fn waited_s(&self) -> f64 {
        self.waited_ns.load(Ordering::Relaxed) as f64 / 1e9
    }

    fn put_scores(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError> {
        self.change(async |tx: &Transaction<'_>, about: About| {
            scores::put(tx, about, records).await
        })
    }

    fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        self.postgres
            .run(async |client: &mut Client| scores::of_episode(client, episode.as_str()).await)
    }

    fn scores_after(&self, after: Cursor, limit: usize) -> Result<ScorePage, StoreError> {
        self.postgres
            .run(async |client: &mut Client| scores::page(client, after, limit).await)
    }

    fn named(&self, external: &str, limit: usize) -> Result<Vec<EpisodeId>, StoreError> {
        self.postgres
            .run(async |client: &mut Client| scores::named(client, external, limit).await)
    }

    fn remove(&self, episodes: &[EpisodeId]) -> Result<GcReport, StoreError> {
        let names: Vec<&str> = episodes.iter().map(|e| e.as_str()).collect();
        self.remove_where(async |tx: &Transaction<'_>| {
            let sql = "SELECT seq, episode, object, bytes FROM episodes \
                       WHERE NOT removed AND episode = ANY($1)";
            Ok(tx.query(sql, &[&names]).await?)
        })
    }

    fn gc(&self, policy: GcPolicy) -> Result<GcReport, StoreError> {
        let before = i64::try_from(policy.before_update).unwrap_or(i64::MAX);
        self.remove_where(async |tx: &Transaction<'_>| {
            let sql = "SELECT e.seq, e.episode, e.object, e.bytes \
                       FROM episodes e LEFT JOIN batches b ON b.batch = e.batch \
                       WHERE NOT e.removed \
                         AND CASE WHEN e.batch IS NULL THEN NOT $2 ELSE b.step < $1 END";
            Ok(tx.query(sql, &[&before, &policy.keep_untrained]).await?)
        })
    }

    fn sweep(&self, sweep: &Sweep<'_>) -> Result<SweepReport, StoreError> {
        let Some(payloads) = &self.payloads else {
            return Ok(SweepReport::default());
        };
        let next = || self.next_epoch();
        sweep::run(&self.postgres, payloads, &self.identity, sweep, next)
    }
}
