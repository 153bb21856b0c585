//! Connections to servers: resolve, check, and connect to exactly the checked addresses.

use crate::body::{Problem, failed, failed_with};
use crate::host::Host;
use crate::policy::Rule;
use crate::policy::Scheme;
use crate::request::Target;
use futures::future::BoxFuture;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, pki_types::ServerName};

/// Maximum number of addresses that are tried per name.
const MAX_ADDRESSES: usize = 16;
/// Time to connect to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Resolver of host names.
pub trait Resolve: Send + Sync + std::fmt::Debug {
    /// Returns all addresses of `name`.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, std::io::Result<Vec<IpAddr>>>;
}

/// Resolver of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, std::io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            // The final dot disables search domains.
            let found = tokio::net::lookup_host((format!("{name}."), 0)).await;
            let found = match found {
                Ok(found) => found.collect::<Vec<_>>(),
                // Some resolvers find names of `/etc/hosts` only without the dot.
                Err(_) => tokio::net::lookup_host((name, 0)).await?.collect(),
            };
            Ok(found.into_iter().map(|a| a.ip()).collect())
        })
    }
}

/// A plain or TLS stream to a server.
pub(crate) trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// Look-ups of one sandbox.
#[derive(Debug)]
pub(crate) struct Names {
    /// Resolver of host names.
    pub(crate) resolver: Arc<dyn Resolve>,
    /// Free look-ups.
    pub(crate) places: Arc<Semaphore>,
}

impl Names {
    /// Looks a name up. A look-up of the system cannot be stopped and holds a thread: it counts against the
    /// sandbox until it ends, also if nobody waits for it any more.
    async fn look_up(&self, name: &str) -> Result<Vec<IpAddr>, Problem> {
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(failed)?;
        let (resolver, name) = (Arc::clone(&self.resolver), name.to_owned());
        let found = tokio::spawn(async move {
            let found = resolver.resolve(&name).await;
            drop(place);
            found.map_err(|e| failed(format!("resolve {name}: {e}")))
        });
        found.await.map_err(failed)?
    }
}

/// Resolves a host and checks its addresses. One forbidden address refuses the host.
async fn addresses(names: &Names, rule: &Rule, host: &Host) -> Result<Vec<IpAddr>, Problem> {
    let mut found = match host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => names.look_up(name).await?,
    };
    if found.is_empty() {
        return Err(failed(format!("resolve {host}: no address")));
    }
    for address in &found {
        rule.address(host, *address)?;
    }
    found.truncate(MAX_ADDRESSES);
    Ok(found)
}

/// Opens a TCP connection to the first checked address that accepts it.
pub(crate) async fn connect(
    names: &Names,
    rule: &Rule,
    host: &Host,
    port: u16,
) -> Result<(TcpStream, SocketAddr), Problem> {
    // The address appears only in the log.
    let (mut last, mut at) = (String::new(), String::new());
    for address in addresses(names, rule, host).await? {
        let to = SocketAddr::new(address, port);
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(to)).await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok((stream, to));
            }
            Ok(Err(e)) => last = e.to_string(),
            Err(_) => last = format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()),
        }
        at = to.to_string();
    }
    let message = format!("connect to {host}: {last}");
    Err(failed_with(&message, format!("{message} (at {at})")))
}

/// Opens a connection for requests to `target`, with TLS for `https`.
pub(crate) async fn open(
    names: &Names,
    tls: &Arc<ClientConfig>,
    rule: &Rule,
    target: &Target,
) -> Result<(Box<dyn Io>, SocketAddr), Problem> {
    let (stream, address) = connect(names, rule, &target.host, target.port).await?;
    if target.scheme == Scheme::Http {
        return Ok((Box::new(stream), address));
    }
    let name = match &target.host {
        Host::Name(name) => {
            ServerName::try_from(name.clone()).map_err(|e| failed(format!("TLS to {name}: {e}")))?
        }
        Host::Address(address) => ServerName::from(*address),
    };
    let connector = TlsConnector::from(Arc::clone(tls));
    let stream = connector.connect(name, stream).await;
    let stream = stream.map_err(|e| failed(format!("TLS to {}: {e}", target.host)))?;
    Ok((Box::new(stream), address))
}
