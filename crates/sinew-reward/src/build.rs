//! Builds rewards from the terms of a recipe: by name, or as functions in sandboxed workers.
//!
//! Functions of one recipe share their workers. A function that hangs, crashes or raises makes its sample
//! unscored; it harms no other one.

use crate::equivalence::{self, Equivalence};
use crate::named::{Runs, named, only_column, runs};
use crate::spec::{Argument, RewardSpec};
use crate::sum::{GroupSum, RewardSum, Term};
use crate::unit_tests::UnitTests;
use crate::win_rate::{PAIRS, WinRate};
use sinew_bridge::{
    PythonCode, PythonReward, PythonWorkers, StartError, Target, TargetKind, WorkersConfig,
};
use sinew_env::{GroupReward, Preference, Reward, Sandboxes};
use sinew_sandbox::SandboxSpec;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Deadline of one call of a function, unless set.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Worker processes of functions, unless set: each core of a small machine can score.
pub const WORKERS: usize = 2;

/// One term of a recipe's reward, as typed.
#[derive(Clone, Debug, PartialEq)]
pub struct TermSpec<'a> {
    /// The reward: `exact(answer)`, `my_rewards.py:score`.
    pub name: &'a str,
    /// Factor in the sum, finite. 0: a measurement.
    pub weight: f64,
    /// Limits of the value before it is multiplied.
    pub clip: Option<[f64; 2]>,
    /// Deadline of one score of one sample, group or comparison. `None`: [`TIMEOUT`], at most
    /// [`BuildConfig::score_timeout`].
    pub timeout: Option<Duration>,
    /// Maximum number of pairs that are compared in a group. `None`: [`PAIRS`].
    pub pairs: Option<usize>,
}

impl TermSpec<'_> {
    /// Whether the reward is a function, `FILE.py:FUNCTION`.
    pub fn is_function(&self) -> bool {
        is_function(self.name)
    }
}

/// Whether a reward is a function, `FILE.py:FUNCTION`.
pub fn is_function(name: &str) -> bool {
    name.split_once(".py:")
        .is_some_and(|(_, f)| !f.contains(['(', '"', ' ']))
}

/// Whether a reward runs in the Python workers of functions.
pub fn needs_workers(name: &str) -> bool {
    is_function(name) || runs(name) == Some(Runs::Math)
}

/// Whether a reward runs code of the model in sandboxes of the recipe.
pub fn needs_sandbox(name: &str) -> bool {
    matches!(runs(name), Some(Runs::Code(_)))
}

/// Whether a reward takes a deadline: it runs code.
pub fn has_deadline(name: &str) -> bool {
    is_function(name) || runs(name).is_some()
}

/// Inputs for the building of rewards.
#[derive(Debug)]
pub struct BuildConfig<'a> {
    /// Rewards that the caller has made, by their names in the recipe, such as judges.
    pub made: BTreeMap<String, BuiltReward>,
    /// Columns of the tasks, for each split.
    pub columns: Vec<Vec<String>>,
    /// Sandboxes for code of the model; only needed if [`needs_sandbox`] is true for a term.
    pub sandboxes: Option<Sandboxes>,
    /// Limits of the workers of functions.
    pub spec: SandboxSpec,
    /// Worker processes of functions.
    pub workers: usize,
    /// Time that all rewards of one sample have together.
    pub score_timeout: Duration,
    /// Base folder for relative paths of function files.
    pub folder: &'a Path,
    /// Interpreter of functions: a path, or a name of the search path.
    pub python: &'a str,
    /// Folders in which the interpreter is searched, separated by colons.
    pub search_path: &'a str,
}

/// The reward of a recipe.
#[derive(Debug)]
pub struct Rewards {
    /// Scores a sample when its episode ends.
    pub single: RewardSum,
    /// Adds to it when all members of a group have ended.
    pub group: Option<GroupSum>,
}

/// A reward that cannot be made: its name, and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("reward: {0}")]
pub struct BuildError(String);

fn refused(e: impl std::fmt::Display) -> BuildError {
    BuildError(e.to_string())
}

/// Makes the rewards of a recipe. Workers start only for functions, and stop with the last reward. It blocks
/// the thread until the first worker has loaded the functions.
///
/// # Errors
/// Fails if a name or a column does not exist, or a function cannot be loaded, or has a parameter that is not
/// a column of the tasks.
pub fn build(terms: &[TermSpec<'_>], config: &BuildConfig<'_>) -> Result<Rewards, BuildError> {
    let in_workers = terms.iter().map(|t| t.name).filter(|n| needs_workers(n));
    let functions: Vec<&str> = in_workers.collect();
    let workers = if functions.is_empty() {
        None
    } else {
        Some(workers(&functions, config).map_err(refused)?)
    };
    let (mut single, mut group) = (Vec::new(), Vec::new());
    for spec in terms {
        let name = metric(spec.name, terms);
        let target = functions.iter().position(|f| *f == spec.name);
        let made = match (target, &workers) {
            (Some(target), Some(workers)) => {
                let reward = PythonReward::new(workers.clone(), target, short(spec.name));
                let reward = reward.map_err(refused)?;
                if spec.is_function() {
                    function(reward, spec, config)?
                } else {
                    BuiltReward::Single(equivalence(reward, spec, config)?)
                }
            }
            _ => match config.made.get(spec.name) {
                Some(made) => made.clone(),
                None => BuiltReward::Single(by_name(spec, config)?),
            },
        };
        match made {
            BuiltReward::Single(reward) => single.push(term(name, reward, spec)),
            BuiltReward::Group(reward) => group.push(term(name, reward, spec)),
            BuiltReward::Preference(preference) => {
                let rate = WinRate::new(preference, spec.pairs.unwrap_or(PAIRS));
                group.push(term(name, Arc::new(rate), spec));
            }
        }
    }
    let single = RewardSum::new(single);
    Ok(if group.is_empty() {
        Rewards {
            single,
            group: None,
        }
    } else {
        Rewards {
            single: single.before_group(),
            group: Some(GroupSum::new(group)),
        }
    })
}

/// A reward of any kind.
#[derive(Clone)]
pub enum BuiltReward {
    /// Reward of one sample.
    Single(Arc<dyn Reward>),
    /// Reward of a group.
    Group(Arc<dyn GroupReward>),
    /// Reward of a group, by comparing two members at a time.
    Preference(Arc<dyn Preference>),
}

impl std::fmt::Debug for BuiltReward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, name) = match self {
            Self::Single(reward) => ("Single", reward.name()),
            Self::Group(reward) => ("Group", reward.name()),
            Self::Preference(preference) => ("Preference", preference.name()),
        };
        f.debug_tuple(kind).field(&name).finish()
    }
}

fn term<R: ?Sized>(name: &str, reward: Arc<R>, spec: &TermSpec<'_>) -> Term<R> {
    Term {
        name: name.to_owned(),
        reward,
        weight: spec.weight,
        clip: spec.clip,
    }
}

/// Name of a term in metrics. Two rewards of one short name must not share it.
fn metric<'a>(name: &'a str, terms: &[TermSpec<'_>]) -> &'a str {
    let twin = |other: &TermSpec<'_>| other.name != name && short(other.name) == short(name);
    if terms.iter().any(twin) {
        name
    } else {
        short(name)
    }
}

/// Name of a reward without arguments, or of a function without its file.
fn short(name: &str) -> &str {
    if name.contains("://") {
        return name;
    }
    if is_function(name) {
        name.rsplit_once(':').map_or(name, |(_, function)| function)
    } else {
        name.split_once('(').map_or(name, |(short, _)| short)
    }
}

/// A reward by name, whose columns the tasks must have.
fn by_name(term: &TermSpec<'_>, config: &BuildConfig<'_>) -> Result<Arc<dyn Reward>, BuildError> {
    check_columns(term.name, config)?;
    let Some(Runs::Code(kind)) = runs(term.name) else {
        return named(term.name).map_err(refused);
    };
    let sandboxes = config.sandboxes.clone();
    Ok(Arc::new(UnitTests {
        kind,
        column: only_column(term.name).map_err(refused)?,
        sandboxes: sandboxes.ok_or_else(|| refused("there are no sandboxes for code"))?,
        timeout: within(term, config.score_timeout)?,
    }))
}

/// Mathematical equivalence by a function of this crate.
fn equivalence(
    function: PythonReward,
    term: &TermSpec<'_>,
    config: &BuildConfig<'_>,
) -> Result<Arc<dyn Reward>, BuildError> {
    check_columns(term.name, config)?;
    Ok(Arc::new(Equivalence {
        function: function.with_timeout(within(term, config.score_timeout)?),
        column: only_column(term.name).map_err(refused)?,
    }))
}

/// The columns of a reward by name, which the tasks must have.
fn check_columns(name: &str, config: &BuildConfig<'_>) -> Result<(), BuildError> {
    let spec = RewardSpec::parse(name).map_err(refused)?;
    for columns in &config.columns {
        for argument in &spec.positional {
            if let Argument::Column(column) = argument
                && !columns.contains(column)
            {
                return Err(refused(format_args!(
                    "{name}: tasks have no column {column}; columns: {}",
                    columns.join(", ")
                )));
            }
        }
    }
    Ok(())
}

/// Starts workers that have loaded all functions.
fn workers(functions: &[&str], config: &BuildConfig<'_>) -> Result<PythonWorkers, StartError> {
    let parsed = functions.iter().map(|f| {
        if is_function(f) {
            Target::parse(f, TargetKind::Reward, config.folder)
        } else {
            Ok(equivalence::target())
        }
    });
    let targets = parsed.collect::<Result<Vec<_>, _>>()?;
    let code = PythonCode::find(&targets, config.python, config.search_path)?;
    // All may be replaced at the same moment, and a dead one leaves after its successor has come.
    let provider = code.process_provider(2 * config.workers)?;
    let mut pool = WorkersConfig::new(provider);
    (pool.workers, pool.spec) = (config.workers, config.spec.clone());
    PythonWorkers::start(pool, code)
}

/// A function by its parameters: of a group, of a pair, or of one sample.
fn function(
    reward: PythonReward,
    spec: &TermSpec<'_>,
    config: &BuildConfig<'_>,
) -> Result<BuiltReward, BuildError> {
    let mut compares = true;
    for columns in &config.columns {
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        reward.check(&columns).map_err(refused)?;
        compares &= reward.compares(&columns);
    }
    let given = spec.timeout;
    if compares {
        let reward = reward.with_timeout(given.unwrap_or(TIMEOUT));
        return Ok(BuiltReward::Preference(Arc::new(reward)));
    }
    if let Some(pairs) = spec.pairs {
        return Err(refused(format_args!(
            "{}: pairs = {pairs} has no effect: it is for a function with the parameters a and b; remove it",
            spec.name
        )));
    }
    if reward.is_group() {
        let reward = reward.with_timeout(given.unwrap_or(TIMEOUT));
        return Ok(BuiltReward::Group(Arc::new(reward)));
    }
    let timeout = within(spec, config.score_timeout)?;
    Ok(BuiltReward::Single(Arc::new(reward.with_timeout(timeout))))
}

/// Deadline of the score of one sample, which an episode waits for.
fn within(spec: &TermSpec<'_>, limit: Duration) -> Result<Duration, BuildError> {
    match spec.timeout {
        None => Ok(TIMEOUT.min(limit)),
        Some(given) if given <= limit => Ok(given),
        Some(given) => Err(refused(format_args!(
            "{}: timeout_s = {}; allowed: up to rollout.score_timeout_s = {}, after which an episode \
             without a score has failed",
            spec.name,
            given.as_secs_f64(),
            limit.as_secs_f64()
        ))),
    }
}
