//! Input and output types of a session.

use crate::keys::{Key, StateId};
use crate::limits::SessionLimits;
use serde::{Deserialize, Serialize};
use sinew_dialect::{Ignored, Prompt, StoredAnswer};
use sinew_render::{RenderError, Renderer};
use sinew_types::{
    AdapterName, BranchCause, EpisodeEnd, EpisodeId, FinishReason, GroupId, Limit, MAX_EXTERNAL,
    MAX_REWARD, Message, NodeId, Provenance, RouteSpan, SampledToken, Sampling, TaskId, Thinking,
    TokenId, TokenKind, ToolSpec,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sampling parameters of calls: defaults, or pinned values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingDefaults {
    /// Sampling temperature; 0 is greedy.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    /// Maximum output tokens of a call.
    pub max_tokens: Option<u32>,
    /// Whether these values replace those of the client. Training pins them, since the trained policy must be
    /// the one that sampled.
    pub pinned: bool,
    /// Whether the experts of a mixture-of-experts model are recorded, if the engine reports them, so that a
    /// trainer can use the same ones.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub routes: bool,
}

/// Purpose and ids of a rollout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutSpec {
    /// Id; generated if absent.
    pub id: Option<EpisodeId>,
    /// Group of rollouts that are compared with each other.
    pub group: GroupId,
    /// Task of the agent.
    pub task: TaskId,
    pub task_kind: String,
    /// Name of the run that the rollout belongs to.
    pub run: String,
    /// Number of the draw within its purpose.
    pub draw: u64,
    pub purpose: String,
    /// Adapter that all of its calls use; `None`: the engine's own weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterName>,
    /// Id of the rollout in an external system, by which a later score may identify it.
    pub external: Option<String>,
    /// The caller's part of the provenance; the gateway adds its own.
    pub provenance: Provenance,
    /// Seed of calls that set none. 0: a seed derived from the id is used.
    pub seed: u64,
    /// Sampling defaults of its calls, or pinned values.
    pub sampling: SamplingDefaults,
    /// Maximum number of model calls, if lower than the gateway's limit.
    pub max_turns: Option<u32>,
    /// Maximum tokens of prompt and output together, if lower than the gateway's limit.
    pub max_context_tokens: Option<u32>,
    /// Whether the agent is trusted with its own score: the rollout's key then also gives access to
    /// `/v1/reward`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub agent_scores: bool,
    /// Treatment of the thinking of earlier turns; `None`: the gateway's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<Thinking>,
}

impl Default for RolloutSpec {
    fn default() -> Self {
        Self {
            id: None,
            group: GroupId::new("none"),
            task: TaskId::new("none"),
            task_kind: "agent".into(),
            run: String::new(),
            draw: 0,
            purpose: "serve".into(),
            adapter: None,
            external: None,
            provenance: Provenance::default(),
            seed: 0,
            sampling: SamplingDefaults::default(),
            max_turns: None,
            max_context_tokens: None,
            agent_scores: false,
            thinking: None,
        }
    }
}

impl RolloutSpec {
    /// Adds the gateway's own data to the provenance. Sampling parameters are included only if they are
    /// pinned.
    pub(crate) fn describe(&mut self, renderer: &dyn Renderer) {
        let (provenance, s) = (&mut self.provenance, &self.sampling);
        provenance.seed.get_or_insert(self.seed);
        provenance.adapter.clone_from(&self.adapter);
        if provenance.chat_template.is_none() {
            provenance.chat_template = renderer.template_hash();
            provenance.template = renderer.template_options().into_iter().collect();
        }
        let pinned = (s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens);
        if let (Some(temperature), Some(top_p), Some(top_k), Some(min_p), Some(max_tokens)) = pinned
            && s.pinned
        {
            provenance.sampling.get_or_insert(Sampling {
                temperature,
                top_p,
                top_k,
                min_p,
                max_tokens,
            });
        }
    }

    /// Returns the path of the first invalid field, and the allowed values.
    pub(crate) fn fault(&self) -> Option<(&'static str, String)> {
        let sampling = &self.sampling;
        let share = |x: f32| (0.0..=1.0).contains(&x);
        let shares = [
            ("sampling.top_p", sampling.top_p),
            ("sampling.min_p", sampling.min_p),
        ];
        if let Some(t) = sampling.temperature
            && !(t.is_finite() && t >= 0.0)
        {
            return Some(("sampling.temperature", format!("{t}: allowed: 0 or more")));
        }
        let external = self.external.as_deref().unwrap_or("-");
        if external.is_empty() || external.len() > MAX_EXTERNAL {
            let why = format!("has {} bytes: allowed: 1 to {MAX_EXTERNAL}", external.len());
            return Some(("external", why));
        }
        for (path, value) in shares {
            if let Some(x) = value.filter(|x| !share(*x)) {
                return Some((path, format!("{x}: allowed: 0 to 1")));
            }
        }
        let counts = [
            ("sampling.max_tokens", sampling.max_tokens),
            ("max_turns", self.max_turns),
            ("max_context_tokens", self.max_context_tokens),
        ];
        let zero = counts.into_iter().find(|(_, count)| *count == Some(0));
        zero.map(|(path, _)| (path, "0: allowed: 1 or more".into()))
    }

    /// Returns the gateway's limits, lowered by those of the rollout.
    pub(crate) fn limits(&self, gateway: SessionLimits) -> SessionLimits {
        let turns = self.max_turns.unwrap_or(u32::MAX);
        let context = self.max_context_tokens.unwrap_or(u32::MAX);
        SessionLimits {
            max_turns: gateway.max_turns.min(turns),
            max_context_tokens: gateway.max_context_tokens.min(context),
            ..gateway
        }
    }
}

/// One call of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct CallRequest<'a> {
    pub prompt: &'a Prompt,
    /// State after the messages that precede `prompt`; `None` if there are none.
    pub known: Option<u32>,
    pub tools: &'a [ToolSpec],
    /// Text that the model's turn is forced to start with; it is not sampled.
    pub opening: &'a str,
    /// Number of outputs to sample.
    pub choices: u32,
    /// Fields of the request that have no effect.
    pub ignored: &'a Ignored,
}

/// The way in which a call joins the tokens captured earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Join {
    /// A new conversation.
    Start,
    /// The request repeats a captured conversation up to its last turn and adds new messages at the end.
    /// Their tokens are appended to the sampled tokens.
    Extend,
    /// Like `Extend`, but the client has changed a sampled turn without changing its content (white space,
    /// ids of calls, dropped reasoning). The sampled tokens are kept.
    Realign,
    /// The same prompt is sampled again.
    Resample,
    /// The client returned to an earlier point, or replaced a turn by its own text. A branch starts there;
    /// the earlier samples stay in their branch.
    Rollback,
    /// The client rewrote its history, so that no tokens can be reused.
    Fork,
    /// The chat template left thinking of earlier turns out, as the rollout asks for: a branch starts where
    /// the render is no longer what was sampled.
    Dropped,
}

impl Join {
    /// Every kind, in order.
    pub const ALL: [Self; 7] = [
        Self::Start,
        Self::Extend,
        Self::Realign,
        Self::Resample,
        Self::Rollback,
        Self::Fork,
        Self::Dropped,
    ];

    /// Whether the client's history differs from the captured one.
    pub fn diverges(self) -> bool {
        matches!(self, Self::Rollback | Self::Fork)
    }
}

/// A call that is ready to be sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct CallStart {
    /// Number within the rollout, from 1.
    pub call: u32,
    /// Exact prompt for the engine; shared by the requests of all choices.
    pub prompt: Arc<Vec<TokenId>>,
    /// Maximum output tokens.
    pub max_tokens: u32,
    pub join: Join,
    /// Position up to which the experts of the prompt's tokens are recorded.
    pub routes_known: u32,
}

fn one() -> f32 {
    1.0
}

/// One output of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledTurn {
    pub tokens: Vec<SampledToken>,
    /// Sampling temperature of the policy; 1 if a journal does not contain it.
    #[serde(default = "one")]
    pub temperature: f32,
    /// Reason as the engine reported it.
    pub finish: FinishReason,
    /// The turn as the client receives it.
    pub message: Message,
    /// Text of the output for [`Prompt::Text`]; the client repeats it in later prompts.
    pub text: String,
    /// Experts of its path, as far as the engine reported them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<RouteSpan>,
}

/// A node that a call will add.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PlannedNode {
    /// Prompt, observation or forced tokens. Sampled nodes are added as outputs.
    pub(crate) kind: TokenKind,
    pub(crate) tokens: Vec<TokenId>,
    /// Messages that these tokens render.
    pub(crate) messages: Vec<Message>,
    /// Tools that a prompt shows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tools: Vec<ToolSpec>,
    /// Cause of the branch that begins with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) branch: Option<BranchCause>,
}

impl PlannedNode {
    /// A node without tools that continues its parent.
    pub(crate) fn new(kind: TokenKind, tokens: Vec<TokenId>, messages: &[Message]) -> Self {
        Self {
            kind,
            tokens,
            messages: messages.to_vec(),
            tools: Vec::new(),
            branch: None,
        }
    }
}

/// Start of a call, without the known parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallPlan {
    /// Node after which the new nodes are added.
    pub(crate) base: Option<NodeId>,
    pub(crate) nodes: Vec<PlannedNode>,
    pub(crate) join: Join,
    /// The last known state, and the steps from there to the prompt's state.
    pub(crate) from: StateId,
    pub(crate) keys: Vec<Key>,
    /// Whether the last node is text that the turn is forced to start with.
    pub(crate) forced: bool,
    pub(crate) prompt_tokens: u32,
    pub(crate) prompt_key: Key,
    pub(crate) choices: u32,
    pub(crate) now_s: f64,
    /// Fields of the request that have no effect.
    #[serde(default, skip_serializing_if = "Ignored::is_empty")]
    pub(crate) ignored: Ignored,
}

/// A change of a session, with all data that is needed to replay it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub(crate) enum Entry {
    /// A call was opened.
    Begun(CallPlan),
    /// An output of a call was captured.
    Output {
        call: u32,
        output: SampledTurn,
        /// Length and hash of prompt and output together, if the prompt was a text.
        text: Option<(usize, Key)>,
        now_s: f64,
    },
    /// A call ended without all of its outputs.
    Failed { call: u32, why: String, now_s: f64 },
    /// An answer was stored that later calls may continue by its id.
    Kept { answer: StoredAnswer },
    /// A reward was given.
    Rewarded { reward: Reward },
    /// A limit ended the episode.
    Cut { limit: Limit },
}

/// One call, without its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    pub call: u32,
    pub join: Join,
    /// Node that the outputs follow.
    pub parent: NodeId,
    pub prompt_tokens: u32,
    /// BLAKE3 hash (128 bits, hexadecimal) of the token ids that the engine received.
    pub prompt_hash: String,
    /// Nodes of the sampled outputs.
    pub outputs: Vec<NodeId>,
    /// Start in Unix time, seconds.
    pub started_s: f64,
    /// End in Unix time, seconds; `None` while the call is running.
    pub ended_s: Option<f64>,
    /// Error, if the call ended without all of its outputs.
    pub error: Option<String>,
}

/// Reward of a rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reward {
    /// Reward of the whole episode, or of the turn if `turn` is set. It replaces an earlier one.
    pub reward: f64,
    /// Whether the task was solved.
    #[serde(default)]
    pub success: Option<bool>,
    /// Named components of the reward.
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
    /// Number of the call (from 1) whose output the reward belongs to.
    #[serde(default)]
    pub turn: Option<u32>,
}

/// Maximum bytes of a metric's name.
pub(crate) const MAX_METRIC_NAME: usize = 128;

impl Reward {
    /// Approximate size in the journal, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let names = self.metrics.keys().map(|name| name.len() as u64 + 24);
        64 + names.sum::<u64>()
    }
}

/// Reason why a session refuses a request.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Render(#[from] RenderError),
    #[error("the prompt has at least {prompt} tokens, the context of this rollout holds {context}")]
    ContextFull { prompt: usize, context: u32 },
    #[error("this rollout may call the model {limit} times and has done so")]
    Turns { limit: u32 },
    #[error("the trace of this rollout holds {tokens} tokens, its limit is {limit}")]
    Tokens { tokens: u64, limit: u64 },
    #[error("the trace of this rollout holds {bytes} bytes of text, its limit is {limit}")]
    Bytes { bytes: u64, limit: u64 },
    #[error("{running} calls of this rollout are running, its limit is {limit}")]
    Concurrent { running: u32, limit: u32 },
    /// The rollout accepts no more calls.
    #[error("the rollout is over, it takes no more calls")]
    Over,
    /// A request was cut to its new messages but cannot be joined without the others.
    #[error("the messages before the known state are needed, too")]
    NeedsAll,
    /// The conversation has no messages.
    #[error("there is no message to answer")]
    Empty,
    #[error("{0}")]
    Prompt(String),
    #[error("call {call} of this rollout does not exist or has ended")]
    UnknownCall { call: u32 },
    #[error("reward is {value:e}, expected a finite number of magnitude up to {MAX_REWARD:e}")]
    Reward { value: f64 },
    #[error("the rewards of this rollout have {names} names of metrics, its limit is {limit}")]
    Metrics { names: usize, limit: u32 },
    #[error("the name of a metric has {bytes} bytes, the limit is {MAX_METRIC_NAME}")]
    MetricName { bytes: usize },
    #[error(
        "the rewards of this rollout have {bytes} bytes, its limit is {limit}; give each turn one"
    )]
    RewardBytes { bytes: u64, limit: u64 },
    /// The trace was already made, so that it would not contain the reward.
    #[error("the rollout is finished: PUT /rollouts/ID/rewards/NAME takes what comes later")]
    Sealed,
    #[error("turn {turn} has no output, the calls are numbered from 1 to {calls}")]
    Turn { turn: u32, calls: u32 },
    /// An invariant does not hold, because of a defect of the gateway or of the engine.
    #[error("capture is inconsistent: {0}")]
    Broken(String),
}

impl SessionError {
    /// Returns the limit that ended the episode. `None` for other errors, and for limits that do not end it,
    /// such as that on concurrent calls.
    pub(crate) fn limit(&self) -> Option<Limit> {
        match self {
            Self::Turns { .. } => Some(Limit::Turns),
            Self::ContextFull { .. } | Self::Tokens { .. } | Self::Bytes { .. } => {
                Some(Limit::Context)
            }
            _ => None,
        }
    }
}

/// Counters of one rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionStats {
    pub calls: u32,
    /// Number of running calls.
    pub running: u32,
    pub sampled_tokens: u64,
    /// Number of tokens in all nodes.
    pub trace_tokens: u64,
    pub message_bytes: u64,
    /// Number of calls by the kind of their join.
    pub joins: BTreeMap<Join, u32>,
    /// Number of captured outputs whose generation was aborted, for example because the client left.
    pub aborted: u32,
    /// Number of calls that ended without all of their outputs.
    pub failed: u32,
}

impl SessionStats {
    /// Share of calls whose history differs from the captured one.
    pub fn divergence_rate(&self) -> f64 {
        let diverged = |(join, n): (&Join, &u32)| if join.diverges() { *n } else { 0 };
        let diverged: u32 = self.joins.iter().map(diverged).sum();
        f64::from(diverged) / f64::from(self.calls.max(1))
    }
}

/// Body of a finish request of the control API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinishRequest {
    /// End of the episode. Default: the limit that the rollout reached, or that its task ended.
    #[serde(default)]
    pub end: Option<EpisodeEnd>,
    /// Reward to set in the same step.
    #[serde(default)]
    pub reward: Option<Reward>,
}
