//! The thread that turns events of a run into signals: the rim, with its clock, files and sockets.

use crate::alerts::{Alert, Alerts, Look};
use crate::config::{AlertsConfig, OtlpConfig, PrometheusConfig, SignalsConfig, SignalsError};
use crate::message;
use crate::numbers;
use crate::prometheus::Board;
use crate::send::{Post, Sender};
use crate::spans::{self, Collector};
use crate::tfevents;
use prost::Message;
use sinew_pipeline::{Bus, RolloutProgress, RunEvent};
use sinew_rollout::PhaseSpan;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Handle;

/// Events that wait.
const QUEUE: usize = 4096;
/// Between two looks at the queue.
const EVERY: Duration = Duration::from_millis(500);
/// Between two writings of the text file, and two looks at disk and memory.
const SLOW: Duration = Duration::from_secs(15);
/// Episodes in one request.
const EPISODES: usize = 64;
/// How long the end of a run waits for what is still to be sent.
const FLUSH: Duration = Duration::from_secs(15);

/// Sends what a run says until it is dropped.
#[derive(Debug)]
pub struct Signals {
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
    sending: Option<tokio::task::JoinHandle<()>>,
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
        let board = Arc::new(Mutex::new(Board::new(run)));
        let listen = config.prometheus.as_ref().and_then(|p| p.listen);
        let address = listen.map(|at| serve(at, &board, runtime)).transpose()?;
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
            otlp: config.otlp.clone().map(|o| (o, Collector::default())),
            alerts: config.alerts.clone().map(|a| (a.clone(), Alerts::new(a))),
            sender,
            began: Instant::now(),
            slow: None,
        };
        let (stop, stopped) = sync_channel(1);
        let (events, bus) = (bus.watch(QUEUE), bus.clone());
        let thread = std::thread::spawn(move || worker.until(&events, &stopped, &bus));
        Ok(Self {
            stop,
            thread: Some(thread),
            sending: Some(sending),
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
        if let Some(sending) = self.sending.take() {
            let wait = async { tokio::time::timeout(FLUSH, sending).await };
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

/// Seconds since 1970.
fn unix_s() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |d| d.as_secs_f64())
}

/// A lock whose holder panicked is taken all the same: its numbers are replaced anyway.
fn lock(board: &Mutex<Board>) -> std::sync::MutexGuard<'_, Board> {
    board.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of the thread.
struct Worker {
    /// Name of the run, in every signal.
    run: String,
    folder: PathBuf,
    board: Arc<Mutex<Board>>,
    prometheus: Option<PrometheusConfig>,
    /// The event file of this session.
    events: Option<File>,
    otlp: Option<(OtlpConfig, Collector)>,
    alerts: Option<(AlertsConfig, Alerts)>,
    sender: Sender,
    began: Instant,
    /// When files and the machine were last looked at.
    slow: Option<Instant>,
}

impl Worker {
    /// Works until it is stopped, and then once more.
    fn until(
        &mut self,
        events: &Receiver<Arc<sinew_pipeline::RunEvent>>,
        stopped: &Receiver<()>,
        bus: &Bus,
    ) {
        let mut last = false;
        while !last {
            last = !matches!(stopped.recv_timeout(EVERY), Err(RecvTimeoutError::Timeout));
            for event in events.try_iter() {
                self.take(&event);
            }
            let (sent, lost) = self.sender.counts();
            let mut board = lock(&self.board);
            board.count("signals_sent", sent as f64);
            board.count("signals_lost", lost as f64);
            board.count("events_lost", bus.lost() as f64);
            drop(board);
            if last || self.slow.is_none_or(|at| at.elapsed() >= SLOW) {
                self.slow = Some(Instant::now());
                self.look();
            }
        }
        if let Some((config, collector)) = &mut self.otlp {
            let rest = collector.rest();
            export(config, &self.run, &self.sender, rest);
        }
    }

    /// Turns one event into numbers, spans and alerts.
    fn take(&mut self, event: &RunEvent) {
        let now_s = self.began.elapsed().as_secs_f64();
        if let Some((_, alerts)) = &mut self.alerts {
            alerts.heard(now_s);
        }
        match event {
            RunEvent::Step(record) => {
                let numbers = numbers::of_step(record);
                lock(&self.board).add("steps", 1.0);
                lock(&self.board).add("episodes", record.rollout.episodes as f64);
                lock(&self.board).add("sampled_tokens", record.tokens.sampled as f64);
                lock(&self.board).set(&vec![("step".into(), record.step as f64)]);
                self.record(record.step, numbers);
                let said = self.alerts.as_mut().map(|(_, a)| a.on_step(record, now_s));
                self.say(said.unwrap_or_default());
            }
            RunEvent::Measured {
                record,
                again: false,
                ..
            } => {
                self.record(record.step, numbers::of_eval(record));
            }
            RunEvent::Rollout(seen) => {
                self.rollout(seen);
                let said = self
                    .alerts
                    .as_mut()
                    .map(|(_, a)| a.on_rollout(&seen.longest, now_s));
                self.say(said.unwrap_or_default());
            }
            _ => {}
        }
    }

    /// Numbers of a step, to Prometheus and TensorBoard.
    fn record(&mut self, step: u64, numbers: numbers::Numbers) {
        lock(&self.board).set(&numbers);
        let bytes = tfevents::scalars(unix_s(), step, &numbers);
        let written = self.events.as_mut().map(|f| f.write_all(&bytes));
        if let Some(Err(error)) = written {
            tracing::warn!(%error, "event files are not written any more");
            self.events = None;
        }
    }

    /// What runs now, and phases that ended.
    fn rollout(&mut self, seen: &RolloutProgress) {
        let g = &seen.gauges;
        let numbers = [
            ("live/in_flight", g.in_flight as f64),
            ("live/generating", g.generating as f64),
            ("live/in_tool", g.in_tool as f64),
            ("live/tokens_per_s", seen.tokens_per_s),
            ("live/waiting_turns", seen.admission.waiting_turns as f64),
            ("live/held_tokens", seen.admission.held_tokens as f64),
            (
                "live/longest_phase_s",
                seen.longest.first().map_or(0.0, |l| l.phase_s),
            ),
        ];
        lock(&self.board).set(&numbers.map(|(n, v)| (n.to_owned(), v)).to_vec());
        if let Some((config, collector)) = &mut self.otlp {
            collector.add(&seen.spans);
            let all = seen.longest.len() >= g.in_flight;
            let ended = collector.complete(&seen.longest, all, unix_s());
            export(config, &self.run, &self.sender, ended);
        }
    }

    /// The text file, disk and memory.
    fn look(&mut self) {
        if let Some(path) = self.prometheus.as_ref().and_then(|p| p.textfile.clone()) {
            let text = lock(&self.board).text();
            let temporary = path.with_extension("new");
            let written = std::fs::write(&temporary, text);
            if let Err(error) = written.and_then(|()| std::fs::rename(&temporary, &path)) {
                tracing::warn!(%error, path = %path.display(), "metrics were not written");
            }
        }
        let look = Look {
            disk_free: rustix::fs::statvfs(&self.folder)
                .ok()
                .map(|s| s.f_bavail.saturating_mul(s.f_frsize)),
            memory_used: memory_used(),
        };
        let now_s = self.began.elapsed().as_secs_f64();
        let said = self.alerts.as_mut().map(|(_, a)| a.on_look(look, now_s));
        self.say(said.unwrap_or_default());
    }

    /// Posts alerts.
    fn say(&mut self, alerts: Vec<Alert>) {
        let Some((config, _)) = &self.alerts else {
            return;
        };
        for alert in alerts {
            lock(&self.board).add("alerts", 1.0);
            let body = message::body(config.format, &self.run, &alert, unix_s());
            self.sender.post(Post {
                url: config.webhook.clone(),
                content_type: "application/json",
                headers: std::collections::BTreeMap::new(),
                body: body.to_string().into_bytes(),
            });
        }
    }
}

/// Sends the traces of episodes, those of the configured share.
fn export(config: &OtlpConfig, run: &str, sender: &Sender, mut episodes: Vec<Vec<PhaseSpan>>) {
    episodes.retain(|e| {
        e.first()
            .is_some_and(|p| chosen(p.episode.as_str(), config.share))
    });
    for part in episodes.chunks(EPISODES) {
        sender.post(Post {
            url: config.url.clone(),
            content_type: "application/x-protobuf",
            headers: config.headers.clone(),
            body: spans::request(&config.service, run, part).encode_to_vec(),
        });
    }
}

/// Whether an episode is in a share of all, by its id alone.
fn chosen(episode: &str, share: f64) -> bool {
    let hash = blake3::hash(episode.as_bytes());
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&hash.as_bytes()[..4]);
    f64::from(u32::from_le_bytes(bytes)) < share * 4_294_967_296.0
}

/// Share of the memory in use: of the control group where it has a limit, else of the machine.
fn memory_used() -> Option<f64> {
    let number = |path: &str| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<f64>()
            .ok()
    };
    let group = |used: &str, limit: &str| {
        let (used, limit) = (number(used)?, number(limit)?);
        // A limit beyond any machine stands for none.
        (limit > 0.0 && limit < 1e15).then(|| used / limit)
    };
    // Of version 2, without what the kernel gives back when it is asked: pages of files.
    let stat = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let files = stat
        .lines()
        .find_map(|l| l.strip_prefix("inactive_file ")?.parse::<f64>().ok());
    let two = group("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max");
    let limit = number("/sys/fs/cgroup/memory.max").unwrap_or(f64::INFINITY);
    two.map(|used| used - files.unwrap_or(0.0) / limit)
        .or_else(|| {
            let text = std::fs::read_to_string("/proc/meminfo").ok()?;
            let of = |key: &str| {
                let line = text.lines().find(|l| l.starts_with(key))?;
                line.split_whitespace().nth(1)?.parse::<f64>().ok()
            };
            Some(1.0 - of("MemAvailable:")? / of("MemTotal:")?)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_episodes_is_chosen_by_their_ids() {
        let count = |share| {
            (0..2000)
                .filter(|i| chosen(&format!("e{i}"), share))
                .count()
        };
        assert_eq!((count(0.0), count(1.0)), (0, 2000));
        assert!((400..600).contains(&count(0.25)), "{}", count(0.25));
    }

    #[test]
    fn the_memory_of_this_machine_is_known() {
        assert!(memory_used().is_some_and(|used| (0.0..=1.5).contains(&used)));
    }
}
