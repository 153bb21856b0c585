//! Harnesses, which drive the turns of an episode: the built-in loop, an agent program, or a service.
//!
//! A program runs in a sandbox and calls a [`ModelServer`], which captures its tokens ([`ProgramHarness`]).
//! It sees neither the environment nor the trace; the environment grades its answer afterwards, unless the
//! program is trusted with its own score ([`AgentReport`]). A service is already running, and receives its
//! tasks over HTTP ([`ServiceHarness`]).

mod command;
mod error;
mod fork_server;
mod forward;
mod model_server;
mod program;
mod programs;
mod report;
mod sandboxed;
mod service;

pub use command::ProgramCommand;
pub use error::{ModelServerError, ProgramError};
pub use model_server::{AgentReport, ModelAccess, ModelServer};
pub use program::ProgramHarness;
pub use programs::{ProgramConfig, Programs};
pub use service::{ServiceConfig, ServiceHarness};

use crate::action;
use crate::admission::{Admission, AdmissionConfig};
use crate::driver::{CLOSE_TIMEOUT, run_episode};
use crate::episode::EpisodeSpec;
use crate::outlook::TurnOrder;
use crate::parts::{EpisodeOptions, EpisodeParts, Harness};
use futures::future::BoxFuture;
use sinew_env::{Env, EnvError, EnvFactory};
use sinew_render::Renderer;
use sinew_types::{Engine, Message, Outcome, Task, Trace};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The built-in loop, which takes the turns of the environment, see [`run_episode`].
#[derive(Clone, Copy, Debug, Default)]
pub struct BuiltInLoop;

impl Harness for BuiltInLoop {
    fn name(&self) -> &str {
        "built_in"
    }

    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace> {
        Box::pin(run_episode(parts, options, spec))
    }
}

impl EpisodeParts {
    /// Creates the parts of a new run: the built-in loop, admission with the settings `bounds`, and a
    /// separate source of request ids.
    pub fn new(
        engine: Arc<dyn Engine>,
        renderer: Arc<dyn Renderer>,
        envs: Arc<dyn EnvFactory>,
        bounds: AdmissionConfig,
    ) -> Self {
        Self {
            admission: Admission::new(bounds, Arc::clone(&engine)),
            engine,
            renderer,
            envs,
            harness: Arc::new(BuiltInLoop),
            gauges: Arc::default(),
            outlook: None,
            turn_order: TurnOrder::default(),
            sandbox_wait: Arc::default(),
            in_flight: None,
            requests: Arc::new(AtomicU64::new(1)),
            run: Arc::default(),
        }
    }
}

/// Grades a final answer: a new environment of the task receives it as the only turn of the model. An answer
/// that does not end the task is scored as it is. Rewards receive `messages`, the messages of the whole
/// episode; if these are empty, they receive the prompt and the answer.
///
/// # Errors
/// If the environment fails; a wrong answer is an outcome.
pub async fn grade_answer(
    envs: &dyn EnvFactory,
    task: &Task,
    (messages, answer): (Vec<Message>, &str),
) -> Result<Outcome, EnvError> {
    let mut env = envs.create(task)?;
    let graded = grade(env.as_mut(), messages, answer).await;
    let closed = tokio::time::timeout(CLOSE_TIMEOUT, env.close()).await;
    if !matches!(closed, Ok(Ok(()))) {
        tracing::warn!(task = %task.id, ?closed, "environment did not close");
    }
    graded
}

async fn grade(
    env: &mut dyn Env,
    messages: Vec<Message>,
    answer: &str,
) -> Result<Outcome, EnvError> {
    let reset = env.reset().await?;
    env.played(messages);
    let action = action::of_answer(&reset.calls, answer);
    match env.step(action).await?.outcome {
        Some(outcome) => Ok(outcome),
        None => env.score().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::tiny::{TinyFactory, TinyTaskset};
    use sinew_env::{Split, Taskset};

    #[tokio::test]
    async fn an_answer_is_the_one_turn_of_a_fresh_world() {
        let tasks = TinyTaskset::new(0);
        let near = (0..tasks.len(Split::Train))
            .map(|i| tasks.get(Split::Train, i).unwrap())
            .find(|t| t.kind == "corridor-1")
            .unwrap();
        let right = if near.prompt.contains('>') { "r" } else { "l" };
        let wrong = if right == "r" { "l" } else { "r" };
        let graded = grade_answer(&TinyFactory, &near, (Vec::new(), right))
            .await
            .unwrap();
        assert!(graded.success);
        for answer in [wrong, ""] {
            let graded = grade_answer(&TinyFactory, &near, (Vec::new(), answer))
                .await
                .unwrap();
            assert_eq!((graded.success, graded.reward), (false, 0.0));
        }
    }
}
