//! The client of threads that may block.

use crate::client::{Answer, ClientOptions};
use crate::error::HttpError;
use crate::retry::{Failure, Retry};
use crate::trust::cause;
use reqwest::Method;
pub use reqwest::blocking::{RequestBuilder, Response};
use std::io::Read;
use std::time::Duration;

/// A client with its limits. It must not be made, used or dropped on a thread of a runtime.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::blocking::Client,
    deadline: Option<Duration>,
    body_max: u64,
}

impl Client {
    /// Creates a client. Nothing is sent.
    ///
    /// # Errors
    /// If the system lacks what a client needs.
    pub fn new(options: ClientOptions) -> Result<Self, HttpError> {
        let (body_max, deadline, stall) = (options.body_max, options.deadline, options.stall);
        let builder = reqwest::blocking::ClientBuilder::from(options.builder());
        // This time holds for each wait.
        let http = builder.timeout(stall).build()?;
        Ok(Self {
            http,
            deadline,
            body_max,
        })
    }

    /// A request without a body.
    pub fn request(&self, method: Method, url: &str) -> RequestBuilder {
        let request = self.http.request(method, url);
        match self.deadline {
            Some(limit) => request.timeout(limit),
            None => request,
        }
    }

    /// Sends a request and reads the whole answer, of any status.
    ///
    /// # Errors
    /// [`HttpError`], but for `Status`; `TooLarge` only for statuses of success, because all others are cut.
    pub fn ask(&self, request: RequestBuilder) -> Result<Answer, HttpError> {
        let response = request.send()?;
        let (status, headers) = (response.status(), response.headers().clone());
        let (body, whole) = up_to(response, self.body_max)?;
        Answer::new(status, headers, body, whole, self.body_max)
    }
}

/// The bytes of an answer up to a limit, and whether these are all.
fn up_to(answer: Response, limit: u64) -> Result<(Vec<u8>, bool), HttpError> {
    let mut body = Vec::new();
    let read = answer.take(limit.saturating_add(1)).read_to_end(&mut body);
    read.map_err(|e| HttpError::Body(cause(&e)))?;
    let whole = body.len() as u64 <= limit;
    if !whole {
        body.pop();
    }
    Ok((body, whole))
}

/// Reads the body of an answer.
///
/// # Errors
/// [`HttpError::TooLarge`] if it has more than `limit` bytes, and those of its connection.
pub fn read(answer: Response, limit: u64) -> Result<Vec<u8>, HttpError> {
    match up_to(answer, limit)? {
        (body, true) => Ok(body),
        (_, false) => Err(HttpError::TooLarge(limit)),
    }
}

/// Repeats `attempt` while it may pass. `allowed` shortens a pause, or ends the attempts with `None`.
///
/// # Errors
/// The last failure: `Passing` after the last attempt.
pub fn retry<T, E>(
    schedule: Retry,
    mut allowed: impl FnMut(Duration) -> Option<Duration>,
    mut attempt: impl FnMut() -> Result<T, Failure<E>>,
) -> Result<T, Failure<E>> {
    let mut failed = 0;
    loop {
        let failure = match attempt() {
            Err(Failure::Passing(why, asked)) => (why, asked),
            other => return other,
        };
        failed += 1;
        match schedule.pause(failed, failure.1).and_then(&mut allowed) {
            Some(pause) => std::thread::sleep(pause),
            None => return Err(Failure::Passing(failure.0, failure.1)),
        }
    }
}
