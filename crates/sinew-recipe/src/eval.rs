//! `[eval]`: the held-out measurement before and after.

use crate::RunPlan;
use crate::rule::Rules;
use crate::section::section;

section! {
    /// The held-out measurement before and after.
    EvalKeys => EvalPlan, "eval" {
        /// Held-out tasks, 1 to 100000, the first of their split; those of a mixture take turns. Left out:
        /// 128, or all if there are fewer.
        tasks: usize;
        /// Episodes of each task.
        episodes_per_task: usize = 1, in 1 to 1000;
        /// Steps between measurements during training; 0: before and after only.
        every: u64 = 0;
        /// Sampling temperature; 0: greedy.
        temperature: f32 = 1.0;
        /// Also one greedy episode of each task, before and after: `greedy_success` next to `success`.
        greedy: bool = true;
    }
}

/// Maximum number of held-out tasks if the recipe sets no number.
const TASKS: usize = 128;

impl EvalPlan {
    /// Returns the number of held-out tasks to measure, at most `held_out`.
    pub fn tasks_of(&self, held_out: usize) -> usize {
        self.tasks.unwrap_or(TASKS).min(held_out)
    }
}

impl RunPlan {
    /// Whether held-out tasks are also run greedily, in addition to the sampled episodes.
    pub fn eval_greedy(&self) -> bool {
        self.eval.temperature > 0.0 && self.eval.greedy
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let e = &plan.eval;
    e.ranges(rules);
    if let Some(tasks) = e.tasks {
        rules.range("eval.tasks", tasks, 1..=100_000);
    }
    rules.allowed(
        "eval.temperature",
        e.temperature,
        "0 (greedy) or a number above",
        e.temperature >= 0.0 && e.temperature.is_finite(),
    );
    let reason = "has no effect with eval.temperature = 0, which is greedy; remove it";
    rules.unused("eval.greedy", reason, e.temperature != 0.0);
}
