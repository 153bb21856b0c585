//! The client of async code.

use crate::error::{HttpError, line};
use crate::retry::{Failure, Retry};
use crate::trust::{Authorities, tls_of};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use std::time::Duration;

/// Limits and habits of a client.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Time for a connection.
    pub connect: Option<Duration>,
    /// Time for a request and its whole answer. A request may set another one.
    pub deadline: Option<Duration>,
    /// Time for the head of an answer, and again for every further read of its body.
    pub stall: Option<Duration>,
    /// Maximum bytes of an answer that is read as a whole.
    pub body_max: u64,
    /// Maximum number of redirects that a request follows. At 0 a redirect is an answer like any other.
    pub redirects: usize,
    /// Uses the proxies that the environment names (`HTTPS_PROXY` and its like).
    pub proxy: bool,
    /// Keeps connections open for further requests.
    pub keep_alive: bool,
    /// Refuses addresses without TLS.
    pub https_only: bool,
    /// Headers of every request.
    pub headers: HeaderMap,
    /// Authorities that are trusted in addition to Mozilla's; `None`: those of [`crate::trust()`].
    pub authorities: Option<Authorities>,
}

impl Default for ClientOptions {
    /// No limit of time, no redirects and no proxies.
    fn default() -> Self {
        Self {
            connect: None,
            deadline: None,
            stall: None,
            body_max: 16 << 20,
            redirects: 0,
            proxy: false,
            keep_alive: true,
            https_only: false,
            headers: HeaderMap::new(),
            authorities: None,
        }
    }
}

impl ClientOptions {
    /// Settings that both clients share: all but `deadline` and `stall`.
    pub(crate) fn builder(self) -> reqwest::ClientBuilder {
        let redirects = match self.redirects {
            0 => Policy::none(),
            n => Policy::limited(n),
        };
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls_of(self.authorities.as_ref()))
            .default_headers(self.headers)
            .redirect(redirects)
            .https_only(self.https_only);
        if let Some(limit) = self.connect {
            builder = builder.connect_timeout(limit);
        }
        if !self.proxy {
            builder = builder.no_proxy();
        }
        if !self.keep_alive {
            builder = builder.pool_max_idle_per_host(0);
        }
        builder
    }
}

/// A client with its limits. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    body_max: u64,
}

impl Client {
    /// Creates a client. Nothing is sent.
    ///
    /// # Errors
    /// If the system lacks what a client needs.
    pub fn new(options: ClientOptions) -> Result<Self, HttpError> {
        let (body_max, deadline, stall) = (options.body_max, options.deadline, options.stall);
        let mut builder = options.builder();
        if let Some(limit) = deadline {
            builder = builder.timeout(limit);
        }
        if let Some(limit) = stall {
            builder = builder.read_timeout(limit);
        }
        let http = builder.build()?;
        Ok(Self { http, body_max })
    }

    /// The client of `reqwest`, for crates that take one.
    pub fn into_inner(self) -> reqwest::Client {
        self.http
    }

    /// A request without a body.
    pub fn request(&self, method: Method, url: &str) -> RequestBuilder {
        self.http.request(method, url)
    }

    /// Sends a request and reads the whole answer, of any status.
    ///
    /// # Errors
    /// [`HttpError`], but for `Status`; `TooLarge` only for statuses of success, because all others are cut.
    pub async fn ask(&self, request: RequestBuilder) -> Result<Answer, HttpError> {
        let response = request.send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let (body, whole) = up_to(response, self.body_max).await?;
        Answer::new(status, headers, body, whole, self.body_max)
    }
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Any status, errors included.
    pub status: StatusCode,
    /// All headers.
    pub headers: HeaderMap,
    /// At most as many bytes as the client reads.
    pub body: Vec<u8>,
}

impl Answer {
    /// Builds an answer from its parts. `whole` is false if the body was cut at `limit` bytes, which is an
    /// error for a successful status.
    pub(crate) fn new(
        status: StatusCode,
        headers: HeaderMap,
        body: Vec<u8>,
        whole: bool,
        limit: u64,
    ) -> Result<Self, HttpError> {
        if whole || !status.is_success() {
            Ok(Self {
                status,
                headers,
                body,
            })
        } else {
            Err(HttpError::TooLarge(limit))
        }
    }

    /// The body of a success.
    ///
    /// # Errors
    /// [`HttpError::Status`] with the first `max_chars` characters for every other status.
    pub fn success(self, max_chars: usize) -> Result<Vec<u8>, HttpError> {
        if self.status.is_success() {
            Ok(self.body)
        } else {
            Err(HttpError::Status {
                code: self.status.as_u16(),
                text: line(&self.body, max_chars),
            })
        }
    }
}

/// The bytes of an answer up to a limit, and whether these are all.
async fn up_to(mut answer: Response, limit: u64) -> Result<(Vec<u8>, bool), HttpError> {
    let mut body = Vec::new();
    while let Some(data) = answer.chunk().await? {
        let room = limit - body.len() as u64;
        let fits = usize::try_from(room).map_or(data.len(), |room| room.min(data.len()));
        body.extend_from_slice(&data[..fits]);
        if fits < data.len() {
            return Ok((body, false));
        }
    }
    Ok((body, true))
}

/// Reads the body of an answer.
///
/// # Errors
/// [`HttpError::TooLarge`] if it has more than `limit` bytes, and those of its connection.
pub async fn read(answer: Response, limit: u64) -> Result<Vec<u8>, HttpError> {
    match up_to(answer, limit).await? {
        (body, true) => Ok(body),
        (_, false) => Err(HttpError::TooLarge(limit)),
    }
}

/// An address of a server, parsed.
///
/// # Errors
/// If it is none, or has another scheme than HTTP or HTTPS.
pub fn address(url: &str) -> Result<Url, HttpError> {
    let wrong = |why: &str| HttpError::Address(why.to_owned());
    let parsed = Url::parse(url);
    let known = |u: &Url| matches!(u.scheme(), "http" | "https");
    if parsed.as_ref().map_or_else(|_| url.contains(':'), known) {
        parsed.map_err(|e| wrong(&e.to_string()))
    } else {
        Err(wrong("it must start with http:// or https://"))
    }
}

/// The header that sends `key` as a bearer token and is not shown in logs.
///
/// # Errors
/// If `key` has characters that no header may have.
pub fn bearer(key: &str) -> Result<HeaderMap, HttpError> {
    let wrong = |_| HttpError::Address("the key has characters that no header may have".to_owned());
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(wrong)?;
    value.set_sensitive(true);
    Ok(HeaderMap::from_iter([(AUTHORIZATION, value)]))
}

/// The pause before a repeat that a server asks for, in whole seconds; dates are not read.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Repeats `attempt` while it may pass. `allowed` shortens a pause, or ends the attempts with `None`.
///
/// # Errors
/// The last failure: `Passing` after the last attempt.
pub async fn retry<T, E, F: Future<Output = Result<T, Failure<E>>>>(
    schedule: Retry,
    mut allowed: impl FnMut(Duration) -> Option<Duration>,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Failure<E>> {
    let mut failed = 0;
    loop {
        let failure = match attempt().await {
            Err(Failure::Passing(why, asked)) => (why, asked),
            other => return other,
        };
        failed += 1;
        match schedule.pause(failed, failure.1).and_then(&mut allowed) {
            Some(pause) => tokio::time::sleep(pause).await,
            None => return Err(Failure::Passing(failure.0, failure.1)),
        }
    }
}
