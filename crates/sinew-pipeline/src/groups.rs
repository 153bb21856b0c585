//! Rewards of whole groups, on an async runtime, while other episodes run.
//!
//! A member that the system failed, or that another reward left without a score, is not shown to the reward
//! of the group and keeps its reason. The reward of the group completes the scores of the others; a missing
//! score leaves a member unscored. A member that an earlier session completed stays as it is: it is shown,
//! and its second score is not used.

use crate::ports::{GroupScores, ScoredGroup};
use sinew_env::{
    EnvFactory, GroupReward, RewardSample, Score, Taskset, Unscored, waits_for_group, with_group,
};
use sinew_orchestrator::{Draw, Member, PipelineError, keep_scores};
use sinew_render::Renderer;
use sinew_rollout::reward_sample;
use sinew_store::TraceStore;
use sinew_types::{EpisodeEnd, GroupId, Trace};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, JoinSet};

/// Groups that are scored at once; more wait.
const AT_ONCE: usize = 64;

/// Parts for scoring the groups of a run.
#[derive(Clone)]
pub struct GroupParts {
    /// Has the rewards of groups.
    pub envs: Arc<dyn EnvFactory>,
    /// Renderer of the model that sampled the episodes.
    pub renderer: Arc<dyn Renderer>,
    /// Tasks of the draws.
    pub taskset: Arc<dyn Taskset>,
    /// Store of the traces, which also keeps the scores.
    pub store: Arc<dyn TraceStore>,
}

sinew_types::debug_fields!(GroupParts as this, env = this.envs.name());

/// Scores groups by the rewards that their environments have.
#[derive(Debug)]
pub struct GroupRewards {
    runtime: Handle,
    parts: GroupParts,
    running: JoinSet<MemberScores>,
    room: Arc<Semaphore>,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
}

impl GroupRewards {
    /// `cancel` turning true ends a wait.
    pub fn new(runtime: Handle, parts: GroupParts, cancel: watch::Receiver<bool>) -> Self {
        Self {
            runtime,
            parts,
            running: JoinSet::new(),
            room: Arc::new(Semaphore::new(AT_ONCE)),
            cancel,
        }
    }

    /// Keeps the scores of a group durably, and completes its outcomes.
    fn keep(&self, group: MemberScores) -> Result<ScoredGroup, PipelineError> {
        let at_us = SystemTime::now().duration_since(UNIX_EPOCH);
        let at_us = at_us.map_or(0, |d| d.as_micros() as u64);
        let store = self.parts.store.as_ref();
        keep_scores(store, &group.scores, at_us)?;
        let whole = |(member, score): (Member, _)| {
            let outcome = with_group(&member.outcome, score);
            (member.episode, outcome)
        };
        Ok(ScoredGroup {
            group: group.group,
            outcomes: group.scores.into_iter().map(whole).collect(),
        })
    }
}

/// A group with the scores of those members that waited for them.
#[derive(Debug)]
struct MemberScores {
    group: GroupId,
    scores: Vec<(Member, Result<Score, Unscored>)>,
}

/// A task that panicked is an error of a reward of this program, not of a sample.
fn joined(done: Result<MemberScores, JoinError>) -> Result<MemberScores, PipelineError> {
    done.map_err(|e| PipelineError::system(format!("the reward of a group: {e}")))
}

impl GroupScores for GroupRewards {
    fn start(&mut self, members: Vec<(Draw, Trace)>) -> Result<(), PipelineError> {
        let Some((first, _)) = members.first() else {
            return Ok(());
        };
        let task = self.parts.taskset.get(first.split, first.task);
        let task = task.map_err(PipelineError::system)?;
        let group = first.group.clone();
        let mut waiting = Vec::new();
        for (_, trace) in members {
            let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
            if !failed && (!trace.outcome.unscored || waits_for_group(&trace.outcome)) {
                let sample = reward_sample(&trace, task.clone(), self.parts.renderer.as_ref());
                let (episode, outcome) = (trace.episode, trace.outcome);
                waiting.push((Member { episode, outcome }, sample));
            }
        }
        let reward = self.parts.envs.group_reward(&task);
        let room = Arc::clone(&self.room);
        let scored = async move {
            let _room = room.acquire_owned().await;
            scores(reward, group, waiting).await
        };
        self.running.spawn_on(scored, &self.runtime);
        Ok(())
    }

    fn scored(&mut self, wait: bool) -> Result<Vec<ScoredGroup>, PipelineError> {
        let mut done = Vec::new();
        if wait {
            let (running, cancel) = (&mut self.running, &mut self.cancel);
            let first = self.runtime.block_on(async {
                tokio::select! {
                    first = running.join_next() => Ok(first),
                    _ = cancel.wait_for(|&stop| stop) => Err(PipelineError::Interrupted),
                }
            })?;
            done.extend(first);
        }
        while let Some(another) = self.running.try_join_next() {
            done.push(another);
        }
        done.into_iter().map(|d| self.keep(joined(d)?)).collect()
    }
}

/// Asks the reward for the scores of those that wait for it.
async fn scores(
    reward: Option<Arc<dyn GroupReward>>,
    group: GroupId,
    members: Vec<(Member, RewardSample)>,
) -> MemberScores {
    let (members, samples): (Vec<_>, Vec<_>) = members.into_iter().unzip();
    let scores = match reward {
        Some(reward) => reward.score_group(&samples).await,
        // They continue to wait, which is the reason that is reported.
        None => Vec::new(),
    };
    let scores = members.into_iter().zip(scores);
    MemberScores {
        group,
        scores: scores
            .filter(|(member, _)| waits_for_group(&member.outcome))
            .collect(),
    }
}
