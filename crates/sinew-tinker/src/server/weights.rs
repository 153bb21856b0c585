//! Weights: saved, loaded, published to samplers, exported and copied.

use super::api::{Api, Caller, Sent, no_access_tokens, no_projects};
use super::commands::submit_json;
use super::error::Answer;
use crate::desk::types::{CheckpointInfo, Command, CopyRequest, ModelId, SessionId};
use crate::error::TinkerError;
use crate::wire;
use crate::wire::requests::{
    CopyWeights, LoadWeights, SamplerKind, SaveExternal, SaveForSampler, SaveWeights, WeightsInfo,
    check_optimizer,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::IntoResponse;
use serde_json::json;

/// `POST save_weights`.
pub(crate) async fn save(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    let make = |sent: SaveWeights| -> Result<Command, TinkerError> {
        Ok(Command::SaveState {
            model: ModelId::from(sent.model_id),
            seq: wire::checked_seq(sent.seq_id)?,
            name: sent.path,
            ttl_s: sent.ttl_seconds,
            overwrite: sent.overwrite,
            metadata: sent.user_metadata.unwrap_or_default(),
        })
    };
    submit_json(&api, &tenant, request, make).await
}

/// `POST load_weights`: onto a model, or into a new one of a session.
pub(crate) async fn load(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    submit_json(&api, &tenant, request, loading).await
}

/// The two forms of the request.
fn loading(sent: LoadWeights) -> Result<Command, TinkerError> {
    if sent.weights_access_token.is_some() {
        return Err(no_access_tokens());
    }
    check_optimizer(sent.optimizer_config.as_ref(), "optimizer_config")?;
    let place = (
        sent.model_id,
        sent.seq_id,
        sent.session_id,
        sent.model_seq_id,
    );
    match place {
        (Some(model), Some(seq), None, None) => {
            for (field, given) in [
                ("base_model", sent.base_model.is_some()),
                ("user_metadata", sent.user_metadata.is_some()),
            ] {
                if given {
                    let allowed = "left out with model_id: the model has its own";
                    return Err(TinkerError::value(field, "given", allowed));
                }
            }
            Ok(Command::LoadState {
                model: ModelId::from(model),
                seq: wire::checked_seq(seq)?,
                path: sent.path,
                with_optimizer: sent.optimizer,
            })
        }
        (None, None, Some(session), Some(seq)) => Ok(Command::CreateFromState {
            session: SessionId::from(session),
            seq,
            path: sent.path,
            with_optimizer: sent.optimizer,
            base_model: sent.base_model,
            metadata: sent.user_metadata.unwrap_or_default(),
        }),
        _ => Err(TinkerError::missing(
            "model_id",
            "name a model by model_id and seq_id, or a new one by session_id and model_seq_id",
        )),
    }
}

/// `POST save_weights_for_sampler`.
pub(crate) async fn save_for_sampler(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    let make = |sent: SaveForSampler| -> Result<Command, TinkerError> {
        Ok(Command::SaveForSampler {
            model: ModelId::from(sent.model_id),
            seq: wire::checked_seq(sent.seq_id)?,
            name: sent.path,
            inflight: sent.kind == SamplerKind::Inflight,
            sampling_seq: sent.sampling_session_seq_id,
            ttl_s: sent.ttl_seconds,
            metadata: sent.user_metadata.unwrap_or_default(),
        })
    };
    submit_json(&api, &tenant, request, make).await
}

/// `POST save_weights_external`: a folder that other programs load.
pub(crate) async fn save_external(
    State(api): State<Api>,
    Caller(tenant): Caller,
    request: Request,
) -> Answer {
    let make = |sent: SaveExternal| -> Result<Command, TinkerError> {
        let recipients = sent.age_encryption_recipients.unwrap_or_default();
        if !recipients.is_empty() {
            return Err(TinkerError::not_served(
                "age_encryption_recipients",
                "files are not encrypted here: leave it out, and fetch them over a connection that you trust",
            ));
        }
        Ok(Command::SaveExternal {
            model: ModelId::from(sent.model_id),
            seq: wire::checked_seq(sent.seq_id)?,
            name: sent.path,
            ttl_s: sent.ttl_seconds,
        })
    };
    submit_json(&api, &tenant, request, make).await
}

/// `POST copy_weights`: a copy of a checkpoint, in a session.
pub(crate) async fn copy(
    State(api): State<Api>,
    Caller(tenant): Caller,
    headers: HeaderMap,
    Sent(sent): Sent<CopyWeights>,
) -> Answer {
    let token = headers.contains_key("x-tinker-weights-access-token");
    if token || sent.weights_access_token.is_some() {
        return Err(no_access_tokens().into());
    }
    if sent.destination_project_id.is_some() {
        return Err(no_projects("destination_project_id"));
    }
    let (Some(session), Some(seq)) = (sent.session_id, sent.model_seq_id) else {
        let hint = "the session that owns the copy, and model_seq_id, its number there";
        return Err(TinkerError::missing("session_id", hint).into());
    };
    let copy = CopyRequest {
        source: sent.source_path,
        session: SessionId::from(session),
        seq,
        ttl_s: sent.ttl_seconds,
    };
    let path = api.desk.copy_checkpoint(&tenant, copy).await?;
    Ok(Json(json!({"tinker_path": path.to_string()})).into_response())
}

/// `POST weights_info`: what is needed to load a checkpoint.
pub(crate) async fn info(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<WeightsInfo>,
) -> Answer {
    let found = api.desk.checkpoint(&tenant, &sent.tinker_path).await?;
    let CheckpointInfo {
        base_model, lora, ..
    } = found;
    let body = json!({
        "base_model": base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": lora.is_some(),
        "lora_rank": lora.map(|lora| lora.rank),
        "train_unembed": lora.map(|lora| lora.unembed),
        "train_mlp": lora.map(|lora| lora.mlp),
        "train_attn": lora.map(|lora| lora.attn),
    });
    Ok(Json(body).into_response())
}
