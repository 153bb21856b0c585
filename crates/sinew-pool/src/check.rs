//! Checks a pushed item, token by token, and makes it a trace that can be trained; pure.
//!
//! The checks run in this order, and the first failure is the reason:
//!
//! 1. The item is of the schema; its model, and for nodes its tokenizer, are the pool's.
//! 2. Nodes form a tree; each id is in the vocabulary; sizes are within the limits.
//! 3. Sampled nodes have one finite log-probability of at most 0 and one version for each token
//!    (`sft` and `dpo` can leave the log-probabilities out), and a temperature in range.
//! 4. Messages, where given, are equal to the decoded tokens.
//! 5. Rewards are finite and of magnitude up to 1e30 (`sft` can leave the outcome's out).
//! 6. The trace is valid as a whole; the filter of its task type admits it.
//!
//! An item of text only is rendered with this model's template, for `sft` and `dpo`.

use crate::config::{PoolConfig, TextSpans, TypeFilter};
use crate::genai::{self, Bundle};
use crate::hex::hex;
use crate::reason::Reason;
use crate::schema::{Kind, Pushed, PushedNode, Trajectory};
use crate::text::conversation;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use sinew_dialect::conversation::{StrictError, strictly};
use sinew_render::{Renderer, parse_tokens};
use sinew_types::{
    EpisodeEnd, EpisodeId, GroupId, Message, NO_PARENT, Node, NodeId, Origin, Outcome,
    PolicyVersion, Provenance, TEMPERATURES, TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind,
    Trace, VersionSpan, is_reward, json,
};
use std::collections::BTreeMap;

/// Maximum accepted log-probability: rounding of a log-softmax can leave a probability of one a
/// little above it.
const LOGPROB_ROUNDING: f32 = 1e-3;

/// Maximum length of the id of a trajectory, group or task, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// Maximum named measurements of a trajectory.
const MAX_METRICS: usize = 256;

/// A trajectory that passed every check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The trajectory; episode, group and task are as pushed, and the step is 0.
    pub trace: Trace,
    /// The training that it is for.
    pub kind: Kind,
    /// Number of trajectories that make its group complete, at least 1.
    pub group_size: u32,
    /// Name of the sender; empty if none was given.
    pub source: String,
    /// Hash of everything but the id, as 32 hexadecimal digits: the same id with another hash is a
    /// conflict.
    pub hash: String,
    /// Seconds since 1970 at which it was admitted.
    pub admitted_unix_s: f64,
    /// Maximum difference to the engine's log-probabilities in nats, if some were compared.
    pub engine_gap: Option<f32>,
}

/// The identity of a tokenizer: SHA-256 over every id's bytes, each after its length as four bytes,
/// least significant first. Hexadecimal.
///
/// Two models with the same vocabulary have the same hash, whatever their chat templates are.
pub fn tokenizer_hash(renderer: &dyn Renderer) -> String {
    let mut hasher = Sha256::new();
    for id in 0..renderer.vocab_size() as u32 {
        let bytes = renderer.token_bytes(id).unwrap_or_default();
        hasher.update((bytes.len() as u32).to_le_bytes());
        hasher.update(&bytes);
    }
    hex(&hasher.finalize())
}

/// The facts that trajectories are checked against.
pub(crate) struct Checker<'a> {
    pub(crate) config: &'a PoolConfig,
    pub(crate) renderer: &'a dyn Renderer,
    pub(crate) tokenizer: &'a str,
    /// Seconds since 1970.
    pub(crate) now_s: f64,
}

impl Checker<'_> {
    /// The admitted trajectory.
    ///
    /// # Errors
    /// The first reason against it.
    pub(crate) fn check(&self, pushed: &Pushed) -> Result<Entry, Reason> {
        let refused = |detail: String| Reason::Schema { detail };
        let unread = |e: StrictError| refused(e.to_string());
        let (trajectory, rendered) = self.read(pushed)?;
        if let Some(expected) = &self.config.model
            && pushed.model.as_ref() != Some(expected)
        {
            return Err(Reason::Model {
                given: pushed.model.clone(),
                expected: expected.clone(),
            });
        }
        let kind = trajectory.kind.unwrap_or(Kind::Rl);
        let mut trace = match (&trajectory.nodes, &trajectory.messages) {
            (Some(nodes), None) => {
                if !rendered && pushed.tokenizer.as_deref() != Some(self.tokenizer) {
                    return Err(Reason::Tokenizer {
                        given: pushed.tokenizer.clone(),
                        expected: self.tokenizer.to_owned(),
                    });
                }
                self.limit("nodes", nodes.len(), self.config.max_nodes)?;
                trace_of(self.nodes(nodes, kind)?)
            }
            (None, Some(_)) if kind == Kind::Rl => return Err(Reason::TextOnly),
            (None, Some(messages)) => {
                let said = strictly(|r| r.messages(messages, "messages")).map_err(unread)?;
                self.limit("messages", said.len(), self.config.max_nodes)?;
                let tools = trajectory.tools.as_ref().unwrap_or(&Value::Null);
                let tools = strictly(|r| r.tools(tools, "tools")).map_err(unread)?;
                let trained = |at: usize| said.get(at).is_some_and(|s| s.trained);
                let messages: Vec<Message> = said.iter().map(|s| s.message.clone()).collect();
                let most = self.config.max_tokens;
                conversation(&messages, trained, &tools, self.renderer, most)?
            }
            _ => return Err(refused("give either nodes or messages".into())),
        };
        self.outcome(&trajectory, kind, &mut trace)?;
        self.name(&trajectory, pushed, &mut trace)?;
        // The last word is the format's own; what is above names the field for the sender.
        trace.validate().map_err(|e| refused(e.to_string()))?;
        let entry = Entry {
            hash: content_hash(&trajectory, pushed),
            group_size: trajectory.group_size.unwrap_or(1),
            source: pushed.source.clone(),
            admitted_unix_s: self.now_s,
            engine_gap: None,
            trace,
            kind,
        };
        let entry = identified(entry, trajectory.id.as_deref());
        filter(self.config, &entry)?;
        Ok(entry)
    }

    /// Parses a pushed trajectory, or builds one from pushed spans; and whether its tokens were
    /// made here.
    fn read(&self, pushed: &Pushed) -> Result<(Trajectory, bool), Reason> {
        let schema = |e: serde_json::Error| Reason::Schema {
            detail: e.to_string(),
        };
        if !pushed.raw.starts_with("{\"spans\"") {
            let read = json::from_str(&pushed.raw).map_err(schema)?;
            return Ok((read, false));
        }
        let bundle: Bundle = json::from_str(&pushed.raw).map_err(schema)?;
        let text = match self.config.text_spans {
            TextSpans::Quarantine => None,
            TextSpans::Sft => Some(Kind::Sft),
            TextSpans::Dpo => Some(Kind::Dpo),
        };
        let max_tokens = self.config.max_tokens;
        let (mut read, rendered) = genai::trajectory(&bundle, text, self.renderer, max_tokens)?;
        if read.kind == Some(Kind::Sft) {
            // An evaluation is of the whole trace; what is imitated needs none.
            read.reward = read.reward.or(Some(1.0));
        }
        Ok((read, rendered))
    }

    /// Refuses a number above its limit.
    fn limit(&self, field: &str, value: usize, limit: usize) -> Result<(), Reason> {
        if value <= limit {
            return Ok(());
        }
        Err(Reason::TooLarge {
            field: field.into(),
            value: value as u64,
            limit: limit as u64,
        })
    }

    /// Checks all nodes in order; at least one must be sampled.
    fn nodes(&self, pushed: &[PushedNode], kind: Kind) -> Result<Vec<Node>, Reason> {
        let total: usize = pushed.iter().map(|n| n.tokens.len()).sum();
        self.limit("tokens", total, self.config.max_tokens)?;
        let mut nodes: Vec<Node> = Vec::with_capacity(pushed.len());
        for (index, node) in pushed.iter().enumerate() {
            let id = index as NodeId;
            let checked = self.node(id, node, kind, &nodes)?;
            if self.config.check_messages {
                self.messages_agree(id, &checked)?;
            }
            nodes.push(checked);
        }
        if nodes.iter().any(|n| n.kind == TokenKind::Sampled) {
            Ok(nodes)
        } else {
            Err(Reason::NothingSampled)
        }
    }

    /// Checks one node against those before it.
    fn node(
        &self,
        node: NodeId,
        pushed: &PushedNode,
        kind: Kind,
        before: &[Node],
    ) -> Result<Node, Reason> {
        let parent = match pushed.parent {
            None | Some(NO_PARENT) => NO_PARENT,
            Some(parent) if parent < node => parent,
            Some(parent) => return Err(Reason::Parent { node, parent }),
        };
        let sampled = pushed.kind == TokenKind::Sampled;
        let name = format!("{:?}", pushed.kind).to_lowercase();
        if parent == NO_PARENT && matches!(pushed.kind, TokenKind::Sampled | TokenKind::Forced) {
            return Err(Reason::Root { node, kind: name });
        }
        if pushed.tokens.is_empty() {
            return Err(Reason::EmptyNode { node });
        }
        let vocab = self.renderer.vocab_size() as u32;
        if let Some(index) = pushed.tokens.iter().position(|id| *id >= vocab) {
            return Err(Reason::UnknownToken {
                node,
                index: index as u32,
                id: pushed.tokens[index],
                vocab,
            });
        }
        let turn = before.get(parent as usize).map_or(0, |n| n.turn) + u32::from(sampled);
        let mut out = Node::given(
            parent,
            pushed.turn.unwrap_or(turn),
            pushed.kind,
            pushed.tokens.clone(),
            pushed.messages.clone().unwrap_or_default(),
        );
        out.finish = pushed.finish.clone();
        out.state_hash = pushed.state_hash;
        out.process_reward = bounded("process_reward", pushed.process_reward.unwrap_or(0.0))?;
        if sampled {
            out.logprobs = logprobs(node, pushed, kind)?;
            out.temperature = temperature(node, pushed)?;
            out.versions = versions(node, pushed, kind)?;
            return Ok(out);
        }
        let extra = pushed.logprobs.as_ref().is_some_and(|l| !l.is_empty());
        let spans = pushed.versions.as_ref().is_some_and(|v| !v.is_empty());
        if extra || spans || pushed.version.is_some() || pushed.temperature.is_some() {
            Err(Reason::NotSampled { node, kind: name })
        } else {
            Ok(out)
        }
    }

    /// Compares the decoded tokens of a node with its messages. A model's turn is parsed as the
    /// gateway parses it; in tokens that were given to the model, each message's text must occur.
    fn messages_agree(&self, id: NodeId, node: &Node) -> Result<(), Reason> {
        let differ = |tokens: &str, message: &Message| Reason::MessagesDiffer {
            node: id,
            tokens: clipped(tokens),
            messages: clipped(&message.content.to_string()),
        };
        if node.kind != TokenKind::Sampled {
            let text = self.renderer.decode_with_special(&node.tokens);
            let missing = node
                .messages
                .iter()
                .find(|m| !text.contains(m.content.text().trim()));
            return missing.map_or(Ok(()), |m| Err(differ(&text, m)));
        }
        let Some(message) = node.messages.last() else {
            return Ok(());
        };
        let format = self.renderer.turn_format();
        let turn = parse_tokens(self.renderer, &node.tokens, &format, &[]);
        let text = self.renderer.decode(&node.tokens);
        let said = message.content.text();
        let same = |a: &str, b: &str| a.trim() == b.trim();
        let called = |m: &Message| {
            m.tool_calls
                .iter()
                .map(|c| c.name.clone())
                .collect::<Vec<_>>()
        };
        let calls: Vec<String> = turn.calls.iter().map(|c| c.name.clone()).collect();
        let parsed = same(&turn.content, &said) && calls == called(message);
        if parsed || (message.tool_calls.is_empty() && same(&text, &said)) {
            Ok(())
        } else {
            Err(differ(&text, message))
        }
    }

    /// Fills in reward, metrics, end and start.
    fn outcome(&self, from: &Trajectory, kind: Kind, trace: &mut Trace) -> Result<(), Reason> {
        let reward = match (from.reward, kind) {
            (Some(reward), _) => bounded("reward", reward)?,
            (None, Kind::Sft) => 1.0,
            (None, _) => {
                return Err(Reason::RewardMissing {
                    kind: kind.name().into(),
                });
            }
        };
        let metrics: BTreeMap<String, f64> = from.metrics.clone().unwrap_or_default();
        self.limit("metrics", metrics.len(), MAX_METRICS)?;
        for (name, value) in &metrics {
            bounded(&format!("metrics.{name}"), *value)?;
        }
        trace.outcome = Outcome {
            reward,
            success: from.success.unwrap_or(reward > 0.0),
            metrics,
            unscored: false,
            unscored_reason: None,
            answer: None,
        };
        bounded("the total reward", trace.total_reward())?;
        trace.end = from.end.clone().unwrap_or(EpisodeEnd::Terminated);
        if matches!(trace.end, EpisodeEnd::Failed { .. }) {
            return Err(Reason::Schema {
                detail: "end is failed: an episode that the system failed trains nothing".into(),
            });
        }
        trace.timing = Timing {
            started_unix_s: bounded("started_unix_s", from.started_unix_s.unwrap_or(self.now_s))?,
            ..Timing::default()
        };
        Ok(())
    }

    /// Fills in task, type and group after checking their names.
    fn name(&self, from: &Trajectory, pushed: &Pushed, trace: &mut Trace) -> Result<(), Reason> {
        let names = [
            ("id", from.id.as_deref()),
            ("task", Some(from.task.as_str())),
            ("task_kind", from.task_kind.as_deref()),
            ("group", from.group.as_deref()),
            ("source", Some(pushed.source.as_str())),
        ];
        for (field, name) in names {
            let Some(name) = name else { continue };
            self.limit(&format!("bytes of {field}"), name.len(), MAX_NAME_BYTES)?;
            let wrong =
                name.chars().any(char::is_control) || (name.is_empty() && field != "source");
            if wrong {
                return Err(Reason::Schema {
                    detail: format!(
                        "{field} is {name:?}: expected text without control characters"
                    ),
                });
            }
        }
        let size = from.group_size.unwrap_or(1);
        self.limit("group_size", size as usize, self.config.max_group as usize)?;
        if size == 0 || (size > 1 && from.group.is_none()) {
            return Err(Reason::Schema {
                detail: format!(
                    "group_size is {size}: expected 1 or more, and a group with more than 1"
                ),
            });
        }
        trace.task = TaskId::new(from.task.clone());
        trace.task_kind = from.task_kind.clone().unwrap_or_else(|| "default".into());
        trace.group = GroupId::new(from.group.clone().unwrap_or_default());
        Ok(())
    }
}

/// A trace of the nodes, with everything else still empty.
fn trace_of(nodes: Vec<Node>) -> Trace {
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new(""),
        group: GroupId::new(""),
        task: TaskId::new(""),
        task_kind: String::new(),
        origin: Origin {
            purpose: "train".into(),
            ..Origin::default()
        },
        provenance: Provenance::default(),
        nodes,
        outcome: Outcome::default(),
        end: EpisodeEnd::Terminated,
        timing: Timing::default(),
        ignored: BTreeMap::new(),
    }
}

/// The first 200 characters of a text, for a reason.
fn clipped(text: &str) -> String {
    text.chars().take(200).collect()
}

/// Refuses a number that is not finite, or too large for sums and differences.
fn bounded(field: &str, value: f64) -> Result<f64, Reason> {
    if is_reward(value) {
        Ok(value)
    } else {
        Err(Reason::NotFinite {
            field: field.into(),
            value: value.to_string(),
        })
    }
}

/// The temperature of a sampled node; 1 if it is left out.
fn temperature(node: NodeId, pushed: &PushedNode) -> Result<f32, Reason> {
    let temperature = pushed.temperature.unwrap_or(1.0);
    if TEMPERATURES.contains(&temperature) {
        Ok(temperature)
    } else {
        Err(Reason::Temperature {
            node,
            value: temperature.to_string(),
        })
    }
}

/// The log-probabilities of a sampled node. `sft` and `dpo` without any get zeros, which the
/// trainer replaces.
fn logprobs(node: NodeId, pushed: &PushedNode, kind: Kind) -> Result<Vec<f32>, Reason> {
    let tokens = pushed.tokens.len();
    let Some(given) = &pushed.logprobs else {
        return match kind {
            Kind::Rl => Err(Reason::LogprobsMissing { node }),
            // Replaced by the trainer's own.
            _ => Ok(vec![0.0; tokens]),
        };
    };
    if given.len() != tokens {
        return Err(Reason::LogprobCount {
            node,
            logprobs: given.len() as u32,
            tokens: tokens as u32,
        });
    }
    let fits = |v: &f32| v.is_finite() && *v <= LOGPROB_ROUNDING;
    let each = given.iter().enumerate().map(|(index, value)| {
        let good = value.filter(fits);
        good.ok_or_else(|| Reason::LogprobValue {
            node,
            index: index as u32,
            value: value.map_or("null".into(), |v| v.to_string()),
        })
    });
    each.collect()
}

/// The version of each token: one for all, or spans that cover the tokens in order without a gap.
fn versions(node: NodeId, pushed: &PushedNode, kind: Kind) -> Result<Vec<VersionSpan>, Reason> {
    let tokens = pushed.tokens.len();
    let wrong = |detail: String| Err(Reason::Versions { node, detail });
    let own = pushed.versions.iter().flatten().map(|span| span.version);
    let named = pushed.version.map(PolicyVersion);
    if let Some(version) = own.chain(named).find(|v| i64::try_from(v.0).is_err()) {
        return wrong(format!("version {} is beyond 2^63 - 1", version.0));
    }
    match (&pushed.versions, pushed.version) {
        (Some(_), Some(_)) => wrong("give either version or versions".into()),
        (None, Some(version)) => Ok(VersionSpan::whole(tokens, PolicyVersion(version))),
        (None, None) if kind == Kind::Rl => {
            wrong("it was sampled, and the version of the weights that did is missing".into())
        }
        (None, None) => Ok(VersionSpan::whole(tokens, PolicyVersion(0))),
        (Some(spans), None) => {
            let mut next = 0u32;
            for span in spans {
                if span.start != next || span.len == 0 {
                    return wrong(format!(
                        "a span starts at {} with {} tokens, expected one from {next}",
                        span.start, span.len
                    ));
                }
                next = next.saturating_add(span.len);
            }
            if next as usize == tokens {
                Ok(spans.clone())
            } else {
                wrong(format!("spans cover {next} of {tokens} tokens"))
            }
        }
    }
}

/// Hash of all fields of the trajectory but its id.
fn content_hash(trajectory: &Trajectory, pushed: &Pushed) -> String {
    let anonymous = Trajectory {
        id: None,
        ..trajectory.clone()
    };
    let text = serde_json::to_vec(&anonymous).unwrap_or_default();
    let mut hasher = Sha256::new();
    for part in [
        &text[..],
        pushed.model.as_deref().unwrap_or_default().as_bytes(),
    ] {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hex(&hasher.finalize()[..16])
}

/// Sets the id of an entry: the pushed one, or one made from the hash. An entry without a group becomes a
/// separate group.
fn identified(mut entry: Entry, id: Option<&str>) -> Entry {
    let id = id.map_or_else(|| format!("c-{}", entry.hash), str::to_owned);
    if entry.trace.group.as_str().is_empty() {
        entry.trace.group = GroupId::new(id.clone());
    }
    entry.trace.episode = EpisodeId::new(id);
    entry
}

/// Refuses an entry that the filter of its task type does not admit.
fn filter(config: &PoolConfig, entry: &Entry) -> Result<(), Reason> {
    let trace = &entry.trace;
    let TypeFilter {
        reward,
        turns,
        sampled_tokens,
        path_tokens,
        success,
        sources,
        max_staleness: _,
    } = config.filter_of(&trace.task_kind);
    let refused = |rule: &str, value: String, allowed: String| {
        Err(Reason::Filtered {
            task_kind: trace.task_kind.clone(),
            rule: rule.into(),
            value,
            allowed,
        })
    };
    let total = trace.total_reward();
    if let Some([least, most]) = reward.filter(|[l, m]| total < *l || total > *m) {
        return refused("reward", total.to_string(), format!("{least} to {most}"));
    }
    let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
    let counts = [
        ("turns", *turns, sampled.count()),
        ("sampled_tokens", *sampled_tokens, trace.sampled_tokens()),
        ("path_tokens", *path_tokens, longest_path(&trace.nodes)),
    ];
    for (rule, range, value) in counts {
        let value = value as u64;
        if let Some([least, most]) = range.filter(|[l, m]| value < *l || value > *m) {
            return refused(rule, value.to_string(), format!("{least} to {most}"));
        }
    }
    if let Some(expected) = success.filter(|expected| *expected != trace.outcome.success) {
        return refused(
            "success",
            trace.outcome.success.to_string(),
            expected.to_string(),
        );
    }
    match sources {
        Some(names) if !names.contains(&entry.source) => {
            refused("sources", entry.source.clone(), names.join(", "))
        }
        _ => Ok(()),
    }
}

/// Number of tokens from a root to the leaf that is farthest from it.
pub(crate) fn longest_path(nodes: &[Node]) -> usize {
    let mut lengths: Vec<usize> = Vec::with_capacity(nodes.len());
    for node in nodes {
        let before = lengths.get(node.parent as usize).copied().unwrap_or(0);
        lengths.push(before + node.tokens.len());
    }
    lengths.into_iter().max().unwrap_or(0)
}
