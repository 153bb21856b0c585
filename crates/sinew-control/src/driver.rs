//! The supervisor's thread in the owner: it asks the launcher, decides, and carries out. A second thread asks
//! servers that send no heartbeats.

use crate::autoscale::{AutoscaleLimits, Autoscaler};
use crate::launch::{Launched, LaunchedRole, Launcher, RoleSpec};
use crate::registry::{Origin, Place};
use crate::role::{Heartbeat, MAX_CAUSE_BYTES, RoleId, RoleKind, cut};
use crate::server::ControlDesk;
use crate::supervisor::{Step, SupervisorCore, SupervisorLimits};
use sinew_http::blocking::Client;
use sinew_http::{ClientOptions, Method};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of decisions.
const TICK: Duration = Duration::from_millis(500);
/// Time for the answer of a server that is asked for its health.
const PROBE_TIME: Duration = Duration::from_secs(2);
/// Lines of a role's log in the cause of its end.
const LOG_LINES: usize = 15;
/// Logs that are read in one round: a whole rack may fail at once.
const LOGS_AT_A_TIME: usize = 8;

/// Makes the process of a role.
pub type SpecOf = Box<dyn Fn(&RoleId, RoleKind) -> RoleSpec + Send>;

/// Everything that a supervisor works with.
pub struct SupervisorParts {
    /// The registry.
    pub desk: Arc<ControlDesk>,
    /// The way to start roles.
    pub launcher: Box<dyn Launcher>,
    /// The process of a role.
    pub spec: SpecOf,
    /// Pauses and bounds of restarts.
    pub limits: SupervisorLimits,
    /// Kinds whose counts follow their work.
    pub autoscale: Vec<(RoleKind, AutoscaleLimits)>,
    /// Called once when the run is asked to end over HTTP.
    pub on_stop: Box<dyn Fn() + Send>,
}

impl fmt::Debug for SupervisorParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SupervisorParts")
            .field("launcher", &self.launcher)
            .field("limits", &self.limits)
            .field("autoscale", &self.autoscale)
            .finish_non_exhaustive()
    }
}

/// A supervisor that works until it is dropped. Roles of remote engines go on then, for the next owner;
/// [`Supervisor::shutdown`] ends them.
#[derive(Debug)]
pub struct Supervisor {
    desk: Arc<ControlDesk>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The threads end.
    stop: AtomicBool,
    /// Missing roles are not started any more.
    ending: AtomicBool,
    /// The launcher lists nothing that runs.
    empty: AtomicBool,
    /// Roles are ended by force.
    force: AtomicBool,
}

impl Supervisor {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the system has no thread, or lacks what a client needs.
    pub fn start(parts: SupervisorParts) -> io::Result<Self> {
        let client = Client::new(ClientOptions {
            connect: Some(PROBE_TIME),
            deadline: Some(PROBE_TIME),
            ..ClientOptions::default()
        });
        let client = client.map_err(|e| io::Error::other(e.to_string()))?;
        let (desk, shared) = (Arc::clone(&parts.desk), Arc::new(Shared::default()));
        let (probed, probes) = (Arc::clone(&desk), Arc::clone(&shared));
        let mut supervisor = Self {
            desk,
            shared: Arc::clone(&shared),
            threads: Vec::new(),
        };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(work)
        };
        let rounds = Rounds::new(parts, shared);
        supervisor
            .threads
            .push(spawn("roles", Box::new(move || rounds.run()))?);
        let probe = move || probe_all(&probed, &client, &probes);
        supervisor
            .threads
            .push(spawn("role-probes", Box::new(probe))?);
        Ok(supervisor)
    }

    /// Lets all roles end their work for as long as `grace`, then ends those that still run. True: all ended
    /// by themselves.
    pub fn shutdown(self, grace: Duration) -> bool {
        let (shared, end) = (&self.shared, Instant::now() + grace);
        shared.empty.store(false, Ordering::Release);
        shared.ending.store(true, Ordering::Release);
        self.desk.lock().drain_all(self.desk.now_ms());
        let wait = |until: Instant| {
            while !shared.empty.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::sleep(TICK / 10);
            }
            shared.empty.load(Ordering::Acquire)
        };
        let ended = wait(end);
        if !ended {
            shared.force.store(true, Ordering::Release);
            wait(Instant::now() + 20 * TICK);
        }
        ended
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

/// Asks this process to end, as Ctrl-C does: work at hand is committed and can be continued.
pub fn end_this_process() {
    use rustix::process::{Signal, getpid, kill_process};
    // A process may signal itself.
    let _ = kill_process(getpid(), Signal::TERM);
}

/// State of the thread.
struct Rounds {
    parts: SupervisorParts,
    shared: Arc<Shared>,
    core: SupervisorCore,
    scalers: Vec<(RoleKind, AutoscaleLimits, Autoscaler)>,
    listed: Option<Instant>,
    /// The launcher failed at the last list; it is reported once.
    failing: bool,
    stopped: bool,
}

impl Rounds {
    fn new(mut parts: SupervisorParts, shared: Arc<Shared>) -> Self {
        let scaled = std::mem::take(&mut parts.autoscale).into_iter();
        Self {
            core: SupervisorCore::new(parts.limits.clone(), parts.launcher.starts()),
            scalers: scaled
                .map(|(kind, limits)| (kind, limits, Autoscaler::default()))
                .collect(),
            parts,
            shared,
            listed: None,
            failing: false,
            stopped: false,
        }
    }

    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            self.round();
            std::thread::park_timeout(TICK);
        }
    }

    fn round(&mut self) {
        let desk = Arc::clone(&self.parts.desk);
        if desk.is_stopping() && !self.stopped {
            self.stopped = true;
            (self.parts.on_stop)();
        }
        // Read once: a round that starts roles does not know yet whether any of them runs.
        let ending = self.shared.ending.load(Ordering::Acquire);
        if ending {
            self.core.end();
        } else {
            self.scale();
        }
        let launched = self.list();
        let now_ms = desk.now_ms();
        let steps = self
            .core
            .decide(&mut desk.lock(), launched.as_deref(), now_ms);
        for step in steps {
            self.carry_out(step);
        }
        if ending {
            self.end(launched.as_deref());
        }
    }

    /// Sees whether anything still runs, and ends it by force if that was asked for.
    fn end(&self, launched: Option<&[LaunchedRole]>) {
        let Some(launched) = launched else {
            return;
        };
        let runs = |role: &&LaunchedRole| {
            !matches!(role.state, Launched::Ended(_)) && RoleId::parse(&role.name).is_some()
        };
        let running: Vec<&LaunchedRole> = launched.iter().filter(runs).collect();
        if self.shared.force.load(Ordering::Acquire) {
            for role in &running {
                self.carry_out(Step::Stop(role.name.clone()));
            }
        }
        self.shared
            .empty
            .store(running.is_empty(), Ordering::Release);
    }

    /// The launcher's list, at its interval; ended roles have the end of their log.
    fn list(&mut self) -> Option<Vec<LaunchedRole>> {
        let launcher = &self.parts.launcher;
        if self
            .listed
            .is_some_and(|at| at.elapsed() < launcher.interval())
        {
            return None;
        }
        self.listed = Some(Instant::now());
        let mut launched = match launcher.list() {
            Ok(launched) => launched,
            Err(error) => {
                if !self.failing {
                    tracing::error!(%error, "the launcher does not answer; roles stay as they are");
                }
                self.failing = true;
                return None;
            }
        };
        self.failing = false;
        let there = self.there();
        let ended = launched
            .iter_mut()
            .filter(|role| there.contains(&role.name));
        let ended = ended.filter_map(|role| match &mut role.state {
            Launched::Ended(why) => Some((&role.name, why)),
            _ => None,
        });
        for (name, why) in ended.take(LOGS_AT_A_TIME) {
            if let Ok(log) = launcher.logs(name, LOG_LINES)
                && !log.is_empty()
            {
                why.push_str("; the end of its output:\n");
                why.push_str(&log);
                cut(why, MAX_CAUSE_BYTES);
            }
        }
        Some(launched)
    }

    /// Names of the roles that are there.
    fn there(&self) -> Vec<String> {
        let registry = self.parts.desk.lock();
        let there = registry.slots().filter(|(_, slot)| slot.is_there());
        there
            .map(|(place, _)| registry.id_of(place).to_string())
            .collect()
    }

    fn carry_out(&self, step: Step) {
        match step {
            Step::Start(id) => {
                let Some((_, kind, index, _)) = RoleId::parse(id.as_str()) else {
                    return;
                };
                let spec = (self.parts.spec)(&id, kind);
                if let Err(error) = self.parts.launcher.ensure(&spec) {
                    let place: Place = (kind, index);
                    let desk = &self.parts.desk;
                    tracing::error!(%error, role = %id, "a role cannot be started");
                    desk.lock()
                        .ended(place, Some(error.to_string()), desk.now_ms());
                }
            }
            Step::Stop(name) => {
                // It is tried again at the next list.
                if let Err(error) = self.parts.launcher.stop(&name) {
                    tracing::warn!(%error, role = name, "a role cannot be stopped");
                }
            }
        }
    }

    fn scale(&mut self) {
        for (kind, limits, scaler) in &mut self.scalers {
            let load = self.parts.desk.load(*kind);
            let Some(count) = scaler.decide(limits, &load) else {
                continue;
            };
            tracing::info!(%kind, from = load.wanted, to = count, "scaled by its work");
            if let Err(error) = self.parts.desk.scale(*kind, count, false) {
                tracing::error!(%error, %kind, "cannot be scaled");
            }
        }
    }
}

/// Asks servers that send no heartbeats for their health, until the supervisor ends.
fn probe_all(desk: &ControlDesk, client: &Client, shared: &Shared) {
    let interval = Duration::from_millis(desk.lock().limits().renew_ms);
    while !shared.stop.load(Ordering::Acquire) {
        for (id, url, last) in outside(desk) {
            if shared.stop.load(Ordering::Acquire) {
                return;
            }
            // A server that refuses without a token lives.
            let answer = client.ask(client.request(Method::GET, &url));
            if answer.is_ok_and(|answer| !answer.status.is_server_error()) {
                desk.observe(&id, last);
            }
        }
        std::thread::park_timeout(interval);
    }
}

/// Servers that send no heartbeats: the address of their health, and what is known of them.
fn outside(desk: &ControlDesk) -> Vec<(RoleId, String, Heartbeat)> {
    let registry = desk.lock();
    let outside = registry
        .slots()
        .filter(|(_, slot)| slot.origin == Origin::Outside && slot.is_there());
    let probe = outside.filter_map(|(place, slot)| {
        let address = slot.registration.address.as_deref()?;
        let path = if place.0 == RoleKind::Sandbox {
            "v1/health"
        } else {
            "health"
        };
        let url = format!("{}/{path}", address.trim_end_matches('/'));
        Some((registry.id_of(place), url, slot.heartbeat.clone()))
    });
    probe.collect()
}
