//! Over-sampling: a step starts more groups than it trains, and stops the rest once enough are complete.
//!
//! The stopped groups are those that take long, so that training only on the others would favour tasks with
//! short episodes. The tasks of stopped groups are therefore postponed, not dropped: as soon as there are
//! enough for a step, the next step runs them and waits for all of them (tail batching; Gao et al. 2025,
//! "RollPacker"). All tokens of a trained group are sampled by the weights of its step.
//!
//! The groups that a step takes depend on the order in which they end. The commit of the step records this
//! order, so that the step can be repeated bit for bit.

use super::messages::Command;
use super::{PipelineCore, Rollout, Stage, TaskSampling};
use crate::curriculum::DrawRequest;
use crate::schedule::{Draw, train_groups};
use std::sync::Arc;

/// Reason in the record of an episode whose group was stopped as surplus.
pub(crate) const STOPPED: &str = "stopped: enough groups";

impl PipelineCore {
    /// Starts the groups of a step: more than it trains, or the postponed ones of earlier steps.
    pub(super) fn start_more(&mut self, mut rollout: Rollout) -> Vec<Command> {
        let (config, step) = (&self.config, self.state.step + 1);
        let count = config.tasks_per_step + config.over_sample;
        let mut next = (*self.state.curriculum).clone();
        let put_off = next.take_put_off(config.tasks_per_step);
        let mut tasks = match (put_off, &config.tasks) {
            (Some(tasks), _) => tasks,
            (None, TaskSampling::Uniform) => {
                next.draw_uniform(config.train_tasks, config.seed, count)
            }
            (None, TaskSampling::Shares { tasks, adaptive }) => {
                let request = DrawRequest {
                    seed: config.seed,
                    draw_seed: config.seed,
                    step,
                    count,
                };
                next.draw(tasks, adaptive.as_ref(), request)
            }
        };
        let started = tasks.len();
        // Seeds are counted by the places of a step, filled or not.
        tasks.resize(count, 0);
        let per_step = config.draws_per_step();
        let groups = train_groups(config.seed, step, (0, &tasks), config.group_size, per_step);
        let draws: Vec<Draw> = groups.into_iter().take(started).flatten().collect();
        rollout.used.extend(&tasks[..started]);
        rollout.curriculum = Some(Arc::new(next));
        rollout.slots.add(&draws);
        self.stage = Stage::Rollout(rollout);
        vec![Command::Start {
            draws,
            temperature: None,
        }]
    }

    /// Leaves out surplus groups once enough groups are complete. Returns the command that stops those of
    /// their episodes that still run.
    pub(super) fn stop_rest(&self, rollout: &mut Rollout) -> Option<Command> {
        let (enough, slots) = (self.config.tasks_per_step, &rollout.slots);
        // Episodes of an earlier session are all taken in first, so that each of their attempts is named.
        if self.config.over_sample == 0 || (slots.recovers && !slots.is_complete()) {
            return None;
        }
        let mut complete = slots.complete_groups();
        if complete.len() < enough {
            return None;
        }
        complete.truncate(enough);
        let stopped = rollout.slots.keep(&complete, STOPPED);
        if let Some(next) = &mut rollout.curriculum {
            Arc::make_mut(next).put_off(stopped.tasks);
        }
        (!stopped.open.is_empty()).then_some(Command::Abandon {
            episodes: stopped.open,
        })
    }
}
