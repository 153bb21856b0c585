//! Episodes that are run by an engine, environments and a harness of this process.

use crate::cross_policy::CrossPolicy;
use crate::in_flight::InFlightFile;
use crate::ports::{ResumeCondition, RolloutReading, Rollouts, StoredEpisode, Waker};
use crate::stored::{ChangedParts, StoredEpisodes, StoredParts};
use sinew_algo::TurnStages;
use sinew_env::Taskset;
use sinew_orchestrator::{BOARD, Draw, PipelineError, RolloutProgress, draw_of};
use sinew_rollout::{
    BatchError, EpisodeOptions, EpisodeParts, Hops, InFlight, ResumedCounts, Runner,
};
use sinew_store::TraceStore;
use sinew_types::EpisodeId;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Interval between two readings of the episodes that run.
const LOOK_EVERY: Duration = Duration::from_millis(250);

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
    /// Tasks of the draws.
    taskset: Arc<dyn Taskset>,
    /// Options of training episodes; held-out ones have another temperature.
    options: EpisodeOptions,
    cross: Option<Arc<CrossPolicy>>,
    turns: Option<TurnSchedule>,
    /// Judges episodes that ended.
    stored: StoredEpisodes,
    /// File and state of episodes in flight, for a resumed session.
    in_flight: Option<(InFlightFile, Arc<InFlight>)>,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
    rate: Rate,
}

sinew_types::debug_fields!(EngineRollouts, parts);

/// Parts for running episodes.
pub struct RolloutParts {
    pub episode: EpisodeParts,
    pub taskset: Arc<dyn Taskset>,
    pub options: EpisodeOptions,
    pub max_in_flight: usize,
    /// Mixes an old policy into training episodes.
    pub cross: Option<Arc<CrossPolicy>>,
    /// File for episodes in flight; `None`: they are not kept.
    pub in_flight: Option<PathBuf>,
    /// Turns of training episodes grow with the steps of the run.
    pub turns: Option<TurnSchedule>,
    /// Treatment of stored episodes whose environment, a tool or a reward has another version now.
    pub changed: ChangedParts,
}

/// Growth of the maximum turns of training episodes: a function of the draw, so that a resumed session gives
/// an episode the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnSchedule {
    /// Stages by steps, from 0.
    pub stages: TurnStages,
    /// Numbers of draws that belong to a step.
    pub draws_per_step: u64,
}

impl TurnSchedule {
    /// Maximum turns of a draw.
    pub fn turns(&self, draw: u64) -> u32 {
        self.stages.turns(draw / self.draws_per_step.max(1))
    }
}

sinew_types::debug_fields!(RolloutParts, episode);

impl EngineRollouts {
    /// `cancel` turning true ends a wait.
    pub fn new(
        runtime: Handle,
        mut parts: RolloutParts,
        store: Arc<dyn TraceStore>,
        cancel: watch::Receiver<bool>,
    ) -> Self {
        let in_flight = parts.in_flight.take();
        let in_flight = in_flight.map(|path| (InFlightFile::new(path), Arc::<InFlight>::default()));
        parts.episode.in_flight = in_flight.as_ref().map(|(_, all)| Arc::clone(all));
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
            stored: StoredEpisodes::new(StoredParts {
                store,
                envs: Arc::clone(&parts.episode.envs),
                renderer: Arc::clone(&parts.episode.renderer),
                run: Arc::clone(&parts.episode.run),
                score_timeout: parts.options.score_timeout,
                changed: parts.changed,
            }),
            parts: parts.episode,
            taskset: parts.taskset,
            options: parts.options,
            cross: parts.cross,
            turns: parts.turns,
            in_flight,
            cancel,
        }
    }
}

impl Rollouts for EngineRollouts {
    fn start(&mut self, draws: &[Draw], temperature: Option<f32>) -> Result<(), PipelineError> {
        if let Some(cross) = &self.cross {
            // Only the current policy runs held-out tasks.
            cross.mix(temperature.is_none());
        }
        let mut options = self.options.clone();
        if let Some(temperature) = temperature {
            options.sampling.temperature = temperature;
        }
        let taskset = self.taskset.as_ref();
        let specs: Result<Vec<_>, _> = draws.iter().map(|d| d.spec(taskset)).collect();
        let specs = specs.map_err(PipelineError::system)?;
        if temperature.is_none() {
            self.stored.begin(&specs)?;
        }
        // They run from now on, whatever this thread does before it waits for them.
        let _runtime = self.runtime.enter();
        let most = options.limits.max_turns;
        let stages = self.turns.as_ref().filter(|_| temperature.is_none());
        let turns = |draw| stages.map_or(most, |s| s.turns(draw).min(most));
        let mut specs = specs.into_iter().peekable();
        while let Some(first) = specs.next() {
            options.limits.max_turns = turns(first.draw);
            let mut alike = vec![first];
            while let Some(next) = specs.next_if(|s| turns(s.draw) == options.limits.max_turns) {
                alike.push(next);
            }
            let started = self.runner.start(alike, &Arc::new(options.clone()));
            started.map_err(PipelineError::system)?;
        }
        Ok(())
    }

    fn resume(&mut self, earlier: &ResumeCondition<'_>) -> Result<Option<String>, PipelineError> {
        let Some((file, all)) = &self.in_flight else {
            return Ok(None);
        };
        let found = file.read()?;
        let open = found.episodes.into_iter().filter(|saved| {
            let draw = draw_of(&saved.trace.episode);
            draw.is_some_and(|draw| !earlier.settled.contains(&draw))
        });
        let (lost, whole): (Vec<_>, _) =
            open.partition(|saved| saved.newest_version() > Some(earlier.known));
        all.lost(&lost);
        all.give(whole);
        Ok(found.damage.map(|why| {
            format!("episodes that were in flight could not all be read, and start again: {why}")
        }))
    }

    fn save(&mut self) -> Result<(), PipelineError> {
        let Some((file, all)) = &self.in_flight else {
            return Ok(());
        };
        let left_out = file.write(&all.read())?;
        if left_out > 0 {
            tracing::warn!(left_out, "episodes in flight do not fit into their file");
        }
        Ok(())
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
        let mut look = || RolloutProgress {
            gauges: parts.gauges.read(),
            admission: parts.admission.reading(),
            longest: parts.gauges.longest(BOARD),
            spans: parts.gauges.take_spans(),
            failures: parts.gauges.take_failures(),
            ended: parts.gauges.take_ended(),
            tokens_per_s: rate.next(parts.engine.status().sampled_tokens),
            ..RolloutProgress::default()
        };
        let ended = self.runner.ended(&mut self.cancel);
        let finished = self.runtime.block_on(async {
            tokio::pin!(ended);
            let mut looks = tokio::time::interval_at(due.into(), LOOK_EVERY);
            loop {
                tokio::select! {
                    ended = &mut ended => break ended,
                    _ = looks.tick() => tick(look()),
                }
            }
        });
        let finished = finished.map_err(|e| match e {
            BatchError::Cancelled => PipelineError::Interrupted,
            e @ BatchError::Store(_) => PipelineError::system(e),
        })?;
        if !self.runner.is_running() {
            // Nobody looks again before the next episodes begin, which may be never.
            tick(look());
        }
        self.stored.ended(&self.runtime, finished)
    }

    fn is_running(&self) -> bool {
        self.runner.is_running()
    }

    fn reading(&self) -> RolloutReading {
        let engine = self.parts.engine.status();
        RolloutReading {
            engine_busy_s: engine.busy_s,
            sandbox_s: self.parts.sandbox_wait.seconds(),
            preemptions: engine.preemptions,
            admission: self.parts.admission.reading(),
            resumed: match &self.in_flight {
                Some((_, all)) => all.resumed(),
                None => ResumedCounts::default(),
            },
            hops: Hops::default(),
        }
    }

    fn waker(&self) -> Waker {
        let wake = self.runner.waker();
        Arc::new(move || wake.notify_one())
    }
}
