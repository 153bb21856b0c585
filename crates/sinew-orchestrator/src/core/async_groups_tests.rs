//! The promises of generation during training, under events in any order.

use super::tests::record_of;
use super::*;
use crate::curriculum::{ByType, EnvironmentShare, TaskShares};
use proptest::prelude::*;
use sinew_algo::Signal;
use sinew_env::tiny::TinyTaskset;
use sinew_env::{Split, Taskset};
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
struct World {
    steps: u64,
    tasks: usize,
    size: usize,
    retries: u32,
    refill: u32,
    /// Number of steps; a step has two updates.
    ahead: u64,
    in_order: bool,
    /// Steps between checkpoints, and between measurements.
    every: u64,
    eval_every: u64,
    /// Episodes wait for the scores of their groups.
    grouped: bool,
    /// Episodes of a group that begin first.
    first: Option<usize>,
    /// Tasks are drawn by what the policy can do.
    adaptive: Option<Signal>,
    /// Each session has other environments than the one before.
    changes: bool,
    /// Rewards come from outside, some never: groups that may wait for them.
    late: Option<usize>,
    /// Draws what episodes show.
    seed: u64,
}

const UPDATES: u64 = 2;

/// Steps that a group may be behind when it is trained, more than it is started ahead, if rewards come late.
const LATE_STEPS: u64 = 2;

/// Two types of tasks.
fn adaptive_tasks(signal: Signal) -> TaskShares {
    let taskset = TinyTaskset::new(0);
    let environment = EnvironmentShare {
        weight: 1.0,
        tasks: 0..taskset.len(Split::Train),
        by_type: match signal {
            Signal::Pools => ByType::Pools,
            _ => ByType::Adaptive,
        },
    };
    TaskShares::of(&taskset, &[environment]).unwrap()
}

fn world() -> impl Strategy<Value = World> {
    let counts = (1..7u64, 1..4usize, 1..4usize, 0..3u32, 0..3u32, 1..4u64);
    let kinds = (any::<bool>(), any::<bool>(), 1..4u64, 0..3u64, any::<u64>());
    let signals = [
        Signal::Success,
        Signal::Mixed,
        Signal::Progress,
        Signal::Aim,
        Signal::Pools,
    ];
    let signal = prop::option::of(prop::sample::select(signals.to_vec()));
    let more = (prop::option::of(1..3usize), signal, any::<bool>());
    let late = prop::option::of(1..7usize);
    (counts, kinds, more, late).prop_map(
        |(
            (steps, tasks, size, retries, refill, ahead),
            (in_order, grouped, every, eval_every, seed),
            (first, adaptive, changes),
            late,
        )| World {
            // Rewards that come late are for groups as a whole, and replace none.
            first: first.filter(|first| *first < size && late.is_none()),
            adaptive: adaptive.filter(|_| late.is_none()),
            changes,
            late: late.filter(|_| !in_order),
            steps,
            tasks,
            size,
            retries,
            refill: if in_order || late.is_some() {
                0
            } else {
                refill
            },
            ahead: if in_order { 1 } else { ahead },
            in_order,
            every,
            eval_every,
            grouped,
            seed,
        },
    )
}

impl World {
    fn overlap(&self) -> Overlap {
        Overlap {
            max_staleness: self.ahead * UPDATES,
            updates_per_step: UPDATES,
            in_order: self.in_order,
            late: self.late.map(|max_waiting| LateGroups {
                max_waiting,
                max_staleness: self.oldest(),
            }),
        }
    }

    /// Updates that a group may be behind when it is trained.
    fn oldest(&self) -> u64 {
        (self.ahead + self.late.map_or(0, |_| LATE_STEPS)) * UPDATES
    }

    fn config(&self) -> Arc<CoreConfig> {
        let plain = CoreConfig::plain(self.steps, self.tasks, self.size, self.seed);
        Arc::new(CoreConfig {
            checkpoint_every: self.every,
            retries: self.retries,
            refill: self.refill,
            stop_decided: self.first,
            overlap: Some(self.overlap()),
            tasks: match self.adaptive {
                Some(signal) => TaskSampling::Shares {
                    tasks: adaptive_tasks(signal),
                    adaptive: Some(AdaptiveConfig {
                        signal,
                        window: 4,
                        ..AdaptiveConfig::default()
                    }),
                },
                None => TaskSampling::Uniform,
            },
            eval: EvalConfig {
                every: self.eval_every,
                ..plain.eval
            },
            ..plain
        })
    }
}

/// An episode as the store has it.
#[derive(Clone, Debug)]
struct StoredEpisode {
    draw: u64,
    /// Task of the draw.
    task: usize,
    failed: bool,
    /// The weights that sampled its first token.
    version: u64,
    /// Session that ran it.
    session: u64,
}

/// State that lasts from session to session.
#[derive(Clone, Debug, Default)]
struct LastingState {
    stored: BTreeMap<EpisodeId, StoredEpisode>,
    commits: BTreeMap<u64, UpdateCommit>,
    orders: BTreeMap<u64, Vec<Vec<EpisodeId>>>,
    checkpoint: u64,
    /// Curriculum of the checkpoint.
    curriculum: Arc<Curriculum>,
}

impl LastingState {
    fn named(&self) -> BTreeSet<&EpisodeId> {
        let named = self.commits.values();
        named
            .flat_map(|c| c.trained.iter().chain(c.dropped.keys()))
            .collect()
    }

    /// Draws below the last one that no commit names.
    fn open_draws(&self) -> OpenDraws {
        let named = self.named();
        let train = |e: &EpisodeId| e.as_str().starts_with('d');
        let trained = self.stored.iter().filter(|(e, _)| train(e));
        let next = trained.clone().map(|(_, s)| s.draw + 1).max().unwrap_or(0);
        let settled = trained.filter(|(e, _)| named.contains(e));
        let settled: BTreeSet<u64> = settled.map(|(_, s)| s.draw).collect();
        OpenDraws {
            dropped: BTreeMap::new(),
            open: (0..next).filter(|d| !settled.contains(d)).collect(),
            next,
        }
    }
}

/// A driver that answers in a separate order: episodes, scores of groups and the trainer at once.
struct Play {
    core: PipelineCore,
    world: World,
    random: u64,
    kept: LastingState,
    commands: VecDeque<Command>,
    /// Episodes at work, with the weights of their first token.
    flying: Vec<(Draw, u64)>,
    /// Answers that come later.
    answers: Vec<Event>,
    /// Groups that wait for rewards.
    waiting: Vec<Vec<EpisodeId>>,
    /// Episodes that are not in the store any more.
    gone: BTreeSet<EpisodeId>,
    /// The weights that sample.
    version: u64,
    began: usize,
    session: u64,
}

impl Play {
    fn new(world: &World, kept: LastingState, salt: u64) -> Self {
        let later = kept.commits.range(kept.checkpoint + 1..);
        let state = CoreState {
            step: kept.checkpoint,
            curriculum: kept.curriculum.clone(),
            version: kept.checkpoint * UPDATES,
            committed: later.map(|(s, c)| (*s, c.curriculum.clone())).collect(),
            draws: kept.open_draws(),
            ..CoreState::default()
        };
        Self {
            version: state.version,
            core: PipelineCore::new(world.config(), state),
            world: world.clone(),
            random: mix_seed(world.seed, salt),
            kept,
            commands: VecDeque::new(),
            flying: Vec::new(),
            answers: vec![Event::Begin],
            waiting: Vec::new(),
            gone: BTreeSet::new(),
            began: 0,
            session: salt,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        self.random = mix_seed(self.random, 1);
        (self.random % n.max(1) as u64) as usize
    }

    /// One of the things that can happen next; `None`: the run is at its end.
    fn step(&mut self) -> Option<()> {
        let more = match self.commands.pop_front() {
            Some(command) => self.carry_out(command)?,
            None => {
                let (flying, answers) = (self.flying.len(), self.answers.len());
                let all = flying + answers + self.waiting.len();
                assert!(all > 0, "the run waits for nothing: {:?}", self.core);
                match self.below(all) {
                    at if at < flying => self.end_one(at),
                    at if at < flying + answers => {
                        let event = self.answers.swap_remove(at - flying);
                        self.core.on(event, 0.0)
                    }
                    _ => self.look(),
                }
            }
        };
        self.commands.extend(more);
        Some(())
    }

    fn carry_out(&mut self, command: Command) -> Option<Vec<Command>> {
        let answer = match command {
            Command::Start { draws, temperature } => {
                self.began += usize::from(temperature.is_none()) * draws.len();
                let version = self.version;
                self.flying.extend(draws.into_iter().map(|d| (d, version)));
                return Some(Vec::new());
            }
            Command::ScoreGroup { members } => Event::GroupScored {
                group: members[0].group.clone(),
                outcomes: BTreeMap::new(),
            },
            Command::InspectGroup {
                group,
                episodes,
                held,
            } => self.weigh(group, &episodes, held),
            Command::CollectLateRewards { groups, wait, .. } => {
                assert!(!wait && self.world.late.is_some());
                self.waiting.extend(groups);
                let most = self.world.late.unwrap_or(0);
                let begun = (self.world.ahead as usize + 1) * self.world.tasks;
                assert!(self.waiting.len() <= most + begun, "too many wait");
                return Some(Vec::new());
            }
            Command::FindFirstEval(_) => Event::FirstEvalFound,
            Command::LoadCommitted { step } => {
                Event::CommittedLoaded(self.kept.orders.get(&step).cloned())
            }
            Command::Score { step, groups, .. } => self.rows(step, groups),
            Command::Train { step, .. } => Event::UpdateDone(record_of(step)),
            Command::Publish { step } => {
                let train = |(d, _): &&(Draw, u64)| d.purpose == "train";
                assert!(!self.world.in_order || !self.flying.iter().any(|f| train(&f)));
                self.version = step * UPDATES;
                Event::WeightsLive {
                    version: self.version,
                }
            }
            Command::Measure { .. } => Event::EvaluationDone,
            Command::Commit(commit) => {
                let old = self.kept.commits.insert(commit.step, commit);
                assert!(old.is_none(), "an update is committed once");
                return Some(Vec::new());
            }
            Command::Checkpoint { step } => {
                assert!(self.kept.commits.contains_key(&step));
                self.kept.checkpoint = step;
                self.kept.curriculum = self.core.curriculum().clone();
                assert_eq!(self.kept.curriculum, self.kept.commits[&step].curriculum);
                return Some(Vec::new());
            }
            Command::Record { .. } => return Some(Vec::new()),
            Command::Stop(stop) => {
                assert_eq!(stop, StopReason::Done);
                return None;
            }
            other => panic!("{other:?}"),
        };
        self.answers.push(answer);
        Some(Vec::new())
    }

    /// Some of the groups that wait get their rewards, and others are given up.
    fn look(&mut self) -> Vec<Command> {
        let (mut groups, mut dropped) = (Vec::new(), BTreeMap::new());
        for mut group in std::mem::take(&mut self.waiting) {
            match self.below(8) {
                0 => dropped.extend(group.into_iter().map(|e| (e, "reward r: no".to_owned()))),
                1 | 2 => groups.push(group),
                3 if group.len() > 1 => {
                    let gone = group.pop().unwrap();
                    self.gone.insert(gone.clone());
                    dropped.insert(gone, "no longer in the store".to_owned());
                    groups.push(group);
                }
                _ => self.waiting.push(group),
            }
        }
        let event = Event::LateRewardsCollected {
            groups,
            dropped,
            alone: Vec::new(),
            waiting: self.waiting.len(),
            may_begin: true,
        };
        self.core.on(event, 0.0)
    }

    fn oldest(&self, group: &[EpisodeId]) -> Option<u64> {
        let there = group.iter().filter(|e| !self.gone.contains(*e));
        there.map(|e| self.kept.stored[e].version).min()
    }

    /// Whether a group teaches something is the seed's, and that of its attempts: another one may decide
    /// otherwise than the one before.
    fn signal(&self, group: &GroupId, episodes: &[EpisodeId]) -> bool {
        let number = group.as_str()[1..].parse::<u64>().unwrap();
        let again = |e: &&EpisodeId| e.as_str().contains("-r");
        let attempts = episodes.iter().filter(again).count() as u64;
        !mix_seed(self.world.seed, number + (attempts << 32)).is_multiple_of(3)
    }

    /// Those of these episodes, with their further attempts, that are stored.
    fn attempts(&self, held: &[EpisodeId]) -> Vec<EpisodeId> {
        let of = |e: &EpisodeId| {
            let next = format!("{e}-r");
            let stored = self.kept.stored.keys();
            let own = stored.filter(move |s| *s == e || s.as_str().starts_with(&next));
            own.cloned().collect::<Vec<_>>()
        };
        held.iter().flat_map(of).collect()
    }

    fn weigh(&self, group: GroupId, episodes: &[EpisodeId], held: Vec<EpisodeId>) -> Event {
        let whole = |e: &EpisodeId| e.as_str()[..9] == episodes[0].as_str()[..9];
        let gone = self.gone.iter().filter(|e| whole(e)).count();
        let all = [Some(self.world.size - gone), self.world.first];
        assert!(
            all.contains(&Some(episodes.len())),
            "all, or the first ones"
        );
        Event::GroupInspected {
            signal: self.signal(&group, episodes),
            oldest: self.oldest(episodes),
            group,
            stored: self.attempts(&held),
            alone: None,
        }
    }

    /// No sample is older than it may be, and an update that is done again has the same groups.
    fn rows(&mut self, step: u64, groups: Vec<Vec<EpisodeId>>) -> Event {
        assert_eq!(step, self.core.step() + 1);
        let now = (step - 1) * UPDATES;
        if self.kept.commits.contains_key(&step) {
            assert_eq!(self.kept.orders[&step], groups)
        } else {
            let old = groups.iter().filter_map(|g| self.oldest(g));
            let behind = old.map(|old| now.saturating_sub(old)).max().unwrap_or(0);
            assert!(behind <= self.world.oldest(), "{behind} behind");
            let most = self.world.tasks * (1 + self.world.refill as usize);
            let least = self.world.late.map_or(self.world.tasks, |_| 0);
            assert!((least..=most).contains(&groups.len()), "{groups:?}");
        }
        self.kept.orders.insert(step, groups.clone());
        let (failed, trained): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .flatten()
            .filter(|e| !self.gone.contains(e))
            .partition(|e| self.kept.stored[e].failed);
        Event::RowsReady {
            rows: trained.len(),
            trained,
            dropped: failed.into_iter().map(|e| (e, "failed".into())).collect(),
            sightings: Vec::new(),
        }
    }

    fn end_one(&mut self, at: usize) -> Vec<Command> {
        let (draw, version) = self.flying.swap_remove(at);
        let known = self.kept.stored.get(&draw.episode).cloned();
        let failed = mix_seed(draw.seed, self.world.seed).is_multiple_of(4);
        let stored = known.is_some();
        let episode = known.unwrap_or(StoredEpisode {
            draw: draw.draw,
            task: draw.task,
            failed,
            version,
            session: self.session,
        });
        let old = stored && episode.session < self.session && draw.purpose == "train";
        assert_eq!(
            episode.task, draw.task,
            "a draw is one task, whatever was killed"
        );
        let failed = episode.failed;
        self.kept.stored.insert(draw.episode.clone(), episode);
        let ended = EpisodeResult {
            episode: draw.episode,
            failed,
            stored,
            outcome: (!failed).then(|| {
                let kind = ["corridor-1", "corridor-2"][draw.task % 2];
                let success = mix_seed(self.world.seed, draw.seed).is_multiple_of(2);
                (kind.to_owned(), success, f64::from(u8::from(success)))
            }),
            waits_for_group: self.world.grouped && !failed,
            changed: (old && self.world.changes).then(|| "environment".to_owned()),
        };
        let commands = self.core.on(Event::EpisodeEnded(ended.clone()), 0.0);
        // The same end once more changes nothing.
        assert!(self.core.on(Event::EpisodeEnded(ended), 0.0).is_empty());
        commands
    }

    /// Plays until the end, or so many steps.
    fn play(&mut self, most: usize) -> bool {
        (0..most).any(|_| self.step().is_none())
    }

    fn check(&self) {
        let steps: Vec<u64> = self.kept.commits.keys().copied().collect();
        assert_eq!(steps, (1..=self.world.steps).collect::<Vec<_>>());
        let mut seen = BTreeSet::new();
        for commit in self.kept.commits.values() {
            for episode in commit.trained.iter().chain(commit.dropped.keys()) {
                assert!(seen.insert(episode), "{episode} is consumed twice");
            }
        }
        // A group is consumed as a whole; what no commit names waits as a whole.
        let draw = |e: &EpisodeId| self.kept.stored[e].draw;
        let settled: BTreeSet<u64> = seen.iter().map(|e| draw(e)).collect();
        let train = self
            .kept
            .stored
            .iter()
            .filter(|(e, _)| e.as_str().starts_with('d'));
        for (episode, stored) in train {
            assert!(
                seen.contains(episode) || !settled.contains(&stored.draw),
                "{episode} is lost"
            );
        }
    }
}

/// More events than any of these worlds has.
const ENOUGH: usize = 50_000;

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_run_ends_and_consumes_each_episode_once_and_none_too_old(
        world in world(),
        salt in any::<u64>(),
    ) {
        let mut play = Play::new(&world, LastingState::default(), salt);
        prop_assert!(play.play(ENOUGH), "it ends");
        play.check();
        // Nothing is begun that no update can take.
        let left_out = play.kept.commits.values().flat_map(|c| c.dropped.values());
        if world.late.is_none() && !left_out.clone().any(|why| why.starts_with("too old")) {
            let most = world.steps as usize * world.tasks * (1 + world.refill as usize);
            let retries = play.kept.stored.keys().filter(|e| e.as_str().contains("-r")).count();
            prop_assert!(play.began <= most * world.size + retries);
        }
    }

    #[test]
    fn a_run_that_is_killed_goes_on_and_does_its_updates_again(
        world in world(),
        kills in prop::collection::vec(1..200usize, 1..5),
    ) {
        let (mut kept, mut done) = (LastingState::default(), false);
        for (n, kill) in kills.into_iter().enumerate() {
            let mut play = Play::new(&world, kept, n as u64);
            done = play.play(kill);
            kept = play.kept.clone();
            if done {
                play.check();
                break;
            }
        }
        if !done {
            let mut play = Play::new(&world, kept, 99);
            prop_assert!(play.play(ENOUGH));
            play.check();
        }
    }

    #[test]
    fn one_step_off_trains_the_same_in_any_order(world in world(), salt in any::<u64>()) {
        let world = World { in_order: true, refill: 0, ahead: 1, late: None, ..world };
        let play = |salt| {
            let mut play = Play::new(&world, LastingState::default(), salt);
            assert!(play.play(ENOUGH));
            let versions: Vec<u64> = play.kept.stored.values().map(|s| s.version).collect();
            let behind = |(step, groups): (&u64, &Vec<Vec<EpisodeId>>)| {
                let old = groups.iter().filter_map(|g| play.oldest(g)).min();
                (*step, old.map(|old| (step - 1) * UPDATES - old))
            };
            for (step, behind) in play.kept.orders.iter().map(behind) {
                let expected = if step == 1 { 0 } else { UPDATES };
                assert_eq!(behind, Some(expected), "step {step}");
            }
            (play.kept.orders, play.kept.commits, versions)
        };
        prop_assert_eq!(play(1), play(salt));
    }
}

/// A draw that a session has begun keeps its task in the next one, although updates between change the
/// shares: the world is one in which a resumed session begins a draw later than the session before.
#[test]
fn a_draw_keeps_its_task_when_a_later_session_begins_it_after_an_update() {
    let world = World {
        steps: 6,
        tasks: 1,
        size: 2,
        retries: 1,
        refill: 0,
        ahead: 1,
        in_order: false,
        every: 1,
        eval_every: 0,
        grouped: false,
        first: None,
        adaptive: Some(Signal::Success),
        changes: false,
        late: None,
        seed: 12_754_462_737_290_079_993,
    };
    for first in 1..80 {
        for second in (1..80).step_by(3) {
            let mut kept = LastingState::default();
            for (n, kill) in [first, second, ENOUGH].into_iter().enumerate() {
                let mut play = Play::new(&world, kept, n as u64);
                if play.play(kill) {
                    play.check();
                    break;
                }
                kept = play.kept;
            }
        }
    }
}
