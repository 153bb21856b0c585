//! The way of one request to the server and back.

use crate::error::TorchError;
use bytes::Bytes;
use sinew_http::blocking;
use sinew_http::header::CONTENT_TYPE;
use sinew_http::{ClientOptions, HttpError, Method};
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Content type of requests and answers.
const MESSAGE_PACK: &str = "application/msgpack";
/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Maximum bytes of an answer.
const MAX_ANSWER: u64 = 1 << 30;

/// An answer of any status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The HTTP status.
    pub(crate) status: u16,
    /// The whole body.
    pub(crate) body: Vec<u8>,
}

/// Reasons for which there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The connection failed; the server may or may not have the request.
    Passing(String),
    /// The time is over.
    Late,
    /// Another attempt would fail as well.
    Lasting(String),
}

/// One request after the other, with time.
pub(crate) trait Transport: Send + fmt::Debug {
    /// Sends a request and reads the whole answer within `limit`.
    fn post(&mut self, verb: &str, body: &Bytes, limit: Duration) -> Result<Reply, Lost>;

    /// Waits before a repetition.
    fn pause(&mut self, time: Duration);

    /// Time since a fixed moment.
    fn now(&self) -> Duration;
}

/// The address of a server and its token.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerAddress {
    /// Address without a path, such as `http://127.0.0.1:41234`.
    pub url: String,
    /// The bearer token.
    pub token: String,
}

sinew_types::debug_fields!(ServerAddress, url);

impl ServerAddress {
    /// The server at `url` whose token is in a file.
    ///
    /// # Errors
    /// If the file cannot be read or is empty.
    pub fn with_token_file(url: &str, file: &Path) -> Result<Self, TorchError> {
        let text = std::fs::read_to_string(file).map_err(TorchError::io("read", file))?;
        let token = text.trim();
        if token.is_empty() {
            let text = format!("the token file {} is empty", file.display());
            return Err(TorchError::Setup(text));
        }
        Ok(Self {
            url: url.to_owned(),
            token: token.to_owned(),
        })
    }
}

/// HTTP with a bearer token. It must not be made, used or dropped on a thread of an async runtime.
pub(crate) struct HttpTransport {
    client: blocking::Client,
    url: String,
    token: String,
    start: Instant,
}

sinew_types::debug_fields!(HttpTransport, url);

impl HttpTransport {
    /// A client of `server`. Nothing is sent.
    ///
    /// # Errors
    /// If the address is none, or the system lacks what a client needs.
    pub(crate) fn new(server: &ServerAddress) -> Result<Self, TorchError> {
        let url = server.url.trim_end_matches('/');
        let wrong = |e: HttpError| TorchError::Setup(format!("address {url}: {e}"));
        sinew_http::address(url).map_err(wrong)?;
        let client = blocking::Client::new(ClientOptions {
            connect: Some(CONNECT),
            body_max: MAX_ANSWER,
            ..ClientOptions::default()
        });
        Ok(Self {
            client: client.map_err(wrong)?,
            url: url.to_owned(),
            token: server.token.clone(),
            start: Instant::now(),
        })
    }
}

impl Transport for HttpTransport {
    fn post(&mut self, verb: &str, body: &Bytes, limit: Duration) -> Result<Reply, Lost> {
        let request = self
            .client
            .request(Method::POST, &format!("{}/{verb}", self.url))
            .timeout(limit)
            .header(CONTENT_TYPE, MESSAGE_PACK)
            .bearer_auth(&self.token)
            .body(body.clone());
        let answer = self.client.ask(request).map_err(lost)?;
        Ok(Reply {
            status: answer.status.as_u16(),
            body: answer.body,
        })
    }

    fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

fn lost(error: HttpError) -> Lost {
    match error {
        HttpError::Connect { .. } | HttpError::Body(_) => Lost::Passing(error.to_string()),
        HttpError::Deadline(_) => Lost::Late,
        other => Lost::Lasting(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_from_files_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "secret\n").unwrap();
        let server = ServerAddress::with_token_file("http://127.0.0.1:1", &file).unwrap();
        assert_eq!(server.token, "secret");
        let transport = HttpTransport::new(&server).unwrap();
        assert!(!format!("{server:?} {transport:?}").contains("secret"));
        std::fs::write(&file, "\n").unwrap();
        let error = ServerAddress::with_token_file("http://127.0.0.1:1", &file).unwrap_err();
        assert!(error.to_string().contains("is empty"), "{error}");
        let wrong = ServerAddress {
            url: "ftp://host".into(),
            token: String::new(),
        };
        assert!(HttpTransport::new(&wrong).is_err());
    }

    #[test]
    fn a_port_without_a_server_may_be_tried_again() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", port.local_addr().unwrap());
        drop(port);
        let token = String::new();
        let mut transport = HttpTransport::new(&ServerAddress { url, token }).unwrap();
        let answer = transport.post("status", &Bytes::new(), Duration::from_secs(5));
        assert!(matches!(answer, Err(Lost::Passing(_))), "{answer:?}");
    }
}
