//! Steps of agents whose rewards come from outside.

use super::*;
use crate::intake::IntakeConfig;
use crate::live_feed::LIVE;
use serde_json::Value;
use sinew_algo::{Algorithm, AlgorithmConfig, Columns, Prepared, RunFacts};
use sinew_env::Split;
use sinew_env::tiny::TinyTaskset;
use sinew_orchestrator::{Draw, LateConfig, Rows, StaleGroups, StepRecord};
use sinew_pipeline::{LateScores, Learner};
use sinew_rollout::RunInfo;
use sinew_store::{MemoryStore, Score, ScoreRecord, ScoreRule, ScoreTerm, TraceStore};
use sinew_types::{
    GroupId, LossSpec, NO_PARENT, Node, PolicyVersion, SamplingParams, TensorSource, TokenKind,
    Trace, VersionSpan,
};

/// Weights that a source asks only for their version.
struct First;

impl Learner for First {
    fn version(&self) -> PolicyVersion {
        PolicyVersion(0)
    }

    fn weights(&mut self) -> Result<Arc<dyn TensorSource>, PipelineError> {
        unreachable!("a source publishes nothing")
    }

    fn columns(
        &mut self,
        _: &Algorithm,
        _: &Prepared<'_>,
        _: Columns,
    ) -> Result<Columns, PipelineError> {
        unreachable!("a source makes no rows")
    }

    fn score_data(
        &mut self,
        _: &Algorithm,
        _: &mut [Vec<Trace>],
        _: &Columns,
    ) -> Result<(), PipelineError> {
        unreachable!("agents bring their log-probabilities")
    }

    fn update(
        &mut self,
        _: &mut Rows,
        _: &LossSpec,
        _: &mut StepRecord,
    ) -> Result<(), PipelineError> {
        unreachable!("a source trains nothing")
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn save(&mut self, _: u64, _: Value) -> Result<(), PipelineError> {
        unreachable!("a source saves nothing")
    }
}

/// Rewards that lie in the store already.
struct There;

impl LateScores for There {
    fn take(&mut self, _: &dyn TraceStore, _: bool) -> Result<(), PipelineError> {
        Ok(())
    }

    fn now_s(&self) -> f64 {
        50.0
    }
}

fn late() -> LateRewards {
    LateRewards {
        config: LateConfig {
            rule: ScoreRule {
                own: None,
                terms: vec![ScoreTerm {
                    name: "thumbs".into(),
                    weight: 2.0,
                    source: None,
                }],
            },
            own_if_given: false,
            wait_s: 100.0,
            max_staleness: 9,
            after: StaleGroups::Drop,
            partial: false,
            max_waiting: 8,
        },
        scores: Box::new(There),
    }
}

/// A rollout of two sampled tokens, the only one in its round of a group whose name comes again.
fn rollout(episode: &str) -> Trace {
    let draw = Draw {
        episode: EpisodeId::new(episode),
        group: GroupId::new("one"),
        split: Split::Train,
        task: 0,
        draw: 0,
        purpose: LIVE.into(),
        seed: 1,
    };
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
    trace
}

fn algorithm() -> Algorithm {
    let config: AlgorithmConfig = serde_json::from_str(r#"{"type": "grpo"}"#).unwrap();
    let facts = RunFacts {
        group_size: 2,
        reference: false,
        teacher: false,
        critic: false,
        max_staleness: 0,
        updates_per_batch: 1,
    };
    Algorithm::new(&config, &facts).unwrap()
}

/// Agents are silent, and a group of a name that the step has already is ready: it is for the next step,
/// which begins at once.
#[test]
fn silent_agents_end_a_step_that_cannot_take_what_is_ready() {
    let store = MemoryStore::new(1 << 20);
    for member in ["a-e0", "b-e0"] {
        store.commit(&rollout(member)).unwrap();
    }
    let scores = ["a-e0", "b-e0"].map(|member| ScoreRecord {
        episode: EpisodeId::new(member),
        name: "thumbs".into(),
        source: "person".into(),
        at_us: 1,
        score: Score::Value(1.0),
    });
    store.put_scores(&scores).unwrap();
    let intake = IntakeConfig {
        group_size: 1,
        min_group: 1,
        group_wait_s: 1.0,
        max_age: 9,
        max_waiting: 9,
    };
    let rollouts = Arc::new(LiveRollouts::open(intake, &store, true).unwrap());
    let (_stop, cancel) = watch::channel(false);
    let source = LiveSource::new(rollouts, Duration::ZERO, cancel, Box::new(()));
    let mut source = source.with_late(late());
    let mut given = |step| {
        let wanted = GroupRequest {
            step,
            groups: 3,
            seed: 1,
            max_path_tokens: 8,
            algorithm: &algorithm(),
            store: &store,
            learner: &mut First,
            tick: &mut |_, _| {},
        };
        source.groups(wanted).unwrap().groups.len()
    };
    assert_eq!([given(1), given(2), given(3)], [1, 1, 0]);
}
