//! Models in training: made, described, and stepped.

use super::api::{Api, Caller, Sent};
use super::body::content_type;
use super::commands::{submit, submit_json, submit_read};
use super::error::{Answer, ApiError};
use crate::desk::types::{Command, LoraSpec, ModelId, ModelSpec, SessionId, Tenant};
use crate::error::TinkerError;
use crate::wire::requests::{CreateModel, OfModel, OptimStep, check_optimizer};
use crate::wire::{self, PROTOBUF, TrainRequest};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use bytes::Bytes;
use serde_json::json;

/// `POST create_model`.
pub(crate) async fn create(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<CreateModel>,
) -> Answer {
    check_optimizer(sent.optimizer_config.as_ref(), "optimizer_config")?;
    let command = Command::CreateModel {
        session: SessionId::from(sent.session_id),
        seq: sent.model_seq_id,
        spec: ModelSpec {
            base_model: sent.base_model,
            lora: sent.lora_config.map(LoraSpec::from),
            metadata: sent.user_metadata.unwrap_or_default(),
        },
    };
    submit(&api, &tenant, command).await
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
    submit(&api, &tenant, Command::Unload { model }).await
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
    let limits = api.limits.wire;
    match content_type(request.headers()).as_str() {
        PROTOBUF => {
            let read = move |bytes: Bytes| -> Result<Command, TinkerError> {
                let read = wire::read_train_request(bytes, &limits)?;
                let only = forward_only || read.forward_only;
                Ok(command(read, only))
            };
            submit_read(api, tenant, request, read, wire::proto_place).await
        }
        "application/json" | "" => {
            let read = move |bytes: Bytes| -> Result<Command, TinkerError> {
                let read = wire::read_train_json(&bytes, forward_only, &limits)?;
                let only = read.forward_only;
                Ok(command(read, only))
            };
            submit_read(api, tenant, request, read, wire::place).await
        }
        other => {
            let text = format!("content-type {other:?}: allowed: {PROTOBUF} and application/json");
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text))
        }
    }
}

fn command(read: TrainRequest, forward_only: bool) -> Command {
    Command::ForwardBackward {
        model: ModelId::from(read.model),
        seq: read.seq,
        data: read.data,
        loss: read.loss,
        forward_only,
    }
}

/// `POST optim_step`.
pub(crate) async fn optim_step(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    let make = |sent: OptimStep| -> Result<Command, TinkerError> {
        Ok(Command::OptimStep {
            adam: sent.adam()?,
            seq: wire::checked_seq(sent.seq_id)?,
            model: ModelId::from(sent.model_id),
        })
    };
    submit_json(&api, &tenant, request, make).await
}
