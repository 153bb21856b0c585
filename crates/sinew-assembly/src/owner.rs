//! The owner's side of a run with roles in other processes: one listener for the registry of roles and, if
//! workers run the episodes, for tickets, facts of the run and weights.

use crate::Session;
use crate::failure::Failure;
use crate::launch::{
    control_address, control_limits, control_token, launched_name, owner_url, supervise,
};
use sinew_control::{ControlDesk, ControlPlace, RoleKind, Supervisor, Token};
use sinew_orchestrator::{Goal, PipelineError, Process, Recorder, RunEvent};
use sinew_pipeline::WeightsTransport;
use sinew_queue::{Clock, QueueRoutes, system_clock};
use sinew_recipe::{EngineType, LaunchPlan, RolloutPlace, RunPlan};
use sinew_render::Renderer;
use sinew_store::queue::{DiskQueue, MemoryQueue, Queue, QueueLimits};
use sinew_types::{Fence, PolicyVersion, TensorSource, WeightsId};
use sinew_workers::{Desk, ListenerParts, OwnerListener, PublishedMark, RunTerms};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// Name of the queue of tickets in the folder of a run.
const TICKETS: &str = "tickets";
/// Folder in that of a run with its weights, if the recipe names no other one.
const WEIGHTS: &str = "weights";
/// Interval of sweeps of the queue, and rows that are done and whose keys stay known.
const SWEEP: (Duration, usize) = (Duration::from_secs(2), 4096);
/// Time that the roles of a run get to end with it.
const ROLES_GRACE: Duration = Duration::from_secs(30);
/// Interval of looks at the roles of a run that starts none itself.
const LOOK: Duration = Duration::from_millis(500);

/// Version of the program, which owner and workers must share.
pub(crate) const BUILD: &str = env!("CARGO_PKG_VERSION");

/// Digest of a tokenizer: bytes of all tokens, ends of turns, and the chat template.
pub(crate) fn tokenizer_digest(renderer: &dyn Renderer) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for id in 0..renderer.vocab_size() as u32 {
        add(&renderer.token_bytes(id).unwrap_or_default());
    }
    for id in renderer.stop_ids() {
        add(&id.to_le_bytes());
    }
    add(renderer.template_hash().unwrap_or_default().as_bytes());
    hasher.finalize().to_hex()[..32].to_owned()
}

/// Versions of the parts of a run that its workers must have as well.
pub(crate) fn parts(
    mut versions: BTreeMap<String, String>,
    renderer: &dyn Renderer,
) -> BTreeMap<String, String> {
    versions.insert("tokenizer".into(), tokenizer_digest(renderer));
    versions
}

/// The parts of an owner.
pub(crate) struct OwnerParts<'a> {
    pub(crate) recipe: &'a RunPlan,
    /// The recipe with a checkpoint for each source that is a run.
    pub(crate) pinned: &'a RunPlan,
    pub(crate) session: &'a Session<'a>,
    pub(crate) goal: Goal,
    pub(crate) fence: &'a Fence,
    /// Versions of the parts that the recipe names.
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) renderer: &'a dyn Renderer,
}

/// Tickets of a run whose episodes workers run.
#[derive(Clone)]
pub(crate) struct Tickets {
    pub(crate) desk: Arc<Desk>,
    pub(crate) queue: Arc<dyn Queue>,
    pub(crate) clock: Clock,
    /// Folder in which an embedded engine's weights are published.
    pub(crate) weights: PathBuf,
}

/// A listening owner.
pub(crate) struct Owner {
    control: Arc<ControlDesk>,
    /// Set if workers run the episodes.
    pub(crate) tickets: Option<Tickets>,
    /// Starts the roles of `[launch]`. Taken out when this value is dropped.
    supervisor: Option<Supervisor>,
    /// Whether the run ended by itself.
    ended: Arc<AtomicBool>,
    /// Listens until it is dropped. Only dropping it uses it.
    _listener: OwnerListener,
}

impl Drop for Owner {
    /// Roles end with a run that is over. Those of an interrupted run stay for its next session.
    fn drop(&mut self) {
        let over = self.ended.load(Ordering::Acquire) || self.control.is_stopping();
        if let Some(supervisor) = self.supervisor.take()
            && over
            && !supervisor.shutdown(ROLES_GRACE)
        {
            tracing::warn!("roles did not end in time with their run");
        }
    }
}

impl Owner {
    /// Opens the address of `--control`, or of `[launch]`, if the run has one.
    ///
    /// # Errors
    /// If the recipe needs one that was not given, the address or the queue cannot be opened, the token is no
    /// secret, or the roles of `[launch]` cannot be started.
    pub(crate) fn open(parts: &OwnerParts<'_>) -> Result<Option<Self>, Failure> {
        let (recipe, session) = (parts.recipe, parts.session);
        let launch = recipe.launch.as_ref();
        let address = match (session.serve.control(), launch) {
            (Some(address), _) => address,
            (None, Some(launch)) => control_address(launch)?,
            (None, None) if recipe.rollout.place == RolloutPlace::Workers => {
                return Err(Failure::input(
                    "rollout.place = \"workers\": workers need an address of the run\n  hint: --control \
                     127.0.0.1:9000; rollout.place = \"auto\" runs the episodes in this process without one",
                ));
            }
            (None, None) => return Ok(None),
        };
        let (token_file, token) = token(session, launch)?;
        if parts.fence.number() > 1 {
            tracing::info!(
                fence = parts.fence.number(),
                "the run continues with a new owner"
            );
        }
        let run = launched_name(recipe, session.dir.path());
        let fence = parts.fence.number();
        let control = Arc::new(ControlDesk::new(&run, fence, control_limits(launch)));
        let workers = launch.is_some_and(|launch| launch.rollout.is_some());
        let tickets = recipe.on_workers(workers || session.serve.control().is_some());
        let tickets = tickets.then(|| parts.tickets()).transpose()?;
        let listener = listen(session, address, &token, &control, tickets.as_ref())?;
        let (bound, scheme) = (listener.address(), listener.scheme());
        let url = match launch {
            Some(launch) => owner_url(launch, &run, bound, scheme),
            None => format!("{scheme}://{bound}"),
        };
        let place = place(session, fence, &url, &token_file);
        let supervisor = match launch {
            Some(launch) => Some(supervise(
                launch,
                &run,
                session.dir.path(),
                &control,
                &place,
                &session.stop_ordered,
            )?),
            None => {
                place.write(session.dir.path()).map_err(Failure::system)?;
                let (desk, ordered) = (Arc::downgrade(&control), &session.stop_ordered);
                let watch = watch_roles(desk, session.stop.clone(), Arc::clone(ordered));
                session.runtime.spawn(watch);
                None
            }
        };
        let ended = Arc::<AtomicBool>::default();
        session.bus.record(Box::new(EndOfRun {
            ended: Arc::clone(&ended),
            desk: tickets.as_ref().map(|tickets| Arc::clone(&tickets.desk)),
        }));
        session.bus.emit(RunEvent::Controlled { url, token_file })?;
        Ok(Some(Self {
            control,
            tickets,
            supervisor,
            ended,
            _listener: listener,
        }))
    }

    /// Names a version that engines have now to the registry, with the hash of its manifest if it has one.
    fn name(&self, version: PolicyVersion) {
        let mark = self
            .tickets
            .as_ref()
            .and_then(|tickets| tickets.desk.mark());
        let is_named = |mark: &PublishedMark| {
            let id = mark.id.parse::<WeightsId>();
            id.is_ok_and(|id| id.version == version)
        };
        let checksum = mark.filter(is_named).map(|mark| mark.manifest);
        self.control.set_wanted_weights(version.0, checksum);
    }

    /// Hears how many episodes wait for a worker.
    pub(crate) fn waiting(&self) -> Box<dyn Fn(usize)> {
        let control = Arc::clone(&self.control);
        Box::new(move |count| {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            control.set_waiting(RoleKind::Rollout, count);
        })
    }

    /// Names each version to the registry that `transport` has brought to the engines. The owner listens for
    /// as long as the result lives.
    pub(crate) fn naming(
        self,
        transport: Box<dyn WeightsTransport>,
        first: PolicyVersion,
    ) -> Box<dyn WeightsTransport> {
        self.name(first);
        Box::new(NamedVersions {
            transport,
            owner: self,
        })
    }
}

impl OwnerParts<'_> {
    /// Desk and queue of the tickets.
    fn tickets(&self) -> Result<Tickets, Failure> {
        let (dir, rollout) = (self.session.dir, &self.recipe.rollout);
        let run = run_name(dir.path());
        let section = &self.recipe.engine;
        let embedded = section.kind == EngineType::Embedded;
        let named = section.weights_dir.as_ref().filter(|_| embedded);
        let weights = named.map_or_else(|| dir.path().join(WEIGHTS), PathBuf::from);
        let terms = RunTerms {
            id: unique(&run, dir.path()),
            run,
            fence: self.fence.number(),
            recipe: toml::to_string(self.pinned).map_err(Failure::system)?,
            build: BUILD.into(),
            parts: parts(self.versions.clone(), self.renderer),
            weights: embedded,
            lease_ms: (rollout.ticket_lease_s * 1000.0).ceil() as u64,
        };
        let limits = QueueLimits {
            max_attempts: rollout.ticket_attempts,
            ..QueueLimits::default()
        };
        let queue: Arc<dyn Queue> = match self.goal {
            Goal::Train => {
                let loss = dir.accepts_loss();
                let queue = DiskQueue::in_store(dir.path(), TICKETS, limits, loss);
                Arc::new(queue.map_err(|e| Failure::system(format!("tickets: {e}")))?)
            }
            // A measurement begins anew: its episodes are in the store.
            Goal::Measure => Arc::new(MemoryQueue::in_memory(limits)),
        };
        Ok(Tickets {
            desk: Arc::new(Desk::new(terms, embedded.then(|| weights.clone()))),
            queue,
            clock: system_clock(),
            weights,
        })
    }
}

/// Listens, and returns the address.
fn listen(
    session: &Session<'_>,
    address: SocketAddr,
    token: &str,
    control: &Arc<ControlDesk>,
    tickets: Option<&Tickets>,
) -> Result<OwnerListener, Failure> {
    let tls = &session.serve.tls;
    let given = session.serve.control().map(|_| "--control");
    let named = given.unwrap_or("launch.listen");
    let endpoint = tls.endpoint_of_run(named, address, session.dir.path())?;
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{named} {address}: {e}"));
    let secret = Token::new(token).map_err(|e| failed(&e))?;
    let serve = |tickets: &Tickets| {
        let (queue, clock) = (Arc::clone(&tickets.queue), Arc::clone(&tickets.clock));
        let queue = QueueRoutes::start(queue, token, clock, Some(SWEEP))?;
        Ok((Arc::clone(&tickets.desk), queue))
    };
    let tickets: Result<Option<_>, std::io::Error> = tickets.map(serve).transpose();
    let parts = ListenerParts {
        endpoint,
        token: token.to_owned(),
        roles: control.router(secret),
        tickets: tickets.map_err(|e| failed(&e))?,
    };
    OwnerListener::start(&session.runtime, parts).map_err(|e| match e.kind() {
        std::io::ErrorKind::AddrInUse => Failure::input(format!(
            "{named} {address}: {e}\n  hint: another run of this host may listen there; each needs a port of its \
             own"
        )),
        _ => failed(&e),
    })
}

/// The file with the token of all roles, and the token.
fn token(session: &Session<'_>, launch: Option<&LaunchPlan>) -> Result<(PathBuf, String), Failure> {
    match launch {
        Some(_) if !session.serve.names_token() => control_token(launch, session.dir.path()),
        _ => session.serve.token(session.dir),
    }
}

/// The way to the owner, for other commands.
fn place(session: &Session<'_>, fence: u64, url: &str, token: &Path) -> ControlPlace {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let authority = session.dir.path().join("tls/ca.pem");
    ControlPlace {
        url: url.to_owned(),
        token_file: absolute(token),
        ca_file: (url.starts_with("https:") && authority.is_file()).then(|| absolute(&authority)),
        fence,
    }
}

/// Name of the run, which its traces have.
fn run_name(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// A name that no other run has: that of the run, and a hash of its folder on this host.
fn unique(run: &str, folder: &Path) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = run.chars().map(plain).take(64).collect();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let hash = blake3::hash(format!("{host}{}", folder.display()).as_bytes()).to_hex();
    format!("{name}-{}", &hash[..8])
}

/// Removes roles that are not heard of any more, and ends the run once a role asks for it. A supervisor does
/// both for roles that the run starts itself.
async fn watch_roles(
    control: Weak<ControlDesk>,
    stop: watch::Sender<bool>,
    ordered: Arc<AtomicBool>,
) {
    while let Some(control) = control.upgrade() {
        if control.is_stopping() {
            ordered.store(true, Ordering::Release);
            stop.send_replace(true);
            return;
        }
        control.expire();
        drop(control);
        tokio::time::sleep(LOOK).await;
    }
}

/// Tells workers of a run that ended by itself. One that failed or was interrupted may go on: they wait.
struct EndOfRun {
    ended: Arc<AtomicBool>,
    desk: Option<Arc<Desk>>,
}

impl Recorder for EndOfRun {
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        if let RunEvent::Ended {
            process: Process::Ended,
            ..
        } = event
        {
            self.ended.store(true, Ordering::Release);
            self.desk.iter().for_each(|desk| desk.end());
        }
        Ok(())
    }
}

/// Brings weights to engines, and names them to the registry of roles.
struct NamedVersions {
    transport: Box<dyn WeightsTransport>,
    owner: Owner,
}

impl WeightsTransport for NamedVersions {
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        self.transport.publish(version, weights)?;
        self.owner.name(version);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_runs_are_plain_and_differ_by_folder() {
        let one = unique("my run/ä", Path::new("/a/run"));
        assert!(one.starts_with("my-run-"), "{one}");
        assert!(
            one.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
            "{one}"
        );
        assert_ne!(one, unique("my run/ä", Path::new("/b/run")));
        assert_eq!(run_name(Path::new("/a/run")), "run");
    }
}
