//! HTTP calls to model servers. Every call has a separate connection: closing it aborts a generation, and no
//! stale connection is met.
//!
//! | answer | error | consequence |
//! |---|---|---|
//! | no connection | [`AttemptError::Connect`] | retry on another engine |
//! | nothing in time | [`AttemptError::Timeout`] with its [`Stage`] | retry |
//! | 429, 503 | [`AttemptError::Busy`] | retry later |
//! | 400, 413, 422 | [`AttemptError::Refused`] | the request fails |
//! | other statuses | [`AttemptError::Status`] | retry on another engine |
//! | the connection ends early | [`AttemptError::Cut`] | retry from the ids so far |
//! | not the expected JSON, too long | [`AttemptError::Protocol`] | the engine is verified again |
//!
//! Every wait has a limit from [`Timeouts`], and every answer a maximum length.

use crate::config::{ConfigError, Timeouts};
use crate::error::{AttemptError, Stage};
use crate::sse::SseParser;
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinew_http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use sinew_http::{Client, ClientOptions, HttpError, Method, Response, address, bearer, read};
use sinew_types::EngineError;
use std::collections::VecDeque;
use std::future::Future;
use std::time::Duration;

/// Maximum length of an answer that is no stream, 16 MiB: the metrics of a large server fit.
const MAX_BODY_BYTES: u64 = 16 << 20;
/// Maximum length of a quoted error text, in characters.
const MAX_QUOTED: usize = 400;

/// The answer of `/v1/models`.
#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
}

/// A server's address and the client that speaks to it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Http {
    client: Client,
    /// The address as it was configured, for messages.
    name: String,
    /// The address without a final slash and `/v1`; paths are appended to it.
    base: String,
    pub(crate) timeouts: Timeouts,
}

sinew_types::debug_fields!(Http, name);

impl Http {
    /// A client of the server at `url`. It follows no redirects and uses no proxy.
    ///
    /// # Errors
    /// If `url` is not an `http://` or `https://` address, or `api_key` not a header value.
    pub(crate) fn new(
        url: &str,
        api_key: Option<&str>,
        timeouts: Timeouts,
    ) -> Result<Self, ConfigError> {
        let wrong = |why: String| ConfigError::Url {
            url: url.to_owned(),
            why,
        };
        let address = address(url).map_err(|e| wrong(e.to_string()))?;
        if address.query().is_some() {
            return Err(wrong("it must not have a query".to_owned()));
        }
        let base = address.as_str().trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base).to_owned();
        let accept = "application/json, text/event-stream, text/plain";
        let mut headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))]);
        if let Some(key) = api_key {
            headers.extend(bearer(key).map_err(|e| wrong(e.to_string()))?);
        }
        let client = Client::new(ClientOptions {
            connect: Some(Duration::from_secs_f64(timeouts.connect_s)),
            keep_alive: false,
            headers,
            ..ClientOptions::default()
        });
        Ok(Self {
            client: client.map_err(|e| wrong(e.to_string()))?,
            name: url.to_owned(),
            base,
            timeouts,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Sends a request and waits for the head of the answer, within the limit of `head` plus the
    /// time to connect.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        head: (Stage, f64),
    ) -> Result<Response, AttemptError> {
        let url = format!("{}{path}", self.base);
        let mut request = self.client.request(method, &url);
        if let Some(body) = body {
            request = request
                .header(CONTENT_TYPE, "application/json")
                .body(body.to_string());
        }
        let answer = within(head.0, head.1 + self.timeouts.connect_s, request.send()).await;
        answer?.map_err(|e| self.failed(path, e.into()))
    }

    /// An error of the client, in the words of this crate.
    fn failed(&self, path: &str, error: HttpError) -> AttemptError {
        match error {
            HttpError::Address(why) => AttemptError::Unsupported(format!("{path}: {why}")),
            HttpError::Connect { late: true, .. } => AttemptError::Timeout {
                stage: Stage::Connect,
                limit_s: self.timeouts.connect_s,
            },
            HttpError::Connect { why, .. } => AttemptError::Connect {
                to: self.name.clone(),
                why,
            },
            error => cut(error),
        }
    }

    /// The whole answer to a small question, within `limit_s`.
    async fn whole(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        limit_s: f64,
    ) -> Result<Bytes, AttemptError> {
        let stage = Stage::Control;
        let all = async {
            let answer = self.send(method, path, body, (stage, limit_s)).await?;
            let body = read(checked(answer).await?, MAX_BODY_BYTES).await;
            body.map(Bytes::from).map_err(cut)
        };
        within(stage, limit_s, all).await?
    }

    /// Reads a small JSON answer within `control_s`.
    ///
    /// # Errors
    /// [`AttemptError::Protocol`] if it is not the expected JSON.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, AttemptError> {
        let bytes = self.get_bytes(path).await?;
        serde_json::from_slice(&bytes).map_err(|e| AttemptError::Protocol(format!("{path}: {e}")))
    }

    pub(crate) async fn get_bytes(&self, path: &str) -> Result<Bytes, AttemptError> {
        let limit_s = self.timeouts.control_s;
        self.whole(Method::GET, path, None, limit_s).await
    }

    pub(crate) async fn get_text(&self, path: &str) -> Result<String, AttemptError> {
        let bytes = self.get_bytes(path).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Names that `/v1/models` lists: models, and adapters where the server lists them.
    pub(crate) async fn models(&self) -> Result<Vec<String>, AttemptError> {
        let list: ModelList = self.get("/v1/models").await?;
        Ok(list.data.into_iter().map(|card| card.id).collect())
    }

    /// Whether the server lists a model or an adapter of this name.
    pub(crate) async fn lists(&self, name: &str) -> Result<bool, AttemptError> {
        Ok(self.models().await?.iter().any(|listed| listed == name))
    }

    /// Sends a command and reads its answer, of any form, within `limit_s` seconds.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: Option<&Value>,
        limit_s: f64,
    ) -> Result<Bytes, AttemptError> {
        self.whole(Method::POST, path, body, limit_s).await
    }

    /// Sends a request whose answer is computed as a whole, and comes as the first token of a stream would:
    /// within `first_token_s`. It has at most `max_bytes`.
    ///
    /// # Errors
    /// [`AttemptError::Protocol`] if it is not the expected JSON, or longer.
    pub(crate) async fn compute<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        max_bytes: u64,
    ) -> Result<T, AttemptError> {
        let (stage, limit_s) = (Stage::FirstToken, self.timeouts.first_token_s);
        let all = async {
            let answer = self.send(Method::POST, path, Some(body), (stage, limit_s));
            let body = read(checked(answer.await?).await?, max_bytes).await;
            body.map_err(cut)
        };
        let bytes = within(stage, limit_s, all).await??;
        serde_json::from_slice(&bytes).map_err(|e| AttemptError::Protocol(format!("{path}: {e}")))
    }

    /// Starts a generation whose tokens are streamed. Returns when the headers of the answer have arrived,
    /// within `first_token_s`.
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<EventStream, AttemptError> {
        let first = (Stage::FirstToken, self.timeouts.first_token_s);
        let answer = self.send(Method::POST, path, Some(body), first).await?;
        let answer = within(first.0, first.1, checked(answer)).await??;
        Ok(EventStream {
            answer,
            parser: SseParser::default(),
            ready: VecDeque::new(),
            first: true,
            timeouts: self.timeouts,
        })
    }
}

/// An error after the connection was there.
fn cut(error: HttpError) -> AttemptError {
    match error {
        HttpError::TooLarge(_) => AttemptError::Protocol(error.to_string()),
        error => AttemptError::Cut(error.to_string()),
    }
}

/// `future`, or the error that it took too long.
pub(crate) async fn within<T>(
    stage: Stage,
    limit_s: f64,
    future: impl Future<Output = T>,
) -> Result<T, AttemptError> {
    let limit = Duration::from_secs_f64(limit_s);
    let done = tokio::time::timeout(limit, future).await;
    done.map_err(|_| AttemptError::Timeout { stage, limit_s })
}

/// The answer if its status is a success; otherwise the error that the status stands for.
async fn checked(answer: Response) -> Result<Response, AttemptError> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let body = read(answer, MAX_BODY_BYTES).await.unwrap_or_default();
    let body = quoted(&String::from_utf8_lossy(&body));
    Err(refusal(status.as_u16(), body))
}

/// The error that a status stands for.
fn refusal(status: u16, body: String) -> AttemptError {
    match status {
        400 | 413 | 422 => {
            let why = format!("the server answered {status}: {body}");
            AttemptError::Refused(EngineError::Failed(why))
        }
        429 | 503 => AttemptError::Busy { status, body },
        _ => AttemptError::Status { status, body },
    }
}

/// The beginning of a text, on one line, for an error message.
pub(crate) fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(MAX_QUOTED).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short.replace(['\n', '\r'], " ").trim().to_owned()
}

/// The events of a generation. Dropping it closes the connection, and the server aborts.
#[derive(Debug)]
pub(crate) struct EventStream {
    answer: Response,
    parser: SseParser,
    ready: VecDeque<Vec<u8>>,
    /// Whether the first event is still to come, which has another time limit.
    first: bool,
    timeouts: Timeouts,
}

impl EventStream {
    /// The data of the next event; `None` when the server has closed the stream properly.
    ///
    /// # Errors
    /// If no event comes in time, the connection ends in the middle of one, or an event is too
    /// long.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, AttemptError> {
        let (stage, limit_s) = if self.first {
            (Stage::FirstToken, self.timeouts.first_token_s)
        } else {
            (Stage::BetweenTokens, self.timeouts.between_tokens_s)
        };
        let event = within(stage, limit_s, self.read()).await??;
        self.first = false;
        Ok(event)
    }

    async fn read(&mut self) -> Result<Option<Vec<u8>>, AttemptError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let data = self.answer.chunk().await.map_err(HttpError::from);
            let Some(data) = data.map_err(cut)? else {
                if self.parser.is_cut() {
                    return Err(AttemptError::Cut("in the middle of an event".to_owned()));
                }
                return Ok(None);
            };
            let mut events = Vec::new();
            let pushed = self.parser.push(&data, &mut events);
            pushed.map_err(|e| AttemptError::Protocol(e.to_string()))?;
            self.ready.extend(events);
        }
    }
}

/// Parses an event as JSON. `None` for `[DONE]`.
///
/// # Errors
/// If it is an error object of the server, or not the expected JSON.
pub(crate) fn event<T: DeserializeOwned>(data: &[u8]) -> Result<Option<T>, AttemptError> {
    if data == b"[DONE]" {
        return Ok(None);
    }
    match serde_json::from_slice::<Value>(data) {
        Ok(mut value) => {
            if let Some(error) = value.get_mut("error").map(Value::take) {
                return Err(stream_error(&error));
            }
            let event = serde_json::from_value(value);
            event.map_err(|e| unreadable(&e, data))
        }
        Err(e) => Err(unreadable(&e, data)),
    }
    .map(Some)
}

fn unreadable(error: &serde_json::Error, data: &[u8]) -> AttemptError {
    let text = quoted(&String::from_utf8_lossy(data));
    AttemptError::Protocol(format!("{error} in `{text}`"))
}

/// An error that a server reports after it has begun to answer.
fn stream_error(error: &Value) -> AttemptError {
    let body = quoted(&match error.get("message").and_then(Value::as_str) {
        Some(message) => message.to_owned(),
        None => error.to_string(),
    });
    match error.get("code").and_then(Value::as_u64) {
        Some(code) => refusal(code.min(599) as u16, body),
        None => AttemptError::Cut(format!("the server reports: {body}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(url: &str) -> Result<Http, ConfigError> {
        Http::new(url, Some("key"), Timeouts::default())
    }

    #[test]
    fn addresses_are_read() {
        for (url, base) in [
            ("http://localhost:8000/v1/", "http://localhost:8000"),
            ("http://[::1]:9/proxy/v1", "http://[::1]:9/proxy"),
            ("https://example.org", "https://example.org"),
        ] {
            assert_eq!(http(url).unwrap().base, base);
        }
    }

    #[test]
    fn wrong_addresses_are_refused_with_the_reason() {
        for (url, why) in [
            ("localhost:8000", "must start with http"),
            ("ftp://x", "must start with http"),
            ("http://x/?a=b", "query"),
            ("http://", ""),
        ] {
            let error = http(url).unwrap_err().to_string();
            assert!(error.contains(url) && error.contains(why), "{error}");
        }
    }

    #[test]
    fn keys_are_not_shown() {
        assert!(!format!("{:?}", http("http://x").unwrap()).contains("key"));
    }

    #[test]
    fn errors_inside_a_stream_are_told_apart() {
        let read = |text: &str| event::<Value>(text.as_bytes());
        assert_eq!(read("[DONE]"), Ok(None));
        assert_eq!(read("{\"a\":1}"), Ok(Some(serde_json::json!({"a": 1}))));
        assert!(matches!(
            read("{\"a\":NaN}"),
            Err(AttemptError::Protocol(_))
        ));
        let error =
            |code: &str| read(&format!("{{\"error\":{{\"message\":\"m\"{code}}}}}")).unwrap_err();
        assert!(matches!(error(",\"code\":400"), AttemptError::Refused(_)));
        assert!(matches!(error(",\"code\":503"), AttemptError::Busy { .. }));
        assert!(matches!(
            error(",\"code\":500"),
            AttemptError::Status { status: 500, .. }
        ));
        assert!(matches!(error(""), AttemptError::Cut(_)));
    }
}
