//! All paths, and the answers to those that do not exist or are not served.

use super::api::{Api, Caller};
use super::error::ApiError;
use super::{client, external, records, results, sampling, sessions, training, weights};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::routing::{MethodRouter, any, delete, get, post, put};
use std::sync::Arc;

/// Paths below [`BASE`] with their handlers.
type Routes = Vec<(&'static str, MethodRouter<Api>)>;

/// Beginning of all paths.
const BASE: &str = "/api/v1";

/// Paths of clients, sessions, training and sampling.
fn commands() -> Routes {
    vec![
        ("healthz", get(client::health)),
        ("client/config", post(client::config)),
        ("client/dynamic_config", post(client::dynamic_config)),
        ("get_server_capabilities", get(client::capabilities)),
        ("telemetry", post(client::telemetry)),
        ("create_session", post(sessions::create)),
        ("session_heartbeat", post(sessions::heartbeat)),
        ("create_model", post(training::create)),
        ("get_info", post(training::info)),
        ("unload_model", post(training::unload)),
        ("forward", post(training::forward)),
        ("forward_backward", post(training::forward_backward)),
        ("optim_step", post(training::optim_step)),
        ("save_weights", post(weights::save)),
        ("load_weights", post(weights::load)),
        ("save_weights_for_sampler", post(weights::save_for_sampler)),
        ("save_weights_external", post(weights::save_external)),
        ("copy_weights", post(weights::copy)),
        ("weights_info", post(weights::info)),
        ("create_sampling_session", post(sampling::create)),
        ("join_sampling_session", post(sampling::join)),
        ("asample", post(sampling::sample)),
        ("retrieve_future", post(results::retrieve)),
        ("retrieve_futures", post(results::completions)),
        ("cancel_future", post(results::cancel)),
    ]
}

/// Paths of records.
fn records() -> Routes {
    vec![
        ("sessions", get(sessions::list)),
        ("sessions/search", post(sessions::search)),
        ("sessions/{session}", get(sessions::get)),
        ("sessions/{session}/finish", post(sessions::finish)),
        ("samplers/{sampler}", get(sampling::get)),
        ("training_runs", get(records::training_runs)),
        ("training_runs/{model}", get(records::training_run_of)),
        (
            "training_runs/{model}/checkpoints",
            get(records::checkpoints_of),
        ),
        (
            "training_runs/{model}/checkpoints/{kind}/{name}",
            delete(records::delete_checkpoint),
        ),
        (
            "training_runs/{model}/checkpoints/{kind}/{name}/ttl",
            put(records::set_ttl),
        ),
        (
            "training_runs/{model}/checkpoints/{kind}/{name}/publish",
            post(records::publish).delete(records::publish),
        ),
        (
            "training_runs/{model}/checkpoints/{kind}/{name}/archive",
            get(records::archive),
        ),
        (
            "training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls",
            get(external::urls),
        ),
        (
            "external_weights/{tenant}/{until}/{signature}/{model}/{name}/{*file}",
            get(external::download),
        ),
        ("checkpoints", get(records::checkpoints)),
        ("billing/usage/checkpoints/current", get(records::storage)),
    ]
}

/// Parts of the SDK's API that are not served, below [`BASE`], each with its reason.
const NOT_SERVED: &[(&str, &str, &str)] = &[
    (
        "create_custom_loss",
        "custom losses on the server",
        "forward_backward_custom computes them in the client: this server answers its forward and its \
         cross_entropy with weights",
    ),
    (
        "auth/token",
        "tokens in exchange for keys",
        "send the key itself with each request, as the SDK does without pjwt_auth_enabled",
    ),
    (
        "sessions/{session}/project",
        "projects",
        "all of a key is together; tag sessions, or give each project a key",
    ),
    (
        "sessions/{session}/trace_export",
        "traces of sessions",
        "the server keeps no trace of a session: log in the client",
    ),
    (
        "audit",
        "the audit log",
        "the server's own log has the requests of its operator's choice",
    ),
    (
        "billing/usage/events",
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
    served.push(("auth/apikey/me", key()));
    let full = |path: &str| format!("{BASE}/{path}");
    let paths: Vec<String> = served.iter().map(|(path, _)| full(path)).collect();
    let listed: Arc<str> = paths.join(", ").into();
    let mut router = Router::new();
    for (path, handler) in served {
        router = router.route(&full(path), handler);
    }
    for (path, feature, hint) in NOT_SERVED {
        router = router.route(&full(path), refused(feature, hint));
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
