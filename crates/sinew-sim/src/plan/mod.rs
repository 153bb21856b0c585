//! A plan to simulate, in the form of a TOML file.
//!
//! Every key has a default, so that a plan names only its subject. `preset` lays the keys of the file over
//! those of a preset, and `from_run` takes distributions from a recorded run. Unknown keys are refused with
//! their line.

mod check;
mod hops;
mod memory;
mod presets;
pub(crate) mod record;
mod roles;
mod scaling;

pub use hops::HopTimes;
pub use memory::Memory;
pub use presets::{PRESETS, preset};
pub(crate) use roles::OWNER_HOST;
pub use roles::{Link, Preemption, Role, RoleKind};
pub use scaling::{Autoscale, Burst, PriceStep};

use crate::dist::{Dist, Form, Lognormal};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Reasons why a plan is refused.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file cannot be read.
    #[error("{path}: {why}")]
    Read { path: PathBuf, why: String },
    /// The file is not a plan: an unknown key, or a value of another type. The message has the line.
    #[error("{path}: {why}")]
    Form { path: PathBuf, why: String },
    /// A value that is not allowed.
    #[error("{key} = {value}: {allowed}")]
    Value {
        key: String,
        value: String,
        allowed: String,
    },
    /// Trainer or engines do not fit their GPUs. The text ends with the way out.
    #[error("memory: {0}")]
    Memory(String),
}

/// A plan to simulate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// Name for users; the file's name if it is empty.
    pub name: String,
    /// Keys of this preset take the place of the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Folder of a recorded run: turns, lengths, latencies and times of steps are its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_run: Option<PathBuf>,
    /// Seed of all random numbers.
    pub seed: u64,
    pub run: Run,
    pub rollout: Rollout,
    pub episode: Episode,
    pub tools: Tools,
    pub scoring: Scoring,
    pub engines: Engines,
    pub trainer: Trainer,
    pub weights: Weights,
    pub store: Store,
    pub hops: HopTimes,
    pub prices: Prices,
    /// The model and the GPUs that must have room for it; left out: memory is not looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Roles of a cluster; parts without a role are on the host of the run's process.
    #[serde(rename = "role", skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<Role>,
    /// Links between hosts of roles.
    #[serde(rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// Counts that follow the work; left out: they stay as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<Autoscale>,
    /// Times with longer turns.
    #[serde(rename = "burst", skip_serializing_if = "Vec::is_empty")]
    pub bursts: Vec<Burst>,
    /// Failures, at their times.
    #[serde(rename = "fault", skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

/// Order of generation and training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Generation and training take turns.
    #[default]
    Sync,
    /// Both run at once. An update takes the groups in the order of their draws, one update behind.
    OneStepOff,
    /// Both run at once. An update takes the groups that are complete.
    Async,
}

/// `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Run {
    /// Default: sync.
    pub mode: Mode,
    /// Updates that a sample may be behind; of mode async. Default: 1.
    pub max_staleness: u64,
    /// Optimizer updates after which the run ends. Default: 20.
    pub updates: u64,
    /// Virtual seconds after which it ends in any case; 0: never. Default: 0.
    pub max_s: f64,
    /// Updates between two checkpoints. Default: 10.
    pub checkpoint_every: u64,
    /// Updates at the start that are left out of all figures. Default: 1.
    pub warm_up: u64,
}

/// `[rollout]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rollout {
    /// Default: 32.
    pub groups_per_update: usize,
    /// Default: 8.
    pub group_size: usize,
    /// Episodes that run at once, at most. Default: 1024.
    pub in_flight: usize,
    /// Times that an episode which the system failed is run again. Default: 2.
    pub retries: u32,
    /// Groups that a sync step begins in addition, and stops once enough are complete. Default: 0.
    pub over_sample: usize,
    /// Share of groups without a signal. Default: 0.
    pub no_signal: f64,
    /// Rounds in which groups without a signal are replaced. Default: 0.
    pub refill: u32,
    /// Tasks of the taskset. Default: 1,000,000.
    pub tasks: usize,
    /// Seconds of an episode's turns, after which it is truncated. Default: 86,400.
    pub timeout_s: f64,
    /// The longest begin first; for plans with up to some thousand episodes an update. Default: false.
    pub longest_first: bool,
}

/// `[episode]`: lengths in tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Episode {
    /// Turns of the model. Default: 4.
    pub turns: Dist,
    /// Default: 500.
    pub prompt_tokens: Dist,
    /// Sampled tokens of a turn. Default: median 200, 95th percentile 800.
    pub turn_tokens: Dist,
    /// Tokens of what a tool answers. Default: 200.
    pub observation_tokens: Dist,
    /// An episode whose context is full is truncated. Default: 32,768.
    pub max_context_tokens: usize,
    /// Share of the variance of lengths and turns that the task decides, 0 to 1. Default: 0.5.
    pub task_share: f64,
}

/// `[tools]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tools {
    /// Seconds until an episode's world is up. Default: 0.5.
    pub boot_s: Dist,
    /// Seconds of a call, one after each turn. Default: median 0.5, 95th percentile 5.
    pub call_s: Dist,
    /// Episodes that have a sandbox at once, at most. Default: 1024.
    pub sandboxes: usize,
    /// Sandboxes that start at once, at most. Default: 64.
    pub starting: usize,
}

/// `[scoring]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scoring {
    /// Processes that score episodes. Default: 16.
    pub scorers: usize,
    /// Seconds of a score. Default: 0.1.
    pub score_s: Dist,
    /// Seconds after which a score that did not come is made again. Default: 600.
    pub lease_s: f64,
}

/// Model of the engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// Curves of time by batch, tokens in the cache and prompts: for large plans.
    #[default]
    Curves,
    /// The scheduler of the embedded engine, pass by pass, with its blocks and its prefix cache.
    Scheduler,
}

/// `[engines]`: a pass takes `pass_s + row_s x sequences + kv_s x tokens of their contexts`, and
/// each token of
/// a prompt in it `1 / prefill_tokens_per_s` more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Engines {
    /// Default: 4.
    pub count: usize,
    /// Devices of one, for costs. Default: 1.
    pub devices: f64,
    /// Default: curves.
    pub model: Model,
    /// Sequences of a pass, at most. Default: 256.
    pub max_running: usize,
    /// Tokens of a pass, at most. Default: 8192.
    pub max_batched_tokens: usize,
    /// Tokens of the cache of keys and values. Default: 500,000.
    pub kv_tokens: usize,
    /// Default: 0.012.
    pub pass_s: f64,
    /// Default: 0.00005.
    pub row_s: f64,
    /// Default: 0.
    pub kv_s: f64,
    /// Default: 20,000.
    pub prefill_tokens_per_s: f64,
    /// Tokens that a pass gives a sequence on the mean: above 1 with speculative decoding. Default: 1.
    pub tokens_per_pass: f64,
    /// Seconds between two looks of the router at an engine. Default: 1.
    pub probe_s: f64,
    /// Tokens that one id of the simulation stands for; 0: chosen by the size of the plan. Default: 0.
    pub grain: usize,
}

/// `[trainer]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Trainer {
    /// Number of devices, for costs. Default: 4.
    pub devices: f64,
    /// Seconds of an update in addition to its tokens. Default: 1.
    pub fixed_s: f64,
    /// Tokens of rows, prompts included, that all devices train a second. Default: 50,000.
    pub tokens_per_s: f64,
    /// The devices are those of the engines, which wait meanwhile: of mode sync. Default: false.
    pub colocated: bool,
}

/// `[weights]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Weights {
    /// Seconds from the update until engines could load; they continue meanwhile. Default: 1.
    pub transfer_s: f64,
    /// Size of the weights, which links carry in addition to `transfer_s`. Default: 0.
    pub gigabytes: f64,
    /// Seconds in which engines load and sample nothing. Default: 0.5.
    pub load_s: f64,
    /// Requests continue with the keys and values of the old weights. Default: false.
    pub keep_kv: bool,
    /// Weights wait until running requests have ended, and none begins meanwhile. Default: false.
    pub drain: bool,
}

/// `[store]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Store {
    /// Seconds until an episode is durable. Default: 0.005.
    pub commit_s: f64,
}

/// `[prices]` in any currency.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prices {
    /// Price of an engine's or the trainer's device for an hour.
    pub engine_device_hour: f64,
    pub trainer_device_hour: f64,
    /// Price of a place for a sandbox for an hour.
    pub sandbox_hour: f64,
}

/// Kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// Engine `target` loses everything, and is back after `for_s`.
    EngineCrash,
    /// No message reaches engine `target` for `for_s`; it keeps its weights.
    Partition,
    /// The sandbox of a live episode is gone.
    SandboxLoss,
    /// A tool of a live episode never answers.
    ToolHang,
    /// Scorers lose what they hold.
    ScorerCrash,
    /// No write becomes durable for `for_s`.
    StorePause,
    /// Commits take `by` times as long for `for_s`.
    SlowDisk,
    /// The wall clock is set by `by` seconds, also back.
    ClockJump,
    /// The process of the run is killed, and the next session begins after `for_s`.
    Kill,
}

/// `[[fault]]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Virtual seconds since the start.
    pub at_s: f64,
    /// Type of its task.
    pub kind: FaultKind,
    /// Number of the engine, or a number that picks the episode. Default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub target: u64,
    /// Default: 1.
    #[serde(default = "one")]
    pub for_s: f64,
    /// Default: 1.
    #[serde(default = "one")]
    pub by: f64,
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A distribution by median and 95th percentile.
fn lognormal(median: f64, p95: f64) -> Dist {
    Dist::Of(Form::Lognormal(Lognormal {
        median,
        p95,
        max: None,
    }))
}

impl Default for Run {
    fn default() -> Self {
        Self {
            mode: Mode::Sync,
            max_staleness: 1,
            updates: 20,
            max_s: 0.0,
            checkpoint_every: 10,
            warm_up: 1,
        }
    }
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            groups_per_update: 32,
            group_size: 8,
            in_flight: 1024,
            retries: 2,
            over_sample: 0,
            no_signal: 0.0,
            refill: 0,
            tasks: 1_000_000,
            timeout_s: 86_400.0,
            longest_first: false,
        }
    }
}

impl Default for Episode {
    fn default() -> Self {
        Self {
            turns: 4.0.into(),
            prompt_tokens: 500.0.into(),
            turn_tokens: lognormal(200.0, 800.0),
            observation_tokens: 200.0.into(),
            max_context_tokens: 32_768,
            task_share: 0.5,
        }
    }
}

impl Default for Tools {
    fn default() -> Self {
        Self {
            boot_s: 0.5.into(),
            call_s: lognormal(0.5, 5.0),
            sandboxes: 1024,
            starting: 64,
        }
    }
}

impl Default for Scoring {
    fn default() -> Self {
        Self {
            scorers: 16,
            score_s: 0.1.into(),
            lease_s: 600.0,
        }
    }
}

impl Default for Engines {
    fn default() -> Self {
        Self {
            count: 4,
            devices: 1.0,
            model: Model::Curves,
            max_running: 256,
            max_batched_tokens: 8192,
            kv_tokens: 500_000,
            pass_s: 0.012,
            row_s: 0.000_05,
            kv_s: 0.0,
            prefill_tokens_per_s: 20_000.0,
            tokens_per_pass: 1.0,
            probe_s: 1.0,
            grain: 0,
        }
    }
}

impl Default for Trainer {
    fn default() -> Self {
        Self {
            devices: 4.0,
            fixed_s: 1.0,
            tokens_per_s: 50_000.0,
            colocated: false,
        }
    }
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            transfer_s: 1.0,
            gigabytes: 0.0,
            load_s: 0.5,
            keep_kv: false,
            drain: false,
        }
    }
}

impl Default for Store {
    fn default() -> Self {
        Self { commit_s: 0.005 }
    }
}

impl Plan {
    /// Reads a plan from a file. A folder in `from_run` is of the working directory.
    ///
    /// # Errors
    /// If there is no file, or its content is refused.
    pub fn load(path: &Path) -> Result<Self, PlanError> {
        let text = std::fs::read_to_string(path).map_err(|e| PlanError::Read {
            path: path.into(),
            why: e.to_string(),
        })?;
        Self::parse(path, &text)
    }

    /// The plan with the sizes that follow from its roles.
    ///
    /// # Errors
    /// If a value is not allowed.
    pub fn checked(mut self) -> Result<Self, PlanError> {
        self.apply_roles();
        self.check()?;
        self.check_memory()?;
        Ok(self)
    }

    /// Reads a plan as [`Plan::load`] does, but from a text; `path` is for messages.
    ///
    /// # Errors
    /// If its content is refused.
    pub fn parse(path: &Path, text: &str) -> Result<Self, PlanError> {
        let refused = |why: String| PlanError::Form {
            path: path.into(),
            why,
        };
        // The text is parsed separately first, so that a fault is shown at its line.
        let typed: Self = toml::from_str(text).map_err(|e| refused(e.to_string()))?;
        let mut plan = match &typed.preset {
            None => typed.clone(),
            Some(name) => {
                let mut laid = base(name)?;
                lay_over(&mut laid, read(text).map_err(refused)?);
                let laid = toml::Value::Table(laid).try_into();
                laid.map_err(|e: toml::de::Error| refused(e.to_string()))?
            }
        };
        if let Some(run) = &typed.from_run {
            record::RecordedRun::read(run)?.fill(&mut plan, text)?;
        }
        if plan.name.is_empty() {
            let stem = path.file_stem().unwrap_or_default();
            plan.name = stem.to_string_lossy().into_owned();
        }
        plan.check_typed(&read(text).map_err(refused)?)?;
        plan.checked()
    }
}

/// A text as a table.
fn read(text: &str) -> Result<toml::Table, String> {
    text.parse::<toml::Table>().map_err(|e| e.to_string())
}

/// The keys of a preset, over those of the one that it names, and so on.
fn base(name: &str) -> Result<toml::Table, PlanError> {
    let refused = |why: String| PlanError::Form {
        path: name.into(),
        why,
    };
    let own = read(preset(name)?).map_err(refused)?;
    let Some(toml::Value::String(below)) = own.get("preset") else {
        return Ok(own);
    };
    // Presets are few, and none names itself: a test reads them all.
    let mut laid = base(below)?;
    lay_over(&mut laid, own);
    Ok(laid)
}

/// Lays a table over another, key by key. A distribution is replaced as a whole.
fn lay_over(under: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(toml::Value::Table(below)), toml::Value::Table(above)) if is_section(&key) => {
                lay_over(below, above);
            }
            (_, value) => drop(under.insert(key, value)),
        }
    }
}

/// Whether a key is a table of keys.
fn is_section(key: &str) -> bool {
    let sections = [
        "run",
        "rollout",
        "episode",
        "tools",
        "scoring",
        "engines",
        "trainer",
        "weights",
        "store",
        "hops",
        "prices",
        "memory",
        "autoscale",
    ];
    sections.contains(&key)
}

#[cfg(test)]
mod tests;
