//! Messages over WebSocket, one at a time, with deadlines.

use futures::{SinkExt, StreamExt};
use serde_json::Value;
use sinew_bridge::remote::MAX_BODY;
use sinew_http::{Url, tls};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::http::header::AUTHORIZATION;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

/// A connection below the socket: TCP, or TLS over it.
trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// Reasons why there is no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum SocketError {
    /// The server closed the socket.
    #[error("the server closed the session")]
    Closed,
    /// No connection, or a broken one.
    #[error("{0}")]
    Lost(String),
    /// No answer in time.
    #[error("no answer within {0} s")]
    Late(f64),
    /// An answer that is none of the protocol's.
    #[error("the answer is not as expected: {0}")]
    Protocol(String),
}

/// A socket of a server.
pub(super) struct Socket {
    /// Messages and frames of at most [`MAX_BODY`] bytes.
    stream: WebSocketStream<Box<dyn Wire>>,
}

impl Socket {
    /// Connects to the route `/ws` of a server.
    pub(super) async fn open(
        url: &Url,
        key: Option<&str>,
        limit: Duration,
    ) -> Result<Self, SocketError> {
        let late = |_| SocketError::Late(limit.as_secs_f64());
        tokio::time::timeout(limit, Self::connect(url, key))
            .await
            .map_err(late)?
    }

    /// Opens TCP, TLS for `https`, and the socket, without a separate deadline.
    ///
    /// # Errors
    /// [`SocketError::Lost`] with the reason, also if the server refuses the key.
    async fn connect(url: &Url, key: Option<&str>) -> Result<Self, SocketError> {
        let lost = |e: &dyn std::fmt::Display| SocketError::Lost(e.to_string());
        let host = url.host_str().unwrap_or_default();
        let port = url.port_or_known_default().unwrap_or(80);
        let tcp = TcpStream::connect((host.trim_matches(['[', ']']), port)).await;
        let tcp = tcp.map_err(|e| lost(&e))?;
        tcp.set_nodelay(true).map_err(|e| lost(&e))?;
        let secure = url.scheme() == "https";
        let wire: Box<dyn Wire> = if secure {
            let name = ServerName::try_from(host.to_owned()).map_err(|e| lost(&e))?;
            let connector = TlsConnector::from(Arc::new(tls()));
            Box::new(connector.connect(name, tcp).await.map_err(|e| lost(&e))?)
        } else {
            Box::new(tcp)
        };
        let scheme = if secure { "wss" } else { "ws" };
        let path = url.path().trim_end_matches('/');
        let address = format!("{scheme}://{host}:{port}{path}/ws");
        let mut request = address.into_client_request().map_err(|e| lost(&e))?;
        if let Some(key) = key {
            let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|e| lost(&e))?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_BODY))
            .max_frame_size(Some(MAX_BODY));
        let connected = client_async_with_config(request, wire, Some(config)).await;
        let (stream, _) = connected.map_err(|e| lost(&e))?;
        Ok(Self { stream })
    }

    /// Sends a message, and waits for its answer.
    pub(super) async fn ask(
        &mut self,
        message: &Value,
        limit: Duration,
    ) -> Result<Value, SocketError> {
        let asked = self.exchange(message);
        let late = |_| SocketError::Late(limit.as_secs_f64());
        tokio::time::timeout(limit, asked).await.map_err(late)?
    }

    /// Sends a message, and reads frames until one is a text. Pings are skipped.
    ///
    /// # Errors
    /// [`SocketError`], all but `Late`: the caller sets the deadline.
    async fn exchange(&mut self, message: &Value) -> Result<Value, SocketError> {
        // A full server reports that, and closes: its message may wait to be read though sending fails.
        let sent = self.stream.send(Message::text(message.to_string())).await;
        loop {
            let Some(frame) = self.stream.next().await else {
                return Err(SocketError::Closed);
            };
            match frame {
                Ok(Message::Text(text)) => {
                    let parsed = sinew_types::json::from_str(&text);
                    return parsed.map_err(|e| SocketError::Protocol(e.to_string()));
                }
                Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed) => {
                    return Err(SocketError::Closed);
                }
                Ok(Message::Binary(_)) => {
                    return Err(SocketError::Protocol("bytes in place of text".into()));
                }
                Ok(_) => {}
                Err(e) => {
                    let why = sent.err().map_or_else(|| e.to_string(), |s| s.to_string());
                    return Err(SocketError::Lost(why));
                }
            }
        }
    }

    /// Closes the connection.
    pub(super) async fn close(mut self, limit: Duration) {
        let goodbye = async {
            let farewell = r#"{"type":"close"}"#;
            let _ = self.stream.send(Message::text(farewell)).await;
            let _ = self.stream.close(None).await;
        };
        // The server notices a lost socket as well.
        let _ = tokio::time::timeout(limit, goodbye).await;
    }
}
