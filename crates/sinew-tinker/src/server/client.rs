//! Configuration for clients, capabilities, telemetry, and the key's own record.

use super::api::{Api, Caller, Sent};
use super::error::Answer;
use crate::wire::requests::{ClientConfig, Telemetry};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use sinew_http::server::at_most_part_of_files;

/// Seconds between two looks of a client at `client/dynamic_config`.
const REFRESH_S: u32 = 300;
/// Part of the server's connections that the samples of one client may take: one key has a quarter of them,
/// and several clients may share it.
const PART_OF_CONNECTIONS: usize = 8;
/// The same part of the files that the process may open, half of which are connections.
const PART_OF_FILES: usize = 16;

/// `GET healthz`: the server answers. It needs no key.
pub(crate) async fn health() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

/// `POST client/config`: how the SDK sends and waits.
pub(crate) async fn config(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<ClientConfig>,
) -> Answer {
    tracing::debug!(
        tenant = tenant.name,
        sdk = sent.sdk_version,
        "a client asks for its settings"
    );
    // A chunk fits the limit of bodies even if one datum makes it larger than its estimate.
    let chunk_bytes = (api.limits.body_bytes / 8).min(5_000_000);
    // Each open sample waits in a connection of its own.
    let open = api.limits.connections / PART_OF_CONNECTIONS;
    let open = at_most_part_of_files(open, PART_OF_FILES);
    let config = json!({
        // Keys are sent as they are: `auth/token` is not needed.
        "pjwt_auth_enabled": false,
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": true,
        "proto_compress_fwdbwd": true,
        "fwdbwd_max_chunk_len": api.limits.wire.datums,
        "fwdbwd_max_chunk_bytes_count": chunk_bytes,
        // Requests wait for their turn here; a client that gives up would only ask again.
        "sample_enable_stuck_detection": false,
        "sample_max_concurrent_requests": open,
        "use_pyqwest_transport": false,
        "sample_use_retrieve_futures": false,
        // The SDK computes custom losses from `forward` and `forward_backward` with cross_entropy.
        "custom_loss_server_side": false,
        "sample_join_sampling_session": true,
    });
    Ok(Json(config).into_response())
}

/// `POST client/dynamic_config`: settings that a client looks at again and again.
pub(crate) async fn dynamic_config(Caller(_): Caller, Sent(_): Sent<ClientConfig>) -> Answer {
    let config = json!({
        "refresh_interval_sec": REFRESH_S,
        "sample_cancel_enabled": true,
        "sample_cancel_max_batch_size": 64,
    });
    Ok(Json(config).into_response())
}

/// `GET get_server_capabilities`: the base models.
pub(crate) async fn capabilities(State(api): State<Api>, Caller(_): Caller) -> Answer {
    let models = api.desk.served().iter().map(|model| {
        json!({
            "model_name": model.name,
            "max_context_length": model.max_context,
            "trainable": model.trainable,
            "sampleable": model.sampleable,
        })
    });
    let body = json!({"supported_models": models.collect::<Vec<_>>()});
    Ok(Json(body).into_response())
}

/// `POST telemetry`: events of clients are counted, and nothing of them is kept.
pub(crate) async fn telemetry(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<Telemetry>,
) -> Answer {
    let count = sent.events.len() as u64;
    let total = api.count_events(count);
    tracing::debug!(
        tenant = tenant.name,
        count,
        total,
        "telemetry of a client was dropped"
    );
    Ok(Json(json!({"status": "accepted"})).into_response())
}

/// `GET auth/apikey/me`: the tenant of the key, for `tinker auth login`.
pub(crate) async fn key(Caller(tenant): Caller) -> Answer {
    let body = json!({
        "key_id": 0,
        "name": tenant.name,
        "note": "a key of this server's configuration",
        "details": {
            "org_details": {"name": tenant.name},
            "user_details": {"email": ""},
        },
    });
    Ok(Json(body).into_response())
}
