//! Sessions in the journal.

use super::{Journal, count, int, maybe_unpacked, packed, unpacked};
use crate::desk::types::{FinishReason, NewSession, Page, SessionId};
use rusqlite::{Row, params};
use serde::{Deserialize, Serialize};

/// The end of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FinishRow {
    /// Its client's word on the end; `None`: its client was silent for too long.
    pub(crate) reason: Option<FinishReason>,
    /// Words of the client.
    pub(crate) detail: Option<String>,
}

/// A session.
#[derive(Clone, Debug)]
pub(crate) struct SessionRow {
    pub(crate) session: SessionId,
    pub(crate) tenant: String,
    pub(crate) created_ms: u64,
    pub(crate) about: NewSession,
    pub(crate) finish: Option<FinishRow>,
}

fn read(row: &Row<'_>) -> rusqlite::Result<SessionRow> {
    Ok(SessionRow {
        session: SessionId::from(row.get::<_, String>("session")?),
        tenant: row.get("tenant")?,
        created_ms: count(row, "created_ms")?,
        about: unpacked(row, "about")?,
        finish: maybe_unpacked(row, "finish")?,
    })
}

impl Journal {
    /// Adds a session.
    pub(crate) fn insert_session(&self, row: &SessionRow) -> rusqlite::Result<()> {
        self.change(
            "INSERT INTO sessions (session, tenant, created_ms, about) VALUES (?1, ?2, ?3, ?4)",
            params![
                row.session.as_str(),
                row.tenant,
                int(row.created_ms),
                packed(&row.about)?
            ],
        )
    }

    /// A session by its id.
    pub(crate) fn session(&self, session: &SessionId) -> rusqlite::Result<Option<SessionRow>> {
        let sql = "SELECT * FROM sessions WHERE session = ?1";
        self.row(sql, [session.as_str()], read)
    }

    /// Sessions of a tenant, newest first, and their number. Rows order those of one millisecond.
    pub(crate) fn sessions(
        &self,
        tenant: &str,
        page: Page,
    ) -> rusqlite::Result<(Vec<SessionRow>, u64)> {
        let rows = self.rows(
            "SELECT * FROM sessions WHERE tenant = ?1
             ORDER BY created_ms DESC, rowid DESC LIMIT ?2 OFFSET ?3",
            params![tenant, int(page.limit), int(page.offset)],
            read,
        )?;
        let total = self.number("SELECT COUNT(*) FROM sessions WHERE tenant = ?1", [tenant])?;
        Ok((rows, total))
    }

    /// Sessions that take commands.
    pub(crate) fn open_sessions(&self) -> rusqlite::Result<Vec<SessionId>> {
        let sql = "SELECT session FROM sessions WHERE finish IS NULL";
        self.rows(sql, [], |row| row.get::<_, String>(0).map(SessionId::from))
    }

    /// Ends a session.
    pub(crate) fn finish_session(
        &self,
        session: &SessionId,
        finish: &FinishRow,
    ) -> rusqlite::Result<()> {
        let sql = "UPDATE sessions SET finish = ?2 WHERE session = ?1 AND finish IS NULL";
        self.change(sql, params![session.as_str(), packed(finish)?])
    }

    /// Checkpoints with names of a session's models, and their bytes.
    pub(crate) fn session_storage(&self, session: &SessionId) -> rusqlite::Result<(u64, u64)> {
        let mut query = self.connection.prepare_cached(
            "SELECT COUNT(*) AS n, COALESCE(SUM(bytes), 0) AS bytes FROM checkpoints
             WHERE named = 1 AND model IN (SELECT model FROM models WHERE session = ?1)",
        )?;
        query.query_row([session.as_str()], |row| {
            Ok((count(row, "n")?, count(row, "bytes")?))
        })
    }
}
