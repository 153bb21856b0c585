//! Renderer for pretrained models, with their tokenizer and chat template.
//!
//! The text between two turns is found by suffix difference. A dummy conversation is rendered that ends with
//! an assistant message and the new messages. The suffix is the text of the template after the assistant's
//! content, or after the last argument of its last call if the new messages are tool results:
//!
//! | template writes after the content | model stopped at | appended |
//! |---|---|---|
//! | `<\|im_end\|>\n<\|im_start\|>user...` (ChatML) | `<\|im_end\|>` | from `\n` on, as observation |
//! | the same | nothing (token limit, stop string) | `<\|im_end\|>` forced, then as above |
//! | `<\|user\|>...` (next role is the stop, GLM) | `<\|user\|>` | from after `<\|user\|>` on |
//! | ` </s>[INST]...` (text before the stop) | `</s>` | from after `</s>` on |
//!
//! The form of messages with calls (no content or an empty one, arguments as an object or as text, short ids)
//! is found by trial. If a template has no tools or calls, they are written in the system message and in
//! contents, in the call format of the model.
//!
//! Sources: the chat templates of the models; reference/agent-layer.md section 1.2.

use crate::chat_files::{eos_ids, read, read_json, template_of, token_text};
use crate::error::RenderError;
use crate::format::{TurnEnds, TurnFormat};
use crate::renderer::{Extension, Renderer, text_only};
use crate::template::{ChatTemplate, MessageStyle, NEEDS_DATE, role_name, with_options};
use crate::tokenizer::{GgufVocab, Tokenizer};
use crate::tool_call::ToolCallFormat;
use crate::write::{tool_instructions, write_tool_calls};
use serde_json::{Map, Value, json};
use sinew_types::{FinishReason, Message, Role, TokenId, ToolCall, ToolSpec};
use std::path::Path;

/// Placeholder for a sampled turn in dummy conversations. Templates do not change it.
const SENTINEL: &str = "sinewturnsentinel";

/// Maximum distance in tokens between content and its closing stop token, if the template does not show how
/// it closes a turn.
const MAX_CLOSING_TOKENS: usize = 4;

/// Tokenizer, template and stop ids of one model. Immutable and thread-safe; a render takes time
/// linear in the conversation, bounded by the template's fuel.
#[derive(Debug)]
pub struct ChatRenderer {
    /// Tokenizer of the model.
    tokenizer: Tokenizer,
    /// Settings, to write the model's files.
    config: ChatConfig,
    /// Compiled template.
    template: ChatTemplate,
    /// Ids that end a turn.
    stop_ids: Vec<TokenId>,
    /// Ids that close a turn in the history, and are not sampled.
    closing_ids: Vec<TokenId>,
    /// Notation of calls and reasoning.
    format: TurnFormat,
    /// Parts of messages that the template prints.
    shows: Shows,
    /// Whether it prints results behind a turn with calls.
    shows_answers: bool,
    /// BLAKE3 hash of the template's text and its options.
    template_hash: String,
}

/// Parts of messages that a template prints.
///
/// Found by rendering a probe conversation with every form of messages that templates are known to
/// expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shows {
    /// Tool descriptions. If false, they are written in the system message.
    pub tools: bool,
    /// Calls of past turns. If false, they are written in contents.
    pub calls: bool,
    /// Tool results. If false, they are rendered as user messages.
    pub results: bool,
    /// Whitespace around the content of a turn. If false, a full render loses sampled tokens.
    pub whitespace: bool,
}

/// Conversation format of a model. [`ChatRenderer::from_dir`] and [`ChatRenderer::from_gguf`] fill it from
/// files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatConfig {
    /// Jinja source of the chat template.
    pub template: String,
    /// Text of the token at the start of a conversation. Empty: none.
    pub bos_token: String,
    /// Text of the token at the end of a turn. Empty: none.
    pub eos_token: String,
    /// Ids that end a generation, in addition to those of the template.
    pub eos_ids: Vec<TokenId>,
    /// Variables of the template, such as `enable_thinking`.
    pub options: Map<String, Value>,
}

/// Template of a model that has none.
const JOINED_CONTENTS: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";

impl ChatRenderer {
    /// Compiles the template and finds the stop tokens.
    ///
    /// # Errors
    /// Returns an error if the template is invalid or no stop token is known.
    pub fn new(tokenizer: Tokenizer, config: ChatConfig) -> Result<Self, RenderError> {
        let template = ChatTemplate::new(
            &config.template,
            &config.bos_token,
            &config.eos_token,
            config.options.clone(),
        )?;
        // A template that asks for a date raises an error here, before the probes read it as one that shows
        // nothing.
        let asked = template.render(&[Message::new(Role::User, "x")], &[], true);
        if let Err(error @ RenderError::Template { .. }) = asked
            && error.to_string().contains(NEEDS_DATE)
        {
            return Err(error);
        }
        let (template, shows, shows_answers) = probe(template);
        let opening = generation_prompt(&template);
        let ends = TurnEnds::of_template(&config.template);
        let ids = |names: &[&str]| -> Vec<TokenId> {
            names.iter().filter_map(|n| tokenizer.id(n)).collect()
        };
        let (closing_ids, own_stops) = (ids(ends.closes), ids(ends.stops));
        let inner_ids = ids(ends.inner);
        let mut renderer = Self {
            tokenizer,
            config: config.clone(),
            template,
            stop_ids: Vec::new(),
            closing_ids,
            format: TurnFormat::of_template(&config.template, &opening),
            shows,
            shows_answers,
            template_hash: template_hash(&config),
        };
        let mut stop_ids = Vec::new();
        for role in [Role::User, Role::Tool] {
            // Many templates do not support the `tool` role. Supported roles must have a boundary.
            let turn = Message::new(Role::Assistant, SENTINEL);
            if let Ok(join) = renderer.join_after(&turn, &[Message::new(role, "x")], &[])
                && let Some(&first) = join.suffix.first()
                && renderer.tokenizer.is_special(first)
                && !renderer.closing_ids.contains(&first)
                && !inner_ids.contains(&first)
            {
                stop_ids.push(first);
            }
        }
        stop_ids.extend(own_stops);
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

    /// Creates a renderer from GGUF data: the vocabulary, `tokenizer.chat_template`, and the ids
    /// `tokenizer.ggml.bos_token_id` and `tokenizer.ggml.eos_token_id`. `options` are variables of the
    /// template.
    ///
    /// # Errors
    /// Returns an error without a template, or if the vocabulary is not supported.
    pub fn from_gguf(
        vocab: &GgufVocab,
        chat_template: Option<&str>,
        bos_id: Option<TokenId>,
        eos_id: Option<TokenId>,
        options: Map<String, Value>,
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
            options,
        };
        Self::new(Tokenizer::from_gguf(vocab)?, config)
    }

    /// Creates a renderer from a model folder in the Hugging Face layout: `tokenizer.json`,
    /// `tokenizer_config.json`, and optionally `chat_template.jinja` and `generation_config.json`. `options`
    /// are variables of the template.
    ///
    /// # Errors
    /// Returns an error if a file is missing or invalid, or there is no template.
    pub fn from_dir(dir: &Path, options: Map<String, Value>) -> Result<Self, RenderError> {
        Self::read_dir(dir, options, None)
    }

    /// Creates a renderer like [`ChatRenderer::from_dir`] for a service that handles tokens only: a model
    /// without a chat template, such as a base model, gets one that joins the contents of messages.
    ///
    /// # Errors
    /// Returns an error if a file is missing or invalid.
    pub fn from_dir_for_tokens(dir: &Path) -> Result<Self, RenderError> {
        Self::read_dir(dir, Map::new(), Some(JOINED_CONTENTS))
    }

    fn read_dir(
        dir: &Path,
        options: Map<String, Value>,
        otherwise: Option<&str>,
    ) -> Result<Self, RenderError> {
        let path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::from_json(&read(&path)?, &path.display().to_string())?;
        let settings = read_json(&dir.join("tokenizer_config.json"))?;
        let template = match read(&dir.join("chat_template.jinja")) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(_) => template_of(&settings["chat_template"]),
        }
        .or_else(|| otherwise.map(str::to_owned))
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
            options,
        };
        Self::new(tokenizer, config)
    }

    /// Renders a whole conversation, without the opening of a further turn: what a reward model reads.
    ///
    /// # Errors
    /// Same as [`Renderer::render_prompt`].
    pub fn render_whole(&self, messages: &[Message]) -> Result<Vec<TokenId>, RenderError> {
        self.tokenizer.encode(&self.text(messages, &[], false)?)
    }

    /// This model with other variables of its template.
    ///
    /// # Errors
    /// If the template does not read one of them.
    pub fn with_options(&self, options: Map<String, Value>) -> Result<Self, RenderError> {
        let config = ChatConfig {
            options,
            ..self.config.clone()
        };
        Self::new(self.tokenizer.clone(), config)
    }

    /// The tokenizer of the model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Parts of messages that the template prints.
    pub fn shows(&self) -> Shows {
        self.shows
    }

    /// Call format for a template that does not print calls.
    fn call_format(&self) -> &ToolCallFormat {
        self.format
            .calls
            .as_ref()
            .unwrap_or(&ToolCallFormat::Hermes)
    }

    /// Renders messages as text.
    fn text(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<String, RenderError> {
        text_only(messages)?;
        let mut messages: Vec<_> = messages.iter().map(|m| self.prepared(m)).collect();
        if !tools.is_empty() && !self.shows.tools {
            let shown: Vec<_> = tools.iter().map(|tool| self.prepared_tool(tool)).collect();
            let text = tool_instructions(&shown, self.call_format());
            match messages.first_mut().filter(|m| m.role == Role::System) {
                Some(system) => system.content.push_text(&format!("\n\n{text}")),
                None => messages.insert(0, Message::new(Role::System, text)),
            }
        }
        let tools: Vec<_> = tools.iter().map(|tool| self.prepared_tool(tool)).collect();
        self.template
            .render(&messages, &tools, add_generation_prompt)
    }

    /// Neutralizes control tokens in the description of a tool, which servers outside write.
    fn prepared_tool(&self, tool: &ToolSpec) -> ToolSpec {
        let mut tool = tool.clone();
        tool.name = self.tokenizer.neutralize(&tool.name);
        tool.description = self.tokenizer.neutralize(&tool.description);
        self.neutralize_value(&mut tool.parameters);
        tool
    }

    /// Neutralizes control tokens in the texts of a value, names among them.
    fn neutralize_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.tokenizer.neutralize(text),
            Value::Array(items) => items
                .iter_mut()
                .for_each(|item| self.neutralize_value(item)),
            Value::Object(map) => {
                for (key, mut value) in std::mem::take(map) {
                    self.neutralize_value(&mut value);
                    map.insert(self.tokenizer.neutralize(&key), value);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Neutralizes control tokens, and writes calls in the content if the template does not print them. Marks
    /// such as `<think>` in the output of a tool are neutralized, too: they would end it, or count as the
    /// model's own.
    fn prepared(&self, message: &Message) -> Message {
        let mut message = message.clone();
        let text = message.content.text();
        message.content = match message.role {
            Role::Tool => self.tokenizer.neutralize_marks(&text).into(),
            _ => self.tokenizer.neutralize(&text).into(),
        };
        let answers = self.shows_answers && message.tool_call_id.is_some();
        if message.role == Role::Tool && !self.shows.results && !answers {
            message.role = Role::User;
        }
        if let Some(reasoning) = &mut message.reasoning {
            *reasoning = self.tokenizer.neutralize(reasoning);
        }
        if let Some(name) = &mut message.name {
            *name = self.tokenizer.neutralize(name);
        }
        for call in &mut message.tool_calls {
            call.name = self.tokenizer.neutralize(&call.name);
            self.neutralize_value(&mut call.arguments);
        }
        if !message.tool_calls.is_empty() && !self.shows.calls {
            let calls = write_tool_calls(&message.tool_calls, self.call_format());
            let between = if message.content.is_empty() { "" } else { "\n" };
            message.content.push_text(&format!("{between}{calls}"));
            message.tool_calls.clear();
        }
        message
    }

    /// Text of a turn after the prompt of the messages before it.
    fn turn_text(
        &self,
        before: &[Message],
        turn: &Message,
        tools: &[ToolSpec],
    ) -> Result<String, RenderError> {
        let history = self.text(before, tools, false)?;
        let prompt = self.text(before, tools, true)?;
        let whole = self.text(&[before, std::slice::from_ref(turn)].concat(), tools, false)?;
        match whole.strip_prefix(&prompt) {
            Some(rest) => Ok(rest.to_owned()),
            None => self.turn_without_prompt_reasoning(&history, &prompt, &whole, turn),
        }
    }

    /// Text of a turn after the header of another turn, for templates that change an answered question.
    fn turn_after_header(&self, turn: &Message, tools: &[ToolSpec]) -> Option<String> {
        let user = Message::new(Role::User, "x");
        let other = Message::new(Role::Assistant, SENTINEL);
        let text = |turn: Message| self.text(&[user.clone(), turn], tools, false).ok();
        let other = text(other)?;
        let (header, _) = other.split_once(SENTINEL)?;
        let whole = text(turn.clone())?;
        whole.strip_prefix(header).map(str::to_owned)
    }

    /// Text of a turn for templates whose generation prompt starts reasoning that a full render drops.
    fn turn_without_prompt_reasoning(
        &self,
        history: &str,
        prompt: &str,
        whole: &str,
        turn: &Message,
    ) -> Result<String, RenderError> {
        let opening = prompt.strip_prefix(history).unwrap_or_default();
        let markers = self.format.reasoning.as_ref();
        let cut = markers.and_then(|m| opening.find(&m.open).map(|at| (m, at)));
        let kept = cut.and_then(|(m, at)| {
            let header = format!("{history}{}", &opening[..at]);
            whole.strip_prefix(&header).map(|rest| (m, at, rest))
        });
        let Some((markers, at, rest)) = kept else {
            return Err(RenderError::Join(format!(
                "the generation prompt {opening:?} is not how the template opens a turn"
            )));
        };
        let said_after = rest.trim_start().strip_prefix(&markers.close);
        if opening[at..].contains(&markers.close) {
            return Ok(said_after.unwrap_or(rest).to_owned());
        }
        let reasoning = turn.reasoning.as_deref().unwrap_or_default();
        // A template may write the reasoning without its opening.
        let thought = reasoning.trim();
        let bare = rest.trim_start().strip_prefix(thought).map(str::trim_start);
        if !thought.is_empty() && bare.is_some_and(|after| after.starts_with(&markers.close)) {
            return Ok(rest.to_owned());
        }
        Ok(match said_after {
            Some(after) => format!("{reasoning}{}{after}", markers.close),
            None => format!("{reasoning}\n{}\n\n{rest}", markers.close),
        })
    }

    /// Finds the text between a sampled turn and the next generation prompt.
    fn join(&self, new: &[Message], tools: &[ToolSpec]) -> Result<Join, RenderError> {
        let mut refused = None;
        for (with_calls, turn) in dummies(new) {
            match self.join_after(&turn, new, tools) {
                // Some templates close only turns without calls.
                Ok(join) if with_calls && join.stop.is_none() => {}
                Ok(mut join) => {
                    if let Some(stop) = join.stop.as_mut().filter(|_| with_calls) {
                        // The model itself writes the end of a call.
                        join.suffix.drain(..*stop);
                        *stop = 0;
                    }
                    return Ok(join);
                }
                Err(e) => {
                    refused.get_or_insert(e);
                }
            }
        }
        Err(refused.unwrap_or_else(|| {
            RenderError::Join("the template ends no turn with calls by a stop token".into())
        }))
    }

    /// Joins like [`Self::join`], for one dummy turn.
    fn join_after(
        &self,
        turn: &Message,
        new: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Join, RenderError> {
        let start = [Message::new(Role::User, "x"), turn.clone()];
        let text = self.text(&[&start, new].concat(), tools, true)?;
        let (_, suffix) = text.split_once(SENTINEL).ok_or_else(|| {
            RenderError::Join("the template does not print the content of an assistant".into())
        })?;
        let suffix = self.tokenizer.encode(suffix)?;
        let closing = match self.text(&start, tools, false) {
            Ok(alone) => match alone.split_once(SENTINEL) {
                // The next role's token can be the stop token.
                Some((_, tail)) if !tail.is_empty() => self.tokenizer.encode(tail)?.len() + 1,
                _ => MAX_CLOSING_TOKENS,
            },
            Err(_) => MAX_CLOSING_TOKENS,
        };
        let head = &suffix[..suffix.len().min(closing)];
        let ends = |id: &TokenId| self.stop_ids.contains(id) || self.closing_ids.contains(id);
        let stop = head.iter().position(ends);
        Ok(Join { suffix, stop })
    }
}

/// Tokens between a sampled turn and the next generation prompt.
struct Join {
    /// All ids that the template writes after the turn.
    suffix: Vec<TokenId>,
    /// Index of the stop token in `suffix`.
    stop: Option<usize>,
}

/// Dummy turns that precede the new messages, the most likely first. The flag is true for turns with calls.
fn dummies(new: &[Message]) -> Vec<(bool, Message)> {
    let answers: Vec<_> = new.iter().take_while(|m| m.role == Role::Tool).collect();
    let plain = (false, Message::new(Role::Assistant, SENTINEL));
    let calls = |n: usize| {
        let call = |i: usize| ToolCall {
            id: answers[i]
                .tool_call_id
                .clone()
                .unwrap_or_else(|| format!("call0000{i}")),
            name: answers[i].name.clone().unwrap_or_else(|| "x".into()),
            arguments: json!({ "x": if i + 1 == n { SENTINEL } else { "x" } }),
        };
        let mut message = Message::new(Role::Assistant, "");
        message.tool_calls = (0..n).map(call).collect();
        (true, message)
    };
    match answers.len() {
        0 => vec![plain],
        // Some templates support one call per turn.
        n if answers.iter().any(|m| m.tool_call_id.is_some()) => vec![calls(n), calls(1), plain],
        n => vec![plain, calls(n), calls(1)],
    }
}

/// BLAKE3 of the template's text, and of its options if there are any.
fn template_hash(config: &ChatConfig) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(config.template.as_bytes());
    if !config.options.is_empty() {
        let mut options = Value::Object(config.options.clone());
        options.sort_all_objects();
        hash.update(&[0]).update(options.to_string().as_bytes());
    }
    hash.finalize().to_hex().to_string()
}

/// Text of the generation prompt.
fn generation_prompt(template: &ChatTemplate) -> String {
    let user = [Message::new(Role::User, "x")];
    let render = |open| template.render(&user, &[], open).unwrap_or_default();
    let (before, after) = (render(false), render(true));
    after.strip_prefix(&before).unwrap_or_default().to_owned()
}

/// A question, a call, and its result.
fn probe_messages(name: &str, key: &str, result: &str) -> Vec<Message> {
    let call = ToolCall {
        id: "call_sinewprobe_0123".into(),
        name: name.into(),
        arguments: json!({ key: "x" }),
    };
    let mut answer = Message::new(Role::Tool, result);
    answer.tool_call_id = Some(call.id.clone());
    answer.name = Some(name.into());
    let mut turn = Message::new(Role::Assistant, "");
    turn.tool_calls = vec![call];
    vec![Message::new(Role::User, "x"), turn, answer]
}

/// Finds the message style and the printed parts of a template by trial, and whether it prints results
/// behind a turn with calls.
fn probe(mut template: ChatTemplate) -> (ChatTemplate, Shows, bool) {
    let (name, key, result) = ("sinewprobename", "sinewprobekey", "sinewproberesult");
    let messages = probe_messages(name, key, result);
    let mut shows_calls = false;
    let all = (0u8..8).map(|bits| MessageStyle {
        null_content: bits & 1 != 0,
        text_arguments: bits & 2 != 0,
        short_ids: bits & 4 != 0,
    });
    for style in all {
        template = template.with_style(style);
        let text = template.render(&messages, &[], false).unwrap_or_default();
        let escaped = text.contains(&format!("\\\"{key}"));
        if text.contains(name) && text.contains(key) && !escaped {
            shows_calls = true;
            break;
        }
    }
    if !shows_calls {
        template = template.with_style(MessageStyle::default());
    }
    let mut without_calls = messages.clone();
    without_calls[1] = Message::new(Role::Assistant, "x");
    // A template that refuses the role returns an error when it is rendered.
    let drops = |messages: &[Message]| {
        let text = template.render(messages, &[], false);
        text.is_ok_and(|text| !text.contains(result))
    };
    let drops_answers = drops(&messages);
    let drops_results = drops_answers || drops(&without_calls);
    let user = [Message::new(Role::User, "x")];
    let tool = ToolSpec {
        name: name.into(),
        description: "x".into(),
        parameters: json!({ "type": "object", "properties": { key: { "type": "string" } } }),
    };
    let tools = template.render(&user, &[tool], false).unwrap_or_default();
    let spaced = format!("\n {SENTINEL} \n");
    let turn = [
        user[0].clone(),
        Message::new(Role::Assistant, &spaced),
        user[0].clone(),
    ];
    let turn = template.render(&turn, &[], false).unwrap_or_default();
    let shows = Shows {
        tools: tools.contains(name),
        calls: shows_calls,
        results: !drops_results,
        whitespace: turn.contains(&spaced) || !turn.contains(SENTINEL),
    };
    (template, shows, !drops_answers)
}

impl Renderer for ChatRenderer {
    fn template_hash(&self) -> Option<String> {
        Some(self.template_hash.clone())
    }

    fn template_options(&self) -> Map<String, Value> {
        self.config.options.clone()
    }

    fn files(&self) -> Result<Vec<(String, Vec<u8>)>, RenderError> {
        let settings = serde_json::json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": text_or_null(&self.config.bos_token),
            "eos_token": text_or_null(&self.config.eos_token),
            "chat_template": with_options(&self.config.template, &self.config.options),
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
        self.tokenizer.encode(&self.text(messages, tools, true)?)
    }

    fn render_turn(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError> {
        let Some((turn, before)) = messages.split_last() else {
            return Ok(Vec::new());
        };
        // Some templates move text of earlier messages. The turn itself is then rendered after a short
        // prompt.
        let short = [Message::new(Role::User, "x")];
        let turn = self
            .turn_text(before, turn, tools)
            .or_else(|e| self.turn_text(&short, turn, tools).map_err(|_| e))
            .or_else(|e| self.turn_after_header(turn, tools).ok_or(e))?;
        let mut ids = self.tokenizer.encode(&turn)?;
        let closes = |id: &TokenId| self.closing_ids.contains(id);
        if let Some(stop) = ids.iter().position(|id| self.stop_ids.contains(id)) {
            ids.truncate(stop + 1);
        } else if let Some(close) = ids.iter().rposition(closes) {
            // The model ends the turn by another token than the history shows.
            ids.truncate(close);
            ids.extend(self.stop_ids.first());
        }
        Ok(ids)
    }

    fn turn_format(&self) -> TurnFormat {
        TurnFormat {
            calls: Some(self.call_format().clone()),
            reasoning: self.format.reasoning.clone(),
        }
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
                message: "assistant turns are sampled, and cannot be added as new messages".into(),
            });
        }
        let Join { mut suffix, stop } = self.join(new_messages, tools)?;
        let stopped_at = match finish {
            FinishReason::StopId { id } if context.last() != Some(id) => {
                return Err(RenderError::Join(format!(
                    "the turn's finish reason is stop token {id}, but it ends with {:?}",
                    context.last()
                )));
            }
            FinishReason::StopId { id } => Some(*id),
            _ => None,
        };
        let Some(closing) = stop else {
            return Ok(Extension {
                forced: Vec::new(),
                observation: suffix,
            });
        };
        let observation = suffix.split_off(closing + 1);
        // The sampled stop token may stand for one that the history shows in its place.
        let stands = stopped_at.is_some() && self.closing_ids.contains(&suffix[closing]);
        if stopped_at == Some(suffix[closing]) || stands {
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

    fn closing_ids(&self) -> &[TokenId] {
        &self.closing_ids
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn longest_token_bytes(&self) -> usize {
        self.tokenizer.longest_token_bytes()
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

/// A text for `tokenizer_config.json`, where an absent token is null.
fn text_or_null(text: &str) -> Value {
    if text.is_empty() {
        Value::Null
    } else {
        text.into()
    }
}
