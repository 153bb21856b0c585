//! Hands out sandboxes, at most so many at once.

use crate::error::SandboxError;
use crate::port::{
    BoxFuture, ExecRequest, ExecResult, Protections, Sandbox, SandboxProvider, SandboxSpec,
    SandboxStats,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bounds of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolConfig {
    /// Sandboxes alive at once; further callers wait.
    pub max_live: usize,
    /// Sandboxes being started at once, so that a burst does not stall those that run.
    pub max_starting: usize,
    /// Longest wait for a place.
    pub patience: Duration,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            max_live: 256,
            max_starting: 4,
            patience: Duration::from_secs(300),
        }
    }
}

/// Sandboxes of one provider, bounded in number. Each is made for its caller and destroyed
/// after use: a used one is never handed out again.
#[derive(Clone, Debug)]
pub struct Pool {
    provider: Arc<dyn SandboxProvider>,
    live: Arc<Semaphore>,
    starting: Arc<Semaphore>,
    config: PoolConfig,
}

impl Pool {
    /// A pool that starts sandboxes with `provider`.
    pub fn new(provider: Arc<dyn SandboxProvider>, config: PoolConfig) -> Self {
        Self {
            provider,
            live: Arc::new(Semaphore::new(config.max_live)),
            starting: Arc::new(Semaphore::new(config.max_starting)),
            config,
        }
    }

    /// A new sandbox; waits while `max_live` are in use.
    pub async fn acquire(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let begun = Instant::now();
        let refused = |_| SandboxError::PoolTimeout {
            waited_s: begun.elapsed().as_secs_f64(),
            live: self.live(),
            max_live: self.config.max_live,
            starting: self.config.max_starting - self.starting.available_permits(),
        };
        let places = async {
            let live = Arc::clone(&self.live).acquire_owned().await;
            (live, Arc::clone(&self.starting).acquire_owned().await)
        };
        let places = tokio::time::timeout(self.config.patience, places).await;
        let (Ok(live), Ok(_starting)) = places.map_err(refused)? else {
            return Err(SandboxError::died("the pool is closed"));
        };
        let inner = self.provider.create(spec).await?;
        Ok(Box::new(Pooled { inner, _live: live }))
    }

    /// Sandboxes in use now.
    pub fn live(&self) -> usize {
        self.config.max_live - self.live.available_permits()
    }
}

/// A sandbox that gives its place back when it is gone.
#[derive(Debug)]
struct Pooled {
    inner: Box<dyn Sandbox>,
    _live: OwnedSemaphorePermit,
}

impl Sandbox for Pooled {
    fn exec(&mut self, request: ExecRequest) -> BoxFuture<'_, Result<ExecResult, SandboxError>> {
        self.inner.exec(request)
    }

    fn write_file<'a>(
        &'a mut self,
        path: &'a str,
        bytes: &'a [u8],
    ) -> BoxFuture<'a, Result<(), SandboxError>> {
        self.inner.write_file(path, bytes)
    }

    fn read_file<'a>(
        &'a mut self,
        path: &'a str,
        max_bytes: u64,
    ) -> BoxFuture<'a, Result<Vec<u8>, SandboxError>> {
        self.inner.read_file(path, max_bytes)
    }

    fn reset(&mut self) -> BoxFuture<'_, Result<(), SandboxError>> {
        self.inner.reset()
    }

    fn destroy(self: Box<Self>) -> BoxFuture<'static, Result<(), SandboxError>> {
        let Self { inner, _live: live } = *self;
        Box::pin(async move {
            let done = inner.destroy().await;
            drop(live);
            done
        })
    }

    fn stats(&self) -> SandboxStats {
        self.inner.stats()
    }

    fn protections(&self) -> &Protections {
        self.inner.protections()
    }
}
