//! The world of one math episode: a question, a Python tool, a final answer.
//!
//! A turn is a call (`<tool>code</tool>`, at its end), an answer (`Answer: number`), or
//! malformed. Calls and malformed turns are answered and the episode goes on until the limit of
//! turns; an answer ends it. Only a number in the model's own last message counts, never what
//! the tool printed.

use super::answer::{final_answer, same_number};
use super::prompt::{
    CLOSE, EMPTY, NEITHER, OPEN, PromptConfig, TOO_LONG, TRAILING, UNCLOSED, UNOPENED, answer_text,
    call_text,
};
use super::python;
use crate::port::{
    Action, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation, ResetResult,
    StepResult,
};
use crate::rng::hash64;
use serde::{Deserialize, Serialize};
use sinew_sandbox::{Sandbox, SandboxProvider, SandboxSpec};
use sinew_types::{Message, Outcome, Task};
use std::sync::Arc;
use std::time::Duration;

/// Largest process reward: it must not outweigh a right answer.
const MAX_PROCESS_REWARD: f64 = 0.1;

/// How episodes are rewarded and bounded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToolMathConfig {
    pub prompt: PromptConfig,
    /// For the first well-formed call that ran without an error, once an episode; at most 0.1.
    pub process_reward: f64,
    /// Wall time of one call.
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

/// Makes math episodes whose tool runs in sandboxes of `provider`.
pub struct ToolMathFactory {
    shared: Arc<Shared>,
}

struct Shared {
    provider: Arc<dyn SandboxProvider>,
    spec: SandboxSpec,
    config: ToolMathConfig,
    tool_deadline: Duration,
}

impl std::fmt::Debug for ToolMathFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ToolMathFactory")
            .field("level", &self.shared.provider.level())
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}

impl ToolMathFactory {
    /// Checks the configuration.
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskData {
    answer: f64,
    solution: String,
}

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

    /// What a program prints may depend on a clock or on chance.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: false,
            states: true,
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<String>, EnvError> {
        let data = task_data(task)?;
        Ok(match turn {
            0 => Some(call_text(&data.solution)),
            1 => Some(answer_text(&data.answer.to_string())),
            _ => None,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    Open,
    Done,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    calls: u32,
    errors: u32,
    malformed: u32,
}

struct ToolMathEnv {
    shared: Arc<Shared>,
    question: String,
    expected: f64,
    state: State,
    /// Acquired with the first call: episodes that never call need none.
    sandbox: Option<Box<dyn Sandbox>>,
    /// Hash of the question and all observations.
    history: u64,
    answer: Option<f64>,
    counts: Counts,
}

/// A turn as the environment reads it.
#[derive(Debug, PartialEq)]
enum Turn<'a> {
    Call(&'a str),
    Answer(f64),
    Malformed(&'static str),
}

fn read_turn(text: &str, truncated: bool) -> Turn<'_> {
    if let Some((_, after)) = text.split_once(OPEN) {
        let Some((code, tail)) = after.split_once(CLOSE) else {
            return Turn::Malformed(if truncated { TOO_LONG } else { UNCLOSED });
        };
        return match (code.trim(), tail.trim()) {
            ("", _) => Turn::Malformed(EMPTY),
            (code, "") => Turn::Call(code),
            _ => Turn::Malformed(TRAILING),
        };
    }
    if text.contains(CLOSE) {
        return Turn::Malformed(UNOPENED);
    }
    match final_answer(text, truncated) {
        Some(value) => Turn::Answer(value),
        None if truncated => Turn::Malformed(TOO_LONG),
        None => Turn::Malformed(NEITHER),
    }
}

impl ToolMathEnv {
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
                // Every turn was well formed, and the last one was an answer.
                ("format", flag(malformed == 0 && self.answer.is_some())),
                ("answered", flag(self.answer.is_some())),
                ("tool_calls", f64::from(calls)),
                ("tool_errors", f64::from(errors)),
                ("malformed", f64::from(malformed)),
                // Share of turns that could not be read; all of it without an answer.
                ("format_penalty", format_penalty),
                ("used_tool", flag(calls > errors)),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
            unscored: false,
        }
    }

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

    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if self.state != State::Open {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        let (observation, process_reward) = match read_turn(&action.text, action.truncated) {
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
                    text: why.to_owned(),
                    is_error: true,
                };
                (observation, 0.0)
            }
        };
        let seen = format!("{:016x}{}", self.history, observation.text);
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
            Ok(ResetResult {
                messages: self.shared.config.prompt.messages(&self.question),
                tools: Vec::new(),
                state_hash: Some(self.history),
            })
        })
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        let role = self.shared.config.prompt.observation_role;
        vec![Message::new(role, observation.text.clone())]
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

    #[test]
    fn turns_are_read_strictly() {
        let cases = [
            ("<tool>1 + 2</tool>", Turn::Call("1 + 2")),
            (
                " I compute <tool> x = 1\nx </tool>\n",
                Turn::Call("x = 1\nx"),
            ),
            // An answer beside a call is not one: the tool has not answered yet.
            ("Answer: 3 <tool>1 + 2</tool>", Turn::Call("1 + 2")),
            ("<tool>1 + 2</tool> Answer: 3", Turn::Malformed(TRAILING)),
            ("<tool>1</tool><tool>2</tool>", Turn::Malformed(TRAILING)),
            ("<tool> </tool>", Turn::Malformed(EMPTY)),
            ("<tool>1 + 2", Turn::Malformed(UNCLOSED)),
            ("1 + 2</tool>", Turn::Malformed(UNOPENED)),
            ("Answer: 1,200", Turn::Answer(1200.0)),
            ("1200", Turn::Malformed(NEITHER)),
            ("", Turn::Malformed(NEITHER)),
        ];
        for (text, expected) in cases {
            assert_eq!(read_turn(text, false), expected, "{text}");
        }
    }

    #[test]
    fn cut_turns_are_told_to_be_shorter() {
        assert_eq!(read_turn("<tool>1 + ", true), Turn::Malformed(TOO_LONG));
        assert_eq!(read_turn("Well, first we", true), Turn::Malformed(TOO_LONG));
        assert_eq!(read_turn("Answer: 12", true), Turn::Malformed(TOO_LONG));
        assert_eq!(read_turn("<tool>1</tool>", true), Turn::Call("1"));
    }
}
