//! `[engine]`: the engine that generates tokens.

use crate::RunPlan;
use crate::rule::Rules;
use crate::section::{choice, section};
use crate::urls::Urls;
use sinew_types::TEMPERATURES;

/// Minimum temperature of vLLM, which replaces any lower value above 0 by this one.
pub const VLLM_LOWEST_TEMPERATURE: f32 = 0.01;

choice! {
    /// The engine that generates tokens.
    EngineType {
        /// In this process, on the CPU.
        Embedded = "embedded",
        /// vLLM servers.
        Vllm = "vllm",
        /// SGLang servers.
        Sglang = "sglang",
        /// Any servers with `/v1/completions`, with the weights that they have: for `sinew eval` only.
        Openai = "openai",
        /// The Tinker service that trains.
        Tinker = "tinker",
    }
}

choice! {
    /// Format of the embedded engine's matrices.
    WeightFormat {
        /// As trained.
        F32 = "f32",
        /// Quantized to bfloat16.
        Bf16 = "bf16",
        /// Quantized to 8 bits, in groups.
        Int8 = "int8",
    }
}

choice! {
    /// Endpoint of vLLM.
    Api {
        /// `/v1/completions`.
        Completions = "completions",
        /// `/inference/v1/generate`.
        Generate = "generate",
    }
}

choice! {
    /// Form in which weights are published for engines of other processes.
    Transfer {
        /// All tensors of each version.
        Full = "full",
        /// A lossless difference to an earlier version, wherever that is smaller than the full tensors.
        Delta = "delta",
    }
}

choice! {
    /// Source of the servers' log-probs.
    Logprobs {
        /// Logits, at temperature 1.
        Raw = "raw",
        /// The distribution that is sampled from, after the temperature.
        Processed = "processed",
    }
}

choice! {
    /// Treatment of the output formats of agents' calls at servers.
    Formats {
        /// They hold to them by guided decoding.
        Guided = "guided",
        /// The answer is checked afterwards.
        Advice = "advice",
        /// Calls with a format are refused.
        Refuse = "refuse",
    }
}

section! {
    /// The engine that generates tokens.
    EngineKeys => EnginePlan, "engine" {
        /// The engine that generates tokens.
        kind as "type": EngineType = EngineType::Embedded;
        /// Address of the server, or several, for `vllm`, `sglang` and `openai`. With `tinker` one at most;
        /// left out: `trainer.url`.
        url: Urls;
        /// Folder in which servers find new weights; they and this process see it under this path. With
        /// type `embedded`: each version is published there for `sinew serve --follow`; below `/dev/shm` it
        /// is shared memory.
        weights_dir: String;
        /// Form in which weights are published with type `embedded`; left out: `delta`.
        weights_transfer: Transfer;
        /// Endpoint of vLLM; left out: `completions`.
        api: Api;
        /// Source of the servers' log-probs; left out: the server's default, which is
        /// `raw` for vLLM and `processed` for SGLang.
        logprobs: Logprobs;
        /// Treatment of the output formats of agents' calls at servers; left out: `guided`, with type
        /// `tinker` `refuse`.
        formats: Formats;
        /// Environment variable with the key of the Tinker service; left out: that of the trainer.
        api_key_env: String;
        /// Longest time in seconds that the Tinker service may take for one request; left out:
        /// `trainer.timeout_s`.
        timeout_s: f64;
        /// The servers were started with an output matrix where the model uses its embedding: it is
        /// published, too. For vLLM on a CPU.
        untied: bool = false;
        /// Weights are LoRA adapters that servers load by name: no pause, and requests in flight end on the
        /// adapter that they began with. With type `vllm` or `sglang`, `train.lora` and `[trainer] type =
        /// "torch"`; the servers run with `--enable-lora`, vLLM also with
        /// `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
        adapters: bool = false;
        /// KV-cache capacity of the embedded engine, in tokens; at least twice
        /// `rollout.max_context_tokens`.
        kv_tokens: usize = 32_768;
        /// Maximum number of sequences in one decoding pass of the embedded engine.
        max_num_seqs: usize = 128, in 1 to 4096;
        /// Maximum number of tokens in one pass of the embedded engine, prompts included; at least
        /// `max_num_seqs`.
        max_batched_tokens: usize = 512;
        /// Speculative decoding of the embedded engine: tokens of a pass, draft tokens included, up to
        /// which drafts are verified; 0: off. What is sampled does not depend on it.
        speculative_tokens: usize = 0, in 0 to 256;
        /// Format of the embedded engine's matrices. Quantized weights need a loss that bounds the
        /// importance ratio: a `correction`, `dual_clip`, `cispo` or `sapo` in `[algorithm]`.
        weights: WeightFormat = WeightFormat::F32;
    }
}

impl EnginePlan {
    /// Addresses of the servers; none for the embedded engine.
    pub fn urls(&self) -> &[String] {
        self.url.as_ref().map_or(&[], Urls::all)
    }

    /// Resets the keys that say how long an engine runs, and how its key is found.
    pub(crate) fn clear_bounds(&mut self) {
        (self.api_key_env, self.timeout_s) = (None, None);
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let e = &plan.engine;
    e.ranges(rules);
    rules.allowed(
        "engine.kv_tokens",
        e.kv_tokens,
        "at least 2 x rollout.max_context_tokens",
        e.kind != EngineType::Embedded
            || e.kv_tokens >= 2 * plan.rollout.max_context_tokens as usize,
    );
    rules.allowed(
        "engine.max_batched_tokens",
        e.max_batched_tokens,
        "at least engine.max_num_seqs",
        e.max_batched_tokens >= e.max_num_seqs,
    );
    servers(plan, rules);
    temperatures(plan, rules);
}

/// Checks the keys of engines outside of this process, and refuses keys that an engine of this type does not
/// read.
fn servers(plan: &RunPlan, rules: &mut Rules) {
    let e = &plan.engine;
    let kind = e.kind;
    let embedded = kind == EngineType::Embedded;
    let tinker = kind == EngineType::Tinker;
    let local = matches!(kind, EngineType::Vllm | EngineType::Sglang);
    rules.allowed(
        "engine.url",
        format!("{:?}", e.urls()),
        "addresses with type vllm, sglang or openai, none with embedded",
        tinker || embedded == e.urls().is_empty(),
    );
    rules.allowed(
        "engine.weights_dir",
        format!("{:?}", e.weights_dir),
        "a folder that the servers see too with type vllm or sglang, since training needs new weights to be \
         pushed",
        !local || e.weights_dir.is_some(),
    );
    let vllm = kind == EngineType::Vllm;
    for (key, has_effect, kinds) in [
        ("engine.api", vllm, "vllm"),
        ("engine.untied", vllm, "vllm"),
        ("engine.adapters", local, "vllm or sglang"),
        ("engine.logprobs", local, "vllm or sglang"),
        (
            "engine.formats",
            !embedded,
            "vllm, sglang, openai or tinker",
        ),
        ("engine.api_key_env", tinker, "tinker"),
        ("engine.timeout_s", tinker, "tinker"),
        (
            "engine.weights_dir",
            embedded || local,
            "embedded, vllm or sglang",
        ),
        ("engine.kv_tokens", embedded, "embedded"),
        ("engine.max_num_seqs", embedded, "embedded"),
        ("engine.max_batched_tokens", embedded, "embedded"),
        ("engine.speculative_tokens", embedded, "embedded"),
        ("engine.weights", embedded, "embedded"),
        ("engine.weights_transfer", embedded, "embedded"),
    ] {
        let reason = format!("has an effect with type {kinds} only; remove it");
        rules.unused(key, reason, has_effect);
    }
    rules.allowed(
        "engine.adapters",
        e.adapters,
        "false without train.lora, which makes the adapters, or without [trainer] type = \"torch\", which \
         publishes them: the embedded trainer publishes whole weights",
        !e.adapters || (plan.train.lora.is_some() && plan.torch().is_some()),
    );
    rules.unused(
        "engine.weights_transfer",
        "has an effect with engine.weights_dir only; remove it",
        e.weights_dir.is_some(),
    );
    rules.allowed(
        "engine.type",
        format!("{:?}", kind.name()),
        "embedded, with rollout.cross_policy set",
        embedded || plan.rollout.cross_policy.is_none(),
    );
}

/// Refuses sampling settings for which the servers do not report correct log-probabilities.
fn temperatures(plan: &RunPlan, rules: &mut Rules) {
    let (e, rollout, eval) = (&plan.engine, &plan.rollout, &plan.eval);
    let (raw, instead) = match e.kind {
        EngineType::Vllm => (
            e.logprobs != Some(Logprobs::Processed),
            "1 with type vllm, whose log-probs are those of temperature 1, unless it runs with \
             --logprobs-mode processed_logprobs and `logprobs = \"processed\"`",
        ),
        EngineType::Sglang => (
            e.logprobs == Some(Logprobs::Raw),
            "1 with type sglang and `logprobs = \"raw\"`, which are those of temperature 1; start it without \
             SGLANG_RETURN_ORIGINAL_LOGPROB and leave `logprobs` out",
        ),
        EngineType::Tinker => (
            true,
            "1 with type tinker, whose protocol defines log-probs at that temperature only",
        ),
        EngineType::Embedded | EngineType::Openai => (false, ""),
    };
    let one = rollout.temperature == 1.0;
    let greedy_or_one = eval.temperature == 0.0 || eval.temperature == 1.0;
    rules.allowed(
        "rollout.temperature",
        rollout.temperature,
        instead,
        !raw || one,
    );
    rules.allowed(
        "eval.temperature",
        eval.temperature,
        instead,
        !raw || greedy_or_one,
    );
    rules.allowed(
        "rollout.top_p",
        rollout.top_p,
        "1 with type vllm and `logprobs = \"processed\"`, which are taken after truncation",
        e.kind != EngineType::Vllm || raw || rollout.top_p == 1.0,
    );
    rules.allowed(
        "rollout.top_p",
        rollout.top_p,
        "1 with type tinker, whose protocol defines no log-probs under truncation",
        e.kind != EngineType::Tinker || rollout.top_p == 1.0,
    );
    // The engine would refuse lower temperatures at its first token.
    let lowest = match e.kind {
        EngineType::Vllm => VLLM_LOWEST_TEMPERATURE,
        _ => *TEMPERATURES.start(),
    };
    let allowed = format!(
        "at least {lowest} with this engine, at most {}",
        TEMPERATURES.end()
    );
    for (key, t) in [
        ("rollout.temperature", rollout.temperature),
        ("eval.temperature", eval.temperature),
    ] {
        let fits = (lowest..=*TEMPERATURES.end()).contains(&t);
        rules.allowed(key, t, &allowed, fits || t <= 0.0 || !t.is_finite());
    }
}

#[cfg(test)]
mod tests {
    use crate::parsed_bounded as parse;

    #[test]
    fn adapters_need_a_trainer_that_publishes_them_and_servers_that_load_them() {
        let servers = |kind: &str| {
            format!(
                "[engine]\ntype = \"{kind}\"\nurl = \"http://a\"\nweights_dir = \"w\"\nadapters = true\n"
            )
        };
        let (lora, torch) = ("[train.lora]\nrank = 4\n", "[trainer]\ntype = \"torch\"\n");
        for kind in ["vllm", "sglang"] {
            let plan = parse(&format!("{}{lora}{torch}", servers(kind))).unwrap();
            assert!(plan.engine.adapters);
            for less in [lora, torch] {
                let why = parse(&format!("{}{less}", servers(kind))).unwrap_err();
                assert!(why.contains("engine.adapters = true"), "{why}");
                assert!(why.contains("train.lora") && why.contains("torch"), "{why}");
            }
        }
        let why = parse("[engine]\nadapters = true\n").unwrap_err();
        assert!(why.contains("type vllm or sglang only"), "{why}");
    }
}
