//! The decisions of the training loop, without clock, threads or I/O: events in, commands out.
//!
//! A driver carries out the commands in their order and reports the results. The decisions of the core are a
//! function of its configuration, of the state that it began with and of the events.
//!
//! One step passes through the stages `Rollout` (or `Fetching`, `Recalling` or `Collecting`), `Scoring`,
//! `Training` and `Publishing`; held-out measurements run between steps. If generation overlaps with
//! training, the episodes of later updates run during all stages: see `async_groups`. The caller passes the
//! time as `now`, the seconds of the run over all sessions.

mod async_groups;
#[cfg(test)]
mod async_groups_tests;
mod config;
mod groups;
mod messages;
mod over_sample;
#[cfg(test)]
mod over_sample_tests;
mod slots;
#[cfg(test)]
mod tests;

use crate::curriculum::{Curriculum, CurriculumSample, DrawRequest};
use crate::health::Alarm;
use crate::record::StepRecord;
use crate::schedule::{Draw, eval_episodes, other_tasks, refill_seed, train_groups, uniform_tasks};
use async_groups::{AsyncGroups, GroupValue};
use sinew_algo::AdaptiveConfig;
use sinew_algo::trust::Sighting;
use sinew_types::{EpisodeId, GroupId, mix_seed};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

pub use config::{
    CoreConfig, EvalConfig, EvalTime, Goal, LateGroups, Overlap, SampleKind, TaskSampling,
};
pub use messages::{
    Command, CoreState, EvalSet, Event, OpenDraws, RunCounts, StopReason, UpdateCommit,
};
pub use slots::{EpisodeResult, EpisodeSlots, GroupProbe, SlotActions, TaskOutcome, task_outcome};

/// The training episodes of a step while they run.
#[derive(Debug, Default)]
struct Rollout {
    /// Its episodes and their attempts.
    slots: EpisodeSlots,
    /// Tasks drawn so far.
    used: Vec<usize>,
    /// Number of rounds of groups after the first one.
    rounds: u32,
    /// Number of groups that replace others without a signal; the record of the step reports it.
    refilled: usize,
    /// Curriculum after the draws; counts once the step is done.
    curriculum: Option<Arc<Curriculum>>,
    /// Episodes whose rewards did not come in time.
    late: BTreeMap<EpisodeId, String>,
    /// Task and reward of late episodes that are the only ones of their group.
    alone: Vec<(String, f64)>,
}

/// A held-out measurement whose sets of episodes run one after the other.
#[derive(Debug)]
struct Evaluation {
    when: EvalTime,
    slots: EpisodeSlots,
    /// Sets that have not started.
    waiting: VecDeque<EvalSet>,
    /// Episodes of the sets that are complete.
    done: Vec<Vec<EpisodeId>>,
}

/// The episodes of a step after its rows were made.
#[derive(Debug, Default)]
struct Batch {
    /// Commit of the step.
    commit: UpdateCommit,
    /// Episodes left out before rows were made.
    dropped: BTreeMap<EpisodeId, String>,
    /// Whether the update repeats a committed one, so that its curriculum is the committed one.
    recalled: bool,
    /// Outcomes from which the curriculum learns.
    outcomes: Vec<CurriculumSample>,
    /// Task and reward of episodes without a group, for the baselines of later ones.
    alone: Vec<(String, f64)>,
}

/// Stage of the core, named after the event that it waits for.
#[derive(Debug)]
enum Stage {
    /// Waits for [`Event::Begin`].
    New,
    /// Waits for the first measurement of a resumed run.
    Reviewing,
    Evaluating(Evaluation),
    Measuring(EvalTime),
    Rollout(Rollout),
    /// Waits until groups have their rewards from outside.
    Settling(Rollout),
    /// Waits until enough of the groups that overlap with training are complete.
    Collecting,
    /// Waits for the groups of a source.
    Fetching,
    /// Waits for the episodes of a committed update.
    Recalling,
    Scoring(Batch),
    Training(Batch),
    /// Waits for the last episode that the old weights still sample.
    Holding(Batch, Option<Alarm>),
    /// Waits until the engine samples with the new weights.
    Publishing(Batch, Option<Alarm>),
    Stopped,
}

/// The state machine of a run.
#[derive(Debug)]
pub struct PipelineCore {
    config: Arc<CoreConfig>,
    state: CoreState,
    /// The last step that a checkpoint contains.
    saved: u64,
    /// Updates whose commits wait while the health of the run is in doubt.
    held_back: Vec<UpdateCommit>,
    /// Whether more groups may be started: fewer than the limit wait for rewards.
    may_begin: bool,
    /// Groups that overlap with training; `None` until the first ones start.
    ahead: Option<AsyncGroups>,
    stage: Stage,
}

impl PipelineCore {
    /// Creates the core of a new run, or of one that resumes from `state`.
    pub fn new(config: Arc<CoreConfig>, state: CoreState) -> Self {
        Self {
            config,
            saved: state.step,
            state,
            held_back: Vec::new(),
            may_begin: true,
            ahead: None,
            stage: Stage::New,
        }
    }

    /// Number of steps that are contained in the weights.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// The last step that a checkpoint contains.
    pub fn saved_step(&self) -> u64 {
        self.saved
    }

    /// Curriculum for a checkpoint taken now.
    pub fn curriculum(&self) -> &Arc<Curriculum> {
        &self.state.curriculum
    }

    /// Handles an event at `now`, seconds of the run. Returns the commands that follow, in order. An event
    /// that the core does not wait for has no effect.
    pub fn on(&mut self, event: Event, now: f64) -> Vec<Command> {
        if let Event::Interrupted { whole } = event {
            return self.interrupted(whole);
        }
        if self.is_beside(&event) {
            return self.overlapping(event, now);
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Stopped);
        match (stage, event) {
            (Stage::New, Event::Begin) => self.begin(),
            (Stage::Reviewing, Event::FirstEvalFound) => self.between(now),
            (Stage::Evaluating(evaluation), Event::EpisodeEnded(ended)) => {
                self.evaluated(evaluation, ended)
            }
            (Stage::Evaluating(mut evaluation), Event::GroupScored { group, outcomes }) => {
                evaluation.slots.scored(&group, outcomes);
                self.set_done(evaluation)
            }
            (Stage::Measuring(when), Event::EvaluationDone) => self.measured(when, now),
            (Stage::Rollout(rollout), event) => self.running(rollout, event),
            (
                Stage::Settling(mut rollout),
                Event::LateRewardsCollected {
                    groups,
                    dropped,
                    alone,
                    waiting,
                    may_begin,
                },
            ) => {
                self.may_begin = may_begin;
                rollout.alone = alone;
                rollout.late.extend(dropped);
                self.settled(rollout, groups, waiting, now)
            }
            (
                Stage::Fetching,
                Event::GroupsFetched {
                    groups,
                    dropped,
                    alone,
                },
            ) => self.given(groups, dropped, alone),
            (Stage::Recalling, Event::CommittedLoaded(groups)) => self.recalled(groups),
            (
                Stage::Scoring(batch),
                Event::RowsReady {
                    rows: _,
                    trained,
                    dropped,
                    sightings,
                },
            ) => self.scored(batch, trained, dropped, sightings),
            (Stage::Training(batch), Event::UpdateDone(record)) => self.updated(batch, &record),
            (Stage::Publishing(batch, alarm), Event::WeightsLive { version }) => {
                self.live(batch, alarm, version, now)
            }
            (stage, _) => {
                self.stage = stage;
                Vec::new()
            }
        }
    }

    /// Handles an event about the episodes of a step.
    fn running(&mut self, rollout: Rollout, event: Event) -> Vec<Command> {
        match event {
            Event::EpisodeEnded(ended) => self.rolled_out(rollout, ended),
            Event::GroupScored { group, outcomes } => self.group_scored(rollout, &group, outcomes),
            Event::GroupInspected {
                group,
                signal,
                stored,
                ..
            } => self.decided(rollout, &group, signal, stored),
            Event::SpentGroupsCounted { spent } => self.compared(rollout, spent),
            _ => {
                self.stage = Stage::Rollout(rollout);
                Vec::new()
            }
        }
    }

    /// Whether an event is about the groups that overlap with training.
    fn is_beside(&self, event: &Event) -> bool {
        let ahead = self.ahead.as_ref();
        ahead.is_some_and(|ahead| match event {
            Event::EpisodeEnded(ended) => ahead.owns(&ended.episode),
            Event::GroupScored { group, .. } | Event::GroupInspected { group, .. } => {
                ahead.owns_group(group)
            }
            Event::LateRewardsCollected { .. } => true,
            _ => false,
        })
    }

    /// Handles an event about the groups that overlap with training.
    fn overlapping(&mut self, event: Event, now: f64) -> Vec<Command> {
        match event {
            Event::EpisodeEnded(ended) => self.async_ended(ended),
            Event::GroupScored { group, outcomes } => self.async_scored(&group, outcomes),
            Event::GroupInspected {
                group,
                signal,
                oldest,
                stored,
                alone,
            } => {
                let value = GroupValue {
                    signal,
                    oldest,
                    alone,
                };
                self.weighed(&group, value, stored)
            }
            Event::LateRewardsCollected {
                groups, dropped, ..
            } => self.async_settled(groups, dropped, now),
            _ => Vec::new(),
        }
    }

    /// Returns the first command: start of a measurement, or the search for a stored one.
    fn begin(&mut self) -> Vec<Command> {
        match (self.config.goal, self.state.step) {
            (Goal::Measure, _) => self.evaluate(EvalTime::Now),
            (Goal::Train, 0) => self.evaluate(EvalTime::Before),
            (Goal::Train, _) => {
                self.stage = Stage::Reviewing;
                vec![Command::FindFirstEval(self.sets(EvalTime::Before))]
            }
        }
    }

    /// Returns the episodes of a measurement: sampled ones, and greedy ones if the recipe asks for them.
    fn sets(&self, when: EvalTime) -> Vec<EvalSet> {
        let (eval, step) = (&self.config.eval, self.state.step);
        let tasks = eval.tasks.min(self.config.held_out_tasks);
        let set = |purpose: &str, step: u64, episodes: usize, temperature: f32| {
            // A run may end several times, each time with other weights.
            let ids = if purpose.ends_with("-after") {
                format!("{purpose}-{step}")
            } else {
                purpose.to_owned()
            };
            let ids = (ids.as_str(), purpose);
            EvalSet {
                draws: eval_episodes(self.config.seed, ids, tasks, episodes),
                purpose: purpose.to_owned(),
                temperature,
            }
        };
        let (sampled, greedy, step) = match when {
            EvalTime::Before => ("eval-before".to_owned(), Some("greedy-before"), 0),
            EvalTime::During => (format!("eval-{step:05}"), None, step),
            EvalTime::After => ("eval-after".to_owned(), Some("greedy-after"), step),
            EvalTime::Now => ("eval".to_owned(), Some("greedy"), 0),
        };
        let greedy = greedy.filter(|_| eval.greedy);
        let mut sets = vec![set(
            &sampled,
            step,
            eval.episodes_per_task,
            eval.temperature,
        )];
        sets.extend(greedy.map(|purpose| set(purpose, step, 1, 0.0)));
        sets
    }

    /// Begins a measurement.
    fn evaluate(&mut self, when: EvalTime) -> Vec<Command> {
        let evaluation = Evaluation {
            when,
            slots: EpisodeSlots::default(),
            waiting: self.sets(when).into(),
            done: Vec::new(),
        };
        self.next_set(evaluation)
    }

    /// Starts the next set of episodes, or summarizes the measurement after the last set.
    fn next_set(&mut self, mut evaluation: Evaluation) -> Vec<Command> {
        while let Some(set) = evaluation.waiting.pop_front() {
            if set.draws.is_empty() {
                evaluation.done.push(Vec::new());
                continue;
            }
            evaluation.slots = EpisodeSlots::new(0);
            evaluation.slots.add(&set.draws);
            self.stage = Stage::Evaluating(evaluation);
            return vec![Command::Start {
                draws: set.draws,
                temperature: Some(set.temperature),
            }];
        }
        let (when, sets) = (evaluation.when, evaluation.done);
        self.stage = Stage::Measuring(when);
        vec![Command::Measure { when, sets }]
    }

    /// Handles the end of a held-out episode. An episode that the system failed in an earlier session is run
    /// again once.
    fn evaluated(&mut self, mut evaluation: Evaluation, ended: EpisodeResult) -> Vec<Command> {
        let temperature = match evaluation.done.len() {
            0 => self.config.eval.temperature,
            _ => 0.0,
        };
        let follows = evaluation.slots.ended(ended);
        let mut commands = follow(follows, Some(temperature));
        commands.extend(self.set_done(evaluation));
        commands
    }

    /// Starts the next set after all episodes of a set have ended and are scored.
    fn set_done(&mut self, mut evaluation: Evaluation) -> Vec<Command> {
        if !evaluation.slots.is_complete() {
            self.stage = Stage::Evaluating(evaluation);
            return Vec::new();
        }
        evaluation.done.push(evaluation.slots.episodes());
        self.next_set(evaluation)
    }

    /// Continues after a measurement.
    fn measured(&mut self, when: EvalTime, now: f64) -> Vec<Command> {
        match when {
            EvalTime::Before => self.between(now),
            EvalTime::During => {
                self.state.measured_at = self.state.step;
                self.next_step(now)
            }
            EvalTime::After | EvalTime::Now => vec![Command::Stop(StopReason::Done)],
        }
    }

    /// Starts a measurement during training if it is due and not yet done. A run may have ended between a
    /// checkpoint and its measurement.
    fn between(&mut self, now: f64) -> Vec<Command> {
        let (every, step) = (self.config.eval.every, self.state.step);
        let due = every > 0 && step > 0 && step.is_multiple_of(every);
        if due && step < self.config.steps && self.state.measured_at < step {
            return self.evaluate(EvalTime::During);
        }
        self.next_step(now)
    }

    /// Starts a step, repeats a committed one, or ends the run.
    fn next_step(&mut self, now: f64) -> Vec<Command> {
        let out_of_time = self.config.max_wall_s.is_some_and(|limit| now >= limit);
        if self.state.step >= self.config.steps || out_of_time {
            return self.end();
        }
        let step = self.state.step + 1;
        if self.state.committed.contains_key(&step) {
            self.stage = Stage::Recalling;
            return vec![Command::LoadCommitted { step }];
        }
        self.draw_step()
    }

    /// Ends a run: saves a checkpoint and measures. If the last steps were bad, it stops without either, so
    /// that a resumed run repeats them.
    fn end(&mut self) -> Vec<Command> {
        if let Some(ahead) = &mut self.ahead {
            ahead.close();
        }
        if let Some(why) = self.state.health.bad() {
            return vec![Command::Stop(StopReason::Bad(why.to_owned()))];
        }
        let mut commands = self.checkpoint();
        commands.extend(self.evaluate(EvalTime::After));
        commands
    }

    /// Starts a step with new episodes.
    fn draw_step(&mut self) -> Vec<Command> {
        let step = self.state.step + 1;
        if self.config.samples == SampleKind::Given {
            self.stage = Stage::Fetching;
            return vec![Command::Fetch { step }];
        }
        if self.config.overlap.is_some() {
            return self.collect();
        }
        let rollout = Rollout {
            slots: EpisodeSlots::new(self.config.retries),
            ..Rollout::default()
        };
        if !self.may_begin {
            return self.settle(rollout, false);
        }
        if self.config.over_sample > 0 {
            return self.start_more(rollout);
        }
        let mut commands = self.start(rollout, self.config.tasks_per_step);
        commands.extend(self.begin_again(step));
        commands
    }

    /// Starts `count` more groups of the step.
    fn start(&mut self, mut rollout: Rollout, count: usize) -> Vec<Command> {
        let (step, seed) = (self.state.step + 1, self.config.seed);
        let first = rollout.used.len() as u64;
        let draw_seed = match first {
            0 => seed,
            used => mix_seed(refill_seed(seed, step), used),
        };
        let tasks = match &self.config.tasks {
            TaskSampling::Shares { tasks, adaptive } => {
                // The draws of this step count once the step is done.
                let next = rollout
                    .curriculum
                    .get_or_insert_with(|| self.state.curriculum.clone());
                let request = DrawRequest {
                    seed,
                    draw_seed,
                    step,
                    count,
                };
                Arc::make_mut(next).draw(tasks, adaptive.as_ref(), request)
            }
            TaskSampling::Uniform if first == 0 => {
                uniform_tasks(self.config.train_tasks, draw_seed, step, count)
            }
            TaskSampling::Uniform => {
                other_tasks(self.config.train_tasks, draw_seed, &rollout.used, count)
            }
        };
        let groups = train_groups(
            seed,
            step,
            (first, &tasks),
            self.config.group_size,
            self.config.draws_per_step(),
        );
        rollout.used.extend(tasks);
        let draws: Vec<Draw> = groups.into_iter().flatten().collect();
        let draws = rollout.slots.add_first(&draws, self.config.stop_decided);
        self.stage = Stage::Rollout(rollout);
        vec![Command::Start {
            draws,
            temperature: None,
        }]
    }

    /// Handles the end of a training episode. Once all episodes have ended and are scored, the groups are
    /// compared if refill rounds are left; otherwise rows are made.
    fn rolled_out(&mut self, mut rollout: Rollout, ended: EpisodeResult) -> Vec<Command> {
        let was_complete = rollout.slots.is_complete();
        let follows = rollout.slots.ended(ended);
        let mut commands = follow(follows, None);
        commands.extend(self.went_on(rollout, was_complete));
        commands
    }

    /// Handles the score of a training group.
    fn group_scored(
        &mut self,
        mut rollout: Rollout,
        group: &GroupId,
        outcomes: BTreeMap<EpisodeId, TaskOutcome>,
    ) -> Vec<Command> {
        let was_complete = rollout.slots.is_complete();
        rollout.slots.scored(group, outcomes);
        self.went_on(rollout, was_complete)
    }

    /// Handles the value of the first episodes of a group: the other episodes start, or the group is
    /// complete.
    fn decided(
        &mut self,
        mut rollout: Rollout,
        group: &GroupId,
        signal: bool,
        stored: Vec<EpisodeId>,
    ) -> Vec<Command> {
        let was_complete = rollout.slots.is_complete();
        if signal {
            let draws = rollout.slots.release(group);
            self.stage = Stage::Rollout(rollout);
            return start_more(draws);
        }
        rollout.slots.cut(group, stored);
        self.went_on(rollout, was_complete)
    }

    /// Compares groups or makes rows, if the rollout became complete by the last event.
    fn went_on(&mut self, mut rollout: Rollout, was_complete: bool) -> Vec<Command> {
        let mut commands: Vec<Command> = self.stop_rest(&mut rollout).into_iter().collect();
        commands.extend(self.go_on(rollout, was_complete));
        commands
    }

    fn go_on(&mut self, rollout: Rollout, was_complete: bool) -> Vec<Command> {
        let complete = rollout.slots.is_complete() && !was_complete;
        if complete && self.config.late_rounds.is_some() {
            return self.settle(rollout, false);
        }
        if complete && rollout.rounds >= self.config.refill {
            let groups = rollout.slots.groups();
            return self.score_rollout(rollout, groups);
        }
        let groups = complete.then(|| rollout.slots.groups());
        self.stage = Stage::Rollout(rollout);
        let compare = groups.map(|groups| Command::CountSpentGroups { groups });
        compare.into_iter().collect()
    }

    /// Replaces groups that will leave the batch, or makes rows if enough groups are left.
    fn compared(&mut self, mut rollout: Rollout, spent: usize) -> Vec<Command> {
        if !rollout.slots.is_complete() || rollout.rounds >= self.config.refill {
            self.stage = Stage::Rollout(rollout);
            return Vec::new();
        }
        let groups = rollout.slots.groups().len();
        let left = groups.saturating_sub(spent);
        let missing = self.config.tasks_per_step.saturating_sub(left);
        if missing == 0 {
            let groups = rollout.slots.groups();
            return self.score_rollout(rollout, groups);
        }
        rollout.rounds += 1;
        rollout.refilled += missing;
        self.start(rollout, missing)
    }

    /// Records the trained and the left-out episodes, and starts training.
    fn scored(
        &mut self,
        mut batch: Batch,
        trained: Vec<EpisodeId>,
        dropped: BTreeMap<EpisodeId, String>,
        sightings: Vec<Sighting>,
    ) -> Vec<Command> {
        if !batch.recalled {
            Arc::make_mut(&mut batch.commit.curriculum).saw(sightings);
        }
        batch.commit.trained = trained;
        batch.commit.dropped = dropped;
        batch.commit.dropped.append(&mut batch.dropped);
        let mut left_out = BTreeMap::new();
        for reason in batch.commit.dropped.values() {
            *left_out.entry(reason.clone()).or_default() += 1;
        }
        self.stage = Stage::Training(batch);
        vec![Command::Train {
            step: self.state.step + 1,
            left_out,
        }]
    }

    /// Handles the end of an update: updates health and curriculum, and publishes the weights.
    fn updated(&mut self, mut batch: Batch, record: &StepRecord) -> Vec<Command> {
        let mut alarm = self.state.health.step(record);
        // Scores of others may come later, or never: those of a run's own rewards are there.
        if self.config.samples == SampleKind::Run && !self.config.is_late() {
            alarm = self.state.health.scores(record).or(alarm);
        }
        let learns = match &self.config.tasks {
            TaskSampling::Shares { tasks, adaptive } => adaptive.as_ref().map(|a| (tasks, a)),
            TaskSampling::Uniform => None,
        };
        if let (Some((tasks, config)), false) = (learns, batch.recalled) {
            let curriculum = Arc::make_mut(&mut batch.commit.curriculum);
            curriculum.learn(tasks, config, &batch.outcomes);
        }
        for (task, reward) in &batch.alone {
            Arc::make_mut(&mut batch.commit.curriculum).reward_alone(task, *reward);
        }
        self.state.curriculum = batch.commit.curriculum.clone();
        if self.holds() {
            self.stage = Stage::Holding(batch, alarm);
            return Vec::new();
        }
        self.stage = Stage::Publishing(batch, alarm);
        vec![Command::Publish {
            step: self.state.step + 1,
        }]
    }

    /// Ends a step: commit, checkpoint if one is due, record. A commit waits while the run's health is in
    /// doubt, so that steps which have to be done again are never committed.
    fn live(&mut self, batch: Batch, alarm: Option<Alarm>, version: u64, now: f64) -> Vec<Command> {
        self.state.version = version;
        self.state.step += 1;
        let step = self.state.step;
        if !batch.recalled {
            self.held_back.push(batch.commit);
        }
        self.state.committed.remove(&step);
        // Groups that the new weights sample begin first.
        self.stage = Stage::Collecting;
        let mut commands = self.admit();
        self.stage = Stage::Stopped;
        if self.state.health.bad().is_none() {
            // Steps that have to be done again are not committed.
            commands.extend(self.commits());
            let due = step.is_multiple_of(self.config.checkpoint_every);
            if due || step == self.config.steps {
                commands.extend(self.checkpoint());
            }
        }
        let stop = match &alarm {
            Some(Alarm::Stop(why)) => Some(StopReason::Bad(why.clone())),
            _ => None,
        };
        commands.push(Command::Record { step, alarm });
        match stop {
            Some(stop) => commands.push(Command::Stop(stop)),
            None => commands.extend(self.between(now)),
        }
        commands
    }

    /// Saves a checkpoint, unless the last one contains all steps.
    fn checkpoint(&mut self) -> Vec<Command> {
        if self.saved >= self.state.step {
            return Vec::new();
        }
        self.saved = self.state.step;
        vec![Command::Checkpoint { step: self.saved }]
    }

    /// Saves the complete steps of an interrupted run. A step between its update and its commit is repeated
    /// later.
    fn interrupted(&mut self, whole: bool) -> Vec<Command> {
        // A step between an update and its commit is not whole.
        let in_step = matches!(self.stage, Stage::Publishing(..) | Stage::Holding(..));
        self.stage = Stage::Stopped;
        let mut commands = if whole && !in_step && self.state.health.bad().is_none() {
            self.checkpoint()
        } else {
            Vec::new()
        };
        commands.push(Command::Stop(StopReason::Interrupted));
        commands
    }

    /// Returns the settings of adaptive sampling, if tasks are drawn with it.
    fn adaptive(&self) -> Option<&AdaptiveConfig> {
        match &self.config.tasks {
            TaskSampling::Shares { adaptive, .. } => adaptive.as_ref(),
            TaskSampling::Uniform => None,
        }
    }

    /// Returns the share of each task type in the next draw, with adaptive sampling.
    pub fn task_shares(&self) -> BTreeMap<String, f64> {
        match (&self.config.tasks, self.adaptive()) {
            (TaskSampling::Shares { tasks, .. }, Some(config)) => {
                self.state.curriculum.shares(config, tasks)
            }
            _ => BTreeMap::new(),
        }
    }
}

/// Turns the actions after an episode's end into commands.
fn follow(follows: SlotActions, temperature: Option<f32>) -> Vec<Command> {
    let again = follows.again.map(|draw| Command::Start {
        draws: vec![draw],
        temperature,
    });
    let group = follows.group.map(|members| Command::ScoreGroup { members });
    let decide = follows.decide.map(|decide| Command::InspectGroup {
        group: decide.group,
        episodes: decide.episodes,
        held: decide.held,
    });
    let more = start_more(follows.more);
    let first = again.into_iter().chain(group).chain(decide);
    first.chain(more).collect()
}

/// Starts further training episodes, if there are any.
fn start_more(draws: Vec<Draw>) -> Vec<Command> {
    let start = (!draws.is_empty()).then_some(Command::Start {
        draws,
        temperature: None,
    });
    start.into_iter().collect()
}
