//! To the servers: resolve, check, connect to exactly what was checked.

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
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, pki_types::ServerName};

/// Addresses of one name that are looked at.
const MAX_ADDRESSES: usize = 16;
/// How long one address may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Finds the addresses of names.
pub trait Resolve: Send + Sync + std::fmt::Debug {
    /// All addresses of a name.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, std::io::Result<Vec<IpAddr>>>;
}

/// As the host does.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, std::io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            // The final dot keeps search domains out.
            let found = tokio::net::lookup_host((format!("{name}."), 0)).await;
            let found = match found {
                Ok(found) => found.collect::<Vec<_>>(),
                // Some resolvers know names of `/etc/hosts` only without it.
                Err(_) => tokio::net::lookup_host((name, 0)).await?.collect(),
            };
            Ok(found.into_iter().map(|a| a.ip()).collect())
        })
    }
}

/// A stream to a server, plain or TLS.
pub(crate) trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// Resolves and checks. One forbidden address refuses the name: an honest one has none.
async fn addresses(
    resolver: &dyn Resolve,
    rule: &Rule,
    host: &Host,
) -> Result<Vec<IpAddr>, Problem> {
    let mut found = match host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => resolver
            .resolve(name)
            .await
            .map_err(|e| failed(format!("resolve {host}: {e}")))?,
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

/// A TCP connection to one of the checked addresses.
pub(crate) async fn connect(
    resolver: &dyn Resolve,
    rule: &Rule,
    host: &Host,
    port: u16,
) -> Result<(TcpStream, SocketAddr), Problem> {
    // Why, and at which address: the log's affair alone.
    let (mut last, mut at) = (String::new(), String::new());
    for address in addresses(resolver, rule, host).await? {
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
    let told = format!("connect to {host}: {last}");
    Err(failed_with(&told, format!("{told} (at {at})")))
}

/// A connection on which requests for the target can be sent.
pub(crate) async fn open(
    resolver: &dyn Resolve,
    tls: &Arc<ClientConfig>,
    rule: &Rule,
    target: &Target,
) -> Result<(Box<dyn Io>, SocketAddr), Problem> {
    let (stream, address) = connect(resolver, rule, &target.host, target.port).await?;
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
