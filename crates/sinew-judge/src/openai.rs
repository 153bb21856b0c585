//! Models behind the chat-completions protocol of OpenAI, which most servers speak.

use crate::chat::{ChatAnswer, ChatError, ChatModel, ChatRequest, Usage};
use crate::http::{JsonServer, address};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use sinew_http::HttpError;
use std::time::Duration;

/// Form of the answer that is requested from a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// `response_format` with the JSON Schema.
    JsonSchema,
    /// `response_format` with any JSON object.
    JsonObject,
    /// Nothing: only the prompt describes the form.
    Text,
}

/// A model at a server.
#[derive(Clone, Debug)]
pub struct OpenAiConfig {
    /// Address that ends before `/chat/completions`, such as `https://api.openai.com/v1`.
    pub url: String,
    /// Bearer token.
    pub key: Option<String>,
    /// Name of the model at the server.
    pub model: String,
    /// Form that is requested.
    pub format: AnswerFormat,
    /// Limit of one call.
    pub timeout: Duration,
}

/// A model at a server, as a [`ChatModel`].
#[derive(Debug)]
pub struct OpenAiChat {
    server: JsonServer,
    config: OpenAiConfig,
}

impl OpenAiChat {
    /// Creates a client. Nothing is sent.
    ///
    /// # Errors
    /// If the address or the key cannot be one.
    pub fn new(config: OpenAiConfig) -> Result<Self, HttpError> {
        let mut url = address(&config.url)?;
        let path = format!("{}/chat/completions", url.path().trim_end_matches('/'));
        url.set_path(&path);
        Ok(Self {
            server: JsonServer::new(url, config.key.as_deref())?,
            config,
        })
    }

    fn body(&self, request: &ChatRequest) -> Value {
        let messages = request.messages.iter();
        let messages = messages.map(|m| json!({"role": m.role, "content": m.content.text()}));
        let mut body = json!({
            "model": self.config.model,
            "messages": messages.collect::<Vec<_>>(),
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
        });
        let format = match (self.config.format, &request.schema) {
            (AnswerFormat::JsonSchema, Some(schema)) => {
                let schema = json!({"name": "verdict", "strict": true, "schema": schema});
                json!({"type": "json_schema", "json_schema": schema})
            }
            (AnswerFormat::JsonObject, Some(_)) => json!({"type": "json_object"}),
            (AnswerFormat::Text, _) | (_, None) => return body,
        };
        body["response_format"] = format;
        body
    }
}

impl ChatModel for OpenAiChat {
    fn identity(&self) -> String {
        let OpenAiConfig { url, model, .. } = &self.config;
        format!("{url} {model}")
    }

    fn ask<'a>(&'a self, request: &'a ChatRequest) -> BoxFuture<'a, Result<ChatAnswer, ChatError>> {
        async {
            let body = self.body(request).to_string();
            let answer = self.server.post(body, self.config.timeout).await?;
            read(&answer).ok_or_else(|| {
                let host = self.server.host();
                ChatError::Lasting(format!(
                    "{host}: the answer has no choices[0].message.content"
                ))
            })
        }
        .boxed()
    }
}

/// The parts of a chat completion. A refusal of the model is an answer without text.
fn read(answer: &Value) -> Option<ChatAnswer> {
    let choice = answer.get("choices")?.get(0)?;
    let message = choice.get("message")?;
    let text = match message.get("content")? {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        _ => return None,
    };
    let count = |name: &str| answer.get("usage")?.get(name)?.as_u64();
    let usage = count("prompt_tokens").map(|input| Usage {
        input,
        output: count("completion_tokens").unwrap_or_default(),
    });
    Some(ChatAnswer {
        text,
        cut: choice.get("finish_reason").is_some_and(|r| r == "length"),
        usage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{Message, Role};

    #[test]
    fn requests_and_answers_are_those_of_the_protocol() {
        let chat = |format| {
            OpenAiChat::new(OpenAiConfig {
                url: "http://h:1/v1/".into(),
                key: None,
                model: "m".into(),
                format,
                timeout: Duration::from_secs(1),
            })
        };
        let request = ChatRequest {
            messages: vec![Message::new(Role::User, "hi".to_owned())],
            schema: Some(json!({"type": "object"})),
            temperature: 0.0,
            max_tokens: 9,
            seed: 4,
        };
        let body = chat(AnswerFormat::JsonSchema).unwrap().body(&request);
        assert_eq!(body["messages"], json!([{"role": "user", "content": "hi"}]));
        assert_eq!((&body["max_tokens"], &body["seed"]), (&json!(9), &json!(4)));
        assert_eq!(
            Some(&body["response_format"]["json_schema"]["schema"]),
            request.schema.as_ref()
        );
        let body = chat(AnswerFormat::JsonObject).unwrap().body(&request);
        assert_eq!(body["response_format"]["type"], "json_object");
        let body = chat(AnswerFormat::Text).unwrap().body(&request);
        assert!(body.get("response_format").is_none());

        let answer = |message: Value| {
            json!({"choices": [{"message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        };
        let good = read(&answer(json!({"content": "yes"}))).unwrap();
        assert_eq!(
            good.usage,
            Some(Usage {
                input: 3,
                output: 2
            })
        );
        assert!(good.cut && good.text == "yes");
        assert_eq!(
            read(&answer(json!({"content": null, "refusal": "no"})))
                .unwrap()
                .text,
            ""
        );
        assert_eq!(read(&answer(json!({"content": [1]}))), None);
        assert_eq!(read(&json!({"choices": []})), None);
    }
}
