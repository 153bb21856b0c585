//! Tasks and environments. The registry of `sinew-env` makes an environment from its keys; this file names no
//! environment.

use crate::failure::Failure;
use crate::judge;
use crate::levels::egress::{recorded, unrecorded};
use crate::levels::{sandbox_spec, task_images};
use crate::model::{resolve_env, unresolved};
use crate::reward::{rewards, sandboxed};
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_bridge::{PythonRows, RowLimits};
use sinew_env::{
    EnvFactory, IMAGE_COLUMN, McpFacts, McpServer, MixtureFactory, MixtureTasks, Reward,
    RewardSample, Rewarded, SandboxFacts, Sandboxes, Score, Split, TaskImage, Taskset, Unscored,
};
use sinew_judge::Bench;
use sinew_model::{Dataset, resolve_dataset};
use sinew_recipe::{
    CommandSection, EnvMember, HeldOut, Level, RewardSection, RunPlan, SandboxPlan, ScoredBy,
    TasksPlan,
};
use sinew_sandbox::{SandboxWait, TimedProvider};
use sinew_tasks::{Source, Splits, TableConfig, TableTaskset, TasksError};
use sinew_types::TaskId;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The tasks of a recipe, read once for checks and training.
///
/// All rows are read and rendered, so that a run of a million rows starts after seconds, and never fails at a
/// row later.
#[derive(Clone)]
pub struct Tasks {
    /// Tasks of the whole run.
    pub all: Arc<dyn Taskset>,
    /// Tasks of each environment, in the order of the recipe.
    each: Vec<Arc<dyn Taskset>>,
    /// Rows that the filter left out, and rows that are held out as well; `None` without rows.
    pub left_out: Option<(usize, usize)>,
    /// BLAKE3 of the rows of each environment that has some, by `tasks.rows` or `env.NAME.tasks.rows`.
    pub(crate) digests: BTreeMap<String, String>,
    /// Further parts that were left out of the sources, such as files of no split, for users.
    pub notes: Vec<String>,
}

/// Tasks, and what makes the environment of one.
pub struct World {
    /// Tasks of the whole run, by split and index.
    pub taskset: Arc<dyn Taskset>,
    /// Starts the environment of a task, with the rewards of the recipe around it.
    pub envs: Arc<dyn EnvFactory>,
    /// Time that environments have waited for sandboxes.
    pub sandbox_wait: Arc<SandboxWait>,
}

sinew_types::debug_fields!(Tasks, left_out);

sinew_types::debug_fields!(World as this, envs = this.envs.name());

/// Reads the tasks of a recipe: its own rows, or those of its environments.
///
/// # Errors
/// If a source is missing or a row cannot be read or rendered; in a mixture the text names the environment.
pub fn tasks(recipe: &RunPlan) -> Result<Tasks, Failure> {
    let (mut each, mut named, mut left_out, mut notes) = (Vec::new(), Vec::new(), None, Vec::new());
    let mut digests = BTreeMap::new();
    for world in recipe.worlds() {
        let (tasks, own, digest) = member(recipe, &world, taskset(recipe, &world, &mut notes))?;
        let name = if recipe.env.is_mixture() {
            format!("env.{}.tasks.rows", world.env.name)
        } else {
            "tasks.rows".to_owned()
        };
        digests.extend(digest.map(|digest| (name, digest)));
        let add = |(a, b): (usize, usize)| own.map_or((a, b), |(c, d)| (a + c, b + d));
        left_out = left_out.map(add).or(own);
        named.push((world.env.name.clone(), Arc::clone(&tasks)));
        each.push(tasks);
    }
    let all = match (&each[..], recipe.env.is_mixture()) {
        ([only], false) => Arc::clone(only),
        _ => Arc::new(MixtureTasks::new(named).map_err(Failure::input)?),
    };
    Ok(Tasks {
        all,
        each,
        left_out,
        digests,
        notes,
    })
}

/// The result for one environment; in a mixture, failures name it.
fn member<T>(
    recipe: &RunPlan,
    world: &sinew_recipe::World<'_>,
    made: Result<T, Failure>,
) -> Result<T, Failure> {
    made.map_err(|e| {
        if recipe.env.is_mixture() {
            e.of(&format!("env {:?}", world.env.name))
        } else {
            e
        }
    })
}

/// Tasks of one environment, what was left out of their rows, and the hash of the rows.
type CountedTasks = (Arc<dyn Taskset>, Option<(usize, usize)>, Option<String>);

/// Tasks of one environment: rows of `[tasks]`, none where agents bring their own, else those that the
/// environment makes from the seed.
fn taskset(
    recipe: &RunPlan,
    world: &sinew_recipe::World<'_>,
    notes: &mut Vec<String>,
) -> Result<CountedTasks, Failure> {
    if let Some(rows) = rows(recipe, world.tasks, notes)? {
        let summary = rows.summary();
        notes.extend(summary.notes.clone());
        let left_out = Some((summary.filtered, summary.overlapping));
        let digest = rows.digest();
        return Ok((Arc::new(rows), left_out, Some(digest)));
    }
    if recipe.harness.live().is_some() {
        return Ok((Arc::new(sinew_env::NoTasks), None, None));
    }
    let program = recipe.harness.program();
    let program = program.filter(|p| p.scored_by == ScoredBy::Environment);
    let mcp = program.as_ref().map_or(McpFacts::BUILT_IN_LOOP, mcp);
    let facts = facts(&recipe.sandbox, program.is_some(), Some(mcp))?;
    let tasks = world.env.config().taskset_at(recipe.seed, &facts);
    let tasks = tasks.map_err(|e| Failure::input(format!("env: {e}")))?;
    notes.extend(tasks.notes());
    Ok((tasks, None, None))
}

/// MCP servers of tasks that a program takes. One of the user's own reads them from a variable.
fn mcp(program: &CommandSection) -> McpFacts {
    match program.agent {
        Some(agent) => McpFacts {
            player: agent.title,
            transports: agent.mcp_transports(),
        },
        None => McpFacts {
            player: "the program",
            transports: McpServer::TRANSPORTS,
        },
    }
}

/// Facts about the sandboxes of a recipe, whether an agent program plays in them, and the MCP servers that
/// the player takes. A server has no machines.
pub(crate) fn facts(
    sandbox: &SandboxPlan,
    program: bool,
    mcp: Option<McpFacts>,
) -> Result<SandboxFacts, Failure> {
    let level = match sandbox.server {
        None => sandbox.level.name(),
        Some(_) => "server",
    };
    Ok(SandboxFacts {
        spec: sandbox_spec(sandbox)?,
        level,
        network: sandbox.egress.is_some(),
        host_lists: cfg!(feature = "egress") && level == "container",
        program,
        mcp,
    })
}

/// The rows of a source, if there is one. Functions of Python run in a worker that ends with them.
fn rows(
    recipe: &RunPlan,
    tasks: &TasksPlan,
    notes: &mut Vec<String>,
) -> Result<Option<TableTaskset>, Failure> {
    let Some(name) = &tasks.source else {
        return Ok(None);
    };
    let (source, own) = source(recipe, "tasks.source", name, notes)?;
    let config = TableConfig {
        name: stem(name),
        source,
        held_out: match (&tasks.held_out, own) {
            (Some(HeldOut::Source(other)), _) => {
                Splits::Own(self::source(recipe, "tasks.held_out", other, notes)?.0)
            }
            (Some(HeldOut::Share(share)), Some(_)) => {
                return Err(Failure::input(format!(
                    "tasks.held_out = {share}: has no effect: {name} gives held-out rows itself; remove it"
                )));
            }
            (Some(HeldOut::Share(share)), None) => Splits::Share(*share),
            (None, Some(own)) => Splits::Own(own),
            (None, None) => Splits::Given,
        },
        prompt: tasks.prompt.clone(),
        filter: tasks.filter.clone(),
        system: tasks.system.clone(),
        examples: tasks.examples.clone(),
        kind: tasks.kind.clone(),
    };
    let table = TableTaskset::open(config).map_err(|e| match e {
        TasksError::Read { .. } => Failure::outside(e),
        _ => Failure::input(e),
    })?;
    Ok(Some(table))
}

/// Rows of a source, and those that a function gives for its held-out split.
fn source(
    recipe: &RunPlan,
    key: &str,
    source: &str,
    notes: &mut Vec<String>,
) -> Result<(Source, Option<Source>), Failure> {
    if !TasksPlan::is_python(source) {
        return Ok((files(key, source, notes)?, None));
    }
    let spec = sandbox_spec(&recipe.sandbox)?;
    let made = PythonRows::read(source, "python3", recipe.seed, spec, RowLimits::default());
    let made = made.map_err(|e| Failure::input(format!("{key}: {e}")))?;
    let by = |rows| Source::Made {
        by: source.into(),
        rows,
    };
    Ok((by(made.train), made.held_out.map(by)))
}

/// Name of the tasks: the last part of the source without its ending; of a data set of the hub, its name and
/// configuration.
fn stem(source: &str) -> String {
    if let Some((_, name)) = source
        .strip_prefix("hf:")
        .and_then(|hub| hub.split_once('/'))
    {
        return name.replace(['/', ':'], "-");
    }
    let source = source.rsplit_once(".py:").map_or(source, |(file, _)| file);
    let stem = Path::new(source).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Returns the files of a source: a local path, or a data set of the hub, which is downloaded if needed.
fn files(key: &str, source: &str, notes: &mut Vec<String>) -> Result<Source, Failure> {
    let found = resolve_dataset(source, &resolve_env());
    match found.map_err(|e| unresolved(&format!("{key} = {source:?}"), e))? {
        Dataset::Path(path) => Ok(path.into()),
        Dataset::Hub(rows) => {
            notes.extend(rows.notes);
            Ok(Source::Split {
                name: source.to_owned(),
                train: rows.train,
                held_out: rows.held_out,
            })
        }
    }
}

/// Tasks and reward of one environment of a recipe, to score its stored episodes.
pub struct OwnReward {
    /// Name in a mixture; empty outside of one.
    name: String,
    /// Tasks of the environment, with their ids outside of the mixture.
    pub tasks: Arc<dyn Taskset>,
    /// Reward of the environment; `None` if only the environment itself can score an episode.
    pub reward: Option<Arc<dyn Reward>>,
}

sinew_types::debug_fields!(OwnReward, name);

impl OwnReward {
    /// The id among [`OwnReward::tasks`] of a task of the run; `None` for a task of another environment.
    pub fn own_id(&self, task: &TaskId) -> Option<TaskId> {
        if self.name.is_empty() {
            return Some(task.clone());
        }
        let rest = task.0.strip_prefix(&self.name)?.strip_prefix(':')?;
        Some(TaskId::new(rest))
    }
}

/// Builds the rewards of a recipe without the environments, in the order of the recipe. `instead` replaces
/// all of them.
///
/// # Errors
/// If a reward cannot be made, or compares the samples of a group: stored episodes are scored one by one.
pub fn own_rewards(
    recipe: &RunPlan,
    tasks: &Tasks,
    instead: Option<&RewardSection>,
) -> Result<Vec<OwnReward>, Failure> {
    let own = |(world, tasks): (sinew_recipe::World<'_>, &Arc<dyn Taskset>)| {
        let section = instead.or(world.reward);
        let reward = match section.filter(|s| !s.terms().is_empty()) {
            None => None,
            Some(section) => {
                let made = rewards(recipe, section, tasks.as_ref(), &Bench::default());
                let made = member(recipe, &world, made)?;
                if made.group.is_some() {
                    return Err(Failure::input(
                        "reward: rewards of a group are not scored anew; name others with --reward",
                    ));
                }
                Some(Arc::new(made.single) as Arc<dyn Reward>)
            }
        };
        Ok(OwnReward {
            name: world.env.name.clone(),
            tasks: Arc::clone(tasks),
            reward,
        })
    };
    recipe
        .worlds()
        .into_iter()
        .zip(&tasks.each)
        .map(own)
        .collect()
}

/// Environments of a recipe with its tasks. Sandboxes are started only for environments that need them.
///
/// # Errors
/// If an environment, a reward or a sandbox cannot be made, this build lacks a feature that one needs, or the
/// algorithm reads what the episodes of an environment do not have.
pub fn world(recipe: &RunPlan, tasks: &Tasks) -> Result<World, Failure> {
    let mcp = recipe.worlds().iter().any(|w| w.env.kind_name() == "mcp");
    if cfg!(not(feature = "mcp")) && mcp {
        return Err(crate::levels::missing_feature("env.type = \"mcp\"", "mcp").into());
    }
    let recipe = RunPlan {
        sandbox: unrecorded(&recipe.sandbox),
        ..recipe.clone()
    };
    world_with(&recipe, tasks, &Bench::default())
}

/// The recipe of a run in `folder`, whose sandboxes keep there what they are to record.
pub(crate) fn in_run(recipe: &RunPlan, folder: &Path) -> RunPlan {
    RunPlan {
        sandbox: recorded(&recipe.sandbox, folder),
        ..recipe.clone()
    }
}

/// Same as [`world`], with the judges of a run, for the run in `folder`.
pub(crate) fn in_run_world(
    recipe: &RunPlan,
    folder: &Path,
    tasks: &Tasks,
    bench: &Bench,
) -> Result<World, Failure> {
    world_with(&in_run(recipe, folder), tasks, bench)
}

/// Same as [`world`], with the judges of a run.
pub(crate) fn world_with(recipe: &RunPlan, tasks: &Tasks, bench: &Bench) -> Result<World, Failure> {
    made_world(recipe, tasks, Some(bench))
}

/// Same as [`world`], without the rewards of the recipe: episodes end without a score, for a scorer that runs
/// apart.
///
/// # Errors
/// Fails as [`world`] does, and if an environment has no reward of the recipe: only itself can score its
/// episodes.
pub(crate) fn world_unscored(recipe: &RunPlan, tasks: &Tasks) -> Result<World, Failure> {
    let missing = own_rewards(recipe, tasks, None)?
        .into_iter()
        .find(|own| own.reward.is_none());
    if let Some(own) = missing {
        return Err(Failure::input(format!(
            "--score-apart: the recipe has no reward of its own{}, only the environment can score its episodes\n  \
             hint: leave the option out, or add [reward]",
            match own.name.as_str() {
                "" => String::new(),
                name => format!(" for env {name:?}"),
            }
        )));
    }
    made_world(recipe, tasks, None)
}

/// The reward of episodes that are scored apart.
struct SeparateReward;

impl Reward for SeparateReward {
    fn name(&self) -> &str {
        "apart"
    }

    fn score<'a>(&'a self, _: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        std::future::ready(Err(Unscored::new("it is scored apart"))).boxed()
    }
}

/// Refuses a task that names an image which the recipe does not have.
fn known_images(
    recipe: &RunPlan,
    world: &sinew_recipe::World<'_>,
    tasks: &dyn Taskset,
) -> Result<(), Failure> {
    let images = &recipe.sandbox.images;
    if images.is_empty() || !world.env.config().task_images() {
        return Ok(());
    }
    for split in [Split::Train, Split::HeldOut] {
        for index in 0..tasks.len(split) {
            let task = tasks.get(split, index).map_err(Failure::input)?;
            let Some(named) = task.data.get(IMAGE_COLUMN) else {
                continue;
            };
            if named.as_str().is_none_or(|name| !images.contains_key(name)) {
                let allowed: Vec<&str> = images.keys().take(20).map(String::as_str).collect();
                return Err(Failure::input(format!(
                    "task {}: {IMAGE_COLUMN} = {named}: sandbox.images has no such image; allowed: {}{}; \
                     add it to [sandbox.images], or correct the row",
                    task.id,
                    allowed.join(", "),
                    if images.len() > allowed.len() {
                        ", ..."
                    } else {
                        ""
                    }
                )));
            }
        }
    }
    Ok(())
}

/// Adds the images that tasks may name, pulled and unpacked, so that no episode finds one missing.
fn with_images(recipe: &RunPlan, mut sandboxes: Sandboxes) -> Result<Sandboxes, Failure> {
    let unpacked = task_images(&recipe.sandbox)?;
    let images = unpacked.into_iter().map(|(name, image)| {
        let env = image.config.env;
        let root = image.root;
        (name, TaskImage { root, env })
    });
    sandboxes.images = images.collect();
    Ok(sandboxes)
}

/// Machines for the environments that run in them, at the level `container`. Agent programs work in them, so
/// that their folders are shown there.
///
/// # Errors
/// If there is an agent program, and the level is another one.
fn with_machines(recipe: &RunPlan, mut sandboxes: Sandboxes) -> Result<Sandboxes, Failure> {
    let mut members = recipe.env.members().iter();
    let Some(member) = members.find(|m| m.config().machines()) else {
        return Ok(sandboxes);
    };
    let sandbox = &recipe.sandbox;
    if sandbox.level == Level::Container && sandbox.server.is_none() {
        let shows = crate::harness::shows(&recipe.harness)?;
        sandboxes.machines = Some(crate::levels::machines(sandbox, shows)?);
        return Ok(sandboxes);
    }
    if recipe.harness.program().is_none() {
        return Ok(sandboxes);
    }
    Err(Failure::input(format!(
        "harness.type = {:?}: with env.type = {:?} a program works in the container of its task: set sandbox.level = \
         \"container\" without sandbox.server, or remove [harness]",
        recipe.harness.name(),
        member.kind_name(),
    )))
}

/// Sandboxes for environments: `here`, or where the recipe says.
fn env_sandboxes(
    recipe: &RunPlan,
    here: bool,
    bench: Option<&Bench>,
    wait: &Arc<SandboxWait>,
) -> Result<Sandboxes, Failure> {
    let mut section = recipe.sandbox.clone();
    if here {
        (section.server, section.owner) = (None, None);
    }
    let sandboxes = with_images(recipe, sandboxed(&section)?)?;
    let mut sandboxes = with_machines(recipe, sandboxes)?;
    sandboxes.provider = Arc::new(TimedProvider::new(sandboxes.provider, Arc::clone(wait)));
    // Episodes that are scored apart are played with their user all the same.
    sandboxes.user = judge::user(recipe, bench.unwrap_or(&Bench::default()))?;
    Ok(sandboxes)
}

/// The environments, with the rewards of the recipe, or without them if there are no judges.
fn made_world(recipe: &RunPlan, tasks: &Tasks, bench: Option<&Bench>) -> Result<World, Failure> {
    for (world, taskset) in recipe.worlds().into_iter().zip(&tasks.each) {
        member(
            recipe,
            &world,
            known_images(recipe, &world, taskset.as_ref()),
        )?;
    }
    let sandbox_wait = Arc::<SandboxWait>::default();
    // Python environments speak to their workers over sockets of this host, wherever rewards run code.
    let elsewhere = recipe.sandbox.is_elsewhere();
    let stays = |env: &EnvMember| elsewhere && env.kind_name() == "python";
    let made = |here: bool| {
        let mut worlds = recipe.worlds().into_iter();
        let needed = worlds.any(|w| w.env.needs().sandbox && stays(w.env) == here);
        let made = needed.then(|| env_sandboxes(recipe, here, bench, &sandbox_wait));
        made.transpose()
    };
    let (named, here) = (made(false)?, made(true)?);
    let mut envs = Vec::new();
    for (world, taskset) in recipe.worlds().into_iter().zip(&tasks.each) {
        let own = if stays(world.env) { &here } else { &named };
        let sandboxes = own.clone().filter(|_| world.env.needs().sandbox);
        let made = || {
            let envs = world.env.config().factory(sandboxes);
            let envs = envs.map_err(|e| Failure::input(format!("env: {e}")))?;
            // If there are only rewards from outside, the environment's own score stays.
            let Some(section) = world.reward.filter(|s| !s.terms().is_empty()) else {
                return Ok(envs);
            };
            let Some(bench) = bench else {
                return Ok(
                    Arc::new(Rewarded::new(envs, Arc::new(SeparateReward))) as Arc<dyn EnvFactory>
                );
            };
            let rewards = rewards(recipe, section, taskset.as_ref(), bench)?;
            let rewarded = Rewarded::new(envs, Arc::new(rewards.single));
            let rewarded = match rewards.group {
                None => rewarded,
                Some(group) => rewarded.with_group(Arc::new(group)),
            };
            Ok(Arc::new(rewarded) as Arc<dyn EnvFactory>)
        };
        let made = member(recipe, &world, made())?;
        let gives = made.capabilities().gives;
        if let Some(missing) = recipe.missing_inputs(world.env, gives).first() {
            return Err(Failure::input(missing));
        }
        envs.push((world.env.name.clone(), made));
    }
    let envs: Arc<dyn EnvFactory> = match (&envs[..], recipe.env.is_mixture()) {
        ([(_, only)], false) => Arc::clone(only),
        _ => Arc::new(MixtureFactory::new(envs)),
    };
    Ok(World {
        taskset: Arc::clone(&tasks.all),
        envs,
        sandbox_wait,
    })
}
