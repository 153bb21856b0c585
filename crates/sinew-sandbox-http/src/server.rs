//! HTTP server: connections by owner, and the end of everything when it stops.

use crate::error::ApiError;
use crate::registry::Service;
use crate::routes::router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use sinew_http::server::{self, ConnectionLimits, Guard, Key, Listener};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Time for open responses after all sandboxes were destroyed.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Failure of the listener.
#[derive(Debug, thiserror::Error)]
#[error("serve sandboxes: {0}")]
pub struct ServeError(#[from] io::Error);

/// Serves until `stop` resolves, then destroys every sandbox and snapshot.
///
/// # Errors
/// [`ServeError`] if the listener fails.
pub async fn serve(
    listener: impl Into<Listener>,
    service: Arc<Service>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let sweep = {
        let service = Arc::clone(&service);
        tokio::spawn(async move { service.sweep().await })
    };
    let router = router(Arc::clone(&service));
    let open = server::serve(listener, router, guard(&service), stop).await;
    // Destroying the sandboxes ends the requests that are still running.
    service.close().await;
    // Connections whose clients do not read their responses in time are closed.
    open.close(SHUTDOWN_GRACE).await;
    sweep.abort();
    // A request may have created a sandbox since the first call.
    service.close().await;
    Ok(())
}

/// Connections count against the owner of their token.
fn guard(service: &Arc<Service>) -> Guard {
    let bounds = &service.bounds;
    let limits = ConnectionLimits {
        without_key: bounds.unauthenticated,
        without_key_per_address: bounds.unauthenticated_per_address,
        with_key: usize::MAX,
        per_key: bounds.connections,
        key_time: bounds.auth_timeout,
        head_time: bounds.idle_timeout,
        body_time: Some(bounds.body_timeout),
        write_time: bounds.idle_timeout,
        ..ConnectionLimits::default()
    };
    let service = Arc::clone(service);
    let owner = move |parts: &axum::http::request::Parts| {
        let header = parts.headers.get(header::AUTHORIZATION);
        let header = header.and_then(|h| h.to_str().ok());
        let owner = service.tokens.owner(header);
        owner.map(|owner| Key::Named(owner.to_owned()))
    };
    Guard::new(limits, owner).refusing(too_many)
}

/// The answer above the owner's number of connections.
fn too_many(limit: usize) -> Response {
    let error = ApiError::TooMany {
        what: "connections",
        live: limit,
        limit,
    };
    error.into_response()
}
