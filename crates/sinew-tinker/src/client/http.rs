//! One request to a service and its answer: address, key, encoding, repetitions, deadlines.

use super::error::ClientError;
use super::options::ServiceOptions;
use super::tries::{Fault, Tries};
use crate::wire::PROTOBUF;
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sinew_http::header::{
    ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, WWW_AUTHENTICATE,
};
use sinew_http::{Answer, Client, ClientOptions, HttpError, Method, address, line, retry_after};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Header of the key.
const KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Content type of all other bodies than protobuf.
const JSON: &str = "application/json";
/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest time of one attempt: a request of 5 MB over a slow line.
const ATTEMPT: Duration = Duration::from_secs(120);
/// Maximum bytes of an answer.
const MAX_ANSWER: u64 = 256 << 20;
/// Maximum characters of a quoted text of the service.
const QUOTED: usize = 600;

/// A request.
#[derive(Clone)]
pub(crate) struct Message {
    method: Method,
    path: String,
    body: Bytes,
    content: Option<&'static str>,
    is_compressed: bool,
    wants_protobuf: bool,
}

impl Message {
    fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            body: Bytes::new(),
            content: None,
            is_compressed: false,
            wants_protobuf: false,
        }
    }

    /// A question without a body.
    pub(crate) fn get(path: &str) -> Self {
        Self::new(Method::GET, path)
    }

    /// A request to delete what the path names.
    pub(crate) fn delete(path: String) -> Self {
        Self::new(Method::DELETE, path)
    }

    /// A request in JSON.
    pub(crate) fn json(path: &str, body: &Value) -> Self {
        Self {
            body: body.to_string().into(),
            content: Some(JSON),
            ..Self::new(Method::POST, path)
        }
    }

    /// A request in protobuf, compressed by zstd or not.
    pub(crate) fn protobuf(path: &str, body: Bytes, is_compressed: bool) -> Self {
        Self {
            body,
            content: Some(PROTOBUF),
            is_compressed,
            ..Self::new(Method::POST, path)
        }
    }

    /// The same request, whose answer may be protobuf.
    pub(crate) fn wanting_protobuf(mut self) -> Self {
        self.wants_protobuf = true;
        self
    }
}

/// The moment at which a call is given up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    at: Instant,
    seconds: u64,
}

impl End {
    pub(crate) fn after(limit: Duration) -> Self {
        Self {
            at: Instant::now() + limit,
            seconds: limit.as_secs(),
        }
    }

    /// Time that is left.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// The error of a call that was given up.
    pub(crate) fn late(self, call: &'static str, state: impl Into<String>) -> ClientError {
        ClientError::Deadline {
            call,
            seconds: self.seconds,
            state: state.into(),
        }
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// If the call ends before.
    pub(crate) async fn pause(
        self,
        call: &'static str,
        pause: Duration,
        state: &str,
    ) -> Result<(), ClientError> {
        if pause >= self.left() {
            return Err(self.late(call, state));
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// A service's address with its key. It must be used on one runtime only.
pub(crate) struct Http {
    client: Client,
    url: String,
    key: HeaderValue,
    /// Whether the service wants a token of minutes in place of the key.
    exchanges: AtomicBool,
    token: Mutex<Option<HeaderValue>>,
}

sinew_types::debug_fields!(Http, url);

#[derive(Deserialize)]
struct ExchangedKey {
    jwt: String,
}

impl Http {
    /// A client of the service. Nothing is sent.
    ///
    /// # Errors
    /// If address or key cannot be sent, or the system lacks what a client needs.
    pub(crate) fn new(options: &ServiceOptions) -> Result<Self, ClientError> {
        let url = options.url.trim_end_matches('/');
        let wrong = |why: &dyn fmt::Display| ClientError::Setup(format!("address {url:?}: {why}"));
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(wrong(&"it must start with http:// or https://"));
        }
        let parsed = address(url).map_err(|e| wrong(&e))?;
        if parsed.query().is_some() {
            return Err(wrong(&"it must not have a query"));
        }
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT),
            body_max: MAX_ANSWER,
            proxy: true,
            ..ClientOptions::default()
        });
        Ok(Self {
            client: client.map_err(|e| wrong(&e))?,
            url: url.to_owned(),
            key: header_of(&options.api_key)?,
            exchanges: AtomicBool::new(false),
            token: Mutex::default(),
        })
    }

    /// Sends tokens of minutes in place of the key from now on, and gets the first one.
    pub(crate) async fn exchange_keys(&self, end: End) -> Result<(), ClientError> {
        self.exchanges.store(true, Ordering::Relaxed);
        let call = "auth/token";
        if self.exchange(end.left()).await {
            return Ok(());
        }
        Err(ClientError::Key {
            call,
            status: 401,
            text: "the key was not exchanged for a token".to_owned(),
        })
    }

    /// Gets a token for the key; false: the one before stays.
    async fn exchange(&self, limit: Duration) -> bool {
        let message = Message::json("/api/v1/auth/token", &json!({}));
        let Ok(answer) = self.attempt(&message, &self.key, limit).await else {
            return false;
        };
        let read = serde_json::from_slice::<ExchangedKey>(&answer.body);
        let (true, Ok(key)) = (answer.status.is_success(), read) else {
            return false;
        };
        let Ok(token) = header_of(&key.jwt) else {
            return false;
        };
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token);
        true
    }

    fn token(&self) -> Option<HeaderValue> {
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        token.clone()
    }

    /// Sends a request once, under this key or token.
    async fn attempt(
        &self,
        message: &Message,
        key: &HeaderValue,
        limit: Duration,
    ) -> Result<Answer, HttpError> {
        let url = format!("{}{}", self.url, message.path);
        let request = self.client.request(message.method.clone(), &url);
        let accept = if message.wants_protobuf {
            PROTOBUF
        } else {
            JSON
        };
        let mut request = request
            .timeout(limit)
            .header(KEY, key.clone())
            .header(ACCEPT, accept);
        if let Some(content) = message.content {
            request = request
                .header(CONTENT_TYPE, content)
                .body(message.body.clone());
        }
        if message.is_compressed {
            request = request.header(CONTENT_ENCODING, "zstd");
        }
        self.client.ask(request).await
    }

    /// Sends a request once, and once more with a new token if its token has ended.
    pub(crate) async fn send(
        &self,
        message: &Message,
        limit: Duration,
    ) -> Result<Answer, HttpError> {
        let key = self.token().unwrap_or_else(|| self.key.clone());
        let answer = self.attempt(message, &key, limit).await?;
        let replaceable = self.exchanges.load(Ordering::Relaxed) && is_ended_token(&answer);
        if replaceable && self.exchange(limit).await {
            let key = self.token().unwrap_or_else(|| self.key.clone());
            return self.attempt(message, &key, limit).await;
        }
        Ok(answer)
    }

    /// Sends a request until it is answered by a success.
    ///
    /// # Errors
    /// The refusal, or the last problem once `end` is over.
    pub(crate) async fn call(
        &self,
        call: &'static str,
        message: &Message,
        end: End,
    ) -> Result<Answer, ClientError> {
        let (mut tries, mut state) = (Tries::default(), "nothing was sent".to_owned());
        loop {
            let left = end.left();
            if left.is_zero() {
                return Err(end.late(call, state));
            }
            let sent = self.send(message, left.min(ATTEMPT)).await;
            let fault = match sent {
                Ok(answer) if answer.status.is_success() => return Ok(answer),
                Ok(answer) => {
                    let (status, text) = (answer.status.as_u16(), said(&answer));
                    state = format!("status {status}: {text}");
                    let fault = fault_of(&answer);
                    match tries.pause(fault) {
                        Some(pause) => end.pause(call, pause, &state).await?,
                        None => return Err(ClientError::of_status(call, status, text)),
                    }
                    continue;
                }
                Err(error) => self.fault(call, error)?,
            };
            state = fault;
            match tries.pause(Fault::Connection) {
                Some(pause) if pause < end.left() => tokio::time::sleep(pause).await,
                _ => return Err(ClientError::Connection { call, why: state }),
            }
        }
    }

    /// The reason of a connection that failed, in words.
    ///
    /// # Errors
    /// If another attempt would fail as well.
    pub(crate) fn fault(
        &self,
        call: &'static str,
        error: HttpError,
    ) -> Result<String, ClientError> {
        match error {
            HttpError::Connect { .. } | HttpError::Deadline(_) | HttpError::Body(_) => {
                Ok(format!("{}: {error}", self.url))
            }
            HttpError::TooLarge(_) => Err(ClientError::unreadable(call, error)),
            other => Err(ClientError::Setup(format!("{}: {other}", self.url))),
        }
    }

    /// Sends a request as [`Http::call`] does and reads its answer in JSON.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        call: &'static str,
        message: &Message,
        end: End,
    ) -> Result<T, ClientError> {
        let answer = self.call(call, message, end).await?;
        read(call, &answer.body)
    }
}

/// Reads an answer in JSON.
pub(crate) fn read<T: DeserializeOwned>(call: &'static str, body: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(body).map_err(|error| {
        let quoted = line(body, 120);
        ClientError::unreadable(call, format!("{error} in `{quoted}`"))
    })
}

/// The beginning of the text of a refusal: `detail` where the service has the form of the SDK's errors.
pub(crate) fn said(answer: &Answer) -> String {
    let parsed = serde_json::from_slice::<Value>(&answer.body).ok();
    let detail = parsed.as_ref().and_then(|body| body.get("detail"));
    match detail {
        Some(Value::String(text)) => line(text.as_bytes(), QUOTED),
        Some(other) => line(other.to_string().as_bytes(), QUOTED),
        None => line(&answer.body, QUOTED),
    }
}

/// The fault of an answer that is not a success.
pub(crate) fn fault_of(answer: &Answer) -> Fault {
    Fault::Status {
        status: answer.status.as_u16(),
        retry_after: retry_after(&answer.headers),
        is_empty: answer.body.is_empty(),
    }
}

/// Whether a service refuses a token, which another one can replace.
fn is_ended_token(answer: &Answer) -> bool {
    let said = answer.headers.get(WWW_AUTHENTICATE);
    let said = said.and_then(|value| value.to_str().ok());
    answer.status.as_u16() == 401 && said.is_some_and(|text| text.contains("invalid_token"))
}

/// A key as a header that is not shown.
fn header_of(key: &str) -> Result<HeaderValue, ClientError> {
    let value = HeaderValue::try_from(key.trim());
    let mut value = value
        .map_err(|_| ClientError::Setup("the key has characters that no header may have".into()))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(url: &str, key: &str) -> Result<Http, ClientError> {
        Http::new(&ServiceOptions::new(url, key))
    }

    #[test]
    fn addresses_and_keys_are_checked_and_keys_are_not_shown() {
        let http_ok = http("http://127.0.0.1:1/", "secret").unwrap();
        assert_eq!(http_ok.url, "http://127.0.0.1:1");
        assert!(!format!("{http_ok:?}").contains("secret"));
        for (url, why) in [
            ("127.0.0.1:1", "must start with http"),
            ("http://a/?x=1", "query"),
        ] {
            let error = http(url, "k").unwrap_err().to_string();
            assert!(error.contains(url) && error.contains(why), "{error}");
        }
        let error = http("http://a", "a\nb").unwrap_err().to_string();
        assert!(
            error.contains("no header") && !error.contains("a\nb"),
            "{error}"
        );
    }
}
