//! Requests that web pages make in the browser of a user.
//!
//! A page of any site can send requests to servers on the user's machine. Two headers that it cannot set
//! identify it. `Origin` names its site. `Host` names the address that the browser thinks it speaks to: if a
//! page's name was made to lead here, that is the page's own.

use axum::http::header::{
    CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, ORIGIN, TRANSFER_ENCODING,
};
use std::net::IpAddr;

/// Reason why a request must be one of a web page from elsewhere; `None`: it is not. `loopback`: the server
/// listens where only this machine reaches it, so that its name is `localhost` or a number.
pub(super) fn foreign(headers: &HeaderMap, loopback: bool) -> Option<String> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next().and_then(|h| h.to_str().ok()).unwrap_or("");
    if hosts.next().is_some() {
        return Some("the request has more than one Host".into());
    }
    if loopback && !host.is_empty() && !is_local(host) {
        return Some(format!(
            "the request is for {host:?}, and this server listens on the loopback address: allowed is Host \
             localhost or the address itself"
        ));
    }
    let origin = headers.get(ORIGIN)?;
    let own = origin.to_str().ok().is_some_and(|origin| {
        let site = origin
            .strip_prefix("http://")
            .or_else(|| origin.strip_prefix("https://"));
        site.is_some_and(|site| site.eq_ignore_ascii_case(host))
    });
    (!own).then(|| format!("requests of web pages from {origin:?} are not answered"))
}

/// Whether a Host is this machine's, whatever names lead to it.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok()
}

/// Whether a request has no body, or declares it as JSON. A web page of another site cannot declare that
/// without asking first.
pub fn is_json(headers: &HeaderMap) -> bool {
    let length = headers.get(CONTENT_LENGTH).is_none_or(|n| n == "0");
    if length && !headers.contains_key(TRANSFER_ENCODING) {
        return true;
    }
    let declared = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let kind = declared.and_then(|v| v.split(';').next());
    kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderName;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn pages_of_other_sites_are_told_apart() {
        let of = |pairs: &[_], loopback| foreign(&headers(pairs), loopback).is_none();
        for host in [
            "localhost:80",
            "127.0.0.1",
            "[::1]:8",
            "a.localhost",
            "LOCALHOST.",
        ] {
            assert!(of(&[(HOST, host)], true), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example:80",
            "127.0.0.1.evil.example",
        ] {
            assert!(!of(&[(HOST, host)], true), "{host}");
            assert!(of(&[(HOST, host)], false), "{host}");
        }
        assert!(of(&[], true));
        assert!(!of(&[(HOST, "localhost"), (HOST, "localhost")], false));
        let own = [(HOST, "localhost:80"), (ORIGIN, "http://localhost:80")];
        assert!(of(&own, true) && of(&own, false));
        for origin in [
            "http://localhost:81",
            "http://evil.example",
            "null",
            "localhost:80",
        ] {
            for loopback in [true, false] {
                assert!(
                    !of(&[(HOST, "localhost:80"), (ORIGIN, origin)], loopback),
                    "{origin}"
                );
            }
        }
    }

    #[test]
    fn json_is_declared_as_such() {
        let is = |kind: &str| is_json(&headers(&[(CONTENT_LENGTH, "2"), (CONTENT_TYPE, kind)]));
        assert!(is("application/json") && is("Application/JSON; charset=utf-8"));
        assert!(!is("text/plain") && !is("text/plain; application/json"));
        assert!(is_json(&headers(&[])) && is_json(&headers(&[(CONTENT_LENGTH, "0")])));
        assert!(!is_json(&headers(&[(CONTENT_LENGTH, "2")])));
        assert!(!is_json(&headers(&[(TRANSFER_ENCODING, "chunked")])));
    }
}
