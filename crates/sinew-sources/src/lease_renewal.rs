//! Rows of a queue that a run keeps from their lease to the commit of the update that trains them.
//!
//! A thread renews the leases while the step is made, so that a run that dies gives its rows back after one
//! lease, however long an update takes. Rows whose lease ended all the same are leased again if nothing else
//! has taken them: the episode that is stored and the row of the queue are then still the run's.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, LeaseId, Queue, QueueError, RowRequest, RowSelection, RowState,
};

/// A lease with the keys of its rows.
pub(crate) type Lease = (u64, Vec<String>);

/// Shortest time between two renewals.
const OFTEN: Duration = Duration::from_millis(50);

/// Milliseconds since 1970; a queue of another process uses its own clock.
pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as u64)
}

/// Leases of a run; a thread renews them.
#[derive(Debug)]
pub(crate) struct LeaseRenewal {
    queue: Arc<dyn Queue>,
    consumer: String,
    holder: String,
    /// Locked while leases are renewed, so that what is taken out of it is renewed no more.
    held: Arc<Mutex<Vec<Lease>>>,
    /// The thread ends when it is dropped.
    _stop: SyncSender<()>,
}

/// Result of a check of leases: those still held, and the rows lost.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct LeaseCheck {
    pub(crate) leases: Vec<Lease>,
    /// Rows that went to another trainer, or out of the queue.
    pub(crate) lost: Vec<String>,
}

fn lock(held: &Mutex<Vec<Lease>>) -> MutexGuard<'_, Vec<Lease>> {
    // A panic of the thread leaves a list that is whole.
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LeaseRenewal {
    /// Starts with no leases; those added later are renewed for `lease` at a time.
    ///
    /// # Errors
    /// If the machine has no thread left.
    pub(crate) fn new(
        queue: Arc<dyn Queue>,
        consumer: String,
        holder: String,
        lease: Duration,
    ) -> std::io::Result<Self> {
        let held = Arc::new(Mutex::new(Vec::new()));
        let (stop, stopped) = sync_channel(0);
        let (watched, name) = (Arc::clone(&held), consumer.clone());
        // It must not keep the queue open when the run has ended.
        let weak = Arc::downgrade(&queue);
        let every = (lease / 3).max(OFTEN);
        let renew = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(every) {
                let held = lock(&watched);
                let Some(queue) = weak.upgrade() else { return };
                for (id, keys) in held.iter() {
                    let ttl = lease.as_millis() as u64;
                    // Rows lost here show up before the commit.
                    if let Err(error) = queue.renew(&name, LeaseId(*id), keys, ttl, now_ms()) {
                        tracing::warn!(%error, "a lease of the queue was not renewed");
                    }
                }
            }
        };
        std::thread::Builder::new()
            .name("queue-renew".into())
            .spawn(renew)?;
        Ok(Self {
            queue,
            consumer,
            holder,
            held,
            _stop: stop,
        })
    }

    /// Renews one more lease from now on.
    pub(crate) fn add(&self, lease: LeaseId, keys: &[String]) {
        lock(&self.held).push((lease.0, keys.to_vec()));
    }

    /// Renews these from now on, and no others.
    pub(crate) fn set(&self, leases: Vec<Lease>) {
        *lock(&self.held) = leases;
    }

    /// Extends leases to `ttl` from now. Rows that they no longer hold are leased again, if they are ready.
    ///
    /// # Errors
    /// If the queue cannot be reached.
    pub(crate) fn keep(&self, leases: &[Lease], ttl: Duration) -> Result<LeaseCheck, StoreError> {
        let ttl_ms = ttl.as_millis() as u64;
        let mut kept = LeaseCheck::default();
        for (id, keys) in leases {
            let (lease, mut own, mut open) = (LeaseId(*id), keys.clone(), Vec::new());
            let renewed = self
                .queue
                .renew(&self.consumer, lease, keys, ttl_ms, now_ms())?;
            for key in renewed.lost {
                match self.queue.state(&self.consumer, &key)? {
                    Some(RowState::Acked) if self.is_own(lease, &key)? => continue,
                    Some(RowState::Ready) => open.push(key.clone()),
                    _ => kept.lost.push(key.clone()),
                }
                own.retain(|k| *k != key);
            }
            if !own.is_empty() {
                kept.leases.push((*id, own));
            }
            match self.again(&open, ttl_ms)? {
                Some(lease) => kept.leases.push((lease.0, open)),
                None => kept.lost.extend(open),
            }
        }
        Ok(kept)
    }

    /// Whether a row that was acked was acked by this lease: an earlier session committed it, and its store
    /// has lost the commit.
    fn is_own(&self, lease: LeaseId, key: &str) -> Result<bool, StoreError> {
        let again = self
            .queue
            .ack(&self.consumer, lease, &[AckedRow::of(key)])?;
        Ok(again.lost.is_empty())
    }

    /// A lease on rows by their keys; `None` if there are none, or one of them was taken meanwhile.
    fn again(&self, keys: &[String], ttl_ms: u64) -> Result<Option<LeaseId>, StoreError> {
        if keys.is_empty() {
            return Ok(None);
        }
        let ask = RowRequest {
            consumer: self.consumer.clone(),
            holder: self.holder.clone(),
            ttl_ms,
            take: RowSelection::Keys(keys.to_vec()),
        };
        match self.queue.lease(&ask, now_ms()) {
            Ok(loan) => Ok(loan.lease),
            Err(StoreError::Queue(QueueError::NotReady { .. } | QueueError::UnknownRow { .. })) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
