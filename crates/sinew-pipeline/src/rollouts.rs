//! Episodes that are run by an engine, environments and a harness of this process.

use crate::cross_policy::CrossPolicy;
use crate::in_flight::InFlightFile;
use crate::ports::{ResumeCondition, RolloutReading, Rollouts, StoredEpisode, Waker};
use sinew_algo::TurnStages;
use sinew_env::Taskset;
use sinew_orchestrator::{BOARD, Draw, PipelineError, RolloutProgress, completed, draw_of};
use sinew_rollout::{
    BatchError, EpisodeOptions, EpisodeParts, InFlight, REWARD, ResumedCounts, Runner, outcomes_of,
};
use sinew_store::TraceStore;
use sinew_types::{EpisodeEnd, EpisodeId, Task};
use std::collections::HashMap;
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
    /// Has the scores of groups that an earlier session scored.
    store: Arc<dyn TraceStore>,
    /// File and state of episodes in flight, for a resumed session.
    in_flight: Option<(InFlightFile, Arc<InFlight>)>,
    /// Treatment of stored episodes that were run with other versions of the system's parts.
    changed: ChangedParts,
    /// Tasks of stored episodes, if these may be scored again.
    known: HashMap<EpisodeId, Task>,
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
    fn turns(&self, draw: u64) -> u32 {
        self.stages.turns(draw / self.draws_per_step.max(1))
    }
}

/// Treatment of stored episodes that wait for training when an environment, a tool or a reward has another
/// version than when they ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangedParts {
    /// They are run again.
    RunAgain,
    /// A changed reward scores them again; otherwise they are run again.
    Rescore,
    /// They are trained as they are.
    Keep,
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
            store,
            parts: parts.episode,
            taskset: parts.taskset,
            options: parts.options,
            cross: parts.cross,
            turns: parts.turns,
            in_flight,
            changed: parts.changed,
            known: HashMap::new(),
            cancel,
        }
    }
}

impl EngineRollouts {
    /// Scores episodes again for which only a reward has changed, several at a time. Episodes whose score
    /// depends on a running environment or on their group stay marked as changed.
    fn rescore(&mut self, episodes: &mut [StoredEpisode]) {
        let envs = &self.parts.envs;
        let (mut places, mut open) = (Vec::new(), Vec::new());
        for (place, episode) in episodes.iter().enumerate() {
            let Some(task) = self.known.remove(&episode.trace.episode) else {
                continue;
            };
            let of_reward = |what: &String| what.starts_with(REWARD);
            let whole = !matches!(episode.trace.end, EpisodeEnd::Failed { .. });
            let alone = whole && envs.group_reward(&task).is_none();
            if let (true, Some(reward)) = (alone, envs.reward(&task))
                && episode.changed.as_ref().is_some_and(of_reward)
            {
                places.push(place);
                open.push((&episode.trace, task, reward));
            }
        }
        let renderer = self.parts.renderer.as_ref();
        let scored = outcomes_of(open, renderer, self.options.score_timeout);
        let outcomes = self.runtime.block_on(scored);
        for (place, outcome) in places.into_iter().zip(outcomes) {
            episodes[place].trace.outcome = outcome;
            episodes[place].changed = None;
            episodes[place].rescored = true;
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
        if self.changed == ChangedParts::Rescore && temperature.is_none() {
            for spec in &specs {
                let stored = self.store.get(&spec.episode);
                if stored.map_err(PipelineError::system)?.is_some() {
                    self.known.insert(spec.episode.clone(), spec.task.clone());
                }
            }
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
        let stored = finished.into_iter().map(|f| {
            let judged =
                f.known && self.changed != ChangedParts::Keep && f.trace.origin.purpose == "train";
            let changed = judged.then(|| self.parts.run.changed_since(&f.trace));
            Ok(StoredEpisode {
                trace: completed(self.store.as_ref(), f.trace)?,
                known: f.known,
                changed: changed.flatten(),
                rescored: false,
            })
        });
        let mut stored: Vec<StoredEpisode> = stored.collect::<Result<_, PipelineError>>()?;
        self.rescore(&mut stored);
        Ok(stored)
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
        }
    }

    fn waker(&self) -> Waker {
        let wake = self.runner.waker();
        Arc::new(move || wake.notify_one())
    }
}
