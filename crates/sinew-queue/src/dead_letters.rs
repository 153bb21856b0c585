//! Manual handling of rows: taking them out of the way, and back.

use crate::server::system_clock;
use sinew_store::StoreError;
use sinew_store::queue::{Queue, QueueError, RowRequest, RowSelection, RowState, RowView};

/// Rows of one page when the queue is listed.
const PAGE: usize = 10_000;
/// Deliveries after which a row that will not die is given up; limits of queues are far lower.
const MAX_DELIVERIES: usize = 10_000;
/// Milliseconds that a row is held while it is put out of the way.
const HOLD_MS: u64 = 60_000;

/// Makes rows that are ready for a consumer dead, with the reason: they are leased and failed until they are.
/// Returns how many died; rows that are dead already are not counted.
///
/// # Errors
/// [`QueueError::NotReady`] for a row that is leased or acked, or lacks a field; earlier ones are dead then.
pub fn bury(
    queue: &dyn Queue,
    consumer: &str,
    keys: &[String],
    reason: &str,
) -> Result<usize, StoreError> {
    let clock = system_clock();
    let mut buried = 0;
    for key in keys {
        let mut died = false;
        for _ in 0..MAX_DELIVERIES {
            match queue.state(consumer, key)? {
                Some(RowState::Ready) => {}
                Some(RowState::Dead { .. }) => break,
                Some(_) => return Err(QueueError::NotReady { key: key.clone() }.into()),
                None => return Err(QueueError::UnknownRow { key: key.clone() }.into()),
            }
            let ask = RowRequest {
                consumer: consumer.into(),
                holder: "a person".into(),
                ttl_ms: HOLD_MS,
                take: RowSelection::Keys(vec![key.clone()]),
            };
            if let Some(lease) = queue.lease(&ask, clock())?.lease {
                let failed = queue.fail(consumer, lease, std::slice::from_ref(key), reason)?;
                died |= failed.changed > 0;
            }
        }
        buried += usize::from(died);
    }
    Ok(buried)
}

/// Rows in the order of their puts that `fits` takes, up to `limit`, from the one after `after`.
///
/// # Errors
/// If the queue cannot be read.
pub fn listed(
    queue: &dyn Queue,
    mut after: Option<u64>,
    limit: usize,
    fits: &dyn Fn(&RowView) -> bool,
) -> Result<Vec<RowView>, StoreError> {
    let mut rows = Vec::new();
    loop {
        let page = queue.rows(after, PAGE)?;
        let full = page.len() == PAGE;
        after = page.last().map(|row| row.seq).or(after);
        let left = limit - rows.len();
        rows.extend(page.into_iter().filter(|row| fits(row)).take(left));
        if !full || rows.len() == limit {
            return Ok(rows);
        }
    }
}
