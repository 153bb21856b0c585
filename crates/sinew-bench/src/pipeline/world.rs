//! Episodes whose tools take long: how long each call takes is a function of seed, task and
//! member of the group, so that the ideal schedule can be computed from the same draws.
//!
//! Times are drawn from a Pareto distribution of index 1 that begins at the shortest call and
//! is cut at the longest, so that few calls take much of the time. No clock and no state of the
//! process goes into a draw: two runs of one seed wait for the same calls, whichever of them
//! come first.
//!
//! A call waits in this process, or runs `sleep` in a sandbox of its episode at the process
//! level. Each episode has its sandbox from its start to its end, as episodes of a real run
//! have.
//!
//! The reward is the share of turns that begin with a letter of the first half of the alphabet:
//! a tiny model learns it in ten steps, so that modes can be compared at equal results.

use futures::future::BoxFuture;
use sinew_env::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, Split, StepResult, Taskset, TasksetError,
};
use sinew_sandbox::{Ending, ExecRequest, Program, Sandbox, SandboxProvider, SandboxSpec};
use sinew_types::{Gives, Message, Outcome, Role, Task, TaskId, mix_hash};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Characters of prompts, turns and observations.
pub(super) const ALPHABET: &str = "abcdefgh";
/// The rewarded half of the letters.
const GOOD: [char; 4] = ['a', 'b', 'c', 'd'];
/// Training tasks: more than a run draws, so that a task is one group.
pub(super) const TASKS: usize = 100_000;
/// Longest that one call may take in a sandbox.
const CALL_LIMIT: Duration = Duration::from_secs(60);

/// Times of calls: from `shortest_s` to `longest_s`, of which one in `longest_s / shortest_s` takes the
/// longest time (a Pareto distribution with index 1, cut).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Calls {
    /// Turns of an episode, each with one call.
    pub(super) turns: usize,
    /// Seconds of the shortest call.
    pub(super) shortest_s: f64,
    /// Seconds of the longest call.
    pub(super) longest_s: f64,
    /// Equal seeds give equal calls.
    pub(super) seed: u64,
}

impl Calls {
    /// Seconds of the calls of a member of a task's group.
    pub(super) fn of(&self, task: usize, member: usize) -> Vec<f64> {
        let own = mix_hash(mix_hash(self.seed, task as u64), member as u64);
        let draw = |turn: usize| {
            let uniform = mix_hash(own, turn as u64) as f64 / 2f64.powi(64);
            (self.shortest_s / (1.0 - uniform).max(1e-12)).min(self.longest_s)
        };
        (0..self.turns).map(draw).collect()
    }
}

/// Action of a call.
#[derive(Clone)]
pub(super) enum Tool {
    /// Waits.
    Sleep,
    /// Runs a program that waits, in a sandbox of the episode's own.
    Sandbox(Arc<dyn SandboxProvider>),
}

/// Episodes that were made.
#[derive(Default)]
struct StoredEpisodes {
    /// Members of each task.
    members: HashMap<usize, usize>,
    /// Training tasks in the order of their first episodes.
    order: Vec<usize>,
}

/// Makes the environments.
#[derive(Clone)]
pub(super) struct World {
    /// Times of the calls.
    pub(super) calls: Calls,
    pub(super) tool: Tool,
    /// Members that each task has had, over all clones.
    made: Arc<Mutex<StoredEpisodes>>,
}

impl World {
    /// A world whose members of a group are counted from 0.
    pub(super) fn new(calls: Calls, tool: Tool) -> Self {
        Self {
            calls,
            tool,
            made: Arc::default(),
        }
    }

    /// Training tasks in the order in which their groups began.
    pub(super) fn order(&self) -> Vec<usize> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.order.clone()
    }

    /// Seconds of the calls of the next member of a task.
    fn next(&self, task: usize) -> Vec<f64> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let member = made.members.entry(task).or_default();
        *member += 1;
        let number = *member - 1;
        if number == 0 {
            made.order.push(task);
        }
        self.calls.of(task, number)
    }
}

/// Tasks that differ in only their calls; those of the held-out split wait for nothing.
pub(super) struct Tasks;

impl Taskset for Tasks {
    /// The name in ids of tasks.
    fn name(&self) -> &'static str {
        "calls"
    }

    /// Tasks of a split: more to train on than a run draws, and a few that are held out.
    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => TASKS,
            Split::HeldOut => 8,
        }
    }

    /// The task of an index, which its calls depend on. All prompts are equal.
    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let waits = split == Split::Train;
        Ok(Task {
            id: TaskId::new(format!("calls/{}/{index}", split.as_str())),
            kind: "calls".into(),
            preamble: Vec::new(),
            prompt: "ha".into(),
            data: serde_json::json!({ "index": index, "waits": waits }),
            seed: index as u64,
        })
    }
}

impl EnvFactory for World {
    /// The name in traces.
    fn name(&self) -> &'static str {
        "calls"
    }

    /// The next member of the task's group.
    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let waits = task.data["waits"] == true;
        let index = task.data["index"].as_u64().unwrap_or_default() as usize;
        let delays = if waits {
            self.next(index)
        } else {
            vec![0.0; self.calls.turns]
        };
        Ok(Box::new(Episode {
            delays,
            tool: self.tool.clone(),
            sandbox: None,
            turn: 0,
            good: 0,
        }))
    }

    /// Many at once; nothing that an algorithm could read beyond rewards.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            gives: Gives::default(),
            ..Capabilities::default()
        }
    }

    /// There is no gold policy.
    fn gold(&self, _: &Task, _: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// One episode's world.
struct Episode {
    /// Seconds of the calls that are left.
    delays: Vec<f64>,
    tool: Tool,
    /// Sandbox of the episode from `reset` on, if calls run in one.
    sandbox: Option<Box<dyn Sandbox>>,
    /// Turns that ended.
    turn: usize,
    /// Turns with the rewarded text.
    good: usize,
}

/// An error of the sandbox, as one of the environment.
fn failed(e: impl std::fmt::Display) -> EnvError {
    EnvError::Sandbox(e.to_string())
}

impl Episode {
    /// Waits for `seconds`, here or in a program in the sandbox.
    async fn call(&mut self, seconds: f64) -> Result<(), EnvError> {
        let Some(sandbox) = &mut self.sandbox else {
            if seconds > 0.0 {
                tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            }
            return Ok(());
        };
        let request = ExecRequest {
            program: Program::Argv(vec!["/bin/sleep".into(), format!("{seconds:.4}")]),
            stdin: Vec::new(),
            deadline: CALL_LIMIT,
        };
        let result = sandbox.exec(request).await.map_err(failed)?;
        match result.ending {
            Ending::Exited { code: 0 } => Ok(()),
            other => Err(failed(format!("a call ended: {other:?}"))),
        }
    }

    /// The share of turns with the rewarded text; all of them are a success.
    fn outcome(&self) -> Outcome {
        let share = self.good as f64 / self.delays.len() as f64;
        Outcome {
            reward: share,
            success: self.good == self.delays.len(),
            ..Outcome::default()
        }
    }
}

impl Env for Episode {
    /// Draws the calls, and makes the sandbox if there is one.
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(async move {
            if let Tool::Sandbox(provider) = &self.tool {
                let spec = SandboxSpec::default();
                self.sandbox = Some(provider.acquire(&spec).await.map_err(failed)?);
            }
            Ok(ResetResult {
                messages: vec![Message::new(Role::User, "ha")],
                tools: Vec::new(),
                calls: CallNotation::default(),
                state_hash: None,
            })
        })
    }

    /// One call for each turn; the last one ends the episode.
    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(async move {
            self.call(self.delays[self.turn]).await?;
            self.turn += 1;
            self.good += usize::from(action.text.starts_with(GOOD));
            let done = self.turn == self.delays.len();
            let observation = Observation {
                content: "g".into(),
                is_error: false,
            };
            Ok(StepResult {
                observation: (!done).then_some(observation),
                process_reward: 0.0,
                done,
                outcome: done.then(|| self.outcome()),
                state_hash: None,
            })
        })
    }

    /// The observation as one message of the user.
    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        vec![Message::new(Role::User, observation.content.clone())]
    }

    /// The reward so far.
    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        let outcome = self.outcome();
        Box::pin(async move { Ok(outcome) })
    }

    /// Releases the sandbox.
    fn close(&mut self) -> BoxFuture<'_, Result<(), EnvError>> {
        Box::pin(async move {
            match self.sandbox.take() {
                Some(sandbox) => sandbox.destroy().await.map_err(failed),
                None => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_a_function_of_seed_task_and_member_with_a_long_tail() {
        let calls = Calls {
            turns: 8,
            shortest_s: 0.05,
            longest_s: 2.0,
            seed: 7,
        };
        assert_eq!(calls.of(3, 1), calls.of(3, 1));
        assert_ne!(calls.of(3, 1), calls.of(3, 2));
        let all: Vec<f64> = (0..1000).flat_map(|t| calls.of(t, 0)).collect();
        assert!(all.iter().all(|s| (0.05..=2.0).contains(s)));
        // One in forty is cut; the mean is 0.05 (1 + ln 40).
        let cut = all.iter().filter(|s| **s == 2.0).count();
        assert!((150..250).contains(&cut), "{cut}");
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!((0.22..0.25).contains(&mean), "{mean}");
    }
}
