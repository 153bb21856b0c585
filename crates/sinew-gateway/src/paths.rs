//! Paths of requests: their plain form, and what they tell before a body is read.

use axum::http::Uri;
use axum::http::uri::PathAndQuery;

/// Header in which Google's clients send their key.
pub(crate) const GOOGLE_KEY: &str = "x-goog-api-key";

/// Normalizes a path: removes doubled slashes and a trailing slash, which clients produce when they join
/// URLs, and gives models of Google's clients the version of its paths.
pub(crate) fn plain_path<B>(mut request: axum::http::Request<B>) -> axum::http::Request<B> {
    let path = request.uri().path();
    // Google's clients list models at the path of OpenAI's, in their own form.
    let is_google = request.headers().contains_key(GOOGLE_KEY) && path.contains("/v1/models");
    if !is_google && !path.contains("//") && (path.len() == 1 || !path.ends_with('/')) {
        return request;
    }
    let segments = path.split('/').filter(|s| !s.is_empty());
    let mut plain: String = segments.flat_map(|s| ["/", s]).collect();
    if is_google {
        plain = plain.replacen("/v1/models", "/v1beta/models", 1);
    }
    if plain.is_empty() {
        plain.push('/');
    }
    if let Some(query) = request.uri().query() {
        plain = format!("{plain}?{query}");
    }
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(plain).ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

/// Whether a path is one of the API of all rollouts, whose key names the rollout.
pub(crate) fn is_shared(path: &str) -> bool {
    path.starts_with("/v1/") || path.starts_with("/v1beta/")
}

/// The key in the query of a path of Google's API.
pub(crate) fn query_key(uri: &Uri) -> Option<&str> {
    if !uri.path().contains("/v1beta/") && !uri.path().contains(':') {
        return None;
    }
    let mut pairs = uri.query()?.split('&');
    pairs.find_map(|pair| pair.strip_prefix("key="))
}
