//! Carries an [`EpisodeMachine`]'s commands out: engine, environment, renderer, clock.

use crate::admission::Admission;
use crate::episode::{EpisodeCommand, EpisodeEvent, EpisodeLimits, EpisodeMachine, EpisodeSpec};
use crate::gauges::{Gauges, Phase};
use crate::harness::Harness;
use sinew_env::{Action, Env, EnvError, EnvFactory, EnvFuture};
use sinew_render::Renderer;
use sinew_types::{
    Engine, EngineEvent, FailureKind, FinishReason, GenerateRequest, RequestId, SamplingParams,
    Timing, TokenId, ToolSpec, Trace,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

/// How long an environment may take to close after its episode is over.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The parts an episode is run with.
#[derive(Clone)]
pub struct EpisodeParts {
    pub engine: Arc<dyn Engine>,
    pub renderer: Arc<dyn Renderer>,
    pub envs: Arc<dyn EnvFactory>,
    /// Drives the turns.
    pub harness: Arc<dyn Harness>,
    pub gauges: Arc<Gauges>,
    /// Who may begin and generate.
    pub admission: Arc<Admission>,
    /// Source of request ids, shared by everybody who uses the engine.
    pub requests: Arc<AtomicU64>,
}

impl std::fmt::Debug for EpisodeParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EpisodeParts")
            .field("env", &self.envs.name())
            .field("harness", &self.harness.name())
            .finish_non_exhaustive()
    }
}

/// How an episode is sampled and bounded.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeOptions {
    pub limits: EpisodeLimits,
    /// `max_tokens`, `stop_ids` and `seed` are set for each turn.
    pub sampling: SamplingParams,
    /// Wall time of an episode.
    pub timeout: Duration,
}

/// Splitmix64: one well-mixed word from a seed and an index (Steele et al. 2014).
pub fn mix_seed(seed: u64, index: u64) -> u64 {
    let mut z = seed
        .wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15))
        .wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

struct Running<'a> {
    parts: &'a EpisodeParts,
    options: &'a EpisodeOptions,
    spec: &'a EpisodeSpec,
    deadline: Instant,
    tools: Vec<ToolSpec>,
    last_finish: FinishReason,
    timing: Timing,
}

/// Runs one episode to its end. Never fails: what goes wrong is in the trace.
pub async fn run_episode(
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    spec: &EpisodeSpec,
) -> Trace {
    let started = Instant::now();
    let mut machine = EpisodeMachine::new(spec, options.limits.clone());
    let mut running = Running {
        parts,
        options,
        spec,
        deadline: started + options.timeout,
        tools: Vec::new(),
        last_finish: FinishReason::Length,
        timing: Timing {
            started_unix_s: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |d| d.as_secs_f64()),
            ..Timing::default()
        },
    };
    match parts.envs.create(&spec.task) {
        Ok(mut env) => {
            running.drive(&mut machine, env.as_mut()).await;
            let closed = tokio::time::timeout(CLOSE_TIMEOUT, env.close()).await;
            if !matches!(closed, Ok(Ok(()))) {
                tracing::warn!(episode = %spec.episode, ?closed, "environment did not close");
            }
        }
        Err(e) => {
            machine.on_event(failed(&e));
        }
    }
    running.timing.total_s = started.elapsed().as_secs_f64();
    machine.into_trace(running.timing)
}

fn failed(e: &EnvError) -> EpisodeEvent {
    EpisodeEvent::Failed {
        kind: e.failure_kind(),
        message: e.to_string(),
    }
}

impl Running<'_> {
    async fn drive(&mut self, machine: &mut EpisodeMachine, env: &mut dyn Env) {
        let event = self.reset(env).await;
        let mut command = machine.on_event(event);
        loop {
            command = match command {
                EpisodeCommand::Generate { max_tokens } => self.generate(machine, max_tokens).await,
                EpisodeCommand::Step { tokens } => {
                    let event = self.step(machine.context(), env, &tokens).await;
                    machine.on_event(event)
                }
                EpisodeCommand::Score => {
                    let event = self.score(env).await;
                    machine.on_event(event)
                }
                EpisodeCommand::Finish | EpisodeCommand::Wait => return,
            };
        }
    }

    /// Awaits an environment's answer until the deadline, and counts the time as tool time.
    async fn env_call<T>(
        &mut self,
        deadline: Instant,
        phase: Phase,
        call: EnvFuture<'_, T>,
    ) -> Result<T, EpisodeEvent> {
        let started = Instant::now();
        let _in_phase = self.parts.gauges.enter(phase);
        let result = timeout_at(deadline, call).await;
        self.timing.tool_s += started.elapsed().as_secs_f64();
        match result {
            Err(_) => Err(EpisodeEvent::Deadline),
            Ok(Err(e)) => Err(failed(&e)),
            Ok(Ok(value)) => Ok(value),
        }
    }

    async fn reset(&mut self, env: &mut dyn Env) -> EpisodeEvent {
        let reset = match self.env_call(self.deadline, Phase::Boot, env.reset()).await {
            Ok(reset) => reset,
            Err(event) => return event,
        };
        let rendered = self
            .parts
            .renderer
            .render_prompt(&reset.messages, &reset.tools);
        self.tools = reset.tools;
        match rendered {
            Ok(prompt) => EpisodeEvent::Reset {
                prompt,
                messages: reset.messages,
                state_hash: reset.state_hash,
            },
            Err(e) => EpisodeEvent::Failed {
                kind: FailureKind::Render,
                message: e.to_string(),
            },
        }
    }

    async fn generate(&mut self, machine: &mut EpisodeMachine, max_tokens: u32) -> EpisodeCommand {
        let admission = Arc::clone(&self.parts.admission);
        let place = admission.turn(&self.spec.episode, machine.context()).await;
        // Others held the room: that time is not the episode's own.
        self.deadline += place.as_ref().map_or(Duration::ZERO, |p| p.waited);
        let started = Instant::now();
        let _in_phase = self.parts.gauges.enter(Phase::Generate);
        let id = RequestId(self.parts.requests.fetch_add(1, Ordering::Relaxed));
        let request = GenerateRequest {
            id,
            prompt: machine.context().to_vec(),
            sampling: SamplingParams {
                max_tokens,
                stop_ids: self.parts.renderer.stop_ids().to_vec(),
                seed: mix_seed(self.spec.seed, u64::from(machine.turns())),
                ..self.options.sampling.clone()
            },
            // Later turns first: they free their room sooner.
            priority: machine.turns() as i32,
        };
        // Each event carries at least one token or is the last one, so that the engine's
        // thread never finds the queue full.
        let (sender, mut events) = mpsc::channel(max_tokens as usize + 2);
        let sink = Box::new(move |event| {
            let _ = sender.try_send(event);
        });
        let command = match self.parts.engine.submit(request, sink) {
            Err(e) => machine.on_event(engine_failed(e.to_string())),
            Ok(()) => self.follow(machine, id, &mut events).await,
        };
        self.timing.generate_s += started.elapsed().as_secs_f64();
        command
    }

    async fn follow(
        &mut self,
        machine: &mut EpisodeMachine,
        id: RequestId,
        events: &mut mpsc::Receiver<EngineEvent>,
    ) -> EpisodeCommand {
        loop {
            match timeout_at(self.deadline, events.recv()).await {
                Err(_) => {
                    self.parts.engine.abort(id);
                    return machine.on_event(EpisodeEvent::Deadline);
                }
                Ok(None) => {
                    let message = "the engine dropped the request without a last event";
                    return machine.on_event(engine_failed(message.into()));
                }
                Ok(Some(EngineEvent::Tokens { tokens, .. })) => {
                    machine.on_event(EpisodeEvent::Tokens(tokens));
                }
                Ok(Some(EngineEvent::Finished { reason, .. })) => {
                    self.last_finish = reason.clone();
                    return machine.on_event(EpisodeEvent::TurnFinished(reason));
                }
                Ok(Some(EngineEvent::Failed { error, .. })) => {
                    return machine.on_event(engine_failed(error.to_string()));
                }
            }
        }
    }

    async fn step(
        &mut self,
        context: &[TokenId],
        env: &mut dyn Env,
        tokens: &[TokenId],
    ) -> EpisodeEvent {
        let action = Action {
            text: self.parts.renderer.decode(tokens),
            truncated: matches!(
                self.last_finish,
                FinishReason::Length | FinishReason::ContextFull
            ),
        };
        let step = match self
            .env_call(self.deadline, Phase::Tool, env.step(action))
            .await
        {
            Ok(step) => step,
            Err(event) => return event,
        };
        if let (true, Some(outcome)) = (step.done, step.outcome) {
            return EpisodeEvent::Done {
                outcome,
                process_reward: step.process_reward,
            };
        }
        let Some(observation) = step.observation else {
            return EpisodeEvent::Failed {
                kind: FailureKind::Environment,
                message: "step returned neither an observation nor an outcome".into(),
            };
        };
        let messages = env.format_observation(&observation);
        let extension =
            self.parts
                .renderer
                .extend(context, &self.last_finish, &messages, &self.tools);
        match extension {
            Ok(extension) => EpisodeEvent::Observed {
                forced: extension.forced,
                observation: extension.observation,
                messages,
                process_reward: step.process_reward,
                state_hash: step.state_hash,
            },
            Err(e) => EpisodeEvent::Failed {
                kind: FailureKind::Render,
                message: e.to_string(),
            },
        }
    }

    async fn score(&mut self, env: &mut dyn Env) -> EpisodeEvent {
        // An episode whose time is up still gets its score, within a time of its own.
        let deadline = self.deadline.max(Instant::now() + CLOSE_TIMEOUT);
        match self.env_call(deadline, Phase::Score, env.score()).await {
            Ok(outcome) => EpisodeEvent::Done {
                outcome,
                process_reward: 0.0,
            },
            Err(event) => event,
        }
    }
}

fn engine_failed(message: String) -> EpisodeEvent {
    EpisodeEvent::Failed {
        kind: FailureKind::Engine,
        message,
    }
}
