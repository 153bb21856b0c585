//! JSON over HTTP: one question, one answer, each with a limit.

use crate::chat::ChatError;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Response, StatusCode, Url};
use serde_json::Value;
use sinew_http::{cause, tls};
use std::time::Duration;

/// Maximum bytes of an answer, 4 MiB.
const MAX_ANSWER: usize = 4 << 20;
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
pub(crate) fn address(url: &str) -> Result<Url, String> {
    let wrong = |why: String| format!("{url:?} is no address: {why}");
    let parsed = Url::parse(url.trim_end_matches('/')).map_err(|e| wrong(e.to_string()))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(wrong("it must begin with http:// or https://".into()));
    }
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err(wrong("a key belongs into the variable of key_env".into()));
    }
    Ok(parsed)
}

impl JsonServer {
    /// A server at `url`, which gets `key` as bearer token.
    ///
    /// # Errors
    /// Fails if `url` is not an address, or `key` has characters that no header may have.
    pub(crate) fn new(url: Url, key: Option<&str>) -> Result<Self, String> {
        let json = HeaderValue::from_static("application/json");
        let mut headers = HeaderMap::from_iter([(ACCEPT, json.clone()), (CONTENT_TYPE, json)]);
        if let Some(key) = key {
            let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim()))
                .map_err(|_| "the key has characters that no header may have".to_owned())?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let client = Client::builder()
            .default_headers(headers)
            .connect_timeout(CONNECT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .tls_backend_preconfigured(tls())
            .build()
            .map_err(|e| format!("{url}: {}", cause(&e)))?;
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
        let host = self.host();
        let lost = |e: reqwest::Error| {
            let why = format!("{host}: {}", cause(&e));
            match e.is_connect() {
                true => ChatError::Passing(why),
                false => ChatError::Unheard(why),
            }
        };
        let request = self.client.post(self.url.clone()).body(body);
        let answer = request.send().await.map_err(lost)?;
        let status = answer.status();
        let body = read(answer).await.map_err(lost)?;
        if !status.is_success() {
            let said = quoted(body.as_deref().unwrap_or_default());
            let why = format!("{host}: status {}: {said}", status.as_u16());
            let passing = status.is_server_error()
                || matches!(
                    status,
                    StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
                );
            return Err(match passing {
                true if status == StatusCode::GATEWAY_TIMEOUT => ChatError::Unheard(why),
                true => ChatError::Passing(why),
                false => ChatError::Lasting(why),
            });
        }
        let lasting = |why: &str| ChatError::Lasting(format!("{host}: {why}"));
        let body = body.ok_or_else(|| lasting("the answer is longer than 4 MiB"))?;
        serde_json::from_slice(&body).map_err(|_| lasting("the answer is no JSON"))
    }
}

/// The body, `None` if it is longer than [`MAX_ANSWER`].
async fn read(mut answer: Response) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut all = Vec::new();
    while let Some(data) = answer.chunk().await? {
        if all.len() + data.len() > MAX_ANSWER {
            return Ok(None);
        }
        all.extend_from_slice(&data);
    }
    Ok(Some(all))
}

/// The beginning of a server's words, on one line and without control characters.
fn quoted(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MAX_QUOTED)]);
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_QUOTED).map(shown).collect()
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
            let error = address(url).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let server = JsonServer::new(address("http://h:1").unwrap(), Some("a\nb"));
        assert!(server.unwrap_err().contains("key"));
    }

    #[test]
    fn words_of_servers_are_short_and_harmless() {
        let said = quoted("a\n\u{1b}[31m".repeat(200).as_bytes());
        assert!(said.chars().count() == MAX_QUOTED && !said.contains(char::is_control));
    }
}
