//! Settings of a gateway, and the parts it works with.

use crate::capacity::Capacity;
use crate::hooks::RolloutHooks;
use crate::journal::Journal;
use crate::limits::{ServerLimits, SessionLimits};
use crate::secret::Secret;
use sinew_render::{Reasoning, Renderer, ToolCallFormat, TurnFormat};
use sinew_store::TraceStore;
use sinew_types::Engine;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Settings of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Name under which `GET /v1/models` lists the model.
    pub model: String,
    /// Bounds of each rollout, which its opener may narrow.
    pub session: SessionLimits,
    /// Bounds of all of them together.
    pub server: ServerLimits,
    /// Journal that gets what open rollouts captured, before their clients see the end of a call. `None`: a
    /// crash loses it.
    pub journal: Option<Arc<Journal>>,
    /// Format of the model's tool calls and reasoning.
    pub format: TurnFormat,
    /// Opens the model for clients that open no rollouts: each of their conversations is one.
    pub api_key: Option<Secret>,
    /// Fields of requests without effect are refused, not counted.
    pub strict_fields: bool,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            model: "policy".into(),
            session: SessionLimits::default(),
            server: ServerLimits::default(),
            journal: None,
            format: TurnFormat {
                calls: Some(ToolCallFormat::Hermes),
                reasoning: Some(Reasoning {
                    open: "<think>".into(),
                    close: "</think>".into(),
                    opened_by_prompt: false,
                }),
            },
            api_key: None,
            strict_fields: false,
        }
    }
}

/// Parts that a gateway is built from.
#[derive(Clone)]
pub struct GatewayParts {
    /// Samples; may be shared with a training loop.
    pub engine: Arc<dyn Engine>,
    /// Tokenizer and chat template of the model.
    pub renderer: Arc<dyn Renderer>,
    /// Finished traces are stored here before their finishing is answered; `None`: the caller of
    /// [`Gateway::finish`](crate::Gateway::finish) keeps them.
    pub store: Option<Arc<dyn TraceStore>>,
    /// Source of request ids, shared by all users of the engine.
    pub requests: Arc<AtomicU64>,
    /// Capacity of an engine that is shared; `None`: every call generates at once.
    pub capacity: Option<Arc<dyn Capacity>>,
    /// Takes the finished rollouts of clients; `None`: only those clients use them. A gateway with hooks
    /// refuses to finish a rollout that made no call of the model.
    pub hooks: Option<Arc<dyn RolloutHooks>>,
}

impl std::fmt::Debug for GatewayParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayParts")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}
