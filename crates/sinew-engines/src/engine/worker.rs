//! Carries out the router's decisions.
//!
//! One thread owns the [`Router`], the sinks of all requests and a small runtime. It loops over four
//! inputs: requests and controls of callers (`Inbox`), tokens of running attempts (a bounded
//! channel; a full one makes the attempts wait), reports of ended tasks, and the router's next
//! deadline. Each input becomes calls of the router; the router's commands become tasks:
//!
//! | command | task |
//! |---|---|
//! | start | [`Backend::generate`] on an engine |
//! | cancel | drop the attempt's future, then [`Backend::cancel`] |
//! | probe | [`Backend::probe`], then again after the probe interval |
//! | label, load | [`Backend::label`], [`Backend::load`] of an engine that has other weights |
//! | adapters | [`Backend::load_adapter`], [`Backend::unload`]: see `adapters` |
//!
//! A panic of a backend is a failed attempt, one of a sink ends its request.

mod adapters;

use super::inbox::{Control, Inbox, ModelLimits, Reply, Shared};
use crate::attempt::{Attempt, AttemptEnd, AttemptId};
use crate::backend::{AttemptSink, AttemptTokens, Backend, Probe, ServedWeights, Weights};
use crate::config::{Jitter, RemoteConfig};
use crate::error::AttemptError;
use crate::route::{Command, Router, adapter_name};
use crate::sums::ReplicaSums;
use adapters::{AdapterJob, NamedAdapters};
use futures::future::join_all;
use sinew_types::{EngineError, EngineEvent, EventSink, GenerateRequest, RequestId, WeightsId};
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tracing::Instrument;

/// Capacity of the channel of tokens, in messages, over all attempts; attempts wait while it is
/// full.
const MAX_MESSAGES: usize = 1024;
/// Maximum messages taken in one go, so that commands and callers are not starved.
const MAX_TAKEN: usize = 256;

/// Results of tasks.
enum Report {
    AttemptEnded {
        attempt: AttemptId,
        result: Result<AttemptEnd, AttemptError>,
    },
    /// `regular`: the next probe follows after the interval. A result of an earlier `epoch` is
    /// outdated, and what it shows of adapters if `adapters` is earlier than their last change.
    Probed {
        engine: usize,
        epoch: u64,
        adapters: u64,
        regular: bool,
        result: Result<Probe, AttemptError>,
    },
    /// Weights were loaded or labelled by one engine, outside of a load for all.
    Repaired {
        engine: usize,
        epoch: u64,
        id: WeightsId,
        result: Result<(), AttemptError>,
    },
    Loaded {
        id: WeightsId,
        results: Vec<(usize, Result<(), AttemptError>)>,
    },
    /// An engine was asked to remove an adapter.
    Unloaded {
        engine: usize,
        id: WeightsId,
        result: Result<(), AttemptError>,
    },
    /// All engines have answered a load of an adapter that requests name.
    AdapterLoaded {
        results: Vec<(usize, Result<(), AttemptError>)>,
    },
    /// An engine was given adapters that it missed, by their names on servers.
    AdaptersMended {
        engine: usize,
        results: Vec<(String, Result<(), AttemptError>)>,
    },
    /// An engine was asked to remove an adapter that no request names any more.
    AdapterRemoved {
        engine: usize,
        server_name: String,
        result: Result<(), AttemptError>,
    },
    /// All engines have answered a sleep or a wake-up.
    Slept { result: Result<(), AttemptError> },
}

/// The control that runs; others wait for its end.
enum Job {
    Load { weights: Weights, reply: Reply },
    Adapter(AdapterJob),
    Sleep { reply: Reply, woke: bool },
}

/// The state of the thread. Nothing of it is shared but `shared` and `epoch`.
pub(super) struct Worker {
    shared: Arc<Shared>,
    backends: Vec<Arc<dyn Backend>>,
    router: Router,
    jitter: Jitter,
    /// Receivers of each request's events. A request without a sink has lost it by a panic.
    sinks: HashMap<RequestId, EventSink>,
    /// Running tasks, so that a cancelled attempt drops its connection.
    attempts: HashMap<AttemptId, AbortHandle>,
    tasks: JoinSet<Report>,
    tokens: mpsc::Receiver<AttemptTokens>,
    token_sender: mpsc::Sender<AttemptTokens>,
    /// The router's time 0.
    start: Instant,
    probe_interval: Duration,
    /// Whether tokens wait for the end of their attempt, see `RemoteConfig::hold_until_verified`.
    hold: bool,
    /// The last weights that were loaded from a folder, for engines that are added later or restarted.
    current: Option<Weights>,
    /// The weights that unlabelled servers are taken to hold.
    first: WeightsId,
    /// Another program publishes weights to the engines.
    follows: bool,
    /// Name of the adapters, if weights are adapters.
    adapters: Option<String>,
    /// Adapters of each engine that were replaced, and are to be removed once no attempt asks for them.
    replaced: Vec<BTreeSet<WeightsId>>,
    /// Adapters that requests name.
    named: NamedAdapters,
    job: Option<Job>,
    /// Controls that wait for the job.
    controls: std::collections::VecDeque<Control>,
    /// Number of the last change of weights; probes that began before it are outdated.
    epoch: Arc<AtomicU64>,
    /// Engines whose weights are being loaded or labelled outside of a load for all.
    repairing: Vec<bool>,
    /// Limits that the last probe of each engine reported.
    limits: Vec<ModelLimits>,
}

/// Runs the thread until the engine is dropped. Each request gets its last event and each caller its answer
/// in every case, a panic included.
pub(super) fn run(
    runtime: &Runtime,
    shared: Arc<Shared>,
    backends: Vec<Arc<dyn Backend>>,
    config: RemoteConfig,
) {
    let mut worker = runtime.block_on(async { Worker::new(Arc::clone(&shared), backends, config) });
    let served = catch_unwind(AssertUnwindSafe(|| runtime.block_on(worker.serve())));
    let why = match served {
        Ok(()) => "it was dropped".to_owned(),
        Err(payload) => format!("it panicked: {}", panic_text(&*payload)),
    };
    worker.stop(&why);
}

impl Worker {
    fn new(shared: Arc<Shared>, backends: Vec<Arc<dyn Backend>>, config: RemoteConfig) -> Self {
        let names = backends.iter().map(|b| b.name().to_owned()).collect();
        let (token_sender, tokens) = mpsc::channel(MAX_MESSAGES);
        let count = backends.len();
        let mut worker = Self {
            follows: config.router.follow,
            adapters: config.router.adapters.clone(),
            replaced: vec![BTreeSet::new(); count],
            named: NamedAdapters::new(count),
            first: config.first(),
            router: Router::new(config.router.clone(), names, config.first()),
            shared,
            backends,
            jitter: config.jitter,
            sinks: HashMap::new(),
            attempts: HashMap::new(),
            tasks: JoinSet::new(),
            tokens,
            token_sender,
            start: Instant::now(),
            probe_interval: Duration::from_secs_f64(config.probe_interval_s),
            hold: config.hold_until_verified,
            current: None,
            job: None,
            controls: Default::default(),
            epoch: Arc::default(),
            repairing: vec![false; count],
            limits: vec![ModelLimits::default(); count],
        };
        for engine in 0..count {
            worker.probe(engine, Duration::ZERO, true);
        }
        worker
    }

    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// One turn for each input: take it, let the router decide, publish, carry out. Returns when
    /// the engine is dropped.
    async fn serve(&mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            let now = self.now();
            let tick = self.router.next_tick(now).map_or(3600.0, |t| t - now);
            let tick = Duration::from_secs_f64(tick.clamp(0.0, 3600.0));
            tokio::select! {
                () = shared.wake.notified() => {}
                Some(tokens) = self.tokens.recv() => self.take(tokens),
                Some(report) = self.tasks.join_next() => self.report(report),
                () = tokio::time::sleep(tick) => {}
            }
            // Tokens come before the ends of their attempts, which are reported elsewhere.
            self.take_waiting();
            if !self.receive() {
                return;
            }
            self.router.tick(self.now());
            // The waiters see this state, too, as they are woken later.
            self.publish();
            self.carry_out();
        }
    }

    fn take(&mut self, tokens: AttemptTokens) {
        if let Some(logprobs) = tokens.prompt {
            self.router.prompt(tokens.attempt, logprobs);
        }
        self.router
            .tokens(tokens.attempt, tokens.tokens, tokens.end);
    }

    fn take_waiting(&mut self) {
        for _ in 0..MAX_TAKEN {
            match self.tokens.try_recv() {
                Ok(tokens) => self.take(tokens),
                Err(_) => return,
            }
        }
    }

    /// Takes the result of a task. A panic of a task is passed on and ends the engine.
    fn report(&mut self, report: Result<Report, tokio::task::JoinError>) {
        let now = self.now();
        match report {
            Ok(Report::AttemptEnded { attempt, result }) => {
                // All of its tokens were sent before it ended.
                while let Ok(tokens) = self.tokens.try_recv() {
                    self.take(tokens);
                }
                self.attempts.remove(&attempt);
                let spread = (self.jitter)();
                self.router.attempt_ended(now, attempt, result, spread);
            }
            Ok(Report::Probed {
                engine,
                epoch,
                adapters,
                regular,
                result,
            }) => {
                let settled = !self.changes_engines() && !self.repairing[engine];
                if epoch == self.epoch() && settled {
                    let result = self.named.current(engine, adapters, result);
                    self.probed(now, engine, result);
                    self.unload(engine);
                }
                if regular {
                    self.probe(engine, self.probe_interval, true);
                }
            }
            Ok(Report::Repaired {
                engine,
                epoch,
                id,
                result,
            }) => {
                self.repairing[engine] = false;
                if let Err(error) = result {
                    let name = self.backends[engine].name();
                    tracing::warn!(engine = name, %id, %error, "weights not repaired");
                    if epoch == self.epoch() {
                        self.router.not_repaired(now, engine, &error);
                    }
                } else {
                    self.probe(engine, Duration::ZERO, false);
                }
            }
            Ok(Report::Unloaded { engine, id, result }) => {
                if let Err(error) = result {
                    let name = self.backends[engine].name();
                    tracing::debug!(engine = name, %id, %error, "adapter not removed");
                    self.replaced[engine].insert(id);
                }
            }
            Ok(Report::Loaded { id, results }) => self.loaded(now, id, &results),
            Ok(Report::AdapterLoaded { results }) => self.adapter_loaded(now, &results),
            Ok(Report::AdaptersMended { engine, results }) => self.mended(engine, results),
            Ok(Report::AdapterRemoved {
                engine,
                server_name,
                result,
            }) => self.adapter_removed(engine, server_name, result),
            Ok(Report::Slept { result }) => self.slept(now, result),
            // An attempt that was aborted, or a task that panicked: the panic is the bug's report.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }

    /// Takes a current probe: limits, repair of weights, and the router's view.
    fn probed(&mut self, now: f64, engine: usize, result: Result<Probe, AttemptError>) {
        if let Ok(probe) = &result {
            self.limits[engine] = ModelLimits {
                context: probe.context,
                vocab: probe.vocab,
            };
            self.repair(engine, probe);
            self.mend(engine, probe);
        }
        self.router.probed(now, engine, result);
    }

    /// Whether weights or memory of all engines are being changed.
    fn changes_engines(&self) -> bool {
        matches!(self.job, Some(Job::Load { .. } | Job::Sleep { .. }))
    }

    /// Loads the right weights into an engine that has others, if they are available: the last published
    /// folder or, before the first load, the label of the first version.
    fn repair(&mut self, engine: usize, probe: &Probe) {
        let id = self.router.weights();
        if probe.weights == ServedWeights::Version(id) || probe.sleeping {
            return;
        }
        let foreign = matches!(probe.weights, ServedWeights::Foreign(_));
        if foreign && self.router.is_in_quarantine(engine) {
            // The same weights would be as wrong: it waits for the next ones, or to be started anew.
            return;
        }
        let current = self.current.clone();
        let may_label = self.adapters.is_none()
            && (id == self.first || self.follows)
            && probe.weights == ServedWeights::Unlabelled;
        if current.is_none() && !may_label {
            return;
        }
        let backend = Arc::clone(&self.backends[engine]);
        let (epoch, first) = (self.epoch(), self.first);
        self.repairing[engine] = true;
        self.tasks.spawn(async move {
            let (id, result) = match current {
                Some(weights) => (id, backend.load(&weights).await),
                // A server that was started anew has its first weights again, whatever others have.
                None => (first, backend.label(first).await),
            };
            Report::Repaired {
                engine,
                epoch,
                id,
                result,
            }
        });
    }

    /// Probes an engine, after a while.
    fn probe(&mut self, engine: usize, after: Duration, regular: bool) {
        let backend = Arc::clone(&self.backends[engine]);
        let epoch = Arc::clone(&self.epoch);
        let adapters = self.named.changes();
        self.tasks.spawn(async move {
            tokio::time::sleep(after).await;
            let epoch = epoch.load(Ordering::Relaxed);
            let adapters = adapters.load(Ordering::Relaxed);
            let result = backend.probe().await;
            Report::Probed {
                engine,
                epoch,
                adapters,
                regular,
                result,
            }
        });
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes everything that callers have left. `false` when the engine was dropped.
    fn receive(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut inbox = shared.lock();
        if inbox.dropped {
            return false;
        }
        let submitted = std::mem::take(&mut inbox.submitted);
        let aborted = std::mem::take(&mut inbox.aborted);
        let controls = std::mem::take(&mut inbox.controls);
        // These requests have left the inbox and still wait: counted here until the next publication.
        inbox.status.waiting += submitted.len();
        drop(inbox);
        for (request, sink) in submitted {
            self.submit(request, sink);
        }
        for id in aborted {
            self.router.abort(id);
        }
        self.controls.extend(controls);
        self.next_control();
        true
    }

    fn submit(&mut self, request: GenerateRequest, sink: EventSink) {
        let id = request.id;
        self.sinks.insert(id, sink);
        if let Err(error) = self.router.submit(self.now(), request) {
            self.tell(EngineEvent::Failed { request: id, error });
        }
    }

    /// Starts the next control unless one runs.
    fn next_control(&mut self) {
        while self.job.is_none()
            && let Some(control) = self.controls.pop_front()
        {
            let now = self.now();
            match control {
                Control::Pause { paused, reply } => {
                    self.router.pause(now, paused);
                    answer(&reply, Ok(()));
                }
                Control::Load { weights, reply } => self.load(weights, reply),
                Control::LoadAdapter {
                    name,
                    adapter,
                    reply,
                } => self.load_adapter(name, adapter, reply),
                Control::DropAdapter { name, reply } => self.drop_adapter(&name, &reply),
                Control::Sleep { asleep, reply } => {
                    self.router.sleep(now, true);
                    self.carry_out();
                    let backends = self.backends.clone();
                    self.job = Some(Job::Sleep {
                        reply,
                        woke: !asleep,
                    });
                    self.tasks.spawn(async move {
                        let change = |b: &Arc<dyn Backend>| {
                            let b = Arc::clone(b);
                            async move {
                                if asleep {
                                    b.sleep().await
                                } else {
                                    b.wake().await
                                }
                            }
                        };
                        let all = join_all(backends.iter().map(change)).await;
                        let result = all.into_iter().collect();
                        Report::Slept { result }
                    });
                }
            }
        }
    }

    /// Asks an engine to remove the adapters that were replaced or dropped, where no attempt asks for them.
    fn unload(&mut self, engine: usize) {
        self.remove_adapters(engine);
        let Some(of) = &self.adapters else { return };
        let in_use = self.router.in_use(engine);
        let replaced = std::mem::take(&mut self.replaced[engine]).into_iter();
        let (used, idle): (BTreeSet<_>, BTreeSet<_>) = replaced.partition(|id| in_use.contains(id));
        self.replaced[engine] = used;
        for id in idle {
            let backend = Arc::clone(&self.backends[engine]);
            let name = adapter_name(of, id);
            self.tasks.spawn(async move {
                let result = backend.unload(&name).await;
                Report::Unloaded { engine, id, result }
            });
        }
    }

    /// Loads weights on all engines at once. Their attempts are interrupted and continue with the new
    /// version, or stay open where the engine reports the weights of each token.
    ///
    /// An adapter interrupts nothing: attempts go on with the one that they ask for, and new ones start
    /// with it until all engines have answered.
    fn load(&mut self, mut weights: Weights, reply: Reply) {
        if weights.adapter.is_none() {
            weights.sums = (self.backends.len() > 1).then(ReplicaSums::default);
            let kept: Vec<_> = self.backends.iter().map(|b| b.keeps_attempts()).collect();
            self.router.load_begins(self.now(), &kept);
            self.carry_out();
        }
        self.next_epoch();
        let (backends, loaded) = (self.backends.clone(), weights.clone());
        self.job = Some(Job::Load { weights, reply });
        self.tasks.spawn(async move {
            let each = backends.iter().map(|b| b.load(&loaded));
            let results = join_all(each).await.into_iter().enumerate().collect();
            Report::Loaded {
                id: loaded.id,
                results,
            }
        });
    }

    /// Ends a load: it has succeeded if at least one engine has the weights. The others are
    /// repaired by later probes.
    fn loaded(&mut self, now: f64, id: WeightsId, results: &[(usize, Result<(), AttemptError>)]) {
        let Some(Job::Load { weights, reply }) = self.job.take() else {
            return;
        };
        self.next_epoch();
        let failed = self.failures(results);
        let before = self.router.weights();
        let changed = self.router.loaded(now, id, results);
        if changed {
            let again = Weights {
                source: None,
                ..weights
            };
            self.replace(before, id);
            self.current = again.folder.is_some().then_some(again);
            if !failed.is_empty() {
                tracing::warn!(%id, failed, "not every engine has loaded the weights");
            }
        }
        self.publish();
        let result = if changed {
            Ok(())
        } else {
            Err(EngineError::Weights(failed))
        };
        answer(&reply, result);
        self.look_at_all();
        self.next_control();
    }

    /// The engines that failed, each with its error; empty if all succeeded.
    fn failures(&self, results: &[(usize, Result<(), AttemptError>)]) -> String {
        let failed = results.iter().filter_map(|(i, r)| {
            let error = r.as_ref().err()?;
            Some(format!("{}: {error}", self.backends[*i].name()))
        });
        failed.collect::<Vec<_>>().join("; ")
    }

    /// One adapter takes the place of another.
    fn replace(&mut self, before: WeightsId, id: WeightsId) {
        for replaced in &mut self.replaced {
            if self.current.as_ref().is_some_and(|w| w.adapter.is_some()) {
                replaced.insert(before);
            }
            replaced.remove(&id);
        }
    }

    /// Ends a sleep or a wake-up: no engine is trusted until its next probe.
    fn slept(&mut self, now: f64, result: Result<(), AttemptError>) {
        let Some(Job::Sleep { reply, woke }) = self.job.take() else {
            return;
        };
        self.next_epoch();
        // Each engine shows what it has at the next look; until then it is not believed.
        let asleep = AttemptError::Unsupported("it fell asleep or woke up".to_owned());
        for engine in 0..self.backends.len() {
            self.router.probed(now, engine, Err(asleep.clone()));
        }
        // Engines that could not all fall asleep serve as far as they are awake.
        self.router.sleep(now, !woke && result.is_ok());
        tracing::debug!(woke, "engines changed their sleep");
        self.publish();
        let failed = |e: AttemptError| EngineError::Failed(e.to_string());
        answer(&reply, result.map_err(failed));
        self.look_at_all();
        self.next_control();
    }

    /// Probes every engine at once, in addition to the regular probes.
    fn look_at_all(&mut self) {
        for engine in 0..self.backends.len() {
            self.probe(engine, Duration::ZERO, false);
        }
    }

    /// Turns the router's commands into tasks and events.
    fn carry_out(&mut self) {
        while let Some(command) = self.router.command() {
            match command {
                Command::Start { engine, attempt } => self.start_attempt(engine, attempt),
                Command::Cancel { engine, attempt } => {
                    if let Some(handle) = self.attempts.remove(&attempt) {
                        handle.abort();
                    }
                    let backend = Arc::clone(&self.backends[engine]);
                    tokio::spawn(async move { backend.cancel(attempt).await });
                }
                Command::Tell(event) => self.tell(event),
            }
        }
    }

    /// Runs an attempt as a task.
    fn start_attempt(&mut self, engine: usize, attempt: Attempt) {
        let backend = Arc::clone(&self.backends[engine]);
        let limits = self.limits[engine];
        let to = self.token_sender.clone();
        let mut sink = AttemptSink::new(&attempt, limits.vocab, limits.context, to, self.hold);
        let id = attempt.id;
        let span = tracing::debug_span!("attempt", id = id.0, engine, weights = %attempt.weights);
        let generated = async move {
            let mut result = backend.generate(&attempt, &mut sink).await;
            // Tokens that were held are good unless the error is about trust.
            let trusted = !matches!(&result, Err(e) if e.blame() == crate::error::Blame::Trust);
            if trusted && let Err(error) = sink.flush().await {
                result = Err(error);
            }
            Report::AttemptEnded {
                attempt: attempt.id,
                result,
            }
        };
        let handle = self.tasks.spawn(generated.instrument(span));
        self.attempts.insert(id, handle);
    }

    /// Calls a sink. One that panics loses its own events and those of no other request.
    fn tell(&mut self, event: EngineEvent) {
        let (id, last) = match &event {
            EngineEvent::Prompt { request, .. } | EngineEvent::Tokens { request, .. } => {
                (*request, false)
            }
            EngineEvent::Finished { request, .. } | EngineEvent::Failed { request, .. } => {
                (*request, true)
            }
        };
        if last {
            let mut inbox = self.shared.lock();
            inbox.live.remove(&id);
            inbox.aborted.remove(&id);
        }
        let Some(sink) = self.sinks.get_mut(&id) else {
            return; // its sink has panicked
        };
        let intact = catch_unwind(AssertUnwindSafe(|| sink(event))).is_ok();
        if last || !intact {
            self.sinks.remove(&id);
        }
        if !intact && !last {
            self.router.abort(id);
            self.shared.wake.notify_one();
        }
    }

    /// Shows status, engines, counters and limits to callers, and wakes those that wait.
    fn publish(&mut self) {
        let now = self.now();
        let status = self.router.status(now);
        let engines = self.router.engines(now);
        let counters = self.router.counters().clone();
        let smallest =
            |f: fn(&ModelLimits) -> Option<usize>| self.limits.iter().filter_map(f).min();
        let limits = ModelLimits {
            context: smallest(|l| l.context),
            vocab: smallest(|l| l.vocab),
        };
        let in_use = self.adapters_in_use();
        self.shared.publish(|inbox: &mut Inbox| {
            inbox.in_use = in_use;
            inbox.status = status;
            inbox.engines = engines;
            inbox.counters = counters;
            inbox.limits = limits;
        });
    }

    /// The newest adapter, those that attempts ask for, and those that are not removed yet.
    fn adapters_in_use(&self) -> BTreeSet<WeightsId> {
        if self.adapters.is_none() {
            return BTreeSet::new();
        }
        let engines = 0..self.backends.len();
        let mut all: BTreeSet<_> = engines.flat_map(|e| self.router.in_use(e)).collect();
        all.extend(self.replaced.iter().flatten());
        all.insert(self.router.weights());
        all
    }

    /// Ends everything: callers get their answers, requests their last event, later calls an error.
    fn stop(mut self, why: &str) {
        let mut submitted = Default::default();
        self.shared.publish(|inbox| {
            inbox.stopped = Some(why.to_owned());
            inbox.live.clear();
            inbox.aborted.clear();
            inbox.status.running = 0;
            inbox.status.waiting = 0;
            submitted = std::mem::take(&mut inbox.submitted);
            self.controls.extend(std::mem::take(&mut inbox.controls));
        });
        let job = self.job.take().map(|job| match job {
            Job::Load { reply, .. } | Job::Sleep { reply, .. } => reply,
            Job::Adapter(job) => job.reply,
        });
        let waiting = self.controls.drain(..).map(Control::reply);
        for reply in job.into_iter().chain(waiting) {
            answer(&reply, Err(EngineError::Stopped(why.to_owned())));
        }
        let submitted = submitted
            .into_iter()
            .map(|(r, sink): (GenerateRequest, EventSink)| (r.id, sink));
        for (request, mut sink) in self.sinks.drain().chain(submitted) {
            let error = EngineError::Stopped(why.to_owned());
            let event = EngineEvent::Failed { request, error };
            // A sink that panics was to get its last event anyway.
            let _ = catch_unwind(AssertUnwindSafe(|| sink(event)));
        }
    }
}

/// A caller that has gone needs no answer.
fn answer(reply: &Reply, result: Result<(), EngineError>) {
    let _ = reply.send(result);
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
