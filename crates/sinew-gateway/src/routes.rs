//! Routes, authorization and answers of the server.
//!
//! | path | methods | secret | handler |
//! |---|---|---|---|
//! | `/health` | GET | none; more with the control token | `health` |
//! | `/metrics` | GET | control token | `metrics` |
//! | `/adapters` | GET | control token | `list_adapters` |
//! | `/adapters/{name}` | PUT, DELETE | control token | `put_adapter`, `delete_adapter` |
//! | `/rollouts` | GET, POST | control token | `list`, `open` |
//! | `/rollouts/{id}` | GET | control token | `view` |
//! | `/rollouts/{id}/rewards/{name}` | PUT | control token | `put_score` |
//! | `/rollouts/rewards` | POST | control token | `put_scores` |
//! | `/rollouts/{id}/reward`, `/rollouts/{id}/finish` | POST | control token | `reward`, `finish` |
//! | `/r/{id}/v1/reward` | POST | the rollout's key, if its agent is trusted | `own_reward` |
//! | `/r/{id}/v1/models`, `/r/{id}/v1/models/{name}` | GET | the rollout's key | `models`, `one_model` |
//! | `/r/{id}/v1/chat/completions`, `completions`, `responses`, `messages` | POST | the rollout's key | `call` |
//! | `/r/{id}/v1/messages/count_tokens` | POST | the rollout's key | `count_tokens` |
//! | `/r/{id}/v1beta/models`, `/r/{id}/v1beta/models/{name}` | GET | the rollout's key | `google_models`, `google_model` |
//! | `/r/{id}/v1beta/models/{name}:{method}` | POST | the rollout's key | `google_call` |
//!
//! A path `/v1/...` or `/v1beta/...` with the fixed key of [`GatewayConfig::api_key`](crate::GatewayConfig)
//! is that of a rollout of its conversation ([`crate::fixed_key`]). Else it is that of the rollout whose
//! key, or trace id in `traceparent`, the request has: one client with one base URL serves many rollouts.
//!
//! Secrets are read from `Authorization: Bearer KEY`, `x-api-key` or `x-goog-api-key`, and on paths of
//! Google's API from `?key=KEY`. Authorization comes before the body is read. Errors of model calls have the
//! form of their dialect, all others that of OpenAI.

use crate::adapters;
use crate::archive::blocking;
use crate::body::{self, LargeBody};
use crate::call::Retry;
use crate::fixed_key;
use crate::gateway::Gateway;
use crate::keys::unhex;
use crate::live;
use crate::paths::{GOOGLE_KEY, is_shared, query_key};
use crate::rollout::Rollout;
use crate::running::Event;
use crate::scores;
use crate::secret::Secret;
use crate::session::{FinishRequest, Reward, RolloutSpec};
use crate::stream;
use axum::extract::{Path, Request, State};
use axum::http::header::{
    AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, uri::PathAndQuery};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post, put};
use axum::{Json, Router};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_dialect::anthropic::{self, Messages};
use sinew_dialect::chat::Chat;
use sinew_dialect::completions::Completions;
use sinew_dialect::google::{self, Call};
use sinew_dialect::responses::Responses;
use sinew_dialect::{ApiError, Dialect, ModelRequest, openai_error};
use sinew_http::server::Key;
use sinew_types::{AdapterName, EpisodeId, PolicyVersion};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Maximum size of a control API body, in bytes.
const MAX_CONTROL_BYTES: usize = 256 << 10;
/// Maximum size of an upload's configuration and form, in bytes.
const MAX_FORM_BYTES: usize = 2 << 20;
/// Timeout for an upload to arrive.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// State of the request handlers.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) gateway: Gateway,
    /// Token of the control API.
    pub(crate) control: Secret,
}

type Api = State<Service>;
type Answer = Result<Response, RouteError>;

/// Builds the router with all routes; `more` are additional ones that need the control token.
pub(crate) fn router(service: Service, more: Option<Router>) -> Router {
    let control = Router::new()
        .route("/metrics", only("GET", get(metrics)))
        .route("/adapters", only("GET", get(list_adapters)))
        .route(
            "/adapters/{name}",
            only("PUT or DELETE", put(put_adapter).delete(delete_adapter)),
        )
        .route("/rollouts", only("GET or POST", get(list).post(open)))
        .route("/rollouts/{id}", only("GET", get(view)))
        .route("/rollouts/rewards", only("POST", post(put_scores)))
        .route("/rollouts/{id}/rewards/{name}", only("PUT", put(put_score)))
        .route("/rollouts/{id}/reward", only("POST", post(reward)))
        .route("/rollouts/{id}/finish", only("POST", post(finish)))
        .with_state(service.clone());
    let control = match more {
        Some(more) => control.merge(more),
        None => control,
    };
    let control = control.route_layer(from_fn_with_state(service.clone(), control_only));
    let model = |dialect: &'static dyn Dialect| {
        let answer = async move |api: Api, id: Path<String>, request: Request| {
            let answered = call(api, id, request, dialect).await;
            answered.unwrap_or_else(|error| refusal(&error, &dialect.error(&error)))
        };
        only("POST", post(answer))
    };
    let plain = |dialect: &'static dyn Dialect| {
        let answer = async move |api: Api, request: Request| {
            let answered = plain_call(api, request, dialect).await;
            answered.unwrap_or_else(|error| refusal(&error, &dialect.error(&error)))
        };
        only("POST", post(answer))
    };
    let count = || only("POST", post(count_tokens));
    Router::new()
        .route("/health", only("GET", get(health)))
        // Clients look here whether a server answers.
        .route("/", only("GET", get(alive)))
        .route("/v1", only("GET", get(alive)))
        .route("/r/{id}", only("GET", get(alive)))
        .route("/r/{id}/v1", only("GET", get(alive)))
        .route("/v1/models", only("GET", get(plain_models)))
        .route("/v1/chat/completions", plain(&Chat))
        .route("/v1/completions", plain(&Completions))
        .route("/v1/responses", plain(&Responses))
        .route("/v1/messages", plain(&Messages))
        .route("/v1/messages/count_tokens", only("POST", post(plain_count)))
        .route("/v1/v1/messages", plain(&Messages))
        .route(
            "/v1/v1/messages/count_tokens",
            only("POST", post(plain_count)),
        )
        .route("/r/{id}/v1/models", only("GET", get(models)))
        .route("/r/{id}/v1/chat/completions", model(&Chat))
        .route("/r/{id}/v1/completions", model(&Completions))
        .route("/r/{id}/v1/responses", model(&Responses))
        .route("/r/{id}/v1/messages", model(&Messages))
        .route("/r/{id}/v1/messages/count_tokens", count())
        .route("/r/{id}/v1/reward", only("POST", post(own_reward)))
        // Anthropic's clients put `/v1` after their base URL.
        .route("/r/{id}/v1/v1/messages", model(&Messages))
        .route("/r/{id}/v1/v1/messages/count_tokens", count())
        .merge(google_routes())
        .with_state(service)
        .merge(control)
        .fallback(unknown)
}

/// The paths of Google's API, which has the models of OpenAI's as well. Its clients put `/v1beta` after their
/// base URL, which may end in `/v1`.
fn google_routes() -> Router<Service> {
    let mut routes = Router::new()
        .route(
            "/v1/models/{*name}",
            only("GET or POST", get(plain_model).post(plain_google_call)),
        )
        .route(
            "/r/{id}/v1/models/{*name}",
            only("GET or POST", get(one_model).post(google_call)),
        )
        .route("/v1beta/models", only("GET", get(plain_google_models)))
        .route(
            "/v1beta/models/{*name}",
            only(
                "GET or POST",
                get(plain_google_model).post(plain_google_call),
            ),
        );
    for prefix in ["/r/{id}/v1beta", "/r/{id}/v1/v1beta"] {
        routes = routes
            .route(&format!("{prefix}/models"), only("GET", get(google_models)))
            .route(
                &format!("{prefix}/models/{{*name}}"),
                only("GET or POST", get(google_model).post(google_call)),
            );
    }
    routes
}

/// Refuses all methods except `allowed`, with an answer that lists these.
fn only<S: Clone + Send + Sync + 'static>(
    allowed: &'static str,
    methods: MethodRouter<S>,
) -> MethodRouter<S> {
    methods.fallback(async move || RouteError(ApiError::method(allowed)))
}

/// Puts the key of Google's clients, which may be in the query, where all other keys are.
pub(crate) fn keyed<B>(mut request: axum::http::Request<B>) -> axum::http::Request<B> {
    let key = query_key(request.uri()).and_then(|key| HeaderValue::from_str(key).ok());
    if let Some(key) = key {
        let name = HeaderName::from_static(GOOGLE_KEY);
        request.headers_mut().entry(name).or_insert(key);
    }
    request
}

/// Rewrites a shared path to that of the rollout that the request's key or trace id identifies.
pub(crate) fn addressed<B>(
    gateway: &Gateway,
    mut request: axum::http::Request<B>,
) -> axum::http::Request<B> {
    if !is_shared(request.uri().path()) {
        return request;
    }
    let headers = request.headers();
    let Some(id) = gateway.rollouts().named(bearer(headers), trace(headers)) else {
        return request;
    };
    let mut parts = request.uri().clone().into_parts();
    let rest = parts
        .path_and_query
        .as_ref()
        .map_or("", PathAndQuery::as_str);
    parts.path_and_query = PathAndQuery::try_from(format!("/r/{id}{rest}")).ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

/// Returns the trace id of a request's W3C trace context.
fn trace(headers: &HeaderMap) -> Option<[u8; 16]> {
    let text = headers.get("traceparent")?.to_str().ok()?;
    unhex(text.split('-').nth(1)?)
}

/// Answers an unknown path. It does not list paths, but names the place where a model is served.
async fn unknown(uri: Uri) -> RouteError {
    let path = uri.path();
    RouteError(if is_shared(path) {
        no_rollout()
    } else {
        ApiError::not_found(format!("there is no {path}"))
    })
}

/// Returns the error for a key without a rollout.
fn no_rollout() -> ApiError {
    ApiError::unauthorized(
        "this key opens no rollout; models are served to the `api_key` that POST /rollouts answers with \
         (Python: `api_key=sinew.key`), or under its `base_url`; `sinew serve --api-key` serves clients \
         with one fixed key",
    )
}

/// Error of a route, in the form of OpenAI's API.
struct RouteError(ApiError);

impl From<ApiError> for RouteError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for RouteError {
    fn into_response(self) -> Response {
        refusal(&self.0, &openai_error(&self.0))
    }
}

/// Builds the answer for a connection above the limit.
pub(crate) fn too_many_connections(text: String) -> Response {
    let error = ApiError {
        status: 429,
        code: "too_many_connections",
        retry_after_s: Some(1),
        ..ApiError::bad_request("too_many_connections", text)
    };
    RouteError(error).into_response()
}

/// Builds an error response with a body in the form of a dialect.
fn refusal(error: &ApiError, body: &Value) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(body)).into_response();
    if let Some(seconds) = error.retry_after_s {
        let seconds = HeaderValue::from(seconds);
        response.headers_mut().insert(RETRY_AFTER, seconds);
    }
    response
}

async fn control_only(State(service): Api, request: Request, next: Next) -> Response {
    if service.is_control(request.headers()) {
        next.run(request).await
    } else {
        RouteError(ApiError::unauthorized("this path needs the control token")).into_response()
    }
}

impl Service {
    /// Whether a request has the control token.
    fn is_control(&self, headers: &HeaderMap) -> bool {
        bearer(headers).is_some_and(|key| self.control.matches(key))
    }

    /// Returns the owner of the key that a request has, if the key is valid.
    pub(crate) fn key(&self, request: &Parts) -> Option<Key> {
        let headers = &request.headers;
        if self.is_control(headers) {
            return Some(Key::Operator);
        }
        let rollouts = self.gateway.rollouts();
        let key = bearer(headers).or_else(|| query_key(&request.uri));
        rollouts.named(key, trace(headers)).map(Key::Named)
    }

    /// Returns the open rollout if the request has its key.
    fn rollout(&self, id: &str, headers: &HeaderMap) -> Result<Arc<Rollout>, ApiError> {
        let rollouts = self.gateway.rollouts();
        rollouts.authorize(id, bearer(headers), trace(headers))
    }

    /// Checks that a request has the fixed key.
    fn plain(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let key = self.gateway.config().api_key;
        let opened = key
            .zip(bearer(headers))
            .is_some_and(|(key, sent)| key.matches(sent));
        if opened { Ok(()) } else { Err(no_rollout()) }
    }

    /// Reads the body of a request within `limit` bytes and the read timeout.
    async fn read(&self, request: Request, limit: usize) -> Result<Bytes, ApiError> {
        let timeout = self.gateway.config().server.read_timeout;
        body::read(request, limit, timeout).await
    }
}

async fn health(State(service): Api, headers: HeaderMap) -> Json<Value> {
    // A caller without the secret learns only that it runs.
    let mut health = json!({"status": "ok"});
    if service.is_control(&headers) {
        health["gateway"] = json!(service.gateway.stats());
        health["engine"] = json!(service.gateway.caller().engine_status());
    }
    Json(health)
}

/// Reports that a server is running, without details.
async fn alive() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

async fn metrics(State(service): Api) -> Response {
    let engine = service.gateway.caller().engine_status();
    let text = service.gateway.stats().prometheus(&engine);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn list_adapters(State(service): Api) -> Json<Value> {
    Json(json!({"adapters": service.gateway.adapters().list()}))
}

/// The folder of an adapter, if it is not uploaded.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdapterSource {
    folder: PathBuf,
    version: Option<PolicyVersion>,
}

/// Parses the name of an adapter in a path.
fn adapter_name(name: &str) -> Result<AdapterName, ApiError> {
    AdapterName::new(name).map_err(|e| ApiError::invalid("name", e.to_string()))
}

/// Loads an adapter: a folder on this host, or an upload. Answers once the engine has it.
async fn put_adapter(State(service): Api, Path(name): Path<String>, request: Request) -> Answer {
    let name = adapter_name(&name)?;
    let gateway = service.gateway.clone();
    let kind = request.headers().get(CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok());
    let loaded = match adapters::boundary(kind.unwrap_or_default())? {
        Some(boundary) => {
            let _permit = gateway.adapters().upload_permit()?;
            let limit = gateway.config().server.max_adapter_bytes + MAX_FORM_BYTES;
            let body = body::read(request, limit, UPLOAD_TIMEOUT).await?;
            let load = move || gateway.adapters().upload(&name, &boundary, &body);
            blocking("adapter_failed", load).await?
        }
        None => {
            let bytes = service.read(request, MAX_CONTROL_BYTES).await?;
            let AdapterSource { folder, version } = body::control(&bytes)?;
            if !folder.is_absolute() {
                let why = format!("folder {}: allowed: an absolute path", folder.display());
                return Err(RouteError(ApiError::invalid("folder", why)));
            }
            let load = move || gateway.adapters().load(&name, &folder, version);
            blocking("adapter_failed", load).await?
        }
    };
    Ok(Json(json!(loaded)).into_response())
}

async fn delete_adapter(State(service): Api, Path(name): Path<String>) -> Answer {
    let name = adapter_name(&name)?;
    let (gateway, dropped) = (service.gateway, name.clone());
    let unload = move || gateway.adapters().unload(&dropped);
    blocking("adapter_failed", unload).await?;
    Ok(Json(json!({"name": name})).into_response())
}

async fn list(State(service): Api, uri: Uri) -> Answer {
    let live = service.gateway.live(live::limit(uri.query())?);
    Ok(Json(json!(live)).into_response())
}

async fn open(State(service): Api, request: Request) -> Answer {
    let spec: RolloutSpec = body::control(&service.read(request, MAX_CONTROL_BYTES).await?)?;
    let credentials = service.gateway.open_durably(spec).await?;
    Ok((StatusCode::CREATED, Json(json!(credentials))).into_response())
}

async fn view(State(service): Api, Path(id): Path<String>) -> Answer {
    let view = service.gateway.view(&EpisodeId::new(id)).await?;
    Ok(Json(json!(view)).into_response())
}

async fn reward(State(service): Api, Path(id): Path<String>, request: Request) -> Answer {
    let reward: Reward = body::control(&service.read(request, MAX_CONTROL_BYTES).await?)?;
    if let Some(receipt) = service.gateway.score(&EpisodeId::new(&id), &reward)? {
        receipt.wait().await?;
    }
    Ok(Json(json!({"id": id})).into_response())
}

/// Stores one score of a finished rollout.
async fn put_score(
    State(service): Api,
    Path((id, name)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let row = body::control(&service.read(request, MAX_CONTROL_BYTES).await?)?;
    let answer = scores::put_one(&service.gateway, &id, &name, row).await?;
    Ok(Json(answer).into_response())
}

/// Stores many scores, sent as JSON lines. The answer has the result of each row; its status is 422 if one
/// was refused.
async fn put_scores(State(service): Api, request: Request) -> Answer {
    let rows = service.read(request, MAX_CONTROL_BYTES).await?;
    let report = service.gateway.archive().put_scores(rows.to_vec()).await?;
    let status = match report.refused {
        0 => StatusCode::OK,
        _ => StatusCode::UNPROCESSABLE_ENTITY,
    };
    Ok((status, Json(json!(report))).into_response())
}

/// Records a reward from the agent itself: it needs the rollout's key, and the client that opened the rollout
/// must trust the agent.
async fn own_reward(State(service): Api, Path(id): Path<String>, request: Request) -> Answer {
    // A trace id reaches logs and other services: it opens the model, and no reward.
    let key = bearer(request.headers());
    let rollout = service.gateway.rollouts().authorize(&id, key, None)?;
    if !rollout.session().spec().agent_scores {
        let why = format!(
            "the agent of rollout {id} may not score itself; what opens the rollout may allow it \
             (`agent_scores`; in a recipe harness.scored_by = \"agent\")"
        );
        return Err(RouteError(ApiError {
            status: 403,
            code: "not_trusted",
            ..ApiError::unauthorized(why)
        }));
    }
    reward(State(service), Path(id), request).await
}

async fn finish(State(service): Api, Path(id): Path<String>, request: Request) -> Answer {
    let asked: FinishRequest = body::control(&service.read(request, MAX_CONTROL_BYTES).await?)?;
    let id = EpisodeId::new(id);
    let refused = asked.reward.as_ref().and_then(|reward| {
        let refused = service.gateway.reward(&id, reward).err()?;
        Some((reward, refused))
    });
    let trace = match refused {
        None => service.gateway.finish_used(&id, asked.end).await?,
        Some((reward, refused)) => {
            // Asked again after a lost answer: the first time it was taken.
            let finished = service.gateway.finished(&id).await?;
            let same =
                |t: &sinew_types::Trace| !t.outcome.unscored && t.outcome.reward == reward.reward;
            finished.filter(same).ok_or(refused)?
        }
    };
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
    Ok(Json(body).into_response())
}

async fn models(State(service): Api, Path(id): Path<String>, headers: HeaderMap) -> Answer {
    let rollout = service.rollout(&id, &headers)?;
    let adapter = rollout.session().spec().adapter.clone();
    let base = &service.gateway.config().model;
    let own = adapter.as_ref().map_or(base.as_str(), AdapterName::as_str);
    Ok(model_list([own].into_iter()))
}

/// Lists the model and all adapters.
async fn plain_models(State(service): Api, headers: HeaderMap) -> Answer {
    service.plain(&headers)?;
    let adapters = service.gateway.adapters().names();
    let base = service.gateway.config().model.as_str();
    let adapters = adapters.iter().map(AdapterName::as_str);
    Ok(model_list([base].into_iter().chain(adapters)))
}

async fn plain_model(State(service): Api, Path(name): Path<String>, headers: HeaderMap) -> Answer {
    service.plain(&headers)?;
    service.gateway.adapters().resolve(&name)?;
    Ok(Json(model(&name)).into_response())
}

fn model_list<'a>(names: impl Iterator<Item = &'a str>) -> Response {
    let list: Vec<Value> = names.map(model).collect();
    Json(json!({"object": "list", "data": list})).into_response()
}

/// Describes a model. Any name but that of another adapter is accepted and repeated in the answer.
async fn one_model(
    State(service): Api,
    Path((id, name)): Path<(String, String)>,
    headers: HeaderMap,
) -> Answer {
    let rollout = service.rollout(&id, &headers)?;
    let adapter = rollout.session().spec().adapter.clone();
    service.gateway.adapters().fits(&name, adapter.as_ref())?;
    Ok(Json(model(&name)).into_response())
}

async fn count_tokens(State(service): Api, Path(id): Path<String>, request: Request) -> Response {
    let opened = service.rollout(&id, request.headers()).map(|_| ());
    anthropic_count(service, request, opened).await
}

async fn plain_count(State(service): Api, request: Request) -> Response {
    let opened = service.plain(request.headers());
    anthropic_count(service, request, opened).await
}

/// Counts the tokens of a conversation for Anthropic's clients.
async fn anthropic_count(
    service: Service,
    request: Request,
    opened: Result<(), ApiError>,
) -> Response {
    match count(service, request, opened, anthropic::parse_count).await {
        Ok(tokens) => Json(json!({"input_tokens": tokens})).into_response(),
        Err(error) => refusal(&error, &Messages.error(&error)),
    }
}

/// Reads a body that is only counted; the second argument: whether fields without effect are refused.
type ParseCount = fn(&[u8], bool) -> Result<ModelRequest, ApiError>;

/// Counts the tokens of a conversation.
async fn count(
    service: Service,
    request: Request,
    opened: Result<(), ApiError>,
    parse: ParseCount,
) -> Result<usize, ApiError> {
    opened?;
    let limit = service.gateway.config().server.max_body_bytes;
    let bytes = service.read(request, limit).await?;
    let gateway = service.gateway.clone();
    LargeBody(bytes)
        .with(move |body| {
            let request = parse(body, gateway.config().strict_fields)?;
            gateway.caller().count_tokens(request)
        })
        .await
}

/// Handles a method of Google's API in a rollout.
async fn google_call(
    State(service): Api,
    Path((id, path)): Path<(String, String)>,
    request: Request,
) -> Response {
    let answered = match Call::of(&path, request.uri().query()) {
        Ok(Call::Generate(dialect)) => {
            let dialect: Arc<dyn Dialect> = Arc::new(dialect);
            call(State(service), Path(id), request, dialect).await
        }
        Ok(Call::CountTokens) => {
            let opened = service.rollout(&id, request.headers()).map(|_| ());
            google_count(service, request, opened).await
        }
        Err(error) => Err(error),
    };
    answered.unwrap_or_else(|error| refusal(&error, &google::error_value(&error)))
}

/// Handles a method of Google's API of a client with the fixed key.
async fn plain_google_call(
    State(service): Api,
    Path(path): Path<String>,
    request: Request,
) -> Response {
    let answered = match Call::of(&path, request.uri().query()) {
        Ok(Call::Generate(dialect)) => {
            let dialect: Arc<dyn Dialect> = Arc::new(dialect);
            plain_call(State(service), request, dialect).await
        }
        Ok(Call::CountTokens) => {
            let opened = service.plain(request.headers());
            google_count(service, request, opened).await
        }
        Err(error) => Err(error),
    };
    answered.unwrap_or_else(|error| refusal(&error, &google::error_value(&error)))
}

/// Counts the tokens of a conversation for Google's clients.
async fn google_count(
    service: Service,
    request: Request,
    opened: Result<(), ApiError>,
) -> Result<Response, ApiError> {
    let tokens = count(service, request, opened, google::parse_count).await?;
    Ok(Json(json!({"totalTokens": tokens})).into_response())
}

async fn google_models(
    State(service): Api,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response {
    google_list(&service, service.rollout(&id, &headers).map(|_| ()))
}

async fn plain_google_models(State(service): Api, headers: HeaderMap) -> Response {
    google_list(&service, service.plain(&headers))
}

/// The list of models in the form of Google's API.
fn google_list(service: &Service, opened: Result<(), ApiError>) -> Response {
    let config = service.gateway.config();
    let model = google::model_value(&config.model, config.session.max_context_tokens);
    google_answer(opened, json!({"models": [model]}))
}

async fn google_model(
    State(service): Api,
    Path((id, name)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    let opened = service.rollout(&id, &headers).map(|_| ());
    let context = service.gateway.config().session.max_context_tokens;
    google_answer(opened, google::model_value(&name, context))
}

async fn plain_google_model(
    State(service): Api,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let opened = service.plain(&headers);
    let context = service.gateway.config().session.max_context_tokens;
    google_answer(opened, google::model_value(&name, context))
}

/// A body for a client that may have it, or the refusal, in the form of Google's API.
fn google_answer(opened: Result<(), ApiError>, body: Value) -> Response {
    match opened {
        Ok(()) => Json(body).into_response(),
        Err(error) => refusal(&error, &google::error_value(&error)),
    }
}

/// A dialect for as long as a call needs it.
trait HeldDialect: Deref<Target = dyn Dialect> + Clone + Send + Sync + 'static {}

impl<T: Deref<Target = dyn Dialect> + Clone + Send + Sync + 'static> HeldDialect for T {}

/// Handles a model call, answered as a whole or as a stream.
async fn call(
    State(service): Api,
    Path(id): Path<String>,
    request: Request,
    dialect: impl HeldDialect,
) -> Result<Response, ApiError> {
    let rollout = service.rollout(&id, request.headers())?;
    let limit = service.gateway.config().server.max_body_bytes;
    let (uri, headers) = (request.uri().clone(), request.headers().clone());
    let body = service.read(request, limit).await?;
    answer(service, uri, headers, body, rollout, dialect).await
}

/// Handles a call of a client with the fixed key, in the rollout of its conversation.
async fn plain_call(
    State(service): Api,
    request: Request,
    dialect: impl HeldDialect,
) -> Result<Response, ApiError> {
    service.plain(request.headers())?;
    let limit = service.gateway.config().server.max_body_bytes;
    let (uri, headers) = (request.uri().clone(), request.headers().clone());
    let body = service.read(request, limit).await?;
    let gateway = service.gateway.clone();
    let held = dialect.clone();
    let found = LargeBody(body.clone());
    let found = found.with(move |body| fixed_key::rollout(&gateway, &*held, body));
    let rollout = found.await?;
    fixed_key::trim(&service.gateway).await;
    answer(service, uri, headers, body, rollout, dialect).await
}

/// Calls the model for a rollout.
async fn answer(
    service: Service,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
    rollout: Arc<Rollout>,
    dialect: impl HeldDialect,
) -> Result<Response, ApiError> {
    let gateway = service.gateway.clone();
    let held = dialect.clone();
    let begin = move |body: &[u8]| {
        let retry = retry_of(&headers, uri.path());
        let begun = gateway.caller().call(&rollout, &*held, body, retry);
        gateway.counters().answered(begun.as_ref().err());
        begun
    };
    let mut reader = LargeBody(body).with(begin).await?;
    if !reader.context().request.stream {
        let response = reader.response().await?;
        return Ok(Json(dialect.response(reader.context(), &response)).into_response());
    }
    // Failures before the first token still have a separate status.
    let first = match reader.next().await {
        Event::Done(Err(error)) => return Err(error),
        event => event,
    };
    let writer = dialect.stream(reader.context().clone());
    Ok(stream::response(reader, writer, first))
}

/// Describes a model as in OpenAI's API.
fn model(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "sinew"})
}

/// Returns the secret of a request, as sent by OpenAI's, Anthropic's or Google's clients.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
    let authorization = text(&AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        let bearer = scheme.eq_ignore_ascii_case("bearer");
        bearer.then(|| key.trim_start())
    });
    authorization
        .or_else(|| text(&HeaderName::from_static("x-api-key")))
        .or_else(|| text(&HeaderName::from_static(GOOGLE_KEY)))
}

/// Returns the properties by which a retry is recognized; see [`Retry`].
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
