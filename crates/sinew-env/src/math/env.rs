//! Environment for math tasks: a question, a Python tool and a final answer.
//!
//! A turn is a tool call (at its end), an answer (`Answer: number`), or malformed. A call is written as
//! `<tool>code</tool>`, or in the format of the model's chat template ([`Calls`]). The episode continues
//! after a call or a malformed turn, until the turn limit. An answer ends it. Only a number in the model's
//! own last message counts, not the tool's output.

use super::answer::{final_answer, same_number};
use super::prompt::{Calls, Mistake, PromptConfig, TAG, TOOL, answer_text, call_text, tool_call};
use super::python;
use crate::port::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture,
    Observation, ResetResult, StepResult,
};
use crate::registry::turn_rewards;
use crate::rng::hash64;
use serde::{Deserialize, Serialize};

use sinew_sandbox::{Sandbox, SandboxProvider, SandboxSpec};
use sinew_types::{Gives, InputPresence, Message, Outcome, Task};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Maximum process reward. It must not outweigh a correct answer, which gives 1.
pub(super) const MAX_PROCESS_REWARD: f64 = 0.1;

/// Rewards and limits of episodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToolMathConfig {
    /// Messages before the question.
    pub prompt: PromptConfig,
    /// Reward for the first tool call of an episode that runs without an error, 0 to 0.1.
    pub process_reward: f64,
    /// Wall seconds of one tool call, 0.1 to 600.
    pub tool_timeout_s: f64,
}

impl Default for ToolMathConfig {
    fn default() -> Self {
        Self {
            prompt: PromptConfig::default(),
            process_reward: 0.05,
            tool_timeout_s: 5.0,
        }
    }
}

/// Data of an episode that algorithms can read.
pub(super) fn gives(process_reward: f64) -> Gives {
    Gives {
        states: InputPresence::Yes,
        turn_rewards: turn_rewards(process_reward),
        tool_counts: InputPresence::Yes,
        format_penalty: InputPresence::Yes,
    }
}

/// Factory of math episodes. The tool runs in sandboxes of a provider.
pub struct ToolMathFactory {
    shared: Arc<Shared>,
}

/// Data shared by the environments of a factory.
struct Shared {
    /// Provider of the sandboxes for tool calls.
    provider: Arc<dyn SandboxProvider>,
    /// Limits of each sandbox.
    spec: SandboxSpec,
    /// The keys of the recipe, checked.
    config: ToolMathConfig,
    /// `tool_timeout_s` as a duration.
    tool_deadline: Duration,
}

sinew_types::debug_fields!(
    ToolMathFactory as this,
    level = this.shared.provider.level(),
    config = this.shared.config
);

impl ToolMathFactory {
    /// Creates a factory.
    ///
    /// # Errors
    /// [`EnvError::Config`] for a setting out of range.
    pub fn new(
        provider: Arc<dyn SandboxProvider>,
        spec: SandboxSpec,
        config: ToolMathConfig,
    ) -> Result<Self, EnvError> {
        if !(0.0..=MAX_PROCESS_REWARD).contains(&config.process_reward) {
            return Err(EnvError::Config {
                field: "process_reward",
                value: config.process_reward.to_string(),
                allowed: format!("0 to {MAX_PROCESS_REWARD}: a right answer gives 1"),
            });
        }
        if !(0.1..=600.0).contains(&config.tool_timeout_s) {
            return Err(EnvError::Config {
                field: "tool_timeout_s",
                value: config.tool_timeout_s.to_string(),
                allowed: "0.1 to 600 seconds".into(),
            });
        }
        let tool_deadline = Duration::from_secs_f64(config.tool_timeout_s);
        Ok(Self {
            shared: Arc::new(Shared {
                provider,
                spec,
                config,
                tool_deadline,
            }),
        })
    }
}

/// `data` of a math task.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskData {
    answer: f64,
    /// Python expression that computes the answer.
    solution: String,
}

/// Parses the `data` of a task.
fn task_data(task: &Task) -> Result<TaskData, EnvError> {
    serde_json::from_value(task.data.clone()).map_err(|e| EnvError::Task {
        task: task.id.to_string(),
        message: format!("data has no answer and solution: {e}"),
    })
}

impl EnvFactory for ToolMathFactory {
    fn name(&self) -> &str {
        "tool_math"
    }

    fn tools(&self) -> BTreeMap<String, String> {
        [(TOOL.to_owned(), python::VERSION.to_owned())].into()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(ToolMathEnv {
            shared: Arc::clone(&self.shared),
            question: task.prompt.clone(),
            expected: task_data(task)?.answer,
            state: State::New,
            sandbox: None,
            history: hash64(task.prompt.as_bytes()),
            answer: None,
            counts: Counts::default(),
        }))
    }

    /// Not deterministic: the output of a program may depend on time or randomness.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: false,
            gives: gives(self.shared.config.process_reward),
            places: None,
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let data = task_data(task)?;
        Ok(match turn {
            0 => Some(gold_call(&data.solution, self.shared.config.prompt.calls)),
            1 => Some(Action::say(answer_text(&data.answer.to_string()))),
            _ => None,
        })
    }
}

/// Turn with a tool call.
fn gold_call(code: &str, calls: Calls) -> Action {
    let text = match calls {
        Calls::Tag => call_text(code),
        // The renderer writes it.
        Calls::Template => String::new(),
    };
    Action {
        tool_calls: vec![tool_call(code)],
        ..Action::say(text)
    }
}

/// Phase of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    Open,
    Done,
}

/// Turn counts of an episode.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Tool calls, including failed ones.
    calls: u32,
    /// Failed tool calls.
    errors: u32,
    /// Turns that are neither a call nor an answer.
    malformed: u32,
}

/// Environment of one math episode.
struct ToolMathEnv {
    shared: Arc<Shared>,
    /// The first message of the user.
    question: String,
    /// The correct answer.
    expected: f64,
    state: State,
    /// Acquired for the first tool call, so that episodes without a call need no sandbox.
    sandbox: Option<Box<dyn Sandbox>>,
    /// Hash of the question and all observations.
    history: u64,
    /// The model's answer.
    answer: Option<f64>,
    /// Calls and errors of the model so far, for the metrics.
    counts: Counts,
}

/// A parsed turn.
#[derive(Debug, PartialEq)]
enum Turn<'a> {
    /// Code of a tool call.
    Call(&'a str),
    /// The number that the turn gives as its answer.
    Answer(f64),
    /// Neither a call nor an answer.
    Malformed(Mistake),
}

/// Classifies a turn.
fn read_turn(action: &Action) -> Turn<'_> {
    match (action.tool_calls.as_slice(), &action.call_error) {
        ([call], None) if call.name != TOOL => Turn::Malformed(Mistake::Neither),
        ([call], None) => match call.arguments["code"].as_str().map(str::trim) {
            None | Some("") => Turn::Malformed(Mistake::Empty),
            Some(code) => Turn::Call(code),
        },
        ([_, ..], _) => Turn::Malformed(Mistake::Trailing),
        ([], Some(CallError::Unclosed)) if action.truncated => Turn::Malformed(Mistake::TooLong),
        ([], Some(CallError::Unclosed)) => Turn::Malformed(Mistake::Unclosed),
        ([], Some(CallError::Unopened)) => Turn::Malformed(Mistake::Unopened),
        ([], Some(CallError::Empty)) => Turn::Malformed(Mistake::Empty),
        ([], Some(CallError::Trailing | CallError::Invalid(_) | CallError::Failed(_))) => {
            Turn::Malformed(Mistake::Neither)
        }
        ([], None) => match final_answer(&action.answer(), action.truncated) {
            Some(value) => Turn::Answer(value),
            None if action.truncated => Turn::Malformed(Mistake::TooLong),
            None => Turn::Malformed(Mistake::Neither),
        },
    }
}

impl ToolMathEnv {
    /// Score and metrics of the episode so far.
    fn outcome(&self) -> Outcome {
        let success = self.answer.is_some_and(|a| same_number(a, self.expected));
        let flag = |b: bool| f64::from(u8::from(b));
        let Counts {
            calls,
            errors,
            malformed,
        } = self.counts;
        let turns = calls + malformed + u32::from(self.answer.is_some());
        let format_penalty = match self.answer {
            Some(_) => f64::from(malformed) / f64::from(turns),
            None => 1.0,
        };
        Outcome {
            reward: flag(success),
            success,
            metrics: [
                ("success", flag(success)),
                // 1 if every turn was well formed and the last one was an answer.
                ("format", flag(malformed == 0 && self.answer.is_some())),
                ("answered", flag(self.answer.is_some())),
                ("tool_calls", f64::from(calls)),
                ("tool_errors", f64::from(errors)),
                ("malformed", f64::from(malformed)),
                // Share of malformed turns. 1 without an answer.
                ("format_penalty", format_penalty),
                ("used_tool", flag(calls > errors)),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
            unscored: false,
            unscored_reason: None,
            answer: None,
        }
    }

    /// Runs a tool call. Returns the observation and the process reward.
    async fn call(&mut self, code: &str) -> Result<(Observation, f64), EnvError> {
        let shared = Arc::clone(&self.shared);
        let sandbox = match &mut self.sandbox {
            Some(sandbox) => sandbox,
            none => {
                let acquired = shared.provider.acquire(&shared.spec).await;
                none.insert(acquired.map_err(|e| EnvError::Sandbox(e.to_string()))?)
            }
        };
        let output = python::run(sandbox.as_mut(), code, shared.tool_deadline).await?;
        let first_good = !output.is_error && self.counts.calls == self.counts.errors;
        self.counts.calls += 1;
        self.counts.errors += u32::from(output.is_error);
        let reward = if first_good {
            shared.config.process_reward
        } else {
            0.0
        };
        Ok((output.into(), reward))
    }

    /// Handles a turn of the model.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if self.state != State::Open {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        let (observation, process_reward) = match read_turn(&action) {
            Turn::Answer(value) => {
                self.answer = Some(value);
                self.state = State::Done;
                return Ok(StepResult {
                    observation: None,
                    process_reward: 0.0,
                    done: true,
                    outcome: Some(self.outcome()),
                    state_hash: None,
                });
            }
            Turn::Call(code) => self.call(code).await?,
            Turn::Malformed(why) => {
                self.counts.malformed += 1;
                let observation = Observation {
                    content: why.text(self.shared.config.prompt.calls).into(),
                    is_error: true,
                };
                (observation, 0.0)
            }
        };
        let seen = format!("{:016x}{}", self.history, observation.content);
        self.history = hash64(seen.as_bytes());
        Ok(StepResult {
            observation: Some(observation),
            process_reward,
            done: false,
            outcome: None,
            state_hash: Some(self.history),
        })
    }
}

impl Env for ToolMathEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(async move {
            if self.state != State::New {
                return Err(EnvError::Order("reset twice: an environment is used once"));
            }
            self.state = State::Open;
            let prompt = &self.shared.config.prompt;
            Ok(ResetResult {
                messages: prompt.messages(&self.question),
                tools: prompt.tools(),
                calls: match prompt.calls {
                    Calls::Tag => CallNotation::Tag {
                        tag: TAG.into(),
                        tool: TOOL.into(),
                    },
                    Calls::Template => CallNotation::Template,
                },
                state_hash: Some(self.history),
            })
        })
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        let role = self.shared.config.prompt.observation_role;
        vec![Message::new(role, observation.content.clone())]
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move { Ok(self.outcome()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            self.state = State::Done;
            match self.sandbox.take() {
                Some(sandbox) => sandbox
                    .destroy()
                    .await
                    .map_err(|e| EnvError::Sandbox(e.to_string())),
                None => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A parsed turn in the notation of this environment.
    fn turn(text: &str, code: &[&str], call_error: Option<CallError>) -> Action {
        let calls = code.iter().map(|code| tool_call(code));
        Action {
            tool_calls: calls.collect(),
            call_error,
            ..Action::say(text)
        }
    }

    #[test]
    fn turns_are_classified_strictly() {
        use CallError::{Empty, Invalid, Trailing, Unclosed, Unopened};
        let cases = [
            (turn("", &["1 + 2"], None), Turn::Call("1 + 2")),
            (turn("", &[" x = 1\nx"], None), Turn::Call("x = 1\nx")),
            // A call takes precedence over an answer in the same turn.
            (turn("Answer: 3", &["1"], None), Turn::Call("1")),
            (
                turn("", &["1"], Some(Trailing)),
                Turn::Malformed(Mistake::Trailing),
            ),
            (
                turn("", &["1", "2"], None),
                Turn::Malformed(Mistake::Trailing),
            ),
            (
                turn("", &["1"], Some(Empty)),
                Turn::Malformed(Mistake::Trailing),
            ),
            (turn("", &[" "], None), Turn::Malformed(Mistake::Empty)),
            (turn("", &[], Some(Empty)), Turn::Malformed(Mistake::Empty)),
            (
                turn("", &[], Some(Unclosed)),
                Turn::Malformed(Mistake::Unclosed),
            ),
            (
                turn("Answer: 3", &[], Some(Unopened)),
                Turn::Malformed(Mistake::Unopened),
            ),
            (
                turn("", &[], Some(Invalid("?".into()))),
                Turn::Malformed(Mistake::Neither),
            ),
            (turn("Answer: 1,200", &[], None), Turn::Answer(1200.0)),
            (turn("1200", &[], None), Turn::Malformed(Mistake::Neither)),
            (turn("", &[], None), Turn::Malformed(Mistake::Neither)),
        ];
        for (action, expected) in cases {
            assert_eq!(read_turn(&action), expected, "{action:?}");
        }
        let mut other = turn("", &["1"], None);
        other.tool_calls[0].name = "browser".into();
        assert_eq!(read_turn(&other), Turn::Malformed(Mistake::Neither));
    }

    #[test]
    fn truncated_turns_get_a_message_about_length() {
        let cases = [
            (
                turn("", &[], Some(CallError::Unclosed)),
                Turn::Malformed(Mistake::TooLong),
            ),
            (
                turn("Well, first we", &[], None),
                Turn::Malformed(Mistake::TooLong),
            ),
            (
                turn("Answer: 12", &[], None),
                Turn::Malformed(Mistake::TooLong),
            ),
            (turn("", &["1"], None), Turn::Call("1")),
        ];
        for (action, expected) in cases {
            let cut = Action {
                truncated: true,
                ..action
            };
            assert_eq!(read_turn(&cut), expected, "{cut:?}");
        }
    }
}
