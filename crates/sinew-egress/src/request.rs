//! Checks and normalization of request headers. A request with more than one interpretation is refused.
//!
//! A request must have one target, one `Host` header that equals it, and one length of the body. Headers of
//! the client's connection are removed, and the proxy writes its own framing.

use crate::host::Host;
use crate::policy::{Denial, Reason, Rule, Scheme};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::{Uri, Version};

/// Headers of a single connection (RFC 9110, section 7.6.1), and headers for proxies.
const HOP_BY_HOP: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
];

/// Parts of the names of headers that make some servers use another path: `X-Original-URL`,
/// `X-Forwarded-Prefix`, `Destination` and many more.
const PATH_WORDS: [&str; 8] = [
    "url",
    "uri",
    "path",
    "rewrite",
    "prefix",
    "script-name",
    "destination",
    "resource",
];

/// Whether some servers take the method from a header of this name, such as `X-HTTP-Method-Override`.
fn names_method(plain: &str) -> bool {
    (plain.contains("method") || plain.contains("verb") || plain.contains("override"))
        && plain != "access-control-request-method"
}

/// Destination of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Scheme of the URL.
    pub(crate) scheme: Scheme,
    /// Host in canonical form.
    pub(crate) host: Host,
    pub(crate) port: u16,
}

impl Target {
    /// Host, with the port unless it is the default one, as in URLs and the `Host` header.
    pub(crate) fn authority(&self) -> String {
        if self.port == self.scheme.default_port() {
            self.host.to_string()
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Denial for an ambiguous or invalid request.
fn malformed(detail: impl Into<String>) -> Denial {
    Denial::new(Reason::Malformed, detail)
}

/// Parses `host:port` of a CONNECT request. The port is required.
pub(crate) fn connect_target(uri: &Uri) -> Result<(Host, u16), Denial> {
    let authority = uri
        .authority()
        .ok_or_else(|| malformed("CONNECT without host and port"))?;
    match Host::parse_with_port(authority.as_str()).map_err(|e| malformed(e.to_string()))? {
        (host, Some(port)) => Ok((host, port)),
        (host, None) => Err(malformed(format!("CONNECT {host} without a port"))),
    }
}

/// Parses the target of a request to the proxy: `http://host/path`.
pub(crate) fn absolute_target(uri: &Uri) -> Result<Target, Denial> {
    let authority = match (uri.scheme_str(), uri.authority()) {
        (Some("http"), Some(authority)) => authority.as_str(),
        (Some(other), Some(_)) => {
            return Err(malformed(format!(
                "{other}:// needs CONNECT; allowed: http://"
            )));
        }
        _ => {
            return Err(malformed(
                "this is a proxy: it takes http://host/path, or CONNECT host:port",
            ));
        }
    };
    let (host, port) = Host::parse_with_port(authority).map_err(|e| malformed(e.to_string()))?;
    let scheme = Scheme::Http;
    Ok(Target {
        scheme,
        host,
        port: port.unwrap_or(scheme.default_port()),
    })
}

/// Refuses headers that a server could interpret differently from the proxy.
pub(crate) fn check_head(parts: &Parts, target: &Target, tunnelled: bool) -> Result<(), Denial> {
    if parts.version != Version::HTTP_11 && parts.version != Version::HTTP_10 {
        return Err(malformed(format!("{:?}; allowed: HTTP/1.1", parts.version)));
    }
    if tunnelled && (parts.uri.scheme().is_some() || !parts.uri.path().starts_with('/')) {
        return Err(malformed("inside of a tunnel a request names a path alone"));
    }
    let headers = &parts.headers;
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(malformed("more than one host header"));
    }
    if let Some(host) = host {
        let named = host
            .to_str()
            .ok()
            .and_then(|h| Host::parse_with_port(h).ok());
        let same = named.is_some_and(|(h, p)| {
            h == target.host && p.unwrap_or(target.scheme.default_port()) == target.port
        });
        if !same {
            let detail = format!(
                "the host header is {host:?}, but the request goes to {}",
                target.authority()
            );
            return Err(malformed(detail));
        }
    } else if parts.version == Version::HTTP_11 {
        return Err(malformed("no host header"));
    }
    let mut encodings = headers.get_all(TRANSFER_ENCODING).iter();
    let plain = encodings
        .next()
        .is_none_or(|e| e.as_bytes().eq_ignore_ascii_case(b"chunked"));
    if !plain || encodings.next().is_some() {
        return Err(malformed("transfer-encoding; allowed: chunked, once"));
    }
    if headers.get_all(CONTENT_LENGTH).iter().count() > 1
        || (headers.contains_key(CONTENT_LENGTH) && headers.contains_key(TRANSFER_ENCODING))
    {
        return Err(malformed("more than one length of the body"));
    }
    Ok(())
}

/// Refuses headers that would bypass the methods or paths of a rule.
pub(crate) fn check_overrides(headers: &HeaderMap, rule: &Rule) -> Result<(), Denial> {
    for name in headers.keys() {
        // Some servers treat `_` and `-` as equal.
        let plain = name.as_str().replace('_', "-");
        let method = !rule.methods.is_empty() && names_method(&plain);
        let path = !rule.paths.is_empty() && PATH_WORDS.iter().any(|word| plain.contains(word));
        if method || path {
            let detail = format!("{name} names another request than the one that the rule allows");
            return Err(malformed(detail));
        }
    }
    Ok(())
}

/// Refuses what would bring another request than the one that a rule with methods or paths allows: a body
/// where the method has none, which some servers leave on the connection and read as the next request, and
/// the parameter `_method`, which some servers take for the method.
pub(crate) fn check_hidden(parts: &Parts, rule: &Rule) -> Result<(), Denial> {
    if rule.methods.is_empty() && rule.paths.is_empty() {
        return Ok(());
    }
    let plain = ["GET", "HEAD", "OPTIONS", "TRACE"].contains(&parts.method.as_str());
    let length = parts.headers.get(CONTENT_LENGTH);
    let body = length.is_some_and(|n| n != "0") || parts.headers.contains_key(TRANSFER_ENCODING);
    if plain && body {
        let detail = format!(
            "{} with a body; allowed where the rule names no methods or paths",
            parts.method
        );
        return Err(malformed(detail));
    }
    let pairs = parts.uri.query().unwrap_or_default().split(['&', ';']);
    let mut names = pairs.map(|pair| pair.split('=').next().unwrap_or_default());
    if !rule.methods.is_empty() && names.any(|name| name.eq_ignore_ascii_case("_method")) {
        return Err(malformed("the parameter _method names another method"));
    }
    Ok(())
}

/// Approximate bytes of the request line (`first`) and the headers with their separators.
pub(crate) fn head_bytes(first: usize, headers: &HeaderMap) -> usize {
    let line = |(name, value): (&HeaderName, &hyper::header::HeaderValue)| {
        name.as_str().len() + value.len() + 4
    };
    first + headers.iter().map(line).sum::<usize>()
}

/// Removes the headers of a single connection. The sender adds new framing.
pub(crate) fn end_to_end(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed {
        // Length and host belong to the message. A `connection` header must not remove them.
        if name != CONTENT_LENGTH && name != HOST {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    headers.remove(EXPECT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;

    fn target() -> Target {
        Target {
            scheme: Scheme::Http,
            host: Host::parse("a.com").unwrap(),
            port: 80,
        }
    }

    fn head(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri("http://a.com/x");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn ambiguous_requests_are_refused() {
        let cases: [&[(&str, &str)]; 9] = [
            &[],
            &[("host", "b.com")],
            &[("host", "a.com:81")],
            &[("host", "a.com"), ("host", "a.com")],
            &[("host", "a.com@b.com")],
            &[("host", "a.com"), ("transfer-encoding", "gzip, chunked")],
            &[
                ("host", "a.com"),
                ("transfer-encoding", "chunked"),
                ("transfer-encoding", "chunked"),
            ],
            &[
                ("host", "a.com"),
                ("content-length", "1"),
                ("content-length", "1"),
            ],
            &[
                ("host", "a.com"),
                ("content-length", "1"),
                ("transfer-encoding", "chunked"),
            ],
        ];
        for headers in cases {
            let denied = check_head(&head(headers), &target(), false);
            assert_eq!(denied.unwrap_err().reason, Reason::Malformed, "{headers:?}");
        }
        assert!(check_head(&head(&[("host", "A.com:80")]), &target(), false).is_ok());
    }

    #[test]
    fn connection_header_removes_headers_but_not_the_framing() {
        let mut headers = head(&[
            ("host", "a.com"),
            ("connection", "x-secret, content-length, host"),
            ("x-secret", "1"),
            ("content-length", "0"),
            ("proxy-authorization", "p"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("x-kept", "1"),
        ])
        .headers;
        end_to_end(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-length", "host", "x-kept"]);
    }

    #[test]
    fn invalid_targets_are_refused() {
        for uri in [
            "http://2130706433/",
            "http://0x7f.1/",
            "http://u:p@a.com/",
            "https://a.com/",
            "/x",
            "ftp://a.com/",
        ] {
            assert!(absolute_target(&uri.parse().unwrap()).is_err(), "{uri}");
        }
        assert!(connect_target(&"a.com:443".parse().unwrap()).is_ok());
        assert!(connect_target(&"u@a.com:443".parse().unwrap()).is_err());
    }
}
