//! Requests to a server of environments: a bearer key, deadlines, repeats and limits.
//!
//! Ids of episodes and calls make every request safe to repeat. A failure that may pass (no connection, a cut
//! one, 429, 500 and above) is repeated until the deadline; a refusal of the server is an error at once.
//!
//! | answer | error |
//! |---|---|
//! | 200 to 299 | none; a body that is not as expected is [`RemoteError::Protocol`] |
//! | 300 to 499, but 429 | [`RemoteError::Refused`]: redirects are not followed |
//! | 429, 500 and above, none | repeated after a wait that doubles; at last [`RemoteError::Unreachable`] |

use super::protocol::{Fault, MAX_BODY, Refusal, cut};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinew_http::header::{CONTENT_TYPE, COOKIE, HeaderMap, SET_COOKIE};
use sinew_http::{
    Answer, Client, ClientOptions, Failure, HttpError, Method, RequestBuilder, Retry, Url, bearer,
    retry, retry_after,
};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Waits before repeats: at most 5 s, also where the server asks for more. Only the deadline ends them.
const WAITS: Retry = Retry::doubling(u32::MAX, Duration::from_millis(50), Duration::from_secs(5));
/// Time to connect.
const CONNECT: Duration = Duration::from_secs(10);
/// Maximum characters of a quoted error.
const MAX_QUOTED: usize = 300;
/// Maximum number of cookies of one answer.
const MAX_COOKIES: usize = 16;

/// A request without an answer that can be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RemoteError {
    /// No answer until the deadline, or only such that may pass.
    #[error("{what}: no answer within {seconds} s: {last}")]
    Unreachable {
        /// Method and address.
        what: String,
        /// The deadline.
        seconds: f64,
        /// Reason of the last attempt.
        last: String,
    },
    /// A status of 400 to 499.
    #[error("{what}: the server answered {status}: {text}")]
    Refused {
        /// Method and address.
        what: String,
        /// The status of HTTP.
        status: u16,
        /// The server's text, cut.
        text: String,
    },
    /// Not the expected JSON, or too long.
    #[error("{what}: {why}")]
    Protocol {
        /// Method and address.
        what: String,
        /// Fault, for users.
        why: String,
    },
}

impl RemoteError {
    /// True for the status of an unknown id.
    pub(crate) fn is_unknown(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

/// Text of an error, for users.
pub(crate) fn text(answer: &Answer) -> String {
    match serde_json::from_slice::<Refusal>(&answer.body) {
        Ok(Refusal {
            error: Fault { text, .. },
        }) => cut(&text, MAX_QUOTED),
        Err(_) => cut(&String::from_utf8_lossy(&answer.body), MAX_QUOTED),
    }
}

/// A server's address and the client that speaks to it. Cheap to clone.
#[derive(Clone)]
pub struct Remote {
    client: Client,
    /// Address without a final slash.
    base: String,
    /// Deadline of one request with its repeats.
    pub(crate) timeout: Duration,
}

sinew_types::debug_fields!(Remote, base);

impl Remote {
    /// A client of the server at `url`. It follows no redirects and uses no proxy.
    ///
    /// # Errors
    /// If `url` is not an `http://` or `https://` address, or `key` not a header value.
    pub fn new(url: &str, key: Option<&str>, timeout: Duration) -> Result<Self, HttpError> {
        let parsed = address(url)?;
        let headers = key.map_or_else(|| Ok(HeaderMap::new()), bearer);
        let client = headers.and_then(|headers| {
            Client::new(ClientOptions {
                connect: Some(CONNECT.min(timeout)),
                body_max: MAX_BODY as u64,
                headers,
                ..ClientOptions::default()
            })
        });
        Ok(Self {
            client: client?,
            base: parsed.as_str().trim_end_matches('/').to_owned(),
            timeout,
        })
    }

    /// A request with a body of JSON, or none.
    fn request(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> RequestBuilder {
        let request = self.client.request(method, &format!("{}{path}", self.base));
        match body {
            Some(body) => request.header(CONTENT_TYPE, "application/json").body(body),
            None => request,
        }
    }

    /// One attempt, whatever its status.
    /// Only the connection has a separate limit: the caller sets the deadline.
    pub(crate) async fn once(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<Answer, HttpError> {
        self.client.ask(self.request(method, path, body)).await
    }

    /// The attempt number `number`, from 1, of a request that ends at `end`.
    async fn attempt(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        end: Instant,
        number: u32,
    ) -> Result<Answer, Failure<RemoteError>> {
        let what = || format!("{method} {}{path}", self.base);
        let once = self.once(method.clone(), path, body);
        let answer = match tokio::time::timeout_at(end, once).await {
            Err(_) => return Err(Failure::Passing("the deadline is over".to_owned(), None)),
            Ok(Err(e @ HttpError::TooLarge(_))) => {
                let (what, why) = (what(), e.to_string());
                return Err(Failure::Lasting(RemoteError::Protocol { what, why }));
            }
            Ok(answer) => answer?,
        };
        if answer.status.is_success() {
            return Ok(answer);
        }
        let (status, text) = (answer.status.as_u16(), text(&answer));
        match status {
            // The cause of all other errors is the request itself, so that the same one would fail again.
            429 | 500.. => {
                let least = WAITS.pause(number, None).unwrap_or_default();
                let asked = retry_after(&answer.headers).map(|asked| asked.max(least));
                Err(Failure::Passing(format!("{status}: {text}"), asked))
            }
            _ => Err(Failure::Lasting(RemoteError::Refused {
                what: what(),
                status,
                text,
            })),
        }
    }

    /// A request with repeats, within `limit`. Answers with a status of 400 or more are errors.
    ///
    /// A wait is never shorter than the last one, and at most 5 s, also with `Retry-After`. The last reason
    /// is returned at once if the next attempt could only begin after the deadline.
    ///
    /// # Errors
    /// [`RemoteError`]. A request above the limit of a body is not sent.
    pub(crate) async fn within(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<Answer, RemoteError> {
        let (end, mut number) = (Instant::now() + limit, 0);
        let what = || format!("{method} {}{path}", self.base);
        let body = body.map(|b| b.to_string().into_bytes());
        if body.as_ref().is_some_and(|b| b.len() > MAX_BODY) {
            return Err(RemoteError::Protocol {
                what: what(),
                why: format!("the request is longer than {MAX_BODY} bytes"),
            });
        }
        let in_time = |wait: Duration| (Instant::now() + wait < end).then_some(wait);
        let attempt = || {
            number += 1;
            self.attempt(method.clone(), path, body.clone(), end, number)
        };
        let answer = retry(WAITS, in_time, attempt).await;
        answer.map_err(|failure| match failure {
            Failure::Lasting(error) => error,
            Failure::Passing(last, _) => RemoteError::Unreachable {
                what: what(),
                seconds: limit.as_secs_f64(),
                last,
            },
        })
    }

    /// One attempt with cookies, within the deadline: for requests that must not be repeated. Cookies of the
    /// answer replace those of the same name.
    ///
    /// # Errors
    /// [`RemoteError`], for every status but 200 to 299.
    pub async fn once_with(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        cookies: &mut BTreeMap<String, String>,
    ) -> Result<Value, RemoteError> {
        let what = || format!("{method} {}{path}", self.base);
        let body = body.map(|b| b.to_string().into_bytes());
        let mut request = self.request(method.clone(), path, body);
        if !cookies.is_empty() {
            let all: Vec<String> = cookies.iter().map(|(k, v)| format!("{k}={v}")).collect();
            request = request.header(COOKIE, all.join("; "));
        }
        let unreachable = |last: String| RemoteError::Unreachable {
            what: what(),
            seconds: self.timeout.as_secs_f64(),
            last,
        };
        let asked = tokio::time::timeout(self.timeout, self.client.ask(request)).await;
        let asked = asked.map_err(|_| unreachable("the deadline is over".into()))?;
        let answer = asked.map_err(|e| unreachable(e.to_string()))?;
        let set = answer.headers.get_all(SET_COOKIE).iter();
        for cookie in set.filter_map(|v| v.to_str().ok()).take(MAX_COOKIES) {
            let pair = cookie.split(';').next().unwrap_or_default();
            if let Some((name, value)) = pair.split_once('=') {
                cookies.insert(name.trim().to_owned(), value.trim().to_owned());
            }
        }
        if !answer.status.is_success() {
            return Err(RemoteError::Refused {
                what: what(),
                status: answer.status.as_u16(),
                text: cut(&String::from_utf8_lossy(&answer.body), MAX_QUOTED),
            });
        }
        sinew_types::json::from_slice(&answer.body).map_err(|e| RemoteError::Protocol {
            what: what(),
            why: format!("the answer is no JSON: {e}"),
        })
    }

    /// A request whose answer is JSON, with repeats, within the deadline of the client.
    ///
    /// # Errors
    /// [`RemoteError`]; its `Protocol` where the answer is not JSON of this form.
    pub async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T, RemoteError> {
        let answer = self
            .within(method.clone(), path, body, self.timeout)
            .await?;
        sinew_types::json::from_slice(&answer.body).map_err(|e| RemoteError::Protocol {
            what: format!("{method} {}{path}", self.base),
            why: format!("the answer is not as expected: {e}"),
        })
    }
}

/// A client for another protocol than this one.
#[cfg(feature = "mcp")]
pub(crate) fn client() -> Result<Client, HttpError> {
    Client::new(ClientOptions {
        connect: Some(CONNECT),
        keep_alive: false,
        ..ClientOptions::default()
    })
}

/// An address of a server, parsed.
///
/// # Errors
/// If it is none, has another scheme than HTTP or HTTPS, or has a query.
pub fn address(url: &str) -> Result<Url, HttpError> {
    let parsed = sinew_http::address(url)?;
    match parsed.query() {
        Some(_) => Err(HttpError::Address("it must not have a query".into())),
        None => Ok(parsed),
    }
}
