//! The part of an episode that a result counts.

use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeEnd, Limit, NO_PARENT, TokenKind, Trace};

/// End of a sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "end")]
pub enum SampleEnd {
    /// The task ended, and the sample has a score.
    Scored,
    /// A limit cut it; it has a score all the same.
    Truncated {
        /// Name of the limit: `turn_tokens`, `turns`, `context`, `wall_time`, or `server`.
        limit: String,
    },
    /// The scorer could not tell.
    Unscored {
        /// Reason, where it is known.
        why: String,
    },
    /// The system failed it, after all further attempts.
    Failed {
        /// Reason.
        why: String,
    },
}

/// One episode of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Id of the task.
    pub task: String,
    /// Type of the task, by which results are split.
    pub kind: String,
    /// Seed of the sampled episodes that it belongs to; `None`: a greedy one.
    pub seed: Option<u64>,
    /// Whether the task was solved; without meaning unless it has a score.
    pub success: bool,
    /// Total reward; without meaning unless it has a score.
    pub reward: f64,
    /// End.
    #[serde(flatten)]
    pub end: SampleEnd,
    /// Tokens of the prompts of all its calls of the model, each counted whole.
    pub prompt_tokens: u64,
    /// Tokens that the model sampled.
    pub sampled_tokens: u64,
    /// Seconds from the start of its environment to its score.
    pub seconds: f64,
}

impl Sample {
    /// The sample that an ended episode is.
    pub fn of(trace: &Trace, seed: Option<u64>) -> Self {
        let end = match &trace.end {
            EpisodeEnd::Failed { kind, message } => SampleEnd::Failed {
                why: format!("{kind:?}: {message}"),
            },
            _ if trace.outcome.unscored => SampleEnd::Unscored {
                why: trace.outcome.unscored_reason.clone().unwrap_or_default(),
            },
            EpisodeEnd::Truncated { limit } => SampleEnd::Truncated {
                limit: limit.name().to_owned(),
            },
            EpisodeEnd::Terminated => SampleEnd::Scored,
        };
        Self {
            task: trace.task.as_str().to_owned(),
            kind: trace.task_kind.clone(),
            seed,
            success: trace.outcome.success,
            reward: trace.total_reward(),
            end,
            prompt_tokens: prompt_tokens(trace),
            sampled_tokens: trace.sampled_tokens() as u64,
            seconds: trace.timing.total_s,
        }
    }

    /// The sample of a server that is sent messages: it ends an answer at the limit of a turn or at its
    /// context, and does not say at which.
    #[must_use]
    pub fn cut_by_server(mut self) -> Self {
        if let SampleEnd::Truncated { limit } = &mut self.end
            && *limit == Limit::Context.name()
        {
            "server".clone_into(limit);
        }
        self
    }

    /// Whether it has a score.
    pub fn is_scored(&self) -> bool {
        matches!(self.end, SampleEnd::Scored | SampleEnd::Truncated { .. })
    }
}

/// Tokens before each sampled node, summed: what a server is paid for without a cache.
fn prompt_tokens(trace: &Trace) -> u64 {
    let mut before = Vec::with_capacity(trace.nodes.len());
    let mut sum = 0;
    for node in &trace.nodes {
        let path: u64 = match node.parent {
            NO_PARENT => 0,
            parent => before.get(parent as usize).copied().unwrap_or(0),
        };
        if node.kind == TokenKind::Sampled {
            sum += path;
        }
        before.push(path + node.tokens.len() as u64);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{
        EpisodeId, GroupId, Node, Origin, Outcome, Provenance, TRACE_FORMAT_VERSION, TaskId, Timing,
    };

    fn node(parent: u32, kind: TokenKind, tokens: usize) -> Node {
        Node::given(parent, 0, kind, vec![1; tokens], Vec::new())
    }

    fn trace(nodes: Vec<Node>) -> Trace {
        Trace {
            format_version: TRACE_FORMAT_VERSION,
            episode: EpisodeId::new("e"),
            group: GroupId::new("g"),
            task: TaskId::new("t"),
            task_kind: "k".into(),
            origin: Origin::default(),
            provenance: Provenance::default(),
            nodes,
            outcome: Outcome {
                reward: 0.5,
                success: true,
                ..Outcome::default()
            },
            end: EpisodeEnd::Terminated,
            timing: Timing::default(),
            ignored: std::collections::BTreeMap::new(),
        }
    }

    #[test]
    fn each_call_is_paid_for_all_that_is_before_it() {
        let nodes = vec![
            node(NO_PARENT, TokenKind::Prompt, 10),
            node(0, TokenKind::Sampled, 3),
            node(1, TokenKind::Observation, 5),
            node(2, TokenKind::Sampled, 2),
        ];
        let sample = Sample::of(&trace(nodes), Some(3));
        assert_eq!((sample.prompt_tokens, sample.sampled_tokens), (10 + 18, 5));
        assert!(sample.is_scored() && sample.seed == Some(3));
    }

    #[test]
    fn what_has_no_score_is_told_apart_from_what_was_cut() {
        let mut cut = trace(Vec::new());
        cut.end = EpisodeEnd::Truncated {
            limit: Limit::TurnTokens,
        };
        let sample = Sample::of(&cut, None);
        assert!(sample.is_scored());
        assert_eq!(
            sample.end,
            SampleEnd::Truncated {
                limit: "turn_tokens".into()
            }
        );
        assert_eq!(sample.clone().cut_by_server(), sample);
        cut.end = EpisodeEnd::Truncated {
            limit: Limit::Context,
        };
        let end = Sample::of(&cut, None).cut_by_server().end;
        let limit = "server".into();
        assert_eq!(end, SampleEnd::Truncated { limit });
        cut.outcome.unscored = true;
        cut.outcome.unscored_reason = Some("no judge".into());
        let sample = Sample::of(&cut, None);
        assert_eq!(
            sample.end,
            SampleEnd::Unscored {
                why: "no judge".into()
            }
        );
        assert!(!sample.is_scored());
        let line = serde_json::to_string(&sample).unwrap();
        assert_eq!(serde_json::from_str::<Sample>(&line).unwrap(), sample);
    }
}
