//! OpenAI text completions: the prompt is text, or token ids.
//!
//! ```json
//! {"model": "policy", "prompt": "Once", "max_tokens": 8}
//! {"model": "policy", "prompt": [12, 7, 90], "max_tokens": 8, "return_token_ids": true}
//! ```
//!
//! The output is plain text: no tool calls and no reasoning are parsed. A prompt that begins with an
//! earlier prompt and its output continues that node; with ids, the longest known path is continued.

use super::chat::{common, sampling, token_text, usage_value};
use super::fields::{Fields, Notes, wrong};
use super::{
    AnswerContext, Delta, Dialect, EventWriter, ModelRequest, ModelResponse, TurnEnd, data_event,
    openai_error,
};
use crate::error::ApiError;
use crate::session::Prompt;
use serde_json::{Map, Value, json};
use sinew_types::{SampledToken, TokenId};

/// Most alternatives of a token that may be asked for.
const MAX_LOGPROBS: i64 = 20;

/// `POST /v1/completions`.
#[derive(Clone, Copy, Debug)]
pub struct Completions;

impl Dialect for Completions {
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body, notes)?;
        let model = fields.required_string("model")?;
        let prompt = fields
            .take("prompt")
            .ok_or_else(|| fields.missing("prompt"))?;
        let mut request = ModelRequest::new(model, read_prompt(prompt)?);
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
        let mut map = head(context, choices);
        map.insert("usage".into(), usage_value(&response.usage));
        if context.request.return_token_ids {
            map.insert("prompt_token_ids".into(), json!(context.prompt_ids));
        }
        map.into()
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(TextStream {
            offsets: vec![0; context.request.n as usize],
            opened: false,
            context,
        })
    }
}

fn read_prompt(value: Value) -> Result<Prompt, ApiError> {
    let expected = "a string or a list of token ids; one prompt for each request";
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(mut items) if items.len() == 1 && items[0].is_string() => {
            read_prompt(items.remove(0))
        }
        Value::Array(ref items) => {
            let id = |v: &Value| v.as_u64().and_then(|id| TokenId::try_from(id).ok());
            let ids: Option<Vec<TokenId>> = items.iter().map(id).collect();
            match ids {
                Some(ids) => Ok(Prompt::Tokens(ids)),
                None => Err(wrong("prompt", &value, expected)),
            }
        }
        other => Err(wrong("prompt", &other, expected)),
    }
}

fn head(context: &AnswerContext, choices: Vec<Value>) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("id".into(), json!(format!("cmpl-{}", context.id)));
    map.insert("object".into(), json!("text_completion"));
    map.insert("created".into(), json!(context.created_s));
    map.insert("model".into(), json!(context.request.model));
    map.insert("choices".into(), choices.into());
    map
}

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
    if context.request.return_token_ids {
        let ids: Vec<TokenId> = tokens.iter().map(|t| t.id).collect();
        value["token_ids"] = json!(ids);
    }
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

struct TextStream {
    context: AnswerContext,
    offsets: Vec<usize>,
    /// Whether an event was written.
    opened: bool,
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
        let mut chunk = head(&self.context, vec![choice]);
        if self.context.request.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        let first = !std::mem::replace(&mut self.opened, true);
        if first && self.context.request.return_token_ids {
            chunk.insert("prompt_token_ids".into(), json!(self.context.prompt_ids));
        }
        data_event(&Value::Object(chunk))
    }

    fn end(&mut self, response: &ModelResponse) -> String {
        let mut out = String::new();
        if self.context.request.include_usage {
            let mut map = head(&self.context, Vec::new());
            map.insert("usage".into(), usage_value(&response.usage));
            out.push_str(&data_event(&Value::Object(map)));
        }
        out.push_str("data: [DONE]\n\n");
        out
    }

    fn error(&mut self, error: &ApiError) -> String {
        data_event(&openai_error(error))
    }
}
