//! Harness of services: it posts each task, with the key of a rollout, to a service that is already running.
//!
//! The service calls its model at one address for all of its tasks, and passes the key of the request that it
//! works on. Its calls are therefore captured under the right rollout, whatever they contain. The service is
//! neither started nor stopped here. Its answers are limited in bytes and time.

use super::error::{ModelServerError, ProgramError, invalid};
use super::model_server::{ModelAccess, ModelServer};
use super::program::{fail, grade, harness, traced};
use super::{Harness, report};
use crate::episode::EpisodeSpec;
use crate::gauges::Phase;
use crate::parts::{EpisodeOptions, EpisodeParts};
use futures::future::BoxFuture;
use serde_json::{Map, Value};
use sinew_http::header::CONTENT_TYPE;
use sinew_http::{Client, ClientOptions, HttpError, Method};
use sinew_types::{EpisodeEnd, Limit, Task, Trace};
use std::sync::Arc;
use std::time::Duration;

/// Maximum size of a service's answer, in bytes.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// Maximum number of characters of an answer that an error message quotes.
const MAX_QUOTED: usize = 300;
/// Key of the template of a request.
const BODY: &str = "harness.body";
/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A service, and the request for a task.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceConfig {
    /// Address that tasks are posted to.
    pub url: String,
    /// JSON body of the request; `{prompt}`, `{id}`, `{kind}` and `{COLUMN}` in its texts are replaced.
    pub body: Map<String, Value>,
    /// Path of the agent's answer in the JSON response, such as `result.text`; `None`: the whole body.
    pub output: Option<String>,
    /// Wall time of one task; an episode's own limit may be shorter.
    pub timeout: Duration,
    /// Whether the service is trusted with its own score.
    pub agent_scores: bool,
}

/// Posts each episode's task to a service.
///
/// If the service answers with an error, or no model call was captured, the episode fails: it is stored with
/// the reason and counts in no baseline. If the service is too late, the episode is truncated.
pub struct ServiceHarness {
    config: ServiceConfig,
    client: Client,
    server: Arc<dyn ModelServer>,
}

sinew_types::debug_fields!(ServiceHarness, config);

/// Response of a service to a task.
enum ServiceReply {
    /// Body of a successful response.
    Answer(String),
    /// No response in time.
    TimedOut,
    /// Another failure, with its reason.
    Failed(String),
}

impl ServiceHarness {
    /// Creates the harness. `server` serves the model to the service.
    ///
    /// # Errors
    /// If no HTTP client can be made.
    pub fn new(config: ServiceConfig, server: Arc<dyn ModelServer>) -> Result<Self, ProgramError> {
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            body_max: MAX_ANSWER_BYTES,
            ..ClientOptions::default()
        });
        let failed = |e| ProgramError::Failed(format!("the service's client: {e}"));
        Ok(Self {
            config,
            client: client.map_err(failed)?,
            server,
        })
    }

    async fn ask(&self, access: &ModelAccess, task: &Task, limit: Duration) -> ServiceReply {
        let asked = self.post(access, task);
        match tokio::time::timeout(limit, asked).await {
            Ok(said) => said.unwrap_or_else(|e| ServiceReply::Failed(e.to_string())),
            Err(_) => ServiceReply::TimedOut,
        }
    }

    async fn post(&self, access: &ModelAccess, task: &Task) -> Result<ServiceReply, ProgramError> {
        let body = Value::Object(filled(&self.config.body, task)?);
        let request = self
            .client
            .request(Method::POST, &self.config.url)
            .bearer_auth(&access.api_key)
            .header("traceparent", &access.traceparent)
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_string());
        let answer = self.client.ask(request).await.map_err(|e| {
            ProgramError::Failed(match e {
                HttpError::TooLarge(limit) => format!("its answer is longer than {limit} bytes"),
                e => format!("it could not be asked: {e}\n  hint: is the service running there?"),
            })
        })?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        if answer.status.is_success() {
            Ok(ServiceReply::Answer(text))
        } else {
            let why = format!("it answered {}: {}", answer.status, quoted(&text));
            Err(ProgramError::Failed(why))
        }
    }

    async fn episode(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<Trace, ModelServerError> {
        let access = self.server.open(parts, options, spec)?;
        let limit = self.config.timeout.min(options.timeout);
        let said = {
            let deadline = Some(tokio::time::Instant::now() + limit);
            let _in_phase = parts.gauges.enter(&spec.episode, Phase::Tool, deadline);
            self.ask(&access, &spec.task, limit).await
        };
        let answer = match &said {
            ServiceReply::Answer(text) => Some(Answer::read(text)),
            _ => None,
        };
        let why = match (&answer, self.config.agent_scores) {
            (Some(answer), true) => {
                report::hand_over(self.server.as_ref(), &spec.episode, answer.json.as_ref())
            }
            _ => None,
        };
        let end = matches!(said, ServiceReply::TimedOut).then_some(EpisodeEnd::Truncated {
            limit: Limit::WallTime,
        });
        let mut trace = self.server.finish(&spec.episode, end).await?;
        let failed = match &said {
            ServiceReply::Failed(why) => Some(format!("the service {}: {why}", self.config.url)),
            _ if trace.sampled_tokens() == 0 => Some(uncaptured(&access)),
            _ => None,
        };
        if let Some(why) = failed {
            fail(&mut trace, harness(&why));
        } else if self.config.agent_scores {
            report::explain(&mut trace, why);
        } else {
            let answer = answer.map(|a| a.output(self.config.output.as_deref()));
            match answer.unwrap_or_else(|| Ok(String::new())) {
                Ok(text) => grade(parts, spec, options.score_timeout, &mut trace, &text).await,
                Err(why) => fail(&mut trace, harness(&why)),
            }
        }
        Ok(trace)
    }
}

impl Harness for ServiceHarness {
    fn name(&self) -> &str {
        "service"
    }

    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace> {
        let episode = self.episode(parts, options, spec);
        let episode = async { episode.await.map_err(|why| harness(&why)) };
        Box::pin(traced(parts, options, spec, episode))
    }
}

/// Returns the reason for an episode of which no model call was captured.
fn uncaptured(access: &ModelAccess) -> String {
    format!(
        "the service answered without a call of the model that was captured\n  hint: its client must use \
         OPENAI_BASE_URL={} and the key of the request that it works on: `api_key=sinew.key` with \
         `sinew.asgi`, or the bearer token of `Authorization` by hand",
        access.shared_url
    )
}

/// A service's response: its text, and its JSON value if it is valid JSON.
struct Answer<'a> {
    text: &'a str,
    json: Option<Value>,
}

impl<'a> Answer<'a> {
    fn read(text: &'a str) -> Self {
        Self {
            text,
            json: sinew_types::json::from_str(text).ok(),
        }
    }

    /// The agent's answer: a field by its path, or all of it.
    fn output(&self, path: Option<&str>) -> Result<String, ProgramError> {
        let Some(path) = path else {
            let text = self.json.as_ref().and_then(Value::as_str);
            return Ok(text.unwrap_or(self.text).to_owned());
        };
        let mut at = self.json.as_ref();
        for name in path.split('.') {
            at = at.and_then(|value| match name.parse::<usize>() {
                Ok(index) if value.is_array() => value.get(index),
                _ => value.get(name),
            });
        }
        match at {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(Value::Null) | None => Err(ProgramError::Failed(format!(
                "harness.output = {path:?}: the service's answer has no such field: {}",
                quoted(self.text)
            ))),
            Some(value) => Ok(value.to_string()),
        }
    }
}

/// The body with the task's values in the places of their names.
fn filled(body: &Map<String, Value>, task: &Task) -> Result<Map<String, Value>, ProgramError> {
    let entries = body.iter();
    let filled = entries.map(|(key, value)| Ok((key.clone(), fill(value, task)?)));
    filled.collect()
}

fn fill(value: &Value, task: &Task) -> Result<Value, ProgramError> {
    Ok(match value {
        Value::String(text) => Value::String(fill_text(text, task)?),
        Value::Array(items) => {
            let items: Result<_, _> = items.iter().map(|item| fill(item, task)).collect();
            Value::Array(items?)
        }
        Value::Object(map) => Value::Object(filled(map, task)?),
        other => other.clone(),
    })
}

/// `{name}` is the value of `name`; `{{` and `}}` are braces.
fn fill_text(text: &str, task: &Task) -> Result<String, ProgramError> {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        let (name, after) = rest
            .split_once('}')
            .filter(|_| brace == "{")
            .ok_or_else(|| {
                let why = format!("{text:?} has a single {brace:?}; write it twice to mean itself");
                invalid(BODY, why)
            })?;
        out.push_str(&named(name, task)?);
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

fn named(name: &str, task: &Task) -> Result<String, ProgramError> {
    let column = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match (name, task.data.get(name)) {
        (_, Some(value)) => Ok(column(value)),
        ("prompt", None) => Ok(task.prompt.clone()),
        ("id", None) => Ok(task.id.as_str().to_owned()),
        ("kind", None) => Ok(task.kind.clone()),
        _ => {
            let columns = columns(task);
            let why = format!(
                "{{{name}}}: allowed are prompt, id, kind and the columns of the task, which are: {columns}"
            );
            Err(invalid(BODY, why))
        }
    }
}

fn columns(task: &Task) -> String {
    let names = task
        .data
        .as_object()
        .map(|row| row.keys().cloned().collect());
    let names: Vec<String> = names.unwrap_or_default();
    names.join(", ")
}

fn quoted(text: &str) -> String {
    text.chars().take(MAX_QUOTED).collect()
}

#[cfg(test)]
mod tests;
