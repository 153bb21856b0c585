//! The keys of `python` in a recipe.

use crate::code::PythonCode;
use crate::env::PythonEnvFactory;
use crate::error::StartError;
use crate::images::TaskImages;
use crate::target::{Target, TargetKind};
use crate::tasks::SplitTasks;
use crate::workers::{PythonWorkers, WorkersConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, Needs, Sandboxes, SimulatedUser, TaskImage,
    Taskset, TasksetError,
};
use sinew_sandbox::SandboxSpec;
use sinew_types::Gives;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The environment of the registry.
pub static KIND: EnvKind = EnvKind::new::<Python>(
    "python",
    "a class of yours in Python, in sandboxed worker processes",
    Needs {
        sandbox: true,
        alphabet: None,
        rows: true,
        tasks: false,
        reward: false,
    },
);

/// The parts of the run that workers get.
#[derive(Default)]
struct Surroundings {
    /// Limits of a worker.
    spec: SandboxSpec,
    /// Images that tasks may name.
    images: BTreeMap<String, TaskImage>,
    /// Simulated user that the class may ask.
    user: Option<Arc<dyn SimulatedUser>>,
}

/// Keys of `[env] type = "python"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Python {
    /// The class: `my_env.py:MyEnv`, or `package.module:MyEnv`. Paths are relative to the current folder.
    pub module: String,
    /// Worker processes.
    #[serde(default = "default_workers")]
    #[schemars(range(min = 1, max = 256))]
    pub workers: usize,
    /// Episodes of one worker at once. 1 isolates episodes from each other.
    #[serde(default = "default_sessions")]
    #[schemars(range(min = 1, max = 10_000))]
    pub sessions_per_worker: usize,
    /// Deadline of one call of a method, in seconds.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub timeout_s: f64,
    /// Deadline of the start of a worker with its imports, in seconds.
    #[serde(default = "default_startup")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub startup_timeout_s: f64,
    /// Python interpreter, whose packages the class can import: a path, or a name in `PATH`.
    #[serde(default = "default_python")]
    pub python: String,
    /// Python interpreter in each image of `sandbox.images`, as a path there, such as
    /// `/opt/miniconda3/bin/python3`. Empty: `python3` in `/usr/bin`, `/usr/local/bin` or `/bin`.
    #[serde(default)]
    pub image_python: String,
    /// Attributes of the class to set before it is used, such as `{ rooms = 5 }`. Each must exist, with a
    /// value of the same type.
    #[serde(default)]
    pub options: Map<String, Value>,
}

/// Processes.
fn default_workers() -> usize {
    4
}

/// Episodes of one process.
fn default_sessions() -> usize {
    256
}

/// Seconds for one call.
fn default_timeout() -> f64 {
    30.0
}

/// Seconds for a start with its imports.
fn default_startup() -> f64 {
    60.0
}

fn default_python() -> String {
    "python3".into()
}

/// Refuses the value of a key.
///
/// # Errors
/// Always.
pub fn refuse_key(key: &'static str, value: String, reason: &str) -> Result<(), KeyError> {
    let reason = reason.into();
    Err(KeyError { key, value, reason })
}

/// Checks deadlines in seconds, by their keys.
///
/// # Errors
/// The first that is not within 0.01 seconds and a day.
pub fn check_timeouts(timeouts: &[(&'static str, f64)]) -> Result<(), KeyError> {
    let wrong = timeouts.iter().find(|t| !(0.01..=86_400.0).contains(&t.1));
    wrong.map_or(Ok(()), |(key, seconds)| {
        Err(KeyError {
            key,
            value: seconds.to_string(),
            reason: "allowed: 0.01 to 86400 seconds".into(),
        })
    })
}

impl Python {
    /// The keys of a class with their defaults.
    pub fn new(module: &str) -> Self {
        Self {
            module: module.into(),
            workers: default_workers(),
            sessions_per_worker: default_sessions(),
            timeout_s: default_timeout(),
            startup_timeout_s: default_startup(),
            python: default_python(),
            image_python: String::new(),
            options: Map::new(),
        }
    }

    /// Starts workers at the process level. `sandboxes` give the limits; the workers have a separate
    /// provider, which shows them the module and the interpreter's packages.
    ///
    /// # Errors
    /// If the class does not load, or `sandboxes` are of another level.
    pub fn workers(&self, sandboxes: Option<Sandboxes>) -> Result<PythonWorkers, StartError> {
        let level = sandboxes.as_ref().map_or("process", |s| s.provider.level());
        if level != "process" {
            return Err(StartError::Config {
                field: "sandbox.level",
                value: level.into(),
                allowed: "env.type = \"python\" runs at level \"process\"".into(),
            });
        }
        let surroundings = sandboxes.map_or_else(Default::default, |s| Surroundings {
            spec: s.spec,
            images: s.images,
            user: s.user,
        });
        self.start(self.workers, surroundings)
    }

    /// `workers` processes with these limits, which may load these images and ask this user.
    fn start(
        &self,
        workers: usize,
        surroundings: Surroundings,
    ) -> Result<PythonWorkers, StartError> {
        let Surroundings { spec, images, user } = surroundings;
        let target = Target::parse(&self.module, TargetKind::Env, Path::new("."))?;
        let target = target.with_options(self.options.clone());
        let search = std::env::var("PATH").unwrap_or_default();
        let code = PythonCode::find(&[target], &self.python, &search)?;
        // All may be replaced at the same moment, and a dead one leaves after its successor has come.
        let provider = code.process_provider(2 * workers)?;
        let mut config = WorkersConfig::new(provider);
        config.spec = spec;
        config.images = TaskImages {
            images,
            python: self.image_python.clone(),
        };
        config.user = user;
        config.workers = workers;
        config.sessions_per_worker = self.sessions_per_worker;
        config.timeout = Duration::from_secs_f64(self.timeout_s);
        config.startup_timeout = Duration::from_secs_f64(self.startup_timeout_s);
        PythonWorkers::start(config, code)
    }
}

impl EnvConfig for Python {
    fn check(&self) -> Result<(), KeyError> {
        if !self.module.contains(':') {
            let reason = "allowed: a file and a class, as in \"my_env.py:MyEnv\"";
            return refuse_key("module", format!("{:?}", self.module), reason);
        }
        if !(1..=256).contains(&self.workers) {
            return refuse_key("workers", self.workers.to_string(), "allowed: 1 to 256");
        }
        if !(1..=10_000).contains(&self.sessions_per_worker) {
            let value = self.sessions_per_worker.to_string();
            return refuse_key("sessions_per_worker", value, "allowed: 1 to 10000");
        }
        if !self.image_python.is_empty() && !self.image_python.starts_with('/') {
            let reason = "allowed: a path in the images that begins with /";
            return refuse_key("image_python", format!("{:?}", self.image_python), reason);
        }
        check_timeouts(&[
            ("timeout_s", self.timeout_s),
            ("startup_timeout_s", self.startup_timeout_s),
        ])
    }

    /// Rows of the class's own `tasks`, read by a worker that ends at once.
    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        self.taskset_within(seed, &SandboxSpec::default())
    }

    fn taskset_within(
        &self,
        seed: u64,
        limits: &SandboxSpec,
    ) -> Result<Arc<dyn Taskset>, TasksetError> {
        let surroundings = Surroundings {
            spec: limits.clone(),
            ..Surroundings::default()
        };
        let workers = self.start(1, surroundings);
        let workers = workers.map_err(|e| TasksetError::Config {
            taskset: self.module.clone(),
            field: "env.module",
            value: self.module.clone(),
            allowed: e.to_string(),
        })?;
        let tasks = SplitTasks::of_class(&workers, 0, &self.module, seed)?;
        Ok(Arc::new(tasks))
    }

    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        let failed = |e: StartError| EnvError::Worker(e.to_string());
        let workers = self.workers(sandboxes).map_err(failed)?;
        let factory = PythonEnvFactory::new(workers, 0, &self.module).map_err(failed)?;
        Ok(Arc::new(factory))
    }

    /// The class decides, and describes itself when its workers start.
    fn gives(&self) -> Gives {
        Gives::MAYBE
    }

    fn task_images(&self) -> bool {
        true
    }

    /// The folder of the module.
    fn shows(&self) -> Vec<PathBuf> {
        let target = Target::parse(&self.module, TargetKind::Env, Path::new("."));
        let folder = target.ok().and_then(|t| t.folder().map(Path::to_path_buf));
        folder.into_iter().collect()
    }
}
