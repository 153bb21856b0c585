//! Harness of agent programs: the program drives the turns by calling a model server.
//!
//! Each episode is one rollout of the model server and one run of the program, in a sandbox that can reach
//! only this server. The program receives base URL, key and task in environment variables. Its answer is the
//! value that a function returns, or the last line that it prints; the environment grades it. A program that
//! is trusted with its own score returns or prints the score as JSON in place of the answer, or posts it with
//! its key.
//!
//! | what happened | end of the episode |
//! |---|---|
//! | exit code 0, or the time was up | as the rollout ended; the answer is graded |
//! | a limit of the rollout, then any exit | truncated; the answer is graded |
//! | any other exit, or no turn of the model | failed, as the harness's |
//! | the sandbox failed | failed, as the sandbox's |
//! | no grade in time | failed, as the environment's |
//!
//! The answer of a program that is trusted with its own score is not graded: the reported score is used.
//! The answer of a coding agent is its last message, read from its own form of output; an end by a limit of
//! its own truncates the episode.
//!
//! A program runs in the world of its episode where the environment has a place for it (`hosted`).

mod hosted;

use super::error::ProgramError;
use super::model_server::ModelServer;
use super::programs::Programs;
use super::report;
use super::sandboxed::{ProgramEnd, tail};
use super::{Harness, grade_answer};
use crate::episode::EpisodeSpec;
use crate::gauges::{Phase, unix_s};
use crate::parts::{EpisodeOptions, EpisodeParts};
use futures::future::BoxFuture;
use sinew_agents::AgentEnd;
use sinew_env::EnvError;
use sinew_sandbox::{Ending, SandboxError, owned};
use sinew_types::{
    EpisodeEnd, FailureKind, Limit, Message, Node, NodeId, Role, Timing, TokenKind, Trace,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Metrics that an environment computes about its own tool.
const OF_THE_TOOL: [&str; 3] = ["tool_calls", "tool_errors", "used_tool"];

/// Metric of episodes that did not fail: 1 if the program ended with an error after a limit cut the episode.
/// Its mean is the share of such programs.
const PROGRAM_FAILED: &str = "program_failed";

/// Maximum size of a task, in bytes. Linux limits one environment variable to 128 KiB.
const MAX_TASK_BYTES: usize = 96 << 10;

/// Runs a program for each episode.
///
/// The program's exit code does not affect the reward: it must be 0, and the environment grades the answer. A
/// program that a limit of its rollout cut also has an answer, if it printed one.
pub struct ProgramHarness {
    programs: Programs,
    server: Arc<dyn ModelServer>,
}

sinew_types::debug_fields!(ProgramHarness, programs);

/// Kind and reason of an episode that has no trace.
pub(super) type Refusal = (FailureKind, String);

/// Builds the refusal for a mistake of the harness, such as a task that is too long.
pub(super) fn harness(e: &dyn std::fmt::Display) -> Refusal {
    (FailureKind::Harness, e.to_string())
}

/// The refusal for an error of the environment.
fn environment(e: &EnvError) -> Refusal {
    (e.failure_kind(), e.to_string())
}

/// Waits for the environment to do `what`.
async fn within<T>(
    time: Duration,
    what: &str,
    call: impl Future<Output = Result<T, EnvError>>,
) -> Result<T, Refusal> {
    match tokio::time::timeout(time, call).await {
        Ok(done) => done.map_err(|e| environment(&e)),
        Err(_) => Err((
            FailureKind::Environment,
            format!("the environment did not {what} in time"),
        )),
    }
}

/// Ends an episode as failed.
pub(super) fn fail(trace: &mut Trace, (kind, message): Refusal) {
    trace.end = EpisodeEnd::Failed { kind, message };
}

impl Harness for ProgramHarness {
    fn name(&self) -> &str {
        "command"
    }

    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace> {
        let episode = self.episode(parts, options, spec);
        Box::pin(traced(parts, options, spec, episode))
    }
}

impl ProgramHarness {
    /// Creates the harness. `programs` must have been made for the address of `server`.
    pub fn new(programs: Programs, server: Arc<dyn ModelServer>) -> Self {
        Self { programs, server }
    }

    /// Refuses a task that is too large for a program.
    fn check_size(&self, spec: &EpisodeSpec) -> Result<(), Refusal> {
        let data = if self.programs.agent_scores() {
            spec.task.data.to_string().len()
        } else {
            0
        };
        let bytes = spec.task.prompt.len().max(data);
        if bytes > MAX_TASK_BYTES {
            return Err(harness(&format!(
                "the task has {bytes} bytes, a program takes {MAX_TASK_BYTES}"
            )));
        }
        Ok(())
    }

    /// Runs one episode: opens a rollout, runs the program, finishes the rollout, and grades the answer.
    ///
    /// The time of the program is the shorter of its own limit and that of the episode. An open rollout is
    /// always finished, so that it does not stay open at the model server.
    async fn episode(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<Trace, Refusal> {
        let graded = !self.programs.agent_scores();
        if graded && parts.envs.hosts_programs(&spec.task) {
            let hosted = Box::pin(self.hosted(parts, options, spec));
            return owned(spec.episode.as_str(), hosted).await;
        }
        self.check_size(spec)?;
        let access = self.server.open(parts, options, spec);
        let access = access.map_err(|e| harness(&e))?;
        let limit = self.programs.timeout().min(options.timeout);
        let ended = {
            let deadline = Some(tokio::time::Instant::now() + limit);
            let _in_phase = parts.gauges.enter(&spec.episode, Phase::Tool, deadline);
            let (url, key) = (&access.base_url, &access.api_key);
            self.programs.run(url, key, &spec.task, limit).await
        };
        let cut = matches!(&ended, Ok(e) if e.ending == Ending::Timeout);
        let end = cut.then_some(EpisodeEnd::Truncated {
            limit: Limit::WallTime,
        });
        let why = match &ended {
            Ok(ended) if self.programs.agent_scores() => {
                let said = match &ended.value {
                    Some(value) => Some(value.clone()),
                    None => {
                        last_line(&ended.stdout).and_then(|l| sinew_types::json::from_str(l).ok())
                    }
                };
                report::hand_over(self.server.as_ref(), &spec.episode, said.as_ref())
            }
            _ => None,
        };
        let trace = self.server.finish(&spec.episode, end).await;
        let mut trace = trace.map_err(|e| harness(&e))?;
        let ended = match ended {
            Ok(ended) => ended,
            Err(ProgramError::Sandbox(e)) => return Err((sandbox_kind(&e), e.to_string())),
            Err(e) => return Err(harness(&e)),
        };
        let told = agent_end(&self.programs, &ended, &mut trace);
        if let Some(why) = failure(&ended, told.as_ref(), &trace) {
            fail(&mut trace, harness(&why));
            return Ok(trace);
        }
        // After a cut the exit may be the refusal of the next call, or a fault of the program.
        let failed = f64::from(u8::from(bad_exit(&ended).is_some()));
        let metrics = &mut trace.outcome.metrics;
        metrics.insert(PROGRAM_FAILED.to_owned(), failed);
        if self.programs.agent_scores() {
            report::explain(&mut trace, why);
            return Ok(trace);
        }
        let answer = answer(&ended, told.as_ref(), &trace);
        grade(parts, spec, options.score_timeout, &mut trace, &answer).await;
        Ok(trace)
    }
}

/// Reads the end of a coding agent; `None` for another program. A limit of its own truncates the episode.
fn agent_end(programs: &Programs, ended: &ProgramEnd, trace: &mut Trace) -> Option<AgentEnd> {
    let told = programs.agent()?.end(&ended.stdout);
    if told.cut && trace.end == EpisodeEnd::Terminated {
        trace.end = EpisodeEnd::Truncated {
            limit: Limit::Turns,
        };
    }
    Some(told)
}

/// Returns the messages on the path to the last turn: prompt, turns and observations in order.
fn messages(trace: &Trace) -> Vec<Message> {
    let sampled = |n: &&Node| n.kind == TokenKind::Sampled;
    let Some(last) = trace.nodes.iter().rposition(|n| sampled(&n)) else {
        return Vec::new();
    };
    let path = trace.path(last as NodeId);
    let nodes = path
        .into_iter()
        .filter_map(|id| trace.nodes.get(id as usize));
    nodes.flat_map(|node| node.messages.clone()).collect()
}

/// Returns the environment's outcome, with the metrics of the model server.
///
/// Metrics of the model server replace those of the same name. If the environment fails or does not answer
/// within `limit`, the episode counts as failed and is not scored with 0.
pub(super) async fn grade(
    parts: &EpisodeParts,
    spec: &EpisodeSpec,
    limit: Duration,
    trace: &mut Trace,
    answer: &str,
) {
    let deadline = Some(tokio::time::Instant::now() + limit);
    let _in_phase = parts.gauges.enter(&spec.episode, Phase::Score, deadline);
    let said = (messages(trace), answer);
    let graded = grade_answer(parts.envs.as_ref(), &spec.task, said);
    match within(limit, "grade the answer", graded).await {
        Ok(outcome) => {
            let measured = std::mem::take(&mut trace.outcome.metrics);
            trace.outcome = outcome;
            // The environment saw only the answer: metrics of its tool are not those of the program's tools.
            let metrics = &mut trace.outcome.metrics;
            metrics.retain(|name, _| !OF_THE_TOOL.contains(&name.as_str()));
            trace.outcome.metrics.extend(measured);
            trace.outcome.answer = Some(answer.to_owned());
        }
        Err(refusal) => fail(trace, refusal),
    }
}

/// Returns the kind of a sandbox failure: the harness's, if the sandbox refused to start the program, and
/// otherwise the sandbox's.
fn sandbox_kind(e: &SandboxError) -> FailureKind {
    match e {
        SandboxError::Request { .. } => FailureKind::Harness,
        _ => FailureKind::Sandbox,
    }
}

/// Describes the exit of a program that ended with an error; `None` if it was stopped at its time limit.
fn bad_exit(ended: &ProgramEnd) -> Option<String> {
    match ended.ending {
        Ending::Exited { code: 0 } | Ending::Timeout => None,
        Ending::Exited { code } => Some(format!("exit code {code}")),
        other => Some(other.to_string()),
    }
}

/// Returns the reason why an episode counts as failed, if it does. A program that gave up because a limit of
/// its rollout refused its call was cut, not failed.
fn failure(ended: &ProgramEnd, told: Option<&AgentEnd>, trace: &Trace) -> Option<String> {
    let cut = matches!(trace.end, EpisodeEnd::Truncated { .. });
    let why = bad_exit(ended).filter(|_| !cut);
    let sampled = trace.sampled_tokens() > 0;
    let fault = told.and_then(|told| told.fault.clone());
    let said = fault.unwrap_or_else(|| tail(&ended.stderr));
    match why {
        Some(why) => Some(format!("the program ended badly ({why}): {said}")),
        None if !sampled => Some(format!(
            "the program ended without an answer of the model ({}; does its client use OPENAI_BASE_URL?): {said}",
            ended.ending,
        )),
        None => None,
    }
}

/// Returns the last non-empty line of a program's output.
fn last_line(stdout: &str) -> Option<&str> {
    stdout.lines().map(str::trim).rfind(|l| !l.is_empty())
}

/// Returns the answer: the value of a function, else the last message of a coding agent or the last line of
/// another program, else the last message of the model; empty if there is none. The printed output of a
/// function is not an answer, because processes that it started can print, too.
fn answer(ended: &ProgramEnd, told: Option<&AgentEnd>, trace: &Trace) -> String {
    let printed = match (&ended.value, told) {
        (Some(serde_json::Value::String(text)), _) => return text.clone(),
        (Some(serde_json::Value::Null), _) => None,
        (Some(value), _) => return value.to_string(),
        (None, Some(told)) => told.answer.clone(),
        (None, None) => last_line(&ended.stdout).map(str::to_owned),
    };
    if let Some(printed) = printed {
        return printed;
    }
    let said = trace
        .nodes
        .iter()
        .rev()
        .flat_map(|n| n.messages.iter().rev());
    said.filter(|m| m.role == Role::Assistant)
        .map(|m| m.content.text().into_owned())
        .next()
        .unwrap_or_default()
}

/// Runs an episode to its trace. If it has none, the trace is that of a failed episode without turns, whose
/// start is computed back from the present time.
pub(super) async fn traced(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    spec: &EpisodeSpec,
    episode: impl Future<Output = Result<Trace, Refusal>>,
) -> Trace {
    let started = Instant::now();
    let refusal = match episode.await {
        Ok(trace) => return trace,
        Err(refusal) => refusal,
    };
    let (now_s, total_s) = (unix_s(), started.elapsed().as_secs_f64());
    let mut trace = spec.empty_trace(&parts.run, &options.turn_sampling());
    fail(&mut trace, refusal);
    trace.timing = Timing {
        started_unix_s: now_s - total_s,
        total_s,
        ..Timing::default()
    };
    trace
}

#[cfg(test)]
mod tests;
