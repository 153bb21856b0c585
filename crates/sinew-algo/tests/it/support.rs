//! Handmade traces.

use sinew_algo::{
    AlgoError, AlgoReport, Algorithm, AlgorithmConfig, AlgorithmKind, Columns, Draft, RunFacts,
};
use sinew_types::{
    EpisodeEnd, EpisodeId, GroupId, NO_PARENT, Node, NodeId, Origin, Outcome, PolicyVersion,
    Provenance, TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind, Trace, TrainRow, VersionSpan,
};

/// The whole way of a batch in one call.
pub(crate) trait Whole {
    fn rows(&self, groups: &[Vec<Trace>]) -> Result<(Vec<TrainRow>, AlgoReport), AlgoError> {
        self.rows_with(groups, &Columns::new())
    }

    fn rows_with(
        &self,
        groups: &[Vec<Trace>],
        columns: &Columns,
    ) -> Result<(Vec<TrainRow>, AlgoReport), AlgoError>;

    fn draft(&self, groups: &[Vec<Trace>]) -> Result<Draft, AlgoError>;
}

impl Whole for Algorithm {
    fn rows_with(
        &self,
        groups: &[Vec<Trace>],
        columns: &Columns,
    ) -> Result<(Vec<TrainRow>, AlgoReport), AlgoError> {
        self.prepare(groups)?.rows(columns)
    }

    fn draft(&self, groups: &[Vec<Trace>]) -> Result<Draft, AlgoError> {
        self.prepare(groups)?.draft(&Columns::new())
    }
}

pub(crate) const FACTS: RunFacts = RunFacts {
    group_size: 4,
    reference: false,
    teacher: false,
    critic: false,
    max_staleness: 0,
    updates_per_batch: 1,
};

pub(crate) fn node(parent: NodeId, turn: u32, kind: TokenKind, tokens: usize) -> Node {
    let sampled = kind == TokenKind::Sampled;
    let n = if sampled { tokens } else { 0 };
    let span = VersionSpan {
        start: 0,
        len: n as u32,
        version: PolicyVersion(7),
    };
    Node {
        logprobs: (0..n).map(|i| -0.1 * (i + 1) as f32).collect(),
        versions: if n > 0 { vec![span] } else { Vec::new() },
        ..Node::given(parent, turn, kind, (0..tokens as u32).collect(), Vec::new())
    }
}

pub(crate) fn trace(group: &str, episode: &str, reward: f64, nodes: Vec<Node>) -> Trace {
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new(episode),
        group: GroupId::new(group),
        task: TaskId::new(group),
        task_kind: "kind".into(),
        origin: Origin {
            purpose: "train".into(),
            ..Origin::default()
        },
        provenance: Provenance::default(),
        nodes,
        outcome: Outcome {
            reward,
            success: reward > 0.0,
            ..Outcome::default()
        },
        end: EpisodeEnd::Terminated,
        timing: Timing::default(),
        ignored: std::collections::BTreeMap::new(),
    }
}

/// Prompt 2, sampled `tokens`, observation 3, sampled 2.
pub(crate) fn two_turns(group: &str, episode: &str, reward: f64, tokens: usize) -> Trace {
    trace(
        group,
        episode,
        reward,
        vec![
            node(NO_PARENT, 0, TokenKind::Prompt, 2),
            node(0, 1, TokenKind::Sampled, tokens),
            node(1, 1, TokenKind::Observation, 3),
            node(2, 2, TokenKind::Sampled, 2),
        ],
    )
}

/// A group of episodes with the given rewards; episode `i` samples `i + 1 + 2` tokens.
pub(crate) fn group(id: &str, rewards: &[f64]) -> Vec<Trace> {
    let episode = |(i, &r): (usize, &f64)| two_turns(id, &format!("{id}-{i}"), r, i + 1);
    rewards.iter().enumerate().map(episode).collect()
}

pub(crate) fn algorithm(kind: AlgorithmKind) -> Algorithm {
    from(&AlgorithmConfig::new(kind))
}

pub(crate) fn from(config: &AlgorithmConfig) -> Algorithm {
    config.resolve(&FACTS).unwrap()
}

pub(crate) fn config(toml: &str) -> AlgorithmConfig {
    toml::from_str(toml).unwrap()
}

/// Sum of weights over all rows of an episode.
pub(crate) fn weight(rows: &[TrainRow], episode: &str) -> f64 {
    let own = rows.iter().filter(|r| r.episode.as_str() == episode);
    own.flat_map(|r| &r.weights).map(|w| f64::from(*w)).sum()
}

/// Advantage of the first trained token of an episode.
pub(crate) fn advantage(rows: &[TrainRow], episode: &str) -> f32 {
    let row = rows.iter().find(|r| r.episode.as_str() == episode).unwrap();
    let t = row.weights.iter().position(|w| *w != 0.0).unwrap();
    row.advantages[t]
}

pub(crate) fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * (1.0 + b.abs())
}
