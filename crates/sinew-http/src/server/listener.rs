//! Addresses and sockets on which servers listen, with or without TLS.

use crate::identity::TlsIdentity;
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// An address to listen on; port 0 takes a free one.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The address.
    pub address: SocketAddr,
    /// Certificate and key; `None`: plain HTTP.
    pub tls: Option<TlsIdentity>,
}

impl From<SocketAddr> for Endpoint {
    /// Plain HTTP.
    fn from(address: SocketAddr) -> Self {
        Self { address, tls: None }
    }
}

impl Endpoint {
    /// `https` or `http`.
    pub fn scheme(&self) -> &'static str {
        scheme(self.tls.as_ref())
    }

    /// Listens.
    ///
    /// # Errors
    /// If the address cannot be taken.
    pub async fn bind(self) -> io::Result<Listener> {
        let tcp = TcpListener::bind(self.address).await?;
        Ok(Listener { tcp, tls: self.tls })
    }
}

fn scheme(tls: Option<&TlsIdentity>) -> &'static str {
    match tls {
        Some(_) => "https",
        None => "http",
    }
}

/// A socket that listens.
#[derive(Debug)]
pub struct Listener {
    pub(super) tcp: TcpListener,
    pub(super) tls: Option<TlsIdentity>,
}

impl From<TcpListener> for Listener {
    /// Plain HTTP.
    fn from(tcp: TcpListener) -> Self {
        Self { tcp, tls: None }
    }
}

impl Listener {
    /// Address on which it listens.
    ///
    /// # Errors
    /// If the system does not know it.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// `https` or `http`.
    pub fn scheme(&self) -> &'static str {
        scheme(self.tls.as_ref())
    }
}
