//! Measures the wait for sandboxes: until one is free, and until it is made.

use crate::port::{Protection, Sandbox, SandboxFuture, SandboxProvider, SandboxSpec, Snapshot};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Sum of the times that callers have waited for sandboxes. It is only for users: nothing decides by it.
#[derive(Debug, Default)]
pub struct SandboxWait(AtomicU64);

impl SandboxWait {
    /// Seconds so far.
    pub fn seconds(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 / 1e6
    }

    /// Counts a call, also one that is given up: that is how a wait past a deadline ends.
    async fn of<T>(&self, call: SandboxFuture<'_, T>) -> Result<T, crate::SandboxError> {
        let _counted = Counted(self, Instant::now());
        call.await
    }
}

/// Adds the time since its instant when it is dropped.
struct Counted<'a>(&'a SandboxWait, Instant);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let us = self.1.elapsed().as_micros() as u64;
        self.0.0.fetch_add(us, Ordering::Relaxed);
    }
}

/// A provider whose callers' waits are counted.
pub struct TimedProvider {
    inner: Arc<dyn SandboxProvider>,
    wait: Arc<SandboxWait>,
}

impl std::fmt::Debug for TimedProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TimedProvider")
            .field("level", &self.inner.level())
            .field("wait", &self.wait)
            .finish()
    }
}

impl TimedProvider {
    /// Wraps a provider, and adds waiting times to `wait`.
    pub fn new(inner: Arc<dyn SandboxProvider>, wait: Arc<SandboxWait>) -> Self {
        Self { inner, wait }
    }
}

impl SandboxProvider for TimedProvider {
    fn level(&self) -> &'static str {
        self.inner.level()
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.wait.of(self.inner.acquire(spec)))
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        self.inner.protections()
    }

    fn degradations(&self) -> Vec<String> {
        self.inner.degradations()
    }

    fn health(&self) -> Result<(), crate::SandboxError> {
        self.inner.health()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.wait.of(self.inner.fork(spec, snapshot)))
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        self.inner.export_file(snapshot, max_bytes)
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        self.inner.import_file(archive, max_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NullProvider;
    use std::time::Duration;

    /// Has a sandbox after a while.
    struct Slow(NullProvider, Duration);

    impl SandboxProvider for Slow {
        fn level(&self) -> &'static str {
            self.0.level()
        }

        fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
            Box::pin(async {
                tokio::time::sleep(self.1).await;
                self.0.acquire(spec).await
            })
        }

        fn protections(&self) -> Arc<Vec<Protection>> {
            self.0.protections()
        }
    }

    #[tokio::test]
    async fn waits_of_all_callers_are_added_up() {
        let slow = Arc::new(Slow(NullProvider::default(), Duration::from_millis(20)));
        let wait = Arc::<SandboxWait>::default();
        let timed = TimedProvider::new(slow, Arc::clone(&wait));
        assert_eq!((wait.seconds(), timed.level()), (0.0, "null"));
        let spec = SandboxSpec::default();
        let both = futures::future::join(timed.acquire(&spec), timed.acquire(&spec)).await;
        assert!(both.0.is_ok() && both.1.is_ok());
        let seen = wait.seconds();
        assert!(seen >= 0.04, "{seen}");
        let never = Arc::new(Slow(NullProvider::default(), Duration::from_secs(3600)));
        let timed = TimedProvider::new(never, Arc::clone(&wait));
        let short = Duration::from_millis(5);
        let given_up = tokio::time::timeout(short, timed.acquire(&spec)).await;
        assert!(given_up.is_err());
        assert!(wait.seconds() >= seen + 0.005, "{seen}, {}", wait.seconds());
    }
}
