//! Models in this process, behind the `Engine` port.

use crate::chat::{ChatAnswer, ChatError, ChatModel, ChatRequest, Usage};
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_render::{Renderer, split_thoughts};
use sinew_types::{
    Engine, EngineError, EngineEvent, FinishReason, Format, GenerateRequest, Grammar, RequestId,
    SampledToken, SamplingParams, TokenId,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::oneshot;

/// An engine with the chat template of its model. Answers are sampled from the schema's masks where the
/// engine has them, so that they always have the right form unless they are cut.
pub struct EngineChat {
    name: String,
    engine: Arc<dyn Engine>,
    renderer: Arc<dyn Renderer>,
    requests: Arc<AtomicU64>,
}

sinew_types::debug_fields!(EngineChat, name);

/// Ends a generation whose caller is gone.
struct AbortOnDrop<'a>(&'a dyn Engine, RequestId);

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        self.0.abort(self.1);
    }
}

impl EngineChat {
    /// A model with the name `name`. `requests` gives the ids of requests; users of one engine share it.
    pub fn new(
        name: String,
        engine: Arc<dyn Engine>,
        renderer: Arc<dyn Renderer>,
        requests: Arc<AtomicU64>,
    ) -> Self {
        Self {
            name,
            engine,
            renderer,
            requests,
        }
    }

    /// Renders the conversation, and collects the tokens until the end of the turn. A caller that goes away
    /// ends the generation.
    async fn generate(&self, request: &ChatRequest) -> Result<ChatAnswer, ChatError> {
        let lasting = |e: &dyn fmt::Display| ChatError::Lasting(format!("{}: {e}", self.name));
        let prompt = self.renderer.render_prompt(&request.messages, &[]);
        let prompt = prompt.map_err(|e| lasting(&e))?;
        let schema = request
            .schema
            .as_ref()
            .filter(|_| self.engine.holds_formats());
        let format = schema.map(|schema| {
            let schema = schema.to_string();
            Arc::new(Format::new(Grammar::JsonSchema { schema }))
        });
        let sampling = SamplingParams {
            temperature: request.temperature,
            max_tokens: request.max_tokens,
            stop_ids: self.renderer.stop_ids().to_vec(),
            seed: request.seed,
            format,
            ..SamplingParams::default()
        };
        let id = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        let input = prompt.len() as u64;
        let generate = GenerateRequest::new(id, prompt, sampling);
        let (send, end) = oneshot::channel();
        let (mut send, mut all) = (Some(send), Vec::<SampledToken>::new());
        let sink = move |event| {
            let ended = match event {
                EngineEvent::Prompt { .. } => return,
                EngineEvent::Tokens { tokens, .. } => return all.extend(tokens),
                EngineEvent::Finished { reason, .. } => Ok((std::mem::take(&mut all), reason)),
                EngineEvent::Failed { error, .. } => Err(error),
            };
            if let Some(send) = send.take() {
                // Nobody waits any more: the answer is not needed.
                let _ = send.send(ended);
            }
        };
        let _abort = AbortOnDrop(self.engine.as_ref(), id);
        let submitted = self.engine.submit(generate, Box::new(sink));
        submitted.map_err(|e| self.failed(&e))?;
        let ended = end.await.map_err(|_| lasting(&"the engine has ended"))?;
        let (tokens, reason) = ended.map_err(|e| self.failed(&e))?;
        let ids: Vec<_> = tokens.iter().map(|t| t.id).collect();
        Ok(ChatAnswer {
            text: self.answer(&ids),
            cut: matches!(reason, FinishReason::Length | FinishReason::ContextFull),
            usage: Some(Usage {
                input,
                output: ids.len() as u64,
            }),
        })
    }

    /// The text of a turn without the thoughts of the model's template.
    fn answer(&self, ids: &[TokenId]) -> String {
        let turn = split_thoughts(self.renderer.as_ref(), ids);
        // A masked turn has no thoughts, whatever the prompt opened.
        if turn.finished {
            turn.answer
        } else {
            self.renderer.decode(ids)
        }
    }

    /// A full queue is empty later; everything else stays.
    fn failed(&self, error: &EngineError) -> ChatError {
        let why = format!("{}: {error}", self.name);
        match error {
            EngineError::QueueFull { .. } => ChatError::Passing(why),
            _ => ChatError::Lasting(why),
        }
    }
}

impl ChatModel for EngineChat {
    fn identity(&self) -> String {
        self.name.clone()
    }

    fn ask<'a>(&'a self, request: &'a ChatRequest) -> BoxFuture<'a, Result<ChatAnswer, ChatError>> {
        self.generate(request).boxed()
    }
}
