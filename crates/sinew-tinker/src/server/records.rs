//! Records of what a tenant has: training runs and checkpoints.

use super::api::{Api, Caller, MAX_PAGE, Paged, Sent};
use super::date::iso;
use super::error::Answer;
use super::sessions::texts;
use super::signer::{CheckpointParts, tinker_path};
use crate::desk::types::{CheckpointInfo, CheckpointKind, Listing, ModelId, ModelInfo, Page};
use crate::wire::requests::Ttl;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::{Value, json};

/// Bytes of a gigabyte in the SDK's record of storage.
const GIGABYTE: f64 = 1e9;

/// A checkpoint as the SDK reads it.
fn checkpoint(info: &CheckpointInfo) -> Value {
    let kind = match info.path.kind {
        CheckpointKind::State => "training",
        CheckpointKind::Sampler => "sampler",
        CheckpointKind::External => "external",
    };
    json!({
        "checkpoint_id": format!("{}/{}", info.path.kind.segment(), info.path.name),
        "checkpoint_type": kind,
        "time": iso(info.created_ms),
        "tinker_path": info.path.to_string(),
        "size_bytes": info.bytes,
        "public": false,
        "user_metadata": texts(&info.metadata),
        "expires_at": info.expires_ms.map(iso),
    })
}

/// A training run as the SDK reads it.
fn training_run(info: &ModelInfo) -> Value {
    json!({
        "training_run_id": info.model.as_str(),
        "base_model": info.spec.base_model,
        "model_owner": info.owner,
        "is_lora": info.spec.lora.is_some(),
        "corrupted": info.corrupted,
        "lora_rank": info.spec.lora.map(|lora| lora.rank),
        "last_request_time": iso(info.last_request_ms),
        "last_checkpoint": info.last_state.as_ref().map(checkpoint),
        "last_sampler_checkpoint": info.last_sampler.as_ref().map(checkpoint),
        "user_metadata": texts(&info.spec.metadata),
    })
}

fn cursor<T>(page: Page, listing: &Listing<T>) -> Value {
    json!({"offset": page.offset, "limit": page.limit, "total_count": listing.total})
}

/// `GET training_runs`.
pub(crate) async fn training_runs(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Paged(page): Paged,
) -> Answer {
    let found = api.desk.models(&tenant, page).await?;
    let runs: Vec<_> = found.items.iter().map(training_run).collect();
    let body = json!({"training_runs": runs, "cursor": cursor(page, &found)});
    Ok(Json(body).into_response())
}

/// `GET training_runs/{id}`.
pub(crate) async fn training_run_of(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(model): Path<String>,
) -> Answer {
    let info = api.desk.model(&tenant, &ModelId::from(model)).await?;
    Ok(Json(training_run(&info)).into_response())
}

/// `GET training_runs/{id}/checkpoints`. The answer has no pages: it holds all of them.
pub(crate) async fn checkpoints_of(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(model): Path<String>,
) -> Answer {
    let model = ModelId::from(model);
    let mut all = Vec::new();
    loop {
        let page = Page {
            offset: all.len() as u64,
            limit: MAX_PAGE,
        };
        let found = api.desk.checkpoints(&tenant, Some(&model), page).await?;
        all.extend(found.items.iter().map(checkpoint));
        if found.items.is_empty() || all.len() as u64 >= found.total {
            break;
        }
    }
    Ok(Json(json!({"checkpoints": all, "cursor": null})).into_response())
}

/// `GET checkpoints`: those of all training runs.
pub(crate) async fn checkpoints(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Paged(page): Paged,
) -> Answer {
    let found = api.desk.checkpoints(&tenant, None, page).await?;
    let all: Vec<_> = found.items.iter().map(checkpoint).collect();
    let body = json!({"checkpoints": all, "cursor": cursor(page, &found)});
    Ok(Json(body).into_response())
}

/// `DELETE training_runs/{id}/checkpoints/{kind}/{name}`.
pub(crate) async fn delete_checkpoint(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(parts): Path<CheckpointParts>,
) -> Answer {
    let path = tinker_path(&parts);
    api.desk.delete_checkpoint(&tenant, &path).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `PUT training_runs/{id}/checkpoints/{kind}/{name}/ttl`.
pub(crate) async fn set_ttl(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(parts): Path<CheckpointParts>,
    Sent(sent): Sent<Ttl>,
) -> Answer {
    let path = tinker_path(&parts);
    api.desk.set_ttl(&tenant, &path, sent.ttl_seconds).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST` and `DELETE training_runs/{id}/checkpoints/{kind}/{name}/publish`: refused with the reason.
pub(crate) async fn publish(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(parts): Path<CheckpointParts>,
) -> Answer {
    api.desk.publish(&tenant, &tinker_path(&parts)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `GET training_runs/{id}/checkpoints/{kind}/{name}/archive`, of older SDKs: refused with the reason.
pub(crate) async fn archive(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(parts): Path<CheckpointParts>,
) -> Answer {
    api.desk.archive(&tenant, &tinker_path(&parts)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `GET billing/usage/checkpoints/current`: bytes of the tenant's checkpoints, without a price.
pub(crate) async fn storage(State(api): State<Api>, Caller(tenant): Caller) -> Answer {
    let used = api.desk.storage(&tenant).await?;
    let body = json!({
        "effective_rate_usd_per_gigabyte_month": null,
        "data": [{
            "user_name": tenant.name,
            "checkpoint_count": used.checkpoints,
            "size_bytes": used.bytes,
            "size_gigabytes": used.bytes as f64 / GIGABYTE,
        }],
    });
    Ok(Json(body).into_response())
}
