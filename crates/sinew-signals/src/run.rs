//! Starts the parts that a file of signals asks for, and ends them in order.

use crate::alerts::Alerts;
use crate::config::{SignalsConfig, SignalsError};
use crate::logs::Logs;
use crate::prometheus::Board;
use crate::send::Sender;
use crate::spans::Collector;
use crate::tfevents;
use crate::worker::{Worker, lock, unix_s};
use sinew_pipeline::Bus;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Events that wait.
const QUEUE: usize = 4096;
/// How long the end of a run waits for what is still to be sent.
const FLUSH: Duration = Duration::from_secs(15);

/// Sends what a run says until it is dropped.
#[derive(Debug)]
pub struct Signals {
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
    sending: Vec<tokio::task::JoinHandle<()>>,
    runtime: Handle,
    /// Where `/metrics` is.
    address: Option<std::net::SocketAddr>,
}

impl Signals {
    /// Watches `bus` for the run in `folder`.
    ///
    /// # Errors
    /// If an address cannot be taken or a file cannot be written.
    pub fn start(
        config: &SignalsConfig,
        run: &str,
        folder: &Path,
        bus: &Bus,
        runtime: &Handle,
    ) -> Result<Self, SignalsError> {
        let (sender, sending) = Sender::start(runtime).map_err(SignalsError::System)?;
        let (caller, calling) = Sender::start(runtime).map_err(SignalsError::System)?;
        let board = Arc::new(Mutex::new(Board::new(run)));
        let listen = config.prometheus.as_ref().and_then(|p| p.listen);
        let address = listen.map(|at| serve(at, &board, runtime)).transpose()?;
        let otlp = config.otlp.clone();
        let mut worker = Worker {
            run: run.to_owned(),
            folder: folder.to_owned(),
            board,
            prometheus: config.prometheus.clone(),
            events: config
                .tensorboard
                .as_ref()
                .map(|t| {
                    event_file(
                        &t.folder
                            .clone()
                            .unwrap_or_else(|| folder.join("tensorboard")),
                    )
                })
                .transpose()?,
            otlp: otlp
                .clone()
                .filter(|o| o.url.is_some())
                .map(|o| (o, Collector::default())),
            logs: otlp.filter(|o| o.logs_url.is_some()).map(|o| {
                let logs = Logs::new(run, o.traced());
                (o, logs)
            }),
            alerts: config.alerts.clone().map(|a| (a.clone(), Alerts::new(a))),
            sender,
            caller,
            began: Instant::now(),
            slow: None,
        };
        let (stop, stopped) = sync_channel(1);
        let (events, bus) = (bus.watch(QUEUE), bus.clone());
        let thread = std::thread::spawn(move || worker.until(&events, &stopped, &bus));
        Ok(Self {
            stop,
            thread: Some(thread),
            sending: vec![calling, sending],
            runtime: runtime.clone(),
            address,
        })
    }

    /// Where `/metrics` is served, if it is.
    pub fn address(&self) -> Option<std::net::SocketAddr> {
        self.address
    }
}

impl Drop for Signals {
    /// What is in the queues is sent first, for a while.
    fn drop(&mut self) {
        let _ = self.stop.try_send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let until = tokio::time::Instant::now() + FLUSH;
        for sending in self.sending.drain(..) {
            let wait = async { tokio::time::timeout_at(until, sending).await };
            if self.runtime.block_on(wait).is_err() {
                tracing::warn!("signals were not taken before the end of the run");
            }
        }
    }
}

/// Serves `/metrics`.
///
/// # Errors
/// If the address cannot be taken.
fn serve(
    at: std::net::SocketAddr,
    board: &Arc<Mutex<Board>>,
    runtime: &Handle,
) -> Result<std::net::SocketAddr, SignalsError> {
    let refused =
        |e: std::io::Error| SignalsError::System(format!("prometheus.listen = {at}: {e}"));
    let listener = runtime
        .block_on(tokio::net::TcpListener::bind(at))
        .map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let board = Arc::clone(board);
    let metrics = move || async move {
        let text = lock(&board).text();
        (
            [("content-type", "text/plain; version=0.0.4; charset=utf-8")],
            text,
        )
    };
    let router = axum::Router::new().route("/metrics", axum::routing::get(metrics));
    runtime.spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::warn!(%error, "metrics are not served any more");
        }
    });
    Ok(address)
}

/// A new event file with its first record.
///
/// # Errors
/// If it cannot be written.
fn event_file(folder: &Path) -> Result<File, SignalsError> {
    let refused = |e: std::io::Error| {
        SignalsError::System(format!("tensorboard.folder = {}: {e}", folder.display()))
    };
    std::fs::create_dir_all(folder).map_err(refused)?;
    let now = unix_s();
    // The reader takes files in the order of their names.
    let name = format!(
        "events.out.tfevents.{:.0}.sinew.{}.0",
        now,
        std::process::id()
    );
    let mut file = File::create(folder.join(name)).map_err(refused)?;
    file.write_all(&tfevents::header(now)).map_err(refused)?;
    Ok(file)
}
