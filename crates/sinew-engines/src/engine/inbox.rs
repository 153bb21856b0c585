//! The state that callers and the engine's thread share: requests and controls in, status and
//! counters out.
//!
//! One mutex guards it and is never held across a call of a sink or of a server. Callers only
//! append; the thread takes everything in one go and publishes its status afterwards.

use crate::backend::{NamedAdapter, Weights};
use crate::config::RemoteConfig;
use crate::route::{Counters, EngineView};
use sinew_types::{
    AdapterName, EngineError, EngineStatus, EventSink, GenerateRequest, RequestId, WeightsId,
};
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Channel for the answer to a control; its capacity of 1 lets the thread answer without waiting.
pub(super) type Reply = SyncSender<Result<(), EngineError>>;

/// A command whose caller blocks until it is carried out. One runs at a time, in order of arrival.
pub(super) enum Control {
    Pause {
        paused: bool,
        reply: Reply,
    },
    Load {
        weights: Weights,
        reply: Reply,
    },
    LoadAdapter {
        name: AdapterName,
        adapter: NamedAdapter,
        reply: Reply,
    },
    DropAdapter {
        name: AdapterName,
        reply: Reply,
    },
    Sleep {
        asleep: bool,
        reply: Reply,
    },
}

impl Control {
    pub(super) fn reply(self) -> Reply {
        match self {
            Self::Pause { reply, .. }
            | Self::Load { reply, .. }
            | Self::LoadAdapter { reply, .. }
            | Self::DropAdapter { reply, .. }
            | Self::Sleep { reply, .. } => reply,
        }
    }
}

/// Limits of the model, as the servers report them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ModelLimits {
    /// The smallest context and vocabulary of all engines that report them.
    pub(super) context: Option<usize>,
    /// Number of token ids; ids at or above it are refused before a server is asked.
    pub(super) vocab: Option<usize>,
}

/// Bounded: `submitted` by the limit on waiting requests, `aborted` by `live`, `controls` by
/// the callers that block on them.
#[derive(Default)]
pub(super) struct Inbox {
    pub(super) submitted: VecDeque<(GenerateRequest, EventSink)>,
    pub(super) aborted: BTreeSet<RequestId>,
    pub(super) controls: VecDeque<Control>,
    /// The owner has dropped the engine: the thread ends and fails all requests.
    pub(super) dropped: bool,
    /// Reason why the thread has ended.
    pub(super) stopped: Option<String>,
    /// Requests that have not ended.
    pub(super) live: HashSet<RequestId>,
    pub(super) status: EngineStatus,
    pub(super) counters: Counters,
    /// State of each engine at the last publication, for users.
    pub(super) engines: Vec<EngineView>,
    pub(super) limits: ModelLimits,
    /// Adapters that servers have, or are asked for.
    pub(super) in_use: BTreeSet<WeightsId>,
    /// Adapters that requests can name.
    pub(super) adapters: BTreeSet<AdapterName>,
}

/// The inbox with its two signals.
pub(super) struct Shared {
    inbox: Mutex<Inbox>,
    /// Signals the thread that the inbox has something for it.
    pub(super) wake: Notify,
    /// Signals callers that the thread has published.
    published: Condvar,
    /// Maximum requests that wait here and in the router together.
    max_waiting: usize,
}

sinew_types::debug_fields!(Shared, max_waiting);

impl Shared {
    pub(super) fn new(config: &RemoteConfig) -> Self {
        let status = EngineStatus {
            version: config.version,
            ..EngineStatus::default()
        };
        Self {
            inbox: Mutex::new(Inbox {
                status,
                ..Inbox::default()
            }),
            wake: Notify::new(),
            published: Condvar::new(),
            max_waiting: config.router.max_waiting,
        }
    }

    /// Locks the inbox. No invariant spans a panic while the lock is held, so a poisoned lock is
    /// usable.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request.
    ///
    /// # Errors
    /// If the thread has ended, the queue is full, the adapter is not loaded, or the id is in use. The sink
    /// is dropped without a call then.
    pub(super) fn submit(
        &self,
        request: GenerateRequest,
        sink: EventSink,
    ) -> Result<(), EngineError> {
        let mut inbox = self.lock();
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
            return Err(EngineError::UnknownAdapter { name: name.clone() });
        }
        if !inbox.live.insert(request.id) {
            let why = format!("request id {} is in use", request.id.0);
            return Err(EngineError::Failed(why));
        }
        inbox.submitted.push_back((request, sink));
        drop(inbox);
        self.wake.notify_one();
        Ok(())
    }

    /// Asks for the end of a request; an unknown id is ignored, since its last event may be on its
    /// way.
    pub(super) fn abort(&self, request: RequestId) {
        let mut inbox = self.lock();
        if inbox.live.contains(&request) {
            inbox.aborted.insert(request);
            drop(inbox);
            self.wake.notify_one();
        }
    }

    /// Queues a control; its reply comes when it is carried out.
    pub(super) fn control(&self, control: Control) -> Result<(), EngineError> {
        let mut inbox = self.lock();
        if let Some(why) = &inbox.stopped {
            return Err(EngineError::Stopped(why.clone()));
        }
        inbox.controls.push_back(control);
        drop(inbox);
        self.wake.notify_one();
        Ok(())
    }

    pub(super) fn drop_engine(&self) {
        self.lock().dropped = true;
        self.wake.notify_one();
    }

    /// Publishes with `change` and wakes the waiters.
    pub(super) fn publish(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.lock());
        self.published.notify_all();
    }

    /// Waits until `done` holds; `false` if it does not within `limit`.
    pub(super) fn wait_until(&self, limit: Duration, done: impl Fn(&Inbox) -> bool) -> bool {
        let end = Instant::now() + limit;
        let mut inbox = self.lock();
        while !done(&inbox) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.published.wait_timeout(inbox, left);
            inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
