//! Synchronous steps whose episodes have a long tail, under virtual time: the pure cores of the loop and of
//! the order in which episodes begin, with as many places in every run.

use sinew_orchestrator::{
    Command, CoreConfig, CoreState, Draw, EpisodeResult, EvalConfig, Event, Goal, PipelineCore,
    SampleKind, StepRecord, TaskSampling,
};
use sinew_rollout::{EpisodeSpec, LengthEvidence, OutlookCore};
use sinew_types::{EpisodeId, Task, TaskId, mix_seed};
use std::collections::{BTreeMap, VecDeque};
use std::f64::consts::TAU;
use std::sync::Arc;

/// Four steps put off what the fifth runs, so that at the end nothing is left.
const STEPS: u64 = 20;
const GROUPS: usize = 16;
const MORE: usize = 4;
const SIZE: usize = 4;

/// Settings of a run for its tail.
#[derive(Clone, Copy)]
struct How {
    longest_first: bool,
    over_sample: usize,
    places: usize,
    /// Different tasks.
    tasks: usize,
}

/// A normal number (Box and Muller 1958).
fn normal(key: u64) -> f64 {
    let uniform = |n: u64| (mix_seed(key, n) >> 11) as f64 / (1u64 << 53) as f64;
    (-2.0 * (1.0 - uniform(0)).ln()).sqrt() * (TAU * uniform(1)).cos()
}

/// Seconds of an episode: by its task, with a tenth of them five times the median or more, and by itself.
fn seconds(seed: u64, draw: &Draw) -> f64 {
    let task = normal(mix_seed(seed, draw.task as u64));
    (1.3 * task + 0.3 * normal(draw.seed)).exp().min(20.0)
}

struct World {
    core: PipelineCore,
    how: How,
    seed: u64,
    now: f64,
    outlook: OutlookCore,
    waiting: VecDeque<EpisodeSpec>,
    draws: BTreeMap<EpisodeId, Draw>,
    /// Running episodes by their ends, in microseconds.
    running: BTreeMap<(u64, EpisodeId), (EpisodeSpec, f64)>,
    trained: Vec<usize>,
}

fn spec(draw: &Draw) -> EpisodeSpec {
    EpisodeSpec {
        episode: draw.episode.clone(),
        group: draw.group.clone(),
        task: Task {
            id: TaskId::new(draw.task.to_string()),
            kind: "k".into(),
            preamble: Vec::new(),
            prompt: String::new(),
            data: serde_json::Value::Null,
            seed: 0,
        },
        draw: draw.draw,
        purpose: draw.purpose.clone(),
        seed: draw.seed,
    }
}

impl World {
    fn new(how: How, seed: u64) -> Self {
        let config = CoreConfig {
            goal: Goal::Train,
            seed,
            steps: STEPS,
            max_wall_s: None,
            checkpoint_every: STEPS,
            samples: SampleKind::Run,
            tasks_per_step: GROUPS,
            over_sample: how.over_sample,
            group_size: SIZE,
            stop_decided: None,
            retries: 0,
            refill: 0,
            late_rounds: None,
            overlap: None,
            tasks: TaskSampling::Uniform,
            train_tasks: how.tasks,
            held_out_tasks: 0,
            eval: EvalConfig {
                tasks: 0,
                episodes_per_task: 1,
                every: 0,
                temperature: 1.0,
                greedy: false,
            },
        };
        Self {
            core: PipelineCore::new(Arc::new(config), CoreState::default()),
            how,
            seed,
            now: 0.0,
            outlook: OutlookCore::default(),
            waiting: VecDeque::new(),
            draws: BTreeMap::new(),
            running: BTreeMap::new(),
            trained: Vec::new(),
        }
    }

    /// Seconds of the whole run, which rolls out and nothing else, and the tasks that it trained, sorted.
    fn run(mut self) -> (f64, Vec<usize>) {
        let mut commands = VecDeque::from(self.core.on(Event::Begin, 0.0));
        loop {
            let more = match commands.pop_front() {
                Some(Command::Stop(_)) => {
                    self.trained.sort_unstable();
                    return (self.now, self.trained);
                }
                Some(command) => self.carry_out(command),
                None => self.next_end(),
            };
            commands.extend(more);
        }
    }

    /// Fills the places, and continues to the next end.
    fn next_end(&mut self) -> Vec<Command> {
        while self.running.len() < self.how.places && !self.waiting.is_empty() {
            let ranks = self.waiting.iter().enumerate();
            let first = if self.how.longest_first {
                ranks.min_by_key(|(_, s)| self.outlook.rank(s, self.now))
            } else {
                ranks.min_by_key(|(at, _)| *at)
            };
            let at = first.map_or(0, |(at, _)| at);
            let spec = self.waiting.remove(at).unwrap();
            self.outlook.began(&spec, self.now);
            let takes = seconds(self.seed, &self.draws[&spec.episode]);
            let end = ((self.now + takes) * 1e6) as u64;
            self.running
                .insert((end, spec.episode.clone()), (spec, takes));
        }
        let ((at, episode), (spec, takes)) = self.running.pop_first().unwrap();
        self.now = at as f64 / 1e6;
        self.outlook
            .ended(&spec, LengthEvidence::Seconds(takes), self.now);
        let ended = EpisodeResult {
            episode,
            failed: false,
            stored: false,
            outcome: None,
            waits_for_group: false,
            changed: None,
        };
        self.core.on(Event::EpisodeEnded(ended), self.now)
    }

    fn carry_out(&mut self, command: Command) -> Vec<Command> {
        let event = match command {
            Command::Start { draws, .. } => {
                self.waiting.extend(draws.iter().map(spec));
                self.draws
                    .extend(draws.into_iter().map(|d| (d.episode.clone(), d)));
                return Vec::new();
            }
            Command::Abandon { episodes } => {
                self.waiting.retain(|s| !episodes.contains(&s.episode));
                let stopped = self
                    .running
                    .extract_if(.., |(_, e), _| episodes.contains(e));
                for (_, (spec, _)) in stopped {
                    self.outlook.ended(&spec, LengthEvidence::Longer, self.now);
                }
                return Vec::new();
            }
            Command::Score { groups, .. } => {
                let trained: Vec<EpisodeId> = groups.into_iter().flatten().collect();
                Event::RowsReady {
                    rows: trained.len(),
                    trained,
                    dropped: BTreeMap::new(),
                    sightings: Vec::new(),
                }
            }
            Command::Train { step, .. } => Event::UpdateDone(Box::new(StepRecord {
                step,
                rows: 1,
                trained_tokens: 1,
                updates_applied: 1,
                grad_norm: 1.0,
                ..StepRecord::default()
            })),
            Command::Publish { step } => Event::WeightsLive { version: step },
            Command::Commit(commit) => {
                let tasks = commit.trained.iter().map(|e| self.draws[e].task);
                self.trained.extend(tasks);
                return Vec::new();
            }
            Command::Measure { .. } => Event::EvaluationDone,
            _ => return Vec::new(),
        };
        self.core.on(event, self.now)
    }
}

/// Times by which a run is faster than the plain one, on the mean of some seeds; both train the same tasks as
/// often.
fn gain(how: How) -> f64 {
    let (mut plain_s, mut tail_s) = (0.0, 0.0);
    for seed in 0..12 {
        let plain = How {
            longest_first: false,
            over_sample: 0,
            ..how
        };
        let (plain, tail) = (World::new(plain, seed).run(), World::new(how, seed).run());
        assert_eq!(plain.1, tail.1, "seed {seed}");
        plain_s += plain.0;
        tail_s += tail.0;
    }
    plain_s / tail_s
}

/// Each task once in the run; as many places as a plain step has episodes, and half of them.
#[test]
fn groups_that_take_long_run_together_and_cost_their_time_once() {
    let all = How {
        longest_first: false,
        over_sample: MORE,
        places: GROUPS * SIZE,
        tasks: STEPS as usize * GROUPS,
    };
    let gains = [
        gain(all),
        gain(How {
            longest_first: true,
            ..all
        }),
        gain(How {
            places: GROUPS * SIZE / 2,
            ..all
        }),
        gain(How {
            places: GROUPS * SIZE / 2,
            longest_first: true,
            ..all
        }),
    ];
    assert!(gains[0] >= 1.74 && gains[1] >= 1.74, "{gains:?}");
    assert!(gains[2] >= 1.4 && gains[3] >= gains[2], "{gains:?}");
}

/// The longest episodes begin first, in a set-up with few places and recurring tasks.
#[test]
fn the_order_alone_shortens_a_step_where_places_are_short() {
    let ordered = gain(How {
        longest_first: true,
        over_sample: 0,
        places: 16,
        tasks: 2 * GROUPS,
    });
    assert!(ordered >= 1.05, "{ordered}");
}
