//! The quarantine: rows that are not given to trainers, with the reason, until they are released or
//! deleted.
//!
//! A row holds the item as it was pushed. Releasing a row pushes it again, with the current configuration and
//! perhaps another kind. A full quarantine refuses wrong items, and rows that should move to it stay where
//! they are.

use crate::check::Entry;
use crate::index;
use crate::pool::{Answer, Pool, PoolError};
use crate::quarantine_row::{QuarantineRow, held_row};
use crate::reason::Reason;
use crate::schema::{Kind, Pushed};
use crate::typed_queue::{TRAINER, is_full};
use serde_json::{Value, json};
use sinew_store::StoreError;
use sinew_store::queue::{LeaseId, PutOutcome};

/// Maximum length of a trainer's reason, in characters; a longer one is cut.
const MAX_DETAIL_CHARS: usize = 1000;

impl Pool {
    /// An admitted entry in the form of a pushed item.
    pub(crate) fn unchecked(&self, entry: &Entry) -> Result<Pushed, PoolError> {
        let trace = &entry.trace;
        let nodes: Vec<Value> = trace.nodes.iter().map(pushed_node).collect();
        let raw = json!({
            "id": trace.episode, "task": trace.task, "task_kind": trace.task_kind,
            "group": trace.group, "group_size": entry.group_size, "kind": entry.kind,
            "reward": trace.outcome.reward, "success": trace.outcome.success,
            "metrics": trace.outcome.metrics, "end": trace.end,
            "started_unix_s": trace.timing.started_unix_s, "nodes": nodes,
        });
        Ok(Pushed {
            raw: raw.to_string(),
            tokenizer: Some(self.tokenizer.clone()),
            model: self.config.model.clone(),
            source: entry.source.clone(),
        })
    }

    /// Moves rows that the lease holds and the trainer cannot use to quarantine, with the trainer's
    /// reason. Returns their number; the others are not the lease's own any more, or quarantine is
    /// full: then they stay leased, and are not given out meanwhile.
    pub fn reject(
        &self,
        lease: u64,
        ids: &[String],
        detail: &str,
        now_s: f64,
    ) -> Result<usize, PoolError> {
        let mut index = self.guard()?;
        let mut rejected = 0;
        for id in ids {
            let Some(key) = index.ids.get(id).map(|hash| index::key(hash, id)) else {
                continue;
            };
            let Some(entry) = self.rows.read::<Entry>(&key)? else {
                continue;
            };
            let detail = detail.chars().take(MAX_DETAIL_CHARS).collect();
            let reason = Reason::Unusable { detail };
            let (held, row) = held_row(self.unchecked(&entry)?, &reason, now_s)?;
            let put = self.quarantine.0.put(&[row]);
            if is_full(&put) {
                tracing::warn!(%reason, "quarantine is full: release or delete some of its rows");
                break;
            }
            let new = put?.contains(&PutOutcome::New);
            let keys = [key];
            if self.rows.0.release(TRAINER, LeaseId(lease), &keys)?.changed == 0 {
                if new {
                    self.quarantine.0.remove(&[held])?;
                }
                continue;
            }
            self.rows.0.remove(&keys)?;
            index.ids.remove(id);
            index.drop_row(&keys[0]);
            rejected += 1;
        }
        Ok(rejected)
    }

    /// Rows of the quarantine, oldest first, from after the row `after`, at most `limit`.
    pub fn quarantined(
        &self,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<(String, QuarantineRow)>, PoolError> {
        let rows = self.quarantine.rows()?;
        let from = match after {
            None => 0,
            Some(after) => rows
                .iter()
                .position(|r| r.key == after)
                .map_or(0, |i| i + 1),
        };
        let mut out = Vec::new();
        for row in rows.into_iter().skip(from).take(limit) {
            if let Some(held) = self.quarantine.read(&row.key)? {
                out.push((row.key, held));
            }
        }
        Ok(out)
    }

    /// Checks a row of the quarantine again, with the present configuration, and as another kind if one is
    /// given: text that is not a policy's sample can still be imitated. An admitted row leaves the
    /// quarantine.
    ///
    /// # Errors
    /// If there is no such row.
    pub fn revalidate(
        &self,
        id: &str,
        kind: Option<Kind>,
        now_s: f64,
    ) -> Result<Answer, PoolError> {
        let unknown = || PoolError::Unknown { id: id.to_owned() };
        let held: QuarantineRow = self.quarantine.read(id)?.ok_or_else(unknown)?;
        let mut item = held.item.clone();
        if let Some(kind) = kind {
            let mut value: Value = serde_json::from_str(&item.raw).unwrap_or_default();
            if let Some(fields) = value.as_object_mut() {
                fields.insert("kind".into(), json!(kind));
            }
            item.raw = value.to_string();
        }
        match self.check(&item, now_s) {
            // It stays as it came.
            Err(reason) => Ok(Answer::Quarantined {
                quarantine: id.to_owned(),
                message: reason.to_string(),
                reason,
            }),
            Ok(entry) => {
                let answer = self.admit(vec![(held.item, Ok(entry))], now_s)?.pop();
                let answer = answer.ok_or_else(unknown)?;
                if !matches!(answer, Answer::Quarantined { .. }) {
                    self.quarantine.0.remove(&[id.to_owned()])?;
                }
                Ok(answer)
            }
        }
    }

    /// Deletes a row of the quarantine.
    pub fn discard(&self, id: &str) -> Result<(), PoolError> {
        match self.quarantine.0.remove(&[id.to_owned()]) {
            Ok(_) => Ok(()),
            Err(StoreError::Queue(_)) => Err(PoolError::Unknown { id: id.to_owned() }),
            Err(e) => Err(e.into()),
        }
    }
}

/// A node in the form of a pushed one.
fn pushed_node(node: &sinew_types::Node) -> Value {
    let mut value = json!({
        "parent": (node.parent != sinew_types::NO_PARENT).then_some(node.parent),
        "kind": node.kind, "tokens": node.tokens, "turn": node.turn,
        "messages": node.messages, "finish": node.finish,
        "process_reward": node.process_reward, "state_hash": node.state_hash,
    });
    if node.kind == sinew_types::TokenKind::Sampled {
        value["logprobs"] = json!(node.logprobs);
        value["temperature"] = json!(node.temperature);
        value["versions"] = json!(node.versions);
    }
    value
}
