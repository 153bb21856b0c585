//! Results of commands: waited for, fetched, acknowledged, and given up.
//!
//! A wait lasts at most the server's `poll`; then the answer is 408 with the state of the queue, and the SDK
//! asks again. A result can be fetched again until the desk drops it.

use super::api::{Api, Caller, Sent};
use super::error::{Answer, ApiError};
use crate::desk::types::{Outcome, QueueState, Reply, RequestId, Retrieved, SamplerId, Tenant};
use crate::wire::requests::{CancelFuture, FuturesTarget, RetrieveFuture, RetrieveFutures};
use crate::wire::{self, PROTOBUF};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{ACCEPT, CONTENT_TYPE, HeaderMap};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};
use std::time::Duration;

/// Most acknowledgements in one request.
const MAX_ACKNOWLEDGED: usize = 10_000;

/// A result as it is sent.
enum Payload {
    Protobuf(Bytes),
    Json(Value),
}

/// `POST retrieve_future`.
pub(crate) async fn retrieve(
    State(api): State<Api>,
    Caller(tenant): Caller,
    headers: HeaderMap,
    Sent(sent): Sent<RetrieveFuture>,
) -> Answer {
    let id = RequestId::from(sent.request_id);
    let outcome = match waited(&api, &tenant, &id).await? {
        Retrieved::Pending { queue } => return Ok(try_again(&id, &queue)),
        Retrieved::Done(outcome) => outcome,
    };
    let reply = match outcome {
        Outcome::Value(reply) => reply,
        Outcome::Failed { category, text } => {
            let body = json!({"error": text, "category": category.as_str()});
            return Ok(Json(body).into_response());
        }
    };
    let protobuf = headers.get_all(ACCEPT).iter().any(|accepted| {
        let accepted = accepted.to_str().unwrap_or_default();
        accepted.contains(PROTOBUF)
    });
    let inline = if sent.allow_metadata_only {
        api.limits.inline_bytes
    } else {
        usize::MAX
    };
    Ok(match payload(&reply, protobuf)? {
        Payload::Protobuf(bytes) if bytes.len() > inline => announced(bytes.len()),
        Payload::Protobuf(bytes) => ([(CONTENT_TYPE, PROTOBUF)], bytes).into_response(),
        Payload::Json(value) => Json(value).into_response(),
    })
}

/// Waits for a result, until the server ends.
async fn waited(api: &Api, tenant: &Tenant, id: &RequestId) -> Result<Retrieved, ApiError> {
    let mut stopped = api.stopped.clone();
    let found = tokio::select! {
        found = api.desk.retrieve(tenant, id, api.limits.poll) => Some(found?),
        () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => None,
    };
    match found {
        Some(found) => Ok(found),
        None => Ok(api.desk.retrieve(tenant, id, Duration::ZERO).await?),
    }
}

/// The answer while there is no result.
fn try_again(id: &RequestId, queue: &QueueState) -> Response {
    let (state, reason) = match queue {
        QueueState::Active => ("active", None),
        QueueState::PausedCapacity { reason } => ("paused_capacity", Some(reason)),
    };
    let body = json!({
        "type": "try_again",
        "request_id": id.as_str(),
        "queue_state": state,
        "queue_state_reason": reason,
    });
    (StatusCode::REQUEST_TIMEOUT, Json(body)).into_response()
}

/// The answer that announces a large result.
fn announced(bytes: usize) -> Response {
    let body = json!({"status": "complete_metadata", "response_payload_size": bytes});
    Json(body).into_response()
}

/// A result in the form that the client reads. The SDK reads outputs of losses and samples in protobuf only.
fn payload(reply: &Reply, protobuf: bool) -> Result<Payload, ApiError> {
    Ok(match reply {
        Reply::ForwardBackward(output) if protobuf => {
            Payload::Protobuf(wire::write_train_output(output)?)
        }
        Reply::ForwardBackward(output) => Payload::Json(wire::train_output_json(output)),
        Reply::Sample(output) if protobuf => Payload::Protobuf(wire::write_sample_output(output)),
        Reply::Sample(output) => Payload::Json(wire::sample_output_json(output)),
        other => Payload::Json(plain(other)),
    })
}

/// A small result.
fn plain(reply: &Reply) -> Value {
    match reply {
        Reply::CreateModel { model } => {
            json!({"type": "create_model", "model_id": model.as_str()})
        }
        Reply::OptimStep { metrics } => {
            json!({"type": "optim_step", "metrics": wire::metrics_json(metrics)})
        }
        Reply::SaveState { path } => json!({"type": "save_weights", "path": path}),
        Reply::LoadState { path, model } => {
            json!({"type": "load_weights", "path": path, "model_id": model.as_str()})
        }
        Reply::SaveForSampler { path, sampler } => json!({
            "type": "save_weights_for_sampler",
            "path": path,
            "sampling_session_id": sampler.as_ref().map(SamplerId::as_str),
        }),
        Reply::SaveExternal { path, bytes } => {
            json!({"type": "save_weights_external", "path": path, "size_bytes": bytes})
        }
        Reply::Unload { model } => json!({"type": "unload_model", "model_id": model.as_str()}),
        Reply::ForwardBackward(output) => wire::train_output_json(output),
        Reply::Sample(output) => wire::sample_output_json(output),
    }
}

/// `POST retrieve_futures`: the requests of a sampling session that ended, in the order of their ends.
pub(crate) async fn completions(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<RetrieveFutures>,
) -> Answer {
    let FuturesTarget::SamplingSession {
        sampling_session_id,
        cloned_sampler_id,
    } = sent.target;
    let sampler = SamplerId::from(sampling_session_id);
    let acknowledged = sent.retrieved_request_ids;
    if acknowledged.len() > MAX_ACKNOWLEDGED {
        let text = format!("retrieved_request_ids: at most {MAX_ACKNOWLEDGED} in one request");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text));
    }
    if !acknowledged.is_empty() {
        let ids: Vec<_> = acknowledged.into_iter().map(RequestId::from).collect();
        api.desk.discard(&tenant, &ids).await?;
    }
    let poll = api.limits.poll;
    let wait = match sent.timeout {
        None => poll,
        Some(seconds) => Duration::try_from_secs_f64(seconds.max(0.0))
            .unwrap_or(poll)
            .min(poll),
    };
    let mut stopped = api.stopped.clone();
    let after = sent.prev_cursor;
    let listed = |wait| {
        let desk = &api.desk;
        desk.completions(&tenant, &sampler, cloned_sampler_id, after, wait)
    };
    let found = tokio::select! {
        found = listed(wait) => Some(found?),
        () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => None,
    };
    let found = match found {
        Some(found) => found,
        None => listed(Duration::ZERO).await?,
    };
    let items = found.items.iter().map(|ended| {
        let state = if ended.failed { "failed" } else { "finished" };
        json!({"state": state, "request_id": ended.request.as_str()})
    });
    let body = json!({"completions": items.collect::<Vec<_>>(), "cursor": found.cursor});
    Ok(Json(body).into_response())
}

/// `POST cancel_future`: a client that gave a sample up.
pub(crate) async fn cancel(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<CancelFuture>,
) -> Answer {
    let id = RequestId::from(sent.request_id);
    api.desk.cancel(&tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
