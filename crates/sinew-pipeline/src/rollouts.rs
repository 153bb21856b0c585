//! Episodes that are run by an engine, environments and a harness of this process.

use crate::cross::CrossPolicy;
use crate::error::PipelineError;
use crate::event::RolloutProgress;
use crate::ports::{RolloutReading, Rollouts, StoredEpisode, Waker};
use crate::schedule::Draw;
use crate::score_records::completed;
use sinew_env::Taskset;
use sinew_rollout::{BatchError, EpisodeOptions, EpisodeParts, Runner};
use sinew_store::TraceStore;
use sinew_types::EpisodeId;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Between two looks at what goes on.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Live episodes that a terminal shows one by one.
pub const LONGEST: usize = 3;

/// Live episodes that an event carries, for readers with more room than a terminal.
pub const BOARD: usize = 512;

/// Tokens a second between two looks.
#[derive(Debug)]
struct Rate {
    last: Instant,
    tokens: u64,
}

impl Rate {
    fn next(&mut self, tokens: u64) -> f64 {
        let elapsed = self.last.elapsed().as_secs_f64().max(1e-3);
        let rate = tokens.saturating_sub(self.tokens) as f64 / elapsed;
        (self.last, self.tokens) = (Instant::now(), tokens);
        rate
    }
}

/// Runs episodes on an async runtime.
pub struct EngineRollouts {
    /// Episodes are its tasks; this thread waits on it.
    runtime: Handle,
    /// Bounds how many run at a time.
    runner: Runner,
    parts: EpisodeParts,
    /// Where draws find their tasks.
    taskset: Arc<dyn Taskset>,
    /// Of training episodes; held-out ones have another temperature.
    options: EpisodeOptions,
    cross: Option<Arc<CrossPolicy>>,
    /// Has the scores of groups that an earlier session scored.
    store: Arc<dyn TraceStore>,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
    rate: Rate,
}

impl std::fmt::Debug for EngineRollouts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineRollouts")
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

/// What episodes are run with.
pub struct RolloutParts {
    pub episode: EpisodeParts,
    pub taskset: Arc<dyn Taskset>,
    pub options: EpisodeOptions,
    pub max_in_flight: usize,
    /// Mixes an old policy into training episodes.
    pub cross: Option<Arc<CrossPolicy>>,
}

impl std::fmt::Debug for RolloutParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RolloutParts")
            .field("episode", &self.episode)
            .finish_non_exhaustive()
    }
}

impl EngineRollouts {
    /// `cancel` turning true ends a wait.
    pub fn new(
        runtime: Handle,
        parts: RolloutParts,
        store: Arc<dyn TraceStore>,
        cancel: watch::Receiver<bool>,
    ) -> Self {
        Self {
            runtime,
            rate: Rate {
                last: Instant::now(),
                tokens: parts.episode.engine.status().sampled_tokens,
            },
            runner: Runner::new(
                parts.episode.clone(),
                Arc::clone(&store),
                parts.max_in_flight,
            ),
            store,
            parts: parts.episode,
            taskset: parts.taskset,
            options: parts.options,
            cross: parts.cross,
            cancel,
        }
    }
}

impl Rollouts for EngineRollouts {
    fn start(&mut self, draws: &[Draw], temperature: Option<f32>) -> Result<(), PipelineError> {
        if let Some(cross) = &self.cross {
            // Held-out tasks are the current policy's alone.
            cross.mix(temperature.is_none());
        }
        let mut options = self.options.clone();
        if let Some(temperature) = temperature {
            options.sampling.temperature = temperature;
        }
        let taskset = self.taskset.as_ref();
        let specs: Result<Vec<_>, _> = draws.iter().map(|d| d.spec(taskset)).collect();
        let specs = specs.map_err(PipelineError::system)?;
        // They run from now on, whatever this thread does before it waits for them.
        let _runtime = self.runtime.enter();
        let started = self.runner.start(specs, &Arc::new(options));
        started.map_err(PipelineError::system)
    }

    fn stop(&mut self, episodes: &[EpisodeId]) {
        self.runner.stop(episodes);
    }

    fn ended(
        &mut self,
        tick: &mut dyn FnMut(RolloutProgress),
    ) -> Result<Vec<StoredEpisode>, PipelineError> {
        let (parts, rate) = (self.parts.clone(), &mut self.rate);
        let due = rate.last + LOOK_EVERY;
        let ended = self.runner.ended(&mut self.cancel);
        let finished = self.runtime.block_on(async {
            tokio::pin!(ended);
            let mut looks = tokio::time::interval_at(due.into(), LOOK_EVERY);
            loop {
                tokio::select! {
                    ended = &mut ended => break ended,
                    _ = looks.tick() => tick(RolloutProgress {
                        gauges: parts.gauges.read(),
                        admission: parts.admission.reading(),
                        longest: parts.gauges.longest(BOARD),
                        spans: parts.gauges.take_spans(),
                        tokens_per_s: rate.next(parts.engine.status().sampled_tokens),
                        ..RolloutProgress::default()
                    }),
                }
            }
        });
        let finished = finished.map_err(|e| match e {
            BatchError::Cancelled => PipelineError::Interrupted,
            e @ BatchError::Store(_) => PipelineError::system(e),
        })?;
        let stored = finished.into_iter().map(|f| {
            Ok(StoredEpisode {
                trace: completed(self.store.as_ref(), f.trace)?,
                known: f.known,
            })
        });
        stored.collect()
    }

    fn is_running(&self) -> bool {
        self.runner.is_running()
    }

    fn reading(&self) -> RolloutReading {
        let engine = self.parts.engine.status();
        RolloutReading {
            engine_busy_s: engine.busy_s,
            preemptions: engine.preemptions,
            admission: self.parts.admission.reading(),
        }
    }

    fn waker(&self) -> Waker {
        let wake = self.runner.waker();
        Arc::new(move || wake.notify_one())
    }
}
