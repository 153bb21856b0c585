//! The dashboard over HTTP, and in a real browser.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod api;
mod browser;
mod chromium;
mod data;
mod screens;

use sinew_dashboard::{Dashboard, Ports};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

/// A dashboard that serves until it is dropped.
struct Served {
    address: SocketAddr,
    url: String,
    token: String,
    _runtime: tokio::runtime::Runtime,
}

fn serve(folder: &Path) -> Served {
    serve_with(
        folder,
        Ports {
            store: Arc::new(data::open_store),
            renderer: Arc::new(|_, _| Ok(Arc::new(sinew_render::byte_renderer().unwrap()))),
            environments: sinew_env::Registry::new(&sinew_env::BUILT_IN),
            late: Arc::new(|_| None),
        },
    )
}

fn serve_with(folder: &Path, ports: Ports) -> Served {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let at = SocketAddr::from(([127, 0, 0, 1], 0));
    let bound = runtime.block_on(Dashboard::bind(at, vec![folder.to_owned()], ports));
    let dashboard = bound.unwrap();
    let (address, url) = (dashboard.address(), dashboard.url());
    let token = dashboard.token().to_owned();
    runtime.spawn(dashboard.serve());
    Served {
        address,
        url,
        token,
        _runtime: runtime,
    }
}

/// Status, head and body of an answer.
fn ask(address: SocketAddr, method: &str, path: &str, header: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n"
    )
    .unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_lowercase(), body.to_owned())
}

impl Served {
    /// A path with the token.
    fn get(&self, path: &str) -> (u16, serde_json::Value) {
        let header = format!("authorization: Bearer {}\r\n", self.token);
        let (status, _, body) = ask(self.address, "GET", path, &header);
        (status, serde_json::from_str(&body).unwrap_or_default())
    }
}
