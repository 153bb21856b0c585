//! The beginning of a connection to a listener with TLS.

use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// First byte of a client that speaks TLS: a record of a handshake.
const HANDSHAKE: u8 = 0x16;
/// Maximum bytes that are read of a client that does not.
const MAX_PLAIN_BYTES: usize = 64 << 10;
/// The answer to a client that speaks plain HTTP.
const PLAIN: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\
      content-length: 59\r\n\r\nthis port speaks TLS: use https:// in place of http:// here";

/// The connection after its handshake, until a moment. `None`: it failed or took too long.
pub(super) async fn shaken(
    config: Arc<rustls::ServerConfig>,
    stream: TcpStream,
    until: Instant,
) -> Option<TlsStream<TcpStream>> {
    let mut first = [0];
    let peeked = timeout_at(until, stream.peek(&mut first)).await;
    if !matches!(peeked, Ok(Ok(1))) {
        return None;
    }
    if first[0] != HANDSHAKE {
        if first[0].is_ascii_alphabetic() {
            drop(timeout_at(until, refuse(stream)).await);
        }
        return None;
    }
    match timeout_at(until, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => None,
    }
}

/// Answers a plain request. What the client still sends is read, since the kernel would cut the answer off
/// otherwise.
async fn refuse(mut stream: TcpStream) -> std::io::Result<()> {
    stream.write_all(PLAIN).await?;
    stream.shutdown().await?;
    let (mut buffer, mut seen) = ([0; 4096], 0);
    while seen < MAX_PLAIN_BYTES {
        match stream.read(&mut buffer).await? {
            0 => break,
            n => seen += n,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_answer_has_the_length_that_it_names() {
        let text = String::from_utf8(PLAIN.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}", body.len())),
            "{}",
            body.len()
        );
        assert!(head.lines().all(|line| !line.starts_with(' ')));
    }
}
