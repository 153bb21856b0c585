//! A queue of the pool with typed rows: its field `trace` holds the row's only copy.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_store::StoreError;
use sinew_store::queue::{
    Consumer, Field, NewRow, Queue, QueueError, RowState, RowView, fields, pack, unpack,
};
use std::sync::Arc;

/// The consumer for which trainers lease: a row is done once one of them acked it.
pub(crate) const TRAINER: &str = "trainer";

/// Rows of one call of the queue.
const PAGE: usize = 10_000;

/// A queue whose rows hold values of the pool.
#[derive(Clone, Debug)]
pub(crate) struct TypedQueue(pub(crate) Arc<dyn Queue>);

/// A row that holds a value.
pub(crate) fn row<T: Serialize>(key: String, value: &T) -> Result<NewRow, StoreError> {
    let value = Field::new(fields::TRACE, pack(&key, value)?);
    Ok(NewRow::new(key, value))
}

/// Field `reward`: a number, as 8 bytes, least significant first.
pub(crate) fn reward_field(reward: f64) -> Field {
    Field::new(fields::REWARD, reward.to_le_bytes().to_vec())
}

impl TypedQueue {
    /// The queue from which trainers draw.
    pub(crate) fn for_trainers(self) -> Result<Self, StoreError> {
        self.0.join(&Consumer {
            name: TRAINER.into(),
            needs: vec![fields::TRACE.into(), fields::REWARD.into()],
            writes: Vec::new(),
            last: true,
        })?;
        Ok(self)
    }

    /// The value of a row; `None` if it is not known or done.
    pub(crate) fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, StoreError> {
        let value = self.0.read(key, fields::TRACE)?;
        value.map(|value| unpack(key, &value)).transpose()
    }

    /// Every row that is known, oldest first.
    pub(crate) fn rows(&self) -> Result<Vec<RowView>, StoreError> {
        let mut rows: Vec<RowView> = Vec::new();
        loop {
            let page = self.0.rows(rows.last().map(|r| r.seq), PAGE)?;
            let end = page.len() < PAGE;
            rows.extend(page);
            if end {
                return Ok(rows);
            }
        }
    }

    /// State of a row for trainers.
    pub(crate) fn state(&self, key: &str) -> Result<Option<RowState>, StoreError> {
        self.0.state(TRAINER, key)
    }

    /// Rows that are not done.
    pub(crate) fn len(&self) -> Result<usize, StoreError> {
        Ok(self.0.stats()?.rows)
    }
}

/// Whether a call failed for want of room.
pub(crate) fn is_full<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Queue(QueueError::Full { .. })))
}
