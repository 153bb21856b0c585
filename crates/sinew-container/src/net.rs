//! Listeners of the host inside a container's network.

use std::io::{Error, Result};
use std::net::TcpListener;

/// Listens on `127.0.0.1:port` in the network namespace of process `pid`, and turns its loopback interface
/// on. A short-lived thread enters the namespace, so that no thread of the caller moves.
///
/// # Errors
/// If the namespace cannot be entered or the port is taken.
pub(crate) fn listen_in(pid: i32, port: u16) -> Result<TcpListener> {
    let there = std::fs::File::open(format!("/proc/{pid}/ns/net"))?;
    // Only this thread moves, and it ends there.
    let thread = std::thread::spawn(move || {
        sinew_sandbox::enter_network(&there)?;
        let listener = TcpListener::bind(("127.0.0.1", port))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    thread
        .join()
        .map_err(|_| Error::other("the thread that listens died"))?
}
