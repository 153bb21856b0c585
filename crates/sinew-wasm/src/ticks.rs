//! The clock of programs: a thread that advances the engine's epoch while a program runs.
//!
//! Compiled code compares the epoch at loops and calls, and checks its limits when it has changed. The thread
//! pauses when no program has run for 0.1 s, so that an idle worker takes no CPU time.

use crate::error::WasmError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;
use wasmtime::Engine;

/// Interval of epoch checks, the precision of deadlines.
const TICK: Duration = Duration::from_millis(2);
/// Ticks without a program after which the ticker pauses. Waking it delays the next program.
const LINGER: u32 = 50;

/// State shared by running programs and the ticker.
#[derive(Debug, Default)]
struct Ticks {
    /// Number of running programs.
    running: AtomicUsize,
    /// True while the ticker is paused.
    resting: AtomicBool,
}

/// Handle to the thread, which lives as long as the process.
#[derive(Debug)]
pub(crate) struct Ticker {
    /// State shared with the thread.
    ticks: Arc<Ticks>,
    /// The thread, to wake it.
    thread: Thread,
}

impl Ticker {
    /// Starts the thread.
    pub(crate) fn start(engine: Engine) -> Result<Self, WasmError> {
        let ticks = Arc::<Ticks>::default();
        let counter = Arc::clone(&ticks);
        let thread = std::thread::Builder::new()
            .name("epochs".into())
            .spawn(move || tick(&engine, &counter))
            .map_err(|e| format!("start a thread: {e}"))?;
        Ok(Self {
            ticks,
            thread: thread.thread().clone(),
        })
    }

    /// Keeps the epoch advancing as long as the guard lives.
    pub(crate) fn running(&self) -> Running {
        self.ticks.running.fetch_add(1, Ordering::SeqCst);
        if self.ticks.resting.swap(false, Ordering::SeqCst) {
            self.thread.unpark();
        }
        Running(Arc::clone(&self.ticks))
    }
}

/// Guard of a running program.
#[derive(Debug)]
pub(crate) struct Running(Arc<Ticks>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Body of the thread.
fn tick(engine: &Engine, ticks: &Ticks) {
    let mut idle = 0;
    loop {
        idle = match ticks.running.load(Ordering::SeqCst) {
            0 => idle + 1,
            _ => 0,
        };
        if idle > LINGER {
            ticks.resting.store(true, Ordering::SeqCst);
            // A program that started in between has not seen the pause.
            while ticks.resting.load(Ordering::SeqCst) && ticks.running.load(Ordering::SeqCst) == 0
            {
                std::thread::park();
            }
            ticks.resting.store(false, Ordering::SeqCst);
            idle = 0;
        }
        std::thread::sleep(TICK);
        engine.increment_epoch();
    }
}
