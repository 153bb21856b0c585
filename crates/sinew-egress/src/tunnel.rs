//! `CONNECT`: a tunnel whose bytes pass, or whose TLS ends here.

use crate::body::{Body, Problem, failed, full, refusal};
use crate::hello::{Hello, MAX_HELLO_BYTES, client_hello};
use crate::host::Host;
use crate::policy::{Denial, Reason, Rule, Scheme, Way};
use crate::proxy::{Note, Via, serve_stream};
use crate::request::{Target, connect_target};
use crate::upstream;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

const CHUNK_BYTES: usize = 16 << 10;

type Client = TokioIo<Upgraded>;

/// Answers a CONNECT request; the tunnel goes on in a task of its own.
pub(crate) fn connect(via: Via, mut request: Request<Incoming>) -> Response<Body> {
    let authority = request
        .uri()
        .authority()
        .map(ToString::to_string)
        .unwrap_or_default();
    let mut note = Note::new(&via.session, "CONNECT", authority);
    let refuse = |problem: Problem, mut note: Note| {
        note.problem(&problem);
        let response = refusal(&problem);
        note.line.status = Some(response.status().as_u16());
        response
    };
    if let Err(problem) = via.session.begin() {
        return refuse(problem, note);
    }
    if via.tunnel.is_some() {
        let denial = Denial::new(Reason::Method, "no tunnel inside of a tunnel");
        return refuse(denial.into(), note);
    }
    let judged = connect_target(request.uri()).and_then(|(host, port)| {
        let rule = match via.session.policy.connect(&host, port)? {
            Way::Intercept => None,
            Way::Pass(rule) => Some(rule.clone()),
        };
        Ok((host, port, rule))
    });
    let (host, port, rule) = match judged {
        Ok(judged) => judged,
        Err(denial) => return refuse(denial.into(), note),
    };
    note.line.status = Some(200);
    let upgrade = hyper::upgrade::on(&mut request);
    let tasks = std::sync::Arc::clone(&via.tasks);
    tasks.spawn(async move {
        let Ok(client) = upgrade.await else { return };
        let client = TokioIo::new(client);
        let limit = Duration::from_secs_f64(via.session.quota.request_s);
        match rule {
            // Its requests have limits of their own; the connection lives as long as they come.
            None => intercept(via, client, host, port, note).await,
            Some(rule) => {
                let passed =
                    tokio::time::timeout(limit, pass(&via, client, &rule, &host, port, &mut note))
                        .await;
                let passed = passed.unwrap_or_else(|_| {
                    Err(failed(format!(
                        "the tunnel's {} s are over",
                        limit.as_secs_f64()
                    )))
                });
                if let Err(problem) = passed {
                    note.problem(&problem);
                }
            }
        }
    });
    Response::new(full(""))
}

/// Ends TLS here, as the host, and serves what comes through.
async fn intercept(via: Via, client: Client, host: Host, port: u16, mut note: Note) {
    let result = async {
        let config = via.session.shared.authority.server(&host).map_err(failed)?;
        let wait = Duration::from_secs_f64(via.session.quota.request_s.min(30.0));
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
        Err(problem) => note.problem(&problem),
        Ok(stream) => {
            note.allowed("allowed");
            // The tunnel's line is complete; each request inside writes its own.
            drop(note);
            let target = Target {
                scheme: Scheme::Https,
                host,
                port,
            };
            let via = Via {
                tunnel: Some(target),
                ..via
            };
            serve_stream(via, stream).await;
        }
    }
}

/// The name inside of TLS must be the one that the tunnel was opened for.
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

/// Reads the first message of TLS and judges it, before any connection is made.
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

async fn pass(
    via: &Via,
    mut client: Client,
    rule: &Rule,
    host: &Host,
    port: u16,
    note: &mut Note,
) -> Result<(), Problem> {
    let session = &via.session;
    let hello = judge_hello(&mut client, host).await?;
    let (mut server, address) =
        upstream::connect(session.shared.resolver.as_ref(), rule, host, port).await?;
    note.allowed("allowed");
    note.line.address = Some(address.to_string());
    session.meter.up(hello.len())?;
    server.write_all(&hello).await.map_err(failed)?;
    note.line.bytes_up = hello.len() as u64;
    let (client_read, client_write) = tokio::io::split(client);
    let (server_read, server_write) = server.split();
    let (line_up, line_down) = (&mut note.line.bytes_up, &mut note.line.bytes_down);
    let up = copy(client_read, server_write, line_up, |n| session.meter.up(n));
    let down = copy(server_read, client_write, line_down, |n| {
        session.meter.down(n)
    });
    tokio::try_join!(up, down)?;
    Ok(())
}

/// Copies to the end of one direction.
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
