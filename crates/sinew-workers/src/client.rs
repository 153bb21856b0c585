//! A worker's client of the owner's desk.

use crate::desk::MAX_PART;
use crate::terms::{PublishedMark, RunTerms, TicketOrders, WorkerReport};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinew_http::blocking::{Client, RequestBuilder, retry};
use sinew_http::header::{CONTENT_RANGE, CONTENT_TYPE, HeaderMap, RANGE};
use sinew_http::{ClientOptions, Failure, HttpError, Method, Retry, may_pass};
use sinew_store::queue::pack;
use sinew_types::Trace;
use std::time::{Duration, Instant};

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an answer, beyond that of a wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pauses between two attempts at the facts of the run. Only the patience ends them.
const PAUSES: Retry = Retry::doubling(u32::MAX, Duration::from_millis(100), Duration::from_secs(2));
/// Maximum bytes of an answer: a recipe, or a part of a file.
const MAX_ANSWER: u64 = 2 * MAX_PART;

/// Reasons for which the owner gives no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeskError {
    /// It cannot be reached, or answers later.
    #[error("the owner at {url} does not answer: {why}")]
    Away {
        /// Address of the owner.
        url: String,
        /// Reason, in words.
        why: String,
    },
    /// It refuses.
    #[error("the owner at {url} refused: status {status}: {message}")]
    Refused {
        /// Address of the owner.
        url: String,
        /// Status of its answer.
        status: u16,
        /// Its words.
        message: String,
    },
    /// Its answer is not what this program reads.
    #[error("the owner at {url} answers something else: {why}")]
    Answer {
        /// Address of the owner.
        url: String,
        /// Reason, in words.
        why: String,
    },
    /// The address or the token cannot be used.
    #[error("--owner {url}: {why}")]
    Address {
        /// The address.
        url: String,
        /// Reason, in words.
        why: String,
    },
}

impl DeskError {
    /// Whether the same call may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Away { .. })
    }

    /// Whether the owner has no such weights any more.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

/// The desk of a run, over HTTP. It must not be used on a thread of an async runtime.
pub struct DeskClient {
    client: Client,
    url: String,
    token: String,
}

sinew_types::debug_fields!(DeskClient, url);

/// A part of a file, and the length of the whole.
#[derive(Clone, Debug)]
pub struct FilePart {
    /// Bytes from the place that was asked for.
    pub bytes: Vec<u8>,
    /// Bytes of the file.
    pub length: u64,
}

impl DeskClient {
    /// The desk at an address such as `http://10.0.0.1:9000`. Nothing is sent.
    ///
    /// # Errors
    /// If it is no address, or the system lacks what a client needs.
    pub fn new(url: &str, token: &str) -> Result<Self, DeskError> {
        let wrong = |why: String| DeskError::Address {
            url: url.to_owned(),
            why,
        };
        sinew_http::address(url).map_err(|e| wrong(e.to_string()))?;
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            deadline: Some(ANSWER_TIMEOUT),
            body_max: MAX_ANSWER,
            proxy: true,
            ..ClientOptions::default()
        });
        Ok(Self {
            client: client.map_err(|e| wrong(e.to_string()))?,
            url: url.trim_end_matches('/').to_owned(),
            token: token.to_owned(),
        })
    }

    /// Address of the owner.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Facts of the run, asked for until the patience ends or `stop` is true.
    ///
    /// # Errors
    /// If the owner does not answer in this time, or refuses.
    pub fn terms(
        &self,
        patience: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<RunTerms, DeskError> {
        let end = Instant::now() + patience;
        let left = |pause: Duration| {
            let left = end.saturating_duration_since(Instant::now());
            (!left.is_zero() && !stop()).then(|| pause.min(left))
        };
        let attempt = || match self.get::<RunTerms>("/run", ANSWER_TIMEOUT) {
            Err(DeskError::Away { why, .. }) => Err(Failure::Passing(why, None)),
            other => other.map_err(Failure::Lasting),
        };
        retry(PAUSES, left, attempt).map_err(|failure| match failure {
            Failure::Lasting(error) => error,
            Failure::Passing(why, _) => self.away(format!(
                "{why} (asked for {} s)\n  hint: is `sinew train RECIPE --control ADDR` running there?",
                patience.as_secs()
            )),
        })
    }

    /// Reports, and returns the owner's orders. One attempt.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn report(&self, report: &WorkerReport) -> Result<TicketOrders, DeskError> {
        // A report is a plain structure, which always has a form in JSON.
        let body = serde_json::to_vec(report).unwrap_or_default();
        let request = self.request(Method::POST, "/tickets");
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        self.read(self.send(request)?.1)
    }

    /// Brings a rollout that an agent finished: it is durable once this returns. One attempt.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn finish(&self, trace: &Trace) -> Result<(), DeskError> {
        let body = pack(trace.episode.as_str(), trace);
        let body = body.map_err(|e| self.answer(e.to_string()))?;
        let request = self.request(Method::POST, "/live");
        let request = request.header(CONTENT_TYPE, "application/octet-stream");
        self.send(request.body(body)).map(drop)
    }

    /// The newest weights, as soon as their manifest has another hash than `seen`, at most after a time. One
    /// attempt.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn weights(
        &self,
        seen: &str,
        at_most: Duration,
    ) -> Result<Option<PublishedMark>, DeskError> {
        let path = format!("/weights?seen={seen}&ms={}", at_most.as_millis());
        self.get(&path, ANSWER_TIMEOUT + at_most)
    }

    /// A part of a file of published weights, from a byte on. One attempt.
    ///
    /// # Errors
    /// If the owner does not answer, refuses, or has these weights no more.
    pub fn part(&self, weights: &str, file: &str, from: u64) -> Result<FilePart, DeskError> {
        let to = from.saturating_add(MAX_PART - 1);
        let request = self.request(Method::GET, &format!("/weights/{weights}/{file}"));
        let (headers, bytes) = self.send(request.header(RANGE, format!("bytes={from}-{to}")))?;
        let length = length(&headers, from, bytes.len() as u64);
        let length = length.ok_or_else(|| self.answer("its part of a file has another range"))?;
        Ok(FilePart { bytes, length })
    }

    fn get<T: DeserializeOwned>(&self, path: &str, limit: Duration) -> Result<T, DeskError> {
        let request = self.request(Method::GET, path).timeout(limit);
        self.read(self.send(request)?.1)
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}{path}", self.url);
        self.client.request(method, &url).bearer_auth(&self.token)
    }

    /// Headers and body of a successful answer.
    fn send(&self, request: RequestBuilder) -> Result<(HeaderMap, Vec<u8>), DeskError> {
        let answer = match self.client.ask(request) {
            Ok(answer) => answer,
            Err(e @ (HttpError::TooLarge(_) | HttpError::Address(_))) => {
                return Err(self.answer(e.to_string()));
            }
            Err(e) => return Err(self.away(e.to_string())),
        };
        let status = answer.status.as_u16();
        if answer.status.is_success() {
            return Ok((answer.headers, answer.body));
        }
        let value: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let said = value["error"]["message"].as_str();
        let message = sinew_http::line(said.unwrap_or_default().as_bytes(), 400);
        if may_pass(status) {
            return Err(self.away(format!("status {status}: {message}")));
        }
        Err(DeskError::Refused {
            url: self.url.clone(),
            status,
            message,
        })
    }

    fn read<T: DeserializeOwned>(&self, body: Vec<u8>) -> Result<T, DeskError> {
        serde_json::from_slice(&body).map_err(|e| self.answer(e.to_string()))
    }

    fn away(&self, why: String) -> DeskError {
        DeskError::Away {
            url: self.url.clone(),
            why,
        }
    }

    fn answer(&self, why: impl Into<String>) -> DeskError {
        DeskError::Answer {
            url: self.url.clone(),
            why: why.into(),
        }
    }
}

/// The length of a file in `content-range`, whose range must be the bytes that came.
fn length(headers: &HeaderMap, from: u64, bytes: u64) -> Option<u64> {
    let range = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (span, length) = range.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = span.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let length: u64 = length.parse().ok()?;
    let fits = first == from && bytes > 0 && last == from + bytes - 1 && last < length;
    fits.then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_another_range_is_refused() {
        let headers = |range: &str| HeaderMap::from_iter([(CONTENT_RANGE, range.parse().unwrap())]);
        assert_eq!(length(&headers("bytes 3-5/10"), 3, 3), Some(10));
        for (range, from, bytes) in [
            ("bytes 3-5/10", 2, 3),
            ("bytes 3-5/10", 3, 2),
            ("bytes 3-12/10", 3, 10),
            ("bytes 3-5/*", 3, 3),
            ("lines 3-5/10", 3, 3),
        ] {
            assert_eq!(length(&headers(range), from, bytes), None, "{range}");
        }
    }

    #[test]
    fn an_address_is_checked_before_anything_is_sent() {
        let refused = DeskClient::new("ftp://a", "t").unwrap_err().to_string();
        assert!(refused.contains("--owner ftp://a"), "{refused}");
        let away = DeskError::Away {
            url: "u".into(),
            why: "w".into(),
        };
        assert!(away.may_pass() && !away.is_gone());
    }
}
