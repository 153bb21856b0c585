//! Conversations of clients that have one fixed key and open no rollouts: plain SDKs, judges, harnesses of
//! evaluations. Each conversation is a rollout of its own.
//!
//! A request continues a conversation if it repeats all messages of an earlier request, followed by a turn of
//! the model. Every other request begins one: it may share its instructions and examples with thousands.
//! Text and token prompts have no turns, and each is a conversation.
//!
//! At most [`MAX_OPEN`] of these rollouts are open, and at most half of all. The one that was used the longest
//! ago is finished, unscored; a client that comes back to it begins a new one.

use crate::gateway::Gateway;
use crate::keys::{self, Key};
use crate::rollout::Rollout;
use crate::session::RolloutSpec;
use sinew_dialect::fields::Notes;
use sinew_dialect::{ApiError, Dialect, ModelRequest, Prompt};
use sinew_types::{EpisodeId, Message, Role};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most rollouts of this kind that are open.
const MAX_OPEN: usize = 1024;

/// Most prompts that are remembered for each of them.
const PROMPTS_EACH: usize = 16;

/// The open ones.
#[derive(Debug, Default)]
pub(crate) struct Conversations {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// By the messages of each request.
    by_prompt: HashMap<Key, EpisodeId>,
    /// The same in the order of their coming.
    prompts: VecDeque<Key>,
    /// The one that was used last is at the end.
    open: VecDeque<EpisodeId>,
}

impl Conversations {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rollout of the conversation that a body continues, or a new one.
    ///
    /// # Errors
    /// If the body is wrong, or no rollout can be opened.
    pub(crate) fn rollout(
        &self,
        gateway: &Gateway,
        dialect: &dyn Dialect,
        body: &[u8],
    ) -> Result<Arc<Rollout>, ApiError> {
        let request = dialect.read(body, &Notes::new(false))?;
        let prompts = match &request.prompt {
            Prompt::Messages(messages) => prompt_keys(messages),
            _ => Vec::new(),
        };
        let find = |id: EpisodeId| gateway.rollouts().find(id.as_str());
        let earlier = self.earlier(&request, &prompts).and_then(find);
        let rollout = match earlier.filter(|rollout| !rollout.session().is_over()) {
            Some(rollout) => rollout,
            None => {
                let spec = RolloutSpec {
                    task_kind: "conversation".into(),
                    ..RolloutSpec::default()
                };
                let id = gateway.open_rollout(spec)?.id;
                gateway.rollouts().known(&id)?
            }
        };
        let id = rollout.session().id().clone();
        let mut known = self.known();
        known.open.retain(|open| *open != id);
        known.open.push_back(id.clone());
        // A client may sample several answers to one prompt, of which it goes on with one.
        if let Some((key, _)) = prompts.last()
            && known.by_prompt.insert(*key, id).is_none()
        {
            known.prompts.push_back(*key);
            if known.prompts.len() > MAX_OPEN * PROMPTS_EACH
                && let Some(oldest) = known.prompts.pop_front()
            {
                known.by_prompt.remove(&oldest);
            }
        }
        Ok(rollout)
    }

    /// The rollout that a request continues, if it is known.
    fn earlier(&self, request: &ModelRequest, prompts: &[(Key, Role)]) -> Option<EpisodeId> {
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

    /// Finishes rollouts above the limit, those that were used the longest ago first.
    pub(crate) async fn trim(&self, gateway: &Gateway) {
        let limit = MAX_OPEN
            .min(gateway.config().server.max_rollouts / 2)
            .max(1);
        loop {
            let oldest = {
                let mut known = self.known();
                let idle = |id: &EpisodeId| {
                    let rollout = gateway.rollouts().find(id.as_str());
                    rollout.is_none_or(|r| r.session().stats().running == 0)
                };
                // The last one is about to be called.
                let candidates = known.open.len().saturating_sub(limit);
                let found = known.open.iter().take(candidates).position(idle);
                found.and_then(|at| known.open.remove(at))
            };
            let Some(id) = oldest else {
                return;
            };
            if gateway.rollouts().find(id.as_str()).is_some()
                && let Err(error) = gateway.finish(&id, None).await
            {
                tracing::error!(rollout = %id, %error, "a conversation could not be stored");
            }
        }
    }
}

/// The key of the messages up to each one, with the role of that one.
fn prompt_keys(messages: &[Message]) -> Vec<(Key, Role)> {
    let mut at = Key::default();
    messages
        .iter()
        .map(|message| {
            at = keys::after(&at, message);
            (at, message.role)
        })
        .collect()
}
