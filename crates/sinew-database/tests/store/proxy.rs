//! A proxy that drops connections: after so many bytes from the server, in the middle of whatever is said.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// A proxy in front of a server of this host. Its threads end with the test's process.
pub(crate) struct Proxy {
    port: u16,
    dropped: Arc<AtomicU64>,
}

impl Proxy {
    /// Drops connection number `n` after `after(n)` bytes of answers.
    pub(crate) fn start(server: u16, after: impl Fn(u64) -> u64 + Send + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let dropped = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&dropped);
        thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                let client = client.unwrap();
                let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).unwrap();
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || carry(from, to, u64::MAX));
                let (limit, count) = (after(number as u64), Arc::clone(&count));
                thread::spawn(move || {
                    if carry(server, client, limit) {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        Self { port, dropped }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Number of connections that were dropped at their limit.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Carries bytes until one side closes, or `limit` bytes were carried, which it reports. Both sides are
/// closed then.
fn carry(mut from: TcpStream, mut to: TcpStream, limit: u64) -> bool {
    let (mut left, mut buffer) = (limit, [0; 4_096]);
    loop {
        let room = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = if room == 0 {
            0
        } else {
            from.read(&mut buffer[..room]).unwrap_or(0)
        };
        if read == 0 || to.write_all(&buffer[..read]).is_err() {
            // The other side may be closed already.
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
            return left == 0;
        }
        left -= read as u64;
    }
}
