//! Rows of episodes and updates: commits, marks, look-ups, counts and removals.

use crate::about::About;
use crate::connection::Fault;
use sinew_store::backend::{self, PreparedTrace, end_code, same_batch, signed};
use sinew_store::{CommitOutcome, GcReport, StoreError, StoreStats, TrainedBatch};
use std::collections::{HashMap, HashSet};
use tokio_postgres::{Client, Row, Transaction};

/// Maximum uncompressed bytes of one trace.
pub(crate) const MAX_TRACE_BYTES: u32 = 256 << 20;
/// Maximum bytes of the payloads of one commit.
pub(crate) const MAX_BATCH_BYTES: u64 = 512 << 20;

/// Columns of new episodes, in the order of the table's columns that [`INSERT`] names.
#[derive(Default)]
struct Columns<'a> {
    seq: Vec<i64>,
    texts: [Vec<&'a str>; 6],
    draw: Vec<i64>,
    floats: [Vec<f64>; 3],
    flags: [Vec<bool>; 2],
    ended: Vec<i16>,
    counts: [Vec<i64>; 4],
    env_version: Vec<Option<&'a str>>,
    versions: [Vec<Option<i64>>; 2],
    content: Vec<&'a [u8]>,
    object: Vec<Option<&'a str>>,
}

const INSERT: &str = "
INSERT INTO episodes (seq, episode, grp, task, task_kind, purpose, env, draw, reward, started_unix_s,
    total_s, success, unscored, ended, turns, sampled_tokens, last_turn, bytes, env_version,
    first_version, last_version, content, object)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
    $8::bigint[], $9::double precision[], $10::double precision[], $11::double precision[],
    $12::boolean[], $13::boolean[], $14::smallint[], $15::bigint[], $16::bigint[], $17::bigint[],
    $18::bigint[], $19::text[], $20::bigint[], $21::bigint[], $22::bytea[], $23::text[])";

impl<'a> Columns<'a> {
    fn push(
        &mut self,
        seq: i64,
        trace: &'a PreparedTrace,
        object: Option<&'a str>,
    ) -> Result<(), StoreError> {
        let s = &trace.summary;
        let version = |v: Option<u64>| v.map(|v| signed("version", v)).transpose();
        self.seq.push(seq);
        let texts = [
            s.episode.as_str(),
            s.group.as_str(),
            s.task.as_str(),
            &s.task_kind,
            &s.purpose,
            &trace.env,
        ];
        for (column, text) in self.texts.iter_mut().zip(texts) {
            column.push(text);
        }
        self.draw.push(signed("draw", s.draw)?);
        let floats = [s.reward, s.started_unix_s, s.total_s];
        for (column, value) in self.floats.iter_mut().zip(floats) {
            column.push(value);
        }
        for (column, flag) in self.flags.iter_mut().zip([s.success, s.unscored]) {
            column.push(flag);
        }
        self.ended.push(end_code(s.end));
        let counts = [
            i64::from(s.turns),
            signed("sampled_tokens", s.sampled_tokens)?,
            i64::from(trace.last_turn),
            signed("bytes", trace.payload.len() as u64)?,
        ];
        for (column, count) in self.counts.iter_mut().zip(counts) {
            column.push(count);
        }
        self.env_version.push(trace.env_version.as_deref());
        let versions = [trace.versions.map(|v| v.0), trace.versions.map(|v| v.1)];
        for (column, value) in self.versions.iter_mut().zip(versions) {
            column.push(version(value)?);
        }
        self.content.push(&trace.content);
        self.object.push(object);
        Ok(())
    }

    async fn insert(&self, tx: &Transaction<'_>) -> Result<(), Fault> {
        let [episode, group, task, kind, purpose, env] = &self.texts;
        let [reward, started, total] = &self.floats;
        let [success, unscored] = &self.flags;
        let [turns, tokens, last_turn, bytes] = &self.counts;
        let [first, last] = &self.versions;
        let statement = tx.prepare(INSERT).await?;
        tx.execute(
            &statement,
            &[
                &self.seq,
                episode,
                group,
                task,
                kind,
                purpose,
                env,
                &self.draw,
                reward,
                started,
                total,
                success,
                unscored,
                &self.ended,
                turns,
                tokens,
                last_turn,
                bytes,
                &self.env_version,
                first,
                last,
                &self.content,
                &self.object,
            ],
        )
        .await?;
        Ok(())
    }
}

/// Names of the objects of a trace.
#[derive(Debug)]
pub(crate) struct TraceObjects {
    pub(crate) payload: String,
    pub(crate) media: Vec<String>,
}

/// Stores the new ones of several traces. `objects` has the names of their objects, or is empty.
pub(crate) async fn commit(
    tx: &Transaction<'_>,
    about: About,
    prepared: &[PreparedTrace],
    objects: &[TraceObjects],
    max_bytes: u64,
) -> Result<Vec<CommitOutcome>, Fault> {
    let names: Vec<&str> = prepared
        .iter()
        .map(|p| p.summary.episode.as_str())
        .collect();
    let known = "SELECT episode FROM episodes WHERE episode = ANY($1)";
    let known = tx.query(known, &[&names]).await?;
    let mut known: HashSet<&str> = known.iter().map(|row| row.get(0)).collect();
    let (mut columns, mut out) = (Columns::default(), Vec::with_capacity(prepared.len()));
    let (mut seq, mut needed) = (about.episodes, 0);
    let (mut payloads, mut of): (Vec<&[u8]>, Vec<i64>) = Default::default();
    let mut externals: [Vec<&str>; 2] = Default::default();
    let (mut media, mut used_by): (Vec<&str>, Vec<i64>) = Default::default();
    for (place, trace) in prepared.iter().enumerate() {
        let episode = trace.summary.episode.as_str();
        if !known.insert(episode) {
            out.push(CommitOutcome::Duplicate);
            continue;
        }
        seq += 1;
        needed += trace.payload.len() as u64;
        let objects = objects.get(place);
        columns.push(seq, trace, objects.map(|o| o.payload.as_str()))?;
        match objects {
            Some(objects) => {
                media.extend(objects.media.iter().map(String::as_str));
                used_by.resize(media.len(), seq);
            }
            None => {
                payloads.push(&trace.payload);
                of.push(seq);
            }
        }
        if let Some(external) = &trace.external {
            externals[0].push(external);
            externals[1].push(episode);
        }
        out.push(CommitOutcome::New);
    }
    if seq == about.episodes {
        return Ok(out);
    }
    if about.bytes.saturating_add(needed) > max_bytes {
        return Err(Fault::Refused(StoreError::Full {
            used: about.bytes,
            needed,
            limit: max_bytes,
        }));
    }
    columns.insert(tx).await?;
    let insert = "INSERT INTO payloads SELECT * FROM unnest($1::bigint[], $2::bytea[])";
    tx.execute(insert, &[&of, &payloads]).await?;
    let insert =
        "INSERT INTO externals SELECT * FROM unnest($1::text[], $2::text[]) ON CONFLICT DO NOTHING";
    tx.execute(insert, &[&externals[0], &externals[1]]).await?;
    if !media.is_empty() {
        let insert = "INSERT INTO media SELECT * FROM unnest($1::text[], $2::bigint[])";
        tx.execute(insert, &[&media, &used_by]).await?;
    }
    let bytes = signed("bytes", about.bytes.saturating_add(needed))?;
    let update = "UPDATE about SET episodes = $1, bytes = $2";
    tx.execute(update, &[&seq, &bytes]).await?;
    Ok(out)
}

/// Records an update, whose owner is the newest.
pub(crate) async fn mark(
    tx: &Transaction<'_>,
    about: About,
    update: &TrainedBatch,
    again: bool,
) -> Result<CommitOutcome, Fault> {
    let known = "SELECT record FROM batches WHERE batch = $1";
    let known = tx.query_opt(known, &[&update.batch]).await?;
    if let Some(row) = known.as_ref().filter(|_| !again) {
        let known = backend::update_of(&update.batch, row.get(0))?;
        return Ok(same_batch(&known, update)?);
    }
    let names: Vec<&str> = update.episodes.iter().map(|e| e.as_str()).collect();
    let trained = "SELECT episode, batch FROM episodes WHERE episode = ANY($1)";
    let trained = tx.query(trained, &[&names]).await?;
    let trained: HashMap<&str, Option<&str>> =
        trained.iter().map(|row| (row.get(0), row.get(1))).collect();
    for episode in &update.episodes {
        match trained.get(episode.as_str()) {
            None => {
                return Err(Fault::Refused(StoreError::UnknownEpisode {
                    episode: episode.clone(),
                }));
            }
            Some(Some(trained_in)) if *trained_in != update.batch => {
                return Err(Fault::Refused(StoreError::TrainedTwice {
                    episode: episode.clone(),
                    trained_in: (*trained_in).to_owned(),
                    batch: update.batch.clone(),
                }));
            }
            Some(_) => {}
        }
    }
    let unmark = "UPDATE episodes SET batch = NULL WHERE batch = $1";
    tx.execute(unmark, &[&update.batch]).await?;
    let mark = "UPDATE episodes SET batch = $1 WHERE episode = ANY($2)";
    tx.execute(mark, &[&update.batch, &names]).await?;
    let (seq, step) = (about.batches + 1, signed("step", update.step)?);
    let insert = "INSERT INTO batches VALUES ($1, $2, $3, $4) ON CONFLICT (batch) \
                  DO UPDATE SET step = excluded.step, record = excluded.record";
    let record = backend::update_text(update);
    tx.execute(insert, &[&seq, &update.batch, &step, &record])
        .await?;
    tx.execute("UPDATE about SET batches = $1", &[&seq]).await?;
    Ok(CommitOutcome::New)
}

/// Place of a payload: the name of its object, or its bytes.
pub(crate) type Found = (Option<String>, Option<Vec<u8>>);

/// Finds the payload of a readable episode.
pub(crate) async fn find(client: &Client, episode: &str) -> Result<Option<Found>, Fault> {
    let sql = "SELECT e.object, p.payload FROM episodes e LEFT JOIN payloads p ON p.seq = e.seq \
               WHERE e.episode = $1 AND NOT e.removed";
    let row = client.query_opt(sql, &[&episode]).await?;
    let found = |row: Row| -> Result<Found, Fault> { Ok((row.try_get(0)?, row.try_get(1)?)) };
    row.map(found).transpose()
}

/// Counts over all episodes.
pub(crate) async fn stats(client: &Client) -> Result<StoreStats, Fault> {
    let sql = "SELECT count(*) FILTER (WHERE NOT removed),
            count(*) FILTER (WHERE success AND NOT unscored AND NOT removed),
            count(*) FILTER (WHERE ended = $1 AND NOT removed),
            count(batch),
            (SELECT count(*) FROM batches),
            count(*) FILTER (WHERE removed),
            coalesce(sum(sampled_tokens) FILTER (WHERE NOT removed), 0)::bigint,
            (SELECT bytes FROM about)
        FROM episodes";
    let failed = end_code(sinew_store::EndKind::Failed);
    let row = client.query_one(sql, &[&failed]).await?;
    let count = |at: usize| Ok::<u64, Fault>(row.try_get::<_, i64>(at)?.max(0) as u64);
    Ok(StoreStats {
        episodes: count(0)?,
        successes: count(1)?,
        failed: count(2)?,
        trained: count(3)?,
        batches: count(4)?,
        collected: count(5)?,
        sampled_tokens: count(6)?,
        bytes: count(7)?,
    })
}

/// Episodes that are removed.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    seqs: Vec<i64>,
    names: Vec<String>,
    bytes: i64,
    /// Names of their objects.
    pub(crate) objects: Vec<String>,
}

impl Gone {
    /// Reads rows of number, episode, object and bytes.
    pub(crate) fn of(rows: &[Row]) -> Result<Self, Fault> {
        let mut gone = Self::default();
        for row in rows {
            gone.seqs.push(row.try_get(0)?);
            gone.names.push(row.try_get(1)?);
            gone.objects.extend(row.try_get::<_, Option<String>>(2)?);
            gone.bytes += row.try_get::<_, i64>(3)?;
        }
        Ok(gone)
    }

    pub(crate) fn report(&self) -> GcReport {
        GcReport {
            episodes: self.seqs.len() as u64,
            bytes: self.bytes.max(0) as u64,
        }
    }
}

/// Removes traces with their scores and outside names. Their rows stay.
pub(crate) async fn forget(tx: &Transaction<'_>, gone: &Gone) -> Result<(), Fault> {
    let sql = "UPDATE episodes SET removed = true, object = NULL WHERE seq = ANY($1)";
    tx.execute(sql, &[&gone.seqs]).await?;
    for table in ["payloads", "media"] {
        let sql = format!("DELETE FROM {table} WHERE seq = ANY($1)");
        tx.execute(&sql, &[&gone.seqs]).await?;
    }
    for table in ["scores", "externals"] {
        let sql = format!("DELETE FROM {table} WHERE episode = ANY($1)");
        tx.execute(&sql, &[&gone.names]).await?;
    }
    tx.execute("UPDATE about SET bytes = bytes - $1", &[&gone.bytes])
        .await?;
    Ok(())
}
