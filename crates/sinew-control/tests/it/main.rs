//! Roles over real sockets, and launchers against stand-ins of their engines.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engines;
mod processes;
mod served;
mod slurm;

use axum::Router;
use sinew_http::server::{self, ConnectionLimits, Guard, Key};
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Token of all tests.
const TOKEN: &str = "0123456789abcdef";

/// A server of routes on a free port, until it is dropped.
struct Served {
    address: SocketAddr,
    _stop: oneshot::Sender<()>,
    _runtime: Runtime,
}

impl Served {
    fn new(router: Router) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let guard = Guard::new(ConnectionLimits::default(), |_| Some(Key::Operator));
        runtime.spawn(async move {
            let stop = async { drop(stopped.await) };
            server::serve(listener, router, guard, stop).await;
        });
        Self {
            address,
            _stop: stop,
            _runtime: runtime,
        }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}
