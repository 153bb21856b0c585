//! Environments whose actions are calls of tools: the part that all of them share.
//!
//! A [`ToolWorld`] answers one call after the other; [`ToolEnv`] makes an [`Env`] of it. The calls of a turn
//! are answered in their order, until one ends the episode. A turn without a call and a call with wrong
//! arguments are errors that the model sees. The number of calls is limited: after the last one the episode
//! is scored as it stands.

use crate::counts::Counts;
use crate::port::{
    Action, CallNotation, Env, EnvError, EnvFuture, Observation, ResetResult, StepResult,
};
use crate::rng::hash64;
use crate::turn::Turn;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sinew_types::{Content, Message, Outcome, ToolCall, ToolSpec};

/// What a call gave: an observation, or the text of an error of the model.
pub type Answer = Result<Content, String>;

/// The world of one episode with tools.
pub trait ToolWorld: Send {
    /// Starts the episode. Returns its first messages and its tools.
    fn start(&mut self) -> EnvFuture<'_, (Vec<Message>, Vec<ToolSpec>)>;

    /// Answers a call.
    fn call<'a>(&'a mut self, call: &'a ToolCall) -> EnvFuture<'a, Answer>;

    /// True if the last call ended the episode.
    fn ended(&self) -> bool;

    /// Hash of the state. `None`: the hash of all calls and answers stands for it.
    fn state(&self) -> Option<u64> {
        None
    }

    /// Score of the episode as it stands. Metrics of calls are added to it.
    fn outcome(&self) -> Outcome;

    /// Releases all resources.
    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A tool for the model. `properties` are JSON Schemas by name; those that `required` names are.
pub fn tool(name: &str, description: &str, properties: Value, required: &[&str]) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: description.into(),
        parameters: json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        }),
    }
}

/// The arguments of a call.
///
/// # Errors
/// What is wrong with them, for the model.
pub fn arguments<T: DeserializeOwned>(call: &ToolCall) -> Result<T, String> {
    serde_json::from_value(call.arguments.clone())
        .map_err(|e| format!("arguments of {}: {e}", call.name))
}

/// The answer to a call of a tool that is not there.
pub fn no_such_tool(call: &ToolCall, tools: &[&str]) -> String {
    let known = tools.join(", ");
    format!("there is no tool {}; the tools are: {known}", call.name)
}

/// Phase of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has not begun.
    New,
    /// Calls are answered.
    Open,
    /// It has a score, or was closed.
    Ended,
}

/// One episode of a [`ToolWorld`].
#[derive(Debug)]
pub struct ToolEnv<W> {
    /// What answers.
    world: W,
    /// Where the episode is.
    phase: Phase,
    /// Turns, calls and errors.
    counts: Counts,
    /// Calls that may still be made.
    left: u32,
    /// Hash of all that was said.
    history: u64,
    /// Messages of the last observation.
    last: Vec<Message>,
}

impl<W: ToolWorld> ToolEnv<W> {
    /// An episode of at most `max_calls` calls.
    pub fn new(world: W, max_calls: u32) -> Self {
        Self {
            world,
            phase: Phase::New,
            counts: Counts::default(),
            left: max_calls,
            history: 0,
            last: Vec::new(),
        }
    }

    /// The world, between its calls.
    pub fn world(&self) -> &W {
        &self.world
    }

    /// Hash of the state, by the world or by history.
    fn hash(&self) -> Option<u64> {
        Some(self.world.state().unwrap_or(self.history))
    }

    /// Adds a text to the history.
    fn seen(&mut self, text: &str) {
        self.history = hash64(format!("{:016x}{text}", self.history).as_bytes());
    }

    /// The world's score with the counts of calls.
    fn outcome(&self) -> Outcome {
        let mut outcome = self.world.outcome();
        let success = f64::from(u8::from(outcome.success));
        outcome.metrics.entry("success".into()).or_insert(success);
        self.counts.add_to(&mut outcome);
        outcome
    }

    /// Starts the world, once.
    async fn begin(&mut self) -> Result<ResetResult, EnvError> {
        if self.phase != Phase::New {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let (messages, tools) = self.world.start().await?;
        self.phase = Phase::Open;
        for message in &messages {
            self.seen(&message.content.to_string());
        }
        Ok(ResetResult {
            messages,
            tools,
            calls: CallNotation::Template,
            state_hash: self.hash(),
        })
    }

    /// Answers the calls of a turn, up to the end of the episode.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if self.phase != Phase::Open {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        let mut turn = Turn::default();
        for call in &action.tool_calls {
            if self.left == 0 || self.world.ended() {
                break;
            }
            self.left -= 1;
            let answer = self.world.call(call).await?;
            self.seen(&format!("{}{}{answer:?}", call.name, call.arguments));
            turn.answered(call, answer);
        }
        turn.done = self.world.ended() || self.left == 0;
        turn.notation(&action);
        if action.tool_calls.is_empty() && action.call_error.is_none() && !turn.done {
            turn.said(Err("call a tool; text alone does nothing".to_owned()));
        }
        self.counts.turn(&action, turn.errors);
        if turn.done {
            self.phase = Phase::Ended;
            return Ok(StepResult {
                observation: None,
                process_reward: 0.0,
                done: true,
                outcome: Some(self.outcome()),
                state_hash: None,
            });
        }
        let step = turn.step(self.hash());
        self.last = turn.messages;
        Ok(step)
    }
}

impl<W: ToolWorld> Env for ToolEnv<W> {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(self.begin())
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    /// One message for each call of the last turn. `observation` is the last one.
    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        self.last.clone()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(std::future::ready(Ok(self.outcome())))
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        self.phase = Phase::Ended;
        self.world.close()
    }
}
