//! Whole synchronous runs with the smallest possible ports: no model, no engine, no environment.

use super::{Pipeline, run};
use crate::config::PipelineConfig;
use crate::ports::{
    GroupRequest, GroupScores, Learner, RolloutReading, Rollouts, SampleSource, ScoredGroup,
    SourceGroups, StoredEpisode, WeightsTransport,
};
use crate::state::{RunStore, SavedState};
use serde_json::Value;
use sinew_algo::{Algorithm, AlgorithmConfig, Columns, Prepared, RunFacts};
use sinew_env::tiny::TinyTaskset;
use sinew_env::{waits_for_group, with_group};
use sinew_orchestrator::{
    Bus, CoreConfig, Draw, EvalConfig, Goal, Member, Phase, PipelineError, Recorder,
    RolloutProgress, Rows, RunEvent, RunOutcome, SampleKind, StepRecord, TaskSampling, completed,
    keep_scores,
};
use sinew_render::TinyRenderer;
use sinew_rollout::RunInfo;
use sinew_store::{MemoryStore, TraceStore, own};
use sinew_types::{
    EpisodeId, Fence, GroupId, LossSpec, NO_PARENT, Node, Outcome, PolicyVersion, SamplingParams,
    TensorList, TensorSource, TokenKind, Trace, VersionSpan,
};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

mod consumed;
mod fence;
mod late;
mod overlap;

const STEPS: u64 = 3;
const TASKS: usize = 2;
const GROUP: usize = 2;

/// Episodes of two tokens that are over at once; of each group the first ones succeed.
struct Instantly {
    store: Arc<dyn TraceStore>,
    ended: Vec<StoredEpisode>,
    /// Episodes that were run, and not found in the store.
    log: Log,
    grouped: bool,
}

impl Rollouts for Instantly {
    fn start(&mut self, draws: &[Draw], _: Option<f32>) -> Result<(), PipelineError> {
        for draw in draws {
            let stored = self.store.get(&draw.episode).unwrap();
            let known = stored.is_some();
            let mut trace = stored.unwrap_or_else(|| episode(draw));
            if !known {
                let version = self.log.lock().unwrap().published.last().copied();
                trace.nodes[1].versions[0].version = PolicyVersion(version.unwrap_or(0));
            }
            if self.grouped && !known {
                let own = sinew_env::Score {
                    waits_for_group: true,
                    ..sinew_env::Score::new(0.5).unwrap()
                };
                trace.outcome = own.into_outcome();
            }
            if !known {
                self.store.commit(&trace).unwrap();
                self.log.lock().unwrap().run.push(draw.episode.clone());
            }
            let trace = completed(self.store.as_ref(), trace)?;
            self.ended.push(StoredEpisode {
                trace,
                known,
                changed: None,
                rescored: false,
            });
        }
        Ok(())
    }

    fn stop(&mut self, episodes: &[EpisodeId]) {
        self.ended.retain(|e| !episodes.contains(&e.trace.episode));
    }

    fn ended(
        &mut self,
        tick: &mut dyn FnMut(RolloutProgress),
    ) -> Result<Vec<StoredEpisode>, PipelineError> {
        tick(RolloutProgress::default());
        Ok(std::mem::take(&mut self.ended))
    }

    fn is_running(&self) -> bool {
        !self.ended.is_empty()
    }

    fn reading(&self) -> RolloutReading {
        RolloutReading::default()
    }
}

/// Ranks members by their place, a group a call; the first rank succeeds.
struct ByPlace {
    store: Arc<MemoryStore>,
    begun: Vec<ScoredGroup>,
    log: Log,
    /// Number of groups after which the process ends before it keeps another one; 0 is none.
    dies_after: usize,
}

impl GroupScores for ByPlace {
    fn start(&mut self, members: Vec<(Draw, Trace)>) -> Result<(), PipelineError> {
        let group = members[0].0.group.clone();
        let waits = members
            .into_iter()
            .filter(|(_, t)| waits_for_group(&t.outcome));
        let scores: Vec<_> = waits
            .enumerate()
            .map(|(place, (_, trace))| {
                let (episode, outcome) = (trace.episode, trace.outcome);
                let score = sinew_env::Score::new(1.0 - place as f64);
                (Member { episode, outcome }, score)
            })
            .collect();
        let whole = |(m, s): &(Member, Result<_, _>)| {
            (m.episode.clone(), with_group(&m.outcome, Result::clone(s)))
        };
        let outcomes = scores.iter().map(whole).collect();
        let mut log = self.log.lock().unwrap();
        if self.dies_after > 0 && log.scored.len() == self.dies_after {
            return Err(PipelineError::system("killed before the group was kept"));
        }
        keep_scores(self.store.as_ref(), &scores, 7)?;
        log.scored.push(group.clone());
        self.begun.push(ScoredGroup { group, outcomes });
        Ok(())
    }

    fn scored(&mut self, wait: bool) -> Result<Vec<ScoredGroup>, PipelineError> {
        // Those that are not waited for come later.
        Ok(if wait {
            std::mem::take(&mut self.begun)
        } else {
            Vec::new()
        })
    }
}

fn episode(draw: &Draw) -> Trace {
    let spec = draw.spec(&TinyTaskset::new(0)).unwrap();
    let mut trace = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], Vec::new());
    let mut turn = Node::given(0, 1, TokenKind::Sampled, vec![3, 4], Vec::new());
    turn.logprobs = vec![-0.5, -0.5];
    turn.temperature = 1.0;
    turn.versions = vec![VersionSpan {
        start: 0,
        len: 2,
        version: PolicyVersion(0),
    }];
    trace.nodes = vec![prompt, turn];
    let success = !draw.episode.to_string().ends_with("e1");
    trace.outcome = Outcome {
        reward: f64::from(u8::from(success)),
        success,
        ..Outcome::default()
    };
    trace
}

/// Gives groups that are there already, one a step, and writes down what was consumed.
struct Queued {
    groups: Vec<Vec<Trace>>,
    faults: Faults,
    log: Log,
}

impl SampleSource for Queued {
    fn groups(&mut self, wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let group = self.groups.get(wanted.step as usize - 1);
        let groups: Vec<Vec<Trace>> = group.cloned().into_iter().collect();
        for trace in groups.iter().flatten() {
            wanted.store.commit(trace).unwrap();
        }
        Ok(SourceGroups {
            groups,
            ..SourceGroups::default()
        })
    }

    fn consumes(&mut self, step: u64) -> Result<Option<Value>, PipelineError> {
        if step == self.faults.consumes {
            Err(PipelineError::system("rows went to another trainer"))
        } else {
            Ok(Some(step.into()))
        }
    }

    fn committed(&mut self, consumed: &Value) -> Result<(), PipelineError> {
        if *consumed == self.faults.acks {
            return Err(PipelineError::system("killed before the ack"));
        }
        self.log.lock().unwrap().consumed.push(consumed.clone());
        Ok(())
    }
}

/// Counts updates in place of weights.
struct Counter {
    updates: u64,
    fails_at: u64,
    log: Log,
}

impl Learner for Counter {
    fn version(&self) -> PolicyVersion {
        PolicyVersion(self.updates)
    }

    fn weights(&mut self) -> Result<Arc<dyn TensorSource>, PipelineError> {
        Ok(Arc::new(TensorList::default()))
    }

    fn columns(
        &mut self,
        _: &Algorithm,
        _: &Prepared<'_>,
        known: Columns,
    ) -> Result<Columns, PipelineError> {
        Ok(known)
    }

    fn score_data(
        &mut self,
        _: &Algorithm,
        _: &mut [Vec<Trace>],
        _: &Columns,
    ) -> Result<(), PipelineError> {
        Ok(())
    }

    fn update(
        &mut self,
        batch: &mut Rows,
        _: &LossSpec,
        record: &mut StepRecord,
    ) -> Result<(), PipelineError> {
        assert_ne!(self.fails_at, u64::MAX, "it panics");
        if self.updates + 1 == self.fails_at {
            return Err(PipelineError::system("learner: out of memory"));
        }
        self.updates += 1;
        record.trained_tokens = batch.report.trained_tokens;
        record.updates_applied = 1;
        record.grad_norm = 1.0;
        Ok(())
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn save(&mut self, _: u64, state: Value) -> Result<(), PipelineError> {
        self.log.lock().unwrap().saved = Some((self.updates, state));
        Ok(())
    }
}

/// Writes versions down; one of them is the last thing that the process does.
struct Written {
    dies_at: u64,
    takeover: Takeover,
    store: Arc<MemoryStore>,
    log: Log,
}

impl WeightsTransport for Written {
    fn publish(
        &mut self,
        version: PolicyVersion,
        _: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        self.log.lock().unwrap().published.push(version.0);
        if self.takeover == Takeover::Publishing(version.0) {
            self.store.take_fence().unwrap();
        }
        if version.0 == self.dies_at {
            Err(PipelineError::system("transport: gone"))
        } else {
            Ok(())
        }
    }
}

/// Ends the process when a step is reported: after its commit, and before anything that follows.
struct DiesAfter(u64);

impl Recorder for DiesAfter {
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        match event {
            RunEvent::Step(record) if record.step == self.0 => Err(PipelineError::system("killed")),
            _ => Ok(()),
        }
    }
}

/// The instant at which another process takes the run over.
#[derive(Clone, Copy, Default, PartialEq)]
enum Takeover {
    #[default]
    Never,
    /// While these weights are published.
    Publishing(u64),
    /// When this step is reported, after its commit.
    AfterStep(u64),
    /// When a checkpoint begins.
    Saving,
}

/// Takes the run over at an event.
struct TakesOver {
    at: Takeover,
    store: Arc<MemoryStore>,
}

impl Recorder for TakesOver {
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        let is_now = match event {
            RunEvent::Step(record) => self.at == Takeover::AfterStep(record.step),
            RunEvent::Phase(Phase::Saving) => self.at == Takeover::Saving,
            _ => false,
        };
        if is_now {
            self.store.take_fence().unwrap();
        }
        Ok(())
    }
}

/// Calls of the ports, over all sessions of a run.
#[derive(Default)]
struct Seen {
    run: Vec<EpisodeId>,
    /// Groups that were scored.
    scored: Vec<GroupId>,
    published: Vec<u64>,
    /// Commits that were reported to sources.
    consumed: Vec<Value>,
    /// The last checkpoint: updates in the weights, and the state.
    saved: Option<(u64, Value)>,
}

type Log = Arc<Mutex<Seen>>;

/// Faults of a session; 0 is none.
#[derive(Clone, Copy, Default)]
struct Faults {
    learner: u64,
    transport: u64,
    killed_after: u64,
    /// The step whose rows are not the run's any more when it is to be committed.
    consumes: u64,
    /// The step after whose commit the process ends before its rows are given back.
    acks: u64,
    /// Groups that are kept before the process ends.
    groups: usize,
    takeover: Takeover,
}

struct World {
    store: Arc<MemoryStore>,
    run_dir: tempfile::TempDir,
    log: Log,
    samples: SampleKind,
    /// Episodes wait for the scores of their groups.
    grouped: bool,
    /// Owner of the next session; `None`: it takes a number itself.
    fence: Option<Fence>,
}

impl World {
    fn new(samples: SampleKind) -> Self {
        Self {
            grouped: false,
            fence: None,
            store: Arc::new(MemoryStore::new(1 << 20)),
            run_dir: tempfile::tempdir().unwrap(),
            log: Log::default(),
            samples,
        }
    }

    /// One session, from the last checkpoint.
    fn session(&self, faults: Faults) -> Result<RunOutcome, PipelineError> {
        self.session_with(faults, config(self.samples))
    }

    fn session_with(&self, faults: Faults, core: CoreConfig) -> Result<RunOutcome, PipelineError> {
        self.session_late(faults, core, None)
    }

    fn session_late(
        &self,
        faults: Faults,
        core: CoreConfig,
        late: Option<crate::late::LateRewards>,
    ) -> Result<RunOutcome, PipelineError> {
        let saved = self.log.lock().unwrap().saved.clone();
        let updates = saved.as_ref().map_or(0, |(updates, _)| *updates);
        let saved = saved.map_or_else(SavedState::default, |(_, s)| SavedState::read(s).unwrap());
        let core = Arc::new(core);
        let given = (1..=STEPS).map(|step| {
            let draw = |k: usize| Draw {
                episode: EpisodeId::new(format!("given{step}-e{k}")),
                group: GroupId::new(format!("given{step}")),
                split: sinew_env::Split::Train,
                task: 0,
                draw: (step - 1) * core.draws_per_step(),
                purpose: "train".into(),
                seed: step,
            };
            (0..GROUP).map(|k| episode(&draw(k))).collect()
        });
        run(Pipeline {
            config: pipeline_config(Arc::clone(&core), self.run_dir.path()),
            algorithm: Arc::new(algorithm()),
            rollouts: Box::new(Instantly {
                store: self.store.clone(),
                ended: Vec::new(),
                log: Arc::clone(&self.log),
                grouped: self.grouped,
            }),
            groups: self.grouped.then(|| {
                Box::new(ByPlace {
                    store: self.store.clone(),
                    begun: Vec::new(),
                    log: Arc::clone(&self.log),
                    dies_after: faults.groups,
                }) as Box<dyn GroupScores>
            }),
            source: (self.samples == SampleKind::Given).then(|| {
                Box::new(Queued {
                    groups: given.collect(),
                    faults,
                    log: Arc::clone(&self.log),
                }) as Box<dyn SampleSource>
            }),
            late,
            learner: Arc::new(Mutex::new(Counter {
                updates,
                fails_at: faults.learner,
                log: Arc::clone(&self.log),
            })),
            transport: Box::new(Written {
                dies_at: faults.transport,
                takeover: faults.takeover,
                store: self.store.clone(),
                log: Arc::clone(&self.log),
            }),
            store: self.run_store(&core),
            grammars: tiny_grammars(),
            bus: self.bus(faults),
            saved,
            started: Instant::now(),
        })
    }

    /// The store of a session, with its owner.
    fn run_store(&self, core: &CoreConfig) -> RunStore {
        RunStore {
            traces: self.store.clone(),
            fence: self.fence.clone().unwrap_or_else(|| self.own()),
            torn: BTreeSet::new(),
            forgets: false,
            draws_per_step: core.draws_per_step(),
        }
    }

    /// The bus of a session, whose recorders make its faults.
    fn bus(&self, faults: Faults) -> Bus {
        let bus = Bus::default();
        bus.record(Box::new(DiesAfter(faults.killed_after)));
        bus.record(Box::new(TakesOver {
            at: faults.takeover,
            store: self.store.clone(),
        }));
        bus
    }

    /// A new owner of the run.
    fn own(&self) -> Fence {
        let store: Arc<dyn TraceStore> = self.store.clone();
        own(&store, self.run_dir.path()).unwrap()
    }

    /// Committed updates: step and trained episodes.
    fn commits(&self) -> Vec<(u64, Vec<EpisodeId>)> {
        let batches = self.store.trained_batches().unwrap();
        let mut commits: Vec<_> = batches.into_iter().map(|b| (b.step, b.episodes)).collect();
        commits.sort();
        commits
    }
}

fn config(samples: SampleKind) -> CoreConfig {
    CoreConfig {
        goal: Goal::Train,
        seed: 7,
        steps: STEPS,
        max_wall_s: None,
        checkpoint_every: 100,
        samples,
        tasks_per_step: TASKS,
        over_sample: 0,
        group_size: GROUP,
        stop_decided: None,
        retries: 0,
        refill: 0,
        late_rounds: None,
        overlap: None,
        tasks: TaskSampling::Uniform,
        train_tasks: 10,
        held_out_tasks: 2,
        eval: EvalConfig {
            tasks: 2,
            episodes_per_task: 1,
            every: 0,
            temperature: 1.0,
            greedy: false,
        },
    }
}

fn pipeline_config(core: Arc<CoreConfig>, run_dir: &Path) -> PipelineConfig {
    PipelineConfig {
        core,
        max_context_tokens: 8,
        run_dir: run_dir.to_owned(),
        command: "train",
        recipe: String::new(),
        trust: Arc::default(),
        accept_loss: false,
    }
}

fn tiny_grammars() -> Arc<dyn sinew_grammar::Grammars> {
    let renderer: Arc<dyn sinew_render::Renderer> = Arc::new(TinyRenderer::new("abc."));
    crate::formats::grammars(&renderer, renderer.vocab_size()).unwrap()
}

fn algorithm() -> Algorithm {
    let config: AlgorithmConfig = toml::from_str("type = 'grpo'").unwrap();
    let facts = RunFacts {
        group_size: GROUP,
        reference: false,
        teacher: false,
        critic: false,
        max_staleness: 0,
        updates_per_batch: 1,
    };
    Algorithm::new(&config, &facts).unwrap()
}

/// A run without faults, to compare others with.
fn unharmed() -> (Vec<(u64, Vec<EpisodeId>)>, Vec<EpisodeId>) {
    let world = World::new(SampleKind::Run);
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!(ended.samples.trained, STEPS as usize * TASKS * GROUP);
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
    assert!(ended.trouble.is_empty(), "{:?}", ended.trouble);
    let log = world.log.lock().unwrap();
    assert_eq!(log.published, [1, 2, 3]);
    assert_eq!(log.saved.as_ref().unwrap().0, STEPS);
    (world.commits(), log.run.clone())
}

#[test]
fn a_run_trains_publishes_commits_and_saves_each_step() {
    let (commits, _) = unharmed();
    let steps: Vec<u64> = commits.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [1, 2, 3]);
}

#[test]
fn given_groups_are_trained_without_rollouts() {
    let world = World::new(SampleKind::Given);
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!(ended.samples.trained, STEPS as usize * GROUP);
    assert_eq!(world.log.lock().unwrap().published, [1, 2, 3]);
    // Only held-out episodes were run.
    let run = world.log.lock().unwrap().run.clone();
    assert!(
        run.iter().all(|e| e.to_string().starts_with("eval")),
        "{run:?}"
    );
}

/// Checks a session with a fault in step 2, and the session that resumes after it.
fn goes_on_after(faults: Faults, error: &str, committed: usize) -> Vec<u64> {
    let (commits, run) = unharmed();
    let world = World::new(SampleKind::Run);
    let failed = world.session(faults).unwrap_err();
    assert!(failed.to_string().contains(error), "{failed}");
    assert_eq!(world.commits(), commits[..committed]);
    assert!(
        world.log.lock().unwrap().saved.is_none(),
        "no checkpoint is due"
    );
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!(
        world.commits(),
        commits,
        "the same updates from the same episodes"
    );
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
    let log = world.log.lock().unwrap();
    assert_eq!(log.run, run, "no episode was run twice");
    log.published.clone()
}

#[test]
fn a_learner_that_fails_ends_the_run_before_its_step_counts() {
    let faults = Faults {
        learner: 2,
        ..Faults::default()
    };
    assert_eq!(goes_on_after(faults, "out of memory", 1), [1, 1, 2, 3]);
}

/// The process is gone once weights are live and before the update is committed: the step is done again from
/// the stored episodes, under the same version.
#[test]
fn a_transport_that_fails_leaves_the_update_uncommitted() {
    let faults = Faults {
        transport: 2,
        ..Faults::default()
    };
    assert_eq!(goes_on_after(faults, "transport: gone", 1), [1, 2, 1, 2, 3]);
}

/// The process is gone once an update is committed and before a checkpoint or another publication: the next
/// session recalls the committed updates.
#[test]
fn a_run_that_is_killed_after_a_commit_recalls_it() {
    let faults = Faults {
        killed_after: 2,
        ..Faults::default()
    };
    assert_eq!(goes_on_after(faults, "killed", 2), [1, 2, 1, 2, 3]);
}

/// A checkpoint after a recalled update counts that update: the session that resumes from it sees it no more.
#[test]
fn a_checkpoint_counts_the_updates_that_were_recalled() {
    let world = World::new(SampleKind::Run);
    let killed = Faults {
        killed_after: 2,
        ..Faults::default()
    };
    world.session(killed).unwrap_err();
    let fails = Faults {
        learner: 3,
        ..Faults::default()
    };
    let each_step = CoreConfig {
        checkpoint_every: 1,
        ..config(SampleKind::Run)
    };
    world.session_with(fails, each_step).unwrap_err();
    assert_eq!(world.log.lock().unwrap().saved.as_ref().unwrap().0, 2);
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!(ended.samples.trained, STEPS as usize * TASKS * GROUP);
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
}

/// A grouped world after its whole run, and the rewards of its training episodes.
fn grouped_run(faults: &[Faults]) -> (World, Vec<f64>) {
    let world = World {
        grouped: true,
        ..World::new(SampleKind::Run)
    };
    for fault in faults {
        let error = world.session(*fault).unwrap_err().to_string();
        assert!(error.contains("killed"), "{error}");
    }
    let ended = world.session(Faults::default()).unwrap();
    assert_eq!((ended.samples.lost, ended.samples.trained_twice), (0, 0));
    assert_eq!(ended.samples.trained, STEPS as usize * TASKS * GROUP);
    // A held-out group of one is the first of its group.
    assert_eq!(ended.after.reward, 1.5);
    let commits = world.commits();
    let trained = commits.iter().flat_map(|(_, episodes)| episodes);
    let reward = |e: &EpisodeId| {
        let trace = world.store.get(e).unwrap().unwrap();
        completed(world.store.as_ref(), trace)
            .unwrap()
            .score()
            .unwrap()
    };
    let rewards = trained.map(reward).collect();
    (world, rewards)
}

#[test]
fn groups_are_scored_once_and_a_killed_run_goes_on_with_their_scores() {
    let (whole, rewards) = grouped_run(&[]);
    // The own 0.5, and 1 for the first place or 0 for the second.
    assert!(
        rewards.chunks(GROUP).all(|g| g == [1.5, 0.5]),
        "{rewards:?}"
    );
    let groups = whole.log.lock().unwrap().scored.clone();
    let distinct: BTreeSet<_> = groups.iter().collect();
    assert_eq!(distinct.len(), groups.len());
    let killed = |groups| Faults {
        groups,
        ..Faults::default()
    };
    let later = Faults {
        killed_after: 2,
        ..Faults::default()
    };
    for faults in [&[killed(3)][..], &[killed(4), later], &[later]] {
        let (world, again) = grouped_run(faults);
        assert_eq!(again, rewards);
        assert_eq!(world.commits(), whole.commits());
        let log = world.log.lock().unwrap();
        let distinct: BTreeSet<_> = log.scored.iter().collect();
        assert_eq!(distinct.len(), log.scored.len(), "no group is scored twice");
        assert_eq!(distinct.len(), groups.len());
    }
}

/// Episodes that wait for the score of their group stay unscored if there is no port for groups: they are not
/// trained as 0.
#[test]
fn episodes_without_the_score_of_their_group_are_left_out() {
    let world = World {
        grouped: true,
        ..World::new(SampleKind::Run)
    };
    let (draws, store) = (
        sinew_orchestrator::eval_episodes(1, ("e", "e"), 1, 1),
        &world.store,
    );
    let mut trace = episode(&draws[0]);
    let own = sinew_env::Score {
        waits_for_group: true,
        ..sinew_env::Score::new(0.5).unwrap()
    };
    trace.outcome = own.into_outcome();
    store.commit(&trace).unwrap();
    let same = completed(store.as_ref(), trace.clone()).unwrap();
    assert_eq!((same.score(), waits_for_group(&same.outcome)), (None, true));
    // A reason in place of a score is kept, too.
    let member = || Member {
        episode: trace.episode.clone(),
        outcome: trace.outcome.clone(),
    };
    let missing = Err(sinew_env::Unscored::new("rank: no idea"));
    keep_scores(store.as_ref(), &[(member(), missing)], 7).unwrap();
    let left = completed(store.as_ref(), trace.clone()).unwrap();
    assert_eq!(
        left.outcome.unscored_reason.as_deref(),
        Some("rank: no idea")
    );
    assert_eq!(left.score(), None);
    let records = store.scores(&trace.episode).unwrap();
    let mut shown = trace.clone();
    assert!(
        sinew_orchestrator::settle(&mut shown, &[], None),
        "it waits"
    );
    let mut shown = trace;
    assert!(!sinew_orchestrator::settle(&mut shown, &records, None));
    assert_eq!(shown.outcome, left.outcome);
}
