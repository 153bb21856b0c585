//! The pool of workers.
//!
//! A pool has a fixed number of slots. The worker of a slot starts when the slot is first used, and a worker
//! that ended is replaced by the next call or session. Sessions stay in their worker; calls without a session
//! go to the slot with the fewest users. The number of starts within a minute is bounded: code that ends each
//! worker at once would otherwise take the time of the host for imports.
//!
//! A worker in which code of a model ran serves no other session and no other call: remains of the code end
//! with it, and the next worker starts at once. Each session has a separate worker if the class runs code.
//!
//! All work runs on a runtime of the pool. A caller that stops waiting for a call of a session leaves it
//! running until the answer or the deadline, so that workers stay in step with this side. Any other call ends
//! with its caller: a coroutine is cancelled, and the worker of a plain function is ended.
//!
//! Callers that wait for one start share its error, so that a start that fails does not take its time once
//! for each of them.

use crate::code::PythonCode;
use crate::error::{CallError, StartError};
use crate::images::{Common, ImageWorkers, TaskImages};
use crate::lock::lock;
use crate::plan::Plan;
use crate::runs::HostHelp;
use crate::runtime::{OwnRuntime, block_on};
use crate::session::{Session, StartTimes, gone};
use crate::worker::{RefusedCall, Worker};
use serde_json::{Value, json};
use sinew_env::SimulatedUser;
use sinew_sandbox::{SandboxProvider, SandboxSpec};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Workers that may end before they get a call, until the call fails.
const MAX_UNSENT: usize = 16;

/// Sizes and limits of a pool.
#[derive(Clone)]
pub struct WorkersConfig {
    /// Makes the sandboxes. They show the folders of [`PythonCode::shows`].
    pub provider: Arc<dyn SandboxProvider>,
    /// Limits of one worker. CPU seconds are not limited (calls have deadlines), and processes and open files
    /// are raised to what a worker itself needs.
    pub spec: SandboxSpec,
    /// Worker processes, 1 to 256.
    pub workers: usize,
    /// Sessions of one worker at once, 1 to 10,000.
    pub sessions_per_worker: usize,
    /// Deadline of one call, 0.01 s to 24 hours.
    pub timeout: Duration,
    /// Deadline of the start of a worker with its imports, and of waiting for a free session.
    pub startup_timeout: Duration,
    /// Images in which the sessions of tasks that name one run, in as many workers again.
    pub images: TaskImages,
    /// Simulated user that the code may ask.
    pub user: Option<Arc<dyn SimulatedUser>>,
}

sinew_types::debug_fields!(
    WorkersConfig as this,
    level = this.provider.level(),
    workers = this.workers,
    sessions_per_worker = this.sessions_per_worker,
    timeout = this.timeout
);

impl WorkersConfig {
    /// Defaults: a worker for each core, 256 sessions each, 30 s for a call, 60 s for a start.
    pub fn new(provider: Arc<dyn SandboxProvider>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            provider,
            spec: SandboxSpec::default(),
            workers: cores,
            sessions_per_worker: 256,
            timeout: Duration::from_secs(30),
            startup_timeout: Duration::from_secs(60),
            images: TaskImages::default(),
            user: None,
        }
    }

    /// Checks the numbers and deadlines.
    ///
    /// # Errors
    /// [`StartError::Config`] with the first key that is wrong.
    fn check(&self) -> Result<(), StartError> {
        let wrong = |field, value: String, allowed: &str| {
            Err(StartError::Config {
                field,
                value,
                allowed: allowed.into(),
            })
        };
        if !(1..=256).contains(&self.workers) {
            return wrong("workers", self.workers.to_string(), "1 to 256");
        }
        if !(1..=10_000).contains(&self.sessions_per_worker) {
            let value = self.sessions_per_worker.to_string();
            return wrong("sessions_per_worker", value, "1 to 10000");
        }
        for (field, duration) in [
            ("timeout_s", self.timeout),
            ("startup_timeout_s", self.startup_timeout),
        ] {
            let seconds = duration.as_secs_f64();
            if !(0.01..=86_400.0).contains(&seconds) {
                return wrong(field, seconds.to_string(), "0.01 to 86400 seconds");
            }
        }
        Ok(())
    }
}

/// Place of one worker of the pool.
#[derive(Default)]
struct Slot {
    /// The worker, once it was needed. A dead one is replaced by the next call.
    worker: tokio::sync::Mutex<Option<Arc<Worker>>>,
    /// End of the last start that failed, with its error.
    failed: Mutex<Option<(Instant, CallError)>>,
    /// Sessions and calls that use it now.
    users: AtomicUsize,
}

/// State that the handle, its sessions and its tasks share.
pub(crate) struct Inner {
    plan: Plan,
    /// One for each worker.
    slots: Vec<Slot>,
    /// Sessions at once; 1 if code of the model runs. Set when the first worker has described its code.
    sessions_per_worker: AtomicUsize,
    /// One permit for each session that may be open.
    sessions: Arc<Semaphore>,
    /// Ids are unique in the pool, not only in a worker, so that no session can reach one of a worker before
    /// it.
    next_session: AtomicU64,
    /// Bounds the starts.
    starts: StartTimes,
    /// Number of all starts.
    started: AtomicU64,
    /// True once the log says that code runs in the workers.
    code_is_known: AtomicBool,
    /// Runtime of the pool.
    handle: Handle,
}

/// A bounded pool of sandboxed Python processes with the user's code loaded. Clones share it; the last one
/// ends the processes. All methods may be called from any thread and any runtime.
#[derive(Clone)]
pub struct PythonWorkers {
    inner: Arc<Inner>,
    /// Handle of the pool's runtime.
    handle: Handle,
    /// Descriptions of the targets by the first worker, in the order of the targets.
    targets: Arc<Vec<Value>>,
    /// Workers in images, if tasks may name some.
    images: Option<Arc<ImageWorkers>>,
    /// Ends all tasks, and with them the processes, when the last clone is dropped.
    _runtime: Arc<OwnRuntime>,
}

sinew_types::debug_fields!(
    PythonWorkers as this,
    workers = this.inner.slots.len(),
    starts = this.starts()
);

impl PythonWorkers {
    /// Starts the first worker, which loads the code and describes it. The others start when they are needed.
    /// It blocks the thread until then.
    ///
    /// # Errors
    /// If the code does not load, or no worker starts in time.
    pub fn start(config: WorkersConfig, code: PythonCode) -> Result<Self, StartError> {
        config.check()?;
        let broken = |e: std::io::Error| StartError::Worker(e.to_string());
        let runtime = OwnRuntime::start().map_err(broken)?;
        let gone = || StartError::Worker("its runtime is gone".into());
        let handle = runtime.handle().ok_or_else(gone)?;
        let (spec, user) = (config.spec.clone(), config.user.clone());
        let help = Arc::new(HostHelp::new(code.clone(), spec, user));
        let inner = Arc::new(Inner {
            plan: Plan {
                help: Arc::clone(&help),
                provider: Arc::clone(&config.provider),
                spec: config.spec.clone(),
                code: code.clone(),
                timeout: config.timeout,
                startup_timeout: config.startup_timeout,
                shared: config.sessions_per_worker > 1,
            },
            slots: (0..config.workers).map(|_| Slot::default()).collect(),
            sessions_per_worker: AtomicUsize::new(config.sessions_per_worker),
            sessions: Arc::new(Semaphore::new(config.workers * config.sessions_per_worker)),
            next_session: AtomicU64::new(1),
            starts: StartTimes::new(config.workers),
            started: AtomicU64::new(0),
            code_is_known: AtomicBool::new(false),
            handle: handle.clone(),
        });
        let first = Arc::clone(&inner);
        let worker = block_on(&handle, async move { first.worker(0).await }).ok_or_else(gone)?;
        let worker = worker.map_err(|e| match e {
            CallError::Start(e) => e,
            other => StartError::Worker(other.to_string()),
        })?;
        if let Some(place) = code_of(&worker.targets) {
            inner.separate(place);
        }
        let images = in_images(&config, &code, inner.sessions_of_worker(), help)?;
        Ok(Self {
            inner,
            handle,
            targets: Arc::new(worker.targets.clone()),
            images,
            _runtime: Arc::new(runtime),
        })
    }

    /// Number of worker starts so far.
    pub fn starts(&self) -> u64 {
        self.inner.started.load(Ordering::Relaxed)
    }

    /// Maximum number of sessions at once. Each may need a separate worker if tasks name images.
    pub fn max_sessions(&self) -> usize {
        match &self.images {
            Some(_) => self.inner.slots.len(),
            None => self.inner.slots.len() * self.inner.sessions_of_worker(),
        }
    }

    /// Deadline of one call.
    pub fn timeout(&self) -> Duration {
        self.inner.plan.timeout
    }

    /// Hash of the user's source files.
    pub fn version(&self) -> &str {
        &self.inner.plan.code.version
    }

    /// Description of a target by the worker.
    pub(crate) fn describe(&self, target: usize) -> &Value {
        self.targets.get(target).unwrap_or(&Value::Null)
    }

    /// Calls any worker. `weight` is the share of a worker that the call takes
    /// ([`ALONE`](crate::worker::ALONE) is all of it). The call ends when the future is dropped.
    pub(crate) async fn call(
        &self,
        request: Value,
        weight: u32,
        timeout: Duration,
    ) -> Result<Value, CallError> {
        let inner = Arc::clone(&self.inner);
        let (waits, given_up) = oneshot::channel();
        let called = self
            .handle
            .spawn(async move { inner.call(request, weight, timeout, given_up).await });
        let called = called.await.unwrap_or_else(|_| Err(gone()));
        drop(waits);
        called
    }

    /// Same as [`PythonWorkers::call`], but blocks the thread.
    pub(crate) fn call_blocking(&self, request: Value, weight: u32) -> Result<Value, CallError> {
        let inner = Arc::clone(&self.inner);
        let called = block_on(&self.handle, async move {
            let timeout = inner.plan.timeout;
            let (_waits, given_up) = oneshot::channel();
            inner.call(request, weight, timeout, given_up).await
        });
        called.unwrap_or_else(|| Err(gone()))
    }

    /// Opens a session in the worker with the fewest, and begins the episode in it, or continues with a saved
    /// one. It waits for a free session, at most as long as a start may take.
    pub(crate) async fn open(
        &self,
        target: usize,
        task: Value,
        saved: Option<String>,
    ) -> Result<(Session, Value), CallError> {
        let (inner, handle) = (Arc::clone(&self.inner), self.handle.clone());
        let images = self.images.clone();
        let opened = self.handle.spawn(async move {
            let named = images.as_ref().map(|i| i.named(&task)).transpose()?;
            let session = match (&images, named.flatten()) {
                (Some(images), Some(image)) => {
                    ImageWorkers::session(images, &image, handle).await?
                }
                _ => Inner::session(inner, handle).await?,
            };
            let request = json!({"op": "open", "target": target, "task": task, "restore": saved});
            let answer = session.call(request).await?;
            Ok((session, answer))
        });
        opened.await.unwrap_or_else(|_| Err(gone()))
    }
}

/// The workers in images of a pool, if tasks may name some.
fn in_images(
    config: &WorkersConfig,
    code: &PythonCode,
    sessions_per_worker: usize,
    help: Arc<HostHelp>,
) -> Result<Option<Arc<ImageWorkers>>, StartError> {
    if config.images.images.is_empty() {
        return Ok(None);
    }
    let common = Common {
        code: code.clone(),
        spec: config.spec.clone(),
        workers: config.workers,
        sessions_per_worker,
        help,
        timeout: config.timeout,
        startup_timeout: config.startup_timeout,
    };
    let made = ImageWorkers::new(config.images.clone(), common)?;
    Ok(Some(Arc::new(made)))
}

/// The place where the class of environments runs code of the model, as `file:line: what`.
fn code_of(targets: &[Value]) -> Option<&str> {
    targets.iter().find_map(|target| target["code"].as_str())
}

impl Inner {
    fn sessions_of_worker(&self) -> usize {
        self.sessions_per_worker.load(Ordering::Relaxed)
    }

    /// Makes each later session use a separate worker.
    fn separate(&self, place: &str) {
        self.code_is_known.store(true, Ordering::Relaxed);
        let before = self.sessions_per_worker.swap(1, Ordering::Relaxed);
        self.sessions
            .forget_permits(self.slots.len() * (before - 1));
        if before > 1 {
            let workers = self.slots.len();
            tracing::info!(
                place,
                workers,
                "code of the model runs here: each episode has a worker of its own"
            );
        }
    }

    /// Starts the next worker of a slot in which code ran, before somebody waits for it.
    fn renew(self: &Arc<Self>, slot: usize, worker: &Worker) {
        if worker.is_spent() {
            worker.retire();
            if !self.code_is_known.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "a call started a program or ran a text as code, and its worker was replaced: each such call \
                     waits for a start. If no code of the model runs there, set `runs_code = False` on the \
                     function or class"
                );
            }
            let this = Arc::clone(self);
            // The next caller sees an error of the start.
            let started = async move { drop(this.worker(slot).await) };
            self.handle.spawn(started);
        }
    }

    /// The slot with the fewest users; among equals, one whose worker runs.
    fn least_used(&self) -> usize {
        let load = |slot: &Slot| {
            let running = slot.worker.try_lock();
            let alive = running.is_ok_and(|w| w.as_ref().is_some_and(|w| w.is_alive()));
            (slot.users.load(Ordering::Relaxed), !alive)
        };
        let slots = self.slots.iter().enumerate();
        slots.min_by_key(|(_, s)| load(s)).map_or(0, |(i, _)| i)
    }

    /// The worker of a slot, started if there is none that lives.
    async fn worker(&self, slot: usize) -> Result<Arc<Worker>, CallError> {
        let asked = Instant::now();
        let slot = &self.slots[slot];
        let mut place = slot.worker.lock().await;
        if let Some(worker) = place.as_ref().filter(|w| w.is_alive()) {
            return Ok(Arc::clone(worker));
        }
        if let Some((_, error)) = lock(&slot.failed).as_ref().filter(|(at, _)| *at > asked) {
            return Err(error.clone());
        }
        // The dead one leaves before the next one starts. One in which code ran ended as it should.
        let spent = place.take().is_some_and(|worker| worker.is_spent());
        match self.start(spent).await {
            Ok(worker) => {
                *place = Some(Arc::clone(&worker));
                Ok(worker)
            }
            Err(error) => {
                *lock(&slot.failed) = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Starts a worker, once one more start is allowed if it is not `planned`.
    async fn start(&self, planned: bool) -> Result<Arc<Worker>, CallError> {
        if !planned {
            self.starts.wait(self.plan.startup_timeout).await?;
        }
        let worker = Arc::new(Worker::start(&self.plan).await?);
        self.started.fetch_add(1, Ordering::Relaxed);
        Ok(worker)
    }

    /// Calls any worker. One that ends before it gets the call is replaced.
    async fn call(
        self: &Arc<Self>,
        request: Value,
        weight: u32,
        timeout: Duration,
        mut given_up: oneshot::Receiver<()>,
    ) -> Result<Value, CallError> {
        let mut left = MAX_UNSENT;
        loop {
            let slot = self.least_used();
            let _user = User::of(&self.slots[slot].users);
            let worker = self.worker(slot).await?;
            let called = tokio::select! {
                called = worker.call(request.clone(), weight, timeout) => called,
                _ = &mut given_up => return Err(gone()),
            };
            self.renew(slot, &worker);
            match called {
                // Each worker in which code ran has served a call, so that all who wait have their turn.
                Err(RefusedCall::Unsent(_)) if worker.is_spent() => {}
                Err(RefusedCall::Unsent(_)) if left > 0 => left -= 1,
                other => return other.map_err(RefusedCall::into_error),
            }
        }
    }

    async fn session(this: Arc<Self>, handle: Handle) -> Result<Session, CallError> {
        let free = Arc::clone(&this.sessions).acquire_owned();
        let permit = match tokio::time::timeout(this.plan.startup_timeout, free).await {
            Ok(Ok(permit)) => permit,
            _ => {
                let all = this.slots.len() * this.sessions_of_worker();
                return Err(CallError::Busy(format!(
                    "all {all} sessions are in use; raise workers or sessions_per_worker"
                )));
            }
        };
        let slot = this.least_used();
        this.slots[slot].users.fetch_add(1, Ordering::Relaxed);
        let mut seat = Seat {
            inner: Arc::clone(&this),
            slot,
            worker: None,
            _permit: permit,
        };
        let worker = this.worker(slot).await?;
        seat.worker = Some(Arc::clone(&worker));
        let id = this.next_session.fetch_add(1, Ordering::Relaxed);
        let timeout = this.plan.timeout;
        Ok(Session::new(id, worker, handle, timeout, Box::new(seat)))
    }
}

/// Counts a user of a slot as long as it lives.
struct User<'a>(&'a AtomicUsize);

impl<'a> User<'a> {
    fn of(users: &'a AtomicUsize) -> Self {
        users.fetch_add(1, Ordering::Relaxed);
        Self(users)
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Place of a session in the pool.
struct Seat {
    inner: Arc<Inner>,
    slot: usize,
    worker: Option<Arc<Worker>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let users = &self.inner.slots[self.slot].users;
        users.fetch_sub(1, Ordering::Relaxed);
        if let Some(worker) = &self.worker {
            self.inner.renew(self.slot, worker);
        }
    }
}
