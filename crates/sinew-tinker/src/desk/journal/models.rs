//! Models in the journal.

use super::{Journal, count, int, packed, unpacked};
use crate::desk::types::{ModelId, ModelSpec, Page, SessionId};
use rusqlite::{Row, params};

/// A model.
#[derive(Clone, Debug)]
pub(crate) struct ModelRow {
    pub(crate) model: ModelId,
    pub(crate) session: SessionId,
    pub(crate) tenant: String,
    pub(crate) created_ms: u64,
    pub(crate) last_ms: u64,
    pub(crate) spec: ModelSpec,
    /// Seq of the command that runs next; 0: it is being made.
    pub(crate) next: u64,
    /// The live checkpoint holds the effects of commands below this seq.
    pub(crate) covered: u64,
    pub(crate) steps: u64,
    pub(crate) saves: u64,
    /// Folder of the live checkpoint.
    pub(crate) live: Option<String>,
    pub(crate) live_bytes: u64,
    pub(crate) save_bytes: u64,
    /// The reason for which it takes no commands.
    pub(crate) ended: Option<String>,
    pub(crate) corrupted: bool,
}

fn read(row: &Row<'_>) -> rusqlite::Result<ModelRow> {
    Ok(ModelRow {
        model: ModelId::from(row.get::<_, String>("model")?),
        session: SessionId::from(row.get::<_, String>("session")?),
        tenant: row.get("tenant")?,
        created_ms: count(row, "created_ms")?,
        last_ms: count(row, "last_ms")?,
        spec: unpacked(row, "spec")?,
        next: count(row, "next")?,
        covered: count(row, "covered")?,
        steps: count(row, "steps")?,
        saves: count(row, "saves")?,
        live: row.get("live")?,
        live_bytes: count(row, "live_bytes")?,
        save_bytes: count(row, "save_bytes")?,
        ended: row.get("ended")?,
        corrupted: row.get("corrupted")?,
    })
}

impl Journal {
    /// Adds a model, or replaces the row that it has.
    pub(crate) fn put_model(&self, row: &ModelRow) -> rusqlite::Result<()> {
        self.change(
            "INSERT OR REPLACE INTO models (model, session, tenant, created_ms, last_ms, spec, next, covered,
                 steps, saves, live, live_bytes, save_bytes, ended, corrupted)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
            params![
                row.model.as_str(),
                row.session.as_str(),
                row.tenant,
                int(row.created_ms),
                int(row.last_ms),
                packed(&row.spec)?,
                int(row.next),
                int(row.covered),
                int(row.steps),
                int(row.saves),
                row.live,
                int(row.live_bytes),
                int(row.save_bytes),
                row.ended,
                row.corrupted
            ],
        )
    }

    /// A model by its id.
    pub(crate) fn model(&self, model: &ModelId) -> rusqlite::Result<Option<ModelRow>> {
        let sql = "SELECT * FROM models WHERE model = ?1";
        self.row(sql, [model.as_str()], read)
    }

    /// Models of a tenant, newest first, and their number.
    pub(crate) fn models(
        &self,
        tenant: &str,
        page: Page,
    ) -> rusqlite::Result<(Vec<ModelRow>, u64)> {
        let rows = self.rows(
            "SELECT * FROM models WHERE tenant = ?1
             ORDER BY created_ms DESC, model LIMIT ?2 OFFSET ?3",
            params![tenant, int(page.limit), int(page.offset)],
            read,
        )?;
        let total = self.number("SELECT COUNT(*) FROM models WHERE tenant = ?1", [tenant])?;
        Ok((rows, total))
    }

    /// Models that take commands.
    pub(crate) fn open_models(&self) -> rusqlite::Result<Vec<ModelRow>> {
        self.rows("SELECT * FROM models WHERE ended IS NULL", [], read)
    }

    /// Models of a session, in the order in which they were made.
    pub(crate) fn session_models(&self, session: &SessionId) -> rusqlite::Result<Vec<ModelRow>> {
        let sql = "SELECT * FROM models WHERE session = ?1 ORDER BY created_ms, model";
        self.rows(sql, [session.as_str()], read)
    }

    /// Bytes of all live checkpoints.
    pub(crate) fn live_bytes(&self) -> rusqlite::Result<u64> {
        let sql = "SELECT COALESCE(SUM(live_bytes), 0) FROM models WHERE live IS NOT NULL";
        self.number(sql, [])
    }

    /// Folders of all live checkpoints.
    pub(crate) fn live_folders(&self) -> rusqlite::Result<Vec<String>> {
        let sql = "SELECT live FROM models WHERE live IS NOT NULL";
        self.rows(sql, [], |row| row.get(0))
    }
}
