//! Any server with `/v1/chat/completions`: for evaluation only.
//!
//! Such a server takes messages and answers with text and calls; it reports neither token ids nor
//! log-probabilities of what it read. A [`ChatCodec`] reads the messages out of a request's ids and makes
//! ids of the answer, so its fidelity is [`Fidelity::Evaluation`]. The limit of an answer is in the server's
//! own tokens and fixed with the client: the ids of a request are others.

use crate::attempt::{Attempt, AttemptEnd, ServerEnd};
use crate::backend::{AttemptSink, Backend, Probe};
use crate::config::{ConfigError, ServerConfig};
use crate::error::AttemptError;
use crate::plain::{self, PlainServer, made_up, stopped};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{
    EngineError, Fidelity, FinishReason, Message, Role, SamplingParams, TokenId, ToolSpec,
    WeightsId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Path of the requests.
const PATH: &str = "/v1/chat/completions";
/// Maximum length of an answer, 16 MiB.
const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// Name of the limit of an answer.
const LIMIT: &str = "max_tokens";
/// Its name at servers that refuse `max_tokens`.
const NEWER_LIMIT: &str = "max_completion_tokens";
/// Words of servers about a conversation that is longer than their context.
const TOO_LONG: [&str; 3] = [
    "context_length_exceeded",
    "context length",
    "maximum context",
];

/// A conversation that waits for the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatContext {
    /// All messages so far.
    pub messages: Vec<Message>,
    /// Tools that the model may call.
    pub tools: Vec<ToolSpec>,
}

/// A call in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatCall {
    /// Name of the tool.
    pub name: String,
    /// Arguments as the model wrote them: JSON, if it made no mistake.
    pub arguments: String,
}

/// An answer of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatReply {
    /// Text outside of calls.
    pub content: String,
    /// Calls in order.
    pub calls: Vec<ChatCall>,
}

/// Tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatUsage {
    /// Tokens of messages and tools.
    pub prompt: u64,
    /// Tokens of the answer.
    pub sampled: u64,
    /// Whether the server counted them. Otherwise they are bytes.
    pub is_counted: bool,
}

/// Gets the tokens of each request that was answered.
pub type CountUsage = Arc<dyn Fn(ChatUsage) + Send + Sync>;

/// Ids to messages, and answers to ids. Implemented by a renderer whose renders can be read back.
pub trait ChatCodec: Send + Sync {
    /// The conversation of a request.
    ///
    /// # Errors
    /// If the ids are not a conversation that waits for the model.
    fn read(&self, ids: &[TokenId]) -> Result<ChatContext, EngineError>;

    /// Ids of an answer, without the one that ends the turn.
    fn write(&self, reply: &ChatReply) -> Vec<TokenId>;
}

/// A server that only chats. Its tokens are of [`Fidelity::Evaluation`], and it loads no weights.
pub struct ChatBackend {
    server: PlainServer,
    codec: Arc<dyn ChatCodec>,
    /// Maximum tokens of an answer, as the server counts them.
    max_tokens: u32,
    count: CountUsage,
    /// The server refused `max_tokens`.
    newer_limit: AtomicBool,
}

sinew_types::debug_fields!(ChatBackend, server, max_tokens);

#[derive(Debug, Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    message: Said,
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Said {
    content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<Call>>,
}

#[derive(Debug, Deserialize)]
struct Call {
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: Value,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
}

impl ChatBackend {
    /// A client of the server of `config`, which need not be up yet. Answers have at most `max_tokens` of the
    /// server's tokens; `count` gets the tokens of each.
    ///
    /// # Errors
    /// If the address cannot be one.
    pub fn new(
        mut config: ServerConfig,
        codec: Arc<dyn ChatCodec>,
        max_tokens: u32,
        count: CountUsage,
    ) -> Result<Self, ConfigError> {
        // An answer comes as a whole.
        config.timeouts.first_token_s = config.timeouts.whole_s;
        Ok(Self {
            server: PlainServer::new(config)?,
            codec,
            max_tokens,
            count,
            newer_limit: AtomicBool::new(false),
        })
    }

    /// The body of a request; `limit` is the name of the limit of its answer.
    fn body(
        &self,
        sampling: &SamplingParams,
        context: &ChatContext,
        model: &str,
        limit: &str,
    ) -> Value {
        let messages: Vec<Value> = context.messages.iter().map(message).collect();
        let mut body = json!({
            "model": model,
            "messages": messages,
            limit: self.max_tokens,
            "temperature": sampling.temperature,
            // Signed 64 bits are what most servers read.
            "seed": sampling.seed & i64::MAX as u64,
        });
        if sampling.top_p < 1.0 {
            body["top_p"] = json!(sampling.top_p);
        }
        if !context.tools.is_empty() {
            let tool = |tool: &ToolSpec| json!({"type": "function", "function": tool});
            body["tools"] = context.tools.iter().map(tool).collect();
        }
        if !sampling.stop_strings.is_empty() {
            body["stop"] = json!(sampling.stop_strings);
        }
        body
    }

    /// Asks once; again if the server wants the newer name of the limit.
    async fn asked(
        &self,
        sampling: &SamplingParams,
        context: &ChatContext,
    ) -> Result<(Completion, usize), AttemptError> {
        let model = self.server.model().await?;
        let newer = self.newer_limit.load(Ordering::Relaxed);
        let first = if newer { NEWER_LIMIT } else { LIMIT };
        match self.exchange(sampling, context, &model, first).await {
            Err(AttemptError::Refused(why)) if !newer && why.to_string().contains(NEWER_LIMIT) => {
                self.newer_limit.store(true, Ordering::Relaxed);
                self.exchange(sampling, context, &model, NEWER_LIMIT).await
            }
            answer => answer,
        }
    }

    /// One request. Returns the answer, and the bytes of the question.
    async fn exchange(
        &self,
        sampling: &SamplingParams,
        context: &ChatContext,
        model: &str,
        limit: &str,
    ) -> Result<(Completion, usize), AttemptError> {
        let body = self.body(sampling, context, model, limit);
        let bytes = body.to_string().len();
        let answer = self
            .server
            .http
            .compute(PATH, &body, MAX_ANSWER_BYTES)
            .await?;
        Ok((answer, bytes))
    }

    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let context = self.codec.read(&attempt.prompt)?;
        let reason = match self.asked(&attempt.sampling, &context).await {
            Ok((answer, asked_bytes)) => self.said(answer, asked_bytes, attempt, sink).await?,
            Err(AttemptError::Refused(why)) if is_too_long(&why) => FinishReason::ContextFull,
            Err(error) => return Err(error),
        };
        Ok(AttemptEnd {
            reason,
            cached_prompt_tokens: 0,
            routes: None,
        })
    }

    /// Counts and hands on an answer.
    async fn said(
        &self,
        answer: Completion,
        asked_bytes: usize,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<FinishReason, AttemptError> {
        let Some(choice) = answer.choices.into_iter().next() else {
            return Err(AttemptError::Protocol(format!("{PATH}: it has no choices")));
        };
        let reply = reply(choice.message);
        (self.count)(usage(answer.usage, &reply, asked_bytes));
        // The id that ends the turn needs a place.
        let room = attempt.sampling.max_tokens;
        let mut ids = self.codec.write(&reply);
        let is_cut = ids.len() >= room as usize;
        ids.truncate(room as usize);
        made_up(&ids, attempt, sink).await?;
        match choice.finish_reason.as_deref() {
            Some("length") => Ok(FinishReason::Length),
            _ if is_cut => Ok(FinishReason::Length),
            // A filter ended what it says; servers that report no reason have ended as well.
            None | Some("stop" | "tool_calls" | "function_call" | "content_filter") => {
                stopped(attempt, room, sink).await
            }
            Some(other) => sink.end(&ServerEnd::Aborted(other.to_owned())).await,
        }
    }
}

/// A message as the protocol has it.
fn message(message: &Message) -> Value {
    let mut shown = json!({"role": message.role, "content": message.content.text()});
    if message.role == Role::Tool {
        shown["tool_call_id"] = json!(message.tool_call_id.as_deref().unwrap_or_default());
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            let arguments = call.arguments.to_string();
            let function = json!({"name": call.name, "arguments": arguments});
            json!({"id": call.id, "type": "function", "function": function})
        });
        shown["tool_calls"] = calls.collect();
    }
    shown
}

/// Text and calls of an answer.
fn reply(said: Said) -> ChatReply {
    let arguments = |value: Value| match value {
        Value::String(text) => text,
        Value::Null => "{}".to_owned(),
        other => other.to_string(),
    };
    let calls = said.tool_calls.unwrap_or_default().into_iter();
    ChatReply {
        content: said.content.unwrap_or_default(),
        calls: calls
            .map(|call| ChatCall {
                name: call.function.name,
                arguments: arguments(call.function.arguments),
            })
            .collect(),
    }
}

/// The tokens of a request, or its bytes if the server counts none.
fn usage(counted: Option<Usage>, reply: &ChatReply, asked_bytes: usize) -> ChatUsage {
    if let Some(usage) = counted {
        return ChatUsage {
            prompt: usage.prompt_tokens,
            sampled: usage.completion_tokens,
            is_counted: true,
        };
    }
    let calls = reply.calls.iter();
    let calls: usize = calls.map(|c| c.name.len() + c.arguments.len()).sum();
    ChatUsage {
        prompt: asked_bytes as u64,
        sampled: (reply.content.len() + calls) as u64,
        is_counted: false,
    }
}

/// Whether a server refused a conversation because it is longer than its context.
fn is_too_long(why: &EngineError) -> bool {
    let why = why.to_string().to_lowercase();
    TOO_LONG.iter().any(|words| why.contains(words))
}

impl Backend for ChatBackend {
    fn name(&self) -> &str {
        self.server.http.name()
    }

    fn fidelity(&self) -> Fidelity {
        crate::openai::fidelity()
    }

    fn accepts(&self, sampling: &SamplingParams) -> Result<(), AttemptError> {
        plain::accepts(sampling)
    }

    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>> {
        self.run(attempt, sink).boxed()
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        self.server.probe().boxed()
    }

    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        self.server.label(id);
        std::future::ready(Ok(())).boxed()
    }
}
