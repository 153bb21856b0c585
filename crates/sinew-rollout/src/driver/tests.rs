use super::*;
use crate::admission::AdmissionConfig;
use crate::episode::EpisodeLimits;
use sinew_env::{Action, EnvError, EnvFactory, Observation, ResetResult, StepResult};
use sinew_render::TinyRenderer;
use sinew_types::{
    EngineError, EngineStatus, EpisodeEnd, EventSink, GroupId, Limit, Message, Outcome,
    PolicyVersion, Role, Task, TaskId, TensorSource,
};
use std::sync::Mutex;

/// Takes requests and never answers.
#[derive(Default)]
struct Silent(Mutex<Vec<EventSink>>);

impl Engine for Silent {
    fn submit(&self, _: GenerateRequest, sink: EventSink) -> Result<(), EngineError> {
        self.0.lock().unwrap().push(sink);
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

/// Hangs in the chosen calls.
#[derive(Clone, Copy)]
struct Stuck {
    at_reset: bool,
    at_score: bool,
}

impl Env for Stuck {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        if self.at_reset {
            return Box::pin(std::future::pending());
        }
        let reset = ResetResult {
            messages: vec![Message::new(Role::User, "l")],
            tools: Vec::new(),
            calls: CallNotation::default(),
            state_hash: None,
        };
        Box::pin(async { Ok(reset) })
    }

    fn step(&mut self, _: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(std::future::pending())
    }

    fn format_observation(&self, _: &Observation) -> Vec<Message> {
        Vec::new()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        if self.at_score {
            return Box::pin(std::future::pending());
        }
        Box::pin(async { Ok(Outcome::default()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

impl EnvFactory for Stuck {
    fn name(&self) -> &str {
        "stuck"
    }

    fn create(&self, _: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(*self))
    }

    fn gold(&self, _: &Task, _: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

async fn end_of(at_reset: bool, at_score: bool) -> EpisodeEnd {
    let engine: Arc<dyn Engine> = Arc::new(Silent::default());
    let envs = Arc::new(Stuck { at_reset, at_score });
    let renderer = Arc::new(TinyRenderer::new("l"));
    let parts = EpisodeParts::new(engine, renderer, envs, AdmissionConfig::new(1, 8));
    let short = Duration::from_millis(20);
    let options = EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: 1,
            max_turn_tokens: 8,
            max_context_tokens: 64,
        },
        sampling: SamplingParams::default(),
        chunk_tokens: None,
        replay_always: false,
        thinking: sinew_types::Thinking::Kept,
        boot_timeout: short,
        timeout: short,
        score_timeout: short,
    };
    let task = Task {
        id: TaskId::new("t"),
        kind: "k".into(),
        ..Task::default()
    };
    let spec = EpisodeSpec {
        episode: EpisodeId::new("e"),
        group: GroupId::new("g"),
        task,
        draw: 1,
        purpose: "train".into(),
        seed: 7,
    };
    run_episode(&parts, &options, &spec).await.end
}

/// Time is virtual here: it does not pass while any task works.
#[tokio::test(start_paused = true)]
async fn every_phase_has_its_own_time() {
    let failed = |end: EpisodeEnd, words: &str| match end {
        EpisodeEnd::Failed { kind, message } => {
            assert_eq!(kind, FailureKind::Environment);
            assert!(message.contains(words), "{message}");
        }
        other => panic!("{other:?}"),
    };
    failed(end_of(true, false).await, "not up in time");
    failed(end_of(false, true).await, "no score in time");
    let limit = Limit::WallTime;
    assert_eq!(end_of(false, false).await, EpisodeEnd::Truncated { limit });
}
