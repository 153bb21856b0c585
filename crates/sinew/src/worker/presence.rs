//! The registration of a worker at the owner of its run.

use super::{Stop, WorkerArgs};
use sinew_assembly::Failure;
use sinew_control::{ControlError, Heartbeat, Registration, RoleClient};
use sinew_workers::{Presence, PresenceOrder, WorkerStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of looks whether weights changed or the role is asked to end.
const LOOK: Duration = Duration::from_millis(200);

/// A role that is registered.
pub(crate) struct RolePresence(RoleClient);

impl RolePresence {
    /// Registers. `capacity` is the work that the role does at a time; `address` is where others reach it.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub(crate) fn register(
        args: &WorkerArgs,
        capacity: usize,
        address: Option<String>,
    ) -> Result<Self, Failure> {
        let registration = Registration {
            kind: args.role,
            name: args.name.clone(),
            host: sinew_assembly::host_name().unwrap_or_default(),
            address,
            build: env!("CARGO_PKG_VERSION").into(),
            capacity: u32::try_from(capacity).unwrap_or(u32::MAX).max(1),
            preemptible: args.preemptible,
        };
        let client = RoleClient::register(&args.owner, &args.token()?, &registration);
        client.map(Self).map_err(crate::owner_args::failed)
    }

    /// Name that the owner knows.
    pub(crate) fn id(&self) -> String {
        self.0.lease().id.to_string()
    }
}

impl Presence for RolePresence {
    fn every(&self) -> Duration {
        Duration::from_millis(self.0.lease().renew_ms.max(1))
    }

    fn beat(&mut self, status: &WorkerStatus) -> PresenceOrder {
        let heartbeat = Heartbeat {
            version: status.version,
            checksum: status.checksum.clone(),
            busy: status.busy,
            queued: status.queued,
            idle_s: status.idle_s,
            cause: status.cause.clone(),
        };
        let error = match self.0.beat(&heartbeat) {
            Ok(orders) if orders.drain => return PresenceOrder::Drain,
            Ok(_) => return PresenceOrder::Work,
            Err(ControlError::Superseded(_)) => return PresenceOrder::Drain,
            Err(ControlError::Gone(_)) => self.0.again().err(),
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            tracing::warn!(%error, "the registration was not renewed");
        }
        PresenceOrder::Work
    }

    fn drain(&mut self) {
        if let Err(error) = self.0.drain() {
            tracing::debug!(%error, "the owner did not hear that this role takes no more work");
        }
    }

    fn leave(&mut self) {
        if let Err(error) = self.0.leave() {
            tracing::debug!(%error, "the owner did not hear that this role left");
        }
    }
}

/// A thread that renews a registration until it is dropped.
pub(crate) struct Beats {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    /// Starts the thread. It reports new weights at once, and that the role is asked to end. Also returns
    /// whether that is so: by `stop`, or by the owner.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn start(
        mut presence: RolePresence,
        status: impl Fn() -> WorkerStatus + Send + 'static,
        stop: Stop,
    ) -> Result<(Self, Stop), Failure> {
        let (sender, receiver) = sync_channel::<()>(0);
        let drained = Arc::new(AtomicBool::new(false));
        let set = Arc::clone(&drained);
        let (stops, mut told) = (Arc::clone(&stop), false);
        let work = move || {
            loop {
                let sent = status();
                if presence.beat(&sent) == PresenceOrder::Drain {
                    set.store(true, Ordering::Relaxed);
                }
                let beaten = Instant::now();
                let ended = loop {
                    let waited = receiver.recv_timeout(LOOK.min(presence.every()));
                    if waited != Err(RecvTimeoutError::Timeout) {
                        break true;
                    }
                    if !told && stops() {
                        told = true;
                        presence.drain();
                    }
                    let now = status();
                    let other = (now.version, &now.checksum) != (sent.version, &sent.checksum);
                    if other || beaten.elapsed() >= presence.every() {
                        break false;
                    }
                };
                if ended {
                    break;
                }
            }
            presence.leave();
        };
        let thread = std::thread::Builder::new().name("role".into()).spawn(work);
        let beats = Self {
            stop: Some(sender),
            thread: Some(thread.map_err(Failure::system)?),
        };
        let ends: Stop = Arc::new(move || stop() || drained.load(Ordering::Relaxed));
        Ok((beats, ends))
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        // The thread waits on the channel.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
