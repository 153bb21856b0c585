//! Runs a collection with the ports of the training loop, in one thread.

use crate::collection::core::{CollectConfig, Collector, KnownEpisode};
use sinew_orchestrator::{
    Bus, CollectProgress, Draw, EpisodeResult, Phase, PipelineError, RolloutProgress, RunEvent,
    TaskDraws, task_outcome,
};
use sinew_pipeline::{GroupScores, Rollouts, ScoredGroup, StoredEpisode};
use sinew_queue::{Feed, FeedOutcome};
use sinew_store::{EndKind, EpisodeSummary, Filter, MAX_PAGE, StoreStats, TraceStore, summaries};
use sinew_types::{EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Interval between two reports.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Settings and ports of a collection.
pub struct Collection {
    /// Number of episodes and limits.
    pub config: CollectConfig,
    /// Draws of the tasks.
    pub draws: TaskDraws,
    /// Runs them, and stores them.
    pub rollouts: Box<dyn Rollouts>,
    /// Scores groups, for environments with a reward of groups.
    pub groups: Box<dyn GroupScores>,
    /// Store of the episodes.
    pub store: Arc<dyn TraceStore>,
    /// Second receiver of ended groups: scorers and trainers elsewhere.
    pub feed: Option<Feed>,
    /// The session is to stop.
    pub cancel: watch::Receiver<bool>,
    /// Bus for progress events.
    pub bus: Bus,
    /// Start of the session.
    pub started: Instant,
}

sinew_types::debug_fields!(Collection, config);

/// Result of a collection that has ended.
#[derive(Clone, Debug, Default)]
pub struct CollectionEnd {
    /// All sessions.
    pub progress: CollectProgress,
    /// Episodes that ended in this session.
    pub now: u64,
    /// Contents of the store, failed attempts included.
    pub store: StoreStats,
    /// Seconds since this session began.
    pub wall_s: f64,
}

/// Runs the episodes that the store lacks. If it is interrupted or killed, another session continues.
///
/// # Errors
/// If episodes cannot be run or stored, or the run is to stop.
pub fn collect(collection: Collection) -> Result<CollectionEnd, PipelineError> {
    // A feed may lack what the store has: everything is asked for, and given from the store.
    let known = match collection.feed {
        None => known(collection.store.as_ref())?,
        Some(_) => HashMap::new(),
    };
    let c = collection;
    let mut session = Session {
        collector: Collector::new(c.config, c.draws, known),
        rollouts: c.rollouts,
        groups: c.groups,
        feed: c.feed,
        cancel: c.cancel,
        bus: c.bus,
        traces: HashMap::new(),
        scoring: 0,
        began: Instant::now(),
        reported: None,
    };
    session.bus.emit(RunEvent::Phase(Phase::Collecting))?;
    session.run()?;
    let progress = session.progress();
    session.bus.emit(RunEvent::Collected(progress.clone()))?;
    session.bus.emit(RunEvent::Phase(Phase::Done))?;
    Ok(CollectionEnd {
        progress,
        now: session.collector.now(),
        store: c.store.stats().map_err(PipelineError::system)?,
        wall_s: c.started.elapsed().as_secs_f64(),
    })
}

/// Episodes of earlier sessions, read from the index only: it also lists those that `sinew gc` removed.
fn known(store: &dyn TraceStore) -> Result<HashMap<EpisodeId, KnownEpisode>, PipelineError> {
    let filter = Filter {
        removed: true,
        limit: MAX_PAGE,
        ..Filter::default()
    };
    let known = |e: EpisodeSummary| {
        let failed = e.end == EndKind::Failed;
        let outcome = (!failed && !e.unscored).then_some((e.success, e.reward));
        (e.episode, KnownEpisode { failed, outcome })
    };
    let listed = summaries(store, filter).map(|e| e.map(known));
    listed
        .collect::<Result<_, _>>()
        .map_err(PipelineError::system)
}

/// A session at work.
struct Session {
    collector: Collector,
    rollouts: Box<dyn Rollouts>,
    groups: Box<dyn GroupScores>,
    feed: Option<Feed>,
    cancel: watch::Receiver<bool>,
    bus: Bus,
    /// Members of open groups, which may have to be scored as a whole.
    traces: HashMap<GroupId, BTreeMap<EpisodeId, Trace>>,
    /// Groups that are being scored.
    scoring: usize,
    began: Instant,
    reported: Option<Instant>,
}

impl Session {
    fn progress(&self) -> CollectProgress {
        self.collector.progress(self.began.elapsed().as_secs_f64())
    }

    fn run(&mut self) -> Result<(), PipelineError> {
        loop {
            let draws = self.collector.begin();
            if !draws.is_empty() {
                self.rollouts.start(&draws, None)?;
            }
            if self.collector.is_done() {
                return Ok(());
            }
            let running = self.rollouts.is_running();
            if !running && self.scoring == 0 {
                return Err(PipelineError::system(
                    "the collection waits for an episode, but none runs",
                ));
            }
            if self.scoring > 0 {
                self.take_scores(!running)?;
            }
            if running {
                self.take_episodes()?;
            }
            self.report()?;
        }
    }

    /// Waits for episodes. While groups are scored, no longer than until the next look.
    fn take_episodes(&mut self) -> Result<(), PipelineError> {
        let (bus, progress) = (self.bus.clone(), self.progress());
        let started = self.began;
        let waker = self.rollouts.waker();
        let wakes = self.scoring > 0;
        let mut failed = Ok(());
        let ended = self.rollouts.ended(&mut |seen| {
            if wakes {
                waker();
            }
            let seen = RolloutProgress {
                done: progress.episodes as usize,
                total: progress.of as usize,
                wall_s: started.elapsed().as_secs_f64(),
                ..seen
            };
            let told = bus.emit(RunEvent::Rollout(Box::new(seen)));
            failed = std::mem::replace(&mut failed, Ok(())).and(told);
        })?;
        failed?;
        for StoredEpisode { trace, known, .. } in ended {
            let follows = self.collector.ended(EpisodeResult::of(&trace, known));
            if let Some(again) = &follows.again {
                self.rollouts.start(std::slice::from_ref(again), None)?;
            }
            let group = trace.group.clone();
            // An attempt that is made again does not count as a member.
            if follows.again.is_none() {
                let members = self.traces.entry(group.clone()).or_default();
                members.insert(trace.episode.clone(), trace);
            }
            if !self.collector.is_open(&group) {
                self.leave(&group)?;
                continue;
            }
            if let Some(members) = follows.group {
                self.score(members)?;
            }
        }
        Ok(())
    }

    /// Begins to score a group.
    fn score(&mut self, members: Vec<Draw>) -> Result<(), PipelineError> {
        let traced = |draw: Draw| {
            let trace = self.traces.get(&draw.group)?.get(&draw.episode)?.clone();
            Some((draw, trace))
        };
        self.groups
            .start(members.into_iter().filter_map(traced).collect())?;
        self.scoring += 1;
        Ok(())
    }

    /// A group is complete: it goes to the feed, if there is one.
    fn leave(&mut self, group: &GroupId) -> Result<(), PipelineError> {
        let members = self.traces.remove(group).unwrap_or_default();
        self.fed(members.into_values().collect())
    }

    /// Puts the members of a group that is complete.
    fn fed(&mut self, members: Vec<Trace>) -> Result<(), PipelineError> {
        let Some(feed) = &mut self.feed else {
            return Ok(());
        };
        let cancel = &self.cancel;
        let fed = feed.put(&members, &|| *cancel.borrow());
        match fed.map_err(|e| PipelineError::system(format!("--queue: {e}")))? {
            FeedOutcome::Stopped => Err(PipelineError::Interrupted),
            FeedOutcome::New(_) | FeedOutcome::Known => Ok(()),
        }
    }

    /// Takes in the groups that were scored; with `wait`, at least one.
    fn take_scores(&mut self, wait: bool) -> Result<(), PipelineError> {
        for ScoredGroup { group, outcomes } in self.groups.scored(wait)? {
            self.scoring = self.scoring.saturating_sub(1);
            let mut members = self.traces.remove(&group).unwrap_or_default();
            for (episode, outcome) in outcomes {
                if let Some(trace) = members.get_mut(&episode) {
                    trace.outcome = outcome;
                }
            }
            let outcomes = members
                .iter()
                .filter_map(|(episode, trace)| Some((episode.clone(), task_outcome(trace)?)))
                .collect();
            self.collector.scored(&group, outcomes);
            self.fed(members.into_values().collect())?;
        }
        Ok(())
    }

    fn report(&mut self) -> Result<(), PipelineError> {
        if self.reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
            return Ok(());
        }
        self.reported = Some(Instant::now());
        self.bus.emit(RunEvent::Collected(self.progress()))
    }
}
