//! The request that every dialect is lowered to, and the interface that each dialect implements.
//!
//! A dialect is three things: [`Dialect::parse`] turns a request body into a [`ModelRequest`] (fields without
//! effect are counted by name), [`Dialect::response`] turns a [`ModelResponse`] into the body of an answer,
//! and [`Dialect::stream`] returns an [`EventWriter`] that turns [`Delta`]s into server-sent events while
//! they come. All of them are pure; the gateway does the rest. `chat.rs` and `completions.rs` are the
//! examples.

mod agent_tools;
pub mod anthropic;
pub mod chat;
pub mod completions;
mod continuation;
pub mod fields;
pub mod format;
pub mod google;
mod media;
mod openai;
mod openapi;
pub mod responses;

use crate::error::ApiError;
use crate::ignored::Ignored;
use crate::prompt::Prompt;
use agent_tools::SpecialTool;
pub use continuation::Continuation;
use fields::Notes;
use format::FormatAsk;
use serde_json::Value;
use sinew_render::Piece;
use sinew_render::Renderer;
use sinew_types::{Message, PromptLogprob, SampledToken, TokenId, ToolSpec};
use std::sync::Arc;

/// Whether and which tool the model must call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// Tools are not shown and calls are not searched.
    None,
    /// Some tool.
    Required,
    /// This one.
    Named(String),
}

/// Sampling parameters of a client; `None`: the client leaves it open.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingAsk {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// 0 keeps all tokens.
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    /// Tokens of the output, without the prompt. 0 asks for the prompt only: see
    /// [`ModelRequest::is_prompt_only`].
    pub max_tokens: Option<u32>,
    /// Stop strings. They end the output and are not part of it.
    pub stop: Vec<String>,
    /// Seed of the call; by default it follows from the rollout's seed and the number of the call.
    pub seed: Option<u64>,
    pub logit_bias: Vec<(TokenId, f32)>,
}

/// A request, whatever dialect it came in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRequest {
    /// Model name as the client wrote it; answers repeat it.
    pub model: String,
    /// Conversation, text or ids.
    pub prompt: Prompt,
    /// Messages at the beginning that were not in the list of [`Dialect::repeated`].
    pub head: usize,
    /// Functions that the prompt shows.
    pub tools: Vec<ToolSpec>,
    /// Functions that may be called and are shown in the conversation, once a search has found them.
    pub deferred_tools: Vec<ToolSpec>,
    /// Tools whose calls have a special wire form.
    pub(crate) special_tools: Vec<SpecialTool>,
    /// Whether its messages define tools, so that a later body must be read with all of them.
    pub defines_tools: bool,
    pub tool_choice: ToolChoice,
    /// Whether the turn may hold several calls.
    pub parallel_tool_calls: bool,
    /// Tools whose calls must follow their schemas, and where these are in the request.
    pub strict_tools: Vec<(String, String)>,
    pub sampling: SamplingAsk,
    pub format: Option<FormatAsk>,
    /// Outputs to sample.
    pub n: u32,
    /// Log-probabilities of the output, with this number of alternatives.
    pub logprobs: Option<u8>,
    /// Each output begins with the prompt, with its log-probabilities if [`ModelRequest::logprobs`] is set.
    pub echo_prompt: bool,
    /// Answer with the ids of prompt and output.
    pub return_token_ids: bool,
    /// Answer with events.
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// Set if it continues a stored answer, or its own answer is stored for continuation.
    pub continuation: Option<Continuation>,
    /// Fields of the request that the dialect's answer repeats.
    pub echo: Value,
    /// Fields that were accepted without effect.
    pub ignored: Ignored,
}

impl ModelRequest {
    /// A request for one output that asks for nothing else.
    pub fn new(model: impl Into<String>, prompt: Prompt) -> Self {
        Self {
            model: model.into(),
            prompt,
            parallel_tool_calls: true,
            n: 1,
            ..Self::default()
        }
    }

    /// Whether nothing is sampled for the client: it asks for the prompt and its log-probabilities only.
    pub fn is_prompt_only(&self) -> bool {
        self.echo_prompt && self.sampling.max_tokens == Some(0)
    }

    /// Whether calls of a tool must follow its schema.
    pub fn is_strict(&self, tool: &str) -> bool {
        self.strict_tools.iter().any(|(name, _)| name == tool)
    }

    /// Checks that the required tool is among the tools.
    ///
    /// # Errors
    /// If it is not.
    pub fn check_tool_choice(&self) -> Result<(), ApiError> {
        let why = match &self.tool_choice {
            ToolChoice::Named(name) if !self.callable().any(|t| t.name == *name) => {
                format!(
                    "tool_choice asks for a call of {name:?}, but no tool of that name runs with the agent"
                )
            }
            ToolChoice::Required if self.callable().next().is_none() => {
                "tool_choice asks for a call, but there is no tool that runs with the agent".into()
            }
            _ => return Ok(()),
        };
        Err(ApiError::invalid("tool_choice", why))
    }
}

/// Reason of an output's end, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnEnd {
    /// The model ended its turn.
    Stop,
    /// One of the client's stop strings appeared.
    StopString(String),
    /// `max_tokens` or the context is used up.
    Length,
    /// The model calls tools.
    ToolCalls,
}

/// Tokens of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens as the engine got them.
    pub prompt_tokens: u32,
    /// Prompt tokens found in the engine's prefix cache.
    pub cached_tokens: u32,
    /// Sampled, over all choices.
    pub completion_tokens: u32,
}

/// One output.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The turn as the client gets it.
    pub message: Message,
    /// All text of the output, as [`Prompt::Text`] clients see it.
    pub text: String,
    pub end: TurnEnd,
    /// Empty unless log-probabilities or ids were requested.
    pub tokens: Vec<SampledToken>,
}

/// The answer to a [`ModelRequest`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModelResponse {
    /// Choices in the order of their numbers.
    pub choices: Vec<Choice>,
    /// Log-probabilities of the prompt's tokens but the first; empty unless they were requested.
    pub prompt: Vec<PromptLogprob>,
    pub usage: Usage,
}

/// Something new of an output that is being sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Number of the output, from 0.
    pub choice: u32,
    /// New pieces for the client, in order; may be empty.
    pub pieces: Vec<Piece>,
    /// The same output as plain text, for [`Prompt::Text`] clients.
    pub text: String,
    /// Tokens since the last delta; empty unless log-probabilities or ids were requested.
    pub tokens: Vec<SampledToken>,
    /// Set in the last delta of a choice.
    pub end: Option<TurnEnd>,
}

/// Data that answers need in addition to the output.
#[derive(Clone)]
pub struct AnswerContext {
    /// Unique for the call; dialects put their own prefix before it.
    pub id: String,
    /// Unix time.
    pub created_s: u64,
    pub request: Arc<ModelRequest>,
    pub renderer: Arc<dyn Renderer>,
    /// Empty unless ids or the prompt were requested.
    pub prompt_ids: Vec<TokenId>,
}

sinew_types::debug_fields!(AnswerContext, id);

/// Writes server-sent events, or another stream of text. The text of each call is sent unchanged, so that a
/// dialect chooses its own framing.
pub trait EventWriter: Send {
    /// Media type of the stream.
    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }

    /// Text that its client passes over. It is sent if nothing else was for a while, so that both sides
    /// notice a dead connection.
    fn ping(&mut self) -> String {
        ": ping\n\n".into()
    }

    /// Events before the first delta.
    fn begin(&mut self) -> String {
        String::new()
    }

    /// Events for a delta; may be none.
    fn delta(&mut self, delta: &Delta) -> String;

    /// Events after the last delta of the last choice. The call is durable by now.
    fn end(&mut self, response: &ModelResponse) -> String;

    /// Events for a failure after the stream has begun.
    fn error(&mut self, error: &ApiError) -> String;
}

/// A wire format.
pub trait Dialect: Send + Sync {
    /// Reads a request body, and counts in `notes` what has no effect.
    ///
    /// # Errors
    /// If it is wrong, or asks for what would change the sampling and cannot be honoured.
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError>;

    /// Reads a request body; what was counted is in the request.
    ///
    /// # Errors
    /// Same as [`Dialect::read`].
    fn parse(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut request = self.read(body, notes)?;
        request.ignored = notes.take();
        Ok(request)
    }

    /// The array of a body that repeats the conversation, if it can be cut after a message that is not the
    /// model's. The part after such a message reads the same with and without the part before it, and makes
    /// the messages after [`ModelRequest::head`].
    fn repeated(&self) -> Option<&'static str> {
        None
    }

    /// Writes a whole answer.
    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value;

    /// Writes an answer in parts.
    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter>;

    /// Writes a refusal.
    fn error(&self, error: &ApiError) -> Value {
        openai_error(error)
    }
}

/// OpenAI's error object.
pub fn openai_error(error: &ApiError) -> Value {
    serde_json::json!({
        "error": {
            "message": error.message,
            "type": error.kind.openai(),
            "param": error.param,
            "code": error.code,
        }
    })
}

/// One `data:` event.
pub fn data_event(value: &Value) -> String {
    format!("data: {value}\n\n")
}
