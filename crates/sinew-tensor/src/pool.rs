//! A bounded pool of threads for data-parallel loops.
//!
//! The caller always takes part, so a loop finishes even when no worker gets CPU time: a worker that
//! wakes late finds the loop closed and goes back to sleep, and no thread waits for it. Waiting threads
//! spin for some microseconds and then park.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};

/// Set while a loop is open: workers may join.
const OPEN: u64 = 1;
/// Set once, when the pool goes away.
const SHUTDOWN: u64 = 2;
/// One joined worker; the count has bits 8..32.
const JOINED_ONE: u64 = 1 << 8;
const JOINED_MASK: u64 = 0xffff_ff00;
/// The number of the loop has bits 32..64; it may wrap, since only inequality with the last one matters.
const EPOCH_ONE: u64 = 1 << 32;

/// Spins before a waiting thread parks. One spin is a `pause`, 34 cycles (12 ns) on an Ice Lake server and
/// up to 140 on others, so the bound is some 50-200 us: longer than the serial gaps between the operators
/// of a decoding step, where waking a parked thread would cost as much as the operator; short enough
/// that an idle pool leaves the CPU to others.
const SPINS: u32 = 4000;

thread_local! {
    /// Whether this thread is inside a loop of some pool.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The loop body with its lifetime erased: valid while the loop is open or has joined workers.
type RawBody = *const (dyn Fn(usize) + Sync);

struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    /// Body, task count and caller of the current loop; written only by the holder of `Pool::submit`
    /// while no loop is open and no worker joined, read only by joined workers.
    current: UnsafeCell<Option<(RawBody, usize, Thread)>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `current` is the only field without its own synchronization; see its comment: the
// release store that opens a loop and the acquire of joining order its accesses.
unsafe impl Sync for Shared {}
// SAFETY: the raw body in `current` points to a `Sync` closure, so it may be called from any thread.
unsafe impl Send for Shared {}

/// A fixed number of threads that run the tasks of one loop at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    submit: Mutex<()>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish()
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller of each loop counted in; `0` counts as 1. The pool is smaller
    /// if the system refuses a thread.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            current: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        let workers = (1..threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                let name = format!("sinew-pool-{i}");
                thread::Builder::new()
                    .name(name)
                    .spawn(move || shared.work())
                    .ok()
            })
            .collect();
        Self {
            shared,
            workers,
            submit: Mutex::new(()),
        }
    }

    /// Number of threads, the caller counted in.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(0)..body(tasks - 1)`, each once, and returns when all are done. Threads take the
    /// next task as they become free, in ascending order.
    ///
    /// Runs everything on the calling thread when called from inside a loop, or while another thread
    /// has the pool. A panic of the body is passed on after the other running tasks ended.
    pub fn parallel_for(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() || INSIDE.get() {
            return (0..tasks).for_each(body);
        }
        let guard = match self.submit.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..tasks).for_each(body),
        };
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; `finish` below waits for all users before this frame ends.
        let raw: RawBody =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), RawBody>(body) };
        // SAFETY: we hold `submit`, and the loop before has ended, so no thread reads `current`.
        unsafe { *shared.current.get() = Some((raw, tasks, thread::current())) };
        shared.next.store(0, Ordering::Relaxed);
        let epoch = shared.state.load(Ordering::Relaxed) & !(EPOCH_ONE - 1);
        shared
            .state
            .store(epoch.wrapping_add(EPOCH_ONE) | OPEN, Ordering::Release);
        for worker in self.workers.iter().take(tasks - 1) {
            worker.thread().unpark();
        }
        INSIDE.set(true);
        shared.run(body, tasks);
        INSIDE.set(false);
        shared.finish();
        let panic = shared
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(guard);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Splits `0..items` into ranges of `grain` items (the last can be shorter) and runs `body` on each.
    pub fn parallel_ranges(
        &self,
        items: usize,
        grain: usize,
        body: &(dyn Fn(Range<usize>) + Sync),
    ) {
        let grain = grain.max(1);
        self.parallel_for(items.div_ceil(grain), &|task| {
            let start = task * grain;
            body(start..(start + grain).min(items));
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(SHUTDOWN, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of tasks, so there is nothing to learn from the join.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// The life of a worker.
    fn work(&self) {
        INSIDE.set(true);
        let mut seen = 0;
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & SHUTDOWN != 0 {
                return;
            }
            let epoch = state & !(EPOCH_ONE - 1);
            if state & OPEN != 0 && epoch != seen {
                let joined = state + JOINED_ONE;
                if self
                    .state
                    .compare_exchange_weak(state, joined, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
                {
                    seen = epoch;
                    spins = 0;
                    self.help();
                }
            } else if spins < SPINS {
                spins += 1;
                spin_loop();
            } else {
                thread::park();
                spins = 0;
            }
        }
    }

    /// Runs tasks of the loop that this worker has joined, then leaves it.
    fn help(&self) {
        // SAFETY: joined, so `current` stays unchanged until we leave.
        let current = unsafe { &*self.current.get() };
        let caller = current.as_ref().map(|(body, tasks, caller)| {
            // SAFETY: joined, so the caller is still inside `parallel_for` and the body alive.
            self.run(unsafe { &**body }, *tasks);
            caller.clone()
        });
        let before = self.state.fetch_sub(JOINED_ONE, Ordering::AcqRel);
        if before & OPEN == 0
            && before & JOINED_MASK == JOINED_ONE
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }

    /// Takes tasks until none is left. A panic ends the loop: no further task starts.
    fn run(&self, body: &(dyn Fn(usize) + Sync), tasks: usize) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                body(task);
            }
        }));
        if let Err(payload) = outcome {
            self.next.store(tasks, Ordering::Relaxed);
            self.panic
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(payload);
        }
    }

    /// Closes the loop and waits until the joined workers have left.
    fn finish(&self) {
        let mut state = self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while state & JOINED_MASK != 0 {
            if spins < SPINS {
                spins += 1;
                spin_loop();
            } else {
                thread::park();
            }
            state = self.state.load(Ordering::Acquire);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [0, 1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 17, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.parallel_for(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn nested_and_concurrent_loops_finish() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.parallel_for(4, &|_| {
                            pool.parallel_for(5, &|_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 3 * 200 * 4 * 5);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for bad in [0, 31] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.parallel_for(64, &|i| assert_ne!(i, bad, "task {bad} failed"));
            }));
            assert!(outcome.is_err());
            let done = AtomicUsize::new(0);
            pool.parallel_for(8, &|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 8);
        }
    }

    #[test]
    fn ranges_cover_all_items() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.parallel_ranges(103, 10, &|r| {
            sum.fetch_add(r.sum::<usize>(), Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 102 * 103 / 2);
    }
}
