//! An engine without a model that replays the gold policy.
//!
//! Each task has a seed, and the loop asks for a turn with a seed that follows from it and the turn's number.
//! The engine finds the tokens of the turn by that seed, and looks at no prompt.

use crate::BenchError;
use sinew_env::{Action, CallNotation, EnvFactory};
use sinew_render::Renderer;
use sinew_types::{
    Engine, EngineError, EngineEvent, EngineStatus, EventSink, FinishReason, GenerateRequest,
    Message, PolicyVersion, RequestId, Role, SampledToken, Task, TensorSource, TokenId, mix_seed,
};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Most turns of a gold run that is played.
const MAX_TURNS: usize = 1000;

/// A task with the actions of its gold policy and their tokens.
struct Run {
    task: Task,
    actions: Vec<Action>,
    turns: Vec<Vec<TokenId>>,
}

/// Gold runs of some tasks.
pub(super) struct Script(Vec<Run>);

impl Script {
    /// Asks the gold policy about each task, and renders its turns as a model would write them.
    ///
    /// # Errors
    /// If an environment refuses a task, or the template cannot show a turn.
    pub(super) fn of(
        envs: &dyn EnvFactory,
        renderer: &dyn Renderer,
        tasks: Vec<Task>,
        runtime: &Runtime,
    ) -> Result<Self, BenchError> {
        let mut runs = Vec::new();
        for task in tasks {
            let actions = (0..MAX_TURNS).map_while(|turn| envs.gold(&task, turn).transpose());
            let actions: Vec<Action> = actions
                .collect::<Result<_, _>>()
                .map_err(BenchError::system)?;
            let reset = runtime.block_on(async {
                let mut env = envs.create(&task)?;
                let reset = env.reset().await;
                env.close().await?;
                reset
            });
            let reset = reset.map_err(BenchError::system)?;
            let asked = Message::new(Role::User, task.prompt.clone());
            let turn = |action: &Action| {
                let mut said = action.message();
                // Other notations have their calls in the text.
                if reset.calls != CallNotation::Template {
                    said.tool_calls.clear();
                }
                renderer.render_turn(&[asked.clone(), said], &reset.tools)
            };
            let turns = actions.iter().map(turn).collect::<Result<_, _>>();
            let turns = turns.map_err(BenchError::system)?;
            runs.push(Run {
                task,
                actions,
                turns,
            });
        }
        Ok(Self(runs))
    }

    /// The tasks.
    pub(super) fn tasks(&self) -> impl Iterator<Item = &Task> + Clone {
        self.0.iter().map(|run| &run.task)
    }

    /// The task of an episode, and the seed by which the engine finds it.
    pub(super) fn task(&self, episode: usize) -> (Task, u64) {
        let at = episode % self.0.len();
        (self.0[at].task.clone(), at as u64)
    }

    /// Tokens of the longest turn.
    pub(super) fn longest(&self) -> usize {
        let turns = self.0.iter().flat_map(|run| &run.turns);
        turns.map(Vec::len).max().unwrap_or(1)
    }

    /// Plays each run once, only in the environment; returns the steps.
    pub(super) async fn play(&self, envs: &dyn EnvFactory) -> Result<usize, BenchError> {
        let mut steps = 0;
        for run in &self.0 {
            let mut env = envs.create(&run.task).map_err(BenchError::system)?;
            env.reset().await.map_err(BenchError::system)?;
            let mut solved = false;
            for action in &run.actions {
                let step = env.step(action.clone()).await.map_err(BenchError::system)?;
                solved = step.outcome.is_some_and(|o| o.success);
                steps += 1;
            }
            env.close().await.map_err(BenchError::system)?;
            if !solved {
                let text = format!("the gold run of {} did not solve it", run.task.id);
                return Err(BenchError::system(text));
            }
        }
        Ok(steps)
    }
}

/// Engine that immediately returns the turns of a [`Script`].
pub(super) struct ScriptedEngine {
    /// Turns by the seed of their request.
    turns: HashMap<u64, Vec<SampledToken>>,
    /// Ends each turn.
    stop: TokenId,
}

impl ScriptedEngine {
    /// An engine for the turns of `script`, which end with the first stop token of `renderer`.
    pub(super) fn new(script: &Script, renderer: &dyn Renderer) -> Self {
        let token = |id: &TokenId| SampledToken {
            id: *id,
            logprob: 0.0,
            version: PolicyVersion(0),
            top: Vec::new(),
            choice: None,
        };
        let runs = (0u64..).zip(&script.0);
        let turns = runs.flat_map(|(seed, run)| {
            let turns = (1u64..).zip(&run.turns);
            turns.map(move |(turn, ids)| (mix_seed(seed, turn), ids.iter().map(token).collect()))
        });
        Self {
            turns: turns.collect(),
            stop: renderer.stop_ids().first().copied().unwrap_or_default(),
        }
    }
}

impl Engine for ScriptedEngine {
    /// Sends all tokens of the turn and its end before it returns.
    fn submit(&self, request: GenerateRequest, mut sink: EventSink) -> Result<(), EngineError> {
        let turn = self.turns.get(&request.sampling.seed);
        let tokens = turn
            .cloned()
            .ok_or_else(|| EngineError::Failed("the gold run has no such turn".into()))?;
        let request = request.id;
        sink(EngineEvent::Tokens { request, tokens });
        sink(EngineEvent::Finished {
            request,
            reason: FinishReason::StopId { id: self.stop },
            cached_prompt_tokens: 0,
            routes: None,
        });
        Ok(())
    }

    /// Requests are over when they are accepted.
    fn abort(&self, _: RequestId) {}

    fn pause(&self, _: bool) {}

    /// There are none.
    fn load_weights(&self, _: PolicyVersion, _: Arc<dyn TensorSource>) -> Result<(), EngineError> {
        Ok(())
    }

    /// Reports no waiting requests and no limit on tokens.
    fn status(&self) -> EngineStatus {
        EngineStatus::default()
    }
}
