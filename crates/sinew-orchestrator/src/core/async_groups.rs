//! Generation during training: groups that run, and groups that wait for their update.
//!
//! Each group runs the task of one draw, and a draw is a function of the run's seed. A clock decides only
//! which groups an update takes, and the update's commit names them. An update can therefore be repeated bit
//! for bit from its commit, and a resumed session starts each draw again that no commit names.
//!
//! One rule bounds how old samples are, in optimizer updates. A group is started only while the groups that
//! run or wait fit into the updates that may be `max_staleness` ahead. A group whose episodes took long may
//! still have older tokens when its update comes; the group is then left out with the reason. A group
//! without a training signal (equal rewards, or too many failed episodes) is replaced at once, at most
//! `algorithm.refill` times the groups of a step for each update; further groups without a signal fill a
//! place in the update.
//!
//! A group that waits for rewards from outside does not count against this limit: other groups are started
//! and trained meanwhile, see `late`.

mod late;

use super::config::{CoreConfig, Overlap, TaskSampling};
use super::messages::{Command, OpenDraws, RunCounts, UpdateCommit};
use super::slots::{EpisodeResult, EpisodeSlots, SlotActions, TaskOutcome};
use super::{Batch, PipelineCore, Stage};
use crate::curriculum::{Curriculum, DrawRequest};
use crate::schedule::{Draw, draw_of, train_groups, uniform_tasks};
use crate::status::{BEHIND, came_late};
use sinew_types::{EpisodeId, GroupId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Value of a group for training.
#[derive(Debug)]
pub(super) struct GroupValue {
    /// Whether the group has a training signal: the algorithm does not drop it, for equal rewards or for too
    /// many failed episodes.
    pub(super) signal: bool,
    /// The oldest weights version that sampled a token of the group; `None` if no token was sampled.
    pub(super) oldest: Option<u64>,
    /// Task and reward of the only episode of a group, if its reward came from outside.
    pub(super) alone: Option<(String, f64)>,
}

/// A group whose episodes have all ended and are scored.
#[derive(Debug)]
struct ScoredSlots {
    slots: EpisodeSlots,
    value: GroupValue,
}

/// Chooses the task of each draw, in the order of the draws.
#[derive(Debug, Default)]
struct Drawer {
    /// Curriculum for tasks with fixed shares; it draws one block of draws, those of one step, at a time.
    curriculum: Curriculum,
    blocks: u64,
    tasks: BTreeMap<u64, usize>,
    /// Curriculum with adaptive shares: that of the last commit, with the draws since.
    adapted: Arc<Curriculum>,
}

impl Drawer {
    /// Returns the task of a draw with adaptive shares, after it has chosen the tasks of all earlier draws.
    fn draw_adaptive(&mut self, config: &CoreConfig, draw: u64) -> Option<usize> {
        let TaskSampling::Shares { tasks, adaptive } = &config.tasks else {
            return None;
        };
        let adaptive = adaptive.as_ref()?;
        let adapted = Arc::make_mut(&mut self.adapted);
        Some(adapted.task_of(tasks, adaptive, config.seed, draw))
    }

    /// Returns the task of a draw. Callers ask for draws in ascending order.
    fn task(&mut self, config: &CoreConfig, draw: u64) -> usize {
        let TaskSampling::Shares { tasks, adaptive } = &config.tasks else {
            let one = uniform_tasks(config.train_tasks, config.seed, draw + 1, 1);
            return one.first().copied().unwrap_or(0);
        };
        if adaptive.is_some() {
            return self.draw_adaptive(config, draw).unwrap_or(0);
        }
        let count = config.tasks_per_step.max(1);
        while self.blocks * count as u64 <= draw {
            let request = DrawRequest {
                seed: config.seed,
                draw_seed: config.seed,
                step: self.blocks + 1,
                count,
            };
            let first = self.blocks * count as u64;
            let drawn = self.curriculum.draw(tasks, None, request);
            self.tasks.extend((first..).zip(drawn));
            self.blocks += 1;
        }
        self.tasks = self.tasks.split_off(&draw);
        self.tasks.get(&draw).copied().unwrap_or(0)
    }
}

/// Training groups between their first episode and their update.
#[derive(Debug, Default)]
pub(super) struct AsyncGroups {
    drawer: Drawer,
    /// Draws of earlier sessions, which are started before new ones.
    again: VecDeque<u64>,
    next: u64,
    /// Groups by draw that run, are being scored or inspected, or wait for rewards.
    open: BTreeMap<u64, EpisodeSlots>,
    /// Groups by draw that wait for their update.
    complete: BTreeMap<u64, ScoredSlots>,
    /// Draws of open groups whose episodes have ended and wait for rewards.
    waiting: BTreeSet<u64>,
    /// Number of groups that were left out since the last update.
    given_up: usize,
    /// The draws of open groups, by their names and by their episodes.
    groups: HashMap<GroupId, u64>,
    episodes: HashMap<EpisodeId, u64>,
    /// Episodes that were left out since the last update, with the reason.
    dropped: BTreeMap<EpisodeId, String>,
    /// True once no further group is started, because the run ends.
    closed: bool,
}

/// The groups that the next update would train.
#[derive(Debug, Default)]
struct UpdateChoice {
    draws: Vec<u64>,
    /// Number of chosen draws without a training signal that were replaced by others.
    replaced: usize,
    /// Number of filled places of the update.
    filled: usize,
}

impl AsyncGroups {
    /// Groups of a session that begins with the curriculum of the last commit. Draws that an earlier session
    /// has begun take their tasks now: later, estimates of another commit would choose them.
    pub(super) fn new(draws: OpenDraws, curriculum: &Arc<Curriculum>, config: &CoreConfig) -> Self {
        let mut drawer = Drawer {
            adapted: Arc::clone(curriculum),
            ..Drawer::default()
        };
        if let Some(last) = draws.next.checked_sub(1) {
            drawer.draw_adaptive(config, last);
        }
        Self {
            drawer,
            again: draws.open.into(),
            next: draws.next,
            dropped: draws.dropped,
            ..Self::default()
        }
    }

    pub(super) fn owns(&self, episode: &EpisodeId) -> bool {
        self.episodes.contains_key(episode)
    }

    pub(super) fn owns_group(&self, group: &GroupId) -> bool {
        self.groups.contains_key(group)
    }

    /// Whether no group is running.
    pub(super) fn is_quiet(&self) -> bool {
        self.open.is_empty()
    }

    /// Stops starting groups.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    /// Starts the next group and returns its episodes.
    fn begin(&mut self, config: &CoreConfig) -> Vec<Draw> {
        let draw = self.again.pop_front().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        let task = self.drawer.task(config, draw);
        // The group is that of step `draw + 1` with one group: the number of the draw is that of the step
        // before.
        let groups = train_groups(config.seed, draw + 1, (0, &[task]), config.group_size, 1);
        let draws: Vec<Draw> = groups.into_iter().flatten().collect();
        let mut slots = EpisodeSlots::new(config.retries);
        let started = slots.add_first(&draws, config.stop_decided);
        self.open.insert(draw, slots);
        if let Some(one) = draws.first() {
            self.groups.insert(one.group.clone(), draw);
        }
        self.begun(draw, &started);
        started
    }

    /// Records that episodes of a group have started.
    fn begun(&mut self, draw: u64, episodes: &[Draw]) {
        let episodes = episodes.iter().map(|one| (one.episode.clone(), draw));
        self.episodes.extend(episodes);
    }

    /// Handles the end of an episode. Returns the actions that follow, and the episodes of the group if this
    /// end completed it.
    fn ended(&mut self, ended: EpisodeResult) -> (SlotActions, Option<(GroupId, Vec<EpisodeId>)>) {
        let Some(draw) = self.episodes.remove(&ended.episode) else {
            return (SlotActions::default(), None);
        };
        let Some(slots) = self.open.get_mut(&draw) else {
            return (SlotActions::default(), None);
        };
        let follows = slots.ended(ended);
        self.begun(draw, follows.again.as_slice());
        self.begun(draw, &follows.more);
        (follows, self.whole(draw))
    }

    /// Handles the score of a group. Returns the group's episodes if the score completed it.
    fn scored(
        &mut self,
        group: &GroupId,
        outcomes: BTreeMap<EpisodeId, TaskOutcome>,
    ) -> Option<(GroupId, Vec<EpisodeId>)> {
        let draw = *self.groups.get(group)?;
        let slots = self.open.get_mut(&draw)?;
        if slots.is_complete() {
            return None;
        }
        slots.scored(group, outcomes);
        self.whole(draw)
    }

    fn whole(&self, draw: u64) -> Option<(GroupId, Vec<EpisodeId>)> {
        let slots = self.open.get(&draw).filter(|r| r.is_complete())?;
        Some((slots.first_group()?.clone(), slots.episodes()))
    }

    /// Records the value of a group, or of the first episodes of a group. If the first episodes have a
    /// training signal, the held-back episodes start and are returned; otherwise the group is complete as it
    /// is.
    fn weighed(&mut self, group: &GroupId, value: GroupValue, stored: Vec<EpisodeId>) -> Vec<Draw> {
        let Some(draw) = self.groups.get(group).copied() else {
            return Vec::new();
        };
        let Some(mut slots) = self.open.remove(&draw) else {
            return Vec::new();
        };
        if slots.holds(group) && value.signal {
            let more = slots.release(group);
            self.open.insert(draw, slots);
            self.begun(draw, &more);
            return more;
        }
        slots.cut(group, stored);
        self.groups.remove(group);
        self.complete.insert(draw, ScoredSlots { slots, value });
        Vec::new()
    }

    /// Chooses complete groups for the next update, in the order of their draws, until its places are filled.
    fn choose(&self, config: &CoreConfig, in_order: bool) -> UpdateChoice {
        let mut choice = UpdateChoice::default();
        let first_open = self.open.keys().next().copied().unwrap_or(u64::MAX);
        let first_open = self
            .again
            .front()
            .map_or(first_open, |d| first_open.min(*d));
        let spare = config.refill as usize * config.tasks_per_step;
        for (draw, group) in &self.complete {
            if choice.filled >= config.tasks_per_step || (in_order && *draw > first_open) {
                break;
            }
            choice.draws.push(*draw);
            if group.value.signal || choice.replaced >= spare {
                choice.filled += 1
            } else {
                choice.replaced += 1
            }
        }
        choice
    }

    /// Number of groups that count against the places of coming updates.
    fn places(&self, config: &CoreConfig) -> usize {
        let spent = self.complete.values().filter(|g| !g.value.signal);
        let spare = config.refill as usize * config.tasks_per_step;
        let runs = self.open.len() - self.waiting.len();
        runs + self.complete.len() - spent.count().min(spare)
    }

    /// Leaves out groups whose samples are too old for weights of `version`.
    fn drop_old(&mut self, version: u64, overlap: &Overlap) {
        let behind = |g: &ScoredSlots| {
            let oldest = g.value.oldest;
            oldest.map_or(0, |oldest| version.saturating_sub(oldest))
        };
        let most = overlap
            .late
            .map_or(overlap.max_staleness, |l| l.max_staleness);
        let old = |g: &ScoredSlots| behind(g) > most;
        let draws: Vec<u64> = self
            .complete
            .iter()
            .filter_map(|(draw, g)| old(g).then_some(*draw))
            .collect();
        for group in draws.iter().filter_map(|draw| self.complete.remove(draw)) {
            let behind = behind(&group);
            let reason = match overlap.late {
                Some(_) => came_late(behind, most),
                None => format!(
                    "{BEHIND}{behind} updates behind, allowed: {most} (train.max_staleness)"
                ),
            };
            let episodes = group.slots.episodes().into_iter();
            self.dropped.extend(episodes.map(|e| (e, reason.clone())));
            self.dropped.extend(group.slots.dropped);
            self.given_up += 1;
        }
    }

    /// Removes the chosen groups. Returns their episodes in the order of the draws, their counts, and a batch
    /// with their outcomes and the episodes that were left out.
    fn take(&mut self, choice: UpdateChoice) -> (Vec<Vec<EpisodeId>>, RunCounts, Batch) {
        let mut counts = RunCounts {
            refilled: choice.replaced,
            ..RunCounts::default()
        };
        self.given_up = 0;
        let mut batch = Batch {
            dropped: std::mem::take(&mut self.dropped),
            ..Batch::default()
        };
        let mut groups = Vec::with_capacity(choice.draws.len());
        for group in choice.draws.iter().filter_map(|d| self.complete.remove(d)) {
            counts.retried += group.slots.retried;
            counts.recovered += group.slots.recovered;
            counts.not_begun += group.slots.not_begun;
            batch.outcomes.extend(group.slots.outcomes());
            batch.alone.extend(group.value.alone);
            groups.push(group.slots.episodes());
            batch.dropped.extend(group.slots.dropped);
        }
        (groups, counts, batch)
    }

    /// Copies the draws since the last commit into the curriculum of an update and continues with that
    /// curriculum, so that a session that resumes from this commit draws the same tasks.
    fn committed(&mut self, commit: &mut UpdateCommit) {
        let named = commit.trained.iter().chain(commit.dropped.keys());
        Arc::make_mut(&mut self.drawer.adapted).settle(named.filter_map(draw_of));
        Arc::make_mut(&mut commit.curriculum).follow(&self.drawer.adapted);
        self.drawer.adapted = commit.curriculum.clone();
    }
}

impl PipelineCore {
    /// Waits for the groups of the next update, and starts as many groups as the limit allows.
    pub(super) fn collect(&mut self) -> Vec<Command> {
        if self.ahead.is_none() {
            let draws = std::mem::take(&mut self.state.draws);
            self.ahead = Some(AsyncGroups::new(
                draws,
                &self.state.curriculum,
                &self.config,
            ));
        }
        self.stage = Stage::Collecting;
        let mut commands = self.admit();
        commands.extend(self.take_groups());
        commands
    }

    /// Starts groups while the staleness limit leaves room.
    pub(super) fn admit(&mut self) -> Vec<Command> {
        let (Some(overlap), Some(ahead)) = (self.config.overlap, &mut self.ahead) else {
            return Vec::new();
        };
        let done = self.state.step;
        let taken = match self.stage {
            Stage::Collecting | Stage::Evaluating(_) | Stage::Measuring(_) => done,
            _ => done + 1,
        };
        let steps_ahead = overlap.max_staleness / overlap.updates_per_step.max(1);
        let updates = (done + steps_ahead + 1 - taken).min(self.config.steps.saturating_sub(taken));
        let room = (updates as usize).saturating_mul(self.config.tasks_per_step);
        // Each group that runs may be one that waits.
        let may_wait = overlap.late.map_or(usize::MAX, |l| l.max_waiting);
        let mut draws = Vec::new();
        while !ahead.closed && ahead.places(&self.config) < room && ahead.open.len() < may_wait {
            draws.extend(ahead.begin(&self.config));
        }
        let start = (!draws.is_empty()).then_some(Command::Start {
            draws,
            temperature: None,
        });
        start.into_iter().collect()
    }

    /// Makes training rows of the groups of the next update, if the core waits for them and enough are
    /// complete.
    fn take_groups(&mut self) -> Vec<Command> {
        let (Some(overlap), Some(ahead)) = (self.config.overlap, &mut self.ahead) else {
            return Vec::new();
        };
        if !matches!(self.stage, Stage::Collecting) {
            return Vec::new();
        }
        ahead.drop_old(self.state.version, &overlap);
        let choice = ahead.choose(&self.config, overlap.in_order);
        let enough = choice.filled >= self.config.tasks_per_step;
        if !enough && !ahead.is_fruitless(&overlap) {
            // Groups that were left out made room.
            return self.admit();
        }
        let (groups, counts, mut batch) = ahead.take(choice);
        batch.commit.curriculum = self.state.curriculum.clone();
        let mut commands = self.score(batch, groups, counts);
        commands.extend(self.admit());
        commands
    }

    /// Handles the end of a training episode at any stage of the update.
    pub(super) fn async_ended(&mut self, ended: EpisodeResult) -> Vec<Command> {
        let Some(ahead) = &mut self.ahead else {
            return Vec::new();
        };
        let (follows, whole) = ahead.ended(ended);
        let mut commands = super::follow(follows, None);
        commands.extend(whole.map(|whole| self.async_whole(whole)));
        commands
    }

    /// Handles the score of a training group.
    pub(super) fn async_scored(
        &mut self,
        group: &GroupId,
        outcomes: BTreeMap<EpisodeId, TaskOutcome>,
    ) -> Vec<Command> {
        let whole = self.ahead.as_mut().and_then(|f| f.scored(group, outcomes));
        let command = whole.map(|whole| self.async_whole(whole));
        command.into_iter().collect()
    }

    /// Handles the value of a complete group.
    pub(super) fn weighed(
        &mut self,
        group: &GroupId,
        value: GroupValue,
        stored: Vec<EpisodeId>,
    ) -> Vec<Command> {
        let Some(ahead) = &mut self.ahead else {
            return Vec::new();
        };
        let more = ahead.weighed(group, value, stored);
        let mut commands = super::start_more(more);
        commands.extend(self.admit());
        commands.extend(self.take_groups());
        commands.extend(self.release());
        commands
    }

    /// Returns the commands that commit updates, each with the draws of the curriculum until this point.
    pub(super) fn commits(&mut self) -> Vec<Command> {
        let adaptive = self.adaptive().is_some();
        let mut commits = std::mem::take(&mut self.held_back);
        if let (true, Some(ahead)) = (adaptive, &mut self.ahead) {
            for commit in &mut commits {
                ahead.committed(commit);
                self.state.curriculum = commit.curriculum.clone();
            }
        }
        commits.into_iter().map(Command::Commit).collect()
    }

    /// Whether new weights have to wait for running episodes.
    pub(super) fn holds(&self) -> bool {
        let in_order = self.config.overlap.is_some_and(|o| o.in_order);
        in_order && self.ahead.as_ref().is_some_and(|f| !f.is_quiet())
    }

    /// Publishes the weights that waited, once the last episode has ended.
    fn release(&mut self) -> Option<Command> {
        if self.holds() {
            return None;
        }
        match std::mem::replace(&mut self.stage, Stage::Stopped) {
            Stage::Holding(batch, alarm) => {
                self.stage = Stage::Publishing(batch, alarm);
                Some(Command::Publish {
                    step: self.state.step + 1,
                })
            }
            stage => {
                self.stage = stage;
                None
            }
        }
    }
}

fn weigh((group, episodes): (GroupId, Vec<EpisodeId>)) -> Command {
    Command::InspectGroup {
        group,
        episodes,
        held: Vec::new(),
    }
}
