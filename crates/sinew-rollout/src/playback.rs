//! An engine that replays the sampled tokens of a stored episode, so that the built-in loop runs the episode
//! again: the same actions in a new environment.
//!
//! At the end of the recording the engine fails further requests, or another engine continues
//! ([`Playback::then`]), which forks the episode.

use sinew_types::{
    Adapter, AdapterName, Engine, EngineError, EngineEvent, EngineStatus, EventSink, FinishReason,
    GenerateRequest, NO_PARENT, NodeId, PolicyVersion, RequestId, SampledToken, TensorSource,
    TokenId, TokenKind, Trace,
};
use std::sync::{Arc, Mutex, PoisonError};

/// A turn of the recording.
#[derive(Clone, Debug, PartialEq)]
struct Turn {
    /// Tokens that the model saw before the turn.
    context: Vec<TokenId>,
    tokens: Vec<SampledToken>,
    finish: FinishReason,
}

/// The first position at which the context of a turn differs from the recorded one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextChange {
    /// Number of the turn, from 1.
    pub turn: u32,
    /// Number of equal tokens at the beginning.
    pub equal: usize,
}

/// Reason why an episode cannot be played back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaybackError {
    /// The episode has several paths, and it is unknown which one the environment took.
    #[error(
        "episode {episode} has {leaves} branches: only an episode of one path can be run again"
    )]
    Branches {
        /// Id of the episode.
        episode: String,
        /// Number of its paths.
        leaves: usize,
    },
    /// The fork would start after the last turn.
    #[error("turn {turn}: the episode has {turns} turns; allowed: 1 to {}", turns + 1)]
    NoTurn {
        /// Turn at which the fork was to begin.
        turn: u32,
        /// Number of recorded turns.
        turns: usize,
    },
}

#[derive(Debug, Default)]
struct State {
    /// Number of requested turns so far.
    asked: usize,
    change: Option<ContextChange>,
}

/// Engine that continues after the recording.
struct Live {
    engine: Arc<dyn Engine>,
    /// Number of recorded turns that are played before it.
    after: usize,
}

/// The recorded turns of one episode as an engine. It serves one episode, once.
pub struct Playback {
    turns: Vec<Turn>,
    live: Option<Live>,
    state: Mutex<State>,
}

sinew_types::debug_fields!(
    Playback as this,
    turns = this.turns.len(),
    live = this.live.is_some()
);

impl Playback {
    /// Creates the engine from the trace of an episode.
    ///
    /// # Errors
    /// [`PlaybackError::Branches`].
    pub fn new(trace: &Trace) -> Result<Self, PlaybackError> {
        let leaves = trace.leaves();
        // A context that began anew is a separate chain; a chain with two ends was asked twice.
        let roots = trace.nodes.iter().filter(|n| n.parent == NO_PARENT);
        if leaves.len() != roots.count() {
            return Err(PlaybackError::Branches {
                episode: trace.episode.to_string(),
                leaves: leaves.len(),
            });
        }
        let (mut context, mut turns) = (Vec::new(), Vec::new());
        for id in leaves.iter().flat_map(|leaf| trace.path(*leaf)) {
            let node = &trace.nodes[id as usize];
            if node.parent == NO_PARENT {
                context.clear();
            }
            if node.kind == TokenKind::Sampled {
                turns.push(Turn {
                    context: context.clone(),
                    tokens: sampled(trace, id),
                    finish: node.finish.clone().unwrap_or(FinishReason::Aborted),
                });
            }
            context.extend_from_slice(&node.tokens);
        }
        Ok(Self {
            turns,
            live: None,
            state: Mutex::default(),
        })
    }

    /// Replays only the turns before `turn`, counted from 1. From this turn on, `engine` samples.
    ///
    /// # Errors
    /// [`PlaybackError::NoTurn`].
    pub fn then(self, turn: u32, engine: Arc<dyn Engine>) -> Result<Self, PlaybackError> {
        let turns = self.turns.len();
        let after = (turn as usize).checked_sub(1).filter(|n| *n <= turns);
        let after = after.ok_or(PlaybackError::NoTurn { turn, turns })?;
        Ok(Self {
            live: Some(Live { engine, after }),
            ..self
        })
    }

    /// Number of recorded turns.
    pub fn turns(&self) -> usize {
        self.turns.len()
    }

    /// The first turn whose context differed from the recorded one. The episode ended there, if another
    /// engine was to continue.
    pub fn change(&self) -> Option<ContextChange> {
        self.lock().change
    }

    /// The engine that continues after the recording, which has no `what` itself.
    fn live(&self, what: &str) -> Result<&dyn Engine, EngineError> {
        match &self.live {
            Some(live) => Ok(live.engine.as_ref()),
            None => Err(EngineError::Weights(format!("a recording has no {what}"))),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Every change of the state is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the index of the next turn, and whether its context equals the recorded one.
    fn next(&self, prompt: &[TokenId]) -> (usize, bool) {
        let mut state = self.lock();
        let at = state.asked;
        state.asked += 1;
        // The context from which another engine continues may hold more than the recording.
        let recorded = self.live.as_ref().map_or(usize::MAX, |l| l.after);
        let turn = self.turns.get(at).filter(|_| at < recorded);
        let Some(turn) = turn.filter(|t| t.context != prompt) else {
            return (at, true);
        };
        let pairs = turn.context.iter().zip(prompt);
        let equal = pairs.take_while(|(a, b)| a == b).count();
        let turn = at as u32 + 1;
        state.change.get_or_insert(ContextChange { turn, equal });
        (at, false)
    }
}

/// Returns the tokens of a node, each with the version of the weights that sampled it.
fn sampled(trace: &Trace, id: NodeId) -> Vec<SampledToken> {
    let node = &trace.nodes[id as usize];
    let spans = node.versions.iter();
    let versions = spans.flat_map(|s| std::iter::repeat_n(s.version, s.len as usize));
    let tokens = node.tokens.iter().zip(&node.logprobs).zip(versions);
    let token = |((id, logprob), version): ((&TokenId, &f32), PolicyVersion)| SampledToken {
        id: *id,
        logprob: *logprob,
        version,
        top: Vec::new(),
        choice: None,
    };
    tokens.map(token).collect()
}

impl Engine for Playback {
    fn submit(&self, request: GenerateRequest, mut sink: EventSink) -> Result<(), EngineError> {
        let (at, same) = self.next(&request.prompt);
        if let Some(live) = &self.live {
            if at >= live.after {
                return live.engine.submit(request, sink);
            }
            if !same {
                return Err(EngineError::Failed(format!(
                    "the world is another than the recorded one before turn {}",
                    at + 1
                )));
            }
        }
        let turn = self.turns.get(at).ok_or_else(|| {
            EngineError::Stopped(format!("the recording has {} turns", self.turns.len()))
        })?;
        if request.prompt_logprobs.is_some() {
            let why = "a recording has no log-probs of prompts: leave prompt_logprobs out";
            return Err(EngineError::Failed(why.into()));
        }
        let id = request.id;
        drop(request);
        if !turn.tokens.is_empty() {
            sink(EngineEvent::Tokens {
                request: id,
                tokens: turn.tokens.clone(),
            });
        }
        sink(EngineEvent::Finished {
            request: id,
            reason: turn.finish.clone(),
            cached_prompt_tokens: 0,
            routes: None,
        });
        Ok(())
    }

    fn abort(&self, request: RequestId) {
        if let Some(live) = &self.live {
            live.engine.abort(request);
        }
    }

    fn pause(&self, paused: bool) {
        if let Some(live) = &self.live {
            live.engine.pause(paused);
        }
    }

    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError> {
        self.live("weights")?.load_weights(version, weights)
    }

    fn load_adapter(
        &self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: Adapter,
    ) -> Result<(), EngineError> {
        self.live("adapters")?.load_adapter(name, version, adapter)
    }

    fn unload_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        self.live("adapters")?.unload_adapter(name)
    }

    fn sleep(&self) -> Result<(), EngineError> {
        self.live
            .as_ref()
            .map_or(Ok(()), |live| live.engine.sleep())
    }

    fn wake(&self) -> Result<(), EngineError> {
        self.live.as_ref().map_or(Ok(()), |live| live.engine.wake())
    }

    fn status(&self) -> EngineStatus {
        let live = self.live.as_ref();
        live.map_or_else(EngineStatus::default, |l| l.engine.status())
    }
}
