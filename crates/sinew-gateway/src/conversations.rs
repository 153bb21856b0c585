//! Conversations of clients that have one fixed key and open no rollouts: plain SDKs, judges, evaluation
//! harnesses. Each conversation is a separate rollout.
//!
//! A request continues a conversation if it repeats all messages of an earlier request, followed by a turn of
//! the model. Every other request starts a new conversation, since many conversations share the same
//! instructions and examples. Text and token prompts have no turns, so each is a separate conversation.
//!
//! At most [`MAX_OPEN`] of these rollouts are open, and at most half of the limit on all rollouts. Above
//! that, the least recently used one without a running call is finished without a score. A client that
//! continues it later starts a new one.

use crate::keys::{self, Key};
use sinew_dialect::ModelRequest;
use sinew_types::{AdapterName, EpisodeId, Message, Role};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of open rollouts of this kind.
pub(crate) const MAX_OPEN: usize = 1024;

/// Remembered prompts per rollout on average; the limit is [`MAX_OPEN`] times this number for all rollouts
/// together.
const PROMPTS_EACH: usize = 16;

/// The open conversations.
#[derive(Debug, Default)]
pub(crate) struct Conversations {
    known: Mutex<ConversationIndex>,
}

#[derive(Debug, Default)]
struct ConversationIndex {
    /// Rollout by the hash of a request's messages.
    by_prompt: HashMap<Key, EpisodeId>,
    /// The hashes in order of arrival.
    prompts: VecDeque<Key>,
    /// Open rollouts; the most recently used one is last.
    open: VecDeque<EpisodeId>,
}

impl Conversations {
    fn known(&self) -> MutexGuard<'_, ConversationIndex> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a conversation as the most recently used one, and records the messages of its request.
    pub(crate) fn used(&self, id: &EpisodeId, prompts: &[(Key, Role)]) {
        let mut known = self.known();
        known.open.retain(|open| open != id);
        known.open.push_back(id.clone());
        // A client may sample several answers to one prompt, of which it continues with one.
        if let Some((key, _)) = prompts.last()
            && known.by_prompt.insert(*key, id.clone()).is_none()
        {
            known.prompts.push_back(*key);
            if known.prompts.len() > MAX_OPEN * PROMPTS_EACH
                && let Some(oldest) = known.prompts.pop_front()
            {
                known.by_prompt.remove(&oldest);
            }
        }
    }

    /// Returns the rollout that a request continues, if it is known.
    pub(crate) fn earlier(
        &self,
        request: &ModelRequest,
        prompts: &[(Key, Role)],
    ) -> Option<EpisodeId> {
        let continued = request.continuation.as_ref();
        if let Some(answer) = continued.and_then(|c| c.previous.as_ref()) {
            let (rollout, _call) = answer.strip_prefix("resp_")?.rsplit_once('-')?;
            return Some(EpisodeId::new(rollout));
        }
        let known = self.known();
        // The key of the messages before each turn of the model, the last one first.
        let turns = prompts.windows(2).rev();
        turns
            .filter(|pair| pair[1].1 == Role::Assistant)
            .find_map(|pair| known.by_prompt.get(&pair[0].0).cloned())
    }

    /// Removes the least recently used conversation that is `idle`, among those that exceed `limit`. The
    /// `limit` most recently used ones stay.
    pub(crate) fn take_oldest(
        &self,
        limit: usize,
        idle: impl Fn(&EpisodeId) -> bool,
    ) -> Option<EpisodeId> {
        let mut known = self.known();
        // The last one is about to be called.
        let candidates = known.open.len().saturating_sub(limit);
        let found = known.open.iter().take(candidates).position(idle);
        found.and_then(|at| known.open.remove(at))
    }
}

/// Returns the hash of each prefix of the messages for an adapter, with the role of its last message.
/// Conversations with different adapters never share one.
pub(crate) fn prompt_keys(adapter: Option<&AdapterName>, messages: &[Message]) -> Vec<(Key, Role)> {
    let mut at = adapter.map_or_else(Key::default, |name| keys::adapter(name.as_str()));
    messages
        .iter()
        .map(|message| {
            at = keys::after(&at, message);
            (at, message.role)
        })
        .collect()
}
