//! Starts the parts that a file of signals configures, and ends them in order.

use crate::alerts::Alerts;
use crate::config::{SignalsConfig, SignalsError};
use crate::logs::Logs;
use crate::mail;
use crate::prometheus::Board;
use crate::run_info::Run;
use crate::send;
use crate::spans::Collector;
use crate::worker::{Worker, lock};
use sinew_http::server::{self, ConnectionLimits, Guard};
use sinew_orchestrator::Bus;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Events that wait.
const QUEUE: usize = 4096;
/// Time for which the end of a run waits for data that are still to be sent.
const FLUSH: Duration = Duration::from_secs(15);

/// Sends the events of a run until it is dropped.
#[derive(Debug)]
pub struct Signals {
    stop: SyncSender<()>,
    thread: Option<std::thread::JoinHandle<()>>,
    sending: Vec<JoinHandle<()>>,
    runtime: Handle,
    /// Address of `/metrics`.
    address: Option<std::net::SocketAddr>,
}

impl Signals {
    /// Watches the bus of a run.
    ///
    /// # Errors
    /// If an address cannot be taken, or a password is not there.
    pub fn start(
        config: &SignalsConfig,
        run: &Run,
        bus: &Bus,
        runtime: &Handle,
    ) -> Result<Self, SignalsError> {
        let board = Arc::new(Mutex::new(Board::new(&run.name)));
        let listen = config.prometheus.as_ref().and_then(|p| p.listen);
        let address = listen.map(|at| serve(at, &board, runtime)).transpose()?;
        let (mut worker, sending) = worker(config, run, board, runtime)?;
        let (stop, stopped) = sync_channel(1);
        let (events, bus) = (bus.watch(QUEUE), bus.clone());
        let thread = std::thread::spawn(move || worker.until(&events, &stopped, &bus));
        Ok(Self {
            stop,
            thread: Some(thread),
            sending,
            runtime: runtime.clone(),
            address,
        })
    }

    /// Address of `/metrics`, if it is served.
    pub fn address(&self) -> Option<std::net::SocketAddr> {
        self.address
    }
}

impl Drop for Signals {
    /// Sends the content of the queues first, for a while.
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

/// The state of the thread, with everything that the file asks for, and the tasks that send.
///
/// # Errors
/// If a password is not there.
fn worker(
    config: &SignalsConfig,
    run: &Run,
    board: Arc<Mutex<Board>>,
    runtime: &Handle,
) -> Result<(Worker, Vec<JoinHandle<()>>), SignalsError> {
    let (caller, calling) = send::start(runtime)?;
    let (sender, sending) = send::start(runtime)?;
    let mut tasks = vec![calling, sending];
    let mail = config.alerts.as_ref().and_then(|a| a.mail.as_ref());
    let mail = mail.map(|m| mail::start(m, runtime)).transpose();
    let mail = mail?.map(|(mail, task)| {
        tasks.push(task);
        mail
    });
    let otlp = config.otlp.clone();
    let logged = otlp.clone().filter(|o| o.logs_url.is_some());
    let worker = Worker {
        run: run.clone(),
        board,
        prometheus: config.prometheus.clone(),
        otlp: otlp
            .filter(|o| o.url.is_some())
            .map(|o| (o, Collector::default())),
        logs: logged.map(|o| {
            let logs = Logs::new(&run.name, o.traced());
            (o, logs)
        }),
        alerts: config.alerts.clone().map(|a| (a.clone(), Alerts::new(a))),
        sender,
        caller,
        mail,
        heard_end: false,
        began: Instant::now(),
        slow: None,
    };
    Ok((worker, tasks))
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
    // Nobody has a key: a connection is there for one answer.
    let guard = Guard::new(ConnectionLimits::default(), |_| None).without_pages();
    runtime.spawn(server::serve(
        listener,
        router,
        guard,
        std::future::pending(),
    ));
    Ok(address)
}
