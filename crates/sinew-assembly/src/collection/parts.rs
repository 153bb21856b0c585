//! A collection: the parts of the training loop without its trainer.

use super::{CollectConfig, Collection, GoldRollouts};
use crate::env::{self, World};
use crate::failure::Failure;
use crate::model::{check_context, keep_renderer, loaded_params, model_config, renderer};
use crate::queue::FeedPlan;
use crate::run_pins::RunPins;
use crate::servers::{sampling_engine, serve_engine};
use crate::start_shape::StartShape;
use crate::{
    Session, check_training_tasks, described, device, engine, episode_parts, groups, plan,
    run_info, source, store, tinker, untrained_parts,
};
use sinew_orchestrator::Goal;
use sinew_pipeline::{EngineRollouts, RolloutParts, Rollouts};
use sinew_recipe::{DataSection, EngineType, RunPlan, StoreKind};
use sinew_render::Renderer;
use sinew_tensor::Cpu;
use sinew_types::{Engine, PolicyVersion};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Settings of a collection from the command line.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// Number of episodes, those of earlier sessions included.
    pub episodes: u64,
    /// Addresses of servers in place of the engine of the recipe.
    pub engine: Option<String>,
    /// Queue for ended episodes, in addition to the store.
    pub queue: Option<FeedPlan>,
}

/// Refuses recipes that run no episodes themselves, or keep none.
///
/// # Errors
/// Fails for a live harness, for data that exists already, and for a store in memory.
pub fn check_collect(recipe: &RunPlan, how: &CollectOptions) -> Result<(), Failure> {
    if recipe.harness.live().is_some() {
        return Err(Failure::input(
            "harness.type = \"live\": agents bring their own tasks, so there are none to run\n  hint: \
             harness.type = \"service\" asks a service for each task of the recipe",
        ));
    }
    let name = match &recipe.data {
        None => None,
        Some(DataSection::Gold {}) if how.engine.is_some() => {
            return Err(Failure::input(
                "--engine: data.type = \"gold\" plays the environment's solutions, which no engine samples\n  hint: \
                 leave out one of them",
            ));
        }
        Some(DataSection::Gold {}) => None,
        Some(DataSection::Demonstrations { .. }) => Some("demonstrations"),
        Some(DataSection::Pairs { .. }) => Some("pairs"),
        Some(DataSection::Episodes { .. }) => Some("episodes"),
        Some(DataSection::Pool { .. }) => Some("pool"),
        // It is filled by this: the caller takes it out of the recipe, and names it as where episodes go.
        Some(DataSection::Queue { .. }) => Some("queue"),
    };
    if let Some(name) = name {
        return Err(Failure::input(format!(
            "data.type = \"{name}\": this data is there already, and nothing is run\n  hint: remove [data] to run \
             episodes, or set data.type = \"gold\" for the solutions of the environment"
        )));
    }
    if how.engine.is_none() {
        crate::check_trained(recipe)?;
    }
    if recipe.store.kind == StoreKind::Memory {
        return Err(Failure::input(
            "store.type = \"memory\": episodes would be gone with the process\n  hint: remove the key",
        ));
    }
    Ok(())
}

/// A collection of a recipe with all its parts. No trainer is made, and weights are loaded only for an engine
/// of this process: servers sample with those that they have.
///
/// # Errors
/// Fails if the recipe is refused, or if a part cannot be reached.
pub fn collection(
    recipe: &RunPlan,
    how: &CollectOptions,
    session: Session<'_>,
) -> Result<Collection, Failure> {
    let device = device()?;
    let mut pins = RunPins::weights(recipe, &session)?;
    let renderer = renderer(&recipe.model, &recipe.env)?;
    keep_renderer(session.dir.path(), renderer.as_ref())?;
    let apart = how.queue.as_ref().is_some_and(|q| q.apart);
    let in_run = env::in_run(recipe, session.dir.path());
    let world = if apart {
        env::world_unscored(&in_run, &session.tasks)?
    } else {
        env::world_with(&in_run, &session.tasks, &session.bench)?
    };
    pins.inputs(recipe, world.envs.as_ref(), &session, [])?;
    let store = store::open_store(&recipe.store, session.dir)?.traces;
    let shape = shape(&pins.plan)?;
    check_context(recipe.rollout.max_context_tokens, shape.context)?;
    check_training_tasks(recipe, Goal::Train, world.taskset.as_ref())?;
    let draws = plan::draws(recipe, world.taskset.as_ref())?;
    let (pinned, rewards) = (pins.plan.clone(), pins.rewards(recipe));
    pins.keep(&session, 0)?;
    let groups = groups(&session, &world.envs, &world.taskset, &renderer, &store);
    let made = RecipeParts {
        recipe,
        session: &session,
        device: &device,
        renderer,
        world,
        rewards,
    };
    let (rollouts, group_size, retries): (Box<dyn Rollouts>, _, _) = match recipe.data {
        Some(_) => {
            let runs = made.gold().runs(recipe);
            let (runtime, cancel) = (session.runtime.clone(), session.cancel.clone());
            let played = GoldRollouts::new(runs, Arc::clone(&store), recipe.seed, runtime, cancel);
            (Box::new(played), 1, 0)
        }
        None => {
            let algorithm = plan::algorithm(recipe)?;
            let engine = made.engine(&pinned, how)?;
            let parts = made.rollout_parts(&engine, how)?;
            let (store, cancel) = (Arc::clone(&store), session.cancel.clone());
            let sampled = EngineRollouts::new(session.runtime.clone(), parts, store, cancel);
            let size = recipe.rollout.group_size;
            (Box::new(sampled), size, algorithm.repair().retries())
        }
    };
    described(&session, &shape, &device)?;
    Ok(Collection {
        config: CollectConfig {
            seed: recipe.seed,
            episodes: how.episodes,
            group_size,
            retries,
            room: plan::room(&recipe.rollout),
        },
        draws,
        rollouts,
        groups: Box::new(groups),
        store,
        feed: how.queue.as_ref().map(FeedPlan::feed).transpose()?,
        cancel: session.cancel,
        bus: session.bus,
        started: session.started,
    })
}

/// The shape of a plan's model, which a Tinker service may have.
fn shape(plan: &RunPlan) -> Result<StartShape, Failure> {
    match plan.tinker() {
        Some(_) => tinker::shape(plan),
        None => Ok(StartShape::of(model_config(plan)?)),
    }
}

/// Builds the engine that samples with the weights of a plan's model, which `version` names: the servers of
/// the plan, or an engine of this process.
///
/// # Errors
/// If the weights cannot be read, do not fit, or a server does not answer.
pub(crate) fn sampler(
    plan: &RunPlan,
    renderer: &Arc<dyn Renderer>,
    device: &Cpu,
    version: PolicyVersion,
) -> Result<Arc<dyn Engine>, Failure> {
    let (section, rollout) = (&plan.engine, &plan.rollout);
    if section.kind == EngineType::Tinker {
        return tinker::sampling_engine(plan, version);
    }
    if section.kind != EngineType::Embedded {
        return sampling_engine(section, renderer);
    }
    let params = loaded_params(plan, renderer.as_ref())?;
    let format = rollout.format.as_ref();
    let grammars = engine::grammars(format, renderer, params.config().vocab)?;
    let renderer = renderer.as_ref();
    let model = engine::EngineModel {
        config: params.config(),
        version,
        weights: &params,
    };
    let embedded = engine::embedded(section, rollout, device, &model, renderer, &grammars)?;
    Ok(Arc::new(embedded))
}

/// Parts of a recipe that are made before its engine.
struct RecipeParts<'a> {
    recipe: &'a RunPlan,
    session: &'a Session<'a>,
    device: &'a Cpu,
    renderer: Arc<dyn Renderer>,
    world: World,
    /// Versions of the rewards.
    rewards: BTreeMap<String, String>,
}

impl RecipeParts<'_> {
    fn gold(&self) -> source::Gold<'_> {
        let World { taskset, envs, .. } = &self.world;
        source::Gold {
            taskset,
            envs,
            renderer: &self.renderer,
            run: run_info(
                self.recipe,
                self.session.dir.path(),
                envs.as_ref(),
                self.renderer.as_ref(),
                self.device,
                self.rewards.clone(),
            ),
        }
    }

    /// Returns the engine: the servers of the command line, or the result of [`sampler`] for `pinned`.
    fn engine(&self, pinned: &RunPlan, how: &CollectOptions) -> Result<Arc<dyn Engine>, Failure> {
        if let Some(urls) = &how.engine {
            let context = self.recipe.rollout.max_context_tokens as usize;
            return serve_engine(urls, None, None, &self.renderer, context);
        }
        sampler(
            pinned,
            &self.renderer,
            self.device,
            PolicyVersion::default(),
        )
    }

    fn rollout_parts(
        &self,
        engine: &Arc<dyn Engine>,
        how: &CollectOptions,
    ) -> Result<RolloutParts, Failure> {
        let mut run = self.gold().run;
        if how.engine.is_some() {
            run.provenance.kernels = None;
        }
        let (recipe, world, renderer) = (self.recipe, &self.world, &self.renderer);
        let (envs, wait) = (Arc::clone(&world.envs), Arc::clone(&world.sandbox_wait));
        let episode = episode_parts(recipe, self.session, run, engine, renderer, envs, wait)?;
        Ok(untrained_parts(&recipe.rollout, episode, &world.taskset))
    }
}
