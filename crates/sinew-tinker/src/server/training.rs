//! Models in training: made, described, and stepped.

use super::api::{Api, Caller, Sent};
use super::body::content_type;
use super::error::{Answer, ApiError};
use crate::desk::types::{Command, LoraSpec, ModelId, ModelSpec, RequestId, SessionId, Tenant};
use crate::wire::requests::{CreateModel, OfModel, OptimStep, check_optimizer};
use crate::wire::{self, PROTOBUF, TrainRequest};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// The answer to a command: the id of its future.
pub(crate) fn future(id: &RequestId, model: Option<&ModelId>) -> Response {
    let model = model.map(ModelId::as_str);
    Json(json!({"request_id": id.as_str(), "model_id": model})).into_response()
}

/// `POST create_model`.
pub(crate) async fn create(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<CreateModel>,
) -> Answer {
    check_optimizer(sent.optimizer_config.as_ref(), "optimizer_config")?;
    let session = SessionId::from(sent.session_id);
    let model = ModelId::of(&session, sent.model_seq_id);
    let command = Command::CreateModel {
        session,
        seq: sent.model_seq_id,
        spec: ModelSpec {
            base_model: sent.base_model,
            lora: sent.lora_config.map(LoraSpec::from),
            metadata: sent.user_metadata.unwrap_or_default(),
        },
    };
    let id = api.desk.submit(&tenant, command).await?;
    Ok(future(&id, Some(&model)))
}

/// `POST get_info`.
pub(crate) async fn info(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<OfModel>,
) -> Answer {
    let model = ModelId::from(sent.model_id);
    let info = api.desk.model(&tenant, &model).await?;
    let name = &info.spec.base_model;
    let served = api.desk.served().iter().find(|served| served.name == *name);
    let body = json!({
        "type": "get_info",
        "model_data": {
            "arch": served.map(|served| &served.arch),
            "model_name": name,
            "tokenizer_id": served.and_then(|served| served.tokenizer.as_ref()),
        },
        "model_id": model.as_str(),
        "optimizer_config": {"type": "adamw"},
        "is_lora": info.spec.lora.is_some(),
        "lora_rank": info.spec.lora.map(|lora| lora.rank),
        "model_name": name,
    });
    Ok(Json(body).into_response())
}

/// `POST unload_model`.
pub(crate) async fn unload(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<OfModel>,
) -> Answer {
    let model = ModelId::from(sent.model_id);
    let command = Command::Unload {
        model: model.clone(),
    };
    let id = api.desk.submit(&tenant, command).await?;
    Ok(future(&id, Some(&model)))
}

/// `POST forward_backward`, in protobuf as the SDK sends it, or in JSON.
pub(crate) async fn forward_backward(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    run(&api, &tenant, request, false).await
}

/// `POST forward`, of older SDKs: the same without gradients.
pub(crate) async fn forward(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    run(&api, &tenant, request, true).await
}

async fn run(api: &Api, tenant: &Tenant, request: Request, forward_only: bool) -> Answer {
    let (parts, body) = request.into_parts();
    let limits = api.limits.wire;
    let kind = content_type(&parts.headers);
    let protobuf = match kind.as_str() {
        PROTOBUF => true,
        "application/json" | "" => false,
        other => {
            let text = format!("content-type {other:?}: allowed: {PROTOBUF} and application/json");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
        }
    };
    let arrived = api.reader.read(&parts.headers, body).await?;
    let read = arrived.parse(move |bytes| {
        if protobuf {
            let read = wire::read_train_request(bytes, &limits)?;
            let forward_only = forward_only || read.forward_only;
            Ok(TrainRequest {
                forward_only,
                ..read
            })
        } else {
            wire::read_train_json(&bytes, forward_only, &limits)
        }
    });
    let read = read.await?;
    let model = ModelId::from(read.model);
    let command = Command::ForwardBackward {
        model: model.clone(),
        seq: read.seq,
        data: read.data,
        loss: read.loss,
        forward_only: read.forward_only,
    };
    let id = api.desk.submit(tenant, command).await?;
    Ok(future(&id, Some(&model)))
}

/// `POST optim_step`.
pub(crate) async fn optim_step(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<OptimStep>,
) -> Answer {
    let adam = sent.adam()?;
    let seq = wire::checked_seq(sent.seq_id)?;
    let model = ModelId::from(sent.model_id);
    let command = Command::OptimStep {
        model: model.clone(),
        seq,
        adam,
    };
    let id = api.desk.submit(&tenant, command).await?;
    Ok(future(&id, Some(&model)))
}
