//! Traces made by hand.

use sinew_store::{Score, ScoreRecord};
use sinew_types::{
    EpisodeEnd, EpisodeId, FailureKind, GroupId, Message, NO_PARENT, Node, Origin, Outcome,
    PolicyVersion, Provenance, Role, TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind, Trace,
    VersionSpan,
};

/// Temperature of sampled nodes, which tells episodes apart; every fourth is 1, which is not written.
fn temperature(kind: TokenKind, n: u64) -> f32 {
    match kind {
        TokenKind::Sampled => 0.5 + (n % 4) as f32 / 4.0,
        _ => 1.0,
    }
}

/// Episode `n` of draw `n / 10`, in a group of two, successful if odd, with `tokens` tokens.
pub(crate) fn trace(n: u64, tokens: usize) -> Trace {
    let mut metrics = std::collections::BTreeMap::new();
    metrics.insert("tool_calls".to_owned(), 0.1 + n as f64);
    let messages = vec![Message::new(Role::User, format!("message {n}"))];
    let node = |parent, kind, versions: Vec<VersionSpan>, logprobs: Vec<f32>, tokens| Node {
        logprobs,
        temperature: temperature(kind, n),
        versions,
        state_hash: Some(u64::MAX - n),
        ..Node::given(parent, 0, kind, tokens, messages.clone())
    };
    let span = VersionSpan {
        start: 0,
        len: tokens as u32,
        version: PolicyVersion(n),
    };
    let sampled: Vec<u32> = (0..tokens as u32).map(|i| i * 40_503 % 49_152).collect();
    let logprobs = sampled.iter().map(|&t| -(t as f32) / 7e3).collect();
    let spans = if tokens > 0 { vec![span] } else { Vec::new() };
    let given = vec![1, 2, 3];
    let prompt = node(NO_PARENT, TokenKind::Prompt, Vec::new(), Vec::new(), given);
    let turn = node(0, TokenKind::Sampled, spans, logprobs, sampled);
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new(format!("e{n}")),
        group: GroupId::new(format!("g{}", n / 2)),
        task: TaskId::new(format!("t{}", n / 2)),
        task_kind: "kind".into(),
        origin: Origin {
            run: String::new(),
            draw: n / 10,
            purpose: if n % 7 == 6 { "eval" } else { "train" }.into(),
            external: None,
        },
        provenance: Provenance::default(),
        nodes: vec![prompt, turn],
        outcome: Outcome {
            reward: n as f64 / 3.0,
            success: n % 2 == 1,
            metrics,
            unscored: false,
            unscored_reason: None,
            answer: None,
        },
        end: if n % 5 == 4 {
            EpisodeEnd::Failed {
                kind: FailureKind::Engine,
                message: "gone".into(),
            }
        } else {
            EpisodeEnd::Terminated
        },
        timing: Timing {
            started_unix_s: 1.7e9 + n as f64,
            total_s: 0.1,
            ..Timing::default()
        },
        ignored: std::collections::BTreeMap::new(),
    }
}

pub(crate) fn id(n: u64) -> EpisodeId {
    EpisodeId::new(format!("e{n}"))
}

/// A score of episode `n` from `import`.
pub(crate) fn score(n: u64, name: &str, at_us: u64, value: f64) -> ScoreRecord {
    ScoreRecord {
        episode: id(n),
        name: name.into(),
        source: "import".into(),
        at_us,
        score: Score::Value(value),
    }
}
