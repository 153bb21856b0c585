//! The open rollouts, by id.

use crate::live::LiveRollouts;
use crate::rollout::Rollout;
use crate::secret::Secret;
use sinew_dialect::ApiError;
use sinew_types::EpisodeId;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The open rollouts by id, by the name of their key, and by their trace id.
#[derive(Default)]
struct RolloutMap {
    ids: HashMap<String, Arc<Rollout>>,
    keys: HashMap<[u8; 16], String>,
    traces: HashMap<[u8; 16], String>,
}

impl RolloutMap {
    fn insert(&mut self, id: &EpisodeId, rollout: Arc<Rollout>) {
        self.keys.insert(rollout.key_name(), id.as_str().to_owned());
        self.traces
            .insert(rollout.trace_id(), id.as_str().to_owned());
        self.ids.insert(id.as_str().to_owned(), rollout);
    }
}

/// The open rollouts, up to a limit.
pub(crate) struct Rollouts {
    open: RwLock<RolloutMap>,
    /// Maximum number of open rollouts.
    limit: usize,
}

impl Rollouts {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            open: RwLock::default(),
            limit,
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, RolloutMap> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, RolloutMap> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// All open rollouts, in no particular order.
    pub(crate) fn all(&self) -> Vec<Arc<Rollout>> {
        self.read().ids.values().map(Arc::clone).collect()
    }

    /// Returns the open rollout with this id.
    pub(crate) fn find(&self, id: &str) -> Option<Arc<Rollout>> {
        self.read().ids.get(id).map(Arc::clone)
    }

    /// Returns the id of the open rollout for a key or a trace id.
    pub(crate) fn named(&self, key: Option<&str>, trace: Option<[u8; 16]>) -> Option<String> {
        let open = self.read();
        let by_key = key.and_then(|key| open.keys.get(&Secret::new(key).name()));
        let by_trace = || open.traces.get(trace.as_ref()?);
        by_key.or_else(by_trace).cloned()
    }

    /// Returns the open rollout `id`.
    ///
    /// # Errors
    /// 404 if there is none.
    pub(crate) fn known(&self, id: &EpisodeId) -> Result<Arc<Rollout>, ApiError> {
        self.find(id.as_str())
            .ok_or_else(|| ApiError::not_found(format!("there is no open rollout {id}")))
    }

    /// Returns the open rollout that `key`, or the request's trace id, gives access to.
    ///
    /// # Errors
    /// 401, the same for unknown ids and for wrong keys.
    pub(crate) fn authorize(
        &self,
        id: &str,
        key: Option<&str>,
        trace: Option<[u8; 16]>,
    ) -> Result<Arc<Rollout>, ApiError> {
        let fits = |r: &Arc<Rollout>| r.is_opened_by(key) || trace == Some(r.trace_id());
        let rollout = self.find(id).filter(fits);
        rollout.ok_or_else(|| ApiError::unauthorized("this key does not open this rollout"))
    }

    /// Opens a rollout. `record` is called after all other checks have passed.
    ///
    /// # Errors
    /// If there are too many, the id is taken, or `record` fails.
    pub(crate) fn open<T>(
        &self,
        id: &EpisodeId,
        rollout: Arc<Rollout>,
        record: impl FnOnce() -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut open = self.write();
        if open.ids.len() >= self.limit {
            let why = format!(
                "{} rollouts are open, the limit of this gateway",
                self.limit
            );
            return Err(ApiError::overloaded("too_many_rollouts", why));
        }
        if open.ids.contains_key(id.as_str()) {
            let why = format!("rollout {id} is open already");
            return Err(ApiError::conflict("rollout_exists", why));
        }
        let recorded = record()?;
        open.insert(id, rollout);
        Ok(recorded)
    }

    /// Restores a rollout that was open before a restart.
    pub(crate) fn restore(&self, id: &EpisodeId, rollout: Arc<Rollout>) {
        self.write().insert(id, rollout);
    }

    /// Removes a rollout. Returns whether it was open.
    pub(crate) fn remove(&self, id: &EpisodeId) -> bool {
        let mut open = self.write();
        let removed = open.ids.remove(id.as_str());
        if let Some(rollout) = &removed {
            open.keys.remove(&rollout.key_name());
            open.traces.remove(&rollout.trace_id());
        }
        removed.is_some()
    }

    /// Returns the `limit` rollouts that have been in their phase longest. They end after `ttl_s` seconds
    /// without a call.
    pub(crate) fn live(&self, limit: usize, ttl_s: f64) -> LiveRollouts {
        let open = self.all();
        let mut rollouts: Vec<_> = open.iter().map(|rollout| rollout.live(ttl_s)).collect();
        rollouts.sort_by(|a, b| b.phase_s.total_cmp(&a.phase_s));
        rollouts.truncate(limit);
        LiveRollouts {
            total: open.len(),
            rollouts,
        }
    }
}
