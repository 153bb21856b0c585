//! The core's promises under events in any order.

use super::*;
use crate::record::EpisodeStats;
use proptest::prelude::*;
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
struct World {
    steps: u64,
    tasks: usize,
    /// Groups of a step that are started in addition.
    more: usize,
    size: usize,
    retries: u32,
    refill: u32,
    every: u64,
    eval_every: u64,
    given: bool,
    /// Rewards come from outside, some of them never.
    late: bool,
    /// Draws everything that the world decides.
    seed: u64,
}

fn world() -> impl Strategy<Value = World> {
    let counts = (1..6u64, 1..5usize, 1..4usize, 0..3u32, 0..3u32);
    let kinds = (any::<bool>(), any::<bool>());
    (counts, 1..4u64, 0..3u64, kinds, any::<u64>()).prop_map(
        |((steps, tasks, size, retries, refill), every, eval_every, (given, late), seed)| World {
            steps,
            tasks,
            more: if given || late || refill > 0 {
                0
            } else {
                (seed % 3) as usize
            },
            size,
            retries,
            refill,
            every,
            eval_every,
            given,
            late: late && !given,
            seed,
        },
    )
}

impl World {
    fn config(&self) -> Arc<CoreConfig> {
        let plain = CoreConfig::plain(self.steps, self.tasks, self.size, self.seed);
        let eval = plain.eval;
        Arc::new(CoreConfig {
            checkpoint_every: self.every,
            samples: if self.given {
                SampleKind::Given
            } else {
                SampleKind::Run
            },
            over_sample: self.more,
            retries: self.retries,
            refill: self.refill,
            late_rounds: self.late.then_some(3),
            eval: EvalConfig {
                every: self.eval_every,
                greedy: true,
                ..eval
            },
            ..plain
        })
    }
}

impl CoreConfig {
    /// The run of a world with few settings.
    pub(super) fn plain(steps: u64, tasks_per_step: usize, group_size: usize, seed: u64) -> Self {
        Self {
            goal: Goal::Train,
            seed,
            steps,
            max_wall_s: None,
            checkpoint_every: 1,
            samples: SampleKind::Run,
            tasks_per_step,
            over_sample: 0,
            group_size,
            stop_decided: None,
            retries: 0,
            refill: 0,
            late_rounds: None,
            overlap: None,
            tasks: TaskSampling::Uniform,
            train_tasks: 50,
            held_out_tasks: 5,
            eval: EvalConfig {
                tasks: 2,
                episodes_per_task: 1,
                every: 0,
                temperature: 1.0,
                greedy: false,
            },
        }
    }
}

/// Record of a step that trained one row.
pub(super) fn record_of(step: u64) -> Box<StepRecord> {
    Box::new(StepRecord {
        step,
        rows: 1,
        trained_tokens: 1,
        updates_applied: 1,
        grad_norm: 1.0,
        rollout: EpisodeStats::default(),
        ..StepRecord::default()
    })
}

/// A driver that answers in a separate order, and a store that outlives it.
struct Play {
    core: PipelineCore,
    world: World,
    state: u64,
    /// Training episodes that were started and have not ended.
    flying: Vec<Draw>,
    /// Groups that are being scored, and all that ever were.
    scoring: Vec<Vec<Draw>>,
    scored: usize,
    /// Ends of this and of earlier sessions.
    stored: BTreeMap<EpisodeId, bool>,
    commits: BTreeMap<u64, UpdateCommit>,
    orders: BTreeMap<u64, Vec<Vec<EpisodeId>>>,
    /// Groups that wait for rewards, with the step that ran them.
    waiting: Vec<(u64, Vec<EpisodeId>)>,
    /// First episodes of those that were handed out in this session.
    handed: BTreeSet<EpisodeId>,
    checkpoint: u64,
    recorded: Vec<u64>,
    measured: Vec<EvalTime>,
    now: f64,
}

impl Play {
    fn draw(&mut self, below: u64) -> u64 {
        self.state = mix_seed(self.state, 1);
        self.state % below.max(1)
    }

    fn new(world: &World, before: Option<&Self>, salt: u64) -> Self {
        let mut state = CoreState::default();
        if let Some(before) = before {
            state.step = before.checkpoint;
            let kept = before.commits.get(&before.checkpoint);
            state.curriculum = kept.map(|c| c.curriculum.clone()).unwrap_or_default();
            let later = before.commits.range(before.checkpoint + 1..);
            state.committed = later.map(|(s, c)| (*s, c.curriculum.clone())).collect();
            state.begun = before.begun();
        }
        Self {
            core: PipelineCore::new(world.config(), state),
            world: world.clone(),
            state: mix_seed(world.seed, salt),
            flying: Vec::new(),
            scoring: Vec::new(),
            scored: before.map_or(0, |b| b.scored),
            stored: before.map(|b| b.stored.clone()).unwrap_or_default(),
            commits: before.map(|b| b.commits.clone()).unwrap_or_default(),
            orders: before.map(|b| b.orders.clone()).unwrap_or_default(),
            waiting: before.map(Self::left_waiting).unwrap_or_default(),
            handed: BTreeSet::new(),
            checkpoint: before.map_or(0, |b| b.checkpoint),
            recorded: Vec::new(),
            measured: Vec::new(),
            now: 0.0,
        }
    }

    /// The step that is not committed, and its rounds in addition to the first.
    fn begun(&self) -> (u64, u32) {
        let done = self.commits.keys().last().copied().unwrap_or(0);
        let first = done * self.world.config().draws_per_step();
        let number = |e: &EpisodeId| e.as_str().get(1..9)?.parse::<u64>().ok();
        let draws = self.stored.keys().filter(|e| e.as_str().starts_with('d'));
        let last = draws.filter_map(number).filter(|d| *d >= first).max();
        let rounds = last.map_or(0, |last| (last - first) / self.world.tasks as u64);
        if self.world.late {
            (done + 1, rounds as u32)
        } else {
            (0, 0)
        }
    }

    /// Groups of committed steps that no commit names.
    fn left_waiting(&self) -> Vec<(u64, Vec<EpisodeId>)> {
        let last = self.commits.keys().last().copied().unwrap_or(0);
        let waits =
            |(step, group): &&(u64, Vec<EpisodeId>)| *step <= last && !self.named(&group[0]);
        self.waiting.iter().filter(waits).cloned().collect()
    }

    fn named(&self, episode: &EpisodeId) -> bool {
        let mut commits = self.commits.values();
        commits.any(|c| c.trained.contains(episode) || c.dropped.contains_key(episode))
    }

    /// Hands out waiting groups, leaves them out or lets them wait longer, at random.
    fn settle(&mut self, step: u64, groups: Vec<Vec<EpisodeId>>, wait: bool) -> Event {
        let known: BTreeSet<EpisodeId> = self.waiting.iter().map(|(_, g)| g[0].clone()).collect();
        let new = groups.into_iter().filter(|g| !known.contains(&g[0]));
        self.waiting.extend(new.map(|g| (step, g)));
        let open: Vec<_> = self.waiting.iter().map(|(_, g)| g.clone()).collect();
        let open = open.into_iter().filter(|g| !self.handed.contains(&g[0]));
        let open: Vec<_> = open.collect();
        let (mut ready, mut dropped) = (Vec::new(), BTreeMap::new());
        for (n, group) in open.iter().enumerate() {
            match self.draw(6) {
                0 => ready.push(group.clone()),
                1 => dropped.extend(group.iter().map(|e| (e.clone(), "not given".into()))),
                _ if wait && n == 0 => ready.push(group.clone()),
                _ => {}
            }
        }
        let handed = ready.iter().map(|g: &Vec<EpisodeId>| &g[0]);
        self.handed.extend(handed.chain(dropped.keys()).cloned());
        Event::LateRewardsCollected {
            alone: Vec::new(),
            waiting: open.len() - ready.len() - dropped.len() / self.world.size,
            may_begin: open.len() - ready.len() < 3 * self.world.tasks,
            groups: ready,
            dropped,
        }
    }

    fn on(&mut self, event: Event) -> Vec<Command> {
        self.now += 0.5;
        // A tick changes nothing, and neither does an end that nothing waits for.
        assert!(self.core.on(Event::Tick, self.now).is_empty());
        let stray = EpisodeResult {
            episode: EpisodeId::new("stray"),
            failed: true,
            stored: false,
            outcome: None,
            waits_for_group: true,
            changed: None,
        };
        let stray = self.core.on(Event::EpisodeEnded(stray), self.now);
        assert!(stray.is_empty(), "{stray:?}");
        self.core.on(event, self.now)
    }

    fn rows(&mut self, groups: &[Vec<EpisodeId>]) -> Event {
        let all: Vec<EpisodeId> = groups.iter().flatten().cloned().collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "an episode is once in a batch");
        for episode in &all {
            assert!(self.stored.contains_key(episode), "{episode} has not ended");
        }
        let (mut trained, mut dropped) = (Vec::new(), BTreeMap::new());
        for episode in all {
            if self.stored[&episode] {
                drop(dropped.insert(episode, "failed".to_owned()))
            } else {
                trained.push(episode)
            }
        }
        Event::RowsReady {
            rows: trained.len(),
            trained,
            dropped,
            sightings: Vec::new(),
        }
    }

    fn given(&mut self, step: u64) -> Event {
        let mut groups = Vec::new();
        for g in 0..self.world.tasks {
            let ids = (0..self.world.size).map(|k| EpisodeId::new(format!("given{step}-{g}-{k}")));
            let ids: Vec<EpisodeId> = ids.collect();
            self.stored.extend(ids.iter().map(|id| (id.clone(), false)));
            groups.push(ids);
        }
        Event::GroupsFetched {
            groups,
            dropped: BTreeMap::new(),
            alone: Vec::new(),
        }
    }

    /// One command; `None`: the run is at its end.
    fn carry_out(&mut self, command: Command) -> Option<Vec<Command>> {
        let event = match command {
            Command::Start { draws, .. } => {
                self.flying.extend(draws);
                return Some(Vec::new());
            }
            Command::Abandon { episodes } => return Some(self.abandon(&episodes)),
            Command::ScoreGroup { members } => {
                self.score_group(members);
                return Some(Vec::new());
            }
            Command::FindFirstEval(_) => Event::FirstEvalFound,
            Command::Fetch { step } => self.given(step),
            Command::CollectLateRewards { step, groups, wait } => self.settle(step, groups, wait),
            Command::LoadCommitted { step } => {
                Event::CommittedLoaded(self.orders.get(&step).cloned())
            }
            Command::CountSpentGroups { groups } => Event::SpentGroupsCounted {
                // The same of the same groups, whenever it is asked.
                spent: (mix_seed(self.world.seed, groups.len() as u64) % (groups.len() as u64 + 1))
                    as usize,
            },
            Command::InspectGroup { .. } => unreachable!("nothing overlaps"),
            Command::Score { step, groups, .. } => {
                assert_eq!(step, self.core.step() + 1);
                assert!(self.flying.is_empty(), "a group is complete");
                // Groups that are not needed are not awaited.
                self.scoring.retain(|_| self.world.more == 0);
                assert!(self.scoring.is_empty(), "and scored");
                let whole = groups.iter().all(|g| g.len() == self.world.size);
                assert!(whole, "{groups:?}");
                if let Some(before) = self
                    .orders
                    .get(&step)
                    .filter(|_| self.commits.contains_key(&step))
                {
                    assert_eq!(before, &groups, "done again from the same episodes");
                }
                self.orders.insert(step, groups.clone());
                self.rows(&groups)
            }
            Command::Train { .. } => Event::UpdateDone(record_of(self.core.step() + 1)),
            Command::Publish { step } => Event::WeightsLive { version: step },
            Command::Measure { when, .. } => {
                self.measured.push(when);
                Event::EvaluationDone
            }
            Command::Commit(commit) => {
                let old = self.commits.insert(commit.step, commit);
                assert!(old.is_none(), "an update is committed once");
                return Some(Vec::new());
            }
            Command::Checkpoint { step } => {
                assert!(self.commits.contains_key(&step), "not committed");
                self.checkpoint = step;
                return Some(Vec::new());
            }
            Command::Record { step, .. } => {
                self.recorded.push(step);
                return Some(Vec::new());
            }
            Command::SourceDry { .. } => return Some(Vec::new()),
            Command::Stop(stop) => {
                assert_eq!(stop, StopReason::Done);
                return None;
            }
        };
        Some(self.on(event))
    }

    fn abandon(&mut self, episodes: &[EpisodeId]) -> Vec<Command> {
        self.flying.retain(|d| !episodes.contains(&d.episode));
        Vec::new()
    }

    /// Whether episodes of this run wait for the scores of their groups.
    fn grouped(&self) -> bool {
        self.world.seed.is_multiple_of(2)
    }

    /// A group is scored once all its members have ended, and only with one that waits.
    fn score_group(&mut self, members: Vec<Draw>) {
        assert!(self.grouped(), "{members:?}");
        let one = members.iter().all(|m| m.group == members[0].group);
        assert!(one && members.iter().any(|m| !self.stored[&m.episode]));
        let flies = |m: &Draw| self.flying.iter().any(|f| f.group == m.group);
        assert!(!members.iter().any(flies), "all have ended");
        let held_out = members[0].purpose != "train";
        assert!(held_out || members.len() == self.world.size);
        self.scoring.push(members);
        self.scored += 1;
    }

    /// Scores one of the groups, whichever.
    fn score_one(&mut self) -> Vec<Command> {
        let at = self.draw(self.scoring.len() as u64) as usize;
        let members = self.scoring.swap_remove(at);
        let group = members[0].group.clone();
        let outcomes = members
            .into_iter()
            .map(|m| (m.episode, ("k".into(), true, 1.0)));
        let outcomes: BTreeMap<_, _> = outcomes.collect();
        let scored = Event::GroupScored { group, outcomes };
        let commands = self.on(scored.clone());
        // The same scores once more change nothing.
        assert!(self.core.on(scored, self.now).is_empty());
        commands
    }

    /// Ends one of the episodes in flight, or scores a group, whichever.
    fn end_one(&mut self) -> Vec<Command> {
        let all = self.flying.len() + self.scoring.len();
        assert!(all > 0, "the run waits for nothing");
        let mut at = self.draw(all as u64) as usize;
        if self.world.more > 0 {
            // Stored episodes are given first.
            let stored = self
                .flying
                .iter()
                .position(|d| self.stored.contains_key(&d.episode));
            at = stored.unwrap_or(at);
        }
        if at >= self.flying.len() {
            return self.score_one();
        }
        let draw = self.flying.swap_remove(at);
        let known = self.stored.get(&draw.episode).copied();
        let salt = draw.seed ^ self.world.seed;
        let failed = known.unwrap_or(mix_seed(salt, 7).is_multiple_of(4));
        self.stored.insert(draw.episode.clone(), failed);
        let ended = EpisodeResult {
            episode: draw.episode,
            failed,
            stored: known.is_some(),
            outcome: None,
            waits_for_group: self.grouped() && !failed,
            changed: None,
        };
        let again = self.on(Event::EpisodeEnded(ended.clone()));
        // The same end once more changes nothing.
        assert!(
            self.core
                .on(Event::EpisodeEnded(ended), self.now)
                .is_empty()
        );
        again
    }

    /// Plays until the end, or until so many commands were carried out.
    fn play(&mut self, most: usize) -> bool {
        let mut commands = VecDeque::from(self.on(Event::Begin));
        for _ in 0..most {
            let more = match commands.pop_front() {
                Some(command) => match self.carry_out(command) {
                    Some(more) => more,
                    None => return true,
                },
                None => self.end_one(),
            };
            commands.extend(more);
        }
        false
    }

    /// Checks a run that came to its end.
    fn check(&self) {
        let given = self.core.config.samples == SampleKind::Given;
        // A group whose members all failed is not scored.
        let all_failed = self.stored.values().all(|&failed| failed);
        assert!(given || !self.grouped() || all_failed || self.scored > 0);
        let steps: Vec<u64> = self.commits.keys().copied().collect();
        assert_eq!(steps, (1..=self.world.steps).collect::<Vec<_>>());
        assert_eq!(self.checkpoint, self.world.steps);
        let mut trained = BTreeSet::new();
        for commit in self.commits.values() {
            for episode in &commit.trained {
                assert!(trained.insert(episode), "{episode} is trained twice");
                assert!(!commit.dropped.contains_key(episode));
            }
        }
        let dropped = self.commits.values().flat_map(|c| c.dropped.keys());
        let all: BTreeSet<_> = trained.into_iter().chain(dropped).collect();
        let waiting: BTreeSet<_> = self.waiting.iter().flat_map(|(_, g)| g).collect();
        for episode in self.stored.keys() {
            let held_out = ["eval", "greedy"]
                .iter()
                .any(|p| episode.as_str().starts_with(p));
            let known = all.contains(episode) || waiting.contains(episode);
            assert!(held_out || known, "{episode} is lost");
        }
    }
}

/// More commands than any of these worlds asks for.
const ENOUGH: usize = 20_000;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_run_ends_with_each_episode_trained_once_or_left_out(world in world()) {
        let mut play = Play::new(&world, None, 0);
        prop_assert!(play.play(ENOUGH), "it ends");
        play.check();
        let steps: Vec<u64> = (1..=world.steps).collect();
        prop_assert_eq!(&play.recorded, &steps);
        let measured = (play.measured.first(), play.measured.last());
        prop_assert_eq!(measured, (Some(&EvalTime::Before), Some(&EvalTime::After)));
        let during = play.measured.iter().filter(|w| **w == EvalTime::During).count() as u64;
        let due = match world.eval_every {
            0 => 0,
            every => (world.steps - 1) / every,
        };
        prop_assert_eq!(during, due);
    }

    #[test]
    fn a_run_that_is_killed_goes_on_from_its_commits(
        world in world(),
        kills in prop::collection::vec(1..150usize, 1..4),
    ) {
        let mut play = Play::new(&world, None, 0);
        let mut done = false;
        for (n, kill) in kills.into_iter().enumerate() {
            done = play.play(kill);
            if done {
                break;
            }
            play = Play::new(&world, Some(&play), n as u64 + 1);
        }
        prop_assert!(done || play.play(ENOUGH));
        play.check();
    }

    #[test]
    fn the_order_of_ends_decides_nothing(world in world(), salt in any::<u64>()) {
        // The world decides here which episodes fail, not the order of the ends.
        let world = World { refill: 0, more: 0, given: false, late: false, ..world };
        let play = |salt: u64| {
            let mut play = Play::new(&world, None, salt);
            let draws = (1..=world.steps).flat_map(|step| {
                let tasks = uniform_tasks(50, world.seed, step, world.tasks);
                train_groups(world.seed, step, (0, &tasks), world.size, world.config().draws_per_step())
            });
            for draw in draws.flatten() {
                for attempt in 0..=world.retries {
                    let id = if attempt == 0 { draw.clone() } else { draw.again(attempt) };
                    play.stored.insert(id.episode, false);
                }
            }
            assert!(play.play(ENOUGH));
            play.commits
        };
        prop_assert_eq!(play(1), play(salt));
    }
}

#[test]
fn an_interrupted_run_keeps_whole_steps_alone() {
    let world = World {
        steps: 3,
        tasks: 2,
        more: 0,
        size: 2,
        retries: 0,
        refill: 0,
        every: 10,
        eval_every: 0,
        given: true,
        late: false,
        seed: 1,
    };
    for (most, whole, kept) in [(1, true, None), (60, true, Some(1)), (60, false, None)] {
        let mut play = Play::new(&world, None, 0);
        let mut commands = VecDeque::from(play.on(Event::Begin));
        for _ in 0..most {
            if play.core.step() > 0 {
                break;
            }
            let more = match commands.pop_front() {
                Some(command) => play.carry_out(command).unwrap(),
                None => play.end_one(),
            };
            commands.extend(more);
        }
        let stopped = play.core.on(Event::Interrupted { whole }, 9.0);
        let mut expected: Vec<Command> = Vec::new();
        expected.extend(kept.map(|step| Command::Checkpoint { step }));
        expected.push(Command::Stop(StopReason::Interrupted));
        assert_eq!(stopped, expected);
        assert!(play.core.on(Event::Begin, 9.0).is_empty(), "it is over");
    }
}

#[test]
fn time_that_is_up_ends_a_run_between_two_steps() {
    let world = World {
        steps: 1000,
        tasks: 1,
        more: 0,
        size: 1,
        retries: 0,
        refill: 0,
        every: 100,
        eval_every: 0,
        given: true,
        late: false,
        seed: 1,
    };
    let mut config = Arc::into_inner(world.config()).unwrap();
    config.max_wall_s = Some(20.0);
    let mut play = Play::new(&world, None, 0);
    play.core = PipelineCore::new(Arc::new(config), CoreState::default());
    assert!(play.play(ENOUGH));
    assert!(play.core.step() > 1 && play.core.step() < 100);
    assert_eq!(play.checkpoint, play.core.step(), "it is kept all the same");
}
