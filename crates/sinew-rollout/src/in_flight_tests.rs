//! Episodes that one session leaves and the next one takes up, with an engine and an environment that can be
//! stopped anywhere.

use crate::admission::AdmissionConfig;
use crate::episode::{
    EpisodeCommand, EpisodeEvent, EpisodeLimits, EpisodeMachine, EpisodeSpec, RunInfo,
};
use crate::in_flight::{InFlight, ResumedCounts, SavedEpisode};
use crate::parts::{EpisodeOptions, EpisodeParts};
use crate::run_episode;
use sinew_env::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, StepResult,
};
use sinew_render::{Renderer, TinyRenderer};
use sinew_types::{
    Engine, EngineError, EngineEvent, EngineStatus, EpisodeId, EventSink, FinishReason,
    GenerateRequest, GroupId, Message, Outcome, PolicyVersion, RequestId, Role, SampledToken,
    SamplingParams, Task, TaskId, TensorSource, Timing, Trace, mix_seed,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const TURNS: u32 = 4;
const TURN_TOKENS: u32 = 5;

/// Draws each token by its place, so that a turn in pieces is the same turn; falls silent after so many.
#[derive(Debug)]
struct ByPlace {
    left: AtomicUsize,
    sampled: AtomicUsize,
    stop: u32,
}

impl ByPlace {
    fn new(renderer: &TinyRenderer, most: usize) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicUsize::new(most),
            sampled: AtomicUsize::new(0),
            stop: renderer.stop_ids()[0],
        })
    }
}

impl Engine for ByPlace {
    fn submit(&self, request: GenerateRequest, mut sink: EventSink) -> Result<(), EngineError> {
        let (id, place) = (request.id, request.prompt.len());
        for n in 0..request.sampling.max_tokens as usize {
            let takes = |left: usize| left.checked_sub(1);
            if self
                .left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, takes)
                .is_err()
            {
                std::mem::forget(sink);
                return Ok(());
            }
            self.sampled.fetch_add(1, Ordering::SeqCst);
            let drawn = mix_seed(request.sampling.seed, (place + n) as u64);
            let token = SampledToken {
                id: match drawn % 7 {
                    0 => self.stop,
                    other => (other % 3) as u32,
                },
                logprob: -1.5,
                version: PolicyVersion(drawn % 3),
                top: Vec::new(),
                choice: None,
            };
            let stops = token.id == self.stop;
            sink(EngineEvent::Tokens {
                request: id,
                tokens: vec![token],
            });
            if stops {
                let reason = FinishReason::StopId { id: self.stop };
                sink(finished(id, reason));
                return Ok(());
            }
        }
        sink(finished(id, FinishReason::Length));
        Ok(())
    }

    fn abort(&self, _: RequestId) {}

    fn pause(&self, _: bool) {}

    fn load_weights(&self, _: PolicyVersion, _: Arc<dyn TensorSource>) -> Result<(), EngineError> {
        Ok(())
    }

    fn status(&self) -> EngineStatus {
        EngineStatus::default()
    }
}

fn finished(request: RequestId, reason: FinishReason) -> EngineEvent {
    EngineEvent::Finished {
        request,
        reason,
        cached_prompt_tokens: 0,
        routes: None,
    }
}

/// Repeats a turn, with the number of the turn and of the world.
#[derive(Clone, Copy, Debug)]
struct Echo {
    world: u64,
    deterministic: bool,
    turns: u32,
    /// Hangs in this turn.
    hangs: Option<u32>,
}

impl Env for Echo {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        let reset = ResetResult {
            messages: vec![Message::new(Role::User, "ab")],
            tools: Vec::new(),
            calls: CallNotation::default(),
            state_hash: None,
        };
        Box::pin(async { Ok(reset) })
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        self.turns += 1;
        if self.hangs == Some(self.turns) {
            return Box::pin(std::future::pending());
        }
        let done = self.turns == TURNS;
        let step = StepResult {
            observation: (!done).then(|| Observation {
                content: "c".into(),
                is_error: false,
            }),
            process_reward: 0.1 * f64::from(self.turns),
            done,
            outcome: done.then(Outcome::default),
            state_hash: Some(mix_seed(self.world, action.text.len() as u64)),
        };
        Box::pin(async { Ok(step) })
    }

    fn format_observation(&self, _: &Observation) -> Vec<Message> {
        vec![Message::new(Role::User, "c")]
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async { Ok(Outcome::default()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

impl EnvFactory for Echo {
    fn name(&self) -> &str {
        "echo"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            deterministic: self.deterministic,
            ..Capabilities::default()
        }
    }

    fn create(&self, _: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(*self))
    }

    fn gold(&self, _: &Task, _: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

const ECHO: Echo = Echo {
    world: 1,
    deterministic: true,
    turns: 0,
    hangs: None,
};

fn options() -> EpisodeOptions {
    EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: TURNS + 1,
            max_turn_tokens: TURN_TOKENS,
            max_context_tokens: 500,
        },
        sampling: SamplingParams::default(),
        chunk_tokens: None,
        replay_always: false,
        thinking: sinew_types::Thinking::Kept,
        boot_timeout: Duration::from_secs(60),
        timeout: Duration::from_secs(60),
        score_timeout: Duration::from_secs(60),
    }
}

fn spec(seed: u64) -> EpisodeSpec {
    EpisodeSpec {
        episode: EpisodeId::new("d00000001-e0"),
        group: GroupId::new("d00000001"),
        task: Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            ..Task::default()
        },
        draw: 1,
        purpose: "train".into(),
        seed,
    }
}

/// A session that runs one episode: how many tokens the engine has, and what an earlier session left.
struct Session {
    env: Echo,
    most: usize,
    options: EpisodeOptions,
    seed: u64,
    saved: Vec<SavedEpisode>,
}

impl Session {
    fn new(seed: u64) -> Self {
        Self {
            env: ECHO,
            most: usize::MAX,
            options: options(),
            seed,
            saved: Vec::new(),
        }
    }

    /// Runs it until it ends, or until nothing more happens.
    async fn run(self) -> (Option<Trace>, usize, Arc<InFlight>) {
        let renderer = TinyRenderer::new("abc");
        let engine = ByPlace::new(&renderer, self.most);
        let own: Arc<dyn Engine> = Arc::clone(&engine) as _;
        let bounds = AdmissionConfig::new(1, 8);
        let mut parts = EpisodeParts::new(own, Arc::new(renderer), Arc::new(self.env), bounds);
        parts.run = Arc::new(RunInfo::default());
        let all = Arc::new(InFlight::default());
        all.give(self.saved);
        parts.in_flight = Some(Arc::clone(&all));
        let spec = spec(self.seed);
        // Virtual time: the clock moves only if nothing else does.
        let run = run_episode(&parts, &self.options, &spec);
        let ended = tokio::time::timeout(Duration::from_secs(1), run).await;
        (ended.ok(), engine.sampled.load(Ordering::SeqCst), all)
    }
}

fn untimed(trace: Trace) -> Trace {
    Trace {
        timing: Timing::default(),
        ..trace
    }
}

/// Stopped behind any token, and in any call of the environment, an episode continues to the same end; no
/// token is sampled again.
#[tokio::test(start_paused = true)]
async fn an_episode_that_was_stopped_anywhere_ends_as_if_it_had_not_been() {
    for seed in 0..6 {
        let (whole, all, _) = Session::new(seed).run().await;
        let whole = untimed(whole.unwrap());
        let stops = (0..all).map(|most| (most, None));
        let hangs = (1..=TURNS).map(|turn| (usize::MAX, Some(turn)));
        for (most, hangs) in stops.chain(hangs) {
            let mut session = Session::new(seed);
            session.most = most;
            session.env.hangs = hangs;
            let (ended, sampled, left) = session.run().await;
            assert!(ended.is_none());
            let saved = left.read();
            let text = serde_json::to_string(&saved).unwrap();
            let saved: Vec<SavedEpisode> = serde_json::from_str(&text).unwrap();
            assert_eq!(
                saved
                    .iter()
                    .map(SavedEpisode::sampled_tokens)
                    .sum::<usize>(),
                sampled
            );
            let mut session = Session::new(seed);
            session.saved = saved;
            let (ended, more, left) = session.run().await;
            assert_eq!(untimed(ended.unwrap()), whole, "{most} {hangs:?}");
            assert_eq!(sampled + more, all, "{most} {hangs:?}");
            let expected = ResumedCounts {
                episodes: usize::from(sampled > 0),
                tokens: sampled,
                ..ResumedCounts::default()
            };
            assert_eq!(left.resumed(), expected);
        }
    }
}

/// A saved episode is not resumed if another world answers, or a world that makes no promise, or if it is
/// another episode. It starts again, and its lost tokens are counted.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_taken_up_starts_again_and_is_counted() {
    let (whole, all, _) = Session::new(3).run().await;
    let whole = untimed(whole.unwrap());
    let mut stopped = Session::new(3);
    stopped.most = all - 1;
    let (_, sampled, left) = stopped.run().await;
    let saved = left.read();
    let session = |change: &dyn Fn(&mut Session)| {
        let mut session = Session::new(3);
        session.saved = saved.clone();
        change(&mut session);
        session
    };
    let lost = ResumedCounts {
        restarted: 1,
        tokens_lost: sampled,
        ..ResumedCounts::default()
    };
    let unsure = |s: &mut Session| s.env.deterministic = false;
    let (ended, more, left) = session(&unsure).run().await;
    assert_eq!((untimed(ended.unwrap()), more), (whole.clone(), all));
    assert_eq!(left.resumed(), lost);
    let (_, more, left) = session(&|s| s.env.world = 2).run().await;
    assert_eq!((more, left.resumed()), (all, lost));
    let (_, _, left) = session(&|s| s.options.sampling.temperature = 0.5)
        .run()
        .await;
    assert_eq!(left.resumed(), lost);
    let (_, _, left) = session(&|s| s.saved[0].trace.nodes.truncate(2)).run().await;
    assert_eq!(left.resumed().restarted, 1, "a trace of another shape");
    // Asked to, a world that makes no promise is tried all the same.
    let always = |s: &mut Session| {
        s.env.deterministic = false;
        s.options.replay_always = true;
    };
    let (ended, more, left) = session(&always).run().await;
    assert_eq!((untimed(ended.unwrap()), more), (whole, all - sampled));
    assert_eq!(left.resumed().episodes, 1);
}

#[test]
fn a_renewed_context_is_a_chain_of_its_own_also_when_it_is_taken_up() {
    let limits = EpisodeLimits {
        max_turns: 5,
        max_turn_tokens: 8,
        max_context_tokens: 8,
    };
    let trace = spec(0).empty_trace(&RunInfo::default(), &SamplingParams::default());
    let machine = || EpisodeMachine::new(trace.clone(), limits.clone(), 1.0);
    let token = |id| SampledToken {
        id,
        logprob: -0.25,
        version: PolicyVersion(1),
        top: Vec::new(),
        choice: None,
    };
    let mut m = machine();
    m.on_event(EpisodeEvent::Reset {
        prompt: vec![1, 2],
        messages: Vec::new(),
        state_hash: None,
    });
    m.on_event(EpisodeEvent::Tokens(vec![token(3)]));
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    // The limit of the context counts what the model sees.
    let next = m.on_event(EpisodeEvent::Renewed {
        cause: sinew_types::BranchCause::Compaction,
        prompt: vec![1, 7],
        messages: Vec::new(),
        process_reward: 0.5,
        state_hash: Some(9),
    });
    assert_eq!(next, EpisodeCommand::Generate { max_tokens: 6 });
    let mut again = machine();
    assert_eq!(again.restore(m.nodes().to_vec()), next);
    assert_eq!((m.context(), again.context()), (&[1, 7][..], &[1, 7][..]));
    m.on_event(EpisodeEvent::Tokens(vec![token(4)]));
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    m.on_event(EpisodeEvent::Deadline);
    let trace = m.into_trace(Timing::default());
    trace.validate().unwrap();
    let paths = trace.leaves().into_iter().map(|leaf| {
        let path = trace.path_tokens(leaf);
        path.iter().map(|t| t.id).collect::<Vec<_>>()
    });
    assert_eq!(paths.collect::<Vec<_>>(), [vec![1, 2, 3], vec![1, 7, 4]]);
    assert_eq!(trace.nodes[1].process_reward, 0.5);
    assert_eq!(trace.nodes[2].state_hash, Some(9));
}
