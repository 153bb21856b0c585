//! What values a recipe may have: one line a key, grouped by table.

use super::{DataSection, ModelSection, Recipe, SandboxSection, TasksSection};
use crate::harness::HarnessSection;
use sinew_algo::{Advantage, Algorithm, Composition, GroupRepair, ProcessRewards};
use sinew_engines::{EngineKind, FormatMode, VllmOptions};
use sinew_model::Precision;
use sinew_types::{Fidelity, TEMPERATURES};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// A rule about one key.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) key: String,
    pub(super) value: String,
    pub(super) reason: String,
    holds: bool,
}

/// The first rule that `recipe` breaks.
pub(super) fn broken(recipe: &Recipe) -> Option<Rule> {
    let mut rules = Rules(Vec::new());
    for section in [
        name, choices, model, env, harness, tasks, rollout, train, optimizer, eval, engine, judges,
        data, sandbox,
    ] {
        section(recipe, &mut rules);
    }
    rules.0.into_iter().find(|rule| !rule.holds)
}

/// The first rule that `recipe` breaks with what its algorithm turned out to be.
pub(super) fn broken_with(recipe: &Recipe, algorithm: &Algorithm) -> Option<Rule> {
    let mut rules = Rules(Vec::new());
    gap(recipe, algorithm, &mut rules);
    inputs(recipe, algorithm.composition(), &mut rules);
    rules.0.into_iter().find(|rule| !rule.holds)
}

pub(super) struct Rules(Vec<Rule>);

impl Rules {
    /// Any condition; `reason` says what is allowed and why.
    pub(super) fn custom(&mut self, key: &str, value: impl Display, reason: String, holds: bool) {
        let value = value.to_string();
        self.0.push(Rule {
            key: key.to_owned(),
            value,
            reason,
            holds,
        });
    }

    fn allowed(&mut self, key: &'static str, value: impl Display, allowed: &str, holds: bool) {
        self.custom(key, value, format!("allowed: {allowed}"), holds);
    }

    /// A number within bounds.
    fn range<T>(&mut self, key: &'static str, value: T, bounds: RangeInclusive<T>)
    where
        T: Display + PartialOrd,
    {
        let allowed = format!("{} to {}", bounds.start(), bounds.end());
        let holds = bounds.contains(&value);
        self.allowed(key, value, &allowed, holds);
    }

    /// A whole number from 1 on.
    fn one_or_more(&mut self, key: &'static str, value: u64) {
        self.allowed(key, value, "1 or more", value >= 1);
    }

    fn positive(&mut self, key: &'static str, value: f32) {
        self.allowed(
            key,
            value,
            "a number above 0",
            value.is_finite() && value > 0.0,
        );
    }

    fn seconds(&mut self, key: &'static str, value: f64) {
        self.allowed(key, value, super::TIME, super::is_time(value));
    }

    /// One of a few names; `why` follows the list.
    fn choice(&mut self, key: &'static str, value: &str, names: &[&str], why: &str) {
        let allowed = format!("{}{why}", names.join(", "));
        self.allowed(key, format!("{value:?}"), &allowed, names.contains(&value));
    }
}

/// Where another policy samples than the one that is trained, the loss must weigh each token.
fn gap(recipe: &Recipe, algorithm: &Algorithm, rules: &mut Rules) {
    const FIX: &str = "so the loss must weigh each token by the ratio of both, with a bound above it: add to \
         [algorithm] `correction = { type = \"truncate\", low = 0.0, high = 2.0 }` (TIS) or `{ type = \"mask\", \
         low = 0.5, high = 2.0 }` (IcePop), or take type = \"decoupled_ppo\"";
    // What is imitated or preferred is data, whoever wrote it.
    let spans = !algorithm.composition().tempered() || super::corrects(algorithm.loss());
    rules.custom(
        "engine.weights",
        format!("{:?}", recipe.engine.weights),
        format!(
            "rounded weights sample from another policy than the one that is trained, {FIX}, or use \"f32\""
        ),
        recipe.engine.weights == "f32" || spans,
    );
    rules.custom(
        "data.type",
        "\"pool\"",
        format!("other policies sampled what is in a pool, {FIX}, or choose `sft` or `dpo`"),
        !recipe.draws_from_pool() || spans,
    );
}

/// What an algorithm reads of episodes must be something that the run's own episodes have.
fn inputs(recipe: &Recipe, c: &Composition, rules: &mut Rules) {
    if recipe.data.is_some() {
        return;
    }
    let outside = !recipe.harness.is_built_in();
    let kind = recipe.algorithm.kind;
    let command = "\"command\"";
    rules.custom(
        "harness.type",
        command,
        format!(
            "`{kind}` compares turns that began in the same state, and the turns of an agent outside have no states: \
             use the built-in loop, or another algorithm"
        ),
        !(outside && matches!(c.advantage, Advantage::Gigpo { .. })),
    );
    rules.custom(
        "harness.type",
        command,
        format!(
            "`{kind}` chooses among successes by the tool calls that failed, and nobody counts those of an agent \
             outside: use the built-in loop, or leave resampling out"
        ),
        !(outside && c.filters.resample.is_some()),
    );
    let apart = matches!(c.rewards.process, ProcessRewards::Separate { .. });
    rules.custom(
        "harness.type",
        command,
        format!(
            "`{kind}` normalizes the rewards of turns apart, and the turns of an agent outside have none: use the \
             built-in loop, or set algorithm.process"
        ),
        !(outside && apart),
    );
    let process_reward = recipe.env.config().process_reward();
    rules.custom(
        "env.process_reward",
        process_reward,
        format!(
            "`{kind}` normalizes the rewards of turns apart, and at 0 no turn has one: set it above 0, or set \
             algorithm.process"
        ),
        process_reward > 0.0 || !apart,
    );
}

fn name(recipe: &Recipe, rules: &mut Rules) {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | ' ');
    let name = &recipe.name;
    rules.allowed(
        "name",
        format!("{name:?}"),
        "1 to 100 letters, digits, `.`, `_`, `-` and spaces, a letter or digit first: it names the run's folder",
        name.starts_with(char::is_alphanumeric) && name.len() <= 100 && name.chars().all(plain),
    );
}

fn choices(recipe: &Recipe, rules: &mut Rules) {
    let null = if recipe.sandbox.level == "null" {
        "; the null sandbox isolates nothing and serves tests only"
    } else {
        ""
    };
    rules.choice(
        "sandbox.level",
        &recipe.sandbox.level,
        &["process", "wasm", "container", "microvm"],
        null,
    );
    let kinds = ["embedded", "vllm", "sglang"];
    let openai = match EngineKind::Openai.fidelity() {
        Fidelity::Evaluation { why } if recipe.engine.kind == "openai" => {
            format!("; openai is for evaluation only: {why}")
        }
        _ => String::new(),
    };
    rules.choice("engine.type", &recipe.engine.kind, &kinds, &openai);
    rules.choice(
        "engine.weights",
        &recipe.engine.weights,
        &Precision::ALL.map(Precision::name),
        "",
    );
    rules.choice(
        "sandbox.microvm_backend",
        &recipe.sandbox.microvm_backend,
        &["auto", "qemu", "firecracker"],
        "",
    );
    let engine = &recipe.sandbox.container_engine;
    rules.choice(
        "sandbox.container_engine",
        engine,
        &crate::levels::CONTAINER_ENGINES,
        "",
    );
    rules.choice("store.type", &recipe.store.kind, &["disk", "memory"], "");
    let schedules = ["constant", "linear", "cosine"];
    rules.choice("train.schedule", &recipe.train.schedule, &schedules, "");
}

fn model(recipe: &Recipe, rules: &mut Rules) {
    let spells = recipe.env.needs().alphabet.is_some();
    let scratch = matches!(recipe.model, ModelSection::Scratch { .. });
    let env = recipe.env.name();
    rules.custom(
        "model.type",
        if scratch { "\"scratch\"" } else { "\"pretrained\"" },
        match spells {
            true => format!("env.type = \"{env}\" has an alphabet of its own, which only models from scratch speak: use type = \"scratch\""),
            false => format!("a model from scratch has a character tokenizer, which env.type = \"{env}\" does not speak: use a pretrained one, or env.type = \"tiny\""),
        },
        spells == scratch,
    );
    if let ModelSection::Scratch {
        d_model,
        heads,
        kv_heads,
        ..
    } = recipe.model
    {
        rules.custom(
            "model.heads",
            heads,
            format!("must divide d_model = {d_model} into heads of even size and be a multiple of kv_heads = {kv_heads}"),
            heads > 0
                && kv_heads > 0
                && d_model % heads == 0
                && d_model / heads % 2 == 0
                && heads % kv_heads == 0,
        );
    }
}

fn env(recipe: &Recipe, rules: &mut Rules) {
    super::env::rules(&recipe.env, rules);
    let used = recipe.env.needs().sandbox || !recipe.harness.is_built_in();
    let env = recipe.env.name();
    let reason = format!("has no effect: env.type = \"{env}\" runs no code; remove it");
    let strict = recipe.sandbox.strict;
    rules.custom("sandbox.strict", strict, reason.clone(), !strict || used);
    let unset = recipe.sandbox == SandboxSection::default();
    rules.custom("sandbox", "{ ... }", reason, unset || used);
}

fn tasks(recipe: &Recipe, rules: &mut Rules) {
    let TasksSection::Adaptive(config) = &recipe.tasks else {
        return;
    };
    if let Some((field, value, allowed)) = config.broken() {
        let key = match field {
            "floor" => "tasks.floor",
            "memory" => "tasks.memory",
            "prior_successes" => "tasks.prior_successes",
            _ => "tasks.prior_failures",
        };
        rules.allowed(key, value, allowed, false);
    }
    let reason = "has no effect: with [data] no tasks are run to train on; remove [tasks]";
    rules.custom(
        "tasks.sampling",
        "\"adaptive\"",
        reason.into(),
        recipe.data.is_none(),
    );
}

fn rollout(recipe: &Recipe, rules: &mut Rules) {
    let r = &recipe.rollout;
    rules.range("rollout.tasks_per_step", r.tasks_per_step, 1..=65536);
    rules.range("rollout.group_size", r.group_size, 1..=4096);
    rules.range("rollout.max_in_flight", r.max_in_flight, 1..=65536);
    for (key, value, allowed, holds) in r.admission.rules() {
        rules.allowed(key, value, allowed, holds);
    }
    let starting = r.max_starting.unwrap_or(1);
    rules.custom(
        "rollout.max_starting",
        starting,
        "allowed: 1 to rollout.max_in_flight, above which it has no effect".into(),
        (1..=r.max_in_flight).contains(&starting),
    );
    rules.range("rollout.max_turns", r.max_turns, 1..=1000);
    rules.allowed(
        "rollout.max_turn_tokens",
        r.max_turn_tokens,
        "1 to max_context_tokens",
        r.max_turn_tokens >= 1 && r.max_turn_tokens <= r.max_context_tokens,
    );
    rules.allowed(
        "rollout.temperature",
        r.temperature,
        "a number above 0: training needs samples, not the greedy answer",
        r.temperature.is_finite() && r.temperature > 0.0,
    );
    rules.custom(
        "rollout.repair",
        "[]",
        "has no steps: give some, the last `mask` or `drop_group`, or leave it out for the usual ones".into(),
        r.repair.as_ref().is_none_or(|steps| !steps.is_empty()),
    );
    let top_p = r.top_p > 0.0 && r.top_p <= 1.0;
    rules.allowed("rollout.top_p", r.top_p, "above 0, at most 1", top_p);
    rules.seconds("rollout.episode_timeout_s", r.episode_timeout_s);
    rules.seconds("rollout.score_timeout_s", r.score_timeout_s);
    if let Some(format) = &r.format {
        let kind = format!("{:?}", format.grammar.name());
        if let Err(error) = format.validate() {
            rules.custom("rollout.format", &kind, error.to_string(), false);
        }
        let own = recipe.harness.is_built_in();
        let reason = "has no effect: a program asks for formats itself; remove it";
        rules.custom("rollout.format", &kind, reason.into(), own);
        let reason =
            "needs engine.type = \"embedded\": training makes the masks of the engine again";
        let embedded = recipe.engine.kind == "embedded";
        rules.custom("rollout.format", &kind, reason.into(), embedded);
    }
    if let Some(seconds) = r.boot_timeout_s {
        rules.seconds("rollout.boot_timeout_s", seconds);
        let reason =
            "has no effect: a program's sandbox starts within harness.timeout_s; remove it";
        rules.custom(
            "rollout.boot_timeout_s",
            seconds,
            reason.into(),
            recipe.harness.is_built_in(),
        );
    }
}

fn train(recipe: &Recipe, rules: &mut Rules) {
    let t = &recipe.train;
    rules.range("train.steps", t.steps, 1..=10_000_000);
    rules.allowed(
        "train.minibatches",
        t.minibatches,
        "1 to tasks_per_step",
        t.minibatches >= 1 && t.minibatches <= recipe.rollout.tasks_per_step,
    );
    rules.allowed(
        "train.micro_batch_tokens",
        t.micro_batch_tokens,
        "at least rollout.max_context_tokens, as one episode is never split",
        t.micro_batch_tokens >= recipe.rollout.max_context_tokens as usize,
    );
    rules.allowed(
        "train.max_wall_s",
        t.max_wall_s,
        "0 (no limit) or a number of seconds",
        t.max_wall_s.is_finite() && t.max_wall_s >= 0.0,
    );
    rules.range("train.data_parallel", t.data_parallel, 1..=64);
    rules.one_or_more("train.checkpoint_every", t.checkpoint_every);
    rules.one_or_more("train.keep_checkpoints", t.keep_checkpoints as u64);
    if let Some(lora) = &t.lora {
        rules.range("train.lora.rank", lora.rank, 1..=1024);
        rules.positive("train.lora.alpha", lora.alpha);
    }
}

fn optimizer(recipe: &Recipe, rules: &mut Rules) {
    let t = &recipe.train;
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
    rules.range("train.weight_decay", t.weight_decay, 0.0..=1.0);
    let below_one = |x: f32| (0.0..1.0).contains(&x);
    let allowed = "0 up to below 1";
    rules.allowed("train.beta1", t.beta1, allowed, below_one(t.beta1));
    rules.allowed("train.beta2", t.beta2, allowed, below_one(t.beta2));
    rules.positive("train.max_grad_norm", t.max_grad_norm);
}

fn eval(recipe: &Recipe, rules: &mut Rules) {
    let e = &recipe.eval;
    rules.range("eval.tasks", e.tasks, 1..=100_000);
    rules.range("eval.episodes_per_task", e.episodes_per_task, 1..=1000);
    rules.allowed(
        "eval.temperature",
        e.temperature,
        "0 (greedy) or a number above",
        e.temperature >= 0.0 && e.temperature.is_finite(),
    );
    rules.custom(
        "eval.greedy",
        true,
        "has no effect beside eval.temperature = 0, which is greedy; remove it".into(),
        !(e.greedy == Some(true) && e.temperature == 0.0),
    );
}

fn engine(recipe: &Recipe, rules: &mut Rules) {
    let e = &recipe.engine;
    rules.allowed(
        "engine.kv_tokens",
        e.kv_tokens,
        "at least 2 x rollout.max_context_tokens",
        e.kv_tokens >= 2 * recipe.rollout.max_context_tokens as usize,
    );
    rules.range("engine.max_num_seqs", e.max_num_seqs, 1..=4096);
    rules.allowed(
        "engine.max_batched_tokens",
        e.max_batched_tokens,
        "at least engine.max_num_seqs",
        e.max_batched_tokens >= e.max_num_seqs,
    );
    rules.range("engine.speculative_tokens", e.speculative_tokens, 0..=256);
    outside(recipe, rules);
}

/// Settings of engines outside of this process, and those that they do not have.
fn outside(recipe: &Recipe, rules: &mut Rules) {
    let e = &recipe.engine;
    let outside = e.kind != "embedded";
    rules.allowed(
        "engine.url",
        format!("{:?}", e.url),
        "addresses with type vllm or sglang, none with embedded",
        outside != e.url.is_empty(),
    );
    rules.allowed(
        "engine.weights_dir",
        format!("{:?}", e.weights_dir),
        "a folder that the servers see too with type vllm or sglang, since training needs new weights to be pushed; \
         nothing with embedded",
        outside == e.weights_dir.is_some(),
    );
    let api = e.api.as_deref();
    let known = matches!(api, None | Some("completions" | "generate"));
    rules.allowed(
        "engine.api",
        format!("{api:?}"),
        "completions or generate, with type vllm",
        known && (api.is_none() || e.kind == "vllm"),
    );
    rules.allowed(
        "engine.untied",
        e.untied,
        "true with type vllm only",
        !e.untied || e.kind == "vllm",
    );
    told_logprobs(recipe, rules);
    let own =
        e.weights == "f32" && e.speculative_tokens == 0 && recipe.rollout.cross_policy.is_none();
    rules.allowed(
        "engine.type",
        format!("{:?}", e.kind),
        "embedded, with engine.weights, engine.speculative_tokens or rollout.cross_policy set",
        own || !outside,
    );
}

/// Sampling whose log-probabilities the servers cannot tell.
fn told_logprobs(recipe: &Recipe, rules: &mut Rules) {
    let (e, rollout) = (&recipe.engine, &recipe.rollout);
    let said = e.logprobs.as_deref();
    let known = matches!(said, None | Some("raw" | "processed"));
    rules.allowed(
        "engine.logprobs",
        format!("{said:?}"),
        "raw or processed, with type vllm or sglang",
        known && (said.is_none() || e.kind != "embedded"),
    );
    let formats = e.formats.as_deref();
    rules.allowed(
        "engine.formats",
        format!("{formats:?}"),
        "guided, advice or refuse, with type vllm or sglang",
        formats.is_none_or(|f| FormatMode::NAMES.contains(&f) && e.kind != "embedded"),
    );
    let (raw, instead) = match e.kind.as_str() {
        "vllm" => (
            said != Some("processed"),
            "1 with type vllm, whose log-probs are those of temperature 1, unless it runs with \
             --logprobs-mode processed_logprobs and `logprobs = \"processed\"`",
        ),
        "sglang" => (
            said == Some("raw"),
            "1 with type sglang and `logprobs = \"raw\"`, which are those of temperature 1; start it without \
             SGLANG_RETURN_ORIGINAL_LOGPROB and leave `logprobs` out",
        ),
        _ => (false, ""),
    };
    let greedy_or_one = |t: f32| t == 0.0 || t == 1.0;
    for (key, temperature, holds) in [
        (
            "rollout.temperature",
            rollout.temperature,
            rollout.temperature == 1.0,
        ),
        (
            "eval.temperature",
            recipe.eval.temperature,
            greedy_or_one(recipe.eval.temperature),
        ),
    ] {
        rules.allowed(key, temperature, instead, !raw || holds);
    }
    rules.allowed(
        "rollout.top_p",
        rollout.top_p,
        "1 with type vllm and `logprobs = \"processed\"`, which are taken after truncation",
        e.kind != "vllm" || raw || rollout.top_p == 1.0,
    );
    // What the engine would refuse at its first token.
    let lowest = if e.kind == "vllm" {
        VllmOptions::LOWEST_TEMPERATURE
    } else {
        *TEMPERATURES.start()
    };
    let allowed = format!(
        "at least {lowest} with this engine, at most {}",
        TEMPERATURES.end()
    );
    for (key, t) in [
        ("rollout.temperature", rollout.temperature),
        ("eval.temperature", recipe.eval.temperature),
    ] {
        let fits = (lowest..=*TEMPERATURES.end()).contains(&t);
        rules.allowed(key, t, &allowed, fits || t <= 0.0 || !t.is_finite());
    }
}

fn harness(recipe: &Recipe, rules: &mut Rules) {
    for (key, value, allowed, holds) in recipe.harness.rules(recipe.sandbox.strict) {
        rules.allowed(key, value, allowed, holds);
    }
}

fn judges(recipe: &Recipe, rules: &mut Rules) {
    let (needs, kind) = (recipe.needs(), recipe.algorithm.kind);
    if let Some(critic) = &recipe.critic {
        let reason = format!("has no effect: `{kind}` reads no values; remove it");
        rules.custom("critic", "{ ... }", reason, needs.values);
        let rate = critic.learning_rate;
        let holds = rate.is_none_or(|lr| lr > 0.0 && lr <= 1.0);
        let rate = rate.unwrap_or_default();
        rules.allowed("critic.learning_rate", rate, "above 0, at most 1", holds);
    }
    if let Some(reference) = &recipe.reference {
        let reason = format!(
            "has no effect: `{kind}` as configured compares with no reference; remove it, or add algorithm.kl"
        );
        let model = format!("{:?}", reference.model);
        rules.custom("reference.model", model, reason, needs.reference());
    }
    if let Some(cross) = recipe.rollout.cross_policy {
        let share = cross.share;
        let inside = share > 0.0 && share < 1.0;
        rules.allowed(
            "rollout.cross_policy.share",
            share,
            "above 0, below 1",
            inside,
        );
        rules.one_or_more("rollout.cross_policy.every", cross.every);
    }
}

fn data(recipe: &Recipe, rules: &mut Rules) {
    let Some(section) = &recipe.data else { return };
    let retries = |step: &GroupRepair| matches!(step, GroupRepair::Retry { .. });
    rules.custom(
        "rollout.repair",
        "retry",
        "what is given as data cannot be run again: leave `retry` out".into(),
        !recipe.rollout.repair.iter().flatten().any(retries),
    );
    rules.custom(
        "algorithm.refill",
        recipe.algorithm.refill.unwrap_or_default(),
        "has no effect: with [data] no tasks are run to train on; remove it".into(),
        recipe.algorithm.refill.is_none(),
    );
    let kind = recipe.algorithm.kind;
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    let advantage = composition.map(|c| c.advantage);
    let imitates = matches!(advantage, Ok(Advantage::One));
    let prefers = matches!(advantage, Ok(Advantage::Preference { .. }));
    let (name, fits, who) = match section {
        DataSection::Demonstrations { .. } => ("demonstrations", imitates, "`sft`"),
        DataSection::Pairs { .. } => ("pairs", prefers, "`dpo`"),
        DataSection::Episodes { .. } => ("episodes", imitates || prefers, "`sft` or `dpo`"),
        DataSection::Pool {
            url,
            wait_s,
            lease_s,
            ..
        } => {
            let http = url.starts_with("http://") || url.starts_with("https://");
            rules.allowed(
                "data.url",
                format!("{url:?}"),
                "the address of `sinew serve --pool`",
                http,
            );
            rules.range("data.wait_s", *wait_s, 0.0..=86_400.0);
            rules.range("data.lease_s", *lease_s, 10.0..=86_400.0);
            rules.custom(
                "store.type",
                format!("{:?}", recipe.store.kind),
                "a run keeps what a pool gave it: use \"disk\"".into(),
                recipe.store.kind == "disk",
            );
            ("pool", true, "every algorithm")
        }
    };
    rules.custom(
        "data.type",
        format!("{name:?}"),
        format!("serves {who}; `{kind}` learns from what its own policy samples: remove [data], or change algorithm.type"),
        fits,
    );
    rules.custom(
        "rollout.cross_policy",
        "{ ... }",
        "has no effect: with [data] nothing is sampled to train on; remove it".into(),
        recipe.rollout.cross_policy.is_none(),
    );
}

fn sandbox(recipe: &Recipe, rules: &mut Rules) {
    let s = &recipe.sandbox;
    rules.range("sandbox.memory_mb", s.memory_mb, super::MEMORY_MB);
    rules.range("sandbox.processes", s.processes, 1..=4096);
    rules.seconds("sandbox.cpu_s", s.cpu_s);
    rules.range("sandbox.max_live", s.max_live, 1..=16384);
    rules.custom(
        "sandbox.cpus",
        s.cpus.unwrap_or_default(),
        "allowed: 0.01 to 1024".into(),
        s.cpus.is_none_or(|n| (0.01..=1024.0).contains(&n)),
    );
    let wasm = s.level == "wasm";
    let d = SandboxSection::default();
    for (key, set, levels) in [
        ("sandbox.image", s.image != d.image, "process or container"),
        (
            "sandbox.image_cache",
            s.image_cache != d.image_cache,
            "process or container",
        ),
        (
            "sandbox.wasm_modules",
            s.wasm_modules != d.wasm_modules,
            "wasm",
        ),
        (
            "sandbox.container_engine",
            s.container_engine != d.container_engine,
            "container",
        ),
        (
            "sandbox.container_socket",
            s.container_socket != d.container_socket,
            "container",
        ),
        ("sandbox.cpus", s.cpus.is_some(), "container"),
        (
            "sandbox.microvm_images",
            s.microvm_images != d.microvm_images,
            "microvm",
        ),
        (
            "sandbox.microvm_backend",
            s.microvm_backend != d.microvm_backend,
            "microvm",
        ),
    ] {
        let reason = format!("has an effect at level {levels} only; remove it");
        let outside = matches!(&recipe.harness, HarnessSection::Command(c) if levels == c.level);
        rules.custom(
            key,
            "set",
            reason,
            !set || levels.contains(&s.level) || outside,
        );
    }
    let reason =
        "needs sandbox.level = \"wasm\": elsewhere every program has an interpreter of its own"
            .into();
    rules.custom("sandbox.live", "true", reason, !s.live || wasm);
    egress(recipe, rules);
}

fn egress(recipe: &Recipe, rules: &mut Rules) {
    let s = &recipe.sandbox;
    let Some(egress) = &s.egress else {
        let reason = "has no effect without [sandbox.egress]; remove it".into();
        rules.custom(
            "sandbox.egress_audit",
            "set",
            reason,
            s.egress_audit.is_none(),
        );
        return;
    };
    let reason = "needs sandbox.level = \"process\" or \"container\": the others have no network";
    let has_network = matches!(s.level.as_str(), "process" | "container");
    rules.custom("sandbox.egress", "{ ... }", reason.into(), has_network);
    use sinew_egress::Mode;
    let named = matches!(egress.mode, Mode::Record | Mode::Replay);
    let allowed = "live, cache; episodes are recorded and replayed by name, over `sinew serve --sandbox-only --egress FILE`";
    rules.allowed(
        "sandbox.egress.mode",
        format!("{:?}", egress.mode),
        allowed,
        !named,
    );
    // Whether the variables of credentials are set is found out where they are needed.
    if let Err(e) = egress.policy(&|_| Some("0123456789abcdef".into())) {
        rules.custom("sandbox.egress", "{ ... }", e.to_string(), false);
    }
}
