//! `train.mode`: whether generation and training take turns or overlap, and how old samples may be.
//!
//! Staleness is counted in optimizer updates: the version of the trained weights minus the oldest version
//! that sampled a token of the episode.

use crate::rule::Rules;
use crate::section::choice;
use crate::{LateAfter, LateSection, RunPlan};
use sinew_algo::Algorithm;

choice! {
    /// Overlap of generation and training. `sync`: in turns, staleness 0. `one_step_off`: the
    /// episodes of the next step run while one is trained, and new weights wait for them. `async`: episodes
    /// run all the time, and new weights are used from the next token on.
    TrainMode {
        Sync = "sync",
        OneStepOff = "one_step_off",
        Async = "async",
    }
}

impl RunPlan {
    /// Updates that a sample may be behind the weights when it is trained; 0 in mode `sync`.
    pub fn max_staleness(&self) -> u64 {
        let step = self.train.minibatches as u64;
        match self.train.mode {
            TrainMode::Sync => 0,
            TrainMode::OneStepOff => step,
            TrainMode::Async => self.train.max_staleness.unwrap_or(step),
        }
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let t = &plan.train;
    let (reason, has_effect) = match t.mode {
        TrainMode::Async => (String::new(), true),
        TrainMode::OneStepOff => (
            "has no effect: with mode = \"one_step_off\" every sample is one step old; remove it, or use \
             mode = \"async\""
                .into(),
            false,
        ),
        TrainMode::Sync => (
            "has no effect: with mode = \"sync\" no sample is old; remove it, or use mode = \"async\"".into(),
            false,
        ),
    };
    rules.unused("train.max_staleness", reason, has_effect);
    if t.mode == TrainMode::Sync {
        return;
    }
    let step = t.minibatches as u64;
    rules.custom(
        "train.max_staleness",
        plan.max_staleness(),
        format!(
            "allowed: {step} to 1000000. A step has {step} updates (train.minibatches), and with fewer nothing \
             overlaps: that is mode = \"sync\""
        ),
        (step..=1_000_000).contains(&plan.max_staleness()),
    );
    overlaps(plan, rules);
}

/// Refuses settings that are incompatible with overlapping training: those without episodes to run meanwhile,
/// and those that decide by the results of a whole step.
fn overlaps(plan: &RunPlan, rules: &mut Rules) {
    let mode = format!("{:?}", plan.train.mode.name());
    let mut needs = |why: &str, holds: bool| {
        rules.custom("train.mode", &mode, why, holds);
    };
    needs(
        "has nothing to overlap: others make the episodes of [data], and go on while the run trains with mode = \
         \"sync\", too. Use \"sync\"; or remove [data], and let workers run the episodes with this run's weights and \
         bounds (rollout.place = \"workers\")",
        plan.data.is_none(),
    );
    needs(
        "needs episodes that the run begins, and with harness.type = \"live\" agents open them: use mode = \
         \"sync\"",
        plan.harness.live().is_none(),
    );
    let late = plan.reward.as_ref().and_then(|r| r.late());
    needs(
        "trains groups in the order of their draws, and those of [reward.late] are complete in any order: use \
         mode = \"async\" or \"sync\", or remove [reward.late]",
        late.is_none() || plan.train.mode == TrainMode::Async,
    );
    needs(
        "cannot be combined with rollout.cross_policy, which mixes policies by steps: remove it, or use mode = \
         \"sync\"",
        plan.rollout.cross_policy.is_none(),
    );
    needs(
        "needs store.type = \"disk\" or \"postgres\": a session that goes on takes up the episodes that were not \
         trained yet",
        plan.store.kind.is_durable(),
    );
    if let Some(late) = late {
        late_groups(plan, late, rules);
    }
}

/// Checks the settings for groups that wait for rewards from outside while others are trained.
fn late_groups(plan: &RunPlan, late: &LateSection, rules: &mut Rules) {
    let begun = plan.max_staleness();
    rules.custom(
        "reward.late.max_staleness",
        late.max_staleness,
        format!(
            "allowed: {begun} to 1000000. Groups are begun for steps {begun} updates ahead \
             (train.max_staleness), and would be too old when they are trained"
        ),
        late.max_staleness >= begun,
    );
    rules.custom(
        "reward.late.after",
        "\"offline\"",
        "has no effect of its own with train.mode = \"async\", which trains every group with its correction: \
         use a larger reward.late.max_staleness",
        late.after == LateAfter::Drop,
    );
}

/// Adds rules that depend on the algorithm.
pub(crate) fn of_algorithm(plan: &RunPlan, algorithm: &Algorithm, rules: &mut Rules) {
    rules.custom(
        "algorithm.refill",
        algorithm.refill(),
        "waits for a whole round of groups before it replaces some, and mode = \"one_step_off\" has no time \
         between: set algorithm.refill = 0, or use mode = \"async\", which replaces them at once",
        plan.train.mode != TrainMode::OneStepOff || algorithm.refill() == 0,
    );
    if let Some(first) = plan.rollout.stop_decided {
        rules.custom(
            "rollout.stop_decided",
            first,
            "has no effect: this algorithm trains groups with equal rewards, too; remove it, or set \
             algorithm.equal_groups = \"drop\" with an algorithm that compares the episodes of a group",
            algorithm.drops_equal(),
        );
    }
    rules.custom(
        "rollout.over_sample",
        plan.rollout.over_sample,
        "replaces groups that take long and algorithm.refill those without a signal, each with draws of its \
         own: set one of them to 0",
        plan.rollout.over_sample == 0 || algorithm.refill() == 0,
    );
}
