//! The thread that turns events of a run into signals. It has the clock and the files; data for the network
//! leave through the queues of [`crate::send`].

use crate::alerts::{Alert, Alerts};
use crate::config::{AlertsConfig, OtlpConfig, PrometheusConfig};
use crate::logs::Logs;
use crate::machine;
use crate::mail::Mail;
use crate::message;
use crate::numbers;
use crate::prometheus::Board;
use crate::run_info::Run;
use crate::send::{Counts, Queue, Request};
use crate::spans::{self, Collector, CompleteEpisode, chosen};
use prost::Message;
use sinew_orchestrator::{Bus, Process, RolloutProgress, RunEvent};
use sinew_rollout::unix_s;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Interval of looks at the queue.
const EVERY: Duration = Duration::from_millis(500);
/// Interval of writing the text file, and of looks at disk and memory.
const SLOW: Duration = Duration::from_secs(15);
/// Episodes in one request.
const EPISODES: usize = 64;

/// A lock whose holder panicked is taken all the same: its numbers are replaced anyway.
pub(crate) fn lock(board: &Mutex<Board>) -> std::sync::MutexGuard<'_, Board> {
    board.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of the thread.
pub(crate) struct Worker {
    pub(crate) run: Run,
    pub(crate) board: Arc<Mutex<Board>>,
    pub(crate) prometheus: Option<PrometheusConfig>,
    pub(crate) otlp: Option<(OtlpConfig, Collector)>,
    pub(crate) alerts: Option<(AlertsConfig, Alerts)>,
    pub(crate) logs: Option<(OtlpConfig, Logs)>,
    pub(crate) sender: Queue<Request>,
    /// Alerts have a separate queue: a collector that is down does not delay them.
    pub(crate) caller: Queue<Request>,
    pub(crate) mail: Option<Queue<Mail>>,
    /// The run has reported its end.
    pub(crate) heard_end: bool,
    pub(crate) began: Instant,
    /// Time of the last look at files and the machine.
    pub(crate) slow: Option<Instant>,
}

impl Worker {
    /// Works until it is stopped, and then one last time.
    pub(crate) fn until(
        &mut self,
        events: &Receiver<Arc<RunEvent>>,
        stopped: &Receiver<()>,
        bus: &Bus,
    ) {
        let mut last = false;
        while !last {
            last = !matches!(stopped.recv_timeout(EVERY), Err(RecvTimeoutError::Timeout));
            for event in events.try_iter() {
                self.take(&event);
            }
            let slow = last || self.slow.is_none_or(|at| at.elapsed() >= SLOW);
            if slow {
                self.slow = Some(Instant::now());
                self.look();
            }
            self.send_logs();
            self.count(bus);
            if slow {
                self.write_text();
            }
        }
        if !self.heard_end {
            // It ends without a word, as with an error before its first step.
            self.end(Process::Failed, None);
        }
        if let Some((config, collector)) = &mut self.otlp {
            let rest = collector.rest();
            export(config, &self.run, &self.sender, rest);
        }
    }

    /// Counts of sent and lost items so far, and the time that the work here took.
    fn count(&self, bus: &Bus) {
        let mut counts = [("signals_sent", 0), ("signals_lost", 0)];
        let queues = [Some(self.sender.counts()), Some(self.caller.counts())];
        let mail = self.mail.as_ref().map(Queue::counts);
        for of in queues.into_iter().chain([mail]).flatten() {
            let (sent, lost) = Counts::read(&of);
            counts[0].1 += sent;
            counts[1].1 += lost;
        }
        let spans = self.otlp.as_ref().map_or(0, |(_, c)| c.lost);
        let records = self.logs.as_ref().map_or(0, |(_, l)| l.lost);
        let mut board = lock(&self.board);
        for (name, count) in counts.into_iter().chain([
            ("signals_spans_lost", spans),
            ("signals_log_records_lost", records),
            ("events_lost", bus.lost()),
        ]) {
            board.count(name, count as f64);
        }
        board.count("signals_cpu_seconds", machine::thread_cpu_s());
    }

    /// Posts the log records that wait.
    fn send_logs(&mut self) {
        let Some((config, logs)) = &mut self.logs else {
            return;
        };
        let url = config.logs_url.as_ref();
        if let Some((url, request)) = url.zip(logs.request(&config.service)) {
            self.sender
                .put(otlp_post(config, url, request.encode_to_vec()));
        }
    }

    /// Turns one event into numbers, spans and alerts.
    fn take(&mut self, event: &RunEvent) {
        let now_s = self.began.elapsed().as_secs_f64();
        if let Some((_, alerts)) = &mut self.alerts {
            alerts.heard(now_s);
        }
        if let Some((_, logs)) = &mut self.logs {
            logs.event(event, unix_s());
        }
        match event {
            RunEvent::Step(record) => {
                let numbers = numbers::of_step(record);
                lock(&self.board).add("steps", 1.0);
                lock(&self.board).add("episodes", record.rollout.episodes as f64);
                lock(&self.board).add("sampled_tokens", record.tokens.sampled as f64);
                lock(&self.board).set(&vec![("step".into(), record.step as f64)]);
                lock(&self.board).set(&numbers);
                let said = self.alerts.as_mut().map(|(_, a)| a.on_step(record, now_s));
                self.say(said.unwrap_or_default());
            }
            RunEvent::Measured {
                record,
                again: false,
                ..
            } => {
                lock(&self.board).set(&numbers::of_eval(record));
                let said = self
                    .alerts
                    .as_mut()
                    .map(|(_, a)| a.on_measured(record, now_s));
                self.say(said.unwrap_or_default());
            }
            RunEvent::Resumed { steps, evals } => {
                if let Some((_, alerts)) = &mut self.alerts {
                    alerts.resumed(steps, evals);
                }
            }
            RunEvent::Ended { process, why } => self.end(*process, why.as_deref()),
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

    /// The run is over.
    fn end(&mut self, process: Process, why: Option<&str>) {
        self.heard_end = true;
        let said = self.alerts.as_mut().map(|(_, a)| a.on_end(process, why));
        self.say(said.unwrap_or_default());
    }

    /// Running episodes, and phases that ended.
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
            collector.end(&seen.ended);
            let ended = collector.complete(&seen.longest, unix_s());
            export(config, &self.run, &self.sender, ended);
        }
    }

    /// Disk and memory.
    fn look(&mut self) {
        let look = machine::look(&self.run.folder);
        let now_s = self.began.elapsed().as_secs_f64();
        let said = self.alerts.as_mut().map(|(_, a)| a.on_look(look, now_s));
        self.say(said.unwrap_or_default());
    }

    /// The text file of Prometheus.
    fn write_text(&self) {
        if let Some(path) = self.prometheus.as_ref().and_then(|p| p.textfile.clone()) {
            let text = lock(&self.board).text();
            // A reader sees the old or the new content, never a part.
            let temporary = path.with_extension("new");
            let written = std::fs::write(&temporary, text);
            if let Err(error) = written.and_then(|()| std::fs::rename(&temporary, &path)) {
                tracing::warn!(%error, path = %path.display(), "metrics were not written");
            }
        }
    }

    /// Sends alerts.
    fn say(&mut self, alerts: Vec<Alert>) {
        let Some((config, _)) = &self.alerts else {
            return;
        };
        for alert in alerts {
            lock(&self.board).add("alerts", 1.0);
            if let Some((_, logs)) = &mut self.logs {
                logs.alert(&alert, unix_s());
            }
            if let Some(mail) = &self.mail {
                let (subject, text) = message::mail(&self.run.name, &alert, &self.run.folder);
                mail.put(Mail { subject, text });
            }
            if let Some(url) = &config.webhook {
                let format = config.format.unwrap_or_default();
                let body = message::body(format, &self.run.name, &alert, unix_s());
                self.caller.put(Request {
                    url: url.clone(),
                    content_type: "application/json",
                    headers: BTreeMap::new(),
                    body: body.to_string().into_bytes(),
                });
            }
        }
    }
}

/// A request of OTLP.
fn otlp_post(config: &OtlpConfig, url: &str, body: Vec<u8>) -> Request {
    Request {
        url: url.to_owned(),
        content_type: "application/x-protobuf",
        headers: config.headers.clone(),
        body,
    }
}

/// Sends the traces of episodes, those of the configured share.
fn export(
    config: &OtlpConfig,
    run: &Run,
    sender: &Queue<Request>,
    mut episodes: Vec<CompleteEpisode>,
) {
    let Some(url) = &config.url else {
        return;
    };
    episodes.retain(|(phases, _)| {
        phases
            .first()
            .is_some_and(|p| chosen(p.episode.as_str(), config.traced()))
    });
    for part in episodes.chunks(EPISODES) {
        let body = spans::request(&config.service, &run.name, &run.model, part);
        let body = body.encode_to_vec();
        sender.put(otlp_post(config, url, body));
    }
}
