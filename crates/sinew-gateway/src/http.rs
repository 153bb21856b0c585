//! Routes, authorization, bodies and streams.

use crate::dialect::anthropic::Messages;
use crate::dialect::chat::Chat;
use crate::dialect::completions::Completions;
use crate::dialect::fields::{Fields, Notes};
use crate::dialect::responses::Responses;
use crate::dialect::{Dialect, EventWriter, openai_error};
use crate::error::ApiError;
use crate::flight::{Event, Subscription};
use crate::gateway::{Gateway, Retry, Rollout};
use crate::live;
use crate::mount::{MountRequest, Mounted};
use crate::secret::Secret;
use crate::session::{FinishRequest, Reward, RolloutSpec};
use bytes::Bytes;
use futures::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Body, Frame};
use hyper::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName,
    HeaderValue,
};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sinew_types::EpisodeId;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// Sent when nothing else is, so that both sides see a dead connection.
const PING_EVERY: Duration = Duration::from_secs(15);

/// Bodies above this are read, rendered and tokenized where that holds up nobody else: it takes
/// up to a second for the largest.
const LARGE_BODY_BYTES: usize = 128 << 10;

/// Longest body of the control API.
const MAX_CONTROL_BYTES: usize = 256 << 10;

pub(crate) type ResponseBody = UnsyncBoxBody<Bytes, Infallible>;

/// What a request is answered from.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) gateway: Gateway,
    pub(crate) control: Secret,
    pub(crate) mounted: Option<Mounted>,
}

/// Where a request goes.
enum Route<'a> {
    Health,
    Metrics,
    Rollouts,
    Rollout(&'a str),
    Reward(&'a str),
    Finish(&'a str),
    Models(&'a str),
    OneModel(&'a str, String),
    Model(&'a str, &'static dyn Dialect),
    CountTokens(&'a str),
}

impl<'a> Route<'a> {
    fn of(path: &'a str) -> Option<Self> {
        // As clients put addresses together, a slash may be doubled or left at the end.
        let segments: Vec<&str> = path.split('/').filter(|s| !s.is_empty()).collect();
        Some(match segments.as_slice() {
            ["health"] => Self::Health,
            ["metrics"] => Self::Metrics,
            ["rollouts"] => Self::Rollouts,
            ["rollouts", id] => Self::Rollout(id),
            ["rollouts", id, "reward"] => Self::Reward(id),
            ["rollouts", id, "finish"] => Self::Finish(id),
            ["r", id, "v1", "models"] => Self::Models(id),
            ["r", id, "v1", "models", name @ ..] => Self::OneModel(id, name.join("/")),
            ["r", id, "v1", "messages", "count_tokens"]
            | ["r", id, "v1", "v1", "messages", "count_tokens"] => Self::CountTokens(id),
            ["r", id, "v1", rest @ ..] => Self::Model(id, dialect(rest)?),
            _ => return None,
        })
    }

    fn methods(&self) -> &'static [&'static str] {
        match self {
            Self::Health
            | Self::Metrics
            | Self::Rollout(_)
            | Self::Models(_)
            | Self::OneModel(..) => &["GET"],
            Self::Rollouts => &["GET", "POST"],
            _ => &["POST"],
        }
    }
}

/// The dialect that is spoken at a path below `/v1`.
fn dialect(path: &[&str]) -> Option<&'static dyn Dialect> {
    match path {
        ["chat", "completions"] => Some(&Chat),
        ["completions"] => Some(&Completions),
        ["responses"] => Some(&Responses),
        // Anthropic's clients put `/v1` after their base URL.
        ["messages"] | ["v1", "messages"] => Some(&Messages),
        _ => None,
    }
}

impl Service {
    /// Answers one request.
    pub(crate) async fn handle<B>(self, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        match self.route(request).await {
            Ok(response) => response,
            Err((error, dialect)) => {
                let body = dialect.map_or_else(|| openai_error(&error), |d| d.error(&error));
                error_response(&error, &body)
            }
        }
    }

    async fn route<B>(
        self,
        request: Request<B>,
    ) -> Result<Response<ResponseBody>, (ApiError, Option<&'static dyn Dialect>)>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let (head, body) = request.into_parts();
        let path = head.uri.path();
        let plain = |e: ApiError| (e, None);
        let mounted = self.mounted.as_ref();
        if let Some((mounted, methods)) = mounted.and_then(|m| Some((m, m.mount.methods(path)?))) {
            return self
                .mounted(mounted, methods, &head, body)
                .await
                .map_err(plain);
        }
        let Some(route) = Route::of(path) else {
            // A stranger is not told which paths exist, but where a model is served.
            let hint = match path.starts_with("/v1/") {
                true => "; models are served under the `base_url` that POST /rollouts answers with",
                false => "",
            };
            return Err(plain(ApiError::not_found(format!(
                "there is no {path}{hint}"
            ))));
        };
        if !route.methods().contains(&head.method.as_str()) {
            return Err(plain(ApiError::method(&route.methods().join(" or "))));
        }
        let key = bearer(&head.headers);
        if let Route::Model(id, dialect) = route {
            let told = |e: ApiError| (e, Some(dialect));
            let rollout = self.gateway.authorize(id, key).map_err(told)?;
            let limit = self.gateway.config().server.max_body_bytes;
            let bytes = self.read(&head.headers, body, limit).await.map_err(told)?;
            return self
                .model(rollout, dialect, head, bytes)
                .await
                .map_err(told);
        }
        if let Route::CountTokens(id) = route {
            let told = |e: ApiError| (e, Some(&Messages as &'static dyn Dialect));
            self.gateway.authorize(id, key).map_err(told)?;
            let limit = self.gateway.config().server.max_body_bytes;
            let bytes = self.read(&head.headers, body, limit).await.map_err(told)?;
            let gateway = self.gateway.clone();
            let count = move |body: &[u8]| gateway.count_tokens(body);
            let tokens = reading(bytes, count).await.map_err(told)?;
            let value = json!({"input_tokens": tokens});
            return Ok(json_response(StatusCode::OK, &value));
        }
        if let Route::Models(id) = route {
            self.gateway.authorize(id, key).map_err(plain)?;
            let list = json!([model(&self.gateway.config().model)]);
            let value = json!({"object": "list", "data": list});
            return Ok(json_response(StatusCode::OK, &value));
        }
        if let Route::OneModel(id, name) = &route {
            // Any name is taken, and answers repeat it.
            self.gateway.authorize(id, key).map_err(plain)?;
            return Ok(json_response(StatusCode::OK, &model(name)));
        }
        self.control(route, key, &head, body).await.map_err(plain)
    }

    /// A path that something else answers.
    async fn mounted<B>(
        &self,
        mounted: &Mounted,
        methods: &'static [&'static str],
        head: &Parts,
        body: B,
    ) -> Result<Response<ResponseBody>, ApiError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let trusted = bearer(&head.headers).is_some_and(|key| self.control.matches(key));
        if !trusted {
            return Err(ApiError::unauthorized("this path needs the control token"));
        }
        if !methods.contains(&head.method.as_str()) {
            return Err(ApiError::method(methods[0]));
        }
        let text = |name: &HeaderName| head.headers.get(name).and_then(|v| v.to_str().ok());
        if let Some(encoding) = text(&CONTENT_ENCODING).filter(|e| *e != "identity") {
            let message = format!("content-encoding {encoding:?}: send the body as it is");
            return Err(ApiError {
                status: 415,
                ..ApiError::bad_request("content_encoding", message)
            });
        }
        // Before the body is read: bodies are large, and few are held at once.
        let permit = Arc::clone(&mounted.room).acquire_owned().await;
        let limit = mounted.mount.max_body_bytes();
        let content_type = text(&CONTENT_TYPE).unwrap_or_default();
        let content_type = content_type.split(';').next().unwrap_or_default();
        let request = MountRequest {
            method: head.method.as_str().to_owned(),
            path: head.uri.path().to_owned(),
            query: head.uri.query().unwrap_or_default().to_owned(),
            content_type: content_type.trim().to_lowercase(),
            body: self.read(&head.headers, body, limit).await?,
        };
        let mount = Arc::clone(&mounted.mount);
        let answered = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            mount.answer(request)
        });
        let told = answered
            .await
            .map_err(|e| ApiError::server("mount_failed", format!("the answer failed: {e}")))?;
        let mut response = Response::new(Full::new(Bytes::from(told.body)).boxed_unsync());
        *response.status_mut() =
            StatusCode::from_u16(told.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = HeaderValue::from_static(told.content_type);
        response.headers_mut().insert(CONTENT_TYPE, kind);
        if told.status == 429 {
            let wait = HeaderValue::from_static("1");
            response.headers_mut().insert("retry-after", wait);
        }
        Ok(response)
    }

    fn metrics(&self) -> Response<ResponseBody> {
        let engine = self.gateway.engine_status();
        let text = self.gateway.stats().prometheus(&engine);
        let mut response = Response::new(Full::new(Bytes::from(text)).boxed_unsync());
        let kind = HeaderValue::from_static("text/plain; version=0.0.4");
        response.headers_mut().insert("content-type", kind);
        response
    }

    async fn control<B>(
        &self,
        route: Route<'_>,
        key: Option<&str>,
        head: &Parts,
        body: B,
    ) -> Result<Response<ResponseBody>, ApiError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let trusted = key.is_some_and(|key| self.control.matches(key));
        if matches!(route, Route::Health) {
            // Without the secret: that it runs, and nothing about what it does.
            let mut health = json!({"status": "ok"});
            if trusted {
                health["gateway"] = json!(self.gateway.stats());
                health["engine"] = json!(self.gateway.engine_status());
            }
            return Ok(json_response(StatusCode::OK, &health));
        }
        if !trusted {
            return Err(ApiError::unauthorized("this path needs the control token"));
        }
        let bytes = match head.method {
            Method::POST => self.read(&head.headers, body, MAX_CONTROL_BYTES).await?,
            _ => Bytes::new(),
        };
        match route {
            Route::Rollouts if head.method == Method::GET => {
                let live = self.gateway.live(live::limit(head.uri.query())?);
                Ok(json_response(StatusCode::OK, &json!(live)))
            }
            Route::Rollouts => {
                let spec: RolloutSpec = parse_control(&bytes)?;
                let credentials = self.gateway.open_durably(spec).await?;
                Ok(json_response(StatusCode::CREATED, &json!(credentials)))
            }
            Route::Rollout(id) => {
                let view = self.gateway.view(&EpisodeId::new(id)).await?;
                Ok(json_response(StatusCode::OK, &json!(view)))
            }
            Route::Reward(id) => {
                let reward: Reward = parse_control(&bytes)?;
                if let Some(receipt) = self.gateway.score(&EpisodeId::new(id), &reward)? {
                    receipt.wait().await?;
                }
                Ok(json_response(StatusCode::OK, &json!({"id": id})))
            }
            Route::Finish(id) => self.finish(&EpisodeId::new(id), &bytes).await,
            Route::Metrics => Ok(self.metrics()),
            Route::Health
            | Route::Models(_)
            | Route::OneModel(..)
            | Route::Model(..)
            | Route::CountTokens(_) => Err(ApiError::not_found("not a path of the control API")),
        }
    }

    async fn finish(
        &self,
        id: &EpisodeId,
        bytes: &[u8],
    ) -> Result<Response<ResponseBody>, ApiError> {
        let asked: FinishRequest = parse_control(bytes)?;
        if let Some(reward) = &asked.reward {
            self.gateway.reward(id, reward)?;
        }
        let trace = self.gateway.finish(id, asked.end).await?;
        let body = json!({
            "id": id,
            "end": trace.end,
            "reward": trace.score(),
            "success": trace.score().map(|_| trace.outcome.success),
            "sampled_tokens": trace.sampled_tokens(),
            "branches": trace.leaves().len(),
            "metrics": trace.outcome.metrics,
            "ignored_fields": trace.ignored,
        });
        Ok(json_response(StatusCode::OK, &body))
    }

    /// A whole body within its limits of size and time.
    async fn read<B>(&self, headers: &HeaderMap, body: B, limit: usize) -> Result<Bytes, ApiError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let length = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok());
        let length = length.and_then(|v| v.parse::<usize>().ok());
        if length.is_some_and(|n| n > limit) {
            return Err(ApiError::too_large(limit));
        }
        let timeout = self.gateway.config().server.read_timeout;
        let read = tokio::time::timeout(timeout, Limited::new(body, limit).collect());
        match read.await {
            Err(_) => Err(ApiError {
                status: 408,
                ..ApiError::deadline("the request body did not arrive in time")
            }),
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(e)) if e.is::<LengthLimitError>() => Err(ApiError::too_large(limit)),
            Ok(Err(e)) => Err(ApiError::bad_request(
                "body_unreadable",
                format!("the request body could not be read: {e}"),
            )),
        }
    }

    async fn model(
        &self,
        rollout: Arc<Rollout>,
        dialect: &'static dyn Dialect,
        head: Parts,
        body: Bytes,
    ) -> Result<Response<ResponseBody>, ApiError> {
        let gateway = self.gateway.clone();
        let begin = move |body: &[u8]| {
            let retry = retry_of(&head.headers, head.uri.path());
            gateway.call(&rollout, dialect, body, retry)
        };
        let mut reader = reading(body, begin).await?;
        if !reader.context().request.stream {
            let response = reader.response().await?;
            let value = dialect.response(reader.context(), &response);
            return Ok(json_response(StatusCode::OK, &value));
        }
        // Failures before the first token still have a status of their own.
        let first = match reader.next().await {
            Event::Done(Err(error)) => return Err(error),
            event => event,
        };
        let writer = dialect.stream(reader.context().clone());
        Ok(stream_response(reader, writer, first))
    }
}

/// Does what a body asks, on a thread that may be held up if the body is large.
async fn reading<T: Send + 'static>(
    body: Bytes,
    work: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() <= LARGE_BODY_BYTES {
        return work(&body);
    }
    let done = tokio::task::spawn_blocking(move || work(&body)).await;
    done.unwrap_or_else(|e| Err(ApiError::server("call_failed", e.to_string())))
}

/// A model, as OpenAI's clients list it.
fn model(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "sinew"})
}

/// The secret of a request, as OpenAI's or as Anthropic's clients send it.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
    let authorization = text(&AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        let bearer = scheme.eq_ignore_ascii_case("bearer");
        bearer.then(|| key.trim_start())
    });
    authorization.or_else(|| text(&HeaderName::from_static("x-api-key")))
}

fn retry_of<'a>(headers: &'a HeaderMap, path: &'a str) -> Retry<'a> {
    let text = |name: &'static str| headers.get(name).and_then(|v| v.to_str().ok());
    // OpenAI's client sends a new key with every call and the same one with its retries.
    let idempotency = text("idempotency-key");
    let count = text("x-stainless-retry-count").and_then(|v| v.parse::<u32>().ok());
    Retry {
        path,
        idempotency,
        again: idempotency.is_some() || count.is_some_and(|n| n > 0),
    }
}

/// A body of the control API; an empty one is an empty object.
fn parse_control<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // Syntax first, so that its errors are told apart from wrong fields.
    Fields::parse(bytes, &Notes::new(true))?;
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        let told = plain_words(&e.into_inner().to_string());
        match path.as_str() {
            "." => ApiError::bad_request("invalid_value", told),
            path => ApiError::invalid(path, format!("{path}: {told}")),
        }
    })
}

/// What serde says of a value, without Rust's words and the place in a line that nobody wrote.
fn plain_words(told: &str) -> String {
    let end = told.rfind(" at line ").unwrap_or(told.len());
    let mut told = told[..end].to_owned();
    for (rust, plain) in [
        ("invalid type: ", ""),
        ("invalid value: ", ""),
        ("u32", "a whole number from 0 to 4294967295"),
        ("u64", "a whole number from 0 on"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("a boolean", "true or false"),
        ("a map", "an object"),
        ("sequence", "an array"),
        ("struct SamplingDefaults", "an object"),
        ("struct Reward", "an object"),
        (
            "internally tagged enum EpisodeEnd",
            "an object whose type is terminated, truncated or failed",
        ),
        ("variant", "value"),
    ] {
        told = told.replace(rust, plain);
    }
    told
}

fn json_response(status: StatusCode, value: &Value) -> Response<ResponseBody> {
    let body = Full::new(Bytes::from(value.to_string())).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert("content-type", json);
    response
}

fn error_response(error: &ApiError, body: &Value) -> Response<ResponseBody> {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(status, body);
    if let Some(seconds) = error.retry_after_s {
        response
            .headers_mut()
            .insert("retry-after", HeaderValue::from(seconds));
    }
    response
}

/// An answer in parts: what is written, and what comes next.
struct Streaming {
    reader: Subscription,
    writer: Box<dyn EventWriter>,
    /// An event that was taken to see whether there is a stream.
    first: Option<Event>,
    begun: bool,
    over: bool,
}

impl Streaming {
    async fn next(&mut self) -> String {
        let mut out = String::new();
        if !std::mem::replace(&mut self.begun, true) {
            out.push_str(&self.writer.begin());
        }
        let event = match self.first.take() {
            Some(event) => event,
            None => match tokio::time::timeout(PING_EVERY, self.reader.next()).await {
                Ok(event) => event,
                Err(_) => return ": ping\n\n".into(),
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

fn stream_response(
    reader: Subscription,
    writer: Box<dyn EventWriter>,
    first: Event,
) -> Response<ResponseBody> {
    let state = Streaming {
        reader,
        writer,
        first: Some(first),
        begun: false,
        over: false,
    };
    let frames = stream::unfold(state, |mut state| async move {
        while !state.over {
            let text = state.next().await;
            if !text.is_empty() {
                let frame = Frame::data(Bytes::from(text));
                return Some((Ok::<_, Infallible>(frame), state));
            }
        }
        None
    });
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(
        "content-type",
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert("cache-control", HeaderValue::from_static("no-cache"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a body of so many bytes is read on the thread that runs everything else.
    async fn holds_up_others(bytes: usize) -> bool {
        let here = std::thread::current().id();
        let same = move |body: &[u8]| Ok((body.len(), std::thread::current().id() == here));
        let (read, same) = reading(vec![b' '; bytes].into(), same).await.unwrap();
        assert_eq!(read, bytes);
        same
    }

    #[tokio::test(flavor = "current_thread")]
    async fn large_bodies_hold_up_nobody_else() {
        assert!(holds_up_others(LARGE_BODY_BYTES).await);
        assert!(!holds_up_others(LARGE_BODY_BYTES + 1).await);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_panic_over_a_large_body_is_an_answer() {
        let body = vec![b' '; LARGE_BODY_BYTES + 1];
        let panics = |_: &[u8]| -> Result<(), ApiError> { panic!("on purpose") };
        let error = reading(body.into(), panics).await.unwrap_err();
        assert_eq!((error.status, error.code), (500, "call_failed"));
    }
}
