//! The pull half of the OCI distribution specification 1.1 over HTTP, with Docker's token authentication.
//!
//! The crate oci-client is not used: its client cannot be given certificates (it panics on a machine without
//! a store of them, also for HTTP), and it reads manifests and tokens of any length into memory.

use super::PullLimits;
use super::credentials::Login;
use super::reference::{Reference, is_loopback};
use crate::documents::hex;
use crate::{ImageError, io_error};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use sinew_http::blocking::{self, RequestBuilder, Response};
use sinew_http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE, USER_AGENT,
    WWW_AUTHENTICATE,
};
use sinew_http::{ClientOptions, HttpError, Method, Retry, Url, cause, may_pass, retry_after};
use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of redirects of a request: registries keep layers at other hosts.
const MAX_REDIRECTS: usize = 5;
/// Maximum bytes of a manifest, an index, a configuration or a token.
const MAX_DOCUMENT: u64 = 4 << 20;
/// Longest pause before a request is repeated.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Accepted media types of manifests.
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// A repository of a registry.
pub(super) struct Client<'a> {
    /// Connections.
    http: blocking::Client,
    /// The image.
    reference: &'a Reference,
    /// User and password, if there are any.
    login: Option<Login>,
    /// Value of the header `authorization`, once the registry has asked for one.
    authorization: RefCell<Option<String>>,
    /// Retries and pauses.
    limits: &'a PullLimits,
    /// End of the pull.
    deadline: Instant,
}

/// A failed attempt.
type Failure = sinew_http::Failure<ImageError>;

impl From<ImageError> for Failure {
    fn from(e: ImageError) -> Self {
        Self::Lasting(e)
    }
}

/// Answer to a request for a token.
#[derive(Deserialize)]
struct Token {
    /// The token, by the name of Docker.
    token: Option<String>,
    /// The token, by the name of OAuth.
    access_token: Option<String>,
}

/// A challenge of a registry.
#[derive(Debug, PartialEq)]
enum Challenge {
    /// User and password with every request.
    Basic,
    /// A token of this address, for this service.
    Bearer {
        realm: String,
        service: Option<String>,
    },
}

/// The first challenge that is understood (RFC 9110, section 11.6.1).
fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    headers.get_all(WWW_AUTHENTICATE).iter().find_map(|value| {
        let (scheme, rest) = value.to_str().ok()?.split_once(' ')?;
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let parameters = parameters(rest);
        let of = |name: &str| {
            parameters
                .iter()
                .find(|(n, _)| n.eq_ignore_ascii_case(name))
        };
        Some(Challenge::Bearer {
            realm: of("realm")?.1.clone(),
            service: of("service").map(|(_, v)| v.clone()),
        })
    })
}

/// Reads `a="b", c=d`.
fn parameters(mut text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    while let Some((name, rest)) = text.split_once('=') {
        let (value, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => rest.split_once(',').unwrap_or((rest, "")),
        };
        let name = name.trim_matches([' ', ',']);
        found.push((name.to_owned(), value.trim().to_owned()));
        text = after;
    }
    found
}

impl<'a> Client<'a> {
    /// A client of the repository of `reference`.
    pub(super) fn new(
        reference: &'a Reference,
        login: Option<Login>,
        limits: &'a PullLimits,
        deadline: Instant,
    ) -> Result<Self, ImageError> {
        let agent = HeaderValue::from_static(concat!("sinew/", env!("CARGO_PKG_VERSION")));
        let http = blocking::Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            stall: Some(limits.stall),
            redirects: MAX_REDIRECTS,
            proxy: true,
            https_only: !reference.plain,
            headers: HeaderMap::from_iter([(USER_AGENT, agent)]),
            ..ClientOptions::default()
        });
        Ok(Self {
            http: http.map_err(|e| io_error("make an HTTP client", e))?,
            reference,
            login,
            authorization: RefCell::new(None),
            limits,
            deadline,
        })
    }

    /// The manifest or index that a tag or a digest names, and its type as the registry reports it.
    pub(super) fn manifest(&self, target: &str) -> Result<(Vec<u8>, String), ImageError> {
        self.retry(|| {
            let answer = self.get(&format!("manifests/{target}"), Some(MANIFESTS), 0)?;
            let kind = answer
                .headers()
                .get(CONTENT_TYPE)
                .and_then(|v| v.to_str().ok());
            let kind = kind.unwrap_or_default().to_owned();
            Ok((document(answer)?, kind))
        })
    }

    /// A blob that is a document.
    pub(super) fn document(&self, digest: &str) -> Result<Vec<u8>, ImageError> {
        self.retry(|| document(self.get(&format!("blobs/{digest}"), None, 0)?))
    }

    /// Writes a blob to `path`, which exists afterwards only if digest and length are right. Bytes received
    /// before a connection broke are not requested again.
    pub(super) fn blob(&self, digest: &str, size: u64, path: &Path) -> Result<(), ImageError> {
        let part = path.with_extension("part");
        let at = |e: std::io::Error| io_error(part.display().to_string(), e);
        let mut file = File::create(&part).map_err(at)?;
        let (mut hash, mut have) = (Sha256::new(), 0);
        self.retry(|| {
            let mut answer = self.get(&format!("blobs/{digest}"), None, have)?;
            if have > 0 && answer.status().as_u16() != 206 {
                (hash, have) = (Sha256::new(), 0);
                file.set_len(0).and_then(|()| file.rewind()).map_err(at)?;
            }
            let mut chunk = vec![0; 256 << 10];
            loop {
                self.in_time()?;
                let read = answer.read(&mut chunk).map_err(broken)?;
                if read == 0 {
                    break;
                }
                have += read as u64;
                if have > size {
                    return Err(wrong(digest, size, "more bytes".into()).into());
                }
                hash.update(&chunk[..read]);
                file.write_all(&chunk[..read]).map_err(at)?;
            }
            if have == size {
                Ok(())
            } else {
                let why = format!("it ended after {have} of {size} bytes");
                Err(Failure::Passing(why, None))
            }
        })?;
        let found = format!("sha256:{}", hex(&hash.finalize()));
        if found != digest {
            return Err(wrong(digest, size, found));
        }
        std::fs::rename(&part, path).map_err(at)
    }

    /// Repeats what may work later, with pauses that double.
    ///
    /// # Errors
    /// Those that are final, at once; [`ImageError::Unreachable`] with the last reason after
    /// [`PullLimits::retries`] further attempts, or where the next one would begin after the deadline.
    fn retry<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, ImageError> {
        let tries = self.limits.retries.saturating_add(1);
        let schedule = Retry::doubling(tries, self.limits.pause, MAX_PAUSE);
        let in_time = |wait: Duration| (Instant::now() + wait <= self.deadline).then_some(wait);
        let mut attempts = 0;
        let counted = || {
            attempts += 1;
            attempt()
        };
        blocking::retry(schedule, in_time, counted).map_err(|failure| match failure {
            Failure::Lasting(e) => e,
            Failure::Passing(reason, _) => ImageError::Unreachable {
                registry: self.reference.host.clone(),
                reason,
                attempts,
            },
        })
    }

    /// Sends a request and waits for the head of its answer.
    fn send(&self, request: RequestBuilder) -> Result<Response, Failure> {
        Ok(request.send().map_err(HttpError::from)?)
    }

    /// Sends a request to a path of the repository, with what the registry asks for to let this user in.
    ///
    /// A challenge is answered once a request: a token can end between two of them, and one that is refused
    /// right after it was made will be refused again. `from` is the first byte that is requested; a registry
    /// may answer with all of them (status 200 in place of 206).
    fn get(&self, path: &str, accept: Option<&str>, from: u64) -> Result<Response, Failure> {
        let url = format!("{}/{path}", self.reference.base());
        let mut asked = false;
        loop {
            self.in_time()?;
            let mut request = self.http.request(Method::GET, &url);
            if let Some(accept) = accept {
                request = request.header(ACCEPT, accept);
            }
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            if let Some(value) = self.authorization.borrow().as_ref() {
                request = request.header(AUTHORIZATION, value);
            }
            let answer = self.send(request)?;
            let status = answer.status().as_u16();
            match status {
                200 | 206 => return Ok(answer),
                401 if !asked => {
                    asked = true;
                    self.authorize(answer.headers())?;
                }
                401 | 403 => {
                    return Err(self.unauthorized(&format!("it answered {status}")).into());
                }
                404 => {
                    return Err(ImageError::Missing {
                        image: self.reference.to_string(),
                    }
                    .into());
                }
                _ => return Err(self.other(status, answer.headers())),
            }
        }
    }

    /// A status that does not answer the question. A registry with a fault is asked again.
    fn other(&self, status: u16, headers: &HeaderMap) -> Failure {
        if may_pass(status) {
            Failure::Passing(format!("it answered {status}"), retry_after(headers))
        } else {
            Failure::Lasting(ImageError::Document {
                document: format!("the answer of registry {}", self.reference.host),
                reason: format!("has the status {status}"),
            })
        }
    }

    /// Answers an authentication challenge, and keeps the header for all further requests.
    ///
    /// Many registries ask for a token even for pulls without a password.
    fn authorize(&self, headers: &HeaderMap) -> Result<(), Failure> {
        let login = self
            .login
            .as_ref()
            .filter(|_| self.reference.may_see_password());
        let value = match challenge(headers) {
            None => {
                return Err(self
                    .unauthorized("it asks for neither Basic nor Bearer")
                    .into());
            }
            Some(Challenge::Basic) => {
                let login = login.ok_or_else(|| self.no_login())?;
                basic(login)
            }
            Some(Challenge::Bearer { realm, service }) => {
                format!("Bearer {}", self.token(&realm, service.as_deref(), login)?)
            }
        };
        *self.authorization.borrow_mut() = Some(value);
        Ok(())
    }

    /// A token to pull from the repository (Docker's token authentication).
    ///
    /// The address is the registry's word, so a password goes there over HTTPS or on only loopback. The token
    /// is for this repository and for pulling, whatever else the challenge names.
    fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        login: Option<&Login>,
    ) -> Result<String, Failure> {
        let refused = |why: &str| Failure::Lasting(self.unauthorized(why));
        let mut url = Url::parse(realm).map_err(|_| refused("the address for tokens is none"))?;
        let host = url.host_str().unwrap_or_default();
        let plain = url.scheme() == "http" && (is_loopback(host) || login.is_none());
        if !(url.scheme() == "https" || (self.reference.plain && plain)) {
            return Err(refused("its address for tokens is not https"));
        }
        let scope = format!("repository:{}:pull", self.reference.repository);
        url.query_pairs_mut().append_pair("scope", &scope);
        if let Some(service) = service {
            url.query_pairs_mut().append_pair("service", service);
        }
        let mut request = self.http.request(Method::GET, url.as_str());
        if let Some(login) = login {
            request = request.header(AUTHORIZATION, basic(login));
        }
        let answer = self.send(request)?;
        match answer.status().as_u16() {
            200 => {}
            400 | 401 | 403 if login.is_none() => return Err(self.no_login().into()),
            400 | 401 | 403 => return Err(refused("it refuses user and password")),
            status => return Err(self.other(status, answer.headers())),
        }
        let token: Token = serde_json::from_slice(&document(answer)?)
            .map_err(|_| refused("its token is no JSON object"))?;
        let token = token.token.or(token.access_token);
        // A character that no header may have would be an error of the next request.
        let token = token.filter(|t| t.bytes().all(|b| b.is_ascii_graphic()));
        token.ok_or_else(|| refused("it sent no token"))
    }

    /// Credentials are requested and there are none, or they must not be sent.
    fn no_login(&self) -> ImageError {
        match (&self.login, self.reference.may_see_password()) {
            (Some(_), false) => {
                self.unauthorized("passwords are sent over HTTPS and on loopback only")
            }
            _ => {
                self.unauthorized("it asks for user and password, and there are none for this host")
            }
        }
    }

    /// The refusal of a registry, with what to do about it.
    fn unauthorized(&self, reason: &str) -> ImageError {
        ImageError::Unauthorized {
            image: self.reference.to_string(),
            host: self.reference.host.clone(),
            reason: reason.into(),
        }
    }

    /// Ends the pull after its time.
    fn in_time(&self) -> Result<(), ImageError> {
        if Instant::now() < self.deadline {
            Ok(())
        } else {
            Err(ImageError::Limit {
                what: "seconds to pull",
                limit: self.limits.time.as_secs(),
            })
        }
    }
}

/// Value of the header for a user and a password.
fn basic((user, password): &Login) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
    format!("Basic {text}")
}

/// A blob that does not match the image.
fn wrong(digest: &str, size: u64, found: String) -> ImageError {
    ImageError::Digest {
        blob: format!("blob {digest} of the registry"),
        expected: format!("{digest} and {size} bytes"),
        found,
    }
}

/// The body of an answer that is a document.
fn document(answer: Response) -> Result<Vec<u8>, Failure> {
    blocking::read(answer, MAX_DOCUMENT).map_err(|e| match e {
        HttpError::TooLarge(limit) => Failure::Lasting(ImageError::Limit {
            what: "bytes in a document of its registry",
            limit,
        }),
        e => e.into(),
    })
}

/// A connection that ended within a blob.
fn broken(error: std::io::Error) -> Failure {
    Failure::Passing(cause(&error), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        let of = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(WWW_AUTHENTICATE, value.parse().unwrap());
            }
            challenge(&headers)
        };
        let bearer = |realm: &str, service: Option<&str>| {
            let (realm, service) = (realm.to_owned(), service.map(str::to_owned));
            Some(Challenge::Bearer { realm, service })
        };
        let long =
            r#"Bearer realm="https://a.io/token",service="r.io",scope="repository:a/b:pull,push""#;
        assert_eq!(of(&[long]), bearer("https://a.io/token", Some("r.io")));
        assert_eq!(
            of(&["bearer realm=https://a.io, x=y"]),
            bearer("https://a.io", None)
        );
        assert_eq!(
            of(&["Negotiate", "Basic realm=\"x\""]),
            Some(Challenge::Basic)
        );
        for wrong in [
            "",
            "Bearer",
            "Bearer service=\"x\"",
            "Digest realm=\"x\"",
            "Bearer realm",
        ] {
            assert_eq!(of(&[wrong]), None, "{wrong}");
        }
    }
}
