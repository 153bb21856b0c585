//! Servers, resolvers and clients for the tests.

use futures::future::BoxFuture;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use sinew_egress::{
    AuditLine, CredentialConfig, EgressConfig, Proxy, ProxyOptions, Resolve, RuleConfig,
    RuleScheme, Session, SessionListener,
};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig, crypto::ring};
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub(crate) const SECRET: &str = "sk-0123456789abcdef";

/// Resolver with a table. Each name has a list of results, and the last one is repeated.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub(crate) results: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    pub(crate) queries: Mutex<Vec<String>>,
    /// Look-ups of names below `hangs.test`, which nobody answers.
    pub(crate) hanging: AtomicUsize,
}

impl Names {
    pub(crate) fn set(&self, name: &str, results: &[&[&str]]) {
        let lists = results
            .iter()
            .map(|l| l.iter().map(|a| a.parse().unwrap()).collect())
            .collect();
        self.results.lock().unwrap().insert(name.into(), lists);
    }

    pub(crate) fn queries(&self) -> usize {
        self.queries.lock().unwrap().len()
    }
}

impl Resolve for Names {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            self.queries.lock().unwrap().push(name.into());
            if name.ends_with(".hangs.test") {
                self.hanging.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<()>().await;
            }
            let mut results = self.results.lock().unwrap();
            let lists = results.get_mut(name).ok_or(io::ErrorKind::NotFound)?;
            Ok(if lists.len() > 1 {
                lists.remove(0)
            } else {
                lists[0].clone()
            })
        })
    }
}

/// Response to the n-th request of a server.
type Script = Arc<dyn Fn(usize, &str) -> Vec<u8> + Send + Sync>;

pub(crate) struct Server {
    pub(crate) port: u16,
    /// Raw requests, headers and bodies.
    pub(crate) seen: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(crate) fn requests(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    seen: Arc<Mutex<Vec<String>>>,
    script: Script,
) {
    // Reads until a pause, so that a smuggled second request is also seen.
    let mut text = Vec::new();
    let mut chunk = [0; 4096];
    let mut pause = Duration::from_secs(60);
    while let Ok(Ok(n @ 1..)) = tokio::time::timeout(pause, stream.read(&mut chunk)).await {
        text.extend_from_slice(&chunk[..n]);
        pause = Duration::from_millis(60);
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let n = {
        let mut seen = seen.lock().unwrap();
        seen.push(text.clone());
        seen.len() - 1
    };
    let response = script(n, &text);
    let _ = stream.write_all(&response).await;
    if response.ends_with(b"FLOOD") {
        while stream.write_all(&[b'x'; 16384]).await.is_ok() {}
    }
    if response.ends_with(b"HANG") {
        std::future::pending::<()>().await;
    }
    let _ = stream.shutdown().await;
}

/// A response with a length.
pub(crate) fn ok(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

pub(crate) struct World {
    pub(crate) names: Arc<Names>,
    pub(crate) proxy: Proxy,
    issuer: Issuer<'static, KeyPair>,
    pub(crate) dir: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let names = Arc::new(Names::default());
        let resolver: Arc<dyn Resolve> = Arc::clone(&names) as Arc<dyn Resolve>;
        let options = ProxyOptions {
            resolver,
            extra_roots_pem: pem,
        };
        Self {
            names,
            proxy: Proxy::new(options).unwrap(),
            issuer: Issuer::new(params, key),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) async fn plain(
        &self,
        script: impl Fn(usize, &str) -> Vec<u8> + Send + Sync + 'static,
    ) -> Server {
        self.server(None, Arc::new(script)).await
    }

    /// A TLS server with a certificate for the name.
    pub(crate) async fn tls(
        &self,
        name: &str,
        script: impl Fn(usize, &str) -> Vec<u8> + Send + Sync + 'static,
    ) -> Server {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_string()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::Pkcs8(key.serialize_der().into()),
            )
            .unwrap();
        self.server(Some(TlsAcceptor::from(Arc::new(config))), Arc::new(script))
            .await
    }

    async fn server(&self, tls: Option<TlsAcceptor>, script: Script) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let own = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, script, tls) = (Arc::clone(&own), Arc::clone(&script), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => serve(stream, seen, script).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(stream, seen, script).await;
                            }
                        }
                    }
                });
            }
        });
        Server { port, seen, task }
    }

    pub(crate) fn client(&self, config: &EgressConfig) -> Client {
        self.client_for("episode", config)
    }

    pub(crate) fn client_for(&self, episode: &str, config: &EgressConfig) -> Client {
        let policy = config
            .policy(&|name| (name == "KEY").then(|| SECRET.into()))
            .unwrap();
        let log = self.dir.path().join(format!("{episode}.audit.jsonl"));
        let session = self
            .proxy
            .session(episode, policy, config, Some(&log))
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let served = session.serve(listener).unwrap();
        Client {
            session,
            served: Some(served),
            address,
            log,
            authority: self.proxy.authority_pem().into(),
        }
    }
}

/// Client of a session, as a program in a sandbox.
pub(crate) struct Client {
    pub(crate) session: Session,
    pub(crate) served: Option<SessionListener>,
    pub(crate) address: SocketAddr,
    log: std::path::PathBuf,
    authority: String,
}

impl Client {
    /// Sends bytes and reads the response to its end.
    pub(crate) async fn raw(&self, bytes: impl AsRef<[u8]>) -> String {
        let stream = TcpStream::connect(self.address).await.unwrap();
        talk(stream, bytes.as_ref()).await
    }

    pub(crate) async fn get(&self, url: &str) -> String {
        self.raw(get(url)).await
    }

    /// Opens a tunnel. The error is the response of a refusal.
    pub(crate) async fn tunnel(&self, authority: &str) -> Result<TcpStream, String> {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream
            .write_all(
                format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n").as_bytes(),
            )
            .await
            .unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => break,
            }
        }
        let mut head = String::from_utf8(head).unwrap();
        if head.starts_with("HTTP/1.1 200") {
            return Ok(stream);
        }
        let length: usize = header(&head, "content-length")
            .unwrap_or("0")
            .parse()
            .unwrap();
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        head.push_str(&String::from_utf8(body).unwrap());
        Err(head)
    }

    /// Opens TLS through a tunnel with this server name and these root certificates.
    pub(crate) async fn tls(
        &self,
        authority: &str,
        sni: &str,
        roots_pem: &str,
    ) -> Result<impl AsyncRead + AsyncWrite + Unpin + use<>, String> {
        let stream = self.tunnel(authority).await?;
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(roots_pem.as_bytes()).unwrap())
            .unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(sni.to_string()).unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
            .map_err(|e| e.to_string())
    }

    /// Sends bytes inside of an intercepted tunnel.
    pub(crate) async fn inside(
        &self,
        host: &str,
        port: u16,
        bytes: impl AsRef<[u8]>,
    ) -> Result<String, String> {
        let stream = self
            .tls(&format!("{host}:{port}"), host, &self.authority)
            .await?;
        Ok(talk(stream, bytes.as_ref()).await)
    }

    /// Ends the session's listener and reads the audit log.
    pub(crate) async fn audit(&mut self) -> Vec<AuditLine> {
        self.served = None;
        // Aborted tasks write their lines when the runtime drops them.
        tokio::time::sleep(Duration::from_millis(30)).await;
        let text = std::fs::read_to_string(&self.log).unwrap();
        text.lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect()
    }
}

/// A request for a proxy that closes the connection.
pub(crate) fn get(url: &str) -> String {
    let host = url.split('/').nth(2).unwrap();
    format!("GET {url} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")
}

async fn talk(mut stream: impl AsyncRead + AsyncWrite + Unpin, bytes: &[u8]) -> String {
    stream.write_all(bytes).await.unwrap();
    let mut response = Vec::new();
    let read =
        tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut response)).await;
    let _ = read.expect("a response that ends");
    String::from_utf8_lossy(&response).into_owned()
}

pub(crate) fn header<'a>(response: &'a str, name: &str) -> Option<&'a str> {
    let head = response.split("\r\n\r\n").next()?;
    head.lines().find_map(|l| {
        l.split_once(": ")
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v)
    })
}

pub(crate) fn body(response: &str) -> &str {
    response.split_once("\r\n\r\n").map_or("", |(_, b)| b)
}

pub(crate) fn status(response: &str) -> u16 {
    response
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .unwrap_or(0)
}

/// A rule for one host that may resolve to loopback.
pub(crate) fn rule(host: &str, scheme: RuleScheme, port: u16) -> RuleConfig {
    RuleConfig {
        host: host.into(),
        scheme,
        ports: vec![port],
        addresses: vec!["127.0.0.1/32".into()],
        ..RuleConfig::default()
    }
}

pub(crate) fn config(rules: Vec<RuleConfig>) -> EgressConfig {
    EgressConfig {
        rules,
        credentials: vec![CredentialConfig {
            name: "key".into(),
            header: "authorization".into(),
            prefix: "Bearer ".into(),
            env: "KEY".into(),
        }],
        ..EgressConfig::default()
    }
}
