//! The environment's gold policy as a source of demonstrations: it plays the training tasks, and its turns
//! are rendered as this model would write them.
//!
//! A step has one gold run of each of its tasks, which are those that a run that samples would draw, by the
//! weights of environments and task types. A gold
//! run is an episode like any other: stored before it is trained, named after its draw, failed with a reason.
//! One that fails, or that the model could not have written, is stored and not trained.
//!
//! | part | here |
//! |---|---|
//! | [`GoldRuns::play`] | one task in its environment, as a trace |
//! | [`GoldSource`] | the tasks of a step, many at once, scored by the policy and stored |

use crate::pool_source::stored_step;
use sinew_algo::Columns;
use sinew_env::{Action, CallNotation, EnvError, EnvFactory, Split, Taskset};
use sinew_orchestrator::{PipelineError, TaskDraws};
use sinew_pipeline::{GroupRequest, SampleSource, SourceGroups};
use sinew_render::Renderer;
use sinew_rollout::{EpisodeSpec, RunInfo, action_of_tokens};
use sinew_types::{
    BranchCause, EpisodeEnd, EpisodeId, FailureKind, GroupId, Message, NO_PARENT, Node, NodeId,
    Outcome, Role, SamplingParams, TokenKind, ToolSpec, Trace, mix_seed,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Parts of an environment and a model from which gold runs are made.
pub struct GoldRuns {
    /// Taskset whose training tasks are played.
    pub taskset: Arc<dyn Taskset>,
    /// Environments with a gold policy.
    pub envs: Arc<dyn EnvFactory>,
    /// Renderer of the model that imitates.
    pub renderer: Arc<dyn Renderer>,
    /// Run that the traces name.
    pub run: RunInfo,
    /// Maximum number of turns.
    pub max_turns: u32,
    /// Maximum number of tokens of an episode.
    pub max_context_tokens: usize,
    /// Wall time of one gold run, the start of its world included.
    pub timeout: Duration,
    /// Maximum number of gold runs at once.
    pub max_in_flight: usize,
    /// Some environments keep the actions of one task at a time.
    pub asking: Mutex<()>,
}

sinew_types::debug_fields!(
    GoldRuns as this,
    taskset = this.taskset.name(),
    env = this.envs.name()
);

/// Messages that a model sees together.
struct Context {
    messages: Vec<Message>,
    /// Number of leading messages before the first turn. Worked examples in the prompt are not turns.
    given: usize,
}

impl From<Vec<Message>> for Context {
    fn from(messages: Vec<Message>) -> Self {
        Self {
            given: messages.len(),
            messages,
        }
    }
}

/// The messages of a gold run.
struct GoldRun {
    /// One, and one more after each step that took what came before out of the model's context.
    contexts: Vec<Context>,
    /// Tools that the chat template shows.
    tools: Vec<ToolSpec>,
    /// Notation in which the turns write their calls.
    calls: CallNotation,
    /// Turns of the gold policy, in order.
    actions: Vec<Action>,
    /// The score that the environment gave to them.
    outcome: Outcome,
}

const FAILED: &str = "the gold run failed";
const UNSOLVED: &str = "the gold run did not solve its task";
const TURNS: &str = "the gold run takes more than rollout.max_turns";
const RENDER: &str = "the gold run cannot be rendered within rollout.max_context_tokens";
const READ_BACK: &str = "the model's notation of the gold run reads back as something else";

impl GoldRun {
    /// Adds messages to what the model sees.
    fn hear(&mut self, messages: Vec<Message>) {
        if let Some(context) = self.contexts.last_mut() {
            context.messages.extend(messages);
        }
    }

    /// Leaves out what was observed after the last turn, which is not imitated.
    fn end(&mut self) {
        if let Some(context) = self.contexts.last_mut() {
            let mut turns = context.messages[context.given..].iter();
            let last = turns.rposition(|m| m.role == Role::Assistant);
            let kept = last.map_or(0, |at| context.given + at + 1);
            context.messages.truncate(kept);
            if kept == 0 && self.contexts.len() > 1 {
                self.contexts.pop();
            }
        }
    }

    /// The calls of the gold policy, for a message.
    fn calls_told(&self) -> String {
        let calls = self.actions.iter().flat_map(|a| &a.tool_calls);
        let calls: Vec<String> = calls
            .map(|c| format!("{}({})", c.name, c.arguments))
            .collect();
        if calls.is_empty() {
            "a turn of text".into()
        } else {
            calls.join(", ")
        }
    }
}

/// Returns the reason why a gold run is not trained, if it is not. There are only a few reasons, so that they
/// can be counted.
pub fn unused(trace: &Trace) -> Option<&'static str> {
    match &trace.end {
        EpisodeEnd::Failed { message, .. } => {
            let known = [TURNS, RENDER, READ_BACK];
            let named = known.into_iter().find(|why| message.starts_with(why));
            Some(named.unwrap_or(FAILED))
        }
        _ if trace.outcome.unscored || !trace.outcome.success => Some(UNSOLVED),
        _ => None,
    }
}

impl GoldRuns {
    /// The first environment that has no gold policy, by its place in the recipe; `None`: all have one. It
    /// may block the thread.
    ///
    /// # Errors
    /// If an environment has no task, or refuses its first one.
    pub fn without_gold(&self) -> Result<Option<usize>, PipelineError> {
        for (place, (_, tasks)) in self.taskset.members().into_iter().enumerate() {
            let task = self.taskset.get(Split::Train, tasks.start);
            let task = task.map_err(PipelineError::input)?;
            let first = self.envs.gold(&task, 0);
            let first = first.map_err(|e| PipelineError::input(format!("env: {e}")))?;
            if first.is_none() {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    /// Plays draw `draw`, which is the training task at `index`. The trace is valid in any case; [`unused`]
    /// decides whether it can be imitated.
    ///
    /// # Errors
    /// If the taskset has no such task.
    pub async fn play(
        self: &Arc<Self>,
        seed: u64,
        draw: u64,
        index: usize,
    ) -> Result<Trace, PipelineError> {
        let task = self.taskset.get(Split::Train, index);
        let spec = EpisodeSpec {
            episode: EpisodeId::new(format!("d{draw:08}-e0")),
            group: GroupId::new(format!("d{draw:08}")),
            task: task.map_err(PipelineError::system)?,
            draw,
            purpose: "train".into(),
            seed: mix_seed(seed, draw),
        };
        let mut trace = spec.empty_trace(&self.run, &SamplingParams::default());
        // Nothing was sampled.
        trace.provenance.sampling = None;
        let fail = |mut trace: Trace, kind: FailureKind, why: &str, detail: String| {
            let message = format!("{why}: {detail}");
            tracing::warn!(task = %spec.task.id, message);
            trace.end = EpisodeEnd::Failed { kind, message };
            Ok(trace)
        };
        let actions = match self.actions(&spec).await {
            Ok(actions) => actions,
            Err(e) => return fail(trace, e.failure_kind(), FAILED, e.to_string()),
        };
        if actions.len() > self.max_turns as usize {
            let turns = format!("{} or more", actions.len());
            return fail(trace, FailureKind::Environment, TURNS, turns);
        }
        let said = tokio::time::timeout(self.timeout, self.in_world(&spec, actions)).await;
        let said = match said {
            Ok(Ok(said)) => said,
            Ok(Err(e)) => return fail(trace, e.failure_kind(), FAILED, e.to_string()),
            Err(_) => {
                let late = format!("it took more than {} s", self.timeout.as_secs_f64());
                return fail(trace, FailureKind::Environment, FAILED, late);
            }
        };
        for context in &said.contexts {
            let rendered = sinew_pool::conversation(
                &context.messages,
                |at| at >= context.given,
                &said.tools,
                self.renderer.as_ref(),
                self.max_context_tokens,
            );
            match rendered {
                Ok(rendered) => follow(&mut trace.nodes, rendered.nodes),
                Err(e) => return fail(trace, FailureKind::Render, RENDER, e.to_string()),
            }
        }
        trace.outcome = said.outcome.clone();
        if self.reads_back(&trace, &said) {
            Ok(trace)
        } else {
            fail(trace, FailureKind::Render, READ_BACK, said.calls_told())
        }
    }

    /// The actions of the gold policy, one more than allowed if it has more.
    async fn actions(self: &Arc<Self>, spec: &EpisodeSpec) -> Result<Vec<Action>, EnvError> {
        let (runs, task) = (Arc::clone(self), spec.task.clone());
        let asked = tokio::task::spawn_blocking(move || {
            let _one = runs.asking.lock().unwrap_or_else(PoisonError::into_inner);
            let turns = 0..=runs.max_turns as usize;
            let actions = turns.map(|turn| runs.envs.gold(&task, turn).transpose());
            actions.map_while(|action| action).collect()
        });
        let ended = |e: tokio::task::JoinError| EnvError::Worker(format!("gold policy: {e}"));
        asked.await.map_err(ended)?
    }

    /// Plays `actions` in a separate world, which is closed in any case.
    async fn in_world(
        &self,
        spec: &EpisodeSpec,
        actions: Vec<Action>,
    ) -> Result<GoldRun, EnvError> {
        let mut env = self.envs.create(&spec.task)?;
        let played = async {
            let reset = env.reset().await?;
            let mut said = GoldRun {
                contexts: vec![reset.messages.into()],
                tools: reset.tools,
                calls: reset.calls,
                actions: Vec::new(),
                outcome: Outcome::default(),
            };
            for action in actions {
                said.hear(vec![turn(&action, &said.calls)]);
                said.actions.push(action.clone());
                let step = env.step(action).await?;
                if let Some(outcome) = step.outcome {
                    said.outcome = outcome;
                    return Ok(said);
                }
                match (env.renewed(), step.observation) {
                    (Some(messages), _) => said.contexts.push(messages.into()),
                    (None, Some(seen)) => said.hear(env.format_observation(&seen)),
                    (None, None) => {}
                }
            }
            said.end();
            said.outcome = env.score().await?;
            Ok(said)
        };
        let played: Result<GoldRun, EnvError> = played.await;
        let closed = env.close().await;
        let said = played?;
        closed.map(|()| said)
    }

    /// Whether the tokens of each turn mean what the gold policy did.
    fn reads_back(&self, trace: &Trace, said: &GoldRun) -> bool {
        let turns = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        let mut same = turns.zip(&said.actions).map(|(node, action)| {
            let renderer = self.renderer.as_ref();
            let read = action_of_tokens(renderer, &said.calls, &said.tools, &node.tokens, false);
            let calls = |a: &Action| -> Vec<_> {
                let calls = a.tool_calls.iter();
                calls
                    .map(|c| (c.name.clone(), c.arguments.clone()))
                    .collect()
            };
            let said = |a: &Action| {
                let turn = a.turn();
                (turn.reasoning, turn.answer.trim().to_owned())
            };
            let texts = said(&read) == said(action);
            calls(&read) == calls(action) && (texts || !action.tool_calls.is_empty())
        });
        same.all(|same| same)
    }
}

/// Appends the nodes of a new context as a separate chain, and continues the count of turns.
fn follow(nodes: &mut Vec<Node>, context: Vec<Node>) {
    let (before, turns) = (nodes.len() as NodeId, nodes.last().map_or(0, |n| n.turn));
    nodes.extend(context.into_iter().map(|node| Node {
        parent: match node.parent {
            NO_PARENT => NO_PARENT,
            parent => parent + before,
        },
        turn: node.turn + turns,
        branch: (node.parent == NO_PARENT && before > 0).then_some(BranchCause::Compaction),
        ..node
    }));
}

/// Converts a gold action into an assistant message. Calls in a notation of the environment are part of the
/// text.
fn turn(action: &Action, calls: &CallNotation) -> Message {
    let mut message = Message::new(Role::Assistant, action.text.clone());
    message.reasoning.clone_from(&action.reasoning);
    if *calls == CallNotation::Template {
        message.tool_calls.clone_from(&action.tool_calls);
    }
    message
}

/// Gold runs as training episodes.
#[derive(Debug)]
pub struct GoldSource {
    /// Shared with the tasks that play.
    pub runs: Arc<GoldRuns>,
    /// Draws of the training tasks.
    pub tasks: TaskDraws,
    /// Runtime on which the gold runs are played.
    pub runtime: Handle,
    /// Turns true when the run is asked to stop.
    pub cancel: watch::Receiver<bool>,
}

impl GoldSource {
    /// Plays the draws of a step that are not stored yet, in the order of their draws.
    fn play(
        &mut self,
        wanted: &GroupRequest<'_>,
        known: &BTreeSet<u64>,
    ) -> Result<Vec<Trace>, PipelineError> {
        let (seed, first) = (wanted.seed, (wanted.step - 1) * wanted.groups as u64);
        let indices = self.tasks.indices(seed, wanted.step, wanted.groups);
        let room = Arc::new(Semaphore::new(self.runs.max_in_flight.max(1)));
        let mut cancel = self.cancel.clone();
        let play = async {
            let mut playing = JoinSet::new();
            for (draw, index) in (first..).zip(indices) {
                if known.contains(&draw) {
                    continue;
                }
                let (runs, room) = (Arc::clone(&self.runs), Arc::clone(&room));
                playing.spawn(async move {
                    let _place = room.acquire().await;
                    (draw, runs.play(seed, draw, index).await)
                });
            }
            let mut played = BTreeMap::new();
            while let Some(done) = playing.join_next().await {
                let (draw, run) = done.map_err(PipelineError::system)?;
                played.insert(draw, run?);
            }
            Ok(played.into_values().collect())
        };
        self.runtime.block_on(async {
            tokio::select! {
                played = play => played,
                Ok(_) = cancel.wait_for(|stop| *stop) => Err(PipelineError::Interrupted),
            }
        })
    }
}

impl SampleSource for GoldSource {
    fn groups(&mut self, wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let stored = stored_step(wanted.store, wanted.step, wanted.groups as u64)?;
        let known: BTreeSet<u64> = stored.iter().map(|t| t.origin.draw).collect();
        let played = self.play(&wanted, &known)?;
        let (bad, good): (Vec<Trace>, Vec<Trace>) =
            played.into_iter().partition(|t| unused(t).is_some());
        let mut good: Vec<Vec<Trace>> = good.into_iter().map(|t| vec![t]).collect();
        if !good.is_empty() {
            let none = Columns::new();
            let (learner, algorithm) = (wanted.learner, wanted.algorithm);
            learner.score_data(algorithm, &mut good, &none)?;
        }
        let new: Vec<Trace> = good.into_iter().flatten().chain(bad).collect();
        let written = wanted.store.commit_batch(&new);
        written.map_err(PipelineError::system)?;
        let mut given = SourceGroups::default();
        for trace in new.into_iter().chain(stored) {
            match unused(&trace) {
                None => given.groups.push(vec![trace]),
                Some(why) => {
                    given.dropped.insert(trace.episode, why.to_owned());
                }
            }
        }
        let draw = |group: &Vec<Trace>| group.first().map(|t| t.origin.draw);
        given.groups.sort_by_key(draw);
        Ok(given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::{Env, MixtureFactory, MixtureTasks, tiny};
    use sinew_orchestrator::{ByType, EnvironmentShare, TaskSampling, TaskShares};
    use sinew_render::TinyRenderer;
    use sinew_types::{Task, ToolCall};

    /// The tiny world with other solutions; `None`: an error.
    struct Other(fn(&Task, usize) -> Option<Option<Action>>);

    impl EnvFactory for Other {
        fn name(&self) -> &str {
            "other"
        }

        fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
            tiny::TinyFactory.create(task)
        }

        fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
            (self.0)(task, turn).ok_or(EnvError::Worker("no idea".into()))
        }
    }

    fn runs(envs: impl EnvFactory + 'static, tokens: usize) -> Arc<GoldRuns> {
        Arc::new(GoldRuns {
            taskset: Arc::new(tiny::TinyTaskset::new(0)),
            envs: Arc::new(envs),
            renderer: Arc::new(TinyRenderer::new(tiny::ALPHABET)),
            run: RunInfo::default(),
            max_turns: 4,
            max_context_tokens: tokens,
            timeout: Duration::from_secs(60),
            max_in_flight: 2,
            asking: Mutex::new(()),
        })
    }

    fn play(runs: &Arc<GoldRuns>, draw: u64) -> Trace {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let index = draw as usize % runs.taskset.len(Split::Train);
        let trace = runtime.block_on(runs.play(0, draw, index)).unwrap();
        trace.validate().unwrap();
        trace
    }

    #[test]
    fn a_gold_run_is_a_solved_episode_in_the_tokens_of_the_model() {
        let runs = runs(tiny::TinyFactory, 64);
        assert_eq!(runs.without_gold().unwrap(), None);
        for draw in 0..20 {
            let trace = play(&runs, draw);
            assert_eq!(unused(&trace), None, "{:?}", trace.end);
            assert_eq!(trace.episode.as_str(), format!("d{draw:08}-e0"));
            assert!(trace.outcome.success && trace.outcome.reward == 1.0);
            let turns: Vec<_> = trace
                .nodes
                .iter()
                .filter(|n| n.kind == TokenKind::Sampled)
                .collect();
            let far: usize = trace
                .task_kind
                .strip_prefix("corridor-")
                .unwrap()
                .parse()
                .unwrap();
            // A move and the stop token each.
            assert_eq!((turns.len(), trace.sampled_tokens()), (far, 2 * far));
        }
    }

    /// Two of these worlds, drawn three to one.
    fn source() -> GoldSource {
        let tiny = || Arc::new(tiny::TinyTaskset::new(0)) as Arc<dyn Taskset>;
        let members = vec![("often".to_owned(), tiny()), ("rarely".to_owned(), tiny())];
        let taskset = Arc::new(MixtureTasks::new(members).unwrap());
        let ranges = taskset.members().into_iter().zip([3.0, 1.0]);
        let shares: Vec<_> = ranges
            .map(|((_, tasks), weight)| EnvironmentShare {
                weight,
                tasks,
                by_type: ByType::One,
            })
            .collect();
        let tasks = TaskShares::of(taskset.as_ref(), &shares).unwrap();
        let mut runs = runs(tiny::TinyFactory, 64);
        Arc::get_mut(&mut runs).unwrap().taskset = taskset;
        let shares = TaskSampling::Shares {
            tasks,
            adaptive: None,
        };
        GoldSource {
            tasks: TaskDraws::new(shares, runs.taskset.len(Split::Train)),
            runs,
            runtime: tokio::runtime::Runtime::new().unwrap().handle().clone(),
            cancel: watch::channel(false).1,
        }
    }

    #[test]
    fn environments_are_drawn_by_their_weights_also_after_a_restart() {
        let mut one = source();
        let first = one.runs.taskset.members()[0].1.clone();
        let steps: Vec<Vec<usize>> = (1..=6).map(|step| one.tasks.indices(7, step, 8)).collect();
        let often = steps.iter().flatten().filter(|i| first.contains(i));
        assert_eq!(often.count(), 36, "{steps:?}");
        for (n, step) in steps.iter().enumerate() {
            assert_eq!(source().tasks.indices(7, n as u64 + 1, 8), *step);
        }
        assert_eq!(one.tasks.indices(7, 2, 8), steps[1]);
    }

    #[test]
    fn every_environment_of_a_mixture_must_have_a_gold_policy() {
        let mut runs = runs(tiny::TinyFactory, 64);
        let changed = Arc::get_mut(&mut runs).unwrap();
        changed.taskset = Arc::clone(&source().runs.taskset);
        let silent = Other(|_, _| Some(None));
        let members: Vec<(String, Arc<dyn EnvFactory>)> = vec![
            ("often".into(), Arc::new(tiny::TinyFactory)),
            ("rarely".into(), Arc::new(silent)),
        ];
        changed.envs = Arc::new(MixtureFactory::new(members));
        assert_eq!(runs.without_gold().unwrap(), Some(1));
    }

    #[test]
    fn a_gold_run_that_cannot_be_imitated_says_why() {
        let solution = |task: &Task, turn| tiny::TinyFactory.gold(task, turn).ok();
        type Plays = fn(&Task, usize) -> Option<Option<Action>>;
        let cases: [(Plays, usize, &str); 5] = [
            (
                |_, turn| Some((turn < 1).then(|| Action::say("A"))),
                64,
                UNSOLVED,
            ),
            (|_, _| Some(Some(Action::say("A"))), 64, TURNS),
            (
                |_, turn| (turn < 1).then(|| Some(Action::say("A"))),
                64,
                FAILED,
            ),
            (solution, 3, RENDER),
            (
                |task, turn| {
                    let action = tiny::TinyFactory.gold(task, turn).ok()?;
                    Some(action.map(|action| Action {
                        tool_calls: vec![ToolCall {
                            id: "c".into(),
                            name: "walk".into(),
                            arguments: serde_json::json!({}),
                        }],
                        ..action
                    }))
                },
                64,
                READ_BACK,
            ),
        ];
        for (gold, tokens, why) in cases {
            let trace = play(&runs(Other(gold), tokens), 0);
            assert_eq!(unused(&trace), Some(why), "{:?}", trace.end);
        }
        let none = runs(Other(|_, _| Some(None)), 64);
        assert_eq!(none.without_gold().unwrap(), Some(0));
    }
}
