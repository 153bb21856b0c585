//! Wraps an environment so that a reward of the recipe scores it, instead of the environment itself.
//!
//! The environment's own score stays in the metrics, as `env/reward` and `env/success`, if it has one.
//! Process rewards of turns stay as they are.

use crate::port::{
    Action, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation, ProgramHost,
    ResetResult, StepResult,
};
use crate::reward::{GroupReward, Reward, RewardSample, Unscored, waits_for_group, with_group};
use futures::FutureExt;
use sinew_types::{Component, Message, Outcome, Task};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Factory of environments whose episodes a [`Reward`] scores.
#[derive(Clone)]
pub struct Rewarded {
    /// Factory of the wrapped environments.
    inner: Arc<dyn EnvFactory>,
    /// Reward that scores each episode separately.
    reward: Arc<dyn Reward>,
    /// Reward that scores the episodes of a task together, if there is one.
    group: Option<Arc<dyn GroupReward>>,
}

impl std::fmt::Debug for Rewarded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rewarded")
            .field("inner", &self.inner.name())
            .field("reward", &self.reward.name())
            .finish()
    }
}

impl Rewarded {
    /// Scores the episodes of `inner` with `reward`.
    pub fn new(inner: Arc<dyn EnvFactory>, reward: Arc<dyn Reward>) -> Self {
        Self {
            inner,
            reward,
            group: None,
        }
    }

    /// Adds the group reward that completes each score. The scores of `reward` must wait for it
    /// ([`waits_for_group`](crate::Score::waits_for_group)).
    pub fn with_group(self, group: Arc<dyn GroupReward>) -> Self {
        Self {
            group: Some(group),
            ..self
        }
    }
}

impl EnvFactory for Rewarded {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn version(&self) -> &str {
        self.inner.version()
    }

    fn members(&self) -> BTreeMap<String, Component> {
        self.inner.members()
    }

    fn tools(&self) -> BTreeMap<String, String> {
        self.inner.tools()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(RewardedEnv {
            inner: self.inner.create(task)?,
            reward: Arc::clone(&self.reward),
            sample: RewardSample::new(task.clone(), ""),
            played: Vec::new(),
        }))
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        self.inner.gold(task, turn)
    }

    fn hosts_programs(&self, task: &Task) -> bool {
        self.inner.hosts_programs(task)
    }

    fn group_reward(&self, _: &Task) -> Option<Arc<dyn GroupReward>> {
        self.group.clone()
    }

    fn reward(&self, _: &Task) -> Option<Arc<dyn Reward>> {
        Some(Arc::clone(&self.reward))
    }
}

/// One episode, with its messages so far.
struct RewardedEnv {
    inner: Box<dyn Env>,
    reward: Arc<dyn Reward>,
    sample: RewardSample,
    /// Messages of an external program, which are not turns of this environment.
    played: Vec<Message>,
}

impl RewardedEnv {
    /// Computes the outcome with the reward, and adds the metrics of the environment's own outcome.
    async fn outcome(&mut self, own: Outcome) -> Outcome {
        self.sample.metrics = own.metrics;
        self.sample.state = self.inner.end_state().cloned();
        if !self.played.is_empty() {
            self.sample.messages = std::mem::take(&mut self.played);
            let calls = self.sample.messages.iter().flat_map(|m| &m.tool_calls);
            self.sample.calls = calls.cloned().collect();
        }
        if !own.unscored {
            let success = f64::from(u8::from(own.success));
            self.sample.metrics.insert("env/reward".into(), own.reward);
            self.sample.metrics.insert("env/success".into(), success);
        }
        let mut outcome = match self.reward.score(&self.sample).await {
            Ok(score) => score.into_outcome(),
            Err(unscored) => unscored.into_outcome(),
        };
        for (name, value) in std::mem::take(&mut self.sample.metrics) {
            outcome.metrics.entry(name).or_insert(value);
        }
        outcome
    }
}

impl Env for RewardedEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        async {
            let reset = self.inner.reset().await?;
            self.sample.messages.clone_from(&reset.messages);
            Ok(reset)
        }
        .boxed()
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        async {
            self.sample.messages.push(action.parted());
            self.sample.said(action.turn());
            self.sample.truncated = action.truncated;
            self.sample.calls.extend_from_slice(&action.tool_calls);
            let mut step = self.inner.step(action).await?;
            if let Some(observation) = &step.observation {
                let messages = self.inner.format_observation(observation);
                self.sample.messages.extend(messages);
            }
            if let Some(own) = step.outcome.take() {
                step.outcome = Some(self.outcome(own).await);
            }
            Ok(step)
        }
        .boxed()
    }

    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        self.inner.format_observation(observation)
    }

    fn renewed(&self) -> Option<Vec<Message>> {
        self.inner.renewed()
    }

    fn host(&mut self) -> Option<&mut dyn ProgramHost> {
        self.inner.host()
    }

    fn played(&mut self, messages: Vec<Message>) {
        self.played = messages;
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        async {
            let own = self.inner.score().await?;
            Ok(self.outcome(own).await)
        }
        .boxed()
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        self.inner.close()
    }
}

/// Plays one turn with the text `said`, and scores it. A reward of a group gets two members with that text.
///
/// # Errors
/// If the environment fails.
pub async fn trial(envs: &dyn EnvFactory, task: &Task, said: &str) -> Result<Outcome, EnvError> {
    let mut env = envs.create(task)?;
    let played = async {
        let messages = env.reset().await?.messages;
        let outcome = match env.step(Action::say(said)).await?.outcome {
            Some(outcome) => outcome,
            None => env.score().await?,
        };
        Ok((messages, outcome))
    };
    let played = played.await;
    env.close().await?;
    let (mut messages, outcome) = played?;
    let Some(group) = envs
        .group_reward(task)
        .filter(|_| waits_for_group(&outcome))
    else {
        return Ok(outcome);
    };
    messages.push(Action::say(said).parted());
    let sample = RewardSample {
        messages,
        metrics: outcome.metrics.clone(),
        ..RewardSample::new(task.clone(), said)
    };
    let mut scores = group.score_group(&[sample.clone(), sample]).await;
    let missing = || Err(Unscored::new("the group got no scores"));
    Ok(with_group(&outcome, scores.pop().unwrap_or_else(missing)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatFactory;
    use crate::reward::Score;
    use crate::tiny::{TinyFactory, TinyTaskset};
    use crate::{Split, Taskset};
    use futures::executor::block_on;
    use futures::future::BoxFuture;
    use sinew_types::Role;

    /// Counts the messages and calls; unscored for an output of "?".
    struct Counter;

    impl Reward for Counter {
        fn name(&self) -> &str {
            "counter"
        }

        fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
            let said = sample.messages.iter().filter(|m| m.role == Role::Assistant);
            let score = match sample.output.as_str() {
                "?" => Err(Unscored::new("no idea")),
                _ => Score::new(said.count() as f64),
            };
            futures::future::ready(score).boxed()
        }
    }

    #[test]
    fn the_reward_takes_the_place_of_the_environments_score() {
        let tasks = TinyTaskset::new(0);
        let task = tasks.get(Split::Train, 0).unwrap();
        let inner: Arc<dyn EnvFactory> = Arc::new(TinyFactory);
        let rewarded = Rewarded::new(Arc::clone(&inner), Arc::new(Counter));
        let (own, turns) = block_on(crate::gold_run(inner.as_ref(), &task)).unwrap();
        let (outcome, same) = block_on(crate::gold_run(&rewarded, &task)).unwrap();
        assert_eq!((outcome.reward, same), (turns as f64, turns));
        assert_eq!(outcome.metrics["env/reward"], own.reward);
        assert_eq!(rewarded.name(), inner.name());
    }

    #[test]
    fn a_reward_sees_the_messages_of_a_program() {
        let task = TinyTaskset::new(0).get(Split::Train, 0).unwrap();
        let factory = Rewarded::new(Arc::new(ChatFactory::default()), Arc::new(Counter));
        let mut env = factory.create(&task).unwrap();
        block_on(env.reset()).unwrap();
        let said = |text: &str| Message::new(Role::Assistant, text.to_owned());
        env.played(vec![said("a"), said("b"), said("c")]);
        let step = block_on(env.step(Action::say("c"))).unwrap();
        assert_eq!(step.outcome.unwrap().reward, 3.0);
        block_on(env.close()).unwrap();
    }

    #[test]
    fn a_chat_is_one_turn_and_unscored_without_a_score() {
        let mut task = TinyTaskset::new(0).get(Split::Train, 0).unwrap();
        task.preamble = vec![Message::new(Role::System, "Be brief.".to_owned())];
        let factory = Rewarded::new(Arc::new(ChatFactory::default()), Arc::new(Counter));
        for (said, scored) in [("yes", true), ("?", false)] {
            let mut env = factory.create(&task).unwrap();
            let reset = block_on(env.reset()).unwrap();
            assert_eq!(reset.messages.len(), 2);
            let step = block_on(env.step(Action::say(said))).unwrap();
            let outcome = step.outcome.unwrap();
            assert!(step.done);
            assert_eq!((outcome.reward == 1.0, !outcome.unscored), (scored, scored));
            assert!(!outcome.metrics.contains_key("env/reward"));
            block_on(env.close()).unwrap();
        }
        let mut alone = ChatFactory::default().create(&task).unwrap();
        let step = block_on(alone.step(Action::say("yes"))).unwrap();
        assert!(step.outcome.unwrap().unscored);
    }
}
