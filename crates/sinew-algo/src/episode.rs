//! Internal form of an episode: leaf paths, the tokens that each path trains, and turns.

use crate::composition::{Composition, Truncated};
use crate::earlier::EarlierRewards;
use crate::error::AlgoError;
use sinew_types::{
    Enforced, EpisodeEnd, EpisodeId, NodeId, PathToken, RowMasks, TokenKind, TokenLogprob, Trace,
};
use std::collections::{BTreeMap, HashSet};

/// Per-token inputs that are not in the trace. `column[node][i]` belongs to token `i` of the node. Only
/// entries of sampled nodes are read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EpisodeColumns {
    /// Critic's value before the token was sampled.
    pub values: Option<Vec<Vec<f32>>>,
    /// Critic's value after the last token of a path, by the path's leaf. Required for truncated episodes
    /// with bootstrapping.
    pub values_after: BTreeMap<NodeId, f32>,
    /// Log-probabilities of the reference model.
    pub ref_logprobs: Option<Vec<Vec<f32>>>,
    /// Log-probabilities of the proximal policy.
    pub prox_logprobs: Option<Vec<Vec<f32>>>,
    /// Log-probabilities of the teacher.
    pub teacher_logprobs: Option<Vec<Vec<f32>>>,
    /// The teacher's most likely tokens, best first.
    pub teacher_top: Option<Vec<Vec<Vec<TokenLogprob>>>>,
    /// Recomputed masks of nodes that were sampled under a format. Entry `i` belongs to token `i` of the
    /// node.
    pub masks: BTreeMap<NodeId, RowMasks>,
    /// Rewards of earlier episodes of its task, for the only episode of a group. Group estimators take their
    /// mean as baseline, and their deviation with its own reward as scale.
    pub earlier: Option<EarlierRewards>,
}

/// Columns by episode.
pub type Columns = BTreeMap<EpisodeId, EpisodeColumns>;

/// Sampled tokens of a turn on one path, and the turn's reward.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// First and last position (inclusive) of the turn's sampled tokens.
    pub(crate) first: usize,
    pub(crate) last: usize,
    /// Sum of the turn's process rewards.
    pub(crate) reward: f64,
    /// Hash of the state before the turn.
    pub(crate) state: Option<u64>,
    /// True if this path trains the turn. A shared turn belongs to its first path.
    pub(crate) owned: bool,
}

/// A leaf path. All vectors have the length of `tokens`.
#[derive(Clone, Debug)]
pub(crate) struct Path {
    pub(crate) tokens: Vec<PathToken>,
    /// Offset of the token in its node.
    pub(crate) offsets: Vec<u32>,
    /// True for tokens that were sampled by the policy. False at position 0, which has no prediction.
    pub(crate) sampled: Vec<bool>,
    /// True for `sampled` tokens that no earlier path of the episode trains.
    pub(crate) trains: Vec<bool>,
    pub(crate) steps: Vec<Step>,
    /// Advantage of each token, 0 for tokens that were not sampled.
    pub(crate) advantages: Vec<f64>,
    /// Targets of the value loss.
    pub(crate) returns: Option<Vec<f64>>,
}

/// A usable episode.
#[derive(Clone, Debug)]
pub(crate) struct Episode<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) columns: Option<&'a EpisodeColumns>,
    /// Outcome reward after shaping.
    pub(crate) outcome: f64,
    /// Reward that groups compare: the outcome, plus process rewards if they are summed.
    pub(crate) reward: f64,
    /// Train at the sampling temperature, see [`Composition::tempered`].
    pub(crate) tempered: bool,
    /// Truncated, and the critic's value stands for the missing rewards.
    pub(crate) bootstrapped: bool,
    /// False if the episode counts in its group's statistics but is not trained on.
    pub(crate) trains: bool,
    pub(crate) paths: Vec<Path>,
}

impl<'a> Episode<'a> {
    /// Converts a trace, with its paths if they are needed. The outcome and reward are the recorded ones.
    pub(crate) fn new(c: &Composition, trace: &'a Trace, paths: bool) -> Self {
        let mut trained: HashSet<(NodeId, u32)> = HashSet::new();
        let leaves = if paths { trace.leaves() } else { Vec::new() };
        let mut paths = Vec::new();
        for leaf in leaves {
            let path = Path::new(trace, leaf, &mut trained);
            if path.trains.contains(&true) {
                paths.push(path);
            }
        }
        Self {
            trace,
            columns: None,
            outcome: trace.outcome.reward,
            reward: trace.outcome.reward,
            tempered: c.tempered(),
            bootstrapped: c.filters.truncated == Truncated::Bootstrap
                && matches!(trace.end, EpisodeEnd::Truncated { .. }),
            trains: true,
            paths,
        }
    }

    /// Number of tokens that train, over all paths.
    pub(crate) fn trained_tokens(&self) -> usize {
        if !self.trains {
            return 0;
        }
        let count = |p: &Path| p.trains.iter().filter(|&&t| t).count();
        self.paths.iter().map(count).sum()
    }

    /// Values of a column along a path: those of sampled tokens, 0 elsewhere.
    pub(crate) fn column(
        &self,
        path: &Path,
        pick: impl Fn(&EpisodeColumns) -> Option<&Vec<Vec<f32>>>,
    ) -> Option<Vec<f64>> {
        let by_node = self.columns.and_then(pick)?;
        let at = |t: usize| {
            let value = by_node[path.tokens[t].node as usize][path.offsets[t] as usize];
            f64::from(value)
        };
        let value = |t: usize| if path.sampled[t] { at(t) } else { 0.0 };
        Some((0..path.tokens.len()).map(value).collect())
    }
}

impl Episode<'_> {
    /// The teacher's most likely tokens at the trained tokens of a path, empty elsewhere.
    pub(crate) fn teacher_top(&self, path: &Path) -> Option<Vec<Vec<TokenLogprob>>> {
        let by_node = self.columns?.teacher_top.as_ref()?;
        let at = |t: usize| {
            let (node, offset) = (path.tokens[t].node as usize, path.offsets[t] as usize);
            by_node[node][offset].clone()
        };
        let top = |t: usize| if path.trains[t] { at(t) } else { Vec::new() };
        Some((0..path.tokens.len()).map(top).collect())
    }

    /// Masks of the trained tokens of a path. `None` if all were sampled from the full softmax.
    ///
    /// # Errors
    /// [`AlgoError::MissingMask`] if the mask of such a token is missing. Training without it would use
    /// another distribution.
    pub(crate) fn masks(
        &self,
        path: &Path,
        columns: Option<&EpisodeColumns>,
    ) -> Result<Option<RowMasks>, AlgoError> {
        let held = |t: usize| {
            let format = self.trace.nodes[path.tokens[t].node as usize]
                .format
                .as_ref();
            path.trains[t] && format.is_some_and(|f| f.law.enforced != Enforced::Advice)
        };
        if !(0..path.tokens.len()).any(held) {
            return Ok(None);
        }
        let mut words = 0;
        let mut each = Vec::with_capacity(path.tokens.len());
        for (t, token) in path.tokens.iter().enumerate() {
            if !held(t) {
                each.push(None);
                continue;
            }
            let given = columns.and_then(|c| c.masks.get(&token.node));
            let mask = given.and_then(|m| m.mask(path.offsets[t] as usize));
            let Some(mask) = mask.filter(|m| words == 0 || m.len() == words) else {
                return Err(AlgoError::MissingMask {
                    episode: self.trace.episode.clone(),
                    node: token.node,
                    index: path.offsets[t],
                });
            };
            words = mask.len();
            each.push(Some(mask));
        }
        Ok(Some(RowMasks::gather(words, each)))
    }
}

impl Path {
    /// Builds the path to `leaf`. Adds the tokens that it trains to `trained`.
    fn new(trace: &Trace, leaf: NodeId, trained: &mut HashSet<(NodeId, u32)>) -> Self {
        let tokens = trace.path_tokens(leaf);
        let n = tokens.len();
        let mut offsets = Vec::with_capacity(n);
        for t in 0..n {
            let same = t > 0 && tokens[t].node == tokens[t - 1].node;
            offsets.push(if same { offsets[t - 1] + 1 } else { 0 });
        }
        let sampled: Vec<bool> = (0..n)
            .map(|t| t > 0 && tokens[t].kind == TokenKind::Sampled)
            .collect();
        let trains: Vec<bool> = (0..n)
            .map(|t| sampled[t] && trained.insert((tokens[t].node, offsets[t])))
            .collect();
        let steps = steps(trace, leaf, &tokens, &sampled, &trains);
        Self {
            offsets,
            sampled,
            trains,
            steps,
            advantages: vec![0.0; n],
            returns: None,
            tokens,
        }
    }
}

/// Turns of a path. A turn is a run of nodes with equal `turn` and sampled tokens. The process reward of a
/// node without sampled tokens belongs to the previous turn, or to the first one.
fn steps(
    trace: &Trace,
    leaf: NodeId,
    tokens: &[PathToken],
    sampled: &[bool],
    trains: &[bool],
) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut turns: Vec<u32> = Vec::new();
    let mut state = None;
    let mut early_reward = 0.0;
    let mut position = 0;
    for id in trace.path(leaf) {
        let node = &trace.nodes[id as usize];
        let range = position..position + node.tokens.len();
        position = range.end;
        if let Some(first) = range.clone().find(|&t| sampled[t]) {
            let last = range.clone().rev().find(|&t| sampled[t]).unwrap_or(first);
            match steps.last_mut() {
                Some(step) if turns.last() == Some(&node.turn) => {
                    step.last = last;
                    step.owned |= trains[first];
                }
                _ => {
                    turns.push(node.turn);
                    steps.push(Step {
                        first,
                        last,
                        reward: std::mem::take(&mut early_reward),
                        state: state.take(),
                        owned: trains[first],
                    });
                }
            }
        } else if node.state_hash.is_some() {
            state = node.state_hash;
        }
        match steps.last_mut() {
            Some(step) => step.reward += node.process_reward,
            None => early_reward += node.process_reward,
        }
    }
    debug_assert_eq!(position, tokens.len());
    steps
}
