//! The row that every changing call of a store locks first.

use crate::connection::Fault;
use tokio_postgres::Transaction;

/// The row of `about`, locked by a transaction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    /// Number of the newest owner.
    pub(crate) fence: u64,
    /// Last numbers of episodes, updates and scores.
    pub(crate) episodes: i64,
    pub(crate) batches: i64,
    pub(crate) scores: i64,
    /// Bytes of all payloads.
    pub(crate) bytes: u64,
    /// New objects have this number in their names; see `sweep`.
    pub(crate) epoch: i64,
}

/// Locks the row until the transaction ends.
pub(crate) async fn locked(tx: &Transaction<'_>) -> Result<About, Fault> {
    let sql = "SELECT fence, episodes, batches, scores, bytes, epoch FROM about FOR UPDATE";
    let row = tx.query_one(sql, &[]).await?;
    let count = |at: usize| Ok::<i64, Fault>(row.try_get::<_, i64>(at)?);
    Ok(About {
        fence: count(0)?.max(0) as u64,
        episodes: count(1)?,
        batches: count(2)?,
        scores: count(3)?,
        bytes: count(4)?.max(0) as u64,
        epoch: count(5)?,
    })
}
