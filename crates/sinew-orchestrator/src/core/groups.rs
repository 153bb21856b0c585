//! Turns groups into training rows: groups that a step ran, groups that waited for rewards, groups of a
//! source, and groups of a committed update.

use super::{Batch, Command, PipelineCore, Rollout, RunCounts, Stage, UpdateCommit};
use crate::status::is_counted;
use sinew_types::EpisodeId;
use std::collections::BTreeMap;

impl PipelineCore {
    /// Asks the driver to collect the late rewards of this step's groups and of earlier groups that still
    /// wait.
    pub(super) fn settle(&mut self, rollout: Rollout, wait: bool) -> Vec<Command> {
        let groups = rollout.slots.groups();
        self.stage = Stage::Settling(rollout);
        vec![Command::CollectLateRewards {
            step: self.state.step + 1,
            groups,
            wait,
        }]
    }

    /// Starts those additional rounds of a step again that an earlier session had started.
    pub(super) fn begin_again(&mut self, step: u64) -> Vec<Command> {
        let mut commands = Vec::new();
        let (begun, rounds) = self.state.begun;
        if begun != step {
            return commands;
        }
        for _ in 0..rounds {
            match std::mem::replace(&mut self.stage, Stage::Stopped) {
                Stage::Rollout(mut rollout) => {
                    rollout.rounds += 1;
                    commands.extend(self.start(rollout, self.config.tasks_per_step));
                }
                stage => self.stage = stage,
            }
        }
        commands
    }

    /// Makes rows of the groups whose rewards have arrived. If there are none, the step runs more groups
    /// while others may still wait; otherwise it waits for rewards.
    pub(super) fn settled(
        &mut self,
        mut rollout: Rollout,
        groups: Vec<Vec<EpisodeId>>,
        waiting: usize,
        now: f64,
    ) -> Vec<Command> {
        if !groups.is_empty() {
            return self.score_rollout(rollout, groups);
        }
        if self.config.max_wall_s.is_some_and(|limit| now >= limit) {
            return self.end();
        }
        let begun = !rollout.used.is_empty();
        if self.may_begin && rollout.rounds < self.config.late_rounds.unwrap_or(0) {
            rollout.rounds += u32::from(begun);
            return self.start(rollout, self.config.tasks_per_step);
        }
        match waiting {
            // Every group was left out.
            0 => self.score_rollout(rollout, groups),
            _ => self.settle(rollout, true),
        }
    }

    /// Handles the groups of a source. An empty answer ends the run.
    pub(super) fn given(
        &mut self,
        groups: Vec<Vec<EpisodeId>>,
        dropped: BTreeMap<EpisodeId, String>,
        alone: Vec<(String, f64)>,
    ) -> Vec<Command> {
        if groups.is_empty() && dropped.is_empty() {
            let mut commands = vec![Command::SourceDry {
                step: self.state.step,
            }];
            commands.extend(self.end());
            return commands;
        }
        let batch = Batch {
            dropped,
            alone,
            commit: UpdateCommit {
                curriculum: self.state.curriculum.clone(),
                ..UpdateCommit::default()
            },
            ..Batch::default()
        };
        self.score(batch, groups, RunCounts::default())
    }

    /// Repeats a committed update, or draws new episodes for the step if the stored ones were removed.
    pub(super) fn recalled(&mut self, groups: Option<Vec<Vec<EpisodeId>>>) -> Vec<Command> {
        let Some(groups) = groups else {
            return self.draw_step();
        };
        let step = self.state.step + 1;
        let curriculum = self.state.committed.get(&step).cloned();
        let batch = Batch {
            recalled: true,
            commit: UpdateCommit {
                curriculum: curriculum.unwrap_or_default(),
                ..UpdateCommit::default()
            },
            ..Batch::default()
        };
        self.score(batch, groups, RunCounts::default())
    }

    /// Makes rows of groups, and adds the counts of this step's rollout.
    pub(super) fn score_rollout(
        &mut self,
        rollout: Rollout,
        groups: Vec<Vec<EpisodeId>>,
    ) -> Vec<Command> {
        let slots = &rollout.slots;
        let counts = RunCounts {
            retried: slots.retried,
            recovered: slots.recovered,
            refilled: rollout.refilled,
            not_begun: slots.not_begun,
        };
        let mut dropped = slots.dropped.clone();
        dropped.extend(rollout.late);
        let batch = Batch {
            dropped,
            alone: rollout.alone,
            outcomes: rollout.slots.outcomes().collect(),
            commit: UpdateCommit {
                curriculum: rollout
                    .curriculum
                    .unwrap_or_else(|| self.state.curriculum.clone()),
                ..UpdateCommit::default()
            },
            ..Batch::default()
        };
        self.score(batch, groups, counts)
    }

    /// Makes training rows of the given groups.
    pub(super) fn score(
        &mut self,
        mut batch: Batch,
        groups: Vec<Vec<EpisodeId>>,
        counts: RunCounts,
    ) -> Vec<Command> {
        let step = self.state.step + 1;
        batch.commit.step = step;
        batch.commit.again = self.state.committed.contains_key(&step);
        let counted = batch.dropped.iter().filter(|(_, why)| is_counted(why));
        let left_out = counted.map(|(e, why)| (e.clone(), why.clone())).collect();
        self.stage = Stage::Scoring(batch);
        vec![Command::Score {
            step,
            groups,
            counts,
            left_out,
        }]
    }
}
