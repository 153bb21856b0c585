//! The samplers of a run: an engine and environments of this process, or workers of others.

use crate::adapter::MeasuredAdapter;
use crate::engine;
use crate::env::World;
use crate::failure::Failure;
use crate::first_weights::FirstWeights;
use crate::learner::BegunLearner;
use crate::model::model_folder;
use crate::owner::{Owner, Tickets};
use crate::start_shape::StartShape;
use crate::{Session, episode_parts, groups, live, plan, publish, rollout_parts, rollouts};
use sinew_engines::{FolderDtype, WeightsFolder};
use sinew_grammar::Grammars;
use sinew_pipeline::{
    GroupRewards, LateRewards, Rollouts, RunStore, SampleSource, StoredEpisodes, StoredParts,
    TurnSchedule, WeightsTransport,
};
use sinew_recipe::{EngineType, RunPlan, Transfer};
use sinew_render::Renderer;
use sinew_rollout::RunInfo;
use sinew_tensor::Cpu;
use sinew_types::WeightsId;
use sinew_workers::{AnnouncedWeights, RemoteParts, RemoteRollouts, ServedWeights};
use std::sync::Arc;

/// Maximum number of tickets that workers have or may take. Others wait in the loop.
const MAX_TICKETS: usize = 4096;

/// Parts that are made before what samples.
pub(crate) struct Sampling<'a> {
    pub(crate) recipe: &'a RunPlan,
    pub(crate) session: &'a Session<'a>,
    /// Device of an engine in this process.
    pub(crate) device: &'a Cpu,
    pub(crate) renderer: &'a Arc<dyn Renderer>,
    pub(crate) grammars: &'a Arc<dyn Grammars>,
    pub(crate) shape: &'a StartShape,
    pub(crate) store: &'a RunStore,
    pub(crate) world: World,
    pub(crate) run: RunInfo,
    pub(crate) adapter: Option<MeasuredAdapter>,
    pub(crate) turns: Option<TurnSchedule>,
}

/// The sampler of a run, and its way to new weights.
pub(crate) struct Sampled {
    pub(crate) rollouts: Box<dyn Rollouts>,
    pub(crate) groups: GroupRewards,
    pub(crate) transport: Box<dyn WeightsTransport>,
    /// Episodes that agents open themselves.
    pub(crate) live: Option<Box<dyn SampleSource>>,
}

impl Sampling<'_> {
    /// Episodes run on the workers of `owner` if it has tickets for them, else in this process.
    ///
    /// # Errors
    /// If a part cannot be made or reached, or cannot be used with workers.
    pub(crate) fn begin(
        self,
        begun: &mut BegunLearner,
        owner: Option<Owner>,
        late: &mut Option<LateRewards>,
    ) -> Result<Sampled, Failure> {
        let first = begun.first.version;
        let tickets = owner.as_ref().and_then(|owner| owner.tickets.clone());
        let mut sampled = match (&owner, tickets) {
            (Some(owner), Some(tickets)) => self.on_workers(begun, owner, tickets)?,
            _ => self.here(begun, late)?,
        };
        if let Some(owner) = owner {
            sampled.transport = owner.naming(sampled.transport, first);
        }
        Ok(sampled)
    }

    /// The engine of the recipe, and that of an older policy, with the first weights.
    fn engines(&self, first: &FirstWeights) -> Result<engine::Engines, Failure> {
        engine::engines(
            self.recipe,
            self.device,
            self.renderer,
            self.grammars,
            self.shape,
            first,
        )
    }

    /// Runs episodes in this process.
    fn here(
        self,
        begun: &mut BegunLearner,
        late: &mut Option<LateRewards>,
    ) -> Result<Sampled, Failure> {
        let (recipe, session) = (self.recipe, self.session);
        let first = begun.first.clone();
        let (engine, cross) = self.engines(&first)?;
        let (mut run, world) = (self.run, self.world);
        if let Some(adapter) = self.adapter {
            adapter.load(engine.as_ref())?;
            run.provenance.adapter = Some(adapter.name);
        }
        let (envs, wait) = (world.envs, world.sandbox_wait);
        let episode = episode_parts(recipe, session, run, &engine, self.renderer, envs, wait)?;
        let transport = publish::transport(recipe, engine, first, begun.turns.take(), session)?;
        let options = plan::trained_options(recipe);
        let live = live::source(recipe, session, &episode, &options, self.store, late)?;
        let (dir, taskset, turns) = (session.dir, world.taskset, self.turns);
        let parts = rollout_parts(recipe, dir, episode, options, taskset, cross, turns);
        let (rollouts, groups) = rollouts(session, parts, self.renderer, &self.store.traces);
        Ok(Sampled {
            rollouts: Box::new(rollouts),
            groups,
            transport,
            live,
        })
    }

    /// Lets workers run episodes. An embedded engine is theirs: this process has none.
    fn on_workers(
        self,
        begun: &mut BegunLearner,
        owner: &Owner,
        tickets: Tickets,
    ) -> Result<Sampled, Failure> {
        if self.adapter.is_some() {
            return Err(Failure::input(
                "--adapter: the engines of workers have no adapters\n  hint: leave --control out to measure it here",
            ));
        }
        let (recipe, session) = (self.recipe, self.session);
        let transport = match recipe.engine.kind {
            EngineType::Embedded => self.served(begun, &tickets)?,
            _ => self.announced(begun, &tickets)?,
        };
        let live = live::source_of_workers(recipe, session, self.store, &tickets.desk)?;
        let options = plan::trained_options(recipe);
        let run = Arc::new(self.run);
        let traces = &self.store.traces;
        let (envs, taskset) = (self.world.envs, self.world.taskset);
        let groups = groups(session, &envs, &taskset, self.renderer, traces);
        let stored = StoredEpisodes::new(StoredParts {
            store: Arc::clone(traces),
            envs,
            renderer: Arc::clone(self.renderer),
            run: Arc::clone(&run),
            score_timeout: options.score_timeout,
            changed: plan::changed(recipe.rollout.changed),
        });
        let parts = RemoteParts {
            queue: tickets.queue,
            clock: tickets.clock,
            desk: tickets.desk,
            stored,
            taskset,
            options,
            turns: self.turns,
            run,
            max_out: MAX_TICKETS,
            waiting: owner.waiting(),
        };
        let (runtime, cancel) = (session.runtime.clone(), session.cancel.clone());
        Ok(Sampled {
            rollouts: Box::new(RemoteRollouts::new(parts, runtime, cancel)?),
            groups,
            transport,
            live,
        })
    }

    /// Weights for the embedded engines of workers, which the desk serves. The first ones are published now.
    fn served(
        &self,
        begun: &BegunLearner,
        tickets: &Tickets,
    ) -> Result<Box<dyn WeightsTransport>, Failure> {
        let (recipe, first) = (self.recipe, &begun.first);
        let base = model_folder(&recipe.model)?;
        let root = tickets.weights.clone();
        let folder = WeightsFolder::new(&root, base, FolderDtype::F32);
        let folder = folder.fenced(first.fence.clone());
        let deltas = recipe.engine.weights_transfer != Some(Transfer::Full);
        let desk = Arc::clone(&tickets.desk);
        let mut served = ServedWeights::new(folder, root, first.lineage, deltas, desk);
        served.publish(first.version, Arc::clone(&first.tensors))?;
        Ok(Box::new(served))
    }

    /// Servers get their weights from this process; workers sample from them.
    fn announced(
        &self,
        begun: &mut BegunLearner,
        tickets: &Tickets,
    ) -> Result<Box<dyn WeightsTransport>, Failure> {
        let first = begun.first.clone();
        let id = WeightsId::new(first.version, first.lineage);
        let (engine, _) = self.engines(&first)?;
        let turns = begun.turns.take();
        let engines = publish::transport(self.recipe, engine, first, turns, self.session)?;
        let desk = Arc::clone(&tickets.desk);
        let address = begun.first.tensors.address();
        Ok(Box::new(AnnouncedWeights::new(engines, id, address, desk)))
    }
}
