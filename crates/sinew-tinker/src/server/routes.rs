//! All paths, and the answers to those that do not exist or are not served.

use super::api::{Api, Caller};
use super::error::ApiError;
use super::{client, external, records, results, sampling, sessions, training, weights};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::routing::{MethodRouter, any, delete, get, post, put};
use std::sync::Arc;

/// Paths with their handlers.
type Routes = Vec<(&'static str, MethodRouter<Api>)>;

/// Paths of clients, sessions, training and sampling.
fn commands() -> Routes {
    vec![
        ("/api/v1/healthz", get(client::health)),
        ("/api/v1/client/config", post(client::config)),
        (
            "/api/v1/client/dynamic_config",
            post(client::dynamic_config),
        ),
        ("/api/v1/get_server_capabilities", get(client::capabilities)),
        ("/api/v1/telemetry", post(client::telemetry)),
        ("/api/v1/create_session", post(sessions::create)),
        ("/api/v1/session_heartbeat", post(sessions::heartbeat)),
        ("/api/v1/create_model", post(training::create)),
        ("/api/v1/get_info", post(training::info)),
        ("/api/v1/unload_model", post(training::unload)),
        ("/api/v1/forward", post(training::forward)),
        ("/api/v1/forward_backward", post(training::forward_backward)),
        ("/api/v1/optim_step", post(training::optim_step)),
        ("/api/v1/save_weights", post(weights::save)),
        ("/api/v1/load_weights", post(weights::load)),
        (
            "/api/v1/save_weights_for_sampler",
            post(weights::save_for_sampler),
        ),
        (
            "/api/v1/save_weights_external",
            post(weights::save_external),
        ),
        ("/api/v1/copy_weights", post(weights::copy)),
        ("/api/v1/weights_info", post(weights::info)),
        ("/api/v1/create_sampling_session", post(sampling::create)),
        ("/api/v1/join_sampling_session", post(sampling::join)),
        ("/api/v1/asample", post(sampling::sample)),
        ("/api/v1/retrieve_future", post(results::retrieve)),
        ("/api/v1/retrieve_futures", post(results::completions)),
        ("/api/v1/cancel_future", post(results::cancel)),
    ]
}

/// Paths of records.
fn records() -> Routes {
    vec![
        ("/api/v1/sessions", get(sessions::list)),
        ("/api/v1/sessions/search", post(sessions::search)),
        ("/api/v1/sessions/{session}", get(sessions::get)),
        ("/api/v1/sessions/{session}/finish", post(sessions::finish)),
        ("/api/v1/samplers/{sampler}", get(sampling::get)),
        ("/api/v1/training_runs", get(records::training_runs)),
        (
            "/api/v1/training_runs/{model}",
            get(records::training_run_of),
        ),
        (
            "/api/v1/training_runs/{model}/checkpoints",
            get(records::checkpoints_of),
        ),
        (
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}",
            delete(records::delete_checkpoint),
        ),
        (
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/ttl",
            put(records::set_ttl),
        ),
        (
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/publish",
            post(records::publish).delete(records::publish),
        ),
        (
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/archive",
            get(records::archive),
        ),
        (
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls",
            get(external::urls),
        ),
        (
            "/api/v1/external_weights/{tenant}/{until}/{signature}/{model}/{name}/{*file}",
            get(external::download),
        ),
        ("/api/v1/checkpoints", get(records::checkpoints)),
        (
            "/api/v1/billing/usage/checkpoints/current",
            get(records::storage),
        ),
    ]
}

/// Parts of the SDK's API that are not served, each with its reason.
const NOT_SERVED: &[(&str, &str, &str)] = &[
    (
        "/api/v1/create_custom_loss",
        "custom losses on the server",
        "forward_backward_custom computes them in the client: this server answers its forward and its \
         cross_entropy with weights",
    ),
    (
        "/api/v1/auth/token",
        "tokens in exchange for keys",
        "send the key itself with each request, as the SDK does without pjwt_auth_enabled",
    ),
    (
        "/api/v1/sessions/{session}/project",
        "projects",
        "all of a key is together; tag sessions, or give each project a key",
    ),
    (
        "/api/v1/sessions/{session}/trace_export",
        "traces of sessions",
        "the server keeps no trace of a session: log in the client",
    ),
    (
        "/api/v1/audit",
        "the audit log",
        "the server's own log has the requests of its operator's choice",
    ),
    (
        "/api/v1/billing/usage/events",
        "billing",
        "nothing is billed; billing/usage/checkpoints/current has the bytes of checkpoints",
    ),
];

/// A path of the SDK that is not served.
fn refused(feature: &'static str, hint: &'static str) -> MethodRouter<Api> {
    any(move |Caller(_): Caller| async move { ApiError::not_served(feature, hint) })
}

/// The key's own record is served; a key is deleted by the operator.
fn key() -> MethodRouter<Api> {
    let refuse = |Caller(_): Caller| async {
        ApiError::not_served(
            "deleting a key",
            "keys are those of the server's configuration: ask its operator",
        )
    };
    get(client::key).delete(refuse)
}

/// The service's routes.
pub(crate) fn router(api: Api) -> Router {
    let mut served = commands();
    served.extend(records());
    served.push(("/api/v1/auth/apikey/me", key()));
    let paths: Vec<&str> = served.iter().map(|(path, _)| *path).collect();
    let listed: Arc<str> = paths.join(", ").into();
    let mut router = Router::new();
    for (path, handler) in served {
        router = router.route(path, handler);
    }
    for (path, feature, hint) in NOT_SERVED {
        router = router.route(path, refused(feature, hint));
    }
    router
        .fallback(move |method: Method, uri: Uri| {
            let text = format!("there is no {method} {}; served are {listed}", uri.path());
            async move { ApiError::new(StatusCode::NOT_FOUND, text) }
        })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::method(&method, uri.path())
        })
        .with_state(api)
}
