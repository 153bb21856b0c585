//! Reward functions that are written in Python.
//!
//! The worker describes the parameters of a function when it loads it. [`PythonReward::check`] compares them
//! with the columns of the tasks before the run starts, and each call sends the parts of a sample that the
//! function reads.
//!
//! A plain function has a separate worker during a call, and runs in its main thread: a hang or a crash harms
//! no other sample, and packages that use `signal` work. A worker in which it ran code of the model scores
//! nothing else. Coroutines share a worker; a call that was lost or late because of another one is repeated
//! once, without others.

use crate::env::WorkerScore;
use crate::error::{CallError, StartError};
use crate::worker::{ALONE, COROUTINE};
use crate::workers::PythonWorkers;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_env::{GroupReward, Preference, Reward, RewardSample, Score, Unscored};
use std::time::Duration;

/// Names that a parameter can have in addition to the columns of the task.
const NAMES: [&str; 11] = [
    "task",
    "output",
    "reasoning",
    "messages",
    "calls",
    "metrics",
    "env",
    "id",
    "kind",
    "prompt",
    "seed",
];

/// Parameters of a function of several samples that all samples share.
const OF_TASK: [&str; 5] = ["task", "id", "kind", "prompt", "seed"];
/// Parameters of a function that compares two samples.
const PAIR: [&str; 2] = ["a", "b"];

/// Parameters of a function, as its worker describes them.
#[derive(Clone, Debug, Deserialize)]
struct RewardInfo {
    /// Parameters in order, without `**kwargs`.
    parameters: Vec<Parameter>,
    /// Whether it has `**kwargs`, which accepts all names.
    everything: bool,
    #[serde(rename = "async")]
    is_async: bool,
    /// Whether it has the parameter `group`.
    group: bool,
    /// Whether its module runs code of the model. Each call then has a separate worker.
    code: bool,
    /// `file:line` of the function.
    place: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Parameter {
    name: String,
    /// Whether it has no default value.
    needed: bool,
}

/// The valid name that a misspelt one means: at most a third of its letters are others, or swapped.
fn near<'a>(typed: &str, valid: &[&'a str]) -> Option<&'a str> {
    let distance = |name: &&&str| strsim::damerau_levenshtein(typed, name);
    let close = |name: &&&str| distance(name) <= (name.len() / 3).min(typed.len() / 2);
    valid.iter().filter(close).min_by_key(distance).copied()
}

/// A Python function as a reward. A plain function has a worker for itself during a call; coroutines share
/// one.
#[derive(Clone, Debug)]
pub struct PythonReward {
    workers: PythonWorkers,
    /// Index of the function among the targets of the workers.
    target: usize,
    name: String,
    /// Deadline of one call.
    timeout: Duration,
    info: RewardInfo,
}

impl PythonReward {
    /// The function that is target `target` of `workers`. `name` is for metrics.
    ///
    /// # Errors
    /// If the target is not a function.
    pub fn new(workers: PythonWorkers, target: usize, name: &str) -> Result<Self, StartError> {
        let described = workers.describe(target).clone();
        let info = serde_json::from_value(described).map_err(|e| {
            StartError::Worker(format!("{name} is not described as a function: {e}"))
        })?;
        Ok(Self {
            timeout: workers.timeout(),
            workers,
            target,
            name: name.into(),
            info,
        })
    }

    /// Returns the function with a separate deadline for each call, in place of the workers' deadline.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// True if the function compares two samples: it has the parameters `a` and `b`, and these are not
    /// columns of the tasks. It is then used as [`Preference`].
    pub fn compares(&self, columns: &[&str]) -> bool {
        let has = |name: &str| self.info.parameters.iter().any(|p| p.name == name);
        ["a", "b"].iter().all(|n| has(n) && !columns.contains(n))
    }

    /// True if the function scores a whole group: it has the parameter `group`. It is then used as
    /// [`GroupReward`].
    pub fn is_group(&self) -> bool {
        self.info.group
    }

    /// Checks that every parameter without a default has a value. `columns` are the columns of the tasks.
    ///
    /// # Errors
    /// [`StartError::Target`] with the first unknown name and all valid ones.
    pub fn check(&self, columns: &[&str]) -> Result<(), StartError> {
        let compares = self.compares(columns);
        let whole = self.info.group || compares;
        let known = |name: &str| {
            // Outputs of several samples are fields of the members.
            let own = if whole {
                OF_TASK.contains(&name)
            } else {
                NAMES.contains(&name)
            };
            let members =
                (self.info.group && name == "group") || (compares && PAIR.contains(&name));
            own || members || columns.contains(&name)
        };
        let unknown = |p: &&Parameter| p.needed && !known(&p.name);
        let Some(parameter) = self.info.parameters.iter().find(unknown) else {
            return Ok(());
        };
        let own: &[&str] = if whole { &OF_TASK } else { &NAMES };
        let mut valid: Vec<&str> = columns.iter().chain(own).copied().collect();
        valid.extend(["group", "a", "b"]);
        valid.sort_unstable();
        valid.dedup();
        let near = near(&parameter.name, &valid);
        Err(StartError::Target {
            value: self.name.clone(),
            reason: format!(
                "{}: the parameter {} is no column of the tasks{}; valid names: {}",
                self.info.place,
                parameter.name,
                near.map_or(String::new(), |n| format!(", did you mean `{n}`?")),
                valid.join(", ")
            ),
        })
    }

    /// True if the function reads a name.
    fn reads(&self, name: &str) -> bool {
        self.info.everything || self.info.parameters.iter().any(|p| p.name == name)
    }

    /// A sample with what the function reads, so that long episodes stay on the host. Members of a group and
    /// of a pair have everything.
    fn sample(&self, sample: &RewardSample, group: bool) -> Value {
        let mut sent = json!({ "task": sample.task });
        if group || self.reads("output") {
            sent["output"] = json!(sample.output);
        }
        if group || self.reads("reasoning") {
            sent["reasoning"] = json!(sample.reasoning);
        }
        if group || self.reads("messages") {
            sent["messages"] = json!(sample.messages);
        }
        if group || self.reads("calls") {
            sent["calls"] = json!(sample.calls);
        }
        if group || self.reads("metrics") {
            sent["metrics"] = json!(sample.metrics);
        }
        if group || self.reads("env") {
            let own = |name: &str| sample.metrics.get(name);
            sent["env"] = json!({
                "reward": own("env/reward"),
                "success": own("env/success").map(|success| *success > 0.0),
                "state": sample.state,
            });
        }
        sent
    }

    /// Scores of samples, one each. An error holds for all of them: the call as a whole failed.
    async fn scores(
        &self,
        samples: Vec<Value>,
        compares: bool,
    ) -> Result<Vec<Result<Score, Unscored>>, CallError> {
        let count = if compares { 1 } else { samples.len() };
        let request = json!({
            "op": "reward", "target": self.target, "samples": samples,
            "compares": compares, "timeout_s": self.timeout.as_secs_f64(),
        });
        let call = |weight| self.workers.call(request.clone(), weight, self.timeout);
        let shared = self.info.is_async && !self.info.code;
        let called = match call(if shared { COROUTINE } else { ALONE }).await {
            // The worker may have ended by the doing of another call: the call is repeated once, without
            // others.
            Err(CallError::Lost { .. }) => call(ALONE).await,
            // Another coroutine may have held the worker.
            Err(CallError::Deadline { .. }) if shared => call(ALONE).await,
            Ok(answer) if shared && answer["blocked"] == true => call(ALONE).await,
            other => other,
        };
        // User code can reach its worker: the answer may be any JSON value, and indexing one can panic.
        let mut value = called?;
        let scores = value.get_mut("scores").map(Value::take);
        let scores: Vec<WorkerScore> = serde_json::from_value(scores.unwrap_or_default())
            .map_err(|e| CallError::Protocol(format!("the answer is not as expected: {e}")))?;
        if scores.len() != count {
            let got = scores.len();
            return Err(CallError::Protocol(format!(
                "{got} scores for {count} samples"
            )));
        }
        Ok(scores.into_iter().map(WorkerScore::into_result).collect())
    }

    /// The score of a sample. The outer error is that of a call which was cut: it took too long, or ended its
    /// worker.
    ///
    /// # Errors
    /// The reason.
    pub async fn score_within(
        &self,
        sample: &RewardSample,
    ) -> Result<Result<Score, Unscored>, Unscored> {
        match self.scores(vec![self.sample(sample, false)], false).await {
            Ok(mut scores) => Ok(scores
                .pop()
                .unwrap_or_else(|| Err(Unscored::new("no score")))),
            Err(e @ (CallError::Deadline { .. } | CallError::Lost { .. })) => {
                Err(self.unscored(&e))
            }
            Err(e) => Ok(Err(self.unscored(&e))),
        }
    }

    fn unscored(&self, error: &CallError) -> Unscored {
        Unscored::new(format!("{}: {error}", self.info.place))
    }
}

impl Reward for PythonReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        Box::pin(async move { self.score_within(sample).await? })
    }
}

impl GroupReward for PythonReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score_group<'a>(
        &'a self,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Vec<Result<Score, Unscored>>> {
        Box::pin(async move {
            if samples.is_empty() {
                return Vec::new();
            }
            let sent = samples.iter().map(|s| self.sample(s, true)).collect();
            match self.scores(sent, false).await {
                Ok(scores) => scores,
                Err(e) => vec![Err(self.unscored(&e)); samples.len()],
            }
        })
    }
}

impl Preference for PythonReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn prefer<'a>(
        &'a self,
        a: &'a RewardSample,
        b: &'a RewardSample,
    ) -> BoxFuture<'a, Result<f64, Unscored>> {
        Box::pin(async move {
            let pair = vec![self.sample(a, true), self.sample(b, true)];
            let scores = self.scores(pair, true).await;
            let mut scores = scores.map_err(|e| self.unscored(&e))?;
            let score = scores
                .pop()
                .unwrap_or_else(|| Err(Unscored::new("no answer")));
            score.map(|s| s.value)
        })
    }
}
