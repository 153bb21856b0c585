//! A generation of the engine inside a mock, streamed in its server's form.

use super::serve::{Answer, Body, error};
use super::{Fault, Kind, MODEL, State, VOCAB};
use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::Response;
use hyper::body::Frame;
use serde_json::Value;
use sinew_infer::FakeModel;
use sinew_types::{
    AdapterName, Engine, EngineEvent, FinishReason, GenerateRequest, PromptLogprob, PromptLogprobs,
    RequestId, SampledToken, SamplingParams,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;

/// Content of one event of the stream.
pub(super) struct Piece {
    /// The tokens that are new.
    pub(super) new: Vec<SampledToken>,
    /// All tokens so far.
    pub(super) all: Vec<SampledToken>,
    pub(super) prompt: Vec<u32>,
    pub(super) first: bool,
    pub(super) end: Option<FinishReason>,
    pub(super) cached: u32,
    /// Labels of all tokens so far: label, first position, position after the last one.
    pub(super) spans: Vec<(String, usize, usize)>,
    /// Fault that it must show.
    pub(super) fault: Option<Fault>,
}

impl Piece {
    /// The labels as both servers report them.
    pub(super) fn versions(&self) -> Value {
        let spans = self.spans.iter();
        let of = |(label, start, end): &(String, usize, usize)| {
            let span = [
                ("version", Value::from(label.as_str())),
                ("start", Value::from(*start)),
                ("end", Value::from(*end)),
            ];
            span.into_iter().collect::<Value>()
        };
        spans.map(of).collect()
    }
}

/// Writes a piece as the data of an event.
pub(super) type Write = Box<dyn Fn(&State, &Piece) -> Value + Send + Sync>;

enum Item {
    Data(Vec<u8>),
    /// Breaks the connection.
    Cut,
}

/// Starts a generation and answers with its stream.
pub(super) fn stream_of(
    state: &Arc<State>,
    (prompt, adapter): (Vec<u32>, Option<AdapterName>),
    sampling: SamplingParams,
    write: Write,
    last: Vec<Value>,
) -> Answer {
    let fault = state.faults.lock().unwrap().pop_front();
    if let Some(Fault::Status(status)) = fault {
        return error(status, "told to fail");
    }
    let id = RequestId(state.next_request.fetch_add(1, Ordering::SeqCst));
    let (to, events) = mpsc::unbounded_channel();
    let model = adapter.as_ref().map_or(MODEL, |name| MODEL.adapted(name));
    let request = GenerateRequest {
        adapter,
        ..GenerateRequest::new(id, prompt.clone(), sampling)
    };
    let sink = Box::new(move |event| {
        // Nobody listens once the client has gone.
        let _ = to.send(event);
    });
    if let Err(refused) = state.engine.submit(request, sink) {
        return error(400, &refused.to_string());
    }
    let (send, items) = mpsc::channel(4);
    let teller = Teller {
        state: Arc::clone(state),
        id,
        prompt,
        model,
        fault,
        write,
        last,
        send,
        aborts: state.aborts.load(Ordering::SeqCst),
    };
    tokio::spawn(teller.run(events));
    let items = stream::unfold(items, |mut items| async move {
        let frame = match items.recv().await? {
            Item::Data(data) => Ok(Frame::data(Bytes::from(data))),
            Item::Cut => {
                // The server sends what it was given before it sees the end: hyper drops a buffer that was
                // not written when a body fails, and tokens that were sent in time must arrive.
                tokio::task::yield_now().await;
                Err(io::Error::other("cut"))
            }
        };
        Some((frame, items))
    });
    let body: Body = StreamBody::new(items).boxed_unsync();
    Response::builder()
        .header("content-type", "text/event-stream; charset=utf-8")
        .body(body)
        .unwrap()
}

/// The log-probabilities of a prompt.
pub(super) fn score(
    state: &State,
    prompt: &[u32],
    asked: PromptLogprobs,
    adapter: Option<AdapterName>,
) -> Vec<PromptLogprob> {
    let id = RequestId(state.next_request.fetch_add(1, Ordering::SeqCst));
    let (to, events) = std::sync::mpsc::channel();
    let sampling = SamplingParams {
        max_tokens: 1,
        ..SamplingParams::default()
    };
    let request = GenerateRequest {
        adapter,
        prompt_logprobs: Some(asked),
        ..GenerateRequest::new(id, prompt.to_vec(), sampling)
    };
    let sink = Box::new(move |event| {
        // The rest of it is not read.
        let _ = to.send(event);
    });
    state.engine.submit(request, sink).unwrap();
    match events.recv().unwrap() {
        EngineEvent::Prompt { logprobs, .. } => logprobs,
        other => panic!("{other:?}"),
    }
}

struct Teller {
    state: Arc<State>,
    id: RequestId,
    prompt: Vec<u32>,
    /// The distribution under its adapter.
    model: FakeModel,
    fault: Option<Fault>,
    write: Write,
    last: Vec<Value>,
    send: mpsc::Sender<Item>,
    /// Times that all requests were ended before this one.
    aborts: u64,
}

impl Teller {
    async fn run(self, mut events: mpsc::UnboundedReceiver<EngineEvent>) {
        if self.fault == Some(Fault::Hang) {
            self.send.closed().await;
            return self.gone();
        }
        let mut all: Vec<SampledToken> = Vec::new();
        // The last token is sent together with the reason of the end.
        let mut pending: Vec<SampledToken> = Vec::new();
        let mut told = 0;
        let mut spans = Vec::new();
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = self.send.closed() => return self.gone(),
            };
            while self.state.frozen.load(Ordering::SeqCst) && !self.send.is_closed() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if self.is_aborted() {
                self.state.engine.abort(self.id);
                let mut last = self.piece(Vec::new(), &all, told, Some(FinishReason::Aborted));
                last.spans = spans;
                self.data((self.write)(&self.state, &last).to_string())
                    .await;
                self.data("[DONE]".to_owned()).await;
                return;
            }
            let (new, end) = match event {
                Some(EngineEvent::Prompt { .. }) => continue,
                Some(EngineEvent::Tokens { tokens, .. }) => {
                    (std::mem::replace(&mut pending, tokens), None)
                }
                Some(EngineEvent::Finished { reason, .. }) => {
                    (std::mem::take(&mut pending), Some(reason))
                }
                Some(EngineEvent::Failed { .. }) | None => return,
            };
            if new.is_empty() && end.is_none() {
                continue;
            }
            let new = self.reported(&all, new);
            all.extend(new.iter().cloned());
            let ended = end.is_some();
            self.label(&mut spans, all.len());
            let mut piece = self.piece(new, &all, told, end);
            piece.spans = spans.clone();
            if !self.tell(&piece, told).await {
                return self.gone();
            }
            told += 1;
            if ended {
                break;
            }
        }
        for data in &self.last {
            self.data(data.to_string()).await;
        }
        self.data("[DONE]".to_owned()).await;
    }

    /// Whether all requests were ended since this one began.
    fn is_aborted(&self) -> bool {
        self.state.aborts.load(Ordering::SeqCst) != self.aborts
    }

    /// Waits until generations that stand may continue, or this one ends.
    async fn stand(&self) {
        let released = || self.state.released.load(Ordering::SeqCst);
        while !released() && !self.is_aborted() && !self.send.is_closed() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Adds the label of the newest tokens, `count` of all.
    fn label(&self, spans: &mut Vec<(String, usize, usize)>, count: usize) {
        let label = self.state.label.lock().unwrap().clone();
        match spans.last_mut() {
            Some(last) if last.0 == label => last.2 = count,
            last => {
                let start = last.map_or(0, |last| last.2);
                spans.push((label, start, count));
            }
        }
    }

    /// The inner engine has log-probabilities at the request's temperature; raw logits have none.
    fn reported(&self, all: &[SampledToken], mut new: Vec<SampledToken>) -> Vec<SampledToken> {
        if self.state.kind == Kind::Vllm {
            let mut prefix = self.prompt.clone();
            prefix.extend(all.iter().map(|t| t.id));
            for token in &mut new {
                token.logprob = self.model.logprob(&prefix, token.id);
                for other in &mut token.top {
                    other.logprob = self.model.logprob(&prefix, other.id);
                }
                prefix.push(token.id);
            }
        }
        new
    }

    fn piece(
        &self,
        new: Vec<SampledToken>,
        all: &[SampledToken],
        told: usize,
        end: Option<FinishReason>,
    ) -> Piece {
        let mut piece = Piece {
            new,
            all: all.to_vec(),
            prompt: self.prompt.clone(),
            first: told == 0,
            end,
            cached: 3,
            spans: Vec::new(),
            fault: self.fault.clone(),
        };
        match self.fault {
            Some(Fault::UnknownId) => {
                let edit = |t: &mut SampledToken| t.id = VOCAB as u32;
                piece.new.iter_mut().for_each(edit);
                piece.all.iter_mut().for_each(edit);
            }
            Some(Fault::WrongEcho) => piece.prompt[0] ^= 1,
            Some(Fault::OwnStop) if told == 1 => piece.end = Some(FinishReason::StopId { id: 250 }),
            Some(Fault::OtherWeights) if told == 2 => {
                *self.state.label.lock().unwrap() = "v999-000000aa".to_owned();
            }
            _ => {}
        }
        piece
    }

    /// Whether the client is still there and the stream continues.
    async fn tell(&self, piece: &Piece, told: usize) -> bool {
        let data = (self.write)(&self.state, piece).to_string();
        match self.fault {
            Some(Fault::Slow(ms)) => tokio::time::sleep(Duration::from_millis(ms)).await,
            Some(Fault::StandsAfter(n)) if told >= n => self.stand().await,
            Some(Fault::HangAfter(n)) if told >= n => {
                self.send.closed().await;
                return false;
            }
            Some(Fault::CutAfter(n)) if told >= n => {
                let half = format!("data: {}", &data[..data.len() / 2]);
                let _ = self.send.send(Item::Data(half.into_bytes())).await;
                let _ = self.send.send(Item::Cut).await;
                self.state.engine.abort(self.id);
                return false;
            }
            Some(Fault::SilentAfter(n)) if told >= n => {
                self.state.engine.abort(self.id);
                return false;
            }
            Some(Fault::ErrorAfter(n, code)) if told >= n => {
                let error = serde_json::json!({ "error": { "message": "told to", "code": code }});
                self.data(error.to_string()).await;
                self.state.engine.abort(self.id);
                return false;
            }
            _ => {}
        }
        let data = match self.fault {
            // Python's json writes NaN in this form.
            Some(Fault::NanLogprob) => data.replace("-0.125", "NaN"),
            _ => data,
        };
        self.data(data).await
    }

    async fn data(&self, data: String) -> bool {
        let event = format!("data: {data}\n\n").into_bytes();
        self.send.send(Item::Data(event)).await.is_ok()
    }

    fn gone(&self) {
        self.state.abandoned.fetch_add(1, Ordering::SeqCst);
        self.state.engine.abort(self.id);
    }
}

/// A log-probability as the piece's fault has it; -0.125 marks the place of a NaN.
pub(super) fn logprob(piece: &Piece, token: &SampledToken) -> Value {
    match piece.fault {
        Some(Fault::NanLogprob) => serde_json::json!(-0.125),
        _ => serde_json::json!(token.logprob),
    }
}

/// The id that is sent with the log-probability.
pub(super) fn told_id(piece: &Piece, token: &SampledToken) -> u32 {
    match piece.fault {
        Some(Fault::WrongIds) => token.id ^ 1,
        _ => token.id,
    }
}

/// The fields that both token-id servers call the same.
pub(super) fn sampling_of(body: &Value, max_tokens: &str) -> SamplingParams {
    let number = |key: &str| body.get(key).and_then(Value::as_f64);
    let ids = |key: &str| -> Vec<u32> {
        let list = body.get(key).and_then(Value::as_array);
        list.map(|l| l.iter().map(|v| v.as_u64().unwrap() as u32).collect())
            .unwrap_or_default()
    };
    let texts = |key: &str| -> Vec<String> {
        let list = body.get(key).and_then(Value::as_array);
        list.map(|l| l.iter().map(|v| v.as_str().unwrap().to_owned()).collect())
            .unwrap_or_default()
    };
    let bias = body.get("logit_bias").and_then(Value::as_object);
    let bias = bias.map(|b| {
        let entry = |(k, v): (&String, &Value)| (k.parse().unwrap(), v.as_f64().unwrap() as f32);
        b.iter().map(entry).collect()
    });
    SamplingParams {
        temperature: number("temperature").unwrap_or(1.0) as f32,
        top_p: number("top_p").unwrap_or(1.0) as f32,
        top_k: number("top_k").unwrap_or(0.0).max(0.0) as u32,
        min_p: number("min_p").unwrap_or(0.0) as f32,
        max_tokens: number(max_tokens).unwrap_or(16.0) as u32,
        stop_ids: ids("stop_token_ids"),
        stop_strings: texts("stop"),
        seed: body.get("seed").and_then(Value::as_u64).unwrap_or(0),
        logit_bias: bias.unwrap_or_default(),
        top_logprobs: 0,
        routes_from: None,
        format: None,
    }
}
