//! States of engine, tools and trainer over time, sampled many times a second.
//!
//! A thread looks at the gauges of the rollouts every 20 ms, and at the trainer's last report. It computes
//! nothing and writes nothing while the run works; the looks are drawn afterwards. It ends with the value
//! that started it, also after an error.

use sinew_orchestrator::{Phase, PipelineError, Recorder, RunEvent};
use sinew_rollout::Gauges;
use sinew_types::Engine;
use sinew_view::ViewError;
use sinew_view::plot::{Lane, Span, timeline};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of the looks.
const EVERY: Duration = Duration::from_millis(20);
/// Looks that are kept: most of an hour.
const MAX_LOOKS: usize = 150_000;

/// Records whether the trainer works: from the start of an update to the end of its step.
pub(super) struct Trains(pub(super) Arc<AtomicBool>);

impl Recorder for Trains {
    /// Records the activity of the trainer from this event on.
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        match event {
            RunEvent::Phase(Phase::Training { .. }) => self.0.store(true, Ordering::Relaxed),
            RunEvent::Step(_) => self.0.store(false, Ordering::Relaxed),
            _ => {}
        }
        Ok(())
    }
}

/// A look: seconds since the start, share of the time since the last look in which the engine computed,
/// episodes in tools, whether the trainer works.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Seconds since the start.
    at_s: f64,
    /// Share of the time since the last look in which the engine computed.
    engine: f64,
    /// Episodes that were in their tools.
    tools: usize,
    /// Whether the trainer computed.
    trainer: bool,
}

/// Looks at a run until it is over.
pub(super) struct Looking {
    /// Ends the thread.
    over: Arc<AtomicBool>,
    /// Looks so far, bounded.
    looks: Arc<Mutex<Vec<Look>>>,
    thread: Option<JoinHandle<()>>,
}

/// Recorded looks at a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Timeline {
    /// Looks in the order of their times.
    looks: Vec<Look>,
    /// Time at which the first step began.
    begun_s: f64,
    /// Time at which the last step ended.
    ended_s: f64,
}

impl Timeline {
    /// Looks from now on.
    pub(super) fn start(
        engine: &Arc<dyn Engine>,
        gauges: &Arc<Gauges>,
        trainer: &Arc<AtomicBool>,
    ) -> Looking {
        let (engine, gauges) = (Arc::clone(engine), Arc::clone(gauges));
        let trainer = Arc::clone(trainer);
        let over = Arc::<AtomicBool>::default();
        let looks = Arc::<Mutex<Vec<Look>>>::default();
        let (ends, seen) = (Arc::clone(&over), Arc::clone(&looks));
        let thread = std::thread::spawn(move || {
            let start = Instant::now();
            let mut before = (0.0, engine.status().busy_s);
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(EVERY);
                let now = (start.elapsed().as_secs_f64(), engine.status().busy_s);
                let share = (now.1 - before.1) / (now.0 - before.0).max(1e-9);
                before = now;
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                if seen.len() < MAX_LOOKS {
                    seen.push(Look {
                        at_s: now.0,
                        engine: share.clamp(0.0, 1.0),
                        tools: gauges.read().in_tool,
                        trainer: trainer.load(Ordering::Relaxed),
                    });
                }
            }
        });
        Looking {
            over,
            looks,
            thread: Some(thread),
        }
    }

    /// Engine, tools and trainer as lanes from the first step on. Tools are full where `most` episodes are in
    /// them.
    fn lanes(&self, mode: &str, most: usize) -> [Lane; 3] {
        let lane = |name: &str, share: &dyn Fn(&Look) -> f64| {
            let mut spans = Vec::new();
            let mut from = self.begun_s;
            for look in &self.looks {
                if look.at_s > from && from < self.ended_s {
                    let to = look.at_s.min(self.ended_s);
                    let share = share(look);
                    spans.push(Span {
                        from: from - self.begun_s,
                        to: to - self.begun_s,
                        share,
                    });
                    from = to;
                }
            }
            Lane {
                name: format!("{mode}: {name}"),
                spans,
            }
        };
        [
            lane("engine", &|l| l.engine),
            lane("tools", &|l| l.tools as f64 / most.max(1) as f64),
            lane("trainer", &|l| f64::from(u8::from(l.trainer))),
        ]
    }

    /// The maximum of episodes in tools at once: the height of their lane.
    fn most_tools(&self) -> usize {
        self.looks.iter().map(|l| l.tools).max().unwrap_or_default()
    }

    /// Share of the time of the steps in which the trainer worked.
    pub(super) fn trainer_share(&self) -> f64 {
        let steps = self.looks.iter();
        let steps: Vec<_> = steps
            .filter(|l| (self.begun_s..=self.ended_s).contains(&l.at_s))
            .collect();
        let busy = steps.iter().filter(|l| l.trainer).count();
        busy as f64 / steps.len().max(1) as f64
    }
}

impl Looking {
    /// Ends it. The steps were between two times.
    pub(super) fn end(mut self, begun_s: f64, ended_s: f64) -> Timeline {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It cannot panic; without its looks the plot is empty.
            let _ = thread.join();
        }
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        Timeline {
            looks: std::mem::take(&mut looks),
            begun_s,
            ended_s,
        }
    }
}

impl Drop for Looking {
    /// Ends the thread and waits for it.
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Runs in several modes, one below the other.
///
/// # Errors
/// If it cannot be drawn.
pub(super) fn draw(runs: &[(&str, &Timeline)]) -> Result<String, ViewError> {
    let most = runs.iter().map(|(_, t)| t.most_tools()).max();
    let lanes: Vec<Lane> = runs
        .iter()
        .flat_map(|(mode, t)| t.lanes(mode, most.unwrap_or_default()))
        .collect();
    timeline("Who works, over time", "seconds", &lanes)
}
