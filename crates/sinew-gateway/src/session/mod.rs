//! Capture of one rollout: the tokens that the engine received and sampled, and the node at which a new
//! request joins them. The code is pure: times and tokens are arguments.
//!
//! Invariants:
//! - The engine gets exactly the path of the node that its output will follow, token for token;
//!   [`Session::trace`] proves it for every call by hash.
//! - Sampled tokens are in exactly one node, with one log-probability and one version each;
//!   they are never decoded and tokenized again.
//! - Nodes are only added. A client that rewrites its history makes a branch.
//!
//! A session changes only by `Entry`s: each change is first recorded as an entry, and a restart replays the
//! entries. It has no clock: times are arguments.

mod finish;
mod known_turns;
mod last_path;
mod plan;
mod states;
#[cfg(test)]
mod tests;
mod types;

pub use types::{
    CallRecord, CallRequest, CallStart, FinishRequest, Join, Reward, RolloutSpec, SampledTurn,
    SamplingDefaults, SessionError, SessionStats,
};

use crate::keys::{self, Key, StateId, hex};
use crate::known_bodies::{KnownBodies, Scan};
use crate::limits::SessionLimits;
use known_turns::KnownTurns;
use last_path::LastPath;
use sinew_dialect::StoredAnswer;
use sinew_dialect::{Ignored, count_ignored};
use sinew_dialect::{Prompt, message_bytes};
use sinew_render::Renderer;
use sinew_types::{
    EpisodeEnd, EpisodeId, FinishReason, Limit, MAX_REWARD, Message, NO_PARENT, Node, NodeFormat,
    NodeId, Outcome, TokenId, TokenKind, VersionSpan, mix_seed,
};
use states::States;
use std::collections::BTreeMap;
use std::sync::Arc;
use types::CallPlan;
pub(crate) use types::{Entry, MAX_METRIC_NAME};

/// A call, running or ended.
#[derive(Clone, Debug)]
struct Call {
    /// Kind of the request's join to the captured tokens.
    join: Join,
    parent: NodeId,
    prompt_tokens: u32,
    /// Hash of the token ids that the engine received; verified when the rollout is finished.
    prompt_key: Key,
    /// Sampled nodes, one per choice.
    outputs: Vec<NodeId>,
    started_s: f64,
    ended_s: Option<f64>,
    error: Option<String>,
}

impl Call {
    /// Whether the call failed before any token was sampled.
    fn is_void(&self) -> bool {
        self.outputs.is_empty() && self.error.is_some()
    }
}

/// State of a call until its output is captured.
#[derive(Clone, Debug)]
struct Running {
    /// Conversation state after the messages of the prompt.
    state: StateId,
    /// The prompt, if it was a text.
    text: Option<String>,
    choices_left: u32,
}

/// Text that a client has seen, up to the end of a prompt or an output.
#[derive(Clone, Copy, Debug)]
struct TextAnchor {
    bytes: usize,
    key: Key,
    node: NodeId,
}

/// One rollout.
#[derive(Debug)]
pub struct Session {
    id: EpisodeId,
    spec: RolloutSpec,
    limits: SessionLimits,
    /// The trace so far. Nodes are only added.
    nodes: Vec<Node>,
    /// Known conversations, as a trie of messages.
    states: States,
    /// Ends of text prompts and their outputs.
    texts: Vec<TextAnchor>,
    /// The model's turns, recognized by their content.
    known_turns: KnownTurns,
    /// Calls in the order of their numbers.
    calls: Vec<Call>,
    /// Calls that have not ended, by number.
    running: BTreeMap<u32, Running>,
    stats: SessionStats,
    /// Fields of its requests that had no effect.
    ignored: Ignored,
    outcome: Outcome,
    /// The first limit that refused a call, if any.
    limit_hit: Option<Limit>,
    opened_s: f64,
    touched_s: f64,
    /// Start of the present interval with running calls; `generate_s` counts the intervals before.
    busy_since_s: f64,
    generate_s: f64,
    over: bool,
    /// Whether the trace was made; rewards are refused afterwards.
    sealed: bool,
    /// Bytes of all its rewards, for the limit.
    reward_bytes: u64,
    /// Path of the last prompt.
    last_path: LastPath,
    /// Request bodies whose messages were parsed.
    bodies: KnownBodies,
    /// Entries that were not yet taken for the journal; `None` without a journal.
    entries: Option<Vec<Entry>>,
}

impl Session {
    /// Creates a rollout without calls. `now_s` is Unix time, as in the whole module.
    pub fn new(id: EpisodeId, spec: RolloutSpec, gateway: SessionLimits, now_s: f64) -> Self {
        Self {
            id,
            limits: spec.limits(gateway),
            spec,
            nodes: Vec::new(),
            states: States::new(),
            texts: Vec::new(),
            known_turns: KnownTurns::default(),
            calls: Vec::new(),
            running: BTreeMap::new(),
            stats: SessionStats::default(),
            ignored: Ignored::new(),
            outcome: Outcome {
                unscored: true,
                ..Outcome::default()
            },
            limit_hit: None,
            opened_s: now_s,
            touched_s: now_s,
            busy_since_s: now_s,
            generate_s: 0.0,
            over: false,
            sealed: false,
            reward_bytes: 0,
            last_path: LastPath::default(),
            bodies: KnownBodies::default(),
            entries: None,
        }
    }

    /// Restores a session by replaying `entries`. Calls that had not ended count as failed.
    ///
    /// # Errors
    /// If the entries contradict each other.
    pub(crate) fn restore(mut self, entries: Vec<Entry>, now_s: f64) -> Result<Self, SessionError> {
        for entry in entries {
            self.replay(entry)?;
        }
        for call in self.running.keys().copied().collect::<Vec<_>>() {
            self.failed(call, "the gateway was restarted", now_s);
        }
        self.touched_s = now_s;
        Ok(self)
    }

    /// Applies one entry of a journal.
    fn replay(&mut self, entry: Entry) -> Result<(), SessionError> {
        let exists = |session: &Self, call| session.running.contains_key(&call);
        match entry {
            Entry::Begun(beginning) => {
                let nodes = self.nodes.len() as NodeId;
                let fits = beginning.base.is_none_or(|base| base < nodes)
                    && self.states.contains(beginning.from);
                if !fits || (beginning.base.is_none() && beginning.nodes.is_empty()) {
                    return Err(SessionError::Broken("a call begins nowhere".into()));
                }
                self.begun(beginning);
            }
            Entry::Output { call, .. } if !exists(self, call) => {
                return Err(SessionError::UnknownCall { call });
            }
            Entry::Failed { call, .. } if call == 0 || call as usize > self.calls.len() => {
                return Err(SessionError::UnknownCall { call });
            }
            Entry::Output {
                call,
                output,
                text,
                now_s,
            } => {
                self.output(call, output, text, now_s);
            }
            Entry::Failed { call, why, now_s } => {
                self.failed(call, &why, now_s);
            }
            // It was taken within the limits of its time.
            Entry::Rewarded { reward } => self.rewarded(&reward)?,
            // Not the session's: see `Answers`.
            Entry::Kept { .. } => {}
            Entry::Cut { limit } => {
                self.limit_hit.get_or_insert(limit);
            }
        }
        Ok(())
    }

    /// Records further entries for [`Session::take_entries`].
    pub(crate) fn keep_entries(&mut self) {
        self.entries.get_or_insert_default();
    }

    /// Returns the entries since the last call.
    pub(crate) fn take_entries(&mut self) -> Vec<Entry> {
        self.entries
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Request bodies whose messages were parsed.
    pub(crate) fn bodies(&self) -> &KnownBodies {
        &self.bodies
    }

    /// Records that the messages of a body, after the part that `head` identifies, have led to a running
    /// call.
    pub(crate) fn remember(&mut self, call: u32, body: &[u8], scan: &Scan, head: Key) {
        if let Some(running) = self.running.get(&call) {
            self.bodies
                .remember(body, scan, head, (call, running.state));
        }
    }

    /// Records an entry, if there is a journal.
    fn note(&mut self, entry: impl FnOnce() -> Entry) {
        if let Some(entries) = &mut self.entries {
            entries.push(entry());
        }
    }

    /// Id of the rollout.
    pub fn id(&self) -> &EpisodeId {
        &self.id
    }

    /// Specification with which the rollout was opened.
    pub fn spec(&self) -> &RolloutSpec {
        &self.spec
    }

    pub fn limits(&self) -> &SessionLimits {
        &self.limits
    }

    /// Counters.
    pub fn stats(&self) -> &SessionStats {
        &self.stats
    }

    /// Time of the last call.
    pub fn touched_s(&self) -> f64 {
        self.touched_s
    }

    /// Whether the rollout accepts no more calls.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Refuses calls from now on.
    pub fn close(&mut self) {
        self.over = true;
    }

    /// Records that a limit of the gateway ended the episode.
    pub fn cut(&mut self, limit: Limit) {
        self.over = true;
        self.limit_hit.get_or_insert(limit);
    }

    /// Every call so far.
    pub fn calls(&self) -> Vec<CallRecord> {
        let record = |(i, c): (usize, &Call)| CallRecord {
            call: i as u32 + 1,
            join: c.join,
            parent: c.parent,
            prompt_tokens: c.prompt_tokens,
            prompt_hash: hex(&c.prompt_key),
            outputs: c.outputs.clone(),
            started_s: c.started_s,
            ended_s: c.ended_s,
            error: c.error.clone(),
        };
        self.calls.iter().enumerate().map(record).collect()
    }

    /// Joins a request to the captured tokens, renders its new part, and opens a call.
    ///
    /// # Errors
    /// If a limit of the rollout is reached or the request cannot be rendered; the session is then unchanged,
    /// except that it remembers a reached limit as the end of the episode.
    pub fn begin(
        &mut self,
        renderer: &dyn Renderer,
        ask: &CallRequest<'_>,
        now_s: f64,
    ) -> Result<CallStart, SessionError> {
        self.touched_s = now_s;
        let begun = self.try_begin(renderer, ask, now_s);
        if let Err(Some(limit)) = begun.as_ref().map_err(SessionError::limit)
            && self.limit_hit.is_none()
        {
            self.limit_hit = Some(limit);
            self.note(|| Entry::Cut { limit });
        }
        begun
    }

    /// Plans a call, checks that it fits, and opens it.
    fn try_begin(
        &mut self,
        renderer: &dyn Renderer,
        ask: &CallRequest<'_>,
        now_s: f64,
    ) -> Result<CallStart, SessionError> {
        self.admit(ask)?;
        let mut last_path = std::mem::take(&mut self.last_path);
        let plan = self.plan(renderer, ask, &mut last_path);
        // Whatever came of it, the path is worth keeping.
        self.last_path = last_path;
        let mut plan = plan?;
        plan.join = self.join_again(&plan);
        self.last_path.go(&self.nodes, plan.base);
        let new: Vec<&[TokenId]> = plan.nodes.iter().map(|n| n.tokens.as_slice()).collect();
        let prompt_key = self.last_path.key_with(&new);
        let prompt = [&[self.last_path.ids()], &new[..]].concat().concat();
        let context = self.limits.max_context_tokens;
        if prompt.len() >= context as usize {
            return Err(SessionError::ContextFull {
                prompt: prompt.len(),
                context,
            });
        }
        let beginning = CallPlan {
            base: plan.base,
            nodes: plan.nodes,
            join: plan.join,
            from: plan.from,
            keys: plan.keys,
            forced: !ask.opening.is_empty(),
            prompt_tokens: prompt.len() as u32,
            prompt_key,
            choices: ask.choices,
            now_s,
            ignored: ask.ignored.clone(),
        };
        self.note(|| Entry::Begun(beginning.clone()));
        let call = self.begun(beginning);
        if let (Prompt::Text(text), Some(running)) = (ask.prompt, self.running.get_mut(&call)) {
            running.text = Some(text.clone());
        }
        Ok(CallStart {
            call,
            max_tokens: context - prompt.len() as u32,
            prompt: Arc::new(prompt),
            join: plan.join,
        })
    }

    /// Returns the kind of a call's join. A retry after a call without output has the same kind as that call.
    fn join_again(&self, plan: &plan::Plan) -> Join {
        let before = self
            .calls
            .iter()
            .rev()
            .find(|c| Some(c.parent) == plan.base);
        match before {
            Some(call) if plan.join == Join::Resample && call.is_void() => call.join,
            _ => plan.join,
        }
    }

    /// Opens a planned call and returns its number.
    fn begun(&mut self, beginning: CallPlan) -> u32 {
        let CallPlan {
            join,
            prompt_tokens,
            prompt_key,
            now_s,
            ..
        } = beginning;
        let mut parent = beginning.base.unwrap_or(NO_PARENT);
        let mut spoken = parent;
        for planned in beginning.nodes {
            // Turns are found again by their messages, whether they were opened or not.
            spoken = parent;
            parent = self.push(parent, planned.kind, planned.tokens, planned.messages);
            self.nodes[parent as usize].tools = planned.tools;
        }
        if !beginning.forced {
            spoken = parent;
        }
        let keys = beginning.keys.into_iter();
        let state = keys.fold(beginning.from, |at, key| self.states.step(at, key));
        if self.states.get(state).prompt.is_none() {
            self.states.set_prompt(state, spoken);
        }
        for (path, count) in &beginning.ignored {
            count_ignored(&mut self.ignored, path, *count);
        }
        self.calls.push(Call {
            join,
            parent,
            prompt_tokens,
            prompt_key,
            outputs: Vec::new(),
            started_s: now_s,
            ended_s: None,
            error: None,
        });
        let call = self.calls.len() as u32;
        if self.running.is_empty() {
            self.busy_since_s = now_s;
        }
        self.running.insert(
            call,
            Running {
                state,
                text: None,
                choices_left: beginning.choices,
            },
        );
        self.stats.calls = call;
        self.stats.running = self.running.len() as u32;
        *self.stats.joins.entry(join).or_default() += 1;
        call
    }

    /// Refuses a call that exceeds a limit of the rollout.
    fn admit(&self, ask: &CallRequest<'_>) -> Result<(), SessionError> {
        if self.over {
            return Err(SessionError::Over);
        }
        let limits = &self.limits;
        // Calls that gave nothing are tried again by their clients.
        let turns = (self.calls.len() as u32).saturating_sub(self.stats.failed);
        if turns >= limits.max_turns {
            return Err(SessionError::Turns {
                limit: limits.max_turns,
            });
        }
        let running = self.running.len() as u32;
        if running >= limits.max_concurrent {
            return Err(SessionError::Concurrent {
                running,
                limit: limits.max_concurrent,
            });
        }
        if self.stats.trace_tokens >= limits.max_trace_tokens {
            return Err(SessionError::Tokens {
                tokens: self.stats.trace_tokens,
                limit: limits.max_trace_tokens,
            });
        }
        if self.stats.message_bytes >= limits.max_message_bytes {
            return Err(SessionError::Bytes {
                bytes: self.stats.message_bytes,
                limit: limits.max_message_bytes,
            });
        }
        if matches!(ask.prompt, Prompt::Messages(m) if m.is_empty()) {
            return Err(SessionError::Empty);
        }
        Ok(())
    }

    fn push(
        &mut self,
        parent: NodeId,
        kind: TokenKind,
        tokens: Vec<TokenId>,
        messages: Vec<Message>,
    ) -> NodeId {
        let turn = match self.nodes.get(parent as usize) {
            Some(node) => node.turn,
            None => 0,
        };
        self.stats.trace_tokens += tokens.len() as u64;
        self.stats.message_bytes += messages.iter().map(message_bytes).sum::<u64>();
        let turn = turn + u32::from(kind == TokenKind::Sampled);
        self.nodes
            .push(Node::given(parent, turn, kind, tokens, messages));
        (self.nodes.len() - 1) as NodeId
    }

    /// Records one output of a call. Returns its node; an output without tokens has none.
    ///
    /// # Errors
    /// If the call is not running, or the engine broke its contract: a token without a finite
    /// log-probability.
    pub fn commit(
        &mut self,
        call: u32,
        output: SampledTurn,
        now_s: f64,
    ) -> Result<Option<NodeId>, SessionError> {
        let running = self.running.get(&call);
        let running = running.ok_or(SessionError::UnknownCall { call })?;
        let bad = |v: f32| !v.is_finite() || v > 1e-3;
        if let Some(token) = output.tokens.iter().find(|t| bad(t.logprob)) {
            let why = format!(
                "the engine gave token {} the log-probability {}",
                token.id, token.logprob
            );
            self.fail(call, &why, now_s);
            return Err(SessionError::Broken(why));
        }
        let text = running.text.as_ref().map(|prompt| {
            let text = [prompt.as_str(), output.text.as_str()].concat();
            (text.len(), keys::text(&text))
        });
        self.note(|| Entry::Output {
            call,
            output: output.clone(),
            text,
            now_s,
        });
        Ok(self.output(call, output, text, now_s))
    }

    /// Stores an answer that later calls may continue by its id.
    pub(crate) fn kept(&mut self, answer: &StoredAnswer) {
        self.note(|| Entry::Kept {
            answer: answer.clone(),
        });
    }

    /// Adds an output after it was checked.
    fn output(
        &mut self,
        call: u32,
        output: SampledTurn,
        text: Option<(usize, Key)>,
        now_s: f64,
    ) -> Option<NodeId> {
        self.stats.aborted += u32::from(output.finish == FinishReason::Aborted);
        let state = self.running.get(&call).map(|r| r.state)?;
        let node = (!output.tokens.is_empty()).then(|| self.push_output(call, state, output, text));
        self.one_less(call, now_s);
        node
    }

    fn push_output(
        &mut self,
        call: u32,
        state: StateId,
        output: SampledTurn,
        text: Option<(usize, Key)>,
    ) -> NodeId {
        let parent = self.calls[call as usize - 1].parent;
        let ids = output.tokens.iter().map(|t| t.id).collect();
        let id = self.push(parent, TokenKind::Sampled, ids, Vec::new());
        let node = &mut self.nodes[id as usize];
        node.logprobs = output.tokens.iter().map(|t| t.logprob).collect();
        node.temperature = output.temperature;
        for (start, token) in output.tokens.iter().enumerate() {
            NodeFormat::push(&mut node.format, token);
            match node.versions.last_mut() {
                Some(span) if span.version == token.version => span.len += 1,
                _ => node.versions.push(VersionSpan {
                    start: start as u32,
                    len: 1,
                    version: token.version,
                }),
            }
        }
        node.finish = Some(output.finish);
        self.stats.sampled_tokens += output.tokens.len() as u64;
        self.stats.message_bytes += message_bytes(&output.message);
        match text {
            Some((bytes, key)) => self.texts.push(TextAnchor {
                bytes,
                key,
                node: id,
            }),
            None => {
                self.states.add_turn(state, &output.message, id);
                let before = self.last_message(parent).map(keys::exact);
                self.known_turns.add(before, &output.message);
            }
        }
        self.nodes[id as usize].messages = vec![output.message];
        self.calls[call as usize - 1].outputs.push(id);
        id
    }

    /// Returns the last message on the path of a node.
    fn last_message(&self, node: NodeId) -> Option<&Message> {
        let mut at = self.nodes.get(node as usize);
        while let Some(node) = at {
            if let Some(message) = node.messages.last() {
                return Some(message);
            }
            at = self.nodes.get(node.parent as usize);
        }
        None
    }

    /// Ends a call without further outputs. If the call had no output at all, returns its kind of join, which
    /// must then not be counted.
    pub fn fail(&mut self, call: u32, why: &str, now_s: f64) -> Option<Join> {
        let record = call.checked_sub(1).and_then(|i| self.calls.get(i as usize));
        let silent = record.is_some_and(|c| c.outputs.is_empty() && c.error.is_none());
        if silent || self.running.contains_key(&call) {
            self.note(|| Entry::Failed {
                call,
                why: why.to_owned(),
                now_s,
            });
            return self.failed(call, why, now_s);
        }
        None
    }

    fn failed(&mut self, call: u32, why: &str, now_s: f64) -> Option<Join> {
        let ran = self.running.remove(&call).is_some();
        self.stats.failed += 1;
        if let Some(record) = self.calls.get_mut(call as usize - 1) {
            record.error = Some(why.to_owned());
        }
        if ran {
            self.ended(call, now_s);
        }
        let void = self.calls.get(call as usize - 1).filter(|c| c.is_void());
        let join = void.map(|c| c.join)?;
        if let Some(count) = self.stats.joins.get_mut(&join) {
            *count -= 1;
        }
        self.stats.joins.retain(|_, count| *count > 0);
        Some(join)
    }

    fn one_less(&mut self, call: u32, now_s: f64) {
        if let Some(running) = self.running.get_mut(&call) {
            running.choices_left = running.choices_left.saturating_sub(1);
            if running.choices_left == 0 {
                self.running.remove(&call);
                self.ended(call, now_s);
            }
        }
    }

    fn ended(&mut self, call: u32, now_s: f64) {
        self.stats.running = self.running.len() as u32;
        self.touched_s = now_s;
        if let Some(record) = self.calls.get_mut(call as usize - 1) {
            record.ended_s = Some(now_s);
        }
        if self.running.is_empty() {
            self.generate_s += (now_s - self.busy_since_s).max(0.0);
        }
    }

    /// Refuses rewards from now on; accepted ones are in the trace.
    pub(crate) fn seal(&mut self) {
        self.sealed = true;
    }

    /// Whether the trace was made.
    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Scores the episode, or with `turn` the outputs of one call.
    ///
    /// Every accepted reward is in the trace, since it arrived before the trace was made. If a number is
    /// refused and no other reward follows, the trace records this as the reason for the missing reward.
    ///
    /// # Errors
    /// If a number is not finite or beyond [`MAX_REWARD`], the turn does not exist, the rewards of the
    /// rollout exceed a limit, or its trace was made.
    pub fn reward(&mut self, reward: &Reward) -> Result<(), SessionError> {
        if self.sealed {
            return Err(SessionError::Sealed);
        }
        if let Err(error) = self.check_reward(reward) {
            if self.outcome.unscored {
                self.outcome.unscored_reason = Some(format!("a reward was refused: {error}"));
            }
            return Err(error);
        }
        self.rewarded(reward)?;
        self.note(|| Entry::Rewarded {
            reward: reward.clone(),
        });
        Ok(())
    }

    fn check_reward(&self, reward: &Reward) -> Result<(), SessionError> {
        let metrics = reward.metrics.values().copied();
        // NaN is not below the limit.
        let fits = |v: &f64| v.abs() <= MAX_REWARD;
        if let Some(value) = std::iter::once(reward.reward)
            .chain(metrics)
            .find(|v| !fits(v))
        {
            return Err(SessionError::Reward { value });
        }
        if let Some(name) = reward.metrics.keys().find(|n| n.len() > MAX_METRIC_NAME) {
            return Err(SessionError::MetricName { bytes: name.len() });
        }
        let known = &self.outcome.metrics;
        let new = reward.metrics.keys().filter(|n| !known.contains_key(*n));
        let (names, limit) = (known.len() + new.count(), self.limits.max_metrics);
        if names > limit as usize {
            return Err(SessionError::Metrics { names, limit });
        }
        let (bytes, limit) = (
            self.reward_bytes + reward.bytes(),
            self.limits.max_reward_bytes,
        );
        if bytes > limit {
            Err(SessionError::RewardBytes { bytes, limit })
        } else {
            Ok(())
        }
    }

    /// Applies a reward after it was checked.
    fn rewarded(&mut self, reward: &Reward) -> Result<(), SessionError> {
        if let Some(turn) = reward.turn {
            let call = (turn as usize)
                .checked_sub(1)
                .and_then(|i| self.calls.get(i));
            let outputs = call.map(|c| c.outputs.clone()).unwrap_or_default();
            if outputs.is_empty() {
                return Err(SessionError::Turn {
                    turn,
                    calls: self.calls.len() as u32,
                });
            }
            for node in outputs {
                self.nodes[node as usize].process_reward = reward.reward;
            }
        } else {
            self.outcome.reward = reward.reward;
        }
        self.reward_bytes += reward.bytes();
        self.outcome.unscored = false;
        self.outcome.unscored_reason = None;
        if let Some(success) = reward.success {
            self.outcome.success = success;
        }
        self.outcome.metrics.extend(reward.metrics.clone());
        Ok(())
    }

    /// Returns the default end of the episode: truncated if a limit refused a call or cut the last answer,
    /// otherwise completed.
    pub fn natural_end(&self) -> EpisodeEnd {
        match self.limit_hit.or_else(|| sinew_types::cut(&self.nodes)) {
            Some(limit) => EpisodeEnd::Truncated { limit },
            None => EpisodeEnd::Terminated,
        }
    }

    /// Returns the seed of an output: the client's, or one derived from the rollout's seed.
    pub fn seed(&self, call: u32, choice: u32, asked: Option<u64>) -> u64 {
        match asked {
            Some(seed) if choice == 0 => seed,
            Some(seed) => mix_seed(seed, u64::from(choice)),
            None => mix_seed(self.spec.seed, (u64::from(call) << 16) | u64::from(choice)),
        }
    }
}
