//! The book of live sandboxes and snapshots: owners, leases, bounds.

use crate::api::{CreateRequest, ForkRequest, SandboxView, env, seconds};
use crate::auth::{Tokens, random_hex};
pub use crate::bounds::Bounds;
use crate::error::{ApiError, bad};
use sinew_sandbox::{Network, Sandbox, SandboxProvider, SandboxSpec, SandboxStats, Snapshot};
use std::collections::HashMap;
use std::fs::File;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, watch};

/// How often ended leases are looked for.
const SWEEP: Duration = Duration::from_millis(250);
/// Bytes of the environment of a sandbox.
const MAX_ENV_BYTES: usize = 32 << 10;

/// The way out of sandboxes, where the server has one.
pub trait Egress: Send + Sync {
    /// Port on the sandbox's loopback address.
    fn port(&self) -> u16;

    /// Environment variables that send programs there.
    fn environment(&self) -> Vec<(String, String)>;

    /// Serves what connects to the listener until the guard is dropped. `name` is the episode's,
    /// by which it is recorded and logged, apart from those of other owners.
    ///
    /// # Errors
    /// What went wrong.
    fn serve(
        &self,
        owner: &str,
        name: &str,
        listener: TcpListener,
    ) -> Result<Box<dyn Send + Sync>, String>;
}

/// One live sandbox.
pub(crate) struct Entry {
    owner: String,
    provider: Arc<dyn SandboxProvider>,
    spec: SandboxSpec,
    /// What the snapshot keeps that it started from.
    stores: Stores,
    egress: bool,
    lease: Duration,
    deadline: Mutex<Instant>,
    /// Empty once it is destroyed.
    place: Arc<tokio::sync::Mutex<Option<Box<dyn Sandbox>>>>,
    /// Turns true when it is to go: what runs is dropped.
    ending: watch::Sender<bool>,
    _door: Option<Box<dyn Send + Sync>>,
}

impl Entry {
    fn deadline(&self) -> MutexGuard<'_, Instant> {
        self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the lease anew, `more` from now.
    fn renew(&self, more: Duration) {
        let until = Instant::now() + more + self.lease;
        let mut deadline = self.deadline();
        *deadline = until.max(*deadline);
    }

    /// Resolves when the sandbox is to go.
    pub(crate) async fn ended(&self) {
        let mut ending = self.ending.subscribe();
        // An error means that the sender is gone, and with it the entry.
        let _ = ending.wait_for(|gone| *gone).await;
    }
}

/// Stores of a provider and the bytes of each.
type Stores = Arc<[(u64, u64)]>;

type Place = OwnedMutexGuard<Option<Box<dyn Sandbox>>>;

struct Kept {
    owner: String,
    provider: Arc<dyn SandboxProvider>,
    spec: SandboxSpec,
    snapshot: Snapshot,
    lease: Duration,
    deadline: Instant,
}

#[derive(Default)]
struct Book {
    sandboxes: HashMap<String, Arc<Entry>>,
    /// Being made, by owner: they count, too.
    coming: HashMap<String, usize>,
    snapshots: HashMap<String, Kept>,
    /// Being made, by owner, likewise.
    freezing: HashMap<String, usize>,
}

impl Book {
    /// Bytes that an owner's snapshots keep, and `more` of a provider.
    fn held(&self, owner: &str, provider: &Arc<dyn SandboxProvider>, more: &Stores) -> u64 {
        let kept = self.snapshots.values().filter(|k| k.owner == owner);
        let kept = kept.map(|k| (&k.provider, &k.snapshot.stores));
        let bases = self.sandboxes.values().filter(|e| e.owner == owner);
        let bases = bases.map(|e| (&e.provider, &e.stores));
        let mut all: HashMap<(*const (), u64), u64> = HashMap::new();
        for (provider, stores) in kept.chain(bases).chain([(provider, more)]) {
            for (number, bytes) in stores.iter() {
                let store = (Arc::as_ptr(provider).cast(), *number);
                let held = all.entry(store).or_default();
                *held = (*held).max(*bytes);
            }
        }
        all.values().sum()
    }
}

/// Sandboxes, their owners and their leases.
pub struct Service {
    providers: Vec<Arc<dyn SandboxProvider>>,
    pub(crate) tokens: Tokens,
    pub(crate) bounds: Bounds,
    egress: Option<Arc<dyn Egress>>,
    /// Of each owner, for what it sends and fetches.
    turns: Mutex<HashMap<String, Arc<Semaphore>>>,
    book: Mutex<Book>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("bounds", &self.bounds)
            .finish_non_exhaustive()
    }
}

/// What a sandbox is to be.
struct Wish {
    provider: Arc<dyn SandboxProvider>,
    spec: SandboxSpec,
    egress: bool,
    episode: Option<String>,
    lease: Duration,
}

/// A place in an owner's count, until the sandbox is in the book.
struct Room<'a>(&'a Service, String);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if let Some(n) = self.0.lock().coming.get_mut(&self.1) {
            *n -= 1;
        }
    }
}

/// A place in an owner's count of snapshots, until it is in the book.
struct Shelf<'a>(&'a Service, String);

impl Drop for Shelf<'_> {
    fn drop(&mut self) {
        if let Some(n) = self.0.lock().freezing.get_mut(&self.1) {
            *n -= 1;
        }
    }
}

impl Service {
    /// The first provider's level is the default.
    pub fn new(
        providers: Vec<Arc<dyn SandboxProvider>>,
        tokens: Tokens,
        bounds: Bounds,
        egress: Option<Arc<dyn Egress>>,
    ) -> Self {
        Self {
            providers,
            tokens,
            turns: Mutex::default(),
            bounds,
            egress,
            book: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Live sandboxes and snapshots of all owners.
    pub fn live(&self) -> (usize, usize) {
        let book = self.lock();
        (book.sandboxes.len(), book.snapshots.len())
    }

    pub(crate) fn levels(&self) -> impl Iterator<Item = &Arc<dyn SandboxProvider>> {
        self.providers.iter()
    }

    fn provider(&self, level: Option<&str>) -> Result<&Arc<dyn SandboxProvider>, ApiError> {
        let found = match level {
            None => self.providers.first(),
            Some(name) => self.providers.iter().find(|p| p.level() == name),
        };
        found.ok_or_else(|| {
            let names: Vec<_> = self.providers.iter().map(|p| p.level()).collect();
            bad("level", level.unwrap_or("nothing"), names.join(", "))
        })
    }

    fn room(&self, owner: &str, n: usize) -> Result<Vec<Room<'_>>, ApiError> {
        let mut book = self.lock();
        let live = book.sandboxes.values().filter(|e| e.owner == owner).count();
        let coming = book.coming.entry(owner.into()).or_default();
        if live + *coming + n > self.bounds.sandboxes {
            return Err(ApiError::TooMany {
                what: "sandboxes",
                live: live + *coming,
                limit: self.bounds.sandboxes,
            });
        }
        *coming += n;
        Ok((0..n).map(|_| Room(self, owner.into())).collect())
    }

    /// Makes a sandbox.
    pub(crate) async fn create(
        &self,
        owner: &str,
        request: &CreateRequest,
    ) -> Result<SandboxView, ApiError> {
        let lease = seconds(
            "lease_s",
            request.lease_s,
            self.bounds.lease,
            self.bounds.longest_lease,
        )?;
        let env = env(&request.env)?;
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
        let start = match &request.snapshot {
            None => None,
            Some(id) => Some(self.kept(owner, id)?),
        };
        let provider = match (&start, request.level.as_deref()) {
            (Some((provider, ..)), level) if level.is_none_or(|l| l == provider.level()) => {
                Arc::clone(provider)
            }
            (Some((provider, ..)), level) => {
                return Err(bad(
                    "level",
                    level.unwrap_or_default(),
                    format!("{}, which made the snapshot", provider.level()),
                ));
            }
            (None, level) => Arc::clone(self.provider(level)?),
        };
        let defaults = start
            .as_ref()
            .map_or(&self.bounds.limits, |(_, spec, _)| &spec.limits);
        let was_live = start.as_ref().is_some_and(|(_, spec, _)| spec.live);
        let spec = SandboxSpec {
            limits: request.limits.apply(defaults, &self.bounds.most)?,
            env,
            strict: request.strict,
            live: request.live.unwrap_or(was_live),
            ..SandboxSpec::default()
        };
        let room = self.room(owner, 1)?;
        let snapshot = start.map(|(_, _, snapshot)| snapshot);
        let wish = Wish {
            provider,
            spec,
            egress: request.egress,
            episode: request.episode.clone(),
            lease,
        };
        let view = self.make(owner, wish, snapshot.as_ref()).await;
        drop(room);
        view
    }

    async fn make(
        &self,
        owner: &str,
        wish: Wish,
        snapshot: Option<&Snapshot>,
    ) -> Result<SandboxView, ApiError> {
        let Wish {
            provider,
            mut spec,
            egress,
            episode,
            lease,
        } = wish;
        let way_out = match (&self.egress, egress) {
            (_, false) => None,
            (Some(way_out), true) => Some(way_out),
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
        self.afford(&self.lock(), owner, &provider, &stores)?;
        if let Some(way_out) = way_out {
            spec.network = Network::Loopback;
            spec.env.extend(way_out.environment());
        }
        let mut sandbox = match snapshot {
            None => provider.acquire(&spec).await?,
            Some(snapshot) => provider.fork(&spec, snapshot).await?,
        };
        let id = format!("sb-{}", random_hex(16).map_err(internal)?);
        let door = match way_out {
            None => None,
            Some(way_out) => {
                let listener = sandbox.listen_inside(way_out.port()).await?;
                Some(
                    way_out
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
            place: Arc::new(tokio::sync::Mutex::new(Some(sandbox))),
            ending: watch::channel(false).0,
            _door: door,
        });
        let view = view(&id, &entry);
        self.lock().sandboxes.insert(id, entry);
        Ok(view)
    }

    /// An owner's sandbox; its lease begins anew.
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

    /// The inside of a sandbox, for one user at a time, for at most `time`.
    pub(crate) fn enter(
        &self,
        owner: &str,
        id: &str,
        time: Duration,
    ) -> Result<(Arc<Entry>, Place), ApiError> {
        let entry = self.entry(owner, id)?;
        let place = Arc::clone(&entry.place)
            .try_lock_owned()
            .map_err(|_| ApiError::Busy)?;
        if place.is_none() {
            return Err(ApiError::Gone);
        }
        entry.renew(time);
        Ok((entry, place))
    }

    pub(crate) fn list(&self, owner: &str) -> Vec<SandboxView> {
        let book = self.lock();
        let mut views: Vec<_> = book
            .sandboxes
            .iter()
            .filter(|(_, e)| e.owner == owner)
            .map(|(id, e)| view(id, e))
            .collect();
        views.sort_by(|a, b| a.id.cmp(&b.id));
        views
    }

    pub(crate) fn look(&self, owner: &str, id: &str) -> Result<SandboxView, ApiError> {
        Ok(view(id, &*self.entry(owner, id)?))
    }

    pub(crate) async fn stats(&self, owner: &str, id: &str) -> Result<SandboxStats, ApiError> {
        let (entry, mut place) = self.enter(owner, id, Duration::from_secs(10))?;
        let sandbox = place.as_mut().ok_or(ApiError::Gone)?;
        tokio::select! {
            stats = sandbox.stats() => Ok(stats?),
            () = entry.ended() => Err(ApiError::Gone),
        }
    }

    pub(crate) async fn reset(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        let (_, mut place) = self.enter(owner, id, Duration::from_secs(10))?;
        Ok(place.as_mut().ok_or(ApiError::Gone)?.reset().await?)
    }

    /// Freezes a sandbox's files under a name.
    pub(crate) async fn snapshot(&self, owner: &str, id: &str) -> Result<String, ApiError> {
        let _shelf = self.shelf(owner)?;
        let (entry, mut place) = self.enter(owner, id, Duration::from_secs(10))?;
        let snapshot = place.as_mut().ok_or(ApiError::Gone)?.snapshot().await?;
        self.keep(owner, &entry.provider, &entry.spec, snapshot)
    }

    fn shelf(&self, owner: &str) -> Result<Shelf<'_>, ApiError> {
        let mut book = self.lock();
        let held = book.snapshots.values().filter(|k| k.owner == owner).count();
        let coming = book.freezing.entry(owner.into()).or_default();
        if held + *coming >= self.bounds.snapshots {
            return Err(ApiError::TooMany {
                what: "snapshots",
                live: held + *coming,
                limit: self.bounds.snapshots,
            });
        }
        *coming += 1;
        Ok(Shelf(self, owner.into()))
    }

    /// Refuses what would keep more of an owner than it may have.
    fn afford(
        &self,
        book: &Book,
        owner: &str,
        provider: &Arc<dyn SandboxProvider>,
        more: &Stores,
    ) -> Result<(), ApiError> {
        let limit = self.bounds.snapshot_bytes;
        match book.held(owner, provider, more) {
            held if held > limit && !more.is_empty() => Err(ApiError::TooMuch { held, limit }),
            _ => Ok(()),
        }
    }

    /// A turn to send or fetch a file.
    pub(crate) async fn turn(&self, owner: &str) -> Result<OwnedSemaphorePermit, ApiError> {
        let turns = {
            let mut all = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            let own = all.entry(owner.into());
            let new = || Arc::new(Semaphore::new(self.bounds.transfers));
            Arc::clone(own.or_insert_with(new))
        };
        // Nobody closes it.
        turns.acquire_owned().await.map_err(|_| ApiError::Gone)
    }

    fn keep(
        &self,
        owner: &str,
        provider: &Arc<dyn SandboxProvider>,
        spec: &SandboxSpec,
        snapshot: Snapshot,
    ) -> Result<String, ApiError> {
        let name = format!("snap-{}", random_hex(16).map_err(internal)?);
        let lease = self.bounds.longest_lease.min(self.bounds.lease * 12);
        let kept = Kept {
            owner: owner.into(),
            provider: Arc::clone(provider),
            spec: spec.clone(),
            snapshot,
            lease,
            deadline: Instant::now() + lease,
        };
        let mut book = self.lock();
        self.afford(&book, owner, &kept.provider, &kept.snapshot.stores)?;
        book.snapshots.insert(name.clone(), kept);
        Ok(name)
    }

    fn kept(
        &self,
        owner: &str,
        id: &str,
    ) -> Result<(Arc<dyn SandboxProvider>, SandboxSpec, Snapshot), ApiError> {
        let mut book = self.lock();
        let kept = book.snapshots.get_mut(id).filter(|k| k.owner == owner);
        let kept = kept.ok_or_else(|| not_found("snapshot", id))?;
        kept.deadline = Instant::now() + kept.lease;
        Ok((
            Arc::clone(&kept.provider),
            kept.spec.clone(),
            kept.snapshot.clone(),
        ))
    }

    pub(crate) async fn export(&self, owner: &str, id: &str) -> Result<File, ApiError> {
        let (provider, _, snapshot) = self.kept(owner, id)?;
        let most = self.bounds.archive_bytes;
        Ok(provider.export_file(&snapshot, most).await?)
    }

    pub(crate) async fn import(
        &self,
        owner: &str,
        level: Option<&str>,
        archive: File,
    ) -> Result<String, ApiError> {
        let provider = self.provider(level)?;
        let _shelf = self.shelf(owner)?;
        let snapshot = provider
            .import_file(archive, self.bounds.most.work_bytes)
            .await?;
        let spec = SandboxSpec {
            limits: self.bounds.limits.clone(),
            ..SandboxSpec::default()
        };
        self.keep(owner, provider, &spec, snapshot)
    }

    pub(crate) fn forget(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        let mut book = self.lock();
        if book.snapshots.get(id).is_none_or(|k| k.owner != owner) {
            return Err(not_found("snapshot", id));
        }
        book.snapshots.remove(id);
        Ok(())
    }

    /// New sandboxes that start as this one is now.
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
        let rooms = self.room(owner, count)?;
        let (entry, mut place) = self.enter(owner, id, Duration::from_secs(10))?;
        let lease = seconds(
            "lease_s",
            request.lease_s,
            entry.lease,
            self.bounds.longest_lease,
        )?;
        let snapshot = place.as_mut().ok_or(ApiError::Gone)?.snapshot().await?;
        drop(place);
        let mut views: Vec<SandboxView> = Vec::new();
        for room in rooms {
            let wish = Wish {
                provider: Arc::clone(&entry.provider),
                spec: entry.spec.clone(),
                egress: entry.egress,
                episode: None,
                lease,
            };
            match self.make(owner, wish, Some(&snapshot)).await {
                Ok(view) => views.push(view),
                Err(e) => {
                    // All or none.
                    for view in &views {
                        let _ = self.destroy(owner, &view.id).await;
                    }
                    return Err(e);
                }
            }
            drop(room);
        }
        Ok(views)
    }

    /// Kills what runs and frees everything.
    pub(crate) async fn destroy(&self, owner: &str, id: &str) -> Result<(), ApiError> {
        let entry = {
            let mut book = self.lock();
            if book.sandboxes.get(id).is_none_or(|e| e.owner != owner) {
                return Err(not_found("sandbox", id));
            }
            book.sandboxes.remove(id)
        };
        match entry {
            Some(entry) => Ok(end(&entry).await?),
            None => Ok(()),
        }
    }

    /// Destroys what nobody renewed. Runs until it is dropped.
    pub(crate) async fn sweep(&self) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            let over: Vec<Arc<Entry>> = {
                let mut book = self.lock();
                book.snapshots.retain(|_, kept| kept.deadline > now);
                book.sandboxes
                    .extract_if(|_, e| *e.deadline() <= now)
                    .map(|(_, e)| e)
                    .collect()
            };
            // Nobody is left to tell of a failure; dropping a sandbox destroys it all the same.
            let ends = over.iter().map(|entry| end(entry));
            futures::future::join_all(ends).await;
        }
    }

    /// Destroys everything: the server ends.
    pub async fn close(&self) {
        let all: Vec<Arc<Entry>> = {
            let mut book = self.lock();
            book.snapshots.clear();
            book.sandboxes.drain().map(|(_, e)| e).collect()
        };
        futures::future::join_all(all.iter().map(|entry| end(entry))).await;
    }
}

async fn end(entry: &Entry) -> Result<(), sinew_sandbox::SandboxError> {
    entry.ending.send_replace(true);
    let sandbox = entry.place.lock().await.take();
    match sandbox {
        Some(sandbox) => sandbox.destroy().await,
        None => Ok(()),
    }
}

fn view(id: &str, entry: &Entry) -> SandboxView {
    SandboxView {
        id: id.into(),
        level: entry.provider.level().into(),
        lease_s: entry.lease.as_secs_f64(),
        expires_in_s: entry
            .deadline()
            .saturating_duration_since(Instant::now())
            .as_secs_f64(),
        busy: entry.place.try_lock().is_err(),
        limits: entry.spec.limits.clone(),
    }
}

fn not_found(what: &'static str, id: &str) -> ApiError {
    let mut id = id.to_string();
    if let Some((at, _)) = id.char_indices().nth(80) {
        id.truncate(at);
    }
    ApiError::NotFound { what, id }
}

fn internal(message: String) -> ApiError {
    ApiError::Sandbox(sinew_sandbox::SandboxError::Io {
        operation: "prepare a sandbox".into(),
        message,
    })
}
