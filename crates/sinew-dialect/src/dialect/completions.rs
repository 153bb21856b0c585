//! OpenAI text completions: the prompt is text, or token ids.
//!
//! ```json
//! {"model": "policy", "prompt": "Once", "max_tokens": 8}
//! {"model": "policy", "prompt": [12, 7, 90], "max_tokens": 8, "return_token_ids": true}
//! ```
//!
//! The output is plain text: no tool calls and no reasoning are parsed. A prompt that begins with an earlier
//! prompt and its output continues that node; a prompt of ids continues the longest known path.

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
use sinew_types::{SampledToken, TokenId};

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
        request.sampling = sampling(&mut fields)?;
        common(&mut fields, &mut request)?;
        let logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)?;
        request.logprobs = logprobs.map(|n| n as u8);
        fields.ignore(&["user"]);
        fields.only("echo", &[json!(false)], "the prompt is not repeated")?;
        let all = [json!(1), json!(request.n)];
        fields.only("best_of", &all, "use n and choose")?;
        fields.refuse(&[("suffix", "the model does not fill gaps")])?;
        fields.end()?;
        Ok(request)
    }

    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value {
        let mut choices = Vec::new();
        for (i, choice) in response.choices.iter().enumerate() {
            let mut offset = 0;
            choices.push(choice_value(
                context,
                i as u32,
                &choice.text,
                &choice.tokens,
                Some(&choice.end),
                &mut offset,
            ));
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

/// The prompt: text, ids, or a list of one text.
fn read_prompt(value: Value) -> Result<Prompt, ApiError> {
    let expected = "a string or a list of token ids; one prompt for each request";
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(mut items) if items.len() == 1 && items[0].is_string() => {
            read_prompt(items.remove(0))
        }
        other => match Vec::<TokenId>::deserialize(&other) {
            Ok(ids) => Ok(Prompt::Tokens(ids)),
            Err(_) => Err(wrong("prompt", &other, expected)),
        },
    }
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
        let alternatives = token.top.iter();
        let map: Map<String, Value> = alternatives
            .map(|t| (token_text(renderer, t.id).0, json!(t.logprob)))
            .collect();
        top.push(Value::Object(map));
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
