//! Finds the model's turns by their content, wherever a client puts them: a history that was cut, moved or
//! summarized has some of them in it, a new conversation has none.
//!
//! A conversation that starts over while repeating turns of the model has been rewritten by its client
//! (compaction, a dropped message). It is captured as a fork of the graph, and counted.

use crate::keys::{self, Key};
use sinew_types::{Message, Role};
use std::collections::HashSet;

/// A turn with fewer bytes may have the text of another speaker: it counts only after the message that it
/// answered.
const SHORT_BYTES: u64 = 32;

#[derive(Clone, Debug, Default)]
pub(super) struct KnownTurns {
    /// Turns that are long enough to be known by themselves.
    long: HashSet<Key>,
    /// Any turn with the message before it, and first turns of a window.
    after: HashSet<(Option<Key>, Key)>,
    /// Calls of tools, by id.
    calls: HashSet<String>,
}

impl KnownTurns {
    /// The model has answered `before` with `turn`.
    pub(super) fn add(&mut self, before: Option<Key>, turn: &Message) {
        let key = keys::loose(turn);
        if sinew_dialect::message_bytes(turn) >= SHORT_BYTES {
            self.long.insert(key);
        }
        self.after.extend([(before, key), (None, key)]);
        let ids = turn.tool_calls.iter().map(|call| call.id.clone());
        self.calls.extend(ids);
    }

    /// Whether one of these messages is a turn of the model's, or the result of its call.
    pub(super) fn any_of(&self, messages: &[Message]) -> bool {
        let mut before = None;
        messages.iter().any(|message| {
            let found = match message.role {
                Role::Assistant => {
                    let key = keys::loose(message);
                    self.long.contains(&key) || self.after.contains(&(before, key))
                }
                Role::Tool => {
                    let id = message.tool_call_id.as_ref();
                    id.is_some_and(|id| self.calls.contains(id))
                }
                Role::System | Role::User => false,
            };
            if message.role != Role::System {
                before = Some(keys::exact(message));
            }
            found
        })
    }
}
