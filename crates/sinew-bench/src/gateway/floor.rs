//! The minimum work of a turn for any server: its body is received and read as JSON, and the ids of its
//! prompt are handed to the engine. Both repeat the whole conversation, so this grows with it.
//!
//! The floor is a server that reads the body, checks that it is JSON, and does nothing else. A row of latency
//! means little without it, as most of the latency is HTTP on this machine.

use super::client::{Target, post};
use super::{GROWING, TOKENS};
use crate::BenchError;
use crate::request;
use bytes::Bytes;
use futures::future::try_join_all;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::IgnoredAny;
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_types::{Engine, EngineEvent};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::net::TcpListener;

/// Bodies and prompts that are measured.
const COUNT: u32 = 200;
/// Longest that they may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Seconds of CPU of this thread.
///
/// The first number of `/proc/thread-self/schedstat` is nanoseconds on a CPU; 0 where the kernel does not
/// count them.
fn thread_cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let first = stat.split_whitespace().next();
    first.and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// Microseconds of CPU for a body, received and checked as JSON. Each of the bodies has a separate connection
/// and they are sent side by side, as the conversations' are.
pub(super) async fn body_us(bodies: Vec<String>) -> Result<f64, BenchError> {
    let count = bodies.len();
    let (ready, address) = mpsc::sync_channel(1);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = std::thread::spawn(move || -> Result<f64, BenchError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(BenchError::system)?;
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await;
            let listener = listener.map_err(BenchError::system)?;
            // The other side waits for it.
            let _ = ready.send(listener.local_addr().map_err(BenchError::system)?);
            for _ in 0..count {
                let (stream, _) = listener.accept().await.map_err(BenchError::system)?;
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service_fn(check));
                tokio::spawn(connection);
            }
            let before = thread_cpu_s();
            // Nobody is left to say it if the sender has gone.
            let _ = stopped.await;
            Ok(thread_cpu_s() - before)
        })
    });
    let address: SocketAddr = address.recv_timeout(LIMIT).map_err(BenchError::system)?;
    let target = Target::plain(address);
    let mut clients = Vec::with_capacity(count);
    for body in bodies {
        clients.push((target.connect().await?, Bytes::from(body)));
    }
    let rounds = COUNT.div_ceil(count.max(1) as u32);
    for _ in 0..rounds {
        let sent = clients
            .iter_mut()
            .map(|(sender, body)| post(sender, "/v1/chat/completions", "none", body.clone()));
        let told = try_join_all(sent).await?;
        if told.iter().any(|(_, status)| *status != 200) {
            return Err(BenchError::system("a measured body is not JSON"));
        }
    }
    // It may have seen the connection end.
    let _ = stop.send(());
    let used = server
        .join()
        .map_err(|_| BenchError::system("a thread panicked"))?;
    Ok(used? / f64::from(rounds) / count.max(1) as f64 * 1e6)
}

/// Reads a body and answers with an empty one.
async fn check(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = request.into_body().collect().await;
    let fits = body.is_ok_and(|b| serde_json::from_slice::<IgnoredAny>(&b.to_bytes()).is_ok());
    let mut response = Response::new(Full::new(Bytes::from_static(b"{}")));
    if !fits {
        *response.status_mut() = StatusCode::BAD_REQUEST;
    }
    Ok(response)
}

/// Measures the CPU time in microseconds for sending the fake engine a prompt of `prompt_tokens` and
/// receiving its answer.
pub(super) fn engine_us(prompt_tokens: usize) -> Result<f64, BenchError> {
    let engine = FakeEngine::stepped(FakeConfig {
        model: FakeModel {
            vocab: 512,
            seed: 0,
            end: None,
        },
        context: prompt_tokens + TOKENS as usize + 1,
        ..FakeConfig::default()
    });
    let engine = engine.map_err(BenchError::system)?;
    // Each conversation has a separate prompt, as on a server: none is in a near cache.
    let prompt = || Arc::new(vec![1; prompt_tokens.max(1)]);
    let prompts: Vec<_> = std::iter::repeat_with(prompt).take(GROWING).collect();
    let before = thread_cpu_s();
    for id in 0..u64::from(COUNT) {
        let prompt = Arc::clone(&prompts[id as usize % GROWING]);
        let request = request(id, prompt, 0, TOKENS);
        let sink = Box::new(|_: EngineEvent| {});
        engine.submit(request, sink).map_err(BenchError::system)?;
        while engine.step() {}
    }
    Ok((thread_cpu_s() - before) / f64::from(COUNT) * 1e6)
}
