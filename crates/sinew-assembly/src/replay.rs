//! Stored episodes and updates of a run, done again with the parts that its recipe makes now.

use crate::collection::sampler;
use crate::env::{self, Tasks, World};
use crate::failure::Failure;
use crate::levels::egress;
use crate::model::renderer_of;
use crate::run_model::RunModel;
use crate::{device, plan, run_info};
use sinew_env::{EnvFactory, UserMessageEnvs};
use sinew_judge::Bench;
use sinew_recipe::{ModelSection, RUN, RunPlan};
use sinew_render::Renderer;
use sinew_rollout::{
    AdmissionConfig, EpisodeOptions, EpisodeParts, ForkedEpisode, Playback, ReplayChange,
    ReplayedEpisode, fork, replay, spec_of, tasks_of,
};
use sinew_tensor::Cpu;
use sinew_types::{Engine, EpisodeId, PolicyVersion, Task, TaskId, Trace, mix_seed};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Purpose of episodes that were forked: no run trains them.
const FORK: &str = "fork";

/// The parts of a run that its episodes are run again with.
pub struct Replayer {
    recipe: RunPlan,
    folder: PathBuf,
    /// Logs of what the network was asked.
    scratch: TempDir,
    world: World,
    renderer: Arc<dyn Renderer>,
    device: Cpu,
    options: EpisodeOptions,
}

sinew_types::debug_fields!(Replayer, folder);

impl Replayer {
    /// The parts of the run in `folder`; `recipe` is its own, or another one to compare it with. Its
    /// sandboxes get from the network what was recorded, and nothing else.
    ///
    /// # Errors
    /// If a program from outside drove the turns, or a part cannot be made.
    pub fn open(folder: &Path, recipe: RunPlan) -> Result<Self, Failure> {
        if !recipe.harness.is_built_in() {
            return Err(Failure::input(format!(
                "harness.type = \"{}\": the program that drove the turns is not recorded, so its episodes cannot be run \
                 again\n  hint: `sinew show` prints what it said",
                recipe.harness.name()
            )));
        }
        let tasks: Tasks = env::tasks(&recipe)?;
        let scratch = TempDir::new().map_err(Failure::system)?;
        let offline = RunPlan {
            sandbox: egress::replayed(&recipe.sandbox, folder, scratch.path()),
            ..recipe.clone()
        };
        Ok(Self {
            world: env::world_with(&offline, &tasks, &Bench::default())?,
            scratch,
            renderer: renderer_of(folder, &recipe)?,
            device: device()?,
            options: plan::episode_options(&recipe.rollout),
            folder: folder.to_owned(),
            recipe,
        })
    }

    /// The renderer of the run's model.
    pub fn renderer(&self) -> &dyn Renderer {
        self.renderer.as_ref()
    }

    /// The task of an episode.
    fn task(&self, id: &TaskId) -> Result<Task, Failure> {
        let wanted = BTreeSet::from([id.clone()]);
        let found = tasks_of(self.world.taskset.as_ref(), &wanted).map_err(Failure::input)?;
        found.into_values().next().ok_or_else(|| {
            Failure::input(format!(
                "task {id} is not in the recipe's tasks any more\n  hint: have rows changed since? `sinew tasks` prints \
                 those of now"
            ))
        })
    }

    /// Parts with the environments of the run, or `envs` around them.
    fn parts(&self, engine: Arc<dyn Engine>, envs: Arc<dyn EnvFactory>) -> EpisodeParts {
        let (renderer, unknown) = (self.renderer.as_ref(), BTreeMap::new());
        let run = run_info(
            &self.recipe,
            &self.folder,
            envs.as_ref(),
            renderer,
            &self.device,
            unknown,
        );
        let rollout = &self.recipe.rollout;
        let bounds = AdmissionConfig::new(1, rollout.max_turn_tokens as usize);
        let mut parts = EpisodeParts::new(engine, Arc::clone(&self.renderer), envs, bounds);
        parts.run = Arc::new(run);
        parts
    }

    /// Runs an episode again, with the actions that it has.
    ///
    /// # Errors
    /// If its task is gone, or it has several paths.
    pub async fn replay(&self, trace: &Trace) -> Result<ReplayedEpisode, Failure> {
        let task = self.task(&trace.task)?;
        let playback = Arc::new(Playback::new(trace).map_err(Failure::input)?);
        let parts = self.parts(playback, Arc::clone(&self.world.envs));
        let again = replay(&parts, &self.options, trace, task).await;
        let mut again = again.map_err(Failure::input)?;
        let missed = egress::not_recorded(self.scratch.path())?;
        again.changes.splice(0..0, missed.into_iter().map(missing));
        Ok(again)
    }

    /// The newest weights of the run as an engine.
    ///
    /// # Errors
    /// If it has none yet, or they do not load.
    pub fn engine(&self) -> Result<Arc<dyn Engine>, Failure> {
        let run = RunModel::open(&self.folder)?;
        let checkpoint = run.checkpoint()?;
        let mut plan = self.recipe.clone();
        plan.model = ModelSection::pretrained(format!("{RUN}{}", self.folder.display()));
        let updates = step_of(&checkpoint).saturating_mul(plan.train.minibatches as u64);
        sampler(&plan, &self.renderer, &self.device, PolicyVersion(updates))
    }

    /// Runs an episode again up to turn `turn`, counted from 1, adds the message `say` there, and lets
    /// `engine` continue. Forks of other numbers are sampled with other seeds.
    ///
    /// # Errors
    /// If its task is gone, or it has no such turn.
    pub async fn fork(
        &self,
        trace: &Trace,
        turn: u32,
        number: u64,
        say: Option<&str>,
        engine: Arc<dyn Engine>,
    ) -> Result<ForkedEpisode, Failure> {
        let task = self.task(&trace.task)?;
        let mut envs = Arc::clone(&self.world.envs);
        if let Some(text) = say {
            envs = Arc::new(UserMessageEnvs::new(envs, turn, text));
        }
        let parts = self.parts(Arc::clone(&engine), envs);
        let id = format!("{}-fork-{turn}-{number}", trace.episode);
        let mut spec = spec_of(trace, task, EpisodeId::new(id), FORK);
        spec.seed = mix_seed(spec.seed, number);
        let forked = fork(&parts, &self.options, trace, turn, &spec, engine);
        // The recordings belong to the episode that is forked.
        let forked = sinew_sandbox::owned(trace.episode.as_str(), forked).await;
        forked.map_err(Failure::input)
    }
}

/// A request to the network of which no answer was recorded. It comes before the other changes, which may
/// follow from it.
fn missing((request, why): (String, String)) -> ReplayChange {
    ReplayChange {
        turn: None,
        field: format!("network request {request}"),
        was: "not made".to_owned(),
        is: why,
    }
}

/// The step in the name of a checkpoint's folder, `step-00000040`; 0 for other names.
fn step_of(checkpoint: &Path) -> u64 {
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
    let step = name.strip_prefix("step-").unwrap_or_default();
    let digits = step.split('.').next().unwrap_or_default();
    digits.parse().unwrap_or_default()
}
