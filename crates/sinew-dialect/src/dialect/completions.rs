//! OpenAI text completions: the prompt is text, or token ids.
//!
//! ```json
//! {"model": "policy", "prompt": "Once", "max_tokens": 8}
//! {"model": "policy", "prompt": [12, 7, 90], "max_tokens": 8, "return_token_ids": true}
//! ```
//!
//! The output is plain text: no tool calls and no reasoning are parsed. A prompt that begins with an earlier
//! prompt and its output continues that node; a prompt of ids continues the longest known path.
//!
//! `echo` repeats the prompt before each output. With `logprobs` the answer then has the log-probability of
//! each token of the prompt, of the full softmax at temperature 1, and `null` for the first, which nothing
//! predicts: this is how evaluation harnesses score given answers. `max_tokens: 0` samples nothing for the
//! client:
//!
//! ```json
//! {"model": "policy", "prompt": [[12, 7, 90]], "max_tokens": 0, "echo": true, "logprobs": 1}
//! ```

use super::chat::{common, sampling};
use super::fields::{Fields, Notes, wrong};
use super::openai::{self, Chunks, ObjectName, token_text};
use super::{
    AnswerContext, Delta, Dialect, EventWriter, ModelRequest, ModelResponse, TurnEnd, data_event,
    openai_error,
};
use crate::error::ApiError;
use crate::prompt::Prompt;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sinew_types::{PromptLogprob, SampledToken, TokenId, TokenLogprob};

/// Most alternatives of a token that may be asked for.
const MAX_LOGPROBS: i64 = 20;

/// Id prefix and type of an answer and of its chunks.
const NAME: ObjectName = ObjectName {
    prefix: "cmpl",
    object: "text_completion",
};

/// `POST /v1/completions`.
#[derive(Clone, Copy, Debug)]
pub struct Completions;

impl Dialect for Completions {
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body, notes)?;
        let model = fields.required_string("model")?;
        let prompt = read_prompt(fields.required("prompt")?)?;
        let mut request = ModelRequest::new(model, prompt);
        request.echo_prompt = fields.bool("echo")?.unwrap_or(false);
        // Only a prompt that is repeated can be asked for without an output.
        let none = |v: &Value| v.as_f64() == Some(0.0);
        let prompt_only = request.echo_prompt && fields.at(&["max_tokens"]).is_some_and(none);
        if prompt_only {
            fields.ignore(&["max_tokens"]);
        }
        request.sampling = sampling(&mut fields)?;
        if prompt_only {
            request.sampling.max_tokens = Some(0);
        }
        common(&mut fields, &mut request)?;
        if request.echo_prompt && request.stream {
            let why = "the prompt is repeated in whole answers only: leave stream out";
            return Err(ApiError::unsupported("echo", why));
        }
        let logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)?;
        request.logprobs = logprobs.map(|n| n as u8);
        fields.ignore(&["user"]);
        let all = [json!(1), json!(request.n)];
        fields.only("best_of", &all, "use n and choose")?;
        fields.refuse(&[("suffix", "the model does not fill gaps")])?;
        fields.end()?;
        Ok(request)
    }

    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value {
        let mut choices = Vec::new();
        let echoed = context.request.echo_prompt.then(|| prompt_text(context));
        let start = echoed.as_ref().map_or(0, |text| text.chars().count());
        for (i, choice) in response.choices.iter().enumerate() {
            let mut offset = start;
            let mut value = choice_value(
                context,
                i as u32,
                &choice.text,
                &choice.tokens,
                Some(&choice.end),
                &mut offset,
            );
            if let Some(prompt) = &echoed {
                value["text"] = json!(format!("{prompt}{}", choice.text));
                prepend(context, &response.prompt, &mut value["logprobs"]);
            }
            choices.push(value);
        }
        openai::answer(context, NAME, choices, &response.usage)
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(TextStream {
            offsets: vec![0; context.request.n as usize],
            chunks: Chunks {
                name: NAME,
                opened: false,
            },
            context,
        })
    }
}

/// The prompt: text, ids, or a list with one of both.
fn read_prompt(value: Value) -> Result<Prompt, ApiError> {
    let expected =
        "a string or a list of token ids, alone or in a list; one prompt for each request";
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(mut items) if items.len() == 1 && is_prompt(&items[0]) => {
            read_prompt(items.remove(0))
        }
        other => match Vec::<TokenId>::deserialize(&other) {
            Ok(ids) => Ok(Prompt::Tokens(ids)),
            Err(_) => Err(wrong("prompt", &other, expected)),
        },
    }
}

/// Whether the only entry of a list is a prompt: text, or a list of ids.
fn is_prompt(item: &Value) -> bool {
    let ids = item.as_array();
    item.is_string() || ids.is_some_and(|ids| ids.iter().all(Value::is_number))
}

/// The prompt as the client gets it back: the text that it sent, or that of its ids.
fn prompt_text(context: &AnswerContext) -> String {
    match &context.request.prompt {
        Prompt::Text(text) => text.clone(),
        _ => context.renderer.decode_with_special(&context.prompt_ids),
    }
}

/// Puts the tokens of the prompt before those of an output, in the four lists of [`logprobs`]. Nothing is
/// done for a request without log-probabilities.
fn prepend(context: &AnswerContext, scored: &[PromptLogprob], lists: &mut Value) {
    if lists.is_null() {
        return;
    }
    let renderer = context.renderer.as_ref();
    let (mut texts, mut values, mut top, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut offset = 0;
    for (position, id) in context.prompt_ids.iter().enumerate() {
        let (text, _) = token_text(renderer, *id);
        offsets.push(json!(offset));
        offset += text.chars().count();
        texts.push(json!(text));
        // The first token has no entry: nothing predicts it.
        let place = position.checked_sub(1).and_then(|i| scored.get(i));
        values.push(place.map_or(Value::Null, |p| json!(p.logprob)));
        top.push(place.map_or(Value::Null, |p| alternatives(context, &p.top)));
    }
    for (name, mut list) in [
        ("tokens", texts),
        ("token_logprobs", values),
        ("top_logprobs", top),
        ("text_offset", offsets),
    ] {
        if let Value::Array(own) = lists[name].take() {
            list.extend(own);
        }
        lists[name] = list.into();
    }
}

/// The most likely tokens at a place, by their text.
fn alternatives(context: &AnswerContext, top: &[TokenLogprob]) -> Value {
    let renderer = context.renderer.as_ref();
    let entry = |t: &TokenLogprob| (token_text(renderer, t.id).0, json!(t.logprob));
    let map: Map<String, Value> = top.iter().map(entry).collect();
    Value::Object(map)
}

/// A choice, whole or in part.
fn choice_value(
    context: &AnswerContext,
    index: u32,
    text: &str,
    tokens: &[SampledToken],
    end: Option<&TurnEnd>,
    offset: &mut usize,
) -> Value {
    let finish = end.map(|end| match end {
        TurnEnd::Length => "length",
        _ => "stop",
    });
    let mut value = json!({
        "index": index,
        "text": text,
        "logprobs": logprobs(context, tokens, offset),
        "finish_reason": finish,
    });
    openai::add_ids(context, &mut value, tokens);
    value
}

/// The four parallel lists of this dialect. `offset` counts characters of the text so far.
fn logprobs(context: &AnswerContext, tokens: &[SampledToken], offset: &mut usize) -> Value {
    if context.request.logprobs.is_none() {
        return Value::Null;
    }
    let renderer = context.renderer.as_ref();
    let (mut texts, mut offsets, mut top) = (Vec::new(), Vec::new(), Vec::new());
    for token in tokens {
        let (text, _) = token_text(renderer, token.id);
        offsets.push(*offset);
        *offset += text.chars().count();
        texts.push(text);
        top.push(alternatives(context, &token.top));
    }
    let values: Vec<f32> = tokens.iter().map(|t| t.logprob).collect();
    json!({
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": top,
        "text_offset": offsets,
    })
}

/// State of a stream.
struct TextStream {
    context: AnswerContext,
    /// Characters of each choice so far.
    offsets: Vec<usize>,
    chunks: Chunks,
}

impl EventWriter for TextStream {
    fn delta(&mut self, delta: &Delta) -> String {
        if delta.text.is_empty() && delta.tokens.is_empty() && delta.end.is_none() {
            return String::new();
        }
        let offset = &mut self.offsets[delta.choice as usize];
        let choice = choice_value(
            &self.context,
            delta.choice,
            &delta.text,
            &delta.tokens,
            delta.end.as_ref(),
            offset,
        );
        self.chunks.event(&self.context, choice)
    }

    fn end(&mut self, response: &ModelResponse) -> String {
        self.chunks.end(&self.context, &response.usage)
    }

    fn error(&mut self, error: &ApiError) -> String {
        data_event(&openai_error(error))
    }
}
