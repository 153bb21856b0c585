//! Commands of models: read, and handed to the desk.
//!
//! The commands of a model are numbered, and each waits for the one before it. A body that is wrong still has
//! a number: it becomes a command that fails at its turn. Refused at once, its number would be a gap that all
//! later commands wait for, since the SDK counts on.

use super::api::Api;
use super::error::Answer;
use crate::desk::types::{Command, ModelId, RequestId, Tenant};
use crate::error::TinkerError;
use crate::wire;
use axum::Json;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde_json::json;

/// Model and number of a body that is wrong.
pub(crate) type PlaceOf = fn(&[u8]) -> Option<(String, u64)>;

/// Reads a command in JSON, and submits it.
pub(crate) async fn submit_json<T: DeserializeOwned + 'static>(
    api: &Api,
    tenant: &Tenant,
    request: Request,
    make: fn(T) -> Result<Command, TinkerError>,
) -> Answer {
    let read = move |bytes: Bytes| wire::request::<T>(&bytes).and_then(make);
    submit_read(api, tenant, request, read, wire::place).await
}

/// Reads a command, and submits it; or in its place one that fails.
pub(crate) async fn submit_read(
    api: &Api,
    tenant: &Tenant,
    request: Request,
    read: impl FnOnce(Bytes) -> Result<Command, TinkerError> + Send + 'static,
    place: PlaceOf,
) -> Answer {
    let (parts, body) = request.into_parts();
    let arrived = api.reader.read(&parts.headers, body).await?;
    let command = arrived.parse(move |bytes| {
        read(bytes.clone()).or_else(|error| match place(&bytes) {
            Some((model, seq)) => Ok(Command::Refused {
                model: ModelId::from(model),
                seq,
                text: error.to_string(),
            }),
            None => Err(error),
        })
    });
    submit(api, tenant, command.await?).await
}

/// Submits a command, and answers with the id of its future.
pub(crate) async fn submit(api: &Api, tenant: &Tenant, command: Command) -> Answer {
    let model = model(&command);
    let id = api.desk.submit(tenant, command).await?;
    Ok(future(&id, model.as_ref()))
}

/// The answer to a command: the id of its future.
fn future(id: &RequestId, model: Option<&ModelId>) -> Response {
    let model = model.map(ModelId::as_str);
    Json(json!({"request_id": id.as_str(), "model_id": model})).into_response()
}

/// The model of a command.
fn model(command: &Command) -> Option<ModelId> {
    match command {
        Command::CreateModel { session, seq, .. }
        | Command::CreateFromState { session, seq, .. } => Some(ModelId::of(session, *seq)),
        Command::ForwardBackward { model, .. }
        | Command::OptimStep { model, .. }
        | Command::SaveState { model, .. }
        | Command::LoadState { model, .. }
        | Command::SaveForSampler { model, .. }
        | Command::SaveExternal { model, .. }
        | Command::Refused { model, .. }
        | Command::Unload { model } => Some(model.clone()),
        Command::Sample { .. } => None,
    }
}
