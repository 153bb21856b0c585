//! Parts that are needed to run episodes, and the trait of the harness that drives their turns.

use crate::admission::Admission;
use crate::episode::{EpisodeLimits, EpisodeMachine, EpisodeSpec, RunInfo};
use crate::gauges::Gauges;
use crate::in_flight::InFlight;
use crate::outlook::{Outlook, TurnOrder};
use futures::future::BoxFuture;
use sinew_env::EnvFactory;
use sinew_render::Renderer;
use sinew_sandbox::SandboxWait;
use sinew_types::{Engine, SamplingParams, Thinking, Trace};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Drives the turns of episodes. All episodes share one harness.
pub trait Harness: Send + Sync {
    /// Name by which recipes select it.
    fn name(&self) -> &str;

    /// Runs one episode to its end. It never fails: errors are recorded in the trace, which is valid and not
    /// yet in the store.
    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace>;
}

/// The parts that run episodes, shared by all episodes of a run. Clones share the same parts.
#[derive(Clone)]
pub struct EpisodeParts {
    /// Engine that samples tokens.
    pub engine: Arc<dyn Engine>,
    /// Tokenizer and chat template of the engine's model.
    pub renderer: Arc<dyn Renderer>,
    /// Creates the environment of each episode.
    pub envs: Arc<dyn EnvFactory>,
    /// Drives the turns.
    pub harness: Arc<dyn Harness>,
    /// Counters of the episodes, for display.
    pub gauges: Arc<Gauges>,
    /// Decides which episodes start and generate.
    pub admission: Arc<Admission>,
    /// Estimates by which the longest episodes start first; `None`: episodes start in the order of their
    /// draws.
    pub outlook: Option<Arc<Outlook>>,
    /// Order of engine requests for episodes with equal estimates.
    pub turn_order: TurnOrder,
    /// Time that episodes have waited for sandboxes of their environments.
    pub sandbox_wait: Arc<SandboxWait>,
    /// Saved progress of training episodes; `None`: progress is not recorded, so that an interrupted episode
    /// starts again.
    pub in_flight: Option<Arc<InFlight>>,
    /// Source of request ids, shared by all users of the engine.
    pub requests: Arc<AtomicU64>,
    /// Data about the run that each trace contains.
    pub run: Arc<RunInfo>,
}

sinew_types::debug_fields!(
    EpisodeParts as this,
    env = this.envs.name(),
    harness = this.harness.name()
);

/// Sampling and limits of an episode.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeOptions {
    /// Limits on turns and tokens.
    pub limits: EpisodeLimits,
    /// Sampling parameters; `max_tokens`, `stop_ids` and `seed` are set for each turn.
    pub sampling: SamplingParams,
    /// Number of tokens after which a turn requests its place again; `None`: only after the turn.
    pub chunk_tokens: Option<u32>,
    /// Whether a saved episode may be replayed in any environment, not only in one that declares itself
    /// deterministic.
    pub replay_always: bool,
    /// Treatment of the thinking of earlier turns.
    pub thinking: Thinking,
    /// Time limit for starting an episode's environment.
    pub boot_timeout: Duration,
    /// Time limit for its turns, counted from then on.
    pub timeout: Duration,
    /// Time limit for scoring an episode that a limit ended.
    pub score_timeout: Duration,
}

impl EpisodeOptions {
    /// Creates the state machine of an episode with these options.
    pub(crate) fn machine(&self, spec: &EpisodeSpec, run: &RunInfo) -> EpisodeMachine {
        let temperature = self.sampling.policy_temperature();
        let trace = spec.empty_trace(run, &self.turn_sampling());
        EpisodeMachine::new(trace, self.limits.clone(), temperature)
    }

    /// Sampling parameters of a turn that only the limit of a turn cuts. The trace records them, since the
    /// context limit may cut single turns shorter.
    pub fn turn_sampling(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.limits.max_turn_tokens,
            ..self.sampling.clone()
        }
    }
}
