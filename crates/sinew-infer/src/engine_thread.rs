//! The thread around a [`Core`]: a bounded inbox, sinks, weights and adapters between two passes.
//!
//! Each request gets its last event and each caller its answer in every case: a panic turns into
//! [`EngineError::Stopped`] for all.

use crate::constraint::Constraint;
use crate::core::Core;
use crate::params::{self, RequestLimits};
use crate::scheduler;
use sinew_grammar::Grammars;
use sinew_types::{
    Adapter, AdapterName, Clock, Engine, EngineError, EngineEvent, EngineStatus, EventSink,
    GenerateRequest, PolicyVersion, RequestId, TensorSource,
};
use std::any::Any;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};

/// A change between two passes.
enum Change {
    Weights {
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    },
    Adapter {
        name: AdapterName,
        version: PolicyVersion,
        adapter: Adapter,
    },
    DropAdapter {
        name: AdapterName,
    },
}

/// A change whose caller blocks until it is made.
struct Load {
    change: Change,
    reply: SyncSender<Result<(), EngineError>>,
}

/// A request, the constraint of its format, and where its events go.
type EngineRequest = (GenerateRequest, Option<Constraint>, EventSink);

/// State that callers and the thread share. Bounded: `submitted` by the limit on waiting requests,
/// `aborted` by `live`, `loads` by the callers that block on them.
#[derive(Default)]
struct Inbox {
    submitted: VecDeque<EngineRequest>,
    aborted: BTreeSet<RequestId>,
    loads: VecDeque<Load>,
    paused: bool,
    /// The owner has dropped the engine: the thread ends.
    dropped: bool,
    /// Reason why the thread has ended.
    stopped: Option<String>,
    /// Requests that have not ended.
    live: HashSet<RequestId>,
    /// Adapters that are loaded; bounded by the core.
    adapters: HashSet<AdapterName>,
    status: EngineStatus,
}

impl Inbox {
    fn is_empty(&self) -> bool {
        self.submitted.is_empty() && self.aborted.is_empty() && self.loads.is_empty()
    }
}

/// The inbox and its signal, for callers and the thread.
struct Shared {
    inbox: Mutex<Inbox>,
    /// Signals the thread that the inbox has something for it.
    wake: Condvar,
}

impl Shared {
    /// Locks the inbox. No invariant spans a panic while the lock is held, so a poisoned lock is
    /// usable.
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Generates with a forward pass on a separate thread.
///
/// Thread-safe. Event sinks are called on that thread; they may submit and abort, but not load or drop
/// weights and adapters. A slow sink delays the next pass of all requests. Dropping the engine ends the
/// thread after the current pass; requests that have not ended then fail with [`EngineError::Stopped`].
pub struct EmbeddedEngine {
    shared: Arc<Shared>,
    /// Limits that requests are checked against on the caller's thread.
    limits: RequestLimits,
    grammars: Option<Arc<dyn Grammars>>,
    /// Maximum requests in the inbox and in the core that wait.
    max_waiting: usize,
    thread: Option<JoinHandle<()>>,
    /// Identity of the thread, to refuse calls of sinks that would wait for it.
    thread_id: ThreadId,
}

sinew_types::debug_fields!(EmbeddedEngine, limits, max_waiting);

impl EmbeddedEngine {
    /// Starts the thread.
    pub(crate) fn start(
        core: impl Core + 'static,
        grammars: Option<Arc<dyn Grammars>>,
        max_waiting: usize,
        clock: Clock,
    ) -> Result<Self, EngineError> {
        let limits = core.limits();
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Inbox {
                status: core.status(),
                ..Inbox::default()
            }),
            wake: Condvar::new(),
        });
        let worker = Worker {
            shared: Arc::clone(&shared),
            core: Box::new(core),
            sinks: HashMap::new(),
            events: Vec::new(),
            clock,
            busy_s: 0.0,
        };
        let thread = thread::Builder::new()
            .name("sinew-engine".to_owned())
            .spawn(move || worker.run())
            .map_err(|e| EngineError::Stopped(format!("its thread did not start: {e}")))?;
        Ok(Self {
            shared,
            limits,
            grammars,
            max_waiting,
            thread_id: thread.thread().id(),
            thread: Some(thread),
        })
    }

    /// Has the thread make a change between two passes, and waits for it.
    fn change(&self, change: Change) -> Result<(), EngineError> {
        if thread::current().id() == self.thread_id {
            let why = "an event sink may not load or drop weights or adapters: it runs on the thread that would";
            return Err(EngineError::Weights(why.to_owned()));
        }
        let (reply, answer) = sync_channel(1);
        let mut inbox = self.shared.lock();
        if let Some(why) = &inbox.stopped {
            return Err(EngineError::Stopped(why.clone()));
        }
        inbox.loads.push_back(Load { change, reply });
        drop(inbox);
        self.shared.wake.notify_all();
        let ended = || EngineError::Stopped("it ended while weights were loaded".to_owned());
        answer.recv().unwrap_or_else(|_| Err(ended()))
    }
}

impl Engine for EmbeddedEngine {
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError> {
        params::check_request(&request, &self.limits)?;
        // The format is compiled on the caller's thread: a slow one holds no other request up.
        let constraint = Constraint::start(self.grammars.as_deref(), &request, self.limits.vocab)?;
        let mut inbox = self.shared.lock();
        if let Some(why) = &inbox.stopped {
            return Err(EngineError::Stopped(why.clone()));
        }
        let waiting = inbox.submitted.len() + inbox.status.waiting;
        if waiting >= self.max_waiting {
            let limit = self.max_waiting;
            return Err(EngineError::QueueFull { waiting, limit });
        }
        if let Some(name) = &request.adapter
            && !inbox.adapters.contains(name)
        {
            return Err(scheduler::unknown(name));
        }
        if !inbox.live.insert(request.id) {
            return Err(scheduler::duplicate(request.id));
        }
        inbox.submitted.push_back((request, constraint, sink));
        drop(inbox);
        self.shared.wake.notify_all();
        Ok(())
    }

    fn holds_formats(&self) -> bool {
        self.grammars.is_some()
    }

    fn abort(&self, request: RequestId) {
        let mut inbox = self.shared.lock();
        if inbox.live.contains(&request) {
            inbox.aborted.insert(request);
            drop(inbox);
            self.shared.wake.notify_all();
        }
    }

    fn pause(&self, paused: bool) {
        self.shared.lock().paused = paused;
        self.shared.wake.notify_all();
    }

    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError> {
        self.change(Change::Weights { version, weights })
    }

    fn load_adapter(
        &self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: Adapter,
    ) -> Result<(), EngineError> {
        let name = name.clone();
        self.change(Change::Adapter {
            name,
            version,
            adapter,
        })
    }

    fn unload_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        let name = name.clone();
        self.change(Change::DropAdapter { name })
    }

    fn status(&self) -> EngineStatus {
        let inbox = self.shared.lock();
        let mut status = inbox.status.clone();
        status.waiting += inbox.submitted.len();
        status
    }
}

impl Drop for EmbeddedEngine {
    fn drop(&mut self) {
        self.shared.lock().dropped = true;
        self.shared.wake.notify_all();
        // A sink may hold the last handle: the thread cannot join itself, and ends by itself.
        if let Some(thread) = self.thread.take()
            && thread::current().id() != self.thread_id
        {
            // Its panics were reported to every request.
            let _ = thread.join();
        }
    }
}

/// State that only the thread uses.
struct Worker {
    shared: Arc<Shared>,
    core: Box<dyn Core>,
    sinks: HashMap<RequestId, EventSink>,
    /// Events of the last pass, kept to reuse their memory.
    events: Vec<EngineEvent>,
    clock: Clock,
    /// Seconds spent in passes since the start.
    busy_s: f64,
}

impl Worker {
    /// The thread: serves until the engine is dropped or panics, then ends all requests.
    fn run(mut self) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let why = match served {
            Ok(()) => "it was dropped".to_owned(),
            Err(payload) => format!("it panicked: {}", panic_text(&*payload)),
        };
        let mut inbox = self.shared.lock();
        inbox.stopped = Some(why.clone());
        inbox.live.clear();
        inbox.aborted.clear();
        inbox.status.running = 0;
        inbox.status.waiting = 0;
        let submitted = std::mem::take(&mut inbox.submitted);
        let loads = std::mem::take(&mut inbox.loads);
        drop(inbox);
        for load in loads {
            // A caller that has gone needs no answer.
            let _ = load.reply.send(Err(EngineError::Stopped(why.clone())));
        }
        let waiting = submitted.into_iter().map(|(r, _, sink)| (r.id, sink));
        for (request, mut sink) in self.sinks.drain().chain(waiting) {
            let error = EngineError::Stopped(why.clone());
            deliver(&mut sink, EngineEvent::Failed { request, error });
        }
    }

    /// Runs passes until the engine is dropped. Weights are loaded between two passes.
    fn serve(&mut self) {
        while let Some(paused) = self.receive() {
            if !paused && self.core.has_work() {
                let start = (self.clock)();
                self.core.step(&mut self.events);
                self.busy_s += (self.clock)() - start;
            }
            self.publish();
        }
    }

    /// Waits for something to do, and does all of it but the next pass. Returns whether
    /// passes are paused; `None` when the engine was dropped.
    fn receive(&mut self) -> Option<bool> {
        let shared = Arc::clone(&self.shared);
        let mut inbox = shared.lock();
        while !inbox.dropped && inbox.is_empty() && (inbox.paused || !self.core.has_work()) {
            let woken = shared.wake.wait(inbox);
            inbox = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if inbox.dropped {
            return None;
        }
        let paused = inbox.paused;
        let submitted = std::mem::take(&mut inbox.submitted);
        let aborted = std::mem::take(&mut inbox.aborted);
        let loads = std::mem::take(&mut inbox.loads);
        // These requests have left the inbox and still wait: counted here until the next publication.
        inbox.status.waiting += submitted.len();
        drop(inbox);
        // All sinks first: should the core panic, each gets its last event.
        let mut requests = Vec::with_capacity(submitted.len());
        for (request, constraint, sink) in submitted {
            self.sinks.insert(request.id, sink);
            requests.push((request, constraint));
        }
        for (request, constraint) in requests {
            let id = request.id;
            if let Err(error) = self.core.submit(request, constraint) {
                self.events.push(EngineEvent::Failed { request: id, error });
            }
        }
        for id in aborted {
            self.core.abort(id, &mut self.events);
        }
        for load in loads {
            let loaded = self.make(load.change);
            // A caller that has gone needs no answer.
            let _ = load.reply.send(loaded);
        }
        Some(paused)
    }

    /// Makes a change, and shows it to callers before it is answered.
    fn make(&mut self, change: Change) -> Result<(), EngineError> {
        match change {
            Change::Weights { version, weights } => {
                let loaded = self.core.load_weights(version, &*weights);
                self.shared.lock().status.version = self.core.status().version;
                loaded
            }
            Change::Adapter {
                name,
                version,
                adapter,
            } => {
                self.core.load_adapter(&name, version, &adapter)?;
                self.shared.lock().adapters.insert(name);
                Ok(())
            }
            Change::DropAdapter { name } => {
                // No later request passes the check; the core fails those that have.
                self.shared.lock().adapters.remove(&name);
                self.core.unload_adapter(&name, &mut self.events);
                Ok(())
            }
        }
    }

    /// Updates the status, then hands out the events.
    fn publish(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        let mut inbox = self.shared.lock();
        inbox.status = self.core.status();
        inbox.status.busy_s = self.busy_s;
        for event in &events {
            if let Some(id) = last_of(event) {
                inbox.live.remove(&id);
                inbox.aborted.remove(&id);
            }
        }
        drop(inbox);
        for event in events.drain(..) {
            self.hand_out(event);
        }
        // Events from aborting requests of broken sinks have no receiver.
        self.events.clear();
        self.events = events;
    }

    /// Calls the sink of an event. A sink that panics ends its own request.
    fn hand_out(&mut self, event: EngineEvent) {
        let id = request_of(&event);
        let last = last_of(&event).is_some();
        let Some(sink) = self.sinks.get_mut(&id) else {
            return; // its sink has panicked
        };
        let intact = deliver(sink, event);
        if last || !intact {
            self.sinks.remove(&id);
        }
        if !intact && !last {
            self.core.abort(id, &mut self.events);
            self.shared.lock().live.remove(&id);
        }
    }
}

/// Calls a sink; whether it returned. One that panics loses its own events and those of no other
/// request.
pub(crate) fn deliver(sink: &mut EventSink, event: EngineEvent) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink(event))).is_ok()
}

/// The request that an event belongs to.
pub(crate) fn request_of(event: &EngineEvent) -> RequestId {
    match event {
        EngineEvent::Prompt { request, .. }
        | EngineEvent::Tokens { request, .. }
        | EngineEvent::Finished { request, .. }
        | EngineEvent::Failed { request, .. } => *request,
    }
}

/// The request that `event` is the last one of.
pub(crate) fn last_of(event: &EngineEvent) -> Option<RequestId> {
    match event {
        EngineEvent::Prompt { .. } | EngineEvent::Tokens { .. } => None,
        EngineEvent::Finished { request, .. } | EngineEvent::Failed { request, .. } => {
            Some(*request)
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
