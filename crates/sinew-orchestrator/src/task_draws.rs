//! Draws of a run whose tasks do not depend on its learning: gold runs and collections.
//!
//! They are those that a run that samples draws with the same recipe, as long as that has learned nothing.

use crate::core::TaskSampling;
use crate::curriculum::{Curriculum, DrawRequest};
use crate::schedule::{Draw, train_groups, uniform_tasks};

/// Draws training tasks, a step at a time.
#[derive(Debug)]
pub struct TaskDraws {
    tasks: TaskSampling,
    /// Training tasks in all.
    len: usize,
    /// The last step whose tasks were drawn by weight, and what was drawn until then.
    drawn: (u64, Curriculum),
}

impl TaskDraws {
    /// Draws of `len` training tasks.
    pub fn new(tasks: TaskSampling, len: usize) -> Self {
        Self {
            tasks,
            len,
            drawn: <_>::default(),
        }
    }

    /// Indices of the tasks of a step, from 1. Draws by weight follow from those of the steps before: a
    /// resumed session makes these again.
    pub fn indices(&mut self, seed: u64, step: u64, count: usize) -> Vec<usize> {
        let (tasks, adaptive) = match &self.tasks {
            TaskSampling::Shares { tasks, adaptive } => (tasks, adaptive.as_ref()),
            TaskSampling::Uniform => return uniform_tasks(self.len, seed, step, count),
        };
        if self.drawn.0 >= step {
            self.drawn = <_>::default();
        }
        let mut drawn = Vec::new();
        for step in self.drawn.0 + 1..=step {
            let request = DrawRequest {
                seed,
                draw_seed: seed,
                step,
                count,
            };
            drawn = self.drawn.1.draw(tasks, adaptive, request);
        }
        self.drawn.0 = step;
        drawn
    }

    /// The episodes of a step, one inner vector a group.
    pub fn groups(
        &mut self,
        seed: u64,
        step: u64,
        count: usize,
        group_size: usize,
    ) -> Vec<Vec<Draw>> {
        let indices = self.indices(seed, step, count);
        train_groups(seed, step, (0, &indices), group_size, count as u64)
    }
}
