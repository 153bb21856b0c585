//! Warm sandboxes, kept ready: sized by demand, bounded in number and memory, never dirty.
//!
//! A sandbox leaves the pool once. Its user destroys it; nothing comes back, so nothing of one user can reach
//! the next. The number of ready sandboxes follows demand. Every request that finds none ready doubles the
//! target, and quiet time halves it, between a floor and the limit set by ceiling and memory budget. Only a
//! few are made at once (start storms).
//!
//! Sandboxes of a pool die with its provider; the leftovers of a killed server on the host carry the tag of
//! its run, and the next provider removes them.

use crate::port::{
    Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec, Snapshot,
};
use std::collections::VecDeque;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Size rules of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolConfig {
    /// Ready sandboxes that are kept even without requests, after the first request.
    pub floor: usize,
    /// Maximum number of ready sandboxes.
    pub ceiling: usize,
    /// Memory that ready sandboxes may take together.
    pub memory_bytes: u64,
    /// Sandboxes that are made at once.
    pub starts_at_once: usize,
    /// Time without a request that found none ready, after which the target halves.
    pub quiet: Duration,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            floor: 2,
            ceiling: 64,
            memory_bytes: 512 << 20,
            starts_at_once: 2,
            quiet: Duration::from_secs(10),
        }
    }
}

impl PoolConfig {
    /// Sizes that leave at least half of `max_live` sandboxes to those in use.
    pub fn for_live(max_live: usize) -> Self {
        let default = Self::default();
        let ceiling = default.ceiling.min(max_live / 2);
        Self {
            floor: default.floor.min(ceiling),
            ceiling,
            ..default
        }
    }
}

/// Counts of a pool so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Ready sandboxes now.
    pub ready: usize,
    /// Number of sandboxes that it wants ready.
    pub target: usize,
    /// Maximum number that were being made at one moment.
    pub most_starts: usize,
    /// Requests that got a ready one.
    pub hits: u64,
    /// Requests for which one had to be made.
    pub misses: u64,
    /// Ready ones that were thrown away: for a changed specification or shrinking demand.
    pub discarded: u64,
    /// Memory that one ready sandbox takes, as last measured.
    pub one_bytes: u64,
}

/// Memory of a ready sandbox before one was measured.
const GUESS_BYTES: u64 = 4 << 20;
/// One of this many hits measures the memory of its sandbox.
const MEASURE_EVERY: u64 = 64;
/// Time after which a waiter checks the tasks that make sandboxes: they end with the runtime that they were
/// started on.
const LOOK_AFTER: Duration = Duration::from_secs(1);

type NewSandbox = Result<Box<dyn Sandbox>, SandboxError>;

struct State {
    spec: Option<SandboxSpec>,
    ready: VecDeque<Box<dyn Sandbox>>,
    /// Requests that found none ready, first come first served.
    waiters: VecDeque<oneshot::Sender<NewSandbox>>,
    target: usize,
    last_miss: Instant,
    /// Tasks that make sandboxes now, and the most there were.
    makers: usize,
    most_makers: usize,
}

struct Inner {
    provider: Arc<dyn SandboxProvider>,
    config: PoolConfig,
    state: Mutex<State>,
    hits: AtomicU64,
    misses: AtomicU64,
    discarded: AtomicU64,
    one_bytes: AtomicU64,
}

/// A provider that hands out sandboxes of another one that are ready already.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pool").field(&self.stats()).finish()
    }
}

enum Found {
    Ready(Box<dyn Sandbox>),
    /// The sandbox will be sent.
    Wait(oneshot::Receiver<NewSandbox>),
}

impl Pool {
    /// A pool over `provider`, empty until the first request.
    ///
    /// # Errors
    /// [`SandboxError::Request`] if the sizes contradict each other.
    pub fn new(
        provider: Arc<dyn SandboxProvider>,
        config: PoolConfig,
    ) -> Result<Self, SandboxError> {
        let bad = |field, value: usize, allowed: &str| {
            Err(SandboxError::Request {
                field,
                value: value.to_string(),
                allowed: allowed.into(),
            })
        };
        if config.floor > config.ceiling {
            return bad("pool.floor", config.floor, "at most pool.ceiling");
        }
        if config.starts_at_once == 0 {
            return bad("pool.starts_at_once", 0, "at least 1");
        }
        let state = State {
            spec: None,
            ready: VecDeque::new(),
            waiters: VecDeque::new(),
            target: config.floor,
            last_miss: Instant::now(),
            makers: 0,
            most_makers: 0,
        };
        Ok(Self(Arc::new(Inner {
            provider,
            config,
            state: Mutex::new(state),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            discarded: AtomicU64::new(0),
            one_bytes: AtomicU64::new(GUESS_BYTES),
        })))
    }

    /// Returns the counts so far.
    pub fn stats(&self) -> PoolStats {
        let inner = &self.0;
        let state = inner.state();
        PoolStats {
            ready: state.ready.len(),
            target: state.target,
            most_starts: state.most_makers,
            hits: inner.hits.load(Ordering::Relaxed),
            misses: inner.misses.load(Ordering::Relaxed),
            discarded: inner.discarded.load(Ordering::Relaxed),
            one_bytes: inner.one_bytes.load(Ordering::Relaxed),
        }
    }

    /// Destroys all ready sandboxes and waits for it; requests after it fill the pool again.
    ///
    /// # Errors
    /// The first failure; the others are destroyed all the same.
    pub async fn drain(&self) -> Result<(), SandboxError> {
        let ready = std::mem::take(&mut self.0.state().ready);
        let mut result = Ok(());
        for sandbox in ready {
            result = result.and(sandbox.destroy().await);
        }
        result
    }

    /// Starts tasks that make sandboxes, as many as are needed and allowed.
    fn make_more(&self) {
        let mut state = self.0.state();
        while state.makers < self.0.config.starts_at_once && state.wanted() > state.makers {
            state.makers += 1;
            state.most_makers = state.most_makers.max(state.makers);
            let mut maker = Maker {
                inner: Arc::clone(&self.0),
                counts: true,
            };
            tokio::spawn(async move { while maker.is_needed() && maker.inner.make_one().await {} });
        }
    }
}

/// Counts a task that makes sandboxes, also when its runtime drops it half-way.
struct Maker {
    inner: Arc<Inner>,
    counts: bool,
}

impl Maker {
    /// Whether a sandbox is missing that no other maker is at. One that is not needed no longer counts from
    /// here on, so that a request that comes now starts another one.
    fn is_needed(&mut self) -> bool {
        let mut state = self.inner.state();
        if state.wanted() >= state.makers {
            return true;
        }
        state.makers -= 1;
        self.counts = false;
        false
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        if self.counts {
            self.inner.state().makers -= 1;
        }
    }
}

impl State {
    /// Sandboxes that are missing.
    fn wanted(&self) -> usize {
        self.waiters.len() + self.target.saturating_sub(self.ready.len())
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maximum number of ready sandboxes by ceiling and memory budget.
    fn most_ready(&self) -> usize {
        let one = self.one_bytes.load(Ordering::Relaxed).max(1);
        let fit = usize::try_from(self.config.memory_bytes / one).unwrap_or(usize::MAX);
        self.config.ceiling.min(fit).max(self.config.floor)
    }

    /// Takes a ready sandbox, or a place in the queue. A pool serves one specification at a time: when it
    /// changes, the old sandboxes are destroyed. `None` if others wait for another specification.
    fn find(&self, spec: &SandboxSpec) -> Option<Found> {
        let mut state = self.state();
        let mut old = VecDeque::new();
        if state.spec.as_ref() != Some(spec) {
            if !state.waiters.is_empty() {
                return None;
            }
            old = std::mem::take(&mut state.ready);
            state.spec = Some(spec.clone());
            state.target = self.config.floor;
        }
        // Those that died with what kept them are of no use.
        let (dead, ready) = std::mem::take(&mut state.ready)
            .into_iter()
            .partition(|sandbox| sandbox.is_dead());
        state.ready = ready;
        old.extend::<VecDeque<_>>(dead);
        let taken = state.ready.pop_front();
        if taken.is_none() {
            state.target = (state.target * 2).max(1);
            state.last_miss = Instant::now();
        } else if state.last_miss.elapsed() > self.config.quiet {
            state.target /= 2;
            state.last_miss = Instant::now();
        }
        state.target = state.target.clamp(self.config.floor, self.most_ready());
        let most = state.target;
        while state.ready.len() > most {
            old.extend(state.ready.pop_back());
        }
        let found = taken.map_or_else(
            || {
                let (sender, receiver) = oneshot::channel();
                state.waiters.push_back(sender);
                Found::Wait(receiver)
            },
            Found::Ready,
        );
        drop(state);
        let thrown = old.len() as u64;
        self.discarded.fetch_add(thrown, Ordering::Relaxed);
        Some(found)
    }

    /// Makes a sandbox for the first waiter, else to be ready; false if the next request is to try again.
    async fn make_one(&self) -> bool {
        let spec = self.state().spec.clone();
        let Some(spec) = spec else {
            return false;
        };
        let mut made = self.provider.acquire(&spec).await;
        loop {
            let mut state = self.state();
            let current = state.spec.as_ref() == Some(&spec);
            // One that waits for another specification continues to wait.
            let waiter = current.then(|| state.waiters.pop_front()).flatten();
            match waiter {
                // One that gave up waiting takes nothing.
                Some(waiter) => match waiter.send(made) {
                    Ok(()) => return true,
                    Err(back) => made = back,
                },
                None => {
                    return match made {
                        Ok(sandbox) if current && state.ready.len() < state.target => {
                            state.ready.push_back(sandbox);
                            true
                        }
                        Ok(sandbox) => {
                            drop(state);
                            drop(sandbox);
                            self.discarded.fetch_add(1, Ordering::Relaxed);
                            true
                        }
                        // The next request tries again and gets the error.
                        Err(_) => !current,
                    };
                }
            }
        }
    }
}

async fn wait(pool: &Pool, mut made: oneshot::Receiver<NewSandbox>) -> NewSandbox {
    loop {
        match tokio::time::timeout(LOOK_AFTER, &mut made).await {
            Ok(Ok(made)) => return made,
            Ok(Err(_)) => return Err(SandboxError::Died("the pool is closed".into())),
            Err(_) => pool.make_more(),
        }
    }
}

impl SandboxProvider for Pool {
    fn level(&self) -> &'static str {
        self.0.provider.level()
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let Some(found) = self.0.find(spec) else {
                return self.0.provider.acquire(spec).await;
            };
            self.make_more();
            match found {
                Found::Ready(mut sandbox) => {
                    let hits = self.0.hits.fetch_add(1, Ordering::Relaxed);
                    if hits.is_multiple_of(MEASURE_EVERY)
                        && let Ok(stats) = sandbox.stats().await
                        && stats.memory_bytes > 0
                    {
                        self.0
                            .one_bytes
                            .store(stats.memory_bytes, Ordering::Relaxed);
                    }
                    Ok(sandbox)
                }
                Found::Wait(made) => {
                    self.0.misses.fetch_add(1, Ordering::Relaxed);
                    wait(self, made).await
                }
            }
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        self.0.provider.protections()
    }

    fn degradations(&self) -> Vec<String> {
        self.0.provider.degradations()
    }

    fn health(&self) -> Result<(), SandboxError> {
        self.0.provider.health()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        self.0.provider.fork(spec, snapshot)
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        self.0.provider.export_file(snapshot, max_bytes)
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        self.0.provider.import_file(archive, max_bytes)
    }
}
