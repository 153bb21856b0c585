//! Commands and their results in the journal.

use super::{Journal, count, int, maybe_count};
use crate::desk::types::{Completion, ModelId, RequestId, SamplerId};
use rusqlite::{Row, params};
use std::ops::RangeInclusive;

/// A command that arrives.
#[derive(Clone, Debug)]
pub(crate) struct NewCommand {
    pub(crate) request: RequestId,
    pub(crate) tenant: String,
    /// Its model; `None`: a sample request.
    pub(crate) model: Option<ModelId>,
    /// Checkpoint of a sample request; `None`: the base model.
    pub(crate) source: Option<String>,
    pub(crate) seq: u64,
    pub(crate) kind: &'static str,
    pub(crate) digest: [u8; 32],
    /// Tokens, or sequences of a sample request.
    pub(crate) cost: u64,
    /// The command, encoded.
    pub(crate) payload: Vec<u8>,
    pub(crate) submitted_ms: u64,
}

/// A command without its payload and result.
#[derive(Clone, Debug)]
pub(crate) struct CommandRow {
    pub(crate) tenant: String,
    pub(crate) model: Option<ModelId>,
    pub(crate) seq: u64,
    pub(crate) kind: String,
    pub(crate) digest: Vec<u8>,
    pub(crate) cost: u64,
    pub(crate) bytes: u64,
    /// `None`: it waits or runs.
    pub(crate) done_ms: Option<u64>,
}

/// A command that waits.
#[derive(Clone, Debug)]
pub(crate) struct WaitingRow {
    pub(crate) request: RequestId,
    pub(crate) tenant: String,
    pub(crate) model: Option<ModelId>,
    pub(crate) seq: u64,
    pub(crate) kind: String,
    pub(crate) cost: u64,
}

/// A command whose effect no live checkpoint holds.
#[derive(Clone, Debug)]
pub(crate) struct ReplayRow {
    pub(crate) request: RequestId,
    pub(crate) cost: u64,
}

/// The end of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandEnd<'a> {
    pub(crate) now_ms: u64,
    /// Number of the end, above all others.
    pub(crate) ended: u64,
    pub(crate) failed: bool,
    /// The outcome, encoded.
    pub(crate) result: &'a [u8],
    /// Whether its effect is in memory only.
    pub(crate) replay: bool,
}

fn model(row: &Row<'_>) -> rusqlite::Result<Option<ModelId>> {
    let model: Option<String> = row.get("model")?;
    Ok(model.map(ModelId::from))
}

fn request(row: &Row<'_>) -> rusqlite::Result<RequestId> {
    row.get::<_, String>("request").map(RequestId::from)
}

/// Commands of a tenant in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantUse {
    /// Commands of models that wait or run.
    pub(crate) queued: u64,
    /// Sequences of sample requests that wait or run.
    pub(crate) sequences: u64,
    /// Bytes of commands and results.
    pub(crate) bytes: u64,
}

impl Journal {
    /// Adds a command.
    pub(crate) fn insert_command(&self, new: &NewCommand) -> rusqlite::Result<()> {
        self.change(
            "INSERT INTO commands
                 (request, tenant, model, source, seq, kind, digest, cost, payload, bytes, submitted_ms)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
            params![
                new.request.as_str(),
                new.tenant,
                new.model.as_ref().map(ModelId::as_str),
                new.source,
                int(new.seq),
                new.kind,
                &new.digest[..],
                int(new.cost),
                new.payload,
                int(new.payload.len() as u64),
                int(new.submitted_ms)
            ],
        )
    }

    /// A command by its id.
    pub(crate) fn command(&self, id: &RequestId) -> rusqlite::Result<Option<CommandRow>> {
        let sql = "SELECT tenant, model, seq, kind, digest, cost, bytes, done_ms FROM commands
             WHERE request = ?1";
        self.row(sql, [id.as_str()], |row| {
            Ok(CommandRow {
                tenant: row.get("tenant")?,
                model: model(row)?,
                seq: count(row, "seq")?,
                kind: row.get("kind")?,
                digest: row.get("digest")?,
                cost: count(row, "cost")?,
                bytes: count(row, "bytes")?,
                done_ms: maybe_count(row, "done_ms")?,
            })
        })
    }

    /// The payload of a command, if it is still needed.
    pub(crate) fn payload(&self, id: &RequestId) -> rusqlite::Result<Option<Vec<u8>>> {
        let sql = "SELECT payload FROM commands WHERE request = ?1";
        let found: Option<Option<_>> = self.row(sql, [id.as_str()], |row| row.get(0))?;
        Ok(found.flatten())
    }

    /// The result of a command that ended.
    pub(crate) fn result(&self, id: &RequestId) -> rusqlite::Result<Option<Vec<u8>>> {
        let sql = "SELECT result FROM commands WHERE request = ?1";
        let found: Option<Option<_>> = self.row(sql, [id.as_str()], |row| row.get(0))?;
        Ok(found.flatten())
    }

    /// Ends a command. With `replay`, its payload stays until a live checkpoint covers it.
    pub(crate) fn finish_command(
        &self,
        id: &RequestId,
        end: &CommandEnd<'_>,
    ) -> rusqlite::Result<()> {
        self.change(
            "UPDATE commands SET done_ms = ?2, ended = ?3, failed = ?4, result = ?5, replay = ?6,
                 payload = CASE WHEN ?6 THEN payload ELSE NULL END,
                 bytes = CASE WHEN ?6 THEN COALESCE(LENGTH(payload), 0) ELSE 0 END + LENGTH(?5)
             WHERE request = ?1",
            params![
                id.as_str(),
                int(end.now_ms),
                int(end.ended),
                end.failed,
                end.result,
                end.replay
            ],
        )
    }

    /// The largest number of an end.
    pub(crate) fn last_end(&self) -> rusqlite::Result<u64> {
        self.number("SELECT COALESCE(MAX(ended), 0) FROM commands", [])
    }

    /// Sample requests of a sampling session that ended after the end numbered `after`, whose seq is in a
    /// range: at most `most`, with the number of their end, in its order.
    pub(crate) fn completions(
        &self,
        sampler: &SamplerId,
        seqs: RangeInclusive<u64>,
        after: u64,
        most: u64,
    ) -> rusqlite::Result<Vec<(Completion, u64)>> {
        // All ids of the session's requests lie between these two texts.
        let (from, to) = (format!("{sampler}:"), format!("{sampler};"));
        let sql = "SELECT request, failed, ended FROM commands
             WHERE request > ?1 AND request < ?2 AND model IS NULL AND done_ms IS NOT NULL
                 AND seq BETWEEN ?3 AND ?4 AND ended > ?5
             ORDER BY ended LIMIT ?6";
        let bounds = params![
            from,
            to,
            int(*seqs.start()),
            int(*seqs.end()),
            int(after),
            int(most)
        ];
        self.rows(sql, bounds, |row| {
            let completion = Completion {
                request: request(row)?,
                failed: row.get("failed")?,
            };
            Ok((completion, count(row, "ended")?))
        })
    }

    /// Deletes the result of a sample request that its client has. Returns the bytes that it had.
    pub(crate) fn discard(&self, tenant: &str, id: &RequestId) -> rusqlite::Result<u64> {
        let sql = "DELETE FROM commands
             WHERE request = ?1 AND tenant = ?2 AND model IS NULL AND done_ms IS NOT NULL
             RETURNING bytes";
        let bytes = self.row(sql, [id.as_str(), tenant], |row| count(row, "bytes"))?;
        Ok(bytes.unwrap_or(0))
    }

    /// Drops the payloads of commands of a model below `seq`, which a live checkpoint covers.
    pub(crate) fn drop_covered(&self, model: &ModelId, below: u64) -> rusqlite::Result<()> {
        let sql =
            "UPDATE commands SET payload = NULL, replay = 0, bytes = COALESCE(LENGTH(result), 0)
             WHERE model = ?1 AND seq < ?2 AND replay = 1";
        self.change(sql, params![model.as_str(), int(below)])
    }

    /// All commands that wait, in the order of their arrival.
    pub(crate) fn waiting(&self) -> rusqlite::Result<Vec<WaitingRow>> {
        let sql = "SELECT request, tenant, model, seq, kind, cost FROM commands
             WHERE done_ms IS NULL ORDER BY place";
        self.rows(sql, [], |row| {
            Ok(WaitingRow {
                request: request(row)?,
                tenant: row.get("tenant")?,
                model: model(row)?,
                seq: count(row, "seq")?,
                kind: row.get("kind")?,
                cost: count(row, "cost")?,
            })
        })
    }

    /// Checkpoint of a sample request; `None`: the base model.
    pub(crate) fn source(&self, id: &RequestId) -> rusqlite::Result<Option<String>> {
        let sql = "SELECT source FROM commands WHERE request = ?1";
        let found: Option<Option<_>> = self.row(sql, [id.as_str()], |row| row.get(0))?;
        Ok(found.flatten())
    }

    /// Whether a sample request of a checkpoint waits or runs.
    pub(crate) fn is_sampled(&self, path: &str) -> rusqlite::Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM commands WHERE done_ms IS NULL AND source = ?1)";
        Ok(self.number(sql, [path])? == 1)
    }

    /// Commands of a model that no live checkpoint covers, in order.
    pub(crate) fn replay(&self, model: &ModelId) -> rusqlite::Result<Vec<ReplayRow>> {
        let sql = "SELECT request, cost FROM commands WHERE model = ?1 AND replay = 1 ORDER BY seq";
        self.rows(sql, [model.as_str()], |row| {
            Ok(ReplayRow {
                request: request(row)?,
                cost: count(row, "cost")?,
            })
        })
    }

    /// Notes when results were retrieved.
    pub(crate) fn retrieved(&self, id: &RequestId, now_ms: u64) -> rusqlite::Result<()> {
        let sql =
            "UPDATE commands SET retrieved_ms = ?2 WHERE request = ?1 AND done_ms IS NOT NULL";
        self.change(sql, params![id.as_str(), int(now_ms)])
    }

    /// Deletes ended commands whose results are older than the limits: of those that were retrieved, and of
    /// the others. At most `most` of them.
    pub(crate) fn expire_results(
        &self,
        retrieved_before_ms: u64,
        done_before_ms: u64,
        most: u64,
    ) -> rusqlite::Result<()> {
        self.change(
            "DELETE FROM commands WHERE place IN (
                 SELECT place FROM commands WHERE done_ms IS NOT NULL AND replay = 0
                     AND (done_ms < ?2 OR retrieved_ms < ?1)
                 ORDER BY done_ms LIMIT ?3)",
            [int(retrieved_before_ms), int(done_before_ms), int(most)],
        )
    }

    /// Deletes the results that were retrieved longest ago, at most `most`. Returns their number.
    pub(crate) fn drop_oldest_retrieved(&self, most: u64) -> rusqlite::Result<usize> {
        let mut delete = self.connection.prepare_cached(
            "DELETE FROM commands WHERE place IN (
                 SELECT place FROM commands
                 WHERE done_ms IS NOT NULL AND replay = 0 AND retrieved_ms IS NOT NULL
                 ORDER BY retrieved_ms LIMIT ?1)",
        )?;
        delete.execute([int(most)])
    }

    /// Bytes of commands that ended.
    pub(crate) fn result_bytes(&self) -> rusqlite::Result<u64> {
        let sql = "SELECT COALESCE(SUM(bytes), 0) FROM commands WHERE done_ms IS NOT NULL";
        self.number(sql, [])
    }

    /// Commands of each tenant in the journal.
    pub(crate) fn tenant_uses(&self) -> rusqlite::Result<Vec<(String, TenantUse)>> {
        let sql = "SELECT tenant,
                 COALESCE(SUM(done_ms IS NULL AND model IS NOT NULL), 0) AS queued,
                 COALESCE(SUM(CASE WHEN done_ms IS NULL AND model IS NULL THEN cost ELSE 0 END), 0)
                     AS sequences,
                 COALESCE(SUM(bytes), 0) AS bytes
             FROM commands GROUP BY tenant";
        self.rows(sql, [], |row| {
            let usage = TenantUse {
                queued: count(row, "queued")?,
                sequences: count(row, "sequences")?,
                bytes: count(row, "bytes")?,
            };
            Ok((row.get("tenant")?, usage))
        })
    }

    /// Adds tokens to a tenant's day, counted since 1970 (UTC).
    pub(crate) fn add_tokens(&self, tenant: &str, day: u64, tokens: u64) -> rusqlite::Result<()> {
        let sql = "INSERT INTO tokens (tenant, day, tokens) VALUES (?1, ?2, ?3)
             ON CONFLICT (tenant, day) DO UPDATE SET tokens = tokens + excluded.tokens";
        self.change(sql, params![tenant, int(day), int(tokens)])
    }

    /// Tokens of each tenant on a day.
    pub(crate) fn tokens(&self, day: u64) -> rusqlite::Result<Vec<(String, u64)>> {
        let sql = "SELECT tenant, tokens FROM tokens WHERE day = ?1";
        self.rows(sql, [int(day)], |row| {
            Ok((row.get("tenant")?, count(row, "tokens")?))
        })
    }

    /// Forgets the tokens of days before `day`.
    pub(crate) fn forget_tokens(&self, before: u64) -> rusqlite::Result<()> {
        self.change("DELETE FROM tokens WHERE day < ?1", [int(before)])
    }
}
