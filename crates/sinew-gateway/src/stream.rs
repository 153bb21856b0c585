//! Streamed answers: events in the format of a dialect.

use crate::running::{Event, Subscription};
use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use sinew_dialect::EventWriter;
use std::convert::Infallible;
use std::time::Duration;

/// Interval without an event after which the writer's ping is sent.
const PING_EVERY: Duration = Duration::from_secs(15);

/// A streamed answer: its writer and its source of events.
struct AnswerStream {
    /// Reader of the call. It is dropped with the connection, which aborts the call after the grace time if
    /// no other reader is left.
    reader: Subscription,
    /// Writer for the dialect.
    writer: Box<dyn EventWriter>,
    /// First event, which was read in advance to find out whether the call failed.
    first: Option<Event>,
    begun: bool,
    over: bool,
}

impl AnswerStream {
    async fn next(&mut self) -> String {
        let mut out = String::new();
        if !std::mem::replace(&mut self.begun, true) {
            out.push_str(&self.writer.begin());
        }
        let event = match self.first.take() {
            Some(event) => event,
            None => match tokio::time::timeout(PING_EVERY, self.reader.next()).await {
                Ok(event) => event,
                Err(_) => {
                    out.push_str(&self.writer.ping());
                    return out;
                }
            },
        };
        match event {
            Event::Deltas(deltas) => {
                for delta in &deltas {
                    out.push_str(&self.writer.delta(delta));
                }
            }
            Event::Done(done) => {
                self.over = true;
                out.push_str(&match done {
                    Ok(response) => self.writer.end(&response),
                    Err(error) => self.writer.error(&error),
                });
            }
        }
        out
    }
}

/// Builds a response from `first` and all later events of `reader`. Dropping the response drops the reader.
pub(crate) fn response(
    reader: Subscription,
    writer: Box<dyn EventWriter>,
    first: Event,
) -> Response {
    let kind = writer.content_type();
    let state = AnswerStream {
        reader,
        writer,
        first: Some(first),
        begun: false,
        over: false,
    };
    let frames = futures::stream::unfold(state, |mut state| async move {
        while !state.over {
            let text = state.next().await;
            if !text.is_empty() {
                return Some((Ok::<_, Infallible>(text), state));
            }
        }
        None
    });
    let headers = [(CONTENT_TYPE, kind), (CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(frames)).into_response()
}
