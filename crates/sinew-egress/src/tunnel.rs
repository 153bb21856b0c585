//! `CONNECT` tunnels: bytes are forwarded, or TLS is terminated here.
//!
//! An intercepting proxy presents a certificate, signed by its own authority, for the host of the tunnel, and
//! each request inside is checked like a plain one. Otherwise the proxy reads only the client hello: its
//! server name must be the host of the tunnel, and encrypted server names are refused. Then it forwards bytes
//! until both sides have ended, the quota is exhausted, or `request_s` is over.

use crate::body::{Body, Problem, failed, full};
use crate::client_hello::{Hello, MAX_HELLO_BYTES, client_hello};
use crate::connection::{AuditEntry, Connection};
use crate::exchange::serve_stream;
use crate::host::Host;
use crate::policy::{Denial, Reason, Rule, Scheme, TunnelMode};
use crate::request::{Target, connect_target};
use crate::upstream;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

/// Bytes per read of a forwarded tunnel.
const CHUNK_BYTES: usize = 16 << 10;

/// Connection to the sandbox after the response to CONNECT.
type Client = TokioIo<Upgraded>;

/// Responds to a CONNECT request. The tunnel continues in a separate task.
pub(crate) fn connect(connection: Connection, mut request: Request<Incoming>) -> Response<Body> {
    let authority = request
        .uri()
        .authority()
        .map(ToString::to_string)
        .unwrap_or_default();
    let mut entry = AuditEntry::new(&connection.session, "CONNECT", authority);
    if let Err(problem) = connection.session.begin() {
        return entry.refuse(&problem);
    }
    if connection.tunnel.is_some() {
        let denial = Denial::new(Reason::Method, "no tunnel inside of a tunnel");
        return entry.refuse(&denial.into());
    }
    let judged = connect_target(request.uri()).and_then(|(host, port)| {
        let rule = match connection.session.policy.connect(&host, port)? {
            TunnelMode::Intercept => None,
            TunnelMode::Pass(rule) => Some(rule.clone()),
        };
        Ok((host, port, rule))
    });
    let (host, port, rule) = match judged {
        Ok(judged) => judged,
        Err(denial) => return entry.refuse(&denial.into()),
    };
    entry.line.status = Some(200);
    let upgrade = hyper::upgrade::on(&mut request);
    let tasks = std::sync::Arc::clone(&connection.tasks);
    tasks.spawn(async move {
        let Ok(client) = upgrade.await else { return };
        let client = TokioIo::new(client);
        let limit = Duration::from_secs_f64(connection.session.quota.request_s);
        match rule {
            // Its requests have their own limits. The connection has none.
            None => intercept(connection, client, host, port, entry).await,
            Some(rule) => {
                let passed = tokio::time::timeout(
                    limit,
                    pass(&connection, client, &rule, &host, port, &mut entry),
                )
                .await;
                let passed = passed.unwrap_or_else(|_| {
                    Err(failed(format!(
                        "the tunnel's {} s are over",
                        limit.as_secs_f64()
                    )))
                });
                if let Err(problem) = passed {
                    entry.problem(&problem);
                }
            }
        }
    });
    Response::new(full(""))
}

/// Terminates TLS with a certificate for the host, and serves the requests inside.
async fn intercept(
    connection: Connection,
    client: Client,
    host: Host,
    port: u16,
    mut entry: AuditEntry,
) {
    let result = async {
        let config = connection
            .session
            .shared
            .authority
            .server(&host)
            .map_err(failed)?;
        let wait = Duration::from_secs_f64(connection.session.quota.request_s.min(30.0));
        let accepted = tokio::time::timeout(wait, TlsAcceptor::from(config).accept(client)).await;
        let stream = accepted
            .map_err(|_| failed("no TLS handshake in time"))?
            .map_err(|e| failed(format!("TLS handshake with the sandbox: {e}")))?;
        let named = stream
            .get_ref()
            .1
            .server_name()
            .map(str::to_ascii_lowercase);
        check_name(&host, named.as_deref())?;
        Ok::<_, Problem>(stream)
    };
    match result.await {
        Err(problem) => entry.problem(&problem),
        Ok(stream) => {
            entry.allowed("allowed");
            // The line of the tunnel is complete. Each request inside writes its own line.
            drop(entry);
            let target = Target {
                scheme: Scheme::Https,
                host,
                port,
            };
            let connection = Connection {
                tunnel: Some(target),
                ..connection
            };
            serve_stream(connection, stream).await;
        }
    }
}

/// Checks that the TLS server name equals the host of the tunnel.
fn check_name(host: &Host, named: Option<&str>) -> Result<(), Denial> {
    let other = |text: String| Err(Denial::new(Reason::Tls, text));
    match (host, named) {
        (_, Some(name)) if Host::parse(name).as_ref() == Ok(host) => Ok(()),
        (Host::Address(_), None) => Ok(()),
        (_, Some(name)) => other(format!(
            "the tunnel leads to {host}, but TLS asks for {name:?}"
        )),
        (Host::Name(_), None) => {
            other(format!("the tunnel leads to {host}, but TLS names no host"))
        }
    }
}

/// Reads and checks the client hello, before any connection to a server. Returns its bytes.
async fn judge_hello(client: &mut Client, host: &Host) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 4096];
    loop {
        match client_hello(&bytes) {
            Hello::Partial if bytes.len() <= MAX_HELLO_BYTES => {}
            Hello::Partial | Hello::NotTls => {
                let text = format!("the tunnel to {host} carries no TLS");
                return Err(Denial::new(Reason::Tls, text).into());
            }
            Hello::Client {
                encrypted: true, ..
            } => {
                let text = "an encrypted client hello hides the host that is asked for";
                return Err(Denial::new(Reason::Tls, text).into());
            }
            Hello::Client { name, .. } => {
                check_name(host, name.as_deref())?;
                return Ok(bytes);
            }
        }
        let n = client.read(&mut chunk).await.map_err(failed)?;
        if n == 0 {
            return Err(failed("the tunnel was closed before TLS began"));
        }
        bytes.extend_from_slice(&chunk[..n]);
    }
}

/// Forwards bytes in both directions until both have ended.
async fn pass(
    connection: &Connection,
    mut client: Client,
    rule: &Rule,
    host: &Host,
    port: u16,
    entry: &mut AuditEntry,
) -> Result<(), Problem> {
    let session = &connection.session;
    let hello = judge_hello(&mut client, host).await?;
    let (mut server, address) = upstream::connect(&session.names, rule, host, port).await?;
    entry.allowed("allowed");
    entry.line.address = Some(address.to_string());
    session.meter.up(hello.len())?;
    server.write_all(&hello).await.map_err(failed)?;
    entry.line.bytes_up = hello.len() as u64;
    let (client_read, client_write) = tokio::io::split(client);
    let (server_read, server_write) = server.split();
    let (line_up, line_down) = (&mut entry.line.bytes_up, &mut entry.line.bytes_down);
    let up = copy(client_read, server_write, line_up, |n| session.meter.up(n));
    let down = copy(server_read, client_write, line_down, |n| {
        session.meter.down(n)
    });
    tokio::try_join!(up, down)?;
    Ok(())
}

/// Copies one direction until its end. Adds to `total` and calls `count` with the bytes of each chunk.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    total: &mut u64,
    count: impl Fn(usize) -> Result<(), Denial>,
) -> Result<(), Problem> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = from.read(&mut chunk).await.map_err(failed)?;
        if n == 0 {
            let _ = to.shutdown().await;
            return Ok(());
        }
        count(n)?;
        *total += n as u64;
        to.write_all(&chunk[..n]).await.map_err(failed)?;
    }
}
