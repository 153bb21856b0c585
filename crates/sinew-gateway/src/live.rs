//! Phases of open rollouts, those longest in their phase first. This is the first place to look when nothing
//! progresses.

use crate::rollout::{Rollout, unix_s};
use crate::running::RunningCall;
use serde::Serialize;
use sinew_dialect::ApiError;
use sinew_types::{AdapterName, EpisodeId, GroupId, TaskId};
use std::sync::Arc;
use tokio::time::Instant;

/// Default number of rollouts in an answer.
const PAGE: usize = 100;
/// Maximum `limit` of a request.
const MAX_PAGE: usize = 1000;

/// Phase of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutPhase {
    /// The agent works, and no call runs. The rollout ends after a time without calls.
    Agent,
    /// All of its calls wait for capacity.
    Wait,
    /// The model generates.
    Generate,
    /// The rollout accepts no more calls, but is not finished.
    End,
}

/// An unfinished rollout.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveRollout {
    pub id: EpisodeId,
    pub group: GroupId,
    pub task: TaskId,
    pub run: String,
    pub draw: u64,
    pub purpose: String,
    /// Adapter that its calls use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterName>,
    /// Phase of its most advanced call.
    pub phase: RolloutPhase,
    /// Seconds in this phase, of the call that has been in it longest.
    pub phase_s: f64,
    /// Seconds until the gateway ends the phase; `None`: the client must finish the rollout.
    pub deadline_s: Option<f64>,
    /// Number of calls that generate.
    pub generating: usize,
    /// Number of calls that wait for capacity.
    pub waiting: usize,
    /// Number of calls so far.
    pub calls: u32,
    pub sampled_tokens: u64,
}

/// A page of open rollouts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveRollouts {
    /// Number of open rollouts.
    pub total: usize,
    /// Longest in their phase first.
    pub rollouts: Vec<LiveRollout>,
}

/// Parses `limit` from a query string.
pub(crate) fn limit(query: Option<&str>) -> Result<usize, ApiError> {
    let mut limit = PAGE;
    for pair in query
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty())
    {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name != "limit" {
            return Err(ApiError::unknown_field(name));
        }
        let number = value.parse().ok().filter(|n| (1..=MAX_PAGE).contains(n));
        limit = number.ok_or_else(|| {
            let why = format!("limit is {value:?}, expected a whole number from 1 to {MAX_PAGE}");
            ApiError::invalid("limit", why)
        })?;
    }
    Ok(limit)
}

impl Rollout {
    /// Returns the state of the rollout, which ends after `ttl_s` seconds without a call.
    pub(crate) fn live(&self, ttl_s: f64) -> LiveRollout {
        let now = Instant::now();
        let calls = self.running();
        let at = |c: &&Arc<RunningCall>| c.submitted.get().copied();
        let generating: Vec<_> = calls.iter().filter(|c| at(c).is_some()).collect();
        let waiting = calls.len() - generating.len();
        let session = self.session();
        let (phase, since) = match (generating.is_empty(), waiting) {
            (false, _) => (
                RolloutPhase::Generate,
                generating.iter().filter_map(at).min(),
            ),
            (true, 1..) => (RolloutPhase::Wait, calls.iter().map(|c| c.begun).min()),
            _ if session.is_over() => (RolloutPhase::End, None),
            _ => (RolloutPhase::Agent, None),
        };
        let idle_s = (unix_s() - session.touched_s()).max(0.0);
        let phase_s = since.map_or(idle_s, |t| now.saturating_duration_since(t).as_secs_f64());
        let deadline_s = match phase {
            RolloutPhase::End => None,
            RolloutPhase::Agent => Some(ttl_s - idle_s),
            RolloutPhase::Wait | RolloutPhase::Generate => calls
                .iter()
                .map(|c| c.deadline.saturating_duration_since(now).as_secs_f64())
                .reduce(f64::min),
        };
        let (spec, stats) = (session.spec(), session.stats());
        LiveRollout {
            id: session.id().clone(),
            group: spec.group.clone(),
            task: spec.task.clone(),
            run: spec.run.clone(),
            draw: spec.draw,
            purpose: spec.purpose.clone(),
            adapter: spec.adapter.clone(),
            phase,
            phase_s,
            deadline_s,
            generating: generating.len(),
            waiting,
            calls: stats.calls,
            sampled_tokens: stats.sampled_tokens,
        }
    }
}
