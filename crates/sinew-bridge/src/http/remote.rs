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
use reqwest::header::{
    AUTHORIZATION, CONTENT_TYPE, COOKIE, HeaderMap, HeaderValue, RETRY_AFTER, SET_COOKIE,
};
use reqwest::{Client, ClientBuilder, Method, Response, StatusCode, Url};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinew_http::{cause, tls};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// First wait before a repeat. Each next one is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// Longest wait before a repeat, also where the server asks for a longer one.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
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
        /// Fault, for people.
        why: String,
    },
}

impl RemoteError {
    /// True for the status of an unknown id.
    pub(crate) fn is_unknown(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

/// One answer: its status and its body.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Any status, errors included.
    pub(crate) status: StatusCode,
    /// Body, up to 16 MiB.
    pub(crate) body: Vec<u8>,
    /// Wait before a repeat that the server asks for.
    retry_after: Option<Duration>,
}

impl Answer {
    /// Text of the error, for people.
    pub(crate) fn text(&self) -> String {
        match serde_json::from_slice::<Refusal>(&self.body) {
            Ok(Refusal {
                error: Fault { text, .. },
            }) => cut(&text, MAX_QUOTED),
            Err(_) => cut(&String::from_utf8_lossy(&self.body), MAX_QUOTED),
        }
    }

    /// True if a repeat may succeed. All other errors have the request itself as their cause, so the same
    /// request would fail again.
    fn may_pass(&self) -> bool {
        self.status == StatusCode::TOO_MANY_REQUESTS || self.status.is_server_error()
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

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl Remote {
    /// A client of the server at `url`. It follows no redirects and uses no proxy.
    ///
    /// # Errors
    /// If `url` is not an `http://` or `https://` address, or `key` not a header value.
    pub fn new(url: &str, key: Option<&str>, timeout: Duration) -> Result<Self, String> {
        let parsed = address(url)?;
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                .map_err(|_| "its key has characters that no header may have".to_owned())?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let client = builder()
            .default_headers(headers)
            .connect_timeout(CONNECT.min(timeout))
            .build()
            .map_err(|e| cause(&e))?;
        Ok(Self {
            client,
            base: parsed.as_str().trim_end_matches('/').to_owned(),
            timeout,
        })
    }

    /// One attempt, whatever its status. `Err` is the reason why there is no answer. Only the connection has
    /// a separate limit: the caller sets the deadline.
    pub(crate) async fn once(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<Answer, String> {
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let answer = request.send().await.map_err(|e| cause(&e))?;
        let asked = answer.headers().get(RETRY_AFTER);
        let asked = asked.and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        Ok(Answer {
            status: answer.status(),
            retry_after: asked.map(Duration::from_secs),
            body: read(answer).await?,
        })
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
        (method, path): (Method, &str),
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<Answer, RemoteError> {
        let (end, mut wait) = (Instant::now() + limit, FIRST_WAIT);
        let what = || format!("{method} {}{path}", self.base);
        let body = body.map(|b| b.to_string().into_bytes());
        if body.as_ref().is_some_and(|b| b.len() > MAX_BODY) {
            return Err(RemoteError::Protocol {
                what: what(),
                why: format!("the request is longer than {MAX_BODY} bytes"),
            });
        }
        loop {
            let once = self.once(method.clone(), path, body.clone());
            let (last, asked) = match tokio::time::timeout_at(end, once).await {
                Err(_) => ("the deadline is over".to_owned(), None),
                Ok(Err(why)) if why == TOO_LONG => {
                    return Err(RemoteError::Protocol { what: what(), why });
                }
                Ok(Err(why)) => (why, None),
                Ok(Ok(answer)) if answer.status.is_success() => return Ok(answer),
                Ok(Ok(answer)) if answer.may_pass() => {
                    let last = format!("{}: {}", answer.status.as_u16(), answer.text());
                    (last, answer.retry_after)
                }
                Ok(Ok(answer)) => {
                    return Err(RemoteError::Refused {
                        what: what(),
                        status: answer.status.as_u16(),
                        text: answer.text(),
                    });
                }
            };
            let next = asked.unwrap_or(wait).clamp(wait, LONGEST_WAIT);
            if Instant::now() + next >= end {
                let seconds = limit.as_secs_f64();
                return Err(RemoteError::Unreachable {
                    what: what(),
                    seconds,
                    last,
                });
            }
            tokio::time::sleep(next).await;
            wait = (2 * wait).min(LONGEST_WAIT);
        }
    }

    /// One attempt with cookies, within the deadline: for requests that must not be repeated. Cookies of the
    /// answer replace those of the same name.
    ///
    /// # Errors
    /// [`RemoteError`], for every status but 200 to 299.
    pub async fn once_with(
        &self,
        (method, path): (Method, &str),
        body: Option<&Value>,
        cookies: &mut BTreeMap<String, String>,
    ) -> Result<Value, RemoteError> {
        let what = || format!("{method} {}{path}", self.base);
        let mut request = self
            .client
            .request(method.clone(), format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request
                .header(CONTENT_TYPE, "application/json")
                .body(body.to_string());
        }
        if !cookies.is_empty() {
            let all: Vec<String> = cookies.iter().map(|(k, v)| format!("{k}={v}")).collect();
            request = request.header(COOKIE, all.join("; "));
        }
        let asked = async {
            let answer = request.send().await.map_err(|e| cause(&e))?;
            let status = answer.status();
            let set = answer.headers().get_all(SET_COOKIE).iter();
            let set: Vec<String> = set
                .filter_map(|v| v.to_str().ok().map(str::to_owned))
                .collect();
            Ok::<_, String>((status, set, read(answer).await?))
        };
        let unreachable = |last: String| RemoteError::Unreachable {
            what: what(),
            seconds: self.timeout.as_secs_f64(),
            last,
        };
        let asked = tokio::time::timeout(self.timeout, asked).await;
        let asked = asked.map_err(|_| unreachable("the deadline is over".into()))?;
        let (status, set, body) = asked.map_err(unreachable)?;
        for cookie in set.iter().take(MAX_COOKIES) {
            let pair = cookie.split(';').next().unwrap_or_default();
            if let Some((name, value)) = pair.split_once('=') {
                cookies.insert(name.trim().to_owned(), value.trim().to_owned());
            }
        }
        if !status.is_success() {
            return Err(RemoteError::Refused {
                what: what(),
                status: status.as_u16(),
                text: cut(&String::from_utf8_lossy(&body), MAX_QUOTED),
            });
        }
        sinew_types::json::from_slice(&body).map_err(|e| RemoteError::Protocol {
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
            .within((method.clone(), path), body, self.timeout)
            .await?;
        sinew_types::json::from_slice(&answer.body).map_err(|e| RemoteError::Protocol {
            what: format!("{method} {}{path}", self.base),
            why: format!("the answer is not as expected: {e}"),
        })
    }
}

/// Reason of an answer above the limit.
const TOO_LONG: &str = "the answer is longer than 16 MiB";

/// A client that follows no redirects and uses no proxy.
fn builder() -> ClientBuilder {
    Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .tls_backend_preconfigured(tls())
}

/// A client for another protocol than this one.
#[cfg(feature = "mcp")]
pub(crate) fn client() -> Result<Client, String> {
    let client = builder().connect_timeout(CONNECT).pool_max_idle_per_host(0);
    client.build().map_err(|e| cause(&e))
}

/// An address of a server, parsed.
///
/// # Errors
/// If it is none, has another scheme than HTTP or HTTPS, or has a query.
pub fn address(url: &str) -> Result<Url, String> {
    let parsed = Url::parse(url).map_err(|e| e.to_string());
    match parsed {
        Ok(parsed) if !matches!(parsed.scheme(), "http" | "https") => {
            Err("it must start with http:// or https://".into())
        }
        Ok(parsed) if parsed.query().is_some() => Err("it must not have a query".into()),
        other => other,
    }
}

/// A whole body within its limit.
async fn read(mut answer: Response) -> Result<Vec<u8>, String> {
    let mut all = Vec::new();
    while let Some(data) = answer.chunk().await.map_err(|e| cause(&e))? {
        all.extend_from_slice(&data);
        if all.len() > MAX_BODY {
            return Err(TOO_LONG.into());
        }
    }
    Ok(all)
}
