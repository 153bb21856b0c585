//! A row of the quarantine: a pushed item, and the reason that keeps it from trainers.

use crate::hex::hex;
use crate::reason::Reason;
use crate::schema::Pushed;
use crate::typed_queue;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sinew_store::StoreError;
use sinew_store::queue::NewRow;

/// A row of the quarantine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuarantineRow {
    /// The item, as it was pushed.
    pub item: Pushed,
    /// The reason, with its fields.
    pub reason: Reason,
    /// Seconds since 1970 at which it was put here.
    pub at_unix_s: f64,
}

/// A row of the quarantine and its id, which is a hash of the item: the same item is the same row.
pub(crate) fn held_row(
    item: Pushed,
    reason: &Reason,
    now_s: f64,
) -> Result<(String, NewRow), StoreError> {
    let text = serde_json::to_vec(&item).unwrap_or_default();
    let id = format!("q-{}", hex(&Sha256::digest(&text)[..12]));
    let held = QuarantineRow {
        item,
        reason: reason.clone(),
        at_unix_s: now_s,
    };
    let row = typed_queue::row(id.clone(), &held)?;
    Ok((id, row))
}
