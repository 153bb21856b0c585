//! Models behind servers that take messages and answer with text: they are measured, and never trained on.
//!
//! Messages are stored as bytes, the tokens of [`sinew_render::byte_renderer`], so limits of an episode
//! are widened here. The limit of a turn holds at the server, in its own tokens. The tokens that it counts
//! are kept in the folder of the measurement, over all sessions.

use crate::failure::Failure;
use crate::servers::{READY_WITHIN, config};
use serde_json::{Map, Value, json};
use sinew_engines::{
    Backend, ChatBackend, ChatCodec, ChatContext, ChatReply, ChatUsage, CountUsage, RemoteEngine,
    ServerConfig,
};
use sinew_judge::{Ledger, Usage};
use sinew_recipe::RolloutPlan;
use sinew_render::{ParsedCall, Renderer, byte_conversation, byte_turn};
use sinew_types::{Engine, EngineError, TokenId, WeightsId};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes for each token of a limit: more than a token of text has, apart from runs of spaces.
const BYTES_PER_TOKEN: u32 = 16;

/// Folder with the counts, in that of a measurement.
const SERVED: &str = "served";
/// Tokens that servers counted.
const TOKENS: &str = "tokens.jsonl";
/// Bytes of requests whose tokens a server did not count.
const BYTES: &str = "bytes.jsonl";

/// Servers that only chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatServers {
    /// Addresses with commas between them.
    pub urls: String,
    /// Name of the model there; `None`: the first that a server lists.
    pub model: Option<String>,
}

/// Usage of the servers of a measurement, over all its sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServedUsage {
    /// Requests that were answered.
    pub requests: u64,
    /// Requests of these without counts: their bytes are in the sums.
    pub uncounted: u64,
    /// Tokens of messages and tools.
    pub prompt: u64,
    /// Tokens of answers.
    pub sampled: u64,
}

/// Messages as bytes, and back.
struct Codec(Arc<dyn Renderer>);

impl ChatCodec for Codec {
    fn read(&self, ids: &[TokenId]) -> Result<ChatContext, EngineError> {
        let read = byte_conversation(ids).map_err(|e| EngineError::Failed(e.to_string()))?;
        let (messages, tools) = read;
        Ok(ChatContext { messages, tools })
    }

    fn write(&self, reply: &ChatReply) -> Vec<TokenId> {
        let mut text = reply.content.clone();
        for call in &reply.calls {
            let written = match serde_json::from_str::<Map<String, Value>>(&call.arguments) {
                Ok(arguments) => byte_turn("", &[ParsedCall::new(call.name.clone(), arguments)]),
                // A mistake of the model, which the parser of turns names.
                Err(_) => format!(
                    "<tool_call>\n{{\"name\": {}, \"arguments\": {}}}\n</tool_call>",
                    json!(call.name),
                    call.arguments
                ),
            };
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&written);
        }
        self.0.encode_text(&text).unwrap_or_default()
    }
}

/// The ledgers of a measurement: counted tokens, and bytes.
fn ledgers(folder: &Path) -> Result<[Ledger; 2], Failure> {
    let open = |name: &str| {
        let path = folder.join(SERVED).join(name);
        let opened = Ledger::open(&path);
        opened.map_err(|e| Failure::system(format!("{}: {e}", path.display())))
    };
    Ok([open(TOKENS)?, open(BYTES)?])
}

/// Usage of the servers of the measurement in a folder.
///
/// # Errors
/// If a file of counts cannot be read.
pub fn served_usage(folder: &Path) -> Result<ServedUsage, Failure> {
    let [tokens, bytes] = ledgers(folder)?.map(|ledger| ledger.spent());
    Ok(ServedUsage {
        requests: tokens.calls + bytes.calls,
        uncounted: bytes.calls,
        prompt: tokens.usage.input + bytes.usage.input,
        sampled: tokens.usage.output + bytes.usage.output,
    })
}

/// Books the usage of each request.
fn counter(folder: &Path) -> Result<CountUsage, Failure> {
    let ledgers = ledgers(folder)?.map(Mutex::new);
    Ok(Arc::new(move |usage: ChatUsage| {
        let [tokens, bytes] = &ledgers;
        let ledger = if usage.is_counted { tokens } else { bytes };
        let spent = Usage {
            input: usage.prompt,
            output: usage.sampled,
        };
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(e) = ledger.book(spent, None) {
            tracing::error!(error = %e, "the tokens of a request could not be kept: the report lacks them");
        }
    }))
}

/// The engine in front of such servers. `max_tokens` bounds a turn, and `folder` is that of the measurement.
/// `SINEW_ENGINE_KEY` is sent to each as the bearer token.
///
/// # Errors
/// If an address is none, or a server does not answer within two minutes.
pub(crate) fn chat_engine(
    servers: &ChatServers,
    renderer: &Arc<dyn Renderer>,
    max_tokens: u32,
    folder: &Path,
) -> Result<Arc<dyn Engine>, Failure> {
    let failed =
        |url: &str, e: &dyn std::fmt::Display| Failure::outside(format!("--model {url}: {e}"));
    let count = counter(folder)?;
    let mut backends: Vec<Arc<dyn Backend>> = Vec::new();
    for url in servers.urls.split(',').map(str::trim) {
        let server = ServerConfig {
            model: servers.model.clone(),
            vocab: Some(renderer.vocab_size()),
            api_key: std::env::var("SINEW_ENGINE_KEY").ok(),
            ..ServerConfig::new(url)
        };
        let codec = Arc::new(Codec(Arc::clone(renderer)));
        let made = ChatBackend::new(server, codec, max_tokens, Arc::clone(&count));
        backends.push(Arc::new(
            made.map_err(|e| Failure::input(format!("--model {url}: {e}")))?,
        ));
    }
    let engine = RemoteEngine::new(backends, None, config(WeightsId::default(), None));
    let engine = engine.map_err(|e| failed(&servers.urls, &e))?;
    let ready = engine.wait_ready(READY_WITHIN);
    ready.map_err(|e| failed(&servers.urls, &e))?;
    Ok(Arc::new(engine))
}

/// The limits of episodes in bytes.
pub(crate) fn in_bytes(rollout: &RolloutPlan) -> RolloutPlan {
    let wide = |tokens: u32| tokens.saturating_mul(BYTES_PER_TOKEN);
    RolloutPlan {
        max_turn_tokens: wide(rollout.max_turn_tokens),
        max_context_tokens: wide(rollout.max_context_tokens),
        ..rollout.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_engines::ChatCall;
    use sinew_render::byte_renderer;

    fn codec() -> Codec {
        Codec(Arc::new(byte_renderer().unwrap()))
    }

    fn said(reply: &ChatReply) -> String {
        let codec = codec();
        codec.0.decode(&codec.write(reply))
    }

    #[test]
    fn answers_are_written_as_turns_with_their_mistakes() {
        let call = |arguments: &str| ChatCall {
            name: "add".into(),
            arguments: arguments.into(),
        };
        let plain = ChatReply {
            content: "7".into(),
            calls: Vec::new(),
        };
        assert_eq!(said(&plain), "7");
        let called = ChatReply {
            content: "So".into(),
            calls: vec![call("{\"a\": 1}"), call("{\"a\": ")],
        };
        let text = said(&called);
        assert!(
            text.starts_with("So\n<tool_call>\n{\"name\": \"add\", "),
            "{text}"
        );
        assert!(
            text.ends_with("\"arguments\": {\"a\": }\n</tool_call>"),
            "{text}"
        );
    }

    #[test]
    fn counts_of_several_sessions_are_added() {
        let dir = tempfile::tempdir().unwrap();
        let usage = |prompt, sampled, is_counted| ChatUsage {
            prompt,
            sampled,
            is_counted,
        };
        for _ in 0..2 {
            let count = counter(dir.path()).unwrap();
            count(usage(10, 2, true));
            count(usage(300, 40, false));
        }
        let found = served_usage(dir.path()).unwrap();
        let expected = ServedUsage {
            requests: 4,
            uncounted: 2,
            prompt: 620,
            sampled: 84,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn limits_become_bytes() {
        let rollout = RolloutPlan {
            max_turn_tokens: 8,
            max_context_tokens: u32::MAX,
            ..RolloutPlan::default()
        };
        let wide = in_bytes(&rollout);
        assert_eq!(
            (wide.max_turn_tokens, wide.max_context_tokens),
            (128, u32::MAX)
        );
    }
}
