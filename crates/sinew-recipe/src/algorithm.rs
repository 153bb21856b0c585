//! `[algorithm]`: what the whole recipe means for the algorithm, and what the algorithm asks of it.

use crate::engine::WeightFormat;
use crate::rule::Rules;
use crate::{DataSection, EnvMember, RunPlan};
use sinew_algo::{
    Advantage, Algorithm, Composition, ConfigError, Needs, ProcessRewards, Repair, RunFacts,
};

impl RunPlan {
    /// What turns episodes into training signal.
    pub fn algorithm(&self) -> Result<Algorithm, ConfigError> {
        let algorithm = Algorithm::new(&self.algorithm, &self.run_facts())?;
        match &self.rollout.repair {
            None => Ok(algorithm),
            Some(steps) => algorithm.with_repair(Repair::new(steps)?),
        }
    }

    /// What an algorithm has to know of the run.
    pub fn run_facts(&self) -> RunFacts {
        let needs = self.needs();
        let updates = self.train.minibatches as u64;
        let old = self
            .rollout
            .cross_policy
            .map_or(0, |c| c.every.saturating_mul(updates));
        // The pool bounds how old they are.
        let old = old.max(u64::from(self.draws_from_pool()));
        let old = old.max(self.harness.live().map_or(0, |l| l.max_age));
        let late = self.reward.as_ref().and_then(|r| r.late());
        let old = old.max(late.map_or(0, |l| l.max_staleness));
        RunFacts {
            // Pairs and stored episodes come in groups of their own sizes.
            group_size: match &self.data {
                Some(_) => self.rollout.group_size.max(2),
                None => self.rollout.group_size,
            },
            reference: needs.reference(),
            teacher: self.teacher.is_some(),
            critic: needs.values,
            max_staleness: old,
            updates_per_batch: self.train.minibatches,
        }
    }

    /// What the algorithm reads in addition to the traces. A composition that cannot run has no
    /// needs; the reason is given when it is checked.
    pub fn needs(&self) -> Needs {
        let composition = self.algorithm.composition(self.rollout.group_size);
        composition.map(|c| c.needs()).unwrap_or_default()
    }

    /// Whether training episodes come from a data pool.
    pub fn draws_from_pool(&self) -> bool {
        matches!(self.data, Some(DataSection::Pool { .. }))
    }
}

pub(crate) fn rules(plan: &RunPlan, algorithm: &Algorithm, rules: &mut Rules) {
    gap(plan, algorithm, rules);
    inputs(plan, algorithm.composition(), rules);
}

/// Where another policy samples than the one that is trained, the loss must weigh each token.
fn gap(plan: &RunPlan, algorithm: &Algorithm, rules: &mut Rules) {
    const FIX: &str = "so the loss must weigh each token by the ratio of both, with a bound above it: add \
         to [algorithm] `correction = { type = \"truncate\", low = 0.0, high = 2.0 }` (TIS) or `{ type = \"mask\", \
         low = 0.5, high = 2.0 }` (IcePop), or take type = \"decoupled_ppo\"";
    // What is imitated or preferred is data, whatever wrote it.
    let corrects = algorithm.loss().correction.bounds_ratio();
    let spans = !algorithm.composition().tempered() || corrects;
    rules.custom(
        "engine.weights",
        format!("{:?}", plan.engine.weights.name()),
        format!(
            "quantized weights sample from another policy than the one that is trained, {FIX}, or use \"f32\""
        ),
        plan.engine.weights == WeightFormat::F32 || spans,
    );
    rules.custom(
        "data.type",
        "\"pool\"",
        format!("other policies sampled what is in a pool, {FIX}, or choose `sft` or `dpo`"),
        !plan.draws_from_pool() || spans,
    );
    let late = plan.reward.as_ref().and_then(|r| r.late());
    rules.custom(
        "reward.late",
        "{ ... }",
        format!("an older policy sampled what is trained when its reward comes late, {FIX}"),
        late.is_none() || spans,
    );
}

/// What an algorithm reads of episodes must be something that the run's own episodes have.
fn inputs(plan: &RunPlan, c: &Composition, rules: &mut Rules) {
    if plan.data.is_some() {
        return;
    }
    let outside = !plan.harness.is_built_in();
    let kind = plan.algorithm.kind;
    let command = &format!("{:?}", plan.harness.name());
    rules.custom(
        "harness.type",
        command,
        format!(
            "`{kind}` compares turns that began in the same state, and the turns of an agent outside have no \
             states: use the built-in loop, or another algorithm"
        ),
        !(outside && matches!(c.advantage, Advantage::Gigpo { .. })),
    );
    rules.custom(
        "harness.type",
        command,
        format!(
            "`{kind}` chooses among successes by the tool calls that failed, and nobody counts those of an \
             agent outside: use the built-in loop, or leave resampling out"
        ),
        !(outside && c.filters.resample.is_some()),
    );
    let apart = matches!(c.rewards.process, ProcessRewards::Separate { .. });
    rules.custom(
        "harness.type",
        command,
        format!(
            "`{kind}` normalizes the rewards of turns apart, and only an agent that scores itself gives such: set \
             harness.scored_by = \"agent\", use the built-in loop, or set algorithm.process"
        ),
        !(outside && apart && plan.harness.is_graded()),
    );
    let process_reward = |env: &EnvMember| env.config().process_reward();
    let process_reward = plan.env.members().iter().map(process_reward);
    let process_reward = process_reward.fold(0.0, f64::max);
    rules.custom(
        "env.process_reward",
        process_reward,
        format!(
            "`{kind}` normalizes the rewards of turns apart, and at 0 no turn has one: set it above 0, or \
             set algorithm.process"
        ),
        process_reward > 0.0 || !apart || !plan.harness.is_graded(),
    );
}
