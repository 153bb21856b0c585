//! Draws of runs whose tasks do not depend on learning: runs of the reference solutions and collections.
//!
//! They are the same draws that a training run makes with the same recipe before its curriculum has learned
//! anything.

use crate::core::TaskSampling;
use crate::curriculum::{Curriculum, DrawRequest};
use crate::schedule::{Draw, train_groups, uniform_tasks};

/// Draws training tasks, one step at a time.
#[derive(Debug)]
pub struct TaskDraws {
    tasks: TaskSampling,
    /// Total number of training tasks.
    len: usize,
    /// The last step with a weighted draw, and the curriculum after it.
    drawn: (u64, Curriculum),
}

impl TaskDraws {
    /// Creates the draws over `len` training tasks.
    pub fn new(tasks: TaskSampling, len: usize) -> Self {
        Self {
            tasks,
            len,
            drawn: <_>::default(),
        }
    }

    /// Returns the task indices of a step, from 1. Weighted draws depend on those of all earlier steps, so a
    /// resumed session repeats these first.
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

    /// Returns the episodes of a step, one inner vector per group.
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
