//! Scores that arrive after a rollout was finished: one, or many as JSON lines.
//!
//! They are stored in the store's ledger; of each name and source, the newest one counts. An open rollout is
//! not in the ledger: its reward is set directly, or after it was finished.

use crate::archive::{Archive, blocking};
use crate::failures::store_failed;
use crate::gateway::Gateway;
use serde_json::{Map, Value, json};
use sinew_dialect::ApiError;
use sinew_store::{ImportReport, import_scores};
use std::time::{SystemTime, UNIX_EPOCH};

/// Source of scores that do not name one.
const SOURCE: &str = "api";

impl Archive {
    /// Stores rows of scores: JSON lines in the format of `sinew reward import`.
    ///
    /// # Errors
    /// If the gateway has no store, or the store refuses.
    pub(crate) async fn put_scores(&self, rows: Vec<u8>) -> Result<ImportReport, ApiError> {
        let Some(store) = self.store() else {
            let why = "this gateway keeps no store, so that nothing can be scored later";
            return Err(ApiError::bad_request("no_store", why));
        };
        blocking("store_failed", move || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let now_us = now.map_or(0, |d| d.as_micros() as u64);
            let rows = &mut rows.as_slice();
            import_scores(rows, store.as_ref(), SOURCE, now_us).map_err(store_failed)
        })
        .await
    }
}

/// Stores one score of a finished rollout. `row` contains the value, and optionally reason, time and source.
///
/// # Errors
/// If the rollout is open or unknown, or the score is refused.
pub(crate) async fn put_one(
    gateway: &Gateway,
    id: &str,
    name: &str,
    mut row: Map<String, Value>,
) -> Result<Value, ApiError> {
    for (field, value) in [("episode", id), ("name", name)] {
        if row.insert(field.into(), json!(value)).is_some() {
            let why = "is in the path; leave it out of the body";
            return Err(ApiError::invalid(field, why));
        }
    }
    if gateway.rollouts().find(id).is_some() {
        let why = format!("rollout {id} is open: POST /rollouts/{id}/reward, or finish it first");
        return Err(ApiError::conflict("rollout_open", why));
    }
    let rows = Value::Object(row).to_string().into_bytes();
    let report = gateway.archive().put_scores(rows).await?;
    match report.bad.first() {
        Some(bad) if bad.why.contains("is not in the store") => {
            Err(ApiError::not_found(bad.why.clone()))
        }
        Some(bad) => Err(ApiError::bad_request("score_refused", bad.why.clone())),
        None => Ok(json!({"id": id, "name": name, "new": report.new == 1})),
    }
}
