//! Live sandboxes and snapshots with their owners, leases and quotas.

use crate::api::{CreateRequest, ForkRequest, SandboxView, env, seconds};
use crate::auth::{Tokens, random_hex};
pub use crate::bounds::Bounds;
use crate::error::{ApiError, EgressError, bad};
use crate::roots::Roots;
use sinew_sandbox::{
    Network, Sandbox, SandboxError, SandboxProvider, SandboxSpec, SandboxStats, Snapshot,
    TerminalInput,
};
use std::collections::HashMap;
use std::fs::File;
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::Instant;

/// Interval between checks for expired leases.
const SWEEP: Duration = Duration::from_millis(250);
/// Maximum bytes of a sandbox's environment, names and values.
const MAX_ENV_BYTES: usize = 32 << 10;

/// Egress proxy for the sandboxes of this server.
pub trait Egress: Send + Sync {
    /// Port of the proxy on the sandbox's loopback address.
    fn port(&self) -> u16;

    /// Environment variables that make programs use the proxy.
    fn environment(&self) -> Vec<(String, String)>;

    /// Serves connections of `listener` until the returned guard is dropped. `name` identifies the episode in
    /// recordings and in the audit log, separately for each owner.
    ///
    /// # Errors
    /// If the proxy cannot start.
    fn serve(
        &self,
        owner: &str,
        name: &str,
        listener: TcpListener,
    ) -> Result<Box<dyn Send + Sync>, EgressError>;
}

/// A live sandbox.
pub(crate) struct Entry {
    /// Owner of the token that created the sandbox.
    owner: String,
    /// Provider of the sandbox's level.
    provider: Arc<dyn SandboxProvider>,
    /// Specification without the settings of the proxy, for forks.
    spec: SandboxSpec,
    /// Data stores of the snapshot that it started from.
    stores: Stores,
    /// True if the sandbox uses the egress proxy.
    egress: bool,
    /// Length of the lease.
    lease: Duration,
    /// End of the lease.
    deadline: Mutex<Instant>,
    /// `None` after the sandbox was destroyed. The lock serializes operations.
    sandbox: Arc<tokio::sync::Mutex<Option<Box<dyn Sandbox>>>>,
    /// True once the sandbox is being destroyed. Running operations stop.
    ending: watch::Sender<bool>,
    /// Types at the terminal of the program that runs, if it has one.
    terminal: Mutex<Option<mpsc::Sender<TerminalInput>>>,
    /// Serves the proxy's connections.
    _proxy: Option<Box<dyn Send + Sync>>,
}

impl Entry {
    /// Locks the input channel of the running program's terminal.
    pub(crate) fn terminal(&self) -> MutexGuard<'_, Option<mpsc::Sender<TerminalInput>>> {
        self.terminal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// End of the lease.
    fn deadline(&self) -> MutexGuard<'_, Instant> {
        self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews the lease. `more` is added for an operation that is starting now.
    fn renew(&self, more: Duration) {
        let until = Instant::now() + more + self.lease;
        let mut deadline = self.deadline();
        *deadline = until.max(*deadline);
    }

    /// Resolves when the sandbox is being destroyed.
    pub(crate) async fn ended(&self) {
        let mut ending = self.ending.subscribe();
        // An error means that the sender was dropped together with the entry.
        let _ = ending.wait_for(|gone| *gone).await;
    }
}

/// Data stores of a provider: number and bytes of each.
type Stores = Arc<[(u64, u64)]>;

/// Exclusive access to a sandbox.
type SandboxGuard = OwnedMutexGuard<Option<Box<dyn Sandbox>>>;

/// A snapshot on the server.
struct StoredSnapshot {
    /// Owner of the token that created the snapshot.
    owner: String,
    /// Provider of the snapshot's level.
    provider: Arc<dyn SandboxProvider>,
    /// Specification of the source, for the defaults of new sandboxes.
    spec: SandboxSpec,
    snapshot: Snapshot,
    /// Length of the lease.
    lease: Duration,
    /// End of the lease.
    deadline: Instant,
}

/// All live objects of the server.
#[derive(Default)]
struct Registry {
    /// Sandboxes by id.
    sandboxes: HashMap<String, Arc<Entry>>,
    /// Number of sandboxes being created, by owner. They count against the quota.
    creating: HashMap<String, usize>,
    /// Snapshots by id.
    snapshots: HashMap<String, StoredSnapshot>,
    /// Number of snapshots being created, by owner. They count against the quota.
    snapshotting: HashMap<String, usize>,
}

impl Registry {
    /// Bytes of an owner's snapshots and of `more`. Shared stores count once.
    fn snapshot_bytes(
        &self,
        owner: &str,
        provider: &Arc<dyn SandboxProvider>,
        more: &Stores,
    ) -> u64 {
        let stored = self.snapshots.values().filter(|k| k.owner == owner);
        let stored = stored.map(|k| (&k.provider, &k.snapshot.stores));
        let bases = self.sandboxes.values().filter(|e| e.owner == owner);
        let bases = bases.map(|e| (&e.provider, &e.stores));
        let mut all: HashMap<(*const (), u64), u64> = HashMap::new();
        for (provider, stores) in stored.chain(bases).chain([(provider, more)]) {
            for (number, bytes) in stores.iter() {
                let store = (Arc::as_ptr(provider).cast(), *number);
                let counted = all.entry(store).or_default();
                *counted = (*counted).max(*bytes);
            }
        }
        all.values().sum()
    }
}

/// Registry of sandboxes and snapshots, and the operations of the API.
pub struct Service {
    /// Providers from which sandboxes are made.
    pub(crate) roots: Roots,
    /// Price of this host in any currency; clients compare it with that of others.
    pub(crate) price_per_hour: Option<f64>,
    /// True once no sandbox is created any more, because the server is about to end.
    pub(crate) draining: AtomicBool,
    /// Valid tokens.
    pub(crate) tokens: Tokens,
    /// Limits of the server.
    pub(crate) bounds: Bounds,
    /// Egress proxy, if the server has one.
    egress: Option<Arc<dyn Egress>>,
    /// Concurrent file transfers, by owner.
    transfers: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// Live sandboxes and snapshots.
    registry: Mutex<Registry>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("bounds", &self.bounds)
            .finish_non_exhaustive()
    }
}

/// Settings of a sandbox to create.
struct NewSandbox {
    /// Provider of the level.
    provider: Arc<dyn SandboxProvider>,
    /// Specification without the settings of the proxy.
    spec: SandboxSpec,
    /// Use the egress proxy.
    egress: bool,
    /// Name for recordings and the audit log.
    episode: Option<String>,
    /// Length of the lease.
    lease: Duration,
}

/// Reservation in an owner's sandbox quota until the sandbox is registered.
struct SandboxSlot<'a>(&'a Service, String);

impl Drop for SandboxSlot<'_> {
    fn drop(&mut self) {
        if let Some(n) = self.0.lock().creating.get_mut(&self.1) {
            *n -= 1;
        }
    }
}

/// Reservation in an owner's snapshot quota until the snapshot is registered.
struct SnapshotSlot<'a>(&'a Service, String);

impl Drop for SnapshotSlot<'_> {
    fn drop(&mut self) {
        if let Some(n) = self.0.lock().snapshotting.get_mut(&self.1) {
            *n -= 1;
        }
    }
}

impl Service {
    /// Creates a service. The first provider's level is the default.
    pub fn new(
        providers: Vec<Arc<dyn SandboxProvider>>,
        tokens: Tokens,
        bounds: Bounds,
        egress: Option<Arc<dyn Egress>>,
    ) -> Self {
        Self {
            roots: Roots::new(providers),
            price_per_hour: None,
            draining: AtomicBool::new(false),
            tokens,
            transfers: Mutex::default(),
            bounds,
            egress,
            registry: Mutex::default(),
        }
    }

    /// Sets the environment variables of sandboxes that name no image of [`Service::with_image`], such as
    /// those of the default image. Variables of a request replace them.
    #[must_use]
    pub fn with_env(mut self, env: impl IntoIterator<Item = (String, String)>) -> Self {
        self.roots.set_env(env.into_iter().collect());
        self
    }

    /// Offers an image by a name: sandboxes of it are made by `provider`, and have the variables `env` where
    /// a request does not set them.
    #[must_use]
    pub fn with_image(
        mut self,
        name: String,
        provider: Arc<dyn SandboxProvider>,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let env = env.into_iter().collect();
        self.roots.add_image(name, provider, env);
        self
    }

    /// The registry. The guard is never held across an await, so that it cannot block a request for long.
    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of live sandboxes and of snapshots, over all owners.
    pub fn live(&self) -> (usize, usize) {
        let registry = self.lock();
        (registry.sandboxes.len(), registry.snapshots.len())
    }

    /// Number of sandboxes that are live or being created: of an owner, and of all.
    pub(crate) fn counts(&self, owner: &str) -> (usize, usize) {
        let registry = self.lock();
        let live = registry.sandboxes.values().filter(|e| e.owner == owner);
        let own = live.count() + registry.creating.get(owner).copied().unwrap_or(0);
        let creating: usize = registry.creating.values().sum();
        (own, registry.sandboxes.len() + creating)
    }

    /// Reserves `n` sandboxes of an owner's quota.
    fn reserve_sandboxes(&self, owner: &str, n: usize) -> Result<Vec<SandboxSlot<'_>>, ApiError> {
        let mut registry = self.lock();
        let live = registry
            .sandboxes
            .values()
            .filter(|e| e.owner == owner)
            .count();
        let creating = registry.creating.entry(owner.into()).or_default();
        if live + *creating + n > self.bounds.sandboxes {
            return Err(ApiError::TooMany {
                what: "sandboxes",
                live: live + *creating,
                limit: self.bounds.sandboxes,
            });
        }
        *creating += n;
        Ok((0..n).map(|_| SandboxSlot(self, owner.into())).collect())
    }

    /// Creates a sandbox.
    pub(crate) async fn create(
        &self,
        owner: &str,
        request: &CreateRequest,
    ) -> Result<SandboxView, ApiError> {
        let lease = seconds(
            "lease_s",
            request.lease_s,
            self.bounds.lease,
            self.bounds.max_lease,
        )?;
        let start = match &request.snapshot {
            None => None,
            Some(id) => Some(self.find_snapshot(owner, id)?),
        };
        let from = start.as_ref().map(|(provider, ..)| provider);
        let provider = self.roots.chosen(request, from)?;
        let mut all = self.roots.env(&provider).clone();
        all.extend(request.env.clone());
        let env = env(&all)?;
        if env.iter().map(|(n, v)| n.len() + v.len()).sum::<usize>() > MAX_ENV_BYTES {
            return Err(bad(
                "env",
                "too long",
                format!("at most {MAX_ENV_BYTES} bytes"),
            ));
        }
        if request.episode.is_some() && !request.egress {
            return Err(bad(
                "episode",
                "set",
                "nothing, where egress is false: it names recordings",
            ));
        }
        let defaults = start
            .as_ref()
            .map_or(&self.bounds.limits, |(_, spec, _)| &spec.limits);
        let spec = SandboxSpec {
            limits: request.limits.apply(defaults, &self.bounds.max_limits)?,
            env,
            strict: request.strict,
            ..SandboxSpec::default()
        };
        self.check_open()?;
        let slot = self.reserve_sandboxes(owner, 1)?;
        let snapshot = start.map(|(_, _, snapshot)| snapshot);
        let new = NewSandbox {
            provider,
            spec,
            egress: request.egress,
            episode: request.episode.clone(),
            lease,
        };
        let view = self.start(owner, new, snapshot.as_ref()).await;
        drop(slot);
        view
    }

    /// Starts and registers a sandbox, from a snapshot if there is one.
    async fn start(
        &self,
        owner: &str,
        new: NewSandbox,
        snapshot: Option<&Snapshot>,
    ) -> Result<SandboxView, ApiError> {
        let NewSandbox {
            provider,
            mut spec,
            egress,
            episode,
            lease,
        } = new;
        let proxy = match (&self.egress, egress) {
            (_, false) => None,
            (Some(proxy), true) => Some(proxy),
            (None, true) => {
                return Err(bad(
                    "egress",
                    "true",
                    "false, as this server has no egress rules",
                ));
            }
        };
        let own = spec.clone();
        let stores = snapshot.map_or_else(|| Arc::from([]), |s| Arc::clone(&s.stores));
        self.check_snapshot_quota(&self.lock(), owner, &provider, &stores)?;
        if let Some(proxy) = proxy {
            spec.network = Network::Loopback;
            spec.env.extend(proxy.environment());
        }
        let mut sandbox = match snapshot {
            None => provider.acquire(&spec).await?,
            Some(snapshot) => provider.fork(&spec, snapshot).await?,
        };
        let id = format!("sb-{}", random_hex(16).map_err(internal)?);
        let serving = match proxy {
            None => None,
            Some(proxy) => {
                let listener = sandbox.listen_inside(proxy.port()).await?;
                Some(
                    proxy
                        .serve(owner, episode.as_deref().unwrap_or(&id), listener)
                        .map_err(internal)?,
                )
            }
        };
        let entry = Arc::new(Entry {
            owner: owner.into(),
            provider,
            spec: own,
            stores,
            egress,
            lease,
            deadline: Mutex::new(Instant::now() + lease),
            sandbox: Arc::new(tokio::sync::Mutex::new(Some(sandbox))),
            ending: watch::channel(false).0,
            terminal: Mutex::default(),
            _proxy: serving,
        });
        let view = view(&id, &entry);
        self.lock().sandboxes.insert(id, entry);
        Ok(view)
    }

    /// Returns an owner's sandbox and renews its lease.
    pub(crate) fn entry(&self, owner: &str, id: &str) -> Result<Arc<Entry>, ApiError> {
        let found = self
            .lock()
            .sandboxes
            .get(id)
            .filter(|e| e.owner == owner)
            .cloned();
        let entry = found.ok_or_else(|| not_found("sandbox", id))?;
        entry.renew(Duration::ZERO);
        Ok(entry)
    }

    /// Locks a sandbox for one operation of at most `time`. Fails with [`ApiError::Busy`] if another
    /// operation uses it.
    pub(crate) fn lock_sandbox(
        &self,
        owner: &str,
        id: &str,
        time: Duration,
    ) -> Result<(Arc<Entry>, SandboxGuard), ApiError> {
        let entry = self.entry(owner, id)?;
        let guard = Arc::clone(&entry.sandbox)
            .try_lock_owned()
            .map_err(|_| ApiError::Busy)?;
        if guard.is_none() {
            return Err(ApiError::Gone);
        }
        entry.renew(time);
        Ok((entry, guard))
    }

    /// An owner's sandboxes, sorted by id.
    pub(crate) fn list(&self, owner: &str) -> Vec<SandboxView> {
        let registry = self.lock();
        let mut views: Vec<_> = registry
            .sandboxes
            .iter()
            .filter(|(_, e)| e.owner == owner)
            .map(|(id, e)| view(id, e))
            .collect();
        views.sort_by(|a, b| a.id.cmp(&b.id));
        views
    }

    /// Returns the state of a sandbox and renews its lease.
    pub(crate) fn view(&self, owner: &str, id: &str) -> Result<SandboxView, ApiError> {
        Ok(view(id, &*self.entry(owner, id)?))
    }

    /// Current resource use of a sandbox.
    pub(crate) async fn stats(&self, owner: &str, id: &str) -> Result<SandboxStats, ApiError> {
        let (entry, mut guard) = self.lock_sandbox(owner, id, Duration::from_secs(10))?;
        let sandbox = guard.as_mut().ok_or(ApiError::Gone)?;
        tokio::select! {
            stats = sandbox.stats() => Ok(stats?),
            () = entry.ended() => Err(ApiError::Gone),
        }
    }

    /// Restores a sandbox to its state at creation.
    pub(crate) async fn reset(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        let (_, mut guard) = self.lock_sandbox(owner, id, Duration::from_secs(10))?;
        Ok(guard.as_mut().ok_or(ApiError::Gone)?.reset().await?)
    }

    /// Takes a snapshot of a sandbox's files. Returns its id.
    pub(crate) async fn snapshot(&self, owner: &str, id: &str) -> Result<String, ApiError> {
        let _slot = self.reserve_snapshot(owner)?;
        let (entry, mut guard) = self.lock_sandbox(owner, id, Duration::from_secs(10))?;
        let snapshot = guard.as_mut().ok_or(ApiError::Gone)?.snapshot().await?;
        self.store_snapshot(owner, &entry.provider, &entry.spec, snapshot)
    }

    /// Reserves one snapshot of an owner's quota.
    fn reserve_snapshot(&self, owner: &str) -> Result<SnapshotSlot<'_>, ApiError> {
        let mut registry = self.lock();
        let stored = registry
            .snapshots
            .values()
            .filter(|k| k.owner == owner)
            .count();
        let creating = registry.snapshotting.entry(owner.into()).or_default();
        if stored + *creating >= self.bounds.snapshots {
            return Err(ApiError::TooMany {
                what: "snapshots",
                live: stored + *creating,
                limit: self.bounds.snapshots,
            });
        }
        *creating += 1;
        Ok(SnapshotSlot(self, owner.into()))
    }

    /// Fails if an owner's snapshots and `more` exceed the byte quota.
    fn check_snapshot_quota(
        &self,
        registry: &Registry,
        owner: &str,
        provider: &Arc<dyn SandboxProvider>,
        more: &Stores,
    ) -> Result<(), ApiError> {
        let limit = self.bounds.snapshot_bytes;
        match registry.snapshot_bytes(owner, provider, more) {
            bytes if bytes > limit && !more.is_empty() => {
                Err(ApiError::TooMuch { held: bytes, limit })
            }
            _ => Ok(()),
        }
    }

    /// Waits for one of the owner's transfer slots.
    pub(crate) async fn transfer_slot(
        &self,
        owner: &str,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        let slots = {
            let mut all = self
                .transfers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let own = all.entry(owner.into());
            let new = || Arc::new(Semaphore::new(self.bounds.transfers));
            Arc::clone(own.or_insert_with(new))
        };
        // The semaphore is never closed.
        slots.acquire_owned().await.map_err(|_| ApiError::Gone)
    }

    /// Registers a snapshot. Its lease is 12 default leases, at most the maximum lease.
    fn store_snapshot(
        &self,
        owner: &str,
        provider: &Arc<dyn SandboxProvider>,
        spec: &SandboxSpec,
        snapshot: Snapshot,
    ) -> Result<String, ApiError> {
        let name = format!("snap-{}", random_hex(16).map_err(internal)?);
        let lease = self.bounds.max_lease.min(self.bounds.lease * 12);
        let stored = StoredSnapshot {
            owner: owner.into(),
            provider: Arc::clone(provider),
            spec: spec.clone(),
            snapshot,
            lease,
            deadline: Instant::now() + lease,
        };
        let mut registry = self.lock();
        self.check_snapshot_quota(&registry, owner, &stored.provider, &stored.snapshot.stores)?;
        registry.snapshots.insert(name.clone(), stored);
        Ok(name)
    }

    /// Finds an owner's snapshot and renews its lease.
    fn find_snapshot(
        &self,
        owner: &str,
        id: &str,
    ) -> Result<(Arc<dyn SandboxProvider>, SandboxSpec, Snapshot), ApiError> {
        let mut registry = self.lock();
        let stored = registry.snapshots.get_mut(id).filter(|k| k.owner == owner);
        let stored = stored.ok_or_else(|| not_found("snapshot", id))?;
        stored.deadline = Instant::now() + stored.lease;
        Ok((
            Arc::clone(&stored.provider),
            stored.spec.clone(),
            stored.snapshot.clone(),
        ))
    }

    /// Exports a snapshot as a tar archive.
    pub(crate) async fn export(&self, owner: &str, id: &str) -> Result<File, ApiError> {
        let (provider, _, snapshot) = self.find_snapshot(owner, id)?;
        let max_bytes = self.bounds.archive_bytes;
        Ok(provider.export_file(&snapshot, max_bytes).await?)
    }

    /// Imports a tar archive as a snapshot. Returns its id.
    pub(crate) async fn import(
        &self,
        owner: &str,
        level: Option<&str>,
        image: Option<&str>,
        archive: File,
    ) -> Result<String, ApiError> {
        let provider = self.roots.provider(level, image)?;
        let _slot = self.reserve_snapshot(owner)?;
        let snapshot = provider
            .import_file(archive, self.bounds.max_limits.work_bytes)
            .await?;
        let spec = SandboxSpec {
            limits: self.bounds.limits.clone(),
            ..SandboxSpec::default()
        };
        self.store_snapshot(owner, provider, &spec, snapshot)
    }

    /// Deletes a snapshot. Sandboxes that started from it are unaffected.
    pub(crate) fn delete_snapshot(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        let mut registry = self.lock();
        if registry.snapshots.get(id).is_none_or(|k| k.owner != owner) {
            return Err(not_found("snapshot", id));
        }
        registry.snapshots.remove(id);
        Ok(())
    }

    /// Creates sandboxes with the current files of this one: all of them, or none on an error.
    pub(crate) async fn fork(
        &self,
        owner: &str,
        id: &str,
        request: &ForkRequest,
    ) -> Result<Vec<SandboxView>, ApiError> {
        let count = request.count.unwrap_or(1);
        if count == 0 || count > self.bounds.sandboxes {
            return Err(bad(
                "count",
                count,
                format!("1 to {}", self.bounds.sandboxes),
            ));
        }
        self.check_open()?;
        let slots = self.reserve_sandboxes(owner, count)?;
        let (entry, mut guard) = self.lock_sandbox(owner, id, Duration::from_secs(10))?;
        let lease = seconds(
            "lease_s",
            request.lease_s,
            entry.lease,
            self.bounds.max_lease,
        )?;
        let snapshot = guard.as_mut().ok_or(ApiError::Gone)?.snapshot().await?;
        drop(guard);
        let mut views: Vec<SandboxView> = Vec::new();
        for slot in slots {
            let new = NewSandbox {
                provider: Arc::clone(&entry.provider),
                spec: entry.spec.clone(),
                egress: entry.egress,
                episode: None,
                lease,
            };
            match self.start(owner, new, Some(&snapshot)).await {
                Ok(view) => views.push(view),
                Err(e) => {
                    for view in &views {
                        let _ = self.destroy(owner, &view.id).await;
                    }
                    return Err(e);
                }
            }
            drop(slot);
        }
        Ok(views)
    }

    /// Destroys a sandbox and kills its programs.
    pub(crate) async fn destroy(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        let entry = {
            let mut registry = self.lock();
            if registry.sandboxes.get(id).is_none_or(|e| e.owner != owner) {
                return Err(not_found("sandbox", id));
            }
            registry.sandboxes.remove(id)
        };
        match entry {
            Some(entry) => Ok(destroy(&entry).await?),
            None => Ok(()),
        }
    }

    /// Destroys sandboxes and snapshots with expired leases, until the future is dropped.
    pub(crate) async fn sweep(&self) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            let expired: Vec<Arc<Entry>> = {
                let mut registry = self.lock();
                registry.snapshots.retain(|_, stored| stored.deadline > now);
                registry
                    .sandboxes
                    .extract_if(|_, e| *e.deadline() <= now)
                    .map(|(_, e)| e)
                    .collect()
            };
            // No client waits for an error. Dropping a sandbox destroys it as well.
            let destroyed = expired.iter().map(|entry| destroy(entry));
            futures::future::join_all(destroyed).await;
        }
    }

    /// Destroys all sandboxes and snapshots, at the end of the server.
    pub async fn close(&self) {
        let all: Vec<Arc<Entry>> = {
            let mut registry = self.lock();
            registry.snapshots.clear();
            registry.sandboxes.drain().map(|(_, e)| e).collect()
        };
        futures::future::join_all(all.iter().map(|entry| destroy(entry))).await;
    }
}

/// Stops the running operation of a sandbox, then destroys it.
async fn destroy(entry: &Entry) -> Result<(), SandboxError> {
    entry.ending.send_replace(true);
    let sandbox = entry.sandbox.lock().await.take();
    match sandbox {
        Some(sandbox) => sandbox.destroy().await,
        None => Ok(()),
    }
}

/// State of a sandbox for its owner.
fn view(id: &str, entry: &Entry) -> SandboxView {
    SandboxView {
        id: id.into(),
        level: entry.provider.level().into(),
        lease_s: entry.lease.as_secs_f64(),
        expires_in_s: entry
            .deadline()
            .saturating_duration_since(Instant::now())
            .as_secs_f64(),
        busy: entry.sandbox.try_lock().is_err(),
        limits: entry.spec.limits.clone(),
    }
}

/// Error for an unknown id, cut to 80 characters.
fn not_found(what: &'static str, id: &str) -> ApiError {
    let mut id = id.to_string();
    if let Some((at, _)) = id.char_indices().nth(80) {
        id.truncate(at);
    }
    ApiError::NotFound { what, id }
}

/// Error for a failure of the server itself.
fn internal(message: impl std::fmt::Display) -> ApiError {
    SandboxError::io("prepare a sandbox", message).into()
}
