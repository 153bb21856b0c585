//! A row of the quarantine: a pushed item and why it is not given to trainers.

use crate::hex::hex;
use crate::reason::Reason;
use crate::schema::Pushed;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sinew_store::{QueueRow, StoreError};

/// A row of the quarantine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub item: Pushed,
    pub reason: Reason,
    pub at_unix_s: f64,
}

/// A row of the quarantine and its id: the same item is the same row.
pub(crate) fn held_row(
    item: Pushed,
    reason: &Reason,
    now_s: f64,
) -> Result<(String, QueueRow), StoreError> {
    let text = serde_json::to_vec(&item).unwrap_or_default();
    let id = format!("q-{}", hex(&Sha256::digest(&text)[..12]));
    let held = Held {
        item,
        reason: reason.clone(),
        at_unix_s: now_s,
    };
    let row = QueueRow::of(id.clone(), &held)?;
    Ok((id, row))
}
