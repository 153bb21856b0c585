//! A deterministic environment for a model that is trained from scratch in seconds.
//!
//! A walker `A` is in a corridor. The goal is an arrow that points from the walker to it (`..A.>...`). The
//! first `l` or `r` of the model's text moves the walker one cell in each turn, and the new picture is the
//! observation. Other text does not move it. The task ends when the walker reaches the goal, which is one or
//! two cells away. A uniformly random policy solves about a third of the episodes within four turns.

use crate::port::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, StepResult,
};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes, turn_rewards};
use crate::rng::hash64;
use crate::taskset::{Split, Taskset, TasksetError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{Gives, InputPresence, Message, Outcome, Role, Task, TaskId};
use std::sync::Arc;

/// Characters of pictures and moves. A character tokenizer needs no others.
pub const ALPHABET: &str = ".A<>lr";

/// Recommended turns per episode.
pub const MAX_TURNS: u32 = 4;

/// Cells of a corridor.
const WIDTH: usize = 10;
/// Maximum cells between start and goal.
const MAX_DISTANCE: usize = 2;

/// Start and goal of an episode, as cell indexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Corridor {
    /// Cell of the walker at the begin.
    start: usize,
    /// Cell that ends the episode with a success.
    goal: usize,
}

/// Draws the corridor.
fn picture(at: usize, goal: usize) -> String {
    (0..WIDTH)
        .map(|cell| match cell {
            c if c == at => 'A',
            c if c == goal && goal < at => '<',
            c if c == goal => '>',
            _ => '.',
        })
        .collect()
}

/// Taskset of all corridors with a goal in reach.
#[derive(Clone, Debug)]
pub struct TinyTaskset {
    /// Seed of the run.
    seed: u64,
    train: Vec<Corridor>,
    held_out: Vec<Corridor>,
}

impl TinyTaskset {
    /// Creates the taskset. The corridors do not depend on `seed`, only the tasks' seeds do.
    pub fn new(seed: u64) -> Self {
        let corridors = (0..WIDTH).flat_map(|start| {
            (0..WIDTH)
                .filter(move |&goal| (1..=MAX_DISTANCE).contains(&start.abs_diff(goal)))
                .map(move |goal| Corridor { start, goal })
        });
        let (held_out, train) =
            corridors.partition(|c| hash64(picture(c.start, c.goal).as_bytes()).is_multiple_of(4));
        Self {
            seed,
            train,
            held_out,
        }
    }

    /// Corridors of a split.
    fn corridors(&self, split: Split) -> &[Corridor] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

impl Taskset for TinyTaskset {
    fn name(&self) -> &str {
        "tiny"
    }

    fn len(&self, split: Split) -> usize {
        self.corridors(split).len()
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let corridors = self.corridors(split);
        let corridor = corridors.get(index).ok_or(TasksetError::Index {
            taskset: self.name().to_owned(),
            split,
            index,
            len: corridors.len(),
        })?;
        Ok(Task {
            id: TaskId::new(format!("tiny/{}/{index}", split.as_str())),
            kind: format!("corridor-{}", corridor.start.abs_diff(corridor.goal)),
            preamble: Vec::new(),
            prompt: picture(corridor.start, corridor.goal),
            data: serde_json::json!({ "start": corridor.start, "goal": corridor.goal }),
            seed: self.seed.wrapping_add(index as u64),
        })
    }
}

/// The environment of the registry.
pub const KIND: EnvKind = EnvKind::new::<Tiny>(
    "tiny",
    "a tiny deterministic world for models trained from scratch in seconds",
    Needs {
        sandbox: false,
        alphabet: Some(ALPHABET),
        rows: false,
        tasks: false,
        reward: false,
    },
);

/// Data of a walk that algorithms can read: a move counts as a call, and one against the wall as its error.
fn gives(process_reward: f64) -> Gives {
    Gives {
        states: InputPresence::Yes,
        turn_rewards: turn_rewards(process_reward),
        tool_counts: InputPresence::Yes,
        format_penalty: InputPresence::Yes,
    }
}

/// Largest reward of a move: two of them must not outweigh the goal.
const MAX_PROCESS_REWARD: f64 = 0.5;

/// The keys of `tiny` in a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Tiny {
    /// Reward for each turn that brings the walker nearer.
    #[schemars(range(min = 0.0, max = MAX_PROCESS_REWARD))]
    process_reward: f64,
}

impl EnvConfig for Tiny {
    fn check(&self) -> Result<(), KeyError> {
        if (0.0..=MAX_PROCESS_REWARD).contains(&self.process_reward) {
            return Ok(());
        }
        Err(KeyError {
            key: "process_reward",
            value: self.process_reward.to_string(),
            reason: format!("allowed: 0 to {MAX_PROCESS_REWARD}"),
        })
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Ok(Arc::new(TinyTaskset::new(seed)))
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        let process_reward = self.process_reward;
        Ok(Arc::new(ShapedTinyFactory { process_reward }))
    }

    fn gives(&self) -> Gives {
        gives(self.process_reward)
    }
}

/// Makes corridor worlds.
#[derive(Clone, Copy, Debug, Default)]
pub struct TinyFactory;

/// Like [`TinyFactory`], with a process reward for each turn that moves the walker closer to the goal.
#[derive(Clone, Copy, Debug)]
pub struct ShapedTinyFactory {
    /// Reward per turn.
    pub process_reward: f64,
}

/// Parses and checks the `data` of a task.
fn corridor(task: &Task) -> Result<Corridor, EnvError> {
    let error = |message: String| EnvError::Task {
        task: task.id.to_string(),
        message,
    };
    let corridor: Corridor = serde_json::from_value(task.data.clone())
        .map_err(|e| error(format!("data is not a corridor: {e}")))?;
    if corridor.start >= WIDTH || corridor.goal >= WIDTH || corridor.start == corridor.goal {
        return Err(error(format!(
            "start {} and goal {} must be different cells below {WIDTH}",
            corridor.start, corridor.goal
        )));
    }
    Ok(corridor)
}

impl EnvFactory for TinyFactory {
    fn name(&self) -> &str {
        "tiny"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        ShapedTinyFactory {
            process_reward: 0.0,
        }
        .create(task)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: true,
            gives: gives(0.0),
            places: None,
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let Corridor { start, goal } = corridor(task)?;
        let step = if goal < start { "l" } else { "r" };
        Ok((turn < start.abs_diff(goal)).then(|| Action::say(step)))
    }
}

impl EnvFactory for ShapedTinyFactory {
    fn name(&self) -> &str {
        "tiny"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let Corridor { start, goal } = corridor(task)?;
        Ok(Box::new(TinyEnv {
            at: start,
            process_reward: self.process_reward,
            goal,
            state: State::New,
            steps: 0,
            idle: 0,
            bumps: 0,
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: true,
            gives: gives(self.process_reward),
            places: None,
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        TinyFactory.gold(task, turn)
    }
}

/// Phase of an episode.
#[derive(Debug, PartialEq, Eq)]
enum State {
    New,
    Open,
    Done,
}

/// Environment of one corridor episode.
#[derive(Debug)]
struct TinyEnv {
    process_reward: f64,
    /// Cell of the walker.
    at: usize,
    /// Cell of the goal.
    goal: usize,
    state: State,
    /// Turns so far.
    steps: u32,
    /// Turns without a move.
    idle: u32,
    /// Moves against the end of the corridor.
    bumps: u32,
}

impl TinyEnv {
    /// Hash of the picture.
    fn hash(&self) -> Option<u64> {
        Some(hash64(picture(self.at, self.goal).as_bytes()))
    }

    /// Score and metrics of the episode so far.
    fn outcome(&self) -> Outcome {
        let success = self.at == self.goal;
        // Share of turns without a move.
        let format_penalty = f64::from(self.idle) / f64::from(self.steps.max(1));
        Outcome {
            reward: f64::from(u8::from(success)),
            success,
            metrics: [
                ("format".to_owned(), f64::from(u8::from(self.idle == 0))),
                ("idle_turns".to_owned(), f64::from(self.idle)),
                // A move counts as a tool call, and one against the wall as a tool error.
                ("tool_calls".to_owned(), f64::from(self.steps - self.idle)),
                ("tool_errors".to_owned(), f64::from(self.bumps)),
                ("format_penalty".to_owned(), format_penalty),
            ]
            .into(),
            unscored: false,
            unscored_reason: None,
            answer: None,
        }
    }

    /// Handles a turn of the model.
    fn walk(&mut self, text: &str) -> Result<StepResult, EnvError> {
        if self.state != State::Open {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        self.steps += 1;
        let moved = match text.chars().find(|c| matches!(c, 'l' | 'r')) {
            Some('l') => Some(self.at.saturating_sub(1)),
            Some(_) => Some((self.at + 1).min(WIDTH - 1)),
            None => None,
        };
        self.idle += u32::from(moved.is_none());
        self.bumps += u32::from(moved == Some(self.at));
        let before = self.at.abs_diff(self.goal);
        self.at = moved.unwrap_or(self.at);
        let nearer = self.at.abs_diff(self.goal) < before;
        let done = self.at == self.goal;
        if done {
            self.state = State::Done;
        }
        Ok(StepResult {
            observation: (!done).then(|| Observation {
                content: picture(self.at, self.goal).into(),
                is_error: moved.is_none(),
            }),
            process_reward: if nearer { self.process_reward } else { 0.0 },
            done,
            outcome: done.then(|| self.outcome()),
            state_hash: self.hash(),
        })
    }
}

impl Env for TinyEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(async move {
            if self.state != State::New {
                return Err(EnvError::Order("reset twice: an environment is used once"));
            }
            self.state = State::Open;
            Ok(ResetResult {
                messages: vec![Message::new(Role::User, picture(self.at, self.goal))],
                tools: Vec::new(),
                calls: CallNotation::default(),
                state_hash: self.hash(),
            })
        })
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(async move { self.walk(&action.answer()) })
    }

    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        vec![Message::new(Role::Tool, observation.content.clone())]
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move { Ok(self.outcome()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            self.state = State::Done;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use futures::executor::block_on;

    fn act(text: &str) -> Action {
        Action::say(text)
    }

    fn env(start: usize, goal: usize) -> Box<dyn Env> {
        let mut task = TinyTaskset::new(0).get(Split::Train, 0).unwrap();
        task.data = serde_json::json!({ "start": start, "goal": goal });
        TinyFactory.create(&task).unwrap()
    }

    #[test]
    fn walks_to_the_goal() {
        let mut env = env(3, 5);
        let first = block_on(env.reset()).unwrap();
        assert_eq!(first.messages[0].content, "...A.>....");
        let step = block_on(env.step(act("..r"))).unwrap();
        assert_eq!(step.observation.unwrap().content, "....A>....");
        assert!(!step.done && step.outcome.is_none());
        let step = block_on(env.step(act("rl"))).unwrap();
        assert!(step.done && step.observation.is_none());
        assert_eq!(step.outcome.unwrap().reward, 1.0);
        assert!(block_on(env.step(act("r"))).is_err());
    }

    #[test]
    fn process_reward_is_for_turns_closer_to_the_goal() {
        let mut task = TinyTaskset::new(0).get(Split::Train, 0).unwrap();
        task.data = serde_json::json!({ "start": 3, "goal": 5 });
        let factory = ShapedTinyFactory {
            process_reward: 0.25,
        };
        let mut env = factory.create(&task).unwrap();
        block_on(env.reset()).unwrap();
        let earned: Vec<f64> = ["l", "A", "r", "r", "r"]
            .map(|text| block_on(env.step(act(text))).unwrap().process_reward)
            .into();
        assert_eq!(earned, [0.0, 0.0, 0.25, 0.25, 0.25]);
    }

    #[test]
    fn text_without_a_move_is_an_error_observation() {
        let mut env = env(0, 1);
        block_on(env.reset()).unwrap();
        let step = block_on(env.step(act("AA"))).unwrap();
        assert!(step.observation.unwrap().is_error);
        // The wall stops the walker.
        let step = block_on(env.step(act("l"))).unwrap();
        assert_eq!(step.observation.unwrap().content, "A>........");
        let outcome = block_on(env.score()).unwrap();
        assert_eq!((outcome.reward, outcome.metrics["idle_turns"]), (0.0, 1.0));
        let counted = ["tool_calls", "tool_errors", "format_penalty"].map(|m| outcome.metrics[m]);
        assert_eq!(counted, [1.0, 1.0, 0.5]);
    }

    #[test]
    fn environments_are_used_once_and_refuse_other_tasks() {
        let mut e = env(3, 4);
        assert!(block_on(e.step(act("r"))).is_err());
        block_on(e.reset()).unwrap();
        assert!(block_on(e.reset()).is_err());
        let mut task = TinyTaskset::new(0).get(Split::Train, 0).unwrap();
        task.data = serde_json::json!({ "start": 3, "goal": 3 });
        assert!(TinyFactory.create(&task).is_err());
        task.data = serde_json::json!({ "answer": 3 });
        assert!(TinyFactory.create(&task).is_err());
    }

    /// Tokens are drawn uniformly from the character tokenizer's vocabulary, like those of an untrained
    /// model.
    #[test]
    fn random_policy_succeeds_in_a_fifth_to_two_fifths_of_the_episodes() {
        let tasks = TinyTaskset::new(0);
        let symbols: Vec<char> = ALPHABET.chars().collect();
        let mut rng = Rng::labelled(5, "policy");
        let mut successes = 0;
        let episodes = 4000;
        for i in 0..episodes {
            let task = tasks
                .get(Split::Train, i % tasks.len(Split::Train))
                .unwrap();
            let mut env = TinyFactory.create(&task).unwrap();
            block_on(env.reset()).unwrap();
            for _ in 0..MAX_TURNS {
                let mut text = String::new();
                // A move, the end token, and one more.
                for _ in 0..3 {
                    // Five control tokens precede the characters. The first one ends the turn.
                    match rng.below(5 + symbols.len()) {
                        0 => break,
                        id if id < 5 => {}
                        id => text.push(symbols[id - 5]),
                    }
                }
                if block_on(env.step(act(&text))).unwrap().done {
                    successes += 1;
                    break;
                }
            }
        }
        let rate = f64::from(successes) / episodes as f64;
        assert!((0.2..0.4).contains(&rate), "{rate}");
    }
}
