//! Parts for running episodes, and the port of the harness that drives their turns.

use crate::admission::Admission;
use crate::episode::{EpisodeLimits, EpisodeMachine, EpisodeSpec, RunInfo};
use crate::gauges::Gauges;
use crate::in_flight::InFlight;
use crate::outlook::{Outlook, TurnOrder};
use futures::future::BoxFuture;
use sinew_env::EnvFactory;
use sinew_render::Renderer;
use sinew_sandbox::SandboxWait;
use sinew_types::{Engine, SamplingParams, Trace};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Drives episodes. Shared by all of them.
pub trait Harness: Send + Sync {
    /// Name by which recipes select it.
    fn name(&self) -> &str;

    /// Runs one episode to its end. Never fails: what goes wrong is in the trace, which is
    /// valid and not yet in the store.
    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace>;
}

/// The parts that an episode is run with, shared by all episodes of a run. A clone shares them, too.
#[derive(Clone)]
pub struct EpisodeParts {
    /// Samples tokens from tokens.
    pub engine: Arc<dyn Engine>,
    /// Tokenizer and chat template of the engine's model.
    pub renderer: Arc<dyn Renderer>,
    /// Makes the environment of each episode.
    pub envs: Arc<dyn EnvFactory>,
    /// Drives the turns.
    pub harness: Arc<dyn Harness>,
    /// Counts what episodes do, for views.
    pub gauges: Arc<Gauges>,
    /// Decides which episodes begin and generate.
    pub admission: Arc<Admission>,
    /// Estimates by which the episodes that are expected to take longest begin first; `None`: they begin in
    /// the order of their draws.
    pub outlook: Option<Arc<Outlook>>,
    /// Order of the engine's requests, for episodes that are not expected to differ.
    pub turn_order: TurnOrder,
    /// Time that episodes have waited for sandboxes of their environments.
    pub sandbox_wait: Arc<SandboxWait>,
    /// Progress of training episodes; `None`: it is not recorded, so that each begins at its beginning.
    pub in_flight: Option<Arc<InFlight>>,
    /// Source of request ids, shared by all users of the engine.
    pub requests: Arc<AtomicU64>,
    /// Written into each trace.
    pub run: Arc<RunInfo>,
}

impl std::fmt::Debug for EpisodeParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EpisodeParts")
            .field("env", &self.envs.name())
            .field("harness", &self.harness.name())
            .finish_non_exhaustive()
    }
}

/// Sampling and limits of an episode.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeOptions {
    /// Turns and tokens.
    pub limits: EpisodeLimits,
    /// `max_tokens`, `stop_ids` and `seed` are set for each turn.
    pub sampling: SamplingParams,
    /// Tokens after which a turn asks for its place anew; `None`: only when it is over.
    pub chunk_tokens: Option<u32>,
    /// Any environment gets the actions of an episode that an earlier session left once more, not only one
    /// that declares itself deterministic.
    pub replay_always: bool,
    /// Wall time until an episode's world is up.
    pub boot_timeout: Duration,
    /// Wall time of its turns, from then on.
    pub timeout: Duration,
    /// Wall time of the score of an episode that a limit ended.
    pub score_timeout: Duration,
}

impl EpisodeOptions {
    /// The machine of an episode that is sampled so.
    pub(crate) fn machine(&self, spec: &EpisodeSpec, run: &RunInfo) -> EpisodeMachine {
        let temperature = self.sampling.policy_temperature();
        let trace = spec.empty_trace(run, &self.turn_sampling());
        EpisodeMachine::new(trace, self.limits.clone(), temperature)
    }

    /// Sampling of a turn that only the limit of a turn cuts: recorded in the trace, as the context may
    /// cut single turns shorter.
    pub fn turn_sampling(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.limits.max_turn_tokens,
            ..self.sampling.clone()
        }
    }
}
