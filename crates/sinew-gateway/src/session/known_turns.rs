//! Finds the model's turns in a request by their content, at any position: a history that was cut, moved or
//! summarized contains some of them, a new conversation contains none.
//!
//! A conversation that starts over while repeating turns of the model has been rewritten by its client
//! (compaction, a dropped message). It is captured as a fork of the graph, and counted.

use crate::keys::{self, Key};
use sinew_types::{Message, Role};
use std::collections::HashMap;

/// Minimum bytes of a turn that is recognized by its text only. A shorter turn may equal the text of another
/// speaker, so it counts only after the message that it answered.
const SHORT_BYTES: u64 = 32;

#[derive(Clone, Debug, Default)]
pub(super) struct KnownTurns {
    /// Turns that are long enough to be recognized by their text only. The values of all maps are the number
    /// of messages before the turn.
    long: HashMap<Key, u32>,
    /// All turns with the hash of the message before them, and first turns of a shortened history.
    after: HashMap<(Option<Key>, Key), u32>,
    /// Turns by the ids of their tool calls.
    calls: HashMap<String, u32>,
}

impl KnownTurns {
    /// Records that the model answered `before` with `turn`, which is message `at` of its conversation.
    pub(super) fn add(&mut self, before: Option<Key>, turn: &Message, at: u32) {
        let key = keys::loose(turn);
        if sinew_dialect::message_bytes(turn) >= SHORT_BYTES {
            self.long.insert(key, at);
        }
        self.after.extend([((before, key), at), ((None, key), at)]);
        let ids = turn.tool_calls.iter();
        self.calls.extend(ids.map(|call| (call.id.clone(), at)));
    }

    /// Whether fewer messages precede the first turn of the model in these messages, or the first result of
    /// one of its calls, than when it was sampled; `None` if they have neither.
    pub(super) fn moved_up(&self, messages: &[Message]) -> Option<bool> {
        let mut before = None;
        messages.iter().zip(0u32..).find_map(|(message, now)| {
            let then = match message.role {
                Role::Assistant => {
                    let key = keys::loose(message);
                    let long = self.long.get(&key);
                    long.or_else(|| self.after.get(&(before, key))).copied()
                }
                Role::Tool => {
                    let id = message.tool_call_id.as_ref();
                    // A result follows its call.
                    id.and_then(|id| self.calls.get(id)).map(|at| at + 1)
                }
                Role::System | Role::User => None,
            };
            if message.role != Role::System {
                before = Some(keys::exact(message));
            }
            then.map(|then| now < then)
        })
    }
}
