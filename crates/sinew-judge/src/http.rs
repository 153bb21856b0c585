//! JSON over HTTP: one question, one answer, each with a limit.

use crate::chat::ChatError;
use serde_json::Value;
use sinew_http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use sinew_http::{Client, ClientOptions, HttpError, Method, Url, bearer, may_pass};
use std::time::Duration;

/// Maximum bytes of an answer, 4 MiB.
const MAX_ANSWER: u64 = 4 << 20;
/// Maximum characters of a server's words in a message.
const MAX_QUOTED: usize = 160;
/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// A server that takes JSON. It follows no redirects and uses no proxy.
#[derive(Clone, Debug)]
pub(crate) struct JsonServer {
    client: Client,
    url: Url,
}

/// `url` without its last slashes, if it is an address of a server.
///
/// # Errors
/// Fails with the fault of the address.
pub(crate) fn address(url: &str) -> Result<Url, HttpError> {
    let wrong = |why: &str| HttpError::Address(format!("{url:?} is no address: {why}"));
    let parsed = sinew_http::address(url.trim_end_matches('/'));
    let parsed = parsed.map_err(|e| wrong(&e.to_string()))?;
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err(wrong("a key belongs into the variable of key_env"));
    }
    Ok(parsed)
}

impl JsonServer {
    /// A server at `url`, which gets `key` as bearer token.
    ///
    /// # Errors
    /// Fails if `url` is not an address, or `key` has characters that no header may have.
    pub(crate) fn new(url: Url, key: Option<&str>) -> Result<Self, HttpError> {
        let json = HeaderValue::from_static("application/json");
        let mut headers = HeaderMap::from_iter([(ACCEPT, json.clone()), (CONTENT_TYPE, json)]);
        if let Some(key) = key {
            headers.extend(bearer(key.trim())?);
        }
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT),
            body_max: MAX_ANSWER,
            headers,
            ..ClientOptions::default()
        });
        let client = client.map_err(|e| HttpError::Address(format!("{url}: {e}")))?;
        Ok(Self { client, url })
    }

    /// Host and port, for messages.
    pub(crate) fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        match self.url.port_or_known_default() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        }
    }

    /// Sends `body` and reads the answer, both within `limit`.
    ///
    /// # Errors
    /// [`ChatError::Passing`] for no connection, 408, 429 and 5xx; [`ChatError::Unheard`] for the limit, 504
    /// and a connection that broke; [`ChatError::Lasting`] for other statuses and answers that are too long
    /// or no JSON.
    pub(crate) async fn post(&self, body: String, limit: Duration) -> Result<Value, ChatError> {
        let answer = tokio::time::timeout(limit, self.exchange(body)).await;
        answer.unwrap_or_else(|_| {
            let (host, s) = (self.host(), limit.as_secs_f64());
            Err(ChatError::Unheard(format!(
                "{host}: no answer within {s} s"
            )))
        })
    }

    async fn exchange(&self, body: String) -> Result<Value, ChatError> {
        let failed = |e: HttpError| {
            let why = format!("{}: {e}", self.host());
            match e {
                HttpError::Connect { .. } => ChatError::Passing(why),
                HttpError::Status { code: 504, .. } => ChatError::Unheard(why),
                HttpError::Status { code, .. } if may_pass(code) => ChatError::Passing(why),
                HttpError::Status { .. } | HttpError::TooLarge(_) => ChatError::Lasting(why),
                _ => ChatError::Unheard(why),
            }
        };
        let request = self.client.request(Method::POST, self.url.as_str());
        let answer = self.client.ask(request.body(body)).await;
        let body = answer.and_then(|a| a.success(MAX_QUOTED)).map_err(failed)?;
        serde_json::from_slice(&body)
            .map_err(|_| ChatError::Lasting(format!("{}: the answer is no JSON", self.host())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        assert_eq!(address("http://h:1/v1/").unwrap().as_str(), "http://h:1/v1");
        for (url, why) in [
            ("h:1", "http://"),
            ("ftp://h", "http://"),
            ("http://", "host"),
            ("http://me:secret@h", "key_env"),
        ] {
            let error = address(url).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let server = JsonServer::new(address("http://h:1").unwrap(), Some("a\nb"));
        assert!(server.unwrap_err().to_string().contains("key"));
    }
}
