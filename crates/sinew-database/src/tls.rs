//! Encrypted connections to PostgreSQL, verified by Mozilla's root certificates or those of a file.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;

/// Makes connections of one configuration.
#[derive(Clone)]
pub(crate) struct Tls(TlsConnector);

impl Tls {
    /// Trusts the certificates of a PEM file, or Mozilla's.
    ///
    /// # Errors
    /// If the file has no certificate, as text.
    pub(crate) fn new(roots: Option<&Path>) -> Result<Self, String> {
        let Some(file) = roots else {
            return Ok(Self(TlsConnector::from(Arc::new(sinew_http::tls()))));
        };
        let bad = |e: String| format!("sslrootcert {}: {e}", file.display());
        let mut store = RootCertStore::empty();
        let found = CertificateDer::pem_file_iter(file).map_err(|e| bad(e.to_string()))?;
        for certificate in found {
            let certificate = certificate.map_err(|e| bad(e.to_string()))?;
            store.add(certificate).map_err(|e| bad(e.to_string()))?;
        }
        if store.is_empty() {
            return Err(bad("it has no certificate".into()));
        }
        let config = ClientConfig::builder()
            .with_root_certificates(store)
            .with_no_client_auth();
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }
}

impl<S> MakeTlsConnect<S> for Tls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Encrypted<S>;
    type TlsConnect = ConnectTls;
    type Error = io::Error;

    fn make_tls_connect(&mut self, domain: &str) -> io::Result<ConnectTls> {
        let name = ServerName::try_from(domain.to_owned());
        Ok(ConnectTls {
            connector: self.0.clone(),
            name: name.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?,
        })
    }
}

/// Makes one connection, to a server of this name.
pub(crate) struct ConnectTls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl<S> TlsConnect<S> for ConnectTls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Encrypted<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Encrypted<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let stream = self.connector.connect(self.name, stream).await?;
            Ok(Encrypted(stream))
        })
    }
}

/// An encrypted connection.
pub(crate) struct Encrypted<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Encrypted<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
