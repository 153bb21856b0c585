//! Checkpoints in the journal.

use super::{Journal, count, int, maybe_count, maybe_unpacked, packed, unpacked};
use crate::desk::types::{
    CheckpointInfo, CheckpointKind, CheckpointPath, LoraSpec, Metadata, ModelId, Page,
};
use rusqlite::types::Type;
use rusqlite::{Row, params};

/// A checkpoint of a client, or one for sampling without a name.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointRow {
    pub(crate) path: CheckpointPath,
    pub(crate) tenant: String,
    /// Whether a client gave the name.
    pub(crate) named: bool,
    /// Its folder, relative to the state folder.
    pub(crate) folder: String,
    pub(crate) bytes: u64,
    pub(crate) created_ms: u64,
    pub(crate) used_ms: u64,
    pub(crate) expires_ms: Option<u64>,
    pub(crate) base_model: String,
    pub(crate) lora: Option<LoraSpec>,
    pub(crate) metadata: Metadata,
    /// Its number among the model's checkpoints for sampling, from 1; the number of steps of a state.
    pub(crate) version: u64,
}

impl CheckpointRow {
    /// The record that clients see.
    pub(crate) fn info(&self) -> CheckpointInfo {
        CheckpointInfo {
            path: self.path.clone(),
            base_model: self.base_model.clone(),
            lora: self.lora,
            created_ms: self.created_ms,
            bytes: self.bytes,
            expires_ms: self.expires_ms,
            metadata: self.metadata.clone(),
        }
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<CheckpointRow> {
    let text: String = row.get("path")?;
    let path = CheckpointPath::parse(&text)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(e)))?;
    Ok(CheckpointRow {
        path,
        tenant: row.get("tenant")?,
        named: row.get("named")?,
        folder: row.get("folder")?,
        bytes: count(row, "bytes")?,
        created_ms: count(row, "created_ms")?,
        used_ms: count(row, "used_ms")?,
        expires_ms: maybe_count(row, "expires_ms")?,
        base_model: row.get("base_model")?,
        lora: maybe_unpacked(row, "lora")?,
        metadata: unpacked(row, "metadata")?,
        version: count(row, "version")?,
    })
}

impl Journal {
    /// Adds a checkpoint, or replaces the one at its path.
    pub(crate) fn put_checkpoint(&self, row: &CheckpointRow) -> rusqlite::Result<()> {
        let lora = row.lora.as_ref().map(packed).transpose()?;
        self.change(
            "INSERT OR REPLACE INTO checkpoints (path, model, tenant, kind, named, folder, bytes, created_ms,
                 used_ms, expires_ms, base_model, lora, metadata, version)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
            params![
                row.path.to_string(),
                row.path.model.as_str(),
                row.tenant,
                row.path.kind.segment(),
                row.named,
                row.folder,
                int(row.bytes),
                int(row.created_ms),
                int(row.used_ms),
                row.expires_ms.map(int),
                row.base_model,
                lora,
                packed(&row.metadata)?,
                int(row.version)
            ],
        )
    }

    /// A checkpoint by its path.
    pub(crate) fn checkpoint(
        &self,
        path: &CheckpointPath,
    ) -> rusqlite::Result<Option<CheckpointRow>> {
        let sql = "SELECT * FROM checkpoints WHERE path = ?1";
        self.row(sql, [path.to_string()], read)
    }

    /// Deletes the row of a checkpoint.
    pub(crate) fn delete_checkpoint(&self, path: &CheckpointPath) -> rusqlite::Result<()> {
        let sql = "DELETE FROM checkpoints WHERE path = ?1";
        self.change(sql, [path.to_string()])
    }

    /// Checkpoints with names of a tenant, or of one of its models, newest first, and their number.
    pub(crate) fn checkpoints(
        &self,
        tenant: &str,
        model: Option<&ModelId>,
        page: Page,
    ) -> rusqlite::Result<(Vec<CheckpointRow>, u64)> {
        let model = model.map(ModelId::as_str);
        let rows = self.rows(
            "SELECT * FROM checkpoints WHERE tenant = ?1 AND named = 1 AND (?2 IS NULL OR model = ?2)
             ORDER BY created_ms DESC, path LIMIT ?3 OFFSET ?4",
            params![tenant, model, int(page.limit), int(page.offset)],
            read,
        )?;
        let total = self.number(
            "SELECT COUNT(*) FROM checkpoints
             WHERE tenant = ?1 AND named = 1 AND (?2 IS NULL OR model = ?2)",
            params![tenant, model],
        )?;
        Ok((rows, total))
    }

    /// The newest checkpoint with a name of a model and kind.
    pub(crate) fn newest_checkpoint(
        &self,
        model: &ModelId,
        kind: CheckpointKind,
    ) -> rusqlite::Result<Option<CheckpointRow>> {
        self.row(
            "SELECT * FROM checkpoints WHERE model = ?1 AND kind = ?2 AND named = 1
             ORDER BY created_ms DESC, path DESC LIMIT 1",
            [model.as_str(), kind.segment()],
            read,
        )
    }

    /// Checkpoints of a model without names, the one used longest ago first.
    pub(crate) fn snapshots(&self, model: &ModelId) -> rusqlite::Result<Vec<CheckpointRow>> {
        let sql =
            "SELECT * FROM checkpoints WHERE model = ?1 AND named = 0 ORDER BY used_ms, version";
        self.rows(sql, [model.as_str()], read)
    }

    /// Checkpoints whose time is over.
    pub(crate) fn expired_checkpoints(&self, now_ms: u64) -> rusqlite::Result<Vec<CheckpointRow>> {
        let sql = "SELECT * FROM checkpoints WHERE expires_ms <= ?1 LIMIT 256";
        self.rows(sql, [int(now_ms)], read)
    }

    /// Has a checkpoint deleted at a time.
    pub(crate) fn set_expiry(
        &self,
        path: &CheckpointPath,
        expires_ms: Option<u64>,
    ) -> rusqlite::Result<()> {
        let sql = "UPDATE checkpoints SET expires_ms = ?2 WHERE path = ?1";
        self.change(sql, params![path.to_string(), expires_ms.map(int)])
    }

    /// Notes that a checkpoint is sampled.
    pub(crate) fn used_checkpoint(
        &self,
        path: &CheckpointPath,
        now_ms: u64,
    ) -> rusqlite::Result<()> {
        let sql = "UPDATE checkpoints SET used_ms = ?2 WHERE path = ?1";
        self.change(sql, params![path.to_string(), int(now_ms)])
    }

    /// Number and bytes of a tenant's checkpoints with names.
    pub(crate) fn storage(&self, tenant: &str) -> rusqlite::Result<(u64, u64)> {
        let mut query = self.connection.prepare_cached(
            "SELECT COUNT(*) AS n, COALESCE(SUM(bytes), 0) AS bytes FROM checkpoints
             WHERE tenant = ?1 AND named = 1",
        )?;
        query.query_row([tenant], |row| Ok((count(row, "n")?, count(row, "bytes")?)))
    }

    /// Bytes of all checkpoints.
    pub(crate) fn checkpoint_bytes(&self) -> rusqlite::Result<u64> {
        self.number("SELECT COALESCE(SUM(bytes), 0) FROM checkpoints", [])
    }

    /// Folders of all checkpoints.
    pub(crate) fn checkpoint_folders(&self) -> rusqlite::Result<Vec<String>> {
        self.rows("SELECT folder FROM checkpoints", [], |row| row.get(0))
    }
}
