//! Sampling sessions in the journal.

use super::{Journal, count, int};
use crate::desk::types::{SamplerId, SessionId};
use rusqlite::{Row, params};

/// A sampling session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SamplerRow {
    pub(crate) sampler: SamplerId,
    pub(crate) session: SessionId,
    pub(crate) tenant: String,
    pub(crate) created_ms: u64,
    pub(crate) base_model: String,
    /// Its checkpoint; `None`: the base model.
    pub(crate) path: Option<String>,
    /// Further clients that joined.
    pub(crate) clients: u64,
}

fn read(row: &Row<'_>) -> rusqlite::Result<SamplerRow> {
    Ok(SamplerRow {
        sampler: SamplerId::from(row.get::<_, String>("sampler")?),
        session: SessionId::from(row.get::<_, String>("session")?),
        tenant: row.get("tenant")?,
        created_ms: count(row, "created_ms")?,
        base_model: row.get("base_model")?,
        path: row.get("path")?,
        clients: count(row, "clients")?,
    })
}

impl Journal {
    /// Adds a sampling session.
    pub(crate) fn insert_sampler(&self, row: &SamplerRow) -> rusqlite::Result<()> {
        self.change(
            "INSERT INTO samplers (sampler, session, tenant, created_ms, base_model, path, clients)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                row.sampler.as_str(),
                row.session.as_str(),
                row.tenant,
                int(row.created_ms),
                row.base_model,
                row.path,
                int(row.clients)
            ],
        )
    }

    /// A sampling session by its id.
    pub(crate) fn sampler(&self, sampler: &SamplerId) -> rusqlite::Result<Option<SamplerRow>> {
        let sql = "SELECT * FROM samplers WHERE sampler = ?1";
        self.row(sql, [sampler.as_str()], read)
    }

    /// Sampling sessions of a session, in the order in which they were made.
    pub(crate) fn session_samplers(
        &self,
        session: &SessionId,
    ) -> rusqlite::Result<Vec<SamplerRow>> {
        let sql = "SELECT * FROM samplers WHERE session = ?1 ORDER BY created_ms, rowid";
        self.rows(sql, [session.as_str()], read)
    }

    /// Notes a further client, and returns its number, from 1.
    pub(crate) fn join_sampler(&self, sampler: &SamplerId) -> rusqlite::Result<u64> {
        let sql = "UPDATE samplers SET clients = clients + 1 WHERE sampler = ?1 RETURNING clients";
        self.number(sql, [sampler.as_str()])
    }
}
