//! Turns a recipe into the options of the training loop: the one place where the two meet.
//!
//! The loop, the trainer and the rollouts do not depend on recipes. Their options are plain data, made here
//! from the tables that concern them.

use crate::adapter::AdapterFolder;
use crate::failure::Failure;
use crate::store::run_reader;
use sinew_algo::{Algorithm, Signal, TurnStages};
use sinew_env::{Split, Taskset};
use sinew_model::{LoraConfig, ModelConfig, Projection};
use sinew_orchestrator::{
    ByType, CoreConfig, EnvironmentShare, EvalConfig, Goal, LateConfig, LateGroups, Overlap,
    SampleKind, StaleGroups, TaskDraws, TaskSampling, TaskShares,
};
use sinew_pipeline::{
    ChangedParts, IN_FLIGHT, LearnerConfig, PipelineConfig, PolicyConfig, TurnSchedule,
};
use sinew_recipe::{
    Changed, DataSection, EngineType, LateAfter, LoraSection, LrSchedule, ResumeEpisodes,
    RolloutPlan, RunPlan, ThinkingHistory, TrainMode, TrainPlan,
};
use sinew_render::Renderer;
use sinew_rollout::{EpisodeLimits, EpisodeOptions};
use sinew_runs::{RunDir, RunDirError};
use sinew_sources::{Dataset, DatasetConfig, StoredEpisodes};
use sinew_store::{ScoreRule, ScoreTerm};
use sinew_train::TrainerConfig;
use sinew_train::optim::{AdamWConfig, Decay, Schedule};
use sinew_types::{Fence, SamplingParams, Thinking};
use sinew_view::RunFacts;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Default of `rollout.boot_timeout_s`.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// A value head starts from nothing, so that by default it learns this much faster.
const CRITIC_LR_FACTOR: f32 = 10.0;

/// Adapters of `train.lora`. No targets: all projections of the layers.
///
/// # Errors
/// Fails for a target that is not a projection, and for a rank or scale that cannot be.
pub fn lora_config(section: &LoraSection) -> Result<LoraConfig, Failure> {
    let named: Result<Vec<_>, _> = section
        .targets
        .iter()
        .map(|t| Projection::parse(t))
        .collect();
    let targets = named.map_err(|e| Failure::input(format!("train.lora.targets: {e}")))?;
    let config = LoraConfig {
        rank: section.rank,
        alpha: section.alpha,
        targets: if targets.is_empty() {
            Projection::LAYERS.to_vec()
        } else {
            targets
        },
    };
    config
        .validate()
        .map_err(|e| Failure::input(format!("train.lora: {e}")))?;
    Ok(config)
}

/// Whether the engine takes what `train.lora` makes of a model of this shape.
///
/// # Errors
/// Fails as [`lora_config`] does, and for an adapter on the output matrix if servers have no such matrix.
pub fn check_lora(recipe: &RunPlan, model: &ModelConfig) -> Result<(), Failure> {
    let Some(section) = &recipe.train.lora else {
        return Ok(());
    };
    let lora = lora_config(section)?;
    let untied = model.tied_embeddings && !lora.merged_config(model).tied_embeddings;
    let servers = matches!(recipe.engine.kind, EngineType::Vllm | EngineType::Sglang);
    if untied && servers && !recipe.engine.untied {
        return Err(Failure::input(
            "train.lora.targets: `lm_head` gives the model an output matrix that is not its embedding, and servers that \
             were started with this model have no such matrix\n  hint: leave `lm_head` out, or start vLLM with both \
             matrices and set engine.untied = true (docs/engines.md)",
        ));
    }
    Ok(())
}

/// The learning rate over the updates of all steps: each step has `train.minibatches` of them, also where it
/// trains nothing, so that decay ends with 0 behind the last step.
fn schedule(t: &TrainPlan) -> Schedule {
    let updates = t.steps * t.minibatches as u64;
    let warmup = t.warmup_steps * t.minibatches as u64;
    let (total_steps, final_fraction) = (updates.max(warmup + 1), 0.0);
    Schedule {
        peak_lr: t.learning_rate,
        warmup_steps: warmup,
        decay: match t.schedule {
            LrSchedule::Linear => Decay::Linear {
                total_steps,
                final_fraction,
            },
            LrSchedule::Cosine => Decay::Cosine {
                total_steps,
                final_fraction,
            },
            LrSchedule::Constant => Decay::Constant,
        },
    }
}

/// The change of the learning rate of a run that is resumed behind `step` with another schedule; nothing
/// where the rate stays as it was.
pub(crate) fn rescheduled(old: &TrainPlan, new: &TrainPlan, step: u64) -> Option<String> {
    let before = schedule(old).lr((step * old.minibatches as u64).saturating_sub(1));
    let planned = schedule(old).lr(step * old.minibatches as u64);
    let next = schedule(new).lr(step * new.minibatches as u64);
    (step > 0 && planned != next).then(|| {
        format!(
            "the {} schedule of train.learning_rate reaches over {} steps now, {} before: step {} has {next:.3e}, where step \
             {step} had {before:.3e} and {planned:.3e} was to come",
            format!("{:?}", new.schedule).to_lowercase(),
            new.steps,
            old.steps,
            step + 1
        )
    })
}

/// The policy that a recipe trains, with its optimizer. `critic.learning_rate` becomes a factor of that of
/// the policy, since both follow one schedule.
///
/// # Errors
/// If `train.lora` cannot be: see [`lora_config`].
pub(crate) fn policy(recipe: &RunPlan) -> Result<PolicyConfig, Failure> {
    let t = &recipe.train;
    let lora = t.lora.as_ref().map(lora_config).transpose()?;
    let asked = recipe.critic.as_ref().and_then(|c| c.learning_rate);
    let critic = asked.map_or(CRITIC_LR_FACTOR, |lr| lr / t.learning_rate);
    Ok(PolicyConfig {
        seed: recipe.seed,
        max_context_tokens: recipe.rollout.max_context_tokens as usize,
        lora: lora.map(|config| (config, recipe.model_source())),
        critic: recipe.needs().values.then_some(critic),
        trainer: TrainerConfig {
            schedule: schedule(t),
            adamw: AdamWConfig {
                beta1: t.beta1,
                beta2: t.beta2,
                weight_decay: t.weight_decay,
                ..AdamWConfig::default()
            },
            max_grad_norm: Some(t.max_grad_norm),
            minibatches: t.minibatches as u32,
            seed: recipe.seed,
            ..TrainerConfig::new(t.micro_batch_tokens, t.learning_rate)
        },
    })
}

/// The learner of a recipe's run.
///
/// # Errors
/// If the recipe cannot be written as text, whose hash checkpoints contain.
pub(crate) fn learner(
    recipe: &RunPlan,
    dir: &RunDir,
    fence: Fence,
) -> Result<LearnerConfig, Failure> {
    let t = &recipe.train;
    Ok(LearnerConfig {
        micro_batch_tokens: t.micro_batch_tokens,
        run_dir: dir.path().into(),
        keep_checkpoints: t.keep_checkpoints,
        config_hash: dir.portable(recipe).hash().map_err(Failure::system)?,
        fence,
    })
}

/// The recipe's data; `None` where it is sampled, leased from a pool, or played step by step. All rows are
/// read and rendered now.
///
/// # Errors
/// Fails with the file and the line of the first row that cannot be trained on.
pub fn dataset(recipe: &RunPlan, renderer: &dyn Renderer) -> Result<Option<Dataset>, Failure> {
    let config = match &recipe.data {
        None
        | Some(DataSection::Pool { .. } | DataSection::Queue { .. } | DataSection::Gold {}) => {
            return Ok(None);
        }
        Some(DataSection::Demonstrations { path }) => {
            DatasetConfig::Demonstrations { path: path.clone() }
        }
        Some(DataSection::Pairs { path }) => DatasetConfig::Pairs { path: path.clone() },
        Some(DataSection::Episodes {
            path,
            purpose,
            scores,
        }) => DatasetConfig::Episodes(Box::new(StoredEpisodes {
            store: run_reader(Path::new(path)).map_err(|e| e.of("data.path"))?,
            path: path.clone(),
            purpose: purpose.clone(),
            scores: scores.clone(),
            late: match crate::environments::recipe_of(Path::new(path)) {
                Ok(run) => late_config(&run),
                Err(RunDirError::NoRun { .. }) => None,
                Err(e) => return Err(e.into()),
            },
        })),
    };
    let context = recipe.rollout.max_context_tokens as usize;
    let data = Dataset::load(&config, renderer, context)?;
    for (what, count) in data.unused() {
        tracing::warn!("[data]: {what} ({count}) is not trained on");
    }
    Ok(Some(data))
}

/// Settings for running a recipe that come from the command line.
#[derive(Clone, Copy, Debug)]
pub struct Invocation<'a> {
    /// Goal: to train, or only to measure.
    pub goal: Goal,
    /// `train` or `eval`, for messages that say how to continue.
    pub command: &'static str,
    /// If true, lost stored episodes do not make the run end badly.
    pub accept_loss: bool,
    /// Adapter that a measurement samples with; `None`: the model alone.
    pub adapter: Option<AdapterFolder<'a>>,
}

/// Limits and sampling of training episodes. Measurements have the same limits.
pub(crate) fn episode_options(r: &RolloutPlan) -> EpisodeOptions {
    EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: r.max_turns,
            max_turn_tokens: r.max_turn_tokens,
            max_context_tokens: r.max_context_tokens,
        },
        sampling: SamplingParams {
            temperature: r.temperature,
            top_p: r.top_p,
            format: r.format.clone().map(Arc::new),
            ..SamplingParams::default()
        },
        chunk_tokens: r.chunk_tokens,
        replay_always: r.resume == ResumeEpisodes::Always,
        thinking: match r.thinking {
            ThinkingHistory::Kept => Thinking::Kept,
            ThinkingHistory::Dropped => Thinking::Dropped,
        },
        boot_timeout: r
            .boot_timeout_s
            .map_or(BOOT_TIMEOUT, Duration::from_secs_f64),
        timeout: Duration::from_secs_f64(r.episode_timeout_s),
        score_timeout: Duration::from_secs_f64(r.score_timeout_s),
    }
}

/// Number of episodes that have begun where no trainer waits for them: two for each that may be in flight, so
/// that one waits where another ends.
pub(crate) fn room(r: &RolloutPlan) -> usize {
    r.max_in_flight.saturating_mul(2)
}

/// As [`episode_options`], for episodes that are trained: engines report the experts of their tokens if the
/// trainer uses them.
pub(crate) fn trained_options(recipe: &RunPlan) -> EpisodeOptions {
    let mut options = episode_options(&recipe.rollout);
    options.sampling.routes_from = recipe.replays_routing().then_some(0);
    options
}

/// Growth of the turns of training episodes, if the recipe has one.
pub(crate) fn turns(recipe: &RunPlan, core: &CoreConfig) -> Option<TurnSchedule> {
    let r = &recipe.rollout;
    let draws_per_step = match core.overlap {
        // Each group has a separate draw.
        Some(_) => core.tasks_per_step as u64,
        None => core.draws_per_step(),
    };
    TurnStages::new(&r.turn_stages, r.turn_stage_steps).map(|stages| TurnSchedule {
        stages,
        draws_per_step,
    })
}

/// Sampling of training tasks: uniform, or by the shares of environments and types.
pub fn sampling(recipe: &RunPlan, taskset: &dyn Taskset) -> Result<TaskSampling, Failure> {
    let adaptive = recipe.tasks.adaptive();
    let members = taskset.members().into_iter();
    let environments: Vec<EnvironmentShare> = members
        .zip(recipe.worlds())
        .map(|((_, tasks), world)| EnvironmentShare {
            weight: world.env.weight,
            tasks,
            by_type: match (&world.tasks.weights, adaptive) {
                (Some(weights), _) => ByType::Weights(weights.clone()),
                (None, Some(a)) if a.signal == Signal::Pools => ByType::Pools,
                (None, Some(_)) => ByType::Adaptive,
                (None, None) => ByType::One,
            },
        })
        .collect();
    let alike = |e: &EnvironmentShare| e.by_type == ByType::One;
    let draws = matches!(recipe.data, None | Some(DataSection::Gold {}));
    if !draws || (!recipe.env.is_mixture() && environments.iter().all(alike)) {
        return Ok(TaskSampling::Uniform);
    }
    let tasks = TaskShares::of(taskset, &environments);
    Ok(TaskSampling::Shares {
        tasks: tasks.map_err(|e| Failure::input(format!("tasks: {e}")))?,
        adaptive,
    })
}

/// The draws of a run that does not learn from what it draws.
pub(crate) fn draws(recipe: &RunPlan, taskset: &dyn Taskset) -> Result<TaskDraws, Failure> {
    let tasks = sampling(recipe, taskset)?;
    Ok(TaskDraws::new(tasks, taskset.len(Split::Train)))
}

/// Options of the pure core of the loop: everything that its decisions depend on, but for events.
fn core(
    recipe: &RunPlan,
    goal: Goal,
    taskset: &dyn Taskset,
    algorithm: &Algorithm,
) -> Result<CoreConfig, Failure> {
    let (t, r, eval) = (&recipe.train, &recipe.rollout, &recipe.eval);
    Ok(CoreConfig {
        goal,
        seed: recipe.seed,
        steps: t.steps,
        max_wall_s: (t.max_wall_s > 0.0).then_some(t.max_wall_s),
        checkpoint_every: t.checkpoint_every,
        samples: if recipe.data.is_some() || recipe.harness.live().is_some() {
            SampleKind::Given
        } else {
            SampleKind::Run
        },
        tasks_per_step: r.tasks_per_step,
        over_sample: r.over_sample,
        group_size: r.group_size,
        stop_decided: r.stop_decided,
        retries: algorithm.repair().retries(),
        refill: algorithm.refill(),
        overlap: overlap(recipe),
        // There are as many rounds as can wait.
        late_rounds: late_config(recipe)
            .filter(|_| recipe.harness.live().is_none() && recipe.train.mode == TrainMode::Sync)
            .map(|l| l.max_waiting.div_ceil(r.tasks_per_step) as u32),
        tasks: sampling(recipe, taskset)?,
        train_tasks: taskset.len(Split::Train),
        held_out_tasks: taskset.len(Split::HeldOut),
        eval: EvalConfig {
            tasks: eval.tasks_of(taskset.len(Split::HeldOut)),
            episodes_per_task: eval.episodes_per_task,
            every: eval.every,
            temperature: eval.temperature,
            greedy: recipe.eval_greedy(),
        },
    })
}

/// The file for episodes in flight, where the recipe keeps them: the turns of programs are not replayed.
pub(crate) fn in_flight(recipe: &RunPlan, dir: &Path) -> Option<PathBuf> {
    let own = recipe.harness.is_built_in() && recipe.data.is_none();
    let kept = own && recipe.rollout.resume != ResumeEpisodes::Never;
    (kept && recipe.store.kind.is_durable()).then(|| dir.join(IN_FLIGHT))
}

/// The algorithm of a recipe.
pub(crate) fn algorithm(recipe: &RunPlan) -> Result<Algorithm, Failure> {
    let algorithm = recipe.algorithm();
    algorithm.map_err(|e| Failure::input(format!("algorithm: {e}")))
}

/// Treatment of stored episodes that other parts ran.
pub(crate) fn changed(key: Changed) -> ChangedParts {
    match key {
        Changed::RunAgain => ChangedParts::RunAgain,
        Changed::Rescore => ChangedParts::Rescore,
        Changed::Keep => ChangedParts::Keep,
    }
}

/// Overlap of generation and training, if there is any.
fn overlap(recipe: &RunPlan) -> Option<Overlap> {
    let in_order = match recipe.train.mode {
        TrainMode::Sync => return None,
        TrainMode::OneStepOff => true,
        TrainMode::Async => false,
    };
    Some(Overlap {
        max_staleness: recipe.max_staleness(),
        updates_per_step: recipe.train.minibatches as u64,
        in_order,
        late: late_config(recipe).map(|late| LateGroups {
            max_waiting: late.max_waiting,
            max_staleness: late.max_staleness,
        }),
    })
}

/// Rules for waiting for rewards from outside, if the recipe has such rewards.
pub fn late_config(recipe: &RunPlan) -> Option<LateConfig> {
    let section = recipe.reward.as_ref()?;
    let late = section.late()?;
    let term = |(name, weight): (&str, f64)| ScoreTerm {
        name: name.to_owned(),
        weight,
        source: None,
    };
    // An episode without its own score has nothing to add others to. Agents that give rewards may leave them
    // to others.
    let agents = !recipe.harness.is_graded();
    let own = !section.terms().is_empty() || !recipe.env.needs().reward || agents;
    Some(LateConfig {
        rule: ScoreRule {
            own: own.then_some(1.0),
            terms: late.terms().into_iter().map(term).collect(),
        },
        own_if_given: agents,
        wait_s: late.wait_s,
        max_staleness: late.max_staleness,
        after: match late.after {
            LateAfter::Drop => StaleGroups::Drop,
            LateAfter::Offline => StaleGroups::Offline,
        },
        partial: late.partial,
        max_waiting: late.max_waiting,
    })
}

/// Options of the whole loop: those of the core, and where the run is kept.
pub(crate) fn pipeline(
    recipe: &RunPlan,
    how: Invocation<'_>,
    dir: &RunDir,
    taskset: &dyn Taskset,
    algorithm: &Algorithm,
) -> Result<PipelineConfig, Failure> {
    Ok(PipelineConfig {
        core: Arc::new(core(recipe, how.goal, taskset, algorithm)?),
        max_context_tokens: recipe.rollout.max_context_tokens as usize,
        run_dir: dir.path().into(),
        command: how.command,
        recipe: toml::to_string(&dir.portable(recipe)).map_err(Failure::system)?,
        trust: Arc::new(recipe.trust()),
        accept_loss: how.accept_loss,
    })
}

/// Facts of a recipe for the head of a report.
pub fn facts(recipe: &RunPlan) -> Result<RunFacts, Failure> {
    Ok(RunFacts {
        name: recipe.name.clone(),
        seed: recipe.seed,
        model: recipe.model_source(),
        algorithm: recipe.algorithm.kind.name().to_owned(),
        steps: recipe.train.steps,
        recipe: toml::to_string(recipe).map_err(Failure::system)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_model::{Family, RopeScaling};

    fn train(steps: u64, minibatches: usize, schedule: LrSchedule) -> TrainPlan {
        let text = "name = \"t\"\nmodel = { type = \"pretrained\", source = \"x\" }\nenv = { type = \"tool_math\" }\n\
                    algorithm = { type = \"grpo\" }\n";
        let plan = RunPlan::parse(Path::new("r.toml"), text, crate::ENVIRONMENTS).unwrap();
        TrainPlan {
            steps,
            minibatches,
            schedule,
            learning_rate: 1e-3,
            ..plan.train
        }
    }

    #[test]
    fn a_longer_run_is_told_what_becomes_of_its_learning_rate() {
        let old = train(6, 2, LrSchedule::Cosine);
        let text = rescheduled(&old, &train(12, 2, LrSchedule::Cosine), 5).unwrap();
        for part in [
            "cosine",
            "over 12 steps now, 6 before",
            "step 6 has 6.294e-4, where step 5 had 1.464e-4 and 6.699e-5 was to come",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(rescheduled(&old, &old, 5), None);
        let constant = train(6, 2, LrSchedule::Constant);
        let longer = train(12, 2, LrSchedule::Constant);
        assert_eq!(rescheduled(&constant, &longer, 5), None);
        assert_eq!(
            rescheduled(&old, &train(12, 2, LrSchedule::Cosine), 0),
            None
        );
    }
    /// A decoder whose output matrix is its embedding, or not.
    fn model(tied_embeddings: bool) -> ModelConfig {
        ModelConfig {
            family: Family::Llama,
            vocab: 61,
            d_model: 32,
            layers: 1,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            d_ff: 64,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            rms_eps: 1e-5,
            tied_embeddings,
            qkv_bias: false,
            qk_norm: false,
            max_context: 128,
            bos_id: None,
            eos_ids: vec![1],
        }
    }

    #[test]
    fn an_adapted_output_matrix_needs_a_place_in_servers() {
        let plan = |engine: &str, targets: &str| {
            let text = format!(
                "name = \"t\"\nmodel = {{ type = \"pretrained\", source = \"x\" }}\nenv = {{ type = \"tool_math\" }}\n\
                 algorithm = {{ type = \"grpo\", correction = {{ type = \"truncate\", low = 0.0, high = 2.0 }} }}\n\
                 [train.lora]\nrank = 4\ntargets = {targets}\n\
                 [engine]\n{engine}\n"
            );
            RunPlan::parse(Path::new("r.toml"), &text, crate::ENVIRONMENTS).unwrap()
        };
        let vllm = "type = \"vllm\"\nurl = \"http://a\"\nweights_dir = \"w\"";
        let head = "[\"lm_head\"]";
        let error = check_lora(&plan(vllm, head), &model(true)).unwrap_err();
        let text = error.text().to_owned();
        assert!(
            text.contains("`lm_head`") && text.contains("engine.untied = true"),
            "{text}"
        );
        let untied = format!("{vllm}\nuntied = true");
        for (recipe, tied) in [
            (plan(vllm, head), false),
            (plan(&untied, head), true),
            (plan(vllm, "[]"), true),
            (plan("", head), true),
        ] {
            check_lora(&recipe, &model(tied)).unwrap();
        }
        assert_eq!(
            lora_config(plan("", "[]").train.lora.as_ref().unwrap())
                .unwrap()
                .targets,
            Projection::LAYERS
        );
        let error = check_lora(&plan("", "[\"q_prj\"]"), &model(true)).unwrap_err();
        assert!(
            error.text().contains("down_proj, lm_head"),
            "{}",
            error.text()
        );
    }
}
