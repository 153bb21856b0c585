//! Finds the model's turns in a request by their content, at any position: a history that was cut, moved or
//! summarized contains some of them, a new conversation contains none.
//!
//! A conversation that starts over while repeating turns of the model has been rewritten by its client
//! (compaction, a dropped message). It is captured as a fork of the graph, and counted.

use crate::keys::{self, Key};
use sinew_types::{Message, Role};
use std::collections::HashSet;

/// Minimum bytes of a turn that is recognized by its text only. A shorter turn may equal the text of another
/// speaker, so it counts only after the message that it answered.
const SHORT_BYTES: u64 = 32;

#[derive(Clone, Debug, Default)]
pub(super) struct KnownTurns {
    /// Turns that are long enough to be recognized by their text only.
    long: HashSet<Key>,
    /// All turns with the hash of the message before them, and first turns of a shortened history.
    after: HashSet<(Option<Key>, Key)>,
    /// Ids of tool calls.
    calls: HashSet<String>,
}

impl KnownTurns {
    /// Records that the model answered `before` with `turn`.
    pub(super) fn add(&mut self, before: Option<Key>, turn: &Message) {
        let key = keys::loose(turn);
        if sinew_dialect::message_bytes(turn) >= SHORT_BYTES {
            self.long.insert(key);
        }
        self.after.extend([(before, key), (None, key)]);
        let ids = turn.tool_calls.iter().map(|call| call.id.clone());
        self.calls.extend(ids);
    }

    /// Whether any of these messages is a turn of the model, or the result of one of its calls.
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
