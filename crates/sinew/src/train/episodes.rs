//! Where the episodes of a training step come from.

use super::Run;
use crate::failure::Failure;
use crate::recipe::TasksSection;
use sinew_pipeline::Curriculum;
use sinew_pipeline::by_group;
use sinew_pipeline::{other_tasks, refill_seed, train_groups, uniform_tasks};
use sinew_rollout::{EpisodeOptions, EpisodeSpec, again};
use sinew_types::{EpisodeEnd, EpisodeId, Trace, mix_seed};
use std::collections::{BTreeMap, BTreeSet};

/// The episodes of a step.
#[derive(Default)]
pub(super) struct StepEpisodes {
    pub(super) traces: Vec<Trace>,
    /// Stored for the step, not to be trained, with the reason.
    pub(super) dropped: BTreeMap<EpisodeId, String>,
    /// Of `dropped`, those that were run again, and how many of them then went well.
    pub(super) retried: usize,
    pub(super) recovered: usize,
    /// Groups that were run in the place of others.
    pub(super) refilled: usize,
    /// The curriculum after its draw.
    pub(super) curriculum: Option<Curriculum>,
}

/// Episodes that were run, the last attempt of each.
#[derive(Default)]
pub(super) struct Settled {
    pub(super) traces: Vec<Trace>,
    dropped: BTreeMap<EpisodeId, String>,
    retried: usize,
    recovered: usize,
}

impl Run<'_> {
    /// The episodes of a step: sampled, or given.
    pub(super) fn training_episodes(&mut self, step: u64) -> Result<StepEpisodes, Failure> {
        let recipe = self.recipe;
        let mut out = StepEpisodes::default();
        if self.parts.data.is_some() {
            out.traces = self.parts.data_step(recipe, step)?;
            return Ok(out);
        }
        if self.parts.pool.is_some() {
            let cancel = self.cancel.clone();
            let stop = move || *cancel.borrow();
            (out.traces, out.dropped) = self.parts.pool_step(recipe, step, stop)?;
            return Ok(out);
        }
        if let Some(cross) = &self.parts.cross {
            cross.mix(true);
        }
        let count = recipe.rollout.tasks_per_step;
        let mut used = self.draw(step, &[], count, &mut out);
        self.sample(step, (0, &used), &mut out)?;
        for _ in 0..self.parts.algorithm.refill() {
            let groups = by_group(std::mem::take(&mut out.traces));
            let spent = self.parts.algorithm.spent(&groups);
            let spent = spent.map_err(Failure::system)?.len();
            let missing = count.saturating_sub(groups.len() - spent);
            out.traces = groups.into_iter().flatten().collect();
            if missing == 0 {
                break;
            }
            let others = self.draw(step, &used, missing, &mut out);
            self.sample(step, (used.len() as u64, &others), &mut out)?;
            out.refilled += others.len();
            used.extend(others);
        }
        Ok(out)
    }

    /// Tasks of a step; with some `used`, those that replace them.
    fn draw(&self, step: u64, used: &[usize], count: usize, out: &mut StepEpisodes) -> Vec<usize> {
        let (recipe, taskset) = (self.recipe, self.parts.taskset.as_ref());
        let seed = match used.is_empty() {
            true => recipe.seed,
            false => mix_seed(refill_seed(recipe.seed, step), used.len() as u64),
        };
        match (&recipe.tasks, &self.parts.task_kinds) {
            (TasksSection::Adaptive(config), Some(kinds)) => {
                // What this step draws counts once the step is done.
                let next = out
                    .curriculum
                    .get_or_insert_with(|| self.curriculum.clone());
                next.draw(config, kinds, seed, step, count)
            }
            _ if used.is_empty() => uniform_tasks(taskset, seed, step, count),
            _ => other_tasks(taskset, seed, used, count),
        }
    }

    /// Runs the groups of tasks, from number `first` of the step on.
    fn sample(
        &mut self,
        step: u64,
        tasks: (u64, &[usize]),
        out: &mut StepEpisodes,
    ) -> Result<(), Failure> {
        let (recipe, taskset) = (self.recipe, self.parts.taskset.as_ref());
        let size = recipe.rollout.group_size;
        let groups = train_groups(
            taskset,
            recipe.seed,
            step,
            tasks,
            size,
            self.parts.draws_per_step,
        );
        let groups = groups.map_err(|e| Failure::system(e.to_string()))?;
        let options = self.parts.episode_options(recipe);
        let specs: Vec<EpisodeSpec> = groups.into_iter().flatten().collect();
        let retries = self.parts.algorithm.repair().retries();
        let settled = self.settled(&specs, &options, retries)?;
        out.traces.extend(settled.traces);
        out.dropped.extend(settled.dropped);
        out.retried += settled.retried;
        out.recovered += settled.recovered;
        Ok(())
    }

    /// Runs episodes, and what the system failed of them again: as often as `retries` says, and once
    /// more what an earlier session stored as failed, because its cause may be gone. What is left out
    /// stays in the store and is reported.
    pub(super) fn settled(
        &mut self,
        specs: &[EpisodeSpec],
        options: &EpisodeOptions,
        retries: u32,
    ) -> Result<Settled, Failure> {
        let mut before = self.stored_before(specs)?;
        let mut out = Settled {
            traces: self.episodes(specs.to_vec(), options)?,
            ..Settled::default()
        };
        for attempt in 1.. {
            let mut again = again(specs, &out.traces, attempt);
            if attempt > retries {
                again.retain(|(place, _)| before.contains(&out.traces[*place].episode));
            }
            if again.is_empty() {
                break;
            }
            let (places, retried): (Vec<usize>, Vec<EpisodeSpec>) = again.into_iter().unzip();
            before = self.stored_before(&retried)?;
            let results = self.episodes(retried, options)?;
            for (place, trace) in places.into_iter().zip(results) {
                let went_well = !matches!(trace.end, EpisodeEnd::Failed { .. });
                out.retried += 1;
                out.recovered += usize::from(went_well);
                let failed = std::mem::replace(&mut out.traces[place], trace);
                let reason = "failed, run again".to_owned();
                out.dropped.insert(failed.episode, reason);
            }
        }
        Ok(out)
    }

    /// Of these episodes, those that an earlier session stored.
    fn stored_before(&self, specs: &[EpisodeSpec]) -> Result<BTreeSet<EpisodeId>, Failure> {
        let mut stored = BTreeSet::new();
        for spec in specs.iter().filter(|_| self.resumed) {
            if self
                .parts
                .store
                .get(&spec.episode)
                .map_err(Failure::system)?
                .is_some()
            {
                stored.insert(spec.episode.clone());
            }
        }
        Ok(stored)
    }
}
