//! Commands whose result is retrieved later: submission, waiting, repetition.
//!
//! A command that is sent again under its number is the same command, so a lost answer costs nothing but
//! time. A result that is gone is asked for once more by submitting the command again.

use super::api::Api;
use super::error::ClientError;
use super::http::{End, Message, fault_of, read, said};
use super::tries::{Fault, Tries};
use futures::stream::{self, StreamExt, TryStreamExt};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sinew_http::header::CONTENT_TYPE;
use sinew_http::{Answer, HttpError};
use std::time::{Duration, Instant};

/// Longest wait for one answer: a service that has no result yet answers before.
const POLL: Duration = Duration::from_secs(45);
/// Shortest time between two questions about one result.
const BETWEEN: Duration = Duration::from_millis(200);
/// Commands that are sent at once.
const AT_ONCE: usize = 8;

/// A command to submit.
pub(crate) struct Job {
    pub(crate) call: &'static str,
    pub(crate) message: Message,
    /// Whether the result is asked for in protobuf.
    pub(crate) wants_protobuf: bool,
}

/// The result of a command.
pub(crate) enum Payload {
    Protobuf(Vec<u8>),
    Json(Vec<u8>),
}

impl Payload {
    /// Reads a result in JSON.
    pub(crate) fn json<T: DeserializeOwned>(&self, call: &'static str) -> Result<T, ClientError> {
        match self {
            Self::Json(body) => read(call, body),
            Self::Protobuf(_) => Err(ClientError::unreadable(call, "protobuf in place of JSON")),
        }
    }

    /// The bytes of a result in protobuf.
    pub(crate) fn protobuf(self, call: &'static str) -> Result<Vec<u8>, ClientError> {
        match self {
            Self::Protobuf(body) => Ok(body),
            Self::Json(_) => Err(ClientError::unreadable(
                call,
                "JSON in place of protobuf: the service speaks a protocol before that of the SDK 0.25",
            )),
        }
    }
}

/// A failure of several commands.
pub(crate) struct GroupError {
    pub(crate) error: ClientError,
    /// Whether the service has taken all commands, so that their numbers are used.
    pub(crate) is_taken: bool,
}

#[derive(Deserialize)]
struct Submitted {
    request_id: String,
}

/// One look at a result.
enum Look {
    Done(Payload),
    /// Not ended; the reason why it waits.
    Waits(String),
    /// The connection failed, or the service is not well.
    Fault(Fault, String),
    /// It is not known any more.
    Gone(u16, String),
}

impl Api {
    /// Submits a command, and returns the id of its result.
    ///
    /// # Errors
    /// The refusal, or the last problem once `end` is over.
    pub(crate) async fn submit(&self, job: &Job, end: End) -> Result<String, ClientError> {
        let submitted: Submitted = self.http.ask(job.call, &job.message, end).await?;
        Ok(submitted.request_id)
    }

    /// Waits for the result of a command that was submitted.
    ///
    /// # Errors
    /// The failure of the command, or the last problem once `end` is over.
    pub(crate) async fn result(
        &self,
        job: &Job,
        request: &str,
        end: End,
    ) -> Result<Payload, ClientError> {
        let call = job.call;
        let mut request = request.to_owned();
        let (mut tries, mut state, mut again) = (Tries::default(), "it waits".to_owned(), true);
        loop {
            let asked = Instant::now();
            let left = end.left();
            if left.is_zero() {
                return Err(end.late(call, state));
            }
            match self.look(job, &request, left.min(POLL)).await? {
                Look::Done(payload) => return Ok(payload),
                Look::Waits(why) => {
                    tries = Tries::default();
                    state = why;
                    let early = BETWEEN.saturating_sub(asked.elapsed());
                    end.pause(call, early, &state).await?;
                }
                Look::Fault(fault, why) => {
                    state = why;
                    match tries.pause(fault) {
                        Some(pause) => end.pause(call, pause, &state).await?,
                        None => return Err(refused(call, fault, state)),
                    }
                }
                Look::Gone(..) if again => {
                    again = false;
                    request = self.submit(job, end).await?;
                }
                Look::Gone(status, text) => return Err(ClientError::of_status(call, status, text)),
            }
        }
    }

    /// Asks for a result once.
    async fn look(&self, job: &Job, request: &str, limit: Duration) -> Result<Look, ClientError> {
        let body = json!({ "request_id": request, "allow_metadata_only": false });
        let mut message = Message::json("/api/v1/retrieve_future", &body);
        if job.wants_protobuf {
            message = message.wanting_protobuf();
        }
        let answer = match self.http.send(&message, limit).await {
            Ok(answer) => answer,
            // A wait that was longer than one answer may be.
            Err(HttpError::Deadline(_)) => return Ok(Look::Waits("no answer yet".to_owned())),
            Err(error) => {
                let why = self.http.fault(job.call, error)?;
                return Ok(Look::Fault(Fault::Connection, why));
            }
        };
        match answer.status.as_u16() {
            200..=299 => ended(job.call, answer),
            408 => Ok(Look::Waits(waiting(&answer.body))),
            status @ (404 | 410) => Ok(Look::Gone(status, said(&answer))),
            status => {
                let text = format!("status {status}: {}", said(&answer));
                Ok(Look::Fault(fault_of(&answer), text))
            }
        }
    }

    /// Submits a command and waits for its result.
    pub(crate) async fn run(&self, job: &Job) -> Result<Payload, ClientError> {
        let end = End::after(self.timeout);
        let request = self.submit(job, end).await?;
        self.result(job, &request, end).await
    }

    /// Submits commands with consecutive numbers and waits for all results, in order. The first one is sent
    /// last: the service computes none before it, and then has all of them at hand.
    pub(crate) async fn run_group(&self, jobs: &[Job]) -> Result<Vec<Payload>, GroupError> {
        let end = End::after(self.timeout);
        let untaken = |error| GroupError {
            error,
            is_taken: false,
        };
        let Some((first, rest)) = jobs.split_first() else {
            return Ok(Vec::new());
        };
        let sent = stream::iter(rest.iter().map(|job| self.submit(job, end)));
        let rest: Vec<String> = sent
            .buffered(AT_ONCE)
            .try_collect()
            .await
            .map_err(untaken)?;
        let first = self.submit(first, end).await.map_err(untaken)?;
        let requests = std::iter::once(first).chain(rest);
        let results = jobs
            .iter()
            .zip(requests)
            .map(|(job, request)| async move { self.result(job, &request, end).await });
        let results: Result<Vec<Payload>, ClientError> =
            stream::iter(results).buffered(AT_ONCE).try_collect().await;
        results.map_err(|error| GroupError {
            error,
            is_taken: true,
        })
    }
}

/// The error of a status for which there is no further attempt.
fn refused(call: &'static str, fault: Fault, text: String) -> ClientError {
    match fault {
        // Some services answer the failure of a command by a status.
        Fault::Status { status: 400, .. } => ClientError::Failed {
            call,
            is_request: true,
            text,
        },
        Fault::Status { status, .. } => ClientError::of_status(call, status, text),
        Fault::Connection => ClientError::Connection { call, why: text },
    }
}

/// The meaning of an answer with a status of success.
fn ended(call: &'static str, answer: Answer) -> Result<Look, ClientError> {
    let content = answer.headers.get(CONTENT_TYPE);
    let content = content.and_then(|value| value.to_str().ok());
    if content.is_some_and(|content| content.contains(crate::wire::PROTOBUF)) {
        return Ok(Look::Done(Payload::Protobuf(answer.body)));
    }
    let body: Value = read(call, &answer.body)?;
    if body.get("type").is_some_and(|kind| kind == "try_again") {
        return Ok(Look::Waits(waiting(&answer.body)));
    }
    let Some(error) = body.get("error") else {
        return Ok(Look::Done(Payload::Json(answer.body)));
    };
    let text = error
        .as_str()
        .map_or_else(|| error.to_string(), str::to_owned);
    Err(ClientError::Failed {
        call,
        is_request: body
            .get("category")
            .is_some_and(|category| category == "user"),
        text,
    })
}

/// The reason why a command waits, in words.
fn waiting(body: &[u8]) -> String {
    let read: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |key: &str| read.get(key).and_then(Value::as_str);
    match (text("queue_state"), text("queue_state_reason")) {
        (Some(state), Some(reason)) => format!("its queue is {state}: {reason}"),
        (Some(state), None) => format!("its queue is {state}"),
        (None, _) => "it is computed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_http::StatusCode;
    use sinew_http::header::{HeaderMap, HeaderValue};

    fn answer(content: &'static str, body: &Value) -> Answer {
        Answer {
            status: StatusCode::OK,
            headers: HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(content))]),
            body: body.to_string().into_bytes(),
        }
    }

    fn looked(body: &Value) -> Result<Look, ClientError> {
        ended("forward", answer("application/json", body))
    }

    #[test]
    fn answers_are_results_waits_or_failures() {
        let done = looked(&json!({ "path": "tinker://a/weights/b" })).unwrap();
        assert!(matches!(done, Look::Done(Payload::Json(_))));
        let bytes = ended("forward", answer(crate::wire::PROTOBUF, &json!({}))).unwrap();
        assert!(matches!(bytes, Look::Done(Payload::Protobuf(_))));
        let state = json!({
            "type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy",
        });
        let waits = looked(&state).unwrap();
        assert!(matches!(&waits, Look::Waits(why) if why == "its queue is paused_capacity: busy"));
        for (category, is_request) in [("user", true), ("server", false), ("unknown", false)] {
            let failed = looked(&json!({ "error": "no", "category": category })).err();
            let expected = ClientError::Failed {
                call: "forward",
                is_request,
                text: "no".into(),
            };
            assert_eq!(failed, Some(expected));
        }
    }
}
