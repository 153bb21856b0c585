//! Settings of a gateway, and the parts it needs.

use crate::capacity::Capacity;
use crate::hooks::RolloutHooks;
use crate::journal::Journal;
use crate::limits::{ServerLimits, SessionLimits};
use crate::secret::Secret;
use sinew_render::{Reasoning, Renderer, ToolCallFormat, TurnFormat};
use sinew_store::TraceStore;
use sinew_types::{Engine, Thinking};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Settings of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Name under which `GET /v1/models` lists the model.
    pub model: String,
    /// Maximum limits of each rollout; the client that opens a rollout may lower them.
    pub session: SessionLimits,
    /// Limits of the whole server.
    pub server: ServerLimits,
    /// Journal for the captured data of open rollouts, written before a client sees the end of its call.
    /// `None`: a crash loses this data.
    pub journal: Option<Arc<Journal>>,
    /// Notation of the model's tool calls and reasoning.
    pub format: TurnFormat,
    /// Fixed key for clients that open no rollouts; each of their conversations becomes one rollout.
    pub api_key: Option<Secret>,
    /// Whether request fields without effect are refused instead of counted.
    pub strict_fields: bool,
    /// Folder that keeps uploaded adapters; `None`: uploads are refused.
    pub adapter_dir: Option<PathBuf>,
    /// Treatment of the thinking of earlier turns in rollouts that name none.
    pub thinking: Thinking,
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
            adapter_dir: None,
            thinking: Thinking::default(),
        }
    }
}

/// The parts of a gateway.
#[derive(Clone)]
pub struct GatewayParts {
    /// Engine that samples; a training loop may share it.
    pub engine: Arc<dyn Engine>,
    /// Tokenizer and chat template of the model.
    pub renderer: Arc<dyn Renderer>,
    /// Store for finished traces. A trace is stored before its finish request is answered. `None`: the caller
    /// of [`Gateway::finish`](crate::Gateway::finish) keeps it.
    pub store: Option<Arc<dyn TraceStore>>,
    /// Source of request ids, shared by all users of the engine.
    pub requests: Arc<AtomicU64>,
    /// Admission control of a shared engine; `None`: every call generates at once.
    pub capacity: Option<Arc<dyn Capacity>>,
    /// Receiver of finished rollouts; `None`: only their clients receive them. A gateway with hooks refuses
    /// to finish a rollout without model calls.
    pub hooks: Option<Arc<dyn RolloutHooks>>,
}

sinew_types::debug_fields!(GatewayParts, store);
