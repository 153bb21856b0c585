//! Live rollouts, those first that have been in their phase for the longest: where to look when
//! nothing goes on.

use crate::error::ApiError;
use crate::gateway::{Gateway, Rollout, unix_s};
use serde::Serialize;
use sinew_types::{EpisodeId, GroupId, TaskId};
use std::sync::Arc;
use tokio::time::Instant;

/// Rollouts of an answer that asks for no number, and of the longest.
const PAGE: usize = 100;
const MAX_PAGE: usize = 1000;

/// What a rollout is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutPhase {
    /// Its agent works; no call runs. Nobody calling ends it.
    Agent,
    /// All of its calls wait for room.
    Wait,
    /// The model answers.
    Generate,
    /// It takes no more calls, and is not finished.
    End,
}

/// A rollout that is not finished.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveRollout {
    pub id: EpisodeId,
    pub group: GroupId,
    pub task: TaskId,
    pub step: u64,
    pub purpose: String,
    pub phase: RolloutPhase,
    /// Seconds in this phase: of the call that has been in it for the longest.
    pub phase_s: f64,
    /// Seconds until the phase is ended; `None`: whoever opened the rollout must finish it.
    pub deadline_s: Option<f64>,
    /// Calls that are sampled, and that wait for room.
    pub generating: usize,
    pub waiting: usize,
    pub calls: u32,
    pub sampled_tokens: u64,
}

/// Some of the live rollouts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveRollouts {
    /// How many there are.
    pub total: usize,
    /// Longest in their phase first.
    pub rollouts: Vec<LiveRollout>,
}

/// `limit` of a query.
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
    fn live(&self, ttl_s: f64) -> LiveRollout {
        let now = Instant::now();
        let flights: Vec<_> = {
            let flights = self.flights();
            flights.running.iter().map(|(_, f)| Arc::clone(f)).collect()
        };
        let at = |f: &&Arc<crate::flight::Flight>| f.submitted.get().copied();
        let generating: Vec<_> = flights.iter().filter(|f| at(f).is_some()).collect();
        let waiting = flights.len() - generating.len();
        let session = self.session();
        let (phase, since) = match (generating.is_empty(), waiting) {
            (false, _) => (
                RolloutPhase::Generate,
                generating.iter().filter_map(at).min(),
            ),
            (true, 1..) => (RolloutPhase::Wait, flights.iter().map(|f| f.begun).min()),
            _ if session.is_over() => (RolloutPhase::End, None),
            _ => (RolloutPhase::Agent, None),
        };
        let idle_s = (unix_s() - session.touched_s()).max(0.0);
        let phase_s = since.map_or(idle_s, |t| now.saturating_duration_since(t).as_secs_f64());
        let deadline_s = match phase {
            RolloutPhase::End => None,
            RolloutPhase::Agent => Some(ttl_s - idle_s),
            RolloutPhase::Wait | RolloutPhase::Generate => flights
                .iter()
                .map(|f| f.deadline.saturating_duration_since(now).as_secs_f64())
                .reduce(f64::min),
        };
        let (spec, stats) = (session.spec(), session.stats());
        LiveRollout {
            id: session.id().clone(),
            group: spec.group.clone(),
            task: spec.task.clone(),
            step: spec.step,
            purpose: spec.purpose.clone(),
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

impl Gateway {
    /// At most `limit` of the live rollouts: those that have been in their phase for the longest.
    pub fn live(&self, limit: usize) -> LiveRollouts {
        let ttl_s = self.config().server.rollout_ttl.as_secs_f64();
        let open: Vec<_> = self.rollouts().values().map(Arc::clone).collect();
        let mut rollouts: Vec<_> = open.iter().map(|rollout| rollout.live(ttl_s)).collect();
        rollouts.sort_by(|a, b| b.phase_s.total_cmp(&a.phase_s));
        rollouts.truncate(limit);
        LiveRollouts {
            total: open.len(),
            rollouts,
        }
    }
}
