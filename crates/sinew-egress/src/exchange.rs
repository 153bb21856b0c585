//! One request: judged, answered from recordings or by a server, counted and logged.

use crate::body::{Body, Problem, failed, failed_with, full, refusal};
use crate::config::Mode;
use crate::policy::{Ask, Credential, Denial, Reason, Rule};
use crate::proxy::{Inner, MAX_HEAD_BYTES, MAX_HEADERS, Note, Via};
use crate::record::{self, Answer, Recordings};
use crate::request::{
    Target, absolute_target, check_head, check_overrides, end_to_end, head_bytes,
};
use crate::scrub::{Scrubber, scrub};
use crate::tunnel;
use crate::upstream;
use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt, Limited, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, HOST, HeaderMap, HeaderValue, IF_RANGE,
    RANGE,
};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub(crate) async fn answer(via: Via, request: Request<Incoming>) -> Response<Body> {
    if request.method() == Method::CONNECT {
        return tunnel::connect(via, request);
    }
    let session = Arc::clone(&via.session);
    let url = match &via.tunnel {
        Some(t) => format!("{}://{}{}", t.scheme, t.authority(), request.uri()),
        None => request.uri().to_string(),
    };
    let mut note = Note::new(&session, request.method().as_str(), url);
    match forward(&via, request, &mut note).await {
        Ok((head, rest)) => finish(head, rest, note),
        Err(problem) => {
            note.problem(&problem);
            let response = refusal(&problem);
            note.line.status = Some(response.status().as_u16());
            response
        }
    }
}

/// An answer on its way: its head, and a body that is there or still comes.
enum Rest {
    Whole(Bytes),
    Coming(Coming),
}

struct Head {
    status: StatusCode,
    headers: HeaderMap,
}

/// A judged request, ready to be sent.
struct Outgoing {
    target: Target,
    method: Method,
    path: String,
    url: String,
    headers: HeaderMap,
    body: Bytes,
    deadline: tokio::time::Instant,
}

async fn forward(
    via: &Via,
    request: Request<Incoming>,
    note: &mut Note,
) -> Result<(Head, Rest), Problem> {
    let session = &via.session;
    session.begin()?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs_f64(session.quota.request_s);
    let (parts, body) = request.into_parts();
    let target = match &via.tunnel {
        Some(target) => target.clone(),
        None => absolute_target(&parts.uri)?,
    };
    check_head(&parts, &target, via.tunnel.is_some())?;
    let ask = Ask {
        scheme: target.scheme,
        host: &target.host,
        port: target.port,
        method: parts.method.as_str(),
        path: parts.uri.path(),
    };
    let rule = session.policy.request(&ask)?;
    check_overrides(&parts.headers, rule)?;
    let first = parts.method.as_str().len() + parts.uri.to_string().len();
    session.meter.up(head_bytes(first, &parts.headers))?;
    let body = read_body(session, body, deadline).await?;
    note.line.bytes_up = body.len() as u64;
    let outgoing = outgoing(parts, target, body, deadline);
    let Some(recordings) = &session.recordings else {
        let (head, coming) = send(via, rule, outgoing, note).await?;
        return Ok((head, Rest::Coming(coming)));
    };
    let (answer, decision) = recorded(via, rule, outgoing, recordings, note).await?;
    note.allowed(decision);
    let head = Head {
        status: StatusCode::from_u16(answer.status).map_err(failed)?,
        headers: answer.headers,
    };
    note.line.bytes_down = answer.body.len() as u64;
    Ok((head, Rest::Whole(answer.body)))
}

/// A request's body, whole and bounded.
async fn read_body(
    session: &Inner,
    body: Incoming,
    deadline: tokio::time::Instant,
) -> Result<Bytes, Problem> {
    let most = session.quota.request_bytes;
    let too_long = || {
        Denial::new(
            Reason::Quota,
            format!("the request's body is longer than {most} bytes"),
        )
    };
    if body.size_hint().lower() > most {
        return Err(too_long().into());
    }
    let read = tokio::time::timeout_at(deadline, Limited::new(body, most as usize).collect()).await;
    let read = read.map_err(|_| failed("the request's body did not arrive in time"))?;
    let bytes = read.map_err(
        |e| match e.downcast_ref::<http_body_util::LengthLimitError>() {
            Some(_) => too_long().into(),
            None => failed(format!("the request's body broke off: {e}")),
        },
    )?;
    let bytes = bytes.to_bytes();
    session.meter.up(bytes.len())?;
    Ok(bytes)
}

fn outgoing(parts: Parts, target: Target, body: Bytes, deadline: tokio::time::Instant) -> Outgoing {
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
        deadline,
    }
}

/// From the recordings, or from the network into them.
async fn recorded(
    via: &Via,
    rule: &Rule,
    mut outgoing: Outgoing,
    recordings: &Recordings,
    note: &mut Note,
) -> Result<(Answer, &'static str), Problem> {
    let mode = via.session.mode;
    // What is not there at the moment cannot be what is recorded.
    outgoing.headers.remove("if-none-match");
    outgoing.headers.remove("if-modified-since");
    let (method, url) = (outgoing.method.to_string(), outgoing.url.clone());
    let key = record::key(mode, &method, &url, &outgoing.headers, &outgoing.body);
    let ordinal = recordings.ordinal(&key);
    if let Some(answer) = recordings.find(&key, ordinal).map_err(unreadable)? {
        via.session.meter.down(answer.body.len())?;
        return Ok((answer, "replayed"));
    }
    if mode == Mode::Replay {
        let detail = format!(
            "no recorded answer to request {} of {method} {url}",
            ordinal + 1
        );
        return Err(Denial::new(Reason::NotRecorded, detail).into());
    }
    let request_headers = outgoing.headers.clone();
    let answer = match fetch(via, rule, outgoing, note).await {
        Ok(answer) => answer,
        // A quota or a cut must not be repeated as if a server had said it.
        Err(problem) if mode == Mode::Cache => return Err(problem),
        Err(problem) => as_answer(problem, note).await?,
    };
    if mode == Mode::Record
        || record::shareable(
            &method,
            &request_headers,
            &answer,
            rule.credential.is_some(),
        )
    {
        match recordings.keep(&key, ordinal, &answer) {
            Ok(()) => {}
            // A cache without room is none; a recording without an answer is wrong.
            Err(e) if mode == Mode::Cache => note.line.detail = Some(format!("not kept: {e}")),
            Err(e) => return Err(failed_with("the answer cannot be recorded", e)),
        }
    }
    Ok((answer, "allowed"))
}

fn unreadable(e: io::Error) -> Problem {
    failed_with("the recordings cannot be read", e)
}

/// A failure of the network as the answer that a replay gives again.
async fn as_answer(problem: Problem, note: &mut Note) -> Result<Answer, Problem> {
    if matches!(&problem, Problem::Denied(d) if d.reason == Reason::Quota) {
        return Err(problem);
    }
    note.line.detail = Some(problem.to_string());
    let (parts, body) = refusal(&problem).into_parts();
    let body = body.collect().await.map_err(failed)?.to_bytes();
    Ok(Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body,
    })
}

/// The whole answer of a server.
async fn fetch(
    via: &Via,
    rule: &Rule,
    outgoing: Outgoing,
    note: &mut Note,
) -> Result<Answer, Problem> {
    let empty = outgoing.method == Method::HEAD;
    let (head, mut coming) = send(via, rule, outgoing, note).await?;
    let mut body = Vec::new();
    while let Some(piece) = coming.next().await {
        body.extend_from_slice(&piece?);
    }
    let mut headers = head.headers;
    if !empty {
        headers.remove(CONTENT_LENGTH);
    }
    Ok(Answer {
        status: head.status.as_u16(),
        headers,
        body: body.into(),
    })
}

/// Adds a secret that the sandbox never sees.
fn add_credential(headers: &mut HeaderMap, credential: &Credential) -> Result<(), Problem> {
    // Only text in the open can be searched for the secret, and only all of it: of two parts each
    // may hold half.
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

/// Sends a judged request and waits for the head of the answer.
async fn send(
    via: &Via,
    rule: &Rule,
    outgoing: Outgoing,
    note: &mut Note,
) -> Result<(Head, Coming), Problem> {
    let session = &via.session;
    let deadline = outgoing.deadline;
    let Outgoing {
        target,
        method,
        path,
        mut headers,
        body,
        ..
    } = outgoing;
    let authority = HeaderValue::from_str(&target.authority()).map_err(failed)?;
    headers.insert(HOST, authority);
    if let Some(credential) = &rule.credential {
        add_credential(&mut headers, credential)?;
        note.line.credential = Some(credential.name.clone());
    }
    let secret = rule.credential.as_ref().map(|c| c.secret.clone());
    let uri: Uri = path.parse().map_err(failed)?;
    let mut request = Request::new(full(body));
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    let exchange = async {
        let (stream, address) = upstream::open(
            session.shared.resolver.as_ref(),
            &session.shared.upstream_tls,
            rule,
            &target,
        )
        .await?;
        let mut builder = hyper::client::conn::http1::Builder::new();
        builder
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES);
        let (mut sender, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        via.tasks.spawn(async move {
            let _ = tokio::time::timeout_at(deadline, connection).await;
        });
        let response = sender
            .send_request(request)
            .await
            .map_err(|e| failed(format!("{}: {e}", target.host)))?;
        Ok::<_, Problem>((response, address))
    };
    let exchanged = tokio::time::timeout_at(deadline, exchange).await;
    let (response, address): (Response<Incoming>, SocketAddr) =
        exchanged.map_err(|_| failed(format!("{} gave no answer in time", target.host)))??;
    note.allowed("allowed");
    note.line.address = Some(address.to_string());
    let (parts, incoming) = response.into_parts();
    session.meter.down(head_bytes(0, &parts.headers))?;
    let head = answer_head(parts.status, parts.headers, secret.as_deref())?;
    let coming = Coming {
        body: Some(incoming),
        scrubber: secret.as_deref().map(Scrubber::new),
        session: Arc::clone(session),
        deadline,
    };
    Ok((head, coming))
}

fn answer_head(
    status: StatusCode,
    mut headers: HeaderMap,
    secret: Option<&str>,
) -> Result<Head, Problem> {
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
                "the server encoded or cut its answer although it was asked not to: it cannot be searched",
            ));
        }
        for value in headers.values_mut() {
            if let (clean, true) = scrub(value.as_bytes(), secret) {
                *value = HeaderValue::from_bytes(&clean).map_err(failed)?;
            }
        }
    }
    Ok(Head { status, headers })
}

/// The rest of an answer, counted and searched.
struct Coming {
    body: Option<Incoming>,
    scrubber: Option<Scrubber>,
    session: Arc<Inner>,
    deadline: tokio::time::Instant,
}

impl Coming {
    async fn next(&mut self) -> Option<Result<Bytes, Problem>> {
        let body = self.body.as_mut()?;
        loop {
            let frame = match tokio::time::timeout_at(self.deadline, body.frame()).await {
                Err(_) => return Some(Err(failed("the answer did not end in time"))),
                Ok(Some(Err(e))) => return Some(Err(failed(format!("the answer broke off: {e}")))),
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => {
                    self.body = None;
                    let held = self.scrubber.as_mut()?.finish();
                    return (!held.is_empty()).then(|| Ok(held.into()));
                }
            };
            // Trailers are dropped.
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

/// The answer as the sandbox gets it.
fn finish(head: Head, rest: Rest, mut note: Note) -> Response<Body> {
    note.line.status = Some(head.status.as_u16());
    let body = match rest {
        Rest::Whole(bytes) => full(bytes),
        Rest::Coming(coming) => {
            let pieces = stream::unfold(Some((coming, note)), |state| async {
                let (mut coming, mut note) = state?;
                match coming.next().await? {
                    Ok(bytes) => {
                        note.line.bytes_down += bytes.len() as u64;
                        Some((Ok(Frame::data(bytes)), Some((coming, note))))
                    }
                    Err(problem) => {
                        note.problem(&problem);
                        Some((Err(io::Error::other(problem.to_string())), None))
                    }
                }
            });
            StreamBody::new(Box::pin(pieces)).boxed()
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}
