//! A measurement of held-out tasks: greedy and sampled episodes with one set of weights, without a trainer.
//!
//! Weights are loaded only for an engine of this process: servers sample with those that they have. Episodes
//! that the store has are not run again, so that a measurement that was stopped continues.

use crate::chat_server::{ChatServers, chat_engine, in_bytes};
use crate::collection::sampler;
use crate::env;
use crate::failure::Failure;
use crate::model::{check_context, keep_renderer, model_config, renderer, resolve_env, unresolved};
use crate::run_model::run_model;
use crate::run_pins::RunPins;
use crate::servers::serve_engine;
use crate::{Session, device, episode_parts, plan, run_info, store, untrained_parts};
use sinew_env::Split;
use sinew_model::{Dataset, resolve_dataset};
use sinew_orchestrator::{
    Bus, Draw, EpisodeResult, EpisodeSlots, Phase, PipelineError, RolloutProgress, RunEvent,
    eval_episodes,
};
use sinew_pipeline::{EngineRollouts, Rollouts, StoredEpisode};
use sinew_recipe::{ModelSection, RUN, RunPlan};
use sinew_types::{EpisodeId, PolicyVersion, Trace};
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of runs of which each began with the next.
const MAX_RUNS: usize = 100;

/// Servers of a measured model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeasuredServers {
    /// Addresses of servers that take prompts, as of `sinew serve --engine`.
    Prompts(String),
    /// Servers that take messages only.
    Chat(ChatServers),
}

/// Settings of a measurement from the command line.
#[derive(Clone, Debug)]
pub struct MeasureOptions {
    /// Servers in place of the engine of the recipe.
    pub servers: Option<MeasuredServers>,
    /// Number of held-out tasks, spread evenly over their split: see [`spread`].
    pub tasks: usize,
    /// Sampled episodes of each task for each seed.
    pub samples: usize,
    /// Seeds of sampled episodes.
    pub seeds: Vec<u64>,
    /// Temperature of sampled episodes.
    pub temperature: f32,
    /// One greedy episode of each task.
    pub greedy: bool,
}

/// A set of episodes: their seed (`None`: greedy) and their temperature.
#[derive(Clone, Copy, Debug)]
struct Set {
    seed: Option<u64>,
    temperature: f32,
}

/// A measurement with its parts.
pub struct Measurement {
    /// Episodes in the order in which they begin.
    waiting: VecDeque<(Draw, Set)>,
    /// Further attempts of an episode that the system failed.
    retries: u32,
    /// Maximum number of episodes that have begun.
    room: usize,
    rollouts: Box<dyn Rollouts>,
    bus: Bus,
    started: Instant,
    /// Name for views.
    name: String,
}

sinew_types::debug_fields!(Measurement as this, waiting = this.waiting.len());

/// Makes the measurement of a recipe with all its parts.
///
/// # Errors
/// If the recipe is refused, the weights cannot be read, or a server does not answer.
pub fn measurement(
    recipe: &RunPlan,
    how: &MeasureOptions,
    session: Session<'_>,
) -> Result<Measurement, Failure> {
    let device = device()?;
    let mut pins = RunPins::weights(recipe, &session)?;
    let renderer = renderer(&recipe.model, &recipe.env)?;
    let path = session.dir.path();
    keep_renderer(path, renderer.as_ref())?;
    let in_run = env::in_run(recipe, path);
    let world = env::world_with(&in_run, &session.tasks, &session.bench)?;
    pins.inputs(recipe, world.envs.as_ref(), &session, [])?;
    let traces = store::open_store(&recipe.store, session.dir)?.traces;
    let (pinned, rewards) = (pins.plan.clone(), pins.rewards(recipe));
    pins.keep(&session, 0)?;
    let context = recipe.rollout.max_context_tokens;
    let mut rollout = recipe.rollout.clone();
    let engine = match &how.servers {
        Some(MeasuredServers::Prompts(urls)) => {
            serve_engine(urls, None, None, &renderer, context as usize)?
        }
        Some(MeasuredServers::Chat(servers)) => {
            rollout = in_bytes(&rollout);
            chat_engine(servers, &renderer, recipe.rollout.max_turn_tokens, path)?
        }
        None => {
            check_context(context, model_config(&pinned)?.max_context)?;
            sampler(&pinned, &renderer, &device, PolicyVersion::default())?
        }
    };
    let mut run = run_info(
        recipe,
        path,
        world.envs.as_ref(),
        renderer.as_ref(),
        &device,
        rewards,
    );
    if how.servers.is_some() {
        run.provenance.kernels = None;
    }
    let (envs, wait) = (Arc::clone(&world.envs), Arc::clone(&world.sandbox_wait));
    let episode = episode_parts(recipe, &session, run, &engine, &renderer, envs, wait)?;
    let parts = untrained_parts(&rollout, episode, &world.taskset);
    let (runtime, cancel) = (session.runtime.clone(), session.cancel.clone());
    let held_out = world.taskset.len(Split::HeldOut);
    Ok(Measurement {
        waiting: episodes(recipe.seed, how, held_out),
        retries: plan::algorithm(recipe)?.repair().retries(),
        room: plan::room(&recipe.rollout),
        rollouts: Box::new(EngineRollouts::new(runtime, parts, traces, cancel)),
        bus: session.bus,
        started: session.started,
        name: recipe.name.clone(),
    })
}

/// Indices of `tasks` tasks, or of all if there are fewer, evenly spread over `all`: rows are often sorted by
/// their type.
pub fn spread(tasks: usize, all: usize) -> Vec<usize> {
    let tasks = tasks.min(all);
    (0..tasks).map(|i| i * all / tasks).collect()
}

/// All episodes: the greedy one of each task, then those of each seed.
fn episodes(seed: u64, how: &MeasureOptions, held_out: usize) -> VecDeque<(Draw, Set)> {
    let tasks = spread(how.tasks, held_out);
    let mut all = VecDeque::new();
    let mut add = |draws: Vec<Draw>, set: Set| {
        for mut draw in draws {
            draw.task = tasks[draw.task];
            all.push_back((draw, set));
        }
    };
    if how.greedy {
        let greedy = Set {
            seed: None,
            temperature: 0.0,
        };
        let draws = eval_episodes(seed, ("greedy", "greedy"), tasks.len(), 1);
        add(draws, greedy);
    }
    for seed in how.seeds.iter().filter(|_| how.samples > 0) {
        let sampled = Set {
            seed: Some(*seed),
            temperature: how.temperature,
        };
        let ids = format!("eval-s{seed}");
        let draws = eval_episodes(*seed, (&ids, "eval"), tasks.len(), how.samples);
        add(draws, sampled);
    }
    all
}

/// Runs the episodes. `take` gets each that has ended for good, with its seed (`None`: greedy).
///
/// # Errors
/// If episodes cannot be run or stored, or the measurement is to stop.
pub fn measure(
    measurement: Measurement,
    take: &mut dyn FnMut(Option<u64>, &Trace),
) -> Result<(), PipelineError> {
    let mut m = measurement;
    let phase = Phase::Evaluating(m.name.clone());
    m.bus.emit(RunEvent::Phase(phase))?;
    let total = m.waiting.len();
    let mut running = HashMap::<EpisodeId, (Set, EpisodeSlots)>::new();
    let mut done = 0;
    loop {
        while running.len() < m.room
            && let Some((draw, set)) = m.waiting.pop_front()
        {
            let mut attempts = EpisodeSlots::new(m.retries);
            attempts.add(std::slice::from_ref(&draw));
            m.rollouts
                .start(std::slice::from_ref(&draw), Some(set.temperature))?;
            running.insert(draw.episode, (set, attempts));
        }
        if running.is_empty() {
            break;
        }
        for StoredEpisode { trace, known, .. } in m.ended(done, total)? {
            let Some((set, mut attempts)) = running.remove(&trace.episode) else {
                continue;
            };
            let Some(again) = attempts.ended(EpisodeResult::of(&trace, known)).again else {
                done += 1;
                take(set.seed, &trace);
                continue;
            };
            m.rollouts
                .start(std::slice::from_ref(&again), Some(set.temperature))?;
            running.insert(again.episode, (set, attempts));
        }
    }
    m.bus.emit(RunEvent::Phase(Phase::Done))
}

impl Measurement {
    /// Waits for episodes that end, and reports progress meanwhile.
    fn ended(&mut self, done: usize, total: usize) -> Result<Vec<StoredEpisode>, PipelineError> {
        if !self.rollouts.is_running() {
            return Err(PipelineError::system(
                "the measurement waits for an episode, but none runs",
            ));
        }
        let (bus, started, mut failed) = (self.bus.clone(), self.started, Ok(()));
        let ended = self.rollouts.ended(&mut |seen| {
            let seen = RolloutProgress {
                done,
                total,
                wall_s: started.elapsed().as_secs_f64(),
                ..seen
            };
            let sent = bus.emit(RunEvent::Rollout(Box::new(seen)));
            failed = std::mem::replace(&mut failed, Ok(())).and(sent);
        })?;
        failed?;
        Ok(ended)
    }
}

/// The files of a data set of the hub, which is downloaded if needed, or a path as it is. `key` names the
/// source in messages.
///
/// # Errors
/// If the data set cannot be found or downloaded.
pub fn dataset_files(key: &str, source: &str) -> Result<Vec<PathBuf>, Failure> {
    let found = resolve_dataset(source, &resolve_env());
    match found.map_err(|e| unresolved(&format!("{key} = {source:?}"), e))? {
        Dataset::Path(path) => Ok(vec![path]),
        Dataset::Hub(rows) => Ok(rows.train.into_iter().chain(rows.held_out).collect()),
    }
}

/// Prompts of the tasks that the runs behind a model trained on, the newest run first; `None` for a model
/// that is not of a run.
///
/// # Errors
/// If a run or its tasks cannot be read.
pub fn trained_prompts(source: &str) -> Result<Option<Vec<String>>, Failure> {
    let mut prompts = None;
    let mut source = source.to_owned();
    for _ in 0..MAX_RUNS {
        let Some(run) = run_model(&source)? else {
            break;
        };
        let tasks = env::tasks(&run.recipe)?.all;
        let prompts: &mut Vec<String> = prompts.get_or_insert_default();
        for index in 0..tasks.len(Split::Train) {
            let task = tasks.get(Split::Train, index).map_err(Failure::system)?;
            prompts.push(task.prompt);
        }
        match run.recipe.model {
            ModelSection::Pretrained { source: before, .. } if before.starts_with(RUN) => {
                source = before;
            }
            _ => break,
        }
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn tasks_are_spread_and_every_episode_has_an_id_of_its_own() {
        assert_eq!(spread(3, 10), [0, 3, 6]);
        assert_eq!(spread(9, 2), [0, 1]);
        assert!(spread(0, 5).is_empty() && spread(5, 0).is_empty());
        let how = MeasureOptions {
            servers: None,
            tasks: 3,
            samples: 2,
            seeds: vec![4, 5],
            temperature: 0.7,
            greedy: true,
        };
        let all = episodes(1, &how, 10);
        let ids: BTreeSet<&EpisodeId> = all.iter().map(|(draw, _)| &draw.episode).collect();
        assert_eq!((all.len(), ids.len()), (3 + 2 * 3 * 2, all.len()));
        let of = |seed| all.iter().filter(move |(_, set)| set.seed == seed);
        let greedy: Vec<usize> = of(None).map(|(draw, _)| draw.task).collect();
        assert_eq!(greedy, [0, 3, 6]);
        assert!(of(None).all(|(_, set)| set.temperature == 0.0));
        let sampled: Vec<usize> = of(Some(5)).map(|(draw, _)| draw.task).collect();
        assert_eq!(sampled, [0, 0, 3, 3, 6, 6]);
        // Another seed samples other episodes of the same tasks.
        let seeds = |seed| {
            of(Some(seed))
                .map(|(draw, _)| draw.seed)
                .collect::<Vec<_>>()
        };
        assert_ne!(seeds(4), seeds(5));
    }
}
