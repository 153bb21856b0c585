//! A small HTTP/1.1 client. Every call has a connection of its own: closing it is how a
//! generation is aborted, and no stale connection can be met.

use crate::config::{ConfigError, Timeouts};
use crate::error::{AttemptError, Stage};
use crate::sse::SseParser;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinew_types::EngineError;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Longest answer that is no stream: the metrics of a large server fit.
const MAX_BODY_BYTES: usize = 16 << 20;
/// Of an error's text, that much is quoted.
const MAX_QUOTED: usize = 400;

/// A server's address and how it is spoken to.
#[derive(Clone)]
pub(crate) struct Http {
    name: String,
    host: String,
    port: u16,
    /// Without a final slash.
    path: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    authorization: Option<HeaderValue>,
    pub(crate) timeouts: Timeouts,
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Ends the connection when it is dropped.
#[derive(Debug)]
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer whose body may still be coming.
#[derive(Debug)]
pub(crate) struct Answer {
    response: Response<Incoming>,
    connection: Connection,
}

impl Http {
    pub(crate) fn new(
        url: &str,
        api_key: Option<&str>,
        timeouts: Timeouts,
    ) -> Result<Self, ConfigError> {
        let wrong = |why: String| ConfigError::Url {
            url: url.to_owned(),
            why,
        };
        let uri: Uri = url.parse().map_err(|e| wrong(format!("{e}")))?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("it must start with http:// or https://".to_owned())),
        };
        if uri.query().is_some() {
            return Err(wrong("it must not have a query".to_owned()));
        }
        let host = uri
            .host()
            .ok_or_else(|| wrong("it has no host".to_owned()))?;
        let host = host.trim_matches(['[', ']']).to_owned();
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        let authorization = api_key.map(|key| {
            let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                .map_err(|_| wrong("its key has characters that no header may have".to_owned()))?;
            value.set_sensitive(true);
            Ok(value)
        });
        let tls = if secure {
            let name = ServerName::try_from(host.clone());
            Some((connector(), name.map_err(|e| wrong(e.to_string()))?))
        } else {
            None
        };
        Ok(Self {
            name: url.to_owned(),
            host,
            port,
            path,
            tls,
            authorization: authorization.transpose()?,
            timeouts,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    async fn connect(&self) -> Result<(http1::SendRequest<Full<Bytes>>, Connection), AttemptError> {
        let failed = |why: String| AttemptError::Connect {
            to: self.name.clone(),
            why,
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(|e| failed(e.to_string()))?;
        // Small requests must not wait for an acknowledgement; without it they are only slower.
        let _ = stream.set_nodelay(true);
        Ok(match &self.tls {
            None => handshake(stream).await.map_err(failed)?,
            Some((tls, name)) => {
                let stream = tls.connect(name.clone(), stream).await;
                let stream = stream.map_err(|e| failed(format!("TLS: {e}")))?;
                handshake(stream).await.map_err(failed)?
            }
        })
    }

    /// Sends a request and waits for the head of the answer.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        head: (Stage, f64),
    ) -> Result<Answer, AttemptError> {
        let connect_s = self.timeouts.connect_s;
        let (mut sender, connection) = within(Stage::Connect, connect_s, self.connect()).await??;
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.path))
            .header(HOST, self.authority())
            .header(ACCEPT, "application/json, text/event-stream, text/plain");
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization.clone());
        }
        let bytes = body.map(|b| b.to_string()).unwrap_or_default();
        let request = request.body(Full::new(Bytes::from(bytes)));
        let request = request.map_err(|e| AttemptError::Unsupported(format!("{path}: {e}")))?;
        let response = within(head.0, head.1, sender.send_request(request)).await?;
        let response = response.map_err(|e| AttemptError::Cut(e.to_string()))?;
        Ok(Answer {
            response,
            connection,
        })
    }

    fn authority(&self) -> String {
        let host = &self.host;
        if host.contains(':') {
            format!("[{host}]:{}", self.port)
        } else {
            format!("{host}:{}", self.port)
        }
    }

    /// The whole answer to a small question, within `limit_s`.
    async fn whole(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        limit_s: f64,
    ) -> Result<Bytes, AttemptError> {
        let stage = Stage::Control;
        let all = async {
            let answer = self.send(method, path, body, (stage, limit_s)).await?;
            checked(answer).await?.bytes().await
        };
        within(stage, limit_s, all).await?
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, AttemptError> {
        let bytes = self.get_bytes(path).await?;
        serde_json::from_slice(&bytes).map_err(|e| AttemptError::Protocol(format!("{path}: {e}")))
    }

    pub(crate) async fn get_bytes(&self, path: &str) -> Result<Bytes, AttemptError> {
        let limit_s = self.timeouts.control_s;
        self.whole(Method::GET, path, None, limit_s).await
    }

    pub(crate) async fn get_text(&self, path: &str) -> Result<String, AttemptError> {
        let bytes = self.get_bytes(path).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The answer to a command, whatever its form.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: Option<&Value>,
        limit_s: f64,
    ) -> Result<Bytes, AttemptError> {
        self.whole(Method::POST, path, body, limit_s).await
    }

    /// Starts a generation whose tokens are streamed.
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<EventStream, AttemptError> {
        let first = (Stage::FirstToken, self.timeouts.first_token_s);
        let answer = self.send(Method::POST, path, Some(body), first).await?;
        let answer = within(first.0, first.1, checked(answer)).await??;
        Ok(EventStream {
            body: answer.response.into_body(),
            _connection: answer.connection,
            parser: SseParser::default(),
            ready: VecDeque::new(),
            first: true,
            timeouts: self.timeouts,
        })
    }
}

fn connector() -> TlsConnector {
    let roots = RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

async fn handshake(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
) -> Result<(http1::SendRequest<Full<Bytes>>, Connection), String> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| e.to_string())?;
    let task = tokio::spawn(async move {
        // Its errors reach whoever reads the answer.
        let _ = connection.await;
    });
    Ok((sender, Connection(task.abort_handle())))
}

/// `future`, or the error that it took too long.
pub(crate) async fn within<T>(
    stage: Stage,
    limit_s: f64,
    future: impl Future<Output = T>,
) -> Result<T, AttemptError> {
    let limit = Duration::from_secs_f64(limit_s);
    let done = tokio::time::timeout(limit, future).await;
    done.map_err(|_| AttemptError::Timeout { stage, limit_s })
}

/// The answer if its status says success; otherwise the error that it means.
async fn checked(answer: Answer) -> Result<Answer, AttemptError> {
    let status = answer.response.status();
    if status.is_success() {
        return Ok(answer);
    }
    let body = answer.bytes().await.unwrap_or_default();
    let body = quoted(&String::from_utf8_lossy(&body));
    Err(match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => AttemptError::Busy {
            status: status.as_u16(),
            body,
        },
        StatusCode::BAD_REQUEST
        | StatusCode::PAYLOAD_TOO_LARGE
        | StatusCode::UNPROCESSABLE_ENTITY => {
            let why = format!("the server answered {}: {body}", status.as_u16());
            AttemptError::Refused(EngineError::Failed(why))
        }
        _ => AttemptError::Status {
            status: status.as_u16(),
            body,
        },
    })
}

/// The beginning of a text, on one line.
pub(crate) fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(MAX_QUOTED).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short.replace(['\n', '\r'], " ").trim().to_owned()
}

impl Answer {
    async fn bytes(mut self) -> Result<Bytes, AttemptError> {
        let mut all = Vec::new();
        while let Some(frame) = self.response.body_mut().frame().await {
            let frame = frame.map_err(|e| AttemptError::Cut(e.to_string()))?;
            if let Some(data) = frame.data_ref() {
                all.extend_from_slice(data);
            }
            if all.len() > MAX_BODY_BYTES {
                let why = format!("an answer is longer than {MAX_BODY_BYTES} bytes");
                return Err(AttemptError::Protocol(why));
            }
        }
        drop(self.connection);
        Ok(Bytes::from(all))
    }
}

/// The events of a generation.
#[derive(Debug)]
pub(crate) struct EventStream {
    body: Incoming,
    _connection: Connection,
    parser: SseParser,
    ready: VecDeque<Vec<u8>>,
    first: bool,
    timeouts: Timeouts,
}

impl EventStream {
    /// The data of the next event; `None` when the server has closed the stream properly.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, AttemptError> {
        let (stage, limit_s) = if self.first {
            (Stage::FirstToken, self.timeouts.first_token_s)
        } else {
            (Stage::BetweenTokens, self.timeouts.between_tokens_s)
        };
        let event = within(stage, limit_s, self.read()).await??;
        self.first = false;
        Ok(event)
    }

    async fn read(&mut self) -> Result<Option<Vec<u8>>, AttemptError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let Some(frame) = self.body.frame().await else {
                if self.parser.is_cut() {
                    return Err(AttemptError::Cut("in the middle of an event".to_owned()));
                }
                return Ok(None);
            };
            let frame = frame.map_err(|e| AttemptError::Cut(e.to_string()))?;
            if let Some(data) = frame.data_ref() {
                let mut events = Vec::new();
                let pushed = self.parser.push(data, &mut events);
                pushed.map_err(|e| AttemptError::Protocol(e.to_string()))?;
                self.ready.extend(events);
            }
        }
    }
}

/// An event as JSON. `None` for `[DONE]`.
pub(crate) fn event<T: DeserializeOwned>(data: &[u8]) -> Result<Option<T>, AttemptError> {
    if data == b"[DONE]" {
        return Ok(None);
    }
    match serde_json::from_slice::<Value>(data) {
        Ok(mut value) => {
            if let Some(error) = value.get_mut("error").map(Value::take) {
                return Err(stream_error(&error));
            }
            let event = serde_json::from_value(value);
            event.map_err(|e| unreadable(&e, data))
        }
        Err(e) => Err(unreadable(&e, data)),
    }
    .map(Some)
}

fn unreadable(error: &serde_json::Error, data: &[u8]) -> AttemptError {
    let text = quoted(&String::from_utf8_lossy(data));
    AttemptError::Protocol(format!("{error} in `{text}`"))
}

/// An error that a server reports after it has begun to answer.
fn stream_error(error: &Value) -> AttemptError {
    let body = quoted(&match error.get("message").and_then(Value::as_str) {
        Some(message) => message.to_owned(),
        None => error.to_string(),
    });
    match error.get("code").and_then(Value::as_u64) {
        Some(code @ (400 | 413 | 422)) => {
            let why = format!("the server answered {code}: {body}");
            AttemptError::Refused(EngineError::Failed(why))
        }
        Some(code @ (429 | 503)) => AttemptError::Busy {
            status: code as u16,
            body,
        },
        Some(code) => AttemptError::Status {
            status: code.min(599) as u16,
            body,
        },
        None => AttemptError::Cut(format!("the server reports: {body}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(url: &str) -> Result<Http, ConfigError> {
        Http::new(url, Some("key"), Timeouts::default())
    }

    #[test]
    fn addresses_are_read() {
        let h = http("http://localhost:8000/v1/").unwrap();
        assert_eq!(
            (h.authority().as_str(), h.path.as_str()),
            ("localhost:8000", "")
        );
        let h = http("http://[::1]:9/proxy/v1").unwrap();
        assert_eq!(
            (h.authority().as_str(), h.path.as_str()),
            ("[::1]:9", "/proxy")
        );
        let h = http("https://example.org").unwrap();
        assert_eq!((h.port, h.tls.is_some()), (443, true));
    }

    #[test]
    fn wrong_addresses_are_refused_with_the_reason() {
        for (url, why) in [
            ("localhost:8000", "must start with http"),
            ("ftp://x", "must start with http"),
            ("http://x/?a=b", "query"),
            ("http://", ""),
        ] {
            let error = http(url).unwrap_err().to_string();
            assert!(error.contains(url) && error.contains(why), "{error}");
        }
    }

    #[test]
    fn keys_are_not_shown() {
        assert!(!format!("{:?}", http("http://x").unwrap()).contains("key"));
    }

    #[test]
    fn errors_inside_a_stream_are_told_apart() {
        let read = |text: &str| event::<Value>(text.as_bytes());
        assert_eq!(read("[DONE]"), Ok(None));
        assert_eq!(read("{\"a\":1}"), Ok(Some(serde_json::json!({"a": 1}))));
        assert!(matches!(
            read("{\"a\":NaN}"),
            Err(AttemptError::Protocol(_))
        ));
        let error =
            |code: &str| read(&format!("{{\"error\":{{\"message\":\"m\"{code}}}}}")).unwrap_err();
        assert!(matches!(error(",\"code\":400"), AttemptError::Refused(_)));
        assert!(matches!(error(",\"code\":503"), AttemptError::Busy { .. }));
        assert!(matches!(
            error(",\"code\":500"),
            AttemptError::Status { status: 500, .. }
        ));
        assert!(matches!(error(""), AttemptError::Cut(_)));
    }
}
