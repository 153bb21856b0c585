//! The renderer for pretrained models: their tokenizer, their chat template.
//!
//! The join between two turns is found by suffix difference. A dummy conversation that ends
//! with an assistant message and then the new messages is rendered, and what the template puts
//! after the assistant's content is what has to follow a sampled turn:
//!
//! | template writes after the content | model stopped at | appended |
//! |---|---|---|
//! | `<\|im_end\|>\n<\|im_start\|>user...` (ChatML) | `<\|im_end\|>` | from `\n` on, as observation |
//! | the same | nothing (token limit, stop string) | `<\|im_end\|>` forced, then as above |
//! | `<\|user\|>...` (next role is the stop, GLM) | `<\|user\|>` | from after `<\|user\|>` on |
//! | ` </s>[INST]...` (text before the stop) | `</s>` | from after `</s>` on |
//!
//! Sources: the chat templates that the models ship; reference/agent-layer.md section 1.2.

use crate::renderer::{Extension, RenderError, Renderer};
use crate::template::{ChatTemplate, role_name};
use crate::tokenizer::{GgufVocab, Tokenizer};
use serde_json::Value;
use sinew_types::{FinishReason, Message, Role, TokenId, ToolCall, ToolSpec};
use std::path::Path;

/// Stands for a sampled turn in dummy conversations. No template changes it, no model says it.
const SENTINEL: &str = "sinewturnsentinel";

/// A stop token further away from the content than this is not the one that closes it.
const MAX_CLOSING_TOKENS: usize = 4;

/// Tokenizer, template and stop ids of one model.
#[derive(Debug)]
pub struct ChatRenderer {
    tokenizer: Tokenizer,
    config: ChatConfig,
    template: ChatTemplate,
    stop_ids: Vec<TokenId>,
}

/// How a model's conversations are written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatConfig {
    /// Jinja source.
    pub template: String,
    pub bos_token: String,
    pub eos_token: String,
    /// Ids that end a generation besides those found in the template.
    pub eos_ids: Vec<TokenId>,
    /// Variables for the template, for instance `enable_thinking`.
    pub options: serde_json::Map<String, Value>,
}

impl ChatRenderer {
    /// Compiles the template and finds the tokens that end a turn.
    pub fn new(tokenizer: Tokenizer, config: ChatConfig) -> Result<Self, RenderError> {
        let template = ChatTemplate::new(
            &config.template,
            &config.bos_token,
            &config.eos_token,
            config.options.clone(),
        )?;
        let mut renderer = Self {
            tokenizer,
            config: config.clone(),
            template,
            stop_ids: Vec::new(),
        };
        let mut stop_ids = Vec::new();
        for role in [Role::User, Role::Tool] {
            // Many templates know no `tool` role; what they know must have a join.
            if let Ok(suffix) = renderer.suffix(&[Message::new(role, "x")], &[])
                && let Some(&first) = suffix.first()
                && renderer.tokenizer.is_special(first)
            {
                stop_ids.push(first);
            }
        }
        stop_ids.extend(config.eos_ids);
        stop_ids.extend(renderer.tokenizer.id(&config.eos_token));
        let mut seen = std::collections::BTreeSet::new();
        stop_ids.retain(|id| seen.insert(*id));
        if stop_ids.is_empty() {
            return Err(RenderError::NoStopToken {
                hint: format!("eos_token is {:?}", config.eos_token),
            });
        }
        if let Some(&id) = stop_ids
            .iter()
            .find(|&&id| id as usize >= renderer.vocab_size())
        {
            return Err(RenderError::UnknownToken {
                id,
                vocab: renderer.vocab_size(),
            });
        }
        renderer.stop_ids = stop_ids;
        Ok(renderer)
    }

    /// From what a GGUF file holds: its vocabulary, `tokenizer.chat_template`, and the ids
    /// `tokenizer.ggml.bos_token_id` and `tokenizer.ggml.eos_token_id`.
    pub fn from_gguf(
        vocab: &GgufVocab,
        chat_template: Option<&str>,
        bos_id: Option<TokenId>,
        eos_id: Option<TokenId>,
    ) -> Result<Self, RenderError> {
        let template = chat_template.ok_or_else(|| RenderError::NoTemplate {
            hint: "the GGUF file has no tokenizer.chat_template: use an instruct model".into(),
        })?;
        let text = |id: Option<TokenId>| match id {
            None => Ok(String::new()),
            Some(id) => vocab.tokens.get(id as usize).cloned().ok_or({
                RenderError::UnknownToken {
                    id,
                    vocab: vocab.tokens.len(),
                }
            }),
        };
        let config = ChatConfig {
            template: template.to_owned(),
            bos_token: text(bos_id)?,
            eos_token: text(eos_id)?,
            eos_ids: eos_id.into_iter().collect(),
            options: serde_json::Map::new(),
        };
        Self::new(Tokenizer::from_gguf(vocab)?, config)
    }

    /// From a model folder in the Hugging Face layout: `tokenizer.json`,
    /// `tokenizer_config.json`, and, where they are there, `chat_template.jinja` and
    /// `generation_config.json`.
    pub fn from_dir(dir: &Path) -> Result<Self, RenderError> {
        let path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::from_json(&read(&path)?, &path.display().to_string())?;
        let settings = read_json(&dir.join("tokenizer_config.json"))?;
        let template = match read(&dir.join("chat_template.jinja")) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(_) => template_of(&settings["chat_template"]),
        }
        .ok_or_else(|| RenderError::NoTemplate {
            hint: format!(
                "neither chat_template.jinja nor chat_template in tokenizer_config.json is in {}: \
                 use an instruct model",
                dir.display()
            ),
        })?;
        let generation = dir.join("generation_config.json");
        let eos_ids = if generation.exists() {
            eos_ids(&read_json(&generation)?["eos_token_id"])
        } else {
            Vec::new()
        };
        let config = ChatConfig {
            template,
            bos_token: token_text(&settings["bos_token"]),
            eos_token: token_text(&settings["eos_token"]),
            eos_ids,
            options: serde_json::Map::new(),
        };
        Self::new(tokenizer, config)
    }

    /// The tokenizer alone.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Ids of everything that the template writes between an assistant's content and the point
    /// where it speaks again.
    fn suffix(
        &self,
        new_messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError> {
        let mut dummy = vec![
            Message::new(Role::User, "x"),
            Message::new(Role::Assistant, SENTINEL),
        ];
        dummy.extend(new_messages.iter().map(|m| self.neutral(m)));
        let text = match self.template.render(&dummy, tools, true) {
            Ok(text) => text,
            Err(plain) => {
                // Some templates take tool messages only after a call.
                dummy[1].tool_calls = vec![ToolCall {
                    id: "call00000".into(),
                    name: "x".into(),
                    arguments: serde_json::json!({}),
                }];
                self.template
                    .render(&dummy, tools, true)
                    .map_err(|_| plain)?
            }
        };
        let (_, suffix) = text.split_once(SENTINEL).ok_or_else(|| {
            RenderError::Join("the template does not print the content of an assistant".into())
        })?;
        self.tokenizer.encode(suffix)
    }

    fn neutral(&self, message: &Message) -> Message {
        Message {
            content: self.tokenizer.neutralize(&message.content),
            ..message.clone()
        }
    }
}

impl Renderer for ChatRenderer {
    fn files(&self) -> Result<Vec<(String, Vec<u8>)>, RenderError> {
        let settings = serde_json::json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": text_or_null(&self.config.bos_token),
            "eos_token": text_or_null(&self.config.eos_token),
            "chat_template": self.config.template,
            "clean_up_tokenization_spaces": false,
        });
        let generation = serde_json::json!({ "eos_token_id": self.stop_ids });
        Ok(vec![
            ("tokenizer.json".to_owned(), self.tokenizer.to_json()?),
            (
                "tokenizer_config.json".to_owned(),
                settings.to_string().into_bytes(),
            ),
            (
                "generation_config.json".to_owned(),
                generation.to_string().into_bytes(),
            ),
        ])
    }

    fn render_prompt(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError> {
        let messages: Vec<_> = messages.iter().map(|m| self.neutral(m)).collect();
        let text = self.template.render(&messages, tools, true)?;
        self.tokenizer.encode(&text)
    }

    fn extend(
        &self,
        context: &[TokenId],
        finish: &FinishReason,
        new_messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Extension, RenderError> {
        if let Some(message) = new_messages.iter().find(|m| m.role == Role::Assistant) {
            return Err(RenderError::Message {
                role: role_name(message.role).into(),
                message: "only the model speaks for itself, and its turns are not rendered".into(),
            });
        }
        let mut suffix = self.suffix(new_messages, tools)?;
        let stopped_at = match finish {
            FinishReason::StopId { id } if context.last() != Some(id) => {
                return Err(RenderError::Join(format!(
                    "the turn is said to have stopped at token {id}, but ends with {:?}",
                    context.last()
                )));
            }
            FinishReason::StopId { id } => Some(*id),
            _ => None,
        };
        let head = &suffix[..suffix.len().min(MAX_CLOSING_TOKENS)];
        let closing = head.iter().position(|id| self.stop_ids.contains(id));
        let Some(closing) = closing else {
            return Ok(Extension {
                forced: Vec::new(),
                observation: suffix,
            });
        };
        let observation = suffix.split_off(closing + 1);
        if stopped_at == Some(suffix[closing]) {
            suffix.clear();
        }
        Ok(Extension {
            forced: suffix,
            observation,
        })
    }

    fn stop_ids(&self) -> &[TokenId] {
        &self.stop_ids
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.tokenizer.token_bytes(id).map(<[u8]>::to_vec)
    }

    fn is_special(&self, id: TokenId) -> bool {
        self.tokenizer.is_special(id)
    }

    fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, RenderError> {
        self.tokenizer.encode(&self.tokenizer.neutralize(text))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, RenderError> {
    std::fs::read(path).map_err(|e| RenderError::Read {
        path: path.to_owned(),
        message: e.to_string(),
    })
}

fn read_json(path: &Path) -> Result<Value, RenderError> {
    serde_json::from_slice(&read(path)?).map_err(|e| RenderError::Read {
        path: path.to_owned(),
        message: e.to_string(),
    })
}

/// A template is a text, or a list of named ones of which `default` is meant.
fn template_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

fn text_or_null(text: &str) -> Value {
    if text.is_empty() {
        Value::Null
    } else {
        text.into()
    }
}

/// A token is a text, or an object with `content`.
fn token_text(value: &Value) -> String {
    value
        .as_str()
        .or_else(|| value["content"].as_str())
        .unwrap_or_default()
        .to_owned()
}

/// One id or several.
fn eos_ids(value: &Value) -> Vec<TokenId> {
    let id = |v: &Value| v.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    }
}
