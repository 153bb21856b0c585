//! The one address that a sandboxed agent can reach: a listener inside its network namespace,
//! whose connections end at a listener of this process.

use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

/// Most connections through one door at the same time; more wait.
const MAX_CONNECTIONS: usize = 1024;

/// Forwards connections until it is dropped.
#[derive(Debug)]
pub(super) struct Door(JoinHandle<()>);

impl Door {
    /// Forwards what `inside` accepts to `to`.
    pub(super) fn open(inside: std::net::TcpListener, to: SocketAddr) -> std::io::Result<Self> {
        inside.set_nonblocking(true)?;
        let listener = TcpListener::from_std(inside)?;
        Ok(Self(tokio::spawn(forward(listener, to))))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn forward(listener: TcpListener, to: SocketAddr) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        let Ok((mut inner, _)) = listener.accept().await else {
            return;
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
    async fn bytes_go_both_ways_and_stop_with_the_door() {
        let gateway = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = gateway.local_addr().unwrap();
        let inside = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = inside.local_addr().unwrap();
        let door = Door::open(inside, to).unwrap();
        let mut agent = TcpStream::connect(at).await.unwrap();
        agent.write_all(b"ask").await.unwrap();
        let (mut served, _) = gateway.accept().await.unwrap();
        let mut asked = [0; 3];
        served.read_exact(&mut asked).await.unwrap();
        assert_eq!(&asked, b"ask");
        served.write_all(b"told").await.unwrap();
        let mut told = [0; 4];
        agent.read_exact(&mut told).await.unwrap();
        assert_eq!(&told, b"told");
        drop(door);
        assert_eq!(agent.read(&mut told).await.unwrap_or(0), 0);
    }
}
