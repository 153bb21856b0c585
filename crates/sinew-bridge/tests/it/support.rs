//! Workers with code that a test writes.

use serde_json::{Value, json};
use sinew_bridge::{
    PythonCode, PythonEnvFactory, PythonReward, PythonWorkers, StartError, Target, TargetKind,
    WorkersConfig,
};
use sinew_env::{Action, Env, EnvFactory, RewardSample, StepResult};
use sinew_types::{Message, Role, Task, TaskId, ToolCall};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Sizes of a pool for tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) workers: usize,
    pub(crate) sessions: usize,
    pub(crate) timeout_s: f64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            workers: 1,
            sessions: 64,
            timeout_s: 60.0,
        }
    }
}

impl Sizes {
    /// Sizes with a deadline of calls.
    pub(crate) fn within(timeout_s: f64) -> Self {
        Self {
            timeout_s,
            ..Self::default()
        }
    }
}

/// A folder that sandboxes can read: they have separate users.
pub(crate) fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

pub(crate) fn in_folder(
    folder: &Path,
    text: &str,
    kind: TargetKind,
    sizes: Sizes,
) -> Result<PythonWorkers, StartError> {
    let target = Target::parse(text, kind, folder)?;
    let code = PythonCode::find(&[target], "python3", &std::env::var("PATH").unwrap())?;
    let mut config = WorkersConfig::new(code.process_provider(sizes.workers + 1)?);
    config.workers = sizes.workers;
    config.sessions_per_worker = sizes.sessions;
    config.timeout = Duration::from_secs_f64(sizes.timeout_s);
    PythonWorkers::start(config, code)
}

/// Workers with one target of a module that holds `source`. The folder lives as long as they are used.
pub(crate) fn workers(
    source: &str,
    (kind, name): (TargetKind, &str),
    sizes: Sizes,
) -> Result<(PythonWorkers, TempDir), StartError> {
    let dir = folder();
    std::fs::write(dir.path().join("user.py"), source).unwrap();
    let workers = in_folder(dir.path(), &format!("user.py:{name}"), kind, sizes)?;
    Ok((workers, dir))
}

/// A factory of the class `E` of a module that holds `source`.
pub(crate) fn factory(source: &str, sizes: Sizes) -> (PythonEnvFactory, TempDir) {
    let (workers, dir) = workers(source, (TargetKind::Env, "E"), sizes).unwrap();
    (PythonEnvFactory::new(workers, 0, "user.py:E").unwrap(), dir)
}

/// The function `f` of a module that holds `source`.
pub(crate) fn reward(source: &str, sizes: Sizes) -> (PythonReward, TempDir) {
    let (workers, dir) = workers(source, (TargetKind::Reward, "f"), sizes).unwrap();
    (PythonReward::new(workers, 0, "user.py:f").unwrap(), dir)
}

/// An episode that has begun.
pub(crate) async fn open(factory: &PythonEnvFactory) -> Box<dyn Env> {
    let mut env = factory.create(&task(json!({}))).unwrap();
    env.reset().await.unwrap();
    env
}

pub(crate) fn task(data: Value) -> Task {
    Task {
        id: TaskId::new("t0"),
        kind: "test".into(),
        preamble: Vec::new(),
        prompt: "Buy tea.".into(),
        data,
        seed: 7,
    }
}

pub(crate) fn call(id: &str, name: &str, arguments: Value) -> ToolCall {
    ToolCall {
        id: id.into(),
        name: name.into(),
        arguments,
    }
}

/// A turn with calls.
pub(crate) fn calls(calls: Vec<ToolCall>) -> Action {
    Action {
        tool_calls: calls,
        ..Action::say("")
    }
}

pub(crate) fn sample(output: &str, data: Value) -> RewardSample {
    RewardSample {
        messages: vec![
            Message::new(Role::User, "Buy tea."),
            Message::new(Role::Assistant, output),
        ],
        calls: vec![call("c0", "add", json!({"item": "tea"}))],
        metrics: [("turns".to_owned(), 2.0)].into(),
        ..RewardSample::new(task(data), output)
    }
}

/// Plays the turns of one episode. Returns the last step.
pub(crate) async fn play(factory: &dyn EnvFactory, turns: Vec<Action>) -> StepResult {
    let mut env = factory.create(&task(json!({}))).unwrap();
    env.reset().await.unwrap();
    let mut last = None;
    for turn in turns {
        last = Some(env.step(turn).await.unwrap());
    }
    env.close().await.unwrap();
    last.unwrap()
}
