//! One request: checked, forwarded or answered from recordings, counted and logged.
//!
//! Steps of a request:
//! 1. Count it against the quota. A full quota or an unwritable audit log refuses it.
//! 2. Check the headers ([`crate::request`]) and the rules ([`crate::policy`]).
//! 3. Read the complete body, at most `request_bytes`, within the bytes that the sandbox may hold.
//! 4. Live mode forwards the request and streams the response; the other modes find or fetch a complete
//!    response and store it. Quotas are checked before anything is read or hashed.
//! 5. Remove the secret from a response whose request had a credential.
//! 6. Write the audit line after the last byte.
//!
//! A refused or failed request has a response with the header `x-sinew-egress`.

use crate::body::{Body, Problem, failed, failed_with, full, refusal};
use crate::config::Mode;
use crate::connection::{AuditEntry, Connection, Held, Inner, hold};
use crate::policy::{Credential, Denial, Reason, RequestInfo, Rule};
use crate::record::{self, RecordedResponse};
use crate::request::{
    Target, absolute_target, check_head, check_hidden, check_overrides, end_to_end, head_bytes,
};
use crate::scrub::{Scrubber, scrub};
use crate::tunnel;
use crate::upstream::{self, Io};
use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, HOST, HeaderMap, HeaderValue,
    IF_RANGE, RANGE,
};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Maximum bytes of the headers of a request or response.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Maximum number of headers of a request or response.
const MAX_HEADERS: usize = 128;
/// Bytes of a recorded response that are handed out at once.
const PIECE_BYTES: usize = 64 << 10;

/// Handles one request of a sandbox.
pub(crate) async fn respond(connection: Connection, request: Request<Incoming>) -> Response<Body> {
    if request.method() == Method::CONNECT {
        return tunnel::connect(connection, request);
    }
    let session = Arc::clone(&connection.session);
    let url = match &connection.tunnel {
        Some(t) => format!("{}://{}{}", t.scheme, t.authority(), request.uri()),
        None => request.uri().to_string(),
    };
    let mut entry = AuditEntry::new(&session, request.method().as_str(), url);
    match forward(&connection, request, &mut entry).await {
        Ok((head, rest)) => finish(head, rest, entry),
        Err(problem) => entry.refuse(&problem),
    }
}

/// Body of a response.
enum ResponseBody {
    /// Complete body, from a recording.
    Whole(Whole),
    /// Body that is still arriving from the server.
    Streaming(StreamingBody),
}

/// A complete body, with the memory that it holds until the client has taken it.
struct Whole(Bytes, Option<Held>);

/// A response that is not streamed, unless it is too large for the cache.
enum WholeResponse {
    /// All of it.
    Whole(RecordedResponse, Option<Held>),
    /// Only the head has been read.
    Streaming(ResponseHead, StreamingBody),
}

/// Status and headers of a response.
struct ResponseHead {
    /// Status code for the sandbox.
    status: StatusCode,
    /// Headers without those of the server's connection.
    headers: HeaderMap,
}

impl ResponseHead {
    fn with(self, body: Body) -> Response<Body> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
    }
}

/// A checked request, ready to send.
struct Outgoing {
    /// Destination that the policy has allowed.
    target: Target,
    /// Method as sent by the sandbox.
    method: Method,
    /// Path with query.
    path: String,
    /// Full URL for recordings and the audit log.
    url: String,
    /// Headers without those of the sandbox's connection.
    headers: HeaderMap,
    /// Complete body.
    body: Bytes,
    /// Memory of the body, until the server has answered.
    held: Held,
    /// End of the request's time.
    deadline: tokio::time::Instant,
}

/// Checks a request, and forwards it or finds its recorded response.
async fn forward(
    connection: &Connection,
    request: Request<Incoming>,
    entry: &mut AuditEntry,
) -> Result<(ResponseHead, ResponseBody), Problem> {
    let session = &connection.session;
    session.begin()?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs_f64(session.quota.request_s);
    let (parts, body) = request.into_parts();
    let target = match &connection.tunnel {
        Some(target) => target.clone(),
        None => absolute_target(&parts.uri)?,
    };
    check_head(&parts, &target, connection.tunnel.is_some())?;
    let info = RequestInfo {
        scheme: target.scheme,
        host: &target.host,
        port: target.port,
        method: parts.method.as_str(),
        path: parts.uri.path(),
    };
    let rule = session.policy.request(&info)?;
    check_overrides(&parts.headers, rule)?;
    check_hidden(&parts, rule)?;
    let first = parts.method.as_str().len() + parts.uri.to_string().len();
    session.meter.up(head_bytes(first, &parts.headers))?;
    let (body, held) = read_body(session, body, deadline).await?;
    entry.line.bytes_up = body.len() as u64;
    let outgoing = outgoing(parts, target, body, held, deadline);
    if session.recordings.is_none() {
        let (head, body) = send(connection, rule, outgoing, entry).await?;
        return Ok((head, ResponseBody::Streaming(body)));
    }
    let (fetched, decision) = recorded(connection, rule, outgoing, entry).await?;
    entry.allowed(decision);
    let (response, held) = match fetched {
        WholeResponse::Whole(response, held) => (response, held),
        WholeResponse::Streaming(head, body) => return Ok((head, ResponseBody::Streaming(body))),
    };
    let head = ResponseHead {
        status: StatusCode::from_u16(response.status).map_err(failed)?,
        headers: response.headers,
    };
    entry.line.bytes_down = response.body.len() as u64;
    let whole = Whole(response.body, held);
    Ok((head, ResponseBody::Whole(whole)))
}

/// Reads the complete body of a request, at max `request_bytes`, and counts it as it arrives.
async fn read_body(
    session: &Inner,
    mut body: Incoming,
    deadline: tokio::time::Instant,
) -> Result<(Bytes, Held), Problem> {
    let max = session.quota.request_bytes;
    let too_long = || {
        Denial::new(
            Reason::Quota,
            format!("the request's body is longer than {max} bytes"),
        )
    };
    if body.size_hint().lower() > max {
        return Err(too_long().into());
    }
    session.meter.may_up(body.size_hint().lower())?;
    let most = body.size_hint().upper().unwrap_or(max).min(max);
    let held = hold(&session.held_up, most, deadline).await?;
    let mut bytes = Vec::new();
    loop {
        let frame = tokio::time::timeout_at(deadline, body.frame()).await;
        let frame = frame.map_err(|_| failed("the request's body did not arrive in time"))?;
        let Some(frame) = frame else {
            return Ok((bytes.into(), held));
        };
        let broken = |e| failed(format!("the request's body broke off: {e}"));
        // Trailers are discarded.
        let Ok(data) = frame.map_err(broken)?.into_data() else {
            continue;
        };
        if (bytes.len() + data.len()) as u64 > most {
            return Err(too_long().into());
        }
        session.meter.up(data.len())?;
        bytes.extend_from_slice(&data);
    }
}

/// Removes the headers of the client's connection.
fn outgoing(
    parts: Parts,
    target: Target,
    body: Bytes,
    held: Held,
    deadline: tokio::time::Instant,
) -> Outgoing {
    let path = parts
        .uri
        .path_and_query()
        .map_or("/", |p| p.as_str())
        .to_string();
    let mut headers = parts.headers;
    end_to_end(&mut headers);
    headers.remove(CONTENT_LENGTH);
    headers.remove(HOST);
    Outgoing {
        url: format!("{}://{}{path}", target.scheme, target.authority()),
        target,
        method: parts.method,
        path,
        headers,
        body,
        held,
        deadline,
    }
}

/// Returns a recorded response, or fetches and records one. The text is the decision for the audit log.
async fn recorded(
    connection: &Connection,
    rule: &Rule,
    mut outgoing: Outgoing,
    entry: &mut AuditEntry,
) -> Result<(WholeResponse, &'static str), Problem> {
    let session = &connection.session;
    let Some(recordings) = &session.recordings else {
        return Err(failed("the session has no recordings"));
    };
    let mode = session.mode;
    // A 304 response without a body cannot be recorded.
    outgoing.headers.remove("if-none-match");
    outgoing.headers.remove("if-modified-since");
    let (method, url) = (outgoing.method.to_string(), outgoing.url.clone());
    let key = record::key(mode, &method, &url, &outgoing.headers, &outgoing.body);
    let ordinal = recordings.ordinal(&key);
    if let Some(found) = recordings.find(&key, ordinal).map_err(unreadable)? {
        let bytes = found.bytes();
        if bytes > session.quota.held_bytes {
            return Err(too_large(session, bytes));
        }
        session.meter.may_down(bytes)?;
        let held = hold(&session.held_down, bytes, outgoing.deadline).await?;
        session.meter.down(bytes as usize)?;
        let read = tokio::task::spawn_blocking(move || found.read()).await;
        let response = read.map_err(failed)?.map_err(unreadable)?;
        return Ok((WholeResponse::Whole(response, Some(held)), "replayed"));
    }
    if mode == Mode::Replay {
        let detail = format!(
            "no recorded response to request {} of {method} {url}",
            ordinal + 1
        );
        return Err(Denial::new(Reason::NotRecorded, detail).into());
    }
    let request_headers = outgoing.headers.clone();
    let (response, held) = match fetch(connection, rule, outgoing, entry).await {
        Ok(WholeResponse::Whole(response, held)) => (response, held),
        Ok(streaming) => {
            entry.line.detail = Some("not kept: larger than held_bytes".into());
            return Ok((streaming, "allowed"));
        }
        // The shared cache must not store failures and quota errors.
        Err(problem) if mode == Mode::Cache => return Err(problem),
        Err(problem) => (as_response(problem, entry).await?, None),
    };
    if mode == Mode::Record
        || record::shareable(
            &method,
            &request_headers,
            &response,
            rule.credential.is_some(),
        )
    {
        match recordings.store(&key, ordinal, &response) {
            Ok(()) => {}
            // A full cache stores nothing. A recording must be complete.
            Err(e) if mode == Mode::Cache => entry.line.detail = Some(format!("not kept: {e}")),
            Err(e) => return Err(failed_with("the response cannot be recorded", e)),
        }
    }
    Ok((WholeResponse::Whole(response, held), "allowed"))
}

/// Refusal of a response that is larger than what the sandbox may hold.
fn too_large(session: &Inner, bytes: u64) -> Problem {
    let most = session.quota.held_bytes;
    let detail = format!("the response of {bytes} bytes is larger than held_bytes, {most}");
    Denial::new(Reason::Quota, detail).into()
}

/// Failure for unreadable recordings. The sandbox does not see the cause.
fn unreadable(e: io::Error) -> Problem {
    failed_with("the recordings cannot be read", e)
}

/// Converts a network failure to a response, so that a replay repeats it.
async fn as_response(
    problem: Problem,
    entry: &mut AuditEntry,
) -> Result<RecordedResponse, Problem> {
    if matches!(&problem, Problem::Denied(d) if d.reason == Reason::Quota) {
        return Err(problem);
    }
    entry.line.detail = Some(problem.to_string());
    let (parts, body) = refusal(&problem).into_parts();
    let body = body.collect().await.map_err(failed)?.to_bytes();
    Ok(RecordedResponse {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body,
    })
}

/// Fetches the complete response of a server. Cache mode streams a response whose declared size exceeds the
/// bytes that may be held.
async fn fetch(
    connection: &Connection,
    rule: &Rule,
    outgoing: Outgoing,
    entry: &mut AuditEntry,
) -> Result<WholeResponse, Problem> {
    let (empty, deadline) = (outgoing.method == Method::HEAD, outgoing.deadline);
    let session = &connection.session;
    let (head, mut stream) = send(connection, rule, outgoing, entry).await?;
    let length = head.headers.get(CONTENT_LENGTH);
    let length = length.and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    let most = session.quota.held_bytes;
    let expected = if empty { 0 } else { length.unwrap_or(most) };
    session
        .meter
        .may_down(length.filter(|_| !empty).unwrap_or(0))?;
    if expected > most {
        return match session.mode {
            Mode::Cache => Ok(WholeResponse::Streaming(head, stream)),
            _ => Err(too_large(session, expected)),
        };
    }
    let mut held = hold(&session.held_down, expected, deadline).await?;
    let mut body = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        let bytes = (body.len() + chunk.len()) as u64;
        if bytes > expected {
            return Err(too_large(session, bytes));
        }
        body.extend_from_slice(&chunk);
    }
    body.shrink_to_fit();
    // A response without a length leaves this share unused.
    drop(held.split(held.num_permits() - body.len()));
    let mut headers = head.headers;
    if !empty {
        headers.remove(CONTENT_LENGTH);
    }
    let response = RecordedResponse {
        status: head.status.as_u16(),
        headers,
        body: body.into(),
    };
    Ok(WholeResponse::Whole(response, Some(held)))
}

/// Adds the secret to a request.
fn add_credential(headers: &mut HeaderMap, credential: &Credential) -> Result<(), Problem> {
    // The response must be uncompressed and complete, so that the secret can be found in it. Two partial
    // responses could each contain a half.
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for name in [RANGE, IF_RANGE] {
        headers.remove(name);
    }
    let name = credential.header.as_bytes();
    let name = hyper::header::HeaderName::from_bytes(name).map_err(failed)?;
    let mut value = HeaderValue::from_str(&credential.value).map_err(failed)?;
    value.set_sensitive(true);
    headers.insert(name, value);
    Ok(())
}

/// Sends a checked request and waits for the headers of the response.
async fn send(
    connection: &Connection,
    rule: &Rule,
    outgoing: Outgoing,
    entry: &mut AuditEntry,
) -> Result<(ResponseHead, StreamingBody), Problem> {
    let session = &connection.session;
    let deadline = outgoing.deadline;
    let Outgoing {
        target,
        method,
        path,
        mut headers,
        body,
        held,
        ..
    } = outgoing;
    let authority = HeaderValue::from_str(&target.authority()).map_err(failed)?;
    headers.insert(HOST, authority);
    // One request for each connection: what a server might read behind its body is not a further one.
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    if let Some(credential) = &rule.credential {
        add_credential(&mut headers, credential)?;
        entry.line.credential = Some(credential.name.clone());
    }
    let secret = rule.credential.as_ref().map(|c| c.secret.clone());
    let uri: Uri = path.parse().map_err(failed)?;
    let mut request = Request::new(full(body));
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    let exchange = async {
        let (stream, address) =
            upstream::open(&session.names, &session.shared.upstream_tls, rule, &target).await?;
        let mut builder = hyper::client::conn::http1::Builder::new();
        builder
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES);
        let (mut sender, driver) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        connection.tasks.spawn(async move {
            let _ = tokio::time::timeout_at(deadline, driver).await;
        });
        let response = sender
            .send_request(request)
            .await
            .map_err(|e| failed(format!("{}: {e}", target.host)))?;
        Ok::<_, Problem>((response, address))
    };
    let exchanged = tokio::time::timeout_at(deadline, exchange).await;
    drop(held);
    let (response, address): (Response<Incoming>, SocketAddr) =
        exchanged.map_err(|_| failed(format!("{} gave no response in time", target.host)))??;
    entry.allowed("allowed");
    entry.line.address = Some(address.to_string());
    let (parts, incoming) = response.into_parts();
    session.meter.down(head_bytes(0, &parts.headers))?;
    let head = response_head(parts.status, parts.headers, secret.as_deref())?;
    let body = StreamingBody {
        body: Some(incoming),
        scrubber: secret.as_deref().map(Scrubber::new),
        session: Arc::clone(session),
        deadline,
    };
    Ok((head, body))
}

/// Checks the headers of a response and removes those of the connection and the secret.
fn response_head(
    status: StatusCode,
    mut headers: HeaderMap,
    secret: Option<&str>,
) -> Result<ResponseHead, Problem> {
    if status.is_informational() {
        return Err(failed(format!(
            "the server answered {status} to a request that asked for no upgrade"
        )));
    }
    end_to_end(&mut headers);
    headers.remove("alt-svc");
    if let Some(secret) = secret {
        let mut encodings = headers.get_all(CONTENT_ENCODING).iter();
        if encodings.any(|e| e != "identity") || status == StatusCode::PARTIAL_CONTENT {
            return Err(failed(
                "the server compressed or cut its response against the request: \
                 it cannot be searched for the secret",
            ));
        }
        for value in headers.values_mut() {
            if let (clean, true) = scrub(value.as_bytes(), secret) {
                *value = HeaderValue::from_bytes(&clean).map_err(failed)?;
            }
        }
    }
    Ok(ResponseHead { status, headers })
}

/// ResponseBody of a response. Bytes are counted and secrets removed.
struct StreamingBody {
    /// Body of the server. `None` after its end.
    body: Option<Incoming>,
    /// Filter for the credential's secret, if the request had one.
    scrubber: Option<Scrubber>,
    /// Session whose quota the bytes count against.
    session: Arc<Inner>,
    /// End of the request's time.
    deadline: tokio::time::Instant,
}

impl StreamingBody {
    /// The next bytes, or `None` at the end.
    async fn next(&mut self) -> Option<Result<Bytes, Problem>> {
        let body = self.body.as_mut()?;
        loop {
            let frame = match tokio::time::timeout_at(self.deadline, body.frame()).await {
                Err(_) => return Some(Err(failed("the response did not end in time"))),
                Ok(Some(Err(e))) => {
                    return Some(Err(failed(format!("the response broke off: {e}"))));
                }
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => {
                    self.body = None;
                    let held = self.scrubber.as_mut()?.finish();
                    return (!held.is_empty()).then(|| Ok(held.into()));
                }
            };
            // Trailers are discarded.
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if let Err(denial) = self.session.meter.down(data.len()) {
                return Some(Err(denial.into()));
            }
            let out = match &mut self.scrubber {
                None => data,
                Some(scrubber) => scrubber.push(&data).into(),
            };
            if !out.is_empty() {
                return Some(Ok(out));
            }
        }
    }
}

/// Response for the sandbox. The audit line is written at the end of the body.
fn finish(head: ResponseHead, rest: ResponseBody, mut entry: AuditEntry) -> Response<Body> {
    entry.line.status = Some(head.status.as_u16());
    let body = match rest {
        ResponseBody::Whole(whole) => return respond_whole(head, whole),
        ResponseBody::Streaming(body) => {
            let chunks = stream::unfold(Some((body, entry)), |state| async {
                let (mut body, mut entry) = state?;
                match body.next().await? {
                    Ok(bytes) => {
                        entry.line.bytes_down += bytes.len() as u64;
                        Some((Ok(Frame::data(bytes)), Some((body, entry))))
                    }
                    Err(problem) => {
                        entry.problem(&problem);
                        Some((Err(io::Error::other(problem.to_string())), None))
                    }
                }
            });
            StreamBody::new(Box::pin(chunks)).boxed()
        }
    };
    head.with(body)
}

/// Response with a complete body, which is handed out in pieces: its memory counts until the last one.
fn respond_whole(head: ResponseHead, Whole(bytes, held): Whole) -> Response<Body> {
    let length = bytes.len();
    let pieces = stream::unfold((bytes, held), |(mut bytes, held)| async move {
        if bytes.is_empty() {
            return None;
        }
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        Some((Ok(Frame::data(piece)), (bytes, held)))
    });
    let body = match length {
        0 => full(Bytes::new()),
        _ => StreamBody::new(Box::pin(pieces)).boxed(),
    };
    let mut response = head.with(body);
    if length > 0 {
        response.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
    response
}

/// Serves HTTP/1.1 on a stream until it ends.
pub(crate) async fn serve_stream(connection: Connection, stream: impl Io + 'static) {
    let wait = Duration::from_secs_f64(connection.session.quota.request_s.min(30.0));
    let service = service_fn(move |request| {
        let connection = connection.clone();
        async move { Ok::<_, Infallible>(respond(connection, request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(wait)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // Errors of a client that disconnects are ignored. Its requests are in the log.
    let _ = served.await;
}
