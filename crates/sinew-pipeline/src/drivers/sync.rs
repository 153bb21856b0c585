//! The session that carries the core's commands out, one after the other, in this thread.
//!
//! Within a rollout the episodes overlap: engine and tools work at the same time. Rollout and training take
//! turns, so that every token of a step is drawn by one version and staleness is 0, unless the recipe lets
//! them overlap: see `overlap`. An error of a port ends the session. Commits stay, and the next session
//! resumes from them.

use super::episodes::Episodes;
use super::learner_thread::{LearnerTask, LearnerThread, SharedLearner, lock, none_runs};
use super::measurements::Measurements;
use super::sums::Sums;
use super::waiting_groups::AwaitedGroups;
use super::waits::Waits;
use crate::config::PipelineConfig;
use crate::files::RunFiles;
use crate::late::LateRewards;
use crate::ports::{
    GroupRequest, GroupScores, RolloutReading, Rollouts, SampleSource, WeightsTransport,
};
use crate::state::{EarlierSessions, RunStore, SavedState, UpdateInputs};
use sinew_algo::{Algorithm, Spread};
use sinew_grammar::Grammars;
use sinew_orchestrator::{
    AdmissionRecord, Alarm, Bus, Command, Draw, EpisodeStats, Event, Phase, PipelineCore,
    PipelineError, RolloutProgress, Rows, RunCounts, RunEvent, RunOutcome, SampleStatus,
    StepRecord, StopReason, branches, completed, health, joins,
};
use sinew_rollout::{Hops, TrainerActivity};
use sinew_types::{EpisodeId, Outcome, Trace};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Settings and ports of a run.
pub struct Pipeline {
    pub config: PipelineConfig,
    /// Makes rows of groups.
    pub algorithm: Arc<Algorithm>,
    /// Runs episodes, also those of measurements.
    pub rollouts: Box<dyn Rollouts>,
    /// Scores groups; `None` where episodes have their whole reward when they end.
    pub groups: Option<Box<dyn GroupScores>>,
    /// Source of training episodes that are not run here.
    pub source: Option<Box<dyn SampleSource>>,
    /// Source of rewards that are missing when an episode ends.
    pub late: Option<LateRewards>,
    /// Holds weights and optimizer.
    pub learner: SharedLearner,
    /// Transport of weights to the engine of `rollouts`.
    pub transport: Box<dyn WeightsTransport>,
    /// Episodes and commits.
    pub store: RunStore,
    /// Makes the masks of sampled tokens again.
    pub grammars: Arc<dyn Grammars>,
    /// Bus for the run's events.
    pub bus: Bus,
    /// State in the checkpoint from which the run resumes.
    pub saved: SavedState,
    /// Start of the session.
    pub started: Instant,
}

sinew_types::debug_fields!(Pipeline, config);

/// The step at work.
#[derive(Default)]
pub(super) struct Step {
    /// Span of its log lines, since its groups were taken.
    span: Option<tracing::Span>,
    /// Start of its first episodes.
    pub(super) started: Option<Instant>,
    /// Counters at that time.
    pub(super) before: RolloutReading,
    /// The episodes of its rows.
    groups: Vec<Vec<Trace>>,
    pub(super) rows: Option<Rows>,
    /// Times since rows began to be made, and since the weights are in use.
    training: Option<Instant>,
    live: Option<Instant>,
    /// Filled in during the step.
    pub(super) record: StepRecord,
    /// The record of the update that is done again.
    recalled: Option<StepRecord>,
    /// Outcomes of its episodes that follow from later scores, and episodes whose scores did not come.
    pub(super) outcomes: BTreeMap<EpisodeId, Outcome>,
    pub(super) left_out: BTreeMap<EpisodeId, String>,
}

impl Step {
    /// Enters the span, which begins with the first command that names the step.
    fn enter(&mut self, command: &Command) -> Option<tracing::span::EnteredSpan> {
        if let Command::Fetch { step }
        | Command::CollectLateRewards { step, .. }
        | Command::LoadCommitted { step }
        | Command::Score { step, .. } = command
        {
            let begin = || tracing::info_span!("step", number = *step);
            self.span.get_or_insert_with(begin);
        }
        self.span.clone().map(tracing::Span::entered)
    }
}

/// A session at work.
pub(crate) struct Driver {
    pub(super) p: Pipeline,
    pub(super) core: PipelineCore,
    /// Updates of earlier sessions that no checkpoint holds.
    pub(super) earlier: EarlierSessions,
    pub(super) sums: Sums,
    pub(super) measurements: Measurements,
    pub(super) episodes: Episodes,
    pub(super) step: Step,
    /// Steps whose updates wait for their commits.
    pub(super) uncommitted: BTreeMap<u64, UpdateInputs>,
    pub(super) awaited: AwaitedGroups,
    /// The learner at work, where it has a separate thread.
    pub(super) learner_thread: LearnerThread,
    /// The version of the weights that are in use.
    pub(super) live: u64,
    pub(super) waits: Waits,
    /// Calls between owner and workers that a record has.
    pub(super) hops: Hops,
    /// Time at which groups were last taken for an update, and the counters then, if training overlaps.
    pub(super) taken: Option<(Instant, RolloutReading)>,
}

/// Runs a pipeline to its end. If it is interrupted, weights of whole steps are kept before it returns.
///
/// # Errors
/// Fails with the error of a port, if the run is stopped because its steps are bad, if it was asked to stop,
/// or if a newer owner of the run exists.
pub fn run(pipeline: Pipeline) -> Result<RunOutcome, PipelineError> {
    let _run = tracing::info_span!("run", folder = %pipeline.config.run_dir.display()).entered();
    let mut driver = Driver::begin(pipeline)?;
    match driver.run() {
        Err(PipelineError::Interrupted) => {
            let whole = driver.is_whole();
            for command in driver.on(Event::Interrupted { whole }) {
                if matches!(command, Command::Checkpoint { .. }) {
                    driver.checkpoint()?;
                }
            }
            driver.p.store.check_fence()?;
            driver.p.rollouts.save()?;
            Err(PipelineError::Interrupted)
        }
        result => result,
    }
}

impl Driver {
    /// Reads what earlier sessions did.
    fn begin(mut p: Pipeline) -> Result<Self, PipelineError> {
        let earlier = p.store.earlier(&mut p.saved)?;
        let (files, written) = RunFiles::open(&p.config.run_dir, &p.saved, &earlier, &p.bus)?;
        p.bus.record_first(Box::new(files));
        let mut state = earlier.core_state(&p.saved, &written.steps, &written.evals);
        p.bus.emit(RunEvent::Resumed {
            steps: Arc::clone(&written.steps),
            evals: Arc::clone(&written.evals),
        })?;
        let tasks = p.config.core.tasks_per_step;
        let live = lock(&p.learner).version().0;
        state.version = live;
        if let Some(overlap) = p.config.core.overlap {
            // If updates are in order, the same weights come again.
            state.draws = p.store.open_draws((!overlap.in_order).then_some(live))?;
        }
        p.resume_episodes(live)?;
        p.settle_consumed()?;
        let overlaps = p.config.core.overlap.is_some();
        let awaited =
            AwaitedGroups::restore(p.late.as_ref(), &p.store, (tasks, overlaps), &mut state)?;
        let driver = Self {
            core: PipelineCore::new(Arc::clone(&p.config.core), state),
            sums: Sums::new(p.saved.samples, &written.steps, &written.evals),
            measurements: Measurements::new(&written.evals),
            episodes: Episodes::default(),
            step: Step::default(),
            uncommitted: BTreeMap::new(),
            awaited,
            taken: None,
            learner_thread: LearnerThread::default(),
            live,
            waits: Waits::new(p.store.traces.waited_s()),
            hops: Hops::default(),
            earlier,
            p,
        };
        let (lost, first) = (driver.earlier.lost, driver.earlier.first_lost.as_ref());
        driver.warn_of_loss(lost, first)?;
        Ok(driver)
    }

    /// Carries commands out until one of them ends the run.
    fn run(&mut self) -> Result<RunOutcome, PipelineError> {
        let mut commands = VecDeque::from(self.on(Event::Begin));
        loop {
            let Some(command) = commands.pop_front() else {
                commands.extend(self.wait()?);
                continue;
            };
            if let Command::Stop(stop) = command {
                return self.stop(stop);
            }
            let _step = self.step.enter(&command);
            for event in self.carry_out(command)? {
                commands.extend(self.on(event));
            }
        }
    }

    pub(super) fn on(&mut self, event: Event) -> Vec<Command> {
        let now = self.wall_s();
        self.core.on(event, now)
    }

    /// Carries out a command, and returns the events that follow from it.
    fn carry_out(&mut self, command: Command) -> Result<Vec<Event>, PipelineError> {
        Ok(match command {
            Command::FindFirstEval(sets) => {
                self.find_first_eval(&sets)?;
                vec![Event::FirstEvalFound]
            }
            Command::Start { draws, temperature } => {
                self.start(&draws, temperature)?;
                Vec::new()
            }
            Command::Abandon { episodes } => {
                self.p.rollouts.stop(&episodes);
                Vec::new()
            }
            Command::ScoreGroup { members } => self.score_group(members)?,
            Command::Fetch { step } => vec![self.fetch(step)?],
            Command::CollectLateRewards { step, groups, wait } => {
                self.collect_late_rewards(step, &groups, wait)?
            }
            Command::LoadCommitted { step } => vec![self.load_committed(step)?],
            Command::CountSpentGroups { groups } => vec![self.count_spent_groups(&groups)?],
            Command::Score {
                step,
                groups,
                counts,
                left_out,
            } => {
                self.step.left_out.extend(left_out);
                self.score(step, &groups, counts)?
            }
            Command::InspectGroup {
                group,
                episodes,
                held,
            } => vec![self.inspect_group(group, &episodes, held)?],
            Command::Train { left_out, .. } => self.train(left_out)?,
            Command::Publish { step } => {
                self.live = self.publish(step)?;
                vec![Event::WeightsLive { version: self.live }]
            }
            Command::Commit(commit) => {
                self.commit(commit)?;
                Vec::new()
            }
            Command::Checkpoint { .. } => {
                self.checkpoint()?;
                Vec::new()
            }
            Command::Record { step, alarm } => {
                self.record(step, alarm)?;
                Vec::new()
            }
            Command::Measure { when, sets } => {
                self.measure(when, sets)?;
                if self.overlaps() && !self.learner_thread.is_busy() {
                    self.note_waits(Some(TrainerActivity::WaitsForGroups));
                }
                vec![Event::EvaluationDone]
            }
            Command::SourceDry { step } => {
                self.source_dry(step)?;
                Vec::new()
            }
            Command::Stop(_) => Vec::new(),
        })
    }

    /// Waits for episodes, or for groups where no episode runs.
    fn wait(&mut self) -> Result<Vec<Command>, PipelineError> {
        if self.overlaps() {
            return self.wait_for_any();
        }
        let all_ended = !self.episodes.is_running();
        let mut commands = self.scored_groups(all_ended)?;
        if all_ended && !commands.is_empty() {
            return Ok(commands);
        }
        if !all_ended || self.episodes.scoring == 0 {
            commands.extend(self.wait_episodes()?);
        }
        Ok(commands)
    }

    /// Waits for episodes.
    pub(super) fn wait_episodes(&mut self) -> Result<Vec<Command>, PipelineError> {
        let bus = self.p.bus.clone();
        let wall_s = (self.p.started, self.p.saved.wall_s);
        // A group that is scored meanwhile, or a reward that comes, wakes no wait: such a wait ends at its
        // first look.
        let looks = self.overlaps() && (self.episodes.scoring > 0 || self.awaited.count() > 0);
        let waker = looks.then(|| self.p.rollouts.waker());
        let (mut failed, episodes) = (Ok(()), &mut self.episodes);
        let ended = self.p.rollouts.ended(&mut |seen| {
            waker.iter().for_each(|wake| wake());
            let told = episodes.report(&bus, seen, wall_s);
            failed = std::mem::replace(&mut failed, Ok(())).and(told);
        })?;
        failed?;
        if ended.is_empty() && !self.overlaps() {
            return Err(none_runs());
        }
        let mut commands = Vec::new();
        for stored in ended {
            let ended = self.episodes.add(stored);
            commands.extend(self.on(Event::EpisodeEnded(ended)));
        }
        Ok(commands)
    }

    /// Records the start of a step, once.
    pub(super) fn begin_step(&mut self) {
        // If training overlaps, episodes begin before the step that is committed ends: see `record`.
        let begins = self.step.started.is_none();
        if !self.learner_thread.is_busy() && (begins || !self.overlaps()) {
            self.note_waits(Some(TrainerActivity::WaitsForGroups));
        }
        if self.step.started.is_none() {
            self.step.started = Some(Instant::now());
            self.step.before = self.p.rollouts.reading();
        }
    }

    fn start(&mut self, draws: &[Draw], temperature: Option<f32>) -> Result<(), PipelineError> {
        let phase = match (temperature, draws.first()) {
            (Some(_), first) => {
                self.note_waits(Some(TrainerActivity::Other));
                Phase::Evaluating(first.map_or_else(String::new, |d| d.purpose.clone()))
            }
            (None, _) => {
                self.begin_step();
                Phase::Rollout {
                    step: self.core.step() + 1,
                }
            }
        };
        if !self.learner_thread.is_busy() {
            self.emit(RunEvent::Phase(phase))?;
        }
        self.episodes.began(draws.len());
        self.note_waits(None);
        self.p.rollouts.start(draws, temperature)
    }

    /// Requests groups from the source, and keeps them until rows are made of them.
    fn fetch(&mut self, step: u64) -> Result<Event, PipelineError> {
        self.begin_step();
        self.emit(RunEvent::Phase(Phase::Rollout { step }))?;
        let core = &self.p.config.core;
        let (bus, wall_s) = (self.p.bus.clone(), self.wall_s());
        let mut told = Ok(());
        let mut tick = |done, total| {
            let seen = RolloutProgress {
                done,
                total,
                wall_s: wall_s + self.step.started.map_or(0.0, |s| s.elapsed().as_secs_f64()),
                ..RolloutProgress::default()
            };
            let event = bus.emit(RunEvent::Rollout(Box::new(seen)));
            told = std::mem::replace(&mut told, Ok(())).and(event);
        };
        let Some(source) = &mut self.p.source else {
            return Err(PipelineError::system("no source of episodes was given"));
        };
        let given = source.groups(GroupRequest {
            step,
            groups: core.tasks_per_step,
            seed: core.seed,
            max_path_tokens: self.p.config.max_context_tokens,
            algorithm: &self.p.algorithm,
            store: self.p.store.traces.as_ref(),
            learner: &mut *lock(&self.p.learner),
            tick: &mut tick,
        })?;
        told?;
        let alone = given.groups.iter().filter(|g| g.len() == 1).flatten();
        let alone = alone.filter_map(|t| Some((t.task.as_str().to_owned(), t.score()?)));
        self.step.outcomes.extend(given.outcomes);
        self.step.left_out.extend(given.left_out);
        Ok(Event::GroupsFetched {
            alone: alone.collect(),
            groups: self.episodes.keep(given.groups),
            dropped: given.dropped,
        })
    }

    /// Reads the episodes of a committed update.
    fn load_committed(&mut self, step: u64) -> Result<Event, PipelineError> {
        self.begin_step();
        self.emit(RunEvent::Phase(Phase::Rollout { step }))?;
        let groups = match self.earlier.committed.get(&step) {
            Some(batch) => self.p.store.recall(batch)?,
            None => None,
        };
        if groups.is_some() {
            self.step.recalled = self.earlier.record(step);
        }
        Ok(Event::CommittedLoaded(
            groups.map(|groups| self.episodes.keep(groups)),
        ))
    }

    /// Asks the algorithm which groups will leave the batch; the episodes are kept.
    fn count_spent_groups(&mut self, ids: &[Vec<EpisodeId>]) -> Result<Event, PipelineError> {
        let groups = self.episodes.take_groups(ids);
        let spent = self.p.algorithm.spent(&groups);
        let spent = spent.map_err(PipelineError::system)?.len();
        self.episodes.keep(groups);
        Ok(Event::SpentGroupsCounted { spent })
    }

    /// Makes rows of groups, and begins the step's record.
    fn score(
        &mut self,
        step: u64,
        ids: &[Vec<EpisodeId>],
        counts: RunCounts,
    ) -> Result<Vec<Event>, PipelineError> {
        let groups = self.episodes.take_groups(ids);
        self.since_last_score();
        self.step.record = self.rollout_record(step, &groups, counts);
        self.note_rescored(&groups);
        if !self.overlaps() {
            // Episodes that were run again are not needed any more.
            self.episodes.end_phase();
        }
        self.emit(RunEvent::Phase(Phase::Training { step }))?;
        self.step.training = Some(Instant::now());
        let curriculum = Arc::clone(self.core.curriculum());
        self.work(LearnerTask::Score { groups, curriculum })
    }

    /// Fills in what the rows of a step show.
    pub(super) fn rows_made(
        &mut self,
        groups: Vec<Vec<Trace>>,
        rows: Rows,
    ) -> Result<Event, PipelineError> {
        let staleness = self.staleness(&rows, &groups);
        let record = &mut self.step.record;
        record.rows = rows.rows.len();
        record.tokens = rows.tokens;
        record.formats = rows.formats.clone();
        record.samples = SampleStatus::of(&groups, &rows);
        record.samples.left_out(&self.step.left_out);
        record.samples.waiting = match (&self.awaited.groups, &self.p.source) {
            (Some(groups), _) => groups.waiting(),
            (None, Some(source)) => source.waiting_groups(),
            (None, None) => 0,
        };
        if let Some(earlier) = &self.step.recalled {
            record.samples = earlier.samples.clone();
        }
        record.repair = rows.report.repair.clone();
        record.staleness = staleness;
        let tokens = rows
            .rows
            .iter()
            .flat_map(|r| r.weights.iter().zip(&r.advantages));
        let trained = tokens.filter(|(weight, _)| **weight != 0.0);
        let advantages: Vec<f64> = trained.map(|(_, a)| f64::from(*a)).collect();
        record.advantages = Spread::of(&advantages);
        if !record.tokens.holds() {
            return Err(PipelineError::system(format!(
                "step {} would train tokens other than once: {:?}",
                record.step, record.tokens
            )));
        }
        let event = Event::RowsReady {
            rows: rows.rows.len(),
            trained: rows.trained.clone(),
            dropped: rows.dropped.clone(),
            sightings: rows.sightings.clone(),
        };
        (self.step.rows, self.step.groups) = (Some(rows), groups);
        Ok(event)
    }

    /// Builds the record of a step's episodes: their results, and the resources that they took.
    fn rollout_record(&self, step: u64, groups: &[Vec<Trace>], counts: RunCounts) -> StepRecord {
        let now = self.p.rollouts.reading();
        let started = self.step.started;
        let rollout_s = started.map_or(0.0, |s| s.elapsed().as_secs_f64());
        let traces = || groups.iter().flatten();
        let sampled: usize = traces().map(Trace::sampled_tokens).sum();
        let earlier = self.step.recalled.as_ref();
        StepRecord {
            step,
            rollout: EpisodeStats::of(traces()),
            failed_cause: health::cause(traces()),
            rollout_s,
            engine_busy_s: now.engine_busy_s - self.step.before.engine_busy_s,
            sampled_tokens_per_s: sampled as f64 / rollout_s.max(1e-9),
            joins: joins(traces()),
            branches: branches(traces()),
            admission: AdmissionRecord::between(
                &self.step.before.admission,
                &now.admission,
                now.preemptions.saturating_sub(self.step.before.preemptions),
            ),
            retried: earlier.map_or(counts.retried, |r| r.retried),
            recovered: earlier.map_or(counts.recovered, |r| r.recovered),
            refilled: earlier.map_or(counts.refilled, |r| r.refilled),
            not_begun: earlier.map_or(counts.not_begun, |r| r.not_begun),
            resumed: now.resumed.since(&self.step.before.resumed),
            ..StepRecord::default()
        }
    }

    /// One update on the step's rows, if there are any.
    fn train(&mut self, left_out: BTreeMap<String, usize>) -> Result<Vec<Event>, PipelineError> {
        let step = &mut self.step;
        step.record.dropped = match &step.recalled {
            Some(recalled) => recalled.dropped.clone(),
            None => left_out,
        };
        let task = LearnerTask::Update {
            rows: step.rows.take().map(Box::new),
            spec: Box::new(self.p.algorithm.loss().clone()),
            record: Box::new(step.record.clone()),
        };
        self.work(task)
    }

    /// Fills in what an update took.
    pub(super) fn updated(&mut self) -> Event {
        let step = &mut self.step;
        step.record.train_s = step.training.map_or(0.0, |t| t.elapsed().as_secs_f64());
        Event::UpdateDone(Box::new(step.record.clone()))
    }

    /// Brings the weights to the engine and returns their version. The step's commit is prepared here and
    /// made once the core asks for it.
    fn publish(&mut self, step: u64) -> Result<u64, PipelineError> {
        self.note_waits(Some(TrainerActivity::Other));
        let publishing = Instant::now();
        let (version, weights) = {
            let mut learner = lock(&self.p.learner);
            (learner.version(), learner.weights()?)
        };
        self.p.store.check_fence()?;
        self.p.transport.publish(version, weights)?;
        let wall_s = self.wall_s();
        let record = &mut self.step.record;
        record.publish_s = publishing.elapsed().as_secs_f64();
        record.task_shares = self.core.task_shares();
        record.wall_s = wall_s;
        self.step.live = Some(Instant::now());
        let order = self.step.groups.iter().flatten();
        let made = UpdateInputs {
            order: order.map(|t| t.episode.clone()).collect(),
            outcomes: std::mem::take(&mut self.step.outcomes),
            record: record.clone(),
            consumed: None,
        };
        self.uncommitted.insert(step, made);
        // A recalled update has its commit already. A checkpoint that follows must count it.
        let recalled = self.step.recalled.is_some();
        if let Some(batch) = self.earlier.committed.get(&step).filter(|_| recalled) {
            self.sums.count(batch.episodes.len(), batch.dropped.len());
        }
        Ok(version.0)
    }

    /// Saves weights, optimizer and a state of fixed size.
    fn checkpoint(&mut self) -> Result<(), PipelineError> {
        self.emit(RunEvent::Phase(Phase::Saving))?;
        let saved = self.p.saved.now(
            self.core.step(),
            self.wall_s(),
            (**self.core.curriculum()).clone(),
            self.p.config.recipe.clone(),
            self.sums.samples,
        );
        let state = serde_json::to_value(saved).map_err(PipelineError::system)?;
        self.p.store.check_fence()?;
        let began = Instant::now();
        lock(&self.p.learner).save(self.core.step(), state)?;
        let saved = self.p.rollouts.save();
        self.waits.disk.saved(began);
        saved
    }

    /// Ends the step: its record goes over the bus.
    fn record(&mut self, step: u64, alarm: Option<Alarm>) -> Result<(), PipelineError> {
        let done = std::mem::take(&mut self.step);
        let mut record = done.record;
        record.waits = self.take_waits();
        record.hops = self.take_hops();
        record.checkpoint_s = done.live.map_or(0.0, |t| t.elapsed().as_secs_f64());
        if done.recalled.is_some() {
            self.uncommitted.remove(&step);
            self.earlier.committed.remove(&step);
        }
        self.sums.add(&record);
        self.emit(RunEvent::Step(Arc::new(record)))?;
        if let Some(Alarm::Warning(text)) = alarm {
            self.emit(RunEvent::Warning(text))?;
        }
        if self.overlaps() {
            self.begin_step();
        }
        Ok(())
    }

    /// No group came in time: the training so far is kept, and a run without any step fails.
    fn source_dry(&mut self, step: u64) -> Result<(), PipelineError> {
        let why = self.p.source.as_ref().map(|s| s.why_dry());
        let why = why.unwrap_or_default();
        self.step = Step::default();
        if step == 0 {
            return Err(PipelineError::input(format!(
                "there was nothing to train on: {why}"
            )));
        }
        self.emit(RunEvent::SourceDry { step, why })
    }

    fn stop(&mut self, stop: StopReason) -> Result<RunOutcome, PipelineError> {
        match stop {
            StopReason::Done => self.end(),
            StopReason::Bad(why) => Err(self.stopped(&why)),
            StopReason::Interrupted => Err(PipelineError::Interrupted),
        }
    }

    pub(super) fn warn_of_loss(
        &self,
        lost: usize,
        first: Option<&EpisodeId>,
    ) -> Result<(), PipelineError> {
        if lost == 0 {
            return Ok(());
        }
        let first = first.map_or_else(String::new, |e| format!(", {e} the first of them"));
        self.emit(RunEvent::Warning(format!(
            "{lost} trained episodes are gone from the store{first}: the weights keep what they taught, but they \
             cannot be shown"
        )))
    }

    pub(super) fn emit(&self, event: RunEvent) -> Result<(), PipelineError> {
        self.p.bus.emit(event)
    }

    /// Seconds of the run, earlier sessions included.
    pub(super) fn wall_s(&self) -> f64 {
        self.p.saved.wall_s + self.p.started.elapsed().as_secs_f64()
    }

    pub(super) fn run_dir(&self) -> &Path {
        &self.p.config.run_dir
    }

    pub(super) fn stored(&self, episode: &EpisodeId) -> Result<Option<Trace>, PipelineError> {
        let store = self.p.store.traces.as_ref();
        let trace = store.get(episode).map_err(PipelineError::system)?;
        trace.map(|trace| completed(store, trace)).transpose()
    }
}
