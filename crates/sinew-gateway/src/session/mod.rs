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
//! A session changes only by `Entry`s: each change is recorded as an entry, and a restart replays the
//! entries. It has no clock: times are arguments.

mod branches;
mod calls;
mod finish;
mod graph;
mod known_turns;
mod last_path;
mod plan;
mod rewards;
mod shown;
mod states;
#[cfg(test)]
mod tests;
mod times;
mod types;

pub use types::{
    CallRecord, CallRequest, CallStart, FinishRequest, Join, Reward, RolloutSpec, SampledTurn,
    SamplingDefaults, SessionError, SessionStats,
};

use crate::keys::{self, Key, StateId};
use crate::known_bodies::{KnownBodies, Scan};
use crate::limits::SessionLimits;
use calls::{Call, Calls, Running};
use graph::Graph;
use last_path::LastPath;
use rewards::Rewards;
use sinew_dialect::{Ignored, Prompt, StoredAnswer, count_ignored, message_bytes};
use sinew_render::Renderer;
use sinew_types::{
    EpisodeEnd, EpisodeId, FinishReason, Limit, NO_PARENT, NodeId, TokenId, mix_seed,
};
use std::sync::Arc;
use times::Times;
use types::CallPlan;
pub(crate) use types::Entry;

/// One rollout.
#[derive(Debug)]
pub struct Session {
    id: EpisodeId,
    spec: RolloutSpec,
    limits: SessionLimits,
    /// The captured tokens.
    graph: Graph,
    calls: Calls,
    stats: SessionStats,
    /// Fields of its requests that had no effect.
    ignored: Ignored,
    rewards: Rewards,
    /// The first limit that refused a call.
    limit_hit: Option<Limit>,
    times: Times,
    over: bool,
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
            graph: Graph::new(),
            calls: Calls::default(),
            stats: SessionStats::default(),
            ignored: Ignored::new(),
            rewards: Rewards::new(),
            limit_hit: None,
            times: Times::new(now_s),
            over: false,
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
        for call in self.calls.running.keys().copied().collect::<Vec<_>>() {
            self.failed(call, "the gateway was restarted", now_s);
        }
        self.times.touched_s = now_s;
        Ok(self)
    }

    /// Applies one entry of a journal.
    fn replay(&mut self, entry: Entry) -> Result<(), SessionError> {
        let exists = |session: &Self, call| session.calls.running.contains_key(&call);
        match entry {
            Entry::Begun(beginning) => {
                let fits = self.graph.contains(beginning.base, beginning.from);
                if !fits || (beginning.base.is_none() && beginning.nodes.is_empty()) {
                    return Err(SessionError::Broken("a call begins nowhere".into()));
                }
                self.begun(beginning);
            }
            Entry::Output { call, .. } if !exists(self, call) => {
                return Err(SessionError::UnknownCall { call });
            }
            Entry::Failed { call, .. } if call == 0 || call as usize > self.calls.all.len() => {
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
        if let Some(running) = self.calls.running.get(&call) {
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
        self.times.touched_s
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
        self.calls.records()
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
        self.times.touched_s = now_s;
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
        let context = self.limits.max_context_tokens;
        let thinking = self.spec.thinking.unwrap_or_default();
        let mut plan = self
            .graph
            .plan(renderer, ask, context, thinking, &mut self.last_path)?;
        plan.join = self.calls.join_again(plan.base, plan.join);
        self.last_path.go(&self.graph.nodes, plan.base);
        let new: Vec<&[TokenId]> = plan.nodes.iter().map(|n| n.tokens.as_slice()).collect();
        let prompt_key = self.last_path.key_with(&new);
        let prompt = [&[self.last_path.ids()], &new[..]].concat().concat();
        if prompt.len() >= context as usize {
            return Err(SessionError::ContextFull {
                prompt: prompt.len(),
                context,
            });
        }
        let routes_known = self.graph.routes_known(plan.base);
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
        if let (Prompt::Text(text), Some(running)) = (ask.prompt, self.calls.running.get_mut(&call))
        {
            running.text = Some(text.clone());
        }
        Ok(CallStart {
            call,
            max_tokens: context - prompt.len() as u32,
            prompt: Arc::new(prompt),
            join: plan.join,
            routes_known,
        })
    }

    /// Opens a call that was planned, and gives its number.
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
            self.stats.trace_tokens += planned.tokens.len() as u64;
            self.stats.message_bytes += planned.messages.iter().map(message_bytes).sum::<u64>();
            parent = self.graph.add(parent, planned);
        }
        if !beginning.forced {
            spoken = parent;
        }
        let state = self.graph.step(beginning.from, beginning.keys, spoken);
        for (path, count) in &beginning.ignored {
            count_ignored(&mut self.ignored, path, *count);
        }
        if self.calls.running.is_empty() {
            self.times.busy(now_s);
        }
        let call = Call {
            join,
            parent,
            prompt_tokens,
            prompt_key,
            outputs: Vec::new(),
            started_s: now_s,
            ended_s: None,
            error: None,
        };
        let running = Running {
            state,
            text: None,
            choices_left: beginning.choices,
        };
        let call = self.calls.open(call, running);
        self.stats.calls = call;
        self.stats.running = self.calls.running.len() as u32;
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
        let turns = (self.calls.all.len() as u32).saturating_sub(self.stats.failed);
        if turns >= limits.max_turns {
            return Err(SessionError::Turns {
                limit: limits.max_turns,
            });
        }
        let running = self.calls.running.len() as u32;
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

    /// Records one output of a call. Gives its node; an output without tokens has none.
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
        let running = self.calls.running.get(&call);
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

    /// Records for the journal that an answer is stored, which later calls may continue by its id.
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
        let state = self.calls.running.get(&call).map(|r| r.state)?;
        let node = (!output.tokens.is_empty()).then(|| self.push_output(call, state, output, text));
        if self.calls.end_choice(call) {
            self.ended(call, now_s);
        }
        node
    }

    fn push_output(
        &mut self,
        call: u32,
        state: StateId,
        output: SampledTurn,
        text: Option<(usize, Key)>,
    ) -> NodeId {
        let tokens = output.tokens.len() as u64;
        self.stats.trace_tokens += tokens;
        self.stats.sampled_tokens += tokens;
        self.stats.message_bytes += message_bytes(&output.message);
        let call = &mut self.calls.all[call as usize - 1];
        let id = self.graph.add_output(call.parent, state, output, text);
        call.outputs.push(id);
        id
    }

    /// Ends a call that gave nothing more. Gives how it joined if it gave nothing at all: it counts under no
    /// join then.
    pub fn fail(&mut self, call: u32, why: &str, now_s: f64) -> Option<Join> {
        if self.calls.may_fail(call) {
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
        self.stats.failed += 1;
        if self.calls.fail(call, why) {
            self.ended(call, now_s);
        }
        let join = self.calls.void_join(call)?;
        if let Some(count) = self.stats.joins.get_mut(&join) {
            *count -= 1;
        }
        self.stats.joins.retain(|_, count| *count > 0);
        Some(join)
    }

    fn ended(&mut self, call: u32, now_s: f64) {
        self.calls.end(call, now_s);
        let running = self.calls.running.len() as u32;
        self.stats.running = running;
        self.times.ended(running == 0, now_s);
    }

    /// Refuses rewards from now on; accepted ones are in the trace.
    pub(crate) fn seal(&mut self) {
        self.rewards.sealed = true;
    }

    /// Whether the trace was made.
    pub(crate) fn is_sealed(&self) -> bool {
        self.rewards.sealed
    }

    /// Scores the episode, or with `turn` the outputs of one call.
    ///
    /// Every accepted reward is in the trace, since it arrived before the trace was made. If a number is
    /// refused and no other reward follows, the trace records this as the reason for the missing reward.
    ///
    /// # Errors
    /// If a number is not finite or beyond [`MAX_REWARD`](sinew_types::MAX_REWARD), the turn does not
    /// exist, the rewards of the rollout exceed a limit, or its trace was made.
    pub fn reward(&mut self, reward: &Reward) -> Result<(), SessionError> {
        if self.rewards.sealed {
            return Err(SessionError::Sealed);
        }
        if let Err(error) = self.rewards.check(reward, &self.limits) {
            self.rewards.refused(&error);
            return Err(error);
        }
        self.rewarded(reward)?;
        self.note(|| Entry::Rewarded {
            reward: reward.clone(),
        });
        Ok(())
    }

    /// Takes a reward that was checked.
    fn rewarded(&mut self, reward: &Reward) -> Result<(), SessionError> {
        if let Some(turn) = reward.turn {
            let outputs = self.calls.outputs(turn);
            if outputs.is_empty() {
                let calls = self.calls.all.len() as u32;
                return Err(SessionError::Turn { turn, calls });
            }
            for node in outputs {
                self.graph.nodes[node as usize].process_reward = reward.reward;
            }
        }
        self.rewards.take(reward);
        Ok(())
    }

    /// Returns the default end of the episode: truncated if a limit refused a call or cut the last answer,
    /// otherwise completed.
    pub fn natural_end(&self) -> EpisodeEnd {
        let cut = || sinew_types::cut(&self.graph.nodes);
        match self.limit_hit.or_else(cut) {
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
