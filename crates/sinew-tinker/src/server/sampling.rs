//! Sampling sessions, and samples.

use super::api::{Api, Caller, Sent};
use super::error::Answer;
use crate::desk::types::{Command, SamplerId, SessionId};
use crate::wire;
use crate::wire::requests::{CreateSamplingSession, JoinSamplingSession};
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::IntoResponse;
use serde_json::json;

/// `POST create_sampling_session`.
pub(crate) async fn create(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<CreateSamplingSession>,
) -> Answer {
    let session = SessionId::from(sent.session_id);
    let seq = sent.sampling_session_seq_id;
    let (base, path) = (sent.base_model, sent.model_path);
    let made = api.desk.create_sampler(&tenant, &session, seq, base, path);
    let sampler = made.await?;
    let body = json!({
        "type": "create_sampling_session",
        "sampling_session_id": sampler.as_str(),
    });
    Ok(Json(body).into_response())
}

/// `POST join_sampling_session`: a number for a further client of a sampling session.
pub(crate) async fn join(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<JoinSamplingSession>,
) -> Answer {
    let sampler = SamplerId::from(sent.sampling_session_id);
    let counter = api.desk.join_sampler(&tenant, &sampler).await?;
    let body = json!({"type": "join_sampling_session", "client_counter": counter});
    Ok(Json(body).into_response())
}

/// `GET samplers/{id}`.
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(sampler): Path<String>,
) -> Answer {
    let sampler = SamplerId::from(sampler);
    let info = api.desk.sampler(&tenant, &sampler).await?;
    let body = json!({
        "sampler_id": info.sampler.as_str(),
        "base_model": info.base_model,
        "model_path": info.path,
    });
    Ok(Json(body).into_response())
}

/// `POST asample`. The answer names the sequences, which the SDK attaches to the result.
pub(crate) async fn sample(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    let (parts, body) = request.into_parts();
    let limits = api.limits.wire;
    let arrived = api.reader.read(&parts.headers, body).await?;
    let read = arrived.parse(move |bytes| wire::read_sample(&bytes, &limits));
    let read = read.await?;
    let samples = read.input.samples as usize;
    let command = Command::Sample {
        sampler: read.sampler,
        seq: read.seq,
        request: read.input,
    };
    let id = api.desk.submit(&tenant, command).await?;
    // The desk has bounded the number of samples.
    let sequences: Vec<String> = (0..samples).map(|index| id.sequence_id(index)).collect();
    let body = json!({"request_id": id.as_str(), "sample_sequence_ids": sequences});
    Ok(Json(body).into_response())
}
