//! The server: loopback and a token by default, read only, every queue bounded.

use crate::access::Token;
use crate::api;
use crate::assets;
use crate::error::ViewError;
use crate::events;
use crate::runs::{Ports, Runs};
use crate::shared::{Changes, Shared};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sinew_http::server::{self, ConnectionLimits, Endpoint, Guard, Key, Listener};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Connections of pages at a time. Each page that is open holds one for changes.
const CONNECTIONS: usize = 256;
/// Requests that read files at a time.
const READERS: usize = 8;

/// Content security policy: only the server's own files are allowed, and data images, which the text of
/// episodes may contain.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A dashboard that listens.
#[derive(Debug)]
pub struct Dashboard {
    shared: Shared,
    listener: Listener,
    address: SocketAddr,
}

impl Dashboard {
    /// Listens on an address, with or without TLS; port 0 takes a free one. `folders` are runs, or hold runs.
    ///
    /// # Errors
    /// If the address cannot be taken, or the system has no random bytes.
    pub async fn bind(
        endpoint: impl Into<Endpoint>,
        folders: Vec<PathBuf>,
        ports: Ports,
    ) -> std::io::Result<Self> {
        let listener = endpoint.into().bind().await?;
        let address = listener.local_addr()?;
        let token = Token::random().map_err(std::io::Error::other)?;
        let shared = Shared {
            runs: Arc::new(Runs::new(folders, ports)),
            places: Arc::new(Semaphore::new(READERS)),
            changes: Changes::default(),
            token,
            port: address.port(),
        };
        Ok(Self {
            shared,
            listener,
            address,
        })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The link that opens it, with the token.
    pub fn url(&self) -> String {
        format!(
            "{}://{}/?token={}",
            self.listener.scheme(),
            self.address,
            self.shared.token.as_str()
        )
    }

    /// The token, for `Authorization: Bearer`.
    pub fn token(&self) -> &str {
        self.shared.token.as_str()
    }

    /// Number of runs at present.
    pub fn runs(&self) -> usize {
        self.shared.runs.all().len()
    }

    /// Serves until the future is dropped.
    pub async fn serve(self) {
        let watch = events::watch(Arc::clone(&self.shared.runs), self.shared.changes.clone());
        let limits = ConnectionLimits {
            with_key: CONNECTIONS,
            ..ConnectionLimits::default()
        };
        let (token, port) = (self.shared.token.clone(), self.shared.port);
        let guard = Guard::new(limits, move |parts| {
            let opens = token.is_in_headers(&parts.headers, port);
            opens.then_some(Key::Operator)
        });
        server::serve(self.listener, router(self.shared), guard, watch).await;
    }
}

/// All routes behind the token.
pub(crate) fn router(shared: Shared) -> Router {
    let api = Router::new()
        .route("/runs", get(api::runs))
        .route("/runs/{run}/curves", get(api::curves))
        .route("/runs/{run}/timeline", get(api::timeline))
        .route("/runs/{run}/steps/{step}", get(api::step))
        .route("/runs/{run}/phases", get(api::phases))
        .route("/runs/{run}/trace", get(api::trace))
        .route("/runs/{run}/live", get(api::live))
        .route("/runs/{run}/recipe", get(api::recipe))
        .route("/runs/{run}/episodes", get(api::episodes))
        .route("/runs/{run}/episodes/{episode}", get(api::one_episode))
        .route("/runs/{run}/errors", get(api::errors))
        .route("/recipes", get(api::recipes))
        .route("/scaling", get(api::scaling))
        .route("/events", get(events::stream));
    Router::new()
        .nest("/api", api)
        .fallback(page)
        .layer(from_fn_with_state(shared.clone(), guard))
        .with_state(shared)
}

/// A file of the pages.
async fn page(request: Request) -> Response {
    let path = request.uri().path();
    assets::file(path)
        .unwrap_or_else(|| ViewError::missing(format!("nothing is at {path}")).into_response())
}

/// Lets in requests with the token, and sets the headers of every answer.
async fn guard(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let mut response = admitted(shared, request, next).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The path and the query of an address without the token. A browser would take a path with two slashes in
/// front for another host.
fn same_site(uri: &Uri) -> String {
    let path = uri.path().trim_start_matches(['/', '\\']);
    let pairs = uri.query().unwrap_or_default().split('&');
    let rest: Vec<_> = pairs
        .filter(|p| !p.is_empty() && !p.starts_with("token="))
        .collect();
    if rest.is_empty() {
        format!("/{path}")
    } else {
        format!("/{path}?{}", rest.join("&"))
    }
}

/// The answer to a request: a refusal, the cookie, or what was requested. The token leaves the address with
/// the first answer, so that it is in no link that is copied from there.
async fn admitted(shared: Shared, request: Request, next: Next) -> Response {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let why = "the dashboard only reads: use GET";
        return (StatusCode::METHOD_NOT_ALLOWED, why).into_response();
    }
    if shared.token.is_in_query(request.uri()) {
        let to = same_site(request.uri());
        let answer = (
            StatusCode::SEE_OTHER,
            [
                (header::SET_COOKIE, shared.token.cookie(shared.port)),
                (header::LOCATION, to),
            ],
        );
        return answer.into_response();
    }
    if !shared.token.is_in_headers(request.headers(), shared.port) {
        let why = "this dashboard needs its token: open the link that `sinew view` printed\n";
        return (StatusCode::UNAUTHORIZED, why).into_response();
    }
    next.run(request).await
}
