//! Conversations of clients that have one fixed key and open no rollouts: plain SDKs, judges, harnesses of
//! evaluations. Each conversation is a separate rollout.
//!
//! A request continues a conversation if it repeats all messages of an earlier request, followed by a turn of
//! the model. Every other request begins one: it may share its instructions and examples with thousands.
//! Text and token prompts have no turns, and each is a conversation.
//!
//! At most [`MAX_OPEN`] of these rollouts are open, and at most half of all. Above that the least recently
//! used one is finished, unscored. A client that comes back to it begins a new one.

use crate::keys::{self, Key};
use sinew_dialect::ModelRequest;
use sinew_types::{EpisodeId, Message, Role};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most rollouts of this kind that are open.
pub(crate) const MAX_OPEN: usize = 1024;

/// Most prompts that are remembered for each of them.
const PROMPTS_EACH: usize = 16;

/// The open ones.
#[derive(Debug, Default)]
pub(crate) struct Conversations {
    known: Mutex<ConversationIndex>,
}

#[derive(Debug, Default)]
struct ConversationIndex {
    /// The key is made of the messages of each request.
    by_prompt: HashMap<Key, EpisodeId>,
    /// The same in the order of their coming.
    prompts: VecDeque<Key>,
    /// The one that was used last is at the end.
    open: VecDeque<EpisodeId>,
}

impl Conversations {
    fn known(&self) -> MutexGuard<'_, ConversationIndex> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a request of a conversation came, with its messages.
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

    /// The rollout that a request continues, if it is known.
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

    /// Forgets the conversation that was used the longest ago, if more than `limit` are open and it is
    /// `idle`.
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

/// The key of the messages up to each one, with the role of that one.
pub(crate) fn prompt_keys(messages: &[Message]) -> Vec<(Key, Role)> {
    let mut at = Key::default();
    messages
        .iter()
        .map(|message| {
            at = keys::after(&at, message);
            (at, message.role)
        })
        .collect()
}
