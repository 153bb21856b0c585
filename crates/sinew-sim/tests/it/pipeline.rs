//! The training loop's core under virtual time: hours of a run in milliseconds.

use sinew_orchestrator::{
    Command, CoreConfig, CoreState, EpisodeResult, EvalConfig, Event, Goal, PipelineCore,
    SampleKind, StepRecord, StopReason, TaskSampling,
};
use sinew_types::{EpisodeId, mix_seed};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

const TRAIN_S: f64 = 20.0;
const PUBLISH_S: f64 = 1.0;

/// A world in which things take time, and nothing else.
struct World {
    core: PipelineCore,
    seed: u64,
    now: f64,
    /// Ends to come: time in microseconds and episode, with whether the system fails it.
    ends: BTreeMap<(u64, EpisodeId), bool>,
    /// Seconds of all episodes, and in which at least one ran.
    episode_s: f64,
    rollout_s: f64,
    trained: Vec<EpisodeId>,
    dropped: BTreeSet<EpisodeId>,
    started: usize,
    checkpoints: Vec<u64>,
}

fn config(max_wall_s: Option<f64>) -> CoreConfig {
    CoreConfig {
        goal: Goal::Train,
        seed: 5,
        steps: 200,
        max_wall_s,
        checkpoint_every: 10,
        samples: SampleKind::Run,
        tasks_per_step: 8,
        over_sample: 0,
        group_size: 8,
        stop_decided: None,
        retries: 2,
        refill: 1,
        late_rounds: None,
        overlap: None,
        tasks: TaskSampling::Uniform,
        train_tasks: 500,
        held_out_tasks: 20,
        eval: EvalConfig {
            tasks: 20,
            episodes_per_task: 1,
            every: 50,
            temperature: 1.0,
            greedy: false,
        },
    }
}

impl World {
    fn new(max_wall_s: Option<f64>, seed: u64) -> Self {
        Self {
            core: PipelineCore::new(Arc::new(config(max_wall_s)), CoreState::default()),
            seed,
            now: 0.0,
            ends: BTreeMap::new(),
            episode_s: 0.0,
            rollout_s: 0.0,
            trained: Vec::new(),
            dropped: BTreeSet::new(),
            started: 0,
            checkpoints: Vec::new(),
        }
    }

    fn on(&mut self, event: Event) -> Vec<Command> {
        self.core.on(event, self.now)
    }

    /// Runs to the end; gives why it ended.
    fn run(&mut self) -> StopReason {
        let mut commands = VecDeque::from(self.on(Event::Begin));
        loop {
            let Some(command) = commands.pop_front() else {
                commands.extend(self.next_end());
                continue;
            };
            if let Command::Stop(stop) = command {
                return stop;
            }
            commands.extend(self.carry_out(command));
        }
    }

    fn next_end(&mut self) -> Vec<Command> {
        let ((at, episode), failed) = self.ends.pop_first().unwrap();
        let then = at as f64 / 1e6;
        self.rollout_s += then - self.now;
        self.now = then;
        self.on(Event::EpisodeEnded(EpisodeResult {
            episode,
            failed,
            stored: false,
            outcome: None,
            waits_for_group: false,
            changed: None,
        }))
    }

    fn carry_out(&mut self, command: Command) -> Vec<Command> {
        let event = match command {
            Command::Start { draws, .. } => {
                for draw in draws {
                    // A long tail: a few episodes take ten times as long.
                    let word = mix_seed(self.seed ^ draw.seed, 0);
                    let long = if word.is_multiple_of(20) { 10.0 } else { 1.0 };
                    let seconds = long * (1.0 + (word >> 40) as f64 / (1u64 << 24) as f64);
                    let at = ((self.now + seconds) * 1e6) as u64;
                    let failed = (word >> 8).is_multiple_of(10);
                    self.episode_s += seconds;
                    self.started += 1;
                    self.ends.insert((at, draw.episode), failed);
                }
                return Vec::new();
            }
            Command::CountSpentGroups { groups } => Event::SpentGroupsCounted {
                spent: groups.len() / 4,
            },
            Command::Score { groups, .. } => {
                let trained: Vec<EpisodeId> = groups.into_iter().flatten().collect();
                Event::RowsReady {
                    rows: trained.len(),
                    trained,
                    dropped: BTreeMap::new(),
                    sightings: Vec::new(),
                }
            }
            Command::Train { step, .. } => {
                self.now += TRAIN_S;
                Event::UpdateDone(Box::new(StepRecord {
                    step,
                    rows: 1,
                    trained_tokens: 1,
                    updates_applied: 1,
                    grad_norm: 1.0,
                    ..StepRecord::default()
                }))
            }
            Command::Publish { .. } => {
                self.now += PUBLISH_S;
                Event::WeightsLive { version: 0 }
            }
            Command::Commit(commit) => {
                self.trained.extend(commit.trained);
                self.dropped.extend(commit.dropped.into_keys());
                return Vec::new();
            }
            Command::Checkpoint { step } => {
                self.checkpoints.push(step);
                return Vec::new();
            }
            Command::Measure { .. } => Event::EvaluationDone,
            _ => return Vec::new(),
        };
        self.on(event)
    }

    fn check(&self) {
        let distinct: BTreeSet<_> = self.trained.iter().collect();
        assert_eq!(distinct.len(), self.trained.len(), "none is trained twice");
        assert!(self.dropped.iter().all(|e| !distinct.contains(e)));
        assert!(self.ends.is_empty(), "none is left behind");
    }
}

#[test]
fn a_run_of_hours_trains_every_episode_once_and_waits_for_its_longest() {
    let mut world = World::new(None, 1);
    assert_eq!(world.run(), StopReason::Done);
    world.check();
    assert_eq!(world.core.step(), 200);
    assert_eq!(
        world.checkpoints,
        (1..=20).map(|n| n * 10).collect::<Vec<_>>()
    );
    let held_out = 20 * (1 + 3 + 1);
    let all = world.trained.len() + world.dropped.len();
    assert!(all <= world.started && world.started <= all + 2 * held_out);
    // Generation and training take turns, and a step waits for its tail: what an asynchronous driver
    // of the same core is to win.
    let busy = world.rollout_s / world.now;
    let in_flight = world.episode_s / world.rollout_s;
    assert!(busy > 0.3 && busy < 0.9, "{busy}");
    assert!(in_flight < 64.0, "{in_flight}");
    let mut again = World::new(None, 1);
    again.run();
    assert_eq!((again.trained, again.now), (world.trained, world.now));
}

#[test]
fn a_run_whose_time_is_up_ends_with_whole_steps() {
    let mut world = World::new(Some(3600.0), 2);
    assert_eq!(world.run(), StopReason::Done);
    world.check();
    let steps = world.core.step();
    assert!(steps > 10 && steps < 200, "{steps}");
    assert_eq!(world.checkpoints.last(), Some(&steps));
    // The step that had begun is done, and the last measurement is made.
    assert!(world.now > 3600.0 && world.now < 3900.0, "{}", world.now);
}
