//! The only address that a sandboxed program can reach: a listener inside its network namespace, whose
//! connections are forwarded to a listener of this process.

use sinew_http::server::at_most_part_of_files;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

/// Maximum number of concurrent connections of one sandbox; further ones wait.
const MAX_CONNECTIONS: usize = 256;
/// Divisor: one sandbox may have at most this fraction of the file limit of the process as connections. Each
/// connection takes three files: two here, and one in the model server.
const PART_OF_FILES: usize = 64;

/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(10);

/// Forwards connections. Dropping it stops this and closes open connections.
#[derive(Debug)]
pub(super) struct PortForward(JoinHandle<()>);

impl PortForward {
    /// Forwards connections that `inside` accepts to `to`. Must be called in an async runtime.
    pub(super) fn start(inside: std::net::TcpListener, to: SocketAddr) -> std::io::Result<Self> {
        inside.set_nonblocking(true)?;
        let listener = TcpListener::from_std(inside)?;
        Ok(Self(tokio::spawn(forward(listener, to))))
    }
}

impl Drop for PortForward {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Connects each accepted connection to `to`. If that fails, the connection is closed, which the program sees
/// as a server that hangs up.
async fn forward(listener: TcpListener, to: SocketAddr) {
    let most = at_most_part_of_files(MAX_CONNECTIONS, PART_OF_FILES);
    let slots = Arc::new(Semaphore::new(most));
    let mut connections = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        let Ok((mut inner, _)) = listener.accept().await else {
            // The process has no free file for a moment, or the program has closed already.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        connections.spawn(async move {
            let _permit = permit;
            let Ok(mut outer) = TcpStream::connect(to).await else {
                return;
            };
            // A refused option only costs time.
            let _ = (inner.set_nodelay(true), outer.set_nodelay(true));
            let _ = tokio::io::copy_bidirectional(&mut inner, &mut outer).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn bytes_go_both_ways_until_it_is_dropped() {
        let gateway = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = gateway.local_addr().unwrap();
        let inside = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = inside.local_addr().unwrap();
        let forward = PortForward::start(inside, to).unwrap();
        let mut agent = TcpStream::connect(at).await.unwrap();
        agent.write_all(b"ask").await.unwrap();
        let (mut served, _) = gateway.accept().await.unwrap();
        let mut asked = [0; 3];
        served.read_exact(&mut asked).await.unwrap();
        assert_eq!(&asked, b"ask");
        served.write_all(b"said").await.unwrap();
        let mut answer = [0; 4];
        agent.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"said");
        drop(forward);
        assert_eq!(agent.read(&mut answer).await.unwrap_or(0), 0);
    }
}
