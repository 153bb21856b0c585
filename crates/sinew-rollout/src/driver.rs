//! Executes the commands of an [`EpisodeMachine`] with engine, environment, renderer and clock.
//!
//! Each phase has a separate deadline: the start of the environment, all turns together, and the score. Time
//! in the queue of admission is added to the deadline of the turns, since other episodes cause it.

use crate::action;
use crate::episode::{EpisodeCommand, EpisodeEvent, EpisodeMachine, EpisodeSpec};
use crate::gauges::{Phase, unix_s};
use crate::in_flight::{self, InFlight, Log, SavedEpisode};
use crate::parts::{EpisodeOptions, EpisodeParts};
use crate::shown::{NewContext, ShownHistory};
use sinew_env::{CallNotation, Env, EnvFuture, StepResult};
use sinew_render::RenderError;
use sinew_sandbox::owned;
use sinew_types::{
    BranchCause, Engine, EngineEvent, EpisodeId, FailureKind, FinishReason, GenerateRequest,
    Message, Node, RequestId, SamplingParams, Timing, TokenId, TokenKind, ToolSpec, Trace,
    mix_seed,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

/// Purpose of training episodes.
const TRAIN: &str = "train";

/// Maximum time to close an environment after the end of its episode.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A running episode.
struct EpisodeRun<'a> {
    parts: &'a EpisodeParts,
    options: &'a EpisodeOptions,
    spec: &'a EpisodeSpec,
    /// Deadline of the present phase: the start of the environment, or all turns.
    deadline: Instant,
    /// Tools that the environment offers, for the chat template and the parser of calls.
    tools: Vec<ToolSpec>,
    /// Notation in which the model writes calls of these tools.
    calls: CallNotation,
    /// Messages of the context, where thinking is dropped.
    shown: ShownHistory,
    /// Reason for the end of the last turn; it decides how the next message is appended.
    last_finish: FinishReason,
    /// Measured times, for the trace.
    timing: Timing,
    /// Time at which this session started the episode.
    started: Instant,
    /// Log of the episode's progress, for resuming it.
    log: Option<Log>,
}

/// A request of an episode. Dropping it before its end aborts it.
struct EngineRequest<'a> {
    engine: &'a dyn Engine,
    id: RequestId,
    over: bool,
}

impl Drop for EngineRequest<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.engine.abort(self.id);
        }
    }
}

/// The environment of an episode. It is also closed if the episode is stopped.
struct OpenEnv<'a> {
    env: Option<Box<dyn Env>>,
    episode: &'a EpisodeId,
}

impl Drop for OpenEnv<'_> {
    fn drop(&mut self) {
        // The environment is not closed if there is no runtime, because the process ends then.
        if let (Some(env), Ok(runtime)) = (self.env.take(), Handle::try_current()) {
            drop(runtime.spawn(close(env, self.episode.clone())));
        }
    }
}

impl OpenEnv<'_> {
    /// Closes the environment and waits until it is closed.
    async fn close(mut self) {
        if let Some(env) = self.env.take() {
            close(env, self.episode.clone()).await;
        }
    }
}

/// Closes an environment. It is abandoned with a log message if that fails or takes too long.
pub(crate) async fn close(mut env: Box<dyn Env>, episode: EpisodeId) {
    let closed = tokio::time::timeout(CLOSE_TIMEOUT, env.close()).await;
    if !matches!(closed, Ok(Ok(()))) {
        tracing::warn!(%episode, ?closed, "environment did not close");
    }
}

/// Runs one episode to its end. Never fails: an error is in the trace.
///
/// An episode that an earlier session left in [`EpisodeParts::in_flight`] is resumed, if a new environment
/// returns the recorded observations for its actions; otherwise it starts again.
///
/// The environment is always closed. If this takes longer than 10 seconds, it is abandoned with a log
/// message.
pub async fn run_episode(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    spec: &EpisodeSpec,
) -> Trace {
    let started = Instant::now();
    let mut machine = options.machine(spec, &parts.run);
    // Held-out episodes measure the weights of now.
    let in_flight = parts.in_flight.as_ref().filter(|_| spec.purpose == TRAIN);
    let begun = in_flight.map(|all| (all, all.begin(machine.trace())));
    let (mut log, mut saved) = (None, None);
    if let Some((all, (own, earlier))) = begun {
        log = Some(own);
        saved = earlier.map(|earlier| (all, earlier));
    }
    let mut running = EpisodeRun {
        parts,
        options,
        spec,
        deadline: started + options.boot_timeout,
        tools: Vec::new(),
        calls: CallNotation::default(),
        shown: ShownHistory::default(),
        last_finish: FinishReason::Length,
        timing: Timing {
            started_unix_s: unix_s(),
            ..Timing::default()
        },
        started,
        log,
    };
    // Each beginning numbers its sandboxes anew: what was recorded of one that was given up is gone.
    let owner = spec.episode.as_str();
    if let Some((all, earlier)) = saved.take() {
        if owned(owner, running.take_up(&mut machine, all, &earlier)).await {
            return running.over(machine);
        }
        machine = options.machine(spec, &parts.run);
        running.again(&machine);
    }
    owned(owner, running.play(&mut machine)).await;
    running.over(machine)
}

impl<'a> EpisodeRun<'a> {
    /// Runs the episode from its start.
    async fn play(&mut self, machine: &mut EpisodeMachine) {
        let Some(mut world) = self.world(machine) else {
            return;
        };
        if let Some(env) = &mut world.env {
            let event = self.reset(env.as_mut()).await;
            let command = machine.on_event(event);
            machine.offered(&self.tools);
            self.turned(machine);
            self.drive(machine, env.as_mut(), command).await;
        }
        world.close().await;
    }

    /// Creates the environment. If that fails, the episode ends.
    fn world(&self, machine: &mut EpisodeMachine) -> Option<OpenEnv<'a>> {
        match self.parts.envs.create(&self.spec.task) {
            Ok(env) => Some(OpenEnv {
                env: Some(env),
                episode: &self.spec.episode,
            }),
            Err(e) => {
                machine.on_event(EpisodeEvent::failed(e.failure_kind(), e));
                None
            }
        }
    }

    /// Returns the trace of the ended episode.
    fn over(mut self, machine: EpisodeMachine) -> Trace {
        self.timing.total_s += self.started.elapsed().as_secs_f64();
        let mut trace = machine.into_trace(self.timing);
        // A turn that the episode's end cut was not acted on.
        let renderer = self.parts.renderer.as_ref();
        let mute = |n: &&mut Node| n.kind == TokenKind::Sampled && n.messages.is_empty();
        for node in trace.nodes.iter_mut().filter(mute) {
            let (calls, tools) = (&self.calls, &self.tools);
            let action = action::of_tokens(renderer, calls, tools, &node.tokens, true);
            let said = action::message(renderer, calls, tools, &node.tokens, &action);
            node.messages = vec![said];
        }
        trace
    }

    /// Discards the progress of an earlier session, so that the episode starts again.
    fn again(&mut self, machine: &EpisodeMachine) {
        self.timing = Timing {
            started_unix_s: self.timing.started_unix_s,
            ..Timing::default()
        };
        self.started = Instant::now();
        self.deadline = self.started + self.options.boot_timeout;
        if let Some(log) = &self.log {
            in_flight::cleared(log, machine.trace());
        }
    }

    /// Resumes an episode of an earlier session: a new environment receives the actions of its complete turns
    /// again. If it returns the recorded observations, the episode runs to its end. Returns whether it did.
    async fn take_up(
        &mut self,
        machine: &mut EpisodeMachine,
        all: &InFlight,
        saved: &SavedEpisode,
    ) -> bool {
        let Some(mut world) = self.world(machine) else {
            all.went_on(saved, false);
            return false;
        };
        let mut equal = false;
        if let Some(env) = &mut world.env {
            equal = self.replay(saved, env.as_mut()).await;
            all.went_on(saved, equal);
            if equal {
                let command = self.behind(machine, saved);
                self.drive(machine, env.as_mut(), command).await;
            }
        }
        world.close().await;
        equal
    }

    /// Sends the actions of complete turns to a new environment. Returns whether its observations are the
    /// recorded ones.
    async fn replay(&mut self, saved: &SavedEpisode, env: &mut dyn Env) -> bool {
        let replays = self.parts.envs.capabilities().deterministic || self.options.replay_always;
        let Some((prompt, turns)) = saved.turns().filter(|_| replays) else {
            return false;
        };
        let EpisodeEvent::Reset {
            prompt: tokens,
            messages,
            state_hash,
        } = self.reset(env).await
        else {
            return false;
        };
        let same = (&tokens, &messages, state_hash);
        if same != (&prompt.tokens, &prompt.messages, prompt.state_hash) {
            return false;
        }
        let mut context = tokens;
        for turn in turns {
            let Some(reason) = &turn.sampled.finish else {
                return false;
            };
            self.last_finish = reason.clone();
            let sampled = &turn.sampled.tokens;
            context.extend_from_slice(sampled);
            let (_, answer) = self.act(&context, sampled, env).await;
            let seen = turn.observation;
            if !turn.is_answered_by(&answer) {
                return false;
            }
            if matches!(answer, EpisodeEvent::Renewed { .. }) {
                context.clear();
            }
            context.extend_from_slice(turn.forced);
            context.extend_from_slice(&seen.tokens);
        }
        // Time that the episode took in earlier sessions still counts.
        let timing = saved.trace.timing;
        let taken = Duration::try_from_secs_f64(timing.total_s).unwrap_or_default();
        self.deadline = Instant::now() + self.options.timeout.saturating_sub(taken);
        self.timing = timing;
        self.started = Instant::now();
        true
    }

    /// Restores the machine to the saved progress and returns its next command. An incomplete turn with an
    /// output format is sampled again from its start.
    fn behind(&mut self, machine: &mut EpisodeMachine, saved: &SavedEpisode) -> EpisodeCommand {
        let command = machine.restore(saved.trace.nodes.clone());
        let EpisodeCommand::Generate { max_tokens } = command else {
            return command;
        };
        let stops = |id| self.parts.renderer.stop_ids().contains(&id);
        let finish = saved.finish.clone().or_else(|| {
            let last = saved.turn.last().map(|t| t.id)?;
            if stops(last) {
                Some(FinishReason::StopId { id: last })
            } else {
                (saved.turn.len() >= max_tokens as usize).then_some(FinishReason::Length)
            }
        });
        if finish.is_none() && self.options.sampling.format.is_some() {
            if let Some(log) = &self.log {
                in_flight::turned(log, machine, self.timing);
            }
            return command;
        }
        if !saved.turn.is_empty() {
            machine.on_event(EpisodeEvent::Tokens(saved.turn.clone()));
        }
        match finish {
            None => command,
            Some(reason) => {
                self.last_finish = reason.clone();
                machine.on_event(EpisodeEvent::TurnFinished(reason))
            }
        }
    }

    /// Executes commands until the machine has finished.
    async fn drive(
        &mut self,
        machine: &mut EpisodeMachine,
        env: &mut dyn Env,
        mut command: EpisodeCommand,
    ) {
        loop {
            command = match command {
                EpisodeCommand::Generate { max_tokens } => self.generate(machine, max_tokens).await,
                EpisodeCommand::Step => {
                    let event = self.step(machine, env).await;
                    let command = machine.on_event(event);
                    // The turn is recorded only if another one follows: at a limit the environment still has
                    // to score it.
                    if matches!(command, EpisodeCommand::Generate { .. }) {
                        self.turned(machine);
                    }
                    command
                }
                EpisodeCommand::Score => {
                    let event = self.score(env).await;
                    machine.on_event(event)
                }
                EpisodeCommand::Finish | EpisodeCommand::Wait => return,
            };
        }
    }

    /// Saves the progress of the episode.
    fn turned(&self, machine: &EpisodeMachine) {
        let Some(log) = &self.log else {
            return;
        };
        let timing = Timing {
            total_s: self.timing.total_s + self.started.elapsed().as_secs_f64(),
            ..self.timing
        };
        in_flight::turned(log, machine, timing);
    }

    /// Waits for the environment until the deadline, and counts the time as tool time. At the deadline the
    /// call is dropped, so environments must tolerate cancellation at every await.
    async fn env_call<T>(
        &mut self,
        deadline: Instant,
        phase: Phase,
        call: EnvFuture<'_, T>,
    ) -> Result<T, EpisodeEvent> {
        let started = Instant::now();
        let (gauges, episode) = (&self.parts.gauges, &self.spec.episode);
        let _in_phase = gauges.enter(episode, phase, Some(deadline));
        let result = timeout_at(deadline, call).await;
        self.timing.tool_s += started.elapsed().as_secs_f64();
        match result {
            Err(_) => Err(EpisodeEvent::Deadline),
            Ok(Err(e)) => Err(EpisodeEvent::failed(e.failure_kind(), e)),
            Ok(Ok(value)) => Ok(value),
        }
    }

    /// Starts the environment and renders its first messages. The deadline of the turns starts here.
    async fn reset(&mut self, env: &mut dyn Env) -> EpisodeEvent {
        let reset = match self.env_call(self.deadline, Phase::Boot, env.reset()).await {
            Ok(reset) => reset,
            Err(event) => return event,
        };
        self.deadline = Instant::now() + self.options.timeout;
        let rendered = self
            .parts
            .renderer
            .render_prompt(&reset.messages, &reset.tools);
        self.tools = reset.tools;
        self.calls = reset.calls;
        self.begin_shown(&reset.messages);
        match rendered {
            Ok(prompt) => EpisodeEvent::Reset {
                prompt,
                messages: reset.messages,
                state_hash: reset.state_hash,
            },
            Err(e) => EpisodeEvent::failed(FailureKind::Render, e),
        }
    }

    /// Samples one turn, in chunks if the options ask for it. After each chunk the episode returns its place
    /// and requests the next one, so that episodes which are expected to run longer come first.
    async fn generate(&mut self, machine: &mut EpisodeMachine, max_tokens: u32) -> EpisodeCommand {
        loop {
            let sampled = machine.turn_tokens().len() as u32;
            let left = max_tokens.saturating_sub(sampled);
            let piece = self.options.chunk_tokens.map_or(left, |c| c.min(left));
            let finished = self.piece(machine, piece).await;
            let goes_on = piece < left && machine.turn_tokens().len() as u32 > sampled;
            match finished {
                Ok(FinishReason::Length) if goes_on => {}
                Ok(reason) => {
                    self.last_finish = reason.clone();
                    if let Some(log) = &self.log {
                        in_flight::finished(log, &reason);
                    }
                    return machine.on_event(EpisodeEvent::TurnFinished(reason));
                }
                Err(event) => return machine.on_event(event),
            }
        }
    }

    /// Samples up to `max_tokens` of a turn, and returns the reason for the end. The seed is a function of
    /// the episode's seed and the turn number, and the embedded engine draws by token position: a turn in
    /// chunks equals the turn in one request.
    async fn piece(
        &mut self,
        machine: &mut EpisodeMachine,
        max_tokens: u32,
    ) -> Result<FinishReason, EpisodeEvent> {
        let prompt = match machine.turn_tokens() {
            [] => machine.shared_context(),
            tokens => Arc::new([machine.context(), tokens].concat()),
        };
        let admission = Arc::clone(&self.parts.admission);
        let place = admission.turn(&self.spec.episode, &prompt).await;
        // Other episodes held the KV capacity: that time is not the episode's own.
        self.deadline += place.as_ref().map_or(Duration::ZERO, |p| p.waited);
        let started = Instant::now();
        let (gauges, deadline) = (Arc::clone(&self.parts.gauges), Some(self.deadline));
        let _in_phase = gauges.enter(&self.spec.episode, Phase::Generate, deadline);
        let id = RequestId(self.parts.requests.fetch_add(1, Ordering::Relaxed));
        let order = self.parts.turn_order;
        // Held-out episodes are not trained.
        let asked = self.options.sampling.routes_from;
        let asked = asked.filter(|_| self.spec.purpose == TRAIN);
        let sampling = SamplingParams {
            max_tokens,
            stop_ids: self.parts.renderer.stop_ids().to_vec(),
            seed: mix_seed(self.spec.seed, u64::from(machine.turns())),
            routes_from: asked.map(|_| machine.routes_known()),
            ..self.options.sampling.clone()
        };
        let request = GenerateRequest {
            priority: match &self.parts.outlook {
                Some(outlook) => outlook.priority(self.spec, order, machine.turns()),
                None => order.priority(machine.turns()),
            },
            // The trace records it.
            adapter: self.parts.run.provenance.adapter.clone(),
            ..GenerateRequest::new(id, prompt, sampling)
        };
        // Each event carries at least one token or is the last one, so that the engine's
        // thread never finds the queue full.
        let (sender, mut events) = mpsc::channel(max_tokens as usize + 2);
        let sink = Box::new(move |event| {
            let _ = sender.try_send(event);
        });
        let finished = match self.parts.engine.submit(request, sink) {
            Err(e) => Err(EpisodeEvent::failed(FailureKind::Engine, e)),
            Ok(()) => self.follow(machine, id, &mut events).await,
        };
        self.timing.generate_s += started.elapsed().as_secs_f64();
        finished
    }

    /// Sends a request's tokens to the machine until the request ends or the deadline passes. In the latter
    /// case, the request is aborted.
    async fn follow(
        &mut self,
        machine: &mut EpisodeMachine,
        id: RequestId,
        events: &mut mpsc::Receiver<EngineEvent>,
    ) -> Result<FinishReason, EpisodeEvent> {
        let mut request = EngineRequest {
            engine: self.parts.engine.as_ref(),
            id,
            over: false,
        };
        loop {
            match timeout_at(self.deadline, events.recv()).await {
                Err(_) => return Err(EpisodeEvent::Deadline),
                Ok(None) => {
                    let message = "the engine dropped the request without a last event";
                    return Err(EpisodeEvent::failed(FailureKind::Engine, message));
                }
                // Nobody asks for log-probabilities of the context.
                Ok(Some(EngineEvent::Prompt { .. })) => {}
                Ok(Some(EngineEvent::Tokens { tokens, .. })) => {
                    if let Some(log) = &self.log {
                        in_flight::sampled(log, &tokens);
                    }
                    machine.on_event(EpisodeEvent::Tokens(tokens));
                }
                Ok(Some(EngineEvent::Finished { reason, routes, .. })) => {
                    request.over = true;
                    routes.into_iter().for_each(|span| machine.routed(span));
                    return Ok(reason);
                }
                Ok(Some(EngineEvent::Failed { error, .. })) => {
                    request.over = true;
                    return Err(EpisodeEvent::failed(FailureKind::Engine, error));
                }
            }
        }
    }

    /// Lets the environment act on the sampled turn, and renders its observation as the tokens that follow.
    async fn step(&mut self, machine: &mut EpisodeMachine, env: &mut dyn Env) -> EpisodeEvent {
        let (context, turn) = (machine.context(), machine.turn_tokens());
        let (said, event) = self.act(context, turn, env).await;
        machine.said(said);
        event
    }

    /// Lets the environment act on a turn, which is the end of `context`. Returns the turn as a message as
    /// well.
    async fn act(
        &mut self,
        context: &[TokenId],
        turn: &[TokenId],
        env: &mut dyn Env,
    ) -> (Message, EpisodeEvent) {
        let truncated = matches!(
            self.last_finish,
            FinishReason::Length | FinishReason::ContextFull
        );
        let renderer = self.parts.renderer.as_ref();
        let action = action::of_tokens(renderer, &self.calls, &self.tools, turn, truncated);
        let said = action::message(renderer, &self.calls, &self.tools, turn, &action);
        let step = self
            .env_call(self.deadline, Phase::Tool, env.step(action))
            .await;
        let event = match step {
            Ok(step) => self.answer(context, &said, step, env),
            Err(event) => event,
        };
        (said, event)
    }

    /// Converts the environment's observation into an event, with the tokens that follow the context.
    fn answer(
        &mut self,
        context: &[TokenId],
        said: &Message,
        step: StepResult,
        env: &dyn Env,
    ) -> EpisodeEvent {
        if let (true, Some(outcome)) = (step.done, step.outcome) {
            return EpisodeEvent::Done {
                outcome,
                process_reward: step.process_reward,
            };
        }
        let Some(observation) = step.observation else {
            let why = "step returned neither an observation nor an outcome";
            return EpisodeEvent::failed(FailureKind::Environment, why);
        };
        let (process_reward, state_hash) = (step.process_reward, step.state_hash);
        let renewed = |(cause, prompt, messages)| EpisodeEvent::Renewed {
            cause,
            prompt,
            messages,
            process_reward,
            state_hash,
        };
        let (parts, last) = (self.parts, self.last_finish.clone());
        let renderer = parts.renderer.as_ref();
        let answered = match env.renewed() {
            Some(messages) => {
                self.begin_shown(&messages);
                let rendered = renderer.render_prompt(&messages, &self.tools);
                rendered.map(|prompt| renewed((BranchCause::Compaction, prompt, messages)))
            }
            None => {
                let messages = env.format_observation(&observation);
                let extension = renderer.extend(context, &last, &messages, &self.tools);
                extension.and_then(|new| {
                    let tokens = [context, new.forced.as_slice(), new.observation.as_slice()];
                    Ok(match self.follow_shown(&tokens, said, &messages)? {
                        Some(other) => renewed(other),
                        None => EpisodeEvent::Observed {
                            forced: new.forced,
                            observation: new.observation,
                            messages,
                            process_reward,
                            state_hash,
                        },
                    })
                })
            }
        };
        answered.unwrap_or_else(|e| EpisodeEvent::failed(FailureKind::Render, e))
    }

    /// Begins the history of a context, if thinking is dropped.
    fn begin_shown(&mut self, messages: &[Message]) {
        let renderer = self.parts.renderer.as_ref();
        self.shown = ShownHistory::begin(self.options.thinking, renderer, messages);
    }

    /// Adds a turn and its answer to the history. Returns a new context, if a server would render another one
    /// than `context`.
    fn follow_shown(
        &mut self,
        context: &[&[TokenId]],
        said: &Message,
        answer: &[Message],
    ) -> Result<Option<NewContext>, RenderError> {
        let mut turn = said.clone();
        // Calls in the environment's own notation are in the text, too.
        if self.calls != CallNotation::Template || self.tools.is_empty() {
            turn.tool_calls.clear();
        }
        let new = std::iter::once(turn).chain(answer.iter().cloned());
        let renderer = self.parts.renderer.as_ref();
        self.shown.follow(renderer, &self.tools, context, new)
    }

    /// Requests the score of an episode that a limit ended.
    async fn score(&mut self, env: &mut dyn Env) -> EpisodeEvent {
        // An episode whose time is up still gets its score, within a separate time limit.
        let deadline = Instant::now() + self.options.score_timeout;
        match self.env_call(deadline, Phase::Score, env.score()).await {
            Ok(outcome) => EpisodeEvent::Done {
                outcome,
                process_reward: 0.0,
            },
            Err(event) => event,
        }
    }
}

#[cfg(test)]
mod tests;
